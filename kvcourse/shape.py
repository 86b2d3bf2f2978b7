"""What the memory bill needs to know of a model, whatever its architecture: the numbers that fix weights and cache.

`ModelConfig` describes what this package can run. `Shape` describes what it can count: those models, and also latent
attention (MLA), mixtures of experts, and the extra norms, biases and sinks of some families. Nothing that leaves both
counts as they are (positions, activations, scales) is in it.
"""

from dataclasses import dataclass, fields

from kvcourse.config import ModelConfig, require_window
from kvcourse.require import require_flag, require_whole


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: the cache keeps one vector a token for all heads, not keys and values of each.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. Raises `ValueError` when a size is not a positive integer, or
    `d_rope` is odd.
    """

    d_latent: int  # what keys and values are expanded from; kept
    d_rope: int  # the rotated part of a key, which all heads share; kept
    d_nope: int  # the part of a head's key that is not rotated
    d_value: int  # size of a head's value
    d_query: int | None = None  # queries are expanded from a vector of this size; None: from the residual stream

    def __post_init__(self):
        for name in ("d_latent", "d_rope", "d_nope", "d_value"):
            object.__setattr__(self, name, require_whole(name, getattr(self, name)))
        if self.d_rope % 2:
            raise ValueError(f"d_rope={self.d_rope} is odd; rotary embedding turns pairs, so it must be even.")
        if self.d_query is not None:
            object.__setattr__(self, "d_query", require_whole("d_query", self.d_query))


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer: a router picks `active` of `n` for each token.

    Raises `ValueError` when a number is out of range.
    """

    n: int
    active: int
    d_ff: int  # width inside one expert
    shared: int = 0  # further experts of this width, which see every token
    first_dense: int = 0  # that many first layers have a plain feed-forward layer instead
    router_bias: bool = False

    def __post_init__(self):
        for name, least in (("n", 1), ("active", 1), ("d_ff", 1), ("shared", 0), ("first_dense", 0)):
            object.__setattr__(self, name, require_whole(name, getattr(self, name), least))
        if self.active > self.n:
            raise ValueError(f"active={self.active} experts cannot be picked from n={self.n}.")
        require_flag("router_bias", self.router_bias)


@dataclass(frozen=True)
class Shape:
    """Numbers that fix how many weights a decoder has, and how many numbers it keeps of each token.

    Fields that `ModelConfig` has too mean the same here. Raises `ValueError` when a size is not a positive integer, a
    switch neither True nor False, or the parts do not fit each other.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    d_ff: int
    vocab_size: int
    max_seq_len: int
    window: int | tuple[int | None, ...] | None = None  # latest tokens kept, own one included; a tuple: per layer
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    n_norms: int = 2  # RMSNorms of a layer, each as wide as the residual stream
    sink_logits: bool = False  # one learned score for each query head, which takes weight as a sink would
    latent: Latent | None = None  # then n_kv_heads and d_head are those the heads would have without it
    experts: Experts | None = None
    source: str = ""  # where the numbers were published

    def __post_init__(self):
        for name in "n_layers n_heads n_kv_heads d_head d_model d_ff vocab_size max_seq_len n_norms".split():
            object.__setattr__(self, name, require_whole(name, getattr(self, name)))
        for name in ("tie_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "sink_logits"):
            require_flag(name, getattr(self, name))
        object.__setattr__(self, "window", require_window(self.window, self.n_layers))
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}.")
        for name, kind in (("latent", Latent), ("experts", Experts)):
            if not isinstance(getattr(self, name), kind | None):
                raise ValueError(f"{name}={getattr(self, name)!r} must be None or {kind.__name__} of kvcourse.shape.")
        for name in ("qkv_bias", "qk_norm"):
            if self.latent and getattr(self, name):
                raise ValueError(f"{name}=True is not counted beside a latent: make it False, or leave the latent out.")
        if not isinstance(self.source, str):
            raise ValueError(f"source={self.source!r} must be a text: it says where the numbers were published.")
        if self.experts and self.experts.first_dense > self.n_layers:
            raise ValueError(f"first_dense={self.experts.first_dense} is more than n_layers={self.n_layers}.")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many tokens it keeps; None: all."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.n_layers

    @classmethod
    def from_hf(cls, source) -> "Shape":
        """Shape of the model that a config.json describes: its text, as a dictionary, or the path of it or its folder.

        Families: those of `ModelConfig.from_hf`, and Mixtral, Gemma 2, Gemma 3 (text), Phi-3, DeepSeek-V2 and V3,
        gpt-oss. Raises `ValueError` naming the field (and its value) that is missing or not understood,
        `FileNotFoundError` when there is no such file.
        """
        from kvcourse.text_files import given_object
        from kvcourse.weights.shape_config import read_shape

        return read_shape(*given_object(source, "config.json"))


def as_shape(given) -> Shape:
    """`given` if it is a `Shape`, the shape of a `ModelConfig`, else `ValueError`: a name is easily given instead."""
    if isinstance(given, ModelConfig):
        return Shape(**{f.name: getattr(given, f.name) for f in fields(Shape) if hasattr(given, f.name)})
    if not isinstance(given, Shape):
        raise ValueError(
            'shape must be a Shape, such as kv.PUBLISHED["Llama 3.1 8B"], or a ModelConfig, such as lm.config; '
            f"got {type(given).__name__}."
        )
    return given
