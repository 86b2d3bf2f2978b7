"""Which device and dtype the course chooses, with CUDA devices that are not here."""

import pytest
import torch

from kvcourse import device


@pytest.fixture
def gpu(monkeypatch):
    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "Some GPU")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    return pretend


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((8, 9), torch.bfloat16), ((9, 0), torch.bfloat16)],
)
def test_half_precision_follows_the_compute_capability(gpu, capability, dtype):
    gpu(capability)
    chosen = device.placement()
    assert (chosen.device.type, chosen.dtype) == ("cuda", dtype)
    assert f"{capability[0]}.{capability[1]}" in chosen.reason and "Some GPU" in chosen.reason
    assert device.resolve() == (torch.device("cuda", 0), dtype)
    assert device.resolve("cuda") == (torch.device("cuda", 0), dtype)
    assert device.resolve("cpu") == (torch.device("cpu"), torch.float32)


def test_without_cuda_the_cpu_in_float32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = device.placement()
    assert (chosen.device.type, chosen.dtype) == ("cpu", torch.float32)
    assert "CPU" in chosen.reason
    assert device.resolve(dtype=torch.float64) == (torch.device("cpu"), torch.float64)


def test_dtype_may_be_given_by_name_and_unknown_names_are_refused():
    assert device.resolve("cpu", "bfloat16")[1] == torch.bfloat16
    for bad in ("float12", "nn", "int64", "float8_e4m3fn", 3):
        with pytest.raises(ValueError, match=f"{bad!r}.*float32"):
            device.resolve("cpu", bad)


def test_devices_that_are_not_here_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for bad in ("gpu", "mps", "nonsense:7"):
        with pytest.raises(ValueError, match=f"device='{bad}' is none the course runs on"):
            device.resolve(bad)
    with pytest.raises(ValueError, match="finds no CUDA device here"):
        device.resolve("cuda")
