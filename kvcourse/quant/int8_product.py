"""A product in whole numbers: weights in 8 bits rounded beforehand, activations as they come.

A row of activations x is rounded to x_q = round(x / s), where s is its largest magnitude / 127, so that every token has
a scale of its own and does not depend on its neighbours. Then y = (x_q W_q^T) * s * (the scale of each row of W), with
the product in brackets exact (LLM.int8(), arXiv 2208.07339, section 2.2, there with the largest activations apart;
here `smooth` sees to those). Processors multiply bytes several times as fast as floats, for one row and for many.
"""

import warnings
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcourse.quant.kernels import Kernel
from kvcourse.quant.tensor import QuantizedTensor

LEVELS = 127  # -127 to 127


class Int8Product(Kernel):
    """Codes of 8 bits, one scale per row. Where FBGEMM multiplies, it keeps them in an order of its own.

    All matrices of SmolLM2's layers on two CPU cores with AVX-512 VNNI, in ms, for 1, 16 and 512 rows: FBGEMM 6.5, 10,
    184; PyTorch's own integer product (`torch._int_mm`) 8.5, 20, 284; float32 36, 53, 634; bfloat16 17, 24, 288.
    """

    path = "int8 activations"

    @classmethod
    def misfit(cls, weight: QuantizedTensor, dtype: torch.dtype) -> str | None:
        """One sentence why this way cannot multiply with the weight; None if it can."""
        if weight.grid.bits != 8:
            return f"Activations of 8 bits go with weights of 8 bits, these have {weight.grid.bits}."
        if weight.grid.kind != "symmetric" or weight.grid.group_size is not None:
            return "Whole numbers need one scale per row and no zero: quantize with symmetric=True, group_size=None."
        if weight.codes.device.type == "cuda" and any(size % 8 for size in weight.shape):
            return f"On CUDA whole numbers need sizes that 8 divides, this weight has {tuple(weight.shape)}."
        return None

    def hold(self, weight: QuantizedTensor) -> None:
        codes = (weight.codes ^ 128).view(torch.int8)  # code - 128 as a signed byte
        self.register_buffer("scale", weight.scale[:, 0])
        self.packed = None
        if fbgemm_fits(codes.device):
            self.packed, codes = packed(codes, self.scale), None
        self.register_buffer("codes", codes)

    @property
    def hidden_bytes(self) -> int:
        """Bytes held outside of the buffers: one for each code that FBGEMM keeps."""
        return 0 if self.packed is None else self.shape[0] * self.shape[1]

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor, None]:
        codes = self.codes if self.packed is None else self.packed.unpack()[0].int_repr()
        return codes[rows].contiguous().view(torch.uint8) ^ 128, self.scale[rows, None], None

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.column_scale is not None:
            x = (x / self.column_scale).to(x.dtype)
        if self.order is not None:
            x = x[..., self.order.long()]
        out = self.product(x.reshape(-1, self.shape[1])).view(*x.shape[:-1], self.shape[0])
        return out if bias is None else out + bias

    def product(self, x: Tensor) -> Tensor:
        scale = token_scale(x)
        return (self.whole(x.float() / scale) * scale).to(x.dtype)

    def whole(self, x: Tensor) -> Tensor:
        """x `(n, columns)` in float32, from -127 to 127 -> `(n, rows)`: rounded to whole numbers, multiplied with the
        codes, and each row of the weight with its scale."""
        if self.packed is not None:
            return fbgemm_product(x, self.packed)
        return whole_product(x.round().to(torch.int8), self.codes) * self.scale.float()


def token_scale(x: Tensor) -> Tensor:
    """What each row of x `(n, columns)` is divided by before rounding, `(n, 1)` in float32."""
    largest = x.abs().amax(-1, keepdim=True).float()
    return largest.clamp(min=torch.finfo(torch.float32).tiny * LEVELS) / LEVELS  # a row of zeros stays one


def whole_product(x: Tensor, codes: Tensor) -> Tensor:
    """x `(n, columns)` int8 times codes `(rows, columns)` int8 -> `(n, rows)` int32. CUDA wants more than 16 rows."""
    n = len(x)
    if x.is_cuda and n <= 16:
        x = F.pad(x, (0, 0, 0, 17 - n))
    return torch._int_mm(x, codes.T)[:n]


@lru_cache
def fbgemm_fits(device: torch.device) -> bool:
    """Whether FBGEMM multiplies here, and exactly. Without VNNI instructions it adds pairs of products in 16 bits,
    which overflow; on other processors than x86 it is not there, and PyTorch will drop it one day: so it is tried."""
    if device.type != "cpu":
        return False
    codes, x = torch.full((16, 64), 127, dtype=torch.int8), torch.full((2, 64), 127.0)
    try:
        exact = fbgemm_product(x, packed(codes, torch.ones(16))) == 64 * 127.0**2
        return torch.cpu._is_vnni_supported() and bool(exact.all())
    except (AttributeError, RuntimeError):
        return False


def packed(codes: Tensor, scale: Tensor):
    """What FBGEMM keeps of signed codes `(rows, columns)` and the scale of each row."""
    zeros = torch.zeros(len(codes), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that PyTorch will drop it: then `fbgemm_fits` says no
        weight = torch._make_per_channel_quantized_tensor(codes.contiguous(), scale.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(weight, None)


def fbgemm_product(x: Tensor, weight) -> Tensor:
    """x `(n, columns)` from -127 to 127, rounded with a scale of 1 and a zero at 128, times a packed weight."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, 1.0, 128, weight)
