"""The ring buffer against the windowed model without a cache; with sinks, against attention by explicit distances."""

import itertools

import pytest
import torch
from reference import feed, hugging_face, in_chunks, largest_difference, random_tokens, small_config, small_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import kvcourse as kv
import kvcourse.caches.window as window_module
from kvcourse.caches import WindowCache
from kvcourse.generation import make_cache, pad
from kvcourse.layers import visible
from kvcourse.rope import YarnScaling, amplitude, frequencies

LENGTHS = (3, 40, 75)  # of the rows of a batch: longer than the widest window, and shorter than a chunk
CASES = [(1, 0), (2, 0), (2, 1), (8, 0), (8, 1), (8, 2), (64, 0), (64, 1), (64, 2)]  # (window, sinks)


@pytest.fixture(scope="module")
def model():
    return small_model()


def new_cache(model, window=None, sinks=0, **options):
    return WindowCache(model.config, window, sinks, dtype=model.dtype, device=model.device, **options)


def windowed(model, window):
    """The same weights, made with a window: without a cache, the oracle of a cache without sinks."""
    other = kv.Transformer(small_config(window=window), device="cpu", dtype=model.dtype)
    other.load_state_dict(model.state_dict())
    return other


def by_distance(model, row, windows, sinks):
    """Logits `(T, V)` of a text from keys that were never rotated: each pair of query and key is turned by the distance
    between them, as complex numbers, and a sink is no further away than in a full cache."""
    c, x = model.config, model.embed_tokens(torch.tensor([row]))
    query, key = torch.arange(len(row))[:, None], torch.arange(len(row))[None]
    for layer, window in zip(model.layers, windows, strict=True):
        h, attn = layer.input_layernorm(x), layer.self_attn
        q, k, v = (
            p(h).unflatten(-1, (-1, c.d_head))[0].swapaxes(0, 1) for p in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        k, v = (t.repeat_interleave(c.group_size, 0) for t in (k, v))  # (H, T, D)
        q, k = (torch.complex(*t.double().chunk(2, -1)) for t in (q, k))
        distance, seen = query - key, key <= query
        if window is not None:
            distance = torch.where(key < sinks, distance.clamp(max=sinks + window - 1 - key), distance)
            seen = seen & ((query - key < window) | (key < sinks))
        angle = distance[..., None] * frequencies(c.d_head, c.rope_theta, c.rope_scaling).double()
        turn = torch.polar(torch.ones_like(angle), angle)
        scores = torch.einsum("htd,tsd,hsd->hts", q, turn, k.conj()).real * amplitude(c.rope_scaling) ** 2
        weights = (scores / c.d_head**0.5).masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)
        x = x + attn.o_proj((weights @ v).swapaxes(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.head(model.norm(x))[0]


def oracle(model, rows, window, sinks):
    if sinks:
        return [by_distance(model, row, (window,) * model.config.n_layers, sinks) for row in rows]
    other = windowed(model, window)
    return [other(torch.tensor([row]))[0] for row in rows]


@pytest.fixture(scope="module")
def rows():
    return [random_tokens(n, seed=n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(model, rows):
    return {case: oracle(model, rows, *case) for case in CASES}


@pytest.mark.parametrize("window", [1, 8, (4, None)])
def test_the_reference_by_distance_is_the_windowed_model(model, rows, window):
    other = windowed(model, window)
    for row in rows:
        slow = by_distance(model, row, other.config.windows, 0)
        assert largest_difference(slow, other(torch.tensor([row]))[0]) < 1e-4


@pytest.mark.parametrize(("window", "sinks"), CASES)
@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 30, 75])
def test_every_step_of_unequal_rows_equals_the_model_without_a_cache(model, rows, expected, window, sinks, size):
    cache = new_cache(model, window, sinks, batch_size=3)
    for logits, right in zip(feed(model, cache, rows, in_chunks(75, size)), expected[window, sinks], strict=True):
        assert largest_difference(logits, right) < 1e-4
    assert cache.lengths == list(LENGTHS)


@pytest.mark.parametrize(("window", "sinks"), CASES)
@pytest.mark.parametrize("size", [3, 7, 8, 9, 30])
def test_every_step_of_one_row_equals_the_model_without_a_cache(model, rows, expected, window, sinks, size):
    (logits,) = feed(model, new_cache(model, window, sinks), [rows[2]], in_chunks(75, size))
    assert largest_difference(logits, expected[window, sinks][2]) < 1e-4


@pytest.mark.parametrize(("window", "sinks"), CASES)
def test_prompts_around_the_size_of_the_ring_then_single_tokens(model, rows, expected, window, sinks):
    for prompt in {max(1, window - 1), window, window + 1, window + sinks, window + sinks + 1}:
        (logits,) = feed(model, new_cache(model, window, sinks), [rows[2]], [prompt] + [1] * min(75 - prompt, 12))
        assert largest_difference(logits, expected[window, sinks][2][: len(logits)]) < 1e-4


@pytest.mark.parametrize(("window", "sinks"), [((4, None), 0), ((None, 16), 2), ((3, 8), 0), ((3, 8), 2)])
@pytest.mark.parametrize("size", [1, 7, 30])
def test_each_layer_has_its_own_window(model, rows, window, sinks, size):
    cache = new_cache(model, window, sinks, batch_size=3)
    for row, logits in zip(rows, feed(model, cache, rows, in_chunks(75, size)), strict=True):
        assert largest_difference(logits, by_distance(model, row, window, sinks)) < 1e-4
    slots = [256 if w is None else w + sinks for w in window]
    assert [cache.slots(layer).shape for layer in (0, 1)] == [(3, n) for n in slots]
    assert cache.nbytes == 3 * sum(slots) * 2 * 2 * 8 * 4  # rows x slots x (K and V) x heads x d_head x bytes


def test_layers_that_swap_windows_show(model, rows):
    """The partner."""
    (logits,) = feed(model, new_cache(model, (3, 8)), [rows[2]], in_chunks(75, 7))
    assert largest_difference(logits, by_distance(model, rows[2], (8, 3), 0)) > 0.1


def test_logits_equal_mistral():
    model = small_model(small_config(window=8))
    row = random_tokens(96)
    (logits,) = feed(model, new_cache(model), [row.tolist()], [30] + [1] * 66)
    assert largest_difference(logits, hugging_face(model)(row[None]).logits[0]) < 1e-4


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("broken", ["window", "sink", "slot", "chunk", "absolute"])
def test_what_goes_wrong_shows(model, rows, monkeypatch, broken, sinks):
    """The partner of the tests above: the window one too wide, sinks not seen, slots mixed up, a chunk stored before it
    is read, sinks at their distance in the text."""
    seen, prepare = visible, window_module.RingStep.plan_writing
    if broken == "window":
        monkeypatch.setattr(window_module, "visible", lambda q, k, w, s: seen(q, k, w + 1, s))
    elif broken == "sink":
        monkeypatch.setattr(window_module, "visible", lambda q, k, w, s: seen(q, k, w))
    elif broken == "slot":
        monkeypatch.setattr(window_module.Ring, "slot", lambda ring, positions: positions % ring.size)
    elif broken == "chunk":
        monkeypatch.setattr(
            window_module.RingStep,
            "plan_writing",
            lambda step, *args: prepare(step, *args) or vars(step).update(single=True),
        )
    else:
        monkeypatch.setattr(window_module, "rotate", lambda q, cos, sin: q)
    cache, harmless = new_cache(model, 8, sinks), {"sink", "slot", "absolute"} if sinks == 0 else set()
    (logits,) = feed(model, cache, [rows[2]], in_chunks(75, 7))
    right = oracle(model, rows[2:], 8, sinks)[0]
    assert (largest_difference(logits, right) > 0.1) == (broken not in harmless)


# What went wrong elsewhere (section C of the list of failures).


@pytest.mark.parametrize("length", [3, 4, 5, 9])
@pytest.mark.parametrize("by_chunk", [True, False])
def test_a_window_of_4_sees_four_tokens_in_prefill_and_decode(length, by_chunk):
    model = small_model(small_config(n_layers=1))
    row = random_tokens(length).tolist()

    def last(row):
        return feed(model, new_cache(model, 4), [row], [length] if by_chunk else [2] + [1] * (length - 2))[0][-1]

    changed = [row[:i] + [(row[i] + 1) % 97] + row[i + 1 :] for i in range(length)]
    moved = [largest_difference(last(other), last(row)) > 1e-4 for other in changed]
    assert moved == [i >= length - 4 for i in range(length)]


def test_decoding_keeps_the_window_of_prefill():
    """One layer, a window of 4, 12 tokens, decoding from the fifth."""
    model = small_model(small_config(n_layers=1, window=4))
    row = random_tokens(12)
    (logits,) = feed(model, new_cache(model), [row.tolist()], [5] + [1] * 7)
    assert largest_difference(logits, hugging_face(model)(row[None]).logits[0]) < 1e-4


@pytest.mark.parametrize("size", [3, 7, 8, 9, 16, 30])
def test_a_prompt_in_pieces_then_decoding_never_holds_more_than_the_window(model, size):
    row = random_tokens(50).tolist()
    cache, logits = new_cache(model, 8), []
    chunks = in_chunks(30, size) + [1] * 20
    for start, n in zip(itertools.accumulate(chunks, initial=0), chunks, strict=False):
        logits.append(feed(model, cache, [row[start : start + n]], [n])[0])
        held = cache.slots(0)[0]
        assert sorted(held[held >= 0].tolist()) == list(range(max(0, start + n - 8), start + n))
    assert largest_difference(torch.cat(logits), windowed(model, 8)(torch.tensor([row]))[0]) < 1e-4


def test_positions_are_places_in_the_cache():
    """Two sinks, a window of 6, 40 tokens, one layer: every step equals a text of the two first and six last tokens,
    written one after the other, which no cache has ever seen."""
    model = small_model(small_config(n_layers=1))
    row = random_tokens(40).tolist()
    (logits,) = feed(model, new_cache(model, 6, 2), [row], [1] * 40)
    for p in range(40):
        held = row[: p + 1] if p < 8 else row[:2] + row[p - 5 : p + 1]
        assert largest_difference(logits[p], model(torch.tensor([held]))[0, -1]) < 1e-4
    far = model(torch.tensor([row]))[0]  # the partner: all tokens, each where it stands in the text
    assert largest_difference(logits[:8], far[:8]) < 1e-4 and largest_difference(logits[8:], far[8:]) > 0.1


@pytest.mark.parametrize("sinks", [0, 2])
def test_memory_is_constant_over_ten_windows(model, sinks):
    cache = new_cache(model, 8, sinks)
    tensors = [tensor for ring in cache.rings.values() for tensor in (ring.keys, ring.values)]
    where, size = [tensor.data_ptr() for tensor in tensors], cache.nbytes
    assert size == (8 + sinks) * 2 * 2 * 2 * 8 * 4  # slots x layers x (K and V) x heads x d_head x bytes
    for i in range(80):
        model(random_tokens(1, 1, seed=i), cache=cache)
        assert cache.length == i + 1 and cache.nbytes == size
    tensors = [tensor for ring in cache.rings.values() for tensor in (ring.keys, ring.values)]
    assert [tensor.data_ptr() for tensor in tensors] == where


def test_decoding_reads_the_ring_without_copying_it(model, monkeypatch):
    read, attention = [], window_module.attention
    monkeypatch.setattr(window_module, "attention", lambda q, k, *rest: read.append(k) or attention(q, k, *rest))
    cache = new_cache(model, 8)
    feed(model, cache, [random_tokens(21).tolist()], [20, 1])
    ring = cache.rings[8].keys
    assert [k.data_ptr() for k in read[2:]] == [ring[0].data_ptr(), ring[1].data_ptr()]
    assert {k.shape[2] for k in read[2:]} == {8}


def test_a_decode_step_costs_the_same_at_any_length(model):
    def operations(length):
        cache = new_cache(model, 8, 2)
        feed(model, cache, [random_tokens(length).tolist()], [length])
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(random_tokens(1, 1), cache=cache)
        return counter.get_total_flops()

    extra = 2 * 2 * 8 * 8 * 2  # the two sinks once more: multiply and add, layers x heads x d_head x sinks
    linear = sum(kv.flops(model.config, 1)) - 2 * 2 * 2 * 8 * 8
    assert operations(20) == operations(70) == linear + 10 * 2 * 2 * 2 * 8 * 8 + extra


# Slots, visibility


def test_slots_by_hand(model):
    cache = new_cache(model, 3, 2)
    feed(model, cache, [random_tokens(4).tolist()], [4])
    assert cache.slots(0).tolist() == [[0, 1, 2, 3, -1]]
    feed(model, cache, [random_tokens(4).tolist()], [4])
    assert cache.slots(1).tolist() == [[0, 1, 5, 6, 7]]  # 5 took the place of 2, 6 of 3
    with pytest.raises(ValueError, match="layer=2 must be below 2"):
        cache.slots(2)
    with pytest.raises(ValueError, match="layer=-1"):
        cache.slots(-1)


def test_padding_is_never_stored(model):
    cache = new_cache(model, 4, batch_size=2)
    feed(model, cache, [[5, 6], random_tokens(9).tolist()], [9])
    feed(model, cache, [[], [7]], [1])
    assert cache.slots(0).tolist() == [[0, 1, -1, -1], [8, 9, 6, 7]] and cache.lengths == [2, 10]
    keys = cache.rings[4].keys
    assert not keys[:, 0, :, 2:].any() and keys[:, 1].any(-1).all()


def test_visible_by_hand():
    """Position 9 looks at keys of positions 9, 6, 7 and 8, out of order, at an empty slot and at sinks 0 and 1."""
    query, key = torch.tensor([[9]]), torch.tensor([[0, 1, 9, -1, 5, 6, 7, 8, 10]])
    see = lambda *args: visible(query, key, *args).int().flatten().tolist()  # noqa: E731
    assert see(4) == [0, 0, 1, 0, 0, 1, 1, 1, 0]
    assert see(4, 2) == [1, 1, 1, 0, 0, 1, 1, 1, 0]
    assert see(1) == [0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert see() == [1, 1, 1, 0, 1, 1, 1, 1, 0]


# Numbers: long texts, stretched rotary positions, half precision


def test_a_text_may_run_past_the_context_when_no_distance_does(model):
    short = kv.Transformer(small_config(max_seq_len=32), device="cpu", dtype=torch.float32)
    short.load_state_dict(model.state_dict())
    row = random_tokens(120).tolist()
    cache = new_cache(short, 8, 2)
    (logits,) = feed(short, cache, [row], [40, 7] + [1] * 73)
    assert cache.endless and largest_difference(logits, by_distance(model, row, (8, 8), 2)) < 1e-4
    assert (
        kv.generate(short, row, 20, cache=new_cache(short, 8, 2)).ids
        == kv.generate(model, row, 20, cache=new_cache(model, 8, 2)).ids
    )
    for window, sinks in ((32, 1), ((8, None), 0), (40, 0)):  # a distance could get too large, or a layer keeps all
        cache = new_cache(short, window, sinks)
        assert not cache.endless
        with pytest.raises(ValueError, match="Position 119 is past the model's context of 32"):
            short(torch.tensor([row]), cache=cache)
        with pytest.raises(ValueError, match="the model's context has room for 32"):
            kv.generate(short, row, 1, cache=cache)
    with pytest.raises(ValueError, match="context of 32"):
        short(torch.tensor([row]), cache=kv.DenseCache(short.config, max_len=200, dtype=short.dtype, device="cpu"))
    with pytest.raises(ValueError, match="room for 50 tokens a row, but this step needs 120: make a WindowCache"):
        short(torch.tensor([row]), cache=new_cache(short, 8, max_len=50))
    with pytest.raises(ValueError, match="the cache has room for 50"):
        kv.generate(short, row, 1, cache=new_cache(short, 8, max_len=50))


def test_stretched_rotary_positions_are_stretched_once():
    """YaRN multiplies cosines and sines, so a second turn must not multiply them again."""
    scaling = YarnScaling(factor=8.0, original_max_seq_len=32)
    model = small_model(small_config(rope_scaling=scaling))
    row = random_tokens(60).tolist()
    (logits,) = feed(model, new_cache(model, 8, 2), [row], [20, 7] + [1] * 33)
    assert largest_difference(logits, by_distance(model, row, (8, 8), 2)) < 1e-4


def test_stretching_twice_shows(monkeypatch):
    """The partner."""
    from kvcourse.layers import rotary_tables

    monkeypatch.setattr(window_module, "turns", rotary_tables)
    model = small_model(small_config(rope_scaling=YarnScaling(factor=8.0, original_max_seq_len=32)))
    row = random_tokens(60).tolist()
    (logits,) = feed(model, new_cache(model, 8, 2), [row], [60])
    assert largest_difference(logits, by_distance(model, row, (8, 8), 2)) > 0.05


def test_many_queries_at_once_go_through_in_blocks(model, monkeypatch):
    row = random_tokens(75).tolist()
    monkeypatch.setattr("kvcourse.layers.QUERIES", 16)
    (logits,) = feed(model, new_cache(model, 8, 2), [row], [75])
    assert largest_difference(logits, by_distance(model, row, (8, 8), 2)) < 1e-4


def test_angles_are_worked_out_in_float32(monkeypatch):
    """In bfloat16 most numbers above 256 cannot be written down; the turn back to the sinks must not lose them."""
    rough = small_model(small_config(n_layers=1, max_seq_len=1024), dtype=torch.bfloat16)
    exact = kv.Transformer(rough.config, device="cpu", dtype=torch.float32)
    exact.load_state_dict(rough.state_dict())
    row = random_tokens(700).tolist()

    def last(model):
        return feed(model, new_cache(model, 8, 2), [row], in_chunks(700, 100))[0][-50:]

    right = last(exact)
    assert largest_difference(last(rough), right) < 0.1
    turns = window_module.turns
    monkeypatch.setattr(window_module, "turns", lambda positions, *rest: turns(positions.bfloat16(), *rest))
    assert largest_difference(last(rough), right) > 0.3  # the partner


# Errors leave the cache as it was


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("new", [1, 5, 20])
@pytest.mark.parametrize("lengths", [[30, 30], [4, 30]])
def test_an_error_inside_a_step_leaves_the_cache_as_it_was(model, monkeypatch, sinks, new, lengths):
    rows = [random_tokens(n + new, seed=n).tolist() for n in lengths]
    cache = new_cache(model, 8, sinks, batch_size=2)
    feed(model, cache, [row[:n] for row, n in zip(rows, lengths, strict=True)], [30])
    ring, slots = cache.rings[8], cache.slots(0)
    before = ring.keys.clone(), ring.values.clone()
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
        patch.setattr(model.embed_tokens, "forward", lambda tokens: torch.full((*tokens.shape, 64), torch.nan))
        tokens, positions = pad([[1] * new, [2] * new], cache.lengths)
        with pytest.raises(ZeroDivisionError):
            model(tokens, positions, cache)
    assert cache.lengths == lengths and torch.equal(cache.slots(0), slots)
    assert torch.equal(ring.keys, before[0]) and torch.equal(ring.values, before[1])
    rest = feed(model, cache, [row[n:] for row, n in zip(rows, lengths, strict=True)], [new])
    for row, n, logits in zip(rows, lengths, rest, strict=True):
        assert largest_difference(logits, by_distance(model, row, (8, 8), sinks)[n:]) < 1e-4


def test_an_error_that_is_not_undone_shows(model, monkeypatch):
    """The partner."""
    monkeypatch.setattr(window_module.RingStep, "undo", lambda step: None)
    row = random_tokens(35).tolist()
    cache = new_cache(model, 8)
    feed(model, cache, [row[:30]], [30])
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(random_tokens(1, 5, seed=9), cache=cache)
    (rest,) = feed(model, cache, [row[30:]], [5])
    assert largest_difference(rest, windowed(model, 8)(torch.tensor([row]))[0, 30:]) > 0.1


def test_a_step_that_is_over_keeps_nothing(model):
    """What was overwritten is held for the length of the step, and must not come back with a later reset or error."""
    cache = new_cache(model, 8)
    feed(model, cache, [random_tokens(20).tolist()], [20])
    assert cache.open_step is None
    with pytest.raises(ValueError, match="go on from"):
        model(random_tokens(1, 3), torch.arange(3)[None], cache)
    assert cache.slots(0).tolist() == [[16, 17, 18, 19, 12, 13, 14, 15]]


def test_reset_forgets_even_poison(model):
    cache = new_cache(model, 8, 2, batch_size=2)
    feed(model, cache, [random_tokens(20).tolist()] * 2, [20])
    cache.rings[8].values.fill_(torch.nan)
    cache.reset()
    assert cache.lengths == [0, 0] and (cache.slots(0) == -1).all()
    rows = [random_tokens(5).tolist(), random_tokens(18, seed=3).tolist()]
    for row, logits in zip(rows, feed(model, cache, rows, [18]), strict=True):
        assert largest_difference(logits, by_distance(model, row, (8, 8), 2)) < 1e-4


def test_truncate_takes_back_what_was_not_evicted(model):
    row = random_tokens(40).tolist()
    right = by_distance(model, row, (8, 8), 2)
    cache = new_cache(model, 8, 2)
    feed(model, cache, [row[:6] + [1, 2, 3, 4]], [10])
    cache.truncate(6)
    assert cache.slots(0).tolist() == [[0, 1, 2, 3, 4, 5, -1, -1, -1, -1]] and cache.length == 6
    (logits,) = feed(model, cache, [row[6:30]], [10, 14])
    assert largest_difference(logits, right[6:30]) < 1e-4
    cache.truncate(30)  # as many as it holds: nothing to forget
    for length in (3, 22, 29):
        with pytest.raises(
            ValueError, match=f"from 30 tokens to {length}: with window=8, positions 2 to 21 were evict"
        ):
            cache.truncate(length)
    assert cache.length == 30
    assert largest_difference(feed(model, cache, [row[30:]], [10])[0], right[30:]) < 1e-4
    cache.truncate(1)  # the sinks are always there
    assert largest_difference(feed(model, cache, [row[1:]], [39])[0], right[1:]) < 1e-4
    with pytest.raises(ValueError, match="length=-1"):
        cache.truncate(-1)


def test_a_row_that_cannot_go_back_keeps_all_rows(model):
    cache = new_cache(model, (8, None), batch_size=2)
    feed(model, cache, [[1, 2, 3], random_tokens(9).tolist()], [9])
    with pytest.raises(ValueError, match="Row 1 .* positions 0 to 0 were evicted.*prefill the first 2 tokens"):
        cache.truncate(2)
    assert cache.lengths == [3, 9]
    cache.truncate(0)
    assert cache.lengths == [0, 0]


def test_a_cache_made_in_inference_mode_works_outside(model):
    with torch.inference_mode():
        cache = new_cache(model, 4, 1)
    model(random_tokens(1, 9), cache=cache)
    model(random_tokens(1, 1), cache=cache)
    assert cache.lengths == [10]


# Bytes, and what is refused


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({"window": 8}, 16),
        ({"window": 8, "sinks": 3}, 22),
        ({"window": (8, None)}, 8 + 256),
        ({"window": (8, None), "sinks": 3, "max_len": 40}, 11 + 40),
        ({"window": 64, "sinks": 2, "max_len": 40}, 80),  # no text gets longer than 40
        ({}, 512),
    ],
)
def test_bytes_are_those_of_the_formula(model, settings, slots):
    cache = WindowCache(model.config, **settings, batch_size=3, dtype=torch.bfloat16, device="cpu")
    by_hand = 3 * slots * 2 * 2 * 8 * 2  # rows x slots of both layers x (K and V) x KV heads x d_head x bytes
    assert cache.nbytes == by_hand
    assert WindowCache.bytes_for(model.config, **settings, batch_size=3, dtype=torch.bfloat16) == by_hand


@pytest.mark.parametrize("window", [8, (8, None), (None, 16)])
def test_bytes_are_those_of_the_bill(window):
    config = small_config(window=window)
    for length in (5, 12, 100):
        cache = WindowCache(config, batch_size=2, max_len=length, dtype=torch.float16, device="cpu")
        assert cache.nbytes == kv.cache_bytes(config, length, batch_size=2, bits=16)


def test_bad_windows_and_sinks_are_refused(model):
    for bad in (0, -1, 2.5, True, (4, 0)):
        with pytest.raises(ValueError, match="window=.* must be a whole number of at least 1"):
            new_cache(model, bad)
    with pytest.raises(ValueError, match="window has 3 entries, but there are n_layers=2 layers"):
        new_cache(model, (4, 4, 4))
    for window, sinks in ((4, 4), (4, 5), (1, 1), ((8, 2), 2)):
        with pytest.raises(ValueError, match=f"sinks={sinks} must be fewer than the window of . tokens"):
            new_cache(model, window, sinks)
    with pytest.raises(ValueError, match="sinks=2 need a window"):
        new_cache(model, sinks=2)
    with pytest.raises(ValueError, match="sinks=-1"):
        new_cache(model, 4, -1)
    with pytest.raises(ValueError, match="sinks=5 must be fewer"):
        WindowCache.bytes_for(model.config, 4, 5)
    for bad in ({"max_len": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            new_cache(model, 4, **bad)
    with pytest.raises(ValueError, match="takes .* GB, which could not be had on cpu: give a smaller max_len"):
        new_cache(model, (4, None), max_len=10**15)


@pytest.mark.parametrize(
    ("made_with", "other"),
    [(8, 4), (8, 9), (8, (8, None)), (8, (None, None)), ((8, None), 8), ((8, None), (None, 8)), ((8, None), (8, 4))],
)
def test_a_model_made_with_windows_keeps_them(made_with, other):
    config = small_config(window=made_with)
    with pytest.raises(ValueError) as error:
        WindowCache(config, other, device="cpu")
    assert f"window={other} was asked for, but the model was made with window={made_with}" in str(error.value)
    for same in (None, made_with, config.windows):
        assert WindowCache(config, same, device="cpu").windows == config.windows


def test_cache_of_another_model_batch_or_dtype_is_refused(model):
    tokens = random_tokens(1, 3)
    with pytest.raises(ValueError, match="another model .n_layers=3 here, 2 in the model"):
        model(tokens, cache=WindowCache(small_config(n_layers=3), 4, dtype=torch.float32, device="cpu"))
    with pytest.raises(ValueError, match="another model .window=4 here, None in the model"):
        model(tokens, cache=WindowCache(small_config(window=4), dtype=torch.float32, device="cpu"))
    with pytest.raises(ValueError, match="holds torch.float16 on cpu, the model computes in torch.float32"):
        model(tokens, cache=WindowCache(model.config, 4, dtype=torch.float16, device="cpu"))
    with pytest.raises(ValueError, match="holds 2 rows of text, but 1 were given"):
        model(tokens, cache=new_cache(model, 4, batch_size=2))


# generate


@pytest.mark.parametrize("window", [8, (4, None), (None, 16)])
@pytest.mark.parametrize("chunk", [None, 5])
def test_generate_with_windows_equals_naive(window, chunk):
    """Float64: another order of summing cannot change which token wins."""
    model = small_model(small_config(window=window), dtype=torch.float64)
    prompts = [random_tokens(n, seed=n).tolist() for n in (3, 30, 1)]
    made, naive = kv.generate(model, prompts, 20, prefill_chunk=chunk), kv.generate_naive(model, prompts, 20)
    assert [g.ids for g in made] == [g.ids for g in naive]


def test_another_window_writes_another_text():
    """The partner."""
    model = small_model(dtype=torch.float64)
    prompt = random_tokens(30).tolist()
    assert kv.generate(model, prompt, 20, cache=new_cache(model, 8)).ids != kv.generate(model, prompt, 20).ids


@pytest.mark.parametrize(("window", "slots"), [(None, 98), (8, 16), ((8, None), 57)])
def test_generate_keeps_no_more_than_the_windows_reach(monkeypatch, window, slots):
    model, made = small_model(small_config(window=window)), []
    monkeypatch.setattr("kvcourse.generation.make_cache", lambda *args: made.append(make_cache(*args)) or made[0])
    kv.generate(model, random_tokens(30).tolist(), 20)
    assert made[0].nbytes == slots * 2 * 2 * 8 * 4  # slots of both layers x (K and V) x KV heads x d_head x bytes


def test_generate_goes_on_from_a_window_cache():
    model = small_model(dtype=torch.float64)
    row = random_tokens(40).tolist()
    whole, cache = new_cache(model, 8, 2), new_cache(model, 8, 2)
    kv.prefill(model, [row[:25]], cache, chunk=10)
    assert kv.generate(model, row[25:], 20, cache=cache).ids == kv.generate(model, row, 20, cache=whole).ids
    assert cache.length == whole.length == 59


@pytest.mark.parametrize("window", [8, (8, None)])
def test_a_model_made_with_windows_has_no_sinks(window):
    """It was trained to do without, and its own oracle, the model without a cache, sees none."""
    config = small_config(window=window)
    for make in (WindowCache, WindowCache.bytes_for):
        with pytest.raises(ValueError) as error:
            make(config, sinks=2)
        assert f"sinks=2 were asked for, but the model was made with window={window}" in str(error.value)


def test_a_text_without_end_has_an_end():
    """Past 2**20 an angle in float32 is too coarse; a model with a longer context has said that it can do with it."""
    config = small_config()
    assert WindowCache(config, 8, max_len=2**20, device="cpu").max_len == 2**20
    for make in (WindowCache, WindowCache.bytes_for):
        with pytest.raises(ValueError, match="max_len=1048577 must be at most 1048576"):
            make(config, 8, max_len=2**20 + 1)
    longer = small_config(max_seq_len=2**21)
    assert WindowCache(longer, 8, device="cpu").max_len == 2**21


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("size", [7, 30])
def test_padding_that_is_no_number_spoils_nothing(model, rows, expected, monkeypatch, size, sinks):
    """Token 0 fills up the rows; here it has an embedding of NaN, and 0 x NaN is NaN."""
    rows = [[max(1, token) for token in row] for row in rows[1:]]
    right = [by_distance(model, row, (8, 8), sinks) for row in rows]
    embed = model.embed_tokens.forward
    spoil = lambda tokens: embed(tokens).masked_fill((tokens == 0)[..., None], torch.nan)  # noqa: E731
    monkeypatch.setattr(model.embed_tokens, "forward", spoil)
    cache = new_cache(model, 8, sinks, batch_size=2)
    for logits, ours in zip(feed(model, cache, rows, in_chunks(75, size)), right, strict=True):
        assert largest_difference(logits, ours) < 1e-4
