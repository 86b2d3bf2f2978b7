"""Checkers of notebook 04: the cache in bytes, what fits, and key-value heads that are shared."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcourse.check.framework import compare, exercise, normal
from kvcourse.config import ModelConfig
from kvcourse.cost import cache_bytes, weight_bytes

GROUPED = ModelConfig(vocab_size=1000, n_layers=4, n_heads=8, n_kv_heads=2, d_model=64, d_ff=128)
# Here every mistake with one of the numbers is off by a factor of its own, and d_model is not n_heads x d_head.
WIDE = ModelConfig(vocab_size=1000, n_layers=3, n_heads=12, n_kv_heads=4, d_model=50, d_head=20, d_ff=96)


@exercise
def cache_size(answer):
    """cache_size(config, seq_len, batch_size, bits): bytes that the keys and values of a batch of texts take."""

    def right(config, seq_len, batch_size, bits):
        return 2 * config.n_layers * config.n_kv_heads * config.d_head * seq_len * batch_size * bits / 8

    def scaled(factor):
        return lambda c, n, b, bits: right(c, n, b, bits) * factor(c, n, b, bits)

    return compare(
        answer,
        right,
        cases=[(WIDE, 1000, 7, 4), (GROUPED, 100, 1, 16), (WIDE, 7, 1, 32)],
        mistakes={
            "n_heads are the query heads; only the n_kv_heads key-value heads are kept": scaled(
                lambda c, n, b, bits: c.n_heads / c.n_kv_heads
            ),
            "d_model is not the width of what is kept; that is n_kv_heads x d_head": scaled(
                lambda c, n, b, bits: c.d_model / (c.n_kv_heads * c.d_head)
            ),
            "d_head stands in the config; it need not be d_model // n_heads": scaled(
                lambda c, n, b, bits: c.d_model // c.n_heads / c.d_head
            ),
            "a token leaves a key and a value; only one of them is counted": scaled(lambda c, n, b, bits: 1 / 2),
            "these are bits; a byte has 8": scaled(lambda c, n, b, bits: 8),
            "bits // 8 is cut to whole bytes, and 4 bits become 0: multiply by the bits first, then divide by 8": (
                scaled(lambda c, n, b, bits: bits // 8 * 8 / bits)
            ),
            "the 2 bytes are those of 16 bits; take the bits that are given": scaled(lambda c, n, b, bits: 16 / bits),
            "every layer has a cache of its own; only one is counted": scaled(lambda c, n, b, bits: 1 / c.n_layers),
            "each text of the batch has its own keys and values": scaled(lambda c, n, b, bits: 1 / b),
            "the KV heads are missing: d_head is the size of one": scaled(lambda c, n, b, bits: 1 / c.n_kv_heads),
        },
    )


@exercise
def tokens_that_fit(answer):
    """tokens_that_fit(config, memory, batch_size, weight_bits, cache_bits): the most tokens that each of `batch_size`
    texts can hold on a device with `memory` bytes, after the weights; 0 when the weights do not fit."""
    weights = weight_bytes(GROUPED, 16)
    token = cache_bytes(GROUPED, 1)
    roomy = weights + 1000 * token + 1  # 1,000 tokens and a byte

    def right(config, memory, batch_size, weight_bits, cache_bits):
        room = memory - weight_bytes(config, weight_bits)
        return max(0, int(room // cache_bytes(config, 1, batch_size, cache_bits)))

    def shared(config, memory, batch_size, weight_bits, cache_bits):
        return batch_size * right(config, memory, batch_size, weight_bits, cache_bits)

    return compare(
        answer,
        right,
        cases=[
            (GROUPED, roomy, 1, 16, 16),
            (GROUPED, roomy, 3, 16, 16),
            (GROUPED, roomy, 3, 4, 8),
            (WIDE, 2 * roomy, 7, 8, 16),
            (GROUPED, weights // 2, 1, 16, 16),
        ],
        mistakes={
            "the weights take their part of the memory first: subtract them": lambda c, m, b, w, k: int(
                m // cache_bytes(c, 1, b, k)
            ),
            "all of memory may be filled here: what the system needs is taken off already": lambda c, m, b, w, k: right(
                c, 0.9 * m, b, w, k
            ),
            "the cache has bits of its own: cache_bits": lambda c, m, b, w, k: right(c, m, b, w, 16),
            "the weights have bits of their own: weight_bits": lambda c, m, b, w, k: right(c, m, b, 16, k),
            "the weights are there once, not once for each text": lambda c, m, b, w, k: max(
                0, int((m - b * weight_bytes(c, w)) // cache_bytes(c, 1, b, k))
            ),
            "these are the tokens of all texts together; divide by the batch": lambda c, m, b, w, k: right(
                c, m, 1, w, k
            ),
            "these are the tokens of all texts together; those of each text are wanted": shared,
            "the weights are counted with the bits of the cache; they have their own": lambda c, m, b, w, k: right(
                c, m, b, k, k
            ),
            "the cache is counted with the bits of the weights; it has its own": lambda c, m, b, w, k: right(
                c, m, b, w, w
            ),
            "the bits are swapped: first those of the weights, then those of the cache": lambda c, m, b, w, k: right(
                c, m, b, k, w
            ),
            "where the weights do not fit there is room for 0 tokens, not for fewer": lambda c, m, b, w, k: int(
                (m - weight_bytes(c, w)) // cache_bytes(c, 1, b, k)
            ),
            "a token fits whole or not at all: round down": lambda c, m, b, w, k: max(
                0, -int(-(m - weight_bytes(c, w)) // cache_bytes(c, 1, b, k))
            ),
            "a token fits whole or not at all: round down to a whole number": lambda c, m, b, w, k: max(
                0, (m - weight_bytes(c, w)) / cache_bytes(c, 1, b, k)
            ),
        },
    )


@exercise
def repeat_heads(answer):
    """repeat_heads(k, n_heads): keys `(B, n_kv_heads, S, D)` copied so that each of `n_heads` query heads has its own,
    `(B, n_heads, S, D)`; query heads that share one stand next to each other."""

    def right(k, n_heads):
        return k.repeat_interleave(n_heads // k.shape[1], dim=1)

    return compare(
        answer,
        right,
        cases=[(normal(1, 2, 3, 4), 8), (normal(2, 3, 5, 2, seed=1), 6), (normal(2, 4, 3, 2, seed=2), 4)],
        mistakes={
            "the heads come round and round (0, 1, 0, 1); those of a group stand together (0, 0, 1, 1)": (
                lambda k, n: k.repeat(1, n // k.shape[1], 1, 1)
            ),
            "the tokens are repeated, not the heads: heads are dimension 1": lambda k, n: k.repeat_interleave(
                n // k.shape[1], dim=2
            ),
            "each head is repeated n_heads times; n_heads // n_kv_heads times make n_heads in all": (
                lambda k, n: k.repeat_interleave(n, dim=1)
            ),
            "the numbers inside a head are repeated, not the heads": lambda k, n: k.repeat_interleave(
                n // k.shape[1], dim=-1
            ),
        },
        tolerance=1e-6,
    )


@exercise
def attend_grouped(answer):
    """attend_grouped(q, k, v): attention of q `(B, H, T, D)` over all of k, v `(B, H_kv, S, D)`, `(B, H, T, D)`,
    without copying keys or values."""

    def right(q, k, v, how=lambda k, n: k.repeat_interleave(n // k.shape[1], dim=1), scale=None, dim=-1):
        keys, values = how(k, q.shape[1]), how(v, q.shape[1])
        scores = q @ keys.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        return scores.softmax(dim) @ values

    def tiled(k, n):
        return k.repeat(1, n // k.shape[1], 1, 1)

    def first(k, n):
        return k[:, :1].expand(-1, n, -1, -1)

    def mixed(q, k, v):
        """Right heads, put back in the wrong order: (G, H_kv) for (H_kv, G)."""
        return right(q, k, v).unflatten(1, (k.shape[1], -1)).transpose(1, 2).flatten(1, 2)

    fault = compare(
        answer,
        right,
        cases=[
            (normal(1, 4, 3, 8), normal(1, 2, 5, 8, seed=1), normal(1, 2, 5, 8, seed=2)),
            (normal(2, 6, 1, 4, seed=3), normal(2, 2, 7, 4, seed=4), normal(2, 2, 7, 4, seed=5)),
            (normal(1, 3, 2, 4, seed=6), normal(1, 3, 2, 4, seed=7), normal(1, 3, 2, 4, seed=8)),
        ],
        mistakes={
            "query head h belongs to KV head h // group, not h % n_kv_heads: split H into (H_kv, G), in this order": (
                lambda q, k, v: right(q, k, v, tiled)
            ),
            "all query heads look at the first KV head": lambda q, k, v: right(q, k, v, first),
            "the heads come back in another order: (H_kv, G) becomes H again, not (G, H_kv)": mixed,
            "divide the scores by the square root of d_head": lambda q, k, v: right(q, k, v, scale=1.0),
            "the scores are divided by d_head; divide by its square root": lambda q, k, v: right(
                q, k, v, scale=1 / q.shape[-1]
            ),
            "the softmax must run over the keys, the last dimension of the scores": lambda q, k, v: right(
                q, k, v, dim=-2
            ),
        },
        tolerance=1e-4,
    )
    return fault or copies(answer)


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that any operation makes while it is on."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.untyped_storage().nbytes() // made.element_size())
        return made


def copies(answer) -> str | None:
    """A sentence when the answer makes a tensor larger than the keys: with few queries nothing needs to be."""
    q, k, v = normal(1, 8, 1, 64), normal(1, 2, 300, 64, seed=1), normal(1, 2, 300, 64, seed=2)
    with Largest() as largest:
        answer(q, k, v)
    if largest.numbers <= k.numel():  # not bytes: float64 in place of float32 repeats nothing
        return None
    return (
        f"the numbers are right, but a tensor {largest.numbers / k.numel():.0f} times as large as the keys was made: "
        "do not repeat keys or values (`@` does that inside where it has to broadcast them); give the queries of a "
        "group a dimension of their own"
    )


@exercise
def pool_heads(answer):
    """pool_heads(weight, n_kv_heads, d_head): the projection to keys (or values) `(n_heads * d_head, d_model)` with the
    heads of each group averaged, `(n_kv_heads * d_head, d_model)`."""

    def right(weight, n_kv_heads, d_head):
        return weight.reshape(n_kv_heads, -1, d_head, weight.shape[1]).mean(1).flatten(0, 1)

    def heads(weight, n_kv_heads, d_head):
        return weight.reshape(n_kv_heads, -1, d_head, weight.shape[1])

    return compare(
        answer,
        right,
        cases=[(normal(16, 5), 2, 4), (normal(24, 6, seed=1), 3, 4), (normal(12, 3, seed=2), 1, 2)],
        mistakes={
            "heads of a group stand next to each other: here heads far apart are averaged (0 with 2 and not with 1)": (
                lambda w, n, d: w.reshape(-1, n, d, w.shape[1]).mean(0).flatten(0, 1)
            ),
            "the heads are added up; their mean is wanted": lambda w, n, d: heads(w, n, d).sum(1).flatten(0, 1),
            "this is the first head of each group; the mean of all is wanted": lambda w, n, d: heads(w, n, d)[
                :, 0
            ].flatten(0, 1),
            "the numbers within a head are averaged; average row i of one head with row i of another": (
                lambda w, n, d: w.unflatten(0, (-1, d)).mean(1)
            ),
            "the rows are cut in another order: first the groups, in each of them its heads, in each head its rows": (
                lambda w, n, d: w.unflatten(0, (n, d, -1)).mean(1).flatten(0, 1)
            ),
            "neighboring rows are averaged; average whole heads, row i of one with row i of another": (
                lambda w, n, d: w.reshape(n * d, -1, w.shape[1]).mean(1)
            ),
        },
        tolerance=1e-5,
    )
