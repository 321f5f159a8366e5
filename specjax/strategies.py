"""Published methods by name, each a drafter with its verifier.

A `Decoder` also accepts other pairs. It raises an error if the verifier
requires a property that the drafter does not provide.

>>> import jax
>>> from specjax import testing
>>> model = testing.MarkovModel(7)
>>> table = model.init(jax.random.key(0))
>>> decoder = block_verification(model, gamma=3).decoder(model)
>>> params = {"target": table, "drafter": table}
>>> text = decoder.generate(params, [[1]], jax.random.key(1), max_new_tokens=8)
>>> int(text.stats.active[0])  # the drafter is the target: rounds of 4 tokens
2

Every strategy is lossless unless its docstring contains LOSSY. The drafter's
docstring describes `params["drafter"]`: the parameters of a language model, the
parameters of heads, or a tuple of several such trees.

Each family of `specjax.methods` lists its strategies in its `__init__.py`.
"""

from specjax.methods import FAMILIES
from specjax.methods.strategy import Strategy

_STRATEGIES = {x.__name__: x for family in FAMILIES for x in family.strategies}
globals().update(_STRATEGIES)

__all__ = ["Strategy", *_STRATEGIES]
