"""The orders in which PyTorch's int4 products read codes: how to get there, and back.

Each product wants codes where its vector instructions will find them, so the order is another one on a CPU and on a
GPU, and another one on each family of CPUs. PyTorch has a function that packs, and none that unpacks.
"""

from functools import lru_cache

import torch
from torch import Tensor


class CpuLayout:
    """Blocks of rows: 64, 32 or 16 by the vector instructions there are. Inside, column after column, and for each
    column a nibble per row (aten/src/ATen/native/cpu/int4mm_kernel.cpp). What goes where is found out by packing
    numbers that say where they come from."""

    @staticmethod
    def pack(codes: Tensor) -> Tensor:
        """codes `(rows, columns)` uint8, rows a multiple of 64 -> `(rows, columns / 2)` uint8."""
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)

    @staticmethod
    def product(x: Tensor, packed: Tensor, group: int, scale: Tensor) -> Tensor:
        """x `(n, columns)` -> `(n, rows)`; scale `(groups, rows, 2)` holds scale and offset of each group."""
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scale)

    @classmethod
    def codes(cls, packed: Tensor, rows: Tensor) -> Tensor:
        """Codes of rows `(n,)`: `(n, columns)` uint8."""
        block, byte, shift = cls.places()
        columns = packed.shape[1] * 2
        needed, which = (rows // block).unique(return_inverse=True)
        blocks = packed.view(-1, columns, block // 2).index_select(0, needed)
        by_row = blocks.transpose(1, 2).reshape(-1, columns)
        # index_select copies whole rows, and takes a third of the time of the same in square brackets
        codes = by_row.index_select(0, which * (block // 2) + byte[rows % block])
        return codes.bitwise_right_shift_(shift[rows % block, None]).bitwise_and_(15)

    @classmethod
    @lru_cache
    def places(cls) -> tuple[int, Tensor, Tensor]:
        """(rows of a block, byte of each row, and how far to shift that byte)."""
        column, row = torch.arange(2).expand(64, 2), torch.arange(64)[:, None].expand(64, 2)
        block = 2 * int(cls.pack(column).flatten().nonzero()[0])  # column 1 begins after a nibble for each row
        low, high = (cls.pack(digit).flatten()[: block // 2].long() for digit in (row % 16, row // 16))
        rows = torch.cat((low & 15 | (high & 15) << 4, low >> 4 | high >> 4 << 4))  # low nibbles, then high nibbles
        place = rows.argsort()
        return block, place % (block // 2), (place // (block // 2) * 4).to(torch.uint8)


class CudaLayout:
    """Tiles of 8 rows, made for tensor cores; a way back is the product itself, with ones and zeros.

    Written from PyTorch's documentation of these two functions and not yet run on a GPU; whether it works is tried
    out before it is used (`kernels.unable`), and a weight is dequantized where it does not.
    """

    @staticmethod
    def pack(codes: Tensor) -> Tensor:
        """codes `(rows, columns)` uint8, rows a multiple of 8 -> `(rows / 8, ...)` int32."""
        tiles = next(tiles for tiles in (8, 4, 2) if codes.shape[1] % (16 * tiles) == 0)
        return torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], tiles)

    @staticmethod
    def product(x: Tensor, packed: Tensor, group: int, scale: Tensor) -> Tensor:
        """x `(n, columns)` bfloat16 -> `(n, rows)`; scale `(groups, rows, 2)` holds scale and offset of each group."""
        return torch._weight_int4pack_mm(x, packed, group, scale)

    @classmethod
    def codes(cls, packed: Tensor, rows: Tensor) -> Tensor:
        """Codes of rows `(n,)`: `(n, columns)` uint8. In bfloat16 code - 8 is exact."""
        tiles, which = (rows // 8).unique(return_inverse=True)
        columns = packed[0].numel()  # 8 rows, and 8 codes in an int32
        one = torch.eye(columns, dtype=torch.bfloat16, device=packed.device)
        plain = torch.tensor((1.0, 0.0), dtype=torch.bfloat16, device=packed.device)
        plain = plain.expand(columns // 32, 8 * len(tiles), 2).contiguous()
        found = cls.product(one, packed[tiles], 32, plain).T.unflatten(0, (-1, 8))
        return (found[which, rows % 8] + 8).to(torch.uint8)


LAYOUTS = {"cpu": CpuLayout, "cuda": CudaLayout}
