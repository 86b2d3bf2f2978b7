"""`kvcourse workshop hand-in` and `collect`: from what thirty learners did to one table and one picture."""

import csv
import json
import os
import shutil

import pytest
from figures import drawn, texts

from kvcourse import results
from kvcourse.cli.main import main as kvcourse
from kvcourse.entry import Entry
from kvcourse.plots.room import guesses_of_room
from kvcourse.workshop import collect

NAMES = ["guesses.csv", "guesses_02.png", "progress.csv"]
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
            if status == "right":
                results.record_exercise(exercise, "wrong")  # a later try; the exercise stays done
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
    assert "02.same_bits 1 90 % 50 to 60.5 %, middle 55.2" in lines
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
    asked = {name for name in bad if any(f"{name} is broken, ask for it again" in line for line in refused)}
    assert asked == set(bad) - {"other.json"}


def test_two_files_of_one_learner(room, capsys):
    (room / "anna").mkdir()
    shutil.copy(room / "bo" / "results.json", room / "anna" / "results.json")
    assert kvcourse(["workshop", "collect", str(room)]) == 1
    assert "two files in" in capsys.readouterr().err


def test_a_second_download_is_told_from_another_learner(room, capsys):
    assert kvcourse(["workshop", "collect", str(room)]) == 0
    assert "the same work" not in capsys.readouterr().out
    shutil.copy(room / "anna.json", room / "anna(1).json")
    shutil.copy(room / "cy.json", room / "cy (2).json")  # nothing was done: many learners' files are equal then
    assert kvcourse(["workshop", "collect", str(room)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("look: ")]
    assert len(said) == 1 and "anna(1) and anna handed in the same work" in said[0]


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
    assert collect.guesses_table(learners).splitlines()[-1] == "left out: 01.time of b, in ms; the table has those in s"
    minority = [collect.Learner(name, {"01.time": milliseconds}, {}) for name in "cd"]
    [(key, entries)] = collect.questions([*learners, *minority])
    assert entries == [milliseconds] * 3  # it is the unit of most, not of the first
    assert collect.left_out([*learners, *minority]) == ["left out: 01.time of a, in s; the table has those in ms"]
    assert collect.left_out(learners[:1]) == collect.left_out(learners, "02") == []


@pytest.mark.parametrize(("numbers", "words"), [([4, 1], "1 to 4 s, middle 2.5"), ([9, 1, 2], "1 to 9 s, middle 2")])
def test_the_middle_of_a_room(numbers, words):
    assert collect.spread(numbers, Entry("01.time", unit="s")) == words


# --- odd files ------------------------------------------------------------------------------------------------


def put(path, **entry):
    """A file that hands one entry in."""
    key = entry.setdefault("key", "02.helps")
    path.write_text(json.dumps({"kind": "kvcourse results", "entries": {key: entry}}))


def collected(room, capsys, *arguments):
    """The exit code, the lines of the table of guesses and below, and those that say what was not read."""
    code = kvcourse(["workshop", "collect", str(room), *map(str, arguments)])
    lines = capsys.readouterr().out.splitlines()
    return code, lines, [line for line in lines if line.startswith("not read: ")]


@pytest.mark.parametrize("name", ["anna", "anna.txt", "anna.JSON", "anna.json.zip"])
def test_a_file_that_would_be_passed_over_is_not_written(tmp_path, capsys, name):
    assert kvcourse(["workshop", "hand-in", str(tmp_path / name)]) == 1
    assert f"{name} must end in .json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_name_are_said_and_what_the_course_writes_is_not(room, capsys):
    shutil.copy(room / "anna.json", room / "dora.JSON")
    for name in ("emil", "fay.zip", "bo/notes.txt", "bo/results.json.lock", ".hidden"):
        (room / name).write_text("x")
    (room / "folder.json").mkdir()
    collected(room, capsys, "--output", room)
    code, lines, refused = collected(room, capsys, "--output", room)
    assert code == 1 and "4 dora" in [line.strip() for line in lines]
    names = [f"{room / name}: its name does not end in .json" for name in ("bo/notes.txt", "emil", "fay.zip")]
    assert refused == [f"not read: {name}" for name in names]
    for path in room.rglob("*.json"):
        path.rename(path.with_suffix("")) if path.is_file() else path.rmdir()
    (room / "dora.JSON").unlink()
    assert kvcourse(["workshop", "collect", str(room)]) == 1
    assert ", only anna, notes.txt, results, cy, emil, fay.zip, seat07: put there what" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
def test_a_file_that_never_ends_is_not_opened(room, capsys):
    os.mkfifo(room / "a.json")
    assert collected(room, capsys)[2] == [f"not read: {room / 'a.json'}: no ordinary file"]


def test_files_that_no_notebook_has_written_do_not_stop_the_room(room, tmp_path, capsys):
    put(room / "1.json", unit="\ud800")
    put(room / "2.json", device="\ud800")
    put(room / "3.json", key="/tmp/x/EVIL.z", guess=1)
    put(room / "4.json", **{"\x1b[2J" + 3000 * "x": 1})
    put(room / "5.json", measured=-1.7e308)  # a second one would make their middle infinite
    code, lines, refused = collected(room, capsys, "--output", tmp_path / "out")
    reasons = ["half a character", "half a character", "must be the notebook's two digits", r"argument '\x1b[2Jxx"]
    reasons.append("it holds the number -2e+308, and only those up to 1e+100")
    for number, (line, reason) in enumerate(zip(refused, reasons, strict=True), 1):
        assert f"{number}.json" in line and reason in line and len(line) < 400
    assert code == 1 and "02.same_bits" in "".join(lines)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == NAMES


def test_texts_of_learners_move_no_cursor_and_break_no_line(room, tmp_path, capsys):
    formula, wide = '=HYPERLINK("http://e.org")', 3000 * "w"
    put(room / "eve.json", guess="\x1b[2J" + wide, unit="a\nb", device="-1+\x1b", question=formula)
    put(room / "b\x1b[2J\nc.json", guess="$\\foo$", unit="a\nb", question="$\\foo$")
    if os.name == "posix":
        put(room / os.fsdecode(b"j\xe9r\xf4me.json"), guess="\t@x", unit="a\nb")
    code, lines, refused = collected(room, capsys, "--output", tmp_path / "out")
    assert code == 0 and not refused
    assert max(map(len, lines)) < 250 and all(line.isprintable() for line in lines)
    [row] = [line for line in lines if line.startswith("02.helps")]
    assert rf"\x1b[2J{30 * 'w'}... (1)" in row
    assert {r"b\x1b[2J c", r"j\udce9r\udcf4me"} <= {line[3:] for line in lines}
    with open(tmp_path / "out" / "guesses.csv", encoding="utf-8", newline="") as file:
        rows = {row["learner"]: row for row in csv.DictReader(file) if row["key"] == "02.helps"}
    eve = rows["eve"]
    assert (eve["question"], eve["device"], eve["unit"]) == (f"'{formula}", r"'-1+\x1b", "a b")
    assert eve["guess"] == r"\x1b[2J" + wide
    assert rows[r"j\udce9r\udcf4me"]["guess"] == "' @x" and rows["anna"]["guess"] == "yes"


def test_a_place_that_is_no_folder_is_said_first(room, capsys):
    assert kvcourse(["workshop", "collect", str(room), "--output", str(room / "anna.json" / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "anna.json is a file, and tables and pictures are saved in a folder" in captured.err


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
