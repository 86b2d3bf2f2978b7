"""The exercises of notebook 08: worked answers and other right ways pass, the usual mistakes are named."""

import numpy as np
import pytest
import torch
from exercises import assert_mistake_is_named, assert_worked_answer_is_right_and_stub_not_attempted, learner

import kvcourse as kv
from kvcourse.notebooks.exercises import solution
from kvcourse.quant import gguf_blocks
from kvcourse.quant.fold import fold
from kvcourse.quant.grid import Grid, fit
from kvcourse.quant.packing import pack
from kvcourse.quant.tensor import QuantizedTensor, rtn

NOTEBOOK = "08_weight_quantization"
EXERCISES = [
    "round_to_grid",
    "zero_point",
    "pack_nibbles",
    "quantized_bytes",
    "read_q4_0",
    "gptq_update",
    "fold_value_scale",
]


@pytest.mark.parametrize("name", EXERCISES)
def test_the_worked_answer_is_right_and_the_stub_not_attempted(name):
    assert_worked_answer_is_right_and_stub_not_attempted(NOTEBOOK, name)


RIGHT = {
    "round_to_grid": [
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


@pytest.mark.parametrize("name, code", [(name, code) for name, codes in RIGHT.items() for code in codes])
def test_other_right_ways_pass(name, code):
    verdict = getattr(kv.check, name)(learner(code))
    assert (verdict.status, verdict.message) == ("right", "")


ANSWERS = {
    "round_to_grid": """
def round_to_grid(group, bits):
    scale = group.abs().max() / (2 ** (bits - 1) - 1)
    return (group / scale).round() * scale
""",
    "zero_point": """
def zero_point(group, bits):
    low, high = min(0.0, float(group.min())), max(0.0, float(group.max()))
    scale = (high - low) / (2**bits - 1)
    return scale, round(-low / scale)
""",
    "pack_nibbles": """
def pack_nibbles(codes):
    return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2]))
""",
    "quantized_bytes": """
def quantized_bytes(rows, columns, bits, group_size):
    groups = rows * columns // group_size
    return (rows * columns * bits + groups * (16 + bits)) / 8
""",
    "read_q4_0": """
def read_q4_0(block):
    halves = np.frombuffer(block[2:], np.uint8)
    codes = np.concatenate([halves & 15, halves >> 4]).astype(np.float32)
    return (codes - 8) * np.frombuffer(block[:2], "<f2").astype(np.float32)
""",
    "gptq_update": """
def gptq_update(weight, rounded, inverse):
    error = (weight[:, 0] - rounded) / inverse[0, 0]
    return weight - torch.outer(error, inverse[0])
""",
    "fold_value_scale": """
def fold_value_scale(v, o, scale, n_heads, d_head):
    heads = scale.reshape(-1, d_head)
    wide = heads.repeat_interleave(n_heads // len(heads), dim=0).flatten()
    return v / scale[:, None], o * wide
""",
}

WRONG = [
    # (exercise, what is replaced in a right answer, by what, what the message must name)
    ("round_to_grid", ("(2 ** (bits - 1) - 1)", "2 ** (bits - 1)"), "have not"),
    (
        "round_to_grid",
        (
            "(2 ** (bits - 1) - 1)\n    return (group / scale).round()",
            "2 ** (bits - 1)\n    return (group / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)",
        ),
        "cut off",
    ),
    ("round_to_grid", ("(2 ** (bits - 1) - 1)", "(2**bits - 1)"), "twice as many"),
    ("round_to_grid", ("(2 ** (bits - 1) - 1)", "7"), "7 steps hold for 4 bits only"),
    ("round_to_grid", ("(2 ** (bits - 1) - 1)", "7.5"), "half a step off"),
    ("round_to_grid", ("(2 ** (bits - 1) - 1)", "((2**bits - 1) / 2)"), "half a step off"),
    ("round_to_grid", ("return (group / scale).round() * scale", "return group + scale"), "[0.237, -0.412, 0.105,"),
    ("round_to_grid", ("group.abs().max() / (2 ** (bits - 1) - 1)", "(group.max() - group.min()) / 15"), "lowest"),
    ("round_to_grid", ("group.abs().max()", "group.max()"), "negative side"),
    ("round_to_grid", (".round()", ".floor()"), "rounded down"),
    ("round_to_grid", (".round()", ".trunc()"), "towards zero"),
    ("round_to_grid", (".round() * scale", ".round()"), "these are the codes"),
    ("round_to_grid", (".round() * scale", " * scale"), "nothing is rounded"),
    (
        "zero_point",
        ("min(0.0, float(group.min())), max(0.0, float(group.max()))", "group.min().item(), group.max().item()"),
        "no code at all",
    ),
    (
        "zero_point",
        (
            "min(0.0, float(group.min())), max(0.0, float(group.max()))\n    scale = (high - low) / (2**bits - 1)\n"
            "    return scale, round(-low / scale)",
            "float(group.min()), float(group.max())\n    scale = (high - low) / (2**bits - 1)\n"
            "    return scale, min(max(round(-low / scale), 0), 2**bits - 1)",
        ),
        "does not mean 0",
    ),
    ("zero_point", ("max(0.0, float(group.max()))", "float(group.max())"), "its upper end reach to 0"),
    ("zero_point", ("round(-low / scale)", "2 ** (bits - 1)"), "in the middle of the codes"),
    ("zero_point", ("(2**bits - 1)", "2**bits"), "2^bits - 1 steps"),
    ("zero_point", ("round(-low", "round(low"), "wrong sign"),
    ("zero_point", ("scale, round(-low / scale)", "round(-low / scale), scale"), "scale comes first"),
    ("zero_point", ("round(-low / scale)", "-low / scale"), "a whole number"),
    ("zero_point", ("round(-low / scale)", "low"), "lowest number"),
    ("zero_point", ("round(-low / scale)", "int(-low / scale)"), "cut off"),
    ("pack_nibbles", ("low | high << 4", "low << 4 | high"), "swapped"),
    ("pack_nibbles", ("low | high << 4", "low + high"), "moved up"),
    ("pack_nibbles", ("low | high << 4", "low + high << 4"), "binds before"),
    ("pack_nibbles", ("low | high << 4", "low | high"), "on top of each other"),
    ("pack_nibbles", ("low | high << 4", "low + 10 * high"), "times 16"),
    (
        "pack_nibbles",
        ("bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2]))", "bytes(codes)"),
        "its own",
    ),
    (
        "pack_nibbles",
        ("zip(codes[::2], codes[1::2])", "zip(codes[: len(codes) // 2], codes[len(codes) // 2 :])"),
        "n/2",
    ),
    ("pack_nibbles", ("return bytes", "return ''.join(map(str, codes)) or bytes"), "expected b"),
    ("quantized_bytes", (" + groups * (16 + bits)", ""), "codes alone"),
    ("quantized_bytes", ("(16 + bits)", "16"), "zeros are missing"),
    ("quantized_bytes", ("(16 + bits)", "bits"), "scales are missing"),
    ("quantized_bytes", (" / 8", ""), "a byte has 8"),
    ("quantized_bytes", ("(16 + bits)", "8 * (16 + bits)"), "given in bits"),
    ("quantized_bytes", ("rows * columns // group_size", "rows"), "once a row"),
    ("quantized_bytes", ("rows * columns // group_size", "columns // group_size"), "every row"),
    (
        "quantized_bytes",
        ("rows * columns // group_size", "(rows // group_size) * (columns // group_size)"),
        "within a row",
    ),
    ("quantized_bytes", ("rows * columns // group_size", "rows * columns"), "for every number"),
    ("quantized_bytes", ("(16 + bits)", "(32 + bits)"), "32 bits"),
    (
        "read_q4_0",
        ("np.concatenate([halves & 15, halves >> 4])", "np.stack([halves & 15, halves >> 4], 1).ravel()"),
        "neighbors",
    ),
    ("read_q4_0", ("[halves & 15, halves >> 4]", "[halves >> 4, halves & 15]"), "high halves come first"),
    (
        "read_q4_0",
        (
            'np.float32)\n    return (codes - 8) * np.frombuffer(block[:2], "<f2").astype(np.float32)',
            'np.int8)\n    return (codes - 8) * np.frombuffer(block[:2], "<f2")',
        ),
        "rounded to float16",
    ),
    (
        "read_q4_0",
        (
            'np.float32)\n    return (codes - 8) * np.frombuffer(block[:2], "<f2").astype(np.float32)',
            'np.float16)\n    return (codes - 8) * np.frombuffer(block[:2], "<f2")[0]',
        ),
        "rounded to float16",
    ),
    ("read_q4_0", ("(codes - 8)", "codes"), "not centered"),
    ("read_q4_0", ("(codes - 8)", "np.where(codes > 7, codes - 16, codes)"), "signed"),
    (
        "read_q4_0",
        (".astype(np.float32)\n    return (codes - 8)", "\n    return (codes - 8)"),
        "no negative numbers",
    ),
    ("read_q4_0", ('"<f2"', '">f2"'), "little-endian"),
    ("read_q4_0", ('(codes - 8) * np.frombuffer(block[:2], "<f2").astype(np.float32)', "codes - 8"), "by the scale"),
    ("read_q4_0", ("halves & 15", "halves"), "four bits only"),
    ("read_q4_0", ("halves >> 4", "halves & 240"), "not moved down"),
    ("gptq_update", ("weight - torch", "weight + torch"), "away from `rounded`"),
    ("gptq_update", (" / inverse[0, 0]", ""), "without a division"),
    (
        "gptq_update",
        ("inverse[0])", "torch.linalg.inv(inverse)[0] * inverse[0, 0] / torch.linalg.inv(inverse)[0, 0])"),
        "a row of the Hessian",
    ),
    (
        "gptq_update",
        ("weight - torch.outer(error, inverse[0])", "torch.cat([rounded[:, None], weight[:, 1:]], 1)"),
        "nothing was passed on",
    ),
    (
        "gptq_update",
        ("weight - torch.outer(error, inverse[0])", "(weight - torch.outer(error, inverse[0]))[:, 1:]"),
        "is missing",
    ),
    (
        "gptq_update",
        ("inverse[0])", "inverse[0] * inverse[0, 0] / inverse.diagonal())"),
        "that of the column being rounded",
    ),
    (
        "fold_value_scale",
        ("heads.repeat_interleave(n_heads // len(heads), dim=0).flatten()", "scale.repeat(n_heads // len(heads))"),
        "next to each other",
    ),
    (
        "fold_value_scale",
        (
            "heads.repeat_interleave(n_heads // len(heads), dim=0).flatten()",
            "scale.repeat_interleave(n_heads // len(heads))",
        ),
        "as a whole",
    ),
    ("fold_value_scale", ("o * wide", "o * scale"), "once per query head"),
    ("fold_value_scale", ("v / scale[:, None], o * wide", "v * scale[:, None], o * scale"), "size of tensor"),
    ("fold_value_scale", ("v / scale[:, None], o * wide", "v * scale[:, None], o / wide"), "swapped"),
    ("fold_value_scale", ("v / scale[:, None], o * wide", "v, o * wide"), "v is left"),
    ("fold_value_scale", ("v / scale[:, None], o * wide", "v / scale[:, None], o"), "o is left"),
    ("fold_value_scale", ("o * wide", "o / wide"), "both are divided"),
    ("fold_value_scale", ("v / scale", "v * scale"), "both are multiplied"),
]


@pytest.mark.parametrize("name, change, phrase", WRONG)
def test_the_usual_mistakes_are_named(name, change, phrase):
    assert_mistake_is_named(name, ANSWERS[name], change, phrase)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_changed_answers_are_right_before_the_change(name):
    assert getattr(kv.check, name)(learner(ANSWERS[name])).status == "right"


def test_every_exercise_has_at_least_three_wrong_answers():
    assert all(sum(wrong == name for wrong, _, _ in WRONG) >= 3 for name in EXERCISES)


@pytest.mark.parametrize("name, code", [(name, code.replace("return ", "")) for name, code in ANSWERS.items()])
def test_a_missing_return_is_asked_about(name, code):
    verdict = getattr(kv.check, name)(learner(code))
    assert verdict.status == "not attempted" and "is the return missing?" in verdict.message


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
