"""Pictures of the pool, against steps worked out by hand."""

import random

import pytest

from kvcourse.serving.blocks import BlockPool
from kvcourse.serving.dry_run import DryEngine, linear_cost
from kvcourse.serving.prefix import Identity, PrefixIndex
from kvcourse.serving.replay import replay
from kvcourse.serving.scheduler import Request, Scheduler
from kvcourse.serving.snapshot import Block, snapshot
from kvcourse.serving.workload import agent_branches, poisson

FREE = Block(owners=(), refs=0, filled=0, kept=False)


@pytest.fixture
def scheduler():
    pool = BlockPool(num_blocks=4, block_size=4)
    return Scheduler(pool, PrefixIndex(pool, Identity("none", "none")))


def run(scheduler, token=9):
    """One step; everybody who can gets `token`."""
    chunks = scheduler.schedule().chunks
    ending = [chunk.request for chunk in chunks if chunk.ends]
    for chunk in chunks:
        scheduler.advance(chunk)
    for request in ending:
        request.tokens.append(token)


def test_an_empty_pool(scheduler):
    picture = snapshot(scheduler)
    assert picture.blocks == (FREE,) * 4
    assert (picture.used, picture.filled, picture.kept, picture.running, picture.waiting) == (0, 0, 0, (), ())


def test_one_request_fills_a_block_and_half_of_the_next(scheduler):
    scheduler.add(Request("a", [1, 2, 3, 4, 5, 6], 4))
    assert snapshot(scheduler).waiting == ("a",)
    run(scheduler)
    picture = snapshot(scheduler)
    assert picture.blocks[:2] == (Block(("a",), 1, 4, True), Block(("a",), 1, 2, False))
    assert picture.blocks[2:] == (FREE, FREE)
    assert (picture.used, picture.filled, picture.running, picture.waiting) == (2, 6, ("a",), ())


def test_blocks_are_taken_before_they_are_filled(scheduler):
    scheduler.add(Request("a", [1, 2, 3, 4, 5, 6], 4))
    scheduler.schedule()
    assert [block.filled for block in snapshot(scheduler).blocks] == [0, 0, 0, 0]
    assert snapshot(scheduler).used == 2


def test_samples_share_the_blocks_of_their_prompt(scheduler):
    """The sample takes over 5 tokens and computes the sixth anew, in a copy of the block that is half full."""
    first = Request("a", [1, 2, 3, 4, 5, 6], 4)
    scheduler.add(first)
    scheduler.add(Request("b", [1, 2, 3, 4, 5, 6], 4, source=first))
    run(scheduler)
    assert snapshot(scheduler).waiting == ("b",)
    run(scheduler)
    picture = snapshot(scheduler)
    assert (picture.used, picture.shared, picture.filled) == (3, 1, 4 + 3 + 2)
    assert picture.blocks[0] == Block(("a", "b"), 2, 4, True)


def test_what_an_ended_text_leaves_is_free_and_kept(scheduler):
    request = Request("a", [1, 2, 3, 4, 5, 6], 4)
    scheduler.add(request)
    run(scheduler)
    scheduler.finish(request)
    picture = snapshot(scheduler)
    assert (picture.used, picture.kept, picture.filled) == (0, 1, 0)
    assert picture.blocks[0] == Block((), 0, 4, True)


def test_blocks_behind_a_window_belong_to_nobody():
    engine = DryEngine(num_blocks=8, block_size=2, window=3)
    engine.submit([1, 2, 3, 4, 5, 6, 7, 8], 3)
    engine.step()
    picture = snapshot(engine.scheduler)
    assert [block.owners for block in picture.blocks].count((0,)) == 2  # 6 and 7, and 5 for one who needs 7 anew
    assert (picture.used, picture.filled, picture.kept) == (2, 4, 2)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("crowd", ["strangers", "branches"])
def test_the_owners_of_a_block_are_what_the_pool_counts(crowd, window):
    """Over crowded replays: preemptions, shared prefixes and eviction included."""
    lengths = [(random.Random(i).randint(1, 40), 12) for i in range(40)]
    strangers, branches = poisson(20.0, 40, lengths=lengths), agent_branches(3, 2, system=20, instruction=5, answer=6)
    engine = DryEngine(num_blocks=20, block_size=4, max_batch_tokens=32, window=window)
    film = []
    result = replay(
        engine,
        strangers if crowd == "strangers" else branches,
        linear_cost(0.1, 0.0),
        on_step=lambda clock: film.append((snapshot(engine.scheduler), engine.pool.used_blocks)),
    )
    for picture, used in film:
        assert all(len(block.owners) == block.refs for block in picture.blocks)
        assert picture.used == used
        assert picture.filled <= picture.used * 4
    assert max(picture.shared for picture, _ in film) > 0 or crowd == "strangers"
    assert result.preemptions > 0 or window  # pages behind a window make room
