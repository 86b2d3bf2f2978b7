"""Tokenizers in GGUF metadata against llama.cpp and SentencePiece: every way to cut, scores, defaults, bad files."""

import pytest
from gguf_files import tokenizer_fields
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import CUTS, SPM, TEXTS, cut_fields, sentencepiece_fields

from kvcourse.tokenizer import Tokenizer
from kvcourse.tokenizer.pretokenizers import CUTS as KNOWN

FAMILIES = ["default", "gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "deepseek-coder", "tekken"]
ALIASES = {"llama-v3": "llama-bpe", "llama3": "llama-bpe", "falcon3": "llama-bpe", "pixtral": "llama-bpe"}
ALIASES |= {"deepseek-r1-qwen": "qwen2"}
# Where the model's own tokenizer.json differs from llama.cpp: Qwen2 joins accents with letters (NFC), and Tekken's
# pattern takes marks for parts of words.
MARKS = {"qwen2": ["cafe\u0301 E\u0301cole n\u0303"], "tekken": ["cafe\u0301 E\u0301cole n\u0303", "हिन्दी पाठ"]}
SENTENCES = Tokenizer.from_gguf(sentencepiece_fields(add_bos_token=False))


def pieces(tokenizer, text):
    return [tokenizer.bytes_of(id).decode() for id in tokenizer.encode(text)]


# --- byte-level BPE: how text is cut ---


@pytest.mark.parametrize("pre", FAMILIES)
def test_ids_are_those_of_llama_cpp(pre):
    tokenizer = Tokenizer.from_gguf(cut_fields(pre, add_bos_token=False))
    for text, ids in zip(CUTS["texts"], CUTS[pre], strict=True):
        if text not in MARKS.get(pre, ()):
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == text


def test_that_comparison_can_fail():
    """Every family cuts some text in another way than every other (Smaug's differs from Llama 3's in whole words
    only, which that vocabulary has none of)."""
    for a in FAMILIES:
        for b in FAMILIES:
            assert (CUTS[a] == CUTS[b]) == (a == b or {a, b} == {"llama-bpe", "smaug-bpe"})


@pytest.mark.parametrize("alias, family", ALIASES.items())
def test_other_names_for_the_same_cut(alias, family):
    tokenizer = Tokenizer.from_gguf(cut_fields(alias, add_bos_token=False))
    for text, ids in zip(CUTS["texts"], CUTS[family], strict=True):
        assert tokenizer.encode(text) == ids
    assert set(FAMILIES) | set(ALIASES) == set(KNOWN)


@pytest.mark.parametrize(
    "pre, text, words",
    [
        ("gpt-2", "it's IT'S 1234", ["it", "'s", " IT", "'", "S", " 1234"]),
        ("smollm", "a 1234", ["a", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "it's IT'S 1234", ["it", "'s", " IT", "'S", " ", "123", "4"]),
        ("llama-bpe", "it'sx IT'SX", ["it", "'s", "x", " IT", "'S", "X"]),
        ("qwen2", "it'S 12", ["it", "'S", " ", "1", "2"]),
        ("qwen2", "x!\n\n  (y)", ["x", "!\n\n", " ", " (", "y", ")"]),
        ("qwen2", "漢字，かな。 \n 가", ["漢字", "，かな", "。", " \n", " 가"]),
        ("tekken", "fooBar HTTPServer it's", ["foo", "Bar", " HTTPServer", " it", "'s"]),
        ("tekken", "ПриветМир а/\n", ["Привет", "Мир", " а", "/\n"]),
        ("default", "a<=b 12345", ["a", "<=", "b", " ", "123", "45"]),
        ("deepseek-coder", "a, b\n12", ["a", ",", " b", "\n", "1", "2"]),
    ],
)
def test_words_worked_out_by_hand(pre, text, words):
    cut = KNOWN[pre].pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


def test_qwen_joins_accents_with_their_letters():
    qwen = Tokenizer.from_gguf(cut_fields("qwen2"))
    assert qwen.encode("e\u0301") == qwen.encode("é") != Tokenizer.from_gguf(cut_fields("gpt-2")).encode("e\u0301")


@pytest.mark.parametrize("pre, whole", [("llama-bpe", True), ("tekken", True), ("smaug-bpe", False), ("qwen2", False)])
def test_a_whole_word_of_the_vocabulary_needs_no_merges(pre, whole):
    fields = cut_fields(pre, add_bos_token=False)
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "zqzqzq"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 1]
    tokenizer = Tokenizer.from_gguf(fields)
    assert pieces(tokenizer, "zqzqzq") == (["zqzqzq"] if whole else list("zqzqzq"))


def test_a_control_token_that_is_a_word_stays_text():
    fields = cut_fields("llama-bpe", add_bos_token=False)
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "zqz"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 3]
    tokenizer = Tokenizer.from_gguf(fields)
    assert pieces(tokenizer, "zqz") == ["z", "q", "z"]
    assert tokenizer.encode("zqz", special=True) == [tokenizer.vocab_size - 1]


@pytest.mark.parametrize("kind", [3, 4], ids=["control", "user-defined"])
def test_of_two_tokens_that_fit_the_longer_counts(kind):
    tokens = [*cut_fields("qwen2")["tokenizer.ggml.tokens"], "<x>", "<x><y>"]
    types = [1] * (len(tokens) - 2) + [kind] * 2
    tokenizer = Tokenizer.from_gguf(cut_fields("qwen2", tokens=tokens, token_type=types))
    n = tokenizer.vocab_size
    assert tokenizer.encode("<x><y><x>", special=True) == [n - 1, n - 2]


# --- SentencePiece ---


def test_ids_are_those_of_sentencepiece_and_llama_cpp():
    for text, ids in zip(TEXTS, SPM["ids"], strict=True):
        assert SENTENCES.encode(text) == ids
        assert SENTENCES.decode(ids) == text
    bare = Tokenizer.from_gguf(sentencepiece_fields(add_bos_token=False, add_space_prefix=False))
    for text, ids in zip(TEXTS, SPM["without_prefix"], strict=True):
        assert bare.encode(text) == ids
        assert bare.decode(ids) == text
    assert SPM["ids"] != SPM["without_prefix"]


def test_scores_decide_what_is_merged():
    """ "abc" with tokens "ab" and "bc": the better score wins; of equals the left one."""
    for scores, expected in (([0, -1], ["ab", "c"]), ([-1, 0], ["a", "bc"]), ([-1, -1], ["ab", "c"])):
        tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc"]
        fields = {"tokens": tokens, "scores": [0.0] * 6 + scores, "token_type": [2, 3, 3, 1, 1, 1, 1, 1]}
        tokenizer = Tokenizer.from_gguf(sentencepiece_fields(**fields, add_bos_token=False, add_space_prefix=False))
        assert pieces(tokenizer, "abc") == expected


def slow_merge(text, scores):
    """The obvious version: look at all neighbors, merge the best, again."""
    pieces = list(text)
    while best := [(-scores[a + b], i) for i, (a, b) in enumerate(zip(pieces, pieces[1:])) if a + b in scores]:  # noqa: B905
        i = min(best)[1]
        pieces[i : i + 2] = ["".join(pieces[i : i + 2])]
    return pieces


@given(
    st.text(alphabet="ab▁", max_size=30),
    st.dictionaries(st.text(alphabet="ab▁", min_size=2, max_size=5), st.integers(-3, 0)),
)
def test_the_heap_merges_as_the_slow_version_does(text, scores):
    from kvcourse.tokenizer.sentencepiece import ScoredMerges

    assert ScoredMerges({}, scores, {}).pieces(text) == slow_merge(text, scores)


def test_characters_outside_the_vocabulary_become_bytes():
    ids = SENTENCES.encode("ɷ")
    assert [SENTENCES.tokens[id] for id in ids[-2:]] == ["<0xC9>", "<0xB7>"] and SENTENCES.decode(ids) == "ɷ"
    types = [1 if kind == 6 else kind for kind in SPM["types"]]  # partner: the same names, but not marked as bytes
    with pytest.raises(ValueError, match="no token for 'ɷ'"):
        Tokenizer.from_gguf(sentencepiece_fields(token_type=types)).encode("ɷ")


def test_neither_control_tokens_nor_bytes_are_merged_from_text():
    """A vocabulary in which merging could make "<s>" and "<0x0A>" from their letters."""
    tokens = [*SPM["tokens"], "<s", "s>", "<0", "x0", "A>", "<0x0", "<0x", "x0A>", "0A>", "<", "0", ">"]
    new = [token for token in tokens[len(SPM["tokens"]) :] if token not in SPM["tokens"]]
    count = len(new)
    fields = {
        "tokens": SPM["tokens"] + new,
        "scores": SPM["scores"] + [1.0] * count,
        "token_type": SPM["types"] + [1] * count,
    }
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields(**fields, add_bos_token=False))
    ids = tokenizer.encode("<s><0x0A>")
    assert not {SPM["types"][id] for id in ids if id < len(SPM["types"])} & {3, 6}
    assert tokenizer.decode(ids) == "<s><0x0A>"


def test_a_space_comes_before_text_after_a_control_token_too():
    """As in llama.cpp: each stretch of text between control tokens begins with the added space."""
    ids = SENTENCES.encode("<s>the</s>the", special=True)
    assert ids == [1, *SENTENCES.encode("the"), 2, *SENTENCES.encode("the")]
    assert SENTENCES.decode(ids) == "the the" and SENTENCES.decode(ids, special=True) == "<s> the</s> the"


# --- what is put around a text ---


@pytest.mark.parametrize(
    "fields, before, after",
    [
        (cut_fields("llama-bpe"), "<|begin|>", ""),  # llama.cpp's defaults where the file is silent
        (cut_fields("tekken"), "<|begin|>", ""),
        (cut_fields("qwen2"), "", ""),
        (cut_fields("gpt-2"), "", ""),
        (sentencepiece_fields(), "<s>", ""),
        (cut_fields("llama-bpe", add_bos_token=False), "", ""),
        (cut_fields("qwen2", add_bos_token=True), "<|begin|>", ""),
        (sentencepiece_fields(add_bos_token=False, add_eos_token=True), "", "</s>"),
        (sentencepiece_fields(bos_token_id=2), "</s>", ""),
    ],
)
def test_begin_and_end_tokens(fields, before, after):
    tokenizer = Tokenizer.from_gguf(fields)
    edges = [tokenizer.tokens[id] for id in tokenizer.encode("")]
    assert edges == [token for token in (before, after) if token]
    bare = Tokenizer.from_gguf(
        fields | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False}
    ).encode("the")
    ids = tokenizer.encode("the")
    assert bare and [tokenizer.tokens[id] for id in ids if id not in bare] == edges
    assert tokenizer.decode(ids) == "the"


def test_a_chat_gets_no_second_beginning():
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields())
    ids = tokenizer.chat([{"role": "user", "content": "hi <s> </s>"}])
    assert [id for id in ids if id < 3] == [1] and tokenizer.encode("x")[0] == 1
    assert tokenizer.decode(ids) == "[INST] hi <s> </s> [/INST]"


def test_ends_of_turn_count_though_the_file_names_only_the_end_of_text():
    tokens = [*cut_fields("llama-bpe")["tokenizer.ggml.tokens"], "<|eot_id|>", "<|eom_id|>"]
    n = len(tokens)
    types = [1] * (n - 4) + [3] * 4
    assert Tokenizer.from_gguf(cut_fields("llama-bpe", tokens=tokens, token_type=types)).stop_ids == {
        n - 3,
        n - 2,
        n - 1,
    }
    types[-2:] = [1, 1]  # partner: ordinary text of that name ends nothing
    assert Tokenizer.from_gguf(cut_fields("llama-bpe", tokens=tokens, token_type=types)).stop_ids == {n - 3}


# --- files without a tokenizer, and bad ones ---


def test_no_tokenizer_is_none():
    for metadata in ({}, {"general.architecture": "llama"}, {"tokenizer.ggml.model": "none"}):
        assert Tokenizer.from_gguf(metadata) is None


@pytest.mark.parametrize(
    "fields, words",
    [
        (sentencepiece_fields(model="t5"), "model 't5' is not supported.*gpt2 and llama"),
        (sentencepiece_fields(scores=None), "no tokenizer.ggml.scores"),
        (sentencepiece_fields(scores=[0.0]), "620 tokens.*scores has 1 entries"),
        (sentencepiece_fields(token_type=[1]), "620 tokens.*token_type has 1 entries"),
        (sentencepiece_fields(token_type=[6] * 620), "'<unk>' is marked as a byte"),
        (sentencepiece_fields(bos_token_id=620), "bos_token_id is 620, but the file has only 620 tokens"),
        (sentencepiece_fields(eot_token_id=9999), "eot_token_id is 9999"),
        (
            cut_fields("qwen2", bos_token_id=None, add_bos_token=True),
            "at the BOS, but has no tokenizer.ggml.bos_token_id",
        ),
        (cut_fields("llama-bpe", bos_token_id=None), "no tokenizer.ggml.bos_token_id"),
        (cut_fields("qwen2", merges=["a b", "nonsense"]), "merges do not fit"),
        (cut_fields("qwen2", merges=["zzz qqq"]), "merges do not fit"),
        (cut_fields("mystery"), "'mystery' is not supported.*llama-bpe.*qwen2.*tekken"),
    ],
)
def test_bad_metadata_say_what_is_wrong(fields, words):
    with pytest.raises(ValueError, match=words):
        Tokenizer.from_gguf(fields)


def test_a_byte_without_a_token_is_named():
    fields = tokenizer_fields()
    fields["tokenizer.ggml.tokens"] = [f"x{t}" if t == "!" else t for t in fields["tokenizer.ggml.tokens"]]
    with pytest.raises(ValueError, match="no token for '!'"):
        Tokenizer.from_gguf(fields).encode("a!")
