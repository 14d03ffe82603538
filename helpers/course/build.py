"""From sources to notebooks: ``source/NN_name.py`` (py:percent) is edited, ``NN_name.ipynb`` is built.

A build is deterministic: cell ids come from the cells' own text, and nothing of the machine that executed a
notebook stays in it but its outputs.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from helpers.errors import NotebookError, RecordError, UnknownNameError, suggest
from helpers.files import write_text
from helpers.paths import NOTEBOOKS

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"}
INJECTED = "injected-parameters"
SOURCE_HASH = "source_sha256"
UNREADABLE = (OSError, ValueError, nbformat.reader.NotJSONError, nbformat.validator.NotebookValidationError)


@dataclass(frozen=True)
class Entry:
    """One notebook of a folder.

    `source` is the file that is edited; it is the ``.ipynb`` itself where there is no other (student
    editions).
    """

    name: str
    source: Path
    built: Path

    @property
    def number(self) -> str:
        """The part of the name before its first underscore."""
        return self.name.split("_", 1)[0]


def discover(folder: Path = NOTEBOOKS) -> list[Entry]:
    """All notebooks of `folder` in order: those with a percent source in ``source/``, and built ones without."""
    entries = {
        path.stem: Entry(path.stem, path, folder / f"{path.stem}.ipynb")
        for path in (folder / "source").glob("[0-9]*.py")
        if not path.name.startswith(".")
    }
    for path in folder.glob("[0-9]*.ipynb"):
        entries.setdefault(path.stem, Entry(path.stem, path, path))
    return [entries[name] for name in sorted(entries)]


def find(names: list[str], folder: Path = NOTEBOOKS) -> list[Entry]:
    """The notebooks called `names`, each ``01`` or ``01_kv_cache``; all of them without names.

    Raises
    ------
    UnknownNameError : one of the names is not a notebook of `folder`, or `folder` has none.
    """
    entries = discover(folder)
    if not entries:
        raise UnknownNameError(f"There are no notebooks in {folder}.", "Start from a complete copy of the project.")
    by_name = {entry.number: entry for entry in entries} | {entry.name: entry for entry in entries}
    chosen = {}
    for name in names:
        key = Path(name).name.removesuffix(".ipynb").removesuffix(".py")
        if key not in by_name:
            raise UnknownNameError(f"There is no notebook {name!r}.", suggest(key, [entry.name for entry in entries]))
        chosen[by_name[key].name] = by_name[key]
    return [chosen[name] for name in sorted(chosen)] if names else entries


# -- reading -----------------------------------------------------------------------------------------------------------
def read_source(entry: Entry) -> NotebookNode:
    """The notebook of a source, without outputs; the same text always gives the same notebook.

    Raises
    ------
    NotebookError : the file cannot be read as a notebook.
    """
    import jupytext

    try:
        if entry.source.suffix == ".ipynb":
            raw = nbformat.read(entry.source, as_version=4)
        else:
            raw = jupytext.reads(entry.source.read_text(encoding="utf-8"), fmt="py:percent")
    except UNREADABLE as error:
        raise NotebookError(
            f"{entry.source} cannot be read as a notebook: {_reason(str(error))}", "Mend or restore the file."
        ) from error
    cells = [_clean_cell(cell) for cell in raw.cells if INJECTED not in tags(cell)]
    for cell, identity in zip(cells, cell_ids(cells), strict=True):
        cell["id"] = identity
    metadata = {"kernelspec": KERNELSPEC, "language_info": LANGUAGE}
    return nbformat.from_dict({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


def read_notebook(path: Path) -> NotebookNode:
    """A notebook from an ``.ipynb`` file.

    Raises
    ------
    NotebookError : it is missing or not a notebook.
    """
    try:
        return nbformat.read(path, as_version=4)
    except FileNotFoundError as error:
        raise NotebookError(f"{path} does not exist.", "Build it: python3 -m helpers build") from error
    except UNREADABLE as error:
        raise NotebookError(f"{path} is not a notebook: {_reason(str(error))}", "Build it anew.") from error


def source_hash(entry: Entry) -> str:
    """sha256 over the cells' types, tags and text: layout and outputs of the file do not matter."""
    cells = read_source(entry).cells
    text = "\0".join(f"{cell.cell_type}\0{','.join(tags(cell))}\0{cell.source}" for cell in cells)
    return hashlib.sha256(text.encode()).hexdigest()


def tags(cell: Any) -> list[str]:
    """A cell's tags."""
    return list(cell.get("metadata", {}).get("tags", []))


def first_line(source: str) -> str:
    """The first line of a cell that is not blank, at most 60 characters of it."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return lines[0] if lines and len(lines[0]) <= 60 else lines[0][:57] + "..." if lines else ""


def cell_ids(cells: list[dict[str, Any]]) -> list[str]:
    """An id for each cell from its own type and text, so that moving or adding a cell changes no other cell's id.

    Cells of equal text are told apart by a counter.
    """
    seen: Counter[str] = Counter()
    ids = []
    for cell in cells:
        digest = hashlib.sha256(f"{cell['cell_type']}\n{cell['source']}".encode()).hexdigest()[:12]
        seen[digest] += 1
        ids.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return ids


def _clean_cell(cell: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"tags": tags(cell)} if tags(cell) else {}
    if "solution" in tags(cell):
        metadata["jupyter"] = {"source_hidden": True}
    clean = {"cell_type": cell["cell_type"], "metadata": metadata, "source": cell["source"]}
    if cell["cell_type"] == "code":
        clean |= {"execution_count": None, "outputs": []}
    return clean


def _reason(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason was given"


# -- writing -----------------------------------------------------------------------------------------------------------
def strip_machine(executed: NotebookNode, source: NotebookNode, digest: str) -> NotebookNode:
    """The notebook to keep: `source`'s cells with the outputs of `executed`, and nothing else of the run.

    Timestamps, paths, widget state and the injected parameters go; execution counts start at 1; neighbouring pieces
    of one stream become one output.

    Raises
    ------
    NotebookError : the executed cells are not those of the source.
    """
    ran = [cell for cell in executed.cells if INJECTED not in tags(cell)]
    if [cell.source for cell in ran] != [cell.source for cell in source.cells]:
        raise NotebookError("The executed notebook's cells differ from its source's.", "Build it again with --force.")
    result = copy.deepcopy(source)
    count = 0
    for cell, done in zip(result.cells, ran, strict=True):
        if cell.cell_type != "code":
            continue
        if done.execution_count is not None:
            count += 1
            cell.execution_count = count
        cell.outputs = _clean_outputs(done.outputs, cell.execution_count)
    result.metadata[SOURCE_HASH] = digest
    return result


def _clean_outputs(outputs: list[NotebookNode], count: int | None) -> list[NotebookNode]:
    clean: list[NotebookNode] = []
    for output in copy.deepcopy(outputs):
        if output.output_type == "stream" and clean and clean[-1].get("name") == output.name:
            clean[-1].text += output.text
            continue
        if "data" in output:
            output.data = {kind: value for kind, value in output.data.items() if "jupyter.widget" not in kind}
            output.metadata = {kind: value for kind, value in output.metadata.items() if kind in output.data}
        if output.output_type == "execute_result":
            output.execution_count = count
        clean.append(output)
    return clean


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    """Write an ``.ipynb`` in one step, with sorted keys, so that equal notebooks are equal files.

    Raises
    ------
    RecordError : the file cannot be written.
    """
    text = nbformat.writes(notebook, version=4)
    write_text(path, text if text.endswith("\n") else text + "\n")


def is_current(entry: Entry) -> bool:
    """Whether the built notebook was executed from the source as it is now."""
    try:
        return read_notebook(entry.built).metadata.get(SOURCE_HASH) == source_hash(entry)
    except NotebookError:
        return False


def keep_figures(name: str, made: Path, kept: Path) -> list[Path]:
    """Copy the figures that a run of the notebook `name` left in `made` to `kept`, and drop those it no longer makes.

    A figure is an SVG and, of the same stem, the JSON of the numbers it was drawn from; both start with the notebook's
    number.

    Returns
    -------
    The SVG files now in `kept` that belong to this notebook.

    Raises
    ------
    NotebookError : a figure came without its numbers.
    RecordError : `kept` cannot be written.
    """
    pictures = sorted(made.glob("*.svg"))
    bare = [picture.name for picture in pictures if not picture.with_suffix(".json").exists()]
    if bare:
        raise NotebookError(f"{name} left figures without their numbers: {', '.join(bare)}.", "Use run.figure().")
    number = name.split("_", 1)[0]
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for old in [*kept.glob(f"{number}_*.svg"), *kept.glob(f"{number}_*.json")]:
            old.unlink()
        for file in [file for picture in pictures for file in (picture, picture.with_suffix(".json"))]:
            shutil.copyfile(file, kept / file.name)
    except OSError as error:
        raise RecordError(
            f"The figures cannot be kept in {kept}: {error.strerror or error}.", "Free some space there."
        ) from error
    return [kept / picture.name for picture in pictures]


def build(
    names: list[str],
    *,
    folder: Path = NOTEBOOKS,
    out: Path,
    figures: Path | None = None,
    force: bool = False,
    earlier: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Execute, in the profile ``smoke``, the notebooks whose source changed, and write them with their outputs.

    Parameters
    ----------
    names : which; all without names.
    out : folder for the run's own records.
    figures : where figures are kept; None is ``figures`` beside `folder`.
    force : execute them whether they changed or not.
    earlier : folder of a run; a notebook that it executed from the same source with the same helpers is taken from there.

    Returns
    -------
    The files written.

    Raises
    ------
    NotebookError : a notebook failed; those before it are written, and its old ``.ipynb`` stays.
    RecordError : a file cannot be written.
    """
    from helpers.course.records import finished_run
    from helpers.course.runner import Settings, run_one

    written = []
    for entry in find(names, folder):
        if entry.source == entry.built:
            continue
        if not force and is_current(entry):
            say(f"{entry.name}: unchanged")
            continue
        digest = source_hash(entry)
        outcome = None if force or earlier is None else finished_run(entry.name, digest, earlier)
        outcome = outcome or run_one(entry, Settings(profile="smoke"), out)
        executed = Path(outcome.notebook)
        keep_figures(entry.name, executed.parent / "figures", figures or folder.parent / "figures")
        write_notebook(strip_machine(read_notebook(executed), read_source(entry), digest), entry.built)
        say(f"{entry.name}: built in {outcome.seconds:.0f} s, peak {outcome.peak_bytes / 2**30:.2f} GiB")
        written.append(entry.built)
    return written
