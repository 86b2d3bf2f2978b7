"""The pictures of notebook 04, over all that their sliders and data can be."""

import numpy as np
import pytest
from figures import drawn, labelled, texts
from matplotlib.colors import to_rgba

import kvcourse as kv
from kvcourse.plots.base import COLORS
from kvcourse.quality import Recall

LENGTHS = np.geomspace(512, 2**18, 10)
GB = 1e9


def widths(ax):
    return [bar.get_width() for bar in ax.patches]


def test_cache_bill_shows_what_is_kept_inside_what_all_heads_would_keep():
    rows = {"shared": (10.5 * GB, 84 * GB), "plain": (2 * GB, 2 * GB), "latent": (4 * GB, 228 * GB)}
    (ax,) = drawn(kv.plots.cache_bill(rows, 32_768)).axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["plain", "latent", "shared"]  # from below, by what is kept
    assert widths(ax) == pytest.approx([2, 228, 84, 2, 4, 10.5])
    assert texts(ax) == ["2 GB", "4 GB, 57 times less", "10.5 GB, 8 times less"]
    assert ax.get_xlabel() == "GB of cache for 32,768 tokens at 16 bits (log scale)"
    low, high = ax.get_xlim()
    assert low < 2 and high > 228


def test_the_map_names_the_smallest_device_that_holds_it():
    devices = {"small": 14 * GB, "middle": 72 * GB, "large": 127 * GB}
    needed = {"model": np.array([[10, 20], [14, 72], [73, 300]]) * GB}
    (ax,) = drawn(kv.plots.fit_map([512, 4096], [1, 8, 64], needed, devices, {"model": 2048})).axes
    (mesh,) = ax.collections
    assert np.asarray(mesh.get_array()).reshape(3, 2).tolist() == [[0, 1], [0, 1], [2, 3]]  # 3: none of them
    colors = {tuple(mesh.cmap(mesh.norm(i))) for i in range(4)}
    assert len(colors) == 4
    assert texts(ax) == ["its context\nends at 2,048"] and set(ax.lines[0].get_xdata()) == {2048}


def test_the_map_has_a_panel_for_each_model_and_no_line_where_its_context_is_longer():
    needed = {"a": np.full((2, 2), 1 * GB), "b": np.full((2, 2), 500 * GB)}
    figure = drawn(kv.plots.fit_map([512, 4096], [1, 8], needed, {"one": 14 * GB}, {"a": 4096, "b": 1024}))
    left, right = figure.axes
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["a", "b"]
    assert texts(left) == [] and len(texts(right)) == 1
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "none of them"]


def test_memory_bill_stacks_the_cache_on_the_weights():
    rows = {"16 bits": (141 * GB, 3 * GB), "4 bits": (40 * GB, 3 * GB), "just": (50 * GB, 7.6 * GB)}
    (ax,) = drawn(kv.plots.memory_bill(rows, 64 * GB, 0.9)).axes
    assert widths(ax) == pytest.approx([64, 141, 3, 64, 40, 3, 64, 50, 7.6])
    assert [bar.get_x() for bar in ax.patches] == pytest.approx([0, 0, 141, 0, 0, 40, 0, 0, 50])
    assert texts(ax) == ["144 GB: does not fit", "43 GB: fits", "57.6 GB: fits"]
    assert ax.lines[0].get_xdata() == pytest.approx([57.6, 57.6])
    assert [label.get_text() for label in ax.get_yticklabels()] == list(rows)


@pytest.mark.parametrize("tokens", [256, 8192, 2**20])
@pytest.mark.parametrize("batch", [1, 256])
@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Llama 3.1 405B", "gpt-oss 20B", "DeepSeek-V3"])
def test_what_fits_marks_the_request_by_whether_it_fits(tokens, batch, name):
    shape, memory = kv.PUBLISHED[name], 80 * GB
    fit = kv.fits(shape, memory, tokens, batch)
    frontier = [kv.largest_batch(shape, memory, int(n)) for n in LENGTHS]
    parts, end = (fit.weights, fit.cache), shape.max_seq_len
    figure = kv.plots.what_fits(parts, memory, 0.9, LENGTHS, frontier, (tokens, batch), end, "title")
    left, right = figure.axes
    fine = fit.fits and tokens <= shape.max_seq_len
    point = right.lines[-1]
    assert point.get_marker() == ("o" if fine else "X")
    assert to_rgba(point.get_markerfacecolor()) == to_rgba(COLORS["green" if fine else "vermillion"])
    assert point.get_xydata().tolist() == [[tokens, batch]]
    assert right.get_ylim()[0] < batch < right.get_ylim()[1]
    assert widths(left)[1:] == pytest.approx([fit.weights / GB, fit.cache / GB])
    assert left.get_xlim()[1] > max(80, (fit.weights + fit.cache) / GB)
    if (tokens, batch) == (8192, 1):
        drawn(figure)


def test_ways_to_attend_in_milliseconds_beside_the_least():
    figure = drawn(kv.plots.ways_to_attend([256, 1024], {"one": [1e-4, 4e-4], "two": [2e-4, 9e-4]}, [1e-5, 4e-5]))
    (ax,) = figure.axes
    assert labelled(ax, "one").get_ydata() == pytest.approx([0.1, 0.4])
    assert labelled(ax, "two").get_ydata() == pytest.approx([0.2, 0.9])
    assert labelled(ax, "least: bytes of the cache / bandwidth").get_ydata() == pytest.approx([0.01, 0.04])
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["256", "1,024"]


def test_sharing_shows_quality_recall_and_speed_of_each_model():
    names = ["tiny-mha", "tiny-gqa", "tiny-window"]
    recalls = {
        name: [Recall(60 - 20 * i * (name == "tiny-window"), 60, d) for i, d in enumerate((32, 128))] for name in names
    }
    figure = drawn(
        kv.plots.sharing(
            dict(zip(names, [2_000_000, 500_000, 250_000], strict=True)),
            dict(zip(names, [(3.3, 3.3, 3.3), (3.5, 3.4, 3.6), (3.7, 3.5, 3.9)], strict=True)),
            recalls,
            dict(zip(names, [1000.0, 3000.0, 2000.0], strict=True)),
        )
    )
    left, middle, right = figure.axes
    assert texts(left) == names
    points = [container.lines[0].get_xydata()[0].tolist() for container in left.containers]
    assert points == [[2000, 3.3], [500, 3.5], [250, 3.7]]
    window = middle.containers[2].lines[0].get_xydata().tolist()
    assert window == [[32, 100], [128, pytest.approx(100 * 40 / 60)]]
    assert widths(right) == [1000, 3000, 2000]
    assert texts(right) == ["1,000", "3,000", "2,000"]


@pytest.mark.parametrize("steps", [1, 5, 100])
def test_uptraining_shows_the_way_and_both_ends(steps):
    curves = {"mean": np.linspace(3, 1, steps).tolist(), "random": np.linspace(7, 2, steps).tolist()}
    after = {"mean": (30.0, 4.0), "random": (800.0, 9.0)}
    left, right = drawn(kv.plots.uptraining(curves, after, 3.3)).axes
    line = labelled(left, "mean").get_ydata()
    assert len(line) == steps - max(1, steps // 15) + 1
    assert line.mean() == pytest.approx(np.mean(curves["mean"]), rel=0.01)
    assert widths(right) == [30, 800, 4, 9]
    assert texts(right) == ["30", "800", "4", "9"]
    assert set(labelled(right, "before heads were merged").get_xdata()) == {3.3}
    low, high = right.get_xlim()
    assert low < 3.3 and high > 800
