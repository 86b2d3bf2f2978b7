"""Checkers of notebook 10: the bound of a step, joined and whole-number products, gaps from outside, the ring."""

import numpy as np
import torch

from kvcourse.check.diagnosis import listed
from kvcourse.check.framework import compare, exercise, normal
from kvcourse.check.products import Counting


@exercise
def fastest_decode(answer):
    """fastest_decode(weights, weight_bits, cache_bytes, bytes_per_second): tokens a second at most, for one text."""

    def right(weights, weight_bits, cache_bytes, bytes_per_second):
        return bytes_per_second / (weights * weight_bits / 8 + cache_bytes)

    return compare(
        answer,
        right,
        cases=[
            (1_000_000, 8, 0, 2_000_000),
            (135_000_000, 32, 5_000_000, 25_000_000_000),
            (70_000_000_000, 4, 40_000_000_000, 4_800_000_000_000),
            (8_000_000_000, 16, 1_000_000_000, 900_000_000_000),
        ],
        mistakes={
            "bits are taken for bytes: a byte has 8 bits, so divide by 8": lambda w, b, c, s: s / (w * b + c),
            "the weights are counted as one byte each: they have weight_bits / 8 bytes": lambda w, b, c, s: s / (w + c),
            "the cache is missing: a step reads it too": lambda w, b, c, s: s / (w * b / 8),
            "the cache's bytes are divided by 8 too; they are bytes already": lambda w, b, c, s: s / ((w * b + c) / 8),
            "this is the time of a step in seconds; tokens a second are 1 / that": lambda w, b, c, s: (
                (w * b / 8 + c) / s
            ),
            "the cache is taken off the weights; a step reads both": lambda w, b, c, s: s / (w * b / 8 - c),
            "the two are read one after the other, so their times add up, not their speeds": lambda w, b, c, s: (
                s / (w * b / 8) + (s / c if c else 0)
            ),
        },
    )


@exercise
def joined_product(answer):
    """joined_product(x, weights): the products of `x` (tokens, d_model) with each matrix (rows, d_model), by one
    product."""

    def right(x, weights):
        return [x @ weight.T for weight in weights]

    def cut(x, weights, sizes):
        return list((x @ torch.cat(weights).T).split(sizes, dim=-1))

    def rows(weights):
        return [len(weight) for weight in weights]

    cases = [
        (normal(3, 8), [normal(8, 8, seed=1), normal(4, 8, seed=2), normal(4, 8, seed=3)]),
        (normal(2, 6), [normal(6, 6, seed=4), normal(2, 6, seed=5), normal(4, 6, seed=6)]),
        (normal(1, 4), [normal(5, 4, seed=7), normal(5, 4, seed=8)]),
        (normal(2, 4), [normal(3, 4, seed=9)]),
    ]

    def named(function):
        """`function`, with names for its pieces, which need not have one shape."""

        def run(x, weights):
            pieces = listed(function(x, weights), [])
            if not isinstance(pieces, list | tuple):
                return pieces
            return {f"piece {i}": piece for i, piece in enumerate(pieces, 1)}

        return run

    mistakes = {
        "the result is cut into equal parts; the matrices have different numbers of rows": lambda x, weights: list(
            (x @ torch.cat(weights).T).chunk(len(weights), dim=-1)
        ),
        "the parts come in the wrong order: they stand as the matrices were put together": lambda x, weights: cut(
            x, weights[::-1], rows(weights)[::-1]
        ),
        "the matrices were put together in one order and the result cut in another": lambda x, weights: cut(
            x, weights[::-1], rows(weights)
        ),
        "the sizes of the cuts are in the wrong order": lambda x, weights: cut(x, weights, rows(weights)[::-1]),
        "the result is not cut: one piece for each matrix is wanted": lambda x, weights: x @ torch.cat(weights).T,
        "the rows are shared out one by one in turn; those of a matrix stand together": lambda x, weights: [
            (x @ torch.cat(weights).T)[:, i :: len(weights)] for i in range(len(weights))
        ],
    }
    fault = compare(named(answer), named(right), cases, {text: named(wrong) for text, wrong in mistakes.items()})
    if fault:
        return fault
    with Counting() as seen:
        listed(answer(*cases[0]), [])
    if seen.products > 1:
        return (
            f"the numbers are right, but it took {seen.products} products: put the matrices together with torch.cat, "
            "multiply once, and cut the result"
        )
    return None


@exercise
def int8_product(answer):
    """int8_product(x, codes, scale): x (tokens, columns) times the transposed weights, codes (rows, columns) times
    scale (rows,), with each token of x rounded on a scale of its own, 1/127 of its largest magnitude."""

    def with_scale(scale_of, rounding=torch.round, levels=127):
        def product(x, codes, scale):
            own = scale_of(x) / levels
            return rounding(x / own) @ codes.to(x.dtype).T * own * scale

        return product

    def per_token(x):
        return x.abs().amax(-1, keepdim=True)

    right = with_scale(per_token)

    def loud(tokens, columns, seed):
        """Tokens of very different size."""
        return normal(tokens, columns, seed=seed) * torch.tensor([[10.0**i] for i in range(tokens)])

    def case(tokens, rows, columns, seed):
        codes = (normal(rows, columns, seed=seed + 1) * 45).round().clamp(-127, 127).to(torch.int8)
        return loud(tokens, columns, seed), codes, normal(rows, seed=seed + 2).abs() / 100

    def without(x, codes, scale):
        return x @ codes.to(x.dtype).T * scale

    def round_first(x, codes, scale):
        own = per_token(x) / 127
        return x.round() / own @ codes.to(x.dtype).T * own * scale

    def per_channel(x):
        return x.abs().amax(0, keepdim=True)

    def wrong_axis(x, codes, scale):
        own = per_channel(x) / 127  # of each channel: it cannot be taken out of the sum, and here it is left out
        return (x / own).round() @ codes.to(x.dtype).T * scale

    def folded(x, codes, scale):
        own = per_channel(x) / 127  # put back before the product: floats again
        return (x / own).round() * own @ codes.to(x.dtype).T * scale

    def no_token_scale(x, codes, scale):
        return (x / (per_token(x) / 127)).round() @ codes.to(x.dtype).T * scale

    def no_weight_scale(x, codes, scale):
        own = per_token(x) / 127
        return (x / own).round() @ codes.to(x.dtype).T * own

    def without_sign(x):
        return x.amax(-1, keepdim=True)

    def by_row(function):
        """`function`, its rows by name: what may be missing in one is a part of the largest value of that row."""
        return lambda *given: {f"row {i}": row for i, row in enumerate(function(*given))}

    cases = [case(3, 5, 8, 0), case(2, 4, 16, 10), case(1, 3, 6, 20), case(4, 4, 4, 30)]
    fault = compare(
        answer,
        right,
        cases,
        mistakes={
            "all tokens have one scale, that of the loudest; each needs its own: amax(-1, keepdim=True)": with_scale(
                lambda x: x.abs().amax()
            ),
            "each channel has a scale instead of each token; the largest magnitude is taken over the wrong dimension": (
                wrong_axis
            ),
            "each channel has a scale instead of each token, and the product is one of floats: a scale of a channel "
            "cannot be taken out of the sum": folded,
            "the numbers are rounded before they are divided: divide first, then round": round_first,
            "nothing is rounded: x / scale must become whole numbers": without,
            "the numbers are cut off and not rounded (.to(torch.int8) does that): round first": with_scale(
                per_token, torch.trunc
            ),
            "the scale of the tokens is missing in the result: multiply by it again": no_token_scale,
            "the scale of the weights is missing in the result": no_weight_scale,
            "the largest number is taken, not the largest magnitude: use abs()": with_scale(without_sign),
            "the largest magnitude becomes 128, which is no code of a signed byte: divide by 127": with_scale(
                per_token, levels=128
            ),
            "the largest magnitude becomes 255, which is no code of a signed byte: divide by 127": with_scale(
                per_token, levels=255
            ),
        },
        tolerance=1e-3,
    )
    return fault or compare(by_row(answer), by_row(right), cases, tolerance=1e-3)


@exercise
def gap_percentile(answer):
    """gap_percentile(answers, p): the p-th percentile of the gaps between the tokens of one answer, of all answers;
    `answers` has a list of arrival times for each request."""

    def gaps(times):
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    def right(answers, p):
        return float(np.percentile([gap for times in answers for gap in gaps(times)], p))

    def with_first(answers, p):
        return float(np.percentile([gap for times in answers for gap in gaps([0.0, *times])], p))

    def across(answers, p):
        return float(np.percentile(gaps([time for times in answers for time in times]), p))

    def in_order(answers, p):
        return float(np.percentile(gaps(sorted(time for times in answers for time in times)), p))

    def of_each(answers, p):
        return float(np.mean([np.percentile(gaps(times), p) for times in answers if len(times) > 1]))

    def of_means(answers, p):
        means = [(times[-1] - times[0]) / (len(times) - 1) for times in answers if len(times) > 1]
        return float(np.percentile(means, p))

    def every(answers):
        return [gap for times in answers for gap in gaps(times)]

    return compare(
        answer,
        right,
        cases=[
            ([[0.5, 0.62, 0.93, 1.0], [0.2, 0.78, 0.81]], 70),
            ([[1.0, 1.1, 1.3, 1.7]], 50),
            ([[0.3, 0.32, 0.35, 0.4, 0.9], [0.1, 0.2], [0.7]], 95),
            ([[0.2 + 0.01 * i * i for i in range(12)]], 99),
        ],
        mistakes={
            "the wait for the first token is counted as a gap; n tokens have n - 1 gaps": with_first,
            "the time from the last token of one answer to the first of the next is counted as a gap": across,
            "the arrivals of all answers are mixed; a gap lies between two tokens of one answer": in_order,
            "the percentile of each answer is taken, and then the mean; take one percentile of all gaps": of_each,
            "the percentile of the mean gap of each answer is taken (that is TPOT); take that of all gaps": of_means,
            "this is the mean of the gaps, not a percentile": lambda answers, p: float(np.mean(every(answers))),
            "this is the largest gap, not a percentile": lambda answers, p: float(max(every(answers))),
            "p is a percentage: numpy.percentile takes 95, numpy.quantile 0.95": lambda answers, p: float(
                np.percentile(every(answers), p / 100)
            ),
            "it is the other end: the p-th percentile is above p percent of the gaps": lambda answers, p: float(
                np.percentile(every(answers), 100 - p)
            ),
            "the percentile is taken of the arrival times; of the gaps between them it is wanted": lambda answers, p: (
                float(np.percentile([time for times in answers for time in times], p))
            ),
            "a value is picked from the sorted gaps; between two of them numpy.percentile interpolates": (
                lambda answers, p: sorted(every(answers))[int(len(every(answers)) * p / 100)]
            ),
        },
    )


@exercise
def ring_bytes(answer):
    """ring_bytes(n_layers, d_model, bits, world): bytes that each rank sends for one token: two all_reduces a layer
    around a ring."""

    def right(n_layers, d_model, bits, world):
        return 2 * n_layers * d_model * bits / 8 * 2 * (world - 1) / world

    return compare(
        answer,
        right,
        cases=[(80, 8192, 16, 6), (4, 192, 64, 2), (30, 576, 32, 3), (2, 64, 16, 1)],
        mistakes={
            "this is half of it: a layer has two all_reduces, after attention and after the feed-forward layer, and a "
            "ring goes round twice, once to add up and once to tell everybody": lambda n, d, b, w: (
                right(n, d, b, w) / 2
            ),
            "this is a quarter of it: a layer has two all_reduces, and each of them goes round the ring twice": (
                lambda n, d, b, w: right(n, d, b, w) / 4
            ),
            "bits are taken for bytes: divide by 8": lambda n, d, b, w: 8 * right(n, d, b, w),
            "it is world times too much: in each round a rank sends one piece, of d_model / world numbers (and what is "
            "wanted is what each rank sends, not all together)": lambda n, d, b, w: w * right(n, d, b, w),
            "each rank sends everything to every other one; in a ring it sends pieces to its neighbor": (
                lambda n, d, b, w: 2 * n * d * b / 8 * (w - 1)
            ),
            "there are world - 1 rounds in each half, not world: a rank has its own piece already": (
                lambda n, d, b, w: 2 * n * d * b / 8 * 2
            ),
            "this is one layer's: multiply by n_layers": lambda n, d, b, w: right(1, d, b, w),
            "these are the numbers to be added up, and not yet what a ring sends for them": lambda n, d, b, w: (
                2 * n * d * b / 8
            ),
        },
    )
