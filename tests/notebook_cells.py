"""Cells of the notebooks' sources by tag, and what they define."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from helpers.course.build import find, read_source, tags
from helpers.exercises import ExerciseResult


@cache
def tagged(notebook: str, *wanted: str) -> tuple[str, ...]:
    """The source of each cell of a notebook that bears one of the tags `wanted`, in order."""
    (entry,) = find([notebook])
    return tuple(cell.source for cell in read_source(entry).cells if set(wanted) & set(tags(cell)))


def define(notebook: str, sources: Iterable[str]) -> dict[str, Any]:
    """What `sources` define, executed one after another. `inspect` finds them (Triton reads its kernels that way)."""
    scope: dict[str, Any] = {"__name__": f"cells_of_{notebook}"}
    for source in sources:
        name = f"<cells of {notebook}, {len(linecache.cache)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec", dont_inherit=True), scope)
    return scope


@cache
def answers(notebook: str, tag: str) -> dict[str, Any]:
    """What a notebook's exercise cells (`tag` ``exercise``) define beside its algorithms, or, over them, its solutions."""
    return define(notebook, tagged(notebook, "algorithm", "exercise", tag))


def checked_functions(notebook: str) -> dict[str, str]:
    """The function that the notebook hands to each exercise's check, by the exercise's number."""
    cells = "\n".join(tagged(notebook, "check"))
    return dict(re.findall(r'^run\.check\("(\d\d\.\d+)", (\w+)\)$', cells, re.MULTILINE))


def edited(notebook: str, number: str, *edits: tuple[str, str]) -> Any:
    """The solution of an exercise with pieces of its source replaced, each of which must stand in it exactly once."""
    function = checked_functions(notebook)[number]
    (source,) = (source for source in tagged(notebook, "solution") if f"def {function}(" in source)
    source += "\n"
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the solution of {number}"
        source = source.replace(old, new)
    scope: dict[str, Any] = {}
    exec(f"import math\nimport numpy as np\nimport torch\n{source}", scope)
    return scope[function]


def assert_names_what_broke(result: ExerciseResult, words: str) -> None:
    """A failure that says the property (in which `words` stand), the input, what was expected, and what came."""
    assert result.state == "fail", result
    names = ("First broken property: ", "  input:    ", "  expected: ", "  got:      ")
    lines = result.message.split("\n")
    assert len(lines) == len(names), result.message
    for line, name in zip(lines, names, strict=True):
        assert line.startswith(name) and line != name, result.message
    assert words in lines[0], result.message
