"""The exercises of notebook 05: worked answers and other right ways pass, the usual mistakes are named."""

import pytest
import torch
from exercises import shared_tests, solution
from reference import small_config, small_model

import kvcourse as kv

NOTEBOOK = "05_sliding_window"

RIGHT = {
    "window_mask": [
        """
        def window_mask(n, window):
            back = torch.arange(n)[:, None] - torch.arange(n)
            return (back >= 0) & (back < window)
        """,
        """
        def window_mask(n, window):
            order = torch.arange(n)[None]
            return kv.layers.visible(order, order, window)[0, 0]
        """,
        """
        def window_mask(n, window):
            ones = np.ones((n, n), dtype=bool)
            return np.tril(ones) & np.triu(ones, 1 - window)
        """,
        """
        def window_mask(n, window):
            return [[i - window < j <= i for j in range(n)] for i in range(n)]
        """,
    ],
    "ring_slots": [
        """
        def ring_slots(length, window):
            slots = [-1] * window
            for position in range(length):
                slots[position % window] = position
            return slots
        """,
        """
        def ring_slots(length, window):
            return [max((p for p in range(length) if p % window == slot), default=-1) for slot in range(window)]
        """,
        """
        def ring_slots(length, window):
            slots = torch.full((window,), -1)
            latest = torch.arange(max(0, length - window), length)
            slots[latest % window] = latest
            return slots
        """,
    ],
    "first_in_reach": [
        """
        def first_in_reach(position, windows):
            if None in windows:
                return 0
            return max(0, position - sum(window - 1 for window in windows))
        """,
        """
        def first_in_reach(position, windows):
            for window in windows:
                position = 0 if window is None else max(0, position - window + 1)
            return position
        """,
        """
        def first_in_reach(position, windows):
            back = sum(float("inf") if window is None else window - 1 for window in windows)
            return max(0, position - back)
        """,
    ],
    "sink_distance": [
        """
        def sink_distance(position, key, window, sinks):
            if key >= sinks:
                return position - key
            return min(position, sinks + window - 1) - key
        """,
        """
        def sink_distance(position, key, window, sinks):
            evicted = max(0, position + 1 - sinks - window)
            return position - key - (evicted if key < sinks else 0)
        """,
        """
        def sink_distance(position, key, window, sinks):
            kept = [p for p in range(position + 1) if p < sinks or position - p < window]
            return len(kept) - 1 - kept.index(key)
        """,
    ],
    "windowed_bytes": [
        """
        def windowed_bytes(config, seq_len, bits):
            kept = sum(seq_len if window is None else min(seq_len, window) for window in config.windows)
            return 2 * config.n_kv_heads * config.d_head * kept * bits // 8
        """,
        """
        def windowed_bytes(config, seq_len, bits):
            return kv.cache_bytes(config, seq_len, bits=bits)
        """,
        """
        def windowed_bytes(config, seq_len, bits):
            slot = 2 * config.n_kv_heads * config.d_head * bits / 8
            return sum(slot * min(seq_len, window or seq_len) for window in config.windows)
        """,
    ],
}


MISTAKES = {
    "window_mask": [
        (("back < window", "back <= window"), "window + 1 tokens"),
        (("back < window", "back < window - 1"), "window - 1 tokens"),
        (("(back >= 0) & (back < window)", "(back > 0) & (back <= window)"), "does not see itself"),
        (("(back >= 0)", "(back > 0)"), "lacks its own key"),
        (("(back >= 0) & (back < window)", "back.abs() < window"), "see those after them"),
        (("(back >= 0) & (back < window)", "back < window"), "all that come after them"),
        ((" & (back < window)", ""), "the far end of the window"),
        (("(back < window)", "(torch.arange(n) < window)"), "the first tokens of the text"),
        (("return (back >= 0) & (back < window)", "return ((back >= 0) & (back < window)).T"), "swapped"),
        (("return (back >= 0) & (back < window)", "return ~((back >= 0) & (back < window))"), "swapped"),
        (("return (back >= 0) & (back < window)", "return ((back >= 0) & (back < window)) * 1.0"), "dtype"),
    ],
    "ring_slots": [
        (("return slots", "return sorted(slots, key=lambda p: (p < 0, p))"), "order of age"),
        (("return slots", "return sorted(slots, reverse=True)"), "newest token stands first"),
        (("range(length)", "range(min(length, window))"), "the first tokens stay"),
        (("range(length)", "range(length - 1)"), "the last token is missing"),
        (("range(length)", "range(length + 1)"), "one token too many"),
        (("[-1] * window", "[0] * window"), "mark it with -1"),
        (("position % window]", "(position + 1) % window]"), "one slot too far"),
        (("return slots", "return list(range(length))"), "a ring has `window` slots"),
        (("position % window]", "position]"), "raises IndexError"),
    ],
    "first_in_reach": [
        (("window - 1 for", "window for"), "reaches W - 1"),
        (("sum(window - 1 for window in windows)", "max(windows) + 1"), "the reach of one layer"),
        (("sum(window - 1 for window in windows)", "len(windows) * (windows[0] - 1)"), "different windows"),
        (("sum(window - 1 for window in windows)", "int(np.prod([w - 1 for w in windows]))"), "multiplied"),
        (
            ("max(0, position - sum(window - 1 for window in windows))", "position - sum(w - 1 for w in windows)"),
            "no token before position 0",
        ),
        (
            ("max(0, position - sum(window - 1 for window in windows))", "min(position, sum(w - 1 for w in windows))"),
            "how far back it reaches",
        ),
        (("if None in windows:\n        return 0", "windows = [w for w in windows if w is not None]"), "was left out"),
    ],
    "sink_distance": [
        (
            ("return min(position, sinks + window - 1) - key", "return min(position - key, sinks + window - 1)"),
            "the place of the newest token",
        ),
        (("if key >= sinks", "if True"), "the distance in the text"),
        (("sinks + window - 1", "sinks + window"), "one place too far"),
        (("sinks + window - 1", "window - 1"), "places of their own"),
        (("if key >= sinks", "if False"), "only the sinks come nearer"),
        (("min(position, sinks + window - 1)", "sinks + window - 1"), "while nothing was evicted"),
        (
            (
                "if key >= sinks",
                "slot = lambda p: p if p < sinks else sinks + (p - sinks) % window\n"
                "    return abs(slot(position) - slot(key))\n    if key >= sinks",
            ),
            "distance between slots",
        ),
        *[
            (
                (
                    "if key >= sinks:\n        return position - key\n    return min(position, sinks + window - 1)",
                    f"if key >= sinks or {early}:\n        return position - key\n    return sinks + window - 1",
                ),
                "first evicted at position sinks + window",
            )
            for early in ("position < window", "position <= window")
        ],
        (("if key >= sinks", "if key >= window"), "only the first `sinks` keys"),
    ],
    "windowed_bytes": [
        (("min(seq_len, window)", "seq_len"), "every layer keeps all tokens"),
        (("min(seq_len, window)", "window"), "shorter than the window"),
        (("seq_len if window is None", "0 if window is None"), "was left out"),
        (("seq_len if window is None", "min(seq_len, 16) if window is None"), "was given a window"),
        (("n_kv_heads", "n_heads"), "n_kv_heads heads, not for n_heads"),
        (("return 2 *", "return"), "only one of them is counted"),
        ((" // 8", ""), "these are bits"),
        (("bits // 8", "(bits // 8)"), "bits // 8 is cut to whole bytes"),
        ((" * bits // 8", ""), "the bits are missing"),
        (("in config.windows", "in config.windows[:1]"), "only one layer"),
        (("config.d_head", "(config.d_model // config.n_heads)"), "d_model / n_heads need not be"),
        (("config.d_head", "config.n_heads"), "a head has d_head numbers"),
        (("config.n_kv_heads * config.d_head", "config.d_model"), "n_kv_heads heads of d_head numbers"),
    ],
}

TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES)


def test_worked_answers_by_hand():
    assert solution(NOTEBOOK, "window_mask")(3, 2).tolist() == [
        [True, False, False],
        [True, True, False],
        [False, True, True],
    ]
    assert solution(NOTEBOOK, "ring_slots")(7, 3) == [6, 4, 5]
    assert solution(NOTEBOOK, "ring_slots")(2, 3) == [0, 1, -1]
    assert solution(NOTEBOOK, "first_in_reach")(300, (64, 64, 64, 64)) == 48  # 300 - 4 x 63
    # 4 sinks and a window of 256 are 260 places: the newest stands in place 259, sink 0 in place 0
    assert solution(NOTEBOOK, "sink_distance")(5000, 0, 256, 4) == 259
    assert solution(NOTEBOOK, "sink_distance")(5000, 4990, 256, 4) == 10
    # 2 layers of 16 tokens and one of 100, 2 x 2 heads x 8 numbers x 2 bytes each
    config = small_config(n_layers=3, window=(16, 16, None))
    assert solution(NOTEBOOK, "windowed_bytes")(config, 100, 16) == (16 + 16 + 100) * 64


@pytest.mark.parametrize("length", [0, 3, 5, 6, 17])
def test_the_ring_of_the_exercise_is_that_of_the_package(length):
    cache = kv.WindowCache(small_config(), 5, dtype=torch.float32, device="cpu")
    if length:
        small_model()(torch.zeros(1, length, dtype=torch.int64), cache=cache)
    assert cache.slots(0)[0].tolist() == solution(NOTEBOOK, "ring_slots")(length, 5)


@pytest.mark.parametrize("windows", [(3,), (3, 3), (2, 5), (1, 4, 2)])
def test_nothing_before_what_is_in_reach_moves_the_scores(windows):
    config = small_config(n_layers=len(windows), window=windows)
    model, tokens = small_model(config, dtype=torch.float64), torch.arange(12)[None]
    first = solution(NOTEBOOK, "first_in_reach")(11, windows)
    plain = model(tokens)[0, -1]
    moved = []
    for position in range(12):
        changed = tokens.clone()
        changed[0, position] = 50
        moved.append(not torch.equal(model(changed)[0, -1], plain))
    assert moved == [position >= first for position in range(12)]


@pytest.mark.parametrize("sinks", [1, 2])
def test_sink_distances_are_those_of_the_package(sinks):
    """One layer: a step of the cache gives what attention over explicit distances gives. With the distances of the text
    it does not."""
    window, n = 6, 20
    config = small_config(n_layers=1, n_kv_heads=8)
    model = small_model(config, dtype=torch.float64)
    cache = kv.WindowCache(config, window, sinks, dtype=torch.float64, device="cpu")
    tokens = torch.arange(n)[None]
    for position in range(n):
        step = model(tokens[:, position : position + 1], cache=cache)[0, 0]
    distance = solution(NOTEBOOK, "sink_distance")
    in_cache = [distance(n - 1, key, window, sinks) for key in range(n)]
    assert torch.allclose(step, last_scores(model, tokens, in_cache, window, sinks), atol=1e-9)
    in_text = [n - 1 - key for key in range(n)]
    assert not torch.allclose(step, last_scores(model, tokens, in_text, window, sinks), atol=1e-4)


def last_scores(model, tokens, distances, window, sinks):
    """Scores after the last token of a model of one layer, with each key at the distance given."""
    layer, n = model.layers[0], tokens.shape[1]
    x = model.embed_tokens(tokens)
    q, k, v = (layer.self_attn.split(f(layer.input_layernorm(x))) for f in
               (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj))  # fmt: skip
    k = kv.layers.rotate(k, *model.rotary(-torch.tensor([distances])))  # the query stands at 0, keys before it
    seen = [key for key in range(n) if key < sinks or n - 1 - key < window]
    out = kv.layers.attention(q[:, :, -1:], k[:, :, seen], v[:, :, seen])
    x = x[:, -1:] + layer.self_attn.o_proj(out.transpose(1, 2).flatten(2))
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.head(model.norm(x))[0, 0]
