"""The pictures of notebook 08, over all that their sliders and data can be."""

import numpy as np
import pytest
import torch
from figures import drawn, labelled, texts
from matplotlib.colors import to_rgba

import kvcourse as kv
from kvcourse.plots import weight_quantization as grids
from kvcourse.plots import weight_quantization_methods as methods
from kvcourse.quality import Recall

NUMBERS, ROUNDED, VALUES = [0.237, -0.4, 0.7], [0.2, -0.4, 0.7], np.arange(-8, 8) / 10


def leads(ax):
    """(from, to, color) of each line that leads from a number to its value."""
    lines = (line for line in ax.lines if len(line.get_xdata()) == 2)
    return [(*line.get_xdata(), to_rgba(line.get_color())) for line in lines]


@pytest.mark.parametrize("marked", [None, 0, 2])
def test_rounding_grids_lead_each_number_to_its_value(marked):
    fig = drawn(kv.plots.rounding_grids({"one": (NUMBERS, ROUNDED, VALUES), "two": (NUMBERS, NUMBERS, VALUES)}, marked))
    one, two = fig.axes
    assert [lead[:2] for lead in leads(one)] == list(zip(NUMBERS, ROUNDED, strict=True))
    assert [lead[:2] for lead in leads(two)] == list(zip(NUMBERS, NUMBERS, strict=True))
    colored = [i for i, lead in enumerate(leads(one)) if lead[2] == to_rgba(grids.MARKED)]
    assert colored == ([] if marked is None else [marked])
    assert texts(one) == ([] if marked is None else [f"{NUMBERS[marked]:.3f} becomes {ROUNDED[marked]:.4f}"])
    assert one.get_title(loc="left") == "one"
    ticks = one.collections[1].get_segments()
    assert [segment[0][0] for segment in ticks] == pytest.approx(list(VALUES))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rounding_grids_take_tensors_of_any_grid(bits):
    values = torch.linspace(-1, 1, 2**bits)
    drawn(kv.plots.rounding_grids({"all": (torch.zeros(8), torch.zeros(8), values)}, marked=0))


def test_error_by_size_has_a_point_for_each_size():
    lines = {"4 bits": [[4.0, 4.3, 5.0], [0.2, 0.1, 0.05]], "3 bits": [[3.0, 3.3, 4.0], [0.4, 0.2, 0.1]]}
    ax = drawn(kv.plots.error_by_size(lines, ["tensor", "row", "32"])).axes[0]
    assert list(labelled(ax, "4 bits").get_xdata()) == lines["4 bits"][0]
    assert list(labelled(ax, "3 bits").get_ydata()) == lines["3 bits"][1]
    assert texts(ax) == ["tensor", "row", "32"] and ax.get_yscale() == "log"
    with pytest.raises(ValueError):
        kv.plots.error_by_size(lines, ["tensor"])  # a name for each size, or none fits


def test_levels_stand_under_the_weights():
    values = {"INT4": np.arange(-8, 8) / 7, "NF4": np.linspace(-1, 1, 16)}
    top, bottom = drawn(kv.plots.levels(np.linspace(-1, 1, 500), values)).axes
    assert sum(patch.get_height() for patch in top.patches) == 500
    ticks = bottom.collections[1].get_segments()  # behind the line of the first grid
    assert [segment[0][0] for segment in ticks] == pytest.approx(list(values["INT4"]))
    low, high = bottom.get_xlim()
    assert low < -8 / 7 and high > 1 and top.get_xlim() == (low, high)  # all 16 can be seen
    assert texts(top) == ["each group's largest"]
    assert [label.get_text() for label in bottom.get_yticklabels()] == ["INT4", "NF4"]


def test_sensitivity_says_every_number_so_that_it_can_be_read():
    damage = [[0.0, 50.0], [-0.14, 1.0]]
    ax = drawn(kv.plots.sensitivity(damage, ["layer 1", "layer 2"], ["q_proj", "v_proj"])).axes[0]
    assert texts(ax) == ["+0.0%", "+50.0%", "-0.1%", "+1.0%"]
    assert [text.get_color() for text in ax.texts] == ["white", "black", "white", "white"]
    assert ax.images[0].get_array().tolist() == damage


def test_sensitivity_has_colors_for_small_numbers_beside_a_large_one():
    norm = drawn(kv.plots.sensitivity([[0.0, 2.0], [57.0, 6.0]], ["1", "2"], ["q", "v"])).axes[0].images[0].norm
    none, two, six, most = (float(norm(value)) for value in (0.0, 2.0, 6.0, 57.0))
    assert (none, most) == (0, 1) and two > 0.3 and six > two + 0.1  # 0.04 and 0.11 where colors grow evenly


@pytest.mark.parametrize("damage", [[[0.0, 0.0]], [[-5.0, -0.1]], [[20_000.0, 0.3]]])
def test_sensitivity_takes_damage_of_any_size(damage):
    drawn(kv.plots.sensitivity(damage, ["layer 1"], ["q_proj", "v_proj"]))


def test_memory_by_length_has_lines_and_devices():
    lines = {"16 bits": [140.0, 150.0], "4 bits": [40.0, 50.0]}
    ax = drawn(kv.plots.memory_by_length([1000, 100_000], lines, {"laptop": 64, "server": 141})).axes[0]
    assert list(labelled(ax, "4 bits").get_ydata()) == lines["4 bits"]
    assert [line.get_ydata()[0] for line in ax.lines[2:]] == [64, 141]
    assert texts(ax) == ["laptop", "server"] and ax.get_ylim()[1] > 150


def test_before_and_after_stacks_memory_and_marks_what_reading_takes():
    rows = {"16 bits": (200, 60, 20.0, 15.0), "4 bits": (50.0, 15.0, 30.0, 4.0)}
    left, right = drawn(kv.plots.before_and_after(rows)).axes
    assert [bar.get_width() for bar in left.patches] == [200, 50, 60, 15]
    assert [bar.get_x() for bar in left.patches] == [0, 0, 200, 50]
    assert texts(left) == ["260 MB", "65 MB"] and texts(right) == ["20 ms", "30 ms"]
    assert list(right.lines[0].get_xdata()) == [15, 4]


def test_equal_error_puts_each_way_on_its_curve():
    weight, hessian = np.array([0.237, 0.546]), np.array([[2.0, 1.8], [1.8, 2.0]])
    points = {"RTN": torch.tensor([0.2, 0.5]), "GPTQ": torch.tensor([0.2, 0.6])}
    ax = drawn(kv.plots.equal_error(torch.from_numpy(weight), torch.from_numpy(hessian), 0.1, points)).axes[0]
    for name, point in points.items():
        (x,), (y,) = labelled(ax, name).get_data()
        assert (x, y) == pytest.approx(tuple(point.tolist()))
    levels = [level for part in ax.collections for level in getattr(part, "levels", [])]
    for point in ([0.2, 0.5], [0.2, 0.6]):
        off = np.array(point) - weight
        assert min(abs(levels - off @ hessian @ off / 2)) < 1e-6
    crosses = [line for line in ax.lines if line.get_marker() == "+"]
    assert len(crosses) == 4 * 4  # one grid point further than the neighbors of each weight


@pytest.mark.parametrize("shares", [[0.5, 0.9, 1.3], [1.0], [0.2, 0.4]])
def test_against_nearest_has_a_dot_for_each_layer_and_a_bar_at_the_median(shares):
    ax = drawn(kv.plots.against_nearest({"one": shares, "other": [1.0, 1.0, 1.0]})).axes[0]
    dots, bar = ax.lines[0], ax.lines[1]
    assert list(dots.get_xdata()) == shares
    assert list(bar.get_xdata()) == [np.median(shares)] * 2
    assert ax.get_xlim()[1] > max(*shares, 1.0)


def test_channel_scales_sort_the_inputs_and_mark_the_choice():
    left, right = drawn(kv.plots.channel_scales([1.0, 8.0, 2.0], [0.0, 0.5, 1.0], [4.0, 1.0, 8.0], 1)).axes
    assert list(left.lines[0].get_ydata()) == [8, 2, 1]
    assert list(right.lines[0].get_ydata()) == [1, 0.25, 2]
    assert right.lines[1].get_xydata().tolist() == [[0.5, 0.25]] and right.get_ylim()[1] > 2


def test_quality_by_bits_shows_all_methods_with_their_intervals():
    recall = {name: [Recall(40, 40, 128), Recall(n, 40, 128)] for name, n in (("RTN", 30), ("GPTQ", 40), ("other", 0))}
    perplexity = {"RTN": [3.1, 480_000.0], "GPTQ": [3.1, 5.0], "other": [3.1, 7.0]}
    left, right = drawn(kv.plots.quality_by_bits((8, 2), perplexity, 3.0, recall)).axes
    assert list(labelled(left, "RTN").get_ydata()) == perplexity["RTN"]
    assert labelled(left, "weights as they were").get_ydata()[0] == 3.0
    assert left.get_yscale() == "log" and len(left.get_yticks()) >= 3
    ends = [segment[:, 1] for part in right.collections for segment in part.get_segments()]
    assert ends[1] == pytest.approx([recall["RTN"][1].low, recall["RTN"][1].high])
    assert [label.get_text() for label in right.get_xticklabels()] == ["8 bits", "2 bits"]


def test_methods_differ_in_more_than_color():
    for place in range(3):
        assert len({look[place] for look in methods.METHODS.values()}) == len(methods.METHODS)
    assert grids.MARKED != grids.WEIGHT
