"""The pictures of notebook 02: what stays equal, what a step costs, and when the cache pays."""

import numpy as np
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from kvcourse.plots.base import COLORS, drawing, new_figure
from kvcourse.results import format_number

EQUAL = COLORS["sky"]


@drawing
def same_bits(differences):
    """A triangle: row n compares the keys and values of a text of n tokens with those of the longest text.

    `differences` is `(lengths, positions)`: the largest difference at each token, NaN where the text has ended.
    Exact zeros, equal to the last bit, have their own color.
    """
    values = np.asarray(differences, dtype=float)
    fig, ax = new_figure(size=(8, 5.6))
    ax.grid(visible=False)
    extent = (-0.5, values.shape[1] - 0.5, values.shape[0] + 0.5, 0.5)
    ax.imshow(
        np.where(values == 0, 1.0, np.nan), cmap=ListedColormap([EQUAL]), extent=extent, aspect="auto", vmin=0, vmax=1
    )
    nonzero = values[values > 0]
    if nonzero.size:
        low, high = nonzero.min(), nonzero.max()
        norm = LogNorm(low, high if high > low else 10 * low)
        image = ax.imshow(np.where(values > 0, values, np.nan), norm=norm, extent=extent, aspect="auto")
        fig.colorbar(image, ax=ax, label="largest difference (log scale)")
    ax.set_xlabel("position of the token")
    ax.set_ylabel("tokens in the text that was run")
    ax.set_title(f"Keys and values against those of a text of {values.shape[0] + 1} tokens")
    ax.legend(handles=[Patch(color=EQUAL, label="equal to the last bit")], loc="upper right")
    return fig


@drawing
def bytes_copied(tokens, grown, preallocated):
    """Bytes copied in all until a text has so many tokens, for a cache that grows and one that was there before."""
    fig, ax = new_figure()
    for name, values, color, line in (
        ("grown by concatenation", grown, COLORS["purple"], "--"),
        ("allocated once", preallocated, COLORS["cached"], "-"),
    ):
        megabytes = np.asarray(values, dtype=float) / 1e6
        ax.loglog(tokens, megabytes, line, color=color)
        ax.annotate(
            f"{name}\n{format_number(float(megabytes[-1]))} MB",
            (tokens[-1], megabytes[-1]),
            (8, 0),
            textcoords="offset points",
            va="center",
            color=color,
        )
    ax.set_xlim(tokens[0], tokens[-1] * 12)
    ax.set_xticks(_powers(tokens[0], tokens[-1]), [f"{n:,}" for n in _powers(tokens[0], tokens[-1])])
    ax.minorticks_off()
    ax.set_xlabel("tokens in the cache (log scale)")
    ax.set_ylabel("MB copied in all (log scale)")
    ax.set_title("What it costs to add the tokens one by one")
    return fig


@drawing
def logit_differences(differences: dict, gaps, bound: float):
    """Cached against uncached logits at each step, a line for each number format, with the gap between the two
    highest logits: a token can change only where the line reaches half of the gap."""
    fig, ax = new_figure(size=(8, 5))
    steps = np.arange(1, len(gaps) + 1)
    lines = zip(("-", "--", ":"), ("o", "s", "^"), ("green", "purple", "sky"), strict=True)
    for (name, values), (line, marker, color) in zip(differences.items(), lines, strict=False):
        shown = np.where(
            np.asarray(values, dtype=float) > 0, values, np.nan
        )  # an exact zero has no place on a log axis
        ax.semilogy(steps, shown, line, marker=marker, markersize=4, color=COLORS[color], label=name)
    ax.semilogy(steps, np.asarray(gaps) / 2, "D", color="black", markersize=5, label="half the gap of the top two")
    ax.axhline(bound, color=COLORS["bound"], linewidth=1.5, linestyle="-.")
    ax.annotate(f"bound for float32: {bound:g}", (steps[-1], bound), (0, 4), textcoords="offset points", ha="right")
    ax.set_xlabel("token made")
    ax.set_ylabel("largest logit difference (log scale)")
    ax.set_title("With the cache against without")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@drawing
def step_times(contexts, cached, lengths, naive, constant: float, slope: float):
    """Seconds of a step against the length of the text: both kinds on the left, the cached one with its fitted
    line `constant + slope x n` on the right."""
    fig, (both, alone) = new_figure(1, 2, size=(10, 4.5))
    contexts, cached = np.asarray(contexts), 1e3 * np.asarray(cached)
    both.plot(lengths, 1e3 * np.asarray(naive), "s--", color=COLORS["naive"], label="without cache")
    both.plot(contexts, cached, "o-", color=COLORS["cached"], label="with cache")
    both.set_title("One more token")
    both.legend(loc="upper left")
    alone.plot(contexts, cached, "o", color=COLORS["cached"], label="measured")
    line = np.array([0, contexts[-1]])
    alone.plot(line, 1e3 * (constant + slope * line), "-", color="black", linewidth=1.5, label="constant + slope x n")
    alone.axhline(1e3 * constant, color=COLORS["bound"], linestyle=":", label="constant")
    alone.set_ylim(0, 1.35 * max(cached.max(), 1e3 * constant))
    alone.set_title("With cache, closer")
    alone.legend(loc="lower right")
    for ax in (both, alone):
        ax.set_xlabel("tokens in the text")
        ax.set_ylabel("milliseconds a step")
        ax.set_ylim(bottom=0)
    return fig


@drawing
def constant_and_slope(tokens, costs: dict, context: int):
    """For each cost of a cached step: its constant part, the part that grows with the text, and where they meet.

    `costs` maps a title (with the unit) to `(constant, slope)`; `context` is the longest text the model can read.
    """
    fig, axes = new_figure(1, len(costs), size=(5 * len(costs), 4.5), squeeze=False)
    tokens = np.asarray(tokens, dtype=float)
    for ax, (title, (constant, slope)) in zip(axes[0], costs.items(), strict=True):
        flat = np.full_like(tokens, constant)
        ax.fill_between(tokens, 0, flat, color=COLORS["cached"], alpha=0.55)
        ax.fill_between(tokens, flat, flat + slope * tokens, color=COLORS["orange"], alpha=0.75, hatch="///")
        meet = constant / slope
        lines = np.array([meet, context - 0.04 * tokens[-1]])  # the context has its words on its left
        free, late = (_farthest(lines, np.linspace(low, 0.85, 20) * tokens[-1]) for low in (0.13, 0.4))
        ax.text(free, constant / 2, "constant", va="center", ha="center")
        ax.text(late, constant + slope * late * 0.4, "slope x n", va="center", ha="center")
        if meet <= tokens[-1]:
            ax.plot([meet, meet], [0, constant + slope * meet], color="black", linewidth=1.5)
        ax.axvline(context, color="#555555", linestyle=":", linewidth=1.8)
        at_the_left = context < tokens[-1] / 10
        ax.annotate(
            f"context {context:,}",
            (context, 1 if at_the_left else 0),
            (3, -6) if at_the_left else (-3, 6),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            rotation=90,
            va="top" if at_the_left else "bottom",
            ha="left" if at_the_left else "right",
        )
        ax.set_title(f"as large as the constant\nat {meet:,.0f} tokens", fontsize=13)
        ax.set_xlim(0, tokens[-1])
        ax.set_ylim(0, 1.12 * (constant + slope * tokens[-1]))
        ax.set_xlabel("tokens in the text")
        ax.set_ylabel(title)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return fig


@drawing
def cost_ratio(curves: dict, times: float, context: int):
    """How many times the work a text takes without the cache, against the number of tokens made.

    `curves` maps a label to `(tokens, ratios, measured, reached)`: tokens above `measured` are drawn as
    extrapolated; `reached` is the number of tokens from which on the ratio is at least `times`, or None.
    """
    fig, ax = new_figure(size=(8, 5))
    styles = ((COLORS["green"], "-"), (COLORS["purple"], "--"))
    for (label, (tokens, ratios, measured, reached)), (color, line) in zip(curves.items(), styles, strict=False):
        tokens, ratios = np.asarray(tokens), np.asarray(ratios)
        inside = tokens <= measured
        ax.loglog(tokens[inside], ratios[inside], line, color=color, label=label)
        if not inside.all():
            ax.loglog(tokens[~inside], ratios[~inside], ":", color=color, linewidth=1.5, label=f"{label}, extrapolated")
        if reached is not None:
            ax.plot(reached, times, "o", color=color, markersize=9)
            ax.annotate(f"{reached:,}", (reached, times), (-6, 8), textcoords="offset points", ha="right", color=color)
    ax.axhline(times, color="black", linewidth=1.2)
    ax.annotate(f"{times:g} times", (1, times), (6, 4), textcoords="offset points")
    ax.axvline(context, color=COLORS["bound"], linestyle=":", linewidth=1.8)
    ax.annotate(f"context\n{context:,}", (context, 1), (-5, 4), textcoords="offset points", ha="right", color="#444444")
    ax.set_xlabel("tokens in the text (log scale)")
    ax.set_ylabel("without cache / with cache (log scale)")
    ax.set_title("How many times dearer a text is without the cache")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@drawing
def crossover(lengths, naive, cached, times: float, reached: int | None):
    """Seconds of a step at small lengths with and without the cache, and where the ratio passes `times` for good."""
    fig, ax = new_figure()
    lengths = np.asarray(lengths)
    ax.plot(lengths, 1e3 * np.asarray(naive), "s--", color=COLORS["naive"], label="without cache: all rows")
    ax.plot(lengths, 1e3 * np.asarray(cached), "o-", color=COLORS["cached"], label="with cache: one row")
    if reached is not None:
        ax.axvline(reached, color="black", linewidth=1.5)
        at_left = reached > np.sqrt(lengths[0] * lengths[-1])
        ax.annotate(
            f"from {_many(reached, 'token')} on:\n{times:g} times as slow",
            (reached, ax.get_ylim()[1]),
            (-6 if at_left else 6, -4),
            textcoords="offset points",
            va="top",
            ha="right" if at_left else "left",
        )
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens in the text (log scale)")
    ax.set_ylabel("milliseconds a step")
    ax.set_title("Where the cache begins to pay")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@drawing
def masks(right, wrong, titles=("right", "wrong")):
    """Two attention masks side by side, `(queries, keys)` True where a query sees a key."""
    fig, axes = new_figure(1, 2, size=(9, 2.9))
    for ax, mask, title in zip(axes, (right, wrong), titles, strict=True):
        mask = np.asarray(mask)
        queries, keys = mask.shape
        for q in range(queries):
            for k in range(keys):
                color = COLORS["cached"] if mask[q, k] else "white"
                ax.add_patch(_square(k, q, color))
                ax.text(k, q, "sees" if mask[q, k] else "", ha="center", va="center", color="white", fontsize=11)
        ax.set_xlim(-0.5, keys - 0.5)
        ax.set_ylim(queries - 0.5, -0.5)
        ax.set_xticks(range(keys))
        ax.set_yticks(range(queries), [f"{keys - queries + q}" for q in range(queries)])
        ax.set_aspect("equal")
        ax.grid(visible=False)
        ax.set_xlabel("position of the key")
        ax.set_ylabel("position of\nthe query")
        ax.set_title(title)
    return fig


def _farthest(lines, places) -> float:
    """The place that is farthest from all lines."""
    return max(places, key=lambda place: np.abs(place - lines).min())


def _square(column: int, row: int, color: str) -> Rectangle:
    return Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor="#888888")


def _powers(low: float, high: float) -> list[int]:
    return [10**e for e in range(int(np.ceil(np.log10(low))), int(np.floor(np.log10(high))) + 1)]


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + ("" if count == 1 else "s")
