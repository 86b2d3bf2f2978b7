"""The pictures of notebook 07, over all that their sliders and data can be."""

import numpy as np
import pytest
from figures import drawn, labelled, texts
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

import kvcourse as kv
from kvcourse.plots import prefix_caching as module
from kvcourse.plots.base import COLORS, png

PIECES = ["start", " the", " red", " kite", "\n", " in", "$a_b$", " shed", ".", " extraordinary"]


def boxes(ax):
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def faces(ax):
    """How many boxes have each color of the blocks."""
    colors = [box.get_facecolor() for box in boxes(ax)]
    names = ("FOUND", "COMPUTED", "KEPT", "NOT_KEPT")
    return {name: n for name in names if (n := colors.count(to_rgba(getattr(module, name))))}


def heights(container):
    return [bar.get_height() for bar in container]


def test_chat_prompts_stack_new_on_old():
    ax = drawn(kv.plots.chat_prompts([0, 110, 150], np.array([100, 30, 32]))).axes[0]
    old, new = ax.containers
    assert heights(old) == [0, 110, 150] and heights(new) == [100, 30, 32]
    assert [bar.get_y() for bar in new] == [0, 110, 150]
    assert texts(ax) == ["100", "140", "182"]


@pytest.mark.parametrize("kept, found", [(0, 0), (8, 4), (8, 8), (10, 9)])
def test_prefix_match_colors_each_token(kept, found):
    known, prompt = PIECES, [*PIECES[:9], " other", " one"]
    above, below = kv.plots.prefix_match(known, prompt, kept, found, 4).axes
    assert faces(above) == {name: n for name, n in {"KEPT": kept, "NOT_KEPT": 10 - kept}.items() if n}
    assert faces(below) == {name: n for name, n in {"FOUND": found, "COMPUTED": 11 - found}.items() if n}
    assert f"{kept} of 10" in above.get_title(loc="left")
    assert f"{found} of 11 tokens found, {11 - found} to compute" in below.get_title(loc="left")


@pytest.mark.parametrize("changed", [0, 3, 9, None])
def test_prefix_match_frames_the_first_difference(changed):
    prompt = list(PIECES)
    if changed is not None:
        prompt[changed] = "?"
    above, below = kv.plots.prefix_match(PIECES, prompt, 8, 0, 4).axes
    assert not [box for box in boxes(above) if box.get_linewidth() > 2]
    framed = [i for i, box in enumerate(boxes(below)) if box.get_linewidth() > 2]
    assert framed == ([] if changed is None else [changed])


def test_prefix_match_shows_blanks_shortens_and_breaks_rows():
    above, below = drawn(kv.plots.prefix_match(PIECES * 4, PIECES, 40, 8, 8)).axes
    assert texts(below)[1] == "·the" and texts(below)[4] == "↵" and texts(below)[9] == "·extrao…"
    assert {round(box.get_y() + 0.4) for box in boxes(above)} == {0, 1, 2}  # 40 tokens, 16 in a row
    widths = [round(box.get_width(), 2) for box in boxes(below)]
    assert widths == [0.91, *[1.0] * 6, 0.91, 0.91, 1.0]  # the ends of a block of 8 stand back


def test_turns_with_and_without_show_counts_and_milliseconds():
    ttft = {"without": [0.5, 0.6], "with prefix caching": [0.5, 0.1]}
    left, right = drawn(kv.plots.turns_with_and_without([0, 96], np.array([100, 12]), ttft)).axes
    computed, found = left.containers
    assert heights(computed) == [100, 12] and heights(found) == [0, 96]
    assert texts(left) == ["100\nof 100", "12\nof 108"]
    assert labelled(right, "with prefix caching").get_ydata() == pytest.approx([500, 100])
    assert labelled(right, "without").get_color() != labelled(right, "with prefix caching").get_color()


def test_found_by_change_is_a_staircase():
    steps = {"blocks of 2": [0, 0, 2, 2], "blocks of 4": [0, 0, 0, 0]}
    ax = drawn(kv.plots.found_by_change(range(4), steps, 4)).axes[0]
    assert list(labelled(ax, "what the two texts share").get_ydata()) == [0, 1, 2, 3]
    assert list(labelled(ax, "blocks of 2").get_ydata()) == [0, 0, 2, 2]
    assert labelled(ax, "blocks of 2").get_drawstyle() == "steps-post"


def test_pool_history_names_and_frames():
    columns = [[(0, 0), None, None], [(0, 0), (1, 1), None]]
    ax = drawn(kv.plots.pool_history(columns, [set(), {0}], ["A", "B"])).axes[0]
    assert texts(ax) == ["A0", "", "", "A0", "B1", ""]
    assert [i for i, box in enumerate(boxes(ax)) if box.get_linewidth() > 2] == [3]
    colors = [box.get_facecolor() for box in boxes(ax)]
    assert colors[0] == colors[3] == to_rgba(module.CHATS[0]) and colors[4] == to_rgba(module.CHATS[1])
    assert colors[1] == to_rgba("white")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["A", "B"]


def test_pool_history_shows_what_all_share_in_grey():
    ax = drawn(kv.plots.pool_history([["rules", (0, 1), None]], [{0}], ["A"])).axes[0]
    assert texts(ax) == ["rules", "A1", ""]
    assert boxes(ax)[0].get_facecolor() == to_rgba(module.SHARED) and module.SHARED not in module.CHATS
    assert [label.get_text() for label in ax.get_yticklabels()] == ["place 0", "place 1", "place 2"]


def test_more_chats_than_colors():
    png(kv.plots.pool_history([[(7, 0)]], [set()], ["H"]))
    assert module.chat_name(7) == "H"


def test_shared_blocks_are_drawn_once():
    ax = drawn(kv.plots.shared_blocks([["s", "a", "x"], ["s", "a"], ["s", "b", "y", "z"]])).axes[0]
    assert faces(ax) == {"FOUND": 2, "COMPUTED": 4}
    assert texts(ax) == ["3x", "2x"]
    tall = max(boxes(ax), key=lambda box: box.get_height())
    assert (round(tall.get_x() + 0.47), tall.get_height()) == (0, pytest.approx(2.88))


def test_one_text_alone_shares_nothing():
    ax = kv.plots.shared_blocks([["s", "a"]]).axes[0]
    assert faces(ax) == {"COMPUTED": 2} and texts(ax) == []


def test_hit_rate_by_pool_marks_what_is_needed():
    ax = drawn(kv.plots.hit_rate_by_pool([33, 57, 81], {"in turn": [0.2, 0.2, 1.0], "random": [0.3, 0.5, 1.0]}, 81))
    ax = ax.axes[0]
    assert list(labelled(ax, "in turn").get_ydata()) == [0.2, 0.2, 1.0]
    assert [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == ":"] == [81]
    assert texts(ax) == ["room for everything"]


def test_found_or_computed_in_milliseconds():
    ax = drawn(kv.plots.found_or_computed([64, 1024], [0.2, 2.0], [0.1, 0.125])).axes[0]
    assert labelled(ax, "computed").get_ydata() == pytest.approx([200, 2000])
    assert texts(ax) == ["2,000 ms", "125 ms"]


def test_bills_are_shares_of_the_bill_without():
    invoices = {
        "here": {"without": [6.0, 0.0, 4.0], "with": [1.0, 0.5, 4.0]},
        "there": {"without": [80.0, 0.0, 20.0], "with": [10.0, 5.0, 20.0]},
    }
    ax = drawn(kv.plots.bills(invoices)).axes[0]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx(
        [0.6, 0, 0.4, 0.1, 0.05, 0.4, 0.8, 0, 0.2, 0.1, 0.05, 0.2]
    )
    assert texts(ax) == ["100%", "55%", "100%", "35%"]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["here, without", "with", "there, without", "with"]


def test_chat_growth_has_lines_points_and_ends():
    tokens = {"without": [100, 240, 420], "with": [100, 131, 162]}
    dollars = {"without": [0.01, 0.02, 0.04], "with": [0.01, 0.012, 0.015]}
    measured = {"without": np.array([100, 240]), "with": np.array([100, 131])}
    left, right = drawn(kv.plots.chat_growth([1, 2, 3], tokens, dollars, measured)).axes
    assert list(labelled(left, "without").get_ydata()) == tokens["without"]
    assert list(labelled(left, "with, measured").get_ydata()) == [100, 131]
    assert labelled(left, "with, measured").get_linestyle() == "None"
    assert texts(left) == ["420", "162"] and texts(right) == ["$0.04", "$0.015"]


def test_what_is_found_is_never_the_color_of_what_is_computed():
    assert len({module.FOUND, module.COMPUTED, module.OUTPUT, module.KEPT, module.NOT_KEPT}) == 5
    assert module.COMPUTED == COLORS["prefill"] and module.OUTPUT == COLORS["decode"]
    assert len(set(module.CHATS)) == len(module.CHATS)
