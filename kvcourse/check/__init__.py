"""Checkers of the exercises: `kv.check.NAME(your_answer)`. Each prints whether the answer is right, or what is not.

An exercise is a function marked `@exercise` (see `framework`) in one of the modules of this folder, with a line in
`catalog`. `kv.check.progress()` prints what is done, `kv.check.reset()` forgets it.
"""

import difflib
import importlib
import pkgutil

from kvcourse.check import framework
from kvcourse.check.standing import progress, reset

__all__ = ["progress", "reset"]


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _import_all()
    if name in framework.EXERCISES:
        return framework.EXERCISES[name]
    near = difflib.get_close_matches(name, framework.EXERCISES)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(framework.EXERCISES)}."
    raise AttributeError(f"kv.check knows no exercise {name!r}; {hint}")


def __dir__():
    _import_all()
    return sorted({*__all__, *framework.EXERCISES})


def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
