"""Grouped-query attention written three ways that give the same numbers, and do not read the same bytes.

Queries have `H` heads, keys and values `H_kv`. Query head h looks at key/value head h // G, with G = H / H_kv: heads
that share one stand next to each other (arXiv 2305.13245, section 2.2). With H_kv = H this is multi-head attention,
with H_kv = 1 multi-query attention (arXiv 1911.02150).

Shapes in all three: q `(B, H, T, D)`, k and v `(B, H_kv, S, D)`, result `(B, H, T, D)`. `mask` is what `layers.visible`
gives: `(B, 1, T, S)`, True where a query may look, and each query at one key or more; None: everything is seen. All
raise `ValueError` for heads that cannot be shared out, tensors that do not belong together, and another kind of mask.
"""

import math

import torch
from torch import Tensor

from kvcourse.layers import attention


def attend_repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Copy every key/value head once for each query that shares it; then each query head has its own.

    Simple, and it undoes in memory traffic what grouping saves: the copies are written, and read again, at every step.
    """
    group = group_size(q, k, v, mask)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = scaled(q) @ k.mT
    return masked_softmax(scores, mask) @ v


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Give the queries an axis for the group, `(B, H_kv, G, T, D)`, and copy nothing.

    The G queries that share a head meet its keys in one matrix product, so each key is read once for all of them.
    """
    group = group_size(q, k, v, mask)
    q = scaled(q).unflatten(1, (-1, group))
    scores = torch.einsum("bhgtd,bhsd->bhgts", q, k)
    weights = masked_softmax(scores, None if mask is None else mask[:, :, None])
    return torch.einsum("bhgts,bhsd->bhgtd", weights, v).flatten(1, 2)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """PyTorch's `scaled_dot_product_attention(..., enable_gqa=True)`, as everywhere in this course: PyTorch chooses the
    kernel, and the scores `(B, H, T, S)` need not be written to memory."""
    group_size(q, k, v, mask)
    return attention(q, k, v, mask)


def scaled(q: Tensor) -> Tensor:
    """Queries divided by the root of D before the product with the keys, which may be past the largest float16."""
    return q / math.sqrt(q.shape[-1])


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores `(..., T, S)` as weights that add up to 1 over the keys that a query sees, worked out in float32."""
    seen = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    return seen.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def group_size(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> int:
    """G: how many query heads share a key/value head. Raises `ValueError` for shapes that do not belong together."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        raise ValueError(f"q must be (B, H, T, D), k and v (B, H_kv, S, D) with the same B and D; got {shapes}.")
    H, H_kv = q.shape[1], k.shape[1]
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"{H} query heads cannot share {H_kv} key/value heads evenly: give a divisor of {H}.")
    if mask is not None:
        fits = mask.ndim == 4 and mask.shape[1:] == (1, q.shape[2], k.shape[2]) and mask.shape[0] in (1, q.shape[0])
        if mask.dtype != torch.bool or not fits:
            raise ValueError(
                f"mask must be bool and (B, 1, T, S), as layers.visible gives it; got {mask.dtype} {tuple(mask.shape)} "
                f"for {shapes}."
            )
    return H // H_kv
