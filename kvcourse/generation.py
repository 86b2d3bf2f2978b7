"""Two ways to make text, one token after the other.

`generate_naive` runs the whole text through the model again for every token. `generate` keeps keys and values in a
cache: the prompt goes through once (prefill), then each new token alone (decode). Both give the same tokens.
"""

from collections.abc import Callable, Iterator
from numbers import Integral
from operator import index

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvcourse.caches import Cache, DenseCache
from kvcourse.config import require_positive
from kvcourse.metrics import Generation, Stopwatch
from kvcourse.model import Transformer
from kvcourse.sampling import Sampler

Prompt = Tensor | list[int]


@torch.inference_mode()
def generate_naive(model: Transformer, prompt: Prompt | list[Prompt], max_new_tokens: int, **options):
    """Make `max_new_tokens` tokens, recomputing keys and values of the whole text for each. Options: see `generate`.

    This is the slow obvious version: with n tokens of text it runs n rows through every layer to get one more.
    """
    texts = Texts(model, prompt, max_new_tokens, None, **options)
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

    `cache` goes on from what it holds; afterwards it holds all but the last token made, which nobody has read yet.
    That token needs no slot, so `prompt + max_new_tokens - 1` must fit. `prefill_chunk` feeds the prompt in pieces of
    that many tokens. Raises `ValueError` before any work when something is out of range or does not fit.
    """
    texts = Texts(model, prompt, max_new_tokens, cache, **options)
    for _ in decode(model, texts, prefill_chunk):
        pass
    return texts.results()


@torch.inference_mode()
def decode(model: Transformer, texts: "Texts", prefill_chunk: int | None = None) -> Iterator[None]:
    """Run `texts` to their end, stopping after each step: prefill gives the first token, each decode step one more."""
    if not texts.unfinished:
        return
    cache = texts.cache or new_cache(model, texts)
    texts.start()
    texts.accept(prefill(model, [row.prompt for row in texts.rows], cache, prefill_chunk))
    yield
    while texts.unfinished:
        # One new token a row; a finished row sends padding, which is not stored.
        tokens, positions = pad([row.ids[-1:] if row.running else [] for row in texts.rows], cache.lengths)
        texts.accept(model(tokens, positions, cache, last_only=True))
        yield


@torch.inference_mode()
def prefill(model: Transformer, prompts: list[Prompt], cache: Cache, chunk: int | None = None) -> Tensor:
    """Put the prompts into the cache, at most `chunk` tokens of each at a time; return each row's last logits
    `(B, 1, vocab_size)`."""
    prompts = [list(map(int, prompt)) for prompt in prompts]
    longest = max(map(len, prompts))
    chunk = require_positive("prefill_chunk", longest if chunk is None else chunk)
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
    return tokens, pad_sequence(positions, batch_first=True, padding_value=-1)


def new_cache(model: Transformer, texts: "Texts") -> DenseCache:
    """A dense cache with exactly the room these texts need."""
    return DenseCache(model.config, len(texts.rows), texts.room, dtype=model.dtype, device=model.device)


def warm_up(model: Transformer) -> None:
    """Run a short prefill and a few decode steps. The first run of a model pays for memory, thread pools and kernel
    choice; do this before the clock starts."""
    prompt = [0] * min(32, model.config.max_seq_len - 3)
    if prompt:
        generate(model, prompt, 4)


class Row:
    """One text being written: its prompt, its sampler, and what it has become so far."""

    def __init__(self, prompt: list[int], sampler: Sampler, running: bool):
        self.prompt, self.sampler, self.running = prompt, sampler, running
        self.generation = Generation(prompt_length=len(prompt))
        self.ids = self.generation.ids


class Texts:
    """A batch of texts being written: checks the request before any work, then takes logits and keeps time."""

    def __init__(
        self,
        model: Transformer,
        prompt: Prompt | list[Prompt],
        max_new_tokens: int,
        cache: Cache | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop_ids: list[int] | set[int] | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ):
        self.model, self.cache, self.on_token = model, cache, on_token
        self.max_new_tokens = max_new_tokens
        self.stop_ids = set(stop_ids or ())
        self.single, prompts = as_prompts(prompt, model.config.vocab_size)
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens!r} must be a whole number of at least 0.")
        self.check_room(prompts)
        seeds = [None if seed is None else seed + i for i in range(len(prompts))]
        samplers = [Sampler(temperature, top_k, top_p, row_seed) for row_seed in seeds]
        self.rows = [Row(p, s, max_new_tokens > 0) for p, s in zip(prompts, samplers, strict=True)]

    def check_room(self, prompts: list[list[int]]) -> None:
        """Raise `ValueError` unless every text fits the model's context and the cache."""
        held, limit, what = [0] * len(prompts), self.model.config.max_seq_len, "the model's context"
        if self.cache is not None:
            self.cache.check_fits(self.model.config, len(prompts), self.model.dtype, self.model.device)
            held = self.cache.lengths
            room = getattr(self.cache, "max_len", limit)
            limit, what = (room, "the cache") if room < limit else (limit, what)
        # The last token made is never fed back, so it needs no place.
        needed = [h + len(p) + max(self.max_new_tokens - 1, 0) for h, p in zip(held, prompts, strict=True)]
        self.room = max(needed)
        if self.room > limit:
            row = needed.index(self.room)
            raise ValueError(
                f"{held[row]} tokens held + {len(prompts[row])} of prompt + {self.max_new_tokens} new - 1 = "
                f"{self.room} tokens, but {what} has room for {limit}: shorten the prompt or ask for fewer tokens."
            )

    def start(self) -> None:
        """Start the clock. Checks and allocation are done; what follows is the model's work."""
        self.watch = Stopwatch(self.model.device)

    @property
    def unfinished(self) -> bool:
        return any(row.running for row in self.rows)

    def accept(self, logits: Tensor) -> None:
        """Choose a token for each running row from logits `(B, 1, vocab_size)`; they all arrive now."""
        running = [i for i, row in enumerate(self.rows) if row.running]
        chosen = [self.rows[i].sampler(logits[i, 0]) for i in running]
        now = self.watch.read()
        for i, token in zip(running, chosen, strict=True):
            row = self.rows[i]
            row.ids.append(token)
            row.generation.arrivals.append(now)
            stopped = token in self.stop_ids
            row.generation.stop_reason = "stop" if stopped else "length"
            row.running = not stopped and len(row.ids) < self.max_new_tokens
            if self.on_token is not None:
                self.on_token(i, token)

    def results(self) -> Generation | list[Generation]:
        """What was made: one `Generation` for one prompt, a list for a list."""
        generations = [row.generation for row in self.rows]
        return generations[0] if self.single else generations


def as_prompts(prompt: Prompt | list[Prompt], vocab_size: int) -> tuple[bool, list[list[int]]]:
    """(was it one prompt?, the prompts as lists of ids); raise `ValueError` when one is empty or has a bad id."""
    single = getattr(prompt, "ndim", None) == 1 or all(isinstance(item, Integral) for item in prompt)
    prompts = [prompt] if single else list(prompt)
    if not prompts:
        raise ValueError("No prompt was given: pass a list of token ids, or a list of such lists.")
    lists = [[index(token) for token in p] for p in prompts]  # index: a float is an error, not cut off
    for row, ids in enumerate(lists):
        if not ids:
            raise ValueError(f"Prompt {row} is empty: a text needs at least one token to go on from.")
        bad = [token for token in ids if not 0 <= token < vocab_size]
        if bad:
            raise ValueError(f"Token id {bad[0]} in prompt {row} is outside the vocabulary of {vocab_size} tokens.")
    return single, lists
