"""Pictures of notebook 08: grids and what is rounded onto them, what grids cost, and what fits once bits are saved."""

import numpy as np
from matplotlib.colors import SymLogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvcourse.plots.base import COLORS, LOOKS, drawing, new_figure, plain_number
from kvcourse.results import format_number

LEVEL, WEIGHT, MARKED = "#999999", COLORS["blue"], COLORS["vermillion"]


@drawing
def rounding_grids(grids: dict, marked: int | None = None):
    """Numbers on the values that they may take: `{title: (numbers, rounded, values of the grid)}`, one line each.

    Dots are the numbers, ticks the grid's values; a line leads from each number to what it is rounded to. The number
    at place `marked` has another color, and its two values stand beside it.
    """
    fig, axes = new_figure(len(grids), 1, size=(11, 0.9 + 1.55 * len(grids)), squeeze=False, sharex=True)
    for ax, (title, (numbers, rounded, values)) in zip(axes[:, 0], grids.items(), strict=True):
        ax.hlines(0, min(values), max(values), color=LEVEL, linewidth=1)
        ax.vlines(values, -0.16, 0.16, color=LEVEL, linewidth=1.4)
        for place, (number, value) in enumerate(zip(numbers, rounded, strict=True)):
            color, size = (MARKED, 11) if place == marked else (WEIGHT, 7)
            ax.plot([number, value], [0.62, 0.16], "-", color=color, linewidth=1.6)
            ax.plot(number, 0.62, "o" if place != marked else "D", color=color, markersize=size)
        if marked is not None:
            text = f"{numbers[marked]:.3f} becomes {rounded[marked]:.4f}"
            ax.annotate(text, (numbers[marked], 0.62), (0, 10), textcoords="offset points", ha="center", color=MARKED)
        ax.set(ylim=(-0.35, 1.25), yticks=[])
        ax.spines["left"].set_visible(False)
        ax.grid(visible=False)
        ax.set_title(title, fontsize=13)
    handles = [
        Line2D([], [], color=WEIGHT, marker="o", linestyle="", label="a weight"),
        Line2D([], [], color=LEVEL, marker="|", markersize=12, markeredgewidth=1.6, linestyle="", label="a grid value"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


@drawing
def error_by_size(lines: dict, names):
    """Error against what it costs: `{label: (bits per weight, relative errors)}`, a point for each size of the groups.
    `names` of the sizes stand at the points of the first line."""
    fig, ax = new_figure(size=(9.5, 5))
    for (label, (bits, errors)), (color, marker, dash) in zip(lines.items(), LOOKS, strict=False):
        ax.plot(bits, errors, dash, marker=marker, color=color, label=label)
    for name, *point in zip(names, *next(iter(lines.values())), strict=True):
        ax.annotate(name, point, (7, 4), textcoords="offset points", fontsize=10)
    ax.set(xlabel="bits a weight, all that is stored counted", ylabel="error of the weights", yscale="log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    ax.yaxis.set_minor_formatter(lambda value, _: f"{value:.2g}" if f"{value:e}"[0] in "25" else "")
    ax.margins(x=0.09)
    ax.set_title("From one grid for all to one for a few")
    ax.legend(loc="upper right")
    return fig


@drawing
def levels(weights, grids: dict):
    """Where the values of 4-bit grids lie, `{name: values}` (from -1 to 1, or -8/7 where a code lies outside), under a
    histogram of `weights`, each divided by the largest magnitude of its group."""
    fig, (top, bottom) = new_figure(2, 1, size=(10.5, 3.2 + 0.55 * len(grids)), height_ratios=(2.2, len(grids) * 0.55))
    ends, look = (-1.2, 1.08), {"color": COLORS["sky"], "edgecolor": "white", "linewidth": 0.3}
    counts, *_ = top.hist(weights, bins=81, range=(-1, 1), **look)
    top.annotate("each group's largest", (1, counts[-1]), (0, 8), textcoords="offset points", ha="right", fontsize=11)
    top.set(yticks=[], xlim=ends, ylabel="weights")
    top.grid(visible=False)
    top.set_title("Weights, and the 16 values that they may take")
    for row, (values, (color, *_)) in enumerate(zip(grids.values(), LOOKS, strict=False)):
        bottom.hlines(row, *ends, color="#cccccc", linewidth=1)
        bottom.vlines(values, row - 0.3, row + 0.3, color=color, linewidth=2.4)
    bottom.set_yticks(range(len(grids)), list(grids))
    bottom.set(ylim=(len(grids) - 0.4, -0.6), xlim=ends, xlabel="weight / largest of its group")
    bottom.grid(visible=False)
    return fig


@drawing
def sensitivity(damage, rows, columns):
    """How much worse a model gets when one matrix alone is rounded: `damage[row][column]` in percent. Colors are on a
    log scale beyond 1%, so that one large number does not hide the others."""
    damage = np.asarray(damage, dtype=float)
    fig, ax = new_figure(size=(2.6 + 1.15 * len(columns), 1.9 + 0.72 * len(rows)))
    norm = SymLogNorm(1, vmin=min(0.0, damage.min()), vmax=max(1.0, damage.max()))
    image = ax.imshow(damage, cmap="cividis", aspect="auto", norm=norm)
    for row, values in enumerate(damage):
        for column, value in enumerate(values):
            color = "black" if norm(value) > 0.5 else "white"
            ax.text(column, row, f"{value:+.1f}%", ha="center", va="center", color=color, fontsize=11)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.grid(visible=False)
    ax.set_title("Perplexity, when this matrix alone is rounded")
    ticks = [tick for tick in (0, 1, 3, 10, 30, 100, 300, 1000, 3000) if tick <= norm.vmax]
    fig.colorbar(image, ax=ax, label="more, in % (log scale)", ticks=ticks, format=plain_number)
    return fig


@drawing
def memory_by_length(lengths, lines: dict, devices: dict):
    """GB of weights and cache against the length of the text, `{label: GB at each length}`, below the memory of
    `{device: GB}`."""
    fig, ax = new_figure(size=(10, 5.4))
    for (label, values), (color, marker, dash) in zip(lines.items(), LOOKS, strict=False):
        ax.plot(lengths, values, dash, marker=marker, markersize=5, color=color, label=label)
    for name, value in devices.items():
        ax.axhline(value, color=COLORS["bound"], linestyle=":", linewidth=1.8)
        beside = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 11, "color": "#444444"}
        ax.annotate(name, (1.01, value), **beside)
    top = max([*devices.values(), *(max(values) for values in lines.values())])
    ax.set(xscale="log", xlabel="tokens in the cache (log scale)", ylabel="GB", ylim=(0, 1.1 * top))
    ax.xaxis.set_major_formatter(plain_number)
    ax.set_title("Weights and cache")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@drawing
def before_and_after(rows: dict):
    """Memory and the time of a step of some forms of one model: `{name: (MB of the layers, MB of embedding and head, ms
    of a step, ms that reading alone takes)}`."""
    names, parts = list(rows), np.array(list(rows.values()), dtype=float)
    fig, (left, right) = new_figure(1, 2, size=(12.5, 1.9 + 0.62 * len(rows)), sharey=True)
    y = np.arange(len(rows))
    left.barh(y, parts[:, 0], color=COLORS["blue"], height=0.6, label="layers")
    left.barh(y, parts[:, 1], left=parts[:, 0], color=COLORS["sky"], hatch="//", edgecolor="white", height=0.6)
    for place, total in enumerate(parts[:, 0] + parts[:, 1]):
        left.annotate(f"{total:,.0f} MB", (total, place), (5, 0), textcoords="offset points", va="center")
    right.barh(y, parts[:, 2], color=COLORS["decode"], height=0.6)
    right.plot(parts[:, 3], y, "D", color=COLORS["black"], markersize=8)
    for place, (took, least) in enumerate(parts[:, 2:]):
        text = f"{format_number(float(took))} ms"
        right.annotate(text, (max(took, least), place), (9, 0), textcoords="offset points", va="center")
    left.set(xlabel="MB allocated", xlim=(0, 1.25 * (parts[:, 0] + parts[:, 1]).max()))
    right.set(xlabel="ms for one token", xlim=(0, 1.3 * parts[:, 2:].max()))
    left.set_yticks(y, names)
    left.invert_yaxis()
    for ax in (left, right):
        ax.grid(axis="y", visible=False)
    left.set_title("Memory of the weights")
    right.set_title("A step")
    handles = [
        Patch(color=COLORS["blue"], label="layers"),
        Patch(facecolor=COLORS["sky"], hatch="//", edgecolor="white", label="embedding and head"),
        Line2D([], [], color=COLORS["black"], marker="D", linestyle="", label="reading the weights alone"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig
