"""All drafters by name, and the rules that stop a draft (`stop_rules`).

A `NetworkDrafter` combines a network (such as `LanguageModel`, `FeatureLayer`
or `EarlyExit`) with the shape of a draft (`Chain`, `Tree`, `Best`, `Sampled`).

Each family of `specjax.methods` lists its drafters in its `__init__.py`:

  draft_models        a second language model
  model_free          copies from the sequence or from a datastore
  heads               heads on the target's last hidden state
  features            layers on the target's hidden states
  blocks              models that draft a block of tokens in one pass
  self_speculation    some of the target's own layers
  combined            combinations of several drafters
  other_vocabularies  a language model with another vocabulary
"""

from specjax.methods import draft_shapes
from specjax.methods import drafting
from specjax.methods import FAMILIES
from specjax.methods import stop_rules

_DRAFTERS = {x.__name__: x for x in (
    drafting.Network, drafting.NetworkDrafter, draft_shapes.Chain,
    draft_shapes.Tree, draft_shapes.Best, draft_shapes.Sampled,
    *(x for family in FAMILIES for x in family.drafters))}
globals().update(_DRAFTERS)

__all__ = ["stop_rules", *_DRAFTERS]
