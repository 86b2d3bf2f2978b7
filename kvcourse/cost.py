"""What a forward pass costs, in closed form: floating point operations, bytes read and written, memory held.

A multiply and an add count as two operations, as everywhere in this field. Norms, softmax and activations are left
out: they are well below one percent of a decoder's operations. `torch.utils.flop_counter` counts the same way where
attention runs as plain matrix products (`SDPBackend.MATH`; the CPU's fused attention it does not see at all).
"""

from math import ceil
from typing import NamedTuple

from kvcourse.config import ModelConfig
from kvcourse.require import require_flag, require_number, require_whole
from kvcourse.shape import Shape, as_shape


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


def flops(
    shape: Shape | ModelConfig, new_tokens: int, context: int = 0, batch_size: int = 1, last_only: bool = True
) -> Flops:
    """Operations to run `new_tokens` tokens for each of `batch_size` texts that hold `context` tokens already.

    Prefill of n tokens is `flops(shape, n)`, a decode step `flops(shape, 1, context)`. Attention is counted as the
    full rectangle of new tokens x all tokens, masked part included, as the flop counter does; a kernel that skips
    the masked half of a long prefill does about half of it. A layer with a window reads no key that all the new tokens
    have left behind. Of a mixture of experts those count that a token is sent to, and the router. `last_only` runs the
    head for one row of each text. Raises `ValueError` for latent attention: it can be run in two ways (`kvcourse.mla`)
    that differ in operations.
    """
    s, new_tokens, context, batch_size = require_pass(shape, new_tokens, context, batch_size)
    if s.latent is not None:
        raise ValueError(
            "Latent attention is run in two ways that differ in operations (kvcourse.mla has both), and the shape does "
            "not say which: take a shape without a latent; bytes_moved, which is the same for both, can be had."
        )
    rows = batch_size * new_tokens
    keys = sum(new_tokens + held for held in earlier_tokens(s, context))  # over all layers
    head_rows = batch_size if last_only else rows
    return Flops(
        linear=2 * rows * multiplied(s),
        attention=2 * rows * 2 * s.n_heads * s.d_head * keys,  # scores, then the weighted sum of values
        head=2 * head_rows * s.d_model * s.vocab_size,
    )


def multiplied(s: Shape) -> int:
    """Weights of all layers that one token is multiplied with: every matrix, of the experts those picked; no norm and
    no bias, which are added."""
    attention = 2 * s.d_model * (s.n_heads + s.n_kv_heads) * s.d_head
    dense = 3 * s.d_model * s.d_ff
    if s.experts is None:
        return s.n_layers * (attention + dense)
    e = s.experts
    mixture = s.d_model * e.n + (e.active + e.shared) * 3 * s.d_model * e.d_ff
    return s.n_layers * attention + e.first_dense * dense + (s.n_layers - e.first_dense) * mixture


def earlier_tokens(shape: Shape | ModelConfig, context: int) -> list[int]:
    """For each layer, how many of `context` earlier tokens the next token reads: all, or those its window reaches."""
    return [context if window is None else min(context, window - 1) for window in shape.windows]


def parameters(shape: Shape | ModelConfig, active_only: bool = False) -> int:
    """Number of weights. A tied head is the embedding matrix and counts once.

    `active_only` counts what one token is multiplied with: of a mixture of experts those picked, and not an embedding
    of which it reads one row.
    """
    s, active_only = as_shape(shape), require_flag("active_only", active_only)
    layers = s.n_layers * (attention_parameters(s) + s.n_norms * s.d_model)
    if s.experts is None:
        layers += s.n_layers * feed_forward_parameters(s, s.d_ff)
    else:
        e = s.experts
        router = (s.d_model + e.router_bias) * e.n
        mixture = router + (e.active if active_only else e.n) * feed_forward_parameters(s, e.d_ff)
        mixture += e.shared * feed_forward_parameters(s, e.d_ff)
        layers += e.first_dense * feed_forward_parameters(s, s.d_ff) + (s.n_layers - e.first_dense) * mixture
    matrices = 1 if s.tie_embeddings or active_only else 2
    return layers + s.d_model + matrices * s.vocab_size * s.d_model


def attention_parameters(s: Shape) -> int:
    """Weights of one attention layer. With a latent, keys and values are two projections in a row, with a norm between;
    so are queries, unless they come straight from the residual stream."""
    if s.latent is None:
        q_size, kv_size = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
        weights = 2 * s.d_model * (q_size + kv_size) + s.qkv_bias * (q_size + 2 * kv_size)
    else:
        m, q_size = s.latent, s.n_heads * (s.latent.d_nope + s.latent.d_rope)
        weights = s.d_model * q_size if m.d_query is None else m.d_query * (s.d_model + 1 + q_size)
        weights += s.d_model * (m.d_latent + m.d_rope) + m.d_latent  # down, and the norm of what is kept
        weights += m.d_latent * s.n_heads * (m.d_nope + m.d_value)  # up to keys and values
        weights += s.n_heads * m.d_value * s.d_model
    return weights + s.o_bias * s.d_model + s.qk_norm * 2 * s.d_head + s.sink_logits * s.n_heads


def feed_forward_parameters(s: Shape, d_ff: int) -> int:
    """Weights of one feed-forward layer, or of one expert: up, gate and down."""
    return 3 * s.d_model * d_ff + s.mlp_bias * (2 * d_ff + s.d_model)


def weight_bytes(shape: Shape | ModelConfig, bits: float = 16) -> int:
    """Bytes of memory for the weights at `bits` each."""
    return to_bytes(parameters(shape), bits)


def cache_bytes(
    shape: Shape | ModelConfig, seq_len: int, batch_size: int = 1, bits: float = 16, block_size: int = 1
) -> int:
    """Bytes of cache that must be held for `batch_size` texts of `seq_len` tokens, at `bits` a number.

    Without windows: 2 x layers x KV heads x d_head x tokens x texts x bytes a number. A layer with a window keeps the
    latest `window` tokens of a text. Memory that comes in pages of `block_size` tokens is held in whole pages. Those of
    a window count as a ring of pages, written over and over; pages that follow the text may need one more.
    """
    shape = as_shape(shape)
    seq_len, batch_size = require_whole("seq_len", seq_len, least=0), require_whole("batch_size", batch_size)
    block_size = require_whole("block_size", block_size)
    kept = [seq_len if window is None else min(seq_len, window) for window in shape.windows]
    slots = sum(-(-tokens // block_size) * block_size for tokens in kept)
    return batch_size * slot_bytes(shape, slots, bits)


def slot_bytes(shape: Shape | ModelConfig, slots: int, bits: float = 16) -> int:
    """Bytes of `slots` slots: what one layer keeps of one token, a key and a value for each KV head.

    With latent attention (MLA) it is the latent and the rotated part of the key, once for all heads.
    """
    shape, slots = as_shape(shape), require_whole("slots", slots, least=0)
    latent = shape.latent
    numbers = latent.d_latent + latent.d_rope if latent else 2 * shape.n_kv_heads * shape.d_head
    return to_bytes(numbers * slots, bits)


def bits_per_number(bits: float, group_size: int, scale_bits: float = 16, zero_bits: float = 0) -> float:
    """Bits that a number really takes when each `group_size` numbers share a scale, and a zero point if it has bits.

    4 bits in groups of 32 with 16-bit scale and zero point are 5.0.
    """
    added = 0
    for name, value in (("scale_bits", scale_bits), ("zero_bits", zero_bits)):
        if value != 0 or isinstance(value, bool):
            added += require_number(name, value)
    return require_number("bits", bits) + added / require_whole("group_size", group_size)


def to_bytes(numbers: int, bits: float) -> int:
    """Bytes for so many numbers of `bits` bits each, the last byte whole."""
    bits = require_number("bits", bits)
    try:
        return ceil(numbers * bits / 8)
    except OverflowError as error:
        raise ValueError(f"So many numbers of bits={bits!r} each cannot be counted: give fewer of both.") from error


def bytes_moved(
    shape: Shape | ModelConfig, new_tokens: int, context: int = 0, batch_size: int = 1, bits: float = 16
) -> Bytes:
    """Bytes a forward pass with a cache must move at least: `flops` says what the arguments mean.

    All weights are read once, except that of an untied embedding only the new tokens' rows are read. Activations
    stay in the processor's own memory and are not counted. Raises `ValueError` for a mixture of experts and more than
    one token: which experts are read is then up to the router.
    """
    s, new_tokens, context, batch_size = require_pass(shape, new_tokens, context, batch_size)
    rows = batch_size * new_tokens
    if s.experts is not None and rows > 1:
        raise ValueError(
            f"How many experts {rows} tokens read between them is up to the router, not to the shape: give one new "
            "token of one text, or a shape without experts."
        )
    read = sum(earlier_tokens(s, context))  # over all layers
    embedding = 0 if s.tie_embeddings else min(rows, s.vocab_size) * s.d_model
    return Bytes(
        weights=to_bytes(parameters(s, active_only=True) + embedding, bits),
        cache_read=batch_size * slot_bytes(s, read, bits),
        cache_written=batch_size * slot_bytes(s, s.n_layers * new_tokens, bits),
    )


def price_per_million(tokens_per_second: float, dollars_per_hour: float) -> float:
    """Dollars that a million tokens cost on a machine that does so many a second and costs so much an hour.

    Raises `ValueError` unless both are numbers above 0.
    """
    hours = 1e6 / require_number("tokens_per_second", tokens_per_second) / 3600
    return hours * require_number("dollars_per_hour", dollars_per_hour)


def require_pass(shape, new_tokens, context, batch_size) -> tuple[Shape, int, int, int]:
    """The shape, and the numbers as Python ints (NumPy's overflow without a word); `ValueError` when one is wrong."""
    return (
        as_shape(shape),
        require_whole("new_tokens", new_tokens),
        require_whole("context", context, least=0),
        require_whole("batch_size", batch_size),
    )
