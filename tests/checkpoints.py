"""Small Hugging Face checkpoints for the tests, made and saved by `transformers` itself.

Weights are drawn with a standard deviation of 0.1, biases with 1, so that whatever is dropped or misread shows.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
import transformers

import kvcourse as kv
from kvcourse.weights.hf_folder import Folder

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
FAMILIES = sorted(CLASSES)
HAS_BIAS_SWITCH = ("llama", "qwen3")
THETA = 5e5
WINDOW = 16  # tokens, fewer than the text of 96

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def save(folder: Path, family: str, dtype=torch.float32, max_shard_size="5GB", **settings) -> torch.nn.Module:
    """A random model of the family with 2 layers, saved in `folder`. Settings are those of its configuration class."""
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8)
    sizes |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=256, rms_norm_eps=1e-2)
    sizes |= dict(rope_parameters={"rope_type": "default", "rope_theta": THETA})
    if family == "mistral":
        sizes |= dict(sliding_window=None)
    if family == "qwen2":
        del sizes["head_dim"]
    make_config, make_model = CLASSES[family]
    model = make_model(make_config(**(sizes | settings))).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        weight.normal_(mean, 1.0 if name.endswith("bias") else 0.1, generator=generator)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def rope(kind: str, **changes) -> dict:
    return {"rope_type": kind, "rope_theta": THETA} | SCALINGS[kind] | changes


def window(family: str) -> dict:
    """Settings that switch a window on; in Qwen, in the second of two layers."""
    if family == "mistral":
        return {"sliding_window": WINDOW}
    return {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}


def read_folder(path, dtype=torch.float32, device="cpu") -> tuple[kv.ModelConfig, dict[str, torch.Tensor]]:
    """Configuration and state dict of the checkpoint in a folder."""
    folder = Folder(path)
    return folder.config, folder.read(dtype, device)


def load(folder: Path, dtype=torch.float32, **changes) -> kv.Transformer:
    """The checkpoint in kvcourse; `changes` to its configuration are what a wrong reader would have read."""
    config, state = read_folder(folder, dtype, "cpu")
    model = kv.Transformer(replace(config, **changes), "cpu", dtype)
    if changes:
        state = {name: weight for name, weight in state.items() if name in model.state_dict()}
    model.load_state_dict(state)
    return model


def edit_config(folder: Path, **changes) -> dict:
    """Change fields of config.json; a change to None takes the field out."""
    return edit_json(folder / "config.json", **changes)


def edit_json(path: Path, **changes) -> dict:
    content = json.loads(path.read_text()) | changes
    content = {name: value for name, value in content.items() if value is not None}
    path.write_text(json.dumps(content))
    return content
