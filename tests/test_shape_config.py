"""What the bill reads from a config.json: every family that `transformers` writes, and everything that is refused."""

import json
from dataclasses import replace

import pytest
from published_configs import CONFIGS, GEMMA_3, hugging_face_config

from kvcourse.config import ModelConfig
from kvcourse.published import PUBLISHED
from kvcourse.shape import Shape
from kvcourse.weights.hf_config import FAMILIES as RUNNABLE
from kvcourse.weights.shape_config import READERS

WHERE = "The config.json given"
EACH_FAMILY = {
    "mixtral": "Mixtral 8x7B",
    "gemma2": "Gemma 2 9B",
    "gemma3_text": "Gemma 3 27B",
    "phi3": "Phi-3 mini",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
    "gpt_oss": "gpt-oss 20B",
}


def changed(name: str, **changes) -> dict:
    """The model's config.json; a change to None leaves the field out."""
    return {field: value for field, value in (CONFIGS[name] | changes).items() if value is not None}


def refuses(name: str, *parts: str, **changes):
    with pytest.raises(ValueError) as caught:
        Shape.from_hf(changed(name, **changes))
    for part in (WHERE, *parts):
        assert part in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_family_is_tested():
    assert set(EACH_FAMILY) == set(READERS)
    assert {config["model_type"] for config in CONFIGS.values()} == set(READERS) | set(RUNNABLE)


@pytest.mark.parametrize("name", [*EACH_FAMILY.values(), "Llama 3.1 8B", "Mistral 7B v0.1", "Qwen2.5 7B", "Qwen3 8B"])
def test_files_that_transformers_writes(name):
    """They spell out every field of the class, in the spelling of its latest version."""
    written = json.loads(hugging_face_config(CONFIGS[name]).to_json_string(use_diff=False))
    assert Shape.from_hf(written) == replace(PUBLISHED[name], source="")


# --- What is given: text, dictionary, file, folder ---


def test_each_way_to_give_it(tmp_path):
    content = CONFIGS["Llama 3.1 8B"]
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    given = [content, json.dumps(content), json.dumps(content, indent=2), tmp_path, str(tmp_path)]
    given += [tmp_path / "config.json", str(tmp_path / "config.json")]
    for source in given:
        assert Shape.from_hf(source) == replace(PUBLISHED["Llama 3.1 8B"], source="")
        config = ModelConfig.from_hf(source)
        assert (config.n_layers, config.n_kv_heads, config.rope_theta) == (32, 8, 500_000.0)
        assert config.rope_scaling.factor == 8.0


@pytest.mark.parametrize("kind", [Shape, ModelConfig])
def test_what_cannot_be_read(kind, tmp_path):
    text = json.dumps(CONFIGS["Llama 3.1 8B"])
    (tmp_path / "cut.json").write_text(text[:-20], encoding="utf-8")
    for source, message in [
        (text[:-20], f"{WHERE} is not JSON"),
        (tmp_path / "cut.json", "cut.json is not JSON"),
        ('{"model_type": "llama", "model_type": "mistral"}', f"{WHERE} has the field 'model_type' twice"),
        ('[{"model_type": "llama"}]', f"{WHERE} must hold a JSON object, but holds a list"),
        ("{}", f"{WHERE} has no field model_type"),
        ({"model_type": "gpt2"}, f"{WHERE} says model_type = 'gpt2', which is not supported"),
        ({"model_type": ["llama"]}, f"{WHERE} says model_type = \\['llama'\\], which is not supported"),
        (None, "Give the text or the path of a config.json, or its dictionary, not NoneType"),
        (5, "not int"),
        ([CONFIGS["Llama 3.1 8B"]], "not list"),
    ]:
        with pytest.raises(ValueError, match=message):
            kind.from_hf(source)
    for source in (tmp_path, tmp_path / "other.json", "Llama 3.1 8B", "", "a" * 5000):
        with pytest.raises(FileNotFoundError, match="There is no file .*: give the path of a config.json"):
            kind.from_hf(source)


def test_what_can_be_counted_but_not_run():
    for name in EACH_FAMILY.values():
        with pytest.raises(ValueError, match=f"model_type = '{CONFIGS[name]['model_type']}', which is not supported"):
            ModelConfig.from_hf(CONFIGS[name])
    quantized = changed("Llama 3.1 8B", quantization_config={"quant_method": "gptq", "bits": 4})
    assert Shape.from_hf(quantized) == replace(PUBLISHED["Llama 3.1 8B"], source="")
    with pytest.raises(ValueError, match="quantization_config"):
        ModelConfig.from_hf(quantized)
    stretched = changed("Llama 3.1 8B", rope_scaling={"type": "dynamic", "factor": 2.0})
    assert Shape.from_hf(stretched) == replace(PUBLISHED["Llama 3.1 8B"], source="")


# --- Fields ---

NEEDED = {
    "mixtral": ["num_local_experts", "num_experts_per_tok", "num_key_value_heads", "vocab_size"],
    "gemma2": ["head_dim", "sliding_window", "num_hidden_layers", "max_position_embeddings"],
    "gemma3_text": ["hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window"],
    "phi3": ["hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"],
    "deepseek_v2": ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "first_k_dense_replace"],
    "deepseek_v3": ["moe_intermediate_size", "qk_nope_head_dim", "num_experts_per_tok", "intermediate_size"],
    "gpt_oss": ["head_dim", "sliding_window", "num_local_experts", "num_key_value_heads"],
}


@pytest.mark.parametrize("family", NEEDED)
def test_a_needed_field_that_is_missing_or_wrong(family):
    for field in NEEDED[family]:
        refuses(EACH_FAMILY[family], f"has no field {field}, which is needed.", **{field: None})
        for wrong in ("8", 2.5, True, -1):
            refuses(EACH_FAMILY[family], f"{field} = {wrong!r}", "whole number", **{field: wrong})


@pytest.mark.parametrize("name", [*EACH_FAMILY.values(), "Llama 3.1 8B", "Qwen3 8B"])
def test_a_field_that_is_not_understood(name):
    refuses(name, "kv_sharing = 2", "not understood", kv_sharing=2)
    refuses(name, "architectures = ['OtherForRewards']", architectures=["OtherForRewards"])
    assert Shape.from_hf(changed(name, kv_sharing=False)) == replace(PUBLISHED[name], source="")


def test_fields_that_change_a_count():
    def read(name, **changes):
        return Shape.from_hf(changed(name, **changes))

    assert read("Mixtral 8x7B", sliding_window=4096).windows == (4096,) * 32
    assert read("Phi-3 mini", sliding_window=None).windows == (None,) * 32
    assert read("Phi-4", tie_word_embeddings=True).tie_embeddings
    assert not read("Gemma 2 9B", tie_word_embeddings=False).tie_embeddings
    assert read("Gemma 2 9B", attention_bias=True).o_bias and not read("gpt-oss 20B", attention_bias=False).qkv_bias
    assert read("Gemma 3 12B", sliding_window_pattern=2).windows == (1024, None) * 24
    full = read("Gemma 3 12B", layer_types=["full_attention"] * 48)
    assert full.windows == (None,) * 48
    assert read("DeepSeek-V2", q_lora_rank=None).latent.d_query is None
    assert read("DeepSeek-V2", n_shared_experts=None).experts.shared == 0
    assert read("gpt-oss 20B", layer_types=None) == read("gpt-oss 20B")  # the class's own pattern


def test_fields_that_contradict_others_or_are_not_supported():
    refuses("Gemma 2 9B", "sliding_window_size = 2048", sliding_window_size=2048)
    refuses("Gemma 3 12B", "use_bidirectional_attention = True", use_bidirectional_attention=True)
    refuses("Phi-4", "attention_bias = True", attention_bias=True)
    refuses("Phi-4", "has no head_dim, and hidden_size = 5121 does not divide into 40 heads", hidden_size=5121)
    refuses("DeepSeek-V2", "moe_layer_freq = 2", moe_layer_freq=2)
    refuses("DeepSeek-V2", "num_key_value_heads = 16", num_key_value_heads=16)
    refuses("DeepSeek-V2", "head_dim = 128", head_dim=128)
    refuses("DeepSeek-V2", "attention_bias = True", attention_bias=True)
    refuses("DeepSeek-V3", "first_dense=62 is more than n_layers=61", first_k_dense_replace=62)
    refuses("Mixtral 8x7B", "active=9 experts cannot be picked from n=8", num_experts_per_tok=9)
    refuses("gpt-oss 20B", "experts_per_token = 2", experts_per_token=2)
    for kinds in ("sliding_attention", ["full_attention"] * 23, ["chunked_attention"] * 24, [["full_attention"]] * 24):
        refuses("gpt-oss 20B", "layer_types", "for each of 24 layers", layer_types=kinds)
    with_pictures = {"model_type": "gemma3", "text_config": GEMMA_3, "vision_config": {}}
    with pytest.raises(ValueError, match="model_type = 'gemma3', which sees pictures too: give its text_config"):
        Shape.from_hf(with_pictures)
