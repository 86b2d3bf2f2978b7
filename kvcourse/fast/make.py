"""`compiled`: the fast version of a model, in the weights of one's choice."""

from dataclasses import replace

import torch
from torch import Tensor

from kvcourse.device import as_dtype
from kvcourse.evaluation import evaluation_text
from kvcourse.fast.compiled import CompiledTransformer
from kvcourse.lm import COMPILED, LM
from kvcourse.model import Transformer
from kvcourse.quality import transformer_of
from kvcourse.quant.calibration import calibration_rows
from kvcourse.quant.fold import replace_parameter
from kvcourse.quant.int8_product import Int8Product
from kvcourse.quant.linear import QuantLinear
from kvcourse.quant.plan import check_weights
from kvcourse.quant.quantize import copied, quantize_model
from kvcourse.quant.smoothing import STRENGTH, smoothed
from kvcourse.quant.tensor import rtn

CALIBRATION = 2048  # tokens of a text that say enough about the largest activations
GROUP = 32  # weights that share a scale, in 4 bits


@torch.no_grad()
def compiled(
    model: LM | Transformer, weights: str | None = None, calibration: Tensor | list[int] | None = None
) -> LM | Transformer:
    """The same model, faster: a `CompiledTransformer`, in an `LM` for an `LM`. The one given stays as it is; what is
    not joined or rounded is shared with it.

    | `weights` | what is in memory, and computed |
    |---|---|
    | None | as they are; a model made by `quantize_model` keeps its weights and its kernels |
    | "float32", "bfloat16", "float16" | converted to that |
    | "int8" | weights and activations in 8 bits, the outliers of the activations smoothed (`smooth`, `Int8Product`) |
    | "int4" | weights in 4 bits to nearest, 32 to a scale and zero point, head in 8 bits, activations in bfloat16 |

    `calibration`: token ids of a text, for "int8" alone. Without one an `LM` reads 2,048 tokens of the course's
    calibration text; a `Transformer`, which has no tokenizer, is not smoothed.

    In "int8" one token at a time is multiplied with the codes as it is, and only where many are computed at once, in a
    prompt or a batch, activations are rounded too. So the tokens of `generate` and `generate_naive` may differ. Codes
    are kept in two orders for that: as many bytes as in bfloat16.

    Raises `ValueError` for another kind of weights, for a model that is compiled already or, with `weights`, quantized
    already, for rows that do not fit "int4", and for a calibration that is not used.
    """
    source = transformer_of(model)
    if weights is not None and weights not in COMPILED:
        raise ValueError(f"weights={weights!r} must be one of {', '.join(COMPILED)}, or None: as they are.")
    if isinstance(source, CompiledTransformer):
        raise ValueError("This model is compiled already: give the model that it was made from.")
    if calibration is not None and weights != "int8":
        raise ValueError(f'calibration= is for weights="int8", and not for weights={weights!r}: leave it out.')
    if weights == "int8":
        result = in_int8(source, default_calibration(model) if calibration is None else calibration)
    elif weights == "int4":
        require_groups(source)
        options = dict(dtype=torch.bfloat16, head_bits=8, progress=False)
        result = quantize_model(source, "rtn", 4, GROUP, **options)
    elif weights is None:
        result = source
    else:
        check_weights(source, {})
        result = copied(source, as_dtype(weights))
    fast = CompiledTransformer(result)
    return replace(model, model=fast) if isinstance(model, LM) else fast


def require_groups(model: Transformer) -> None:
    """`ValueError` unless the rows of all weights fill whole groups."""
    config = model.config
    for columns in (config.d_model, config.n_heads * config.d_head, config.d_ff):
        if columns % GROUP:
            raise ValueError(
                f'weights="int4" keeps {GROUP} weights to a scale, and this model has rows of {columns}: choose a '
                "group_size for quantize_model, and compile what it makes."
            )


def default_calibration(model: LM | Transformer) -> list[int] | None:
    if not isinstance(model, LM) or model.tokenizer is None:
        return None
    return model.encode(evaluation_text("calibration"))[:CALIBRATION]


def in_int8(source: Transformer, calibration: Tensor | list[int] | None) -> Transformer:
    """Weights and activations of 8 bits, in the head too. Tokens are looked up in the table as it was."""
    table, smoothed_model = source.embed_tokens.weight if source.lm_head is None else source.lm_head.weight, source
    if calibration is not None:
        check_weights(source, {})
        smoothed_model, scale = smoothed(source, calibration_rows(calibration, None, source), STRENGTH)
        table = table.float() * scale
        replace_parameter(smoothed_model.norm, "weight", smoothed_model.norm.weight.float() / scale)
    result = quantize_model(smoothed_model, "rtn", 8, symmetric=True, path=Int8Product.path, progress=False)
    result.lm_head = QuantLinear(rtn(table, 8, symmetric=True), None, source.dtype, Int8Product.path)
    return result
