"""What holds of every exercise: it has an answer that passes, and an untouched stub is not attempted."""

from __future__ import annotations

import pytest
from notebook_cells import answers, checked_functions

from helpers import exercises
from helpers.course.build import discover

NOTEBOOKS = [entry.name for entry in discover()]
EXERCISES = [(name, number, function) for name in NOTEBOOKS for number, function in checked_functions(name).items()]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_the_notebook_checks_every_exercise_that_has_a_checker(notebook):
    assert exercises.known(notebook[:2]) == sorted(checked_functions(notebook))


@pytest.mark.parametrize(("notebook", "number", "function"), EXERCISES, ids=[number for _, number, _ in EXERCISES])
def test_a_solution_passes_and_a_stub_is_not_attempted(notebook, number, function):
    result = exercises.check(number, answers(notebook, "solution")[function])
    assert result.state == "pass", result.message
    assert exercises.check(number, answers(notebook, "exercise")[function]).state == "not attempted"
    assert exercises.check(number, lambda *_, **__: None).state == "not attempted"
