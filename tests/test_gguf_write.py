"""Files that `write_gguf` writes: the same as llama.cpp's converter makes of the model, and read back equal."""

import dataclasses

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf_converter import convert, fields, hugging_face_model
from gguf_files import permute
from reference import small_config, small_model

import kvcourse as kv
from kvcourse.lm import LM, load_model
from kvcourse.quant import rtn
from kvcourse.quant.quantize import quantize_model
from kvcourse.rope import LinearScaling, Llama3Scaling, YarnScaling, frequencies
from kvcourse.weights import gguf_write
from kvcourse.weights.gguf_file import GGUFModel
from kvcourse.weights.gguf_write import write_gguf
from kvcourse.weights.shipped import shipped_folder

TEXT = "Once there were 1234 cafés.\n\n  He said:\tdon't!  <|im_end|> 日本"


def lm_of(model: kv.Transformer) -> LM:
    return LM(model, None, "small")


def loaded(path) -> LM:
    return load_model(path, dtype=torch.float32, device="cpu")


def contents(path) -> tuple[dict, dict]:
    """Metadata, and {name: (type, bytes of the tensor in its shape)}, as the `gguf` package reads them."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: (tensor.tensor_type.name, np.array(tensor.data)) for tensor in reader.tensors}
    return {key: field.contents() for key, field in reader.fields.items()}, tensors


def same_tensors(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[n][0] == b[n][0] and np.array_equal(a[n][1], b[n][1]) for n in a)


def same_weights(a: kv.Transformer, b: kv.Transformer) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


FAMILIES = {
    "llama": {},
    "llama, 8 and 4 heads": dict(num_key_value_heads=4),
    "llama, tied": dict(tie_word_embeddings=True),
    "llama, biases": dict(attention_bias=True),
    "qwen2": {},
    "qwen3": dict(head_dim=16),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_a_file_as_the_converter_makes_it(case, tmp_path):
    """The converter of the tests starts from `transformers`, and knows nothing of this package."""
    peer = hugging_face_model(case.split(",")[0], **FAMILIES[case])
    theirs = convert(tmp_path / "theirs.gguf", peer)
    lm = loaded(theirs)
    about, tensors = contents(write_gguf(lm, tmp_path / "ours.gguf"))
    assert same_tensors(tensors, contents(theirs)[1])
    for key, value in fields(peer).items():
        assert about[key] == pytest.approx(value) if isinstance(value, float) else about[key] == value
    back = loaded(tmp_path / "ours.gguf")
    assert back.config == lm.config and same_weights(back.model, lm.model)


def test_rows_left_in_halves_would_show(tmp_path, monkeypatch):
    theirs = convert(tmp_path / "theirs.gguf", hugging_face_model("llama"))
    monkeypatch.setattr(gguf_write, "pair_rows", lambda array, heads: array)
    ours = write_gguf(loaded(theirs), tmp_path / "ours.gguf")
    assert not same_tensors(contents(ours)[1], contents(theirs)[1])


@pytest.mark.parametrize(
    "scaling", [LinearScaling(4.0), YarnScaling(4.0, 64), YarnScaling(4.0, 64, 0.8), Llama3Scaling(8.0, 1.0, 4.0, 64)]
)
def test_stretched_positions(scaling, tmp_path):
    """Llama 3's bands come back as what they do to each pair, so frequencies are compared."""
    config = small_config(rope_scaling=scaling)
    read = loaded(write_gguf(lm_of(small_model(config)), tmp_path / "m.gguf")).config
    ours, theirs = (frequencies(c.d_head, c.rope_theta, c.rope_scaling) for c in (config, read))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert read.rope_scaling.amplitude == pytest.approx(scaling.amplitude, rel=1e-6)
    assert not torch.equal(ours, frequencies(config.d_head, config.rope_theta))  # else nothing was compared


@pytest.mark.parametrize("name", ["tiny-gqa", "tiny-mha", "tiny-mqa"])
def test_a_course_model_comes_back(name, tmp_path):
    lm = load_model(name, dtype=torch.float32, device="cpu")
    back = loaded(write_gguf(lm, tmp_path / "m.gguf", torch.float16))  # they were float16 when they were shipped
    assert back.config == lm.config and same_weights(back.model, lm.model)
    for field in ("tokens", "token_bytes", "control", "before", "after", "bos_id", "eos_id", "stop_ids"):
        assert getattr(back.tokenizer, field) == getattr(lm.tokenizer, field), field
    library = tokenizers.Tokenizer.from_file(str(shipped_folder(name) / "tokenizer.json"))
    assert back.encode(TEXT) == library.encode(TEXT).ids
    assert back.decode(back.encode(TEXT)) == TEXT


def test_float16_has_half_the_bytes_and_keeps_vectors(tmp_path):
    lm = lm_of(small_model())
    full = write_gguf(lm, tmp_path / "full.gguf")
    half = write_gguf(lm, tmp_path / "half.gguf", torch.float16)
    matrices = sum(weight.numel() for weight in lm.model.parameters() if weight.ndim == 2)
    assert abs((full.stat().st_size - half.stat().st_size) - 2 * matrices) < 1024  # alignment of each tensor
    read = loaded(half).model
    assert torch.equal(read.norm.weight, lm.model.norm.weight)
    assert torch.equal(read.layers[0].mlp.up_proj.weight, lm.model.layers[0].mlp.up_proj.weight.half().float())
    assert contents(write_gguf(lm_of(lm.model.half()), tmp_path / "m.gguf"))[1]["output.weight"][0] == "F16"


BLOCKS = {"Q4_0": (4, dict(symmetric=True)), "Q8_0": (8, dict(symmetric=True)), "Q4_1": (4, dict(kind="minimum"))}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_quantized_model_comes_back_as_its_dequantized_weights(kind, tied, tmp_path):
    (bits, options), config = BLOCKS[kind], small_config(tie_embeddings=tied)
    head = 8 if kind == "Q8_0" else None
    model = quantize_model(small_model(config), "rtn", bits, 32, head_bits=head, progress=False, **options)
    path = write_gguf(lm_of(model), tmp_path / "m.gguf")
    tensors = contents(path)[1]
    assert {tensors[f"blk.{i}.{name}.weight"][0] for i in (0, 1) for name in ("attn_q", "ffn_down")} == {kind}
    assert tensors["token_embd.weight"][0] == (kind if head else "F32") and ("output.weight" in tensors) != tied
    back = loaded(path).model
    for i, layer in enumerate(back.layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
            wanted = model.get_submodule(f"layers.{i}.{name}").quantized().dequantize()
            assert torch.equal(layer.get_submodule(name).weight, wanted)
    tokens = torch.arange(60)[None]
    assert float((back(tokens) - model(tokens)).abs().max()) < 1e-4
    plain = small_model(config)(tokens)
    assert float((back(tokens) - plain).abs().max()) > 1e-2  # the rounding is there


def test_rows_of_blocks_move_as_whole_rows(tmp_path):
    """q has 8 heads, k has 2: each is permuted by its own number."""
    model = quantize_model(small_model(), "rtn", 4, 32, symmetric=True, progress=False)
    tensors = contents(write_gguf(lm_of(model), tmp_path / "m.gguf"))[1]
    for name, place, heads, other in (("attn_q", "q_proj", 8, 2), ("attn_k", "k_proj", 2, 8)):
        stored = gguf.quants.dequantize(tensors[f"blk.1.{name}.weight"][1], gguf.GGMLQuantizationType.Q4_0)
        weight = rtn(small_model().layers[1].self_attn.get_submodule(place).weight, 4, 32, symmetric=True)
        assert np.array_equal(stored, permute(weight.dequantize().numpy(), heads))
        assert not np.array_equal(stored, permute(weight.dequantize().numpy(), other))


def test_a_layer_that_was_left_out_stays_in_float(tmp_path):
    model = quantize_model(small_model(), "rtn", 4, 32, symmetric=True, only="layers.1.*", progress=False)
    tensors = contents(write_gguf(lm_of(model), tmp_path / "m.gguf"))[1]
    assert tensors["blk.0.attn_q.weight"][0] == "F32" and tensors["blk.1.attn_q.weight"][0] == "Q4_0"


def with_weight(number: float) -> kv.Transformer:
    model = small_model()
    model.layers[0].mlp.up_proj.weight[0, 0] = number
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: small_model(small_config(window=8)), {}, r"window=8\), and llama.cpp has none .* such as tiny-mha"),
        (lambda: small_model(small_config(window=(None, 8))), {}, "llama.cpp has none"),
        (lambda: small_model(small_config(mlp_bias=True)), {}, "mlp_bias=True, and llama.cpp leaves such biases out"),
        (
            lambda: small_model(small_config(qk_norm=True, qkv_bias=True, o_bias=True)),
            {},
            "llama.cpp's qwen3 has no biases",
        ),
        (
            lambda: small_model(small_config(rope_scaling=YarnScaling(4.0, 64, beta_fast=16.0))),
            {},
            "llama.cpp has YaRN with beta_fast=32, beta_slow=1 and truncate=True",
        ),
        (small_model, dict(dtype=torch.bfloat16), "dtype=torch.bfloat16 must be torch.float32 or torch.float16"),
        (
            lambda: with_weight(1e5),
            dict(dtype=torch.float16),
            "layers.0.mlp.up_proj.weight: It has numbers too large for float16: give dtype=torch.float32.$",
        ),
        (
            lambda: with_weight(float("nan")),
            {},
            "layers.0.mlp.up_proj.weight: A GGUF file cannot have numbers that are infinite or NaN: load .* again.$",
        ),
        (
            lambda: quantize_model(small_model(), "rtn", 3, 32, progress=False),
            {},
            r"layers.0.self_attn.q_proj.weight: A block of a GGUF file is no place .* bits=3",
        ),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(model, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_gguf(lm_of(model()), tmp_path / "m.gguf", **options)
    assert not list(tmp_path.iterdir())


def test_a_window_that_never_ends_before_the_context_is_left_out(tmp_path):
    config = small_config(window=256)
    read = loaded(write_gguf(lm_of(small_model(config)), tmp_path / "m.gguf"))
    assert read.config == dataclasses.replace(config, window=None)
    tokens = torch.arange(90)[None]
    assert torch.equal(read.model(tokens), small_model(config)(tokens))


@pytest.mark.parametrize("name", ["m.bin", "m", "folder.gguf"])
def test_the_name_of_the_file(name, tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ValueError, match=f"{name} must be the name of a file that ends in .gguf"):
        write_gguf(lm_of(small_model()), tmp_path / name)


def test_what_is_no_lm_or_no_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="An LM is needed, as load_model gives it, got Transformer"):
        write_gguf(small_model(), tmp_path / "m.gguf")
    for path in (None, 5):
        with pytest.raises(ValueError, match=f"path must be the name of a file that ends in .gguf, got {path}"):
            write_gguf(lm_of(small_model()), path)


def test_an_error_leaves_what_was_there(tmp_path, monkeypatch):
    path = write_gguf(lm_of(small_model()), tmp_path / "m.gguf")
    before = path.read_bytes()

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(RuntimeError, match="m.gguf could not be written: No space left on device"):
        write_gguf(lm_of(small_model(seed=1)), path)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(RuntimeError, match="m.gguf could not be written: No such file or directory"):
        write_gguf(lm_of(small_model()), tmp_path / "nowhere" / "m.gguf")


def test_without_a_tokenizer_there_are_ids_alone(tmp_path):
    lm = loaded(write_gguf(lm_of(small_model()), tmp_path / "m.gguf"))
    assert lm.tokenizer is None and same_weights(lm.model, small_model())
    assert GGUFModel(tmp_path / "m.gguf").metadata["general.name"] == "small"
