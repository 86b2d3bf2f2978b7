"""Llama 3 70B with a million tokens, by hand; windows by counting pairs; what the two phases wait for."""

from dataclasses import replace

import pytest
from reference import SMOLLM2, small_config

import kvcourse as kv
from kvcourse.context_cost import DATA_SHEETS, crossover, long_context, pairs
from kvcourse.layers import visible

LLAMA = kv.PUBLISHED["Llama 3 70B"]  # 80 layers, 64 query heads, 8 KV heads, d_head 128, d_model 8192, d_ff 28,672
MILLION = 1_000_000
LAYERS = 68_451_041_280  # 80 x (8192 x (2 x 64 + 2 x 8) x 128 + 3 x 8192 x 28,672) weights
HEAD = 1_050_673_152  # 8192 x 128,256


def test_memory_of_a_million_tokens_by_hand():
    text = kv.long_context(LLAMA, MILLION)
    assert text.cache_bytes == 2 * 80 * 8 * 128 * 2 * MILLION == 327_680_000_000
    assert text.weight_bytes == 141_107_412_992
    assert text.held_bytes == 468_787_412_992  # of an H200 141 GB: more than three
    quarter = kv.long_context(LLAMA, MILLION, bits=4, weight_bits=8)
    assert (quarter.cache_bytes, quarter.weight_bytes) == (81_920_000_000, 70_553_706_496)
    assert quarter.decode.cache_bytes == 81_920_000_000
    assert quarter.decode.weight_bytes == LAYERS + HEAD + 161 * 8192 + 8192  # norms, and a row of the embedding


def test_prefill_of_a_million_tokens_by_hand():
    prefill = kv.long_context(LLAMA, MILLION).prefill
    assert prefill.attention_flops_full == 4 * 80 * 64 * 128 * MILLION**2 == 2_621_440 * 10**12
    assert prefill.attention_flops == 4 * 80 * 64 * 128 * (MILLION * (MILLION + 1) // 2)
    assert prefill.other_flops == 2 * LAYERS * MILLION + 2 * HEAD
    assert prefill.attention_flops / prefill.other_flops == pytest.approx(9.57, abs=0.005)
    assert prefill.attention_flops_full / prefill.other_flops == pytest.approx(19.15, abs=0.005)
    assert prefill.attention_seconds == pytest.approx(1325.3, abs=0.05)  # 1.31072e18 / 989e12
    assert prefill.other_seconds == pytest.approx(138.4, abs=0.05)
    assert prefill.memory_seconds == pytest.approx(0.0977, abs=0.0001)  # (141.1 + 327.7) GB / 4.8 TB/s
    assert prefill.binds == "attention" and prefill.seconds == prefill.compute_seconds


def test_a_decode_step_after_a_million_tokens_by_hand():
    decode = kv.long_context(LLAMA, MILLION).decode
    assert decode.attention_flops == decode.attention_flops_full == 4 * 80 * 64 * 128 * MILLION
    assert decode.other_flops == 2 * (LAYERS + HEAD)
    assert decode.attention_flops / decode.other_flops == pytest.approx(18.86, abs=0.005)
    assert decode.cache_bytes == 327_680_000_000  # all but one token read, one written
    assert decode.attention_flops / decode.cache_bytes == 8  # query heads that share a KV head, at 16 bits
    assert decode.compute_seconds == pytest.approx(2.79e-3, abs=5e-6)
    assert decode.cache_seconds == pytest.approx(68.3e-3, abs=5e-5)
    assert decode.weight_seconds == pytest.approx(29.0e-3, abs=5e-5)
    assert decode.binds == "cache" and decode.seconds == decode.memory_seconds
    on_h100 = kv.long_context(LLAMA, MILLION, "H100 80 GB").decode
    assert on_h100.cache_seconds == pytest.approx(97.8e-3, abs=5e-5)  # 327.68 GB / 3.35 TB/s


def test_what_binds_changes_with_the_length():
    found = {tokens: kv.long_context(LLAMA, tokens) for tokens in (1, 8192, 100_000, 110_000, 420_000, 430_000)}
    assert [t.prefill.binds for t in found.values()] == ["weights", *["other operations"] * 2, *["attention"] * 3]
    assert [t.decode.binds for t in found.values()] == [*["weights"] * 5, "cache"]  # 139 GB / 327,680 bytes: 424,248


def test_crossover_by_hand_and_by_counting():
    prefill, decode = crossover(LLAMA)
    assert prefill == LAYERS / (80 * 64 * 128) == 104_448
    assert decode == (LAYERS + HEAD) / (2 * 80 * 64 * 128) == 53_025.6
    for shape in (LLAMA, SMOLLM2, kv.PUBLISHED["Llama 2 7B"]):
        for phase, tokens in zip(("prefill", "decode"), crossover(shape), strict=True):
            before, after = (getattr(long_context(shape, int(tokens * by)), phase) for by in (0.99, 1.01))
            assert before.attention_flops < before.other_flops
            assert after.attention_flops > after.other_flops
    many = replace(LLAMA, n_kv_heads=64)  # eight times the cache, and more weights: the operations change little
    assert long_context(many, MILLION).cache_bytes == 8 * 327_680_000_000
    assert long_context(many, MILLION).decode.attention_flops == long_context(LLAMA, MILLION).decode.attention_flops


@pytest.mark.parametrize("window", [None, 1, 8, (8, None), 100])
@pytest.mark.parametrize(("new_tokens", "context"), [(1, 0), (1, 40), (30, 0), (13, 20)])
def test_pairs_are_those_that_the_mask_shows(window, new_tokens, context):
    import torch

    config = small_config(window=window)
    tokens = torch.arange(context + new_tokens)[None]
    counted = [int(visible(tokens[:, context:], tokens, w).sum()) for w in config.windows]
    assert pairs(config, new_tokens, context) == sum(counted)


def test_a_machine_given_by_its_ceilings():
    slow = kv.Ceilings(100e9, 10e9, "cpu", "float32")
    text = kv.long_context(SMOLLM2, 1000, slow, bits=32, weight_bits=32)
    assert text.decode.weight_seconds == pytest.approx(134_515_008 * 4 / 10e9)
    assert text.decode.cache_bytes == 23_040 * 2 * 1000
    assert text.prefill.other_seconds == pytest.approx(kv.flops(SMOLLM2, 1000).linear / 100e9, rel=1e-3)
    assert set(DATA_SHEETS) <= set(kv.DEVICES)


def test_what_cannot_be_counted_is_refused():
    for call, message in [
        (lambda: kv.long_context(LLAMA, 0), "tokens=0"),
        (lambda: kv.long_context("Llama 3 70B", 5), "shape must be a Shape"),
        (lambda: kv.long_context(LLAMA, 5, "A100"), "device='A100' is not known: give one of 'H100 80 GB', 'H200"),
        (lambda: kv.long_context(LLAMA, 5, 141e9), "device=1410+.0 is not known"),
        (lambda: kv.long_context(LLAMA, 5, bits=0), "bits=0"),
        (lambda: kv.long_context(kv.PUBLISHED["DeepSeek-V2"], 5), "Latent attention is run in two ways"),
        (lambda: kv.long_context(kv.PUBLISHED["gpt-oss 20B"], 5), "How many experts 5 tokens read"),
        (lambda: crossover(kv.PUBLISHED["Mistral 7B v0.1"]), "without window or latent"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
