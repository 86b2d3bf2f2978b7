"""Read the config.json of a Hugging Face checkpoint: sizes, rotary positions, biases, windows.

A config.json is a dictionary for a class of `transformers` that has a default for everything. Reading it leniently is
how models come to run with wrong numbers: a field that is looked for under another name, or not at all, leaves no
trace. So here every field must be accounted for: it is read, or it is listed in `HARMLESS` as one that does not touch
the next token's scores, or it says no (null, false, empty). Anything else is refused by name, with its value: a
learner can look the field up and take it out, but cannot see that logits are wrong.

A default is used only for a field that real files leave out, and then it is that of the class in `transformers`.
Source of what each field means: `configuration_*.py` and `modeling_*.py` of `transformers` 5.24.
"""

import math

from kvcourse.config import ModelConfig
from kvcourse.weights.fields import NEEDED, Fields, short
from kvcourse.weights.hf_rope import read_rope

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Fields that touch training, text, other programs or bookkeeping, but not the scores of the next token.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path dtype
    is_llama_config torch_dtype transformers.js_config transformers_version unsloth_fixed unsloth_version
    attn_implementation chunk_size_feed_forward gradient_checkpointing return_dict torchscript use_bfloat16 use_cache
    attention_dropout classifier_dropout embd_pdrop hidden_dropout initializer_range neftune_noise_alpha resid_pdrop
    max_sequence_length model_max_length seq_length
    bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    finetuning_task id2label label2id num_labels prefix problem_type task_specific_params tokenizer_class
    do_sample early_stopping length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states repetition_penalty temperature top_k top_p typical_p
    diversity_penalty encoder_no_repeat_ngram_size is_decoder
    """.split()
)

# Fields that change what a model computes, in ways this package does not, and the values at which they do not.
NEUTRAL = {
    "attention_multiplier": [1],
    "attn_logit_softcapping": [0],
    "causal": [True],
    "embedding_multiplier": [1],
    "final_logit_softcapping": [0],
    "hidden_act": ["silu", "swish"],
    "is_causal": [True],
    "logit_scale": [1],
    "logits_scaling": [1],
    "num_experts": [0],
    "num_local_experts": [0],
    "partial_rotary_factor": [1],
    "pretraining_tp": [1],
    "residual_multiplier": [1],
    "scale_attn_weights": [True],
    "use_rope": [True],
}


def read_config(config: dict, where: str, n_tensors: float = math.inf) -> ModelConfig:
    """`ModelConfig` of a Llama, Mistral, Qwen2 or Qwen3 checkpoint, from its config.json as a dictionary.

    `where` is what error messages call it; `n_tensors`: how many tensors the checkpoint has in all. Raises
    `ValueError` naming the field (and its value) that is missing, not supported or not understood.
    """
    if not isinstance(config, dict):
        raise ValueError(f"{where} must hold a JSON object (fields with values), not {short(config)}.")
    fields = Fields(config, where)
    family = read_family(fields)
    attention_bias = fields.flag("attention_bias") if family in ("llama", "qwen3") else False
    rope_theta, rope_scaling = read_rope(fields)
    result = fields.make(
        ModelConfig,
        vocab_size=fields.whole("vocab_size"),
        n_layers=fields.layers("num_hidden_layers", n_tensors),
        n_heads=fields.whole("num_attention_heads"),
        d_model=fields.whole("hidden_size"),
        d_ff=fields.whole("intermediate_size"),
        # Some real files leave these out: one key/value head per query head, and heads that share out the width.
        n_kv_heads=fields.whole("num_key_value_heads", None if family == "llama" else NEEDED),
        d_head=fields.whole("head_dim", NEEDED if family == "qwen3" else None),
        max_seq_len=fields.whole("max_position_embeddings"),
        rope_theta=rope_theta,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        rope_scaling=rope_scaling,
        window=read_window(fields, family),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") if family == "llama" else False,
        qk_norm=family == "qwen3",
    )
    fields.finish(HARMLESS, NEUTRAL)
    return result


def read_family(fields: Fields) -> str:
    """The model's type, one of `FAMILIES`; raises `ValueError` for what is another model, or not a plain one."""
    family = fields.one_of("model_type", FAMILIES, NEEDED)
    fields.one_of("architectures", [[FAMILIES[family]]])
    for name in ("quantization_config", "quantization"):
        if fields.get(name):
            raise fields.refused(
                name,
                "but quantized weights in safetensors are not supported. Take the unquantized model, or a GGUF file.",
            )
    if fields.get("auto_map"):
        raise fields.refused("auto_map", "so the model comes with code of its own, which is not run.")
    return family


def read_window(fields: Fields, family: str) -> int | None | tuple[int | None, ...]:
    """`ModelConfig.window`. Mistral has one for all layers; Qwen2 and Qwen3 in some layers, if it is switched on."""
    if family == "llama":
        return None  # a sliding_window that a Llama file has is not asked for, so it is refused
    if family == "mistral":
        if "sliding_window" not in fields.fields:  # the class's default of 4096 is wrong for most Mistral models
            raise fields.error("has no field sliding_window, which is needed to run the model (null: no window).")
        return fields.whole("sliding_window", None)
    size, first, kinds = (fields.get(name) for name in ("sliding_window", "max_window_layers", "layer_types"))
    size = fields.whole("sliding_window", None) if fields.flag("use_sliding_window") else None
    n_layers = fields.whole("num_hidden_layers")
    if kinds is None and size is None:
        return None
    if kinds is None:
        first = fields.whole("max_window_layers", least=0)  # the layers before it see everything
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(n_layers)]
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        raise fields.refused("layer_types", "which must be a list with one entry per layer.")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.refused("layer_types", f"where {short(kind)} is not supported.")
    if "sliding_attention" in kinds and size is None:
        raise fields.error("has layer_types with 'sliding_attention', but no sliding_window switched on.")
    windows = tuple(size if kind == "sliding_attention" else None for kind in kinds)
    return windows[0] if len(set(windows)) == 1 else windows
