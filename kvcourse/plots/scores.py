"""All guesses of a notebook beside what was measured, on one axis of factors."""

import textwrap

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvcourse.entry import NOT_MEASURED, Entry, format_number
from kvcourse.plots.base import COLORS, drawing, new_figure
from kvcourse.scoring import NEAR, Score, comparable, is_near, times

EDGE = 1e4  # a guess farther off than that is drawn as an arrow at the edge


@drawing
def guesses(score: Score):
    """One row for each entry: the guess and the bound as factors of the measurement, which stands at 1; the numbers
    beside them. Within the band a guess is near. A word, a zero, or what was not guessed has no factor, only words."""
    entries = score.entries
    fig, ax = new_figure(size=(9, 1.9 + 0.56 * max(1, len(entries))))
    if not entries:
        ax.text(0.5, 0.5, str(score), transform=ax.transAxes, ha="center", va="center")
        ax.set_axis_off()
        return fig
    ax.axvspan(1 / NEAR, NEAR, color=COLORS["guess"], alpha=0.16, lw=0)
    for row, entry in enumerate(entries):
        _mark(ax, row, times(entry.bound, entry.measured), COLORS["bound"], "D", 6)
        _mark(ax, row, times(entry.guess, entry.measured), COLORS["guess"], "o", 10)
        if entry.measured is not None:
            ax.plot(1, row, "|", color=COLORS["measured"], markersize=17, markeredgewidth=3, zorder=2)
        color = "#666666" if entry.guess is None or entry.measured is None else "black"
        place = dict(xycoords=("axes fraction", "data"), va="center", color=color, fontsize=12, parse_math=False)
        ax.annotate(_in_lines(_said(entry)), (1.02, row), **place)
    _frame(ax, entries)
    return fig


def _mark(ax, row: int, ratio: float | None, color: str, marker: str, size: int) -> None:
    """A factor at its place, or an arrow where it would stand beyond the edge."""
    if ratio is None:
        return
    if not 1 / EDGE <= ratio <= EDGE:
        marker = "<" if ratio < 1 else ">"
    at = min(max(ratio, 1 / EDGE), EDGE)
    ax.plot(at, row, marker, color=color, markersize=size, markeredgecolor="black", markeredgewidth=0.8, zorder=3)


def _said(entry: Entry) -> str:
    """The numbers of one row, in words."""
    guess = "no guess" if entry.guess is None else f"guess {_short(entry, entry.guess)}"
    if entry.measured is None:
        return f"{guess}, {NOT_MEASURED}"
    verdict = ""
    if entry.guess is not None and times(entry.guess, entry.measured) is None:
        verdict = ": not comparable" if not comparable(entry) else ": right" if is_near(entry) else ": not right"
    return f"{guess}, measured {entry.text(entry.measured)}{verdict}"


def _short(entry: Entry, value) -> str:
    """A guess; without its unit where the measurement is about to say it; a long word cut short, visibly."""
    if isinstance(value, str):
        return textwrap.shorten(value, 40, placeholder="...")
    return format_number(value) if isinstance(entry.measured, int | float) else entry.text(value)


def _frame(ax, entries) -> None:
    """The log axis with plain labels, at least from 1/4 to 4, and the names of the rows."""
    ratios = [times(value, entry.measured) for entry in entries for value in (entry.guess, entry.bound)]
    decades = [abs(np.log10(min(max(ratio, 1 / EDGE), EDGE))) for ratio in ratios if ratio]
    reach = 10 ** max([0.6, *(decade + 0.15 for decade in decades)])
    ax.set_xscale("log")
    ax.set_xlim(1 / reach, reach)
    steps = [10**power for power in range(1, 5) if 10**power <= reach]
    steps = {2, *steps} if len(steps) < 3 else set(steps[::-2])  # labels that do not run into each other
    ticks = sorted({1, *steps, *(1 / step for step in steps)})
    ax.set_xticks(ticks, [f"1/{1 / tick:,.0f}" if tick < 1 else f"{tick:,.0f}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("times the measurement")
    ax.set_yticks(range(len(entries)), [_wrapped(entry.key, 26) for entry in entries], fontsize=12, parse_math=False)
    ax.set_ylim(len(entries) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    look = dict(linestyle="none", markeredgecolor="black", markeredgewidth=0.8)
    tick = dict(marker="|", markersize=14, markeredgewidth=3, linestyle="none")
    named = {
        "measured": Line2D([], [], color=COLORS["measured"], **tick),
        "your guess": Line2D([], [], color=COLORS["guess"], marker="o", markersize=10, **look),
    }
    if any(times(entry.bound, entry.measured) is not None for entry in entries):
        named["bound"] = Line2D([], [], color=COLORS["bound"], marker="D", markersize=6, **look)
    named["within a factor of two"] = Patch(color=COLORS["guess"], alpha=0.16, lw=0)
    ax.figure.legend(named.values(), named, loc="outside upper center", ncols=4, fontsize=12, columnspacing=1)


def _in_lines(said: str) -> str:
    """Guess and measurement one above the other, each in lines of at most 30 characters."""
    guess, comma, rest = said.rpartition(", ")
    return "\n".join(_wrapped(part, 30) for part in (guess + comma.strip(), rest) if part)


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))
