"""Measures any OpenAI-compatible streaming server: vLLM, SGLang, TGI, TensorRT-LLM, Dynamo, or the scripted fake one.

The client must cost little, or its own lateness is read as the server's. So while a run lasts it does one thing: it
notes the time at which bytes arrive. What the bytes mean is worked out after the last one came. The HTTP library is
aiohttp, whose parser is compiled; for streams of small chunks it needs a fraction of the processor time of httpx, and
on two cores that time is taken from the server. There is no connection limit: a limit queues requests inside the client.

A chunk here is one server-sent event, with the time of the read that completed it. Its number of tokens is the
difference between successive usage reports (``continuous_usage_stats``), or the number of token ids where the server
sends them. Where it does neither, the number stays unknown and only chunk gaps are reported. A count that differs from
the server's final usage by more than 1 % is not believed: the usage is kept as n, the chunks' counts are dropped, and
the run's counter ``client:token_count_mismatches`` rises.

Everything runs in a private event loop in a thread of its own, so the public functions are synchronous and work inside
a notebook's live loop as well.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict

from helpers.engines.base import EngineInfo, RunRecord, client_health, warmup_workload
from helpers.engines.server_process import loop_factory
from helpers.errors import EngineError, suggest
from helpers.trace import Chunk, ChunkKind, StreamTrace, TokenSource
from helpers.workload import Request, Workload

Api = Literal["completions", "chat"]
Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")

PROBE_INTERVAL_S = 0.1
COUNT_TOLERANCE = 0.01
ERROR_BODY_BYTES = 500
MISMATCH_COUNTER = "client:token_count_mismatches"
PROMPT_MISMATCH_COUNTER = "client:prompt_length_mismatches"


# -- what arrived, before it is understood -------------------------------------------------------------------------
@dataclass(slots=True)
class RawStream:
    """One request's bytes as they came: ``reads`` holds (monotonic seconds, bytes) of each read."""

    request_id: str
    scheduled: float
    sent: float = 0.0
    written: bool = False
    """Whether `sent` is the moment of writing; else it is the moment at which a connection was asked for."""
    status: int = 0
    content_type: str = ""
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None


class ParsedStream(NamedTuple):
    """A trace, and whether its chunks' token counts contradicted the server's usage and were dropped."""

    trace: StreamTrace
    counts_disagree: bool


def sse_payloads(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event with the time of the read that completed it.

    Comments and other fields are skipped. How the bytes were cut into reads does not matter. Bytes after the last blank
    line are an event if they are whole (a server may close without the final blank line) and are dropped otherwise.
    """
    rest = b""
    now = 0.0
    for now, data in reads:
        rest += data
        if b"\r" in rest:
            # A carriage return at the very end may be half of a line end: it stays until the next read.
            held = rest.endswith(b"\r")
            rest = rest[:-1].replace(b"\r\n", b"\n") + b"\r" if held else rest.replace(b"\r\n", b"\n")
        *events, rest = rest.split(b"\n\n")
        for event in events:
            if (payload := _event_data(event)) is not None:
                yield now, payload
    payload = _event_data(rest.rstrip(b"\r"))
    if payload is not None and (payload == b"[DONE]" or _is_json(payload)):
        yield now, payload


def _event_data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def _is_json(payload: bytes) -> bool:
    try:
        json.loads(payload)
    except ValueError:
        return False
    return True


class _Piece(NamedTuple):
    time: float
    kind: ChunkKind
    text: str
    n_tokens: int | None


class _StreamReader:
    """Follows one stream's events: pieces of text, token counts, usage, and how it ended."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.ids: list[int] = []
        self.counted = 0
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.done = False
        self.error: str | None = None

    def read(self, moment: float, payload: bytes) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            document = json.loads(payload)
        except ValueError:
            self.error = self.error or f"The server sent an event that is not JSON: {payload[:80]!r}."
            return
        if not isinstance(document, dict) or document.get("error"):
            self.error = self.error or f"The server reported an error in the stream: {str(document)[:ERROR_BODY_BYTES]}"
            return
        usage = document.get("usage")
        if usage:
            self.usage = usage
        for choice in (document.get("choices") or [])[:1]:
            self._read_choice(moment, choice, usage)

    def _read_choice(self, moment: float, choice: dict[str, Any], usage: dict[str, Any] | None) -> None:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        kind, text = _kind_and_text(choice)
        n_tokens: int | None = None
        ids = choice.get("token_ids")
        if ids is not None:
            self.ids += ids
            n_tokens = len(ids)
        elif kind == "role":
            # A marker is not a token, even if the server already counts the one that follows.
            n_tokens = 0 if usage else None
        elif usage and usage.get("completion_tokens") is not None:
            n_tokens = max(0, usage["completion_tokens"] - self.counted)
            self.counted += n_tokens
        self.pieces.append(_Piece(moment, kind, text, n_tokens))

    def counts(self) -> int | None:
        """Tokens in all pieces together, or None where a piece with text has no count."""
        if any(piece.n_tokens is None and piece.text for piece in self.pieces):
            return None
        known = [piece.n_tokens for piece in self.pieces if piece.n_tokens is not None]
        return sum(known) if known else None


def _kind_and_text(choice: dict[str, Any]) -> tuple[ChunkKind, str]:
    """A completions text or a chat delta: its kind, and its text (empty for markers and empty deltas)."""
    if "delta" not in choice:
        return "text", choice.get("text") or ""
    delta = choice["delta"] or {}
    if content := delta.get("content"):
        return "text", content
    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
        return "reasoning", reasoning
    if calls := delta.get("tool_calls"):
        functions = [call.get("function") or {} for call in calls]
        return "tool", "".join((f.get("name") or "") + (f.get("arguments") or "") for f in functions)
    return ("role" if delta.get("role") else "text"), ""


def parse_stream(raw: RawStream) -> ParsedStream:
    """Turn the bytes of one request into its trace. What arrived before an error is kept beside the error."""
    base: dict[str, Any] = {"request_id": raw.request_id, "scheduled": raw.scheduled, "sent": raw.sent}
    body = b"".join(data for _, data in raw.reads) if raw.status != 200 or "json" in raw.content_type else b""
    if raw.status not in (0, 200):
        text = body[:ERROR_BODY_BYTES].decode(errors="replace")
        return ParsedStream(StreamTrace(**base, error=f"HTTP {raw.status}: {text}"), False)
    if "json" in raw.content_type:
        return ParsedStream(_unstreamed(base, raw, body), False)
    reader = _StreamReader()
    for moment, payload in sse_payloads(raw.reads):
        reader.read(moment, payload)
    return _finish(base, raw, reader)


def _unstreamed(base: dict[str, Any], raw: RawStream, body: bytes) -> StreamTrace:
    """A whole document instead of a stream: its token times cannot be known, so it is no measurement."""
    try:
        usage = json.loads(body).get("usage") or {}
    except (ValueError, AttributeError):
        usage = {}
    return StreamTrace(
        **base,
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        token_source="usage" if usage.get("completion_tokens") is not None else "none",
        error=raw.error or "The server answered with one JSON document instead of a stream: no token time is known.",
    )


def _finish(base: dict[str, Any], raw: RawStream, reader: _StreamReader) -> ParsedStream:
    counts = reader.counts()
    n = reader.usage.get("completion_tokens")
    if n is None:
        n = counts
    disagree = counts is not None and n is not None and abs(counts - n) > COUNT_TOLERANCE * n
    keep = counts is not None and not disagree
    ids = reader.ids if reader.ids and len(reader.ids) == n else None
    source: TokenSource = "ids" if ids else "usage" if n is not None else "none"
    error = raw.error or reader.error
    if error is None and not (reader.done or reader.finish_reason):
        error = "The stream ended without a finish reason and without [DONE]."
    trace = StreamTrace(
        **base,
        chunks=[
            Chunk(time=piece.time, kind=piece.kind, text=piece.text, n_tokens=piece.n_tokens if keep else None)
            for piece in reader.pieces
        ],
        prompt_tokens=reader.usage.get("prompt_tokens"),
        completion_tokens=n,
        token_source=source,
        cached_tokens=(reader.usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        output_ids=ids,
        finish_reason=reader.finish_reason,
        error=error,
    )
    return ParsedStream(trace, disagree)


# -- the server's own counters -------------------------------------------------------------------------------------
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SERVER_LABELS = {"model_name", "engine"}


def parse_counters(text: str) -> dict[str, float]:
    """Counters, and the sums and counts of histograms, of a Prometheus page.

    A key is the metric's name as the engine's code has it, without the suffix ``_total``, followed by the labels that
    tell two series of one server apart: ``vllm:prompt_tokens_by_source{source=local_compute}``. Series that differ only
    in model name or engine number are added up.
    """
    counters: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(maxsplit=3)
            kinds[name] = kind
            continue
        match = _SAMPLE.match(line)
        if line.startswith("#") or match is None:
            continue
        name, labels, value = match.groups()
        is_counter = kinds.get(name) == "counter" or kinds.get(name.removesuffix("_total")) == "counter"
        is_sum = name.endswith(("_sum", "_count")) and kinds.get(name.rsplit("_", 1)[0]) in ("histogram", "summary")
        if not (is_counter or is_sum):
            continue
        shown = [f"{key}={text}" for key, text in _LABEL.findall(labels or "") if key not in _SERVER_LABELS]
        key = name.removesuffix("_total") + (f"{{{','.join(sorted(shown))}}}" if shown else "")
        counters[key] = counters.get(key, 0.0) + float(value)
    return counters


# -- a loop of our own ---------------------------------------------------------------------------------------------
def run_in_own_loop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a new event loop in a new thread and wait for it; an interrupt cancels it first."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    cancel: list[Callable[[], object]] = []

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await main()

    def target() -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                outcome.set_result(runner.run(guarded()))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=target, name="openai-client", daemon=True)
    thread.start()
    try:
        return outcome.result()
    finally:
        if not outcome.done():
            for function in cancel:
                with contextlib.suppress(RuntimeError):
                    function()
        thread.join()


class _LagProbe:
    """Asks the running loop for a sign of life ten times a second, from another thread, and notes how long each takes.

    That is what an arriving byte waits for. A timer inside the loop would measure something else besides: the loop's
    timers are rounded up to whole milliseconds. And it would have to tick often, at a cost that outgrows the streams'.
    """

    def __init__(self) -> None:
        self.lags: list[float] = []
        self.cpu_seconds = 0.0
        self._loop = asyncio.get_running_loop()
        self._running = threading.Lock()
        self._running.acquire()
        self._thread = threading.Thread(target=self._ask, name="lag-probe", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._running.acquire(timeout=PROBE_INTERVAL_S):
            self._loop.call_soon_threadsafe(self._answer, time.monotonic())
        self.cpu_seconds = time.thread_time()

    def _answer(self, asked: float) -> None:
        self.lags.append(time.monotonic() - asked)

    def stop(self) -> list[float]:
        """End the probe; `cpu_seconds` holds what its thread cost."""
        self._running.release()
        self._thread.join()
        return self.lags


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """No collection in the middle of a run: with a large heap it stops the client for tens of milliseconds."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Measured(NamedTuple):
    started: float
    parsed: list[ParsedStream]
    lags: list[float]
    cpu_seconds: float


# -- the engine ----------------------------------------------------------------------------------------------------
class OpenAIEngine:
    """A client for an OpenAI-compatible server, as an engine of the course.

    Parameters
    ----------
    base_url : ``http://host:port``, with or without ``/v1``.
    model : the name under which the server knows the model.
    api : ``completions`` sends the workload's token ids; ``chat`` sends `messages`.
    messages : for ``chat``, the messages of each request by its id.
    max_model_len : context in tokens; None asks the server (0 in `info` where it does not say, and then no length is
        checked).
    timeout_s : seconds a request may take altogether before it counts as failed.
    continuous_usage : ask for a usage report in each chunk. A server that refuses the option needs False.
    extra_body : further fields of each request, such as ``{"return_token_ids": True}`` for vLLM.
    api_key : sent as a bearer token and kept nowhere else.
    info : what to record about the engine; None asks the server.
    """

    info: EngineInfo

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api: Api = "completions",
        messages: Mapping[str, Messages] | None = None,
        max_model_len: int | None = None,
        timeout_s: float = 600.0,
        continuous_usage: bool = True,
        extra_body: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        info: EngineInfo | None = None,
    ) -> None:
        if api == "chat" and not messages:
            raise EngineError(
                "The chat API was asked for without messages.",
                "Give messages={request_id: [{'role': ..., 'content': ...}]}, or use api='completions'.",
            )
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.api = api
        self.messages = dict(messages or {})
        self.max_model_len = max_model_len
        self.timeout_s = timeout_s
        self.continuous_usage = continuous_usage
        self.extra_body = dict(extra_body or {})
        self._api_key = api_key
        self._given_info = info

    def __enter__(self) -> Self:
        self.info = run_in_own_loop(self._look_at_server)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held between runs."""

    def run(self, workload: Workload, *, warmup: int = 1) -> RunRecord:
        """Send `warmup` other requests of the same shape, then `workload`; see `helpers.engines.base.Engine`.

        Raises
        ------
        EngineError : the server is not reachable, or a request does not fit its context. A request that fails while
            the server lives is not an exception but a failed trace.
        """
        if self.api == "completions" and self.info.max_model_len:
            workload.check_fits(self.info.max_model_len)
        for request in workload.requests:
            self._messages_of(request)
        with _without_garbage_collection():
            return run_in_own_loop(lambda: self._run(workload, warmup))

    # -- the server ---------------------------------------------------------------------------------------------------
    def _session(self) -> aiohttp.ClientSession:
        """Connections are kept for less time than servers keep them, so that none is found closed when it is needed."""
        stamp = aiohttp.TraceConfig()
        stamp.on_request_chunk_sent.append(_stamp_sent)
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else None
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            headers=headers,
            trace_configs=[stamp],
            read_bufsize=2**20,
            auto_decompress=False,
            skip_auto_headers=["Accept-Encoding", "User-Agent"],
        )

    async def _get(self, session: aiohttp.ClientSession, path: str) -> str | None:
        """The body of a small page; None where the server has no such page."""
        try:
            async with session.get(self.base_url + path, timeout=aiohttp.ClientTimeout(total=10)) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(
                f"The server at {self.base_url} cannot be reached: {error or type(error).__name__}.",
                "Start the server first, and check the address, the port and that it listens on this interface.",
            ) from error

    async def _look_at_server(self) -> EngineInfo:
        async with self._session() as session:
            models = _json_or_empty(await self._get(session, "/v1/models"))
            cards = [card for card in models.get("data") or [] if isinstance(card, dict)]
            known = [str(card.get("id")) for card in cards]
            if known and self.model not in known:
                raise EngineError(f"The server has no model named {self.model!r}.", suggest(self.model, known))
            told = next((card.get("max_model_len") for card in cards if card.get("id") == self.model), None)
            context = self.max_model_len or told or 0
            if self._given_info is not None:
                return self._given_info.model_copy(update={"max_model_len": context or self._given_info.max_model_len})
            version = _json_or_empty(await self._get(session, "/version")).get("version")
        return EngineInfo(
            engine="openai-server",
            version=str(version or "unknown"),
            model=self.model,
            dtype="unknown",
            device="unknown",
            max_model_len=context,
            settings={"api": self.api, "continuous_usage": self.continuous_usage},
        )

    async def _counters(self, session: aiohttp.ClientSession) -> dict[str, float]:
        return parse_counters(await self._get(session, "/metrics") or "")

    # -- requests -----------------------------------------------------------------------------------------------------
    def _messages_of(self, request: Request) -> list[dict[str, Any]]:
        """The chat messages of a request. A warm-up uses its original's, with its own id in front of the first one."""
        if self.api != "chat":
            return []
        if request.request_id in self.messages:
            return [dict(message) for message in self.messages[request.request_id]]
        original = re.sub(r"^warmup-\d+-", "", request.request_id)
        if original == request.request_id or original not in self.messages:
            raise EngineError(
                f"There are no chat messages for request {request.request_id!r}.",
                "Give messages for every request of the workload, by request id.",
            )
        first, *others = [dict(message) for message in self.messages[original]]
        return [{**first, "content": f"{request.request_id} {first.get('content', '')}"}, *others]

    def _body(self, request: Request) -> bytes:
        body: dict[str, Any] = {"model": self.model}
        if self.api == "chat":
            body["messages"] = self._messages_of(request)
        else:
            body["prompt"] = request.prompt_ids
        body["max_tokens"] = request.max_tokens
        body["temperature"] = request.temperature
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
        if self.continuous_usage:
            body["stream_options"]["continuous_usage_stats"] = True
        if request.ignore_eos:
            body["ignore_eos"] = True
        if request.seed is not None:
            body["seed"] = request.seed
        body.update(self.extra_body)
        return json.dumps(body, separators=(",", ":")).encode()

    async def _send(self, session: aiohttp.ClientSession, request: Request, scheduled: float) -> RawStream:
        raw = RawStream(request.request_id, scheduled)
        path = "/v1/chat/completions" if self.api == "chat" else "/v1/completions"
        headers = {"Content-Type": "application/json", "X-Request-Id": request.request_id}
        body = self._body(request)
        raw.sent = time.monotonic()
        try:
            async with session.post(
                self.base_url + path, data=body, headers=headers, trace_request_ctx=raw
            ) as response:
                raw.status, raw.content_type = response.status, response.content_type
                await _collect(response.content, raw.reads)
        except TimeoutError:
            raw.error = f"The request did not end within {self.timeout_s:g} s."
        except (aiohttp.ClientError, OSError) as error:
            raw.error = f"The connection broke: {type(error).__name__}: {error}"
        return raw

    async def _run(self, workload: Workload, warmup: int) -> RunRecord:
        async with self._session() as session:
            before = await self._counters(session)
            if (warm := warmup_workload(workload, warmup)) is not None:
                await self._drive(session, warm)
                before = await self._counters(session)
            measured = await self._measure(session, workload)
            after = await self._counters(session)
        counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
        traces = [parsed.trace for parsed in measured.parsed]
        counters[MISMATCH_COUNTER] = float(sum(parsed.counts_disagree for parsed in measured.parsed))
        if self.api == "completions":
            pairs = zip(traces, workload.prompt_lengths, strict=True)
            wrong = [trace for trace, n in pairs if trace.prompt_tokens not in (None, n)]
            counters[PROMPT_MISMATCH_COUNTER] = float(len(wrong))
        return RunRecord(
            engine=self.info,
            workload=workload,
            traces=traces,
            started=measured.started,
            client=client_health(traces, measured.lags, measured.cpu_seconds),
            counters=counters,
            warmup_requests=min(warmup, len(workload.requests)) if warmup > 0 else 0,
        )

    async def _measure(self, session: aiohttp.ClientSession, workload: Workload) -> _Measured:
        """Drive the workload and read what came; the processor time is this thread's, reading included."""
        cpu = time.thread_time()
        probe = _LagProbe()
        started, raws = await self._drive(session, workload)
        lags = probe.stop()
        parsed = [parse_stream(raw) for raw in raws]
        return _Measured(started, parsed, lags, time.thread_time() - cpu + probe.cpu_seconds)

    async def _drive(self, session: aiohttp.ClientSession, workload: Workload) -> tuple[float, list[RawStream]]:
        started = time.monotonic()
        if workload.kind == "open":
            waiting = [self._send_at(session, request, started + request.arrival) for request in workload.requests]
            return started, list(await asyncio.gather(*waiting))
        raws: dict[int, RawStream] = {}
        queue = iter(enumerate(workload.requests))

        async def slot() -> None:
            for index, request in queue:
                raws[index] = await self._send(session, request, time.monotonic())

        await asyncio.gather(*(slot() for _ in range(min(workload.concurrency, len(workload.requests)))))
        return started, [raws[index] for index in range(len(workload.requests))]

    async def _send_at(self, session: aiohttp.ClientSession, request: Request, due: float) -> RawStream:
        # Not one sleep but as many as it takes: the loop's timers may be early by half a millisecond.
        while (remaining := due - time.monotonic()) > 0:
            await asyncio.sleep(remaining)
        return await self._send(session, request, due)


async def _collect(content: aiohttp.StreamReader, reads: list[tuple[float, bytes]]) -> None:
    """Append (monotonic seconds, bytes) of each read until the answer ends."""
    clock = time.monotonic
    while data := await content.readany():
        reads.append((clock(), data))


async def _stamp_sent(
    session: aiohttp.ClientSession, context: SimpleNamespace, chunk: aiohttp.TraceRequestChunkSentParams
) -> None:
    """The request's first bytes are about to be written: the connection, new or kept, is there."""
    raw = context.trace_request_ctx
    if isinstance(raw, RawStream) and not raw.written:
        raw.sent, raw.written = time.monotonic(), True


def _json_or_empty(text: str | None) -> dict[str, Any]:
    try:
        document = json.loads(text or "{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


# -- the client's own ceiling --------------------------------------------------------------------------------------
class ClientCeiling(BaseModel):
    """What this client can take on this machine, from streams that cost the server almost nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n_streams: int
    tokens: int
    seconds: float
    cpu_seconds: float
    loop_lag_p50: float

    @property
    def tokens_per_second(self) -> float:
        """Streamed tokens per second that arrived, one token a chunk."""
        return self.tokens / self.seconds

    @property
    def ceiling_tokens_per_second(self) -> float:
        """Tokens per second at which the client's processor time alone would fill one core."""
        return self.tokens / self.cpu_seconds


def self_test(*, n_streams: int = 32, n_tokens: int = 128, gap_s: float = 0.01) -> ClientCeiling:
    """Stream one-token chunks from the fake server and return the client's ceiling; about 2 s at the defaults.

    A server whose tokens per second come near the ceiling is measured by a client that is itself the bottleneck.
    """
    from helpers.engines.fake_server import FakeServer, StreamScript

    script = StreamScript(ttft=0.05, gap=gap_s, n_tokens=n_tokens)
    requests = tuple(
        Request(request_id=f"self-test-{i}", prompt_ids=(1, 2, 3), max_tokens=n_tokens, arrival=i * gap_s / n_streams)
        for i in range(n_streams)
    )
    workload = Workload(name="self-test", requests=requests, kind="open")
    with FakeServer(script) as server, OpenAIEngine(server.url, "fake") as engine:
        record = engine.run(workload, warmup=1)
    seconds = record.makespan
    if record.failed or seconds is None:
        first = record.failed[0].error if record.failed else "nothing arrived"
        raise EngineError(f"The client's self-test failed: {first}", "End other programs and try again.")
    return ClientCeiling(
        n_streams=n_streams,
        tokens=record.client.streamed_tokens,
        seconds=seconds,
        cpu_seconds=record.client.cpu_seconds,
        loop_lag_p50=record.client.loop_lag_p50,
    )
