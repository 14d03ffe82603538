"""Files that appear whole or not at all, and their sums. Standard library only."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from helpers.errors import RecordError


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path` in one step: a reader, or a crash, never sees half of it. Missing folders are made.

    Raises
    ------
    RecordError : the folder is full or read-only; whatever `path` held before is still there.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False, encoding="utf-8"
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # A temporary file is private; results are to be read by others.
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise RecordError(
            f"{path} cannot be written: {error.strerror or error}.",
            "Free some space there, or name another folder (OUT in a notebook, --out on the command line).",
        ) from error


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
