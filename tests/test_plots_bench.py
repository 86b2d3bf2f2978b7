"""The picture of `kvcourse bench` shows the numbers of its report."""

import copy

import pytest

import kvcourse as kv
from kvcourse.plots import png
from kvcourse.plots.bench import bench_alt

CONTEXTS = (0, 512, 2000)


def spread(middle):
    return {"median": middle, "low": middle / 2, "high": middle * 2}


def row(title, speeds, wait=1.5, peak=7e8, error=None, texts=1, bound=35.0):
    decode = [
        {"context": context, "tokens_per_second": spread(speed), "bound": bound - i, "share": 0.5}
        for i, (context, speed) in enumerate(zip(CONTEXTS, speeds, strict=True))
    ]
    about = {"title": title, "error": error, "texts": texts}
    return about | {"ttft": wait and spread(wait), "decode": decode, "peak_bytes": peak}


REPORT = {
    "model": "a model",
    "environment": {"dtype": "float32", "device_name": "a processor"},
    "ttft_context": 512,
    "contexts": [0, 512, 2000],
    "rows": [
        row("naive", (25, 0.9, 0.2)),
        row("dense", (28, 26, 22), wait=1.25, peak=8.1e8),
        row("paged batch", (90, 80, 70), texts=16, bound=350.0),
    ],
}


def test_marks_ranges_and_bounds_are_the_numbers_of_the_report():
    speed, ttft, memory = kv.plots.bench_rows(REPORT).axes
    shown = {marks.get_label(): marks.lines[0].get_xdata().tolist() for marks in speed.containers}
    assert shown == {"context 0": [25, 28, 90], "context 512": [0.9, 26, 80], "context 2,000": [0.2, 22, 70]}
    bounds = [line for line in speed.lines if "bound" in line.get_label()]
    assert [line.get_xdata().tolist() for line in bounds] == [[35 - i, 35 - i, 350 - i] for i in range(3)]
    for line, marks in zip(bounds, speed.containers, strict=True):  # each bound is beside its own speed
        assert line.get_ydata().tolist() == marks.lines[0].get_ydata().tolist()
    ranges = [marks.lines[2][0].get_segments()[0].tolist() for marks in speed.containers]
    assert [[x for x, _ in one] for one in ranges] == [[12.5, 50], [0.45, 1.8], [0.1, 0.4]]  # lowest to highest
    assert len({(m.lines[0].get_color(), m.lines[0].get_marker()) for m in speed.containers}) == 3
    assert speed.get_xscale() == "log" and "tokens per second" in speed.get_xlabel()
    names = [text.get_text() for text in speed.get_yticklabels()]
    assert names == ["naive", "dense", "paged batch (16 texts)"] and speed.get_ylim()[0] > speed.get_ylim()[1]
    assert [text.get_text() for text in ttft.texts] == ["1.5 s", "1.25 s", "1.5 s"]
    assert [bar.get_width() for bar in memory.patches] == [0.7, 0.81, 0.7]
    shown = [text.get_text() for text in speed.get_legend().get_texts()]
    assert sorted(shown) == ["bound: reading memory once", "context 0", "context 2,000", "context 512"]


def test_a_row_without_numbers_is_named_and_a_missing_wait_is_said():
    report = copy.deepcopy(REPORT)
    report["rows"][2] |= {"error": "it is not installed", "ttft": None, "peak_bytes": None}
    report["rows"][1] |= {"ttft": None, "peak_bytes": None}
    figure = kv.plots.bench_rows(report)
    assert "paged batch could not be measured" in figure.get_supxlabel()
    speed, ttft, memory = figure.axes
    assert [text.get_text() for text in ttft.texts] == ["1.5 s", "not measured"]
    assert [text.get_text() for text in memory.texts] == ["0.70 GB", "not measured"]
    assert [text.get_text() for text in speed.get_yticklabels()] == ["naive", "dense"]
    assert png(figure).startswith(b"\x89PNG")


def test_one_context_shows_its_bound_too():
    report = copy.deepcopy(REPORT) | {"contexts": [0]}
    for one in report["rows"]:
        del one["decode"][1:]
    figure = kv.plots.bench_rows(report)
    (bound,) = [line for line in figure.axes[0].lines if "bound" in line.get_label()]
    assert bound.get_xdata().tolist() == [35, 35, 350] and bound.get_marker() == "|"
    assert "At a context of 0: naive 25 tokens" in bench_alt(report)


def test_speeds_are_written_without_powers():
    report = REPORT | {"rows": [row("dense", (2e6, 3e4, 5e2))]}
    figure = kv.plots.bench_rows(report)
    png(figure)  # ticks have their labels once they are drawn
    labels = {float(tick.get_loc()): tick.label1.get_text() for tick in figure.axes[0].xaxis.get_major_ticks()}
    assert labels[1e6] == "1,000,000" and labels[1e5] == "100,000"


def test_the_name_of_a_model_is_no_formula():
    figure = kv.plots.bench_rows(REPORT | {"model": r"cheap$^^$"})
    assert png(figure).startswith(b"\x89PNG")
    assert r"cheap$^^$" in figure.get_supxlabel()


@pytest.mark.parametrize("count", [1, 11])
def test_one_row_or_many(count):
    report = REPORT | {"rows": [row(f"row {i}", (10 + i, 9, 8)) for i in range(count)]}
    figure = kv.plots.bench_rows(report)
    assert len(figure.axes[0].get_yticklabels()) == count
    assert png(figure).startswith(b"\x89PNG")


def test_the_alternative_text_says_what_the_bars_say():
    report = copy.deepcopy(REPORT)
    report["rows"][0]["error"] = "it is not installed"
    assert bench_alt(report) == (
        "Decode speed of each row, with a mark where its bound is. At a context of 512: dense 26 tokens per second "
        "(50% of its bound); paged batch (16 texts) 80 tokens per second (50% of its bound)."
    )
