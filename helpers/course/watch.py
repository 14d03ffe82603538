"""Seconds and peak memory of a notebook's kernel and all its children, cell by cell."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import psutil
from nbformat import NotebookNode

from helpers.course.build import first_line
from helpers.course.records import CellRecord
from helpers.engines.processes import still_running

SAMPLE_S = 0.05


class Watch:
    """Samples the memory of a process tree in a thread, and keeps what each cell cost.

    The list of children is renewed every half second (that walks all processes of the machine), their memory is read at
    every sample (one small file for each).
    """

    def __init__(self, on_cell: Callable[[int, int, str], None] = lambda number, total, line: None) -> None:
        self.on_cell = on_cell
        self.notebook: NotebookNode | None = None
        self.cells: list[CellRecord] = []
        self.notes: list[str] = []
        self.peak_bytes = 0
        self.current: tuple[int, str] | None = None
        """Number (from 1, as in the source) and first line of the cell that runs or ran last."""
        self.seen: dict[int, psutil.Process] = {}
        self._cell_peak = 0
        self._root: psutil.Process | None = None
        self._processes: list[psutil.Process] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, pid: int) -> None:
        """Watch the process `pid` and all its descendants from now on."""
        self._root = psutil.Process(pid)
        self._stop.clear()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _sample(self) -> None:
        rounds = 0
        while not self._stop.is_set():
            if rounds % 10 == 0:
                self._processes = self._tree()
            rounds += 1
            self._look()
            self._stop.wait(SAMPLE_S)

    def _look(self) -> None:
        total = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        self._cell_peak = max(self._cell_peak, total)
        self.peak_bytes = max(self.peak_bytes, total)

    def _tree(self) -> list[psutil.Process]:
        assert self._root is not None
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []
        self.seen.update({process.pid: process for process in tree})
        return tree

    @contextlib.contextmanager
    def cell(self, number: int, total: int, source: str) -> Iterator[None]:
        """Time one code cell, the `number`-th of `total`. `current` keeps what it was when it fails."""
        line = first_line(source)
        self.current = number, line
        self.on_cell(number, total, line)
        self._cell_peak = 0
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._look()
            self.cells.append(
                CellRecord(cell=number, first_line=line, seconds=round(seconds, 4), peak_bytes=self._cell_peak)
            )

    def end_leftovers(self) -> None:
        """End processes that the notebook started and left running, and note it."""
        own = self._root.pid if self._root else -1
        alive = still_running([process for process in self.seen.values() if process.pid != own], timeout_s=0.0)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, stubborn = psutil.wait_procs(alive, timeout=3)
        for process in stubborn:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if alive:
            self.notes.append(f"{len(alive)} processes left running by the notebook were ended")
