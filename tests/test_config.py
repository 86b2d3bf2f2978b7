"""ModelConfig: what is filled in, and what is refused."""

import pytest

import kvcourse as kv

SIZES = dict(vocab_size=97, n_layers=2, n_heads=8, d_model=64, d_ff=128)


def test_heads_and_head_size_are_filled_in():
    config = kv.ModelConfig(**SIZES)
    assert (config.n_kv_heads, config.d_head, config.group_size) == (8, 8, 1)
    assert kv.ModelConfig(**SIZES, n_kv_heads=2).group_size == 4


def test_head_size_may_differ_from_width_over_heads():
    assert kv.ModelConfig(**SIZES, d_head=16).d_head == 16


@pytest.mark.parametrize("name", ["vocab_size", "n_layers", "n_heads", "d_model", "d_ff", "n_kv_heads", "max_seq_len"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_sizes_must_be_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        kv.ModelConfig(**{**SIZES, name: value})


def test_query_heads_must_share_key_value_heads_evenly():
    with pytest.raises(ValueError, match="n_heads=8 is not a multiple of n_kv_heads=3"):
        kv.ModelConfig(**SIZES, n_kv_heads=3)


def test_odd_head_size_and_uneven_width_are_refused():
    with pytest.raises(ValueError, match="d_head=7 is odd"):
        kv.ModelConfig(**SIZES, d_head=7)
    with pytest.raises(ValueError, match="d_model=60 does not divide"):
        kv.ModelConfig(**{**SIZES, "d_model": 60})


@pytest.mark.parametrize("name", ["rope_theta", "norm_eps"])
@pytest.mark.parametrize("value", [0.0, -1, float("inf"), float("nan"), "1e4"])
def test_constants_must_be_positive_numbers(name, value):
    with pytest.raises(ValueError, match=name):
        kv.ModelConfig(**SIZES, **{name: value})


def test_numpy_integers_become_ints():
    import numpy as np

    config = kv.ModelConfig(**{name: np.int32(size) for name, size in SIZES.items()})
    assert config == kv.ModelConfig(**SIZES) and type(config.d_head) is int
