"""Checkers of notebook 05: windows as masks and as rings, reach over layers, places of sinks, bytes of mixed layers."""

import torch

from kvcourse.check.framework import compare, exercise
from kvcourse.config import ModelConfig
from kvcourse.cost import cache_bytes


@exercise
def window_mask(answer):
    """window_mask(n, window): bool (n, n), True where the token of that row sees the token of that column: the `window`
    latest tokens, its own included."""

    def band(n, nearest, farthest):
        """True where the key stands at least `nearest` and at most `farthest` tokens before the query."""
        back = torch.arange(n)[:, None] - torch.arange(n)
        return (nearest <= back) & (back <= farthest)

    def right(n, window):
        return band(n, 0, window - 1)

    return compare(
        answer,
        right,
        cases=[(6, 3), (5, 1), (4, 9), (8, 4)],
        mistakes={
            "it sees window + 1 tokens: its own counts as one of the window": lambda n, w: band(n, 0, w),
            "it sees window - 1 tokens: the farthest one seen is window - 1 tokens back": lambda n, w: band(
                n, 0, w - 2
            ),
            "a token does not see itself; its own key is the nearest of the window": lambda n, w: band(n, 1, w),
            "it lacks its own key; that one is part of the window": lambda n, w: band(n, 1, w - 1),
            "tokens see those after them: a key must not stand after its query": lambda n, w: band(n, 1 - w, w - 1),
            "tokens see all that come after them: what is later must be hidden too": lambda n, w: band(n, -n, w - 1),
            "every token sees all before it: the far end of the window is missing": lambda n, w: band(n, 0, n),
            "it sees the first tokens of the text; the window goes with the token": lambda n, w: (
                band(n, 0, n) & (torch.arange(n) < w)
            ),
            "rows and columns are swapped: a row is a query, a column a key": lambda n, w: right(n, w).T,
            "True and False are swapped: True means that the key is seen": lambda n, w: ~right(n, w),
        },
    )


@exercise
def ring_slots(answer):
    """ring_slots(length, window): for each of the `window` slots, which position it holds after `length` tokens, -1 for
    none."""

    def right(length, window, shift=0, empty=-1):
        slots = [empty] * window
        for position in range(length):
            slots[(position + shift) % window] = position
        return slots

    def by_age(length, window):
        latest = list(range(max(0, length - window), length))
        return latest + [-1] * (window - len(latest))

    return compare(
        answer,
        right,
        cases=[(10, 4), (3, 4), (4, 4), (5, 4), (0, 3), (17, 5)],
        mistakes={
            "the tokens stand in order of age; nothing moves in a ring: position p stays in slot p % window": by_age,
            "the newest token stands first; position p is in slot p % window, whatever its age": lambda n, w: (
                list(reversed(range(max(0, n - w), n))) + [-1] * (w - min(n, w))
            ),
            "the first tokens stay and later ones are lost: a new token takes the place of the oldest": lambda n, w: (
                right(min(n, w), w)
            ),
            "the last token is missing: after `length` tokens the last has position length - 1": lambda n, w: right(
                n - 1, w
            ),
            "there is one token too many: positions count from 0, so the last is length - 1": lambda n, w: right(
                n + 1, w
            ),
            "an empty slot has position 0, which is a real position; mark it with -1": lambda n, w: right(
                n, w, empty=0
            ),
            "every token is one slot too far: position 0 is in slot 0": lambda n, w: right(n, w, shift=1),
            "there is a slot for each token; a ring has `window` slots, however long the text": lambda n, w: list(
                range(n)
            ),
        },
    )


@exercise
def first_in_reach(answer):
    """first_in_reach(position, windows): the earliest token that can have an influence on the scores at `position`,
    through layers with these windows (None: a layer that sees everything)."""

    def right(position, windows):
        return 0 if None in windows else max(0, position - sum(window - 1 for window in windows))

    def known(windows):
        return [window for window in windows if window is not None]

    return compare(
        answer,
        right,
        cases=[(300, (64,)), (100, (8, 8, 8, 8)), (40, (4, 16)), (10, (8, 8, 8)), (7, (1, 1)), (500, (64, None, 64))],
        mistakes={
            "a window of W reaches W - 1 tokens back: the token itself is one of the W": lambda p, ws: (
                0 if None in ws else max(0, p - sum(ws))
            ),
            "this is the reach of one layer; what a layer has gathered, the next one takes further": lambda p, ws: (
                0 if None in ws else max(0, p - max(ws) + 1)
            ),
            "layers may have different windows, so the reach of one times their number is not enough": lambda p, ws: (
                0 if None in ws else max(0, p - len(ws) * (ws[0] - 1))
            ),
            "the windows are multiplied; each layer adds its own reach to that of the others": lambda p, ws: (
                0 if None in ws else max(0, p - _product(w - 1 for w in ws))
            ),
            "there is no token before position 0": lambda p, ws: 0 if None in ws else p - sum(w - 1 for w in ws),
            "this is how far back it reaches; the position of that token is wanted": lambda p, ws: (
                p if None in ws else min(p, sum(w - 1 for w in ws))
            ),
            "a layer without a window was left out; it sees everything": lambda p, ws: max(
                0, p - sum(w - 1 for w in known(ws))
            ),
        },
    )


def _product(numbers) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


@exercise
def sink_distance(answer):
    """sink_distance(position, key, window, sinks): how far from the token at `position` a key that it sees counts as
    standing, when positions are places in the cache."""

    def right(position, key, window, sinks):
        return min(position, sinks + window - 1) - key if key < sinks else position - key

    def slot(position, window, sinks):
        return position if position < sinks else sinks + (position - sinks) % window

    return compare(
        answer,
        right,
        cases=[
            (100, 0, 8, 2),
            (100, 1, 8, 2),
            (100, 97, 8, 2),
            (5, 1, 8, 2),
            (9, 0, 8, 2),
            (10, 0, 8, 2),
            (4, 4, 8, 1),
            (8, 0, 8, 2),  # all places but one are taken
            (9, 1, 8, 4),
            (12, 5, 8, 2),  # a key of the window that is smaller than `window`
        ],
        mistakes={
            "this is the distance in the text; tokens that were evicted must not count": lambda p, k, w, s: p - k,
            "the newest token is one place too far: the last of sinks + window places has the number sinks + window - "
            "1": lambda p, k, w, s: min(p, s + w) - k if k < s else p - k,
            "the sinks have places of their own, before those of the window: there are sinks + window": (
                lambda p, k, w, s: min(p, w - 1) - k if k < s else p - k
            ),
            "only the sinks come nearer; keys in the window keep their distance": lambda p, k, w, s: (
                min(p, s + w - 1) - k
            ),
            "not the distance is cut, but the place of the newest token; the key's place is then taken from it": (
                lambda p, k, w, s: min(p - k, s + w - 1)
            ),
            "while nothing was evicted, a sink has its own distance": lambda p, k, w, s: (
                s + w - 1 - k if k < s else p - k
            ),
            "this is the distance between slots; a slot is where a key lies, not how old it is": lambda p, k, w, s: abs(
                slot(p, w, s) - slot(k, w, s)
            ),
            "a token is first evicted at position sinks + window; up to there a sink has its own distance": (
                lambda p, k, w, s: p - k if k >= s or p < w else s + w - 1 - k
            ),
            "a token is first evicted at position sinks + window, not behind `window`; until then a sink has its own "
            "distance": lambda p, k, w, s: p - k if k >= s or p <= w else s + w - 1 - k,
            "only the first `sinks` keys come nearer; a key of the window can be smaller than `window`": (
                lambda p, k, w, s: p - k if k >= w else min(p, s + w - 1) - k
            ),
        },
    )


@exercise
def windowed_bytes(answer):
    """windowed_bytes(config, seq_len, bits): bytes of keys and values of one text, when the layer i keeps the latest
    `config.windows[i]` tokens, or all of them where that is None."""
    # No two sizes are equal, nor is d_head d_model / n_heads: none can stand in for another.
    sizes = dict(vocab_size=90, n_heads=10, n_kv_heads=5, d_model=70, d_head=12, d_ff=128)
    mixed = ModelConfig(n_layers=6, window=(16, 16, None, 16, 16, None), **sizes)
    local, everything = ModelConfig(n_layers=3, window=16, **sizes), ModelConfig(n_layers=2, **sizes)

    def right(config, seq_len, bits):
        return cache_bytes(config, seq_len, bits=bits)

    def variant(tokens, numbers=lambda c: c.n_kv_heads * c.d_head, factor=1.0):
        """The bytes if a layer kept `tokens(its window, seq_len)` tokens, and a key had `numbers(config)` numbers."""

        def wrong(config, seq_len, bits):
            kept = sum(tokens(window, seq_len) for window in config.windows)
            return 2 * numbers(config) * kept * bits / 8 * factor

        return wrong

    def kept(window, n):
        return n if window is None else min(n, window)

    return compare(
        answer,
        right,
        cases=[(mixed, 100, 32), (mixed, 10, 32), (local, 1000, 16), (everything, 50, 8), (local, 16, 4)],
        mistakes={
            "every layer keeps all tokens; one with a window keeps no more than that": variant(lambda w, n: n),
            "a text that is shorter than the window does not fill it: min(seq_len, window)": variant(
                lambda w, n: n if w is None else w
            ),
            "a layer without a window (None) was left out; it keeps every token": variant(
                lambda w, n: 0 if w is None else min(n, w)
            ),
            "every layer was given a window; one with None keeps every token": lambda config, n, bits: variant(
                lambda w, n: min(n, min((w for w in config.windows if w is not None), default=n))
            )(config, n, bits),
            "a token keeps keys and values for n_kv_heads heads, not for n_heads": variant(
                kept, lambda c: c.n_heads * c.d_head
            ),
            "a head has d_head numbers; d_model / n_heads need not be as many": variant(
                kept, lambda c: c.n_kv_heads * (c.d_model // c.n_heads)
            ),
            "n_heads is how many heads there are; a head has d_head numbers": variant(
                kept, lambda c: c.n_kv_heads * c.n_heads
            ),
            "a key has n_kv_heads heads of d_head numbers, which need not be d_model together": variant(
                kept, lambda c: c.d_model
            ),
            "a token leaves a key and a value; only one of them is counted": variant(kept, factor=0.5),
            "these are bits; a byte has 8": variant(kept, factor=8.0),
            "bits // 8 is cut to whole bytes, and 4 bits become 0: multiply by the bits first, then divide by 8": (
                lambda config, n, bits: variant(kept)(config, n, bits // 8 * 8)
            ),
            "the bits are missing: a number has bits / 8 bytes": lambda config, n, bits: variant(kept)(config, n, 8),
            "only one layer is counted; add up all of them": lambda config, n, bits: (
                right(config, n, bits) * kept(config.windows[0], n) / sum(kept(w, n) for w in config.windows)
            ),
        },
    )
