"""The pinned packages against what the project asks for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

from helpers.bootstrap import LOCK, TORCH
from helpers.paths import REQUIREMENTS, ROOT

ENVIRONMENTS = [
    {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    for python in ("3.11", "3.12", "3.13")
    for machine in ("x86_64", "aarch64")
]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def entries() -> list[tuple[Requirement, int]]:
    """Each pinned requirement with its number of hashes."""
    blocks = re.split(r"\n(?=\S)", LOCK.read_text(encoding="utf-8"))
    return [
        (Requirement(block.split(" \\\n")[0]), block.count("--hash=sha256:"))
        for block in blocks
        if not block.startswith("#")
    ]


def asked() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]


def active(marker: Marker | None, environment: dict[str, str]) -> bool:
    return marker is None or marker.evaluate(environment)


def pins(environment: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for requirement, _ in entries():
        if active(requirement.marker, environment):
            (pin,) = requirement.specifier
            assert pin.operator == "=="
            found.setdefault(normal(requirement.name), []).append(pin.version)
    return found


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: f"{e['python_version']}-{e['platform_machine']}")
def test_every_direct_dependency_is_pinned_once_to_a_version_that_is_asked_for(environment):
    pinned = pins(environment)
    assert [name for name, versions in pinned.items() if len(versions) > 1] == []
    for requirement in asked():
        if requirement.name == "torch" or not active(requirement.marker, environment):
            continue
        (version,) = pinned[normal(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} is pinned to {version}"


def test_every_entry_has_hashes():
    assert [str(requirement) for requirement, n_hashes in entries() if n_hashes == 0] == []


def test_torch_has_its_own_step_and_its_siblings_stay_out():
    names = {normal(requirement.name) for requirement, _ in entries()}
    assert names.isdisjoint({"torch", "torchvision", "torchaudio", "torchcodec"})
    assert not [name for name in names if name.startswith(("nvidia-cu", "nvidia-nccl"))]
    (torch,) = [requirement for requirement in asked() if requirement.name == "torch"]
    assert torch.specifier.contains(TORCH)


def test_the_header_names_the_command_and_no_machine():
    header = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any("python requirements/lock.py" in line for line in header)
    assert not re.search(r"(^|\s)/|https?:|--constraint|-c ", "\n".join(header))


def test_the_lock_script_explains_itself():
    done = subprocess.run([sys.executable, str(REQUIREMENTS / "lock.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--upgrade" in done.stdout
