"""The pictures of notebook 02, over all that their sliders and data can be."""

import numpy as np
import pytest
from figures import drawn, texts
from matplotlib.colors import to_rgba
from reference import SMOLLM2 as CONFIG

import kvcourse as kv
from kvcourse.plots import kv_cache as module
from kvcourse.plots.base import COLORS, png
from kvcourse.plots.sides import KEPT

PIECES = ["The", " second", " token", " is", "\n", " fast", "."]


def bars_by_color(ax):
    colors = [patch.get_facecolor() for patch in ax.patches]
    return {name: colors.count(to_rgba(color)) for name, color in (COLORS | {"kept": KEPT}).items()}


@pytest.mark.parametrize("step", range(1, 6))
def test_two_sides_draws_every_row_and_counts_the_operations(step):
    prompt_length = 3
    figure = drawn(kv.plots.two_sides(PIECES, prompt_length, step, CONFIG))
    left, right, bars = figure.axes
    length = prompt_length + step - 1
    assert bars_by_color(left)["naive"] == len(left.patches) == length
    assert bars_by_color(right)["cached"] == (length if step == 1 else 1)
    assert bars_by_color(right)["kept"] == (0 if step == 1 else length - 1)
    assert len(texts(left)) == length and texts(left)[1] == "·second"
    lengths = range(prompt_length, length + 1)
    naive = sum(kv.flops(CONFIG, n).total for n in lengths)
    cached = kv.flops(CONFIG, prompt_length).total + sum(kv.flops(CONFIG, 1, n - 1).total for n in lengths[1:])
    assert [bar.get_height() for bar in bars.patches] == pytest.approx([naive / 1e9, cached / 1e9])
    assert f"Step {step} of 5" in bars.get_title(loc="left")
    assert left.get_title(loc="left").startswith(f"Without cache\n{length} rows")
    assert ("1 row," in right.get_title(loc="left")) == (step > 1)


def test_the_scale_of_the_counter_stays_while_the_step_moves():
    limits = {kv.plots.two_sides(PIECES, 3, step, CONFIG).axes[2].get_ylim() for step in range(1, 6)}
    assert len(limits) == 1


def test_the_filmstrip_has_a_column_for_each_step():
    figure = drawn(kv.plots.two_sides_filmstrip(PIECES, 3, [1, 2, 5], CONFIG))
    above, below = figure.axes[:3], figure.axes[3:]
    assert [len(ax.patches) for ax in above] == [3, 4, 7] == [len(ax.patches) for ax in below]
    assert [bars_by_color(ax)["naive"] for ax in above] == [3, 4, 7]
    assert [bars_by_color(ax)["cached"] for ax in below] == [3, 1, 1]
    assert above[0].get_ylabel() == "without cache" and below[0].get_ylabel() == "with cache"


def test_same_bits_keeps_exact_zeros_apart():
    values = np.array([[0.0, np.nan], [1e-6, 2e-5]])
    figure = drawn(kv.plots.same_bits(values))
    equal, apart = figure.axes[0].images
    assert np.argwhere(~equal.get_array().mask).tolist() == [[0, 0]]
    assert np.argwhere(~apart.get_array().mask).tolist() == [[1, 0], [1, 1]]
    assert "text of 3 tokens" in figure.axes[0].get_title(loc="left")


@pytest.mark.parametrize("values", [[[0.0]], [[1e-6]], [[np.nan]], [[0.0, np.nan], [0.0, 0.0]]])
def test_same_bits_copes_with_nothing_to_tell_apart(values):
    png(kv.plots.same_bits(values))


def test_bytes_copied_draws_the_given_numbers_in_mb():
    tokens = np.array([1, 10, 100, 1000])
    figure = drawn(kv.plots.bytes_copied(tokens, tokens**2 * 1e6, tokens * 1e6))
    grown, once = figure.axes[0].lines
    assert grown.get_ydata().tolist() == [1, 100, 10_000, 1e6] and once.get_ydata().tolist() == [1, 10, 100, 1000]
    assert texts(figure.axes[0]) == ["grown by concatenation\n1e6 MB", "allocated once\n1,000 MB"]
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"


def test_logit_differences_has_a_line_for_each_format_and_half_the_gaps():
    figure = drawn(kv.plots.logit_differences({"float32": [1e-5, 0.0], "bfloat16": [0.1, 0.2]}, [1.0, 0.5], 1e-4))
    single, half, gaps, bound = figure.axes[0].lines
    assert single.get_ydata()[0] == 1e-5 and np.isnan(single.get_ydata()[1])  # an exact zero is left out
    assert half.get_ydata().tolist() == [0.1, 0.2]
    assert gaps.get_ydata().tolist() == [0.5, 0.25]
    assert set(bound.get_ydata()) == {1e-4}


@pytest.mark.parametrize("slope", [1e-5, 0.0, -1e-5])
def test_step_times_in_milliseconds_with_the_fitted_line(slope):
    figure = drawn(kv.plots.step_times([10, 2000], [0.03, 0.05], [1, 1000], [0.03, 1.2], 0.03, slope))
    both, alone = figure.axes
    assert both.lines[0].get_ydata().tolist() == [30, 1200] and both.lines[1].get_ydata().tolist() == [30, 50]
    assert alone.lines[1].get_ydata().tolist() == pytest.approx([30, 1000 * (0.03 + 2000 * slope)])
    assert both.get_ylim()[0] == alone.get_ylim()[0] == 0
    assert alone.get_ylim()[1] > 50


def test_constant_and_slope_says_where_they_are_equal():
    figure = drawn(kv.plots.constant_and_slope([0, 500, 1000], {"operations": (200.0, 0.5), "MB": (900.0, 0.5)}, 800))
    first, second = figure.axes
    assert first.get_title(loc="left").endswith("at 400 tokens") and second.get_title(loc="left").endswith(
        "at 1,800 tokens"
    )
    assert [line.get_xdata()[0] for line in first.lines] == [400, 800]
    assert [line.get_xdata()[0] for line in second.lines] == [800]  # equal beyond the picture: only the context
    assert first.get_ylabel() == "operations"


def test_cost_ratio_marks_where_a_curve_reaches_the_line():
    tokens = np.arange(1, 1001)
    curves = {"by count": (tokens, tokens / 2, 1000, 200), "by time": (tokens, tokens / 100, 400, None)}
    figure = drawn(kv.plots.cost_ratio(curves, 100, 2000))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["by count", "by time", "by time, extrapolated"]
    assert "200" in texts(figure.axes[0]) and "100 times" in texts(figure.axes[0])
    measured, extrapolated = (line for line in figure.axes[0].lines if line.get_label().startswith("by time"))
    assert (measured.get_xdata()[-1], extrapolated.get_xdata()[0]) == (400, 401)


@pytest.mark.parametrize("reached", [None, 1, 4, 8])
def test_crossover_draws_the_line_where_it_is_told(reached):
    figure = drawn(kv.plots.crossover([1, 2, 4, 8], [0.03, 0.03, 0.04, 0.06], [0.03] * 4, 1.2, reached))
    ax = figure.axes[0]
    assert ax.lines[0].get_ydata().tolist() == [30, 30, 40, 60]
    assert len(ax.lines) == (2 if reached is None else 3)
    if reached is not None:
        assert ax.lines[2].get_xdata()[0] == reached
        assert texts(ax)[0].startswith(f"from {reached} token")


def test_masks_write_sees_where_the_mask_is_true():
    right = np.tril(np.ones((2, 5)), 3) > 0
    figure = drawn(kv.plots.masks(right, np.tril(np.ones((2, 5))) > 0, ("right", "wrong")))
    assert [texts(ax).count("sees") for ax in figure.axes] == [9, 3]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["3", "4"]
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["right", "wrong"]


def test_powers_lie_inside_the_axis():
    assert module._powers(1, 8192) == [1, 10, 100, 1000]
    assert module._powers(2, 9) == []
