"""Layers of a model whose weight is in memory in a few bits only: `QuantLinear`, and `QuantEmbedding`."""

import torch
from torch import Tensor, nn

from kvcourse.device import as_dtype
from kvcourse.quant.int8_product import Int8Product
from kvcourse.quant.kernels import KERNELS, Dequantize
from kvcourse.quant.tensor import QuantizedTensor

WAYS = {Dequantize.path: Dequantize, **KERNELS, Int8Product.path: Int8Product}
PATHS = ("auto", *WAYS)


class QuantLinear(nn.Module):
    """x W^T + bias with a packed weight W `(out_features, in_features)`, in the place of an `nn.Linear`.

    `path` says how: "int8 kernel", "int4 kernel", "dequantize", or "auto": a kernel where one fits; and, as it rounds
    more than the weights, only where it is asked for, "int8 activations" (see `Int8Product`). `.path` is what it came
    to, and `.reason` one sentence why it is no kernel (else None). `dtype` is that of x and the bias; `.to(...)`
    changes it, or the device, and looks again for what fits. Scales keep the dtype that they are stored in.
    Raises `ValueError` for a kernel that was asked for and does not fit, and for a bias of another size.
    """

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None = None, dtype=torch.float32, path: str = "auto"):
        super().__init__()
        require_path(path)
        self.out_features, self.in_features = require_quantized(weight).shape
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias must have shape ({self.out_features},), got {tuple(bias.shape)}.")
        self.dtype, self.device, self.asked = as_dtype(dtype), weight.codes.device, path
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(self.device, self.dtype), False)
        self.keep(weight)
        if path not in ("auto", self.path):
            raise ValueError(f'path="{path}" does not fit: {self.reason}')

    def ask(self, path: str) -> None:
        """Go by `path` where it fits; where it does not, dequantize, and `.reason` says why."""
        self.asked = require_path(path)
        self.keep(self.quantized())

    def keep(self, weight: QuantizedTensor) -> None:
        """Hold the weight in the form of the path that fits."""
        wanted = f"int{weight.grid.bits} kernel" if self.asked == "auto" else self.asked
        if wanted == Dequantize.path:
            self.reason = f'path="{wanted}" was asked for.'
        elif wanted not in WAYS:
            self.reason = f"PyTorch has kernels for 4 and 8 bits, not for {weight.grid.bits}."
        else:
            self.reason = WAYS[wanted].misfit(weight, self.dtype)
        self.weight = (Dequantize if self.reason else WAYS[wanted])(weight, self.dtype)

    @property
    def path(self) -> str:
        """How products are computed."""
        return self.weight.path

    @property
    def nbytes(self) -> int:
        """Bytes of memory really held, the bias included."""
        tensors = sum(t.untyped_storage().nbytes() for t in (*self.buffers(), *self.parameters()))
        return tensors + self.weight.hidden_bytes

    def quantized(self) -> QuantizedTensor:
        """The weight in the form that is saved."""
        return self.weight.quantized()

    def forward(self, x: Tensor) -> Tensor:
        """x `(..., in_features)` -> `(..., out_features)`."""
        return self.weight.linear(x, self.bias)

    def _apply(self, fn, recurse: bool = True):
        """What `.to`, `.cuda`, `.bfloat16` and others call, with what is to be done to each tensor."""
        changed = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if self.bias is not None:
            self.bias = nn.Parameter(fn(self.bias.data), False)
        if (changed.dtype, changed.device) != (self.dtype, self.device):
            weight = self.quantized().to(changed.device)
            self.dtype, self.device = changed.dtype, changed.device
            self.keep(weight)
        return self

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.weight.grid.bits}, path={self.path!r}"


class QuantEmbedding(nn.Module):
    """In the place of an `nn.Embedding`: rows of a packed weight `(rows, columns)`, dequantized when looked up.

    With a tied head give that head, a `QuantLinear`, in the place of the weight: one weight is then in memory for both,
    in the form that the head needs, and `dtype` is the head's.
    """

    def __init__(self, weight: QuantizedTensor | QuantLinear, dtype=torch.float32):
        super().__init__()
        is_head = isinstance(weight, QuantLinear)
        self.table = weight if is_head else QuantLinear(require_quantized(weight), None, dtype, Dequantize.path)

    @property
    def nbytes(self) -> int:
        """Bytes of memory really held; of a tied table, those of the head."""
        return self.table.nbytes

    def quantized(self) -> QuantizedTensor:
        """The weight in the form that is saved."""
        return self.table.quantized()

    def forward(self, ids: Tensor) -> Tensor:
        """ids of any shape `(...)` -> `(..., columns)`. `IndexError` for other ids, as `nn.Embedding`."""
        # An index below 0 would count from the end, so rows are looked up with `index_select`, which has none.
        rows = torch.arange(self.table.out_features, device=ids.device).index_select(0, ids.flatten())
        return self.table.weight.rows(rows).reshape(*ids.shape, self.table.in_features)


def require_quantized(weight: QuantizedTensor) -> QuantizedTensor:
    """`weight` if it is one in a few bits, else `ValueError`."""
    if not isinstance(weight, QuantizedTensor):
        raise ValueError(
            f"weight must be a QuantizedTensor, as rtn(weight, bits) makes one, got {type(weight).__name__}."
        )
    return weight


def require_path(path: str) -> str:
    """`path` if there is such a way to multiply, else `ValueError`."""
    if path not in PATHS:
        raise ValueError(f"path={path!r} must be one of {', '.join(PATHS)}.")
    return path
