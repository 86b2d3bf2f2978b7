"""What stands where in the pool at one moment: taken from a scheduler, looked at by pictures."""

from collections.abc import Hashable
from dataclasses import dataclass

from kvcourse.serving.scheduler import Scheduler


@dataclass(frozen=True)
class Block:
    """One block: who has it in their tables, how many of its slots hold a token, and whether the prefix index knows it.

    Without owners it is free. A free block that is `kept` still holds what an ended text left, ready to be shared.
    """

    owners: tuple[Hashable, ...]  # ids of requests, by arrival
    refs: int  # what the pool counts
    filled: int
    kept: bool


@dataclass(frozen=True)
class Snapshot:
    """All blocks of the pool, and who runs and who waits, by arrival."""

    block_size: int
    blocks: tuple[Block, ...]
    running: tuple[Hashable, ...]
    waiting: tuple[Hashable, ...]

    @property
    def used(self) -> int:
        """Blocks that a request has."""
        return sum(block.refs > 0 for block in self.blocks)

    @property
    def shared(self) -> int:
        """Blocks that several requests have."""
        return sum(block.refs > 1 for block in self.blocks)

    @property
    def kept(self) -> int:
        """Free blocks that the prefix index can still hand out."""
        return sum(block.kept and block.refs == 0 for block in self.blocks)

    @property
    def filled(self) -> int:
        """Slots of used blocks that hold a token; a shared one counts once."""
        return sum(block.filled for block in self.blocks if block.refs > 0)


def snapshot(scheduler: Scheduler) -> Snapshot:
    """The state of a scheduler and its pool between two steps. Cheap: it reads each table once, and changes nothing."""
    pool = scheduler.pool
    owners: list[list[Hashable]] = [[] for _ in range(pool.num_blocks)]
    filled = [pool.block_size if block in pool.kept else 0 for block in range(pool.num_blocks)]
    running = sorted(scheduler.running, key=lambda request: request.arrival)
    for request in running:
        for place, block in enumerate(request.table.blocks):
            if block is not None:  # None: given back, behind the window
                owners[block].append(request.id)
                filled[block] = min(max(request.computed - place * pool.block_size, 0), pool.block_size)
    return Snapshot(
        block_size=pool.block_size,
        blocks=tuple(
            Block(tuple(owners[block]), pool.refs[block], filled[block], block in pool.kept)
            for block in range(pool.num_blocks)
        ),
        running=tuple(request.id for request in running),
        waiting=tuple(request.id for request in scheduler.waiting),
    )
