"""Models of each family, converted from `transformers` to GGUF and read: the same tensors, the same logits."""

import numpy as np
import pytest
import torch
from gguf_converter import convert, hugging_face_model, tensors
from gguf_files import permute, read_gguf
from reference import TEXT, largest_difference, random_tokens

from kvcourse.model import Transformer
from kvcourse.weights.gguf_file import gguf_name
from kvcourse.weights.tensors import model_shapes

HEADS = [dict(num_attention_heads=8, num_key_value_heads=kv) for kv in (2, 4, 8, 1)]
MODELS = [
    *(("llama", heads) for heads in HEADS),
    ("llama", dict(head_dim=32)),
    ("llama", dict(attention_bias=True)),
    ("llama", dict(mlp_bias=True)),
    ("llama", dict(attention_bias=True, mlp_bias=True, num_key_value_heads=4)),
    ("llama", dict(tie_word_embeddings=True)),
    ("mistral", {}),
    ("mistral", dict(head_dim=16)),
    *(("qwen2", heads) for heads in HEADS[:3]),
    ("qwen2", dict(tie_word_embeddings=True)),
    *(("qwen3", heads | dict(head_dim=16)) for heads in HEADS[:3]),
    ("qwen3", dict(head_dim=8, attention_bias=True)),
    ("qwen3", dict(head_dim=8, tie_word_embeddings=True)),
]


def load(path):
    config, state, _ = read_gguf(path)
    model = Transformer(config, "cpu", torch.float32)
    model.load_state_dict(state)
    return model


def difference(model, path) -> float:
    """The largest difference of logits between the original model and the file, over 96 tokens."""
    tokens = random_tokens(1, TEXT)
    return largest_difference(load(path)(tokens), model(tokens).logits)


def name(case) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@pytest.mark.parametrize("case", MODELS, ids=name)
def test_logits_and_tensors_are_those_of_transformers(tmp_path, case):
    model = hugging_face_model(case[0], **case[1])
    path = convert(tmp_path / "m.gguf", model)
    assert difference(model, path) < 1e-4
    original = {key.removeprefix("model."): weight for key, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        assert torch.equal(original.pop("lm_head.weight"), original["embed_tokens.weight"])
    loaded = load(path).state_dict()
    assert loaded.keys() == original.keys()
    for key, weight in original.items():
        assert torch.equal(loaded[key], weight), key


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_half_precision_is_exact(tmp_path, family, kind):
    """Weights that fit the type come back bit for bit, in that dtype too."""
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    model = hugging_face_model(family, head_dim=16) if family == "qwen3" else hugging_face_model(family)
    model = model.to(dtype).float()
    _, state, _ = read_gguf(convert(tmp_path / "m.gguf", model, kind=kind), dtype=dtype)
    for key, weight in state.items():
        original = model.state_dict()["lm_head.weight" if key.startswith("lm_head") else f"model.{key}"]
        assert weight.dtype == dtype and torch.equal(weight, original.to(dtype)), key


def wrong_k_heads(stored):
    """k permuted with q's number of heads, as loaders for models without grouped queries do."""
    for key, weight in stored.items():
        if ".attn_k." in key:
            rows = weight.reshape(2, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
            stored[key] = permute(rows, 8)


def no_biases(stored):
    for key in [key for key in stored if key.endswith(".bias")]:
        del stored[key]


def zero_biases(stored):
    for key in stored:
        if key.endswith(".bias"):
            stored[key] = np.zeros_like(stored[key])


def bias_in_another_order(stored):
    stored["blk.0.attn_q.bias"] = permute(stored["blk.0.attn_q.bias"], 8)


def permuted_like_llama(stored):
    for key, heads in (("blk.0.attn_q.weight", 8), ("blk.0.attn_k.weight", 2)):
        stored[key] = permute(stored[key], heads)


def swapped_norms(stored):
    names = "blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight"
    stored.update(zip(names, [stored[n] for n in reversed(names)], strict=True))


@pytest.mark.parametrize(
    "case, spoil",
    [
        (("llama", dict(head_dim=16)), wrong_k_heads),
        (("mistral", dict(head_dim=16)), wrong_k_heads),
        (("llama", dict(attention_bias=True)), no_biases),
        (("llama", dict(mlp_bias=True)), no_biases),
        (("llama", dict(attention_bias=True)), bias_in_another_order),
        (("qwen2", {}), zero_biases),
        (("qwen2", {}), permuted_like_llama),
        (("qwen3", dict(head_dim=16)), permuted_like_llama),
        (("qwen3", dict(head_dim=16)), swapped_norms),
    ],
    ids=lambda value: getattr(value, "__name__", None) or name(value),
)
def test_the_comparison_notices(tmp_path, case, spoil):
    """Partner of the test above: the mistake in question moves the logits far more than 1e-4."""
    model = hugging_face_model(case[0], **case[1])
    assert difference(model, convert(tmp_path / "m.gguf", model, spoil=spoil)) > 1e-2


@pytest.mark.parametrize("key, value", [("rope.freq_base", 1e4), ("attention.layer_norm_rms_epsilon", 1e-6)])
def test_the_comparison_notices_a_field_that_is_not_read(tmp_path, key, value):
    model = hugging_face_model("llama")
    path = convert(tmp_path / "m.gguf", model, more_fields={f"llama.{key}": value})
    assert difference(model, path) > 1e-2


@pytest.mark.parametrize("case", [("qwen2", {}), ("qwen3", dict(head_dim=16))], ids=name)
def test_what_a_family_always_has_may_not_be_absent(tmp_path, case):
    model = hugging_face_model(case[0], **case[1])
    part = {"qwen2": ".bias", "qwen3": "_norm.weight"}[case[0]]

    def spoil(stored):
        for key in [key for key in stored if key.endswith(part) and ".attn_" in key]:
            del stored[key]

    missing = {"qwen2": "blk.0.attn_k.bias", "qwen3": "blk.0.attn_k_norm.weight"}[case[0]]
    with pytest.raises(ValueError, match=f"m.gguf lacks .*{missing}"):
        read_gguf(convert(tmp_path / "m.gguf", model, spoil=spoil))


@pytest.mark.parametrize("lost", ["blk.0.attn_k.bias", "blk.1.attn_output.bias", "blk.1.ffn_up.bias"])
def test_one_lost_bias_is_named(tmp_path, lost):
    model = hugging_face_model("llama", attention_bias=True, mlp_bias=True)
    with pytest.raises(ValueError, match=f"lacks 1 tensor.*{lost}"):
        read_gguf(convert(tmp_path / "m.gguf", model, spoil=lambda stored: stored.pop(lost)))


@pytest.mark.parametrize(
    "family, extra", [("llama", "attn_q_norm.weight"), ("qwen2", "attn_k_norm.weight"), ("qwen3", "attn_sinks.weight")]
)
def test_a_tensor_the_family_does_not_have_is_named(tmp_path, family, extra):
    model = hugging_face_model(family)
    spoil = {f"blk.0.{extra}": np.ones(8, np.float32)}
    with pytest.raises(ValueError, match=f"has . tensor.*blk.0.{extra}.*does not ask for"):
        read_gguf(convert(tmp_path / "m.gguf", model, spoil=lambda stored: stored.update(spoil)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_head_that_repeats_the_embedding_is_tied(tmp_path, family, kind):
    """A GGUF file has no flag for tied embeddings: absent, repeated, or a head of its own."""
    model = hugging_face_model(family, tie_word_embeddings=True)

    def repeat(stored):
        stored["output.weight"] = stored["token_embd.weight"].copy()

    absent = read_gguf(convert(tmp_path / "m.gguf", model, kind=kind))
    repeated = read_gguf(convert(tmp_path / "n.gguf", model, kind=kind, spoil=repeat))
    assert absent[0] == repeated[0] and repeated[0].tie_embeddings
    assert absent[1].keys() == repeated[1].keys() and "lm_head.weight" not in repeated[1]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_head_of_its_own_is_kept(tmp_path, family):
    """A head that differs from the embedding in one number, or in how it is stored, is the model's head."""
    model = hugging_face_model(family, tie_word_embeddings=True)

    def differ(stored):
        stored["output.weight"] = stored["token_embd.weight"].copy()
        stored["output.weight"][96, 63] += 1

    loaded = load(convert(tmp_path / "m.gguf", model, spoil=differ))
    assert not loaded.config.tie_embeddings
    assert torch.equal(loaded.lm_head.weight[:96], loaded.embed_tokens.weight[:96])
    assert float(loaded.lm_head.weight[96, 63] - loaded.embed_tokens.weight[96, 63]) == pytest.approx(1.0)

    def store_otherwise(stored):
        stored["output.weight"] = (stored["token_embd.weight"].astype(np.float16).view(np.uint8), "F16")

    loaded = load(convert(tmp_path / "n.gguf", model, spoil=store_otherwise))
    assert torch.equal(loaded.lm_head.weight, loaded.embed_tokens.weight.half().float())


def test_every_name_is_the_gguf_packages(tmp_path):
    """The names of the table in gguf_file against those of the `gguf` package, for a model that has everything."""
    everything = [
        hugging_face_model("llama", attention_bias=True, mlp_bias=True),
        hugging_face_model("qwen3", head_dim=8, attention_bias=True),
    ]
    for number, model in enumerate(everything):
        config, _, _ = read_gguf(convert(tmp_path / f"{number}.gguf", model))
        assert {gguf_name(name) for name in model_shapes(config, "m")} == tensors(model).keys()
