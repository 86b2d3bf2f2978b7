import pytest
from figures import drawn, texts

from kvcourse import plots
from kvcourse.entry import Entry
from kvcourse.plots.base import COLORS
from kvcourse.scoring import Score

ODD = [
    (Entry("01.zero", guess=0, measured=0, unit="tokens"), "guess 0, measured 0 tokens", 1.0),
    (Entry("01.zero_measured", guess=2, measured=0, unit="of 16"), "guess 2, measured 0 of 16: not right", None),
    (Entry("01.zero_guess", guess=0, measured=3.2), "guess 0, measured 3.2: not right", None),
    (Entry("01.negative", guess=-2, measured=-4.0, unit="%"), "guess -2, measured -4 %", 0.5),
    (Entry("01.signs", guess=-2, measured=3), "guess -2, measured 3: not right", None),
    (Entry("01.word", guess="Q_proj ", measured="q_proj"), "guess Q_proj, measured q_proj: right", None),
    (Entry("01.word_wrong", guess="k", measured="v"), "guess k, measured v: not right", None),
    (Entry("01.number", guess=9, measured="no", unit="s"), "guess 9 s, measured no s: not comparable", None),
    (Entry("01.huge", guess=10**308, measured=1e-300), "guess 1e308, measured 1e-300: not right", None),
    (Entry("01.far_below", guess=1, measured=10**7, unit="rows"), "guess 1, measured 1e7 rows", 1e-4),
    (Entry("01.far_above", guess=10**7, measured=1, unit="rows"), "guess 1e7, measured 1 rows", 1e4),
    (Entry("01.waiting", guess=3, unit="s"), "guess 3 s, not measured here", None),
    (Entry("01.no_guess", measured=3, unit="$"), "no guess, measured 3 $", None),
    (Entry("01.nothing"), "no guess, not measured here", None),
    (Entry("01.long", guess="word " * 50, measured="x"), f"guess {'word ' * 6}word..., measured x: not right", None),
]


@pytest.mark.parametrize(("bound", "named"), [(2.5, True), (None, False), (0, False)])
def test_the_legend_names_a_bound_where_one_is_drawn(bound, named):
    figure = drawn(plots.guesses(Score((Entry("01.a", guess=2, measured=3, bound=bound),))))
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    wanted = ["measured", "your guess", *(["bound"] if named else []), "within a factor of two"]
    assert legend == wanted and (points(figure.axes[0], "bound") != {}) == named


def points(ax, name):
    """Where the marks of one meaning stand, by row."""
    lines = [line for line in ax.lines if line.get_color() == COLORS[name]]
    return {int(line.get_ydata()[0]): float(line.get_xdata()[0]) for line in lines}


@pytest.mark.parametrize("entry, said, place", ODD, ids=[entry.key for entry, *_ in ODD])
def test_each_kind_of_entry_is_drawn_alone_and_said(entry, said, place):
    [ax] = drawn(plots.guesses(Score((entry,)))).axes
    guess = [line for line in ax.lines if line.get_marker() in "o<>"]
    assert [" ".join(text.split()) for text in texts(ax)] == [said]
    assert [float(line.get_xdata()[0]) for line in guess] == ([] if place is None else [place])


def test_all_of_them_together_keep_their_rows():
    [ax] = drawn(plots.guesses(Score(tuple(entry for entry, *_ in ODD)))).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == [entry.key for entry, *_ in ODD]
    assert len(texts(ax)) == len(ODD)
    assert [line.get_marker() for line in ax.lines if line.get_marker() in "<>"] == ["<", ">"]


def test_guess_and_bound_are_factors_of_the_measurement():
    entries = (
        Entry("01.rows", guess=342, bound=1368, measured=1368, unit="rows"),
        Entry("01.free", bound=4.0, measured=2.0),
    )
    [ax] = drawn(plots.guesses(Score(entries))).axes
    assert ax.get_xscale() == "log"
    assert points(ax, "guess") == {0: 0.25}
    assert points(ax, "bound") == {0: 1.0, 1: 2.0}
    assert ax.get_xlim()[0] < 0.25 and ax.get_xlim()[1] > 4
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1/2", "1", "2"]


@pytest.mark.parametrize("count", [1, 30])
def test_few_and_many_rows_have_room(count):
    long_name = "01." + "a_long_name_" * 5
    figure = drawn(plots.guesses(Score((Entry(long_name, guess=3, measured=4, unit="u" * 60),) * count)))
    [ax] = figure.axes
    assert ax.get_position().width > 0.3  # names and numbers leave the plot its room
    assert ax.get_position().height * figure.get_figheight() / count > 0.3
    [label, *_] = ax.get_yticklabels()
    assert label.get_text().replace("\n", "") == long_name


def test_an_empty_score_is_a_sentence():
    [ax] = plots.guesses(Score(())).axes
    assert texts(ax) == ["Nothing was guessed or measured here yet."]
