"""Every way in which a run can end, with real kernels."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from rich.console import Console

from helpers import hardware, profile
from helpers.course import parameters, runner
from helpers.course.build import find, read_source, source_hash, write_notebook
from helpers.course.records import Outcome
from helpers.errors import EnvironmentSetupError, NotebookError, RecordError, UnknownNameError
from helpers.paths import ROOT

SMOKE = runner.Settings(profile="smoke")


def run_one(folder: Path, out: Path, name: str = "01", settings: runner.Settings = SMOKE) -> Outcome:
    return runner.run_one(find([name], folder)[0], settings, out)


def outputs_of(outcome: Outcome) -> list:
    cells = nbformat.read(outcome.notebook, as_version=4).cells
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"))


def record(out: Path, name: str) -> dict:
    return json.loads((out / name / "run.json").read_text())


def is_running(pid: int) -> bool:
    """Whether a process lives; one that ended and that nobody has waited for does not."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# -- what goes well ----------------------------------------------------------------------------------------------------
def test_a_good_notebook_leaves_its_outputs_results_and_costs(folder, add, tmp_path):
    add("01_good", "block = bytearray(200_000_000)\nprint('seed', SEED)")
    outcome = run_one(folder, tmp_path / "out", settings=runner.Settings(profile="smoke", seed=7))
    executed = nbformat.read(outcome.notebook, as_version=4)
    assert any("seed 7" in str(cell.get("outputs")) for cell in executed.cells)
    assert [cell.cell for cell in outcome.cells] == [2, 3, 4]
    assert not (tmp_path / "out" / "01_good" / "kernel.log").exists()
    allocating = outcome.cells[1]
    assert allocating.peak_bytes - outcome.cells[0].peak_bytes > 150_000_000
    assert outcome.peak_bytes >= allocating.peak_bytes
    assert record(tmp_path / "out", "01_good")["status"] == "done"
    assert json.loads((tmp_path / "out/01_good/results.json").read_text())["parameters"]["SEED"] == 7


def test_the_kernel_is_this_interpreter_whatever_the_metadata_say(folder, tmp_path, add):
    source = add("01_good", "import sys\nprint('INTERPRETER', sys.executable)")
    header = "# ---\n# jupyter:\n#   kernelspec:\n#     name: somebody_else\n#     display_name: Else\n# ---\n\n"
    source.write_text(header + source.read_text())
    outcome = run_one(folder, tmp_path / "out")
    assert f"INTERPRETER {sys.executable}" in Path(outcome.notebook).read_text().replace("\\\\", "\\")


def test_the_smoke_kernel_is_offline_and_sees_the_helpers(folder, add, tmp_path):
    add("01_good", "import os, helpers\nassert os.environ['HF_HUB_OFFLINE'] == '1'\nassert helpers.__version__")
    assert run_one(folder, tmp_path / "out").status == "done"


def test_memory_of_child_processes_counts_and_leftovers_are_ended(folder, add, tmp_path):
    body = """
import subprocess, sys, time
code = "x = bytearray(300_000_000); import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
time.sleep(2)
print("CHILD", child.pid)
"""
    add("01_child", body)
    outcome = run_one(folder, tmp_path / "out")
    assert outcome.peak_bytes > 300_000_000
    text = Path(outcome.notebook).read_text()
    pid = int(text.split("CHILD ")[1].split("\\n")[0])
    assert not is_running(pid)
    assert any("left running" in note for note in outcome.notes)


# -- failures of cells and kernels -------------------------------------------------------------------------------------
def test_a_raising_cell_is_named_and_the_rest_is_saved(folder, add, tmp_path):
    add("01_raises", "print('before')\nratio = 1 / 0")
    with pytest.raises(NotebookError) as caught:
        run_one(folder, tmp_path / "out")
    symptom = caught.value.symptom
    assert "01_raises, cell 3 (\"print('before')\")" in symptom
    assert "ZeroDivisionError: division by zero" in symptom
    saved = tmp_path / "out/01_raises/01_raises.ipynb"
    assert str(saved) in caught.value.remedy
    assert "before" in saved.read_text()
    assert record(tmp_path / "out", "01_raises")["exit_code"] == 5


def test_a_course_error_shows_its_own_symptom_and_remedy(folder, add, tmp_path):
    add("01_course", "from helpers.errors import ModelError\nraise ModelError('No such weights.', 'Fetch them.')")
    with pytest.raises(NotebookError) as caught:
        run_one(folder, tmp_path / "out")
    assert caught.value.symptom.endswith("raised ModelError: No such weights.")
    assert caught.value.remedy.startswith("Fetch them.")


def test_a_killed_kernel_names_cell_and_memory(folder, add, tmp_path):
    add("01_dies", "print('last words', flush=True)\nimport os\nos.kill(os.getpid(), 9)")
    with pytest.raises(NotebookError) as caught:
        run_one(folder, tmp_path / "out")
    assert "01_dies, cell 3" in caught.value.symptom
    assert "kernel died" in caught.value.symptom
    assert "GiB at most" in caught.value.symptom
    assert "out of memory" in caught.value.remedy
    saved = tmp_path / "out/01_dies/01_dies.ipynb"
    assert str(saved) in caught.value.remedy
    assert nbformat.read(saved, as_version=4).cells


def test_a_slow_cell_ends_at_the_timeout(folder, add, tmp_path):
    add("01_slow", "import time\ntime.sleep(60)")
    start = time.monotonic()
    with pytest.raises(NotebookError, match="ran longer than 2 s"):
        run_one(folder, tmp_path / "out", settings=runner.Settings(profile="smoke", timeout_s=2))
    assert time.monotonic() - start < 40
    assert (tmp_path / "out/01_slow/01_slow.ipynb").exists()


def stumbling_start(monkeypatch, failures: int) -> list[int]:
    """Make the first `failures` kernels seem not to answer; returns a list that counts all starts."""
    original = NotebookClient.start_new_kernel_client
    starts: list[int] = []

    def start(self, **options):
        starts.append(1)
        if len(starts) <= failures:
            self._cleanup_kernel()
            raise RuntimeError("Kernel died before replying to kernel_info")
        return original(self, **options)

    monkeypatch.setattr(NotebookClient, "start_new_kernel_client", start)
    return starts


def test_a_kernel_that_does_not_start_is_started_once_more_and_that_is_reported(folder, add, tmp_path, monkeypatch):
    add("01_good")
    starts = stumbling_start(monkeypatch, failures=1)
    outcome = run_one(folder, tmp_path / "out")
    assert outcome.status == "done"
    assert len(starts) == 2
    assert any("did not start at first" in note for note in outcome.notes)


def test_a_kernel_that_never_starts_is_an_error_after_two_attempts(folder, add, tmp_path, monkeypatch):
    add("01_good")
    starts = stumbling_start(monkeypatch, failures=9)
    with pytest.raises(NotebookError, match="kernel did not start, twice"):
        run_one(folder, tmp_path / "out")
    assert len(starts) == 2


def test_what_a_dead_kernel_said_is_kept_and_named(folder, add, tmp_path, monkeypatch):
    add("01_dies")

    def execute(*_, watch, kernel_log, **__):
        watch.current = 2, "work()"
        kernel_log.write_text("terminate called\n")
        raise DeadKernelError("Kernel died")

    monkeypatch.setattr("papermill.execute_notebook", execute)
    with pytest.raises(NotebookError, match="the kernel died") as death:
        run_one(folder, tmp_path / "out")
    log = tmp_path / "out" / "01_dies" / "kernel.log"
    assert log.read_text() == "terminate called\n"
    assert str(log) in str(death.value)


def test_a_failure_that_nobody_foresaw_is_a_failed_notebook_and_the_others_run(folder, add, tmp_path, monkeypatch):
    add("01_odd")
    add("02_odd")

    def execute(*_, **__):
        raise ValueError("no such thing")

    monkeypatch.setattr("papermill.execute_notebook", execute)
    manifest = runner.run([], SMOKE, folder=folder, out=tmp_path / "out", console=quiet())
    assert [outcome.status for outcome in manifest.outcomes.values()] == ["failed", "failed"]
    assert "01_odd: ValueError: no such thing" in manifest.outcomes["01_odd"].error
    assert record(tmp_path / "out", "01_odd")["status"] == "failed"


def test_a_raising_cell_is_not_retried(folder, add, tmp_path):
    mark = tmp_path / "mark"
    add("01_raises", f"open({str(mark)!r}, 'a').write('x')\nraise RuntimeError('Kernel died')")
    with pytest.raises(NotebookError, match="raised RuntimeError"):
        run_one(folder, tmp_path / "out")
    assert mark.read_text() == "x"


# -- parameters --------------------------------------------------------------------------------------------------------
WITH_N = '# %% tags=["parameters"]\nPROFILE = "auto"\nSEED = 0\nOUT = None\nN_STEPS = 3\n'


def test_a_misspelt_parameter_is_refused_before_anything_starts(folder, add, tmp_path):
    add("01_good", "print(N_STEPS)", parameters=WITH_N)
    with pytest.raises(UnknownNameError) as caught:
        run_one(folder, tmp_path / "out", settings=runner.Settings(profile="smoke", parameters={"N_STEP": 4}))
    assert "N_STEP" in caught.value.symptom
    assert "Did you mean 'N_STEPS'?" in caught.value.remedy
    assert not (tmp_path / "out").exists()


def test_a_parameter_that_no_cell_reads_is_an_error(folder, add, tmp_path):
    add("01_unread", "N_STEPS = 9", parameters=WITH_N)
    with pytest.raises(NotebookError, match="no cell reads the parameter N_STEPS"):
        run_one(folder, tmp_path / "out")


def test_a_parameter_reaches_the_notebook(folder, add, tmp_path):
    add("01_good", "print('steps', N_STEPS + 1)", parameters=WITH_N)
    settings = runner.Settings(profile="smoke", parameters={"N_STEPS": 41})
    assert "steps 42" in Path(run_one(folder, tmp_path / "out", settings=settings).notebook).read_text()


@pytest.mark.parametrize("parameters", ["# %%\nPROFILE = SEED = OUT = None\n", WITH_N + WITH_N])
def test_there_is_exactly_one_parameters_cell(folder, add, tmp_path, parameters):
    add("01_bad", parameters=parameters)
    with pytest.raises(NotebookError, match="it needs exactly one"):
        run_one(folder, tmp_path / "out")


def test_a_notebook_that_overwrites_its_parameters_is_found_out(folder, add, tmp_path):
    add("01_stubborn", "SEED = SEED * 0 + 5")
    with pytest.raises(NotebookError, match=r"asked for SEED=3 and ran with 5"):
        run_one(folder, tmp_path / "out", settings=runner.Settings(profile="smoke", seed=3))


def test_values_on_the_command_line_are_literals_or_text():
    assert parameters.parse_assignments(["A=3", "B=[1, 2]", "C=plain text"]) == {"A": 3, "B": [1, 2], "C": "plain text"}
    with pytest.raises(UnknownNameError, match="NAME=VALUE"):
        parameters.parse_assignments(["A"])


# -- records -----------------------------------------------------------------------------------------------------------
def test_results_that_cannot_be_read_are_named(folder, add, tmp_path):
    finish = "import pathlib\npathlib.Path(OUT, 'results.json').write_text('{half')"
    add("01_corrupt", "read = PROFILE, SEED", finish=finish)
    with pytest.raises(RecordError, match="corrupt") as caught:
        run_one(folder, tmp_path / "out")
    assert "01_corrupt/results.json" in caught.value.symptom
    assert record(tmp_path / "out", "01_corrupt")["exit_code"] == 6


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[]", "not a results file"),
        ("{}", "lacks"),
        ('{"schema": 1, "notebook": "x", "profile": {}, "parameters": {}, "claims": []}', "does not record .* SEED"),
        ('{"schema": 1, "notebook": "x", "profile": {}, "parameters": {}, "claims": [{}]}', "a claim is not readable"),
    ],
)
def test_results_of_another_kind_are_refused(tmp_path, text, word):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=word):
        runner.check_results("01_good", path, {"SEED": 0})


def test_a_notebook_without_results_is_an_error(folder, add, tmp_path):
    add("01_silent", "read = PROFILE, SEED, OUT", finish="")
    with pytest.raises(RecordError, match="without writing"):
        run_one(folder, tmp_path / "out")


def test_an_output_folder_below_a_file_is_refused(folder, add, tmp_path):
    add("01_good")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be written"):
        run_one(folder, tmp_path / "file" / "out")


@pytest.fixture
def mounted(tmp_path):
    """Mount a small tmpfs; only root may."""
    mounts = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount{len(mounts)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting a tmpfs needs privileges")
        mounts.append(place)
        return place

    yield mount
    for place in mounts:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(("options", "reason"), [("size=1m", "No space left"), ("size=1m,ro", "Read-only")])
def test_a_full_or_read_only_folder_is_refused_before_anything_starts(folder, add, tmp_path, mounted, options, reason):
    mark = tmp_path / "mark"
    add("01_good", f"open({str(mark)!r}, 'a').write('x')")
    with pytest.raises(RecordError, match=reason):
        run_one(folder, mounted(options))
    assert not mark.exists()


def test_a_disk_that_fills_up_while_running_loses_nothing(folder, add, mounted):
    place = mounted("size=40m")
    add("01_fills", f"print('result 42')\nopen({str(place / 'ballast')!r}, 'wb').write(bytes(60_000_000))")
    with pytest.raises(RecordError, match=r"disk is full|cannot be written") as caught:
        run_one(folder, place)
    rescued = Path(caught.value.remedy.split("as far as it came is ")[1].rstrip("."))
    assert "result 42" in rescued.read_text()


def test_no_space_for_the_notebook_itself_is_a_record_error(folder, add, tmp_path, monkeypatch):
    add("01_good", "print('result 42')")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("papermill.iorw.LocalHandler.write", full)
    with pytest.raises(RecordError, match="No space left on device"):
        run_one(folder, tmp_path / "out")
    assert record(tmp_path / "out", "01_good")["status"] == "failed"


# -- several notebooks -------------------------------------------------------------------------------------------------
def test_a_failure_does_not_stop_the_others(folder, add, tmp_path):
    add("01_raises", "raise ValueError('no')")
    add("02_good")
    manifest = runner.run([], SMOKE, folder=folder, out=tmp_path / "out", console=quiet())
    assert {name: outcome.status for name, outcome in manifest.outcomes.items()} == {
        "01_raises": "failed",
        "02_good": "done",
    }
    assert runner.exit_code_of(manifest) == 5
    assert manifest.finished


def test_a_folder_that_has_become_unwritable_does_not_show_an_earlier_success(folder, add, tmp_path, monkeypatch):
    add("01_good")
    out = tmp_path / "out"
    runner.run([], SMOKE, folder=folder, out=out, console=quiet())

    def full(place: Path) -> None:
        if place != out:
            raise RecordError(f"{place} cannot be written.", "Free some space.")

    monkeypatch.setattr(runner, "check_out_folder", full)
    manifest = runner.run([], SMOKE, folder=folder, out=out, console=quiet())
    assert manifest.outcomes["01_good"].status == "failed"
    assert runner.exit_code_of(manifest) == 6


RUN_SCRIPT = """
import sys
from pathlib import Path
from helpers.course import runner
runner.helpers_hash = lambda: "the same"  # somebody may edit the helpers while this test runs
runner.run([], runner.Settings(profile="smoke"), folder=Path(sys.argv[1]), out=Path(sys.argv[2]))
"""


def start_run(folder: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN_SCRIPT, str(folder), str(out)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, start_new_session=True)


def test_an_interrupted_run_continues_with_what_is_not_done(folder, add, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    add("01_first", f"open({str(log)!r}, 'a').write('first ')")
    slow = add("02_second", f"open({str(log)!r}, 'a').write('second ')\nimport time\ntime.sleep(120)")
    process = start_run(folder, out)
    deadline = time.monotonic() + 60
    while not (log.exists() and "second" in log.read_text()):
        assert time.monotonic() < deadline, "the second notebook did not start"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not json.loads((out / "run.json").read_text())["finished"]
    slow.write_text(slow.read_text().replace("time.sleep(120)", "pass"))
    resumed = start_run(folder, out)
    text, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0
    assert "01_first: done in the interrupted run, not run again" in text
    assert log.read_text() == "first second second "
    assert json.loads((out / "run.json").read_text())["finished"]


@pytest.fixture
def executed(monkeypatch):
    """Names of the notebooks that were executed; the execution itself is a stand-in that leaves a results file."""
    names: list[str] = []

    def stand_in(entry, settings, out, on_cell=None):
        names.append(entry.name)
        (out / entry.name).mkdir(parents=True, exist_ok=True)
        (out / entry.name / "results.json").write_text("{}")
        return Outcome(
            name=entry.name,
            status="done",
            profile="smoke",
            seed=settings.seed,
            parameters={},
            source_hash=source_hash(entry),
            notebook="",
        )

    monkeypatch.setattr(runner, "run_one", stand_in)
    return names


def edit_manifest(out: Path, **changes: object) -> None:
    """Change the record of a run, for example into one that was killed."""
    manifest = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**manifest, **changes}))


CHANGES = ["fresh", "seed", "source", "helpers", "finished", "results", "corrupt manifest", "nothing"]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_run_again_and_what_is_not(folder, add, tmp_path, executed, change):
    out = tmp_path / "out"
    source = add("01_only")
    runner.run([], SMOKE, folder=folder, out=out, console=quiet())
    edit_manifest(out, finished=change == "finished")
    settings = runner.Settings(profile="smoke", seed=1) if change == "seed" else SMOKE
    if change == "source":
        source.write_text(source.read_text() + "\n# %%\nlast = 1\n")
    elif change == "helpers":
        edit_manifest(out, helpers_hash="of other helpers")
    elif change == "results":
        (out / "01_only/results.json").unlink()
    elif change == "corrupt manifest":
        (out / "run.json").write_text("{")
    runner.run([], settings, folder=folder, out=out, fresh=change == "fresh", console=quiet())
    assert executed == ["01_only"] * (1 if change == "nothing" else 2)


def test_sigterm_shuts_the_kernel_down(folder, add, tmp_path):
    pid_file = tmp_path / "pid"
    add("01_slow", f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(120)")
    process = start_run(folder, tmp_path / "out")
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    process.communicate(timeout=30)
    kernel = int(pid_file.read_text())
    assert not is_running(kernel)
    assert record(tmp_path / "out", "01_slow")["status"] == "not run"


def test_a_built_notebook_without_a_source_is_run_as_it_is(folder, tmp_path, add):
    add("01_good", "print('from the built one')")
    entry = find(["01"], folder)[0]
    write_notebook(read_source(entry), folder / "02_student.ipynb")
    outcome = run_one(folder, tmp_path / "out", "02_student")
    assert "from the built one" in Path(outcome.notebook).read_text()


def test_a_missing_widget_library_leaves_no_warning_in_the_notebook(folder, add, tmp_path):
    add(
        "01_good", "import warnings\nwarnings.warn('IProgress not found. Please update', UserWarning)\nimport tqdm.auto"
    )
    assert "IProgress" not in str(outputs_of(run_one(folder, tmp_path / "out")))


def test_a_gpu_profile_without_a_gpu_is_refused_before_anything_is_lost(folder, add, tmp_path, monkeypatch):
    add("01_good", "1")
    runner.run([], SMOKE, folder=folder, out=tmp_path, console=Console(quiet=True))
    before = (tmp_path / "01_good" / "results.json").read_bytes()
    monkeypatch.setattr(profile, "describe", lambda: hardware.describe().model_copy(update={"gpus": ()}))
    with pytest.raises(EnvironmentSetupError, match="lab needs an NVIDIA GPU"):
        runner.run([], runner.Settings(profile="lab"), folder=folder, out=tmp_path, console=Console(quiet=True))
    assert (tmp_path / "01_good" / "results.json").read_bytes() == before
