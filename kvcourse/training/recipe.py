"""The recipe of the course's own models: one for all, except for how they attend.

    tiny-mha      every query head has its own key-value head
    tiny-gqa      four query heads share one
    tiny-mqa      all eight share one
    tiny-window   as tiny-mha, but each layer sees only the latest 64 tokens

Same stories in the same order, same seed, same steps, same width: a difference in quality is one in attention (and in
the weights that fewer key-value heads do without).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from tokenizers import Tokenizer

from kvcourse.config import ModelConfig
from kvcourse.model import Transformer
from kvcourse.training.curriculum import NEAR, Stage, write
from kvcourse.training.initial import initialize
from kvcourse.training.rows import Batch, make_batch, make_row
from kvcourse.training.stories.page import split_of
from kvcourse.training.vocabulary import train_tokenizer

VARIANTS = {
    "tiny-mha": {"n_kv_heads": 8},
    "tiny-gqa": {"n_kv_heads": 2},
    "tiny-mqa": {"n_kv_heads": 1},
    "tiny-window": {"n_kv_heads": 8, "window": 64},
}
HELD_OUT_ROWS = 128  # of each split
TOKENIZER_STORIES = 6000


@dataclass(frozen=True)
class Recipe:
    """Everything that fixes a run, besides the variant.

    Of the `steps`, the share `near` reads litanies with one word between key and answer, the share `facts` litanies of
    all kinds in growing rows, and the rest stories. A step reads up to `rows` rows and `batch_tokens` tokens.
    """

    n_layers: int = 4
    n_heads: int = 8
    d_model: int = 192
    d_head: int = 32
    d_ff: int = 512
    vocab_size: int = 2000
    max_seq_len: int = 512
    rope_theta: float = 100_000.0
    steps: int = 2000
    near: float = 0.15
    facts: float = 0.125
    rows: int = 16
    batch_tokens: int = 2048
    shortest: int = 64
    answer_weight: float = 30.0
    peak_lr: float = 2e-3
    warmup: int = 100
    final_lr: float = 0.05  # as a share of the peak
    weight_decay: float = 0.05
    clip: float = 1.0
    arranged: bool = True  # start from weights that are near to looking things up (`initial`)
    seed: int = 0

    def config(self, variant: str) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab_size,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            d_model=self.d_model,
            d_head=self.d_head,
            d_ff=self.d_ff,
            max_seq_len=self.max_seq_len,
            rope_theta=self.rope_theta,
            tie_embeddings=True,
            **VARIANTS[variant],
        )

    def learning_rate(self, step: int) -> float:
        """Rises over `warmup` steps, then falls along half a cosine."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak_lr * (self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2)

    def stage(self, step: int) -> Stage:
        """What is read at a step."""
        progress = step / self.steps
        if progress < self.near:
            return Stage(self.shortest, 1.0, kinds=1, among=NEAR, answer_weight=self.answer_weight)
        if progress < self.near + self.facts:
            grown = (progress - self.near) / self.facts
            return Stage(self.grow(self.shortest, 128, grown), 1.0, answer_weight=self.answer_weight)
        grown = min(1.0, 3 * (progress - self.near - self.facts) / (1 - self.near - self.facts))
        return Stage(
            length=self.grow(128, self.max_seq_len, grown),
            litanies=0.8 - 0.75 * grown,
            dense=0.8 - 0.3 * grown,
            plain=0.5 - 0.4 * grown,
            answer_weight=self.answer_weight / 3,
        )

    def grow(self, short: int, long: int, grown: float) -> int:
        """From `short` to `long` by equal factors, in multiples of 16."""
        return round(short * (long / short) ** grown / 16) * 16


def new_model(recipe: Recipe, variant: str, device="cpu") -> Transformer:
    """The variant with its starting weights, in float32, ready to be trained."""
    model = Transformer(recipe.config(variant), "cpu", torch.float32)
    initialize(model, recipe.seed, recipe.arranged)
    return model.to(device).requires_grad_(True).train()


def batch_at(recipe: Recipe, tokenizer: Tokenizer, step: int) -> Batch:
    """What is read at a step: it follows from the recipe's seed and the step alone."""
    return read(recipe, tokenizer, recipe.stage(step), f"{recipe.seed} {step}", "train")


def held_out(recipe: Recipe, tokenizer: Tokenizer, split: str, rows: int = HELD_OUT_ROWS) -> list[Batch]:
    """At least `rows` rows of the last stage, of stories that are in no other split; the same for every seed."""
    stage, at_once = recipe.stage(recipe.steps), recipe.batch_tokens // recipe.max_seq_len
    return [read(recipe, tokenizer, stage, f"{i}", split) for i in range(math.ceil(rows / at_once))]


def read(recipe: Recipe, tokenizer: Tokenizer, stage: Stage, seed: str, split: str) -> Batch:
    rng = Random(f"{split} {seed}")
    count = min(recipe.rows, recipe.batch_tokens // stage.length)
    rows = [make_row(rng, tokenizer, stage.length, lambda r: write(stage, r), split) for _ in range(count)]
    return make_batch(rows, stage.answer_weight)


def train_tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The tokenizer, learned from stories as the recipe has them at the end, half of the time, and on the way."""
    return train_tokenizer(islice(training_texts(recipe), TOKENIZER_STORIES), recipe.vocab_size)


def training_texts(recipe: Recipe) -> Iterator[str]:
    rng = Random("tokenizer")
    while True:
        step = rng.choice((recipe.steps, rng.randrange(recipe.steps)))
        text = write(recipe.stage(step), rng).text
        if split_of(text) == "train":
            yield text
