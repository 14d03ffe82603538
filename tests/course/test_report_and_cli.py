"""The scoreboard, the doctor, and the command line with its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from helpers import cli
from helpers.course import doctor, report
from helpers.errors import ModelError, RecordError
from helpers.hardware import Gpu, describe
from helpers.paths import ROOT


def results(folder: Path, name: str, *verdicts: str, **more: object) -> Path:
    """Write a results file with one claim for each verdict."""
    claims = [
        {
            "id": f"{name}-{n}",
            "paper": "A [2023]",
            "quoted": "2-4x",
            "setting": "A100 | fp16",
            "ours": "1.9x",
            "verdict": v,
        }
        for n, v in enumerate(verdicts)
    ]
    content = {"schema": 1, "notebook": name, "profile": {"name": "smoke"}, "parameters": {}, "claims": claims, **more}
    (folder / name).mkdir(parents=True)
    (folder / name / "results.json").write_text(json.dumps(content))
    return folder / name / "results.json"


# -- the scoreboard ----------------------------------------------------------------------------------------------------
def test_claims_are_counted_by_verdict(tmp_path):
    results(tmp_path, "00_a", "reproduced", "not run here", exercises={"00.1": {"state": "pass"}})
    results(tmp_path, "01_b", "reproduced", "direction only", "not reproduced")
    board = report.load(tmp_path)
    assert board.totals == {"reproduced": 2, "direction only": 1, "not reproduced": 1, "not run here": 1}
    assert board.exercises == {"00.1": "pass"}
    assert len(report.load(tmp_path, ["00_a"]).rows) == 2


def test_the_scoreboard_is_written_as_json_and_markdown(tmp_path):
    results(tmp_path, "00_a", "reproduced")
    board = report.load(tmp_path)
    report.write(board, tmp_path)
    assert json.loads((tmp_path / "scoreboard.json").read_text())["totals"]["reproduced"] == 1
    row = (tmp_path / "scoreboard.md").read_text().splitlines()[-1]
    assert "A100 \\| fp16" in row
    assert "1.9x" in row
    console = Console(record=True, width=140)
    console.print(report.scoreboard_table(board))
    assert "A [2023]" in console.export_text()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"),
        ('{"schema": 2, "notebook": "x", "profile": {}, "parameters": {}, "claims": []}', "schema 2"),
        ('{"schema": 1, "notebook": "x", "profile": {}, "parameters": {}, "claims": 3}', "wrong type"),
        ('{"schema": 1, "notebook": "x", "profile": {}, "parameters": {}, "claims": [{"id": 1}]}', "not readable"),
        ('{"speed": 3}', "lacks schema"),
    ],
)
def test_a_corrupt_or_foreign_file_is_named_and_left_out(tmp_path, text, word):
    results(tmp_path, "00_a", "reproduced")
    bad = results(tmp_path, "01_bad")
    bad.write_text(text)
    board = report.load(tmp_path)
    assert len(board.rows) == 1
    (left_out,) = board.left_out
    assert str(bad) in left_out
    assert word in left_out


def test_an_unknown_verdict_is_corrupt(tmp_path):
    results(tmp_path, "00_a", "marvellous")
    assert "marvellous" in report.load(tmp_path).left_out[0]


def test_no_results_at_all_is_an_error(tmp_path):
    with pytest.raises(RecordError, match=r"no results\.json"):
        report.load(tmp_path)


# -- exit codes --------------------------------------------------------------------------------------------------------
def test_report_exits_with_6_when_a_file_is_corrupt(tmp_path, capsys):
    results(tmp_path, "00_a", "reproduced")
    assert cli.run_cli(["report", str(tmp_path)]) == 0
    results(tmp_path, "01_bad").write_text("{")
    assert cli.run_cli(["report", str(tmp_path)]) == 6
    captured = capsys.readouterr()
    assert "01_bad/results.json is corrupt" in captured.err
    assert "reproduced" in captured.out


@pytest.fixture
def course(folder, add, monkeypatch, tmp_path):
    """The command line works on a folder of tiny notebooks."""
    add("01_good")
    add("02_raises", "raise ValueError('no such luck')")
    from helpers.course import runner

    original = runner.run
    monkeypatch.setattr(runner, "run", lambda *args, **kw: original(*args, **{**kw, "folder": folder}))
    monkeypatch.setattr("helpers.models.bundled_model", lambda: tmp_path)
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["03"], 2, ["no notebook '03'", "Known: 01_good, 02_raises"]),
        (["01_goood"], 2, ["Did you mean '01_good'?"]),
        (["--profile", "smokey"], 2, ["no profile 'smokey'", "Did you mean 'smoke'?"]),
        (["01", "-p", "SEEED=1", "--profile", "smoke"], 2, ["no parameter 'SEEED'", "Did you mean 'SEED'?"]),
        (["01", "-p", "SEED", "--profile", "smoke"], 2, ["NAME=VALUE"]),
        (["01", "-p", "SEED=abc", "--profile", "smoke"], 2, ["SEED='abc' is not an integer"]),
        (["01", "-p", "SEED=-1", "--profile", "smoke"], 2, ["SEED=-1 is not an integer from 0"]),
        (["01", f"--seed={2**32}", "--profile", "smoke"], 2, ["SEED=4294967296 is not an integer from 0"]),
        (["01", "-p", "OUT=here", "--profile", "smoke"], 2, ["--out DIR"]),
        (["--no-such-option"], 2, ["No such option"]),
    ],
)
def test_what_cannot_be_run_is_said_in_one_sentence(course, tmp_path, capsys, arguments, code, words):
    assert cli.run_cli(["run", "--out", str(tmp_path / "out"), *arguments]) == code
    error = capsys.readouterr().err
    for word in words:
        assert word in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_run_goes_on_after_a_failure_and_ends_with_its_exit_code(course, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.run_cli(["run", "--out", str(out), "--profile", "smoke"]) == 5
    captured = capsys.readouterr()
    assert "1 of 2 notebooks failed: 02_raises" in captured.err
    assert "ValueError: no such luck" in captured.err
    assert "01_good: done in" in captured.out
    assert "budget GiB" in captured.out
    assert (out / "scoreboard.md").exists()


def test_a_model_that_cannot_be_had_ends_the_run_before_any_notebook(course, tmp_path, capsys, monkeypatch):
    def no_network() -> Path:
        raise ModelError("The model cannot be fetched.", "Connect once.")

    monkeypatch.setattr("helpers.models.bundled_model", no_network)
    assert cli.run_cli(["run", "01", "--out", str(tmp_path / "out"), "--profile", "smoke"]) == 4
    captured = capsys.readouterr()
    assert captured.err == "ModelError: The model cannot be fetched.\n  Remedy: Connect once.\n"
    assert "running" not in captured.out


def test_a_seed_may_be_given_in_two_ways(course, tmp_path):
    assert cli.settings_of("auto", 0, ["SEED=3", "PROFILE=smoke"], None) == cli.settings_of("smoke", 3, [], None)


def test_an_unwritable_folder_is_exit_code_6(course, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.run_cli(["run", "01", "--out", str(tmp_path / "file" / "out"), "--profile", "smoke"]) == 6
    assert "cannot be written" in capsys.readouterr().err


def test_an_error_of_the_course_is_a_sentence_unless_asked_for(monkeypatch, capsys):
    def broken() -> Path:
        raise ModelError("The weights are damaged.", "Fetch them again.")

    monkeypatch.setattr("helpers.models.bundled_model", broken)
    monkeypatch.delenv("PAPERS_DEBUG", raising=False)
    assert cli.run_cli(["model"]) == 4
    assert capsys.readouterr().err == "ModelError: The weights are damaged.\n  Remedy: Fetch them again.\n"
    monkeypatch.setenv("PAPERS_DEBUG", "1")
    with pytest.raises(ModelError):
        cli.run_cli(["model"])


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys):
    def interrupted() -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("helpers.models.bundled_model", interrupted)
    assert cli.run_cli(["model"]) == 130
    assert "the same command starts" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["run"], ["report"], ["doctor"], ["lab"], ["build"], ["test"], ["bench"]])
def test_help_is_there_for_every_command(command, capsys):
    assert cli.run_cli([*command, "--help"]) == 0
    assert "Usage: python3 -m helpers" in capsys.readouterr().out


def test_help_is_quick_to_import():
    code = "import helpers.cli, sys; print([m for m in ('torch', 'papermill', 'transformers', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


# -- test and its exit codes -------------------------------------------------------------------------------------------
def steps(monkeypatch, *codes: int, pytest_step: bool = False) -> None:
    name = "pytest" if pytest_step else "tool"
    commands = [(f"step {n}", [sys.executable, "-c", f"raise SystemExit({c})", name]) for n, c in enumerate(codes)]
    monkeypatch.setattr(cli, "test_steps", lambda paths: commands)


def test_the_first_failure_decides_the_exit_code_and_all_steps_run(monkeypatch, capfd):
    steps(monkeypatch, 0, 4, 3)
    assert cli.run_cli(["test"]) == 4
    captured = capfd.readouterr()
    assert "FAILED step 2" in captured.out
    assert captured.err.strip().splitlines()[-1].startswith("FAILED after")


def test_a_good_end_says_so(monkeypatch, capfd):
    steps(monkeypatch, 0, 0)
    assert cli.run_cli(["test"]) == 0
    assert capfd.readouterr().out.strip().splitlines()[-1].startswith("All checks and tests passed in")


def test_an_empty_selection_of_pytest_is_no_failure_but_a_tool_s_5_is(monkeypatch):
    steps(monkeypatch, 5, pytest_step=True)
    assert cli.run_cli(["test"]) == 0
    steps(monkeypatch, 5)
    assert cli.run_cli(["test"]) == 5


# -- the doctor --------------------------------------------------------------------------------------------------------
def machine(**changes: object):
    return describe().model_copy(update={"gpus": (), **changes})


def text_of(lines: list[doctor.Line]) -> str:
    return "\n".join(f"{line.what}: {line.good} {line.text}" for line in lines)


def test_the_doctor_says_which_profiles_run_and_why_not(folder, add):
    add("01_good")
    text = text_of(doctor.profile_lines(machine(memory_bytes=8 * 2**30), folder))
    assert "profile auto: True smoke: no NVIDIA GPU was found" in text
    assert "profile lab: False" in text
    assert "needs an NVIDIA GPU" in text
    assert "01_good" in text


def test_the_doctor_knows_a_t4_from_an_a100(folder):
    t4 = Gpu(name="Tesla T4", memory_bytes=15 * 2**30, compute_capability=(7, 5))
    text = text_of(doctor.profile_lines(machine(gpus=(t4,)), folder))
    assert "profile colab: True" in text
    assert "bf16 needs sm80" in text
    a100 = Gpu(name="A100", memory_bytes=40 * 2**30, compute_capability=(8, 0))
    assert "profile lab: True" in text_of(doctor.profile_lines(machine(gpus=(a100,)), folder))


def test_the_doctor_names_what_brings_a_missing_model(monkeypatch, tmp_path):
    monkeypatch.setenv("PAPERS_CACHE", str(tmp_path))
    text = text_of(doctor.material_lines())
    assert "bundled model: False not fetched yet; bring it with: python3 -m helpers model" in text
    (tmp_path / "smollm2-135m-instruct" / "hf-bf16").mkdir(parents=True)
    assert "damaged (SHA256.json)" in text_of(doctor.material_lines())


def test_too_little_memory_is_said(monkeypatch):
    monkeypatch.setattr(doctor.hardware, "pick_dtype", lambda found: ("float32", "a test"))
    assert "memory: False 2.0 GiB" in text_of(doctor.machine_lines(machine(memory_bytes=2 * 2**30)))
