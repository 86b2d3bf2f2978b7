"""What a forward pass costs, in closed form: floating point operations, bytes read and written, memory held.

A multiply and an add count as two operations, as everywhere in this field. Norms, softmax and activations are left
out: they are well below one percent of a decoder's operations. `torch.utils.flop_counter` counts the same way where
attention runs as plain matrix products (`SDPBackend.MATH`; the CPU's fused attention it does not see at all).
"""

from typing import NamedTuple

from kvcourse.config import ModelConfig, require_config
from kvcourse.require import require_number, require_whole


class Flops(NamedTuple):
    """Operations of one forward pass, by where they happen."""

    linear: int  # projections and feed-forward layers: grows with the new tokens
    attention: int  # queries against keys, weights against values: new tokens x all tokens
    head: int  # scores over the vocabulary

    @property
    def total(self) -> int:
        return sum(self)


class Bytes(NamedTuple):
    """Bytes one forward pass must move between memory and processor, if each number is touched once."""

    weights: int  # read once for the whole batch
    cache_read: int  # keys and values of earlier tokens
    cache_written: int  # keys and values of the new ones

    @property
    def total(self) -> int:
        return sum(self)


def flops(config: ModelConfig, new_tokens: int, context: int = 0, batch_size: int = 1, last_only: bool = True) -> Flops:
    """Operations to run `new_tokens` tokens for each of `batch_size` texts that hold `context` tokens already.

    Prefill of n tokens is `flops(config, n)`, a decode step `flops(config, 1, context)`. Attention is counted as the
    full rectangle of new tokens x all tokens, masked part included, as the flop counter does; a kernel that skips
    the masked half of a long prefill does about half of it. A layer with a window reads no key that all the new tokens
    have left behind. `last_only` runs the head for one row of each text.
    """
    new_tokens, context, batch_size = require_pass(config, new_tokens, context, batch_size)
    c, rows = config, batch_size * new_tokens
    q_size, kv_size = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    layer = c.d_model * (q_size + 2 * kv_size) + q_size * c.d_model + 3 * c.d_model * c.d_ff
    keys = sum(new_tokens + held for held in earlier_tokens(config, context))  # over all layers
    head_rows = batch_size if last_only else rows
    return Flops(
        linear=2 * rows * c.n_layers * layer,
        attention=2 * rows * 2 * c.n_heads * c.d_head * keys,  # scores, then the weighted sum of values
        head=2 * head_rows * c.d_model * c.vocab_size,
    )


def earlier_tokens(config: ModelConfig, context: int) -> list[int]:
    """For each layer, how many of `context` earlier tokens the next token reads: all, or those its window reaches."""
    return [context if window is None else min(context, window - 1) for window in config.windows]


def parameters(config: ModelConfig) -> int:
    """Number of weights. A tied head is the embedding matrix and counts once."""
    c = require_config(config)
    q_size, kv_size = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    layer = 2 * c.d_model * (q_size + kv_size) + 3 * c.d_model * c.d_ff + 2 * c.d_model
    layer += c.qkv_bias * (q_size + 2 * kv_size) + c.o_bias * c.d_model + c.mlp_bias * (2 * c.d_ff + c.d_model)
    layer += c.qk_norm * 2 * c.d_head
    matrices = 1 if c.tie_embeddings else 2
    return c.n_layers * layer + c.d_model + matrices * c.vocab_size * c.d_model


def weight_bytes(config: ModelConfig, bits: float = 16) -> int:
    """Bytes of memory for the weights at `bits` each."""
    return int(parameters(config) * require_number("bits", bits) / 8)


def cache_bytes(config: ModelConfig, seq_len: int, batch_size: int = 1, bits: float = 16) -> int:
    """Bytes of keys and values: 2 x layers x KV heads x d_head x tokens x texts x bytes a number."""
    require_config(config)
    seq_len, batch_size = require_whole("seq_len", seq_len, least=0), require_whole("batch_size", batch_size)
    numbers = 2 * config.n_layers * config.n_kv_heads * config.d_head * seq_len * batch_size
    return int(numbers * require_number("bits", bits) / 8)


def bytes_moved(config: ModelConfig, new_tokens: int, context: int = 0, batch_size: int = 1, bits: float = 16) -> Bytes:
    """Bytes a forward pass with a cache must move at least: `flops` says what the arguments mean.

    All weights are read once, except that of an untied embedding only the new tokens' rows are read. Activations
    stay in the processor's own memory and are not counted.
    """
    new_tokens, context, batch_size = require_pass(config, new_tokens, context, batch_size)
    rows = batch_size * new_tokens
    read = sum(earlier_tokens(config, context))  # over all layers, where `cache_bytes` takes the same for each
    unread = 0 if config.tie_embeddings else (config.vocab_size - min(rows, config.vocab_size)) * config.d_model
    return Bytes(
        weights=weight_bytes(config, bits) - int(unread * bits / 8),
        cache_read=cache_bytes(config, read, batch_size, bits) // config.n_layers,
        cache_written=cache_bytes(config, new_tokens, batch_size, bits),
    )


def price_per_million(tokens_per_second: float, dollars_per_hour: float) -> float:
    """Dollars that a million tokens cost on a machine that does so many a second and costs so much an hour.

    Raises `ValueError` unless both are numbers above 0.
    """
    hours = 1e6 / require_number("tokens_per_second", tokens_per_second) / 3600
    return hours * require_number("dollars_per_hour", dollars_per_hour)


def require_pass(config, new_tokens, context, batch_size) -> tuple[int, int, int]:
    """The numbers as Python ints (NumPy's overflow without a word); `ValueError` when one of the four is wrong."""
    require_config(config)
    return (
        require_whole("new_tokens", new_tokens),
        require_whole("context", context, least=0),
        require_whole("batch_size", batch_size),
    )
