"""Rotary frequencies against hand-worked numbers and against `transformers`' own."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvcourse.layers import rotary_tables
from kvcourse.rope import LinearScaling, Llama3Scaling, PairScaling, YarnScaling, amplitude, frequencies

LLAMA3 = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


def reference(d_head, theta, **rope):
    """Frequencies and attention factor as `transformers` computes them."""
    config = LlamaConfig(
        hidden_size=8 * d_head,
        num_attention_heads=8,
        head_dim=d_head,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **rope},
    )
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")


def test_unscaled_by_hand():
    assert frequencies(4, 100.0).tolist() == pytest.approx([1.0, 0.1])
    assert frequencies(64, 5e5)[31].item() == pytest.approx(5e5 ** (-62 / 64), rel=1e-6)
    assert amplitude(None) == 1.0


def test_linear_divides_every_frequency():
    assert frequencies(4, 100.0, LinearScaling(4.0)).tolist() == pytest.approx([0.25, 0.025])


def test_llama3_bands_of_a_published_model():
    """Heads of 64, theta 5e5, factor 32, original context 8192: of 32 pairs 15 keep their frequency, 14 are divided."""
    ratio = frequencies(64, 5e5) / frequencies(64, 5e5, LLAMA3)
    kept, divided = (ratio - 1).abs() < 1e-5, (ratio - 32).abs() < 1e-3
    assert (int(kept.sum()), int(divided.sum())) == (15, 14)
    assert kept[:15].all() and divided[18:].all()


@pytest.mark.parametrize("d_head", [8, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("original", [64, 8192])
def test_llama3_equals_transformers(d_head, theta, original):
    given = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    expected, _ = reference(d_head, theta, rope_type="llama3", **given, original_max_position_embeddings=original)
    ours = frequencies(d_head, theta, Llama3Scaling(**given, original_max_seq_len=original))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("d_head", [8, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("original", [64, 32768])
@pytest.mark.parametrize(
    "extra",
    [{}, {"attention_factor": 1.3}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False}],
    ids=["plain", "attention_factor", "betas", "truncate"],
)
def test_yarn_equals_transformers(d_head, theta, original, extra):
    given = {"factor": 4.0, **extra}
    expected, factor = reference(d_head, theta, rope_type="yarn", **given, original_max_position_embeddings=original)
    scaling = YarnScaling(**given, original_max_seq_len=original)
    torch.testing.assert_close(frequencies(d_head, theta, scaling), expected, rtol=1e-5, atol=0)
    assert amplitude(scaling) == pytest.approx(factor)


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_sharpens_the_scores():
    scaling = YarnScaling(factor=4.0, original_max_seq_len=64)
    ratio = frequencies(64, 1e4) / frequencies(64, 1e4, scaling)
    assert ratio[0] == 1 and ratio[-1].item() == pytest.approx(4)
    assert amplitude(scaling) == pytest.approx(0.1 * math.log(4) + 1)
    assert amplitude(YarnScaling(factor=0.5, original_max_seq_len=64)) == 1.0
    cos, sin = rotary_tables(torch.tensor([[3]]), 64, 1e4, scaling)
    assert (cos**2 + sin**2).sqrt().flatten().tolist() == pytest.approx([amplitude(scaling)] * 64)


def test_pair_scaling_divides_each_pair_by_its_own_number():
    assert frequencies(4, 100.0, PairScaling((1, 8))).tolist() == pytest.approx([1.0, 0.0125])
    with pytest.raises(ValueError, match="2 divisors, but a head has 4 pairs"):
        PairScaling((1, 8)).check(8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearScaling(0.0), "factor=0.0"),
        (lambda: LinearScaling(math.nan), "factor=nan"),
        (lambda: LinearScaling("4"), "LinearScaling: factor='4' must be a number greater than 0"),
        (lambda: LinearScaling(None), "LinearScaling: factor=None must be a number greater than 0"),
        (lambda: LinearScaling(10**400), "factor=10+ .*, and finite"),
        (lambda: Llama3Scaling(8.0, 4.0, 4.0, 8192), "high_freq_factor=4.0 must be above"),
        (lambda: Llama3Scaling(8.0, 1.0, 4.0, 0), "original_max_seq_len=0"),
        (lambda: YarnScaling(4.0, 64, beta_fast=1.0), "beta_fast=1.0 must be above"),
        (lambda: YarnScaling(4.0, 64, attention_factor=-1.0), "attention_factor=-1.0"),
        (lambda: YarnScaling(4.0, 64, attention_factor="x"), "attention_factor='x' must be a number"),
        (lambda: YarnScaling(4.0, 64, beta_slow=None), "beta_slow=None must be a number"),
        (lambda: YarnScaling(4.0, 64, truncate="false"), "YarnScaling: truncate='false' must be True or False"),
        (lambda: PairScaling((1.0, 0.0)), "divisor=0.0 must be a number"),
        (lambda: PairScaling((1.0, None)), "divisor=None must be a number"),
    ],
)
def test_numbers_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_frequencies_made_in_inference_mode_can_be_used_in_training():
    frequencies.cache_clear()
    with torch.inference_mode():
        frequencies(8, 123.0)
    assert not frequencies(8, 123.0).is_inference()
