"""Engines in child processes: real ones that agree with each other, and every way in which a child can go wrong."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from helpers.engines.base import EngineInfo, RunRecord, warmup_workload
from helpers.engines.child import ChildEngine
from helpers.engines.transformers_engine import TransformersEngine
from helpers.engines.vllm_engine import VllmEngine
from helpers.errors import EngineError
from helpers.models import BUNDLED
from helpers.paths import ROOT
from helpers.trace import Chunk, StreamTrace
from helpers.workload import Workload, make_workload, single


class ScriptedBackend:
    """A backend that needs no model: it answers with one token for each request, or misbehaves as told."""

    def __init__(self, trouble: str = "") -> None:
        if trouble == "die while starting":
            print("the last words of this engine", flush=True)
            os._exit(3)
        if trouble == "never start":
            time.sleep(60)
        self._trouble = trouble
        self.info = EngineInfo(
            engine="transformers", version="0", model="scripted", dtype="float32", device="cpu", max_model_len=64
        )

    def run(self, workload: Workload, warmup: int) -> RunRecord:
        if self._trouble == "die while running":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._trouble == "raise":
            raise ValueError("a shape does not fit")
        now = time.monotonic()
        traces = [
            StreamTrace(request_id=r.request_id, scheduled=now, sent=now, chunks=[Chunk(time=now + 1, n_tokens=1)])
            for r in workload.requests
        ]
        return RunRecord(engine=self.info, workload=workload, traces=traces, started=now)

    def echo(self, value: int) -> int:
        return value + 1

    def close(self) -> None:
        pass


def scripted(trouble: str = "", **limits: float) -> ChildEngine:
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    return ChildEngine(
        "test_child_engines:ScriptedBackend",
        {"trouble": trouble},
        env={"PYTHONPATH": path},
        **limits,
    )


ONE = single([1, 2, 3], 4)


def test_a_child_answers_and_is_gone_after_the_block():
    with scripted() as engine:
        pid = engine.pid
        assert pid is not None and psutil.pid_exists(pid)
        assert engine.run(ONE).completed and engine.call("echo", value=1) == 2
    assert not psutil.pid_exists(pid)
    with pytest.raises(EngineError, match="is not running"):
        engine.run(ONE)


def test_a_child_that_dies_while_starting_shows_the_end_of_its_log():
    with pytest.raises(EngineError, match=r"(?s)died.*exit code 3.*the last words of this engine.*Known causes"):
        scripted("die while starting").__enter__()


def test_a_child_that_is_killed_while_running_is_noticed():
    with scripted("die while running") as engine, pytest.raises(EngineError, match=r"died during run \(signal 9\)"):
        engine.run(ONE)


def test_a_child_that_never_starts_runs_into_its_limit():
    started = time.monotonic()
    with pytest.raises(EngineError, match="did not finish start within 8 s"):
        scripted("never start", start_timeout_s=8).__enter__()
    assert time.monotonic() - started < 40


def test_an_error_inside_the_child_arrives_with_its_words_and_the_child_lives_on():
    with scripted("raise") as engine:
        with pytest.raises(EngineError, match="ValueError: a shape does not fit"):
            engine.run(ONE)
        assert engine.call("echo", value=4) == 5


def test_a_prompt_longer_than_the_context_is_refused_before_anything_runs():
    with (
        scripted() as engine,
        pytest.raises(EngineError, match=r"needs 104 positions \(100 prompt \+ 4 output\).*holds 64"),
    ):
        engine.run(single(list(range(100)), 4))


def test_it_works_inside_a_live_event_loop_and_without_a_real_stdout(monkeypatch):
    class NoFileno(io.StringIO):
        def fileno(self) -> int:
            raise io.UnsupportedOperation("fileno")

    monkeypatch.setattr(sys, "stdout", NoFileno())

    async def inside() -> int:
        with scripted() as engine:
            return len(engine.run(ONE).completed)

    assert asyncio.run(inside()) == 1


def test_no_child_outlives_a_parent_that_is_killed():
    import subprocess

    code = (
        "import sys, time; sys.path.insert(0, 'tests/unit')\n"
        "from test_child_engines import scripted\n"
        "engine = scripted().__enter__(); print(engine.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 15
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)


def test_warm_up_prompts_have_the_lengths_but_none_of_the_prefixes():
    workload = make_workload("short-short", n_requests=6, max_model_len=512, vocab_size=49152, rate=3.0)
    warm = warmup_workload(workload, 4)
    assert warm is not None and warm.kind == "closed" and len(warm.requests) == 4
    firsts = {request.prompt_ids[0] for request in workload.requests}
    for a, b in zip(warm.requests, workload.requests, strict=False):
        assert len(a.prompt_ids) == len(b.prompt_ids) and a.max_tokens == b.max_tokens
        assert a.prompt_ids[0] != b.prompt_ids[0] and a.prompt_ids[:8] not in {
            r.prompt_ids[:8] for r in workload.requests
        }
    assert firsts and warmup_workload(workload, 0) is None


# -- the real ones ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def records(bundled_model):
    """The same closed workload on Transformers and on vLLM, and a second one on vLLM whose prompts share a prefix."""
    workload = make_workload("short-short", n_requests=4, max_model_len=256, vocab_size=49152, concurrency=2)
    shared = make_workload(
        "long-short", n_requests=3, max_model_len=256, vocab_size=49152, concurrency=1, shared_prefix_tokens=96
    )
    with TransformersEngine(BUNDLED, max_model_len=256) as engine:
        ours = engine.run(workload)
        engine.use_cache("none")
        assert engine.info.settings["cache"] == "none"
        uncached = engine.run(workload, warmup=0)
    with VllmEngine(
        BUNDLED, max_model_len=256, dtype="float32", block_size=32, num_kv_blocks=64, enable_prefix_caching=True
    ) as engine:
        theirs, hits = engine.run(workload), engine.run(shared)
        cold_again = engine.run(workload, warmup=0)
        engine.call("block_peaks")
        engine.call("use_prefix_cache", enabled=False)
        engine.call("limit_batched_tokens", n=48)
        limited = {"record": engine.run(shared, warmup=0), "peaks": engine.call("block_peaks")}
        limited["profile"] = engine.call("profile", workload=workload.model_dump(mode="json"))
        with pytest.raises(EngineError, match="out of reach"):
            engine.call("limit_batched_tokens", n=10**6)
    return ours, theirs, hits, cold_again, uncached, limited


@pytest.mark.engine
def test_both_engines_give_every_token_a_time_and_the_same_greedy_tokens(records):
    ours, theirs, *_ = records
    for record in (ours, theirs):
        assert not record.failed
        for trace, request in zip(record.traces, record.workload.requests, strict=True):
            assert trace.n == request.max_tokens == len(trace.output_ids)
            assert trace.token_times_known and len(trace.itl) == trace.n - 1
            assert trace.prompt_tokens == len(request.prompt_ids)
            assert trace.scheduled <= trace.sent <= trace.first <= trace.last
    same = [a.output_ids == b.output_ids for a, b in zip(ours.traces, theirs.traces, strict=True)]
    assert all(same)


@pytest.mark.engine
def test_a_running_engine_takes_another_cache_and_says_so(records):
    ours, *_, uncached, _ = records
    assert [ours.engine.settings["cache"], uncached.engine.settings["cache"]] == ["dynamic", "none"]
    assert uncached.memory.kv_reserved == 0 < ours.memory.kv_reserved
    assert [trace.output_ids for trace in uncached.traces] == [trace.output_ids for trace in ours.traces]


@pytest.mark.engine
def test_memory_is_told_by_formula_and_by_the_system(records):
    ours, theirs, *_ = records
    for record in (ours, theirs):
        memory = record.memory
        assert memory.weights == pytest.approx(4 * 134_515_008, rel=1e-3)
        assert memory.peak > memory.baseline + memory.kv_used_peak
    assert theirs.memory.kv_reserved == 64 * 32 * 46_080
    assert 0 < theirs.memory.kv_used_peak <= theirs.memory.kv_reserved


@pytest.mark.engine
def test_a_cold_workload_finds_no_cache_even_when_sent_twice_and_a_shared_prefix_is_found(records):
    _, theirs, hits, cold_again, *_ = records
    assert theirs.cached_fraction == 0.0 and cold_again.cached_fraction == 0.0
    assert hits.traces[0].cached_tokens == 0
    assert all(trace.cached_tokens == 96 for trace in hits.traces[1:])
    assert hits.counters["vllm:prefix_cache_hits"] == 2 * 96


@pytest.mark.engine
def test_limits_that_change_while_the_engine_lives_hold_and_change_no_answer(records):
    _, _, hits, _, _, limited = records
    record, profile = limited["record"], limited["profile"]
    assert record.cached_fraction == 0.0
    assert [t.output_ids for t in record.traces] == [t.output_ids for t in hits.traces]
    assert limited["peaks"]["tokens"] == 48 < max(len(r.prompt_ids) for r in record.workload.requests)
    assert record.engine.settings["max_num_batched_tokens"] == 48
    assert profile["steps"] > 1 and profile["seconds"] > 0
    assert 0 < sum(profile["operators"].values()) < 1.5 * profile["seconds"]


@pytest.mark.engine
def test_a_context_that_the_kv_pool_cannot_hold_is_refused_with_vllms_reason(bundled_model):
    with pytest.raises(EngineError, match="KV cache is needed"):
        VllmEngine(BUNDLED, max_model_len=1024, dtype="float32", block_size=32, num_kv_blocks=4).__enter__()


@pytest.mark.engine
def test_a_batch_that_needs_more_cache_than_there_is_memory_is_refused_before_it_is_tried(bundled_model):
    workload = Workload(
        name="huge",
        requests=tuple(single([5] * 8, 8_000, name=f"r{i}").requests[0] for i in range(100)),
        concurrency=100,
    )
    with TransformersEngine(BUNDLED, max_model_len=8192) as engine, pytest.raises(EngineError, match="GiB of KV cache"):
        engine.run(workload, warmup=0)


def test_vllm_on_a_cpu_knows_its_block_sizes():
    from helpers.hardware import describe

    if describe().device != "cpu" or not describe().capabilities["vllm"].available:
        pytest.skip("needs vLLM on a CPU")
    with pytest.raises(EngineError, match="no KV block of 16 tokens"):
        VllmEngine(BUNDLED, block_size=16)
