"""Give a trained model fewer key-value heads, and let it learn again what that cost (arXiv 2305.13245, section 2.1).

First the key and value projections of each group of heads are made into one; then the model is trained a little more,
on what it was trained on.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm.auto import tqdm

from kvcourse.lm import LM
from kvcourse.model import Transformer
from kvcourse.quality import course_tokenizer, transformer_of
from kvcourse.require import require_number, require_whole
from kvcourse.training.recipe import Recipe, read
from kvcourse.training.rows import Batch
from kvcourse.training.trainer import make_optimizer, take_step
from kvcourse.weights.shipped import STAND_IN, shipped_folder

WAYS = ("mean", "first", "random")


@torch.inference_mode(False)  # the copy may be trained, wherever it is made
def share_heads(model: LM | Transformer, n_kv_heads: int, how: str = "mean", seed: int = 0) -> Transformer:
    """A copy of `model` with `n_kv_heads` key-value heads. Each takes the place of those that stand next to each other:

    - `"mean"`: their mean, which the paper finds best;
    - `"first"`: the first of them;
    - `"random"`: random numbers, fixed by `seed`, of the same standard deviation as the projection had: nothing is kept
      of what it had learned.

    Everything else is copied, queries and outputs of all heads included; `model` stays as it is. Raises `ValueError`
    for an unknown way and for a number of heads that does not divide the model's.
    """
    model = transformer_of(model)
    config = model.config
    if how not in WAYS:
        raise ValueError(f"how={how!r} is not known: choose one of {', '.join(map(repr, WAYS))}.")
    n_kv_heads = require_whole("n_kv_heads", n_kv_heads)
    if config.n_kv_heads % n_kv_heads:
        raise ValueError(
            f"The model's {config.n_kv_heads} key-value heads cannot become {n_kv_heads}: groups must be of one size, "
            f"so give a divisor of {config.n_kv_heads}."
        )
    generator = torch.Generator().manual_seed(require_whole("seed", seed, least=0))
    weights = {
        name: merge(weight, config.n_kv_heads, n_kv_heads, how, generator)
        if ".k_proj." in name or ".v_proj." in name
        else weight.clone()
        for name, weight in model.state_dict().items()
    }
    shared = Transformer(replace(config, n_kv_heads=n_kv_heads), "meta", model.dtype)
    shared.load_state_dict(weights, assign=True)
    return shared


def merge(weight: Tensor, old: int, new: int, how: str, generator: torch.Generator) -> Tensor:
    """A projection's matrix `(old * d_head, d_model)`, or bias `(old * d_head,)`, for `new` heads."""
    groups = weight.unflatten(0, (new, old // new, -1))  # (new, G, d_head, ...)
    if how == "mean":
        return groups.mean(1).flatten(0, 1)
    if how == "first":
        return groups[:, 0].flatten(0, 1).clone()
    size = groups[:, 0].flatten(0, 1).shape
    return torch.randn(size, generator=generator).to(weight) * weight.std()


@torch.inference_mode(False)  # there and in no_grad, nothing would learn; this switches gradients on as well
def fine_tune(
    model: Transformer, steps: int, batch_tokens: int = 512, seed: int = 0, progress: bool = True, peak_lr: float = 1e-3
) -> list[float]:
    """Train `model` further, in place, on the course's stories; return the loss of each step, before it was taken.

    The loss is the mean cross-entropy of a token, in nats, over stories that follow from `seed`; each step reads new
    ones. A step reads rows as they are at the end of the recipe, as long as the model's context, and as many as
    `batch_tokens` hold. All weights learn. Optimizer and course of the learning rate are the recipe's, in small: over a
    tenth of the steps it rises to `peak_lr`, then it falls along half a cosine.

    Raises `ValueError` for a model in half precision, of another vocabulary than the course's, or made in inference
    mode, and for a step that holds less than one row; `RuntimeError` when the training diverges.
    """
    steps = require_whole("steps", steps)
    check(model, batch_tokens)
    recipe = Recipe(
        max_seq_len=model.config.max_seq_len,
        batch_tokens=batch_tokens,
        steps=steps,
        warmup=max(1, steps // 10),
        peak_lr=require_number("peak_lr", peak_lr),
        seed=require_whole("seed", seed, least=0),
    )
    batches = stories(recipe, tokenizer_for(model))
    optimizer = make_optimizer(model, recipe)
    losses = []
    model.requires_grad_(True).train()
    try:
        for step in tqdm(range(steps), desc="fine-tuning", unit="step", disable=not progress):
            loss, _ = take_step(model, optimizer, next(batches), recipe.learning_rate(step), recipe.clip)
            if not math.isfinite(loss):
                raise RuntimeError(
                    f"The training has diverged at step {step}: the loss, or its gradient, is no finite number. Begin "
                    f"again with a peak_lr lower than {peak_lr}."
                )
            losses.append(loss)
    finally:
        model.requires_grad_(False).eval()
        optimizer.zero_grad()
    return losses


def check(model: Transformer, batch_tokens: int) -> None:
    if not isinstance(model, Transformer):
        raise ValueError(f"model must be a Transformer, as share_heads gives it, not {type(model).__name__}.")
    if model.dtype.itemsize < 4:
        raise ValueError(
            f"The model computes in {model.dtype}, too coarse for the small steps of training: load the model that it "
            'was made from with dtype="float32".'
        )
    if any(weight.is_inference() for weight in model.parameters()):
        raise ValueError(
            "The model was made inside torch.inference_mode(), and such weights cannot learn: make it outside, or "
            "train a copy from share_heads."
        )
    row = model.config.max_seq_len
    if require_whole("batch_tokens", batch_tokens) < row:
        raise ValueError(
            f"batch_tokens={batch_tokens} must be at least {row}: a step reads whole rows, of {row} tokens."
        )


def stories(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[Batch]:
    """Endless batches as the recipe has them in its last stage, of the training split."""
    step = 0
    while True:
        yield read(recipe, tokenizer, recipe.stage(1.0), f"fine-tune {recipe.seed} {step}", "train")
        step += 1


def tokenizer_for(model: Transformer) -> Tokenizer:
    """The course's tokenizer, as the library has it; `ValueError` for a model of another vocabulary."""
    course_tokenizer(model.config.vocab_size)
    return Tokenizer.from_file(str(shipped_folder(STAND_IN) / "tokenizer.json"))
