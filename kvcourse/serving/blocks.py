"""Pages for keys and values: a pool of blocks of equal size, and for each text a table of the blocks that hold it.

A text takes a block when it needs one, wherever that lies, so only its last block can be partly empty. Several tables
can hold the same block; before one of them writes to it, it gets a copy of its own (copy on write). The idea and its
names are those of PagedAttention (Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention", section 4). This file only keeps the books: the keys and values themselves lie elsewhere.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvcourse.require import require_whole


class OutOfBlocks(RuntimeError):
    """There are fewer free blocks than asked for; nothing was taken."""


class BlockPool:
    """`num_blocks` blocks for `block_size` tokens each, and who holds them.

    `refs[block]` tables hold a block: it is free at 0, else used. Free blocks stand in one `queue`, in the order they
    will be taken. In front are those with nothing worth keeping, the last freed first; behind them, the least recently
    freed first, those in `kept`: blocks whose contents a prefix index can still hand out. Only the index changes
    `kept`, and only for used blocks; the pool calls `on_reuse(block)` as it takes a kept one for something else.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = require_whole("num_blocks", num_blocks)
        self.block_size = require_whole("block_size", block_size)
        self.refs = [0] * self.num_blocks
        self.queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self.kept: set[int] = set()
        self.evictable = 0  # free blocks in `kept`
        self.on_reuse: Callable[[int], None] | None = None

    @property
    def free_blocks(self) -> int:
        """Blocks that no table holds, the evictable ones among them."""
        return len(self.queue)

    @property
    def used_blocks(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - len(self.queue)

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that `n_tokens` tokens fill, the last one perhaps in part."""
        return -(-n_tokens // self.block_size)

    def take(self) -> int:
        """The next free block, held once from now on. Raises `OutOfBlocks` when there is none."""
        self.require_free(1)
        block, _ = self.queue.popitem(last=False)
        self.refs[block] = 1
        if block in self.kept:
            self.evictable -= 1
            self.on_reuse(block)
        return block

    def share(self, block: int) -> None:
        """One more table holds `block`. Raises `ValueError` when it is free and nothing in it is kept."""
        if self._holders(block) == 0:
            if block not in self.kept:
                raise ValueError(f"Block {block} is free and holds nothing to share: take() a block instead.")
            del self.queue[block]
            self.evictable -= 1
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """One table less holds `block`; after the last one it is free. Raises `ValueError` when it is free already."""
        if self._holders(block) == 0:
            raise ValueError(f"Block {block} is free already: each holder releases it once.")
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.queue[block] = None
            if block in self.kept:
                self.evictable += 1
            else:
                self.queue.move_to_end(block, last=False)

    def require_free(self, n_blocks: int) -> None:
        """Raises `OutOfBlocks`, with the numbers, unless `n_blocks` blocks are free."""
        if n_blocks > self.free_blocks:
            raise OutOfBlocks(
                f"{n_blocks} free blocks of {self.block_size} tokens are needed, and {self.free_blocks} of "
                f"{self.num_blocks} are free: let a text end or give its blocks back, or make the pool larger."
            )

    def _holders(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"Block {block} is not in this pool, which has blocks 0 to {self.num_blocks - 1}.")
        return self.refs[block]


class BlockTable:
    """The pages of one text: `blocks[i]` holds tokens `i * block_size` and on, or is None once given back.

    Only a window gives blocks back from the front, so the None entries, if any, come first. `blocks` given at the start
    are ones already held for this table, as `PrefixIndex.match` returns them.
    """

    def __init__(self, pool: BlockPool, blocks: Iterable[int | None] = ()):
        self.pool = pool
        self.blocks: list[int | None] = list(blocks)

    def shortage(self, start: int, stop: int) -> int:
        """Free blocks that `reserve(start, stop)` takes: 0 when there is room already."""
        return len(self._not_own(start, stop)) + max(0, self.pool.blocks_for(stop) - len(self.blocks))

    def reserve(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Make room for `stop` tokens, and let tokens `start` to `stop - 1` be written: the blocks they go to are this
        table's own afterwards. No other table holds them, and no prefix index, which could hand them out, knows them.

        Returns the block copies `(source, target)` this needs. Make them in this order, and before anything is written:
        a source may be free by then, or the target of a later copy. A second call takes nothing. Raises `OutOfBlocks`,
        or `ValueError` when a block to write to was given back, before anything changes.
        """
        not_own = self._not_own(start, stop)
        self.pool.require_free(self.shortage(start, stop))
        copies = []
        for i in not_own:
            source, self.blocks[i] = self.blocks[i], self.pool.take()
            self.pool.release(source)
            copies.append((source, self.blocks[i]))
        while len(self.blocks) < self.pool.blocks_for(stop):
            self.blocks.append(self.pool.take())
        return copies

    def slots(self, start: int, stop: int) -> list[int]:
        """Where tokens `start` to `stop - 1` lie: `block * block_size + offset` each. Raises `ValueError` when one of
        them has no block, or its block was given back."""
        size = self.pool.block_size
        slots: list[int] = []
        for i in self._span(start, stop):
            first = self._present(i) * size
            slots.extend(range(first, first + size))
        return slots[start % size : start % size + stop - start]

    def fork(self, length: int) -> "BlockTable":
        """A second table for the first `length` tokens, holding the same blocks: nothing is copied until one writes."""
        n_blocks = self.pool.blocks_for(require_whole("length", length, 0))
        if n_blocks > len(self.blocks):
            room = len(self.blocks) * self.pool.block_size
            raise ValueError(f"fork({length}): this table has room for {room} tokens; fork at that many or fewer.")
        for block in self.blocks[:n_blocks]:
            if block is not None:
                self.pool.share(block)
        return BlockTable(self.pool, self.blocks[:n_blocks])

    def truncate(self, length: int) -> None:
        """Give back the blocks that hold none of the first `length` tokens, the last block first."""
        n_blocks = self.pool.blocks_for(require_whole("length", length, 0))
        while len(self.blocks) > n_blocks:
            block = self.blocks.pop()
            if block is not None:
                self.pool.release(block)

    def release_before(self, position: int) -> None:
        """Give back the blocks that lie wholly before token `position` (a window has passed them), the last first."""
        for i in reversed(range(min(position // self.pool.block_size, len(self.blocks)))):
            if self.blocks[i] is None:
                break  # so are all before it
            self.pool.release(self.blocks[i])
            self.blocks[i] = None

    def free(self) -> None:
        """Give back all blocks; a second call does nothing.

        The last block goes first. So of the kept blocks of a text the end stands in the queue before the beginning, and
        taking the least recently freed first takes the leaves of the tree of prefixes before what they grow from.
        """
        self.truncate(0)

    def _span(self, start: int, stop: int) -> range:
        """Which blocks tokens `start` to `stop - 1` lie in."""
        if not 0 <= start <= stop:
            raise ValueError(f"start={start}, stop={stop}: tokens are counted from 0, and start is at most stop.")
        if start == stop:
            return range(0)
        return range(start // self.pool.block_size, self.pool.blocks_for(stop))

    def _not_own(self, start: int, stop: int) -> list[int]:
        """Which of the blocks to write to another table holds too, or a prefix index knows."""
        written = [(i, self._present(i)) for i in self._span(start, stop) if i < len(self.blocks)]
        return [i for i, block in written if self.pool.refs[block] > 1 or block in self.pool.kept]

    def _present(self, i: int) -> int:
        """The block at `i`, which must have been taken and not given back."""
        token = i * self.pool.block_size
        if i >= len(self.blocks):
            raise ValueError(f"Token {token} has no block: reserve() first; this table has {len(self.blocks)} blocks.")
        if self.blocks[i] is None:
            raise ValueError(f"The block of token {token} was given back: it lies behind the window.")
        return self.blocks[i]
