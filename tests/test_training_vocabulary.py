"""The recipe's tokenizer: any text comes back exactly, and the words to be looked up are single tokens."""

import json
import os
import subprocess
import sys
from hashlib import sha256
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvcourse as kv
from kvcourse.tokenizer import Tokenizer
from kvcourse.training.curriculum import Stage, plan, write
from kvcourse.training.export import export
from kvcourse.training.recipe import Recipe, train_tokenizer_of
from kvcourse.training.rows import encode_story
from kvcourse.training.stories.facts import KINDS
from kvcourse.training.stories.tales import Plan, make_story
from kvcourse.training.stories.words import vocabulary
from kvcourse.training.vocabulary import train_tokenizer

RECIPE = Recipe()
END = "<|end|>"
TEXTS = ["Mia wore blue. Tom wore red.", "Mia wore blue. Eva wore gold.", "Where was the key? The key was in the barn."]


@pytest.fixture(scope="module")
def library():
    """The recipe's own, as the `tokenizers` library runs it."""
    return train_tokenizer_of(RECIPE)


@pytest.fixture(scope="module")
def folder(library, tmp_path_factory):
    """A model exported with it."""
    config = kv.ModelConfig(vocab_size=2000, n_layers=1, n_heads=1, d_model=2, d_ff=1, tie_embeddings=True)
    model = kv.Transformer(config, "cpu", torch.float32)
    return export(model, library, tmp_path_factory.mktemp("tiny"), {}, [])


@pytest.fixture(scope="module")
def tokenizer(folder):
    """The same from the exported folder, as the course runs it."""
    return Tokenizer.from_folder(folder)


def texts(test):
    """Any text, and some that are easily lost."""
    for text in (
        "\n",
        "\x00\x01\x7f\x85",
        "  two  spaces, at both ends  ",
        "one\r\n\r\ttwo\u2028\u00a0\u3000",
        "\u00e9 and e\u0301",  # the same to look at
        "\ufeff\u200d\U000e0001\U0010ffff",
        "\U0001f469\u200d\U0001f4bb \u4f60\u597d \u0645\u0631\u062d\u0628\u0627",
        "don't DON'T \u2019s 1234567890",
        END,
        f"a{END}b{END}{END} <|end|",
    ):
        test = example(text)(test)
    return settings(max_examples=200, deadline=None)(given(st.text())(test))


# --- any text --------------------------------------------------------------------------------------------------------


@texts
def test_any_text_comes_back(library, text):
    ids = library.encode(text, add_special_tokens=False).ids
    assert library.decode(ids, skip_special_tokens=False) == text


@texts
def test_any_text_comes_back_in_the_course_s_hands_and_none_writes_the_end(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == 0 and 0 not in ids[1:] and tokenizer.decode(ids) == text


def test_texts_that_look_alike_are_told_apart(tokenizer):
    for one, other in (("\u00e9", "e\u0301"), ("a b", "a  b"), ("Mia", "mia"), ("a", " a"), ("a\n", "a\r\n")):
        assert tokenizer.encode(one) != tokenizer.encode(other)


def test_each_byte_is_a_token(tokenizer):
    assert {bytes([byte]) for byte in range(256)} <= set(tokenizer.token_bytes)
    assert len(set(tokenizer.token_bytes)) == tokenizer.vocab_size == 2000  # no two tokens are the same text


def test_the_end_is_token_0(library, tokenizer):
    assert library.token_to_id(END) == tokenizer.bos_id == tokenizer.eos_id == 0
    assert tokenizer.control == {END: 0} and tokenizer.stop_ids == {0}
    assert tokenizer.decode([0]) == "" and tokenizer.decode([0], special=True) == END


def test_only_where_it_is_asked_for_the_end_is_read_as_such(library, tokenizer):
    """The library reads it in any text, so no story may have it; to the course it is ordinary text."""
    text = f"one{END}two"
    assert tokenizer.encode(text, special=True).count(0) == library.encode(text).ids.count(0) == 2  # with the first
    assert tokenizer.encode(text).count(0) == 1
    assert not any("|" in word for words in vocabulary().values() for word in words)


def test_a_text_begins_with_the_end_of_the_one_before_here_and_in_transformers(tokenizer, folder):
    """As rows do in training: once, and nothing else is added."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("Mia wore blue.", "", "  Tom"):
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"] == theirs.encode(text)
        assert ids == [0, *theirs(text, add_special_tokens=False)["input_ids"]]
    assert tokenizer.encode("Mia") != theirs("Mia", add_special_tokens=False)["input_ids"]
    one, other = tokenizer.encode("Mia wore blue."), tokenizer.encode("Tom wore red.")
    assert theirs("Mia wore blue.", "Tom wore red.")["input_ids"] == one + other
    assert (tokenizer.before, tokenizer.after) == ([0], [])


def test_a_prompt_begins_with_it_and_a_row_has_it_once(library, folder):
    lm = kv.load_model(folder, "float32", "cpu")
    assert lm.prompt_ids("Mia wore blue.") == lm.encode("Mia wore blue.") == library.encode("Mia wore blue.").ids
    assert lm.prompt_ids("") == [0]  # from the beginning of a text
    story = make_story(Random(0), Plan())
    assert [0, *encode_story(library, story).ids] == lm.encode(story.text)


# --- what it has learned ---------------------------------------------------------------------------------------------

TRADES = set("barber builder butcher dancer doctor driver farmer hunter porter singer tailor teacher writer".split())
FOODS = {"bananas", "cookies", "mushrooms", "oranges"}
SPLIT = TRADES | FOODS | {"Button", "Smoky", "attic", "festival", "garage"}  # rarer than tokens are kept


def test_what_is_looked_up_is_one_token(library):
    """Keys and answers as they stand in a sentence, after a space; a few rare ones have two to four tokens."""
    sections = {"names" if kind.keys == "cast" else kind.keys for kind in KINDS} | {kind.answers for kind in KINDS}
    words = {word for section in sections for word in vocabulary()[section]}
    sizes = {word: len(library.encode(f" {word}", add_special_tokens=False)) for word in words}
    assert len(words) > 300
    assert {word for word, size in sizes.items() if size > 1} == SPLIT
    assert max(sizes.values()) == 4
    assert len(library.encode(" anesthesiologist", add_special_tokens=False)) > 4  # a word that no story has


@pytest.mark.parametrize("progress", [0.22, 0.3, 1.0])
def test_stories_are_about_as_long_as_rows(library, progress):
    rng, stage = Random(0), RECIPE.stage(progress)
    shares = [len(library.encode(make_story(rng, plan(rng, stage)).text).ids) / stage.length for _ in range(40)]
    assert sum(shares) / 40 == pytest.approx(1.0, abs=0.1)
    assert 0.7 < min(shares) and max(shares) < 1.5


# --- learning --------------------------------------------------------------------------------------------------------


def test_the_same_texts_give_the_same_tokenizer():
    first = train_tokenizer(TEXTS, 280).to_str()
    assert train_tokenizer(iter(TEXTS), 280).to_str() == first
    assert train_tokenizer([text.upper() for text in TEXTS], 280).to_str() != first
    assert train_tokenizer(TEXTS, 281).to_str() != first


LEARN = """
from hashlib import sha256
from random import Random
from kvcourse.training.curriculum import Stage, write
from kvcourse.training.vocabulary import train_tokenizer
rng = Random(0)
texts = [write(Stage(200, 0.3), rng).text for _ in range(80)]
print(sha256(train_tokenizer(texts, 450).to_str().encode()).hexdigest())
"""


def test_another_process_learns_the_same():
    """Python orders sets of words anew in each process, and the library its tables; threads share its work."""
    rng = Random(0)
    some = [write(Stage(200, 0.3), rng).text for _ in range(80)]
    here = sha256(train_tokenizer(some, 450).to_str().encode()).hexdigest()
    environment = os.environ | {"PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "3"}
    there = subprocess.run([sys.executable, "-c", LEARN], capture_output=True, text=True, env=environment, check=True)
    assert there.stdout.strip() == here


def test_the_commonest_pair_is_merged_first():
    """Of "hum hum hug": h and u stand together three times, hu and m twice, and after a space " hu" twice. (Byte-level
    spelling writes the space as \u0120.)"""
    merges = json.loads(train_tokenizer(["hum hum hug"], 258).to_str())["model"]["merges"]
    assert merges == [["h", "u"]]
    tokenizer = train_tokenizer(["hum hum hug"], 258)
    assert tokenizer.encode("hum hub").tokens == [END, "hu", "m", "\u0120", "hu", "b"]


def test_a_vocabulary_of_bytes_needs_no_texts():
    tokenizer = train_tokenizer([], 257)
    assert tokenizer.get_vocab_size() == 257 and len(tokenizer.encode("caf\u00e9").ids) == 1 + 5


@pytest.mark.parametrize("size", [256, 1, 0, -5])
def test_a_vocabulary_without_room_for_the_bytes_is_refused(size):
    with pytest.raises(ValueError, match=f"vocab_size={size} must be at least 257: 256 bytes and .*end"):
        train_tokenizer(iter(lambda: pytest.fail("texts were read"), None), size)


@pytest.mark.parametrize(("some", "got"), [([], 257), (["ab"], 258), (["ab", "ab ab"], 259)])
def test_too_few_texts_are_an_error(some, got):
    """ "ab" gives one merge; with " ab" there is one more."""
    with pytest.raises(ValueError, match=f"The texts gave {got} of 300 tokens; give more of them"):
        train_tokenizer(some, 300)
