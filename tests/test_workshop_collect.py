"""`kvcourse workshop hand-in` and `collect`: from what thirty learners did to one table and one picture."""

import csv
import json
import shutil

import pytest
from figures import drawn, texts

from kvcourse import results
from kvcourse.cli.main import main as kvcourse
from kvcourse.entry import Entry
from kvcourse.plots.room import guesses_of_room
from kvcourse.workshop import collect

QUESTION = "How many percent are equal?"


@pytest.fixture
def room(tmp_path, monkeypatch, capsys):
    """Three learners: Anna handed a file in, Bo's folder was copied, Cy did nothing; and a seat that is not ready."""
    work = {
        "anna": ({"append": "right", "bytes_copied": "wrong"}, 90, "yes"),
        "bo": ({"append": "wrong"}, None, "no"),
        "cy": ({}, None, None),
    }
    (tmp_path / "room" / "bo").mkdir(parents=True)
    for name, (exercises, guess, word) in work.items():
        monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path / "home" / name))
        for exercise, status in exercises.items():
            results.record_exercise(exercise, status)
        if exercises:
            results.predict("02.same_bits", guess, "%", QUESTION)
            results.predict("02.helps", word, question="Does it help?")
            results.measure("02.same_bits", {"anna": 60.5, "bo": 50.0}[name], "%")
            results.measure("01.rows", 7, "rows")
        if name != "bo":
            assert kvcourse(["workshop", "hand-in", str(tmp_path / "room" / f"{name}.json")]) == 0
    shutil.copy(tmp_path / "home" / "bo" / "results.json", tmp_path / "room" / "bo" / "results.json")
    seat = {"kind": "kvcourse seat", "ready": False, "lines": [{"status": "fix", "topic": "disk", "text": "make room"}]}
    (tmp_path / "room" / "seat07.json").write_text(json.dumps(seat))
    (tmp_path / "room" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "room" / ".ipynb_checkpoints" / "anna.json").write_text("{")
    capsys.readouterr()
    return tmp_path / "room"


def test_the_tables_of_a_room(room, capsys):
    assert kvcourse(["workshop", "collect", str(room), "--notebook", "02"]) == 0
    out = capsys.readouterr().out
    assert "seat07: disk: make room\n0 of 1 seats are ready" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[3:6] == ["1 anna", "2 bo", "3 cy"]
    assert "append + x . 1 of 3 right" in lines
    assert "bytes_copied x . . 0 of 3 right" in lines
    assert "nobody has begun: cached_generate, next_positions, chunk_mask" in lines
    assert "02.same_bits 1 90 % 50 to 60.5 %, middle 60.5" in lines
    assert "02.helps 2 no (1), yes (1) -" in lines
    assert "01.rows" not in out  # another notebook, and nobody guessed it


def test_the_files_of_a_room(room, tmp_path, capsys):
    output = tmp_path / "out"
    assert kvcourse(["workshop", "collect", str(room), "--output", str(output)]) == 0
    assert sorted(path.name for path in output.iterdir()) == ["guesses.csv", "guesses_02.png", "progress.csv"]
    with open(output / "progress.csv", encoding="utf-8", newline="") as file:
        progress = {row["learner"]: row for row in csv.DictReader(file)}
    assert [progress[name]["append"] for name in ("anna", "bo", "cy")] == ["right", "wrong", "not attempted"]
    assert len(progress["anna"]) > 40  # every exercise of the course
    with open(output / "guesses.csv", encoding="utf-8", newline="") as file:
        rows = [(row["learner"], row["key"], row["guess"], row["measured"]) for row in csv.DictReader(file)]
    assert ("anna", "02.same_bits", "90", "60.5") in rows and ("bo", "01.rows", "", "7") in rows
    assert (output / "guesses_02.png").read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_be_read_is_said_and_is_the_exit_code(room, capsys):
    bad = {"half.json": '{"kind": "kvcourse results", "entr', "list.json": "[1]", "other.json": '{"name": 1}'}
    bad["dora.json"] = json.dumps({"kind": "kvcourse results", "exercises": {"append": "splendid"}})
    bad["seat08.json"] = json.dumps(
        {"kind": "kvcourse seat", "ready": True, "lines": [{"status": "fix"} | {"topic": "a", "text": "b"}]}
    )
    for name, text in bad.items():
        (room / name).write_text(text)
    assert kvcourse(["workshop", "collect", str(room)]) == 1
    refused = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not read: ")]
    assert len(refused) == len(bad) and all(any(name in line for line in refused) for name in bad)
    assert any("other.json: was written neither by" in line for line in refused)
    assert any("both that it is ready and that it is not" in line for line in refused)


def test_two_files_of_one_learner(room, capsys):
    (room / "anna").mkdir()
    shutil.copy(room / "bo" / "results.json", room / "anna" / "results.json")
    assert kvcourse(["workshop", "collect", str(room)]) == 1
    assert "two files in" in capsys.readouterr().err


@pytest.mark.parametrize(("folder", "words"), [("none", "is no folder"), ("empty", "no .json file is in")])
def test_nothing_to_collect(tmp_path, capsys, folder, words):
    (tmp_path / "empty").mkdir()
    assert kvcourse(["workshop", "collect", str(tmp_path / folder)]) == 1
    assert words in capsys.readouterr().err


def test_an_unknown_notebook(room, capsys):
    assert kvcourse(["workshop", "collect", str(room), "--notebook", "77"]) == 1
    assert "77" in capsys.readouterr().err


def test_a_file_is_not_written_over(room, capsys):
    before = (room / "anna.json").read_bytes()
    assert kvcourse(["workshop", "hand-in", str(room / "anna.json")]) == 1
    assert "is there already" in capsys.readouterr().err
    assert (room / "anna.json").read_bytes() == before
    assert kvcourse(["workshop", "hand-in", str(room / "no" / "anna.json")]) == 1
    assert "make it first" in capsys.readouterr().err


def test_a_guess_in_another_unit_is_not_put_beside_others():
    seconds, milliseconds = Entry("01.time", guess=2, unit="s"), Entry("01.time", guess=2000, unit="ms")
    learners = [collect.Learner("a", {"01.time": seconds}, {}), collect.Learner("b", {"01.time": milliseconds}, {})]
    [(key, entries)] = collect.questions(learners)
    assert entries == [seconds]


# --- the picture ----------------------------------------------------------------------------------------------


def entries(guesses, measured, unit="times", question=QUESTION):
    return [
        Entry("02.x", guess=g, measured=m, unit=unit, question=question) for g, m in zip(guesses, measured, strict=True)
    ]


def dots(ax, marker):
    return [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if line.get_marker() == marker]


def test_every_guess_is_a_dot_and_equal_ones_are_stacked():
    figure = drawn(guesses_of_room({"02.x": entries([10, 10, 10, 30, None], [25, 24, 26, None, 25])}))
    ax = figure.axes[0]
    guesses = dots(ax, "o")
    assert [x for x, _ in guesses] == [10, 10, 10, 30]
    assert len({y for _, y in guesses}) == 3  # three at 10, above each other, and one at 30
    assert [x for x, _ in dots(ax, "s")] == [25, 24, 26, 25]
    assert texts(ax) == ["25 times"] and ax.get_xscale() == "linear"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["measured\n(4)", "guessed\n(4)"]
    assert ax.get_title(loc="left") == QUESTION


def test_wide_guesses_are_drawn_on_a_logarithmic_axis_unless_one_is_not_positive():
    wide = drawn(guesses_of_room({"02.x": entries([1, 1000], [30, 30])})).axes[0]
    assert wide.get_xscale() == "log"
    zero = drawn(guesses_of_room({"02.x": entries([0, 1000], [30, -1])})).axes[0]
    assert zero.get_xscale() == "linear"


def test_words_are_bars_with_their_counts():
    ax = drawn(guesses_of_room({"02.x": entries(["yes", "no", "no"], ["no", "no", "no"], unit="")})).axes[0]
    assert sorted(texts(ax)) == ["1", "2", "3"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["no", "yes"]


def test_odd_rooms_are_drawn():
    one = {f"02.{name}": entries([value], [None]) for name, value in zip("abc", (0, -3, 1e9), strict=True)}
    figure = drawn(guesses_of_room(one))
    assert [ax.get_visible() for ax in figure.axes] == [True, True, True, False]
    drawn(guesses_of_room({"02.mixed": entries([3, "many"], [5, 6])}))
    with pytest.raises(ValueError, match="nobody has noted a guess"):
        guesses_of_room({})
