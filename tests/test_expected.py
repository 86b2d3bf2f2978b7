"""Which numbers are usual: recording runs, ranges from them, and what a summary says."""

import json
import re
from pathlib import Path

import nbformat
import pytest
import torch

from kvcourse import device, results
from kvcourse.device import Placement, device_class
from kvcourse.entry import PRINTED, Entry, format_number
from kvcourse.expected import ranges, records
from kvcourse.expected.records import Figure, Run
from kvcourse.notebooks.figures import measured_figures

COURSE = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Records of our own, and a machine with two cores."""
    monkeypatch.setattr(records, "data_folder", lambda: tmp_path / "data")
    (tmp_path / "data" / "expected").mkdir(parents=True)
    monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return tmp_path / "data" / "expected"


def put(folder, *runs, class_name="cpu-2-cores", model="smollm2-135m"):
    """A file with a run for each dict of key to figure."""
    content = [
        {"environment": {"model": model}, "figures": {key: figure._asdict() for key, figure in run.items()}}
        for run in runs
    ]
    (folder / f"{class_name}.json").write_text(json.dumps({"runs": content}))


def entry(measured, key="01.a", unit="times", **fields):
    given = {"device_class": "cpu-2-cores", "model": "smollm2-135m"} | fields
    return Entry(key, measured=measured, unit=unit, **given)


# --- classes of devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads, name", [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (12, 8), (64, 64)])
def test_cpus_are_classed_by_the_cores_that_compute(monkeypatch, threads, name):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert device_class() == f"cpu-{name}-cores"


def test_gpus_are_classed_by_the_format_they_compute_in(monkeypatch):
    place = Placement(torch.device("cuda"), torch.float16, "")
    monkeypatch.setattr(device, "placement", lambda: place)
    assert device_class() == "cuda-float16"


@pytest.mark.parametrize(
    "name, words",
    [
        ("cpu-1-cores", "CPUs with 1 core"),
        ("cpu-2-cores", "CPUs with 2 to 3 cores"),
        ("cpu-8-cores", "CPUs with 8 to 15 cores"),
        ("cuda-bfloat16", "GPUs in bfloat16"),
        ("", "this machine"),
    ],
)
def test_a_class_in_words(name, words):
    assert ranges.described(name) == words


# --- ranges --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, values, unit, counted, low, high",
    [
        ("01.rows", [1368, 1368], "rows", True, 1368, 1368),
        ("01.rows", [1368, 1400], "rows", True, 1368, 1400),
        ("02.speed", [12.0, 15.0], "times", False, 8.0, 22.5),
        ("02.time_exponent", [1.5, 2.0], "", False, 1.25, 2.25),
        ("02.crossover", [2], "tokens", False, 1, 3),
        ("02.crossover", [100], "tokens", False, 67, 150),
        ("02.flips", [0], "of 16 tokens", False, 0, 1),
        ("05.recall", [0.0], "%", False, 0.0, 2.0),
        ("05.recall", [60.0], "%", False, 40.0, 90.0),
        ("04.rise", [-6.0, 3.0], "%", False, -9.0, 5.0),
        ("02.negative", [-3.0], "times", False, -4.5, -2.0),
        ("05.recall", [100.0, 100.0, 100.0], "%", False, 95.0, 100.0),
        ("05.recall", [0.0, 0.0, 0.0], "%", False, 0.0, 5.0),
        ("05.recall", [100.0, 100.0], "%", False, 66.667, 150.0),  # two may agree by chance
        ("05.reach", [252, 252, 252], "", False, 240, 264),
        ("02.flips", [0, 0, 0], "of 16 tokens", False, 0, 1),
        ("09.loss", [1.004, 1.0042, 1.0041], "times", False, 0.95379, 1.05441),
        ("04.rise", [-6.0, -6.0, -6.0], "%", False, -11.0, -1.0),
        ("02.speed", [12.0, 12.1, 12.0], "times", False, 8.0, 18.15),
    ],
)
def test_a_range_goes_from_the_lowest_to_the_highest_run_widened(key, values, unit, counted, low, high):
    usual = ranges.usual_range(key, [Figure(value, unit, counted) for value in values])
    assert (usual.low, usual.high) == pytest.approx((low, high), rel=1e-4)
    assert usual.runs == len(values)


def test_one_run_that_did_not_count_widens_the_range():
    usual = ranges.usual_range("01.a", [Figure(3.0, "", True), Figure(3.0, "", False)])
    assert (usual.low, usual.high) == (2.0, 4.5)


def test_a_figure_in_another_unit_is_another_figure():
    runs = [Run({}, {"01.a": Figure(3.0, "ms", False)})]
    assert ranges.ranges(runs, [entry(3.0, unit="s")]) == {}
    assert ranges.ranges(runs, [entry("never", unit="")])["01.a"].unit == "ms"


@pytest.mark.parametrize(
    "measured, place",
    [
        (8.0, "usual"),
        (7.99, "lower than usual"),
        (22.5, "usual"),
        (22.6, "higher than usual"),
        (22.54, "usual"),  # printed 22.5, as the end of the range is
        ("never", "usually a number"),
    ],
)
def test_where_a_number_stands(measured, place):
    usual = ranges.usual_range("01.a", [Figure(12.0, "times", False), Figure(15.0, "times", False)])
    assert ranges.stands(entry(measured), usual) == place


@pytest.mark.parametrize("measured, place", [(1368, "usual"), (1369, "higher than usual"), (1367, "lower than usual")])
def test_a_count_must_be_the_same(measured, place):
    usual = ranges.usual_range("01.rows", [Figure(1368, "rows", True)])
    assert ranges.stands(entry(measured, unit="rows"), usual) == place


# --- what a summary says -------------------------------------------------------------------------------------


def test_a_report_on_a_class_that_was_recorded(folder):
    low, high = ({"01.a": Figure(value, "times", False), "01.rows": Figure(9, "rows", True)} for value in (12.0, 15.0))
    put(folder, low, high)
    entries = [entry(30.0), entry(9, "01.rows", "rows"), entry(1.0, "01.new"), entry(None, "01.none")]
    first, second, header, *rows, advice, _, _, _ = ranges.report(entries).splitlines()
    assert f"{first} {second}" == "Is my number normal? Beside 2 runs with smollm2-135m on CPUs with 2 to 3 cores:"
    assert [re.split(" {3,}", row) for row in (header, *rows)] == [
        ["", "measured", "usual"],
        ["01.a", "30 times", "8 to 22.5 times", "higher than usual"],
        ["01.rows", "9 rows", "9 rows", "usual"],
        ["01.new", "1 times", "no range yet"],
    ]
    assert advice.startswith("A time out of its range")
    assert "out of its range" not in ranges.report(entries[1:])


def test_another_class_is_shown_and_does_not_judge(folder):
    put(folder, {"01.a": Figure(12.0, "times", False)}, {"01.a": Figure(12.0, "times", False)})
    put(folder, {"01.a": Figure(99.0, "times", False)}, class_name="cuda-bfloat16")
    said = ranges.report([entry(30.0, device_class="cpu-8-cores")])
    assert " ".join(said.split()).startswith(
        "Is my number normal? There is no range for CPUs with 8 to 15 cores yet; "
        "beside 2 runs with smollm2-135m on CPUs with 2 to 3 cores:"
    )
    assert "8 to 18 times" in said and "than usual" not in said and "99" not in said


def test_runs_of_another_model_are_not_compared(folder):
    put(folder, {"01.a": Figure(12.0, "times", False)}, model="tiny-gqa")
    assert ranges.report([entry(12.0)]) == "Is my number normal?\nNo run with smollm2-135m was recorded yet."
    assert "usual" in ranges.report([entry(12.0, model="tiny-gqa")])


def test_what_was_measured_on_two_machines_is_reported_apart(folder):
    put(folder, {"01.a": Figure(12.0, "times", False)})
    said = ranges.report([entry(12.0), entry(12.0, device_class="cuda-float16")])
    assert said.count("Is my number normal?") == 2


def test_nothing_measured_has_no_report():
    assert ranges.report([]) == ranges.report([entry(None)]) == ""


DAMAGED = [
    "",
    "[1]",
    "{}",
    '{"runs": 5}',
    '{"runs": [{"figures": {}}]}',
    '{"runs": [{"environment": {"model": 5}, "figures": {}}]}',
    '{"runs": [{"environment": {"model": "m"}, "figures": {"01.a": 5}}]}',
    '{"runs": [{"environment": {"model": "m"}, "figures": {"01.a": {"value": "x", "unit": "", "counted": true}}}]}',
    '{"runs": [{"environment": {"model": "m"}, "figures": {"01.a": {"value": NaN, "unit": "", "counted": true}}}]}',
    '{"runs": [{"environment": {"model": "m"}, "figures": {"01.a": {"value": 1, "unit": 2, "counted": true}}}]}',
    '{"runs": [{"environment": {"model": "m"}, "figures": {"01.a": {"value": 1, "unit": "", "counted": 2}}}]}',
    '{"runs": [{"environment": {"model": "m"}, "figures": {"01.a": {"value": 1'
    + 400 * "0"
    + ', "unit": "", "counted": true}}}]}',
    '{"runs": [{"environment": {"model": "m"}, "figures": {"01.a": {"value": 1}}}]}',
    "\xff",
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_one_sentence_and_the_summary_still_prints(folder, capsys, content):
    path = folder / "cpu-2-cores.json"
    path.write_text(content, encoding="latin-1")
    results.measure("01.a", 12.0, unit="times")
    results.summary("01")
    said = capsys.readouterr().out
    assert "12 times" in said
    [line] = [line for line in said.splitlines() if line.startswith("Is my number normal?")]
    assert line.startswith(f"Is my number normal? The ranges cannot be read. {path} ")
    with pytest.raises(ValueError, match="cpu-2-cores.json"):
        records.require_recordable()
    assert path.read_text(encoding="latin-1") == content


def test_no_data_at_all_is_one_sentence(monkeypatch, capsys):
    def missing():
        raise FileNotFoundError("The course's data is in neither a nor b: install the course again.")

    monkeypatch.setattr(records, "data_folder", missing)
    results.measure("01.a", 12.0)
    results.summary("01")
    assert "The ranges cannot be read. The course's data is in neither" in capsys.readouterr().out


def test_a_summary_compares_with_the_class_and_model_that_ran(folder, monkeypatch, capsys):
    put(folder, {"01.a": Figure(12.0, "times", False)}, model="tiny-gqa")
    monkeypatch.setattr(results, "stand_in", lambda name: "tiny-gqa")
    results.measure("01.a", 13.0, unit="times")
    assert (results.get("01.a").device_class, results.get("01.a").model) == ("cpu-2-cores", "tiny-gqa")
    results.summary("01")
    said = capsys.readouterr().out
    assert "Beside 1 run with tiny-gqa on CPUs with 2 to 3 cores:" in said.replace("\n", " ")
    assert "8 to 18 times   usual" in said


def test_entries_of_an_earlier_version_are_read(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    old = {"key": "01.a", "measured": 3.0, "device": "CPU, 2 threads", "date": "2026-01-01T00:00+00:00"}
    (tmp_path / "results" / "results.json").write_text(json.dumps({"entries": {"01.a": old}}))
    results.summary("01")
    assert "No run with that model was recorded yet." in capsys.readouterr().out


# --- recording -----------------------------------------------------------------------------------------------


def test_recording_adds_a_run_with_its_environment_and_no_names(folder):
    figures = {"01.rows": Figure(1368, "rows", True), "01.speed": Figure(1.5, "times", False)}
    for value in (1.5, 2.5):
        path = records.record(figures | {"01.speed": Figure(value, "times", False)}, "tiny-gqa")
    assert path == folder / "cpu-2-cores.json" and list(folder.iterdir()) == [path]
    first, second = records.read_runs("cpu-2-cores")
    assert first.figures == figures and second.figures["01.speed"].value == 2.5
    assert (first.model, first.environment["threads"]) == ("tiny-gqa", 2)
    assert set(first.environment) == set(
        "date model processor instructions cores threads memory_gb system python torch kvcourse".split()
    )
    assert '    "01.rows": {"value": 1368, "unit": "rows", "counted": true},\n' in path.read_text()
    assert records.read_runs("cpu-64-cores") == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, 10**400, "many"])
def test_what_could_not_be_read_again_is_not_recorded(folder, value):
    with pytest.raises(ValueError, match="01.a must be a finite number"):
        records.record({"01.a": Figure(value, "times", False)}, "tiny-gqa")
    with pytest.raises(ValueError, match="01.a must have a text as unit"):
        records.record({"01.a": Figure(1, None, False)}, "tiny-gqa")
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_said_before_the_run(folder, monkeypatch):
    monkeypatch.setattr(records.os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="record in a checkout"):
        records.require_recordable()


def test_figures_are_taken_from_notebooks_that_ran(tmp_path):
    results.measure("01.rows", 1368, unit="rows")
    results.measure("01.speed", 1.23456789, unit="times")
    results.measure("01.word", "never")
    results.measure("02.other", 5)
    told = "01.rows  no guess | bound 9 | measured 1,368 rows\n"
    other = "01.speed  no guess | bound 9\n    measured 1.23 times\n"
    cells = [nbformat.v4.new_code_cell("a"), nbformat.v4.new_code_cell("b"), nbformat.v4.new_markdown_cell("c")]
    cells[1].metadata["tags"] = ["nbval-ignore-output"]
    for cell, text in zip(cells, (told, other), strict=False):
        cell.outputs = [nbformat.v4.new_output("stream", text=text), nbformat.v4.new_output("display_data")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    figures = measured_figures({"01_naive": notebook}, {"KVCOURSE_RESULTS": str(tmp_path / "results")})
    assert figures == {"01.rows": Figure(1368, "rows", True), "01.speed": Figure(1.23457, "times", False)}


def test_worked_summaries_place_their_numbers():
    """They are built again once a run is recorded."""
    for notebook in sorted((COURSE / "notebooks" / "solutions").glob("*.ipynb")):
        cells = nbformat.read(notebook, as_version=4).cells
        printed = "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))
        assert ranges.QUESTION in printed and "was recorded yet" not in printed, notebook.stem


SHIPPED = sorted((COURSE / "data" / "expected").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_runs_count_what_the_worked_notebooks_count(path, monkeypatch):
    monkeypatch.setattr(records, "data_folder", lambda: COURSE / "data")
    printed = {}
    for notebook in (COURSE / "notebooks" / "solutions").glob("*.ipynb"):
        for cell in nbformat.read(notebook, as_version=4).cells:
            for output in cell.get("outputs", []):
                printed |= PRINTED.findall(output.get("text", ""))
    runs = [run for run in records.read_runs(path.stem) if run.model == "smollm2-135m"]
    assert runs or "tiny-gqa" in {run.model for run in records.read_runs(path.stem)}
    for run in runs:
        for key, figure in run.figures.items():
            if figure.counted:
                assert printed[key] == format_number(figure.value), f"{key} of {run.environment['date']} is stale"
