"""Questions at an exact distance, to measure what a model remembers.

A probe is a story that stops just before an answer: an opening, a few facts, other sentences until the fact asked for
lies exactly as far back as wanted, then the question. A model is right when greedy decoding writes the whole answer.

Who has not read the key may still name some fact of the kind asked for, so it must not be always the latest, or the
first: how many facts of the kind are stated after it is drawn evenly from what fits. Little fits at short distances,
though facts are said and asked for in the shortest way there; each probe tells what such a guess would give.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from kvcourse.require import require_whole
from kvcourse.tokenizer import Tokenizer
from kvcourse.training.stories.facts import MOST_FACTS, Fact, ask, draw_facts, state
from kvcourse.training.stories.page import Page, check_split, split_of, without_brackets
from kvcourse.training.stories.sentences import Scene
from kvcourse.training.stories.shapes import SHAPES

NEAREST = 12  # tokens: a question alone takes about so many
MARGIN = 24  # tokens: the beginning of a text and the shortest statement
ENDS = 6  # tokens: what starts a text, and an answer, at most
SHORTEST = 4  # tokens: no sentence is shorter
PLAIN = 48  # tokens: below this distance facts and questions are as short as can be
TRIES = 300  # attempts: without one probe in so many, there is none
WAYS = 24  # of putting the parts of one attempt together


@dataclass(frozen=True)
class Probe:
    """`prompt`: ids up to the answer; `answer`: its ids; `distance`: how many tokens back it was last written.

    `rivals`: how many other facts of the same kind the prompt states; `later`: how many of these after the one asked
    for.
    """

    kind: str
    prompt: list[int]
    answer: list[int]
    distance: int
    rivals: int
    later: int


def probes(
    tokenizer: Tokenizer, distance: int, longest: int = 256, facts: int = 4, seed: int = 0, split: str = "test"
) -> Iterator[Probe]:
    """An endless stream of probes: prompt and answer together have at most `longest` tokens, `facts` facts are stated
    (of one kind or two, several of each), and the answer was last written exactly `distance` tokens before, and nowhere
    else. The same arguments give the same probes. `split` says to which stories they belong, as in `stories`.

    A prompt is what the tokenizer makes of the text, with what it puts before every text. At short distances (below 48
    tokens) the question may be left out: the fact is then begun a second time.

    Raises `ValueError` for an unknown split, numbers that are not whole, more than 24 facts, and a distance that no
    story of this length has; while the stream runs, too, when this tokenizer's texts never have that distance.
    """
    check_split(split)
    seed = require_whole("seed", seed, least=0)
    for name, value in {"distance": distance, "longest": longest, "facts": facts}.items():
        require_whole(name, value)
    if facts > MOST_FACTS:
        raise ValueError(f"facts={facts} must be at most {MOST_FACTS}.")
    if longest < NEAREST + MARGIN:
        raise ValueError(
            f"A context of {longest} tokens is too short for a story that asks for what it said: "
            f"it takes at least {NEAREST + MARGIN} tokens."
        )
    if not NEAREST <= distance <= longest - MARGIN:
        raise ValueError(
            f"distance={distance} must lie between {NEAREST} and {longest - MARGIN}, for stories of {longest} tokens."
        )
    return endless(Counter(tokenizer), distance, longest, facts, f"{split} {seed}", split)


def endless(counter: "Counter", distance: int, longest: int, facts: int, seed: str, split: str) -> Iterator[Probe]:
    plain = distance < PLAIN
    attempts = (Attempt(Random(f"probe {seed} {distance} {number}"), counter, facts, plain) for number in count())
    while True:
        some = (attempt.probe(distance, longest, split) for attempt in islice(attempts, TRIES))
        probe = next((probe for probe in some if probe), None)
        if probe is None:
            raise ValueError(
                f"No story of {facts} facts and {longest} tokens asks over a distance of {distance} tokens with "
                f"this tokenizer ({TRIES} were tried); choose another distance, or fewer facts."
            )
        yield probe


class Counter:
    """A tokenizer that counts: how many tokens a sentence adds to a text, and which place a character has."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.point = len(self.ids("."))

    def ids(self, text: str) -> list[int]:
        """The beginning of a text, but not its end."""
        ids = self.tokenizer.encode(text)
        return ids[: len(ids) - len(self.tokenizer.after)]

    def added(self, sentence: str) -> int:
        """How many more tokens a text has with this sentence."""
        return len(self.ids(f". {without_brackets(sentence)}")) - self.point

    def upto(self, sentence: str) -> int:
        """The same for the sentence up to its answer."""
        return self.added(sentence.partition(" [")[0])

    def probe(self, page: Page, rivals: int, later: int) -> Probe | None:
        """The probe that ends with the last answer of this page; None if the tokens do not fall into prompt and answer,
        the answer has other tokens than before, or its word also stands elsewhere: as the answer of another kind, or as
        someone's name."""
        question = page.questions[-1]
        start, end = question.answer
        if len(re.findall(rf"\b{page.text[start:end]}\b", page.text[:start])) > 1:
            return None
        ids = self.ids(page.text[: question.answer[1]])
        prompt, before = (self.ids(page.text[: place[0] - 1]) for place in (question.answer, question.fact))
        answer = ids[len(prompt) :]
        if ids[: len(prompt)] != prompt or ids[len(before) :][: len(answer)] != answer:
            return None
        return Probe(question.kind, prompt, answer, len(prompt) - len(before), rivals, later)


class Attempt:
    """A few facts, one of which will be asked for, and the scene they are part of."""

    def __init__(self, rng: Random, counter: Counter, facts: int, plain: bool):
        self.rng, self.counter, self.plain = rng, counter, plain
        people = max(3, min(facts, 9))  # enough that no fact is the only one of its kind, which would give it away
        self.scene = Scene(rng, cast_size=people + rng.choice((0, 1)))
        self.openings = [shape.opening for shape in SHAPES if shape.setting == self.scene.setting]
        self.known = draw_facts(rng, facts, self.scene.cast, kinds=rng.choice((1, 2)) if facts > 3 else 1)
        self.scene.forbid({word for fact in self.known for word in (fact.key, fact.answer)})
        self.statements = {fact: self.scene.say(state(fact, rng, plain)) for fact in self.known}
        self.lengths = {fact: counter.added(statement) for fact, statement in self.statements.items()}

    def probe(self, distance: int, longest: int, split: str) -> Probe | None:
        """A probe of this distance, if these facts, said and asked for in one way or another, allow one."""
        kinds = [fact.kind for fact in self.known]
        most = max(map(kinds.count, kinds))
        for later in self.rng.sample(range(most), most):
            some = (self.one_way(later, distance, longest, split) for _ in range(WAYS))
            probe = next((probe for probe in some if probe), None)
            if probe:
                return probe
        return None

    def one_way(self, later: int, distance: int, longest: int, split: str) -> Probe | None:
        """A probe with so many rivals `later` than the fact asked for; None if the parts, as drawn, do not fit."""
        subject, *others = self.rng.sample(self.known, len(self.known))
        question = self.scene.say(ask(subject, self.rng, self.plain))
        head = self.counter.upto(self.statements[subject])
        gap = distance - (self.lengths[subject] - head) - self.counter.upto(question)
        room = longest - distance - head - ENDS  # for what comes before
        lengths = [self.lengths[fact] for fact in others]
        rivals = [fact.kind is subject.kind for fact in others]
        cuts = [i for i in range(len(others) + 1) if sum(lengths[:i]) <= room and sum(lengths[i:]) <= gap]
        cuts = [i for i in cuts if sum(rivals[i:]) == later]
        if not cuts:
            return None
        cut = self.rng.choice(cuts)
        between = self.fill(gap - sum(lengths[cut:]))
        if between is None:
            return None
        after = [*((self.statements[fact], fact) for fact in others[cut:]), *between]
        page = self.page(others[:cut], subject, after, question, room - sum(lengths[:cut]), split)
        probe = page and self.counter.probe(page, sum(rivals), later)
        fits = probe and probe.distance == distance and len(probe.prompt) + len(probe.answer) <= longest
        return probe if fits else None

    def page(
        self, before: list[Fact], subject: Fact, after: list[tuple], question: str, room: int, split: str
    ) -> Page | None:
        """The parts put together in an order, and with an opening (if there is room), that make a text of `split`."""
        for _ in range(WAYS):
            page = Page()
            opening = self.scene.say(self.rng.choice(self.openings))
            if self.counter.added(opening) <= room:
                page.add(opening)
            for fact in (*before, subject):
                page.add(self.statements[fact], fact)
            for sentence, fact in self.rng.sample(after, len(after)):
                page.add(sentence, fact)
            page.add(question, subject, asked=True)
            if split_of(page.text[: page.questions[-1].answer[1]]) == split:
                return page
        return None

    def fill(self, gap: int) -> list[tuple[str, None]] | None:
        """Other sentences (and that they state no fact) of exactly `gap` tokens together."""
        chosen: list[str] = []
        near = 3 * self.counter.added(self.scene.filler())
        while gap > near:
            chosen.append(self.scene.filler())
            gap -= self.counter.added(chosen[-1])
        found = self.pair(gap)
        return None if found is None else [(sentence, None) for sentence in (*chosen, *found)]

    def pair(self, gap: int) -> list[str] | None:
        """No sentence, one or two, of `gap` tokens together."""
        lengths: dict[int, str] = {}
        for _ in range(30 * (gap > SHORTEST)):
            sentence = self.scene.filler()
            length = self.counter.added(sentence)
            if length == gap:
                return [sentence]
            if gap - length in lengths:
                return [sentence, lengths[gap - length]]
            lengths[length] = sentence
        return None if gap else []
