"""Small GGUF files for the tests, written with the `gguf` package the way llama.cpp's converter writes them."""

import json
from functools import cache

import gguf
import numpy as np
import tokenizers
import torch

from kvcourse.config import ModelConfig
from kvcourse.model import Transformer
from kvcourse.weights.gguf_file import GGUFModel

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_config(n_heads=8, n_kv_heads=2, **changes) -> ModelConfig:
    sizes = dict(vocab_size=97, n_layers=2, d_model=64, d_ff=96, max_seq_len=128, rope_theta=5e5, norm_eps=1e-2)
    return ModelConfig(n_heads=n_heads, n_kv_heads=n_kv_heads, **(sizes | changes))


def random_state(config: ModelConfig, seed=0) -> dict[str, np.ndarray]:
    """Every parameter of `Transformer(config)`, drawn with a standard deviation of 0.1; norm weights around 1."""
    rng = np.random.default_rng(seed)
    shapes = {name: tuple(p.shape) for name, p in Transformer(config, "cpu", torch.float32).state_dict().items()}
    return {n: rng.normal("norm" in n, 0.1, shape).astype(np.float32) for n, shape in shapes.items()}


def llama_fields(config: ModelConfig) -> dict:
    return {
        "llama.block_count": config.n_layers,
        "llama.context_length": config.max_seq_len,
        "llama.embedding_length": config.d_model,
        "llama.feed_forward_length": config.d_ff,
        "llama.attention.head_count": config.n_heads,
        "llama.attention.head_count_kv": config.n_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": config.rope_theta,
    }


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to q and k (LlamaModel.permute)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def gguf_tensors(config: ModelConfig, state: dict, k_heads: int | None = None) -> dict[str, np.ndarray]:
    """The state dict under the names the `gguf` package gives Hugging Face's, q and k permuted."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.n_layers)
    tensors = {}
    for name, weight in state.items():
        if name.endswith("q_proj.weight"):
            weight = permute(weight, config.n_heads)
        if name.endswith("k_proj.weight"):
            weight = permute(weight, k_heads or config.n_kv_heads)
        hugging_face = name if name.startswith("lm_head") else f"model.{name}"
        tensors[names.get_name(hugging_face, try_suffixes=(".weight",))] = weight
    return tensors


def write(path, fields: dict, tensors: dict, kind="F32", arch="llama", alignment=None):
    """Write a GGUF file. A matrix is stored as `kind`, a vector in F32, a (raw bytes, type name) pair as it is."""
    writer = gguf.GGUFWriter(path, arch)
    if alignment:
        writer.add_custom_alignment(alignment)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in fields.items():
        add.get(type(value), writer.add_array)(key, value)
    for name, weight in tensors.items():
        if isinstance(weight, tuple):
            writer.add_tensor(name, weight[0], raw_dtype=gguf.GGMLQuantizationType[weight[1]])
        elif weight.ndim == 1 or kind == "F32":
            writer.add_tensor(name, weight)
        else:
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(weight, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_gguf(path, dtype=torch.float32, device="cpu") -> tuple[ModelConfig, dict[str, torch.Tensor], dict]:
    """Configuration, state dict and metadata of the model in a file."""
    model = GGUFModel(path)
    return model.config, model.read(dtype, device), model.metadata


def write_model(path, config: ModelConfig, state: dict, kind="F32", **more_fields):
    return write(path, llama_fields(config) | more_fields, gguf_tensors(config, state), kind)


@cache
def trained_bpe() -> tokenizers.Tokenizer:
    """A byte-level BPE with all 256 bytes, three control tokens and a few merges, trained here."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog, then the other one"] * 3, trainer)
    return bpe


def tokenizer_fields(**changes) -> dict:
    """Metadata of the trained tokenizer, as a GGUF file carries it. A change to None leaves the field out."""
    model = json.loads(trained_bpe().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    fields |= {"tokenizer." + name.replace("ggml_", "ggml."): value for name, value in changes.items()}
    return {key: value for key, value in fields.items() if value is not None}
