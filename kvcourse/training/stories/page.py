"""A text that grows by sentences and remembers where each answer was written."""

import re
from dataclasses import dataclass
from hashlib import sha256

from kvcourse.training.stories.facts import Fact

SPLITS = ("train", "validation", "test")  # shares 3/5, 1/5, 1/5 of all texts
ANSWER = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True)
class Question:
    """Places in a text, as (start, end) of characters: the answer, and its latest writing before."""

    kind: str
    fact: tuple[int, int]
    answer: tuple[int, int]


@dataclass(frozen=True)
class Story:
    text: str
    questions: tuple[Question, ...]


class Page:
    """Sentences are added one by one; an answer in one of them stands in [brackets], which are taken away."""

    def __init__(self):
        self.sentences: list[str] = []
        self.length, self.words = 0, 0
        self.questions: list[Question] = []
        self.written: dict[Fact, tuple[int, int]] = {}  # fact -> where its answer stands, the latest time

    def add(self, sentence: str, fact: Fact | None = None, asked: bool = False) -> None:
        """Write a sentence; with a fact it states that fact, or (`asked`) asks for it and answers."""
        start = self.length + bool(self.sentences)
        match = ANSWER.search(sentence)
        plain = without_brackets(sentence)
        self.sentences.append(plain)
        self.length = start + len(plain)
        self.words += plain.count(" ") + 1
        if match:
            span = (start + match.start(), start + match.start() + len(match[1]))
            if asked:
                self.questions.append(Question(fact.kind.name, self.written[fact], span))
            self.written[fact] = span

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    def story(self) -> Story:
        return Story(self.text, tuple(self.questions))


def without_brackets(sentence: str) -> str:
    return ANSWER.sub(r"\1", sentence)


def split_of(text: str) -> str:
    """The split a text belongs to, by its digest."""
    return ("train", "train", "train", "validation", "test")[sha256(text.encode()).digest()[0] % 5]


def check_split(split: str) -> None:
    """Raises `ValueError` for a name that is no split."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; choose one of {', '.join(SPLITS)}.")
