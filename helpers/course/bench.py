"""Is our client a good stopwatch? The same prompts, to one server, measured by it and by ``vllm bench serve``.

``python -m helpers bench client`` starts one ``vllm serve`` without prefix caching and lets both clients send the same
token ids, at the same concurrency, in alternation (A B, B A, A B, ...), so that a drift of the machine hits both. It
prints the medians of TTFT, TPOT and E2E, the paired ratio with its interval, and what each client cost.

What a client costs is the processor time, user and system, of its process while requests are in flight. For
``vllm bench serve`` that is taken inside its own process, from the moment its first measured request function is called
until the last one returns, so that its imports, its start-up, its warm-up and the computing of its statistics do not
count. For our client it is the time of its thread over the same span, and the reading of what arrived besides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from helpers.engines.base import EngineInfo
from helpers.engines.openai_client import OpenAIEngine
from helpers.engines.processes import child_environment, log_tail
from helpers.engines.vllm_cli import answer_for_the_cpu_wheel
from helpers.engines.vllm_server import VllmServer
from helpers.errors import EngineError, MeasurementRefused, RecordError
from helpers.stats import PairedRatio, paired_ratio
from helpers.workload import Request, Workload, make_workload

Tool = Literal["ours", "vllm bench serve"]
OURS: Tool = "ours"
THEIRS: Tool = "vllm bench serve"
METRICS = ("ttft", "tpot", "e2e")
TOLERANCE = 0.05
MIN_REPEATS = 3
BENCH_TIMEOUT_S = 600


class ToolRun(BaseModel):
    """One client's view of one pass over the workload: medians in seconds, and its cost."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool: Tool
    repeat: int
    completed: int
    tokens: int
    ttft: float
    tpot: float
    e2e: float
    cpu_seconds: float

    @property
    def cpu_per_1000_tokens(self) -> float:
        return 1000 * self.cpu_seconds / self.tokens


class ClientBench(BaseModel):
    """Both clients' runs, pair by pair, and the ratios ours / theirs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineInfo
    workload: str
    workload_digest: str
    n_requests: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int
    runs: list[ToolRun]
    ratios: dict[str, PairedRatio]
    """Ours over theirs for ``ttft``, ``tpot``, ``e2e`` and ``cpu``."""

    def of(self, tool: Tool) -> list[ToolRun]:
        return [run for run in self.runs if run.tool == tool]

    def within(self, metric: str, tolerance: float = TOLERANCE) -> bool:
        """Whether the two clients' medians of `metric` differ by no more than `tolerance`, as a paired ratio."""
        return abs(self.ratios[metric].ratio - 1) <= tolerance

    def verdict(self, metric: str) -> str:
        """In words: within the tolerance or beyond it, or that the interval is too wide to tell (a noisy machine)."""
        ratio = self.ratios[metric]
        if ratio.low >= 1 - TOLERANCE and ratio.high <= 1 + TOLERANCE:
            return f"within {TOLERANCE:.0%}"
        if self.within(metric):
            return f"within {TOLERANCE:.0%}, the interval is wider"
        return "undecided: add repeats" if ratio.undecided else f"differs by more than {TOLERANCE:.0%}"

    @property
    def agrees(self) -> bool:
        """All medians within 5 %, and our client costs no more."""
        return all(self.within(metric) for metric in METRICS) and self.ratios["cpu"].ratio <= 1.0


def bench_workload(
    *, n_requests: int, prompt_tokens: int, max_tokens: int, concurrency: int, vocab_size: int, seed: int
) -> Workload:
    """Unique random prompts of one length; every request generates `max_tokens`, since the other tool asks for one length."""
    varied = make_workload(
        "short-short",
        n_requests=n_requests,
        max_model_len=10 * prompt_tokens,
        vocab_size=vocab_size,
        seed=seed,
        jitter=0,
    )
    requests = tuple(
        Request(request_id=f"bench-{seed}-{i}", prompt_ids=request.prompt_ids[:prompt_tokens], max_tokens=max_tokens)
        for i, request in enumerate(varied.requests)
    )
    return Workload(name="bench-client", requests=requests, concurrency=concurrency, seed=seed)


# -- the two clients -----------------------------------------------------------------------------------------------
def run_ours(engine: OpenAIEngine, workload: Workload, repeat: int) -> ToolRun:
    """One pass of our client; every request must succeed."""
    record = engine.run(workload, warmup=workload.concurrency)
    if record.failed:
        raise MeasurementRefused(
            f"{len(record.failed)} of {len(record.traces)} requests of our client failed: {record.failed[0].error}",
            "Look at the server's log; a comparison over part of the requests would mislead.",
        )

    def middle(values: Sequence[float | None]) -> float:
        return median(value for value in values if value is not None)

    return ToolRun(
        tool=OURS,
        repeat=repeat,
        completed=len(record.completed),
        tokens=record.client.streamed_tokens,
        ttft=middle([trace.ttft for trace in record.traces]),
        tpot=middle([trace.tpot for trace in record.traces]),
        e2e=middle([trace.e2e for trace in record.traces]),
        cpu_seconds=record.client.cpu_seconds,
    )


class VllmBench:
    """``vllm bench serve`` in a process of its own, which imports once and then runs one pass after another.

    Its imports take longer than a pass. Done once, and before the first pass, they neither push the two halves of a
    pair apart nor take the cores from the server while our client measures. Between passes the process waits for a line.
    """

    def __init__(self, base_url: str, model: str) -> None:
        self.base_url = base_url
        self.model = model
        self._process: subprocess.Popen[bytes] | None = None
        self._passes = 0

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="client-bench-"))
        env = child_environment(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
        self._news, news_end = os.pipe()
        try:
            with os.fdopen(news_end, "wb"), (self._folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "helpers.course.bench", str(news_end)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    pass_fds=[news_end],
                )
            self._await_news()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        os.close(self._news)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _await_news(self) -> None:
        """Sleep until the process writes a byte or ends: a look now and then would wake a core that the server uses."""
        assert self._process is not None
        if not select.select([self._news], [], [], BENCH_TIMEOUT_S)[0]:
            raise EngineError(
                f"vllm bench serve did not end within {BENCH_TIMEOUT_S} s.", "Ask for fewer requests or tokens."
            )
        if not os.read(self._news, 1):
            code = self._process.wait()
            raise EngineError(
                f"vllm bench serve ended with exit code {code}:\n{self.log_tail()}", "Read its output above."
            )

    def log_tail(self, lines: int = 20) -> str:
        """The last `lines` lines that the process printed."""
        return log_tail(self._folder / "log", lines)

    def run(self, workload: Workload, repeat: int) -> ToolRun:
        """One pass over the workload's token ids.

        The tool reports success even where every request failed, so its counts are read.
        """
        if self._process is None or self._process.stdin is None:
            raise EngineError("vllm bench serve is not running.", "Use it inside its 'with' block.")
        self._passes += 1
        prompts, result, cost = (
            self._folder / f"{self._passes}-{name}" for name in ("prompts.jsonl", "result.json", "cost.json")
        )
        lines = [json.dumps({"prompt": list(request.prompt_ids)}) for request in workload.requests]
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        arguments = _bench_arguments(self.base_url, self.model, workload, prompts, result)
        order = {"cost_path": str(cost), "n_warmups": workload.concurrency, "arguments": arguments}
        with contextlib.suppress(BrokenPipeError):  # it has died; the wait below says so, with its last lines
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        self._await_news()
        if not result.exists():
            raise EngineError(f"vllm bench serve wrote no result:\n{self.log_tail()}", "Read its output above.")
        return _their_run(json.loads(result.read_text()), json.loads(cost.read_text()), len(workload.requests), repeat)


def _bench_arguments(base_url: str, model: str, workload: Workload, prompts: Path, result: Path) -> list[str]:
    options: dict[str, Any] = {
        "--backend": "vllm",
        "--base-url": base_url,
        "--model": model,
        "--served-model-name": model,
        "--dataset-name": "custom",
        "--dataset-path": prompts,
        "--num-prompts": len(workload.requests),
        "--max-concurrency": workload.concurrency,
        "--num-warmups": workload.concurrency,
        "--temperature": 0,
        "--extra-body": json.dumps({"max_tokens": workload.requests[0].max_tokens}),
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--result-dir": result.parent,
        "--result-filename": result.name,
    }
    flags = ["--ignore-eos", "--skip-tokenizer-init", "--disable-shuffle", "--disable-tqdm"]
    flags += ["--save-result", "--save-detailed"]
    return [*(str(part) for pair in options.items() for part in pair), *flags]


def _their_run(result: dict[str, Any], cost: dict[str, float], n_requests: int, repeat: int) -> ToolRun:
    if result.get("failed") or result.get("completed") != n_requests:
        raise MeasurementRefused(
            f"vllm bench serve completed {result.get('completed')} of {n_requests} requests ({result.get('failed')} failed).",
            "Look at the server's log; a comparison over part of the requests would mislead.",
        )
    # Without a tokenizer the tool reports no medians, but its per-request times; its formulas are applied to those.
    requests = zip(result["latencies"], result["ttfts"], result["output_lens"], strict=True)
    tpots = [(latency - ttft) / (n - 1) for latency, ttft, n in requests if n > 1]
    return ToolRun(
        tool=THEIRS,
        repeat=repeat,
        completed=result["completed"],
        tokens=result["total_output_tokens"],
        ttft=median(result["ttfts"]),
        tpot=median(tpots),
        e2e=median(result["latencies"]),
        cpu_seconds=cost["cpu_seconds"],
    )


# -- the comparison ------------------------------------------------------------------------------------------------
def compare_clients(
    engine: OpenAIEngine, workload: Workload, *, repeats: int = MIN_REPEATS, tell: Callable[[str], None] | None = None
) -> ClientBench:
    """Let both clients measure `workload` on the server of `engine`, `repeats` times each, in alternation."""
    if repeats < MIN_REPEATS:
        raise MeasurementRefused(
            f"{repeats} paired repeats say nothing of spread.", f"Ask for at least {MIN_REPEATS} repeats."
        )
    runs: list[ToolRun] = []
    with VllmBench(engine.base_url, engine.model) as theirs_process:
        for repeat in range(repeats):
            passes: list[Callable[[], ToolRun]] = [
                lambda: run_ours(engine, workload, repeat),  # noqa: B023 - called within this iteration
                lambda: theirs_process.run(workload, repeat),  # noqa: B023
            ]
            for measure in passes if repeat % 2 == 0 else reversed(passes):
                runs.append(measure())
                if tell is not None:
                    tell(f"repeat {repeat + 1}/{repeats}: {runs[-1].tool}, TTFT {runs[-1].ttft * 1e3:.1f} ms")
    ours = sorted((run for run in runs if run.tool == OURS), key=lambda run: run.repeat)
    theirs = sorted((run for run in runs if run.tool == THEIRS), key=lambda run: run.repeat)
    fields = {**{metric: metric for metric in METRICS}, "cpu": "cpu_per_1000_tokens"}
    return ClientBench(
        engine=engine.info,
        workload=workload.name,
        workload_digest=workload.digest,
        n_requests=len(workload.requests),
        concurrency=workload.concurrency,
        prompt_tokens=len(workload.requests[0].prompt_ids),
        max_tokens=workload.requests[0].max_tokens,
        runs=runs,
        ratios={
            name: paired_ratio([getattr(run, attribute) for run in ours], [getattr(run, attribute) for run in theirs])
            for name, attribute in fields.items()
        },
    )


def bench_table(bench: ClientBench) -> Table:
    """Both clients side by side: medians over the repeats, and the paired ratio ours / theirs with its interval."""
    repeats = len(bench.of(OURS))
    table = Table(
        title=f"{bench.n_requests} requests of {bench.prompt_tokens} + {bench.max_tokens} tokens, concurrency "
        f"{bench.concurrency}, {repeats} paired repeats",
        caption=f"{bench.engine.engine} {bench.engine.version}, {bench.engine.dtype}, {bench.engine.device}; "
        "ratio: ours / theirs, geometric mean with a 95 % bootstrap interval",
    )
    for column in ("median over repeats", "our client", "vllm bench serve", "ratio", "verdict"):
        table.add_column(column, justify="left" if column == "median over repeats" else "right")
    for metric in METRICS:
        ours, theirs = (median(getattr(run, metric) for run in bench.of(tool)) for tool in (OURS, THEIRS))
        ratio = str(bench.ratios[metric])
        table.add_row(
            f"{metric.upper()} p50, ms", f"{ours * 1e3:.2f}", f"{theirs * 1e3:.2f}", ratio, bench.verdict(metric)
        )
    ours, theirs = (median(run.cpu_per_1000_tokens for run in bench.of(tool)) for tool in (OURS, THEIRS))
    verdict = "ours costs no more" if bench.ratios["cpu"].ratio <= 1 else "ours costs more"
    table.add_row("CPU s per 1000 tokens", f"{ours:.3f}", f"{theirs:.3f}", str(bench.ratios["cpu"]), verdict)
    return table


def bench_client(
    model_path: Path | str,
    *,
    dtype: str | None = None,
    n_requests: int = 12,
    prompt_tokens: int = 64,
    max_tokens: int = 32,
    concurrency: int = 2,
    repeats: int = 5,
    seed: int = 0,
    vocab_size: int | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> ClientBench:
    """Start one ``vllm serve`` for `model_path`, compare the two clients on it, print the table, return the record.

    Parameters
    ----------
    dtype : the server's weights and activations; None picks what is fastest here.
    prompt_tokens, max_tokens : length of every prompt and of every answer.
    vocab_size : prompts are random ids below it; None reads it from the model's ``config.json``.
    json_path : also write the record there.

    Raises
    ------
    EngineError : the server or the other client does not start.
    MeasurementRefused : a request failed, or fewer than 3 repeats were asked for.
    """
    console = console or Console()
    if vocab_size is None:
        vocab_size = _vocab_size(Path(model_path))
    workload = bench_workload(
        n_requests=n_requests,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        concurrency=concurrency,
        vocab_size=vocab_size,
        seed=seed,
    )
    console.print("Starting vllm serve ...")
    server = VllmServer(
        model_path,
        dtype=dtype,
        max_model_len=max(256, 2 * (prompt_tokens + max_tokens)),
        max_num_seqs=max(8, concurrency),
        enable_prefix_caching=False,
    )
    with server, server.engine() as engine:
        bench = compare_clients(engine, workload, repeats=repeats, tell=lambda line: console.print(line))
    console.print(bench_table(bench))
    if json_path is not None:
        try:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(bench.model_dump_json(indent=1), encoding="utf-8")
        except OSError as error:
            raise RecordError(f"{json_path} cannot be written: {error.strerror}.", "Choose a writable path.") from error
    return bench


def _vocab_size(model_path: Path) -> int:
    try:
        return int(json.loads((model_path / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(
            f"No vocabulary size in {model_path / 'config.json'}.", "Give the folder of a model, or vocab_size=..."
        ) from error


# -- inside the other client's process -----------------------------------------------------------------------------
class CostMeter:
    """Processor time between the first measured call of an async function and the end of its last one, in seconds."""

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self._calls = 0
        self._began: float | None = None
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; its first `skip` calls (the warm-up) are not counted."""

        async def metered(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            if self._calls > self._skip and self._began is None:
                self._began = time.process_time()
            try:
                return await function(*args, **kwargs)
            finally:
                if self._began is not None:
                    self.seconds = time.process_time() - self._began

        return metered


def _serve_passes(news: int, orders: Iterable[str]) -> None:
    """Import vLLM's benchmark and run it once for each order: where to write what, and its command line.

    A byte to the file descriptor `news` says that the imports, or a pass, are over.
    """
    answer_for_the_cpu_wheel()
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    send = serve.ASYNC_REQUEST_FUNCS["vllm"]
    os.write(news, b".")
    for order in map(json.loads, orders):
        meter = CostMeter(order["n_warmups"])
        serve.ASYNC_REQUEST_FUNCS["vllm"] = meter.wrap(send)
        with contextlib.suppress(SystemExit):
            serve.main(parser.parse_args(order["arguments"]))
        Path(order["cost_path"]).write_text(json.dumps({"cpu_seconds": meter.seconds}), encoding="utf-8")
        os.write(news, b".")


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description="Run vllm bench serve for each line of standard input, and what it cost.")
    cli.add_argument("news", type=int, help="file descriptor that gets a byte when a line can be sent")
    _serve_passes(cli.parse_args().news, sys.stdin)
