"""The one interface of every cache.

A forward pass of the model is one *step* of a cache:

    with cache.step(positions) as step:
        for layer in ...:
            out = step.attend(layer, q, k, v)     # store the new k and v, attend over all that is visible

Leaving the block without an error moves the length; an error leaves the cache as it was.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from kvcourse.config import ModelConfig, require_config
from kvcourse.layers import PADDING
from kvcourse.require import require_whole


class Step(ABC):
    """What one forward pass needs to know: worked out once, used by every layer."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v `(B, H_kv, T, D)` of the new tokens; return q `(B, H, T, D)` attended over all visible keys."""

    def last(self, positions: Tensor) -> Tensor:
        """Columns `(B, n)` of the last real token of each of the n texts in a row. Here a row is one text: n = 1."""
        return (positions != PADDING).sum(1, keepdim=True).sub(1).clamp(min=0)


class Cache(ABC):
    """Keys and values of the tokens seen so far, for `batch_size` rows of text.

    `lengths` has one number for each row: how many tokens it has taken in. `length` is the longest. `max_len` is how
    many a row can take.
    """

    dtype: torch.dtype | None = None  # of the numbers kept; None: it keeps none
    device: torch.device | None = None
    open_step: Step | None = None
    endless = False  # True: no query looks back further than the model's context, however long the text

    def __init__(self, config: ModelConfig, batch_size: int = 1):
        self.config = require_config(config)
        self.batch_size = require_whole("batch_size", batch_size)
        self.max_len = config.max_seq_len
        self.lengths = [0] * self.batch_size

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory really allocated for keys and values."""

    @abstractmethod
    def begin(self, positions: Tensor) -> Step:
        """Prepare a step for new tokens at `positions` `(B, T)`; raise before anything is stored."""

    @contextmanager
    def step(self, positions: Tensor) -> Iterator[Step]:
        """One forward pass over new tokens at `positions` `(B, T)` on the CPU, -1 for padding."""
        self.require_no_open_step()
        lengths = [length + new for length, new in zip(self.lengths, self.count_new(positions), strict=True)]
        try:
            self.open_step = self.begin(positions.long())  # int32 is no index everywhere
            yield self.open_step
        except BaseException:
            self.wipe()
            raise
        finally:
            self.open_step = None  # it may hold what it has overwritten
        self.lengths = lengths

    def require_no_open_step(self) -> None:
        if self.open_step is not None:
            raise RuntimeError(
                "A step of this cache is still open: let it end before another one, reset() or truncate()."
            )

    def reset(self) -> None:
        """Forget every token. The memory stays allocated. Raises `RuntimeError` inside a step, as `truncate` does."""
        self.require_no_open_step()
        self.lengths = [0] * self.batch_size
        self.wipe()

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of each row; guesses that turned out wrong are taken back so."""
        self.require_no_open_step()
        length = require_whole("length", length, least=0)
        self.lengths = [min(held, length) for held in self.lengths]
        self.wipe()

    def wipe(self) -> None:  # noqa: B027 (a cache that keeps nothing has nothing to clear)
        """Clear what was written beyond `lengths`. A masked key counts with weight 0, but 0 x NaN is NaN."""

    def next_positions(self, new_tokens: int) -> Tensor:
        """Positions `(B, T)` of `new_tokens` further tokens in each row."""
        starts = torch.tensor(self.lengths)
        return starts[:, None] + torch.arange(new_tokens)

    def count_new(self, positions: Tensor) -> list[int]:
        """Real tokens in each row, after checking that every row goes on where it ended."""
        counts = (positions >= 0).sum(1)
        expected = self.next_positions(positions.shape[1])
        padded = torch.arange(positions.shape[1]) >= counts[:, None]
        if not torch.equal(positions, expected.masked_fill(padded, -1)):
            raise ValueError(
                f"Each row must go on from the {self.lengths} tokens it holds, with -1 for padding on the right; "
                f"got positions from {positions[:, 0].tolist()}. For a new text, call reset() on the cache first."
            )
        return counts.tolist()

    def check_fits(self, config: ModelConfig, batch_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raise `ValueError` unless this cache was made for such a model and so many rows of text.

        Weights are not compared: whoever fills a cache with one model and reads it with another of the same shape
        gets nonsense.
        """
        if config != self.config:
            mine, theirs = vars(self.config), vars(config)
            names = ", ".join(f"{n}={mine[n]} here, {theirs[n]} in the model" for n in mine if mine[n] != theirs[n])
            raise ValueError(f"This cache was made for another model ({names}); make one from model.config.")
        if batch_size != self.batch_size:
            raise ValueError(
                f"This cache holds {self.batch_size} rows of text, but {batch_size} were given; "
                f"make one with batch_size={batch_size}."
            )
        if self.dtype is not None and (dtype, device) != (self.dtype, self.device):
            raise ValueError(
                f"This cache holds {self.dtype} on {self.device}, the model computes in {dtype} on {device}; "
                "pass dtype=model.dtype, device=model.device when you make the cache."
            )

    def check_room(self, positions: Tensor) -> None:
        """Raise `ValueError` when a row would get longer than `max_len`."""
        needed = int(positions.max()) + 1
        if needed > self.max_len:
            raise ValueError(
                f"The cache has room for {self.max_len} tokens a row, but this step needs {needed}: "
                f"make a {type(self).__name__} with a larger max_len, or give a shorter text."
            )

    def allocate(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Zeros for keys and for values; `ValueError` when so much memory cannot be had."""
        try:
            with torch.inference_mode(False):  # usable in and out of inference mode, wherever it is made
                keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
                return keys, torch.zeros_like(keys)
        except (RuntimeError, TypeError) as error:  # what PyTorch raises depends on how far too large it is
            raise self.too_large(2 * prod(shape) * self.dtype.itemsize) from error

    def too_large(self, nbytes: int) -> ValueError:
        """What to raise when memory for the cache cannot be had."""
        return ValueError(
            f"A cache for {self.batch_size} x {self.max_len:,} tokens takes {nbytes / 1e9:,.1f} GB, which could not be "
            f"had on {self.device}: give a smaller max_len or batch_size."
        )
