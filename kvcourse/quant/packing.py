"""Codes of 2, 3, 4 or 8 bits, packed into bytes without a gap.

A row of codes is one stream of bits, least significant first: code i takes bits `i * bits` to `i * bits + bits - 1` of
the row, and bit j of the row is bit `j % 8` of byte `j // 8`. So with 4 bits a byte holds code 0 low and code 1 high,
and with 3 bits eight codes fill three bytes. A row ends at a whole byte; what is left of the last one is zero.
Read as 32-bit words on a little-endian machine, rows of 2, 4 or 8 bits are the "linear" order that GPTQ files use:
codes 0, 1, ..., 7 of 4 bits are the word 0x76543210.
"""

from math import gcd
from numbers import Integral

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcourse.require import require_whole

BITS = (2, 3, 4, 8)


def require_bits(bits) -> int:
    """`bits` as an int if it is 2, 3, 4 or 8, else `ValueError`."""
    if isinstance(bits, bool) or not isinstance(bits, Integral) or bits not in BITS:
        raise ValueError(f"bits={bits!r} must be one of {', '.join(map(str, BITS))}.")
    return int(bits)


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of a row of n codes."""
    return -(-n * bits // 8)


def shortest_run(bits: int) -> tuple[int, int]:
    """(codes, bytes) of the fewest codes that fill whole bytes: (1, 1), (2, 1), (4, 1), or (8, 3) for 3 bits."""
    codes = 8 // gcd(8, bits)
    return codes, codes * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes `(..., n)`, uint8 below 2^bits, as bytes `(..., ceil(n * bits / 8))`. Raises `ValueError` for others."""
    bits = require_bits(bits)
    if codes.dtype != torch.uint8 or codes.ndim == 0:
        raise ValueError(f"codes must be a row of uint8, or several, got {codes.dtype} of shape {tuple(codes.shape)}.")
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"A code of {int(codes.max())} does not fit into {bits} bits: the largest is {2**bits - 1}.")
    n = codes.shape[-1]
    together, width = shortest_run(bits)
    codes = pad(codes, (0, -n % together)).unflatten(-1, (-1, together)).int()
    words = sum(codes[..., i] << (bits * i) for i in range(together))
    packed = torch.stack([words >> (8 * i) & 255 for i in range(width)], dim=-1).flatten(-2)
    return packed[..., : packed_bytes(n, bits)].to(torch.uint8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The n codes `(..., n)` that `pack` put into bytes. Raises `ValueError` when n codes take other than these."""
    bits, n = require_bits(bits), require_whole("n", n, least=0)
    if packed.dtype != torch.uint8 or packed.ndim == 0 or packed.shape[-1] != packed_bytes(n, bits):
        raise ValueError(
            f"{n} codes of {bits} bits take {packed_bytes(n, bits)} bytes (uint8), got {packed.dtype} of shape "
            f"{tuple(packed.shape)}."
        )
    together, width = shortest_run(bits)
    packed = pad(packed, (0, -packed.shape[-1] % width)).unflatten(-1, (-1, width))
    words = packed[..., 0] if width == 1 else sum(packed[..., i].int() << (8 * i) for i in range(width))
    codes = torch.stack([words >> (bits * i) & (2**bits - 1) for i in range(together)], dim=-1).flatten(-2)
    return codes[..., :n].to(torch.uint8)
