"""Probes: their distance counted by hand in the ids, the same for several tokenizers, and what cannot be asked."""

from itertools import islice

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from kvcourse.training.stories.facts import KINDS
from kvcourse.training.stories.page import split_of
from kvcourse.training.stories.probes import probes
from kvcourse.training.stories.tales import Plan, stories
from kvcourse.training.stories.words import vocabulary

KIND = {kind.name: kind for kind in KINDS}


class ByLibrary:
    """A byte-level BPE with what probes need of the course's Tokenizer. Id 0 starts a text."""

    def __init__(self, vocab_size: int, bos_id: int | None = 0, before: tuple = (), after: tuple = ()):
        texts = [story.text for story in islice(stories("train", 1, Plan(60, 4, 4, framed=False)), 1200)]
        self.library = Library(models.BPE())
        self.library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
        )
        self.library.train_from_iterator(texts, trainer)
        self.bos_id, self.before, self.after = bos_id, list(before), list(after)

    def encode(self, text):
        return [*self.before, *self.library.encode(text).ids, *self.after]

    def decode(self, ids):
        spelled = "".join(self.library.id_to_token(id) for id in ids if id)
        return spelled.replace("Ġ", " ")


@pytest.fixture(scope="module")
def tokenizer():
    return ByLibrary(2000)


class Words:
    """One token a word, as the crudest tokenizer; ids by order of appearance."""

    bos_id, before, after = None, (), ()

    def __init__(self):
        self.known = {}

    def encode(self, text):
        marked = text.translate({ord(mark): f" {mark} " for mark in '.,!?:"'})
        return [self.known.setdefault(word, len(self.known)) for word in marked.split()]


def some(tokenizer, distance, count=5, **options):
    return list(islice(probes(tokenizer, distance, **options), count))


@pytest.mark.parametrize("distance", [12, 13, 16, 24, 50, 64, 128, 200, 224, 232])
def test_the_distance_is_exact(tokenizer, distance):
    for probe in some(tokenizer, distance):
        ids, start = probe.prompt + probe.answer, len(probe.prompt)
        assert probe.distance == distance
        assert ids[start - distance :][: len(probe.answer)] == probe.answer, "there it was written"
        assert len(ids) <= 256 and ids[0] == 0 and 0 not in ids[1:]


@pytest.mark.parametrize("distance", [16, 64, 200])
def test_a_probe_is_a_story_that_stops_before_the_answer(tokenizer, distance):
    for probe in some(tokenizer, distance, 20):
        text, answer = tokenizer.decode(probe.prompt), tokenizer.decode(probe.answer)
        kind = KIND[probe.kind]
        assert answer[0] == " " and answer[1:] in vocabulary()[kind.answers]
        assert text.endswith(kind.statement.partition("{key}")[2].partition("{answer}")[0].rstrip())
        assert "?" in text and split_of(text + answer) == "test"
        assert tokenizer.encode(text + answer) == probe.prompt[1:] + probe.answer, "it reads as it would in a story"


def test_it_was_not_written_nearer_than_that(tokenizer):
    for probe in some(tokenizer, 100, 20):
        tail = probe.prompt[-100 + len(probe.answer) :]
        assert not any(tail[i:][: len(probe.answer)] == probe.answer for i in range(len(tail)))


def test_other_facts_of_the_kind_are_there(tokenizer):
    """Otherwise any answer in sight would be right."""
    for probe in some(tokenizer, 64, 20, facts=4):
        text = tokenizer.decode(probe.prompt)
        answers = {word for word in vocabulary()[KIND[probe.kind].answers] if f" {word}" in text}
        assert len(answers) >= 2


@pytest.mark.parametrize("facts", [1, 2, 8])
def test_any_number_of_facts(tokenizer, facts):
    assert len(some(tokenizer, 96, facts=facts)) == 5


def test_longer_contexts(tokenizer):
    for probe in some(tokenizer, 900, 3, longest=1024):
        assert probe.distance == 900 and 900 < len(probe.prompt) < 1024


def test_all_kinds_are_asked_about(tokenizer):
    assert {probe.kind for probe in some(tokenizer, 64, 150)} == KIND.keys()


def test_a_tokenizer_of_whole_words():
    for probe in some(Words(), 40, longest=128):
        assert probe.distance == 40 and len(probe.answer) == 1
        assert probe.prompt[len(probe.prompt) - 40] == probe.answer[0]


def test_a_tokenizer_of_small_pieces():
    """Nearly one token a character: answers have several tokens, and distances are exact all the same."""
    tokenizer = ByLibrary(300)
    for probe in some(tokenizer, 300, longest=1024):
        ids = probe.prompt + probe.answer
        assert len(probe.answer) > 1 and ids[len(probe.prompt) - 300 :][: len(probe.answer)] == probe.answer


def test_ids_that_a_tokenizer_puts_around_a_text():
    plain, around = ByLibrary(2000, bos_id=None), ByLibrary(2000, bos_id=7, before=(7, 8), after=(9,))
    for probe in some(plain, 64):
        assert probe.prompt[0] != 0
    for probe in some(around, 64):
        assert probe.prompt[:2] == [7, 8] and probe.prompt[2] != 7 and 9 not in probe.answer


def test_probes_repeat_with_the_seed(tokenizer):
    assert some(tokenizer, 64) == some(tokenizer, 64)
    assert some(tokenizer, 64) != some(tokenizer, 64, seed=1)
    assert some(tokenizer, 64) != some(tokenizer, 64, split="validation")
    assert len({tuple(probe.prompt) for probe in some(tokenizer, 64, 50)}) == 50


@pytest.mark.parametrize("distance", [-1, 0, 11, 233, 1000])
def test_impossible_distances(tokenizer, distance):
    with pytest.raises(ValueError, match=f"distance={distance} must lie between 12 and 232, for stories of 256 tokens"):
        probes(tokenizer, distance)


def test_other_bad_input(tokenizer):
    with pytest.raises(ValueError, match="'dev' is unknown"):
        probes(tokenizer, 64, split="dev")
    with pytest.raises(ValueError, match="facts=0 must lie between 1 and 24"):
        probes(tokenizer, 64, facts=0)
    with pytest.raises(ValueError, match="must lie between 12 and 8"):
        probes(tokenizer, 12, longest=32)


def test_a_distance_that_this_tokenizer_never_has():
    with pytest.raises(ValueError, match="No story of 4 facts and 256 tokens asks over a distance of 12 tokens"):
        next(probes(ByLibrary(280), 12))
