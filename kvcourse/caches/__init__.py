"""Caches: where the keys and values of earlier tokens are kept. One protocol (`base`), one file for each kind."""

from kvcourse.caches.base import Cache, Step
from kvcourse.caches.dense import DenseCache
from kvcourse.caches.none import NoCache
from kvcourse.caches.paged import PagedCache
from kvcourse.caches.quantized import QuantizedCache
from kvcourse.caches.window import WindowCache

__all__ = ["Cache", "DenseCache", "NoCache", "PagedCache", "QuantizedCache", "Step", "WindowCache"]
