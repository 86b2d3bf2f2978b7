"""A quantized model in Hugging Face's compressed-tensors layout: `transformers` reads it and computes the same."""

import importlib.util
import json

import pytest
import torch
import transformers
from gguf_files import tokenizer_fields
from reference import largest_difference, random_tokens, small_config, small_model
from safetensors.torch import load_file, save_file

import kvcourse as kv
from kvcourse.lm import LM, load_model
from kvcourse.quant.compressed import export_compressed, words
from kvcourse.quant.quantize import quantize_model
from kvcourse.rope import Llama3Scaling, YarnScaling
from kvcourse.tokenizer import Tokenizer
from kvcourse.weights.hf_write import hf_config
from kvcourse.weights.shipped import shipped_folder

transformers.logging.set_verbosity_error()
needed = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed-tensors is not installed: pip install compressed-tensors",
)
TOKENS = random_tokens(2, 96)
CALIBRATION = random_tokens(2048, seed=2)


def quantized(method="rtn", bits=4, group_size=32, *, symmetric=True, config=None, **options) -> LM:
    model = small_model(small_config(**(config or {})))
    calibration = CALIBRATION if method in ("gptq", "awq") else None
    options = dict(symmetric=symmetric, progress=False) | options
    return LM(quantize_model(model, method, bits, group_size, calibration, **options), None, "small")


def read_back(folder, dequantize: bool, dtype=torch.float32):
    """What `transformers` makes of the folder. Zero points need `dequantize`: without it, release 5.24 with
    compressed-tensors 0.20 looks for them in the shape that they have before packing."""
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    with torch.no_grad():
        return model, model(TOKENS).logits


CASES = {
    "gptq, 4 bits in groups": dict(method="gptq"),
    "gptq, 8 bits": dict(method="gptq", bits=8, group_size=None),
    "4 bits, a whole row": dict(group_size=None),
    "8 bits in groups": dict(bits=8, group_size=64),
    "act_order with static groups": dict(method="gptq", act_order=True, static_groups=True),
    "zero point": dict(symmetric=False),
    "zero point, 8 bits, a whole row": dict(symmetric=False, bits=8, group_size=None),
    "zero point, rows that fill no word": dict(symmetric=False, config=dict(d_ff=100), group_size=None),
    "folded awq": dict(method="awq", symmetric=False),
    "some layers": dict(only=["layers.0.*", "layers.1.self_attn.q_proj"]),
    "tied": dict(config=dict(tie_embeddings=True)),
    "biases": dict(config=dict(qkv_bias=True, o_bias=True)),
    "mlp biases": dict(config=dict(qkv_bias=True, o_bias=True, mlp_bias=True)),
    "mistral": dict(config=dict(window=16)),
    "qwen2": dict(config=dict(qkv_bias=True, window=(None, 16))),
    "qwen3": dict(config=dict(qk_norm=True)),
    "llama3": dict(config=dict(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64))),
    "yarn": dict(config=dict(rope_scaling=YarnScaling(4.0, 64))),
}


@needed
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_transformers_computes_the_same(case, tmp_path):
    lm = quantized(**CASES[case])
    export_compressed(lm, tmp_path)
    ours = lm.model(TOKENS)
    symmetric = CASES[case].get("symmetric", True)
    for dequantize in (True, False) if symmetric else (True,):
        peer, theirs = read_back(tmp_path, dequantize)
        assert largest_difference(ours, theirs) < 1e-4
        for name in ("layers.0.mlp.down_proj", "layers.0.self_attn.k_proj"):
            wanted = lm.model.get_submodule(name).quantized().dequantize()
            assert torch.equal(peer.get_submodule(f"model.{name}").weight, wanted)  # scales are exactly ours
    plain = small_model(small_config(**CASES[case].get("config", {})))
    assert largest_difference(ours, plain(TOKENS)) > 1e-3  # the rounding is there


@needed
@pytest.mark.parametrize("part", ["weight_packed", "weight_scale"])
def test_other_codes_or_scales_would_show(part, tmp_path):
    lm = quantized()
    export_compressed(lm, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{part}"
    tensors[name] = tensors[name].roll(1, 0)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert largest_difference(lm.model(TOKENS), read_back(tmp_path, False)[1]) > 1e-2


@needed
def test_zero_points_are_packed_down_the_columns():
    """Unlike the codes."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    zeros = torch.randint(0, 16, (24, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    theirs = pack_to_int32((zeros.int() - 8).to(torch.int8), 4, packed_dim=0)
    assert torch.equal(words(zeros.T, 4).T, theirs) and not torch.equal(words(zeros, 4), theirs)


@needed
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [64, 36, 5])
def test_words_as_the_library_packs_them(bits, columns):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2**bits, (6, columns), generator=generator).to(torch.uint8)
    theirs = pack_to_int32((codes.int() - 2 ** (bits - 1)).to(torch.int8), bits)
    assert torch.equal(words(codes, bits), theirs)
    assert not torch.equal(words(codes.flip(1), bits), theirs)


def test_words_on_paper():
    """Eight codes a word, the first lowest; and rows end at a whole word."""
    codes = torch.arange(8, dtype=torch.uint8)[None]
    assert words(codes, 4).tolist() == [[0x76543210]]
    assert words(codes[:, :5], 4).tolist() == [[0x43210]]
    assert words(codes[:, 4:], 8).tolist() == [[0x07060504]]


@needed
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_scales_have_two_bytes(dtype, tmp_path):
    lm = quantized(dtype=dtype, scale_dtype=dtype)
    export_compressed(lm, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == dtype
    packed = sum(t.nbytes for name, t in tensors.items() if "up_proj.weight_" in name and "shape" not in name)
    assert packed == 2 * lm.model.layers[0].mlp.up_proj.quantized().nbytes  # two layers, and not a byte more
    peer, theirs = read_back(tmp_path, False, dtype)
    weight = lm.model.layers[0].mlp.up_proj.quantized().dequantize()
    assert torch.equal(peer.model.layers[0].mlp.up_proj.weight, weight.to(dtype))
    assert largest_difference(lm.model(TOKENS), theirs) < 0.1


@needed
def test_a_course_model_with_its_tokenizer(tmp_path):
    lm = load_model("tiny-gqa", dtype=torch.float32, device="cpu")
    result = quantize_model(lm, "gptq", 4, 32, lm.encode(kv.evaluation_text("calibration"))[:1024], progress=False)
    folder = export_compressed(result, tmp_path / "new" / "folder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Once there was a fox."
    assert tokenizer(text)["input_ids"] == lm.encode(text)
    settings = json.loads((folder / "config.json").read_text())
    assert settings["bos_token_id"] == settings["eos_token_id"] == 0
    assert settings["quantization_config"]["ignore"] == ["lm_head"]
    assert set(settings["quantization_config"]["config_groups"]["group_0"]["weights"].items()) >= {
        ("num_bits", 4),
        ("symmetric", False),
        ("strategy", "group"),
        ("group_size", 32),
    }
    with pytest.raises(ValueError, match="quantization_config = .* quantized weights in safetensors are not supported"):
        load_model(folder)


def test_a_tokenizer_is_written_wherever_it_came_from(tmp_path):
    lm = load_model("tiny-gqa", dtype=torch.float32, device="cpu")
    result = quantize_model(lm, "rtn", 4, 32, progress=False)
    course, gguf = tmp_path / "course", tmp_path / "gguf"
    export_compressed(LM(result.model, result.tokenizer, "mine"), course)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (course / name).read_bytes() == (shipped_folder("tiny-gqa") / name).read_bytes()
    tokenizer = Tokenizer.from_gguf(tokenizer_fields())
    export_compressed(LM(result.model, tokenizer, "mine"), gguf)
    text = "the quick 12 foxes"
    peer = transformers.AutoTokenizer.from_pretrained(gguf)
    assert peer(text)["input_ids"] == tokenizer.encode(text) != result.encode(text)


@pytest.mark.parametrize(
    ("lm", "message"),
    [
        (lambda: LM(small_model(), None, "small"), "Nothing in this model is quantized: give what quantize_model"),
        (lambda: quantized(head_bits=8), "linear layers of the stack alone: quantize the model with head_bits=None"),
        (lambda: quantized(bits=3), "no form for a grid with bits=3, .* quantize with bits=4 or 8"),
        (lambda: quantized("nf4", symmetric=False), "no form for a grid with bits=4, group_size=32 and kind='nf4'"),
        (lambda: quantized(symmetric=False, kind="minimum"), "kind='minimum': quantize with"),
        (lambda: quantized(group_size="tensor"), "group_size='tensor'"),
        (
            lambda: quantized("gptq", act_order=True),
            "q_proj.weight has its columns in another order, .* static_groups=True",
        ),
        (
            lambda: quantized(dtype=torch.bfloat16, scale_dtype=torch.float16),
            "q_proj.weight has scales in float16, and .* of the model, bfloat16, .* or with scale_dtype=torch.bfloat16",
        ),
        (
            lambda: quantized(config=dict(qkv_bias=True, window=(4, 8))),
            "cannot have what this model has in: window",
        ),
    ],
)
def test_what_the_layout_has_no_form_for(lm, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_compressed(lm(), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


SMALL_HEAD = dict(n_kv_heads=1, d_head=8)  # k and v have 8 rows, whose zero points of 4 bits fill a word


def test_zero_points_that_transformers_cannot_read_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="k_proj.weight has 8 rows, .* quantize with symmetric=True, or with group_size="
    ):
        export_compressed(quantized(symmetric=False, config=SMALL_HEAD), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    with pytest.raises(ValueError, match="An LM is needed, as load_model gives it, got Transformer"):
        export_compressed(quantized().model, tmp_path / "folder")


@needed
@pytest.mark.parametrize("instead", [dict(symmetric=True), dict(group_size=None), dict(bits=8), dict(n_kv_heads=2)])
def test_what_is_advised_instead_is_read(instead, tmp_path):
    config = SMALL_HEAD | {name: instead.pop(name) for name in ("n_kv_heads",) if name in instead}
    lm = quantized(**dict(symmetric=False, config=config) | instead)
    export_compressed(lm, tmp_path)
    assert largest_difference(read_back(tmp_path, True)[1], lm.model(TOKENS)) < 1e-4


def test_layers_of_two_grids(tmp_path):
    a, b = quantized(), quantized(bits=8)
    a.model.layers[1] = b.model.layers[1]
    with pytest.raises(ValueError, match="Layers of this model have different grids, and the file names one"):
        export_compressed(a, tmp_path)


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file, and a model is kept in a folder"):
        export_compressed(quantized(), tmp_path / "file")


@pytest.mark.parametrize("changes", [{}, dict(window=16), dict(qkv_bias=True), dict(qk_norm=True)])
def test_the_configuration_that_is_written_is_the_one_that_is_read(changes):
    config = small_config(**changes)
    fields = hf_config(config, torch.bfloat16, 1, 2)
    assert kv.ModelConfig.from_hf(fields) == config
    assert (fields["torch_dtype"], fields["bos_token_id"], fields["eos_token_id"]) == ("bfloat16", 1, 2)
    assert kv.ModelConfig.from_hf(fields | {"rope_theta": 500.0}) != config
