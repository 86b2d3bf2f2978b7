"""What fits into the memory of a device: the weights once, and the cache of every text in it.

`usable` is the part of the memory that is left for the two: activations, the libraries and, on a laptop, the system
take the rest.
"""

from bisect import bisect_left
from typing import NamedTuple

from kvcourse.config import ModelConfig
from kvcourse.cost import cache_bytes, weight_bytes
from kvcourse.require import require_number, require_whole
from kvcourse.shape import Shape, as_shape

# Bytes of memory. A GB counts as 10^9 bytes, as in the rest of the course; devices have a few percent more.
DEVICES = {
    "T4 16 GB": 16e9,  # https://www.nvidia.com/en-us/data-center/tesla-t4/
    "RTX 4090 24 GB": 24e9,  # https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090/
    "laptop 64 GB": 64e9,  # one memory for processor and graphics, such as a MacBook Pro can have
    "H100 80 GB": 80e9,  # https://www.nvidia.com/en-us/data-center/h100/
    "H200 141 GB": 141e9,  # https://www.nvidia.com/en-us/data-center/h200/
}


class Fit(NamedTuple):
    """Bytes of weights and cache beside the room for both."""

    weights: int
    cache: int
    room: int  # the usable part of the memory

    @property
    def fits(self) -> bool:
        return self.weights + self.cache <= self.room


def fits(
    shape: Shape | ModelConfig,
    memory: float,
    seq_len: int,
    batch_size: int = 1,
    *,
    bits: float = 16,
    weight_bits: float = 16,
    usable: float = 0.9,
) -> Fit:
    """Whether `batch_size` texts of `seq_len` tokens fit into `memory` bytes beside the weights, and by how much.

    Memory alone is looked at: `seq_len` may be past what the model was made for (`longest_context` stops there).
    `bits` a number of the cache, `weight_bits` a weight (`cost.bits_per_number` says what scales add), and `usable`,
    the part of the memory for both. Raises `ValueError` when one of the numbers is out of range.
    """
    usable = require_number("usable", usable)
    if usable > 1:
        raise ValueError(f"usable={usable!r} must be at most 1: it is a part of the memory.")
    return Fit(
        weights=weight_bytes(shape, require_number("weight_bits", weight_bits)),
        cache=cache_bytes(shape, seq_len, batch_size, bits),
        room=int(require_number("memory", memory) * usable),
    )


def longest_context(
    shape: Shape | ModelConfig,
    memory: float,
    batch_size: int = 1,
    *,
    bits: float = 16,
    weight_bits: float = 16,
    usable: float = 0.9,
) -> int:
    """The longest text, in tokens, of which `batch_size` fit at once: at most the `max_seq_len` that the model was made
    for, and 0 when not one token fits beside the weights. Options are those of `fits`."""
    options = {"bits": bits, "weight_bits": weight_bits, "usable": usable}
    lengths = range(1, as_shape(shape).max_seq_len + 1)
    return bisect_left(lengths, True, key=lambda seq_len: not fits(shape, memory, seq_len, batch_size, **options).fits)


def largest_batch(
    shape: Shape | ModelConfig,
    memory: float,
    seq_len: int,
    *,
    bits: float = 16,
    weight_bits: float = 16,
    usable: float = 0.9,
) -> int:
    """How many texts of `seq_len` tokens fit at once beside the weights. Options are those of `fits`, and as there,
    memory alone is looked at, not how long a text the model was made for."""
    one = fits(shape, memory, require_whole("seq_len", seq_len), bits=bits, weight_bits=weight_bits, usable=usable)
    return max(0, (one.room - one.weights) // one.cache)
