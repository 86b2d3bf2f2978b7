"""Bytes of weights that a decode step reads, in the form in which the model keeps them."""

from collections.abc import Iterator

from torch import Tensor, nn

from kvcourse.fast.weights import Other, layer_of
from kvcourse.model import Transformer


def weights_read(model: Transformer, rows: int = 1) -> int:
    """Bytes of all weights that a step of `rows` tokens is computed with, each piece of memory once.

    The embedding table is looked up: one row of it for each token counts. A head that is the same matrix, or a copy of
    it in fewer bits, is multiplied with, so it is read whole.
    """
    read = memory(multiplied(model))
    table = sum(size for place, size in memory(tensors(model.embed_tokens)).items() if place not in read)
    return sum(read.values()) + rows * table // model.config.vocab_size


def multiplied(model: Transformer) -> Iterator[Tensor]:
    """All weights but the embedding, which is there only if it is the head too."""
    if not hasattr(model, "scores"):
        for name, module in model.named_children():
            if name != "embed_tokens" or model.lm_head is None:
                yield from tensors(module)
        return
    yield from nested((model.weights, model.scores))  # a compiled model reads these; its modules may hold other forms
    yield from tensors(model.norm)


def nested(value) -> Iterator[Tensor]:
    """The tensors in tuples and lists of tuples, and of the layers that stand there by their handles."""
    if isinstance(value, Other):
        yield from tensors(layer_of(value.handle))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from nested(part)
    elif isinstance(value, Tensor) and value.ndim:  # one without is a handle
        yield value


def tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def memory(held) -> dict[int, int]:
    """Where tensors lie, and their bytes: those that share memory are there once."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
