"""The picture of `kvcourse bench`: who writes how fast, who answers how soon, and what it takes."""

from kvcourse.plots.base import COLORS, drawing, new_figure, plain_number

LOOKS = {  # a row keeps its color and its marker from picture to picture
    "naive": (COLORS["naive"], "s"),
    "dense": (COLORS["cached"], "o"),
    "transformers": (COLORS["orange"], "^"),
}
OTHERS = [(COLORS["green"], "D"), (COLORS["purple"], "v"), (COLORS["sky"], "P"), (COLORS["black"], "X")]


@drawing
def bench_rows(report: dict):
    """Decode speed against context with its range and the bound; time to the first token; peak memory.

    `report` is what `kvcourse bench` stores. Rows that could not be measured are named under the picture.
    """
    rows = [row for row in report["rows"] if row["error"] is None]
    looks = [LOOKS.get(row["title"]) or OTHERS[i % len(OTHERS)] for i, row in enumerate(rows)]
    fig, (speed, ttft, memory) = new_figure(1, 3, size=(14, 4.8), width_ratios=[2, 1, 1])
    draw_speed(speed, rows, looks)
    colors = [color for color, _ in looks]
    titles = [row["title"] for row in rows]
    waits = [row["ttft"]["median"] if row["ttft"] else None for row in rows]
    draw_bars(ttft, titles, waits, colors, "{:.3g} s")
    ttft.set_title(f"Time to first token\n({report['ttft_context'] or 512} prompt tokens)")
    draw_bars(memory, titles, [row["peak_bytes"] / 1e9 for row in rows], colors, "{:.2f} GB")
    memory.set_title("Peak memory")
    failed = [row["title"] for row in report["rows"] if row["error"] is not None]
    where = f"{report['model']} in {report['environment']['dtype']} on {report['environment']['device_name']}"
    said = "; ".join([where] + [f"{title} could not be measured" for title in failed])
    fig.supxlabel(said, fontsize=12, parse_math=False)
    return fig


def draw_speed(ax, rows: list[dict], looks: list[tuple]) -> None:
    for row, (color, marker) in zip(rows, looks, strict=True):
        contexts = [cell["context"] for cell in row["decode"]]
        speeds = [cell["tokens_per_second"] for cell in row["decode"]]
        middle = [speed["median"] for speed in speeds]
        below = [speed["median"] - speed["low"] for speed in speeds]
        above = [speed["high"] - speed["median"] for speed in speeds]
        ax.errorbar(contexts, middle, [below, above], color=color, marker=marker, capsize=4, label=row["title"])
    contexts = [cell["context"] for cell in rows[0]["decode"]]
    for i, bound in enumerate(dict.fromkeys(tuple(cell["bound"] for cell in row["decode"]) for row in rows)):
        # with a mark, for one point alone has no line
        look = dict(linestyle=":", marker="_", markersize=18, markeredgewidth=2, color=COLORS["bound"])
        ax.plot(contexts, bound, **look, label="_" * i + "bound: reading memory once")
    ax.set_xticks(contexts, [f"{context:,}" for context in contexts])
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(plain_number)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * (high / low) ** 0.3)  # room for the legend
    ax.legend(loc="upper right", ncols=2, fontsize=11)
    ax.set_xlabel("context (tokens)")
    ax.set_ylabel("tokens per second (log scale)")
    ax.set_title("Decode speed")


def draw_bars(ax, titles: list[str], values: list[float | None], colors: list[str], form: str) -> None:
    bars = ax.barh(titles, [value or 0 for value in values], color=colors, height=0.6)
    ax.bar_label(bars, ["not measured" if value is None else form.format(value) for value in values], padding=4)
    ax.set_xlim(0, 1.45 * max([value for value in values if value] or [1]))
    ax.set_xticks([])
    ax.grid(visible=False)
    ax.invert_yaxis()
