"""A request as the engine sees it: what it asks for, what it has got, and the figures that are left when it ends."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvcourse.metrics import Generation
from kvcourse.sampling import Sampler
from kvcourse.serving.scheduler import Request


@dataclass
class Served(Generation):
    """What became of a request. Times count from `submit`, so `ttft` has the wait in the queue in it.

    `stop_reason`: "length", "stop" (a stop id was made), "aborted", or "error", with the exception as `error`.
    """

    id: Hashable = None
    cached_tokens: int = 0  # of the prompt, found in pages instead of computed
    preemptions: int = 0  # times it lost its pages, to others or to an interrupt
    error: Exception | None = None


@dataclass
class Stats:
    """What an engine has done so far."""

    steps: int = 0  # forward passes
    computed_tokens: int = 0  # run through the model, those computed again after a preemption among them
    reused_tokens: int = 0  # found in pages instead: prefixes, and prompts of samples
    output_tokens: int = 0
    preemptions: int = 0  # for want of a free block
    copied_blocks: int = 0  # copy on write


@dataclass(eq=False, kw_only=True)
class Text(Request):
    """A request with what it takes to choose its tokens and to tell about them."""

    sampler: Sampler
    stop_ids: list[int]
    on_token: Callable[[int], None] | None
    submitted: float  # seconds on the engine's clock
    served: Served

    @property
    def made(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def end(self) -> str | None:
        """Why it ends with the last token made; None while it goes on."""
        if self.made and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if self.made == self.max_new_tokens else None

    def restart(self, now: float) -> None:
        """Forget the pages; a token whose arrival an interrupt kept from being noted arrives `now`."""
        self.table, self.computed = None, 0
        self.served.arrivals += [now - self.submitted] * (self.made - len(self.served.arrivals))
        if self.state == "running":
            self.state = "preempted"
            self.preemptions += 1
