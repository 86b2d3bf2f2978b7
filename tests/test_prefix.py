"""The prefix index against a dict of all known prefixes, hand-worked trees, and hashes that collide."""

import random
from itertools import takewhile

import pytest
from block_texts import IDENTITY, Texts

import kvcourse.serving.prefix as prefix_module
from kvcourse.serving.blocks import BlockPool, BlockTable
from kvcourse.serving.prefix import Identity, PrefixIndex


def compute(index, tokens, step=None):
    """The table of a text that was just computed, `step` tokens at a time; and the blocks found at the start."""
    found = index.match(tokens)
    table = BlockTable(index.pool, found)
    start = len(found) * index.pool.block_size
    while start < len(tokens):
        stop = min(start + (step or len(tokens)), len(tokens))
        table.reserve(start, stop)
        index.publish(tokens, table.blocks, start, stop)
        start = stop
    return table, found


def new_index(num_blocks=16, block_size=4):
    return PrefixIndex(BlockPool(num_blocks, block_size), IDENTITY)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_blocks", [6, 20])
def test_after_each_of_2000_random_operations_match_is_that_of_a_dict_of_prefixes(num_blocks, block_size):
    """Known failures 34 and 38: under evictions, with windows and copies, and with every text read back."""
    texts = Texts(num_blocks, block_size, prefix=True)
    texts.run(2000)
    assert min(texts.seen[name] for name in ("hits", "evictions", "preemptions")) > 20
    assert (texts.seen["copies"] > 20) == (block_size > 1)
    texts.end_all()
    assert texts.pool.evictable == len(texts.index) > 0


def match_everything(index, tokens):
    return MATCH(index, tokens + [0])  # would leave no token to compute


def match_without_holding(index, tokens):
    return index.lookup(tokens)


def publish_before_it_is_full(index, tokens, blocks, start, stop):
    size = index.pool.block_size
    stop = min(index.pool.blocks_for(stop) * size, len(blocks) * size)
    PUBLISH(index, tokens + [0] * size, blocks, start, stop)


def forget_nothing(index, block):
    pass


def entry_by_its_own_tokens(index, parent, tokens, add=False):
    return ENTRY(index, index._root, tokens, add)


def share_without_leaving_evictable(pool, block):
    pool.queue.pop(block, None)
    pool.refs[block] += 1


def release_without_regard_to_kept(pool, block):
    kept, pool.kept = pool.kept, set()
    RELEASE(pool, block)
    pool.kept = kept


def reserve_writing_to_known_blocks(table, start, stop):
    kept, table.pool.kept = table.pool.kept, set()
    try:
        return RESERVE(table, start, stop)
    finally:
        table.pool.kept = kept


MATCH, PUBLISH, ENTRY = PrefixIndex.match, PrefixIndex.publish, PrefixIndex._entry
RELEASE, RESERVE = BlockPool.release, BlockTable.reserve
BROKEN = {
    match_everything: (PrefixIndex, "match"),
    match_without_holding: (PrefixIndex, "match"),
    publish_before_it_is_full: (PrefixIndex, "publish"),
    forget_nothing: (PrefixIndex, "forget"),
    entry_by_its_own_tokens: (PrefixIndex, "_entry"),
    share_without_leaving_evictable: (BlockPool, "share"),
    release_without_regard_to_kept: (BlockPool, "release"),
    reserve_writing_to_known_blocks: (BlockTable, "reserve"),
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_random_operations_go_red_when_a_part_is_broken(monkeypatch, broken):
    monkeypatch.setattr(*BROKEN[broken], broken)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        Texts(12, 4, prefix=True).run(2000)


@pytest.mark.parametrize(("n", "cached"), [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_prompt_that_is_known_whole_still_has_a_token_to_compute(n, cached):
    """Known failure 30: the scores of the last token give the next one, so it is computed again."""
    index, tokens = new_index(), list(range(n))
    first, found = compute(index, tokens)
    assert found == [] and (index.queries, index.hits) == (n, 0)
    published = first.blocks[: n // 4]
    first.free()
    second, found = compute(index, tokens)
    assert len(found) * 4 == cached and second.blocks[: len(found)] == found == published[: len(found)]
    assert (index.queries, index.hits) == (2 * n, cached)
    assert index.lookup([*tokens, 99]) == published  # with one more token to compute, all full blocks serve


def test_match_is_the_longest_common_beginning_rounded_down_to_blocks():
    """Known failure 38: no evictions here, so what is known is what was ever computed, compared token by token."""
    rng, index, known = random.Random(0), new_index(4000, 3), []
    longest = 0
    for _ in range(500):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        common = [len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, old)))) for old in known]  # noqa: B905
        expected = min(max(common, default=0), len(tokens) - 1) // 3
        table, found = compute(index, tokens, step=rng.randint(1, 20))
        assert len(found) == expected
        longest = max(longest, expected)
        known.append(tokens)
        if rng.random() < 0.8:
            table.free()
    assert longest >= 3


@pytest.mark.parametrize("step", [1, 3, 4, 5, None])
def test_only_full_blocks_become_known_and_no_sooner(step):
    """Known failure 31: 10 tokens in blocks of 4 make two known blocks, the first once token 3 is there."""
    index, tokens = new_index(), list(range(10))
    table = BlockTable(index.pool)
    for start in range(0, 10, step or 10):
        stop = min(start + (step or 10), 10)
        table.reserve(start, stop)
        assert len(index) == start // 4
        index.publish(tokens, table.blocks, start, stop)
    assert index.lookup(tokens) == table.blocks[:2] and index.pool.kept == set(table.blocks[:2])


def test_a_different_token_at_the_front_shares_nothing():
    index = new_index()
    compute(index, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(index.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 2
    assert index.lookup([0, 2, 3, 4, 5, 6, 7, 8, 9]) == []
    assert index.lookup([5, 6, 7, 8, 9]) == []  # the same tokens after others are other keys and values


def test_leaves_go_before_what_they_grow_from_and_the_oldest_first():
    """A trunk of one block with two branches; the branch used again last goes last, and the trunk after both."""
    index = new_index(num_blocks=5, block_size=2)
    left, right = [1, 1, 2, 2, 0], [1, 1, 3, 3, 0]
    tables = [compute(index, text)[0] for text in (left, right)]
    trunk, (left_leaf, right_leaf) = tables[0].blocks[0], [table.blocks[1] for table in tables]
    assert tables[1].blocks[0] == trunk
    for table in tables:
        table.free()
    compute(index, left)[0].free()
    taken = [index.pool.take() for _ in range(5)]
    assert taken[2:] == [right_leaf, left_leaf, trunk] and len(index) == 0


def test_a_block_in_use_is_never_evicted():
    index = new_index(num_blocks=3, block_size=2)
    table, _ = compute(index, [1, 1, 2])
    assert index.pool.take() not in table.blocks and index.pool.free_blocks == 0
    assert index.lookup([1, 1, 2]) == table.blocks[:1]


def test_contents_known_under_another_block_stay_there_and_the_chain_goes_on():
    """Two texts with the same 4 tokens, computed side by side, so each has a block of its own for them."""
    index = new_index(block_size=2)
    a, b = [1, 1, 2, 2, 3, 3, 0], [1, 1, 2, 2, 4, 4, 0]
    tables = [BlockTable(index.pool) for _ in "ab"]
    for tokens, table in zip((a, b), tables, strict=True):
        table.reserve(0, 7)
        index.publish(tokens, table.blocks, 0, 4)
    for tokens, table in zip((a, b), tables, strict=True):
        index.publish(tokens, table.blocks, 4, 7)
    assert index.lookup(a) == tables[0].blocks[:3]
    assert index.lookup(b) == [*tables[0].blocks[:2], tables[1].blocks[2]] and len(index) == 4


def test_what_follows_an_evicted_block_is_found_again_once_that_is_computed_again():
    """A window gives blocks back from the front, so the beginning of a text can go before its end."""
    index = new_index(num_blocks=4, block_size=2)
    tokens = [1, 1, 2, 2, 3, 3, 0]
    table, _ = compute(index, tokens)
    table.release_before(2)
    assert index.pool.take() == 0 and index.lookup(tokens) == []
    index.pool.release(0)
    again = BlockTable(index.pool)
    again.reserve(0, 2)
    index.publish(tokens, again.blocks, 0, 2)
    assert index.lookup(tokens) == [again.blocks[0], *table.blocks[1:3]]


@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_the_last_entry_saves_the_way_back_and_changes_nothing(step):
    """Two equal texts side by side: the second one's blocks are never known, so each way back is to the root."""
    indexes = [new_index(), new_index()]
    tokens, known = list(range(20)), None
    for index, remembers in zip(indexes, (False, True), strict=True):
        compute(index, tokens[:9])
        table = BlockTable(index.pool)
        for start in range(0, 20, step):
            stop = min(start + step, 20)
            table.reserve(start, stop)
            entry = index.publish(tokens, table.blocks, start, stop, known if remembers else None)
            known = entry if remembers else None
    assert known.tokens == tuple(tokens[16:]) and known.block == table.blocks[4]
    assert indexes[0].lookup([*tokens, 0]) == indexes[1].lookup([*tokens, 0]) and len(indexes[1]) == 5


def test_blocks_behind_the_window_are_skipped_and_those_after_them_known():
    index = new_index(block_size=2)
    tokens = [1, 1, 2, 2, 3, 3, 0]
    table = BlockTable(index.pool)
    table.reserve(0, 7)
    table.release_before(4)
    index.publish(tokens, table.blocks, 0, 7)
    assert len(index) == 1 and index.lookup(tokens) == []
    other, _ = compute(index, tokens[:5])
    assert index.lookup(tokens) == [*other.blocks[:2], table.blocks[2]]


def test_nothing_is_remembered_of_blocks_that_are_gone():
    """Also a chain of 20,000 blocks, which must not go by recursion."""
    index = new_index(num_blocks=20_000, block_size=1)
    table, _ = compute(index, [0] * 20_000)
    assert len(index) == len(index._entries) == 20_000
    table.free()
    for _ in range(20_000):
        index.pool.take()
    assert len(index) == len(index._entries) == 0 and not index.pool.kept


COLLIDING = {"all": lambda parent_key, tokens: b"", "the same tokens": lambda parent_key, tokens: bytes(tokens)}


@pytest.mark.parametrize(("collide", "found"), [("all", [0]), ("the same tokens", [0, 1])])
def test_a_hash_that_collides_never_hands_out_another_texts_blocks(monkeypatch, collide, found):
    """The first text lies in blocks 0 and 1. Of the others only what begins like it is found, and it stays known."""
    monkeypatch.setattr(prefix_module, "chain", COLLIDING[collide])
    index, texts = new_index(block_size=2), [(1, 1, 2, 2, 0), (2, 2, 1, 1, 0), (1, 1, 1, 1, 0)]
    for text in texts:
        table = BlockTable(index.pool)
        table.reserve(0, 5)
        index.publish(text, table.blocks, 0, 5)
        assert [index.lookup(text) for text in texts] == [found, [], [0]]


def test_without_comparing_it_would(monkeypatch):
    monkeypatch.setattr(prefix_module, "chain", COLLIDING["all"])
    index = new_index(block_size=2)
    compute(index, [1, 1, 0])
    assert index.lookup([2, 2, 0]) == []
    monkeypatch.setattr(PrefixIndex, "_entry", lambda index, parent, tokens: index._entries.get(b""))
    assert index.lookup([2, 2, 0]) == [0]


@pytest.mark.parametrize(
    "other",
    [
        Identity("other", "float64"),
        Identity("none", "float32"),
        Identity("none", "float64", window=8),
        Identity("none", "float64", window=(8, None)),
        Identity("none", "float64", quantization="int8"),
    ],
)
def test_keys_carry_all_that_keys_and_values_depend_on(other):
    keys = []
    for identity in (IDENTITY, IDENTITY, other):
        index = PrefixIndex(BlockPool(8, 2), identity)
        compute(index, [1, 2, 3, 4])
        keys.append(set(index._entries))
    assert keys[0] == keys[1] and keys[0].isdisjoint(keys[2])


def test_bad_calls_say_what_was_wrong():
    index = new_index(block_size=2)
    with pytest.raises(ValueError, match="has a prefix index already"):
        PrefixIndex(index.pool, IDENTITY)
    for start, stop, blocks in [(-1, 2, [0, 1]), (3, 2, [0, 1]), (0, 5, [0, 1]), (0, 4, [0])]:
        with pytest.raises(
            ValueError, match=rf"publish\(start={start}, stop={stop}\) with 4 tokens and {len(blocks)} b"
        ):
            index.publish([1, 2, 3, 4], blocks, start, stop)
    assert len(index) == 0 and not index.pool.kept
