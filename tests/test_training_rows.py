"""Rows of token ids: the stories in them, and the places and distances of answers, recounted from the text."""

import re
from bisect import bisect_right
from hashlib import sha256
from itertools import accumulate
from random import Random

import pytest
import torch

from kvcourse.training.curriculum import Stage, write
from kvcourse.training.rows import Asked, Row, make_batch, make_row
from kvcourse.training.stories.facts import KINDS
from kvcourse.training.stories.page import Question, Story
from kvcourse.training.vocabulary import train_tokenizer

END = 0
STAGES = {"litanies": Stage(64, 1.0), "short": Stage(128, 0.4, dense=0.8, plain=0.5), "long": Stage(400, 0.1)}
BRIDGES = {kind.statement.partition("{key}")[2].partition("{answer}")[0] for kind in KINDS}
UP_TO_ANSWER = re.compile(rf"\w+(?:{'|'.join(map(re.escape, BRIDGES))})$")  # "Mia wore ", "axe was in the "


@pytest.fixture(scope="module")
def letters():
    """A tokenizer that has learned nothing: each byte is a token, so tokens can be counted by hand."""
    return train_tokenizer([], 257)


@pytest.fixture(scope="module")
def tokenizer():
    """A small one: many answers have two or three tokens."""
    rng = Random(0)
    return train_tokenizer([write(Stage(200, 0.3), rng).text for _ in range(120)], 500)


@pytest.fixture(scope="module", params=STAGES)
def made(request, tokenizer):
    """Rows of a stage, and for each the stories that were written for it."""
    rng, made = Random(7), []
    for _ in range(12):
        written = []

        def spied(rng, written=written):
            written.append(write(STAGES[request.param], rng))
            return written[-1]

        made.append((make_row(rng, tokenizer, 150, spied, "train"), written))
    return made


def in_train(text: str) -> bool:
    return sha256(text.encode()).digest()[0] % 5 in (0, 1, 2)


def pieces(tokenizer, ids):
    """The text of each token; the stories are plain ASCII, so each has one of its own."""
    return ["\n" if id == END else tokenizer.decode([id]) for id in ids]


def recount(tokenizer, row: Row, latest=True):
    """For each question its answer, and how many tokens before it the same statement was written."""
    ends = list(accumulate(map(len, pieces(tokenizer, row.ids))))
    text = "".join(pieces(tokenizer, row.ids))
    for asked in row.asked:
        answer = text[ends[asked.start - 1] : ends[asked.end - 1]].lstrip(" ")
        place = ends[asked.end - 1] - len(answer)
        statement = UP_TO_ANSWER.search(text[:place])[0]
        find = text.rfind if latest else text.find
        before = find(statement + answer, text.rfind("\n", 0, place), place)
        assert before >= 0, f"{statement + answer!r} was not written before"
        yield answer, asked.start - bisect_right(ends, before + len(statement))


# --- by hand ---------------------------------------------------------------------------------------------------------

TEXT = "Tom had two coins. Tom had two coins."  # of train; "two" stands at characters 8 and 27
STORY = Story(TEXT, (Question("amount", (8, 11), (27, 30)),))


def row_of(tokenizer, length, split="train"):
    return make_row(Random(0), tokenizer, length, lambda rng: STORY, split)


def test_a_row_by_hand(letters):
    row = row_of(letters, 100)
    assert row.ids[0] == row.ids[38] == row.ids[76] == END and row.ids.count(END) == 3
    assert letters.decode(row.ids[1:38]) == letters.decode(row.ids[39:76]) == TEXT
    assert letters.decode(row.ids[77:]) == TEXT[:24] and len(row.ids) == 101
    assert row.asked == [Asked(28, 31, 19), Asked(66, 69, 19)]


@pytest.mark.parametrize(("length", "asked"), [(30, [Asked(28, 31, 19)]), (29, []), (27, [])])
def test_a_question_is_there_when_its_whole_answer_is(letters, length, asked):
    """Of 29 inputs and targets, the last is the second letter of "two"."""
    row = row_of(letters, length)
    assert row.asked == asked
    assert letters.decode(row.ids[1:]) == TEXT[:length]


def test_weights_by_hand(letters):
    """The target at place i is token i + 1."""
    whole, cut = row_of(letters, 30), Row(row_of(letters, 30).ids, [])
    batch = make_batch([whole, cut], 30.0)
    assert batch.tokens.tolist() == [whole.ids, whole.ids]
    assert batch.weights.tolist() == [[1.0] * 27 + [30.0] * 3, [1.0] * 30]
    assert batch.asked == [[Asked(28, 31, 19)], []]
    assert letters.decode(batch.tokens[0, 1:][batch.weights[0] > 1].tolist()) == "two"


# --- any row ---------------------------------------------------------------------------------------------------------


def test_a_row_is_the_stories_of_its_split_one_after_another(made, tokenizer):
    left_out = 0
    for row, written in made:
        kept = [story.text for story in written if in_train(story.text)]
        left_out += len(written) - len(kept)
        assert row.ids[0] == END and len(row.ids) == 151
        text = "".join(pieces(tokenizer, row.ids))
        assert text == ("\n" + "\n".join(kept) + "\n")[: len(text)]
        assert text.count("\n") >= len(kept)  # none but the last is cut
    assert left_out  # or leaving nothing out would look the same


def answers_in(row, written, tokenizer):
    """The answers, in order, of all questions that the row's text has to their end."""
    length, place = len("".join(pieces(tokenizer, row.ids))), 1
    for story in written:
        if in_train(story.text):
            for start, end in (question.answer for question in story.questions):
                if place + end <= length:
                    yield story.text[start:end]
            place += len(story.text) + 1


def test_answers_stand_where_they_are_said_to_and_none_is_missing(made, tokenizer):
    sizes, cut = set(), 0
    for row, written in made:
        found = [tokenizer.decode(row.ids[asked.start : asked.end]).removeprefix(" ") for asked in row.asked]
        assert found == list(answers_in(row, written, tokenizer))
        assert all(asked.end <= 151 for asked in row.asked)
        cut += len(found) < sum(len(story.questions) for story in written if in_train(story.text))
        for asked, answer in zip(row.asked, found, strict=True):
            sizes.add(asked.end - asked.start)
            assert tokenizer.decode(row.ids[asked.start + 1 : asked.end + 1]).strip() != answer
    assert cut and max(sizes) > 1


def test_distances_are_those_to_the_latest_writing(made, tokenizer):
    differing = 0
    for row, _ in made:
        distances = [asked.distance for asked in row.asked]
        assert distances == [distance for _, distance in recount(tokenizer, row)]
        differing += distances != [distance for _, distance in recount(tokenizer, row, latest=False)]
    assert differing


def test_only_answers_weigh_more(made):
    rows = [row for row, _ in made]
    batch = make_batch(rows, 12.5)
    assert batch.tokens.shape == (12, 151) and batch.tokens.dtype == torch.int64
    assert batch.weights.shape == (12, 150) and batch.asked == [row.asked for row in rows]
    for weights, row in zip(batch.weights.tolist(), rows, strict=True):
        answers = {token for asked in row.asked for token in range(asked.start, asked.end)}
        assert weights == [12.5 if target in answers else 1.0 for target in range(1, 151)]
        assert len(answers) < 150
    assert any(row.asked for row in rows)


def test_another_split_has_other_stories(tokenizer):
    def texts(split):
        row = make_row(Random(1), tokenizer, 600, lambda rng: write(STAGES["short"], rng), split)
        return set("".join(pieces(tokenizer, row.ids)).split("\n")[1:-1])

    digests = {split: {sha256(text.encode()).digest()[0] % 5 for text in texts(split)} for split in ("train", "test")}
    assert digests["train"] <= {0, 1, 2} and digests["test"] == {4}
    assert texts("train") == texts("train") and not texts("train") & texts("test")
