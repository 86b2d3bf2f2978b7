"""The pictures of notebook 06, over all that their sliders and data can be."""

import numpy as np
import pytest
from figures import drawn, labelled, texts
from matplotlib.colors import to_rgba

import kvcourse as kv
from kvcourse.plots import memory_maps, paged_attention
from kvcourse.plots.memory_maps import FREE, KEPT, TEXTS, look
from kvcourse.serving.snapshot import Block, Snapshot
from kvcourse.serving.waste import Addresses


def widths(ax, color):
    """Widths of the bars and boxes of this color."""
    return [patch.get_width() for patch in ax.patches if patch.get_facecolor() == to_rgba(color)]


def faces(ax):
    return [patch.get_facecolor() for patch in ax.patches]


def test_block_table_shows_each_block_twice_and_the_empty_ones():
    pieces = ["Mia", " put", " the", " red", " kite", "\n", "$a_b$"]
    above, below = drawn(kv.plots.block_table(pieces, [5, 1], 4, 8)).axes
    tokens = ["Mia", "·put", "·the", "·red", "·kite", "↵", "$a_b$"]
    assert [text for text in texts(above) if not text.startswith("block")] == [*tokens, ""]
    assert [text for text in texts(below) if not text.startswith("block") and text] == tokens
    assert sorted(text for text in texts(below) if text.startswith("block")) == [f"block {i}" for i in range(8)]
    assert len([face for face in faces(below) if face == to_rgba(FREE)]) == 6 * 4 + 1


def test_block_table_puts_a_block_of_the_text_where_its_table_says():
    _, below = kv.plots.block_table(list("abcdefgh"), [2, 0], 4, 4).axes
    place = {text.get_text(): round(text.get_position()[0], 1) for text in below.texts}
    assert place["a"] == round(2 * 4.3, 1) and place["e"] == 0.0  # four slots and a gap for each block before


def test_block_table_shortens_long_pieces():
    assert memory_maps._short(" extraordinary") == "·extra…"


def shot(*blocks):
    return Snapshot(4, tuple(Block(owners, len(owners), filled, kept) for owners, filled, kept in blocks), (), ())


def test_memory_map_fills_each_block_as_far_as_it_is_filled():
    picture = kv.plots.memory_map(shot((("a",), 4, False), (("a",), 1, False), ((), 0, False)), ["b", "a"], title="now")
    ax = drawn(picture).axes[0]
    assert widths(ax, TEXTS[1]) == pytest.approx([0.88, 0.22])  # a is the second text, wherever it stands in the pool
    assert ax.get_title(loc="left") == "now"
    assert texts(ax) == ["0", "1", "2"]
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["text a", "free or empty"]


def test_memory_map_stripes_what_is_shared_and_shows_what_is_kept():
    picture = kv.plots.memory_map(shot((("a", "b", "c"), 4, False), ((), 4, True)), ["a", "b", "c"], columns=1)
    ax = drawn(picture).axes[0]
    for color in TEXTS[:3]:
        (band,) = (patch for patch in ax.patches if patch.get_facecolor() == to_rgba(color))
        assert band.get_height() == pytest.approx(0.68 / 3)
    assert "×3" in texts(ax)
    assert widths(ax, KEPT) == pytest.approx([0.88])
    assert "free, contents kept" in [text.get_text() for text in picture.legends[0].get_texts()]


def test_a_block_of_one_text_has_no_count():
    ax = kv.plots.memory_map(shot((("a",), 2, True)), ["a"]).axes[0]
    assert texts(ax) == ["0"] and widths(ax, KEPT) == []


def test_more_texts_than_colors_differ_by_hatch():
    looks = [look(range(20), text) for text in range(20)]
    assert len(set(looks)) == 20 and looks[0][0] == looks[8][0]


def test_address_maps_color_tokens_and_tint_what_is_reserved():
    owner = np.array([[0, 0, -1], [0, 0, -1], [9, 1, -1]])
    filled = np.array([[True, True, False], [False, True, False], [True, False, False]])
    maps = {"a": Addresses(owner, filled), "b": Addresses(owner[:, :2], filled[:, :2])}
    left, right = drawn(kv.plots.address_maps(maps, {"a": [1, 2]})).axes
    image = left.images[0].get_array()
    painted = {(0, 0): TEXTS[0], (2, 0): TEXTS[1], (1, 0): memory_maps._tint(TEXTS[0]), (0, 2): "white"}
    painted[2, 1] = memory_maps._tint(TEXTS[1])
    for place, color in painted.items():
        assert image[place].tolist() == pytest.approx(to_rgba(color)[:3])
    assert left.lines[0].get_xdata().tolist() == [1.5, 2.5]
    assert right.get_xlim() == left.get_xlim() == (0, 3)
    assert right.get_title(loc="left") == "b: 2 steps"


def test_memory_shares_are_stacked_and_cited_ones_outlined():
    shares = {"longest": (0.2, 0.1, 0.7), "pages": (0.97, 0.02, 0.01)}
    ax = drawn(kv.plots.memory_shares(shares, {"paper": (0.204, 0.382)})).axes[0]
    assert [patch.get_x() for patch in ax.patches[:6]] == pytest.approx([0, 0, 0.2, 0.97, 0.3, 0.99])
    assert [patch.get_width() for patch in ax.patches[:6]] == pytest.approx([0.2, 0.97, 0.1, 0.02, 0.7, 0.01])
    assert texts(ax) == ["20.0%", "97.0%", "20.4% to 38.2%"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["longest", "pages", "paper"]


def test_memory_shares_do_without_cited_ones():
    assert texts(drawn(kv.plots.memory_shares({"all": (1.0, 0.0, 0.0)})).axes[0]) == ["100.0%"]


def test_who_runs_has_a_bar_for_each_span():
    static = {"text 0": [("prefill", 0, 1), ("decode", 1, 3), ("idle", 3, 9)], "text 1": [("wait", 0, 9)]}
    charts = {"static": static, "continuous": {"text 0": [("again", 0, 2.5)]}}
    figure = drawn(kv.plots.who_runs(charts, unit="second"))
    above, below = figure.axes
    drawn_spans = [path.get_extents() for bars in above.collections for path in bars.get_paths()]
    assert [(box.x0, box.x1, round(box.y0 + 0.39)) for box in drawn_spans] == [
        (0, 1, 0),
        (1, 3, 0),
        (3, 9, 0),
        (0, 9, 1),
    ]
    assert above.get_title(loc="left") == "static: all done at second 9"
    assert below.get_title(loc="left") == "continuous: all done at second 2.5"
    assert below.get_xlabel() == "second" and below.get_xlim() == above.get_xlim()
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [paged_attention.DOING[what][2] for what in ("wait", "prefill", "decode", "again", "idle")]


def test_who_runs_names_only_what_happens():
    figure = kv.plots.who_runs({"alone": {"text 0": [("decode", 0, 1)]}})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a token is made"]


def test_load_curves_in_tokens_and_seconds():
    curve = {
        "throughput": [10, 12],
        "ttft": {50: [0.1, 2.0], 95: [0.2, 4.0]},
        "itl": {50: [0.01, 0.02], 95: [0.03, 0.04]},
    }
    made, first, gaps = drawn(kv.plots.load_curves([1, 2], {"static": curve, "pages": curve}, [10, 20])).axes
    assert labelled(made, "static").get_ydata() == pytest.approx([10, 12])
    assert labelled(made, "asked for").get_ydata() == pytest.approx([10, 20])
    assert first.lines[1].get_ydata() == pytest.approx([0.2, 4.0])
    assert gaps.lines[0].get_ydata() == pytest.approx([0.01, 0.02])
    assert [line.get_markerfacecolor() for line in first.lines[:2]] == ["white", first.lines[1].get_color()]
    assert first.lines[0].get_markersize() > first.lines[2].get_markersize()  # equal curves are both seen
    assert "hollow: p50, full: p95" in first.get_title(loc="left") and first.get_yscale() == "log"


def test_chunked_prefill_shows_the_ends_and_trades_between_all():
    early = [-0.1, 0.3], [0.9, 0.05]  # a gap that ended before the prompt came is shown, but not its doing
    gaps = {32: early, 64: ([0.2], [0.07]), 512: ([0.5, 0.9], [0.4, 0.03])}
    trace, trade = drawn(kv.plots.chunked_prefill(gaps, {32: 1.0, 64: 0.8, 512: 0.5})).axes
    assert labelled(trace, "at most 512 tokens a step").get_ydata() == pytest.approx([400, 30])
    assert labelled(trace, "at most 32 tokens a step").get_xdata() == pytest.approx([-0.1, 0.3])
    assert labelled(trade, "longest gap of a reader").get_ydata() == pytest.approx([50, 70, 400])
    assert labelled(trade, "first token of the long prompt").get_ydata() == pytest.approx([1000, 800, 500])


def test_page_sizes_in_shares_and_milliseconds():
    left, right = drawn(kv.plots.page_sizes([1, 16], [0.0, 0.03], {"gather": [0.05, 0.04], "dense": [0.03, 0.03]})).axes
    assert left.lines[0].get_ydata() == pytest.approx([0, 0.03]) and left.get_ylim() == (0, 0.1)
    assert labelled(right, "gather").get_ydata() == pytest.approx([50, 40])
    assert [label.get_text() for label in right.get_xticklabels()] == ["1", "16"]


def test_page_sizes_leave_room_above_the_largest_share():
    left, _ = drawn(kv.plots.page_sizes([1, 256], [0.0, 0.25], {"gather": [0.05, 0.04]})).axes
    assert left.get_ylim() == pytest.approx((0, 0.3))


def test_running_texts_has_a_line_for_each_way():
    ax = drawn(kv.plots.running_texts({"reserved": [1, 2, 2], "pages": [5, 1]})).axes[0]
    assert labelled(ax, "reserved").get_ydata().tolist() == [1, 2, 2]
    assert labelled(ax, "pages").get_ydata().tolist() == [5, 1]


def test_what_texts_do_differs_by_more_than_color():
    assert len({(color, hatch) for color, hatch, _ in paged_attention.DOING.values()}) == len(paged_attention.DOING)
