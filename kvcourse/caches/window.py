"""The ring buffer: a layer with a window keeps the latest W tokens, and a new one takes the place of the oldest.

Memory and the time of a step stay flat however long the text grows; what left the window is gone. `sinks` first tokens
can be kept beside it. Models put much of their attention there, for want of a better place, and a model that was
trained without a window fails when they disappear (StreamingLLM, arXiv 2309.17453, section 3.1).
"""

import torch
from torch import Tensor

from kvcourse.caches.base import Cache, Step
from kvcourse.config import ModelConfig, require_config, require_window
from kvcourse.cost import slot_bytes
from kvcourse.device import as_dtype, resolve
from kvcourse.layers import attention, attention_with_sinks, rotate, turns, visible
from kvcourse.require import require_whole

LONGEST = 2**20  # tokens of a text without end: up to here an angle in float32 is off by at most 1/32 radian


class WindowCache(Cache):
    """Keys and values of the latest `window` tokens of each layer, and of the first `sinks`.

    `window` is a number of tokens, own one included, or a tuple with one for each layer, where None keeps everything;
    None stands for the model's own. A model made with windows can be run with those alone, and without sinks; one made
    without may be cut.
    A layer has `sinks + window` slots for each of `batch_size` texts (fewer if no text gets that long). The token at
    position p is in slot p if p < sinks, else in slot sinks + (p - sinks) % window.

    `max_len` is the longest text. It defaults to the model's context; where every layer has a window, and that fits
    into the context with the sinks, a text may run past it, but not past 2**20 tokens.

    With sinks, positions are places in the cache (StreamingLLM, section 3.2): once tokens have been evicted, the sinks
    are as near as if the window followed them directly. Sink j is seen from position p at the distance
    min(p, sinks + window - 1) - j, all else at its own distance. Keys are stored rotated to their place in the text,
    so that most of them need no further work; rotations add up, so turning a query back by what was evicted brings it
    as near to the sinks as it should be.

    Raises `ValueError` for a window below 1 or not the model's, for `sinks` that are not fewer than the window or stand
    beside the model's own, for a `max_len` past what is said above, and for memory that cannot be had.
    """

    def __init__(
        self,
        config: ModelConfig,
        window: int | tuple[int | None, ...] | None = None,
        sinks: int = 0,
        batch_size: int = 1,
        max_len: int | None = None,
        dtype=None,
        device=None,
    ):
        super().__init__(config, batch_size)
        self.windows, self.sinks = check_windows(config, window, sinks)
        self.endless = is_endless(config, self.windows, self.sinks)
        self.max_len = longest_text(config, self.windows, self.sinks, max_len)
        self.device, self.dtype = resolve(device, dtype)
        self.rings = {w: self.make_ring(w) for w in set(self.windows)}
        self.places = [self.windows[:layer].count(w) for layer, w in enumerate(self.windows)]  # in its ring

    def make_ring(self, window: int | None) -> "Ring":
        """All layers with this window. One that keeps everything is a ring that never comes round."""
        sinks, period = (0, self.max_len) if window is None else (self.sinks, window)
        slots = min(sinks + period, self.max_len)
        shape = (self.windows.count(window), self.batch_size, self.config.n_kv_heads, slots, self.config.d_head)
        return Ring(period, sinks, *self.allocate(shape))

    @staticmethod
    def bytes_for(
        config: ModelConfig,
        window: int | tuple[int | None, ...] | None = None,
        sinks: int = 0,
        batch_size: int = 1,
        max_len: int | None = None,
        dtype=torch.float32,
    ) -> int:
        """Bytes such a cache allocates: min(sinks + window, max_len) slots for each layer and text."""
        windows, sinks = check_windows(require_config(config), window, sinks)
        longest = longest_text(config, windows, sinks, max_len)
        slots = sum(longest if w is None else min(sinks + w, longest) for w in windows)
        rows = require_whole("batch_size", batch_size)
        return slot_bytes(config, rows * slots, bits=8 * as_dtype(dtype).itemsize)

    @property
    def nbytes(self) -> int:
        tensors = [tensor for ring in self.rings.values() for tensor in (ring.keys, ring.values)]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def slots(self, layer: int) -> Tensor:
        """Which position is in which slot of a layer, `(B, S)` on the CPU, -1 where a slot is empty."""
        if require_whole("layer", layer, least=0) >= self.config.n_layers:
            raise ValueError(f"layer={layer} must be below {self.config.n_layers}, the number of layers.")
        return self.rings[self.windows[layer]].key_positions(self.lengths)

    def truncate(self, length: int) -> None:
        """As `Cache.truncate`; `ValueError` when tokens that the cache would hold at that length were evicted."""
        length = require_whole("length", length, least=0)
        for ring in self.rings.values():
            for row, held in enumerate(self.lengths):
                if length < held and length > ring.sinks and held > ring.sinks + ring.window:
                    raise ValueError(
                        f"Row {row} cannot go back from {held} tokens to {length}: with window={ring.window}, "
                        f"positions {ring.sinks} to {held - ring.window - 1} were evicted. Call reset() and prefill "
                        f"the first {length} tokens again."
                    )
        super().truncate(length)

    def begin(self, positions: Tensor) -> Step:
        self.check_room(positions)
        return WindowStep(self, positions)

    def wipe(self) -> None:
        for window, ring in self.rings.items():
            if self.open_step is not None:
                self.open_step.rings[window].undo()
            empty = (ring.key_positions(self.lengths) < 0)[None, :, None, :, None].to(self.device)
            ring.keys.masked_fill_(empty, 0)
            ring.values.masked_fill_(empty, 0)


def check_windows(config: ModelConfig, window, sinks: int) -> tuple[tuple[int | None, ...], int]:
    """(window of each layer, sinks); `ValueError` when they are out of range or not those of the model."""
    given = require_window(config.window if window is None else window, config.n_layers)
    windows = given if isinstance(given, tuple) else (given,) * config.n_layers
    if windows != config.windows and any(config.windows):
        raise ValueError(
            f"window={window} was asked for, but the model was made with window={config.window} and computes something "
            "else with another: leave window out."
        )
    sinks = require_whole("sinks", sinks, least=0)
    if sinks and any(config.windows):
        raise ValueError(
            f"sinks={sinks} were asked for, but the model was made with window={config.window} and computes something "
            "else with sinks: leave sinks out."
        )
    narrowest = min((w for w in windows if w is not None), default=None)
    if sinks and narrowest is None:
        raise ValueError(f"sinks={sinks} need a window: without one, every token is kept.")
    if sinks and sinks >= narrowest:
        raise ValueError(
            f"sinks={sinks} must be fewer than the window of {narrowest} tokens that they are kept beside."
        )
    return windows, sinks


def is_endless(config: ModelConfig, windows: tuple[int | None, ...], sinks: int) -> bool:
    """Whether no query ever looks back further than the model's context, however long the text."""
    return None not in windows and sinks + max(windows) <= config.max_seq_len


def longest_text(config: ModelConfig, windows: tuple[int | None, ...], sinks: int, max_len: int | None) -> int:
    """`max_len`, or what it defaults to; `ValueError` when a text without end would get too long."""
    endless, limit = is_endless(config, windows, sinks), max(LONGEST, config.max_seq_len)
    default = limit if endless else config.max_seq_len
    max_len = require_whole("max_len", default if max_len is None else max_len)
    if endless and max_len > limit:
        raise ValueError(f"max_len={max_len} must be at most {limit}: further on, angles in float32 are too coarse.")
    return max_len


class Ring:
    """Keys and values of the layers with one window, `(layers, B, H_kv, S, D)` each, and which position is where."""

    def __init__(self, window: int, sinks: int, keys: Tensor, values: Tensor):
        self.window, self.sinks, self.keys, self.values = window, sinks, keys, values
        self.size = keys.shape[3]

    def slot(self, positions: Tensor) -> Tensor:
        """The slot of each position, in the same shape."""
        return torch.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.window)

    def key_positions(self, lengths: list[int]) -> Tensor:
        """The position in each slot `(B, S)` when rows hold so many tokens; -1 where a slot is empty."""
        last, slots = torch.tensor(lengths)[:, None] - 1, torch.arange(self.size)
        latest = last - (last - slots) % self.window  # of the positions that share a slot
        in_ring = latest.masked_fill(latest < self.sinks, -1)
        return torch.where(slots < self.sinks, slots.masked_fill(slots > last, -1), in_ring)


class WindowStep(Step):
    """One step of all layers: each finds what it reads and writes worked out for its ring."""

    def __init__(self, cache: WindowCache, positions: Tensor):
        self.cache = cache
        self.rings = {window: RingStep(ring, cache, positions) for window, ring in cache.rings.items()}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.rings[self.cache.windows[layer]].attend(self.cache.places[layer], q, k, v)


class RingStep:
    """Which slots one step writes in the layers of one ring, what it reads there, and who sees what.

    The key that a new token replaces is W positions older, just past its window. So a single token is stored first,
    and then reads the ring as it lies, without a copy. In a longer piece a later token replaces keys that an earlier
    one still sees: the piece attends to the old keys and its own side by side, and its latest tokens are stored.
    """

    def __init__(self, ring: Ring, cache: WindowCache, positions: Tensor):
        self.ring, self.single = ring, positions.shape[1] == 1
        held = torch.maximum(torch.tensor(cache.lengths), positions.amax(1) + 1)  # after this step
        self.plan_writing(cache, positions, held)
        if self.single:
            self.stop = min(int(held.max()), ring.size)
            key_positions = ring.key_positions(held.tolist())[:, : self.stop]
        else:
            self.stop = min(cache.length, ring.size)
            key_positions = torch.cat((ring.key_positions(cache.lengths)[:, : self.stop], positions), dim=1)
        self.plan_sinks(cache, positions, key_positions)
        self.causal = self.uniform and cache.length == 0 and int(held.max()) <= ring.sinks + ring.window
        self.mask = None
        if not self.causal:
            mask = visible(positions, key_positions, ring.window, ring.sinks)
            self.mask = None if self.turn is None and mask.all() else mask.to(cache.device)

    def plan_writing(self, cache: WindowCache, positions: Tensor, held: Tensor) -> None:
        """Where the sinks and the latest tokens of each row go; keep what they overwrite until the step is over."""
        ring = self.ring
        stored = (positions >= 0) & ((positions < ring.sinks) | (positions >= held[:, None] - ring.window))
        rows, columns = stored.nonzero(as_tuple=True)
        slots = ring.slot(positions[rows, columns])
        taken = ring.key_positions(cache.lengths)[rows, slots] >= 0
        self.replaced = rows[taken].to(cache.device), slots[taken].to(cache.device)
        self.replaced_keys = self.take_replaced(ring.keys)
        self.replaced_values = self.take_replaced(ring.values)
        self.uniform = bool((positions == positions[:1]).all()) and int(positions.min()) >= 0
        self.padding = None if self.uniform else (positions < 0)[:, None, :, None].to(cache.device)
        if self.uniform:  # every row writes the same slots
            columns, slots = columns[rows == 0], slots[rows == 0]
        self.rows, self.columns, self.slots = (index.to(cache.device) for index in (rows, columns, slots))

    def plan_sinks(self, cache: WindowCache, positions: Tensor, key_positions: Tensor) -> None:
        """How far each query must be turned back to be as near to the sinks as it should be; None: nobody must."""
        evicted = (positions - (self.ring.sinks + self.ring.window - 1)).clamp(min=0)
        self.turn = None
        if self.ring.sinks and evicted.any():
            c, back = cache.config, -evicted.to(cache.device)
            self.turn = turns(back, c.d_head, c.rope_theta, c.rope_scaling)
            is_sink = (key_positions >= 0) & (key_positions < self.ring.sinks)
            columns = is_sink.any(0).nonzero()[:, 0]
            self.sinks = columns.to(cache.device), is_sink[:, columns].to(cache.device)

    def take_replaced(self, tensor: Tensor) -> Tensor:
        rows, slots = self.replaced
        return tensor[:, rows, :, slots]

    def undo(self) -> None:
        """Put back what this step has overwritten."""
        rows, slots = self.replaced
        self.ring.keys[:, rows, :, slots] = self.replaced_keys
        self.ring.values[:, rows, :, slots] = self.replaced_values

    def store(self, tensor: Tensor, new: Tensor) -> None:
        """Write the new keys or values `(B, H_kv, T, D)` into their slots of `tensor` `(B, H_kv, S, D)`."""
        if self.uniform:
            tensor.index_copy_(2, self.slots, new[:, :, self.columns])
        else:
            tensor[self.rows, :, self.slots] = new[self.rows, :, self.columns]

    def store_and_read(self, tensor: Tensor, new: Tensor) -> Tensor:
        if self.single:
            self.store(tensor, new)
            return tensor[:, :, : self.stop]
        if self.padding is not None:
            new = new.masked_fill(self.padding, 0)  # it is masked, and 0 x NaN is NaN
        seen = torch.cat((tensor[:, :, : self.stop], new), dim=2)
        self.store(tensor, new)
        return seen

    def attend(self, place: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = self.store_and_read(self.ring.keys[place], k)
        v = self.store_and_read(self.ring.values[place], v)
        if self.turn is None:
            return attention(q, k, v, self.mask, self.causal)
        return attention_with_sinks(q, rotate(q, *self.turn), k, v, self.mask, *self.sinks)
