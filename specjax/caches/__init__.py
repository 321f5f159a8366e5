"""Key-value caches: dense, paged, paged from a pool, quantised, streaming."""

from specjax.caches.dense import KVCache
from specjax.caches.paged import Paged
from specjax.caches.pool import Pool
from specjax.caches.quantized import QuantizedKV
from specjax.caches.streaming import Streaming

__all__ = ["KVCache", "Paged", "Pool", "QuantizedKV", "Streaming"]
