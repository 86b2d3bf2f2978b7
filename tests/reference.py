"""The outside reference: `transformers` with the same weights.

Weights are drawn with standard deviation 0.1. With the usual 0.02 a small random model hardly moves when rotary
positions are wrong, and a test would pass for the wrong reason.
"""

import torch

import kvcourse as kv
from kvcourse.bench.peers import to_transformers as hugging_face
from kvcourse.generation import pad

__all__ = ["hugging_face"]

# The shape of SmolLM2-135M, for closed forms that need no weights.
SMOLLM2 = kv.ModelConfig(
    vocab_size=49152,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    d_model=576,
    d_ff=1536,
    max_seq_len=8192,
    tie_embeddings=True,
)

TEXT = 96  # tokens: long enough for a wrong rotary base to show


def small_config(**changes) -> kv.ModelConfig:
    """Two layers, 8 query heads and 2 key/value heads of size 8, 97 tokens."""
    settings = dict(vocab_size=97, d_model=64, n_layers=2, n_heads=8, n_kv_heads=2, d_ff=128, max_seq_len=256)
    return kv.ModelConfig(**{**settings, **changes})


def small_model(config: kv.ModelConfig | None = None, seed: int = 0, dtype=torch.float32) -> kv.Transformer:
    """A random model; norm weights are drawn around 1 so that forgetting them shows too."""
    model = kv.Transformer(config or small_config(), device="cpu", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    return model.to(dtype)


# Changes to `small_config` that bring out each feature of a model which rounding has to respect.
KINDS = {
    "mha": {"n_kv_heads": 8},
    "gqa": {},
    "mqa": {"n_kv_heads": 1},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk_norm": {"qk_norm": True},
    "window": {"window": (16, None)},
    "tied": {"tie_embeddings": True},
    "wide heads": {"d_head": 16},
}


def random_tokens(*shape: int, vocab_size: int = 97, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a.double() - b.double()).abs().max())


def feed(model, cache, rows, chunks):
    """Run rows of tokens through the cache in chunks of the given sizes; return each row's logits, all positions."""
    out, start = [[] for _ in rows], 0
    for size in chunks:
        pieces = [row[start : start + size] for row in rows]
        tokens, positions = pad(pieces, cache.lengths)
        logits = model(tokens, positions, cache)
        for i, piece in enumerate(pieces):
            out[i].append(logits[i, : len(piece)])
        start += size
    return [torch.cat(logits) for logits in out]


def in_chunks(length, size):
    return [min(size, length - start) for start in range(0, length, size)]
