"""Pages and the packed row over them, against each text alone in the model without a cache."""

import random

import pytest
import torch
from reference import hugging_face, largest_difference, random_tokens, small_config, small_model

import kvcourse as kv
import kvcourse.caches.block_attention as block_attention
from kvcourse.caches.packed import PackedCache, PackedStep, Piece
from kvcourse.caches.pages import Pages
from kvcourse.generation import pad

LENGTHS = (3, 23, 40)
WAYS = ["gather", "direct"]


@pytest.fixture(scope="module")
def model():
    return small_model(dtype=torch.float64)


def new_pages(model, num_blocks=64, block_size=4, fill=torch.nan):
    """A pool with NaN in every slot: whoever reads what nobody wrote shows."""
    pages = Pages(model.config, num_blocks, block_size, model.dtype, "cpu")
    pages.fill(fill)
    return pages


def scattered_tables(pages, lengths, seed=0):
    """Block tables for texts of these lengths, anywhere in the pool."""
    blocks = random.Random(seed).sample(range(pages.num_blocks), pages.num_blocks)
    return [[blocks.pop() for _ in range(-(-length // pages.block_size))] for length in lengths]


def random_steps(lengths, seed=0):
    """Steps until all texts are done: each a shuffled list of (text, new tokens), single tokens and longer pieces."""
    choose, left = random.Random(seed), list(lengths)
    while any(left):
        unfinished = [i for i, n in enumerate(left) if n]
        chosen = choose.sample(unfinished, choose.randint(1, len(unfinished)))
        step = [(i, min(left[i], choose.choice([1, 1, 1, 2, 5, 9]))) for i in chosen]
        for i, new in step:
            left[i] -= new
        yield step


def run(model, packed, rows, tables, steps, held=None):
    """Logits of all positions of each text, whose first `held` tokens are in pages already."""
    held = [0] * len(rows) if held is None else list(held)
    out = [[] for _ in rows]
    for step in steps:
        packed.pieces = [Piece(tables[i], held[i], held[i] + new) for i, new in step]
        tokens = torch.tensor([[token for i, new in step for token in rows[i][held[i] : held[i] + new]]])
        for (i, new), logits in zip(step, model(tokens, cache=packed)[0].split([new for _, new in step]), strict=True):
            out[i].append(logits)
            held[i] += new
    return [torch.cat(logits) for logits in out if logits]


def alone(model, row):
    return model(torch.tensor([row]))[0]


def texts(lengths=LENGTHS):
    return [random_tokens(n, seed=n).tolist() for n in lengths]


# The packed row equals each text alone


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 8, (4, None), (3, 8)])
def test_texts_in_one_row_equal_each_text_alone(way, block_size, window):
    """Prompts in pieces, single tokens and texts that come and go, in any order, in a pool full of NaN."""
    model = small_model(small_config(window=window), dtype=torch.float64)
    pages = new_pages(model, block_size=block_size, num_blocks=80)
    tables = scattered_tables(pages, LENGTHS)
    logits = run(model, PackedCache(pages, way), texts(), tables, random_steps(LENGTHS))
    for row, got in zip(texts(), logits, strict=True):
        assert largest_difference(got, alone(model, row)) < 1e-10


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_shared_heads(way, heads):
    model = small_model(small_config(n_kv_heads=heads), dtype=torch.float64)
    pages = new_pages(model)
    tables = scattered_tables(pages, LENGTHS)
    logits = run(model, PackedCache(pages, way), texts(), tables, random_steps(LENGTHS, seed=heads))
    for row, got in zip(texts(), logits, strict=True):
        assert largest_difference(got, alone(model, row)) < 1e-10


@pytest.mark.parametrize("way", WAYS)
def test_logits_equal_transformers(way):
    model = small_model(small_config(window=8))
    rows, pages = texts((96, 90)), new_pages(model)
    steps = [[(0, 30)], [(1, 29), (0, 1)], *[[(0, 1), (1, 1)]] * 61, [(0, 4)]]
    logits = run(model, PackedCache(pages, way), rows, scattered_tables(pages, (96, 90)), steps)
    for row, got in zip(rows, logits, strict=True):
        assert largest_difference(got, hugging_face(model)(torch.tensor([row])).logits[0]) < 1e-4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tile", [1, 8, 30])
def test_tiles_of_any_size(model, monkeypatch, way, tile):
    monkeypatch.setattr(block_attention, "TILE", tile)
    pages, steps = new_pages(model), [[(0, 2), (1, 22), (2, 39)], [(0, 1), (1, 1), (2, 1)]]
    logits = run(model, PackedCache(pages, way), texts(), scattered_tables(pages, LENGTHS), steps)
    for row, got in zip(texts(), logits, strict=True):
        assert largest_difference(got, alone(model, row)) < 1e-10


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("broken", ["window", "table", "new block", "slot"])
def test_what_goes_wrong_shows(model, monkeypatch, way, broken):
    """The partner of the tests above: a window one too wide, the table of another text, blocks not cleared when a
    text begins them, tokens stored one slot further on."""
    windowed = small_model(small_config(window=8), dtype=torch.float64)
    pages = new_pages(windowed)
    tables, seen = scattered_tables(pages, LENGTHS), block_attention.visible
    if broken == "window":
        monkeypatch.setattr(block_attention, "visible", lambda q, k, window: seen(q, k, window + 1))
    elif broken == "table":
        tables[1] = tables[2]
    elif broken == "new block":
        monkeypatch.setattr(PackedStep, "clear_new_blocks", lambda *args: None)
    else:
        slots = Pages.slots
        monkeypatch.setattr(Pages, "slots", lambda pages, blocks, offsets: slots(pages, blocks, offsets ^ 1))
    logits = run(windowed, PackedCache(pages, way), texts(), tables, random_steps(LENGTHS))
    wrong = [not largest_difference(got, alone(windowed, row)) < 0.1 for row, got in zip(texts(), logits, strict=True)]
    assert any(wrong)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_without_a_cache(way, dtype):
    half, exact, row = small_model(dtype=dtype), small_model(), texts()[2]
    pages = new_pages(half)
    steps = [[(0, 20)], *[[(0, 1)]] * 20]
    (got,) = run(half, PackedCache(pages, way), [row], scattered_tables(pages, [40]), steps)
    without = largest_difference(alone(half, row), alone(exact, row))
    assert got.dtype == dtype and largest_difference(got, alone(exact, row)) < 2 * without


# Shared pages


@pytest.mark.parametrize("way", WAYS)
def test_texts_that_begin_alike_share_blocks(model, way):
    """Two texts share their first 8 tokens, two blocks of 4; the third goes on from token 10 in a copy of the third
    block, and writes what the first, which goes on too, must not see."""
    first = random_tokens(20).tolist()
    rows = [first, first[:8] + random_tokens(10, seed=2).tolist(), first[:10] + random_tokens(9, seed=3).tolist()]
    pages = new_pages(model)
    packed = PackedCache(pages, way)
    tables = [[5, 9, 2, 7, 30], [5, 9, 11, 12, 13], [5, 9, 20, 21, 22]]
    run(model, packed, rows, tables, [[(0, 10)]])
    pages.copy([(2, 20)])
    steps = [[(1, 5), (0, 1), (2, 1)], [(2, 7), (1, 1), (0, 8)], [(0, 1), (1, 4), (2, 1)]]
    logits = run(model, packed, rows, tables, steps, held=[10, 8, 10])
    for row, start, got in zip(rows, [10, 8, 10], logits, strict=True):
        assert largest_difference(got, alone(model, row)[start:]) < 1e-10


def test_writing_to_a_shared_block_shows(model):
    """The partner: without the copy, one text reads what the other wrote."""
    first = random_tokens(20).tolist()
    rows = [first, first[:10] + random_tokens(9, seed=3).tolist()]
    pages = new_pages(model)
    packed, tables = PackedCache(pages), [[5, 9, 2, 7, 30], [5, 9, 2, 21, 22]]
    run(model, packed, rows, tables, [[(0, 10)]])
    logits = run(model, packed, rows, tables, [[(0, 1), (1, 1)], [(0, 9), (1, 8)]], held=[10, 10])
    assert largest_difference(logits[0], alone(model, rows[0])[10:]) > 0.1


@pytest.mark.parametrize("way", WAYS)
def test_blocks_behind_all_windows_may_be_gone(way):
    model = small_model(small_config(window=(3, 8)), dtype=torch.float64)
    row, pages = texts()[2], new_pages(model)
    packed, (table,) = PackedCache(pages, way), scattered_tables(pages, [40])
    logits, held = [], 0
    for new in [10, 6, *[1] * 24]:
        for i in range(max(0, held - 7) // 4):  # the token at `held` sees the 7 before it
            if table[i] is not None:
                pages.fill(torch.nan, [table[i]])
                table[i] = None
        logits += run(model, packed, [row], [table], [[(0, new)]], held=[held])
        held += new
    assert table.count(None) == 8 and largest_difference(torch.cat(logits), alone(model, row)) < 1e-10


# What a step reads and writes


def test_a_step_writes_its_own_slots_and_clears_the_blocks_it_begins(model):
    pages = new_pages(model, num_blocks=4, fill=7)
    run(model, PackedCache(pages), texts(), [[2], [0, 3]], [[(0, 3), (1, 7)]])
    written = (pages.keys != 7).all(-1).all(2).all(0)  # (num_blocks, block_size)
    assert written.tolist() == [[True] * 4, [False] * 4, [True] * 4, [True] * 4]
    assert not pages.keys[:, [2, 3], :, 3].any() and not pages.values[:, [2, 3], :, 3].any()


@pytest.mark.parametrize("way", WAYS)
def test_indexes_are_worked_out_once_a_step(model, monkeypatch, way):
    calls, right = [], block_attention.look_back
    monkeypatch.setattr(block_attention, "look_back", lambda *args: calls.append(args) or right(*args))
    pages = new_pages(model)
    run(model, PackedCache(pages, way), texts(), scattered_tables(pages, LENGTHS), [[(0, 1), (1, 1), (2, 30)]])
    assert len(calls) == 2  # for the two single tokens together and for the piece, not for each of two layers


def tokens_read(model, monkeypatch, way, lengths):
    """How many tokens' keys each read of the last step copies, in the first layer."""
    copied, right = [], block_attention.side_by_side
    pages = new_pages(model, num_blocks=128)
    packed, tables = PackedCache(pages, way), scattered_tables(pages, lengths)
    run(model, packed, texts(lengths), tables, [[(i, n - 1) for i, n in enumerate(lengths)]])
    watch = lambda pool, *args: copied.append(right(pool, *args)) or copied[-1]  # noqa: E731
    monkeypatch.setattr(block_attention, "side_by_side", watch)
    run(model, packed, texts(lengths), tables, [[(0, 1), (1, 1), (2, 1)]], held=[n - 1 for n in lengths])
    return [k.shape[0] * k.shape[2] for k in copied[: len(copied) // 4]]  # keys and values of two layers


def test_direct_reads_a_few_blocks_at_a_time_and_nothing_past_the_end(model, monkeypatch):
    """Texts of 8, 40 and 100 tokens in blocks of 4: a copy pads all to 100; tiles of 48 tokens, 16 of each text, read
    3 x 16, then 2 x 16 twice (to 48), then the longest alone to 100."""
    lengths = (8, 40, 100)
    assert tokens_read(model, monkeypatch, "gather", lengths) == [300]
    monkeypatch.setattr(block_attention, "TILE", 48)
    assert tokens_read(model, monkeypatch, "direct", lengths) == [48, 32, 32, 16, 16, 16, 4]


@pytest.mark.parametrize("way", WAYS)
def test_an_error_in_a_step_leaves_zeros_where_it_wrote(model, monkeypatch, way):
    row, pages = texts()[2], new_pages(model)
    packed, (table,) = PackedCache(pages, way), scattered_tables(pages, [40])
    run(model, packed, [row], [table], [[(0, 9)]])
    before = pages.keys[:, table[:2]].clone()
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
        patch.setattr(model.embed_tokens, "forward", lambda tokens: torch.full((*tokens.shape, 64), torch.nan).double())
        with pytest.raises(ZeroDivisionError):
            run(model, packed, [row], [table], [[(0, 2)]], held=[9])
    assert torch.equal(pages.keys[:, table[:2]], before) and not pages.keys[:, table[2], :, 1:].any()
    (rest,) = run(model, packed, [row], [table], [[(0, 1)], [(0, 30)]], held=[9])
    assert largest_difference(rest, alone(model, row)[9:]) < 1e-10


# The last token of each text


def test_one_row_of_scores_for_each_piece(model):
    pages, steps = new_pages(model), [[(2, 5), (0, 1), (1, 4)]]
    tables, packed = scattered_tables(pages, LENGTHS), PackedCache(pages)
    logits = run(model, packed, texts(), tables, steps)
    packed.pieces = [Piece(tables[2], 0, 5), Piece(tables[0], 0, 1), Piece(tables[1], 0, 4)]
    tokens = torch.tensor([texts()[2][:5] + texts()[0][:1] + texts()[1][:4]])
    last = model(tokens, cache=packed, last_only=True)
    assert last.shape == (1, 3, 97)
    assert largest_difference(last[0], torch.stack([logits[2][4], logits[0][0], logits[1][3]])) < 1e-10


def test_columns_of_the_last_tokens_by_hand(model):
    positions = torch.tensor([[4, 5, 6, -1], [0, -1, -1, -1], [-1, -1, -1, -1], [7, 8, 9, 10]])
    cache = kv.DenseCache(model.config, batch_size=4, device="cpu")
    cache.lengths = [4, 0, 0, 7]
    with cache.step(positions) as step:
        assert step.last(positions).tolist() == [[2], [0], [0], [3]]
    packed = PackedCache(new_pages(model))
    packed.pieces = [Piece([0], 0, 2), Piece([1], 3, 4), Piece([2, 3], 0, 5)]
    positions = packed.next_positions(8)
    assert positions.tolist() == [[0, 1, 3, 0, 1, 2, 3, 4]]
    assert packed.begin(positions).last(positions).tolist() == [[1, 2, 7]]


# Bad input


def refused(model, packed, pieces, tokens, match, positions=None):
    before = packed.pages.keys.clone(), packed.pages.values.clone()
    packed.pieces = pieces
    with pytest.raises(ValueError, match=match):
        model(random_tokens(1, tokens), positions, packed)
    assert torch.equal(packed.pages.keys, before[0]) and torch.equal(packed.pages.values, before[1])


def test_pieces_that_do_not_fit_are_refused_before_anything_is_stored(model):
    packed = PackedCache(new_pages(model, fill=0))
    good = Piece([3, 1], 0, 5)
    refused(model, packed, [], 2, "pieces of this step have 0 new tokens, but 2 were given")
    refused(model, packed, [good], 6, "have 5 new tokens, but 6 were given")
    refused(model, packed, [good], 5, r"go from start to stop - 1 of \[\(0, 5\)\]", torch.arange(1, 6)[None])
    refused(model, packed, [good, Piece([0], 2, 2)], 5, "start=2 must be below stop=2")
    refused(model, packed, [good, Piece([0], 4, 5)], 6, r"tokens 0 to 4 of a piece.*no block of 4 tokens: \[0\]")
    refused(model, packed, [good, Piece([None, 2], 4, 5)], 6, r"\[None, 2\]")
    refused(model, packed, [good, Piece([0, 64], 4, 5)], 6, "block 64.*blocks 0 to 63")
    refused(model, packed, [good, Piece([0, -1], 4, 5)], 6, "block -1.*blocks 0 to 63")
    with pytest.raises(ValueError, match="context of 256"):
        packed.pieces = [Piece(list(range(64)) + [0], 256, 257)]
        model(random_tokens(1, 1), cache=packed)


def test_bad_sizes_and_ways_are_refused(model):
    for bad in ({"num_blocks": 0}, {"block_size": 0}, {"num_blocks": 2.5}, {"block_size": True}):
        for make in (Pages, Pages.bytes_for):
            with pytest.raises(ValueError, match=f"{next(iter(bad))}=.* must be a whole number of at least 1"):
                make(model.config, **{"num_blocks": 8, **bad})
    with pytest.raises(ValueError, match="pool of 1,000,000,000,000 blocks of 16 tokens takes .* GB.*smaller num_blo"):
        Pages(model.config, 10**12, device="cpu")
    with pytest.raises(ValueError, match="config must be a ModelConfig"):
        Pages(model, 8)
    with pytest.raises(ValueError, match='attention=\'flash\' must be "gather" or "direct"'):
        PackedCache(new_pages(model), "flash")


def test_a_pool_of_another_model_or_dtype_is_refused(model):
    packed = PackedCache(new_pages(small_model(small_config(n_layers=3), dtype=torch.float64)))
    packed.pieces = [Piece([0], 0, 3)]
    with pytest.raises(ValueError, match="another model .n_layers=3 here, 2 in the model"):
        model(random_tokens(1, 3), cache=packed)
    packed = PackedCache(new_pages(small_model()))
    packed.pieces = [Piece([0], 0, 3)]
    with pytest.raises(ValueError, match="holds torch.float32 on cpu, the model computes in torch.float64"):
        model(random_tokens(1, 3), cache=packed)


# The pool


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_bytes_are_those_of_the_formula(block_size):
    config = small_config()
    pages = Pages(config, 10, block_size, torch.bfloat16, "cpu")
    by_hand = 2 * 2 * 2 * 8 * 10 * block_size * 2  # K and V x layers x KV heads x d_head x slots x bytes
    assert pages.nbytes == by_hand == Pages.bytes_for(config, 10, block_size, torch.bfloat16)
    assert by_hand == kv.cache_bytes(config, 10 * block_size, bits=16)


def test_copies_are_made_one_after_the_other(model):
    """A target may be the source of a later copy, and a source the target of one."""
    pages = new_pages(model, num_blocks=6)
    for block in range(6):
        pages.keys[:, block], pages.values[:, block] = block, 10 + block
    pages.copy([])
    pages.copy([(0, 1), (1, 2), (3, 0), (4, 5)])
    assert pages.keys[0, :, 0, 0, 0].tolist() == [3, 0, 0, 3, 4, 4]
    assert torch.equal(pages.values, pages.keys + 10)
    pages.copy([(2, 1), (4, 1)])
    assert pages.keys[1, :, 1, 3, 7].tolist() == [3, 4, 0, 3, 4, 4]


def test_fill_by_block(model):
    pages = new_pages(model, num_blocks=4, fill=0)
    pages.fill(1.5, [1, 3])
    assert pages.keys[1, :, 1, 2, 5].tolist() == pages.values[0, :, 0, 0, 0].tolist() == [0, 1.5, 0, 1.5]


def test_made_in_inference_mode_it_works_outside(model):
    with torch.inference_mode():
        pages = new_pages(model)
    tokens, _ = pad([texts()[0]])
    packed = PackedCache(pages)
    packed.pieces = [Piece([5], 0, 3)]
    assert largest_difference(model(tokens, cache=packed)[0], alone(model, texts()[0])) < 1e-10
