"""Smoothing moves scales from activations into weights: the formula by hand, logits as before, less lost in 8 bits."""

import copy

import pytest
import torch
from reference import KINDS, hugging_face, largest_difference, random_tokens, small_config, small_model

import kvcourse as kv
from kvcourse.quant import quantize_model, smooth
from kvcourse.quant.calibration import READERS
from kvcourse.quant.int8_product import Int8Product
from kvcourse.quant.smoothing import STRENGTH, balance

CALIBRATION = random_tokens(1, 500)[0]
TOKENS = random_tokens(2, 90, seed=2)


def model_of(kind="gqa", dtype=torch.float32):
    return small_model(small_config(**KINDS[kind]), dtype=dtype)


def smoothed(model, strength=STRENGTH, **options):
    return smooth(model, CALIBRATION, strength, **{"context": 100} | options)


def peaks_of(model) -> dict[str, torch.Tensor]:
    """{linear layer: the largest magnitude of each of its inputs} over the calibration text, as hooks see it."""
    peaks, hooks = {}, []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":

            def keep(module, arguments, name=name):
                peak = arguments[0].abs().amax((0, 1))
                peaks[name] = peak if name not in peaks else torch.maximum(peaks[name], peak)

            hooks.append(module.register_forward_pre_hook(keep))
    for row in CALIBRATION.split(100):
        model(row[None])
    for hook in hooks:
        hook.remove()
    return peaks


# --- the formula -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peak", "weight", "strength", "scale"),
    [(16, 4, 0.5, 2), (4, 1, 0.5, 2), (1, 4, 0.5, 0.5), (16, 4, 1, 16), (16, 4, 0.25, 2 / 4**0.75)],
)
def test_a_channel_s_scale(peak, weight, strength, scale):
    """max|x|^strength / max|w|^(1 - strength), the equation below figure 5 in arXiv 2211.10438."""
    given = balance(torch.tensor([float(peak)]), torch.tensor([float(weight)]), strength)
    assert given.tolist() == pytest.approx([scale])


def test_a_layer_worked_out_by_hand():
    """One layer of two channels and one head. The norm gives the two tokens x = (1, -1) and (-1, 1) x (8, 0.5), so the
    peaks are 8 and 0.5; the largest weights that read them are 2 and 0.5 (q, k and v) and 1 and 4 (gate and up)."""
    config = kv.ModelConfig(vocab_size=2, n_layers=1, n_heads=1, d_model=2, d_ff=2, max_seq_len=8, norm_eps=1e-12)
    model = kv.Transformer(config, "cpu", torch.float32)
    layer = model.layers[0]
    model.embed_tokens.weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
    layer.input_layernorm.weight.copy_(torch.tensor([8.0, 0.5]))
    layer.post_attention_layernorm.weight.copy_(torch.tensor([8.0, 0.5]))
    attention, mlp = layer.self_attn, layer.mlp
    attention.q_proj.weight.copy_(torch.tensor([[2.0, 0.25], [1.0, 0.25]]))
    attention.k_proj.weight.copy_(torch.tensor([[-1.0, -0.5], [0.0, 0.25]]))
    attention.v_proj.weight.zero_()
    attention.o_proj.weight.fill_(1.0)
    mlp.gate_proj.weight.copy_(torch.tensor([[1.0, -4.0], [0.5, 1.0]]))
    mlp.up_proj.weight.copy_(torch.tensor([[-0.5, 2.0], [0.25, 1.0]]))
    result = smooth(model, [0, 1], 0.5, context=2).layers[0]
    one = torch.tensor([8 / 2, 0.5 / 0.5]).sqrt()  # 2, 1
    assert torch.allclose(result.input_layernorm.weight, torch.tensor([8.0, 0.5]) / one)
    for name in ("q_proj", "k_proj"):
        new = getattr(result.self_attn, name).weight
        assert torch.allclose(new, getattr(attention, name).weight * torch.tensor([2.0, 1.0]))
    two = torch.tensor([8 / 1, 0.5 / 4]).sqrt()
    assert torch.allclose(result.post_attention_layernorm.weight, torch.tensor([8.0, 0.5]) / two)
    assert torch.allclose(result.mlp.gate_proj.weight, mlp.gate_proj.weight * two)
    assert result.self_attn.v_proj.weight.abs().max() == 0 and result.self_attn.o_proj.weight.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strength", [0.3, 1])
def test_the_scales_of_every_layer(kind, strength):
    """From what hooks see of the inputs. A key-value head has one scale for all the query heads that it serves, from
    the means of their peaks and of their weights."""
    model = model_of(kind)
    result, peaks, config = smoothed(model, strength), peaks_of(model), model.config
    groups = (config.n_kv_heads, config.group_size, config.d_head)
    for index, (old, new) in enumerate(zip(model.layers, result.layers, strict=True)):
        scales = {}
        for writer, readers in READERS.items():
            peak = peaks[f"layers.{index}.{readers[0]}"]
            weight = torch.stack([old.get_submodule(name).weight.abs().amax(0) for name in readers]).amax(0)
            if writer == "self_attn.v_proj":
                peak, weight = (x.view(groups).mean(1, keepdim=True).expand(groups).flatten() for x in (peak, weight))
            scales[writer] = peak**strength / weight ** (1 - strength)
        for writer, readers in READERS.items():
            for name in readers:
                right = old.get_submodule(name).weight * scales[writer]
                if name == "self_attn.v_proj":
                    right = right / scales[name].view(groups)[:, 0].flatten()[:, None]
                if name == "mlp.up_proj":
                    right = right / scales[name][:, None]
                found = new.get_submodule(name).weight
                assert (found - right).abs().max() < 1e-4 * right.abs().max(), name
                assert (found - old.get_submodule(name).weight).abs().max() > 0.1 * right.abs().max()
        for writer in ("input_layernorm", "post_attention_layernorm"):
            right = old.get_submodule(writer).weight / scales[writer]
            assert (new.get_submodule(writer).weight - right).abs().max() < 1e-4 * right.abs().max()


# --- the same model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strength", [0.1, STRENGTH, 1])
def test_logits_stay_and_so_does_the_model_given(kind, strength):
    model = model_of(kind)
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    result = smoothed(model, strength)
    assert largest_difference(result(TOKENS), model(TOKENS)) < 1e-4
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])
    changed = {name for name, parameter in result.named_parameters() if parameter is not before[name][0]}
    kept = {"embed_tokens.weight", "norm.weight", "lm_head.weight"} & set(before)
    kept |= {name for name in before if "q_norm" in name or "k_norm" in name}
    kept |= {name for name in before if name.endswith(("q_proj.bias", "k_proj.bias", "o_proj.bias"))}
    kept |= {name for name in before if name.endswith(("gate_proj.bias", "down_proj.bias"))}
    assert changed == set(before) - kept
    if kind != "biases":
        return
    assert largest_difference(smoothed(model, strength)(TOKENS), hugging_face(model)(TOKENS).logits) < 1e-4
    spoilt = smoothed(model, strength)
    spoilt.layers[0].self_attn.v_proj.bias *= 1.5  # as if it had not been divided
    assert largest_difference(spoilt(TOKENS), model(TOKENS)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_kept(dtype):
    model = model_of("biases", dtype)
    result = smoothed(model)
    assert {parameter.dtype for parameter in result.parameters()} == {dtype} and result.dtype == dtype
    right = copy.deepcopy(model).double()(TOKENS)
    off = [(one(TOKENS).double() - right).square().mean().sqrt() for one in (model, result)]
    assert off[1] < 2 * off[0] + 1e-5


def test_an_lm_for_an_lm():
    lm = kv.LM(model_of(), None, "small")
    result = smoothed(lm)
    assert isinstance(result, kv.LM) and result.name == "small" and result.model is not lm.model
    assert isinstance(smoothed(lm.model), kv.Transformer)


def test_a_channel_that_is_never_used_stays_finite():
    model = model_of()
    model.layers[0].input_layernorm.weight[3] = 0
    for name in ("gate_proj", "up_proj"):
        model.layers[1].mlp.get_submodule(name).weight[:, 5] = 0
    result = smoothed(model)
    assert all(parameter.isfinite().all() for parameter in result.parameters())
    assert largest_difference(result(TOKENS), model(TOKENS)) < 1e-4


# --- what it is for --------------------------------------------------------------------------------------------------


def with_an_outlier(size: float) -> kv.Transformer:
    """A model that computes the same whatever the size: channel 3 of what the norms write is multiplied by it, and the
    columns that read it are divided."""
    model = small_model()
    for layer in model.layers:
        for writer in ("input_layernorm", "post_attention_layernorm"):
            layer.get_submodule(writer).weight[3] *= size
            for reader in READERS[writer]:
                layer.get_submodule(reader).weight[:, 3] /= size
    return model


def lost(model, right) -> float:
    """Root mean square of what 8 bits for weights and activations cost, in logits."""
    rounded = quantize_model(model, "rtn", 8, symmetric=True, path=Int8Product.path, progress=False)
    return float((rounded(TOKENS) - right).square().mean().sqrt())


def test_outliers_cost_less_after_smoothing_and_without_them_it_changes_little():
    right = small_model()(TOKENS)
    plain, outlier = with_an_outlier(1), with_an_outlier(100)
    assert largest_difference(outlier(TOKENS), right) < 1e-4
    assert lost(outlier, right) > 5 * lost(plain, right)
    assert lost(smoothed(outlier), right) < 0.3 * lost(outlier, right)
    assert 0.5 < lost(smoothed(plain), right) / lost(plain, right) < 1.5


def test_strength_says_how_much_the_weights_take_over():
    """At 1 the activations of a channel reach 1 at most, so all outliers are in the weights; near 0 they stay."""
    model = small_model()
    model.layers[1].post_attention_layernorm.weight[3] *= 100
    spread = {}
    for strength in (0.1, 0.5, 1):
        peaks = peaks_of(smoothed(model, strength))["layers.1.mlp.gate_proj"]
        weights = smoothed(model, strength).layers[1].mlp.gate_proj.weight.abs().amax(0)
        spread[strength] = float(peaks[3] / peaks.median()), float(weights[3] / weights.median())
    assert spread[0.1][0] > spread[0.5][0] > spread[1][0] == pytest.approx(1, abs=0.01)
    assert spread[0.1][1] < spread[0.5][1] < spread[1][1]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0, -0.5, 1.5, 2, "x", None, True, float("nan"), float("inf")])
def test_a_strength_out_of_range(strength):
    with pytest.raises(ValueError, match="strength="):
        smooth(model_of(), CALIBRATION, strength)


@pytest.mark.parametrize(
    ("calibration", "context", "message"),
    [
        (CALIBRATION[:99], 100, "calibration has 99 tokens, but one row takes context=100"),
        (CALIBRATION[:255], None, "calibration has 255 tokens, but one row takes context=256"),
        ([], None, "calibration has 0 tokens"),
        (CALIBRATION, 257, "context=257 must be at most 256"),
        (CALIBRATION, 0, "context=0 must be a whole number"),
        ([97] * 300, None, "outside the vocabulary"),
        ("a text", None, "calibration must be the ids of one text"),
        (None, None, "calibration must be the ids of one text"),
    ],
)
def test_a_text_that_will_not_do(calibration, context, message):
    with pytest.raises(ValueError, match=message):
        smooth(model_of(), calibration, context=context)


def test_models_that_cannot_be_smoothed():
    quantized = quantize_model(model_of(), "rtn", 8, symmetric=True, progress=False)
    with pytest.raises(ValueError, match="quantized already: give the model that it was made from"):
        smoothed(quantized)
    for number in (torch.nan, torch.inf):
        broken = model_of()
        broken.layers[1].mlp.up_proj.weight[2, 3] = number
        with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight has numbers that are infinite or NaN"):
            smoothed(broken)
    with pytest.raises(ValueError, match="meta"):
        smoothed(kv.Transformer(small_config(), "meta", torch.float32))
    with pytest.raises(ValueError, match="model must be an LM"):
        smoothed("smollm2-135m")


@pytest.mark.parametrize(("n_heads", "n_kv_heads", "d_head"), [(6, 2, 8), (9, 3, 16), (7, 1, 8), (12, 4, 6)])
def test_heads_that_share_get_one_scale_to_the_last_digit(n_heads, n_kv_heads, d_head):
    """PyTorch's `pow` of equal numbers depends on where in a tensor they stand."""
    sizes = dict(n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, d_model=n_heads * d_head)
    model = small_model(small_config(**sizes))
    calibration = random_tokens(300).tolist()
    assert largest_difference(smooth(model, calibration)(random_tokens(1, 90)), model(random_tokens(1, 90))) < 1e-3
