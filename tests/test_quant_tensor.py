"""Stored matrices against examples worked by hand, sizes worked by hand, and rounding done apart in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourse.quant.grid import KINDS, Grid
from kvcourse.quant.statistics import InputStatistics, output_error
from kvcourse.quant.tensor import QuantizedTensor, nf4, rtn

EVEN = ("zero_point", "symmetric", "minimum")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_zero_points_are_stored_as_they_are_and_dequantizing_is_q_minus_z_times_s():
    """Rows with zero points 0, 1, 8, 15. Stored less one, as an older format does, 0 would wrap to 15."""
    codes = torch.tensor([[0, 3, 15, 8]] * 4, dtype=torch.uint8)
    scale = torch.tensor([[1.0], [0.5], [2.0], [0.25]]).half()
    zero = torch.tensor([[0], [1], [8], [15]], dtype=torch.uint8)
    stored = QuantizedTensor.of(codes, scale, zero, Grid(4))
    assert stored.codes.tolist() == [[0x30, 0x8F]] * 4 and stored.zero.tolist() == [[0], [1], [8], [15]]
    expected = [[0, 3, 15, 8], [-0.5, 1, 7, 3.5], [-16, -10, 14, 0], [-3.75, -3, 0, -1.75]]
    assert stored.dequantize().tolist() == expected
    one_less = QuantizedTensor.of(codes, scale, (zero - 1) & 15, Grid(4)).dequantize()
    assert (one_less != stored.dequantize()).all()


def test_zero_points_of_neighbouring_groups_share_bytes():
    zero = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
    stored = QuantizedTensor.of(torch.zeros(1, 6, dtype=torch.uint8), torch.ones(1, 3).half(), zero, Grid(4, 2))
    assert stored.zero.tolist() == [[0x21, 0x03]]
    assert stored.dequantize().tolist() == [[-1, -1, -2, -2, -3, -3]]


def test_zeros_on_a_symmetric_grid_are_code_8():
    stored = rtn(torch.zeros(1, 8), 4, symmetric=True)
    assert stored.codes.tolist() == [[0x88] * 4] and stored.dequantize().tolist() == [[0] * 8]


def test_two_groups_of_a_row_worked_by_hand():
    """Symmetric, 4 bits: steps of 7 / 7 and of 3.5 / 7."""
    stored = rtn(torch.tensor([[7, -2.4, 0.1, -3.5, 1.3, 0.2]]), 4, 3, symmetric=True)
    codes, scale, zero = stored.unpacked()
    assert scale.tolist() == [[1, 0.5]] and zero is None
    assert codes.tolist() == [[15, 6, 8, 1, 11, 8]]
    assert stored.dequantize().tolist() == [[7, -2, 0, -3.5, 1.5, 0]]


def rounded_apart(weight, scale, zero, kind, bits):
    """Rounded groups `(rows, groups, n)` in float32, by NumPy, given the scale and zero `(rows, groups, 1)` stored."""
    weight, scale = np.float32(weight), np.float32(scale)
    top, center = 2**bits - 1, 2 ** (bits - 1)
    if kind == "minimum":
        low = np.float32(zero)
        return np.clip(np.rint((weight - low) / scale), 0, top) * scale + low
    middle = np.float32(center if kind == "symmetric" else zero)
    return (np.clip(np.rint(weight / scale) + middle, 0, top) - middle) * scale


@pytest.mark.parametrize("kind", EVEN)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [None, 8, "tensor"])
def test_what_is_stored_is_the_rounded_weight_bit_for_bit(kind, bits, group_size):
    weight = normal(5, 24)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        stored = rtn(weight, bits, group_size, kind=kind, scale_dtype=dtype)
        _, scale, zero = stored.unpacked()
        groups = weight.reshape(1, 1, -1) if group_size == "tensor" else weight.reshape(5, -1, group_size or 24)
        scale, zero = (None if part is None else part.float().numpy()[..., None] for part in (scale, zero))
        expected = rounded_apart(groups.numpy(), scale, zero, kind, bits).reshape(5, 24)
        assert np.array_equal(stored.dequantize().numpy(), expected)
        assert not np.array_equal(
            rounded_apart(groups.numpy(), scale * 1.01, zero, kind, bits).reshape(5, 24), expected
        )
        assert torch.equal(stored.dequantize(torch.bfloat16), torch.from_numpy(expected).bfloat16())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 4),
    groups=st.integers(1, 4),
    size=st.integers(1, 9),
    bits=st.sampled_from([2, 3, 4, 8]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_codes_scales_and_zeros_come_back_as_they_went_in(rows, groups, size, bits, kind, seed):
    bits = 4 if kind == "nf4" else bits
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, groups * size), dtype=torch.uint8, generator=draw)
    scale = torch.rand(rows, groups, generator=draw).half()
    zero = None
    if kind == "zero_point":
        zero = torch.randint(0, 2**bits, (rows, groups), dtype=torch.uint8, generator=draw)
    if kind == "minimum":
        zero = torch.randn(rows, groups, generator=draw).half()
    stored = QuantizedTensor.of(codes, scale, zero, Grid(bits, size, kind))
    back = stored.unpacked()
    assert torch.equal(back[0], codes) and torch.equal(back[1], scale)
    assert back[2] is None if zero is None else torch.equal(back[2], zero)
    assert stored.nbytes == QuantizedTensor.bytes_for((rows, groups * size), bits, size, kind=kind)


# 64 rows of 96 numbers, so 3 groups of 32. Bits a weight: those of the code and, shared by the group, those of scale,
# minimum or zero point; zero points of a row end at a whole byte: 3 of 4 bits in 2 bytes.
SIZES = [
    (dict(bits=8), 64 * (96 + 2 + 1)),
    (dict(bits=8, symmetric=True), 64 * (96 + 2)),
    (dict(bits=4, group_size=32, symmetric=True), 64 * (48 + 3 * 2)),  # 4.5 bits
    (dict(bits=4, group_size=32, kind="minimum"), 64 * (48 + 3 * 4)),  # 5 bits
    (dict(bits=4, group_size=32), 64 * (48 + 3 * 2 + 2)),
    (dict(bits=4, group_size=32, kind="nf4", scale_dtype=torch.float32), 64 * (48 + 3 * 4)),
    (dict(bits=3, group_size=32, symmetric=True), 64 * (36 + 3 * 2)),  # 3.5 bits
    (dict(bits=2, group_size=32, kind="minimum", scale_dtype=torch.bfloat16), 64 * (24 + 3 * 4)),
    (dict(bits=3, group_size="tensor"), 64 * 36 + 2 + 1),
    (dict(bits=4, group_size="tensor", kind="minimum", scale_dtype=torch.float32), 64 * 48 + 8),
]


@pytest.mark.parametrize("arguments, expected", SIZES)
def test_bytes_held_are_those_worked_by_hand_and_of_the_formula(arguments, expected):
    stored = rtn(normal(64, 96), **arguments)
    assert stored.nbytes == expected == QuantizedTensor.bytes_for((64, 96), **arguments)
    assert stored.bits_per_weight == pytest.approx(8 * expected / (64 * 96))
    stored.dequantize()
    assert stored.nbytes == expected  # nothing is kept from dequantizing


def test_rows_of_an_odd_number_of_4_bit_codes_end_at_a_whole_byte():
    stored = rtn(normal(3, 7), 4, symmetric=True)
    assert stored.nbytes == 3 * (4 + 2) and stored.dequantize().shape == (3, 7)


def test_bytes_held_count_memory_that_a_view_keeps_alive():
    stored = rtn(normal(2, 8), 4, symmetric=True)
    large = torch.zeros(2, 1000, dtype=torch.uint8)
    view = QuantizedTensor(large[:, :4], stored.scale, None, stored.grid, stored.shape)
    assert view.nbytes == 2000 + 2 * 2 and stored.nbytes == 2 * (4 + 2)


def test_of_keeps_no_view_of_what_it_was_given():
    long = torch.ones(1000, 1).half()
    stored = QuantizedTensor.of(torch.zeros(2, 8, dtype=torch.uint8), long[:2], long[2:4], Grid(4, None, "minimum"))
    assert stored.nbytes == QuantizedTensor.bytes_for((2, 8), 4, kind="minimum")


def test_a_parameter_leaves_no_graph_behind():
    weight = torch.nn.Parameter(normal(4, 32))
    for kind in KINDS:
        stored = rtn(weight, 4, 8, kind=kind)
        assert not any(tensor.requires_grad for tensor in stored.tensors.values())
        assert torch.equal(stored.dequantize(), rtn(weight.detach(), 4, 8, kind=kind).dequantize())


def test_a_weight_that_is_a_transposed_view_is_rounded_as_its_copy():
    weight = normal(32, 16).T
    for kind in KINDS:
        copy = rtn(weight.contiguous(), 4, 8, kind=kind)
        assert torch.equal(rtn(weight, 4, 8, kind=kind).dequantize(), copy.dequantize())


def test_columns_in_another_order_go_back_to_their_places():
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    arguments = (codes, torch.ones(1, 2).half(), torch.tensor([[0, 1]], dtype=torch.uint8), Grid(4, 2))
    order = torch.tensor([2, 0, 3, 1])  # code 1 belongs to column 2, code 2 to column 0, ...
    assert QuantizedTensor.of(*arguments, order=order).dequantize().tolist() == [[2, 3, 1, 2]]
    assert QuantizedTensor.of(*arguments).dequantize().tolist() == [[1, 2, 2, 3]]


def test_columns_that_were_multiplied_are_divided():
    codes, scale = torch.tensor([[9, 10, 12]], dtype=torch.uint8), torch.ones(1, 1).half()
    stored = QuantizedTensor.of(codes, scale, None, Grid(4, None, "symmetric"), column_scale=torch.tensor([1, 2, 0.5]))
    assert stored.dequantize().tolist() == [[1, 1, 8]]


def test_to_another_device_keeps_all():
    stored = rtn(normal(2, 8), 4, 4)
    moved = stored.to("cpu")
    assert moved.grid == stored.grid and torch.equal(moved.dequantize(), stored.dequantize())
    assert stored.to("meta").tensors.keys() == stored.tensors.keys()


def test_nf4_of_two_groups_worked_by_hand():
    stored = nf4(torch.tensor([[2.0, -2, 0.4, 0, 0.1, -0.05, 0, 0.06]]), 4)
    assert stored.scale.tolist() == [[2, pytest.approx(0.1, rel=1e-3)]]
    assert stored.unpacked()[0].tolist() == [[15, 0, 9, 7, 15, 2, 7, 13]]
    assert stored.nbytes == 4 + 2 * 2
    assert nf4(normal(2, 128)).grid == Grid(4, 64, "nf4")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", EVEN)
def test_the_largest_numbers_of_float16_come_back_finite(bits, kind):
    weight = torch.tensor([[65504.0, -65504, 0, 1]])
    stored = rtn(weight, bits, kind=kind, scale_dtype=torch.float32 if bits == 2 else torch.float16)
    half = stored.dequantize(torch.float16)
    assert half.isfinite().all()
    assert torch.equal(half.float(), stored.dequantize().clamp(-65504, 65504).half().float())


def test_tiny_weights_are_kept_in_scales_that_can_and_refused_in_others():
    weight = normal(4, 64) * 1e-8
    with pytest.raises(ValueError, match="they would be lost: give scale_dtype=torch.bfloat16 or torch.float32"):
        rtn(weight, 4, 32)
    for dtype in (torch.bfloat16, torch.float32):
        kept = rtn(weight, 4, 32, scale_dtype=dtype).dequantize()
        assert (kept - weight).abs().max() < 0.25e-8
    assert rtn(weight * 0, 4, 32).dequantize().abs().max() == 0


def test_smaller_groups_and_more_bits_lose_less():
    weight = normal(16, 128)
    weight[:, 7] *= 10

    def loss(*arguments):
        return (rtn(weight, *arguments).dequantize() - weight).square().mean().item()

    assert loss(4, "tensor") > loss(4) > loss(4, 32) > loss(8, 32)


@pytest.mark.parametrize(
    "weight, arguments, says",
    [
        (torch.zeros(8), (4,), "weight must be a matrix (output channels, inputs), got shape (8,)"),
        (torch.zeros(0, 8), (4,), "got shape (0, 8)"),
        (torch.zeros(2, 8, dtype=torch.int64), (4,), "must be a tensor of floating point numbers, got torch.int64"),
        ([[1.0]], (4,), "must be a tensor of floating point numbers, got list"),
        (torch.tensor([[1, float("nan")]]), (4,), "infinite or NaN"),
        (torch.tensor([[1, float("-inf")]]), (4,), "infinite or NaN"),
        (torch.tensor([[1, 1e300]], dtype=torch.float64), (4,), "infinite or NaN"),
        (
            torch.zeros(2, 100),
            (4, 32),
            "A row of 100 numbers does not divide into groups of group_size=32: give one of 10",
        ),
        (torch.zeros(2, 100), (4, 128), "or None for the whole row"),
        (torch.zeros(2, 100), (4, -1), "group_size=-1 must be a whole number of at least 1, None for one grid a row"),
        (torch.zeros(2, 100), (4, 0), "group_size=0 must be a whole number of at least 1, None for one grid a row"),
        (torch.zeros(2, 100), (6,), "bits=6 must be one of 2, 3, 4, 8"),
        (torch.full((2, 4), 1e6), (2, None, True), "A scale of 1e+06 is too large for float16"),
        (torch.tensor([[1.0, 2, 1e-8, 0]]), (4, 2), "Numbers of a group go up to 1e-08 only"),
    ],
)
def test_what_cannot_be_rounded_is_refused(weight, arguments, says):
    with pytest.raises(ValueError) as refused:
        rtn(weight, *arguments)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(codes=torch.zeros(2, 5, dtype=torch.uint8)), "codes of a matrix (2, 8) on Grid(bits=4"),
        (dict(codes=torch.zeros(2, 4, dtype=torch.int8)), "must be ((2, 4), torch.uint8), got ((2, 4), torch.int8)"),
        (dict(scale=torch.ones(2, 2)), "scale of a matrix"),
        (dict(scale=torch.ones(2, 1).half()), "scale of a matrix"),
        (dict(zero=None), "zero of a matrix (2, 8)"),
        (dict(grid=Grid(4, 4, "symmetric")), "must be None, got ((2, 1), torch.uint8)"),
        (dict(grid=Grid(4, 3)), "A row of 8 numbers does not divide into groups of group_size=3"),
        (dict(order=torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])), "order must hold each column from 0 to 7 once"),
        (dict(column_scale=torch.ones(7)), "column_scale must have shape (8,), got (7,)"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(wrong, says):
    stored = rtn(normal(2, 8), 4, 4)
    parts = dict(codes=stored.codes, scale=stored.scale, zero=stored.zero, grid=stored.grid, shape=stored.shape)
    assert torch.equal(QuantizedTensor(**parts).dequantize(), stored.dequantize())
    with pytest.raises(ValueError) as refused:
        QuantizedTensor(**{**parts, **wrong})
    assert says in str(refused.value)


def test_statistics_are_the_moments_of_all_inputs_however_they_came():
    x = normal(2, 9, 6) - 1
    statistics = InputStatistics(6)
    for batch in (x[:1], x[1, :4], x[1, 4], x[1, 5:].bfloat16().double(), x[:0]):
        statistics.add(batch)
    assert statistics.n == 18
    rows = x.reshape(18, 6).double()
    rows[14:] = rows[14:].bfloat16().double()
    hessian = sum(2 * torch.outer(row, row) for row in rows) / 18
    assert torch.allclose(statistics.hessian.double(), hessian, rtol=1e-5, atol=1e-6)
    assert torch.allclose(statistics.magnitude.double(), sum(row.abs() for row in rows) / 18, rtol=1e-5)
    assert not torch.allclose(statistics.magnitude.double(), rows.mean(0), rtol=1e-5)


def test_statistics_of_hand_worked_inputs():
    statistics = InputStatistics(2)
    statistics.add(torch.tensor([[1.0, -2], [3, 0]]))
    assert statistics.hessian.tolist() == [[10, -2], [-2, 4]] and statistics.magnitude.tolist() == [2, 1]


def test_statistics_keep_no_graph():
    statistics = InputStatistics(3)
    statistics.add(normal(4, 3).requires_grad_())
    assert not statistics.hessian.requires_grad and not statistics.magnitude.requires_grad


@pytest.mark.parametrize(
    "x, says",
    [
        (torch.zeros(4, 7), "These statistics are of 6 inputs, got a tensor (4, 7)"),
        (torch.tensor(1.0), "got a tensor ()"),
        (torch.full((1, 6), float("nan")), "infinite or NaN"),
        (torch.full((1, 6), float("inf")), "infinite or NaN"),
    ],
)
def test_inputs_that_statistics_cannot_count_are_refused_and_not_counted(x, says):
    statistics = InputStatistics(6)
    with pytest.raises(ValueError) as refused:
        statistics.add(x)
    assert says in str(refused.value) and statistics.n == 0 and statistics.moments.count_nonzero() == 0


def test_what_is_no_tensor_cannot_be_counted():
    with pytest.raises(ValueError, match=r"x must be a tensor \(..., 2\), got list"):
        InputStatistics(2).add([1, 2])


def test_sums_that_overflow_are_refused():
    statistics = InputStatistics(2)
    statistics.add(torch.tensor([[1e20, 1.0]]))
    assert statistics.magnitude.tolist() == pytest.approx([1e20, 1])
    with pytest.raises(ValueError, match="Inputs of a layer are too large: sums of their squares overflow float32"):
        _ = statistics.hessian
    statistics.add(torch.tensor([[3e38, 1.0], [3e38, 1.0]]))
    with pytest.raises(ValueError, match="Inputs of a layer are too large"):
        _ = statistics.magnitude


def test_statistics_of_nothing_are_refused():
    for wanted in ("hessian", "magnitude"):
        with pytest.raises(ValueError, match="Nothing was added to these statistics: run the model over"):
            getattr(InputStatistics(2), wanted)
    with pytest.raises(ValueError, match="columns=0 must be a whole number of at least 1"):
        InputStatistics(0)


def test_output_error_is_the_mean_over_inputs_of_the_error_of_the_output():
    weight, x = normal(5, 6), normal(40, 6, seed=1) @ normal(6, 6, seed=2)
    rounded = rtn(weight, 3).dequantize()
    statistics = InputStatistics(6)
    statistics.add(x)
    explicit = ((x @ weight.T - x @ rounded.T) ** 2).sum(1).mean().item()
    assert output_error(weight, rounded, statistics.hessian) == pytest.approx(explicit, rel=1e-4)
    assert output_error(weight, rounded, torch.eye(6)) != pytest.approx(explicit, rel=1e-2)
    assert output_error(weight, weight, statistics.hessian) == 0


def test_output_error_worked_by_hand():
    """One output, D = (1, -1), inputs (1, 0) and (2, 1): the output is off by 1 and by 2 - 1, so by 1 in the mean."""
    hessian = 2 * torch.tensor([[5.0, 2], [2, 1]]) / 2
    assert output_error(torch.tensor([[1.0, 0]]), torch.tensor([[0.0, 1]]), hessian) == 1


def test_output_error_of_shapes_that_do_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"A weight \(2, 3\) needs a rounded one of its shape and a Hessian \(3, 3\)"):
        output_error(torch.zeros(2, 3), torch.zeros(1, 3), torch.eye(3))
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(2, 2\)"):
        output_error(torch.zeros(2, 3), torch.zeros(2, 3), torch.eye(2))
