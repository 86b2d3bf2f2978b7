"""A function of tensors, compiled by `torch.compile` for one model, which counts how often that happens."""

from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import count
from time import perf_counter
from types import FunctionType

import torch
from torch import Tensor

_NUMBERS = count()
LIMIT = 64  # programs of one function


class CompiledFunction:
    """`function` with its first arguments `fixed`. `compilations` and `seconds` say what compiling took so far.

    Python compiles a function again for tensors of another kind. Those with a size that varies are told to `varying`,
    so that one compilation serves all sizes from 2 on (a size of 1 is always a case of its own).
    """

    def __init__(self, function: Callable, *fixed):
        def plain(*tensors):
            return function(*fixed, *tensors)

        self.name, self.plain = f"{function.__name__}_{next(_NUMBERS)}", plain
        self.compilations, self.seconds = 0, 0.0

    @cached_property
    def run(self) -> Callable:
        # torch.compile keeps what it made by the code of a function, and the sizes seen by the code's name: with both
        # of its own, no other model's compilations are looked through, or count against its limit, and no size
        # is taken for one that varies because another model has another.
        code = self.plain.__code__.replace(co_name=self.name)
        own = FunctionType(code, globals(), self.name, None, self.plain.__closure__)
        config, limit = torch._dynamo.config, "recompile_limit"
        limit = limit if hasattr(config, limit) else "cache_size_limit"  # its name before PyTorch 2.6
        # Eight by itself, and each number of threads takes one or two; beyond it a function is no longer compiled.
        setattr(config, limit, max(LIMIT, getattr(config, limit)))
        return torch.compile(own, backend=self.backend)

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        from torch._inductor.compile_fx import compile_fx

        self.compilations += 1
        return compile_fx(graph, inputs)

    def __call__(self, *tensors):
        known, began = self.compilations, perf_counter()
        out = self.run(*tensors)
        if self.compilations > known:
            self.seconds += perf_counter() - began
        return out


def varying(tensor: Tensor, *dims: int) -> Tensor:
    """The tensor, marked: other ones will have other sizes in these dimensions."""
    for dim in dims:
        if tensor.shape[dim] > 1:
            torch._dynamo.mark_dynamic(tensor, dim)
    return tensor


@lru_cache
def cannot_compile(device: str) -> str | None:
    """One sentence why `torch.compile` does not work here, found out by trying it; None if it does."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(64, device=device))
    except Exception as error:  # what is raised depends on what is missing: a compiler, Triton, a Python version
        cause = str(error.__cause__ or error).strip().split("\n")[0]
        return f"torch.compile does not work on this machine's {device} ({cause}): install a C++ compiler, such as g++."
    return None
