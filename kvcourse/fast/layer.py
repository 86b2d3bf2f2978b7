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
from kvcourse.fast.pages import Reads, paged_attention
from kvcourse.fast.weights import Bytes, Dense, LayerWeights, Matrix, Nibbles
from kvcourse.layers import rms_norm, rotate
from kvcourse.quant.int4_layouts import LAYOUTS
from kvcourse.quant.int8_product import token_scale


class Sizes(NamedTuple):
    """The numbers of a model that the functions need, fixed when they are compiled."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    eps: float


def sizes_of(config: ModelConfig) -> Sizes:
    return Sizes(config.n_heads, config.n_kv_heads, config.d_head, config.norm_eps)


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """x `(n, columns)` -> `(n, rows)`."""
    if isinstance(matrix, Dense):
        return F.linear(x, matrix.weight, matrix.bias)
    if not (isinstance(matrix, Bytes) and matrix.whole):
        return torch.ops.kvcourse.multiply(x, matrix.handle, matrix.rows)
    scale = token_scale(x)
    y = torch.ops.kvcourse.multiply_whole(x.float() / scale, matrix.handle, matrix.rows) * scale
    return added(y.to(x.dtype), matrix.bias)


def added(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


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
    if isinstance(matrix, Dense):
        return added((matrix.weight.to(x.dtype) * x).sum(-1), matrix.bias)
    if isinstance(matrix, Bytes):
        return added((matrix.codes.to(x.dtype) * x).sum(-1) * matrix.scale, matrix.bias)
    row = x.to(dtype)[None]
    if isinstance(matrix, Nibbles):
        y = LAYOUTS[x.device.type].product(row, matrix.codes, matrix.group, matrix.scale)
        return added(y[0].to(x.dtype), matrix.bias)
    return torch.ops.kvcourse.multiply(row, matrix.handle, matrix.rows)[0].to(x.dtype)


def one_token(
    sizes: Sizes, w: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """x `(d_model,)` of the token in slot S - 1 -> the next layer's x; its key and value are stored.

    cos, sin `(D,)`; keys, values `(H_kv, max_len, D)`, the layer's cache; slots `(S,)`, of which only the number
    counts. Sums are in float32 at least.
    """
    keys, values = keys[:, : slots.shape[0]], values[:, : slots.shape[0]]
    q, k, v = one_before(sizes, w, x, cos, sin)
    keys[:, -1], values[:, -1] = k.to(keys.dtype), v.to(values.dtype)
    return one_after(sizes, w, x, one_attention(q, keys, values))


def one_token_of_many(
    sizes: Sizes, w: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, position: Tensor
) -> Tensor:
    """`one_token` for a graph: the slot is `position` `(1,)`, on the device, and of all slots of `keys` and `values`
    those past it are masked."""
    q, k, v = one_before(sizes, w, x, cos, sin)
    keys.index_copy_(1, position, k[:, None].to(keys.dtype))
    values.index_copy_(1, position, v[:, None].to(values.dtype))
    hidden = torch.arange(keys.shape[1], device=x.device) > position
    return one_after(sizes, w, x, one_attention(q, keys, values, hidden))


def one_token_each(
    sizes: Sizes,
    w: LayerWeights,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    reads: Reads,
) -> Tensor:
    """x `(N, d_model)`, a token of each of N texts -> the next layer's x; their keys and values are stored in `slots`.

    cos, sin `(N, 1, D)`; keys, values `(num_blocks, H_kv, block_size, D)`, the layer's pages; slots `(N, H_kv)`, see
    `Pages.slots`.
    """
    q, k, v = before(sizes, w, x, cos, sin)
    for pool, new in ((keys, k), (values, v)):
        pool.view(-1, sizes.d_head).index_copy_(0, slots.flatten(), new.flatten(0, 1))
    return after(sizes, w, x, paged_attention(q, keys, values, reads).to(x.dtype))


def one_before(sizes: Sizes, w: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q `(H, D)` and k `(H_kv, D)`, and v, of one token."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    qkv = one_product(rms_norm(wide, w.input_norm, sizes.eps), w.qkv, x.dtype)
    q, k, v = split_heads(sizes, qkv.view(-1, sizes.d_head))
    q, k = normed(sizes, w, q, k)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def one_attention(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None = None) -> Tensor:
    """q `(H, D)` over keys and values `(H_kv, S, D)` -> `(H * D,)`; slots where `hidden` `(S,)` count nothing."""
    q = q.view(keys.shape[0], -1, 1, q.shape[1])
    scores = (keys[:, None].to(q.dtype) * q).sum(-1) * q.shape[-1] ** -0.5  # (H_kv, H / H_kv, S)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
        values = values.masked_fill(hidden[:, None], 0)  # weight 0, but 0 x NaN is NaN
    return (scores.softmax(-1)[..., None] * values[:, None].to(q.dtype)).sum(2).reshape(-1)


def one_after(sizes: Sizes, w: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
    """x `(d_model,)` and what attention gave `(H * D,)` -> the next layer's x."""
    dtype, wide = x.dtype, x.to(attended.dtype)
    wide = wide + one_product(attended, w.o, dtype)
    gate, up = one_product(rms_norm(wide, w.post_norm, sizes.eps), w.gate_up, dtype).chunk(2)
    return (wide + one_product(F.silu(gate) * up, w.down, dtype)).to(dtype)


def split_heads(sizes: Sizes, qkv: Tensor) -> tuple[Tensor, ...]:
    """qkv `(..., H + 2 H_kv, D)` -> heads of queries, keys, values."""
    return qkv.split([sizes.n_heads, sizes.n_kv_heads, sizes.n_kv_heads], dim=-2)


def normed(sizes: Sizes, w: LayerWeights, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys normalised head by head, in models that do so."""
    if w.q_norm is None:
        return q, k
    return rms_norm(q, w.q_norm, sizes.eps), rms_norm(k, w.k_norm, sizes.eps)
