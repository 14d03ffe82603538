"""Checkers of notebook 00: metrics from chunks, goodput, a role marker, arithmetic intensity, a workload that swaps ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from helpers.exercises import Answer, Mismatch, exercise, expect, expect_close

Chunks = list[tuple[float, int]]


# -- 00.1 ---------------------------------------------------------------------------------------------------------------
_STREAMS: tuple[tuple[str, float, Chunks], ...] = (
    ("one token a chunk", 1.0, [(1.5, 1), (1.75, 1), (2.5, 1)]),
    ("three tokens in a later chunk", 0.0, [(0.5, 1), (1.25, 3)]),
    ("several tokens in the first chunk", 0.0, [(1.0, 4), (1.5, 1), (2.5, 4)]),
    ("an empty chunk first", 2.0, [(2.25, 0), (3.0, 1), (3.5, 2)]),
    ("an empty chunk in between and at the end", 0.0, [(1.0, 1), (1.25, 0), (2.0, 2), (9.0, 0)]),
    ("everything in one chunk", 0.0, [(1.0, 5)]),
)


def _metrics(sent: float, chunks: Chunks) -> tuple[float, float | None, list[float]]:
    held = [(t, k) for t, k in chunks if k > 0]
    later = sum(k for _, k in held[1:])
    itl = [(b - a) / k for (a, _), (b, k) in pairwise(held) for _ in range(k)]
    return held[0][0] - sent, (held[-1][0] - held[0][0]) / later if later else None, itl


@exercise("00.1", "TTFT, TPOT and ITL from chunk times")
def check_metrics(answer: Callable[[float, Chunks], dict[str, Any]]) -> None:
    """TTFT, TPOT and ITL of streams with empty chunks and chunks of several tokens."""
    call, keyed = Answer(answer), "the answer is a dict with the keys ttft, tpot and itl"
    for what, sent, chunks in _STREAMS:
        given = f"{what}: sent={sent}, chunks={chunks}"
        got = call(keyed, given, "a dict", sent, list(chunks))
        expect(keyed, given, isinstance(got, Mapping) and {"ttft", "tpot", "itl"} <= set(got), "those keys", repr(got))
        ttft, tpot, itl = _metrics(sent, chunks)
        expect_close("TTFT runs from sending to the first chunk that holds a token", given, got["ttft"], ttft)
        if tpot is None:
            absent = "TPOT is None where no token came after the first chunk"
            expect(absent, given, got["tpot"] is None, None, repr(got["tpot"]))
        else:
            expect_close("TPOT counts only the tokens after the first chunk", given, got["tpot"], tpot)
        sized = hasattr(got["itl"], "__len__") and len(got["itl"]) == len(itl)
        expect("ITL has one value for each token after the first chunk", given, sized, itl, repr(got["itl"]))
        for mine, theirs in zip(got["itl"], itl, strict=True):
            expect_close("a gap is shared by the tokens it brought", given, mine, theirs)


# -- 00.2 ---------------------------------------------------------------------------------------------------------------
def _request(scheduled: float, sent: float, first: float | None, last: float | None, n: int, ok: bool = True) -> dict:
    return {"scheduled": scheduled, "sent": sent, "first": first, "last": last, "n": n, "ok": ok}


_GOOD = _request(0, 0, 0.5, 1.5, 11)
_LIMITS = (1.0, 0.2, 2.0)
"""Limits of TTFT and TPOT and the makespan, all in seconds."""
_RUNS: tuple[tuple[str, list[dict], tuple[float, float, float], float], ...] = (
    ("requests that meet both limits count, over the makespan", [_GOOD, _request(1, 1, 1.75, 2.75, 11)], _LIMITS, 1.0),
    (
        "TTFT runs from the schedule: a request that waited inside the client is late",
        [_GOOD, _request(0, 5, 5.5, 6.5, 11)],
        _LIMITS,
        0.5,
    ),
    ("a request with a slow TTFT does not count", [_GOOD, _request(0, 0, 1.5, 2.5, 11)], _LIMITS, 0.5),
    ("a request with a slow TPOT does not count", [_GOOD, _request(0, 0, 0.5, 8.5, 11)], _LIMITS, 0.5),
    ("TPOT is shared by the n - 1 tokens after the first", [_GOOD, _request(0, 0, 0.5, 1.0, 3)], _LIMITS, 0.5),
    ("a failed request does not count", [_GOOD, _request(0, 0, None, None, 0, ok=False)], _LIMITS, 0.5),
    (
        "a failed request that broke half way does not count",
        [_GOOD, _request(0, 0, 0.5, 0.75, 3, ok=False)],
        _LIMITS,
        0.5,
    ),
    (
        "a one-token request has no TPOT to miss, but a TTFT",
        [_request(0, 0, 0.5, 0.5, 1), _request(0, 0, 4.0, 4.0, 1)],
        _LIMITS,
        0.5,
    ),
    ("boundary: a TTFT of exactly the limit is in time", [_request(0, 0, 1.0, 2.0, 11)], _LIMITS, 0.5),
    ("boundary: a TPOT of exactly the limit is in time", [_request(0, 0, 0.5, 2.5, 11)], _LIMITS, 0.5),
    (
        "limits and makespan are those given",
        [_request(0, 0, 2.5, 11.5, 11), _request(0, 0, 3.5, 4.0, 11)],
        (3.0, 1.0, 4.0),
        0.25,
    ),
)


@exercise("00.2", "goodput under an SLO")
def check_goodput(answer: Callable[..., float]) -> None:
    """Requests a second that met a TTFT from the schedule and a TPOT."""
    call = Answer(answer)
    for prop, requests, limits, expected in _RUNS:
        slo_ttft, slo_tpot, makespan = limits
        given = f"{requests}, slo_ttft={slo_ttft}, slo_tpot={slo_tpot}, makespan={makespan}"
        expect_close(prop, given, call(prop, given, expected, [dict(r) for r in requests], *limits), expected)


# -- 00.3 ---------------------------------------------------------------------------------------------------------------
@exercise("00.3", "find the bug: a TPOT that is too large")
def check_tpot(answer: Callable[[Chunks], float | None]) -> None:
    """TPOT must not move when chunks without tokens are added before, between or after the others."""
    call = Answer(answer)
    for what, _, chunks in _STREAMS:
        _, expected, _ = _metrics(0.0, chunks)
        start, end = chunks[0][0], chunks[-1][0]
        variants = {
            "as it came": list(chunks),
            "with a role marker first": [(start - 0.25, 0), *chunks],
            "with an empty closing chunk": [*chunks, (end + 1.0, 0)],
        }
        for variant, stream in variants.items():
            given = f"{what}, {variant}: {stream}"
            if expected is None:
                prop = "TPOT is None where no token follows the first chunk that holds tokens"
            elif all(k > 0 for _, k in stream):
                prop = "TPOT is shared by the tokens after the first chunk, and only by those"
            else:
                prop = "a chunk without tokens moves nothing"
            got = call(prop, given, expected, list(stream))
            if expected is None:
                expect(prop, given, got is None, None, repr(got))
            else:
                expect_close(prop, given, got, expected)


# -- 00.4 ---------------------------------------------------------------------------------------------------------------
_MACHINES: tuple[dict[str, float], ...] = (
    {"n_weights": 1e9, "weight_bytes": 4, "kv_bytes": 40_000, "attention_flops": 80_000, "context": 0, "ridge": 8},
    {"n_weights": 1e9, "weight_bytes": 2, "kv_bytes": 40_000, "attention_flops": 80_000, "context": 0, "ridge": 150.5},
    {"n_weights": 1e9, "weight_bytes": 2, "kv_bytes": 40_000, "attention_flops": 80_000, "context": 1000, "ridge": 20},
    {"n_weights": 1e9, "weight_bytes": 2, "kv_bytes": 40_000, "attention_flops": 80_000, "context": 1000, "ridge": 60},
    {
        "n_weights": 1e9,
        "weight_bytes": 2,
        "kv_bytes": 40_000,
        "attention_flops": 80_000,
        "context": 30_000,
        "ridge": 10,
    },
    {"n_weights": 1e9, "weight_bytes": 2, "kv_bytes": 40_000, "attention_flops": 80_000, "context": 100, "ridge": 0.5},
    {"n_weights": 1e9, "weight_bytes": 2, "kv_bytes": 40_000, "attention_flops": 80_000, "context": 0, "ridge": 1000},
    {"n_weights": 1e9, "weight_bytes": 2, "kv_bytes": 40_000, "attention_flops": 80_000, "context": 100, "ridge": 480},
)


def _smallest_batch(m: dict[str, float]) -> int | None:
    """The inequality intensity >= ridge solved for the batch, without rounding."""
    x = {key: Fraction(value) for key, value in m.items()}
    gain = 2 * x["n_weights"] + x["context"] * (x["attention_flops"] - x["ridge"] * x["kv_bytes"])
    return max(1, math.ceil(x["ridge"] * x["n_weights"] * x["weight_bytes"] / gain)) if gain > 0 else None


@exercise("00.4", "the batch that reaches the ridge")
def check_smallest_batch(answer: Callable[..., int | None]) -> None:
    """The smallest batch whose decode step reaches the ridge, or None where the cache's traffic forbids it."""
    call = Answer(answer)
    for machine in _MACHINES:
        expected = _smallest_batch(machine)
        if expected is None:
            prop = "KV traffic grows with the batch too: here no batch reaches the ridge, and the answer is None"
        else:
            prop = "the smallest batch with intensity >= ridge"
        got = call(prop, machine, expected, *machine.values())
        if expected is None:
            expect(prop, machine, got is None, None, repr(got))
        else:
            expect(prop, machine, isinstance(got, Real) and got == expected, expected, repr(got))
            expect("a batch is an int", machine, isinstance(got, Integral), expected, repr(got))


# -- 00.5 ---------------------------------------------------------------------------------------------------------------
def static_batch_seconds(lengths: Sequence[int], batch: int = 4, step: float = 1.0) -> float:
    """Static batches in order: each lasts as long as its longest output."""
    return sum(step * max(lengths[i : i + batch]) for i in range(0, len(lengths), batch))


def one_by_one_seconds(lengths: Sequence[int], step: float = 0.4) -> float:
    """One request at a time, with a shorter step."""
    return step * sum(lengths)


def _lengths(values: Any) -> list[int]:
    """Output lengths as ints, from a list, a tuple or an array.

    Raises
    ------
    TypeError : not a sequence of numbers.
    Mismatch : a length is not whole.
    """
    lengths = []
    for value in values:
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, Real):
            raise TypeError(f"{number!r} is no number")
        if not float(number).is_integer():
            raise Mismatch("each length is a whole number of tokens", "rank_swap()", "whole numbers", repr(values))
        lengths.append(int(float(number)))
    return lengths


@exercise("00.5", "two engines swap ranks")
def check_rank_swap(answer: Callable[[], tuple[Sequence[int], Sequence[int]]]) -> None:
    """Two workloads of as many requests and tokens, on which another engine wins by at least 1.2."""
    prop, wanted = "the answer is a pair of lists of output lengths", "([...], [...])"
    value = Answer(answer)(prop, "rank_swap()", wanted)
    try:
        first, second = (_lengths(lengths) for lengths in value)
    except (TypeError, ValueError):
        raise Mismatch(prop, "rank_swap()", wanted, repr(value)) from None
    given = (first, second)
    expect("each output has at least one token", given, min(first + second, default=0) >= 1, ">= 1", given)
    expect("both workloads have as many requests", given, len(first) == len(second), len(first), len(second))
    expect("both workloads ask for as many tokens", given, sum(first) == sum(second), sum(first), sum(second))
    a, b = static_batch_seconds(first), one_by_one_seconds(first)
    expect(
        "static batching wins the first by 1.2 or more",
        first,
        b >= 1.2 * a,
        f"one by one >= {1.2 * a:.4g} s",
        f"{b:.4g} s",
    )
    a, b = static_batch_seconds(second), one_by_one_seconds(second)
    expect(
        "one by one wins the second by 1.2 or more", second, a >= 1.2 * b, f"static >= {1.2 * b:.4g} s", f"{a:.4g} s"
    )
