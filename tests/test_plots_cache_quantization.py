"""The pictures of notebook 09, over all that their sliders and data can be."""

import numpy as np
import pytest
from figures import drawn, labelled, texts
from matplotlib.colors import to_rgba

import kvcourse as kv
from kvcourse.plots import cache_quantization as module
from kvcourse.plots.base import COLORS, png


def numbers(*shape, seed=0):
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)


def test_channel_maps_share_one_scale_around_zero():
    keys, values = numbers(20, 8), 0.1 * numbers(20, 8, seed=1)
    keys[:, 3] = -9
    left, right, bar = drawn(kv.plots.channel_maps({"Keys": keys, "Values": values})).axes
    assert left.images[0].get_array().tolist() == keys.tolist()
    assert left.images[0].get_clim() == right.images[0].get_clim() == (-9, 9)
    assert right.get_title(loc="left") == "Values" and left.get_ylabel() == "token"


def test_channel_sizes_are_ranked_against_the_median_channel_of_their_head():
    sizes = np.array([[1.0, 2.0, 8.0, 2.0, 2.0], [10.0, 10.0, 10.0, 50.0, 10.0]])
    (ax,) = drawn(kv.plots.channel_sizes({"Keys": sizes})).axes
    heads, middle = ax.lines[:2], ax.lines[2]
    assert [line.get_ydata().tolist() for line in heads] == [[4, 1, 1, 1, 0.5], [5, 1, 1, 1, 1]]
    assert middle.get_ydata().tolist() == [4.5, 1, 1, 1, 0.75]
    assert middle.get_xdata().tolist() == [1, 2, 3, 4, 5]


def test_grids_of_a_group_tell_used_values_from_others():
    grids = {"through zero": (np.arange(0.0, 16), np.array([14, 15, 15])), "minimum": (np.arange(13.0, 17), [0, 1, 3])}
    upper, lower = drawn(kv.plots.grids_of_a_group([13.9, 15.1, 15.0], grids)).axes
    assert upper.get_title(loc="left") == "through zero: 2 of 16 values used"
    assert lower.get_title(loc="left") == "minimum: 3 of 4 values used"
    unused, used, dots = (scatter.get_offsets()[:, 0].tolist() for scatter in upper.collections)
    assert (unused, used, dots) == (list(range(14)), [14, 15], [13.9, 15.1, 15.0])


def test_along_which_axis_has_the_same_look_for_a_name_in_all_panels():
    names = ["keys per token", "keys per channel", "values per token", "values per channel"]
    errors = {name: [0.01, 0.1, 0.1 * (i + 2)] for i, name in enumerate(names)}
    moved = {name: [0, 0.1, 0.4] for name in names[:2]}
    perplexities = {name: [64, 66, 70 + 40 * i] for i, name in enumerate(names)}
    figure = drawn(kv.plots.along_which_axis((8, 4, 2), errors, moved, perplexities, 64.0))
    first, second, last = figure.axes
    for name in names[:2]:
        lines = [labelled(ax, name) for ax in (first, second, last)]
        assert len({(line.get_color(), line.get_marker()) for line in lines}) == 1
    assert labelled(last, "values per channel").get_ydata().tolist() == [64, 66, 190]
    assert [tick.get_text() for tick in last.get_xticklabels()] == ["8 bits", "4 bits", "2 bits"]
    assert last.get_yscale() == "log" and texts(last) == ["nothing rounded"]
    assert len({(line.get_color(), line.get_marker()) for line in first.lines}) == 4


def test_waiting_tokens_has_keys_and_values_in_each_panel():
    saw, flat = [0, 1, 0, 1, 0], [0, 1, 2, 2, 2]
    left, right = drawn(kv.plots.waiting_tokens({"residual 2": (saw, flat), "residual 0": (saw, [0] * 5)})).axes
    assert labelled(left, "keys").get_ydata().tolist() == saw
    assert labelled(left, "values").get_ydata().tolist() == flat
    assert labelled(right, "values").get_ydata().tolist() == [0] * 5 and right.get_title(loc="left") == "residual 0"


def test_quality_for_bytes_names_every_point():
    points = {"8 bits": (14_000, 64.0), "4 bits": (8400, 64.2), "2 bits": (5600, 79.0)}
    (ax,) = drawn(kv.plots.quality_for_bytes(points, (23_040, 64.0))).axes
    assert texts(ax) == ["8 bits", "4 bits", "2 bits", "16 bits"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines[1:4]] == list(points.values())
    png(kv.plots.quality_for_bytes({"8 bits": (14_000, 64.0)}, (23_040, 64.0)))  # nothing lost: still a picture


def test_step_parts_add_up_and_what_was_not_measured_is_said():
    moved = {
        "plain": {"weights": 500e6, "keys and values": 100e6},
        "4 bits": {"weights": 500e6, "codes and scales": 15e6, "numbers made of them": 200e6},
        "one kernel": {"weights": 500e6, "codes and scales": 15e6},
    }
    left, right = drawn(kv.plots.step_parts(moved, {"plain": 0.03, "4 bits": 0.045})).axes
    assert texts(left) == ["600 MB", "715 MB", "515 MB"]
    assert texts(right) == ["30.0 ms", "45.0 ms", "not written here"]
    assert [bar.get_width() for bar in right.patches] == pytest.approx([30, 45])
    ends = [bar.get_x() + bar.get_width() for bar in left.patches]
    assert ends == pytest.approx([500, 600, 500, 515, 715, 500, 515])
    with pytest.raises(KeyError):
        kv.plots.step_parts({"plain": {"no such part": 1.0}}, {"plain": 1.0})


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("token, first_channel", [(64, 0), (70, 16), (95, 24)])
def test_the_microscope_shows_codes_errors_and_the_framed_token(bits, token, first_channel):
    exact, codes = numbers(32, 8), (numbers(32, 8, seed=1) * 2**bits).astype(int) % 2**bits
    rounded = exact + 0.1 * numbers(32, 8, seed=2)
    rows = {"exact keys": np.full(512, 1 / 512), "rounded keys": np.eye(512)[token]}
    figure = drawn(kv.plots.cache_microscope(exact, rounded, codes, 64, first_channel, token, rows, "token $7_{0$"))
    value, code, error, weight = figure.axes[:4]
    assert value.images[0].get_array().tolist() == exact.T.tolist()
    assert error.images[0].get_array().data == pytest.approx((rounded - exact).T)
    assert texts(code) == [str(number) for number in codes.T.reshape(-1)]
    assert [ax.patches[0].get_x() for ax in (value, code, error)] == [token - 0.5] * 3
    assert [tick.get_text() for tick in code.get_yticklabels()] == [str(first_channel + i) for i in range(8)]
    assert value.get_title(loc="left") == "token $7_{0$"
    (marked,) = (tick for tick in weight.get_xticklabels() if tick.get_text() == str(token))
    assert to_rgba(marked.get_color()) == to_rgba(COLORS["vermillion"])


def test_the_microscope_shows_the_keys_with_the_most_weight_in_order():
    row = np.full(100, 0.001)
    row[[90, 3]] = 0.4, 0.3
    other = np.full(100, 0.001)
    other[50] = 0.9
    rows = {"exact keys": row, "rounded keys": other}
    figure = kv.plots.cache_microscope(
        np.zeros((4, 2)), np.zeros((4, 2)), np.zeros((4, 2), int), 0, 0, 1, rows, "all 0"
    )
    ax = drawn(figure).axes[3]
    keys = [int(tick.get_text()) for tick in ax.get_xticklabels()]
    assert len(keys) == 16 and keys == sorted(keys) and {3, 50, 90} <= set(keys)
    assert [bar.get_height() for bar in ax.patches[:16]] == row[keys].tolist()
    assert [bar.get_height() for bar in ax.patches[16:]] == other[keys].tolist()


def test_the_microscope_copes_with_fewer_keys_than_it_can_show():
    rows = {"exact keys": np.full(5, 0.2), "rounded keys": np.full(5, 0.2)}
    png(kv.plots.cache_microscope(numbers(5, 8), numbers(5, 8), np.ones((5, 8), int), 0, 0, 0, rows, "short"))


def test_savings_say_what_is_kept_and_by_how_much_less():
    steps = {"own keys": 1374.4e9, "shared": 171.8e9, "4 bits": 53.7e9}
    figure = drawn(
        kv.plots.savings({"70B": steps, "8B": {name: value / 5 for name, value in steps.items()}}, "16 texts")
    )
    left, right = figure.axes
    assert texts(left) == ["1,370 GB", "172 GB  ÷ 8.00", "53.7 GB  ÷ 3.20"]
    assert left.get_title(loc="left") == "70B: 26 times less"
    kept = [bar for bar in left.patches if bar.get_facecolor() == to_rgba(module.KEPT)]
    assert [bar.get_x() + bar.get_width() for bar in kept] == pytest.approx([1374.4, 171.8, 53.7])
    saved = [bar for bar in left.patches if bar.get_facecolor() == to_rgba(module.SAVED)]
    assert [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in saved] == [
        pytest.approx((171.8, 1374.4)),
        pytest.approx((53.7, 171.8)),
    ]
    assert right.get_xlabel() == "GB of cache for 16 texts (log scale)" and right.get_xscale() == "log"
