"""Where things lie. Standard library only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
NOTEBOOKS = ROOT / "notebooks"
SOURCES = NOTEBOOKS / "source"
FIGURES = ROOT / "figures"
REQUIREMENTS = ROOT / "requirements"
BUILD = ROOT / "build"
VENV = ROOT / ".venv"
TOOLBOXES = ROOT / ".toolboxes"


def cache_dir() -> Path:
    """The folder for converted models; ``PAPERS_CACHE`` overrides the platform's cache folder."""
    if value := os.environ.get("PAPERS_CACHE"):
        return Path(value).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "papers-that-run"
