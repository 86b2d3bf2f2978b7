"""The plain KV cache: one block of memory for each layer, allocated once, filled from the left.

Slot i of a row holds the key and value of the token at position i. Reserving `max_len` slots up front is what
makes adding a token cheap (one small write) and what wastes memory when texts stay short; pages mend that later.
"""

import torch
from torch import Tensor

from kvcourse.caches.base import Cache, Step
from kvcourse.config import ModelConfig, require_config
from kvcourse.cost import slot_bytes
from kvcourse.device import as_dtype, resolve
from kvcourse.layers import attention, visible
from kvcourse.require import require_whole


class DenseCache(Cache):
    """Preallocated keys and values, `(n_layers, B, n_kv_heads, max_len, d_head)` each.

    `max_len` defaults to the model's `max_seq_len`; `dtype` and `device` to those the course uses here.
    """

    def __init__(self, config: ModelConfig, batch_size: int = 1, max_len: int | None = None, dtype=None, device=None):
        super().__init__(config, batch_size)
        self.max_len = require_whole("max_len", config.max_seq_len if max_len is None else max_len)
        self.device, self.dtype = resolve(device, dtype)
        shape = (config.n_layers, self.batch_size, config.n_kv_heads, self.max_len, config.d_head)
        self.keys, self.values = self.allocate(shape)
        self.written = 0  # slots that hold numbers, those of a step that failed included

    @staticmethod
    def bytes_for(config: ModelConfig, batch_size: int = 1, max_len: int | None = None, dtype=torch.float32) -> int:
        """Bytes such a cache allocates: keys and values of every layer, key/value head and slot. Windows save none."""
        require_config(config)
        rows = require_whole("batch_size", batch_size)
        slots = require_whole("max_len", config.max_seq_len if max_len is None else max_len)
        return slot_bytes(config, config.n_layers * rows * slots, bits=8 * as_dtype(dtype).itemsize)

    @property
    def nbytes(self) -> int:
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    def wipe(self) -> None:
        for row, length in enumerate(self.lengths):
            self.keys[:, row, :, length : self.written] = 0
            self.values[:, row, :, length : self.written] = 0
        self.written = self.length

    def begin(self, positions: Tensor) -> Step:
        self.check_room(positions)
        self.written = max(self.written, int(positions.max()) + 1)
        uniform = bool((positions == positions[:1]).all()) and int(positions.min()) >= 0
        return (UniformStep if uniform else RaggedStep)(self, positions)


class UniformStep(Step):
    """Every row adds the same positions: keys and values go into one slice, and read back as a view (no copy)."""

    def __init__(self, cache: DenseCache, positions: Tensor):
        self.cache = cache
        self.start, self.stop = int(positions[0, 0]), int(positions[0, -1]) + 1
        self.views = {window: self.view(window) for window in set(cache.config.windows)}

    def view(self, window: int | None) -> tuple[int, Tensor | None, bool]:
        """What a layer with this window reads: from which slot on, under which mask, or causally without one."""
        first = 0 if window is None else max(0, self.start - window + 1)
        if self.start == 0 and (window is None or self.stop <= window):
            return first, None, True
        if self.stop - self.start == 1:  # one new token sees everything from `first` on: no mask
            return first, None, False
        slots = torch.arange(self.stop, device=self.cache.device)[None]
        return first, visible(slots[:, self.start :], slots[:, first:], window), False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[:, :, self.start : self.stop] = k
        values[:, :, self.start : self.stop] = v
        first, mask, causal = self.views[self.cache.config.windows[layer]]
        return attention(q, keys[:, :, first : self.stop], values[:, :, first : self.stop], mask, causal)


class RaggedStep(Step):
    """Rows of unequal length: each real token is written to its own slot; padding is never stored."""

    def __init__(self, cache: DenseCache, positions: Tensor):
        self.cache = cache
        # How many tokens each row holds after this step.
        held = torch.maximum(torch.tensor(cache.lengths), positions.amax(1) + 1)
        self.stop = int(held.max())
        slots = torch.arange(self.stop)[None]
        key_positions = slots.masked_fill(slots >= held[:, None], -1)
        earliest = int(positions[positions >= 0].min())  # of the new tokens of all rows
        self.views = {}  # for each window: from which slot on a layer reads, under which mask
        for window in set(cache.config.windows):
            first = 0 if window is None else max(0, earliest - window + 1)
            self.views[window] = first, visible(positions, key_positions[:, first:], window).to(cache.device)
        rows, columns = (positions >= 0).nonzero(as_tuple=True)
        self.slots = positions[rows, columns].to(cache.device)
        self.rows, self.columns = rows.to(cache.device), columns.to(cache.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, self.slots] = k[self.rows, :, self.columns]
        values[self.rows, :, self.slots] = v[self.rows, :, self.columns]
        first, mask = self.views[self.cache.config.windows[layer]]
        return attention(q, keys[:, :, first : self.stop], values[:, :, first : self.stop], mask)
