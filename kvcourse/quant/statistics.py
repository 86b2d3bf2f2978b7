"""What calibration must know of the inputs of a linear layer: their second moments, and how large each is."""

import torch
from torch import Tensor

from kvcourse.require import require_whole


class InputStatistics:
    """Sums over the inputs x `(n, columns)` of a linear layer; `add` them batch by batch, on any device.

    The *Hessian* of the squared error of a layer's output, 2 x sum of x x^T, is what GPTQ needs (arXiv 2210.17323,
    section 2), the mean magnitude of each input what AWQ needs (arXiv 2306.00978, section 3.2).
    """

    def __init__(self, columns: int, device=None):
        columns = require_whole("columns", columns)
        self.n = 0
        self.moments = torch.zeros(columns, columns, device=device)
        self.magnitudes = torch.zeros(columns, device=device)

    def add(self, x: Tensor) -> None:
        """Count inputs x `(..., columns)` in. Raises `ValueError` for what is no tensor of that width, and for NaN or
        infinite ones."""
        columns = len(self.magnitudes)
        if not torch.is_tensor(x):
            raise ValueError(f"x must be a tensor (..., {columns}), got {type(x).__name__}.")
        if x.ndim < 1 or x.shape[-1] != columns:
            raise ValueError(f"These statistics are of {columns} inputs, got a tensor {tuple(x.shape)}.")
        x = x.detach().to(self.moments.device).reshape(-1, columns).float()
        if not x.isfinite().all():
            raise ValueError("Inputs of a layer are infinite or NaN: the model overflows on this text.")
        self.n += len(x)
        self.moments.addmm_(x.T, x)
        self.magnitudes += x.abs().sum(0)

    @property
    def hessian(self) -> Tensor:
        """2 x mean of x x^T, `(columns, columns)`. `ValueError` before anything was added, and where it overflows."""
        return held(self.moments * (2 / self.count()))

    @property
    def magnitude(self) -> Tensor:
        """Mean of |x|, `(columns,)`. `ValueError` as for `hessian`."""
        return held(self.magnitudes / self.count())

    def count(self) -> int:
        if self.n == 0:
            raise ValueError("Nothing was added to these statistics: run the model over some calibration text first.")
        return self.n


def held(sums: Tensor) -> Tensor:
    """`sums` if they are finite, else `ValueError`: an infinite one would make every choice of a method look alike."""
    if not sums.isfinite().all():
        raise ValueError(
            "Inputs of a layer are too large: sums of their squares overflow float32; give smaller ones, or look for "
            "the layer of the model that makes them."
        )
    return sums


def output_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """Mean over the inputs of the squared error of a layer's whole output, |(W - W') x|^2, from the Hessian 2 E[x x^T].

    No inputs are needed: it is trace(D E[x x^T] D^T) with D = W - W'. Computed in float32, or float64 if one is.
    Raises `ValueError` when the shapes do not fit.
    """
    columns = weight.shape[-1]
    if weight.shape != rounded.shape or hessian.shape != (columns, columns):
        raise ValueError(
            f"A weight {tuple(weight.shape)} needs a rounded one of its shape and a Hessian ({columns}, {columns}), "
            f"got {tuple(rounded.shape)} and {tuple(hessian.shape)}."
        )
    dtype = torch.promote_types(torch.promote_types(weight.dtype, hessian.dtype), torch.float32)
    d = (weight - rounded).to(dtype)
    return max(0.0, ((d @ hessian.to(dtype)) * d).sum().item() / 2)
