"""Notebook 03: the scheduler survives random loads, broken twins are caught, its exercises tell right from wrong."""

from __future__ import annotations

import heapq
import random
import sys
from functools import cache, partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import notebook_cells
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from notebook_cells import assert_names_what_broke, checked_functions
from transformers import AutoModelForCausalLM, LlamaConfig

from helpers import exercises, kv_adapter, paged_kv
from helpers.errors import EngineError
from helpers.paths import ROOT
from helpers.workload import Request, Workload

NAME = "03_continuous_batching"
POLICIES = ("static", "orca", "prefill first", "chunked")
CAUGHT = (AssertionError, LookupError, EngineError, ValueError, TypeError)


@pytest.fixture(scope="module")
def nb(load_algorithms):
    return load_algorithms(NAME)


def paged_kv_twin(old: str, new: str) -> ModuleType:
    """`helpers.paged_kv` with a seeded bug, which must change the source exactly once."""
    source = (ROOT / "helpers" / "paged_kv.py").read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in paged_kv.py"
    module = ModuleType("paged_kv_of_03")
    sys.modules["paged_kv_of_03"] = module  # dataclasses look their module up
    exec(compile(source.replace(old, new), "paged_kv_of_03", "exec"), module.__dict__)
    return module


# -- a scheduler over a fake model ---------------------------------------------------------------------------------------
def next_token(context: list[int]) -> int:
    """A model whose next token depends on every token before it and on how many there are."""
    return sum((i + 1) * (t + 1) for i, t in enumerate(context)) % 7


def answer_to(prompt: list[int], n: int) -> list[int]:
    context = list(prompt)
    for _ in range(n):
        context.append(next_token(context))
    return context[len(prompt) :]


class Drill:
    """A scheduler over a real block manager and a fake model that reads its context back through the block tables.

    What a request says must not depend on who else is there, in which order things ran, or who was preempted. The oldest
    request makes progress within a fixed number of steps, whatever arrives: so everybody does, in turn. (Under "prefill
    first" steps that admit somebody do not count: see the test of that rule's weakness.)
    """

    def __init__(
        self,
        nb: SimpleNamespace,
        policy: str,
        *,
        n_blocks: int = 12,
        block_size: int = 3,
        max_num_seqs: int = 4,
        budget: int = 6,
        prefix_caching: bool = False,
        kv: ModuleType = paged_kv,
    ) -> None:
        self.nb, self.policy, self.budget = nb, policy, budget
        self.manager = kv.BlockManager(n_blocks, block_size, enable_prefix_caching=prefix_caching)
        limit = budget if policy in ("chunked", "prefill first") else None
        self.scheduler = nb.Scheduler(self.manager, policy, max_num_seqs=max_num_seqs, max_num_batched_tokens=limit)
        self.memory: list[int | None] = [None] * (n_blocks * block_size)
        self.alive: dict[str, object] = {}
        self.said: dict[str, int] = {}
        self.n_operations = self.n_arrived = self.n_cached = self.work = self.stalled = 0
        self.oldest: tuple[str, int] = ("", 0)

    def arrive(self, prompt: list[int], max_tokens: int) -> None:
        self.n_operations += 1
        seq = self.nb.Sequence(f"{self.n_arrived:05d}", list(prompt), max_tokens)
        if self.manager.blocks_for(len(prompt) + max_tokens) > self.manager.n_blocks:
            with pytest.raises(EngineError, match="the pool has"):
                self.scheduler.add(seq)
            return
        self.n_arrived += 1
        self.work += len(prompt) + max_tokens
        self.scheduler.add(seq)
        self.alive[seq.seq_id] = seq

    def step(self) -> None:
        self.n_operations += 1
        scheduler, running = self.scheduler, [seq.seq_id for seq in self.scheduler.running]
        preempted, unfinished = scheduler.n_preempted, bool(scheduler.running or scheduler.waiting)
        computed = {seq.seq_id: seq.n_computed for seq in scheduler.running}
        feeds = scheduler.plan()
        assert bool(feeds) == unfinished, "a step is empty exactly when nobody is left"
        names = [seq.seq_id for seq, _ in feeds]
        assert len(set(names)) == len(names) <= scheduler.max_num_seqs
        assert all(n >= 1 for _, n in feeds), "a feed without a token has no logits"
        if self.policy == "chunked":
            assert sum(n for _, n in feeds) <= self.budget, "budget"
        if scheduler.n_preempted > preempted:
            assert all(computed.get(seq.seq_id) == seq.n_computed for seq, _ in feeds), (
                "a step that preempts admits nobody"
            )
        if self.policy == "static" and running:
            assert set(names) <= set(running), "nobody joins a static batch"
        tokens = []
        for seq, n in feeds:
            start = seq.n_computed
            self.n_cached += start if seq.seq_id not in running else 0
            slots = self.manager.slots(seq.seq_id, 0, start + n)
            for slot, token in zip(slots[start:], seq.token_ids()[start : start + n], strict=True):
                assert self.manager.ref_counts[slot // self.manager.block_size] == 1, "a shared block is written"
                self.memory[slot] = token
            tokens.append(next_token([self.memory[slot] for slot in slots]))
        before = {seq.seq_id: len(seq.output_ids) for seq, _ in feeds}
        emitted = scheduler.complete(feeds, tokens)
        assert all(len(seq.output_ids) == before[seq.seq_id] + 1 for seq in emitted)
        # Prompts that come first may hold a decode up, one step each.
        self.check(excused=self.policy == "prefill first" and not set(names) <= set(running))

    def check(self, excused: bool = False) -> None:
        self.manager.check()
        inside = [seq.seq_id for seq in [*self.scheduler.running, *self.scheduler.waiting]]
        assert inside == sorted(inside), "first come, first served"
        assert all(seq.n_computed == 0 for seq in self.scheduler.waiting), "who waits has nothing in the pool"
        assert sorted(self.manager.sequences) == sorted(seq.seq_id for seq in self.scheduler.running), "leaked blocks"
        for seq_id, seq in list(self.alive.items()):
            expected = answer_to(seq.prompt_ids, seq.max_tokens)
            assert len(seq.output_ids) >= self.said.get(seq_id, 0), f"{seq_id} takes back what it said"
            self.said[seq_id] = len(seq.output_ids)
            assert seq.output_ids == expected[: len(seq.output_ids)], (seq_id, seq.output_ids, expected)
            if seq.is_finished:
                del self.alive[seq_id]
            else:
                assert seq_id in inside, f"{seq_id} is lost"
        if self.alive:
            seq = self.alive[min(self.alive)]
            now = (seq.seq_id, seq.n_computed + len(seq.output_ids))
            self.stalled = self.stalled + (not excused) if now == self.oldest else 0
            self.oldest = now
            assert self.stalled <= self.scheduler.max_num_seqs + 1, f"{seq.seq_id} is starved"

    def end(self) -> None:
        for _ in range(self.work * (self.scheduler.max_num_seqs + 2) + 5):
            if not (self.scheduler.waiting or self.scheduler.running):
                break
            self.step()
        assert not self.alive, f"never served: {sorted(self.alive)}"
        assert self.manager.n_free == self.manager.n_blocks, "blocks have leaked"


def machine_for(nb: SimpleNamespace, counts: list[int]) -> type[RuleBasedStateMachine]:
    """Pools, policies, limits, arrivals and steps chosen by hypothesis; `counts` collects each run's operations."""
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)

    class Machine(RuleBasedStateMachine):
        @initialize(
            policy=st.sampled_from(POLICIES),
            n_blocks=st.integers(4, 14),
            block_size=st.integers(1, 4),
            max_num_seqs=st.integers(1, 4),
            extra=st.integers(0, 6),
            prefix_caching=st.booleans(),
        )
        def begin(self, policy, n_blocks, block_size, max_num_seqs, extra, prefix_caching) -> None:
            self.drill = Drill(
                nb,
                policy,
                n_blocks=n_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                budget=max_num_seqs + extra,
                prefix_caching=prefix_caching,
            )

        @rule(prompt=tokens, max_tokens=st.integers(1, 8))
        def arrive(self, prompt, max_tokens) -> None:
            self.drill.arrive(prompt, max_tokens)

        @precondition(lambda self: self.drill.alive)
        @rule(n=st.integers(1, 4))
        def step(self, n) -> None:
            for _ in range(n):
                self.drill.step()

        def teardown(self) -> None:
            if hasattr(self, "drill"):
                self.drill.end()
                counts.append(self.drill.n_operations)

    return Machine


def walk(nb: SimpleNamespace, policy: str, n_operations: int = 700, seed: int = 0, **options) -> Drill:
    """A seeded load that now and then has more work than the pool, and now and then runs empty."""
    rng, drill = random.Random(f"{policy} {seed}"), Drill(nb, policy, **options)
    text = [rng.randint(0, 1) for _ in range(40)]
    while drill.n_operations < n_operations:
        busy = len(drill.alive) > rng.choice((2, 6, 9))
        if rng.random() < (0.1 if busy else 0.5):
            n = rng.randint(1, 14)
            prompt = text[:n] if rng.random() < 0.5 else [rng.randint(0, 1) for _ in range(n)]
            drill.arrive(prompt, rng.randint(1, 12))
        elif drill.alive:
            drill.step()
    drill.end()
    return drill


def test_the_scheduler_survives_ten_thousand_random_operations(nb):
    counts: list[int] = []
    run_state_machine_as_test(
        machine_for(nb, counts),
        settings=settings(max_examples=200, stateful_step_count=30, deadline=None, database=None),
    )
    assert sum(counts) >= 10_000, sum(counts)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_long_walk_meets_preemptions_and_hits(nb, policy, prefix_caching):
    drill = walk(nb, policy, prefix_caching=prefix_caching)
    assert drill.scheduler.n_preempted >= 5, drill.scheduler.n_preempted
    assert (drill.n_cached > 0) == prefix_caching


@pytest.mark.parametrize("policy", POLICIES)
def test_only_prefill_first_lets_prompts_stall_a_decode_for_as_long_as_they_come(nb, policy):
    """Answers of one token free their row in the step that read their prompt, so there is always room for the next one."""
    scheduler = nb.Scheduler(nb.BlockCounter(100, 4), policy, max_num_seqs=2, max_num_batched_tokens=8)
    reader = nb.Sequence("reader", [0], 3)
    scheduler.add(reader)
    for i in range(50):
        scheduler.add(nb.Sequence(f"one token {i}", [0], 1))
        feeds = scheduler.plan()
        scheduler.complete(feeds, [0] * len(feeds))
    assert len(reader.output_ids) == (1 if policy == "prefill first" else 3)


SCHEDULER_TWINS = {
    "a starved request (the shortest goes first)": (
        ("seq = self.waiting[0]", "seq = min(self.waiting, key=lambda s: s.n_tokens)"),
        ("self.running.append(self.waiting.popleft())", "self.waiting.remove(seq); self.running.append(seq)"),
    ),
    "a starved request (the oldest is preempted)": (("victim = self.running.pop()", "victim = self.running.pop(0)"),),
    "a preempted request at the end of the queue": (
        ("self.waiting.appendleft(victim)", "self.waiting.append(victim)"),
    ),
    "a budget off by one": (
        ("scheduler.max_num_batched_tokens - len(feeds))", "scheduler.max_num_batched_tokens - len(feeds) + 1)"),
        ('max_num_batched_tokens, "the step', 'max_num_batched_tokens + 1, "the step'),
    ),
    "a budget that forgets the decodes": (
        (
            "scheduler.max_num_batched_tokens - sum(n for _, n in feeds), chunk",
            "scheduler.max_num_batched_tokens, chunk",
        ),
    ),
    "tokens lost after a preemption (no blocks for them)": (
        ("allocate(seq.seq_id, seq.token_ids())", "allocate(seq.seq_id, seq.prompt_ids)"),
    ),
    "tokens lost after a preemption (the answer starts anew)": (
        ("            victim.n_computed = 0\n", "            victim.n_computed = 0; victim.output_ids.clear()\n"),
    ),
    "a preempted request that thinks it is still computed": (("            victim.n_computed = 0\n", ""),),
    "a sample in the middle of a prompt": (("            if seq.n_left == 0:\n", "            if True:\n"),),
    "blocks that are not freed": (("                self.manager.free(seq.seq_id)\n", "                pass\n"),),
    "one row too many": (
        ("len(self.running) < self.max_num_seqs and", "len(self.running) <= self.max_num_seqs and"),
        ("        assert len(self.running) <= self.max_num_seqs\n", ""),
    ),
    "freed blocks go to a newcomer": ((" and not self.has_preempted", ""),),
    "padding that speaks": (("            if seq.is_finished:  # a padding row\n                continue\n", ""),),
    "a static batch that others join": (
        ("return scheduler.decode() if scheduler.running else scheduler.admit()", "return plan_orca(scheduler)"),
    ),
    "cached tokens computed as if they were the first": (
        ("seq.n_computed = self.manager.allocate", "self.manager.allocate"),
    ),
    "a decode that never gets room": (("if seq.n_left == 1 and self.make_room(seq):", "if seq.n_left == 1:"),),
    "prefills that are never continued": (("if seq.n_left > 1 and budget > 0:", "if seq.n_left > budget > 0:"),),
    "written tokens that are not said to be": (
        ("self.manager.commit(seq.seq_id, seq.n_computed)", "self.manager.commit(seq.seq_id, seq.n_tokens)"),
    ),
}


@pytest.mark.parametrize("name", SCHEDULER_TWINS)
def test_a_broken_scheduler_is_caught(load_algorithms, name):
    twin = load_algorithms(NAME, *SCHEDULER_TWINS[name])
    with pytest.raises(CAUGHT):
        for policy in POLICIES:
            for seed in range(2):
                walk(twin, policy, 400, seed, prefix_caching=True)


def test_a_zero_length_prefill_on_a_full_hit_is_caught(nb):
    twin = paged_kv_twin("range((len(token_ids) - 1) // size", "range(len(token_ids) // size")
    for kv, sound in ((paged_kv, True), (twin, False)):
        drill = Drill(nb, "chunked", kv=kv, prefix_caching=True)
        for _ in range(2):
            drill.arrive([1, 0, 1, 1, 0, 0], 2)  # two full blocks: the second time the whole prompt is known
            if sound or drill.n_arrived == 1:
                drill.end()
    assert Drill(nb, "chunked").n_cached == 0
    with pytest.raises(AssertionError, match="no token"):
        drill.step()


# -- the rules ---------------------------------------------------------------------------------------
def lengths_of(nb, policy, waiting, running=(), **limits):
    """Tokens of each request in the next step; running requests are decoding."""
    manager = nb.BlockCounter(1000, 4)
    scheduler = nb.Scheduler(manager, policy, **{"max_num_seqs": 8, **limits})
    for i, n in enumerate(running):
        seq = nb.Sequence(f"run {i}", [0] * n, 9, [0], n)
        manager.allocate(seq.seq_id, seq.prompt_ids)
        scheduler.running.append(seq)
    for i, n in enumerate(waiting):
        scheduler.add(nb.Sequence(f"wait {i}", [0] * n, 9))
    return [n for _, n in scheduler.plan()]


def check_rules(nb):
    assert lengths_of(nb, "static", [30, 40], [5, 5]) == [1, 1]
    assert lengths_of(nb, "static", [30, 40]) == [30, 40]
    assert lengths_of(nb, "orca", [30, 40], [5, 5]) == [1, 1, 30, 40]
    assert lengths_of(nb, "orca", [30, 40, 50], [5, 5], max_num_seqs=4) == [1, 1, 30, 40]
    assert lengths_of(nb, "prefill first", [30, 40, 50], [5], max_num_batched_tokens=80) == [30, 40]
    assert lengths_of(nb, "prefill first", [90, 40], [5], max_num_batched_tokens=80) == [90]
    assert lengths_of(nb, "prefill first", [], [5, 6], max_num_batched_tokens=80) == [1, 1]
    assert lengths_of(nb, "chunked", [30, 40], [5, 5], max_num_batched_tokens=16) == [1, 1, 14]
    assert lengths_of(nb, "chunked", [6, 40], [5, 5], max_num_batched_tokens=16) == [1, 1, 6, 8]
    assert lengths_of(nb, "chunked", [6, 7, 2], [], max_num_batched_tokens=16) == [6, 7, 2]


def test_each_rule_writes_the_step_it_says(nb):
    check_rules(nb)


# -- the loop and its clock ---------------------------------------------------------------------------------------
def test_a_budget_without_room_for_every_row_is_refused(nb):
    for budget in (None, 0, 7):
        with pytest.raises(EngineError, match="room for one token of every row"):
            nb.Scheduler(nb.BlockCounter(8, 32), "chunked", max_num_seqs=8, max_num_batched_tokens=budget)
    assert nb.Scheduler(nb.BlockCounter(8, 32), "chunked", max_num_seqs=8, max_num_batched_tokens=8)


def load(*rows, kind="open", concurrency=1):
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(1,) * n_in, max_tokens=n_out, arrival=at)
        for i, (at, n_in, n_out) in enumerate(rows)
    )
    return Workload(name="test", requests=requests, kind=kind, concurrency=concurrency)


def served(nb, policy, workload, cost=(1.0, 0, 0.1, 0, 0, 0, 0), n_blocks=400, **limits):
    limits = {"max_num_seqs": 8, **({"max_num_batched_tokens": 10} if policy == "chunked" else {}), **limits}
    scheduler = nb.Scheduler(nb.BlockCounter(n_blocks, 4), policy, **limits)
    streams, steps = nb.serve(scheduler, nb.CostExecutor(nb.CostModel(cost)), workload)
    assert scheduler.manager.n_free == n_blocks
    return streams, steps


def check_clock(nb):
    """Gaps are exactly the steps between two tokens; idle time is jumped over, and arrivals wait for the step in progress."""
    alone, steps = served(nb, "orca", load((3.0, 20, 3)))
    assert alone["r0"][0] == 3.0 and alone["r0"][1] == pytest.approx([6.0, 7.0, 8.0])
    late = load((0.0, 10, 6), (2.5, 40, 2), (100.0, 10, 1))
    for policy, pause, first in (("orca", 5.0, 8.0), ("chunked", 1.9, None)):
        streams, steps = served(nb, policy, late)
        times = streams["r0"][1]
        assert max(b - a for a, b in pairwise(times)) == pytest.approx(pause), (policy, times)
        ends = [step.start + step.seconds for step in steps]
        assert all(any(abs(t - end) < 1e-9 for end in ends) for _, ts, _ in streams.values() for t in ts)
        assert all(b.start >= a.start + a.seconds - 1e-9 for a, b in pairwise(steps))
        assert streams["r2"][1] == pytest.approx([102.0])
        assert [len(streams[f"r{i}"][1]) for i in range(3)] == [6, 2, 1]
        if first:
            assert streams["r1"][1][0] == pytest.approx(first)
    closed, steps = served(nb, "orca", load(*[(0.0, 4, 3)] * 6, kind="closed", concurrency=2))
    assert max(len(step.feeds) for step in steps) == 2
    assert sorted(closed) == [f"r{i}" for i in range(6)] and closed["r5"][0] > closed["r1"][0]
    # A client whose answer is complete asks again, though its row still pads the static batch.
    rows = load((0.0, 4, 2), (0.0, 4, 9), (0.0, 4, 2), kind="closed", concurrency=2)
    padded, _ = served(nb, "static", rows)
    assert padded["r2"][0] == pytest.approx(padded["r0"][1][-1]) and padded["r2"][1][0] > padded["r1"][1][-1]


def test_the_clock_sees_every_gap(nb):
    check_clock(nb)


def check_static_against_continuous(nb):
    rng = random.Random(1)
    outputs = [rng.choice((1, 2, 12)) for _ in range(24)]
    workload = load(*[(0.0, 3, n) for n in outputs])
    count = {p: len(served(nb, p, workload, max_num_seqs=4)[1]) for p in ("static", "orca")}
    assert count["static"] == sum(max(outputs[i : i + 4]) for i in range(0, 24, 4))
    free_at = [0] * 4
    for n in outputs:
        heapq.heapreplace(free_at, free_at[0] + n)
    assert count["orca"] == max(free_at)
    assert count["static"] / count["orca"] <= max(outputs) / (sum(outputs) / len(outputs))
    padding = [feed for step in served(nb, "static", workload, max_num_seqs=4)[1] for feed in step.feeds if feed[3]]
    assert len(padding) == 4 * count["static"] - sum(outputs)


def test_steps_and_padding_are_what_arithmetic_says(nb):
    check_static_against_continuous(nb)


# -- the cost model ---------------------------------------------------------------------------------------
def check_cost_model(nb):
    assert nb.step_features([(9, 1)]) == (1, 0, 0, 0, 1, 0, 10)
    assert nb.step_features([(9, 1), (4, 1)]) == (1, 1, 0, 0, 2, 0, 20)
    assert nb.step_features([(0, 8)]) == (1, 1, 8, 1, 0, 64, 0)
    assert nb.step_features([(16, 8), (0, 4), (30, 1), (9, 1)]) == (1, 1, 12, 2, 2, 8 * 24 + 16, 62)
    assert len(nb.FEATURES) == len(nb.step_features([(0, 1)]))
    truth, rng = nb.CostModel([0.05, 0.03, 2e-3, 0.01, 4e-3, 1e-6, 2e-5]), random.Random(2)
    steps = []
    for _ in range(120):
        spans = [(rng.randint(0, 400), 1) for _ in range(rng.randint(0, 6))]
        spans += [(rng.choice((0, 64, 256)), rng.randint(2, 200)) for _ in range(rng.randint(0 if spans else 1, 2))]
        feeds = [("x", start, n, False) for start, n in spans]
        steps.append(nb.Step(0.0, truth.seconds(spans), 0.0, feeds))
    fitted = nb.CostModel.fit(steps)
    assert max(map(abs, fitted.errors(steps))) < 1e-6
    assert fitted.coefficients == pytest.approx(truth.coefficients, rel=1e-3)
    doubled = [nb.Step(0.0, 2 * step.seconds, 0.0, step.feeds) for step in steps]
    assert fitted.errors(doubled) == pytest.approx([-0.5] * 120)
    falling = [nb.Step(0.0, 1 / (1 + n), 0.0, [("x", 0, n, False)]) for n in range(2, 60)]
    assert min(nb.CostModel.fit(falling).coefficients) >= 0


def test_the_cost_model_finds_coefficients_and_never_a_negative_one(nb):
    check_cost_model(nb)


def check_counter(nb):
    """The counting manager takes, refuses and frees exactly as the real one."""
    rng, real, counter = random.Random(4), paged_kv.BlockManager(9, 3), nb.BlockCounter(9, 3)
    names, refused = [], 0
    for i in range(1500):
        kind = rng.choice(("allocate", "append", "append", "free"))
        if kind == "allocate" or not names:
            call = ("allocate", f"s{i}", [0] * rng.randint(1, 9))
        else:
            call = (kind, rng.choice(names), *([[0] * rng.randint(1, 3)] if kind == "append" else []))
        outcomes = []
        for manager in (real, counter):
            try:
                getattr(manager, call[0])(*call[1:])
                outcomes.append("done")
            except paged_kv.OutOfBlocks:
                outcomes.append("refused")
        assert outcomes[0] == outcomes[1], call
        refused += outcomes[0] == "refused"
        if outcomes[0] == "done" and call[0] != "append":
            names.append(call[1]) if call[0] == "allocate" else names.remove(call[1])
        assert real.n_free == counter.n_free
        assert all(real.n_tokens(name) == counter.n_tokens(name) for name in names)
    assert refused > 50


def test_the_counter_is_the_managers_arithmetic(nb):
    check_counter(nb)


def check_bisection(nb):
    for limit in (0.4, 1.0, 3.21, 7.9, 8.0, 11.0):
        asked = []
        got = nb.highest_rate(lambda rate, limit=limit, asked=asked: asked.append(rate) or rate <= limit, 1.0, 8.0, 12)
        expected = 0.0 if limit < 1 else min(limit, 8.0)
        assert got <= limit and got == pytest.approx(expected, abs=7 / 2**12) and len(asked) <= 14


def test_bisection_finds_the_highest_rate(nb):
    check_bisection(nb)


NOTEBOOK_TWINS = {
    "an ITL gap missed (a token has its step's beginning)": (
        "streams[seq.seq_id][1].append(now)",
        "streams[seq.seq_id][1].append(steps[-1].start)",
    ),
    "an ITL gap missed (long steps are cut short)": (
        "now += seconds if executor.is_simulated else seconds + planning",
        "now += min(seconds, 2.0)",
    ),
    "a clock that does not jump": ("            now = pending[0].arrival\n", "            now = 0.0 + pending[0].arrival * 2\n"),
    "a closed loop whose clients wait for the whole batch": (
        "sum(not seq.is_finished for seq in scheduler.running)",
        "len(scheduler.running)",
    ),
    "a closed loop without a limit": ("n_inside < workload.concurrency)", "True)"),
    "pairs without the context": ("n * (start + n)", "n * n"),
    "decode rows that are not padded": ("len(contexts) * max(contexts, default=0)", "sum(contexts)"),
    "absolute errors": ("rows / scale / seconds[:, None], np.ones(len(steps))", "rows / scale / seconds[:, None], seconds"),
    "a cost that forgets the context": ("(seq.n_computed, n) for seq, n in feeds])", "(0, n) for seq, n in feeds])"),
    "a counter that forgets to free": ("self.n_free += self.blocks_for(self._held.pop(seq_id))", "self._held.pop(seq_id)"),
    "a counter off by one at a block edge": (
        "        return -(-n_tokens // self.block_size)",
        "        return n_tokens // self.block_size + 1",
    ),
    "bisection to the wrong side": ("(middle, high) if holds(middle)", "(low, middle) if holds(middle)"),
    "prompts that stall decodes": (
        "return scheduler.decode() + scheduler.admit()",
        "return scheduler.admit() or scheduler.decode()",
    ),
    "decodes after prompts": (
        "    feeds = scheduler.decode()\n"
        "    feeds += scheduler.continue_prefills(scheduler.max_num_batched_tokens - len(feeds))\n",
        "    feeds = scheduler.continue_prefills(scheduler.max_num_batched_tokens)\n"
        "    feeds += scheduler.decode()\n",
    ),
}  # fmt: skip


def check_costs_see_the_context(nb):
    _, steps = served(nb, "orca", load((0.0, 50, 4)), cost=(0.0, 0, 0, 0, 0, 0, 1.0))
    assert [step.seconds for step in steps] == pytest.approx([0.0, 51.0, 52.0, 53.0])


def check_decodes_come_first(nb):
    manager = nb.BlockCounter(1000, 4)
    scheduler = nb.Scheduler(manager, "chunked", max_num_batched_tokens=8)
    for i, (n, computed, outputs) in enumerate(((50, 10, []), (6, 6, [0]))):
        seq = nb.Sequence(f"s{i}", [0] * n, 9, outputs, computed)
        manager.allocate(seq.seq_id, seq.prompt_ids)
        scheduler.running.append(seq)
    assert {seq.seq_id: n for seq, n in scheduler.plan()} == {"s1": 1, "s0": 7}


def test_the_context_costs_and_decodes_come_first(nb):
    check_costs_see_the_context(nb)
    check_decodes_come_first(nb)


@pytest.mark.parametrize("name", NOTEBOOK_TWINS)
def test_a_broken_algorithm_is_caught(load_algorithms, name):
    twin = load_algorithms(NAME, NOTEBOOK_TWINS[name])
    with pytest.raises(CAUGHT):
        check_rules(twin)
        check_clock(twin)
        check_static_against_continuous(twin)
        check_cost_model(twin)
        check_counter(twin)
        check_bisection(twin)
        check_costs_see_the_context(twin)
        check_decodes_come_first(twin)


# -- a real (tiny) model ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_says_the_same_under_every_rule(nb, policy):
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=60, num_attention_heads=4, num_key_value_heads=2
    )  # fmt: skip
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
        rng = random.Random(3)
        rows = [(tuple(rng.randrange(60) for _ in range(rng.randint(1, 14))), rng.randint(1, 9)) for _ in range(8)]
        workload = Workload(
            name="tiny",
            kind="closed",
            concurrency=8,
            requests=tuple(Request(request_id=f"r{i}", prompt_ids=p, max_tokens=n) for i, (p, n) in enumerate(rows)),
        )
        manager = paged_kv.BlockManager(11, 3)
        paged = paged_kv.PagedModel(model, paged_kv.PagedKVCache.for_model(model, 11, 3), manager)
        scheduler = nb.Scheduler(manager, policy, max_num_seqs=4, max_num_batched_tokens=7)
        streams, _ = nb.serve(scheduler, nb.ModelExecutor(paged), workload)
        assert scheduler.n_preempted > 0 and manager.n_used == 0
        for i, (prompt, n) in enumerate(rows):
            cache = kv_adapter.new_cache("dynamic", model.config)
            expected, _ = kv_adapter.decode_greedy(model, cache, torch.tensor(prompt), n)
            assert streams[f"r{i}"][2] == expected, i


# -- exercises ---------------------------------------------------------------------------------------
answers = partial(notebook_cells.answers, NAME)
edited = partial(notebook_cells.edited, NAME)


ANSWERS = checked_functions(NAME)


def _a_lower_bound(outputs, n_rows):
    static = sum(max(outputs[i : i + n_rows]) for i in range(0, len(outputs), n_rows))
    return static, max(max(outputs), -(-sum(outputs) // n_rows))


def _full_batches_only(outputs, n_rows):
    static = sum(max(outputs[i : i + n_rows]) for i in range(0, len(outputs) - n_rows + 1, n_rows))
    return static, answers("solution")["steps_needed"](outputs, n_rows)[1]


def _longest_first(outputs, n_rows):
    solve = answers("solution")["steps_needed"]
    return solve(outputs, n_rows)[0], solve(sorted(outputs, reverse=True), n_rows)[1]


def _in_order_of_arrival(running, waiting, budget, max_num_seqs):
    tokens = []
    for left in running:
        tokens.append(min(left, budget))
        budget -= tokens[-1]
    return tokens, []


def _decodes_are_free(running, waiting, budget, max_num_seqs):
    tokens = [int(left == 1) for left in running]
    for index, left in enumerate(running):
        if left > 1:
            tokens[index] = min(left, budget)
            budget -= tokens[index]
    return tokens, answers("solution")["fill_step"]([], waiting, budget, max_num_seqs - len(running))[1]


def _whole_prompts(running, waiting, budget, max_num_seqs):
    tokens, admitted = answers("solution")["fill_step"](running, waiting, budget, max_num_seqs)
    return tokens, [n for n, length in zip(admitted, waiting, strict=False) if n == length]


def _admits_with_nothing(running, waiting, budget, max_num_seqs):
    tokens, admitted = answers("solution")["fill_step"](running, waiting, budget, max_num_seqs)
    rows = min(len(waiting), max_num_seqs - len(running))
    return tokens, admitted + [0] * (rows - len(admitted))


def _the_buggy_one(waiting, n_free):
    return answers("exercise")["buggy_admit"](waiting, n_free)


def _smallest_first(waiting, n_free):
    return answers("exercise")["buggy_admit"](sorted(waiting, key=lambda item: item[1]), n_free)


def _does_not_count_down(waiting, n_free):
    admitted = []
    for seq_id, needed in waiting:
        if needed > n_free:
            break
        admitted.append(seq_id)
    return admitted


def _one_at_a_time(waiting, n_free):
    return answers("solution")["mended_admit"](waiting[:1], n_free)


def _goodput(counts, strictly=False, halve=True):
    def highest(run_at, ttft, tpot, low, high, n_halvings, share=0.9):
        def holds(rate):
            pairs = counts(run_at(rate))
            good = sum(
                first is not None
                and (first < ttft if strictly else first <= ttft)
                and (each is None or (each < tpot if strictly else each <= tpot))
                for first, each in pairs
            )
            return good >= share * len(pairs)

        if not holds(low):
            return 0.0
        if holds(high):
            return high
        if not halve:
            return max(r for i in range(1000) if holds(r := low + (high - low) * i / 1000))
        for _ in range(n_halvings):
            middle = (low + high) / 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    return highest


_only_those_that_came_back = _goodput(lambda pairs: [p for p in pairs if p[0] is not None])
_limits_are_strict = _goodput(lambda pairs: pairs, strictly=True)
_a_scan = _goodput(lambda pairs: pairs, halve=False)


def _forgets_the_decodes(budgets, step_seconds, n_prompt, n_decodes, longest_pause):
    return answers("solution")["best_budget"](
        budgets, lambda p, n, _: step_seconds(p, n, n_decodes), n_prompt, 0, longest_pause
    )


def _only_the_first_step(budgets, step_seconds, n_prompt, n_decodes, longest_pause):
    good = [
        b
        for b in budgets
        if b > n_decodes and step_seconds(0, min(b - n_decodes, n_prompt), n_decodes) <= longest_pause
    ]
    return max(good, default=None)


def _the_largest(budgets, step_seconds, n_prompt, n_decodes, longest_pause):
    return max(budgets)


def _equal_shares(running, waiting, budget, max_num_seqs):
    n_decodes = running.count(1)
    share = (budget - n_decodes) // max(1, len(running) - n_decodes)
    tokens = [1 if left == 1 else min(left, share) for left in running]
    rest = answers("solution")["fill_step"]([], waiting, budget - sum(tokens), max_num_seqs - len(running))
    return tokens, rest[1]


def _reserves_what_is_left(waiting, n_free):
    admitted, reserved = [], 0
    for seq_id, needed in waiting:
        if needed <= n_free - reserved:
            admitted.append(seq_id)
            n_free -= needed
        else:
            reserved = min(n_free, needed)
    return admitted


def _overtakes_three_times():
    passed: dict[str, int] = {}

    def admit(waiting, n_free):
        admitted = []
        for seq_id, needed in waiting:
            if needed <= n_free:
                admitted.append(seq_id)
                n_free -= needed
            else:
                passed[seq_id] = passed.get(seq_id, 0) + 1
                if passed[seq_id] > 3:
                    break
        return admitted

    return admit


def _each_limit_apart(run_at, ttft, tpot, low, high, n_halvings, share=0.9):
    solve = answers("solution")["highest_goodput_rate"]
    run = cache(run_at)  # no rate is run twice
    first = solve(run, ttft, float("inf"), low, high, n_halvings, share)
    each = solve(lambda r: [(0.0, t) for _, t in run(r)], ttft, tpot, low, high, n_halvings, share)
    return min(first, each)


def _shares_of_percentiles(run_at, ttft, tpot, low, high, n_halvings, share=0.9):
    def worst(rate):
        pairs = run_at(rate)
        at = -(-len(pairs) * 9 // 10) - 1
        return [
            (
                sorted(9e9 if a is None else a for a, _ in pairs)[at],
                sorted(0.0 if b is None else b for _, b in pairs)[at],
            )
        ]

    return answers("solution")["highest_goodput_rate"](worst, ttft, tpot, low, high, n_halvings)


def _equal_pieces(budgets, step_seconds, n_prompt, n_decodes, longest_pause):
    found = []
    for budget in (b for b in budgets if b > n_decodes):
        n = -(-n_prompt // (budget - n_decodes))
        cuts = [n_prompt * i // n for i in range(n + 1)]
        steps = [step_seconds(a, b - a, n_decodes) for a, b in pairwise(cuts)]
        if max(steps) <= longest_pause:
            found.append((sum(steps), budget))
    return min(found)[1] if found else None


def _the_largest_that_keeps_the_limit(budgets, step_seconds, n_prompt, n_decodes, longest_pause):
    solve = answers("solution")["best_budget"]
    good = [b for b in budgets if solve([b], step_seconds, n_prompt, n_decodes, longest_pause)]
    return min((b for b in good if b >= n_prompt + n_decodes), default=max(good, default=None))


def _limit_on_the_whole_prompt(budgets, step_seconds, n_prompt, n_decodes, longest_pause):
    solve = answers("solution")["best_budget"]
    best = solve(budgets, step_seconds, n_prompt, n_decodes, float("inf"))
    piece = (best or 0) - n_decodes
    total = sum(step_seconds(p, min(piece, n_prompt - p), n_decodes) for p in range(0, n_prompt, piece)) if best else 0
    return best if total <= longest_pause else None


WRONG = [
    ("03.1", _a_lower_bound, "(continuous)"),
    ("03.1", _full_batches_only, "a batch that is not full"),
    ("03.1", _longest_first, "(continuous)"),
    ("03.2", _in_order_of_arrival, "decodes come before"),
    ("03.2", _decodes_are_free, "decodes come before"),
    ("03.2", _whole_prompts, "a new prompt's piece"),
    ("03.2", _admits_with_nothing, "begun prompts come before new ones"),
    ("03.3", _the_buggy_one, "holds up those behind"),
    ("03.3", _smallest_first, "who does not fit holds up those behind"),
    ("03.3", _does_not_count_down, "blocks are counted down"),
    ("03.3", _one_at_a_time, "all are admitted where all fit"),
    ("03.4", _only_those_that_came_back, "a failed request met nothing"),
    ("03.4", _limits_are_strict, "a limit met exactly does not"),
    ("03.4", _a_scan, "halved"),
    ("03.5", _forgets_the_decodes, "exactly as long as the limit"),
    ("03.5", _only_the_first_step, "later pieces see more context"),
    ("03.2", _equal_shares, "two begun prompts: the older first"),
    ("03.3", _reserves_what_is_left, "a request that needs much of the pool enters"),
    ("03.3", _overtakes_three_times(), "who does not fit holds up those behind"),
    ("03.4", _each_limit_apart, "the two are not judged apart"),
    ("03.4", _shares_of_percentiles, "the two are not judged apart"),
    ("03.5", _equal_pieces, "later pieces see more context"),
    ("03.5", _the_largest_that_keeps_the_limit, "small pieces may be sooner"),
    ("03.5", _limit_on_the_whole_prompt, "the largest budget whose steps are short enough"),
    ("03.5", _the_largest, "the largest budget whose steps are short enough"),
]


@pytest.mark.parametrize(("number", "answer", "words"), WRONG, ids=[f"{n} {i}" for i, (n, _, _) in enumerate(WRONG)])
def test_typical_wrong_answers_fail_with_the_property_named(number, answer, words):
    result = exercises.check(number, answer)
    assert_names_what_broke(result, words)


HEAP = "    for n in outputs:\n        heapq.heapreplace(free_at, free_at[0] + n)\n"
PIECE = "step_seconds(p, min(piece, n_prompt - p), n_decodes)"
GOOD = "first is not None and first <= ttft and (each is None or each <= tpot)"
CUT = "    for length in waiting[: max_num_seqs - len(running)]:"
WRONG_EDITS = [
    ("03.1", "static, max(free_at)", "max(free_at), static", "static waits for the longest"),
    ("03.1", "static, max(free_at)", "[static, max(free_at), n_rows]", "a pair (static, continuous)"),
    ("03.1", "static, max(free_at)", "{'static': static, 'continuous': max(free_at)}", "a pair (static, continuous)"),
    ("03.1", "static, max(free_at)", "f'{static} {max(free_at)}'", "a pair (static, continuous)"),
    ("03.1", "static, max(free_at)", "static, min(free_at)", "(continuous)"),
    ("03.1", "free_at[0] + n)", "free_at[0] + n + (free_at[0] > 0))", "(continuous)"),
    ("03.1", HEAP, "    for i, n in enumerate(outputs):\n        free_at[i % n_rows] += n\n", "(continuous)"),
    ("03.2", "enumerate(running)", "reversed([*enumerate(running)])", "two begun prompts: the older first"),
    ("03.2", "enumerate(running)", "sorted(enumerate(running), key=lambda x: x[1])", "each in order of arrival"),
    ("03.2", CUT, CUT.replace("waiting[:", "sorted(waiting)[:"), "each in order of arrival"),
    ("03.2", CUT, CUT.replace("waiting[:", "sorted(waiting, reverse=True)[:"), "to new requests, in order"),
    ("03.2", "        if budget == 0:\n", "        if budget < min(length, 16):\n", "the rest goes to new requests"),
    ("03.2", "        if budget == 0:\n", "        if budget == 0 or len(admitted) == 4:\n", "as many new requests"),
    ("03.2", "min(left, budget)", "min(left, budget, 32)", "a piece is as long as the budget allows"),
    ("03.2", "return tokens, admitted", "return [n for n in tokens if n], admitted", "waits with 0"),
    ("03.2", "return tokens, admitted", "return tokens, len(admitted)", "a pair of lists"),
    ("03.2", "return tokens, admitted", "return tokens + admitted", "a pair of lists"),
    ("03.2", "return tokens, admitted", "return tokens, None", "a pair of lists"),
    ("03.3", "in waiting:", "in waiting[:2]:", "as many as fit"),
    (
        "03.3",
        "            break\n",
        "            if needed > 6:\n                break\n            continue\n",
        "if alone it would fit",
    ),
    ("03.3", "needed > n_free", "needed >= n_free", "all are admitted where all fit"),
    ("03.3", "return admitted", "return admitted or None", "the head of the queue"),
    ("03.3", "return admitted", "return admitted[::-1]", "in order of arrival"),
    ("03.3", "return admitted", "return ' '.join(admitted)", "all are admitted"),
    ("03.3", "return admitted", "return [(i, n) for i, n in waiting if i in admitted]", "only ids"),
    ("03.3", "return admitted", "return admitted + admitted[:1]", "nobody is admitted twice"),
    ("03.3", "return admitted", "return admitted if len(admitted) == len(waiting) else []", "blocks are counted down"),
    (
        "03.3",
        "            break\n",
        "            admitted.append(seq_id)\n            break\n",
        "blocks are counted down",
    ),
    ("03.4", "(each is None or each <= tpot)", "each is not None and each <= tpot", "a TPOT of None"),
    (
        "03.4",
        GOOD,
        "first is not None and (each is None or first <= ttft and each <= tpot)",
        "one token the TTFT counts",
    ),
    ("03.4", GOOD, "first is not None and first <= ttft", "slow tokens break"),
    ("03.4", GOOD, "first is not None and first < ttft and (each is None or each <= tpot)", "a limit met exactly"),
    ("03.4", "good >= share", "good > share", "a share met exactly is enough"),
    ("03.4", "share * len(pairs)", "0.9 * len(pairs)", "share is what is given"),
    ("03.4", "share=0.9", "share=0.86", "share is 0.9 if not given"),
    ("03.4", "share=0.9", "share=0.95", "share is 0.9 if not given"),
    ("03.4", "good >= share * len(pairs)", "good >= int(share * len(pairs))", "share is 0.9"),
    ("03.4", "good >= share * len(pairs)", "len(pairs) - good <= 2", "share is what is given"),
    ("03.4", "first <= ttft and", "first <= 1.0 and", "the limits are those given"),
    ("03.4", "each <= tpot)", "each <= 0.1)", "the limits are those given"),
    ("03.4", "range(n_halvings)", "range(n_halvings - 1)", "halved n_halvings times"),
    ("03.4", "range(n_halvings)", "range(n_halvings + 1)", "halved, not searched"),
    ("03.4", "range(n_halvings)", "range(10)", "halved, not searched"),
    (
        "03.4",
        "        middle =",
        "        if not holds(low):\n            return 0.0\n        middle =",
        "no rate is run twice",
    ),
    ("03.4", "    return low\n", "    return round(low, 2)\n", "its lower end returned"),
    ("03.4", "    return low\n", "    return (low + high) / 2\n", "its lower end returned"),
    ("03.4", "    return low\n", "    return high\n", "a rate that holds"),
    ("03.4", "        return 0.0\n", "        return low\n", "0 where the lowest rate fails"),
    ("03.4", "    if holds(high):\n        return high\n", "", "the highest rate, where it holds"),
    ("03.4", "(low + high) / 2", "(low * high) ** 0.5", "halved n_halvings times"),
    ("03.5", PIECE, PIECE.replace("(p,", "(0,"), "timed at its own position"),
    ("03.5", PIECE, PIECE.replace("n_decodes)", "0)"), "decodes lengthen the step too"),
    ("03.5", PIECE, PIECE.replace("min(piece, n_prompt - p)", "piece"), "later pieces"),
    ("03.5", PIECE, PIECE.replace("(p,", "(p + min(piece, n_prompt - p),"), "later pieces"),
    (
        "03.5",
        "range(0, n_prompt, piece)",
        "range(0, max(1, n_prompt // piece) * piece, piece)",
        "shorter piece is a step",
    ),
    ("03.5", "range(0, n_prompt, piece)", "range(0, n_prompt + 1, piece)", "shorter piece is a step"),
    ("03.5", "max(steps) <=", "sum(steps) / len(steps) <=", "every step keeps the limit"),
    ("03.5", "max(steps) <=", "steps[-1] <=", "any step may be the longest"),
    ("03.5", "max(steps) <=", "max(steps[0], steps[-1]) <=", "any step may be the longest"),
    ("03.5", "max(steps) <=", "max(steps) <", "exactly as long as the limit"),
    ("03.5", "sum(steps) < best[0]", "sum(steps) <= best[0]", "of equals the smallest"),
    (
        "03.5",
        "sum(steps) < best[0]",
        "len(steps) < -(-n_prompt // (best[1] - n_decodes))",
        "sooner than the whole prompt",
    ),
    ("03.5", "sum(steps) < best[0]", "max(steps) < best[0]", "seconds count"),
    ("03.5", "in sorted(budgets)", "in budgets", "of equals the smallest"),
    ("03.5", "piece < 1", "piece == 0", "a budget below the decodes"),
    ("03.5", "piece < 1", "piece < 2", "a piece may be of one token"),
    ("03.5", "best and best[1]", "best", "without a limit"),
    ("03.5", "best and best[1]", "best[1] if best else 0", "None where none will do"),
]


@pytest.mark.parametrize(("number", "old", "new", "words"), WRONG_EDITS)
def test_a_solution_made_wrong_fails_with_the_property_named(number, old, new, words):
    assert_names_what_broke(exercises.check(number, edited(number, (old, new))), words)


RIGHT_EDITS = [
    ("03.1", "static, max(free_at)", "[static, max(free_at)]"),
    ("03.1", "static, max(free_at)", "np.array([static, max(free_at)])"),
    ("03.1", "static, max(free_at)", "torch.tensor([static, max(free_at)])"),
    ("03.1", "static, max(free_at)", "float(static), np.float32(max(free_at))"),
    ("03.1", HEAP, "    for n in outputs:\n        free_at.sort()\n        free_at[0] += n\n"),
    ("03.1", "    static =", "    outputs = list(outputs)\n    static ="),
    ("03.1", "    return static", "    outputs.clear()\n    return static"),
    ("03.2", "return tokens, admitted", "return [tuple(tokens), tuple(admitted)]"),
    ("03.2", "return tokens, admitted", "return np.array(tokens), np.array(admitted)"),
    ("03.2", "return tokens, admitted", "return torch.tensor(tokens), torch.tensor(admitted)"),
    ("03.2", "return tokens, admitted", "return map(float, tokens), (n for n in admitted)"),
    ("03.2", "return tokens, admitted", "running.clear()\n    return tokens, admitted"),
    (
        "03.2",
        "        if budget == 0:\n            break\n",
        "        if not budget:\n            return tokens, admitted\n",
    ),
    ("03.3", "return admitted", "return tuple(admitted)"),
    ("03.3", "return admitted", "return iter(admitted)"),
    ("03.3", "return admitted", "return np.array(admitted)"),
    ("03.3", "return admitted", "return set(admitted)"),
    ("03.3", "return admitted", "return dict.fromkeys(admitted).keys()"),
    ("03.3", "return admitted", "waiting.clear()\n    return admitted"),
    ("03.4", "good >= share * len(pairs)", "good / len(pairs) >= share"),
    ("03.4", "good >= share * len(pairs)", "len(pairs) - good <= (1 - share) * len(pairs)"),
    ("03.4", "good >= share * len(pairs)", "bool(np.mean([True] * good + [False] * (len(pairs) - good)) >= share)"),
    ("03.4", "    return low\n", "    return np.float64(low)\n"),
    ("03.4", "    return low\n", "    return torch.tensor(low)\n"),
    ("03.4", "        return 0.0\n", "        return 0\n"),
    ("03.4", "(low + high) / 2", "low + (high - low) / 2"),
    ("03.4", GOOD, "(first if first is not None else 1e9) <= ttft and (each or 0.0) <= tpot"),
    ("03.5", "best and best[1]", "np.int64(best[1]) if best else None"),
    ("03.5", "best and best[1]", "float(best[1]) if best else None"),
    ("03.5", "in sorted(budgets)", "in sorted(budgets, reverse=True)", "sum(steps) < best[0]", "sum(steps) <= best[0]"),
    ("03.5", "max(steps) <= longest_pause", "all(s <= longest_pause for s in steps)"),
    ("03.5", "max(steps) <= longest_pause", "not np.any(np.array(steps) > longest_pause)"),
    ("03.5", "piece < 1", "budget <= n_decodes"),
    ("03.5", "    best = None\n", "    best = None\n    budgets.sort()\n"),
    ("03.5", "sum(steps) < best[0]", "float(np.sum(steps)) < best[0]"),
]


@pytest.mark.parametrize("case", RIGHT_EDITS)
def test_a_right_answer_in_another_dress_passes(case):
    number, *edits = case
    result = exercises.check(number, edited(number, *zip(edits[::2], edits[1::2], strict=True)))
    assert result.state == "pass", result


def test_the_buggy_admission_starves_a_large_request_and_nothing_else():
    """What exercise 03.3 says is true: more blocks are in use with the bug, and the large request waits for ever."""
    used = {}
    for name, admit in (("buggy", answers("exercise")["buggy_admit"]), ("mended", answers("solution")["mended_admit"])):
        waiting, inside, n_free, entered, total = [("large", 7)], [(1, 3), (2, 3), (3, 2)], 0, None, 0
        for step in range(200):
            n_free += sum(n for end, n in inside if end == step)
            inside = [item for item in inside if item[0] != step]
            waiting += [(f"{step}.{i}", 1) for i in range(3)]
            admitted = admit(waiting, n_free)
            needed = dict(waiting)
            inside += [(step + 3, needed[seq_id]) for seq_id in admitted]
            n_free -= sum(needed[seq_id] for seq_id in admitted)
            waiting = [item for item in waiting if item[0] not in admitted]
            entered = step if "large" in admitted else entered
            total += 8 - n_free
        used[name] = total
        assert (entered is None) == (name == "buggy"), (name, entered)
    assert used["buggy"] > used["mended"]
