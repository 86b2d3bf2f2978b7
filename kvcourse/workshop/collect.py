"""What a room did: progress of each learner and exercise, and guesses beside measurements.

A learner hands in one file (`hand_in`), or the instructor copies `results.json` from the folder that `KVCOURSE_RESULTS`
names. Nothing is sent anywhere. A learner's name is what the instructor called the file, or the folder it lies in.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from kvcourse import __version__, results
from kvcourse.check.catalog import exercises
from kvcourse.entry import Entry, format_number, text_table
from kvcourse.model_folder import as_text, write_whole
from kvcourse.workshop.check import KIND as SEAT
from kvcourse.workshop.shown import cell, short, shown

KIND = "kvcourse results"
STORE = "results.json"  # what `kvcourse/results.py` calls its own file, wherever it lies
OURS = ("*.lock", "progress.csv", "guesses.csv", "guesses_*.png")  # what the course puts beside what is handed in
LARGEST = 1e100  # of a guess or measurement: far below what a float holds, so that sums and axes have room
SIGNS = {"right": "+", "wrong": "x", "not attempted": "."}


class Learner(NamedTuple):
    """One learner's guesses and measurements by their keys, and how each exercise stands that was ever checked."""

    name: str
    entries: dict[str, Entry]
    exercises: dict[str, str]


class Seat(NamedTuple):
    """What `kvcourse workshop check --json` said on one computer."""

    name: str
    ready: bool
    problems: list[str]


class Foreign(ValueError):
    """A file that no command of the course has written."""


class Room(NamedTuple):
    """Everything found in a folder; `refused` are files that could not be read, each with what to do about it."""

    learners: list[Learner]
    seats: list[Seat]
    refused: list[str]


def hand_in(path: Path) -> Path:
    """Write this learner's guesses, measurements and progress into one file. Raises `ValueError` when it exists, and
    for a name that `collect` would pass over."""
    if path.suffix != ".json":
        raise ValueError(f"{path} must end in .json, so that the instructor's `collect` reads it.")
    if path.exists():
        raise ValueError(f"{path} is there already: give another name, or remove it first.")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder: make it first, or give another.")
    date = datetime.now().astimezone().isoformat(timespec="minutes")
    write_whole(path, as_text({"kind": KIND, "kvcourse": __version__, "date": date, **results.contents()}))
    return path


def collect(folder: Path) -> Room:
    """Read every JSON file in `folder` and below it, hidden ones left out; other files count as refused. Raises
    `ValueError` when there is none, or when two have one name."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the one that holds what learners handed in.")
    room = Room([], [], [])
    paths = handed_in(folder)
    if not any(map(is_json, paths)):
        only = shown(f", only {short(', '.join(path.name for path in paths), 200)}") if paths else ""
        raise ValueError(f"no .json file is in {folder}{only}: put there what learners handed in, one file for each.")
    for path in paths:
        name, said = shown(name_of(path, folder)), shown(str(path))
        if not is_json(path) or not path.is_file():
            room.refused.append(f"{said}: {'no ordinary file' if is_json(path) else 'its name does not end in .json'}")
            continue
        try:
            found = read(path, name)
        except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
            reason = short(shown(str(error)), 200) or type(error).__name__
            whole = isinstance(error, Foreign | OSError)
            room.refused.append(f"{said}: {reason}" if whole else f"{said} is broken, ask for it again ({reason})")
            continue
        list_of = room.seats if isinstance(found, Seat) else room.learners
        if any(other.name == name for other in list_of):
            raise ValueError(f"two files in {folder} are {name!r}'s: keep one of them, or rename it.")
        list_of.append(found)
    return room


def handed_in(folder: Path) -> list[Path]:
    """All that lies in `folder` and below it but what is hidden, in the order of names, and what the course wrote."""
    inside = sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    hidden = [path for path in inside if any(part.startswith(".") for part in path.parts)]
    return [folder / path for path in inside if path not in hidden and not any(map(path.match, OURS))]


def is_json(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def name_of(path: Path, folder: Path) -> str:
    """`anna` for anna.json, and for anna/results.json, wherever below the folder."""
    inside = path.relative_to(folder)
    named = inside.parent if path.name == STORE and inside.parent != Path(".") else inside.with_suffix("")
    return named.as_posix()


def read(path: Path, name: str) -> Learner | Seat:
    """What one file holds. Raises `ValueError` and others, as parsing does, when it is neither kind."""
    content = json.loads(path.read_bytes())
    kind = content.get("kind", KIND if path.name == STORE else None)
    if kind == SEAT:
        lines = content["lines"]
        problems = [shown(f"{line['topic']}: {line['text']}") for line in lines if line["status"] == "fix"]
        if not isinstance(content["ready"], bool) or content["ready"] == bool(problems):
            raise ValueError("says of this computer both that it is ready and that it is not")
        return Seat(name, content["ready"], problems)
    if kind != KIND:
        raise Foreign("was written neither by `kvcourse workshop hand-in` nor by `kvcourse workshop check --json`")
    store = results.parsed(content)
    entries = {
        key: Entry(**{part: fit(value) for part, value in fields.items()}) for key, fields in store["entries"].items()
    }
    return Learner(name, entries, store["exercises"])


def fit(value):
    """A text or number of an entry as it is printed and drawn. Raises `ValueError` for one beyond `LARGEST`."""
    if isinstance(value, str):
        return shown(value)
    if value is not None and abs(value) > LARGEST:
        raise ValueError(f"it holds the number {value:.0e}, and only those up to {LARGEST:.0e} can be drawn")
    return value


def doubles(learners: list[Learner]) -> list[str]:
    """A sentence for each two files that hold the same work, such as anna.json and anna(1).json from two downloads."""
    worked = [learner for learner in learners if learner.entries or learner.exercises]
    pairs = [(one, other) for one, other in combinations(worked, 2) if one[1:] == other[1:]]
    return [
        f"{one.name} and {other.name} handed in the same work and count as two: remove one if it is a second download"
        for one, other in pairs
    ]


# --- progress -------------------------------------------------------------------------------------------------------


def progress_table(learners: list[Learner], notebook: str = "") -> str:
    """A column for each learner, a row for each exercise that anybody tried, and how many of the room have it right."""
    width = max(len(str(len(learners))), 1) + 1
    lines = [f"{number:>{width}} {learner.name}" for number, learner in enumerate(learners, 1)]
    lines += ["", "  + right   x not right yet   . not attempted"]
    for name, part in exercises(notebook).items():
        tried = [exercise for exercise in part if any(exercise in learner.exercises for learner in learners)]
        if not tried:
            lines += ["", f"{name}: nobody has begun"]
            continue
        lines += ["", f"{name:<30}" + "".join(f"{number:>{width}}" for number in range(1, len(learners) + 1))]
        for exercise in tried:
            stands = [status(learner, exercise) for learner in learners]
            signs = "".join(f"{SIGNS[each]:>{width}}" for each in stands)
            lines.append(f"  {exercise:<28}{signs}   {stands.count('right')} of {len(learners)} right")
        if len(tried) < len(part):
            lines.append(f"  nobody has begun: {', '.join(each for each in part if each not in tried)}")
    return "\n".join(lines)


def status(learner: Learner, exercise: str) -> str:
    found = learner.exercises.get(exercise, "not attempted")
    return "right" if found in results.DONE else found


def seats_table(seats: list[Seat]) -> str:
    """Seats that are not ready, each with what is to do, and a line that counts the others."""
    lines = [f"{seat.name}: {problem}" for seat in seats if not seat.ready for problem in seat.problems]
    return "\n".join([*lines, f"{sum(seat.ready for seat in seats)} of {len(seats)} seats are ready"])


# --- guesses --------------------------------------------------------------------------------------------------------


def questions(learners: list[Learner], notebook: str = "") -> Iterator[tuple[str, list[Entry]]]:
    """Each key that somebody guessed, with the entries of all who guessed or measured it in the unit that most did."""
    for key in sorted({key for learner in learners for key in learner.entries if key.startswith(notebook[:2])}):
        entries = [learner.entries[key] for learner in learners if key in learner.entries]
        units = Counter(entry.unit for entry in entries if entry.guess is not None)
        if units:
            [(usual, _)] = units.most_common(1)
            yield key, [entry for entry in entries if entry.unit == usual]


def left_out(learners: list[Learner], notebook: str = "") -> list[str]:
    """A sentence for each entry that `questions` leaves out, since most guessed in another unit."""
    return [
        f"left out: {short(key)} of {learner.name}, in {short(learner.entries[key].unit) or 'no unit'}; "
        f"the table has those in {short(kept[0].unit) or 'no unit'}"
        for key, kept in questions(learners, notebook)
        for learner in learners
        if key in learner.entries and learner.entries[key].unit != kept[0].unit
    ]


def guesses_table(learners: list[Learner], notebook: str = "") -> str:
    """For each question: how many guessed, the guesses from lowest to highest, and what was measured; then what was
    left out."""
    rows = [("", "guesses", "the room guessed", "the room measured")]
    for key, entries in questions(learners, notebook):
        guesses = [entry.guess for entry in entries if entry.guess is not None]
        measured = [entry.measured for entry in entries if entry.measured is not None]
        rows.append((short(key), str(len(guesses)), spread(guesses, entries[0]), spread(measured, entries[0])))
    if len(rows) == 1:
        return "nobody has noted a guess"
    return "\n".join([text_table(rows), *left_out(learners, notebook)])


def spread(values: list, entry: Entry) -> str:
    """Lowest, middle and highest of numbers; of texts, each with how often it was said."""
    numbers = sorted(value for value in values if not isinstance(value, str))
    texts = [value for value in values if isinstance(value, str)]
    said = [f"{short(text)} ({texts.count(text)})" for text in sorted(set(texts))]
    if numbers:
        low, middle, high = map(format_number, (numbers[0], median(numbers), numbers[-1]))
        entry = replace(entry, unit=short(entry.unit))
        said.insert(0, entry.text(low) if low == high else f"{low} to {entry.text(high)}, middle {middle}")
    return ", ".join(said) or "-"


# --- files ----------------------------------------------------------------------------------------------------------


def save(room: Room, folder: Path, notebook: str = "") -> list[Path]:
    """Write progress.csv, guesses.csv and a picture of the guesses of each notebook; return their paths."""
    from kvcourse.plots import png
    from kvcourse.plots.room import guesses_of_room

    folder.mkdir(parents=True, exist_ok=True)
    names = [exercise for part in exercises(notebook).values() for exercise in part]
    table = [["learner", *names], *([each.name, *(status(each, n) for n in names)] for each in room.learners)]
    written = [_write_csv(folder / "progress.csv", table)]
    table = [["learner", "key", "guess", "measured", "bound", "unit", "question", "device"]]
    for learner in room.learners:
        for key, entry in sorted(learner.entries.items()):
            if key.startswith(notebook[:2]):
                numbers = (entry.guess, entry.measured, entry.bound)
                table.append([learner.name, key, *numbers, entry.unit, entry.question, entry.device])
    written.append(_write_csv(folder / "guesses.csv", table))
    asked = dict(questions(room.learners, notebook))
    for number in sorted({key.split(".")[0] for key in asked}):
        rows = {key: entries for key, entries in asked.items() if key.startswith(f"{number}.")}
        path = folder / f"guesses_{number}.png"
        write_whole(path, png(guesses_of_room(rows)))
        written.append(path)
    return written


def _write_csv(path: Path, rows: list[list]) -> Path:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(map(cell, row) for row in rows)
    write_whole(path, text.getvalue().encode())
    return path
