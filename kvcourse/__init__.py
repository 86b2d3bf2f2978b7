"""kvcourse: why LLM inference is fast, measured and built.

    import kvcourse as kv

Names load when first used, so that importing the package costs little more than importing torch.
`kvcourse/README.md` is the map of the rooms.
"""

from importlib import import_module
from importlib.metadata import version as _version

__version__ = _version("kvcourse")

_HOMES = {
    "ModelConfig": "config",
    "placement": "device",
    "synchronize": "device",
    "NoCache": "caches",
    "DenseCache": "caches",
    "Transformer": "model",
    "generate": "generation",
    "generate_naive": "generation",
    "prefill": "generation",
    "warm_up": "generation",
    "Generation": "metrics",
    "median_time": "timing",
    "flops": "cost",
    "bytes_moved": "cost",
    "cache_bytes": "cost",
    "weight_bytes": "cost",
    "price_per_million": "cost",
    "Ceilings": "roof",
    "measure_ceilings": "roof",
    "roofline": "roof",
    "LM": "lm",
    "load_model": "lm",
    "fetch": "weights.fetch",
    "COURSE_MODELS": "weights.fetch",
    "write_gguf": "weights.gguf_write",
    "export_hf": "weights.hf_export",
    "announce_stand_in": "weights.notice",
    "perplexity": "quality",
    "recall": "quality",
    "evaluation_text": "evaluation",
    "Shape": "shape",
    "PUBLISHED": "published",
    "parameters": "cost",
    "bits_per_number": "cost",
    "DEVICES": "capacity",
    "fits": "capacity",
    "longest_context": "capacity",
    "largest_batch": "capacity",
    "WindowCache": "caches",
    "PagedCache": "caches",
    "QuantizedCache": "caches",
    "Engine": "serving.engine",
    "compiled": "fast.make",
    "meter": "endpoint.load",
    "run_parallel": "parallel",
    "long_context": "context_cost",
    "glossary": "notebooks.terms",
}
_MODULES = ("check", "layers", "plots", "quant", "results", "widgets")

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f"kvcourse.{name}")
    if name in _HOMES:
        value = getattr(import_module(f"kvcourse.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'kvcourse' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
