"""A folder of tiny notebooks, made for one test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

PARAMETERS = '# %% tags=["parameters"]\nPROFILE = "auto"\nSEED = 0\nOUT = None\n'
FINISH = """
# %%
import json
import pathlib

results = {
    "schema": 1,
    "notebook": "tiny",
    "profile": {"name": PROFILE},
    "parameters": {"PROFILE": PROFILE, "SEED": SEED, "OUT": OUT},
    "claims": [],
}
pathlib.Path(OUT, "results.json").write_text(json.dumps(results))
"""

AddNotebook = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty notebooks folder."""
    (tmp_path / "notebooks" / "source").mkdir(parents=True)
    return tmp_path / "notebooks"


@pytest.fixture
def add(folder: Path) -> AddNotebook:
    """``add("01_name", "body")`` writes a source whose middle cell is `body`."""

    def write(name: str, body: str = "x = 1", *, parameters: str = PARAMETERS, finish: str = FINISH) -> Path:
        path = folder / "source" / f"{name}.py"
        path.write_text(f"# %% [markdown]\n# # {name}\n\n{parameters}\n# %%\n{body}\n{finish}", encoding="utf-8")
        return path

    return write
