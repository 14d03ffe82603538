"""What every engine has in common: it is a context manager, it runs a `Workload`, and it returns a `RunRecord`."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field

from helpers.stats import percentile
from helpers.trace import StreamTrace
from helpers.workload import Workload

Provenance = Literal["measured", "emulated", "simulated"]


class EngineInfo(BaseModel):
    """What ran: enough to tell two runs apart, and nothing secret."""

    model_config = ConfigDict(extra="forbid")

    engine: str
    """``transformers``, ``vllm``, ``vllm-serve``, ``openai-server`` or ``fake-server``."""
    version: str
    model: str
    dtype: str
    device: str
    max_model_len: int
    settings: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    provenance: Provenance = "measured"


class ClientHealth(BaseModel):
    """Whether the measuring side kept up, so that its own lateness is not read as the engine's."""

    model_config = ConfigDict(extra="forbid")

    loop_lag_p50: float = 0.0
    """Median time, seconds, the client's event loop took to answer a probe; 0 for in-process engines."""
    loop_lag_max: float = 0.0
    send_lag_p50: float = 0.0
    """Median of sent - scheduled, seconds, over the run's requests."""
    send_lag_max: float = 0.0
    cpu_seconds: float = 0.0
    """Processor time the client spent, user and system."""
    streamed_tokens: int = 0

    @property
    def cpu_seconds_per_1000_tokens(self) -> float | None:
        return None if self.streamed_tokens == 0 else 1000 * self.cpu_seconds / self.streamed_tokens


class MemoryReport(BaseModel):
    """Bytes that an engine holds; None where it cannot be told. See `helpers.memory` for how each is measured."""

    model_config = ConfigDict(extra="forbid")

    weights: int | None = None
    kv_reserved: int | None = None
    """The whole KV pool or cache buffer that is set aside."""
    kv_used_peak: int | None = None
    """The most KV that requests held at once."""
    peak: int | None = None
    """Peak resident (CPU) or allocated (GPU) bytes of the engine's process."""
    baseline: int | None = None
    """Resident bytes of the engine's process before it loaded anything: interpreter and libraries."""


class RunRecord(BaseModel):
    """One run of one workload on one engine: the only thing ledgers, claims and plots are computed from."""

    model_config = ConfigDict(extra="forbid")

    engine: EngineInfo
    workload: Workload
    traces: list[StreamTrace]
    started: float
    """Monotonic time at which offset 0 of the workload fell."""
    client: ClientHealth = Field(default_factory=ClientHealth)
    memory: MemoryReport = Field(default_factory=MemoryReport)
    counters: dict[str, float] = Field(default_factory=dict)
    """Differences (after minus before) of the engine's own counters, under the engine's names."""
    warmup_requests: int = 0

    @property
    def completed(self) -> list[StreamTrace]:
        return [trace for trace in self.traces if trace.ok]

    @property
    def failed(self) -> list[StreamTrace]:
        return [trace for trace in self.traces if not trace.ok]

    @property
    def makespan(self) -> float | None:
        """Seconds from the first scheduled request to the last token; None where nothing completed."""
        ends = [trace.last for trace in self.completed if trace.last is not None]
        return max(ends) - min(trace.scheduled for trace in self.traces) if ends else None

    @property
    def achieved_rate(self) -> float | None:
        """Requests per second at which requests were really sent."""
        sent = [trace.sent for trace in self.traces]
        span = max(sent) - min(sent) if len(sent) > 1 else 0.0
        return (len(sent) - 1) / span if span > 0 else None

    @property
    def cached_fraction(self) -> float | None:
        """Prompt tokens served from a prefix cache over all prompt tokens; None where no engine counter tells."""
        pairs = [(t.cached_tokens, t.prompt_tokens) for t in self.completed]
        known = [(cached, total) for cached, total in pairs if cached is not None and total]
        if not known:
            return None
        return sum(cached for cached, _ in known) / sum(total for _, total in known)


def client_health(traces: list[StreamTrace], loop_lags: list[float], cpu_seconds: float) -> ClientHealth:
    """Summarize a run's client side from its traces, event-loop lags (seconds) and processor time (seconds)."""
    send_lags = [trace.send_lag for trace in traces]
    return ClientHealth(
        loop_lag_p50=(percentile(loop_lags, 50) or 0.0) if loop_lags else 0.0,
        loop_lag_max=max(loop_lags, default=0.0),
        send_lag_p50=(percentile(send_lags, 50) or 0.0) if send_lags else 0.0,
        send_lag_max=max(send_lags, default=0.0),
        cpu_seconds=cpu_seconds,
        streamed_tokens=sum(trace.n or 0 for trace in traces),
    )


class Engine(Protocol):
    """``with SomeEngine(...) as engine: record = engine.run(workload)``. Synchronous, also inside a live event loop."""

    info: EngineInfo

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def run(self, workload: Workload, *, warmup: int = 1) -> RunRecord:
        """Send `warmup` shape-matched requests that are not measured and share no prefix, then the workload."""
        ...


def warmup_workload(workload: Workload, n: int) -> Workload | None:
    """`n` requests with the lengths of the first ones and other prompts: every id moved by a fixed odd step.

    Returns None for ``n=0``. Prompts differ from the measured ones from the first token on, so a prefix cache filled by
    the warm-up serves none of them.
    """
    if n <= 0:
        return None
    highest = max(max(request.prompt_ids) for request in workload.requests)
    lowest = min(min(request.prompt_ids) for request in workload.requests)
    span = max(2, highest - lowest + 1)
    requests = tuple(
        request.model_copy(
            update={
                "request_id": f"warmup-{i}-{request.request_id}",
                "prompt_ids": tuple(lowest + (token - lowest + span // 2) % span for token in request.prompt_ids),
                "arrival": 0.0,
            }
        )
        for i, request in enumerate(workload.requests[:n])
    )
    return workload.model_copy(update={"name": f"warmup-{workload.name}", "requests": requests, "kind": "closed"})
