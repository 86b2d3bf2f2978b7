"""Keys, or values, of all layers in a few bits: what is rounded together, when, and where it lies.

Numbers are rounded in groups that share a grid (`kvcourse.quant.grid`, kind "minimum"). A group lies along one of two
axes, as in KIVI (arXiv 2402.02750, section 3.2):

    "token"    group_size channels of one token
    "channel"  group_size tokens of one channel, which stand in a row

A group along tokens can be rounded only when all of its tokens are there. So the latest tokens wait in a ring, exactly
as they are, and leave it for good. What is rounded after n tokens follows from n alone (`Layout.quantized`), not from
how many tokens came at a time.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvcourse.quant.grid import Grid, decode, encode, fit, in_dtype, require_finite
from kvcourse.quant.packing import pack, packed_bytes, unpack
from kvcourse.require import require_whole

AXES = ("channel", "token")


@dataclass(frozen=True)
class Layout:
    """How one tensor `(..., T, d_head)` is cut into groups, and how many of its tokens stay exact.

    `what` names the tensor in errors: "keys" or "values". Raises `ValueError` for an unknown axis, groups that do not
    divide a head, and a `residual` that is not made of whole groups where groups lie along tokens.
    """

    what: str
    axis: str
    grid: Grid
    residual: int
    d_head: int

    def __post_init__(self):
        size = self.grid.group_size
        if self.axis not in AXES:
            raise ValueError(f'The axis of {self.what} must be "channel" or "token", got {self.axis!r}.')
        if self.axis == "token" and self.d_head % size:
            fitting = [str(n) for n in range(min(8, self.d_head), self.d_head + 1) if self.d_head % n == 0]
            raise ValueError(
                f"group_size={size} does not divide d_head={self.d_head}, as the {self.what} need it with the axis "
                f'"token": give one of {", ".join(fitting)}.'
            )
        if self.axis == "channel" and self.residual % size:
            below = self.residual // size * size
            raise ValueError(
                f"residual={self.residual} is no multiple of group_size={size}, as the {self.what} need it with the "
                f'axis "channel": give {below} or {below + size}.'
            )

    @property
    def span(self) -> int:
        """Tokens of a block: the fewest that can be rounded without others."""
        return self.grid.group_size if self.axis == "channel" else 1

    @property
    def groups(self) -> int:
        """Groups of one head in a block."""
        return self.d_head if self.axis == "channel" else self.d_head // self.grid.group_size

    @property
    def ring(self) -> int:
        """Tokens that may have to wait, exact."""
        return self.residual or (self.span if self.axis == "channel" else 0)

    def quantized(self, length):
        """How many of the first `length` tokens (a number, or a tensor of them) are rounded.

        With the axis "token", all but the latest `residual`; with "channel", the ring is emptied whenever it is full.
        """
        if self.axis == "channel":
            return length // self.ring * self.ring
        return (length - self.residual) * (length > self.residual)

    def split(self, x: Tensor) -> Tensor:
        """`(..., T, d_head)` in groups `(..., blocks, groups, group_size)`, a view. Blocks must be whole."""
        size = self.grid.group_size
        return x.unflatten(-2, (-1, size)).mT if self.axis == "channel" else x.unflatten(-1, (-1, size))

    def join(self, groups: Tensor) -> Tensor:
        """Groups as `split` gives them -> `(..., T, d_head)`."""
        return groups.mT.flatten(-3, -2) if self.axis == "channel" else groups.flatten(-2)

    def round(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes in the shape of x `(..., T, d_head)`, scale and minimum `(..., blocks, groups)`. Raises `ValueError`
        for numbers that no grid can hold."""
        groups = self.split(x)
        try:
            scale, minimum = fit(groups, self.grid)
        except ValueError as error:
            raise ValueError(
                f"The {self.what} to be rounded hold numbers that are NaN, infinite or too large for "
                f"{self.grid.scale_dtype}: use a DenseCache for this model."
            ) from error
        return self.join(encode(groups, scale, minimum, self.grid)), scale[..., 0], minimum[..., 0]

    def read(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        """The numbers (float32) that these stand for, in the shape of the codes."""
        return self.join(decode(self.split(codes), scale[..., None], minimum[..., None], self.grid))

    def positions(self, blocks: Tensor) -> Tensor:
        """Those of the tokens of N blocks, `(N, span)`."""
        return blocks[:, None] * self.span + torch.arange(self.span, device=blocks.device)

    def bytes_for(self, max_len: int, itemsize: int) -> int:
        """Bytes of one head of one text: packed codes, scale and minimum of each group, and the ring."""
        tokens = self.quantized(max_len)
        groups = tokens // self.span * self.groups
        codes = tokens * packed_bytes(self.d_head, self.grid.bits)
        return codes + groups * 2 * self.grid.scale_dtype.itemsize + min(self.ring, max_len) * self.d_head * itemsize


class Part(NamedTuple):
    """What a store holds of one layer and one text: n tokens rounded, the m latest exact."""

    codes: Tensor  # (H_kv, n, D), uint8
    scale: Tensor  # (H_kv, n / group_size, D) with groups along tokens, else (H_kv, n, D / group_size)
    minimum: Tensor  # as scale
    rounded: Tensor  # (H_kv, n, D), float32: codes x scale + minimum
    exact: Tensor  # (H_kv, m, D)


class Store:
    """The memory for keys or for values: packed codes `(layers, B, H_kv, tokens, bytes)`, scale and minimum
    `(layers, B, H_kv, blocks, groups)`, and a ring of exact numbers `(layers, B, H_kv, slots, D)`.

    A token has bytes of its own, so that rounding a block touches no other. Position p waits in slot p % slots.
    """

    def __init__(self, layout: Layout, layers: int, rows: int, heads: int, max_len: int, dtype, device):
        self.layout, grid, where = layout, layout.grid, (layers, rows, heads)
        tokens, self.slots = layout.quantized(max_len), min(layout.ring, max_len)
        with torch.inference_mode(False):  # usable in and out of inference mode, wherever it is made
            width = packed_bytes(layout.d_head, grid.bits)
            self.codes = torch.zeros(*where, tokens, width, dtype=torch.uint8, device=device)
            blocks = tokens // layout.span
            self.scale = torch.zeros(*where, blocks, layout.groups, dtype=grid.scale_dtype, device=device)
            self.minimum = torch.zeros_like(self.scale)
            self.ring = torch.zeros(*where, self.slots, layout.d_head, dtype=dtype, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scale, self.minimum, self.ring

    def slot(self, positions: Tensor) -> Tensor:
        """Where in the ring each position waits. Without a ring, none does."""
        return positions % max(self.slots, 1)

    def write(self, layers: slice, rows: Tensor, blocks: Tensor, x: Tensor) -> None:
        """Round N blocks of tokens x `(N, span, layers, H_kv, D)` into these rows and blocks of some layers."""
        codes, scale, minimum = self.layout.round(x.movedim(1, 3))
        places = rows[:, None], slice(None), self.layout.positions(blocks)
        self.codes[layers][:, *places] = pack(codes.movedim(3, 1), self.layout.grid.bits)
        self.scale[layers][:, rows, :, blocks] = scale[:, :, :, 0]
        self.minimum[layers][:, rows, :, blocks] = minimum[:, :, :, 0]

    def unpack(self, layer: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes `(B, H_kv, tokens, D)`, scale and minimum `(B, H_kv, blocks, groups)` of the first tokens."""
        codes = unpack(self.codes[layer, :, :, :tokens], self.layout.grid.bits, self.layout.d_head)
        blocks = slice(tokens // self.layout.span)
        return codes, self.scale[layer, :, :, blocks], self.minimum[layer, :, :, blocks]

    def read(self, layer: int, tokens: int) -> Tensor:
        """The first tokens of all rows as they were rounded, `(B, H_kv, tokens, D)` in float32."""
        return self.layout.read(*self.unpack(layer, tokens))

    def part(self, layer: int, row: int, length: int) -> Part:
        """What is held of a row of `length` tokens; copies."""
        n = self.layout.quantized(length)
        kept = (tensor[row].clone() for tensor in (*self.unpack(layer, n), self.read(layer, n)))
        waiting = self.slot(torch.arange(n, length)).to(self.ring.device)
        return Part(*kept, self.ring[layer, row][:, waiting])

    def wipe(self, lengths: list[int]) -> None:
        """Clear all that rows of these lengths do not hold."""
        held = torch.tensor(lengths)
        start = self.layout.quantized(held)
        for row, tokens in enumerate(start.tolist()):
            self.codes[:, row, :, tokens:] = 0
            self.scale[:, row, :, tokens // self.layout.span :] = 0
            self.minimum[:, row, :, tokens // self.layout.span :] = 0
        rows, positions = spans(start, held)
        empty = torch.ones(len(lengths), self.slots, dtype=torch.bool)
        empty[rows, self.slot(positions)] = False
        self.ring.masked_fill_(empty[None, :, None, :, None].to(self.ring.device), 0)


def spans(starts: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, numbers) of all numbers from `starts[row]` to before `stops[row]`, row by row."""
    numbers = torch.arange(int(stops.max()))
    return ((numbers >= starts[:, None]) & (numbers < stops[:, None])).nonzero(as_tuple=True)


def cache_grid(bits: int, group_size: int, dtype: torch.dtype) -> Grid:
    """The grid of a cache of this dtype: float16 would not hold what bfloat16 does."""
    scale_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    return Grid(bits, require_whole("group_size", group_size), "minimum", scale_dtype=scale_dtype)


def fake_quantize(x: Tensor, bits: int, axis: str, group_size: int = 32) -> Tensor:
    """Keys or values x `(B, H_kv, T, D)` as a `QuantizedCache` would read them back, without keeping them in few bits.

    With the axis "channel" the last tokens stay exact where they fill no group. Raises `ValueError` as the cache does,
    and for what is no such tensor of finite floating point numbers.
    """
    if require_finite("x", x).ndim < 2:
        raise ValueError(f"x must have the axes (..., tokens, d_head), got shape {tuple(x.shape)}.")
    layout = Layout("numbers", axis, cache_grid(bits, group_size, x.dtype), 0, x.shape[-1])
    n = layout.quantized(x.shape[-2])
    rounded = in_dtype(layout.read(*layout.round(x[..., :n, :])), x.dtype)
    return torch.cat((rounded, x[..., n:, :]), dim=-2)
