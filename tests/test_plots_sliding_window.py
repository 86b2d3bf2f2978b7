"""The pictures of notebook 05, over all that their sliders and data can be."""

import numpy as np
import pytest
import torch
from figures import drawn, labelled, texts
from matplotlib.colors import to_rgba

import kvcourse as kv
from kvcourse.layers import visible
from kvcourse.plots import rings as module
from kvcourse.plots.base import COLORS, png
from kvcourse.plots.sliding_window import GLOBAL, LOCAL
from kvcourse.quality import Recall

PIECES = [
    "The",
    " second",
    " token",
    " is",
    "\n",
    " fast",
    ".",
    " A",
    " ring",
    " comes",
    " round",
    " again",
    " soon",
    "!",
]


def colors(ax):
    """How many boxes have each color of the rings."""
    faces = [patch.get_facecolor() for patch in ax.patches]
    names = ("SINK", "HELD", "NEW", "GONE", "AHEAD")
    return {name: count for name in names if (count := faces.count(to_rgba(getattr(module, name))))}


def slots_of(length, window, sinks=0):
    """The ring by hand: each token goes into its slot, one after the other."""
    slots = [-1] * (sinks + window)
    for position in range(length):
        slots[position if position < sinks else sinks + (position - sinks) % window] = position
    return slots


def test_window_masks_color_what_is_seen():
    order = torch.arange(6)[None]
    full, window = visible(order, order)[0, 0], visible(order, order, 2)[0, 0]
    left, right = drawn(kv.plots.window_masks({"all": full, "two": window})).axes
    assert colors(left) == {"HELD": 21, "GONE": 15}
    assert colors(right) == {"HELD": 11, "GONE": 25}
    seen = [patch for patch in right.patches if patch.get_facecolor() == to_rgba(module.HELD)]
    assert {(patch.get_x() + 0.5, patch.get_y() + 0.5) for patch in seen[-2:]} == {(4, 5), (5, 5)}  # (key, query)
    assert left.get_title(loc="left").endswith("sees 6") and right.get_title(loc="left").endswith("sees 2")


@pytest.mark.parametrize("window", [4, 6, 9])
@pytest.mark.parametrize("sinks", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 2, 7, 14])
def test_ring_shows_every_token_and_every_slot(length, window, sinks):
    slots = slots_of(length, window, sinks)
    text, memory = kv.plots.ring(PIECES, slots, sinks).axes
    kept = min(length, window + sinks)
    assert colors(text).get("AHEAD", 0) == len(PIECES) - length
    assert colors(text).get("GONE", 0) == length - kept
    assert colors(text).get("SINK", 0) == min(sinks, length)
    assert colors(memory).get("GONE", 0) == len(slots) - kept  # empty slots
    assert f"{length} token{'s' * (length > 1)} read, {kept} of them kept" in text.get_title(loc="left")
    boxes = [label for label in texts(memory) if not label.startswith(("slot", "next"))]
    assert [int(label.split("\n")[1]) if label != "empty" else -1 for label in boxes] == slots
    (arrow,) = (text for text in memory.texts if text.get_text() == "next")
    assert slots_of(length + 1, window, sinks)[round(arrow.xy[0])] == length


def test_ring_before_anything_was_read_and_with_sinks():
    drawn(kv.plots.ring(PIECES, slots_of(14, 9, 2), 2))
    text, memory = drawn(kv.plots.ring(PIECES, [-1] * 4)).axes
    assert colors(text) == {"AHEAD": len(PIECES)} and colors(memory) == {"GONE": 4}


def test_ring_shows_blanks_and_shortens():
    text, _ = kv.plots.ring(PIECES, slots_of(14, 4)).axes
    assert texts(text)[1] == "·second\n1" and texts(text)[4] == "↵\n4"
    assert module._short(" extraordinary") == "·extrao…"
    png(kv.plots.ring(["$a_b$", "<b>"] * 3, slots_of(6, 4)))  # not taken for formulas


def test_ring_history_has_a_column_for_each_token():
    history = [slots_of(n, 3, 1) for n in range(1, 8)]
    ax = drawn(kv.plots.ring_history(history, sinks=1)).axes[0]
    assert texts(ax) == [str(p) if p >= 0 else "" for slots in history for p in slots]
    assert colors(ax) == {"SINK": 7, "NEW": 6, "HELD": 9, "GONE": 6}
    assert ax.get_xticklabels()[0].get_text() == "1" and len(ax.get_yticks()) == 4


def test_flat_cost_in_megabytes_and_milliseconds():
    megabytes = {"everything": [12.0, 369.0], "a window of 256": [11.8, 11.8]}
    seconds = {"everything": [0.03, 0.05], "a window of 256": [0.031, 0.03]}
    left, right = drawn(kv.plots.flat_cost([256, 8000], megabytes, seconds)).axes
    assert left.lines[0].get_ydata().tolist() == [12, 369]
    assert right.lines[0].get_ydata().tolist() == pytest.approx([30, 50])
    assert right.lines[1].get_ydata().tolist() == pytest.approx([31, 30])
    assert texts(left) == ["369 MB", "11.8 MB"] and right.get_ylim()[0] == 0


def row(*rights, distances=(32, 64, 128), guessed=None):
    return [Recall(right, 40, distance, guessed) for right, distance in zip(rights, distances, strict=True)]


def test_forgotten_has_a_line_with_intervals_for_each_model():
    ax = drawn(kv.plots.forgotten({"full": row(40, 40, 40, guessed=0.4), "window": row(40, 38, 0)}, 64)).axes[0]
    assert ax.containers[0].lines[0].get_ydata().tolist() == [1, 1, 1]
    assert ax.containers[1].lines[0].get_ydata().tolist() == pytest.approx([1, 0.95, 0])
    spread = ax.containers[1].lines[2][0].get_segments()
    assert spread[2][:, 1].tolist() == pytest.approx([Recall(0, 40, 128).low, Recall(0, 40, 128).high])
    assert labelled(ax, "by guessing").get_ydata() == pytest.approx([0.4] * 3)
    assert texts(ax) == ["window 64"]


def test_forgotten_without_guesses_draws_none():
    ax = drawn(kv.plots.forgotten({"full": row(0, 0, 0)}, 64)).axes[0]
    assert not [line for line in ax.lines if line.get_label() == "by guessing"]


def test_reach_by_layer_leaves_out_what_did_not_move():
    changes = [[1.0, 0, 0, 0, 0], [1.0, 0.1, 0.2, 0, 0], [2.0, 0.3, 0.2, 0.1, 1e-5]]
    ax = drawn(kv.plots.reach_by_layer(changes, 3)).axes[0]
    shown = ax.collections[0].get_array()
    assert np.ma.getmaskarray(shown).reshape(3, 5).tolist() == [[value == 0 for value in line] for line in changes]
    assert [line.get_xdata()[0] for line in ax.lines] == [0.5, 2.5, 4.5]  # behind the last position within reach
    assert {line.get_linestyle() for line in ax.lines} == {"-"}


@pytest.mark.parametrize("changes", [[[0.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]]])
def test_reach_by_layer_copes_with_no_or_one_value(changes):
    png(kv.plots.reach_by_layer(changes, 2))


def test_reach_decay_marks_the_reach_of_each_layer():
    ax = drawn(kv.plots.reach_decay([1.0, 0.1, 1e-3, 0.0], window=2, layers=2)).axes[0]
    assert ax.lines[0].get_ydata()[:3].tolist() == [1, 0.1, 1e-3] and np.isnan(ax.lines[0].get_ydata()[3])
    assert [line.get_xdata()[0] for line in ax.lines[1:]] == [1, 2]
    assert texts(ax) == ["1 x 1", "2 x 1"] and ax.get_yscale() == "log"


def test_first_token_weight_counts_layers_from_one():
    ax = drawn(kv.plots.first_token_weight(np.array([0.1, 0.9, 0.5]), 0.004)).axes[0]
    assert [bar.get_height() for bar in ax.patches] == [0.1, 0.9, 0.5]
    assert [bar.get_x() + bar.get_width() / 2 for bar in ax.patches] == pytest.approx([1, 2, 3])
    assert ax.lines[0].get_ydata()[0] == 0.004


def test_perplexity_by_position_has_a_line_for_each_way():
    values = {"everything": [60.0, 40], "no sinks": [60, 90], "1 sink": [60, 45], "4 sinks": [60, 44]}
    ax = drawn(kv.plots.perplexity_by_position([128, 256], values, 128)).axes[0]
    assert [list(labelled(ax, name).get_ydata()) for name in values] == list(values.values())
    assert ax.get_yscale() == "log" and texts(ax) == ["the window is full"]


def test_layer_patterns_show_layers_bytes_and_recall():
    patterns = {"all global": (None, None), "every other": (64, None), "all local": (64, 64)}
    recalls = row(40, 20, 0, distances=(192,) * 3)
    left, middle, right = drawn(kv.plots.layer_patterns(patterns, recalls, [1.0, 0.56, 0.12], 192)).axes
    assert [patch.get_facecolor() for patch in left.patches] == [
        to_rgba(GLOBAL if window is None else LOCAL) for windows in patterns.values() for window in windows
    ]
    assert [bar.get_width() for bar in middle.patches] == [1.0, 0.56, 0.12]
    assert [bar.get_width() for bar in right.patches] == [1.0, 0.5, 0.0]
    assert [label.get_text() for label in left.get_yticklabels()] == list(patterns)
    assert "192" in right.get_title(loc="left")


def test_local_and_global_stops_where_a_model_does():
    gigabytes = {
        "short": (np.array([0.1, 0.2, np.nan]), np.array([0.1, 0.4, np.nan])),
        "long": (np.array([0.1, 0.3, 0.5]), np.array([0.2, 0.6, 2.0])),
    }
    short, long = drawn(kv.plots.local_and_global(np.array([1000, 2000, 4000]), gigabytes)).axes
    assert texts(short) == ["50% of that"] and texts(long) == ["25% of that"]
    assert labelled(long, "as the model is made").get_ydata().tolist() == [0.1, 0.3, 0.5]
    assert short.get_title(loc="left") == "short"


def test_colors_differ_from_each_other():
    assert len({module.SINK, module.HELD, module.NEW, module.GONE, module.AHEAD}) == 5
    assert GLOBAL != LOCAL and module.HELD == COLORS["sky"]
