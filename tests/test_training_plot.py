"""The picture of the training runs shows the numbers of their curves."""

import pytest

import kvcourse as kv
from kvcourse.plots import png


def point(tokens, loss, validation_loss):
    return {"step": 1, "tokens": tokens, "loss": loss, "validation_loss": validation_loss, "recall": {}}


def test_each_run_has_its_line_and_its_dots():
    curves = {
        "tiny-mha": [point(500_000, 5.0, 6.0), point(1_000_000, 3.0, 4.0)],
        "tiny-gqa": [point(500_000, 5.5, 6.5), point(1_000_000, 3.5, 4.5)],
    }
    figure = kv.plots.loss_curves(curves)
    (ax,) = figure.axes
    lines = {line.get_label(): line for line in ax.lines}
    assert lines["tiny-mha"].get_xydata().tolist() == [[0.5, 6], [1, 4]]
    assert lines["tiny-gqa"].get_xydata().tolist() == [[0.5, 6.5], [1, 4.5]]
    assert [line.get_ydata().tolist() for line in ax.lines if line.get_marker() == "." and len(line.get_xdata())] == [
        [5, 3],
        [5.5, 3.5],
    ]
    assert lines["tiny-mha"].get_color() != lines["tiny-gqa"].get_color()
    assert lines["tiny-mha"].get_linestyle() != lines["tiny-gqa"].get_linestyle()
    assert "nats" in ax.get_ylabel() and "millions" in ax.get_xlabel() and ax.get_ylim()[0] == 0
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [*curves, "stories being read"]
    assert png(figure).startswith(b"\x89PNG")


def test_a_single_point_is_seen():
    (ax,) = kv.plots.loss_curves({"tiny-mha": [point(10, 5.0, 6.0)]}).axes
    assert ax.lines[0].get_marker() == "o"


def test_more_runs_than_colors_are_drawn():
    assert (
        len(kv.plots.loss_curves({str(n): [point(1, 1.0, 1.0), point(2, 1.0, 1.0)] for n in range(9)}).axes[0].lines)
        == 19
    )


@pytest.mark.parametrize(("curves", "said"), [({}, "no point of a curve:"), ({"a": []}, "no point of a curve of a:")])
def test_nothing_to_draw_is_said(curves, said):
    with pytest.raises(ValueError, match=said):
        kv.plots.loss_curves(curves)
