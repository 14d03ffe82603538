"""Every error the course raises on purpose: a name, a symptom, a remedy and an exit code. Standard library only."""

from __future__ import annotations


class CourseError(Exception):
    """Something went wrong that the reader can understand and mend.

    Parameters
    ----------
    symptom : what happened, in one sentence, with the offending value in it.
    remedy : what to do about it, in one sentence.
    """

    exit_code = 1

    def __init__(self, symptom: str, remedy: str = "") -> None:
        super().__init__(symptom)
        self.symptom = symptom
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{type(self).__name__}: {self.symptom}"
        return f"{text}\n  Remedy: {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple:
        return type(self), (self.symptom, self.remedy)

    def _render_traceback_(self) -> list[str]:
        """Jupyter shows this instead of a stack trace."""
        return str(self).splitlines()


class UnknownNameError(CourseError):
    """A profile, notebook, parameter, model, engine or toolbox that does not exist."""

    exit_code = 2


class EnvironmentSetupError(CourseError):
    """Wrong Python, no disk, no network at first use, a missing package."""

    exit_code = 3


class ModelError(CourseError):
    """A model that cannot be found, verified, converted or loaded."""

    exit_code = 4


class NotebookError(CourseError):
    """A notebook that raised, ran out of time, or whose kernel died."""

    exit_code = 5


class RecordError(CourseError):
    """A results file that is missing, corrupt, or cannot be written."""

    exit_code = 6


class EngineError(CourseError):
    """An engine or server that did not start, died, or was asked for more than it has."""

    exit_code = 7


class MeasurementRefused(CourseError):
    """A measurement or comparison that would mislead: unlike workloads, a lagging client, a warm "cold" cache."""

    exit_code = 8


class DataError(CourseError):
    """A data file that is missing or whose hash is wrong."""

    exit_code = 9


def suggest(name: str, known: list[str]) -> str:
    """Return ``"Did you mean 'x'? Known: ..."`` for an unknown `name`."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known)}."
