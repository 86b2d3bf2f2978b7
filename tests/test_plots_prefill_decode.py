"""The pictures of notebook 03, over all that their sliders and data can be."""

import numpy as np
import pytest
from figures import drawn, labelled, texts
from matplotlib.colors import to_rgba
from reference import SMOLLM2

import kvcourse as kv
from kvcourse.plots.base import COLORS, png

CEILINGS = kv.Ceilings(140e9, 17.5e9, "cpu", "float32")  # the ridge is at 8 operations per byte
POINTS = {"decode, batch of 1": (0.5, 8e9), "prefill of 64": (28.0, 90e9)}


def test_phases_show_times_in_milliseconds_beside_their_least():
    figure = drawn(
        kv.plots.phases(
            [1, 64],
            [0.03, 0.1],
            [0.001, 0.05],
            [16, 2000],
            [0.03, 0.04],
            [0.02, 0.025],
            (0.01, 1e-3, 0),
            (0.03, 5e-6),
            64,
        )
    )
    left, right = figure.axes
    assert labelled(left, "measured").get_ydata().tolist() == [30, 100]
    assert labelled(left, "least: operations / rate").get_ydata().tolist() == [1, 50]
    assert labelled(left, "fit").get_xdata()[0] == pytest.approx(64)  # not drawn where it was not fitted
    assert labelled(right, "measured").get_ydata().tolist() == [30, 40]
    assert labelled(right, "least: bytes / bandwidth").get_ydata().tolist() == [20, 25]
    assert labelled(right, "fit").get_ydata().tolist() == pytest.approx([30, 40])
    assert left.get_xscale() == left.get_yscale() == "log" and right.get_yscale() == "linear"
    assert right.get_ylim()[0] == 0


def test_phases_leave_out_a_fit_that_falls_below_zero():
    figure = drawn(
        kv.plots.phases([1, 64], [0.03, 0.1], [0.001, 0.05], [16, 99], [0.03, 0.04], [0.02] * 2, (-1, 1e-2, 0), (0, 0))
    )
    assert len(labelled(figure.axes[0], "fit").get_xdata()) == 0


def test_the_roof_is_the_lower_of_the_two_ceilings():
    (ax,) = drawn(kv.plots.roofline_chart(CEILINGS, POINTS)).axes
    across, up = ax.lines[0].get_data()
    assert np.interp(1, across, up) == pytest.approx(17.5, rel=0.01)  # GFLOP/s: 1 operation for each byte
    assert np.interp(8, across, up) == pytest.approx(140, rel=0.01)
    assert np.interp(50, across, up) == pytest.approx(140, rel=1e-6)
    assert "ridge: 8 operations per byte" in texts(ax)
    assert {*POINTS} <= {*texts(ax)}
    assert [line.get_xydata().tolist() for line in ax.lines[1:]] == [[[0.5, 8]], [[28, 90]]]
    assert ax.lines[1].get_markerfacecolor() == COLORS["decode"] != ax.lines[2].get_markerfacecolor()
    assert ax.get_title(loc="left") == "Roofline of this machine (cpu, float32)"


@pytest.mark.parametrize("new_tokens", [1, 16, 512])
@pytest.mark.parametrize("context", [0, 7500])
@pytest.mark.parametrize("batch", [1, 128])
@pytest.mark.parametrize("bits", [32, 4])
def test_a_chosen_pass_lies_on_the_roof_inside_the_picture(new_tokens, context, batch, bits):
    moved = kv.bytes_moved(SMOLLM2, new_tokens, context, batch, bits)
    best = kv.roofline(kv.flops(SMOLLM2, new_tokens, context, batch), moved, CEILINGS)
    figure = kv.plots.roofline_chart(CEILINGS, POINTS, {"chosen": (best.intensity, best.flops_per_second)})
    (ax,) = figure.axes
    diamond = ax.lines[-1]
    assert diamond.get_xydata()[0] == pytest.approx([best.intensity, best.flops_per_second / 1e9])
    assert best.flops_per_second == pytest.approx(min(140e9, best.intensity * 17.5e9))
    for value, (low, high) in zip(diamond.get_xydata()[0], (ax.get_xlim(), ax.get_ylim()), strict=True):
        assert low < value < high
    assert ax.get_title(loc="left") == "chosen"
    png(figure)


def test_weights_or_cache_marks_where_the_two_are_equal():
    contexts = np.linspace(0, 14_000, 57)
    shares = {b: contexts * b / 11_677 for b in (1, 4, 16)}
    measured = {4: ([16, 2000], [0.05, 0.07], 0.05, 1e-5), 16: ([16, 700], [0.06, 0.13], 0.06, 1e-4)}
    left, right = drawn(kv.plots.weights_or_cache(contexts, shares, 8192, measured)).axes
    assert {"11,677", "2,919", "730"} <= {*texts(left)}
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["1 text", "4 texts", "16 texts"]
    assert labelled(right, "16 texts").get_ydata().tolist() == [60, 130]
    assert texts(right) == ["600 tokens"]  # for 4 texts it lies far past the picture: 5,000


def test_weights_or_cache_says_where_a_crossing_is_extrapolated():
    measured = {4: ([16, 2000], [0.05, 0.07], 0.03, 1e-5)}
    _, right = drawn(kv.plots.weights_or_cache([0, 100], {1: [0, 0.5]}, 8192, measured)).axes
    assert texts(right) == ["3,000 tokens\n(extrapolated)"]


@pytest.mark.parametrize("slope", [0.0, -1e-5])
def test_weights_or_cache_copes_with_a_step_that_does_not_grow(slope):
    measured = {4: ([16, 2000], [0.05, 0.05], 0.05, slope)}
    _, right = drawn(kv.plots.weights_or_cache([0, 100], {1: [0, 0.5]}, 8192, measured)).axes
    assert texts(right) == []


def test_batched_steps_multiply_out_to_tokens_a_second():
    left, right = drawn(kv.plots.batched_steps([1, 4, 16], [0.03, 0.04, 0.08], [0.02, 0.02, 0.04])).axes
    assert left.lines[0].get_ydata().tolist() == [30, 40, 80] and left.lines[1].get_ydata().tolist() == [20, 20, 40]
    assert labelled(right, "measured").get_ydata() == pytest.approx([1 / 0.03, 100, 200])
    assert labelled(right, "roofline").get_ydata() == pytest.approx([50, 200, 400])
    free = labelled(right, "if a step took no longer than for one text")
    assert free.get_ydata() == pytest.approx([1 / 0.03, 4 / 0.03, 16 / 0.03])
    assert [label.get_text() for label in right.get_xticklabels()] == ["1", "4", "16"]


def test_the_map_holds_the_shares_and_the_measured_points():
    prompts, answers = np.geomspace(16, 8192, 9), np.geomspace(2, 2048, 7)
    share = answers[:, None] / (answers[:, None] + prompts[None] / 30)
    figure = drawn(kv.plots.phase_map(prompts, answers, share, [(512, 4, 0.19), (32, 24, 0.9)], 8192))
    ax = figure.axes[0]
    mesh, line = ax.collections
    assert np.asarray(mesh.get_array()).reshape(share.shape) == pytest.approx(share)
    assert mesh.get_clim() == (0, 1)
    half = np.concatenate([path.vertices for path in line.get_paths()])
    assert half[:, 1] == pytest.approx(half[:, 0] / 30, rel=0.5)  # share 0.5: answer = prompt / 30; a coarse grid
    assert texts(ax) == ["19%", "90%"]


@pytest.mark.parametrize("level", [0.0, 0.2, 0.9, 1.0])
def test_the_map_copes_with_a_phase_that_always_wins(level):
    share = np.full((4, 5), level)
    figure = drawn(kv.plots.phase_map(np.geomspace(16, 8192, 5), np.geomspace(2, 2048, 4), share, [], 8192))
    assert len(figure.axes[0].collections) == 1  # no line


def test_chunk_costs_show_what_it_costs_and_what_it_buys():
    left, right = drawn(kv.plots.chunk_costs([32, 64, 256], [0.5, 0.4, 0.3], [0.07, 0.1, 0.3], [0.2] * 3, 0.04)).axes
    assert labelled(left, "measured").get_ydata().tolist() == [500, 400, 300]
    assert labelled(left, "least: roofline").get_ydata().tolist() == [200] * 3
    assert labelled(right, "longest single pass").get_ydata() == pytest.approx([70, 100, 300])
    assert set(labelled(right, "a decode step alone").get_ydata()) == {40}
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0


def test_rows_of_every_kind_share_one_picture():
    series = {"tokens": ([1, 64], [0.03, 0.1]), "texts": ([1, 16], [0.03, 0.06]), "guesses": ([1, 8], [0.03, 0.04])}
    (ax,) = drawn(kv.plots.rows_alike(series, [1, 64], [0.02, 0.06])).axes
    assert labelled(ax, "texts").get_xydata() == pytest.approx(np.array([[1, 30], [16, 60]]))
    assert labelled(ax, "least: roofline").get_ydata() == pytest.approx([20, 60])
    assert len({line.get_marker() for line in ax.lines}) == 4
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_guesses_kept_stacks_own_token_guesses_that_stand_and_that_fall():
    figure = drawn(kv.plots.guesses_kept({"Repeat": [(0, 0), (7, 7), (7, 2)], "Story": [(0, 0)] * 5}))
    first, second = figure.axes
    heights = np.array([bar.get_height() for bar in first.patches]).reshape(3, 3)
    assert heights.tolist() == [[1, 1, 1], [0, 7, 2], [0, 0, 5]]
    assert first.get_title(loc="left") == "Repeat: 12 tokens in 3 passes"
    assert second.get_title(loc="left") == "Story: 5 tokens in 5 passes"
    assert first.get_xlim() == second.get_xlim() and first.get_ylim() == second.get_ylim()
    assert first.patches[0].get_facecolor() == to_rgba(COLORS["decode"])


def test_price_ratios_beside_the_published_ones():
    left, right = drawn(kv.plots.price_ratios([1, 4, 16], [28.0, 9.5, 3.5], {"A": 4.0, "B": 8.3, "C": 2.0})).axes
    assert left.lines[0].get_xydata().tolist() == [[1, 28], [4, 9.5], [16, 3.5]]
    assert texts(left) == ["28", "9.5", "3.5"]
    assert [label.get_text() for label in right.get_yticklabels()] == ["B", "A", "C"]
    assert texts(right) == ["8.3", "4.0", "2.0"]
    low, high = left.get_ylim()
    assert low < 3.5 and high > 28 and all(low <= tick <= high for tick in left.get_yticks())


@pytest.mark.parametrize("ratios", [[500.0, 30.0], [0.5, 0.2], [4.5, 4.5]])
def test_price_ratios_keep_the_band_in_sight(ratios):
    left, _ = drawn(kv.plots.price_ratios([1, 128], ratios, {"A": 4.0})).axes
    low, high = left.get_ylim()
    assert low < min(4, *ratios) and high > max(5, *ratios)
