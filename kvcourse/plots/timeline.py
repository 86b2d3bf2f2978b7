"""When the tokens of an answer arrive, who could read along, and the map of the course."""

import textwrap
from itertools import pairwise
from statistics import median

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import LogLocator

from kvcourse.plots.base import COLORS, drawing, new_figure
from kvcourse.reading import read_times, waits

WAITING = {"color": COLORS["prefill"], "alpha": 0.25, "linewidth": 0}  # the time before the first token


@drawing
def token_timeline(arrivals: list[float], pieces: list[str], first: int = 14) -> Figure:
    """One tick for each token: the whole answer above, below it the `first` tokens with their text and gaps."""
    fig, (whole, close) = new_figure(2, 1, size=(10, 5.2), height_ratios=[1, 1.25])
    _whole_answer(whole, arrivals)
    _close_up(close, arrivals[:first], pieces[:first])
    return fig


def _whole_answer(ax, arrivals: list[float]) -> None:
    ttft, last = arrivals[0], arrivals[-1]
    gaps = [after - before for before, after in pairwise(arrivals)]
    then = f", the median gap is {_ms(median(gaps))}" if gaps else ""
    ax.axvspan(0, ttft, **WAITING)
    ax.vlines(arrivals, 0, 1, color=COLORS["decode"], linewidth=1.5)
    _bare(ax, f"The whole answer: {len(arrivals)} tokens{then}")
    ax.set_xlim(0, last * 1.02)
    text = f"time to\nfirst token\n{_ms(ttft)}"
    if ttft > 0.13 * last:  # wide enough for the words
        ax.text(ttft / 2, 0.5, text, ha="center", va="center")
        return
    box = {"facecolor": "white", "edgecolor": COLORS["prefill"], "boxstyle": "round,pad=0.3"}
    line = {"arrowstyle": "-", "color": COLORS["prefill"], "linewidth": 2}
    ax.annotate(text, (ttft, 0.5), xytext=(ttft + 0.03 * last, 0.5), va="center", bbox=box, arrowprops=line)


def _close_up(ax, arrivals: list[float], pieces: list[str]) -> None:
    gaps = [after - before for before, after in pairwise(arrivals)]
    margin = median(gaps) if gaps else arrivals[0]
    left, right = arrivals[0] - margin, arrivals[-1] + margin
    ax.axvspan(left, arrivals[0], **WAITING)
    ax.vlines(arrivals, 0, 0.62, color=COLORS["decode"], linewidth=2.5)
    for gap, (before, after) in zip(gaps, pairwise(arrivals), strict=True):
        if after - before > 0.035 * (right - left):
            ax.text((before + after) / 2, 0.3, _ms(gap, unit=""), ha="center", va="center", fontsize=11)
    free = left
    for arrival, piece in zip(arrivals, pieces, strict=True):
        if arrival >= free:
            ax.text(arrival, 0.68, _visible(piece), rotation=35, ha="left", va="bottom", fontsize=12, parse_math=False)
            free = arrival + 0.03 * (right - left)
    _bare(ax, f"A closer look at the first {len(arrivals)} (between the ticks: the gap in ms)")
    ax.set_ylim(0, 1.25)
    ax.set_xlim(left, right)
    ax.set_xlabel("seconds since the question was sent")


def _ms(seconds: float, unit: str = " ms") -> str:
    """Seconds as whole milliseconds, below 10 ms with one decimal."""
    return f"{1000 * seconds:,.{0 if seconds >= 0.01 else 1}f}{unit}"


def _visible(piece: str) -> str:
    """A piece of text as a short label; blanks are made visible, what is long is cut."""
    text = piece.strip(" ").replace("\n", "↵")
    return textwrap.shorten(text, 14, placeholder="…") if text else ("␣" if piece else "(end)")


def _bare(ax, title: str) -> None:
    """A time axis alone: nothing is measured upwards."""
    ax.set_title(title)
    ax.set_yticks([])
    ax.set_ylim(0, 1)
    ax.spines["left"].set_visible(False)
    ax.grid(visible=False)


@drawing
def reading(times: list[float], words_per_second: float, others: dict[str, float] | None = None) -> Figure:
    """Words on the screen and words read, over time. `times` are those of `word_times`; `others` are more readers,
    {name: words per second}, drawn thin. Where the first reader waits, the line is flat and marked."""
    fig, ax = new_figure(size=(9, 4.8))
    ax.step([0, *times], range(len(times) + 1), where="post", color=COLORS["decode"], label="on the screen")
    for (name, speed), style in zip((others or {}).items(), (":", "-.", (0, (5, 1))), strict=False):
        ax.plot(*_reader(times, speed), color=COLORS["bound"], linestyle=style, linewidth=1.6, label=name)
    seconds, words = _reader(times, words_per_second)
    ax.plot(seconds, words, color=COLORS["green"], linestyle="--", label=f"read, {words_per_second:g} words/s")
    late = waits(times, words_per_second)
    if late:
        starts, ends = [times[i] - wait for i, wait in late.items()], [times[i] for i in late]
        ax.hlines(list(late), starts, ends, color=COLORS["vermillion"], linewidth=6, label="the reader waits")
    ax.set_xlim(0, 1.05 * max(times[-1], min(seconds[-1], 3.5 * times[-1])))  # a slow reader's line may leave
    ax.set_ylim(0, len(times) * 1.05)
    ax.set_xlabel("seconds since the question was sent")
    ax.set_ylabel("words")
    ax.set_title(reading_sentence(times, words_per_second))
    ax.legend(loc="lower right", frameon=True, edgecolor="white", framealpha=0.9)
    return fig


def _reader(times: list[float], words_per_second: float) -> tuple[list[float], list[int]]:
    """The reader's line: rising while a word is read, flat while the reader waits for the next."""
    seconds, words = [], []
    for index, begun in enumerate(read_times(times, words_per_second)):
        seconds += [begun, begun + 1 / words_per_second]
        words += [index, index + 1]
    return seconds, words


def reading_sentence(times: list[float], words_per_second: float) -> str:
    """What the reader's line shows, in one sentence."""
    reader = f"A reader of {words_per_second:g} words a second"
    late = waits(times, words_per_second)
    if not late:
        return f"{reader} never waits after the first word"
    word = "word" if len(late) == 1 else "words"
    return f"{reader} waits for {len(late)} {word}, {sum(late.values()):.2f} s in all"


@drawing
def first_and_gaps(rows: dict[str, list[float]]) -> Figure:
    """Each row's first token (a diamond) and gaps (dots) on one log axis of milliseconds; the median gap is a bar.
    `rows` is {label: arrivals in seconds}."""
    fig, ax = new_figure(size=(9, 1.7 + 0.75 * len(rows)))
    for row, arrivals in enumerate(rows.values()):
        gaps = [1000 * (after - before) for before, after in pairwise(arrivals)]
        named = row == 0  # one legend entry for all rows
        ax.plot(
            gaps,
            [row + 0.16 * (index % 5 - 2) / 2 for index in range(len(gaps))],  # spread, so that dots stay apart
            "o",
            color=COLORS["decode"],
            alpha=0.4,
            markersize=6,
            label="gaps" if named else None,
        )
        if gaps:
            ax.plot(
                [median(gaps)] * 2, [row - 0.33, row + 0.33], "-", color="black", label="median gap" if named else None
            )
        ax.plot(
            1000 * arrivals[0],
            row,
            "D",
            color=COLORS["prefill"],
            markeredgecolor="black",
            markersize=11,
            label="first token" if named else None,
        )
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    for format_ticks in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
        format_ticks(lambda value, _: f"{value:g}")
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("milliseconds (log scale)")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return fig


# number, title, the question it answers; one row of the map a line of thought
COURSE = {
    "the same answer, sooner": [
        ("00", "Start here", "What does a reader wait for?"),
        ("01", "Naive generation", "What is computed again and again?"),
        ("02", "KV cache", "What can be kept instead?"),
        ("03", "Prefill and decode", "Why is the first token so late?"),
    ],
    "what the cache costs": [
        ("04", "Memory and GQA", "How large does the cache get?"),
        ("05", "Sliding window", "What may be forgotten?"),
        ("06", "Paged attention", "How do many texts share memory?"),
        ("07", "Prefix caching", "What need not be read twice?"),
    ],
    "fewer bits, and out into the world": [
        ("08", "Weight quantization", "How few bits does a weight need?"),
        ("09", "Cache quantization", "And a cached key or value?"),
        ("10", "From course to production", "How do real servers do it?"),
    ],
}


@drawing
def course_map(present: set[str], here: str = "", missing: str = "in the making") -> Figure:
    """The notebooks of the course as boxes, three lines of thought from top to bottom. Those whose number is in
    `present` are filled, the others dashed and labeled `missing`; `here` is the one the reader sits in."""
    fig, ax = new_figure(size=(11.5, 5.6))
    for row, (thought, notebooks) in enumerate(COURSE.items()):
        ax.text(0.02, -row + 0.42, thought, fontsize=13, style="italic", va="bottom")
        for column, (number, title, question) in enumerate(notebooks):
            ready = number in present
            box = FancyBboxPatch(
                (column + 0.02, -row - 0.3),
                0.92,
                0.64,
                boxstyle="round,pad=0,rounding_size=0.04",
                facecolor="#dbeaf5" if ready else "white",
                edgecolor=COLORS["vermillion"] if number == here else COLORS["blue"] if ready else "#888888",
                linewidth=3 if number == here else 1.5,
                linestyle="-" if ready else (0, (4, 3)),
            )
            ax.add_patch(box)
            state = "you are here" if number == here else "" if ready else missing
            ink = "black" if ready else "#555555"
            lines = textwrap.wrap(f"{number}  {title}", 24)
            ax.text(column + 0.07, -row + 0.27, "\n".join(lines), fontsize=12, weight="bold", va="top", color=ink)
            question = "\n".join(textwrap.wrap(question, 24))
            below = 0.1 - 0.1 * (len(lines) - 1)
            ax.text(column + 0.07, -row + below, question, fontsize=11.5, va="top", color=ink)
            ax.text(column + 0.9, -row - 0.27, state, fontsize=10.5, ha="right", va="bottom", color=ink, style="italic")
    ax.set_xlim(0, 4)
    ax.set_ylim(-len(COURSE) + 0.65, 0.6)
    ax.axis("off")
    return fig
