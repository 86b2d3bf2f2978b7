"""Pictures of notebook 07: what a chat sends, what of it is found, what is evicted, and what it all costs."""

from itertools import groupby

import numpy as np
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from kvcourse.plots.base import COLORS, LOOKS, drawing, new_figure, plain_number
from kvcourse.results import format_number

FOUND, COMPUTED, OUTPUT = COLORS["green"], COLORS["prefill"], COLORS["decode"]
KEPT, NOT_KEPT = COLORS["sky"], "white"
SHARED = "#d0d0d0"  # what belongs to no chat alone
IN_A_ROW = 16  # tokens of a text
CHATS = [COLORS[name] for name in ("sky", "yellow", "purple", "orange", "green", "vermillion")]


@drawing
def chat_prompts(earlier, new):
    """The prompt of each turn of a chat, in tokens: what an earlier turn has sent or been answered, and what is new."""
    turns = np.arange(1, len(earlier) + 1)
    fig, ax = new_figure(size=(8, 4.4))
    ax.bar(turns, earlier, color=COLORS["sky"], width=0.7, label="was there a turn before")
    ax.bar(turns, new, bottom=earlier, color=COMPUTED, hatch="//", edgecolor="white", width=0.7, label="new")
    for turn, total in zip(turns, np.add(earlier, new), strict=True):
        ax.annotate(f"{total:,}", (turn, total), (0, 4), textcoords="offset points", ha="center", fontsize=11)
    ax.set(xlabel="turn", ylabel="tokens of prompt", ylim=(0, 1.15 * max(np.add(earlier, new))))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x", visible=False)
    ax.set_title("What each turn sends")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@drawing
def prefix_match(known, prompt, kept: int, found: int, block_size: int):
    """Two texts cut into blocks: the one that is known above, a prompt that is looked up below.

    `known` and `prompt` are the texts of their tokens. The first `kept` tokens of the known text lie in full blocks;
    the first `found` tokens of the prompt need not be computed. The first token in which the two differ has a thick
    frame.
    """
    pairs = zip(known, prompt, strict=False)
    differs = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    rows = [-(-len(text) // IN_A_ROW) for text in (known, prompt)]
    fig, axes = new_figure(2, 1, size=(12.5, 1.9 + 0.62 * sum(rows)), height_ratios=rows)
    _blocks(axes[0], known, kept, KEPT, NOT_KEPT, block_size, None)
    _blocks(axes[1], prompt, found, FOUND, COMPUTED, block_size, differs)
    axes[0].set_title(f"Known: {kept} of {len(known)} tokens lie in full blocks of {block_size}")
    axes[1].set_title(f"Prompt: {found} of {len(prompt)} tokens found, {len(prompt) - found} to compute")
    named = {"kept": KEPT, "block not full, not kept": NOT_KEPT, "found": FOUND, "computed": COMPUTED}
    handles = [Patch(facecolor=color, edgecolor="#888888", label=name) for name, color in named.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=4)
    return fig


def _blocks(ax, pieces, marked: int, color: str, other: str, block_size: int, framed: int | None) -> None:
    """Tokens in rows, the first `marked` in `color`, with a wide gap between blocks and a frame around one token."""
    for i, piece in enumerate(pieces):
        row, column = divmod(i, IN_A_ROW)
        first, last = i % block_size == 0, i % block_size == block_size - 1
        left, right = column - 0.5 + 0.09 * first, column + 0.5 - 0.09 * last
        edge, width = ("black", 3) if i == framed else ("#888888", 0.8)
        face = color if i < marked else other
        box = {"facecolor": face, "edgecolor": edge, "linewidth": width, "zorder": 3 if i == framed else 2}
        ax.add_patch(Rectangle((left, row - 0.4), right - left, 0.8, **box))
        ax.text(column, row, _short(piece), ha="center", va="center", fontsize=10, parse_math=False, zorder=4)
    rows = -(-len(pieces) // IN_A_ROW)
    ax.set(xlim=(-0.6, IN_A_ROW - 0.4), ylim=(rows - 0.5, -0.5))
    ax.axis("off")


def _short(piece: str) -> str:
    """At most 8 characters, with visible blanks."""
    visible = piece.replace(" ", "·").replace("\n", "↵")
    return visible if len(visible) <= 8 else visible[:7] + "…"


@drawing
def turns_with_and_without(found, computed, ttft: dict):
    """Left, for each turn of a chat: tokens of the prompt that were found and that had to be computed. Right: time to
    first token, `{name: seconds of each turn}`."""
    turns = np.arange(1, len(found) + 1)
    fig, (left, right) = new_figure(1, 2, size=(10, 4.8))
    left.bar(turns, computed, color=COMPUTED, hatch="//", edgecolor="white", width=0.7, label="computed")
    left.bar(turns, found, bottom=computed, color=FOUND, width=0.7, label="found")
    for turn, tokens, total in zip(turns, computed, np.add(found, computed), strict=True):
        words = f"{tokens:,}\nof {total:,}"
        left.annotate(words, (turn, total), (0, 3), textcoords="offset points", ha="center", fontsize=11)
    left.set(xlabel="turn", ylabel="tokens of prompt")
    left.set_title("With prefix caching: computed of all")
    left.legend(loc="upper left")
    for (name, seconds), (color, marker, dash) in zip(ttft.items(), LOOKS[1::-1], strict=False):
        right.plot(turns, 1e3 * np.asarray(seconds), dash, marker=marker, color=color, label=name)
    right.set(xlabel="turn", ylabel="ms", ylim=(0, 1.25e3 * max(map(max, ttft.values()))))
    right.yaxis.set_major_formatter(plain_number)
    right.set_title("Time to first token")
    right.legend(loc="upper left")
    left.set_ylim(0, 1.5 * max(np.add(found, computed)))
    for ax in (left, right):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(axis="x", visible=False)
    return fig


@drawing
def found_by_change(places, found: dict, length: int):
    """How many tokens of a prompt of `length` are found, against the place of the one token that is another than in the
    known text: `{name: tokens found for each place}`."""
    fig, ax = new_figure(size=(9, 4.8))
    ax.plot(places, places, color="#bbbbbb", linewidth=6, label="what the two texts share")
    for (name, tokens), (color, _, dash) in zip(found.items(), LOOKS, strict=False):
        ax.plot(places, tokens, dash, color=color, drawstyle="steps-post", label=name)
    ax.set(xlabel="place of the changed token", ylabel="tokens found", xlim=(0, length), ylim=(0, length))
    ax.set_title(f"One token of {length} is changed")
    ax.legend(loc="upper left")
    return fig


@drawing
def pool_history(columns, found, titles):
    """What each place of a pool holds, a column for each request served.

    `columns` is `[after the first request, ...]`, each a list with an entry for every place: None where it holds
    nothing, `(number of the chat, number of the block in its text)`, or, grey, the name of a block that all share.
    `found` has for each request the places where it found something (framed), `titles` what is written below it.
    """
    places = len(columns[0])
    fig, ax = new_figure(size=(1.9 + 0.72 * len(columns), 1.9 + 0.42 * places))
    for x, (column, hits) in enumerate(zip(columns, found, strict=True)):
        for place, content in enumerate(column):
            face, label = _held(content)
            edge, width = ("black", 2.6) if place in hits else ("#888888", 0.6)
            box = {"facecolor": face, "edgecolor": edge, "linewidth": width, "zorder": 3 if place in hits else 2}
            ax.add_patch(Rectangle((x - 0.44, place - 0.42), 0.88, 0.84, **box))
            ax.text(x, place, label, ha="center", va="center", fontsize=11, zorder=4)
    ax.set(xlim=(-0.6, len(columns) - 0.4), ylim=(places - 0.4, -0.6), xlabel="request")
    ax.set_xticks(range(len(columns)), titles)
    ax.set_yticks(range(places), [f"place {place}" for place in range(places)], fontsize=10)
    ax.grid(visible=False)
    ax.set_title("What the pool holds (framed: found)")
    return fig


def _held(content) -> tuple[str, str]:
    """Color and label of what a place holds."""
    if content is None:
        return "white", ""
    if isinstance(content, str):
        return SHARED, content
    chat, block = content
    return CHATS[chat % len(CHATS)], f"{chat_name(chat)}{block}"


def chat_name(number: int) -> str:
    """A, B, C, ..."""
    return chr(ord("A") + number)


@drawing
def shared_blocks(texts):
    """Texts as rows of blocks, where a block that several texts share is drawn once, over all their rows.

    `texts` is a list of lists of keys, one key for each block; the same key in the same column is the same block. Texts
    that share blocks must stand next to each other.
    """
    longest = max(map(len, texts))
    fig, ax = new_figure(size=(1.2 + 0.62 * longest, 1.7 + 0.5 * len(texts)))
    for column in range(longest):
        rows = [(text[column] if column < len(text) else None, row) for row, text in enumerate(texts)]
        for key, group in groupby(rows, key=lambda pair: pair[0]):
            rows_of = [row for _, row in group]
            if key is None:
                continue
            many = len(rows_of) > 1
            face = FOUND if many else COMPUTED
            box = {"facecolor": face, "edgecolor": "white", "linewidth": 1.5, "hatch": None if many else "//"}
            ax.add_patch(Rectangle((column - 0.47, rows_of[0] - 0.44), 0.94, len(rows_of) - 0.12, **box))
            if many:
                ax.text(column, (rows_of[0] + rows_of[-1]) / 2, f"{len(rows_of)}x", ha="center", va="center")
    ax.set(xlim=(-0.7, longest - 0.3), ylim=(len(texts) - 0.4, -0.6), xlabel="block of the text")
    ax.set_yticks(range(len(texts)), [f"text {row + 1}" for row in range(len(texts))])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(visible=False)
    ax.set_title("One memory for what is the same")
    named = (("shared", FOUND, None), ("of one text alone", COMPUTED, "//"))
    handles = [Patch(facecolor=color, hatch=hatch, edgecolor="white", label=name) for name, color, hatch in named]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


@drawing
def hit_rate_by_pool(sizes, shares: dict, needed: int):
    """Share of the prompts' tokens that is found, against the blocks of the pool: `{name: share for each size}`. A line
    marks the `needed` blocks that hold everything."""
    fig, ax = new_figure(size=(9, 4.8))
    for (name, values), (color, marker, dash) in zip(shares.items(), LOOKS, strict=False):
        ax.plot(sizes, values, dash, marker=marker, color=color, label=name)
    ax.axvline(needed, color=COLORS["bound"], linestyle=":", linewidth=1.8)
    place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points", "ha": "right", "fontsize": 11}
    ax.annotate("room for everything", (needed, 0.04), (-5, 0), **place)
    ax.set(xlabel="blocks in the pool", ylabel="tokens found", ylim=(-0.03, 1.03))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_title("Too little memory")
    ax.legend(loc="upper left")
    return fig


@drawing
def found_or_computed(lengths, computed, found):
    """Seconds to first token of prompts of these lengths: all of it computed, or all but the last tokens found."""
    fig, ax = new_figure(size=(9, 4.6))
    for name, seconds, (color, marker, dash) in (
        ("computed", computed, LOOKS[1]),
        ("found, but for the last tokens", found, LOOKS[0]),
    ):
        ax.plot(lengths, 1e3 * np.asarray(seconds), dash, marker=marker, color=color, label=name)
        text = f"{format_number(1e3 * float(seconds[-1]))} ms"
        ax.annotate(text, (lengths[-1], 1e3 * seconds[-1]), (0, 8), textcoords="offset points", ha="right")
    ax.set(xlabel="tokens of prompt", ylabel="time to first token, ms", ylim=(0, 1.2e3 * max(*computed, *found)))
    ax.xaxis.set_major_formatter(plain_number)
    ax.yaxis.set_major_formatter(plain_number)
    ax.set_title("What a token costs that is found")
    ax.legend(loc="upper left")
    return fig


@drawing
def bills(invoices: dict):
    """The bill of one trace by several price lists, `{price list: {"without": parts, "with": parts}}`, where parts are
    (uncached input, cached input, output) in one currency. Each list's bill without caching is 100%."""
    rows = [(name, kind, parts) for name, both in invoices.items() for kind, parts in both.items()]
    fig, ax = new_figure(size=(11, 1.8 + 0.46 * len(rows)))
    at, labels = [], []
    for row, (name, kind, parts) in enumerate(rows):
        y = row + 0.5 * (row // 2)
        whole, left = sum(invoices[name]["without"]), 0.0
        for part, (color, hatch) in zip(parts, ((COMPUTED, "//"), (FOUND, None), (OUTPUT, "..")), strict=True):
            ax.barh(y, part / whole, left=left, color=color, hatch=hatch, edgecolor="white", height=0.8)
            left += part / whole
        ax.annotate(f"{left:.0%}", (left, y), (5, 0), textcoords="offset points", va="center")
        at.append(y)
        labels.append(f"{name}, {kind}" if kind == "without" else kind)
    ax.set_yticks(at, labels)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.grid(axis="y", visible=False)
    ax.set_title("The bill, with and without prefix caching")
    named = (("uncached input", COMPUTED, "//"), ("cached input", FOUND, None), ("output", OUTPUT, ".."))
    handles = [Patch(facecolor=color, hatch=hatch, edgecolor="white", label=name) for name, color, hatch in named]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


@drawing
def chat_growth(turns, tokens: dict, dollars: dict, measured: dict):
    """What a chat of so many turns takes, with and without prefix caching: tokens of prompt computed in all (left, with
    what was `measured` up to each turn as points), and dollars in all, answers included (right). All are
    `{name: values}`, with the same names."""
    fig, (left, right) = new_figure(1, 2, size=(11.5, 4.8))
    for (name, values), (color, marker, dash) in zip(tokens.items(), LOOKS[1::-1], strict=False):
        left.plot(turns, values, dash, color=color, label=name)
        points = measured[name]
        left.plot(range(1, len(points) + 1), points, marker, color=color, label=f"{name}, measured")
        right.plot(turns, dollars[name], dash, color=color, label=name)
        place = {"textcoords": "offset points", "ha": "right"}
        left.annotate(f"{format_number(int(values[-1]))}", (turns[-1], values[-1]), (0, 6), **place)
        right.annotate(f"${format_number(float(dollars[name][-1]))}", (turns[-1], dollars[name][-1]), (0, 6), **place)
    left.set(xlabel="turns", ylabel="tokens computed", ylim=(0, 1.12 * max(map(max, tokens.values()))))
    left.yaxis.set_major_formatter(plain_number)
    left.set_title("Tokens of prompt computed")
    left.legend(loc="upper left")
    right.set(xlabel="turns", ylabel="dollars", ylim=(0, 1.12 * max(map(max, dollars.values()))))
    right.set_title("The bill, answers included")
    right.legend(loc="upper left")
    return fig
