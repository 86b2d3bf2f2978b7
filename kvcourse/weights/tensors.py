"""The tensors that a checkpoint must have: those of the model, no other, each in its shape."""

import torch

from kvcourse.config import ModelConfig
from kvcourse.model import Transformer


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{name in `Transformer`: shape} of every tensor of a model. Matrices are (out, in)."""
    state = Transformer(config, device="meta", dtype=torch.float32).state_dict()
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
