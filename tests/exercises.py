"""The tests that every notebook's exercises share, made from two tables of answers. A file of exercises is

    RIGHT = {"append": [code, ...]}  # ways to write it; at least two that are not the notebook's own
    MISTAKES = {"append": [(change, words), ...]}
    TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES)

and what is particular to it. A `change` is `(old, new)`, made in the first right way that has `old` exactly once, or
the text of a whole wrong answer. `words` must stand in the message ("a|b": one of the two).
"""

import functools
import textwrap

import numpy as np
import pytest
import torch

import kvcourse as kv
from kvcourse.check.catalog import CATALOG
from kvcourse.notebooks import exercises as notebook_exercises

solution = functools.cache(notebook_exercises.solution)


def learner(code: str):
    """The function defined by `code`, in a namespace of its own, as in a learner's notebook."""
    namespace = {"torch": torch, "np": np, "kv": kv}
    exec(textwrap.dedent(code), namespace)
    return [value for value in namespace.values() if hasattr(value, "__code__")][-1]


def wrong_answer(right_ways: list[str], change: tuple[str, str] | str) -> str:
    """The code of a wrong answer of the table MISTAKES."""
    if isinstance(change, str):
        return change
    old, new = change
    return next(code for code in map(textwrap.dedent, right_ways) if code.count(old) == 1).replace(old, new)


def as_numpy(value):
    """The same answer in NumPy's types, its floats in 64 bits."""
    return as_torch(value).numpy() if numbers(value) else rebuilt(value, as_numpy)


def as_torch(value):
    """The same answer in tensors, its floats in 64 bits."""
    if not numbers(value):
        return rebuilt(value, as_torch)
    tensor = torch.as_tensor(value)
    return tensor.double() if isinstance(value, float) or tensor.is_floating_point() else tensor


def as_plain(value):
    """The same answer in Python's own numbers and lists."""
    return torch.as_tensor(value).tolist() if numbers(value) else rebuilt(value, as_plain)


def numbers(value) -> bool:
    """Whether the value is one tensor, array or number, or a list of numbers."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(part, int | float) for part in value)
    return isinstance(value, int | float | np.ndarray | np.generic | torch.Tensor)


def rebuilt(value, part):
    return type(value)(map(part, value)) if isinstance(value, list | tuple) else value


FORMS = [as_numpy, as_torch, as_plain]


def shared_tests(notebook: str, right: dict, mistakes: dict, one_form: dict | None = None) -> type:
    """A class of tests. `one_form`: `{exercise: forms}` that an answer cannot have, with the reason beside it."""
    ways = [pytest.param(name, code, id=f"{name}-{i}") for name in right for i, code in enumerate(right[name], 1)]
    wrong = [
        pytest.param(name, change, words, id=f"{name}-{i}")
        for name in mistakes
        for i, (change, words) in enumerate(mistakes[name], 1)
    ]
    forms = [
        pytest.param(name, form, id=f"{name}-{form.__name__}")
        for name in right
        for form in FORMS
        if form not in (one_form or {}).get(name, ())
    ]

    class Exercises:
        def test_the_tables_know_every_exercise(self):
            assert list(right) == list(mistakes) == list(CATALOG[notebook])

        @pytest.mark.parametrize("name", right)
        def test_the_worked_answer_is_right_and_the_stub_not_attempted(self, name):
            verdict = getattr(kv.check, name)(solution(notebook, name))
            assert (verdict.status, verdict.message) == ("right", "")
            assert getattr(kv.check, name)(notebook_exercises.stub(notebook, name)).status == "not attempted"

        @pytest.mark.parametrize("name, code", ways)
        def test_right_ways_pass(self, name, code):
            verdict = getattr(kv.check, name)(learner(code))
            assert (verdict.status, verdict.message) == ("right", "")

        @pytest.mark.parametrize("name, form", forms)
        def test_a_right_answer_in_another_form_passes(self, name, form):
            verdict = getattr(kv.check, name)(lambda *given: form(solution(notebook, name)(*given)))
            assert (verdict.status, verdict.message) == ("right", "")

        @pytest.mark.parametrize("name, change, words", wrong)
        def test_mistakes_are_named(self, name, change, words):
            verdict = getattr(kv.check, name)(learner(wrong_answer(right[name], change)))
            assert verdict.status == "wrong"
            assert any(part in verdict.message for part in words.split("|")), verdict.message

        @pytest.mark.parametrize("name", right)
        def test_a_missing_return_is_asked_about(self, name):
            def forgetful(*given):
                solution(notebook, name)(*given)

            verdict = getattr(kv.check, name)(forgetful)
            assert verdict.status == "not attempted" and "is the return missing?" in verdict.message

        @pytest.mark.parametrize("name", right)
        def test_a_value_in_place_of_the_function_is_said_so(self, name):
            verdict = getattr(kv.check, name)([1, 2])
            assert verdict.status == "wrong"
            assert "pass the function itself" in verdict.message

    return Exercises
