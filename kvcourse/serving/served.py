"""A request as the engine sees it: what it asks for, what it has got, and the figures that are left when it ends."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvcourse.metrics import Generation
from kvcourse.require import require_whole
from kvcourse.sampling import Sampler
from kvcourse.serving.scheduler import Request
from kvcourse.texts import Prompt, as_prompts


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
        """Forget the pages; a token whose arrival an interrupt kept from being noted arrives `now`.

        Before its first token nothing of the prompt's pages was of use: what is found at the next admission counts.
        """
        self.drop_pages()
        self.served.arrivals += [now - self.submitted] * (self.made - len(self.served.arrivals))
        if self.state == "running":
            self.state = "preempted" if self.made else "waiting"
            self.preemptions += 1
        if not self.made:
            self.cached_tokens = 0


def check_request(prompt: Prompt, max_new_tokens: int, on_token, vocab_size: int) -> tuple[list[int], int]:
    """The prompt as a list, and `max_new_tokens`; `ValueError` for what no engine can serve."""
    single, prompts = as_prompts(prompt, vocab_size)
    if not single:
        raise ValueError(f"submit takes one prompt, but {len(prompts)} were given: call it once for each.")
    if on_token is not None and not callable(on_token):
        raise ValueError(f"on_token={on_token!r} must be a function that takes a token id, or None.")
    return prompts[0], require_whole("max_new_tokens", max_new_tokens, least=0)


def require_id(id) -> None:
    """Raise `ValueError` for what a dict cannot find again."""
    try:
        hash(id)
    except TypeError as error:
        raise ValueError(f"id={id!r} cannot be the key of a dict: give a number or a text.") from error
    if id != id:
        raise ValueError(f"id={id!r} is not equal to itself, so it would never be found again: give another one.")
