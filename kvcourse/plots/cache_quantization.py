"""Pictures of notebook 09: outlier channels, grids of a group, what rounding does to attention, and what it saves."""

import textwrap

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from kvcourse.plots.base import COLORS, LOOKS, drawing, new_figure, plain_number
from kvcourse.results import format_number

# What a step reads, in the order in which it is drawn.
PARTS = {
    "weights": (COLORS["purple"], None),
    "keys and values": (COLORS["blue"], None),
    "codes and scales": (COLORS["sky"], "//"),
    "numbers made of them": (COLORS["vermillion"], "xx"),
}
KEPT, SAVED = COLORS["blue"], "#d9e6f2"


@drawing
def channel_maps(panels: dict):
    """Keys or values of one head as pictures side by side: `{title: (tokens, channels)}`. All share one color scale,
    which is the same above and below zero."""
    fig, axes = new_figure(1, len(panels), size=(4.6 * len(panels), 4.8), squeeze=False, sharey=True)
    limit = max(float(np.abs(numbers).max()) for numbers in panels.values())
    for ax, (title, numbers) in zip(axes[0], panels.items(), strict=True):
        image = ax.imshow(numbers, aspect="auto", vmin=-limit, vmax=limit, interpolation="nearest")
        ax.set_title(title, fontsize=14)
        ax.set_xlabel("channel")
        ax.grid(visible=False)
    axes[0, 0].set_ylabel("token")
    fig.colorbar(image, ax=list(axes[0]), shrink=0.85)
    return fig


@drawing
def channel_sizes(panels: dict):
    """How large each channel is, as a multiple of its head's median channel, the largest first: `{title: (heads,
    channels)}`. Thin lines are heads, the thick one is the median of all heads."""
    fig, axes = new_figure(1, len(panels), size=(5.4 * len(panels), 4.4), squeeze=False, sharey=True)
    for ax, (title, sizes) in zip(axes[0], panels.items(), strict=True):
        relative = np.asarray(sizes) / np.median(sizes, axis=1, keepdims=True)
        ranked = -np.sort(-relative, axis=1)
        places = np.arange(1, ranked.shape[1] + 1)
        ax.plot(places, ranked.T, "-", color=COLORS["sky"], linewidth=0.8, alpha=0.6)
        ax.plot(places, np.median(ranked, axis=0), "-", color=COLORS["black"], linewidth=2.5)
        ax.set(xscale="log", xlabel="channels of a head, the largest first", ylim=(0, None))
        ax.xaxis.set_major_formatter(plain_number)
        ax.set_title(title)
    axes[0, 0].set_ylabel("times the median channel")
    handles = [
        Line2D([], [], color=COLORS["sky"], linewidth=1.2, label="a head"),
        Line2D([], [], color=COLORS["black"], linewidth=2.5, label="median of all heads"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


@drawing
def grids_of_a_group(numbers, grids: dict):
    """The numbers of one group as dots, above the values that each of `grids` `{name: (values, codes)}` offers; those
    that some code stands for are filled."""
    numbers = np.asarray(numbers)
    fig, axes = new_figure(len(grids), 1, size=(10, 0.9 + 1.25 * len(grids)), squeeze=False, sharex=True)
    for ax, (name, (values, codes)) in zip(axes[:, 0], grids.items(), strict=True):
        used = np.unique(codes)
        filled = np.isin(np.arange(len(values)), used)
        looks = {"marker": "|", "s": 260, "linewidths": 2.4}
        ax.scatter(np.asarray(values)[~filled], np.zeros((~filled).sum()), color="#b0b0b0", **looks)
        ax.scatter(np.asarray(values)[filled], np.zeros(filled.sum()), color=COLORS["blue"], **looks)
        ax.scatter(numbers, np.full(len(numbers), 0.6), color=COLORS["vermillion"], s=22, alpha=0.6)
        ax.set(ylim=(-0.6, 1.0), yticks=[])
        ax.set_title(f"{name}: {len(used)} of {len(values)} values used", fontsize=13)
        ax.spines["left"].set_visible(False)
    handles = [
        Line2D([], [], marker="o", linestyle="", color=COLORS["vermillion"], label="the numbers"),
        Line2D([], [], marker="|", markersize=14, linestyle="", color=COLORS["blue"], label="value used"),
        Line2D([], [], marker="|", markersize=14, linestyle="", color="#b0b0b0", label="value not used"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


@drawing
def along_which_axis(bits, errors: dict, moved: dict, perplexities: dict, full: float):
    """What rounding along each axis costs, against `bits`: relative error of the numbers, share of attention that goes
    elsewhere, perplexity. The dicts are `{name: values at bits}`, and a name looks the same in all panels."""
    fig, axes = new_figure(3, 1, size=(8.5, 10.5), sharex=True)
    looks = dict(zip(errors, LOOKS, strict=False))
    panels = (
        (errors, "Error of the numbers", "root mean square error / size"),
        (moved, "Attention that moves", "weight that lands elsewhere"),
        (perplexities, "Perplexity", "perplexity (log scale)"),
    )
    for ax, (lines, title, label) in zip(axes, panels, strict=True):
        for name, values in lines.items():
            color, marker, dash = looks[name]
            ax.plot(range(len(bits)), values, dash, marker=marker, color=color, label=name)
        ax.set_xticks(range(len(bits)), [f"{b} bits" for b in bits])
        ax.set_xlim(-0.2, len(bits) - 0.8)
        ax.set_title(title)
        ax.set_ylabel(label, fontsize=12)
    for ax in axes[:2]:
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        ax.set_ylim(0, None)
    axes[2].axhline(full, color="black", linewidth=1.2, linestyle="-")
    axes[2].annotate("nothing rounded", (len(bits) - 1, full), (0, -15), textcoords="offset points", ha="right")
    axes[2].set_yscale("log")
    axes[2].set_ylim(0.8 * full, None)
    for which in ("major", "minor"):
        getattr(axes[2].yaxis, f"set_{which}_formatter")(plain_number)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


@drawing
def waiting_tokens(counts: dict):
    """Keys and values that are exact, after each number of tokens read: `{title: (keys, values)}`."""
    fig, axes = new_figure(len(counts), 1, size=(8.5, 1.2 + 2.3 * len(counts)), squeeze=False, sharex=True, sharey=True)
    for ax, (title, (keys, values)) in zip(axes[:, 0], counts.items(), strict=True):
        ax.plot(keys, "-", color=COLORS["blue"], label="keys")
        ax.plot(values, "--", color=COLORS["vermillion"], label="values")
        ax.set_title(title, fontsize=14)
        ax.set_ylabel("exact tokens")
    axes[-1, 0].set_xlabel("tokens read")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


@drawing
def quality_for_bytes(points: dict, full: tuple[float, float]):
    """Perplexity against the bytes kept for a token, for each of `points` `{name: (bytes, perplexity)}`, and for the
    cache in 16 bits, `full`."""
    fig, ax = new_figure(size=(9, 4.8))
    found = [full[1], *(perplexity for _, perplexity in points.values())]
    room = max(0.2 * (max(found) - min(found)), 0.01 * full[1])
    ax.axhline(full[1], color=COLORS["bound"], linestyle=":")
    for (name, (kept, perplexity)), place in zip(points.items(), range(len(points)), strict=True):
        color, marker, _ = LOOKS[place % len(LOOKS)]
        ax.plot(kept, perplexity, marker, color=color, markersize=11)
        ax.annotate(name, (kept, perplexity), (10, 4), textcoords="offset points", color=color, fontsize=12)
    ax.plot(*full, "*", color="black", markersize=16)
    ax.annotate("16 bits", full, (-8, 12), textcoords="offset points", ha="right")
    ax.set(xlim=(0, 1.12 * full[0]), xlabel="bytes kept for a token, mean", ylabel="perplexity")
    ax.set_ylim(min(found) - room, max(found) + room)
    ax.xaxis.set_major_formatter(plain_number)
    ax.set_title("What bytes buy")
    return fig


@drawing
def step_parts(moved: dict, seconds: dict):
    """One decode step. Left: bytes that must travel, `{cache: {part: bytes}}` (parts: `PARTS`); right: time measured,
    `{cache: seconds}`, where there is one."""
    fig, (left, right) = new_figure(1, 2, size=(13, 1.9 + 0.55 * len(moved)), width_ratios=(3, 2), sharey=True)
    rows = np.arange(len(moved))
    for row, parts in zip(rows, moved.values(), strict=True):
        start = 0.0
        for part, nbytes in parts.items():
            color, hatch = PARTS[part]
            left.barh(row, nbytes / 1e6, left=start, color=color, hatch=hatch, edgecolor="white", height=0.6)
            start += nbytes / 1e6
        left.annotate(f"{start:,.0f} MB", (start, row), (5, 0), textcoords="offset points", va="center")
    left.set_xlim(0, 1.2 * max(sum(parts.values()) for parts in moved.values()) / 1e6)
    left.set_yticks(rows, list(moved))
    left.set(xlabel="MB", ylim=(len(moved) - 0.5, -0.5))
    left.set_title("Bytes that travel")
    for row, name in zip(rows, moved, strict=True):
        if name in seconds:
            right.barh(row, 1e3 * seconds[name], color=COLORS["measured"], height=0.6)
            label = f"{1e3 * seconds[name]:,.1f} ms"
        else:
            label = "not written here"
        place = (1e3 * seconds.get(name, 0), row)
        right.annotate(label, place, (5, 0), textcoords="offset points", va="center")
    right.set_xlim(0, 1.35e3 * max(seconds.values()))
    right.set_xlabel("ms")
    right.set_title("Time measured")
    for ax in (left, right):
        ax.grid(axis="y", visible=False)
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=name) for name, (color, hatch) in PARTS.items()
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=4)
    return fig


@drawing
def cache_microscope(exact, rounded, codes, first_token: int, first_channel: int, token: int, rows: dict, title: str):
    """Some keys of one head under the microscope, and what their rounding does to an attention row.

    `exact`, `rounded` and `codes` are `(tokens, channels)`, from `first_token` and `first_channel` on; `token` is
    framed. `rows` `{name: weights}` are one query's attention over all keys, without and with rounding; `title` is one
    line about the framed token.
    """
    exact, rounded, codes = (np.asarray(x).T for x in (exact, rounded, codes))
    fig, axes = new_figure(4, 1, size=(9.5, 10.5), height_ratios=(1, 1, 1, 1.1))
    limit, worst = np.abs(exact).max() or 1.0, np.abs(rounded - exact).max() or 1.0
    panels = (
        ("value", exact, {"vmin": -limit, "vmax": limit, "cmap": "cividis"}),
        ("code", codes, {"cmap": "Greys", "vmin": 0, "vmax": 2 * max(1, codes.max())}),
        ("error", rounded - exact, {"vmin": -worst, "vmax": worst, "cmap": "cividis"}),
    )
    for ax, (name, numbers, options) in zip(axes, panels, strict=False):
        channels, tokens = numbers.shape
        extent = (first_token - 0.5, first_token + tokens - 0.5, channels - 0.5, -0.5)
        image = ax.imshow(numbers, aspect="auto", interpolation="nearest", extent=extent, **options)
        bar = fig.colorbar(image, ax=ax, pad=0.01, aspect=12)
        if name == "code":  # shades beyond the largest code would hide the digits
            bar.ax.set_ylim(0, max(1, codes.max()))
        ax.set_ylabel(f"{name}\nchannel", fontsize=12)
        ax.set_yticks(range(channels), range(first_channel, first_channel + channels), fontsize=11)
        ax.add_patch(
            Rectangle((token - 0.5, -0.5), 1, channels, fill=False, edgecolor=COLORS["vermillion"], linewidth=2.5)
        )
        ax.grid(visible=False)
    for (channel, place), code in np.ndenumerate(codes):
        axes[1].text(first_token + place, channel, str(code), ha="center", va="center", fontsize=10)
    axes[2].set_xlabel("token")
    axes[0].set_title(textwrap.fill(title, 80), fontsize=13, parse_math=False)
    _heaviest(axes[3], rows, token)
    return fig


def _heaviest(ax, rows: dict, token: int, most: int = 16) -> None:
    """The keys that get the most weight in any of `rows`, in their order, a bar for each row."""
    weights = np.array([np.asarray(row) for row in rows.values()])
    chosen = np.sort(np.argsort(-weights.max(axis=0), kind="stable")[:most])
    places, width = np.arange(len(chosen)), 0.8 / len(rows)
    for i, (name, row) in enumerate(zip(rows, weights, strict=True)):
        color, hatch = (COLORS["blue"], None) if i == 0 else (COLORS["orange"], "//")
        looks = {"color": color, "hatch": hatch, "edgecolor": "white", "label": name}
        ax.bar(places + (i - (len(rows) - 1) / 2) * width, row[chosen], width, **looks)
    ax.set_xticks(places, chosen, fontsize=12)
    for label, key in zip(ax.get_xticklabels(), chosen, strict=True):
        if key == token:
            label.set(color=COLORS["vermillion"], fontweight="bold")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set(xlabel=f"the {len(chosen)} keys to which the last token gives most", ylabel="weight")
    ax.grid(axis="x", visible=False)
    ax.set_ylim(0, 1.25 * weights.max())
    ax.legend(loc="upper left", ncols=2)


@drawing
def savings(bills: dict, what: str):
    """Bytes after each saving, a panel for each of `bills` `{title: {saving: bytes after it}}`: the first entry is the
    bill before. Bars are on a log scale; the light part is what the saving took away."""
    savings_each = len(next(iter(bills.values())))
    fig, axes = new_figure(len(bills), 1, size=(9, 0.6 + len(bills) * (1.1 + 0.5 * savings_each)), squeeze=False)
    for ax, (title, steps) in zip(axes[:, 0], bills.items(), strict=True):
        gigabytes = np.array(list(steps.values())) / 1e9
        low = 0.4 * gigabytes.min()
        for row, kept in enumerate(gigabytes):
            ax.barh(row, kept - low, left=low, color=KEPT, height=0.62)
            label = f"{format_number(float(f'{kept:.3g}'))} GB"
            end = kept
            if row:
                end = gigabytes[row - 1]
                ax.barh(row, end - kept, left=kept, color=SAVED, hatch="//", edgecolor="white", height=0.62)
                label += f"  ÷ {end / kept:.2f}"
            ax.annotate(label, (max(end, kept), row), (6, 0), textcoords="offset points", va="center", fontsize=12)
        ax.set_xscale("log")
        ax.set_xlim(low, gigabytes.max() * (gigabytes.max() / low) ** 0.55)
        ax.set_yticks(range(len(steps)), list(steps))
        ax.set(ylim=(len(steps) - 0.5, -0.5), xlabel=f"GB of cache for {what} (log scale)")
        ax.xaxis.set_major_formatter(plain_number)
        ax.grid(axis="y", visible=False)
        ax.set_title(f"{title}: {gigabytes[0] / gigabytes[-1]:,.0f} times less", fontsize=14)
    handles = [Patch(color=KEPT, label="kept"), Patch(facecolor=SAVED, hatch="//", edgecolor="white", label="saved")]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig
