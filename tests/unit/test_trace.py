"""Metrics of one request, exact on traces made by hand. Times are binary fractions, so that equality is equality."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from helpers.trace import Chunk, StreamTrace


def trace(*chunks: Chunk, n: int | None = None, scheduled: float = 0.0, sent: float = 0.5) -> StreamTrace:
    source = "none" if n is None else "usage"
    return StreamTrace(
        request_id="r", scheduled=scheduled, sent=sent, chunks=list(chunks), completion_tokens=n, token_source=source
    )


def at(time: float, n: int | None = 1, **fields: str) -> Chunk:
    return Chunk.model_validate({"time": time, "n_tokens": n, **fields})


def test_one_token_a_chunk() -> None:
    t = trace(at(1.0), at(1.25), at(2.0), n=3)
    assert (t.ttft, t.ttft_schedule, t.send_lag, t.tpot, t.e2e) == (0.5, 1.0, 0.5, 0.5, 2.0)
    assert t.itl == [0.25, 0.75] == t.chunk_gaps


def test_several_tokens_in_later_chunks() -> None:
    t = trace(at(1.0), at(1.75, 3), at(2.25, 2), n=6)
    assert t.tpot == 1.25 / 5
    assert t.itl == [0.25] * 3 + [0.25] * 2
    assert t.chunk_gaps == [0.75, 0.5]


def test_several_tokens_in_the_first_chunk_are_not_paid_for_after_it() -> None:
    t = trace(at(1.0, 4), at(2.0, 2), n=6)
    assert (t.n_first_chunk, t.tpot, t.itl) == (4, 0.5, [0.5, 0.5])


def test_a_role_only_first_chunk_is_no_first_token() -> None:
    t = trace(at(0.75, None, kind="role"), at(1.0, None, text="a"), at(1.5, None, text="b"), n=2)
    assert (t.first, t.ttft, t.tpot, t.chunk_gaps) == (1.0, 0.5, 0.5, [0.5])


def test_empty_chunks_in_between_and_at_the_end_move_nothing() -> None:
    plain = trace(at(1.0), at(2.0, 2), n=3)
    padded = trace(at(0.75, 0), at(1.0), at(1.5, 0), at(2.0, 2), at(9.0, 0), n=3)
    for metric in ("ttft", "tpot", "itl", "chunk_gaps", "e2e", "n_first_chunk"):
        assert getattr(padded, metric) == getattr(plain, metric), metric


def test_a_single_token_has_no_tpot_and_no_itl_values() -> None:
    t = trace(at(1.0), n=1)
    assert (t.ttft, t.tpot, t.itl, t.chunk_gaps, t.ok) == (0.5, None, [], [], True)


def test_everything_in_one_chunk_has_no_tpot() -> None:
    t = trace(at(1.0, 8), n=8)
    assert (t.tpot, t.itl) == (None, [])


def test_unknown_counts_leave_chunk_gaps_only() -> None:
    t = trace(at(1.0, None, text="a"), at(1.5, None, text="bc"))
    assert (t.n, t.tpot, t.itl, t.chunk_gaps) == (None, None, None, [0.5])


def test_a_total_without_chunk_counts_gives_tpot_but_no_itl() -> None:
    t = trace(at(1.0, None, text="a"), at(2.0, None, text="bcde"), n=5)
    assert (t.token_times_known, t.itl, t.tpot) == (False, None, 0.25)


def test_chunks_that_do_not_add_up_to_the_total_give_no_itl() -> None:
    assert trace(at(1.0), at(2.0), n=3).itl is None


def test_a_failed_request_keeps_what_came_but_is_not_ok() -> None:
    t = trace(at(1.0), at(2.0), n=2).model_copy(update={"error": "connection lost"})
    assert not t.ok
    assert t.ttft == 0.5


def test_a_request_that_got_nothing_has_no_metric() -> None:
    t = trace()
    assert not t.ok
    assert [t.first, t.last, t.ttft, t.ttft_schedule, t.ttft_visible, t.tpot, t.e2e, t.itl] == [None] * 8
    assert t.chunk_gaps == []


def test_reasoning_counts_for_the_first_token_and_not_for_the_first_visible_one() -> None:
    t = trace(at(1.0, 2, kind="reasoning", text="hm"), at(2.0, 1, text="yes"), n=3)
    assert (t.ttft, t.ttft_visible, t.text) == (0.5, 1.5, "yes")


def test_times_that_go_backwards_are_refused() -> None:
    with pytest.raises(ValidationError, match="backwards"):
        trace(at(2.0), at(1.0), n=2)


SIZES = st.lists(st.integers(1, 9), min_size=2, max_size=12)
GAPS = st.lists(st.integers(1, 64), min_size=12, max_size=12)


@settings(max_examples=60, deadline=None)
@given(SIZES, GAPS)
def test_itl_adds_up_to_the_span_and_its_mean_is_tpot(sizes: list[int], gaps: list[int]) -> None:
    times = [1.0]
    for gap in gaps[: len(sizes) - 1]:
        times.append(times[-1] + gap / 16)
    t = trace(*(at(time, size) for time, size in zip(times, sizes, strict=True)), n=sum(sizes))
    assert t.itl is not None and t.tpot is not None
    assert len(t.itl) == sum(sizes) - sizes[0]
    assert sum(t.itl) == pytest.approx(times[-1] - times[0])
    assert sum(t.itl) / len(t.itl) == pytest.approx(t.tpot)
    assert StreamTrace.model_validate_json(t.model_dump_json()) == t
