"""GPTQ: against a slow version straight from the paper, beside rounding to nearest, and on difficult inputs."""

import re
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from kvcourse.quant import Grid, InputStatistics, gptq, rtn
from kvcourse.quant.gptq import blocks, inverse_factor
from kvcourse.quant.grid import TENSOR, decode, encode, fit
from kvcourse.quant.statistics import output_error

KINDS = ["zero_point", "symmetric", "minimum"]


def draw(seed, rows=32, columns=64, samples=512, dtype=torch.float32):
    """A weight, and inputs that hang together: each is a mixture of all of as many independent ones."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=dtype)
    mix = torch.randn(columns, columns, generator=generator, dtype=dtype)
    return weight, torch.randn(samples, columns, generator=generator, dtype=dtype) @ mix


def hessian_of(inputs):
    return 2 * inputs.T @ inputs / len(inputs)


def statistics_of(inputs):
    statistics = InputStatistics(inputs.shape[1])
    statistics.add(inputs)
    return statistics


def test_by_hand():
    """H = [[2, 1], [1, 2]] and a third input on its own; the third weight makes a scale of 1. The inverse of H's block
    is [[2, -1], [-1, 2]] / 3. 1.4 rounds to 1 and leaves 0.4; the second weight becomes 1.4 - 0.4 x (-1 / 2) = 1.6,
    and rounds to 2. Error: D = (0.4, -0.6), D H D^T / 2 = 0.28; to nearest D = (0.4, 0.4), 0.48."""
    weight, hessian = torch.tensor([[1.4, 1.4, 3.0]]), torch.tensor([[2.0, 1, 0], [1, 2, 0], [0, 0, 2]])
    ours, nearest = gptq(weight, hessian, 3, None, True, damping=0), rtn(weight, 3, None, True)
    assert ours.dequantize().tolist() == [[1, 2, 3]] and nearest.dequantize().tolist() == [[1, 1, 3]]
    assert output_error(weight, ours.dequantize(), hessian) == pytest.approx(0.28)
    assert output_error(weight, nearest.dequantize(), hessian) == pytest.approx(0.48)


# The slow version


def slow(weight, hessian, grid, damping=0.01, act_order=False, static=False):
    """(codes `(rows, columns)`, clear `(rows,)`) in float64, by the formulas of section 3.1: round one weight, spread
    its error with the inverse of the Hessian of those left, which is computed anew for each. A row is clear when no
    choice in it was so close that a little noise would change it."""
    weight, hessian = weight.double().clone(), hessian.double()
    columns = len(hessian)
    hessian = hessian + damping * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    size = grid.size(columns)
    codes, clear = torch.zeros(weight.shape, dtype=torch.uint8), torch.ones(len(weight), dtype=torch.bool)
    original = weight.clone()
    inverses = [hessian[order[place:]][:, order[place:]].inverse() for place in range(columns)]
    costs = torch.empty(columns, dtype=torch.float64)  # equation 2: rounding j costs error^2 / inverse[j, j]
    costs[order] = torch.stack([1 / inverse[0, 0] for inverse in inverses])
    for place, j in enumerate(order.tolist()):
        left = order[place:]
        if static or grid.group_size in (None, TENSOR):
            together = original[:, j // size * size :][:, :size]
            together = together.reshape(1, -1) if grid.group_size == TENSOR else together
            cost = costs[j // size * size :][:size].repeat(together.shape[1] // size)
            scale, zero = fit(together, grid, cost)
        elif place % size == 0:
            together, cost = weight[:, left[:size]], costs[left[:size]]
            scale, zero = fit(together, grid, cost)
            clear &= same(*(fit(together * nudge, grid, cost) for nudge in (1 - 1e-5, 1 + 1e-5)))
        column = weight[:, j, None]
        codes[:, j, None] = encode(column, scale, zero, grid)
        clear &= same(*([encode(column + nudge * scale, scale, zero, grid)] for nudge in (-1e-3, 1e-3)))
        error = (column - decode(codes[:, j, None], scale, zero, grid).double()) / inverses[place][0, 0]
        weight[:, left] -= error * inverses[place][0]
    return codes, clear


def same(ones, others):
    """Rows in which two lists of tensors `(rows, 1)` are equal."""
    pairs = [(a, b) for a, b in zip(ones, others, strict=True) if a is not None]
    return torch.stack([(a == b).flatten() for a, b in pairs]).all(0)


def codes_of(quantized):
    codes = quantized.unpacked()[0]
    if quantized.order is None:
        return codes
    return torch.empty_like(codes).index_copy_(1, quantized.order.long(), codes)


def agreement(weight, hessian, bits, group_size=None, kind="zero_point", clip=False, block_size=128, **how):
    """Of the rows that are clear: the share in which all codes are those of the slow version."""
    codes, clear = slow(weight, hessian, Grid(bits, group_size, kind, clip), **how)
    how["static_groups"] = how.pop("static", False)
    ours = codes_of(gptq(weight, hessian, bits, group_size, kind=kind, clip=clip, block_size=block_size, **how))
    assert clear.float().mean() > 0.5  # or the comparison says little
    return (ours == codes).all(1)[clear].float().mean().item()


CASES = [
    {"bits": 4},
    {"bits": 4, "group_size": 16},
    {"bits": 3, "group_size": 32, "block_size": 8},  # groups longer than blocks
    {"bits": 3, "group_size": 16, "block_size": 24},  # and no multiple of each other
    {"bits": 2, "group_size": 8, "block_size": 1},
    {"bits": 8, "group_size": 16, "block_size": 32},
    {"bits": 4, "group_size": TENSOR, "block_size": 20},
    {"bits": 4, "act_order": True, "block_size": 16},
    {"bits": 3, "group_size": 16, "act_order": True},
    {"bits": 3, "group_size": 16, "act_order": True, "static": True, "block_size": 32},
    {"bits": 4, "group_size": 16, "static": True},
    {"bits": 4, "group_size": 16, "damping": 0.1},
    {"bits": 3, "group_size": 16, "clip": True},
    {"bits": 2, "act_order": True, "clip": True},
    {"bits": 3, "group_size": 16, "act_order": True, "static": True, "clip": True},
    {"bits": 2, "group_size": TENSOR, "clip": True},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_are_those_of_the_slow_version(case, kind):
    weight, inputs = draw(0)
    assert agreement(weight, hessian_of(inputs), kind=kind, **case) == 1


def test_codes_are_those_of_the_slow_version_when_few_inputs_matter():
    """As in language models: one input thousands of times larger than another."""
    weight, inputs = draw(1)
    hessian = hessian_of(inputs * torch.logspace(-2, 2, 64))
    for act_order in (False, True):
        assert agreement(weight, hessian, 4, 16, act_order=act_order) == 1


def test_the_comparison_with_the_slow_version_can_fail(monkeypatch):
    weight, inputs = draw(0)
    hessian = hessian_of(inputs)
    codes, clear = slow(weight, hessian, Grid(4, 16))

    def share(**how):
        return (codes_of(gptq(weight, how.pop("hessian", hessian), 4, 16, **how)) == codes).all(1)[clear].float().mean()

    assert share() == 1
    assert (codes_of(rtn(weight, 4, 16)) == codes).all(1)[clear].float().mean() < 0.1
    assert share(act_order=True) < 0.1 and share(static_groups=True) < 0.1 and share(damping=0.1) < 0.1
    assert share(hessian=hessian.flip(0)[:, range(63, -1, -1)]) < 0.1
    stale = [(0, 24), (24, 48), (48, 64)]  # a block ends inside a group, whose grid is then fitted to stale weights
    monkeypatch.setattr(import_module("kvcourse.quant.gptq"), "blocks", lambda *sizes: stale)  # not the function gptq
    assert share() < 0.9


@pytest.mark.parametrize("options", [{}, {"group_size": 16}, {"group_size": 16, "act_order": True}, {"clip": True}])
def test_block_size_changes_nothing(options):
    """In exact arithmetic; in float32 a choice close to the middle may turn, and its row with it."""
    weight, inputs = draw(2)
    whole = codes_of(gptq(weight, hessian_of(inputs), 4, block_size=64, **options))
    for block_size in (1, 7, 16, 48, 1000):
        codes = codes_of(gptq(weight, hessian_of(inputs), 4, block_size=block_size, **options))
        assert (codes == whole).all(1).float().mean() > 0.9


def test_blocks_never_end_inside_a_group_that_they_began_before():
    assert blocks(96, 16, 40) == [(0, 32), (32, 64), (64, 96)]
    assert blocks(96, 48, 32) == [(0, 32), (32, 48), (48, 80), (80, 96)]
    assert blocks(100, 100, 64) == [(0, 64), (64, 100)]
    assert blocks(80, 16, 32) == [(0, 32), (32, 64), (64, 80)]
    for size in (1, 2, 3, 4, 6, 8, 12, 24):
        for block_size in range(1, 30):
            cut = blocks(24, size, block_size)
            assert [a for a, _ in cut] == [0, *(b for _, b in cut[:-1])] and cut[-1][1] == 24
            assert all(0 < b - a <= block_size for a, b in cut)
            assert all(a // size * size == a or (b - 1) // size == a // size for a, b in cut)


def test_the_factor_is_that_of_the_inverse():
    hessian = hessian_of(draw(0)[1]).double()
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    factor, note = inverse_factor(hessian, 0.01)
    expected = torch.linalg.cholesky(damped.inverse() * hessian.diagonal().mean(), upper=True)
    assert note == ""
    torch.testing.assert_close(factor.double(), expected, atol=1e-5, rtol=1e-5)
    assert (inverse_factor(hessian, 0.02)[0] - expected).abs().max() > 1e-3


# Beside rounding to nearest


def as_stored(quantized):
    return {name: tensor.tolist() for name, tensor in quantized.tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [None, 16, TENSOR])
@pytest.mark.parametrize("options", [{}, {"act_order": True}, {"static_groups": True}, {"clip": True}], ids=str)
def test_with_a_constant_diagonal_it_is_rtn(kind, group_size, options):
    weight, inputs = draw(3)
    clip = {"clip": options.get("clip", False)}
    nearest = rtn(weight, 3, group_size, kind=kind, **clip)
    for diagonal in (1.0, 1 / 3, 1e-20, 7e20):
        ours = gptq(weight, diagonal * torch.eye(64), 3, group_size, kind=kind, **options)
        assert as_stored(replace(ours, order=None)) == as_stored(nearest) and ours.note == ""
    correlated = gptq(weight, hessian_of(inputs), 3, group_size, kind=kind, **options)
    assert as_stored(replace(correlated, order=None)) != as_stored(nearest)


@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_output_error_is_below_that_of_rtn(bits, group_size, symmetric):
    """The mean of 10 seeds, correlated inputs; and what is left equals what the inputs themselves show."""
    ratios = []
    for seed in range(10):
        weight, inputs = draw(seed)
        hessian = statistics_of(inputs).hessian
        ours = gptq(weight, hessian, bits, group_size, symmetric).dequantize()
        nearest = rtn(weight, bits, group_size, symmetric).dequantize()
        ratios.append(output_error(weight, ours, hessian) / output_error(weight, nearest, hessian))
        shown = ((weight - ours) @ inputs.T).square().sum(0).mean().item()
        assert output_error(weight, ours, hessian) == pytest.approx(shown, rel=1e-4)
    print(f"{bits} bits, groups of {group_size}, symmetric {symmetric}: {sum(ratios) / 10:.3f} of the error of rtn")
    assert sum(ratios) / 10 < 0.9
    alone = gptq(weight, hessian.diagonal().diag(), bits, group_size, symmetric).dequantize()
    assert torch.equal(alone, nearest)  # without what inputs have in common nothing is gained


def test_clip_counts_errors_by_the_size_of_their_inputs():
    weight, inputs = draw(4)
    hessian = hessian_of(inputs * torch.logspace(-1, 1, 64)).diagonal().diag()  # then only the grids differ from rtn
    both = gptq(weight, hessian, 3, 64, clip=True), rtn(weight, 3, 64, clip=True)
    errors = [output_error(weight, quantized.dequantize(), hessian) for quantized in both]
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize("options", [{}, {"act_order": True}, {"static_groups": True, "act_order": True}], ids=str)
def test_clip_leaves_a_smaller_error_of_the_output_at_few_bits(options):
    errors = {True: 0.0, False: 0.0}
    for seed in range(10):
        weight, inputs = draw(seed)
        hessian = hessian_of(inputs * torch.logspace(-1, 1, 64))
        for clip in errors:
            errors[clip] += output_error(
                weight, gptq(weight, hessian, 2, 16, clip=clip, **options).dequantize(), hessian
            )
    print(f"{options}: clipping leaves {errors[True] / errors[False]:.3f} of the error")
    assert errors[True] < 0.9 * errors[False]


def test_act_order_is_kept_only_where_groups_need_it():
    weight, inputs = draw(5)
    hessian = hessian_of(inputs * torch.logspace(1, -1, 64)[torch.randperm(64)])
    ordered = gptq(weight, hessian, 4, 16, act_order=True)
    assert ordered.order.tolist() == hessian.diagonal().argsort(descending=True).tolist()
    assert gptq(weight, hessian, 4, 16, act_order=True, static_groups=True).order is None
    assert gptq(weight, hessian, 4, None, act_order=True).order is None
    assert not torch.equal(ordered.dequantize(), replace(ordered, order=None).dequantize())


def test_static_groups_have_the_grids_of_rtn():
    weight, inputs = draw(6)
    nearest, hessian = rtn(weight, 4, 16), hessian_of(inputs)
    for act_order in (False, True):
        ours = gptq(weight, hessian, 4, 16, static_groups=True, act_order=act_order)
        assert torch.equal(ours.scale, nearest.scale) and torch.equal(ours.zero, nearest.zero)
    assert not torch.equal(gptq(weight, hessian, 4, 16).scale, nearest.scale)


def test_what_is_given_is_left_as_it_is():
    weight, inputs = draw(7)
    weight = torch.nn.Parameter(weight)
    hessian = hessian_of(inputs)
    before = weight.clone(), hessian.clone()
    quantized = gptq(weight, hessian, 4, 16)
    assert torch.equal(weight, before[0]) and torch.equal(hessian, before[1])
    assert not any(tensor.requires_grad for tensor in quantized.tensors.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_rounded_as_the_same_numbers_in_float32(dtype):
    weight, inputs = draw(8)
    weight, hessian = weight.to(dtype), hessian_of(inputs)
    assert as_stored(gptq(weight, hessian, 4, 16)) == as_stored(gptq(weight.float(), hessian, 4, 16))


# Inputs that are not easy


def finite(quantized):
    assert quantized.dequantize().isfinite().all() and quantized.scale.isfinite().all()
    return quantized


@pytest.mark.parametrize("act_order", [False, True])
def test_dead_inputs_get_weight_zero_and_do_not_matter_to_the_others(act_order):
    weight, inputs = draw(9)
    dead = torch.zeros(64, dtype=torch.bool)
    dead[[5, 40]] = True
    inputs[:, dead] = 0
    ours = finite(gptq(weight, hessian_of(inputs), 4, act_order=act_order)).dequantize()
    assert (ours[:, dead] == 0).all() and not (rtn(weight, 4).dequantize()[:, dead] == 0).all()
    weight[:, dead] = 0
    without = gptq(weight[:, ~dead], hessian_of(inputs[:, ~dead]), 4, act_order=act_order).dequantize()
    torch.testing.assert_close(ours[:, ~dead], without)


def test_duplicated_inputs():
    """Two equal inputs: together their two weights round as one would on a grid twice as fine, or better."""
    weight, inputs = draw(10)
    inputs[:, 1] = inputs[:, 0]
    hessian = hessian_of(inputs)
    ours, nearest = finite(gptq(weight, hessian, 4)), rtn(weight, 4)
    assert ours.note == ""
    assert output_error(weight, ours.dequantize(), hessian) < output_error(weight, nearest.dequantize(), hessian)
    both = [(weight - q.dequantize())[:, :2].sum(1).square().mean() for q in (ours, nearest)]
    assert both[0] < both[1]


@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_fewer_samples_than_inputs(bits, act_order, group_size):
    """8 samples of 64 inputs, one duplicated and two dead."""
    weight, inputs = draw(11, samples=8)
    inputs[:, [3, 4]], inputs[:, 9] = 0, inputs[:, 8]
    hessian = hessian_of(inputs)
    ours = finite(gptq(weight, hessian, bits, group_size, act_order=act_order)).dequantize()
    assert output_error(weight, ours, hessian) < output_error(
        weight, rtn(weight, bits, group_size).dequantize(), hessian
    )


def test_damping_is_raised_when_there_is_no_factor_and_the_note_says_so():
    weight, inputs = draw(12)
    inputs[:, 1] = inputs[:, 0]
    hessian = hessian_of(inputs)
    hessian[0, 1] = hessian[1, 0] = 1.05 * hessian[0, 0]  # as rounding may make it, but worse
    ours = finite(gptq(weight, hessian, 4))
    assert ours.note == "Damping was raised to 0.1: H is near singular."
    assert torch.equal(ours.codes, gptq(weight, hessian, 4, damping=0.1).codes)
    assert gptq(weight, hessian, 4, damping=0.1).note == ""


def test_no_damping_at_all():
    weight, inputs = draw(12, samples=8)
    ours = finite(gptq(weight, statistics_of(inputs).hessian, 4, damping=0))
    assert re.fullmatch(r"Damping was raised to 0.01: H is near singular\.", ours.note)
    assert gptq(weight, hessian_of(draw(12)[1]), 4, damping=0).note == ""


def test_a_matrix_that_is_no_hessian_gives_rtn_and_the_note_says_so():
    weight, hessian = draw(13)[0], torch.eye(64)
    hessian[0, 1] = hessian[1, 0] = -100
    ours = gptq(weight, hessian, 4, 16)
    assert as_stored(ours) == as_stored(rtn(weight, 4, 16))
    assert ours.note == "H has no Cholesky factor, even with a damping of 10: rounded to nearest."


@pytest.mark.parametrize("options", [{}, {"act_order": True}, {"clip": True}], ids=str)
def test_without_any_input_it_is_rtn_and_the_note_says_so(options):
    weight = draw(14)[0]
    ours = gptq(weight, torch.zeros(64, 64), 4, 16, **options)
    assert as_stored(ours) == as_stored(rtn(weight, 4, 16, clip=options.get("clip", False)))
    assert ours.note == "Every input was 0 in the calibration: rounded to nearest."


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (64, 1), (3, 5)])
def test_small_matrices(shape):
    weight, inputs = draw(15, *shape)
    ours = finite(gptq(weight, hessian_of(inputs), 4, block_size=2))
    assert ours.shape == shape and (weight - ours.dequantize()).abs().max() < 3


def test_rows_of_zeros_and_equal_numbers_stay_what_they_are():
    weight, inputs = draw(16)
    weight[3], weight[4] = 0, 0.5
    ours = finite(gptq(weight, hessian_of(inputs), 4)).dequantize()
    assert (ours[3] == 0).all() and (ours[4] - 0.5).abs().max() < 5e-4  # the scale is 0.5 / 15 in float16


def spoiled(tensor, value):
    tensor = tensor.clone()
    tensor[1, 1] = value
    return tensor


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group_size": 24}, "give one of 8, 16, 32, 64, or None"),
        ({"group_size": 0}, "group_size=0 must be a whole number of at least 1"),
        ({"bits": 5}, "bits=5 must be one of 2, 3, 4, 8"),
        ({"kind": "nf4"}, "GPTQ rounds onto even grids here: give a kind other than nf4, or use nf4 or rtn instead."),
        ({"damping": -0.1}, "damping=-0.1 must be a number of at least 0"),
        ({"damping": float("nan")}, "damping=nan must be a number of at least 0"),
        ({"damping": True}, "damping=True must be a number of at least 0"),
        ({"block_size": 0}, "block_size=0 must be a whole number of at least 1"),
        ({"act_order": 1}, "act_order=1 must be True or False"),
        ({"static_groups": "no"}, "static_groups='no' must be True or False"),
        ({"weight": torch.zeros(64)}, "weight must be a matrix (output channels, inputs), got shape (64,)"),
        ({"weight": spoiled(torch.zeros(8, 64), torch.nan)}, "weight has numbers that are infinite or NaN"),
        ({"weight": spoiled(torch.zeros(8, 64), torch.inf)}, "weight has numbers that are infinite or NaN"),
        ({"hessian": spoiled(torch.eye(64), torch.nan)}, "hessian has numbers that are infinite or NaN"),
        ({"hessian": spoiled(torch.eye(64), torch.inf)}, "hessian has numbers that are infinite or NaN"),
        ({"hessian": spoiled(torch.eye(64), -1)}, "hessian has a negative diagonal"),
        ({"hessian": torch.eye(32)}, "A weight of 64 columns needs a hessian of shape (64, 64), got (32, 32)"),
        ({"hessian": torch.ones(64)}, "A weight of 64 columns needs a hessian of shape (64, 64), got (64,)"),
        ({"hessian": torch.eye(64).roll(1, 0)}, "hessian must be symmetric"),
        ({"weight": torch.full((8, 64), 1e-8)}, "Numbers of a group go up to 1e-08 only"),
        ({"foo": 2}, "There is no option foo: those of a grid are kind, clip, scale_dtype."),
        ({"hessian": None}, "hessian must be a tensor of floating point numbers, got NoneType"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, says):
    good = {"weight": torch.randn(8, 64), "hessian": torch.eye(64), "bits": 4, "group_size": 16}
    gptq(**good)
    with pytest.raises(ValueError, match=re.escape(says)):
        gptq(**{**good, **change})
