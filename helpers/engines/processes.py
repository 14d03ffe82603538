"""Child processes of engines and servers: started in a group of their own, their output in a file, ended to the last one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from helpers.errors import EngineError
from helpers.paths import ROOT

LOG_TAIL_LINES = 40
PARENT_VARIABLE = "PAPERS_PARENT_PID"


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last `lines` lines of a log file, or a note that there are none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment, the project importable, the parent's id for `end_with_parent`, and `variables`."""
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": search_path, PARENT_VARIABLE: str(os.getpid()), **variables}


def end_with_parent(interval_s: float = 1.0) -> None:
    """In a child: end the whole process group once the process that started it is gone.

    A killed notebook kernel runs no ``__exit__``; without this its engines and servers would keep their memory for good.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if not parent or not parent.isdigit() or os.getppid() != int(parent):
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(interval_s)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def end_family(process: subprocess.Popen[Any], name: str, grace_s: float = 10.0) -> None:
    """End a process that leads its own group: SIGTERM to the group, SIGKILL after `grace_s`, the same for who left the group.

    Raises
    ------
    EngineError : some of them cannot be ended; the message holds their ids and `name`.
    """
    family = _family(process.pid)
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=grace_s)
    # Children may outlive their parent by a moment; give them that, then end what is left by pid.
    alive = still_running(family, timeout_s=0.0 if process.returncode is None else 2.0)
    _signal_group(process.pid, signal.SIGKILL)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait(timeout=grace_s)
    if alive := still_running(alive, timeout_s=grace_s):
        raise EngineError(
            f"{name} left processes behind that cannot be ended: {[child.pid for child in alive]}.",
            "End them by their process ids before measuring anything else.",
        )


def still_running(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those of `processes` that run after at most `timeout_s`; a zombie, which only waits to be collected, does not."""
    deadline = time.monotonic() + timeout_s
    alive = list(processes)
    while True:
        alive = [process for process in alive if _runs(process)]
        if not alive or time.monotonic() >= deadline:
            return alive
        time.sleep(0.02)


def _family(pid: int) -> list[psutil.Process]:
    """The process and all that descend from it, as far as they still exist."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
