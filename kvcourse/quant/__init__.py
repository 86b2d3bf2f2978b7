"""Numbers in fewer bits: of weights, and of keys and values.

`grid`, `packing`, `tensor`: rounding, and what is stored; `gptq`, `awq`: two ways to round better than to nearest. They
need no model. `linear`, `calibration`, `quantize`: a model with rounded weights. Those load when first used.
"""

from importlib import import_module

from kvcourse.quant.awq import awq  # imported here, not when used: the module has the name of its function
from kvcourse.quant.gptq import gptq
from kvcourse.quant.tensor import QuantizedTensor, nf4, rtn

_HOMES = {
    "Grid": "grid",
    "QuantLinear": "linear",
    "QuantEmbedding": "linear",
    "InputStatistics": "statistics",
    "quantize_model": "quantize",
    "smooth": "smoothing",
    "save": "files",
    "load": "files",
    "export_compressed": "compressed",
}

__all__ = ["QuantizedTensor", "awq", "gptq", "nf4", "rtn", *_HOMES]


def __getattr__(name: str):
    if name in _HOMES:
        value = getattr(import_module(f"kvcourse.quant.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'kvcourse.quant' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
