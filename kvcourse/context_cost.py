"""What a very long text costs: memory held, operations and bytes of its prefill and of one decode step; what binds.

Three things grow with a text of T tokens, each in its own way:

- the cache that is held: with T;
- attention of a decode step, its operations and the cache it reads: with T; all other operations do not grow;
- attention of the prefill: with T^2; all other operations with T.

Attention is counted here over the pairs of query and key that *see* each other, T (T + 1) / 2 of them in a causal layer
without a window: what a kernel does that skips what is masked, as FlashAttention-2 does (arXiv 2307.08691, section
3.1). `kv.flops` counts the whole rectangle of T x T, as PyTorch's flop counter does: about twice as much in a prefill,
the same in a decode step. A `Phase` carries both.
"""

from dataclasses import dataclass
from typing import Literal

from kvcourse.config import ModelConfig
from kvcourse.cost import bytes_moved, cache_bytes, flops, multiplied, weight_bytes
from kvcourse.require import require_whole
from kvcourse.roof import Ceilings
from kvcourse.shape import Shape, as_shape

# Dense bfloat16 on the tensor cores, and the memory: the data sheets give twice these operations, "with sparsity".
DATA_SHEETS = {
    # https://www.nvidia.com/en-us/data-center/h100/ (H100 SXM: 1,979 teraFLOPS with sparsity, 3.35 TB/s)
    "H100 80 GB": Ceilings(989e12, 3.35e12, "H100 80 GB", "bfloat16"),
    # https://www.nvidia.com/en-us/data-center/h200/ (H200 SXM: 1,979 teraFLOPS with sparsity, 4.8 TB/s)
    "H200 141 GB": Ceilings(989e12, 4.8e12, "H200 141 GB", "bfloat16"),
}


@dataclass(frozen=True)
class Phase:
    """One forward pass, and the least seconds that its parts take on a device; two that overlap take the longer."""

    attention_flops: int  # over the pairs that see each other
    attention_flops_full: int  # over the whole rectangle of new tokens x all tokens, as `kv.flops` counts
    other_flops: int  # projections, feed-forward layers, and the head for one row
    weight_bytes: int  # read once
    cache_bytes: int  # read and written
    ceilings: Ceilings

    @property
    def attention_seconds(self) -> float:
        """Of the operations of attention alone."""
        return self.attention_flops / self.ceilings.flops_per_second

    @property
    def other_seconds(self) -> float:
        """Of all other operations."""
        return self.other_flops / self.ceilings.flops_per_second

    @property
    def cache_seconds(self) -> float:
        """Of reading and writing the cache."""
        return self.cache_bytes / self.ceilings.bytes_per_second

    @property
    def weight_seconds(self) -> float:
        """Of reading the weights."""
        return self.weight_bytes / self.ceilings.bytes_per_second

    @property
    def compute_seconds(self) -> float:
        return self.attention_seconds + self.other_seconds

    @property
    def memory_seconds(self) -> float:
        return self.cache_seconds + self.weight_seconds

    @property
    def seconds(self) -> float:
        """The least time of the pass: the longer of its arithmetic and its reading."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def binds(self) -> Literal["attention", "other operations", "cache", "weights"]:
        """The larger half of what takes longer: operations of attention or others, bytes of cache or of weights."""
        if self.compute_seconds >= self.memory_seconds:
            return "attention" if self.attention_flops >= self.other_flops else "other operations"
        return "cache" if self.cache_bytes >= self.weight_bytes else "weights"


@dataclass(frozen=True)
class LongContext:
    """A text of `tokens` tokens: the bytes that must be held for it, and the two phases."""

    tokens: int
    weight_bytes: int
    cache_bytes: int
    prefill: Phase  # all tokens in one pass
    decode: Phase  # the one token that makes the text `tokens` long

    @property
    def held_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


def long_context(
    shape: Shape | ModelConfig,
    tokens: int,
    device: str | Ceilings = "H200 141 GB",
    *,
    bits: float = 16,
    weight_bits: float = 16,
) -> LongContext:
    """What one text of `tokens` tokens costs on one `device`, given by its name in `DATA_SHEETS` or by its ceilings,
    such as `kv.measure_ceilings()` returns for this machine.

    `bits` a number of the cache, `weight_bits` a weight; operations run at the device's rate whatever the bits. Whether
    all of it fits is not asked (`kv.fits` does), nor whether the model was made for texts that long. Time on several
    devices is at best this divided by their number. Raises `ValueError` for an unknown device, and for a shape with a
    latent or experts, whose operations or bytes `kv.flops` and `kv.bytes_moved` refuse too.
    """
    shape, tokens = as_shape(shape), require_whole("tokens", tokens)
    ceilings = device if isinstance(device, Ceilings) else DATA_SHEETS.get(device) if isinstance(device, str) else None
    if ceilings is None:
        raise ValueError(
            f"device={device!r} is not known: give one of {', '.join(map(repr, DATA_SHEETS))}, or the ceilings of a "
            "machine, such as kv.measure_ceilings()."
        )

    def phase(new_tokens: int) -> Phase:
        context = tokens - new_tokens
        work = flops(shape, new_tokens, context)
        moved = bytes_moved(shape, new_tokens, context, bits=bits)
        return Phase(
            attention_flops=4 * shape.n_heads * shape.d_head * pairs(shape, new_tokens, context),
            attention_flops_full=work.attention,
            other_flops=work.linear + work.head,
            weight_bytes=bytes_moved(shape, new_tokens, context, bits=weight_bits).weights,
            cache_bytes=moved.cache_read + moved.cache_written,
            ceilings=ceilings,
        )

    return LongContext(
        tokens, weight_bytes(shape, weight_bits), cache_bytes(shape, tokens, bits=bits), phase(tokens), phase(1)
    )


def pairs(shape: Shape | ModelConfig, new_tokens: int, context: int = 0) -> int:
    """Pairs of a new token and a token it sees, itself included, summed over the layers: of a text that holds `context`
    tokens already. A query at position p sees p + 1 tokens, and no more than the window of its layer."""

    def seen(tokens: int, window: int | None) -> int:  # by all queries of a text of so many tokens
        full = tokens if window is None else min(tokens, window)
        return full * (full + 1) // 2 + (tokens - full) * full

    return sum(seen(context + new_tokens, window) - seen(context, window) for window in shape.windows)


def crossover(shape: Shape | ModelConfig) -> tuple[float, float]:
    """(prefill, decode): the tokens of text past which attention does more operations than everything else together.

    With N weights in the layers and V x d_model in the head, a prefill does 4 L H D x T^2 / 2 operations of attention
    (L layers, H query heads of size D) and 2 N T others: equal at T = N / (L H D). A decode step does 4 L H D T and
    2 (N + V d_model): equal at T = (N + V d_model) / (2 L H D). KV heads are in neither: sharing them saves memory, and
    no operation of attention. Raises `ValueError` when a layer has a window (its attention stops growing), or a latent.
    """
    s = as_shape(shape)
    if any(s.windows) or s.latent is not None:
        raise ValueError("crossover needs a shape whose layers all attend to the whole text, without window or latent.")
    width = s.n_layers * s.n_heads * s.d_head
    return multiplied(s) / width, (multiplied(s) + s.d_model * s.vocab_size) / (2 * width)
