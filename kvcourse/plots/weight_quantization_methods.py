"""Pictures of notebook 08: ways to round better than to nearest, and what they do to a layer and to a model."""

import numpy as np

from kvcourse.plots.base import COLORS, LOOKS, drawing, new_figure

METHODS = {
    "RTN": (COLORS["vermillion"], "s", "--"),
    "GPTQ": (COLORS["blue"], "o", "-"),
    "AWQ": (COLORS["green"], "^", "-."),
}


@drawing
def equal_error(weight, hessian, step: float, points: dict):
    """Two weights on a grid of distance `step`: curves of equal error of the output around `weight` `(2,)`, for inputs
    with the Hessian `(2, 2)`; the grid's points; and where some ways to round end, `{name: (2,)}`."""
    weight, hessian = np.asarray(weight, float), np.asarray(hessian, float)
    low, high = np.floor(weight / step - 1) * step, np.ceil(weight / step + 1) * step
    xs, ys = (np.linspace(low[i], high[i], 161) for i in (0, 1))
    off = np.stack(np.meshgrid(xs - weight[0], ys - weight[1]), axis=-1)
    error = np.einsum("...i,ij,...j->...", off, hessian, off) / 2
    ends = {name: np.asarray(point, float) for name, point in points.items()}
    at_points = sorted({round(float((p - weight) @ hessian @ (p - weight) / 2), 12) for p in ends.values()})
    fig, ax = new_figure(size=(8.2, 6.6))
    ax.contourf(xs, ys, np.sqrt(error), levels=12, cmap="cividis_r", alpha=0.55)
    ax.contour(xs, ys, error, levels=[level for level in at_points if level > 0], colors="black", linewidths=1.2)
    for x in np.arange(low[0], high[0] + step / 2, step):
        for y in np.arange(low[1], high[1] + step / 2, step):
            ax.plot(x, y, "+", color="#333333", markersize=11, markeredgewidth=1.8)
    ax.plot(*weight, "*", color="black", markersize=17, label="the two weights")
    for (name, point), (color, marker, _) in zip(ends.items(), METHODS.values(), strict=False):
        ax.plot(*point, marker, color=color, markersize=15, markerfacecolor="none", markeredgewidth=3, label=name)
    ax.set(xlabel="first weight", ylabel="second weight", xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    ax.grid(visible=False)
    ax.set_title("Curves of equal error of the output")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


@drawing
def against_nearest(settings: dict, best: str = "rounding to nearest"):
    """For each setting the output error of some layers as a share of that of rounding to nearest,
    `{setting: shares}`: a dot for each layer, a bar at the median."""
    fig, ax = new_figure(size=(10.5, 1.9 + 0.58 * len(settings)))
    for row, shares in enumerate(settings.values()):
        shares = np.asarray(shares, float)
        spread = np.linspace(-0.2, 0.2, len(shares)) if len(shares) > 1 else np.zeros(1)
        ax.plot(shares, row + spread, "o", color=COLORS["sky"], markersize=6, markeredgecolor=COLORS["blue"])
        ax.plot([np.median(shares)] * 2, [row - 0.36, row + 0.36], "-", color=COLORS["black"], linewidth=3)
    ax.axvline(1, color=METHODS["RTN"][0], linewidth=2, linestyle="--")
    ax.annotate(best, (1, 1), (-5, 4), ("data", "axes fraction"), "offset points", ha="right", color=METHODS["RTN"][0])
    ax.set_yticks(range(len(settings)), list(settings))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.08 * max(1.1, *(max(shares) for shares in settings.values())))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_xlabel("error of the layer's output, as a share")
    ax.grid(axis="y", visible=False)
    return fig


@drawing
def channel_scales(magnitudes, ratios, errors, chosen: int):
    """Left: how large the inputs of a layer are, largest first. Right: the error of its output, as a share of that
    without a scale, when channels are scaled by magnitude^ratio before rounding."""
    fig, (left, right) = new_figure(1, 2, size=(12, 4.6))
    magnitudes = np.sort(np.asarray(magnitudes, float))[::-1]
    left.plot(np.arange(1, len(magnitudes) + 1), magnitudes, "-", color=COLORS["blue"])
    left.set(xscale="log", yscale="log", xlabel="channel, largest first (log scale)", ylabel="mean |input|")
    left.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    left.set_title("Inputs of one layer")
    share = np.asarray(errors, float) / errors[0]
    color, marker, _ = METHODS["AWQ"]
    right.plot(ratios, share, "-", marker=marker, color=color)
    right.plot(ratios[chosen], share[chosen], "*", color=COLORS["black"], markersize=18)
    right.axhline(1, color=METHODS["RTN"][0], linestyle="--", linewidth=1.8)
    right.set(xlabel="ratio: how much of the magnitude goes into the scale", ylim=(0, 1.15 * max(1, share.max())))
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_title("Error of its output")
    return fig


@drawing
def quality_by_bits(bits, perplexity: dict, exact: float, recall: dict):
    """Left: perplexity by bits of some ways to round, `{method: value at each of bits}`, beside that of the exact
    weights. Right: the share of questions answered right, with its 95% interval: `{method: Recall at each of bits}`."""
    fig, (left, right) = new_figure(1, 2, size=(12, 4.8))
    places = np.arange(len(bits))
    for number, (name, values) in enumerate(perplexity.items()):
        color, marker, dash = METHODS.get(name, LOOKS[number % len(LOOKS)])
        left.plot(places, values, dash, marker=marker, color=color, label=name)
        shift = 0.09 * (number - (len(perplexity) - 1) / 2)
        shares = [entry.share for entry in recall[name]]
        below = [max(0.0, entry.share - entry.low) for entry in recall[name]]
        above = [max(0.0, entry.high - entry.share) for entry in recall[name]]
        bars = {"yerr": (below, above), "capsize": 4, "linestyle": dash, "marker": marker, "color": color}
        right.errorbar(places + shift, shares, **bars)
    left.axhline(exact, color=COLORS["bound"], linestyle=":", linewidth=2, label="weights as they were")
    left.set(yscale="log", ylabel="perplexity (log scale)")
    low, high = left.get_ylim()
    ticks = [tick * 10**power for power in range(-1, 7) for tick in (1, 2, 3, 5) if low < tick * 10**power < high]
    left.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    left.minorticks_off()
    left.set_title("Perplexity")
    right.set(ylim=(-0.03, 1.06), ylabel="answered right")
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_title("Recall")
    for ax in (left, right):
        ax.set_xticks(places, [f"{b} bits" for b in bits])
        ax.margins(x=0.08)
    fig.legend(loc="outside lower center", ncols=len(perplexity) + 1)
    return fig
