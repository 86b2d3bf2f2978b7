"""Attention block by block, as a compiled model does it for one new token of each of many texts."""

import pytest
import torch
from reference import largest_difference, random_tokens, small_config, small_model

import kvcourse as kv
from kvcourse.caches.packed import PackedStep, Piece, Run
from kvcourse.caches.pages import Pages
from kvcourse.fast.compiled import ONE_EACH
from kvcourse.fast.function import cannot_compile
from kvcourse.fast.pages import paged_attention, reads_of

F64 = torch.float64
LENGTHS = [[1], [4], [5], [1, 1], [8, 8, 8], [1, 30, 4, 5, 12], [29, 2]]


def scattered(lengths: list[int], block_size: int, seed: int = 0, **changes):
    """Pages full of NaN but for some texts, whose blocks lie in any order; the texts' (keys, values); a run of their
    last tokens."""
    draws = torch.Generator().manual_seed(seed)
    config = small_config(n_layers=1, **changes)
    counts = [-(-length // block_size) for length in lengths]
    pages = Pages(config, sum(counts) + 3, block_size, F64, "cpu")
    pages.fill(torch.nan)
    tables = [list(map(int, part)) for part in torch.randperm(pages.num_blocks, generator=draws)[:-3].split(counts)]
    texts = []
    for table, length in zip(tables, lengths, strict=True):
        kv_pair = torch.randn(2, config.n_kv_heads, length, config.d_head, dtype=F64, generator=draws)
        for pool, numbers in zip((pages.keys, pages.values), kv_pair, strict=True):
            pool[0, table[-1]] = 0  # the rest of the last block, as `clear_new_blocks` leaves it
            for position in range(length):
                pool[0, table[position // block_size], :, position % block_size] = numbers[:, position]
        texts.append(kv_pair)
    pieces = [Piece(table, length - 1, length) for table, length in zip(tables, lengths, strict=True)]
    q = torch.randn(len(lengths), config.n_heads, config.d_head, dtype=F64, generator=draws)
    return pages, texts, Run(pages, pieces, "direct"), q


def softmax_by_hand(q, texts, window=None):
    """Each query over its own text's last `window` tokens, head by head."""
    rows = []
    for heads, (keys, values) in zip(q, texts, strict=True):
        for h, query in enumerate(heads):
            k, v = (part[h * len(part) // len(heads)][-(window or part.shape[1]) :] for part in (keys, values))
            weights = (k @ query / query.numel() ** 0.5).exp()
            rows.append(weights @ v / weights.sum())
    return torch.stack(rows).view(len(q), -1)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_it_is_the_softmax_over_all_that_each_text_has(lengths, block_size):
    pages, texts, run, q = scattered(lengths, block_size)
    ours = paged_attention(q, pages.keys[0], pages.values[0], reads_of(run, None))
    assert largest_difference(ours, softmax_by_hand(q, texts)) < 1e-12


@pytest.mark.parametrize("window", [1, 3, 4, 9, 100])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_a_window_hides_what_lies_before_it(window, heads):
    pages, texts, run, q = scattered([1, 30, 4, 5, 12], 4, window=window, n_kv_heads=heads)
    reads = reads_of(run, window)
    assert (
        largest_difference(paged_attention(q, pages.keys[0], pages.values[0], reads), softmax_by_hand(q, texts, window))
        < 1e-12
    )
    longest = -(-(window + 3) // 4)  # blocks that a window can touch
    assert reads.rows.shape[1] <= max(2, longest)


def test_scores_too_large_for_an_exponential_are_no_trouble():
    pages, texts, run, q = scattered([30, 5], 4)
    largest = paged_attention(1e4 * q, pages.keys[0], pages.values[0], reads_of(run, None))
    assert torch.isfinite(largest).all()
    keys, values = texts[0]
    winner = (keys[0] @ q[0, 0]).argmax()  # one token takes it all
    assert largest_difference(largest[0, : values.shape[2]], values[0, winner]) < 1e-9


def test_a_block_read_for_another_text_shows():
    """Red: whose block it is, and where a text's blocks are."""
    pages, texts, run, q = scattered([30, 5], 4)
    right, reads = softmax_by_hand(q, texts), reads_of(run, None)
    for wrong in (
        reads._replace(text=1 - reads.text),
        reads._replace(rows=(reads.rows + 1) % len(reads.blocks)),
        reads._replace(blocks=reads.blocks.roll(1)),
        reads._replace(absent=torch.zeros_like(reads.absent)),
        reads._replace(hidden=torch.zeros_like(reads.hidden)),
    ):
        assert largest_difference(paged_attention(q, pages.keys[0], pages.values[0], wrong), right) > 0.01


@pytest.mark.parametrize("kind", ["no window", "window", "one layer"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_compiled_model_over_pages_gives_the_plain_models_logits(kind, dtype):
    """PyTorch's compiler included. Rows of a `PagedCache` that get tokens one by one, beside each other and alone."""
    if cannot_compile("cpu"):
        pytest.skip(cannot_compile("cpu"))
    window = {"no window": None, "window": 9, "one layer": (9, None)}[kind]
    model = small_model(small_config(window=window, qk_norm=True, qkv_bias=True), dtype=dtype)
    fast, texts = kv.compiled(model), torch.stack([random_tokens(40, seed=n) for n in range(3)])
    for rows in (texts, texts[:1]):
        cache = kv.PagedCache(model.config, len(rows), block_size=4, dtype=dtype, device="cpu")
        cache.pages.fill(torch.nan)
        logits = torch.cat([fast(piece, cache=cache) for piece in rows.split([5, *[1] * 35], 1)], 1)
        assert largest_difference(logits, model(rows)) < {torch.float32: 1e-4, F64: 1e-9}[dtype]
    assert fast.functions[ONE_EACH].compilations == 2  # several texts, and one


def test_what_is_no_single_token_of_each_goes_the_other_way():
    if cannot_compile("cpu"):
        pytest.skip(cannot_compile("cpu"))
    model = small_model(small_config())
    fast = kv.compiled(model)
    pages = Pages(model.config, 20, 4, device="cpu")
    one, two = Piece([0, 1, 2], 8, 9), Piece([3, 4, 5], 8, 10)
    for pieces, attention, used in (
        ([one], "direct", True),
        ([one, one._replace(blocks=[6, 7, 8])], "direct", True),
        ([one], "gather", False),
        ([two], "direct", False),
        ([one, two], "direct", False),
        ([two, one], "direct", False),
    ):
        step = PackedStep(pages, pieces, attention)
        x = torch.zeros(1, sum(piece.stop - piece.start for piece in pieces), model.config.d_model)
        assert (fast.one_each(step, x) is step) == used
    fast.reason = "Not here."
    assert fast.one_each(PackedStep(pages, [one], "direct"), torch.zeros(1, 1, model.config.d_model)) is None
