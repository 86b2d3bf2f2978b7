"""`kv.compiled`: which weights a fast model has, what is asked of it and refused, and that it is used as any other.

What is compiled is tested in test_fast_compiled.py; here nothing is, but for the last tests.
"""

import copy

import pytest
import torch
from gguf_files import random_state, tiny_config, tokenizer_fields, write_model
from reference import largest_difference, random_tokens, small_config, small_model

import kvcourse as kv
from kvcourse.fast import compiled as compiled_file
from kvcourse.fast import make
from kvcourse.fast.compiled import CompiledTransformer
from kvcourse.fast.function import CompiledFunction, cannot_compile
from kvcourse.lm import COMPILED
from kvcourse.quant import QuantLinear, quantize_model, rtn, smooth
from kvcourse.quant.int8_product import Int8Product
from kvcourse.quant.kernels import Int4Kernel, unable

BF16, PATH = torch.bfloat16, Int8Product.path
TEXT = random_tokens(1, 600)[0]
TOKENS = random_tokens(2, 90, seed=2)
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
WIDE = {"d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_head": 32}  # sizes that the int4 kernel reads
VOCAB = len(tokenizer_fields()["tokenizer.ggml.tokens"])


@pytest.fixture
def plainly(monkeypatch):
    """As on a machine where nothing is compiled."""
    monkeypatch.setattr(compiled_file, "cannot_compile", lambda device: "Not here.")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A small model and its tokenizer in a file."""
    config = tiny_config(vocab_size=VOCAB)
    path = tmp_path_factory.mktemp("lm") / "small.gguf"
    return write_model(path, config, random_state(config), **tokenizer_fields())


def off(one, other, tokens=TOKENS) -> float:
    """Root mean square of the difference, as a share of that of the second."""
    a, b = one(tokens).double(), other(tokens).double()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


# --- the weights -----------------------------------------------------------------------------------------------------


def test_as_they_are(plainly):
    model = small_model(small_config(**BIASES))
    fast = kv.compiled(model)
    assert isinstance(fast, CompiledTransformer) and fast.config is model.config
    assert (fast.dtype, fast.device) == (model.dtype, model.device)
    for name in ("embed_tokens", "lm_head"):  # modules of its own, over the same memory
        mine, theirs = fast.get_submodule(name), model.get_submodule(name)
        assert mine is not theirs and mine.weight.data_ptr() == theirs.weight.data_ptr()
    assert largest_difference(fast(TOKENS), model(TOKENS)) < 1e-4


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16"])
def test_converted(weights, plainly):
    model = small_model(small_config(**BIASES))
    dtype = getattr(torch, weights)
    fast, right = kv.compiled(model, weights), copy.deepcopy(model).to(dtype)
    assert fast.dtype == dtype == fast(TOKENS).dtype
    assert largest_difference(fast(TOKENS), right(TOKENS)) <= 2**-5 * float(right(TOKENS).abs().max())
    assert off(fast, model) < {"float32": 1e-6, "bfloat16": 0.05, "float16": 0.01}[weights]


def in_eight_bits(model) -> kv.Transformer:
    """Made step by step: 8 bits for every layer, and for the head, which then is no longer the embedding."""
    result = quantize_model(model, "rtn", 8, symmetric=True, path=PATH, progress=False)
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    result.lm_head = QuantLinear(rtn(head.weight, 8, symmetric=True), None, model.dtype, PATH)
    return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_int8_without_calibration(tied, dtype, plainly):
    model = small_model(small_config(**BIASES, tie_embeddings=tied)).to(dtype)
    fast, right = kv.compiled(model, "int8"), in_eight_bits(model)
    assert fast.dtype == dtype
    assert largest_difference(fast(TOKENS), right(TOKENS)) <= (1e-4 if dtype == torch.float32 else 0.1)
    assert fast.embed_tokens.weight.data_ptr() == model.embed_tokens.weight.data_ptr()  # looked up as it was
    assert 1e-4 < off(fast, model) < 0.05


@pytest.mark.parametrize("tied", [False, True])
def test_int8_with_calibration_is_smoothed_in_the_head_too(tied, plainly):
    """A model with a channel that is 100 times as large, in what the layers and the head read."""
    model = small_model(small_config(**BIASES, tie_embeddings=tied))
    for layer in model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer.get_submodule(name).weight[3] *= 100
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            layer.get_submodule(name).weight[:, 3] /= 100
    model.norm.weight[3] *= 100
    (model.embed_tokens if tied else model.lm_head).weight[:, 3] /= 100
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    rough, fine, given = (kv.compiled(model, "int8", text) for text in (None, TEXT, TEXT.tolist()))
    layers_alone = in_eight_bits(smooth(model, TEXT))
    assert off(fine, model) < 0.5 * off(layers_alone, model) < 0.5 * off(rough, model)
    assert torch.equal(given(TOKENS), fine(TOKENS))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_int4(plainly):
    """Groups of 32 with a zero point, head in 8 bits, in bfloat16."""
    model = small_model(small_config(**WIDE, **BIASES))
    fast = kv.compiled(model, "int4")
    right = quantize_model(model, "rtn", 4, 32, dtype=BF16, head_bits=8, progress=False)
    assert fast.dtype == BF16
    assert off(fast, right) < 0.02
    assert 0.05 < off(fast, model) < 0.5
    if unable(Int4Kernel, "cpu") is None:
        linears = [module for module in fast.held if isinstance(module, QuantLinear)]
        assert {linear.path for linear in linears} == {"int4 kernel"} and len(linears) == 8


@pytest.mark.parametrize("kind", ["gqa", "mqa", "odd"])
def test_int4_of_sizes_that_the_kernel_does_not_read(kind, plainly):
    """64 rows for q, 16 or 8 for k and v: no multiple of 64 together. Slow, and right."""
    changes = {"gqa": {}, "mqa": {"n_kv_heads": 1}, "odd": {"n_heads": 6, "n_kv_heads": 3, "d_head": 16, "d_model": 96}}
    model = small_model(small_config(**changes[kind]))
    right = quantize_model(model, "rtn", 4, 32, dtype=BF16, head_bits=8, progress=False)
    assert off(kv.compiled(model, "int4"), right) < 0.02
    assert off(kv.compiled(right), right) < 0.02


def test_int4_of_rows_that_do_not_divide_is_refused(plainly):
    with pytest.raises(ValueError, match='weights="int4" keeps 32 weights to a scale, and this model has rows of 48'):
        kv.compiled(small_model(small_config(d_model=48, d_head=8)), "int4")


@pytest.mark.parametrize(
    ("method", "bits", "options"),
    [
        ("rtn", 4, {"group_size": 32}),
        ("rtn", 3, {"group_size": "tensor"}),
        ("nf4", 4, {"group_size": 64}),
        ("rtn", 8, {"symmetric": True, "head_bits": 8}),
        ("rtn", 8, {"symmetric": True, "dtype": "bfloat16", "head_bits": 8}),
        ("rtn", 8, {"symmetric": True, "path": PATH, "head_bits": 8}),
        ("gptq", 4, {"group_size": 32, "calibration": TEXT, "act_order": True}),
        ("awq", 4, {"group_size": 32, "calibration": TEXT}),
        ("rtn", 4, {"group_size": 32, "only": ["*.q_proj", "layers.1.mlp.*"]}),
        ("rtn", 4, {"group_size": 32, "kind": "minimum"}),
    ],
)
@pytest.mark.parametrize("kind", [BIASES, {"tie_embeddings": True}, WIDE])
def test_a_quantized_model_keeps_its_weights(method, bits, options, kind, plainly):
    model = quantize_model(small_model(small_config(**kind)), method, bits, progress=False, **options)
    fast = kv.compiled(model)
    assert fast.dtype == model.dtype
    assert largest_difference(fast(TOKENS), model(TOKENS)) < (0.15 if model.dtype == BF16 else 1e-4)


# --- the model given, and models in an LM ----------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, *COMPILED])
def test_the_model_given_stays_as_it_is(weights, plainly):
    """In training too: it can be trained on."""
    model = small_model(small_config(**BIASES, tie_embeddings=True)).requires_grad_(True).train()
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    fast = kv.compiled(model, weights)
    fast(TOKENS)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1]) and parameter.requires_grad
    assert all(module.training for module in model.modules())
    model(TOKENS).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not fast(TOKENS).requires_grad


def test_made_in_inference_mode_it_works_outside_and_the_other_way_round(plainly):
    right = small_model()(TOKENS)
    with torch.inference_mode():
        made_inside = small_model()
        fast = kv.compiled(small_model())
        assert largest_difference(kv.compiled(made_inside)(TOKENS), right) < 1e-4
    for one in (fast, kv.compiled(made_inside)):
        one(TOKENS).add_(1)
        assert largest_difference(one(TOKENS), right) < 1e-4


def test_an_lm_for_an_lm(plainly):
    lm = kv.LM(small_model(), None, "small")
    fast = kv.compiled(lm)
    assert isinstance(fast, kv.LM) and (fast.name, fast.tokenizer, fast.config) == ("small", None, lm.config)
    assert isinstance(fast.model, CompiledTransformer) and not isinstance(lm.model, CompiledTransformer)
    assert off(kv.compiled(lm, "int8").model, lm.model) < 0.05  # no tokenizer: not smoothed


def test_an_lm_is_calibrated_with_the_course_s_text(monkeypatch, file, plainly):
    lm, seen, smoothed = kv.load_model(file, "float32", "cpu"), [], make.smoothed
    monkeypatch.setattr(
        make, "smoothed", lambda source, rows, strength: seen.append(rows) or smoothed(source, rows, strength)
    )
    fast = kv.compiled(lm, "int8")
    size = min(512, lm.config.max_seq_len)
    ids = lm.encode(kv.evaluation_text("calibration"))[: 2048 // size * size]
    assert len(seen) == 1 and seen[0].flatten().tolist() == ids and seen[0].shape[1] == size
    assert torch.equal(kv.compiled(lm, "int8", ids).model(TOKENS), fast.model(TOKENS))
    kv.compiled(lm.model, "int8")
    assert len(seen) == 2


def test_an_lm_speaks(file, plainly):
    lm = kv.load_model(file, "float32", "cpu")
    fast = kv.compiled(lm)
    messages = [{"role": "user", "content": "the quick"}]
    for prompt in ("the fox", messages):
        assert "".join(fast.stream(prompt, 30)) == "".join(lm.stream(prompt, 30)) != ""
    assert fast.chat(messages) == lm.chat(messages)
    ids = lm.encode("the quick brown fox jumps over the lazy dog")
    assert kv.perplexity(fast, ids) == pytest.approx(kv.perplexity(lm, ids), rel=1e-5)


def test_quality_is_measured_as_of_any_other(plainly):
    lm = kv.load_model("tiny-gqa", "float32", "cpu")
    fast = kv.compiled(lm)
    text = lm.encode(kv.evaluation_text("calibration"))[:600]
    assert kv.perplexity(fast, text, 128) == pytest.approx(kv.perplexity(lm, text, 128), rel=1e-5)
    assert kv.recall(fast, 40, 12) == kv.recall(lm, 40, 12)
    assert kv.perplexity(kv.compiled(lm, "int8"), text, 128) == pytest.approx(kv.perplexity(lm, text, 128), rel=0.01)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["int2", "INT8", "", 8, True, torch.float32, ["int8"]])
def test_other_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weights=.* must be one of float32, bfloat16, float16, int8, int4, or None"):
        kv.compiled(small_model(), weights)


@pytest.mark.parametrize("model", ["smollm2-135m", None, torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ValueError, match="model must be an LM, as load_model gives it, or a Transformer"):
        kv.compiled(model)


@pytest.mark.parametrize("weights", [None, "int8", "float32"])
def test_a_model_is_compiled_once(weights, plainly):
    fast = kv.compiled(small_model())
    for model in (fast, kv.LM(fast, None, "small")):
        with pytest.raises(ValueError, match="compiled already: give the model that it was made from"):
            kv.compiled(model, weights)


@pytest.mark.parametrize("weights", COMPILED)
def test_a_quantized_model_is_not_rounded_or_converted(weights, plainly):
    model = quantize_model(small_model(), "rtn", 4, 32, progress=False)
    with pytest.raises(ValueError, match="quantized already: give the model that it was made from"):
        kv.compiled(model, weights)
    with pytest.raises(ValueError, match="quantized already"):
        kv.compiled(model, "int8", TEXT)


@pytest.mark.parametrize(
    ("weights", "calibration", "message"),
    [
        (None, [1, 2], 'calibration= is for weights="int8", and not for weights=None'),
        ("int4", TEXT, "not for weights='int4': leave it out"),
        ("bfloat16", [], "not for weights='bfloat16'"),
        ("int8", [], "calibration has 0 tokens, but one row takes context=256"),
        ("int8", [1, 2], "calibration has 2 tokens"),
        ("int8", [97] * 600, "outside the vocabulary"),
        ("int8", "a text", "calibration must be the ids of one text"),
    ],
)
def test_a_calibration_that_will_not_do(weights, calibration, message):
    with pytest.raises(ValueError, match=message):
        kv.compiled(small_model(), weights, calibration)


@pytest.mark.parametrize("weights", COMPILED)
def test_weights_that_are_no_numbers_are_refused(weights):
    model = small_model()
    model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight has numbers that are infinite or NaN"):
        kv.compiled(model, weights)


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["int8", "int4"])
def weights(request, monkeypatch):
    """Of these two, "int8" goes all the way; for "int4" the graphs run as they are captured."""
    if cannot_compile("cpu"):
        pytest.skip(cannot_compile("cpu"))

    def as_captured(self, graph, inputs):
        self.compilations += 1
        return graph.forward

    if request.param == "int4":
        monkeypatch.setattr(CompiledFunction, "backend", as_captured)
    return request.param


def test_few_bits_compiled(weights):
    """One token at a time, and many at a time: the same weights. With "int8" many tokens are rounded too; that is all
    they may differ by."""
    model = small_model(small_config(**WIDE, n_layers=1, tie_embeddings=True))
    fast = kv.compiled(model, weights, TEXT if weights == "int8" else None)
    bits = {"int8": 8, "int4": 4}[weights]
    options = {"head_bits": 8, "progress": False, "dtype": BF16 if bits == 4 else None}
    right = quantize_model(model, "rtn", bits, 32 if bits == 4 else None, symmetric=bits == 8, **options)
    cache, ids = kv.DenseCache(fast.config, 1, 100, fast.dtype, "cpu"), TOKENS[:1]
    single = torch.cat([fast(piece, cache=cache) for piece in ids.split([40] + [1] * 50, 1)], 1)
    assert off(lambda _: single, right, ids) < 0.05 and off(fast, right, ids) < 0.05
    assert off(lambda _: single.roll(1, 1), right, ids) > 0.5
    assert [part.compilations for part in fast.functions][:4] == [1, 1, 1, 1] and fast.compile_seconds > 0
