"""Base classes of components, and checks of components and their results.

The base classes `Model`, `Drafter`, `Cache` and `Verifier` define every member
that specjax uses. Optional members have defaults and docstrings in these
classes.
"""

from specjax.interfaces.binding import bind
from specjax.interfaces.binding import cannot_grow
from specjax.interfaces.binding import check_drafter
from specjax.interfaces.binding import check_model
from specjax.interfaces.binding import contained
from specjax.interfaces.binding import has_model
from specjax.interfaces.binding import is_bundle
from specjax.interfaces.binding import model_of
from specjax.interfaces.cache import Cache
from specjax.interfaces.cache import CacheFactory
from specjax.interfaces.cache import map_caches
from specjax.interfaces.drafter import CAPABILITIES
from specjax.interfaces.drafter import capabilities
from specjax.interfaces.drafter import Drafter
from specjax.interfaces.drafter import kind_of
from specjax.interfaces.drafter import provided
from specjax.interfaces.model import Model
from specjax.interfaces.verifier import check_pair
from specjax.interfaces.verifier import check_verifier
from specjax.interfaces.verifier import Verifier

__all__ = [
    "CAPABILITIES",
    "Cache",
    "CacheFactory",
    "Drafter",
    "Model",
    "Verifier",
    "bind",
    "cannot_grow",
    "capabilities",
    "check_drafter",
    "check_model",
    "check_pair",
    "check_verifier",
    "contained",
    "has_model",
    "is_bundle",
    "kind_of",
    "map_caches",
    "model_of",
    "provided",
]
