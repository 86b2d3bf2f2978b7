"""Checkers of notebook 03: the roofline by hand, who reads what, prefill in pieces, guessed tokens, prices."""

from itertools import pairwise

import torch

from kvcourse.caches import DenseCache
from kvcourse.check.framework import compare, diagnose, exercise
from kvcourse.check.kv_cache import Recorder
from kvcourse.config import ModelConfig
from kvcourse.cost import bytes_moved, cache_bytes


@exercise
def least_time(answer):
    """least_time(flops, nbytes, flops_per_second, bytes_per_second): the least seconds that work of so many operations
    and bytes can take, when computing and reading go on at the same time."""

    def right(flops, nbytes, flops_per_second, bytes_per_second):
        return max(flops / flops_per_second, nbytes / bytes_per_second)

    return compare(
        answer,
        right,
        cases=[(100, 30, 20, 10), (100, 90, 20, 10), (2.7e8, 5.4e8, 1.4e11, 1.7e10), (1.1e11, 5.4e8, 1.4e11, 1.7e10)],
        mistakes={
            "the two times are added; computing and reading go on at once, so the longer one counts": (
                lambda f, b, fps, bps: f / fps + b / bps
            ),
            "the reading alone, or the shorter of the two times, is not enough: the work is done when both are": (
                lambda f, b, fps, bps: min(f / fps, b / bps)
            ),
            "only the operations are counted; the bytes can take longer": lambda f, b, fps, bps: f / fps,
            "the rates are swapped: operations are divided by operations a second, bytes by bytes a second": (
                lambda f, b, fps, bps: max(f / bps, b / fps)
            ),
            "a time is an amount divided by a rate, not the other way round": lambda f, b, fps, bps: max(
                fps / f, bps / b
            ),
        },
    )


@exercise
def intensity(answer):
    """intensity(rows, bits): operations per byte of linear layers whose weights have `bits` bits, when `rows` rows run
    through them in one pass."""

    def right(rows, bits):
        return 2 * rows / (bits / 8)

    return compare(
        answer,
        right,
        cases=[(1, 32), (1, 16), (64, 16), (8, 4)],
        mistakes={
            "each weight meets each row with a multiply and an add: that is two operations": lambda r, b: 8 * r / b,
            "these are operations per bit; a byte has 8 bits": lambda r, b: 2 * r / b,
            "the weights are read once for all rows, not once for each: the rows do not cancel": lambda r, b: 16 / b,
            "it is upside down: operations divided by bytes": lambda r, b: b / (16 * r),
            "multiplied by the bytes of a weight; divide by them": lambda r, b: 2 * r * b / 8,
        },
    )


@exercise
def crossover_context(answer):
    """crossover_context(config, batch_size): the context, in tokens and not rounded, at which a decode step reads as
    many bytes of cache as of weights; both have the same bits."""
    # Tied, as the course's model: of an untied embedding a step reads some rows only, which is another lesson.
    sizes = dict(vocab_size=1000, n_layers=4, n_heads=8, n_kv_heads=2, d_model=64, d_ff=128, tie_embeddings=True)
    small, other = ModelConfig(**sizes), ModelConfig(**sizes | {"n_layers": 3, "n_heads": 4, "d_head": 24})

    def right(config, batch_size):
        return bytes_moved(config, 1, 0, batch_size).weights / cache_bytes(config, 1, batch_size)

    def scaled(factor):
        return lambda config, batch_size: right(config, batch_size) * factor(config, batch_size)

    return compare(
        answer,
        right,
        cases=[(small, 1), (small, 4), (other, 16)],
        mistakes={
            "a token keeps keys and values for n_kv_heads heads, not for n_heads": scaled(
                lambda c, batch: c.n_kv_heads / c.n_heads
            ),
            "each text of the batch brings its own cache, the weights are read once: divide by the batch": scaled(
                lambda c, batch: batch**2
            ),
            "the batch is missing: with more texts more cache is read, so the two meet earlier": scaled(
                lambda c, batch: batch
            ),
            "a head has d_head numbers; d_model / n_heads need not be as many": scaled(
                lambda c, batch: c.d_head * c.n_heads / c.d_model
            ),
            "a token leaves a key and a value; only one of them is counted": scaled(lambda c, batch: 2),
            "every layer has a cache of its own; only one is counted": scaled(lambda c, batch: c.n_layers),
            "it is upside down: bytes of weights divided by bytes of cache for each token": (
                lambda c, batch: 1 / right(c, batch)
            ),
            "do not round": lambda c, batch: round(right(c, batch)),
            "do not round down: use `/`": lambda c, batch: int(right(c, batch)),
        },
        tolerance=1e-6,
    )


@exercise
def prefill_in_chunks(answer):
    """prefill_in_chunks(model, ids, cache, chunk): run `ids` through the model into `cache`, at most `chunk` tokens in
    a pass; the scores after the last token, (vocab_size,)."""
    model = Recorder().float()
    for count, chunk in ((7, 3), (6, 3), (5, 8), (4, 1)):
        ids = [5, 17, 42, 90, 1, 33, 8][:count]
        cache = DenseCache(model.config, max_len=16, dtype=model.dtype, device=model.device)
        model.calls.clear()
        got = answer(model, ids, cache, chunk)
        passes = [rows for rows, _ in model.calls]
        case = f"with {count} tokens and chunk = {chunk}, "
        pieces = [ids[start : start + chunk] for start in range(0, count, chunk)]
        right = _after_pieces(model, pieces)
        mistakes = {message: scores(model, pieces) for message, scores in CHUNK_MISTAKES.items()}
        if fault := diagnose(_last_row(got), right, mistakes, tolerance=1e-3):
            return case + fault
        if cache.length != count:
            return f"{case}the scores are right, but the cache holds {cache.length} tokens: pass it to the model"
        expected = [len(piece) for piece in pieces]
        if passes != expected:
            return f"{case}the scores are right, but the passes ran {passes} tokens; {expected} were wanted"
    return None


def _last_row(scores):
    """(1, 1, V) is as good as (V,)."""
    size = getattr(scores, "shape", ())
    return scores.reshape(-1) if len(size) > 1 and size[-1] == torch.Size(size).numel() else scores


@torch.inference_mode()
def _after_pieces(model, pieces: list[list[int]], row: int = -1, forget: bool = False) -> torch.Tensor:
    """Scores of one row of the last pass, when the pieces run one after the other."""
    cache = DenseCache(model.config, max_len=16, dtype=model.dtype, device=model.device)
    for piece in pieces:
        if forget:
            cache.reset()
        logits = model(torch.tensor([piece]), cache=cache)
    return logits[0, row]


def _whole_pieces(model, pieces):
    """What is left when the last piece is dropped for being shorter than the others."""
    whole = [piece for piece in pieces if len(piece) == len(pieces[0])]
    return _after_pieces(model, whole)


CHUNK_MISTAKES = {
    "the last piece, which is shorter, was not run": _whole_pieces,
    "these are the scores after the first piece; those after the last token are wanted": lambda m, p: _after_pieces(
        m, p[:1]
    ),
    "these are the scores after the first token of the last piece; take its last row": lambda m, p: _after_pieces(
        m, p, row=0
    ),
    "the pieces overlap by a token, which the model then reads twice; a slice leaves out its end": lambda m, p: (
        _after_pieces(m, [piece + after[:1] for piece, after in pairwise([*p, []])])
    ),
    "each piece was run as a text of its own; pass the cache, so that it sees the pieces before it": lambda m, p: (
        _after_pieces(m, p, forget=True)
    ),
}


@exercise
def accept(answer):
    """accept(guesses, greedy): how many guesses stand, and which token follows them, as a pair. `greedy[i]` is what the
    model itself chooses after the text and the first i guesses."""

    def right(guesses, greedy, shift=0):
        count = next((i for i, guess in enumerate(guesses) if guess != greedy[i + shift]), len(guesses))
        return count, greedy[count]

    def agreeing(guesses, greedy):
        """All guesses that agree, those after the first wrong one too."""
        count = sum(guess == choice for guess, choice in zip(guesses, greedy, strict=False))
        return count, greedy[count]

    def rejected(guesses, greedy):
        count, follows = right(guesses, greedy)
        return count, guesses[count] if count < len(guesses) else follows

    return compare(
        answer,
        right,
        cases=[
            ([5, 5, 5, 8], [5, 5, 5, 8, 5]),  # all stand, so that "all or nothing" is right here
            ([5, 5, 5, 7, 9], [5, 5, 5, 8, 3, 4]),
            ([5, 7, 9], [5, 7, 8, 3]),
            ([4, 6], [4, 6, 1]),
            ([1, 2, 3], [9, 2, 3, 4]),
            ([7, 8, 9, 1], [7, 0, 9, 1, 2]),
            ([], [5]),
        ],
        mistakes={
            "a guess after the first wrong one cannot stand: it was made for another text": agreeing,
            "the token that follows is the rejected guess; take the model's own choice in its place": rejected,
            "the last choice was made after a guess that does not stand; take the one after the last that does": (
                lambda g, y: (right(g, y)[0], y[-1])
            ),
            "the token that follows is taken one place too early: greedy[i] comes after i guesses": lambda g, y: (
                right(g, y)[0],
                y[max(right(g, y)[0] - 1, 0)],
            ),
            "the count is one too high: the token that follows is no guess": lambda g, y: (
                right(g, y)[0] + 1,
                right(g, y)[1],
            ),
            "guess i is held against greedy[i], the model's own choice in its place, not against greedy[i + 1]": (
                lambda g, y: right(g, y, shift=1)
            ),
            "guess i is held against greedy[i], the model's own choice in its place, not against greedy[i - 1]": (
                lambda g, y: right(g, y, shift=-1)
            ),
            "all choices are taken one place too late: greedy[i] is held against guess i, or follows i guesses": (
                lambda g, y: (count := right(g, y, shift=1)[0], y[count + 1])
            ),
            "it is all or nothing here; the guesses before the first wrong one stand": lambda g, y: (
                (len(g), y[-1]) if list(g) == list(y[:-1]) else (0, y[0])
            ),
            "the two are swapped: first how many stand, then the token that follows": lambda g, y: right(g, y)[::-1],
        },
    )


@exercise
def output_price_ratio(answer):
    """output_price_ratio(prompt_tokens, prefill_seconds, step_seconds, batch_size): how many times as much of the
    machine's time an output token takes as an input token."""

    def right(prompt_tokens, prefill_seconds, step_seconds, batch_size):
        return (step_seconds / batch_size) / (prefill_seconds / prompt_tokens)

    return compare(
        answer,
        right,
        cases=[(500, 0.5, 0.04, 1), (500, 0.5, 0.06, 16), (1000, 0.25, 0.02, 8)],
        mistakes={
            "it is upside down: time of an output token divided by time of an input token": lambda n, p, s, b: (
                1 / right(n, p, s, b)
            ),
            "a step makes one token for each text of the batch: divide its time by the batch": lambda n, p, s, b: right(
                n, p, s, 1
            ),
            "the step's time is multiplied by the batch; it is shared by the texts, so divide": lambda n, p, s, b: (
                right(n, p, s * b * b, b)
            ),
            "the prefill reads many tokens: divide its time by them": lambda n, p, s, b: s / b / p,
        },
    )
