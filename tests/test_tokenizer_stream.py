"""What holds for every kind of tokenizer: pieces joined are the whole, text comes back, control tokens are guarded."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_files import KINDS, TEXTS, cut_fields, sentencepiece_fields, write_folder

from kvcourse.tokenizer import StreamDecoder, Tokenizer

GGUF = {
    "gguf llama-bpe": cut_fields("llama-bpe"),
    "gguf qwen2": cut_fields("qwen2"),
    "gguf sentencepiece": sentencepiece_fields(),
    "gguf sentencepiece, no space": sentencepiece_fields(add_space_prefix=False),
}
LEADING = {"first", "always", "unigram"}  # Metaspace adds no space where the text has one, so decoding takes that


@pytest.fixture(scope="module", params=[*KINDS, *GGUF])
def tokenizer(request, tmp_path_factory):
    if request.param in GGUF:
        return Tokenizer.from_gguf(GGUF[request.param])
    made = Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("kind"), request.param))
    made.kind = request.param
    return made


def stream(tokenizer, ids, **options) -> list[str]:
    decoder = StreamDecoder(tokenizer, **options)
    return [*(decoder.push(id) for id in ids), decoder.flush()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data(), special=st.booleans())
def test_pieces_joined_are_the_whole_for_any_tokens(tokenizer, data, special):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    assert "".join(stream(tokenizer, ids, special=special)) == tokenizer.decode(ids, special)


def test_texts_come_back_and_their_pieces_too(tokenizer):
    for text in TEXTS[:-1]:
        if "\u0301" in text or (getattr(tokenizer, "kind", "") in LEADING and text[0] == " "):
            continue
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids)
        assert tokenizer.decode(ids) == "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_empty_text_is_only_its_beginning(tokenizer):
    ids = tokenizer.encode("")
    assert ids == tokenizer.before and len(ids) <= 1 and tokenizer.decode(ids) == ""
    assert stream(tokenizer, ids) == [""] * (len(ids) + 1)


def test_control_tokens_in_text_stay_text(tokenizer):
    if getattr(tokenizer, "kind", "") == "unigram":
        return  # it has no way to write them: refused, see test_tokenizer_folder
    for token, id in tokenizer.control.items():
        for text in (f"a{token}b", f"{token}{token}", f"x {token} y"):
            ids = tokenizer.encode(text)
            assert not tokenizer.control_ids & set(ids[len(tokenizer.before) :])
            assert tokenizer.decode(ids) == text
            assert id in tokenizer.encode(text, special=True)


# --- SentencePiece: the space before a text, and characters in bytes ---

PIECES = Tokenizer.from_gguf(sentencepiece_fields(add_bos_token=False))
ID = {token: id for id, token in enumerate(PIECES.tokens)}


def test_the_first_space_is_left_out_and_no_other():
    ids = [ID["▁the"], ID["▁a"], ID["▁the"]]
    assert stream(PIECES, ids) == ["the", " a", " the", ""]
    assert stream(PIECES, [1, *ids]) == ["", "the", " a", " the", ""]  # control tokens do not count as a beginning
    assert stream(PIECES, [ID["▁▁"], ID["▁a"]]) == [" ", " a", ""]  # one space is the tokenizer's, one the text's
    assert stream(PIECES, [ID["a"], ID["▁a"]]) == ["a", " a", ""]
    alone = [PIECES.decode([id]) for id in ids]
    assert "".join(alone) == "theathe"  # partner: tokens decoded one by one lose their spaces


def test_bytes_become_characters_once_they_are_complete():
    ids = [ID["▁"], *(ID[f"<0x{byte:02X}>"] for byte in "é🙂".encode()), ID["a"]]
    assert stream(PIECES, ids) == ["", "", "é", "", "", "", "🙂", "a", ""]
    assert stream(PIECES, ids[:5])[-1] == "\ufffd" and PIECES.decode(ids[:5]) == "é\ufffd"


def test_a_space_that_is_a_byte_is_the_first_too():
    assert (
        stream(PIECES, [ID["<0x20>"], ID["<0x20>"], ID["a"]]) == ["", " ", "a", ""]
        and PIECES.decode([ID["<0x20>"]]) == ""
    )


def test_a_stop_string_may_begin_after_the_first_space():
    ids = PIECES.encode("the fox")
    assert "".join(stream(PIECES, ids, stop="fox")) == "the "
    assert "".join(stream(PIECES, ids, stop=" the")) == "the fox"  # the text does not begin with a space
