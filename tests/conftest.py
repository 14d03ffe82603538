"""Fixtures that all tests share: the bundled model, and a notebook's algorithm cells as a namespace."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jupytext
import pytest

from helpers.paths import SOURCES

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The bundled model's folder (converted on first use)."""
    from helpers.models import bundled_model

    return bundled_model()


@cache
def algorithm_source(notebook: str) -> str:
    """The source of a notebook's cells tagged ``algorithm``, in order."""
    cells = jupytext.read(SOURCES / f"{notebook}.py", fmt="py:percent").cells
    chosen = [cell.source for cell in cells if "algorithm" in cell.metadata.get("tags", [])]
    assert chosen, f"{notebook} has no cell tagged algorithm"
    return "\n\n".join(chosen)


def findable(source: str, notebook: str) -> str:
    """A file name under which `inspect` finds this source (Triton reads its kernels that way), new for each call."""
    name = f"<algorithms of {notebook}, {len(linecache.cache)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return name


@pytest.fixture(scope="session")
def load_algorithms() -> Callable[..., SimpleNamespace]:
    """``load_algorithms("01_kv_cache")``, or a broken twin: ``load_algorithms("01_kv_cache", ("old code", "new code"))``.

    Each mutation must change the source exactly once, so that a renamed variable cannot turn a broken twin into a sound one.
    """

    def load(notebook: str, *mutations: tuple[str, str]) -> SimpleNamespace:
        source = algorithm_source(notebook)
        for old, new in mutations:
            assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {notebook}"
            source = source.replace(old, new)
        scope: dict[str, object] = {"__name__": f"algorithms_of_{notebook}"}
        exec(compile(source, findable(source, notebook), "exec", dont_inherit=True), scope)
        return SimpleNamespace(**scope)

    return load
