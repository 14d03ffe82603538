"""Checks of notebook 03's exercises: steps of a batch, a step's token budget, a starved request, goodput, and chunk sizes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

from helpers.exercises import Answer, exercise, expect, expect_close, expect_equal


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
        expect(prop, given, isinstance(got, (tuple, list)) and len(got) == 2, "a pair (static, continuous)", got)
        expect_equal(f"{prop} (static)", given, got[0], expected[0])
        expect_equal(f"{prop} (continuous)", given, got[1], expected[1])


@exercise("03.2", "Fill a step's token budget")
def _fill_step(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    cases: list[tuple[str, list[int], list[int], int, int, tuple[list[int], list[int]]]] = [
        ("every decode gets its token", [1, 1, 1], [], 8, 4, ([1, 1, 1], [])),
        ("decodes come before a prompt that was begun earlier", [50, 1, 1], [], 10, 4, ([8, 1, 1], [])),
        ("begun prompts come before new ones", [50, 1], [40], 20, 4, ([19, 1], [])),
        ("a piece is never longer than what is left", [5, 1], [], 64, 4, ([5, 1], [])),
        ("the rest goes to new requests, in order", [1], [6, 30], 20, 4, ([1], [6, 13])),
        ("nobody is admitted without a token", [1, 1], [9, 9], 11, 4, ([1, 1], [9])),
        ("no more than max_num_seqs run", [1, 1, 1], [2, 2, 2], 64, 4, ([1, 1, 1], [2])),
        ("two begun prompts: the older first", [30, 30, 1], [], 41, 4, ([30, 10, 1], [])),
        ("a prompt that gets nothing waits with 0", [30, 30], [5], 30, 4, ([30, 0], [])),
        ("an empty machine takes what fits", [], [3, 3, 3], 8, 8, ([], [3, 3, 2])),
        ("rows that are full admit nobody", [1, 1], [4], 64, 2, ([1, 1], [])),
    ]
    for prop, running, waiting, budget, max_num_seqs, expected in cases:
        given = {"running": running, "waiting": waiting, "budget": budget, "max_num_seqs": max_num_seqs}
        got = ask(prop, given, expected, list(running), list(waiting), budget, max_num_seqs)
        expect(prop, given, isinstance(got, (tuple, list)) and len(got) == 2, expected, got)
        expect_equal(prop, given, ([*got[0]], [*got[1]]), expected)
    rng = random.Random(5)
    for _ in range(40):
        max_num_seqs = rng.randint(1, 6)
        running = [rng.choice((1, 1, rng.randint(2, 40))) for _ in range(rng.randint(0, max_num_seqs))]
        waiting = [rng.randint(1, 40) for _ in range(rng.randint(0, 5))]
        budget = rng.randint(max_num_seqs, 60)
        given = {"running": running, "waiting": waiting, "budget": budget, "max_num_seqs": max_num_seqs}
        old, new = ask("a random step", given, "two lists", list(running), list(waiting), budget, max_num_seqs)
        spent = sum(old) + sum(new)
        wanted = sum(running) + sum(waiting[: max_num_seqs - len(running)])
        expect("the budget is never exceeded", given, spent <= budget, f"at most {budget}", spent)
        expect_equal("no token of the budget is wasted while someone could use it", given, spent, min(budget, wanted))


@exercise("03.3", "Find the bug: a request that waits for ever")
def _admit(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    cases: list[tuple[str, list[tuple[str, int]], int, list[str]]] = [
        ("all are admitted where all fit", [("a", 2), ("b", 3)], 5, ["a", "b"]),
        ("blocks are counted down", [("a", 2), ("b", 3), ("c", 3)], 6, ["a", "b"]),
        ("who does not fit holds up those behind", [("a", 2), ("long", 9), ("c", 1)], 6, ["a"]),
        ("the head of the queue is served first", [("long", 9), ("b", 1)], 6, []),
        ("an exact fit is a fit", [("a", 6), ("b", 1)], 6, ["a"]),
        ("an empty queue admits nobody", [], 6, []),
    ]
    for prop, waiting, n_free, expected in cases:
        got = ask(prop, {"waiting": waiting, "n_free": n_free}, expected, list(waiting), n_free)
        expect_equal(prop, {"waiting": waiting, "n_free": n_free}, list(got), expected)
    # A pool of 8 blocks. A request of 6 comes at step 3; small ones keep coming, two at every step, and stay for 4 steps.
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
            admitted = list(ask("admission under load", given, "ids", list(queue), n_free))
            needed = {seq_id: n for seq_id, n in queue}
            expect(
                "only waiting requests are admitted, once", given, len({*admitted} & {*needed}) == len(admitted), "", ""
            )
            spent = sum(needed[seq_id] for seq_id in admitted)
            expect("no more blocks are given than are free", given, spent <= n_free, f"at most {n_free}", spent)
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


@exercise("03.4", "The highest rate that keeps an SLO")
def _highest_rate(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)

    def machine(
        limit: float, kind: str
    ) -> tuple[Callable[[float], list[tuple[float | None, float | None]]], list[float]]:
        asked: list[float] = []

        def run_at(rate: float) -> list[tuple[float | None, float | None]]:
            asked.append(rate)
            good: list[tuple[float | None, float | None]] = [(1.0, 0.1)] * 18
            rest: list[tuple[float | None, float | None]] = [(0.5, None)] * 2
            if rate <= limit:
                return good + rest
            bad: dict[str, list[tuple[float | None, float | None]]] = {
                "late first token": good[:17] + [(1.01, 0.1)] * 3,
                "slow tokens": good[:17] + [(0.9, 0.11)] * 3,
                "failed": good[:17] + [(None, None)] * 3,
            }
            return bad[kind]

        return run_at, asked

    for limit, kind in itertools.product((3.3, 7.77), ("late first token", "slow tokens", "failed")):
        run_at, asked = machine(limit, kind)
        given = f"requests break the SLO ({kind}) above {limit} requests/s; low=1, high=9, n_halvings=10"
        got = ask("the rate is found", given, f"about {limit}", run_at, 1.0, 0.1, 1.0, 9.0, 10)
        prop = {"failed": "a failed request met nothing"}.get(
            kind, f"a {kind} breaks the SLO; limits may be met exactly"
        )
        expect_close(prop, given, got, limit, absolute=8 / 2**10 + 1e-9, rel=0)
        expect("the answer is a rate that holds", given, got <= limit, f"at most {limit}", got)
        expect("the interval is halved, not searched", given, len(asked) <= 12, "at most 12 runs", len(asked))
    run_at, _ = machine(0.5, "late first token")
    got = ask("0 where the lowest rate fails", "limit 0.5, low=1", 0.0, run_at, 1.0, 0.1, 1.0, 9.0, 5)
    expect_equal("0 where the lowest rate fails", "limit 0.5, low=1, high=9", got, 0.0)
    run_at, _ = machine(50.0, "late first token")
    got = ask("the highest rate, where it holds", "limit 50, high=9", 9.0, run_at, 1.0, 0.1, 1.0, 9.0, 5)
    expect_equal("the highest rate, where it holds", "limit 50, low=1, high=9", got, 9.0)
    prop = "a share of exactly nine in ten is enough"
    got = ask(prop, "18 of 20 good", 9.0, lambda _: [(1.0, 0.1)] * 18 + [(2.0, 0.1)] * 2, 1.0, 0.1, 1.0, 9.0, 5)
    expect_equal(prop, "18 of 20 requests good at every rate", got, 9.0)


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
        return 8 + n + n_decodes

    def attending(position: int, n: int, n_decodes: int) -> float:
        return 8 + n + n_decodes + n * (position + n) / 64

    def flat(position: int, n: int, n_decodes: int) -> float:
        return 5.0

    cases = [
        ("the largest budget whose steps are short enough", [16, 64, 256], linear, 200, 4, 80.0),
        ("without a limit the whole prompt in one step", [16, 64, 256], linear, 200, 4, math.inf),
        ("later pieces see more context and last longer", [16, 32, 64], attending, 300, 4, 170.0),
        ("decodes take their part of the budget", [8, 12, 16], linear, 16, 8, 24.5),
        ("a budget without room for a piece never gets there", [4, 64], flat, 64, 4, 10.0),
        ("of equals the smallest", [256, 64, 128], flat, 50, 0, 5.0),
        ("None where none will do", [16, 64], linear, 200, 4, 3.0),
        ("the last piece is shorter", [32, 48, 64], linear, 65, 0, 60.0),
    ]
    for prop, budgets, seconds, n_prompt, n_decodes, limit in cases:
        found = {b: _first_token(b, seconds, n_prompt, n_decodes) for b in sorted(budgets) if b > n_decodes}
        good = {b: total for b, (total, longest) in found.items() if longest <= limit}
        expected = min(good, key=lambda b: (good[b], b)) if good else None
        given = (
            f"budgets {budgets}, {seconds.__name__} steps, n_prompt {n_prompt}, n_decodes {n_decodes}, limit {limit}"
        )
        got = ask(prop, given, expected, list(budgets), seconds, n_prompt, n_decodes, limit)
        expect_equal(prop, given, got, expected)
