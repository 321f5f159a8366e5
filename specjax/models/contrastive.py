"""Contrastive decoding with a strong and a weak model.

The method is that of Li et al. 2022 (arXiv:2210.15097), applied to logits as in
O'Brien and Lewis 2023 (arXiv:2309.09117, section 2).
"""

import dataclasses
import math
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.types import ModelOutput

# Number subtracted from excluded logits. exp(-1e4) is 0. With a larger number,
# the difference would lose digits of the logit.
_FAR = 1e4


@struct.dataclass
class ContrastiveCache(Cache):
  """Caches of the strong and the weak model, with the same tokens.

  Attributes:
    expert: cache of the strong model.
    amateur: cache of the weak model.
  """

  expert: Any
  amateur: Any

  @property
  def lengths(self) -> jax.Array:
    """`[B]` int32 number of committed tokens of each row."""
    return self.expert.lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contrastive(Model):
  """Model that combines the logits of a strong and a weak model.

  e are the logits of the expert and a those of the amateur. The result is

    (1 + beta) e - beta a   where e >= log(alpha) + max e,
    e - 1e4                 elsewhere.

  Tokens of the second line are sampled only if constraints exclude all others.
  Logits of the amateur below -1e4 become -1e4, so that the result is finite.

  Use this model as the target. With any lossless verifier, the output then
  follows this distribution exactly. The amateur can also be the draft model
  with a separate cache (speculative contrastive decoding, Yuan et al. 2023,
  arXiv:2311.08981).

  The parameters are `{"expert": ..., "amateur": ...}`. `hidden` of the output
  is that of the expert.

  Attributes:
    expert: the strong model.
    amateur: the weak model, with the same vocabulary.
    alpha: plausibility threshold in (0, 1]. Tokens with a probability below
      alpha times the expert's largest probability are excluded.
    beta: strength of the contrast, at least 0. With 0 the amateur has no
      effect.

  Example:
    >>> import jax
    >>> import specjax as sj
    >>> model = sj.testing.MarkovModel(vocab_size=4)
    >>> weak, strong = map(model.init, jax.random.split(jax.random.key(0)))
    >>> decoder = sj.Decoder(
    ...     target=sj.models.Contrastive(expert=model, amateur=model),
    ...     drafter=sj.drafters.draft_model(model=model, gamma=3),
    ...     verifier=sj.verifiers.Block())
    >>> params = {"target": {"expert": strong, "amateur": weak},
    ...           "drafter": weak}
    >>> text = decoder.generate(
    ...     params, [[1]], jax.random.key(1), max_new_tokens=8)
    >>> len(text.tokens[0]), decoder.changes_law
    (9, ('Contrastive',))
  """

  expert: Model
  amateur: Model
  alpha: float = 0.1
  beta: float = 0.5

  changes_law = True

  def __post_init__(self):
    if not 0 < self.alpha <= 1:
      raise ValueError(f"alpha is {self.alpha}; it must be in (0, 1]")
    if not 0 <= self.beta < math.inf:
      raise ValueError(f"beta is {self.beta}; it must be at least 0 and finite")
    if self.expert.vocab_size != self.amateur.vocab_size:
      raise ValueError(
          f"vocab_size of the amateur is {self.amateur.vocab_size} and of the "
          f"expert {self.expert.vocab_size}; give models with the same "
          "vocabulary")

  @property
  def vocab_size(self) -> int:
    return self.expert.vocab_size

  @property
  def context_length(self) -> int:
    return min(self.expert.context_length, self.amateur.context_length)

  def init_cache(self, params: chex.ArrayTree, batch: int, capacity: int
                 ) -> ContrastiveCache:
    return ContrastiveCache(
        expert=self.expert.init_cache(params["expert"], batch, capacity),
        amateur=self.amateur.init_cache(params["amateur"], batch, capacity))

  def __call__(self, params: chex.ArrayTree, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Cache | None = None
               ) -> ModelOutput:
    both = cache or ContrastiveCache(expert=None, amateur=None)
    expert = self.expert(
        params["expert"], tokens, depths, ancestors, both.expert)
    amateur = self.amateur(
        params["amateur"], tokens, depths, ancestors, both.amateur)
    least = math.log(self.alpha) + jnp.max(
        expert.logits, axis=-1, keepdims=True)
    logits = jnp.where(
        expert.logits >= least,
        (1 + self.beta) * expert.logits
        - self.beta * jnp.maximum(amateur.logits, -_FAR),
        expert.logits - _FAR)
    if cache is not None:
      cache = ContrastiveCache(expert=expert.cache, amateur=amateur.cache)
    return ModelOutput(logits=logits, hidden=expert.hidden, cache=cache)

  def param_specs(self, axis: str, size: int) -> Any:
    return {"expert": self.expert.param_specs(axis, size),
            "amateur": self.amateur.param_specs(axis, size)}
