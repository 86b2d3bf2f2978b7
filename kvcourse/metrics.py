"""What generating cost: when each token arrived, and the figures the field reports from that."""

from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from kvcourse.device import synchronize


class Stopwatch:
    """Seconds since it was made, read only after the device has finished its work."""

    def __init__(self, device: torch.device):
        self.device = device
        synchronize(device)
        self.start = perf_counter()

    def read(self) -> float:
        synchronize(self.device)
        return perf_counter() - self.start


@dataclass
class Generation:
    """The tokens made for one prompt and the moment each arrived, in seconds from the start of the prefill.

    n tokens have n - 1 gaps between them: the first token's wait is `ttft` and is no gap.
    """

    prompt_length: int
    arrivals: list[float] = field(default_factory=list)
    stop_reason: str = "length"  # "stop" when a stop id was made: it is then the last token
    ids: list[int] = field(default_factory=list, repr=False)

    @property
    def tokens(self) -> Tensor:
        """The new token ids, `(n,)` int64 on the CPU."""
        return torch.tensor(self.ids, dtype=torch.int64)

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds. None when no token was asked for."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the n - 1 gaps, seconds."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (total - ttft) / (n - 1), seconds. None below two tokens."""
        n = len(self.arrivals)
        return (self.total - self.ttft) / (n - 1) if n > 1 else None

    @property
    def total(self) -> float:
        """Seconds from the start to the last token."""
        return self.arrivals[-1] if self.arrivals else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed: tokens after the first for each second after the first. None below two tokens."""
        return 1 / self.tpot if self.tpot else None

    def percentile(self, p: float) -> float | None:
        """The p-th percentile of the gaps, seconds, 0 < p < 100. None below two tokens."""
        return percentile(self.itl, p)


def percentile(values: list[float], p: float) -> float | None:
    """The p-th percentile, 0 < p < 100, between the two nearest values if it falls there. None without values."""
    if not 0 < p < 100:
        raise ValueError(f"percentile {p} must lie between 0 and 100, both excluded.")
    if not values:
        return None
    return float(torch.tensor(values, dtype=torch.float64).quantile(p / 100))
