import gc
import struct
import subprocess
import sys
import weakref

import matplotlib
import nbformat
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient

from kvcourse import plots, widgets
from kvcourse.plots import base
from kvcourse.results import Entry


def line(n=3, size=(8, 4.5)):
    fig, ax = base.new_figure(size=size)
    ax.plot(range(n), range(n))
    return fig


def test_show_prints_the_sentence_outside_of_a_notebook(capsys):
    base.show(line(), alt="A line that rises.")
    assert capsys.readouterr().out == "[figure] A line that rises.\n"


@pytest.mark.parametrize("alt", ["", "  ", None, 3])
def test_a_figure_needs_a_sentence(alt):
    with pytest.raises(ValueError, match="sentence"):
        base.show(line(), alt=alt)
    with pytest.raises(TypeError):
        base.show(line())


def test_only_a_figure_is_shown():
    with pytest.raises(TypeError, match="Figure is needed; a Axes"):
        base.show(line().axes[0], alt="An axes.")


def test_the_png_is_880_by_495_dots():
    image = base.png(line())
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", image[16:24]) == (880, 495)
    assert len(image) < 100_000


def test_a_hundred_figures_leave_none_behind(capsys):
    figures = []
    for _ in range(100):
        figure = line(size=(2, 1))
        figures.append(weakref.ref(figure))
        base.show(figure, alt="A line.")
        del figure
    gc.collect()
    assert not any(reference() for reference in figures)


def test_a_figure_made_with_pyplot_is_closed():
    code = """
import matplotlib; matplotlib.use("agg")
import matplotlib.pyplot as plt
from kvcourse.plots import show
figure, _ = plt.subplots()
assert plt.get_fignums() == [1]
show(figure, alt="Empty axes.")
assert plt.get_fignums() == []
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_drawing_changes_no_global_setting_and_uses_the_course_style():
    before = dict(matplotlib.rcParams)
    seen = {}

    @base.drawing
    def probe():
        seen["size"] = matplotlib.rcParams["font.size"]
        return line()

    try:
        base.png(plots.probe())
    finally:
        del base.DRAWINGS["probe"]
    assert dict(matplotlib.rcParams) == before
    assert seen["size"] == base.STYLE["font.size"] != before["font.size"]


def test_two_drawings_of_one_name_are_refused():
    def predict_measure(entry): ...

    with pytest.raises(ValueError, match="two drawings are called 'predict_measure'"):
        base.drawing(predict_measure)


def test_drawings_are_found_by_name():
    for name, draw in base.DRAWINGS.items():  # no module of the folder may hide a drawing of the same name
        assert getattr(plots, name) is draw
    with pytest.raises(AttributeError, match="did you mean predict_measure"):
        plots.predict_measures  # noqa: B018


def test_colors_follow_okabe_and_ito():
    assert [base.OKABE_ITO[name] for name in ("blue", "vermillion", "green")] == ["#0072B2", "#D55E00", "#009E73"]


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_guess_bound_and_measurement_are_bars_with_their_numbers():
    figure = plots.predict_measure(Entry("01.a", guess=3, bound=2.0, measured=1.876, unit="s", question="How long?"))
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [3, 2.0, 1.876]
    assert texts(figure) == ["3 s", "2 s", "1.88 s"]
    assert axes.get_title(loc="left") == "How long?" and axes.get_xscale() == "linear"
    assert axes.get_xlim()[1] > 3


def test_far_apart_numbers_get_a_log_axis():
    figure = plots.predict_measure(Entry("01.a", guess=2, measured=1500.0))
    assert figure.axes[0].get_xscale() == "log" and "log scale" in figure.axes[0].get_xlabel()
    assert texts(figure) == ["2", "1,500"]
    base.png(figure)


@pytest.mark.parametrize(
    "entry, said",
    [
        (Entry("01.a"), ["no guess", "not measured here"]),
        (Entry("01.a", measured=0.0), ["no guess", "0"]),
        (Entry("01.a", guess="yes", measured="no"), ["yes", "no"]),
        (Entry("01.a", guess=-2, measured=3), ["-2", "3"]),
        (Entry("01.a", guess=0, measured=1e9), ["0", "1e9"]),
        (Entry("01.a", guess=10**30, measured=3), ["1e30", "3"]),
        (Entry("01.a", guess=9e99, measured=2e-100), ["9e99", "2e-100"]),
        (Entry("01.a", guess=10**308, measured=5e-324), ["1e308", "4.94e-324"]),
        (Entry("01.a", guess=1e308, measured=-1e308), ["1e308", "-1e308"]),
        (Entry("01.a", guess=r"$\foo$", question=r"$\foo$?", unit=r"$\foo$"), [r"$\foo$ $\foo$", "not measured here"]),
    ],
)
def test_what_is_missing_is_said_in_the_picture(entry, said):
    figure = plots.predict_measure(entry)
    assert texts(figure) == said
    assert isinstance(figure, Figure) and base.png(figure)


def test_captions_are_shown_letter_by_letter():
    assert base._literal("a * b_c <d> `e` & [f]") == "a &#42; b&#95;c &lt;d&gt; &#96;e&#96; &amp; &#91;f&#93;"


# Widgets ------------------------------------------------------------------------------------------------------


def test_moving_a_slider_redraws_and_replaces_the_picture():
    calls = []

    def draw(n, heads, causal):
        calls.append((n, heads, causal))
        return line(n)

    box = widgets.explore(draw, n=(1, 9, 1, 3), heads=[1, 2, 4], causal=True)
    n, heads, causal, picture = box.children
    first = picture.value
    assert calls == [(3, 1, True)] and first.count("<img") == 1
    n.value = 7
    assert calls[-1] == (7, 1, True)
    assert picture.value.count("<img") == 1 and picture.value != first
    assert 'alt="The picture for n = 7, heads = 1, causal = True."' in picture.value
    heads.value = 4
    causal.value = False
    assert calls[-2:] == [(7, 4, True), (7, 4, False)]
    n.value, heads.value, causal.value = 3, 1, True
    assert picture.value == first
    assert repr(box) == "Explorer(n, heads, causal)"


def test_sliders_wait_until_they_are_let_go():
    import ipywidgets

    box = widgets.explore(lambda n, x, k: line(), n=(1, 9, 1, 3), x=(0.0, 1.0, 0.1, 0.5), k=[1, 2])
    n, x, k, _ = box.children
    assert [type(c) for c in (n, x, k)] == [ipywidgets.IntSlider, ipywidgets.FloatSlider, ipywidgets.SelectionSlider]
    assert not any(c.continuous_update for c in (n, x, k))
    assert (n.min, n.max, n.step, n.value) == (1, 9, 1, 3) and x.value == 0.5


def test_a_ready_control_and_texts_are_accepted():
    import ipywidgets

    ready = ipywidgets.BoundedIntText(value=4, min=1, max=9)
    box = widgets.explore(lambda n, kind: (line(n), f"The {kind} line."), n=ready, kind=["naive", "cached"])
    assert box.children[0] is ready
    box.children[1].value = "cached"
    assert 'alt="The cached line."' in box.children[2].value


def test_an_error_after_a_move_is_visible_and_goes_away():
    def draw(n):
        return line(n) if n < 5 else 1 / 0

    slider, picture = widgets.explore(draw, n=(1, 9, 1, 3)).children
    good = picture.value
    slider.value = 5
    assert "No picture for n = 5. ZeroDivisionError: division by zero" in picture.value
    assert "<img" not in picture.value
    slider.value = 3
    assert picture.value == good


def test_what_was_pasted_is_not_repeated_in_full():
    import ipywidgets

    def draw(text):
        if len(text) > 100:
            raise ValueError("too long")
        return line()

    text, picture = widgets.explore(draw, text=ipywidgets.Text("short")).children
    text.value = "word " * 400
    assert "No picture for text = word word word word" in picture.value and len(picture.value) < 300


def test_an_error_at_the_default_values_is_raised():
    with pytest.raises(ZeroDivisionError):
        widgets.explore(lambda n: 1 / 0, n=(1, 9, 1, 3))
    with pytest.raises(TypeError, match="Figure is needed"):
        widgets.explore(lambda n: None, n=(1, 9, 1, 3))
    with pytest.raises(TypeError, match="it returned 3 values"):
        widgets.explore(lambda n: (line(), "A line.", n), n=(1, 9, 1, 3))


@pytest.mark.parametrize("control", [(1, 9, 3), (9, 1, 1, 3), (1, 9, 0, 3), (1, 9, 1, 12), [], "n", 5, None])
def test_malformed_controls_are_refused(control):
    with pytest.raises(ValueError, match="^n="):
        widgets.explore(lambda n: line(), n=control)


def test_controls_must_be_the_parameters_of_the_drawing_function():
    with pytest.raises(TypeError, match="does not take the controls m"):
        widgets.explore(lambda n: line(), m=(1, 9, 1, 3))


# In a notebook ------------------------------------------------------------------------------------------------

CELLS = [
    """
import kvcourse.results as results
from kvcourse.plots import new_figure, show
from kvcourse.widgets import explore
def draw(n):
    fig, ax = new_figure(); ax.plot(range(n)); return fig
show(draw(3), alt="A line * that rises.")
""",
    "explore(draw, n=(1, 9, 1, 3))",
    'results.measure("01.a", 1.5)',
    "entry = results.get('01.a')\nentry",
    """
from kvcourse.check.framework import exercise, diagnose
@exercise(value=True)
def one(answer):
    return diagnose(answer, 1)
one(1)
""",
    "for value in (1, 2): one(value)",
]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCOURSE_RESULTS", str(folder))
        NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    return [cell.outputs for cell in notebook.cells]


def test_in_a_notebook_the_figure_carries_its_alternative_and_a_caption(executed):
    image, caption = executed[0]
    assert image.metadata["image/png"]["alt"] == "A line * that rises."
    assert image.data["text/plain"] == "<figure>"  # the same on every machine
    assert caption.data["text/markdown"] == "<small><em>A line &#42; that rises.</em></small>"


def test_in_a_notebook_the_explorer_is_one_widget_with_a_constant_text(executed):
    (view,) = executed[1]
    assert view.data["text/plain"] == "Explorer(n)"
    assert "application/vnd.jupyter.widget-view+json" in view.data


def test_in_a_notebook_nothing_is_printed_twice(executed):
    printed = [[output.text for output in outputs] for outputs in executed[2:]]
    line = "01.a  no guess | measured 1.5\n"
    assert printed == [
        [line],
        [line],
        ["one is right.\n"],
        ["one is right.\none is not right yet: expected 1, yours is 2; yours is 2 times the right value\n"],
    ]
