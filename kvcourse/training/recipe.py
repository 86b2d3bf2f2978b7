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
from functools import partial
from itertools import islice
from random import Random

import torch
from tokenizers import Tokenizer

from kvcourse.config import ModelConfig
from kvcourse.model import Transformer
from kvcourse.require import require_whole
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
MIDDLE = 128  # tokens of a row when stories begin
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
    steps: int = 3400
    near: float = 0.12
    facts: float = 0.1
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

    def __post_init__(self):
        for name in ("steps", "rows", "warmup"):
            require_whole(name, getattr(self, name))
        if not 16 <= self.shortest <= self.max_seq_len <= self.batch_tokens:
            raise ValueError(
                f"A step reads whole rows, of at least 16 tokens: shortest={self.shortest}, "
                f"max_seq_len={self.max_seq_len} and batch_tokens={self.batch_tokens} must be given in rising order."
            )
        if not (self.near >= 0 and self.facts >= 0 and self.near + self.facts < 1):
            raise ValueError(
                f"near={self.near} and facts={self.facts} are shares of the steps: give two that are at least 0 and "
                "leave something for stories."
            )

    def config(self, variant: str) -> ModelConfig:
        """The shape of a variant. Raises `ValueError` for a name that is none."""
        if variant not in VARIANTS:
            raise ValueError(f"There is no variant {variant!r}; choose one of {', '.join(VARIANTS)}.")
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

    def stage(self, progress: float) -> Stage:
        """What is read when this share of the steps is done."""
        middle = min(MIDDLE, self.max_seq_len)
        if progress < self.near:
            return Stage(self.shortest, 1.0, kinds=1, among=NEAR, answer_weight=self.answer_weight)
        if progress < self.near + self.facts:
            grown = (progress - self.near) / self.facts
            return Stage(self.grow(self.shortest, middle, grown), 1.0, answer_weight=self.answer_weight)
        grown = min(1.0, 4 * (progress - self.near - self.facts) / (1 - self.near - self.facts))
        return Stage(
            length=self.grow(middle, self.max_seq_len, grown),
            litanies=0.8 - 0.77 * grown,
            dense=0.8 - 0.5 * grown,
            plain=0.5 - 0.45 * grown,
            answer_weight=self.answer_weight / 3,
        )

    def grow(self, short: int, long: int, grown: float) -> int:
        """From `short` to `long` by equal factors; between them in multiples of 16."""
        return long if grown == 1 else min(long, round(short * (long / short) ** grown / 16) * 16)

    def at_once(self, stage: Stage) -> int:
        """How many rows of a stage a step reads."""
        return min(self.rows, self.batch_tokens // stage.length)


def new_model(recipe: Recipe, variant: str, device="cpu") -> Transformer:
    """The variant with its starting weights, in float32, ready to be trained."""
    model = Transformer(recipe.config(variant), "cpu", torch.float32)
    initialize(model, recipe.seed, recipe.arranged)
    return model.to(device).requires_grad_(True).train()


def batch_at(recipe: Recipe, tokenizer: Tokenizer, step: int) -> Batch:
    """What is read at a step: it follows from the recipe's seed and the step alone."""
    return read(recipe, tokenizer, recipe.stage(step / recipe.steps), f"{recipe.seed} {step}", "train")


def held_out(recipe: Recipe, tokenizer: Tokenizer, split: str, rows: int = HELD_OUT_ROWS) -> list[Batch]:
    """At least `rows` rows of the last stage, of stories that are in no other split; the same for every seed."""
    stage = recipe.stage(1.0)
    return [read(recipe, tokenizer, stage, f"{i}", split) for i in range(math.ceil(rows / recipe.at_once(stage)))]


def read(recipe: Recipe, tokenizer: Tokenizer, stage: Stage, seed: str, split: str) -> Batch:
    rng = Random(f"{split} {seed}")
    write_one = partial(write, stage)
    rows = [make_row(rng, tokenizer, stage.length, write_one, split) for _ in range(recipe.at_once(stage))]
    return make_batch(rows, stage.answer_weight)


def train_tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The tokenizer, learned from stories as the recipe has them at the end, and as much from litanies of all kinds, so
    that nearly all keys and answers are one token. It does not depend on the number of steps."""
    return train_tokenizer(islice(training_texts(recipe), TOKENIZER_STORIES), recipe.vocab_size)


def training_texts(recipe: Recipe) -> Iterator[str]:
    rng = Random("tokenizer")
    while True:
        progress = rng.choice((1.0, recipe.near))
        text = write(recipe.stage(progress), rng).text
        if split_of(text) == "train":
            yield text
