"""Read from a config.json what the memory bill needs: how many weights a model has, and what it keeps of each token.

As in `hf_config`, every field must be accounted for: it is read, or it is in `UNCOUNTED` as one that changes neither
count, or it says no. Files of the families that this package runs are read by `hf_config` itself.

A default is used only for a field that real files leave out, and then it is that of the class in `transformers`.
Source of what each field means: `configuration_*.py` and `modeling_*.py` of `transformers` 5.24.
"""

from kvcourse.shape import Experts, Latent, Shape, as_shape
from kvcourse.weights.fields import NEEDED, Fields
from kvcourse.weights.hf_config import FAMILIES as RUNNABLE
from kvcourse.weights.hf_config import HARMLESS, read_config

# Fields that say how numbers are computed, chosen or stored, not how many there are. The layers that some checkpoints
# bring to guess further tokens (num_nextn_predict_layers) are not part of the model, and not counted.
UNCOUNTED = HARMLESS | frozenset(
    """
    auto_map quantization quantization_config
    hidden_act hidden_activation rms_norm_eps
    original_max_position_embeddings partial_rotary_factor rope_interleave rope_local_base_freq rope_parameters
    rope_scaling rope_theta
    attn_logit_softcapping cache_implementation final_logit_softcapping query_pre_attn_scalar swiglu_alpha swiglu_limit
    aux_loss_alpha ep_size initial_context_length n_group norm_topk_prob num_nextn_predict_layers output_router_logits
    pretraining_tp routed_scaling_factor router_aux_loss_coef router_jitter_noise scoring_func seq_aux topk_group
    topk_method
    """.split()
)


def read_shape(config: dict, where: str) -> Shape:
    """`Shape` of the model that a config.json, given as a dictionary, describes; `where` is what errors call it.

    Raises `ValueError` naming the field (and its value) that is missing, not supported or not understood.
    """
    fields = Fields(config, where)
    if fields.get("model_type") == "gemma3":
        raise fields.refused("model_type", "which sees pictures too: give its text_config, to count the text part.")
    family = fields.one_of("model_type", [*RUNNABLE, *READERS], NEEDED)
    if family in RUNNABLE:
        read = {name: value for name, value in config.items() if name not in UNCOUNTED}
        return as_shape(read_config(read | {"rms_norm_eps": 1.0}, where))  # needed there, and not counted here
    architecture, reader = READERS[family]
    fields.one_of("architectures", [[architecture]])
    shape = reader(fields)
    fields.finish(UNCOUNTED, {})
    return shape


def mixtral(fields: Fields) -> Shape:
    experts = fields.make(
        Experts,
        n=fields.whole("num_local_experts"),
        active=fields.whole("num_experts_per_tok"),
        d_ff=fields.whole("intermediate_size"),
    )
    return make_shape(fields, window=fields.whole("sliding_window", None), experts=experts)


def gemma2(fields: Fields) -> Shape:
    window = fields.whole("sliding_window")
    fields.one_of("sliding_window_size", [window])  # the same again, in the first files
    return make_shape(
        fields,
        window=windows(fields, window, n_local=1),
        d_head=fields.whole("head_dim"),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        **both_biases(fields),
        n_norms=4,
    )


def gemma3_text(fields: Fields) -> Shape:
    """Gemma 3's own files leave out what is the class's default, even sizes."""
    pattern = fields.whole("sliding_window_pattern", 6)
    fields.one_of("_sliding_window_pattern", [pattern])
    return make_shape(
        fields,
        window=windows(fields, fields.whole("sliding_window"), n_local=pattern - 1),
        n_heads=fields.whole("num_attention_heads", 8),
        n_kv_heads=fields.whole("num_key_value_heads", 4),
        d_head=fields.whole("head_dim", 256),
        vocab_size=fields.whole("vocab_size", 262_208),
        max_seq_len=fields.whole("max_position_embeddings", 131_072),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        **both_biases(fields),
        qk_norm=True,
        n_norms=4,
    )


def phi3(fields: Fields) -> Shape:
    return make_shape(fields, window=fields.whole("sliding_window", None))


def deepseek(fields: Fields) -> Shape:
    n_heads = fields.whole("num_attention_heads")
    latent = fields.make(
        Latent,
        d_latent=fields.whole("kv_lora_rank"),
        d_rope=fields.whole("qk_rope_head_dim"),
        d_nope=fields.whole("qk_nope_head_dim"),
        d_value=fields.whole("v_head_dim"),
        d_query=fields.whole("q_lora_rank", None),
    )
    experts = fields.make(
        Experts,
        n=fields.whole("n_routed_experts"),
        active=fields.whole("num_experts_per_tok"),
        d_ff=fields.whole("moe_intermediate_size"),
        shared=fields.whole("n_shared_experts", 0, least=0),
        first_dense=fields.whole("first_k_dense_replace", least=0),
        router_bias=fields.get("model_type") == "deepseek_v3",
    )
    # What follows from the fields above, or is the same in all published files.
    fields.one_of("head_dim", [latent.d_rope])
    fields.one_of("qk_head_dim", [latent.d_nope + latent.d_rope])
    fields.one_of("num_key_value_heads", [n_heads])
    fields.one_of("moe_layer_freq", [1])
    return make_shape(fields, n_kv_heads=n_heads, d_head=latent.d_nope, latent=latent, experts=experts)


def gpt_oss(fields: Fields) -> Shape:
    active, d_ff = fields.whole("num_experts_per_tok"), fields.whole("intermediate_size")
    fields.one_of("experts_per_token", [active])
    n = fields.whole("num_local_experts")
    return make_shape(
        fields,
        window=windows(fields, fields.whole("sliding_window"), n_local=1),
        d_head=fields.whole("head_dim"),
        **both_biases(fields, default=True),
        mlp_bias=True,
        sink_logits=True,
        experts=fields.make(Experts, n=n, active=active, d_ff=d_ff, router_bias=True),
    )


READERS = {
    "mixtral": ("MixtralForCausalLM", mixtral),
    "gemma2": ("Gemma2ForCausalLM", gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", gemma3_text),
    "phi3": ("Phi3ForCausalLM", phi3),
    "deepseek_v2": ("DeepseekV2ForCausalLM", deepseek),
    "deepseek_v3": ("DeepseekV3ForCausalLM", deepseek),
    "gpt_oss": ("GptOssForCausalLM", gpt_oss),
}


def make_shape(fields: Fields, **known) -> Shape:
    """The shape, with the fields of `known` as they are, and the sizes that most families name alike."""
    whole = {
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "d_model": "hidden_size",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_seq_len": "max_position_embeddings",
    }
    known |= {ours: fields.whole(theirs) for ours, theirs in whole.items() if ours not in known}
    if "d_head" not in known:
        known["d_head"] = fields.whole("head_dim", None) or share(fields, known["d_model"], known["n_heads"])
    if "tie_embeddings" not in known:
        known["tie_embeddings"] = fields.flag("tie_word_embeddings")
    return fields.make(Shape, **known)


def share(fields: Fields, d_model: int, n_heads: int) -> int:
    if d_model % n_heads:
        raise fields.error(f"has no head_dim, and hidden_size = {d_model} does not divide into {n_heads} heads.")
    return d_model // n_heads


def both_biases(fields: Fields, default: bool = False) -> dict[str, bool]:
    """The switch of biases on all four projections of attention."""
    bias = fields.flag("attention_bias", default)
    return {"qkv_bias": bias, "o_bias": bias}


def windows(fields: Fields, size: int, n_local: int) -> tuple[int | None, ...]:
    """The window of each layer, as `layer_types` says; without it, `n_local` layers have one, the next has none."""
    n_layers = fields.whole("num_hidden_layers")
    local, full = "sliding_attention", "full_attention"
    kinds = fields.get("layer_types", [full if (i + 1) % (n_local + 1) == 0 else local for i in range(n_layers)])
    if not isinstance(kinds, list) or len(kinds) != n_layers or not all(kind in (local, full) for kind in kinds):
        raise fields.refused("layer_types", f"which must say {local!r} or {full!r} for each of {n_layers} layers.")
    return tuple(size if kind == local else None for kind in kinds)
