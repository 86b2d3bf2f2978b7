"""Three ways to keep a packed weight in memory, and to multiply with it.

| path | what is in memory | a product |
|---|---|---|
| `dequantize` | the form that is saved | the weight is worked out, used once, and thrown away |
| `int8 kernel` | signed bytes, one scale per row | one pass over the bytes; no dequantized weight is ever in memory |
| `int4 kernel` | nibbles in the order that the kernel reads them, scale and offset per group | the same |

A step of decoding reads every weight once and uses it once, so a kernel that reads a quarter of the bytes can be up to
four times as fast. Many rows at once (a prompt) use the same weight again and again; there an ordinary product with
the dequantized weight wins, and kernels hand over to it above `few` rows. A kernel's form can be turned back bit for
bit, so no second copy of a weight is kept for saving it.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcourse.quant.grid import TENSOR, Grid, decode
from kvcourse.quant.int4_layouts import LAYOUTS
from kvcourse.quant.tensor import QuantizedTensor

AT_ONCE = 2**18  # weights worked out together: what is in between, 1 MB in float32, stays in the cache of a core


class Dequantize(nn.Module):
    """Any weight, on any device: kept in the form that is saved, dequantized for the moment of a product."""

    path = "dequantize"
    hidden_bytes = 0  # held outside of the buffers

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype):
        super().__init__()
        self.dtype, self.grid, self.shape, self.note = dtype, weight.grid, weight.shape, weight.note
        self.register_buffer("order", weight.order)
        self.register_buffer("column_scale", weight.column_scale)
        self.hold(weight)

    def hold(self, weight: QuantizedTensor) -> None:
        for name in ("codes", "scale", "zero"):
            self.register_buffer(name, getattr(weight, name))

    def quantized(self, rows: Tensor | slice = slice(None)) -> QuantizedTensor:
        """The weight in the form that is saved, or some of its rows."""
        zero = None if self.zero is None else self.zero[rows]
        codes, shape = self.codes[rows], self.shape
        if self.grid.group_size != TENSOR:
            shape = (len(codes), shape[1])
        return QuantizedTensor(codes, self.scale[rows], zero, self.grid, shape, **self.beside)

    @property
    def beside(self) -> dict:
        return {"order": self.order, "column_scale": self.column_scale, "note": self.note}

    def rows(self, ids: Tensor | slice) -> Tensor:
        """Rows of the weight, dequantized: `(n, columns)`."""
        if self.grid.group_size == TENSOR:  # its rows do not begin at whole bytes
            return self.quantized().dequantize(self.dtype)[ids]
        return self.quantized(ids).dequantize(self.dtype)

    def dense(self) -> Tensor:
        """The whole weight, dequantized: `(rows, columns)`."""
        rows, columns = self.shape
        step = rows if self.grid.group_size == TENSOR else max(64, AT_ONCE // columns // 64 * 64)
        weight = torch.empty(self.shape, dtype=self.dtype, device=self.scale.device)
        for first in range(0, rows, step):
            weight[first : first + step] = self.numbers(slice(first, first + step))
        return weight

    def numbers(self, rows: slice) -> Tensor:
        """Rows of the weight as `linear` multiplies x with them."""
        return self.rows(rows)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x `(..., columns)` -> x W^T + bias, `(..., rows)`."""
        return F.linear(x, self.dense(), bias)


class Kernel(Dequantize):
    """What the kernels share. Codes stay in the order in which they were chosen; x is put into that order."""

    few = 0  # rows of x up to which `product` is quicker than `dense`

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codes, scale, zero) of rows, unpacked, as `QuantizedTensor.unpacked` gives them."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """x `(n, columns)` -> `(n, rows)`, without dequantizing the weight."""
        raise NotImplementedError

    def quantized(self, rows: Tensor | slice = slice(None)) -> QuantizedTensor:
        return QuantizedTensor.of(*self.read(rows), self.grid, **self.beside)

    def numbers(self, rows: slice) -> Tensor:
        codes, scale, zero = self.read(rows)
        groups = codes.unflatten(1, (scale.shape[1], -1))
        return decode(groups, scale[..., None], None if zero is None else zero[..., None], self.grid).flatten(1)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.column_scale is not None:
            x = (x / self.column_scale).to(x.dtype)
        if self.order is not None:
            x = x[..., self.order.long()]
        if not 0 < x.numel() // self.shape[1] <= self.few:
            return F.linear(x, self.dense(), bias)
        out = self.product(x.reshape(-1, self.shape[1]).contiguous()).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias


class Int8Kernel(Kernel):
    """`torch._weight_int8pack_mm`: symmetric codes of 8 bits and one scale per row."""

    path = "int8 kernel"
    # Matrices of SmolLM2 on two CPU cores with AVX-512, in ms, by kernel and by dequantizing: 1536 x 576 with 64 rows
    # 0.8 and 1.4, with 128 rows 1.6 and 1.8; the head, 49,152 x 576, with 64 rows 50 and 53, with 128 rows 104 and 65.
    few = 64

    @classmethod
    def misfit(cls, weight: QuantizedTensor, dtype: torch.dtype) -> str | None:
        """One sentence why this kernel cannot multiply with the weight; None if it can."""
        if weight.grid.bits != 8:
            return f"The int8 kernel reads codes of 8 bits, these have {weight.grid.bits}."
        if weight.grid.kind != "symmetric" or weight.grid.group_size is not None:
            return "The int8 kernel knows one scale per row and no zero: quantize with symmetric=True, group_size=None."
        return unsuited(cls, weight, dtype)

    def hold(self, weight: QuantizedTensor) -> None:
        self.register_buffer("codes", (weight.codes ^ 128).view(torch.int8))  # code - 128 as a signed byte
        self.register_buffer("scale", weight.scale[:, 0].to(self.dtype))

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor, None]:
        return self.codes[rows].view(torch.uint8) ^ 128, self.scale[rows, None].to(self.grid.scale_dtype), None

    def product(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self.codes, self.scale)


class Int4Kernel(Kernel):
    """PyTorch's int4 product: a weight is (code - 8) x scale + offset, with scale and offset in bfloat16.

    The offset is (8 - zero) x scale. On a symmetric grid it is 0; with a zero point rounding to bfloat16 moves it by
    at most 2^-8 x 7 x scale. That is less than what bfloat16 may do to a dequantized weight: 2^-8 x 15 x scale.
    """

    path = "int4 kernel"
    # As above: 1536 x 576 with 64 rows 0.7 and 2.1, with 128 rows 1.4 and 2.6; the head with 128 rows 46 and 73.
    few = 128
    groups = (256, 128, 64, 32)  # columns that can share a scale; a longer group is given as several that are alike

    @classmethod
    def misfit(cls, weight: QuantizedTensor, dtype: torch.dtype) -> str | None:
        """One sentence why this kernel cannot multiply with the weight; None if it can."""
        (rows, columns), grid = weight.shape, weight.grid
        if grid.bits != 4:
            return f"The int4 kernel reads codes of 4 bits, these have {grid.bits}."
        if grid.kind not in ("symmetric", "zero_point") or grid.group_size == TENSOR:
            return 'The int4 kernel needs kind="symmetric" or "zero_point", and a grid for each row or group.'
        if grid.size(columns) % cls.groups[-1]:
            return f"The int4 kernel needs groups of a multiple of {cls.groups[-1]}, these have {grid.size(columns)}."
        if rows % 64:
            return f"The int4 kernel needs a multiple of 64 rows (output channels), this weight has {rows}."
        return unsuited(cls, weight, dtype)

    def hold(self, weight: QuantizedTensor) -> None:
        codes, scale, zero = weight.unpacked()
        self.layout, size = LAYOUTS[codes.device.type], weight.grid.size(self.shape[1])
        self.group = next(group for group in self.groups if size % group == 0)
        offset = torch.zeros_like(scale) if zero is None else (8 - zero.float()) * scale.float()
        both = torch.stack((scale.T.to(self.dtype), offset.T.to(self.dtype)), dim=-1)
        self.register_buffer("codes", self.layout.pack(codes))
        self.register_buffer("scale", both.repeat_interleave(size // self.group, 0))  # (groups, rows, 2)

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor, Tensor | None]:
        codes = self.layout.codes(self.codes, torch.arange(self.shape[0], device=self.codes.device)[rows])
        scale, offset = self.scale[:: self.grid.size(self.shape[1]) // self.group, rows].permute(2, 1, 0).contiguous()
        zero = None
        if self.grid.kind == "zero_point":
            zero = (8 - (offset.float() / scale.float()).round()).to(torch.uint8)
        return codes, scale.to(self.grid.scale_dtype), zero

    def product(self, x: Tensor) -> Tensor:
        return self.layout.product(x, self.codes, self.group, self.scale)


KERNELS = {kernel.path: kernel for kernel in (Int8Kernel, Int4Kernel)}


def unsuited(kernel: type[Kernel], weight: QuantizedTensor, dtype: torch.dtype) -> str | None:
    """One sentence why not, if the kernel is not for this dtype or device, or would round the scales once more."""
    if dtype != torch.bfloat16:  # in float32 the kernels exist, and take as long as dequantizing or longer
        return f"The {kernel.path} is used in bfloat16, this layer computes in {str(dtype).removeprefix('torch.')}."
    reason = unable(kernel, weight.codes.device.type)
    if reason is None and not torch.equal(weight.scale.bfloat16().to(weight.scale.dtype), weight.scale):
        name = str(weight.grid.scale_dtype).removeprefix("torch.")
        reason = (
            f"The {kernel.path} reads scales in bfloat16, and these are {name}, with digits that bfloat16 would round "
            "off: quantize with scale_dtype=torch.bfloat16."
        )
    return reason


@lru_cache
def unable(kernel: type[Kernel], device: str) -> str | None:
    """One sentence if the kernel does not work on this kind of device, found out by trying it on a small weight.

    Which PyTorch has which kernel on which device, and in which order it reads codes, changes from version to version.
    """
    if device not in LAYOUTS:
        return f"The {kernel.path} is for CPU and CUDA, this weight is on {device}."
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        return f"The {kernel.path} computes in bfloat16, for which a GPU needs compute capability 8.0."
    bits = 8 if kernel is Int8Kernel else 4
    grid = Grid(bits, None, "symmetric", scale_dtype=torch.bfloat16)
    codes = (torch.arange(128 * 64, device=device).reshape(128, 64) * 37 // 16 % 2**bits).to(torch.uint8)
    weight = QuantizedTensor.of(codes, torch.ones(128, 1, dtype=torch.bfloat16, device=device), None, grid)
    ones = torch.eye(2, 64, dtype=torch.bfloat16, device=device)  # so that the product shows columns 0 and 1
    try:
        made = kernel(weight, torch.bfloat16)
        right = torch.equal(made.product(ones).float(), weight.dequantize().T[:2])
        right = right and torch.equal(made.quantized().codes, weight.codes)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return f"This PyTorch ({torch.__version__}) has no {kernel.path} for {device} ({str(error).splitlines()[0]})."
    if not right:
        return f"The {kernel.path} of this PyTorch ({torch.__version__}) reads codes in an unknown order on {device}."
    return None
