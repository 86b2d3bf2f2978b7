"""One new token of each of many texts, over pages, in a form that compiles: attention block by block.

Texts of a batch differ in length, and what is compiled has rectangles. So a block is the unit: each block that any text
looks into is a row of its own, and gives a softmax over its few tokens alone, with the largest score and the sum of the
exponentials beside it. A text's answer is the mean of what its blocks gave, weighted by what these two say (Flash-
Decoding, PyTorch blog, 2023-10-13: there a split is a piece of a long text, here it is a block). Only this last step,
which reads one row for each block instead of its keys and values, goes up to the longest text.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvcourse.caches.block_attention import look_back
from kvcourse.caches.packed import Run
from kvcourse.fast.function import varying
from kvcourse.layers import visible


class Reads(NamedTuple):
    """The M blocks that N texts look into, one text's after the other's, of which the longest has L."""

    blocks: Tensor  # (M,)
    text: Tensor  # (M,): whose block it is
    hidden: Tensor  # (M, block_size): tokens that the text does not see
    rows: Tensor  # (N, L): where in the M a text's blocks are
    absent: Tensor  # (N, L): where it has none


def reads_of(run: Run, window: int | None) -> Reads:
    """What the new tokens of a run look into, one of each text, from its block tables."""
    positions, size = run.positions, run.pages.block_size
    blocks, key_positions, counts = look_back(run.tables, positions, size, window)
    absent = torch.arange(max(2, blocks.shape[1])) >= counts[:, None]  # a size of 1 would be compiled apart
    own = ~absent[:, : blocks.shape[1]]
    hidden = ~visible(positions, key_positions, window).view(*blocks.shape, size)[own]
    text = torch.arange(len(blocks)).repeat_interleave(counts)
    blocks = blocks[own]
    if len(blocks) == 1:  # for the same reason once more: nobody asks what it gives
        blocks, text, hidden = (part.repeat(2, *[1] * (part.ndim - 1)) for part in (blocks, text, hidden))
    rows = (~absent).flatten().cumsum(0).sub(1).clamp(min=0).view(absent.shape)
    blocks, text, hidden = (varying(part.to(run.pages.device), 0) for part in (blocks, text, hidden))
    rows, absent = (varying(part.to(run.pages.device), 0, 1) for part in (rows, absent))
    return Reads(blocks, text, hidden, rows, absent)


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, reads: Reads) -> Tensor:
    """q `(N, H, D)` over keys and values `(num_blocks, H_kv, block_size, D)` -> `(N, H * D)`, in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.unflatten(1, (keys.shape[1], -1)).to(wide) * q.shape[2] ** -0.5  # (N, H_kv, G, D)
    scores = (keys[reads.blocks][:, :, None] * q[reads.text][:, :, :, None]).sum(-1)  # (M, H_kv, G, block_size)
    scores = scores.masked_fill(reads.hidden[:, None, None], -torch.inf)
    largest = scores.amax(-1)
    weights = (scores - largest[..., None]).exp()
    given = (weights[..., None] * values[reads.blocks][:, :, None]).sum(3)  # (M, H_kv, G, D)

    largest = largest[reads.rows].masked_fill(reads.absent[..., None, None], -torch.inf)  # (N, L, H_kv, G)
    share = (largest - largest.amax(1, keepdim=True)).exp()
    total = (weights.sum(-1)[reads.rows] * share).sum(1)
    return ((given[reads.rows] * share[..., None]).sum(1) / total[..., None]).flatten(1)
