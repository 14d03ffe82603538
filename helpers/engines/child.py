"""A heavy engine in a process of its own: it cannot leave memory behind, and its death is noticed and explained.

The parent starts ``python -m helpers.engines.child MODULE:CLASS``, which builds that backend and answers calls over a local
socket with JSON. The child's output goes to a real log file, so it works where a notebook's ``sys.stdout`` has no file
descriptor; on trouble the last lines of the log are part of the error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from helpers import errors
from helpers.engines.base import EngineInfo, RunRecord
from helpers.engines.processes import child_environment, end_family, end_with_parent, log_tail
from helpers.errors import CourseError, EngineError
from helpers.paths import ROOT
from helpers.workload import Workload

DEATH_CAUSES = (
    "Known causes: not enough memory for the weights or the KV pool, a dtype the device lacks, or a port or device that "
    "another process holds."
)


class Backend(Protocol):
    """What runs inside the child."""

    info: EngineInfo

    def run(self, workload: Workload, warmup: int) -> RunRecord: ...

    def close(self) -> None: ...


class ChildEngine:
    """An `Engine` whose backend lives in a child process, started by ``with`` and gone after it.

    Parameters
    ----------
    backend : ``module:Class`` of a `Backend`; it is called with `settings` as keyword arguments in the child.
    settings : JSON-serializable keyword arguments.
    env : environment variables for the child, added to this process's own.
    start_timeout_s, run_timeout_s : the longest start and the longest single call, seconds.
    """

    def __init__(
        self,
        backend: str,
        settings: dict[str, Any],
        *,
        env: dict[str, str] | None = None,
        start_timeout_s: float = 180.0,
        run_timeout_s: float = 1800.0,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._env = env or {}
        self._start_timeout_s = start_timeout_s
        self._run_timeout_s = run_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stack = contextlib.ExitStack()
        self.info: EngineInfo
        self.start_seconds = 0.0

    def __enter__(self) -> Self:
        started = time.monotonic()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def _start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="engine-")))
        self._log = folder / "engine.log"
        key = secrets.token_bytes(16)
        listener = self._stack.enter_context(Listener(str(folder / "socket"), "AF_UNIX", authkey=key))
        settings = {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1", **self._env, "ENGINE_KEY": key.hex()}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "helpers.engines.child", str(folder / "socket"), self._backend],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(**settings),
                cwd=ROOT,
                start_new_session=True,
            )
        deadline = time.monotonic() + self._start_timeout_s
        socket = listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(0.2)
        while self._connection is None:
            try:
                self._connection = listener.accept()
            except TimeoutError:
                self._check_alive("died while starting")
                if time.monotonic() > deadline:
                    raise self._death(f"did not answer within {self._start_timeout_s:.0f} s") from None
        self.info = EngineInfo.model_validate(self._call("start", self._start_timeout_s, **self._settings))

    def run(self, workload: Workload, *, warmup: int = 1) -> RunRecord:
        """Run `workload` in the child. Raises `EngineError` when it does not fit or the child dies."""
        workload.check_fits(self.info.max_model_len)
        value = self._call("run", self._run_timeout_s, workload=workload.model_dump(mode="json"), warmup=warmup)
        return RunRecord.model_validate(value)

    def call(self, method: str, **arguments: Any) -> Any:
        """Call another method of the backend with JSON arguments; for what only one kind of engine can do."""
        return self._call("call", self._run_timeout_s, method=method, arguments=arguments)

    def _call(self, op: str, timeout_s: float, **arguments: Any) -> Any:
        if self._connection is None:
            raise EngineError(
                f"The engine {self._backend.split(':')[1]} is not running.", "Use it inside its with block."
            )
        deadline = time.monotonic() + timeout_s
        try:
            self._connection.send_bytes(json.dumps({"op": op, **arguments}).encode())
            while not self._connection.poll(0.2):
                self._check_alive(f"died during {op}")
                if time.monotonic() > deadline:
                    raise self._death(f"did not finish {op} within {timeout_s:.0f} s")
            reply = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError, BrokenPipeError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0) if self._process else None
            raise self._death(f"died during {op}") from error
        if "error" in reply:
            kind = getattr(errors, reply["error"]["kind"], EngineError)
            raise kind(reply["error"]["symptom"], reply["error"]["remedy"])
        return reply["value"]

    def _check_alive(self, what: str) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise self._death(what)

    def _death(self, what: str) -> EngineError:
        code = self._process.poll() if self._process else None
        ended = "" if code is None else f" (signal {-code})" if code < 0 else f" (exit code {code})"
        return EngineError(
            f"The engine {self._backend.split(':')[1]} {what}{ended}. Its last lines:\n{log_tail(self._log)}",
            DEATH_CAUSES,
        )

    def close(self) -> None:
        """Ask the child to stop, make sure that it did, and remove its log and socket. Safe to call twice."""
        if self._connection is not None:
            with contextlib.suppress(OSError, ValueError):
                self._connection.send_bytes(json.dumps({"op": "stop"}).encode())
                if self._process:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(15)
            self._connection.close()
            self._connection = None
        if self._process is not None:
            process, self._process = self._process, None
            end_family(process, f"The engine {self._backend.split(':')[1]}")
        self._stack.close()


def serve(address: str, backend_name: str) -> None:
    """The child's loop: answer calls until told to stop or until the parent is gone."""
    connection = Client(address, "AF_UNIX", authkey=bytes.fromhex(os.environ.pop("ENGINE_KEY")))
    backend: Any = None
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            break
        op = message.pop("op")
        if op == "stop":
            break
        try:
            value: Any
            if op == "start":
                module, name = backend_name.split(":")
                backend = getattr(importlib.import_module(module), name)(**message)
                value = backend.info.model_dump(mode="json")
            elif op == "run":
                workload = Workload.model_validate(message["workload"])
                value = backend.run(workload, message["warmup"]).model_dump(mode="json")
            else:
                value = getattr(backend, message["method"])(**message["arguments"])
            reply = {"value": value}
        except CourseError as error:
            reply = {"error": {"kind": type(error).__name__, "symptom": error.symptom, "remedy": error.remedy}}
        except Exception as error:
            import traceback

            traceback.print_exc()
            reply = {
                "error": {
                    "kind": "EngineError",
                    "symptom": f"{backend_name.split(':')[1]} failed: {type(error).__name__}: {str(error)[:500]}",
                    "remedy": DEATH_CAUSES,
                }
            }
        connection.send_bytes(json.dumps(reply).encode())
    if backend is not None:
        backend.close()


if __name__ == "__main__":
    end_with_parent()
    serve(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(0)
