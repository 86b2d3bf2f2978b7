"""What the metadata of a GGUF file say about a model: a `ModelConfig`, or one error that says why it is not run.

The keys of a model begin with its architecture's name: `llama.block_count` (Llama and Mistral), `qwen2.block_count`.
Meanings and defaults are llama.cpp's: `load_hparams` in src/llama-model.cpp reads the keys, the constructor in
src/llama-context.cpp and `rope_yarn` in ggml's ops.cpp use them, conversion/base.py writes them.
A key that is not understood here and is not switched off is refused: it might change what the model computes.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import reprlib
from dataclasses import replace

import numpy as np

from kvcourse.config import ModelConfig
from kvcourse.rope import LinearScaling, PairScaling, RopeScaling, YarnScaling

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Keys that say nothing about what is computed: who fine-tuned, how Meta's own files were laid out, LayerNorm's epsilon.
IGNORED = ("rope.scaling.finetuned", "tensor_data_layout", "attention.layer_norm_epsilon")

# Keys of features this package lacks are fine when off: 0, False, empty; for these keys, one of the values given.
OFF = {
    "attention.causal": [True],
    "attention.output_scale": [0.0, 1.0],
    "embedding_scale": [0.0, 1.0],
    "logit_scale": [0.0, 1.0],
    "residual_scale": [0.0, 1.0],
}


class Fields:
    """The metadata of one model: `fields.get("block_count")` reads `llama.block_count`, and notes that it was read."""

    def __init__(self, metadata: dict):
        self.metadata, self.seen = metadata, set(IGNORED)
        kind = metadata.get("general.type", "model")
        if kind != "model":
            raise ValueError(f"it holds no model (its general.type is {kind!r}).")
        self.architecture = metadata.get("general.architecture")
        if self.architecture is None:
            raise ValueError("it has no metadata field general.architecture.")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(map(repr, ARCHITECTURES))
            raise ValueError(f"it holds a model of architecture {self.architecture!r}; this package runs {known}.")

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def get(self, name: str, default=None):
        self.seen.add(name)
        value = self.metadata.get(self.key(name), default)
        return as_written(value) if isinstance(value, float) else value

    def given(self, name: str) -> bool:
        return self.key(name) in self.metadata

    def required(self, name: str):
        if not self.given(name):
            raise ValueError(f"it has no metadata field {self.key(name)}, which is needed to run the model.")
        return self.get(name)

    def refuse(self, name: str, because: str):
        raise ValueError(f"it says {self.key(name)} = {reprlib.repr(self.get(name))}, {because}.")

    def refuse_what_was_not_read(self) -> None:
        for key in self.metadata:
            name = key.removeprefix(f"{self.architecture}.")
            if name == key or name in self.seen:
                continue
            value = self.get(name)
            on = any(value) if isinstance(value, list) else bool(value)
            if value not in OFF[name] if name in OFF else on:
                self.refuse(name, "which this package does not support")


def as_written(value: float) -> float:
    """The decimal number that was meant: metadata are float32, and 1e-5 read back is 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def read_config(metadata: dict, tensors: dict, tied: bool, rope_freqs=None) -> ModelConfig:
    """`ModelConfig` of a model. What the format gives a default for may be absent, nothing else.

    `tensors` are looked at for their names and the size of the vocabulary only. `rope_freqs` are the numbers of the
    tensor of that name, if there is one. Raises `ValueError` for another kind of model, a missing field, and every
    field that would make this package compute something else than the file means.
    """
    fields = Fields(metadata)
    if fields.get("expert_count"):
        raise ValueError(f"it is a mixture of {fields.get('expert_count')} experts, which is not supported.")
    if "token_embd.weight" not in tensors:
        raise ValueError("it has no tensor token_embd.weight: the file is not complete.")
    n_heads, context = fields.required("attention.head_count"), fields.required("context_length")
    config = ModelConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),
        n_layers=fields.required("block_count"),
        n_heads=n_heads,
        d_model=fields.required("embedding_length"),
        d_ff=fields.required("feed_forward_length"),
        n_kv_heads=fields.get("attention.head_count_kv", n_heads),
        d_head=fields.get("attention.key_length"),
        max_seq_len=context,
        rope_theta=fields.get("rope.freq_base", 10_000.0),
        norm_eps=fields.required("attention.layer_norm_rms_epsilon"),
        tie_embeddings=tied,
        rope_scaling=read_rope_scaling(fields, context, rope_freqs),
        # No field tells of biases; their tensors are there or not. Those that a family always has are asked for, so
        # that a file without them is found incomplete.
        qkv_bias=fields.architecture == "qwen2" or has(tensors, "attn_q.bias", "attn_k.bias", "attn_v.bias"),
        o_bias=has(tensors, "attn_output.bias"),
        mlp_bias=has(tensors, "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
        qk_norm=fields.architecture == "qwen3",
    )
    # Two sizes of a damaged file that would take for ever, or too much, to lay out before tensors are compared.
    if config.n_layers > len(tensors):
        fields.refuse("block_count", f"but has only {len(tensors)} tensors in all")
    if config.d_model != tensors["token_embd.weight"].shape[0]:
        fields.refuse("embedding_length", f"but its embeddings have {tensors['token_embd.weight'].shape[0]} numbers")
    check_sizes(fields, config)
    fields.refuse_what_was_not_read()
    return config


def has(tensors: dict, *names: str) -> bool:
    """Whether any layer has a tensor of one of these names."""
    return any(name.endswith(names) for name in tensors)


def check_sizes(fields: Fields, config: ModelConfig) -> None:
    """Raise `ValueError` for fields that repeat a size or a default, where they say something else."""
    d_head = config.d_head
    sizes = {"vocab_size": config.vocab_size, "attention.value_length": d_head, "rope.dimension_count": d_head}
    for name, expected in sizes.items():
        if fields.get(name, expected) != expected:
            fields.refuse(name, f"but this package can run it only with {expected}")
    if not math.isclose(fields.get("attention.scale") or d_head**-0.5, d_head**-0.5, rel_tol=1e-6):
        fields.refuse("attention.scale", "but this package can run it only with 1 / sqrt(size of a head)")
    # llama.cpp reads no window for these architectures, and its converter writes none, though some published files
    # carry the unused value of a config.json. Which of the two is meant shows only in texts longer than the window.
    window = fields.get("attention.sliding_window", 0)
    if isinstance(window, list) or 0 < window < config.max_seq_len:
        fields.refuse("attention.sliding_window", "which may or may not be meant for this architecture")


def read_rope_scaling(fields: Fields, context: int, rope_freqs=None) -> RopeScaling | None:
    """The change of rotary frequencies that the `rope.*` fields and the tensor `rope_freqs.weight` ask for.

    How llama.cpp takes the fields: `scaling.type` is linear when absent; with none, nothing is scaled whatever else is
    given; the factor 0 is none; `scale_linear` is an old name of `scaling.factor`. Llama 3.1's bands are no type: the
    converter writes what they do to each pair, `rope_freqs.weight`.
    """
    kind = fields.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        fields.refuse("rope.scaling.type", "a rope scaling this package does not know (it knows none, linear and yarn)")
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear"))
    if kind != "none" and fields.given("rope.scaling.type") and factor is None:
        fields.refuse("rope.scaling.type", "but has no rope.scaling.factor")
    attn_factor = fields.get("rope.scaling.attn_factor") or 1.0  # multiplies cosines and sines, whatever the type
    if attn_factor != 1.0 and kind != "yarn":
        fields.refuse("rope.scaling.attn_factor", "which this package supports in yarn rope scaling only")
    original = fields.get("rope.scaling.original_context_length") or context
    scaling = None
    if kind == "yarn":
        scaling = read_yarn(fields, factor or 1.0, original, attn_factor)
    elif kind == "linear" and factor not in (None, 0.0, 1.0):
        scaling = LinearScaling(factor)
    if rope_freqs is None:
        return scaling
    if scaling is not None:
        raise ValueError(
            f"it asks for two rope scalings at once, {kind} and the tensor rope_freqs.weight: that is not supported."
        )
    return PairScaling(tuple(rope_freqs))


def read_yarn(fields: Fields, factor: float, original: int, attn_factor: float) -> YarnScaling:
    """YaRN. The factor on cosines and sines is where programs differ:

    - llama.cpp multiplies `scaling.attn_factor` by its own 0.1 ln(factor) + 1 (`rope_yarn` puts that in; the
      llama_context constructor sees to it that it comes in once).
    - `scaling.yarn_attn_factor` is what the converter writes for `attention_factor` in a config.json, which *replaces*
      0.1 ln(factor) + 1 (transformers, modeling_rope_utils.py). llama.cpp reads it, and `yarn_beta_fast` and `_slow`,
      for a few other architectures only; here they mean what the converted checkpoint meant by them.
    """
    if (fields.get("rope.scaling.yarn_ext_factor") or 1.0) != 1.0:
        fields.refuse("rope.scaling.yarn_ext_factor", "but this package's yarn can do 1.0 only")
    replacement = fields.get("rope.scaling.yarn_attn_factor") or None
    if replacement and attn_factor != 1.0:
        fields.refuse("rope.scaling.yarn_attn_factor", "and rope.scaling.attn_factor as well: only one can be meant")
    scaling = YarnScaling(
        factor=factor,
        original_max_seq_len=original,
        attention_factor=replacement,
        beta_fast=fields.get("rope.scaling.yarn_beta_fast") or 32.0,
        beta_slow=fields.get("rope.scaling.yarn_beta_slow") or 1.0,
    )
    return scaling if attn_factor == 1.0 else replace(scaling, attention_factor=attn_factor * scaling.amplitude)
