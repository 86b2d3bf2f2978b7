"""The cache in few bits, against KIVI as its paper tells it, and a slow model that rounds in plain loops."""

import itertools

import numpy as np
import pytest
import torch
from reference import feed, in_chunks, largest_difference, random_tokens, small_config, small_model

import kvcourse as kv
import kvcourse.caches.quantized as quantized_module
from kvcourse.caches.quantized import QuantizedCache
from kvcourse.caches.quantized_store import Layout, Store, fake_quantize
from kvcourse.generation import pad

AXES = list(itertools.product(("channel", "token"), repeat=2))  # of keys, of values
KIVI, OTHER = AXES[1:3]
CPU = {"dtype": torch.float32, "device": "cpu"}


@pytest.fixture(scope="module")
def model():
    return small_model()  # d_head = 8


def new_cache(model, bits=2, group_size=4, residual=8, batch_size=1, **options):
    options = {"dtype": model.dtype, "device": model.device, **options}
    return QuantizedCache(model.config, bits, group_size, residual, batch_size, **options)


def wide_config(**changes):
    """Heads of 32, for groups of 32."""
    return small_config(n_heads=2, n_kv_heads=1, d_head=32, **changes)


# What is rounded, by hand


def up(x, kind):
    """The smallest number of a half-precision type that is not below x (float32), by another road than the grid's."""
    if kind == torch.float16:
        kept = x.numpy().astype(np.float16)
        return torch.from_numpy(np.where(kept < x.numpy(), np.nextafter(kept, np.float16(np.inf)), kept)).float()
    bits = x.view(torch.int32)  # bfloat16 is the upper half of float32
    return torch.where(x > 0, (bits + 0xFFFF) & ~0xFFFF, bits & ~0xFFFF).view(torch.float32)


def round_tokens(x, bits, axis, size):
    """Codes, scale, minimum and values `(4, H, T, D)` of x `(H, T, D)`, rounded in whole groups; the scale and the
    minimum of a group, in half precision before codes are chosen, stand beside each of its numbers."""
    kind = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float16
    lines = x.mT if axis == "channel" else x
    groups = lines.float().reshape(-1, size)
    minimum = -up(-groups.amin(1, keepdim=True), kind)
    scale = (groups.amax(1, keepdim=True) - minimum) / (2**bits - 1)
    scale = up(torch.where(scale == 0, 1, scale), kind)
    codes = ((groups - minimum) / scale).round().clamp(0, 2**bits - 1)
    parts = torch.stack(torch.broadcast_tensors(codes, scale, minimum, codes * scale + minimum))
    parts = parts.reshape(4, *lines.shape)
    return parts.mT if axis == "channel" else parts


class Kivi:
    """One tensor of one head group, as the paper's pseudocode has it (arXiv 2402.02750, algorithm 1): keys wait until
    `residual` of them are there, values until `residual` newer ones are."""

    def __init__(self, bits, axis, size, residual):
        self.bits, self.axis, self.size, self.residual = bits, axis, size, residual
        self.rounded, self.waiting = [], []

    def append(self, token):
        self.waiting.append(token)
        if self.axis == "token":
            while len(self.waiting) > self.residual:
                self.round(1)
        elif len(self.waiting) == (self.residual or self.size):
            self.round(len(self.waiting))

    def round(self, n):
        block, self.waiting = torch.stack(self.waiting[:n], 1), self.waiting[n:]
        self.rounded.append(round_tokens(block, self.bits, self.axis, self.size))

    def result(self, like):
        """codes, scale, minimum, values `(H, n, D)`, with the scale repeated for each number; exact `(H, m, D)`."""
        empty = like.new_zeros(4, like.shape[0], 0, like.shape[2], dtype=torch.float32)
        exact = torch.stack(self.waiting, 1) if self.waiting else like[:, :0]
        return *torch.cat([empty, *self.rounded], 2), exact


def push(cache, keys, values, chunks, start=0):
    """Put keys and values `(layers, B, H, T, D)` into a cache as a model would; the attention of each step."""
    out = []
    for size in chunks:
        new = slice(start, start + size)
        with cache.step(cache.next_positions(size)) as step:
            for layer in range(len(keys)):
                q = keys[layer][:, :, new].repeat_interleave(cache.config.group_size, 1)
                out.append(step.attend(layer, q, keys[layer][:, :, new], values[layer][:, :, new]))
        start += size
    return out


def numbers(config, tokens, rows=1, seed=0, dtype=torch.float32):
    """Keys and values; each channel has its own middle, as keys of real models do."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, config.n_layers, rows, config.n_kv_heads, tokens, config.d_head)
    middle = 3 * torch.randn(*shape[:-2], 1, shape[-1], generator=generator)
    return (torch.randn(shape, generator=generator) + middle).to(dtype)


def tensors(cache):
    return [tensor.clone() for store in cache.stores for tensor in store.tensors[:3]]


def held(cache, layer, row=0):
    """Everything of a row, exact part included, with scales as they are stored."""
    parts = cache.parts(layer, row)
    return [*parts.keys, *parts.values]


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# The rule of what is rounded


def test_decoded_keys_are_rounded_too():
    """Prefill 32, 168 single tokens, groups and residual of 32: 192 keys are rounded, 168 values."""
    config = wide_config()
    keys, values = numbers(config, 200)
    cache = QuantizedCache(config, 2, max_len=200, **CPU)
    push(cache, keys, values, [32] + [1] * 168)
    assert (cache.quantized_keys, cache.quantized_values) == ([192], [168])
    for layer in range(config.n_layers):
        k, v = cache.parts(layer)
        assert k.codes.shape == (1, 192, 32) and k.exact.shape == (1, 8, 32)
        assert v.codes.shape == (1, 168, 32) and v.exact.shape == (1, 32, 32)
        assert k.scale.shape == k.minimum.shape == (1, 6, 32) and v.scale.shape == v.minimum.shape == (1, 168, 1)
        assert torch.equal(k.exact, keys[layer, 0, :, 192:]) and torch.equal(v.exact, values[layer, 0, :, 168:])
        for part, exact in ((k, keys), (v, values)):
            error = (part.rounded - exact[layer, 0, :, : part.codes.shape[1]]).abs()
            assert error.amax((0, 2)).min() > 0.1  # no token of which a group of one would be exact
            assert int(part.codes.max()) == 3 and int(part.codes.min()) == 0
    at_once = QuantizedCache(config, 2, max_len=200, **CPU)
    push(at_once, keys, values, [200])
    assert equal(tensors(cache), tensors(at_once))


@pytest.mark.parametrize("prompt", [1, 20, 32])
def test_a_prompt_within_the_residual_is_exact(prompt):
    model = small_model(wide_config())
    row = random_tokens(prompt).tolist()
    cache, dense = new_cache(model, 2, 32, 32), kv.DenseCache(model.config, **CPU)
    (logits,), (right,) = feed(model, cache, [row], [prompt]), feed(model, dense, [row], [prompt])
    assert torch.equal(logits, right)
    assert cache.quantized_keys == [32 * (prompt == 32)] and cache.quantized_values == [0]
    logits, right = (feed(model, c, [[5]], [1])[0] for c in (cache, dense))
    assert (largest_difference(logits, right) < 1e-5) == (prompt < 32)  # 32 keys are rounded together, the partner


@pytest.mark.parametrize(("residual", "keys", "values"), [(32, 32, 1), (0, 32, 33), (64, 0, 0)])
def test_a_prompt_of_33_rounds_just_the_old_part(residual, keys, values):
    config = wide_config()
    k, v = numbers(config, 33)
    cache = QuantizedCache(config, 2, 32, residual, **CPU)
    push(cache, k, v, [33])
    assert (cache.quantized_keys, cache.quantized_values) == ([keys], [values])
    assert torch.equal(cache.parts(1).keys.exact, k[1, 0, :, keys:])
    assert torch.equal(cache.parts(1).values.exact, v[1, 0, :, values:])


SCHEDULES = [[41], [1] * 41, in_chunks(41, 7), [17] + [1] * 10 + [14]]


SIZES = [(2, 4, 8), (3, 4, 4), (8, 4, 0), (4, 8, 16), (4, 1, 3), (2, 2, 64)]


@pytest.mark.parametrize(("bits", "group_size", "residual"), SIZES)
@pytest.mark.parametrize(("key_axis", "value_axis"), AXES)
def test_codes_are_those_of_kivi_however_tokens_arrive(bits, key_axis, value_axis, group_size, residual):
    config = small_config(n_layers=1)
    new = numbers(config, 41)
    expected = []
    for tensor, axis in zip(new, (key_axis, value_axis), strict=True):
        kivi = Kivi(bits, axis, group_size, residual)
        for token in tensor[0, 0].unbind(1):
            kivi.append(token)
        expected.append(kivi.result(tensor[0, 0]))
    axes = {"key_axis": key_axis, "value_axis": value_axis}
    first = None
    for chunks in SCHEDULES:
        cache = QuantizedCache(config, bits, group_size, residual, max_len=50, **axes, **CPU)
        push(cache, *new, chunks)
        first = first or tensors(cache)
        assert equal(tensors(cache), first)
    for part, (codes, scale, minimum, values, exact), axis in zip(
        cache.parts(0), expected, (key_axis, value_axis), strict=True
    ):
        along = 1 if axis == "channel" else 2
        assert torch.equal(part.codes.float(), codes) and torch.equal(part.exact, exact)
        assert torch.equal(part.scale.float().repeat_interleave(group_size, along), scale)
        assert torch.equal(part.minimum.float().repeat_interleave(group_size, along), minimum)
        assert torch.equal(part.rounded, values)


def test_a_rule_that_looks_at_the_call_alone_shows(monkeypatch):
    """The partner, and failure 55: single tokens are never enough for a group, so decoded keys stay exact for ever."""
    config = wide_config()
    new = numbers(config, 200)
    right, wrong = (QuantizedCache(config, 2, max_len=200, **CPU) for _ in range(2))
    push(right, *new, [32] + [1] * 168)
    rule = Layout.quantized

    def stuck(layout, n):
        return rule(layout, n.clamp(max=32) if torch.is_tensor(n) else min(n, 32))

    monkeypatch.setattr(Layout, "quantized", stuck)
    push(wrong, *new, [32] + [1] * 168)
    assert (wrong.quantized_keys, wrong.quantized_values) == ([32], [0])
    assert not equal(tensors(right), tensors(wrong))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_error_is_half_a_step(bits, dtype):
    config = wide_config()
    new = numbers(config, 64, dtype=dtype)
    cache = QuantizedCache(config, bits, residual=0, dtype=dtype, device="cpu")
    push(cache, *new, [64])
    for part, x, along in zip(cache.parts(0), new, (1, 2), strict=True):
        assert part.scale.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
        step = part.scale.float().repeat_interleave(32, along)
        error = (part.rounded - x[0, 0].float()).abs() / step
        assert 0.49 < error.max() < 0.5001 and 0.2 < error.mean() < 0.26  # 1/4 if numbers are spread evenly


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_fake_quantize_is_what_the_cache_reads_back(axis, dtype):
    config = small_config()
    keys, values = numbers(config, 30, rows=3, dtype=dtype)
    options = {"key_axis": axis, "value_axis": axis, "dtype": dtype, "device": "cpu"}
    cache = QuantizedCache(config, 4, 4, 0, 3, **options)
    push(cache, keys, values, [9] * 3 + [3])
    fake = fake_quantize(keys[1], 4, axis, 4)
    n = 28 if axis == "channel" else 30  # 30 tokens are 7 groups of 4, and two tokens more
    assert fake.dtype == dtype and torch.equal(fake[:, :, n:], keys[1][:, :, n:])
    for row in range(3):
        assert torch.equal(cache.parts(1, row).keys.rounded.to(dtype), fake[row, :, :n])
        slow = round_tokens(keys[1][row, :, :n], 4, axis, 4)[3].to(dtype)
        assert torch.equal(fake[row, :, :n], slow)
    other = fake_quantize(keys[1], 4, "token" if axis == "channel" else "channel", 4)  # the partner
    assert largest_difference(other, fake) > 0.01


@pytest.mark.parametrize("axes", AXES)
def test_the_largest_numbers_of_float16_are_read_back_as_such(axes):
    """On its grid 65504 is read as 65536, which float16 has no place for."""
    config = small_config(n_layers=1)
    keys, values = numbers(config, 20, dtype=torch.float16)
    for x in (keys, values):
        x[0, 0, 0, 3, 2:4] = torch.tensor([65504.0, -65504.0])
        x[0, 0, 0, 2, 2:4] = torch.tensor([-65504.0, 65504.0])
    cache = QuantizedCache(config, 4, 4, 8, key_axis=axes[0], value_axis=axes[1], dtype=torch.float16, device="cpu")
    push(cache, keys, values, [16])
    for part in cache.parts(0):
        assert part.rounded.abs().max() > 65504 + 16  # what half of float32 would make infinite
    with cache.step(cache.next_positions(1)) as step:
        for store in (step.keys, step.values):
            seen = store.store_and_read(0, keys[0][:, :, 16:17])
            assert seen.isfinite().all() and seen[0, 0, 3, 2:4].tolist() == [65504, -65504]
        step.attend(0, keys[0][:, :, 16:17].repeat_interleave(4, 1), keys[0][:, :, 16:17], values[0][:, :, 16:17])
    for axis in ("token", "channel"):
        assert fake_quantize(keys[0], 4, axis, 4).isfinite().all()


# Logits, against a model that rounds in plain loops


def slow_logits(model, row, chunks, bits=2, size=4, residual=8, key_axis="channel", value_axis="token", blind=False):
    """Logits `(T, V)`: each chunk sees what was rounded before it as it was rounded, and everything newer exactly.

    `blind` is what another project did: a chunk sees its own tokens rounded too.
    """
    c = model.config
    memory = [(Kivi(bits, key_axis, size, residual), Kivi(bits, value_axis, size, residual)) for _ in model.layers]
    logits, start = [], 0
    for n in chunks:
        tokens = torch.tensor([row[start : start + n]])
        positions = torch.arange(start, start + n)
        x, rotary = model.embed_tokens(tokens), model.rotary(positions[None])
        for layer, kivis, window in zip(model.layers, memory, c.windows, strict=True):
            h, attn = layer.input_layernorm(x), layer.self_attn
            q, k, v = (attn.split(p(h)) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
            q, k = (turned(t, *rotary)[0] for t in (q, k))
            seen = []
            for kivi, new in zip(kivis, (k, v[0]), strict=True):
                *_, old, waiting = kivi.result(new)
                for token in new.unbind(1):
                    kivi.append(token)
                if blind:
                    *_, old, waiting = kivi.result(new)
                    new = new[:, :0]
                seen.append(torch.cat((old.to(x.dtype), waiting, new), 1).repeat_interleave(c.group_size, 0))
            keys = torch.arange(start + n)
            mask = keys <= positions[:, None]
            if window is not None:
                mask &= positions[:, None] - keys < window
            scores = (q @ seen[0].mT / c.d_head**0.5).masked_fill(~mask, -torch.inf)
            x = x + attn.o_proj((scores.softmax(-1) @ seen[1]).transpose(0, 1).flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits.append(model.head(model.norm(x))[0])
        start += n
    return torch.cat(logits)


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


MODELS = {
    "mha": {"n_kv_heads": 8},
    "gqa": {},
    "mqa": {"n_kv_heads": 1},
    "window": {"window": 12},
    "windows": {"window": (5, None)},
}


@pytest.fixture(scope="module")
def models():
    """In float64: another order of summing moves no number to another code."""
    return {name: small_model(small_config(**changes), dtype=torch.float64) for name, changes in MODELS.items()}


CHUNKS = {"at once": [50], "prompt": [20] + [1] * 30, "sevens": in_chunks(50, 7), "16": in_chunks(50, 16)}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_slow_model(models, name, chunks):
    model, row = models[name], random_tokens(50).tolist()
    (logits,) = feed(model, new_cache(model), [row], chunks)
    assert largest_difference(logits, slow_logits(model, row, chunks)) < 1e-5


@pytest.mark.parametrize(("key_axis", "value_axis"), AXES)
@pytest.mark.parametrize(("bits", "size", "residual"), [(4, 8, 8), (3, 2, 0), (8, 4, 16)])
def test_so_they_do_with_other_settings(models, key_axis, value_axis, bits, size, residual):
    model, row, chunks = models["gqa"], random_tokens(41).tolist(), [13, 9] + [1] * 19
    axes = {"key_axis": key_axis, "value_axis": value_axis}
    (logits,) = feed(model, new_cache(model, bits, size, residual, **axes), [row], chunks)
    assert largest_difference(logits, slow_logits(model, row, chunks, bits, size, residual, **axes)) < 1e-5


def test_what_is_different_shows(models):
    """The partner: another axis, other bits, another schedule, and tokens that are rounded before they are seen."""
    model, row, chunks = models["gqa"], random_tokens(50).tolist(), in_chunks(50, 7)
    (logits,) = feed(model, new_cache(model), [row], chunks)
    for other in ({"key_axis": "token"}, {"bits": 3}, {"residual": 4}, {"blind": True}):
        assert largest_difference(logits, slow_logits(model, row, chunks, **other)) > 0.05
    assert largest_difference(logits, slow_logits(model, row, in_chunks(50, 8))) > 0.05


@pytest.mark.parametrize("name", ["gqa", "window"])
def test_eight_bits_are_close_to_a_dense_cache(models, name):
    model, row = models[name], random_tokens(64).tolist()
    right = model(torch.tensor([row]))[0]
    differences = []
    for bits in (8, 4, 2):
        (logits,) = feed(model, new_cache(model, bits, 8, 8), [row], [40] + [1] * 24)
        differences.append(largest_difference(logits, right))
    assert differences[0] < 0.05 < 0.3 < differences[2] and differences[0] < differences[1] < differences[2]


@pytest.mark.parametrize("window", [8, (8, None)])
def test_a_window_is_kept_to(window):
    """Within the residual nothing is rounded, and the windowed model is met exactly."""
    model = small_model(small_config(window=window))
    rows = [random_tokens(n, seed=n).tolist() for n in (3, 40, 17)]
    for chunks in ([40], in_chunks(40, 7), [1] * 40):
        cache = new_cache(model, residual=64, batch_size=3)
        for row, logits in zip(rows, feed(model, cache, rows, chunks), strict=True):
            assert largest_difference(logits, model(torch.tensor([row]))[0]) < 1e-4
    wide = small_model()
    (logits,) = feed(wide, new_cache(wide, residual=64), rows[1:2], [40])  # the partner
    assert largest_difference(logits, model(torch.tensor(rows[1:2]))[0]) > 0.1


# Batches


@pytest.mark.parametrize(("key_axis", "value_axis"), [KIVI, OTHER])
@pytest.mark.parametrize("residual", [0, 8])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_rows_of_unequal_length_equal_each_row_alone(models, size, residual, key_axis, value_axis):
    model = models["gqa"]
    rows = [random_tokens(n, seed=n).tolist() for n in (3, 40, 17, 40)]
    options = {"residual": residual, "key_axis": key_axis, "value_axis": value_axis, "max_len": 41}
    batch = new_cache(model, batch_size=4, **options)
    together = feed(model, batch, rows, in_chunks(40, size))
    assert batch.lengths == [3, 40, 17, 40]
    more, positions = pad([[5], [6], [7], []], batch.lengths)
    together_more = model(more, positions, batch)
    for i, row in enumerate(rows):
        alone = new_cache(model, **options)
        (logits,) = feed(model, alone, [row], in_chunks(len(row), size))
        assert largest_difference(logits, together[i]) < 1e-5
        if i < 3:
            assert largest_difference(model(more[i : i + 1], cache=alone), together_more[i : i + 1]) < 1e-5
        for layer in (0, 1):
            a, b = held(alone, layer), held(batch, layer, i)
            assert all(torch.equal(x, y) for n in (0, 5) for x, y in zip(a[n : n + 3], b[n : n + 3], strict=True))


def test_rows_that_end_at_different_times_take_single_tokens_together():
    config = small_config()
    new = numbers(config, 60, rows=3)
    held_before = (3, 30, 20)
    batch = QuantizedCache(config, 2, 4, 8, 3, **CPU)
    alone = [QuantizedCache(config, 2, 4, 8, **CPU) for _ in held_before]
    for step in range(60):
        sizes = [int(step < n) for n in held_before] if step < 30 else [1, 1, int(step % 2)]
        tokens = [[0] * size for size in sizes]
        _, positions = pad(tokens, batch.lengths)
        if not any(sizes):
            continue
        starts = list(batch.lengths)
        ours = torch.stack([new[:, :, row, :, start : start + 1] for row, start in enumerate(starts)], 2)
        spoilt = ours.clone()
        spoilt[:, :, [not size for size in sizes]] = torch.nan  # padding is never stored
        with batch.step(positions) as together:
            for layer in range(2):
                together.attend(layer, spoilt[0, layer].repeat_interleave(4, 1), *spoilt[:, layer])
        for row, size in enumerate(sizes):
            push(alone[row], *new[:, :, row : row + 1], [1] * size, starts[row])
    assert batch.lengths == [cache.length for cache in alone] and min(batch.lengths) > 16
    for row, cache in enumerate(alone):
        assert equal(held(batch, 1, row), held(cache, 1))


@pytest.mark.parametrize("residual", [0, 8])
def test_a_row_that_catches_up(models, residual):
    """Rows of 20 and 25 tokens that both go on to 30 are not alike before the step, only after it."""
    model, text = models["gqa"], random_tokens(30).tolist()
    cache, starts = new_cache(model, residual=residual, batch_size=2), (20, 25)
    feed(model, cache, [text[:n] for n in starts], [25])
    together = feed(model, cache, [text[n:] for n in starts], [10])
    for row, n in enumerate(starts):
        alone = new_cache(model, residual=residual)
        (logits,) = feed(model, alone, [text], [n, 30 - n])
        assert largest_difference(logits[n:], together[row]) < 1e-5
        assert equal(held(alone, 0)[:3], held(cache, 0, row)[:3])


def test_padding_that_is_no_number_spoils_nothing(models, monkeypatch):
    model = small_model(dtype=torch.float64)
    rows = [[max(1, token) for token in random_tokens(n, seed=n).tolist()] for n in (40, 17)]
    right = [slow_logits(model, row, in_chunks(len(row), 7)) for row in rows]
    embed = model.embed_tokens.forward
    spoil = lambda tokens: embed(tokens).masked_fill((tokens == 0)[..., None], torch.nan)  # noqa: E731
    monkeypatch.setattr(model.embed_tokens, "forward", spoil)
    cache = new_cache(model, batch_size=2)
    for logits, ours in zip(feed(model, cache, rows, in_chunks(40, 7)), right, strict=True):
        assert largest_difference(logits, ours) < 1e-5


# Errors leave the cache as it was


@pytest.mark.parametrize(("key_axis", "value_axis"), [KIVI, OTHER])
@pytest.mark.parametrize("residual", [0, 8])
@pytest.mark.parametrize("new", [1, 5, 20])
@pytest.mark.parametrize("lengths", [[31, 31], [4, 31], [8, 24]])
def test_an_error_inside_a_step_leaves_the_cache_as_it_was(
    models, monkeypatch, residual, new, lengths, key_axis, value_axis
):
    model = models["gqa"]
    rows = [random_tokens(n + new, seed=n).tolist() for n in lengths]
    options = {"residual": residual, "batch_size": 2, "key_axis": key_axis, "value_axis": value_axis}
    cache, calm = new_cache(model, **options), new_cache(model, **options)
    for each in (cache, calm):
        feed(model, each, [row[:n] for row, n in zip(rows, lengths, strict=True)], [31])
    before = [held(cache, layer, row) for layer in (0, 1) for row in (0, 1)]
    codes = tensors(cache)
    tokens, positions = pad([[1] * new, [2] * new], cache.lengths)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens, positions, cache)
    assert cache.lengths == lengths and equal(tensors(cache), codes)
    for now, then in zip([held(cache, layer, row) for layer in (0, 1) for row in (0, 1)], before, strict=True):
        assert equal(now, then)
    after = [feed(model, c, [r[n:] for r, n in zip(rows, lengths, strict=True)], [new]) for c in (cache, calm)]
    assert equal(*after)


def test_an_error_that_is_not_undone_shows(model, monkeypatch):
    """The partner: a ring that is not put back."""
    monkeypatch.setattr(quantized_module.StoreStep, "undo", lambda step: None)
    cache = new_cache(model)
    feed(model, cache, [random_tokens(30).tolist()], [30])
    before = held(cache, 0)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(random_tokens(1, 5, seed=9), cache=cache)
    assert not equal(held(cache, 0), before)


@pytest.mark.parametrize("worst", [torch.nan, torch.inf, 1e6])
def test_numbers_without_a_place_on_a_grid_are_refused(worst):
    config = small_config()
    new = numbers(config, 20)
    cache = QuantizedCache(config, 4, 4, 8, **CPU)
    push(cache, *new, [10])
    before = held(cache, 0)
    new[0, 1, 0, 1, 12, 3] = worst
    with pytest.raises(ValueError, match="The keys to be rounded .* NaN, infinite or too large for torch.float16: use"):
        push(cache, *new, [10], start=10)
    assert cache.length == 10 and equal(held(cache, 0), before)
    push(cache, *numbers(config, 20), [10], start=10)
    assert all(x.isfinite().all() for x in held(cache, 1))


@pytest.mark.parametrize("residual", [0, 8])
def test_reset_forgets_even_poison(model, residual):
    cache = new_cache(model, residual=residual, batch_size=2)
    feed(model, cache, [random_tokens(30).tolist()] * 2, [30])
    for store in cache.stores:
        for tensor in store.tensors[1:]:
            tensor.fill_(torch.nan)
        store.codes.fill_(255)
    cache.reset()
    assert cache.lengths == [0, 0] and not any(t.any() for s in cache.stores for t in s.tensors)
    rows = [random_tokens(5).tolist(), random_tokens(18, seed=3).tolist()]
    fresh = new_cache(model, residual=residual, batch_size=2)
    for a, b in zip(feed(model, cache, rows, [9, 9]), feed(model, fresh, rows, [9, 9]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("axes", "residual", "held_tokens", "length", "refused"),
    [
        (("channel", "token"), 8, 8, 8, None),
        (("channel", "token"), 8, 7, 3, None),  # all exact still
        (("channel", "token"), 8, 8, 3, "keys of positions 0 to 2"),
        (("channel", "token"), 8, 20, 17, "values of positions 9 to 11"),
        (("channel", "token"), 8, 20, 0, None),
        (("channel", "token"), 8, 20, 99, None),
        (("channel", "channel"), 8, 23, 17, None),
        (("channel", "channel"), 8, 23, 16, None),
        (("channel", "channel"), 8, 23, 8, None),  # whole rings, that stay rounded
        (("channel", "channel"), 8, 23, 12, "keys of positions 8 to 11"),
        (("token", "token"), 0, 23, 5, None),  # no token is ever exact
        (("token", "token"), 4, 23, 22, "keys of positions 18 to 18"),
        (("channel", "token"), 0, 23, 20, None),  # five groups of 4
        (("channel", "token"), 0, 23, 18, "keys of positions 16 to 17"),
    ],
)
def test_truncate_goes_back_where_the_rule_holds(axes, residual, held_tokens, length, refused):
    config = small_config()
    new = numbers(config, 40)
    options = {"key_axis": axes[0], "value_axis": axes[1], **CPU}
    cache, straight = (QuantizedCache(config, 2, 4, residual, **options) for _ in range(2))
    push(cache, *new, [held_tokens])
    if refused is not None:
        before = held(cache, 1)
        with pytest.raises(ValueError, match=f"from {held_tokens} tokens to {length}: the {refused} would be exact"):
            cache.truncate(length)
        assert cache.length == held_tokens and equal(held(cache, 1), before)
        return
    cache.truncate(length)
    kept = min(length, held_tokens)
    push(straight, *new, [kept] if kept else [])
    assert cache.length == kept and equal(tensors(cache), tensors(straight))
    for each in (cache, straight):
        push(each, *new, [11, 1], start=kept)
    assert equal(held(cache, 1), held(straight, 1))


def test_a_row_that_cannot_go_back_keeps_all_rows(model):
    cache = new_cache(model, batch_size=2)
    feed(model, cache, [[1, 2, 3], random_tokens(9).tolist()], [9])
    with pytest.raises(ValueError, match=r"Row 1 .*prefill the first 2 tokens again"):
        cache.truncate(2)
    assert cache.lengths == [3, 9]
    with pytest.raises(ValueError, match="length=-1"):
        cache.truncate(-1)


def test_a_cache_made_in_inference_mode_works_outside(model):
    with torch.inference_mode():
        cache = new_cache(model)
        model(random_tokens(1, 9), cache=cache)
    model(random_tokens(1, 9), cache=cache)
    model(random_tokens(1, 1), cache=cache)
    assert cache.lengths == [19]


# Bytes


@pytest.mark.parametrize(
    ("bits", "size", "residual", "max_len", "axes", "of_a_head"),
    [
        # keys: codes + groups x 4 + exact; values: the same. Heads of 8 numbers; exact ones in 2 bytes.
        (2, 4, 8, 64, ("channel", "token"), 64 * 2 + 16 * 8 * 4 + 8 * 16 + 56 * 2 + 56 * 2 * 4 + 8 * 16),
        (4, 8, 8, 61, ("channel", "token"), 56 * 4 + 7 * 8 * 4 + 8 * 16 + 53 * 4 + 53 * 4 + 8 * 16),
        (3, 4, 0, 10, ("channel", "token"), 8 * 3 + 2 * 8 * 4 + 4 * 16 + 10 * 3 + 10 * 2 * 4),
        (8, 2, 4, 3, ("token", "channel"), 3 * 16 + 3 * 16),  # all exact, and no more of them than a text has
        (2, 3, 6, 12, ("channel", "channel"), 2 * (12 * 2 + 4 * 8 * 4 + 6 * 16)),
    ],
)
def test_bytes_are_those_of_the_formula(bits, size, residual, max_len, axes, of_a_head):
    config = small_config()
    options = {"key_axis": axes[0], "value_axis": axes[1], "dtype": torch.bfloat16}
    cache = QuantizedCache(config, bits, size, residual, 3, max_len, **options, device="cpu")
    assert cache.nbytes == 2 * 3 * 2 * of_a_head  # layers x rows x KV heads
    assert QuantizedCache.bytes_for(config, bits, size, residual, 3, max_len, **options) == cache.nbytes


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("key_axis", "value_axis"), AXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_are_those_really_held(bits, size, key_axis, value_axis, dtype):
    config = small_config(n_kv_heads=4)
    for times, max_len in ((0, 33), (1, 8), (3, 100)):
        settings = (config, bits, size, times * size, 2, max_len)
        axes = {"key_axis": key_axis, "value_axis": value_axis, "dtype": dtype}
        cache = QuantizedCache(*settings, **axes, device="cpu")
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for s in cache.stores for t in s.tensors
        }
        assert cache.nbytes == sum(storages.values()) == QuantizedCache.bytes_for(*settings, **axes)


def test_few_bits_take_little_memory_and_none_is_added():
    """Groups of 32 in 2 bits with 32 bits of scale and minimum are 3 bits a number, and 16 in half precision."""
    config = small_config(d_head=64, max_seq_len=4096)
    cache = QuantizedCache(config, 2, dtype=torch.float16, device="cpu")
    dense = kv.DenseCache.bytes_for(config, dtype=torch.float16)
    exact = kv.DenseCache.bytes_for(config, max_len=32, dtype=torch.float16)
    values_rounded = (4096 - 32) / 4096
    assert cache.nbytes == dense / 2 * 3 / 16 * (1 + values_rounded) + exact
    where = [tensor.data_ptr() for store in cache.stores for tensor in store.tensors]
    before = cache.nbytes
    push(cache, *numbers(config, 150, dtype=torch.float16), [100] + [1] * 50)
    assert [tensor.data_ptr() for store in cache.stores for tensor in store.tensors] == where
    held_now = {id(value) for store in cache.stores for value in vars(store).values() if torch.is_tensor(value)}
    assert held_now == {id(tensor) for store in cache.stores for tensor in store.tensors} and cache.nbytes == before


def test_exact_fit_and_one_token_more(model):
    row = random_tokens(22).tolist()
    for max_len in (5, 8, 21):
        cache = new_cache(model, max_len=max_len)
        feed(model, cache, [row[:max_len]], [3] + [1] * (max_len - 3))
        before = held(cache, 1)
        with pytest.raises(ValueError, match=f"room for {max_len} tokens a row, but this step needs .* QuantizedCache"):
            model(torch.tensor([[1]]), cache=cache)
        assert cache.lengths == [max_len] and equal(held(cache, 1), before)


# generate


@pytest.mark.parametrize("chunk", [None, 5])
def test_generate_writes_what_the_slow_model_would(models, chunk):
    model, prompt = models["gqa"], random_tokens(30).tolist()
    made = kv.generate(model, prompt, 12, cache=new_cache(model), prefill_chunk=chunk).ids
    text, prefill = list(prompt), in_chunks(30, chunk or 30)
    for _ in range(12):
        text.append(int(slow_logits(model, text, prefill + [1] * (len(text) - 30))[-1].argmax()))
    assert made == text[30:]
    assert made != kv.generate(model, prompt, 12).ids  # the partner: 2 bits are not enough here


def test_generate_goes_on_from_a_quantized_cache(models):
    model = models["windows"]
    rows = [random_tokens(n, seed=n).tolist() for n in (40, 25)]
    together = new_cache(model, batch_size=2)
    kv.prefill(model, [row[:20] for row in rows], together, chunk=10)
    made = kv.generate(model, [row[20:] for row in rows], 9, cache=together, prefill_chunk=10)
    for row, ours in zip(rows, made, strict=True):
        assert kv.generate(model, row, 9, cache=new_cache(model), prefill_chunk=10).ids == ours.ids
    assert together.lengths == [48, 33]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = small_model(dtype=dtype)
    row = random_tokens(60).tolist()
    (logits,) = feed(model, new_cache(model, 8), [row], [40] + [1] * 20)
    assert logits.dtype == dtype and largest_difference(logits, model(torch.tensor([row]))[0]) < 0.2
    (rough,) = feed(model, new_cache(model, 2), [row], [40] + [1] * 20)
    assert largest_difference(rough, model(torch.tensor([row]))[0]) > 0.3


# What is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": 5}, "bits=5 must be one of 2, 3, 4, 8"),
        ({"bits": True}, "bits=True must be one of"),
        ({"group_size": 0}, "group_size=0 must be a whole number of at least 1"),
        ({"group_size": -4}, "group_size=-4 must be"),
        ({"group_size": None}, "group_size=None must be"),
        ({"group_size": "tensor"}, "group_size='tensor' must be"),
        ({"group_size": 3, "residual": 6}, 'does not divide d_head=8, as the values .* "token": give one of 8'),
        ({"group_size": 16, "residual": 16}, "group_size=16 does not divide d_head=8"),
        ({"residual": -1}, "residual=-1 must be a whole number of at least 0"),
        ({"residual": 2.5}, "residual=2.5"),
        ({"residual": 10}, 'residual=10 is no multiple of group_size=4, as the keys .* "channel": give 8 or 12'),
        ({"residual": 3}, "give 0 or 4"),
        ({"key_axis": "head"}, "The axis of keys must be .channel. or .token., got 'head'"),
        ({"value_axis": None}, "The axis of values must be"),
        ({"max_len": 0}, "max_len=0"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    given = {"bits": 4, "group_size": 4, "residual": 8, **settings}
    for make in (QuantizedCache, QuantizedCache.bytes_for):
        with pytest.raises(ValueError, match=words) as error:
            make(small_config(), **given)
        assert "\n" not in str(error.value)


def test_groups_of_other_sizes_where_nothing_has_to_be_divided():
    """Along tokens a group need not divide a head, and along channels it need not divide the residual."""
    config = small_config()
    QuantizedCache(config, 4, 3, 6, value_axis="channel", **CPU)
    QuantizedCache(config, 4, 8, 5, key_axis="token", **CPU)


def test_memory_that_cannot_be_had_is_refused():
    for max_len in (10**15, 10**30):
        with pytest.raises(ValueError, match="takes .* GB, which could not be had on cpu: give a smaller max_len"):
            QuantizedCache(small_config(), 4, 4, 8, max_len=max_len, **CPU)


def test_parts_of_what_is_not_there(model):
    cache = new_cache(model)
    with pytest.raises(ValueError, match="layer=2 must be below 2"):
        cache.parts(2)
    with pytest.raises(ValueError, match="row=-1 must be"):
        cache.parts(0, -1)
    keys, values = cache.parts(0)
    assert keys.codes.shape == keys.exact.shape == values.rounded.shape == (2, 0, 8)


def test_parts_are_copies(model):
    cache = new_cache(model, 8, batch_size=2)
    feed(model, cache, [random_tokens(20).tolist()] * 2, [20])
    before = [tensor.clone() for tensor in held(cache, 0)]
    for tensor in held(cache, 0):
        tensor.fill_(1)
    assert equal(held(cache, 0), before)


@pytest.mark.parametrize("given", [None, "tiny-gqa", kv.PUBLISHED["Mistral 7B v0.1"]])
def test_a_cache_is_made_for_a_config(given):
    for make in (QuantizedCache, QuantizedCache.bytes_for):
        with pytest.raises(ValueError, match="config must be a ModelConfig"):
            make(given, 4)


def test_cache_of_another_model_batch_or_dtype_is_refused(model):
    tokens = random_tokens(1, 3)
    with pytest.raises(ValueError, match="another model .n_layers=3 here, 2 in the model"):
        model(tokens, cache=QuantizedCache(small_config(n_layers=3), 4, 4, 8, **CPU))
    with pytest.raises(ValueError, match="holds torch.float16 on cpu, the model computes in torch.float32"):
        model(tokens, cache=new_cache(model, dtype=torch.float16))
    with pytest.raises(ValueError, match="holds 2 rows of text, but 1 were given"):
        model(tokens, cache=new_cache(model, batch_size=2))


def test_fake_quantize_refuses_what_the_cache_refuses():
    x = torch.randn(1, 2, 8, 8)
    for bad, words in (((5, "token", 4), "bits=5"), ((4, "row", 4), "axis of numbers"), ((4, "token", 3), "d_head=8")):
        with pytest.raises(ValueError, match=words):
            fake_quantize(x, *bad)
    for bad, words in (
        (torch.randn(8), r"x must have the axes \(..., tokens, d_head\), got shape \(8,\)"),
        ([1, 2], "x must be a tensor of floating point numbers, got list"),
        (x.int(), "x must be a tensor of floating point numbers, got torch.int32"),
        (x * torch.nan, "x has numbers that are infinite or NaN"),
    ):
        with pytest.raises(ValueError, match=words):
            fake_quantize(bad, 4, "token", 8)
    assert isinstance(QuantizedCache(small_config(), 4, 4, 8, **CPU).keys, Store)
