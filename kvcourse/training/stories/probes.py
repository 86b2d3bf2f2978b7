"""Questions at an exact distance, to measure what a model remembers.

A probe is a story that stops just before an answer: an opening, a few facts, other sentences until the fact asked for
lies exactly as far back as wanted, then the question. A model is right when greedy decoding writes the whole answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from kvcourse.tokenizer import Tokenizer
from kvcourse.training.stories.facts import MOST_FACTS, Fact, ask, draw_facts, state
from kvcourse.training.stories.page import Page, check_split, split_of, without_brackets
from kvcourse.training.stories.sentences import Scene
from kvcourse.training.stories.shapes import SHAPES

NEAREST = 12  # tokens: a question alone takes about so many
MARGIN = 24  # tokens: the beginning of a text and the shortest statement
ENDS = 6  # tokens: what starts a text, and an answer, at most
SHORTEST = 4  # tokens: no sentence is shorter
TRIES = 300  # attempts: without one probe in so many, there is none
WAYS = 12  # of putting the parts of one attempt together


@dataclass(frozen=True)
class Probe:
    """`prompt`: ids up to the answer; `answer`: its ids; `distance`: how many tokens back it was last written."""

    kind: str
    prompt: list[int]
    answer: list[int]
    distance: int


def probes(
    tokenizer: Tokenizer, distance: int, longest: int = 256, facts: int = 4, seed: int = 0, split: str = "test"
) -> Iterator[Probe]:
    """An endless stream of probes: prompt and answer together have at most `longest` tokens, `facts` facts are stated
    (of one kind or two, several of each), and the answer was last written exactly `distance` tokens before. The same
    arguments give the same probes. `split` says to which stories they belong, as in `stories`.

    A prompt starts with the tokenizer's token for the beginning of a text (`bos_id`), where it has one. At the shortest
    distances only few of the ways to ask are short enough.

    Raises `ValueError` for an unknown split, a number of facts outside 1 to 24, and a distance that no story of this
    length has; while the stream runs, too, when this tokenizer's texts never have that distance.
    """
    check_split(split)
    if not 1 <= facts <= MOST_FACTS:
        raise ValueError(f"facts={facts} must lie between 1 and {MOST_FACTS}.")
    if not NEAREST <= distance <= longest - MARGIN:
        raise ValueError(
            f"distance={distance} must lie between {NEAREST} and {longest - MARGIN}, for stories of {longest} tokens."
        )
    return endless(Counter(tokenizer), distance, longest, facts, f"{split} {seed}", split)


def endless(counter: "Counter", distance: int, longest: int, facts: int, seed: str, split: str) -> Iterator[Probe]:
    attempts = (Attempt(Random(f"probe {seed} {distance} {number}"), counter, facts) for number in count())
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
        self.start = [] if tokenizer.before or tokenizer.bos_id is None else [tokenizer.bos_id]
        self.point = len(self.ids("."))

    def ids(self, text: str) -> list[int]:
        """The beginning of a text, but not its end."""
        ids = self.tokenizer.encode(text)
        return [*self.start, *ids[: len(ids) - len(self.tokenizer.after)]]

    def added(self, sentence: str) -> int:
        """How many more tokens a text has with this sentence."""
        return len(self.ids(f". {without_brackets(sentence)}")) - self.point

    def upto(self, sentence: str) -> int:
        """The same for the sentence up to its answer."""
        return self.added(sentence.partition(" [")[0])

    def probe(self, page: Page) -> Probe | None:
        """The probe that ends with the last answer of this page; None if the tokens do not fall into prompt and answer,
        or the answer has other tokens than before."""
        question = page.questions[-1]
        ids = self.ids(page.text[: question.answer[1]])
        prompt, before = (self.ids(page.text[: place[0] - 1]) for place in (question.answer, question.fact))
        answer = ids[len(prompt) :]
        if ids[: len(prompt)] != prompt or ids[len(before) :][: len(answer)] != answer:
            return None
        return Probe(question.kind, prompt, answer, len(prompt) - len(before))


class Attempt:
    """A few facts, one of which will be asked for, and the scene they are part of."""

    def __init__(self, rng: Random, counter: Counter, facts: int):
        self.rng, self.counter = rng, counter
        people = max(3, min(facts, 9))  # enough that no fact is the only one of its kind, which would give it away
        self.scene = Scene(rng, cast_size=people + rng.choice((0, 1)))
        self.openings = [shape.opening for shape in SHAPES if shape.setting == self.scene.setting]
        self.known = draw_facts(rng, facts, self.scene.cast, kinds=rng.choice((1, 2)) if facts > 3 else 1)
        self.scene.forbid({word for fact in self.known for word in (fact.key, fact.answer)})
        self.statements = {fact: self.scene.say(state(fact, rng)) for fact in self.known}
        self.lengths = {fact: counter.added(statement) for fact, statement in self.statements.items()}

    def probe(self, distance: int, longest: int, split: str) -> Probe | None:
        """A probe of this distance, if these facts, said and asked for in one way or another, allow one."""
        for _ in range(WAYS):
            subject, *others = self.rng.sample(self.known, len(self.known))
            question = self.scene.say(ask(subject, self.rng))
            head = self.counter.upto(self.statements[subject])
            gap = distance - (self.lengths[subject] - head) - self.counter.upto(question)
            room = longest - distance - head - ENDS  # for what comes before
            lengths = [self.lengths[fact] for fact in others]
            cuts = [i for i in range(len(others) + 1) if sum(lengths[:i]) <= room and sum(lengths[i:]) <= gap]
            if cuts:
                cut = self.rng.choice(cuts)
                between = self.fill(gap - sum(lengths[cut:]))
                if between is not None:
                    after = [*((self.statements[fact], fact) for fact in others[cut:]), *between]
                    page = self.page(others[:cut], subject, after, question, room - sum(lengths[:cut]), split)
                    probe = page and self.counter.probe(page)
                    if probe and probe.distance == distance and len(probe.prompt) + len(probe.answer) <= longest:
                        return probe
        return None

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
