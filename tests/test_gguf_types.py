"""How numbers are stored in GGUF files: blocks worked out by hand, every type of the `gguf` package, alignment."""

import gguf
import numpy as np
import pytest
import torch
from gguf_files import gguf_tensors, llama_fields, random_state, read_gguf, tiny_config, write

from kvcourse.weights.gguf_file import dequantize, open_gguf

# Those that the `gguf` package can undo.
TYPES = sorted(kind.name for kind in gguf.quants._type_traits) + ["F16", "F32"]


def embedding_of(tmp_path, rows: np.ndarray, kind: str, width: int, dtype=torch.float32) -> torch.Tensor:
    """What the loader makes of the given bytes, stored as the embedding of a model of that width."""
    return read_gguf(model_with(tmp_path, rows, kind, width), dtype)[1]["embed_tokens.weight"]


def model_with(tmp_path, rows: np.ndarray, kind: str, width: int):
    config = tiny_config(n_heads=4, n_kv_heads=4, d_model=width, vocab_size=len(rows), n_layers=1)
    tensors = gguf_tensors(config, random_state(config)) | {"token_embd.weight": (rows, kind)}
    return write(tmp_path / "m.gguf", llama_fields(config), tensors)


def block(tmp_path, *parts: list[int], kind: str, size=32) -> np.ndarray:
    """The numbers of one block, given as bytes. The block stands in the file three times."""
    rows = np.array([sum(parts, [])] * 3, dtype=np.uint8)
    got = embedding_of(tmp_path, rows, kind, size).numpy()
    np.testing.assert_array_equal(got[0], got[2])
    return got[0]


HALF, ONE, QUARTER, MINUS_ONE = [0x00, 0x38], [0x00, 0x3C], [0x00, 0x34], [0x00, 0xBC]  # float16, low byte first


def test_q4_0_block_by_hand(tmp_path):
    """Codes minus 8: low halves of the 16 bytes are numbers 0-15, high halves 16-31."""
    got = block(tmp_path, ONE, [0x21], [0x88] * 15, kind="Q4_0")
    expected = np.zeros(32)
    expected[0], expected[16] = 1 - 8, 2 - 8
    np.testing.assert_array_equal(got, expected)


def test_q4_1_block_by_hand(tmp_path):
    """Scale 0.5 and minimum -1: a number is 0.5 * code - 1."""
    got = block(tmp_path, HALF, MINUS_ONE, [0x21], [0xF0] * 15, kind="Q4_1")
    expected = np.array([-1.0] * 16 + [0.5 * 15 - 1] * 16)
    expected[0], expected[16] = 0.5 * 1 - 1, 0.5 * 2 - 1
    np.testing.assert_array_equal(got, expected)


FIFTH_BITS = [0x01, 0x80, 0x02, 0x00]  # of numbers 0, 15 and 17


def test_q5_0_block_by_hand(tmp_path):
    """A fifth bit for each number, in number's order; codes minus 16."""
    got = block(tmp_path, ONE, FIFTH_BITS, [0x21], [0x00] * 15, kind="Q5_0")
    expected = np.full(32, -16.0)
    expected[0], expected[16] = 16 + 1 - 16, 2 - 16
    expected[15] = expected[17] = 16 - 16
    np.testing.assert_array_equal(got, expected)


def test_q5_1_block_by_hand(tmp_path):
    got = block(tmp_path, HALF, MINUS_ONE, FIFTH_BITS, [0x21], [0x00] * 15, kind="Q5_1")
    expected = np.full(32, -1.0)
    expected[0], expected[16] = 0.5 * 17 - 1, 0.5 * 2 - 1
    expected[15] = expected[17] = 0.5 * 16 - 1
    np.testing.assert_array_equal(got, expected)


def test_q8_0_block_by_hand(tmp_path):
    """Scale 0.25 and 32 signed bytes."""
    got = block(tmp_path, QUARTER, [0x80, 0x7F], [0x01] * 30, kind="Q8_0")
    np.testing.assert_array_equal(got, [-32.0, 31.75] + [0.25] * 30)


def test_q4_k_block_by_hand(tmp_path):
    """Eight groups of 32 share a scale and a minimum: the first four pairs in bytes 0-7, the others' low four bits in
    bytes 8-11. Of each 32 bytes of codes, low halves are one group and high halves the next."""
    scales = [1, 1, 1, 1] + [0, 2, 0, 0] + [0x01, 0x31, 0x01, 0x02]  # group 1 has minimum 2, group 5 has 3
    got = block(tmp_path, HALF, ONE, scales, [0x21], [0x00] * 31, [0x50], [0x00] * 95, kind="Q4_K", size=256)
    expected = np.zeros(256)
    expected[0] = 0.5 * 1
    expected[32:64], expected[32] = -2, 0.5 * 2 - 2
    expected[96] = 0.5 * 5
    expected[160:192] = -3
    np.testing.assert_array_equal(got, expected)


def test_q6_k_block_by_hand(tmp_path):
    """Codes of 4 + 2 bits minus 32. Of each 64 bytes of low bits, byte i holds numbers i and i + 64."""
    low, high = [0x21] + [0x00] * 127, [0b110000_11] + [0x00] * 63
    got = block(tmp_path, low, high, [1] * 15 + [2], HALF, kind="Q6_K", size=256)
    expected = np.full(256, 0.5 * -32)
    expected[240:] = 2 * 0.5 * -32
    expected[0] = 0.5 * (1 + 3 * 16 - 32)
    expected[64] = 0.5 * (2 - 32)
    expected[96] = 0.5 * (3 * 16 - 32)
    np.testing.assert_array_equal(got, expected)


def test_bf16_by_hand(tmp_path):
    """The upper half of a float32: 0x3F80 is 1, 0xC049 is -3.140625."""
    rows = np.array([[0x80, 0x3F, 0x49, 0xC0] * 16] * 3, dtype=np.uint8)
    got = embedding_of(tmp_path, rows, "BF16", 32)
    np.testing.assert_array_equal(got, [[1.0, -3.140625] * 16] * 3)


@pytest.mark.parametrize("kind", TYPES)
def test_random_bytes_of_every_type(tmp_path, kind):
    """Any bytes at all, as the `gguf` package undoes them; NaN where a scale is NaN, which no model may have."""
    type_ = gguf.GGMLQuantizationType[kind]
    per_block, size = gguf.GGML_QUANT_SIZES[type_]
    rows = np.random.default_rng(0).integers(0, 256, (5, 512 // per_block * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        path = model_with(tmp_path, rows, kind, 512)
        got = dequantize(open_gguf(path)[1]["token_embd.weight"], path)
        expected = gguf.quants.dequantize(rows, type_)
        if not np.isfinite(expected).all():
            with pytest.raises(ValueError, match="m.gguf: tensor token_embd.weight has numbers that are infinite or"):
                read_gguf(path)
    assert got.shape == (5, 512)
    np.testing.assert_array_equal(got, expected)
    assert len(np.unique(expected)) > 2


@pytest.mark.parametrize("kind, dtype", [("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_floats_keep_every_bit(tmp_path, kind, dtype):
    """All half-precision numbers that are finite, subnormals included."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16 if kind == "BF16" else torch.float16)
    numbers = torch.where(numbers.isfinite(), numbers, 0).reshape(128, 512).to(dtype)
    got = embedding_of(tmp_path, numbers.view(torch.uint8).numpy(), kind, 512, dtype)
    assert got.dtype == dtype and torch.equal(got.view(torch.uint8), numbers.view(torch.uint8))


@pytest.mark.parametrize("alignment", [None, 8, 16, 32, 64, 256])
@pytest.mark.parametrize("odd", ["", "x", "xyz12", "thirteen char"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_alignment_and_order_of_dimensions(tmp_path, alignment, odd, kind):
    """Tensors of 3 rows of 5 numbers, behind metadata of odd lengths: the bytes that were written, and the shape."""
    type_ = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    stored = {f"t{i}": gguf.quants.quantize(rng.normal(size=(3, 5)).astype(np.float32), type_) for i in range(4)}
    tensors = {name: (values.view(np.uint8), kind) for name, values in stored.items()}
    path = write(tmp_path / "m.gguf", {"general.name": odd}, tensors, alignment=alignment)
    metadata, found = open_gguf(path)
    assert metadata.get("general.alignment", 32) == (alignment or 32)
    assert found.keys() == stored.keys()
    for name, values in stored.items():
        assert found[name].shape.tolist() == [5, 3]  # innermost first
        assert found[name].data.tobytes() == values.tobytes()
        got = dequantize(found[name], path)
        assert got.shape == (3, 5)
        np.testing.assert_array_equal(got, gguf.quants.dequantize(values, type_))


def test_alignment_that_is_ignored_is_noticed(tmp_path):
    """Partner of the test above: with 32 taken for 256, the first tensor is padding."""
    values = np.arange(1, 16, dtype=np.float32).reshape(3, 5)
    path = write(tmp_path / "m.gguf", {"general.name": "x"}, {"t": values}, alignment=256)
    whole = path.read_bytes()
    assert whole.count(b"general.alignment") == 1
    path.write_bytes(whole.replace(b"general.alignment", b"general.alignmenX"))
    _, found = open_gguf(path)
    assert not np.array_equal(dequantize(found["t"], path), values)


@pytest.mark.parametrize("alignment", [16, 64])
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_a_whole_model_with_another_alignment(tmp_path, alignment, kind):
    config = tiny_config()
    tensors = gguf_tensors(config, random_state(config))
    usual = read_gguf(write(tmp_path / "m.gguf", llama_fields(config), tensors, kind))[1]
    fields = llama_fields(config) | {"general.name": "odd"}
    other = read_gguf(write(tmp_path / "n.gguf", fields, tensors, kind, alignment=alignment))[1]
    for name, weight in usual.items():
        assert torch.equal(other[name], weight), name


def test_a_type_that_cannot_be_dequantized_is_named(tmp_path):
    config = tiny_config()
    tensors = gguf_tensors(config, random_state(config)) | {"blk.0.ffn_up.weight": np.zeros((96, 64), np.int32)}
    with pytest.raises(ValueError, match="blk.0.ffn_up.weight is of type I32"):
        read_gguf(write(tmp_path / "m.gguf", llama_fields(config), tensors))
