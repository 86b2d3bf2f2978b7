"""The config.json of a model, as `transformers` and `hf_config` read it."""

from dataclasses import asdict

import torch

from kvcourse.config import ModelConfig
from kvcourse.rope import LinearScaling, Llama3Scaling, YarnScaling
from kvcourse.weights.hf_config import FAMILIES, read_config

SCALINGS = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}


def hf_config(
    config: ModelConfig,
    dtype: torch.dtype,
    bos_id: int | None = None,
    eos_id: int | None = None,
    family: str | None = None,
) -> dict:
    """The content of config.json. `dtype` is that of the weights; the ids are those of the tokens that begin and end a
    text; `family` is one of `FAMILIES` (None: the one that has the model's features). Raises `ValueError` for a model
    that it cannot describe."""
    family = family or family_of(config)
    fields = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.d_head,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if family == "mistral":
        fields["sliding_window"] = config.window
    if family in ("llama", "qwen3") and config.qkv_bias and config.o_bias:
        fields["attention_bias"] = True
    if config.mlp_bias:
        fields["mlp_bias"] = True
    if type(config.rope_scaling) in SCALINGS:
        fields["rope_scaling"] = rope_scaling(config.rope_scaling)
    read = read_config(fields, "The config.json to be written")
    if read != config:
        names = ", ".join(name for name, value in vars(config).items() if vars(read)[name] != value)
        raise ValueError(f"A {FAMILIES[family]} cannot have what this model has in: {names}.")
    return fields


def family_of(config: ModelConfig) -> str:
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.o_bias:
        return "qwen2"
    return "llama" if config.window is None else "mistral"


def rope_scaling(scaling) -> dict:
    """In the words of config.json."""
    renamed = {"original_max_seq_len": "original_max_position_embeddings"}
    numbers = {renamed.get(name, name): number for name, number in asdict(scaling).items() if number is not None}
    return {"rope_type": SCALINGS[type(scaling)]} | numbers
