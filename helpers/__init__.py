"""The measuring half of the course: workloads, engines, traces, ledgers, claims and plots.

No paper's algorithm lives here; those are written in the notebook that teaches them. Data flows one way through the
rooms, each of which imports only rooms to its left::

    profile, hardware -> models, corpora -> workload -> trace -> engines, toolbox -> ledgers -> claims -> plots -> course

This module imports nothing heavy, so that ``python -m helpers`` also starts on an interpreter that has no packages yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["start"]

if TYPE_CHECKING:
    from helpers.course.session import start


def __getattr__(name: str) -> Any:
    if name == "start":
        import warnings

        # Progress is a line of text here; tqdm need not ask for notebook widgets.
        warnings.filterwarnings("ignore", message="IProgress not found")
        from helpers.course.session import start

        return start
    raise AttributeError(f"module 'helpers' has no attribute {name!r}")
