"""No cache: a cache that keeps nothing. The model runs the same code with it, over the tokens it is given alone."""

import torch
from torch import Tensor

from kvcourse.caches.base import Cache, Step
from kvcourse.layers import attention, visible


class NoCache(Cache):
    """Keeps no keys and no values: the new tokens look only at each other."""

    nbytes = 0

    def begin(self, positions: Tensor) -> Step:
        return NoCacheStep(positions, self.config.windows)

    def count_new(self, positions: Tensor) -> list[int]:
        """Nothing is kept, so the length stays 0. Any positions will do: keys bring their own."""
        return [0] * positions.shape[0]


class NoCacheStep(Step):
    def __init__(self, positions: Tensor, windows: tuple[int | None, ...]):
        self.positions, self.windows = positions, windows
        self.causal = bool((positions == torch.arange(positions.shape[1])).all())
        self.masks = {}  # one for each window, made when a layer first needs it

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = self.windows[layer]
        if self.causal and (window is None or q.shape[2] <= window):
            return attention(q, k, v, causal=True)
        if window not in self.masks:
            positions = self.positions.to(q.device)
            self.masks[window] = visible(positions, positions, window)
        return attention(q, k, v, self.masks[window])
