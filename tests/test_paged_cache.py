"""The cache in pages against the model without a cache, and against the other caches."""

import pytest
import torch
from reference import feed, hugging_face, in_chunks, largest_difference, random_tokens, small_config, small_model

import kvcourse as kv
import kvcourse.caches.block_attention as block_attention
from kvcourse.caches.paged import PagedCache

LENGTHS = (3, 40, 75)


@pytest.fixture(scope="module")
def model():
    return small_model()


def new_cache(model, **options):
    """A cache whose pool is full of NaN."""
    cache = PagedCache(model.config, dtype=model.dtype, device="cpu", **options)
    cache.pages.fill(torch.nan)
    return cache


def alone(model, row):
    return model(torch.tensor([row]))[0]


def texts(lengths=LENGTHS):
    return [random_tokens(n, seed=n).tolist() for n in lengths]


def blocks_used(cache):
    return [sum(block is not None for block in table.blocks) for table in cache.tables]


# Every step equals the model without a cache


@pytest.mark.parametrize("way", ["gather", "direct"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 8, (4, None)])
@pytest.mark.parametrize("size", [7, 16, 75])
def test_rows_of_unequal_length_equal_each_row_alone(way, block_size, window, size):
    model = small_model(small_config(window=window))
    cache = new_cache(model, batch_size=3, block_size=block_size, max_len=80, attention=way)
    for row, logits in zip(texts(), feed(model, cache, texts(), in_chunks(75, size)), strict=True):
        assert largest_difference(logits, alone(model, row)) < 1e-4
    assert cache.lengths == list(LENGTHS) and cache.length == 75


@pytest.mark.parametrize("way", ["gather", "direct"])
@pytest.mark.parametrize("window", [None, 8])
def test_rows_of_one_token_after_the_other(way, window):
    model = small_model(small_config(window=window))
    cache = new_cache(model, batch_size=2, block_size=4, attention=way)
    rows = texts((40, 17))
    for row, logits in zip(rows, feed(model, cache, rows, [1] * 40), strict=True):
        assert largest_difference(logits, alone(model, row)) < 1e-4


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_rows_of_equal_length(heads):
    model = small_model(small_config(n_kv_heads=heads))
    cache, rows = new_cache(model, batch_size=2), [random_tokens(60, seed=i).tolist() for i in (1, 2)]
    for row, logits in zip(rows, feed(model, cache, rows, [30, 9] + [1] * 21), strict=True):
        assert largest_difference(logits, alone(model, row)) < 1e-4


def test_logits_equal_transformers(model):
    row, cache = random_tokens(96), new_cache(model)
    (logits,) = feed(model, cache, [row.tolist()], [30] + [1] * 66)
    assert largest_difference(logits, hugging_face(model)(row[None]).logits[0]) < 1e-4


@pytest.mark.parametrize("broken", ["window", "tables", "new blocks"])
def test_what_goes_wrong_shows(monkeypatch, broken):
    """The partner of the tests above: a window one too wide, two rows that swap their blocks, blocks that are not
    cleared when a row begins them."""
    model = small_model(small_config(window=8 if broken == "window" else None))
    cache, rows = new_cache(model, batch_size=2, block_size=4), texts((40, 17))
    feed(model, cache, [row[:9] for row in rows], [9])
    if broken == "window":
        seen = block_attention.visible
        monkeypatch.setattr(block_attention, "visible", lambda q, k, window: seen(q, k, window + 1))
    elif broken == "tables":
        cache.tables.reverse()
    else:
        monkeypatch.setattr("kvcourse.caches.packed.PackedStep.clear_new_blocks", lambda step, pieces: None)
    rest = feed(model, cache, [row[9:] for row in rows], [1] * 31)
    assert any(
        not largest_difference(logits, alone(model, row)[9:]) < 0.1 for row, logits in zip(rows, rest, strict=True)
    )


# generate


@pytest.mark.parametrize("window", [None, 8, (4, None)])
@pytest.mark.parametrize("chunk", [None, 5])
def test_generate_writes_what_it_writes_without_a_cache(window, chunk):
    """Float64: another order of summing cannot change which token wins."""
    model = small_model(small_config(window=window), dtype=torch.float64)
    prompts = texts((3, 30, 1))
    cache = new_cache(model, batch_size=3, block_size=4, max_len=60)
    made = kv.generate(model, prompts, 20, cache=cache, prefill_chunk=chunk)
    assert [g.ids for g in made] == [g.ids for g in kv.generate_naive(model, prompts, 20)]
    assert cache.lengths == [22, 49, 20]
    cache.reset()
    assert cache.pool.free_blocks == cache.pool.num_blocks
    assert kv.generate(model, prompts, 20, cache=cache)[1].ids == made[1].ids


def test_a_text_that_stops_early_takes_no_more_blocks():
    model = small_model(dtype=torch.float64)
    prompts = texts((3, 30))
    first, second = kv.generate(model, prompts, 20)
    stop = next(token for token in first.ids if token not in second.ids)
    cache = new_cache(model, batch_size=2, block_size=4)
    stopped, other = kv.generate(model, prompts, 20, cache=cache, stop_ids=[stop])
    assert stopped.ids == first.ids[: first.ids.index(stop) + 1] and other.ids == second.ids
    assert blocks_used(cache) == [-(-(3 + len(stopped.ids) - 1) // 4), 13]


# Blocks


def test_blocks_are_taken_as_texts_grow(model):
    cache = new_cache(model, batch_size=3, block_size=4, num_blocks=24)
    feed(model, cache, texts((3, 10, 4)), [10])
    assert blocks_used(cache) == [1, 3, 1] and cache.pool.free_blocks == 19
    feed(model, cache, texts((1, 3, 1)), [3])
    assert blocks_used(cache) == [1, 4, 2] and cache.lengths == [4, 13, 5]


def test_a_pool_smaller_than_all_rows_at_their_longest(model):
    """Texts of 3, 40 and 75 tokens fill 1 + 10 + 19 blocks of 4; three rows of 80 would take 60."""
    cache = new_cache(model, batch_size=3, block_size=4, num_blocks=30, max_len=80)
    for row, logits in zip(texts(), feed(model, cache, texts(), in_chunks(75, 9)), strict=True):
        assert largest_difference(logits, alone(model, row)) < 1e-4
    assert cache.pool.free_blocks == 0


def test_too_few_blocks_are_refused_before_anything_is_stored(model):
    """Five blocks of 4: two rows of 6 tokens hold two each. To get to 9, both need a third: the first would find one,
    the second none."""
    cache = new_cache(model, batch_size=2, block_size=4, num_blocks=5)
    rows = texts((9, 12))
    feed(model, cache, [row[:6] for row in rows], [6])
    before, tables = cache.pages.keys.nan_to_num(), [list(table.blocks) for table in cache.tables]
    with pytest.raises(ValueError, match="1 free blocks of 4 tokens are needed, and 0 of 5.*with a larger num_blocks"):
        feed(model, cache, [row[6:9] for row in rows], [3])
    assert cache.lengths == [6, 6] and [table.blocks for table in cache.tables] == tables
    held = tables[0] + tables[1]
    assert torch.equal(cache.pages.keys.nan_to_num()[:, held], before[:, held]) and cache.pool.free_blocks == 1
    rest = feed(model, cache, [rows[0][6:8], rows[1][6:]], [6])
    for row, logits in zip((rows[0][:8], rows[1]), rest, strict=True):
        assert largest_difference(logits, alone(model, row)[6:]) < 1e-4


def test_blocks_behind_the_window_are_given_back():
    """A window of 8: the token at position p sees p - 7 to p, which lie in at most 3 blocks of 4."""
    model = small_model(small_config(window=(3, 8)))
    cache, row, logits = new_cache(model, block_size=4, num_blocks=5), texts()[2], []
    for start in range(75):
        logits += feed(model, cache, [row[start : start + 1]], [1])
        assert blocks_used(cache) == [start // 4 - max(0, start - 7) // 4 + 1]
        given_back = [b for b in range(5) if cache.pool.refs[b] == 0]
        cache.pages.fill(torch.nan, given_back)
    assert largest_difference(torch.cat(logits), alone(model, row)) < 1e-4


def test_one_layer_without_a_window_keeps_every_block():
    model = small_model(small_config(window=(8, None)))
    cache = new_cache(model, block_size=4)
    feed(model, cache, [texts()[2]], in_chunks(75, 5))
    assert blocks_used(cache) == [19]


# Taking tokens back, and errors


def test_truncate_gives_blocks_back(model):
    rows = texts((26, 18))
    cache = new_cache(model, batch_size=2, block_size=4)
    feed(model, cache, [rows[0][:20], rows[1][:12]], [20])
    cache.pages.values[:, cache.tables[0].blocks[2], :, 2:] = torch.nan  # tokens 10 and 11, which will be forgotten
    cache.truncate(10)
    assert cache.lengths == [10, 10] and blocks_used(cache) == [3, 3]
    for row, logits in zip(rows, feed(model, cache, [row[10:18] for row in rows], [1, 7]), strict=True):
        assert largest_difference(logits, alone(model, row[:18])[10:]) < 1e-4
    cache.truncate(100)  # more than it holds: nothing to forget
    assert cache.lengths == [18, 18]
    with pytest.raises(ValueError, match="length=-1"):
        cache.truncate(-1)


def test_truncate_behind_the_window_is_refused():
    model = small_model(small_config(window=8))
    row, cache = texts()[1], new_cache(model, block_size=4)
    feed(model, cache, [row[:29]], [1] * 29)  # blocks from token 20 on are left
    for length in (3, 20, 26):
        with pytest.raises(ValueError, match=f"cannot go back from 29 tokens to {length}.*prefill the first {length}"):
            cache.truncate(length)
    cache.truncate(27)  # the next token sees 20 to 27
    (logits,) = feed(model, cache, [row[27:]], [1] * 13)
    assert cache.length == 40 and largest_difference(logits, alone(model, row)[27:]) < 1e-4
    cache.truncate(0)
    assert cache.pool.used_blocks == 0


def test_truncate_to_the_middle_of_a_block_that_was_given_back():
    """A window of 1: the next token sees no earlier one, but it goes where they were."""
    model = small_model(small_config(window=1))
    row, cache = texts()[1], new_cache(model, block_size=4)
    feed(model, cache, [row[:18]], [17, 1])
    for length in (14, 7):
        with pytest.raises(ValueError, match=f"cannot go back from 18 tokens to {length}"):
            cache.truncate(length)
    cache.truncate(12)  # the next token begins a block
    (logits,) = feed(model, cache, [row[12:]], [1] * 28)
    assert largest_difference(logits, alone(model, row)[12:]) < 1e-4


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("poison", [True, False])
def test_an_error_inside_a_step_leaves_the_cache_as_it_was(monkeypatch, window, poison):
    model = small_model(small_config(window=window))
    row, cache = texts()[1], new_cache(model, block_size=4)
    feed(model, cache, [row[:22]], [20, 2])
    used = blocks_used(cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
        if poison:
            patch.setattr(model.embed_tokens, "forward", lambda tokens: torch.full((*tokens.shape, 64), torch.nan))
        with pytest.raises(ZeroDivisionError):
            model(random_tokens(1, 9, seed=9), cache=cache)
    assert cache.lengths == [22] and cache.pool.free_blocks == cache.pool.num_blocks - sum(blocks_used(cache))
    assert blocks_used(cache) == used
    (rest,) = feed(model, cache, [row[22:]], [1, 17])
    assert largest_difference(rest, alone(model, row)[22:]) < 1e-4


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_latest_step_added_can_be_taken_back_also_after_one_that_failed(monkeypatch, fails):
    model = small_model(small_config(window=4))
    row, cache = texts()[1], new_cache(model, block_size=1)
    feed(model, cache, [row[:10]], [6, 4])
    if fails:
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
            model(random_tokens(1, 1), cache=cache)
    cache.truncate(6)
    (rest,) = feed(model, cache, [row[6:]], [1] * 34)
    assert largest_difference(rest, alone(model, row)[6:]) < 1e-4


def test_reset_forgets_even_poison(model):
    cache = new_cache(model, batch_size=2, block_size=4)
    feed(model, cache, texts((20, 20)), [20])
    cache.pages.fill(torch.nan)
    cache.reset()
    assert cache.lengths == [0, 0] and cache.pool.used_blocks == 0
    for row, logits in zip(texts((5, 18)), feed(model, cache, texts((5, 18)), [18]), strict=True):
        assert largest_difference(logits, alone(model, row)) < 1e-4


def test_padding_that_is_no_number_spoils_nothing(model, monkeypatch):
    """Token 0 fills up the rows; here it has an embedding of NaN."""
    rows = [[max(1, token) for token in row] for row in texts()]
    right = [alone(model, row) for row in rows]
    embed = model.embed_tokens.forward
    spoil = lambda tokens: embed(tokens).masked_fill((tokens == 0)[..., None], torch.nan)  # noqa: E731
    monkeypatch.setattr(model.embed_tokens, "forward", spoil)
    for logits, ours in zip(feed(model, new_cache(model, batch_size=3), rows, [30, 45]), right, strict=True):
        assert largest_difference(logits, ours) < 1e-4


# Bytes, and what is refused


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, 256),
        ({"batch_size": 3, "max_len": 40}, 3 * 48),
        ({"batch_size": 3, "max_len": 40, "block_size": 4}, 120),
        ({"batch_size": 3, "num_blocks": 9, "block_size": 5}, 45),
    ],
)
def test_bytes_are_those_of_the_formula(settings, slots):
    config = small_config()
    cache = PagedCache(config, **settings, dtype=torch.bfloat16, device="cpu")
    by_hand = slots * 2 * 2 * 2 * 8 * 2  # slots x layers x (K and V) x KV heads x d_head x bytes
    assert cache.nbytes == by_hand == PagedCache.bytes_for(config, **settings, dtype=torch.bfloat16)


def test_bad_input_is_refused(model):
    for bad in ({"max_len": 0}, {"batch_size": 0}, {"num_blocks": 0}, {"block_size": 0}, {"block_size": 1.5}):
        for make in (PagedCache, PagedCache.bytes_for):
            with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
                make(model.config, **bad)
    with pytest.raises(ValueError, match='must be "gather" or "direct"'):
        PagedCache(model.config, attention="fast")
    cache = new_cache(model, max_len=16)
    feed(model, cache, [random_tokens(16).tolist()], [15, 1])
    with pytest.raises(ValueError, match="room for 16 tokens a row.*make a PagedCache with a larger max_len"):
        model(random_tokens(1, 1), cache=cache)
    with pytest.raises(ValueError, match="the cache has room for 16"):
        kv.generate(model, [1, 2], 4, cache=cache)
    with pytest.raises(ValueError, match="holds 2 rows of text, but 1 were given"):
        model(random_tokens(1, 3), cache=new_cache(model, batch_size=2))
