"""Checks of single values, asked for everywhere: each returns the value, or raises one `ValueError` that names it."""

import math
from numbers import Integral, Real
from operator import index


def require_whole(name: str, value, least: int = 1) -> int:
    """`value` as an int if it is a whole number (NumPy's too) of at least `least`, else `ValueError` naming it."""
    try:
        whole = None if isinstance(value, bool) else index(value)
    except TypeError:
        whole = None
    if whole is None or whole < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")
    return whole


def require_number(name: str, value) -> float:
    """`value` as a plain int or float (NumPy's overflow, or lose digits) if it is a number above 0 that a float can
    hold, else `ValueError` naming it."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={value!r} must be a number greater than 0, and finite.")
    return int(value) if isinstance(value, Integral) else number


def require_flag(name: str, value) -> bool:
    """`value` if it is True or False, else `ValueError` naming it: the text "false" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False.")
    return value
