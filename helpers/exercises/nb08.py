"""Checks of notebook 08's exercises: residuals, the best gamma, a verify with a bug, rates by position, and when to stop."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from helpers.exercises import Answer, Mismatch, exercise, expect, expect_close, expect_equal, in_order, parts


def _rows(values: torch.Tensor, digits: int = 3) -> Any:
    """A tensor as rounded nested lists, for messages."""
    return torch.round(values.double(), decimals=digits).tolist()


def _close(prop: str, given: object, got: Any, expected: torch.Tensor, bound: float = 1e-6) -> None:
    """Demand equal shapes and a bounded difference; NaN is no number."""
    try:
        value = torch.as_tensor(got, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        raise Mismatch(prop, given, f"a tensor of shape {tuple(expected.shape)}", repr(got)) from None
    expect(f"{prop} (shape)", given, value.shape == expected.shape, tuple(expected.shape), tuple(value.shape))
    holds = bool(((value - expected).abs() <= bound).all())  # a NaN is not smaller than anything
    expect(prop, given, holds, _rows(expected), _rows(value))


def _corrected(p: list[float], q: list[float]) -> tuple[float, list[float]]:
    """Reference for one row, token by token: the chance of acceptance, and what is drawn from after a rejection."""
    accepted = math.fsum(min(a, b) for a, b in zip(p, q, strict=True))
    missing = [a - min(a, b) for a, b in zip(p, q, strict=True)]
    total = math.fsum(missing)
    return accepted, [m / total for m in missing] if total > 0 else list(p)


@exercise("08.1", "Acceptance and residual")
def _acceptance_and_residual(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    half, sure = [0.5, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]
    wide, other = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    cases: list[tuple[str, list[list[float]], list[list[float]]]] = [
        ("what the draft offers too rarely is what remains", [wide], [other]),
        ("without a token in common nothing is accepted, and all of p remains", [half], [[0.0, 0.0, 0.3, 0.7]]),
        ("p where nothing is ever rejected", [wide], [wide]),
        ("p where nothing is ever rejected, and no NaN in greedy text", [sure], [sure]),
        ("a sure target: the residual is its token", [sure], [wide]),
        ("a sure draft: the residual is p without its token", [wide], [sure]),
        ("a token that p lacks never comes back", [half], [[0.25] * 4]),
        ("each row by itself", [wide, other, wide], [other, wide, half]),
        ("each row by itself, one of them never rejected", [wide, other, half], [other, other, wide]),
        ("as many rows as there are", [[0.8, 0.2]] * 9, [[0.2, 0.8], [0.5, 0.5], [0.8, 0.2]] * 3),
    ]
    generator = torch.Generator().manual_seed(81)
    for n, size in ((1, 3), (2, 7), (5, 2), (4, 50), (7, 7)):
        p, q = (
            torch.randn(n, size, generator=generator, dtype=torch.float64).mul(2).softmax(dim=1).tolist() for _ in "pq"
        )
        cases.append(("random rows", p, q))
    for prop, p, q in cases:
        rows = [_corrected(a, b) for a, b in zip(p, q, strict=True)]
        acceptance, residual = torch.tensor([a for a, _ in rows]).double(), torch.tensor([r for _, r in rows]).double()
        given = f"p={_rows(torch.tensor(p))}, q={_rows(torch.tensor(q))}"
        given = given if len(given) < 400 else f"p and q of shape ({len(p)}, {len(p[0])}); {given[:300]} ..."
        expected = f"({_rows(acceptance)}, {_rows(residual)})"
        tensors = (torch.tensor(rows, dtype=torch.float64) for rows in (p, q))
        got = ask(prop, given, expected, *tensors)
        first, second = parts("the answer is a pair (acceptance, residual)", given, expected, got, 2)
        _close(f"{prop} (acceptance)", given, first, acceptance)
        _close(f"{prop} (residual)", given, second, residual)


def _speedup(alpha: float, gamma: int, c: float, costs: list[float]) -> float:
    """Reference: tokens of a round, counted position by position, over its cost in passes of one token."""
    tokens = math.fsum(alpha**i for i in range(gamma + 1))
    return tokens / (gamma * c + costs[gamma])


@exercise("08.2", "The best gamma")
def _best_gamma(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    flat, rising = [1.0] * 9, [1.0 + 0.15 * g for g in range(9)]
    tiles = [1.0, 1.6, 1.6, 1.6, 1.6, 2.4, 2.4, 2.4, 2.4]
    cases: list[tuple[str, float, float, list[float]]] = [
        ("a middle gamma is best", 0.8, 0.1, flat),
        ("the draft's passes cost c each", 0.8, 0.3, flat),
        ("a round of gamma drafts costs costs[gamma] of the target", 0.8, 0.1, rising),
        ("a sure draft: every position counts one", 1.0, 0.05, flat),
        ("a sure draft: every position counts one", 1.0, 0.4, rising),
        ("a draft that is always wrong is not asked", 0.0, 0.1, flat),
        ("a draft that costs too much is not asked: gamma 0, speed-up 1", 0.3, 0.9, flat),
        ("a target that reads many tokens slowly: gamma 0, speed-up 1", 0.6, 0.1, [1.0 + 0.8 * g for g in range(9)]),
        ("a small gain is a gain", 0.55, 0.5, flat),
        ("the last token of a round is free", 0.5, 0.45, flat),
        ("costs that jump: a larger gamma may be better though the next is worse", 0.9, 0.05, tiles),
        ("costs that jump: a larger gamma may pay where gamma 1 does not", 0.7, 0.1, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("of equals the smallest", 0.0, 0.0, flat),
        ("of equals the smallest", 1.0, 0.0, [float(g + 1) for g in range(6)]),
        ("of equals the smallest", 0.5, 0.0, [1.0, 1.2, 1.4, 1.5]),
        ("no gamma beyond the costs that are known", 1.0, 0.0, [1.0, 1.0, 1.0]),
        ("no gamma beyond the costs that are known", 0.95, 0.01, [1.0]),
        ("many gammas", 0.98, 0.01, [1.0] * 60),
    ]
    rng = random.Random(82)
    for _ in range(60):
        costs = [1.0, *sorted(rng.uniform(1.0, 3.0) for _ in range(rng.randint(0, 12)))]
        cases.append(("every gamma tried", rng.choice((rng.random(), 0.999999, 1.0)), rng.uniform(0, 0.6), costs))
    for prop, alpha, c, costs in cases:
        table = [_speedup(alpha, gamma, c, costs) for gamma in range(len(costs))]
        best = max(table)
        gamma = next(g for g, value in enumerate(table) if value >= best * (1 - 1e-9))
        given = f"alpha={alpha:g}, c={c:g}, costs={[round(v, 3) for v in costs]}"
        got = ask(prop, given, (gamma, best), alpha, c, list(costs))
        found, value = parts("the answer is a pair (gamma, speed-up)", given, (gamma, best), got, 2)
        expect_equal(f"{prop} (gamma)", given, found, gamma)
        expect_close(f"{prop} (speed-up)", given, value, best)


N_ROUNDS = 2500
"""Rounds that 08.3 plays in each case."""


RARE = 1e-7
"""The probability at which a count is called impossible."""


def _differs(count: int, n: int, prob: float) -> bool:
    """Whether `count` of `n` is too improbable where each comes with `prob` (exact binomial test)."""
    from scipy.stats import binomtest

    return n > 0 and float(binomtest(count, n, min(max(prob, 0.0), 1.0)).pvalue) < RARE


def _unlikely(counts: Counter[int], probs: list[float]) -> str | None:
    """Why these counts are no sample of `probs`, or None where they may be."""
    n = sum(counts.values())
    if any(_differs(counts[token], n, prob) for token, prob in enumerate(probs)):
        return f"{[round(counts[t] / n, 3) for t in range(len(probs))]} in {n} draws"
    return None


def _check_round(given: str, drafted: list[int], size: int, got: Any) -> list[int]:
    """The ids that a round emitted; they must be ids, and those before the last must be the drafted ones."""
    prop, expected = "a round emits drafted ids and then one more", f"some of {drafted} from the left, and one more id"
    items = in_order(prop, given, expected, got)
    expect(prop, given, 1 <= len(items) <= len(drafted) + 1, expected, repr(got))
    try:
        ids = [int(item) for item in items]
    except (TypeError, ValueError, RuntimeError):
        raise Mismatch(prop, given, expected, repr(got)) from None
    expect(prop, given, all(a == b for a, b in zip(ids, items, strict=True)), expected, repr(got))
    expect(prop, given, ids[:-1] == drafted[: len(ids) - 1], expected, ids)
    expect("an id is in the vocabulary", given, 0 <= ids[-1] < size, f"0 <= id < {size}", ids[-1])
    return ids


def _play(
    ask: Answer, what: str, target: list[list[float]], draft: list[list[float]], temperature: float, seed: int
) -> None:
    """Many rounds on fixed logits: each position's tokens, and how many drafts are accepted, hold against p and q."""
    p_logits, q_logits = torch.tensor(target, dtype=torch.float64), torch.tensor(draft, dtype=torch.float64)
    p, q = (p_logits / temperature).softmax(dim=1), (q_logits / temperature).softmax(dim=1)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    gamma, size = q.shape
    shown = f"temperature={temperature:g}, target_logits={target}, draft_logits={draft}"
    columns = [rng.choices(range(size), weights=row, k=N_ROUNDS) for row in q.tolist()]
    seen: list[Counter[int]] = [Counter() for _ in range(gamma + 1)]
    for index in range(N_ROUNDS):
        drafted = [column[index] for column in columns]
        given = f"{shown}, drafted={drafted}"
        arguments = (p_logits.clone(), q_logits.clone(), list(drafted), temperature)
        prop = f"{what}: no error"
        got = ask(prop, given, "a list of ids", *arguments, generator)
        ids = _check_round(given, drafted, size, got)
        if index < 3:  # the same generator state, the same ids: no other source of chance
            twins = [ask(prop, given, ids, *arguments, torch.Generator().manual_seed(index)) for _ in range(2)]
            first, second = (_check_round(given, drafted, size, twin) for twin in twins)
            expect_equal("all chance comes from the generator", given, second, first)
        for position, token in enumerate(ids):
            seen[position][token] += 1
    where = ("first", "second", "third", "fourth")
    for position, counts in enumerate(seen):
        expected = p[position].tolist()
        prop = f"{what}: the {where[position]} token is distributed as the target's softmax(logits / temperature)"
        if wrong := _unlikely(counts, expected):
            raise Mismatch(prop, f"{shown}; {N_ROUNDS} rounds", [round(v, 3) for v in expected], wrong)
        if position < gamma:
            reached, went_on = sum(counts.values()), sum(seen[position + 1].values())
            rate = float(torch.minimum(p[position], q[position]).sum())
            prop = f"{what}: a draft is accepted as often as p and q agree, sum(min(p, q))"
            rule = f"a share of {rate:.3f} of those that reached position {position}"
            shown_rounds = f"{shown}; {N_ROUNDS} rounds"
            expect(prop, shown_rounds, not _differs(went_on, reached, rate), rule, f"{went_on} of {reached}")


@exercise("08.3", "Find the bug: a verify that is right at temperature 1")
def _mended_verify(answer: Callable[..., Any]) -> None:
    ask, minus = Answer(answer), -math.inf
    target = [[1.0, 0.0, -0.5, -1.0], [0.0, 1.0, 0.3, 0.0], [0.5, -0.5, 1.0, 0.0]]
    draft = [[0.2, 1.4, -1.2, -0.6], [0.6, 0.0, 0.5, 0.2]]
    _play(ask, "temperature 1", target, draft, 1.0, 830)
    _play(ask, "temperature below 1", target, draft, 0.4, 831)
    _play(ask, "temperature above 1", target, draft, 2.5, 832)
    _play(ask, "a draft that is the target", target, target[:2], 0.5, 833)
    apart = [[1.0, 0.3, minus, minus], [0.0, 1.0, 0.3, 0.0]]
    _play(ask, "a token that the target forbids", apart, [[0.2, 0.4, 0.9, minus]], 0.6, 834)
    _play(ask, "a token that the draft never offers", apart, [[minus, minus, 0.2, 1.0]], 0.6, 835)
    _play(ask, "nearly greedy", target, draft, 0.02, 836)
    three = [[0.3, 0.0], [0.0, 0.4], [0.2, 0.0], [0.0, 0.5]]
    _play(ask, "three drafts", three, [[0.0, 0.3], [0.5, 0.0], [0.0, 0.2]], 0.3, 838)


Rounds = list[tuple[int, int, int]]


def _rates(rounds: Rounds) -> tuple[list[float | None], float]:
    """Reference: each judged draft by itself. A round judges its accepted drafts and, where it rejected, one more."""
    verdicts = [
        (position, position < accepted)
        for drafted, accepted, _ in rounds
        for position in range(drafted)
        if position <= accepted
    ]
    rates: list[float | None] = []
    for position in range(max((drafted for drafted, _, _ in rounds), default=0)):
        judged = [good for where, good in verdicts if where == position]
        rates.append(sum(judged) / len(judged) if judged else None)
    return rates, sum(emitted for _, _, emitted in rounds) / len(rounds)


@exercise("08.4", "Acceptance by position")
def _per_position(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    full, two = (4, 4, 5), (4, 2, 3)
    cases: list[tuple[str, Rounds]] = [
        ("a position is judged only where the round got so far", [(4, 0, 1), two, two, full]),
        ("after a rejection nothing is judged", [(3, 0, 1)] * 3 + [(3, 1, 2)]),
        ("the rejected position is judged", [(2, 1, 2), (2, 2, 3), (2, 2, 3)]),
        ("all accepted: rates of 1 and gamma + 1 tokens a pass", [full] * 3),
        ("a short draft says nothing of the positions it lacks", [(1, 1, 2), (4, 3, 4), (4, 1, 2)]),
        ("a short draft says nothing of the positions it lacks", [(2, 2, 3)] * 5 + [(3, 2, 3)]),
        ("a round without a draft is a pass, but judges nothing", [(0, 0, 1), (2, 1, 2), (0, 0, 1)]),
        ("None for a position that no round reached", [(4, 1, 2), (4, 0, 1)]),
        ("no drafts at all: no rates", [(0, 0, 1)] * 4),
        ("a cut round emits less: tokens a pass fall, rates do not", [(4, 3, 4), (4, 4, 2)]),
        ("a cut round emits less: tokens a pass fall, rates do not", [(3, 2, 1)]),
        ("the longest draft says how many positions there are", [(1, 0, 1), (6, 2, 3), (2, 2, 3)]),
        ("rounds are not weighed by their length", [(1, 1, 2)] * 9 + [(5, 0, 1)]),
    ]
    rng = random.Random(84)
    for _ in range(60):
        rounds = []
        for _ in range(rng.randint(1, 25)):
            drafted = rng.randint(0, 6)
            accepted = next((i for i in range(drafted) if rng.random() > 0.7), drafted)
            rounds.append((drafted, accepted, accepted + 1))
        last = rounds[-1]
        rounds[-1] = (last[0], last[1], rng.randint(1, last[2]))
        cases.append(("every draft judged by itself", rounds))
    for prop, rounds in cases:
        expected, given = _rates(rounds), f"rounds={rounds}"
        got = ask(prop, given, expected, list(rounds))
        rates, tokens = parts("the answer is a pair (rates, tokens a pass)", given, expected, got, 2)
        found = in_order(f"{prop} (rates)", given, expected[0], rates)
        expect(f"{prop} (how many rates)", given, len(found) == len(expected[0]), expected[0], found)
        for position, (rate, due) in enumerate(zip(found, expected[0], strict=True)):
            if due is None:
                nothing = rate is None or (isinstance(rate, float) and math.isnan(rate))
                expect(f"{prop} (position {position})", given, nothing, None, rate)
            else:
                expect(f"{prop} (position {position})", given, rate is not None, due, rate)
                expect_close(f"{prop} (position {position})", given, rate, due)
        expect_close(f"{prop} (tokens a pass)", given, tokens, expected[1])


MOST_DRAFTED, N_RECENT = 8, 20
"""Drafts of a round, and rounds that the rule of 08.5 may look back on."""


def _text(levels: Iterable[float], stay: float, noise: float, seed: int, n: int = 3000) -> list[tuple[float, bool]]:
    """For each place of a text the draft's confidence in its token there, and whether the target agrees (it is right)."""
    rng, levels = random.Random(seed), list(levels)
    level, places = rng.choice(levels), []
    for _ in range(n):
        level = level if rng.random() < stay else rng.choice(levels)
        confidence = min(1.0, max(0.0, level + rng.uniform(-noise, noise)))
        places.append((confidence, rng.random() < confidence))
    return places


def _tokens_per_cost(wants_more: Callable[..., bool], text: list[tuple[float, bool]], c: float) -> float:
    """Tokens per pass of the target, where a draft pass costs `c` of it: 1.0 is plain decoding."""
    recent: list[tuple[int, int]] = []
    place, cost = 0, 0.0
    while place < len(text) - MOST_DRAFTED:
        confidences: list[float] = []
        while len(confidences) < MOST_DRAFTED and wants_more(list(confidences), list(recent), c):
            confidences.append(text[place + len(confidences)][0])
        accepted = 0
        while accepted < len(confidences) and text[place + accepted][1]:
            accepted += 1
        recent = [*recent, (len(confidences), accepted)][-N_RECENT:]
        place, cost = place + accepted + 1, cost + 1 + c * len(confidences)
    return place / cost


@exercise("08.5", "When to stop drafting")
def _wants_more(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)

    def rule(prop: str, given: str, expected: object, *arguments: Any) -> bool:
        got = ask(prop, given, expected, *arguments)
        try:
            right = got is not None and not isinstance(got, (str, bytes)) and bool(got) == got
        except Exception:
            right = False
        expect("the answer is yes or no", given, bool(right), "True or False", repr(got))
        return bool(got)

    middling, perfect = [(4, 2)] * N_RECENT, [(MOST_DRAFTED, MOST_DRAFTED)] * N_RECENT
    direct: list[tuple[str, list[float], list[tuple[int, int]], float, bool]] = [
        ("with nothing known a cheap draft is tried", [], [], 0.05, True),
        ("a draft that was always right, is sure and costs little goes on", [1.0, 1.0], perfect, 0.02, True),
        ("nothing can follow a token that is surely rejected", [0.9, 0.0], middling, 0.1, False),
        ("nothing can follow a token that is surely rejected", [0.9, 0.0, 1.0, 1.0], perfect, 0.1, False),
        ("a draft that is slower than the target is never asked", [], perfect, 1.2, False),
        ("a draft that is slower than the target is never asked", [0.95, 0.95], middling, 1.2, False),
        ("a draft that was always wrong is not asked again at once", [], [(1, 0)] * N_RECENT, 0.5, False),
    ]
    for prop, confidences, recent, c, expected in direct:
        given = f"confidences={confidences}, recent={str(recent[:2])[:-1]}{', ...' if recent else ''}], c={c:g}"
        expect_equal(prop, given, rule(prop, given, expected, list(confidences), list(recent), c), expected)

    better, level = "where confidence tells, more than any fixed gamma", "never far behind the best fixed gamma"
    plays: list[tuple[str, str, tuple[Any, ...], float, float]] = [
        (better, "stretches that are easy (0.95) or hard (0.2)", ((0.95, 0.2), 0.9, 0.05), 0.1, 1.1),
        (better, "stretches that are easy (0.95) or hard (0.2)", ((0.95, 0.2), 0.9, 0.05), 0.35, 1.05),
        (better, "confidences from 0.2 to 1", ((0.2, 0.4, 0.6, 0.8, 1.0), 0.5, 0.1), 0.2, 1.05),
        (better, "tokens that are easy (0.95) or hard (0.1), mixed", ((0.1, 0.95), 0.0, 0.05), 0.1, 1.05),
        (level, "an easy text (0.95)", ((0.95,), 1.0, 0.03), 0.05, 0.95),
        (level, "an easy text (0.95)", ((0.95,), 1.0, 0.03), 0.35, 0.95),
        (level, "a text of one confidence (0.7)", ((0.7,), 1.0, 0.0), 0.05, 0.95),
        (level, "a text of one confidence (0.7)", ((0.7,), 1.0, 0.0), 0.35, 0.95),
        (level, "stretches, and a dear draft", ((0.95, 0.2), 0.9, 0.05), 0.8, 0.93),
        (level, "a text that the draft cannot say (0.05)", ((0.05,), 1.0, 0.05), 0.2, 0.9),
    ]
    for seed, (prop, what, kind, c, share) in enumerate(plays):
        levels, stay, noise = kind
        text = _text(levels, stay, noise, 850 + seed)
        fixed = [_tokens_per_cost(lambda s, _, __, g=g: len(s) < g, text, c) for g in range(MOST_DRAFTED + 1)]
        best = max(fixed)
        given = f"{what}, c={c:g}: {len(text)} tokens"
        bound = f"at least {share * best:.3f} tokens per cost of a pass ({share:g} of {best:.3f}, gamma {fixed.index(best)})"
        got = _tokens_per_cost(lambda *arguments, p=prop, g=given, b=bound: rule(p, g, b, *arguments), text, c)
        expect(prop, given, got >= share * best, bound, f"{got:.3f}")
