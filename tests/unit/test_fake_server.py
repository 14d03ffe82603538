"""The scripted server: what it plans, that it follows the plan without drifting, and that its log is complete."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.engines.fake_server import FakeServer, Script, StreamScript, plan
from helpers.errors import EngineError


@given(
    n=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    per_write=st.integers(1, 4),
    reasoning=st.integers(0, 10),
    tools=st.integers(0, 10),
)
def test_a_plan_holds_every_token_once(n: int, sizes: list[int], per_write: int, reasoning: int, tools: int) -> None:
    script = StreamScript(
        n_tokens=n,
        tokens_per_chunk=tuple(sizes),
        chunks_per_write=per_write,
        reasoning_tokens=reasoning,
        tool_tokens=tools,
    )
    writes = plan(script, max_tokens=30)
    events = [event for _, group in writes for event in group]
    assert sum(size for _, size in events) == min(n, 30)
    assert sum(size for kind, size in events if kind == "reasoning") == min(reasoning, n, 30)
    assert all(1 <= len(group) <= per_write for _, group in writes)
    assert [offset for offset, _ in writes] == pytest.approx([0.02 + 0.01 * i for i in range(len(writes))])


def test_a_plan_with_a_role_marker_and_a_death() -> None:
    script = StreamScript(ttft=0.5, gap=0.25, n_tokens=8, tokens_per_chunk=(1, 3), role_at=0.125, die_after_chunks=3)
    assert plan(script, 100) == [
        (0.125, [("role", 0)]),
        (0.5, [("text", 1)]),
        (0.75, [("text", 3)]),
        (1.0, [("text", 3)]),
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def ask(server: FakeServer, request_id: str, **body: Any) -> bytes:
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        data=json.dumps({"model": "fake", "prompt": [1, 2], "stream": True, **body}).encode(),
        headers={"X-Request-Id": request_id, "Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        return bytes(answer.read())


@pytest.mark.engine
def test_late_writes_do_not_move_the_later_ones(server: FakeServer) -> None:
    server.load(StreamScript(ttft=0.02, gap=0.005, n_tokens=60))
    ask(server, "drift")
    truth = server.truth("drift")
    assert [write.n_tokens for write in truth.writes] == [1] * 60
    assert all(write.actual >= write.planned for write in truth.writes)
    assert truth.writes[-1].planned - truth.received == pytest.approx(0.02 + 59 * 0.005)
    # A sleep after each write would be late by sixty times what one is late; a deadline is late once.
    late = sorted(write.actual - write.planned for write in truth.writes)
    assert late[30] < 0.02


def test_usage_is_sent_only_as_asked_for(server: FakeServer) -> None:
    server.load(StreamScript(ttft=0.0, gap=0.0, n_tokens=2, cached_tokens=1))
    plain = ask(server, "a")
    final = ask(server, "b", stream_options={"include_usage": True})
    each = ask(server, "c", stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (plain.count(b'"usage"'), final.count(b'"usage"'), each.count(b'"usage"')) == (0, 1, 3)
    assert each.endswith(b"data: [DONE]\n\n") and b'"cached_tokens": 1' in final
    assert ask(server, "d", max_tokens=1).count(b" tok") == 1


def test_requests_that_never_came_and_unknown_script_fields_are_errors(server: FakeServer) -> None:
    server.load(Script())
    with pytest.raises(EngineError, match="No request 'nobody'"):
        server.truth("nobody")
    with pytest.raises(ValueError, match="n_token"):
        StreamScript.model_validate({"n_token": 3})


def test_a_port_in_use_is_refused_at_once_and_the_process_ends_with_the_block() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(EngineError, match=f"Port {port}") as caught, FakeServer(port=port):
            pass
        assert "another port" in caught.value.remedy
    with FakeServer() as own:
        pid, log = own.process.pid, own.process.log_path
        assert log is not None and log.exists()
    with pytest.raises(EngineError, match="not running"):
        own.url  # noqa: B018
    import psutil

    assert not psutil.pid_exists(pid) and not log.exists()
