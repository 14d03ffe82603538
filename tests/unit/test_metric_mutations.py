"""Break a metric's formula on purpose: the check that guards it must turn red, and no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.trace import Chunk, StreamTrace

Check = Callable[[], None]


# -- the checks ---------------------------------------------------------------------------------------------------------
def three_tokens_a_chunk() -> StreamTrace:
    """Twelve tokens in chunks of three, a chunk each 0.75 s from 2 s on; sent at 1.5 s, due at 1 s."""
    times = [2.0, 2.75, 3.5, 4.25]
    return StreamTrace(
        request_id="three",
        scheduled=1.0,
        sent=1.5,
        chunks=[Chunk(time=time, n_tokens=3, text=" a b c") for time in times],
        completion_tokens=12,
        token_source="usage",
        finish_reason="length",
    )


def role_marker_first() -> StreamTrace:
    """A role marker at 2 s, then two tokens at 3 s and 3.5 s whose number nobody told; sent and due at 1 s."""
    return StreamTrace(
        request_id="role",
        scheduled=1.0,
        sent=1.0,
        chunks=[Chunk(time=2.0, kind="role"), Chunk(time=3.0, text=" a"), Chunk(time=3.5, text=" b")],
        finish_reason="stop",
    )


def check_n() -> None:
    """The number of tokens is the server's: twelve."""
    assert three_tokens_a_chunk().n == 12


def check_ttft() -> None:
    """The first chunk came 0.5 s after sending and 1 s after the schedule."""
    trace = three_tokens_a_chunk()
    assert (trace.ttft, trace.ttft_schedule) == (0.5, 1.0)


def check_role_marker() -> None:
    """A marker without tokens is neither a first token nor the start of a gap."""
    trace = role_marker_first()
    assert (trace.ttft, trace.ttft_visible, trace.chunk_gaps) == (2.0, 2.0, [0.5])


def check_tpot() -> None:
    """Nine tokens came after the first chunk, in 2.25 s."""
    assert three_tokens_a_chunk().tpot == 0.25


def check_itl() -> None:
    """A gap of 0.75 s that brings three tokens is 0.25 s for each of them; the first chunk's three have no gap."""
    trace = three_tokens_a_chunk()
    assert (trace.itl, trace.chunk_gaps) == ([0.25] * 9, [0.75] * 3)


def check_e2e() -> None:
    """The last chunk came 3.25 s after the schedule."""
    assert three_tokens_a_chunk().e2e == 3.25


CHECKS: list[Check] = [check_n, check_ttft, check_role_marker, check_tpot, check_itl, check_e2e]


# -- the mutants --------------------------------------------------------------------------------------------------------
def off_by_one_in_n(trace: StreamTrace) -> int | None:
    return None if trace.completion_tokens is None else trace.completion_tokens + 1


def no_first_token_subtraction(trace: StreamTrace) -> float | None:
    if trace.first is None or trace.last is None or not trace.n:
        return None
    return (trace.last - trace.first) / trace.n


def first_chunk_taken_for_one_token(trace: StreamTrace) -> float | None:
    if trace.first is None or trace.last is None or not trace.n:
        return None
    return (trace.last - trace.first) / (trace.n - 1)


def role_chunk_counted_as_first_token(trace: StreamTrace) -> list[Chunk]:
    return trace.chunks


def each_chunk_is_a_token(trace: StreamTrace) -> list[float]:
    return trace.chunk_gaps


def ttft_from_schedule(trace: StreamTrace) -> float | None:
    return trace.ttft_schedule


def e2e_from_sending(trace: StreamTrace) -> float | None:
    return None if trace.last is None else trace.last - trace.sent


MUTANTS: list[tuple[str, Callable[[StreamTrace], object], set[Check]]] = [
    ("n", off_by_one_in_n, {check_n, check_tpot, check_itl}),
    ("tpot", no_first_token_subtraction, {check_tpot}),
    ("tpot", first_chunk_taken_for_one_token, {check_tpot}),
    ("token_chunks", role_chunk_counted_as_first_token, {check_role_marker}),
    ("itl", each_chunk_is_a_token, {check_itl}),
    ("ttft", ttft_from_schedule, {check_ttft}),
    ("e2e", e2e_from_sending, {check_e2e}),
]


@pytest.mark.parametrize("check", CHECKS)
def test_metric(check: Check) -> None:
    check()


@pytest.mark.parametrize(("metric", "mutant", "red"), MUTANTS, ids=lambda value: getattr(value, "__name__", None))
def test_mutant_turns_its_checks_red_and_no_other(
    metric: str, mutant: Callable[[StreamTrace], object], red: set[Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamTrace, metric, property(mutant))
    failed = set()
    for check in CHECKS:
        try:
            check()
        except AssertionError:
            failed.add(check)
    assert failed == red
