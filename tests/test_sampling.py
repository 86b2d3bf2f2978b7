"""Sampling: hand-worked boundaries, and who may disturb whom."""

import math

import pytest
import torch

from kvcourse.sampling import Sampler, nucleus

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def kept(probabilities):
    return int((probabilities > 0).sum())


@pytest.mark.parametrize(
    ("probabilities", "top_p", "count"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.6, 2),
        ([0.5, 0.3, 0.15, 0.05], 0.85, 3),
        ([0.5, 0.41, 0.09], 0.9, 2),
        ([0.5, 0.25, 0.125, 0.125], 0.5, 1),
        ([0.5, 0.25, 0.125, 0.125], 0.75, 2),
        ([0.25, 0.25, 0.25, 0.25], 1e-9, 1),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(probabilities, top_p, count):
    out = nucleus(torch.tensor(probabilities), top_p)
    assert kept(out) == count
    assert float(out.sum()) == pytest.approx(1)


def test_top_p_of_one_keeps_all_and_ratios_stay():
    assert kept(Sampler(temperature=1.0, top_p=1.0).probabilities(LOGITS)) == 4
    out = Sampler(temperature=1.0, top_p=0.6).probabilities(LOGITS)
    torch.testing.assert_close(out.float(), torch.tensor([0.625, 0.375, 0, 0]))


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (3, 3), (4, 4), (9, 4), (0, 4), (None, 4)])
def test_top_k(top_k, count):
    assert kept(Sampler(temperature=1.0, top_k=top_k).probabilities(LOGITS)) == count


def test_top_k_keeps_exactly_k_among_equals():
    assert kept(Sampler(temperature=1.0, top_k=2).probabilities(torch.zeros(5))) == 2


def test_temperature_scales_the_logits():
    out = Sampler(temperature=2.0).probabilities(LOGITS)
    roots = [math.sqrt(p) for p in (0.5, 0.3, 0.15, 0.05)]
    torch.testing.assert_close(out.float(), torch.tensor(roots) / sum(roots))


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-50, 1e-8, 1e-3])
def test_cold_sampling_is_greedy_and_finite(temperature):
    logits = torch.tensor([1.0, 88.0, 90.0, -3e4])
    sampler = Sampler(temperature=temperature)
    assert sampler(logits) == 2
    if temperature:
        assert sampler.probabilities(logits).isfinite().all()


def test_greedy_takes_the_first_of_equal_scores():
    assert Sampler()(torch.zeros(7)) == 0


def test_draws_follow_the_probabilities():
    sampler = Sampler(temperature=1.0, seed=0)
    draws = torch.tensor([sampler(LOGITS) for _ in range(4000)])
    shares = torch.bincount(draws, minlength=4) / 4000
    assert (shares - LOGITS.exp()).abs().max() < 0.03  # four standard errors of the largest


def test_a_seed_repeats_and_another_does_not():
    draw = lambda seed: [sampler(LOGITS) for sampler in [Sampler(1.0, seed=seed)] for _ in range(20)]  # noqa: E731
    assert draw(42) == draw(42) != draw(43)


def test_unseeded_samplers_differ_and_leave_global_randomness_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = Sampler(1.0), Sampler(1.0)
    assert [first(LOGITS) for _ in range(40)] != [second(LOGITS) for _ in range(40)]
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0 must be greater than 0 and at most 1"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_k": True}, "top_k=True"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": "0.9"}, "top_p='0.9'"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**options)


def test_top_p_is_exact_over_a_large_vocabulary():
    """In float32 the running sum of 50,000 small numbers drifts, and thousands of tail tokens were lost."""
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    exact = logits.double().softmax(-1).sort(descending=True).values.numpy()
    expected = int((exact.cumsum() - exact < 0.999999).sum())
    assert kept(Sampler(temperature=1.0, top_p=0.999999).probabilities(logits)) == expected


def test_large_seeds_and_numpy_seeds():
    import numpy as np

    assert Sampler(1.0, seed=np.int64(3))(LOGITS) == Sampler(1.0, seed=3)(LOGITS)
    Sampler(1.0, seed=2**64 + 3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_are_refused(bad):
    advice = {torch.float16: "load the model in bfloat16 or float32", torch.float32: "check its weights"}
    for dtype, words in advice.items():
        for temperature in (0.0, 1.0):
            with pytest.raises(RuntimeError, match=f"overflowed or are damaged; {words}"):
                Sampler(temperature)(torch.tensor([1.0, bad], dtype=dtype))
