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
@pytest.mark.parametrize(
    "value", [0.0, -1, float("inf"), float("nan"), "1e4", None, [1.0], 1j, True, pytest.param(10**400, id="huge")]
)
def test_constants_must_be_positive_numbers(name, value):
    with pytest.raises(ValueError, match=name):
        kv.ModelConfig(**SIZES, **{name: value})


def test_a_base_of_1_or_less_is_refused():
    """Powers of 1 are all 1: every pair would turn alike, and YaRN would divide by the logarithm of 1."""
    for theta in (1.0, 1, 0.5):
        with pytest.raises(ValueError, match=f"rope_theta={theta} must be greater than 1"):
            kv.ModelConfig(**SIZES, rope_theta=theta)
    assert kv.ModelConfig(**SIZES, rope_theta=1.5).rope_theta == 1.5


@pytest.mark.parametrize("name", ["tie_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"])
@pytest.mark.parametrize("value", ["false", 0, 1, None])
def test_switches_are_true_or_false(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be True or False"):
        kv.ModelConfig(**SIZES, **{name: value})
    for given in (True, False):
        assert getattr(kv.ModelConfig(**SIZES, **{name: given}), name) is given


def test_numpy_integers_become_ints():
    import numpy as np

    config = kv.ModelConfig(**{name: np.int32(size) for name, size in SIZES.items()})
    assert config == kv.ModelConfig(**SIZES) and type(config.d_head) is int


def test_a_window_is_one_number_or_one_for_each_layer():
    assert kv.ModelConfig(**SIZES).windows == (None, None)
    assert kv.ModelConfig(**SIZES, window=4).windows == (4, 4)
    assert kv.ModelConfig(**SIZES, window=[4, None]).windows == (4, None)
    hash(kv.ModelConfig(**SIZES, window=[4, None]))


@pytest.mark.parametrize("window", [0, -1, 2.5, True, (4, 0), "4"])
def test_a_window_below_one_token_is_refused(window):
    """0 must not come to mean that nothing, or that everything, is visible."""
    with pytest.raises(ValueError, match="window="):
        kv.ModelConfig(**SIZES, window=window)


def test_a_window_for_each_layer_counts_them():
    with pytest.raises(ValueError, match="window has 3 entries, but there are n_layers=2"):
        kv.ModelConfig(**SIZES, window=(1, 2, 3))


def test_rope_scaling_must_be_one_that_fits():
    from kvcourse.rope import PairScaling

    with pytest.raises(ValueError, match="rope_scaling={'factor': 8} must be None or a RopeScaling"):
        kv.ModelConfig(**SIZES, rope_scaling={"factor": 8})
    with pytest.raises(ValueError, match="3 divisors, but a head has 4 pairs"):
        kv.ModelConfig(**SIZES, rope_scaling=PairScaling((1, 2, 3)))


@pytest.mark.parametrize(
    ("lengths", "room", "fitted"),
    [
        ([16, 2000, 8192], 0, [16, 2000, 8192]),  # just fits
        ([16, 2000, 8191], 1, [16, 2000, 8191]),
        ([8192, 16, 16], 0, [8192, 16, 16]),  # as given: neither sorted nor thinned out
        ([], 0, []),
        ([16, 2000, 8192], 1, [15, 1999, 8191]),
        ([16, 2000, 4000, 8000], 8192 - 255, [1, 63, 127, 255]),  # 16 x 255 / 8000 is below 1
        ([1, 2, 4, 8, 16, 32], 8192 - 8, [1, 2, 4, 8]),  # a quarter each; what became equal is kept once
        ([32], 8192 - 8, [8]),
    ],
)
def test_lengths_are_kept_or_shortened_in_proportion(lengths, room, fitted):
    config = kv.ModelConfig(**SIZES, max_seq_len=8192)
    given = list(lengths)
    assert config.fitting(lengths, room) == fitted
    assert lengths == given


@pytest.mark.parametrize(
    ("lengths", "room", "message"),
    [
        ([4], 8192, r"room=8192 leaves nothing of the context of 8192 tokens"),
        ([4], -5, "room=-5 must be a whole number of at least 0"),
        ([4], 1.5, "room=1.5 must be a whole number"),
        ([4], True, "room=True must be a whole number"),
        ([0, 4], 0, "each length"),
        ([4, 2.5], 0, "each length"),
    ],
)
def test_lengths_that_cannot_fit_are_refused(lengths, room, message):
    config = kv.ModelConfig(**SIZES, max_seq_len=8192)
    with pytest.raises(ValueError, match=message):
        config.fitting(lengths, room)
