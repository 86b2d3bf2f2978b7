"""Pictures of notebook 06: what memory holds, who runs when, what load does to waiting, budgets and sizes of pages."""

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from kvcourse.plots.base import COLORS, drawing, new_figure, plain_number
from kvcourse.results import format_number

LOOKS = (  # color, marker, dash of each line
    (COLORS["vermillion"], "s", "--"),
    (COLORS["blue"], "o", "-"),
    (COLORS["green"], "^", "-."),
    (COLORS["purple"], "D", ":"),
)
DOING = {  # what a text is doing in a step: color, hatch, words
    "wait": ("#e6e6e6", "", "waits"),
    "prefill": (COLORS["prefill"], "", "prompt is read"),
    "decode": (COLORS["decode"], "", "a token is made"),
    "again": (COLORS["vermillion"], "xx", "computed again"),
    "idle": ("white", "////", "has ended, keeps its place"),
}


@drawing
def memory_shares(shares: dict, cited: dict | None = None):
    """What the memory taken for texts holds: `{way: (tokens, used later, never used)}`, shares of 1. `cited` are
    shares of tokens that others have published, `{who: (low, high)}`."""
    cited = cited or {}
    fig, ax = new_figure(size=(10, 1.6 + 0.55 * (len(shares) + len(cited))))
    parts = np.array(list(shares.values()))
    looks = (
        ("holds a token", COLORS["blue"], ""),
        ("used later", COLORS["sky"], "//"),
        ("never used", "#d9d9d9", ".."),
    )
    left = np.zeros(len(shares))
    for part, (label, color, hatch) in zip(parts.T, looks, strict=True):
        ax.barh(range(len(shares)), part, left=left, color=color, hatch=hatch, edgecolor="white", label=label)
        left += part
    for row, share in enumerate(parts[:, 0]):
        _note(ax, share, row, f"{share:.1%}", inside=share > 0.1)
    for row, (low, high) in enumerate(cited.values(), start=len(shares)):
        ax.barh(row, high, color="white", edgecolor=COLORS["bound"], linestyle="--")
        ax.barh(row, high - low, left=low, color=COLORS["bound"], alpha=0.5)
        _note(ax, high, row, f"{low:.1%}" if low == high else f"{low:.1%} to {high:.1%}", inside=high > 0.5)
    ax.set_yticks(range(len(shares) + len(cited)), [*shares, *cited])
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_xlabel("share of the memory that texts have taken, over time")
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def _note(ax, at: float, row: int, text: str, inside: bool) -> None:
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
    place = {"textcoords": "offset points", "va": "center", "ha": "right" if inside else "left", "bbox": box}
    ax.annotate(text, (at, row), (-8 if inside else 8, 0), **place)


@drawing
def who_runs(charts: dict, unit: str = "step"):
    """What each text does over time, charts of the same story above each other: `{title: {text: [(what, start, stop),
    ...]}}` with `what` one of wait, prefill, decode, again, idle."""
    rows = [len(chart) for chart in charts.values()]
    size = (11, 1.2 + sum(0.3 * n + 0.75 for n in rows))
    fig, axes = new_figure(len(charts), 1, size=size, height_ratios=rows, sharex=True, squeeze=False)
    end = max(stop for chart in charts.values() for spans in chart.values() for _, _, stop in spans)
    for ax, (title, chart) in zip(axes[:, 0], charts.items(), strict=True):
        for row, spans in enumerate(chart.values()):
            for what, (color, hatch, _) in DOING.items():
                parts = [(start, stop - start) for kind, start, stop in spans if kind == what]
                edge = "#999999" if what == "idle" else "white"
                ax.broken_barh(parts, (row - 0.39, 0.78), facecolor=color, hatch=hatch, edgecolor=edge, linewidth=0.6)
        last = max(stop for spans in chart.values() for _, _, stop in spans)
        ax.axvline(last, color="black", linewidth=1.5)
        ax.set_yticks(range(len(chart)), [str(text) for text in chart])
        ax.set(ylim=(len(chart) - 0.4, -0.6), xlim=(0, 1.01 * end))
        ax.grid(axis="y", visible=False)
        ax.set_title(f"{title}: all done at {unit} {format_number(last)}", fontsize=13)
    axes[-1, 0].set_xlabel(unit)
    seen = {what for chart in charts.values() for spans in chart.values() for what, *_ in spans}
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="#999999", label=words)
        for what, (color, hatch, words) in DOING.items()
        if what in seen
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig


@drawing
def load_curves(rates, curves: dict, offered=None):
    """Throughput and waiting against the arrival rate (requests a second).

    `curves` is `{name: {"throughput": [...], "ttft": {percentile: [...]}, "itl": {percentile: [...]}}}`, tokens a
    second and seconds at `rates`. `offered` are the tokens a second that were asked for.
    """
    fig, (made, first, gaps) = new_figure(1, 3, size=(13, 4.9))
    if offered is not None:
        made.plot(rates, offered, ":", color=COLORS["bound"], label="asked for")
    sizes = (13, 9, 6, 4)  # a mark that lies on another one is smaller, so both are seen
    for (name, curve), (color, marker, dash), size in zip(curves.items(), LOOKS, sizes, strict=False):
        made.plot(rates, curve["throughput"], dash, marker=marker, color=color, label=name, markersize=size)
        for ax, what in ((first, "ttft"), (gaps, "itl")):
            for i, seconds in enumerate(curve[what].values()):
                face = color if i else "white"
                ax.plot(rates, seconds, dash, marker=marker, color=color, markerfacecolor=face, markersize=size)
    percentiles = next(iter(curves.values()))["ttft"]
    shown = ", ".join(f"{look}: p{p}" for look, p in zip(("hollow", "full"), percentiles, strict=False))
    made.set_ylim(0, None)
    made.set_title("Tokens a second", fontsize=13)
    for ax, title in ((first, "Time to first token, s"), (gaps, "Time between tokens, s")):
        ax.set_yscale("log")
        ax.set_title(f"{title} (log scale)\n{shown}", fontsize=13)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(plain_number)
        ax.minorticks_off()
    for ax in (made, first, gaps):
        ax.set_xlabel("requests that come in a second")
    fig.legend(loc="outside lower center", ncols=len(curves) + 1)
    return fig


@drawing
def chunked_prefill(gaps: dict, ttft: dict):
    """What a long prompt does to those who are reading, by token budget of a step.

    `gaps` is `{budget: (when, seconds)}`: the gaps of the readers and when each ended, counted from the arrival of the
    long prompt; the longest of a budget is one from then on. `ttft` is `{budget: seconds until its first token}`.
    """
    fig, (trace, trade) = new_figure(2, 1, size=(8.5, 8.2))
    shown = [min(gaps), max(gaps)] if len(gaps) > 1 else list(gaps)
    for budget, (color, marker, _) in zip(reversed(shown), LOOKS, strict=False):
        when, seconds = (np.asarray(values) for values in gaps[budget])
        trace.plot(when, 1e3 * seconds, marker, color=color, alpha=0.55, label=f"at most {budget:,} tokens a step")
    trace.axvline(0, color="black", linewidth=1.2)
    trace.set(xlabel="seconds after the long prompt came", ylabel="gap before a token, ms")
    trace.set_ylim(0, 1.4e3 * max(max(gaps[budget][1]) for budget in shown))  # room for the legend
    trace.set_title("The gaps of those who read", fontsize=13)
    trace.legend(loc="upper right")
    budgets = sorted(gaps)
    longest = [1e3 * max(gap for t, gap in zip(*gaps[budget], strict=True) if t >= 0) for budget in budgets]
    trade.plot(budgets, longest, "-", marker="o", color=COLORS["decode"], label="longest gap of a reader")
    first = [1e3 * ttft[budget] for budget in budgets]
    trade.plot(budgets, first, "--", marker="D", color=COLORS["prefill"], label="first token of the long prompt")
    top = 1.4 * max(longest + first)
    trade.set(xscale="log", xlabel="tokens a step may have (log scale)", ylabel="ms", ylim=(0, top))
    trade.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    trade.minorticks_off()
    trade.set_title("What the budget trades", fontsize=13)
    trade.legend(loc="upper right")
    return fig


@drawing
def page_sizes(sizes, empty, seconds: dict):
    """Against the tokens of a page: the share of reserved slots that hold no token, and the time of a step,
    `{way: seconds at sizes}`."""
    fig, (left, right) = new_figure(1, 2, size=(11, 4.6))
    left.plot(sizes, empty, "-", marker="o", color=COLORS["blue"])
    left.set_title("Slots that hold no token", fontsize=13)
    left.set_ylim(0, max(0.1, 1.2 * max(empty)))
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for (name, times), (color, marker, dash) in zip(seconds.items(), LOOKS, strict=False):
        right.plot(sizes, 1e3 * np.asarray(times), dash, marker=marker, color=color, label=name)
    right.set_title("Time of a step, ms", fontsize=13)
    right.set_ylim(0, 1.25e3 * max(map(max, seconds.values())))
    right.legend(loc="lower left")
    for ax in (left, right):
        ax.set(xscale="log", xlabel="tokens of a page (log scale)")
        ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
        ax.minorticks_off()
    return fig


@drawing
def running_texts(running: dict):
    """How many texts run at once over the steps: `{way: number in each step}`."""
    fig, ax = new_figure(size=(9, 4.2))
    for (name, numbers), (color, _, dash) in zip(running.items(), LOOKS, strict=False):
        ax.step(range(len(numbers)), numbers, dash, where="post", color=color, label=name)
        ax.plot(len(numbers) - 1, numbers[-1], "o", color=color)
    ax.set(xlabel="step", ylabel="texts that run", ylim=(0, None))
    ax.set_title("The same memory, cut in two ways")
    ax.legend(loc="upper right")
    return fig
