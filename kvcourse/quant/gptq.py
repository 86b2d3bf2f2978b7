"""GPTQ: round a weight column by column, and let the columns not yet rounded make up for the error of each.

Frantar et al., "GPTQ", arXiv 2210.17323, sections 3.1 to 3.3 and algorithm 1. What shall stay small is the squared
error of the layer's output, |(W - Q) x|^2 over the calibration inputs; its Hessian, H = 2 E[x x^T], is the same for
every row of W. Rounding column j moves that output by an error; the change of the later columns that undoes most of it
has a closed form, and with U the upper Cholesky factor of the inverse, H^-1 = U^T U, it is

    error = (w_j - q_j) / U[j, j]            w_k -= error * U[j, k]   for every k > j

so row j of U holds all that column j needs. What is left in the end is the sum of these errors squared: an error of
column j counts 1 / U[j, j]^2.
"""

import math
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor

from kvcourse.quant.grid import TENSOR, Grid, as_grid, decode, encode, fit, require_finite, require_scales
from kvcourse.quant.tensor import QuantizedTensor, in_groups, require_matrix, rtn
from kvcourse.require import require_flag, require_whole

Fitted = tuple[Tensor, Tensor | None]  # scale and zero of one group of each row, (rows, 1)


@torch.no_grad()
def gptq(
    weight: Tensor,
    hessian: Tensor,
    bits: int,
    group_size: int | str | None = None,
    symmetric: bool = False,
    *,
    damping: float = 0.01,
    block_size: int = 128,
    act_order: bool = False,
    static_groups: bool = False,
    **options,
) -> QuantizedTensor:
    """Round a weight `(rows, columns)` so that the layer's output changes little; `hessian` `(columns, columns)` is
    that of `InputStatistics`. Bits, groups, `symmetric` and the options are those of `rtn`; NF4 is refused.

    `damping` is added to the diagonal, as a share of its mean. `block_size` columns are rounded before those behind
    them are updated: that is for speed, and changes a code only where two are about equally near. `act_order` takes
    columns with large inputs first. A grid is fitted when its group is reached; with `static_groups`, and for a whole
    row, before anything is rounded. `clip` weights errors by how much they count in the end. Inputs that are always 0
    are dead: their weights become 0.
    When H is too close to singular damping is raised, and at last the weight rounded to nearest; `note` says so.

    Raises `ValueError` for what `rtn` refuses, and for a Hessian of another shape, not finite, not symmetric, or with
    a negative diagonal.
    """
    grid = as_grid(bits, group_size, symmetric, **options)
    if grid.kind == "nf4":
        raise ValueError("GPTQ rounds onto even grids here: give a kind other than nf4, or use nf4 or rtn instead.")
    columns = require_matrix(weight).shape[1]
    size = grid.size(columns)
    require_scales(in_groups(weight, grid), grid)
    hessian = require_hessian(hessian, columns).to(weight.device, torch.float32)
    block_size = require_whole("block_size", block_size)
    act_order, static = require_flag("act_order", act_order), require_flag("static_groups", static_groups)
    static = static or grid.group_size in (None, TENSOR)

    diagonal = hessian.diagonal()
    order = torch.arange(columns, device=weight.device)
    order = diagonal.argsort(descending=True, stable=True) if act_order else order
    factor, note = inverse_factor(hessian[order][:, order], require_damping(damping))
    if factor is None:
        return replace(rtn(weight, bits, group_size, symmetric, **options), note=note)

    weight = weight.float().masked_fill(diagonal == 0, 0)
    fitted = fit_all(weight, grid, importance(factor)[order.argsort()]) if static else []
    grids = [fitted[column // size] for column in order.tolist()] if static else [None] * columns
    codes = round_columns(weight[:, order], factor, grid, grids, block_size)
    if static:  # columns share a grid with those beside them in the weight, so codes go back there
        codes = torch.empty_like(codes).index_copy_(1, order, codes)
    order = order.int() if act_order and not static else None
    scale, zero = zip(*(fitted or grids[::size]), strict=True)
    zero = None if zero[0] is None else torch.cat(zero, 1)
    return QuantizedTensor.of(codes, torch.cat(scale, 1), zero, grid, order=order, note=note)


def round_columns(weight: Tensor, factor: Tensor, grid: Grid, grids: list[Fitted | None], block_size: int) -> Tensor:
    """Codes `(rows, columns)` of a weight: algorithm 1. `factor` is U; `grids` holds what each column is rounded onto.
    Where that is None, it is fitted to the group that begins there, as its columns are by then, and put into `grids`.
    """
    weight = weight.T.contiguous().T  # the numbers of a column side by side in memory
    codes = torch.empty_like(weight, dtype=torch.uint8)
    size = grid.size(weight.shape[1])
    for start, stop in blocks(weight.shape[1], size, block_size):
        errors = torch.empty_like(weight[:, start:stop])
        for j in range(start, stop):
            if grids[j] is None:
                grids[j : j + size] = [fit(weight[:, j : j + size], grid, importance(factor)[j : j + size])] * size
            column = weight[:, j : j + 1]
            codes[:, j : j + 1] = code = encode(column, *grids[j], grid)
            error = errors[:, j - start] = (column - decode(code, *grids[j], grid))[:, 0] / factor[j, j]
            weight[:, j + 1 : stop].addr_(error, factor[j, j + 1 : stop], alpha=-1)  # -= error x row, in one pass
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return codes


def blocks(columns: int, size: int, block_size: int) -> list[tuple[int, int]]:
    """(start, stop) of blocks of about `block_size` columns. Each holds whole groups of `size` columns, or a part of
    one: columns behind a block are not up to date, and a group's grid must not be fitted to them."""
    span = size * max(1, block_size // size)
    starts = [start for first in range(0, columns, span) for start in range(first, first + span, block_size)]
    starts = [start for start in starts if start < columns]
    return list(zip(starts, [*starts[1:], columns], strict=True))


def inverse_factor(hessian: Tensor, damping: float) -> tuple[Tensor | None, str]:
    """(U, note): the upper Cholesky factor of the inverse of the damped Hessian, H^-1 = U^T U; U is None when there is
    no such factor. The note tells of raised damping, and of that.

    The inverse itself is not needed: from right to left, H = R R^T with R upper, and then U is the inverse of R.
    """
    diagonal = hessian.diagonal()
    living = diagonal > 0
    if not living.any():
        return None, "Every input was 0 in the calibration: rounded to nearest."
    identity = torch.eye(len(hessian), device=hessian.device)
    hessian = hessian / diagonal[living].mean() + identity * ~living
    for raised in (damping, *(max(damping, 0.001) * 10**times for times in (1, 2, 3))):
        lower, failed = torch.linalg.cholesky_ex((hessian + raised * identity).flip(0, 1))
        if not failed:
            factor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            return factor, "" if raised == damping else f"Damping was raised to {raised:g}: H is near singular."
    return None, f"H has no Cholesky factor, even with a damping of {raised:g}: rounded to nearest."


def importance(factor: Tensor) -> Tensor:
    """How much an error of each column counts `(columns,)`, beside that which counts most."""
    return (factor.diagonal().min() / factor.diagonal()).square()


def fit_all(weight: Tensor, grid: Grid, importance: Tensor) -> list[Fitted]:
    """(scale, zero) of every group of columns, from the weight as it is."""
    scale, zero = fit(in_groups(weight, grid), grid, in_groups(importance.expand_as(weight), grid))
    return [(scale[:, g], None if zero is None else zero[:, g]) for g in range(scale.shape[1])]


def require_hessian(hessian: Tensor, columns: int) -> Tensor:
    """`hessian` if it may be that of a layer with so many inputs, else `ValueError`."""
    require_finite("hessian", hessian)
    if hessian.shape != (columns, columns):
        raise ValueError(
            f"A weight of {columns} columns needs a hessian of shape {(columns, columns)}, got {tuple(hessian.shape)}."
        )
    if (hessian - hessian.T).abs().max() > 1e-3 * hessian.abs().max():
        raise ValueError("hessian must be symmetric: give that of InputStatistics.")
    if hessian.diagonal().min() < 0:
        raise ValueError("hessian has a negative diagonal, which no sum of x x^T has: give that of InputStatistics.")
    return hessian


def require_damping(damping: float) -> float:
    """`damping` if it is a finite number, 0 or above, else `ValueError`."""
    if isinstance(damping, bool) or not isinstance(damping, Real) or not 0 <= damping < math.inf:
        raise ValueError(f"damping={damping!r} must be a number of at least 0, and finite.")
    return float(damping)
