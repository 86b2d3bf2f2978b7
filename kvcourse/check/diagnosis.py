"""Say in one sentence how an answer differs from the right one.

Answers are compared as numbers: a tensor, an array, a nested list and a float that hold the same values in the
same shape are the same answer. Nothing here knows about exercises.
"""

from collections.abc import Iterable

import numpy as np
import torch


class NotAttempted(Exception):
    """The answer is still the stub's."""


def diagnose(got, right, mistakes: dict | None = None, tolerance: float | None = None) -> str | None:
    """None when `got` is the right answer, else a message that names what is wrong with it.

    - `right`: number, text, bytes, bool, tensor, array or (nested) list; a tuple stands for several outputs, a dict
      for named ones.
    - `mistakes`: `{message: the value which that mistake gives}`. When `got` is one of them, its message is the
      answer. One that equals `right` is ignored.
    - `tolerance`: greatest difference allowed, as a part of the largest value in `right`. Default: 1e-4, and
      nothing at all where `right` is made of whole numbers (1e-9, in case it was computed in floats).

    Raises `NotAttempted` when `got` is None or Ellipsis.
    """
    if got is None or got is ...:
        stub = "None (if you have written it: is the return missing?)" if got is None else "..."
        raise NotAttempted(f"the value is {stub}")
    fault = difference(got, right, tolerance)
    if fault is None:
        return None
    for message, wrong in (mistakes or {}).items():
        if matches(got, wrong, tolerance) and not matches(right, wrong, tolerance):
            return message
    return fault


def matches(got, right, tolerance: float | None = None) -> bool:
    """Whether the two are the same answer."""
    return difference(got, right, tolerance) is None


def difference(got, right, tolerance: float | None = None) -> str | None:
    """The first thing in which `got` differs from `right`, in words, or None."""
    if isinstance(right, str | bytes):
        same = isinstance(got, type(right)) and got == right
        return None if same else f"expected {right!r}, yours is {short(got)}"
    if isinstance(right, tuple):
        return _outputs_difference(got, right, tolerance)
    if isinstance(right, dict):
        if not isinstance(got, dict) or set(got) != set(right):
            yours = sorted(map(str, got)) if isinstance(got, dict) else short(got)
            return f"expected a dict with the keys {sorted(map(str, right))}, yours is {yours}"
        faults = ((key, difference(got[key], right[key], tolerance)) for key in right)
        return next((f"under {key!r}: {fault}" for key, fault in faults if fault), None)
    return _array_difference(got, right, tolerance)


def snapshot(value):
    """`value` with its tensors and arrays copied, so that later changes to them are not seen."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple, set):
        return type(value)(snapshot(part) for part in value)
    if type(value) is dict:
        return {key: snapshot(part) for key, part in value.items()}
    return value


def listed(value, right):
    """`value`; where `right` has a list, what gives its parts in order becomes one: a generator, values of a dict."""
    if isinstance(right, tuple) and type(value) in (list, tuple) and len(value) == len(right):
        return type(value)(map(listed, value, right))
    other = (str, bytes, dict, set, frozenset, list, tuple, torch.Tensor, np.ndarray)
    ordered = isinstance(value, Iterable) and not isinstance(value, other)
    return list(value) if ordered and isinstance(right, list) else value


def _outputs_difference(got, right: tuple, tolerance) -> str | None:
    if isinstance(got, torch.Tensor | np.ndarray) and got.ndim == 1:
        got = list(got)
    if not isinstance(got, tuple | list) or len(got) != len(right):
        yours = f"{len(got)}" if isinstance(got, tuple | list) else short(got)
        return f"expected {len(right)} values, yours is {yours}"
    for number, (mine, wanted) in enumerate(zip(got, right, strict=True), start=1):
        if mine is None:
            return f"value {number} of {len(right)} is None"
        if fault := difference(mine, wanted, tolerance):
            return f"value {number} of {len(right)}: {fault}"
    return None


def _array_difference(got, right, tolerance) -> str | None:
    right = _array(right)
    if isinstance(got, list | tuple) and not got and right.ndim and not len(right):
        return None  # nothing in it has a shape or a dtype
    try:
        values = _array(got)
    except (ValueError, TypeError, RuntimeError):
        return f"expected {_kind(right)}, yours is {short(got)}"
    if values.dtype.kind not in "biufc":
        return f"expected {_kind(right)}, yours is {short(got)}"
    if right.ndim == 0 and values.size == 1:
        values = values.reshape(())
    if values.shape != right.shape:
        turned = " (it is transposed)" if values.ndim > 1 and values.shape == right.shape[::-1] else ""
        return f"expected the shape {right.shape}, yours is {values.shape}{turned}"
    if (right.dtype.kind == "b") != (values.dtype.kind == "b"):
        return f"expected {_kind(right)}, yours {_held(got, values)}{_remedy(got, values, right)}"
    if right.ndim and right.dtype.kind in "iu" and values.dtype.kind not in "iu":
        return f"expected whole numbers ({right.dtype}), yours {_held(got, values)}{_remedy(got, values, right)}"
    return _value_difference(values, right, tolerance)


def _value_difference(got: np.ndarray, right: np.ndarray, tolerance) -> str | None:
    whole = right.dtype.kind in "biu"
    if whole and got.dtype.kind in "biu":
        allowed = (tolerance or 0) * np.abs(right.astype(np.float64)).max(initial=0)
        differs = got != right if not tolerance else np.abs(got.astype(np.float64) - right) > allowed
    else:
        tolerance = tolerance if tolerance is not None else 1e-9 if whole else 1e-4
        largest = np.abs(right[np.isfinite(right)]).max(initial=0) or 1.0
        differs = ~np.isclose(got, right, rtol=0, atol=tolerance * largest, equal_nan=True)
    if not differs.any():
        return None
    count = f" ({differs.sum()} of {differs.size} values differ)" if differs.size > 1 else ""
    if np.isnan(got[differs]).any():
        place = np.argwhere(differs & np.isnan(got))[0]
        return f"yours is NaN{_at(place)}{count}; NaN comes from 0/0, or from a softmax over nothing but -inf"
    place = np.argwhere(differs)[0]
    expected, yours = _apart(right[tuple(place)], got[tuple(place)])
    where = f"first difference{_at(place)}: " if differs.size > 1 else ""
    return f"{where}expected {expected}, yours is {yours}{count}{_factor(got, right)}"


def _factor(got: np.ndarray, right: np.ndarray) -> str:
    """A hint when all values are wrong by one factor."""
    if right.dtype.kind == "b" or got.dtype.kind == "c":
        return ""
    if not np.isfinite(got).all() or not np.isfinite(right).all():
        return ""
    nonzero = right != 0
    if not nonzero.any() or (got[~nonzero] != 0).any():
        return ""
    with np.errstate(over="ignore"):
        ratios = got[nonzero] / right[nonzero]
    ratio = ratios.flat[0]
    if ratio == 0 or abs(ratio - 1) < 0.01 or not np.allclose(ratios, ratio, rtol=1e-4, atol=0):
        return ""
    plain = any(abs(factor - round(factor)) < 1e-6 for factor in (ratio, 1 / ratio))
    if ratios.size < 3 and not plain:  # one or two values may have a common factor by chance
        return ""
    everywhere = "" if right.size == 1 else " everywhere"
    return f"; yours is {ratio:.4g} times the right value{everywhere}"


def _array(value) -> np.ndarray:
    """`value` as an array of numbers; floats become float64, other kinds keep their dtype."""
    if isinstance(value, list | tuple) and any(isinstance(part, torch.Tensor) for part in value):
        value = torch.stack([torch.as_tensor(part).detach().cpu() for part in value])
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.double() if value.is_floating_point() else value).numpy()
    array = np.asarray(value)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _held(got, values: np.ndarray) -> str:
    """The dtype of the learner's own tensor or array, which `values` need not have; of anything else what it holds."""
    if isinstance(got, torch.Tensor | np.ndarray | np.generic):
        return f"has the dtype {str(got.dtype).removeprefix('torch.')}"
    if not values.ndim:
        return f"is {short(got)}"
    kinds = {"b": "True and False", "f": "floats", "c": "complex numbers"}
    return f"holds {kinds.get(values.dtype.kind, 'whole numbers')}"


def _remedy(got, values: np.ndarray, right: np.ndarray) -> str:
    """How to convert a tensor or an array whose values allow it."""
    if right.dtype.kind == "b":
        fits, calls, made = np.isin(values, (0, 1)).all(), (".bool()", ".astype(bool)"), "True and False"
    elif right.dtype.kind in "iu" and values.dtype.kind == "f":
        fits = np.isfinite(values).all() and np.all(values == values.round())
        calls, made = (".long()", ".astype(int)"), "whole numbers"
    else:
        return ""
    if not fits or not isinstance(got, torch.Tensor | np.ndarray):
        return ""
    return f"; `{calls[isinstance(got, np.ndarray)]}` makes {made} of it"


def _kind(array: np.ndarray) -> str:
    kind = {"b": "True or False", "i": "whole numbers", "u": "whole numbers"}.get(array.dtype.kind, "numbers")
    if array.ndim:
        return f"{kind} in the shape {array.shape}"
    return {"whole numbers": "a whole number", "numbers": "a number"}.get(kind, kind)


def _at(place: np.ndarray) -> str:
    if not place.size:
        return ""
    return f" at [{', '.join(map(str, place))}]"


def _apart(one, other) -> tuple[str, str]:
    """Two different numbers in one format, with as many digits as it takes to see the difference."""
    if isinstance(one, np.bool_):
        return f"{one}", f"{other}"
    whole = all(isinstance(value, np.integer) for value in (one, other))
    sizes = [abs(value) for value in (one, other) if np.isfinite(value)]
    places = max((len(str(int(size))) for size in sizes if size < 1e15), default=1)  # no 5e+05 beside 498304
    for digits in (5, 8, 12, 17):
        texts = tuple(f"{value}" if whole else f"{value:.{max(digits, places)}g}" for value in (one, other))
        if complex(texts[0]) != complex(texts[1]):
            break
    return texts


def short(value) -> str:
    """The value for a message: its type, and itself where that is short."""
    text = repr(value)
    if isinstance(value, str | bytes | bool | int | float) and len(text) <= 60:
        return f"the {type(value).__name__} {text}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
