"""Notebook 13, cluster scale: the event simulator keeps its books, broken twins are caught, it agrees with Dynamo's replay."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.paths import ROOT

NAME = "13_pd_disaggregation"
STORED = ROOT / "data" / "cluster_results.json"
INF = float("inf")


@pytest.fixture(scope="module")
def nb(load_algorithms) -> SimpleNamespace:
    return load_algorithms(NAME)


def cost_of(nb, **more):
    """Costs in round numbers: a prompt of 100 takes 2 s, a decode step of a row with 100 tokens 0.21 s."""
    return nb.GpuCost((1.0, 0.01, 0.0), (0.1, 0.01, 0.001), **more)


def loads(n: int, seed: int, rate: float = 0.5) -> list[tuple[float, int, int]]:
    rng = random.Random(seed)
    now, rows = 0.0, []
    for _ in range(n):
        now += rng.expovariate(rate)
        rows.append((now, rng.randint(1, 300), rng.randint(1, 30)))
    return rows


class Watched:
    """A cost model that checks what each step holds."""

    def __init__(self, cost, budget=INF, kv_tokens=INF, max_num_seqs=INF, on_decode=False):
        self.on_decode = on_decode  # then who is read in a step decodes in it as well
        self.cost, self.budget, self.kv_tokens, self.max_num_seqs = cost, budget, kv_tokens, max_num_seqs
        self.weights_once, self.decode, self.n_steps, self.n_mixed = cost.weights_once, cost.decode, 0, 0

    def prefill_seconds(self, pieces):
        return self.cost.prefill_seconds(pieces)

    def decode_seconds(self, rows, context):
        return self.cost.decode_seconds(rows, context)

    def seconds(self, pieces, rows, context):
        new = sum(n for _, n in pieces)
        assert new + rows - self.on_decode * len(pieces) <= self.budget, "the step exceeds its budget"
        assert context + (0 if self.on_decode else new) <= self.kv_tokens, "more keys and values than fit"
        assert rows <= self.max_num_seqs and context >= rows and rows >= 0, "rows or context are wrong"
        assert all(n > 0 and start >= 0 for start, n in pieces)
        self.n_steps, self.n_mixed = self.n_steps + 1, self.n_mixed + bool(pieces and rows)
        return self.cost.seconds(pieces, rows, context)


def at_rest(cluster) -> None:
    """Nothing is left in any engine."""
    for engine in cluster.engines:
        assert (engine.rows, engine.context, engine.reserved, engine.n_begun) == (0, 0, 0, 0), "an engine is not empty"
        assert not engine.queue and not engine.inbox and not engine.due and not engine.held and not engine.busy


def sound(jobs) -> None:
    """Each job has its tokens, in order, none before it could be there."""
    for job in jobs:
        assert len(job.times) == job.n_output and job.n_left == 0
        assert all(a < b for a, b in zip(job.times, job.times[1:], strict=False)), "two tokens of one job at one time"
        assert job.times[0] > job.arrival and job.prefilled > job.arrival


# -- checks that every sound version passes; each broken twin must fail at least one ----------------------------------------
def check_costs(nb) -> None:
    cost = nb.GpuCost((1.0, 0.01, 0.001), (0.1, 0.01, 0.001))
    assert cost.prefill_seconds([]) == 0.0 and cost.decode_seconds(0, 0) == 0.0
    assert cost.prefill_seconds([(0, 10)]) == pytest.approx(1 + 0.1 + 0.1)
    pieces = cost.prefill_seconds([(0, 6)]) + cost.prefill_seconds([(6, 4)])
    assert pieces == pytest.approx(2 + 0.1 + 0.1), "two pieces see the same pairs and pay one step more"
    assert cost.decode_seconds(2, 50) == pytest.approx(0.1 + 0.02 + 0.05)
    both = cost.seconds([(0, 10)], 2, 50)
    assert both == pytest.approx(1.2 + 0.17)
    once = nb.GpuCost(cost.prefill, cost.decode, weights_once=True)
    assert both - once.seconds([(0, 10)], 2, 50) == pytest.approx(0.1), "the weights are read once"
    assert once.seconds([], 2, 50) == pytest.approx(0.17) and once.seconds([(0, 10)], 0, 0) == pytest.approx(1.2)
    points = [(n, cost.prefill_seconds([(0, n)])) for n in (10, 100, 1000)]
    decodes = [(r, c, cost.decode_seconds(r, r * c)) for r in (1, 8, 32) for c in (10, 100)]
    fitted = nb.GpuCost.fit(points, decodes)
    assert np.allclose(fitted.prefill, cost.prefill) and np.allclose(fitted.decode, cost.decode)


def check_alone(nb) -> None:
    """One request has a closed form, colocated and split, with each rule for the first token."""
    cost = cost_of(nb)
    steps = [cost.decode_seconds(1, 100 + k) for k in range(1, 5)]
    for cluster, moved in ((nb.colocated(cost, 1), 0.0), (nb.split(cost, 1, 1, link=(10.0, 500.0)), 2.0)):
        (job,) = cluster.run([nb.ClusterJob(3.0, 100, 5)])
        assert job.ttft == pytest.approx(2.0) and job.moved == pytest.approx(moved)
        assert np.allclose(np.cumsum([2.0 + moved, *steps])[1:], np.array(job.times[1:]) - 3.0)
        at_rest(cluster)
    cluster = nb.colocated(cost, 1, on_decode=True)
    (job,) = cluster.run([nb.ClusterJob(0.0, 100, 2)])
    assert np.allclose(
        job.times, [2.0 + cost.decode_seconds(1, 100), 2.0 + sum(cost.decode_seconds(1, n) for n in (100, 101))]
    )
    (job,) = nb.colocated(cost, 1, budget=30).run([nb.ClusterJob(0.0, 100, 1)])
    assert job.times == pytest.approx([5.0]), "four pieces, each pays for its step"


def check_books(nb) -> None:
    """Random loads, all kinds of clusters: tokens are conserved, limits kept, engines empty at the end."""
    for seed in range(12):
        rng = random.Random(seed)
        settings_ = {"budget": rng.choice((16, 64, 8192)), "max_num_seqs": rng.choice((2, 8, 256))}
        settings_["budget"] = max(settings_["budget"], settings_["max_num_seqs"] + 1)
        settings_["kv_tokens"] = rng.choice((400, 1000, INF))
        options = {**settings_, "on_decode": seed % 3 == 0}
        cost = Watched(cost_of(nb, weights_once=seed % 2 == 0), **options)
        route = rng.choice((nb.RoundRobin(), nb.least_loaded))
        together = nb.colocated(cost, rng.randint(1, 3), route, **options)
        apart = nb.split(cost, rng.randint(1, 3), rng.randint(1, 3), route, link=(1.0, 100.0), **options)
        for cluster in (together, apart):
            jobs = [nb.ClusterJob(*row) for row in loads(60, seed)]
            assert cluster.run(jobs) == jobs
            sound(jobs)
            at_rest(cluster)


def check_order(nb) -> None:
    """One reader: who came first is read first; a reader's seconds are those of its prompts."""
    cluster = nb.split(cost_of(nb), 1, 2)
    jobs = cluster.run([nb.ClusterJob(*row) for row in loads(80, 5, rate=2.0)])
    assert [job.prefilled for job in jobs] == sorted(job.prefilled for job in jobs)
    reader = cluster.readers[0]
    assert reader.busy_seconds == pytest.approx(reader.prefill_seconds), "a reader only reads"
    assert not any(writer.prefill_seconds for writer in cluster.writers), "a writer only writes"


def check_interference(nb) -> None:
    """A long prompt stops colocated readers for its whole prefill, and split ones not at all."""
    for split, longest in ((False, 11.0), (True, 0.25)):
        cluster = nb.split(cost_of(nb), 1, 1) if split else nb.colocated(cost_of(nb), 1)
        reader, document = nb.ClusterJob(0.0, 10, 60), nb.ClusterJob(3.0, 1000, 1)
        cluster.run([reader, document])
        pause = max(np.diff(reader.times))
        assert pause >= longest if not split else pause < longest


def check_link(nb) -> None:
    """Transfers of one reader wait for each other; those of two readers do not."""
    for n, last in ((1, 18.0), (2, 10.0)):
        cluster = nb.split(cost_of(nb), n, 1, nb.RoundRobin(), link=(1.0, 10.0))
        jobs = cluster.run([nb.ClusterJob(0.0, 100, 2), nb.ClusterJob(0.0, 100, 2)])
        assert max(job.moved for job in jobs) == pytest.approx(last), n


def check_hold(nb) -> None:
    """Dynamo's trace replay gives nothing away before the reader is idle; a real engine does it at once."""
    for hold, expected in ((False, [2.0, 4.0, 6.0]), (True, [6.0, 6.0, 6.0])):
        cluster = nb.split(cost_of(nb), 1, 1, budget=100)
        cluster.hold_until_idle = hold
        jobs = cluster.run([nb.ClusterJob(0.0, 100, 2) for _ in range(3)])
        assert [job.prefilled + job.moved for job in jobs] == pytest.approx(expected)


def check_goodput(nb) -> None:
    """The bisection finds the edge of a cluster that breaks at a known rate; refused requests met nothing."""

    class Breaks:
        def __init__(self, edge):
            self.edge = edge

        def run(self, jobs):
            for i, job in enumerate(jobs):
                late = self.rate > self.edge and i % 5 == 0  # 20 % too late
                job.times = [job.arrival + (9.0 if late else 1.0), job.arrival + 9.5]

        def jobs(self, rate):
            self.rate = rate
            return [nb.ClusterJob(float(i), 1, 2) for i in range(50)]

    for edge in (0.3, 7.3, 150.0):
        cluster = Breaks(edge)
        found = nb.highest_goodput(lambda c=cluster: c, cluster.jobs, ttft=2.0, tpot=10.0)
        assert edge / 1.03 <= found <= edge
    assert nb.highest_goodput(lambda: cluster, Breaks(0.01).jobs, 0.5, 10.0) == 0.0
    jobs = [nb.ClusterJob(0.0, 1, 2, times=[1.0, 2.0]) for _ in range(4)]
    assert (
        nb.attained(jobs, 1.0, 1.0) == 1.0 and nb.attained(jobs, 0.9, 1.0) == 0.0 and nb.attained(jobs, 1.0, 0.9) == 0.0
    )
    jobs[0].rejected, jobs[0].times = "refused", []
    assert nb.attained(jobs, 1.0, 1.0) == 0.75


def check_arithmetic(nb) -> None:
    assert nb.goodput_per_gpu(2, 1, 5.6, 10) == pytest.approx(10 / 3)
    assert nb.goodput_per_gpu(1, 1, 5.6, 10) == pytest.approx(2.8)
    assert nb.goodput_per_gpu(1, 3, 5.6, 10) == pytest.approx(1.4)


def check_pool(nb) -> None:
    """Least recently used moves down, nothing is lost but from the last tier, and slow tiers are declined."""
    pool = nb.PrefixPool([(100, INF), (100, 10.0), (100, 1.0)], kv_bytes=1.0)
    for group in range(6):
        pool.put(group, 50)
    assert [list(tier) for tier in pool.tiers] == [[4, 5], [2, 3], [0, 1]] and pool.used == [100, 100, 100]
    assert pool.find(nb.ClusterJob(0, 60, 1, 2, 40)) == (40, 4.0), "from the second tier at ten bytes a second"
    assert list(pool.tiers[0]) == [5, 2], "what was used is the newest of the first tier"
    assert pool.find(nb.ClusterJob(0, 30, 1, 2, 50))[0] == 29, "one token at least is computed: it gives the logits"
    assert pool.find(nb.ClusterJob(0, 60, 1, 99, 50)) == (0, 0.0)
    assert pool.n_asked == 150 and pool.n_found == 69
    slow = nb.PrefixPool([(100, 1.0)], kv_bytes=1.0, saved_seconds=lambda n: n / 2)
    slow.put(1, 50)
    assert slow.find(nb.ClusterJob(0, 60, 1, 1, 50)) == (0, 0.0) and slow.n_found == 0
    rng = random.Random(1)
    pool = nb.PrefixPool([(70, INF), (150, 1.0)])
    for _ in range(500):
        pool.put(rng.randint(0, 12), rng.randint(1, 90))
        for tier, size, used in zip(pool.tiers, pool.sizes, pool.used, strict=True):
            assert used == sum(tier.values()) <= size
        groups = [group for tier in pool.tiers for group in tier]
        assert len(set(groups)) == len(groups), "one prefix in two tiers"


def check_reuse(nb) -> None:
    """The second prompt of a group skips what is known, and waits for the loading."""
    for speed, ttft in ((INF, 1.2), (80.0, 2.2)):
        cluster = nb.colocated(cost_of(nb), 1)
        cluster.engines[0].cache = nb.PrefixPool([(1000, speed)], kv_bytes=1.0)
        first, second = nb.ClusterJob(0.0, 100, 1, 7, 80), nb.ClusterJob(50.0, 100, 1, 7, 80)
        cluster.run([first, second])
        assert first.ttft == pytest.approx(2.0) and second.ttft == pytest.approx(ttft) and second.n_cached == 80


def check_gate(nb) -> None:
    """Early rejection sees the load now, prediction the load at the end of the prefill; late sees it when it is too late."""
    cost = cost_of(nb)
    for rule, reasons in {
        "late": ["", "", "refused after its prefill"],
        "early": ["", "", "refused: decoders are busy"],
        "predicted": ["", "", "refused: decoders are busy"],
    }.items():
        cluster = nb.split(cost, 3, 1)
        cluster.admit = nb.Gate(
            rule, ttft=50.0, tpot=0.36, decode_seconds=1000.0
        )  # two rows of 100 tokens fit, three do not
        jobs = [nb.ClusterJob(at, 100, 40) for at in (0.0, 1.0, 6.0)]
        cluster.run(jobs)
        assert [job.rejected for job in jobs] == reasons, rule
        assert not jobs[2].times, "who was refused has no tokens"
    full = "refused: decoders are busy"
    # At 6 s two rows are there, read at 2 and 3 s; the third prompt would be read at 8 s.
    for rule, decode_seconds, reason in (
        ("predicted", 1.0, ""),
        ("predicted", 4.5, ""),
        ("predicted", 99.0, full),
        ("early", 1.0, full),
    ):
        cluster, said = nb.split(cost, 3, 1), []
        gate = nb.Gate(rule, 50.0, 0.36, decode_seconds)
        cluster.admit = lambda job, *rest, gate=gate, said=said: said.append(gate(job, *rest)) or ""
        cluster.run([nb.ClusterJob(at, 100, 40) for at in (0.0, 1.0, 6.0)])
        assert said[4] == reason, (rule, decode_seconds, said)
    cluster = nb.split(cost, 1, 1)
    cluster.admit = nb.Gate("late", ttft=2.5, tpot=9.0, decode_seconds=1.0)
    jobs = [nb.ClusterJob(0.0, 100, 2) for _ in range(3)]
    cluster.run(jobs)
    assert [job.rejected for job in jobs] == ["", "refused: readers are busy", "refused: readers are busy"]


def check_routers(nb) -> None:
    cluster = nb.colocated(cost_of(nb), 3)
    for engine in cluster.engines:
        engine.cache = nb.PrefixPool([(1000, INF)])
    engines, job = cluster.engines, nb.ClusterJob(0.0, 100, 1, 7, 80)
    engines[2].cache.put(7, 80)
    assert nb.PrefixRouter("precise")(job, engines) is engines[2]
    engines[2].queue.append(nb.ClusterJob(0.0, 500, 1))
    assert nb.PrefixRouter("precise")(job, engines) is not engines[2], "a hit is not worth any queue"
    approximate = nb.PrefixRouter("approximate", remembers=1)
    first = approximate(job, engines)
    first.queue.append(nb.ClusterJob(0.0, 50, 1))
    assert approximate(job, engines) is first, "it remembers where it sent the group"
    approximate(nb.ClusterJob(0.0, 100, 1, 8, 80), engines)
    assert approximate(job, engines) is not first, "and forgets"
    by_load = nb.PrefixRouter("load")
    chosen = by_load(job, engines)
    assert chosen.prompt_tokens == min(engine.prompt_tokens for engine in engines)
    turns = nb.RoundRobin()
    assert [engines.index(turns(job, engines)) for _ in range(4)] == [0, 1, 2, 0]


CHECKS: list[Callable] = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_simulator(nb, check):
    check(nb)


TWINS = {
    "a decode that is free": ("per_row * rows + per_token * context if rows", "per_row * rows if rows"),
    "pieces that forget what stands before them": ("((s + n) ** 2 - s**2)", "n**2"),
    "weights read once although nobody asked": ("if self.weights_once and pieces", "if pieces"),
    "a budget that forgets the decodes": (
        "pieces, budget = [], self.budget - self.rows",
        "pieces, budget = [], self.budget",
    ),
    "room without end": ("                if not self.room_for(job):\n                    break\n", ""),
    "an inbox that always has room": ("while self.inbox and self.room_for(self.inbox[0])", "while self.inbox"),
    "contexts that are never given back": (
        "self.rows, self.context = self.rows - 1, self.context - job.n_prompt - job.n_output",
        "self.rows -= 1",
    ),
    "a token too few": ("len(self.ends) + n_more - 1, id(job)", "len(self.ends) + n_more - 2, id(job)"),
    "a token too many": (
        "while self.due and self.due[0][0] < len(self.ends)",
        "while self.due and self.due[0][0] + 1 < len(self.ends)",
    ),
    "contexts that do not grow": ("            self.context += self.rows\n", ""),
    "the last come is read first": ("        engine.queue.append(job)\n", "        engine.queue.appendleft(job)\n"),
    "a link for everybody": ("start = max(now, engine.link_free)", "start = now"),
    "a link that carries nothing": ("job.n_prompt * self.kv_bytes / self.bandwidth", "0.0"),
    "handed over when idle, always": ("not (self.hold_until_idle and engine.queue)", "not engine.queue"),
    "handed over at once, always": ("not (self.hold_until_idle and engine.queue)", "True"),
    "a writer that reads too": ('if engine.role != "decode"]', "]"),
    "one limit of two": (" and job.ttft <= ttft and job.tpot <= tpot", " and job.ttft <= ttft"),
    "refused requests that do not count": ("/ len(jobs)\n", "/ sum(not job.rejected for job in jobs)\n"),
    "the higher end of the bisection": ("    return low\n", "    return high\n"),
    "the faster stage decides": ("return min(n_prefill * prefill_rate", "return max(n_prefill * prefill_rate"),
    "GPUs that are not paid": (
        "n_decode * decode_rate) / (n_prefill + n_decode)",
        "n_decode * decode_rate) / n_prefill",
    ),
    "the newest moves down": ("next(iter(self.tiers[level].items()))", "next(reversed(self.tiers[level].items()))"),
    "what moves down is gone": (
        "            self.put(old, n_old, level + 1)\n",
        "            self.used[level] -= self.tiers[level].pop(old)\n",
    ),
    "a full hit without logits": ("job.n_prefix, job.n_prompt - 1)", "job.n_prefix, job.n_prompt)"),
    "a slow tier that is used": ("seconds > self.saved_seconds(n)", "False"),
    "loading for nothing": ("seconds = n * self.kv_bytes / self.speeds[level]", "seconds = 0.0"),
    "a cached prefix computed again": ("job.n_done = job.n_cached = n_found", "job.n_cached = n_found"),
    "a gate that never closes": ("> self.tpot\n", "> 1e9\n"),
    "early that looks ahead": ('if self.rule == "predicted"', "if True"),
    "prediction that looks at now": ("> now + wait]", "> now]"),
    "readers that are never busy": ("if wait > self.ttft", "if False"),
    "a refused request that keeps its tokens": ("job.rejected, job.times = reason, []", "job.rejected = reason"),
    "a precise router that believes its history": ('if self.knows == "precise":', "if False:"),
    "a router that sees no queue": ("return engine.prompt_tokens + left, engine.rows", "return left, engine.rows"),
    "a history without end": ("while len(self.history) > self.remembers", "while False"),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_broken_twin_is_caught(load_algorithms, name):
    twin = load_algorithms(NAME, TWINS[name])
    with pytest.raises((AssertionError, LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError)):
        for check in CHECKS:
            check(twin)


@settings(max_examples=60, deadline=None, database=None)
@given(
    rows=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 80), st.integers(1, 12)), min_size=1, max_size=25),
    n_prefill=st.integers(1, 3),
    n_decode=st.integers(1, 3),
    budget=st.integers(9, 60),
    on_decode=st.booleans(),
)
def test_tokens_are_conserved(nb, rows, n_prefill, n_decode, budget, on_decode):
    options = {"budget": budget, "max_num_seqs": 8, "kv_tokens": 200, "on_decode": on_decode}
    cost = Watched(cost_of(nb), **options)
    for cluster in (
        nb.split(cost, n_prefill, n_decode, link=(1.0, 50.0), **options),
        nb.colocated(cost, n_prefill, **options),
    ):
        jobs = cluster.run([nb.ClusterJob(*row) for row in rows])
        sound(jobs)
        at_rest(cluster)


@settings(max_examples=60, deadline=None, database=None)
@given(p=st.integers(1, 20), d=st.integers(1, 20), read=st.floats(0.1, 50), write=st.floats(0.1, 50))
def test_no_split_beats_the_balanced_one(nb, p, d, read, write):
    assert nb.goodput_per_gpu(p, d, read, write) <= 1 / (1 / read + 1 / write) * (1 + 1e-9)


@pytest.mark.parametrize(("index", "name"), [(0, "4 mixed"), (2, "2 prefill + 2 decode")])
def test_it_agrees_with_the_stored_replay_of_dynamo(nb, index, name):
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    steps = next(s for s in stored["steps"]["answer"]["steps"] if s["system"] == "h200_sxm")
    cost, result = nb.GpuCost.fit(steps["prefill"], steps["decode"]), stored["check"]["answer"]["runs"][index]
    assert result["name"] == f"documents, 6 a second: {name}"
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / 6, 300))
    jobs = [nb.ClusterJob(round(float(t - arrivals[0]), 6), 4000, 300) for t in arrivals]
    if "decode" in name:
        cluster = nb.split(cost, 2, 2, nb.RoundRobin(), on_decode=True)
        cluster.hold_until_idle = True
    else:
        cluster = nb.colocated(cost, 4, nb.RoundRobin(), on_decode=True)
    cluster.run(jobs)
    theirs = np.array(result["each"], dtype=float) / 1e3
    ours = np.array([[job.ttft, job.tpot] for job in jobs])
    ttft, tpot = np.median(np.abs(ours / theirs - 1), axis=0)
    assert ttft < 0.04 and tpot < 0.01, (ttft, tpot)
