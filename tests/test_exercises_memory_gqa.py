"""The exercises of notebook 04: worked answers and other right ways pass, the usual mistakes are named."""

import pytest
import torch
from exercises import assert_mistake_is_named, assert_worked_answer_is_right_and_stub_not_attempted, learner

import kvcourse as kv
from kvcourse.notebooks.exercises import solution

NOTEBOOK = "04_memory_and_gqa"
EXERCISES = ["cache_size", "tokens_that_fit", "repeat_heads", "attend_grouped", "pool_heads"]


@pytest.mark.parametrize("name", EXERCISES)
def test_the_worked_answer_is_right_and_the_stub_not_attempted(name):
    assert_worked_answer_is_right_and_stub_not_attempted(NOTEBOOK, name)


RIGHT = {
    "cache_size": [
        """
        def cache_size(config, seq_len, batch_size, bits):
            return kv.cache_bytes(config, seq_len, batch_size, bits)
        """,
        """
        def cache_size(config, seq_len, batch_size, bits):
            keys = torch.empty(batch_size, config.n_kv_heads, seq_len, config.d_head, device="meta")
            return 2 * config.n_layers * keys.numel() * bits // 8
        """,
    ],
    "tokens_that_fit": [
        """
        def tokens_that_fit(config, memory, batch_size, weight_bits, cache_bits):
            options = {"bits": cache_bits, "weight_bits": weight_bits, "usable": 1.0}
            tokens = 0
            while kv.fits(config, memory, tokens + 1, batch_size, **options).fits:
                tokens += 1
            return tokens
        """,
        """
        def tokens_that_fit(config, memory, batch_size, weight_bits, cache_bits):
            room = memory - kv.weight_bytes(config, weight_bits)
            return np.maximum(room, 0) // kv.cache_bytes(config, 1, batch_size, cache_bits)
        """,
    ],
    "repeat_heads": [
        "def repeat_heads(k, n_heads):\n    return k.repeat_interleave(n_heads // k.shape[1], 1)",
        """
        def repeat_heads(k, n_heads):
            group = n_heads // k.shape[1]
            return k[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
        """,
        """
        def repeat_heads(k, n_heads):
            return torch.stack([k[:, h // (n_heads // k.shape[1])] for h in range(n_heads)], dim=1)
        """,
    ],
    "attend_grouped": [
        """
        def attend_grouped(q, k, v):
            rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])  # all queries of a group below each other
            return ((rows @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).reshape(q.shape)
        """,
        """
        def attend_grouped(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        """,
        """
        def attend_grouped(q, k, v):
            group = q.shape[1] // k.shape[1]
            heads = []
            for h in range(q.shape[1]):
                scores = q[:, h] @ k[:, h // group].mT / q.shape[-1] ** 0.5
                heads.append(scores.softmax(-1) @ v[:, h // group])
            return torch.stack(heads, dim=1)
        """,
    ],
    "pool_heads": [
        """
        def pool_heads(weight, n_kv_heads, d_head):
            return weight.view(n_kv_heads, -1, d_head, weight.shape[1]).mean(1).reshape(-1, weight.shape[1])
        """,
        """
        def pool_heads(weight, n_kv_heads, d_head):
            heads = weight.split(d_head)
            group = len(heads) // n_kv_heads
            return torch.cat([sum(heads[i : i + group]) / group for i in range(0, len(heads), group)])
        """,
    ],
}


@pytest.mark.parametrize("name, code", [(name, code) for name, codes in RIGHT.items() for code in codes])
def test_other_right_ways_pass(name, code):
    verdict = getattr(kv.check, name)(learner(code))
    assert (verdict.status, verdict.message) == ("right", "")


SIZE = """
def cache_size(config, seq_len, batch_size, bits):
    numbers = 2 * config.n_layers * config.n_kv_heads * config.d_head * seq_len * batch_size
    return numbers * bits / 8
"""
FIT = """
def tokens_that_fit(config, memory, batch_size, weight_bits, cache_bits):
    room = memory - kv.weight_bytes(config, weight_bits)
    each = kv.cache_bytes(config, 1, batch_size, cache_bits)
    return max(0, int(room // each))
"""
REPEAT = """
def repeat_heads(k, n_heads):
    return torch.repeat_interleave(k, n_heads // k.shape[1], dim=1)
"""
GROUPED = """
def attend_grouped(q, k, v):
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bhgtd,bhsd->bhgts", grouped, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhgts,bhsd->bhgtd", scores.softmax(-1), v).flatten(1, 2)
"""
TILED = """
def attend_grouped(q, k, v):
    grouped = q.unflatten(1, (-1, k.shape[1]))
    scores = torch.einsum("bghtd,bhsd->bghts", grouped, k) / q.shape[-1] ** 0.5
    return torch.einsum("bghts,bhsd->bghtd", scores.softmax(-1), v).flatten(1, 2)
"""
BROADCAST = """
def attend_grouped(q, k, v):
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = grouped @ k[:, :, None].mT / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2)
"""
COPIED = """
def attend_grouped(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
"""
POOL = """
def pool_heads(weight, n_kv_heads, d_head):
    heads = weight.unflatten(0, (n_kv_heads, -1, d_head))
    return heads.mean(dim=1).flatten(0, 1)
"""
APART = """
def pool_heads(weight, n_kv_heads, d_head):
    heads = weight.unflatten(0, (-1, n_kv_heads, d_head))
    return heads.mean(dim=0).flatten(0, 1)
"""

WRONG = [
    # (exercise, a right answer, what is replaced in it by what, what the message must name)
    ("cache_size", SIZE, ("n_kv_heads", "n_heads"), "only the n_kv_heads"),
    ("cache_size", SIZE, ("config.n_kv_heads * config.d_head", "config.d_model"), "d_model is not the width"),
    ("cache_size", SIZE, ("config.d_head", "(config.d_model // config.n_heads)"), "d_head stands in the config"),
    ("cache_size", SIZE, ("2 * config", "config"), "only one of them is counted"),
    ("cache_size", SIZE, (" / 8", ""), "these are bits"),
    ("cache_size", SIZE, ("numbers * bits / 8", "numbers * 2"), "those of 16 bits"),
    ("cache_size", SIZE, (" * config.n_layers", ""), "every layer"),
    ("cache_size", SIZE, (" * batch_size", ""), "each text of the batch"),
    ("cache_size", SIZE, (" * config.n_kv_heads", ""), "the KV heads are missing"),
    ("tokens_that_fit", FIT, (" - kv.weight_bytes(config, weight_bits)", ""), "subtract them"),
    ("tokens_that_fit", FIT, ("= memory -", "= 0.9 * memory -"), "taken off already"),
    ("tokens_that_fit", FIT, ("batch_size, cache_bits)\n", "batch_size)\n"), "the cache has bits of its own"),
    ("tokens_that_fit", FIT, ("config, weight_bits)", "config)"), "the weights have bits of their own"),
    ("tokens_that_fit", FIT, ("- kv.weight", "- batch_size * kv.weight"), "not once for each text"),
    ("tokens_that_fit", FIT, ("1, batch_size, cache_bits", "1, 1, cache_bits"), "divide by the batch"),
    ("tokens_that_fit", FIT, ("int(room // each)", "int(room // each) * batch_size"), "those of each text"),
    ("tokens_that_fit", FIT, ("config, weight_bits)", "config, cache_bits)"), "counted with the bits of the cache"),
    ("tokens_that_fit", FIT, ("batch_size, cache_bits)\n", "batch_size, weight_bits)\n"), "bits of the weights"),
    ("tokens_that_fit", FIT, ("max(0, int(room // each))", "int(room // each)"), "0 tokens, not for fewer"),
    ("tokens_that_fit", FIT, ("int(room // each)", "-int(-room // each)"), "round down"),
    ("tokens_that_fit", FIT, ("int(room // each)", "room / each"), "round down to a whole number"),
    ("repeat_heads", REPEAT, ("n_heads // k.shape[1], dim=1", "n_heads, dim=1"), "n_heads // n_kv_heads times"),
    ("repeat_heads", REPEAT, ("dim=1", "dim=2"), "the tokens are repeated"),
    ("repeat_heads", REPEAT, ("dim=1", "dim=-1"), "the numbers inside a head"),
    (
        "repeat_heads",
        REPEAT,
        ("torch.repeat_interleave(k, n_heads // k.shape[1], dim=1)", "k.repeat(1, n_heads // k.shape[1], 1, 1)"),
        "round and round",
    ),
    ("attend_grouped", TILED, None, "h // group, not h % n_kv_heads"),
    ("attend_grouped", GROUPED, (".flatten(1, 2)", ".transpose(1, 2).flatten(1, 2)"), "in another order"),
    ("attend_grouped", GROUPED, (" / q.shape[-1] ** 0.5", ""), "square root of d_head"),
    ("attend_grouped", GROUPED, ("q.shape[-1] ** 0.5", "q.shape[-1]"), "by its square root"),
    ("attend_grouped", GROUPED, ("softmax(-1)", "softmax(-2)"), "must run over the keys"),
    ("attend_grouped", BROADCAST, None, "4 times as large as the keys"),
    ("attend_grouped", COPIED, None, "do not repeat keys or values"),
    ("pool_heads", APART, None, "stand next to each other"),
    ("pool_heads", POOL, ("heads.mean(dim=1)", "heads.sum(dim=1)"), "added up"),
    ("pool_heads", POOL, ("heads.mean(dim=1)", "heads[:, 0]"), "the first head of each group"),
    ("pool_heads", POOL, ("(n_kv_heads, -1, d_head)", "(n_kv_heads, d_head, -1)"), "expected the shape|whole heads"),
    ("pool_heads", POOL, ("heads.mean(dim=1)", "heads.mean(dim=2)"), "expected the shape"),
    (
        "pool_heads",
        POOL,
        (
            "    return heads.mean(dim=1).flatten(0, 1)",
            "    return weight.unflatten(0, (n_kv_heads * d_head, -1)).mean(1)",
        ),
        "average whole heads",
    ),
]


@pytest.mark.parametrize("name, code, change, phrase", WRONG)
def test_the_usual_mistakes_are_named(name, code, change, phrase):
    assert_mistake_is_named(name, code, change, phrase)


def test_the_changed_answers_are_right_before_the_change():
    answers = {
        "cache_size": SIZE,
        "tokens_that_fit": FIT,
        "repeat_heads": REPEAT,
        "attend_grouped": GROUPED,
        "pool_heads": POOL,
    }
    for name, code in answers.items():
        assert getattr(kv.check, name)(learner(code)).status == "right"


def test_every_exercise_has_at_least_three_wrong_answers():
    assert all(sum(name == wrong for wrong, *_ in WRONG) >= 3 for name in EXERCISES)


def test_cache_size_by_hand():
    """Llama 2 and 3, 70B: 80 layers, 8 KV heads of 128 numbers; 327,680 bytes a token in 16 bits."""
    llama = kv.ModelConfig(128_256, 80, 64, 8192, 28_672, n_kv_heads=8, max_seq_len=131_072)
    assert solution(NOTEBOOK, "cache_size")(llama, 128_000, 1, 16) == 41_943_040_000
    assert solution(NOTEBOOK, "cache_size")(llama, 128_000, 1, 4) == 10_485_760_000


def test_tokens_that_fit_by_hand():
    """Llama 3.1 8B: 16,060,522,496 bytes of weights and 131,072 for each token, in 16 bits."""
    llama = kv.ModelConfig(128_256, 32, 32, 4096, 14_336, n_kv_heads=8, max_seq_len=131_072)
    for memory, texts, tokens in ((21.6e9, 1, 42_262), (21.6e9, 10, 4_226), (14.4e9, 1, 0)):
        assert max(0, int((memory - 16_060_522_496) / (131_072 * texts))) == tokens
        assert solution(NOTEBOOK, "tokens_that_fit")(llama, memory, texts, 16, 16) == tokens


def test_shared_heads_by_hand():
    k = torch.tensor([1.0, 2.0])[None, :, None, None]  # two heads, one token, one number
    assert solution(NOTEBOOK, "repeat_heads")(k, 6).flatten().tolist() == [1, 1, 1, 2, 2, 2]
    weight = torch.tensor([[1.0], [10.0], [3.0], [30.0], [5.0], [50.0], [9.0], [90.0]])  # four heads of two numbers
    assert solution(NOTEBOOK, "pool_heads")(weight, 2, 2).flatten().tolist() == [2, 20, 7, 70]
