"""The tensors that a checkpoint must have: those of the model, no other, each in its shape, and of finite numbers."""

import math

import torch
from torch import Tensor

from kvcourse.config import ModelConfig
from kvcourse.model import Transformer


def model_shapes(config: ModelConfig, where: str) -> dict[str, tuple[int, ...]]:
    """{name in `Transformer`: shape} of every tensor of a model. Matrices are (out, in)."""
    try:
        state = Transformer(config, device="meta", dtype=torch.float32).state_dict()
    except (RuntimeError, TypeError) as error:  # what torch raises for sizes beyond 64 bits
        raise ValueError(f"{where} asks for tensors larger than any computer can hold, so it is damaged.") from error
    return {name: tuple(parameter.shape) for name, parameter in state.items()}


def check_tensors(found: dict, wanted: dict, where: str, settings: str) -> None:
    """Raise `ValueError` unless what is found is what is wanted, both {name in the file: shape}.

    Errors begin with `where`, the file; `settings` is what they call the place that the wanted shapes come from.
    """
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"{where} lacks {counted(missing)}, which {settings} asks for.")
    extra = [name for name in found if name not in wanted]
    if extra:
        raise ValueError(f"{where} has {counted(extra)}, which {settings} does not ask for.")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{where}: tensor {name} has shape {found[name]}, but {settings} asks for {shape}.")


def counted(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} tensor(s): {', '.join(names[:5])}{more}"


WIDER = {torch.float16: "bfloat16 or float32", torch.bfloat16: "float32", torch.float32: "float64"}


def converted(tensor: Tensor, dtype: torch.dtype, device, where: str, copy: bool = False) -> Tensor:
    """The tensor in `dtype` on `device`; with `copy` in memory of its own, for one that may still be the file itself.

    Raises `ValueError`, which begins with `where`, unless every number is finite: before the conversion, and after it.
    """
    result = tensor.to(device, dtype, copy=copy)
    if not finite(result):
        if dtype in WIDER and finite(tensor):
            name = str(dtype).removeprefix("torch.")
            raise ValueError(f"{where} has numbers too large for {name}: load the model in {WIDER[dtype]}.")
        raise ValueError(f"{where} has numbers that are infinite or not numbers (NaN): the file is damaged.")
    return result


def finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite. One pass: a NaN anywhere is the smallest and the largest number at once."""
    return all(math.isfinite(end) for end in tensor.aminmax())
