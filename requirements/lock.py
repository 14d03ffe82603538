"""Regenerate ``requirements/cpu.txt`` from ``pyproject.toml``: ``python requirements/lock.py [--upgrade]``.

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
    """Write the lock of the project in `root`; returns uv's exit code, which is 0 where a solution was found."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--extra", "dev", "--universal"]
    command += ["--generate-hashes", "--no-annotate", "--quiet", "--custom-compile-command", COMMAND]
    command += ["--output-file", "requirements/cpu.txt"]
    if upgrade:
        command.append("--upgrade")
    return subprocess.run(command, cwd=root).returncode


def main() -> int:
    """Parse the command line and compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--upgrade", action="store_true", help="move every pin to the newest version that fits")
    return compile_lock(upgrade=parser.parse_args().upgrade)


if __name__ == "__main__":
    sys.exit(main())
