"""Fixtures that all tests share: the bundled model, and a notebook's algorithm cells as a namespace."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from notebook_cells import define, tagged

from helpers.hardware import PATIENT_THREADS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for name, value in PATIENT_THREADS.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The bundled model's folder (converted on first use)."""
    from helpers.models import bundled_model

    return bundled_model()


@pytest.fixture(scope="session")
def load_algorithms() -> Callable[..., SimpleNamespace]:
    """``load_algorithms("01_kv_cache")``, or a broken twin: ``load_algorithms("01_kv_cache", ("old code", "new code"))``.

    Each mutation must change the source exactly once, so that a renamed variable cannot turn a broken twin into a sound one.
    """

    def load(notebook: str, *mutations: tuple[str, str]) -> SimpleNamespace:
        source = "\n\n".join(tagged(notebook, "algorithm"))
        assert source, f"{notebook} has no cell tagged algorithm"
        for old, new in mutations:
            assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {notebook}"
            source = source.replace(old, new)
        return SimpleNamespace(**define(notebook, [source]))

    return load
