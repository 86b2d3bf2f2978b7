"""How fast each pair of a head turns: rotary frequencies, and the ways they are stretched for longer texts.

A model trained on texts of one length has never seen the slow pairs finish a turn. To run longer texts, published
models divide some or all of their frequencies by a factor. Each way is a small class here; `frequencies` applies it.
Angles are worked out in float32 by `layers.rotary_tables`.
"""

import math
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from kvcourse.require import require_flag, require_number


class RopeScaling:
    """One way of changing the rotary frequencies."""

    amplitude = 1.0  # cosines and sines are multiplied by this, so scores by its square

    def __post_init__(self):
        for field in fields(self):
            name, value = f"{type(self).__name__}: {field.name}", getattr(self, field.name)
            if field.type is bool:
                require_flag(name, value)
            elif field.type in (int, float) or value is not None:
                require_number(name, value)

    def check(self, d_head: int) -> None:
        """Raise `ValueError` unless this fits heads of size `d_head`."""

    def scale(self, inverse: Tensor, theta: float) -> Tensor:
        """Frequencies in radians a token, `(D/2,)`, fastest first -> the same, changed."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation: every frequency divided by `factor` (arXiv 2306.15595)."""

    factor: float

    def scale(self, inverse: Tensor, theta: float) -> Tensor:
        return inverse / self.factor


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's bands (the model card's `rope_scaling`): pairs that turn often within the original context keep their
    frequency, those that do not finish a turn are divided by `factor`, and between the two it is blended.

    A band's edge is a number of turns in `original_max_seq_len` tokens: `high_freq_factor` and `low_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self):
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}."
            )

    def scale(self, inverse: Tensor, theta: float) -> Tensor:
        turns = self.original_max_seq_len * inverse / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return kept * inverse + (1 - kept) * inverse / self.factor


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN (arXiv 2309.00071, sections 3.2 to 3.4): bands as in `Llama3Scaling`, but the blend is even over the pairs'
    numbers, from the pair that makes `beta_fast` turns in the original context to the one that makes `beta_slow`; and
    scores are sharpened: cosines and sines are multiplied by `attention_factor`, 0.1 ln(factor) + 1 unless given.

    `truncate` moves the two edges out to whole pairs.
    """

    factor: float
    original_max_seq_len: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} must be above beta_slow={self.beta_slow}.")

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def scale(self, inverse: Tensor, theta: float) -> Tensor:
        pairs = len(inverse)

        def pair_with(turns: float) -> float:
            """The (fractional) pair that makes so many turns: pair i turns by theta ** (-i / pairs) a token."""
            return pairs * math.log(self.original_max_seq_len / (turns * 2 * math.pi)) / math.log(theta)

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # Two oddities of the published code, which models were trained with: the clamp at 2 * pairs - 1, not pairs - 1,
        # and edges that change places where the original context is too short for beta_slow turns.
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        divided = ((torch.arange(pairs) - low) / (high - low or 0.001)).clamp(0, 1)
        return (1 - divided) * inverse + divided * inverse / self.factor


@dataclass(frozen=True)
class PairScaling(RopeScaling):
    """Frequencies divided by given numbers, one for each pair, as GGUF files store Llama 3's bands."""

    divisors: tuple[float, ...]

    def __post_init__(self):
        divisors = (require_number("PairScaling: divisor", divisor) for divisor in self.divisors)
        object.__setattr__(self, "divisors", tuple(map(float, divisors)))

    def check(self, d_head: int) -> None:
        if len(self.divisors) != d_head // 2:
            raise ValueError(f"PairScaling has {len(self.divisors)} divisors, but a head has {d_head // 2} pairs.")

    def scale(self, inverse: Tensor, theta: float) -> Tensor:
        return inverse / torch.tensor(self.divisors)


@lru_cache(maxsize=64)  # asked for at every forward pass
def frequencies(d_head: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians that each pair of a head turns from one token to the next, `(d_head / 2,)` float32 on the CPU.

    Pair i turns by `theta ** (-2i / d_head)` (arXiv 2104.09864, section 3.2.2), then changed by `scaling`.
    """
    with torch.inference_mode(False):  # kept for later calls, which may need gradients
        inverse = 1.0 / theta ** (torch.arange(0, d_head, 2, dtype=torch.float32) / d_head)
        return inverse if scaling is None else scaling.scale(inverse, theta)


def amplitude(scaling: RopeScaling | None) -> float:
    """What cosines and sines are multiplied by: 1 except for YaRN."""
    return 1.0 if scaling is None else scaling.amplitude
