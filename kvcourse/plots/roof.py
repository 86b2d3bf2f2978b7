"""The roofline of this machine, with pieces of work under it."""

import numpy as np

from kvcourse.plots.base import COLORS, drawing, new_figure, plain_number
from kvcourse.results import format_number


@drawing
def roofline_chart(ceilings, measured: dict, chosen: dict | None = None):
    """The two ceilings, and pieces of work under them.

    `measured` is `{label: (operations per byte, operations a second)}`: a label that begins with "prefill" is drawn as
    prefill, others as decode. `chosen` has the same form; its points are drawn large, with a line down to the axis, and
    their labels are the title.
    """
    chosen = chosen or {}
    fig, ax = new_figure(size=(9.5, 5.4))
    points = [*measured.values(), *chosen.values()]
    low = min([0.25, *(x for x, _ in points)]) / 1.5
    high = max([8 * ceilings.ridge, *(x for x, _ in points)]) * 2
    x = np.geomspace(low, high, 200)
    roof = np.minimum(ceilings.flops_per_second, x * ceilings.bytes_per_second)
    ax.loglog(x, roof / 1e9, color="black", linewidth=2.5)
    ridge = ceilings.ridge
    ax.axvspan(low, ridge, color=COLORS["decode"], alpha=0.08, linewidth=0)
    ax.axvspan(ridge, high, color=COLORS["prefill"], alpha=0.10, linewidth=0)
    top = ceilings.flops_per_second / 1e9
    place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
    ax.annotate("memory sets the limit", (ridge, 0.02), (-8, 4), ha="right", **place)
    ax.annotate("arithmetic sets the limit", (ridge, 0.02), (8, 4), **place)
    ax.annotate(
        f"ridge: {format_number(ridge)} operations per byte",
        (ridge, top),
        (0, 10),
        textcoords="offset points",
        ha="center",
    )
    for label, (across, up) in measured.items():
        # Decode is named below to the right, prefill below to the left: under the roof, and apart from each other.
        if label.startswith("prefill"):
            color, marker, place = COLORS["prefill"], "s", {"xytext": (-9, -14), "ha": "right"}
        else:
            color, marker, place = COLORS["decode"], "o", {"xytext": (9, -14), "ha": "left"}
        ax.plot(across, up / 1e9, marker, color=color, markeredgecolor="black", markersize=9)
        ax.annotate(label, (across, up / 1e9), textcoords="offset points", fontsize=12, **place)
    for across, up in chosen.values():
        ax.plot([across, across], [1e-9, up / 1e9], ":", color="black", linewidth=1.5)
        ax.plot(across, up / 1e9, "D", color=COLORS["green"], markeredgecolor="black", markersize=12)
    lowest = min([float(roof[0]), *(up for _, up in points)]) / 1e9
    ax.set(xlim=(low, high), ylim=(lowest / 2, top * 2.2))
    ax.xaxis.set_major_formatter(plain_number)
    ax.yaxis.set_major_formatter(plain_number)
    ax.set(xlabel="operations per byte (log scale)", ylabel="billion operations a second (log scale)")
    ax.set_title("; ".join(chosen) or f"Roofline of this machine ({ceilings.device}, {ceilings.dtype})", pad=22)
    return fig
