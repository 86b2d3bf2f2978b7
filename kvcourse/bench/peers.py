"""The same model in `transformers`: the course's weights in another implementation, to compare answers and speed."""

import importlib.util
from importlib.metadata import version

import torch

from kvcourse.config import ModelConfig
from kvcourse.model import Transformer
from kvcourse.rope import PairScaling, RopeScaling
from kvcourse.weights.hf_write import SCALINGS, rope_scaling

NEEDED = 5  # the first version of transformers whose configurations have `rope_parameters`


def to_transformers(model: Transformer):
    """`model` as a `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` or `Qwen3ForCausalLM`, whichever has
    its features. The weights are shared, not copied: to change one is to change the other.

    Raises `ValueError` when no family has that combination of features or transformers refuses the sizes,
    `RuntimeError` when transformers is missing or older than version 5.
    """
    check_installed()
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    family, extras = find_family(model.config)
    try:
        config = getattr(transformers, f"{family}Config")(**common_settings(model.config), **extras)
    except StrictDataclassError as error:
        raise ValueError(f"transformers refuses this model: {error.__cause__ or error}") from error
    with torch.device("meta"):  # shapes without memory: the weights are put in place
        peer = getattr(transformers, f"{family}ForCausalLM")(config)
    weights = {name if name.startswith("lm_head") else f"model.{name}": w for name, w in model.state_dict().items()}
    if model.config.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    peer.load_state_dict(weights, assign=True)
    peer.tie_weights()
    # The rotary frequencies are no weights: they are worked out again, in float32, where the model is.
    rotary = type(peer.model.rotary_emb)(config).to(model.device)
    if isinstance(model.config.rope_scaling, PairScaling):
        rotary.inv_freq /= torch.tensor(model.config.rope_scaling.divisors, device=model.device)
    peer.model.rotary_emb = rotary
    return peer.eval().requires_grad_(False)


def check_installed() -> None:
    """Raise `RuntimeError` with what to do unless a recent transformers is installed."""
    if importlib.util.find_spec("transformers") is None:
        raise RuntimeError('transformers is not installed: pip install "transformers>=5"')
    found = version("transformers")
    if int(found.split(".")[0]) < NEEDED:
        raise RuntimeError(f'transformers {found} is too old: pip install "transformers>={NEEDED}"')


def find_family(c: ModelConfig) -> tuple[str, dict]:
    """The family that has just these features, and the settings that only its configuration knows."""
    same_window = len(set(c.windows)) == 1
    if c.qk_norm and not c.mlp_bias and c.qkv_bias == c.o_bias:
        return "Qwen3", layer_windows(c) | {"attention_bias": c.qkv_bias}
    if not c.qk_norm and c.qkv_bias and not (c.o_bias or c.mlp_bias):
        return "Qwen2", layer_windows(c)
    if not c.qk_norm and c.qkv_bias == c.o_bias and same_window:
        if c.windows[0] is None:
            return "Llama", {"attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias}
        if not (c.qkv_bias or c.mlp_bias):
            return "Mistral", {"sliding_window": c.windows[0]}
    features = {name: getattr(c, name) for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "window")}
    raise ValueError(f"No family of models in transformers has these features together: {features}.")


def layer_windows(c: ModelConfig) -> dict:
    """Settings for a window in some of the layers; these families have one size of window in all of them."""
    sizes = {window for window in c.windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(f"transformers has one size of window for all layers of a model, not {sorted(sizes)}.")
    types = ["full_attention" if window is None else "sliding_attention" for window in c.windows]
    return {"use_sliding_window": bool(sizes), "sliding_window": max(sizes, default=None), "layer_types": types}


def common_settings(c: ModelConfig) -> dict:
    return dict(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.d_head,
        intermediate_size=c.d_ff,
        max_position_embeddings=c.max_seq_len,
        rope_parameters=rope_parameters(c.rope_scaling) | {"rope_theta": c.rope_theta},
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tie_embeddings,
        attn_implementation="sdpa",
    )


def rope_parameters(scaling: RopeScaling | None) -> dict:
    """Rotary scaling in the words of transformers; `PairScaling` is applied to its frequencies afterwards."""
    return rope_scaling(scaling) if type(scaling) in SCALINGS else {"rope_type": "default"}
