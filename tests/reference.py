"""The outside reference: `transformers` with the same weights.

Weights are drawn with standard deviation 0.1. With the usual 0.02 a small random model hardly moves when rotary
positions are wrong, and a test would pass for the wrong reason.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvcourse as kv

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


def hugging_face(model: kv.Transformer) -> LlamaForCausalLM:
    """The same model in `transformers`."""
    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.d_head,
        intermediate_size=c.d_ff,
        max_position_embeddings=c.max_seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        rope_theta=c.rope_theta,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tie_embeddings,
        attn_implementation="sdpa",
    )
    reference = LlamaForCausalLM(config).to(model.dtype).eval().requires_grad_(False)
    names = {n if n.startswith("lm_head") else f"model.{n}": w for n, w in model.state_dict().items()}
    result = reference.load_state_dict(names, strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}
    reference.tie_weights()
    return reference


def random_tokens(*shape: int, vocab_size: int = 97, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a.double() - b.double()).abs().max())
