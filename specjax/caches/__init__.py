"""Key-value caches: dense, paged, quantised, streaming."""

from specjax.caches.dense import KVCache
from specjax.caches.paged import Paged
from specjax.caches.quantized import QuantizedKV
from specjax.caches.streaming import Streaming

__all__ = ["KVCache", "Paged", "QuantizedKV", "Streaming"]
