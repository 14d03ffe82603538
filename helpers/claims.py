"""Claims: what a paper says, in which setting, how sure we are of the number, and what a run here says of it.

A claim's *form* decides the best verdict that a check here can earn. Counts, bytes and identities (``exact``) can be
reproduced on any machine; a speed-up on a GPU (``direction``) never is on a CPU, only its sign and order can.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict

from helpers.corpora import data_file
from helpers.errors import UnknownNameError, suggest

Form = Literal["exact", "direction"]
Status = Literal["paper text", "project README or source", "secondary", "unverified", "definition"]
Verdict = Literal["reproduced", "direction only", "not reproduced", "not run here"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "direction only", "not reproduced", "not run here")


class Claim(BaseModel):
    """One claim as a paper or project makes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    paper: str
    venue: str
    quoted: str
    """The claimed value, in the source's own figures."""
    setting: str
    source: str
    status: Status
    """How the number was seen: in the paper's text, in the project's README or source, in others' documents, or not."""
    form: Form
    check: str
    """What is checked here, in one sentence."""
    expected: Literal["holds", "fails", "either"] = "holds"
    """What the tests demand of the check: that it holds, that it fails (a known negative result), or neither, because it
    depends on the machine and both are results."""


class ClaimResult(BaseModel):
    """A claim with what was measured here and the verdict."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: Claim
    ours: str
    verdict: Verdict
    reason: str = ""
    hardware: str = ""
    date: str = ""

    def row(self) -> dict[str, str]:
        """The result as one flat row for tables and files."""
        fields = ("id", "paper", "quoted", "setting", "source", "status", "form")
        return {
            **{name: str(getattr(self.claim, name)) for name in fields},
            "ours": self.ours,
            "verdict": self.verdict,
            "reason": self.reason,
            "hardware": self.hardware,
            "date": self.date,
        }


@cache
def catalogue() -> dict[str, Claim]:
    """All claims of the course by id, from ``data/claims.json``."""
    rows = json.loads(data_file("claims.json").read_text(encoding="utf-8"))
    claims = [Claim.model_validate(row) for row in rows]
    return {claim.id: claim for claim in claims}


def claim(claim_id: str) -> Claim:
    """The claim with this id; `UnknownNameError` names the closest one otherwise."""
    if claim_id not in catalogue():
        raise UnknownNameError(f"There is no claim {claim_id!r}.", suggest(claim_id, list(catalogue())))
    return catalogue()[claim_id]


def judge(
    what: Claim, passed: bool | None, ours: str, *, reason: str = "", hardware: str = "", date: str = ""
) -> ClaimResult:
    """Turn a check's outcome into a verdict.

    Parameters
    ----------
    passed : whether the check held; None where it was not run, and then `reason` must say why.
    ours : what was measured here, in words and figures.
    """
    if passed is None:
        if not reason:
            raise ValueError(f"claim {what.id}: a check that was not run needs a reason")
        verdict: Verdict = "not run here"
    elif not passed:
        verdict = "not reproduced"
    else:
        verdict = "reproduced" if what.form == "exact" else "direction only"
    return ClaimResult(claim=what, ours=ours, verdict=verdict, reason=reason, hardware=hardware, date=date)
