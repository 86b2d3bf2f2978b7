"""Grids against examples worked by hand, the published values of NF4, and a search over every value of a grid."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourse.quant import grid as grids
from kvcourse.quant.grid import Grid, as_grid, decode, encode, fit, in_dtype, nf4_levels, require_scales, rounded_up

FLOAT32 = {"scale_dtype": torch.float32}
EVEN = ("zero_point", "symmetric", "minimum")

# QLoRA, arXiv 2305.14314, appendix E; the same in bitsandbytes.
PUBLISHED_NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def on_grid(numbers, grid):
    """(values, codes, scale, zero) of one group of numbers."""
    x = torch.as_tensor(numbers, dtype=torch.float32)
    scale, zero = fit(x, grid)
    codes = encode(x, scale, zero, grid)
    return decode(codes, scale, zero, grid), codes, scale, zero


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def all_values(scale, zero, grid):
    """Every value of the grid of each group `(..., 2^bits)`."""
    return decode(torch.arange(2**grid.bits, dtype=torch.uint8).expand(*scale.shape[:-1], -1), scale, zero, grid)


@pytest.mark.parametrize(
    "kind, ends, code, value",
    [
        ("symmetric", [-0.7, 0.4], 8 + 2, 0.2),  # steps of 0.1: 0.237 lies between 0.2 and 0.3
        ("zero_point", [-0.5, 1.0], 5 + 2, 0.2),  # steps of 0.1, five of them below 0
        ("minimum", [-1.0, 1.0], 9, -1 + 9 * 2 / 15),  # 1.237 / (2 / 15) = 9.28
        ("nf4", [-1.0, 0.5], 10, 0.24611230194568634),
    ],
)
def test_0_237_becomes_the_nearest_of_16_values(kind, ends, code, value):
    values, codes, *_ = on_grid([*ends, 0.237], Grid(4, kind=kind, **FLOAT32))
    assert codes[2] == code and values[2].item() == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize(
    "numbers, expected", [([1, 2.1], [0.98, 2.1]), ([9, 9], [9, 9]), ([-1, -2.1], [-0.98, -2.1]), ([-9, -9], [-9, -9])]
)
def test_a_group_of_one_sign_keeps_0_on_its_grid_and_reaches_its_end(numbers, expected):
    values, _, scale, zero = on_grid(numbers, Grid(4))
    assert values.tolist() == pytest.approx(expected, rel=1e-3)
    assert zero == (0 if numbers[0] > 0 else 15) and scale.item() == pytest.approx(
        max(map(abs, numbers)) / 15, rel=1e-3
    )


def test_a_zero_point_without_0_in_the_range_would_clip():
    """What others did: the scale from the ends alone, 1.1 / 15, and a zero point that cannot go below code 0."""
    scale, zero = torch.tensor([1.1 / 15]), torch.tensor([0], dtype=torch.uint8)
    values = decode(encode(torch.tensor([1, 2.1]), scale, zero, Grid(4)), scale, zero, Grid(4))
    assert values.tolist() == pytest.approx([1.1 * 14 / 15, 1.1])


def test_a_symmetric_scale_is_from_the_largest_magnitude_to_the_code_15():
    grid = Grid(4, kind="symmetric", **FLOAT32)
    values, codes, scale, zero = on_grid([0.34, 0.7], grid)
    assert codes.tolist() == [8 + 3, 15] and zero is None and scale.item() == pytest.approx(0.1)
    assert values.tolist() == pytest.approx([0.3, 0.7])
    from_0 = torch.tensor([0.7 / 15])  # what others did: the upper half has no codes
    assert decode(encode(torch.tensor([0.7]), from_0, None, grid), from_0, None, grid).item() == pytest.approx(
        0.7 * 7 / 15
    )


def largest_error_in_scales(x, grid):
    scale, zero = fit(x, grid)
    error = (decode(encode(x, scale, zero, grid), scale, zero, grid) - x).abs()
    visible = torch.finfo(torch.float32).eps * (x.abs() + scale.float())  # what float32 cannot tell
    return ((error - 2 * visible) / scale.float()).max().item()


CASES = [
    (magnitude, offset, bits, dtype)
    for magnitude in (1e-6, 1e-3, 1.0, 1000.0)
    for offset in (-3, 0, 3)
    for bits in (2, 3, 4, 8)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
]


@pytest.mark.parametrize("kind", EVEN)
def test_no_number_is_off_by_more_than_half_the_stored_scale(kind):
    for magnitude, offset, bits, dtype in CASES:
        x = (normal(40, 16) + offset) * magnitude
        x[0], x[1], x[2] = x[0].abs(), -x[1].abs(), x[2, :1]  # of one sign; all equal
        assert largest_error_in_scales(x, Grid(bits, kind=kind, scale_dtype=dtype)) <= 0.5


@pytest.mark.parametrize("kind", EVEN)
def test_that_bound_breaks_when_the_scale_is_rounded_to_nearest(kind, monkeypatch):
    monkeypatch.setattr(grids, "rounded_up", lambda numbers, dtype: numbers.to(dtype))
    worst = 0
    for _, offset, bits, dtype in CASES:
        for magnitude in (1e-5, 1.0):
            x = (normal(40, 16) + offset) * magnitude
            worst = max(worst, largest_error_in_scales(x, Grid(bits, kind=kind, scale_dtype=dtype)))
    assert worst > 0.6


@pytest.mark.parametrize("kind", ["zero_point", "symmetric", "nf4"])
@pytest.mark.parametrize("offset", [-3, 0, 3])
def test_an_exact_0_stays_0(kind, offset):
    for bits in (4,) if kind == "nf4" else (2, 3, 4, 8):
        for dtype in grids.SCALE_DTYPES:
            x = normal(20, 16) + offset
            x[:, 5] = 0
            x[3] = 0
            values, *_ = on_grid(x, Grid(bits, kind=kind, scale_dtype=dtype))
            assert (values[:, 5] == 0).all() and (values[3] == 0).all()


def test_on_a_grid_with_a_minimum_0_need_not_stay_0_but_a_group_of_equal_numbers_does():
    values, *_ = on_grid([-1.0, 0, 1.1], Grid(2, kind="minimum"))
    assert values[1] != 0
    values, codes, *_ = on_grid([[0, 0], [9, 9], [-0.25, -0.25]], Grid(2, kind="minimum"))
    assert values.tolist() == [[0, 0], [9, 9], [-0.25, -0.25]] and (codes == 0).all()


@pytest.mark.parametrize("kind", grids.KINDS)
@pytest.mark.parametrize("dtype", grids.SCALE_DTYPES)
def test_codes_are_nearest_on_the_grid_that_is_read_back(kind, dtype):
    for bits in (4,) if kind == "nf4" else (2, 3, 4, 8):
        grid = Grid(bits, kind=kind, scale_dtype=dtype)
        for magnitude in (0.001, 1000.0):
            x = normal(30, 24) * magnitude
            scale, zero = fit(x, grid)
            assert scale.dtype == dtype and (kind != "minimum" or zero.dtype == dtype)
            nearest = (all_values(scale, zero, grid)[:, None] - x[..., None]).abs().amin(-1)
            error = (decode(encode(x, scale, zero, grid), scale, zero, grid) - x).abs()
            assert torch.allclose(error, nearest, rtol=0, atol=1e-6 * magnitude)


def test_codes_chosen_with_a_scale_that_is_rounded_afterwards_are_not_nearest():
    grid = Grid(8, scale_dtype=torch.bfloat16)
    x = normal(30, 24)
    scale, zero = fit(x, grid)
    unrounded = (x.amax(-1, keepdim=True).clamp(min=0) - x.amin(-1, keepdim=True).clamp(max=0)) / 255
    nearest = (all_values(scale, zero, grid)[:, None] - x[..., None]).abs().amin(-1)
    error = (decode(encode(x, unrounded, zero, grid), scale, zero, grid) - x).abs()
    assert (error - nearest).max() > 0.5 * scale.float().max()


def every_finite(dtype):
    """All numbers that a type of 16 bits holds, in order, from their bit patterns and without torch."""
    patterns = np.arange(2**16, dtype=np.uint32)
    if dtype == torch.float16:
        numbers = patterns.astype(np.uint16).view(np.float16)
    else:
        numbers = (patterns << 16).view(np.float32)
    return np.unique(numbers[np.isfinite(numbers)].astype(np.float64))


EVERY = {dtype: every_finite(dtype) for dtype in (torch.float16, torch.bfloat16)}


@settings(max_examples=300, deadline=None)
@given(
    number=st.floats(-60000, 60000, width=32) | st.floats(-(2**-20), 2**-20, width=32), dtype=st.sampled_from([*EVERY])
)
def test_rounded_up_is_the_next_number_that_the_type_holds(number, dtype):
    holds = EVERY[dtype]
    assert rounded_up(torch.tensor(number), dtype).item() == holds[np.searchsorted(holds, number)]
    assert rounded_up(torch.tensor(number), torch.float32).item() == number


def test_to_the_nearest_is_not_rounded_up():
    third = torch.tensor(1 / 3)
    assert third.half() < third < rounded_up(third, torch.float16)


def best_by_hand(x, kind, bits, importance, shrink_minimum_about_middle=True):
    """The squared error of the best of the 11 grids of a group, in float64 and group by group."""
    best = np.inf
    for step in range(11):
        low, high = float(x.min()), float(x.max())
        middle = (low + high) / 2 if kind == "minimum" and shrink_minimum_about_middle else 0
        low, high = (middle + (1 - step / 20) * (end - middle) for end in (low, high))
        top = 2**bits - 1
        if kind == "symmetric":
            zero, scale = 2 ** (bits - 1), max(-low, high) / (2 ** (bits - 1) - 1)
            values = (np.arange(top + 1) - zero) * scale
        elif kind == "zero_point":
            scale = (max(high, 0) - min(low, 0)) / top
            values = (np.arange(top + 1) - np.clip(np.round(-min(low, 0) / scale), 0, top)) * scale
        else:
            values = low + np.arange(top + 1) * (high - low) / top
        nearest = np.abs(values[:, None] - x[None]).min(0)
        best = min(best, float((nearest**2 * importance).sum()))
    return best


@pytest.mark.parametrize("kind", EVEN)
@pytest.mark.parametrize("weighted", [False, True])
def test_clipping_finds_the_best_of_eleven_grids(kind, weighted):
    x = normal(25, 32)
    x[:, 3] *= 3
    x = x + (1000 if kind == "minimum" else 0)
    importance = normal(32, seed=1).square() if weighted else torch.ones(32)
    grid = Grid(3, kind=kind, clip=True, **FLOAT32)
    scale, zero = fit(x, grid, importance if weighted else None)
    squares = (decode(encode(x, scale, zero, grid), scale, zero, grid) - x).square()
    expected = [best_by_hand(row, kind, 3, importance.double().numpy()) for row in x.double().numpy()]
    assert (squares * importance).sum(-1).tolist() == pytest.approx(expected, rel=1e-3)

    unclipped = fit(x, Grid(3, kind=kind, **FLOAT32))
    without = (decode(encode(x, *unclipped, grid), *unclipped, grid) - x).square()
    assert ((squares * importance).sum(-1) <= (without * importance).sum(-1)).all()
    assert (squares * importance).sum() < 0.95 * (without * importance).sum()


def test_a_minimum_that_shrinks_towards_0_finds_nothing():
    """Numbers about 1000: 0.95 of both ends is a grid with none of them on it."""
    x = (normal(25, 32) + 1000).double().numpy()
    towards_0 = sum(best_by_hand(row, "minimum", 3, 1, shrink_minimum_about_middle=False) for row in x)
    about_the_middle = sum(best_by_hand(row, "minimum", 3, 1) for row in x)
    assert about_the_middle < 0.95 * towards_0


def test_clipping_leaves_a_grid_alone_that_fits_exactly():
    x = torch.arange(16.0) - 5
    assert on_grid(x, Grid(4, clip=True))[0].tolist() == x.tolist()


def test_nf4_has_the_published_values_to_the_last_bit():
    assert torch.equal(nf4_levels(), torch.tensor(PUBLISHED_NF4))
    assert not torch.equal(-nf4_levels().flip(0), torch.tensor(PUBLISHED_NF4))


def test_nf4_rounds_to_the_nearest_published_value():
    x = normal(20, 64)
    values, codes, scale, _ = on_grid(x, Grid(4, kind="nf4", **FLOAT32))
    assert torch.equal(scale, x.abs().amax(-1, keepdim=True))
    distances = (torch.tensor(PUBLISHED_NF4) * scale[..., None] - x[..., None]).abs()
    assert torch.equal(codes.long(), distances.argmin(-1))
    assert torch.equal(values, torch.tensor(PUBLISHED_NF4)[codes.long()] * scale)


@pytest.mark.parametrize("kind", grids.KINDS)
def test_numbers_of_every_type_are_rounded_as_their_float32(kind):
    grid = Grid(4, kind=kind)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = normal(8, 16).to(dtype)
        scale, zero = fit(x, grid)
        expected = on_grid(x.float(), grid)
        assert torch.equal(scale, expected[2]) and (zero is None or torch.equal(zero, expected[3]))
        assert torch.equal(encode(x, scale, zero, grid), expected[1])


def test_grids_keep_no_graph():
    scale, _ = fit(normal(2, 8).requires_grad_(), Grid(4))
    assert not scale.requires_grad


@pytest.mark.parametrize(
    "number, dtype, says",
    [
        (1e6, torch.float16, "A scale of 1e+06 is too large for float16, which ends at ±6.55e+04"),
        (float("nan"), torch.float16, "infinite, NaN"),
        (float("inf"), torch.float32, "infinite, NaN"),
    ],
)
def test_a_group_that_no_scale_of_the_type_can_hold_is_refused(number, dtype, says):
    with pytest.raises(ValueError) as refused:
        fit(torch.tensor([number, 0]), Grid(2, kind="symmetric", scale_dtype=dtype))
    assert says in str(refused.value)


# float16 has numbers down to 2^-24. A group needs a scale of its largest magnitude over as many steps.
STEPS = {"zero_point": 15, "symmetric": 7, "minimum": 15, "nf4": 1}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("beside", [0, 1])
def test_a_group_that_needs_a_smaller_scale_than_the_type_has_is_refused(kind, beside):
    least = STEPS[kind] * 2.0**-24
    groups = torch.tensor([[[0.0, 0, 0], [0, least, -least / 2], [beside, 2, 3]]])
    assert require_scales(groups, Grid(4, kind=kind)) is groups
    groups[0, 1] /= 1.01
    with pytest.raises(
        ValueError, match="go up to .* only, .* begins at 5.96e-08; .* give scale_dtype=torch.bfloat16 or"
    ):
        require_scales(groups, Grid(4, kind=kind))
    for wider in (torch.bfloat16, torch.float32):
        require_scales(groups, Grid(4, kind=kind, scale_dtype=wider))


def test_where_float32_ends_too():
    with pytest.raises(
        ValueError, match="too small for float32, which begins at 1.401e-45.*: multiply them with a large"
    ):
        require_scales(torch.tensor([5e-45, 0]), Grid(4, **FLOAT32))


@pytest.mark.parametrize("kind", EVEN)
def test_the_smallest_scale_loses_a_bit_at_most(kind):
    """And a little less than that would lose more: all of the group in the end."""
    x = torch.linspace(-1, 1, 16) * STEPS[kind] * 2.0**-24
    values = on_grid(x, Grid(4, kind=kind))[0]
    assert (values - x).abs().max() <= 2.0**-24 and values.unique().numel() >= 8
    assert on_grid(x / 40, Grid(4, kind=kind))[0].unique().numel() == 1


def test_values_just_beyond_float16_become_its_largest_number():
    end = 65504.0
    values, *_ = on_grid([end, -end, 0, 1], Grid(4, kind="minimum"))
    assert values[0] > end + 16 and values.half().isinf().any()  # by itself it overflows
    assert in_dtype(values, torch.float16)[:2].tolist() == [end, -end]
    assert torch.equal(in_dtype(values, torch.float32), values)
    assert in_dtype(torch.tensor([1e6, -1e6, torch.nan]), torch.float16).isfinite().sum() == 0  # too far to be rounding


def test_a_minimum_too_large_for_its_type_is_refused_and_the_advice_works():
    x = torch.tensor([-1e5, -1e5 + 1])
    with pytest.raises(ValueError, match=r"minimum of -1e\+05 is too large for float16.*scale_dtype=torch.float32"):
        fit(x, Grid(4, kind="minimum"))
    assert on_grid(x, Grid(4, kind="minimum", **FLOAT32))[0].tolist() == pytest.approx(x.tolist())


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"bits": 5}, "bits=5 must be one of 2, 3, 4, 8"),
        ({"bits": 0}, "bits=0 must be one of 2, 3, 4, 8"),
        ({"bits": 4.0}, "bits=4.0 must be one of 2, 3, 4, 8"),
        ({"bits": "4"}, "bits='4' must be one of 2, 3, 4, 8"),
        ({"bits": True}, "bits=True must be one of"),
        ({"group_size": -1}, "group_size=-1 must be a whole number of at least 1, None for one grid a row"),
        ({"group_size": 0}, "group_size=0 must be a whole number of at least 1, None for one grid a row"),
        ({"group_size": 32.0}, "group_size=32.0 must be a whole number"),
        ({"group_size": "row"}, "group_size='row' must be a whole number"),
        ({"group_size": False}, "group_size=False must be a whole number"),
        ({"kind": "asymmetric"}, "kind='asymmetric' must be one of zero_point, symmetric, minimum, nf4"),
        ({"bits": 8, "kind": "nf4"}, "bits must be 4, got 8"),
        ({"clip": "no"}, "clip='no' must be True or False"),
        ({"scale_dtype": torch.float64}, "must be torch.float16, torch.bfloat16 or torch.float32"),
        ({"symmetric": "no"}, "symmetric='no' must be True or False"),
        ({"symmetric": True, "kind": "nf4"}, "symmetric=True contradicts kind='nf4'"),
        ({"foo": 1}, "There is no option foo: those of a grid are kind, clip, scale_dtype."),
    ],
)
def test_what_is_no_grid_is_refused(arguments, says):
    with pytest.raises(ValueError) as refused:
        as_grid(**{"bits": 4, **arguments})
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "group_size, columns, fitting",
    [
        (32, 100, "10, 20, 25, 50, 100"),
        (128, 100, "10, 20, 25, 50, 100"),
        (4, 6, "1, 2, 3, 6"),
        (32, 101, "101"),
        (128, 576, "8, 9, 12, 16, 18, 24, 32, 36, 48, 64, 72, 96, 144, 192, 288, 576"),
    ],
)
def test_groups_that_do_not_divide_a_row_are_refused_with_what_would(group_size, columns, fitting):
    with pytest.raises(ValueError) as refused:
        Grid(4, group_size).size(columns)
    assert f"A row of {columns} numbers does not divide into groups of group_size={group_size}" in str(refused.value)
    assert f"give one of {fitting}, or None" in str(refused.value)
    for size in fitting.split(", "):
        assert Grid(4, int(size)).size(columns) == int(size)


def test_whole_numbers_of_numpy_are_whole_numbers():
    assert as_grid(np.int64(4), np.int32(32)) == Grid(4, 32)
    assert as_grid(4, None).size(7) == as_grid(4, "tensor").size(7) == 7
