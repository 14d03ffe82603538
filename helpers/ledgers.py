"""Six ledgers for one run, joined in a `LedgerCard` that knows which cards it may be compared with.

latency, throughput, memory, quality, implementation, workload: a number from one of the first three says nothing without the
last three beside it. `LedgerCard.compare` therefore refuses two cards whose workloads or quality protocols differ.
"""

from __future__ import annotations

from typing import Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from helpers.engines.base import EngineInfo, MemoryReport, Provenance, RunRecord
from helpers.errors import MeasurementRefused
from helpers.hardware import Hardware, describe
from helpers.stats import PairedRatio, Summary, paired_ratio, summarize
from helpers.trace import StreamTrace

MAX_LAG_SHARE = 0.05
"""A run is refused when the client's median lag exceeds this share of the latency it distorts."""
MAX_COLD_HITS = 0.01
"""A run of a cold workload is refused when more than this share of its prompt tokens came from a prefix cache."""


class SLO(BaseModel):
    """A service-level objective: the longest TTFT (from schedule) and TPOT, seconds, that a request may have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft: float
    tpot: float

    def met_by(self, trace: StreamTrace) -> bool:
        """A failed request meets nothing; a request of one token has no TPOT to miss."""
        if not trace.ok or trace.ttft_schedule is None:
            return False
        return trace.ttft_schedule <= self.ttft and (trace.tpot is None or trace.tpot <= self.tpot)


class LatencyLedger(BaseModel):
    """Seconds. `itl` is None where token times are not known; then only `chunk_gap` can be told."""

    model_config = ConfigDict(extra="forbid")

    ttft: Summary
    ttft_schedule: Summary
    tpot: Summary
    itl: Summary | None
    chunk_gap: Summary
    e2e: Summary
    tokens_per_chunk: float | None = None


class ThroughputLedger(BaseModel):
    """Rates over the makespan, for one device; failed requests are counted apart and their tokens not at all."""

    model_config = ConfigDict(extra="forbid")

    completed: int
    failed: int
    makespan: float | None
    requests_per_second: float | None
    prompt_tokens_per_second: float | None
    generated_tokens_per_second: float | None
    total_tokens_per_second: float | None
    offered_rate: float | None
    achieved_rate: float | None
    goodput: float | None = None
    """Requests per second that met the SLO."""
    slo: SLO | None = None
    slo_attainment: float | None = None


class MemoryLedger(BaseModel):
    """Bytes. ``other`` is what of the peak is neither libraries, weights nor KV: activations, workspace, fragmentation."""

    model_config = ConfigDict(extra="forbid")

    weights: int | None
    kv_used: int | None
    kv_reserved: int | None
    kv_formula: int | None
    """`helpers.models.kv_bytes` for the tokens that were in flight at once, where the caller knows them."""
    baseline: int | None
    other: int | None
    peak: int | None


class QualityResult(BaseModel):
    """One quality number. Two results are comparable exactly when metric and protocol are equal."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str
    value: float
    protocol: str
    n: int
    low: float | None = None
    high: float | None = None
    note: str = ""


class ImplementationLedger(BaseModel):
    """What ran, on what."""

    model_config = ConfigDict(extra="forbid")

    engine: EngineInfo
    hardware: Hardware
    provenance: Provenance


class WorkloadLedger(BaseModel):
    """What was asked. `digest` is equal exactly for equal workloads."""

    model_config = ConfigDict(extra="forbid")

    name: str
    digest: str
    kind: str
    n_requests: int
    concurrency: int
    prompt_tokens: Summary
    output_tokens: Summary
    shared_prefix_tokens: int
    cache: str
    cached_fraction: float | None
    warmup_requests: int
    client_lag_p50: float
    client_loop_lag_p50: float
    seed: int


class Comparison(BaseModel):
    """What changed from one card to another; latency ratios are paired by request."""

    model_config = ConfigDict(extra="forbid")

    a: str
    b: str
    ratios: dict[str, PairedRatio | float]
    quality: dict[str, tuple[float, float]]

    def frame(self) -> pd.DataFrame:
        """One row for each ratio: b over a. Above 1 means that b's number is larger."""
        rows = []
        for name, ratio in self.ratios.items():
            text = str(ratio) if isinstance(ratio, PairedRatio) else f"{ratio:.3f}x"
            verdict = "undecided" if isinstance(ratio, PairedRatio) and ratio.undecided else ""
            rows.append({"quantity": name, f"{self.b} / {self.a}": text, "": verdict})
        for name, (x, y) in self.quality.items():
            rows.append({"quantity": name, f"{self.b} / {self.a}": f"{y:.4g} against {x:.4g}", "": "quality"})
        return pd.DataFrame(rows)


class LedgerCard(BaseModel):
    """The six ledgers of one run."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    name: str
    latency: LatencyLedger
    throughput: ThroughputLedger
    memory: MemoryLedger
    quality: list[QualityResult]
    implementation: ImplementationLedger
    workload: WorkloadLedger
    requests: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    """For each completed request its ttft, tpot and e2e, seconds: what paired ratios are made of."""

    # -- comparing ------------------------------------------------------------------------------------------------
    def refusal(self, other: LedgerCard) -> str | None:
        """Why the two cards may not be compared, or None where they may."""
        if self.workload.digest != other.workload.digest:
            return (
                f"their workloads differ ({self.workload.name} {self.workload.digest} against "
                f"{other.workload.name} {other.workload.digest})"
            )
        if not self.quality or not other.quality:
            missing = self.name if not self.quality else other.name
            return f"{missing!r} has no quality result, and a faster wrong answer is no result"
        mine = {(q.metric, q.protocol) for q in self.quality}
        theirs = {(q.metric, q.protocol) for q in other.quality}
        if not mine & theirs:
            return f"their quality protocols differ ({_protocols(self)} against {_protocols(other)})"
        if self.implementation.provenance != other.implementation.provenance:
            return f"one is {self.implementation.provenance}, the other {other.implementation.provenance}"
        return None

    def compare(self, other: LedgerCard) -> Comparison:
        """Ratios other/self. Raises `MeasurementRefused` with the reason where the cards are not comparable."""
        if reason := self.refusal(other):
            raise MeasurementRefused(
                f"{self.name!r} and {other.name!r} cannot be compared: {reason}.",
                "Run both on the same workload and judge both by the same quality protocol.",
            )
        common = [key for key in self.requests if key in other.requests]
        ratios: dict[str, PairedRatio | float] = {}
        for metric in ("ttft", "tpot", "e2e"):
            pairs = [(other.requests[key][metric], self.requests[key][metric]) for key in common]
            good = [(x, y) for x, y in pairs if x is not None and y is not None and x > 0 and y > 0]
            if good:
                ratios[metric] = paired_ratio([x for x, _ in good], [y for _, y in good])
        mine, theirs = self.throughput.generated_tokens_per_second, other.throughput.generated_tokens_per_second
        if mine and theirs:
            ratios["generated tokens/s"] = theirs / mine
        if self.memory.peak and other.memory.peak:
            ratios["peak memory"] = other.memory.peak / self.memory.peak
        left = {(q.metric, q.protocol): q.value for q in self.quality}
        right = {(q.metric, q.protocol): q.value for q in other.quality}
        quality = {f"{m} ({p})": (left[m, p], right[m, p]) for m, p in left if (m, p) in right}
        return Comparison(a=self.name, b=other.name, ratios=ratios, quality=quality)

    # -- showing --------------------------------------------------------------------------------------------------
    def frame(self) -> pd.DataFrame:
        """The card as a table: ledger, quantity, value in words."""
        rows = [(ledger, quantity, text) for ledger, quantity, text in _rows(self)]
        return pd.DataFrame(rows, columns=["ledger", "quantity", self.name])

    def _repr_html_(self) -> str:
        return self.frame().to_html(index=False, border=0)


def _protocols(card: LedgerCard) -> str:
    return ", ".join(sorted(f"{q.metric}: {q.protocol}" for q in card.quality))


# -- making a card ------------------------------------------------------------------------------------------------------
def check_run(record: RunRecord) -> None:
    """Refuse a run that would mislead.

    Raises
    ------
    MeasurementRefused : no request completed; the client lagged by more than 5 % of what it measures; or more than 1 % of a
        cold workload's prompt tokens came from a prefix cache.
    """
    name = record.workload.name
    if not record.completed:
        errors = sorted({trace.error or "no token arrived" for trace in record.traces})
        raise MeasurementRefused(
            f"No request of {name!r} completed: {errors[0]}", "Look at the engine's log, and send one request by hand."
        )
    ttfts = summarize([t.ttft for t in record.completed if t.ttft is not None], resamples=1)
    gaps = summarize([gap for t in record.completed for gap in t.chunk_gaps], resamples=1)
    # An engine driven in this process is late by up to one step by construction; only a client across a socket can lag.
    over_network = record.engine.engine not in {"vllm", "transformers"}
    if over_network and ttfts.p50 and record.client.send_lag_p50 > MAX_LAG_SHARE * ttfts.p50:
        raise MeasurementRefused(
            f"The client of {name!r} was late: it sent requests {record.client.send_lag_p50 * 1e3:.1f} ms (median) after "
            f"their time, more than {MAX_LAG_SHARE:.0%} of the median TTFT of {ttfts.p50 * 1e3:.1f} ms.",
            "Lower the rate, or give the client a processor core of its own.",
        )
    if over_network and gaps.p50 and record.client.loop_lag_p50 > MAX_LAG_SHARE * gaps.p50:
        raise MeasurementRefused(
            f"The client's event loop of {name!r} was late by {record.client.loop_lag_p50 * 1e3:.1f} ms (median), more than "
            f"{MAX_LAG_SHARE:.0%} of the median gap of {gaps.p50 * 1e3:.1f} ms.",
            "Lower the concurrency, or give the client a processor core of its own.",
        )
    hits = record.cached_fraction
    if record.workload.cache == "cold" and hits is not None and hits > MAX_COLD_HITS:
        raise MeasurementRefused(
            f"{name!r} is a cold workload, and {hits:.1%} of its prompt tokens came from a prefix cache.",
            "Use prompts that were not sent before (another seed), or reset the cache between runs.",
        )


def make_card(
    name: str,
    record: RunRecord,
    quality: list[QualityResult] | None = None,
    *,
    slo: SLO | None = None,
    kv_formula: int | None = None,
    seed: int = 0,
) -> LedgerCard:
    """Check a run and turn it into a card. Raises what `check_run` raises."""
    check_run(record)
    done = record.completed
    return LedgerCard(
        name=name,
        latency=_latency(done, seed),
        throughput=_throughput(record, slo),
        memory=_memory(record.memory, kv_formula),
        quality=quality or [],
        implementation=ImplementationLedger(
            engine=record.engine, hardware=describe(), provenance=record.engine.provenance
        ),
        workload=WorkloadLedger(
            name=record.workload.name,
            digest=record.workload.digest,
            kind=record.workload.kind,
            n_requests=len(record.workload.requests),
            concurrency=record.workload.concurrency,
            prompt_tokens=summarize(record.workload.prompt_lengths, resamples=1),
            output_tokens=summarize(record.workload.output_lengths, resamples=1),
            shared_prefix_tokens=record.workload.shared_prefix_tokens,
            cache=record.workload.cache,
            cached_fraction=record.cached_fraction,
            warmup_requests=record.warmup_requests,
            client_lag_p50=record.client.send_lag_p50,
            client_loop_lag_p50=record.client.loop_lag_p50,
            seed=record.workload.seed,
        ),
        requests={t.request_id: {"ttft": t.ttft, "tpot": t.tpot, "e2e": t.e2e} for t in done},
    )


def _latency(done: list[StreamTrace], seed: int) -> LatencyLedger:
    def pool(values: list[float | None]) -> Summary:
        return summarize([value for value in values if value is not None], seed=seed)

    itls = [trace.itl for trace in done]
    known = all(itl is not None for itl in itls)
    chunks = sum(len(trace.token_chunks) for trace in done)
    tokens = sum(trace.n or 0 for trace in done)
    return LatencyLedger(
        ttft=pool([t.ttft for t in done]),
        ttft_schedule=pool([t.ttft_schedule for t in done]),
        tpot=pool([t.tpot for t in done]),
        itl=summarize([value for itl in itls for value in itl or []], seed=seed) if known else None,
        chunk_gap=summarize([gap for t in done for gap in t.chunk_gaps], seed=seed),
        e2e=pool([t.e2e for t in done]),
        tokens_per_chunk=tokens / chunks if chunks else None,
    )


def _throughput(record: RunRecord, slo: SLO | None) -> ThroughputLedger:
    done, span = record.completed, record.makespan
    prompt = sum(t.prompt_tokens or 0 for t in done)
    generated = sum(t.n or 0 for t in done)
    good = sum(slo.met_by(t) for t in record.traces) if slo else None

    def rate(count: float) -> float | None:
        return count / span if span else None

    return ThroughputLedger(
        completed=len(done),
        failed=len(record.failed),
        makespan=span,
        requests_per_second=rate(len(done)),
        prompt_tokens_per_second=rate(prompt),
        generated_tokens_per_second=rate(generated),
        total_tokens_per_second=rate(prompt + generated),
        offered_rate=record.workload.offered_rate,
        achieved_rate=record.achieved_rate,
        goodput=rate(good) if good is not None else None,
        slo=slo,
        slo_attainment=good / len(record.traces) if good is not None else None,
    )


def _memory(report: MemoryReport, kv_formula: int | None) -> MemoryLedger:
    parts = (report.peak, report.baseline, report.weights, report.kv_reserved)
    known = [part for part in parts if part is not None]
    other = known[0] - sum(known[1:]) if len(known) == 4 else None
    return MemoryLedger(
        weights=report.weights,
        kv_used=report.kv_used_peak,
        kv_reserved=report.kv_reserved,
        kv_formula=kv_formula,
        baseline=report.baseline,
        other=other,
        peak=report.peak,
    )


# -- words for numbers --------------------------------------------------------------------------------------------------
def show_seconds(value: float | None) -> str:
    """``12.3 ms``, ``1.23 s`` or a dash."""
    if value is None:
        return "-"
    return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"


def show_bytes(value: float | None) -> str:
    """Binary units: ``23.0 KiB``, ``1.50 GiB``, or a dash."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError


def show_summary(summary: Summary) -> str:
    """p50 with its interval, then p95 and p99 or the reason why not."""
    if summary.n == 0:
        return "no samples"
    text = f"p50 {show_seconds(summary.p50)}"
    if summary.n > 1:
        text += f" [{show_seconds(summary.p50_low)}, {show_seconds(summary.p50_high)}]"
    text += f", p95 {show_seconds(summary.p95)}" if summary.p95 is not None else ", p95: n too small"
    text += f", p99 {show_seconds(summary.p99)}" if summary.p99 is not None else ", p99: n too small"
    return f"{text} (n={summary.n})"


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.4g}{unit}"


def _rows(card: LedgerCard) -> list[tuple[str, str, str]]:
    lat, thr, mem, work = card.latency, card.throughput, card.memory, card.workload
    info, hardware = card.implementation.engine, card.implementation.hardware
    rows = [
        ("latency", "TTFT, from sending", show_summary(lat.ttft)),
        ("latency", "TTFT, from schedule", show_summary(lat.ttft_schedule)),
        ("latency", "TPOT", show_summary(lat.tpot)),
        (
            "latency",
            "ITL" if lat.itl else "chunk gap (token times unknown)",
            show_summary(lat.itl if lat.itl is not None else lat.chunk_gap),
        ),
        ("latency", "E2E", show_summary(lat.e2e)),
        ("throughput", "requests", f"{thr.completed} completed, {thr.failed} failed"),
        ("throughput", "requests/s", _number(thr.requests_per_second)),
        ("throughput", "prompt tokens/s", _number(thr.prompt_tokens_per_second)),
        ("throughput", "generated tokens/s", _number(thr.generated_tokens_per_second)),
        ("throughput", "offered / achieved rate", f"{_number(thr.offered_rate)} / {_number(thr.achieved_rate)}"),
    ]
    if thr.slo:
        goal = f"TTFT <= {show_seconds(thr.slo.ttft)}, TPOT <= {show_seconds(thr.slo.tpot)}"
        share = thr.slo_attainment or 0.0
        rows.append(("throughput", f"goodput ({goal})", f"{_number(thr.goodput)} requests/s, {share:.0%} attained"))
    rows += [
        ("memory", "interpreter and libraries", show_bytes(mem.baseline)),
        ("memory", "weights", show_bytes(mem.weights)),
        ("memory", "KV used (measured / formula)", f"{show_bytes(mem.kv_used)} / {show_bytes(mem.kv_formula)}"),
        ("memory", "KV reserved", show_bytes(mem.kv_reserved)),
        ("memory", "other (activations, workspace)", show_bytes(mem.other)),
        ("memory", "peak", show_bytes(mem.peak)),
    ]
    if not card.quality:
        rows.append(("quality", "none measured", "no speed here may be compared"))
    for q in card.quality:
        span = "" if q.low is None or q.high is None else f" [{q.low:.4g}, {q.high:.4g}]"
        rows.append(("quality", f"{q.metric} ({q.protocol})", f"{q.value:.4g}{span}, n={q.n}"))
    rows += [
        ("implementation", "engine", f"{info.engine} {info.version}, {info.model}, {info.dtype} on {info.device}"),
        ("implementation", "machine", hardware.label),
        ("implementation", "provenance", card.implementation.provenance),
        ("workload", work.name, f"{work.n_requests} requests, {work.kind}, concurrency {work.concurrency}"),
        (
            "workload",
            "prompt / output tokens",
            f"{_number(work.prompt_tokens.p50)} / {_number(work.output_tokens.p50)} (p50)",
        ),
        ("workload", "from prefix cache", "unknown" if work.cached_fraction is None else f"{work.cached_fraction:.1%}"),
        ("workload", "client lag", f"{show_seconds(work.client_lag_p50)} (p50)"),
        ("workload", "digest", work.digest),
    ]
    return rows


def cards_frame(cards: list[LedgerCard]) -> pd.DataFrame:
    """Several cards side by side, rows in the order of the first card that has them, ledger by ledger."""
    if not cards:
        raise ValueError("no cards")
    values = [{(ledger, quantity): text for ledger, quantity, text in _rows(card)} for card in cards]
    ledgers = list(dict.fromkeys(ledger for column in values for ledger, _ in column))
    keys = sorted(dict.fromkeys(key for column in values for key in column), key=lambda key: ledgers.index(key[0]))
    frame = pd.DataFrame(keys, columns=["ledger", "quantity"])
    for card, column in zip(cards, values, strict=True):
        frame[card.name] = [column.get(key, "-") for key in keys]
    return frame
