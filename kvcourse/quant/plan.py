"""What is asked of `quantize_model`, checked before any work: how to round, and which weights."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from math import gcd
from numbers import Integral

import torch
from torch import Tensor, nn

from kvcourse.model import Transformer
from kvcourse.quant.calibration import LINEARS
from kvcourse.quant.gptq import gptq
from kvcourse.quant.grid import OPTIONS, Grid, as_grid, require_finite
from kvcourse.quant.linear import PATHS, QuantEmbedding, QuantLinear
from kvcourse.quant.tensor import QuantizedTensor, rtn
from kvcourse.weights.tensors import finite

METHODS = ("rtn", "nf4", "gptq", "awq")
GPTQ_OPTIONS = ("damping", "block_size", "act_order", "static_groups")
EMBEDDING, HEAD = "embed_tokens", "lm_head"


@dataclass(frozen=True)
class Rounding:
    """How each weight is rounded: the method, the grid, and what only GPTQ is told."""

    method: str
    grid: Grid
    options: dict

    def __call__(self, weight: Tensor, hessian: Tensor | None) -> QuantizedTensor:
        if self.method == "gptq":
            return gptq(weight, hessian, **asdict(self.grid), **self.options)
        return self.to_nearest(weight)

    def to_nearest(self, weight: Tensor) -> QuantizedTensor:
        return rtn(weight, **asdict(self.grid))


def make_rounding(method: str, bits: int, group_size, symmetric: bool, options: dict, dtype: torch.dtype) -> Rounding:
    """`ValueError` unless the method is known, has these options, and takes their values. Scales of a model that is to
    compute in `dtype` are bfloat16 where that is, as kernels for few bits read them, else float16."""
    if method not in METHODS:
        raise ValueError(f"method={method!r} must be one of {', '.join(METHODS)}.")
    known = OPTIONS + (GPTQ_OPTIONS if method == "gptq" else ())
    for name in options:
        if name not in known:
            raise ValueError(f"There is no option {name} with method={method!r}; it has {', '.join(known)}.")
    if method == "nf4":
        options = {"kind": "nf4"} | options
    options = {"scale_dtype": torch.bfloat16 if dtype == torch.bfloat16 else torch.float16} | options
    grid = as_grid(bits, group_size, symmetric, **{k: v for k, v in options.items() if k in OPTIONS})
    if (method == "nf4") != (grid.kind == "nf4"):
        raise ValueError(f'NF4 is method="nf4", to nearest; method={method!r} with kind={grid.kind!r} is not offered.')
    rounding = Rounding(method, grid, {k: v for k, v in options.items() if k in GPTQ_OPTIONS})
    replace(rounding, grid=replace(grid, group_size=None))(torch.zeros(1, 1), torch.eye(1))  # refuses what it must
    return rounding


def make_head_grid(grid: Grid, head_bits: int | None) -> Grid | None:
    """The grid of embedding and head. In 8 bits it is symmetric with one scale a row, which the int8 kernel reads and
    which is exact enough without groups; in 4 bits that of the layers in 4 bits."""
    if head_bits is None:
        return None
    if isinstance(head_bits, bool) or not isinstance(head_bits, Integral) or head_bits not in (4, 8):
        raise ValueError(f"head_bits={head_bits!r} must be 8 or 4, or None to leave embedding and head as they are.")
    return replace(grid, bits=8, kind="symmetric", group_size=None) if head_bits == 8 else replace(grid, bits=4)


def check_path(path: str, model: Transformer, names: list[str], grid: Grid, dtype: torch.dtype) -> None:
    """`ValueError` unless a kernel that was asked for fits weights of these shapes on this grid."""
    if path not in PATHS:
        raise ValueError(f"path={path!r} must be one of {', '.join(PATHS)}.")
    first = {}  # of each shape
    for name in names if path != "auto" else ():
        first.setdefault(model.get_submodule(name).weight.shape, name)
    for shape, name in first.items():
        try:
            QuantLinear(rtn(torch.zeros(shape, device=model.device), **asdict(grid)), None, dtype, path)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def chosen_linears(model: Transformer, only: str | Iterable[str] | None) -> list[str]:
    """Names of the linear layers to be rounded, in the order of the model. `ValueError` for a pattern that matches
    none."""
    names = [f"layers.{index}.{name}" for index in range(len(model.layers)) for name in LINEARS]
    if only is None:
        return names
    patterns = list(only) if isinstance(only, Iterable) and not isinstance(only, str) else [only]
    for pattern in patterns or [only]:
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"only={pattern!r} matches no linear layer: give patterns such as {names[0]!r}, 'layers.0.*' or "
                "'*.down_proj' (embedding and head have head_bits=)."
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def check_weights(model: Transformer, grids: dict[str, Grid]) -> None:
    """`ValueError` unless the weights with these names are plain matrices, not quantized yet, whose rows the groups of
    their grids divide, and all numbers of the model are finite."""
    if any(isinstance(module, QuantLinear | QuantEmbedding) for module in model.modules()):
        raise ValueError("This model is quantized already: give the model that it was made from.")
    if model.device.type == "meta":
        raise ValueError("This model is on the meta device, which has shapes without numbers: load it on another.")
    for name, parameter in model.named_parameters():
        if not finite(parameter):
            raise ValueError(f"{name} has numbers that are infinite or NaN: load the model again, or mend it.")
    modules = {name: model.get_submodule(name) for name in grids}
    for name, module in modules.items():
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise ValueError(f"{name} is a {type(module).__name__}, and only plain linear layers can be rounded.")
        require_finite(f"{name}.weight", module.weight)
    grouped = {name: grid.group_size for name, grid in grids.items() if isinstance(grid.group_size, int)}
    columns = {name: modules[name].weight.shape[1] for name in grouped}
    for name, n in columns.items():
        if n % grouped[name]:
            common = gcd(*columns.values())
            fitting = [str(size) for size in range(1, common + 1) if common % size == 0 and size >= min(8, common)]
            raise ValueError(
                f"{name} has rows of {n} numbers, which group_size={grouped[name]} does not divide: give one of "
                f"{', '.join(fitting)}, or None for the whole row."
            )
