"""A notebook's parameters: which it declares, which it reads, and what may be asked of it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from nbformat import NotebookNode

from helpers.course.build import first_line, tags
from helpers.errors import NotebookError, UnknownNameError, suggest

OWN_PARAMETERS = ("PROFILE", "SEED", "OUT")
"""Parameters of every notebook."""


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
