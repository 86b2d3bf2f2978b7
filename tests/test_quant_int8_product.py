"""Products in whole numbers, against the same products in int64; both ways to compute them give the same."""

import copy
import io
import subprocess
import sys
import warnings
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from reference import largest_difference, random_tokens, small_config, small_model

from kvcourse.quant import (
    Grid,
    QuantEmbedding,
    QuantizedTensor,
    QuantLinear,
    int8_product,
    load,
    quantize_model,
    rtn,
    save,
)
from kvcourse.quant.int8_product import Int8Product, fbgemm_fits

PATH = Int8Product.path
CPU = torch.device("cpu")
EXACT = 4 * 2.0**-24  # three products and a quotient in float32, each off by half a unit in the last place


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(rows=48, columns=96, scale_dtype=torch.float16, **more) -> QuantizedTensor:
    """With every code there is; a scale for each row."""
    codes = torch.arange(rows * columns).reshape(rows, columns).mul(37).remainder(255).add(1).to(torch.uint8)
    scale = (random(rows, 1).abs() + 0.01).to(scale_dtype)
    return QuantizedTensor.of(codes, scale, None, Grid(8, None, "symmetric", scale_dtype=scale_dtype), **more)


def layer_of(weight=None, bias=None, dtype=torch.float32) -> QuantLinear:
    return QuantLinear(weight_of() if weight is None else weight, bias, dtype, PATH)


def by_hand(x, weight):
    """x `(n, columns)` rounded with one scale a row, times the codes in int64, times both scales in float64."""
    codes, scale, _ = weight.unpacked()
    step = x.abs().amax(-1, keepdim=True).float() / 127
    whole = torch.where(step > 0, x.float() / step, 0).round().long()
    assert whole.abs().max() <= 127
    return (whole @ (codes.long() - 128).T).double() * step.double() * scale[:, 0].double()


@pytest.fixture(params=["fbgemm", "torch._int_mm"])
def way(request, monkeypatch):
    """Each of the two ways to multiply whole numbers, where this machine has it."""
    if request.param == "fbgemm" and not fbgemm_fits(CPU):
        pytest.skip("FBGEMM does not multiply whole numbers exactly on this machine")
    monkeypatch.setattr(int8_product, "fbgemm_fits", lambda device: request.param == "fbgemm" and device.type == "cpu")
    return request.param


# --- what is computed ---


@pytest.mark.parametrize(("rows", "columns"), [(48, 96), (1, 1), (7, 5), (33, 129), (192, 64)])
@pytest.mark.parametrize("n", [1, 3, 50])
def test_it_is_the_product_in_whole_numbers(way, rows, columns, n):
    weight, x = weight_of(rows, columns), random(n, columns, seed=1)
    out, right = layer_of(weight)(x), by_hand(x, weight)
    assert ((out - right).abs() <= EXACT * right.abs() + 1e-30).all()
    if rows > 1:
        assert not torch.allclose(out.double(), right.roll(1, -1))


def test_the_largest_sum_is_exact(way):
    """Every product 127 x 127, of the same sign: what adds pairs in 16 bits overflows."""
    codes = torch.full((16, 4096), 255, dtype=torch.uint8)
    codes[8:] = 1
    weight = QuantizedTensor.of(codes, torch.ones(16, 1).half(), None, Grid(8, None, "symmetric"))
    out = layer_of(weight)(torch.full((2, 4096), 127.0))
    assert out[:, :8].eq(127 * 127 * 4096).all() and out[:, 8:].eq(-127 * 127 * 4096).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_x_in_another_dtype(way, dtype):
    weight, x = weight_of(), random(5, 96, seed=1, dtype=dtype)
    out, right = layer_of(weight, random(48, seed=2), dtype)(x), by_hand(x, weight) + random(48, seed=2).to(dtype)
    assert out.dtype == dtype
    step = max(torch.finfo(dtype).eps, 2.0**-23)  # rounded once before the bias is added, once after it
    assert ((out.double() - right).abs() <= step * (right.abs() + random(48, seed=2).abs() + 1e-6)).all()


@pytest.mark.parametrize("shape", [(96,), (5, 96), (2, 3, 96), (0, 96), (2, 0, 96), (1, 1, 1, 96)])
def test_x_of_any_shape(way, shape):
    layer, x = layer_of(bias=random(48, seed=3)), random(*shape, seed=1)
    out = layer(x)
    assert out.shape == (*shape[:-1], 48)
    assert torch.equal(out.reshape(-1, 48), layer(x.reshape(-1, 96)))
    if x.numel():
        right = by_hand(x.reshape(-1, 96), weight_of()) + random(48, seed=3)
        assert largest_difference(out.reshape(-1, 48), right) < 1e-4 * right.abs().max()


def test_x_that_lies_otherwise_in_memory(way):
    layer = layer_of()
    for x in (random(96, 5).T, random(5, 192)[:, ::2], random(10, 96)[::2], random(1, 96).expand(5, 96)):
        assert torch.equal(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))


def test_a_token_does_not_depend_on_its_neighbours(way):
    """Neighbours a million times as large: with one scale for all, as many codes would do it, nothing would be left."""
    layer = layer_of()
    x = random(6, 96, seed=1) * torch.tensor([1, 1e6, 1e-6, 1, 1e3, 1])[:, None]
    together = layer(x)
    for row in range(6):
        assert torch.equal(together[row], layer(x[row]))
        assert together[row].abs().max() > 0
    shared = (x / (x.abs().max() / 127)).round()
    assert shared[0].abs().max() == 0


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-20, 1.0, 1e20, 1e34])
def test_any_magnitude(way, size):
    """What is too small for a scale in float32 counts as zero; nothing becomes NaN."""
    weight = weight_of()
    x = random(4, 96, seed=1) * size
    out = layer_of(weight)(x)
    right = by_hand(x.double(), weight)
    assert out.isfinite().all()
    if 1e-30 < size:
        assert ((out - right).abs() <= 2 * EXACT * right.abs()).all()
    elif size < 1e-40:
        assert out.abs().max() < 1e-35


def test_rows_of_zeros_and_of_no_numbers(way):
    layer, x = layer_of(bias=random(48, seed=2)), random(4, 96, seed=1)
    x[0], x[2, 5], x[3, 7] = 0, torch.nan, torch.inf
    out = layer(x)
    assert torch.equal(out[0], random(48, seed=2))
    assert out[1].isfinite().all() and torch.equal(out[1], layer(x[1]))
    assert out[2].isnan().all() and not out[3].isfinite().any()  # seen, not hidden


@pytest.mark.parametrize("which", [("order",), ("column_scale",), ("order", "column_scale")])
def test_order_and_column_scale_are_undone_in_x(way, which):
    """Powers of 2, so that dividing by them is exact."""
    order = torch.randperm(96, generator=torch.Generator().manual_seed(3)).short()
    beside = {"order": order, "column_scale": 2.0 ** torch.arange(96).remainder(3)}
    weight, x = weight_of(**{name: beside[name] for name in which}), random(5, 96, seed=1)
    asked = x / beside["column_scale"] if "column_scale" in which else x
    asked = asked[:, order.long()] if "order" in which else asked
    layer, right = layer_of(weight), by_hand(asked, weight_of())
    assert ((layer(x) - right).abs() <= EXACT * right.abs()).all()
    assert largest_difference(layer(x), layer_of()(x)) > 1
    # Each number of x is off by half a step at most: so much can the result be, beside the dequantized weight.
    dense, step = weight.dequantize(torch.float64), asked.abs().amax(-1, keepdim=True) / 127
    spread = weight_of().dequantize(torch.float64).abs().sum(1)
    assert ((layer(x) - x.double() @ dense.T).abs() <= 0.501 * step * spread).all()


def test_both_ways_give_the_same(monkeypatch):
    if not fbgemm_fits(CPU):
        pytest.skip("FBGEMM does not multiply whole numbers exactly on this machine")
    fbgemm, x = layer_of(bias=random(48, seed=2)), random(20, 96, seed=1)
    monkeypatch.setattr(int8_product, "fbgemm_fits", lambda device: False)
    other = layer_of(bias=random(48, seed=2))
    assert fbgemm.weight.packed is not None and other.weight.packed is None
    assert largest_difference(fbgemm(x), other(x)) <= EXACT * other(x).abs().max()
    assert fbgemm.nbytes == other.nbytes


def test_fbgemm_is_not_used_where_it_is_wrong_or_missing(monkeypatch):
    def missing(*arguments):
        raise AttributeError("no such product")

    for instead in (missing, lambda x, weight: torch.zeros(2, 16)):
        monkeypatch.setattr(int8_product, "fbgemm_product", instead)
        assert not fbgemm_fits.__wrapped__(CPU)
    assert not fbgemm_fits.__wrapped__(torch.device("meta"))


# --- what is kept ---


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_codes_are_given_back_bit_for_bit(way, scale_dtype):
    order = torch.randperm(96, generator=torch.Generator().manual_seed(3)).short()
    for more in ({}, {"order": order, "column_scale": torch.rand(96) + 1, "note": "as it was"}):
        weight = weight_of(scale_dtype=scale_dtype, **more)
        back = layer_of(weight).quantized()
        assert (back.grid, back.shape, back.note) == (weight.grid, weight.shape, weight.note)
        assert back.tensors.keys() == weight.tensors.keys()
        for name, tensor in weight.tensors.items():
            assert torch.equal(back.tensors[name], tensor) and back.tensors[name].dtype == tensor.dtype
    ids = torch.tensor([5, 0, 47, 5])
    assert torch.equal(layer_of().weight.rows(ids), weight_of().dequantize()[ids])


def test_bytes_are_those_of_codes_scales_and_bias(way):
    layer = layer_of(weight_of(576, 768), random(576))
    assert layer.nbytes == 576 * 768 + 2 * 576 + 4 * 576
    for n in [1] * 5 + [100] * 5:
        layer(random(n, 768))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, when it writes a quantized tensor
        torch.save(layer, file := io.BytesIO())
    assert layer.nbytes < file.tell() < layer.nbytes + 16 * 576 + 10_000  # and what FBGEMM keeps for each row


def test_to_another_dtype_and_copies(way):
    layer, x = layer_of(bias=random(48, seed=2)), random(5, 96, seed=1)
    before = layer(x)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), before)
    half = twin.to(torch.bfloat16)
    assert (half.path, half.dtype, half.bias.dtype) == (PATH, torch.bfloat16, torch.bfloat16)
    assert half.weight.scale.dtype == torch.float16  # scales are what they were
    assert torch.equal(half(x.bfloat16()), layer_of(bias=random(48, seed=2), dtype=torch.bfloat16)(x.bfloat16()))
    assert torch.equal(half.float().quantized().codes, weight_of().codes)
    assert torch.equal(layer(x), before)


def test_nothing_of_pytorch_s_farewell_to_quantized_tensors_is_heard():
    """PyTorch says once in a process that they will go."""
    code = f"""if True:
        import copy, torch
        from kvcourse.quant import QuantLinear, rtn
        layer = QuantLinear(rtn(torch.ones(8, 8), 8, symmetric=True), path={PATH!r})
        layer(torch.ones(3, 8))
        layer.quantized()
        copy.deepcopy(layer).to(torch.bfloat16)
    """
    ran = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in ran.stderr


# --- which weights, and when ---


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (rtn(random(64, 64), 4, None, True), "go with weights of 8 bits, these have 4"),
        (rtn(random(64, 64), 8, 32, True), "one scale per row and no zero: quantize with symmetric=True"),
        (rtn(random(64, 64), 8, None, False), "one scale per row and no zero"),
        (rtn(random(64, 64), 8, "tensor", True), "one scale per row and no zero"),
    ],
)
def test_other_weights_are_refused(weight, reason):
    with pytest.raises(ValueError, match=f'path="{PATH}" does not fit: .*{reason}'):
        QuantLinear(weight, path=PATH)
    layer = QuantLinear(weight, path="dequantize")
    layer.ask(PATH)
    assert layer.path == "dequantize" and reason in layer.reason


def test_it_is_used_only_where_it_is_asked_for():
    for dtype in (torch.float32, torch.bfloat16):
        assert QuantLinear(weight_of(), dtype=dtype).path != PATH
    layer = QuantLinear(weight_of())
    layer.ask(PATH)
    assert (layer.path, layer.reason) == (PATH, None)
    layer.ask("auto")
    assert layer.path == "dequantize"


def test_on_a_device_without_numbers(way):
    layer = layer_of(bias=random(48)).to("meta")
    assert layer.path == PATH and layer(torch.empty(3, 96, device="meta")).shape == (3, 48)


def test_an_embedding_of_such_a_head(way):
    head, ids = layer_of(), torch.tensor([[3, 47, 3], [0, 7, 46]])
    right = F.embedding(ids, weight_of().dequantize())
    assert torch.equal(QuantEmbedding(head)(ids), right)
    assert not torch.equal(QuantEmbedding(head)(ids + torch.tensor([1, -1, 1])), right)


# --- in a model ---


def in_whole_numbers(**options):
    model = small_model(small_config(qkv_bias=True, tie_embeddings=True))
    options = {"symmetric": True, "path": PATH, "head_bits": 8, "progress": False} | options
    return model, quantize_model(model, "rtn", 8, **options)


def test_every_product_of_a_model_is_such(way):
    model, whole = in_whole_numbers()
    tokens = random_tokens(2, 90)
    assert {m.path for m in whole.modules() if isinstance(m, QuantLinear)} == {PATH}
    seen, hooks = [], []

    def check(layer, arguments, out):
        right = by_hand(arguments[0].reshape(-1, layer.in_features), layer.quantized()).view(out.shape)
        right = right if layer.bias is None else right + layer.bias
        seen.append(float((out - right).abs().max() / right.abs().max()))

    for module in whole.modules():
        if isinstance(module, QuantLinear):
            hooks.append(module.register_forward_hook(check))
    out = whole(tokens)
    assert len(seen) == 15 and max(seen) < 1e-5
    others = in_whole_numbers(path="auto")[1](tokens)
    assert 1e-4 < (out - others).square().mean().sqrt() < 0.1 * model(tokens).square().mean().sqrt()


def test_a_model_that_was_saved_gives_the_same_bits(way, tmp_path):
    _, whole = in_whole_numbers()
    again, tokens = load(save(whole, tmp_path / "m"), "cpu"), random_tokens(2, 30)
    assert {m.path for m in again.modules() if isinstance(m, QuantLinear)} == {PATH}
    assert torch.equal(again(tokens), whole(tokens))
    assert not torch.equal(in_whole_numbers(path="auto")[1](tokens), whole(tokens))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "n"), list(product([torch.float32, torch.bfloat16], [1, 16, 17, 100])))
def test_on_a_gpu(dtype, n):
    weight, x = weight_of(48, 96), random(n, 96, seed=1, dtype=dtype)
    layer = layer_of(weight, dtype=dtype).to("cuda")
    right = by_hand(x, weight)
    assert layer.path == PATH
    assert ((layer(x.cuda()).cpu() - right).abs() <= max(EXACT, torch.finfo(dtype).eps) * right.abs() + 1e-6).all()
    odd = layer_of(weight_of(7, 5)).to("cuda")
    assert odd.path == "dequantize" and "sizes that 8 divides" in odd.reason
