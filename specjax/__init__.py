"""specjax: speculative decoding as probability distributions, in JAX.

>>> import jax
>>> import specjax as sj
>>> pair = sj.zoo.load()
>>> strategy = sj.strategies.block_verification(
...     pair.drafters["small"].model, gamma=4)
>>> text = strategy.decoder(pair.target.model).generate(
...     pair.params("small"), [pair.tokenizer.encode("import os")],
...     jax.random.key(0), max_new_tokens=8)
>>> len(text.tokens[0])
11
"""

from specjax import analysis
from specjax import caches
from specjax import constraints
from specjax import data
from specjax import decoding
from specjax import drafters
from specjax import exact
from specjax import interfaces
from specjax import methods
from specjax import models
from specjax import objectives
from specjax import strategies
from specjax import testing
from specjax import trees
from specjax import types
from specjax import verifiers
from specjax import zoo
from specjax.decoding import costs as _costs  # loads sj.decoding.costs
from specjax.decoding import Decoder
from specjax.interfaces import Verifier
from specjax.sampling import LogitsTransform
from specjax.types import Draft
from specjax.types import Law
from specjax.version import __version__

__all__ = [
    "Decoder",
    "Draft",
    "Law",
    "LogitsTransform",
    "Verifier",
    "__version__",
    "analysis",
    "caches",
    "constraints",
    "data",
    "decoding",
    "drafters",
    "exact",
    "interfaces",
    "methods",
    "models",
    "objectives",
    "strategies",
    "testing",
    "trees",
    "types",
    "verifiers",
    "zoo",
]

del _costs
