"""Ledgers: what a card holds, which runs and comparisons are refused and why, and a mutant that must be caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers import ledgers
from helpers.engines.base import ClientHealth, EngineInfo, MemoryReport, Provenance, RunRecord
from helpers.errors import MeasurementRefused
from helpers.ledgers import SLO, LedgerCard, QualityResult, make_card
from helpers.stats import PairedRatio, Summary
from helpers.trace import Chunk, StreamTrace
from helpers.workload import Request, Workload

JUDGED = [QualityResult(metric="top-1", value=1.0, protocol="fp32", n=10)]
MIB = 2**20


def request_trace(
    name: str, *, due: float = 0.0, sent: float | None = None, first: float = 0.5, n: int = 3, gap: float = 0.25
) -> StreamTrace:
    start = due if sent is None else sent
    return StreamTrace(
        request_id=name,
        scheduled=due,
        sent=start,
        chunks=[Chunk(time=start + first + i * gap, n_tokens=1) for i in range(n)],
        prompt_tokens=10,
        completion_tokens=n,
        token_source="ids",
        cached_tokens=0,
    )


def failed_trace(name: str) -> StreamTrace:
    broken = request_trace(name)
    return broken.model_copy(update={"error": "connection lost"})


def make_record(
    *traces: StreamTrace, engine: str = "vllm", provenance: Provenance = "measured", **changes: Any
) -> RunRecord:
    work: dict[str, Any] = {"name": "work", "cache": "cold"} | changes.pop("workload", {})
    requests = tuple(Request(request_id=t.request_id, prompt_ids=tuple(range(10)), max_tokens=t.n or 1) for t in traces)
    return RunRecord(
        engine=EngineInfo(
            engine=engine,
            version="1",
            model="m",
            dtype="float32",
            device="cpu",
            max_model_len=64,
            provenance=provenance,
        ),
        workload=Workload.model_validate({"requests": requests, **work}),
        traces=list(traces),
        started=0.0,
        **changes,
    )


def two(**changes: Any) -> RunRecord:
    return make_record(request_trace("a"), request_trace("b", due=1.0), **changes)


# -- what a card holds --------------------------------------------------------------------------------------------------
def test_latency_and_throughput_of_two_requests() -> None:
    card = make_card("x", two())
    assert (card.latency.ttft.p50, card.latency.tpot.p50, card.latency.e2e.p50) == (0.5, 0.25, 1.0)
    assert card.latency.itl is not None and card.latency.itl.n == 4
    through = card.throughput
    assert through.makespan == 2.0
    assert (through.requests_per_second, through.prompt_tokens_per_second) == (1.0, 10.0)
    assert (through.generated_tokens_per_second, through.total_tokens_per_second) == (3.0, 13.0)
    assert card.latency.tokens_per_chunk == 1.0


def test_failed_requests_are_counted_apart_and_their_tokens_not_at_all() -> None:
    card = make_card(
        "x", make_record(request_trace("a"), request_trace("b", due=1.0), failed_trace("c")), slo=SLO(ttft=9, tpot=9)
    )
    assert (card.throughput.completed, card.throughput.failed) == (2, 1)
    assert card.throughput.generated_tokens_per_second == 3.0
    assert card.latency.ttft.n == 2
    assert card.throughput.slo_attainment == pytest.approx(2 / 3)
    assert "c" not in card.requests


def test_one_request_of_unknown_counts_takes_the_itl_column_away() -> None:
    blind = request_trace("b").model_copy(update={"chunks": [Chunk(time=0.5, text="x"), Chunk(time=1.0, text="y")]})
    card = make_card("x", make_record(request_trace("a"), blind))
    assert card.latency.itl is None
    assert card.latency.chunk_gap.n == 3
    assert "chunk gap (token times unknown)" in card.frame()["quantity"].tolist()


def test_memory_adds_up() -> None:
    report = MemoryReport(
        weights=500 * MIB, kv_reserved=100 * MIB, kv_used_peak=60 * MIB, peak=1000 * MIB, baseline=300 * MIB
    )
    memory = make_card("x", two(memory=report), kv_formula=50 * MIB).memory
    assert (memory.other, memory.kv_used, memory.kv_formula) == (100 * MIB, 60 * MIB, 50 * MIB)
    assert make_card("x", two(memory=MemoryReport(weights=1, peak=2))).memory.other is None


# -- goodput ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("trace", "met"),
    [
        (request_trace("a", first=1.0, gap=0.25), True),
        (request_trace("a", first=1.25), False),
        (request_trace("a", gap=0.5), False),
        (request_trace("a", due=0.0, sent=0.75, first=0.5), False),
        (request_trace("a", n=1), True),
        (failed_trace("a"), False),
    ],
    ids=["exactly met", "late first token", "slow decode", "late from schedule", "one token", "failed"],
)
def test_slo(trace: StreamTrace, met: bool) -> None:
    assert SLO(ttft=1.0, tpot=0.25).met_by(trace) is met


def test_goodput_is_over_the_makespan_of_all() -> None:
    record = make_record(request_trace("a"), request_trace("b", due=1.0, first=0.75), request_trace("c", due=3.5))
    card = make_card("x", record, slo=SLO(ttft=0.5, tpot=1.0))
    assert card.throughput.makespan == 4.5
    assert card.throughput.goodput == pytest.approx(2 / 4.5)
    assert make_card("x", record).throughput.goodput is None


# -- runs that are refused ----------------------------------------------------------------------------------------------
def test_a_run_in_which_nothing_completed_is_refused_with_the_error() -> None:
    with pytest.raises(MeasurementRefused, match="connection lost"):
        make_card("x", make_record(failed_trace("a")))


def lagging(engine: str) -> RunRecord:
    return two(engine=engine, client=ClientHealth(send_lag_p50=0.05))


def test_a_client_that_sends_late_is_refused() -> None:
    with pytest.raises(MeasurementRefused, match="client of 'work' was late") as refused:
        make_card("x", lagging("openai-server"))
    assert refused.value.remedy


def test_a_lag_within_five_percent_and_a_lag_of_an_engine_in_process_are_not_refused() -> None:
    make_card("x", two(engine="openai-server", client=ClientHealth(send_lag_p50=0.02)))
    make_card("x", lagging("vllm"))


def test_an_event_loop_that_lags_is_refused() -> None:
    with pytest.raises(MeasurementRefused, match="event loop"):
        make_card("x", two(engine="vllm-serve", client=ClientHealth(loop_lag_p50=0.02)))


def warm(cached: int, cache: str = "cold") -> RunRecord:
    traces = [t.model_copy(update={"cached_tokens": cached, "prompt_tokens": 400}) for t in two().traces]
    return make_record(*traces, workload={"cache": cache})


def check_warm_cold_cache_is_refused() -> None:
    with pytest.raises(MeasurementRefused, match=r"cold workload, and 50.0% of its prompt tokens"):
        make_card("x", warm(200))


def test_a_warm_cold_cache_is_refused() -> None:
    check_warm_cold_cache_is_refused()


@pytest.mark.parametrize(("cached", "cache"), [(4, "cold"), (0, "cold"), (200, "warm"), (200, "any")])
def test_a_cold_cache_within_one_percent_and_a_declared_warm_one_are_not_refused(cached: int, cache: str) -> None:
    assert make_card("x", warm(cached, cache)).workload.cached_fraction == cached / 400


def test_an_engine_that_reports_no_hits_is_shown_as_unknown() -> None:
    traces = [t.model_copy(update={"cached_tokens": None}) for t in two().traces]
    card = make_card("x", make_record(*traces))
    assert card.workload.cached_fraction is None
    assert "unknown" in card.frame()["x"].tolist()


def accept_anything(record: RunRecord) -> None:
    """A mutant of check_run that lets every run through."""


def no_upper_bound_on_hits(record: RunRecord) -> None:
    """A mutant of check_run that treats a cold workload like any other."""
    ORIGINAL(record.model_copy(update={"workload": record.workload.model_copy(update={"cache": "any"})}))


ORIGINAL = ledgers.check_run


@pytest.mark.parametrize("mutant", [accept_anything, no_upper_bound_on_hits])
def test_mutant_that_accepts_a_warm_cold_cache_turns_its_check_red(
    mutant: Callable[[RunRecord], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "check_run", mutant)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_warm_cold_cache_is_refused()


# -- comparing ----------------------------------------------------------------------------------------------------------
def card(name: str = "x", quality: list[QualityResult] | None = JUDGED, **changes: Any) -> LedgerCard:
    return make_card(name, two(**changes), quality)


OTHER_PROTOCOL = [QualityResult(metric="top-1", value=1.0, protocol="bf16", n=10)]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (card("y", workload={"concurrency": 2}), "their workloads differ"),
        (card("y", quality=None), "'y' has no quality result"),
        (card("y", quality=OTHER_PROTOCOL), "their quality protocols differ"),
        (card("y", provenance="simulated"), "one is measured, the other simulated"),
    ],
)
def test_comparisons_are_refused_with_their_reason_in_both_directions(other: LedgerCard, reason: str) -> None:
    for left, right in ((card(), other), (other, card())):
        assert left.refusal(right) is not None
        with pytest.raises(MeasurementRefused) as refused:
            left.compare(right)
        shown = (
            reason if left.name == "x" else reason.replace("one is measured, the other simulated", "one is simulated")
        )
        assert shown in refused.value.symptom
        assert refused.value.remedy


def test_an_accepted_comparison_pairs_by_request_whatever_the_order() -> None:
    slow = make_record(request_trace("a", first=1.0), request_trace("b", due=1.0, first=2.0))
    fast = make_record(request_trace("a", first=0.5), request_trace("b", due=1.0, first=1.0))
    left, right = make_card("slow", slow, JUDGED), make_card("fast", fast, JUDGED)
    right = right.model_copy(update={"requests": dict(reversed(right.requests.items()))})
    ratio = left.compare(right).ratios["ttft"]
    assert isinstance(ratio, PairedRatio)
    assert (ratio.n, ratio.ratio, ratio.low, ratio.high) == pytest.approx((2, 0.5, 0.5, 0.5))


def test_requests_that_only_one_side_completed_are_not_paired() -> None:
    left = make_card("l", two(), JUDGED)
    right = make_card(
        "r", make_record(request_trace("a"), failed_trace("b").model_copy(update={"completion_tokens": 3})), JUDGED
    )
    ratio = left.compare(right).ratios["ttft"]
    assert isinstance(ratio, PairedRatio) and ratio.n == 1


def test_a_comparison_shows_ratios_quality_and_what_is_undecided() -> None:
    worse = [QualityResult(metric="top-1", value=0.5, protocol="fp32", n=10), *OTHER_PROTOCOL]
    comparison = card("l").compare(card("r", quality=worse))
    assert comparison.quality == {"top-1 (fp32)": (1.0, 0.5)}
    assert comparison.ratios["generated tokens/s"] == 1.0
    frame = comparison.frame().set_index("quantity")
    assert frame.loc["ttft", ""] == "undecided"
    assert frame.loc["top-1 (fp32)", "r / l"] == "0.5 against 1"


def test_peak_memory_is_compared_where_both_know_it() -> None:
    big, small = card(memory=MemoryReport(peak=300)), card(memory=MemoryReport(peak=100))
    assert big.compare(small).ratios["peak memory"] == pytest.approx(1 / 3)
    assert "peak memory" not in card().compare(small).ratios


# -- keeping and showing ------------------------------------------------------------------------------------------------
def test_a_card_survives_json_and_compares_with_itself() -> None:
    one = make_card(
        "x", make_record(request_trace("a"), failed_trace("b")), JUDGED, slo=SLO(ttft=1, tpot=1), kv_formula=7
    )
    again = LedgerCard.model_validate_json(one.model_dump_json())
    assert again == one
    assert one.refusal(again) is None


def test_a_card_refuses_fields_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="speed"):
        LedgerCard.model_validate({**card().model_dump(), "speed": 3})


def test_a_card_shows_all_six_ledgers_and_the_missing_quality() -> None:
    frame = card(quality=None).frame()
    assert set(frame["ledger"]) == {"latency", "throughput", "memory", "quality", "implementation", "workload"}
    assert "no speed here may be compared" in frame["x"].tolist()
    assert "<table" in card()._repr_html_()


def test_cards_stand_side_by_side_in_the_ledgers_own_order() -> None:
    more = [*JUDGED, QualityResult(metric="perplexity", value=20.0, protocol="prose", n=99)]
    frame = ledgers.cards_frame([card("l"), card("r", quality=more)])
    assert list(frame.columns) == ["ledger", "quantity", "l", "r"]
    assert list(dict.fromkeys(frame["ledger"])) == [
        "latency",
        "throughput",
        "memory",
        "quality",
        "implementation",
        "workload",
    ]
    row = frame.set_index("quantity").loc["perplexity (prose)"]
    assert (row["l"], row["r"]) == ("-", "20, n=99")
    with pytest.raises(ValueError, match="no cards"):
        ledgers.cards_frame([])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (1.0, "1 s"),
        (75.25, "75.2 s"),
        (-0.002, "-2 ms"),
    ],
)
def test_show_seconds(value: float | None, text: str) -> None:
    assert ledgers.show_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (23040, "22.5 KiB"),
        (3 * MIB, "3 MiB"),
        (2**40, "1024 GiB"),
    ],
)
def test_show_bytes(value: float | None, text: str) -> None:
    assert ledgers.show_bytes(value) == text


def test_show_summary_says_where_n_is_too_small() -> None:
    def summary(n: int, p95: float | None, p99: float | None) -> Summary:
        return Summary(n=n, mean=1.0, p50=1.0, p95=p95, p99=p99, p50_low=0.5, p50_high=2.0)

    assert (
        ledgers.show_summary(summary(8, None, None))
        == "p50 1 s [500 ms, 2 s], p95: n too small, p99: n too small (n=8)"
    )
    assert ledgers.show_summary(summary(200, 3.0, 4.0)) == "p50 1 s [500 ms, 2 s], p95 3 s, p99 4 s (n=200)"
    assert ledgers.show_summary(summary(1, None, None)).startswith("p50 1 s, p95: n too small")
    assert ledgers.show_summary(Summary(n=0, mean=None, p50=None, p95=None, p99=None)) == "no samples"


# -- the quality that stands on a card ----------------------------------------------------------------------------------
def test_top1_agreement_scores_every_token_on_its_own() -> None:
    """The reference puts the successor of each id first; one wrong token does not spoil those after it."""
    import torch

    from helpers.quality import top1_agreement

    def successor(ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(ids + 1, 50).float()

    result = top1_agreement(successor, [[1, 2, 3], [7]], [[4, 5, 9, 10], [8]], "a counting model")
    assert (result.value, result.n, result.protocol) == (4 / 5, 5, "teacher-forced, a counting model")
    assert result.low is not None and result.high is not None and result.low < 0.8 < result.high
    with pytest.raises(MeasurementRefused, match="an output for each prompt"):
        top1_agreement(successor, [[1], [2]], [[2]], "a counting model")
    with pytest.raises(MeasurementRefused, match="an output for each prompt"):
        top1_agreement(successor, [[1]], [[]], "a counting model")
