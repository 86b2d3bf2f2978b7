"""The weights of a layer as the compiled functions read them: what is multiplied with the same input, in one matrix.

q, k and v read the same input, and so do gate and up. Joined, two products take the place of five, each long enough to
keep the memory busy.
"""

from copy import copy
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from kvcourse.model import Layer
from kvcourse.quant.grid import TENSOR
from kvcourse.quant.int8_product import Int8Product
from kvcourse.quant.kernels import Int4Kernel, Int8Kernel
from kvcourse.quant.linear import QuantLinear
from kvcourse.quant.tensor import QuantizedTensor


class Dense(NamedTuple):
    """A matrix of plain numbers."""

    weight: Tensor  # (rows, columns)
    bias: Tensor | None


class Other(NamedTuple):
    """A quantized layer, registered under `handle`: a compiled function takes tensors, so an object is known to it by
    a number in one."""

    handle: Tensor
    rows: int


class Bytes(NamedTuple):
    """A quantized layer of 8 bits. One token is multiplied with its codes, read as they are; more by the layer, and if
    that multiplies `whole` numbers, the scale of each token before it and the bias after it are compiled too."""

    handle: Tensor
    rows: int
    codes: Tensor  # int8 (rows, columns)
    scale: Tensor  # (rows,)
    bias: Tensor | None
    whole: bool


class Nibbles(NamedTuple):
    """A quantized layer in the form of PyTorch's int4 product, which is called for one token without further ado."""

    handle: Tensor
    rows: int
    codes: Tensor
    scale: Tensor  # (groups, rows, 2)
    group: int
    bias: Tensor | None


Matrix = Dense | Other | Bytes | Nibbles


class LayerWeights(NamedTuple):
    """All that a layer is made of."""

    input_norm: Tensor
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Matrix
    post_norm: Tensor
    gate_up: Matrix
    down: Matrix


_LAYERS = WeakValueDictionary()  # {handle: what multiplies}
_HANDLES = count()


class Joined(nn.Module):
    """Quantized layers that read the same input; their outputs side by side."""

    def __init__(self, linears: list[QuantLinear]):
        super().__init__()
        self.linears = nn.ModuleList(linears)

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self.linears)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


def layer_of(handle: Tensor) -> nn.Module:
    """The layer registered under `handle`."""
    return _LAYERS[handle.item()]


def multiply(x: Tensor, handle: Tensor, rows: int) -> Tensor:
    """x `(..., columns)` through the layer registered under `handle` -> `(..., rows)`."""
    return layer_of(handle)(x)


def multiply_whole(x: Tensor, handle: Tensor, rows: int) -> Tensor:
    """`Int8Product.whole` of the layer registered under `handle`: x `(n, columns)` -> `(n, rows)`."""
    return layer_of(handle).weight.whole(x)


def no_numbers(x: Tensor, handle: Tensor, rows: int) -> Tensor:
    """The shape of either, for the compiler."""
    return x.new_empty(*x.shape[:-1], rows)


_LIBRARY = torch.library.Library("kvcourse", "DEF")
for _function in (multiply, multiply_whole):
    _LIBRARY.define(f"{_function.__name__}(Tensor x, Tensor handle, int rows) -> Tensor")
    _LIBRARY.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvcourse::{_function.__name__}", no_numbers)


def register(linear: nn.Module, rows: int) -> Matrix:
    """A matrix that multiplies as `linear` does. The caller keeps `linear`: here it is known only while it lives."""
    number = next(_HANDLES)
    _LAYERS[number] = linear
    handle, kernel = torch.tensor(number), getattr(linear, "weight", None)
    if not isinstance(kernel, Int8Product | Int8Kernel | Int4Kernel):
        return Other(handle, rows)
    if kernel.order is not None or kernel.column_scale is not None:
        return Other(handle, rows)
    if isinstance(kernel, Int4Kernel):
        return Nibbles(handle, rows, kernel.codes, kernel.scale, kernel.group, linear.bias)
    codes, scale, _ = kernel.read(slice(None))
    signed = (codes ^ 128).view(torch.int8)
    return Bytes(handle, rows, signed, scale[:, 0].float(), linear.bias, isinstance(kernel, Int8Product))


def joined(linears: list[nn.Module]) -> tuple[Matrix, nn.Module | None]:
    """One matrix for linear layers with the same input, and the module to keep alive for it, if it needs one."""
    if all(isinstance(linear, nn.Linear) for linear in linears):
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        if len(linears) == 1:  # detached: the same memory, and not the parameter, which `.to` changes
            return Dense(weights[0].detach(), None if biases[0] is None else biases[0].detach()), None
        return Dense(torch.cat(weights), None if biases[0] is None else torch.cat(biases)), None
    module = twin(linears[0]) if len(linears) == 1 else one_quantized([twin(linear) for linear in linears])
    return register(module, sum(linear.out_features for linear in linears)), module


def one_quantized(linears: list[nn.Module]) -> nn.Module:
    """Quantized layers as one `QuantLinear` where they have one grid, else one after the other."""
    weights = [linear.quantized() for linear in linears if isinstance(linear, QuantLinear)]
    apart = any(w.order is not None or w.column_scale is not None for w in weights)
    if (
        len(weights) < len(linears)
        or apart
        or len({linear.path for linear in linears}) > 1  # rows that no kernel fits beside others
        or len({w.grid for w in weights}) > 1
        or weights[0].grid.group_size == TENSOR
    ):
        return Joined(linears)
    zero = None if weights[0].zero is None else torch.cat([w.zero for w in weights])
    codes, scale = (torch.cat([getattr(w, name) for w in weights]) for name in ("codes", "scale"))
    weight = QuantizedTensor(codes, scale, zero, weights[0].grid, (len(codes), weights[0].shape[1]))
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat(biases)
    return QuantLinear(weight, bias, linears[0].dtype, linears[0].path)


def twin(module: nn.Module | None) -> nn.Module | None:
    """The module once more, over the same memory. What `.to` does to one leaves the other as it is."""
    if module is None:
        return None
    other = copy(module)
    other._modules, other._buffers = dict(module._modules), dict(module._buffers)
    other._parameters = {
        name: None if p is None else nn.Parameter(p.detach(), requires_grad=False)
        for name, p in module._parameters.items()
    }
    return other


def layer_weights(layer: Layer) -> tuple[LayerWeights, list[nn.Module]]:
    """The weights of a layer, and the modules to keep alive for them."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv, o = joined([attention.q_proj, attention.k_proj, attention.v_proj]), joined([attention.o_proj])
    gate_up, down = joined([mlp.gate_proj, mlp.up_proj]), joined([mlp.down_proj])
    q_norm, k_norm = (None if norm is None else norm.weight.detach() for norm in (attention.q_norm, attention.k_norm))
    norms = [norm.weight.detach() for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    weights = LayerWeights(norms[0], qkv[0], q_norm, k_norm, o[0], norms[1], gate_up[0], down[0])
    return weights, [module for _, module in (qkv, o, gate_up, down) if module is not None]
