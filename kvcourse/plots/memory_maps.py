"""Pictures of memory in pages: a text and where its blocks lie, who holds which block, and addresses over time."""

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import ConnectionPatch, Patch, Rectangle

from kvcourse.plots.base import COLORS, drawing, new_figure

TEXTS = [COLORS[name] for name in ("blue", "orange", "green", "vermillion", "purple", "sky", "yellow", "black")]
HATCHES = ("", "//", "..", "xx")  # tell texts apart where the colors begin again
FREE, KEPT, FRAME = "white", "#d9d9d9", "#888888"
CELLS_IN_A_ROW = 16  # tokens or slots of `block_table`


@drawing
def block_table(pieces, table, block_size: int, num_blocks: int):
    """A text in logical blocks above, the pool below, and which block of the pool each one is.

    `pieces` are the texts of the tokens, `table` the number of the block in the pool for each logical block.
    """
    text_rows, pool_rows = _rows(len(table), block_size), _rows(num_blocks, block_size)
    size = (11.5, 1.1 + 0.95 * (text_rows + pool_rows))
    fig, (above, below) = new_figure(2, 1, size=size, height_ratios=(text_rows, pool_rows))
    for logical, block in enumerate(table):
        color = TEXTS[logical % len(TEXTS)]
        held = pieces[logical * block_size : (logical + 1) * block_size]
        places = [
            _labeled_block(ax, number, block_size, held, color, name)
            for ax, number, name in ((above, logical, f"block {logical} of the text"), (below, block, f"block {block}"))
        ]
        (x, top), (to_x, to_top) = places
        ends = {"xyA": (x, top + 0.5), "xyB": (to_x, to_top - 0.72), "coordsA": "data", "coordsB": "data"}
        arrow = ConnectionPatch(**ends, axesA=above, axesB=below, arrowstyle="->", color=color, linewidth=2)
        arrow.set(clip_on=False, in_layout=False)
        above.add_artist(arrow)  # drawn before the pool, so it passes behind the blocks on its way
    for block in set(range(num_blocks)) - set(table):
        _labeled_block(below, block, block_size, [], FREE, f"block {block}")
    for ax, rows, title in ((above, text_rows, "The text"), (below, pool_rows, "The pool")):
        ax.set(xlim=(-0.6, CELLS_IN_A_ROW - 0.4 + 0.3 * CELLS_IN_A_ROW / block_size), ylim=(1.35 * rows - 0.75, -0.85))
        ax.set_title(title)
        ax.axis("off")
    return fig


def _rows(blocks: int, block_size: int) -> int:
    return -(-blocks // (CELLS_IN_A_ROW // block_size))


def _labeled_block(ax, number: int, block_size: int, held, color: str, name: str) -> tuple[float, float]:
    """Draw a block with a cell for each slot; return the middle of its cells."""
    row, place = divmod(number, CELLS_IN_A_ROW // block_size)
    left, top = place * (block_size + 0.3), 1.35 * row
    for cell in range(block_size):
        x = left + cell
        filled = cell < len(held)
        face = _tint(color) if filled else FREE
        ax.add_patch(Rectangle((x - 0.5, top - 0.4), 1, 0.8, facecolor=face, edgecolor=FRAME))
        label = _short(held[cell]) if filled else ""
        ax.text(x, top, label, ha="center", va="center", fontsize=11, parse_math=False)
    ax.text(left - 0.45, top - 0.46, name, va="bottom", fontsize=11)
    return left + (block_size - 1) / 2, top


def _short(piece: str) -> str:
    """At most 7 characters, with visible blanks."""
    visible = piece.replace(" ", "·").replace("\n", "↵")
    return visible if len(visible) <= 7 else visible[:6] + "…"


@drawing
def memory_map(shot, texts, columns: int = 8, title: str = ""):
    """One moment of a pool: a box for each block, a part of it for each slot.

    `shot` is a `serving.snapshot.Snapshot`. `texts` are the ids of all texts of the story in order: their place fixes
    their colors. A block that several texts hold is striped, with their number; empty slots are white.
    """
    blocks = shot.blocks
    rows = -(-len(blocks) // columns)
    fig, ax = new_figure(size=(11.5, 1.5 + 0.72 * rows))
    for number, block in enumerate(blocks):
        row, column = divmod(number, columns)
        _mapped_block(ax, column, row, block, block.filled / shot.block_size, texts)
        _slot_lines(ax, column, row, shot.block_size)
        ax.text(column - 0.44, row - 0.4, str(number), va="bottom", fontsize=9.5, color="#555555")
        if block.refs > 1:
            box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "black", "linewidth": 0.8}
            ax.text(column + 0.4, row - 0.36, f"×{block.refs}", ha="right", va="bottom", bbox=box, fontsize=11)
    ax.set(xlim=(-0.55, columns - 0.45), ylim=(rows - 0.5, -0.75))
    ax.axis("off")
    ax.set_title(title)
    handles = [_legend_patch(texts, text) for text in texts if any(text in block.owners for block in blocks)]
    handles += [Patch(facecolor=KEPT, edgecolor=FRAME, label="free, contents kept")] * any(
        block.kept and not block.owners for block in blocks
    )
    handles.append(Patch(facecolor=FREE, edgecolor=FRAME, label="free or empty"))
    fig.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)))
    return fig


def _mapped_block(ax, column: int, row: int, block, share: float, texts) -> None:
    height, owners = 0.68, block.owners
    for i, owner in enumerate(owners):
        color, hatch = look(texts, owner)
        band = (column - 0.44, row - height / 2 + i * height / len(owners))
        size = (0.88 * share, height / len(owners))
        ax.add_patch(Rectangle(band, *size, facecolor=color, hatch=hatch, edgecolor="white", linewidth=0))
    if block.kept and not owners:
        ax.add_patch(Rectangle((column - 0.44, row - height / 2), 0.88 * share, height, facecolor=KEPT))
    edge, width = ("black", 1.6) if owners else (FRAME, 1.0)
    frame = Rectangle((column - 0.44, row - height / 2), 0.88, height, fill=False, edgecolor=edge, linewidth=width)
    ax.add_patch(frame)


def _slot_lines(ax, column: int, row: int, block_size: int) -> None:
    if block_size <= 16:
        edges = column - 0.44 + 0.88 * np.arange(1, block_size) / block_size
        ax.vlines(edges, row - 0.34, row + 0.34, color="white", linewidth=0.8)
        ax.vlines(edges, row - 0.34, row - 0.28, color=FRAME, linewidth=0.8)


@drawing
def address_maps(maps: dict, refused: dict | None = None):
    """Memory over time, one picture for each way: `{title: serving.waste.Addresses}`.

    `refused` marks for each title the steps in which a text could not be placed.
    """
    fig, axes = new_figure(1, len(maps), size=(5.7 * len(maps), 4.6), squeeze=False, sharey=True)
    longest = max(addresses.owner.shape[1] for addresses in maps.values())
    for ax, (title, addresses) in zip(axes[0], maps.items(), strict=True):
        slots, steps = addresses.owner.shape
        ax.imshow(_painted(addresses), aspect="auto", interpolation="nearest", extent=(0, steps, slots, 0))
        waited = (refused or {}).get(title, [])
        if len(waited):
            marks = ax.plot(np.asarray(waited) + 0.5, [-0.03 * slots] * len(waited), "v", color="black")[0]
            marks.set(clip_on=False, markersize=6)
        ax.set(xlabel="step", xlim=(0, longest))
        ax.axvline(steps, color="black", linewidth=1.2)
        ax.grid(visible=False)
        ax.set_title(f"{title}: {steps} steps", fontsize=13, pad=14)
    axes[0, 0].set_ylabel("slot of the memory")
    handles = [
        Patch(facecolor=TEXTS[0], label="holds a token (a color for each text)"),
        Patch(facecolor=_tint(TEXTS[0]), label="reserved, empty"),
        Patch(facecolor=FREE, edgecolor=FRAME, label="free"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


def _painted(addresses) -> np.ndarray:
    """The RGB picture of `address_maps`."""
    owner, filled = addresses
    colors = np.array([to_rgb(color) for color in TEXTS])[owner % len(TEXTS)]
    tints = np.array([_tint(color) for color in TEXTS])[owner % len(TEXTS)]
    image = np.where(filled[..., None], colors, tints)
    image[owner < 0] = to_rgb(FREE)
    return image


def look(texts, text) -> tuple[str, str]:
    """Color and hatch of one of the `texts`: the same in every picture of a story."""
    place = list(texts).index(text)
    return TEXTS[place % len(TEXTS)], HATCHES[place // len(TEXTS) % len(HATCHES)]


def _legend_patch(texts, text) -> Patch:
    color, hatch = look(texts, text)
    return Patch(facecolor=color, hatch=hatch, edgecolor="white", label=f"text {text}")


def _tint(color: str) -> tuple[float, float, float]:
    """A light version of the color."""
    return tuple(1 - 0.3 * (1 - part) for part in to_rgb(color))
