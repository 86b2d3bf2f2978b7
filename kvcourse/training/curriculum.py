"""What is read when: bare facts first, then stories, longer and longer.

Looking up comes late or never when questions are rare. In litanies every second sentence is a lookup, and it is learned
within the first few hundred thousand tokens, from facts with one word between key and answer first, of one kind, so
that nothing but the key can tell. After that it must only be kept, while sentences vary and distances grow.
"""

from dataclasses import dataclass
from random import Random

from kvcourse.training.stories.facts import KINDS, Kind
from kvcourse.training.stories.litanies import litany
from kvcourse.training.stories.page import Story
from kvcourse.training.stories.tales import Plan, make_story

NEAR = tuple(kind for kind in KINDS if kind.name in ("owner", "color", "price", "food", "amount", "dress"))
TOKENS_PER_WORD = 1.45
FACT_WORDS, QUESTION_WORDS, PLAIN_WORDS = 8, 14, 6  # about


@dataclass(frozen=True)
class Stage:
    """What the rows of one step are: `length` tokens; `litanies`, the share of them that are litanies, of the kinds
    `among`, `kinds` at once at most (one more where a kind is about people and they are too few); in the stories, about
    the share `dense` of the words stands in facts and questions, less in short ones, and the share `plain` says and
    asks them in the shortest way. Answers weigh `answer_weight` in the loss."""

    length: int
    litanies: float
    kinds: int = 3
    among: tuple[Kind, ...] = KINDS
    dense: float = 0.5
    plain: float = 0.1
    answer_weight: float = 10.0


def write(stage: Stage, rng: Random) -> Story:
    """One story of this stage."""
    if rng.random() < stage.litanies:
        sentences = max(6, stage.length // 7 + 1)
        most = 6 if stage.length <= 96 else 10
        return litany(rng, rng.randint(3, most), sentences, rng.randint(1, stage.kinds), rng.randint(3, 6), stage.among)
    return make_story(rng, plan(rng, stage))


def plan(rng: Random, stage: Stage) -> Plan:
    """A plan for a story of about the length of a row."""
    plain = rng.random() < stage.plain
    question_words = PLAIN_WORDS if plain else QUESTION_WORDS
    framed = stage.length >= 112 and not plain
    words = round(stage.length / TOKENS_PER_WORD) - 10 * framed
    asked = max(1, round(words * stage.dense / (FACT_WORDS + question_words)))
    facts = max(2, min(8, round(asked * rng.uniform(0.6, 1.2))))
    questions = max(1, round((words * stage.dense - FACT_WORDS * facts) / question_words))
    return Plan(
        words=words,
        facts=facts,
        questions=questions,
        refrains=int(rng.random() < 0.1),
        kinds=rng.choice((1, 1, 2, 2, 3)),
        cast=rng.choice((2, 3, 3, 4)),
        early=rng.choice((0.2, 0.5, 0.8)),
        framed=framed,
        plain=plain,
    )
