"""Notebook 04's attention programs equal dense attention in fp64, its counts equal its loops, and broken twins are caught."""

from __future__ import annotations

import itertools
import math
import os
from functools import partial
from types import SimpleNamespace

import notebook_cells
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from notebook_cells import checked_functions
from torch.utils.flop_counter import FlopCounterMode

from helpers import exercises
from helpers.paged_kv import BlockManager, PagedKVCache

NAME = "04_flash_attention"
BOUNDS = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest absolute error for inputs of unit variance; 16-bit outputs are rounded to 11 or 8 bits, and weights before them."""


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def nb(load_algorithms):
    return load_algorithms(NAME)


def exact(q, k, v, causal):
    """Output and log-sum-exp in fp64, written apart from the notebook's reference."""
    q, k, v = q.double(), k.double(), v.double()
    q_per_kv, d = q.shape[0] // k.shape[0], q.shape[2]
    scores = torch.einsum("hqd,hkd->hqk", q, k.repeat_interleave(q_per_kv, 0)) / math.sqrt(d)
    if causal:
        ends = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        scores[:, torch.arange(k.shape[1])[None] > ends] = -math.inf
    lse = scores.logsumexp(-1)
    return torch.nan_to_num(torch.exp(scores - lse[..., None])) @ v.repeat_interleave(q_per_kv, 0), lse


def made(n_kv_heads, q_per_kv, n_q, n_k, d, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((n_kv_heads * q_per_kv, n_q), (n_kv_heads, n_k), (n_kv_heads, n_k))
    return [torch.randn(h, n, d, generator=generator).to(dtype) for h, n in sizes]


def check_states(got, expected, bound):
    (out, lse), (exact_out, exact_lse) = got, expected
    assert torch.equal(lse.double().isinf(), exact_lse.isinf())
    assert not out.isnan().any()
    assert (out.double() - exact_out).abs().max() <= bound
    seen = ~exact_lse.isinf()
    if seen.any():
        assert (lse.double()[seen] - exact_lse[seen]).abs().max() <= 1e-5


SHAPES = dict(
    n_kv_heads=st.integers(1, 3),
    q_per_kv=st.integers(1, 4),
    n_q=st.integers(1, 257),
    n_k=st.integers(1, 257),
    d=st.sampled_from([16, 32, 64, 80, 128]),
    causal=st.booleans(),
    dtype=st.sampled_from(list(BOUNDS)),
)


# -- tiled --------------------------------------------------------------------------------------------------------------
def check_tiled(nb, n_kv_heads, q_per_kv, n_q, n_k, d, causal, dtype, block_q=64, block_k=64):
    q, k, v = made(n_kv_heads, q_per_kv, n_q, n_k, d, dtype)
    check_states(nb.flash_forward(q, k, v, causal, block_q, block_k), exact(q, k, v, causal), BOUNDS[dtype])


@settings(max_examples=40, deadline=None)
@given(**SHAPES, block_q=st.sampled_from([16, 33, 64, 100]), block_k=st.sampled_from([24, 32, 64, 300]))
@example(n_kv_heads=1, q_per_kv=1, n_q=257, n_k=1, d=16, causal=True, dtype=torch.float32, block_q=64, block_k=64)
@example(n_kv_heads=2, q_per_kv=3, n_q=1, n_k=257, d=80, causal=True, dtype=torch.bfloat16, block_q=64, block_k=64)
def test_tiled_attention_is_dense_attention(nb, **case):
    with torch.no_grad():
        check_tiled(nb, **case)


def test_in_fp64_only_rounding_differs(nb):
    q, k, v = made(2, 2, 100, 130, 32, torch.float64)
    check_states(nb.flash_forward(q, k, v), exact(q, k, v, True), 1e-13)
    check_states(nb.dense_attention(q, k, v), exact(q, k, v, True), 1e-13)


def test_large_logits_do_not_overflow(nb):
    for dtype, scale in ((torch.float32, 300.0), (torch.bfloat16, 100.0), (torch.float16, 100.0)):
        q, k, v = made(1, 2, 65, 65, 64, dtype)
        q = (q * scale).to(dtype)
        largest = (q.double() @ k.double().mT).abs().max() / 8
        assert largest > 200  # exp would overflow
        bound = BOUNDS[dtype] + float(largest) * 2e-6
        check = nb.flash_forward(q, k, v)
        assert (check[0].double() - exact(q, k, v, True)[0]).abs().max() <= bound


@settings(max_examples=40, deadline=None)
@given(scores=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=40))
def test_the_online_normalizer_is_a_log_sum_exp(nb, scores):
    highest, total = nb.online_normalizer(scores)
    assert highest == max(scores) and 1 <= total <= len(scores) * (1 + 1e-12)
    assert math.isclose(highest + math.log(total), float(np.logaddexp.reduce(scores)), rel_tol=1e-12, abs_tol=1e-9)


# -- split and merged ---------------------------------------------------------------------------------------------------
def check_split(nb, n_kv_heads, q_per_kv, n_k, d, dtype, n_splits):
    q, k, v = made(n_kv_heads, q_per_kv, 1, n_k, d, dtype)
    check_states(nb.split_kv_decode(q, k, v, n_splits), exact(q, k, v, False), BOUNDS[dtype])


@settings(max_examples=40, deadline=None)
@given(**{k: SHAPES[k] for k in ("n_kv_heads", "q_per_kv", "n_k", "d", "dtype")}, n_splits=st.integers(1, 300))
def test_split_decode_is_dense_attention(nb, **case):
    with torch.no_grad():
        check_split(nb, **case)


def check_merge(nb):
    """Merging is the union of tokens, in any number of parts and any order, and an empty part changes nothing."""
    q, k, v = made(1, 2, 5, 60, 16, torch.float64)
    cuts = [slice(0, 1), slice(1, 20), slice(20, 59), slice(59, 60)]
    states = [exact(q, k[:, c], v[:, c], False) for c in cuts]
    nothing = torch.zeros(2, 5, 16, dtype=torch.float64), torch.full((2, 5), -math.inf, dtype=torch.float64)
    for order in itertools.permutations(range(4)):
        parts = [states[i] for i in order] + [nothing]
        got = nb.merge(torch.stack([o for o, _ in parts]), torch.stack([s for _, s in parts]))
        check_states(got, exact(q, k, v, False), 1e-12)
    out, lse = nb.merge(torch.stack([nothing[0]] * 2), torch.stack([nothing[1]] * 2))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_merging_is_associative_with_an_identity(nb):
    check_merge(nb)


def check_nan_is_kept(nb):
    """Zeros stand for "nothing seen" alone: a NaN in the inputs must come out as NaN."""
    q, k, v = made(1, 1, 4, 6, 8, torch.float32)
    q[0, 2, 0] = math.nan
    for program in (nb.flash_forward, nb.dense_attention):
        out = program(q, k, v)[0]
        assert out[0, 2].isnan().all() and not out[0, [0, 1, 3]].isnan().any()
    for spoiled in (math.nan, math.inf):  # plus infinity: how FlashAttention-2 marks a row that saw nothing
        out, _ = nb.merge(torch.ones(2, 2, 8), torch.tensor([[0.0, 0.0], [spoiled, -math.inf]]))
        assert out[0].isnan().all() and (out[1] == 1).all()


def test_nan_is_not_hidden(nb):
    check_nan_is_kept(nb)


def check_cascade(nb, n_seqs=4, n_prefix=37):
    own = {f"{name}{i}": torch.randn(2, n, 16) for i, n in enumerate((1, 9, 30, 64)[:n_seqs]) for name in "kv"}
    tensors = dict(
        q=torch.randn(n_seqs, 6, 16), prefix_k=torch.randn(2, n_prefix, 16), prefix_v=torch.randn(2, n_prefix, 16)
    )
    memories = [nb.SlowMemory(**tensors, **own) for _ in range(2)]
    outputs = nb.cascade_decode(memories[0], n_seqs), nb.plain_decode(memories[1], n_seqs)
    for i in range(n_seqs):
        k = torch.cat([tensors["prefix_k"], own[f"k{i}"]], 1)
        v = torch.cat([tensors["prefix_v"], own[f"v{i}"]], 1)
        reference = exact(tensors["q"][i][:, None], k, v, False)[0][:, 0]
        for output in outputs:
            assert (output[i].double() - reference).abs().max() < 2e-6
    rest = sum(t.numel() for t in own.values())
    prefix = 2 * 2 * n_prefix * 16
    assert [m.words for m in memories] == [rest + prefix, rest + n_seqs * prefix]


def test_the_cascade_reads_a_prefix_once(nb):
    check_cascade(nb)


# -- Triton -------------------------------------------------------------------------------------------------------------
def check_triton(nb, n_kv_heads, q_per_kv, n_q, n_k, d, causal, dtype, block_m=64, block_n=64):
    q, k, v = made(n_kv_heads, q_per_kv, n_q, n_k, d, dtype)
    check_states(nb.triton_prefill(q, k, v, causal, block_m, block_n), exact(q, k, v, causal), BOUNDS[dtype])


@settings(max_examples=25, deadline=None)
@given(**{**SHAPES, "n_kv_heads": st.just(1), "q_per_kv": st.integers(1, 2)}, block_m=st.sampled_from([64, 128]))
@example(n_kv_heads=2, q_per_kv=2, n_q=65, n_k=65, d=80, causal=True, dtype=torch.bfloat16, block_m=64)
@example(n_kv_heads=1, q_per_kv=1, n_q=40, n_k=7, d=16, causal=True, dtype=torch.float32, block_m=64)
@example(n_kv_heads=1, q_per_kv=1, n_q=1, n_k=257, d=128, causal=False, dtype=torch.float16, block_m=64)
def test_the_prefill_kernel_is_dense_attention(nb, **case):
    with torch.no_grad():
        check_triton(nb, **case, block_n=128)


def check_paged(
    nb, dtype=torch.float32, d=32, q_per_kv=3, n_splits=3, block_size=8, lengths=(1, 8, 41, 70), block_n=16
):
    """Ragged sequences in strewn blocks, against dense attention over each."""
    manager = BlockManager(40, block_size)
    pool = PagedKVCache(1, 40, block_size, 2, d, dtype)
    pool.keys.fill_(7.0), pool.values.fill_(-7.0)
    held = {}
    for i, n in enumerate(lengths):
        manager.allocate(f"x{i}", list(range(20)))
        manager.allocate(f"s{i}", list(range(n)))
        manager.free(f"x{i}")
        held[i] = made(2, q_per_kv, 1, n, d, dtype, seed=i)
        slots = torch.tensor(manager.slots(f"s{i}", 0, n))
        pool.write(0, slots, held[i][1].transpose(0, 1), held[i][2].transpose(0, 1))
    lists = [manager.table(f"s{i}") for i in held]
    width = max(map(len, lists))
    tables = torch.tensor([t + [0] * (width - len(t)) for t in lists], dtype=torch.int32)
    q = torch.stack([held[i][0][:, 0] for i in held])
    sizes = torch.tensor(lengths, dtype=torch.int32)
    out, lse = nb.triton_decode(q, pool.keys[0], pool.values[0], tables, sizes, block_size, n_splits, block_n)
    for i in held:
        expected, expected_lse = exact(*held[i], False)
        check_states((out[i][:, None], lse[i][:, None]), (expected, expected_lse), BOUNDS[dtype])


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"n_splits": 1, "block_size": 16, "block_n": 64},
        {"n_splits": 8, "d": 80, "q_per_kv": 1, "lengths": (5, 130)},
        {"dtype": torch.bfloat16, "q_per_kv": 2, "lengths": (33, 64)},
        {"dtype": torch.float16, "d": 64, "q_per_kv": 4, "lengths": (17, 3)},
    ],
    ids=str,
)
def test_the_decode_kernel_reads_through_block_tables(nb, case):
    check_paged(nb, **case)


def test_a_contiguous_cache_is_one_block_for_each_sequence(nb):
    q, k, v = made(2, 2, 1, 50, 32, torch.float32)
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([50], dtype=torch.int32)
    keys, values = (x.transpose(0, 1).contiguous() for x in (k, v))
    out, lse = nb.triton_decode(q[:, 0][None], keys, values, table, length, 50, 4, 16)
    check_states((out[0][:, None], lse[0][:, None]), exact(q, k, v, False), 2e-6)


def test_the_interpreter_leaves_nothing_behind(nb):
    """Child processes and torch.compile must not run under Triton's interpreter."""
    assert "TRITON_INTERPRET" not in os.environ


# -- counts -------------------------------------------------------------------------------------------------------------
def run_counted(nb, algorithm, n, d, fast_words):
    memory = nb.SlowMemory(**{name: torch.randn(n, d) for name in "qkv"})
    if algorithm == "standard":
        nb.standard_attention(memory)
    else:
        getattr(nb, algorithm)(memory, n, d, fast_words)
    return memory


def check_counts(nb, n, d, tiles):
    fast_words = 4 * d * tiles + tiles % 3  # not always a whole number of rows
    for algorithm in ("standard", "flash_1", "flash_2"):
        memory = run_counted(nb, algorithm, n, d, fast_words)
        q, k, v = (memory.tensors[name][None] for name in "qkv")
        assert (memory.tensors["o"].double() - exact(q, k, v, False)[0][0]).abs().max() < 5e-6
        assert memory.words == nb.words_moved(algorithm, n, d, fast_words)
        assert memory.operations["exponentials"] == n * n
        passes = math.ceil(n / math.ceil(fast_words / (4 * d)))
        divisions = {"standard": n * n, "flash_1": n * d * passes, "flash_2": n * d}
        assert memory.operations["divisions"] == divisions[algorithm]
        tiles_of_keys = math.ceil(n / min(math.ceil(fast_words / (4 * d)), d))
        rescales = {"standard": 0, "flash_1": n * d * passes, "flash_2": n * d * tiles_of_keys}
        assert memory.operations["rescales"] == rescales[algorithm]
        assert memory.most_held <= 1.25 * fast_words + 4 * d * d or algorithm == "standard"


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 90), d=st.sampled_from([4, 8, 16]), tiles=st.integers(1, 24))
def test_words_and_operations_are_what_the_loops_say(nb, n, d, tiles):
    with torch.no_grad():
        check_counts(nb, n, d, tiles)


def test_words_follow_the_theorem(nb):
    base = dict(n=2**18, d=64, fast_words=2**15)
    for algorithm in ("flash_1", "flash_2"):
        words = nb.words_moved(algorithm, **base)
        for change, factor in (({"n": 2**19}, 4), ({"d": 128}, 4), ({"fast_words": 2**16}, 0.5)):
            assert math.isclose(nb.words_moved(algorithm, **{**base, **change}) / words, factor, rel_tol=0.03)
    assert nb.words_moved("standard", **base) == nb.words_moved("standard", **{**base, "fast_words": 1})


def test_the_backward_pass_takes_the_scores_twice(nb):
    """Seven matrix products instead of autograd's six, whether in tiles or not, and the same gradients."""
    n, d = 64, 16
    q, k, v, d_out = (torch.randn(n, d, dtype=torch.float64) for _ in range(4))
    with FlopCounterMode(display=False) as standard, torch.enable_grad():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad((leaves[0] @ leaves[1].T / d**0.5).softmax(1) @ leaves[2], leaves, d_out)
    assert standard.get_total_flops() == 6 * 2 * n * n * d
    for backward in (nb.backward_from_lse, lambda *arguments: right("04.4")(*arguments, False)):
        with FlopCounterMode(display=False) as flash:
            out, lse = nb.flash_forward(q[None], k[None], v[None], False, 16, 32)
            gradients = backward(q, k, v, out[0], lse[0], d_out)
        assert flash.get_total_flops() == 7 * 2 * n * n * d
        for ours, theirs in zip(gradients, expected, strict=True):
            assert (ours - theirs).abs().max() < 1e-12


def test_units_of_work(nb):
    assert nb.work_units("flash_1", 3, 8, 5000) == nb.work_units("flash_1", 3, 8, 1) == 24
    assert nb.work_units("flash_2", 3, 8, 5000) == 24 * 79
    assert nb.work_units("flash_2", 1, 8, 1) == 8 and nb.work_units("flash_2", 1, 8, 1, n_splits=5) == 40


# -- FP8 and asynchrony -------------------------------------------------------------------------------------------------
def check_fp8(nb):
    rotation = nb.random_hadamard(64, torch.Generator().manual_seed(1))
    assert torch.allclose(rotation @ rotation.T, torch.eye(64), atol=1e-6)
    assert torch.allclose(rotation.abs(), torch.full((64, 64), 1 / 8))
    q, k, v = made(2, 2, 100, 100, 64, torch.float32)
    assert torch.allclose((q @ rotation) @ (k @ rotation).mT[[0, 0, 1, 1]], q @ k.mT[[0, 0, 1, 1]], atol=1e-4)
    for block in (None, 32):
        rounded = nb.to_fp8(q, block)
        assert ((rounded - q).abs() <= q.abs() / 16 + q.abs().max() / 448 / 512).all()
        assert not torch.equal(rounded, q)
    spread = torch.cat([torch.randn(1, 64, 8) * 1e-6, torch.randn(1, 64, 8)], dim=1)
    small = [(nb.to_fp8(spread, b)[:, :64] - spread[:, :64]).abs().max() for b in (None, 64)]
    assert small[1] < 0.1 * small[0]  # a block of small values has a scale of its own
    k = k.clone()
    k[:, :, 3] *= 60  # a channel of outliers: what the rotation is for
    errors = {}
    for name, options in {"one": {}, "both": {"block": 64, "rotation": rotation}}.items():
        got = nb.fp8_attention(q, k, v, True, **options)
        errors[name] = (got - exact(q, k, v, True)[0]).pow(2).mean().sqrt()
        assert errors[name] < 0.3
    return errors


def test_fp8_rounding_scales_and_rotation(nb):
    check_fp8(nb)


def test_rotation_helps_where_elements_stand_out(nb):
    """The paper's synthetic inputs: the error falls, averaged over draws."""
    rotation = nb.random_hadamard(64, torch.Generator().manual_seed(2))
    logs = []
    for _ in range(4):
        q, k, v = (
            torch.randn(4, 256, 64) + 10 * torch.randn(4, 256, 64) * (torch.rand(4, 256, 64) < 1e-3) for _ in "qkv"
        )
        one, both = (
            (nb.fp8_attention(q, k, v, False, *o) - exact(q, k, v, False)[0]).pow(2).mean().sqrt()
            for o in ((None, None), (64, rotation))
        )
        logs.append(float((one / both).log()))
    assert sum(logs) / 4 > math.log(1.1)


def check_timeline(nb):
    for workers, tiles in ((1, 5), (2, 4), (3, 2)):
        rows = nb.timeline(workers, tiles, 1.0, 1.0)
        assert len(rows) == 3 * workers * tiles
        for unit in ("tensor core", "exponentials"):
            spans = sorted((r["start"], r["stop"]) for r in rows if r["unit"] == unit)
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans)), "one unit did two things at once"
        for worker in range(workers):
            spans = [(r["start"], r["stop"]) for r in rows if r["worker"] == worker]
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans)), (
                "a step began before the one before ended"
            )
            assert [r["unit"] for r in rows if r["worker"] == worker][:3] == [
                "tensor core",
                "exponentials",
                "tensor core",
            ]
    assert max(r["stop"] for r in nb.timeline(1, 6)) == 18
    assert max(r["stop"] for r in nb.timeline(2, 3)) <= 13


def test_the_timeline_respects_its_units(nb):
    check_timeline(nb)


# -- broken twins -------------------------------------------------------------------------------------------------------
TWINS = {
    "tiled: no rescale of the mix": ("mixed = mixed * shrink + weights.to", "mixed = mixed + weights.to", check_tiled),
    "tiled: no rescale of the sum": (
        "total = total * shrink + weights.sum(dim=-1",
        "total = total + weights.sum(dim=-1",
        check_tiled,
    ),
    "tiled: a causal edge off by one": (
        "device=q.device) <= places",
        "device=q.device) < places",
        check_tiled,
    ),
    "tiled: queries at the first positions": (
        "[:, None] + n_k - n_q\n        state",
        "[:, None]\n        state",
        check_tiled,
    ),
    "tiled: the ragged last tile of keys left out": (
        "for left in range(0, stop, block_k):",
        "for left in range(0, stop - block_k + 1, block_k):",
        check_tiled,
    ),
    "tiled: rows that saw nothing": (
        "base = new_highest.masked_fill(new_highest == -math.inf, 0.0)\n    weights, shrink",
        "base = new_highest\n    weights, shrink",
        check_tiled,
    ),
    "tiled: log-sum-exp without the sum": ("(highest + total.log())[..., 0]", "highest[..., 0]", check_tiled),
    "split: parts weighed alike": (
        "(lses - lse).exp().masked_fill(lses == -math.inf, 0.0)",
        "torch.full_like(lses, 1 / len(lses))",
        check_split,
    ),
    "split: weights from the wrong base": (
        "(lses - lse).exp()",
        "(lses - lse).exp2()",
        check_split,
    ),
    "merge: an empty part spoils the others": (
        "weights = (lses - lse).exp().masked_fill(lses == -math.inf, 0.0)",
        "weights = (lses - lse).exp()",
        check_merge,
    ),
    "merge: NaN hidden": (
        "(lses - lse).exp().masked_fill(lses == -math.inf, 0.0)",
        "(lses - lse).exp().nan_to_num()",
        check_nan_is_kept,
    ),
    "dense: NaN hidden": (
        "(scores - lse[..., None]).exp().masked_fill(scores == -math.inf, 0.0)",
        "(scores - lse[..., None]).exp().nan_to_num()",
        check_nan_is_kept,
    ),
    "cascade: the prefix left out": (
        "pair = torch.stack([shared[:, i], own[:, 0]])",
        "pair = torch.stack([own[:, 0], own[:, 0]])",
        check_cascade,
    ),
    "triton: no rescale": ("mixed * shrink[:, None] + added", "mixed + added", check_triton),
    "triton: a causal edge off by one": (
        "columns[None, :] <= rows[:, None] + n_k - n_q",
        "columns[None, :] < rows[:, None] + n_k - n_q",
        check_triton,
    ),
    "triton: the ragged tile of keys not masked": (
        "seen = (columns[None, :] < n_k) & (rows[:, None] < n_q)",
        "seen = (columns[None, :] < n_k + BLOCK_N) & (rows[:, None] < n_q)",
        check_triton,
    ),
    "triton: the wrong KV head": ("(head // Q_PER_KV) * n_k", "(head % Q_PER_KV) * n_k", check_triton),
    "paged: the table ignored": (
        "slots = block.to(tl.int64) * BLOCK_SIZE",
        "slots = (places // BLOCK_SIZE) * BLOCK_SIZE",
        check_paged,
    ),
    "paged: a split that overlaps the next": (
        "stop = tl.minimum(length, (split + 1) * size)",
        "stop = tl.minimum(length, (split + 1) * size + 1)",
        check_paged,
    ),
    "counts: the output not read back": ("passes * (3 * n * d + 4 * n)", "passes * (2 * n * d + 4 * n)", check_counts),
    "counts: the second version's passes over keys only": (
        "2 * n * d + n + passes * 2 * n * d",
        "2 * n * d + n + passes * n * d",
        check_counts,
    ),
    "counts: a write that is not counted": (
        "self.tensors[name][rows] = part\n        self.words += part.numel()",
        "self.tensors[name][rows] = part",
        check_counts,
    ),
    "counts: a division more than counted": (
        "memory.divide(mixed, total)",
        "memory.divide(memory.divide(mixed, total), torch.ones_like(total))",
        check_counts,
    ),
    "fp8: a matrix that is not orthogonal": ("signs * matrix / size**0.5", "signs * matrix / size", check_fp8),
    "fp8: one scale where blocks were asked for": ("block or x.shape[1]", "x.shape[1]", check_fp8),
    "timeline: a unit shared": (
        "ready[worker] = free[unit] = start + length",
        "ready[worker] = start + length",
        check_timeline,
    ),
}
CASES = {
    check_tiled: dict(n_kv_heads=2, q_per_kv=2, n_q=70, n_k=90, d=16, causal=True, dtype=torch.float32, block_k=32),
    check_split: dict(n_kv_heads=1, q_per_kv=2, n_k=50, d=16, dtype=torch.float32, n_splits=7),
    check_triton: dict(
        n_kv_heads=2, q_per_kv=2, n_q=40, n_k=45, d=16, causal=True, dtype=torch.float32, block_m=32, block_n=16
    ),
    check_counts: dict(n=50, d=8, tiles=5),
}
EMPTY_ROWS = dict(n_kv_heads=1, q_per_kv=1, n_q=40, n_k=7, d=16, causal=True, dtype=torch.float32, block_k=4)


@pytest.mark.parametrize("check", list(CASES), ids=lambda check: check.__name__)
def test_the_sound_program_passes_where_its_twins_are_tried(nb, check):
    check(nb, **CASES[check])


@pytest.mark.parametrize("name", TWINS)
def test_a_broken_twin_is_caught(load_algorithms, name):
    old, new, check = TWINS[name]
    twin: SimpleNamespace = load_algorithms(NAME, (old, new))
    with pytest.raises(AssertionError):
        check(twin, **CASES.get(check, {}))
        if check is check_tiled:
            check(twin, **EMPTY_ROWS)
        if check is check_triton:
            check(twin, **{**CASES[check], "causal": False})


# -- exercises ----------------------------------------------------------------------------------------------------------
answers = partial(notebook_cells.answers, NAME)


FUNCTIONS = checked_functions(NAME)


def right(number):
    return answers("solution")[FUNCTIONS[number]]


def _both_natural(out_a, lse_a, out_b, lse_b):
    return right("04.1")(out_a, lse_a, out_b, lse_b / math.log(2))


def _plain_exp(out_a, lse_a, out_b, lse_b_base2):
    a, b = lse_a.exp(), torch.exp2(lse_b_base2)
    return (a[:, None] * out_a + b[:, None] * out_b) / (a + b)[:, None], (a + b).log()


def _mean_of_outputs(out_a, lse_a, out_b, lse_b_base2):
    return (out_a + out_b) / 2, right("04.1")(out_a, lse_a, out_b, lse_b_base2)[1]


def _base2_returned(*arguments):
    out, lse = right("04.1")(*arguments)
    return out, lse / math.log(2)


def _empty_is_nan(out_a, lse_a, out_b, lse_b_base2):
    lse_b = lse_b_base2 * math.log(2)
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp()[:, None] * out_a + (lse_b - lse).exp()[:, None] * out_b, lse


def _still_buggy(*arguments):
    return answers("exercise")["buggy_masked_attention"](*arguments)


def _nan_to_zero_at_the_end(*arguments):
    return answers("exercise")["buggy_masked_attention"](*arguments).nan_to_num()


def _divides_by_nothing(q, k, v, mask, block_k=16):
    scores = (q @ k.T / q.shape[1] ** 0.5).masked_fill(~mask, -1e30)
    return scores.softmax(dim=1) @ v


def _all_tiles(n, d, block_q, block_k):
    return 2 * n * d + n + -(-n // block_q) * 2 * n * d


def _half(n, d, block_q, block_k):
    return 2 * n * d + n + -(-n // block_q) * n * d


def _no_statistics(n, d, block_q, block_k):
    return right("04.3")(n, d, block_q, block_k) - n


def _whole_ragged_tiles(n, d, block_q, block_k):
    words = 2 * n * d + n
    return words + sum(2 * d * -(-min(top + block_q, n) // block_k) * block_k for top in range(0, n, block_q))


def _dense_backward(q, k, v, out, lse, d_out, causal, block=32):
    scale = q.shape[1] ** -0.5
    scores = scale * q @ k.T
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    weights = (scores - lse[:, None]).exp()
    d_scores = weights * (d_out @ v.T - (d_out * out).sum(1, keepdim=True))
    return scale * d_scores @ k, scale * d_scores.T @ q, weights.T @ d_out


def _no_mean(q, k, v, out, lse, d_out, causal, block=32):
    return right("04.4")(q, k, v, torch.zeros_like(out), lse, d_out, causal, block)


def _ignores_the_mask(q, k, v, out, lse, d_out, causal, block=32):
    return right("04.4")(q, k, v, out, lse, d_out, False, block)


def _no_scale(q, k, v, out, lse, d_out, causal, block=32):
    dq, dk, dv = right("04.4")(q, k, v, out, lse, d_out, causal, block)
    return dq * q.shape[1] ** 0.5, dk * q.shape[1] ** 0.5, dv


def _fills_processors(n_tokens, block_n, n_units, n_processors, merge_cost):
    return max(1, min(-(-n_tokens // block_n), n_processors // n_units))


def _ignores_the_merge(n_tokens, block_n, n_units, n_processors, merge_cost):
    return right("04.5")(n_tokens, block_n, n_units, n_processors, 0.0)


def _no_limit(n_tokens, block_n, n_units, n_processors, merge_cost):
    return max(1, n_processors // n_units)


WRONG = [
    ("04.1", _both_natural, "log-sum-exp"),
    ("04.1", _plain_exp, "log-sum-exp"),
    ("04.1", _mean_of_outputs, "attention over all tokens"),
    ("04.1", _base2_returned, "natural"),
    ("04.1", _empty_is_nan, "no NaN"),
    ("04.2", _still_buggy, "no NaN"),
    ("04.2", _nan_to_zero_at_the_end, "a sliding window"),
    ("04.2", _divides_by_nothing, "zeros where nothing is seen"),
    ("04.3", _all_tiles, "above the diagonal"),
    ("04.3", _half, "read whole"),
    ("04.3", _no_statistics, "read whole"),
    ("04.3", _whole_ragged_tiles, "ragged"),
    ("04.4", _dense_backward, "PyTorch tensor holds n * n elements"),
    ("04.4", _no_mean, "equals autograd's"),
    ("04.4", _ignores_the_mask, "under a causal mask"),
    ("04.4", _no_scale, "dk equals autograd's"),
    ("04.5", _fills_processors, "merge"),
    ("04.5", _ignores_the_merge, "merge"),
    ("04.5", _no_limit, "merge"),
]


@pytest.mark.parametrize(("number", "answer", "words"), WRONG, ids=[f"{n} {f.__name__}" for n, f, _ in WRONG])
def test_typical_wrong_answers_fail_with_the_property_named(number, answer, words):
    result = exercises.check(number, answer)
    assert result.state == "fail" and words in result.message, result.message


@pytest.mark.parametrize("number", FUNCTIONS)
def test_an_error_in_an_answer_shows_its_input(number):
    def broken(*_):
        raise KeyError("block")

    shown = {"04.1": "3 rows", "04.2": "40 queries", "04.3": "n=8", "04.4": "n=8", "04.5": "n_tokens=4096"}
    result = exercises.check(number, broken)
    assert result.state == "fail"
    assert "KeyError: 'block'" in result.message and shown[number] in result.message


def test_the_buggy_function_is_sound_on_the_masks_its_author_tried():
    """What exercise 04.2 says of the author's test is true."""
    buggy = answers("exercise")["buggy_masked_attention"]
    q, k, v = (torch.randn(40, 8) for _ in range(3))
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    expected = exact(q[None], k[None], v[None], True)[0][0]
    assert (buggy(q, k, v, causal).double() - expected).abs().max() < 1e-5
    assert buggy(q, k, v, causal & causal.triu(-5).bool()).isnan().any()


def _in_numpy(out_a, lse_a, out_b, lse_b_base2):
    a, b = lse_a.numpy().astype(float), lse_b_base2.numpy() * np.log(2.0)
    lse = np.logaddexp(a, b)
    with np.errstate(invalid="ignore"):
        weights = [np.nan_to_num(np.exp(part - lse))[:, None] for part in (a, b)]
    return weights[0] * out_a.numpy() + weights[1] * out_b.numpy(), lse


def test_right_answers_of_another_form_pass():
    result = exercises.check("04.1", _in_numpy)
    assert result.state == "pass", result.message


def test_gradients_summed_in_fp32_pass():
    def summed_in_fp32(q, k, v, out, lse, d_out, causal, block=32):
        return tuple(x.float() for x in right("04.4")(q, k, v, out, lse, d_out, causal, block))

    result = exercises.check("04.4", summed_in_fp32)
    assert result.state == "pass", result.message
