"""The streaming client: what bytes mean, and what a scripted server of known schedule shows about its times."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import sys
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.engines.fake_server import FakeServer, Script, StreamScript
from helpers.engines.openai_client import (
    MISMATCH_COUNTER,
    PROMPT_MISMATCH_COUNTER,
    OpenAIEngine,
    RawStream,
    parse_counters,
    parse_stream,
    run_in_own_loop,
    self_test,
)
from helpers.errors import EngineError
from helpers.trace import Chunk, StreamTrace
from helpers.workload import Request, Workload

SCHEDULED, SENT = 10.0, 10.25


# -- bytes in, trace out -------------------------------------------------------------------------------------------
def sse(document: dict[str, Any] | str) -> bytes:
    body = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    return b"data: " + body.encode() + b"\n\n"


def completion(text: str, *, n: int | None = None, finish: str | None = None, **more: Any) -> bytes:
    usage = None if n is None else {"prompt_tokens": 4, "completion_tokens": n}
    return sse({"choices": [{"text": text, "finish_reason": finish, **more}], "usage": usage})


def chat(delta: dict[str, Any], *, n: int | None = None, finish: str | None = None) -> bytes:
    usage = None if n is None else {"prompt_tokens": 4, "completion_tokens": n}
    return sse({"choices": [{"delta": delta, "finish_reason": finish}], "usage": usage})


def usage_event(n: int, cached: int | None = None) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": 4, "completion_tokens": n}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return sse({"choices": [], "usage": usage})


def raw(*reads: tuple[float, bytes], **fields: Any) -> RawStream:
    settings = {"sent": SENT, "status": 200, "content_type": "text/event-stream", **fields}
    return RawStream("r", SCHEDULED, reads=list(reads), **settings)


def trace_of(*reads: tuple[float, bytes], **fields: Any) -> StreamTrace:
    return parse_stream(raw(*reads, **fields)).trace


def test_every_metric_of_a_plain_stream_is_exact() -> None:
    trace = trace_of(
        (10.75, completion(" a", n=1)),
        (11.0, completion(" b", n=2)),
        (11.5, completion(" c", n=3, finish="length") + usage_event(3, cached=2) + sse("[DONE]")),
    )
    assert trace.ok and trace.finish_reason == "length"
    assert (trace.n, trace.token_source, trace.prompt_tokens, trace.cached_tokens) == (3, "usage", 4, 2)
    assert (trace.send_lag, trace.ttft, trace.ttft_schedule, trace.ttft_visible) == (0.25, 0.5, 0.75, 0.5)
    assert (trace.tpot, trace.itl, trace.chunk_gaps, trace.e2e) == (0.375, [0.25, 0.5], [0.25, 0.5], 1.5)
    assert trace.text == " a b c"


def test_three_tokens_a_chunk_share_their_gap() -> None:
    reads = [(11.0 + 0.75 * i, completion(" a b c", n=3 * (i + 1))) for i in range(4)]
    trace = trace_of(*reads, (13.5, usage_event(12) + sse("[DONE]")))
    assert trace.n == 12 and trace.n_first_chunk == 3
    assert trace.itl == [0.25] * 9 and trace.tpot == 0.25 and trace.chunk_gaps == [0.75] * 3


def test_a_role_marker_is_never_the_first_token() -> None:
    for n_at_role in (0, 1, None):  # some servers already count the token that follows
        trace = trace_of(
            (10.5, chat({"role": "assistant", "content": ""}, n=n_at_role)),
            (11.25, chat({"content": " a"}, n=1)),
            (11.75, chat({"content": " b"}, n=2)),
            (11.75, chat({}, n=2, finish="stop") + sse("[DONE]")),
        )
        assert trace.ttft == 1.0
        assert trace.chunk_gaps == [0.5] and trace.itl == [0.5]
        assert trace.chunks[0].kind == "role" and not trace.chunks[0].carries_tokens


def test_empty_deltas_are_not_tokens_where_nobody_counts() -> None:
    trace = trace_of((10.5, completion("")), (11.25, completion(" a")), (11.5, completion("", finish="stop")))
    assert trace.ttft == 1.0 and trace.chunk_gaps == [] and trace.last == 11.25
    assert trace.n is None and trace.tpot is None and trace.itl is None and trace.token_source == "none"


def test_a_token_without_text_is_a_token_where_the_server_counts_it() -> None:
    trace = trace_of(
        (10.5, completion("", n=1)), (11.0, completion(" é", n=2, finish="length")), (11.0, usage_event(2))
    )
    assert trace.ttft == 0.25 and trace.itl == [0.5] and trace.n == 2


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_comes_first(name: str) -> None:
    trace = trace_of(
        (10.5, chat({name: "hmm"}, n=1)),
        (10.75, chat({name: " so"}, n=2)),
        (11.25, chat({"content": "yes"}, n=3, finish="stop")),
        (11.25, usage_event(3) + sse("[DONE]")),
    )
    assert (trace.ttft, trace.ttft_visible) == (0.25, 1.0)
    assert [chunk.kind for chunk in trace.chunks] == ["reasoning", "reasoning", "text"]
    assert trace.text == "yes" and trace.itl == [0.25, 0.5]


def test_a_tool_call_holds_tokens_but_is_not_visible_text() -> None:
    call = {"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": "{}"}}]}
    trace = trace_of((10.5, chat(call)), (11.0, chat({}, finish="tool_calls") + usage_event(9) + sse("[DONE]")))
    assert trace.ok and trace.chunks[0].kind == "tool" and trace.chunks[0].text == "look{}"
    assert trace.ttft == 0.25 and trace.ttft_visible is None and trace.n == 9 and trace.itl is None


def test_without_continuous_usage_only_chunk_gaps_are_known() -> None:
    trace = trace_of(
        (10.5, completion(" a b c")),
        (11.0, completion(" d e f", finish="length")),
        (11.0, usage_event(6) + sse("[DONE]")),
    )
    assert trace.n == 6 and trace.itl is None and trace.chunk_gaps == [0.5]
    assert trace.tpot == 0.5 / 5


def test_token_ids_are_counted_before_usage() -> None:
    trace = trace_of(
        (10.5, completion(" a", token_ids=[7, 8])),
        (11.0, completion(" b", token_ids=[9], finish="length")),
        (11.0, usage_event(3)),
    )
    assert trace.output_ids == [7, 8, 9] and trace.token_source == "ids" and trace.itl == [0.5] and trace.tpot == 0.5


def test_counts_that_contradict_the_usage_are_dropped_and_reported() -> None:
    reads = (10.5, completion(" a", n=1)), (11.0, completion(" b", n=2, finish="length")), (11.0, usage_event(20))
    parsed = parse_stream(raw(*reads))
    assert parsed.counts_disagree
    assert parsed.trace.n == 20 and parsed.trace.itl is None and parsed.trace.chunk_gaps == [0.5]
    assert not parse_stream(raw(*reads[:2], (11.0, usage_event(2)))).counts_disagree


def test_failures_are_errors_and_keep_what_arrived() -> None:
    first = (10.5, completion(" a", n=1))
    broken = trace_of(first, error="The connection broke")
    assert not broken.ok and broken.error == "The connection broke" and len(broken.chunks) == 1 and broken.n == 1
    assert "without a finish reason" in str(trace_of(first).error)
    assert "HTTP 400: too long" in str(trace_of((10.5, b"too long"), status=400).error)
    assert "reported an error" in str(trace_of(first, (11.0, sse({"error": {"message": "boom"}}))).error)
    assert "not JSON" in str(trace_of(first, (11.0, b"data: {oops\n\n")).error)
    document = json.dumps({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": 5}})
    whole = trace_of((11.0, document.encode()), content_type="application/json")
    assert not whole.ok and whole.ttft is None and whole.n == 5 and "instead of a stream" in str(whole.error)


def test_comments_line_ends_and_a_missing_last_blank_line() -> None:
    stream = b": ping\r\n\r\nevent: x\r\ndata:" + completion(" a", n=1)[5:-2] + b"\r\n\r\n" + sse("[DONE]")[:-2]
    trace = trace_of((10.5, stream))
    assert trace.ok and trace.text == " a" and trace.n == 1
    half = trace_of((10.5, completion(" a", n=1)), (11.0, completion(" b", n=2)[:30]), error="broke")
    assert half.text == " a"


STREAM = (
    b": ping\n\n"
    + chat({"role": "assistant", "content": ""}, n=0)
    + chat({"reasoning": "é 你"}, n=2).replace(b"\n\n", b"\r\n\r\n")
    + chat({"content": " 世界 🙂"}, n=5)
    + chat({"content": "\n\ndata: no"}, n=6, finish="stop").replace(b"\n\n", b"\r\n\r\n")
    + usage_event(6)
    + sse("[DONE]")
)
CHUNK_ENDS = [match.end() for match in re.finditer(rb"data: .*?(\n\n|\r\n\r\n)", STREAM)][:4]
"""Where the bytes of each chunk end, blank line included."""
WHOLE = parse_stream(raw((11.0, STREAM))).trace


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_any_split_into_reads_gives_the_same_chunks(cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[a:b] for a, b in pairwise(edges)]
    assert parse_stream(raw(*((11.0, part) for part in parts))).trace == WHOLE
    assert WHOLE.n == 6 and WHOLE.token_times_known and WHOLE.text == " 世界 🙂\n\ndata: no"
    # Each chunk has the time of the read that completed it.
    timed = parse_stream(raw(*((float(i), part) for i, part in enumerate(parts)), sent=0.0)).trace
    for chunk, end in zip(timed.chunks, CHUNK_ENDS, strict=True):
        assert edges[int(chunk.time)] < end <= edges[int(chunk.time) + 1]


def test_counters_of_a_prometheus_page() -> None:
    page = """# HELP x_total help
# TYPE vllm:hits_total counter
vllm:hits_total{engine="0",model_name="m"} 3.0
vllm:hits_total{engine="1",model_name="m"} 4.0
# TYPE vllm:by_source_total counter
vllm:by_source_total{engine="0",source="local"} 1e2
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="1.0"} 5
vllm:ttft_seconds_count 5
vllm:ttft_seconds_sum 2.5
# TYPE running gauge
running 7
"""
    assert parse_counters(page) == {
        "vllm:hits": 7.0,
        "vllm:by_source{source=local}": 100.0,
        "vllm:ttft_seconds_count": 5.0,
        "vllm:ttft_seconds_sum": 2.5,
    }


# -- against the scripted server -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def workload(n: int, *, max_tokens: int = 512, **fields: Any) -> Workload:
    requests = tuple(
        Request(request_id=f"r{i}", prompt_ids=(1, 2, 3, i), max_tokens=max_tokens, arrival=fields.pop(f"at{i}", 0.0))
        for i in range(n)
    )
    return Workload(name="test", requests=requests, **{"concurrency": n, **fields})


def messages(n: int) -> dict[str, list[dict[str, str]]]:
    return {f"r{i}": [{"role": "user", "content": f"question {i}"}] for i in range(n)}


@pytest.mark.engine
def test_role_first_and_three_tokens_a_chunk_on_a_known_schedule(server: FakeServer) -> None:
    server.load(StreamScript(role_at=0.01, ttft=0.06, gap=0.03, n_tokens=30, tokens_per_chunk=3, cached_tokens=2))
    with OpenAIEngine(server.url, "fake", api="chat", messages=messages(2)) as engine:
        record = engine.run(workload(2))
    assert not record.failed and record.warmup_requests == 1
    for trace in record.traces:
        truth = server.truth(trace.request_id)
        assert trace.chunks[0].kind == "role" and trace.first == trace.chunks[1].time
        assert (trace.n, trace.n_first_chunk, trace.cached_tokens, trace.token_source) == (30, 3, 2, "usage")
        assert trace.tpot is not None and trace.itl is not None and len(trace.itl) == 27
        assert trace.tpot * 27 == pytest.approx(sum(trace.chunk_gaps))
        assert median(trace.itl) == pytest.approx(median(trace.chunk_gaps) / 3)
        assert trace.tpot == pytest.approx(truth.span / 27, abs=1e-3)
        assert [write.n_tokens for write in truth.writes] == [0] + [3] * 10
    assert record.counters["fake:requests"] == 2 and record.counters["fake:tokens{source=script}"] == 60
    assert record.counters[MISMATCH_COUNTER] == 0


@pytest.mark.engine
def test_reasoning_first_separates_the_two_ttfts(server: FakeServer) -> None:
    server.load(StreamScript(ttft=0.02, gap=0.05, n_tokens=4, reasoning_tokens=2))
    with OpenAIEngine(server.url, "fake", api="chat", messages=messages(1)) as engine:
        (trace,) = engine.run(workload(1), warmup=0).traces
    assert trace.ttft is not None and trace.ttft_visible is not None
    truth = server.truth("r0")
    assert trace.ttft_visible - trace.ttft == pytest.approx(truth.writes[2].actual - truth.writes[0].actual, abs=5e-3)
    assert trace.text == " tok tok"


def test_a_request_that_dies_half_way_fails_alone(server: FakeServer) -> None:
    normal = StreamScript(ttft=0.02, gap=0.01, n_tokens=6)
    scripts = {
        "r1": normal.model_copy(update={"die_after_chunks": 3}),
        "r2": normal.model_copy(update={"http_status": 503}),
        "r3": normal.model_copy(update={"done": False, "usage": "none"}),
        "r4": normal.model_copy(update={"stream": False}),
        "r5": normal.model_copy(update={"die_after_chunks": 0}),
    }
    server.load(Script(default=normal, by_request=scripts))
    with OpenAIEngine(server.url, "fake") as engine:
        record = engine.run(workload(8))
    assert [trace.request_id for trace in record.failed] == ["r1", "r2", "r3", "r4", "r5"]
    errors = {trace.request_id: str(trace.error) for trace in record.failed}
    assert "connection broke" in errors["r1"] and "503" in errors["r2"] and "scripted failure" in errors["r2"]
    assert "without a finish reason" in errors["r3"] and "instead of a stream" in errors["r4"]
    died = record.traces[1]
    assert died.n == 3 and len(died.token_chunks) == 3 and died.last is not None
    assert all(trace.n == 6 and trace.ok for trace in record.completed) and len(record.completed) == 3


def test_usage_modes_and_a_server_whose_counts_disagree(server: FakeServer) -> None:
    base = StreamScript(ttft=0.01, gap=0.005, n_tokens=8, tokens_per_chunk=(1, 2), chunks_per_write=2)
    scripts = {
        "r1": base.model_copy(update={"usage": "final"}),
        "r2": base.model_copy(update={"usage": "none"}),
        "r3": base.model_copy(update={"usage_tokens": 80}),
    }
    server.load(Script(default=base, by_request=scripts))
    with OpenAIEngine(server.url, "fake") as engine:
        record = engine.run(workload(4))
    known, final, none, wrong = record.traces
    assert not record.failed
    assert known.token_times_known and [c.n_tokens for c in known.chunks] == [1, 2, 2, 2, 1]
    assert final.n == 8 and not final.token_times_known and len(final.chunk_gaps) == 4
    assert none.n is None and none.token_source == "none" and none.tpot is None
    assert wrong.n == 80 and wrong.itl is None and record.counters[MISMATCH_COUNTER] == 1
    assert record.counters[PROMPT_MISMATCH_COUNTER] == 0


@pytest.mark.engine
def test_closed_and_open_loops_keep_their_schedules(server: FakeServer) -> None:
    server.load(StreamScript(ttft=0.05, gap=0.01, n_tokens=3))
    with OpenAIEngine(server.url, "fake") as engine:
        closed = engine.run(workload(4, concurrency=2))
        opened = engine.run(workload(3, kind="open", at0=0.0, at1=0.1, at2=0.12))
    first, second, third, fourth = closed.traces
    assert first.last is not None and second.last is not None
    assert {third.scheduled, fourth.scheduled} > set() and third.scheduled >= min(first.last, second.last)
    assert closed.makespan is not None and closed.makespan > 2 * 0.06
    assert [t.scheduled - opened.started for t in opened.traces] == pytest.approx([0.0, 0.1, 0.12])
    assert all(trace.send_lag >= 0 for trace in opened.traces)


@pytest.mark.engine
def test_two_hundred_streams_match_the_servers_own_log(server: FakeServer) -> None:
    # Two seconds of arrivals and 2.4 s of each stream: at the end of the arrivals all 200 are open. The warm-up opens the
    # connections, so that none of what is compared is the cost of a handshake.
    server.load(StreamScript(ttft=0.2, gap=0.2, n_tokens=12))
    times: dict[str, Any] = {f"at{i}": i * 0.01 for i in range(200)}
    with OpenAIEngine(server.url, "fake") as engine:
        record = engine.run(workload(200, kind="open", **times), warmup=200)
    assert not record.failed and len(record.traces) == 200
    truths = server.truths()
    spread: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": [], "gap": [], "way": []}
    for trace in record.traces:
        truth = truths[trace.request_id]
        assert trace.ttft is not None and trace.tpot is not None and trace.itl is not None and trace.e2e is not None
        assert trace.n == 12 == len(trace.itl) + 1
        # The server's log says when it wrote; when the request left and was due, only the client can say.
        spread["ttft"].append(trace.ttft - (truth.writes[0].actual - trace.sent))
        spread["tpot"].append(trace.tpot - truth.span / 11)
        spread["e2e"].append(trace.e2e - (truth.writes[-1].actual - trace.scheduled))
        spread["way"].append(truth.received - trace.sent)
        gaps = [b.actual - a.actual for a, b in zip(truth.writes, truth.writes[1:], strict=False)]
        spread["gap"].append(median(trace.itl) - median(gaps))
    off = {name: median(values) for name, values in spread.items()}
    # On the way lie the server's own parsing and queue, which TTFT must contain; it is there, and it is short.
    assert min(spread["way"]) > 0 and off.pop("way") <= 5e-3
    assert all(abs(value) <= 1e-3 for value in off.values()), (off, record.client)
    health = record.client
    assert health.loop_lag_max >= health.loop_lag_p50 > 0 and health.send_lag_max >= health.send_lag_p50 > 0
    assert health.streamed_tokens == 2400 and health.cpu_seconds > 0


def test_runs_inside_a_live_event_loop_and_without_a_real_stdout(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.load(StreamScript(ttft=0.01, gap=0.005, n_tokens=3))

    class NotebookOut(io.StringIO):
        def fileno(self) -> int:
            raise io.UnsupportedOperation("fileno")

    monkeypatch.setattr(sys, "stdout", NotebookOut())
    monkeypatch.setattr(sys, "stderr", NotebookOut())

    async def cell() -> int:
        with FakeServer(StreamScript(ttft=0.01, n_tokens=3)) as own, OpenAIEngine(own.url, "fake") as engine:
            return len(engine.run(workload(2)).completed)

    assert asyncio.run(cell()) == 2


@pytest.mark.engine
def test_the_clients_ceiling_is_measured() -> None:
    ceiling = self_test(n_streams=4, n_tokens=20)
    assert ceiling.tokens == 80 and ceiling.cpu_seconds > 0
    assert ceiling.ceiling_tokens_per_second > 0 and ceiling.tokens_per_second > 0


# -- refusals --------------------------------------------------------------------------------------------------------
def test_an_unreachable_server_is_an_error_with_a_remedy() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(EngineError, match="cannot be reached") as caught, OpenAIEngine(f"http://127.0.0.1:{port}", "m"):
        pass
    assert "Start the server" in caught.value.remedy


def test_an_unknown_model_a_long_prompt_and_missing_messages_are_refused(server: FakeServer) -> None:
    server.load(Script(max_model_len=100))
    with pytest.raises(EngineError, match="no model named 'fak'") as caught, OpenAIEngine(server.url, "fak"):
        pass
    assert "Did you mean 'fake'" in caught.value.remedy
    with OpenAIEngine(server.url + "/v1/", "fake") as engine:
        assert engine.info.max_model_len == 100
        with pytest.raises(EngineError, match="needs 516 positions"):
            engine.run(workload(1, max_tokens=512))
    with pytest.raises(EngineError, match="without messages"):
        OpenAIEngine(server.url, "fake", api="chat")
    engine = OpenAIEngine(server.url, "fake", api="chat", messages=messages(1))
    with engine, pytest.raises(EngineError, match="no chat messages for request 'r1'"):
        engine.run(workload(2))


@pytest.mark.engine
def test_a_request_that_takes_too_long_is_a_failed_trace(server: FakeServer) -> None:
    server.load(StreamScript(ttft=0.02, gap=5.0, n_tokens=2))
    with OpenAIEngine(server.url, "fake", timeout_s=0.3) as engine:
        (trace,) = engine.run(workload(1), warmup=0).traces
    assert "within 0.3 s" in str(trace.error) and len(trace.chunks) == 1


def test_an_error_inside_the_private_loop_reaches_the_caller() -> None:
    async def fail() -> None:
        raise EngineError("boom")

    with pytest.raises(EngineError, match="boom"):
        run_in_own_loop(fail)


def test_chunks_never_go_backwards() -> None:
    with pytest.raises(ValueError, match="backwards"):
        StreamTrace(request_id="x", scheduled=0, sent=0, chunks=[Chunk(time=2.0, text="a"), Chunk(time=1.0, text="b")])
