"""No cache: a cache that keeps nothing. The model runs the same code with it, over the tokens it is given alone."""

import torch
from torch import Tensor

from kvcourse.caches.base import Cache, Step
from kvcourse.layers import attention, visible


class NoCache(Cache):
    """Keeps no keys and no values: the new tokens look only at each other."""

    nbytes = 0

    def begin(self, positions: Tensor) -> Step:
        return NoCacheStep(positions)

    def count_new(self, positions: Tensor) -> list[int]:
        """Nothing is kept, so the length stays 0. Any positions will do: keys bring their own."""
        return [0] * positions.shape[0]


class NoCacheStep(Step):
    def __init__(self, positions: Tensor):
        self.positions = positions
        self.causal = bool((positions == torch.arange(positions.shape[1])).all())
        self.mask = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.causal:
            return attention(q, k, v, causal=True)
        if self.mask is None:
            positions = self.positions.to(q.device)
            self.mask = visible(positions, positions)
        return attention(q, k, v, self.mask)
