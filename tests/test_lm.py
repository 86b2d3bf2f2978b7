"""Text in, text out: a small model of our own, and (marked smollm2) the real one."""

import checkpoints
import pytest
import torch
from gguf_files import random_state, tiny_config, tokenizer_fields, write_model
from reference import random_tokens
from tokenizer_files import byte_level_json

import kvcourse.lm as lm_module
from kvcourse.caches import WindowCache
from kvcourse.fast import compiled as compiled_file
from kvcourse.fast import make
from kvcourse.fast.compiled import CompiledTransformer
from kvcourse.generation import generate
from kvcourse.lm import load_model
from kvcourse.tokenizer import Tokenizer
from kvcourse.weights import gguf_file, hf_folder

VOCAB = len(tokenizer_fields()["tokenizer.ggml.tokens"])


def small_file(path, **changes):
    config = tiny_config(vocab_size=VOCAB)
    return write_model(path, config, random_state(config), **tokenizer_fields(**changes))


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load_model(small_file(tmp_path_factory.mktemp("lm") / "small.gguf"), torch.float32, "cpu")


def test_what_is_loaded(lm):
    assert lm.name == "small" and lm.config == lm.model.config == tiny_config(vocab_size=VOCAB)
    assert lm.model.dtype == torch.float32 and lm.model.device.type == "cpu"
    assert not any(p.is_meta or p.requires_grad for p in lm.model.parameters())
    for name, weight in random_state(lm.config).items():
        assert torch.equal(lm.model.state_dict()[name], torch.from_numpy(weight))


def test_dtype_is_the_one_asked_for(lm, tmp_path):
    half = load_model(small_file(tmp_path / "half.gguf"), torch.bfloat16, "cpu")
    assert half.model.dtype == torch.bfloat16
    assert torch.equal(half.model.norm.weight, lm.model.norm.weight.bfloat16())


def test_the_model_is_warm_after_loading(tmp_path, monkeypatch):
    warmed = []
    monkeypatch.setattr(lm_module, "warm_up", warmed.append)
    loaded = load_model(str(small_file(tmp_path / "m.gguf")), torch.float32, "cpu")
    assert warmed == [loaded.model]


def test_encode_decode_chat_are_the_tokenizer_s(lm):
    tokenizer = Tokenizer.from_gguf(tokenizer_fields())
    assert lm.encode("the fox") == tokenizer.encode("the fox")
    assert lm.decode([*lm.encode("the fox"), 2]) == "the fox"
    messages = [{"role": "user", "content": "the fox"}]
    assert lm.chat(messages) == tokenizer.chat(messages)


def test_a_stream_says_what_generate_says(lm):
    messages = [{"role": "user", "content": "the quick"}]
    expected = generate(lm.model, lm.chat(messages), 30, stop_ids=lm.tokenizer.stop_ids)
    for prompt in ("the quick", messages):
        stream = lm.stream(prompt, 30)
        text = "".join(stream)
        assert text == lm.decode(expected.tokens)
        assert stream.generation.tokens.tolist() == expected.tokens.tolist()
        assert stream.generation.prompt_length == len(lm.chat(messages))
        assert len(stream.generation.arrivals) == len(expected.tokens)
    assert "".join(lm.stream("the lazy", 30)) != text  # partner: another prompt gives another answer


def test_sampling_options_are_passed_on(lm):
    def answer(**options):
        return "".join(lm.stream("the", 20, **options))

    assert answer(temperature=1.0, seed=1) == answer(temperature=1.0, seed=1) != answer(temperature=1.0, seed=2)
    with pytest.raises(ValueError, match="temperature"):
        lm.stream("the", 20, temperature=-1.0)
    with pytest.raises(ValueError, match="top_p"):
        lm.stream("the", 20, temperature=1.0, top_p=0.0)


def test_tokens_are_made_while_the_stream_is_read(lm):
    stream = lm.stream("the", 20)
    assert stream.generation.arrivals == []
    next(stream)
    made = len(stream.generation.arrivals)
    assert 0 < made < 20
    rest = list(stream)
    assert len(stream.generation.arrivals) == 20 and rest
    assert list(stream) == []  # it was read: an answer is given once


def test_the_model_s_stop_ids_are_the_default_and_can_be_replaced(lm):
    free = lm.stream("the", 20, stop_ids=())
    list(free)
    ids = free.generation.tokens.tolist()
    assert len(ids) == 20 and free.generation.stop_reason == "length"
    cut = lm.stream("the", 20, stop_ids={ids[3]})
    text = "".join(cut)
    first = ids.index(ids[3])
    assert cut.generation.tokens.tolist() == ids[: first + 1] and cut.generation.stop_reason == "stop"
    assert text == lm.decode(ids[: first + 1])


def test_the_default_stop_id_ends_an_answer_and_gives_no_text(lm, tmp_path):
    """A file that names another end-of-text token: the one the model happens to make first."""
    free = lm.stream("the", 20, stop_ids=())
    list(free)
    first = int(free.generation.tokens[0])
    other = load_model(small_file(tmp_path / "m.gguf", ggml_eot_token_id=first), torch.float32, "cpu")
    assert other.tokenizer.stop_ids == {0, 2, first}
    stream = other.stream("the", 20)
    list(stream)
    assert stream.generation.tokens.tolist() == [first] and stream.generation.stop_reason == "stop"


def test_a_stop_string_ends_the_answer_before_it(lm):
    free = lm.stream("the", 20, stop_ids=())
    text = "".join(free)
    stop = text[2:4]
    stream = lm.stream("the", 20, stop_ids=(), stop=stop)
    assert "".join(stream) == text[: text.index(stop)]
    assert stream.generation.stop_reason == "stop" and len(stream.generation.tokens) < 20


def test_no_stop_string_may_be_said_as_none(lm):
    assert "".join(lm.stream("the", 20, stop=None)) == "".join(lm.stream("the", 20))


def test_a_stop_string_that_is_complete_only_at_the_end_counts(lm, monkeypatch):
    """The only token is the first byte of a longer character; that none follows makes it a replacement character."""
    half = lm.tokenizer.token_bytes.index(b"\xc3")

    def decode(model, texts):
        texts.rows[0].ids.append(half)
        yield

    monkeypatch.setattr(lm_module, "decode", decode)
    for stop, text, reason in (("\ufffd", "", "stop"), ("x", "\ufffd", "length")):
        stream = lm.stream("the", 1, stop=stop)
        assert ("".join(stream), stream.generation.stop_reason) == (text, reason)


def test_no_new_tokens_is_no_error(lm):
    stream = lm.stream("the", 0)
    assert list(stream) == [] and len(stream.generation.tokens) == 0


def test_without_a_chat_template_text_is_continued(tmp_path):
    lm = load_model(small_file(tmp_path / "m.gguf", chat_template=None), torch.float32, "cpu")
    stream = lm.stream("the fox", 5)
    list(stream)
    assert stream.generation.prompt_length == len(lm.encode("the fox"))
    with pytest.raises(ValueError, match="no chat template"):
        lm.stream([{"role": "user", "content": "hi"}], 5)
    with pytest.raises(ValueError, match="empty"):
        lm.stream("", 5)


def test_a_prompt_longer_than_the_context_names_both_numbers(lm):
    text = "z" * 200  # one token a letter
    with pytest.raises(ValueError, match=f"{len(lm.prompt_ids(text))} of prompt.*the model's context has room for 128"):
        lm.stream(text, 1)
    with pytest.raises(ValueError, match="128"):
        lm.stream("the", 1000)


def test_a_prompt_longer_than_the_context_fits_a_cache_without_end(lm):
    ids = lm.prompt_ids("z" * 200)
    expected = generate(lm.model, ids, 5, cache=window_cache(lm), stop_ids=lm.tokenizer.stop_ids)
    stream = lm.stream("z" * 200, 5, cache=window_cache(lm))
    list(stream)
    assert len(ids) > lm.config.max_seq_len and stream.generation.ids == expected.ids


def window_cache(lm):
    return WindowCache(lm.config, 16, 2, dtype=lm.model.dtype, device=lm.model.device)


@pytest.mark.parametrize(
    "name, words",
    [
        ("smollm2", "Did you mean 'smollm2-135m'"),
        ("SmolLM2-135M", "Did you mean 'smollm2-135m'"),
        ("smollm2-1350m", "Did you mean 'smollm2-135m'"),
        ("gpt-5", "no model 'gpt-5'. Give one of tiny-mha, tiny-gqa, tiny-mqa, tiny-window, smollm2-135m"),
        ("", "no model ''"),
    ],
)
def test_unknown_names_get_near_matches_and_the_list(name, words):
    with pytest.raises(ValueError, match=words):
        load_model(name)


def test_missing_paths_say_so(tmp_path):
    for path in (
        tmp_path / "none.gguf",
        str(tmp_path / "none.gguf"),
        "none.gguf",
        tmp_path / "folder",
        str(tmp_path / "x"),
    ):
        with pytest.raises(FileNotFoundError, match="There is no file or folder"):
            load_model(path)


@pytest.mark.parametrize("name", [None, 3, b"x", ["smollm2-135m"]])
def test_names_that_are_no_text(name):
    with pytest.raises(ValueError, match="A model is given by its name or path, a string; got "):
        load_model(name)


@pytest.mark.parametrize("name, error", [("~nosuch/x", FileNotFoundError), ("x" * 5000, ValueError)])
def test_names_that_no_file_can_have(name, error):
    with pytest.raises(error, match="There is no"):
        load_model(name)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_file_of_a_folder_is_not_the_model(tmp_path, name):
    checkpoints.save(tmp_path / "tiny", "llama")
    with pytest.raises(ValueError, match=f"{name} is one file of a checkpoint: give the folder that it is in, .*/tiny"):
        load_model(tmp_path / "tiny" / name)


def test_shapes_without_numbers_are_no_place_for_a_model(tmp_path):
    with pytest.raises(ValueError, match='device="meta" has shapes without numbers'):
        load_model(small_file(tmp_path / "m.gguf"), device="meta")


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_mistyped_folder_is_not_only_called_a_missing_model(monkeypatch, error):
    def refuse(repo_id):
        raise error("The hub says no.")

    monkeypatch.setattr(lm_module, "hub_folder", refuse)
    with pytest.raises(error, match=r"The hub says no. \(There is no folder models/llama here") as caught:
        load_model("models/llama")
    assert type(caught.value) is error


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_a_folder_without_a_tokenizer_works_with_ids(family, tmp_path):
    reference = checkpoints.save(tmp_path / "tiny", family)
    for name in (tmp_path / "tiny", str(tmp_path / "tiny") + "/"):
        lm = load_model(name, torch.float32, "cpu")
        assert lm.name == "tiny" and lm.tokenizer is None
    prompt = random_tokens(1, 20)
    expected = reference.generate(prompt, max_new_tokens=10, min_new_tokens=10, do_sample=False, pad_token_id=0)
    assert generate(lm.model, prompt[0], 10).ids == expected[0, 20:].tolist()
    for use in (lambda: lm.encode("x"), lambda: lm.decode([1]), lambda: lm.stream("x"), lambda: lm.chat([])):
        with pytest.raises(ValueError, match="tiny came without a tokenizer: give token ids to lm.model"):
            use()


def test_a_folder_with_a_tokenizer_streams_text(tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    checkpoints.save(tmp_path, "qwen2", vocab_size=VOCAB, eos_token_id=None)
    lm = load_model(tmp_path, torch.float32, "cpu")
    ids = lm.encode("Hello")
    stream = lm.stream("Hello", max_new_tokens=8, stop_ids=[])
    assert "".join(stream) == lm.decode(stream.generation.ids)
    assert stream.generation.ids == generate(lm.model, ids, 8).ids


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_ids_beyond_the_tokenizer_are_no_text(kind, tmp_path):
    """Embeddings are often padded to a round number, and nothing keeps a model from choosing one of those ids."""
    config = tiny_config(vocab_size=VOCAB + 40)
    if kind == "gguf":
        path = write_model(tmp_path / "m.gguf", config, random_state(config), **tokenizer_fields())
    else:
        path = tmp_path
        (tmp_path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
        checkpoints.save(tmp_path, "llama", vocab_size=VOCAB + 40, eos_token_id=None)
    lm = load_model(path, torch.float32, "cpu")
    text, beyond = lm.encode("the fox"), [VOCAB, VOCAB + 39]
    assert lm.decode([beyond[0], *text, beyond[1]]) == lm.decode(text)
    lm.model.lm_head.weight[beyond] = 100 * torch.tensor([[1.0], [-1.0]])  # one of the two has the highest score
    stream = lm.stream("the fox", 5, stop_ids=[])
    assert list(stream) == [] and set(stream.generation.ids) <= set(beyond)
    with pytest.raises(ValueError, match=f"from 0 to {VOCAB + 39}"):
        lm.decode([VOCAB + 40])


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_of_text_outside_the_vocabulary_is_refused(file, tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    checkpoints.save(tmp_path, "llama", vocab_size=VOCAB, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text("{}")
    checkpoints.edit_json(tmp_path / file, eos_token_id=[2, VOCAB - 1])
    assert load_model(tmp_path, torch.float32, "cpu").tokenizer.stop_ids == {2, VOCAB - 1}
    checkpoints.edit_json(tmp_path / file, eos_token_id=[2, VOCAB])
    with pytest.raises(ValueError, match=f"eos_token_id {VOCAB} in generation_config.json or config.json is outside"):
        load_model(tmp_path, torch.float32, "cpu")


def test_a_tokenizer_that_cannot_be_read_is_found_before_the_weights_are(tmp_path, monkeypatch):
    checkpoints.save(tmp_path / "folder", "llama")
    (tmp_path / "folder" / "tokenizer.model").touch()
    small_file(tmp_path / "m.gguf", ggml_pre="unheard")
    more = {"ggml_tokens": tokenizer_fields()["tokenizer.ggml.tokens"] + ["x"], "ggml_token_type": [1] * (VOCAB + 1)}
    small_file(tmp_path / "large.gguf", **more)
    for module, read in ((hf_folder, "converted"), (gguf_file, "dequantize")):
        monkeypatch.setattr(module, read, lambda *args, **options: pytest.fail("the weights were read"))
    for name, words in (("folder", "tokenizer only as"), ("m.gguf", "'unheard'"), ("large.gguf", "embeddings")):
        with pytest.raises(ValueError, match=words):
            load_model(tmp_path / name)


def test_a_gguf_file_without_a_tokenizer_works_with_ids(tmp_path):
    config = tiny_config(vocab_size=97)
    lm = load_model(write_model(tmp_path / "bare.gguf", config, random_state(config)), torch.float32, "cpu")
    assert lm.tokenizer is None and len(generate(lm.model, [1, 2], 3).ids) == 3


@pytest.mark.parametrize("name", ["owner/name", "Qwen/Qwen2.5-0.5B-Instruct", "a/b_c.d"])
def test_an_id_of_the_hub_is_downloaded(name, tmp_path, monkeypatch):
    checkpoints.save(tmp_path / "snapshot", "llama")
    asked = []
    monkeypatch.setattr(lm_module, "hub_folder", lambda repo: asked.append(repo) or tmp_path / "snapshot")
    assert load_model(name, torch.float32, "cpu").name == name and asked == [name]


def test_a_path_that_exists_comes_before_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.setattr(lm_module, "hub_folder", lambda repo: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    checkpoints.save(tmp_path / "owner" / "name", "llama")
    assert load_model("owner/name", torch.float32, "cpu").name == "name"
    for name in ("./owner/other", "owner/other/third", "../owner", "owner/model.gguf"):
        with pytest.raises(FileNotFoundError, match="There is no file or folder"):
            load_model(name)


def test_a_damaged_file_is_named(tmp_path):
    path = small_file(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="m.gguf is damaged"):
        load_model(path)


def test_a_vocabulary_larger_than_the_embeddings_is_refused(tmp_path):
    config = tiny_config(vocab_size=VOCAB - 1)
    path = write_model(tmp_path / "m.gguf", config, random_state(config), **tokenizer_fields())
    with pytest.raises(ValueError, match=f"{VOCAB} tokens but embeddings for only {VOCAB - 1}"):
        load_model(path)


@pytest.mark.smollm2
def test_smollm2_is_what_it_says(smollm2):
    c = smollm2.config
    assert smollm2.name == "smollm2-135m"
    assert (c.n_layers, c.n_heads, c.n_kv_heads, c.d_model, c.d_head, c.d_ff) == (30, 9, 3, 576, 64, 1536)
    assert (c.vocab_size, c.max_seq_len, c.rope_theta, c.norm_eps, c.tie_embeddings) == (49152, 8192, 1e5, 1e-5, True)


@pytest.mark.smollm2
def test_smollm2_answers_sensibly_and_stops(smollm2):
    """Greedy; a wrong row order of k, a wrong template or tokenizer gives word salad here."""
    stream = smollm2.stream("What is the capital of France?", 40)
    text = "".join(stream)
    assert "Paris" in text
    assert stream.generation.stop_reason == "stop" and int(stream.generation.tokens[-1]) == 2
    assert "<|im_end|>" not in text


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def not_compiled(monkeypatch):
    """As on a machine where PyTorch compiles nothing."""
    monkeypatch.setattr(compiled_file, "cannot_compile", lambda device: "Not here.")


@pytest.mark.parametrize(
    ("compiled", "dtype"),
    [(True, torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int8", torch.float32)],
)
def test_a_model_is_loaded_compiled(compiled, dtype, lm, tmp_path, not_compiled):
    fast = load_model(small_file(tmp_path / "small.gguf"), torch.float32, "cpu", compiled=compiled)
    right = make.compiled(lm, None if compiled is True else compiled)
    assert isinstance(fast.model, CompiledTransformer) and (fast.name, fast.model.dtype) == ("small", dtype)
    tokens = random_tokens(2, 20, vocab_size=VOCAB)
    assert torch.equal(fast.model(tokens), right.model(tokens))
    assert "".join(fast.stream("the", 20)) == "".join(right.stream("the", 20))


def test_compiled_is_off_unless_asked_for_and_the_model_is_warm(tmp_path, monkeypatch, not_compiled):
    warmed, file = [], small_file(tmp_path / "small.gguf")
    monkeypatch.setattr(lm_module, "warm_up", warmed.append)
    for options in ({}, {"compiled": False}):
        assert not isinstance(load_model(file, torch.float32, "cpu", **options).model, CompiledTransformer)
    fast = load_model(file, torch.float32, "cpu", compiled=True)
    assert warmed[-1] is fast.model and len(warmed) == 3


@pytest.mark.parametrize("compiled", ["int2", "", None, 1, "INT8", torch.float32])
def test_what_cannot_be_compiled_is_refused_before_anything_is_read(compiled, monkeypatch):
    monkeypatch.setattr(lm_module, "find_model", lambda name: pytest.fail("it went on"))
    with pytest.raises(ValueError, match="compiled=.* must be one of float32, .*, int4, or True: as the weights are"):
        load_model("tiny-gqa", compiled=compiled)
