"""Is my number normal? The range of each figure on machines of one class, and where a number stands beside it.

A range goes from the lowest to the highest run of one class and one model, and

- what is counted is not widened: it must be the same;
- a fitted exponent is widened by `EXPONENT` on both sides;
- what `RUNS` runs or more agree on to a thousandth is not timed: it is widened by `STEADY` of its value, a percentage
  by `POINTS` points, which is two answers of forty, but not beyond 0 and 100;
- all else, which is timed, is divided and multiplied by `FACTOR`; a percentage is widened by at least 2 points.

A whole number is widened by at least 1.

Words have no range, and a class that nobody has recorded has none either.
"""

import math
import textwrap
from typing import NamedTuple

from kvcourse.entry import WIDTH, Entry, format_number, text_table
from kvcourse.expected.records import Figure, Run, read_runs, recorded_classes

FACTOR = 1.5
EXPONENT = 0.25
RUNS = 3
STEADY = 0.05
POINTS = 5
QUESTION = "Is my number normal?"
ADVICE = """\
A time out of its range: do other programs run, or does a
laptop save power? Run the notebook again then; another kind
of processor may differ for good. A count: the code or the
model is not that of the course."""


class Range(NamedTuple):
    """Which values of a figure are usual, and how many runs say so."""

    low: float
    high: float
    unit: str
    runs: int

    def __str__(self):
        low, high = format_number(self.low), format_number(self.high)
        return f"{low if low == high else f'{low} to {high}'} {self.unit}".strip()


def ranges(runs: list[Run], entries) -> dict[str, Range]:
    """The range of each entry over the runs, by key. A figure in another unit is another figure."""
    found = {}
    for entry in entries:
        figures = [run.figures[entry.key] for run in runs if entry.key in run.figures]
        figures = [figure for figure in figures if isinstance(entry.measured, str) or figure.unit == entry.unit]
        if figures:
            found[entry.key] = usual_range(entry.key, figures)
    return found


def usual_range(key: str, figures: list[Figure]) -> Range:
    """The range that the same figure of several runs gives."""
    values = [figure.value for figure in figures]
    lowest, highest, unit = min(values), max(values), figures[0].unit
    if all(figure.counted for figure in figures):
        return Range(lowest, highest, unit, len(values))
    if key.endswith("_exponent"):
        return Range(lowest - EXPONENT, highest + EXPONENT, unit, len(values))
    whole = all(isinstance(value, int) for value in values)
    if len(values) >= RUNS and highest - lowest <= 1e-3 * max(map(abs, values)):
        margin = POINTS if unit == "%" else STEADY * max(map(abs, values))
        margin = max(margin, 1) if whole else margin
        low, high = lowest - margin, highest + margin
        high = min(high, 100) if unit == "%" and highest <= 100 else high
    else:
        least = 1 if whole else 2 if unit == "%" else 0
        low = min(lowest / FACTOR, lowest * FACTOR, lowest - least)  # of a negative number, the product is the lower
        high = max(highest / FACTOR, highest * FACTOR, highest + least)
    low = max(low, 0) if lowest >= 0 else low
    return Range(math.ceil(low), math.floor(high), unit, len(values)) if whole else Range(low, high, unit, len(values))


def report(entries) -> str:
    """Where each measured number stands: usual, lower or higher than usual on such machines, or no range yet.

    Nothing is raised for a damaged or missing file: a sentence says so.
    """
    measured = [entry for entry in entries if entry.measured is not None]
    places = dict.fromkeys((entry.device_class, entry.model) for entry in measured)
    try:
        return "\n\n".join(
            _report(*place, [entry for entry in measured if (entry.device_class, entry.model) == place])
            for place in places
        )
    except (ValueError, OSError) as error:
        return f"{QUESTION} The ranges cannot be read. {error}"


def _report(class_name: str, model: str, entries: list[Entry]) -> str:
    """The report on numbers of one class and one model."""
    found, other = _ranges_in(class_name, model, entries), class_name
    if not found:
        elsewhere = {name: _ranges_in(name, model, entries) for name in recorded_classes()}
        other = max(elsewhere, key=lambda name: _most(elsewhere[name]), default=class_name)
        found = elsewhere.get(other)
    if not found:
        return f"{QUESTION}\nNo run with {model or 'that model'} was recorded yet."
    here = other == class_name
    runs = f"{_most(found)} run{'s' if _most(found) > 1 else ''} with {model}"
    said = "Beside" if here else f"There is no range for {described(class_name)} yet; beside"
    said = f"{said} {runs} on {described(other)}:"
    rows, out = [("", "measured", "usual" if here else "usual there", "")], False
    for entry in entries:
        usual = found.get(entry.key)
        place = stands(entry, usual) if here and usual else ""
        out |= place not in ("", "usual")
        rows.append((entry.key, entry.text(entry.measured), str(usual or "no range yet"), place))
    said = textwrap.fill(f"{QUESTION} {said}", WIDTH)
    return "\n".join([said, text_table(rows, WIDTH), *([ADVICE] if out else [])])


def _ranges_in(class_name: str, model: str, entries: list[Entry]) -> dict[str, Range]:
    return ranges([run for run in read_runs(class_name) if run.model == model], entries)


def _most(found: dict[str, Range]) -> int:
    return max((usual.runs for usual in found.values()), default=0)


def stands(entry: Entry, usual: Range) -> str:
    """Where the measurement stands beside the range; what prints alike is alike."""
    value = entry.measured
    if isinstance(value, str):
        return "usually a number"
    alike = format_number(value) in (format_number(usual.low), format_number(usual.high))
    if alike or usual.low <= value <= usual.high:
        return "usual"
    return "lower than usual" if value < usual.low else "higher than usual"


def described(class_name: str) -> str:
    """A class of devices (see `device.device_class`) in words."""
    kind, _, rest = class_name.partition("-")
    cores = rest.removesuffix("-cores")
    if kind == "cuda":
        return f"GPUs in {rest}"
    if not cores.isdigit():
        return "this machine"
    return "CPUs with 1 core" if cores == "1" else f"CPUs with {cores} to {2 * int(cores) - 1} cores"
