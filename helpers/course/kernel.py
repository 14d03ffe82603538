"""Papermill's engine with the course's kernel: always this interpreter, over local sockets, watched, started twice if need be."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines

from helpers.course.build import INJECTED, tags
from helpers.course.watch import Watch
from helpers.hardware import PATIENT_THREADS
from helpers.paths import ROOT

ENGINE = "course"


class ThisInterpreter(AsyncKernelManager):
    """A kernel manager whose only kernel is the running interpreter, whatever kernels are registered on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def kernel_environment(profile: str) -> dict[str, str]:
    """Environment variables of a kernel. The smoke profile forbids the hub: its model and texts are local."""
    environment = dict(os.environ)
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment |= PATIENT_THREADS
    # Nobody watches: `Run.progress` stays silent.
    environment["PAPERMILL_RUN"] = "1"
    environment.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    # tqdm warns, with a path of this machine, that it shows text bars where there are no widgets: so it should.
    warnings = ["ignore:IProgress not found", environment.get("PYTHONWARNINGS", "")]
    environment["PYTHONWARNINGS"] = ",".join(filter(None, reversed(warnings)))
    if profile == "smoke":
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


class CourseClient(PapermillNotebookClient):
    """Papermill's client with a watched kernel that may be started twice."""

    def __init__(
        self,
        nb_man: Any,
        watch: Watch,
        environment: dict[str, str],
        sockets: Path,
        kernel_log: Path,
        **options: Any,
    ) -> None:
        super().__init__(nb_man, **options)
        self.watch, self.environment, self.sockets, self.kernel_log = watch, environment, sockets, kernel_log
        self.kernel_manager_class = ThisInterpreter

    def create_kernel_manager(self) -> Any:
        manager = super().create_kernel_manager()
        if sys.platform != "win32":
            # Local sockets: two kernels that start at once can take the same TCP port. Their paths must stay short.
            manager.transport = "ipc"
            folder = tempfile.mkdtemp(dir=self.sockets)
            manager.connection_file = str(Path(folder, "k.json"))
        return manager

    def start_new_kernel(self, **options: Any) -> None:
        # What a kernel says outside its cells (a complaint at its end, a crash report) goes beside them, not into ours.
        with self.kernel_log.open("ab") as log:
            super().start_new_kernel(env=self.environment, stdout=log, stderr=log, **options)

    def start_new_kernel_client(self, **options: Any) -> Any:
        """Connect to the kernel; where it did not start, start another one, once."""
        try:
            client = super().start_new_kernel_client(**options)
        except RuntimeError as error:
            self.watch.notes.append(f"the kernel did not start at first ({error}); the second attempt is this run")
            self.km = self.create_kernel_manager()
            self.start_new_kernel()
            client = super().start_new_kernel_client(**options)
        self.watch.follow(self.km.provisioner.pid)
        return client

    def execute_cell(self, cell: NotebookNode, cell_index: int, **options: Any) -> NotebookNode:
        if cell.cell_type != "code":
            return super().execute_cell(cell, cell_index, **options)
        own = [INJECTED not in tags(other) for other in self.nb.cells]
        if not own[cell_index]:
            return super().execute_cell(cell, cell_index, **options)
        with self.watch.cell(sum(own[: cell_index + 1]), sum(own), cell.source):
            return super().execute_cell(cell, cell_index, **options)


class CourseEngine(NBClientEngine):
    """The engine that papermill calls; its extra options arrive through ``execute_notebook``."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
        watch: Watch = options["watch"]
        watch.notebook = nb_man.nb
        quiet = logging.getLogger("papermill.course")
        quiet.setLevel(logging.CRITICAL)
        with _signals_as_interrupt():
            try:
                return CourseClient(
                    nb_man,
                    watch,
                    options["environment"],
                    options["sockets"],
                    options["kernel_log"],
                    timeout=options["execution_timeout"],
                    startup_timeout=options["start_timeout"],
                    kernel_name=kernel_name,
                    log=quiet,
                ).execute()
            finally:
                watch.stop()
                watch.end_leftovers()


papermill_engines.register(ENGINE, CourseEngine)


@contextlib.contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """A polite end (SIGTERM, a closed terminal) unwinds like Ctrl-C: the kernel is shut down, work is saved."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
