"""The picture of `kvcourse bench` shows the numbers of its report."""

import copy

import pytest

import kvcourse as kv
from kvcourse.plots import png


def spread(middle):
    return {"median": middle, "low": middle / 2, "high": middle * 2}


def row(title, speeds, wait=1.5, peak=7e8, error=None):
    decode = [
        {"context": context, "tokens_per_second": spread(speed), "bound": 35.0 - i, "share": 0.5}
        for i, (context, speed) in enumerate(zip((0, 512, 2000), speeds, strict=True))
    ]
    return {"title": title, "error": error, "ttft": wait and spread(wait), "decode": decode, "peak_bytes": peak}


REPORT = {
    "model": "a model",
    "environment": {"dtype": "float32", "device_name": "a processor"},
    "ttft_context": 512,
    "rows": [row("naive", (25, 0.9, 0.2)), row("dense", (28, 26, 22), wait=1.25, peak=8.1e8), row("new", (9, 8, 7))],
}


def test_lines_bars_and_bound_are_the_numbers_of_the_report():
    speed, ttft, memory = kv.plots.bench_rows(REPORT).axes
    lines = {line.get_label(): line for line in speed.lines}
    containers = {container.get_label(): container.lines[0] for container in speed.containers}
    assert containers["naive"].get_xydata().tolist() == [[0, 25], [512, 0.9], [2000, 0.2]]
    assert containers["dense"].get_xydata().tolist() == [[0, 28], [512, 26], [2000, 22]]
    assert lines["bound: reading memory once"].get_xydata().tolist() == [[0, 35], [512, 34], [2000, 33]]
    ranges = speed.containers[0].lines[2][0].get_segments()
    assert ranges[0].tolist() == [[0, 12.5], [0, 50]]  # from the lowest to the highest
    assert speed.get_yscale() == "log" and "tokens per second" in speed.get_ylabel()
    assert [text.get_text() for text in ttft.texts] == ["1.5 s", "1.25 s", "1.5 s"]
    assert [bar.get_width() for bar in memory.patches] == [0.7, 0.81, 0.7]
    assert len({container.get_color() for container in containers.values()}) == 3


def test_a_row_without_numbers_is_named_and_a_missing_wait_is_said():
    report = copy.deepcopy(REPORT)
    report["rows"][2] |= {"error": "it is not installed", "ttft": None, "peak_bytes": None}
    report["rows"][1]["ttft"] = None
    figure = kv.plots.bench_rows(report)
    assert "new could not be measured" in figure.get_supxlabel()
    speed, ttft, _ = figure.axes
    assert [text.get_text() for text in ttft.texts] == ["1.5 s", "not measured"]
    assert [container.get_label() for container in speed.containers] == ["naive", "dense"]
    assert png(figure).startswith(b"\x89PNG")


def test_one_context_shows_its_bound_as_a_mark():
    """A dotted line of one point draws nothing."""
    report = copy.deepcopy(REPORT)
    for one in report["rows"]:
        del one["decode"][1:]
    figure = kv.plots.bench_rows(report)
    (bound,) = [line for line in figure.axes[0].lines if line.get_label().startswith("bound")]
    assert bound.get_xydata().tolist() == [[0, 35]] and bound.get_marker() not in ("", "None", None)


def test_speeds_are_written_without_powers():
    report = REPORT | {"rows": [row("dense", (2e6, 3e4, 5e2))]}
    figure = kv.plots.bench_rows(report)
    png(figure)  # ticks have their labels once they are drawn
    labels = {float(tick.get_loc()): tick.label1.get_text() for tick in figure.axes[0].yaxis.get_major_ticks()}
    assert labels[1e6] == "1,000,000" and labels[1e5] == "100,000"


def test_the_name_of_a_model_is_no_formula():
    figure = kv.plots.bench_rows(REPORT | {"model": r"cheap$^^$"})
    assert png(figure).startswith(b"\x89PNG")
    assert r"cheap$^^$" in figure.get_supxlabel()


@pytest.mark.parametrize("count", [1, 8])
def test_one_row_or_many(count):
    report = REPORT | {"rows": [row(f"row {i}", (10 + i, 9, 8)) for i in range(count)]}
    figure = kv.plots.bench_rows(report)
    assert len(figure.axes[0].containers) == count
    assert png(figure).startswith(b"\x89PNG")
