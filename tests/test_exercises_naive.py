"""The exercises of notebook 01: worked answers and other right ways pass, the usual mistakes are named."""

import numpy as np
import pytest
from exercises import shared_tests, solution

import kvcourse as kv

NOTEBOOK = "01_naive_generation"

RIGHT = {
    "causal_attention": [
        """
        def causal_attention(q, k, v):
            s = q @ k.T / q.shape[1] ** 0.5
            s = np.where(np.triu(np.ones(s.shape, bool), 1), -np.inf, s)
            with np.errstate(all="ignore"):  # a row that sees nothing is -inf - -inf
                w = np.exp(s - s.max(1, keepdims=True))
                w = w / w.sum(1, keepdims=True)
            return w @ v
        """,
        """
        def causal_attention(q, k, v):  # loops, and no mask at all: a query is shown only the keys it may see
            out = np.zeros((len(q), v.shape[1]))
            for i in range(len(q)):
                s = np.array([q[i] @ k[j] for j in range(i + 1)]) / len(q[i]) ** 0.5
                w = np.exp(s - max(s))
                for j in range(i + 1):
                    out[i] += w[j] / sum(w) * v[j]
            return out
        """,
        """
        def causal_attention(q, k, v):  # PyTorch, in float32
            q, k, v = (torch.from_numpy(x).float() for x in (q, k, v))
            s = (q @ k.T / q.shape[1] ** 0.5).masked_fill(torch.ones(len(q), len(q)).triu(1) > 0, -torch.inf)
            return s.softmax(-1) @ v
        """,
    ],
    "greedy_until": [
        """
        def greedy_until(model, prompt, max_new_tokens, stop_id):
            made = []
            for _ in range(max_new_tokens):
                made.append(int(model(torch.tensor([prompt + made]))[0, -1].argmax()))
                if made[-1] == stop_id:
                    break
            return made
        """,
        """
        def greedy_until(model, prompt, max_new_tokens, stop_id):
            ids = list(prompt)
            for _ in range(max_new_tokens):
                ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
                if ids[-1] == stop_id:
                    break
            return ids[len(prompt):]
        """,
        """
        def greedy_until(model, prompt, max_new_tokens, stop_id):  # recursion, no in-place change
            if max_new_tokens == 0:
                return []
            token = int(model(torch.tensor(prompt)[None], last_only=True).flatten().argmax())
            rest = [] if token == stop_id else greedy_until(model, prompt + [token], max_new_tokens - 1, stop_id)
            return [token] + rest
        """,
        "def greedy_until(m, p, n, stop): return kv.generate_naive(m, p, n, stop_ids={stop}).tokens",
        """
        def greedy_until(model, prompt, max_new_tokens, stop_id):  # changes the prompt it was given
            start = len(prompt)
            while len(prompt) < start + max_new_tokens and stop_id not in prompt[start:]:
                prompt += [int(model(torch.tensor([prompt]))[0, -1].argmax())]
            return prompt[start:]
        """,
    ],
    "rows_computed": [
        "def rows_computed(p, n): return n * p + n * (n - 1) // 2",
        "def rows_computed(p, n): return sum(range(p, p + n))",
        "def rows_computed(p, n): return np.arange(p, p + n).sum()",
        "def rows_computed(p, n): return (2 * p + n - 1) * n / 2",
    ],
    "linear_flops": [
        """
        def linear_flops(config, rows):
            queries, keys = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
            attention = config.d_model * (queries + 2 * keys) + queries * config.d_model
            return 2 * rows * config.n_layers * (attention + 3 * config.d_model * config.d_ff)
        """,
        """
        def linear_flops(c, rows):
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
        def linear_flops(c, rows):  # counted from a model's own matrices
            model = kv.Transformer(c, device="meta")
            matrices = [m.weight for m in model.layers.modules() if isinstance(m, torch.nn.Linear)]
            return float(2 * rows * sum(matrix.numel() for matrix in matrices))
        """,
    ],
    "fit_exponent": [
        "def fit_exponent(n, cost): return np.polyfit(np.log(n), np.log(cost), 1)[0]",
        """
        def fit_exponent(lengths, costs):  # the normal equation
            x, y = np.log10(lengths), np.log10(costs)
            return ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
        """,
        """
        def fit_exponent(lengths, costs):
            x, y = (torch.from_numpy(values).log() for values in (lengths, costs))
            return torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], 1), y[:, None]).solution[0]
        """,
    ],
}

FUTURE = "np.triu(np.ones(s.shape, bool), 1)"

MISTAKES = {
    "causal_attention": [
        ((" / q.shape[1] ** 0.5\n    s = np", "\n    s = np"), "how many numbers a query has"),
        (("q.shape[1] ** 0.5\n    s = np", "q.shape[1]\n    s = np"), "divided by d itself"),
        ((FUTURE, "False"), "no mask"),
        ((FUTURE, "np.triu(np.ones(s.shape, bool), 2)"), "sees the token after it"),
        ((FUTURE, "np.triu(np.ones(s.shape, bool))"), "the diagonal stays"),
        ((f"{FUTURE}, -np.inf, s", "np.triu(np.ones(s.shape, bool)), -1e9, s"), "the mean of all values"),
        ((f"np.where({FUTURE}, -np.inf, s)", "s + -1e9 * np.triu(np.ones(s.shape))"), "it sees every token"),
        ((FUTURE, "np.tril(np.ones(s.shape, bool), -1)"), "the wrong half"),
        (
            ("s.max(1, keepdims=True))\n        w = w / w.sum(1", "s.max(0, keepdims=True))\n        w = w / w.sum(0"),
            "down",
        ),
        (
            """
            def causal_attention(q, k, v):
                w = torch.from_numpy(q @ k.T / q.shape[1] ** 0.5).softmax(-1).numpy()
                return np.tril(w) @ v
            """,
            "the mask comes after the softmax",
        ),
        (
            """
            def causal_attention(q, k, v):
                return torch.from_numpy(np.tril(q @ k.T / q.shape[1] ** 0.5)).softmax(-1).numpy() @ v
            """,
            "exp(0) = 1",
        ),
        (("np.exp(s - s.max(1, keepdims=True))", "np.exp(s)"), "subtract each row's maximum"),
        (("return w @ v", "return (w @ v).T"), "transposed"),
        (("return w @ v", "return weights @ v"), "NameError"),
    ],
    "greedy_until": [
        (("return made", "return prompt + made"), "the new tokens alone"),
        (("return made", "return [token for token in made if token != stop_id]"), "the stop token is missing"),
        (
            ("== stop_id:\n            break\n    return made", "is None:\n            break\n    return made"),
            "does not stop",
        ),
        (("range(max_new_tokens):\n        made", "range(max_new_tokens + 1):\n        made"), "one token too many"),
        (("range(max_new_tokens):\n        made", "range(max_new_tokens - 1):\n        made"), "one token too few"),
        (("prompt + made]", "(prompt + made)[-1:]]"), "the last token alone"),
        (("prompt + made]", "prompt]"), "the prompt alone"),
        (("prompt + made]))[0, -1]", "prompt + made]))[0, 0]"), "logits[0, -1]"),
        (
            """
            def greedy_until(model, prompt, max_new_tokens, stop_id):
                made = []
                logits = model(torch.tensor([prompt]))
                while len(made) < max_new_tokens and stop_id not in made:
                    made.append(int(logits[0, -1].argmax()))
                    logits = model(torch.tensor([prompt + made]))
                return made
            """,
            "the model ran",
        ),
        (("torch.tensor([prompt + made])", "torch.tensor(prompt + made)"), "tokens must be a tensor (B, T)"),
    ],
    "rows_computed": [
        (("(n - 1) // 2", "(n + 1) // 2"), "never runs on it"),
        ("def rows_computed(p, n): return p + n - 1", "each row is counted once, but"),
        ("def rows_computed(p, n): return p + n", "and the last token too"),
        (("n * p + n", "p + n"), "in the first step only"),
        (("n * p + ", ""), "the prompt is missing"),
        ("def rows_computed(p, n): return (p + n) * (p + n - 1) // 2", "a step for each token of the prompt"),
        ("def rows_computed(p, n): return n * (p + n - 1)", "the rows of the longest one"),
        ("def rows_computed(p, n): return sum(p + step for step in range(n + 1))", "one step too many"),
        ("def rows_computed(p, n): return sum(p + step for step in range(n - 1))", "one step too few"),
        ("def rows_computed(p, n): return sum(p + step for step in range(1, n))", "the first step is missing"),
        ("def rows_computed(p, n): return 0", "expected 30, yours is 0"),
    ],
    "linear_flops": [
        (("return 2 * rows", "return rows"), "a multiply and an add"),
        (("(queries + 2 * keys)", "(3 * queries)"), "n_kv_heads x d_head"),
        (("3 * config", "2 * config"), "three matrices"),
        ((" * config.n_layers", ""), "this is one layer"),
        ((" + queries * config.d_model", ""), "o_proj is missing"),
        (
            (
                "    return 2 * rows * config",
                "    return 2 * rows * config.vocab_size * config.d_model + 2 * rows * config",
            ),
            "the output head",
        ),
        (("2 * rows * config", "2 * config"), "the number of rows is left out"),
        (
            (
                "config.n_heads * config.d_head, config.n_kv_heads * config.d_head",
                "config.d_model, config.n_kv_heads * config.d_model // config.n_heads",
            ),
            "need not be d_model",
        ),
        (("return 2 * rows", "return 6 * rows"), "yours is 3 times"),
    ],
    "fit_exponent": [
        ("def fit_exponent(n, cost): return np.polyfit(n, cost, 1)[0]", "without logarithms"),
        (("np.log(n)", "n"), "take the log of the lengths too"),
        (("np.log(cost)", "cost"), "take the log of the costs too"),
        (("1)[0]", "1)[1]"), "the intercept"),
        (("np.log(n), np.log(cost)", "np.log(cost), np.log(n)"), "swapped"),
        (("1)[0]", "1)"), "the slope alone"),
        (
            "def fit_exponent(n, cost): return np.log(cost[-1] / cost[0]) / np.log(n[-1] / n[0])",
            "first and the last point",
        ),
    ],
}

TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES)


def test_worked_answers_by_hand():
    assert solution(NOTEBOOK, "rows_computed")(6, 4) == 6 + 7 + 8 + 9
    same = np.zeros((2, 3))  # equal scores: the second token takes the mean of both values
    assert solution(NOTEBOOK, "causal_attention")(same, same, np.array([[1.0], [3.0]])).tolist() == [[1.0], [2.0]]
    lengths = np.array([1.0, 10.0, 100.0])
    assert solution(NOTEBOOK, "fit_exponent")(lengths, 7 * lengths**2) == pytest.approx(2)
    # SmolLM2-135M: 106,168,320 weights in the linear layers of its 30 decoder layers
    smollm2 = kv.ModelConfig(49_152, 30, 9, 576, 1536, n_kv_heads=3)
    assert solution(NOTEBOOK, "linear_flops")(smollm2, 1) == 2 * 30 * (576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536)
    assert 30 * (576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536) == 106_168_320
