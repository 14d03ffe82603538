"""Exercises: ``check("01.2", function)`` says pass, fail (which property failed first, on which input) or not attempted.

A notebook's exercises are property tests in ``helpers/exercises/nbNN.py``, registered with `exercise`. Only pass is green.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from helpers.errors import UnknownNameError, suggest

State = Literal["pass", "fail", "not attempted"]


class Mismatch(Exception):
    """The first property that a student's answer does not have."""

    def __init__(self, prop: str, given: object, expected: object, got: object) -> None:
        super().__init__(f"{prop}\n  input:    {given}\n  expected: {expected}\n  got:      {got}")


class ExerciseResult(BaseModel):
    """The outcome of one exercise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    title: str
    state: State
    message: str = ""

    def __repr__(self) -> str:
        sign = {"pass": "PASS", "fail": "FAIL", "not attempted": "NOT ATTEMPTED"}[self.state]
        head = f"[{sign}] {self.id} {self.title}"
        return f"{head}\n  {self.message}" if self.message else head

    __str__ = __repr__


Checker = Callable[[Any], None]
_registry: dict[str, tuple[str, Checker]] = {}


def exercise(exercise_id: str, title: str) -> Callable[[Checker], Checker]:
    """Register a checker: a function of the student's answer that raises `Mismatch` at the first broken property."""

    def register(checker: Checker) -> Checker:
        _registry[exercise_id] = (title, checker)
        return checker

    return register


def known(notebook: str) -> list[str]:
    """The exercise ids of a notebook (``"01"``)."""
    _load(notebook)
    return sorted(key for key in _registry if key.startswith(f"{notebook}."))


def _load(notebook: str) -> None:
    module = f"helpers.exercises.nb{notebook}"
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UnknownNameError(f"Notebook {notebook!r} has no exercises.", "Use an id such as 01.2.") from error


def check(exercise_id: str, answer: Any) -> ExerciseResult:
    """Check a student's answer.

    A function whose body is still ``...`` or raises NotImplementedError, and an answer of None or ``...``, is *not attempted*.
    Any other exception in the answer is a failure, with its message.

    Raises
    ------
    UnknownNameError : there is no such exercise.
    """
    _load(exercise_id.split(".")[0])
    if exercise_id not in _registry:
        raise UnknownNameError(f"There is no exercise {exercise_id!r}.", suggest(exercise_id, known(exercise_id[:2])))
    title, checker = _registry[exercise_id]

    def result(state: State, message: str = "") -> ExerciseResult:
        return ExerciseResult(id=exercise_id, title=title, state=state, message=message)

    if answer is None or answer is ...:
        return result("not attempted", "Fill in the cell above, then run this one again.")
    try:
        checker(answer)
    except NotImplementedError:
        return result("not attempted", "Fill in the cell above, then run this one again.")
    except Mismatch as error:
        return result("fail", f"First broken property: {error}")
    except Exception as error:
        return result("fail", f"Your code raised {type(error).__name__}: {error}")
    return result("pass")


def attempted(value: Any) -> Any:
    """Pass a student's return value on; ``None`` or ``...`` means that the body is still empty."""
    if value is None or value is ...:
        raise NotImplementedError
    return value


def expect_equal(prop: str, given: object, got: Any, expected: Any) -> None:
    """Demand equality."""
    if attempted(got) != expected:
        raise Mismatch(prop, given, expected, got)


def expect_close(
    prop: str, given: object, got: Any, expected: float, *, rel: float = 1e-6, absolute: float = 1e-9
) -> None:
    """Demand closeness of two numbers."""
    try:
        value = float(attempted(got))
    except (TypeError, ValueError):
        raise Mismatch(prop, given, expected, got) from None
    if not math.isclose(value, expected, rel_tol=rel, abs_tol=absolute):
        raise Mismatch(prop, given, expected, got)


def expect(prop: str, given: object, holds: bool, expected: object, got: object) -> None:
    """Demand that a property holds."""
    if not holds:
        raise Mismatch(prop, given, expected, got)
