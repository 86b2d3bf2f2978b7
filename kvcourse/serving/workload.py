"""Who asks for what, and when: requests made up from a seed, for `replay` to play to an engine.

A trace is a list of `Arrival`. Most stand alone and come at their own time, whether or not the engine keeps up (an open
loop). Some go on from an earlier one, as the next turn of a chat does: those can only come once that one is answered.
Prompts are random token ids, for a schedule depends on lengths and on what is shared, not on what the words mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import log
from numbers import Real
from random import Random
from sys import float_info
from typing import NamedTuple

from kvcourse.require import require_number, require_whole


@dataclass(frozen=True)
class Arrival:
    """One request: it comes at second `at`, with `prompt`, and wants exactly `max_new_tokens` tokens.

    With `after`, the number of an earlier arrival of the same trace, it goes on from that one: it comes `at` seconds
    after that one's last token, and its whole prompt is that one's whole text, answer included, and then `prompt`.
    """

    at: float
    prompt: list[int] = field(repr=False)
    max_new_tokens: int
    after: int | None = None


class Lengths(NamedTuple):
    """How many tokens a request sends, and how many it wants."""

    prompt: int
    answer: int


def mixed_lengths(
    n: int, seed: int = 0, *, prompt: int = 64, answer: int = 48, spread: float = 0.8, longest: int = 256
) -> list[Lengths]:
    """Lengths of `n` requests, log-normal, as those of real chats nearly are: most are short, a few are very long.

    `prompt` and `answer` are the medians in tokens. `spread` is the standard deviation of the logarithm: with 0.8 two
    thirds lie between the median / 2.2 and the median x 2.2. Each is at least 1, and at most `longest` (a longer one is
    drawn again, so that nothing piles up at the end). Raises `ValueError` when a number is out of range.
    """
    medians = [require_whole("prompt", prompt), require_whole("answer", answer)]
    n, spread, longest = require_whole("n", n), require_number("spread", spread), require_whole("longest", longest)
    if max(medians) > longest:
        raise ValueError(f"The medians {medians} must not be above longest={longest}.")
    random = Random(f"lengths {seed}")

    def draw(median: int) -> int:
        length = longest + 1
        while length > longest:
            length = max(1, round(random.lognormvariate(log(median), spread)))
        return length

    return [Lengths(*map(draw, medians)) for _ in range(n)]


def poisson(
    rate: float, n: int, seed: int = 0, *, lengths: Iterable[tuple[int, int]] | None = None, vocab_size: int = 256
) -> list[Arrival]:
    """`n` requests from people who know nothing of each other, `rate` a second on average: a Poisson process.

    The gaps are exponential with mean 1 / rate, the first one included. With the same seed a higher rate plays the same
    requests faster. `lengths` are n pairs (prompt, answer); by default `mixed_lengths(n, seed)`.
    """
    rate, n = require_number("rate", rate), require_whole("n", n)
    lengths = mixed_lengths(n, seed) if lengths is None else list(lengths)
    if len(lengths) != n:
        raise ValueError(f"{n} requests need {n} pairs of lengths, and {len(lengths)} were given.")
    gaps, random, now, arrivals = Random(f"gaps {seed}"), Random(f"prompts {seed}"), 0.0, []
    for prompt, answer in lengths:
        now += gaps.expovariate(1.0) / rate
        prompt, answer = require_whole("prompt", prompt), require_whole("answer", answer)
        arrivals.append(Arrival(now, random_ids(random, prompt, vocab_size), answer))
    return arrivals


def chat(
    turns: int,
    system: int | list[int] = 128,
    seed: int = 0,
    *,
    user: int = 24,
    answer: int = 32,
    chats: int = 1,
    rate: float = 1.0,
    think: float = 1.0,
    vocab_size: int = 256,
) -> list[Arrival]:
    """`chats` conversations of `turns` turns, all below one system prompt.

    Each turn sends the whole conversation so far and `user` tokens more, and wants `answer` tokens. Conversations begin
    as `poisson` at `rate` a second; each next turn comes `think` seconds after the answer before. `system` is a number
    of random ids, or the ids themselves. A conversation's turns follow one another in the list.
    """
    turns, user, answer = (require_whole(*pair) for pair in (("turns", turns), ("user", user), ("answer", answer)))
    think = require_seconds("think", think)
    random = Random(f"chat {seed}")
    system = shared_beginning(random, system, vocab_size)
    arrivals = []
    for first in poisson(rate, chats, seed, lengths=[(user, answer)] * chats, vocab_size=vocab_size):
        arrivals.append(Arrival(first.at, system + first.prompt, answer))
        for _ in range(turns - 1):
            arrivals.append(Arrival(think, random_ids(random, user, vocab_size), answer, after=len(arrivals) - 1))
    return arrivals


def agent_branches(
    branches: int = 3,
    depth: int = 2,
    system: int | list[int] = 128,
    seed: int = 0,
    *,
    instruction: int = 24,
    answer: int = 32,
    vocab_size: int = 256,
) -> list[Arrival]:
    """An agent that tries several ways at once: a tree of requests, each going on from its parent's whole text.

    One request with `system` and an instruction is answered; then `branches` instructions go on from that answer at the
    same moment, each answer is gone on with again, and so on for `depth` levels below the first:
    1 + branches + branches^2 + ... requests. They stand in the list level by level.
    """
    branches, depth = require_whole("branches", branches), require_whole("depth", depth, least=0)
    instruction, answer = require_whole("instruction", instruction), require_whole("answer", answer)
    random = Random(f"agent {seed}")
    root = shared_beginning(random, system, vocab_size) + random_ids(random, instruction, vocab_size)
    arrivals, level = [Arrival(0.0, root, answer)], [0]
    for _ in range(depth):
        parents, level = level, range(len(arrivals), len(arrivals) + len(level) * branches)
        arrivals += [
            Arrival(0.0, random_ids(random, instruction, vocab_size), answer, after=parent)
            for parent in parents
            for _ in range(branches)
        ]
    return arrivals


def whole_lengths(arrivals: list[Arrival]) -> list[Lengths]:
    """For each arrival the length of its whole prompt, with what it goes on from, and of its answer."""
    whole: list[Lengths] = []
    for number, arrival in enumerate(arrivals):
        before = 0
        if arrival.after is not None:
            if require_whole(f"after of arrival {number}", arrival.after, least=0) >= number:
                raise ValueError(f"Arrival {number} goes on from {arrival.after}, which must be an earlier one.")
            before = sum(whole[arrival.after])
        whole.append(Lengths(before + len(arrival.prompt), arrival.max_new_tokens))
    return whole


def require_seconds(name: str, value) -> float:
    """`value` as a float if it is a finite number of at least 0, else `ValueError` naming it."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= float_info.max:
        raise ValueError(f"{name}={value!r} must be a number of seconds, at least 0 and finite.")
    return float(value)


def shared_beginning(random: Random, system: int | list[int], vocab_size: int) -> list[int]:
    """The ids of a system prompt: those given, or so many random ones."""
    if isinstance(system, Iterable):
        return [int(token) for token in system]
    return random_ids(random, require_whole("system", system, least=0), vocab_size)


def random_ids(random: Random, length: int, vocab_size: int) -> list[int]:
    """`length` ids, each equally likely."""
    vocab_size = require_whole("vocab_size", vocab_size)
    return [random.randrange(vocab_size) for _ in range(length)]
