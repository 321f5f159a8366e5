"""specjax: speculative decoding as probability laws, in JAX."""

from specjax import analysis
from specjax.models import cache_views
from specjax import constraints
from specjax import interfaces
from specjax.decoding import costs
from specjax import data
from specjax import drafters
from specjax import exact
from specjax import models
from specjax import sampling
from specjax import serving
from specjax import strategies
from specjax import testing
from specjax.trees import topology
from specjax.trees import shapes
from specjax import verifiers
from specjax.decoding.controller import Controller
from specjax.decoding.decoder import Decoder
from specjax.decoding.decoder import Generation
from specjax.decoding.decoder import raise_if_not_finite
from specjax.caches.dense import KVCache
from specjax.models import zoo
from specjax.caches.pool import Pool
from specjax.caches.paged import Paged
from specjax.caches.quantized import QuantizedKV
from specjax.sampling import LogitsTransform
from specjax.caches.streaming import Streaming
from specjax.types import Cache
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import Drafter
from specjax.types import Law
from specjax.types import LawByRow
from specjax.types import ModelFn
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import RoundStats
from specjax.types import Trace
from specjax.types import Verdict
from specjax.types import Verifier
from specjax.version import __version__

__all__ = [
    "Cache",
    "Controller",
    "DecodeState",
    "Decoder",
    "Draft",
    "Drafter",
    "Generation",
    "KVCache",
    "Law",
    "LawByRow",
    "LogitsTransform",
    "ModelFn",
    "ModelOutput",
    "Paged",
    "Pool",
    "Prompt",
    "QuantizedKV",
    "RoundStats",
    "Streaming",
    "Trace",
    "Verdict",
    "Verifier",
    "__version__",
    "analysis",
    "cache_views",
    "constraints",
    "contract",
    "costs",
    "data",
    "drafters",
    "exact",
    "models",
    "raise_if_not_finite",
    "sampling",
    "serving",
    "strategies",
    "testing",
    "topology",
    "trees",
    "verifiers",
    "zoo",
]
