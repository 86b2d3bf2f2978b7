"""What a model looks like: the numbers that fix every shape in this package.

`ModelConfig` describes one decoder of the Llama family. It knows nothing about weights, devices or text.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvcourse.require import require_flag, require_number, require_whole
from kvcourse.rope import RopeScaling


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer (Llama family: RMSNorm, RoPE, grouped-query attention, SwiGLU).

    The last six fields are what Mistral, Qwen2 and Qwen3 add: they are Llama models but for those.

    The field names are the letters of the shapes used everywhere: queries are `(B, n_heads, T, d_head)`,
    keys and values `(B, n_kv_heads, T, d_head)`.

    Raises `ValueError` when a size is not a positive integer, a switch neither True nor False, or the heads cannot be
    shared out evenly.
    `dataclasses.replace` keeps what was filled in here: with another `d_model` or `n_heads`, give `d_head` and
    `n_kv_heads` too.
    """

    vocab_size: int
    n_layers: int
    n_heads: int  # query heads
    d_model: int  # width of the residual stream
    d_ff: int  # width inside the feed-forward layer
    n_kv_heads: int | None = None  # key/value heads; None: one per query head
    d_head: int | None = None  # size of one head; None: d_model / n_heads
    max_seq_len: int = 2048  # the longest text the model was made for, in tokens
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5
    tie_embeddings: bool = False  # the output head reuses the embedding matrix
    rope_scaling: RopeScaling | None = None  # how the rotary frequencies were stretched for longer texts
    window: int | tuple[int | None, ...] | None = None  # latest tokens seen, own one included; a tuple: per layer
    qkv_bias: bool = False  # the q, k and v projections add a bias
    o_bias: bool = False  # so does the one after attention
    mlp_bias: bool = False  # so do the three of the feed-forward layer
    qk_norm: bool = False  # RMSNorm over each head of q and k, before rotation

    def __post_init__(self):
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        sizes = ("vocab_size", "n_layers", "n_heads", "d_model", "d_ff", "n_kv_heads", "max_seq_len")
        for name in sizes:
            object.__setattr__(self, name, require_whole(name, getattr(self, name)))
        if self.d_head is None:
            if self.d_model % self.n_heads:
                raise ValueError(
                    f"d_model={self.d_model} does not divide into n_heads={self.n_heads} heads; give d_head."
                )
            object.__setattr__(self, "d_head", self.d_model // self.n_heads)
        object.__setattr__(self, "d_head", require_whole("d_head", self.d_head))
        if self.d_head % 2:
            raise ValueError(f"d_head={self.d_head} is odd; rotary embedding turns pairs, so it must be even.")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}: "
                "each key/value head must serve the same number of query heads."
            )
        for name in ("rope_theta", "norm_eps"):
            require_number(name, getattr(self, name))
        if self.rope_theta <= 1:
            raise ValueError(
                f"rope_theta={self.rope_theta!r} must be greater than 1: by its powers each pair turns slower than the "
                "one before."
            )
        for name in ("tie_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
            require_flag(name, getattr(self, name))
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(f"rope_scaling={self.rope_scaling!r} must be None or a RopeScaling of kvcourse.rope.")
        if self.rope_scaling is not None:
            self.rope_scaling.check(self.d_head)
        object.__setattr__(self, "window", require_window(self.window, self.n_layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many tokens a query sees, its own included; None: all earlier ones."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.n_layers

    @property
    def group_size(self) -> int:
        """How many query heads share one key/value head."""
        return self.n_heads // self.n_kv_heads

    @classmethod
    def from_hf(cls, source) -> "ModelConfig":
        """Configuration that a config.json describes: its text, as a dictionary, or the path of it or its folder.

        Llama, Mistral, Qwen2 and Qwen3. Raises `ValueError` naming the field (and its value) that is missing, not
        supported or not understood, `FileNotFoundError` when there is no such file.
        """
        from kvcourse.text_files import given_object
        from kvcourse.weights.hf_config import read_config

        return read_config(*given_object(source, "config.json"))

    def fitting(self, lengths: Iterable[int], room: int = 0) -> list[int]:
        """The lengths as they are, if texts of these lengths and `room` more tokens fit the context. Else all are
        shortened in proportion, so that the longest just fits; those that become equal are kept once.

        Raises `ValueError` when `room` is no whole number of at least 0, or leaves nothing of the context.
        """
        room = require_whole("room", room, least=0)
        lengths = [require_whole("each length", length) for length in lengths]
        limit, longest = self.max_seq_len - room, max(lengths, default=0)
        if limit < 1:
            raise ValueError(f"room={room} leaves nothing of the context of {self.max_seq_len} tokens.")
        if longest <= limit:
            return lengths
        return sorted({max(1, length * limit // longest) for length in lengths})


def require_window(window, n_layers: int) -> int | tuple[int | None, ...] | None:
    """`window` if it is None, a number of tokens, or one of these for each layer, as a tuple; else `ValueError`."""
    if not isinstance(window, list | tuple):
        return None if window is None else require_whole("window", window)
    windows = tuple(None if w is None else require_whole("window", w) for w in window)
    if len(windows) != n_layers:
        raise ValueError(f"window has {len(windows)} entries, but there are n_layers={n_layers} layers.")
    return windows


def require_config(config) -> ModelConfig:
    """`config` if it is a `ModelConfig`, else `ValueError`: a model or its name is easily given in its place."""
    if not isinstance(config, ModelConfig):
        raise ValueError(f"config must be a ModelConfig, such as lm.config; got {type(config).__name__}.")
    return config
