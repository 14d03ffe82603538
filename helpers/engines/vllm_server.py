"""``vllm serve`` as a context manager: started on a free port, awaited, watched, and ended with all its processes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from helpers.engines.base import EngineInfo
from helpers.engines.openai_client import OpenAIEngine
from helpers.engines.server_process import HOST, ServerOwner, ServerProcess, claim_port
from helpers.engines.vllm_cli import vllm_version
from helpers.engines.vllm_settings import vllm_environment
from helpers.errors import EngineError
from helpers.hardware import describe, pick_dtype, usable_cores

KNOWN_CAUSES = (
    ("address already in use", "The port is in use: leave the port out and a free one is taken."),
    (
        "bfloat16 is only supported",
        "The device cannot compute in this dtype: take dtype='float16' (or 'float32' on a CPU).",
    ),
    ("unsupported dtype", "The device cannot compute in this dtype: take dtype='float16' (or 'float32' on a CPU)."),
    ("out of memory", "Memory does not suffice: take a smaller model, max_model_len or KV space."),
    ("cannot allocate memory", "Memory does not suffice: take a smaller model, max_model_len or KV space."),
    ("no available memory for the cache", "Memory does not suffice: take a smaller model or more KV space."),
    (
        "larger than the available kv cache",
        "The KV pool is too small for one request: lower max_model_len or raise the pool.",
    ),
    ("max seq len", "The context does not fit the KV pool: lower max_model_len or raise the pool."),
    ("greater than the derived max_model_len", "The model was trained for a shorter context: lower max_model_len."),
    ("repository not found", "There is no such model folder: check the path."),
    ("is not a valid model identifier", "There is no such model folder: check the path."),
    ("unrecognized arguments", "This version of vLLM does not know an argument in extra_args: see the log."),
)


class VllmServer(ServerOwner):
    """``with VllmServer(model_path, max_model_len=1024) as server, server.engine() as engine: engine.run(workload)``.

    Parameters
    ----------
    model_path : a model folder in Hugging Face's layout.
    served_model_name : the name clients use.
    port : None takes a free one of the loopback interface.
    max_model_len : context, tokens.
    dtype : weights and activations, in vLLM's words (``bfloat16``, ``float16``, ``float32``); None takes what
        `helpers.hardware.pick_dtype` finds fastest here.
    block_size : tokens in a KV block; None leaves it to vLLM (128 on a CPU, where 32, 64, 128 and 256 are allowed).
    enable_prefix_caching : whether KV blocks of earlier prompts are used again.
    max_num_seqs : most requests in a step.
    max_num_batched_tokens : most tokens in a step: the size of a prefill chunk.
    num_gpu_blocks_override : the KV pool in blocks instead of what memory allows.
    extra_args : further command-line arguments of ``vllm serve``.
    env : further environment variables; they win over the ones set here. On a CPU the model gets all cores but one, which the
        server's and the client's Python need, unless ``OMP_NUM_THREADS`` says otherwise.
    startup_timeout_s : seconds until it must answer.
    """

    title = "vllm serve"

    def __init__(
        self,
        model_path: Path | str,
        *,
        served_model_name: str = "model",
        port: int | None = None,
        max_model_len: int = 1024,
        dtype: str | None = None,
        block_size: int | None = None,
        enable_prefix_caching: bool = True,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        num_gpu_blocks_override: int | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        startup_timeout_s: float = 180.0,
    ) -> None:
        self.model_path = Path(model_path)
        self.served_model_name = served_model_name
        self.port = port
        self.max_model_len = max_model_len
        self.dtype = dtype or pick_dtype()[0]
        self.enable_prefix_caching = enable_prefix_caching
        self.extra_args = tuple(extra_args)
        self.env = dict(env or {})
        self.startup_timeout_s = startup_timeout_s
        self._sizes: dict[str, int | None] = {
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "num_gpu_blocks_override": num_gpu_blocks_override,
        }

    # -- life ---------------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        self._check_possible()
        port = claim_port(self.port)
        self._process = ServerProcess(
            self.title,
            ["helpers.engines.vllm_cli", "serve", *self.arguments(port)],
            port=port,
            env=self._environment(),
            startup_timeout_s=self.startup_timeout_s,
            known_causes=KNOWN_CAUSES,
        ).__enter__()
        return self

    def _check_possible(self) -> None:
        if sys.platform != "linux":
            raise EngineError(
                f"vllm serve runs on Linux only, and this is {sys.platform}.",
                "Use the Transformers engine here, or name the URL of a server on a Linux machine to OpenAIEngine.",
            )
        if vllm_version() is None or importlib.util.find_spec("vllm") is None:
            raise EngineError(
                "vLLM is not installed in this environment.",
                "Install requirements/cpu.txt, or the package 'vllm' on a GPU.",
            )
        if not (self.model_path / "config.json").is_file():
            raise EngineError(
                f"{self.model_path} is not a model folder: it holds no config.json.",
                "Give the folder that helpers.models returns for a model of the catalog.",
            )

    def arguments(self, port: int) -> list[str]:
        """The command line after ``vllm serve``."""
        options: dict[str, Any] = {
            "--served-model-name": self.served_model_name,
            "--host": HOST,
            "--port": port,
            "--max-model-len": self.max_model_len,
            "--dtype": self.dtype,
            **{f"--{name.replace('_', '-')}": value for name, value in self._sizes.items() if value is not None},
        }
        flags = ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        flags.append("--enable-prefix-caching" if self.enable_prefix_caching else "--no-enable-prefix-caching")
        if describe().device == "cpu":
            # Compiling takes longer than a short run lasts, and on a CPU it gains nothing.
            flags.append("--enforce-eager")
        pairs = [str(part) for pair in options.items() for part in pair]
        return [str(self.model_path), *pairs, *flags, *self.extra_args]

    def _environment(self) -> dict[str, str]:
        threads = int(os.environ.get("OMP_NUM_THREADS", max(1, usable_cores() - 1)))
        return vllm_environment(describe().device, threads=threads) | self.env

    # -- use ----------------------------------------------------------------------------------------------------------
    def log_tail(self, lines: int = 40) -> str:
        """The last lines the server printed."""
        return self.process.log_tail(lines)

    @property
    def info(self) -> EngineInfo:
        settings: dict[str, str | int | float | bool | None] = {
            "enable_prefix_caching": self.enable_prefix_caching,
            **self._sizes,
        }
        if self.extra_args:
            settings["extra_args"] = " ".join(self.extra_args)
        return EngineInfo(
            engine="vllm-serve",
            version=vllm_version() or "unknown",
            model=self.model_path.name,
            dtype=self.dtype,
            device=describe().device,
            max_model_len=self.max_model_len,
            settings=settings,
        )

    def engine(self, **options: Any) -> OpenAIEngine:
        """A client for this server; `options` go to `OpenAIEngine` (``api``, ``messages``, ``extra_body`` ...)."""
        self.process.check_alive()
        return OpenAIEngine(self.url, self.served_model_name, info=self.info, **options)
