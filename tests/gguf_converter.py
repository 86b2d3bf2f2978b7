"""From a `transformers` model to a GGUF file, as llama.cpp's convert_hf_to_gguf.py does it.

Which keys are written is in its conversion/base.py (`set_gguf_parameters`), which rows are permuted and what goes into
`rope_freqs.weight` in conversion/llama.py, that Qwen's rows are not permuted in conversion/qwen.py. The names of the
tensors are the `gguf` package's.
"""

import math

import gguf
import numpy as np
import torch
import transformers
from gguf_files import permute, write

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
THETA = 5e5


def hugging_face_model(family: str, seed=0, rope=None, **changes):
    """A small random model: weights of standard deviation 0.1, biases of 1, norms around 1.

    `rope` is a rope_scaling dictionary in the spelling that every version of transformers takes.
    """
    name = FAMILIES[family]
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, max_position_embeddings=128)
    heads = dict(num_attention_heads=8, num_key_value_heads=2)
    rest = dict(rms_norm_eps=1e-2, tie_word_embeddings=False, rope_theta=THETA, attn_implementation="sdpa")
    if family == "mistral":
        rest["sliding_window"] = None
    if rope:
        rest["rope_scaling"] = dict(rope)
    config = getattr(transformers, f"{name}Config")(**(sizes | heads | rest | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for key, weight in model.named_parameters():
        mean, deviation = ("norm" in key, 0.1) if key.endswith("weight") else (0.0, 1.0)
        weight.normal_(float(mean), deviation, generator=generator)
    return model


def architecture(model) -> str:
    kind = model.config.model_type
    return "llama" if kind == "mistral" else kind


def fields(model, rope=None) -> dict:
    c, arch = model.config, architecture(model)
    d_head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    given = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.key_length": d_head,
        "attention.value_length": d_head,
        "rope.freq_base": THETA,
    }
    if arch == "llama":
        given |= {"vocab_size": c.vocab_size, "rope.dimension_count": d_head}
    kind = (rope or {}).get("rope_type")
    if kind in ("linear", "yarn"):
        given |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        given["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for theirs, ours in (
            ("attention_factor", "attn_factor"),
            ("beta_fast", "beta_fast"),
            ("beta_slow", "beta_slow"),
        ):
            if theirs in rope:
                given[f"rope.scaling.yarn_{ours}"] = float(rope[theirs])
    return {f"{arch}.{key}": value for key, value in given.items()} | {"general.type": "model"}


def tensors(model, rope=None) -> dict[str, np.ndarray]:
    c, arch = model.config, architecture(model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c.num_hidden_layers)
    result = {}
    for name, weight in model.state_dict().items():
        weight = weight.numpy()
        if arch == "llama" and ".q_proj." in name:
            weight = permute(weight, c.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            weight = permute(weight, c.num_key_value_heads)
        if not (name == "lm_head.weight" and c.tie_word_embeddings):
            result[names.get_name(name, try_suffixes=(".weight", ".bias"))] = weight
    if (rope or {}).get("rope_type") == "llama3":
        result["rope_freqs.weight"] = np.array(pair_divisors(rope, c.head_dim), np.float32)
    return result


def pair_divisors(rope: dict, d_head: int) -> list[float]:
    """By how much each pair's frequency is divided, from the wavelengths (conversion/llama.py)."""
    original, low, high = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    divisors = []
    for i in range(d_head // 2):
        wavelength = 2 * math.pi * THETA ** (2 * i / d_head)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return divisors


def convert(path, model, rope=None, kind="F32", more_fields=(), spoil=None):
    """Write the model. `spoil(tensors)` may change the tensors first, for tests that want a difference."""
    stored = tensors(model, rope)
    if spoil is not None:
        spoil(stored)
    return write(path, fields(model, rope) | dict(more_fields), stored, kind, arch=architecture(model))
