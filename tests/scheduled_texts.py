"""A scheduler at work without a model: each slot of the pool holds a number made from those before it and a token.

That is what keys and values are to a model, so a wrong page, a lost copy, or a block handed out before it was filled
gives another text. `Machine` runs plans on such slots, and looks after each operation whether all rules were kept.
"""

import random
from collections import Counter
from zlib import crc32

from kvcourse.serving.blocks import BlockPool
from kvcourse.serving.prefix import Identity, PrefixIndex
from kvcourse.serving.scheduler import Plan, Request, Scheduler

IDENTITY = Identity(model="none", dtype="none")
POISON = None


def number(visible: list[int], token: int) -> int:
    """What a slot holds for `token`, if its query sees slots with these numbers."""
    return crc32(repr((visible, token)).encode())


def next_token(last: int) -> int:
    return last % 3  # few different ones, so that texts meet


def alone(prompt: list[int], max_new_tokens: int, window: int | None = None) -> list[int]:
    """The answer to `prompt` when nobody else is there: no pages, no schedule."""
    tokens, numbers = list(prompt), []
    while len(tokens) < len(prompt) + max_new_tokens:
        for position in range(len(numbers), len(tokens)):
            first = 0 if window is None else max(0, position - window + 1)
            numbers.append(number(numbers[first:], tokens[position]))
        tokens.append(next_token(numbers[-1]))
    return tokens[len(prompt) :]


class Machine:
    """A pool whose slots hold numbers, a scheduler over it, and the requests given to it."""

    def __init__(self, num_blocks: int, block_size: int, prefix: bool = False, seed: int = 0, **options):
        self.random = random.Random(seed)
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, PrefixIndex(self.pool, IDENTITY) if prefix else None, **options)
        self.slots = [POISON] * (num_blocks * block_size)
        self.requests: list[Request] = []
        self.told: dict[Request, list[int]] = {}  # each token as it came
        self.seen = Counter()

    def add(self, prompt: list[int], max_new_tokens: int, source: Request | None = None) -> Request:
        request = Request(len(self.requests), list(prompt), max_new_tokens, source)
        self.scheduler.add(request)
        self.requests.append(request)
        self.told[request] = []
        return request

    def step(self) -> Plan:
        """One plan, checked and run."""
        running, waiting = list(self.scheduler.running), self.scheduler.waiting
        ready = {request: request.left for request in running}
        plan = self.scheduler.schedule()
        self.check_plan(plan, running, waiting, ready)
        self.poison()
        size = self.pool.block_size
        for source, target in plan.copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        last = [self.compute(*chunk) for chunk in plan.chunks]
        ending = [chunk.ends for chunk in plan.chunks]
        for chunk in plan.chunks:
            self.scheduler.advance(chunk)
        for (request, _, _), value, ends in zip(plan.chunks, last, ending, strict=True):
            if ends:
                request.tokens.append(next_token(value))
                self.told[request].append(request.tokens[-1])
                if len(request.tokens) == request.prompt_length + request.max_new_tokens:
                    self.scheduler.finish(request)
        self.seen.update(steps=1, preemptions=len(plan.preempted), copies=len(plan.copies), reused=plan.reused)
        return plan

    def compute(self, request: Request, start: int, stop: int) -> int:
        """The forward pass of one chunk: what its tokens see is read from the pages."""
        window = self.scheduler.window
        for position in range(start, stop):
            first = 0 if window is None else max(0, position - window + 1)
            visible = [self.slots[slot] for slot in request.table.slots(first, position)]
            assert POISON not in visible, f"request {request.id} reads what nobody wrote"
            self.slots[request.table.slots(position, position + 1)[0]] = number(visible, request.tokens[position])
        return self.slots[request.table.slots(stop - 1, stop)[0]]

    def run(self) -> None:
        """To the end. All answers are those each request gets alone, and no block has leaked."""
        while self.step().chunks:
            self.check_books()
        for request in self.requests:
            assert request.state == "finished"
            answer = request.tokens[request.prompt_length :]
            expected = alone(request.tokens[: request.prompt_length], request.max_new_tokens, self.scheduler.window)
            assert answer == expected[: len(answer)], f"request {request.id} got another answer than alone"
            assert answer == self.told[request], f"request {request.id} was told something else"
        assert self.pool.free_blocks == self.pool.num_blocks and not any(self.pool.refs)

    # Random operations.

    OPERATIONS = ("come", "come", "step", "step", "step", "step", "step", "step", "abort", "preempt")

    def random_operations(self, n: int) -> None:
        for _ in range(n):
            getattr(self, self.random.choice(self.OPERATIONS))()
            self.poison()
            self.check_books()
        self.run()

    def come(self) -> None:
        """A request whose prompt begins like another one, or one that wants a further answer to the same prompt."""
        if len(self.scheduler.waiting) > 6:
            return
        room = self.pool.num_blocks * self.pool.block_size
        if self.requests and self.random.random() < 0.3:
            source = self.random.choice(self.requests[-8:])
            self.add(source.tokens[: source.prompt_length], source.max_new_tokens, source)
            return
        head = self.random.choice(self.requests).tokens if self.requests and self.random.random() < 0.6 else []
        prompt = head[: self.random.randint(0, room // 3)] + [self.random.randrange(3)]
        self.add(prompt, self.random.randint(1, room // 3))

    def abort(self) -> None:
        """Somebody ends, mostly one that has not yet; in whatever state."""
        if self.requests and self.random.random() < 0.4:
            request = self.random.choice(self.requests[-12:])
            self.seen[f"aborted {request.state}"] += 1
            self.scheduler.finish(request)

    def preempt(self) -> None:
        """Any running one, as after an interrupt: not only the latest."""
        if self.scheduler.running and self.random.random() < 0.2:
            self.scheduler.preempt(self.random.choice(self.scheduler.running))

    # What must hold.

    def check_plan(self, plan: Plan, running: list[Request], waiting: list[Request], ready: dict) -> None:
        scheduler = self.scheduler
        assert sum(stop - start for _, start, stop in plan.chunks) <= scheduler.max_batch_tokens
        assert len(scheduler.running) <= scheduler.max_running
        for request, start, stop in plan.chunks:
            assert request.state == "running" and request.computed == start < stop <= len(request.tokens)
        ran = [(ready[chunk.request] > 1, chunk.request.arrival) for chunk in plan.chunks if chunk.request in ready]
        assert ran == sorted(ran), "decodes first, then prompts, each by arrival"
        admitted = [chunk.request for chunk in plan.chunks if chunk.request not in ready]
        assert [chunk.request for chunk in plan.chunks[len(ran) :]] == admitted == waiting[: len(admitted)]
        assert not (admitted and plan.preempted)
        stayed = [request.arrival for request in running if request not in plan.preempted]
        assert all(request.arrival > max(stayed, default=-1) for request in plan.preempted), "the latest ones go"
        for request in plan.preempted:
            assert request.state == "preempted" and request.table is None and request.computed == 0
        if running:
            assert running[0] not in plan.preempted
        assert bool(plan.chunks) == bool(running or waiting)

    def poison(self) -> None:
        """What nobody may read any more becomes unreadable."""
        size = self.pool.block_size
        for block in self.pool.queue.keys() - self.pool.kept:
            self.slots[block * size : (block + 1) * size] = [POISON] * size

    def check_books(self) -> None:
        """References are tables; free and used are all; nothing is both; evictable is right."""
        pool, tables = self.pool, [request.table for request in self.requests if request.table is not None]
        held = Counter(block for table in tables for block in table.blocks if block is not None)
        assert pool.refs == [held[block] for block in range(pool.num_blocks)]
        assert set(pool.queue) == {block for block in range(pool.num_blocks) if pool.refs[block] == 0}
        assert pool.free_blocks + pool.used_blocks == pool.num_blocks
        assert pool.evictable == len(pool.queue.keys() & pool.kept)
        assert {request for request in self.requests if request.table is not None} == set(self.scheduler.running)
        assert self.scheduler.running == sorted(self.scheduler.running, key=lambda request: request.arrival)
