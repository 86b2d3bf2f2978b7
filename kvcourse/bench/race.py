"""Let contestants take turns: each waits in its own process, and one works at a time.

A machine is not equally fast all the time. Whoever measures one program to its end and then the next compares two
moments as well; in turns, a slow moment meets everybody.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from tqdm.auto import tqdm

from kvcourse.bench.contestants import CONTEXTS, Contestant
from kvcourse.bench.process import Worker, WorkerError


@dataclass
class Sample:
    """One run of one row: the new tokens and when each arrived, in seconds."""

    context: int
    round: int
    tokens: list[int]
    arrivals: list[float]
    step_bytes: int  # that a decode step at this context must move at least
    peak_bytes: int | None  # of the process so far
    compilations: int = 0  # so far; none of them in this run
    compile_seconds: float = 0.0


@dataclass(eq=False)
class Row:
    """What became of one contestant; `error` says why there is nothing more, or is None."""

    title: str
    about: dict = field(default_factory=dict)  # what it said when it was ready
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None
    exact: bool = True  # other tokens are wrong ones
    texts: int = 1  # written at a time
    perplexity: float | None = None


@dataclass
class Difference:
    """Where a row wrote another token than the rows it is held against."""

    title: str
    other: str
    context: int
    place: int  # among the new tokens; 0 is the first
    token: int
    other_token: int
    lead: float | None  # by how many logits the best token was ahead of the second best there
    wrong: bool = True  # False for a row that computes with other numbers, and may differ


def learn_facts(model: str) -> dict:
    """`Contestant.facts` of the model, from a process that does no more than load it. Raises `RuntimeError` when that
    fails: then no row can be measured."""
    worker = Contestant.start(model)
    try:
        worker.answer()
        return worker.ask(measure="facts")
    except WorkerError as error:
        raise RuntimeError(f"Nothing could be measured: {error}") from None
    finally:
        worker.close()


class Race:
    """All rounds of all rows. Afterwards `rows`, `contexts` and `differences` say what happened.

    A row that fails says so in its `error` and the others go on; `RuntimeError` when none is left.
    """

    def __init__(self, contestants: list[type[Contestant]], model: str, facts: dict, rounds: int, most_gaps: int):
        self.contestants, self.model, self.facts = contestants, model, facts
        self.rounds, self.most_gaps = rounds, most_gaps
        self.rows = [Row(one.title, exact=one.exact, texts=one.texts) for one in contestants]
        self.workers: dict[str, Worker] = {}  # by title
        self.contexts: list[int] = []
        self.differences: list[Difference] = []

    def run(self) -> None:
        self.choose_contexts()
        with ExitStack() as stack, tqdm(total=2 * len(self.rows), unit="run", leave=False) as bar:
            for row, contestant in zip(self.rows, self.contestants, strict=True):
                bar.set_description(f"{row.title}: loading")
                row.about = self.attempt(row, lambda contestant=contestant: self.begin(contestant, stack)) or {}
                bar.update()
            self.require_somebody()
            bar.total += self.rounds * len(self.contexts) * len(self.rows)
            for number in range(self.rounds):
                for context in self.contexts:
                    for row in rotated(self.rows, number):
                        bar.set_description(f"round {number + 1}, {row.title}, context {context:,}")
                        self.measure(row, number, context)
                        bar.update()
            for row in self.rows:
                bar.set_description(f"{row.title}: perplexity")
                answer = self.ask(row, measure="perplexity")
                row.perplexity = answer and answer["perplexity"]
                bar.update()
            self.require_somebody()
            self.compare()

    def begin(self, contestant: type[Contestant], stack: ExitStack) -> dict:
        """Start the contestant's process, and wait until it is ready."""
        worker = self.workers[contestant.title] = contestant.start(self.model)
        stack.callback(worker.close)
        return worker.answer()

    def ask(self, row: Row, **request) -> dict | None:
        return self.attempt(row, lambda: self.workers[row.title].ask(**request))

    def attempt(self, row: Row, call: Callable[[], dict]) -> dict | None:
        """The answer of the row's worker, or None when there is none (any more)."""
        if row.error is not None:
            return None
        try:
            return call()
        except WorkerError as error:
            row.error = str(error)

    def require_somebody(self) -> None:
        """Raise `RuntimeError` when every row has failed."""
        if all(row.error is not None for row in self.rows):
            causes = dict.fromkeys(row.error for row in self.rows)
            raise RuntimeError(f"Nothing could be measured: {'; '.join(causes)}")

    def choose_contexts(self) -> None:
        """Those that fit the model. Raises `RuntimeError` when none does."""
        limit = self.facts["max_seq_len"]
        self.contexts = [context for context in CONTEXTS if max(context, 1) + self.most_gaps <= limit]
        if not self.contexts:
            raise RuntimeError(f"{self.model} has a context of {limit} tokens: too short to measure anything.")

    def prompt(self, context: int) -> list[int]:
        """The text before the measured tokens."""
        return self.facts["text"][: max(context, 1)]

    def measure(self, row: Row, number: int, context: int) -> None:
        answer = self.ask(row, measure="speed", prompt=self.prompt(context), most_gaps=self.most_gaps)
        if answer is not None:
            row.samples.append(Sample(context, number, **answer))

    def compare(self) -> None:
        """Find where rows disagree. Each is held against the longest text that the exact rows before it agreed on, and
        the others against what all exact rows agreed on; the first of the others, if there is no exact one."""
        for context in self.contexts:
            agreed: tuple[Row, list[int]] | None = None
            for row in sorted(self.rows, key=lambda row: not row.exact):
                for sample in (sample for sample in row.samples if sample.context == context):
                    agreed = agreed or (row, sample.tokens)
                    place = first_difference(agreed[1], sample.tokens)
                    if place is not None:
                        self.differences.append(self.difference(row, sample, *agreed, place))
                        break
                    if len(sample.tokens) > len(agreed[1]):
                        agreed = (row, sample.tokens)

    def difference(self, row: Row, sample: Sample, other: Row, tokens: list[int], place: int) -> Difference:
        answer = self.ask(other, measure="lead", prompt=self.prompt(sample.context) + tokens[:place]) or {}
        found = row.title, other.title, sample.context, place, sample.tokens[place], tokens[place]
        return Difference(*found, answer.get("lead"), wrong=row.exact)


def rotated(rows: list[Row], by: int) -> list[Row]:
    """Another row begins each round, so that none always works in the wake of the same other one."""
    by %= len(rows)
    return rows[by:] + rows[:by]


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first place where the two disagree, or None; where one has ended they do not."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
