"""Pictures of notebook 01: attention by hand, the rows that are computed again, and how work grows with length."""

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

from kvcourse.plots.base import COLORS, drawing, new_figure

NEW, AGAIN = COLORS["cached"], COLORS["naive"]
PARTS = {  # how each part of the work is drawn, in every picture
    "linear layers": {"color": COLORS["blue"], "linestyle": "-", "marker": "o"},
    "attention": {"color": COLORS["vermillion"], "linestyle": "--", "marker": "s"},
    "all together": {"color": COLORS["black"], "linestyle": "-.", "marker": "D"},
    "one step": {"color": COLORS["green"], "linestyle": "-", "marker": "^"},
    "all n steps": {"color": COLORS["black"], "linestyle": "-.", "marker": "D"},
    "output head": {"color": COLORS["green"], "linestyle": ":", "marker": "^"},
}


def power_law(lengths, costs) -> tuple[float, float]:
    """Exponent p and factor c of the law `c * length**p` that fits best in logarithms (least squares).

    Returns NaN for both where there is nothing to fit: fewer than two different lengths, or a cost that is not above 0.
    """
    x, y = np.asarray(lengths, dtype=float), np.asarray(costs, dtype=float)
    if len(set(x.tolist())) < 2 or not (x > 0).all() or not (y > 0).all():
        return float("nan"), float("nan")
    exponent, intercept = np.polyfit(np.log(x), np.log(y), 1)
    return float(exponent), float(np.exp(intercept))


@drawing
def attention_matrices(labels: list[str], matrices: dict):
    """One annotated heatmap for each `(T, T)` matrix, rows queries, columns keys; a number that is not finite is left
    blank. `matrices` is `{title: matrix}`, `labels` are the T tokens."""
    fig, axes = new_figure(1, len(matrices), size=(4.6 * len(matrices), 4.9), squeeze=False)
    for ax, (title, matrix) in zip(axes[0], matrices.items(), strict=True):
        shown = np.ma.masked_invalid(np.asarray(matrix, dtype=float))
        image = ax.imshow(shown)
        low, high = image.get_clim()
        for (row, column), value in np.ma.ndenumerate(shown):  # masked numbers are passed over
            dark = value < (low + high) / 2
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if dark else "black")
        ax.set_xticks(range(len(labels)), labels, rotation=35, ha="right", rotation_mode="anchor")
        ax.set_yticks(range(len(labels)), labels)
        ax.set_title(title)
        ax.set_xlabel("key")
        ax.grid(visible=False)
        ax.spines[:].set_visible(False)
    axes[0, 0].set_ylabel("query")
    return fig


@drawing
def next_tokens(pieces: list[str], probabilities: list[float], prompt: str):
    """The most probable next tokens as bars, the highest on top."""
    fig, ax = new_figure(size=(8, 3))
    names = [repr(piece) for piece in pieces]  # a token's leading space must be seen
    bars = ax.barh(names, probabilities, color=[COLORS["blue"]] + [COLORS["sky"]] * (len(names) - 1))
    ax.bar_label(bars, [f"{p:.3f}" for p in probabilities], padding=5)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, max(probabilities) * 1.15)
    ax.set_xlabel("probability")
    ax.set_title(f"After {prompt!r}")
    return fig


@drawing
def naive_step_times(rows: list[int], seconds: list[float]):
    """Time of each step of the naive loop against the rows it ran."""
    fig, ax = new_figure(size=(8, 4))
    ax.plot(rows, np.asarray(seconds) * 1000, "o", color=COLORS["naive"], markersize=5)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("rows run in the step (tokens of text)")
    ax.set_ylabel("time of the step (ms)")
    ax.set_title("Each step runs one row more than the step before")
    return fig


@drawing
def rows_filmstrip(pieces: list[str], prompt_length: int, steps: list[int]):
    """The sheets of rows that the given steps (1 is the first) run through the model, side by side.

    `pieces` are the tokens of prompt and answer as text. Rows seen in an earlier step are hatched.
    """
    fig, axes = new_figure(1, len(steps), size=(2.5 * len(steps), 4.8), sharey=True, squeeze=False)
    tallest = prompt_length + max(steps) - 1
    for ax, step in zip(axes[0], steps, strict=True):
        rows = prompt_length + step - 1
        for row in range(rows):
            again = step > 1 and row < rows - 1
            look = {"facecolor": AGAIN, "alpha": 0.45, "hatch": "//"} if again else {"facecolor": NEW}
            ax.add_patch(Rectangle((0, row + 0.06), 1, 0.88, edgecolor="white", linewidth=0, **look))
            text = pieces[row].strip() or repr(pieces[row])
            ax.text(0.5, row + 0.5, text, ha="center", va="center", color="black" if again else "white", fontsize=12)
        new = prompt_length if step == 1 else 1
        ax.set_title(f"step {step}: {rows} rows\n{new} new, {rows - new} again", fontsize=13)
        ax.text(0.5, rows + 0.5, f"makes {pieces[rows]!r}", ha="center", va="center", fontsize=12)
        ax.set(xlim=(0, 1), ylim=(tallest + 1, 0), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    return fig


@drawing
def rows_triangle(prompt_length: int, new_tokens: int, step: int):
    """All steps up to `step` as columns of rows: those a step runs for the first time, and those it runs again.
    The title counts: 1 + 2 + ... + n rows were run where n would do."""
    if not 1 <= step <= new_tokens:
        raise ValueError(f"step={step} must be from 1 to new_tokens={new_tokens}.")
    grid = row_grid(prompt_length, new_tokens, step)
    fig, ax = new_figure(size=(9, 5.2))
    mesh_edges = np.arange(new_tokens + 1) + 0.5, np.arange(len(grid) + 1) + 0.5
    colors = ListedColormap([NEW, AGAIN])
    ax.pcolormesh(*mesh_edges, np.ma.masked_invalid(grid), cmap=colors, vmin=0, vmax=1, edgecolors="w", linewidth=0.4)
    ax.set(xlim=(0.5, new_tokens + 0.5), ylim=(len(grid) + 0.5, 0.5), xlabel="step", ylabel="row: place in the text")
    ax.grid(visible=False)
    new, again = int((grid == 0).sum()), int((grid == 1).sum())
    handles = [Patch(color=NEW, label=f"first time: {new:,} rows"), Patch(color=AGAIN, label=f"again: {again:,} rows")]
    ax.legend(handles=handles, loc="lower left", frameon=True)
    ax.set_title(f"After step {step}: {new + again:,} rows run, {new:,} would do ({(new + again) / new:.1f} times)")
    return fig


def row_grid(prompt_length: int, new_tokens: int, step: int) -> np.ndarray:
    """`(rows, steps)`: 0 where a step runs a row for the first time, 1 where it runs it again, NaN where not at all."""
    grid = np.full((prompt_length + new_tokens - 1, new_tokens), np.nan)
    for column in range(step):
        rows = prompt_length + column
        grid[:rows, column] = 1
        grid[0 if column == 0 else rows - 1 : rows, column] = 0
    return grid


@drawing
def flops_by_length(lengths, parts: dict, crossing: int | None, context: int):
    """Operations of one forward pass by part, `{name: operations at each length}`; where attention overtakes."""
    fig, ax = new_figure(size=(8.5, 4.8))
    for name, counts in parts.items():
        ax.plot(lengths, np.asarray(counts) / 1e9, label=name, **PARTS[name] | {"marker": None})
    ax.axvline(context, color=COLORS["bound"], linewidth=1.5)
    place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points", "ha": "right"}
    ax.annotate(f"context ends\nat {context:,}", (context, 0.08), (-6, 0), **place)
    if crossing is not None:
        height = float(np.interp(crossing, lengths, np.asarray(parts["attention"]) / 1e9))
        ax.plot(crossing, height, "o", color=COLORS["black"])
        place = {"textcoords": "offset points", "ha": "right", "arrowprops": {"arrowstyle": "-"}}
        ax.annotate(f"equal at\n{crossing:,} tokens", (crossing, height), (-14, 34), **place)
    ax.set_xlim(0, max(*lengths, context) * 1.02)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens of text")
    ax.set_ylabel("operations of one step (GFLOP)")
    ax.set_title("Linear layers grow with n, attention with n x n")
    ax.legend(loc="center left")
    return fig


@drawing
def growth(lengths, totals: dict):
    """Counted work of a whole text on log scales, and its local exponent: the slope at each length."""
    fig, (left, right) = new_figure(1, 2, size=(12, 4.8))
    log_n = np.log(np.asarray(lengths, dtype=float))
    for name, counts in totals.items():
        look = PARTS[name] | {"marker": None}
        left.loglog(lengths, counts, label=name, **look)
        right.semilogx(lengths, np.gradient(np.log(np.asarray(counts, dtype=float)), log_n), label=name, **look)
    left.set(xlabel="tokens of text, n (log scale)", ylabel="operations for all n steps (log scale)")
    left.set_title("Work of writing n tokens")
    left.legend()
    for ax in (left, right):
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    right.set(xlabel="tokens of text, n (log scale)", ylabel="local exponent (slope on the left)", ylim=(0.8, 3.2))
    right.set_title("Its exponent")
    return fig


@drawing
def power_laws(series: dict, fit_from: float, ylabel: str, title: str):
    """Measured costs, `{name: (lengths, costs)}`, on log scales, with the power law fitted to lengths >= `fit_from`.
    The shaded lengths are too short to be fitted: fixed overhead hides the slope there. The line is drawn a little into
    them, from `fit_from / 8` on, to show how far the points lie above it."""
    fig, ax = new_figure(size=(8.5, 5))
    looks = [*PARTS.values()]
    for number, (name, (lengths, costs)) in enumerate(series.items()):
        look = PARTS.get(name, looks[number % len(looks)])
        x, y = np.asarray(lengths, dtype=float), np.asarray(costs, dtype=float)
        fitted = x >= fit_from
        exponent, factor = power_law(x[fitted], y[fitted])
        text = f"exponent {exponent:.2f}" if np.isfinite(exponent) else "no fit"
        ax.plot(x, y, look["marker"], color=look["color"], label=f"{name}: {text}")
        if np.isfinite(exponent):
            seen = x[x >= fit_from / 8]
            ax.plot(seen, factor * seen**exponent, look["linestyle"], color=look["color"], linewidth=1.6)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    shortest = min(min(lengths) for lengths, _ in series.values())
    if shortest < fit_from:
        ax.axvspan(shortest * 0.85, fit_from * 0.92, color="#000000", alpha=0.07, linewidth=0)
        ax.text(shortest * 0.9, 0.93, "not fitted", transform=ax.get_xaxis_transform())
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set_xlabel("tokens (log scale)")
    ax.set_ylabel(f"{ylabel} (log scale)")
    ax.set_title(title)
    fig.legend(loc="outside lower center", ncols=2)  # within the axes it would lie on the shortest texts or the longest
    return fig


@drawing
def doubling_ratios(lengths, counted: dict, measured: tuple):
    """Work for 2n tokens divided by work for n tokens: counted by part, and `measured = (lengths, ratios)`."""
    fig, ax = new_figure(size=(8.5, 4.8))
    for name, ratios in counted.items():
        ax.plot(lengths, ratios, label=f"{name}, counted", **PARTS[name] | {"marker": None})
    ax.plot(*measured, "o", color=COLORS["orange"], markeredgecolor="black", markersize=10, label="time, measured")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    top = max(8.6, *(1.1 * ratio for ratio in measured[1]))
    ax.set(ylim=(0, top), yticks=[2, 4, 6, 8])
    ax.set_xlabel("tokens of text, n (log scale)")
    ax.set_ylabel("work for 2n / work for n")
    ax.set_title("What doubling the text costs")
    ax.legend(loc="lower right")
    return fig
