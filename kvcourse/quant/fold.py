"""Folding: move scales from the inputs of a linear layer into the module that writes them.

AWQ multiplies the columns of a weight with s, so that those of large inputs are rounded more finely, and divides the
inputs by s (arXiv 2306.00978, section 3.2). The division costs nothing when whatever writes the inputs is divided
instead, once and for all; the logits stay as they were.

| who writes | what is divided |
|---|---|
| a norm | its weight |
| v_proj, whose values attention only averages | its rows and its bias |
| up_proj, whose outputs the gate only multiplies | its rows and its bias |
"""

import torch
from torch import Tensor, nn

from kvcourse.model import Layer
from kvcourse.quant.calibration import READERS


def fold(layer: Layer, writer: str, scale: Tensor) -> None:
    """Multiply the columns of all that read what `writer` (a name in `READERS`) writes with `scale` `(columns,)`, and
    divide the writer's output by it. New parameters take the place of the old ones, which stay as they are.

    A key-value head serves several query heads, so the inputs of o_proj have one scale for each of its channels,
    repeated for those heads; raises `ValueError` for others, and for a scale that is not above 0 and finite.
    """
    if not (scale.isfinite() & (scale > 0)).all():
        raise ValueError(f"Scales must be finite and above 0; those for what {writer} writes are not.")
    for name in READERS[writer]:
        reader = layer.get_submodule(name)
        replace_parameter(reader, "weight", reader.weight.float() * scale)
    if writer == "self_attn.v_proj":
        scale = one_of_each_group(scale, layer)
    module = layer.get_submodule(writer)
    for name, parameter in list(module.named_parameters()):
        is_matrix = parameter.ndim == 2
        replace_parameter(module, name, parameter.float() / (scale[:, None] if is_matrix else scale))


def one_of_each_group(scale: Tensor, layer: Layer) -> Tensor:
    """Scales of the channels of all query heads -> those of the key-value heads; `ValueError` where they differ."""
    by_head = in_heads(scale, layer)
    if not torch.equal(by_head, by_head[:, :1].expand_as(by_head)):
        raise ValueError("Query heads that share a key-value head must have the same scales for its channels.")
    return by_head[:, 0].flatten()


def shared_in_groups(magnitudes: Tensor, layer: Layer) -> Tensor:
    """Replace what belongs to the inputs of o_proj `(n_heads * d_head,)` by the mean over the query heads that share a
    key-value head, so that scales made of it can be folded into v_proj."""
    by_head = in_heads(magnitudes, layer)
    return by_head.mean(1, keepdim=True).expand_as(by_head).flatten()


def in_heads(numbers: Tensor, layer: Layer) -> Tensor:
    """`(n_heads * D,)` -> `(n_kv_heads, query heads of each, D)`: query heads of a group stand next to each other."""
    attention = layer.self_attn
    kv_heads = attention.v_proj.out_features // attention.d_head
    return numbers.reshape(kv_heads, -1, attention.d_head)


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a new parameter in the place of one that other models may share, in its dtype."""
    dtype = getattr(module, name).dtype
    setattr(module, name, nn.Parameter(value.to(dtype), requires_grad=False))
