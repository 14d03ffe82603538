"""Run notebooks end to end with papermill, and lose nothing when one fails.

Papermill's own engine is kept (`helpers.course.kernel` says what is added to it). Every way in which a run can fail ends in
one sentence that names notebook, cell and reason, with the partly executed notebook saved.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from helpers import profile as profiles
from helpers.course.build import Entry, find, read_source, source_hash, write_notebook
from helpers.course.kernel import ENGINE, kernel_environment
from helpers.course.parameters import OWN_PARAMETERS, check_parameters
from helpers.course.records import RECORD, RESULTS, Manifest, Outcome, helpers_hash, read_manifest, write_record
from helpers.course.watch import Watch
from helpers.errors import CourseError, NotebookError, RecordError
from helpers.hardware import memory_limit_bytes
from helpers.paths import BUILD, NOTEBOOKS

RUN = BUILD / "run"
START_TIMEOUT_S = 120
KERNEL_LOG = "kernel.log"
"""What a kernel said outside its cells; kept where the run failed."""
NEEDED_BYTES = 16 * 2**20
"""Room that an output folder must have before a notebook starts."""
GIB = 2**30


class Settings(BaseModel):
    """What a run is asked for. `profile` may be ``auto``; `timeout_s` bounds one cell (None: by the profile)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str = "auto"
    seed: int = 0
    parameters: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float | None = None


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
    profiles.check_possible(profile)
    notebook = read_source(entry)
    check_parameters(entry.name, notebook, list(settings.parameters))
    folder = out.resolve() / entry.name
    check_out_folder(folder)
    for stale in (folder / RESULTS, folder / RECORD, folder / f"{entry.name}.ipynb", folder / KERNEL_LOG):
        stale.unlink(missing_ok=True)
    shutil.rmtree(folder / "figures", ignore_errors=True)
    parameters = {"PROFILE": profile.name, "SEED": settings.seed, "OUT": str(folder), **settings.parameters}
    watch = Watch(on_cell)
    outcome = Outcome(
        name=entry.name,
        status="failed",
        error="it did not end",
        exit_code=1,
        profile=profile.name,
        seed=settings.seed,
        parameters=parameters,
        source_hash=source_hash(entry),
        notebook=str(folder / f"{entry.name}.ipynb"),
    )
    start = time.perf_counter()
    try:
        timeout_s = settings.timeout_s or max(600, 2 * profile.seconds_for(entry.name))
        _execute(entry, notebook, parameters, folder, watch, profile.name, timeout_s)
        check_results(entry.name, folder / RESULTS, parameters)
        outcome.status, outcome.error, outcome.exit_code = "done", None, 0
    except CourseError as error:
        outcome.status, outcome.error, outcome.exit_code = "failed", str(error), error.exit_code
        raise
    except KeyboardInterrupt:
        outcome.status, outcome.error, outcome.exit_code = "not run", "interrupted", 130
        raise
    finally:
        # A kernel may complain of the interrupt that Jupyter sends it before its end: after a good run that is nothing.
        with contextlib.suppress(OSError):
            if outcome.status == "done" or not (folder / KERNEL_LOG).stat().st_size:
                (folder / KERNEL_LOG).unlink()
        outcome.seconds = round(time.perf_counter() - start, 3)
        outcome.peak_bytes, outcome.cells, outcome.notes = watch.peak_bytes, watch.cells, watch.notes
        # Where the disk is full the reason is already on its way up; the record must not replace it.
        with contextlib.suppress(RecordError) if outcome.status != "done" else contextlib.nullcontext():
            write_record(outcome, folder / RECORD)
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
    kernel_log = folder / KERNEL_LOG
    sockets = Path(tempfile.mkdtemp(prefix="papers-"))
    try:
        with _quiet_papermill():
            papermill.execute_notebook(
                notebook,
                target,
                parameters=parameters,
                engine_name=ENGINE,
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
    except Exception as error:
        saved = _save_partial(watch, target)
        raise _explain(entry.name, error, watch, saved, timeout_s, kernel_log) from error
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


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


def _explain(
    name: str, error: BaseException, watch: Watch, saved: Path | None, timeout_s: float, kernel_log: Path
) -> CourseError:
    """One sentence for a failed execution."""
    kept = f"The notebook as far as it came is {saved}." if saved else ""
    spoke = kernel_log.is_file() and kernel_log.stat().st_size
    said = f" What the kernel said: {kernel_log}." if spoke else ""
    where = "{}, cell {} ({!r})".format(name, *watch.current) if watch.current else name
    if isinstance(error, PapermillExecutionError):
        return _explain_cell(where, error, kept)
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return RecordError(
            f"{name}: the executed notebook cannot be written: {error.strerror or error}.",
            f"Free some space, or name another folder: --out DIR. {kept}",
        )
    if watch.current is None and isinstance(error, (RuntimeError, TimeoutError)):
        return NotebookError(
            f"{name}: the kernel did not start, twice: {str(error).strip() or type(error).__name__}.",
            f"Try: {Path(sys.executable).name} -m ipykernel_launcher --version; python3 -m helpers doctor.{said}",
        )
    if isinstance(error, (CellTimeoutError, TimeoutError)):
        return NotebookError(f"{where} ran longer than {timeout_s:g} s.", f"Allow more: --timeout S. {kept}")
    if isinstance(error, DeadKernelError):
        peak, limit = watch.peak_bytes / GIB, memory_limit_bytes() / GIB
        return NotebookError(
            f"{where}: the kernel died. Its processes held {peak:.2f} GiB at most; this machine has {limit:.1f} GiB.",
            f"Often: out of memory. Close other programs, or take a smaller profile. {kept}{said}",
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
    profiles.check_possible(profile)
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
    write_record(manifest, out / RECORD)
    for entry in entries:
        if entry.name in manifest.outcomes:
            continue
        manifest.outcomes[entry.name] = _run_reported(entry, settings, out, console)
        write_record(manifest, out / RECORD)
    manifest.finished = True
    write_record(manifest, out / RECORD)
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
                ("time", outcome.seconds, profile.seconds_for(name)),
                ("memory", outcome.peak_bytes, profile.notebook_bytes),
            )
            if value > budget
        ]
        status = outcome.status + (f", over budget: {' and '.join(over)}" if over else "")
        table.add_row(
            name,
            status,
            f"{outcome.seconds:.1f}",
            f"{profile.seconds_for(name)}",
            f"{outcome.peak_bytes / GIB:.2f}",
            f"{profile.notebook_bytes / GIB:.2f}",
        )
    return table
