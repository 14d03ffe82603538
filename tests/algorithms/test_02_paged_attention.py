"""Notebook 02's algorithms and the paged cache hold, their broken twins are caught, its exercises tell right from wrong."""

from __future__ import annotations

import itertools
import math
import random
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import notebook_cells
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from notebook_cells import checked_functions
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from helpers import corpora, exercises, kv_adapter, models, paged_kv, plots
from helpers.course.build import find, read_source
from helpers.engines import transformers_engine
from helpers.errors import DataError, EngineError, ModelError
from helpers.memory import committed_bytes
from helpers.paths import ROOT
from helpers.profile import PROFILES
from helpers.workload import Request, Workload

NAME = "02_paged_attention"
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=60, num_attention_heads=4)
CONFIGS = {
    "GQA": LlamaConfig(**SIZES, num_key_value_heads=2),
    "MHA": LlamaConfig(**SIZES, num_key_value_heads=4),
    "explicit head_dim, untied": LlamaConfig(**SIZES, num_key_value_heads=1, head_dim=12, tie_word_embeddings=False),
    "biases": Qwen2Config(**SIZES, num_key_value_heads=2),
}
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="committing pages on demand is shown with Linux's mmap")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def nb(load_algorithms):
    return load_algorithms(NAME)


_tiny: dict[str, torch.nn.Module] = {}


def tiny(config):
    """A random model whose every weight and bias is far from zero, so that no term can be left out unseen. Made once."""
    key = config.to_json_string()
    if key not in _tiny:
        torch.manual_seed(1)
        _tiny[key] = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in _tiny[key].parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    torch.manual_seed(1)
    return _tiny[key]


def twin_of(*mutations: tuple[str, str]) -> ModuleType:
    """`helpers.paged_kv` with seeded bugs; each must change the source exactly once."""
    source = (ROOT / "helpers" / "paged_kv.py").read_text(encoding="utf-8")
    for old, new in mutations:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in paged_kv.py"
        source = source.replace(old, new)
    module = ModuleType("paged_kv_twin")
    sys.modules["paged_kv_twin"] = module  # dataclasses look their module up
    exec(compile(source, "paged_kv_twin", "exec"), module.__dict__)
    return module


# -- the block manager under random operations ---------------------------------------------------------------------------
class Reference:
    """A manager beside a model of memory: what each slot holds, and what each sequence must read back.

    Writing a token stores all tokens up to it in its slot. Reading a sequence through its slots must give exactly what it
    wrote, whatever others did in between. Every operation ends in `check`.
    """

    def __init__(self, kv: ModuleType, n_blocks: int = 12, block_size: int = 3) -> None:
        self.kv, self.size, self.n_blocks = kv, block_size, n_blocks
        self.manager = kv.BlockManager(n_blocks, block_size, enable_prefix_caching=True)
        self.memory: list[tuple[int, ...] | None] = [None] * (n_blocks * block_size)
        self.texts: dict[str, list[int]] = {}
        self.n_operations = self.n_hits = self.n_copies = self.n_refused = 0

    def new_id(self) -> str:
        return f"s{self.n_operations}"

    def write(self, seq_id: str, start: int) -> None:
        """Compute the tokens from `start` on; nothing may be written into a block that another sequence holds."""
        text = self.texts[seq_id]
        for position, slot in zip(range(start, len(text)), self.manager.slots(seq_id, start, len(text)), strict=True):
            holders = sum(slot // self.size in self.manager.table(other) for other in self.texts)
            assert holders == 1, "a block was written while shared"
            self.memory[slot] = tuple(text[: position + 1])
        self.manager.commit(seq_id)

    def refused(self, before: tuple[int, list[str]]) -> None:
        self.n_refused += 1
        assert (self.manager.n_free, self.manager.sequences) == before, "a refusal changed something"

    def allocate(self, text: list[int]) -> None:
        seq_id, before = self.new_id(), (self.manager.n_free, self.manager.sequences)
        try:
            n_cached = self.manager.allocate(seq_id, text)
        except self.kv.OutOfBlocks:
            assert math.ceil(len(text) / self.size) > self.manager.n_free, "refused although it fits"
            self.refused(before)
            return
        self.n_hits += n_cached > 0
        assert n_cached % self.size == 0
        assert n_cached < len(text), "nothing is left to compute, so there are no logits"
        self.texts[seq_id] = list(text)
        self.write(seq_id, n_cached)

    def append(self, seq_id: str, new: list[int]) -> None:
        before = (self.manager.n_free, self.manager.sequences)
        try:
            copies = self.manager.append(seq_id, new)
        except self.kv.OutOfBlocks:
            self.refused(before)
            return
        for source, target in copies:
            self.n_copies += 1
            for offset in range(self.size):
                self.memory[target * self.size + offset] = self.memory[source * self.size + offset]
        start = len(self.texts[seq_id])
        self.texts[seq_id] += new
        self.write(seq_id, start)

    def fork(self, parent: str) -> None:
        child, used = self.new_id(), self.manager.n_used
        self.manager.fork(parent, child)
        assert self.manager.n_used == used, "a fork takes no block"
        self.texts[child] = list(self.texts[parent])

    def free(self, seq_id: str) -> None:
        self.manager.free(seq_id)
        del self.texts[seq_id]
        with pytest.raises(EngineError):
            self.manager.free(seq_id)

    def check(self) -> None:
        self.n_operations += 1
        manager = self.manager
        manager.check()
        assert manager.n_used + manager.n_free == self.n_blocks, "capacity"
        assert manager.n_logical == sum(math.ceil(len(text) / self.size) for text in self.texts.values())
        for seq_id, text in self.texts.items():
            read = [self.memory[slot] for slot in manager.slots(seq_id, 0, len(text))]
            assert read == [tuple(text[: i + 1]) for i in range(len(text))], f"{seq_id} reads what others wrote"

    def end(self) -> None:
        for seq_id in list(self.texts):
            self.free(seq_id)
        assert self.manager.n_free == self.n_blocks, "blocks have leaked"


def machine_for(kv: ModuleType, counts: list[int]) -> type[RuleBasedStateMachine]:
    """The same operations chosen by hypothesis, which shrinks what goes wrong; `counts` collects each run's length."""
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=10)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.ref = Reference(kv)

        def pick(self, data) -> str:
            return data.draw(st.sampled_from(list(self.ref.texts)))

        @rule(text=tokens, data=st.data(), continues=st.booleans())
        def allocate(self, text, data, continues) -> None:
            known = self.ref.texts[self.pick(data)] if continues and self.ref.texts else []
            self.ref.allocate(known[: 3 * len(text)] + text)
            self.ref.check()

        @precondition(lambda self: self.ref.texts)
        @rule(new=st.lists(st.integers(0, 1), max_size=5), data=st.data())
        def append(self, new, data) -> None:
            self.ref.append(self.pick(data), new)
            self.ref.check()

        @precondition(lambda self: self.ref.texts)
        @rule(data=st.data())
        def fork(self, data) -> None:
            self.ref.fork(self.pick(data))
            self.ref.check()

        @precondition(lambda self: self.ref.texts)
        @rule(data=st.data())
        def free(self, data) -> None:
            self.ref.free(self.pick(data))
            self.ref.check()

        def teardown(self) -> None:
            counts.append(self.ref.n_operations)
            self.ref.end()

    return Machine


def walk(kv: ModuleType, n_operations: int, seed: int = 0) -> Reference:
    """One long seeded walk, in which every block is reused many times."""
    rng, ref = random.Random(seed), Reference(kv)
    while ref.n_operations < n_operations:
        kind = rng.choice(["allocate", "append", "append", "fork", "free"]) if ref.texts else "allocate"
        kind = "free" if len(ref.texts) > 5 else kind  # a pool that stays full refuses everything
        seq_id = rng.choice(list(ref.texts)) if ref.texts else ""
        new = [rng.randint(0, 1) for _ in range(rng.randint(1, 8))]
        if kind == "allocate":
            known = ref.texts[seq_id] if seq_id and rng.random() < 0.5 else []
            ref.allocate((known + new)[: rng.randint(1, len(known) + len(new))])
        elif kind == "append":
            ref.append(seq_id, new)
        else:
            getattr(ref, kind)(seq_id)
        ref.check()
    ref.end()
    return ref


def test_the_block_manager_survives_ten_thousand_random_operations():
    counts: list[int] = []
    rounds = settings(max_examples=50, stateful_step_count=50, deadline=None, database=None)
    while sum(counts) < 10_000:  # hypothesis draws the length of each run, so their number is not known before
        run_state_machine_as_test(machine_for(paged_kv, counts), settings=rounds)


def test_a_long_walk_meets_hits_copies_and_refusals():
    ref = walk(paged_kv, 8000)
    assert min(ref.n_hits, ref.n_copies, ref.n_refused) >= 50, (ref.n_hits, ref.n_copies, ref.n_refused)


MANAGER_TWINS = {
    "a lost reference count (the copier keeps the original)": ("            self._release(table[-1])\n", ""),
    "a lost reference count (a fork does not count)": (
        "        for block in table:\n            self._share(block)\n        self._tables[child_id]",
        "        self._tables[child_id]",
    ),
    "an off-by-one at a block edge (one block too few)": (
        "return -(-n_tokens // self.block_size)",
        "return n_tokens // self.block_size + (n_tokens % self.block_size > 1)",
    ),
    "an off-by-one at a block edge (a full block is copied)": (
        "len(held) % self.block_size != 0",
        "(len(held) + 1) % self.block_size != 0",
    ),
    "a slot in the neighbouring block": ("table[position // size] * size", "table[(position + 1) // size] * size"),
    "a stale hash after reuse": ("            del self._block_of[key]\n", "            pass\n"),
    "a stale hash after reuse, on both sides": ("key = self._hash_of.pop(block, None)", "key = None"),
    "a zero-length prefill on a full hit": ("range((len(token_ids) - 1) // size", "range(len(token_ids) // size"),
    "hashes that forget the beginning": ("hashlib.sha256(parent + array", "hashlib.sha256(array"),
    "a block written while shared": ("must_copy = writes_last and self.ref_counts[table[-1]] > 1", "must_copy = False"),
    "a copy that others see": ("            table[-1] = copies[0].target\n", ""),
    "a revived block that stays free": (
        "        if self.ref_counts[block] == 0:\n            del self._free[block]\n",
        "",
    ),
    "a block that is never free again": ("            self._free[block] = None\n", "            pass\n"),
    "revived blocks not counted in the demand": (
        "self._demand(n_new + sum(self.ref_counts[block] == 0 for block in shared))",
        "self._demand(n_new)",
    ),
    "tokens named before they are written": (
        "len(held) if n_tokens is None else n_tokens) // size)",
        "len(held) + size if n_tokens is None else n_tokens) // size)",
    ),
}


@pytest.mark.parametrize("name", MANAGER_TWINS)
def test_a_broken_manager_is_caught(name):
    twin = twin_of(MANAGER_TWINS[name])
    with pytest.raises((AssertionError, LookupError, EngineError)):
        walk(twin, 2500)


def test_a_manager_refuses_what_makes_no_sense():
    manager = paged_kv.BlockManager(2, 4)
    with pytest.raises(EngineError, match="holds nothing"):
        paged_kv.BlockManager(0, 4)
    with pytest.raises(EngineError, match="has no tokens"):
        manager.allocate("a", [])
    manager.allocate("a", [1] * 5)
    with pytest.raises(EngineError, match="has blocks already"):
        manager.allocate("a", [1])
    with pytest.raises(EngineError, match="positions 0 to 5"):
        manager.slots("a", 0, 6)
    with pytest.raises(paged_kv.OutOfBlocks, match="1 blocks are needed, 0 of 2 are free"):
        manager.append("a", [1] * 4)


def test_the_block_freed_longest_ago_is_taken_first_and_a_sequence_loses_its_end_first():
    manager = paged_kv.BlockManager(3, 1)
    manager.allocate("a", [1, 2])
    manager.free("a")
    assert list(manager._free) == [2, 1, 0]


def test_only_written_blocks_are_shared():
    """In a chunked prefill a second request must not find blocks whose keys are not there yet."""
    manager = paged_kv.BlockManager(8, 2, enable_prefix_caching=True)
    manager.allocate("a", [1, 2, 3, 4, 5])
    assert manager.cached_prefix([1, 2, 3, 4, 5]) == []
    manager.commit("a", 3)
    assert manager.cached_prefix([1, 2, 3, 4, 5]) == manager.table("a")[:1]
    manager.commit("a")
    assert manager.cached_prefix([1, 2, 3, 4, 5]) == manager.table("a")[:2]


# -- the model over the pool -----------------------------------------------------------------------------------------------
def check_paged_model(kv: ModuleType, config, block_size: int, seed: int = 0) -> None:
    """Random sequences in random chunks, mixed with decodes, forks and frees: every step's logits are the plain model's."""
    rng, model = random.Random(seed), tiny(config)
    manager = kv.BlockManager(60 // block_size + 4, block_size, enable_prefix_caching=True)
    cache = kv.PagedKVCache.for_model(model, manager.n_blocks, block_size)
    paged = kv.PagedModel(model, cache, manager)
    texts = {name: [rng.randrange(60) for _ in range(rng.randint(3, 12))] for name in "abc"}
    done = {name: manager.allocate(name, text) for name, text in texts.items()}

    def run_step(chunks: dict[str, int]) -> None:
        feeds = [kv.Feed(name, done[name], texts[name][done[name] : done[name] + n]) for name, n in chunks.items()]
        logits = paged.step(feeds)
        for row, feed in zip(logits, feeds, strict=True):
            done[feed.seq_id] += len(feed.token_ids)
            expected = model(torch.tensor([texts[feed.seq_id][: done[feed.seq_id]]])).logits[0, -1]
            assert torch.allclose(row, expected, atol=1e-4), (feed, float((row - expected).abs().max()))
            manager.commit(feed.seq_id, done[feed.seq_id])

    for step in range(10):
        if step == 4:
            ready = next(name for name in texts if done[name] == len(texts[name]))
            manager.fork(ready, "d")
            texts["d"], done["d"] = list(texts[ready]), done[ready]
        if step == 7:
            manager.free("d")
            texts["e"] = [*texts["a"][:9], 1, 2]
            done.pop("d")
            texts.pop("d")
            done["e"] = manager.allocate("e", texts["e"])
        for name in texts:
            if done[name] == len(texts[name]):
                new = [rng.randrange(60)]
                cache.copy_blocks(manager.append(name, new))
                texts[name] += new
        run_step({name: rng.randint(1, min(5, len(texts[name]) - done[name])) for name in texts})
    manager.check()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_paged_model_is_the_plain_model(name, block_size):
    for seed in range(4 if name == "GQA" and block_size == 3 else 1):  # the seeds that broken twins must fail
        check_paged_model(paged_kv, CONFIGS[name], block_size, seed)


MODEL_TWINS = {
    "keys and values exchanged": (
        "self.values[layer].index_copy_(0, slots, v)",
        "self.values[layer].index_copy_(0, slots, k)",
    ),
    "a token that does not see itself": (
        "<= last_seen[:, None, :, None]",
        "< last_seen[:, None, :, None].clamp(min=1)",
    ),
    "a chunk that forgets what was cached": (
        "last_seen = torch.tensor([feed.start for feed in feeds], device=self.device)[:, None] + new",
        "last_seen = torch.tensor([0 for feed in feeds], device=self.device)[:, None] + new",
    ),
    "positions that start at zero in every chunk": (
        "for p in range(feed.start, feed.start + len(feed.token_ids))]",
        "for p in range(len(feed.token_ids))]",
    ),
    "a copy of keys without values": ("for pool in (self.keys, self.values):", "for pool in (self.keys,):"),
    "the first layer written for all": (
        "self.keys[layer].index_copy_(0, slots, k)",
        "self.keys[0].index_copy_(0, slots, k)",
    ),
    "rows of a batch mixed up": (
        "out[rows.flatten()] = got.flatten(0, 1)",
        "out[rows.flip(0).flatten()] = got.flatten(0, 1)",
    ),
    "the logits of a feed's first token": (
        ".cumsum(0) - 1",
        ".cumsum(0) - torch.tensor([len(f.token_ids) for f in feeds])",
    ),
}


@pytest.mark.parametrize("name", MODEL_TWINS)
def test_a_broken_paged_model_is_caught(name):
    twin = twin_of(MODEL_TWINS[name])
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(4):
            check_paged_model(twin, CONFIGS["GQA"], 3, seed)


def test_copies_are_carried_out_in_order():
    cache = paged_kv.PagedKVCache(1, 3, 2, 1, 1)
    cache.keys[0, :, 0, 0] = torch.arange(6.0)
    cache.copy_blocks([paged_kv.BlockCopy(0, 1), paged_kv.BlockCopy(1, 2)])
    assert cache.keys.flatten().tolist() == [0, 1, 0, 1, 0, 1]


def test_a_model_of_another_kind_is_refused():
    model = tiny(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4))
    with pytest.raises(ModelError, match="full attention"):
        paged_kv.PagedModel(model, paged_kv.PagedKVCache.for_model(model, 2, 4), paged_kv.BlockManager(2, 4))


# -- the notebook's algorithms -----------------------------------------------------------------------------------------------
def check_attention(nb: SimpleNamespace, n_tokens: int, block_size: int, q_per_kv: int) -> None:
    n_blocks = -(-n_tokens // block_size)
    table = torch.randperm(n_blocks + 3)[:n_blocks].tolist()
    k, v = torch.randn(2, n_tokens, 2, 4, dtype=torch.double).unbind()
    keys, values = (torch.full(((n_blocks + 3) * block_size, 2, 4), float("nan"), dtype=torch.double) for _ in range(2))
    slots = nb.slots_of(table, 0, n_tokens, block_size)
    keys[slots], values[slots] = k, v
    q = 3 * torch.randn(2 * q_per_kv, 4, dtype=torch.double)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None, :, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], enable_gqa=True
    )[0, :, 0]
    got = nb.attend_by_blocks(q, keys, values, table, n_tokens, block_size)
    assert torch.allclose(got, expected, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(n_tokens=st.integers(1, 40), block_size=st.integers(1, 9), q_per_kv=st.integers(1, 3))
def test_attention_by_blocks_is_attention(nb, n_tokens, block_size, q_per_kv):
    check_attention(nb, n_tokens, block_size, q_per_kv)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 30), size=st.integers(1, 7), data=st.data())
def test_slots_and_block_names(nb, n, size, data):
    table = data.draw(st.permutations(range(-(-n // size) + 2)))[: -(-n // size)]
    slots = nb.slots_of(table, 0, n, size)
    assert len(set(slots)) == n and [s // size for s in slots] == [table[p // size] for p in range(n)]
    assert nb.slots_of(table, n - 1, n, size) == slots[-1:]
    text = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    names = nb.block_names(text, size)
    assert len(names) == n // size and nb.block_names(text[: size * len(names)], size) == names
    if names:
        changed = nb.block_names([text[0] + 1, *text[1:]], size)
        assert not set(changed) & set(names), "a block's name must depend on everything before it"


def check_pools(nb: SimpleNamespace) -> None:
    """Accounting of the replay: shares add up, capacity holds, and each policy reserves what it says."""
    assert nb.reservation("maximum", 10, 5, 64) == 64 and nb.reservation("oracle", 10, 5, 64) == 15
    assert nb.reservation("power of two", 10, 25, 64) == 42 and nb.reservation("power of two", 10, 16, 64) == 26
    assert nb.reservation("power of two", 40, 24, 64) == 64, "never more than the context"
    pool = nb.ContiguousPool(100, "oracle", 100)
    first, second, third = (pool.enter(n, 0) for n in (30, 30, 30))
    assert [first, second, third] == [(0, 30), (30, 60), (60, 90)]
    pool.leave(first)
    assert pool.enter(35, 0) is None, "40 slots are free, but in holes of 30 and 10"
    assert pool.enter(10, 0) == (0, 10) and pool.enter(20, 0) == (10, 30), "first fit"
    pool = nb.ContiguousPool(100, "oracle", 100, buddies=True)
    small, large = pool.enter(5, 0), pool.enter(10, 6)
    assert (small, large) == ((0, 8), (16, 32)), "powers of two at multiples of their size"
    assert pool.enter(5, 2) == (8, 16), "the buddy of a small piece is still free"
    assert pool.enter(33, 0) is None and pool.enter(30, 2) == (32, 64) and pool.enter(32, 0) == (64, 96)
    assert pool.enter(3, 1) == (96, 100) and pool.enter(1, 0) is None, (
        "the end of a pool that is no power of two serves too"
    )
    paged = nb.PagedPool(40, 4)
    held = paged.enter(5, 9)
    assert paged.size(held) == 8 and paged.grow(held, 8) and paged.size(held) == 8
    assert paged.grow(held, 9) and paged.size(held) == 12 and paged.free == 7
    assert paged.grow(held, 41) is None and paged.size(held) == 12
    paged.leave(held)
    assert paged.free == 10
    rng = random.Random(0)
    lengths = [(rng.randint(1, 30), rng.randint(1, 30)) for _ in range(60)]
    seen = {}
    for name in ("maximum", "power of two", "oracle", "buddies", "paged"):
        pool = nb.PagedPool(256, 4) if name == "paged" else nb.ContiguousPool(256, name, 64)
        pool = nb.ContiguousPool(256, "oracle", 64, buddies=True) if name == "buddies" else pool
        result = nb.replay(lengths, pool)
        parts = [result[key] for key in ("tokens", "reserved for later", "never used", "free")]
        assert min(parts) >= 0 and abs(sum(parts) - 256) < 1e-9, result
        seen[name] = result
    assert seen["maximum"]["requests"] == 4 and seen["oracle"]["never used"] == 0
    assert seen["buddies"]["tokens"] < seen["oracle"]["tokens"] and seen["buddies"]["never used"] > 0
    again = nb.replay([(5, 4), (5, 4), (1, 1)], nb.PagedPool(12, 3))
    assert (again["evicted"], again["read again"]) == (1, 6), (
        "thrown out with six tokens, when the first wants a third block"
    )
    assert (
        seen["maximum"]["tokens"] < seen["power of two"]["tokens"] < seen["oracle"]["tokens"] < seen["paged"]["tokens"]
    )
    assert seen["paged"]["reserved for later"] + seen["paged"]["never used"] <= 3 * seen["paged"]["requests"]


def test_the_replay(nb):
    check_pools(nb)


def test_a_replay_of_equal_lengths_knows_no_winner(nb):
    """A control: where every request fills the context at once, no rule wastes anything."""
    full = [(63, 1)] * 40
    for pool in (nb.ContiguousPool(512, "maximum", 64), nb.ContiguousPool(512, "oracle", 64), nb.PagedPool(512, 8)):
        result = nb.replay(full, pool)
        assert result["requests"] == 8 and result["evicted"] == 0


def test_a_full_pool_evicts_and_goes_on_and_a_request_that_can_never_fit_is_told(nb):
    result = nb.replay([(1, 30)] * 40, nb.PagedPool(64, 4))
    assert 0 < result["evicted"] < result["read again"] and 2 < result["requests"] <= 16
    with pytest.raises(ValueError, match="does not fit"):
        nb.replay([(100, 1)], nb.PagedPool(64, 4))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5), st.integers(1, 20))
def test_waste_in_the_last_block(nb, lengths, size):
    share, mean = nb.last_block_waste(lengths, size)
    moments = [n for p, o in lengths for n in range(p, p + o)]
    slots = [math.ceil(n / size) * size for n in moments]
    assert mean == pytest.approx(sum(moments) / len(moments))
    if sum(slots):
        assert share == pytest.approx(sum(s - n for s, n in zip(slots, moments, strict=True)) / sum(slots))


def test_the_half_block_rule_on_the_serving_trace(nb):
    lengths = corpora.serving_lengths("azure-conversation-2023").sample(60)
    for size in (8, 16, 64):
        share, mean = nb.last_block_waste(lengths, size)
        assert share == pytest.approx(nb.half_block_rule(size, mean), rel=0.1)
    assert nb.half_block_rule(1, 100) == 0 and nb.half_block_rule(16, 180) == pytest.approx(0.04)


@linux_only
def test_pages_are_committed_when_they_are_written_and_given_back(nb):
    buffer = nb.OnDemandBuffer(100_000, 3, 64)
    address = buffer.tensor.data_ptr()
    assert buffer.tensor.shape == (100_000, 3, 64) and committed_bytes(address, buffer.n_bytes) == 0
    buffer.tensor[:1000] = 1.0
    committed = committed_bytes(address, buffer.n_bytes)
    assert 0 <= committed - 1000 * 3 * 64 * 4 <= 4096
    buffer.release()
    assert committed_bytes(address, buffer.n_bytes) == 0 and buffer.tensor[:1000].abs().sum() == 0
    with pytest.raises(EngineError, match="does not know the memory"):
        committed_bytes(4096, 4096)


# -- the notebook's decoders on a small model ---------------------------------------------------------------------------------
def small_paged(n_blocks: int, block_size: int, kv: ModuleType = paged_kv):
    model = tiny(CONFIGS["GQA"])
    return kv.PagedModel(
        model, kv.PagedKVCache.for_model(model, n_blocks, block_size), kv.BlockManager(n_blocks, block_size)
    )


def greedy(model, prompt: list[int], n: int) -> list[int]:
    return kv_adapter.decode_greedy(model, kv_adapter.new_cache("dynamic", model.config), torch.tensor(prompt), n)[0]


def check_serving(nb: SimpleNamespace, n_blocks: int, block_size: int, *, preempts: bool) -> None:
    paged = small_paged(n_blocks, block_size)
    rng = random.Random(3)
    requests = [(f"r{i}", [rng.randrange(60) for _ in range(rng.randint(1, 9))], rng.randint(1, 9)) for i in range(7)]
    outputs, batches, preempted = nb.serve(paged, requests)
    for seq_id, prompt, n in requests:
        assert outputs[seq_id] == greedy(paged.model, prompt, n), seq_id
    assert paged.manager.n_used == 0 and (preempted > 0) is preempts
    assert sum(batches) == sum(n for _, _, n in requests)


def test_serving_gives_each_request_its_own_answer(nb):
    check_serving(nb, 40, 4, preempts=False)
    check_serving(nb, 3, 18, preempts=False)


@pytest.mark.parametrize("n_blocks", [6, 7, 8])
def test_preemption_changes_no_answer(nb, n_blocks):
    check_serving(nb, n_blocks, 3, preempts=True)


def check_samples(nb: SimpleNamespace) -> None:
    """Each sample, drawn again by itself from the plain model's distribution, is the same; blocks are shared as counted."""
    paged, prompt = small_paged(40, 4), list(range(2, 12))
    samples, (logical, physical) = nb.parallel_sampling(paged, prompt, 3, 7, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    texts = [list(prompt) for _ in samples]
    for _ in range(7):
        rows = torch.stack([paged.model(torch.tensor([text])).logits[0, -1] for text in texts])
        drawn = torch.multinomial(rows.softmax(-1), 1, generator=generator)[:, 0].tolist()
        texts = [[*text, token] for text, token in zip(texts, drawn, strict=True)]
    assert samples == [text[len(prompt) :] for text in texts]
    assert (logical, physical) == (3 * 5, 2 + 3 * 3) and paged.manager.n_used == 0


def check_beams(nb: SimpleNamespace) -> None:
    paged, prompt = small_paged(60, 2), [3, 1, 4, 1, 5]
    beams, (logical, physical) = nb.beam_search(paged, prompt, 3, 6)
    found = paged.model.generate(
        torch.tensor([prompt]),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    assert beams == found[:, len(prompt) :].tolist()
    assert logical == 3 * 6 and physical < logical and paged.manager.n_used == 0


def test_samples_do_not_disturb_each_other(nb):
    check_samples(nb)


def test_beam_search_is_transformers_own(nb):
    check_beams(nb)


NOTEBOOK_TWINS = {
    "a slot one block too early": (
        "return [table[p // block_size] * block_size + p % block_size for p in range(start, stop)]",
        "return [table[(p - (p > 0)) // block_size] * block_size + p % block_size for p in range(start, stop)]",
    ),
    "the last block read to its end": (
        "filled = min(block_size, n_tokens - index * block_size)",
        "filled = block_size",
    ),
    "old sums not scaled down": ("total = total * shrink", "total = total"),
    "query heads paired with the wrong KV head": (
        "k = keys[part].repeat_interleave(q_per_kv, dim=1)",
        "k = keys[part].repeat(1, q_per_kv, 1)",
    ),
    "names that forget the beginning": ("parent = hash((parent, tuple(", "parent = hash((tuple("),
    "a power of two of the whole request": (
        "n_prompt + 2 ** math.ceil(math.log2(n_output))",
        "2 ** math.ceil(math.log2(n_prompt + n_output))",
    ),
    "an oracle that forgets the prompt": ("return n_prompt + n_output  # oracle", "return n_output  # oracle"),
    "a hole one slot too small is taken": ("if a - start >= size:", "if a - start >= size - 5:"),
    "buddies of any size": (
        "size = 2 ** math.ceil(math.log2(size)) if self.buddies else size",
        "size = size",
    ),
    "buddies that begin anywhere": ("start = -(-b // step) * step", "start = b"),
    "evictions without their price": ("read_again + n_tokens_lost", "read_again"),
    "blocks never given back": ("        self.free += held[0]\n", "        pass\n"),
    "a block too many for a full one": (
        "needed = -(-n_tokens // self.block_size) - held[0]",
        "needed = n_tokens // self.block_size + 1 - held[0]",
    ),
    "a beam kept beside its children": (
        "        for beam in beams:\n            manager.free(beam)\n        found",
        "        found",
    ),
    "beams with their neighbour's parent": (
        "manager.fork(beams[parent], child)",
        "manager.fork(beams[parent - 1], child)",
    ),
    "samples at one position too late": (
        "Feed(name, len(prompt_ids) + step, sample[-1:])",
        "Feed(name, len(prompt_ids) + max(0, step - 1), sample[-1:])",
    ),
    "a preempted request that forgets its answer": ("ids = [*prompt_ids, *outputs[seq_id]]", "ids = [*prompt_ids]"),
    "a copy that is not made": (
        "paged.cache.copy_blocks(manager.append(name, [token]))",
        "manager.append(name, [token])",
    ),
}


@pytest.mark.parametrize("name", NOTEBOOK_TWINS)
def test_a_broken_algorithm_is_caught(load_algorithms, name):
    twin = load_algorithms(NAME, NOTEBOOK_TWINS[name])
    with pytest.raises((AssertionError, RuntimeError, LookupError, EngineError, TypeError, ValueError)):
        for n, size, group in ((1, 4, 1), (9, 4, 2), (20, 4, 3), (8, 4, 1)):
            check_attention(twin, n, size, group)
        names = twin.block_names([1, 2, 3, 4], 2)
        assert not set(names) & set(twin.block_names([9, 2, 3, 4], 2))
        check_pools(twin)
        check_samples(twin)
        check_beams(twin)
        check_serving(twin, 7, 3, preempts=True)


# -- what the notebook measures and draws with ------------------------------------------------------------------------------
def test_generate_on_a_loaded_model_is_the_model_itself_and_its_weights_are_not_counted_twice(monkeypatch):
    monkeypatch.setattr(transformers_engine, "resident_bytes", lambda: 10**9)
    model = tiny(CONFIGS["GQA"])
    prompts = [[3, 1, 4, 1], [5, 9], [2, 6, 5]]
    requests = tuple(Request(request_id=f"r{i}", prompt_ids=tuple(p), max_tokens=4) for i, p in enumerate(prompts))
    load = Workload(name="three", requests=requests, concurrency=3)
    settings = dict(name="tiny", max_model_len=16, max_num_seqs=2)
    record = transformers_engine.run_loaded(model, load, **settings)
    assert [trace.output_ids for trace in record.traces] == [greedy(model, p, 4) for p in prompts]
    first = [trace.first for trace in record.traces]
    assert first[0] == first[1] < first[2], "two at once, then the third"
    assert {trace.sent for trace in record.traces} == {record.started}, "all three are sent at once and wait in line"
    assert record.traces[2].ttft > record.traces[0].e2e, "its wait counts"
    assert record.memory.weights == models.weight_bytes(model)
    assert record.memory.baseline == 10**9 - record.memory.weights
    with pytest.raises(EngineError, match="the engine's context holds 7"):
        transformers_engine.run_loaded(model, load, **{**settings, "max_model_len": 7})


def test_the_waste_figure_names_every_line_and_no_two_names_touch():
    rows = [
        {"size": size, "who": who, "dots": size / mean, "line": size / mean}
        for who, mean in (("a", 50), ("b", 51), ("c", 52), ("d", 900))
        for size in (2, 4, 8)
    ]
    words = dict(title="t", xlabel="x", ylabel="y", limit=0.1, limit_label="ceiling")
    figure = plots.points_and_rule(pd.DataFrame(rows), x="size", measured="dots", rule="line", hue="who", **words)
    axes = figure.axes[0]
    figure.canvas.draw()
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    plots.plt.close(figure)
    assert set(boxes) == {"a", "b", "c", "d", "ceiling"}
    names = sorted((boxes[who] for who in "abcd"), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(names))
    assert all(box.x0 >= axes.bbox.x1 for box in names), "a name lies over the data"
    colors = [line.get_color() for line in axes.lines[:8]]
    assert colors[::2] == colors[1::2] and len(set(colors)) == 4


# -- what the notebook asks of the engines, in every profile ------------------------------------------------------------------
@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_the_load_and_the_edge_can_be_built_and_the_edge_preempts_by_formula(profile):
    """Both are built without a model: no prompt is empty, cut or sent twice, and only the edge's last request is too many."""
    cells = read_source(find([NAME])[0]).cells
    scope = {
        "run": SimpleNamespace(profile=profile),
        "conversation": corpora.serving_lengths("azure-conversation-2023"),
        "text": torch.arange(4096),
        "max_len": profile.max_model_len // 2,
        "block_size": 32 if profile.device == "cpu" else 16,
        "SEED": 0,
    }
    for mark in ("SHRINK = ", "def workload(", "no_limit = "):
        (source,) = [cell.source for cell in cells if cell.cell_type == "code" and mark in cell.source]
        exec(source, scope)
    load, serving, edge = scope["load"], scope["serving"], scope["edge"]
    assert [(len(r.prompt_ids), r.max_tokens) for r in serving.requests] == load
    assert sum(map(len, scope["prompts"])) == sum(n_prompt for n_prompt, _ in load)
    for workload in (serving, edge):
        texts = [request.prompt_ids for request in workload.requests]
        assert len(set(texts)) == len(texts)
        assert max(len(r.prompt_ids) + r.max_tokens for r in workload.requests) <= scope["max_len"]
    finished = [-(-(len(r.prompt_ids) + r.max_tokens - 1) // scope["block_size"]) for r in edge.requests]
    assert sum(finished[:-1]) <= scope["N_POOL"] < sum(finished)
    assert scope["no_limit"] == len(edge.requests) >= scope["fits"] + 1
    assert scope["no_limit"] >= len(serving.requests), "paged is not held back by the limit of the edge"


# -- data -------------------------------------------------------------------------------------------------------------------
def test_the_serving_fits_have_the_traces_means_and_say_how_good_they_are():
    for name in ("azure-conversation-2023", "azure-code-2023"):
        fit = corpora.serving_lengths(name)
        drawn = fit.sample(4000, 7)
        assert drawn == fit.sample(4000, 7) and min(min(pair) for pair in drawn) >= 1
        prompts, outputs = zip(*drawn, strict=True)
        assert sum(prompts) / 4000 == pytest.approx(fit.mean_prompt_tokens, rel=0.1)
        assert sum(outputs) / 4000 == pytest.approx(fit.mean_output_tokens, rel=0.15)
        assert 0 < max(fit.ks_distance.values()) <= 0.05 and "CC-BY" in fit.licence


def test_a_trace_in_azures_format_is_read_and_another_file_is_refused(tmp_path):
    good, bad = tmp_path / "trace.csv", tmp_path / "other.csv"
    good.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,396,109\n"
    )
    assert corpora.read_azure_trace(good) == [(374, 44), (396, 109)]
    bad.write_text("a,b\n1,2\n")
    for path in (bad, tmp_path / "missing.csv"):
        with pytest.raises(DataError, match="not an Azure LLM inference trace"):
            corpora.read_azure_trace(path)


# -- exercises ----------------------------------------------------------------------------------------------------------------
answers = partial(notebook_cells.answers, NAME)


ANSWERS = checked_functions(NAME)


def _logical_blocks(tables, spans, size):
    return [p for _, (start, stop) in zip(tables, spans, strict=True) for p in range(start, stop)]


def _edge_off_by_one(tables, spans, size):
    return [
        t[max(0, p - 1) // size] * size + p % size for t, (a, b) in zip(tables, spans, strict=True) for p in range(a, b)
    ]


def _no_multiply(tables, spans, size):
    return [t[p // size] + p % size for t, (a, b) in zip(tables, spans, strict=True) for p in range(a, b)]


def _shares_nothing(n_prompt, outputs, size):
    return sum(-(-(n_prompt + n) // size) for n in outputs)


def _shares_the_partial_block(n_prompt, outputs, size):
    shared = -(-n_prompt // size)
    return shared + sum(-(-(n_prompt + n) // size) - shared for n in outputs)


def _always_copies(n_prompt, outputs, size):
    full, partial = divmod(n_prompt, size)
    return full + (partial > 0) + sum(-(-(n_prompt + n) // size) - full for n in outputs if n)


def _the_buggy_one(*arguments):
    return answers("exercise")["buggy_append"](*arguments)


def _frees_the_original(pool, name, size):
    result = answers("solution")["mended_append"](pool, name, size)
    if result:
        pool["free"].append(result[0])
    return result


def _never_copies(pool, name, size):
    table = pool["tables"][name]
    if pool["lengths"][name] % size == 0:
        table.append(pool["free"].pop(0))
        pool["references"][table[-1]] = 1
    pool["lengths"][name] += 1


def _copies_full_blocks(pool, name, size):
    table = pool["tables"][name]
    if pool["references"][table[-1]] > 1:
        copy = (table[-1], pool["free"].pop(0))
        pool["references"][copy[0]] -= 1
        pool["references"][copy[1]] = 1
        table[-1] = copy[1]
        if pool["lengths"][name] % size:
            pool["lengths"][name] += 1
            return copy
    return answers("solution")["mended_append"](pool, name, size)


def _full_hit(prompt, cached, size):
    blocks = []
    for stop in range(size, len(prompt) + 1, size):
        if tuple(prompt[:stop]) not in cached:
            break
        blocks.append(cached[tuple(prompt[:stop])])
    return blocks, len(prompt) - size * len(blocks)


def _skips_gaps(prompt, cached, size):
    blocks = [cached[tuple(prompt[:s])] for s in range(size, len(prompt), size) if tuple(prompt[:s]) in cached]
    return blocks, len(prompt) - size * len(blocks)


def _compares_blocks_alone(prompt, cached, size):
    alone = {key[-size:]: block for key, block in cached.items()}
    blocks = []
    for stop in range(size, len(prompt), size):
        if tuple(prompt[stop - size : stop]) not in alone:
            break
        blocks.append(alone[tuple(prompt[stop - size : stop])])
    return blocks, len(prompt) - size * len(blocks)


def _waste_only(lengths, sizes, slot_price, block_price):
    return min(sorted(sizes), key=lambda s: sum(-n % s for n in lengths))


def _half_a_block(lengths, sizes, slot_price, block_price):
    return min(sorted(sizes), key=lambda s: sum(slot_price * (s - 1) / 2 + block_price * n / s for n in lengths))


def _a_block_is_always_open(lengths, sizes, slot_price, block_price):
    return min(
        sorted(sizes),
        key=lambda s: sum(slot_price * ((n // s + 1) * s - n) + block_price * (n // s + 1) for n in lengths),
    )


def _the_first_of_equals(lengths, sizes, slot_price, block_price):
    return min(sizes, key=lambda s: sum(slot_price * (-n % s) + block_price * math.ceil(n / s) for n in lengths))


def _blocks_of_four(prompt, cached, size):
    return answers("solution")["reuse_prefix"](prompt, cached, 4)


def _sizes_of_its_own(lengths, sizes, slot_price, block_price):
    return answers("solution")["best_block_size"](lengths, [1, 2, 4, 8, 16, 32, 64, 128], slot_price, block_price)


def _source_only(pool, name, size):
    copy = answers("solution")["mended_append"](pool, name, size)
    return copy and copy[0]


WRONG = [
    ("02.1", _logical_blocks, "one whole block"),
    ("02.1", _edge_off_by_one, "a table need not be in order"),
    ("02.1", _no_multiply, "one whole block"),
    ("02.2", _shares_nothing, "full prompt blocks count once"),
    ("02.2", _shares_the_partial_block, "its own version"),
    ("02.2", _always_copies, "its own version"),
    ("02.3", _the_buggy_one, "reference counts equal"),
    ("02.3", _frees_the_original, "either free or held"),
    ("02.3", _never_copies, "held by this sequence alone"),
    ("02.3", _copies_full_blocks, "keep their place"),
    ("02.3", _source_only, "a copy is asked for exactly when"),
    ("02.4", _blocks_of_four, "blocks of another size"),
    ("02.4", _full_hit, "at least one token is computed"),
    ("02.4", _skips_gaps, "first missing block"),
    ("02.4", _compares_blocks_alone, "the beginning it was computed with"),
    ("02.5", _waste_only, "only blocks cost"),
    ("02.5", _half_a_block, ""),
    ("02.5", _a_block_is_always_open, ""),
    ("02.5", _the_first_of_equals, ""),
    ("02.5", _sizes_of_its_own, "only the given sizes"),
]


@pytest.mark.parametrize(("number", "answer", "words"), WRONG, ids=[f"{n} {f.__name__}" for n, f, _ in WRONG])
def test_typical_wrong_answers_fail_with_the_property_named(number, answer, words):
    result = exercises.check(number, answer)
    assert result.state == "fail" and result.message.startswith("First broken property"), result.message
    assert words in result.message, result.message


def _solved(number, shape):
    """The solution with its value in another shape."""
    return lambda *arguments: shape(answers("solution")[ANSWERS[number]](*arguments))


def _counts_in_an_array(pool, name, size):
    copy = answers("solution")["mended_append"](pool, name, size)
    pool["references"] = np.array(pool["references"])
    return copy


UNUSUAL = {
    "02.1 a tuple": ("02.1", _solved("02.1", tuple)),
    "02.1 a generator": ("02.1", _solved("02.1", lambda slots: (s for s in slots))),
    "02.1 a chain": ("02.1", _solved("02.1", lambda slots: itertools.chain.from_iterable([slots]))),
    "02.1 an array": ("02.1", _solved("02.1", np.array)),
    "02.2 a float": ("02.2", _solved("02.2", float)),
    "02.3 a list": ("02.3", _solved("02.3", lambda copy: copy and list(copy))),
    "02.3 counts in an array": ("02.3", _counts_in_an_array),
    "02.4 an array": ("02.4", _solved("02.4", lambda pair: (np.array(pair[0], dtype=int), np.int64(pair[1])))),
    "02.4 a tensor": ("02.4", _solved("02.4", lambda pair: [torch.tensor(pair[0]), pair[1]])),
    "02.5 an integer of numpy": ("02.5", _solved("02.5", np.int64)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_right_answers_in_another_shape_pass(name):
    result = exercises.check(*UNUSUAL[name])
    assert result.state == "pass", result.message


def test_the_buggy_append_loses_blocks_and_nothing_else():
    """What exercise 02.3 says is true: outputs would be right and nothing is written while shared, but the pool leaks."""
    for function, leaked in ((answers("exercise")["buggy_append"], 1), (answers("solution")["mended_append"], 0)):
        pool = {"tables": {"a": [0]}, "lengths": {"a": 2}, "references": [1, 0, 0, 0], "free": [1, 2, 3]}
        pool["tables"]["b"], pool["lengths"]["b"], pool["references"][0] = [0], 2, 2
        assert function(pool, "b", 4) == (0, 1) and pool["tables"] == {"a": [0], "b": [1]}
        for table in pool["tables"].values():
            for block in table:
                pool["references"][block] -= 1
                if pool["references"][block] == 0:
                    pool["free"].append(block)
        assert 4 - len(pool["free"]) == leaked
