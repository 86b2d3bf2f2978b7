"""Pictures of notebook 10: where time goes, what each change gains, other engines, very long texts, the verdicts."""

import textwrap

import numpy as np
from matplotlib.patches import Patch, Rectangle

from kvcourse.plots.base import COLORS, LOOKS, drawing, new_figure, plain_number
from kvcourse.results import VERDICTS, format_number

PARTS = {  # color and hatch of each part of a step
    "weights": (COLORS["blue"], ""),
    "linear layers": (COLORS["blue"], ""),
    "cache": (COLORS["green"], "//"),
    "attention": (COLORS["green"], "//"),
    "small operations": (COLORS["yellow"], ".."),
    "Python between them": (COLORS["vermillion"], "xx"),
    "overhead": (COLORS["vermillion"], "xx"),
}
BOARD = {  # color and sign of each verdict
    "holds": (COLORS["green"], "="),
    "holds with a condition": (COLORS["yellow"], "if"),
    "wrong as said": (COLORS["vermillion"], "no"),
    None: ("white", ""),
}


@drawing
def time_apart(rows: dict, title: str):
    """One bar for each row, `{name: {part: seconds}}`, cut into its parts, with its length in ms behind it. The parts
    add up to the length. Where one is below zero, the others are cut off there, so no bar is longer than its sum; what
    is cut off has a dashed outline, and the text behind it says how long the row would be with it."""
    fig, ax = new_figure(size=(9.5, 1.9 + 0.55 * len(rows)))
    longest = max(sum(max(0.0, seconds) for seconds in parts.values()) for parts in rows.values())
    for row, parts in enumerate(rows.values()):
        left, length = 0.0, sum(parts.values())
        expected = sum(max(0.0, seconds) for seconds in parts.values())
        for part, (color, hatch) in PARTS.items():  # in one order in all rows
            seconds = max(0.0, min(parts.get(part, 0.0), length - left))
            ax.barh(row, 1e3 * seconds, left=1e3 * left, color=color, hatch=hatch, edgecolor="white", height=0.62)
            left += seconds
        said = f"{1e3 * length:.3g} ms"
        if expected > length:
            outline = dict(facecolor="none", edgecolor="black", linestyle="--", height=0.62)
            ax.barh(row, 1e3 * (expected - length), left=1e3 * length, **outline)
            said += f", not {1e3 * expected:.3g}:\nfaster than the ceiling"
        ax.annotate(said, (1e3 * expected, row), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(rows)), rows)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="ms", xlim=(0, 1.18e3 * longest))
    ax.set_title(title)
    named = {}  # two names may stand for one look: reading the weights is what linear layers do
    for part, look in PARTS.items():
        if any(part in parts for parts in rows.values()):
            named.setdefault(look, []).append(part)
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=", ".join(names))
        for (color, hatch), names in named.items()
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3 if len(handles) == 3 else 2)
    return fig


@drawing
def speed_ladder(rungs: list):
    """Tokens a second of each rung, `(name, tokens a second, bound, change of perplexity or None)`, with a mark at the
    bound of its bytes; beside it the share of the bound and, where there is one, the change of quality."""
    fig, ax = new_figure(size=(10, 2.1 + 0.6 * len(rungs)))
    reach = max(max(speed, bound) for _, speed, bound, _ in rungs)
    for row, (_, speed, bound, change) in enumerate(rungs):
        ax.barh(row, speed, color=COLORS["measured"], height=0.6)
        ax.plot([bound, bound], [row - 0.42, row + 0.42], "-", color=COLORS["black"], linewidth=3)
        quality = "" if change is None else f", perplexity {100 * change:+.1f}%"
        ax.text(1.05 * reach, row, f"{speed:.0f} ({speed / bound:.0%}){quality}", va="center")
    ax.text(1.05 * reach, -0.75, "tokens/s (share of the bound)", va="center", fontsize=11)
    ax.set_yticks(range(len(rungs)), [name for name, *_ in rungs])
    ax.set_ylim(len(rungs) - 0.5, -1.05)
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="tokens a second, one text", xlim=(0, 1.65 * reach))
    ax.set_title("From the plain step to the fast one")
    measured = Patch(facecolor=COLORS["measured"], label="measured")
    mark = ax.plot([], [], "-", color=COLORS["black"], linewidth=3, label="bound: bandwidth / bytes")[0]
    fig.legend(handles=[measured, mark], loc="outside lower center", ncols=2)
    return fig


@drawing
def users_at_once(speeds: dict, users: int):
    """Output tokens a second of each program, `{name: (with one user, with several at once or None)}`."""
    fig, ax = new_figure(size=(9.5, 1.9 + 0.75 * len(speeds)))
    for row, (one, several) in enumerate(speeds.values()):
        ax.barh(row - 0.2, one, height=0.38, color=COLORS["sky"])
        ax.annotate(f"{one:.0f}", (one, row - 0.2), (5, 0), textcoords="offset points", va="center", fontsize=11)
        said = "one at a time" if several is None else f"{several:.0f}"
        ax.barh(row + 0.2, several or 0, height=0.38, color=COLORS["blue"], hatch="//", edgecolor="white")
        ax.annotate(said, (several or 0, row + 0.2), (5, 0), textcoords="offset points", va="center", fontsize=11)
    ax.set_yticks(range(len(speeds)), speeds)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="output tokens a second", xlim=(0, 1.15 * max(max(one, some or 0) for one, some in speeds.values())))
    ax.set_title("What several users at once gain")
    handles = [
        Patch(facecolor=COLORS["sky"], label="one user"),
        Patch(facecolor=COLORS["blue"], hatch="//", edgecolor="white", label=f"{users} at once, together"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


@drawing
def known_beginnings(waits: dict):
    """TTFT of prompts whose beginning is new and of those whose beginning is known: `{program: {"new": s, "known":
    s}}`."""
    places = np.arange(len(waits))
    fig, ax = new_figure(size=(8, 4.4))
    looks = {"new": (COLORS["prefill"], "//"), "known": (COLORS["green"], "")}
    for shift, (kind, (color, hatch)) in zip((-0.2, 0.2), looks.items(), strict=True):
        heights = [1e3 * seconds[kind] for seconds in waits.values()]
        ax.bar(places + shift, heights, 0.38, color=color, hatch=hatch, edgecolor="white", label=f"{kind} beginning")
        for place, height in zip(places, heights, strict=True):
            label = f"{height:,.0f} ms" if height >= 10 else f"{height:.1f} ms"
            ax.annotate(label, (place + shift, height), (0, 4), textcoords="offset points", ha="center")
    ax.set_xticks(places, waits)
    ax.grid(axis="x", visible=False)
    ax.set(ylabel="time to first token, ms", ylim=(0, 1.15e3 * max(max(s.values()) for s in waits.values())))
    ax.set_xlim(-0.7, len(waits) - 0.3)
    ax.set_title("A prefix cache, seen from outside")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@drawing
def very_long_text(costs: dict, memory: float, chosen: int | None = None):
    """What one text costs by its length, `{tokens: LongContext}`: bytes held, beside the `memory` of one device;
    seconds of a prefill and of a decode step by what they are for. A dotted line marks the length `chosen`."""
    tokens, texts = list(costs), list(costs.values())
    fig, (held, prefill, decode) = new_figure(3, 1, size=(9, 10.5), sharex=True)
    lines = {
        held: {
            "cache": [text.cache_bytes / 1e9 for text in texts],
            "weights": [text.weight_bytes / 1e9 for text in texts],
        },
        prefill: {
            "attention": [text.prefill.attention_seconds for text in texts],
            "other operations": [text.prefill.other_seconds for text in texts],
            "memory": [text.prefill.memory_seconds for text in texts],
        },
        decode: {
            "cache, reading": [text.decode.cache_seconds for text in texts],
            "weights, reading": [text.decode.weight_seconds for text in texts],
            "all operations": [text.decode.compute_seconds for text in texts],
        },
    }
    titles = {held: "Held, GB (log scale)", prefill: "Prefill, seconds (log scale)"}
    titles |= {decode: "A decode step, seconds (log scale)"}
    for ax, series in lines.items():
        for (name, values), (color, marker, dash) in zip(series.items(), LOOKS, strict=False):
            ax.plot(tokens, values, dash, color=color, marker=marker, markersize=4, label=name)
        ax.set(xscale="log", yscale="log")
        ax.xaxis.set_major_formatter(plain_number)
        ax.yaxis.set_major_formatter(plain_number)
        ax.set_title(titles[ax])
        if chosen is not None:
            ax.axvline(chosen, color="black", linestyle=":", linewidth=1.5)
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    decode.set_xlabel("tokens of text (log scale)")
    # A wide band behind the lines: the weights may be as large as the device.
    held.axhline(memory / 1e9, color=COLORS["bound"], linewidth=9, alpha=0.45, zorder=1)
    held.annotate(
        f"one device, {memory / 1e9:.0f} GB",
        (tokens[0], memory / 1e9),
        (0, -19),
        textcoords="offset points",
    )
    return fig


@drawing
def price_by_length(lengths, prices: dict):
    """Dollars for a million tokens against the tokens that stand before them: `{name: prices}`."""
    fig, ax = new_figure(size=(8.5, 4.6))
    for (name, dollars), color, (_, marker, dash) in zip(
        prices.items(), (COLORS["naive"], COLORS["cached"]), LOOKS[1::-1], strict=True
    ):
        ax.plot(lengths, dollars, dash, marker=marker, color=color, label=name)
        for length, each in zip(lengths, dollars, strict=True):
            label = f"${format_number(float(f'{each:.3g}'))}"
            ax.annotate(label, (length, each), (0, 9), textcoords="offset points", ha="center", fontsize=11)
    ax.set(xscale="log", yscale="log", xlabel="tokens of text before", ylabel="dollars for a million tokens")
    ax.set(xlim=(lengths[0] / 1.4, lengths[-1] * 1.4), ylim=(min(map(min, prices.values())) / 1.6, None))
    ax.set_ylim(top=2.2 * max(map(max, prices.values())))
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(plain_number)
    ax.set_title("The price of a token, with a cache and without")
    ax.legend(loc="upper left")
    return fig


@drawing
def verdict_board(verdicts: dict):
    """One field for each statement, `{number: verdict, or None where it was not measured}`."""
    columns = 10
    rows = -(-len(verdicts) // columns)
    fig, ax = new_figure(size=(11, 1.4 + 0.95 * rows))
    for place, (number, verdict) in enumerate(verdicts.items()):
        row, column = divmod(place, columns)
        color, sign = BOARD[verdict]
        ax.add_patch(Rectangle((column - 0.46, row - 0.44), 0.92, 0.88, facecolor=color, edgecolor="#888888"))
        ax.text(column, row - 0.12, str(number), ha="center", va="center", fontsize=14)
        ax.text(column, row + 0.24, sign, ha="center", va="center", fontsize=11)
    ax.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6))
    ax.axis("off")
    ax.set_title("The statements, and what this machine says")
    named = {verdict: f"{BOARD[verdict][1]}  {verdict}" for verdict in VERDICTS} | {None: "not measured here"}
    handles = [Patch(facecolor=BOARD[v][0], edgecolor="#888888", label=textwrap.fill(n, 40)) for v, n in named.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig
