"""Attention over blocks, two ways. Both are given block tables of some texts, each with equally many new tokens.

`Gather` copies the keys and values of each text side by side and attends to the copy. `Direct` never copies a whole
text: it reads some blocks at a time and uses them while they are still in the processor's cache.
"""

import torch
from torch import Tensor

from kvcourse.caches.pages import Pages, side_by_side
from kvcourse.layers import attention, visible

TILE = 2048  # tokens that `Direct` reads at once: keys of SmolLM2's size take 1.5 MB of them in float32


def look_back(tables: Tensor, positions: Tensor, block_size: int, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """What new tokens at `positions` `(B, T)` look back on, from block tables `(B, n)`: the blocks `(B, m)`, the
    positions of the tokens in them `(B, m * block_size)`, and how many of the m blocks are a text's own `(B,)`.

    Where a text has fewer than m, its last block stands in: read as blocks further on, which nobody sees.
    """
    starts, last = positions[:, 0], positions[:, -1] // block_size
    first = torch.zeros_like(starts) if window is None else (starts - window + 1).clamp(min=0) // block_size
    counts = last - first + 1
    columns = first[:, None] + torch.arange(int(counts.max()))
    key_positions = columns[:, :, None] * block_size + torch.arange(block_size)
    return tables.gather(1, columns.minimum(last[:, None])), key_positions.flatten(1), counts


class Gather:
    """The blocks of each text side by side, in a copy; then the attention of all caches."""

    def __init__(self, pages: Pages, tables: Tensor, positions: Tensor, window: int | None):
        blocks, key_positions, _ = look_back(tables, positions, pages.block_size, window)
        self.pieces = pages.pieces(blocks)
        self.seen = int((positions[:, -1:] - key_positions[:, :1]).max()) + 1  # tokens, from the first one on
        width = positions.shape[1]
        self.causal = not positions[:, 0].any() and (window is None or width <= window)
        mask = None if self.causal else visible(positions, key_positions[:, : self.seen], window)
        self.mask = None if mask is None or mask.all() else mask.to(pages.device)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q `(B, H, T, D)` over blocks of `keys` and `values` `(num_blocks, H_kv, block_size, D)`; the shape of q."""
        k, v = (side_by_side(pool, self.pieces, len(q))[:, :, : self.seen] for pool in (keys, values))
        return attention(q, k, v, self.mask, self.causal)


class Direct:
    """Scores a few blocks at a time, one softmax over all of them, values a few blocks at a time: T = 1 only.

    The scores of one token are few beside its keys, 1 to D, so that they may stand in memory. For many new tokens they
    are not, and there one copy of the keys serves all of them. Texts stand in the order of their lengths, the longest
    first: the others drop out where they end. Scores and softmax are in float32 at least, as in PyTorch's own.
    """

    def __init__(self, pages: Pages, tables: Tensor, positions: Tensor, window: int | None):
        blocks, key_positions, counts = look_back(tables, positions, pages.block_size, window)
        order = counts.argsort(descending=True)
        self.order, self.back = order.to(pages.device), order.argsort().to(pages.device)
        self.hidden = ~visible(positions[order], key_positions[order], window).to(pages.device)
        step = max(1, TILE // (len(tables) * pages.block_size))
        self.tiles = []  # the first n texts read these blocks, which hold the tokens of this span
        for first in range(0, blocks.shape[1], step):
            n = int((counts > first).sum())
            span = slice(first * pages.block_size, (first + step) * pages.block_size)
            self.tiles.append((n, pages.pieces(blocks[order[:n], first : first + step]), span))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q `(B, H, 1, D)` over blocks of `keys` and `values` `(num_blocks, H_kv, block_size, D)`; the shape of q."""
        wide, scale = torch.promote_types(q.dtype, torch.float32), q.shape[3] ** -0.5
        rows = q[self.order, :, 0].unflatten(1, (keys.shape[1], -1)).to(wide) * scale  # (B, H_kv, G, D)
        scores = rows.new_full((*rows.shape[:3], self.hidden.shape[3]), -torch.inf)
        for n, pieces, span in self.tiles:
            scores[:n, ..., span] = rows[:n] @ side_by_side(keys, pieces, n).mT.to(wide)
        weights = scores.masked_fill_(self.hidden, -torch.inf).softmax(-1)
        out = torch.zeros_like(rows)
        for n, pieces, span in self.tiles:
            out[:n] += weights[:n, ..., span] @ side_by_side(values, pieces, n).to(wide)
        return out[self.back].view(q.shape).to(q.dtype)
