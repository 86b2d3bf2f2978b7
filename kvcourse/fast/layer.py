"""A layer in plain functions of tensors, for `torch.compile`: it makes one loop of what stands between two products.

Any step of any cache: `before` gives queries, keys and values, the cache attends, `after` does the rest. A layer is
then two calls instead of some forty.

One new token after a dense cache: `one_token`, the whole layer in one call. Nothing is used twice there, so that every
product is a sum over something that is read once: written as such, the compiler reads a weight of any dtype straight
from memory, widens it in the processor, and needs no library for it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcourse.config import ModelConfig
from kvcourse.fast.weights import LayerWeights, Matrix
from kvcourse.layers import rms_norm, rotate


class Sizes(NamedTuple):
    """The numbers of a model that the functions need, fixed when they are compiled."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    eps: float


def sizes_of(config: ModelConfig) -> Sizes:
    return Sizes(config.n_heads, config.n_kv_heads, config.d_head, config.norm_eps)


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """x `(..., columns)` -> `(..., rows)`."""
    if matrix.weight is None:
        return torch.ops.kvcourse.multiply(x, matrix.handle, matrix.rows)
    return F.linear(x, matrix.weight, matrix.bias)


def before(sizes: Sizes, w: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x `(N, d_model)`; cos, sin `(N, 1, D)` -> rotated q `(N, H, D)` and k `(N, H_kv, D)`, and v."""
    qkv = product(rms_norm(x, w.input_norm, sizes.eps), w.qkv)
    q, k, v = split_heads(sizes, qkv.unflatten(-1, (-1, sizes.d_head)))
    q, k = normed(sizes, w, q, k)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def after(sizes: Sizes, w: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
    """x `(N, d_model)` and what attention gave `(N, H * D)` -> the next layer's x."""
    x = x + product(attended, w.o)
    gate, up = product(rms_norm(x, w.post_norm, sizes.eps), w.gate_up).chunk(2, dim=-1)
    return x + product(F.silu(gate) * up, w.down)


def one_product(x: Tensor, matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """x `(columns,)` in float32 or wider -> `(rows,)`. `dtype`: that of the model, which quantized layers take."""
    if matrix.weight is None:
        return torch.ops.kvcourse.multiply(x.to(dtype)[None], matrix.handle, matrix.rows)[0].to(x.dtype)
    y = (matrix.weight.to(x.dtype) * x).sum(-1)
    return y if matrix.bias is None else y + matrix.bias


def one_token(
    sizes: Sizes, w: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """x `(d_model,)` of the token in slot S - 1 -> the next layer's x; its key and value are stored.

    cos, sin `(D,)`; keys, values `(H_kv, max_len, D)`, the layer's cache; slots `(S,)`, of which only the number
    counts. Sums are in float32 at least.
    """
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    qkv = one_product(rms_norm(x, w.input_norm, sizes.eps), w.qkv, dtype)
    q, k, v = split_heads(sizes, qkv.view(-1, sizes.d_head))
    q, k = normed(sizes, w, q, k)
    keys, values = keys[:, : slots.shape[0]], values[:, : slots.shape[0]]
    keys[:, -1] = rotate(k, cos, sin).to(keys.dtype)
    values[:, -1] = v.to(values.dtype)
    q = rotate(q, cos, sin).view(sizes.n_kv_heads, -1, 1, sizes.d_head)
    scores = (keys[:, None].to(wide) * q).sum(-1) * sizes.d_head**-0.5  # (H_kv, H / H_kv, S)
    attended = (scores.softmax(-1)[..., None] * values[:, None].to(wide)).sum(2)
    x = x + one_product(attended.reshape(-1), w.o, dtype)
    gate, up = one_product(rms_norm(x, w.post_norm, sizes.eps), w.gate_up, dtype).chunk(2)
    return (x + one_product(F.silu(gate) * up, w.down, dtype)).to(dtype)


def split_heads(sizes: Sizes, qkv: Tensor) -> tuple[Tensor, ...]:
    """qkv `(..., H + 2 H_kv, D)` -> heads of queries, keys, values."""
    return qkv.split([sizes.n_heads, sizes.n_kv_heads, sizes.n_kv_heads], dim=-2)


def normed(sizes: Sizes, w: LayerWeights, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys normalised head by head, in models that do so."""
    if w.q_norm is None:
        return q, k
    return rms_norm(q, w.q_norm, sizes.eps), rms_norm(k, w.k_norm, sizes.eps)
