"""What a run of notebooks records: what each cell and notebook cost, how it ended, and how far a run came."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helpers.files import write_text
from helpers.paths import ROOT

RECORD = "run.json"
RESULTS = "results.json"

State = Literal["done", "failed", "not run"]


class CellRecord(BaseModel):
    """What one executed code cell cost. `cell` counts all cells from 1; memory is that of the kernel's process tree."""

    model_config = ConfigDict(extra="forbid")

    cell: int
    first_line: str
    seconds: float
    peak_bytes: int


class Outcome(BaseModel):
    """How one notebook ended."""

    model_config = ConfigDict(extra="forbid")

    name: str
    status: State
    seconds: float = 0.0
    peak_bytes: int = 0
    """Highest resident bytes of the kernel and all its children together; pages they share count once for each."""
    cells: list[CellRecord] = Field(default_factory=list)
    profile: str
    seed: int
    parameters: dict[str, Any]
    source_hash: str
    notebook: str
    error: str | None = None
    exit_code: int = 0
    notes: list[str] = Field(default_factory=list)


class Manifest(BaseModel):
    """One run of several notebooks: what was asked for, and how far it came."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    profile: str
    seed: int
    parameters: dict[str, Any]
    notebooks: dict[str, str]
    """Name to source hash, in order."""
    helpers_hash: str
    finished: bool = False
    outcomes: dict[str, Outcome] = Field(default_factory=dict)

    def same_settings(self, other: Manifest) -> bool:
        """Whether two runs asked for the same thing of the same helpers; a changed notebook matters to itself only."""
        mine, theirs = (
            (run.profile, run.seed, run.parameters, list(run.notebooks), run.helpers_hash) for run in (self, other)
        )
        return mine == theirs


def helpers_hash(folder: Path = ROOT / "helpers") -> str:
    """sha256 over the helpers' code: results made by different helpers do not belong to one run."""
    from hashlib import sha256

    digest = sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def write_record(record: BaseModel, path: Path) -> None:
    """Write a record as JSON in one step. Raises `RecordError` where it cannot be written."""
    write_text(path, record.model_dump_json(indent=1) + "\n")


def read_manifest(out: Path) -> Manifest | None:
    """The manifest of an earlier run in `out`; None where there is none or it is not one (it is then written anew)."""
    try:
        return Manifest.model_validate_json((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def finished_run(name: str, source_hash: str, out: Path) -> Outcome | None:
    """The notebook's outcome in the run in `out`, where that is what a smoke run with seed 0 would give now; else None.

    It must have ended well, in the profile ``smoke`` without further parameters, from the source with this hash, with the
    helpers as they are, and its results must still be there.
    """
    manifest = read_manifest(out)
    if manifest is None or manifest.helpers_hash != helpers_hash():
        return None
    outcome = manifest.outcomes.get(name)
    if outcome is None or outcome.status != "done" or outcome.source_hash != source_hash:
        return None
    same = (manifest.profile, manifest.seed, manifest.parameters) == ("smoke", 0, {})
    return outcome if same and (out / name / RESULTS).is_file() else None
