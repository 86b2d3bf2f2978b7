"""A cache in few bits: old keys and values are rounded and packed, the latest stay as they are.

Keys have channels that are large in every token, so they are rounded channel by channel, over groups of tokens; values
have none, so they are rounded token by token (KIVI, arXiv 2402.02750, section 3). What is read is decoded first, so a
step does more work than with a `DenseCache`, not less: it is memory that is saved.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvcourse.caches.base import Cache, Step
from kvcourse.caches.quantized_store import Layout, Part, Store, cache_grid, spans
from kvcourse.config import ModelConfig, require_config
from kvcourse.device import as_dtype, resolve
from kvcourse.layers import attention, visible
from kvcourse.quant.grid import in_dtype
from kvcourse.require import require_whole


class Parts(NamedTuple):
    keys: Part
    values: Part


class QuantizedCache(Cache):
    """Keys and values in `bits` bits (2, 3, 4 or 8) and a scale and a minimum for each group of `group_size` numbers.

    `key_axis` and `value_axis` say how groups lie: "channel", `group_size` tokens of one channel, or "token",
    `group_size` channels of one token. After n tokens, rounded are

    - with the axis "channel" n // residual x residual (with residual=0, n // group_size x group_size): tokens wait
      until `residual` are there, a multiple of `group_size`, and are then rounded together;
    - with the axis "token" max(0, n - residual): the latest `residual` are always exact.

    A step attends over what was rounded before it, and over everything newer exactly, its own tokens too. So codes
    depend on the keys and values alone, not on how they arrived. Scale and minimum are float16, or bfloat16 in a cache
    of that dtype. A layer's window is kept to, but saves no memory here.

    Raises `ValueError` for bits that are none of these, a `group_size` that does not divide `d_head` (axis "token") or
    `residual` (axis "channel"), and for memory that cannot be had.
    """

    def __init__(
        self,
        config: ModelConfig,
        bits: int,
        group_size: int = 32,
        residual: int = 32,
        batch_size: int = 1,
        max_len: int | None = None,
        *,
        key_axis: str = "channel",
        value_axis: str = "token",
        dtype=None,
        device=None,
    ):
        super().__init__(config, batch_size)
        self.device, self.dtype = resolve(device, dtype)
        self.max_len = require_whole("max_len", config.max_seq_len if max_len is None else max_len)
        layouts = plan(config, bits, group_size, residual, key_axis, value_axis, self.dtype)
        shape = (config.n_layers, self.batch_size, config.n_kv_heads, self.max_len)
        try:
            self.keys, self.values = (Store(layout, *shape, self.dtype, self.device) for layout in layouts)
        except (RuntimeError, TypeError) as error:  # what PyTorch raises depends on how far too large it is
            heads = config.n_layers * self.batch_size * config.n_kv_heads
            size = heads * sum(layout.bytes_for(self.max_len, self.dtype.itemsize) for layout in layouts)
            raise self.too_large(size) from error
        self.bits, self.group_size = layouts[0].grid.bits, layouts[0].grid.group_size
        self.residual, self.key_axis, self.value_axis = layouts[0].residual, key_axis, value_axis

    @staticmethod
    def bytes_for(
        config: ModelConfig,
        bits: int,
        group_size: int = 32,
        residual: int = 32,
        batch_size: int = 1,
        max_len: int | None = None,
        *,
        key_axis: str = "channel",
        value_axis: str = "token",
        dtype=torch.float32,
    ) -> int:
        """Bytes such a cache allocates: codes, scales and minimums for what can be rounded, and the exact tokens."""
        require_config(config)
        slots = require_whole("max_len", config.max_seq_len if max_len is None else max_len)
        heads = config.n_layers * require_whole("batch_size", batch_size) * config.n_kv_heads
        dtype = as_dtype(dtype)
        layouts = plan(config, bits, group_size, residual, key_axis, value_axis, dtype)
        return heads * sum(layout.bytes_for(slots, dtype.itemsize) for layout in layouts)

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for store in self.stores for tensor in store.tensors)

    @property
    def stores(self) -> tuple[Store, Store]:
        return self.keys, self.values

    @property
    def quantized_keys(self) -> list[int]:
        """How many keys of each row are rounded; the others are exact."""
        return [self.keys.layout.quantized(length) for length in self.lengths]

    @property
    def quantized_values(self) -> list[int]:
        """How many values of each row are rounded."""
        return [self.values.layout.quantized(length) for length in self.lengths]

    def parts(self, layer: int, row: int = 0) -> Parts:
        """(keys, values) of a layer and row: codes, scales, minimums and exact numbers, as `Part` says; copies."""
        for name, value, limit in (("layer", layer, self.config.n_layers), ("row", row, self.batch_size)):
            if require_whole(name, value, least=0) >= limit:
                raise ValueError(f"{name}={value} must be below {limit}.")
        return Parts(*(store.part(layer, row, self.lengths[row]) for store in self.stores))

    def truncate(self, length: int) -> None:
        """As `Cache.truncate`; `ValueError` when tokens that the cache would hold exactly then are rounded already."""
        length = require_whole("length", length, least=0)
        for layout in (store.layout for store in self.stores):
            for row, held in enumerate(self.lengths):
                first, last = layout.quantized(min(length, held)), min(length, layout.quantized(held))
                if first < last:
                    raise ValueError(
                        f"Row {row} cannot go back from {held} tokens to {length}: the {layout.what} of positions "
                        f"{first} to {last - 1} would be exact again, but are rounded. Call reset() and prefill the "
                        f"first {length} tokens again."
                    )
        super().truncate(length)

    def begin(self, positions: Tensor) -> Step:
        self.check_room(positions)
        return QuantizedStep(self, positions)

    def wipe(self) -> None:
        if self.open_step is not None:
            self.open_step.keys.undo()
            self.open_step.values.undo()
        for store in self.stores:
            store.wipe(self.lengths)


def plan(config: ModelConfig, bits, group_size, residual, key_axis, value_axis, dtype) -> tuple[Layout, Layout]:
    """How keys and values are laid out; `ValueError` when that cannot be done."""
    grid, residual = cache_grid(bits, group_size, dtype), require_whole("residual", residual, least=0)
    axes = (("keys", key_axis), ("values", value_axis))
    return tuple(Layout(what, axis, grid, residual, config.d_head) for what, axis in axes)


class QuantizedStep(Step):
    """One step of all layers. Keys and values are laid out by position, for the attention of all caches."""

    def __init__(self, cache: QuantizedCache, positions: Tensor):
        self.windows = cache.config.windows
        before = torch.tensor(cache.lengths)
        after = torch.maximum(before, positions.amax(1) + 1)
        self.keys, self.values = (StoreStep(store, before, after) for store in cache.stores)
        slots = torch.arange(int(after.max()))[None]
        key_positions = slots.masked_fill(slots >= after[:, None], -1)
        self.views = {window: view(positions, key_positions, window, cache.device) for window in set(self.windows)}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.keys.store_and_read(layer, k), self.values.store_and_read(layer, v)
        first, mask, causal = self.views[self.windows[layer]]
        return attention(q, keys[:, :, first:], values[:, :, first:], mask, causal)


def view(positions: Tensor, key_positions: Tensor, window: int | None, device) -> tuple[int, Tensor | None, bool]:
    """What a layer with this window reads: from which position on, under which mask, or causally without one."""
    width = positions.shape[1]
    if torch.equal(positions, torch.arange(width).expand_as(positions)) and (window is None or width <= window):
        return 0, None, True
    earliest = int(positions[positions >= 0].min())  # of the new tokens of all rows
    first = 0 if window is None else max(0, earliest - window + 1)
    mask = visible(positions, key_positions[:, first:], window)
    return first, None if mask.all() else mask.to(device), False


class StoreStep:
    """What one forward pass reads, rounds and keeps in a store, worked out once for all layers.

    Rows go from `before` to `after` tokens `(B,)`. A layer attends over what was rounded before, and over everything
    newer exactly, its own tokens too; only then is rounded what has to leave the ring, or never gets into it.
    """

    def __init__(self, store: Store, before: Tensor, after: Tensor):
        self.store, self.layout, self.device = store, store.layout, store.ring.device
        self.alike = bool((before == before[0]).all() and (after == after[0]).all())  # all rows, so that slices do
        rounded, leaving = self.layout.quantized(before), self.layout.quantized(after)
        self.rounded, self.length = int(rounded.max()), int(after.max())
        self.waiting = self.place(rounded, before)
        self.new = self.place(before, after)
        self.columns = self.place(before - before, after - before)
        self.kept = self.place(torch.maximum(before, leaving), after)
        self.waiting_slots, self.kept_slots = self.in_ring(self.waiting), self.in_ring(self.kept)
        self.replaced = store.ring[:, *self.kept_slots]
        self.plan_rounding(before, rounded, leaving)

    def place(self, starts: Tensor, stops: Tensor) -> tuple:
        """Index of the tokens from `starts[row]` to before `stops[row]` of each row, in a tensor `(B, H_kv, S, D)`."""
        if self.alike:
            return slice(None), slice(None), slice(int(starts[0]), int(stops[0]))
        rows, positions = (index.to(self.device) for index in spans(starts, stops))
        return rows, slice(None), positions

    def in_ring(self, place: tuple) -> tuple:
        """Index of the same tokens in the ring."""
        *rows, positions = place
        if self.alike:
            positions = torch.arange(positions.start, positions.stop, device=self.device)
        return *rows, self.store.slot(positions)

    def plan_rounding(self, before: Tensor, rounded: Tensor, leaving: Tensor) -> None:
        """Round what leaves the ring, now and for all layers at once: in a decode step that is all there is to round,
        and as many small operations for each layer would take long. Blocks with new tokens in them have to wait."""
        span = self.layout.span
        rows, blocks = spans(rounded // span, leaving // span)
        complete = (blocks + 1) * span <= before[rows]
        if complete.any():
            old = rows[complete].to(self.device), blocks[complete].to(self.device)
            slots = self.store.slot(self.layout.positions(old[1]))
            self.store.write(slice(None), *old, self.store.ring[:, old[0][:, None], :, slots])
        self.blocks = rows[~complete].to(self.device), blocks[~complete].to(self.device)

    def store_and_read(self, layer: int, new: Tensor) -> Tensor:
        """Store new keys or values `(B, H_kv, T, D)`; return all that rows hold, by position, `(B, H_kv, S, D)`."""
        store, ring, (rows, blocks) = self.store, self.store.ring[layer], self.blocks
        seen = new.new_empty(*new.shape[:2], self.length, new.shape[3])
        seen[:, :, : self.rounded] = in_dtype(store.read(layer, self.rounded), seen.dtype)
        seen[:, :, self.rounded :] = 0  # where a row is shorter: that is masked, but 0 x NaN is NaN
        seen[self.waiting] = ring[self.waiting_slots]
        seen[self.new] = new[self.columns]
        if len(rows):
            x = seen[None][:, rows[:, None], :, self.layout.positions(blocks)]
            store.write(slice(layer, layer + 1), rows, blocks, x)
        ring[self.kept_slots] = seen[self.kept]
        return seen

    def undo(self) -> None:
        """Put back what this step has overwritten in the ring."""
        self.store.ring[:, *self.kept_slots] = self.replaced
