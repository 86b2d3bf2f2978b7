"""Grids: the few values that a number may take when it is kept in a few bits, and the rounding onto them.

Numbers that stand together share a grid: a *group*. The grid is fixed by a scale (the distance of two neighbours) and
something that says where it lies. A number is then kept as a *code*, the place on the grid: 0 to 2^bits - 1.

| kind | value of a code | what a group keeps beside its codes |
|---|---|---|
| `symmetric` | (code - 2^(bits - 1)) x scale | scale |
| `zero_point` | (code - zero) x scale | scale, and the code that means 0 |
| `minimum` | code x scale + minimum | scale, and the lowest value |
| `nf4` | level[code] x scale | scale: the largest magnitude |

In the first two and in NF4 zero is a value of the grid; with a minimum it need not be, and the grid does not reach to
zero where no number is. Scale and minimum are rounded to the type they are stored in *before* codes are chosen, so
that codes are nearest on the grid that is read back; and they are rounded outwards, the scale up and the minimum down,
so that the grid still reaches the outermost numbers. Without clipping a number is therefore off by at most half a
scale, as far as float32 can tell (NF4 aside, whose values are not evenly spread).
"""

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from kvcourse.quant.packing import require_bits
from kvcourse.require import require_flag, require_whole

KINDS = ("zero_point", "symmetric", "minimum", "nf4")
OPTIONS = ("kind", "clip", "scale_dtype")  # of a grid, beside bits and group_size
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHRINKS = tuple(1 - step / 20 for step in range(1, 11))  # tried by the clipping search: 0.95, 0.9, ..., 0.5
TENSOR = "tensor"


@dataclass(frozen=True)
class Grid:
    """How numbers are rounded. `group_size` numbers that follow each other in a row share a grid; None: the whole row
    (of a weight, an output channel) does; "tensor": all numbers do.

    `clip=True` looks, group by group, whether a grid that ends before the largest numbers has a smaller squared
    error. `scale_dtype` is what scale and minimum are stored in. Raises `ValueError` for a value that is not allowed.
    """

    bits: int
    group_size: int | str | None = None
    kind: str = "zero_point"
    clip: bool = False
    scale_dtype: torch.dtype = torch.float16

    def __post_init__(self):
        object.__setattr__(self, "bits", require_bits(self.bits))
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}.")
        if self.kind == "nf4" and self.bits != 4:
            raise ValueError(f"NF4 has 16 values, so bits must be 4, got {self.bits}.")
        object.__setattr__(self, "group_size", require_group_size(self.group_size))
        require_flag("clip", self.clip)
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(
                f"scale_dtype={self.scale_dtype!r} must be torch.float16, torch.bfloat16 or torch.float32."
            )

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    @property
    def center(self) -> int:
        """The code that means 0 on a symmetric grid."""
        return 2 ** (self.bits - 1)

    def size(self, columns: int) -> int:
        """Numbers of a row of `columns` that share a grid; `ValueError` when groups do not divide the row."""
        if self.group_size in (None, TENSOR):
            return columns
        if columns % self.group_size:
            fitting = [str(n) for n in range(1, columns + 1) if columns % n == 0 and (n >= 8 or columns < 16)]
            raise ValueError(
                f"A row of {columns} numbers does not divide into groups of group_size={self.group_size}: give one of "
                f"{', '.join(fitting)}, or None for the whole row."
            )
        return self.group_size


def require_group_size(group_size) -> int | str | None:
    """`group_size` if it is None, "tensor" or a whole number of at least 1, else `ValueError`."""
    if group_size is None or (isinstance(group_size, str) and group_size == TENSOR):
        return group_size
    try:
        return require_whole("group_size", group_size)
    except ValueError:
        raise ValueError(
            f"group_size={group_size!r} must be a whole number of at least 1, None for one grid a row, or "
            f'"{TENSOR}" for one grid in all.'
        ) from None


def as_grid(bits: int, group_size: int | str | None = None, symmetric: bool = False, **options) -> Grid:
    """A `Grid`; `symmetric=True` is short for `kind="symmetric"`. `ValueError` for an option that no grid has."""
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"There is no option {name}: those of a grid are {', '.join(OPTIONS)}.")
    if require_flag("symmetric", symmetric):
        if options.get("kind", "symmetric") != "symmetric":
            raise ValueError(f"symmetric=True contradicts kind={options['kind']!r}: give one of them.")
        options["kind"] = "symmetric"
    return Grid(bits, group_size, **options)


def require_finite(name: str, numbers: Tensor) -> Tensor:
    """`numbers` if all are finite, else `ValueError`: a NaN or an infinity would spoil the grid of its whole group."""
    if not torch.is_tensor(numbers) or not numbers.is_floating_point():
        kind = numbers.dtype if torch.is_tensor(numbers) else type(numbers).__name__
        raise ValueError(f"{name} must be a tensor of floating point numbers, got {kind}.")
    if not numbers.float().isfinite().all():  # as float32, in which grids are worked out: 1e300 is too large as well
        raise ValueError(f"{name} has numbers that are infinite or NaN; such numbers have no place on a grid.")
    return numbers


def require_scales(groups: Tensor, grid: Grid) -> Tensor:
    """`groups` `(..., n)` of weights if `grid.scale_dtype` has scales as small as they need, else `ValueError`.

    A scale is rounded up. From the smallest number of the type on, that makes it at most twice as large: a bit is lost
    at worst. Below, all of the group could become 0 unnoticed. A group of zeros needs no scale.
    """
    steps = {"nf4": 1, "symmetric": grid.center - 1}.get(grid.kind, grid.top)  # from 0 to the largest magnitude
    limits = torch.finfo(grid.scale_dtype)
    smallest = limits.smallest_normal * limits.eps
    largest = groups.detach().float().abs().amax(-1)
    lost = largest[(largest > 0) & (largest < steps * smallest)]
    if len(lost):
        wider = "multiply them with a large number"
        if grid.scale_dtype == torch.float16:
            wider = "give scale_dtype=torch.bfloat16 or torch.float32"
        raise ValueError(
            f"Numbers of a group go up to {lost.min().item():.4g} only, and in {grid.bits} bits need a scale too small "
            f"for {name_of(grid.scale_dtype)}, which begins at {smallest:.4g}; they would be lost: {wider}."
        )
    return groups


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fit(x: Tensor, grid: Grid, importance: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """(scale, zero) of the grids of x `(..., n)`: each row of n numbers is one group. Both are `(..., 1)`.

    Scale and minimum come in `grid.scale_dtype`, a zero point as uint8; a symmetric grid and NF4 have no zero. With
    `grid.clip` the squared errors are weighted with `importance` (broadcast to x). Raises `ValueError` when a scale or
    a minimum is too large for its type.
    """
    x = x.detach().float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale, zero = spread(low, high, grid)
    if not grid.clip:
        return scale, zero

    def misfit(scale: Tensor, zero: Tensor | None) -> Tensor:
        error = (decode(encode(x, scale, zero, grid), scale, zero, grid) - x).square()
        return (error if importance is None else error * importance).sum(-1, keepdim=True)

    middle = (low + high) / 2 if grid.kind == "minimum" else 0  # the other kinds hold 0, and shrink towards it
    least = misfit(scale, zero)
    for shrink in SHRINKS:
        tried = spread(middle + shrink * (low - middle), middle + shrink * (high - middle), grid)
        error = misfit(*tried)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, tried[0], scale)
        zero = None if zero is None else torch.where(better, tried[1], zero)
    return scale, zero


def spread(low: Tensor, high: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """(scale, zero) of grids that reach from `low` to `high`, and, unless they have a minimum, hold 0."""
    if grid.kind == "minimum":
        minimum = -stored(-low, grid, "minimum")
        return stored_scale((high - minimum.float()) / grid.top, grid), minimum
    low, high = low.clamp(max=0), high.clamp(min=0)
    if grid.kind == "zero_point":
        scale = stored_scale((high - low) / grid.top, grid)
        return scale, (-low / scale.float()).round().clamp(0, grid.top).to(torch.uint8)
    largest = torch.maximum(-low, high)
    return stored_scale(largest if grid.kind == "nf4" else largest / (grid.center - 1), grid), None


def stored_scale(scale: Tensor, grid: Grid) -> Tensor:
    """The scale as it is stored. Numbers that need none, as they all sit on one value of the grid, get 1."""
    return stored(torch.where(scale == 0, 1, scale), grid, "scale")


def stored(numbers: Tensor, grid: Grid, what: str) -> Tensor:
    """Numbers in `grid.scale_dtype`, rounded up; `ValueError` when one is too large for it."""
    kept = rounded_up(numbers, grid.scale_dtype)
    if kept.isfinite().all():
        return kept
    if not numbers.isfinite().all():
        raise ValueError("Numbers of a group are infinite, NaN, or further apart than float32 can tell.")
    largest = numbers.max().item() * (-1 if what == "minimum" else 1)  # a minimum comes with its sign turned
    raise ValueError(
        f"A {what} of {largest:.4g} is too large for {name_of(grid.scale_dtype)}, which ends at "
        f"±{torch.finfo(grid.scale_dtype).max:.4g}: give scale_dtype=torch.float32."
    )


def rounded_up(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest numbers of `dtype` that are not below these (float32); infinite where there is none."""
    kept = numbers.to(dtype)
    bits = kept.view(torch.int16 if dtype.itemsize == 2 else torch.int32)  # neighbours of one sign differ by 1
    above = torch.where(kept.signbit(), bits - 1, bits + 1).view(dtype)
    return torch.where(kept.float() < numbers, above, kept)


def encode(x: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """Codes (uint8) of the values of the grid nearest to x; scale and zero are broadcast to x. Halves go to even."""
    x, scale = x.float(), scale.float()
    if grid.kind == "nf4":
        levels = nf4_levels().to(x.device)
        return torch.bucketize((x / scale).contiguous(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    if grid.kind == "minimum":
        places = ((x - zero.float()) / scale).round()
    else:
        places = (x / scale).round() + (grid.center if zero is None else zero)
    return places.clamp(0, grid.top).to(torch.uint8)


def decode(codes: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """The values (float32) that codes stand for."""
    if grid.kind == "nf4":
        return nf4_levels().to(codes.device)[codes.long()] * scale.float()
    if grid.kind == "minimum":
        return codes.float() * scale.float() + zero.float()
    return (codes.float() - (grid.center if zero is None else zero.float())) * scale.float()


def in_dtype(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded numbers in `dtype`. A grid may reach just beyond the largest number of float16, where what was rounded
    onto it did not: such a value becomes that number. What is far beyond becomes infinite, so that it shows."""
    if dtype == torch.float16:  # the other types reach as far as float32
        end = torch.finfo(dtype).max
        numbers = torch.where(numbers.abs() < 2 * end, numbers.clamp(-end, end), numbers)
    return numbers.to(dtype)


def nf4_levels() -> Tensor:
    """The 16 values of NF4 `(16,)`, from -1 to 1: quantiles of a normal distribution, as weights are spread like one.

    Source: QLoRA, arXiv 2305.14314, section 3 and appendix E. There are 7 levels below zero, zero itself, and 8 above.
    The outermost quantile, about midway between 1 - 1/30 and 1 - 1/32, and its few digits are those of the authors'
    code, so that the values are theirs to the last bit.
    """

    def quantiles(n: int) -> list[float]:
        places = torch.linspace(0.9677083, 0.5, n + 1, dtype=torch.float32)[:-1]
        return [NormalDist().inv_cdf(place) for place in places.tolist()]

    above, below = quantiles(8), [-level for level in quantiles(7)]
    return torch.tensor(sorted([*below, 0.0, *above]), dtype=torch.float32) / max(above)
