"""The pool and the tables against hand-worked examples, and against texts that are read back after every operation."""

from itertools import permutations

import pytest
from block_texts import Texts

from kvcourse.serving.blocks import BlockPool, BlockTable, OutOfBlocks


def table_of(pool, n_tokens):
    table = BlockTable(pool)
    table.reserve(0, n_tokens)
    return table


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_blocks", [6, 20])
def test_after_each_of_2000_random_operations_every_text_reads_back_and_the_books_agree(num_blocks, block_size):
    texts = Texts(num_blocks, block_size)
    texts.run(2000)
    assert texts.seen["preemptions"] > 0 and (texts.seen["copies"] > 0) == (block_size > 1)
    texts.end_all()


def fork_without_counting(table, length):
    return BlockTable(table.pool, table.blocks[: table.pool.blocks_for(length)])


def reserve_without_copying(table, start, stop):
    while len(table.blocks) < table.pool.blocks_for(stop):
        table.blocks.append(table.pool.take())
    return []


def reserve_forgetting_what_it_copied_from(table, start, stop):
    copies = RESERVE(table, start, stop)
    for source, _ in copies:
        table.pool.refs[source] += 1
    return copies


def reserve_before_it_looks(table, start, stop):
    while len(table.blocks) < table.pool.blocks_for(stop):
        table.blocks.append(table.pool.take())
    return RESERVE(table, start, stop)


def truncate_without_release(table, length):
    del table.blocks[table.pool.blocks_for(length) :]


def release_before_one_too_many(table, position):
    RELEASE_BEFORE(table, position + table.pool.block_size)


def slots_without_the_offset(table, start, stop):
    size = table.pool.block_size
    return [table.blocks[i // size] * size + (i - start) % size for i in range(start, stop)]


RESERVE, RELEASE_BEFORE = BlockTable.reserve, BlockTable.release_before
BROKEN = {
    fork_without_counting: "fork",
    reserve_without_copying: "reserve",
    reserve_forgetting_what_it_copied_from: "reserve",
    reserve_before_it_looks: "reserve",
    truncate_without_release: "truncate",
    release_before_one_too_many: "release_before",
    slots_without_the_offset: "slots",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_random_operations_go_red_for_a_broken_table(monkeypatch, broken):
    monkeypatch.setattr(BlockTable, BROKEN[broken], broken)
    with pytest.raises((AssertionError, ValueError)):
        Texts(12, 4).run(2000)


def test_blocks_are_taken_in_order_and_come_back_to_the_front():
    pool = BlockPool(num_blocks=4, block_size=2)
    table = table_of(pool, 5)
    assert (table.blocks, pool.refs, pool.free_blocks, pool.used_blocks) == ([0, 1, 2], [1, 1, 1, 0], 1, 3)
    table.free()
    assert list(pool.queue) == [0, 1, 2, 3] and pool.refs == [0] * 4


def test_a_slot_is_block_times_block_size_plus_offset():
    table = BlockTable(BlockPool(9, 4), [7, 2])
    assert table.slots(0, 8) == [28, 29, 30, 31, 8, 9, 10, 11]
    assert table.slots(3, 6) == [31, 8, 9] and table.slots(5, 5) == []


def test_reserve_takes_what_shortage_says_and_nothing_the_second_time():
    pool = BlockPool(8, 4)
    table = table_of(pool, 6)
    assert (table.shortage(6, 8), table.shortage(6, 9), table.shortage(6, 17)) == (0, 1, 3)
    assert table.reserve(6, 17) == [] and pool.free_blocks == 3
    assert table.shortage(6, 17) == 0 and table.reserve(6, 17) == [] and pool.free_blocks == 3


def test_only_blocks_that_are_written_are_copied():
    """Block 4, 10 tokens in blocks 0, 1, 2; the copy writes tokens 6 to 8, so blocks 1 and 2, and never block 0."""
    pool = BlockPool(8, 4)
    table = table_of(pool, 10)
    other = table.fork(10)
    assert other.shortage(6, 9) == 2 and other.reserve(6, 9) == [(1, 3), (2, 4)]
    assert (table.blocks, other.blocks, pool.refs[:5]) == ([0, 1, 2], [0, 3, 4], [2, 1, 1, 1, 1])
    assert table.reserve(6, 9) == [] and other.reserve(6, 9) == []  # each has its own now
    assert other.reserve(4, 4) == [] and other.shortage(4, 4) == 0  # nothing is written


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_references_of_a_prompt_and_three_children_freed_in_any_order(order):
    """Known failure 34. Block 4, a prompt of 5 tokens: one full block, which all share, and one with a single token."""
    pool = BlockPool(16, 4)
    slots = [None] * 64
    prompt = table_of(pool, 5)
    for slot, token in zip(prompt.slots(0, 5), "abcde", strict=True):
        slots[slot] = token
    tables = [prompt, *(prompt.fork(5) for _ in range(3))]
    assert pool.refs[:2] == [4, 4] and pool.used_blocks == 2
    for table, token in zip(tables[1:], "xyz", strict=True):
        [(source, target)] = table.reserve(5, 6)
        assert source == prompt.blocks[1] and target not in prompt.blocks  # the full block is not copied
        slots[target * 4 : target * 4 + 4] = slots[source * 4 : source * 4 + 4]
        slots[table.slots(5, 6)[0]] = token
    texts = [[slots[i] for i in table.slots(0, n)] for table, n in zip(tables, [5, 6, 6, 6], strict=True)]
    assert ["".join(text) for text in texts] == ["abcde", "abcdex", "abcdey", "abcdez"]
    assert pool.refs[:5] == [4, 1, 1, 1, 1] and pool.used_blocks == 5
    for ended, i in enumerate(order, start=1):
        tables[i].free()
        tables[i].free()  # harmless
        assert pool.refs[0] == 4 - ended and pool.used_blocks == (5 - ended if ended < 4 else 0)
    assert sorted(pool.queue) == list(range(16))


def test_truncate_keeps_the_block_that_still_holds_a_token():
    pool = BlockPool(8, 4)
    table = table_of(pool, 12)
    for length, blocks in [(12, [0, 1, 2]), (9, [0, 1, 2]), (8, [0, 1]), (1, [0]), (0, [])]:
        table.truncate(length)
        assert table.blocks == blocks and pool.used_blocks == len(blocks)


def test_a_window_gives_back_the_blocks_it_has_passed():
    """Block 4, 14 tokens. A window that begins at token 7 still needs block 1; one that begins at 8 does not."""
    pool = BlockPool(8, 4)
    table = table_of(pool, 14)
    for position, blocks in [(-3, [0, 1, 2, 3]), (3, [0, 1, 2, 3]), (7, [None, 1, 2, 3]), (8, [None, None, 2, 3])]:
        table.release_before(position)
        assert table.blocks == blocks
    assert table.slots(8, 10) == [8, 9]
    child = table.fork(14)
    assert child.blocks == table.blocks and pool.refs == [0, 0, 2, 2, 0, 0, 0, 0]
    table.free()
    child.free()
    assert pool.free_blocks == 8
    with pytest.raises(ValueError, match="token 4 was given back: it lies behind the window"):
        BlockTable(pool, [None, None, 2]).slots(7, 9)
    with pytest.raises(ValueError, match="token 4 was given back"):
        BlockTable(pool, [None, None, 2]).reserve(7, 9)


def test_what_nobody_knows_is_taken_first_and_then_the_least_recently_freed():
    """Blocks 0, 1 and 3 are kept, as an index would have it: 3 is freed first, then 1 and 0 of a text, leaf first."""
    pool, reused = BlockPool(5, 4), []
    pool.on_reuse = lambda block: (reused.append(block), pool.kept.remove(block))
    text, other = table_of(pool, 12), table_of(pool, 4)
    text.blocks, other.blocks = [0, 1, 2], [3]
    pool.kept |= {0, 1, 3}
    other.free()
    text.free()
    assert list(pool.queue) == [2, 4, 3, 1, 0] and pool.evictable == 3
    pool.share(1)
    assert list(pool.queue) == [2, 4, 3, 0] and pool.evictable == 2
    pool.release(1)
    assert [pool.take() for _ in range(5)] == [2, 4, 3, 0, 1] and reused == [3, 0, 1] and pool.evictable == 0


def test_a_block_the_index_knows_is_copied_before_it_is_written():
    pool = BlockPool(4, 4)
    table = table_of(pool, 8)
    pool.kept.add(1)
    assert table.shortage(7, 8) == 1 and table.reserve(7, 8) == [(1, 2)]
    assert table.blocks == [0, 2] and pool.refs == [1, 0, 1, 0] and pool.evictable == 1


def test_too_few_blocks_are_refused_with_the_numbers_and_nothing_changes():
    pool = BlockPool(3, 4)
    table = table_of(pool, 6)
    other = table.fork(6)
    before = list(pool.refs), list(pool.queue), list(other.blocks)
    with pytest.raises(OutOfBlocks, match="2 free blocks of 4 tokens are needed, and 1 of 3 are free"):
        other.reserve(6, 9)  # one copy and one more
    assert (pool.refs, list(pool.queue), other.blocks) == before
    other.reserve(6, 8)
    with pytest.raises(OutOfBlocks, match="1 free blocks of 4 tokens are needed, and 0 of 3"):
        pool.take()


@pytest.mark.parametrize("name", ["num_blocks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4"])
def test_a_pool_needs_blocks_and_a_block_tokens(name, value):
    with pytest.raises(ValueError, match=f"{name}=.* must be a whole number of at least 1"):
        BlockPool(**{"num_blocks": 4, "block_size": 4, name: value})


def test_bad_calls_say_what_was_wrong():
    pool = BlockPool(4, 4)
    table = table_of(pool, 4)
    for block in (-1, 4):  # Python would take -1 for the last one
        for call in (pool.share, pool.release):
            with pytest.raises(ValueError, match=f"Block {block} is not in this pool, which has blocks 0 to 3"):
                call(block)
    with pytest.raises(ValueError, match="Block 3 is free and holds nothing to share"):
        pool.share(3)
    with pytest.raises(ValueError, match="Block 3 is free already"):
        pool.release(3)
    with pytest.raises(ValueError, match=r"fork\(5\): this table has room for 4 tokens"):
        table.fork(5)
    with pytest.raises(ValueError, match="Token 4 has no block"):
        table.slots(3, 5)
    for start, stop in [(-1, 2), (3, 2)]:
        for call in (table.slots, table.reserve, table.shortage):
            with pytest.raises(ValueError, match=f"start={start}, stop={stop}"):
                call(start, stop)
    for call in (table.fork, table.truncate):
        with pytest.raises(ValueError, match="length=-1"):
            call(-1)
    assert pool.refs == [1, 0, 0, 0] and table.blocks == [0]
