"""What the metadata of a GGUF file say about a model: a `ModelConfig`, or one error that says why it is not run.

The keys of a model begin with its architecture's name: `llama.block_count` (Llama and Mistral), `qwen2.block_count`.
Meanings and defaults are llama.cpp's: `load_hparams` in src/llama-model.cpp reads the keys, the constructor in
src/llama-context.cpp and `rope_yarn` in ggml's ops.cpp use them, conversion/base.py writes them.
A key that is not understood here and is not switched off is refused: it might change what the model computes.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from dataclasses import replace

import numpy as np

from kvcourse.config import ModelConfig
from kvcourse.rope import LinearScaling, PairScaling, RopeScaling, YarnScaling
from kvcourse.weights.fields import NEEDED, Fields

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Keys that say nothing about what is computed: who fine-tuned, how Meta's own files were laid out, LayerNorm's epsilon;
# and one that YaRN alone uses.
HARMLESS = {
    "attention.layer_norm_epsilon",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
}

# Keys of features this package lacks, and the values at which they are off. Any other key is off at 0 (in all layers).
NEUTRAL = {
    "attention.causal": [True],
    "attention.output_scale": [0, 1],
    "embedding_scale": [0, 1],
    "expert_count": [0],
    "logit_scale": [0, 1],
    "residual_scale": [0, 1],
}


def read_config(metadata: dict, tensors: dict, where: str, tied: bool, rope_freqs=None) -> ModelConfig:
    """`ModelConfig` of a model. What the format gives a default for may be absent, nothing else.

    `tensors` are looked at for their names and the size of the vocabulary only. `where` is what error messages call
    the file. `rope_freqs` are the numbers of the tensor of that name, if there is one. Raises `ValueError` for another
    kind of model, a missing field, and every field that would make this package compute something else than the file
    means.
    """
    general = Fields(metadata, where)
    general.one_of("general.type", ["model"])
    architecture = general.one_of("general.architecture", ARCHITECTURES, NEEDED)
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): as_written(value) for key, value in metadata.items() if key.startswith(prefix)}
    fields = Fields(own, where, prefix)
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise fields.error("has no matrix token_embd.weight: the file is not complete.")
    width, vocab_size = table.shape.tolist()  # a GGUF file lists dimensions innermost first
    context = fields.whole("context_length")
    config = fields.make(
        ModelConfig,
        vocab_size=vocab_size,
        n_layers=fields.layers("block_count", len(tensors)),
        n_heads=fields.whole("attention.head_count"),
        d_model=fields.whole("embedding_length"),
        d_ff=fields.whole("feed_forward_length"),
        n_kv_heads=fields.whole("attention.head_count_kv", None),
        d_head=fields.whole("attention.key_length", None),
        max_seq_len=context,
        rope_theta=fields.number("rope.freq_base", 10_000.0),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings=tied,
        rope_scaling=read_rope_scaling(fields, context, rope_freqs),
        # No field tells of biases; their tensors are there or not. Those that a family always has are asked for, so
        # that a file without them is found incomplete.
        qkv_bias=architecture == "qwen2" or has(tensors, "attn_q.bias", "attn_k.bias", "attn_v.bias"),
        o_bias=has(tensors, "attn_output.bias"),
        mlp_bias=has(tensors, "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
        qk_norm=architecture == "qwen3",
    )
    if config.d_model != width:
        raise fields.refused("embedding_length", f"but its embeddings have {width} numbers.")
    check_attention(fields, config)
    repeated = {"vocab_size": [vocab_size]}
    repeated |= dict.fromkeys(("attention.value_length", "rope.dimension_count"), [config.d_head])
    off = {name for name, value in own.items() if not (any(value) if isinstance(value, list) else value)}
    fields.finish(HARMLESS | off, NEUTRAL | repeated)
    return config


def as_written(value):
    """The decimal number that was meant: metadata are float32, and 1e-5 read back is 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def has(tensors: dict, *names: str) -> bool:
    """Whether any layer has a tensor of one of these names."""
    return any(name.endswith(names) for name in tensors)


def check_attention(fields: Fields, config: ModelConfig) -> None:
    """Raise `ValueError` for another scale of scores, or a window that may be meant."""
    usual = config.d_head**-0.5
    if not math.isclose(fields.number("attention.scale", 0.0) or usual, usual, rel_tol=1e-6):
        raise fields.refused("attention.scale", "but this package can do only 1 / sqrt(size of a head).")
    # llama.cpp reads no window for these architectures, and its converter writes none, though some published files
    # carry the unused value of a config.json. Which of the two is meant shows only in texts longer than the window.
    window = fields.get("attention.sliding_window", 0)
    if not isinstance(window, int | float) or 0 < window < config.max_seq_len:
        raise fields.refused("attention.sliding_window", "which may or may not be meant for this architecture.")


def read_rope_scaling(fields: Fields, context: int, rope_freqs=None) -> RopeScaling | None:
    """The change of rotary frequencies that the `rope.*` fields and the tensor `rope_freqs.weight` ask for.

    How llama.cpp takes the fields: `scaling.type` is linear when absent; with none, nothing is scaled whatever else is
    given; the factor 0 is none; `scale_linear` is an old name of `scaling.factor`. Llama 3.1's bands are no type: the
    converter writes what they do to each pair, `rope_freqs.weight`.
    """
    kind = fields.one_of("rope.scaling.type", ("none", "linear", "yarn"))
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", None))
    if kind in ("linear", "yarn") and factor is None:
        raise fields.refused("rope.scaling.type", "but has no rope.scaling.factor.")
    kind = kind or "linear"
    attn_factor = fields.number("rope.scaling.attn_factor", 0.0) or 1.0  # on cosines and sines, whatever the type
    if attn_factor != 1.0 and kind != "yarn":
        raise fields.refused("rope.scaling.attn_factor", "which is supported in yarn rope scaling only.")
    scaling = None
    if kind == "yarn":
        scaling = read_yarn(fields, factor or 1.0, context, attn_factor)
    elif kind == "linear" and factor not in (None, 0.0, 1.0):
        scaling = fields.make(LinearScaling, factor=factor)
    if rope_freqs is None:
        return scaling
    if scaling is not None:
        raise fields.error(f"asks for two rope scalings at once, {kind} and the tensor rope_freqs.weight.")
    return fields.make(PairScaling, divisors=tuple(rope_freqs))


def read_yarn(fields: Fields, factor: float, context: int, attn_factor: float) -> YarnScaling:
    """YaRN. The factor on cosines and sines is where programs differ:

    - llama.cpp multiplies `scaling.attn_factor` by its own 0.1 ln(factor) + 1 (`rope_yarn` puts that in; the
      llama_context constructor sees to it that it comes in once).
    - `scaling.yarn_attn_factor` is what the converter writes for `attention_factor` in a config.json, which *replaces*
      0.1 ln(factor) + 1 (transformers, modeling_rope_utils.py). llama.cpp reads it, and `yarn_beta_fast` and `_slow`,
      for a few other architectures only; here they mean what the converted checkpoint meant by them.
    """
    fields.one_of("rope.scaling.yarn_ext_factor", [1, 0])
    replacement = fields.number("rope.scaling.yarn_attn_factor", 0.0) or None
    if replacement and attn_factor != 1.0:
        raise fields.refused("rope.scaling.yarn_attn_factor", "and an attn_factor too: only one can be meant.")
    scaling = fields.make(
        YarnScaling,
        factor=factor,
        original_max_seq_len=fields.whole("rope.scaling.original_context_length", 0, least=0) or context,
        attention_factor=replacement,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 0.0) or 32.0,
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 0.0) or 1.0,
    )
    return scaling if attn_factor == 1.0 else replace(scaling, attention_factor=attn_factor * scaling.amplitude)
