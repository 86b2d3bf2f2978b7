"""Costs in closed form against PyTorch's own counter and against tensors really allocated."""

import pytest
import torch
from reference import SMOLLM2, random_tokens, small_config, small_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import kvcourse as kv

CONFIGS = [
    small_config(),
    small_config(n_kv_heads=1, d_head=16),
    small_config(n_kv_heads=8, tie_embeddings=True),
    small_config(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True),
    small_config(window=(8, None)),
    small_config(window=1),
]


def counted(model, tokens, **options) -> int:
    # On the CPU the counter takes a fused attention for nothing; plain matrix products it sees.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, **options)
    return counter.get_total_flops()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("batch_size", "context", "new"), [(1, 0, 1), (1, 0, 40), (3, 0, 17), (2, 31, 1), (2, 20, 9)])
@pytest.mark.parametrize("last_only", [True, False])
def test_flops_equal_the_flop_counter(config, batch_size, context, new, last_only):
    model = small_model(config)
    cache = kv.DenseCache(config, batch_size, device="cpu", dtype=torch.float32)
    if context:
        model(random_tokens(batch_size, context), cache=cache)
    expected = counted(model, random_tokens(batch_size, new), cache=cache, last_only=last_only)
    assert kv.flops(config, new, context, batch_size, last_only).total == expected


def test_flops_of_a_real_model_on_the_meta_device():
    model = kv.Transformer(SMOLLM2, device="meta", dtype=torch.float32)
    tokens = random_tokens(1, 128)
    with FlopCounterMode(display=False) as counter:
        model(tokens, last_only=True)
    assert kv.flops(SMOLLM2, 128).total == counter.get_total_flops()


@pytest.mark.parametrize("config", [*CONFIGS, SMOLLM2])
def test_weight_bytes_equal_the_weights_of_a_model(config):
    model = kv.Transformer(config, device="meta", dtype=torch.bfloat16)
    assert kv.weight_bytes(config, bits=16) == sum(w.nbytes for w in model.parameters())


def test_smollm2_by_hand():
    """135 million parameters, and 11,520 numbers of cache a token: read equally much from 11,677 tokens on."""
    parameters = kv.weight_bytes(SMOLLM2, bits=8)
    assert parameters == 134_515_008
    assert kv.cache_bytes(SMOLLM2, 1, bits=8) == 2 * 30 * 3 * 64 == 11_520
    at = lambda context: kv.bytes_moved(SMOLLM2, 1, context)  # noqa: E731
    assert at(11_676).cache_read < at(11_676).weights < at(11_677).cache_read


def test_llama_70b_cache_at_128k_by_hand():
    """80 layers, heads of 128: 41.9 GB with 8 KV heads, 335.5 GB if all 64 were kept (float16)."""
    sizes = dict(vocab_size=32000, n_layers=80, n_heads=64, d_model=8192, d_ff=28672)
    grouped = kv.cache_bytes(kv.ModelConfig(**sizes, n_kv_heads=8), 128_000)
    full = kv.cache_bytes(kv.ModelConfig(**sizes), 128_000)
    assert (round(grouped / 1e9, 1), round(full / 1e9, 1)) == (41.9, 335.5)


def test_bytes_moved_by_hand():
    config = small_config()  # untied: of the embedding only the new tokens' rows are read
    moved = kv.bytes_moved(config, 1, context=10, batch_size=4, bits=32)
    embedding = 97 * 64
    assert moved.weights == kv.weight_bytes(config, 32) - (embedding - 4 * 64) * 4
    assert moved.cache_read == 10 * moved.cache_written == 2 * 2 * 2 * 8 * 10 * 4 * 4
    assert moved.total == moved.weights + moved.cache_read + moved.cache_written
    tied = small_config(tie_embeddings=True)
    assert kv.bytes_moved(tied, 1, bits=32).weights == kv.weight_bytes(tied, 32)


def test_a_window_bounds_what_a_step_reads():
    """Window 8: of 100 earlier tokens a decode step reads 7, and keys and values are 2 x 2 heads x 8 numbers each."""
    numbers = 2 * 2 * 8
    for config, tokens in [
        (small_config(window=8), 7 + 7),
        (small_config(window=(8, None)), 7 + 100),
        (small_config(window=200), 100 + 100),
    ]:
        assert kv.bytes_moved(config, 1, context=100, bits=32).cache_read == tokens * numbers * 4
        assert kv.flops(config, 1, context=100).attention == 2 * 2 * 8 * 8 * (tokens + 2)


def test_price_by_hand():
    """1,000 tokens a second are 3.6 million an hour."""
    assert kv.price_per_million(1000, 3.6) == pytest.approx(1.0)
    assert kv.price_per_million(10, 3.6) == pytest.approx(100.0)
    for rate, price in [(0, 1), (-5, 1), (1, 0), (float("inf"), 1), (1, float("nan")), (None, 2.0), (2.0, "1")]:
        with pytest.raises(ValueError, match="must be a number greater than 0"):
            kv.price_per_million(rate, price)


def test_sizes_out_of_range_are_refused_and_numpy_integers_do_not_wrap_around():
    import numpy as np

    config = small_config()
    for call, message in [
        (lambda: kv.flops(config, 0), "new_tokens=0"),
        (lambda: kv.flops(config, 2.5), "new_tokens=2.5"),
        (lambda: kv.flops(config, 1, -9), "context=-9"),
        (lambda: kv.bytes_moved(config, 1, 0, batch_size=0), "batch_size=0"),
        (lambda: kv.cache_bytes(config, -1), "seq_len=-1"),
        (lambda: kv.cache_bytes(config, 1, bits=0), "bits=0"),
        (lambda: kv.weight_bytes(config, bits=float("nan")), "bits=nan"),
        (lambda: kv.bytes_moved(config, 1, bits=None), "bits=None"),
        (lambda: kv.weight_bytes(config, bits=10**400), "bits=10+ .*, and finite"),
        (lambda: kv.DenseCache.bytes_for(config, dtype="int8"), "dtype='int8'"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert kv.flops(SMOLLM2, np.int32(512)) == kv.flops(SMOLLM2, 512)
    assert kv.cache_bytes(SMOLLM2, np.int32(500_000)) == 11_520_000_000


@pytest.mark.parametrize("function", [kv.flops, kv.bytes_moved, kv.cache_bytes, kv.weight_bytes])
def test_a_model_or_a_name_in_place_of_a_config_is_refused(function):
    model = small_model()
    for given in (model, "smollm2-135m", None, 5):
        kind = type(given).__name__
        with pytest.raises(ValueError, match=f"config must be a ModelConfig, such as lm.config; got {kind}"):
            function(given, 1)
    assert function(model.config, 1)
