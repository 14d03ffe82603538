"""One notebook's run: what it records, what it refuses, and that its results survive a full or read-only disk."""

from __future__ import annotations

import json

import pandas as pd
import pytest

import helpers
from helpers import plots
from helpers.course import session
from helpers.errors import EnvironmentSetupError, RecordError, UnknownNameError


@pytest.fixture
def run(tmp_path):
    return helpers.start("01_kv_cache", "smoke", 3, str(tmp_path / "out"))


def test_results_hold_what_was_predicted_measured_claimed_and_checked(run):
    run.predict(bytes_per_token=20_000)
    run.measured("bytes_per_token", 23_040, "B")
    run.claim("mqa-cache", True, "a factor of 9")
    run.claim("gqa-cache", None, "", reason="no time")
    run.check("01.1", ...)
    run.finish()
    results = json.loads((run.out / "results.json").read_text())
    assert results["predictions"] == [{"name": "bytes_per_token", "predicted": 20_000.0, "measured": 23_040.0}]
    assert [c["verdict"] for c in results["claims"]] == ["reproduced", "not run here"]
    assert results["exercises"]["01.1"]["state"] == "not attempted"
    assert results["parameters"] == {"PROFILE": "smoke", "SEED": 3, "OUT": str(run.out)}
    assert results["environment"]["cores"] >= 1 and results["schema"] == 1


def test_a_prediction_after_the_measurement_is_refused(run):
    run.measured("speed", 3.0)
    with pytest.raises(RecordError, match="measured before it was predicted"):
        run.predict(speed=3.0)


def test_judging_a_claim_again_replaces_the_old_verdict(run):
    run.claim("mqa-cache", False, "1")
    run.claim("mqa-cache", True, "9")
    assert run.claims()["verdict"].tolist() == ["reproduced"]


def test_a_figure_is_stamped_and_its_numbers_lie_beside_it(run):
    frame = pd.DataFrame({"x": [1, 2, 4], "y": [1.0, 2.0, 3.0]})
    figure = plots.lines(frame, x="x", y="y", title="t", xlabel="x", ylabel="y")
    run.figure(figure, "growth", frame, n=3)
    svg = (run.out / "figures" / "01_growth.svg").read_text()
    numbers = json.loads((run.out / "figures" / "01_growth.json").read_text())
    assert "profile smoke" in svg and numbers["rows"][2] == {"x": 4, "y": 3.0} and "n=3" in numbers["stamp"]


def test_results_that_cannot_be_written_say_where_and_what_to_do_and_leave_the_old_ones(run, monkeypatch):
    run.finish()
    before = (run.out / "results.json").read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session.os, "fsync", full)
    with pytest.raises(RecordError, match="No space left on device"):
        run.finish()
    assert (run.out / "results.json").read_text() == before
    assert [p.name for p in run.out.iterdir() if p.is_file()] == ["results.json"]


def test_not_a_number_never_reaches_a_results_file(run):
    with pytest.raises(RecordError, match="'speed' is nan"):
        run.measured("speed", float("nan"))
    run.finish()
    assert "NaN" not in (run.out / "results.json").read_text()


def test_an_unknown_profile_and_a_stale_package_end_in_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(UnknownNameError, match="Did you mean 'colab'"):
        helpers.start("01_kv_cache", "collab", 0, str(tmp_path))
    monkeypatch.setattr(session, "restart_needed", lambda: ["numpy 1.0 is loaded, 2.0 is installed"])
    with pytest.raises(EnvironmentSetupError, match="Restart the session"):
        helpers.start("01_kv_cache", "smoke", 0, str(tmp_path))


def test_errors_show_as_a_sentence_in_jupyter_and_survive_pickling():
    import pickle

    error = RecordError("It broke.", "Mend it.")
    assert error._render_traceback_() == ["RecordError: It broke.", "  Remedy: Mend it."]
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.exit_code == error.exit_code
