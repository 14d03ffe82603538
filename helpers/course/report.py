"""The scoreboard: every claim of every results file under a folder, with the paper's value, ours and the verdict."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from helpers.claims import VERDICTS
from helpers.errors import RecordError
from helpers.files import write_text

SCHEMA = 1
COLOURS = {"reproduced": "green", "direction only": "cyan", "not reproduced": "red", "not run here": "dim"}
REQUIRED = ("schema", "notebook", "profile", "parameters", "claims")


class ScoreRow(BaseModel):
    """One claim as one notebook judged it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    notebook: str
    profile: str
    id: str
    paper: str
    quoted: str
    setting: str
    ours: str
    verdict: str
    reason: str = ""


class Scoreboard(BaseModel):
    """All claims under a folder, the totals, and the files that could not be counted."""

    model_config = ConfigDict(extra="forbid")

    rows: list[ScoreRow] = Field(default_factory=list)
    exercises: dict[str, str] = Field(default_factory=dict)
    """Exercise to state: pass, fail or not attempted."""
    left_out: list[str] = Field(default_factory=list)
    """Files named results.json that are corrupt or not the course's, each with the reason."""

    @property
    def totals(self) -> dict[str, int]:
        """Claims per verdict, in the order of `helpers.claims.VERDICTS`."""
        counted = Counter(row.verdict for row in self.rows)
        return {verdict: counted[verdict] for verdict in VERDICTS}


def read_results(path: Path) -> dict[str, Any]:
    """The content of one results file.

    Raises
    ------
    RecordError : it cannot be read, is not JSON, or is not a results file of the course.
    """
    remedy = "Delete it and run that notebook again."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}.", remedy) from error
    except ValueError as error:
        raise RecordError(f"{path} is corrupt (not JSON: {error}).", remedy) from error
    missing = [key for key in REQUIRED if key not in content] if isinstance(content, dict) else list(REQUIRED)
    if missing:
        raise RecordError(f"{path} is not a results file of the course: it lacks {', '.join(missing)}.", remedy)
    if content["schema"] != SCHEMA:
        raise RecordError(f"{path} has schema {content['schema']!r}; this version reads {SCHEMA}.", remedy)
    if not isinstance(content["claims"], list) or not isinstance(content["parameters"], dict):
        raise RecordError(f"{path} is corrupt: its claims or parameters have the wrong type.", remedy)
    return content


def claim_rows(results: dict[str, Any], path: Path) -> list[ScoreRow]:
    """The claims of one results file's content; `path` is named where one is unreadable.

    Raises
    ------
    RecordError : a claim lacks a field or has an unknown verdict.
    """
    profile = results["profile"]
    name = profile.get("name", "?") if isinstance(profile, dict) else str(profile)
    rows = []
    for claim in results["claims"]:
        try:
            row = ScoreRow.model_validate({"notebook": results["notebook"], "profile": name, **claim})
        except (TypeError, ValueError) as error:
            raise RecordError(
                f"{path} is corrupt: a claim is not readable ({str(error).splitlines()[0]}).",
                "Delete it and run that notebook again.",
            ) from error
        if row.verdict not in VERDICTS:
            raise RecordError(
                f"{path} is corrupt: claim {row.id} has the verdict {row.verdict!r}.", "Run that notebook again."
            )
        rows.append(row)
    return rows


def load(folder: Path, names: Iterable[str] | None = None) -> Scoreboard:
    """The scoreboard of every ``results.json`` under `folder`; only those of the notebooks `names`, where given.

    Files that cannot be counted are named in `Scoreboard.left_out`.

    Raises
    ------
    RecordError : there is no results file at all.
    """
    board = Scoreboard()
    wanted = None if names is None else set(names)
    paths = [path for path in sorted(folder.rglob("results.json")) if wanted is None or path.parent.name in wanted]
    if not paths:
        raise RecordError(f"There is no results.json under {folder}.", "Run notebooks first: python3 -m helpers run")
    for path in paths:
        try:
            results = read_results(path)
            rows = claim_rows(results, path)
        except RecordError as error:
            board.left_out.append(error.symptom)
            continue
        board.rows += rows
        exercises = results.get("exercises")
        for exercise, state in exercises.items() if isinstance(exercises, dict) else ():
            board.exercises[str(exercise)] = str(state.get("state", "?")) if isinstance(state, dict) else str(state)
    return board


def scoreboard_table(board: Scoreboard) -> Table:
    """The scoreboard for a terminal."""
    totals = ", ".join(f"{count} {verdict}" for verdict, count in board.totals.items())
    table = Table(title=f"Scoreboard: {totals}", title_justify="left", show_lines=True)
    for heading in ("notebook", "paper", "the paper says", "setting", "ours", "verdict"):
        table.add_column(heading, overflow="fold")
    for row in board.rows:
        colour = COLOURS[row.verdict]
        ours = row.ours or row.reason
        cells = [_plain(text) for text in (row.notebook, row.paper, row.quoted, row.setting, ours)]
        table.add_row(*cells, f"[{colour}]{row.verdict}[/]")
    return table


def _plain(text: str) -> str:
    """Text in which rich finds no markup."""
    return text.replace("[", "\\[")


def scoreboard_markdown(board: Scoreboard) -> str:
    """The scoreboard as a Markdown document."""
    lines = ["# Scoreboard", "", ", ".join(f"**{count}** {verdict}" for verdict, count in board.totals.items()), ""]
    lines += ["| notebook | profile | paper | the paper says | setting | ours | verdict | reason |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for row in board.rows:
        fields = (row.notebook, row.profile, row.paper, row.quoted, row.setting, row.ours, row.verdict, row.reason)
        lines.append("| " + " | ".join(_cell(field) for field in fields) + " |")
    if board.left_out:
        lines += ["", "Left out:", "", *(f"- {text}" for text in board.left_out)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write(board: Scoreboard, folder: Path) -> None:
    """Write ``scoreboard.json`` and ``scoreboard.md`` into `folder`, each in one step.

    Raises
    ------
    RecordError : they cannot be written.
    """
    content = {"totals": board.totals, **board.model_dump()}
    for name, text in (
        ("scoreboard.json", json.dumps(content, indent=1) + "\n"),
        ("scoreboard.md", scoreboard_markdown(board)),
    ):
        write_text(folder / name, text)
