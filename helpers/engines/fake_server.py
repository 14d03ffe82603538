"""A scripted OpenAI-compatible server: it streams on a schedule that is known, and logs when each write really happened.

It exists to test clients. What a real server does by chance (several tokens a chunk, a role marker first, reasoning
before the answer, a connection that breaks) this one does by order, in a process of its own, so that the client under
test shares neither an event loop nor an interpreter with it. ``time.monotonic`` is one clock for all processes of a
machine, hence the log and the client's record can be compared directly.

Every write has a deadline, counted from the request's arrival; a late write does not move the ones after it.

Requests are recognized by the header ``X-Request-Id``, else by the body's ``request_id`` or ``user``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import urllib.request
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from helpers.engines.processes import end_with_parent
from helpers.engines.server_process import HOST, ServerProcess, claim_port, loop_factory
from helpers.errors import EngineError

UsageMode = Literal["none", "final", "continuous"]
EventKind = Literal["role", "empty", "reasoning", "text", "tool"]


class StreamScript(BaseModel):
    """What the server does with one request. Times are seconds from the request's arrival."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft: float = Field(default=0.02, ge=0)
    """When the first write that holds tokens is due."""
    gap: float = Field(default=0.01, ge=0)
    """Time from one write to the next."""
    n_tokens: int = Field(default=8, ge=0)
    """Completion tokens, reasoning and tool calls included; a request's own ``max_tokens`` caps it."""
    tokens_per_chunk: int | tuple[int, ...] = 1
    """Tokens in each event; of a list, the last entry is repeated."""
    chunks_per_write: int = Field(default=1, ge=1)
    """Events that leave in one write."""
    reasoning_tokens: int = Field(default=0, ge=0)
    """How many of the first tokens are reasoning."""
    reasoning_field: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    tool_tokens: int = Field(default=0, ge=0)
    """How many of the last tokens are a tool call."""
    role_at: float | None = None
    """When an event without tokens precedes the stream: a role marker (chat) or an empty text (completions)."""
    usage: UsageMode = "continuous"
    """``final``: one event at the end, if the client asks for it; ``continuous``: in each event besides, if asked for."""
    usage_tokens: int | None = None
    """What the final usage claims instead of the truth: a server whose chunk counts and usage disagree."""
    cached_tokens: int | None = None
    die_after_chunks: int | None = None
    """Close the connection after this many token-bearing events."""
    done: bool = True
    """Whether the last token's event has a finish reason and ``[DONE]`` closes the stream."""
    stream: bool = True
    """False: answer with one JSON document in spite of ``stream: true``."""
    http_status: int = 200
    error_message: str = "scripted failure"


class Script(BaseModel):
    """A script for every request: `default`, and `by_request` for those whose id stands there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: StreamScript = StreamScript()
    by_request: dict[str, StreamScript] = Field(default_factory=dict)
    model: str = "fake"
    max_model_len: int | None = 8192

    def of(self, request_id: str) -> StreamScript:
        return self.by_request.get(request_id, self.default)


class Write(BaseModel):
    """One write to the socket: when it was due, when it happened (monotonic seconds), and the tokens in it."""

    model_config = ConfigDict(extra="forbid")

    planned: float
    actual: float
    events: list[tuple[EventKind, int]]
    """(kind, tokens) of each event in the write."""

    @property
    def n_tokens(self) -> int:
        return sum(n for _, n in self.events)


class Truth(BaseModel):
    """What the server did for one request, by its own clock."""

    model_config = ConfigDict(extra="forbid")

    request_id: str
    received: float
    writes: list[Write] = Field(default_factory=list)

    @property
    def token_writes(self) -> list[Write]:
        return [write for write in self.writes if write.n_tokens > 0]

    @property
    def ttft(self) -> float:
        """Seconds from the request's arrival to the first write that held a token."""
        return self.token_writes[0].actual - self.received

    @property
    def span(self) -> float:
        """Seconds from the first token-bearing write to the last."""
        return self.token_writes[-1].actual - self.token_writes[0].actual


Event = tuple[EventKind, int]


def plan(script: StreamScript, max_tokens: int) -> list[tuple[float, list[Event]]]:
    """The writes of one request as ``(seconds from arrival, events)``; the closing usage and ``[DONE]`` are not in it."""
    n_tokens = min(script.n_tokens, max_tokens)
    sizes = script.tokens_per_chunk if isinstance(script.tokens_per_chunk, tuple) else (script.tokens_per_chunk,)
    events: list[Event] = []
    sent = 0
    while sent < n_tokens:
        kind: EventKind = "text"
        reasoning_end = min(script.reasoning_tokens, n_tokens)
        bound = n_tokens - script.tool_tokens
        if sent < reasoning_end:
            kind, bound = "reasoning", reasoning_end
        elif sent >= bound:
            kind, bound = "tool", n_tokens
        size = min(max(1, sizes[min(len(events), len(sizes) - 1)]), max(1, bound - sent))
        events.append((kind, size))
        sent += size
    if script.die_after_chunks is not None:
        events = events[: script.die_after_chunks]
    writes: list[tuple[float, list[Event]]] = []
    if script.role_at is not None:
        writes.append((script.role_at, [("role", 0)]))
    k = script.chunks_per_write
    groups = [events[i : i + k] for i in range(0, len(events), k)]
    writes += [(script.ttft + index * script.gap, group) for index, group in enumerate(groups)]
    return writes


class _Answer:
    """Builds the bytes of one answer: completions or chat events with the usage that was asked for."""

    def __init__(self, script: StreamScript, body: Mapping[str, Any], *, chat: bool) -> None:
        self.script, self.chat = script, chat
        options = body.get("stream_options") or {}
        self.final_usage = script.usage != "none" and bool(options.get("include_usage"))
        self.continuous = script.usage == "continuous" and bool(options.get("continuous_usage_stats"))
        prompt = body.get("prompt") or body.get("messages") or ""
        self.prompt_tokens = len(prompt)
        self.sent = 0

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }
        if self.script.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.script.cached_tokens}
        return usage

    def _delta(self, kind: EventKind, n_tokens: int) -> dict[str, Any]:
        text = " tok" * n_tokens
        if not self.chat:
            return {"text": text}
        if kind == "role":
            return {"delta": {"role": "assistant", "content": ""}}
        if kind == "reasoning":
            return {"delta": {self.script.reasoning_field: text}}
        if kind == "tool":
            return {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}}
        return {"delta": {"content": text}}

    def event(self, kind: EventKind, n_tokens: int, *, last: bool) -> bytes:
        self.sent += n_tokens
        choice = {"index": 0, **self._delta(kind, n_tokens), "finish_reason": "length" if last else None}
        document: dict[str, Any] = {"id": "fake", "object": "chunk", "model": "fake", "choices": [choice]}
        if self.continuous:
            document["usage"] = self.usage(self.sent)
        return _sse(document)

    def closing(self) -> bytes:
        """The usage event, if one is due, and ``[DONE]``."""
        parts = []
        if self.final_usage:
            claimed = self.sent if self.script.usage_tokens is None else self.script.usage_tokens
            parts.append(_sse({"id": "fake", "choices": [], "usage": self.usage(claimed)}))
        if self.script.done:
            parts.append(b"data: [DONE]\n\n")
        return b"".join(parts)


def _sse(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


class _Service:
    """The server's side: handlers, the log of what was written, and two counters."""

    def __init__(self) -> None:
        self.script = Script()
        self.truths: dict[str, Truth] = {}
        self.requests = 0
        self.tokens = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.get("/metrics", self.metrics),
                web.get("/truth", self.truth),
                web.put("/script", self.load),
                web.post("/v1/completions", self.generate),
                web.post("/v1/chat/completions", self.generate),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def models(self, request: web.Request) -> web.Response:
        card: dict[str, Any] = {"id": self.script.model, "object": "model"}
        if self.script.max_model_len is not None:
            card["max_model_len"] = self.script.max_model_len
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(self, request: web.Request) -> web.Response:
        lines = [
            "# TYPE fake:requests_total counter",
            f'fake:requests_total{{model_name="{self.script.model}"}} {self.requests}',
            "# TYPE fake:tokens_total counter",
            f'fake:tokens_total{{model_name="{self.script.model}",source="script"}} {self.tokens}',
            "# TYPE fake:running gauge",
            "fake:running 0",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def load(self, request: web.Request) -> web.Response:
        self.script = Script.model_validate_json(await request.read())
        self.truths = {}
        return web.json_response({})

    async def truth(self, request: web.Request) -> web.Response:
        return web.json_response([truth.model_dump() for truth in self.truths.values()])

    async def generate(self, request: web.Request) -> web.StreamResponse:
        received = time.monotonic()
        body = await request.json()
        request_id = str(
            request.headers.get("X-Request-Id") or body.get("request_id") or body.get("user") or self.requests
        )
        self.requests += 1
        script = self.script.of(request_id)
        truth = self.truths[request_id] = Truth(request_id=request_id, received=received)
        if script.http_status != 200:
            error = {"error": {"message": script.error_message, "code": script.http_status}}
            return web.json_response(error, status=script.http_status)
        answer = _Answer(script, body, chat="chat" in request.path)
        writes = plan(script, int(body.get("max_tokens") or body.get("max_completion_tokens") or script.n_tokens))
        if not script.stream:
            return await self._document(answer, received, writes)
        return await self._stream(request, script, truth, answer, writes)

    async def _document(
        self, answer: _Answer, received: float, writes: list[tuple[float, list[Event]]]
    ) -> web.StreamResponse:
        n_tokens = sum(n for _, events in writes for _, n in events)
        await _sleep_until(received + (writes[-1][0] if writes else 0.0))
        message = {"index": 0, "text": " tok" * n_tokens, "finish_reason": "length"}
        self.tokens += n_tokens
        return web.json_response({"id": "fake", "choices": [message], "usage": answer.usage(n_tokens)})

    async def _stream(
        self,
        request: web.Request,
        script: StreamScript,
        truth: Truth,
        answer: _Answer,
        writes: list[tuple[float, list[Event]]],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ends_well = script.done and script.die_after_chunks is None
        for index, (offset, events) in enumerate(writes):
            is_last = ends_well and index == len(writes) - 1
            payload = b"".join(
                answer.event(kind, n, last=is_last and position == len(events) - 1)
                for position, (kind, n) in enumerate(events)
            )
            due = truth.received + offset
            await _sleep_until(due)
            actual = time.monotonic()
            await response.write(payload)
            truth.writes.append(Write(planned=due, actual=actual, events=events))
            self.tokens += sum(n for _, n in events)
        if script.die_after_chunks is not None:
            # Let what was written leave first: the client keeps it, and then finds the connection broken.
            await asyncio.sleep(0.002)
            if request.transport is not None:
                request.transport.close()
            return response
        if closing := answer.closing():
            await response.write(closing)
        await response.write_eof()
        return response


async def _sleep_until(deadline: float) -> None:
    """Return at `deadline` or after it, never before: the loop's timers may be early by half a millisecond."""
    while (remaining := deadline - time.monotonic()) > 0:
        await asyncio.sleep(remaining)


def _as_script(script: Script | StreamScript | None) -> Script:
    return Script(default=script) if isinstance(script, StreamScript) else script or Script()


class FakeServer:
    """``with FakeServer(script) as server: ... server.url ... server.truth(request_id)``.

    Parameters
    ----------
    script : a `Script`, or one `StreamScript` for all requests.
    port : None takes a free one; one in use raises `EngineError`.
    """

    def __init__(self, script: Script | StreamScript | None = None, *, port: int | None = None) -> None:
        self.script = _as_script(script)
        self._port = port
        self._process: ServerProcess | None = None

    def __enter__(self) -> Self:
        port = claim_port(self._port)
        process = ServerProcess("fake server", ["helpers.engines.fake_server", "--port", str(port)], port=port)
        self._process = process.__enter__()
        try:
            self.load(self.script)
        except BaseException:
            process.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.__exit__(kind, error, trace)
            self._process = None

    @property
    def process(self) -> ServerProcess:
        if self._process is None:
            raise EngineError("The fake server is not running.", "Use it inside its 'with' block.")
        return self._process

    @property
    def url(self) -> str:
        return self.process.url

    def load(self, script: Script | StreamScript) -> None:
        """Follow `script` from the next request on, and forget what was logged."""
        self.script = _as_script(script)
        self._ask("/script", self.script.model_dump_json().encode())

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(self.url + path, data=body, method="GET" if body is None else "PUT")
        with opener.open(request, timeout=30) as answer:
            return bytes(answer.read())

    def truths(self) -> dict[str, Truth]:
        """What the server did, by request id; of requests that share an id, the last."""
        truths = TypeAdapter(list[Truth]).validate_json(self._ask("/truth"))
        return {truth.request_id: truth for truth in truths}

    def truth(self, request_id: str) -> Truth:
        """What the server did for one request; `EngineError` if it never came."""
        truths = self.truths()
        if request_id not in truths:
            raise EngineError(f"No request {request_id!r} reached the fake server.", f"It saw: {sorted(truths)[:10]}.")
        return truths[request_id]


def main() -> None:
    """Serve scripts until the process is ended."""
    parser = argparse.ArgumentParser(description="Serve scripted OpenAI-compatible streams on the loopback interface.")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent()
    factory = loop_factory() or asyncio.new_event_loop
    web.run_app(
        _Service().application(),
        host=HOST,
        port=arguments.port,
        print=None,
        access_log=None,
        backlog=1024,
        loop=factory(),
    )


if __name__ == "__main__":
    main()
