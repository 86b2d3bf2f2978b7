"""The roofline: how fast a piece of work can be at best on this machine, and which of two ceilings is the lower one.

A processor has a highest rate of arithmetic and a highest rate of reading memory. Work that does few operations for
each byte it reads waits for memory; work that does many waits for arithmetic. The two ceilings meet at the *ridge*
(Williams, Waterman, Patterson 2009, "Roofline: An Insightful Visual Performance Model", CACM 52(4)).

The ceilings here are measured, not taken from a data sheet: they are what this program reaches with PyTorch on this
machine. Another program may read faster than PyTorch does, and weights that fit a large last-level cache (the
processor's own memory, up to some hundred megabytes) are not read from memory again for each token. A model can then
be *above* the memory ceiling: a share over 100% says one of the two, not that a law was broken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import psutil
import torch
from torch import Tensor

from kvcourse.cost import Bytes, Flops
from kvcourse.device import resolve
from kvcourse.require import require_number, require_whole
from kvcourse.timing import median_time

LARGEST = {"cpu": 2048, "cuda": 8192}  # rows and columns of a matrix product that keeps every unit busy
LONG_ENOUGH = 0.05  # seconds: a product that takes this long keeps them busy too, and need not be larger
READ_SIZE = 16_384  # a float32 matrix of this many rows and columns is 1.07 GB: more than any last-level cache
MEMORY_NEEDED = 2.5e9  # bytes: the matrix to read, the three of the product, and room for the rest


@dataclass(frozen=True)
class Ceilings:
    """The two limits of a machine. Raises `ValueError` when a rate is not above 0."""

    flops_per_second: float  # of a large matrix product in `dtype`
    bytes_per_second: float  # of reading a matrix far larger than any cache
    device: str
    dtype: str

    def __post_init__(self):
        require_number("flops_per_second", self.flops_per_second)
        require_number("bytes_per_second", self.bytes_per_second)

    @property
    def ridge(self) -> float:
        """Operations per byte where the two ceilings meet: work with fewer is limited by memory."""
        return self.flops_per_second / self.bytes_per_second


class Roof(NamedTuple):
    """The best that a piece of work can reach under the two ceilings."""

    seconds: float  # the least time it can take
    intensity: float  # operations per byte
    limit: Literal["compute", "memory"]  # the ceiling it meets; at the ridge, where it meets both, "compute"
    flops_per_second: float  # the highest rate of arithmetic it can show


def roofline(flops: Flops | float, nbytes: Bytes | float, ceilings: Ceilings) -> Roof:
    """The least time for work of so many operations and bytes: the longer of its arithmetic and its reading.

    `flops` and `nbytes` are numbers, or what `kv.flops` and `kv.bytes_moved` return (their totals count). Both
    ceilings are taken to be reached at once, arithmetic hidden behind reading or the other way round. Raises
    `ValueError` when one is not above 0, when the two are swapped, or when the ceilings are none.
    """
    if not isinstance(ceilings, Ceilings):
        raise ValueError(f"ceilings must be what kv.measure_ceilings() returns; got {type(ceilings).__name__}.")
    if isinstance(flops, Bytes) or isinstance(nbytes, Flops):
        raise ValueError("roofline(flops, nbytes, ceilings) was given the bytes first: swap the first two.")
    flops = float(require_number("flops", getattr(flops, "total", flops)))
    nbytes = float(require_number("nbytes", getattr(nbytes, "total", nbytes)))
    computing, reading = flops / ceilings.flops_per_second, nbytes / ceilings.bytes_per_second
    seconds = max(computing, reading)
    return Roof(seconds, flops / nbytes, "compute" if computing >= reading else "memory", flops / seconds)


@torch.inference_mode()
def measure_ceilings(device=None, dtype=None, rounds: int = 3) -> Ceilings:
    """Measure both ceilings, in a few seconds; device and dtype default to those the course uses here.

    Arithmetic: a product of two large square matrices in `dtype`, 2 n^3 operations. Reading: the bytes of a float32
    matrix of 1.07 GB, of which the largest number is looked for, or which is multiplied by a vector, whichever is
    faster (on two cores of an AMD EPYC the former read 28 GB a second where the latter read 20; neither is the faster
    one everywhere). Each is the best of `rounds` medians, taken in turn: a ceiling is the highest rate that was seen,
    and another program may have had the processor during one of them. Raises `ValueError` for a device without memory
    or rounds below 1, `RuntimeError` when less than 2.5 GB of memory are free.
    """
    device, dtype = resolve(device, dtype)
    rounds = require_whole("rounds", rounds)
    if device.type not in LARGEST:
        raise ValueError(f"device={device} computes nothing, so it has no ceilings: use cpu or cuda.")
    free = free_memory(device)
    if free < MEMORY_NEEDED:
        raise RuntimeError(
            f"Measuring the ceilings takes {MEMORY_NEEDED / 1e9:.1f} GB of memory on {device}, and {free / 1e9:.1f} GB "
            "are free: close other programs or notebooks and try again."
        )
    n, multiply = large_product(device, dtype)
    # Ones, not zeros: memory that was never written is one page of zeros, and reading it tells nothing.
    matrix = torch.ones(READ_SIZE, READ_SIZE, device=device, dtype=torch.float32)
    vector = torch.ones(READ_SIZE, device=device, dtype=torch.float32)
    works = (multiply, matrix.amax, partial(torch.mv, matrix, vector))
    times = [[median_time(work) for work in works] for _ in range(rounds)]
    computing, *reading = map(min, zip(*times, strict=True))
    return Ceilings(2 * n**3 / computing, matrix.nbytes / min(reading), str(device), str(dtype).removeprefix("torch."))


def large_product(device: torch.device, dtype: torch.dtype) -> tuple[int, Callable[[], Tensor]]:
    """n, and a function that multiplies two n x n matrices. n grows until the product takes long enough: without
    instructions for its dtype (bfloat16 on many CPUs) a processor can be some hundred times slower than with them."""
    n = 256
    while True:
        left, right = (torch.empty(n, n, device=device, dtype=dtype).uniform_(-1, 1) for _ in range(2))
        multiply = partial(torch.mm, left, right, out=torch.empty_like(left))
        if n >= LARGEST[device.type] or median_time(multiply, min_run_time=0.01) > LONG_ENOUGH:
            return n, multiply
        n *= 2


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on the device, PyTorch's own unused reserve included."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve
