"""Which sentences the grammar can write: all that it writes, and none with a fault in it."""

from random import Random

import pytest

from kvcourse.training.recipe import Recipe, write
from kvcourse.training.stories.grammar import sentences, writable


@pytest.mark.parametrize("progress", [0.0, 0.15, 0.3, 1.0])
def test_every_sentence_of_the_stories_can_be_written(progress):
    rng, stage = Random(3), Recipe().stage(progress)
    some = [sentence for _ in range(25) for sentence in sentences(write(stage, rng).text)]
    assert len(some) > 150
    assert [sentence for sentence in some if not writable(sentence)] == []


def test_sentences_are_told_apart():
    text = 'Mia ran. "Is it wet?" asked Tom. "No, it is dry," said Mia. What a day it was! An owl sat in a fig tree.'
    assert sentences(text) == [
        "Mia ran.",
        '"Is it wet?" asked Tom.',
        '"No, it is dry," said Mia.',
        "What a day it was!",
        "An owl sat in a fig tree.",
    ]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("At school Tom and Mia listened to the cook.", "At school Tom and Tom listened to the cook."),  # two are two
        ("An owl sat in a fig tree.", "A owl sat in a fig tree."),  # the article
        ("Tom found an old bag made of wax.", "Tom found an old bag made of waxo."),  # a word that is none
        ("Tom found an old bag made of wax.", "Tom found an old bag made of Mia."),  # a word of another kind
        ("The lamp was in the barn.", "The lamp was in the."),
        ("Where was the lamp?", "Where was the barn?"),  # nobody asks where a place is
        ("Mia wore blue, of course.", "Mia wore blue, of"),
    ],
)
def test_a_fault_is_seen(right, wrong):
    assert writable(right) and not writable(wrong)
