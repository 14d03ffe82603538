"""Hugging Face Transformers' own ``generate`` in a child process: the plain baseline that every serving engine is held against.

It batches statically: up to `concurrency` waiting requests are padded to one length and run until the longest is done. A
request's tokens carry the time at which the step that made them ended, and a short request in a long batch waits with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

from helpers.engines.base import EngineInfo, MemoryReport, RunRecord, client_health, warmup_workload
from helpers.engines.child import ChildEngine
from helpers.errors import EngineError
from helpers.hardware import PATIENT_THREADS, memory_limit_bytes, package_version, usable_cores
from helpers.kv_adapter import CacheKind, cache_bytes, new_cache
from helpers.memory import measure_peak, release_free_memory, resident_bytes
from helpers.models import kv_bytes, load_model, locate, weight_bytes
from helpers.trace import Chunk, StreamTrace
from helpers.workload import Request, Workload

_DRAFTING = {"assistant_model", "prompt_lookup_num_tokens"}
"""Arguments of ``generate`` that switch speculation on."""


class TransformersEngine(ChildEngine):
    """``with TransformersEngine("smollm2-135m-instruct") as engine: record = engine.run(workload)``.

    Parameters
    ----------
    model : catalogue name or local folder.
    dtype, device, attention : as in `helpers.models.load_model`.
    cache : kind of KV cache, see `helpers.kv_adapter`; ``none`` recomputes every token's keys and values at every step.
    max_num_seqs : the largest static batch, in sequences, whatever the workload's concurrency; None sets no limit.
    """

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int = 1024,
        dtype: str = "float32",
        device: str = "cpu",
        attention: str = "sdpa",
        cache: CacheKind | Literal["none"] = "dynamic",
        max_num_seqs: int | None = None,
        threads: int | None = None,
        start_timeout_s: float = 180.0,
    ) -> None:
        settings = {
            "model": locate(model),
            "name": model,
            "max_model_len": max_model_len,
            "dtype": dtype,
            "device": device,
            "attention": attention,
            "cache": cache,
            "max_num_seqs": max_num_seqs,
        }
        env = {
            "OMP_NUM_THREADS": str(threads or usable_cores()),
            **PATIENT_THREADS,
            "TOKENIZERS_PARALLELISM": "false",
        }
        super().__init__(
            "helpers.engines.transformers_engine:TransformersBackend",
            settings,
            env=env,
            start_timeout_s=start_timeout_s,
        )

    def use_cache(self, kind: CacheKind | Literal["none"]) -> None:
        """Take another kind of KV cache from now on, as if the engine had been started with ``cache=kind``."""
        self.info = EngineInfo.model_validate(self.call("use_cache", kind=kind))


def run_loaded(
    model: Any,
    workload: Workload,
    *,
    name: str,
    max_model_len: int,
    max_num_seqs: int | None = None,
    warmup: int = 1,
    options: dict[str, Any] | None = None,
) -> RunRecord:
    """Run `workload` on a model that this process has loaded already: the same batches and clocks, no second copy of it.

    The memory reported is this process's, and its baseline all that the process held beside the weights before the run. The
    threads are this process's too.

    Parameters
    ----------
    model : a Transformers causal language model, as `helpers.models.load_model` returns it.
    name : its catalogue name, for the record.
    max_model_len, max_num_seqs, warmup : as in `TransformersEngine` and its ``run``.
    options : further keyword arguments of ``generate`` (assistant_model, prompt_lookup_num_tokens ...).

    Raises
    ------
    EngineError : a request or a batch does not fit, or the options draft and the workload runs more than one request at once.
    """
    workload.check_fits(max_model_len)
    if _DRAFTING & set(options or {}) and min(workload.concurrency, max_num_seqs or workload.concurrency) > 1:
        raise EngineError(
            f"Transformers drafts for one sequence at a time, and {workload.name!r} runs {workload.concurrency} at once.",
            "Set the workload's concurrency to 1.",
        )
    backend = TransformersBackend(
        model=name,
        name=name,
        max_model_len=max_model_len,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        attention=model.config._attn_implementation,
        cache="dynamic",
        max_num_seqs=max_num_seqs,
        loaded=model,
        options=options,
    )
    return backend.run(workload, warmup)


class TransformersBackend:
    """Runs in the child, or over a `loaded` model in this process; see `TransformersEngine` and `run_loaded`."""

    def __init__(
        self,
        *,
        model: str,
        name: str,
        max_model_len: int,
        dtype: str,
        device: str,
        attention: str,
        cache: CacheKind | Literal["none"],
        max_num_seqs: int | None = None,
        loaded: Any = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        import torch  # counted as the interpreter's and the libraries' share of memory

        self._torch = torch
        release_free_memory()
        self._baseline = resident_bytes()
        self._options = options or {}
        self._assistant = self._options.get("assistant_model")
        if loaded is not None:
            self._model = loaded
        else:
            self._model = load_model(model, dtype=dtype, device=device, attention=attention)  # type: ignore[arg-type]
        self._weights = sum(weight_bytes(m) for m in (self._model, self._assistant) if m is not None)
        if loaded is not None and device == "cpu":
            self._baseline -= self._weights
        self._cache_kind = cache
        self._max_num_seqs = max_num_seqs
        self._device = device
        self.info = EngineInfo(
            engine="transformers",
            version=package_version("transformers") or "unknown",
            model=name,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            settings={
                "attention": attention,
                "cache": cache,
                "max_num_seqs": max_num_seqs,
                "threads": torch.get_num_threads(),
                **{key: _words(value) for key, value in self._options.items()},
            },
        )

    def run(self, workload: Workload, warmup: int) -> RunRecord:
        """Warm up with other prompts, then run the workload in static batches.

        The record counts forward passes of the model and the token positions computed in them; with an assistant its passes too.
        """
        extra = warmup_workload(workload, warmup)
        if extra is not None:
            self._drive(extra)
        cpu = time.process_time()
        with measure_peak() as peak, _counted(self._model) as own, _counted(self._assistant) as drafting:
            traces, started, kv_peak = self._drive(workload)
        counters = {"passes": float(len(own)), "positions": float(sum(own))}
        if self._assistant is not None:
            counters["draft_passes"] = float(len(drafting))
        return RunRecord(
            engine=self.info,
            workload=workload,
            traces=traces,
            started=started,
            client=client_health(traces, [], 0.0).model_copy(update={"cpu_seconds": time.process_time() - cpu}),
            memory=MemoryReport(
                weights=self._weights,
                kv_reserved=kv_peak,
                kv_used_peak=kv_peak,
                peak=peak.peak,
                baseline=self._baseline,
            ),
            counters=counters,
            warmup_requests=warmup,
        )

    def use_cache(self, kind: CacheKind | Literal["none"]) -> dict[str, Any]:
        """Change the kind of KV cache; returns the engine's new description."""
        self._cache_kind = kind
        self.info = self.info.model_copy(update={"settings": {**self.info.settings, "cache": kind}})
        return self.info.model_dump(mode="json")

    def _drive(self, workload: Workload) -> tuple[list[StreamTrace], float, int]:
        waiting = list(workload.requests)
        if workload.kind == "open":
            waiting.sort(key=lambda request: request.arrival)
        traces: dict[str, StreamTrace] = {}
        ends: list[float] = []
        kv_peak = 0
        largest = min(workload.concurrency, self._max_num_seqs or workload.concurrency)
        started = time.monotonic()
        while waiting:
            if workload.kind == "open":
                time.sleep(max(0.0, started + waiting[0].arrival - time.monotonic()))
                elapsed = time.monotonic() - started
                batch = [request for request in waiting if request.arrival <= elapsed][:largest]
                due = [started + request.arrival for request in batch]
            else:
                batch = waiting[:largest]
                # A closed loop sends its first requests at once and every other one when an earlier one ends.
                order = range(len(ends), len(ends) + len(batch))
                due = [started if k < workload.concurrency else ends[k - workload.concurrency] for k in order]
            waiting = waiting[len(batch) :]
            done, held = self._generate(batch, due)
            kv_peak = max(kv_peak, held)
            ends += [time.monotonic()] * len(batch)
            if workload.kind == "closed":
                for trace in done:
                    trace.sent = trace.scheduled  # what it then waits for is a place in a batch: the engine's share
            traces.update({trace.request_id: trace for trace in done})
        return [traces[request.request_id] for request in workload.requests], started, kv_peak

    def _refuse_if_too_large(self, batch: list[Request]) -> None:
        """Refuse a batch whose cache alone exceeds this machine's memory, instead of being killed half way."""
        longest = max(len(r.prompt_ids) + r.max_tokens for r in batch)
        needed = kv_bytes(self._model.config, longest, len(batch), self.info.dtype)
        free = memory_limit_bytes() - resident_bytes()
        if self._device == "cuda":
            free = int(self._torch.cuda.mem_get_info()[0])
        if needed > free:
            raise EngineError(
                f"A batch of {len(batch)} sequences of up to {longest} tokens needs {needed / 2**30:.2f} GiB of KV cache, "
                f"and {free / 2**30:.2f} GiB are free.",
                "Use a smaller batch, shorter sequences, or an engine that pages its cache.",
            )

    def _generate(self, batch: list[Request], due: list[float]) -> tuple[list[StreamTrace], int]:
        """One static batch. Returns the traces and the bytes that its cache held at the end."""
        torch = self._torch
        self._refuse_if_too_large(batch)
        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        longest = max(request.max_tokens for request in batch)
        steps: list[tuple[float, int]] = []

        def note_step(ids: Any, _scores: Any, **_: Any) -> Any:
            steps.append((time.monotonic(), int(ids.shape[1]) - width))
            return torch.zeros(len(batch), dtype=torch.bool, device=self._device)

        cache = (
            None
            if self._cache_kind == "none"
            else new_cache(self._cache_kind, self._model.config, max_cache_len=width + longest)
        )
        temperature = batch[0].temperature
        if temperature > 0 and batch[0].seed is not None:
            torch.manual_seed(batch[0].seed)
        sent = time.monotonic()
        with torch.inference_mode(), _no_warnings() if self._options else nullcontext():
            output = self._model.generate(  # type: ignore[operator]
                ids.to(self._device),
                attention_mask=mask.to(self._device),
                past_key_values=cache,
                use_cache=cache is not None,
                max_new_tokens=longest,
                # An id that no token has; a negative one would do, but is warned of in every call.
                **({"eos_token_id": self._model.config.vocab_size} if batch[0].ignore_eos else {}),
                do_sample=temperature > 0,
                temperature=temperature if temperature > 0 else None,
                stopping_criteria=[note_step],
                pad_token_id=0,
                **self._options,
            )
        traces = []
        for row, request in enumerate(batch):
            tokens = output[row, width : width + request.max_tokens].tolist()
            if not request.ignore_eos:
                tokens = _until_eos(tokens, self._model.generation_config)
            traces.append(
                StreamTrace(
                    request_id=request.request_id,
                    scheduled=due[row],
                    sent=max(sent, due[row]),
                    chunks=_chunks(steps, len(tokens)),
                    prompt_tokens=len(request.prompt_ids),
                    completion_tokens=len(tokens),
                    token_source="ids",
                    cached_tokens=0,
                    output_ids=tokens,
                    finish_reason="length" if len(tokens) == request.max_tokens else "stop",
                )
            )
        return traces, cache_bytes(cache) if cache is not None else 0

    def close(self) -> None:
        """Nothing outlives the process."""


def _chunks(steps: list[tuple[float, int]], n_tokens: int) -> list[Chunk]:
    """One chunk for each step that brought tokens. `steps` holds its end and the tokens so far; the answer has `n_tokens`."""
    chunks: list[Chunk] = []
    had = 0
    for ended, so_far in steps:
        if new := min(so_far, n_tokens) - had:
            chunks.append(Chunk(time=ended, n_tokens=new))
            had += new
    return chunks


@contextmanager
def _counted(model: Any) -> Iterator[list[int]]:
    """The token positions, padding included, of each forward pass of `model` in the block; empty where there is no model."""
    passes: list[int] = []

    def note(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], _output: Any) -> None:
        ids: Any = keywords["input_ids"] if "input_ids" in keywords else arguments[0]
        passes.append(int(ids.numel()))

    handle = model.register_forward_hook(note, with_kwargs=True) if model is not None else None
    try:
        yield passes
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Transformers' drafting calls ``generate`` and ``crop`` in ways that Transformers itself warns of."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _words(value: Any) -> str | int | float | bool | None:
    """An argument of ``generate`` for the record: a model by its class and size."""
    if isinstance(value, str | int | float | None):
        return value
    size = getattr(value, "num_parameters", None)
    return f"{type(value).__name__}, {size():,} parameters" if size else type(value).__name__


def _until_eos(tokens: list[int], generation_config: Any) -> list[int]:
    """The tokens up to and including the first end-of-sequence id."""
    eos = generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens
