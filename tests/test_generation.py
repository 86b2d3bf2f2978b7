"""Generating: cached equals naive equals `transformers`; requests that cannot be met are refused before any work."""

import numpy as np
import pytest
import torch
from reference import hugging_face, random_tokens, small_config, small_model

import kvcourse as kv


@pytest.fixture(scope="module")
def model():
    """Float64: another order of summing cannot change which token wins."""
    return small_model(dtype=torch.float64)


def cache_for(model, **options):
    return kv.DenseCache(model.config, dtype=model.dtype, device=model.device, **options)


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_64_greedy_tokens_equal_transformers(heads):
    model = small_model(small_config(n_kv_heads=heads), dtype=torch.float64)
    prompt = random_tokens(1, 30)
    expected = hugging_face(model).generate(
        prompt, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for make in (kv.generate, kv.generate_naive):
        g = make(model, prompt[0], 64)
        assert g.ids == expected[0, 30:].tolist()
        assert len(g.arrivals) == 64 and g.prompt_length == 30 and g.stop_reason == "length"


@pytest.mark.parametrize("prompt", [1, 2, 7, 64])
@pytest.mark.parametrize("chunk", [None, 1, 5, 64])
def test_cached_equals_naive(model, prompt, chunk):
    ids = random_tokens(prompt, seed=prompt).tolist()
    assert kv.generate(model, ids, 40, prefill_chunk=chunk).ids == kv.generate_naive(model, ids, 40).ids


def test_a_lost_token_shows(model):
    """The partner: the text changes when the cache misses one token of the prompt."""
    ids = random_tokens(20).tolist()
    assert kv.generate(model, ids[1:], 40).ids != kv.generate_naive(model, ids, 40).ids


@pytest.mark.parametrize("make", [kv.generate, kv.generate_naive])
def test_a_batch_of_unequal_prompts_equals_each_alone(model, make):
    prompts = [random_tokens(n, seed=n).tolist() for n in (3, 7, 1, 40)]
    batch = make(model, prompts, 20)
    assert [g.ids for g in batch] == [kv.generate(model, p, 20).ids for p in prompts]


def test_prompts_may_be_lists_tensors_or_arrays(model):
    ids = [5, 6, 7]
    expected = kv.generate(model, ids, 5).ids
    for prompt in (torch.tensor(ids), np.array(ids), [np.int64(i) for i in ids]):
        assert kv.generate(model, prompt, 5).ids == expected
    assert kv.generate(model, iter(ids), np.int64(5), seed=np.int64(1)).ids == expected
    for batch in ([ids], torch.tensor([ids]), [torch.tensor(ids)], (row for row in [ids])):
        assert [g.ids for g in kv.generate(model, batch, 5)] == [expected]


def test_exactly_n_tokens_and_none(model, monkeypatch):
    assert [len(kv.generate(model, [1, 2], n).ids) for n in (1, 2, 9)] == [1, 2, 9]
    monkeypatch.setattr(kv.Transformer, "forward", lambda *a, **k: pytest.fail("no work for no tokens"))
    for make in (kv.generate, kv.generate_naive):
        g = make(model, [1, 2], 0)
        assert (g.ids, g.ttft, g.stop_reason) == ([], None, "length")
        assert [x.ids for x in make(model, [[1], [2, 3]], 0)] == [[], []]


def test_no_forward_pass_after_the_last_token(model):
    cache = cache_for(model, max_len=64)
    kv.generate(model, [1, 2, 3], 5, cache=cache)
    assert cache.lengths == [7]  # the fifth token was never fed back


def test_exact_fit_and_one_token_more(model, monkeypatch):
    expected = kv.generate_naive(model, [1] * 10, 7).ids
    cache = cache_for(model, max_len=16)
    assert kv.generate(model, [1] * 10, 7, cache=cache).ids == expected  # 10 + 7 - 1 = 16
    assert cache.lengths == [16]
    cache.reset()
    monkeypatch.setattr(kv.Transformer, "forward", lambda *a, **k: pytest.fail("refused before any work"))
    with pytest.raises(
        ValueError, match="0 tokens held, 10 of prompt and 8 new ones need 17 places .*the cache has room for 16"
    ):
        kv.generate(model, [1] * 10, 8, cache=cache)
    for make in (kv.generate, kv.generate_naive):
        with pytest.raises(ValueError, match="the model's context has room for 256"):
            make(model, [1] * 250, 8)
        with pytest.raises(ValueError, match="256"):
            make(model, [1] * 257, 0)
    assert cache.lengths == [0]


@pytest.mark.parametrize(("prompt", "new"), [(16, 0), (16, 1), (15, 2), (1, 16)])
def test_what_fits_a_cache_of_16(model, prompt, new):
    assert len(kv.generate(model, [1] * prompt, new, cache=cache_for(model, max_len=16)).ids) == new


@pytest.mark.parametrize(("prompt", "new"), [(17, 0), (16, 2), (10, 20)])
def test_what_does_not_fit_a_cache_of_16(model, prompt, new):
    with pytest.raises(ValueError, match="has room for 16"):
        kv.generate(model, [1] * prompt, new, cache=cache_for(model, max_len=16))


def test_runs_do_not_see_each_other(model):
    a, b = random_tokens(9).tolist(), random_tokens(12, seed=4).tolist()
    first = kv.generate(model, a, 20).ids
    assert kv.generate(model, b, 20).ids == kv.generate(small_model(dtype=torch.float64), b, 20).ids

    def fail(row, token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kv.generate(model, b, 20, on_token=fail)
    assert kv.generate(model, a, 20).ids == first


def test_a_cache_is_continued(model):
    """A second turn: what the cache lacks is the last token made, and the new text."""
    text = random_tokens(10).tolist()
    cache = cache_for(model, max_len=64)
    first = kv.generate(model, text, 6, cache=cache)
    more = random_tokens(4, seed=8).tolist()
    second = kv.generate(model, first.ids[-1:] + more, 6, cache=cache)
    assert second.ids == kv.generate_naive(model, text + first.ids + more, 6).ids
    forgotten = cache_for(model, max_len=64)
    kv.generate(model, text, 6, cache=forgotten)
    assert kv.generate(model, more, 6, cache=forgotten).ids != second.ids


def test_stop_ids_end_each_row_by_itself(model):
    prompts = [[1, 2, 3], [5]]
    free = kv.generate(model, prompts, 20)
    stop = free[0].ids[4]
    ends = [g.ids.index(stop) + 1 if stop in g.ids else 20 for g in free]
    for make in (kv.generate, kv.generate_naive):
        stopped = make(model, prompts, 20, stop_ids=[stop, 96])
        for g, whole, end in zip(stopped, free, ends, strict=True):
            assert g.ids == whole.ids[:end] and len(g.arrivals) == end
            assert g.stop_reason == ("stop" if stop in whole.ids else "length")
    assert ends[0] <= 5 and ends[0] != ends[1]
    for form in (torch.tensor([stop]), np.array([stop]), (stop,), {stop}):
        assert kv.generate(model, prompts[0], 20, stop_ids=form).ids == free[0].ids[: ends[0]]
    first = kv.generate(model, prompts[0], 20, stop_ids={free[0].ids[0]})
    assert len(first.ids) == 1 and first.stop_reason == "stop"


def test_on_token_sees_each_token_as_it_comes(model):
    seen = []
    batch = kv.generate(model, [[1, 2], [3]], 4, on_token=lambda row, token: seen.append((row, token)))
    assert seen == [(row, batch[row].ids[i]) for i in range(4) for row in (0, 1)]


def test_seeds_belong_to_rows(model):
    options = dict(temperature=1.0, top_p=0.95, seed=42)
    alone = kv.generate(model, [1, 2, 3], 12, **options).ids
    batch = kv.generate(model, [[1, 2, 3]] * 4, 12, **options)
    assert batch[0].ids == alone == kv.generate_naive(model, [1, 2, 3], 12, **options).ids
    assert len({tuple(g.ids) for g in batch}) > 1
    assert [g.ids for g in batch] == [g.ids for g in kv.generate(model, [[1, 2, 3]] * 4, 12, **options)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "Prompt 0 is empty"),
        ([[1], []], "Prompt 1 is empty"),
        ([1, 97], "Token id 97 in prompt 0 is outside the vocabulary: ids go from 0 to 96"),
        ([-1], "Token id -1"),
        ("why", "must be token ids.*got 'why'. For text, use lm.stream"),
        (5, "must be token ids"),
        (None, "must be token ids"),
        (torch.tensor(5), "must be token ids"),
        ([1.5], "prompt 0 must be a list of token ids|prompt must be"),
        ([[1], [1.5]], "prompt 1 must be a list of token ids, whole numbers"),
        ([1, [2]], "prompt 0 must be a list of token ids"),
        (torch.zeros(0, dtype=torch.int64), "Prompt 0 is empty"),
    ],
)
@pytest.mark.parametrize("make", [kv.generate, kv.generate_naive])
def test_bad_prompts_are_refused(model, make, prompt, message):
    with pytest.raises(ValueError, match=message):
        make(model, prompt, 3)


def test_bad_options_are_refused(model):
    for n in (-1, 2.5, True, None):
        with pytest.raises(ValueError, match="max_new_tokens="):
            kv.generate(model, [1], n)
    with pytest.raises(TypeError, match="takes no cache"):  # it would not be used
        kv.generate_naive(model, [1], 3, cache=cache_for(model))
    for stop_ids in ("32", ["32"], [97], [-1], 5, [1.0]):
        with pytest.raises(ValueError, match="stop_ids"):
            kv.generate(model, [1, 2], 3, stop_ids=stop_ids)
    for cache in (kv.NoCache(model.config), "dense", kv.DenseCache):
        with pytest.raises(ValueError, match="keeps no tokens"):
            kv.generate(model, [1, 2], 3, cache=cache)
    for options in ({"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"prefill_chunk": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            kv.generate(model, [1, 2], 3, **options)
    with pytest.raises(ValueError, match="holds 2 rows of text, but 1 were given"):
        kv.generate(model, [1], 3, cache=cache_for(model, batch_size=2))


def test_prefill_is_checked_before_any_work(model):
    cache = cache_for(model, max_len=4, batch_size=2)
    for prompts, message in [
        ([[], [1, 2]], "Prompt 0 is empty"),
        ([[1.7], [2]], "prompt 0 must be a list of token ids"),
        ([[1] * 5, [2]], "5 of prompt.*room for 4"),
        ([[1], [2], [3]], "holds 2 rows of text, but 3 were given"),
        ([], "Prompt 0 is empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            kv.prefill(model, prompts, cache, chunk=2)
    assert cache.lengths == [0, 0]


@pytest.mark.parametrize("disturb", [lambda c, m: c.reset(), lambda c, m: m(torch.tensor([[3]]), cache=c)])
def test_a_cache_used_by_somebody_else_is_noticed(model, disturb):
    """Two answers on one cache would mix; without the check they do so silently."""
    cache = cache_for(model, max_len=64)
    with pytest.raises(RuntimeError, match="give each text its own"):
        kv.generate(model, [1, 2, 3], 6, cache=cache, on_token=lambda row, token: disturb(cache, model))


def test_numbers_that_overflowed_are_not_turned_into_tokens(model):
    broken = small_model()
    broken.embed_tokens.weight[7] = torch.inf
    for options in ({}, {"temperature": 1.0}):
        with pytest.raises(RuntimeError, match="overflowed"):
            kv.generate(broken, [7, 1], 3, **options)


@pytest.mark.parametrize("write", [kv.generate, kv.generate_naive])
def test_what_is_no_model_is_refused(write):
    """An `LM` is what a newcomer gives; its model is meant."""
    with pytest.raises(ValueError, match="model must be a Transformer, such as lm.model, not str"):
        write("smollm2-135m", [1, 2], 3)
