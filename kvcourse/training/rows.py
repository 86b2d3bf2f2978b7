"""Stories as rows of token ids, and where in them the answers are.

A row starts with the end-of-story token, holds whole stories one after another, each closed by that token, and is
cut at its length. Its questions say at which tokens an answer stands, and how many tokens back it was last written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvcourse.training.stories.page import Story, split_of
from kvcourse.training.vocabulary import END_ID


@dataclass(frozen=True)
class Asked:
    """A question in a row: the answer is `tokens[start:end]`, and was written `distance` tokens before."""

    start: int
    end: int
    distance: int


@dataclass(frozen=True)
class Row:
    """`ids`: one more than the row's length, as inputs and targets overlap by all but one."""

    ids: list[int]
    asked: list[Asked]


@dataclass(frozen=True)
class Batch:
    """`tokens (B, T + 1)`, the `weights (B, T)` of the targets in the loss, and the questions of each row."""

    tokens: Tensor
    weights: Tensor
    asked: list[list[Asked]]


def encode_story(tokenizer: Tokenizer, story: Story) -> Row:
    """The ids of a story, without the tokens around it, and its questions."""
    encoding = tokenizer.encode(story.text, add_special_tokens=False)
    asked = []
    for question in story.questions:
        start, end = encoding.char_to_token(question.answer[0]), encoding.char_to_token(question.answer[1] - 1) + 1
        asked.append(Asked(start, end, start - encoding.char_to_token(question.fact[0])))
    return Row(encoding.ids, asked)


def make_row(rng: Random, tokenizer: Tokenizer, length: int, write: Callable[[Random], Story], split: str) -> Row:
    """A row of `length` tokens of stories that `write` makes and that belong to `split`."""
    ids, asked = [END_ID], []
    while len(ids) <= length:
        story = write(rng)
        if split_of(story.text) != split:
            continue
        row, offset = encode_story(tokenizer, story), len(ids)
        asked += [Asked(q.start + offset, q.end + offset, q.distance) for q in row.asked]
        ids += [*row.ids, END_ID]
    return Row(ids[: length + 1], [q for q in asked if q.end <= length + 1])


def make_batch(rows: Sequence[Row], answer_weight: float) -> Batch:
    """Rows of one length. An answer's tokens have `answer_weight` in the loss, all others 1."""
    tokens = torch.tensor([row.ids for row in rows])
    weights = torch.ones(tokens.shape[0], tokens.shape[1] - 1)
    for weight, row in zip(weights, rows, strict=True):
        for question in row.asked:
            weight[question.start - 1 : question.end - 1] = answer_weight
    return Batch(tokens, weights, [row.asked for row in rows])
