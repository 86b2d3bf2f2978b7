"""Let contestants take turns: each waits in its own process, and one works at a time.

A machine is not equally fast all the time. Whoever measures one program to its end and then the next compares two
moments as well; in turns, a slow moment meets everybody.
"""

import json
import subprocess
import sys
import tempfile
import textwrap
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch
from tqdm.auto import tqdm

from kvcourse.bench.contestants import Contestant

CONTEXTS = (0, 512, 2000)  # tokens of text before the measured ones; 0 stands for a prompt of one token


@dataclass
class Sample:
    """One run of one row: the new tokens and when each arrived, in seconds."""

    context: int
    round: int
    tokens: list[int]
    arrivals: list[float]
    step_bytes: int  # that a decode step at this context must move at least
    peak_bytes: int  # of the process so far


@dataclass(eq=False)
class Row:
    """What became of one contestant; `error` says why there is nothing more, or is None."""

    title: str
    about: dict = field(default_factory=dict)  # what it said when it was ready
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None


@dataclass
class Difference:
    """Where a row wrote another token than the rows before it."""

    title: str
    other: str
    context: int
    place: int  # among the new tokens; 0 is the first
    token: int
    other_token: int
    lead: float | None  # by how many logits the best token was ahead of the second best there


class WorkerError(Exception):
    """A contestant could not go on; the message says why."""


class Worker:
    """The process of one contestant. It loads its model as soon as it is made; the first `answer` tells of it."""

    def __init__(self, contestant: type[Contestant], model: str):
        where = f"{contestant.__module__}:{contestant.__qualname__}"
        # -P: a file of the current folder must not take the place of a library with its name
        self.start([sys.executable, "-P", "-m", "kvcourse.bench.worker", where, model])

    def start(self, command: list[str], env: dict[str, str] | None = None) -> None:
        """Run `command`, which answers lines on its standard input; what it says besides goes to `messages`."""
        self.messages = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.messages,
            encoding="utf-8",
            errors="replace",
            env=env,
        )

    def ask(self, **request) -> dict:
        with suppress(OSError):  # it has ended; `answer` finds out why
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(self.cause_of_death())
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise WorkerError(f"its process said something that is no answer: {textwrap.shorten(line, 80)}")
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def cause_of_death(self) -> str:
        code = self.process.wait()
        if code == -9:
            return "its process was killed, most often for want of memory"
        self.messages.seek(0)
        last = self.messages.read().strip().split("\n")[-1]
        return f"its process ended with exit code {code}" + (f": {last}" if last else "")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.messages):
            with suppress(OSError):  # a request that was never read
                stream.close()


def check_loads(model: str) -> None:
    """Raise `RuntimeError` when a process that does no more than load the model fails: then no row can be measured."""
    worker = Worker(Contestant, model)
    try:
        worker.answer()
    except WorkerError as error:
        raise RuntimeError(f"Nothing could be measured: {error}") from None
    finally:
        worker.close()


class Race:
    """All rounds of all rows. Afterwards `rows`, `contexts` and `differences` say what happened.

    A row that fails says so in its `error` and the others go on; `RuntimeError` when none is left.
    """

    def __init__(self, contestants: list[type[Contestant]], model: str, rounds: int, most_gaps: int):
        self.contestants, self.model, self.rounds, self.most_gaps = contestants, model, rounds, most_gaps
        self.rows = [Row(contestant.title) for contestant in contestants]
        self.workers: list[Worker] = []
        self.contexts: list[int] = []
        self.differences: list[Difference] = []

    def run(self) -> None:
        with ExitStack() as stack, tqdm(total=len(self.rows), unit="run", leave=False) as bar:
            for row, contestant in zip(self.rows, self.contestants, strict=True):
                bar.set_description(f"{row.title}: loading")
                worker = Worker(contestant, self.model)
                stack.callback(worker.close)
                self.workers.append(worker)
                row.about = self.attempt(row, worker.answer) or {}
                bar.update()
            self.require_somebody()
            self.choose_contexts()
            bar.total += self.rounds * len(self.contexts) * len(self.rows)
            for number in range(self.rounds):
                for context in self.contexts:
                    for row in rotated(self.rows, number):
                        bar.set_description(f"round {number + 1}, {row.title}, context {context:,}")
                        self.measure(row, number, context)
                        bar.update()
            self.require_somebody()
            self.compare()

    def attempt(self, row: Row, call, **request) -> dict | None:
        """The answer of the row's worker, or None when there is none (any more)."""
        if row.error is not None:
            return None
        try:
            return call(**request)
        except WorkerError as error:
            row.error = str(error)

    def require_somebody(self) -> None:
        """Raise `RuntimeError` when every row has failed."""
        if all(row.error is not None for row in self.rows):
            causes = dict.fromkeys(row.error for row in self.rows)
            raise RuntimeError(f"Nothing could be measured: {'; '.join(causes)}")

    def choose_contexts(self) -> None:
        """Those that fit the model. Raises `RuntimeError` when none does."""
        about = next(row.about for row in self.rows if row.error is None)
        limit, vocab_size = about["max_seq_len"], about["vocab_size"]
        self.contexts = [context for context in CONTEXTS if max(context, 1) + self.most_gaps <= limit]
        if not self.contexts:
            raise RuntimeError(f"{self.model} has a context of {limit} tokens: too short to measure anything.")
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(0, vocab_size, (max(CONTEXTS),), generator=generator).tolist()

    def prompt(self, context: int) -> list[int]:
        """The text before the measured tokens: ids drawn once; what they are does not change how long they take."""
        return self.text[: max(context, 1)]

    def measure(self, row: Row, number: int, context: int) -> None:
        ask = self.workers[self.rows.index(row)].ask
        answer = self.attempt(row, ask, prompt=self.prompt(context), most_gaps=self.most_gaps)
        if answer is not None:
            row.samples.append(Sample(context, number, **answer))

    def compare(self) -> None:
        """Find where rows disagree. Each is held against the longest text that the rows before it agreed on."""
        for context in self.contexts:
            agreed: tuple[Row, list[int]] | None = None
            for row in self.rows:
                for sample in (sample for sample in row.samples if sample.context == context):
                    agreed = agreed or (row, sample.tokens)
                    place = first_difference(agreed[1], sample.tokens)
                    if place is not None:
                        self.differences.append(self.difference(row, sample, *agreed, place))
                        break
                    if len(sample.tokens) > len(agreed[1]):
                        agreed = (row, sample.tokens)

    def difference(self, row: Row, sample: Sample, other: Row, tokens: list[int], place: int) -> Difference:
        ask = self.workers[self.rows.index(other)].ask
        answer = self.attempt(other, ask, prompt=self.prompt(sample.context) + tokens[:place]) or {}
        found = row.title, other.title, sample.context, place, sample.tokens[place], tokens[place]
        return Difference(*found, answer.get("lead"))


def rotated(rows: list[Row], by: int) -> list[Row]:
    """Another row begins each round, so that none always works in the wake of the same other one."""
    by %= len(rows)
    return rows[by:] + rows[:by]


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first place where the two disagree, or None; where one has ended they do not."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
