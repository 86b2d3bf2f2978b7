"""AWQ: by hand, against the search written out, and on inputs that have tripped others."""

import re

import pytest
import torch

from kvcourse.quant import InputStatistics, awq, rtn
from kvcourse.quant.awq import RATIOS, scale_for, search_scales
from kvcourse.quant.grid import TENSOR
from kvcourse.quant.statistics import output_error


def statistics_of(inputs):
    statistics = InputStatistics(inputs.shape[1])
    statistics.add(inputs)
    return statistics


def draw(seed, rows=32, columns=64, samples=256):
    """A weight, and inputs of which a few are many times larger than the others, as in language models."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    sizes = torch.randn(columns, generator=generator).exp()
    return weight, torch.randn(samples, columns, generator=generator) * sizes


def test_by_hand():
    """Weights 0.4 and 1 on a grid of -2, -1, 0, 1 times the largest: 0.4 becomes 0. Its input is +-16, the other's +-1,
    so their magnitudes are 4 times and a quarter of their geometric mean, 4. With ratio r the scales are 4^r and 4^-r;
    0.4 x 16^r passes 1 between r = 0.3 and 0.35. At 0.35 it is 1.0557: both weights become the largest, the first is
    exact, the second 1.0557, and the error 0.0557^2 = 0.0031. Every other ratio leaves at least 0.045."""
    weight, inputs = torch.tensor([[0.4, 1.0]]), torch.tensor([[16.0, 1], [16, -1], [-16, 1], [-16, -1]])
    statistics = statistics_of(inputs)
    ours = awq(weight, statistics, 2, None, True, scale_dtype=torch.float32)
    torch.testing.assert_close(ours.column_scale, torch.tensor([4**0.35, 4**-0.35]))
    torch.testing.assert_close(ours.dequantize(), torch.tensor([[0.4, 0.4 * 16**0.35]]))
    assert output_error(weight, ours.dequantize(), statistics.hessian) == pytest.approx(
        (0.4 * 16**0.35 - 1) ** 2, rel=1e-4
    )
    assert rtn(weight, 2, None, True).dequantize().tolist() == [[0, 1]]


@pytest.mark.parametrize(
    "options", [{}, {"symmetric": True}, {"kind": "minimum"}, {"clip": True}, {"kind": "nf4"}], ids=str
)
@pytest.mark.parametrize("group_size", [None, 16, TENSOR])
def test_dequantizes_to_the_rounded_scaled_weight_over_the_scale(group_size, options):
    weight, inputs = draw(0)
    ours = awq(weight, statistics_of(inputs), 4, group_size, **options)
    scale = ours.column_scale
    expected = rtn(weight * scale, 4, group_size, **options).dequantize() / scale
    assert torch.equal(ours.dequantize(), expected)
    if group_size != TENSOR:  # where one grid serves all columns it may be best to leave them alone
        assert not torch.equal(expected, rtn(weight, 4, group_size, **options).dequantize())


def test_the_scale_is_the_best_of_twenty_powers_of_the_magnitude():
    """Written out with the inputs themselves; where their scale lies as a whole does not matter."""
    weight, inputs = draw(1)
    outputs, errors = inputs @ weight.T, []
    for step in range(20):
        scale = inputs.abs().mean(0) ** (step / 20)
        rounded = rtn(weight * scale, 3, 16, scale_dtype=torch.float32).dequantize() / scale
        errors.append((inputs @ rounded.T - outputs).square().sum(1).mean().item())
    ours = awq(weight, statistics_of(inputs), 3, 16, scale_dtype=torch.float32)
    found = (inputs @ ours.dequantize().T - outputs).square().sum(1).mean().item()
    best = min(range(20), key=errors.__getitem__)
    assert 0 < best < 19 and found == pytest.approx(errors[best], rel=1e-3)
    power = inputs.abs().mean(0) ** (best / 20)
    torch.testing.assert_close(ours.column_scale / ours.column_scale[0], power / power[0], atol=0, rtol=1e-4)
    assert found < 0.9 * errors[0]


def test_one_scale_for_weights_that_share_their_input():
    """It is best for the sum of their errors, so a weight a hundred times larger decides it."""
    large, inputs = draw(2)
    small, statistics = 0.01 * draw(3)[0] / inputs.abs().mean(0), statistics_of(inputs)
    together = search_scales([large, small], statistics, 3, 16)
    assert torch.equal(together, search_scales([small, large], statistics, 3, 16))
    assert torch.equal(together, search_scales([large], statistics, 3, 16))
    assert not torch.equal(together, search_scales([small], statistics, 3, 16))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [None, 16])
def test_never_worse_than_rtn_on_what_it_was_calibrated_with(bits, group_size):
    ratios = []
    for seed in range(10):
        weight, inputs = draw(seed)
        statistics = statistics_of(inputs)
        ours, nearest = (
            output_error(weight, quantized.dequantize(), statistics.hessian)
            for quantized in (awq(weight, statistics, bits, group_size), rtn(weight, bits, group_size))
        )
        ratios.append(ours / nearest)
    print(f"{bits} bits, groups of {group_size}: {sum(ratios) / 10:.3f} of the error of rtn")
    assert max(ratios) <= 1 and sum(ratios) / 10 < 0.95


def test_a_weight_that_lies_on_the_grid_is_left_alone():
    weight, statistics = draw_with_statistics(0)
    whole = weight.mul(4).round().clamp(-7, 7)
    whole[:, ::16] = 7  # the scale of each group is 1
    ours = awq(whole, statistics, 4, 16, True)
    assert (ours.column_scale == 1).all() and torch.equal(ours.dequantize(), whole)
    assert not (awq(weight, statistics, 4, 16, True).column_scale == 1).all()


def test_inputs_of_one_size_give_rtn():
    """Then no column deserves more than another; with unequal inputs the scales differ."""
    weight = draw(4)[0]
    ours = awq(weight, statistics_of(torch.ones(8, 64) * torch.tensor([1.0, -1] * 32)), 3, 16)
    assert (ours.column_scale == 1).all() and torch.equal(ours.dequantize(), rtn(weight, 3, 16).dequantize())
    assert not (awq(*draw_with_statistics(4), 3, 16).column_scale == 1).all()


def draw_with_statistics(seed):
    weight, inputs = draw(seed)
    return weight, statistics_of(inputs)


def allowed(scale):
    assert scale.isfinite().all() and (scale > 0).all()
    return scale


@pytest.mark.parametrize("group_size", [None, 16])
def test_negative_means_a_dead_channel_and_a_row_of_zeros(group_size):
    """A mean without the magnitude would be negative, and its power not a number; a scale of 0 would divide by 0."""
    weight, inputs = draw(5)
    inputs = -inputs.abs()
    inputs[:, [7, 30]] = 0
    weight[3] = 0
    statistics = statistics_of(inputs)
    ours = awq(weight, statistics, 4, group_size)
    scale = allowed(ours.column_scale)
    assert (scale[[7, 30]] == 1).all() and not (scale == 1).all()
    rounded = ours.dequantize()
    assert rounded.isfinite().all() and (rounded[3] == 0).all()
    errors = [output_error(weight, q, statistics.hessian) for q in (rounded, rtn(weight, 4, group_size).dequantize())]
    assert errors[0] < errors[1]
    turned = awq(weight, statistics_of(-inputs), 4, group_size)
    assert torch.equal(turned.dequantize(), rounded)


def test_without_any_input_it_is_rtn():
    weight = draw(6)[0]
    ours = awq(weight, statistics_of(torch.zeros(4, 64)), 4, 16)
    assert (ours.column_scale == 1).all() and torch.equal(ours.dequantize(), rtn(weight, 4, 16).dequantize())


@pytest.mark.parametrize("size", [1e-15, 1e-6, 1e6, 1e15])
def test_how_large_inputs_are_as_a_whole_does_not_matter(size):
    weight, inputs = draw(7)
    scale = allowed(awq(weight, statistics_of(inputs * size), 4, 16).column_scale)
    torch.testing.assert_close(scale, awq(weight, statistics_of(inputs), 4, 16).column_scale, atol=0, rtol=1e-4)


def test_magnitudes_thirty_powers_of_ten_apart():
    """The scales stay where float16 can hold those of the groups."""
    weight, inputs = draw(8)
    statistics = statistics_of(inputs * torch.logspace(-15, 15, 64))
    ours = awq(weight, statistics, 4, 16)
    scale = allowed(ours.column_scale)
    assert scale.max() <= 1e4 and scale.min() >= 1e-4 and ours.dequantize().isfinite().all()


def test_scales_that_the_type_of_the_groups_cannot_follow_are_not_taken():
    """Small groups divided by much, and large ones multiplied, are no candidates; without a scale all is well."""
    weight, inputs = draw(8)
    statistics = statistics_of(inputs * torch.logspace(-8, 8, 64))
    for size in (1e-5, 1e4):
        scaled = size * weight
        ours = awq(scaled, statistics, 4, 16)
        nearest = rtn(scaled, 4, 16).dequantize()
        assert ours.dequantize().isfinite().all()
        assert output_error(scaled, ours.dequantize(), statistics.hessian) <= output_error(
            scaled, nearest, statistics.hessian
        )
        with pytest.raises(ValueError):
            rtn(scaled * scale_for(statistics.magnitude, RATIOS[-1]), 4, 16)


def test_what_is_given_is_left_as_it_is():
    weight, statistics = draw_with_statistics(9)
    weight = torch.nn.Parameter(weight)
    before, hessian = weight.clone(), statistics.hessian
    ours = awq(weight, statistics, 4, 16)
    assert torch.equal(weight, before) and torch.equal(statistics.hessian, hessian)
    assert not any(tensor.requires_grad for tensor in ours.tensors.values())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bits": 5}, "bits=5 must be one of 2, 3, 4, 8"),
        ({"group_size": 24}, "give one of 8, 16, 32, 64, or None"),
        ({"weight": torch.zeros(64)}, "weight must be a matrix (output channels, inputs), got shape (64,)"),
        ({"weight": torch.full((8, 64), torch.nan)}, "weight has numbers that are infinite or NaN"),
        ({"weight": torch.zeros(8, 32)}, "A weight of 32 columns needs statistics of as many inputs, got 64"),
        ({"inputs": InputStatistics(64)}, "Nothing was added to these statistics"),
        (
            {"inputs": statistics_of(torch.full((2, 64), 1e20))},
            "Inputs of a layer are too large: sums of their squares",
        ),
        ({"weight": torch.full((8, 64), 1e-8)}, "Numbers of a group go up to 1e-08 only"),
        ({"foo": 2}, "There is no option foo"),
        ({"inputs": torch.zeros(4, 64)}, "inputs must be InputStatistics, got Tensor"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, says):
    weight, inputs = draw_with_statistics(10)
    good = {"weight": weight, "inputs": inputs, "bits": 4, "group_size": 16}
    awq(**good)
    with pytest.raises(ValueError, match=re.escape(says)):
        awq(**{**good, **change})


def test_scales_of_no_weight_are_refused():
    with pytest.raises(ValueError, match="weights must be a list of at least one matrix"):
        search_scales([], draw_with_statistics(11)[1], 4, 16)
