"""The course's command line. Every deliberate error ends as one sentence with a remedy and its own exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from helpers.errors import CourseError, NotebookError, RecordError, UnknownNameError
from helpers.paths import BUILD, NOTEBOOKS, ROOT

if TYPE_CHECKING:
    from helpers.course.runner import Settings
    from helpers.profile import Profile

app = typer.Typer(
    name="python3 -m helpers",
    help="A reading course on efficient LLM inference in which every paper runs.",
    epilog="Start with: run 00, then lab. PAPERS_DEBUG=1 shows the full trace of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
bench_app = typer.Typer(help="Benchmarks of the course's own instruments.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Names = Annotated[list[str] | None, typer.Argument(metavar="NB", help="Notebooks, as 01 or 01_kv_cache; all without.")]
RUN_FOLDER = BUILD / "run"


def console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=160)


@app.command("list")
def list_notebooks() -> None:
    """List the notebooks and say which are built from their sources as they are now."""
    from helpers.course.build import discover, is_current, read_source

    table = Table(box=None, pad_edge=False)
    for heading in ("notebook", "title", "built"):
        table.add_column(heading)
    for entry in discover(NOTEBOOKS):
        cells = [cell.source for cell in read_source(entry).cells if cell.cell_type == "markdown"]
        title = next((line.lstrip("# ") for cell in cells for line in cell.splitlines() if line.startswith("# ")), "")
        state = "current" if is_current(entry) else "older than its source" if entry.built.exists() else "no"
        table.add_row(entry.name, title.replace("[", "\\["), state)
    console().print(table)


def bring_model(profile: Profile) -> None:
    """Have the bundled model ready before a notebook's time runs, where `profile` uses it; kernels are then offline."""
    from helpers.models import BUNDLED, DRAFT, bundled_draft, bundled_model

    if BUNDLED in (profile.model, profile.small_model):
        bundled_model()
    if DRAFT in (profile.model, profile.small_model):
        bundled_draft()


def settings_of(profile: str, seed: int, assignments: list[str], timeout_s: float | None) -> Settings:
    """A run's settings; ``-p SEED=3`` and ``-p PROFILE=smoke`` say the same as ``--seed`` and ``--profile``.

    Raises
    ------
    UnknownNameError : an assignment is malformed, SEED cannot seed, or OUT is assigned (``--out`` names the folder).
    """
    from helpers.course.parameters import parse_assignments
    from helpers.course.runner import Settings

    asked = parse_assignments(assignments)
    if "OUT" in asked:
        raise UnknownNameError("OUT is set by the runner for each notebook.", "Name the folder of all: --out DIR")
    seed = asked.pop("SEED", seed)
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise UnknownNameError(f"SEED={seed!r} is not an integer from 0 to 2**32 - 1.", "For example: -p SEED=3")
    profile = str(asked.pop("PROFILE", profile))
    return Settings(profile=profile, seed=seed, parameters=asked, timeout_s=timeout_s)


@app.command()
def run(
    notebooks: Names = None,
    profile: Annotated[str, typer.Option(help="smoke, colab, lab, or auto: what this machine allows.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of every workload.")] = 0,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="For executed notebooks and results.", show_default="build/run")
    ] = RUN_FOLDER,
    parameter: Annotated[
        list[str] | None, typer.Option("-p", "--parameter", metavar="NAME=VALUE", help="Set a notebook's parameter.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not continue an interrupted run.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=1, help="Seconds for one cell; the profile decides without.")
    ] = None,
) -> None:
    """Execute notebooks end to end, report time and memory, and print the scoreboard.

    A failed notebook does not stop the others. An interrupted run continues where it stopped when it is started
    again with the same options.
    """
    from helpers.course import report, runner

    screen = console()
    settings = settings_of(profile, seed, parameter or [], timeout)
    manifest = runner.run(notebooks or [], settings, out=out, fresh=fresh, prepare=bring_model, console=screen)
    screen.print()
    done = [name for name, outcome in manifest.outcomes.items() if outcome.status == "done"]
    if done:
        board = report.load(out, done)
        report.write(board, out)
        screen.print(report.scoreboard_table(board), "")
    screen.print(runner.summary_table(manifest))
    screen.print(f"Executed notebooks, results and scoreboard: {out}", soft_wrap=True)
    failed = [name for name, outcome in manifest.outcomes.items() if outcome.status != "done"]
    if failed:
        print(f"{len(failed)} of {len(manifest.notebooks)} notebooks failed: {', '.join(failed)}.", file=sys.stderr)
        raise typer.Exit(runner.exit_code_of(manifest))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with results, searched in depth.")] = RUN_FOLDER,
) -> None:
    """Print the scoreboard of every results file under a folder, and write it there as JSON and Markdown."""
    from helpers.course import report as scoreboard

    board = scoreboard.load(folder)
    scoreboard.write(board, folder)
    console().print(scoreboard.scoreboard_table(board))
    if board.left_out:
        raise RecordError("Left out: " + " ".join(board.left_out), "Delete those files and run their notebooks again.")


@app.command()
def doctor() -> None:
    """Say what this machine can and cannot do, and why."""
    from helpers.course.doctor import show

    show(console())


@app.command()
def lab() -> None:
    """Open JupyterLab on the notebooks, on this machine only, its access token kept."""
    command = [sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={ROOT}"]
    if os.geteuid() == 0:  # in a container; it listens on the loopback interface, and asks for its token
        command.append("--allow-root")
    command += ["--LabApp.default_url=/lab/tree/notebooks"]
    raise typer.Exit(subprocess.run(command, cwd=ROOT).returncode)


@app.command()
def build(
    notebooks: Names = None,
    check: Annotated[
        bool, typer.Option("--check", help="Build nothing; say what is wrong with the notebooks.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Execute also what has not changed.")] = False,
) -> None:
    """Build notebooks from their sources: execute what changed in the profile smoke, keep the outputs."""
    if check:
        from helpers.course.checks import check_all

        findings = check_all(notebooks or [])
        for finding in findings:
            print(finding)
        if findings:
            raise NotebookError(
                f"{len(findings)} things are wrong with the notebooks.",
                "Mend the sources, then: python3 -m helpers build",
            )
        print("Every notebook is current, executed and within its limits.")
        return
    from helpers.course.build import build as build_notebooks
    from helpers.course.runner import RUN
    from helpers.profile import PROFILES

    bring_model(PROFILES["smoke"])
    build_notebooks(notebooks or [], out=BUILD / "notebooks", force=force, earlier=RUN)


@app.command()
def toolbox(name: Annotated[str, typer.Argument(help="See doctor for the names.")]) -> None:
    """Install a toolbox: packages that cannot live in the core environment."""
    from helpers.toolbox import install

    print(f"The toolbox {name} is ready: {install(name)}")


@app.command()
def model() -> None:
    """Fetch, verify and convert the bundled model and its draft, so that everything later runs offline."""
    from helpers.models import bundled_draft, bundled_model

    print(f"The bundled model is ready: {bundled_model()}")
    print(f"Its draft is ready: {bundled_draft()}")


@app.command("train-draft")
def train_draft(
    work: Annotated[
        Path, typer.Option(metavar="DIR", help="State between runs; the same command goes on from it.")
    ] = BUILD / "draft-work",
    out: Annotated[Path, typer.Option(metavar="DIR", help="For the weights, the configuration and the log.")] = BUILD
    / "draft",
) -> None:
    """Train the bundled draft model anew, by distillation from the bundled model (up to 90 minutes on two cores)."""
    from helpers.course.draft_card import model_card
    from helpers.course.draft_training import train_draft as train
    from helpers.files import write_text

    log = train(work, out)
    write_text(out / "README.md", model_card(log, out / "draft.safetensors"))
    for kind, found in log.acceptance.items():
        rates = ", ".join(f"{rate:.3f}" for rate in found.per_position)
        print(f"Held-out greedy acceptance on {kind}, by position: {rates} ({found.attempts_per_position[0]} drafts)")
    print(f"Weights, configuration, log and model card: {out}")


@bench_app.callback()
def bench() -> None:
    """Benchmarks of the course's own instruments."""


@bench_app.command()
def client(
    repeats: Annotated[int, typer.Option(min=3, help="Paired repeats.")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests in one repeat.")] = 12,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 2,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record there too.")
    ] = None,
) -> None:
    """Compare our streaming client with vLLM's own on one server: TTFT, TPOT, E2E and the clients' CPU time."""
    from helpers.course.bench import bench_client
    from helpers.models import bundled_model

    bench_client(
        bundled_model(),
        repeats=repeats,
        n_requests=requests,
        concurrency=concurrency,
        json_path=json_path,
        console=console(),
    )


# -- tests -------------------------------------------------------------------------------------------------------------
SERIAL = "engine or notebook"


def test_steps(paths: list[str]) -> list[tuple[str, list[str]]]:
    """What ``test`` runs, in order: titles and commands. With `paths`, only pytest on them."""
    python = sys.executable
    pytest = [python, "-m", "pytest", "-q", *(paths or ["tests"])]
    tests = [
        ("tests in parallel", [*pytest, "-n", "2", "-m", f"not ({SERIAL})"]),
        ("tests one by one", [*pytest, "-m", SERIAL]),
    ]
    if paths:
        return tests
    places = ["helpers", "tests", "requirements", "notebooks/source"]
    return [
        ("ruff check", [python, "-m", "ruff", "check", *places]),
        ("ruff format", [python, "-m", "ruff", "format", "--check", *places]),
        ("mypy", [python, "-m", "mypy", "helpers"]),
        ("bundled model", [python, "-m", "helpers", "model"]),
        *tests,
        ("notebooks", [python, "-m", "helpers", "build", "--check"]),
    ]


@app.command()
def test(
    paths: Annotated[list[str] | None, typer.Argument(help="Only these tests; everything without.")] = None,
) -> None:
    """Run linters, types, all tests and the notebook checks; the first failure's exit code is the command's."""
    results: list[tuple[str, int, float]] = []
    for title, command in test_steps(paths or []):
        print(f"== {title}", flush=True)
        start = time.monotonic()
        code = subprocess.run(command, cwd=ROOT).returncode
        # pytest says 5 where a selection holds no test: here that means the other selection holds them all.
        empty = code == 5 and "pytest" in command
        results.append((title, 0 if empty else code, time.monotonic() - start))
        if code in (130, -2):
            raise KeyboardInterrupt
    print()
    for title, code, seconds in results:
        print(f"{'ok    ' if code == 0 else 'FAILED'} {title} ({seconds:.0f} s)")
    failed = [(title, code) for title, code, _ in results if code]
    total = sum(seconds for *_, seconds in results)
    if failed:
        print(f"FAILED after {total:.0f} s: {', '.join(title for title, _ in failed)}", file=sys.stderr)
        raise typer.Exit(failed[0][1])
    print(f"All checks and tests passed in {total:.0f} s.")


# -- the way out -------------------------------------------------------------------------------------------------------
def run_cli(arguments: list[str]) -> int:
    """Run one command, return its exit code; a `CourseError` is printed, and traced only with PAPERS_DEBUG."""
    command = typer.main.get_command(app)
    try:
        result = command.main(args=arguments, prog_name="python3 -m helpers", standalone_mode=False)
        if result == 130:
            # typer turns Ctrl-C into this exit code by itself, without a word.
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except CourseError as error:
        if os.environ.get("PAPERS_DEBUG"):
            raise
        print(error, file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print(
            "\nInterrupted. What is done is kept; the same command starts with what was interrupted.",
            file=sys.stderr,
        )
        return 130
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        print(f"{error.format_message()} See: python3 -m helpers --help", file=sys.stderr)
        return error.exit_code
