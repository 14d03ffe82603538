"""With which environment variables vLLM runs: quietly, and on a CPU without a network and with its few cores in mind."""

from __future__ import annotations

from helpers.hardware import PATIENT_THREADS, usable_cores

CPU_BLOCK_SIZES = (32, 64, 96, 128, 256)
"""Tokens of a KV block that vLLM's attention on a CPU takes."""


def vllm_environment(device: str, *, kv_gib: int = 1, threads: int | None = None) -> dict[str, str]:
    """Environment variables for a process that runs vLLM.

    Parameters
    ----------
    device : ``cpu`` or ``cuda``.
    kv_gib : the KV pool on a CPU, whole GiB.
    threads : OpenMP threads of the model on a CPU; None takes all usable cores.
    """
    quiet = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device != "cpu":
        return quiet
    return quiet | {
        # The CPU profile's model is local.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        # Where threads lie is left to the system.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads or usable_cores()),
        **PATIENT_THREADS,
        "KMP_BLOCKTIME": "0",
        # Freed memory goes back to the system instead of waiting in pools. Mapping large tensors anew makes prefills slower; a
        # larger MALLOC_MMAP_THRESHOLD_ (32 MiB) would be faster and take 150 MB more.
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_TRIM_THRESHOLD_": "131072",
        # The scheduler's process also runs the model. Were that a process of its own, the scheduler would await each step by
        # spinning on a core, and whatever a client does would take time from the model.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Engines run eagerly here; without this the sampler would still compile a kernel at the first logprobs (8 s).
        "TORCHDYNAMO_DISABLE": "1",
    }
