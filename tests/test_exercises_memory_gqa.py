"""The exercises of notebook 04: worked answers and other right ways pass, the usual mistakes are named."""

import torch
from exercises import shared_tests, solution

import kvcourse as kv

NOTEBOOK = "04_memory_and_gqa"

RIGHT = {
    "cache_size": [
        """
        def cache_size(config, seq_len, batch_size, bits):
            numbers = 2 * config.n_layers * config.n_kv_heads * config.d_head * seq_len * batch_size
            return numbers * bits / 8
        """,
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
            room = memory - kv.weight_bytes(config, weight_bits)
            each = kv.cache_bytes(config, 1, batch_size, cache_bits)
            return max(0, int(room // each))
        """,
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
        """
        def repeat_heads(k, n_heads):
            return torch.repeat_interleave(k, n_heads // k.shape[1], dim=1)
        """,
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
            grouped = q.unflatten(1, (k.shape[1], -1))
            scores = torch.einsum("bhgtd,bhsd->bhgts", grouped, k) / q.shape[-1] ** 0.5
            return torch.einsum("bhgts,bhsd->bhgtd", scores.softmax(-1), v).flatten(1, 2)
        """,
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
        """
        def attend_grouped(q, k, v):  # in float64: twice the bytes, and nothing repeated
            q, k, v = q.double(), k.double(), v.double()
            rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
            return ((rows @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).reshape(q.shape)
        """,
    ],
    "pool_heads": [
        """
        def pool_heads(weight, n_kv_heads, d_head):
            heads = weight.unflatten(0, (n_kv_heads, -1, d_head))
            return heads.mean(dim=1).flatten(0, 1)
        """,
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
APART = """
def pool_heads(weight, n_kv_heads, d_head):
    heads = weight.unflatten(0, (-1, n_kv_heads, d_head))
    return heads.mean(dim=0).flatten(0, 1)
"""

MISTAKES = {
    "cache_size": [
        (("n_kv_heads", "n_heads"), "only the n_kv_heads"),
        (("config.n_kv_heads * config.d_head", "config.d_model"), "d_model is not the width"),
        (("config.d_head", "(config.d_model // config.n_heads)"), "d_head stands in the config"),
        (("2 * config", "config"), "only one of them is counted"),
        ((" / 8", ""), "these are bits"),
        (("numbers * bits / 8", "numbers * (bits // 8)"), "bits // 8 is cut to whole bytes"),
        (("numbers * bits / 8", "numbers * 2"), "those of 16 bits"),
        ((" * config.n_layers", ""), "every layer"),
        ((" * batch_size", ""), "each text of the batch"),
        ((" * config.n_kv_heads", ""), "the KV heads are missing"),
    ],
    "tokens_that_fit": [
        ((" - kv.weight_bytes(config, weight_bits)", ""), "subtract them"),
        (("= memory -", "= 0.9 * memory -"), "taken off already"),
        (("batch_size, cache_bits)\n", "batch_size)\n"), "the cache has bits of its own"),
        (("config, weight_bits)", "config)"), "the weights have bits of their own"),
        (("- kv.weight", "- batch_size * kv.weight"), "not once for each text"),
        (("1, batch_size, cache_bits", "1, 1, cache_bits"), "divide by the batch"),
        (("int(room // each)", "int(room // each) * batch_size"), "those of each text"),
        (("config, weight_bits)", "config, cache_bits)"), "counted with the bits of the cache"),
        (("batch_size, cache_bits)\n", "batch_size, weight_bits)\n"), "bits of the weights"),
        (("max(0, int(room // each))", "int(room // each)"), "0 tokens, not for fewer"),
        (("int(room // each)", "-int(-room // each)"), "round down"),
        (("int(room // each)", "room / each"), "round down to a whole number"),
    ],
    "repeat_heads": [
        (("n_heads // k.shape[1], dim=1", "n_heads, dim=1"), "n_heads // n_kv_heads times"),
        (("dim=1", "dim=2"), "the tokens are repeated"),
        (("dim=1", "dim=-1"), "the numbers inside a head"),
        (
            ("torch.repeat_interleave(k, n_heads // k.shape[1], dim=1)", "k.repeat(1, n_heads // k.shape[1], 1, 1)"),
            "round and round",
        ),
    ],
    "attend_grouped": [
        (TILED, "h // group, not h % n_kv_heads"),
        ((".flatten(1, 2)", ".transpose(1, 2).flatten(1, 2)"), "in another order"),
        ((" / q.shape[-1] ** 0.5", ""), "square root of d_head"),
        (("q.shape[-1] ** 0.5", "q.shape[-1]"), "by its square root"),
        (("softmax(-1)", "softmax(-2)"), "must run over the keys"),
        (BROADCAST, "4 times as large as the keys"),
        (
            BROADCAST.replace("grouped =", "q, k, v = q.double(), k.double(), v.double()\n    grouped ="),
            "a tensor 4 times",
        ),
        (COPIED, "do not repeat keys or values"),
    ],
    "pool_heads": [
        (APART, "stand next to each other"),
        (("heads.mean(dim=1)", "heads.sum(dim=1)"), "added up"),
        (("heads.mean(dim=1)", "heads[:, 0]"), "the first head of each group"),
        (("(n_kv_heads, -1, d_head)", "(n_kv_heads, d_head, -1)"), "in another order"),
        (("heads.mean(dim=1)", "heads.mean(dim=2)"), "numbers within a head"),
        (
            (
                "    return heads.mean(dim=1).flatten(0, 1)",
                "    return weight.unflatten(0, (n_kv_heads * d_head, -1)).mean(1)",
            ),
            "neighboring rows are averaged",
        ),
    ],
}

TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES)


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
