"""Regenerate the locks, ``cpu.txt`` from ``pyproject.toml`` and each toolbox's: ``python requirements/lock.py [--upgrade]``.

Pins that still satisfy ``pyproject.toml`` stay as they are; ``--upgrade`` moves every pin to the newest version.
The result holds for all supported Pythons and systems at once (environment markers), with the hashes of every file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "python requirements/lock.py"


def compile_lock(root: Path = ROOT, *, upgrade: bool = False) -> int:
    """Write the locks of the project in `root`, its own and each toolbox's.

    Returns uv's exit code, which is 0 where a solution was found for all of them.
    """
    sources = {"requirements/cpu.txt": ["pyproject.toml", "--extra", "dev"]}
    for toolbox in sorted((root / "requirements").glob("*.in")):
        sources[f"requirements/{toolbox.stem}.txt"] = [f"requirements/{toolbox.name}", "--python-version", "3.11"]
    for target, source in sources.items():
        command = [sys.executable, "-m", "uv", "pip", "compile", *source, "--universal", "--generate-hashes"]
        command += ["--no-annotate", "--quiet", "--custom-compile-command", COMMAND, "--output-file", target]
        if upgrade:
            command.append("--upgrade")
        if code := subprocess.run(command, cwd=root).returncode:
            return code
    return 0


def main() -> int:
    """Parse the command line and compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--upgrade", action="store_true", help="move every pin to the newest version that fits")
    return compile_lock(upgrade=parser.parse_args().upgrade)


if __name__ == "__main__":
    sys.exit(main())
