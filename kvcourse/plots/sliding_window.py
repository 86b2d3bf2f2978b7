"""Pictures of notebook 05: what a window costs and saves, how far it reaches, what it forgets, and what repairs it."""

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator

from kvcourse.plots.base import COLORS, LOOKS, drawing, new_figure, plain_number
from kvcourse.results import format_number

LOCAL, GLOBAL = COLORS["sky"], COLORS["vermillion"]


@drawing
def flat_cost(contexts, megabytes: dict, seconds: dict):
    """Memory held and time of a step against the tokens read; both are `{name: values at contexts}`."""
    fig, (left, right) = new_figure(1, 2, size=(11, 4.8))
    for (name, held), (color, marker, dash) in zip(megabytes.items(), LOOKS, strict=False):
        left.plot(contexts, held, dash, marker=marker, color=color, label=name)
        right.plot(contexts, 1e3 * np.asarray(seconds[name]), dash, marker=marker, color=color)
        left.annotate(
            f"{format_number(float(held[-1]))} MB",
            (contexts[-1], held[-1]),
            (0, 8),
            textcoords="offset points",
            ha="right",
        )
    left.set(ylabel="MB of keys and values", ylim=(-0.04 * max(map(max, megabytes.values())), None))
    left.set_title("Memory")
    right.set(ylabel="time of a step, ms", ylim=(0, 1.3e3 * max(map(max, seconds.values()))))
    right.set_title("Time")
    for ax in (left, right):
        ax.set_xlabel("tokens read")
        ax.xaxis.set_major_formatter(plain_number)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@drawing
def forgotten(recalls: dict, window: int):
    """Recall against distance, `{name: [Recall for each distance]}`, with 95% intervals; the window as a line, and what
    guessing would get where that is known."""
    fig, ax = new_figure(size=(9, 5))
    shift = np.linspace(-1.5, 1.5, len(recalls))  # tokens: lines that lie on each other would hide one another
    for (name, row), (color, marker, dash), moved in zip(recalls.items(), LOOKS, shift, strict=False):
        at = np.array([recall.distance for recall in row]) + moved
        share = np.array([recall.share for recall in row])
        spread = [share - [r.low for r in row], [r.high for r in row] - share]
        ax.errorbar(at, share, np.abs(spread), color=color, marker=marker, linestyle=dash, capsize=4, label=name)
    guesses = [(r.distance, r.guessed) for r in next(iter(recalls.values())) if r.guessed is not None]
    if guesses:
        ax.plot(*zip(*guesses, strict=True), ":", color=COLORS["bound"], label="by guessing")
    ax.axvline(window, color="black", linewidth=1.2)
    ax.annotate(f"window {window}", (window, 0.15), (-6, 0), textcoords="offset points", ha="right")
    ax.set(xlabel="how many tokens ago it was said", ylabel="answered right", ylim=(-0.05, 1.08))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_title("What is remembered")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@drawing
def reach_by_layer(changes, window: int):
    """How much the numbers after each layer move when token 0 is changed: `changes` is `(layers + 1, positions)`, the
    embeddings first. Exact zeros are left white; black lines mark layers x (window - 1)."""
    values = np.asarray(changes, dtype=float)
    layers, positions = values.shape[0] - 1, values.shape[1]
    fig, ax = new_figure(size=(10, 1.6 + 0.55 * values.shape[0]))
    moved = np.where(values > 0, values, np.nan)
    low, high = (np.nanmin(moved), np.nanmax(moved)) if (values > 0).any() else (1.0, 1.0)
    image = ax.pcolormesh(
        np.arange(positions + 1) - 0.5,
        np.arange(layers + 2) - 0.5,
        moved,
        norm=LogNorm(low, max(high, 10 * low)),
        edgecolors="#cccccc",
        linewidth=0.5,
    )
    for layer in range(layers + 1):
        end = layer * (window - 1) + 0.5
        ax.plot([end, end], [layer - 0.5, layer + 0.5], "-", color="black", linewidth=3)
    ax.set_yticks(range(layers + 1), ["embedding", *(f"layer {layer}" for layer in range(1, layers + 1))])
    ax.set(xlabel="position", xlim=(-0.5, positions - 0.5))
    ax.grid(visible=False)
    fig.colorbar(image, ax=ax, label="change (log scale)")
    ax.set_title("Token 0 is changed: what moves (lines: layers x (window - 1))", fontsize=13)
    return fig


@drawing
def reach_decay(change, window: int, layers: int):
    """How much the scores at each position move when token 0 is changed, on a log scale; an exact zero is not drawn."""
    change = np.asarray(change, dtype=float)
    fig, ax = new_figure(size=(9, 4.6))
    ax.semilogy(np.where(change > 0, change, np.nan), color=COLORS["blue"], linewidth=1.8)
    for layer in range(1, layers + 1):
        end = layer * (window - 1)
        ax.axvline(end, color=COLORS["bound"], linestyle=":", linewidth=1.8)
        place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points", "ha": "right", "fontsize": 11}
        ax.annotate(f"{layer} x {window - 1}", (end, 0.94), (-4, 0), **place)
    ax.set(xlabel="position", ylabel="largest change of a score (log scale)", xlim=(0, len(change) - 1))
    ax.set_title("Token 0 is changed: how much the scores move")
    return fig


@drawing
def first_token_weight(shares, even: float):
    """How much of its attention each layer gives to the first token, averaged; `even` is what one of as many keys would
    get if all were given the same."""
    fig, ax = new_figure(size=(9, 4.2))
    ax.bar(range(1, len(shares) + 1), shares, color=COLORS["green"], width=0.75)
    ax.axhline(even, color="black", linestyle="--", linewidth=1.5, label="an even share")
    ax.set(xlabel="layer", ylabel="weight on the first token", xlim=(0.3, len(shares) + 0.7), ylim=(0, 1))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x", visible=False)
    ax.set_title("Where attention goes")
    ax.legend(loc="upper left")
    return fig


@drawing
def perplexity_by_position(ends, perplexities: dict, window: int):
    """Perplexity of a text piece by piece: `ends` are where the pieces end, the values `{name: one for each piece}`."""
    fig, ax = new_figure(size=(9, 5.2))
    for (name, values), (color, marker, dash) in zip(perplexities.items(), LOOKS, strict=False):
        ax.plot(ends, values, dash, marker=marker, color=color, label=name)
    ax.axvline(window, color=COLORS["bound"], linestyle=":", linewidth=1.8)
    place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
    ax.annotate("the window is full", (window, 0.03), (6, 0), **place)
    ax.set(xlabel="tokens read", ylabel="perplexity of the latest piece (log scale)", yscale="log", xlim=(0, None))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    ax.yaxis.set_major_formatter(plain_number)
    ax.minorticks_off()
    ax.xaxis.set_major_formatter(plain_number)
    ax.set_title("A model without a window, cut to one")
    fig.legend(loc="outside lower center", ncols=4)
    return fig


@drawing
def layer_patterns(patterns: dict, recalls, bytes_kept, distance: int):
    """Which layers see everything, what that keeps, and what is remembered.

    `patterns` is `{name: (window or None of each layer)}`, `recalls` a `Recall` for each, `bytes_kept` the bytes of
    cache as a share of what all layers would keep without windows.
    """
    fig, (left, middle, right) = new_figure(
        1, 3, size=(12, 1.8 + 0.5 * len(patterns)), width_ratios=(1.5, 2, 2), sharey=True
    )
    for row, windows in enumerate(patterns.values()):
        for layer, window in enumerate(windows):
            color = GLOBAL if window is None else LOCAL
            hatch = "//" if window is None else None
            box = Rectangle((layer - 0.45, row - 0.35), 0.9, 0.7, facecolor=color, edgecolor="white", hatch=hatch)
            left.add_patch(box)
    layers = max(map(len, patterns.values()))
    left.set(xlim=(-0.6, layers - 0.4), xlabel="layer")
    left.set_xticks(range(layers), range(1, layers + 1))
    left.set_yticks(range(len(patterns)), list(patterns))
    left.set_title("What the layers see", fontsize=13)
    rows = np.arange(len(patterns))
    middle.barh(rows, bytes_kept, color=COLORS["orange"], height=0.6)
    middle.set_title("Cache kept", fontsize=13)
    share = np.array([recall.share for recall in recalls])
    spread = np.abs([share - [r.low for r in recalls], [r.high for r in recalls] - share])
    right.barh(rows, share, xerr=spread, color=COLORS["blue"], height=0.6, capsize=4, ecolor="black")
    right.set_title(f"Remembered over {distance} tokens", fontsize=13)
    for ax in (middle, right):
        ax.set_xlim(0, 1.08)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for ax in (left, middle, right):
        ax.grid(axis="y", visible=False)
    left.grid(visible=False)
    left.set_ylim(len(patterns) - 0.4, -0.6)
    handles = [Patch(facecolor=LOCAL, label="a window"), Patch(facecolor=GLOBAL, hatch="//", label="everything")]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


@drawing
def local_and_global(lengths, gigabytes: dict):
    """GB of cache of published models at `lengths` tokens, `{name: (as made, if every layer saw everything)}`; NaN past
    the end of a model's own context."""
    rows = -(-len(gigabytes) // 2)
    fig, axes = new_figure(rows, 2, size=(8.5, 0.8 + 3.4 * rows), squeeze=False)
    for ax in axes.flat[len(gigabytes) :]:
        ax.remove()
    for ax, (name, (own, full)) in zip(axes.flat, gigabytes.items(), strict=False):
        ax.loglog(lengths, full, "--", color=GLOBAL, label="if all layers saw everything")
        ax.loglog(lengths, own, "-", color=COLORS["blue"], label="as the model is made")
        last = np.flatnonzero(~np.isnan(own))[-1]
        ax.plot(lengths[last], own[last], "o", color=COLORS["blue"])
        ratio = f"{own[last] / full[last]:.0%} of that"
        ax.annotate(ratio, (0.96, 0.05), xycoords="axes fraction", ha="right")
        ax.set_xlim(right=3 * lengths[last])
        ax.set_title(name, fontsize=13)
        ax.set_xlabel("tokens (log scale)")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
        ax.yaxis.set_major_formatter(plain_number)
        ax.minorticks_off()
    fig.supylabel("GB of cache in 16 bits (log scale)", fontsize=13)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2)
    return fig
