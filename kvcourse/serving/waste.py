"""How much of the memory set aside for keys and values holds any: three ways of reserving a maximum, and pages.

The comparison is that of PagedAttention (Kwon et al. 2023, sections 3.1 and 6.1), where systems that reserve had keys
and values in 20 % to 38 % of their memory, and pages in 96 % (figure 2).
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvcourse.require import require_whole
from kvcourse.serving.workload import Arrival, whole_lengths


@dataclass(frozen=True)
class Reserved:
    """Slots x steps: what each way sets aside over the lives of all requests, and `tokens`, what is in use of it.

    A slot is room for keys and values of one token. Each of the others is at least `tokens`, and `share` compares.
    """

    tokens: int  # slots that hold a token
    maximum: int  # every request reserves the longest text that is allowed
    power_of_two: int  # the prompt, and the answer's length rounded up to a power of two
    known: int  # the prompt and exactly the answer, as if its length were known before
    pages: int  # whole blocks, each taken when its first token comes

    def share(self, way: str) -> float:
        """Of what `way` ("maximum", "power_of_two", "known" or "pages") sets aside, the share that holds a token."""
        return self.tokens / getattr(self, way)


def reserved(arrivals: list[Arrival], max_len: int, block_size: int = 16) -> Reserved:
    """What the requests of a trace reserve, each from its prefill to its last token, one step a token.

    A request of p prompt and n new tokens is there for n steps. In step k of them, counted from 0, p + k tokens are in
    use (the last token made is never stored). Requests are taken one by one: nothing is shared between them, and
    waiting costs no memory. Raises `ValueError` when a text does not fit in `max_len`.
    """
    max_len, block_size = require_whole("max_len", max_len), require_whole("block_size", block_size)
    lengths = whole_lengths(arrivals)
    longest = max((prompt + answer - 1 for prompt, answer in lengths), default=0)
    if longest == 0 or longest > max_len:
        raise ValueError(f"The longest of {len(lengths)} texts holds {longest} tokens: give 1 to max_len={max_len}.")

    def over_lives(slots: Callable[[int, int, int], int]) -> int:
        return sum(slots(p, n, step) for p, n in lengths for step in range(n))

    return Reserved(
        tokens=over_lives(lambda p, n, step: p + step),
        maximum=over_lives(lambda p, n, step: max_len),
        power_of_two=over_lives(lambda p, n, step: min(p + 2 ** (n - 1).bit_length(), max_len)),
        known=over_lives(lambda p, n, step: p + n - 1),
        pages=over_lives(lambda p, n, step: -(-(p + step) // block_size) * block_size),
    )
