"""The exercises of notebook 09: worked answers and other right ways pass, the usual mistakes are named."""

import pytest
import torch
from exercises import shared_tests, solution
from reference import small_config

import kvcourse as kv
from kvcourse.caches.quantized_store import fake_quantize
from kvcourse.check.framework import normal

NOTEBOOK = "09_cache_quantization"

RIGHT = {
    "round_keys": [
        """
        def round_keys(x, bits, axis, group_size):
            turn = axis == "channel"
            table = x.T if turn else x
            groups = table.reshape(-1, group_size)
            low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
            scale = (high - low) / (2**bits - 1)
            codes = torch.round((groups - low) / scale)
            rounded = (codes * scale + low).reshape(table.shape)
            return rounded.T if turn else rounded
        """,
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
            m, d = len(waiting) // group_size, waiting.shape[1]
            taken = m * group_size
            return waiting[:taken].reshape(m, group_size, d), waiting[taken:]
        """,
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
        """
        def full_groups(waiting, group_size):
            full = len(waiting) // group_size * group_size
            return [waiting[i : i + group_size] for i in range(0, full, group_size)], list(waiting[full:])
        """,
    ],
    "exact_tokens": [
        """
        def exact_tokens(n, residual, group_size):
            wait = residual or group_size
            return n % wait, min(n, residual)
        """,
        """
        def exact_tokens(n, residual, group_size):  # both in one array
            return np.array([n % (residual if residual else group_size), np.minimum(n, residual)])
        """,
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
            return bits + 32 / group_size
        """,
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
            keys, values = n // residual * residual, max(0, n - residual)
            exact = 2 * min(n, residual)
            numbers = config.n_layers * config.n_kv_heads * config.d_head
            return numbers * ((keys + values) * (bits + 32 / group_size) + exact * 16) / 8
        """,
        """
        def rounded_cache_bytes(config, n, bits, group_size, residual):
            each = kv.bits_per_number(bits, group_size, zero_bits=16)
            rounded = n - n % residual + max(0, n - residual)
            tokens = rounded * each + 2 * min(n, residual) * 16
            return config.n_layers * config.n_kv_heads * config.d_head * tokens // 8
        """,
        """
        def rounded_cache_bytes(config, n, bits, group_size, residual):  # token by token
            waiting = keys = values = 0
            for token in range(n):
                waiting += 1
                if waiting == residual:
                    keys, waiting = keys + residual, 0
                values += token >= residual
            held = (keys + values) * (bits + 32 / group_size) + min(n, residual) * (16 + 16)
            return np.float64(held / 8) * config.n_layers * config.n_kv_heads * config.d_head
        """,
    ],
    "fold_into_query": [
        """
        def fold_into_query(q, scale, minimum):
            return q * scale, (q * minimum).sum()
        """,
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


MISTAKES = {
    "round_keys": [
        (('axis == "channel"', 'axis == "token"'), "the axes are swapped"),
        (('axis == "channel"', "False"), "channels of a token for both"),
        (('axis == "channel"', "True"), "tokens of a channel for both"),
        (("reshape(-1, group_size)", "reshape(len(table), -1)"), "shares one scale"),
        (
            ("groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)", "x.amin(), x.amax()"),
            "all numbers share one scale",
        ),
        (("(2**bits - 1)", "2**bits"), "one step less"),
        (
            (
                "codes = torch.round((groups - low) / scale)",
                "scale = (high - low) / 2**bits\n    codes = torch.round((groups - low) / scale).clamp(0, 2**bits - 1)",
            ),
            "ends a step before",
        ),
        (
            ("groups.amax(1, keepdim=True)", "groups.amax(1, keepdim=True).clamp(min=0)"),
            "the upper end of the grid reaches to zero",
        ),
        (
            (
                "groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)",
                "groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)",
            ),
            "reaches to zero",
        ),
        (
            (
                "low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)",
                "high = groups.abs().amax(1, keepdim=True); low = -high",
            ),
            "evenly around zero",
        ),
        (("torch.round(", "torch.floor("), "rounded down"),
        (("codes * scale + low", "codes"), "these are the codes"),
        (("codes * scale + low", "codes * scale"), "not added again"),
        (("return rounded.T if turn else rounded", "return rounded"), "shape|expected"),
        (
            (
                "reshape(table.shape)\n    return rounded.T if turn else rounded",
                "reshape(x.shape)\n    return rounded",
            ),
            "reshape to the shape of x.T first",
        ),
        (
            (
                "codes = torch.round((groups - low) / scale)\n    rounded = (codes * scale + low)",
                "rounded = (torch.round(groups / scale) * scale)",
            ),
            "take it off before dividing",
        ),
        (
            (
                "groups = table.reshape(-1, group_size)",
                "groups = table.reshape(len(table), group_size, -1).mT.reshape(-1, group_size)",
            ),
            "do not come back to their places",
        ),
    ],
    "full_groups": [
        (("return waiting[:taken]", "return waiting[-taken:]"), "some of them go on waiting as well"),
        (
            (
                "taken = m * group_size",
                "r = len(waiting) % group_size; return waiting[r:].reshape(m, -1, d), waiting[:r]",
            ),
            "raises|the oldest go on waiting",
        ),
        (
            (
                "taken = m * group_size",
                "r = len(waiting) - m * group_size; return waiting[r:].reshape(m, group_size, d), waiting[:r]",
            ),
            "the oldest go on waiting",
        ),
        (
            (
                "taken = m * group_size",
                "waiting = torch.cat((waiting, torch.zeros(-len(waiting) % group_size, d)))\n"
                "    m = len(waiting) // group_size; taken = len(waiting)",
            ),
            "filled up with zeros",
        ),
        (("len(waiting) // group_size", "min(1, len(waiting) // group_size)"), "only one group"),
        (("len(waiting) // group_size", "(len(waiting) - 1) // group_size"), "kept back"),
        (
            ("return waiting[:taken]", "r = len(waiting) % group_size; return waiting[:-r]"),
            "[:-0] is empty; count from the front",
        ),
        (
            (
                "taken = m * group_size",
                "r = len(waiting) % group_size; taken = len(waiting[:-r]); m = taken // group_size\n"
                "    return waiting[:taken].reshape(m, group_size, d), waiting[-r:]",
            ),
            "[:-0] is empty; count from the front",
        ),
        (("waiting[taken:]", "waiting[:0]"), "is lost"),
        ((", waiting[taken:]", ", waiting"), "they must leave"),
        (("reshape(m, group_size, d)", "reshape(group_size, m, d).transpose(0, 1)"), "do not stand beside each other"),
        (("reshape(m, group_size, d)", "reshape(m, group_size, -1)"), "raises RuntimeError"),
    ],
    "exact_tokens": [
        (("n % wait, min(n, residual)", "min(n, residual), n % wait"), "swapped"),
        (("n % wait, min(n, residual)", "n - n % wait, n - min(n, residual)"), "the rounded ones"),
        (("n % wait,", "min(n, residual),"), "once that many wait"),
        (("min(n, residual)", "n % wait"), "it waits for nobody"),
        (("residual or group_size", "group_size"), "as soon as a group is full"),
        (("n % wait,", "((n - 1) % wait + 1 if n else 0),"), "they wait on"),
        (("return n % wait", "return n % residual if residual else 0"), "residual of 0"),
        (("residual or group_size", "residual"), "divides by 0 (ZeroDivisionError)"),
        (("n % wait,", "min(n, residual + n % group_size),"), "do not keep the residual besides"),
        (("min(n, residual)", "residual"), "shorter than the residual"),
    ],
    "true_bits": [
        (("32 /", "16 /"), "a scale and a minimum are kept"),
        (("32 /", "64 /"), "not 32"),
        (("32 /", "32 //"), "divide with /, not //"),
        (("32 / group_size", "32"), "a whole group shares them"),
        (("bits + 32 / group_size", "bits"), "not counted"),
        (("32 / group_size", "2 * bits / group_size"), "kept in 16"),
        (("return bits + 32 / group_size", "return (bits + 32 / group_size) / 8"), "these are bytes"),
        (("bits + 32 / group_size", "bits * group_size + 32"), "a whole group"),
        (("32 /", "4 /"), "bytes as bits"),
    ],
    "rounded_cache_bytes": [
        (("n_kv_heads", "n_heads"), "only n_kv_heads heads"),
        (("config.n_layers * ", ""), "only one layer"),
        ((" / 8", " / 16"), "only one of them"),
        ((" / 8", " / 4"), "counted twice"),
        (("(bits + 32 / group_size)", "bits"), "scale and minimum of the groups are missing"),
        (("32 / group_size", "16 / group_size"), "a scale and a minimum are kept"),
        ((" + exact * 16", ""), "exact tokens are missing"),
        (
            ("keys, values = n // residual * residual, max(0, n - residual)", "keys = values = n"),
            "in addition to all n",
        ),
        (("n // residual * residual", "max(0, n - residual)"), "keys are rounded by whole residuals"),
        (("max(0, n - residual)", "n // residual * residual"), "of values all but the latest"),
        (("min(n, residual)", "residual"), "shorter than the residual"),
        (("2 * min(n, residual)", "n % residual + min(n, residual)"), "however many wait now"),
        (("max(0, n - residual)", "n - residual"), "max(0, n - residual)"),
        (
            (
                "max(0, n - residual)\n    exact = 2 * min(n, residual)",
                "n - residual\n    exact = 2 * residual",
            ),
            "and needs room for its own",
        ),
        (("    exact = 2 * min(n, residual)", "    keys = values = n; exact = 0"), "all n tokens are rounded here"),
        ((" / 8", ""), "these are bits"),
    ],
    "fold_into_query": [
        (("q * scale", "q / scale"), "divided by the scale"),
        (("(q * minimum).sum()", "0.0"), "left out"),
        (("(q * minimum).sum()", "minimum.sum()"), "multiplied with its channel"),
        (("(q * minimum)", "(q * scale * minimum)"), "added after the scale"),
        (("q * scale, (q * minimum).sum()", "q * scale + minimum, 0.0"), "multiplied with codes"),
        (("q * scale,", "q * scale + minimum,"), "into the number alone"),
        ((".sum()", ""), "add them up"),
        (("q * scale,", "q,"), "not folded"),
        (("q * scale, (q * minimum).sum()", "(q * minimum).sum(), q * scale"), "swapped"),
    ],
}

TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES)


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
