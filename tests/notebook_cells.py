"""Cells of the notebooks' sources by tag, and what they define."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from helpers.course.build import find, read_source, tags


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
