"""Whole models with rounded weights: against rounding each weight alone, and against `transformers` and hooks."""

from dataclasses import replace

import pytest
import torch
from reference import KINDS, hugging_face, largest_difference, random_tokens, small_config, small_model
from torch import nn

import kvcourse as kv
from kvcourse.quant import QuantizedTensor, gptq, nf4, quantize_model, rtn
from kvcourse.quant.calibration import LINEARS, READERS, Calibration, calibration_rows, statistics_of
from kvcourse.quant.fold import fold, shared_in_groups
from kvcourse.quant.grid import Grid
from kvcourse.quant.linear import QuantEmbedding, QuantLinear
from kvcourse.quant.statistics import output_error
from kvcourse.training.stories.tales import stories

TEXT = random_tokens(1, 1000)[0]
TOKENS = random_tokens(2, 90, seed=2)


def model_of(kind: str = "gqa", seed: int = 0, dtype=torch.float32, **changes) -> kv.Transformer:
    return small_model(small_config(**KINDS[kind] | changes), seed, dtype)


def quantized(model, method="rtn", bits=4, group_size=32, calibration=None, **options):
    if method in ("gptq", "awq") and calibration is None:
        calibration = TEXT
    if calibration is not None:
        options = {"context": 96} | options
    return quantize_model(model, method, bits, group_size, calibration, progress=False, **options)


def linears(model) -> dict[str, nn.Module]:
    names = [f"layers.{i}.{name}" for i in range(len(model.layers)) for name in LINEARS]
    return {name: model.get_submodule(name) for name in names}


def plain(model) -> kv.Transformer:
    """An ordinary model with the dequantized weights of a quantized one."""
    dense = kv.Transformer(model.config, "cpu", torch.float32)
    state = {name: weight for name, weight in model.named_parameters() if name in dense.state_dict()}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear | QuantEmbedding) and f"{name}.weight" in dense.state_dict():
            state[f"{name}.weight"] = module.quantized().dequantize()
    dense.load_state_dict(state)
    return dense


# --- each weight as rounded alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bits", "group_size", "symmetric"), [(4, 32, False), (3, None, True), (8, 16, True)])
def test_each_weight_is_the_one_that_rtn_gives(kind, bits, group_size, symmetric):
    model = model_of(kind)
    result = quantized(model, "rtn", bits, group_size, symmetric=symmetric)
    for name, linear in linears(model).items():
        layer, alone = result.get_submodule(name), rtn(linear.weight, bits, group_size, symmetric)
        assert torch.equal(layer.quantized().dequantize(), alone.dequantize()), name
        assert not torch.equal(alone.dequantize(), linear.weight)
    assert largest_difference(result(TOKENS), plain(result)(TOKENS)) < 1e-4
    assert largest_difference(result(TOKENS), model(TOKENS)) > (1e-3 if bits == 8 else 0.1)


def test_nf4_and_the_options_of_a_grid():
    model = model_of()
    for options in ({"method": "nf4"}, {"kind": "minimum", "clip": True}, {"scale_dtype": torch.bfloat16}):
        result = quantized(model, **options)
        more = {name: value for name, value in options.items() if name != "method"}
        for name, linear in linears(model).items():
            alone = nf4(linear.weight, 32) if "method" in options else rtn(linear.weight, 4, 32, **more)
            assert torch.equal(result.get_submodule(name).quantized().dequantize(), alone.dequantize())


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_transformers_with_the_dequantized_weights_gives_the_same_logits(method):
    model = model_of()
    result = quantized(model, method)
    theirs = hugging_face(plain(result))(TOKENS).logits
    assert largest_difference(result(TOKENS), theirs) < 1e-4
    assert largest_difference(hugging_face(model)(TOKENS).logits, theirs) > 0.1


# --- the model given, and what is shared with it ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("kind", ["biases", "tied"])
def test_the_model_given_stays_as_it_was(method, kind):
    model = model_of(kind)
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    quantized(model, method, head_bits=8, dtype="bfloat16")
    assert all(isinstance(linear, nn.Linear) for linear in linears(model).values())
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_rounded_is_shared(dtype):
    model = model_of("biases", dtype=dtype)
    result = quantized(model, "gptq", only="layers.1.mlp.*")
    theirs = dict(model.named_parameters())
    shared = {name for name, p in result.named_parameters() if p.data_ptr() == theirs[name].data_ptr()}
    assert set(theirs) - shared == {f"layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert result.dtype == dtype


def test_an_lm_for_an_lm_and_a_model_for_a_model():
    lm = kv.load_model("tiny-gqa", device="cpu", dtype="float32")
    result = quantized(lm)
    assert isinstance(result, kv.LM) and result.tokenizer is lm.tokenizer and result.name == lm.name
    assert isinstance(result.model.layers[0].mlp.up_proj, QuantLinear)
    assert isinstance(lm.model.layers[0].mlp.up_proj, nn.Linear)
    alone = quantized(lm.model)
    assert isinstance(alone, kv.Transformer)
    ids = torch.tensor([lm.encode("Tom has a red ball.")])
    assert torch.equal(alone(ids), result.model(ids))
    assert kv.perplexity(result, ids[0]) < 1.5 * kv.perplexity(lm, ids[0])


def test_only_some_layers():
    model = model_of()
    result = quantized(model, only=["layers.1.*", "*.down_proj"])
    found = {name for name, module in linears(result).items() if isinstance(module, QuantLinear)}
    assert found == {f"layers.1.{name}" for name in LINEARS} | {"layers.0.mlp.down_proj"}
    assert [layer.name for layer in result.quantization.layers] == sorted(
        found, key=lambda name: (int(name.split(".")[1]), LINEARS.index(name.split(".", 2)[2]))
    )


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_only_one_layer_of_a_calibrated_model(method):
    model = model_of()
    result = quantized(model, method, only="layers.0.self_attn.o_proj")
    assert sum(isinstance(module, QuantLinear) for module in result.modules()) == 1
    assert 0.01 < largest_difference(result(TOKENS), model(TOKENS)) < 1


@pytest.mark.parametrize("head_bits", [8, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head(head_bits, tied):
    model = model_of(tie_embeddings=tied)
    result = quantized(model, head_bits=head_bits)
    grid = {8: (8, None, True), 4: (4, 32)}[head_bits]
    embedding = rtn(model.embed_tokens.weight, *grid)
    head = embedding if tied else rtn(model.lm_head.weight, *grid)
    assert torch.equal(result.embed_tokens(TOKENS), embedding.dequantize()[TOKENS])
    assert torch.equal(result.lm_head.quantized().dequantize(), head.dequantize())
    assert largest_difference(result(TOKENS), plain(result)(TOKENS)) < 1e-4
    names = [layer.name for layer in result.quantization.layers if not layer.name.startswith("layers.")]
    assert names == ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    assert (result.embed_tokens.quantized().codes.data_ptr() == result.lm_head.quantized().codes.data_ptr()) is tied


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_resident_bytes_are_those_of_the_formula(bits):
    model = model_of("tied", d_ff=96)
    result = quantized(model, bits=bits, head_bits=8)
    d, kv_size = 64, 16
    shapes = [(d, d), (kv_size, d), (kv_size, d), (d, d), (96, d), (96, d), (d, 96)] * 2
    wanted = 97 * (d + 2)  # the head: a byte each, and a scale a row
    # By hand: codes, 2 bytes of scale a group, and a code for the zero point of each.
    for rows, columns in shapes:
        groups = columns // 32
        by_hand = rows * (columns * bits // 8 + 2 * groups + -(-groups * bits // 8))
        assert QuantizedTensor.bytes_for((rows, columns), bits, 32) == by_hand
        wanted += by_hand
    held = {t.data_ptr(): t.untyped_storage().nbytes() for t in result.buffers()}
    assert sum(held.values()) == result.quantization.nbytes == wanted
    left = sum(p.nbytes for p in result.parameters())
    assert left == 4 * 5 * d  # norms alone
    result(TOKENS)
    assert sum(t.untyped_storage().nbytes() for t in result.buffers()) == sum(
        t.untyped_storage().nbytes() for t in quantized(model, bits=bits, head_bits=8).buffers()
    )


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_dtypes_are_rounded_in_float32(given):
    model = model_of(dtype=given)
    result = quantized(model, "rtn", calibration=TEXT)
    scales = torch.bfloat16 if given == torch.bfloat16 else torch.float16
    assert result.dtype == given and result(TOKENS).dtype == given
    for name, linear in linears(model).items():
        alone = rtn(linear.weight.float(), 4, 32, scale_dtype=scales)
        assert torch.equal(result.get_submodule(name).quantized().codes, alone.codes)
    other = quantized(model_of(), dtype=given)
    assert other.dtype == given and other.norm.weight.dtype == given
    bound = {torch.float16: 0.02, torch.bfloat16: 0.15, torch.float64: 1e-4}[given]
    assert largest_difference(other(TOKENS), quantized(model_of(), scale_dtype=scales)(TOKENS)) < bound


# --- calibration -----------------------------------------------------------------------------------------------------


def watched_inputs(model, rows) -> dict[str, list[torch.Tensor]]:
    """What each linear layer is given when the whole model reads the rows: {name: inputs}."""
    seen = {}

    def watch(name):
        return lambda module, given: seen.setdefault(name, []).append(given[0])

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linears(model).items()]
    for row in rows:
        model(row[None])
    for handle in handles:
        handle.remove()
    return seen


def hessian_of(inputs) -> torch.Tensor:
    x = torch.cat([x.flatten(0, -2) for x in inputs]).double()
    return (2 * x.T @ x / len(x)).float()


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_the_whole_model(kind):
    model = model_of(kind)
    rows = calibration_rows(TEXT, 96, model)
    seen = watched_inputs(model, rows)
    run = Calibration(model, rows)
    for index, layer in enumerate(model.layers):
        found = {}
        for writer, inputs in run.inputs(layer):
            statistics = statistics_of(inputs)
            assert statistics.n == rows.numel() == 960
            for name in READERS[writer]:
                found[name] = statistics
        assert set(found) == set(LINEARS)
        for name, statistics in found.items():
            wanted = hessian_of(seen[f"layers.{index}.{name}"])
            assert largest_difference(statistics.hessian, wanted) < 1e-4 * wanted.abs().max()
            mean = torch.cat(seen[f"layers.{index}.{name}"]).abs().mean((0, 1))
            assert torch.allclose(statistics.magnitude, mean, rtol=1e-4)
        run.advance()
    final = model.head(model.norm(torch.cat(run.hidden)))
    assert largest_difference(final, model(rows)) < 1e-4


def test_the_inputs_differ_between_texts_and_layers():
    """Or the test above could not fail."""
    model = model_of()
    seen = watched_inputs(model, calibration_rows(TEXT, 96, model))
    hessians = [hessian_of(seen[f"layers.{i}.{name}"]) for i in (0, 1) for name in ("mlp.up_proj", "self_attn.q_proj")]
    for i, first in enumerate(hessians):
        assert all(largest_difference(first, second) > 0.01 * first.abs().max() for second in hessians[:i])


def test_gptq_rounds_each_layer_on_what_the_rounded_ones_before_give_it():
    """Each weight is GPTQ's of the inputs that hooks see in the finished model: by then all before it is rounded."""
    model = model_of("biases")
    result = quantized(model, "gptq", 3, 32)
    rows = calibration_rows(TEXT, 96, model)
    after, before = watched_inputs(plain(result), rows), watched_inputs(model, rows)
    for name, linear in linears(model).items():
        codes = result.get_submodule(name).quantized().unpacked()[0]
        alone = gptq(linear.weight, hessian_of(after[name]), 3, 32).unpacked()[0]
        assert (codes != alone).float().mean() < 0.002, name  # a sum in another order may tip a number
        if name not in ("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"):
            unrounded = gptq(linear.weight, hessian_of(before[name]), 3, 32).unpacked()[0]
            assert (codes != unrounded).float().mean() > 0.002, name


def test_gptq_is_better_than_rounding_to_nearest_on_what_a_trained_model_reads():
    lm = kv.load_model("tiny-gqa", device="cpu", dtype="float32")
    texts = stories("validation", seed=0)
    ids = [token for _ in range(12) for token in lm.encode(next(texts).text)]
    read, held_out = ids[:1024], ids[1024:2048]
    results = {m: quantized(lm, m, 3, 64, read, context=256) for m in ("rtn", "gptq")}
    scores = {method: kv.perplexity(result, held_out) for method, result in results.items()}
    assert kv.perplexity(lm, held_out) < scores["gptq"] < scores["rtn"]
    results["awq"] = quantized(lm, "awq", 3, 64, read, context=256, only="layers.3.*")
    for method in ("gptq", "awq"):
        layers = results[method].model.quantization.layers
        assert sum(layer.error for layer in layers) < sum(layer.rtn_error for layer in layers)


def test_the_errors_reported():
    model = model_of()
    result = quantized(model, "gptq", calibration=TEXT)
    seen = watched_inputs(plain(result), calibration_rows(TEXT, 96, model))
    for layer in result.quantization.layers:
        weight, hessian = model.get_submodule(layer.name).weight, hessian_of(seen[layer.name])
        zero = torch.zeros_like(weight)
        for error, rounded in (
            (layer.error, result.get_submodule(layer.name).quantized()),
            (layer.rtn_error, rtn(weight, 4, 32)),
        ):
            share = output_error(weight, rounded.dequantize(), hessian) / output_error(weight, zero, hessian)
            assert error == pytest.approx(share**0.5, rel=1e-3)
    for layer in quantized(model).quantization.layers:
        weight = model.get_submodule(layer.name).weight
        difference = rtn(weight, 4, 32).dequantize() - weight
        assert layer.error == layer.rtn_error == pytest.approx(float(difference.norm() / weight.norm()), rel=1e-4)


def test_the_report_as_a_table():
    report = quantized(model_of(), "gptq", head_bits=8).quantization
    lines = str(report).splitlines()
    assert lines[0] == (
        "gptq, 4 bits, groups of 32; calibrated on 10 rows of 96 tokens, without the last 40 tokens, which fill no row"
    )
    assert [line.split()[0] for line in lines[2:]] == ["embed_tokens", "lm_head"] + [
        name.rpartition(".")[2] for name in LINEARS
    ] + ["all"]
    assert lines[-1].split()[1] == "16" and float(lines[-1].split()[2]) == pytest.approx(report.nbytes / 1e6, abs=0.01)
    assert report.seconds > 0 and all(layer.seconds > 0 for layer in report.layers)
    assert "tokens" not in str(quantized(model_of()).quantization)
    assert quantized(model_of(), "rtn", calibration=TEXT[:960]).quantization.calibration == "10 rows of 96 tokens"


def test_context_is_512_or_that_of_the_model():
    model = model_of(max_seq_len=300)
    assert calibration_rows(TEXT, None, model).shape == (3, 300)
    assert calibration_rows(TEXT.tolist(), None, model_of(max_seq_len=2048)).shape == (1, 512)


# --- folding ---------------------------------------------------------------------------------------------------------


def random_scales(columns: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(columns, generator=torch.Generator().manual_seed(seed)) * 2 + 0.25


def folded(model, writer, scale):
    copy = kv.Transformer(model.config, "cpu", torch.float32)
    copy.load_state_dict(model.state_dict())
    for layer in copy.layers:
        fold(layer, writer, scale)
    return copy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", READERS)
def test_logits_stay_when_scales_are_folded(kind, writer):
    model = model_of(kind)
    columns = model.layers[0].get_submodule(READERS[writer][0]).in_features
    scale = random_scales(columns)
    if writer == "self_attn.v_proj":
        scale = shared_in_groups(scale, model.layers[0])
    result = folded(model, writer, scale)
    assert largest_difference(result(TOKENS), model(TOKENS)) < 1e-4
    for name in READERS[writer]:
        weight = model.layers[1].get_submodule(name).weight
        assert torch.equal(result.layers[1].get_submodule(name).weight, weight * scale)


@pytest.mark.parametrize("kind", ["gqa", "wide heads"])
def test_scales_in_the_wrong_order_of_heads_would_show(kind, monkeypatch):
    """Query head h reads key-value head h // 4. Repeated as h % 2, scales meet the values of another head."""
    model = model_of(kind)
    columns = model.layers[0].self_attn.o_proj.in_features
    scale = shared_in_groups(random_scales(columns), model.layers[0])
    d_head = model.config.d_head
    wrong = scale.reshape(2, 4, d_head).transpose(0, 1).flatten()
    with pytest.raises(ValueError, match="share a key-value head must have the same scales"):
        folded(model, "self_attn.v_proj", wrong)
    monkeypatch.setattr("kvcourse.quant.fold.one_of_each_group", lambda scale, layer: scale[: 2 * d_head])
    assert largest_difference(folded(model, "self_attn.v_proj", wrong)(TOKENS), model(TOKENS)) > 1e-2


def test_biases_are_folded_too(monkeypatch):
    model = model_of("biases")
    scale = random_scales(model.config.d_ff)
    result = folded(model, "mlp.up_proj", scale)
    assert torch.equal(result.layers[0].mlp.up_proj.bias, model.layers[0].mlp.up_proj.bias / scale)
    for layer in result.layers:
        layer.mlp.up_proj.bias.mul_(scale)  # as if it had been forgotten
    assert largest_difference(result(TOKENS), model(TOKENS)) > 0.1


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_cannot_be_divided_by_are_refused(bad):
    scale = random_scales(64)
    scale[3] = bad
    with pytest.raises(ValueError, match="finite and above 0; those for what input_layernorm writes"):
        fold(model_of().layers[0], "input_layernorm", scale)


@pytest.mark.parametrize("kind", KINDS)
def test_awq_folds_what_it_scales(kind):
    """At 8 bits little is left of the rounding, so logits show whether all scales came back out."""
    model = model_of(kind)
    for layer in model.layers:  # a few large inputs, so that there is something to scale
        layer.input_layernorm.weight[:4] *= 10
        layer.post_attention_layernorm.weight[:4] *= 10
    result = quantized(model, "awq", 8, 16)
    assert not torch.equal(result.layers[0].input_layernorm.weight, model.layers[0].input_layernorm.weight)
    nearest = quantized(model, "rtn", 8, 16)
    assert largest_difference(result(TOKENS), model(TOKENS)) < 2 * largest_difference(nearest(TOKENS), model(TOKENS))
    for layer in result.quantization.layers:
        assert layer.error < 0.02


# --- refused before any work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bits": 5}, "bits=5 must be one of 2, 3, 4, 8"),
        ({"bits": 16}, "bits=16 must be"),
        ({"bits": True}, "bits=True must be"),
        ({"method": "nf4", "bits": 8}, "NF4 has 16 values, so bits must be 4"),
        ({"method": "round"}, "method='round' must be one of rtn, nf4, gptq, awq"),
        ({"group_size": 0}, "group_size=0 must be a whole number of at least 1"),
        ({"group_size": -1}, "group_size=-1 must be"),
        ({"group_size": 48}, "layers.0.self_attn.q_proj has rows of 64 numbers, .*48 does not.*one of 8, 16, 32, or"),
        ({"group_size": 64}, "layers.0.mlp.down_proj has rows of 96 .*64 does not divide: give one of 8, 16, 32, or"),
        ({"symmetric": 1}, "symmetric=1 must be True or False"),
        ({"head_bits": 3}, "head_bits=3 must be 8 or 4, or None"),
        ({"head_bits": 8.0}, "head_bits=8.0 must be 8 or 4, or None"),
        ({"head_bits": True}, "head_bits=True must be 8 or 4, or None"),
        ({"only": 5}, "only=5 matches no linear layer: give patterns such as"),
        ({"context": 96}, "context=96 cuts a calibration text into rows: give calibration= too, or no context"),
        ({"context": -5}, "context=-5 cuts a calibration text"),
        ({"only": "layers.9.*"}, "only='layers.9.*' matches no linear layer: give patterns such as"),
        ({"only": ["*.up_proj", "lm_head"]}, "only='lm_head' matches no .*head_bits="),
        ({"only": []}, "matches no linear layer"),
        ({"dtype": "int8"}, "dtype='int8' is none the course computes in"),
        ({"path": "fast"}, "path='fast' must be one of auto"),
        ({"path": "int8 kernel"}, "layers.0.self_attn.q_proj: path=.int8 kernel. does not fit: .*8 bits"),
        ({"group_size": 10**9}, "layers.0.self_attn.q_proj has rows of 64 numbers"),
        ({"progress": 1}, "progress=1 must be True or False"),
        ({"act_order": True}, "no option act_order with method='rtn'; it has kind, clip, scale_dtype"),
        ({"method": "gptq", "damp": 0.1}, "no option damp with method='gptq'; it has kind"),
        ({"method": "gptq", "damping": -1.0}, "damping"),
        ({"method": "gptq", "act_order": 1}, "act_order=1 must be"),
        ({"method": "gptq", "kind": "nf4"}, "NF4 is method=.nf4., to nearest; method='gptq'"),
        ({"method": "gptq"}, "method='gptq' needs calibration=, the token ids"),
        ({"method": "awq"}, "method='awq' needs calibration="),
        ({"method": "gptq", "calibration": []}, "calibration has 0 tokens, but one row takes context=256"),
        ({"method": "gptq", "calibration": TEXT[:95], "context": 96}, "calibration has 95 tokens, .*context=96"),
        ({"method": "awq", "calibration": TEXT, "context": 257}, "context=257 must be at most 256, the model's own"),
        ({"method": "awq", "calibration": TEXT, "context": 0}, "context=0 must be a whole number"),
        (
            {"method": "awq", "calibration": "a text"},
            "calibration must be the ids of one text, whole numbers in a list",
        ),
        ({"method": "awq", "calibration": TEXT[None]}, "calibration must be the ids of one text"),
        ({"method": "gptq", "calibration": [True] * 300}, "calibration must be the ids of one text"),
        ({"method": "gptq", "calibration": iter([1] * 300)}, "calibration must be the ids of one text"),
        ({"method": "gptq", "calibration": torch.tensor(5)}, "calibration must be the ids of one text"),
        ({"method": "awq", "calibration": [97] * 300}, "Token id 97 in calibration is outside the vocabulary"),
        ({"method": "awq", "calibration": TEXT.float()}, r"calibration must be a list of token ids.{1,120}\.\.\.\.$"),
    ],
)
def test_bad_input_is_refused_before_any_work(options, said, monkeypatch):
    model = model_of(d_ff=96)
    monkeypatch.setattr("kvcourse.quant.quantize.copied", lambda *given, **more: pytest.fail("work had started"))
    with pytest.raises(ValueError, match=said):
        quantize_model(model, **{"bits": 4, "group_size": 32} | options)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(bad):
    model = model_of()
    model.layers[1].mlp.up_proj.weight[3, 4] = bad
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight has numbers that are infinite or NaN"):
        quantized(model)


@pytest.mark.parametrize(
    "name", ["embed_tokens.weight", "layers.0.self_attn.q_proj.bias", "layers.1.mlp.up_proj.weight"]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_so_are_numbers_that_are_not_to_be_rounded(name, bad, monkeypatch):
    model = model_of("biases")
    monkeypatch.setattr("kvcourse.quant.quantize.copied", lambda *given, **more: pytest.fail("work had started"))
    model.get_parameter(name).flatten()[3] = bad
    with pytest.raises(ValueError, match=f"{name} has numbers that are infinite or NaN: load the model again"):
        quantized(model, only="layers.0.*")


@pytest.mark.parametrize("options", [{}, {"only": "layers.1.mlp.up_proj"}, {"head_bits": 4}])
def test_quantizing_twice_is_refused(options):
    once = quantized(model_of(), **options)
    with pytest.raises(ValueError, match="quantized already: give the model that it was made from"):
        quantized(once)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="model must be an LM.*not str"):
        quantize_model("tiny-gqa")
    with pytest.raises(ValueError, match="on the meta device"):
        quantize_model(kv.Transformer(small_config(), "meta", torch.float32))
    model = model_of()
    model.layers[0].mlp.up_proj = nn.Sequential(model.layers[0].mlp.up_proj)
    with pytest.raises(ValueError, match="layers.0.mlp.up_proj is a Sequential, and only plain linear layers"):
        quantized(model)


def test_an_error_of_one_weight_names_it():
    model = model_of()
    model.layers[1].mlp.gate_proj.weight[0, 0] = 1e8
    with pytest.raises(ValueError, match="layers.1.mlp.gate_proj: A scale .*scale_dtype"):
        quantized(model)
    quantized(model, scale_dtype=torch.float32)


def test_a_text_on_which_the_model_overflows_is_refused():
    model = model_of()
    model.layers[0].mlp.down_proj.weight.mul_(3e38)
    with pytest.raises(ValueError, match="overflows on this text"):
        quantized(model, "rtn", 4, calibration=TEXT, scale_dtype=torch.float32)


def test_a_grid_for_the_head_of_an_nf4_model():
    result = quantized(model_of(), "nf4", head_bits=8)
    assert result.lm_head.quantized().grid == Grid(8, None, "symmetric")
    assert quantized(model_of(), "nf4", head_bits=4).lm_head.quantized().grid == replace(Grid(4, 32), kind="nf4")


def test_a_head_of_8_bits_needs_no_groups():
    """So those of the layers alone must divide the rows of the layers alone."""
    model = model_of(d_ff=96)  # embedding and head have rows of 64
    result = quantized(model, group_size=48, only="*.down_proj", head_bits=8, scale_dtype=torch.float32)
    assert result.lm_head.quantized().grid == Grid(8, None, "symmetric", scale_dtype=torch.float32)
    with pytest.raises(ValueError, match="embed_tokens has rows of 64 numbers, which group_size=48 does not divide"):
        quantized(model, group_size=48, only="*.down_proj", head_bits=4)


@pytest.mark.parametrize("bits", [4, 8])
def test_kernels_fit_a_bfloat16_model_without_further_options(bits):
    model = model_of(vocab_size=128, n_kv_heads=8)
    for source, dtype in ((model, "bfloat16"), (model_of(vocab_size=128, n_kv_heads=8, dtype=torch.bfloat16), None)):
        result = quantized(source, bits=bits, dtype=dtype, head_bits=8)
        grids = {layer.quantized().grid for layer in linears(result).values()}
        assert grids == {Grid(bits, 32, scale_dtype=torch.bfloat16)}
        assert result.lm_head.quantized().grid == Grid(8, None, "symmetric", scale_dtype=torch.bfloat16)
        assert result.lm_head.path == QuantLinear(result.lm_head.quantized(), dtype="bfloat16").path
        assert "scale_dtype" not in f"{result.lm_head.reason} {linears(result)['layers.0.mlp.up_proj'].reason}"


@pytest.mark.parametrize(
    ("dtype", "given", "wanted"),
    [
        ("bfloat16", {}, torch.bfloat16),
        ("bfloat16", {"scale_dtype": torch.float16}, torch.float16),
        ("float16", {}, torch.float16),
        ("float32", {}, torch.float16),
        ("float32", {"scale_dtype": torch.bfloat16}, torch.bfloat16),
    ],
)
def test_the_type_of_scales_follows_that_of_the_model_unless_it_is_given(dtype, given, wanted):
    for method in ("rtn", "gptq", "awq"):
        result = quantized(model_of(dtype=torch.bfloat16), method, dtype=dtype, **given)
        assert {layer.quantized().scale.dtype for layer in linears(result).values()} == {wanted}
