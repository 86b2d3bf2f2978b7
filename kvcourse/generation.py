"""Two ways to make text, one token after the other.

`generate_naive` runs the whole text through the model again for every token. `generate` keeps keys and values in a
cache: the prompt goes through once (prefill), then each new token alone (decode). Both give the same tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvcourse.caches import Cache, DenseCache, WindowCache
from kvcourse.layers import PADDING
from kvcourse.model import Transformer
from kvcourse.require import require_whole
from kvcourse.texts import Prompt, Texts, as_prompts, check_room


@torch.inference_mode()
def generate_naive(model: Transformer, prompt: Prompt | list[Prompt], max_new_tokens: int, **options):
    """Make `max_new_tokens` tokens, recomputing keys and values of the whole text for each. Options: see `generate`.

    This is the slow obvious version: with n tokens of text it runs n rows through every layer to get one more.
    """
    if options.keys() & {"cache", "prefill_chunk"}:
        raise TypeError("generate_naive keeps nothing, so it takes no cache and no prefill_chunk; use generate.")
    texts = Texts(model, prompt, max_new_tokens, **options)
    texts.start()
    while texts.unfinished:
        tokens, positions = pad([row.prompt + row.ids for row in texts.rows])
        texts.accept(model(tokens, positions, last_only=True))
    return texts.results()


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt: Prompt | list[Prompt],
    max_new_tokens: int,
    *,
    cache: Cache | None = None,
    prefill_chunk: int | None = None,
    **options,
):
    """Prefill the prompt once, then decode `max_new_tokens` tokens from the cache.

    One prompt (a list of ids or a 1-D tensor) gives a `Generation`; a list of prompts, of any lengths, is run as one
    batch and gives a list of them. Options, the same for `generate_naive`:

    - `temperature=0.0, top_k=None, top_p=None, seed=None`: see `Sampler`; row i of a batch draws with `seed + i`;
    - `stop_ids`: token ids that end a text (the one made is kept as its last token);
    - `on_token(row, token)`: called as each token arrives.

    The default `cache` is a `WindowCache` if the model has windows, else a `DenseCache`. One that is given goes on from
    what it holds; afterwards it holds all but the last token made, which nobody has read yet.
    That token needs no slot, so `prompt + max_new_tokens - 1` must fit. `prefill_chunk` feeds the prompt in pieces of
    that many tokens. Raises `ValueError` before any work when something is out of range or does not fit.
    """
    texts = Texts(model, prompt, max_new_tokens, cache=cache, **options)
    for _ in decode(model, texts, prefill_chunk):
        pass
    return texts.results()


@torch.inference_mode()
def decode(model: Transformer, texts: Texts, prefill_chunk: int | None = None) -> Iterator[None]:
    """Run `texts` to their end, stopping after each step: prefill gives the first token, each decode step one more.

    Raises `RuntimeError` when somebody else has used the cache between two steps.
    """
    if not texts.unfinished:
        return
    prompts = [row.prompt for row in texts.rows]
    cache = texts.cache or make_cache(model, len(prompts), texts.room)
    texts.start()
    logits = prefill(model, prompts, cache, prefill_chunk)
    while True:
        held = list(cache.lengths)
        texts.accept(logits)
        yield
        if not texts.unfinished:
            return
        if cache.lengths != held:
            raise RuntimeError(f"The cache held {held} tokens and now holds {cache.lengths}: give each text its own.")
        # One new token a row; a finished row sends padding, which is not stored.
        tokens, positions = pad([row.ids[-1:] if row.running else [] for row in texts.rows], held)
        logits = model(tokens, positions, cache, last_only=True)


def make_cache(model: Transformer, batch_size: int, max_len: int) -> Cache:
    """The cache for a model: one that keeps only what its windows reach, if it has any."""
    kind = WindowCache if any(model.config.windows) else DenseCache
    return kind(model.config, batch_size=batch_size, max_len=max_len, dtype=model.dtype, device=model.device)


@torch.inference_mode()
def prefill(model: Transformer, prompts: list[Prompt], cache: Cache, chunk: int | None = None) -> Tensor:
    """Put the prompts into the cache, at most `chunk` tokens of each at a time; return each row's last logits
    `(B, 1, vocab_size)`. Raises `ValueError` before any work when they do not fit."""
    _, prompts = as_prompts(prompts, model.config.vocab_size)
    check_room(model, prompts, 0, cache)
    longest = max(map(len, prompts))
    chunk = require_whole("prefill_chunk", longest if chunk is None else chunk)
    logits = None
    for start in range(0, longest, chunk):
        pieces = [prompt[start : start + chunk] for prompt in prompts]
        tokens, positions = pad(pieces, cache.lengths)
        new = model(tokens, positions, cache, last_only=True)
        ends_here = torch.tensor([len(piece) > 0 for piece in pieces], device=new.device)[:, None, None]
        logits = new if logits is None else torch.where(ends_here, new, logits)
    return logits


def pad(rows: list[list[int]], starts: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Rows of ids of unequal length as tokens `(B, T)` and positions `(B, T)`: padded on the right, position -1."""
    starts = [0] * len(rows) if starts is None else starts
    tokens = pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)
    positions = [torch.arange(start, start + len(row)) for row, start in zip(rows, starts, strict=True)]
    return tokens, pad_sequence(positions, batch_first=True, padding_value=PADDING)


def warm_up(model: Transformer) -> None:
    """Run a short prefill and a few decode steps. The first run of a model pays for memory, thread pools and kernel
    choice; do this before the clock starts."""
    prompt = [0] * min(32, model.config.max_seq_len - 3)
    if prompt:
        generate(model, prompt, 4)
