"""The exercises of notebook 08: worked answers and other right ways pass, the usual mistakes are named."""

import numpy as np
import pytest
import torch
from exercises import shared_tests, solution

import kvcourse as kv
from kvcourse.quant import gguf_blocks
from kvcourse.quant.fold import fold
from kvcourse.quant.grid import Grid, fit
from kvcourse.quant.packing import pack
from kvcourse.quant.tensor import QuantizedTensor, rtn

NOTEBOOK = "08_weight_quantization"

RIGHT = {
    "round_to_grid": [
        """
        def round_to_grid(group, bits):
            scale = group.abs().max() / (2 ** (bits - 1) - 1)
            return (group / scale).round() * scale
        """,
        """
        def round_to_grid(group, bits):
            top = 2 ** (bits - 1) - 1
            largest = max(abs(float(number)) for number in group)
            return [round(float(number) * top / largest) * largest / top for number in group]
        """,
        """
        def round_to_grid(group, bits):  # by looking at every value of the grid
            top = 2 ** (bits - 1) - 1
            values = torch.arange(-top, top + 1) * group.abs().max() / top
            return values[(group[:, None] - values).abs().argmin(1)]
        """,
    ],
    "zero_point": [
        """
        def zero_point(group, bits):
            low, high = min(0.0, float(group.min())), max(0.0, float(group.max()))
            scale = (high - low) / (2**bits - 1)
            return scale, round(-low / scale)
        """,
        """
        def zero_point(group, bits):
            with_zero = torch.cat([group, torch.zeros(1)])
            scale = (with_zero.max() - with_zero.min()) / (2**bits - 1)
            return scale, (-with_zero.min() / scale).round()
        """,
        """
        def zero_point(group, bits):
            low, high = group.min().clamp(max=0).item(), group.max().clamp(min=0).item()
            return [(high - low) / (2**bits - 1), int(-low / (high - low) * (2**bits - 1) + 0.5)]
        """,
    ],
    "pack_nibbles": [
        """
        def pack_nibbles(codes):
            return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2]))
        """,
        """
        def pack_nibbles(codes):
            packed = bytearray()
            for i in range(0, len(codes), 2):
                packed.append(codes[i] + 16 * codes[i + 1])
            return bytes(packed)
        """,
        """
        def pack_nibbles(codes):
            codes = np.array(codes, dtype=np.uint8).reshape(-1, 2)
            return codes[:, 0] | codes[:, 1] << 4
        """,
        """
        def pack_nibbles(codes):
            return [codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2)]
        """,
    ],
    "quantized_bytes": [
        """
        def quantized_bytes(rows, columns, bits, group_size):
            groups = rows * columns // group_size
            return (rows * columns * bits + groups * (16 + bits)) / 8
        """,
        """
        def quantized_bytes(rows, columns, bits, group_size):
            return rows * columns * (bits + (16 + bits) / group_size) / 8
        """,
        """
        def quantized_bytes(rows, columns, bits, group_size):
            group = group_size * bits + 16 + bits
            return rows * (columns // group_size) * group // 8
        """,
    ],
    "read_q4_0": [
        """
        def read_q4_0(block):
            halves = np.frombuffer(block[2:], np.uint8)
            codes = np.concatenate([halves & 15, halves >> 4]).astype(np.float32)
            return (codes - 8) * np.frombuffer(block[:2], "<f2").astype(np.float32)
        """,
        """
        def read_q4_0(block):
            import struct
            (scale,) = struct.unpack("<e", block[:2])
            return [scale * ((block[2 + i % 16] >> 4 * (i // 16) & 15) - 8) for i in range(32)]
        """,
        """
        def read_q4_0(block):
            low = np.array([byte % 16 for byte in block[2:]]) - 8
            high = np.array([byte // 16 for byte in block[2:]]) - 8
            return torch.from_numpy(np.r_[low, high] * np.frombuffer(block, np.float16, 1))
        """,
    ],
    "gptq_update": [
        """
        def gptq_update(weight, rounded, inverse):
            error = (weight[:, 0] - rounded) / inverse[0, 0]
            return weight - torch.outer(error, inverse[0])
        """,
        """
        def gptq_update(weight, rounded, inverse):
            weight = weight.clone()
            for row in range(len(weight)):
                error = (weight[row, 0] - rounded[row]) / inverse[0, 0]
                weight[row, 1:] -= error * inverse[0, 1:]
                weight[row, 0] = rounded[row]
            return weight
        """,
        """
        def gptq_update(weight, rounded, inverse):  # the least squares problem itself
            hessian = torch.linalg.inv(inverse)
            error = weight[:, 0] - rounded
            change = torch.linalg.solve(hessian[1:, 1:], hessian[1:, :1]) @ error[None]
            return torch.cat([rounded[:, None], weight[:, 1:] + change.T], dim=1)
        """,
    ],
    "fold_value_scale": [
        """
        def fold_value_scale(v, o, scale, n_heads, d_head):
            heads = scale.reshape(-1, d_head)
            wide = heads.repeat_interleave(n_heads // len(heads), dim=0).flatten()
            return v / scale[:, None], o * wide
        """,
        """
        def fold_value_scale(v, o, scale, n_heads, d_head):
            group = n_heads // (len(scale) // d_head)
            columns = [scale[head // group * d_head + i] for head in range(n_heads) for i in range(d_head)]
            return torch.diag(1 / scale) @ v, o * torch.stack(columns)
        """,
        """
        def fold_value_scale(v, o, scale, n_heads, d_head):
            by_head = scale.view(-1, 1, d_head)
            wide = by_head.expand(-1, n_heads // len(by_head), d_head).reshape(-1)
            return (v.T / scale).T, o * wide[None]
        """,
    ],
}


MISTAKES = {
    "round_to_grid": [
        (("(2 ** (bits - 1) - 1)", "2 ** (bits - 1)"), "have not"),
        (
            (
                "(2 ** (bits - 1) - 1)\n    return (group / scale).round()",
                "2 ** (bits - 1)\n    return (group / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)",
            ),
            "cut off",
        ),
        (("(2 ** (bits - 1) - 1)", "(2**bits - 1)"), "twice as many"),
        (("(2 ** (bits - 1) - 1)", "7"), "7 steps hold for 4 bits only"),
        (("(2 ** (bits - 1) - 1)", "7.5"), "half a step off"),
        (("(2 ** (bits - 1) - 1)", "((2**bits - 1) / 2)"), "half a step off"),
        (("return (group / scale).round() * scale", "return group + scale"), "[0.237, -0.412, 0.105,"),
        (("group.abs().max() / (2 ** (bits - 1) - 1)", "(group.max() - group.min()) / 15"), "lowest"),
        (("group.abs().max()", "group.max()"), "negative side"),
        ((".round()", ".floor()"), "rounded down"),
        ((".round()", ".trunc()"), "towards zero"),
        ((".round() * scale", ".round()"), "these are the codes"),
        ((".round() * scale", " * scale"), "nothing is rounded"),
    ],
    "zero_point": [
        (
            ("min(0.0, float(group.min())), max(0.0, float(group.max()))", "group.min().item(), group.max().item()"),
            "no code at all",
        ),
        (
            (
                "min(0.0, float(group.min())), max(0.0, float(group.max()))\n    scale = (high - low) / (2**bits - 1)\n"
                "    return scale, round(-low / scale)",
                "float(group.min()), float(group.max())\n    scale = (high - low) / (2**bits - 1)\n"
                "    return scale, min(max(round(-low / scale), 0), 2**bits - 1)",
            ),
            "does not mean 0",
        ),
        (("max(0.0, float(group.max()))", "float(group.max())"), "its upper end reach to 0"),
        (("round(-low / scale)", "2 ** (bits - 1)"), "in the middle of the codes"),
        (("(2**bits - 1)", "2**bits"), "2^bits - 1 steps"),
        (("round(-low", "round(low"), "wrong sign"),
        (("scale, round(-low / scale)", "round(-low / scale), scale"), "scale comes first"),
        (("round(-low / scale)", "-low / scale"), "a whole number"),
        (("round(-low / scale)", "low"), "lowest number"),
        (("round(-low / scale)", "int(-low / scale)"), "cut off"),
    ],
    "pack_nibbles": [
        (("low | high << 4", "low << 4 | high"), "swapped"),
        (("low | high << 4", "low + high"), "moved up"),
        (("low | high << 4", "low + high << 4"), "binds before"),
        (("low | high << 4", "low | high"), "on top of each other"),
        (("low | high << 4", "low + 10 * high"), "times 16"),
        (("bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2]))", "bytes(codes)"), "its own"),
        (("zip(codes[::2], codes[1::2])", "zip(codes[: len(codes) // 2], codes[len(codes) // 2 :])"), "n/2"),
        (("return bytes", "return ''.join(map(str, codes)) or bytes"), "expected b"),
    ],
    "quantized_bytes": [
        ((" + groups * (16 + bits)", ""), "codes alone"),
        (("(16 + bits)", "16"), "zeros are missing"),
        (("(16 + bits)", "bits"), "scales are missing"),
        ((" / 8", ""), "a byte has 8"),
        (("(16 + bits)", "8 * (16 + bits)"), "given in bits"),
        (("rows * columns // group_size", "rows"), "once a row"),
        (("rows * columns // group_size", "columns // group_size"), "every row"),
        (("rows * columns // group_size", "(rows // group_size) * (columns // group_size)"), "within a row"),
        (("rows * columns // group_size", "rows * columns"), "for every number"),
        (("(16 + bits)", "(32 + bits)"), "32 bits"),
        (("(16 + bits)", "(16 + 16)"), "the zero counts 16 bits"),
        (("(16 + bits)) / 8", "(16 + 1)) // 8"), "expected 511488, yours is "),
    ],
    "read_q4_0": [
        (
            ("np.concatenate([halves & 15, halves >> 4])", "np.stack([halves & 15, halves >> 4], 1).ravel()"),
            "neighbors",
        ),
        (("[halves & 15, halves >> 4]", "[halves >> 4, halves & 15]"), "high halves come first"),
        (
            (
                'np.float32)\n    return (codes - 8) * np.frombuffer(block[:2], "<f2").astype(np.float32)',
                'np.int8)\n    return (codes - 8) * np.frombuffer(block[:2], "<f2")',
            ),
            "rounded to float16",
        ),
        (
            (
                'np.float32)\n    return (codes - 8) * np.frombuffer(block[:2], "<f2").astype(np.float32)',
                'np.float16)\n    return (codes - 8) * np.frombuffer(block[:2], "<f2")[0]',
            ),
            "rounded to float16",
        ),
        (("(codes - 8)", "codes"), "not centered"),
        (("(codes - 8)", "(codes - 7)"), "take 8 off"),
        (("(codes - 8)", "(codes - 9)"), "with block = bytes.fromhex('003c21"),
        (("(codes - 8)", "np.where(codes > 7, codes - 16, codes)"), "signed"),
        ((".astype(np.float32)\n    return (codes - 8)", "\n    return (codes - 8)"), "no negative numbers"),
        (('"<f2"', '">f2"'), "little-endian"),
        (('(codes - 8) * np.frombuffer(block[:2], "<f2").astype(np.float32)', "codes - 8"), "by the scale"),
        (("halves & 15", "halves"), "four bits only"),
        (("halves >> 4", "halves & 240"), "not moved down"),
    ],
    "gptq_update": [
        (("weight - torch", "weight + torch"), "away from `rounded`"),
        ((" / inverse[0, 0]", ""), "without a division"),
        (
            ("inverse[0])", "torch.linalg.inv(inverse)[0] * inverse[0, 0] / torch.linalg.inv(inverse)[0, 0])"),
            "a row of the Hessian",
        ),
        (
            ("weight - torch.outer(error, inverse[0])", "torch.cat([rounded[:, None], weight[:, 1:]], 1)"),
            "nothing was passed on",
        ),
        (("weight - torch.outer(error, inverse[0])", "(weight - torch.outer(error, inverse[0]))[:, 1:]"), "is missing"),
        (("inverse[0])", "inverse[0] * inverse[0, 0] / inverse.diagonal())"), "that of the column being rounded"),
    ],
    "fold_value_scale": [
        (
            ("heads.repeat_interleave(n_heads // len(heads), dim=0).flatten()", "scale.repeat(n_heads // len(heads))"),
            "next to each other",
        ),
        (
            (
                "heads.repeat_interleave(n_heads // len(heads), dim=0).flatten()",
                "scale.repeat_interleave(n_heads // len(heads))",
            ),
            "as a whole",
        ),
        (("o * wide", "o * scale"), "once per query head"),
        (("v / scale[:, None], o * wide", "v * scale[:, None], o * scale"), "size of tensor"),
        (("v / scale[:, None], o * wide", "v * scale[:, None], o / wide"), "swapped"),
        (("v / scale[:, None], o * wide", "v, o * wide"), "v is left"),
        (("v / scale[:, None], o * wide", "v / scale[:, None], o"), "o is left"),
        (("o * wide", "o / wide"), "both are divided"),
        (("v / scale", "v * scale"), "both are multiplied"),
    ],
}

TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES)


# --- the worked answers against examples by hand, and against the package -----------------------------------------


def worked(name):
    return solution(NOTEBOOK, name)


def test_worked_answers_by_hand():
    rounded = worked("round_to_grid")(torch.tensor([0.237, 0.7, -0.66]), 4)
    torch.testing.assert_close(rounded, torch.tensor([0.2, 0.7, -0.7]))
    assert worked("zero_point")(torch.tensor([1.0, 1.5]), 4) == (0.1, 0)  # 0 to 1.5 in 15 steps
    assert worked("zero_point")(torch.tensor([-1.0, 0.5]), 4) == (0.1, 10)
    assert worked("pack_nibbles")([1, 2, 15, 0]) == bytes([0x21, 0x0F])
    assert worked("quantized_bytes")(2, 128, 4, 64) == 128 + 4 * 20 // 8
    block = np.array([1], "<f2").tobytes() + bytes([0x21] + [0x88] * 15)
    assert worked("read_q4_0")(block).tolist() == [-7, *[0] * 15, -6, *[0] * 15]
    inverse = torch.tensor([[2.0, -1.0], [-1.0, 2.0]])  # error 0.25 / 2, times -1, taken off
    updated = worked("gptq_update")(torch.tensor([[0.25, 0.5]]), torch.tensor([0.0]), inverse)
    assert updated.tolist() == [[0.0, 0.625]]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_is_that_of_the_package(bits):
    weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(bits))
    by_package = rtn(weight, bits, symmetric=True, scale_dtype=torch.float32).dequantize()
    by_hand = torch.stack([worked("round_to_grid")(row, bits) for row in weight])
    torch.testing.assert_close(by_package, by_hand)


@pytest.mark.parametrize("numbers", [[0.3, -0.2, 0.9], [1.0, 2.1], [-3.0, -2.0], [0.0, 4.0]])
def test_the_zero_point_is_that_of_the_package(numbers):
    group = torch.tensor(numbers)
    scale, zero = fit(group[None], Grid(4, scale_dtype=torch.float32))
    mine = worked("zero_point")(group, 4)
    assert mine == (pytest.approx(float(scale)), int(zero))


def test_packing_and_bytes_are_those_of_the_package():
    codes = torch.randint(16, (1, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert worked("pack_nibbles")(codes[0].tolist()) == bytes(pack(codes, 4)[0].tolist())
    for shape, bits, size in (((64, 256), 4, 64), ((16, 512), 2, 64), ((8, 512), 8, 128)):
        assert worked("quantized_bytes")(*shape, bits, size) == QuantizedTensor.bytes_for(shape, bits, size)


def test_a_block_is_read_as_the_package_reads_it():
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for row in gguf_blocks.to_blocks(rtn(weight, 4, 32, symmetric=True)):
        for block in row.reshape(-1, 18):
            np.testing.assert_array_equal(worked("read_q4_0")(block.tobytes()), gguf_blocks.read_q4_0(block.tobytes()))


def test_an_update_leaves_no_better_change():
    """The derivative of the output error by the columns that are left is zero: H (w' - w), without its first row."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, generator=draw, dtype=torch.double)
    hessian = 2 * inputs.T @ inputs
    weight = torch.randn(3, 6, generator=draw, dtype=torch.double)
    updated = worked("gptq_update")(weight, weight[:, 0].round(), torch.linalg.inv(hessian))
    slope = (updated - weight) @ hessian
    assert slope[:, 1:].abs().max() < 1e-10 < 0.1 < slope[:, 0].abs().max()


def test_folded_weights_are_those_of_the_package():
    config = kv.ModelConfig(vocab_size=32, n_layers=1, n_heads=6, n_kv_heads=2, d_model=24, d_ff=32)
    layer = kv.Transformer(config, device="cpu").layers[0].self_attn
    scale = torch.randn(2 * config.d_head, generator=torch.Generator().manual_seed(0)).exp()
    before = layer.v_proj.weight.clone(), layer.o_proj.weight.clone()
    wide = scale.reshape(2, 1, -1).expand(2, 3, -1).flatten()
    model = kv.Transformer(config, device="cpu")
    model.layers[0].self_attn.v_proj.weight.copy_(before[0])
    model.layers[0].self_attn.o_proj.weight.copy_(before[1])
    fold(model.layers[0], "self_attn.v_proj", wide)
    folded = model.layers[0].self_attn
    mine = worked("fold_value_scale")(*before, scale, config.n_heads, config.d_head)
    torch.testing.assert_close(mine, (folded.v_proj.weight.data, folded.o_proj.weight.data))
    assert not torch.equal(mine[1], before[1])
