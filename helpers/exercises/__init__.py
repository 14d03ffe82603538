"""Exercises: ``check("01.2", function)`` says pass, fail (which property failed first, on which input) or not attempted.

A notebook's exercises are property tests in ``helpers/exercises/nbNN.py``, registered with `exercise`. Only pass is green.
"""

from __future__ import annotations

import importlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from helpers.errors import UnknownNameError, suggest

if TYPE_CHECKING:
    import torch

TO_DO = "Fill in the exercise's cell (the one with the docstring), run it, skip the solution, then run this cell again."

State = Literal["pass", "fail", "not attempted"]
TIME_LIMIT_S = 20.0
"""Seconds that all calls of one check may take together."""


def shown(value: object, n: int = 8) -> object:
    """A tensor or an array in one line, its shape and its first `n` elements; anything else as it is."""
    shape, flatten = getattr(value, "shape", None), getattr(value, "flatten", None)
    if shape is None or flatten is None:
        return value
    elements = flatten().tolist()
    first = ", ".join(f"{element:.5g}" if isinstance(element, float) else str(element) for element in elements[:n])
    return f"{list(shape)}: [{first}{', ...' if len(elements) > n else ''}]"


def not_finite(values: torch.Tensor) -> str:
    """How many of a tensor's elements are no numbers."""
    return f"{int((~values.isfinite()).sum())} of {values.numel()} values are NaN or infinite"


class Mismatch(Exception):
    """The first property that a student's answer does not have."""

    def __init__(self, prop: str, given: object, expected: object, got: object) -> None:
        super().__init__(f"{prop}\n  input:    {given}\n  expected: {shown(expected)}\n  got:      {shown(got)}")


class _OverTime(BaseException):
    """The time limit has passed. No Exception, so that an ``except Exception`` in an answer does not swallow it."""

    given = ""


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

    A function that raises NotImplementedError or gives None or ``...`` for the first input (where None is wrong), and an
    answer that is None or ``...`` itself, is *not attempted*. Any other exception in the answer is a failure, with its
    message, and so is running for more than `TIME_LIMIT_S` seconds (kept in the main thread only, see `_time_limit`).

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
        return result(
            "not attempted",
            TO_DO,
        )
    try:
        with _time_limit(TIME_LIMIT_S):
            checker(answer)
    except _OverTime as error:
        where = f"\n  input:    {error.given}" if error.given else ""
        return result("fail", f"Your code ran for more than {TIME_LIMIT_S:g} s.{where}")
    except NotImplementedError:
        return result(
            "not attempted",
            TO_DO,
        )
    except Mismatch as error:
        return result("fail", f"First broken property: {error}")
    except Exception as error:
        return result("fail", f"Your code raised {type(error).__name__}: {error}")
    return result("pass")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_OverTime` in the body after `seconds`, and each second after that, should the body swallow it.

    Python runs signal handlers in the main thread only, and Windows has no alarm: elsewhere there is no limit. A timer that
    was already running is put back with what is left of it; one that ended meanwhile fires at once.
    """
    previous = signal.getsignal(signal.SIGALRM) if hasattr(signal, "SIGALRM") else None
    if previous is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _OverTime

    started = time.monotonic()
    signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - started)), interval)


class Answer:
    """A student's function, called so that an error in it shows the input, and an empty body is told from a wrong None.

    Each check makes one. Its first call must be on an input for which None is wrong.
    """

    def __init__(self, function: Any) -> None:
        if not callable(function):
            raise Mismatch("the answer is a function", "the answer itself", "a function", repr(function))
        self._function = function
        self._first = True

    def __call__(self, prop: str, given: object, expected: object, *arguments: Any) -> Any:
        """The function's value for `arguments`; the other three describe the call where it fails.

        Raises
        ------
        NotImplementedError : the function raised it, or gave None or ``...`` at the first call.
        Mismatch : the function raised anything else.
        """
        shown, first, self._first = str(given), self._first, False
        try:
            value = self._function(*arguments)
        except NotImplementedError:
            raise
        except _OverTime as error:
            error.given = shown
            raise
        except Exception as error:
            raise Mismatch(prop, shown, expected, f"{type(error).__name__}: {error}") from error
        if first and (value is None or value is ...):
            raise NotImplementedError
        return value


def in_order(prop: str, given: object, expected: object, got: Any) -> list[Any]:
    """The items of an answer: a list, a tuple, an array, an iterator; nothing that has no order, and no text."""
    if isinstance(got, (str, bytes, dict, set, frozenset)):
        raise Mismatch(prop, given, expected, repr(got))
    try:
        return list(itertools.islice(got, 1000))
    except NotImplementedError:
        raise
    except Exception as error:
        raise Mismatch(prop, given, expected, f"{got!r} ({type(error).__name__}: {error})") from error


def parts(prop: str, given: object, expected: object, got: Any, n: int) -> list[Any]:
    """The `n` items of an answer with a length and an order: a tuple, a list, an array; no text, no dict."""
    ordered = hasattr(got, "__len__") and not isinstance(got, (str, bytes, dict, set, frozenset))
    try:
        items = list(got) if ordered else []
    except Exception:
        items = []
    expect(prop, given, len(items) == n, expected, repr(got))
    return items


def expect_equal(prop: str, given: object, got: Any, expected: Any) -> None:
    """Demand equality."""
    try:
        holds = bool(got == expected)
    except (TypeError, ValueError, RuntimeError):
        holds = False
    expect(prop, given, holds, repr(expected), repr(got))


def expect_close(
    prop: str, given: object, got: Any, expected: float, *, rel: float = 1e-6, absolute: float = 1e-9
) -> None:
    """Demand closeness of two numbers; a text is no number."""
    try:
        value = math.nan if isinstance(got, str) else float(got)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    expect(prop, given, math.isclose(value, expected, rel_tol=rel, abs_tol=absolute), repr(expected), repr(got))


def expect(prop: str, given: object, holds: bool, expected: object, got: object) -> None:
    """Demand that a property holds."""
    if not holds:
        raise Mismatch(prop, given, expected, got)
