"""A server in a child process: own process group, output in a real file, a deadline to be ready, ended with its children.

Notebook kernels replace ``sys.stdout`` by an object without a file descriptor, and a pipe that nobody reads blocks its
writer. So output goes to a file, and what went wrong is read from that file's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from helpers.engines.processes import LOG_TAIL_LINES, child_environment, end_family, log_tail
from helpers.errors import EngineError

HOST = "127.0.0.1"
FREE_PORTS = range(20_000, 32_000)  # below what systems give to outgoing connections (Linux 32768, others 49152)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on at this moment, drawn from `FREE_PORTS`.

    Not the system's own choice (port 0): what it gives may go to anybody's outgoing connection in the seconds until a
    server that was told the number listens on it.
    """
    for _ in range(100):
        port = FREE_PORTS.start + secrets.randbelow(len(FREE_PORTS))
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise EngineError(
        f"No free port was found between {FREE_PORTS.start} and {FREE_PORTS.stop - 1} of {HOST} in 100 tries.",
        "End programs that hold ports there: a machine with that many servers is not one to measure on.",
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed (vLLM brings it on Linux): a wake-up costs a quarter less processor time."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def claim_port(port: int | None) -> int:
    """Return `port` if it is free, a free one for None; raise `EngineError` where somebody listens on it."""
    if port is None:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise EngineError(
                f"Port {port} of {HOST} cannot be used: {error.strerror}.",
                "End the program that holds it, name another port, or leave the port out and a free one is taken.",
            ) from error
    return port


class ServerProcess:
    """``with ServerProcess("name", [module, *arguments], port=...) as server: ...`` starts it, waits and ends it.

    Parameters
    ----------
    name : what errors and the log file call it.
    arguments : the command line after ``python -m``; the interpreter is the one that runs now.
    port : the port it will listen on, already checked by `claim_port`.
    env : variables added to this process's environment.
    startup_timeout_s : seconds it may take until ``GET /health`` answers 200.
    known_causes : pairs of (text in the log, what it means), shown when the server dies.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        port: int,
        env: Mapping[str, str] | None = None,
        startup_timeout_s: float = 60.0,
        known_causes: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.name = name
        self.command = [sys.executable, "-m", *arguments]
        self.port = port
        self.env = dict(env or {})
        self.startup_timeout_s = startup_timeout_s
        self.known_causes = known_causes
        self.startup_s: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The child's process id; `EngineError` where it does not run."""
        if self._process is None:
            raise EngineError(f"{self.name} is not running.", "Use it inside its 'with' block.")
        return self._process.pid

    @property
    def log_path(self) -> Path | None:
        """The file that holds everything the server printed; it stays after the server's end only if that was an error."""
        return self._log

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last `lines` lines that the server and its children printed."""
        return "" if self._log is None else log_tail(self._log, lines)

    # -- life -----------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        began = time.monotonic()
        try:
            self._start()
            self._wait_until_healthy(began + self.startup_timeout_s)
        except BaseException as error:
            self._stop(keep_log=isinstance(error, EngineError))
            raise
        self.startup_s = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(keep_log=isinstance(error, EngineError))

    def _start(self) -> None:
        handle, path = tempfile.mkstemp(prefix=f"{self.name.replace(' ', '-')}-", suffix=".log")
        self._log = Path(path)
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                env=child_environment(**self.env),
                start_new_session=True,
            )
        finally:
            os.close(handle)

    def _wait_until_healthy(self, deadline: float) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        assert self._process is not None
        while True:
            if (code := self._process.poll()) is not None:
                raise self._death(f"{self.name} ended with exit code {code} before it was ready.")
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                opener.open(f"{self.url}/health", timeout=2.0) as answer,
            ):
                if answer.status == 200:
                    return
            if time.monotonic() > deadline:
                raise self._death(f"{self.name} was not ready after {self.startup_timeout_s:.0f} s.")
            time.sleep(0.05)

    def _death(self, symptom: str) -> EngineError:
        tail = self.log_tail()
        causes = [meaning for sign, meaning in self.known_causes if sign.lower() in tail.lower()]
        remedy = " ".join(dict.fromkeys(causes)) or "Read the log's end above; the whole log is in the file it names."
        return EngineError(f"{symptom} The end of its log ({self._log}):\n{tail}", remedy)

    def check_alive(self) -> None:
        """Raise `EngineError` with the log's end if the server has died."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        raise self._death(f"{self.name} died with exit code {code}.")

    def _stop(self, *, keep_log: bool = False, grace_s: float = 10.0) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_family(process, self.name, grace_s)
        if self._log is not None and not keep_log:
            self._log.unlink(missing_ok=True)
            self._log = None


class ServerOwner:
    """Base of what starts a `ServerProcess` in its ``__enter__``, keeps it in `_process`, and ends it with its block."""

    title: str
    """What errors and the log file call the server."""
    _process: ServerProcess | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.__exit__(kind, error, trace)

    @property
    def process(self) -> ServerProcess:
        """The running process; `EngineError` outside the ``with`` block."""
        if self._process is None:
            raise EngineError(f"{self.title} is not running.", "Use it inside its 'with' block.")
        return self._process

    @property
    def url(self) -> str:
        """Where it answers."""
        return self.process.url
