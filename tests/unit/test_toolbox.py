"""Toolboxes: one is really installed and answers; a missing, misspelt, broken or half-made one says what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import toolbox
from helpers.errors import EngineError, EnvironmentSetupError, UnknownNameError
from helpers.models import bundled_gguf
from helpers.paths import REQUIREMENTS, ROOT

SCRIPT = ROOT / "helpers" / "toolboxes" / "openvino_generate.py"


@pytest.mark.engine
def test_the_engines_toolbox_is_installed_and_runs_the_bundled_model():
    toolbox.install("engines")
    assert toolbox.status("engines").installed
    arguments = {
        "gguf": str(bundled_gguf()),
        "prompts": ["What is the capital of France?"],
        "max_tokens": 12,
        "threads": 2,
    }
    result = toolbox.call("engines", SCRIPT, arguments)
    answer = result["answers"][0]
    assert "Paris" in answer["text"]
    assert answer["n_tokens"] <= 12
    assert answer["times"] == sorted(answer["times"]) and answer["times"][0] > answer["sent"]


@pytest.fixture
def empty_toolboxes(tmp_path, monkeypatch):
    monkeypatch.setattr(toolbox, "TOOLBOXES", tmp_path / "toolboxes")
    return tmp_path / "toolboxes"


def test_a_missing_toolbox_names_the_command_that_brings_it(empty_toolboxes):
    with pytest.raises(EnvironmentSetupError, match="python3 -m helpers toolbox engines"):
        toolbox.call("engines", SCRIPT, {})


def test_a_misspelt_toolbox_is_corrected():
    with pytest.raises(UnknownNameError, match="Did you mean 'engines'"):
        toolbox.install("engine")


def test_a_half_made_toolbox_is_not_taken_for_a_whole_one(empty_toolboxes, monkeypatch):
    (empty_toolboxes / "engines" / "bin").mkdir(parents=True)
    assert not toolbox.status("engines").installed
    steps: list[str] = []
    monkeypatch.setattr(toolbox, "_run", lambda name, *choices: steps.append(choices[0][-1]))
    monkeypatch.setattr(toolbox.shutil, "rmtree", lambda *a, **k: steps.append("thrown away"))
    toolbox.install("engines")
    assert steps[0] == "thrown away" and len(steps) == 3
    assert toolbox.status("engines").installed


def test_a_failing_install_says_the_installers_last_line(empty_toolboxes, tmp_path, monkeypatch):
    bad = tmp_path / "engines.txt"
    bad.write_text("no-such-package-of-this-name==9 --hash=sha256:" + "0" * 64 + "\n")
    monkeypatch.setattr(toolbox, "_requirements", lambda name: bad)
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(EnvironmentSetupError, match=r"could not be installed: .+"):
        toolbox.install("engines")
    assert not toolbox.status("engines").installed


def test_a_script_that_fails_shows_its_last_lines(empty_toolboxes, tmp_path, monkeypatch):
    import sys

    script = tmp_path / "broken.py"
    script.write_text("print('about to fail'); raise SystemExit('no such weights')")
    ready = toolbox.ToolboxStatus(name="engines", purpose="", installed=True, remedy="")
    monkeypatch.setattr(toolbox, "status", lambda name: ready)
    monkeypatch.setattr(toolbox, "_python", lambda name: sys.executable)
    with pytest.raises(EngineError, match="no such weights"):
        toolbox.call("engines", script, {})


def test_a_script_does_not_inherit_what_belongs_to_the_notebooks_environment(tmp_path, monkeypatch):
    import sys

    script = tmp_path / "show.py"
    script.write_text("import json, os, sys; json.dump(dict(os.environ), open(sys.argv[2], 'w'))")
    ready = toolbox.ToolboxStatus(name="engines", purpose="", installed=True, remedy="")
    monkeypatch.setattr(toolbox, "status", lambda name: ready)
    monkeypatch.setattr(toolbox, "_python", lambda name: sys.executable)
    monkeypatch.setenv("MPLBACKEND", "module://a_backend_of_the_kernel")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    seen = toolbox.call("engines", script, {})
    assert not {"MPLBACKEND", "PYTHONPATH", "VIRTUAL_ENV"} & set(seen) and seen["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("name", toolbox.KNOWN)
def test_a_toolbox_pins_no_torch_and_builds_from_source_only_what_it_pins(name):
    lock = (REQUIREMENTS / f"{name}.txt").read_text()
    pinned = set(re.findall(r"^([\w.-]+)==", lock, re.MULTILINE))
    assert not pinned & {"torch", "torchvision", "torchaudio"} and not any(
        pin.startswith("nvidia-cu") for pin in pinned
    )
    assert set(toolbox.KNOWN[name].from_source) <= pinned
    if toolbox.KNOWN[name].torch:
        assert {"filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions"} <= pinned


def test_what_builds_from_source_is_installed_after_what_it_builds_against(empty_toolboxes, monkeypatch):
    steps: list[list[str]] = []
    parts: list[str] = []

    def run(name, *choices):
        steps.append(choices[0])
        if "-r" in choices[0]:
            parts.append(Path(choices[0][choices[0].index("-r") + 1]).read_text())
        elif choices[0][1:3] == ["-m", "venv"]:
            Path(choices[0][3]).mkdir(parents=True)

    monkeypatch.setattr(toolbox, "_run", run)
    toolbox.install("legacy")
    assert any(word.startswith("torch==") for word in steps[1])
    assert "--no-build-isolation" in steps[3] and "--no-build-isolation" not in steps[2]
    assert re.findall(r"^([\w.-]+)==", parts[1], re.MULTILINE) == ["auto-gptq", "autoawq"]
    assert "transformers==4.51.3" in parts[0] and "autoawq" not in parts[0]
    assert all("--require-hashes" in step for step in steps[2:])


def test_a_toolbox_for_linux_says_so_elsewhere(empty_toolboxes, monkeypatch):
    monkeypatch.setattr(toolbox.sys, "platform", "darwin")
    assert toolbox.status("cluster").remedy == "a Linux machine"
    assert "toolbox quant" in toolbox.status("quant").remedy
    with pytest.raises(EnvironmentSetupError, match="needs Linux"):
        toolbox.install("cluster")
    assert not empty_toolboxes.exists()
