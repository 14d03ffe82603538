"""Memory, measured two ways: from the operating system (resident bytes) and from tensors (their storage), plus limits.

On a CPU a process's *peak* is the kernel's high-water mark (``VmHWM``), which is reset before a measurement; elsewhere a
thread samples. Nothing here estimates.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict

from helpers.errors import EngineError
from helpers.paths import ROOT


def resident_bytes(pid: int | None = None) -> int:
    """Resident bytes of one process (this one by default)."""
    return int(psutil.Process(pid).memory_info().rss)


class Peak(BaseModel):
    """Resident bytes before, at the highest point of, and after a block of code."""

    model_config = ConfigDict(extra="forbid")

    before: int = 0
    peak: int = 0
    after: int = 0
    method: str = ""

    @property
    def grown(self) -> int:
        """peak - before, bytes."""
        return self.peak - self.before


def _high_water_mark() -> int | None:
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(match.group(1)) * 1024 if match else None


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def release_free_memory() -> None:
    """Collect garbage and hand the allocator's free pages back, so that resident bytes mean what is held."""
    import ctypes
    import gc

    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


@contextlib.contextmanager
def measure_peak() -> Iterator[Peak]:
    """``with measure_peak() as peak: ...`` fills `peak` when the block ends."""
    release_free_memory()
    result = Peak(before=resident_bytes())
    exact = _reset_high_water_mark()
    stop = threading.Event()
    sampled = [result.before]

    def sample() -> None:
        while not stop.wait(0.002):
            sampled.append(resident_bytes())

    thread = None if exact else threading.Thread(target=sample, daemon=True)
    if thread:
        thread.start()
    try:
        yield result
    finally:
        stop.set()
        if thread:
            thread.join()
        mark = _high_water_mark() if exact else None
        result.peak = max(mark if mark is not None else max(sampled), result.before)
        result.after = resident_bytes()
        result.method = "kernel high-water mark" if exact else "sampled every 2 ms"


@contextlib.contextmanager
def measure_device_peak(device: str) -> Iterator[Peak]:
    """`measure_peak` for the memory that a model's tensors live in: the CUDA allocator's on a GPU, else this process's."""
    if not device.startswith("cuda"):
        with measure_peak() as result:
            yield result
        return
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = Peak(before=torch.cuda.memory_allocated(), method="CUDA allocator, allocated bytes")
    try:
        yield result
    finally:
        torch.cuda.synchronize()
        result.peak, result.after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors' elements: shape times element size, whatever larger storage they are views of."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors' storages, each storage counted once: what the allocator really holds for them."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class LimitedRun(BaseModel):
    """How a child process under a memory limit ended."""

    model_config = ConfigDict(extra="forbid")

    outcome: str
    """``ok``, ``out of memory`` or ``failed``."""
    value: Any = None
    detail: str = ""


def run_limited(code: str, limit_bytes: int, *, timeout_s: float = 120, **arguments: Any) -> LimitedRun:
    """Run `code` in a child process that cannot hold more than `limit_bytes` of data, and report how it ended.

    Parameters
    ----------
    code : Python source. It reads ``arguments`` (a dict, JSON) and sets ``result`` (JSON).
    limit_bytes : limit on the child's writable private memory (``RLIMIT_DATA``), its libraries included.

    Raises
    ------
    EngineError : this system cannot limit memory (it is not Linux).
    """
    if sys.platform != "linux":
        raise EngineError("A memory limit on a child process needs Linux.", "Run this cell on Linux, WSL or Colab.")
    wrapper = (
        "import json, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_DATA, ({limit_bytes}, {limit_bytes}))\n"
        "arguments = json.loads(sys.argv[1])\n"
        "try:\n"
        "    scope = {'arguments': arguments}\n"
        "    exec(compile(open(sys.argv[2]).read(), 'limited', 'exec'), scope)\n"
        "    report = {'outcome': 'ok', 'value': scope.get('result')}\n"
        "except (MemoryError, RuntimeError) as error:\n"
        "    text = str(error)\n"
        "    full = isinstance(error, MemoryError) or 'allocate memory' in text\n"
        "    report = {'outcome': 'out of memory' if full else 'failed', 'detail': text[:400]}\n"
        "print('\\nREPORT ' + json.dumps(report))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "limited.py"
        source.write_text(code, encoding="utf-8")
        child = subprocess.run(
            [sys.executable, "-c", wrapper, json.dumps(arguments), str(source)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=ROOT,
            env={**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
        )
    for line in reversed(child.stdout.splitlines()):
        if line.startswith("REPORT "):
            return LimitedRun.model_validate_json(line.removeprefix("REPORT "))
    text = child.stderr.strip()
    full = "allocate" in text or "bad_alloc" in text or "MemoryError" in text
    return LimitedRun(outcome="out of memory" if full else "failed", detail=text[-400:] or f"exit {child.returncode}")


def committed_bytes(address: int, n_bytes: int) -> int:
    """Bytes of physical memory behind ``[address, address + n_bytes)`` of this process, in whole pages, as the kernel tells.

    Parameters
    ----------
    address : the beginning of a mapping, a multiple of the page size (``tensor.data_ptr()`` of a tensor over an ``mmap``).

    Raises
    ------
    EngineError : the kernel does not answer (the address is not mapped, or this is not Linux).
    """
    import ctypes
    import mmap

    if sys.platform != "linux":
        raise EngineError("Which pages are committed is asked of Linux.", "Run this on Linux, WSL or Colab.")
    n_pages = -(-n_bytes // mmap.PAGESIZE)
    present = (ctypes.c_ubyte * n_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), present):
        raise EngineError(
            f"The kernel does not know the memory at {address:#x}: {os.strerror(ctypes.get_errno())}.",
            "Give the beginning of a mapping that still exists.",
        )
    return mmap.PAGESIZE * sum(page & 1 for page in present)
