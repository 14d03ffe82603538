"""What a built notebook must be: current, executed, free of errors, small, and free of traces of one machine.

Each check takes a notebook and returns what it found, in words; an empty list is good. `check_notebook` runs them all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from helpers.course.build import Entry, find, read_notebook, read_source, tags
from helpers.course.parameters import check_parameters
from helpers.errors import CourseError
from helpers.paths import NOTEBOOKS, ROOT

MAX_NOTEBOOK_BYTES = 1_000_000
MAX_OUTPUT_BYTES = 200_000
MAX_ALGORITHM_LINES = 40
MAX_CELL_LINES = 45
MACHINE_PATH = re.compile(
    r"(?<![\w.:/])/(?:home|Users|root|tmp|var/folders|private|work|workspace|content|mnt|opt)/[^\s'\"<>,)]+"
)
PROGRESS = re.compile(r"\r|\d+%\|[^|\n]*\||\d(?:it/s|s/it)\b|[━╸]{5,}")


@dataclass(frozen=True)
class Finding:
    """One thing wrong with a notebook. `cell` counts from 1; None is the notebook as a whole."""

    notebook: str
    cell: int | None
    what: str

    def __str__(self) -> str:
        place = self.notebook if self.cell is None else f"{self.notebook}, cell {self.cell}"
        return f"{place}: {self.what}"


CellFindings = list[tuple[int | None, str]]


def text_of(output: NotebookNode) -> str:
    """All text of one output: a stream, an error, or the textual forms of a displayed object (SVG included)."""
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return "\n".join([output.ename, output.evalue, *output.traceback])
    data = output.get("data", {})
    return "\n".join(_joined(value) for kind, value in data.items() if kind.startswith("text/") or "svg" in kind)


def output_bytes(output: NotebookNode) -> int:
    """Bytes of one output's content, pictures in base64 as they are stored."""
    data = output.get("data", {})
    return len(text_of(output).encode()) + sum(
        len(_joined(value).encode())
        for kind, value in data.items()
        if not kind.startswith("text/") and "svg" not in kind
    )


def _joined(value: object) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else str(value)


def _code_cells(notebook: NotebookNode) -> list[tuple[int, NotebookNode]]:
    return [(number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"]


# -- the source --------------------------------------------------------------------------------------------------------
def required_parts(notebook: NotebookNode) -> CellFindings:
    """One parameters cell first, ``helpers.start`` in the second code cell, ``run.finish()`` in the last."""
    cells = _code_cells(notebook)
    if not cells:
        return [(None, "has no code cells")]
    found: CellFindings = []
    tagged = [number for number, cell in cells if "parameters" in tags(cell)]
    if tagged != [cells[0][0]]:
        found.append(
            (None, f"its first code cell, and no other, must be tagged 'parameters' (tagged: {tagged or 'none'})")
        )
    if len(cells) < 2 or not _calls(cells[1][1].source, "helpers.start"):
        found.append((None, "its second code cell must call helpers.start"))
    if not _calls(cells[-1][1].source, "run.finish"):
        found.append((cells[-1][0], "the last code cell must call run.finish()"))
    return found


def _calls(source: str, function: str) -> bool:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) == function for node in ast.walk(tree))


def parameters_are_read(notebook: NotebookNode) -> CellFindings:
    """The parameters cell declares PROFILE, SEED and OUT, and a later cell reads every parameter."""
    try:
        check_parameters("it", notebook, [])
    except CourseError as error:
        return [(None, error.symptom)]
    return []


def cell_lengths(notebook: NotebookNode) -> CellFindings:
    """Code cells are short: an algorithm fits on one screen."""
    found: CellFindings = []
    for number, cell in _code_cells(notebook):
        limit = MAX_ALGORITHM_LINES if "algorithm" in tags(cell) else MAX_CELL_LINES
        lines = len(cell.source.splitlines())
        if lines > limit:
            found.append((number, f"{lines} lines of code; the limit for this kind of cell is {limit}"))
    return found


# -- the executed notebook ---------------------------------------------------------------------------------------------
def drift(built: NotebookNode, source: NotebookNode) -> CellFindings:
    """The built cells are the source's cells: same order, type, tags, text and ids."""
    mine, theirs = ([(c.cell_type, c.source, tags(c), c.id) for c in notebook.cells] for notebook in (built, source))
    for number, (a, b) in enumerate(zip(mine, theirs, strict=False), 1):
        if a != b:
            what = next(w for w, x, y in zip(("type", "text", "tags", "id"), a, b, strict=True) if x != y)
            return [(number, f"its {what} differs from the source; build it again")]
    if len(mine) != len(theirs):
        return [(None, f"has {len(mine)} cells, its source has {len(theirs)}; build it again")]
    return []


def everything_executed(notebook: NotebookNode) -> CellFindings:
    """Every code cell that is not empty was executed, in order."""
    counts = [(number, cell.execution_count) for number, cell in _code_cells(notebook) if cell.source.strip()]
    found: CellFindings = [(number, "was not executed") for number, count in counts if count is None]
    if not found and [count for _, count in counts] != list(range(1, len(counts) + 1)):
        found.append((None, "its cells were not executed once, from first to last"))
    return found


def no_error_outputs(notebook: NotebookNode) -> CellFindings:
    """No cell's output is an error."""
    return [
        (number, f"its output is an error: {output.ename}")
        for number, cell in _code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "error"
    ]


def output_sizes(notebook: NotebookNode) -> CellFindings:
    """No output is larger than `MAX_OUTPUT_BYTES`."""
    return [
        (number, f"one output has {size / 1000:.0f} kB; the limit is {MAX_OUTPUT_BYTES / 1000:.0f}")
        for number, cell in _code_cells(notebook)
        for output in cell.outputs
        if (size := output_bytes(output)) > MAX_OUTPUT_BYTES
    ]


def no_progress_residue(notebook: NotebookNode) -> CellFindings:
    """No output holds carriage returns or a saved progress bar."""
    return _outputs_matching(notebook, PROGRESS, "holds the residue of a progress bar")


def no_machine_paths(notebook: NotebookNode) -> CellFindings:
    """No output names a folder of the machine that executed the notebook."""
    own = re.compile("|".join([MACHINE_PATH.pattern, re.escape(f"{ROOT}/"), re.escape(f"{Path.home()}/")]))
    return _outputs_matching(notebook, own, "names a path of one machine")


def _outputs_matching(notebook: NotebookNode, pattern: re.Pattern[str], what: str) -> CellFindings:
    found: CellFindings = []
    for number, cell in _code_cells(notebook):
        for output in cell.outputs:
            if match := pattern.search(text_of(output)):
                found.append((number, f"an output {what}: {match.group(0)[:60]!r}"))
                break
    return found


SOURCE_CHECKS: tuple[Callable[[NotebookNode], CellFindings], ...] = (required_parts, parameters_are_read, cell_lengths)
BUILT_CHECKS: tuple[Callable[[NotebookNode], CellFindings], ...] = (
    everything_executed,
    no_error_outputs,
    output_sizes,
    no_progress_residue,
    no_machine_paths,
)


def check_notebook(entry: Entry) -> list[Finding]:
    """Everything wrong with one notebook: its source, its built form, and whether the two agree."""
    try:
        source = read_source(entry)
        found = [item for check in SOURCE_CHECKS for item in check(source)]
        built = read_notebook(entry.built)
    except CourseError as error:
        return [Finding(entry.name, None, error.symptom)]
    found += drift(built, source)
    found += [item for check in BUILT_CHECKS for item in check(built)]
    size = entry.built.stat().st_size
    if size > MAX_NOTEBOOK_BYTES:
        found.append((None, f"has {size / 1e6:.2f} MB; the limit is {MAX_NOTEBOOK_BYTES / 1e6:.0f}"))
    return [Finding(entry.name, cell, what) for cell, what in found]


def check_all(names: list[str], folder: Path = NOTEBOOKS) -> list[Finding]:
    """`check_notebook` for the notebooks called `names`, or all of them."""
    return [finding for entry in find(names, folder) for finding in check_notebook(entry)]
