"""Latency figures from a hand-made timeline, and a clock that waits for the device."""

import pytest
import torch
from reference import small_config, small_model

import kvcourse as kv
from kvcourse import metrics


def test_figures_by_hand():
    g = kv.Generation(prompt_length=3, arrivals=[1.0, 1.1, 1.3], ids=[5, 6, 7])
    assert g.ttft == 1.0
    assert g.itl == pytest.approx([0.1, 0.2])
    assert g.tpot == pytest.approx(0.15)
    assert g.tokens_per_second == pytest.approx(2 / 0.3)
    assert g.total == 1.3
    assert g.percentile(50) == pytest.approx(0.15)
    assert g.percentile(95) == pytest.approx(0.195)


def test_one_token_has_no_gap_and_none_has_no_time():
    one = kv.Generation(prompt_length=3, arrivals=[1.0], ids=[5])
    assert (one.ttft, one.itl, one.tpot, one.tokens_per_second, one.percentile(50)) == (1.0, [], None, None, None)
    none = kv.Generation(prompt_length=3)
    assert (none.ttft, none.itl, none.tpot, none.total, none.tokens.tolist()) == (None, [], None, 0.0, [])
    two = kv.Generation(prompt_length=3, arrivals=[1.0, 1.5], ids=[5, 6])
    assert two.percentile(99) == 0.5


@pytest.mark.parametrize("p", [0, 100, -1])
def test_percentiles_out_of_range_are_refused(p):
    with pytest.raises(ValueError, match="between 0 and 100"):
        kv.Generation(3, [1.0, 2.0]).percentile(p)


@pytest.mark.parametrize("make", [kv.generate, kv.generate_naive])
def test_the_clock_starts_after_the_checks_and_is_read_after_the_device(monkeypatch, make):
    """A fake clock that only the device moves: each synchronisation takes one second of waiting."""
    time = {"now": 100.0, "reads": 0}

    def wait(device):
        time["now"] += 1

    monkeypatch.setattr(metrics, "synchronize", wait)
    monkeypatch.setattr(metrics, "perf_counter", lambda: time["now"])
    g = make(small_model(), [1, 2, 3], 4)
    assert g.arrivals == [1.0, 2.0, 3.0, 4.0]  # n tokens: one wait before the clock, one before each reading


def test_synchronize_waits_for_cuda_only(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    kv.synchronize(torch.device("cpu"))
    kv.synchronize(torch.device("cuda", 0))
    assert calls == [torch.device("cuda", 0)]


@pytest.mark.parametrize(("context", "expected"), [(256, [32, 1, 1, 1]), (8, [5, 1, 1, 1]), (4, [1, 1, 1, 1]), (3, [])])
def test_warm_up_runs_prefill_and_decode_and_fits_tiny_contexts(monkeypatch, context, expected):
    model = small_model(small_config(max_seq_len=context))
    lengths = []
    forward = kv.Transformer.forward

    def counting(self, tokens, *args, **options):
        lengths.append(tokens.shape[1])
        return forward(self, tokens, *args, **options)

    monkeypatch.setattr(kv.Transformer, "forward", counting)
    kv.warm_up(model)
    assert lengths == expected
