"""Short English stories in which facts stated early are asked for later.

    story = make_story(Random(7), Plan(words=120, facts=4, questions=4))
    story.text                      # "One wet evening ... The key was in the barn. ... Where was the key? ..."
    story.questions[0].answer       # (start, end): where in the text the answer stands
    story.questions[0].fact         # (start, end): where the same answer was last written before

Everything follows from the random generator given. `stories(split, seed)` is an endless stream; a story belongs to
train, validation or test by the digest of its own text, so no story can be in two of them, whatever the seeds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from kvcourse.training.stories.facts import KINDS, MOST_FACTS, Fact, ask, draw_facts, state
from kvcourse.training.stories.page import Page, Story, check_split, split_of
from kvcourse.training.stories.sentences import Scene
from kvcourse.training.stories.shapes import REFRAINS, SHAPES
from kvcourse.training.stories.words import capital


@dataclass(frozen=True)
class Plan:
    """What a story is made of.

    - `words`: its length, about; more where its facts and questions take more;
    - `facts`, of `kinds` kinds, are stated within the share `early` of it; `questions` ask for them later;
    - `refrains`: lists that are said twice; `cast`: the number of people;
    - `framed`: with an opening, a plot and an end; otherwise facts, questions and other sentences only;
    - `plain`: facts and questions as short as can be.

    Raises `ValueError` for a plan that no story can follow.
    """

    words: int = 150
    facts: int = 4
    questions: int = 4
    refrains: int = 0
    kinds: int = 2
    cast: int = 3
    early: float = 0.4
    framed: bool = True
    plain: bool = False

    def __post_init__(self):
        limits = {"words": (1, 100_000), "facts": (0, MOST_FACTS), "questions": (0, 100_000), "refrains": (0, 1000)}
        limits |= {"kinds": (1, len(KINDS)), "cast": (2, 10), "early": (0, 1)}
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"Plan({name}={getattr(self, name)}) must lie between {least} and {most}.")
        if self.questions and not self.facts:
            raise ValueError(f"Plan(questions={self.questions}, facts=0) has nothing to ask for; give it facts.")


def stories(split: str, seed: int, plan: Plan | None = None) -> Iterator[Story]:
    """An endless stream of stories of one split. The same split, seed and plan give the same stories.

    Raises `ValueError` for an unknown split.
    """
    check_split(split)
    rng = Random(f"{split} {seed}")
    made = (make_story(rng, plan or Plan()) for _ in iter(int, 1))
    return (story for story in made if split_of(story.text) == split)


def make_story(rng: Random, plan: Plan) -> Story:
    """One story after the plan: an opening, facts early, questions later, other sentences in between, an end."""
    scene = Scene(rng, plan.cast)
    facts = draw_facts(rng, plan.facts, scene.cast, plan.kinds)
    scene.forbid({word for fact in facts for word in (fact.key, fact.answer)})
    shape = rng.choice(SHAPES)
    page = Page()
    if plan.framed:
        scene.setting = shape.setting
        page.add(scene.say(shape.opening))
    for position, write, subject in agenda(rng, plan, facts, shape.beats):
        while page.words < position:
            page.add(scene.filler())
        if write in (state, ask):
            page.add(scene.say(write(subject, rng, plan.plain)), subject, asked=write is ask)
        else:
            page.add(scene.say(subject or refrain(scene)))
    while page.words < plan.words - 8:
        page.add(scene.filler())
    if plan.framed:
        page.add(scene.say(shape.closing))
    return page.story()


def agenda(rng: Random, plan: Plan, facts: list[Fact], beats: tuple[str, ...]) -> list[tuple]:
    """(after how many words, how it is written, what), in order.

    Distances between a fact and its question are drawn half of them evenly, half evenly on a logarithmic scale, so that
    near and far are both there. Nothing is asked before it is stated.
    """
    last = max(1, plan.words - 20)
    stated = {fact: rng.uniform(0, plan.early * last) for fact in facts}
    items = [(position, state, fact) for fact, position in stated.items()]
    order = rng.sample(facts, len(facts))
    for i in range(plan.questions):
        fact = order[i % len(order)]
        room = max(2.0, last - stated[fact])
        distance = rng.uniform(1, room) if rng.random() < 0.5 else room ** rng.random()
        items.append((stated[fact] + distance, ask, fact))
    if plan.framed and plan.words >= 30 * len(beats):
        items += [((i + rng.random()) * last / len(beats), None, beat) for i, beat in enumerate(beats)]
    items += [(rng.uniform(0, last), None, None) for _ in range(plan.refrains)]
    return sorted(items, key=lambda item: item[0])


def refrain(scene: Scene) -> str:
    """A list that is said twice, word for word."""
    first = ["an? {look} {thing}"] * scene.rng.randint(2, 3)
    words = scene.say(f"{', '.join(first)} and an? {{look}} {{thing}}")
    words = words[0].lower() + words[1:]
    return scene.rng.choice(REFRAINS).replace("{list}", words).replace("{List}", capital(words))
