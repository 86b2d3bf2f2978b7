"""How near guesses came to what was measured: a factor for each, and one figure for a notebook."""

import math
from dataclasses import dataclass
from statistics import median

from kvcourse.entry import Entry, format_number

NEAR = 2  # a guess is near when it is at most this many times too large or too small


def times(value, measured) -> float | None:
    """value / measured; None where they have no ratio to speak of: a word, a zero beside another number, two signs,
    or nothing at all. Two zeros are equal: 1."""
    if isinstance(value, str | None) or isinstance(measured, str | None):
        return None
    if value == measured:
        return 1.0
    ratio = value / measured if measured else 0.0
    return ratio if 0 < ratio < math.inf and 1 / ratio < math.inf else None


def comparable(entry: Entry) -> bool:
    """Whether the guess can be judged: both it and the measurement are numbers, or both are words."""
    return None not in (entry.guess, entry.measured) and isinstance(entry.guess, str) == isinstance(entry.measured, str)


def factor_off(entry: Entry) -> float:
    """By which factor a comparable guess misses the measurement, up or down: 1 is exact, infinity where they have no
    ratio. A word is right (1), whatever its capitals and blanks, or not (infinity)."""
    if isinstance(entry.guess, str):
        guess, measured = (" ".join(text.split()).casefold() for text in (entry.guess, entry.measured))
        return 1.0 if guess == measured else math.inf
    ratio = times(entry.guess, entry.measured)
    return math.inf if ratio is None else max(ratio, 1 / ratio)


def is_near(entry: Entry) -> bool:
    """Whether a comparable guess is within a factor of `NEAR` of the measurement, or the right word."""
    return factor_off(entry) <= NEAR * (1 + 1e-9)


@dataclass(frozen=True)
class Score:
    """The guesses among some entries, judged. As a text: how many were near, in sentences that describe the figure."""

    entries: tuple[Entry, ...]

    @property
    def guessed(self) -> list[Entry]:
        """Entries whose guess can be judged."""
        return [entry for entry in self.entries if comparable(entry)]

    @property
    def near(self) -> int:
        """How many guesses are within a factor of `NEAR` of the measurement; words: how many are right."""
        return sum(map(is_near, self.guessed))

    @property
    def median_factor(self) -> float:
        """The middle one of the factors by which the guesses are off; infinity where half of them have none, `nan`
        without guesses."""
        return median(map(factor_off, self.guessed)) if self.guessed else math.nan

    def __str__(self):
        if all(entry.guess is None and entry.measured is None for entry in self.entries):
            return "Nothing was guessed or measured here yet."
        unguessed = sum(entry.guess is None and entry.measured is not None for entry in self.entries)
        waiting = sum(entry.guess is not None and entry.measured is None for entry in self.entries)
        unlike = len(self.entries) - len(self.guessed) - sum(None in (e.guess, e.measured) for e in self.entries)
        counts = {
            "measured without a guess": unguessed,
            "guessed and not measured yet": waiting,
            "with a number beside a word": unlike,
        }
        said = self._judged() if self.guessed else "No guess can be scored."
        left = [f"{count} {what}" for what, count in counts.items() if count]
        return f"{said} Besides: {', '.join(left)}." if left else said

    def _judged(self) -> str:
        guessed, middle = self.guessed, self.median_factor
        said = f"Each guess as a factor of what was measured: {self.near} of {len(guessed)} within a factor of two"
        if len(guessed) > 1 and math.isfinite(middle):
            said += f", the middle one off by a factor of {format_number(middle)}"
        worst = max(guessed, key=factor_off)
        if is_near(worst):
            return f"{said}."
        worst = f"{worst.key}, guessed {worst.text(worst.guess)}, measured {worst.text(worst.measured)}"
        return f"{said}. Farthest off: {worst}."
