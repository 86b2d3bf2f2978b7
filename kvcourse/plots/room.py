"""What a whole room guessed, beside what its computers measured: for the discussion at the end."""

import math
import textwrap
from statistics import median

from kvcourse.entry import Entry, format_number
from kvcourse.plots.base import COLORS, drawing, new_figure, plain_number

ROWS = (("measured", "measured"), ("guess", "guessed"))  # part of an entry and its label, from below
COLUMNS = 2
AS_WRITTEN = {"parse_math": False}  # a learner's "$" begins no formula


@drawing
def guesses_of_room(questions: dict[str, list[Entry]]):
    """A panel for each question: every guess and every measurement as a dot, equal ones stacked; the line is what was
    measured in the middle. Answers in words are bars, one for each answer.

    `questions` is `{key: the entries of all learners}`; the axis is logarithmic where the numbers of a question are all
    positive and span more than a factor of 20. Raises `ValueError` when there is no question.
    """
    if not questions:
        raise ValueError("nobody has noted a guess: there is nothing to draw.")
    rows = math.ceil(len(questions) / COLUMNS)
    fig, axes = new_figure(rows, COLUMNS, size=(13, 0.4 + 2.6 * rows), squeeze=False)
    for ax, (key, entries) in zip(axes.flat, questions.items(), strict=False):
        answers = {part: [value for e in entries if (value := getattr(e, part)) is not None] for part, _ in ROWS}
        question = next((entry.question for entry in entries if entry.question), key)
        ax.set_title(textwrap.fill(textwrap.shorten(question, 200, placeholder="..."), 62), fontsize=12, **AS_WRITTEN)
        if any(isinstance(value, str) for values in answers.values() for value in values):
            _words(ax, {part: list(map(str, values)) for part, values in answers.items()})
        else:
            _numbers(ax, answers, entries[0].unit)
    for ax in axes.flat[len(questions) :]:
        ax.set_visible(False)
    return fig


def _numbers(ax, answers: dict[str, list[float]], unit: str) -> None:
    values = [float(value) for part in answers.values() for value in part]
    logarithmic = min(values) > 0 and max(values) > 20 * min(values)
    scale = math.log if logarithmic else float
    low, high = min(map(scale, values)), max(map(scale, values))
    step = (high - low or 1) / 40  # values nearer than a dot is wide are stacked
    for y, (part, _) in enumerate(ROWS):
        columns = [round((scale(value) - low) / step) for value in answers[part]]
        tallest = max(map(columns.count, columns), default=0)
        for i, (value, column) in enumerate(zip(answers[part], columns, strict=True)):
            height = y - 0.25 + 0.6 * columns[:i].count(column) / max(tallest, 8)
            ax.plot(value, height, "o" if part == "guess" else "s", color=COLORS[part], markersize=8, alpha=0.8)
    if logarithmic:
        ax.set_xscale("log")
    ax.xaxis.set_major_formatter(plain_number)
    if answers["measured"]:
        middle = median(answers["measured"])
        ax.axvline(middle, color=COLORS["measured"], linewidth=1.2)
        text = f"{format_number(middle)} {unit}".strip()
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
        ax.annotate(text, (middle, 1), (5, -4), **place, **AS_WRITTEN)
    ax.set_xlabel(unit, **AS_WRITTEN)
    _label_rows(ax, answers)


def _words(ax, answers: dict[str, list[str]]) -> None:
    choices = sorted({value for values in answers.values() for value in values})
    most = max(values.count(choice) for values in answers.values() for choice in choices)
    for y, (part, _) in enumerate(ROWS):
        for x, choice in enumerate(choices):
            count = answers[part].count(choice)
            if count:
                ax.bar(x, 0.6 * count / most, bottom=y - 0.3, width=0.6, color=COLORS[part])
                top = (x, y - 0.3 + 0.6 * count / most)
                ax.annotate(str(count), top, (0, 2), textcoords="offset points", ha="center", va="bottom")
    labels = [textwrap.shorten(choice, 28, placeholder="...") for choice in choices]
    ax.set_xticks(range(len(choices)), labels, **AS_WRITTEN)
    ax.set_xlim(-0.6, len(choices) - 0.4)
    ax.grid(axis="x", visible=False)
    _label_rows(ax, answers)


def _label_rows(ax, answers: dict[str, list]) -> None:
    ax.set_yticks(range(len(ROWS)), [f"{label}\n({len(answers[part])})" for part, label in ROWS])
    ax.set_ylim(-0.5, 1.6)
    ax.grid(axis="y", visible=False)
