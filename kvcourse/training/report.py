"""How good the course's models are, side by side: perplexity, recall by distance, sentences, and what they take.

All of them read the same rows and answer the same questions, of stories that none was trained on.
"""

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, stdev

from torch import Tensor
from tqdm.auto import tqdm

from kvcourse.config import ModelConfig
from kvcourse.cost import cache_bytes, weight_bytes
from kvcourse.generation import generate
from kvcourse.lm import LM
from kvcourse.quality import perplexity, recall, wilson
from kvcourse.training.stories.grammar import sentences, writable
from kvcourse.training.vocabulary import END_ID

LENGTH, TEMPERATURE = 160, 0.8  # of the texts that a model writes
DISTANCES = (16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448)


@dataclass(frozen=True)
class Measured:
    """What was measured of one model. `losses`: for each split the mean loss of each row, in nats; `recalls`: one
    `Recall` for each distance; `written`: how many sentences it wrote right, of how many."""

    name: str
    config: ModelConfig
    losses: dict[str, list[float]]
    recalls: list
    written: tuple[int, int] | None = None

    def perplexity(self, split: str) -> float:
        return math.exp(mean(self.losses[split]))


def measure(
    lm: LM, rows: dict[str, Tensor], questions: int = 200, distances=DISTANCES, texts: int = 0, progress=True
) -> Measured:
    """Measure one model.

    `rows` has for each split token ids `(N, T + 1)` of rows as the model was trained on, beginning with the token that
    begins a text; every token but that one counts once, after all that stand before it in its row. `questions` are
    asked at each of the `distances`, of the split "test", and the model writes so many `texts` of its own.
    """
    total = sum(map(len, rows.values())) + len(distances) * questions
    with tqdm(total=total, desc=lm.name, disable=not progress, leave=False) as bar:
        losses, recalls = {}, []
        for split, tokens in rows.items():
            losses[split] = []
            for row in tokens:
                losses[split].append(math.log(perplexity(lm, row)))
                bar.update()
        for distance in distances:
            recalls.append(recall(lm, distance, questions=questions, split="test"))
            bar.update(questions)
    return Measured(lm.name, lm.config, losses, recalls, count_right(lm, texts) if texts else None)


def count_right(lm: LM, texts: int) -> tuple[int, int]:
    """How many sentences of `texts` texts are such as the stories have (`grammar.writable`), and of how many."""
    length = min(LENGTH, lm.config.max_seq_len)
    made = generate(lm.model, [[END_ID]] * texts, length, temperature=TEMPERATURE, seed=0, stop_ids=[END_ID])
    right = []
    for text in made:
        found = sentences(lm.decode(text.ids))
        right += map(writable, found if text.ids[-1] == END_ID else found[:-1])  # the last one was cut
    return sum(right), len(right)


def text(models: list[Measured]) -> str:
    """The table, a column for each model, and what its numbers mean; at most 120 columns wide for four models."""
    lines = [row("", [model.name for model in models])]
    lines += [row(title, [write(model) for model in models]) for title, write in FACTS.items()]
    for split in models[0].losses:
        lines.append(row(f"perplexity, {split}", [f"{model.perplexity(split):.3f}" for model in models]))
        if len(models) > 1:
            lines.append(row(f"  against {models[0].name}", [against(model, models[0], split) for model in models]))
    lines.append(f"{'recall at':<14}{'guessed':>9}")
    for answers in zip(*(model.recalls for model in models), strict=True):
        lines.append(row(f"{f'  {answers[0].distance} tokens':<14}{guessed(answers[0]):>9}", map(share, answers)))
    if models[0].written:
        lines.append(row("sentences right", [sentences_right(model) for model in models]))
    wrapped = [textwrap.fill(note, 118, initial_indent="- ", subsequent_indent="  ") for note in notes(models)]
    return "\n".join([*lines, "", *wrapped])


FACTS = {
    "query / key-value heads": lambda m: f"{m.config.n_heads} / {m.config.n_kv_heads}",
    "window": lambda m: "none" if m.config.window is None else f"{m.config.window}",
    "weights in fp16": lambda m: f"{weight_bytes(m.config) / 1e6:.2f} MB",
    "KV cache in fp16": lambda m: f"{cache_bytes(m.config, 1):,} B a token",
}


def row(title: str, cells: Iterable[str]) -> str:
    return f"{title:<25}" + "".join(f"{cell:>23}" for cell in cells)


def against(model: Measured, first: Measured, split: str) -> str:
    """How much higher the perplexity is, with the 95% interval that comes from the choice of rows."""
    if model is first:
        return ""
    gaps = [mine - its for mine, its in zip(model.losses[split], first.losses[split], strict=True)]
    middle = math.expm1(mean(gaps))
    if len(gaps) < 2:
        return f"{middle:+.2%}"
    return f"{middle:+.2%} ± {1.96 * stdev(gaps) / math.sqrt(len(gaps)):.2%}"


def share(answer) -> str:
    return with_interval(answer.right, answer.asked)


def sentences_right(model: Measured) -> str:
    right, written = model.written
    return with_interval(right, written) if written else "none written"


def with_interval(right: int, total: int) -> str:
    """The share in percent, and its 95% interval."""
    low, high = wilson(right, total)
    return f"{right / total:.1%} ({100 * low:.1f} to {100 * high:.1f})"


def guessed(answer) -> str:
    return "" if answer.guessed is None else f"{answer.guessed:.1%}"


def notes(models: list[Measured]) -> list[str]:
    counts = ", ".join(f"{len(losses)} rows ({split})" for split, losses in models[0].losses.items())
    lines = [
        f"perplexity: e to the mean loss of a token, over {counts}, each read from its beginning; stories that no "
        "model was trained on.",
        f"recall: share of {models[0].recalls[0].asked} questions of test stories whose whole answer greedy decoding "
        "writes, by how many tokens before it was last written; in brackets its 95% interval.",
        "guessed: the share without looking anything up, by naming the latest fact of the kind asked for, the first or "
        "any: whichever is right most often. The nearest questions leave little room for a later fact.",
    ]
    if models[0].written:
        lines.append(
            "sentences right: the share that the stories could have (their forms, their words, different people where "
            f"there are several) of those in texts of up to {LENGTH} tokens, written at temperature {TEMPERATURE}; "
            "in brackets its 95% interval."
        )
    if len(models) > 1:
        lines.append(
            "against: the difference of the perplexities on the same rows, ± what another choice of rows could change "
            "(95%). What another seed of the training would change is not in it."
        )
        for split in models[0].losses:
            order = sorted(models, key=lambda model: model.perplexity(split))
            lines.append(f"best first ({split}): {', '.join(model.name for model in order)}.")
    return lines
