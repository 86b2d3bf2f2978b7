"""Blocks of a GGUF file: 32 numbers of a row and what they share, one after the other in the file. Read here by hand.

| type | bytes of a block | a number is |
|---|---|---|
| `Q4_0` | d (2), 16 of codes | (code - 8) x d |
| `Q4_1` | d (2), m (2), 16 of codes | code x d + m |
| `Q8_0` | d (2), 32 of codes, signed | code x d |

d and m are float16, little-endian. Byte i of 4-bit codes holds number i in its low half, and number i + 16 in its high
half: not two neighbours, so that a processor unpacks sixteen at once with one mask and one shift.

So `Q4_0` is a symmetric grid of 4 bits in groups of 32, `Q8_0` the same of 8 bits, and `Q4_1` a grid with a minimum:
`to_blocks` writes a weight that was rounded onto one of these, changing no number of it. Groups of more numbers, a
whole row say, are several blocks that are alike.
Source: block_q4_0, block_q4_1, block_q8_0 in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and
dequantize_row_q4_0 and its neighbours in ggml-quants.c there.
"""

import numpy as np
import torch

from kvcourse.quant.grid import name_of
from kvcourse.quant.tensor import QuantizedTensor

SIZE = 32  # numbers in a block
BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # of a block
GRIDS = {"Q4_0": (4, "symmetric"), "Q4_1": (4, "minimum"), "Q8_0": (8, "symmetric")}


def read_q4_0(data: bytes) -> np.ndarray:
    """The numbers of one block of 18 bytes or of several, `(32 * blocks,)` in float32."""
    blocks = split(data, "Q4_0")
    return ((nibbles(blocks[:, 2:]) - 8) * halves(blocks[:, :2])).ravel()


def read_q4_1(data: bytes) -> np.ndarray:
    """The numbers of one block of 20 bytes or of several, `(32 * blocks,)` in float32."""
    blocks = split(data, "Q4_1")
    return (nibbles(blocks[:, 4:]) * halves(blocks[:, :2]) + halves(blocks[:, 2:4])).ravel()


def read_q8_0(data: bytes) -> np.ndarray:
    """The numbers of one block of 34 bytes or of several, `(32 * blocks,)` in float32."""
    blocks = split(data, "Q8_0")
    return (blocks[:, 2:].view(np.int8).astype(np.float32) * halves(blocks[:, :2])).ravel()


def split(data: bytes, name: str) -> np.ndarray:
    """`(blocks, bytes of one)` in uint8."""
    if len(data) == 0 or len(data) % BYTES[name]:
        raise ValueError(f"A block of {name} has {BYTES[name]} bytes, so {len(data)} bytes are not whole blocks.")
    return np.frombuffer(data, np.uint8).reshape(-1, BYTES[name])


def halves(pairs: np.ndarray) -> np.ndarray:
    """Two bytes a block -> the float16 they are, as float32 `(blocks, 1)`."""
    return np.ascontiguousarray(pairs).view("<f2").astype(np.float32)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """16 bytes a block -> its 32 codes: all the low halves, then all the high ones."""
    return np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float32)


def block_type(weight: QuantizedTensor) -> str:
    """The type of block that holds `weight` with every number as it is: "Q4_0", "Q4_1" or "Q8_0".

    Raises `ValueError` for a weight that none of them can hold, saying how to round one that they can.
    """
    grid, wanted = weight.grid, "quantize with bits=4 or 8, group_size=32 or 64 and symmetric=True for Q4_0 or Q8_0"
    name = next((name for name, kind in GRIDS.items() if kind == (grid.bits, grid.kind)), None)
    rows, groups = weight.scale.shape
    if name is None or weight.shape[1] % (groups * SIZE) or rows != weight.shape[0]:
        raise ValueError(
            f"A block of a GGUF file is no place for a grid with bits={grid.bits}, group_size={grid.group_size!r} and "
            f'kind={grid.kind!r}: {wanted}, or with bits=4, group_size=32 and kind="minimum" for Q4_1.'
        )
    shared = weight.scale if grid.kind == "symmetric" else torch.cat((weight.scale, weight.zero))
    if not torch.equal(shared.half().to(shared.dtype), shared):
        raise ValueError(
            f"{name} keeps scales in float16, which cannot hold all of these, in {name_of(grid.scale_dtype)}: quantize "
            "with scale_dtype=torch.float16."
        )
    if weight.order is not None:
        raise ValueError(
            f"{name} has codes in the order of the columns, and act_order=True has left them in another: quantize "
            "with static_groups=True too, or without act_order."
        )
    if weight.column_scale is not None:
        raise ValueError(
            f"{name} has no place for AWQ's column scale: use quantize_model, which folds it into the layer before."
        )
    return name


def to_blocks(weight: QuantizedTensor) -> np.ndarray:
    """The rows of `weight` in blocks of its `block_type`: uint8 `(rows, bytes of a row)`. Raises `ValueError` as that
    does."""
    name = block_type(weight)
    codes, scale, minimum = (None if part is None else part.cpu() for part in weight.unpacked())
    codes = codes.unflatten(1, (-1, SIZE)).numpy()  # (rows, blocks, 32)
    if name == "Q8_0":
        codes = codes ^ 128  # code - 128 as a signed byte
    else:
        codes = codes[..., : SIZE // 2] | codes[..., SIZE // 2 :] << 4
    blocks = codes.shape[1]
    shared = [
        part.half().repeat_interleave(blocks // part.shape[1], 1).numpy().astype("<f2")[..., None].view(np.uint8)
        for part in (scale, minimum)
        if part is not None
    ]
    return np.concatenate([*shared, codes], axis=2).reshape(weight.shape[0], -1)
