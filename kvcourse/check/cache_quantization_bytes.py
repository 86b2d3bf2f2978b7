"""Checkers of notebook 09: the bytes of a cache in few bits, and scores that are computed from codes."""

import torch

from kvcourse.caches import QuantizedCache
from kvcourse.check.framework import compare, exercise, normal
from kvcourse.config import ModelConfig


@exercise
def true_bits(answer):
    """true_bits(bits, group_size): bits that a rounded number takes, when each group of `group_size` numbers keeps a
    scale and a minimum of 16 bits beside its codes."""

    def right(bits, group_size):
        return bits + 32 / group_size

    return compare(
        answer,
        right,
        cases=[(4, 32), (2, 32), (8, 64), (4, 128), (3, 16)],
        mistakes={
            "only one number of 16 bits is counted for a group; a scale and a minimum are kept": lambda b, g: (
                b + 16 / g
            ),
            "scale and minimum have 16 bits each, not 32": lambda b, g: b + 64 / g,
            "the part of scale and minimum is cut to a whole number: divide with /, not //": lambda b, g: b + 32 // g,
            "scale and minimum are counted for each number; a whole group shares them": lambda b, g: b + 32,
            "scale and minimum are not counted": lambda b, g: b,
            "scale and minimum have `bits` bits here; they are kept in 16": lambda b, g: b + 2 * b / g,
            "these are bytes; bits are wanted": lambda b, g: right(b, g) / 8,
            "these are the bits of a whole group; those of one number are wanted": lambda b, g: right(b, g) * g,
            "scale and minimum take two whole bytes each, 16 bits; you counted bytes as bits": lambda b, g: b + 4 / g,
        },
    )


@exercise
def rounded_cache_bytes(answer):
    """rounded_cache_bytes(config, n, bits, group_size, residual): bytes of a cache made for one text of n tokens: keys
    and values that can be rounded, with scale and minimum of 16 bits for each group, and room for the latest `residual`
    keys and values at 16 bits."""

    def right(config, n, bits, group_size, residual):
        return QuantizedCache.bytes_for(config, bits, group_size, residual, max_len=n, dtype=torch.float16)

    def parts(config, n, bits, group_size, residual):
        ring = residual or group_size
        rounded = {"keys": n // ring * ring, "values": max(0, n - residual), "exact": min(n, residual)}
        return rounded | {"layers": config.n_layers, "heads": config.n_kv_heads, "each": bits + 32 / group_size}

    def with_other(**changes):
        """The same sum, with parts that are worked out otherwise."""

        def wrong(config, *sizes):
            p = parts(config, *sizes) | {name: change(config, *sizes) for name, change in changes.items()}
            bits = (p["keys"] + p["values"]) * p["each"] + 2 * p["exact"] * 16
            return p["layers"] * p["heads"] * config.d_head * bits / 8

        return wrong

    tiny = _config(n_layers=3, n_heads=8, n_kv_heads=2, d_head=32)
    wide = _config(n_layers=5, n_heads=4, n_kv_heads=1, d_head=64)

    return compare(
        answer,
        right,
        cases=[
            (tiny, 200, 4, 32, 32),
            (tiny, 512, 8, 32, 32),
            (wide, 1000, 2, 32, 128),
            (wide, 100, 4, 64, 64),
            (tiny, 20, 4, 32, 32),
            (tiny, 65, 4, 16, 32),
        ],
        mistakes={
            "keys and values of every query head are counted; only n_kv_heads heads are kept": with_other(
                heads=lambda config, *_: config.n_heads
            ),
            "only one layer is counted": with_other(layers=lambda *_: 1),
            "keys and values are kept, both; only one of them is counted": lambda *args: right(*args) / 2,
            "keys and values are counted twice": lambda *args: 2 * right(*args),
            "scale and minimum of the groups are missing": with_other(each=lambda c, n, bits, g, r: bits),
            "only one number of 16 bits is counted for a group; a scale and a minimum are kept": with_other(
                each=lambda c, n, bits, g, r: bits + 16 / g
            ),
            "the exact tokens are missing: `residual` keys and values at 16 bits": with_other(exact=lambda *_: 0),
            "the exact tokens are counted in addition to all n; those that stay exact are not rounded": with_other(
                keys=lambda c, n, *_: n, values=lambda c, n, *_: n
            ),
            "all keys but the latest `residual` are rounded here, as values are; keys are rounded by whole residuals": (
                with_other(keys=lambda c, n, bits, g, r: max(0, n - r))
            ),
            "values are rounded by whole residuals here, as keys are; of values all but the latest `residual` are": (
                with_other(values=lambda c, n, bits, g, r: n // r * r)
            ),
            "a text shorter than the residual needs room for its own tokens only": with_other(
                exact=lambda c, n, bits, g, r: r
            ),
            "all n tokens are rounded here; the latest stay exact, at 16 bits": with_other(
                keys=lambda c, n, *_: n, values=lambda c, n, *_: n, exact=lambda *_: 0
            ),
            "only keys that wait after n tokens are counted as exact; room is reserved for `residual` keys, however "
            "many wait now": with_other(exact=lambda c, n, bits, g, r: (n % r + min(n, r)) / 2),
            "a text shorter than the residual has no rounded values, not fewer than none: max(0, n - residual)": (
                with_other(values=lambda c, n, bits, g, r: n - r)
            ),
            "a text shorter than the residual has no rounded values, max(0, n - residual), and needs room for its own "
            "tokens only": with_other(values=lambda c, n, bits, g, r: n - r, exact=lambda c, n, bits, g, r: r),
            "these are bits; bytes are wanted": lambda *args: 8 * right(*args),
        },
    )


@exercise
def fold_into_query(answer):
    """fold_into_query(q, scale, minimum): (folded `(d,)`, a number) with which codes of keys, `(n, d)`, give the scores
    of the query q `(d,)`: `codes @ folded + number`, where channel i of a key is code x scale[i] + minimum[i]."""

    def right(q, scale, minimum):
        return q * scale, (q * minimum).sum()

    def case(d, seed):
        return normal(d, seed=seed), normal(d, seed=seed + 1).abs() + 0.1, 3 * normal(d, seed=seed + 2)

    return compare(
        answer,
        right,
        cases=[case(4, 0), case(8, 3), case(64, 6)],
        mistakes={
            "the query is divided by the scale; a code is multiplied with it, so multiply the query": (
                lambda q, s, m: (q / s, (q * m).sum())
            ),
            "the minimum is left out: it adds the same to every score, q times minimum": lambda q, s, m: (
                q * s,
                torch.tensor(0.0),
            ),
            "the number is the sum of the minimums; each must be multiplied with its channel of the query": (
                lambda q, s, m: (q * s, m.sum())
            ),
            "the minimum is multiplied with the scale too; it is added after the scale": lambda q, s, m: (
                q * s,
                (q * s * m).sum(),
            ),
            "the minimum is in the folded query, where it is multiplied with codes; it belongs into the number": (
                lambda q, s, m: (q * s + m, torch.tensor(0.0))
            ),
            "the minimum is in the folded query and in the number; it belongs into the number alone": (
                lambda q, s, m: (q * s + m, (q * m).sum())
            ),
            "the number has an entry for each channel: add them up": lambda q, s, m: (q * s, q * m),
            "the query itself is not folded; multiply it with the scale": lambda q, s, m: (q, (q * m).sum()),
            "the two are swapped: the folded query comes first": lambda q, s, m: right(q, s, m)[::-1],
        },
    )


def _config(**sizes) -> ModelConfig:
    return ModelConfig(vocab_size=64, d_model=32, d_ff=64, max_seq_len=2048, **sizes)
