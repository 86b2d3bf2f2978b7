"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in two forms that give the same numbers.

Of each token one short vector is kept, the latent, and from it every head's key and value can be had:

    c = norm(W_DKV x)                  (d_latent)       the latent
    r = rotated W_KR x                 (d_rope)         one rotated key for all heads
    key of head h:   [W_UK[h] c, r]    (d_nope + d_rope)
    value of head h:  W_UV[h] c        (d_value)

`naive` makes these keys and values, and is then ordinary attention. `absorbed` never makes them, since

    q · (W_UK c)  =  (W_UK^T q) · c         the query is taken to the latents, not the latents to the query
    sum a W_UV c  =  W_UV (sum a c)         and the sum over tokens is taken before W_UV, not after

so it attends to the latents themselves, which are one key and one value that all heads share.

Rotation is why a key has two parts: W_UK could not be moved past a rotation, which differs from token to token, so the
position travels in a small part of its own. Queries are not compressed here, as in DeepSeek-V2-Lite: that would save
no cache. Pairs (i, i + d_rope / 2) turn together, as everywhere in this course; in DeepSeek's checkpoints the two rows
of a pair, in W_KR and W_Q, stand side by side.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcourse.gqa import masked_softmax
from kvcourse.layers import rotary_tables, rotate, visible
from kvcourse.require import require_number, require_whole


@dataclass(frozen=True)
class Weights:
    """The matrices of one layer, in the letters of the paper; `H` heads.

    Raises `ValueError` when two of them do not fit together.
    """

    w_q: Tensor  # (H, d_nope + d_rope, d_model)
    w_dkv: Tensor  # (d_latent, d_model)
    w_kr: Tensor  # (d_rope, d_model)
    w_uk: Tensor  # (H, d_nope, d_latent)
    w_uv: Tensor  # (H, d_value, d_latent)
    w_o: Tensor  # (H, d_model, d_value)
    norm: Tensor  # (d_latent,): scale of the RMSNorm of the latent
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self):
        for name in ("rope_theta", "norm_eps"):
            require_number(name, getattr(self, name))
        names = ("w_q", "w_dkv", "w_kr", "w_uk", "w_uv", "w_o", "norm")
        shapes = {name: tuple(getattr(self, name).shape) for name in names}
        if [len(shapes[name]) for name in ("w_uk", "w_kr", "w_uv")] != [3, 2, 3]:
            raise ValueError(
                f"w_uk must be (H, d_nope, d_latent), w_kr (d_rope, d_model) and w_uv (H, d_value, d_latent); got "
                f"{shapes}."
            )
        (H, d_nope, d_latent), (d_rope, d_model), (_, d_value, _) = shapes["w_uk"], shapes["w_kr"], shapes["w_uv"]
        wanted = {
            "w_q": (H, d_nope + d_rope, d_model),
            "w_dkv": (d_latent, d_model),
            "w_uv": (H, d_value, d_latent),
            "w_o": (H, d_model, d_value),
            "norm": (d_latent,),
        }
        for name, shape in wanted.items():
            if shapes[name] != shape:
                raise ValueError(f"{name} is {shapes[name]}; beside these w_uk, w_kr and w_uv it must be {shape}.")
        if d_rope % 2:
            raise ValueError(f"d_rope={d_rope} is odd; rotary embedding turns pairs, so it must be even.")

    @property
    def d_latent(self) -> int:
        return self.w_dkv.shape[0]

    @property
    def d_rope(self) -> int:
        return self.w_kr.shape[0]

    @property
    def d_nope(self) -> int:
        return self.w_uk.shape[1]

    @property
    def scale(self) -> float:
        """What scores are multiplied by: it goes by the size of the keys that `naive` makes, whichever form asks."""
        return (self.d_nope + self.d_rope) ** -0.5

    @property
    def kept_latent(self) -> int:
        """Numbers a token that a cache of latents keeps: latent and rotated key."""
        return self.d_latent + self.d_rope

    @property
    def kept_expanded(self) -> int:
        """Numbers a token that a cache of the keys and values of every head would keep."""
        heads, d_value, _ = self.w_uv.shape
        return heads * (self.d_nope + self.d_rope + d_value)


def random_weights(
    n_heads: int = 8,
    d_model: int = 256,
    d_latent: int = 64,
    d_rope: int = 16,
    d_nope: int = 32,
    d_value: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Weights:
    """Random weights of these sizes, on the CPU. DeepSeek-V2 and V3 have d_latent 512, d_rope 64, d_nope and d_value
    128, with 128 heads."""
    sizes = dict(n_heads=n_heads, d_model=d_model, d_latent=d_latent, d_rope=d_rope, d_nope=d_nope, d_value=d_value)
    for name, size in sizes.items():
        require_whole(name, size)
    generator = torch.Generator().manual_seed(require_whole("seed", seed, least=0))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype) / math.sqrt(shape[-1])

    return Weights(
        w_q=draw(n_heads, d_nope + d_rope, d_model),
        w_dkv=draw(d_latent, d_model),
        w_kr=draw(d_rope, d_model),
        w_uk=draw(n_heads, d_nope, d_latent),
        w_uv=draw(n_heads, d_value, d_latent),
        w_o=draw(n_heads, d_model, d_value) / math.sqrt(n_heads),
        norm=1 + draw(d_latent),
    )


class LatentCache:
    """What is kept of the tokens seen so far: `latents` `(B, S, d_latent + d_rope)`, None before the first.

    Both forms read it. It grows by copying, which is simple; `DenseCache` shows how to write in place.
    """

    def __init__(self):
        self.latents: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held by each row."""
        return 0 if self.latents is None else self.latents.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held, of all rows."""
        return 0 if self.latents is None else self.latents.nbytes

    def append(self, latents: Tensor) -> Tensor:
        """Add those of new tokens `(B, T, d_latent + d_rope)`; return all. Raises `ValueError` if the rows differ."""
        if self.latents is not None:
            if (latents.shape[0], latents.shape[2]) != (self.latents.shape[0], self.latents.shape[2]):
                raise ValueError(
                    f"The cache holds latents {tuple(self.latents.shape)}, and {tuple(latents.shape)} are to be added: "
                    "rows and sizes must be the same. For other texts make a new LatentCache."
                )
            latents = torch.cat((self.latents, latents), dim=1)
        self.latents = latents
        return latents


def naive(x: Tensor, w: Weights, cache: LatentCache | None = None) -> Tensor:
    """Make every head's keys and values from the latents of all tokens, then attend: x `(B, T, d_model)` -> same shape.

    x are the tokens that come after those in `cache`, which takes them up; without one, a text from its beginning. With
    a cache of latents the keys and values of all tokens are made again at each step; to keep them instead would
    take `w.kept_expanded` numbers a token. Raises `ValueError` for an x of another shape or dtype.
    """
    q_nope, q_rope, latents, mask = prepare(x, w, cache)
    c, r = latents.split((w.d_latent, w.d_rope), dim=-1)
    k_nope = torch.einsum("hnl,bsl->bhsn", w.w_uk, c)
    v = torch.einsum("hvl,bsl->bhsv", w.w_uv, c)
    k = torch.cat((k_nope, r[:, None].expand(-1, len(w.w_uk), -1, -1)), dim=-1)
    scores = torch.cat((q_nope, q_rope), dim=-1) @ k.mT
    heads = masked_softmax(scores, mask) @ v
    return torch.einsum("hdv,bhtv->btd", w.w_o, heads)


def absorbed(x: Tensor, w: Weights, cache: LatentCache | None = None) -> Tensor:
    """The same result without making a key or a value: W_UK goes to the query's side, W_UV to the output's.

    Every head attends to the same `d_latent + d_rope` numbers of a token: multi-query attention, with a large head.
    W_UK and W_Q are applied one after the other, to the new tokens alone, and so are W_UV and W_O. Multiplied out
    beforehand, each pair would be a matrix `(d_latent, d_model)` for every head, larger than both.
    """
    q_nope, q_rope, latents, mask = prepare(x, w, cache)
    q_latent = torch.einsum("hnl,bhtn->bhtl", w.w_uk, q_nope)
    scores = torch.einsum("bhtl,bsl->bhts", torch.cat((q_latent, q_rope), dim=-1), latents)
    sums = torch.einsum("bhts,bsl->bhtl", masked_softmax(scores, mask), latents[..., : w.d_latent])
    heads = torch.einsum("hvl,bhtl->bhtv", w.w_uv, sums)
    return torch.einsum("hdv,bhtv->btd", w.w_o, heads)


def prepare(x: Tensor, w: Weights, cache: LatentCache | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What both forms begin with: queries `(B, H, T, d_nope)` and, rotated, `(B, H, T, d_rope)`, both scaled; latents
    `(B, S, d_latent + d_rope)` of all tokens, new ones included; who may see whom."""
    check(x, w)
    cache = LatentCache() if cache is None else cache
    positions = torch.arange(cache.length, cache.length + x.shape[1], device=x.device)[None]
    rotary = rotary_tables(positions, w.d_rope, w.rope_theta)
    q = torch.einsum("hqd,btd->bhtq", w.w_q, x) * w.scale  # before the product with keys, which half could not hold
    q_nope, q_rope = q.split((w.d_nope, w.d_rope), dim=-1)
    c = F.rms_norm(x @ w.w_dkv.mT, w.norm.shape, w.norm, w.norm_eps)
    r = rotate((x @ w.w_kr.mT)[:, None], *rotary)[:, 0]
    latents = cache.append(torch.cat((c, r), dim=-1))
    mask = visible(positions, torch.arange(cache.length, device=x.device)[None])
    return q_nope, rotate(q_rope, *rotary), latents, mask


def check(x: Tensor, w: Weights) -> None:
    d_model = w.w_dkv.shape[1]
    if x.ndim != 3 or x.shape[2] != d_model or x.shape[1] == 0 or x.dtype != w.w_dkv.dtype:
        raise ValueError(
            f"x must be (B, T, d_model={d_model}) with T at least 1, in {w.w_dkv.dtype} as the weights; got "
            f"{tuple(x.shape)}, {x.dtype}."
        )
