"""The decoder: embedding, a stack of identical layers, a head that scores every token of the vocabulary.

The parameter names are those of Hugging Face's Llama checkpoints without their leading `model.`, so a checkpoint
can be laid beside this file and read. The model knows nothing of text, sampling, or where weights come from.
"""

import torch
from torch import Tensor, nn

from kvcourse.caches import Cache, NoCache, Step
from kvcourse.config import ModelConfig
from kvcourse.device import resolve
from kvcourse.layers import PADDING, RMSNorm, SwiGLU, rotary_tables, rotate


class Attention(nn.Module):
    """Queries, keys and values of the new tokens; what they are compared with is the cache's business."""

    def __init__(self, config: ModelConfig, device=None, dtype=None):
        super().__init__()
        self.d_head = config.d_head
        q_size, kv_size = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        where = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(config.d_model, q_size, config.qkv_bias, **where)
        self.k_proj = nn.Linear(config.d_model, kv_size, config.qkv_bias, **where)
        self.v_proj = nn.Linear(config.d_model, kv_size, config.qkv_bias, **where)
        self.o_proj = nn.Linear(q_size, config.d_model, config.o_bias, **where)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.d_head, config.norm_eps, **where)
            self.k_norm = RMSNorm(config.d_head, config.norm_eps, **where)

    def split(self, x: Tensor) -> Tensor:
        """`(B, T, heads * D)` -> `(B, heads, T, D)`."""
        return x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)

    def forward(self, x: Tensor, layer: int, rotary: tuple[Tensor, Tensor], step: Step) -> Tensor:
        """x `(B, T, d_model)` -> same shape."""
        q, k, v = (self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = step.attend(layer, rotate(q, *rotary), rotate(k, *rotary), v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention mixes tokens, the feed-forward layer works on each alone; both add to the residual stream."""

    def __init__(self, config: ModelConfig, device=None, dtype=None):
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps, device, dtype)
        self.self_attn = Attention(config, device, dtype)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps, device, dtype)
        self.mlp = SwiGLU(config.d_model, config.d_ff, config.mlp_bias, device, dtype)

    def forward(self, x: Tensor, layer: int, rotary: tuple[Tensor, Tensor], step: Step) -> Tensor:
        """x `(B, T, d_model)` -> same shape."""
        x = x + self.self_attn(self.input_layernorm(x), layer, rotary, step)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """A decoder of the Llama family. `device` and `dtype` default to those the course uses on this machine.

    A new model has random weights; `load_model` fills in trained ones.
    """

    def __init__(self, config: ModelConfig, device=None, dtype=None):
        super().__init__()
        device, dtype = resolve(device, dtype)
        self.config = config
        table = torch.empty(config.vocab_size, config.d_model, device=device, dtype=dtype)
        # Not nn.Embedding's own normal_: on the meta device, where load_model builds, that one import takes 2 s.
        self.embed_tokens = nn.Embedding.from_pretrained(table.uniform_(-1, 1))
        self.layers = nn.ModuleList(Layer(config, device, dtype) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps, device, dtype)
        self.lm_head = None  # a tied head is the embedding matrix, read the other way round
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False, device=device, dtype=dtype)
        self.requires_grad_(False).eval()

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype  # an embedding in a few bits has no weight to ask

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Scores (logits) of the next token after each token: tokens `(B, T)` -> `(B, T, vocab_size)`.

        `positions` `(B, T)` on the CPU says where each token stands, -1 for padding on the right; None goes on from
        what `cache` holds (from 0 without one). With `last_only` the head runs for the last real token of each
        text alone: `(B, 1, vocab_size)`, or `(1, n, vocab_size)` if the cache packs n texts into one row. Raises
        `ValueError` on bad tokens, positions or a cache of another model.
        """
        tokens = self.check_tokens(tokens)
        cache = NoCache(self.config, tokens.shape[0]) if cache is None else cache
        cache.check_fits(self.config, tokens.shape[0], self.dtype, self.device)
        positions = cache.next_positions(tokens.shape[1]) if positions is None else positions.cpu()
        self.check_positions(tokens, positions, cache)
        with cache.step(positions) as step:
            x = self.embed_tokens(tokens)
            x = self.run_layers(x, self.rotary(positions.to(self.device)), step)
            if last_only:
                last = step.last(positions).to(self.device)
                x = x.take_along_dim(last[..., None], dim=1)
            return self.score(x, step)

    def run_layers(self, x: Tensor, rotary: tuple[Tensor, Tensor], step: Step) -> Tensor:
        """x `(B, T, d_model)`, the tokens' embeddings -> what the last layer makes of them."""
        for index, layer in enumerate(self.layers):
            x = layer(x, index, rotary, step)
        return x

    def score(self, x: Tensor, step: Step) -> Tensor:
        """What the last layer made of some tokens of a step, x `(B, T, d_model)` -> logits `(B, T, vocab_size)`."""
        return self.head(self.norm(x))

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for positions `(B, T)`, `(B, 1, T, d_head)` each: the same for every layer."""
        return rotary_tables(positions, self.config.d_head, self.config.rope_theta, self.config.rope_scaling)

    def head(self, x: Tensor) -> Tensor:
        """x `(B, T, d_model)` -> logits `(B, T, vocab_size)`."""
        if self.lm_head is not None:
            return self.lm_head(x)
        return nn.functional.linear(x, self.embed_tokens.weight)

    def check_tokens(self, tokens: Tensor) -> Tensor:
        """Tokens as int64 on the model's device; `ValueError` unless they are `(B, T)`, not empty, and every id is in
        the vocabulary."""
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.numel() == 0:
            given = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ValueError(f"tokens must be a tensor (B, T) with B and T at least 1, got {given}.")
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(f"tokens must be whole numbers (int64), got {tokens.dtype}.")
        tokens = tokens.long()
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"Token id {low if low < 0 else high} is outside the vocabulary: ids go from 0 to "
                f"{self.config.vocab_size - 1}."
            )
        return tokens.to(self.device)

    def check_positions(self, tokens: Tensor, positions: Tensor, cache: Cache) -> None:
        """Raise `ValueError` unless positions match the tokens, padding (-1) stands on the right, and the model was
        made for texts that long (or `cache` shows it no more of them than it was made for)."""
        if positions.shape != tokens.shape or positions.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"positions must be whole numbers in the shape of tokens {tuple(tokens.shape)}, "
                f"got {positions.dtype} {tuple(positions.shape)}."
            )
        after_padding = (positions[:, 1:] != PADDING) & (positions[:, :-1] == PADDING)
        if int(positions.min()) < PADDING or after_padding.any():
            raise ValueError("positions must be 0 or more, with -1 only for padding, and padding only on the right.")
        if int(positions.max()) == PADDING:
            raise ValueError("positions say that every token is padding (-1): give at least one real token.")
        if not cache.endless and int(positions.max()) >= self.config.max_seq_len:
            raise ValueError(
                f"Position {int(positions.max())} is past the model's context of {self.config.max_seq_len} tokens: "
                "give a shorter text."
            )
