"""A quantized model written and read back: bit for bit, and refused when a file is not as it was written."""

import json

import pytest
import torch
from reference import random_tokens, small_config, small_model
from safetensors.torch import load_file, save_file

import kvcourse as kv
from kvcourse.quant import QuantizedTensor, gptq, quantize_model
from kvcourse.quant.files import SETTINGS, TENSORS, checksum, load, save
from kvcourse.quant.linear import QuantEmbedding, QuantLinear
from kvcourse.rope import Llama3Scaling, PairScaling

TEXT = random_tokens(1, 1000)[0]
TOKENS = random_tokens(2, 90, seed=2)
CONFIGS = {
    "gqa": {},
    "tied": {"tie_embeddings": True},
    "all": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True, "window": (16, None)},
    "llama3": {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64)},
    "pairs": {"rope_scaling": PairScaling((1.0, 2.0, 3.0, 4.0))},
}
WAYS = {
    "rtn": dict(method="rtn", bits=4, group_size=32),
    "minimum": dict(method="rtn", bits=8, group_size=16, kind="minimum", scale_dtype=torch.bfloat16),
    "nf4": dict(method="nf4", bits=4, group_size=64),
    "gptq": dict(method="gptq", bits=3, group_size=32, symmetric=True, act_order=True, calibration=TEXT, context=96),
    "awq": dict(method="awq", bits=2, group_size=8, calibration=TEXT, context=96),
    "head": dict(method="rtn", bits=4, head_bits=8),
    "some": dict(method="rtn", bits=4, only="layers.1.*", head_bits=4),
}


def model_of(config="gqa") -> kv.Transformer:
    return small_model(small_config(**CONFIGS[config]))


def quantized(config="gqa", way="rtn", **options) -> kv.Transformer:
    return quantize_model(model_of(config), **WAYS[way], progress=False, **options)


def weights_of(model) -> dict[str, QuantizedTensor]:
    modules = model.named_modules(remove_duplicate=False)
    return {name: module.quantized() for name, module in modules if isinstance(module, QuantLinear | QuantEmbedding)}


def assert_same(a: kv.Transformer, b: kv.Transformer):
    assert a.config == b.config and a.dtype == b.dtype and a.quantization == b.quantization
    assert torch.equal(a(TOKENS), b(TOKENS))
    first, second = weights_of(a), weights_of(b)
    assert first.keys() == second.keys()
    for name, weight in first.items():
        other = second[name]
        assert (weight.grid, weight.shape, weight.note) == (other.grid, other.shape, other.note)
        assert weight.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(tensor, other.tensors[part]) for part, tensor in weight.tensors.items())
        assert weight.nbytes == other.nbytes
    rest, others = dict(a.named_parameters()), dict(b.named_parameters())
    assert rest.keys() == others.keys() and all(torch.equal(rest[name], others[name]) for name in rest)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_read_back_is_equal_bit_for_bit(tmp_path, config, way):
    model = quantized(config, way)
    assert save(model, tmp_path / "out") == tmp_path / "out"
    found = load(tmp_path / "out", device="cpu")
    assert_same(model, found)
    assert found.config.window == model.config.window
    if config == "tied" and way in ("head", "some"):
        assert found.embed_tokens.table is found.lm_head


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_in_other_dtypes(tmp_path, dtype):
    model = quantized("tied", "head", dtype=dtype)
    save(model, tmp_path)
    found = load(tmp_path, device="cpu")
    assert_same(model, found)
    assert found.dtype == getattr(torch, dtype)
    assert [m.path for m in found.modules() if isinstance(m, QuantLinear)] == [
        m.path for m in model.modules() if isinstance(m, QuantLinear)
    ]


@pytest.mark.parametrize("way", [dict(bits=4, group_size=32), dict(bits=8)])
def test_weights_that_a_kernel_has_repacked(tmp_path, way):
    model = small_model(small_config(n_kv_heads=8, tie_embeddings=True, vocab_size=128))
    options = dict(symmetric=True, scale_dtype=torch.bfloat16, dtype="bfloat16", head_bits=way["bits"], progress=False)
    fast = quantize_model(model, "rtn", **way, **options)
    slow = quantize_model(model, "rtn", **way, **options, path="dequantize")
    for name, result in (("fast", fast), ("slow", slow)):
        save(result, tmp_path / name)
        assert_same(result, load(tmp_path / name, device="cpu"))
    assert (tmp_path / "fast" / TENSORS).read_bytes() == (tmp_path / "slow" / TENSORS).read_bytes()
    assert {layer.path for layer in slow.modules() if isinstance(layer, QuantLinear)} == {"dequantize"}
    found = load(tmp_path / "slow", device="cpu")
    assert {layer.path for layer in found.modules() if isinstance(layer, QuantLinear)} == {"dequantize"}


def test_another_model_is_not_the_same(tmp_path):
    """Or the tests above could not fail."""
    save(quantized("gqa", "rtn"), tmp_path)
    with pytest.raises(AssertionError):
        assert_same(quantized("gqa", "minimum"), load(tmp_path, device="cpu"))


def test_an_lm_is_saved_without_its_tokenizer(tmp_path):
    lm = quantize_model(kv.load_model("tiny-gqa", device="cpu"), "rtn", 4, 64, progress=False)
    save(lm, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {SETTINGS, TENSORS}
    found = load(tmp_path, device="cpu")
    ids = torch.tensor([lm.encode("Tom has a red ball.")])
    assert torch.equal(found(ids), lm.model(ids))
    assert str(found.quantization) == str(lm.model.quantization)


def test_a_weight_put_in_by_hand_is_saved_too(tmp_path):
    """GPTQ of one weight, as in the course: no report, column order kept."""
    model = model_of()
    linear = model.layers[0].mlp.down_proj
    weight = gptq(linear.weight, torch.diag(torch.rand(128) + 1), 4, 32, act_order=True)
    assert weight.order is not None
    model.layers[0].mlp.down_proj = QuantLinear(weight)
    save(model, tmp_path)
    found = load(tmp_path, device="cpu")
    assert torch.equal(found(TOKENS), model(TOKENS)) and found.quantization is None


def test_the_file_is_about_as_large_as_what_is_in_memory(tmp_path):
    model = quantized("tied", "head")
    save(model, tmp_path)
    held = model.quantization.nbytes + sum(parameter.nbytes for parameter in model.parameters())
    assert held <= (tmp_path / TENSORS).stat().st_size < held + 10_000  # names and shapes


def test_a_model_that_is_not_quantized_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Nothing in this model is quantized"):
        save(model_of(), tmp_path / "out")
    with pytest.raises(ValueError, match="model must be an LM"):
        save("tiny-gqa", tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        save(quantized(), tmp_path / "file")
    assert not (tmp_path / "out").exists()


def test_saving_twice_replaces(tmp_path):
    save(quantized("gqa", "rtn"), tmp_path)
    model = quantized("tied", "head")
    save(model, tmp_path)
    assert_same(model, load(tmp_path, device="cpu"))


# --- damaged ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return save(quantized("gqa", "head"), tmp_path / "out")


def edit(folder, change, sign=True) -> None:
    """Change the settings; with `sign` their checksum too, as one would who means to deceive."""
    settings = json.loads((folder / SETTINGS).read_text())
    change(settings)
    if sign:
        settings["sha256"] = checksum(settings, (folder / TENSORS).read_bytes())
    (folder / SETTINGS).write_text(json.dumps(settings))


def test_a_missing_folder_or_file(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file .*nowhere.*save"):
        load(tmp_path / "nowhere")
    for name in (SETTINGS, TENSORS):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"There is no file .*{name}"):
            load(folder)
        (folder / name).write_bytes(content)
    load(folder, device="cpu")


@pytest.mark.parametrize("cut", [0, 1, 100, -1, -100])
def test_a_tensor_file_that_was_cut_short(folder, cut):
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content[:cut])
    with pytest.raises(ValueError, match=f"{TENSORS} or the {SETTINGS} beside it is not as it was written"):
        load(folder)


def test_every_byte_counts(folder):
    content = (folder / TENSORS).read_bytes()
    for at in (0, 8, 500, len(content) // 2, len(content) - 1):
        (folder / TENSORS).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ValueError, match="is not as it was written"):
            load(folder)


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "is not JSON"), (b"[1]", "must hold a JSON object"), (b"\xff\xfe{", "UTF-16")]
)
def test_settings_that_are_no_settings(folder, content, said):
    (folder / SETTINGS).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        load(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(format=2), "has format 2; this version reads 1"),
        (lambda s: s.pop("format"), "has format None"),
        (lambda s: s.pop("config"), "KeyError: 'config'"),
        (lambda s: s.pop("weights"), "KeyError: 'weights'"),
        (lambda s: s.pop("report"), "KeyError: 'report'"),
        (lambda s: s.update(weights=[]), "does not describe the model beside it"),
        (lambda s: s.update(config=3), "does not describe"),
        (lambda s: s.update(dtype="int8"), "dtype='int8'"),
        (lambda s: s["config"].update(n_heads=7), "n_heads=7"),
        (lambda s: s["config"].update(n_layers=3), "lacks 9 tensor"),
        (lambda s: s["config"].update(n_layers=1), "does not ask for|is not an nn.Module|has no attribute"),
        (lambda s: s["config"].update(d_ff=96), "mlp.gate_proj has shape .128, 64., but its config asks for .96, 64"),
        (lambda s: s["config"].update(colour=1), "unexpected keyword argument 'colour'"),
        (lambda s: s["config"].update(rope_scaling={"kind": "Spiral"}), "KeyError: 'Spiral'"),
        (lambda s: s["weights"].pop("lm_head"), "lacks 1 tensor.*lm_head.weight"),
        (lambda s: s["weights"]["lm_head"]["grid"].update(bits=4), "codes of a matrix"),
        (lambda s: s["weights"]["lm_head"]["grid"].update(group_size=32), "of a matrix"),
        (lambda s: s["weights"]["lm_head"]["grid"].update(kind="minimum"), "of a matrix"),
        (lambda s: s["weights"]["lm_head"]["grid"].update(scale_dtype="float32"), "scale of a matrix"),
        (lambda s: s["weights"]["lm_head"].update(tensors=["codes"]), "1 tensor.*lm_head.scale"),
        (lambda s: s["weights"]["lm_head"].update(tensors=["codes", "scale", "zero", "order"]), "lm_head.order"),
        (lambda s: s["weights"]["lm_head"].update(path="fast"), "path='fast'"),
        (lambda s: s["report"]["layers"][0].pop("name"), "name"),
    ],
)
def test_settings_that_do_not_fit_the_tensors(folder, change, said):
    edit(folder, change)
    with pytest.raises(ValueError, match=said) as error:
        load(folder, device="cpu")
    assert SETTINGS in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["config"].update(rope_theta=5e5),
        lambda s: s["config"].update(window=4),
        lambda s: s["config"].update(norm_eps=1e-3),
        lambda s: s["report"]["layers"][0].update(error=0.0),
        lambda s: s["weights"]["lm_head"].update(path="dequantize"),
        lambda s: s.update(sha256=None),
        lambda s: s.pop("sha256"),
    ],
)
def test_settings_that_were_changed_are_refused(folder, change):
    """Even where they would fit the tensors, and the model would compute something else."""
    edit(folder, lambda s: None, sign=False)  # the same content, set out otherwise
    load(folder, device="cpu")
    edit(folder, change, sign=False)
    with pytest.raises(ValueError, match=f"{TENSORS} or the {SETTINGS} beside it is not as it was written.*copy the"):
        load(folder)


@pytest.mark.parametrize("path", ["int4 kernel", "int8 kernel"])
def test_a_kernel_that_does_not_fit_here_is_not_used(folder, tmp_path, path):
    """As on a machine that has none: the model is loaded all the same, and says why."""
    before = load(folder, device="cpu")
    edit(folder, lambda s: [weight.update(path=path) for weight in s["weights"].values()])
    found = load(folder, device="cpu")
    assert torch.equal(found(TOKENS), before(TOKENS))
    for layer in found.modules():
        if isinstance(layer, QuantLinear):
            assert layer.path == "dequantize" and f"The {path} " in layer.reason
    save(found, tmp_path / "again")
    settings = json.loads((tmp_path / "again" / SETTINGS).read_text())
    assert {weight["path"] for weight in settings["weights"].values()} == {path}  # the wish stays


@pytest.mark.parametrize("given", [None, 5])
def test_what_is_no_path_is_refused(given):
    with pytest.raises(ValueError, match=f"folder must be the path of a folder, got {given}"):
        load(given)


def test_tensors_of_another_type_are_refused(folder):
    tensors = load_file(folder / TENSORS)
    for name, dtype in (("lm_head.codes", torch.int8), ("norm.weight", torch.float16)):
        save_file(tensors | {name: tensors[name].to(dtype)}, folder / TENSORS)
        edit(folder, lambda s: None)
        with pytest.raises(ValueError, match=name.rpartition(".")[2] if "codes" in name else name):
            load(folder, device="cpu")
