"""One notebook's run, from ``run = helpers.start(...)`` to ``run.finish()``.

The run knows the profile, collects predictions, measurements, cards, claims and exercises, and writes them as
``results.json``: the only thing that scoreboards, reports and comparisons read.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from matplotlib.figure import Figure

from helpers import plots
from helpers.claims import ClaimResult, claim, judge
from helpers.errors import EnvironmentSetupError, RecordError
from helpers.exercises import ExerciseResult, check
from helpers.files import write_text
from helpers.hardware import Hardware, describe, restart_needed
from helpers.ledgers import LedgerCard, cards_frame
from helpers.paths import BUILD
from helpers.profile import Profile, check_possible, resolve

SCHEMA = 1
T = TypeVar("T")


class Run:
    """See the module. Made by `start`."""

    def __init__(
        self, notebook: str, profile: Profile, why: str, seed: int, out: Path, parameters: dict[str, Any]
    ) -> None:
        self.notebook = notebook
        self.profile = profile
        self.seed = seed
        self.out = out
        self.hardware: Hardware = describe()
        self.dtype, self.dtype_reason = profile.resolved_dtype(self.hardware)
        self._why = why
        self._parameters = parameters
        self._started = time.monotonic()
        self._predictions: dict[str, dict[str, Any]] = {}
        self._measurements: dict[str, dict[str, Any]] = {}
        self._cards: list[LedgerCard] = []
        self._claims: list[ClaimResult] = []
        self._exercises: dict[str, ExerciseResult] = {}
        self._finished = False

    # -- what the run knows ---------------------------------------------------------------------------------------
    @property
    def stamp(self) -> str:
        """Profile, device and commit, for a figure."""
        return f"profile {self.profile.name}, {self.hardware.label}, commit {self.hardware.commit or 'unknown'}"

    def _repr_html_(self) -> str:
        rows = {
            "notebook": self.notebook,
            "profile": f"{self.profile.name} ({self._why})",
            "model": self.profile.model,
            "dtype": f"{self.dtype} ({self.dtype_reason})",
            "sizes": f"contexts {', '.join(map(str, self.profile.contexts))}; {self.profile.max_tokens} output tokens; "
            f"max_model_len {self.profile.max_model_len}",
            "machine": self.hardware.label,
            "seed": str(self.seed),
        }
        return pd.DataFrame(rows.items(), columns=["", " "]).to_html(index=False, header=False, border=0)

    def progress(self, items: Iterable[T], text: str = "") -> Iterator[T]:
        """Iterate with a progress bar where someone is watching, silently under papermill."""
        if os.environ.get("PAPERMILL_RUN"):
            yield from items
            return
        from tqdm.auto import tqdm

        yield from tqdm(items, desc=text)

    # -- predictions ----------------------------------------------------------------------------------------------
    def predict(self, **values: float) -> None:
        """Write predictions down before measuring: ``run.predict(kv_bytes_per_token=20_000)``."""
        for name, value in values.items():
            if name in self._measurements:
                raise RecordError(
                    f"{name!r} was measured before it was predicted.", "Restart the notebook and predict first."
                )
            self._predictions[name] = {"name": name, "predicted": float(value)}

    def measured(self, name: str, value: float, unit: str = "") -> float:
        """Record a measurement under `name`, which may have been predicted; returns the value.

        Raises
        ------
        RecordError : the value is not a finite number.
        """
        if not math.isfinite(value):
            raise RecordError(
                f"The measurement {name!r} is {value}, not a number.", "Look at what it was computed from."
            )
        self._measurements[name] = {"value": float(value), "unit": unit}
        return value

    def predictions(self) -> pd.DataFrame:
        """Predicted against measured: columns name, predicted, measured, unit, ratio."""
        rows = []
        for name, prediction in self._predictions.items():
            got = self._measurements.get(name)
            predicted = prediction["predicted"]
            rows.append(
                {
                    "name": name.replace("_", " "),
                    "predicted": predicted,
                    "measured": got["value"] if got else None,
                    "unit": got["unit"] if got else "",
                    "predicted / measured": predicted / got["value"] if got and got["value"] else None,
                }
            )
        return pd.DataFrame(rows)

    # -- results --------------------------------------------------------------------------------------------------
    def card(self, card: LedgerCard) -> LedgerCard:
        """Keep a ledger card in the results and return it."""
        self._cards.append(card)
        return card

    def cards(self) -> pd.DataFrame:
        """The run's cards side by side."""
        return cards_frame(self._cards)

    def claim(self, claim_id: str, passed: bool | None, ours: str, *, reason: str = "") -> ClaimResult:
        """Judge a paper's claim by what was measured here; `passed` is None where the check was not run."""
        result = judge(
            claim(claim_id),
            None if passed is None else bool(passed),
            ours,
            reason=reason,
            hardware=self.hardware.label,
            date=datetime.date.today().isoformat(),
        )
        self._claims = [old for old in self._claims if old.claim.id != claim_id] + [result]
        return result

    def claims(self) -> pd.DataFrame:
        """This notebook's claims with their verdicts."""
        columns = ["paper", "quoted", "setting", "ours", "verdict"]
        return pd.DataFrame([result.row() for result in self._claims])[columns]

    def check(self, exercise_id: str, answer: Any) -> ExerciseResult:
        """Check an exercise and keep its state."""
        result = check(exercise_id, answer)
        self._exercises[exercise_id] = result
        return result

    def figure(self, figure: Figure, name: str, data: Mapping[str, Any] | pd.DataFrame, n: int | None = None) -> Figure:
        """Stamp a figure, save it (SVG and the JSON of its numbers) and return it for display."""
        if isinstance(data, pd.DataFrame):
            data = {"rows": json.loads(data.to_json(orient="records"))}
        text = self.stamp + (f", n={n}" if n is not None else "")
        plots.save(figure, data, self.out / "figures", f"{self.notebook[:2]}_{name}", text)
        plots.plt.close(figure)
        return figure

    # -- the end --------------------------------------------------------------------------------------------------
    def results(self) -> dict[str, Any]:
        """Everything that the run found, as it is written to ``results.json``."""
        return {
            "schema": SCHEMA,
            "notebook": self.notebook,
            "profile": self.profile.model_dump(mode="json"),
            "parameters": self._parameters,
            "environment": {**self.hardware.model_dump(mode="json"), "dtype": self.dtype},
            "seconds": round(time.monotonic() - self._started, 2),
            "predictions": [
                {**prediction, "measured": self._measurements.get(name, {}).get("value")}
                for name, prediction in self._predictions.items()
            ],
            "measurements": self._measurements,
            "cards": [card.model_dump(mode="json") for card in self._cards],
            "claims": [result.row() for result in self._claims],
            "exercises": {key: value.model_dump(mode="json") for key, value in sorted(self._exercises.items())},
        }

    def finish(self) -> pd.DataFrame:
        """Write ``results.json`` in one step and return a summary of the run."""
        write_text(self.out / "results.json", json.dumps(self.results(), indent=1, allow_nan=False) + "\n")
        self._finished = True
        states = [result.state for result in self._exercises.values()]
        verdicts = [result.verdict for result in self._claims]
        rows = [
            ("seconds", f"{time.monotonic() - self._started:.0f}"),
            ("cards", str(len(self._cards))),
            ("claims", ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)) or "none"),
            ("exercises", ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)) or "none"),
            ("results", "results.json"),
        ]
        return pd.DataFrame(rows, columns=["run", self.notebook])


def start(notebook: str, profile: str = "auto", seed: int = 0, out: str | None = None, **parameters: Any) -> Run:
    """Begin a notebook's run.

    Parameters
    ----------
    notebook : the notebook's name, such as ``"01_kv_cache"``.
    profile : ``auto``, or a name from `helpers.profile.PROFILES`.
    seed : seeds Python, NumPy and PyTorch.
    out : folder for ``results.json`` and figures; None is ``build/<notebook>``.
    parameters : the notebook's further parameters, recorded as they are.

    Raises
    ------
    UnknownNameError : there is no such profile.
    EnvironmentSetupError : the profile needs a GPU and there is none; or an installed package differs from the one already
        loaded (restart the session).
    """
    if stale := restart_needed():
        raise EnvironmentSetupError("; ".join(stale) + ".", "Restart the session (kernel), then run from the top.")
    import random

    import numpy as np
    import torch

    chosen, why = resolve(profile)
    check_possible(chosen)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_grad_enabled(False)
    plots.use_style()
    pd.set_option("display.max_colwidth", 300)
    if "IPython" in sys.modules:
        from IPython import get_ipython

        shell = get_ipython()
        if shell is not None:
            shell.run_line_magic("matplotlib", "inline")
            shell.run_line_magic("config", "InlineBackend.figure_formats = ['svg']")
    folder = Path(out) if out else BUILD / notebook
    return Run(notebook, chosen, why, seed, folder, {"PROFILE": profile, "SEED": seed, "OUT": out, **parameters})
