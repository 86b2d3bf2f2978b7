"""Pictures of notebook 04: the cache in bytes, what fits on a device, and what sharing key-value heads costs."""

import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvcourse.plots.base import COLORS, drawing, new_figure, plain_number
from kvcourse.results import format_number

WEIGHTS, CACHE = COLORS["purple"], COLORS["cached"]
ROOM, NO_DEVICE = "#eeeeee", "#b5b5b5"
LOOKS = (  # one for each way or model: color, marker, dash
    (COLORS["blue"], "o", "-"),
    (COLORS["vermillion"], "s", "--"),
    (COLORS["green"], "^", "-."),
    (COLORS["orange"], "D", ":"),
)


@drawing
def cache_bill(rows: dict, tokens: int):
    """Bytes of cache for one text of `tokens` tokens, a bar for each model: `rows` is `{name: (kept, unshared)}`, with
    `unshared` what it would be if every query head kept a key and a value of its own for every token."""
    names = sorted(rows, key=lambda name: rows[name][0])
    kept, unshared = (np.array([rows[name][i] for name in names]) / 1e9 for i in (0, 1))
    fig, ax = new_figure(size=(10.5, 1.3 + 0.36 * len(names)))
    ax.barh(names, unshared, color="white", edgecolor="#888888", height=0.68, linewidth=1.2)
    ax.barh(names, kept, color=CACHE, height=0.68)
    for y, (mine, all_heads) in enumerate(zip(kept, unshared, strict=True)):
        times = f", {format_number(float(f'{all_heads / mine:.2g}'))} times less" if all_heads > 1.005 * mine else ""
        place = {"textcoords": "offset points", "va": "center", "fontsize": 11}
        ax.annotate(f"{format_number(float(mine))} GB{times}", (max(mine, all_heads), y), (6, 0), **place)
    ax.set_xscale("log")
    ax.set_xlim(kept.min() / 3, unshared.max() * 15)
    ax.xaxis.set_major_formatter(plain_number)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"GB of cache for {tokens:,} tokens at 16 bits (log scale)")
    handles = [
        Patch(color=CACHE, label="kept"),
        Patch(facecolor="white", edgecolor="#888888", label="if every query head kept its own, for every token"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


@drawing
def fit_map(lengths, batches, needed: dict, devices: dict, context_ends: dict):
    """The smallest device on which weights and cache fit, over batch and length, a panel for each model.

    `needed` is `{model: bytes (batches, lengths)}`, `devices` `{name: usable bytes}` from small to large,
    `context_ends` `{model: tokens}` the context that it was made for.
    """
    fig, axes = new_figure(len(needed), 1, size=(8.5, 1.6 + 3.1 * len(needed)), squeeze=False, sharex=True)
    colors = ListedColormap([*(COLORS["sky"], COLORS["blue"], "#1b4965", "#0b1f33")[-len(devices) :], NO_DEVICE])
    limits = np.sort(np.array(list(devices.values())))
    for ax, (model, nbytes) in zip(axes[:, 0], needed.items(), strict=True):
        smallest = np.searchsorted(limits, nbytes)
        ax.pcolormesh(lengths, batches, smallest, cmap=colors, norm=BoundaryNorm(np.arange(-0.5, len(limits) + 1), 5))
        ax.set(xscale="log", yscale="log", xlim=(lengths[0], lengths[-1]), ylim=(batches[0], batches[-1]))
        end = context_ends[model]
        if end < lengths[-1]:
            ax.axvline(end, color="white", linestyle="--", linewidth=2)
            place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points", "va": "top", "ha": "right"}
            ax.annotate(f"its context\nends at {end:,}", (end, 0.98), (-5, 0), color="white", **place)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(plain_number)
        ax.grid(visible=False)
        ax.set_title(model)
    axes[-1, 0].set_xlabel("tokens in each text (log scale)")
    fig.supylabel("texts in the batch (log scale)", fontsize=13)
    names = [*devices, "none of them"]
    handles = [Patch(color=colors(i), label=name) for i, name in enumerate(names)]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, title="smallest device on which it fits")
    return fig


@drawing
def memory_bill(rows: dict, memory: float, usable: float):
    """Weights and cache stacked in a bar for each of `rows`, `{label: (weights, cache)}` in bytes, against a device
    with `memory` bytes of which the part `usable` may be filled."""
    fig, ax = new_figure(size=(10.5, 1.9 + 0.5 * len(rows)))
    _bill(ax, rows, memory, usable)
    fig.legend(handles=_bill_handles(), loc="outside lower center", ncols=4)
    return fig


@drawing
def what_fits(parts, memory: float, usable: float, lengths, frontier, chosen, context_end: int, title: str):
    """One request against one device. Left: its `(weights, cache)` in bytes. Right: the largest batch that fits at each
    of `lengths`, with the request `chosen` `(tokens, texts)` and the end of the model's context."""
    fig, (left, right) = new_figure(1, 2, size=(12, 4.8), width_ratios=(5, 6))
    _bill(left, {"": parts}, memory, usable)
    left.set_title("Memory")
    lengths, frontier = np.asarray(lengths, dtype=float), np.asarray(frontier, dtype=float)
    top = max(frontier.max(initial=1), chosen[1]) * 4
    right.fill_between(lengths, np.maximum(frontier, 0.5), 0.5, color=COLORS["sky"], alpha=0.5, linewidth=0)
    right.plot(lengths, np.maximum(frontier, 0.5), color=CACHE)
    if context_end < lengths[-1]:
        right.axvspan(context_end, lengths[-1], facecolor="white", hatch="//", edgecolor="#bbbbbb", linewidth=0)
        right.axvline(context_end, color=COLORS["bound"], linestyle="--")
    fits = sum(parts) <= usable * memory and chosen[0] <= context_end
    color = COLORS["green"] if fits else COLORS["vermillion"]
    marker = {"marker": "o" if fits else "X", "markersize": 14, "markeredgecolor": "black"}
    right.plot(*chosen, color=color, zorder=5, clip_on=False, **marker)  # whole at the very edge of the axes too
    right.set(xscale="log", yscale="log", xlim=(lengths[0], lengths[-1]), ylim=(0.7, top))
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_formatter(plain_number)
    right.set_xlabel("tokens in each text (log scale)")
    right.set_ylabel("texts in the batch (log scale)")
    right.set_title("What fits")
    fig.suptitle(title, x=0.01, ha="left", fontsize=14)
    handles = [
        *_bill_handles(),
        Patch(color=COLORS["sky"], alpha=0.5, label="fits"),
        Patch(facecolor="white", hatch="//", edgecolor="#bbbbbb", label="past its context"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=6)
    return fig


def _bill(ax, rows: dict, memory: float, usable: float) -> None:
    longest = max(memory, *(sum(parts) for parts in rows.values())) / 1e9
    for y, parts in enumerate(rows.values()):
        weights, cache = (part / 1e9 for part in parts)
        ax.barh(y, memory / 1e9, color=ROOM, height=0.8)
        ax.barh(y, weights, color=WEIGHTS, height=0.5)
        ax.barh(y, cache, left=weights, color=CACHE, hatch="//", edgecolor="white", height=0.5)
        fits = sum(parts) <= usable * memory
        words = f"{format_number(weights + cache)} GB: {'fits' if fits else 'does not fit'}"
        place = {"textcoords": "offset points", "va": "center", "fontsize": 12}
        ax.annotate(words, (max(weights + cache, memory / 1e9), y), (6, 0), **place)
    ax.axvline(usable * memory / 1e9, color="black", linestyle="--", linewidth=1.8)
    ax.set(xlim=(0, 1.42 * longest), ylim=(len(rows) - 0.5, -0.5), xlabel="GB")
    ax.set_yticks(range(len(rows)), rows)
    ax.grid(axis="y", visible=False)


def _bill_handles() -> list:
    return [
        Patch(color=WEIGHTS, label="weights"),
        Patch(facecolor=CACHE, hatch="//", edgecolor="white", label="cache"),
        Patch(color=ROOM, label="the device's memory"),
        Line2D([], [], color="black", linestyle="--", linewidth=1.8, label="what may be filled"),
    ]


@drawing
def ways_to_attend(lengths, seconds: dict, least):
    """Time of one layer's attention for one new token against the tokens held, a line for each way: `seconds` is
    `{way: seconds at lengths}`; `least` are the seconds that reading keys and values once takes."""
    fig, ax = new_figure(size=(9, 4.8))
    for (way, times), (color, marker, dash) in zip(seconds.items(), LOOKS, strict=False):
        ax.loglog(lengths, 1e3 * np.asarray(times), dash, marker=marker, color=color, label=way)
    ax.loglog(
        lengths, 1e3 * np.asarray(least), ":", color=COLORS["bound"], label="least: bytes of the cache / bandwidth"
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(plain_number)
    ax.set_xlabel("tokens held (log scale)")
    ax.set_ylabel("time, ms (log scale)")
    ax.set_title("Attention in one layer, a new token in each of 8 texts")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@drawing
def sharing(kept: dict, perplexities: dict, recalls: dict, speeds: dict):
    """What heads shared, or a window, save and cost, model by model.

    `kept` is `{model: bytes of cache for a text}`; `perplexities` `{model: (value, low, high)}` with the interval of
    its difference to the first model; `recalls` `{model: [Recall]}`; `speeds` `{model: tokens a second}`.
    """
    fig, axes = new_figure(2, 2, size=(9.5, 8), height_ratios=(3, 2))
    (left, middle), below = axes
    for ax in below:
        ax.remove()
    right = fig.add_subplot(left.get_gridspec()[1, :])
    for name, (color, marker, dash) in zip(kept, LOOKS, strict=False):
        value, low, high = perplexities[name]
        x = kept[name] / 1e3
        left.errorbar(x, value, [[value - low], [high - value]], fmt=marker, color=color, capsize=5, markersize=10)
        left.annotate(name, (x, value), (9, 5), textcoords="offset points", color=color, fontsize=12)
        distances, share, low, high = np.array([(r.distance, r.share, r.low, r.high) for r in recalls[name]]).T
        margins = np.clip([share - low, high - share], 0, None)  # rounding puts the end of 100% a little below it
        looks = {"fmt": marker, "linestyle": dash, "color": color, "capsize": 4, "label": name}
        middle.errorbar(distances, 100 * share, 100 * margins, **looks)
    left.set_xscale("log", base=2)
    left.set_xlim(0.6 * min(kept.values()) / 1e3, 2.6 * max(kept.values()) / 1e3)
    left.xaxis.set_major_formatter(plain_number)
    left.set(xlabel="kB of cache, whole context (log scale)", ylabel="perplexity")
    left.set_title("Text as it comes")
    middle.set(xlabel="tokens between fact and question", ylabel="answered right, %", ylim=(-4, 108))
    middle.set_title("What was said earlier")
    fig.legend(*middle.get_legend_handles_labels(), loc="outside lower center", ncols=len(kept))
    names = list(speeds)
    colors = [color for color, _, _ in LOOKS[: len(names)]]
    bars = right.barh(names, [speeds[name] for name in names], color=colors, height=0.6)
    right.bar_label(bars, [f"{speeds[name]:,.0f}" for name in names], padding=4)
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    right.set_xlim(0, 1.35 * max(speeds.values()))
    right.xaxis.set_major_formatter(plain_number)
    right.set_xlabel("tokens a second, all texts")
    right.set_title("Decode")
    return fig


@drawing
def uptraining(curves: dict, after: dict, original: float):
    """A model whose key-value heads were merged. Left: training loss from step to step, `curves` is `{way: losses}`, as
    a mean over some steps. Right: perplexity of held-out text, `after` is `{way: (right after, after training)}`, with
    that of the model before, `original`."""
    fig, (left, right) = new_figure(1, 2, size=(12.5, 4.8))
    for (way, losses), (color, _, dash) in zip(curves.items(), LOOKS, strict=False):
        smooth = max(1, len(losses) // 15)
        means = np.convolve(losses, np.ones(smooth) / smooth, "valid")
        left.plot(np.arange(len(means)) + (smooth + 1) / 2, means, dash, color=color, label=way)
    left.set(xlabel="training step", ylabel="training loss, nats", xlim=(0, None))
    left.set_title("On the way")
    left.legend(loc="upper right")
    ways = list(after)
    for column, (label, color, hatch) in enumerate((("right after", "white", "//"), ("trained again", CACHE, None))):
        values = [after[way][column] for way in ways]
        y = np.arange(len(ways)) + 0.36 * (column - 0.5)
        bars = right.barh(y, values, height=0.34, color=color, hatch=hatch, edgecolor="#555555", label=label)
        right.bar_label(bars, [format_number(float(f"{value:.3g}")) for value in values], padding=4, fontsize=11)
    right.axvline(original, color="black", linestyle="--", linewidth=1.8, label="before heads were merged")
    right.set_xscale("log")
    right.set_xlim(0.7 * original, 4 * max(value for pair in after.values() for value in pair))
    right.xaxis.set_major_formatter(plain_number)
    right.xaxis.set_minor_formatter(lambda value, _: "")
    right.set_yticks(range(len(ways)), ways)
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    right.set_xlabel("perplexity of held-out text (log scale)")
    right.set_title("Before and after")
    fig.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig
