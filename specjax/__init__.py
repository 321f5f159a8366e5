"""specjax: speculative decoding as probability laws, in JAX."""

from specjax import analysis
from specjax import cache_views
from specjax import constraints
from specjax import contract
from specjax import costs
from specjax import data
from specjax import drafters
from specjax import exact
from specjax import models
from specjax import sampling
from specjax import serving
from specjax import strategies
from specjax import testing
from specjax import topology
from specjax import trees
from specjax import verifiers
from specjax.controller import Controller
from specjax.decoder import Decoder
from specjax.decoder import Generation
from specjax.decoder import raise_if_not_finite
from specjax.kv_cache import KVCache
from specjax.models import zoo
from specjax.page_pool import Pool
from specjax.paged_cache import Paged
from specjax.quantized_cache import QuantizedKV
from specjax.sampling import LogitsTransform
from specjax.streaming_cache import Streaming
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
