"""Read a Llama checkpoint from a GGUF file: configuration, weights in floating point, metadata.

A GGUF file is one file with everything: sizes and tokenizer as key-value metadata, then the tensors, most of them in
blocks of small integers with a scale. The `gguf` package reads the container and undoes the blocks; this file knows
what the names mean and undoes the one thing that converters do to a Llama model: reordering rows of q and k.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from tqdm.auto import tqdm

from kvcourse.config import ModelConfig


def read_gguf(path, dtype=torch.float32, device="cpu") -> tuple[ModelConfig, dict[str, torch.Tensor], dict]:
    """Configuration, state dict (names and shapes of `Transformer`) and metadata of a Llama model in a GGUF file.

    Tensors are converted one by one, so memory holds one copy in `dtype` and one tensor in float32. Raises `ValueError`
    when the file is damaged, holds another kind of model, or has a tensor too few, too many or of another shape.
    """
    path = Path(path)
    metadata, tensors = open_gguf(path)
    refuse_other_models(metadata, tensors, path.name)
    config = read_config(metadata, tensors, path.name)
    layout = tensor_layout(config)
    check_tensors(tensors, layout, path.name)
    state = {}
    for gguf_name, (name, _) in tqdm(layout.items(), desc=path.name, unit="tensor", delay=5, leave=False):
        weight = dequantize(tensors[gguf_name], path.name)
        if gguf_name.endswith("attn_q.weight"):
            weight = restore_rows(weight, config.n_heads)
        elif gguf_name.endswith("attn_k.weight"):
            weight = restore_rows(weight, config.n_kv_heads)
        state[name] = torch.from_numpy(weight).to(device, dtype)
    return config, state, metadata


class Reader(gguf.GGUFReader):
    """`GGUFReader` on a plain array: slicing a memmap costs several times more, and the vocabulary is read in 10^5
    slices. Should the method's name ever change, only the speed-up is lost."""

    def _get(self, *args, **kwargs):
        self.data = self.data.view(np.ndarray)
        return super()._get(*args, **kwargs)


def open_gguf(path: Path) -> tuple[dict, dict]:
    """Metadata {key: value} and tensors {name: tensor, still in blocks on disk}."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
    try:
        reader = Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"{path} is damaged or was cut short: fetch or copy it again. ({error})") from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


# Fields that change what a model computes, which this package does not do, and the values at which they do not.
NEUTRAL = {
    "attention.causal": [True],
    "attention.clamp_kqv": [0.0],
    "attention.max_alibi_bias": [0.0],
    "attention.output_scale": [0.0, 1.0],
    "attention.scale": [0.0],
    "attention.sliding_window": [0],
    "attention.temperature_scale": [0.0],
    "attn_logit_softcapping": [0.0],
    "embedding_scale": [0.0, 1.0],
    "final_logit_softcapping": [0.0],
    "logit_scale": [0.0, 1.0],
    "residual_scale": [0.0, 1.0],
    "use_parallel_residual": [False],
}


def refuse_other_models(metadata: dict, tensors: dict, file: str) -> None:
    """Raise `ValueError` for what this package would otherwise compute wrongly."""
    architecture = required(metadata, "general.architecture", file)
    if architecture != "llama":
        raise ValueError(f"{file} holds a model of architecture {architecture!r}; this package runs 'llama'.")
    if metadata.get("llama.expert_count", 0):
        raise ValueError(f"{file} is a mixture of {metadata['llama.expert_count']} experts, which is not supported.")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    factors = ("scaling.factor", "scaling.attn_factor", "scale_linear")
    scaled = {metadata.get(f"llama.rope.{key}", 1.0) for key in factors} - {0.0, 1.0}
    if scaling != "none" or scaled or "rope_freqs.weight" in tensors:
        raise ValueError(f"{file} scales its rotary positions (rope scaling), which is not supported.")
    for name, neutral in NEUTRAL.items():
        given = metadata.get(f"llama.{name}", neutral[0])
        if given not in neutral:
            raise ValueError(f"{file} says llama.{name} = {given}, which is not supported.")


def read_config(metadata: dict, tensors: dict, file: str) -> ModelConfig:
    """`ModelConfig` from the `llama.*` metadata; what the format gives a default for may be absent, nothing else."""

    def field(name):
        return required(metadata, f"llama.{name}", file)

    n_heads, d_model = field("attention.head_count"), field("embedding_length")
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{file} has no tensor token_embd.weight: the file is not complete.")
    config = ModelConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),
        n_layers=field("block_count"),
        n_heads=n_heads,
        d_model=d_model,
        d_ff=field("feed_forward_length"),
        n_kv_heads=metadata.get("llama.attention.head_count_kv", n_heads),
        d_head=metadata.get("llama.attention.key_length"),
        max_seq_len=field("context_length"),
        rope_theta=metadata.get("llama.rope.freq_base", 10_000.0),
        norm_eps=as_written(field("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in tensors,
    )
    # These repeat what is known already; a file where they differ is of a kind this package does not run.
    for name, expected in {
        "vocab_size": config.vocab_size,
        "attention.value_length": config.d_head,
        "rope.dimension_count": config.d_head,
    }.items():
        given = metadata.get(f"llama.{name}", expected)
        if given != expected:
            raise ValueError(f"{file} says llama.{name} = {given}; this package can run it only with {expected}.")
    return config


def required(metadata: dict, key: str, file: str):
    if key not in metadata:
        raise ValueError(f"{file} has no metadata field {key}, which is needed to run the model.")
    return metadata[key]


def as_written(value: float) -> float:
    """The decimal number that was meant: metadata are float32, and 1e-5 read back is 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def tensor_layout(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name in the file: (name in `Transformer`, shape)} of all the tensors a model has. Matrices are (out, in)."""
    d, ff, vocab = config.d_model, config.d_ff, config.vocab_size
    q, kv = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    layer = {
        "attn_norm": ("input_layernorm", (d,)),
        "attn_q": ("self_attn.q_proj", (q, d)),
        "attn_k": ("self_attn.k_proj", (kv, d)),
        "attn_v": ("self_attn.v_proj", (kv, d)),
        "attn_output": ("self_attn.o_proj", (d, q)),
        "ffn_norm": ("post_attention_layernorm", (d,)),
        "ffn_gate": ("mlp.gate_proj", (ff, d)),
        "ffn_up": ("mlp.up_proj", (ff, d)),
        "ffn_down": ("mlp.down_proj", (d, ff)),
    }
    layout = {"token_embd.weight": ("embed_tokens.weight", (vocab, d))}
    for i in range(config.n_layers):
        for short, (name, shape) in layer.items():
            layout[f"blk.{i}.{short}.weight"] = (f"layers.{i}.{name}.weight", shape)
    layout["output_norm.weight"] = ("norm.weight", (d,))
    if not config.tie_embeddings:
        layout["output.weight"] = ("lm_head.weight", (vocab, d))
    return layout


def check_tensors(tensors: dict, layout: dict, file: str) -> None:
    missing, extra = sorted(layout.keys() - tensors.keys()), sorted(tensors.keys() - layout.keys())
    for names, what in ((missing, "lacks"), (extra, "has, beyond what a Llama model needs,")):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{file} {what} {len(names)} tensor(s): {', '.join(names[:5])}{more}.")
    for gguf_name, (_, shape) in layout.items():
        found = tuple(reversed(tensors[gguf_name].shape.tolist()))  # a GGUF file lists dimensions innermost first
        if found != shape:
            raise ValueError(f"{file}: tensor {gguf_name} has shape {found}, but the metadata ask for {shape}.")


def dequantize(tensor, file: str) -> np.ndarray:
    """The tensor's values in float32, in memory of their own (float32 tensors would otherwise stay the file itself)."""
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ValueError(f"{file}: tensor {tensor.name} is of type {kind}, which cannot be dequantized.") from error
    return np.require(values, np.float32, ["C", "W"])


def restore_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k matrix `(heads * D, d_model)` back in the order of the original checkpoint.

    Rotary embedding turns pairs of numbers. The original pairs number i of a head with number i + D/2; converters store
    the two rows of a pair side by side. Each matrix must be undone with its own number of heads.
    """
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])  # (heads, D/2, which of the pair, d_model)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
