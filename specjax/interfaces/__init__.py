"""Base classes of components, and the checks of what they return.

`Model`, `Drafter` and `Cache` define all members of a component. Optional
members have defaults and docstrings there, and nothing else is looked for.
`Rule` does the same for verifiers.

A verification rule (`specjax.types.Verifier`) has `law`. Optional are

  lossless   bool, default True: the output follows the target's law.
  requires   names out of `CAPABILITIES` that the drafter must have; default
             ("chain",), for most rules are written for chains. A rule for any
             tree that makes no use of q says `requires = ()`.
  init       `(gamma) -> state`: the rule has a state, where gamma is N - 1.
             Then `law`, and `survival`, get it as third argument, and None
             stands for a fresh one. Other rules are called with two arguments.
  by_row     `(draft, target_probs) -> LawByRow`, the same law, of which the
             loop makes the one row that it draws from; its `.law()` will do for
             `law`. It gets the state as `law` does. What is certified is this
             form. If a subclass overrides `law` alone, the inherited one is
             ignored. Default: the rows of `law`.
  commit     `(state, draft, target_probs, verdict) -> state` after a round;
             without it the state stays as it is.
  survival   `(draft, target_probs) -> [N]`, P(tau >= i | the first i drafted
             tokens), for chains; default: P(depth of the stop >= i | draft).
"""

from specjax.interfaces.cache import Cache
from specjax.interfaces.cache import CacheFactory
from specjax.interfaces.cache import map_caches
from specjax.interfaces.drafter import CAPABILITIES
from specjax.interfaces.drafter import capabilities
from specjax.interfaces.drafter import Drafter
from specjax.interfaces.model import Model
from specjax.interfaces.parts import bind
from specjax.interfaces.parts import cannot_grow
from specjax.interfaces.parts import check_drafter
from specjax.interfaces.parts import check_model
from specjax.interfaces.parts import has_model
from specjax.interfaces.rules import check_pair
from specjax.interfaces.rules import Rule
from specjax.interfaces.rules import rule

__all__ = [
    "CAPABILITIES",
    "Cache",
    "CacheFactory",
    "Drafter",
    "Model",
    "Rule",
from specjax.interfaces.verifier import check_pair
from specjax.interfaces.verifier import check_verifier
from specjax.interfaces.verifier import Verifier
    "bind",
    "cannot_grow",
    "capabilities",
    "check_drafter",
    "check_model",
    "check_pair",
    "has_model",
    "map_caches",
    "rule",
]
