"""Drawings of notebook 00: what they show is what they were given."""

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch

from kvcourse import plots, reading
from kvcourse.plots import COLORS, timeline

PIECES = ["The", " lo", "af", " rises", ".", "\n", "\n", "It", " costs", " $", "5", " or", " $", "6", " today", ""]
ARRIVALS = list(accumulate([0.5] + [0.04] * (len(PIECES) - 1)))


def test_reading_sentence():
    assert timeline.reading_sentence([1.0, 1.1], 2) == "A reader of 2 words a second never waits after the first word"
    assert timeline.reading_sentence([1.0, 3.0], 2).endswith("waits for 1 word, 1.50 s in all")
    assert timeline.reading_sentence([1.0, 3.0, 6.0], 2).endswith("waits for 2 words, 4.00 s in all")


# token_timeline -------------------------------------------------------------------------------------------------


def ticks(ax):
    """Where the vertical lines of the axes stand."""
    [lines] = [c for c in ax.collections if c.get_segments() and len(c.get_segments()[0]) == 2]
    return [segment[0][0] for segment in lines.get_segments()]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_token_timeline_has_one_tick_a_token():
    whole, close = plots.token_timeline(ARRIVALS, PIECES, first=6).axes
    assert ticks(whole) == pytest.approx(ARRIVALS)
    assert ticks(close) == pytest.approx(ARRIVALS[:6])
    assert "16 tokens" in whole.get_title("left") and "40 ms" in whole.get_title("left")
    assert "first token\n500 ms" in texts(whole)[0]
    assert texts(close)[:5] == ["40"] * 5
    assert texts(close)[5:] == ["The", "lo", "af", "rises", ".", "↵"]


def test_token_timeline_labels_only_where_there_is_room():
    arrivals = [0.5, 0.9, 0.901, 0.902, 1.3]
    _, close = plots.token_timeline(arrivals, ["a", " b", " c", " d", " e"]).axes
    assert [text for text in texts(close) if text.isalpha()] == ["a", "b", "e"]
    assert [text for text in texts(close) if text.isdigit()] == ["400", "398"]


@pytest.mark.parametrize("count", [1, 2, 5, 16])
@pytest.mark.parametrize("first_wait", [0.001, 0.04, 5.0])
def test_token_timeline_of_any_answer(count, first_wait):
    arrivals = list(accumulate([first_wait] + [0.04] * (count - 1)))
    figure = plots.token_timeline(arrivals, PIECES[:count])
    assert ticks(figure.axes[0]) == pytest.approx(arrivals)
    assert plots.png(figure).startswith(b"\x89PNG")


def test_token_timeline_shows_text_as_it_is():
    _, close = plots.token_timeline(ARRIVALS, PIECES, first=16).axes
    assert texts(close)[-1] == "(end)"
    assert not any(text.get_parse_math() for text in close.texts if "$" in text.get_text())
    _, close = plots.token_timeline([1.0, 2.0], [" ", "x" * 30]).axes
    assert texts(close)[1] == "␣" and len(texts(close)[2]) <= 14


# reading --------------------------------------------------------------------------------------------------------

WORDS = list(accumulate([0.6] + [0.05, 0.2] * 20))


@pytest.mark.parametrize("speed", [1, 2, 5, 8, 20, 60, 400])
def test_reading_over_the_range_of_the_slider(speed):
    figure = plots.reading(WORDS, speed, {"average reader": 4.0})
    [ax] = figure.axes
    screen, other, reader = ax.lines
    assert list(screen.get_xdata()) == [0, *WORDS]
    assert list(screen.get_ydata()) == list(range(len(WORDS) + 1))
    assert other.get_label() == "average reader"
    assert list(reader.get_ydata()[1::2]) == list(range(1, len(WORDS) + 1))
    assert all(reader.get_xdata()[::2] >= np.array(WORDS) - 1e-12)  # nobody reads what is not there
    drawn = ax.collections[0].get_segments() if ax.collections else []
    late = reading.waits(WORDS, speed)
    assert sum(end[0] - start[0] for start, end in drawn) == pytest.approx(sum(late.values()))
    assert len(drawn) == len(late)
    assert ax.get_title("left") == timeline.reading_sentence(WORDS, speed)
    assert ax.get_xlim()[1] >= WORDS[-1]
    assert plots.png(figure).startswith(b"\x89PNG")


def test_reading_of_one_word():
    assert plots.png(plots.reading([0.5], 5)).startswith(b"\x89PNG")


# first_and_gaps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 4])
def test_first_and_gaps_shows_each_row(count):
    rows = {f"run {row}": [0.5 + row, 0.6 + row, 0.8 + row] for row in range(count)}
    [ax] = plots.first_and_gaps(rows).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == list(rows)
    dots, middles, firsts = ax.lines[0::3], ax.lines[1::3], ax.lines[2::3]
    for row in range(count):
        assert dots[row].get_xdata() == pytest.approx([100, 200])
        assert middles[row].get_xdata() == pytest.approx([150, 150])
        assert firsts[row].get_xdata() == pytest.approx([500 + 1000 * row])
        assert round(np.mean(dots[row].get_ydata())) == round(firsts[row].get_ydata()[0]) == row
    assert len(ax.get_legend().get_texts()) == 3
    assert "log" in ax.get_xlabel() and ax.get_xscale() == "log"


def test_first_and_gaps_of_one_token():
    [ax] = plots.first_and_gaps({"short": [0.5]}).axes
    assert ax.lines[-1].get_xdata() == pytest.approx([500])


# course_map -----------------------------------------------------------------------------------------------------


def test_course_map_says_what_is_here():
    [ax] = plots.course_map({"00", "02"}, here="00").axes
    boxes = [patch for patch in ax.patches if isinstance(patch, FancyBboxPatch)]
    filled = [to_hex(box.get_facecolor()) != "#ffffff" for box in boxes]
    assert filled == [True, False, True, *[False] * 8]
    assert [box.get_linestyle() == "-" for box in boxes] == filled
    assert to_hex(boxes[0].get_edgecolor()) == COLORS["vermillion"].lower()
    assert texts(ax).count("in the making") == 9 and texts(ax).count("you are here") == 1
    for number in range(11):
        assert any(text.startswith(f"{number:02}  ") for text in texts(ax))


def test_course_map_calls_each_notebook_by_its_own_name():
    sources = sorted((Path(__file__).resolve().parent.parent / "notebooks" / "src").glob("[0-9]*.py"))
    names = {path.stem[:2]: path.stem[3:].replace("_", " ") for path in sources}
    titles = {number: title for row in timeline.COURSE.values() for number, title, _ in row}
    assert {number: title.lower() for number, title in titles.items()} == names


def test_no_words_of_the_map_run_out_of_their_box():
    figure = plots.course_map(set(), here="00")
    figure.draw_without_rendering()
    [ax] = figure.axes
    boxes = [patch.get_window_extent() for patch in ax.patches if isinstance(patch, FancyBboxPatch)]
    inside = [text.get_window_extent() for text in ax.texts if text.get_style() != "italic"]
    assert len(inside) == 2 * len(boxes) == 22
    for text, box in zip(inside, [box for box in boxes for _ in range(2)], strict=True):
        assert box.x0 < text.x0 and text.x1 < box.x1 and box.y0 < text.y0 and text.y1 < box.y1
    for title, question in zip(inside[::2], inside[1::2], strict=True):
        assert question.y1 <= title.y0


def test_course_map_complete_and_with_other_words():
    everything = {f"{number:02}" for number in range(11)}
    [ax] = plots.course_map(everything).axes
    assert "in the making" not in texts(ax)
    [ax] = plots.course_map({"00"}, missing="see the repository").axes
    assert texts(ax).count("see the repository") == 10
