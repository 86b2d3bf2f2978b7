"""The bill of what was served: tokens of three kinds, at rates of one's own machine or of a price list.

A provider bills a prompt in two parts: tokens it had to compute, and, far cheaper, those whose keys and values it still
had. The tokens of the answer are a third kind, and the dearest.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvcourse.cost import price_per_million
from kvcourse.require import require_whole


class Usage(NamedTuple):
    """Tokens by what they cost."""

    uncached: int  # of prompts, computed
    cached: int  # of prompts, found in the prefix cache
    output: int  # made

    @property
    def input(self) -> int:
        """All tokens of the prompts."""
        return self.uncached + self.cached


@dataclass(frozen=True)
class Rates:
    """Prices in US dollars for a million tokens of each kind.

    `cache_write`, where a provider has it, is what uncached input costs instead while it is also being kept for later.
    """

    input: float
    cached_input: float
    output: float
    cache_write: float | None = None
    source: str = ""  # where the price was read
    read: str = ""  # and when
    note: str = ""


class Line(NamedTuple):
    """One line of an invoice; `rate` is dollars for a million tokens."""

    what: str
    tokens: int
    rate: float
    dollars: float


@dataclass(frozen=True)
class Invoice:
    lines: tuple[Line, ...]

    @property
    def total(self) -> float:
        """US dollars."""
        return sum(line.dollars for line in self.lines)

    def __str__(self) -> str:
        rows = [f"{line.what:<15}{line.tokens:>12,} x ${line.rate:<8.4g} = ${line.dollars:.6f}" for line in self.lines]
        return "\n".join([*rows, f"{'total':<15}{'':>25} ${self.total:.6f}"])


# Read that day in stored copies of the pages named, which may be some weeks old. Prices change; the pages have today's.
READ = "2026-11-30"
PRICES = {
    "Claude Opus 5.5": Rates(
        4.00,
        0.20,
        20.00,
        cache_write=5.00,
        source="https://platform.claude.com/docs/en/models/opus-5-5/overview",
        read=READ,
        note="kept for 5 minutes after each use",
    ),
    "GPT-6.2 Sol": Rates(
        2.00,
        0.10,
        10.00,
        cache_write=2.50,
        source="https://developers.openai.com/api/docs/models/gpt-6.2-sol",
        read=READ,
        note="prompts of up to 272K tokens, kept for 30 minutes",
    ),
    "DeepSeek V4.1 Flash": Rates(
        0.30,
        0.006,
        1.20,
        source="https://api-docs.deepseek.com/quick_start/pricing",
        read=READ,
        note="peak hours; half of it at other times",
    ),
}


def usage(served: Iterable) -> Usage:
    """What answers used: of an `Engine`, `usage(engine.run().values())`; of a replay, `usage(replay.served)`.

    A prompt counts only with an answer of at least one token: for one that was aborted in the queue, or asked for no
    token, nothing was delivered. Tokens that were computed a second time after a preemption are the machine's business
    and are not billed.
    """
    served = [answer for answer in served if answer.ids]
    cached = sum(answer.cached_tokens for answer in served)
    prompts = sum(answer.prompt_length for answer in served)
    return Usage(prompts - cached, cached, sum(len(answer.ids) for answer in served))


def invoice(usage: Usage, rates: Rates, caching: bool = True) -> Invoice:
    """The bill for `usage` at `rates`. With `caching`, uncached input costs `rates.cache_write` where there is one.

    Raises `ValueError` when cached tokens are to be billed without caching.
    """
    if usage.cached and not caching:
        raise ValueError(f"{usage.cached} tokens came from the cache, so caching was on: bill them with caching=True.")
    written = caching and rates.cache_write is not None
    lines = (
        ("cache write" if written else "input", usage.uncached, rates.cache_write if written else rates.input),
        ("cached input", usage.cached, rates.cached_input),
        ("output", usage.output, rates.output),
    )
    return Invoice(tuple(Line(what, tokens, rate, tokens * rate / 1e6) for what, tokens, rate in lines))


def measured_rates(prefill_speed: float, decode_speed: float, dollars_per_hour: float) -> Rates:
    """What tokens cost on a machine that computes so many prompt tokens, or makes so many output tokens, a second.

    A cached token costs nothing here: nobody computes it, and the memory it stands in is rented anyway. With the speeds
    of a `Replay` that computed all input, its bill is exactly the rent of the machine for the time it computed.
    """
    return Rates(
        input=price_per_million(prefill_speed, dollars_per_hour),
        cached_input=0.0,
        output=price_per_million(decode_speed, dollars_per_hour),
        source=f"measured here, at ${dollars_per_hour} an hour",
    )


def chat_tokens(turns: int, system: int, user: int, answer: int, block_size: int | None = None) -> Usage:
    """The tokens of one chat: `turns` turns, each `user` tokens in and `answer` tokens out, below a system prompt.

    Turn t sends s + t u + (t - 1) a tokens, for nothing is remembered from one request to the next. Without a prefix
    cache (`block_size` None) all are computed: over n turns n s + u n (n + 1) / 2 + a n (n - 1) / 2, a square of n.
    With one, turn t finds the s + (t - 1)(u + a) - 1 tokens that the turn before left (its last token was never fed
    back), down to a multiple of `block_size`. With blocks of 1 the rest is s + n u + (n - 1): a straight line.
    """
    n, s = require_whole("turns", turns), require_whole("system", system, least=0)
    u, a = require_whole("user", user), require_whole("answer", answer)
    total = n * s + u * n * (n + 1) // 2 + a * n * (n - 1) // 2
    cached = 0
    if block_size is not None:
        size = require_whole("block_size", block_size)
        cached = sum((s + t * (u + a) - 1) // size * size for t in range(1, n))
    return Usage(total - cached, cached, n * a)
