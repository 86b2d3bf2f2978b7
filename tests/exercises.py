"""What the tests of every notebook's exercises share: a learner's function from its text, and mistakes made in it."""

import textwrap

import numpy as np
import torch

import kvcourse as kv
from kvcourse.notebooks.exercises import solution, stub


def learner(code: str):
    """The function defined by `code`, in a namespace of its own, as in a learner's notebook."""
    namespace = {"torch": torch, "np": np, "kv": kv}
    exec(textwrap.dedent(code), namespace)
    return [value for value in namespace.values() if hasattr(value, "__code__")][-1]


def assert_worked_answer_is_right_and_stub_not_attempted(notebook: str, name: str) -> None:
    verdict = getattr(kv.check, name)(solution(notebook, name))
    assert (verdict.status, verdict.message) == ("right", "")
    assert getattr(kv.check, name)(stub(notebook, name)).status == "not attempted"


def assert_mistake_is_named(name: str, code: str, change: tuple[str, str] | None, phrase: str) -> None:
    """The answer `code`, with one thing changed, is wrong, and the message has one of the words in `phrase` (a|b)."""
    if change:
        assert code.count(change[0]) == 1
        code = code.replace(*change)
    verdict = getattr(kv.check, name)(learner(code))
    assert verdict.status == "wrong"
    assert any(part in verdict.message for part in phrase.split("|")), verdict.message
