"""Smoothing: make activations easier to round by letting the weights carry a part of their outliers.

A few channels of the activations are far larger than the others, and one scale per token must span them: the others are
left with few of the 255 levels. So channel j is divided by s_j, and column j of the weights that read it multiplied by
s_j, with s_j = max|x_j|^strength / max|w_j|^(1 - strength) (SmoothQuant, arXiv 2211.10438, section 4). The division
costs nothing: it is folded into whatever writes the channel.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvcourse.lm import LM
from kvcourse.model import Layer, Transformer
from kvcourse.quality import transformer_of
from kvcourse.quant.calibration import READERS, Calibration, calibration_rows
from kvcourse.quant.fold import fold, shared_in_groups
from kvcourse.quant.plan import check_weights
from kvcourse.quant.quantize import copied, put_into
from kvcourse.require import require_number

STRENGTH = 0.55  # SmolLM2 in 8 bits: 0.5 to 0.6 are alike, perplexity 0.5 to 1% up; at 0.4 and 0.7 more
LEAST = 1e-5  # of a magnitude: a channel that is always zero keeps a scale that is finite


@torch.no_grad()
def smooth(
    model: LM | Transformer, calibration: Tensor | list[int], strength: float = STRENGTH, *, context: int | None = None
) -> LM | Transformer:
    """The same model with scales moved from activations into the weights of its layers; logits stay as they were, up to
    rounding.

    The largest magnitudes are those met in `calibration`, the token ids of a text, cut into rows of `context` tokens as
    `quantize_model` does. `strength` is how much of the outliers the weights take over: near 0 the columns of the
    weights get equal peaks, at 1 the channels of the activations. The model given stays as it is; all is worked out in
    float32, whatever it computes in. Raises `ValueError` for a model that is quantized or compiled, a text shorter than
    a row, and a strength that is not above 0 and at most 1.
    """
    source, strength = transformer_of(model), require_number("strength", strength)
    if strength > 1:
        raise ValueError(f"strength={strength} must be above 0 (the activations keep their outliers) and at most 1.")
    source.layers  # noqa: B018 (a compiled model has none, and says so)
    check_weights(source, {})
    result, _ = smoothed(source, calibration_rows(calibration, context, source), strength)
    return replace(model, model=result) if isinstance(model, LM) else result


def smoothed(source: Transformer, rows: Tensor, strength: float) -> tuple[Transformer, Tensor]:
    """(the model smoothed after reading `rows` of ids, what the inputs of its head should be divided by).

    The head is left as it is: where it is the embedding too, a scale in it would change what is looked up."""
    run, result = Calibration(source, rows), copied(source, source.dtype)
    for index, target in enumerate(result.layers):
        layer = copied(source.layers[index], torch.float32)
        before = dict(layer.named_parameters())
        peaks = {writer: largest(inputs) for writer, inputs in run.inputs(layer)}
        run.advance()
        for writer, peak in peaks.items():
            fold(layer, writer, scales(layer, writer, peak, strength))
        put_into(target, layer, before, {}, "auto")
    head = source.embed_tokens if source.lm_head is None else source.lm_head
    peak = largest([source.norm(text.to(source.dtype)).float() for text in run.hidden])
    return result, balance(peak, head.weight.abs().amax(0).float(), strength)


def largest(inputs: list[Tensor]) -> Tensor:
    """The largest magnitude of each channel over texts `(1, T, columns)`."""
    return torch.stack([text.abs().amax((0, 1)) for text in inputs]).amax(0)


def scales(layer: Layer, writer: str, peak: Tensor, strength: float) -> Tensor:
    """What each channel that `writer` writes is divided by."""
    weights = torch.stack([layer.get_submodule(name).weight.abs().amax(0) for name in READERS[writer]]).amax(0)
    if writer != "self_attn.v_proj":
        return balance(peak, weights, strength)
    scale = balance(shared_in_groups(peak, layer), shared_in_groups(weights, layer), strength)
    return shared_in_groups(scale, layer)  # once more: powers of equal numbers may differ in the last digit


def balance(peak: Tensor, weight: Tensor, strength: float) -> Tensor:
    """The scale of each channel, from the largest magnitudes of activations and of weights."""
    return peak.clamp(min=LEAST) ** strength / weight.clamp(min=LEAST) ** (1 - strength)
