"""The config.json and model.safetensors of a model, as `transformers` and `hf_config` read them."""

import errno
import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvcourse.config import ModelConfig
from kvcourse.rope import LinearScaling, Llama3Scaling, YarnScaling
from kvcourse.weights.hf_config import FAMILIES, read_config
from kvcourse.weights.tensors import finite

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
    fields |= window_fields(config, family)
    if family in ("llama", "qwen3") and config.qkv_bias and config.o_bias:
        fields["attention_bias"] = True
    if family == "llama" and config.mlp_bias:
        fields["mlp_bias"] = True
    if type(config.rope_scaling) in SCALINGS:
        fields["rope_scaling"] = rope_scaling(config.rope_scaling)
    read = read_config(fields, "The config.json to be written")
    if read.windows == config.windows:  # one window for all layers, or the same one for each
        read = replace(read, window=config.window)
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


def window_fields(config: ModelConfig, family: str) -> dict:
    """Mistral has one window for all layers; Qwen2 and Qwen3 have one size of window, in some of the layers."""
    sizes = set(config.windows)
    if family == "mistral" and len(sizes) == 1:
        return {"sliding_window": config.windows[0]}
    if family not in ("qwen2", "qwen3") or sizes == {None}:
        return {"sliding_window": None} if family == "mistral" else {}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    return {"use_sliding_window": True, "sliding_window": max(sizes - {None}), "layer_types": kinds}


def rope_scaling(scaling) -> dict:
    """In the words of config.json."""
    renamed = {"original_max_seq_len": "original_max_position_embeddings"}
    numbers = {renamed.get(name, name): number for name, number in asdict(scaling).items() if number is not None}
    return {"rope_type": SCALINGS[type(scaling)]} | numbers


def hf_name(name: str) -> str:
    """What Hugging Face calls a tensor of `Transformer`."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def as_stored(name: str, weight: Tensor, dtype: torch.dtype, advice: str) -> Tensor:
    """The weight as the file has it: in `dtype`, on the CPU, the same memory where that is so already.

    Raises `ValueError`, which names the weight and ends with `advice`, for numbers that are or become not finite.
    """
    stored = weight.detach().to("cpu", dtype).contiguous()
    if not finite(weight.detach()):
        raise ValueError(f"{name} has numbers that are infinite or not numbers (NaN). {advice}")
    if not finite(stored):
        raise ValueError(
            f"{name} has numbers that {str(dtype).removeprefix('torch.')} cannot hold: the largest is "
            f"{weight.abs().max().item():.4g}, and it ends at {torch.finfo(dtype).max:.6g}. {advice}"
        )
    return stored


def safetensors_file(tensors: dict[str, Tensor]) -> Callable[[Path], None]:
    """What writes model.safetensors, from the memory that the tensors are in."""

    def write(path: Path) -> None:
        try:
            save_file(tensors, path, {"format": "pt"})
        except SafetensorError as error:
            code = re.search(r"os error (\d+)", str(error))
            code = int(code[1]) if code else errno.EIO
            raise OSError(code, os.strerror(code)) from error

    return write
