"""The vocabulary of the stories: inflection against hand-written forms, sections that hold together."""

import pytest

from kvcourse.training.stories.facts import KINDS
from kvcourse.training.stories.fillers import FILLERS
from kvcourse.training.stories.sentences import LASTING, PRONOUNS, SLOT, SLOTS
from kvcourse.training.stories.shapes import REFRAINS, SHAPES
from kvcourse.training.stories.words import article, ing, past, plural, sections, vocabulary

FILLED = {"name", "hero", "friend", "said", "replied", "list", *PRONOUNS["girls"]}
TEMPLATES = [
    *(template for templates in FILLERS.values() for template in templates),
    *(template for shape in SHAPES for template in (shape.opening, *shape.beats, shape.closing)),
    *REFRAINS,
]


@pytest.mark.parametrize(
    "function, cases",
    [
        (plural, "apple apples, box boxes, berry berries, knife knives, toy toys, mouse mice, branch branches"),
        (plural, "goose geese, sheep sheep, wolf wolves, child children, honey honey, calf calves, ox oxen"),
        (past, "walk walked, hop hopped, carry carried, run ran, race raced, play played, row rowed, hide hid"),
        (past, "weep wept, sing sang, shrug shrugged, tiptoe tiptoed, creep crept, unwrap unwrapped, wander wandered"),
        (ing, "walk walking, hop hopping, ride riding, tiptoe tiptoeing, tie tying, mix mixing, unwrap unwrapping"),
        (ing, "swim swimming, ski skiing, snore snoring, wait waiting, juggle juggling, whistle whistling"),
    ],
)
def test_inflection(function, cases):
    for case in cases.split(", "):
        word, form = case.split()
        assert function(word) == form


@pytest.mark.parametrize(
    "phrase",
    ["an apple", "a box", "an honest man", "a useful bag", "an hour", "a unicorn", "an unusual hat", "a ukulele"],
)
def test_article(phrase):
    assert article(phrase.partition(" ")[2]) == phrase


def test_sections_can_take_in_others():
    words = vocabulary()
    assert words["names"] == words["girls"] + words["boys"] and len(words["names"]) == 72
    assert set(words["objects"]) < set(words["things"])
    assert "ice cream" in words["foods"] and "potato" in words["foods"], "_ is a space, forms are left out"


def test_no_word_is_written_twice_in_a_section():
    assert all(words for words in vocabulary().values())
    twice = {name: sorted({e for e in all if all.count(e) > 1}) for name, all in sections().items()}
    assert not any(twice.values()), twice


def test_every_slot_of_every_template_can_be_filled():
    words = vocabulary()
    for template in TEMPLATES:
        for slot in SLOT.findall(template):
            assert slot.lower() in FILLED | LASTING.keys() | SLOTS.keys(), template
    for slot, (section, _, count) in SLOTS.items():
        assert len(words[section]) >= count, slot
    for kind, place in LASTING.values():
        assert place < SLOTS[kind][2]


def test_every_slot_is_used():
    used = {slot.lower() for template in TEMPLATES for slot in SLOT.findall(template)}
    assert SLOTS.keys() <= used and LASTING.keys() <= used


def test_there_are_many_templates_and_shapes():
    fillers = set().union(*FILLERS.values())
    assert len(fillers) >= 70 and len(SHAPES) >= 12
    assert len({shape.opening for shape in SHAPES}) == len(SHAPES)
    assert {shape.setting for shape in SHAPES} == set(FILLERS)
    talk, asked, shouted = (sum(mark in template for template in fillers) for mark in '"?!')
    assert min(talk, asked, shouted) >= 10


def test_templates_use_no_key_of_a_fact_themselves():
    """What a template says in its own words must not be a key: only drawn words can be avoided."""
    words = vocabulary()
    keys = {key for kind in KINDS if kind.keys != "cast" for key in words[kind.keys]}
    keys |= {plural(key) for key in keys} | set(words["pets"]) | set(words["days"]) | set(words["numbers"])
    said = {word.strip('.,:;!?"') for template in TEMPLATES for word in SLOT.sub("", template).split()}
    assert not said & keys
    assert "table" in said, "the words were looked at"


def test_no_other_sentence_has_the_words_of_a_statement():
    """Nobody but in a fact keeps, loves, wears or becomes something, has coins, or goes somewhere."""
    for template in TEMPLATES:
        for words in (
            "{name} had",
            "the {person} had",
            "{hero} had",
            "{friend} had",
            "kept a",
            " loved ",
            " wore ",
            " became ",
            " coins",
            "went to the",
            " cost ",
            "was called {",
            "'s ",
        ):
            assert words not in template, template
