"""Rope scaling as GGUF files hold it: fields for linear and YaRN, a tensor for Llama 3's bands. Against `transformers`
and, where llama.cpp has a meaning of its own, its formula."""

import math

import numpy as np
import pytest
import torch
from gguf_converter import convert, hugging_face_model, pair_divisors
from gguf_files import gguf_tensors, llama_fields, random_state, read_gguf, tiny_config, write, write_model
from reference import TEXT, largest_difference, random_tokens

from kvcourse.model import Transformer
from kvcourse.rope import LinearScaling, Llama3Scaling, PairScaling, YarnScaling, amplitude, frequencies

LINEAR = dict(rope_type="linear", factor=4.0)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
# Betas that leave pairs on both sides of the blend and inside it.
YARN_GIVEN = YARN | dict(attention_factor=1.5, beta_fast=3.0, beta_slow=0.5, original_max_position_embeddings=48)
HEAD = dict(head_dim=32, num_attention_heads=4)

SCALINGS = {"linear": LINEAR, "llama3": LLAMA3, "yarn": YARN, "yarn with every field": YARN_GIVEN}
CASES = [
    (family, name)
    for family in ("llama", "mistral", "qwen2", "qwen3")
    for name in SCALINGS
    if not (name == "llama3" and family in ("qwen2", "qwen3"))  # the converter writes rope_freqs for llama only
]


def sizes(family: str) -> dict:
    return dict(hidden_size=128, num_attention_heads=4) if family == "qwen2" else HEAD


def logits(path, tokens):
    config, state, _ = read_gguf(path)
    model = Transformer(config, "cpu", torch.float32)
    model.load_state_dict(state)
    return model(tokens)


@pytest.mark.parametrize("family, scaling", CASES)
def test_logits_are_those_of_transformers(tmp_path, family, scaling):
    """And the same file without its scaling gives others, so that the comparison means something."""
    rope, tokens = SCALINGS[scaling], random_tokens(1, TEXT)
    model = hugging_face_model(family, rope=rope, **sizes(family))
    expected = model(tokens).logits
    assert largest_difference(logits(convert(tmp_path / "m.gguf", model, rope), tokens), expected) < 1e-4
    assert largest_difference(logits(convert(tmp_path / "n.gguf", model), tokens), expected) > 1e-2


@pytest.mark.parametrize("lost", ["attention_factor", "beta_fast", "beta_slow"])
def test_each_field_of_yarn_is_used(tmp_path, lost):
    tokens = random_tokens(1, TEXT)
    model = hugging_face_model("llama", rope=YARN_GIVEN, **HEAD)
    rope = {key: value for key, value in YARN_GIVEN.items() if key != lost}
    assert largest_difference(logits(convert(tmp_path / "m.gguf", model, rope), tokens), model(tokens).logits) > 1e-3


def test_llama_3_bands_of_the_published_models():
    """Head size 64, factor 32, original context 8192: 15 of the 32 pairs keep their frequency, 14 turn 32 times more
    slowly, 3 are in between. What a converter puts into rope_freqs is what the formula says."""
    rope = LLAMA3 | dict(factor=32.0, original_max_position_embeddings=8192)
    divisors = np.array(pair_divisors(rope, 64))
    assert [(divisors == 1).sum(), (divisors == 32).sum()] == [15, 14]
    through_file = frequencies(64, 5e5, PairScaling(tuple(divisors)))
    formula = frequencies(64, 5e5, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    torch.testing.assert_close(through_file, formula, rtol=1e-5, atol=0)


def read_scaling(tmp_path, tensors=(), **fields):
    """What a file with these `rope.` fields is read as; `__` stands for a dot. Four pairs, a context of 128."""
    config = tiny_config(tie_embeddings=True)
    given = {f"llama.rope.{key.replace('__', '.')}": value for key, value in fields.items()}
    stored = gguf_tensors(config, random_state(config)) | dict(tensors)
    return read_gguf(write(tmp_path / "m.gguf", llama_fields(config) | given, stored))[0].rope_scaling


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, None),
        (dict(scaling__type="none"), None),
        (dict(scaling__type="none", scaling__factor=4.0), None),  # llama.cpp: "never scale if scaling type is none"
        (dict(scaling__factor=1.0), None),
        (dict(scaling__factor=0.0), None),
        (dict(scaling__type="linear", scaling__factor=4.0), LinearScaling(4.0)),
        (dict(scaling__factor=4.0), LinearScaling(4.0)),
        (dict(scale_linear=2.5), LinearScaling(2.5)),
        (dict(scale_linear=2.0, scaling__factor=4.0), LinearScaling(4.0)),
        (dict(scaling__factor=4.0, scaling__finetuned=True, scaling__attn_factor=1.0), LinearScaling(4.0)),
        (dict(scaling__type="yarn", scaling__factor=4.0), YarnScaling(4.0, 128)),
        (
            dict(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=32),
            YarnScaling(4.0, 32),
        ),
        (
            dict(
                scaling__type="yarn",
                scaling__factor=4.0,
                scaling__yarn_ext_factor=1.0,
                scaling__yarn_attn_factor=1.1,
                scaling__yarn_beta_fast=16.0,
                scaling__yarn_beta_slow=2.0,
                scaling__yarn_log_multiplier=0.0,
            ),
            YarnScaling(4.0, 128, attention_factor=1.1, beta_fast=16.0, beta_slow=2.0),
        ),
    ],
)
def test_what_the_fields_mean(tmp_path, fields, expected):
    assert read_scaling(tmp_path, **fields) == expected


def test_attn_factor_comes_on_top_of_yarns_own(tmp_path):
    """llama.cpp multiplies `attn_factor` by 0.1 ln(factor) + 1; `yarn_attn_factor` stands in its place."""
    yarn = dict(scaling__type="yarn", scaling__factor=4.0)
    own = 0.1 * math.log(4.0) + 1
    assert amplitude(read_scaling(tmp_path, **yarn)) == pytest.approx(own)
    assert amplitude(read_scaling(tmp_path, **yarn, scaling__attn_factor=0.5)) == pytest.approx(0.5 * own)
    assert amplitude(read_scaling(tmp_path, **yarn, scaling__yarn_attn_factor=0.5)) == pytest.approx(0.5)


def test_rope_freqs_are_divisors(tmp_path):
    divisors = np.array([1.0, 1.5, 4.0, 8.0], np.float32)
    assert read_scaling(tmp_path, {"rope_freqs.weight": divisors}) == PairScaling((1.0, 1.5, 4.0, 8.0))
    config = tiny_config()
    given = read_gguf(write_model(tmp_path / "n.gguf", config, random_state(config)))[0]
    assert given.rope_scaling is None


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(scaling__type="foo", scaling__factor=2.0), "llama.rope.scaling.type = 'foo', which is not supported"),
        (dict(scaling__type="longrope"), "llama.rope.scaling.type = 'longrope'"),
        (dict(scaling__type="yarn"), "llama.rope.scaling.type = 'yarn', but has no rope.scaling.factor"),
        (dict(scaling__type="linear"), "llama.rope.scaling.type = 'linear', but has no rope.scaling.factor"),
        (dict(scaling__attn_factor=2.0), "llama.rope.scaling.attn_factor = 2.0"),
        (dict(scaling__type="linear", scaling__factor=2.0, scaling__attn_factor=2.0), "scaling.attn_factor = 2.0"),
        (dict(scaling__type="yarn", scaling__factor=2.0, scaling__yarn_ext_factor=0.5), "yarn_ext_factor = 0.5"),
        (
            dict(scaling__type="yarn", scaling__factor=2.0, scaling__yarn_log_multiplier=0.1),
            "yarn_log_multiplier = 0.1",
        ),
        (
            dict(scaling__type="yarn", scaling__factor=2.0, scaling__attn_factor=0.5, scaling__yarn_attn_factor=0.5),
            "only one can be meant",
        ),
        (dict(scaling__yarn_beta_fast=8.0), "llama.rope.scaling.yarn_beta_fast = 8.0"),
        (dict(scaling__alpha=1000.0), "llama.rope.scaling.alpha = 1000.0"),
        (dict(scaling__factor=-2.0), "llama.rope.scaling.factor = -2.0"),
        (dict(dimension_sections=[16, 24, 24, 0]), "llama.rope.dimension_sections"),
        (dict(freq_base=-1.0), "llama.rope.freq_base = -1.0"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, fields, words):
    with pytest.raises(ValueError, match=f"m.gguf .*{words}"):
        read_scaling(tmp_path, **fields)


@pytest.mark.parametrize(
    "divisors, fields, words",
    [
        (np.ones(3), {}, "3 divisors, but a head has 4 pairs"),
        (np.array([1, 1, 0, 8]), {}, "greater than 0"),
        (np.array([1, 1, np.nan, 8]), {}, "greater than 0"),
        (np.ones(4), dict(scaling__type="linear", scaling__factor=2.0), "two rope scalings at once, linear"),
        (np.ones(4), dict(scaling__type="yarn", scaling__factor=2.0), "two rope scalings at once, yarn"),
    ],
)
def test_bad_rope_freqs_are_refused(tmp_path, divisors, fields, words):
    with pytest.raises(ValueError, match=words):
        read_scaling(tmp_path, {"rope_freqs.weight": divisors.astype(np.float32)}, **fields)
