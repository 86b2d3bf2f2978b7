"""A weight in a few bits: packed codes, and the grid of each group. `rtn` makes one by rounding to nearest."""

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from kvcourse.quant.grid import TENSOR, Grid, as_grid, decode, encode, fit, in_dtype, require_finite, require_scales
from kvcourse.quant.packing import pack, packed_bytes, unpack


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A matrix `(rows, columns)`; a row is an output channel of a linear layer. `QuantizedTensor.of` packs one.

    `codes` `(rows, bytes)` and a zero point `(rows, bytes)` are packed; `scale` and a minimum are `(rows, groups)`.
    `order` says which column the code at each place belongs to (None: its own). `column_scale` `(columns,)` is what
    columns were multiplied with before rounding; dequantizing divides by it. `note` tells what the method could not do.
    Raises `ValueError` when these do not fit together.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    grid: Grid
    shape: tuple[int, int]
    order: Tensor | None = None
    column_scale: Tensor | None = None
    note: str = ""

    def __post_init__(self):
        expected = layout(self.shape, self.grid)
        for name in ("codes", "scale", "zero"):
            tensor = getattr(self, name)
            got = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            if got != expected.get(name):
                raise ValueError(
                    f"{name} of a matrix {self.shape} on {self.grid} must be {expected.get(name)}, got {got}."
                )
        columns = self.shape[1]
        if self.column_scale is not None and self.column_scale.shape != (columns,):
            raise ValueError(f"column_scale must have shape ({columns},), got {tuple(self.column_scale.shape)}.")
        if self.order is not None and self.order.sort().values.tolist() != list(range(columns)):
            raise ValueError(f"order must hold each column from 0 to {columns - 1} once.")

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid, **more) -> "QuantizedTensor":
        """From codes `(rows, columns)` in uint8, and scale and zero `(rows, groups)` as `fit` gives them."""
        shape = tuple(codes.shape)
        packed = pack(codes.reshape(1, -1) if grid.group_size == TENSOR else codes, grid.bits)
        if zero is not None:
            zero = pack(zero, grid.bits) if grid.kind == "zero_point" else copied(zero)
        return cls(packed, copied(scale), zero, grid, shape, **more)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """{name: tensor} of all that is stored."""
        names = ("codes", "scale", "zero", "order", "column_scale")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of memory really held, codes and all that goes with them."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits of memory really held for each number of the matrix."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    @staticmethod
    def bytes_for(shape: tuple[int, int], bits: int, group_size=None, symmetric: bool = False, **options) -> int:
        """Bytes that such a matrix takes, without column order and column scale; arguments as for `rtn`."""
        stored = layout(shape, as_grid(bits, group_size, symmetric, **options))
        return sum(prod(sizes) * dtype.itemsize for sizes, dtype in stored.values())

    def unpacked(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codes `(rows, columns)`, scale, zero `(rows, groups)`), as they went into `of`."""
        flat = self.shape[0] * self.shape[1] if self.grid.group_size == TENSOR else self.shape[1]
        codes = unpack(self.codes, self.grid.bits, flat).reshape(self.shape)
        zero = self.zero
        if self.grid.kind == "zero_point":
            zero = unpack(zero, self.grid.bits, self.scale.shape[1])
        return codes, self.scale, zero

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix `(rows, columns)` that the codes stand for."""
        codes, scale, zero = self.unpacked()
        groups = codes.unflatten(1, (scale.shape[1], -1))
        weight = decode(groups, scale[..., None], None if zero is None else zero[..., None], self.grid).flatten(1)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        if self.column_scale is not None:
            weight = weight / self.column_scale.float()
        return in_dtype(weight, dtype)

    def to(self, device) -> "QuantizedTensor":
        """The same on another device."""
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors.items()})


def layout(shape: tuple[int, int], grid: Grid) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """{name: (shape, dtype)} of the tensors that a matrix of this shape is stored in."""
    rows, columns = (1, prod(shape)) if grid.group_size == TENSOR else shape
    groups = columns // grid.size(columns)
    stored = {"codes": ((rows, packed_bytes(columns, grid.bits)), torch.uint8)}
    stored["scale"] = ((rows, groups), grid.scale_dtype)
    if grid.kind == "zero_point":
        stored["zero"] = ((rows, packed_bytes(groups, grid.bits)), torch.uint8)
    if grid.kind == "minimum":
        stored["zero"] = ((rows, groups), grid.scale_dtype)
    return stored


def copied(tensor: Tensor) -> Tensor:
    """The same numbers in memory of their own: a view would keep alive, and count, all that it was cut from."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def rtn(weight: Tensor, bits: int, group_size=None, symmetric: bool = False, **options) -> QuantizedTensor:
    """Round each number of a weight `(rows, columns)` to the nearest value of its group's grid.

    `group_size` numbers of a row share a grid; None: the row does; "tensor": all do. `symmetric` and the other options
    are those of `kvcourse.quant.grid.Grid`: kind, clip, scale_dtype. Raises `ValueError` for bits other than 2, 3, 4
    and 8, groups that do not divide a row, a weight that is no matrix or has NaN or infinite numbers, and numbers too
    large or too small for scales in `scale_dtype`.
    """
    grid = as_grid(bits, group_size, symmetric, **options)
    require_matrix(weight)
    groups = require_scales(in_groups(weight, grid), grid)
    scale, zero = fit(groups, grid)
    codes = encode(groups, scale, zero, grid).reshape(weight.shape)
    return QuantizedTensor.of(codes, scale[..., 0], None if zero is None else zero[..., 0], grid)


def nf4(weight: Tensor, group_size: int | None = 64, **options) -> QuantizedTensor:
    """`rtn` onto the grid of QLoRA (arXiv 2305.14314, section 3): 16 values spread like a normal distribution."""
    return rtn(weight, 4, group_size, kind="nf4", **options)


def require_matrix(weight: Tensor) -> Tensor:
    """`weight` if it is a matrix of finite floating point numbers, with at least one, else `ValueError`."""
    require_finite("weight", weight)
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"weight must be a matrix (output channels, inputs), got shape {tuple(weight.shape)}.")
    return weight


def in_groups(weight: Tensor, grid: Grid) -> Tensor:
    """`(rows, columns)` -> `(rows, groups, group size)`, or `(1, 1, all)`."""
    weight = weight.float()
    if grid.group_size == TENSOR:
        return weight.reshape(1, 1, -1)
    return weight.unflatten(1, (-1, grid.size(weight.shape[1])))
