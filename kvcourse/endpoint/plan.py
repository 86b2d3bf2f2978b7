"""What to send and when: checked before anything is sent."""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from kvcourse.endpoint.prompts import Ruler, make_prompts
from kvcourse.require import require_number, require_whole
from kvcourse.serving.workload import Arrival

REQUESTS = 32  # unless another number is asked for
OWN_FIELDS = {  # of a request's body, that the figures rest on, and what to do in place of changing them
    "model": "give model=... instead",
    "prompt": "give prompts=[...] instead",
    "messages": "give prompts=[...] with chat=True instead",
    "max_tokens": "give new_tokens=... instead",
    "max_completion_tokens": "give new_tokens=... instead",
    "n_predict": "give new_tokens=... instead",
    "n": "each request has one answer, so give requests=... or concurrency=... for more",
    "stream": "only streamed answers can be timed, so leave it out",
    "stream_options": "it asks for the count of tokens, so leave it out, or give None to a server that refuses it",
}


class Job(NamedTuple):
    """One request to send. `at`: seconds from the beginning of the run in an open loop; None in a closed one."""

    prompt: str | list
    new_tokens: int
    at: float | None = None


@dataclass(frozen=True)
class Plan:
    """How many requests, of which kind, and who sends them: `concurrency` users, of whom each waits for the answer
    before it sends the next (a closed loop), or, where that is None, people who know nothing of each other and of the
    server, `rate` a second (an open loop) or at the times that a trace says."""

    requests: int
    seconds: float
    new_tokens: int | None
    prompt_tokens: tuple[int, int] | None
    shared_prefix: int
    concurrency: int | None
    rate: float | None
    seed: int
    prompts: list | None = None

    @property
    def open_loop(self) -> bool:
        return self.concurrency is None

    def jobs(self, ruler: Ruler) -> list[Job]:
        """The requests, the same for the same seed."""
        if self.prompts and isinstance(self.prompts[0], Arrival):
            return [Job(arrival.prompt, arrival.max_new_tokens, arrival.at) for arrival in self.prompts]
        prompts = self.prompts
        if prompts is None:
            random = Random(f"lengths {self.seed}")
            lengths = [random.randint(*self.prompt_tokens) for _ in range(self.requests)]
            prompts = make_prompts(Random(f"words {self.seed}"), lengths, ruler, self.shared_prefix)
        return [Job(prompt, self.new_tokens, at) for prompt, at in zip(prompts, self._times(), strict=True)]

    def _times(self) -> list[float | None]:
        """Of a Poisson process: the gaps are exponential, the first one included."""
        if not self.open_loop:
            return [None] * self.requests
        random, now, times = Random(f"gaps {self.seed}"), 0.0, []
        for _ in range(self.requests):
            now += random.expovariate(self.rate)
            times.append(now)
        return times


def make_plan(
    prompts, new_tokens, prompt_tokens, shared_prefix, concurrency, rate, requests, seconds, seed, chat: bool
) -> Plan:
    """The arguments of `meter`, checked. Raises `ValueError` for what cannot be."""
    seconds, new_tokens = require_number("seconds", seconds), require_whole("new_tokens", new_tokens)
    shared_prefix = require_whole("shared_prefix", shared_prefix, least=0)
    seed = Random().randrange(2**31) if seed is None else require_whole("seed", seed, least=0)
    if rate is not None and concurrency is not None:
        raise ValueError("Give concurrency (each user waits for an answer) or rate (nobody waits), not both.")
    rate = None if rate is None else require_number("rate", rate)
    lengths = _lengths(256 if prompt_tokens is None else prompt_tokens)
    if prompts is not None:
        if prompt_tokens is not None or shared_prefix or requests is not None:
            raise ValueError("prompt_tokens, shared_prefix and requests are for prompts made up here: leave them out.")
        lengths = None
        requests = _check_prompts(prompts, chat)
        if isinstance(prompts[0], Arrival):
            if rate is not None or concurrency is not None:
                raise ValueError("A trace of arrivals has its own times: leave out rate and concurrency.")
            return Plan(requests, seconds, None, None, 0, None, None, seed, prompts)
    elif shared_prefix >= lengths[0]:
        raise ValueError(f"shared_prefix={shared_prefix} must be less than the shortest prompt, {lengths[0]} tokens.")
    requests = require_whole("requests", REQUESTS if requests is None else requests)
    if rate is None:
        concurrency = require_whole("concurrency", 1 if concurrency is None else concurrency)
    return Plan(requests, seconds, new_tokens, lengths, shared_prefix, concurrency, rate, seed, prompts)


def listed(prompts) -> list | None:
    """The prompts as a list, None for none given. Raises `ValueError` for a single one, whose parts are no prompts."""
    if prompts is None:
        return None
    if isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Iterable):
        what = "a single text" if isinstance(prompts, str) else f"of type {type(prompts).__name__}"
        raise ValueError(f"prompts is {what} and must be a list: give prompts=[...], even for one.")
    return list(prompts)


def checked_extra(extra) -> dict:
    """More fields of a request's body. Raises `ValueError` for one that would change what is measured."""
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise ValueError(f"extra={extra!r} must be a dict of fields of the request's body.")
    for name, value in extra.items():
        if name in OWN_FIELDS and not (name == "stream_options" and value is None):  # tokens are called uncounted then
            raise ValueError(f"extra cannot have {name!r}, which the meter sets itself: {OWN_FIELDS[name]}.")
    return extra


def _lengths(prompt_tokens) -> tuple[int, int]:
    """One number of tokens, or the least and the most."""
    pair = prompt_tokens if isinstance(prompt_tokens, tuple | list) else (prompt_tokens, prompt_tokens)
    if len(pair) != 2:
        raise ValueError(f"prompt_tokens={prompt_tokens!r} must be one number, or the least and the most.")
    low, high = (require_whole("prompt_tokens", length) for length in pair)
    if low > high:
        raise ValueError(f"prompt_tokens={prompt_tokens!r} must have the lower number first.")
    return low, high


def _check_prompts(prompts: list, chat: bool) -> int:
    """Their number. Raises `ValueError` unless all are texts, all token ids, all messages, or all arrivals."""
    if not prompts:
        raise ValueError("There are no prompts: give at least one.")
    kinds = {_kind(prompt) for prompt in prompts}
    if len(kinds) > 1 or None in kinds:
        raise ValueError("The prompts must all be texts, or all lists of token ids, lists of messages, or arrivals.")
    kind = kinds.pop()
    if chat and kind in ("ids", "arrivals"):
        raise ValueError("A chat takes texts or lists of messages, not token ids: leave out chat, or give texts.")
    if kind == "messages" and not chat:
        raise ValueError("Lists of messages need chat=True.")
    if kind == "arrivals" and any(arrival.after is not None for arrival in prompts):
        raise ValueError("An arrival that goes on from another's answer cannot be sent: its prompt is not known yet.")
    if kind == "arrivals" and any(a.at > b.at for a, b in zip(prompts, prompts[1:], strict=False)):
        raise ValueError("The arrivals of a trace must be in the order of their times.")
    return len(prompts)


def _kind(prompt) -> str | None:
    if isinstance(prompt, Arrival):
        return "arrivals"
    if isinstance(prompt, str):
        return "texts" if prompt else None
    if not isinstance(prompt, list) or not prompt:
        return None
    if all(type(token) is int and token >= 0 for token in prompt):
        return "ids"
    return "messages" if all(isinstance(message, dict) for message in prompt) else None
