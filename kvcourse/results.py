"""One small store of guesses, bounds, measurements, verdicts and exercise progress.

Notebooks write to it (`predict`, `measure`, `verdict`), their summaries and the last notebook read from it
(`get`, `table`, `summary`, `verdicts`). It is a JSON file in the user's data folder, replaced as a whole
under a lock, so that two notebooks may run at once. Keys are `"NN.name"`, for example `"01.total_exponent"`.
"""

import math
import re
import sys
from dataclasses import asdict, replace
from datetime import datetime
from typing import NamedTuple

import torch

from kvcourse.device import device_class, placement
from kvcourse.entry import NOT_MEASURED, WIDTH, Entry, format_number, text_table
from kvcourse.entry import Spoken as Spoken  # what the checkers print is of this kind too
from kvcourse.expected.ranges import report
from kvcourse.paths import results_folder
from kvcourse.scoring import Score
from kvcourse.statements import STATEMENTS
from kvcourse.store import open_store
from kvcourse.weights.fetch import stand_in

PARTS = ("entries", "verdicts", "exercises")
VERDICTS = ("holds", "holds with a condition", "wrong as said")
RIGHT_BEFORE = "right (last try: wrong)"
DONE = ("right", RIGHT_BEFORE)
STATUSES = ("not attempted", "wrong", *DONE)
KEY = re.compile(r"\d\d\.[a-z][a-z0-9_]*")


class Finding(NamedTuple):
    """The verdict on one statement, and the measured reason for it."""

    verdict: str
    because: str


def predict(key: str, guess, unit: str = "", question: str = "") -> None:
    """Store the learner's guess (None: no guess) and print one line saying that it was noted.

    Raises `ValueError` for a malformed key and for a guess that is not one finite number or a text.
    """
    _require_key(key)
    guess = _plain(guess, f"the guess for {key}", none_allowed=True)
    _require_text(unit, f"the unit of {key}")
    _require_text(question, f"the question of {key}")
    with _open_store() as store:
        entry = _entry(store, key)
        if entry.unit != unit:  # a measurement in another unit would be read in this one
            entry = Entry(key)
        entry = replace(entry, guess=guess, unit=unit, question=question or entry.question)
        store["entries"][key] = asdict(entry)
    noted = "no guess noted" if guess is None else f"your guess {entry.text(guess)} is noted"
    print(f"{key:<26} {noted}")


def measure(key: str, value, unit: str = "", bound=None, note: str = "") -> Entry:
    """Store what was measured, and the bound that the cost model gives (if any); print guess, bound and measured.

    Returns the `Entry` (for `plots.predict_measure`). Raises `ValueError` for a malformed key, for a value or
    bound that is not one finite number or a text, and where the guess was asked for in another unit.
    """
    _require_key(key)
    value = _plain(value, f"the measurement for {key}")
    bound = _plain(bound, f"the bound for {key}", none_allowed=True)
    _require_text(unit, f"the unit of {key}")
    _require_text(note, f"the note on {key}")
    with _open_store() as store:
        entry = _entry(store, key)
        if entry.guess is not None and entry.unit != unit:
            raise ValueError(
                f"{key} was guessed in {entry.unit!r} and measured in {unit!r}: give predict and measure one unit."
            )
        date = datetime.now().astimezone().isoformat(timespec="minutes")
        entry = replace(entry, measured=value, bound=bound, unit=unit, note=note, date=date, **_measured_on())
        store["entries"][key] = asdict(entry)
    return entry.say()


def get(key: str) -> Entry | None:
    """The entry under `key`, or None when nothing was guessed or measured there."""
    _require_key(key)
    store = contents()
    return _entry(store, key) if key in store["entries"] else None


def entries(prefix: str) -> list[Entry]:
    """All entries whose keys begin with `prefix`, such as "01", by key."""
    store = contents()
    return [_entry(store, key) for key in sorted(store["entries"]) if key.startswith(prefix)]


def table(keys) -> str:
    """A text table of entries, with measured / bound in its last column. `keys` is a list of keys (in that order,
    absent ones said to be so), or a prefix such as `"01"` for all that begin with it."""
    if isinstance(keys, str):
        wanted = entries(keys)
        if not wanted:
            return f"{NOT_MEASURED}: no entry begins with {keys!r}"
    else:
        store = contents()
        wanted = [_entry(store, _require_key(key)) for key in keys]
    rows = [("", "your guess", "bound", "measured", "/ bound")]
    for entry in wanted:
        measured = NOT_MEASURED if entry.measured is None else entry.text(entry.measured)
        guess, bound = ("-" if value is None else entry.text(value) for value in (entry.guess, entry.bound))
        rows.append((entry.key, guess, bound, measured, "" if entry.ratio is None else format_number(entry.ratio)))
    return text_table(rows, WIDTH)


def summary(prefix: str) -> None:
    """Print the table of one notebook's entries, where they were measured, and how each number stands beside those
    recorded on such machines: `summary("01")`."""
    print(table(prefix))
    found = entries(prefix)
    devices = sorted({entry.device for entry in found if entry.device})
    if devices:
        print(f"Measured on: {'; '.join(devices)}.\nLast: {max(entry.date for entry in found)}.\n")
        print(report(found))


def score(prefix: str) -> Score:
    """How near the guesses of one notebook came to what was measured; `plots.guesses` draws it: `score("01")`."""
    return Score(tuple(entries(prefix)))


def verdict(statement: int, verdict: str, because: str) -> None:
    """Store and print the verdict on one of `STATEMENTS`: one of `VERDICTS`, with the measured reason."""
    if isinstance(statement, bool) or statement not in STATEMENTS:
        raise ValueError(f"statement={statement!r} must be the number of a statement, 1 to {len(STATEMENTS)}.")
    if verdict not in VERDICTS:
        raise ValueError(f"verdict={verdict!r} must be one of: {', '.join(VERDICTS)}.")
    if not isinstance(because, str) or not because.strip():
        raise ValueError("because must say in a sentence what was measured; it is empty.")
    _require_text(because, "because")
    with _open_store() as store:
        store["verdicts"][str(statement)] = [verdict, because]
    print(f'statement {statement}, "{STATEMENTS[statement]}": {verdict}. {because}')


def verdicts() -> dict[int, Finding]:
    """All verdicts so far, by the number of the statement."""
    found = contents()["verdicts"]
    return {number: Finding(*found[str(number)]) for number in sorted(map(int, found))}


def record_exercise(name: str, status: str) -> None:
    """Remember how an exercise stands, one of `STATUSES`. An untouched stub does not undo an earlier answer, and what
    was right once stays done: a wrong answer after it makes "right (last try: wrong)"."""
    if status not in STATUSES:
        raise ValueError(f"status={status!r} must be one of: {', '.join(STATUSES)}.")
    with _open_store() as store:
        if status == "not attempted" and name in store["exercises"]:
            return
        once_right = store["exercises"].get(name) in DONE
        store["exercises"][name] = RIGHT_BEFORE if once_right and status == "wrong" else status


def progress() -> dict[str, str]:
    """How each exercise that was ever checked stands: name to status."""
    return contents()["exercises"]


def forget_exercises(names) -> int:
    """Forget how these exercises stand; how many of them had been checked. Guesses and measurements stay."""
    with _open_store() as store:
        checked = [name for name in names if store["exercises"].pop(name, None)]
    return len(checked)


def reset() -> None:
    """Forget all guesses, measurements, verdicts and progress."""
    with _open_store() as store:
        store.update({part: {} for part in PARTS})


def _entry(store: dict, key: str) -> Entry:
    return Entry(**store["entries"].get(key, {"key": key}))


def _require_key(key) -> str:
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise ValueError(f"key={key!r} must be the notebook's two digits, a dot and a name, like '01.total_exponent'.")
    return key


def _plain(value, what: str, none_allowed: bool = False):
    """`value` as a plain int, float or str; NumPy and PyTorch scalars are unwrapped, True and False read yes and no."""
    if value is None or value is ...:
        if none_allowed:
            return None
        raise ValueError(f"{what} is missing: give a number or a text.")
    if hasattr(value, "item"):
        if math.prod(getattr(value, "shape", ())) != 1:
            raise ValueError(f"{what} must be one number; it has shape {tuple(value.shape)}.")
        value = value.item()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float | str):
        raise ValueError(f"{what} must be a number or a text; a {type(value).__name__} was given.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} is {value}: only finite numbers are stored. Look for a division by zero before it.")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{what} is too large: numbers up to {sys.float_info.max:.1e} are stored.")
    return _require_text(value, what) if isinstance(value, str) else value


def _require_text(value, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text; a {type(value).__name__} was given.")
    if re.search("[\ud800-\udfff]", value):
        raise ValueError(f"{what} is {value!r}, which holds half a character (a lone surrogate): it cannot be printed.")
    return value


def _measured_on() -> dict[str, str]:
    """The fields of an `Entry` that say on what the course runs here."""
    device = placement().device
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "device_class": device_class(), "model": stand_in("smollm2-135m")}


def contents() -> dict:
    """Everything kept, by its `PARTS`."""
    with _open_store(write=False) as store:
        return store


def _open_store(write: bool = True):
    return open_store(results_folder() / "results.json", parsed, write)


def parsed(content: dict) -> dict:
    """The three parts of the file, each entry checked; an unknown field, type, value or status means a damaged file."""
    content = {part: content.get(part, {}) for part in PARTS}
    content["entries"] = {_require_key(key): asdict(Entry(**fields)) for key, fields in content["entries"].items()}
    for key, entry in content["entries"].items():
        if entry["key"] != key:
            raise ValueError(f"the entry under {key} says that it is {entry['key']!r}")
        for part, value in entry.items():
            if part in ("guess", "bound", "measured"):
                _plain(value, f"{part} of {key}", none_allowed=True)
            else:
                _require_text(value, f"{part} of {key}")
    for number, finding in content["verdicts"].items():
        if number not in map(str, STATEMENTS):
            raise ValueError(f"there is no statement {number!r} to have a verdict on")
        for text in Finding(*finding):
            _require_text(text, f"the verdict on {number}")
    if not set(content["exercises"].values()) <= set(STATUSES):
        raise ValueError("unknown status of an exercise")
    return content
