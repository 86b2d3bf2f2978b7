"""The picture of `kvcourse bench`: who writes how fast, who answers how soon, and what it takes."""

from matplotlib.ticker import LogLocator, NullFormatter

from kvcourse.plots.base import COLORS, drawing, new_figure, plain_number

MARKS = ((COLORS["sky"], "o"), (COLORS["blue"], "s"), (COLORS["black"], "D"))  # of each context
FEWEST = 3  # rows that the picture has room for at least


@drawing
def bench_rows(report: dict):
    """Decode speed at each context with its range and its bound; time to the first token; peak memory.

    `report` is what `kvcourse bench` stores. Rows that could not be measured are named under the picture.
    """
    rows = [row for row in report["rows"] if row["error"] is None]
    height = 2 + 0.55 * max(len(rows), FEWEST)
    fig, (speed, ttft, memory) = new_figure(1, 3, size=(14, height), width_ratios=[3, 1.2, 1.2], sharey=True)
    draw_speeds(speed, rows)
    waits = [row["ttft"]["median"] if row["ttft"] else None for row in rows]
    draw_bars(ttft, waits, COLORS["prefill"], "{:.3g} s")
    ttft.set_title(f"Time to first token\n({report['ttft_context'] or 512} prompt tokens)")
    peaks = [row["peak_bytes"] and row["peak_bytes"] / 1e9 for row in rows]
    draw_bars(memory, peaks, COLORS["green"], "{:.2f} GB")
    memory.set_title("Peak memory\n")
    speed.set_yticks(range(len(rows)), [label(row) for row in rows], parse_math=False)
    speed.set_ylim(len(rows) - 0.5, -0.5)
    failed = [row["title"] for row in report["rows"] if row["error"] is not None]
    where = f"{report['model']} in {report['environment']['dtype']} on {report['environment']['device_name']}"
    said = "; ".join([where] + [f"{title} could not be measured" for title in failed])
    fig.supxlabel(said, fontsize=12, parse_math=False)
    return fig


def bench_alt(report: dict) -> str:
    """The same in a sentence: what `show` takes beside the figure."""
    context = report["contexts"][min(1, len(report["contexts"]) - 1)]
    said = []
    for row in report["rows"]:
        cell = next((cell for cell in row["decode"] if cell["context"] == context), None)
        if row["error"] is None and cell:
            speed = cell["tokens_per_second"]["median"]
            said.append(f"{label(row)} {speed:.3g} tokens per second ({cell['share']:.0%} of its bound)")
    return f"Decode speed of each row, with a mark where its bound is. At a context of {context:,}: {'; '.join(said)}."


def label(row: dict) -> str:
    return row["title"] if row["texts"] == 1 else f"{row['title']} ({row['texts']} texts)"


def draw_speeds(ax, rows: list[dict]) -> None:
    """For each row and context the speed, and on a line to its right, or left, the bound."""
    contexts = [cell["context"] for cell in rows[0]["decode"]]
    for i, (context, (color, marker)) in enumerate(zip(contexts, MARKS, strict=False)):
        places = [y + 0.24 * (i - (len(contexts) - 1) / 2) for y in range(len(rows))]
        cells = [row["decode"][i] for row in rows]
        speeds, bounds = [cell["tokens_per_second"] for cell in cells], [cell["bound"] for cell in cells]
        middle = [speed["median"] for speed in speeds]
        ranges = [[s["median"] - s["low"] for s in speeds], [s["high"] - s["median"] for s in speeds]]
        ax.hlines(places, middle, bounds, color=COLORS["bound"], linewidth=1, alpha=0.6)
        look = dict(linestyle="", color=color, marker=marker, capsize=3)
        ax.errorbar(middle, places, xerr=ranges, label=f"context {context:,}", **look)
        look = dict(linestyle="", marker="|", markersize=11, markeredgewidth=2.5, color=COLORS["vermillion"])
        ax.plot(bounds, places, **look, label="_" * i + "bound: reading memory once")
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    ax.xaxis.set_major_formatter(plain_number)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("tokens per second (log scale)")
    ax.set_title("Decode speed\n")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(contexts) + 1, fontsize=10.5)


def draw_bars(ax, values: list[float | None], color: str, form: str) -> None:
    bars = ax.barh(range(len(values)), [value or 0 for value in values], color=color, height=0.6)
    ax.bar_label(bars, ["not measured" if value is None else form.format(value) for value in values], padding=4)
    ax.set_xlim(0, 1.55 * max([value for value in values if value] or [1]))
    ax.set_xticks([])
    ax.tick_params(left=False)
    ax.grid(visible=False)
