"""Checkers of notebook 01: attention by hand, the greedy loop, counting rows and operations, fitting an exponent."""

from dataclasses import replace
from functools import cache

import numpy as np
import torch

from kvcourse.check.framework import compare, exercise, normal
from kvcourse.config import ModelConfig
from kvcourse.cost import flops
from kvcourse.layers import attention
from kvcourse.model import Transformer


@exercise
def causal_attention(answer):
    """`causal_attention(q, k, v)`: one head over NumPy arrays `(T, d)`, `(T, d)`, `(T, d_v)`."""

    def right(q, k, v):
        return attention(*(torch.from_numpy(x)[None, None] for x in (q, k, v)), causal=True)[0, 0].numpy()

    def arrays(tokens, d, d_v, size=1.0):
        shapes = [(tokens, d), (tokens, d), (tokens, d_v)]
        return tuple(size * normal(*shape, seed=i, dtype=torch.float64).numpy() for i, shape in enumerate(shapes))

    return compare(
        answer,
        right,
        cases=[arrays(3, 4, 2), arrays(7, 3, 5), arrays(1, 8, 8), arrays(6, 16, 2, size=30.0)],
        mistakes={
            "the scores are not scaled: divide them by the square root of d, how many numbers a query has": wrong(
                power=0
            ),
            "the scores are divided by d itself: divide by its square root, which keeps their spread near 1": wrong(
                power=1
            ),
            "there is no mask: each token looks at later tokens too, which do not exist when it is the last": wrong(
                first=99
            ),
            "the mask is shifted by one: each token also sees the token after it": wrong(first=2),
            "the mask is shifted by one: a token must see itself, so the diagonal stays": wrong(first=0),
            "the mask is shifted by one: a token must see itself. All of the first row is hidden, and with -1e9 in "
            "place of -inf it becomes the mean of all values": wrong(first=0, fill=-1e9),
            "the mask is shifted by one: a token must see itself. All of the first row is hidden, and with -1e9 added "
            "to each of its scores it sees every token": wrong(first=0, fill=-1e9, added=True),
            "the mask hides the wrong half: rows are queries, and hidden are the keys after the query": wrong(
                earlier=True
            ),
            "the softmax runs down the columns: each row (query) must sum to 1, so work along the last axis": wrong(
                axis=0
            ),
            "the mask comes after the softmax, so rows no longer sum to 1: put -inf in the scores before": wrong(
                late=True
            ),
            "hidden scores are set to 0, but exp(0) = 1 is a weight like any other: set them to -inf": wrong(fill=0.0),
            "the softmax overflows where scores are large: subtract each row's maximum first": wrong(stable=False),
        },
    )


def wrong(power=0.5, first=1, earlier=False, axis=1, late=False, fill=-np.inf, added=False, stable=True):
    """Attention with one usual mistake: scores over `d ** power`, keys hidden from the `first` after the query on
    (or the `earlier` ones), softmax along `axis`, mask `late`, `fill` in hidden places (or `added` to their scores), no
    maximum subtracted."""

    def attend(q, k, v):
        with np.errstate(all="ignore"):
            scores = q @ k.T / q.shape[1] ** power
            everything = np.ones(scores.shape, bool)
            hidden = np.tril(everything, -1) if earlier else np.triu(everything, first)
            scores = scores if late else np.where(hidden, scores + fill if added else fill, scores)
            weights = np.exp(scores - scores.max(axis, keepdims=True) if stable else scores)
            weights = weights / weights.sum(axis, keepdims=True)
            return np.where(hidden & late, 0, weights) @ v

    return attend


@exercise
def greedy_until(answer):
    """`greedy_until(model, prompt, max_new_tokens, stop_id)`: list of new ids, the stop token included."""
    model, prompt, runs = tiny_model(), [3, 1, 4, 1, 5], []
    text = loop(model, prompt, 12)
    late = next(token for token in text if text.index(token) >= 4)  # a token that the text reaches after a while
    never = next(token for token in range(model.config.vocab_size) if token not in text)
    requests = [(6, never), (12, late), (1, never), (12, text[0])]

    hook = model.register_forward_hook(lambda *_: runs.append(1))
    try:
        fault = compare(
            answer, loop, cases=[(model, prompt, *request) for request in requests], mistakes=GREEDY_MISTAKES
        )
    finally:
        hook.remove()
    made = sum(len(loop(model, prompt, *request)) for request in requests)
    own_runs = len(runs) - made  # the reference ran once for each of its tokens
    if fault is None and own_runs > made:
        return f"the tokens are right, but the model ran {own_runs} times for {made} tokens: one run makes one token"
    return fault


def loop(model, prompt, max_new_tokens, stop_id=None, fed=lambda ids, prompt: ids, row=-1) -> list[int]:
    """The greedy loop; `fed` picks what the model is given, `row` whose scores are read."""
    made = []
    while len(made) < max_new_tokens:
        logits = model(torch.tensor([fed([*prompt, *made], prompt)]))
        made.append(int(logits[0, row].argmax()))
        if made[-1] == stop_id:
            break
    return made


GREEDY_MISTAKES = {
    "the prompt is in the answer: return the new tokens alone": lambda *a: a[1] + loop(*a),
    "the stop token is missing: the token that ends the text is kept, as its last": (
        lambda *a: [token for token in loop(*a) if token != a[3]]
    ),
    "the loop does not stop at stop_id: leave it once that token is made": lambda *a: loop(*a[:3]),
    "one token too many: make max_new_tokens tokens at most": lambda m, p, n, stop: loop(m, p, n + 1, stop),
    "one token too few: make max_new_tokens tokens unless stop_id comes first": lambda m, p, n, stop: loop(
        m, p, n - 1, stop
    ),
    "the model is given the last token alone, so it knows nothing of the text before: give it the whole text": (
        lambda *a: loop(*a, fed=lambda ids, prompt: ids[-1:])
    ),
    "the model is given the prompt alone in each step, so it repeats itself: add the tokens made so far": (
        lambda *a: loop(*a, fed=lambda ids, prompt: prompt)
    ),
    "the token is chosen from the scores after the first token: those after the last one are logits[0, -1]": (
        lambda *a: loop(*a, row=0)
    ),
}


@cache
def tiny_model() -> Transformer:
    """A small random model whose text wanders: in float64, so that no tie decides a token."""
    config = ModelConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48)
    model = Transformer(config, device="cpu", dtype=torch.float64)
    for number, parameter in enumerate(model.parameters()):
        parameter.copy_(0.4 * normal(*parameter.shape, seed=number, dtype=torch.float64))
    return model


@exercise
def rows_computed(answer):
    """`rows_computed(prompt_length, new_tokens)`: rows that naive generation runs through each layer in all."""

    def right(prompt_length, new_tokens):
        return sum(prompt_length + step for step in range(new_tokens))

    return compare(
        answer,
        right,
        cases=[(6, 4), (5, 48), (1, 1), (7, 0), (1000, 200)],
        mistakes={
            "the token made last is counted, but the model never runs on it: the last step has prompt + new - 1 rows": (
                lambda p, n: right(p + 1, n)
            ),
            "one step too many: each step makes a token, so there are new_tokens steps": lambda p, n: right(p, n + 1),
            "one step too few: the first token takes a step too, over the prompt": lambda p, n: right(p, n - 1),
            "the first step is missing: it runs the prompt's rows, and makes the first token": lambda p, n: (
                right(p, n) - p * (n > 0)
            ),
            "each row is counted once, but every step runs all rows of the text again": lambda p, n: p + n - 1,
            "each row is counted once, and the last token too, which is never run; every step runs all rows again": (
                lambda p, n: p + n
            ),
            "the prompt is counted in the first step only: it is part of the text, and run again, in every step": (
                lambda p, n: p + right(0, n)
            ),
            "the prompt is missing: the first step runs prompt_length rows already": lambda p, n: right(0, n),
            "this counts a step for each token of the prompt as well: the first step runs the whole prompt at once": (
                lambda p, n: right(1, p + n - 1)
            ),
            "this gives every step the rows of the longest one: the steps grow by one row each": lambda p, n: (
                n * (p + n - 1)
            ),
        },
    )


@exercise
def linear_flops(answer):
    """`linear_flops(config, rows)`: operations of the linear layers of all decoder layers, the output head left out."""

    def right(config, rows):
        return flops(config, rows).linear

    def changed(**change):
        return lambda c, rows: right(replace(c, **{name: value(c) for name, value in change.items()}), rows)

    grouped = ModelConfig(vocab_size=100, n_layers=3, n_heads=6, n_kv_heads=2, d_model=24, d_ff=40)
    wide_heads = replace(grouped, d_head=8, n_kv_heads=3)
    return compare(
        answer,
        right,
        cases=[(grouped, 1), (grouped, 10), (wide_heads, 3), (replace(grouped, n_layers=5, n_kv_heads=6), 7)],
        mistakes={
            "half of the right number: a weight costs a multiply and an add, two operations for each row": (
                lambda c, rows: right(c, rows) // 2
            ),
            "k_proj and v_proj are counted with n_heads: they make n_kv_heads x d_head numbers, which is less": changed(
                n_kv_heads=lambda c: c.n_heads
            ),
            "the feed-forward layer has three matrices, gate, up and down, of d_model x d_ff each; two are counted": (
                lambda c, rows: right(c, rows) - 2 * rows * c.n_layers * c.d_model * c.d_ff
            ),
            "this is one layer: the model has config.n_layers of them": changed(n_layers=lambda c: 1),
            "o_proj is missing: it takes the n_heads x d_head numbers of all heads back to d_model": (
                lambda c, rows: right(c, rows) - 2 * rows * c.n_layers * c.n_heads * c.d_head * c.d_model
            ),
            "the output head (over the vocabulary) is counted too; it is asked for the decoder layers alone": (
                lambda c, rows: right(c, rows) + 2 * rows * c.d_model * c.vocab_size
            ),
            "the number of rows is left out: every row goes through all of these weights": lambda c, rows: right(c, 1),
            "the queries are n_heads x d_head numbers, which need not be d_model (here it is not)": changed(
                d_head=lambda c: c.d_model // c.n_heads
            ),
        },
    )


@exercise
def fit_exponent(answer):
    """`fit_exponent(lengths, costs)`: least-squares slope of log(cost) over log(length)."""

    def right(lengths, costs):
        return np.polyfit(np.log(lengths), np.log(costs), 1)[0]

    lengths = np.array([100.0, 200.0, 400.0, 800.0])
    noise = np.array([1.3, 0.9, 1.1, 0.8])
    return compare(
        answer,
        right,
        cases=[(lengths, 3e-6 * lengths**2), (lengths, 0.5 * lengths), (lengths, noise * lengths**3)],
        tolerance=1e-3,
        mistakes={
            "this is the slope without logarithms, so it depends on the units: take the log of both": (
                lambda n, cost: np.polyfit(n, cost, 1)[0]
            ),
            "only the costs are in logarithms; then a power law is no straight line: take the log of the lengths too": (
                lambda n, cost: np.polyfit(n, np.log(cost), 1)[0]
            ),
            "only the lengths are in logarithms: take the log of the costs too": (
                lambda n, cost: np.polyfit(np.log(n), cost, 1)[0]
            ),
            "this is the intercept: np.polyfit gives the highest power first, so the slope is its first number": (
                lambda n, cost: np.polyfit(np.log(n), np.log(cost), 1)[1]
            ),
            "lengths and costs are swapped: the lengths are x, the costs are y": lambda n, cost: np.polyfit(
                np.log(cost), np.log(n), 1
            )[0],
            "this is slope and intercept: return the slope alone": lambda n, cost: np.polyfit(
                np.log(n), np.log(cost), 1
            ),
            "this uses the first and the last point only, so one bad measurement decides: fit a line to all points": (
                lambda n, cost: np.log(cost[-1] / cost[0]) / np.log(n[-1] / n[0])
            ),
        },
    )
