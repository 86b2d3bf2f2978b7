"""Exported folders: `transformers` computes and tokenizes the same with them, and they load back."""

import errno
import json
import os
from collections import Counter
from itertools import product
from random import Random

import pytest
import torch
import transformers
from gguf_files import CHAT_TEMPLATE, tokenizer_fields
from reference import largest_difference, random_tokens, small_config, small_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizer_files import CUTS, KINDS, LLAMA2_TEMPLATE, TEXTS, cut_fields, sentencepiece_fields, write_folder

import kvcourse as kv
from kvcourse import model_folder
from kvcourse.lm import LM
from kvcourse.quant.quantize import quantize_model
from kvcourse.rope import LinearScaling, Llama3Scaling, PairScaling, YarnScaling
from kvcourse.tokenizer import Tokenizer
from kvcourse.tokenizer.chat import render
from kvcourse.tokenizer.json_write import tokenizer_files
from kvcourse.weights import hf_write
from kvcourse.weights.hf_export import export_hf

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TOKENS = random_tokens(2, 96)
FAMILIES = {
    "llama": {},
    "llama, attention biases": dict(qkv_bias=True, o_bias=True),
    "llama, all biases": dict(qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama, feed-forward biases": dict(mlp_bias=True),
    "mistral": dict(window=16),
    "mistral, a window written for each layer": dict(window=(16, 16)),
    "qwen2": dict(qkv_bias=True),
    "qwen2, windows": dict(qkv_bias=True, window=16),
    "qwen2, a window in one layer": dict(qkv_bias=True, window=(16, None)),
    "qwen3": dict(qk_norm=True),
    "qwen3, biases": dict(qk_norm=True, qkv_bias=True, o_bias=True),
    "qwen3, a window in one layer": dict(qk_norm=True, window=(None, 16)),
}
SCALINGS = {
    "plain": None,
    "linear": LinearScaling(4.0),
    "llama3": Llama3Scaling(8.0, 1.0, 4.0, 64),
    "yarn": YarnScaling(4.0, 64),
    "yarn, all set": YarnScaling(4.0, 64, attention_factor=1.5, beta_fast=16.0, beta_slow=2.0, truncate=False),
}
MESSAGES = [
    [{"role": "user", "content": "Hello."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  What is é + 漢?\n"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3 {{ x }}"}],
]


def small(tokenizer=None, dtype=torch.float32, **config) -> LM:
    """Heads of 12 numbers, which is not the width over their number; odd rotary base and epsilon."""
    odd = dict(d_head=12, rope_theta=5e4, norm_eps=1e-2)
    return LM(small_model(small_config(**odd | config), dtype=dtype), tokenizer, "small")


def theirs(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def edit(folder, file, **changes):
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | changes))


def same_weights(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- the model -------------------------------------------------------------------------------------------------------


CASES = [(family, scaling, i % 2 == 1) for i, (family, scaling) in enumerate(product(FAMILIES, SCALINGS))]


@pytest.mark.parametrize(("family", "scaling", "tied"), CASES)  # there are 5 scalings: each family is tied and untied
def test_transformers_computes_the_same_and_it_loads_back(family, scaling, tied, tmp_path):
    lm = small(**FAMILIES[family], rope_scaling=SCALINGS[scaling], tie_embeddings=tied)
    folder = export_hf(lm, tmp_path / "new" / "folder")
    ours = lm.model(TOKENS)
    assert ours.std() > 0.1  # not a model that says the same whatever it reads
    assert largest_difference(ours, theirs(folder)) < 1e-4
    back = kv.load_model(folder, torch.float32, "cpu")
    assert same_weights(back.model.state_dict(), lm.model.state_dict()) and back.config.windows == lm.config.windows
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == (not tied)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}  # it has no tokenizer


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({}, {"rope_theta": 1e4}),
        ({}, {"rms_norm_eps": 1e-5}),
        (dict(tie_embeddings=True), {"tie_word_embeddings": False}),
        (dict(rope_scaling=LinearScaling(4.0)), {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        (dict(rope_scaling=SCALINGS["llama3"]), {"rope_scaling": None}),
        (dict(rope_scaling=SCALINGS["yarn"]), {"max_position_embeddings": 64, "rope_scaling": None}),
        (dict(window=16), {"sliding_window": 17}),
        (dict(qkv_bias=True, window=(16, None)), {"layer_types": ["full_attention", "sliding_attention"]}),
        (dict(qk_norm=True, window=(16, None)), {"use_sliding_window": False, "layer_types": None}),
        (dict(qkv_bias=True, o_bias=True), {"attention_bias": False}),
        (dict(mlp_bias=True), {"mlp_bias": False}),
    ],
)
def test_a_wrong_config_would_be_noticed(model, changes, tmp_path):
    lm = small(**model)
    edit(export_hf(lm, tmp_path), "config.json", **changes)
    assert largest_difference(lm.model(TOKENS), theirs(tmp_path)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_stored_in_the_dtype_of_the_model_or_in_another(dtype, tmp_path):
    lm = small(dtype=dtype, tie_embeddings=True)
    own, other = tmp_path / "own", tmp_path / "other"
    export_hf(lm, own)
    assert same_weights(kv.load_model(own, dtype, "cpu").model.state_dict(), lm.model.state_dict())
    export_hf(lm, other, dtype="bfloat16")
    assert {t.dtype for t in load_file(other / "model.safetensors").values()} == {torch.bfloat16}
    assert transformers.AutoModelForCausalLM.from_pretrained(other).dtype == torch.bfloat16
    rounded = {name: weight.bfloat16().to(dtype) for name, weight in lm.model.state_dict().items()}
    back = kv.load_model(other, dtype, "cpu").model.state_dict()
    assert same_weights(back, rounded)
    assert same_weights(back, lm.model.state_dict()) == (dtype == torch.bfloat16)


def test_weights_are_written_from_the_memory_they_are_in(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        hf_write, "save_file", lambda tensors, path, metadata: (seen.update(tensors), path.write_bytes(b""))
    )
    lm = small()
    export_hf(lm, tmp_path)
    own = {name: weight.data_ptr() for name, weight in lm.model.named_parameters()}
    assert {name.removeprefix("model."): tensor.data_ptr() for name, tensor in seen.items()} == own
    export_hf(lm, tmp_path, dtype=torch.float16)
    assert not {tensor.data_ptr() for tensor in seen.values()} & {*own.values()}


# --- the tokenizer ---------------------------------------------------------------------------------------------------

PARTS = [
    "a",
    "the",
    " ",
    "  ",
    "\n",
    "\t",
    "\r\n",
    "1",
    "2024",
    "é",
    "e\u0301",
    "漢字",
    "🙂",
    "👩‍🚀",
    "\u00a0",
    "½²",
    "it's",
]
PARTS += [
    "def f(x):",
    "    return",
    "{}",
    "IT'S",
    "...",
    "!?",
    "$",
    "Größe",
    "Привет",
    "हिन्दी",
    "x_1",
    "CamelCase",
    "<b>",
]
RANDOM = Random(0)
ODD = ["".join(RANDOM.choices(PARTS, k=RANDOM.randrange(1, 9))) for _ in range(250)] + TEXTS[:-1] + CUTS["texts"]


def from_folder(kind):
    return lambda folder: Tokenizer.from_folder(write_folder(folder, kind))


def from_gguf(fields):
    return lambda folder: Tokenizer.from_gguf(fields)


def with_user_defined(fields, word) -> dict:
    """The fields with this token marked as user-defined."""
    tokens, types = fields["tokenizer.ggml.tokens"], [*fields["tokenizer.ggml.token_type"]]
    types[tokens.index(word)] = 4
    return fields | {"tokenizer.ggml.token_type": types}


MADE = {
    **{f"folder, {kind}": from_folder(kind) for kind in KINDS},
    **{f"gguf, {pre}": from_gguf(cut_fields(pre)) for pre in CUTS if pre not in ("merges", "texts", "provenance")},
    "gguf, begins with a token": from_gguf(cut_fields("smollm", add_bos_token=True, add_eos_token=True)),
    "gguf, user-defined": from_gguf(with_user_defined(cut_fields("gpt-2"), "th")),
    "gguf, trained": from_gguf(tokenizer_fields()),
    "gguf, sentencepiece": from_gguf(sentencepiece_fields()),
    "gguf, sentencepiece, no space before": from_gguf(sentencepiece_fields(add_space_prefix=False, add_eos_token=True)),
    "gguf, sentencepiece, user-defined": from_gguf(with_user_defined(sentencepiece_fields(), "in")),
    "course": lambda folder: kv.load_model("tiny-gqa", device="cpu").tokenizer,
}


def written(tokenizer, folder):
    """The tokenizer as `transformers` reads it, and as this package does."""
    for name, data in tokenizer_files(tokenizer, 100).items():
        (folder / name).write_bytes(data)
    return transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)


def compare(tokenizer, peer, back, texts=ODD) -> Counter:
    """How many texts `transformers` reads and writes in other ways: alone, and with control tokens between."""
    control, found = [*tokenizer.control][:4], Counter()
    for i, text in enumerate(texts):
        try:
            ids = tokenizer.encode(text)
        except ValueError:  # a vocabulary without some of the characters
            found["refused"] += 1
            continue
        mixed = text + (control[i % len(control)] if control else "") + " b" + text
        mixed_ids = tokenizer.encode(mixed, special=True)
        looks_like_one = tokenizer.any_control.search(text) is not None  # which is text here, and a token there
        found["read"] += ids != peer(text, split_special_tokens=looks_like_one).input_ids
        found["read"] += mixed_ids != peer(mixed).input_ids
        found["written"] += tokenizer.decode(mixed_ids) != peer.decode(mixed_ids, skip_special_tokens=True)
        found["written"] += tokenizer.decode(mixed_ids, special=True) != peer.decode(mixed_ids)
        found["back"] += back.encode(text) != ids or back.encode(mixed, special=True) != mixed_ids
        found["back"] += back.decode(mixed_ids) != tokenizer.decode(mixed_ids)
    return found


@pytest.mark.parametrize("kind", MADE)
def test_text_is_read_and_written_as_by_transformers(kind, tmp_path_factory):
    tokenizer = MADE[kind](tmp_path_factory.mktemp("from"))
    peer, back = written(tokenizer, tmp_path_factory.mktemp("to"))
    found = compare(tokenizer, peer, back)
    assert (found["read"], found["written"], found["back"]) == (0, 0, 0)
    assert found["refused"] < len(ODD) * (0.9 if kind == "folder, unigram" else 0.01)
    for name in ("tokens", "control", "before", "after", "bos_id", "eos_id", "stop_ids", "chat_template", "named"):
        assert getattr(back, name) == getattr(tokenizer, name), name
    assert (peer.bos_token_id, peer.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert peer.model_max_length == 100


def changed(data: dict, path: str, value) -> dict:
    *outer, last = path.split(".")
    inner = data
    for name in outer:
        inner = inner[name]
    inner[last] = value
    return data


BYTE_LEVEL = ("add_prefix_space", "trim_offsets", "use_regex")


@pytest.mark.parametrize(
    ("kind", "path", "value", "what"),
    [
        ("gguf, smollm", "pre_tokenizer", {"type": "ByteLevel"} | dict.fromkeys(BYTE_LEVEL, True), "read"),
        ("gguf, qwen2", "normalizer", None, "read"),
        ("gguf, begins with a token", "post_processor", None, "read"),
        ("gguf, user-defined", "added_tokens", [], "read"),
        ("gguf, gpt-2", "decoder", None, "written"),
        ("gguf, sentencepiece", "normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, "read"),
        ("gguf, sentencepiece", "model.merges", [], "read"),
        ("gguf, sentencepiece", "model.byte_fallback", False, "read"),
        ("gguf, sentencepiece", "decoder.decoders", [{"type": "Fuse"}], "written"),
        ("course", "post_processor", None, "read"),
    ],
)
def test_another_tokenizer_would_be_noticed(kind, path, value, what, tmp_path):
    tokenizer = MADE[kind](tmp_path)
    written(tokenizer, tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), path, value)))
    assert compare(tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path), tokenizer)[what] > 0


@pytest.mark.parametrize(
    ("fields", "template"),
    [(tokenizer_fields(**{"tokenizer.chat_template": CHAT_TEMPLATE}), CHAT_TEMPLATE), (sentencepiece_fields(), None)],
)
def test_a_conversation_is_laid_out_as_by_transformers(fields, template, tmp_path):
    tokenizer = Tokenizer.from_gguf(fields)
    assert tokenizer.chat_template == (template or LLAMA2_TEMPLATE)
    peer, _ = written(tokenizer, tmp_path)
    same_chats(tokenizer, peer)
    peer.chat_template = peer.chat_template.replace("['content']", "['content'] | trim")
    with pytest.raises(AssertionError):
        same_chats(tokenizer, peer)


def same_chats(tokenizer, peer):
    for messages in MESSAGES:
        for answer in (True, False):
            options = dict(messages=messages, add_generation_prompt=answer)
            text = peer.apply_chat_template(messages, add_generation_prompt=answer, tokenize=False)
            assert text == render(tokenizer.chat_template, tokenizer.named, **options)
            ids = peer.apply_chat_template(messages, add_generation_prompt=answer, return_dict=False)
            assert ids == tokenizer.chat(messages, answer)


def test_all_tokens_that_end_an_answer_are_kept(tmp_path):
    tokenizer = Tokenizer.from_gguf(tokenizer_fields(**{"tokenizer.ggml.eos_token_id": 2}))
    assert tokenizer.stop_ids == {0, 2}
    export_hf(small(tokenizer, vocab_size=400), tmp_path)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert peer.generation_config.eos_token_id == [2, 0] and peer.config.eos_token_id == 2
    assert kv.load_model(tmp_path, device="cpu").tokenizer.stop_ids == {0, 2}


def test_tokens_added_for_a_wider_model_are_not_written(tmp_path):
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields())
    size = tokenizer.vocab_size
    tokenizer.extend(size + 60)
    folder = export_hf(small(tokenizer, vocab_size=size + 60), tmp_path)
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == size
    assert kv.load_model(folder, device="cpu").tokenizer.tokens == tokenizer.tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (sentencepiece_fields(scores=[0.0] * len(sentencepiece_fields()["tokenizer.ggml.tokens"])), "the same score"),
        (tokenizer_fields(**{"tokenizer.ggml.tokens": ["a", "a"]}), "the token 'a' twice"),
    ],
)
def test_a_tokenizer_that_has_no_such_form(fields, message, tmp_path):
    if "twice" in message:
        alphabet = [*tokenizer_fields()["tokenizer.ggml.tokens"], "a"]
        fields |= {"tokenizer.ggml.tokens": alphabet, "tokenizer.ggml.token_type": [1] * len(alphabet)}
    with pytest.raises(ValueError, match=message):
        export_hf(small(Tokenizer.from_gguf(fields), vocab_size=400), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


# --- what is refused, and whole or not at all ------------------------------------------------------------------------


def spoiled(value: float, **options) -> LM:
    lm = small(**options)
    lm.model.layers[1].mlp.up_proj.weight[3, 4] = value
    return lm


class OwnForm(kv.Transformer):
    """A model with weights under other names."""

    def __init__(self, config):
        super().__init__(config, "cpu", torch.float32)
        self.more = torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("lm", "options", "message"),
    [
        (lambda: small_model(), {}, "An LM is needed, as load_model gives it, got Transformer"),
        (
            lambda: quantize_model(small(d_head=8), "rtn", 4, 32, progress=False),
            {},
            "small is quantized: kvcourse.quant.exp",
        ),
        (lambda: LM(OwnForm(small_config()), None, "mine"), {}, "mine keeps its weights in a form of its own"),
        (lambda: small(o_bias=True), {}, "LlamaForCausalLM cannot have what this model has in: o_bias"),
        (lambda: small(qk_norm=True, mlp_bias=True), {}, "Qwen3ForCausalLM cannot have .* in: mlp_bias"),
        (lambda: small(window=16, qkv_bias=True, o_bias=True), {}, "Mistral.* cannot have .* in: qkv_bias, o_bias"),
        (lambda: small(window=(16, 8)), {}, "MistralForCausalLM cannot have what this model has in: window"),
        (lambda: small(window=(16, None)), {}, "MistralForCausalLM cannot have what this model has in: window"),
        (lambda: small(qkv_bias=True, window=(16, 8)), {}, "Qwen2ForCausalLM cannot have .* in: window"),
        (lambda: small(rope_scaling=PairScaling((1.0,) * 6)), {}, "Llama.* cannot have .* in: rope_scaling"),
        (lambda: small(), {"dtype": "int8"}, "dtype='int8' is none the course computes in"),
        (
            lambda: spoiled(7e4),
            {"dtype": "float16"},
            r"layers.1.mlp.up_proj.weight .* float16 .* 7e\+04.* ends at 65504",
        ),
        (lambda: spoiled(float("nan")), {}, "layers.1.mlp.up_proj.weight has numbers that are infinite or not"),
        (lambda: spoiled(float("inf")), {}, "layers.1.mlp.up_proj.weight has numbers that are infinite or not"),
    ],
)
def test_what_is_refused_leaves_nothing(lm, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_hf(lm(), tmp_path / "folder", **options)
    assert not (tmp_path / "folder").exists()
    export_hf(spoiled(65504.0), tmp_path / "folder", "float16")


@pytest.mark.parametrize("name", ["chat_template.jinja", "model-00001-of-00002.safetensors", "special_tokens_map.json"])
def test_files_of_another_model_are_not_mixed_in(name, tmp_path):
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=f"{tmp_path} has other files, such as {name}, .*: give a new one"):
        export_hf(small(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_model_without_a_tokenizer_does_not_get_that_of_an_earlier_one(tmp_path):
    tokenizer = Tokenizer.from_gguf(tokenizer_fields())
    export_hf(small(tokenizer, vocab_size=400), tmp_path)
    with pytest.raises(ValueError, match="has other files, such as generation_config.json"):
        export_hf(small(), tmp_path)
    lm = small(tokenizer, vocab_size=400, window=5)
    assert kv.load_model(export_hf(lm, tmp_path), device="cpu").config.window == 5


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("Error while serializing: I/O error: No space left on device (os error 28)", errno.ENOSPC),
        ("something else", errno.EIO),
    ],
)
def test_a_full_disk_leaves_the_model_that_was_there(said, code, tmp_path, monkeypatch):
    lm = small()
    export_hf(lm, tmp_path)

    def fail(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise SafetensorError(said)

    monkeypatch.setattr(hf_write, "save_file", fail)
    advice = "make room there" if code == errno.ENOSPC else "put that right"
    with pytest.raises(RuntimeError, match=f"could not be written .*: {advice}, and try again"):
        export_hf(small(rope_theta=1e3), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert kv.load_model(tmp_path, torch.float32, "cpu").config == lm.config


def test_a_folder_is_no_model_before_all_of_it_is_there(tmp_path, monkeypatch):
    """As when the power fails while files are moved to their places."""
    really = os.replace

    def failing(source, target):
        if target == tmp_path / "config.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(source, target)

    monkeypatch.setattr(model_folder.os, "replace", failing)
    with pytest.raises(RuntimeError, match="could not be written"):
        export_hf(small(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(ValueError, match="has no config.json"):
        kv.load_model(tmp_path)


@pytest.mark.parametrize("folder", [None, 3])
def test_a_folder_has_a_name(folder):
    with pytest.raises(ValueError, match=f"folder must be the name of a folder, got {folder}"):
        export_hf(small(), folder)


# --- the real one ----------------------------------------------------------------------------------------------------


@pytest.mark.smollm2
def test_smollm2_from_its_gguf_file(tmp_path):
    lm = kv.load_model("smollm2-135m", torch.float32, "cpu")
    folder = kv.export_hf(lm, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([lm.encode(kv.evaluation_text())[:100]])
    with torch.no_grad():
        assert largest_difference(model(ids).logits, lm.model(ids)) < 1e-4
    back = kv.load_model(folder, torch.float32, "cpu")
    assert same_weights(back.model.state_dict(), lm.model.state_dict()) and back.config == lm.config
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    found = compare(lm.tokenizer, peer, back.tokenizer)
    assert (found["read"], found["written"], found["back"]) == (0, 0, 0) and found["refused"] < 5
    same_chats(lm.tokenizer, peer)
