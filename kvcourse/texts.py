"""A batch of texts being written: what was asked for, checked before any work, and what has been made so far.

Nothing here runs the model. `generation` does, and hands over the scores; here a token is chosen and the time noted.
"""

from collections.abc import Callable, Iterable
from numbers import Integral
from operator import index

from torch import Tensor

from kvcourse.caches import Cache, NoCache
from kvcourse.metrics import Generation, Stopwatch
from kvcourse.model import Transformer
from kvcourse.require import require_whole
from kvcourse.sampling import Sampler
from kvcourse.weights.fields import short

Prompt = Tensor | list[int]


class Row:
    """One text: its prompt, its sampler, and what it has become so far."""

    def __init__(self, prompt: list[int], sampler: Sampler, running: bool):
        self.prompt, self.sampler, self.running = prompt, sampler, running
        self.generation = Generation(prompt_length=len(prompt))
        self.ids = self.generation.ids


class Texts:
    """The texts of one call of `generate`, which documents the options.

    Raises `ValueError` before any work when something is out of range or does not fit.
    """

    def __init__(
        self,
        model: Transformer,
        prompt: Prompt | list[Prompt],
        max_new_tokens: int,
        *,
        cache: Cache | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop_ids: Iterable[int] | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ):
        if not isinstance(model, Transformer):
            raise ValueError(f"model must be a Transformer, such as lm.model, not {type(model).__name__}.")
        self.model, self.cache, self.on_token = model, cache, on_token
        self.single, prompts = as_prompts(prompt, model.config.vocab_size)
        self.max_new_tokens = require_whole("max_new_tokens", max_new_tokens, least=0)
        self.stop_ids = as_ids("stop_ids", () if stop_ids is None else stop_ids, model.config.vocab_size)
        self.room = check_room(model, prompts, self.max_new_tokens, cache)
        seed = None if seed is None else require_whole("seed", seed, least=0)
        seeds = [None if seed is None else seed + row for row in range(len(prompts))]
        samplers = [Sampler(temperature, top_k, top_p, row_seed) for row_seed in seeds]
        self.rows = [Row(p, s, self.max_new_tokens > 0) for p, s in zip(prompts, samplers, strict=True)]

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
    """(was it one prompt?, the prompts as lists of ids); `ValueError` when one is empty or has a bad id."""
    if isinstance(prompt, str) or not isinstance(prompt, Iterable) or getattr(prompt, "ndim", 1) == 0:
        raise ValueError(
            f"The prompt must be token ids, a list or a 1-D tensor, or a list of those; got {prompt!r}. "
            "For text, use lm.stream(text), or lm.encode(text) for its ids."
        )
    single = getattr(prompt, "ndim", None) == 1
    prompt = prompt if single else list(prompt)
    single = single or all(isinstance(item, Integral) for item in prompt)
    prompts = [prompt] if single else prompt
    if not prompts:
        raise ValueError("No prompt was given: pass a list of token ids, or a list of such lists.")
    lists = [as_ids(f"prompt {row}", ids, vocab_size) for row, ids in enumerate(prompts)]
    for row, ids in enumerate(lists):
        if not ids:
            raise ValueError(f"Prompt {row} is empty: a text needs at least one token to go on from.")
    return single, lists


def as_ids(name: str, ids: Iterable[int], vocab_size: int) -> list[int]:
    """Token ids as a list of ints; `ValueError` naming what is no whole number or not in the vocabulary."""
    try:
        ids = [index(token) for token in ids]
    except TypeError as error:
        raise ValueError(f"{name} must be a list of token ids, whole numbers; got {short(ids)}.") from error
    bad = [token for token in ids if not 0 <= token < vocab_size]
    if bad:
        raise ValueError(f"Token id {bad[0]} in {name} is outside the vocabulary: ids go from 0 to {vocab_size - 1}.")
    return ids


def check_room(model: Transformer, prompts: list[list[int]], new_tokens: int, cache: Cache | None) -> int:
    """How many tokens a row must hold; `ValueError` unless every text fits the model's context and the cache."""
    held, limit, what = [0] * len(prompts), model.config.max_seq_len, "the model's context"
    if cache is not None:
        if not isinstance(cache, Cache) or isinstance(cache, NoCache):
            raise ValueError(
                f"cache={cache!r} keeps no tokens: give a kv.DenseCache, or None for one of the right size. "
                "To write without a cache, use generate_naive."
            )
        cache.check_fits(model.config, len(prompts), model.dtype, model.device)
        held = cache.lengths
        if cache.endless or cache.max_len < limit:
            limit, what = cache.max_len, "the cache"
    # The last token made is never fed back, so it needs no place.
    needed = [h + len(p) + max(new_tokens - 1, 0) for h, p in zip(held, prompts, strict=True)]
    room = max(needed)
    if room > limit:
        row = needed.index(room)
        raise ValueError(
            f"{held[row]} tokens held, {len(prompts[row])} of prompt and {new_tokens} new ones need {room} places (the "
            f"last one made needs none), but {what} has room for {limit}: shorten the prompt or ask for fewer tokens."
        )
    return room
