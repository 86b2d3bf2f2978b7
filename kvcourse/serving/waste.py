"""How much of the memory set aside for keys and values holds any: three ways of reserving a maximum, and pages.

The comparison is that of PagedAttention (Kwon et al. 2023, sections 3.1 and 6.1), where systems that reserve had keys
and values in 20 % to 38 % of their memory, and pages in 96 % (figure 2). `in_pieces` and `in_pages` look at the memory
itself, slot by slot: there are the holes between texts, too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcourse.require import require_whole
from kvcourse.serving.snapshot import Snapshot
from kvcourse.serving.workload import Arrival, whole_lengths

FREE = -1  # the owner of a slot that nobody has


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


class Addresses(NamedTuple):
    """Memory over time, arrays `(slots, steps)`, as it is after each step, when those who have ended have left."""

    owner: np.ndarray  # the number of the text that has the slot, or FREE
    filled: np.ndarray  # whether it holds a token

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of all slots over all steps, how many hold a token, are reserved and hold none, and are free; sums to 1."""
        tokens, free = float(self.filled.mean()), float((self.owner == FREE).mean())
        return tokens, 1 - tokens - free, free


def in_pieces(lengths: Iterable[tuple[int, int]], slots: int) -> tuple[Addresses, list[int]]:
    """Each text gets all slots that it will need in one piece, at the first place where they fit, and in its turn.

    `lengths` are pairs (prompt, answer); all texts wait from the start. Also returns the steps in which the next one
    found enough free slots, but not in one piece. Raises `ValueError` when a text does not fit in `slots`.
    """
    lengths, free = list(lengths), np.full(require_whole("slots", slots), True)
    needs = [prompt + answer - 1 for prompt, answer in lengths]
    if not lengths or max(needs) > slots:
        raise ValueError(
            f"The longest of {len(lengths)} texts holds {max(needs, default=0)} tokens: give 1 to {slots}."
        )
    placed: list[tuple[int, int]] = []  # of each text so far: its first slot, its first step
    refused, step = [], 0
    while len(placed) < len(lengths):
        for (place, start), (_, answer), need in zip(placed, lengths, needs, strict=False):
            if start + answer == step:
                free[place : place + need] = True
        while len(placed) < len(lengths) and (place := first_hole(free, needs[len(placed)])) is not None:
            free[place : place + needs[len(placed)]] = False
            placed.append((place, step))
        if len(placed) < len(lengths) and free.sum() >= needs[len(placed)]:
            refused.append(step)
        step += 1
    return _painted(lengths, placed, slots), refused


def first_hole(free: np.ndarray, size: int) -> int | None:
    """The first place with `size` free slots in a row, or None."""
    run = 0
    for slot, is_free in enumerate(free):
        run = run + 1 if is_free else 0
        if run == size:
            return slot - size + 1
    return None


def _painted(lengths: list[tuple[int, int]], placed: list[tuple[int, int]], slots: int) -> Addresses:
    """The addresses of texts with these lengths, placed at (first slot, first step)."""
    steps = max(start + answer for (_, start), (_, answer) in zip(placed, lengths, strict=True))
    owner, filled = np.full((slots, steps), FREE), np.full((slots, steps), False)
    for text, ((place, start), (prompt, answer)) in enumerate(zip(placed, lengths, strict=True)):
        last = start + answer - 1  # after it the text has its last token, and leaves
        owner[place : place + prompt + answer - 1, start:last] = text
        for step in range(start, last):
            filled[place : place + prompt + step - start, step] = True
    return Addresses(owner, filled)


def in_pages(film: list[Snapshot]) -> Addresses:
    """The addresses of a pool, from a snapshot after each step; a block that several texts hold is the first one's."""
    size, shape = film[0].block_size, (len(film[0].blocks) * film[0].block_size, len(film))
    owner, filled = np.full(shape, FREE), np.full(shape, False)
    for step, shot in enumerate(film):
        for number, block in enumerate(shot.blocks):
            if block.owners:
                owner[number * size : (number + 1) * size, step] = block.owners[0]
                filled[number * size : number * size + block.filled, step] = True
    return Addresses(owner, filled)
