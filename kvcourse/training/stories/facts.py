"""What a story can be asked about: kinds of facts, and the ways of stating and asking them.

A fact is one sentence, and asking for it ends in the same sentence again: the words before the answer (its key among
them) occur twice, the answer must be looked up. Answers are drawn at random and independently of everything else, so
nothing but the earlier sentence can tell. Few words stand between key and answer: the fewer, the sooner a small model
learns to look up. Answers stand in [brackets] until the story is laid out, so that their places are known exactly.

Within a kind no two answers are the same word, but kinds that share a list may have one: a place and a journey, a color
and a dress, a price and an amount; an owner may be one of the people, and a kept animal one that has a name. So in
about 1 of 200 questions of the recipe's stories the answer's word stands nearer than the fact asked for. `probes` asks
no such question.
"""

from dataclasses import dataclass
from random import Random

from kvcourse.training.stories.words import capital, vocabulary


@dataclass(frozen=True)
class Kind:
    """A kind of fact. `keys` and `answers` name sections of the vocabulary; keys may also be "cast": the people of
    the story. In `statement` the key comes before the answer, with few words between."""

    name: str
    keys: str
    answers: str
    statement: str
    question: str


@dataclass(frozen=True)
class Fact:
    kind: Kind
    key: str
    answer: str

    @property
    def sentence(self) -> str:
        """The statement, its answer in brackets, without a full stop; in lower case unless it starts with a name."""
        return self.kind.statement.format(key=self.key, answer=f"[{self.answer}]")

    @property
    def question(self) -> str:
        return self.kind.question.format(key=self.key)


KINDS = (
    Kind("place", "objects", "spots", "the {key} was in the {answer}", "Where was the {key}?"),
    Kind("owner", "objects", "names", "the {key} was {answer}'s", "Whose was the {key}?"),
    Kind("color", "objects", "colors", "the {key} was {answer}", "What color was the {key}?"),
    Kind("price", "objects", "numbers", "the {key} cost {answer} coins", "How much did the {key} cost?"),
    Kind("name", "beasts", "pets", "the {key} was called {answer}", "What was the {key} called?"),
    Kind("day", "events", "days", "the {key} was on {answer}", "When was the {key}?"),
    Kind("food", "cast", "dishes", "{key} loved {answer}", "What food did {key} love?"),
    Kind("amount", "cast", "numbers", "{key} had {answer} coins", "How many coins did {key} have?"),
    Kind("animal", "cast", "beasts", "{key} kept a {answer}", "Which animal did {key} keep?"),
    Kind("job", "cast", "trades", "{key} became a {answer}", "What did {key} become?"),
    Kind("dress", "cast", "colors", "{key} wore {answer}", "What color did {key} wear?"),
    Kind("journey", "cast", "spots", "{key} went to the {answer}", "Where did {key} go?"),
)
MOST_FACTS = 24  # in one story; with any number of kinds, and two people, the keys and answers are enough for so many

STATED = (
    "{Fact}.",
    "{Fact}.",
    "{Fact}.",
    "{Fact}, as everyone knew.",
    "{Fact}, and that was that.",
    "Everyone knew that {fact}.",
    "{name} told the {person} that {fact}.",
    "{name} heard that {fact}.",
    '"Remember that {fact}," {said} {name}.',
    '"Did you know that {fact}?" asked {name}.',
    '{name} {said}, "As you know, {fact}."',
)
ASKED = (
    "{Question} {Fact}.",
    "{Question} {Fact}, of course.",
    "Can you still tell? {Question} {Fact}.",
    '"{Question}" asked {name}. "{Fact}," {replied} the {person}.',
    '"{Question}" asked {name}. "{lead} {fact}," {said} the {person}.',
    '"{Question}" asked {name}. "{lead} {fact}," {replied} the {person} {tone}.',
    '{name} asked, "{Question}" The {person} {replied}, "{lead} {fact}."',
    "{name} forgot it. {Question} Then the {person} remembered that {fact}.",
    '"{name}, {question}" asked the {person}. "{lead} {fact}," {replied} {name}.',
)
PLAINLY_STATED = ("{Fact}.",)
PLAINLY_ASKED = ("{Question} {Fact}.", "Once more: {fact}.", "{Fact}.")  # a fact said again must be looked up too
LEADS = ("Well,", "Oh,", "Of course,", "I think that", "I know that", "We heard that", "Surely", "Why,", "Yes,")


def draw_facts(rng: Random, count: int, cast: tuple[str, ...], kinds: int = 2, among=KINDS) -> list[Fact]:
    """`count` facts of `kinds` of the kinds `among` (more where the cast is too small for so many of one kind).

    Within a kind no key and no answer occurs twice, so the kind alone does not tell the answer; a thing has one fact.
    """
    facts, left, taken = [], list(among), set()
    words = vocabulary()
    rng.shuffle(left)
    while len(facts) < count:
        kind = left.pop()
        keys = cast if kind.keys == "cast" else [key for key in words[kind.keys] if key not in taken]
        answers = words[kind.answers]
        share = min(len(keys), len(answers), count - len(facts), -(-count // kinds))
        chosen = rng.sample(keys, share), rng.sample(answers, share)
        facts += [Fact(kind, key, answer) for key, answer in zip(*chosen, strict=True)]
        taken.update(chosen[0])
    rng.shuffle(facts)
    return facts


def state(fact: Fact, rng: Random, plain: bool = False) -> str:
    """A template of `sentences` that states the fact."""
    return dress(rng.choice(PLAINLY_STATED if plain else STATED), fact, rng)


def ask(fact: Fact, rng: Random, plain: bool = False) -> str:
    """A template of `sentences` that asks for the fact and answers; a plain one may leave out the question."""
    return dress(rng.choice(PLAINLY_ASKED if plain else ASKED), fact, rng)


def dress(template: str, fact: Fact, rng: Random) -> str:
    question = fact.question
    for slot, words in {
        "{Fact}": capital(fact.sentence),
        "{fact}": fact.sentence,
        "{Question}": question,
        "{question}": question[0].lower() + question[1:],
        "{lead}": rng.choice(LEADS),
    }.items():
        template = template.replace(slot, words)
    return template
