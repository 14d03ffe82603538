"""Checks of notebook 03's exercises: steps of a batch, a step's token budget, a starved request, goodput, and chunk sizes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

from helpers.exercises import Answer, Mismatch, exercise, expect, expect_close, expect_equal, in_order


def _pair(prop: str, given: object, expected: object, got: Any) -> tuple[Any, Any]:
    """The two items of an answer with a length: a tuple, a list, an array."""
    expect(prop, given, hasattr(got, "__len__"), expected, repr(got))
    items = in_order(prop, given, expected, got)
    expect(prop, given, len(items) == 2, expected, repr(got))
    return items[0], items[1]


def _steps_by_simulation(outputs: list[int], n_rows: int) -> tuple[int, int]:
    """Reference: play both rules step by step."""
    counts = []
    for refills in (False, True):
        waiting, rows, steps = list(outputs), [0] * n_rows, 0
        while waiting or any(rows):
            if refills or not any(rows):
                rows = [left or (waiting.pop(0) if waiting else 0) for left in rows]
            rows = [max(0, left - 1) for left in rows]
            steps += 1
        counts.append(steps)
    return counts[0], counts[1]


@exercise("03.1", "Steps of static and continuous batching")
def _steps_needed(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    cases: list[tuple[str, list[int], int]] = [
        ("equal answers: both rules take the same", [3, 3, 3, 3], 2),
        ("static waits for the longest of each batch", [9, 1, 1, 1], 2),
        ("a batch that is not full is a batch too", [2, 2, 5], 2),
        ("one row: one after another", [4, 1, 2], 1),
        ("more rows than requests", [4, 7], 5),
        ("many rows", [1 + i * i % 23 for i in range(70)], 32),
        ("a free row goes to the next in line, not to the longest", [1, 4, 2, 8], 2),
    ]
    rng = random.Random(3)
    cases += [
        ("both equal a simulation", [rng.randint(1, 12) for _ in range(rng.randint(1, 14))], rng.randint(1, 5))
        for _ in range(12)
    ]
    for prop, outputs, n_rows in cases:
        given = {"outputs": outputs, "n_rows": n_rows}
        expected = _steps_by_simulation(outputs, n_rows)
        got = ask(prop, given, expected, list(outputs), n_rows)
        static, continuous = _pair("the answer is a pair (static, continuous)", given, expected, got)
        expect_equal(f"{prop} (static)", given, static, expected[0])
        expect_equal(f"{prop} (continuous)", given, continuous, expected[1])


def _fill_by_single_tokens(
    running: list[int], waiting: list[int], budget: int, max_num_seqs: int
) -> tuple[list[int], list[int]]:
    """Reference: hand out the budget one token at a time, each to the first that may still have one."""
    n_rows = min(len(running) + len(waiting), max_num_seqs)
    wanted = [*running, *waiting][:n_rows]
    given = [0] * n_rows
    order = sorted(range(n_rows), key=lambda i: (i >= len(running) or running[i] > 1, i))
    for _ in range(budget):
        for i in order:
            if given[i] < wanted[i]:
                given[i] += 1
                break
    return given[: len(running)], [n for n in given[len(running) :] if n]


@exercise("03.2", "Fill a step's token budget")
def _fill_step(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    cases: list[tuple[str, list[int], list[int], int, int, tuple[list[int], list[int]]]] = [
        ("every decode gets its token", [1, 1, 1], [], 8, 4, ([1, 1, 1], [])),
        ("decodes come before a prompt that was begun earlier", [50, 1, 1], [], 10, 4, ([8, 1, 1], [])),
        ("begun prompts come before new ones", [50, 1], [40], 20, 4, ([19, 1], [])),
        ("a piece is never longer than what is left", [5, 1], [], 64, 4, ([5, 1], [])),
        ("a piece is as long as the budget allows", [300, 1], [], 257, 4, ([256, 1], [])),
        ("a new prompt's piece is as long as the budget allows", [1], [300], 257, 4, ([1], [256])),
        ("the rest goes to new requests, in order", [1], [6, 30], 20, 4, ([1], [6, 13])),
        ("nobody is admitted without a token", [1, 1], [9, 9], 11, 4, ([1, 1], [9])),
        ("no more than max_num_seqs run", [1, 1, 1], [2, 2, 2], 64, 4, ([1, 1, 1], [2])),
        ("two begun prompts: the older first", [30, 30, 1], [], 41, 4, ([30, 10, 1], [])),
        ("a prompt that gets nothing waits with 0", [30, 30], [5], 30, 4, ([30, 0], [])),
        ("as many new requests are admitted as there are tokens", [1], [1] * 40, 34, 64, ([1], [1] * 33)),
        ("as many new requests are admitted as there are rows", [1], [1] * 40, 64, 34, ([1], [1] * 33)),
        ("an empty machine takes what fits", [], [3, 3, 3], 8, 8, ([], [3, 3, 2])),
        ("rows that are full admit nobody", [1, 1], [4], 64, 2, ([1, 1], [])),
    ]
    for prop, running, waiting, budget, max_num_seqs, expected in cases:
        given = {"running": running, "waiting": waiting, "budget": budget, "max_num_seqs": max_num_seqs}
        got = ask(prop, given, expected, list(running), list(waiting), budget, max_num_seqs)
        parts = _pair("the answer is a pair of lists", given, expected, got)
        old, new = (in_order("the answer is a pair of lists", given, expected, part) for part in parts)
        expect_equal(prop, given, (old, new), expected)
    rng = random.Random(5)
    for _ in range(60):
        max_num_seqs = rng.randint(1, 8)
        running = [rng.choice((1, 1, rng.randint(2, 40))) for _ in range(rng.randint(0, max_num_seqs))]
        waiting = [rng.randint(1, 40) for _ in range(rng.randint(0, 6))]
        budget = rng.randint(max_num_seqs, 90)
        given = {"running": running, "waiting": waiting, "budget": budget, "max_num_seqs": max_num_seqs}
        expected = _fill_by_single_tokens(running, waiting, budget, max_num_seqs)
        got = ask("a random step", given, expected, list(running), list(waiting), budget, max_num_seqs)
        parts = _pair("the answer is a pair of lists", given, expected, got)
        old, new = (in_order("the answer is a pair of lists", given, expected, part) for part in parts)
        prop = "each running request has its number"
        expect(prop, given, len(old) == len(running), f"{len(running)} numbers, as in {expected}", (old, new))
        try:
            spent = sum(old) + sum(new)
        except TypeError as error:
            raise Mismatch("tokens are numbers", given, expected, (old, new)) from error
        expect("the budget is never exceeded", given, spent <= budget, f"at most {budget} in all", (old, new))
        best = sum(expected[0]) + sum(expected[1])
        prop = "no token of the budget is wasted while someone could use it"
        expect(prop, given, spent >= best, f"{best} in all, as in {expected}", f"{spent} in all: {(old, new)}")
        expect_equal(
            "decodes, then begun prompts, then new ones, each in order of arrival", given, (old, new), expected
        )


def _in_line(waiting: list[tuple[str, int]], n_free: int) -> list[str]:
    """Reference: everybody up to the first at whom the running sum of blocks exceeds those that are free."""
    sums = itertools.accumulate(needed for _, needed in waiting)
    return [seq_id for (seq_id, _), total in zip(waiting, sums, strict=True) if total <= n_free]


def _ids(prop: str, given: object, expected: object, waiting: list[tuple[str, int]], got: Any) -> list[Any]:
    """The ids of an answer; those of a set in the order of arrival, for a set has none of its own."""
    if isinstance(got, (set, frozenset)):
        place = {seq_id: i for i, (seq_id, _) in enumerate(waiting)}
        got = sorted(got, key=lambda seq_id: (place.get(seq_id, len(place)), str(seq_id)))
    items = in_order(prop, given, expected, got)
    known = [seq_id for seq_id, _ in waiting]
    are_ids = all(isinstance(item, str) and item in known for item in items)
    expect("only ids of waiting requests are admitted", given, are_ids, f"ids such as {expected}", items)
    expect("nobody is admitted twice", given, len(set(items)) == len(items), expected, items)
    return items


@exercise("03.3", "Find the bug: a request that waits for ever")
def _admit(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    cases: list[tuple[str, list[tuple[str, int]], int, list[str]]] = [
        ("all are admitted where all fit, in order of arrival", [("a", 2), ("b", 3)], 5, ["a", "b"]),
        ("blocks are counted down", [("a", 2), ("b", 3), ("c", 3)], 6, ["a", "b"]),
        ("who does not fit holds up those behind", [("a", 2), ("long", 9), ("c", 1)], 6, ["a"]),
        (
            "who does not fit holds up those behind, even if alone it would fit",
            [("a", 4), ("b", 5), ("c", 1)],
            6,
            ["a"],
        ),
        ("the head of the queue is served first", [("long", 9), ("b", 1)], 6, []),
        ("an exact fit is a fit", [("a", 6), ("b", 1)], 6, ["a"]),
        ("as many as fit are admitted", [(f"r{i}", 1) for i in range(40)], 33, [f"r{i}" for i in range(33)]),
        ("an empty queue admits nobody: an empty list", [], 6, []),
        ("a full pool admits nobody: an empty list", [("a", 1)], 0, []),
    ]
    for prop, waiting, n_free, expected in cases:
        given: Any = {"waiting": waiting, "n_free": n_free}
        got = ask(prop, given, expected, list(waiting), n_free)
        expect_equal(prop, given, _ids(prop, given, expected, waiting, got), expected)
    # A pool of 8 blocks. A request of 5, 6, or 8 comes at step 3; small ones keep coming, two a step, and stay for 4 steps.
    for n_large in (5, 6, 8):
        queue: list[tuple[str, int]] = []
        inside: list[tuple[int, int]] = []
        n_free, entered = 8, None
        for step in range(60):
            for leaver in [item for item in inside if item[0] == step]:
                inside.remove(leaver)
                n_free += leaver[1]
            queue += [("large", n_large)] if step == 3 else []
            queue += [(f"small {step}.{i}", 1 + i) for i in range(2)]
            given = f"step {step}, {n_free} of 8 blocks free, queue {queue[:4]} ..."
            expected = _in_line(queue, n_free)
            got = ask("admission under load", given, expected, list(queue), n_free)
            admitted = _ids("admission under load", given, expected, queue, got)
            needed = dict(queue)
            spent = sum(needed[seq_id] for seq_id in admitted)
            prop = "no more blocks are given than are free"
            expect(prop, given, spent <= n_free, f"at most {n_free} blocks", f"{spent} blocks: {admitted}")
            n_free -= spent
            inside += [(step + 4, needed[seq_id]) for seq_id in admitted]
            queue = [item for item in queue if item[0] not in admitted]
            entered = step if "large" in admitted else entered
        expect(
            "a request that needs much of the pool enters although small ones keep coming",
            f"a request of {n_large} of 8 blocks arrives at step 3; 60 steps are played",
            entered is not None,
            "it is admitted within 60 steps",
            "it still waits",
        )
    rng = random.Random(7)
    for _ in range(60):
        waiting = [(f"r{i}", rng.randint(1, 12)) for i in range(rng.randint(0, 9))]
        n_free = rng.randint(0, 40)
        given, expected = {"waiting": waiting, "n_free": n_free}, _in_line(waiting, n_free)
        prop = "nobody overtakes, and nobody who fits is left out"
        got = ask(prop, given, expected, list(waiting), n_free)
        expect_equal(prop, given, _ids(prop, given, expected, waiting, got), expected)


Pairs = list[tuple[float | None, float | None]]


def _bisect(limit: float, low: float, high: float, n_halvings: int) -> float:
    """Reference: the lower end after `n_halvings`, where rates hold up to a `limit` in [low, high)."""
    step = (high - low) / 2**n_halvings
    return low + step * math.floor((limit - low) / step)


@exercise("03.4", "The highest rate that keeps an SLO")
def _highest_rate(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    good: Pairs = [(1.0, 0.1)]
    one_token: Pairs = [(0.5, None)]
    holding = good * 17 + one_token * 2 + good
    kinds: dict[str, tuple[str, Pairs]] = {
        "a late first token breaks the SLO, a limit met exactly does not": ("TTFT above the limit", [(1.01, 0.1)]),
        "slow tokens break the SLO, a limit met exactly does not": ("TPOT above the limit", [(0.9, 0.11)]),
        "a failed request met nothing": ("TTFT None", [(None, None)]),
        "of a request with one token the TTFT counts": ("one token, TTFT above the limit", [(1.01, None)]),
    }
    spans = [(3.31, 1.0, 9.0, 10), (7.77, 1.0, 9.0, 10), (2.0, 0.5, 3.5, 7), (5.5, 1.0, 9.0, 1)]
    for (limit, low, high, n_halvings), (prop, (what, bad)) in itertools.product(spans, kinds.items()):
        asked: list[float] = []

        def run_at(
            rate: float, asked: list[float] = asked, limit: float = limit, broken: Pairs = good * 17 + bad * 3
        ) -> Pairs:
            asked.append(float(rate))
            return list(holding if rate <= limit else broken)

        given = (
            f"up to {limit} requests/s 20 of 20 are good, above it 17 of 20 ({what}); ttft=1.0, tpot=0.1, "
            f"low={low:g}, high={high:g}, n_halvings={n_halvings}"
        )
        expected = _bisect(limit, low, high, n_halvings)
        got = ask(prop, given, expected, run_at, 1.0, 0.1, low, high, n_halvings)
        # A wrong yes or no leads further astray than an eighth of the interval.
        expect_close(prop, given, got, expected, absolute=(high - low) / 8, rel=0)
        expect("the answer is a rate that holds", given, float(got) <= limit, f"{expected}, at most {limit}", got)
        prop = "no rate outside [low, high] is run"
        expect(prop, given, all(low <= rate <= high for rate in asked), f"rates in [{low:g}, {high:g}]", asked)
        most, n_rates = n_halvings + 2, len(set(asked))
        prop = "the interval is halved, not searched"
        expect(prop, given, n_rates <= most, f"at most {most} rates are run", f"{n_rates} rates: {asked[:20]}")
        prop = "a run is expensive: no rate is run twice"
        expect(prop, given, n_rates == len(asked), "each rate once", asked)
        expect_close("the interval is halved n_halvings times, its lower end returned", given, got, expected)

    late: Pairs = [(2.0, 0.1)]
    slow: Pairs = [(1.0, 0.2)]
    slo = (1.0, 0.1)
    apart = "a request is good if it meets both limits: the two are not judged apart"
    cases: list[tuple[str, str, Pairs, tuple[float, float], list[float], float]] = [
        ("0 where the lowest rate fails", "no request is good", late * 20, slo, [], 0.0),
        ("the highest rate, where it holds", "all 20 are good", good * 20, slo, [], 9.0),
        (
            "a TPOT of None (one token) misses nothing",
            "17 good, 3 of one token",
            good * 17 + one_token * 3,
            slo,
            [],
            9.0,
        ),
        (apart, "16 of 20 good, 2 late, 2 slow", good * 16 + late * 2 + slow * 2, slo, [], 0.0),
        ("share is 0.9 if not given", "22 of 25 good", good * 22 + late * 3, slo, [], 0.0),
        ("share is 0.9 if not given", "23 of 25 good", good * 23 + late * 2, slo, [], 9.0),
        ("share is what is given", "12 of 20 good, share=0.5", good * 12 + late * 8, slo, [0.5], 9.0),
        ("share is what is given", "23 of 25 good, share=1.0", good * 23 + late * 2, slo, [1.0], 0.0),
        ("a share met exactly is enough", "15 of 20 good, share=0.75", good * 15 + slow * 5, slo, [0.75], 9.0),
        ("a share is missed by one", "14 of 20 good, share=0.75", good * 14 + slow * 6, slo, [0.75], 0.0),
        ("the limits are those given", "20 requests of TTFT 1.0 and TPOT 0.1", good * 20, (0.75, 0.1), [], 0.0),
        ("the limits are those given", "20 requests of TTFT 1.0 and TPOT 0.1", good * 20, (1.0, 0.0625), [], 0.0),
        ("the limits are those given", "20 requests of TTFT 2.0 and TPOT 0.2", [(2.0, 0.2)] * 20, (2.0, 0.2), [], 9.0),
        ("one request is a load", "1 of 1 good", good, slo, [], 9.0),
        ("each request counts once", "1 of 3 good", good + late * 2, slo, [], 0.0),
    ]
    for prop, what, pairs, (ttft, tpot), share, expected in cases:
        given = f"at every rate: {what}; ttft={ttft:g}, tpot={tpot:g}, low=1, high=9, n_halvings=5"
        got = ask(prop, given, expected, lambda _, pairs=pairs: list(pairs), ttft, tpot, 1.0, 9.0, 5, *share)
        expect_close(prop, given, got, expected)


def _first_token(
    budget: int, step_seconds: Callable[[int, int, int], float], n_prompt: int, n_decodes: int
) -> tuple[float, float]:
    """Seconds to the first token, and the longest step, by walking through the prompt."""
    position, total, longest = 0, 0.0, 0.0
    while position < n_prompt:
        n = min(budget - n_decodes, n_prompt - position)
        seconds = step_seconds(position, n, n_decodes)
        total, longest, position = total + seconds, max(longest, seconds), position + n
    return total, longest


@exercise("03.5", "The best token budget")
def _best_budget(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)

    def linear(position: int, n: int, n_decodes: int) -> float:
        """8 + n_piece + n_decodes"""
        return 8 + n + n_decodes

    def attending(position: int, n: int, n_decodes: int) -> float:
        """8 + n_piece + n_decodes + n_piece * (position + n_piece) / 64"""
        return 8 + n + n_decodes + n * (position + n) / 64

    def growing(position: int, n: int, n_decodes: int) -> float:
        """8 + n_piece + n_decodes + position / 4"""
        return 8 + n + n_decodes + position / 4

    def tiled(position: int, n: int, n_decodes: int) -> float:
        """8 + 64 * ceil((n_piece + n_decodes) / 64)"""
        return 8 + 64 * -(-(n + n_decodes) // 64)

    def bumpy(position: int, n: int, n_decodes: int) -> float:
        """8 + n_piece + n_decodes + (100 if 64 <= position < 128 else 0)"""
        return 8 + n + n_decodes + (100 if 64 <= position < 128 else 0)

    def flat(position: int, n: int, n_decodes: int) -> float:
        """5"""
        return 5.0

    cases = [
        ("without a limit the whole prompt in one step", [16, 64, 256], linear, 200, 4, math.inf),
        ("the largest budget whose steps are short enough", [16, 64, 256], linear, 200, 4, 80.0),
        ("a step may last exactly as long as the limit", [16, 64], linear, 200, 4, 72.0),
        ("later pieces see more context and last longer", [16, 32, 64], attending, 300, 4, 170.0),
        ("each piece is timed at its own position; every step keeps the limit", [16, 32, 64], growing, 300, 4, 120.0),
        ("any step may be the longest, not only the first or the last", [32, 60], bumpy, 256, 0, 150.0),
        ("decodes take their part of the budget", [8, 12, 16], linear, 16, 8, 24.5),
        ("decodes lengthen the step too", [8, 12, 16], linear, 16, 8, 23.0),
        ("a piece may be of one token", [5, 64], linear, 3, 4, 13.0),
        ("a budget without room for a piece never gets there", [4, 64], flat, 64, 4, 10.0),
        ("a budget below the decodes never gets there", [2, 3, 64], flat, 64, 4, 10.0),
        ("of equals the smallest", [256, 64, 128], flat, 50, 0, 5.5),
        ("more than the whole prompt is of no use", [512, 256], linear, 200, 4, math.inf),
        ("None where none will do", [16, 64], linear, 200, 4, 3.0),
        ("None where no budget has room for a piece", [2, 4], linear, 200, 4, math.inf),
        ("the last piece is shorter, and lasts for less", [32, 48, 64], linear, 65, 0, 60.0),
        ("the last, shorter piece is a step as well", [50, 65], linear, 65, 0, math.inf),
        ("small pieces may be sooner than the whole prompt", [64, 256], attending, 256, 0, math.inf),
        ("seconds count, not steps", [64, 96], tiled, 288, 0, math.inf),
        ("budgets come in any order", [65, 64, 192, 128], tiled, 256, 0, 150.0),
    ]
    rng = random.Random(11)
    for _ in range(60):
        seconds = rng.choice((linear, attending, growing, tiled, bumpy, flat))
        budgets = rng.sample(range(1, 200), rng.randint(1, 5))
        n_prompt, n_decodes = rng.randint(1, 400), rng.randint(0, 20)
        room = [b for b in budgets if b > n_decodes]
        longest = _first_token(rng.choice(room), seconds, n_prompt, n_decodes)[1] if room else 50.0
        cases.append(("the earliest first token, by walking", budgets, seconds, n_prompt, n_decodes, longest))
    for prop, budgets, seconds, n_prompt, n_decodes, limit in cases:
        found = {b: _first_token(b, seconds, n_prompt, n_decodes) for b in sorted(budgets) if b > n_decodes}
        good = {b: total for b, (total, longest) in found.items() if longest <= limit}
        expected = min(good, key=lambda b: (good[b], b)) if good else None
        given = (
            f"budgets={budgets}, step_seconds = {seconds.__doc__}, n_prompt={n_prompt}, n_decodes={n_decodes}, "
            f"longest_pause={limit:g}"
        )
        got = ask(prop, given, expected, list(budgets), seconds, n_prompt, n_decodes, limit)
        expect_equal(prop, given, got, expected)
