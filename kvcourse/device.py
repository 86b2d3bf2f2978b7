"""Where the course runs, in which number format, and why."""

import platform
from pathlib import Path
from typing import NamedTuple

import torch


class Placement(NamedTuple):
    """A device, the dtype the course uses on it, and the reason in one sentence."""

    device: torch.device
    dtype: torch.dtype
    reason: str


def placement() -> Placement:
    """The default device and dtype: CUDA in half precision when present, otherwise the CPU in float32.

    bfloat16 needs compute capability 8.0 (Ampere); older GPUs such as the T4 get float16.
    """
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
        if major >= 8:
            reason = f"{name} has compute capability {major}.{minor}, which computes in bfloat16"
            return Placement(torch.device("cuda"), torch.bfloat16, reason)
        reason = f"{name} has compute capability {major}.{minor}; bfloat16 needs 8.0, so float16"
        return Placement(torch.device("cuda"), torch.float16, reason)
    return Placement(torch.device("cpu"), torch.float32, "no CUDA device found; the CPU computes best in float32")


def device_class() -> str:
    """Machines on which the course's figures can be compared: "cpu-2-cores", "cpu-4-cores", "cuda-bfloat16", ...

    Most figures are ratios, in which the speed of a processor cancels. What is left depends on whether a GPU computes
    and in which format, or else on how many cores do (as many as PyTorch uses; 2 stands for 2 and 3, 4 for 4 to 7, and
    so on), for they share one memory.
    """
    device, dtype, _ = placement()
    if device.type == "cuda":
        return f"cuda-{str(dtype).removeprefix('torch.')}"
    return f"cpu-{2 ** (torch.get_num_threads().bit_length() - 1)}-cores"


def resolve(device=None, dtype=None) -> tuple[torch.device, torch.dtype]:
    """Fill in what was not given: the default device, and the default dtype of the device in use."""
    default = placement()
    device = default.device if device is None else as_device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if dtype is None:
        dtype = default.dtype if device.type == default.device.type else torch.float32
    return device, as_dtype(dtype)


def as_device(device: torch.device | str) -> torch.device:
    """A device that this machine has (or `meta`: shapes without memory), else `ValueError`."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f'device={device!r} is none the course runs on: use "cpu" or "cuda".')
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'device={device!r}: PyTorch finds no CUDA device here; use "cpu".')
    return found


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype the course computes in, given as such or by its name ("float32", "bfloat16", ...), else `ValueError`."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is none the course computes in: use float32, bfloat16, float16 or float64.")
    return found


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished. A GPU works behind the program's back: a clock read without
    this measures how fast work was ordered, not how fast it was done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """What the GPU or CPU calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]
