"""Calibration: what the linear layers of a model are given when it reads ordinary text.

A layer of the model has seven linear layers but only four inputs: q, k and v share one, gate and up another. Each input
is written by the module before it, and is known here by that one's name.

The texts go through the model layer by layer: what is kept is the hidden states of all of them between two layers, and
one layer's inputs. So a layer can be rounded when they arrive, and what comes after is given what the rounded one makes
of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kvcourse.caches import NoCache
from kvcourse.model import Layer, Transformer
from kvcourse.quality import at_most, one_text
from kvcourse.quant.statistics import InputStatistics
from kvcourse.texts import as_ids

# Who writes an input, and which linear layers read it.
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.v_proj": ("self_attn.o_proj",),  # attention averages values, channel by channel
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up_proj": ("mlp.down_proj",),
}
LINEARS = tuple(name for readers in READERS.values() for name in readers)
CONTEXT = 512  # tokens of a text, unless the caller or the model says otherwise


class Calibration:
    """The hidden states of calibration texts, `rows` `(N, T)` of token ids, on their way through a model, in float32.

    It starts behind the embedding. `inputs(layer)` runs one layer, and `advance()` goes on to the next.
    """

    def __init__(self, model: Transformer, rows: Tensor):
        positions = torch.arange(rows.shape[1])[None]
        self.step = NoCache(model.config).begin(positions)
        self.rotary = model.rotary(positions.to(model.device))
        self.hidden = [model.embed_tokens(row[None]).float() for row in rows.to(model.device)]
        self.index = 0  # of the next layer

    def inputs(self, layer: Layer) -> Iterator[tuple[str, list[Tensor]]]:
        """Run a layer in float32. On the way, yield (writer, inputs of its readers: `(1, T, columns)` for each text).

        Whoever iterates may change the readers before going on: the rest of the layer is computed with them as they
        then are. It is the order of `READERS`.
        """
        attention, mlp = layer.self_attn, layer.mlp
        x = self.hidden
        normed = [layer.input_layernorm(row) for row in x]
        yield "input_layernorm", normed
        with without(attention, "o_proj"):
            attended = [attention(row, self.index, self.rotary, self.step) for row in normed]
        yield "self_attn.v_proj", attended
        x = [row + attention.o_proj(more) for row, more in zip(x, attended, strict=True)]
        normed = [layer.post_attention_layernorm(row) for row in x]
        yield "post_attention_layernorm", normed
        with without(mlp, "down_proj"):
            gated = [mlp(row) for row in normed]
        yield "mlp.up_proj", gated
        self.after = [row + mlp.down_proj(more) for row, more in zip(x, gated, strict=True)]

    def advance(self) -> None:
        """Go on to the next layer with what the last whole run of `inputs` gave."""
        self.hidden, self.after = self.after, None
        self.index += 1


@contextmanager
def without(module: nn.Module, name: str) -> Iterator[None]:
    """Leave out a child of a module: what it would be given comes out unchanged."""
    child = getattr(module, name)
    setattr(module, name, nn.Identity())
    try:
        yield
    finally:
        setattr(module, name, child)


def statistics_of(inputs: list[Tensor]) -> InputStatistics:
    statistics = InputStatistics(inputs[0].shape[-1], inputs[0].device)
    for row in inputs:
        statistics.add(row)
    return statistics


def calibration_rows(tokens: Tensor | list[int], context: int | None, model: Transformer) -> Tensor:
    """The ids of a text cut into rows of `context`, `(N, context)`. What is left at its end fills no row.

    Raises `ValueError` for a text shorter than one row, what is no list of ids, and a context the model does not have.
    """
    limit = model.config.max_seq_len
    context = at_most("context", min(CONTEXT, limit) if context is None else context, limit, "the model's own")
    ids = torch.tensor(as_ids("calibration", one_text(tokens, "calibration"), model.config.vocab_size))
    if len(ids) < context:
        raise ValueError(
            f"calibration has {len(ids)} tokens, but one row takes context={context}: give a longer text, such as "
            'lm.encode(kv.evaluation_text("calibration")), or a smaller context.'
        )
    return ids[: len(ids) // context * context].reshape(-1, context)
