"""Litanies: facts said again and again, and nothing else.

    "Mia wore blue. Tom wore red. Mia wore blue. Eva wore gold. Tom wore red. ..."

The shortest text in which answers must be looked up, one in every few tokens: what a model learns lookup from first.
"""

from random import Random

from kvcourse.training.stories.facts import KINDS, draw_facts
from kvcourse.training.stories.page import Page, Story
from kvcourse.training.stories.tales import Plan
from kvcourse.training.stories.words import capital, vocabulary

NEW = 0.45  # how often a sentence says something new, while there is something new


def litany(rng: Random, facts: int = 5, sentences: int = 16, kinds: int = 2, cast: int = 4, among=KINDS) -> Story:
    """Up to `facts` facts, of `kinds` of the kinds `among`, in so many `sentences`: two new ones first, then new ones
    between old ones said again, which are the questions of this story. `cast` is the number of people.

    Raises `ValueError` for less than one sentence, and for numbers of facts, kinds or people that no story can have.
    """
    for name, value in {"sentences": sentences, "facts": facts}.items():
        if value < 1:
            raise ValueError(f"litany({name}={value}) must be at least 1.")
    Plan(facts=facts, questions=0, kinds=kinds, cast=cast)  # checks the others
    unsaid = draw_facts(rng, facts, tuple(rng.sample(vocabulary()["names"], cast)), kinds, among)
    said, page = [], Page()
    for _ in range(sentences):
        new = bool(unsaid) and (len(said) < 2 or rng.random() < NEW)
        if new:
            said.append(unsaid.pop())
        fact = said[-1] if new else rng.choice(said)
        page.add(f"{capital(fact.sentence)}.", fact, asked=not new)
    return page.story()
