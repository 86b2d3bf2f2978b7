"""How good a model is, in two figures: perplexity, for text as it comes, and recall, for what was said earlier.

Perplexity is an average over all tokens, most of which the last few words give away. A model that forgets what stood
far back loses little in it, and much in recall.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from statistics import NormalDist, mean

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvcourse.caches import Cache
from kvcourse.config import ModelConfig
from kvcourse.generation import pad
from kvcourse.layers import PADDING
from kvcourse.lm import LM
from kvcourse.model import Transformer
from kvcourse.require import require_whole
from kvcourse.texts import as_ids, check_room
from kvcourse.tokenizer import Tokenizer
from kvcourse.training.stories.probes import Probe, probes
from kvcourse.weights.shipped import STAND_IN, shipped_folder

AT_ONCE = 2**24  # logits: 64 MB of them in float32
CHUNK = 32  # tokens that go through a cache at once: as many as a QuantizedCache keeps exact by default
NO_NUMBERS = "The model's scores are no numbers (NaN): they overflowed, or its weights are damaged."


def transformer_of(model: LM | Transformer) -> Transformer:
    """The model that computes; `ValueError` when there is none."""
    model = model.model if isinstance(model, LM) else model
    if not callable(model) or not isinstance(getattr(model, "config", None), ModelConfig):
        raise ValueError(f"model must be an LM, as load_model gives it, or a Transformer, not {type(model).__name__}.")
    return model


def at_most(name: str, value, most: int, what: str) -> int:
    """`value` as an int if it is a whole number from 1 to `most`, else `ValueError` naming both."""
    whole = require_whole(name, value)
    if whole > most:
        raise ValueError(f"{name}={value!r} must be at most {most}, {what}.")
    return whole


@torch.no_grad()
def perplexity(
    model: LM | Transformer,
    tokens: Tensor | list[int],
    context: int | None = None,
    stride: int | None = None,
    *,
    cache: Callable[[int], Cache] | None = None,
    chunk: int | None = None,
) -> float:
    """Perplexity of a text: e to the mean negative log likelihood of a token, in nats.

    A model that chooses evenly among k tokens has a perplexity of k. `tokens` are the ids of one text, `(n,)`; every
    token but the first is scored, once.

    A text that is longer than `context` (default: the model's context) is read in windows of `context` tokens, each
    `stride` tokens (default: half of `context`) after the one before. The first window scores the token after each of
    its own; each later one only those that were not scored yet, `stride` of them. So a token is predicted from all
    tokens before it, or, where there are more than `context`, from at least `context - stride + 1` and at most
    `context` of them: a smaller stride gives each token more of its past, and takes longer.

    The model runs without a cache. To see what a lossy one costs, give a function of the number of texts that makes
    `cache`: each window then goes through a new one, `chunk` tokens (default: 32) at a time. A step attends to its own
    tokens, and to those that the cache keeps as they are, exactly, and to older ones as the cache reads them back.
    Decoding would see them so one token at a time; with a large chunk the loss looks smaller than it is there.

    Raises `ValueError` for fewer than two tokens, what is no list of token ids of the vocabulary, a `context`, `stride`
    or `chunk` out of range, and a cache of another model or without room; `RuntimeError` when the model's scores are no
    numbers.
    """
    model = transformer_of(model)
    chunk = chunk_size(cache, chunk)
    limit = model.config.max_seq_len
    context = at_most("context", limit if context is None else context, limit, "the model's own")
    stride = at_most("stride", (context + 1) // 2 if stride is None else stride, context, "the context")
    text = torch.tensor(as_ids("tokens", one_text(tokens), model.config.vocab_size))
    if len(text) < 2:
        raise ValueError(f"tokens has {len(text)}, but at least 2 are needed: the first is never predicted.")
    total = 0.0
    for (size, new), group in groupby(windows(len(text), context, stride), key=lambda window: window[1:]):
        starts = torch.tensor([start for start, *_ in group])
        for batch in starts.split(max(1, AT_ONCE // (size * model.config.vocab_size))):
            rows = text[batch[:, None] + torch.arange(size + 1)]
            logits = model(rows[:, :-1]) if cache is None else in_steps(model, rows[:, :-1], cache, chunk)
            total += loss(logits[:, -new:], rows[:, -new:])
    if math.isnan(total):
        raise RuntimeError(NO_NUMBERS)
    mean = total / (len(text) - 1)
    return math.exp(mean) if mean < 700 else math.inf  # a float ends at e to the 709


def one_text(tokens, name: str = "tokens") -> Sequence:
    """The items of what may be the ids of a text, in their order, else `ValueError`: True and False are no ids."""
    items = tokens.tolist() if getattr(tokens, "ndim", None) == 1 else tokens
    good = isinstance(items, Sequence) and not isinstance(items, str | bytes)
    if not good or any(isinstance(item, bool) for item in items):
        raise ValueError(
            f"{name} must be the ids of one text, whole numbers in a list or a 1-D tensor; lm.encode(text) gives them."
        )
    return items


def windows(n: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, size, new) of each window over a text of n tokens: it reads `size` tokens from `start` on, and scores the
    last `new` of those that come next."""
    start = scored = 0
    while scored < n - 1:
        end = min(start + context, n - 1)
        yield start, end - start, end - scored
        start, scored = start + stride, end


def chunk_size(cache: Callable[[int], Cache] | None, chunk: int | None) -> int:
    """`chunk`, or its default; `ValueError` when it is no number of tokens, or there is no `cache` to go through."""
    if cache is None and chunk is not None:
        raise ValueError(f"chunk={chunk!r} says how many tokens go through a cache at a time: give a cache too.")
    if cache is not None and not callable(cache):
        raise ValueError(
            f"cache must be a function that makes a cache for so many texts, got {type(cache).__name__}: "
            "give lambda batch_size: kv.QuantizedCache(model.config, 4, batch_size=batch_size)."
        )
    return require_whole("chunk", CHUNK if chunk is None else chunk)


def in_steps(model: Transformer, tokens: Tensor, cache: Callable[[int], Cache], chunk: int) -> Tensor:
    """Logits `(B, T, V)` of tokens `(B, T)` that go through a new cache, `chunk` of each row at a time."""
    made = cache(len(tokens))
    if not isinstance(made, Cache) or made.length:
        given = f"one that holds {made.length} tokens already" if isinstance(made, Cache) else repr(made)
        raise ValueError(f"cache must make a new cache each time it is called, but gave {given}.")
    check_room(model, tokens.tolist(), 0, made)
    return torch.cat([model(piece, cache=made) for piece in tokens.split(chunk, 1)], 1)


def loss(logits: Tensor, tokens: Tensor) -> float:
    """Sum of the negative log likelihoods of tokens `(B, T)` under logits `(B, T, V)`, in nats. The logarithms are
    taken in float32 and some rows at a time, so that this needs little memory beside the logits."""
    logits, tokens = logits.flatten(0, 1), tokens.flatten().to(logits.device)
    rows = max(1, AT_ONCE // logits.shape[1])
    parts = zip(logits.split(rows), tokens.split(rows), strict=True)
    return sum(cross_entropy(part.float(), ids, reduction="none").double().sum().item() for part, ids in parts)


@dataclass(frozen=True)
class Recall:
    """`right` of `asked` questions were answered right, each about what was said `distance` tokens before. `guessed` is
    the share that guessing gets, if known: only what is above it shows that something was looked up."""

    right: int
    asked: int
    distance: int
    guessed: float | None = None

    @property
    def share(self) -> float:
        return self.right / self.asked

    @property
    def low(self) -> float:
        """Lower end of the 95% interval of the share that endlessly many questions would give."""
        return wilson(self.right, self.asked)[0]

    @property
    def high(self) -> float:
        """Upper end of that interval."""
        return wilson(self.right, self.asked)[1]

    def __str__(self):
        share = f"{self.right} of {self.asked} questions answered right at {self.distance} tokens: {self.share:.1%}"
        guessed = "" if self.guessed is None else f"; by guessing {self.guessed:.1%}"
        return f"{share} (95% interval {self.low:.1%} to {self.high:.1%}){guessed}"


@torch.no_grad()
def recall(model: LM | Transformer, distance: int, questions: int = 200, seed: int = 0, split: str = "test") -> Recall:
    """How many questions a model answers right about something that a story said `distance` tokens before.

    The course makes up the stories (`kvcourse.training.stories.probes`, where `split` and `distance` are explained);
    the same arguments give the same questions. Right is an answer that greedy decoding would write in full: each of
    its tokens has the highest score after the question and the answer's tokens before it. That takes one pass. A
    `Transformer` alone is asked in the tokens of the course's own models, an `LM` in those of its tokenizer.

    `guessed` in the result is what can be had without looking anything up (`guessed_share`).

    Raises `ValueError` for a distance that no story within the model's context has, a context too short for any, an
    unknown split, a seed that is no whole number, and a model whose vocabulary is not that of the questions.
    """
    tokenizer = model.text if isinstance(model, LM) else None
    model = transformer_of(model)
    config = model.config
    tokenizer = course_tokenizer(config.vocab_size) if tokenizer is None else tokenizer
    questions = require_whole("questions", questions)
    endless = probes(tokenizer, distance, config.max_seq_len, seed=seed, split=split)
    asked = sorted(islice(endless, questions), key=lambda probe: len(probe.prompt))  # little padding in a batch
    size = max(1, AT_ONCE // (config.max_seq_len * config.vocab_size))
    right = sum(count_right(model, asked[first : first + size]) for first in range(0, questions, size))
    return Recall(right, questions, distance, guessed_share(asked))


def guessed_share(asked: list[Probe]) -> float:
    """How many of these questions the best of three guesses gets right, for which nothing but the kind of the fact must
    be known: naming always the latest fact of the kind that the story states, always the first, or any one of them."""
    latest = mean(probe.later == 0 for probe in asked)
    first = mean(probe.later == probe.rivals for probe in asked)
    any_one = mean(1 / (1 + probe.rivals) for probe in asked)
    return max(latest, first, any_one)


def course_tokenizer(vocab_size: int) -> Tokenizer:
    """The tokenizer of the course's own models; `ValueError` for a model of another vocabulary."""
    tokenizer = Tokenizer.from_folder(shipped_folder(STAND_IN))
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"The model has a vocabulary of {vocab_size:,} tokens, and the course's own models have another, of "
            f"{tokenizer.vocab_size:,}: give an LM, which brings its tokenizer, instead of a Transformer."
        )
    return tokenizer


def count_right(model: Transformer, asked: list[Probe]) -> int:
    """How many of these probes greedy decoding would answer right; they are run as one batch."""
    tokens, positions = pad([probe.prompt + probe.answer[:-1] for probe in asked])
    scores, best = model(tokens, positions).max(-1)
    if scores.cpu()[positions != PADDING].isnan().any():
        raise RuntimeError(NO_NUMBERS)
    after = [row[len(probe.prompt) - 1 :] for row, probe in zip(best.tolist(), asked, strict=True)]
    return sum(ids[: len(probe.answer)] == probe.answer for ids, probe in zip(after, asked, strict=True))


def wilson(right: int, asked: int, confidence: float = 0.95) -> tuple[float, float]:
    """The score interval of a share (E. B. Wilson, "Probable inference, the law of succession, and statistical
    inference", JASA 22, 1927): unlike share ± 2 standard errors it is sensible when none or all are right."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = right / asked, z * z / asked
    middle = share + spread / 2
    margin = math.sqrt(spread * (share * (1 - share) + spread / 4))
    return max(0.0, (middle - margin) / (1 + spread)), min(1.0, (middle + margin) / (1 + spread))
