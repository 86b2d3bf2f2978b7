"""The checkers of notebook 01 accept every right way of writing the answer, and name the usual mistakes."""

from dataclasses import replace
from textwrap import dedent

import numpy as np
import pytest
import torch
from exercises import assert_worked_answer_is_right_and_stub_not_attempted

import kvcourse as kv
from kvcourse.notebooks import solution

NOTEBOOK = "01_naive_generation"
EXERCISES = ("causal_attention", "greedy_until", "rows_computed", "linear_flops", "fit_exponent")

# Each answer is the source of a function called `answer`, run in a namespace of its own as a learner's cell is.
RIGHT = {
    "causal_attention": [
        """
        def answer(q, k, v):  # loops, and no mask at all: a query is shown only the keys it may see
            out = np.zeros((len(q), v.shape[1]))
            for i in range(len(q)):
                s = np.array([q[i] @ k[j] for j in range(i + 1)]) / len(q[i]) ** 0.5
                w = np.exp(s - max(s))
                for j in range(i + 1):
                    out[i] += w[j] / sum(w) * v[j]
            return out
        """,
        """
        def answer(q, k, v):  # PyTorch, in float32
            q, k, v = (torch.from_numpy(x).float() for x in (q, k, v))
            s = (q @ k.T / q.shape[1] ** 0.5).masked_fill(torch.ones(len(q), len(q)).triu(1) > 0, -torch.inf)
            return s.softmax(-1) @ v
        """,
    ],
    "greedy_until": [
        """
        def answer(model, prompt, max_new_tokens, stop_id):
            ids = list(prompt)
            for _ in range(max_new_tokens):
                ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
                if ids[-1] == stop_id:
                    break
            return ids[len(prompt):]
        """,
        """
        def answer(model, prompt, max_new_tokens, stop_id):  # a tensor that grows, recursion, no in-place change
            if max_new_tokens == 0:
                return []
            token = int(model(torch.tensor(prompt)[None], last_only=True).flatten().argmax())
            rest = [] if token == stop_id else answer(model, prompt + [token], max_new_tokens - 1, stop_id)
            return [token] + rest
        """,
        "def answer(m, p, n, stop): return kv.generate_naive(m, p, n, stop_ids={stop}).tokens",
    ],
    "rows_computed": [
        "def answer(p, n): return sum(range(p, p + n))",
        "def answer(p, n): return np.arange(p, p + n).sum()",
        "def answer(p, n): return (2 * p + n - 1) * n / 2",
    ],
    "linear_flops": [
        """
        def answer(c, rows):
            total = 0
            for _ in range(c.n_layers):
                for out in (c.n_heads * c.d_head, c.n_kv_heads * c.d_head, c.n_kv_heads * c.d_head):
                    total += 2 * rows * c.d_model * out
                total += 2 * rows * c.n_heads * c.d_head * c.d_model
                for _ in ("gate", "up", "down"):
                    total += 2 * rows * c.d_model * c.d_ff
            return total
        """,
        """
        def answer(c, rows):  # counted from a model's own matrices
            model = kv.Transformer(c, device="meta")
            matrices = [m.weight for m in model.layers.modules() if isinstance(m, torch.nn.Linear)]
            return float(2 * rows * sum(matrix.numel() for matrix in matrices))
        """,
    ],
    "fit_exponent": [
        """
        def answer(lengths, costs):  # the normal equation
            x, y = np.log10(lengths), np.log10(costs)
            return ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
        """,
        """
        def answer(lengths, costs):
            x, y = (torch.from_numpy(values).log() for values in (lengths, costs))
            return torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], 1), y[:, None]).solution[0]
        """,
    ],
}
ATTENTION = """
def answer(q, k, v):
    s = {scores}
    s = np.where({hidden}, -np.inf, s)
    with np.errstate(all="ignore"):  # a row that sees nothing is -inf - -inf
        w = np.exp(s - s.max(axis={axis}, keepdims=True))
    return w / w.sum(axis={axis}, keepdims=True) @ v
"""
SCALED, FUTURE = "q @ k.T / q.shape[1] ** 0.5", "np.triu(np.ones(s.shape, bool), 1)"
GREEDY = """
def answer(model, prompt, max_new_tokens, stop_id):
    made = []
    for _ in range({steps}):
        made.append(int(model(torch.tensor([{fed}]))[0, {row}].argmax()))
        if made[-1] == {stop}:
            break
    return {result}
"""


def greedy(steps="max_new_tokens", fed="prompt + made", row=-1, stop="stop_id", result="made"):
    return GREEDY.format(steps=steps, fed=fed, row=row, stop=stop, result=result)


WRONG = {
    "causal_attention": {
        "how many numbers a query has": ATTENTION.format(scores="q @ k.T", hidden=FUTURE, axis=1),
        "divided by d itself": ATTENTION.format(scores="q @ k.T / q.shape[1]", hidden=FUTURE, axis=1),
        "no mask": ATTENTION.format(scores=SCALED, hidden="False", axis=1),
        "sees the token after it": ATTENTION.format(scores=SCALED, hidden="np.triu(np.ones(s.shape, bool), 2)", axis=1),
        "the diagonal stays": ATTENTION.format(scores=SCALED, hidden="np.triu(np.ones(s.shape, bool))", axis=1),
        "the wrong half": ATTENTION.format(scores=SCALED, hidden="np.tril(np.ones(s.shape, bool), -1)", axis=1),
        "down the columns": ATTENTION.format(scores=SCALED, hidden=FUTURE, axis=0),
        "the mask comes after the softmax": """
            def answer(q, k, v):
                w = torch.from_numpy(q @ k.T / q.shape[1] ** 0.5).softmax(-1).numpy()
                return np.tril(w) @ v
            """,
        "exp(0) = 1": """
            def answer(q, k, v):
                return torch.from_numpy(np.tril(q @ k.T / q.shape[1] ** 0.5)).softmax(-1).numpy() @ v
            """,
        "subtract each row's maximum": """
            def answer(q, k, v):
                s = np.where(np.tri(len(q)) > 0, q @ k.T / q.shape[1] ** 0.5, -np.inf)
                with np.errstate(all="ignore"):
                    return np.exp(s) / np.exp(s).sum(1, keepdims=True) @ v
            """,
        "transposed": "def answer(q, k, v): return kv_solution(q, k, v).T",
        "NameError": "def answer(q, k, v): return weights @ v",
    },
    "greedy_until": {
        "the new tokens alone": greedy(result="prompt + made"),
        "the stop token is missing": greedy(result="[token for token in made if token != stop_id]"),
        "does not stop": greedy(stop="None"),
        "one token too many": greedy(steps="max_new_tokens + 1"),
        "one token too few": greedy(steps="max_new_tokens - 1"),
        "the last token alone": greedy(fed="(prompt + made)[-1:]"),
        "the prompt alone": greedy(fed="prompt"),
        "logits[0, -1]": greedy(row=0),
        "the model ran": """
            def answer(model, prompt, max_new_tokens, stop_id):
                made = []
                logits = model(torch.tensor([prompt]))
                while len(made) < max_new_tokens and stop_id not in made:
                    made.append(int(logits[0, -1].argmax()))
                    logits = model(torch.tensor([prompt + made]))
                return made
            """,
        "tokens must be a tensor (B, T)": greedy(fed="").replace("[[]]", "[]"),
    },
    "rows_computed": {
        "never runs on it": "def answer(p, n): return n * p + n * (n + 1) // 2",
        "each row is counted once, but": "def answer(p, n): return p + n - 1",
        "and the last token too": "def answer(p, n): return p + n",
        "in the first step only": "def answer(p, n): return p + n * (n - 1) // 2",
        "the prompt is missing": "def answer(p, n): return n * (n - 1) // 2",
        "a step for each token of the prompt": "def answer(p, n): return (p + n) * (p + n - 1) // 2",
        "the rows of the longest one": "def answer(p, n): return n * (p + n - 1)",
        "expected 30, yours is 0": "def answer(p, n): return 0",
    },
    "linear_flops": {
        "a multiply and an add": "def answer(c, rows): return flops(c, rows) // 2",
        "n_kv_heads x d_head": "def answer(c, rows): return flops(replace(c, n_kv_heads=c.n_heads), rows)",
        "three matrices": "def answer(c, rows): return flops(c, rows) - 2 * rows * c.n_layers * c.d_model * c.d_ff",
        "this is one layer": "def answer(c, rows): return flops(c, rows) // c.n_layers",
        "o_proj is missing": """
            def answer(c, rows):
                return flops(c, rows) - 2 * rows * c.n_layers * c.n_heads * c.d_head * c.d_model
            """,
        "the output head": "def answer(c, r): return flops(c, r) + 2 * r * c.vocab_size * c.d_model",
        "the number of rows is left out": "def answer(c, rows): return flops(c, 1)",
        "need not be d_model": "def answer(c, rows): return flops(replace(c, d_head=c.d_model // c.n_heads), rows)",
        "yours is 3 times": "def answer(c, rows): return 3 * flops(c, rows)",
    },
    "fit_exponent": {
        "without logarithms": "def answer(n, cost): return np.polyfit(n, cost, 1)[0]",
        "take the log of the lengths too": "def answer(n, cost): return np.polyfit(n, np.log(cost), 1)[0]",
        "take the log of the costs too": "def answer(n, cost): return np.polyfit(np.log(n), cost, 1)[0]",
        "the intercept": "def answer(n, cost): return np.polyfit(np.log(n), np.log(cost), 1)[1]",
        "swapped": "def answer(n, cost): return np.polyfit(np.log(cost), np.log(n), 1)[0]",
        "the slope alone": "def answer(n, cost): return np.polyfit(np.log(n), np.log(cost), 1)",
        "first and the last point": "def answer(n, cost): return np.log(cost[-1] / cost[0]) / np.log(n[-1] / n[0])",
    },
}


def learner(source: str):
    """The function `answer` that this source defines, in a namespace of its own."""
    names = {"np": np, "torch": torch, "kv": kv, "replace": replace}
    names["flops"] = lambda config, rows: kv.flops(config, rows).linear
    names["kv_solution"] = solution(NOTEBOOK, "causal_attention")
    exec(dedent(source), names)
    return names["answer"]


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_is_right_and_the_stub_not_attempted(name):
    assert getattr(kv.check, name).notebook == NOTEBOOK
    assert_worked_answer_is_right_and_stub_not_attempted(NOTEBOOK, name)


@pytest.mark.parametrize(("name", "source"), [(name, source) for name, sources in RIGHT.items() for source in sources])
def test_other_right_ways_are_right(name, source):
    verdict = getattr(kv.check, name)(learner(source))
    assert verdict.status == "right", verdict.message


@pytest.mark.parametrize(
    ("name", "words", "source"),
    [(name, words, source) for name, cases in WRONG.items() for words, source in cases.items()],
)
def test_mistakes_are_named(name, words, source):
    verdict = getattr(kv.check, name)(learner(source))
    assert verdict.status == "wrong"
    assert words in verdict.message


@pytest.mark.parametrize("name", EXERCISES)
def test_a_value_in_place_of_the_function_is_said_so(name):
    verdict = getattr(kv.check, name)([1, 2])
    assert verdict.status == "wrong"
    assert "pass the function itself" in verdict.message


def test_an_answer_may_change_the_prompt_it_was_given():
    changes_it = """
    def answer(model, prompt, max_new_tokens, stop_id):
        start = len(prompt)
        while len(prompt) < start + max_new_tokens and stop_id not in prompt[start:]:
            prompt += [int(model(torch.tensor([prompt]))[0, -1].argmax())]
        return prompt[start:]
    """
    assert kv.check.greedy_until(learner(changes_it)).status == "right"
