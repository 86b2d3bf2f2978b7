"""The tokenizer in a file that `write_gguf` writes: the words are cut as before, the same tokens end a text."""

import json

import gguf
import pytest
import tokenizers
import torch
from gguf_files import CHAT_TEMPLATE, random_state, tiny_config, tokenizer_fields, trained_bpe, write_model
from reference import small_config, small_model

from kvcourse.lm import LM, load_model
from kvcourse.tokenizer import Tokenizer
from kvcourse.tokenizer.pretokenizers import CUTS
from kvcourse.weights.gguf_write import write_gguf
from kvcourse.weights.shipped import shipped_folder

TEXT = "Once there were 1234 cafés.\n\n  He said:\tdon't!  <|im_end|> 日本"


def loaded(path) -> LM:
    return load_model(path, dtype=torch.float32, device="cpu")


def metadata(path) -> dict:
    """As the `gguf` package reads them."""
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def test_the_tokenizer_of_a_gguf_file_is_copied(tmp_path):
    more = tokenizer_fields(ggml_add_bos_token=True)
    config = tiny_config(vocab_size=len(more["tokenizer.ggml.tokens"]))
    first = write_model(tmp_path / "first.gguf", config, random_state(config), **more)
    lm = loaded(first)
    with pytest.raises(ValueError, match="first's tokenizer are needed: give source=, the folder or .gguf file"):
        write_gguf(lm, tmp_path / "second.gguf")
    about = metadata(write_gguf(lm, tmp_path / "second.gguf", source=first))
    assert {key: about[key] for key in more} == more
    assert loaded(tmp_path / "second.gguf").encode(TEXT) == lm.encode(TEXT)


def write_folder(folder, pre_tokenizer, normalizer=None, ignore_merges=False, decoder="ByteLevel", **settings):
    """A tokenizer.json with the merges that the tests trained, and settings of the files beside it."""
    folder.mkdir()
    data = json.loads(trained_bpe().to_str())
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = pre_tokenizer
    data["pre_tokenizer"] = json.loads(library.to_str())["pre_tokenizer"]
    data["normalizer"] = normalizer and {"type": normalizer}
    data["decoder"] = {"type": decoder, "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    data["model"]["ignore_merges"] = ignore_merges
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"} | settings))
    return folder


@pytest.fixture(scope="module")
def lm320() -> LM:
    """A model with more embeddings than the trained tokenizer has tokens."""
    return LM(small_model(small_config(vocab_size=330)), None, "small")


@pytest.mark.parametrize("name", CUTS)
def test_the_way_of_cutting_words_gets_its_name(name, tmp_path, lm320):
    cut = CUTS[name]
    settings = dict(bos_token="<|im_start|>", add_bos_token=True, chat_template=CHAT_TEMPLATE)
    folder = write_folder(
        tmp_path / "f", cut.pre_tokenizer, "NFC" if cut.composed else None, cut.whole_words, **settings
    )
    back = loaded(write_gguf(lm320, tmp_path / "m.gguf", source=folder)).tokenizer
    theirs = Tokenizer.from_folder(folder)
    hard = TEXT + " 7 42 365 1024 cafe\u0301 I'LL (x+=1) a/b\r\n\r\n"
    assert back.encode(hard, special=True) == theirs.encode(hard, special=True)
    assert back.encode(hard)[0] == 1 and back.chat_template == CHAT_TEMPLATE
    assert back.tokens[320:] == [f"[PAD{id}]" for id in range(320, 330)]


def test_byte_level_cuts_as_gpt_2_does(tmp_path, lm320):
    folder = write_folder(tmp_path / "f", tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    about = metadata(write_gguf(lm320, tmp_path / "m.gguf", source=folder))
    assert about["tokenizer.ggml.pre"] == "gpt-2" and about["tokenizer.ggml.add_bos_token"] is False


def test_cutting_digits_otherwise_would_show(tmp_path, lm320):
    """The name matters: "smollm" and "gpt-2" cut the same letters and other numbers."""
    folder = write_folder(tmp_path / "f", CUTS["smollm"].pre_tokenizer)
    about = metadata(write_gguf(lm320, tmp_path / "m.gguf", source=folder))
    assert about["tokenizer.ggml.pre"] == "smollm"


def test_further_ends_of_an_answer(tmp_path, lm320):
    folder = write_folder(tmp_path / "f", CUTS["gpt-2"].pre_tokenizer)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 70, 71]}))
    assert loaded(write_gguf(lm320, tmp_path / "m.gguf", source=folder)).tokenizer.stop_ids >= {0, 70, 71}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 70, 71, 72]}))
    with pytest.raises(ValueError, match="names 3 more tokens that end an answer, and a GGUF file has room for 2"):
        write_gguf(lm320, tmp_path / "m.gguf", source=folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(pre_tokenizer=tokenizers.pre_tokenizers.Whitespace()), "cuts text into words in a way that is none of"),
        (dict(normalizer="NFC"), "cuts text into words in a way that is none of"),
        (dict(ignore_merges=True), "cuts text into words in a way that is none of"),
        (dict(decoder="Metaspace"), "is no byte-level BPE"),
    ],
)
def test_a_tokenizer_that_is_not_written(changes, message, tmp_path, lm320):
    settings = {"pre_tokenizer": tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)} | changes
    folder = write_folder(tmp_path / "f", **settings)
    if "decoder" in changes:
        data = json.loads((folder / "tokenizer.json").read_text())
        data["decoder"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
        data["model"]["unk_token"] = "!"
        (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"{message}.*or without a tokenizer: LM"):
        write_gguf(lm320, tmp_path / "m.gguf", source=folder)


def test_control_tokens_that_swallow_spaces(tmp_path, lm320):
    folder = write_folder(tmp_path / "f", tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"][0]["lstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="control tokens that swallow spaces, which a GGUF file cannot say"):
        write_gguf(lm320, tmp_path / "m.gguf", source=folder)


def test_the_tokenizer_of_another_model_is_refused(tmp_path):
    lm = load_model("tiny-gqa", dtype=torch.float32, device="cpu")
    data = json.loads((shipped_folder("tiny-gqa") / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    a, b = "Ġthe", "Ġand"
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|end|>", "eos_token": "<|end|>"}))
    with pytest.raises(ValueError, match="has not the tokenizer of this model: give the folder or .gguf file it was"):
        write_gguf(lm, tmp_path / "m.gguf", source=tmp_path)
    small = LM(small_model(), None, "small")
    with pytest.raises(ValueError, match="has not the tokenizer of this model"):
        write_gguf(small, tmp_path / "m.gguf", source=shipped_folder("tiny-gqa") / "..")
    assert not list(tmp_path.glob("*.gguf"))
