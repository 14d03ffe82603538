"""Every notebook runs end to end in the smoke profile, and what it found is whole.

Where ``build/run`` holds a finished run of exactly this source and these helpers, that run is judged; otherwise the
notebook is executed now.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.claims import claim
from helpers.course import runner
from helpers.course.build import Entry, discover, source_hash
from helpers.course.records import RESULTS, Outcome, finished_run
from helpers.exercises import known
from helpers.profile import PROFILES

ENTRIES = discover()
TOLERATED_SECONDS = 5
"""A notebook that takes this many times its budget has lost its size, whatever machine it runs on."""


@pytest.fixture(scope="module", params=ENTRIES, ids=lambda entry: entry.name)
def executed(request, tmp_path_factory) -> tuple[Entry, Outcome, dict]:
    """A notebook, how its run ended, and its results."""
    entry: Entry = request.param
    outcome, folder = finished_run(entry.name, source_hash(entry), runner.RUN), runner.RUN
    if outcome is None:
        folder = tmp_path_factory.mktemp("run")
        outcome = runner.run_one(entry, runner.Settings(profile="smoke"), folder)
    results = json.loads((folder / entry.name / RESULTS).read_text())
    return entry, outcome, results


@pytest.mark.notebook
@pytest.mark.timeout(1800)
def test_it_ends_well_and_within_its_memory(executed):
    _, outcome, _ = executed
    smoke = PROFILES["smoke"]
    assert outcome.status == "done" and outcome.error is None
    assert outcome.peak_bytes <= smoke.notebook_bytes
    assert outcome.seconds <= TOLERATED_SECONDS * smoke.seconds_for(outcome.name)


@pytest.mark.notebook
def test_every_claim_holds_here_but_those_known_not_to(executed):
    entry, _, results = executed
    assert results["claims"], f"{entry.name} judges no claim"
    failed = {row["id"]: row["ours"] for row in results["claims"] if row["verdict"] == "not reproduced"}
    expected = {row["id"]: claim(row["id"]).expected for row in results["claims"]}
    assert {name for name in failed if expected[name] != "either"} == {
        n for n, e in expected.items() if e == "fails"
    }, failed


@pytest.mark.notebook
def test_every_exercise_passes_with_the_solutions_in_place(executed):
    entry, _, results = executed
    states = {key: value["state"] for key, value in results["exercises"].items()}
    assert states == dict.fromkeys(known(entry.name[:2]), "pass")


@pytest.mark.notebook
def test_every_prediction_met_a_measurement_and_every_card_has_quality(executed):
    _, _, results = executed
    assert results["predictions"] and all(row["measured"] is not None for row in results["predictions"])
    assert results["cards"] and all(card["quality"] for card in results["cards"])


@pytest.mark.notebook
def test_figures_have_their_numbers_beside_them(executed):
    entry, outcome, _ = executed
    figures = Path(outcome.notebook).parent / "figures"
    drawn = {path.stem for path in figures.glob("*.svg")}
    assert drawn and drawn == {path.stem for path in figures.glob("*.json")}
    assert all(name.startswith(entry.name[:2]) for name in drawn)
