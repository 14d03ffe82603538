"""Checkers of notebook 00: metrics from chunks, goodput, a role marker, arithmetic intensity, a workload that swaps ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from helpers.exercises import Mismatch, attempted, exercise, expect, expect_close

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
    for what, sent, chunks in _STREAMS:
        given = f"{what}: sent={sent}, chunks={chunks}"
        got = attempted(answer(sent, list(chunks)))
        if not isinstance(got, dict) or set(got) != {"ttft", "tpot", "itl"}:
            raise Mismatch("the answer is a dict with the keys ttft, tpot and itl", given, "those keys", got)
        ttft, tpot, itl = _metrics(sent, chunks)
        expect_close("TTFT runs from sending to the first chunk that holds a token", given, got["ttft"], ttft)
        if tpot is None:
            expect(
                "TPOT is None where no token came after the first chunk", given, got["tpot"] is None, None, got["tpot"]
            )
        else:
            expect_close("TPOT counts only the tokens after the first chunk", given, got["tpot"], tpot)
        expect(
            "ITL has one value for each token after the first chunk",
            given,
            len(got["itl"]) == len(itl),
            itl,
            got["itl"],
        )
        for mine, theirs in zip(got["itl"], itl, strict=True):
            expect_close("a gap is shared by the tokens it brought", given, mine, theirs)


# -- 00.2 ---------------------------------------------------------------------------------------------------------------
def _request(scheduled: float, sent: float, first: float | None, last: float | None, n: int, ok: bool = True) -> dict:
    return {"scheduled": scheduled, "sent": sent, "first": first, "last": last, "n": n, "ok": ok}


_RUNS: tuple[tuple[str, list[dict], float], ...] = (
    ("two requests that meet both limits", [_request(0, 0, 0.5, 1.5, 11), _request(1, 1, 2.0, 3.0, 11)], 1.0),
    ("a request that waited inside the client", [_request(0, 0, 0.5, 1.5, 11), _request(0, 5, 5.5, 6.5, 11)], 0.5),
    ("a slow decode", [_request(0, 0, 0.5, 1.5, 11), _request(0, 0, 0.5, 8.5, 11)], 0.5),
    ("a failed request", [_request(0, 0, 0.5, 1.5, 11), _request(0, 0, None, None, 0, ok=False)], 0.5),
    ("a request that broke half way", [_request(0, 0, 0.5, 1.5, 11), _request(0, 0, 0.5, 0.75, 3, ok=False)], 0.5),
    ("a request of one token, which has no TPOT", [_request(0, 0, 0.5, 0.5, 1), _request(0, 0, 4.0, 4.0, 1)], 0.5),
    ("limits that are met exactly", [_request(0, 0, 1.0, 3.0, 11)], 0.5),
)


@exercise("00.2", "goodput under an SLO")
def check_goodput(answer: Callable[..., float]) -> None:
    """Requests a second that met a TTFT of 1 s from the schedule and a TPOT of 0.2 s."""
    for what, requests, expected in _RUNS:
        got = attempted(answer([dict(r) for r in requests], slo_ttft=1.0, slo_tpot=0.2, makespan=2.0))
        expect_close(
            f"{what}: goodput counts requests that meet both limits from the schedule, over the makespan",
            f"{requests}, slo_ttft=1.0, slo_tpot=0.2, makespan=2.0",
            got,
            expected,
        )


# -- 00.3 ---------------------------------------------------------------------------------------------------------------
@exercise("00.3", "find the bug: a TPOT that is too large")
def check_tpot(answer: Callable[[Chunks], float | None]) -> None:
    """TPOT must not move when chunks without tokens are added before, between or after the others."""
    for what, _, chunks in _STREAMS:
        _, expected, _ = _metrics(0.0, chunks)
        start, end = chunks[0][0], chunks[-1][0]
        variants = {
            "as it came": list(chunks),
            "with a role marker first": [(start - 0.25, 0), *chunks],
            "with an empty closing chunk": [*chunks, (end + 1.0, 0)],
        }
        for variant, stream in variants.items():
            try:
                got = answer(stream)
            except ZeroDivisionError:
                raise Mismatch(
                    "no division by zero where nothing follows the first chunk", stream, None, "error"
                ) from None
            if expected is None:
                expect("None where no token follows the first chunk", stream, got is None, None, got)
            else:
                expect_close(f"{what}, {variant}: a chunk without tokens moves nothing", stream, got, expected)


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
)


def _intensity(batch: int, m: dict[str, float]) -> float:
    flops = batch * (2 * m["n_weights"] + m["attention_flops"] * m["context"])
    return flops / (m["n_weights"] * m["weight_bytes"] + batch * m["context"] * m["kv_bytes"])


def _smallest_batch(m: dict[str, float]) -> int | None:
    return next((batch for batch in range(1, 20_001) if _intensity(batch, m) >= m["ridge"] * (1 - 1e-12)), None)


@exercise("00.4", "the batch that reaches the ridge")
def check_smallest_batch(answer: Callable[..., int | None]) -> None:
    """The smallest batch whose decode step reaches the ridge, or None where the cache's traffic forbids it."""
    for machine in _MACHINES:
        got, expected = answer(**machine), _smallest_batch(machine)
        if expected is None:
            reason = "KV traffic grows with the batch too: here no batch reaches the ridge, and the answer is None"
            expect(reason, machine, got is None, None, got)
        else:
            expect("the smallest batch with intensity >= ridge", machine, attempted(got) == expected, expected, got)


# -- 00.5 ---------------------------------------------------------------------------------------------------------------
def static_batch_seconds(lengths: Sequence[int], batch: int = 4, step: float = 1.0) -> float:
    """Static batches in order: each lasts as long as its longest output."""
    return sum(step * max(lengths[i : i + batch]) for i in range(0, len(lengths), batch))


def one_by_one_seconds(lengths: Sequence[int], step: float = 0.4) -> float:
    """One request at a time, with a shorter step."""
    return step * sum(lengths)


@exercise("00.5", "two engines swap ranks")
def check_rank_swap(answer: Callable[[], tuple[Sequence[int], Sequence[int]]]) -> None:
    """Two workloads of as many requests and tokens, on which another engine wins by at least 1.2."""
    value = attempted(answer())
    try:
        first, second = ([int(n) for n in lengths] for lengths in value)
    except (TypeError, ValueError):
        raise Mismatch(
            "the answer is a pair of lists of output lengths", "rank_swap()", "([...], [...])", value
        ) from None
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
