"""Caches against the one oracle: the logits of the model without a cache."""

import pytest
import torch
from reference import feed, in_chunks, largest_difference, random_tokens, small_config, small_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import kvcourse as kv
from kvcourse.caches.paged import PagedCache
from kvcourse.generation import pad

TEXT = 96


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.mark.parametrize("prompt", [1, 2, 7, 64])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_every_step_equals_the_model_without_a_cache(prompt, heads):
    model = small_model(small_config(n_kv_heads=heads))
    row = random_tokens(TEXT).tolist()
    cache = kv.DenseCache(model.config, max_len=TEXT, dtype=model.dtype, device="cpu")
    chunks = [prompt] + [1] * (TEXT - prompt)
    (cached,) = feed(model, cache, [row], chunks)
    assert largest_difference(cached, model(torch.tensor([row]))[0]) < 1e-4
    assert cache.lengths == [TEXT]


@pytest.mark.parametrize("size", [1, 5, 7, 8, 22, 23, 64])
def test_chunked_prefill_gives_the_same_logits_keys_and_values(model, size):
    row = random_tokens(23).tolist()
    caches = [kv.DenseCache(model.config, max_len=64, device="cpu", dtype=torch.float32) for _ in range(2)]
    (chunked,) = feed(model, caches[0], [row], in_chunks(23, size))
    (one_shot,) = feed(model, caches[1], [row], [23])
    assert largest_difference(chunked, one_shot) < 1e-4
    assert largest_difference(caches[0].keys, caches[1].keys) < 1e-4
    assert largest_difference(caches[0].values, caches[1].values) < 1e-4


def test_chunks_at_wrong_positions_show(model, monkeypatch):
    """The partner: with rotary positions that start again in every chunk the logits are far off."""
    row = random_tokens(23).tolist()
    import kvcourse.model

    right = kvcourse.model.rotary_tables
    monkeypatch.setattr(kvcourse.model, "rotary_tables", lambda p, *rest: right(p - p[:, :1], *rest))
    cache = kv.DenseCache(model.config, device="cpu", dtype=torch.float32)
    (cached,) = feed(model, cache, [row], in_chunks(23, 8))
    assert largest_difference(cached, model(torch.tensor([row]))[0]) > 0.1


@pytest.mark.parametrize("size", [1, 4, 64])
def test_rows_of_unequal_length_equal_each_row_alone(model, size):
    rows = [random_tokens(n, seed=n).tolist() for n in (3, 40, 17)]
    cache = kv.DenseCache(model.config, batch_size=3, max_len=64, device="cpu", dtype=torch.float32)
    batch = feed(model, cache, rows, in_chunks(40, size))
    assert cache.lengths == [3, 40, 17] and cache.length == 40
    for row, logits in zip(rows, batch, strict=True):
        assert largest_difference(logits, model(torch.tensor([row]))[0]) < 1e-4


@pytest.mark.parametrize("window", [1, 8, (4, None), (None, 16)])
@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 64])
def test_windowed_layers_equal_the_model_without_a_cache(window, size):
    model = small_model(small_config(window=window))
    rows = [random_tokens(n, seed=n).tolist() for n in (60, 60)]
    for chunks in (in_chunks(60, size), [30] + [1] * 30):
        cache = kv.DenseCache(model.config, batch_size=2, device="cpu", dtype=torch.float32)
        for row, logits in zip(rows, feed(model, cache, rows, chunks), strict=True):
            assert largest_difference(logits, model(torch.tensor([row]))[0]) < 1e-4


@pytest.mark.parametrize("window", [1, 8, (4, None)])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_windowed_rows_of_unequal_length_equal_each_row_alone(window, size):
    model = small_model(small_config(window=window))
    rows = [random_tokens(n, seed=n).tolist() for n in (3, 40, 17)]
    cache = kv.DenseCache(model.config, batch_size=3, max_len=64, device="cpu", dtype=torch.float32)
    for row, logits in zip(rows, feed(model, cache, rows, in_chunks(40, size)), strict=True):
        assert largest_difference(logits, model(torch.tensor([row]))[0]) < 1e-4


def test_windowed_rows_of_unequal_length_read_no_more_than_the_window():
    """A step of two rows that hold 99 and 100 tokens reads 8 + 1 keys in each, not 101."""
    model = small_model(small_config(window=8))
    cache = kv.DenseCache(model.config, batch_size=2, device="cpu", dtype=torch.float32)
    feed(model, cache, [random_tokens(99).tolist(), random_tokens(100).tolist()], [100])
    tokens, positions = pad([[1], [2]], cache.lengths)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, positions, cache)
    one_key = 2 * 2 * 2 * 8 * 8 * 2  # multiply and add, scores and values, layers x heads x d_head, rows
    linear = sum(kv.flops(model.config, 1, 0, batch_size=2)) - one_key
    assert counter.get_total_flops() == linear + 9 * one_key


@pytest.mark.parametrize("steps", [[9], [3, 6], [8, 1], [1] * 9])
def test_a_window_of_4_sees_four_tokens_in_prefill_and_decode(steps):
    """One layer: the last logits depend on tokens 5 to 8 of nine, and on no other."""
    model = small_model(small_config(n_layers=1, window=4))
    row = random_tokens(9).tolist()

    def last(row):
        cache = kv.DenseCache(model.config, device="cpu", dtype=torch.float32)
        return feed(model, cache, [row], steps)[0][-1]

    changed = [row[:i] + [(row[i] + 1) % 97] + row[i + 1 :] for i in range(9)]
    moved = [largest_difference(last(other), last(row)) > 1e-4 for other in changed]
    assert moved == [False] * 5 + [True] * 4


def test_a_window_that_decode_forgets_shows():
    """The partner: prefill windowed, decode over everything."""
    model, wide = small_model(small_config(window=8)), small_model()
    row = random_tokens(40).tolist()
    cache = kv.DenseCache(wide.config, device="cpu", dtype=torch.float32)
    (logits,) = feed(wide, cache, [row], [40])
    assert largest_difference(logits, model(torch.tensor([row]))[0]) > 0.1


@pytest.mark.parametrize("rows", [[20, 20], [20, 12]])
def test_truncate_takes_tokens_back(model, rows):
    """Guesses are tried and taken back; the text that goes on is the one without them."""
    texts = [random_tokens(n + 6, seed=n).tolist() for n in rows]
    cache = kv.DenseCache(model.config, batch_size=2, max_len=32, device="cpu", dtype=torch.float32)
    kept = min(rows)
    feed(model, cache, [text[:n] for text, n in zip(texts, rows, strict=True)], [20])
    cache.truncate(kept)
    assert cache.lengths == [kept, kept] and not cache.keys[:, :, :, kept:].any()
    rest = feed(model, cache, [text[kept : kept + 6] for text in texts], [6])
    for text, logits in zip(texts, rest, strict=True):
        assert largest_difference(logits, model(torch.tensor([text[: kept + 6]]))[0, kept:]) < 1e-4
    cache.truncate(100)  # more than it holds: nothing to forget
    assert cache.lengths == [kept + 6, kept + 6]
    with pytest.raises(ValueError, match="length=-1"):
        cache.truncate(-1)


def test_exact_fit_and_one_token_more(model):
    cache = kv.DenseCache(model.config, max_len=16, device="cpu", dtype=torch.float32)
    row = random_tokens(17).tolist()
    (logits,) = feed(model, cache, [row[:16]], [15, 1])
    assert largest_difference(logits, model(torch.tensor([row[:16]]))[0]) < 1e-4
    before = cache.keys.clone()
    with pytest.raises(ValueError, match="room for 16 tokens a row, but this step needs 17"):
        model(torch.tensor([row[16:]]), cache=cache)
    assert cache.lengths == [16] and torch.equal(cache.keys, before)


def test_writing_past_the_end_is_silent_in_pytorch():
    """Why the room is checked: assigning one token to an empty slice does nothing and says nothing."""
    keys = torch.zeros(1, 1, 16, 4)
    keys[:, :, 16:17] = torch.ones(1, 1, 1, 4)
    assert keys.sum() == 0


def test_an_error_inside_a_step_leaves_the_cache_as_it_was(model, monkeypatch):
    row = random_tokens(12).tolist()
    cache = kv.DenseCache(model.config, max_len=16, device="cpu", dtype=torch.float32)
    feed(model, cache, [row[:8]], [8])
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(random_tokens(1, 4, seed=9), cache=cache)
    assert cache.lengths == [8]
    (rest,) = feed(model, cache, [row[8:]], [4])
    assert largest_difference(rest, model(torch.tensor([row]))[0, 8:]) < 1e-4


def test_a_failed_step_leaves_no_poison(model, monkeypatch):
    """Numbers of a failed step lie behind a shorter row, where a later step masks them: 0 x NaN would be NaN."""
    cache = kv.DenseCache(model.config, batch_size=2, max_len=32, device="cpu", dtype=torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
        patch.setattr(model.embed_tokens, "forward", lambda tokens: torch.full((*tokens.shape, 64), torch.nan))
        with pytest.raises(ZeroDivisionError):
            model(random_tokens(2, 9), cache=cache)
    rows = [random_tokens(8).tolist(), random_tokens(2, seed=3).tolist()]
    for row, logits in zip(rows, feed(model, cache, rows, [8]), strict=True):
        assert largest_difference(logits, model(torch.tensor([row]))[0]) < 1e-4


def test_a_cache_made_in_inference_mode_works_outside(model):
    with torch.inference_mode():
        cache = kv.DenseCache(model.config, max_len=8, device="cpu", dtype=torch.float32)
    model(random_tokens(1, 4), cache=cache)
    assert cache.lengths == [4]


def test_reset_forgets_even_poison(model):
    """After a text that overflowed to NaN the next one must be clean, the slots behind shorter rows included."""
    cache = kv.DenseCache(model.config, batch_size=2, max_len=32, device="cpu", dtype=torch.float32)
    feed(model, cache, [random_tokens(20).tolist()] * 2, [20])
    cache.values[:, :, :, :20] = torch.nan
    cache.reset()
    assert cache.lengths == [0, 0]
    rows = [random_tokens(5).tolist(), random_tokens(18, seed=3).tolist()]
    for row, logits in zip(rows, feed(model, cache, rows, [18]), strict=True):
        assert largest_difference(logits, model(torch.tensor([row]))[0]) < 1e-4


def test_a_second_text_without_reset_is_refused(model):
    cache = kv.DenseCache(model.config, device="cpu", dtype=torch.float32)
    model(random_tokens(1, 5), cache=cache)
    with pytest.raises(ValueError, match=r"go on from the \[5\] tokens it holds.*reset\(\)"):
        model(random_tokens(1, 5), positions=torch.arange(5)[None], cache=cache)


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_bytes_are_those_of_the_formula(heads):
    config = small_config(n_kv_heads=heads)
    cache = kv.DenseCache(config, batch_size=3, max_len=40, dtype=torch.bfloat16, device="cpu")
    by_hand = 2 * 2 * heads * 8 * 40 * 3 * 2  # K and V x layers x KV heads x d_head x tokens x rows x bytes
    assert cache.nbytes == by_hand == kv.cache_bytes(config, 40, batch_size=3, bits=16)
    assert kv.DenseCache.bytes_for(config, batch_size=3, max_len=40, dtype=torch.bfloat16) == by_hand


def test_memory_is_allocated_once(model):
    cache = kv.DenseCache(model.config, max_len=64, device="cpu", dtype=torch.float32)
    where = cache.keys.data_ptr(), cache.values.data_ptr(), cache.nbytes
    feed(model, cache, [random_tokens(64).tolist()], [30] + [1] * 34)
    assert (cache.keys.data_ptr(), cache.values.data_ptr(), cache.nbytes) == where


def test_decoding_reads_the_cache_without_copying_it(model, monkeypatch):
    import kvcourse.caches.dense as dense

    seen = []
    monkeypatch.setattr(dense, "attention", lambda q, k, v, *rest: seen.append(k.data_ptr()) or q)
    cache = kv.DenseCache(model.config, device="cpu", dtype=torch.float32)
    model(random_tokens(1, 5), cache=cache)
    model(random_tokens(1, 1), cache=cache)
    assert seen == [cache.keys[layer].data_ptr() for layer in (0, 1, 0, 1)]


def test_cache_of_another_model_batch_or_dtype_is_refused(model):
    make = lambda **changes: kv.DenseCache(  # noqa: E731
        **{"config": model.config, "dtype": torch.float32, "device": "cpu", **changes}
    )
    tokens = random_tokens(1, 3)
    with pytest.raises(ValueError, match="another model .n_layers=3 here, 2 in the model"):
        model(tokens, cache=make(config=small_config(n_layers=3)))
    with pytest.raises(ValueError, match="holds torch.float16 on cpu, the model computes in torch.float32"):
        model(tokens, cache=make(dtype=torch.float16))
    with pytest.raises(ValueError, match="on meta"):
        model(tokens, cache=make(device="meta"))
    with pytest.raises(ValueError, match="holds 2 rows of text, but 1 were given; make one with batch_size=1"):
        model(tokens, cache=make(batch_size=2))
    with pytest.raises(ValueError, match="takes .* GB, which could not be had on cpu: give a smaller max_len"):
        make(max_len=10**15)
    for bad in ({"max_len": 0}, {"batch_size": -1}, {"max_len": 2.5}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            make(**bad)


# All kinds of cache


KINDS = [
    kv.DenseCache,
    lambda config, **options: kv.WindowCache(config, 8, **options),
    PagedCache,
    lambda config, **options: kv.QuantizedCache(config, 2, 4, 8, **options),
]


@pytest.mark.parametrize("kind", KINDS, ids=["dense", "window", "paged", "quantized"])
@pytest.mark.parametrize("lengths", [(30, 30), (12, 30)])
def test_positions_of_32_bits_are_positions(model, kind, lengths):
    rows = [random_tokens(n).tolist() for n in lengths]
    out = []
    for dtype in (torch.int64, torch.int32):
        cache = kind(model.config, batch_size=2, dtype=torch.float32, device="cpu")
        tokens, positions = pad(rows)
        out.append(model(tokens, positions.to(dtype), cache))
        tokens, positions = pad([[5], [6]], cache.lengths)
        out.append(model(tokens, positions.to(dtype), cache))
    assert torch.equal(out[0], out[2]) and torch.equal(out[1], out[3])


@pytest.mark.parametrize("kind", KINDS, ids=["dense", "window", "paged", "quantized"])
@pytest.mark.parametrize(
    "interrupt",
    [
        lambda model, cache: cache.reset(),
        lambda model, cache: cache.truncate(12),
        lambda model, cache: one(model, cache),
    ],
    ids=["reset", "truncate", "step"],
)
def test_one_step_at_a_time(model, kind, interrupt, monkeypatch):
    """The refused call, and the step that it came in, leave the cache as it was."""
    row = random_tokens(14).tolist()
    disturbed, calm = (kind(model.config, dtype=torch.float32, device="cpu") for _ in range(2))
    for cache in (disturbed, calm):
        feed(model, cache, [row[:12]], [12])
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].mlp, "forward", lambda x: interrupt(model, disturbed))
        with pytest.raises(RuntimeError, match="A step of this cache is still open"):
            model(random_tokens(1, 3, seed=9), cache=disturbed)
    assert disturbed.lengths == [12]
    (after,), (expected,) = (feed(model, cache, [row[12:]], [2]) for cache in (disturbed, calm))
    assert torch.equal(after, expected)


def one(model, cache):
    return model(random_tokens(1, 1), cache=cache)


@pytest.mark.parametrize("kind", [kv.DenseCache, kv.WindowCache, PagedCache])
def test_a_cache_is_made_for_a_config(model, kind):
    shape = kv.PUBLISHED["Mistral 7B v0.1"]
    for given, name in [(model, "Transformer"), (shape, "Shape"), ("tiny-gqa", "str")]:
        for make in (kind, kind.bytes_for):
            with pytest.raises(ValueError, match=f"config must be a ModelConfig, such as lm.config; got {name}"):
                make(given)
