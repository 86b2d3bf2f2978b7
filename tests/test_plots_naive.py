"""The pictures of notebook 01 show the numbers they were given, over the whole range of their sliders."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

import kvcourse as kv
from kvcourse.plots import COLORS, png
from kvcourse.plots.naive import power_law, row_grid


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_power_law_finds_exponent_and_factor():
    lengths = [1, 2, 4, 8]
    assert power_law(lengths, [7, 28, 112, 448]) == pytest.approx((2, 7))
    assert power_law(lengths, [9, 9, 9, 9]) == pytest.approx((0, 9))
    assert power_law(lengths, [7, 28, 112, 449])[0] != pytest.approx(2, abs=1e-9)


@pytest.mark.parametrize(("lengths", "costs"), [([4], [1]), ([4, 4], [1, 2]), ([1, 2], [0, 1]), ([1, 2], [1, -1])])
def test_power_law_says_nan_where_nothing_can_be_fitted(lengths, costs):
    assert all(math.isnan(value) for value in power_law(lengths, costs))


def test_attention_matrices_write_each_finite_number_and_leave_the_rest_blank():
    matrix = np.array([[0.5, -np.inf], [0.25, 0.75]])
    figure = kv.plots.attention_matrices(["a", "b"], {"one": matrix, "two": np.eye(2)})
    first, second = figure.axes
    assert texts(first) == ["0.50", "0.25", "0.75"]
    assert texts(second) == ["1.00", "0.00", "0.00", "1.00"]
    assert [label.get_text() for label in first.get_yticklabels()] == ["a", "b"]
    assert (first.get_title("left"), first.get_xlabel(), first.get_ylabel()) == ("one", "key", "query")
    assert first.texts[0].get_color() != first.texts[1].get_color()  # readable on light and on dark


def test_next_tokens_keep_order_and_leading_space():
    figure = kv.plots.next_tokens([" Paris", "the"], [0.7, 0.1], "So")
    (ax,) = figure.axes
    assert [bar.get_width() for bar in ax.patches] == [0.7, 0.1]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["' Paris'", "'the'"]
    assert ax.yaxis_inverted()
    assert texts(ax) == ["0.700", "0.100"]


def test_step_times_are_drawn_in_milliseconds():
    (ax,) = kv.plots.naive_step_times([5, 6], [0.002, 0.003]).axes
    assert ax.lines[0].get_xydata().tolist() == [[5, 2], [6, 3]]
    assert "(ms)" in ax.get_ylabel() and "(ms)" not in ax.get_xlabel()


@pytest.mark.parametrize("steps", [[1], [1, 2, 3], [2, 7]])
def test_filmstrip_has_a_bar_for_each_row_and_one_new_row_a_step(steps):
    pieces = [f"t{i}" for i in range(12)]
    figure = kv.plots.rows_filmstrip(pieces, 4, steps)
    for ax, step in zip(figure.axes, steps, strict=True):
        bars = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
        assert len(bars) == 4 + step - 1
        assert sum(not bar.get_hatch() for bar in bars) == (4 if step == 1 else 1)
        assert not bars[-1].get_hatch()
        assert texts(ax) == [*pieces[: 3 + step], f"makes {pieces[3 + step]!r}"]
    assert figure.axes[-1].get_title("left").startswith(f"step {steps[-1]}: {3 + steps[-1]} rows")


@pytest.mark.parametrize("prompt_length", [1, 5, 60])
@pytest.mark.parametrize("step", [1, 2, 12, 47, 48])
def test_triangle_counts_the_rows_it_draws(prompt_length, step):
    figure = kv.plots.rows_triangle(prompt_length, 48, step)
    (ax,) = figure.axes
    run = sum(prompt_length + i for i in range(step))
    new = prompt_length + step - 1
    cells = np.ma.masked_invalid(ax.collections[0].get_array())
    assert cells.count() == run
    assert int((cells == 0).sum()) == new
    assert f"{run:,} rows run, {new:,} would do" in ax.get_title("left")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        f"first time: {new:,} rows",
        f"again: {run - new:,} rows",
    ]
    assert png(figure).startswith(b"\x89PNG")


def test_row_grid_by_hand():
    grid = row_grid(prompt_length=2, new_tokens=3, step=2)
    assert np.array_equal(grid, [[0, 1, np.nan], [0, 1, np.nan], [np.nan, 0, np.nan], [np.nan] * 3], equal_nan=True)


@pytest.mark.parametrize("step", [0, 4])
def test_triangle_refuses_a_step_that_is_not_there(step):
    with pytest.raises(ValueError, match=f"step={step} must be from 1 to new_tokens=3"):
        kv.plots.rows_triangle(2, 3, step)


def test_flops_by_length_marks_crossing_and_context():
    lengths = np.array([1, 2, 3, 4])
    parts = {"linear layers": 2e9 * lengths, "attention": 1e9 * lengths**2, "output head": 1e9 + 0 * lengths}
    (ax,) = kv.plots.flops_by_length(lengths, parts, 2, 4).axes
    assert ax.lines[0].get_ydata().tolist() == [2, 4, 6, 8]
    assert ax.lines[1].get_ydata().tolist() == [1, 4, 9, 16]
    assert texts(ax) == ["context ends\nat 4", "equal at\n2 tokens"]
    assert ax.lines[4].get_xydata().tolist() == [[2, 4]]
    (without,) = kv.plots.flops_by_length(lengths, parts, None, 4).axes
    assert texts(without) == ["context ends\nat 4"]


def test_growth_draws_the_slope_of_each_curve():
    n = np.array([1, 2, 4, 8, 16])
    left, right = kv.plots.growth(n, {"linear layers": 5 * n**2, "attention": 7 * n**3}).axes
    assert left.lines[1].get_ydata().tolist() == (7 * n**3).tolist()
    assert left.get_xscale() == left.get_yscale() == right.get_xscale() == "log"
    assert right.lines[0].get_ydata() == pytest.approx(np.full(5, 2))
    assert right.lines[1].get_ydata() == pytest.approx(np.full(5, 3))


def test_power_laws_fit_only_the_long_texts():
    lengths = [1, 2, 4, 8]
    figure = kv.plots.power_laws({"attention": (lengths, [50, 4, 16, 64])}, 2, "time (ms)", "Timed")
    (ax,) = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["attention: exponent 2.00"]
    assert ax.lines[0].get_ydata().tolist() == [50, 4, 16, 64]
    assert ax.lines[1].get_ydata() == pytest.approx([1, 4, 16, 64])
    assert texts(ax) == ["not fitted"]
    assert ax.get_ylabel() == "time (ms) (log scale)"
    assert to_hex(ax.lines[0].get_color()).upper() == COLORS["vermillion"]


def test_power_laws_draw_the_line_only_a_little_into_the_short_texts():
    lengths = [1, 2, 8, 32, 64]
    (ax,) = kv.plots.power_laws({"attention": (lengths, [9, 9, 64, 1024, 4096])}, 16, "time (ms)", "Timed").axes
    assert ax.lines[0].get_xdata().tolist() == lengths
    assert ax.lines[1].get_xdata().tolist() == [2, 8, 32, 64]
    assert ax.lines[1].get_ydata() == pytest.approx([4, 64, 1024, 4096])


@pytest.mark.parametrize(("lengths", "costs"), [([1, 2], [1, 1]), ([8], [3]), ([8, 16], [0, 1])])
def test_power_laws_draw_points_even_where_nothing_can_be_fitted(lengths, costs):
    figure = kv.plots.power_laws({"my own name": (lengths, costs)}, 4, "time (s)", "Timed")
    (ax,) = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["my own name: no fit"]
    assert ("not fitted" in texts(ax)) == (min(lengths) < 4)
    png(figure)


@pytest.mark.parametrize("measured", [2.2, 30.0])
def test_doubling_ratios_show_all_points(measured):
    counted = {"linear layers": [4, 4], "attention": [8, 8], "all together": [4.1, 4.4]}
    (ax,) = kv.plots.doubling_ratios([16, 32], counted, ([16], [measured])).axes
    assert [line.get_ydata().tolist() for line in ax.lines[:3]] == [[4, 4], [8, 8], [4.1, 4.4]]
    assert ax.lines[3].get_xydata().tolist() == [[16, measured]]
    assert ax.get_ylim()[0] == 0 and ax.get_ylim()[1] > max(8, measured)
