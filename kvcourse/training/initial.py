"""Where training starts from: random weights, arranged so that looking things up is near.

To answer "Mia wore" with what Mia wore, a model must find the place where "Mia wore" stood before. Two layers do it
together (an induction head, arXiv 2209.11895): one writes into each place which words came just before it, a later
one compares that between places. Neither is of use without the other, so from weights that are only random a small
model goes on guessing. Here both are begun (what that changes is measured in `data/README.md`):

- the first heads of the first layer look one and two tokens back, whatever stands there;
- in later layers, queries start like keys, so that a place attends to places that resemble it, and what is attended to
  is passed on as it is (arXiv 2305.09828 begins queries and keys alike too).

These are starting values only. Every weight is trained, and the model is an ordinary Llama.
"""

import math
from zlib import crc32

import torch
from torch import Tensor

from kvcourse.model import Transformer
from kvcourse.rope import frequencies

EMBEDDING = 0.2  # standard deviation of a word's own part of an embedding
SHARED = 0.5  # length of the part that all embeddings share, as a multiple of the own part's
HEAD_SCALE = 0.3  # first scale of the last norm: keeps the first scores of all tokens small
GAIN = 0.7  # standard deviation of a matrix's output, for inputs of size one
BACK = (1, 2)  # tokens that the first heads look back
SHARPNESS = 5.5  # score of the place looked at, in each of the turning pairs used
PAIRS = 4  # the fastest pairs tell neighbors apart; the slow ones hardly turn in two tokens
OUTSPOKEN = 3.0  # these heads write so many times more than others
ALIKE = 0.9  # how much of a query matrix is the key matrix
PASSED_ON = 0.7  # how much of an output matrix is the value matrix, turned back


def initialize(model: Transformer, seed: int, arranged: bool = True) -> None:
    """Give every weight its starting value, in place; without `arranged` they are only random.

    Weights that two variants have in common start the same, except that, arranged, those of queries and outputs in
    later layers follow the variant's own keys and values.
    """
    for name, weight in model.named_parameters():
        weight.data.copy_(starting_value(name, weight, model.config.n_layers, seed))
    if not arranged:
        return
    shared = direction(model.config.d_model, seed)
    model.embed_tokens.weight.data.add_(shared * EMBEDDING * SHARED * math.sqrt(model.config.d_model))
    first, *later = (layer.self_attn for layer in model.layers)
    look_back(first, model.config, shared)
    for attention in later:
        look_for_alike(attention, model.config)


def starting_value(name: str, weight: Tensor, n_layers: int, seed: int) -> Tensor:
    if weight.ndim == 1:
        return torch.full(weight.shape, HEAD_SCALE if name == "norm.weight" else 1.0)
    if name == "embed_tokens.weight":
        size = EMBEDDING
    else:
        size = GAIN / math.sqrt(weight.shape[1])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        size /= math.sqrt(2 * n_layers)  # so many of them add up in the residual stream
    return torch.randn(weight.shape, generator=generator(name, seed)) * size


def direction(size: int, seed: int) -> Tensor:
    """A random vector of length one. Every embedding gets a share of it: the same thing in every place, on which a head
    can base a score that depends on positions only. It moves the scores of all next tokens alike, so it tells nothing.
    """
    vector = torch.randn(size, generator=generator("shared", seed))
    return vector / vector.norm()


def generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(crc32(f"{name} {seed}".encode()))


def look_back(attention, config, shared: Tensor) -> None:
    """Let head i attend to the token BACK[i] before, and let these heads write in the same way.

    A query and a key that are the same vector score highest at distance 0, as rotation moves them apart at any other;
    a query turned back by n tokens scores highest at distance n.
    """
    q, k, v, o = by_head(attention, config)
    group = config.n_heads // config.n_kv_heads
    angles = torch.zeros(config.d_head // 2)
    angles[:PAIRS] = frequencies(config.d_head, config.rope_theta)[:PAIRS]
    length = SHARED / math.sqrt(1 + SHARED**2) * math.sqrt(config.d_model)  # of the shared part, after the norm
    strength = math.sqrt(SHARPNESS * math.sqrt(config.d_head)) / length * (angles > 0)
    for head, back in enumerate(BACK):
        turned = torch.cat([strength * torch.cos(angles * back), -strength * torch.sin(angles * back)])
        q[head] = 0.2 * q[head] + torch.outer(turned, shared)
        if head % group == 0:
            still = torch.cat([strength, torch.zeros(len(angles))])
            k[head // group] = 0.2 * k[head // group] + torch.outer(still, shared)
        v[head // group] = v[0]
        o[:, head] = o[:, 0]
    o[:, : len(BACK)] *= OUTSPOKEN


def look_for_alike(attention, config) -> None:
    """Queries like keys, outputs like values turned back: a place attends to those like it, and takes on what they
    are."""
    q, k, v, o = by_head(attention, config)
    group = config.n_heads // config.n_kv_heads
    keys, values = (part.repeat_interleave(group, 0) for part in (k, v))
    q.copy_(ALIKE * keys + math.sqrt(1 - ALIKE**2) * q)
    back = values.permute(2, 0, 1) * (o.std() / v.std())
    o.copy_(PASSED_ON * back + math.sqrt(1 - PASSED_ON**2) * o)


def by_head(attention, config) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the matrices of queries, keys and values `(H, D, d_model)`, and of the output `(d_model, H, D)`."""
    q, k, v = (
        matrix.weight.data.view(heads, config.d_head, config.d_model)
        for matrix, heads in (
            (attention.q_proj, config.n_heads),
            (attention.k_proj, config.n_kv_heads),
            (attention.v_proj, config.n_kv_heads),
        )
    )
    return q, k, v, attention.o_proj.weight.data.view(config.d_model, config.n_heads, config.d_head)
