"""The roofline by hand-worked numbers, and the two ceilings by a clock that is told what to say."""

import pytest
import torch

import kvcourse as kv
from kvcourse import roof
from kvcourse.cost import Bytes, Flops
from kvcourse.roof import Ceilings, measure_ceilings, roofline

MACHINE = Ceilings(flops_per_second=1000.0, bytes_per_second=50.0, device="cpu", dtype="float32")


def test_ridge_is_where_both_ceilings_take_the_same_time():
    assert MACHINE.ridge == 20  # 1000 operations a second over 50 bytes a second


@pytest.mark.parametrize(
    ("flops", "nbytes", "seconds", "intensity", "limit", "rate"),
    [
        (100, 100, 2.0, 1.0, "memory", 50.0),  # reading 100 bytes takes 2 s, computing 0.1 s
        (8000, 100, 8.0, 80.0, "compute", 1000.0),  # computing takes 8 s, reading 2 s
        (2000, 100, 2.0, 20.0, "compute", 1000.0),  # the ridge: both take 2 s
        (1999, 100, 2.0, 19.99, "memory", 999.5),  # one operation fewer in the same time
    ],
)
def test_roofline_by_hand(flops, nbytes, seconds, intensity, limit, rate):
    assert roofline(flops, nbytes, MACHINE) == (seconds, intensity, limit, rate)


def test_roofline_takes_the_totals_of_the_cost_model():
    work, moved = Flops(linear=5000, attention=2000, head=1000), Bytes(weights=60, cache_read=30, cache_written=10)
    assert roofline(work, moved, MACHINE) == roofline(8000, 100, MACHINE)
    assert roofline(work, moved, MACHINE) != roofline(work.linear, moved.weights, MACHINE)


def test_one_decode_step_waits_for_memory_and_a_long_prefill_for_arithmetic():
    config = kv.ModelConfig(vocab_size=100, n_layers=2, n_heads=4, d_model=64, d_ff=128)
    step = roofline(kv.flops(config, 1, 100), kv.bytes_moved(config, 1, 100, bits=32), MACHINE)
    prompt = roofline(kv.flops(config, 1000), kv.bytes_moved(config, 1000, bits=32), MACHINE)
    assert (step.limit, prompt.limit) == ("memory", "compute")
    assert step.intensity < 0.5 < MACHINE.ridge < prompt.intensity  # two operations for each four bytes of a weight


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), True, "10", None, pytest.param(10**400, id="huge")])
def test_only_work_and_rates_above_zero(bad):
    with pytest.raises(ValueError, match="flops=.* must be a number greater than 0"):
        roofline(bad, 10, MACHINE)
    with pytest.raises(ValueError, match="nbytes=.* must be a number greater than 0"):
        roofline(10, bad, MACHINE)
    with pytest.raises(ValueError, match="flops_per_second="):
        Ceilings(bad, 1.0, "cpu", "float32")
    with pytest.raises(ValueError, match="bytes_per_second="):
        Ceilings(1.0, bad, "cpu", "float32")


def test_swapped_arguments_are_refused():
    work, moved = Flops(5, 2, 1), Bytes(6, 3, 1)
    for first, second in [(moved, work), (moved, 8), (10, work)]:
        with pytest.raises(ValueError, match="swap the first two"):
            roofline(first, second, MACHINE)


@pytest.mark.parametrize("bad", [None, 5, "cpu"])
def test_only_measured_ceilings_bound_anything(bad):
    with pytest.raises(ValueError, match=r"ceilings must be what kv\.measure_ceilings\(\) returns; got "):
        roofline(1, 2, bad)


@pytest.mark.parametrize("rounds", [0, -1, 1.5, None])
def test_at_least_one_round(rounds, clock):
    with pytest.raises(ValueError, match=f"rounds={rounds} must be a whole number of at least 1"):
        measure_ceilings("cpu", rounds=rounds)


@pytest.fixture
def clock(monkeypatch):
    """Stands in for the timer: says the next of the given seconds, and runs nothing."""
    seconds = []
    monkeypatch.setattr(roof, "median_time", lambda fn, **_: seconds.pop(0))
    return seconds


def test_rates_are_the_work_over_the_best_time(clock):
    growing = [0.001, 0.002, 0.003]  # products of 256, 512 and 1024: none takes long enough
    clock += growing + [0.5, 0.25, 0.3] + [0.4, 0.2, 0.125] + [0.8, 0.5, 0.5]  # product, two ways to read, three rounds
    found = measure_ceilings("cpu", "float32")
    assert not clock
    assert found.flops_per_second == 2 * 2048**3 / 0.4
    assert found.bytes_per_second == 16_384 * 16_384 * 4 / 0.125
    assert (found.device, found.dtype) == ("cpu", "float32")
    assert roof.READ_SIZE**2 * 4 >= 1e9


@pytest.mark.parametrize("reading", [[0.125, 0.5], [0.5, 0.125]])
def test_the_faster_way_to_read_counts(clock, reading):
    clock += [0.06, 0.06, *reading]
    assert measure_ceilings("cpu", "float32", rounds=1).bytes_per_second == 16_384 * 16_384 * 4 / 0.125


def test_a_slow_dtype_gets_a_smaller_product(clock):
    clock += [0.001, 0.06] + [0.06, 0.1, 0.1]  # the product of 512 takes long enough
    assert measure_ceilings("cpu", "bfloat16", rounds=1).flops_per_second == 2 * 512**3 / 0.06


def test_measured_ceilings_are_positive():
    found = measure_ceilings("cpu", "float32", rounds=1)
    assert found.flops_per_second > 0 and found.bytes_per_second > 0 and found.ridge > 0


def test_the_read_matrix_was_written_and_the_product_has_its_dtype(monkeypatch):
    results = []
    monkeypatch.setattr(roof, "READ_SIZE", 8)
    monkeypatch.setattr(roof, "LARGEST", {"cpu": 4})
    monkeypatch.setattr(roof, "median_time", lambda fn, **_: results.append(fn()) or 1.0)
    measure_ceilings("cpu", "float64", rounds=1)
    product, largest, sums = results
    assert product.dtype == torch.float64 and product.shape == (256, 256)
    assert largest == 1 and torch.equal(sums, torch.full((8,), 8.0)) and sums.dtype == torch.float32


def test_too_little_memory_is_said_before_any_work(monkeypatch, clock):
    monkeypatch.setattr(roof, "free_memory", lambda device: 1.2e9)
    with pytest.raises(RuntimeError, match=r"takes 2\.5 GB of memory on cpu, and 1\.2 GB are free: close"):
        measure_ceilings("cpu")


def test_the_meta_device_has_no_ceilings():
    with pytest.raises(ValueError, match="device=meta computes nothing"):
        measure_ceilings("meta")
