"""AWQ: before rounding, columns that meet large inputs are made larger, and the inputs smaller by as much.

Lin et al., "AWQ", arXiv 2306.00978, section 3.2. W x = (W s) (x / s) for any scale s of the columns. On a grid whose
ends hardly move, a column that was multiplied with s > 1 is rounded s times finer. Which s is best is searched along
one line, s = (mean magnitude of the input)^ratio: ratio 0 changes nothing, and with 1 all inputs become equally large.
"""

from contextlib import suppress
from dataclasses import replace
from math import log

import torch
from torch import Tensor

from kvcourse.quant.statistics import InputStatistics, output_error
from kvcourse.quant.tensor import QuantizedTensor, require_matrix, rtn

RATIOS = tuple(step / 20 for step in range(20))
FURTHEST = 1e4  # times the typical magnitude, or that part of it; beyond, float16 could not hold the scales of groups


@torch.no_grad()
def awq(
    weight: Tensor,
    inputs: InputStatistics,
    bits: int,
    group_size: int | str | None = None,
    symmetric: bool = False,
    **options,
) -> QuantizedTensor:
    """Round a weight `(rows, columns)` after multiplying its columns with the scale that `search_scales` finds.

    The result holds the codes of W s and, as `column_scale`, s: it dequantizes to Q(W s) / s. Arguments and errors are
    those of `rtn`, and `ValueError` for statistics of another width, or empty ones.
    """
    scale = search_scales([weight], inputs, bits, group_size, symmetric, **options)
    return round_scaled(weight, scale, bits, group_size, symmetric, **options)


@torch.no_grad()
def search_scales(
    weights: list[Tensor],
    inputs: InputStatistics,
    bits: int,
    group_size: int | str | None = None,
    symmetric: bool = False,
    **options,
) -> Tensor:
    """The scale `(columns,)`, above 0, of the columns of `weights` that share their input: of those tried, the one
    with the least error of their outputs together. A scale of 1, so plain rounding, is among them."""
    if not isinstance(inputs, InputStatistics):
        raise ValueError(f"inputs must be InputStatistics, got {type(inputs).__name__}.")
    if len(weights) == 0:
        raise ValueError("weights must be a list of at least one matrix, got an empty one.")
    for weight in weights:
        columns = require_matrix(weight).shape[1]
        if columns != len(inputs.magnitude):
            given = len(inputs.magnitude)
            raise ValueError(f"A weight of {columns} columns needs statistics of as many inputs, got {given}.")
    magnitude, hessian = (sums.to(weights[0].device) for sums in (inputs.magnitude, inputs.hessian))

    def error(scale: Tensor) -> float:
        rounded = (round_scaled(weight, scale, bits, group_size, symmetric, **options) for weight in weights)
        return sum(output_error(w, q.dequantize(), hessian) for w, q in zip(weights, rounded, strict=True))

    best = scale_for(magnitude, 0)
    least = error(best)
    for ratio in RATIOS[1:]:
        tried = scale_for(magnitude, ratio)
        with suppress(ValueError):  # numbers that scale_dtype is too narrow for, once they are multiplied
            found = error(tried)
            best, least = (tried, found) if found < least else (best, least)
    return best


def scale_for(magnitude: Tensor, ratio: float) -> Tensor:
    """magnitude^ratio `(columns,)`, where magnitudes are measured by their geometric mean: then scales are too, and a
    ratio of 0 gives exactly 1. Inputs that are always 0 have no say, and get 1."""
    living = magnitude > 0
    logs = magnitude.log()
    logs = (logs - logs[living].mean()).clamp(-log(FURTHEST), log(FURTHEST))
    return (ratio * logs).exp().where(living, 1.0)


def round_scaled(weight: Tensor, scale: Tensor, bits: int, group_size, symmetric: bool, **options) -> QuantizedTensor:
    """Q(W s), which remembers s."""
    return replace(rtn(weight.float() * scale, bits, group_size, symmetric, **options), column_scale=scale)
