"""A cache in pages: the rows of a batch share one pool of blocks, and each takes the next block only when it needs it.

What the slots hold is the same as in a `DenseCache`; only where they lie differs. So a row of 10 tokens beside one of
1,000 holds one block of 16, and the pool may be smaller than the longest text times the number of rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvcourse.caches.base import Cache, Step
from kvcourse.caches.packed import PackedStep, Piece, first_seen, require_attention
from kvcourse.caches.pages import Pages
from kvcourse.config import ModelConfig, require_config
from kvcourse.require import require_whole
from kvcourse.serving.blocks import BlockPool, BlockTable, OutOfBlocks


class PagedCache(Cache):
    """Keys and values of `batch_size` texts in `num_blocks` blocks of `block_size` tokens.

    `max_len` defaults to the model's `max_seq_len`, `num_blocks` to what all rows need at that length. `attention` is
    that of `PackedCache`. Where every layer of the model has a window, blocks that a step did not look into any more
    are given back after it; so whatever the latest step added can be taken back.

    A step that finds too few free blocks raises `ValueError` before anything is stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int = 1,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_len: int | None = None,
        dtype=None,
        device=None,
        attention: str | None = None,
    ):
        super().__init__(config, batch_size)
        self.max_len, num_blocks, block_size = sizes(config, batch_size, num_blocks, block_size, max_len)
        self.pages = Pages(config, num_blocks, block_size, dtype, device)
        self.dtype, self.device = self.pages.dtype, self.pages.device
        self.attention = require_attention(attention, self.device)
        self.pool = BlockPool(num_blocks, block_size)
        self.tables = [BlockTable(self.pool) for _ in range(self.batch_size)]

    @staticmethod
    def bytes_for(
        config: ModelConfig,
        batch_size: int = 1,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_len: int | None = None,
        dtype=torch.float32,
    ) -> int:
        """Bytes such a cache allocates: the whole pool."""
        _, num_blocks, block_size = sizes(require_config(config), batch_size, num_blocks, block_size, max_len)
        return Pages.bytes_for(config, num_blocks, block_size, dtype)

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes

    @contextmanager
    def step(self, positions: Tensor) -> Iterator[Step]:
        held = self.lengths
        with super().step(positions) as step:
            yield step
        for table, start, length in zip(self.tables, held, self.lengths, strict=True):
            if length > start:
                table.release_before(first_seen(self.config, start))

    def begin(self, positions: Tensor) -> Step:
        self.check_room(positions)
        counts = (positions >= 0).sum(1).tolist()
        rows = [(t, n, n + new) for t, n, new in zip(self.tables, self.lengths, counts, strict=True) if new]
        try:
            for table, start, stop in rows:
                table.reserve(start, stop)  # no other row holds a block of this one, so there is nothing to copy
        except OutOfBlocks as error:
            raise ValueError(f"{error} Make the PagedCache with a larger num_blocks, or reset() it.") from error
        packed = PackedStep(self.pages, [Piece(t.blocks, start, stop) for t, start, stop in rows], self.attention)
        return PagedStep(packed, positions)

    def truncate(self, length: int) -> None:
        """As `Cache.truncate`; `ValueError` when blocks that the next token would look into were given back."""
        first = first_seen(self.config, require_whole("length", length, least=0))
        needed = slice(first // self.pool.block_size, self.pool.blocks_for(length))
        for row, (table, held) in enumerate(zip(self.tables, self.lengths, strict=True)):
            if length < held and None in table.blocks[needed]:
                raise ValueError(
                    f"Row {row} cannot go back from {held} tokens to {length}: the next token would need the block of "
                    f"position {first}, which was given back when the window had passed it. Call reset() and prefill "
                    f"the first {length} tokens again."
                )
        super().truncate(length)

    def wipe(self) -> None:
        """Give back the blocks beyond `lengths`, and clear the rest of each row's last one."""
        for table, length in zip(self.tables, self.lengths, strict=True):
            table.truncate(length)
            if rest := length % self.pool.block_size:
                for tensor in (self.pages.keys, self.pages.values):
                    tensor[:, table.blocks[-1], :, rest:] = 0


def sizes(config: ModelConfig, batch_size, num_blocks, block_size, max_len) -> tuple[int, int, int]:
    """(max_len, num_blocks, block_size), the defaults filled in."""
    max_len = require_whole("max_len", config.max_seq_len if max_len is None else max_len)
    block_size, rows = require_whole("block_size", block_size), require_whole("batch_size", batch_size)
    enough = rows * -(-max_len // block_size)
    return max_len, require_whole("num_blocks", enough if num_blocks is None else num_blocks), block_size


class PagedStep(Step):
    """Rows of a batch, their real tokens packed into one row."""

    def __init__(self, packed: PackedStep, positions: Tensor):
        self.packed = packed
        self.places = tuple(index.to(packed.pages.device) for index in (positions >= 0).nonzero(as_tuple=True))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (x.transpose(1, 2)[self.places].transpose(0, 1)[None] for x in (q, k, v))
        attended = self.packed.attend(layer, *packed)
        out = torch.zeros_like(q)  # of padding, which nobody reads
        out.transpose(1, 2)[self.places] = attended[0].transpose(0, 1)
        return out
