"""One training run: read batches, follow the gradient, write down how it goes, and be able to go on after a stop.

AdamW (arXiv 1711.05101) with decay on matrices only, the recipe's learning rate at each step, and gradients clipped
to a norm. A run is fixed by the recipe, the variant and the data: stopped anywhere and taken up again, on the same
machine with as many threads, it ends with the same weights, bit for bit.
"""

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from time import monotonic

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from kvcourse.model import Transformer
from kvcourse.model_folder import usable
from kvcourse.training.checkpoint import CHECKPOINT, save_checkpoint
from kvcourse.training.history import History
from kvcourse.training.resume import make_plan, restore, state_of

BETAS = (0.9, 0.95)
POINTS = 40  # of the curve; at each, a checkpoint is written


class Stopped(KeyboardInterrupt):
    """Ctrl-C was pressed. The step that was being computed is finished, and a checkpoint is written."""


def train(
    model: Transformer,
    recipe,
    variant: str,
    batch_at: Callable,
    validation: Sequence,
    folder: str | os.PathLike,
    *,
    origin: dict | None = None,
    resume: bool = True,
    progress: bool = True,
) -> History:
    """Train `model`, new from its recipe, in place; return how it went.

    `batch_at(step)` gives the data of a step, whatever the variant: `tokens (B, T + 1)`, the `weights (B, T)` of the
    targets in the loss, and `asked`, for each row a list of questions: the answer is `tokens[start:end]`, and was last
    written `distance` tokens before. `validation` is a list of such batches, none of them trained on.

    The state of the run is kept in `folder`, and an unfinished run is gone on with, unless `resume` is False. `origin`
    says what computes, in what JSON can hold; the history keeps it for each part of a run.

    Raises `ValueError` when what is there is damaged or of another run, `RuntimeError` when the state cannot be written
    or the training diverges (the checkpoint before is kept), `Stopped` after Ctrl-C.
    """
    path = usable(folder) / CHECKPOINT
    optimizer = make_optimizer(model, recipe)
    plan = make_plan(recipe, variant, batch_at(0).tokens)
    step, history = restore(path, model, optimizer, plan) if resume and path.exists() else (0, History())
    if step < recipe.steps:
        history.begin(step, origin or {})
    before, began, saved = history.seconds, monotonic(), None

    def save() -> None:
        nonlocal saved
        if saved != step:
            history.seconds = before + monotonic() - began
            save_checkpoint(path, state_of(model, optimizer), plan | {"step": step, "history": asdict(history)})
            saved = step

    save()  # a folder that cannot be written to is better known now
    every = math.ceil(recipe.steps / POINTS)
    bar = tqdm(total=recipe.steps, initial=step, desc=variant, unit="step", disable=not progress)
    with bar, stop_asked() as asked:
        while step < recipe.steps and not asked:
            batch = batch_at(step)
            rate = recipe.learning_rate(step)
            loss, answers = take_step(model, optimizer, batch, rate, recipe.clip)
            require_finite(loss, variant, step)
            step += 1
            history.note(loss, batch.weights.numel(), answers)
            if step % every == 0 or step == recipe.steps:
                held_out = validation_loss(model, validation)
                require_finite(held_out, variant, step)
                history.close(step, rate, held_out)
                save()
            bar.set_postfix(history.summary(), refresh=False)
            bar.update()
    if asked:
        save()
        raise Stopped(f"{variant} is stopped after step {step} of {recipe.steps}. Its state is in {path}.")
    return history


def make_optimizer(model: Transformer, recipe) -> torch.optim.AdamW:
    """Decay pulls matrices towards zero; the scales of the norms, which belong near one, are left alone."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    scales = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


def take_step(model, optimizer, batch, rate: float, clip: float) -> tuple[float, list[tuple[int, bool]]]:
    """One step; mean loss before it, and (distance, whether right) of each question. A loss that is not finite, or
    has such a gradient, is returned as NaN, and nothing is learned from it."""
    losses, logits = token_losses(model, batch)
    weights = batch.weights.to(model.device)
    optimizer.zero_grad()
    ((losses * weights).sum() / weights.sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    if not norm.isfinite():
        return math.nan, []
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return losses.mean().item(), answered(logits.detach(), batch)


def token_losses(model: Transformer, batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each token given those before it `(B, T)`, in float32, and the logits `(B, T, V)`."""
    tokens = batch.tokens.to(model.device)
    with autocast(model.device):
        logits = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return losses.view_as(tokens[:, 1:]), logits


def autocast(device: torch.device):
    """On a GPU that computes in bfloat16 (compute capability 8.0), matrix products are in it; weights stay float32.
    On the CPU, where that is slower, everything is in float32."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8:
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


def answered(logits: Tensor, batch) -> list[tuple[int, bool]]:
    """(distance, right) of each question. Right is an answer of which every token has the highest score, given the
    answer's tokens before it: what greedy decoding would have written."""
    right = (logits.argmax(-1).cpu() == batch.tokens[:, 1:]).tolist()
    return [
        (q.distance, all(row[q.start - 1 : q.end - 1]))
        for row, asked in zip(right, batch.asked, strict=True)
        for q in asked
    ]


@torch.no_grad()
def validation_loss(model: Transformer, batches: Sequence) -> float:
    """Mean cross-entropy over all tokens of the batches, in nats."""
    losses = torch.cat([token_losses(model, batch)[0].flatten() for batch in batches])
    return losses.mean().item()


def require_finite(loss: float, variant: str, step: int) -> None:
    if not math.isfinite(loss):
        raise RuntimeError(
            f"The training of {variant} has diverged at step {step}: its loss, or the gradient, is no finite number. "
            "The checkpoint before is kept, but a lower learning rate is needed."
        )


@contextmanager
def stop_asked() -> Iterator[list]:
    """A list that is no longer empty once Ctrl-C was pressed; pressed again, it ends the program at once.

    In a thread of its own, where signals do not arrive, nothing changes.
    """
    asked = []

    def ask(signum, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(signum)

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:
        yield asked
        return
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
