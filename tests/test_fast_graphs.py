"""Steps recorded for CUDA. Here a recording is a function called again; on a GPU the last test runs the real thing."""

import pytest
import torch

import kvcourse as kv
from kvcourse.fast import graphs, layer
from kvcourse.fast.compiled import CompiledTransformer
from kvcourse.fast.graphs import Graphs
from kvcourse.fast.layer import one_token_of_many, sizes_of

SIZES = dict(n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_head=8, d_ff=64, vocab_size=50, max_seq_len=900)


def random_model(dtype=torch.float64, **changes):
    model = kv.Transformer(kv.ModelConfig(**SIZES | changes), dtype=dtype)
    generator = torch.Generator(model.device).manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model


def called_again(step):
    """A recording without a GPU: to replay is to call, and the result is always in the same place."""
    place = step().clone()
    return lambda: place.copy_(step()), place


def recorded(model):
    """A compiled model that records here. Its step is not compiled: that takes long, and is tested elsewhere."""
    fast = CompiledTransformer(model)
    sizes = sizes_of(model.config)

    def step(x, cos, sin, position, keys, values):
        for weights, k, v in zip(fast.weights, keys, values, strict=True):
            x = one_token_of_many(sizes, weights, x, cos, sin, k, v, position)
        return x

    fast.reason, fast.graphs = None, Graphs(step, called_again)
    fast.functions[:2] = [lambda *tensors, f=function: f.plain(*tensors) for function in fast.functions[:2]]
    fast.functions[3] = fast.functions[3].plain
    return fast


def test_tokens_are_those_of_the_plain_model_over_several_buckets(monkeypatch):
    monkeypatch.setattr(graphs, "BUCKET", 16)
    model = random_model()
    fast, prompt = recorded(model), [7, 3, 11, 5]
    assert kv.generate(fast, prompt, 50).ids == kv.generate(model, prompt, 50).ids
    assert fast.graphs.recordings == 4  # 53 slots: up to 16, 32, 48, and the rest


def test_without_the_mask_the_tokens_differ(monkeypatch):
    monkeypatch.setattr(graphs, "BUCKET", 16)
    model = random_model()
    fast, cache = recorded(model), kv.DenseCache(model.config, max_len=64, dtype=torch.float64)
    kv.prefill(model, [[7, 3, 11, 5]], cache)
    tokens = torch.tensor([[2]])
    cache.truncate(4)
    right = model(tokens, cache=cache)
    cache.truncate(4)
    seen_by_all = layer.one_attention
    monkeypatch.setattr(layer, "one_attention", lambda q, keys, values, hidden: seen_by_all(q, keys, values))
    wrong = fast(tokens, cache=cache)
    assert (right - wrong).abs().max() > 1e-3


def test_what_stands_in_slots_not_yet_used_is_not_read(monkeypatch):
    monkeypatch.setattr(graphs, "BUCKET", 16)
    model = random_model()
    fast, cache = recorded(model), kv.DenseCache(model.config, max_len=64, dtype=torch.float64)
    kv.prefill(model, [[7, 3, 11, 5]], cache)
    expected = model(torch.tensor([[2]]), cache=cache)
    cache.truncate(4)
    cache.keys[..., 5:, :] = cache.values[..., 5:, :] = torch.nan
    torch.testing.assert_close(fast(torch.tensor([[2]]), cache=cache), expected)


def test_recording_leaves_the_cache_as_it_was(monkeypatch):
    monkeypatch.setattr(graphs, "BUCKET", 16)
    model = random_model()
    fast, cache = recorded(model), kv.DenseCache(model.config, max_len=64, dtype=torch.float64)
    kv.prefill(model, [[7, 3, 11, 5]], cache)
    before = cache.keys.clone(), cache.values.clone()
    fast(torch.tensor([[2]]), cache=cache)
    cache.truncate(4)
    assert torch.equal(cache.keys, before[0]) and torch.equal(cache.values, before[1])


def test_another_cache_has_recordings_of_its_own_and_the_oldest_are_dropped(monkeypatch):
    monkeypatch.setattr(graphs, "BUCKET", 16)
    monkeypatch.setattr(graphs, "KEPT", 2)
    model = random_model()
    fast = recorded(model)
    caches = [kv.DenseCache(model.config, max_len=64, dtype=torch.float64) for _ in range(3)]
    expected = kv.generate(model, [4, 4], 3).ids
    for cache in (*caches, caches[2]):
        cache.reset()
        assert kv.generate(fast, [4, 4], 3, cache=cache).ids == expected
    assert fast.graphs.recordings == 3 and len(fast.graphs.known) == 2
    caches[0].reset()
    assert kv.generate(fast, [4, 4], 3, cache=caches[0]).ids == expected
    assert fast.graphs.recordings == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs are recorded on a GPU, and there is none here")
def test_a_gpu_repeats_what_it_recorded():
    model = random_model(torch.float32).cuda()
    fast = kv.compiled(model)
    assert fast.reason is None and fast.graphs is not None
    prompt = [7, 3, 11, 5] * 60
    cache, other = (kv.DenseCache(model.config, max_len=600, dtype=torch.float32, device="cuda") for _ in range(2))
    kv.prefill(model, [prompt], cache)
    kv.prefill(model, [prompt], other)
    for token in range(40):
        tokens = torch.tensor([[token]], device="cuda")
        torch.testing.assert_close(fast(tokens, cache=cache), model(tokens, cache=other), atol=1e-3, rtol=1e-3)
    assert fast.graphs.recordings == 2
