"""Shapes of public models against counts that their makers published, and against `transformers` without memory."""

from dataclasses import fields, replace

import pytest
from published_configs import CONFIGS, hugging_face_config, hugging_face_weights
from reference import SMOLLM2, small_config, small_model

from kvcourse.config import ModelConfig
from kvcourse.cost import parameters
from kvcourse.published import PUBLISHED
from kvcourse.shape import Experts, Latent, Shape, as_shape

SIZES = dict(n_layers=2, n_heads=8, n_kv_heads=2, d_head=8, d_model=64, d_ff=128, vocab_size=97, max_seq_len=256)

# Numbers of weights, from the safetensors files on the hub (their metadata or index) or the model cards.
COUNTS = {
    "Llama 2 7B": 6_738_415_616,
    "Llama 2 70B": 68_976_648_192,
    "Llama 3 8B": 8_030_261_248,
    "Llama 3 70B": 70_553_706_496,
    "Llama 3.1 8B": 8_030_261_248,
    "Llama 3.1 70B": 70_553_706_496,
    "Llama 3.1 405B": 405_853_388_800,
    "Mistral 7B v0.1": 7_241_732_096,
    "Mixtral 8x7B": 46_702_792_704,
    "Gemma 2 9B": 9_241_705_984,
    "Gemma 2 27B": 27_227_128_320,
    "Qwen2.5 7B": 7_615_616_512,
    "Qwen2.5 72B": 72_706_203_648,
    "Qwen3 8B": 8_190_735_360,
    "Qwen3 32B": 32_762_123_264,
    "SmolLM2 135M": 134_515_008,
    "SmolLM2 1.7B": 1_711_376_384,
    "Phi-3 mini": 3_821_079_552,
    "Phi-4": 14_659_507_200,
    "DeepSeek-V2": 235_741_434_880,
    "DeepSeek-V3": 671_026_419_200,  # without the layer that guesses a further token
    "gpt-oss 20B": 20_914_757_184,
    "gpt-oss 120B": 116_829_156_672,
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_counts(name):
    assert parameters(PUBLISHED[name]) == COUNTS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_are_those_of_their_config_files(name):
    assert Shape.from_hf(CONFIGS[name]) == replace(PUBLISHED[name], source="")
    assert PUBLISHED[name].source.startswith("https://huggingface.co/")


@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.startswith("Llama 3 ")])
def test_weights_are_those_of_transformers(name):
    """With few layers, but of each kind: what a layer has, and what stands beside the layers."""
    few = {"num_hidden_layers": 5}
    if "layer_types" in CONFIGS[name]:
        few["layer_types"] = CONFIGS[name]["layer_types"][:5]
    shape = PUBLISHED[name]
    window = shape.window[:5] if isinstance(shape.window, tuple) else shape.window
    expected = sum(hugging_face_weights(hugging_face_config(CONFIGS[name], **few)))
    assert parameters(replace(shape, n_layers=5, window=window)) == expected


@pytest.mark.parametrize("name", ["Gemma 3 12B", "Gemma 3 27B", "gpt-oss 120B", "DeepSeek-V3"])
def test_weights_of_a_whole_model_are_those_of_transformers(name):
    assert parameters(PUBLISHED[name]) == sum(hugging_face_weights(hugging_face_config(CONFIGS[name])))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("DeepSeek-V2", {"q_lora_rank": None, "num_hidden_layers": 3}),  # as in the Lite model
        ("gpt-oss 20B", {"attention_bias": False}),
        ("Gemma 2 9B", {"attention_bias": True, "num_hidden_layers": 3}),
        ("Gemma 3 12B", {"tie_word_embeddings": False, "num_hidden_layers": 3}),
        ("Phi-4", {"head_dim": 64, "num_hidden_layers": 3}),
        ("Llama 3.1 8B", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3}),
    ],
)
def test_weights_of_a_changed_model_are_those_of_transformers(name, changes):
    expected = sum(hugging_face_weights(hugging_face_config(CONFIGS[name], **changes)))
    assert parameters(Shape.from_hf(CONFIGS[name] | changes)) == expected


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen2.5 7B", {"qkv_bias": False}),
        ("Qwen3 8B", {"qk_norm": False}),
        ("SmolLM2 135M", {"tie_embeddings": False}),
        ("Gemma 2 9B", {"n_norms": 2}),
        ("gpt-oss 20B", {"sink_logits": False}),
        ("gpt-oss 20B", {"o_bias": False}),
        ("gpt-oss 20B", {"mlp_bias": False}),
        ("Llama 2 70B", {"n_kv_heads": 64}),
        ("Mixtral 8x7B", {"experts": None}),
        ("DeepSeek-V3", {"latent": None}),
        ("DeepSeek-V3", {"latent": Latent(512, 64, 128, 128)}),
        ("DeepSeek-V3", {"experts": Experts(256, 8, 2048, shared=1, first_dense=3)}),
        ("DeepSeek-V2", {"experts": Experts(160, 6, 1536, shared=1, first_dense=1)}),
        ("DeepSeek-V2", {"experts": Experts(160, 6, 1536, shared=2)}),
    ],
)
def test_every_part_of_a_shape_counts(name, changes):
    assert parameters(replace(PUBLISHED[name], **changes)) != COUNTS[name]


def test_weights_that_a_token_passes_through():
    """As published: Mixtral (arXiv 2401.04088), DeepSeek-V2 (2405.04434) and V3 (2412.19437), gpt-oss (2508.10925)."""
    for name, billions in [("Mixtral 8x7B", 13), ("DeepSeek-V2", 21), ("DeepSeek-V3", 37)]:
        assert round(parameters(PUBLISHED[name], active_only=True) / 1e9) == billions
    for name, billions in [("gpt-oss 20B", 3.61), ("gpt-oss 120B", 5.13)]:
        assert round(parameters(PUBLISHED[name], active_only=True) / 1e9, 2) == billions
    dense, tied = PUBLISHED["Llama 2 7B"], PUBLISHED["SmolLM2 135M"]
    assert parameters(dense, active_only=True) == COUNTS["Llama 2 7B"] - 32_000 * 4096
    assert parameters(tied, active_only=True) == COUNTS["SmolLM2 135M"]


@pytest.mark.parametrize(
    "config",
    [SMOLLM2, small_config(window=(8, None), qkv_bias=True, qk_norm=True), small_config(mlp_bias=True, o_bias=True)],
)
def test_the_shape_of_a_model_of_this_package(config):
    shape = as_shape(config)
    assert parameters(shape) == parameters(config)
    assert shape.windows == config.windows
    shared = {f.name for f in fields(Shape)} & {f.name for f in fields(ModelConfig)}
    assert len(shared) == 14
    for name in shared:
        assert getattr(shape, name) == getattr(config, name)
    assert as_shape(shape) is shape


def test_what_is_no_shape():
    for given in (small_model(), "Llama 3.1 8B", None, 5):
        with pytest.raises(
            ValueError, match=f"shape must be a Shape, .*, or a ModelConfig, .*; got {type(given).__name__}"
        ):
            as_shape(given)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_sizes_must_be_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        Shape(**SIZES | {name: value})


def test_other_bad_shapes():
    for changes, message in [
        (dict(n_kv_heads=3), "n_heads=8 is not a multiple of n_kv_heads=3"),
        (dict(window=0), "window=0"),
        (dict(window=(8, None, 8)), "window has 3 entries, but there are n_layers=2"),
        (dict(qk_norm=1), "qk_norm=1 must be True or False"),
        (dict(n_norms=0), "n_norms=0"),
        (dict(latent=512), "latent=512 must be None or Latent"),
        (dict(latent=Latent(512, 64, 128, 128), qkv_bias=True), "qkv_bias=True is not counted beside a latent"),
        (dict(latent=Latent(512, 64, 128, 128), qk_norm=True), "qk_norm=True is not counted beside a latent"),
        (dict(source=None), "source=None must be a text"),
        (dict(experts=8), "experts=8 must be None or Experts"),
        (dict(experts=Experts(8, 2, 16, first_dense=3)), "first_dense=3 is more than n_layers=2"),
    ]:
        with pytest.raises(ValueError, match=message):
            Shape(**SIZES | changes)
    for make, message in [
        (lambda: Experts(8, 9, 16), "active=9 experts cannot be picked from n=8"),
        (lambda: Experts(8, 0, 16), "active=0"),
        (lambda: Experts(8, 2, 16, shared=-1), "shared=-1"),
        (lambda: Experts(8, 2, 16, router_bias=1), "router_bias=1"),
        (lambda: Latent(0, 64, 128, 128), "d_latent=0"),
        (lambda: Latent(512, 64, 128, 128, 0.5), "d_query=0.5"),
        (lambda: Latent(512, 63, 128, 128), "d_rope=63 is odd"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_windows():
    assert Shape(**SIZES).windows == (None, None)
    assert Shape(**SIZES, window=4).windows == (4, 4)
    assert Shape(**SIZES, window=[4, None]).windows == (4, None)
    gemma = PUBLISHED["Gemma 3 27B"].windows
    assert len(gemma) == 62 and gemma.count(None) == 10  # 5 local layers, then a global one; the paper's figure of 1:5
    assert gemma[:7] == (1024, 1024, 1024, 1024, 1024, None, 1024)
    assert PUBLISHED["Gemma 2 9B"].windows == (4096, None) * 21
    assert PUBLISHED["gpt-oss 20B"].windows == (128, None) * 12
