"""From scores to a token: greedy, or drawn at random with temperature, top-k and top-p."""

import math
from numbers import Real

import torch
from torch import Tensor

from kvcourse.require import require_whole


class Sampler:
    """Chooses the next token of one text. Each text has its own, so neighbours in a batch never change its draws.

    - `temperature` 0 takes the highest score; above 0 the scores are divided by it before the draw.
    - `top_k` keeps the k highest scores (None or 0: all; more than the vocabulary: all).
    - `top_p` keeps the smallest set of tokens whose probability reaches p, at least one
      (nucleus sampling, arXiv 1904.09751, section 3.1).
    - `seed` makes the draws repeatable.

    Raises `ValueError` when an option is out of range.
    """

    def __init__(self, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None, seed=None):
        if not isinstance(temperature, Real) or not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature={temperature!r} must be 0 (greedy) or a positive number.")
        if top_p is not None and (not isinstance(top_p, Real) or not 0 < top_p <= 1):
            raise ValueError(f"top_p={top_p!r} must be greater than 0 and at most 1.")
        self.temperature, self.top_p = temperature, top_p
        self.top_k = None if top_k is None else require_whole("top_k", top_k, least=0)
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(require_whole("seed", seed, least=0) % 2**64)

    def __call__(self, logits: Tensor) -> int:
        """Choose one token id from logits `(vocab_size,)`. Raises `RuntimeError` when they are no numbers."""
        best, token = logits.max(-1)
        if not math.isfinite(best):
            advice = "load the model in bfloat16 or float32" if logits.dtype == torch.float16 else "check its weights"
            raise RuntimeError(
                f"The highest score is {float(best)}: the model's numbers overflowed or are damaged; {advice}."
            )
        if self.temperature == 0:
            return int(token)
        return int(torch.multinomial(self.probabilities(logits), 1, generator=self.generator))

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution drawn from, `(vocab_size,)`: on the CPU, so that every device draws the same, and in
        float64, since the sum of a vocabulary of small numbers must reach `top_p` at the right one."""
        logits = logits.double().cpu()
        scores = (logits - logits.max()) / self.temperature  # at most 0: a tiny temperature cannot overflow
        if self.top_k and self.top_k < len(scores):
            kept = scores.topk(self.top_k).indices
            scores = torch.full_like(scores, -torch.inf).index_copy(0, kept, scores[kept])
        probabilities = scores.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            probabilities = nucleus(probabilities, self.top_p)
        return probabilities


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of most probable tokens that reaches `top_p`; the rest sums to 1 again."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # what the more probable tokens have reached already
    kept = order[before < top_p]
    out = torch.zeros_like(probabilities)
    out[kept] = probabilities[kept]
    return out / out.sum()
