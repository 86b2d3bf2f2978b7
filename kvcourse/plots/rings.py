"""Pictures of a window: as a mask, and as a ring of slots in which positions come round."""

from matplotlib.patches import Patch, Rectangle

from kvcourse.plots.base import COLORS, drawing, new_figure

SINK, HELD, NEW, GONE, AHEAD = COLORS["green"], COLORS["sky"], COLORS["orange"], "white", "#d9d9d9"
IN_A_ROW = 12  # tokens of the text


@drawing
def window_masks(masks: dict):
    """Attention masks side by side, `{title: (queries, keys) bool}`: colored where the query of that row sees the key
    of that column, with the number of keys that the last query sees."""
    fig, axes = new_figure(1, len(masks), size=(4.2 * len(masks), 5.2), squeeze=False)
    for ax, (title, mask) in zip(axes[0], masks.items(), strict=True):
        queries, keys = mask.shape
        for query in range(queries):
            for key in range(keys):
                ax.add_patch(_box(key, query, HELD if mask[query, key] else GONE, height=1.0))
        ax.set(xlim=(-0.6, keys - 0.4), ylim=(queries - 0.4, -0.6), aspect="equal", xlabel="position of the key")
        ax.set_xticks(range(0, keys, 3))
        ax.set_yticks(range(0, queries, 3))
        ax.grid(visible=False)
        ax.set_title(f"{title}\nthe last one sees {int(mask[-1].sum())}", fontsize=13)
    axes[0, 0].set_ylabel("position of the query")
    return fig


@drawing
def ring(pieces, slots, sinks: int = 0):
    """One moment of a ring buffer: the text above, what each slot holds below.

    `pieces` are the texts of all tokens, `slots` the position in each slot, -1 where it is empty. The first `sinks`
    slots are never written again.
    """
    newest = max(slots, default=-1)
    rows = -(-len(pieces) // IN_A_ROW)
    fig, (text, memory) = new_figure(2, 1, size=(11.5, 2.6 + 0.85 * rows), height_ratios=(rows, 1.7))
    for position, piece in enumerate(pieces):
        color = _color(position, newest, sinks, position in slots)
        row, column = divmod(position, IN_A_ROW)
        _token(text, column, row, f"{_short(piece)}\n{position}", color, faint=position not in slots)
    text.set(xlim=(-0.6, IN_A_ROW - 0.4), ylim=(rows - 0.4, -0.6))
    read = f"{newest + 1} token{'s' if newest else ''} read"
    text.set_title(f"The text: {read}, {sum(p >= 0 for p in slots)} of them kept")
    for slot, position in enumerate(slots):
        label = f"{_short(pieces[position])}\n{position}" if position >= 0 else "empty"
        color = _color(position, newest, sinks, True) if position >= 0 else GONE
        _token(memory, slot, 0, label, color, faint=position < 0)
        memory.text(slot, 0.62, f"slot {slot}", ha="center", va="top", fontsize=11)
    writes = newest + 1 if newest + 1 < sinks else sinks + (newest + 1 - sinks) % (len(slots) - sinks)
    memory.annotate("next", (writes, -0.5), (0, 16), textcoords="offset points", ha="center", arrowprops=ARROW)
    memory.set(xlim=(-0.6, max(len(slots), IN_A_ROW) - 0.4), ylim=(1.0, -1.05))
    memory.set_title("The ring")
    for ax in (text, memory):
        ax.axis("off")
    fig.legend(handles=_legend(sinks), loc="outside lower center", ncols=5)
    return fig


@drawing
def ring_history(history, sinks: int = 0):
    """A column for each token read, a row for each slot: the position that it holds. `history` is `[slots after 1
    token, after 2, ...]`, with -1 for an empty slot."""
    fig, ax = new_figure(size=(0.62 * len(history) + 1.6, 0.55 * len(history[0]) + 1.9))
    for column, slots in enumerate(history):
        newest = max(slots)
        for slot, position in enumerate(slots):
            color = _color(position, newest, sinks, True) if position >= 0 else GONE
            ax.add_patch(_box(column, slot, color))
            label = str(position) if position >= 0 else ""
            ax.text(column, slot, label, ha="center", va="center", weight="bold" if color == NEW else "normal")
    ax.set(xlim=(-0.6, len(history) - 0.4), ylim=(len(history[0]) - 0.4, -0.6))
    ax.set_xticks(range(len(history)), range(1, len(history) + 1))
    ax.set_yticks(range(len(history[0])), [f"slot {slot}" for slot in range(len(history[0]))])
    ax.set_xlabel("tokens read")
    ax.set_title("Which position lies in which slot")
    ax.grid(visible=False)
    fig.legend(handles=_legend(sinks)[: 3 if sinks else 2], loc="outside lower center", ncols=3)
    return fig


ARROW = {"arrowstyle": "->", "linewidth": 1.8}


def _color(position: int, newest: int, sinks: int, held: bool) -> str:
    if position > newest:
        return AHEAD
    if not held:
        return GONE
    return SINK if position < sinks else NEW if position == newest else HELD


def _legend(sinks: int) -> list:
    named = [(NEW, "newest"), (HELD, "kept")] + [(SINK, "kept for good (sink)")] * bool(sinks)
    named += [(GONE, "gone"), (AHEAD, "not read yet")]
    return [Patch(facecolor=color, edgecolor="#888888", label=label) for color, label in named]


def _token(ax, column: int, row: int, label: str, color: str, faint: bool) -> None:
    ax.add_patch(_box(column, row, color))
    ax.text(
        column,
        row,
        label,
        ha="center",
        va="center",
        fontsize=11,
        color="#777777" if faint else "black",
        parse_math=False,
    )


def _box(column: int, row: int, color: str, height: float = 0.84) -> Rectangle:
    return Rectangle((column - 0.5, row - height / 2), 1, height, facecolor=color, edgecolor="#888888")


def _short(piece: str) -> str:
    """At most 8 characters, with visible blanks."""
    visible = piece.replace(" ", "·").replace("\n", "↵")
    return visible if len(visible) <= 8 else visible[:7] + "…"
