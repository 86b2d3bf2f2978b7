"""Play a trace to an engine and note who waited how long.

The clock is virtual: it moves by what each step took, and jumps over the time in which there is nothing to do. So a
minute of visitors takes as long as the computing in it, and requests arrive while a step runs, as they do in life. With
a `step_cost` in place of the measured time, the outcome is the same on every machine.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from time import perf_counter
from typing import NamedTuple

from kvcourse.metrics import percentile
from kvcourse.require import require_whole
from kvcourse.serving.scheduler import Plan
from kvcourse.serving.served import Served
from kvcourse.serving.workload import Arrival, require_seconds, whole_lengths
from kvcourse.texts import as_ids

StepCost = Callable[[Plan], float]


class Tick(NamedTuple):
    """One step of a replay: when it began, how long it took, what it computed, and what the pool held meanwhile."""

    start: float
    seconds: float
    prefill_tokens: int  # of prompts, and texts computed anew
    decode_tokens: int
    used_blocks: int


@dataclass(frozen=True)
class Replay:
    """What became of the requests of a trace, in its order, by the virtual clock.

    `served[i]` came at second `came[i]`, and counts its `ttft`, `itl` and other figures of a `Generation` from then.
    """

    served: list[Served]
    came: list[float]
    ticks: list[Tick]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(came + answer.total for came, answer in zip(self.came, self.served, strict=True)) - min(self.came)

    @property
    def busy(self) -> float:
        """Seconds in which something was computed."""
        return sum(tick.seconds for tick in self.ticks)

    @property
    def output_tokens(self) -> int:
        return sum(len(answer.ids) for answer in self.served)

    @property
    def throughput(self) -> float:
        """Output tokens a second, from the first arrival to the last token. Raises `ValueError` if no time passed."""
        if self.seconds == 0:
            raise ValueError("No time passed in this replay, so it has no throughput: give a step_cost above 0.")
        return self.output_tokens / self.seconds

    def ttft_percentile(self, p: float) -> float:
        """The p-th percentile of the times to first token, seconds, waiting included; 0 < p < 100."""
        return percentile([answer.ttft for answer in self.served], p)

    def itl_percentile(self, p: float) -> float | None:
        """The p-th percentile of all gaps between tokens of one answer, seconds; 0 < p < 100. None without gaps."""
        return percentile([gap for answer in self.served for gap in answer.itl], p)

    @property
    def preemptions(self) -> int:
        return sum(answer.preemptions for answer in self.served)

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that were found in the prefix cache."""
        return sum(answer.cached_tokens for answer in self.served)

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model."""
        return sum(tick.prefill_tokens + tick.decode_tokens for tick in self.ticks)

    @property
    def peak_blocks(self) -> int:
        """Most blocks in use at once."""
        return max(tick.used_blocks for tick in self.ticks)

    @property
    def prefill_speed(self) -> float:
        """Input tokens that had to be computed, for each second of prefill. See `decode_speed`."""
        prompts = sum(answer.prompt_length for answer in self.served)
        return (prompts - self.cached_tokens) / self._seconds_for("prefill_tokens")

    @property
    def decode_speed(self) -> float:
        """Output tokens for each second of decoding. The time of a step with both is shared out evenly among its
        tokens, so the two times add up to `busy`, and bills at rates from the two speeds to the rent of that time.
        Raises `ValueError` when there was no such step."""
        return self.output_tokens / self._seconds_for("decode_tokens")

    def _seconds_for(self, kind: str) -> float:
        seconds = sum(
            tick.seconds * getattr(tick, kind) / (tick.prefill_tokens + tick.decode_tokens) for tick in self.ticks
        )
        if seconds == 0:
            raise ValueError(f"No step of this replay had {kind} and took time, so it has no such speed.")
        return seconds


@dataclass
class Visitor:
    """A request of a trace on its way: what it sends, when it came, what it got so far and when."""

    number: int  # in the trace
    prompt: list[int]
    wanted: int
    came: float
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        """Whether it still wants tokens."""
        return len(self.times) < self.wanted


class Visitors:
    """The requests of a trace: those still to come, by time, and those that go on from an answer not yet given."""

    def __init__(self, arrivals: list[Arrival]):
        check_trace(arrivals)
        self.arrivals = arrivals
        self.came: dict[int, Visitor] = {}  # by number
        self.to_come: list[tuple[float, int, list[int]]] = []  # a heap: time, number, whole prompt
        self.followers: dict[int, list[int]] = {}
        for number, arrival in enumerate(arrivals):
            if arrival.after is None:
                heappush(self.to_come, (arrival.at, number, list(arrival.prompt)))
            else:
                self.followers.setdefault(arrival.after, []).append(number)

    @property
    def next_time(self) -> float:
        return self.to_come[0][0]

    def due(self, clock: float) -> Iterator[Visitor]:
        """Those who have come by now and were not yet let in, in order."""
        while self.to_come and self.next_time <= clock:
            time, number, prompt = heappop(self.to_come)
            self.came[number] = Visitor(number, prompt, self.arrivals[number].max_new_tokens, time)
            yield self.came[number]

    def answered(self, visitor: Visitor, clock: float) -> None:
        """A visitor has its last token: those who go on from it are to come."""
        for number in self.followers.get(visitor.number, ()):
            arrival = self.arrivals[number]
            heappush(self.to_come, (clock + arrival.at, number, [*visitor.prompt, *visitor.ids, *arrival.prompt]))


def check_trace(arrivals: list[Arrival]) -> None:
    """Raise `ValueError` for a trace that cannot be played: an empty one, times that are no numbers of seconds, prompts
    that are no token ids or, of a request that stands alone, empty, answers of no token, and answers not yet given."""
    if not arrivals:
        raise ValueError("The trace is empty: give at least one Arrival.")
    for number, arrival in enumerate(arrivals):
        if not isinstance(arrival, Arrival):
            raise ValueError(f"Item {number} of the trace must be an Arrival, not {arrival!r}.")
        require_seconds(f"at of arrival {number}", arrival.at)
        require_whole(f"max_new_tokens of arrival {number}", arrival.max_new_tokens)
        if not as_ids(f"the prompt of arrival {number}", arrival.prompt, 2**63) and arrival.after is None:
            raise ValueError(f"The prompt of arrival {number} is empty: a text needs a token to go on from.")
    whole_lengths(arrivals)  # refuses one that goes on from a later one


def replay(
    engine, arrivals: list[Arrival], step_cost: StepCost | None = None, on_step: Callable[[float], object] | None = None
) -> Replay:
    """Play a trace to an `Engine` or a `DryEngine` that has nothing to do; each request gets exactly its tokens.

    A step lasts as long as it takes here, or `step_cost(plan)` seconds. `on_step(clock)` is called after each one, for
    example to keep snapshots: `on_step=lambda clock: film.append(snapshot(engine.scheduler))`. A request that it
    submits runs along, and is not in the report. Before you measure, run something: the first steps of a model pay for
    warming up. Raises `ValueError` when there is something wrong with the trace (see `check_trace`), when the engine is
    busy, or refuses a request, and when a step's cost is no number of seconds. Afterwards the engine has nothing of the
    trace among its requests and results, however this ends.
    """
    if engine.unfinished:
        raise ValueError(f"The engine still has {engine.unfinished} requests: run() it first, or abort them.")
    visitors, clock, ticks = Visitors(arrivals), 0.0, []
    ids: dict[Hashable, Visitor] = {}
    try:
        while visitors.to_come or engine.unfinished:
            if not engine.unfinished:
                clock = max(clock, visitors.next_time)
            for visitor in visitors.due(clock):
                ids[engine.submit(visitor.prompt, visitor.wanted, on_token=visitor.ids.append)] = visitor
            before = perf_counter()
            got_one = engine.step()  # the tokens are on the CPU, so a GPU has finished too
            seconds = perf_counter() - before if step_cost is None else seconds_of(engine.plan, step_cost)
            ticks.append(tick(engine.plan, clock, seconds))
            clock += seconds
            for visitor in (ids[id] for id in got_one if id in ids):
                visitor.times.append(clock)
                if not visitor.waits:
                    visitors.answered(visitor, clock)
            if on_step is not None:
                on_step(clock)
        served = [(ids[id], engine.results[id]) for id in sorted(ids, key=lambda id: ids[id].number)]
    finally:
        for id in ids:
            engine.abort(id)
            engine.forget(id)
    for visitor, answer in served:
        if answer.stop_reason != "length":
            raise RuntimeError(
                f"Request {visitor.number} of the trace ended early: {answer.stop_reason}."
            ) from answer.error
    return report(served, ticks)


def seconds_of(plan: Plan, step_cost: StepCost) -> float:
    """What a step of `plan` is said to take."""
    return require_seconds("step_cost(plan)", step_cost(plan))


def tick(plan: Plan, start: float, seconds: float) -> Tick:
    """A step of `plan`: a token after the prompt decodes, all others are prefill."""
    sizes = [(chunk.start >= chunk.request.prompt_length, chunk.stop - chunk.start) for chunk in plan.chunks]
    decoded = sum(size for decodes, size in sizes if decodes)
    return Tick(start, seconds, sum(size for _, size in sizes) - decoded, decoded, plan.used_blocks)


def report(served: list[tuple[Visitor, Served]], ticks: list[Tick]) -> Replay:
    """The replay, with the times of the virtual clock put in."""
    timed = [replace(answer, arrivals=[time - visitor.came for time in visitor.times]) for visitor, answer in served]
    return Replay(timed, [visitor.came for visitor, _ in served], ticks)
