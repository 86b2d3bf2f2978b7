"""The weights of a layer as the compiled functions read them: what is multiplied with the same input, in one matrix.

q, k and v read the same input, and so do gate and up. Joined, two products take the place of five, each long enough to
keep the memory busy.
"""

from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from kvcourse.model import Layer
from kvcourse.quant.grid import TENSOR
from kvcourse.quant.linear import QuantLinear
from kvcourse.quant.tensor import QuantizedTensor


class Matrix(NamedTuple):
    """Something to multiply with: a `weight` `(rows, columns)`; or, when that is None, the `QuantLinear` registered
    under `handle`. A compiled function takes tensors, so an object is known to it by a number in one."""

    weight: Tensor | None
    bias: Tensor | None
    handle: Tensor | None
    rows: int


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


def multiply(x: Tensor, handle: Tensor, rows: int) -> Tensor:
    """x `(..., columns)` times the matrix registered under `handle` -> `(..., rows)`."""
    return _LAYERS[handle.item()](x)


_LIBRARY = torch.library.Library("kvcourse", "DEF")
_LIBRARY.define("multiply(Tensor x, Tensor handle, int rows) -> Tensor")
_LIBRARY.impl("multiply", multiply, "CompositeExplicitAutograd")
torch.library.register_fake("kvcourse::multiply", lambda x, handle, rows: x.new_empty(*x.shape[:-1], rows))


def register(linear: nn.Module, rows: int) -> Matrix:
    """A matrix that multiplies as `linear` does. The caller keeps `linear`: here it is known only while it lives."""
    number = next(_HANDLES)
    _LAYERS[number] = linear
    return Matrix(None, None, torch.tensor(number), rows)


def joined(linears: list[nn.Module]) -> tuple[Matrix, nn.Module | None]:
    """One matrix for linear layers with the same input, and the module to keep alive for it, if it needs one."""
    rows = sum(linear.out_features for linear in linears)
    if all(isinstance(linear, nn.Linear) for linear in linears):
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        if len(linears) == 1:
            return Matrix(weights[0], biases[0], None, rows), None
        bias = None if biases[0] is None else torch.cat(biases)
        return Matrix(torch.cat(weights), bias, None, rows), None
    module = linears[0] if len(linears) == 1 else one_quantized(linears)
    return register(module, rows), module


def one_quantized(linears: list[nn.Module]) -> nn.Module:
    """Quantized layers as one `QuantLinear` where they have one grid, else one after the other."""
    weights = [linear.quantized() for linear in linears if isinstance(linear, QuantLinear)]
    apart = any(w.order is not None or w.column_scale is not None for w in weights)
    if (
        len(weights) < len(linears)
        or apart
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


def layer_weights(layer: Layer) -> tuple[LayerWeights, list[nn.Module]]:
    """The weights of a layer, and the modules to keep alive for them."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv, o = joined([attention.q_proj, attention.k_proj, attention.v_proj]), joined([attention.o_proj])
    gate_up, down = joined([mlp.gate_proj, mlp.up_proj]), joined([mlp.down_proj])
    q_norm, k_norm = (None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm))
    norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    weights = LayerWeights(norms[0], qkv[0], q_norm, k_norm, o[0], norms[1], gate_up[0], down[0])
    return weights, [module for _, module in (qkv, o, gate_up, down) if module is not None]
