"""A packed linear layer computes what `torch.nn.functional.linear` does with the dequantized weight, and holds no more
than its formula says. The kernels are held against float64, and the forms they keep against what went in."""

import copy
import io
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from kvcourse import ModelConfig, Transformer
from kvcourse.quant import Grid, QuantEmbedding, QuantizedTensor, QuantLinear, kernels, rtn
from kvcourse.quant.kernels import Int4Kernel, Int8Kernel, unable

BF16 = torch.bfloat16
GRIDS = [
    *product((2, 3, 4, 8), (None, 32, "tensor"), ("symmetric", "minimum")),
    *product((2, 3, 4, 8), (64,), ("zero_point",)),
    (4, 64, "nf4"),
]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int4(rows=128, columns=192, group=64, kind="zero_point", **more):
    """A weight for the int4 kernel that has every code, and every zero point from 0 to 15."""
    grid = Grid(4, group, kind, scale_dtype=BF16)
    draw = torch.Generator().manual_seed(1)
    groups = columns // grid.size(columns)
    codes = torch.randint(0, 16, (rows, columns), generator=draw, dtype=torch.uint8)
    scale = (torch.rand(rows, groups, generator=draw) + 0.01).to(BF16)
    zero = torch.arange(rows * groups).reshape(rows, groups).remainder(16).to(torch.uint8)
    return QuantizedTensor.of(codes, scale, zero if kind == "zero_point" else None, grid, **more)


def int8(rows=128, columns=192, **more):
    codes = torch.arange(rows * columns).reshape(rows, columns).mul(37).remainder(256).to(torch.uint8)
    scale = random(rows, 1).abs().to(BF16)
    return QuantizedTensor.of(codes, scale, None, Grid(8, None, "symmetric", scale_dtype=BF16), **more)


def with_kernel(weight, **more):
    """The layer on its kernel; where this PyTorch has none there is nothing to test."""
    kernel = Int8Kernel if weight.grid.bits == 8 else Int4Kernel
    if unable(kernel, "cpu"):
        pytest.skip(unable(kernel, "cpu"))
    return QuantLinear(weight, dtype=BF16, path=kernel.path, **more)


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    alike = (a.grid, a.shape, a.note, a.tensors.keys()) == (b.grid, b.shape, b.note, b.tensors.keys())
    pairs = ((a.tensors[name], b.tensors[name]) for name in a.tensors)
    return alike and all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


# --- what is computed ---


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("bits", "group", "kind"), GRIDS)
def test_forward_is_a_product_with_the_dequantized_weight(bits, group, kind, dtype):
    weight = rtn(random(96, 192), bits, group, kind=kind)
    bias = random(96, seed=1)
    layer = QuantLinear(weight, bias, dtype, "dequantize")
    for shape in ((192,), (5, 192), (2, 3, 192), (0, 192)):
        x = random(*shape, seed=2, dtype=dtype)
        assert torch.equal(layer(x), F.linear(x, weight.dequantize(dtype), bias.to(dtype)))


def test_another_code_shows():
    weight = rtn(random(96, 192), 4, 64)
    x, right = random(5, 192, seed=2), F.linear(random(5, 192, seed=2), weight.dequantize())
    weight.codes[50, 20] ^= 1
    assert not torch.equal(QuantLinear(weight)(x), right)


@pytest.mark.parametrize("make", [int8, int4])
@pytest.mark.parametrize("kind", ["symmetric", "zero_point"])
def test_a_kernel_reads_every_weight_right(make, kind):
    """Column by column, since x is a row of the identity. A symmetric weight is exact but for its rounding to bfloat16.
    A zero point may move it by 7/256 of the scale: so far is an offset of 7 scales, the largest that is not exact, from
    a number of 8 bits."""
    weight = make(kind=kind) if make is int4 else make()
    layer, expected = with_kernel(weight), weight.dequantize(torch.float64)
    read = torch.cat([layer(rows) for rows in torch.eye(192, dtype=BF16).split(16)]).T
    if weight.grid.kind == "symmetric":
        assert torch.equal(read, weight.dequantize(BF16))
    else:
        off = 7 / 256 * weight.scale.double().repeat_interleave(64, 1)
        assert ((read.double() - expected).abs() <= off + (expected.abs() + off) / 256).all()
        assert not torch.equal(read, weight.dequantize(BF16))


@pytest.mark.parametrize("weight", [int8(), int4(), int4(group=None, kind="symmetric"), int4(columns=1024, group=512)])
@pytest.mark.parametrize("shape", [(1,), (2, 3), (200,)])
def test_a_kernel_is_as_close_as_bfloat16(weight, shape):
    """bfloat16 keeps 8 bits: each number is off by at most 2^-8 of itself. That holds for every weight and for the
    result; an offset of the int4 kernel is off by 7/256 of the scale at most. A kernel that adds up in float32 adds to
    this less than 1,024 x 2^-24 of the sum of magnitudes."""
    layer, x = with_kernel(weight), random(*shape, weight.shape[1], dtype=BF16)
    dense, wide = weight.dequantize(torch.float64), x.double()
    right = wide @ dense.T
    scale = weight.scale.double().repeat_interleave(weight.shape[1] // weight.scale.shape[1], 1)
    off = dense.abs() / 256 + (scale * 7 / 256 if weight.grid.kind == "zero_point" else 0) + 2**-14 * dense.abs()
    bound = (wide.abs() @ off.T) * (1 + 1 / 256) + right.abs() / 256

    def is_close(y):
        return bool(((y.double() - right).abs() <= bound).all())

    assert is_close(layer(x))
    assert not is_close(layer(x).roll(1, -1))  # the outputs of other rows
    assert not is_close(layer(x.roll(1, -1)))  # the columns of others


@pytest.mark.parametrize("make", [int8, int4])
def test_many_rows_are_a_product_with_the_dequantized_weight(make):
    layer = with_kernel(make())
    x = random(layer.weight.few + 1, 192, dtype=BF16)
    assert torch.equal(layer(x), F.linear(x, make().dequantize(BF16)))
    assert not torch.equal(layer(x)[:-1], layer(x[:-1]))  # few rows go another way


@pytest.mark.parametrize("make", [int8, int4])
@pytest.mark.parametrize("rows", [3, 200])
def test_order_and_column_scale_are_undone_in_x(make, rows):
    """Powers of 2 and a permutation: dividing by them is exact, so a kernel gives the same up to the order of sums."""
    order = torch.randperm(192, generator=torch.Generator().manual_seed(3)).short()
    beside = {"order": order, "column_scale": 2.0 ** torch.arange(192).remainder(3)}
    weight, bias = make(**beside), random(128, seed=4)
    layer, x = with_kernel(weight, bias=bias), random(2, rows, 192, dtype=BF16)
    right = x.double() @ weight.dequantize(torch.float64).T + bias.to(BF16)
    size = x.double().abs() @ weight.dequantize(torch.float64).abs().T
    assert ((layer(x) - right).abs() <= size / 16).all()
    assert same(layer.quantized(), weight)
    assert not ((with_kernel(make(column_scale=beside["column_scale"]))(x) + bias - right).abs() <= size / 16).all()


# --- what is kept ---


@pytest.mark.parametrize("kind", ["symmetric", "zero_point"])
@pytest.mark.parametrize("group", [32, 64, 96, 192, 384, None])
def test_the_form_of_the_int4_kernel_is_turned_back_bit_for_bit(kind, group):
    weight = int4(192, 768, group, kind, note="as it was")
    assert same(with_kernel(weight).quantized(), weight)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_way_back_at_any_size(size):
    weight = rtn(random(64, 64) * size, 4, 32, scale_dtype=BF16)
    assert same(with_kernel(weight).quantized(), weight)


def test_the_form_of_the_int8_kernel_is_turned_back_bit_for_bit():
    layer = with_kernel(int8())
    assert same(layer.quantized(), int8())
    layer.weight.codes[3, 4] += 1
    assert not same(layer.quantized(), int8())


@pytest.mark.parametrize(("bits", "group", "kind"), GRIDS)
def test_bytes_are_those_of_the_formula(bits, group, kind):
    weight = rtn(random(64, 192), bits, group, kind=kind)
    layer = QuantLinear(weight, random(64))
    for _ in range(10):
        layer(random(3, 192))
    assert layer.nbytes == QuantizedTensor.bytes_for((64, 192), bits, group, kind=kind) + 4 * 64


@pytest.mark.parametrize(
    ("weight", "nbytes"),
    [
        (int8(576, 768), 576 * 768 + 2 * 576),
        (int4(576, 768, 32), 576 * 768 // 2 + 576 * (768 // 32) * 2 * 2),
        (int4(576, 768, 96), 576 * 768 // 2 + 576 * (768 // 32) * 2 * 2),
        (int4(576, 768, None), 576 * 768 // 2 + 576 * (768 // 256) * 2 * 2),
    ],
)
def test_a_kernel_keeps_one_form_of_the_weight(weight, nbytes):
    """Codes; a scale per row, or scale and offset per group of the kernel. Nothing else that a layer holds is large:
    written to a file, whatever attributes it has, it is 10 kB longer at most."""
    layer = with_kernel(weight)
    for rows in [1] * 10 + [100] * 10:
        layer(random(rows, 768, dtype=BF16))
    assert layer.nbytes == nbytes

    def length(layer):
        torch.save(layer, file := io.BytesIO())
        return file.tell()

    assert nbytes < length(layer) < nbytes + 10_000
    layer.remembered = weight.dequantize(BF16)
    assert length(layer) > 3 * nbytes / 2


# --- which way is taken ---


def scaled(dtype):
    return {"scale_dtype": dtype}


@pytest.mark.parametrize(
    ("shape", "arguments", "dtype", "reason"),
    [
        ((64, 64), (4, 32, True, scaled(BF16)), torch.float32, "this layer computes in float32"),
        ((64, 64), (4, 32, True, scaled(BF16)), torch.float16, "this layer computes in float16"),
        ((64, 64), (4, 32, True, scaled(torch.float16)), BF16, "scale_dtype=torch.bfloat16"),
        ((64, 64), (4, 16, True, scaled(BF16)), BF16, "multiple of 32, these have 16"),
        ((64, 33), (4, None, True, scaled(BF16)), BF16, "multiple of 32, these have 33"),
        ((65, 64), (4, 32, True, scaled(BF16)), BF16, "multiple of 64 rows (output channels), this weight has 65"),
        ((64, 64), (4, "tensor", True, scaled(BF16)), BF16, "a grid for each row or group"),
        ((64, 64), (4, 32, False, {"kind": "nf4"} | scaled(BF16)), BF16, 'kind="symmetric" or "zero_point"'),
        ((64, 64), (4, 32, False, {"kind": "minimum"} | scaled(BF16)), BF16, 'kind="symmetric" or "zero_point"'),
        ((64, 64), (8, 32, True, scaled(BF16)), BF16, "symmetric=True, group_size=None"),
        ((64, 64), (8, None, False, scaled(BF16)), BF16, "symmetric=True, group_size=None"),
        ((64, 64), (8, None, True, scaled(torch.float32)), BF16, "these are float32"),
        ((64, 64), (3, 64, True, scaled(BF16)), BF16, "for 4 and 8 bits, not for 3"),
    ],
)
def test_what_no_kernel_fits_is_dequantized_and_says_why(shape, arguments, dtype, reason):
    *arguments, options = arguments
    weight = rtn(random(*shape), *arguments, **options)
    layer = QuantLinear(weight, dtype=dtype)
    assert layer.path == "dequantize" and reason in layer.reason
    x = random(3, shape[1], dtype=dtype)
    assert torch.equal(layer(x), F.linear(x, weight.dequantize(dtype)))
    if weight.grid.bits != 3:
        path = f"int{weight.grid.bits} kernel"
        with pytest.raises(ValueError, match="does not fit") as error:
            QuantLinear(weight, dtype=dtype, path=path)
        assert reason in str(error.value)


def test_a_kernel_is_taken_where_it_fits():
    for weight in (int8(), int4()):
        path = with_kernel(weight).path
        layer = QuantLinear(weight, dtype="bfloat16")
        assert (layer.path, layer.reason) == (path, None)
        layer = QuantLinear(weight, dtype=BF16, path="dequantize")
        assert (layer.path, layer.reason) == ("dequantize", 'path="dequantize" was asked for.')


def test_scales_that_bfloat16_can_hold_need_no_other_dtype():
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    weight = QuantizedTensor.of(codes, torch.full((64, 1), 0.25).half(), None, Grid(4, None, "symmetric"))
    assert same(with_kernel(weight).quantized(), weight)


def missing(*_):
    raise NotImplementedError("no such kernel here\nand more")


@pytest.mark.parametrize(
    ("instead", "reason"),
    [
        (missing, "has no int8 kernel for cpu (no such kernel here)"),
        (lambda x, w, s: x @ w.T.to(x) + 1, "unknown order"),
    ],
)
def test_a_kernel_that_is_missing_or_wrong_here_is_not_used(monkeypatch, instead, reason):
    monkeypatch.setattr(torch, "_weight_int8pack_mm", instead)
    monkeypatch.setattr(kernels, "unable", unable.__wrapped__)
    layer = QuantLinear(int8(), dtype=BF16)
    assert layer.path == "dequantize" and reason in layer.reason
    with pytest.raises(ValueError, match="does not fit"):
        QuantLinear(int8(), dtype=BF16, path="int8 kernel")


def test_a_device_without_kernels_says_so():
    layer = QuantLinear(int4(), random(128), BF16).to("meta")
    assert layer.path == "dequantize" and layer.reason == "The int4 kernel is for CPU and CUDA, this weight is on meta."
    assert layer(torch.empty(3, 192, dtype=BF16, device="meta")).shape == (3, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "fast"}, "path='fast' must be one of auto, dequantize, int8 kernel, int4 kernel"),
        ({"path": "int8 kernel"}, "reads codes of 8 bits, these have 4"),
        ({"path": "int8 activations"}, "go with weights of 8 bits, these have 4"),
        ({"bias": torch.zeros(64)}, r"bias must have shape \(128,\), got \(64,\)"),
        ({"dtype": torch.int8}, "none the course computes in"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        QuantLinear(int4(), **changes)


@pytest.mark.parametrize("make", [QuantLinear, QuantEmbedding])
@pytest.mark.parametrize("weight", [torch.ones(4, 4), None])
def test_what_is_no_packed_weight_is_refused(make, weight):
    with pytest.raises(ValueError, match="weight must be a QuantizedTensor, as .* makes one, got (Tensor|NoneType)"):
        make(weight)


# --- in a model ---


def test_to_another_dtype_keeps_scales_and_looks_for_a_kernel():
    weight = int8()
    layer = QuantLinear(weight, random(128))
    kernel = with_kernel(weight).path
    layer.to(BF16)
    assert (layer.path, layer.dtype, layer.bias.dtype) == (kernel, BF16, BF16)
    layer.float()
    assert (layer.path, layer.dtype, layer.bias.dtype) == ("dequantize", torch.float32, torch.float32)
    assert same(layer.quantized(), weight)


def test_casting_twice_casts_no_scale():
    weight = rtn(random(64, 64), 4, 32)  # scales in float16
    layer = torch.nn.Sequential(QuantLinear(weight, dtype=BF16)).to(BF16).to(BF16)[0]
    assert layer.weight.scale.dtype == torch.float16 and same(layer.quantized(), weight)
    plain = torch.nn.Module()
    plain.register_buffer("scale", weight.scale)
    assert plain.to(BF16).scale.dtype == BF16  # what happens to the scales of a module that does not see to it


@pytest.mark.parametrize("make", [int8, int4])
def test_copies_and_state_dicts(make):
    layer = with_kernel(make(), bias=random(128))
    x, twin = random(3, 192, dtype=BF16), copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    twin.weight.codes.zero_()
    assert not torch.equal(twin(x), layer(x))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x)) and same(twin.quantized(), make())


@pytest.mark.parametrize("weight", [int8(), int4(), rtn(random(50, 48), 3, 16), rtn(random(50, 15), 3, "tensor")])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_an_embedding_gives_rows_of_the_dequantized_weight(weight, dtype):
    ids = torch.tensor([[3, 48, 3], [0, 7, 47]])
    right = F.embedding(ids, weight.dequantize(dtype))
    assert torch.equal(QuantEmbedding(weight, dtype)(ids), right)
    assert torch.equal(QuantEmbedding(QuantLinear(weight, dtype=dtype))(ids), right)
    assert not torch.equal(QuantEmbedding(weight, dtype)(ids + 1), right)


@pytest.mark.parametrize("weight", [int8(), rtn(random(50, 15), 3, "tensor")])
def test_an_embedding_takes_the_ids_that_torch_takes(weight):
    ours, theirs = QuantEmbedding(weight), torch.nn.Embedding.from_pretrained(weight.dequantize())
    for ids in (torch.tensor(3), torch.zeros(0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.int32)):
        assert torch.equal(ours(ids), theirs(ids))
    for bad in (-1, weight.shape[0]):
        for embedding in (ours, theirs):
            with pytest.raises(IndexError, match="out of range"):
                embedding(torch.tensor([0, bad]))


def test_a_path_may_be_asked_for_later():
    layer = QuantLinear(int4(), dtype=torch.float32, path="dequantize")
    layer.ask("int4 kernel")
    assert layer.path == "dequantize" and "is used in bfloat16" in layer.reason
    assert layer.to(BF16).path == with_kernel(int4()).path
    with pytest.raises(ValueError, match="path='fast' must be one of"):
        layer.ask("fast")


@pytest.mark.parametrize("weight", [int8(), int4(), rtn(random(128, 192), 3, 32)])
def test_an_embedding_dequantizes_no_other_rows(monkeypatch, weight):
    head, seen = QuantLinear(weight, dtype=BF16), []
    dequantize = QuantizedTensor.dequantize
    monkeypatch.setattr(QuantizedTensor, "dequantize", lambda w, dtype: seen.append(w.shape) or dequantize(w, dtype))
    QuantEmbedding(head)(torch.tensor([[5, 6, 5]]))
    assert seen == [(3, 192)]


@pytest.mark.parametrize("weight", [int8(), int4()])
def test_a_tied_head_and_embedding_hold_one_weight(weight):
    model = torch.nn.Module()
    model.head = with_kernel(weight)
    model.embedding = QuantEmbedding(model.head)
    for change in (lambda m: m, copy.deepcopy, torch.nn.Module.float, torch.nn.Module.bfloat16):
        model = change(model)
        held = {buffer.data_ptr(): buffer.nbytes for buffer in model.buffers()}
        assert sum(held.values()) == model.head.nbytes == model.embedding.nbytes
    assert same(model.embedding.quantized(), weight)


def test_a_model_of_packed_layers_equals_one_of_dequantized_weights():
    config = ModelConfig(
        n_layers=2, n_heads=4, n_kv_heads=2, d_model=64, d_ff=96, vocab_size=128, max_seq_len=64, qkv_bias=True
    )
    model, tokens = Transformer(config, dtype=torch.float32), torch.arange(12)[None]
    packed = copy.deepcopy(model)
    for name, linear in list(packed.named_modules()):
        if isinstance(linear, torch.nn.Linear) and name != "lm_head":
            weight = rtn(linear.weight, 4, 32)
            packed.set_submodule(name, QuantLinear(weight, linear.bias))
            model.get_submodule(name).weight.data = weight.dequantize()
    table = rtn(model.embed_tokens.weight, 8, 32)
    model.embed_tokens.weight.data = table.dequantize()
    model.lm_head = None
    packed.lm_head = QuantLinear(table)
    packed.embed_tokens = QuantEmbedding(packed.lm_head)
    assert (packed.dtype, packed.device) == (model.dtype, model.device)
    assert torch.equal(packed(tokens), model(tokens))
    packed.layers[1].mlp.up_proj.weight.codes[0, 0] ^= 1
    assert not torch.equal(packed(tokens), model(tokens))
