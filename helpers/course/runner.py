"""Run notebooks end to end with papermill, and lose nothing when one fails.

Papermill's own engine is kept; what is added: the kernel is always this interpreter, talks over local sockets
rather than TCP ports, gets one more chance to start, and is watched (seconds and peak memory of its whole process
tree, per cell). Every way in which a run can fail ends in one sentence that names notebook, cell and reason, with
the partly executed notebook saved.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from helpers import profile as profiles
from helpers.course.build import INJECTED, Entry, find, read_source, source_hash, tags, write_notebook
from helpers.errors import CourseError, NotebookError, RecordError, UnknownNameError, suggest
from helpers.hardware import memory_limit_bytes
from helpers.paths import BUILD, NOTEBOOKS, ROOT

RUN = BUILD / "run"
RECORD = "run.json"
RESULTS = "results.json"
OWN_PARAMETERS = ("PROFILE", "SEED", "OUT")
SAMPLE_S = 0.05
START_TIMEOUT_S = 120
NEEDED_BYTES = 16 * 2**20
"""Room that an output folder must have before a notebook starts."""
GIB = 2**30

State = Literal["done", "failed", "not run"]


# -- records -----------------------------------------------------------------------------------------------------------
class CellRecord(BaseModel):
    """What one executed code cell cost. `cell` counts all cells from 1; memory is that of the kernel's process tree."""

    model_config = ConfigDict(extra="forbid")

    cell: int
    first_line: str
    seconds: float
    peak_bytes: int


class Outcome(BaseModel):
    """How one notebook ended."""

    model_config = ConfigDict(extra="forbid")

    name: str
    status: State
    seconds: float = 0.0
    peak_bytes: int = 0
    """Highest resident bytes of the kernel and all its children together; pages they share count once for each."""
    cells: list[CellRecord] = Field(default_factory=list)
    profile: str
    seed: int
    parameters: dict[str, Any]
    source_hash: str
    notebook: str
    error: str | None = None
    exit_code: int = 0
    notes: list[str] = Field(default_factory=list)


class Manifest(BaseModel):
    """One run of several notebooks: what was asked for, and how far it came."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    profile: str
    seed: int
    parameters: dict[str, Any]
    notebooks: dict[str, str]
    """Name to source hash, in order."""
    helpers_hash: str
    finished: bool = False
    outcomes: dict[str, Outcome] = Field(default_factory=dict)

    def same_settings(self, other: Manifest) -> bool:
        """Whether two runs asked for the same thing of the same helpers; a changed notebook matters to itself only."""
        mine, theirs = (
            (run.profile, run.seed, run.parameters, list(run.notebooks), run.helpers_hash) for run in (self, other)
        )
        return mine == theirs


class Settings(BaseModel):
    """What a run is asked for. `profile` may be ``auto``; `timeout_s` bounds one cell (None: by the profile)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str = "auto"
    seed: int = 0
    parameters: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float | None = None


def helpers_hash(folder: Path = ROOT / "helpers") -> str:
    """sha256 over the helpers' code: results made by different helpers do not belong to one run."""
    from hashlib import sha256

    digest = sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def write_json(record: BaseModel, path: Path) -> None:
    """Write a record in one step.

    Raises
    ------
    RecordError : it cannot be written.
    """
    half = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        half.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(half, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        raise RecordError(f"{path} cannot be written: {error.strerror or error}.", "Free some space there.") from error


def read_manifest(out: Path) -> Manifest | None:
    """The manifest of an earlier run in `out`; None where there is none or it is not one (it is then written anew)."""
    try:
        return Manifest.model_validate_json((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


# -- parameters --------------------------------------------------------------------------------------------------------
def parameter_cell(name: str, notebook: NotebookNode) -> int:
    """The index of the one cell tagged ``parameters``.

    Raises
    ------
    NotebookError : there is none, or more than one.
    """
    found = [index for index, cell in enumerate(notebook.cells) if "parameters" in tags(cell)]
    if len(found) != 1:
        raise NotebookError(
            f"{name} has {len(found)} cells tagged 'parameters'; it needs exactly one.",
            'Tag the cell that assigns PROFILE, SEED and OUT: # %% tags=["parameters"]',
        )
    return found[0]


def declared_parameters(name: str, notebook: NotebookNode) -> list[str]:
    """Names that the parameters cell assigns."""
    tree = _parse(name, parameter_cell(name, notebook), notebook)
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def unread_parameters(name: str, notebook: NotebookNode) -> list[str]:
    """Declared parameters that no later cell reads: setting one of them would change nothing."""
    start = parameter_cell(name, notebook)
    read = set()
    for index, cell in enumerate(notebook.cells[start + 1 :], start + 1):
        if cell.cell_type == "code":
            nodes = ast.walk(_parse(name, index, notebook))
            read |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return [parameter for parameter in declared_parameters(name, notebook) if parameter not in read]


def _parse(name: str, index: int, notebook: NotebookNode) -> ast.Module:
    """The syntax tree of a code cell, its IPython magics transformed away."""
    from IPython.core.inputtransformer2 import TransformerManager

    source = notebook.cells[index].source
    try:
        return ast.parse(TransformerManager().transform_cell(source))
    except SyntaxError as error:
        raise NotebookError(
            f"{name}, cell {index + 1} ({first_line(source)!r}) is not valid Python: {error.msg}.", "Mend the cell."
        ) from error


def check_parameters(name: str, notebook: NotebookNode, asked: Sequence[str]) -> None:
    """Refuse, before anything starts, parameters that the notebook does not have or does not read.

    Raises
    ------
    UnknownNameError : a parameter asked for is not one of the notebook's.
    NotebookError : no single parameters cell; a parameter that no later cell reads.
    """
    declared = declared_parameters(name, notebook)
    for parameter in asked:
        if parameter not in declared:
            raise UnknownNameError(f"{name} has no parameter {parameter!r}.", suggest(parameter, declared))
    missing = [parameter for parameter in OWN_PARAMETERS if parameter not in declared]
    if missing:
        raise NotebookError(f"{name} does not declare {', '.join(missing)}.", "Assign it in the parameters cell.")
    if unread := unread_parameters(name, notebook):
        raise NotebookError(
            f"{name}: no cell reads the parameter {', '.join(unread)}; setting it would change nothing.",
            "Use it in a later cell, or take it out of the parameters cell.",
        )


def parse_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """``["N=3", "NAME=abc"]`` as a dict; a value is a Python literal where it is one, else a string.

    Raises
    ------
    UnknownNameError : a text has no ``=``.
    """
    result: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UnknownNameError(f"{text!r} is not of the form NAME=VALUE.", "For example: -p SEED=3")
        try:
            result[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            result[name] = value
    return result


def first_line(source: str) -> str:
    """The first line of a cell that is not blank, at most 60 characters of it."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return lines[0] if lines and len(lines[0]) <= 60 else lines[0][:57] + "..." if lines else ""


# -- watching the kernel -----------------------------------------------------------------------------------------------
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
        alive = [process for process in self.seen.values() if process.pid != own and _is_alive(process)]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, stubborn = psutil.wait_procs(alive, timeout=3)
        for process in stubborn:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if alive:
            self.notes.append(f"{len(alive)} processes left running by the notebook were ended")


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


# -- the papermill engine ----------------------------------------------------------------------------------------------
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
    # Waiting OpenMP threads that spin take the cores from the threads that work.
    environment["OMP_WAIT_POLICY"] = "passive"
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


papermill_engines.register("course", CourseEngine)


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


# -- one notebook ------------------------------------------------------------------------------------------------------
def check_out_folder(out: Path) -> None:
    """Make `out` and prove that a file of `NEEDED_BYTES` can be written in it.

    Raises
    ------
    RecordError : the folder cannot be made or written, or is full.
    """
    probe = out / f".probe-{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            for _ in range(NEEDED_BYTES // 2**20):
                file.write(bytes(2**20))
    except OSError as error:
        raise RecordError(
            f"The output folder {out} cannot be written: {error.strerror or error}.",
            "Free some space, or name another folder: --out DIR",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def run_one(
    entry: Entry,
    settings: Settings,
    out: Path = RUN,
    on_cell: Callable[[int, int, str], None] = lambda number, total, line: None,
) -> Outcome:
    """Execute one notebook; its executed form, ``results.json`` and ``run.json`` are then in ``out/NAME``.

    Raises
    ------
    UnknownNameError : an unknown profile or parameter; nothing was started.
    NotebookError : a cell raised or ran out of time, the kernel died or did not start, the parameters did not arrive.
    RecordError : the folder is full or read-only; ``results.json`` is missing or corrupt.
    """
    profile, _ = profiles.resolve(settings.profile)
    notebook = read_source(entry)
    check_parameters(entry.name, notebook, list(settings.parameters))
    folder = out.resolve() / entry.name
    check_out_folder(folder)
    for stale in (folder / RESULTS, folder / RECORD, folder / f"{entry.name}.ipynb", folder / "kernel.log"):
        stale.unlink(missing_ok=True)
    shutil.rmtree(folder / "figures", ignore_errors=True)
    parameters = {"PROFILE": profile.name, "SEED": settings.seed, "OUT": str(folder), **settings.parameters}
    watch = Watch(on_cell)
    outcome = Outcome(
        name=entry.name,
        status="done",
        profile=profile.name,
        seed=settings.seed,
        parameters=parameters,
        source_hash=source_hash(entry),
        notebook=str(folder / f"{entry.name}.ipynb"),
    )
    start = time.perf_counter()
    try:
        timeout_s = settings.timeout_s or max(600, 2 * profile.notebook_seconds)
        _execute(entry, notebook, parameters, folder, watch, profile.name, timeout_s)
        check_results(entry.name, folder / RESULTS, parameters)
    except CourseError as error:
        outcome.status, outcome.error, outcome.exit_code = "failed", str(error), error.exit_code
        raise
    except KeyboardInterrupt:
        outcome.status, outcome.error, outcome.exit_code = "not run", "interrupted", 130
        raise
    finally:
        outcome.seconds = round(time.perf_counter() - start, 3)
        outcome.peak_bytes, outcome.cells, outcome.notes = watch.peak_bytes, watch.cells, watch.notes
        # Where the disk is full the reason is already on its way up; the record must not replace it.
        with contextlib.suppress(RecordError) if outcome.status != "done" else contextlib.nullcontext():
            write_json(outcome, folder / RECORD)
    return outcome


def _execute(
    entry: Entry,
    notebook: NotebookNode,
    parameters: dict[str, Any],
    folder: Path,
    watch: Watch,
    profile: str,
    timeout_s: float,
) -> None:
    """Run papermill, and turn each of its ways to fail into the course's own error."""
    import papermill

    target = folder / f"{entry.name}.ipynb"
    kernel_log = folder / "kernel.log"
    sockets = Path(tempfile.mkdtemp(prefix="papers-"))
    try:
        with _quiet_papermill():
            papermill.execute_notebook(
                notebook,
                target,
                parameters=parameters,
                engine_name="course",
                kernel_name="python3",
                language="python",
                progress_bar=False,
                start_timeout=START_TIMEOUT_S,
                cwd=entry.built.parent,
                execution_timeout=timeout_s,
                watch=watch,
                environment=kernel_environment(profile),
                sockets=sockets,
                kernel_log=kernel_log,
            )
    except (PapermillExecutionError, DeadKernelError, CellTimeoutError, RuntimeError, TimeoutError, OSError) as error:
        saved = _save_partial(watch, target)
        raise _explain(entry.name, error, watch, saved, timeout_s) from error
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
        with contextlib.suppress(OSError):
            if not kernel_log.stat().st_size:
                kernel_log.unlink()


@contextlib.contextmanager
def _quiet_papermill() -> Iterator[None]:
    """Papermill's log lines and frozen-module warnings say nothing that the run's own report does not."""
    logger = logging.getLogger("papermill")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _save_partial(watch: Watch, target: Path) -> Path | None:
    """Keep the partly executed notebook: beside the results, or in a temporary folder where that is full."""
    if watch.notebook is None:
        return None
    for path in (target, Path(tempfile.gettempdir()) / f"papers-rescued-{os.getpid()}" / target.name):
        with contextlib.suppress(RecordError):
            write_notebook(watch.notebook, path)
            return path
    return None


def _explain(name: str, error: BaseException, watch: Watch, saved: Path | None, timeout_s: float) -> CourseError:
    """One sentence for a failed execution."""
    kept = f"The notebook as far as it came is {saved}." if saved else ""
    where = "{}, cell {} ({!r})".format(name, *watch.current) if watch.current else name
    if isinstance(error, PapermillExecutionError):
        return _explain_cell(where, error, kept)
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return RecordError(
            f"{name}: the executed notebook cannot be written: {error.strerror or error}.",
            f"Free some space, or name another folder: --out DIR. {kept}",
        )
    if watch.current is None:
        return NotebookError(
            f"{name}: the kernel did not start, twice: {str(error).strip() or type(error).__name__}.",
            f"Try: {Path(sys.executable).name} -m ipykernel_launcher --version; python -m helpers doctor",
        )
    if isinstance(error, (CellTimeoutError, TimeoutError)):
        return NotebookError(f"{where} ran longer than {timeout_s:g} s.", f"Allow more: --timeout S. {kept}")
    if isinstance(error, DeadKernelError):
        peak, limit = watch.peak_bytes / GIB, memory_limit_bytes() / GIB
        return NotebookError(
            f"{where}: the kernel died. Its processes held {peak:.2f} GiB at most; this machine has {limit:.1f} GiB.",
            f"Often: out of memory. Close other programs, or take a smaller profile. {kept}",
        )
    return NotebookError(f"{where}: {type(error).__name__}: {error}", kept)


def _explain_cell(where: str, error: PapermillExecutionError, kept: str) -> CourseError:
    """A cell that raised: the error's own words, and the remedy where the course raised it."""
    message, _, remedy = str(error.evalue).removeprefix(f"{error.ename}: ").partition("\n  Remedy: ")
    remedy = f"{remedy.strip()} {kept}".strip()
    if "[Errno 28]" in message or "No space left" in message:
        return RecordError(f"{where}: the disk is full: {message}", f"Free some space. {remedy}")
    return NotebookError(f"{where} raised {error.ename}: {message.strip()}", remedy)


def check_results(name: str, path: Path, parameters: dict[str, Any]) -> None:
    """The results file is there, can be read, and says that the notebook ran with the parameters it was given.

    Raises
    ------
    RecordError : it is missing or corrupt.
    NotebookError : a parameter did not arrive.
    """
    from helpers.course.report import claim_rows, read_results

    if not path.exists():
        raise RecordError(f"{name} ended without writing {path}.", "Its last cell must call run.finish().")
    results = read_results(path)
    claim_rows(results, path)
    used = results["parameters"]
    for parameter, value in parameters.items():
        if parameter not in used:
            if parameter in OWN_PARAMETERS:
                raise RecordError(f"{path} does not record the parameter {parameter}.", "helpers.start records it.")
            continue
        if json.loads(json.dumps(value)) != used[parameter]:
            raise NotebookError(
                f"{name} was asked for {parameter}={value!r} and ran with {used[parameter]!r}.",
                "Do not assign parameters again after the parameters cell.",
            )


# -- several notebooks -------------------------------------------------------------------------------------------------
def run(
    names: list[str],
    settings: Settings,
    *,
    folder: Path = NOTEBOOKS,
    out: Path = RUN,
    fresh: bool = False,
    prepare: Callable[[profiles.Profile], object] = lambda profile: None,
    console: Console | None = None,
) -> Manifest:
    """Execute notebooks one after another; a failure is reported and the others still run.

    An earlier run in `out` with the same settings that was interrupted is continued: notebooks that are done, and
    whose source has not changed since, are not run again. `fresh` starts over. `prepare` brings what the profile needs,
    once everything asked for is known to exist and before any notebook's time runs.

    Returns
    -------
    The manifest, which is also ``out/run.json``. `exit_code_of` says whether all went well.

    Raises
    ------
    UnknownNameError : an unknown notebook, profile or parameter; nothing was started.
    RecordError : `out` cannot be written.
    """
    console = console or Console()
    entries = find(names, folder)
    profile, reason = profiles.resolve(settings.profile)
    settings = settings.model_copy(update={"profile": profile.name})
    for entry in entries:
        check_parameters(entry.name, read_source(entry), list(settings.parameters))
    check_out_folder(out)
    manifest = Manifest(
        profile=profile.name,
        seed=settings.seed,
        parameters=settings.parameters,
        notebooks={entry.name: source_hash(entry) for entry in entries},
        helpers_hash=helpers_hash(),
    )
    console.print(f"Profile {profile.name}: {reason}. Results go to {out}.", highlight=False)
    prepare(profile)
    _take_over(manifest, None if fresh else read_manifest(out), out, console)
    write_json(manifest, out / RECORD)
    for entry in entries:
        if entry.name in manifest.outcomes:
            continue
        manifest.outcomes[entry.name] = _run_reported(entry, settings, out, console)
        write_json(manifest, out / RECORD)
    manifest.finished = True
    write_json(manifest, out / RECORD)
    return manifest


def _take_over(manifest: Manifest, earlier: Manifest | None, out: Path, console: Console) -> None:
    """Copy from an unfinished earlier run the notebooks that need not run again, and say so."""
    if earlier is None or earlier.finished:
        return
    if not manifest.same_settings(earlier):
        console.print("An earlier run here was interrupted, but with other settings or code: starting over.")
        return
    for name, outcome in earlier.outcomes.items():
        current = outcome.source_hash == manifest.notebooks[name] and (out / name / RESULTS).exists()
        if outcome.status == "done" and current:
            manifest.outcomes[name] = outcome
            console.print(f"{name}: done in the interrupted run, not run again (--fresh runs everything).")


def _run_reported(entry: Entry, settings: Settings, out: Path, console: Console) -> Outcome:
    """Run one notebook, with a progress bar on a terminal, a line elsewhere; a failure becomes an outcome."""
    interactive = console.is_terminal
    if not interactive:
        console.print(f"{entry.name}: running", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    line = TextColumn("[dim]{task.fields[line]}", table_column=rest)
    # Twice a second: the bar must not take the cores that the notebook measures.
    options: dict[str, Any] = {"disable": not interactive, "transient": True, "expand": True, "refresh_per_second": 2}
    with Progress(*columns, line, console=console, **options) as progress:
        task = progress.add_task(entry.name, total=None, line="starting the kernel")

        def on_cell(number: int, total: int, text: str) -> None:
            progress.update(task, completed=number - 1, total=total, line=text.replace("[", "\\["))

        try:
            outcome = run_one(entry, settings, out, on_cell)
        except (NotebookError, RecordError) as error:
            outcome = _failed_outcome(entry, settings, out, error)
    if outcome.error:
        console.print(f"{entry.name}: failed after {outcome.seconds:.1f} s", highlight=False)
        print(outcome.error, file=sys.stderr)
    else:
        peak = outcome.peak_bytes / GIB
        console.print(f"{entry.name}: done in {outcome.seconds:.1f} s, peak {peak:.2f} GiB", highlight=False)
    for note in outcome.notes:
        console.print(f"  note: {note}", markup=False, highlight=False)
    return outcome


def _failed_outcome(entry: Entry, settings: Settings, out: Path, error: CourseError) -> Outcome:
    """The outcome that `run_one` recorded before it raised, or one made here where it could not."""
    with contextlib.suppress(OSError, ValidationError):
        recorded = Outcome.model_validate_json((out / entry.name / RECORD).read_text(encoding="utf-8"))
        # Where the folder could not be written, the record there is an earlier run's.
        if recorded.error == str(error):
            return recorded
    return Outcome(
        name=entry.name,
        status="failed",
        profile=settings.profile,
        seed=settings.seed,
        parameters=settings.parameters,
        source_hash=source_hash(entry),
        notebook=str(out / entry.name / f"{entry.name}.ipynb"),
        error=str(error),
        exit_code=error.exit_code,
    )


def exit_code_of(manifest: Manifest) -> int:
    """0 where every notebook is done, else the first failure's exit code."""
    return next((outcome.exit_code or 1 for outcome in manifest.outcomes.values() if outcome.status != "done"), 0)


def summary_table(manifest: Manifest) -> Table:
    """Status, seconds and peak memory of each notebook beside its profile's budgets."""
    profile = profiles.PROFILES[manifest.profile]
    table = Table(title=f"Run in the profile {manifest.profile}, seed {manifest.seed}", title_justify="left")
    table.add_column("notebook")
    table.add_column("status")
    for heading in ("seconds", "budget s", "peak GiB", "budget GiB"):
        table.add_column(heading, justify="right")
    for name in manifest.notebooks:
        outcome = manifest.outcomes.get(name)
        if outcome is None:
            table.add_row(name, "not run")
            continue
        over = [
            what
            for what, value, budget in (
                ("time", outcome.seconds, profile.notebook_seconds),
                ("memory", outcome.peak_bytes, profile.notebook_bytes),
            )
            if value > budget
        ]
        status = outcome.status + (f", over budget: {' and '.join(over)}" if over else "")
        table.add_row(
            name,
            status,
            f"{outcome.seconds:.1f}",
            f"{profile.notebook_seconds}",
            f"{outcome.peak_bytes / GIB:.2f}",
            f"{profile.notebook_bytes / GIB:.2f}",
        )
    return table
