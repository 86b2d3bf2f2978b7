"""Probes: their distance counted by hand in the ids, the same for several tokenizers, and what cannot be asked."""

import re
from collections import Counter
from functools import cache
from itertools import islice

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from kvcourse.training.stories.facts import KINDS, Fact
from kvcourse.training.stories.page import Page, split_of
from kvcourse.training.stories.probes import Counter as Counting
from kvcourse.training.stories.probes import probes
from kvcourse.training.stories.tales import Plan, stories
from kvcourse.training.stories.words import capital, vocabulary

KIND = {kind.name: kind for kind in KINDS}


@cache
def byte_level(vocab_size: int) -> Library:
    texts = [story.text for story in islice(stories("train", 1, Plan(60, 4, 4, framed=False)), 1200)]
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    return library


class ByLibrary:
    """A byte-level BPE with what probes need of the course's Tokenizer. Id 0 begins a text."""

    def __init__(self, vocab_size: int, before: tuple = (0,), after: tuple = ()):
        self.library, self.before, self.after = byte_level(vocab_size), list(before), list(after)

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

    before, after = (), ()

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
        assert "?" in text or distance < 48  # there the question may be left out
        assert split_of(text + answer) == "test"
        assert tokenizer.encode(text + answer) == probe.prompt + probe.answer, "it reads as it would in a story"


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


# --- what can be had without looking anything up ---------------------------------------------------------------------


def stated(kind, text):
    """(key, answer) of each statement of a kind, in order."""
    answers = "|".join(vocabulary()[kind.answers])
    pattern = kind.statement.format(key=r"(\w+)", answer=rf"({answers})\b")
    return re.findall(pattern.replace("the ", "[Tt]he ", 1), text)


@pytest.mark.parametrize("distance", [16, 32, 64, 200])
def test_rivals_are_counted(tokenizer, distance):
    for probe in some(tokenizer, distance, 60):
        text, answer = tokenizer.decode(probe.prompt), tokenizer.decode(probe.answer).strip()
        facts = stated(KIND[probe.kind], text)
        (place,) = (i for i, fact in enumerate(facts) if fact[1] == answer)
        assert (probe.rivals, probe.later) == (len(facts) - 1, len(facts) - 1 - place)
        start = KIND[probe.kind].statement.partition("{answer}")[0].format(key=facts[place][0])
        assert text.lower().endswith(start.strip().lower())


@pytest.mark.parametrize("distance", [32, 64, 200])
def test_a_fact_stands_as_often_in_each_place_among_those_of_its_kind(tokenizer, distance):
    """Two or four of a kind: the counts lie within four standard errors."""
    places = Counter((probe.rivals, probe.later) for probe in some(tokenizer, distance, 200))
    assert set(places) == {(1, 0), (1, 1), (3, 0), (3, 1), (3, 2), (3, 3)}
    for rivals in (1, 3):
        asked = sum(places[rivals, later] for later in range(rivals + 1))
        share = 1 / (rivals + 1)
        error = (share * (1 - share) / asked) ** 0.5
        assert all(abs(places[rivals, later] / asked - share) < 4 * error for later in range(rivals + 1))


def test_near_questions_have_later_rivals_where_they_fit(tokenizer):
    latest = sum(probe.later == 0 for probe in some(tokenizer, 16, 200))
    assert 100 < latest < 160  # of 200; it would be 75 were there room


def test_near_facts_are_said_in_the_shortest_way(tokenizer):
    longer = "Everyone knew that|as everyone knew|told .* that|heard that|Remember that|that was that|Did you know"
    near, far = ([tokenizer.decode(probe.prompt) for probe in some(tokenizer, distance, 20)] for distance in (47, 48))
    assert not any(re.search(longer, text) for text in near)
    assert sum(bool(re.search(longer, text)) for text in far) >= 18  # where every fact was drawn short, none is there


def test_the_answer_is_said_once(tokenizer):
    """Kinds share answers, and owners the names of people: the same word may not stand there as another's."""
    kinds = set()
    for probe in some(tokenizer, 100, 150):
        answer = tokenizer.decode(probe.answer).strip()
        assert len(re.findall(rf"\b{answer}\b", tokenizer.decode(probe.prompt))) == 1
        kinds.add(probe.kind)
    assert {"owner", "color", "dress", "price", "amount", "place", "journey"} <= kinds


@pytest.mark.parametrize(
    ("asked", "other", "good"),
    [
        (("price", "lamp", "five"), ("amount", "Mia", "seven"), True),
        (("price", "lamp", "five"), ("amount", "Mia", "five"), False),  # another kind's answer
        (("owner", "lamp", "Mia"), ("amount", "Eva", "five"), True),
        (("owner", "lamp", "Mia"), ("amount", "Mia", "five"), False),  # someone's name
    ],
)
def test_a_page_with_the_answer_as_another_s_is_no_probe(tokenizer, asked, other, good):
    page = Page()
    fact, rival = (Fact(KIND[kind], key, answer) for kind, key, answer in (asked, other))
    for subject, again in ((fact, False), (rival, False), (fact, True)):
        page.add(f"{capital(subject.sentence)}.", subject, asked=again)
    assert bool(Counting(tokenizer).probe(page, 0, 0)) == good


# --- numbers of facts, lengths, tokenizers ---------------------------------------------------------------------------


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
    plain, around = ByLibrary(2000, before=()), ByLibrary(2000, before=(7, 8), after=(9,))
    for probe in some(plain, 64):
        assert 0 not in probe.prompt
    for probe in some(around, 64):
        assert probe.prompt[:2] == [7, 8] and probe.prompt[2] != 7 and 9 not in probe.answer


def test_probes_repeat_with_the_seed(tokenizer):
    assert some(tokenizer, 64) == some(tokenizer, 64)
    assert some(tokenizer, 64) != some(tokenizer, 64, seed=1)
    assert some(tokenizer, 64) != some(tokenizer, 64, split="validation")
    assert len({tuple(probe.prompt) for probe in some(tokenizer, 64, 50)}) == 50


@pytest.mark.parametrize("distance", [1, 11, 233, 1000])
def test_impossible_distances(tokenizer, distance):
    with pytest.raises(ValueError, match=f"distance={distance} must lie between 12 and 232, for stories of 256 tokens"):
        probes(tokenizer, distance)


def test_other_bad_input(tokenizer):
    with pytest.raises(ValueError, match="'dev' is unknown"):
        probes(tokenizer, 64, split="dev")
    with pytest.raises(ValueError, match="facts=25 must be at most 24"):
        probes(tokenizer, 64, facts=25)
    with pytest.raises(ValueError, match="A context of 35 tokens is too short .*it takes at least 36"):
        probes(tokenizer, 12, longest=35)
    probes(tokenizer, 12, longest=36)
    wrong = [{"distance": -1}, {"distance": 64.0}, {"longest": 256.0}, {"facts": 0}, {"facts": True}, {"seed": "x"}]
    for given in [*wrong, {"seed": None}, {"seed": -1}]:
        with pytest.raises(ValueError, match=f"{next(iter(given))}=.* must be a whole number of at least"):
            probes(**{"tokenizer": tokenizer, "distance": 64} | given)


def test_a_distance_that_this_tokenizer_never_has():
    with pytest.raises(ValueError, match="No story of 4 facts and 256 tokens asks over a distance of 12 tokens"):
        next(probes(ByLibrary(257), 12))  # characters
