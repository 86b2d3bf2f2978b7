"""The exercises of notebook 09: worked answers and other right ways pass, the usual mistakes are named."""

import pytest
import torch
from exercises import assert_mistake_is_named, assert_worked_answer_is_right_and_stub_not_attempted, learner
from reference import small_config

import kvcourse as kv
from kvcourse.caches.quantized_store import fake_quantize
from kvcourse.check.framework import normal
from kvcourse.notebooks.exercises import solution

NOTEBOOK = "09_cache_quantization"
EXERCISES = ["round_keys", "full_groups", "exact_tokens", "true_bits", "rounded_cache_bytes", "fold_into_query"]


@pytest.mark.parametrize("name", EXERCISES)
def test_the_worked_answer_is_right_and_the_stub_not_attempted(name):
    assert_worked_answer_is_right_and_stub_not_attempted(NOTEBOOK, name)


RIGHT = {
    "round_keys": [
        """
        def round_keys(x, bits, axis, group_size):
            rows = x.T if axis == "channel" else x
            rounded = kv.quant.rtn(rows.contiguous(), bits, group_size, kind="minimum", scale_dtype=torch.float32)
            return rounded.dequantize().T if axis == "channel" else rounded.dequantize()
        """,
        """
        def round_keys(x, bits, axis, group_size):
            x, out = x.numpy(), np.zeros(tuple(x.shape))
            for i in range(x.shape[0]):
                for j in range(x.shape[1]):
                    a = (i if axis == "channel" else j) // group_size * group_size
                    group = x[a : a + group_size, j] if axis == "channel" else x[i, a : a + group_size]
                    scale = (group.max() - group.min()) / (2**bits - 1)
                    out[i, j] = np.rint((x[i, j] - group.min()) / scale) * scale + group.min()
            return out
        """,
    ],
    "full_groups": [
        """
        def full_groups(waiting, group_size):
            rest = len(waiting) % group_size
            taken = waiting[: len(waiting) - rest]
            return taken.view(-1, group_size, waiting.shape[1]), waiting[len(taken) :]
        """,
        """
        def full_groups(waiting, group_size):
            groups, d = [], waiting.shape[1]
            while len(waiting) >= group_size:
                groups.append(waiting[:group_size])
                waiting = waiting[group_size:]
            return (torch.stack(groups) if groups else torch.zeros(0, group_size, d)), waiting
        """,
    ],
    "exact_tokens": [
        """
        def exact_tokens(n, residual, group_size):
            keys, values = 0, []
            for token in range(n):
                keys += 1
                values = (values + [token])[-residual:] if residual else []
                if keys == max(residual, group_size if residual == 0 else 0):
                    keys = 0
            return keys, len(values)
        """,
        """
        def exact_tokens(n, residual, group_size):
            config = kv.ModelConfig(vocab_size=8, n_layers=1, n_heads=1, d_head=group_size, d_model=8, d_ff=8,
                                    max_seq_len=512)
            cache = kv.QuantizedCache(config, 2, group_size, residual, device="cpu", dtype=torch.float32)
            cache.lengths = [n]
            return n - cache.quantized_keys[0], n - cache.quantized_values[0]
        """,
    ],
    "true_bits": [
        """
        def true_bits(bits, group_size):
            return kv.bits_per_number(bits, group_size, zero_bits=16)
        """,
        """
        def true_bits(bits, group_size):
            return (bits * group_size + 2 * 16) / group_size
        """,
    ],
    "rounded_cache_bytes": [
        """
        def rounded_cache_bytes(config, n, bits, group_size, residual):
            each = kv.bits_per_number(bits, group_size, zero_bits=16)
            rounded = n - n % residual + max(0, n - residual)
            tokens = rounded * each + 2 * min(n, residual) * 16
            return config.n_layers * config.n_kv_heads * config.d_head * tokens // 8
        """,
    ],
    "fold_into_query": [
        """
        def fold_into_query(q, scale, minimum):
            return scale * q, q @ minimum
        """,
        """
        def fold_into_query(q, scale, minimum):
            ones = torch.eye(len(q))
            number = q @ minimum
            return (ones * scale + minimum) @ q - number, number
        """,
    ],
}


@pytest.mark.parametrize("name, code", [(name, code) for name, codes in RIGHT.items() for code in codes])
def test_other_right_ways_pass(name, code):
    verdict = getattr(kv.check, name)(learner(code))
    assert (verdict.status, verdict.message) == ("right", "")


ROUND = """
def round_keys(x, bits, axis, group_size):
    turn = axis == "channel"
    table = x.T if turn else x
    groups = table.reshape(-1, group_size)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    codes = torch.round((groups - low) / scale)
    rounded = (codes * scale + low).reshape(table.shape)
    return rounded.T if turn else rounded
"""
GROUPS = """
def full_groups(waiting, group_size):
    m, d = len(waiting) // group_size, waiting.shape[1]
    taken = m * group_size
    return waiting[:taken].reshape(m, group_size, d), waiting[taken:]
"""
EXACT = """
def exact_tokens(n, residual, group_size):
    wait = residual or group_size
    return n % wait, min(n, residual)
"""
BITS = """
def true_bits(bits, group_size):
    return bits + 32 / group_size
"""
BYTES = """
def rounded_cache_bytes(config, n, bits, group_size, residual):
    keys, values = n // residual * residual, max(0, n - residual)
    exact = 2 * min(n, residual)
    numbers = config.n_layers * config.n_kv_heads * config.d_head
    return numbers * ((keys + values) * (bits + 32 / group_size) + exact * 16) / 8
"""
FOLD = """
def fold_into_query(q, scale, minimum):
    return q * scale, (q * minimum).sum()
"""
ANSWERS = dict(zip(EXERCISES, (ROUND, GROUPS, EXACT, BITS, BYTES, FOLD), strict=True))

WRONG = [
    # (exercise, what is replaced in a right answer, by what, what the message must name)
    ("round_keys", ('axis == "channel"', 'axis == "token"'), "the axes are swapped"),
    ("round_keys", ('axis == "channel"', "False"), "channels of a token for both"),
    ("round_keys", ('axis == "channel"', "True"), "tokens of a channel for both"),
    ("round_keys", ("reshape(-1, group_size)", "reshape(len(table), -1)"), "shares one scale"),
    (
        "round_keys",
        ("groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)", "x.amin(), x.amax()"),
        "all numbers share one scale",
    ),
    ("round_keys", ("(2**bits - 1)", "2**bits"), "one step less"),
    (
        "round_keys",
        (
            "codes = torch.round((groups - low) / scale)",
            "scale = (high - low) / 2**bits\n    codes = torch.round((groups - low) / scale).clamp(0, 2**bits - 1)",
        ),
        "ends a step before",
    ),
    (
        "round_keys",
        ("groups.amax(1, keepdim=True)", "groups.amax(1, keepdim=True).clamp(min=0)"),
        "expected|reaches to zero",
    ),
    (
        "round_keys",
        (
            "groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)",
            "groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)",
        ),
        "reaches to zero",
    ),
    (
        "round_keys",
        (
            "low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)",
            "high = groups.abs().amax(1, keepdim=True); low = -high",
        ),
        "evenly around zero",
    ),
    ("round_keys", ("torch.round(", "torch.floor("), "rounded down"),
    ("round_keys", ("codes * scale + low", "codes"), "these are the codes"),
    ("round_keys", ("codes * scale + low", "codes * scale"), "not added again"),
    ("round_keys", ("return rounded.T if turn else rounded", "return rounded"), "shape|expected"),
    (
        "round_keys",
        (
            "reshape(table.shape)\n    return rounded.T if turn else rounded",
            "reshape(x.shape)\n    return rounded",
        ),
        "reshape to the shape of x.T first",
    ),
    (
        "round_keys",
        (
            "codes = torch.round((groups - low) / scale)\n    rounded = (codes * scale + low)",
            "rounded = (torch.round(groups / scale) * scale)",
        ),
        "take it off before dividing",
    ),
    (
        "round_keys",
        (
            "groups = table.reshape(-1, group_size)",
            "groups = table.reshape(len(table), group_size, -1).mT.reshape(-1, group_size)",
        ),
        "expected|do not stand beside",
    ),
    ("full_groups", ("return waiting[:taken]", "return waiting[-taken:]"), "expected|raises"),
    (
        "full_groups",
        ("taken = m * group_size", "r = len(waiting) % group_size; return waiting[r:].reshape(m, -1, d), waiting[:r]"),
        "raises|the oldest go on waiting",
    ),
    (
        "full_groups",
        (
            "taken = m * group_size",
            "r = len(waiting) - m * group_size; return waiting[r:].reshape(m, group_size, d), waiting[:r]",
        ),
        "the oldest go on waiting",
    ),
    (
        "full_groups",
        (
            "taken = m * group_size",
            "waiting = torch.cat((waiting, torch.zeros(-len(waiting) % group_size, d)))\n"
            "    m = len(waiting) // group_size; taken = len(waiting)",
        ),
        "filled up with zeros",
    ),
    ("full_groups", ("len(waiting) // group_size", "min(1, len(waiting) // group_size)"), "only one group"),
    ("full_groups", ("len(waiting) // group_size", "(len(waiting) - 1) // group_size"), "kept back"),
    (
        "full_groups",
        ("return waiting[:taken]", "r = len(waiting) % group_size; return waiting[:-r]"),
        "[:-0] is empty; count from the front",
    ),
    (
        "full_groups",
        (
            "taken = m * group_size",
            "r = len(waiting) % group_size; taken = len(waiting[:-r]); m = taken // group_size\n"
            "    return waiting[:taken].reshape(m, group_size, d), waiting[-r:]",
        ),
        "[:-0] is empty; count from the front",
    ),
    ("full_groups", ("waiting[taken:]", "waiting[:0]"), "is lost"),
    ("full_groups", (", waiting[taken:]", ", waiting"), "they must leave"),
    (
        "full_groups",
        ("reshape(m, group_size, d)", "reshape(group_size, m, d).transpose(0, 1)"),
        "do not stand beside each other",
    ),
    ("full_groups", ("reshape(m, group_size, d)", "reshape(m, group_size, -1)"), "raises RuntimeError"),
    ("exact_tokens", ("n % wait, min(n, residual)", "min(n, residual), n % wait"), "swapped"),
    ("exact_tokens", ("n % wait, min(n, residual)", "n - n % wait, n - min(n, residual)"), "the rounded ones"),
    ("exact_tokens", ("n % wait,", "min(n, residual),"), "once that many wait"),
    ("exact_tokens", ("min(n, residual)", "n % wait"), "it waits for nobody"),
    ("exact_tokens", ("residual or group_size", "group_size"), "as soon as a group is full"),
    ("exact_tokens", ("n % wait,", "((n - 1) % wait + 1 if n else 0),"), "they wait on"),
    ("exact_tokens", ("return n % wait", "return n % residual if residual else 0"), "residual of 0"),
    ("exact_tokens", ("residual or group_size", "residual"), "divides by 0 (ZeroDivisionError)"),
    ("exact_tokens", ("n % wait,", "min(n, residual + n % group_size),"), "do not keep the residual besides"),
    ("exact_tokens", ("min(n, residual)", "residual"), "shorter than the residual"),
    ("true_bits", ("32 /", "16 /"), "a scale and a minimum are kept"),
    ("true_bits", ("32 /", "64 /"), "not 32"),
    ("true_bits", ("32 /", "32 //"), "divide with /, not //"),
    ("true_bits", ("32 / group_size", "32"), "a whole group shares them"),
    ("true_bits", ("bits + 32 / group_size", "bits"), "not counted"),
    ("true_bits", ("32 / group_size", "2 * bits / group_size"), "kept in 16"),
    ("true_bits", ("return bits + 32 / group_size", "return (bits + 32 / group_size) / 8"), "these are bytes"),
    ("true_bits", ("bits + 32 / group_size", "bits * group_size + 32"), "a whole group"),
    ("true_bits", ("32 /", "4 /"), "bytes as bits"),
    ("rounded_cache_bytes", ("n_kv_heads", "n_heads"), "only n_kv_heads heads"),
    ("rounded_cache_bytes", ("config.n_layers * ", ""), "only one layer"),
    ("rounded_cache_bytes", (" / 8", " / 16"), "only one of them"),
    ("rounded_cache_bytes", (" / 8", " / 4"), "counted twice"),
    ("rounded_cache_bytes", ("(bits + 32 / group_size)", "bits"), "scale and minimum of the groups are missing"),
    ("rounded_cache_bytes", ("32 / group_size", "16 / group_size"), "a scale and a minimum are kept"),
    ("rounded_cache_bytes", (" + exact * 16", ""), "exact tokens are missing"),
    (
        "rounded_cache_bytes",
        ("keys, values = n // residual * residual, max(0, n - residual)", "keys = values = n"),
        "in addition to all n",
    ),
    (
        "rounded_cache_bytes",
        ("n // residual * residual", "max(0, n - residual)"),
        "keys are rounded by whole residuals",
    ),
    ("rounded_cache_bytes", ("max(0, n - residual)", "n // residual * residual"), "of values all but the latest"),
    ("rounded_cache_bytes", ("min(n, residual)", "residual"), "shorter than the residual"),
    ("rounded_cache_bytes", ("2 * min(n, residual)", "n % residual + min(n, residual)"), "however many wait now"),
    ("rounded_cache_bytes", ("max(0, n - residual)", "n - residual"), "max(0, n - residual)"),
    (
        "rounded_cache_bytes",
        (
            "max(0, n - residual)\n    exact = 2 * min(n, residual)",
            "n - residual\n    exact = 2 * residual",
        ),
        "and needs room for its own",
    ),
    (
        "rounded_cache_bytes",
        ("    exact = 2 * min(n, residual)", "    keys = values = n; exact = 0"),
        "all n tokens are rounded here",
    ),
    ("rounded_cache_bytes", (" / 8", ""), "these are bits"),
    ("fold_into_query", ("q * scale", "q / scale"), "divided by the scale"),
    ("fold_into_query", ("(q * minimum).sum()", "0.0"), "left out"),
    ("fold_into_query", ("(q * minimum).sum()", "minimum.sum()"), "multiplied with its channel"),
    ("fold_into_query", ("(q * minimum)", "(q * scale * minimum)"), "added after the scale"),
    ("fold_into_query", ("q * scale, (q * minimum).sum()", "q * scale + minimum, 0.0"), "multiplied with codes"),
    ("fold_into_query", ("q * scale,", "q * scale + minimum,"), "into the number alone"),
    ("fold_into_query", (".sum()", ""), "add them up"),
    ("fold_into_query", ("q * scale,", "q,"), "not folded"),
    ("fold_into_query", ("q * scale, (q * minimum).sum()", "(q * minimum).sum(), q * scale"), "swapped"),
]


@pytest.mark.parametrize("name, change, phrase", WRONG)
def test_the_usual_mistakes_are_named(name, change, phrase):
    assert_mistake_is_named(name, ANSWERS[name], change, phrase)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_changed_answers_are_right_before_the_change(name):
    assert getattr(kv.check, name)(learner(ANSWERS[name])).status == "right"


def test_every_exercise_has_at_least_three_wrong_answers():
    assert all(sum(wrong == name for wrong, _, _ in WRONG) >= 3 for name in EXERCISES)


def test_worked_answers_by_hand():
    # 2 bits have 4 values: 0, 1, 2, 3 for a group from 0 to 3, and 10, 12, 14, 16 for one from 10 to 16
    x = torch.tensor([[0.0, 10.0], [3.0, 16.0], [0.4, 12.9], [1.6, 15.1]])
    by_channel = [[0.0, 10.0], [3.0, 16.0], [0.0, 12.0], [2.0, 16.0]]
    assert torch.allclose(solution(NOTEBOOK, "round_keys")(x, 2, "channel", 4), torch.tensor(by_channel))
    assert torch.allclose(solution(NOTEBOOK, "round_keys")(x.T, 2, "token", 4), torch.tensor(by_channel).T)
    assert torch.allclose(solution(NOTEBOOK, "round_keys")(x, 2, "token", 2), x)  # two numbers are the ends of a grid
    groups, rest = solution(NOTEBOOK, "full_groups")(torch.arange(5.0)[:, None], 2)
    assert groups.squeeze().tolist() == [[0, 1], [2, 3]] and rest.tolist() == [[4]]
    assert solution(NOTEBOOK, "exact_tokens")(200, 32, 32) == (8, 32)  # 192 keys and 168 values are rounded
    assert solution(NOTEBOOK, "exact_tokens")(20, 32, 32) == (20, 20)
    assert solution(NOTEBOOK, "true_bits")(4, 32) == 5
    # 1 layer, 1 head of 32: 32 keys and 32 values rounded at 5 bits, 32 + 32 exact at 16
    config = small_config(n_layers=1, n_heads=1, n_kv_heads=1, d_head=32)
    assert solution(NOTEBOOK, "rounded_cache_bytes")(config, 64, 4, 32, 32) == 32 * ((64 + 32) * 5 + 64 * 16) / 8
    folded, number = solution(NOTEBOOK, "fold_into_query")(
        torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0]), torch.tensor([10.0, -1.0])
    )
    assert folded.tolist() == [0.5, 6.0] and number == 8.0


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_is_that_of_the_package(bits, axis):
    """The package rounds scale and minimum to 16 bits, so it may choose the neighboring value where two are near."""
    x = normal(64, 32) + 4 * torch.arange(32)
    off = (solution(NOTEBOOK, "round_keys")(x, bits, axis, 32) - fake_quantize(x, bits, axis)).abs()
    assert off.mean() < 0.3 * (x - fake_quantize(x, bits, axis)).abs().mean() + 0.02
    other = {"channel": "token", "token": "channel"}[axis]
    assert (
        solution(NOTEBOOK, "round_keys")(x, bits, other, 32) - fake_quantize(x, bits, axis)
    ).abs().mean() > off.mean()


@pytest.mark.parametrize("residual", [0, 16, 32])
@pytest.mark.parametrize("n", [5, 16, 33, 64])
def test_counts_and_bytes_are_those_of_the_package(n, residual):
    config = small_config(d_head=16, max_seq_len=64)
    cache = kv.QuantizedCache(config, 4, 16, residual, max_len=n, dtype=torch.float16, device="cpu")
    cache.lengths = [n]
    exact = (n - cache.quantized_keys[0], n - cache.quantized_values[0])
    assert solution(NOTEBOOK, "exact_tokens")(n, residual, 16) == exact
    if residual:
        assert solution(NOTEBOOK, "rounded_cache_bytes")(config, n, 4, 16, residual) == cache.nbytes


def test_folded_scores_are_those_of_a_cache():
    config = small_config(n_layers=1, n_heads=1, n_kv_heads=1, d_head=16)
    cache = kv.QuantizedCache(config, 4, 16, 0, max_len=16, dtype=torch.float32, device="cpu")
    keys, query = normal(1, 1, 16, 16), normal(16, seed=1)
    with cache.step(cache.next_positions(16)) as step:
        step.attend(0, keys, keys, keys)
    part = cache.parts(0).keys
    folded, number = solution(NOTEBOOK, "fold_into_query")(query, part.scale[0, 0].float(), part.minimum[0, 0].float())
    assert torch.allclose(part.codes[0].float() @ folded + number, part.rounded[0] @ query, atol=1e-4)
    assert not torch.allclose(part.codes[0].float() @ query, part.rounded[0] @ query, atol=1e-1)
