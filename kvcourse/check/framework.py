"""What a checker of an exercise is made of.

A checker is a function marked `@exercise`; its name is the exercise's name, which `catalog` has too. It gets the
learner's answer and returns None (right) or a sentence that says what is wrong. Most are one call of `compare`:

    @exercise
    def softmax_rows(answer):
        def right(scores):
            return torch.softmax(scores, dim=-1)

        return compare(
            answer,
            right,
            cases=[torch.tensor([[0.0, 1.0], [2.0, 2.0]]), normal(3, 5), 1000 * normal(3, 5)],
            mistakes={
                "the columns sum to 1, the rows should: sum over the last dimension": lambda s: torch.softmax(s, 0),
                "the rows do not sum to 1: divide by the sum": torch.exp,
            },
        )

The learner calls `kv.check.softmax_rows(my_function)`. It prints one line, returns the same as a `Verdict`, and
never raises for a wrong answer: an exception in the learner's code is part of the verdict. One in the checker
itself is a fault of the course and is raised.
"""

import functools
import inspect
import linecache
import random
import traceback
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kvcourse import results
from kvcourse.check.diagnosis import NotAttempted, diagnose, listed, matches, short, snapshot

__all__ = ["Verdict", "compare", "diagnose", "error_of", "exercise", "normal", "told"]

EXERCISES = {}  # name -> Exercise, filled by @exercise


@dataclass(frozen=True, repr=False)
class Verdict(results.Spoken):
    """How an answer stands. `status` is "right", "wrong" or "not attempted"; `message` says what is wrong."""

    name: str
    status: str
    message: str = ""

    def __repr__(self):
        said = {"right": "right.", "wrong": "not right yet:", "not attempted": "not attempted yet."}[self.status]
        return f"{self.name} is {said} {self.message}".rstrip()


class Exercise:
    """A checker as the learner calls it: `kv.check.NAME(answer) -> Verdict`."""

    def __init__(self, body, value: bool):
        self.body, self.value = body, value
        functools.update_wrapper(self, body)

    def __call__(self, answer) -> Verdict:
        status, message = self._examine(answer)
        verdict = Verdict(self.__name__, status, message).say()
        results.record_exercise(self.__name__, status)  # last: the verdict is told whatever becomes of the file
        return verdict

    def __repr__(self):
        return f"<checker kv.check.{self.__name__}: call it with your answer>"

    def _examine(self, answer) -> tuple[str, str]:
        if answer is None or answer is ...:
            return "not attempted", ""
        if not self.value and not callable(answer):
            return "wrong", f"pass the function itself, without calling it; {short(answer)} was given"
        namespace = _namespace(answer)
        try:
            message = self.body(_guarded(answer) if callable(answer) else answer)
        except NotAttempted as stub:
            return "not attempted", f"({stub})" if str(stub) else ""
        except LearnerError as error:
            return _about_exception(error.__cause__, namespace)
        except Exception as error:  # raised by an object that the answer made, or by the checker itself?
            if not _frames_of(error, namespace):
                raise
            return _about_exception(error, namespace)
        return ("right", "") if message is None else ("wrong", message)


class LearnerError(Exception):
    """Carries an exception out of the learner's code; `__cause__` is the exception."""


def exercise(body=None, *, value: bool = False) -> Exercise:
    """Make a checker of `body(answer) -> None | str` and register it under its name.

    The answer is a function (or class); `@exercise(value=True)` is for one that is a number, a text, a tensor.
    `answer` is what the learner gave. A function or class is wrapped: it gets copies of tensors, arrays and
    containers (so it may change them), a fixed seed, and leaves the global random state as it was. The original
    is `answer.__wrapped__`. Raises `ValueError` when another exercise has the name.
    """
    if body is None:
        return functools.partial(exercise, value=value)
    name = body.__name__
    if name in EXERCISES and EXERCISES[name].__module__ != body.__module__:
        raise ValueError(f"two exercises are called {name!r}: in {EXERCISES[name].__module__} and {body.__module__}.")
    EXERCISES[name] = Exercise(body, value)
    return EXERCISES[name]


def compare(answer, right, cases: list, mistakes: dict | None = None, tolerance: float | None = None) -> str | None:
    """Run the learner's function and the reference `right` on each case; None when all agree, else what is wrong.

    - `cases`: a tuple holds the arguments of one call, anything else is its only argument. A case may be a
      function without parameters that makes the arguments, for objects that each call needs anew (a cache).
    - `mistakes`: `{message: function}`; each function takes the same arguments and computes what a usual mistake
      computes. The message is given when it explains the answers to all cases up to the first wrong one.
    - `tolerance`: see `diagnose`.

    Where `right` gives a list, a generator or the like is as good. None after a case with an answer is wrong.
    """
    answers = []
    for case in cases:
        got, expected = answer(*_arguments(case)), right(*_arguments(case))
        got = snapshot(listed(got, expected))
        if answers and (got is None or got is ...):
            return f"with {_described(right, case)}, it returns {got}: every way through the function needs a return"
        answers.append((case, got))
        fault = diagnose(got, expected, tolerance=tolerance)
        if fault:
            named = (text for text, wrong in (mistakes or {}).items() if _explains(wrong, right, answers, tolerance))
            return next(named, f"with {_described(right, case)}, {fault}")
    return None


def error_of(answer, *arguments) -> Exception | None:
    """The exception which the learner's function raises for these arguments, or None when it returns."""
    try:
        answer(*arguments)
    except LearnerError as error:
        return error.__cause__
    return None


def normal(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Standard normal numbers, the same on every machine and untouched by the global random state."""
    numbers = np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)
    return torch.from_numpy(numbers).to(dtype)


def _arguments(case) -> tuple:
    case = case() if callable(case) and not isinstance(case, torch.nn.Module) else case
    return snapshot(case if isinstance(case, tuple) else (case,))


def _explains(wrong, right, answers: list, tolerance) -> bool:
    """Whether the mistake gives all these answers, and not always the right one."""
    try:
        values = [(got, wrong(*_arguments(case)), right(*_arguments(case))) for case, got in answers]
        return all(matches(got, value, tolerance) for got, value, _ in values) and not all(
            matches(value, correct, tolerance) for _, value, correct in values
        )
    except Exception:  # a mistake need not be defined for every case; then it explains nothing
        return False


def _described(right, case) -> str:
    """The case in words: small values themselves, arrays by their shape."""
    arguments = _arguments(case)
    names = list(inspect.signature(right).parameters)
    return ", ".join(
        f"{names[i] if i < len(names) else f'argument {i + 1}'} {_value(value)}" for i, value in enumerate(arguments)
    )


def _value(value) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim <= 1 and len(value.reshape(-1)) <= 8:
            return f"= {value.tolist()}"
        return f"of shape {tuple(value.shape)}"
    text = repr(value)
    if isinstance(value, bytes) and len(text) > 60:
        text = f"bytes.fromhex({value.hex()!r})"
    return f"= {text}" if len(text) <= 60 and " at 0x" not in text else f"(a {type(value).__name__})"


# The learner's code ---------------------------------------------------------------------------------------------


def _guarded(answer):
    """`answer`, called with copies and a fixed seed; what it raises comes out as `LearnerError`."""

    def call(*args, **kwargs):
        with _random_state_kept():
            try:
                return answer(*snapshot(args), **snapshot(kwargs))
            except Exception as error:
                raise LearnerError from error

    call.__wrapped__ = answer
    return call


@contextmanager
def _random_state_kept():
    """Seed all global random generators with 0, and put them back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _namespace(answer) -> dict:
    """The globals of the code that the learner wrote: every function defined in the same notebook has them."""
    while hasattr(answer, "func") and not hasattr(answer, "__globals__"):  # functools.partial
        answer = answer.func
    if hasattr(answer, "__globals__"):
        return answer.__globals__
    kind = answer if isinstance(answer, type) else type(answer)
    return next((value.__globals__ for value in vars(kind).values() if hasattr(value, "__globals__")), {})


def _frames_of(error: BaseException, namespace: dict) -> list:
    """(frame, line number) of the learner's code in the traceback, outermost first."""
    return [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_globals is namespace]


def _about_exception(error: BaseException, namespace: dict) -> tuple[str, str]:
    frames = _frames_of(error, namespace)
    innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    if isinstance(error, NotImplementedError) and frames and frames[-1][0] is innermost:
        return "not attempted", ""
    where = ""
    if frames:
        frame, line = frames[-1]
        code = linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
        where = f", in line {line}" + (f": {code}" if code else "")
    return "wrong", f"it raises {told(error)}{where}"


def told(error: BaseException) -> str:
    """The kind of an exception, and its text where it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
