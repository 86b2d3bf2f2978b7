"""Which tokens of which requests run in the next forward pass: continuous batching over pages.

A step takes at most `max_batch_tokens` tokens, whoever they belong to: one each for requests that decode, and the rest
for pieces of prompts (chunked prefill, Agrawal et al. 2024, "Sarathi-Serve"; deciding anew at each step is Orca's
iteration-level scheduling, Yu et al. 2022, section 3.1). A request that decodes is simply one with a single token left
to compute, so prefill, decode and recomputing after a preemption are the same few lines. No model is needed here.
"""

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from kvcourse.require import require_whole
from kvcourse.serving.blocks import BlockPool, BlockTable
from kvcourse.serving.prefix import Entry, PrefixIndex


@dataclass(eq=False)
class Request:
    """One text being written. `tokens` begins as the prompt; whoever chooses the next token appends it there.

    `source`: an earlier request with the same prompt, whose pages this one shares if it is still running.
    """

    id: Hashable
    tokens: list[int]  # the prompt, and what was made so far
    max_new_tokens: int
    source: "Request | None" = None
    prompt_length: int = field(init=False)
    arrival: int = field(init=False, default=-1)  # its place in the order in which requests were added
    state: str = field(init=False, default="waiting")  # then "running", "preempted" (waits again), "finished"
    table: BlockTable | None = field(init=False, default=None)  # its pages while it is running
    computed: int = field(init=False, default=0)  # tokens whose keys and values are in them
    known: Entry | None = field(init=False, default=None)  # its last full block, as the prefix index knows it
    cached_tokens: int = field(init=False, default=0)  # of the prompt, found in pages when it was first admitted
    preemptions: int = field(init=False, default=0)

    def __post_init__(self):
        self.prompt_length = len(self.tokens)

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be chosen: 1 for a request that decodes."""
        return len(self.tokens) - self.computed

    @property
    def room(self) -> int:
        """Tokens its pages hold in the end. The last one made is never fed back, so it needs no place."""
        return self.prompt_length + self.max_new_tokens - 1

    def drop_pages(self) -> None:
        """Forget the pages, wherever they are now."""
        self.table, self.computed, self.known = None, 0, None


class Chunk(NamedTuple):
    """Tokens `start` to `stop - 1` of a request run in this step."""

    request: Request
    start: int
    stop: int

    @property
    def ends(self) -> bool:
        """Whether it reaches the end of the text: then its scores choose the next token."""
        return self.stop == len(self.request.tokens)


def n_tokens(chunk: Chunk) -> int:
    """How many tokens a chunk takes of the budget."""
    return chunk.stop - chunk.start


def next_chunk(request: Request, budget: int) -> Chunk:
    """As much of what is left of `request` as `budget` tokens allow."""
    return Chunk(request, request.computed, request.computed + min(request.left, budget))


class Plan(NamedTuple):
    """One step: make `copies` (source block, target block) in this order, then run `chunks` in one forward pass."""

    chunks: list[Chunk]
    copies: list[tuple[int, int]]
    preempted: list[Request]
    reused: int  # tokens that the requests admitted now found in pages
    used_blocks: int  # of the pool, while the step runs


class Scheduler:
    """Requests that wait, requests that run, and one decision: what to compute next.

    `schedule()` makes a plan; after the forward pass `advance(chunk)` is called for each of its chunks, and then tokens
    are appended, or requests finished. The rules of a plan:

    1. Running requests with one token to compute come first, then pieces of the others, each by order of arrival. What
       is left of `max_batch_tokens` admits waiting requests, by order of arrival, at most `max_running` at a time, and
       only with free blocks for all of the text they have so far, which are taken at once.
    2. When a running request needs a block and none is free, the one that arrived last gives up its blocks and waits
       again. It is computed anew from prompt and output so far, less what `prefix` still knows (recompute preemption;
       Kwon et al. 2023, section 4.5). Nobody is admitted in such a step.
    3. A request with a `source` that is running waits until that has computed the prompt but for its last token; then
       it shares those blocks and computes the last token itself.

    Nobody waits for ever. Take the earliest request that has not ended. While it runs it is never the one preempted,
    unless alone; and alone it fits, or `add` would have refused it. It gets its share of every step but one whose whole
    budget goes to decodes; then nobody is admitted either, and each of those ends after a known number of tokens. While
    it waits nobody is admitted before it, and those that run end one after the other, by what was just said of the
    earliest of them; when none is left all blocks are free, and it is admitted. So it ends, and another one is the
    earliest. (The source in rule 3 runs and arrived before, so the wait for it ends likewise. Those behind lose next to
    nothing: until its last piece, such a prompt takes all of the budget anyway.)

    The cost of a step grows with the requests that run, not with those that wait or have ended.
    `window`: how many tokens the model looks back at most, in all of its layers; blocks behind it are given back.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixIndex | None = None,
        max_batch_tokens: int = 512,
        max_running: int = 64,
        window: int | None = None,
    ):
        self.pool, self.prefix = pool, prefix
        self.max_batch_tokens = require_whole("max_batch_tokens", max_batch_tokens)
        self.max_running = require_whole("max_running", max_running)
        self.window = None if window is None else require_whole("window", window)
        self.running: list[Request] = []  # by arrival
        self._queue: list[tuple[int, Request]] = []  # a heap by arrival; ended ones are dropped when they get in front
        self._numbers = count()

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait, by arrival, preempted ones among them. For looking at: it sorts them all."""
        return [request for _, request in sorted(self._queue) if request.state != "finished"]

    def add(self, request: Request) -> None:
        """Let a new request wait. Raises `ValueError` as `check_fits` does."""
        self.check_fits(request)
        request.arrival = next(self._numbers)
        heappush(self._queue, (request.arrival, request))

    def check_fits(self, request: Request) -> None:
        """Raise `ValueError` when `request` could not run even with all blocks of the pool."""
        needed = self.pool.blocks_for(request.room)
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"Request {request.id!r}: {request.prompt_length} tokens of prompt and {request.max_new_tokens} new "
                f"ones (the last one needs no place) take {needed} blocks of {self.pool.block_size}, but the pool has "
                f"{self.pool.num_blocks}: shorten the prompt, ask for fewer tokens or make a larger pool."
            )

    def schedule(self) -> Plan:
        """What to run in the next step; no chunks only if there is nothing left to do."""
        copies: list[tuple[int, int]] = []
        chunks, preempted = self._go_on(copies)
        admitted = [] if preempted else self._admit(self.max_batch_tokens - sum(map(n_tokens, chunks)), copies)
        if not (chunks or admitted) and (self.running or self._first_waiting()):
            raise RuntimeError(
                f"{len(self.running)} requests run and {len(self.waiting)} wait, with {self.pool.free_blocks} of "
                f"{self.pool.num_blocks} blocks free, and none can go on: blocks of this pool are held elsewhere."
            )
        reused = sum(chunk.start for chunk in admitted)
        return Plan(chunks + admitted, copies, preempted, reused, self.pool.used_blocks)

    def _go_on(self, copies: list[tuple[int, int]]) -> tuple[list[Chunk], list[Request]]:
        """Rules 1 and 2 for those that run: their chunks, and who was preempted."""
        budget, chunks, preempted = self.max_batch_tokens, [], []
        decodes = [request for request in self.running if request.left == 1]
        prefills = [request for request in self.running if request.left > 1]
        for request in decodes + prefills:
            if request.state != "running" or not budget:  # it may have been preempted a moment ago
                continue
            chunk = next_chunk(request, budget)
            # Only a decode can need a block here: the others took all of theirs when they were admitted. So whoever has
            # arrived later has no chunk yet that would have to leave the plan.
            while request.table and request.table.shortage(chunk.start, chunk.stop) > self.pool.free_blocks:
                preempted.append(self.running[-1])
                self.preempt(self.running[-1])
            if request.table:
                copies += request.table.reserve(chunk.start, chunk.stop)
                chunks.append(chunk)
                budget -= n_tokens(chunk)
        return chunks, preempted

    def _admit(self, budget: int, copies: list[tuple[int, int]]) -> list[Chunk]:
        """The rest of rule 1, and rule 3: the chunks of those that wait no longer."""
        chunks = []
        while budget and self.pool.free_blocks and len(self.running) < self.max_running:
            request = self._first_waiting()
            if request is None or self._source_is_on_its_way(request):
                break
            table, computed = self._shared_pages(request)
            if table.shortage(computed, len(request.tokens)) > self.pool.free_blocks:
                table.free()
                break
            heappop(self._queue)
            if request.state == "waiting":
                request.cached_tokens = computed
            request.table, request.computed, request.state = table, computed, "running"
            insort(self.running, request, key=lambda running: running.arrival)
            copies += table.reserve(computed, len(request.tokens))
            chunks.append(next_chunk(request, budget))
            budget -= n_tokens(chunks[-1])
        return chunks

    def advance(self, chunk: Chunk) -> None:
        """The forward pass has computed `chunk`: its keys and values are in the pages, for others to find too."""
        request, start, stop = chunk
        request.computed = stop
        if self.prefix is not None:
            request.known = self.prefix.publish(request.tokens, request.table.blocks, start, stop, request.known)
        if self.window is not None:
            # The next query sees one token less; but a sample of this prompt may yet compute its last token again.
            request.table.release_before(max(0, stop - self.window))

    def preempt(self, request: Request) -> None:
        """Take a running request's pages: it waits again, in its old place. Raises `ValueError` for another one."""
        if request.state != "running":
            raise ValueError(f"Request {request.id!r} is {request.state}: only a running one can be preempted.")
        self._stop(request, "preempted")
        request.preemptions += 1
        heappush(self._queue, (request.arrival, request))

    def finish(self, request: Request) -> None:
        """End a request in any state: its pages are free at once. Does nothing when it has ended already."""
        if request.state == "running":
            self._stop(request, "finished")
        request.state = "finished"
        request.source = None

    def _stop(self, request: Request, state: str) -> None:
        request.table.free()
        request.drop_pages()
        request.state = state
        self.running.remove(request)

    def _first_waiting(self) -> Request | None:
        while self._queue and self._queue[0][1].state == "finished":
            heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    def _source_is_on_its_way(self, request: Request) -> bool:
        source = request.source
        return source is not None and source.state == "running" and source.computed < request.prompt_length - 1

    def _shared_pages(self, request: Request) -> tuple[BlockTable, int]:
        """A table of the pages there are already for the beginning of the text, and how many tokens they hold."""
        source, shared = request.source, request.prompt_length - 1
        if source is not None and source.state == "running" and self._still_has(source, shared):
            return source.table.fork(shared), shared
        blocks = [] if self.prefix is None else self.prefix.match(request.tokens)
        return BlockTable(self.pool, blocks), len(blocks) * self.pool.block_size

    def _still_has(self, source: Request, position: int) -> bool:
        """Whether the pages that the query at `position` looks back to are there: a window may have passed them."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return source.table.blocks[first // self.pool.block_size] is not None
