"""Engines in child processes: real ones that agree with each other, and every way in which a child can go wrong."""

from __future__ import annotations

import asyncio
import copy
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
from helpers.engines.transformers_engine import TransformersEngine, run_loaded
from helpers.engines.vllm_engine import VllmEngine
from helpers.errors import EngineError, ModelError
from helpers.models import BUNDLED
from helpers.paths import ROOT
from helpers.trace import Chunk, StreamTrace
from helpers.workload import Request, Workload, make_workload, single


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


# -- drafting in Transformers, on a tiny model --------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tiny():
    """A random Llama of two layers, and a workload of two prompts that repeat themselves, ten tokens each."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    model.generation_config.update(
        num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    requests = tuple(Request(request_id=f"r{i}", prompt_ids=(5 + i, 6, 7) * 3, max_tokens=10) for i in range(2))
    return model, Workload(name="tiny", requests=requests)


def drafting(tiny, **options):
    model, workload = tiny
    return run_loaded(model, workload, name="tiny", max_model_len=64, warmup=1, options=options)


def test_a_copy_of_the_model_as_assistant_leaves_a_fifth_of_the_passes_and_the_same_tokens(tiny):
    plain, assisted = drafting(tiny), drafting(tiny, assistant_model=copy.deepcopy(tiny[0]))
    assert [t.output_ids for t in assisted.traces] == [t.output_ids for t in plain.traces]
    assert plain.counters == {"passes": 20.0, "positions": 2 * (9 + 9)}
    assert [chunk.n_tokens for chunk in plain.traces[0].chunks] == [1] * 10
    for trace in assisted.traces:
        assert [chunk.n_tokens for chunk in trace.chunks] == [5, 5]
        assert trace.token_times_known and len(trace.itl) == 5 and len(trace.chunk_gaps) == 1
        assert trace.tpot == pytest.approx(trace.chunk_gaps[0] / 5) == pytest.approx(trace.itl[0])
    assert assisted.counters == {"passes": 4.0, "positions": 2 * (9 + 4 + 5), "draft_passes": 2 * (4 + 4)}
    assert str(assisted.engine.settings["assistant_model"]).startswith("LlamaForCausalLM")


def test_prompt_lookup_takes_fewer_passes_where_something_repeats(tiny):
    plain, looked_up = drafting(tiny), drafting(tiny, prompt_lookup_num_tokens=4)
    assert [t.output_ids for t in looked_up.traces] == [t.output_ids for t in plain.traces]
    assert looked_up.counters["passes"] <= plain.counters["passes"]
    assert looked_up.counters["positions"] > looked_up.counters["passes"] + 2 * 8
    assert all(sum(chunk.n_tokens for chunk in t.chunks) == 10 for t in looked_up.traces)


def test_transformers_refuses_to_draft_for_several_sequences_at_once(tiny):
    model, workload = tiny
    both = workload.model_copy(update={"concurrency": 2})
    with pytest.raises(EngineError, match="one sequence at a time"):
        run_loaded(model, both, name="tiny", max_model_len=64, options={"prompt_lookup_num_tokens": 4})
    run_loaded(model, both, name="tiny", max_model_len=64, max_num_seqs=1, options={"prompt_lookup_num_tokens": 4})


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
        with pytest.raises(EngineError, match="without speculation"):
            engine.call("use_speculation", enabled=False)
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


# -- speculation in vLLM ------------------------------------------------------------------------------------------------
DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos{{position={}}}"


@pytest.fixture(scope="module")
def speculation(bundled_model):
    """The bundled model drafting for itself, off and on; and a record of what it refuses."""
    requests = tuple(Request(request_id=f"r{i}", prompt_ids=(504 + i, 905, 3006) * 4, max_tokens=11) for i in range(3))
    workload = Workload(name="spoken", requests=requests)
    config = {"method": "draft_model", "model": BUNDLED, "num_speculative_tokens": 4}
    sizes = {"max_model_len": 128, "block_size": 32, "num_kv_blocks": 32, "max_num_seqs": 4}
    found = {}
    with VllmEngine(BUNDLED, dtype="float32", options={"speculative_config": config}, **sizes) as engine:
        found["on"] = engine.run(workload)
        for name, enabled, num_tokens in (
            ("off", False, None),
            ("two", True, 2),
            ("off again", False, None),
            ("back", True, None),
        ):
            engine.call("use_speculation", enabled=enabled, num_tokens=num_tokens)
            found[name] = engine.run(workload, warmup=0)
        for n in (0, 5):
            with pytest.raises(EngineError, match="out of reach"):
                engine.call("use_speculation", enabled=True, num_tokens=n)
        together = workload.model_copy(update={"concurrency": 3})
        found["together"] = engine.run(together, warmup=0)
    return found


@pytest.mark.engine
def test_speculation_that_is_switched_off_drafts_nothing_and_says_the_same(speculation):
    outputs = [trace.output_ids for trace in speculation["on"].traces]
    for name, record in speculation.items():
        assert [trace.output_ids for trace in record.traces] == outputs, name
        assert record.engine.settings["speculative_config"].startswith("off") == name.startswith("off"), name
        assert (record.counters[DRAFTS] == 0) == name.startswith("off"), name
    for name in ("off", "off again"):
        assert all([chunk.n_tokens for chunk in trace.chunks] == [1] * 11 for trace in speculation[name].traces)
        assert not any(v for k, v in speculation[name].counters.items() if "spec_decode" in k)
    assert f"model {BUNDLED}" in speculation["back"].engine.settings["speculative_config"]


@pytest.mark.engine
def test_a_self_draft_is_accepted_at_every_position_and_chunks_hold_what_a_round_emitted(speculation):
    # The prefill gives one token; then rounds of 5 (or 3) until 11 are there.
    for name, n, chunks in (
        ("on", 4, [1, 5, 5]),
        ("back", 4, [1, 5, 5]),
        ("together", 4, [1, 5, 5]),
        ("two", 2, [1, 3, 3, 3, 1]),
    ):
        record = speculation[name]
        rounds = 3 * (len(chunks) - 1)
        assert all([chunk.n_tokens for chunk in trace.chunks] == chunks for trace in record.traces), name
        assert record.counters[DRAFTS] == rounds
        assert record.counters["vllm:spec_decode_num_draft_tokens"] == n * rounds
        per_position = [record.counters[ACCEPTED_AT.format(i)] for i in range(4)]
        assert per_position == [rounds] * n + [0] * (4 - n)
        assert record.counters["vllm:spec_decode_num_accepted_tokens"] == sum(per_position)


@pytest.mark.engine
def test_latencies_of_several_tokens_a_step_are_shared_among_them(speculation):
    trace = speculation["on"].traces[0]
    first, second = trace.chunk_gaps
    assert trace.token_times_known and trace.n_first_chunk == 1
    assert trace.itl == pytest.approx([first / 5] * 5 + [second / 5] * 5)
    assert trace.tpot == pytest.approx((first + second) / 10)


@pytest.mark.engine
def test_the_drafts_weights_and_its_share_of_every_block_are_counted(speculation):
    memory = speculation["on"].memory
    assert memory.weights == pytest.approx(2 * 4 * 134_515_008, rel=1e-3)
    assert memory.kv_reserved == 32 * 32 * 2 * 46_080


def test_a_draft_with_other_tokens_is_refused_before_vllm_starts(bundled_model, tmp_path):
    from helpers.hardware import describe
    from helpers.models import load_tokenizer

    if not describe().capabilities["vllm"].available:
        pytest.skip("needs vLLM")
    tokenizer = load_tokenizer(BUNDLED)
    tokenizer.add_tokens(["a-token-of-its-own"])
    tokenizer.save_pretrained(tmp_path)
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4}
    with pytest.raises(ModelError, match=BUNDLED):
        VllmEngine(BUNDLED, options={"speculative_config": config})
