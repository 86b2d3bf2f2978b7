"""A model with rounded weights, made from one without: layer by layer, from the first to the last.

With calibration a weight is rounded on inputs that come from the weights before it as they are after rounding: those
that it will really have (arXiv 2210.17323, section 4, from layer to layer; here within a layer too). Everything is
worked out in float32, one layer at a time, whatever the model computes in.
"""

from copy import deepcopy
from dataclasses import asdict, replace
from time import perf_counter

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvcourse.device import as_dtype, synchronize
from kvcourse.lm import LM
from kvcourse.model import Layer, Transformer
from kvcourse.quality import transformer_of
from kvcourse.quant.awq import search_scales
from kvcourse.quant.calibration import READERS, Calibration, calibration_rows, statistics_of
from kvcourse.quant.fold import fold, replace_parameter, shared_in_groups
from kvcourse.quant.grid import Grid
from kvcourse.quant.linear import QuantEmbedding, QuantLinear
from kvcourse.quant.plan import (
    EMBEDDING,
    HEAD,
    Rounding,
    check_path,
    check_weights,
    chosen_linears,
    make_head_grid,
    make_rounding,
)
from kvcourse.quant.report import LayerReport, Quantization, relative_error
from kvcourse.quant.tensor import QuantizedTensor, rtn
from kvcourse.require import require_flag
from kvcourse.weights.tensors import converted


@torch.no_grad()
def quantize_model(
    model: LM | Transformer,
    method: str = "rtn",
    bits: int = 4,
    group_size: int | str | None = None,
    calibration: Tensor | list[int] | None = None,
    *,
    symmetric: bool = False,
    head_bits: int | None = None,
    only: str | list[str] | None = None,
    context: int | None = None,
    dtype: torch.dtype | str | None = None,
    path: str = "auto",
    progress: bool = True,
    **options,
) -> LM | Transformer:
    """The same model with the weights of its linear layers kept in a few bits: an `LM` for an `LM`. The one given stays
    as it is, and what is not rounded is shared with it.

    `method`: "rtn" (to nearest), "nf4", "gptq" or "awq". `bits`, `group_size`, `symmetric` and the options kind, clip
    and scale_dtype are those of `kvcourse.quant.rtn`; damping, block_size, act_order and static_groups those of
    `kvcourse.quant.gptq`. Scales are in bfloat16 where the new model computes in it, else in float16.

    `calibration`: token ids of a text, which "gptq" and "awq" need, cut into rows of `context` tokens (default: 512, or
    the model's context if that is shorter). Tokens at the end that fill no row are left out, and the report says so.
    With the other methods it serves the report alone.

    `only`: patterns such as "layers.3.*" or "*.down_proj"; what no pattern matches stays as it is. `head_bits`:
    embedding and head are rounded too, to nearest; with 8 always onto a symmetric grid with one scale a row, with 4
    onto that of the layers, in 4 bits; None: they stay. `dtype`: of activations and of all that is not
    rounded (default: the model's). `path`: how products are computed, as in `QuantLinear`; "auto" is a kernel where
    one fits, which takes dtype=torch.bfloat16.

    `.quantization` of the new `Transformer` is a `Quantization`: a report on every weight; printed, a table.

    Raises `ValueError`, before any work, for a model that is quantized already, numbers that are infinite or NaN,
    groups that do not divide a row (it names the layer, and sizes that would do), a calibration that is missing, empty
    or shorter than a row, a `context` without one, a kernel that was asked for and does not fit, and any argument out
    of its range.
    """
    source = transformer_of(model)
    dtype = source.dtype if dtype is None else as_dtype(dtype)
    rounding = make_rounding(method, bits, group_size, symmetric, options, dtype)
    names = chosen_linears(source, only)
    head = make_head_grid(rounding.grid, head_bits)
    heads = [] if head is None else [EMBEDDING] if source.lm_head is None else [EMBEDDING, HEAD]
    check_weights(source, dict.fromkeys(names, rounding.grid) | dict.fromkeys(heads, head))
    rows, text = None, ""
    if calibration is not None:
        rows = calibration_rows(calibration, context, source)
        text = described(rows, len(calibration) - rows.numel())
    elif method in ("gptq", "awq"):
        raise ValueError(
            f"method={method!r} needs calibration=, the token ids of a text that the model can read: "
            'lm.encode(kv.evaluation_text("calibration")) is one.'
        )
    elif context is not None:
        raise ValueError(
            f"context={context!r} cuts a calibration text into rows: give calibration= too, or no context."
        )
    check_path(path, source, names, rounding.grid, dtype)
    require_flag("progress", progress)

    began = perf_counter()
    result = copied(source, dtype, leave={f"{name}.weight" for name in (*names, *heads)})
    same = head is not None and head.bits == rounding.grid.bits  # a kernel for 4 bits is none for 8
    reports = round_heads(result, heads, head, dtype, path if same or path == "dequantize" else "auto")
    run = None if rows is None else Calibration(result, rows)
    by_layer = {}
    for name in names:
        _, index, place = name.split(".", 2)
        by_layer.setdefault(int(index), []).append(place)
    layers = range(max(by_layer) + 1)
    for index in tqdm(layers, desc=f"{method}, {bits} bits", unit="layer", disable=not progress, leave=False):
        layer = copied(source.layers[index], torch.float32)
        before = dict(layer.named_parameters())
        done = round_layer(layer, by_layer.get(index, []), rounding, run, f"layers.{index}.")
        reports += [report for _, report in done.values()]
        put_into(result.layers[index], layer, before, {name: weight for name, (weight, _) in done.items()}, path)
    seconds = perf_counter() - began
    result.quantization = Quantization(method, rounding.grid.bits, rounding.grid.group_size, reports, text, seconds)
    return replace(model, model=result) if isinstance(model, LM) else result


def described(rows: Tensor, left: int) -> str:
    """Which tokens were read, in words: none is left out silently."""
    text = f"{rows.shape[0]} rows of {rows.shape[1]} tokens"
    return f"{text}, without the last {left} tokens, which fill no row" if left else text


def copied(module: nn.Module, dtype: torch.dtype, leave: set[str] = frozenset()) -> nn.Module:
    """The module anew with the same parameters: shared, or converted where they are in another dtype (but for those
    named in `leave`)."""
    memo = {}
    for name, parameter in module.named_parameters():
        memo[id(parameter)] = parameter
        if parameter.dtype != dtype and name not in leave:
            memo[id(parameter)] = nn.Parameter(converted(parameter, dtype, parameter.device, name), requires_grad=False)
    return deepcopy(module, memo)


def round_layer(
    layer: Layer, names: list[str], rounding: Rounding, run: Calibration | None, prefix: str
) -> dict[str, tuple[QuantizedTensor, LayerReport]]:
    """Round these linear layers of a layer in float32, which is changed; run the calibration text through it."""
    if run is None:
        return {name: round_linear(layer, name, rounding, None, prefix) for name in names}
    nearest = fold_scales(layer, names, rounding, run) if names and rounding.method == "awq" else None
    rounded = {}
    for writer, inputs in run.inputs(layer):
        readers = [name for name in READERS[writer] if name in names]
        hessian = statistics_of(inputs).hessian if readers else None
        for name in readers:
            rounded[name] = round_linear(layer, name, rounding, hessian, prefix, nearest)
    run.advance()
    return rounded


def round_linear(
    layer: Layer, name: str, rounding: Rounding, hessian: Tensor | None, prefix: str, nearest: Layer | None = None
) -> tuple[QuantizedTensor, LayerReport]:
    """Round one weight, and put what it became in its place in `layer`. The report compares it with that of `nearest`,
    or, without that, with the weight rounded to nearest."""
    linear = layer.get_submodule(name)
    weight, began = linear.weight, perf_counter()
    try:
        rounded = rounding(weight, hessian)
    except ValueError as error:
        raise ValueError(f"{prefix}{name}: {error}") from error
    synchronize(weight.device)
    seconds = perf_counter() - began
    replace_parameter(linear, "weight", rounded.dequantize())
    error = relative_error(weight, linear.weight, hessian)
    rtn_error = error
    if rounding.method in ("gptq", "awq"):
        other = nearest.get_submodule(name).weight if nearest is not None else rounding.to_nearest(weight).dequantize()
        rtn_error = relative_error(weight, other, hessian)
    return rounded, report(f"{prefix}{name}", rounded, error, rtn_error, seconds)


def report(name: str, weight: QuantizedTensor, error: float, rtn_error: float, seconds: float) -> LayerReport:
    return LayerReport(
        name, weight.shape, weight.nbytes, weight.bits_per_weight, error, rtn_error, seconds, weight.note
    )


def fold_scales(layer: Layer, names: list[str], rounding: Rounding, run: Calibration) -> Layer:
    """Search AWQ's scales for the inputs of these linear layers, from a run of the layer without rounding, and fold
    them. Returns a layer to compare with: rounded to nearest without scales, which were folded in after that."""
    scales = {}
    for writer, inputs in run.inputs(layer):
        weights = [layer.get_submodule(name).weight for name in READERS[writer] if name in names]
        if weights:
            statistics = statistics_of(inputs)
            if writer == "self_attn.v_proj":
                statistics.magnitudes = shared_in_groups(statistics.magnitudes, layer)
            scales[writer] = search_scales(weights, statistics, **asdict(rounding.grid))
    nearest = copied(layer, torch.float32)
    for name in names:
        linear = nearest.get_submodule(name)
        replace_parameter(linear, "weight", rounding.to_nearest(linear.weight).dequantize())
    for writer, scale in scales.items():
        fold(layer, writer, scale)
        fold(nearest, writer, scale)
    return nearest


def put_into(
    target: Layer, layer: Layer, before: dict[str, Tensor], rounded: dict[str, QuantizedTensor], path: str
) -> None:
    """Give the new model's layer what became of its copy: rounded weights, and parameters that are not as `before`,
    since scales were folded into them."""
    dtype = target.input_layernorm.weight.dtype
    for name, parameter in layer.named_parameters():
        place, _, leaf = name.rpartition(".")
        if parameter is not before[name] and not (place in rounded and leaf == "weight"):
            replace_parameter(target.get_submodule(place), leaf, parameter)
    for place, weight in rounded.items():
        target.set_submodule(place, QuantLinear(weight, target.get_submodule(place).bias, dtype, path))


def round_heads(
    model: Transformer, names: list[str], grid: Grid | None, dtype: torch.dtype, path: str
) -> list[LayerReport]:
    """Round embedding and head to nearest. A tied head and the embedding use one rounded weight."""
    reports = []
    for name in names:
        weight, began = model.get_submodule(name).weight, perf_counter()
        try:
            rounded = rtn(weight, **asdict(grid))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        seconds = perf_counter() - began
        error = relative_error(weight, rounded.dequantize())
        reports.append(report(name, rounded, error, error, seconds))
        if name == HEAD or HEAD not in names:
            model.lm_head = QuantLinear(rounded, None, dtype, path)
        if name == EMBEDDING:
            model.embed_tokens = QuantEmbedding(rounded if HEAD in names else model.lm_head, dtype)
    return reports
