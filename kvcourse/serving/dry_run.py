"""An engine without a model: real blocks, real prefix index, real scheduler, and a made-up token.

What a schedule does to waiting times depends on lengths and on what is shared, not on the words. So with a `step_cost`
in place of a clock, `replay` runs thousands of requests in a moment, and gives the same answer on every machine.
"""

from collections.abc import Callable, Hashable
from itertools import count

from kvcourse.serving.blocks import BlockPool
from kvcourse.serving.prefix import Identity, PrefixIndex
from kvcourse.serving.scheduler import Plan, Request, Scheduler
from kvcourse.serving.served import Served, check_request

TOKEN = 0  # what every request is answered with, over and over


def linear_cost(per_step: float, per_token: float) -> Callable[[Plan], float]:
    """A `step_cost`: seconds of a step that takes `per_step` whatever it does, as reading the weights does, and
    `per_token` for each token it computes."""
    return lambda plan: per_step + per_token * sum(chunk.stop - chunk.start for chunk in plan.chunks)


class DryEngine:
    """The calls of `Engine` that `replay` needs, with the same arguments but for the model.

    It refuses what `Engine` refuses, except what only a model knows to be too much: ids beyond its vocabulary, and
    texts longer than its context. Nothing is sampled, so there are no options for that; an error in `on_token` is
    raised.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        prefix_caching: bool = True,
        max_batch_tokens: int = 512,
        max_running: int = 64,
        window: int | None = None,
    ):
        self.pool = BlockPool(num_blocks, block_size)
        index = PrefixIndex(self.pool, Identity(model="none", dtype="none", window=window)) if prefix_caching else None
        self.scheduler = Scheduler(self.pool, index, max_batch_tokens, max_running, window)
        self.plan: Plan | None = None  # of the latest step
        self.results: dict[Hashable, Served] = {}
        self._open: dict[Hashable, tuple[Request, Callable[[int], None] | None]] = {}
        self._numbers = count()

    @property
    def free_blocks(self) -> int:
        return self.pool.free_blocks

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def submit(
        self, prompt: list[int], max_new_tokens: int, *, on_token: Callable[[int], None] | None = None
    ) -> Hashable:
        """A new request; returns its id. Raises `ValueError` as `Engine.submit` does."""
        prompt, max_new_tokens = check_request(prompt, max_new_tokens, on_token, vocab_size=2**63)
        request = Request(next(self._numbers), prompt, max_new_tokens)
        self.scheduler.check_fits(request)
        self._open[request.id] = request, on_token
        if max_new_tokens == 0:
            self._end(request.id, "length")
        else:
            self.scheduler.add(request)
        return request.id

    def abort(self, id: Hashable) -> bool:
        """End a request early; False when it had ended. Raises `ValueError` for an id that was never given."""
        if id in self._open:
            self._end(id, "aborted")
            return True
        if id not in self.results:
            raise ValueError(f"No request has the id {id!r}.")
        return False

    def forget(self, id: Hashable) -> Served:
        """Take the result of a request that has ended out of `results`, and return it."""
        if id not in self.results:
            raise ValueError(f"No request with the id {id!r} has ended.")
        return self.results.pop(id)

    def step(self) -> list[Hashable]:
        """One step, with nothing computed in it; returns the ids of those who got a token."""
        self.plan = self.scheduler.schedule()
        ending = [self._open[chunk.request.id] for chunk in self.plan.chunks if chunk.ends]
        for chunk in self.plan.chunks:
            self.scheduler.advance(chunk)
        for request, _ in ending:
            request.tokens.append(TOKEN)
            if len(request.tokens) == request.prompt_length + request.max_new_tokens:
                self._end(request.id, "length")
        for request, on_token in ending:
            ended = self.results.get(request.id)
            if on_token is not None and (ended is None or ended.stop_reason == "length"):
                on_token(TOKEN)
        return [request.id for request, _ in ending]

    def _end(self, id: Hashable, stop_reason: str) -> None:
        request, _ = self._open.pop(id)
        self.scheduler.finish(request)
        self.results[id] = Served(
            prompt_length=request.prompt_length,
            ids=request.tokens[request.prompt_length :],
            stop_reason=stop_reason,
            id=id,
            cached_tokens=request.cached_tokens,
            preemptions=request.preemptions,
        )
