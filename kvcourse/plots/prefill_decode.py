"""Pictures of notebook 03: the two phases, who reads what, and what rows of every kind cost."""

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter, MaxNLocator

from kvcourse.plots.base import COLORS, LOOKS, drawing, new_figure, plain_number
from kvcourse.results import format_number

PREFILL, DECODE, BOUND = COLORS["prefill"], COLORS["decode"], COLORS["bound"]


@drawing
def phases(prompts, ttft, ttft_least, contexts, gaps, gaps_least, prefill_fit, gap_fit, fit_from=1):
    """Seconds of both phases with the least they could take: TTFT against the prompt (log scales), gap against the
    context. `prefill_fit` is (constant, per token, per token squared), drawn from `fit_from` tokens on, `gap_fit`
    (constant, per token)."""
    fig, (left, right) = new_figure(1, 2, size=(11, 5))
    line = np.geomspace(fit_from, prompts[-1], 100)
    fitted = np.polyval(prefill_fit[::-1], line)
    left.loglog(prompts, 1e3 * np.asarray(ttft), "o", color=PREFILL, markeredgecolor="black", label="measured")
    left.loglog(line[fitted > 0], 1e3 * fitted[fitted > 0], "-", color="black", linewidth=1.3, label="fit")
    left.loglog(prompts, 1e3 * np.asarray(ttft_least), "--", color=BOUND, label="least: operations / rate")
    left.set(xlabel="tokens of prompt (log scale)", ylabel="time to first token, ms (log scale)")
    left.set_title("Prefill")
    right.plot(contexts, 1e3 * np.asarray(gaps), "o", color=DECODE, markeredgecolor="black", label="measured")
    line = np.array([0, contexts[-1]])
    right.plot(line, 1e3 * np.polyval(gap_fit[::-1], line), "-", color="black", linewidth=1.3, label="fit")
    right.plot(contexts, 1e3 * np.asarray(gaps_least), "--", color=BOUND, label="least: bytes / bandwidth")
    right.set(xlabel="tokens held (context)", ylabel="gap to the next token, ms")
    right.set_ylim(0, 1.6e3 * max(*gaps, *gaps_least))
    right.set_title("Decode")
    left.yaxis.set_major_formatter(plain_number)
    for ax in (left, right):
        ax.xaxis.set_major_formatter(plain_number)
        ax.legend(loc="upper left")
    return fig


@drawing
def weights_or_cache(contexts, shares: dict, context_end: int, measured: dict):
    """Who reads what. Left: bytes of cache over bytes of weights, `shares` is `{batch: ratios at contexts}`. Right:
    time of a decode step, `measured` is `{batch: (contexts, seconds, constant, slope)}`, with the point where what
    grows with the context takes as long as the rest."""
    fig, (left, right) = new_figure(1, 2, size=(12, 5))
    contexts = np.asarray(contexts, dtype=float)
    for (batch, ratios), (color, _, dash) in zip(shares.items(), LOOKS, strict=False):
        ratios = np.asarray(ratios, dtype=float)
        left.plot(contexts, ratios, dash, color=color, label=_texts(batch))
        if ratios[-1] >= 1:
            meet = float(np.interp(1, ratios, contexts))
            left.plot(meet, 1, "o", color=color, markeredgecolor="black")
            left.annotate(f"{meet:,.0f}", (meet, 1), (7, -17), textcoords="offset points", color=color)
    left.axhline(1, color="black", linewidth=1.2)
    if context_end <= contexts[-1]:
        left.axvline(context_end, color=BOUND, linestyle=":", linewidth=1.8)
        place = {"xycoords": left.get_xaxis_transform(), "textcoords": "offset points", "va": "top"}
        left.annotate(f"context ends\nat {context_end:,}", (context_end, 0.97), (6, 0), **place)
    left.set(xlim=(0, contexts[-1]), ylim=(0, 2.2), xlabel="tokens held by each text")
    left.set_ylabel("bytes of cache / bytes of weights")
    left.set_title("Counted: bytes read in a step")
    left.legend(loc="lower right")
    longest = max(held[-1] for held, _, _, _ in measured.values())
    for (batch, (held, seconds, constant, slope)), look in zip(measured.items(), LOOKS[1:], strict=False):
        color, marker, dash = look
        right.plot(held, 1e3 * np.asarray(seconds), marker, color=color, markeredgecolor="black", label=_texts(batch))
        meet = constant / slope if slope > 0 and constant > 0 else np.inf
        seen = meet <= 2 * held[-1]
        line = np.array([0, max(held[-1], meet) if seen else held[-1]])
        right.plot(line, 1e3 * (constant + slope * line), dash, color=color, linewidth=1.6)
        right.plot(line, 1e3 * np.array([constant, constant]), ":", color=color, linewidth=1.4)
        if seen:
            right.plot(meet, 2e3 * constant, "D", color="black")
            beyond = "\n(extrapolated)" if meet > held[-1] else ""
            room = {"ha": "right", "xytext": (-8, 6)} if meet > 0.5 * longest else {"ha": "left", "xytext": (10, 4)}
            words = f"{meet:,.0f} tokens{beyond}"
            right.annotate(words, (meet, 2e3 * constant), textcoords="offset points", color=color, **room)
    right.set(xlabel="tokens held by each text", ylabel="time of a step, ms")
    right.set_xlim(left=0)
    right.set_ylim(0, 1.15 * right.get_ylim()[1])
    right.set_title("Measured: time of a step\n(diamond: twice the constant)")
    right.legend(loc="lower right")
    for ax in (left, right):
        ax.xaxis.set_major_formatter(plain_number)
    return fig


@drawing
def batched_steps(batches, seconds, least):
    """A decode step for several texts at once: its time, and the tokens a second that come out of it. `least` are the
    seconds that the roofline allows."""
    fig, (left, right) = new_figure(1, 2, size=(11, 5))
    batches, seconds, least = (np.asarray(values, dtype=float) for values in (batches, seconds, least))
    left.plot(batches, 1e3 * seconds, "o-", color=DECODE)
    left.plot(batches, 1e3 * least, "--", color=BOUND)
    left.set(ylabel="time of a step, ms", ylim=(0, 1.1e3 * max(seconds.max(), least.max())))
    left.set_title("One step")
    rate, most = batches / seconds, batches / least
    right.plot(batches, rate, "o-", color=DECODE, label="measured")
    right.plot(batches, most, "--", color=BOUND, label="roofline")
    free = "if a step took no longer than for one text"
    right.plot(batches, batches / seconds[0], ":", color="black", linewidth=1.5, label=free)
    right.set(ylabel="tokens a second, all texts", ylim=(0, 1.1 * max(rate.max(), most.max())))
    right.set_title("All texts together")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(batches, [f"{n:.0f}" for n in batches])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(plain_number)
        ax.set_xlabel("texts in the batch (log scale)")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


@drawing
def phase_map(prompts, answers, share, points: list, context_end: int):
    """Part of the time of an answer that goes to decode, `share` `(answers, prompts)` from 0 to 1, with the line where
    both phases take the same time. `points` are measured answers: `(prompt, answer, share)`."""
    fig, ax = new_figure(size=(9, 5.6))
    image = ax.pcolormesh(prompts, answers, share, vmin=0, vmax=1, shading="gouraud")
    if share.min() < 0.5 < share.max():
        ax.contour(prompts, answers, share, levels=[0.5], colors="white", linewidths=3)
    for prompt, answer, part in points:
        ax.plot(prompt, answer, "o", color="white", markeredgecolor="black", markersize=11)
        ax.annotate(
            f"{part:.0%}",
            (prompt, answer),
            (0, 10),
            textcoords="offset points",
            ha="center",
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )
    ax.set(xscale="log", yscale="log", xlim=(prompts[0], context_end), ylim=(answers[0], answers[-1]))
    ax.set_xlabel("tokens of prompt (log scale)")
    ax.set_ylabel("tokens of answer (log scale)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(plain_number)
        axis.set_minor_formatter(LogFormatter())  # labels only where the axis is short
    ax.grid(visible=False)
    ax.set_title("Which phase takes the time (white line: half and half)")
    bar = fig.colorbar(image, ax=ax, label="part of the time spent in decode")
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return fig


@drawing
def chunk_costs(chunks, totals, longest, least, step: float):
    """Prefill in pieces: time in all, the longest single pass (what another text has to wait), both against the size of
    a piece; `least` is what the roofline allows in all, `step` the time of an ordinary decode step."""
    fig, (left, right) = new_figure(1, 2, size=(11, 4.6))
    left.plot(chunks, 1e3 * np.asarray(totals), "s-", color=PREFILL, markeredgecolor="black", label="measured")
    left.plot(chunks, 1e3 * np.asarray(least), "--", color=BOUND, label="least: roofline")
    left.set(ylabel="time of the whole prefill, ms")
    left.set_title("What it costs")
    right.plot(chunks, 1e3 * np.asarray(longest), "o-", color=DECODE, label="longest single pass")
    right.axhline(1e3 * step, color="black", linestyle=":", linewidth=1.8, label="a decode step alone")
    right.set(ylabel="wait of another text, ms")
    right.set_title("What it buys")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(chunks, [f"{n:,}" for n in chunks])
        ax.minorticks_off()
        ax.set_ylim(0, 1.3 * ax.get_ylim()[1])
        ax.yaxis.set_major_formatter(plain_number)
        ax.set_xlabel("tokens in a piece (log scale)")
        ax.legend(loc="upper left")
    return fig


@drawing
def rows_alike(series: dict, rows, least):
    """Time of a pass against the rows it runs, wherever they come from: `series` is `{name: (rows, seconds)}`; `least`
    are the seconds that the roofline allows at `rows`."""
    fig, ax = new_figure(size=(9, 5.2))
    ax.loglog(rows, 1e3 * np.asarray(least), "--", color=BOUND, label="least: roofline")
    looks = zip((PREFILL, DECODE, COLORS["green"]), "so^", strict=True)
    for (name, (across, seconds)), (color, marker) in zip(series.items(), looks, strict=False):
        ax.loglog(
            across, 1e3 * np.asarray(seconds), marker, color=color, markeredgecolor="black", markersize=9, label=name
        )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(plain_number)
    ax.yaxis.set_major_formatter(plain_number)
    ax.set(xlabel="rows in the pass (log scale)", ylabel="time of the pass, ms (log scale)")
    ax.set_title("A row is a row")
    ax.legend(loc="upper left")
    return fig


@drawing
def guesses_kept(runs: dict):
    """Each pass of speculative decoding as a column: the model's own token, guesses that stood, guesses that fell.

    `runs` is `{title: [(guesses made, guesses that stood) for each pass]}`.
    """
    fig, axes = new_figure(len(runs), 1, size=(9, 2.6 * len(runs) + 0.6), squeeze=False, sharex=True)
    tallest = max(1 + made for passes in runs.values() for made, _ in passes)
    widest = max(len(passes) for passes in runs.values())
    for ax, (title, passes) in zip(axes[:, 0], runs.items(), strict=True):
        made, stood = (np.array(column) for column in zip(*passes, strict=True))
        x = np.arange(1, len(passes) + 1)
        ax.bar(x, 1, color=DECODE)
        ax.bar(x, stood, bottom=1, color=COLORS["green"], hatch="//", edgecolor="white")
        ax.bar(x, made - stood, bottom=1 + stood, color="white", edgecolor="#888888", hatch="xx")
        ax.set(xlim=(0.3, widest + 0.7), ylim=(0, tallest + 0.5), ylabel="tokens in\nthe pass")
        ax.grid(axis="x", visible=False)
        ax.set_title(f"{title}: {len(passes) + int(stood.sum())} tokens in {len(passes)} passes", fontsize=13)
    axes[-1, 0].set_xlabel("pass after the prefill")
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    handles = [
        Patch(facecolor=DECODE, label="the model's own token"),
        Patch(facecolor=COLORS["green"], hatch="//", edgecolor="white", label="guess that stands"),
        Patch(facecolor="white", hatch="xx", edgecolor="#888888", label="guess that falls"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


@drawing
def price_ratios(batches, ratios, lists: dict):
    """How many times as much an output token costs as an input token. Left: from the measured times, by batch; right:
    in published price lists, `{model: ratio}`. The band marks 4 to 5 times."""
    fig, (left, right) = new_figure(1, 2, size=(12.5, 5), width_ratios=(1, 1))
    left.axhspan(4, 5, color=COLORS["sky"], alpha=0.45, linewidth=0)
    left.plot(batches, ratios, "o-", color=DECODE)
    for batch, ratio in zip(batches, ratios, strict=True):
        left.annotate(format_number(float(f"{ratio:.2g}")), (batch, ratio), (6, 6), textcoords="offset points")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(batches, [f"{n}" for n in batches])
    left.minorticks_off()
    low, high = min(*ratios, 4) / 1.6, max(*ratios, 5) * 1.8
    ticks = [step * 10**power for power in range(-2, 5) for step in (1, 2, 5)]
    left.set_yticks([tick for tick in ticks if low <= tick <= high])
    left.set(xlim=(batches[0] / 1.2, batches[-1] * 1.7), ylim=(low, high))
    left.yaxis.set_major_formatter(plain_number)
    left.set(xlabel="texts in the batch (log scale)", ylabel="output / input (log scale)")
    left.set_title("Measured here (band: 4 to 5 times)")
    names = sorted(lists, key=lists.get, reverse=True)
    right.axvspan(4, 5, color=COLORS["sky"], alpha=0.45, linewidth=0)
    bars = right.barh(names, [lists[name] for name in names], color=COLORS["purple"], height=0.6)
    right.bar_label(bars, [f"{lists[name]:.1f}" for name in names], padding=4)
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    right.set_xlim(0, 1.15 * max(lists.values()))
    right.set_xlabel("output price / input price")
    right.set_title("Published")
    return fig


def _texts(batch: int) -> str:
    return f"{batch} text" + ("" if batch == 1 else "s")
