"""Blocks of a GGUF file, read and written by hand: as worked out on paper, and as the `gguf` package has them."""

import gguf
import numpy as np
import pytest
import torch

from kvcourse.quant import gguf_blocks, nf4, rtn
from kvcourse.quant.gguf_blocks import BYTES, block_type, read_q4_0, read_q4_1, read_q8_0, to_blocks
from kvcourse.quant.gptq import gptq
from kvcourse.quant.tensor import QuantizedTensor

READ = {"Q4_0": read_q4_0, "Q4_1": read_q4_1, "Q8_0": read_q8_0}
GRIDS = {"Q4_0": (4, "symmetric"), "Q4_1": (4, "minimum"), "Q8_0": (8, "symmetric")}


def half(number: float) -> bytes:
    return np.array(number, "<f2").tobytes()


def random_blocks(name: str, n: int) -> np.ndarray:
    """`(n, bytes)` of blocks with all codes in them, and a finite scale (and minimum)."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (n, BYTES[name]), dtype=np.uint8)
    shared = 2 if name == "Q4_1" else 1
    blocks[:, : 2 * shared] = rng.normal(0, 0.1, (n, shared)).astype("<f2").view(np.uint8)
    return blocks


def dequantized(name: str, blocks: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])


def rounded(name: str, rows=6, columns=96, **options) -> QuantizedTensor:
    bits, kind = GRIDS[name]
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return rtn(weight, bits, 32, kind=kind, **options)


def test_a_block_of_q4_0_on_paper():
    """The low half of byte 0 is number 0, the high half number 16; 8 means nothing."""
    numbers = read_q4_0(half(1.0) + bytes([0x21] + [0x88] * 15))
    expected = [0.0] * 32
    expected[0], expected[16] = 1 - 8, 2 - 8
    assert numbers.tolist() == expected and numbers.dtype == np.float32


def test_a_block_of_q4_1_on_paper():
    numbers = read_q4_1(half(0.5) + half(-3.0) + bytes([0xF1] + [0x00] * 14 + [0x20]))
    expected = [-3.0] * 32
    expected[0], expected[16], expected[31] = 0.5 - 3, 7.5 - 3, 1.0 - 3
    assert numbers.tolist() == expected


def test_a_block_of_q8_0_on_paper():
    numbers = read_q8_0(half(0.25) + bytes([1, 127, 128, 255] + [0] * 28))
    assert numbers.tolist() == [0.25, 127 / 4, -128 / 4, -1 / 4] + [0.0] * 28


@pytest.mark.parametrize("name", READ)
def test_random_blocks_are_read_as_the_gguf_package_reads_them(name):
    blocks = random_blocks(name, 200)
    assert np.array_equal(READ[name](blocks.tobytes()), dequantized(name, blocks).ravel())


def test_neighbours_in_a_byte_would_be_another_block(monkeypatch):
    """The order that `kvcourse.quant.packing` has, and many other formats."""
    blocks = random_blocks("Q4_0", 20)
    neighbours = lambda codes: np.stack([codes & 15, codes >> 4], 2).reshape(len(codes), 32).astype(np.float32)  # noqa: E731
    monkeypatch.setattr(gguf_blocks, "nibbles", neighbours)
    assert not np.array_equal(read_q4_0(blocks.tobytes()), dequantized("Q4_0", blocks).ravel())


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("missing", ["all", "one byte"])
def test_bytes_that_are_no_whole_blocks(name, missing):
    data = b"" if missing == "all" else bytes(2 * BYTES[name] - 1)
    with pytest.raises(ValueError, match=f"A block of {name} has {BYTES[name]} bytes, so {len(data)} bytes"):
        READ[name](data)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", GRIDS)
def test_a_rounded_weight_is_written_bit_for_bit(name, clip):
    weight = rounded(name, clip=clip)
    blocks = to_blocks(weight)
    assert block_type(weight) == name and blocks.shape == (6, 3 * BYTES[name])
    assert np.array_equal(dequantized(name, blocks), weight.dequantize().numpy())
    assert np.array_equal(READ[name](blocks.tobytes()).reshape(6, 96), weight.dequantize().numpy())


def test_the_largest_and_the_smallest_code_are_written():
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    weight = QuantizedTensor.of(codes, torch.ones(2, 4).half(), None, rounded("Q8_0").grid)
    assert dequantized("Q8_0", to_blocks(weight)).ravel().tolist() == list(range(-128, 128))


@pytest.mark.parametrize(("name", "other"), [("Q4_0", "Q4_1"), ("Q4_1", "Q4_0")])
def test_another_type_of_block_would_show(name, other, monkeypatch):
    """Q4_0 read as numbers above a minimum, or the other way round, would be noticed."""
    weight = rounded(name)
    blocks = to_blocks(weight)
    if other == "Q4_0":
        blocks = np.delete(blocks.reshape(-1, 20), [2, 3], axis=1).reshape(6, -1)
    else:
        blocks = np.insert(blocks.reshape(-1, 18), [2, 2], 0, axis=1).reshape(6, -1)
    assert not np.array_equal(dequantized(other, blocks), weight.dequantize().numpy())


def test_a_weight_of_gptq_is_written():
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 64, generator=generator), torch.randn(200, 64, generator=generator)
    hessian = 2 * x.T @ x / len(x)
    result = gptq(weight, hessian, 4, 32, symmetric=True, act_order=True, static_groups=True)
    assert np.array_equal(dequantized("Q4_0", to_blocks(result)), result.dequantize().numpy())
    with pytest.raises(ValueError, match="act_order=True has left them in another: quantize with static_groups=True"):
        to_blocks(gptq(weight, hessian, 4, 32, symmetric=True, act_order=True))


WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
NO_PLACE = "A block of a GGUF file is no place for a grid with bits="


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda: rtn(WEIGHT, 4, 32), f"{NO_PLACE}4, group_size=32 and kind='zero_point': .* symmetric=True for Q4_0"),
        (lambda: rtn(WEIGHT, 4, 16, symmetric=True), f"{NO_PLACE}4, group_size=16"),
        (lambda: rtn(WEIGHT[:, :48], 4, None, symmetric=True), f"{NO_PLACE}4, group_size=None .* group_size=32"),
        (lambda: rtn(WEIGHT, 4, "tensor", symmetric=True), f"{NO_PLACE}4, group_size='tensor'"),
        (lambda: rtn(WEIGHT[:, :32], 4, "tensor", symmetric=True), f"{NO_PLACE}4, group_size='tensor'"),
        (lambda: rtn(WEIGHT, 3, 32, symmetric=True), f"{NO_PLACE}3"),
        (lambda: rtn(WEIGHT, 8, 32, kind="minimum"), f"{NO_PLACE}8"),
        (lambda: nf4(WEIGHT, 32), "kind='nf4'"),
        (
            lambda: rtn(WEIGHT, 4, 32, symmetric=True, scale_dtype=torch.float32),
            "Q4_0 keeps scales in float16, .* these, in float32: quantize with scale_dtype=torch.float16",
        ),
        (
            lambda: rtn(1e-3 + 1e-7 * WEIGHT, 4, 32, kind="minimum", scale_dtype=torch.bfloat16),
            "Q4_1 keeps scales in float16, .* in bfloat16",
        ),
    ],
)
def test_a_weight_without_a_block_is_refused(weight, message):
    with pytest.raises(ValueError, match=message):
        to_blocks(weight())


def test_a_column_scale_is_refused():
    weight = rounded("Q4_0")
    scaled = QuantizedTensor(weight.codes, weight.scale, None, weight.grid, weight.shape, column_scale=torch.ones(96))
    with pytest.raises(ValueError, match="Q4_0 has no place for AWQ's column scale: use quantize_model"):
        to_blocks(scaled)


@pytest.mark.parametrize("group_size", [64, 32, None])
@pytest.mark.parametrize(
    ("name", "bits", "kind"), [("Q4_0", 4, "symmetric"), ("Q8_0", 8, "symmetric"), ("Q4_1", 4, "minimum")]
)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_longer_groups_are_blocks_that_are_alike(group_size, name, bits, kind, scale_dtype):
    weight = rtn(torch.cat((WEIGHT, WEIGHT + 1), 1), bits, group_size, kind=kind, scale_dtype=scale_dtype)
    assert np.array_equal(dequantized(name, to_blocks(weight)), weight.dequantize().numpy())


def test_whole_rows_of_32_are_groups_too():
    """group_size=None on rows of 32 numbers is the same grid as group_size=32."""
    weight = rtn(WEIGHT[:, :32], 8, None, symmetric=True)
    assert np.array_equal(dequantized("Q8_0", to_blocks(weight)), weight.dequantize().numpy())
