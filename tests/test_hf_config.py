"""config.json files: real ones by hand, what `transformers` makes of them, and everything that must be refused."""

import pytest
import torch
from checkpoints import CLASSES, FAMILIES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcourse.config import ModelConfig
from kvcourse.rope import LinearScaling, Llama3Scaling, YarnScaling, amplitude, frequencies
from kvcourse.weights.hf_config import FAMILIES as ARCHITECTURES
from kvcourse.weights.hf_config import HARMLESS, NEUTRAL, read_config

WHERE = "folder/config.json"

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-2,
}


def small(family: str = "llama", **changes) -> dict:
    """A complete config.json. A change to None leaves the field out."""
    windows = {"sliding_window": 16} if family == "mistral" else {}
    fields = SMALL | {"model_type": family, "architectures": [ARCHITECTURES[family]]} | windows | changes
    return {name: value for name, value in fields.items() if value is not None}


def read(family: str = "llama", **changes) -> ModelConfig:
    return read_config(small(family, **changes), WHERE)


def refuses(*parts: str, family="llama", **changes):
    with pytest.raises(ValueError) as caught:
        read(family, **changes)
    for part in (WHERE, *parts):
        assert part in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


# --- Real files, as they are on the hub, and what they mean ---

LLAMA_2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM_2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 49152,
}
MISTRAL_1 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN_2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
REAL = {
    "Llama 2": (
        LLAMA_2,
        ModelConfig(32000, 32, 32, 4096, 11008, 32, 128, max_seq_len=4096, rope_theta=1e4, norm_eps=1e-5),
    ),
    "Llama 3.2": (
        LLAMA_3_2,
        ModelConfig(
            vocab_size=128256,
            n_layers=16,
            n_heads=32,
            d_model=2048,
            d_ff=8192,
            n_kv_heads=8,
            d_head=64,
            max_seq_len=131072,
            rope_theta=5e5,
            norm_eps=1e-5,
            tie_embeddings=True,
            rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
        ),
    ),
    "SmolLM2": (
        SMOLLM_2,
        ModelConfig(49152, 30, 9, 576, 1536, 3, 64, 8192, 1e5, norm_eps=1e-5, tie_embeddings=True),
    ),
    "Mistral": (
        MISTRAL_1,
        ModelConfig(32000, 32, 32, 4096, 14336, 8, 128, 32768, 1e4, norm_eps=1e-5, window=4096),
    ),
    "Qwen2": (
        QWEN_2,
        ModelConfig(152064, 28, 28, 3584, 18944, 4, 128, 32768, 1e6, norm_eps=1e-6, qkv_bias=True),
    ),
    "Qwen3": (
        QWEN_3,
        ModelConfig(151936, 28, 16, 1024, 3072, 8, 128, 40960, 1e6, norm_eps=1e-6, tie_embeddings=True, qk_norm=True),
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files(name):
    content, expected = REAL[name]
    assert read_config(content, WHERE) == expected


@pytest.mark.parametrize("name", REAL)
def test_files_that_transformers_writes_from_real_ones_mean_the_same(name):
    """Read by today's `transformers` and written again, with its own spellings, a file reads the same here."""
    content, expected = REAL[name]
    rewritten = CLASSES[content["model_type"]][0].from_dict(dict(content)).to_dict()
    assert "rope_parameters" in rewritten and "rope_theta" not in rewritten
    assert read_config(rewritten, WHERE) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_full_dumps_of_a_configuration_are_understood(family):
    """`to_dict` writes every field there is, with all the base class's."""
    content = CLASSES[family][0](**SMALL).to_dict() | {"architectures": None}
    assert read_config(content, WHERE).vocab_size == 97


# --- Needed fields, and the few that may be absent ---

NEEDED = sorted(SMALL.keys() - {"num_key_value_heads", "head_dim"})


@pytest.mark.parametrize("name", [*NEEDED, "model_type"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_needed_field_that_is_missing_is_named(family, name):
    refuses(f"has no field {name}, which is needed", family=family, **{name: None})
    content = small(family) | {name: None}  # null is no better
    with pytest.raises(ValueError, match=f"has no field {name}"):
        read_config(content, WHERE)


def test_fields_that_real_files_leave_out():
    for family in FAMILIES:
        if family != "llama":
            refuses("has no field num_key_value_heads", family=family, num_key_value_heads=None)
        if family != "qwen3":
            assert read(family, head_dim=None, hidden_size=128).d_head == 16
    refuses("has no field head_dim", family="qwen3", head_dim=None)
    assert read(num_key_value_heads=None).n_kv_heads == 8
    assert read().rope_theta == 10_000.0
    assert read().tie_embeddings is False


def test_heads_of_a_size_of_their_own():
    for family in FAMILIES:
        assert read(family, head_dim=32).d_head == 32


@pytest.mark.parametrize("value", ["64", 64.0, 0, -1, True, [64]])
def test_sizes_must_be_whole_numbers(value):
    refuses("hidden_size", repr(value), hidden_size=value)


@pytest.mark.parametrize("value", ["1e-5", True, float("nan"), float("inf"), -1e-5, 10**309])
def test_numbers_must_be_numbers(value):
    refuses("rms_norm_eps", repr(value)[:70], rms_norm_eps=value)


@pytest.mark.parametrize("value", ["false", 0, 1])
def test_flags_must_be_true_or_false(value):
    refuses("tie_word_embeddings", repr(value), tie_word_embeddings=value)


def test_sizes_that_do_not_fit():
    refuses("n_heads=8 is not a multiple of n_kv_heads=3", num_key_value_heads=3)
    refuses("give d_head", head_dim=None, hidden_size=65)


# --- Which model it is ---


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gemma3_text", "Llama", 3])
def test_another_type_of_model(family):
    refuses(f"says model_type = {family!r}", "only 'llama' or 'mistral' or 'qwen2' or 'qwen3' is", model_type=family)


@pytest.mark.parametrize("names", [["LlamaForSequenceClassification"], ["LlamaModel"], ["MistralForCausalLM"], []])
def test_another_architecture(names):
    if names:
        refuses("architectures", names[0], "LlamaForCausalLM", architectures=names)
    else:
        refuses("architectures", architectures=names)


def test_without_architectures_the_type_decides():
    assert read("qwen2", architectures=None).qkv_bias


def test_content_that_is_no_object():
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_config([1], WHERE)


# --- What changes the computation and is not done here ---


@pytest.mark.parametrize(
    "name, value",
    [
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("pretraining_tp", 2),
        ("num_local_experts", 8),
        ("num_experts", 128),
        ("is_causal", False),
        ("logits_scaling", 8.0),
        ("residual_multiplier", 0.22),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_known_fields_at_other_values(family, name, value):
    refuses(f"says {name} = {value!r}", "not supported", family=family, **{name: value})


def test_known_fields_at_neutral_values():
    for name, values in NEUTRAL.items():
        for value in values:
            assert read(**{name: value}) == read()


@pytest.mark.parametrize("field", ["quantization_config", "quantization"])
def test_quantized_weights(field):
    refuses("quantized weights", "'awq'", "GGUF", **{field: {"quant_method": "awq", "bits": 4}})


def test_code_that_comes_with_the_model():
    refuses("code of its own", auto_map={"AutoModelForCausalLM": "modeling.MyModel"})


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_experts_per_tok", 2),
        ("use_mrope", True),
        ("rope_interleaved", True),
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("query_pre_attn_scalar", 256),
        ("brand_new", 0),
    ],
)
def test_unknown_fields_are_refused_by_name(name, value):
    refuses(f"says {name} = {value!r}", "not understood", "take it out", **{name: value})


def test_unknown_fields_that_say_no():
    for value in (False, "", [], {}):
        assert read(use_something_new=value) == read()
    assert read_config(small() | {"use_something_new": None}, WHERE) == read()


def test_long_values_are_cut_in_messages():
    with pytest.raises(ValueError) as caught:
        read(brand_new=list(range(1000)))
    assert len(str(caught.value)) < 400


def test_harmless_fields_change_nothing():
    assert read_config(dict.fromkeys(HARMLESS, 7) | small(), WHERE) == read()
    assert not HARMLESS & NEUTRAL.keys() and not HARMLESS & SMALL.keys()


@pytest.mark.parametrize(
    "family, name, value",
    [
        ("llama", "sliding_window", 4096),
        ("mistral", "attention_bias", True),
        ("mistral", "layer_types", ["full_attention"] * 2),
        ("qwen2", "attention_bias", True),
        ("qwen2", "mlp_bias", True),
        ("qwen3", "mlp_bias", True),
        ("llama", "use_qk_norm", True),
    ],
)
def test_fields_of_another_family_are_refused(family, name, value):
    refuses(f"says {name} = {value!r}", "not understood", family=family, **{name: value})


# --- Biases ---


def test_biases():
    def biases(config):
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases(read()) == biases(read("mistral")) == biases(read("qwen3")) == (False, False, False)
    assert biases(read(attention_bias=True)) == biases(read("qwen3", attention_bias=True)) == (True, True, False)
    assert biases(read(mlp_bias=True)) == (False, False, True)
    assert biases(read("qwen2")) == (True, False, False)


# --- Windows ---


def test_mistral_has_one_window_for_all_layers():
    assert read("mistral").windows == (16, 16)
    assert read_config(small("mistral") | {"sliding_window": None}, WHERE).windows == (None, None)
    refuses("has no field sliding_window", "null: no window", family="mistral", sliding_window=None)
    refuses("sliding_window = 0", family="mistral", sliding_window=0)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 16},
        {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 0},
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 28},
        {"sliding_window": 16, "use_sliding_window": True, "layer_types": [SLIDING, FULL]},
        {"sliding_window": 16, "use_sliding_window": True, "layer_types": [SLIDING, FULL], "max_window_layers": 1},
        {"use_sliding_window": True, "layer_types": [FULL, FULL]},
    ],
)
def test_windows_of_qwen_are_what_transformers_makes_of_them(family, fields):
    reference = CLASSES[family][0](**(SMALL | fields))
    expected = tuple(reference.sliding_window if kind == SLIDING else None for kind in reference.layer_types)
    assert read(family, **fields).windows == expected


def test_windows_of_qwen_that_make_no_sense():
    on = {"use_sliding_window": True, "sliding_window": 16}
    refuses("has no field max_window_layers", family="qwen2", **on)
    refuses("max_window_layers = -1", family="qwen2", max_window_layers=-1, **on)
    refuses("one entry per layer", family="qwen2", layer_types=[FULL], **on)
    refuses("'chunked_attention' is not supported", family="qwen2", layer_types=[FULL, "chunked_attention"], **on)
    refuses("no sliding_window switched on", family="qwen3", layer_types=[FULL, SLIDING])
    refuses("no sliding_window", family="qwen3", layer_types=[FULL, SLIDING], use_sliding_window=True)


# --- Rotary positions, in each spelling ---

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "default": ({}, None),
    "linear": ({"factor": 2.0}, LinearScaling(2.0)),
    "llama3": (LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 64)),
    "yarn": (YARN, YarnScaling(4.0, 64)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", SCALINGS)
def test_every_spelling_of_a_scaling(family, kind):
    fields, expected = SCALINGS[kind]
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": {"type": kind} | fields},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind} | fields},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, "type": kind} | fields},
        {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5} | fields},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": kind, "rope_theta": 5e5} | fields},
        {"rope_scaling": {"type": kind, "rope_theta": 5e5} | fields},
        {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5} | fields, "rope_scaling": {"type": kind} | fields},
    ]
    for spelling in spellings:
        config = read(family, **spelling)
        assert (config.rope_theta, config.rope_scaling) == (5e5, expected)


def test_no_scaling():
    for spelling in ({}, {"rope_scaling": {}}, {"rope_parameters": {"rope_theta": 1e4}}):
        assert (read(**spelling).rope_theta, read(**spelling).rope_scaling) == (1e4, None)


def test_spellings_that_contradict_each_other():
    refuses("contradicts itself", "1000.0", "2000.0", rope_theta=1e3, rope_parameters={"rope_theta": 2e3})
    two = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"type": "linear", "factor": 4.0}}
    refuses("contradicts itself", "rope_parameters", "rope_scaling", **two)
    two["rope_scaling"] = {"type": "default"}
    refuses("contradicts itself", **two)
    two = {"rope_type": "yarn", "type": "linear"} | YARN
    refuses("rope_scaling.rope_type = 'yarn'", "contradicts type = 'linear'", rope_scaling=two)
    two = {"rope_scaling": {"type": "yarn"} | YARN, "original_max_position_embeddings": 32}
    refuses("rope_scaling.original_max", "64", "contradicts", "32 outside", **two)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "foo", 3, ["yarn"]])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_kinds_of_scaling_are_refused_by_name(kind, key):
    given = {key: kind, "factor": 2.0}
    refuses(f"rope_scaling.{key} = {kind!r}", "not supported", "'llama3' or 'yarn'", rope_scaling=given)


def test_scaling_without_a_kind():
    refuses("has no field rope_scaling.rope_type", "factor", rope_scaling={"factor": 2.0})
    nested = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    refuses("has no field rope_parameters.rope_type", "sliding_attention", rope_parameters=nested)
    refuses("rope_scaling = 'yarn'", "must be an object", rope_scaling="yarn")


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaling_without_a_needed_field(kind):
    fields = {"type": kind} | SCALINGS[kind][0]
    for name in SCALINGS[kind][0]:
        if (kind, name) == ("yarn", "original_max_position_embeddings"):
            continue
        rest = {key: value for key, value in fields.items() if key != name}
        refuses(f"has no field rope_scaling.{name}", rope_scaling=rest)


@pytest.mark.parametrize("kind", SCALINGS)
def test_fields_of_a_scaling_that_are_not_understood(kind):
    fields = {"type": kind} | SCALINGS[kind][0]
    refuses("rope_scaling", "alpha = 1000", rope_scaling=fields | {"alpha": 1000})
    refuses("mrope_section", rope_scaling=fields | {"mrope_section": [16, 24, 24]})
    refuses("partial_rotary_factor = 0.5", rope_scaling=fields | {"partial_rotary_factor": 0.5})
    assert read(rope_scaling=fields | {"partial_rotary_factor": 1.0, "finetuned": True}).rope_theta == 1e4
    if kind != "default":
        for wrong in ("4", True, float("nan"), 0, -2.0):
            refuses("factor", rope_scaling=fields | {"factor": wrong})


def test_yarn():
    def yarn(**changes):
        return read(rope_scaling={"type": "yarn"} | YARN | changes).rope_scaling

    assert yarn(attention_factor=0.7) == YarnScaling(4.0, 64, 0.7)
    assert yarn(beta_fast=16, beta_slow=2, truncate=False) == YarnScaling(4.0, 64, None, 16.0, 2.0, False)
    assert yarn(beta_fast=0, beta_slow=None, mscale=0, mscale_all_dim=0) == YarnScaling(4.0, 64)
    assert yarn(original_max_position_embeddings=None) == YarnScaling(4.0, 256)  # max_position_embeddings
    assert yarn(factor=None, original_max_position_embeddings=32) == YarnScaling(256 / 32, 32)
    assert yarn(mscale=1.0, mscale_all_dim=1.0).amplitude == 1.0
    assert yarn(attention_factor=0.7, mscale=1.0, mscale_all_dim=0.5).amplitude == 0.7
    neither = {"type": "yarn", "factor": None}  # nor a length: nothing to go by
    refuses("has no field rope_scaling.factor", rope_scaling=neither)


number = st.floats(0.1, 8)
ROPES = {
    "default": st.just({}),
    "linear": st.fixed_dictionaries({"factor": st.floats(1, 64)}),
    "llama3": st.fixed_dictionaries(
        {
            "factor": st.floats(1, 64),
            "low_freq_factor": st.floats(0.5, 2),
            "high_freq_factor": st.floats(3, 8),
            "original_max_position_embeddings": st.integers(16, 8192),
        }
    ),
    "yarn": st.fixed_dictionaries(
        {"factor": st.floats(1, 64), "original_max_position_embeddings": st.integers(16, 8192)},
        optional={
            "attention_factor": number,
            "beta_fast": st.floats(9, 64),
            "beta_slow": number,
            "mscale": number,
            "mscale_all_dim": number,
            "truncate": st.booleans(),
        },
    ),
}


@given(
    rope=st.sampled_from(sorted(ROPES)).flatmap(lambda kind: st.tuples(st.just(kind), ROPES[kind])),
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    d_head=st.sampled_from([8, 64, 80, 128]),
    family=st.sampled_from(FAMILIES),
)
@example(
    rope=("yarn", {"factor": 2.0, "original_max_position_embeddings": 16, "beta_slow": 3.0, "truncate": False}),
    theta=1e4,
    d_head=8,
    family="llama",
)
@settings(max_examples=60, deadline=None)
def test_frequencies_are_those_of_transformers(rope, theta, d_head, family):
    """For any setting, not only those of the small models whose logits are compared elsewhere."""
    kind, fields = rope
    content = small(family, head_dim=d_head, rope_parameters={"rope_type": kind, "rope_theta": theta} | fields)
    config = read_config(content, WHERE)
    make_config, make_model = CLASSES[family]
    settings = {name: value for name, value in content.items() if name != "model_type"}
    with torch.device("meta"):
        model = make_model(make_config(**settings)).model
    rotary = type(model.rotary_emb)(model.config)
    got = frequencies(config.d_head, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(got, rotary.inv_freq, rtol=1e-5, atol=0)
    assert amplitude(config.rope_scaling) == pytest.approx(rotary.attention_scaling, rel=1e-9)
