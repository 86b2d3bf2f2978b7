"""The parts a decoder is made of: RMSNorm, rotary positions, attention over explicit positions, SwiGLU.

Nothing here knows about caches. Attention is given keys, values and *where each key sits*; who may look at
what follows from the positions alone, and so every kind of cache shares one attention.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcourse.rope import RopeScaling, amplitude, frequencies

PADDING = -1  # the position of a token, or of a slot, that holds nothing
QUERIES = 256  # whose scores stand in memory at once: 9 heads of 8,000 queries and keys would take 2.3 GB


class RMSNorm(nn.Module):
    """Divide each vector by its root mean square, then scale it (arXiv 1910.07467, section 3).

    The mean is taken in float32: squares of half-precision activations overflow or lose their small terms.
    """

    def __init__(self, size: int, eps: float, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x `(..., size)` -> same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `RMSNorm` computes: x `(..., size)`, weight `(size,)` -> same shape and dtype as x."""
    x32 = x.float() if x.dtype.itemsize < 4 else x
    scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (x32 * scale).to(x.dtype)


class SwiGLU(nn.Module):
    """The feed-forward layer of the Llama family: down(silu(gate(x)) * up(x)) (arXiv 2002.05202, section 2)."""

    def __init__(self, d_model: int, d_ff: int, bias: bool = False, device=None, dtype=None):
        super().__init__()
        where = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(d_model, d_ff, **where)
        self.up_proj = nn.Linear(d_model, d_ff, **where)
        self.down_proj = nn.Linear(d_ff, d_model, **where)

    def forward(self, x: Tensor) -> Tensor:
        """x `(..., d_model)` -> same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_tables(
    positions: Tensor, d_head: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles at positions `(B, T)`: `(B, 1, T, d_head)` each, always in float32.

    They carry the amplitude of `scaling`, so that a query and a key rotated by them get it once each.
    """
    cos, sin = turns(positions, d_head, theta, scaling)
    return cos * amplitude(scaling), sin * amplitude(scaling)


def turns(positions: Tensor, d_head: int, theta: float, scaling: RopeScaling | None = None) -> tuple[Tensor, Tensor]:
    """`rotary_tables` without the amplitude: what turns a query or key on by `positions` more, or back if negative.

    Pair i of a head turns by `position * frequencies(...)[i]` radians (arXiv 2104.09864). In half precision a position
    such as 4097 cannot even be written down, so angles are worked out in float32 whatever the model computes in.
    """
    angles = positions[:, None, :, None].float() * frequencies(d_head, theta, scaling).to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of x `(B, H, T, D)` by its angle. The dot product of a query and a key
    turned this way depends on the distance between their positions only."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def visible(positions: Tensor, key_positions: Tensor, window: int | None = None, sinks: int = 0) -> Tensor:
    """Which key each query may look at, `(B, 1, T, S)` bool, from positions `(B, T)` and key positions `(B, S)`.

    A query sees keys at its own position or before; with a `window` of W, the W latest of those, its own included
    (arXiv 2310.06825, section 2), and the first `sinks` tokens of the text (arXiv 2309.17453, section 3.2). An empty
    slot (position -1) is seen by nobody. A padding query has nothing to see: it is shown everything, so that its
    softmax is a number, and nobody reads its row.
    """
    query, key = positions[:, None, :, None], key_positions[:, None, None, :]
    seen = (key >= 0) & (key <= query)
    if window is not None:
        seen &= (query - key < window) | (key < sinks)
    return seen | (query == PADDING)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Softmax attention of q `(B, H, T, D)` over k, v `(B, H_kv, S, D)` -> `(B, H, T, D)`.

    `mask` is `visible(...)`; `causal=True` is the same as the mask of a text that starts at position 0 (T = S),
    without building it; neither means that every key is seen. Each key/value head serves H / H_kv query heads
    that stand next to each other (grouped-query attention, arXiv 2305.13245, section 2.2).
    """
    if causal and q.shape[2] != k.shape[2]:
        # PyTorch would line the triangle up with the first key, and one query would see key 0 only.
        raise ValueError(f"causal=True needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}.")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)


def attention_with_sinks(
    q: Tensor, turned: Tensor, k: Tensor, v: Tensor, mask: Tensor, columns: Tensor, is_sink: Tensor
) -> Tensor:
    """`attention`, but sinks are compared with the `turned` queries `(B, H, T, D)`, all other keys with q.

    Sinks are among the keys at `columns` `(n,)`: there `is_sink` `(B, n)` says in which rows of the batch. One softmax
    runs over both kinds, which PyTorch's own attention cannot do; queries go through in blocks to bound the scores.
    Scores and softmax are in float32 at least, as in PyTorch's own: in bfloat16, scores of 100 lie half a unit apart.
    """
    if q.shape[2] > QUERIES:
        blocks = zip(*(x.split(QUERIES, 2) for x in (q, turned, mask)), strict=True)
        return torch.cat([attention_with_sinks(a, b, k, v, m, columns, is_sink) for a, b, m in blocks], 2)
    heads, new, scale = k.shape[1], q.shape[2], q.shape[3] ** -0.5
    q, turned, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, turned, k))
    q, turned = (x.unflatten(1, (heads, -1)).flatten(2, 3) * scale for x in (q, turned))  # (B, H_kv, G x T, D)
    scores = q @ k.mT
    near = turned @ k[:, :, columns].mT
    scores[..., columns] = torch.where(is_sink[:, None, None], near, scores[..., columns])
    scores = scores.unflatten(2, (-1, new))  # (B, H_kv, G, T, S)
    scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    weights = scores.softmax(-1).to(v.dtype)
    return (weights.flatten(2, 3) @ v).unflatten(2, (-1, new)).flatten(1, 2)
