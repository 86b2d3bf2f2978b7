"""Many texts in one step: their new tokens stand in one row, one text after the other, and nothing is padded.

Linear layers and norms treat each token alone, so they run over the packed row as it is. Attention goes text by text:
each has its keys and values in blocks of a common pool (`Pages`), listed in its block table. So a long piece of a
prompt and single new tokens of many texts share a step (selective batching: Orca, OSDI 2022, section 3.2; block tables:
PagedAttention, arXiv 2309.06180, section 4.2).
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvcourse.caches.base import Cache, Step
from kvcourse.caches.block_attention import Direct, Gather
from kvcourse.caches.pages import Pages
from kvcourse.config import ModelConfig


class Piece(NamedTuple):
    """One text's part of a step: its tokens start to stop - 1 are new, and those before are in its blocks.

    Block i of `blocks` holds the tokens from i * block_size on. None stands for a block that was given back, because
    all it held lies behind the windows of all layers.
    """

    blocks: Sequence[int | None]
    start: int
    stop: int


class PackedCache(Cache):
    """The pool as the cache of one step at a time: set `pieces`, then call the model with their tokens `(1, N)`.

    `model(tokens, cache=packed, last_only=True)` gives one row of scores for each piece, `(1, len(pieces), V)`. Whoever
    sets the pieces keeps the block tables and knows how long each text is; nothing is remembered between steps. The new
    tokens of a piece go into blocks that no other text holds. A step that fails leaves zeros in their place.

    `attention` is how single new tokens attend: "gather" copies the keys and values of each text side by side first,
    "direct" reads a few blocks at a time (see `block_attention`), and in a compiled model each block by itself (see
    `fast.pages`); None takes the one that measured faster. Longer pieces always gather: there one copy serves many
    queries.

    Raises `ValueError` before anything is stored when positions are not those of the pieces, or a piece lacks a block.
    """

    def __init__(self, pages: Pages, attention: str | None = None):
        super().__init__(pages.config)
        self.pages, self.dtype, self.device = pages, pages.dtype, pages.device
        self.attention = require_attention(attention, pages.device)
        self.pieces: Sequence[Piece] = []

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes

    def next_positions(self, new_tokens: int) -> Tensor:
        """Positions `(1, N)` of the new tokens of all pieces, whose number must be `new_tokens`."""
        count = sum(piece.stop - piece.start for piece in self.pieces)
        if count != new_tokens:
            raise ValueError(f"The pieces of this step have {count} new tokens, but {new_tokens} were given.")
        return torch.cat([torch.arange(piece.start, piece.stop) for piece in self.pieces])[None]

    def count_new(self, positions: Tensor) -> list[int]:
        """The length stays 0: each text's owner counts its tokens. `ValueError` for positions not of the pieces."""
        if not torch.equal(positions, self.next_positions(positions.shape[1])):
            spans = [(piece.start, piece.stop) for piece in self.pieces]
            raise ValueError(
                f"The pieces of this step go from start to stop - 1 of {spans}, one after the other; got other "
                f"positions, {positions.flatten().tolist()}. Leave positions out."
            )
        return [0]

    def begin(self, positions: Tensor) -> Step:
        for piece in self.pieces:
            check(piece, self.pages)
        return PackedStep(self.pages, self.pieces, self.attention)

    def wipe(self) -> None:
        if self.open_step is not None:
            self.pages.clear(self.open_step.slots)


def require_attention(attention: str | None, device: torch.device) -> str:
    """`attention`, or the default on `device` for None; `ValueError` for one that does not exist."""
    if attention not in (None, "gather", "direct"):
        raise ValueError(f'attention={attention!r} must be "gather" or "direct", or None for the faster one here.')
    # 16 new tokens of SmolLM2's shape in float32 on one core, time of direct / gather: after texts of 128 tokens 0.8 to
    # 1.1, of 512 and of 2,000 0.9; lengths spread around 200 (log-normal, sigma 0.9) 0.6; one of 2,000 beside 15 of 100
    # 0.23. PyTorch's flex_attention over the pool where it lies, compiled: 1.3, 1.2 and 1.1 at the first three, after
    # 30 s of compiling, and not in float64. On a GPU each tile is a few small kernels: not measured there yet.
    return attention or ("direct" if device.type == "cpu" else "gather")


def first_seen(config: ModelConfig, position: int) -> int:
    """The first token that any layer shows a query at `position`."""
    return 0 if None in config.windows else max(0, position - max(config.windows) + 1)


def check(piece: Piece, pages: Pages) -> None:
    """Raise `ValueError` unless a piece has new tokens and a block for every token that they are or see."""
    blocks, start, stop = piece
    if not 0 <= start < stop:
        raise ValueError(f"A piece has new tokens from start to stop - 1: start={start} must be below stop={stop}.")
    size, first = pages.block_size, first_seen(pages.config, start)
    used = blocks[first // size : (stop - 1) // size + 1]
    if stop > len(blocks) * size or None in used:
        raise ValueError(
            f"This step writes or sees the tokens {first} to {stop - 1} of a piece, but for some of them it has no "
            f"block of {size} tokens: {list(blocks)}."
        )
    if not 0 <= min(used) <= max(used) < pages.num_blocks:
        wrong = next(block for block in used if not 0 <= block < pages.num_blocks)
        raise ValueError(f"A piece has block {wrong}, but the pool has blocks 0 to {pages.num_blocks - 1}.")


class PackedStep(Step):
    """Where new tokens are stored and what each text reads, worked out once for all layers."""

    def __init__(self, pages: Pages, pieces: Sequence[Piece], attention: str):
        self.pages, self.windows, self.attention = pages, pages.config.windows, attention
        self.runs = []  # texts with equally many new tokens that stand next to each other attend together
        for _, run in groupby(pieces, key=lambda piece: piece.stop - piece.start):
            self.runs.append(Run(pages, list(run), attention))
        self.slots = torch.cat([run.slots for run in self.runs])
        self.clear_new_blocks(pieces)

    def clear_new_blocks(self, pieces: Sequence[Piece]) -> None:
        """Clear the blocks that a piece begins and does not fill. What another text left behind in them is read along
        with the piece's own tokens, and masked: it counts with weight 0, but 0 x NaN is NaN."""
        size = self.pages.block_size
        begun = [p.blocks[p.stop // size] for p in pieces if p.stop % size and p.stop // size * size >= p.start]
        if begun:
            self.pages.fill(0, begun)

    def last(self, positions: Tensor) -> Tensor:
        """The column of each piece's last token, `(1, n_pieces)`."""
        widths = [width for run in self.runs for width in run.widths]
        return torch.tensor([widths]).cumsum(1) - 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `(1, H, N, D)`, k and v `(1, H_kv, N, D)` of all pieces -> `(1, H, N, D)`."""
        self.pages.store(layer, self.slots, k[0].transpose(0, 1), v[0].transpose(0, 1))
        keys, values, window = self.pages.keys[layer], self.pages.values[layer], self.windows[layer]
        parts = q[0].split([sum(run.widths) for run in self.runs], dim=1)
        outs = [run.attend(part, keys, values, window) for run, part in zip(self.runs, parts, strict=True)]
        return torch.cat(outs, dim=1)[None]


class Run:
    """Pieces with equally many new tokens."""

    def __init__(self, pages: Pages, pieces: list[Piece], attention: str):
        starts, width = torch.tensor([piece.start for piece in pieces]), pieces[0].stop - pieces[0].start
        rows = [torch.tensor([block or 0 for block in piece.blocks]) for piece in pieces]  # None is never read
        self.pages, self.widths = pages, [width] * len(pieces)
        self.positions, self.tables = starts[:, None] + torch.arange(width), pad_sequence(rows, batch_first=True)
        blocks = self.tables.gather(1, self.positions // pages.block_size)
        self.slots = pages.slots(blocks, self.positions % pages.block_size)
        self.kind = Direct if attention == "direct" and width == 1 else Gather
        self.kinds = {}  # {window: how layers with that window attend}

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """q `(H, B x T, D)` -> the same shape."""
        if window not in self.kinds:
            self.kinds[window] = self.kind(self.pages, self.tables, self.positions, window)
        q = q.unflatten(1, (len(self.widths), -1)).transpose(0, 1)
        return self.kinds[window].attend(q, keys, values).transpose(0, 1).flatten(1, 2)
