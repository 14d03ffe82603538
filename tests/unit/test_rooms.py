"""The rooms of `helpers`: data flows one way, every public thing is documented, and nothing heavy is imported early."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from helpers.paths import ROOT

ROOMS = [
    {"errors", "paths"},
    {"files"},
    {"bootstrap"},
    {"hardware"},
    {"profile"},
    {"memory"},
    {"models", "draft", "kv_adapter", "packed_linear", "quantize", "corpora", "paged_kv"},
    {"workload", "stats", "trace", "acceptance"},
    {"engines", "toolbox", "toolboxes", "quant_kernels", "peers", "kv_links", "pd_servers"},
    {"ledgers"},
    {"quality", "choice_tasks"},
    {"claims"},
    {"plots"},
    {"exercises"},
    {"course"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ROOMS) for name in names}
FILES = sorted((ROOT / "helpers").rglob("*.py"))


def room_of(path) -> str:
    relative = path.relative_to(ROOT / "helpers")
    return relative.parts[0].removesuffix(".py")


def imported_rooms(tree: ast.Module) -> set[str]:
    """Every room of `helpers` that a file imports, at its top or inside a function, but not for type checking only."""
    found = set()
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "helpers":
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("helpers.")}
    return found - {"__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_rooms_to_its_left(path):
    room = room_of(path)
    if room == "__init__":
        return
    assert room in RANK, f"{room} has no place in the order of rooms"
    for other in imported_rooms(ast.parse(path.read_text())):
        assert other == room or RANK[other] <= RANK[room], f"{room} must not import {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_importing_the_package_imports_nothing_heavy_and_touches_no_gpu():
    code = (
        "import sys, helpers, helpers.errors, helpers.paths, helpers.bootstrap\n"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_no_file_of_the_project_names_a_folder_of_one_machine():
    skip = {".venv", "build", ".git", ".toolboxes", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
    bad = []
    for path in ROOT.rglob("*"):
        relative = path.relative_to(ROOT)
        if (
            not path.is_file()
            or skip & set(relative.parts)
            or path.suffix not in {".py", ".md", ".toml", ".txt", ".ipynb"}
        ):
            continue
        if relative.parts[0] == "tests":
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        bad += [(str(relative), word) for word in ("/work/", "/root/", "/opt/") if word in text]
    # The check that looks for such paths in outputs has to name them.
    assert [b for b in bad if b[0] != "helpers/course/checks.py"] == []
