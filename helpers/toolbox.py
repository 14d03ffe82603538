"""Toolboxes: sets of packages that cannot live in the core environment, each in a virtual environment of its own.

``requirements/NAME.txt`` is a full pin with hashes; torch, where a toolbox needs it, is the core environment's CPU build.
`install` makes ``.toolboxes/NAME``; `call` runs a Python file in it, with JSON in and JSON out. A missing toolbox is no
error of the course: `status` says which command brings it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import BaseModel, ConfigDict

from helpers.bootstrap import package_choices, pip_sources, torch_choices
from helpers.errors import EngineError, EnvironmentSetupError, UnknownNameError, suggest
from helpers.paths import REQUIREMENTS, ROOT, TOOLBOXES


class Toolbox(BaseModel):
    """What a toolbox is for, whether it holds torch or is for Linux alone, and what it builds from source against torch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    purpose: str
    torch: bool = False
    linux_only: bool = False
    from_source: tuple[str, ...] = ()


KNOWN = {
    "engines": Toolbox(purpose="OpenVINO GenAI and CTranslate2: other CPU engines for the bundled model"),
    "cluster": Toolbox(
        purpose="NVIDIA Dynamo and AIConfigurator: clusters replayed, mocked and estimated from real kernel times",
        linux_only=True,
    ),
    "quant": Toolbox(purpose="llm-compressor, torchao and bitsandbytes: the maintained quantizers", torch=True),
    "gptqmodel": Toolbox(
        purpose="GPTQModel: a maintained quantizer, in a toolbox of its own for its newer Transformers",
        torch=True,
        from_source=("gptqmodel",),
    ),
    "legacy": Toolbox(
        purpose="auto-gptq and AutoAWQ: archived quantizers, with the last Transformers that they run with",
        torch=True,
        from_source=("auto-gptq", "autoawq"),
    ),
}


class ToolboxStatus(BaseModel):
    """Whether a toolbox is there, and what to do if it is not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    purpose: str
    installed: bool
    remedy: str


def names() -> list[str]:
    """The toolboxes that this checkout pins."""
    return sorted(name for name in KNOWN if (REQUIREMENTS / f"{name}.txt").is_file())


def _requirements(name: str) -> Path:
    if name not in names():
        raise UnknownNameError(f"There is no toolbox {name!r}.", suggest(name, names()))
    return REQUIREMENTS / f"{name}.txt"


def _python(name: str) -> Path:
    return TOOLBOXES / name / "bin" / "python"


def _fingerprint(name: str) -> str:
    return hashlib.sha256(_requirements(name).read_bytes() + sys.version.encode()).hexdigest()


def _refused(name: str) -> bool:
    return KNOWN[name].linux_only and sys.platform != "linux"


def status(name: str) -> ToolboxStatus:
    """Whether the toolbox is installed as pinned today."""
    mark = TOOLBOXES / name / "installed"
    installed = mark.is_file() and mark.read_text(encoding="utf-8") == _fingerprint(name)
    return ToolboxStatus(
        name=name,
        purpose=KNOWN[name].purpose,
        installed=installed,
        remedy="" if installed else "a Linux machine" if _refused(name) else f"python3 -m helpers toolbox {name}",
    )


def install(name: str) -> Path:
    """Make the toolbox (or find it made) and return its interpreter. A half-made one is thrown away and made again.

    Raises
    ------
    UnknownNameError : no such toolbox.
    EnvironmentSetupError : the packages could not be installed (the installer's own last line is in the message), or there
        are none for this system.
    """
    requirements = _requirements(name)
    if _refused(name):
        raise EnvironmentSetupError(
            f"The toolbox {name!r} needs Linux: its packages come for no other system.", "Use a Linux machine, or WSL."
        )
    try:
        TOOLBOXES.mkdir(exist_ok=True)
    except OSError as error:
        raise EnvironmentSetupError(
            f"The folder {TOOLBOXES.name} cannot be made: {error.strerror}.", "Run the course from a writable checkout."
        ) from error
    with FileLock(TOOLBOXES / f"{name}.lock"):
        if status(name).installed:
            return _python(name)
        folder = TOOLBOXES / name
        shutil.rmtree(folder, ignore_errors=True)
        _run(name, [sys.executable, "-m", "venv", str(folder)])
        if KNOWN[name].torch:
            _run(name, *torch_choices(str(_python(name))))
        listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
        uv = Path(sys.executable).with_name("uv")
        ready, built = _split(requirements.read_text(encoding="utf-8"), KNOWN[name].from_source)
        for part, options in ((ready, []), (built, ["--no-build-isolation"])):
            if part:
                lock = folder / requirements.name
                lock.write_text(part, encoding="utf-8")
                choices = package_choices(str(_python(name)), pip_sources(listing), lock, uv)
                _run(name, *([*choice, *options] for choice in choices))
        (folder / "installed").write_text(_fingerprint(name), encoding="utf-8")
    return _python(name)


def _split(lock: str, from_source: tuple[str, ...]) -> tuple[str, str]:
    """A lock's text in two: what is installed as it is, and what is built against the packages of the first part."""
    pins = re.split(r"^(?=[\w.-]+==)", lock, flags=re.MULTILINE)
    built = [pin for pin in pins if pin.split("==")[0] in from_source]
    return "".join(pin for pin in pins if pin not in built), "".join(built)


def _run(name: str, *choices: list[str]) -> None:
    """Run the first of `choices`; where it fails the next, and so on. The last one's last line is the error's reason."""
    reason = "no message"
    for command in choices:
        try:
            # auto-gptq and AutoAWQ would compile CUDA kernels wherever they can; the toolboxes hold a CPU torch.
            environment = {**os.environ, "BUILD_CUDA_EXT": "0", "BUILD_KERNELS": "0"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
        except OSError as error:
            reason = f"{Path(command[0]).name}: {error.strerror}"
            continue
        if done.returncode == 0:
            return
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else "no message"
    raise EnvironmentSetupError(
        f"The toolbox {name!r} could not be installed: {reason}",
        "Check the network and free disk space (2 GB), then run the command again.",
    )


def call(name: str, script: Path, arguments: dict[str, Any], *, timeout_s: float = 600) -> Any:
    """Run a Python file inside a toolbox: it gets the path of a JSON file in ``argv[1]`` and writes JSON to ``argv[2]``.

    Raises
    ------
    EnvironmentSetupError : the toolbox is not installed; the message holds the command that brings it.
    EngineError : the script failed or ran out of time; the end of its output is in the message.
    """
    state = status(name)
    if not state.installed:
        raise EnvironmentSetupError(f"The toolbox {name!r} is not installed.", f"Bring it with: {state.remedy}")
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "in.json", Path(folder) / "out.json"
        given.write_text(json.dumps(arguments), encoding="utf-8")
        environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV", "MPLBACKEND"}}
        try:
            done = subprocess.run(
                [str(_python(name)), str(script), str(given), str(result)],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                cwd=ROOT,
                env={**environment, "HF_HUB_OFFLINE": "1"},
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"{script.name} in the toolbox {name!r} did not end within {timeout_s:.0f} s.",
                "Give it more time or less work.",
            ) from error
        if done.returncode or not result.is_file():
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
            raise EngineError(f"{script.name} failed in the toolbox {name!r}:\n{tail}", "Read its last lines above.")
        return json.loads(result.read_text(encoding="utf-8"))
