"""Contrastive decoding: what a strong model says and a weak one does not.

Li et al. 2022 (arXiv:2210.15097); as logits O'Brien and Lewis 2023
(arXiv:2309.09117, section 2).
"""

import dataclasses
import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.types import ModelOutput

_FAR = 1e4  # whose exponential is 0, and which leaves digits of a logit


@struct.dataclass
class ContrastiveCache(Cache):
  """The caches of both models, which hold the same tokens.

  Attributes:
    expert: of the strong model.
    amateur: of the weak one.
  """

  expert: Any
  amateur: Any

  @property
  def lengths(self) -> jax.Array:
    """`[B]` int32, committed tokens of each row."""
    return self.expert.lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contrastive(Model):
  """Two models as one, a `Model` with a law that neither of them has.

  With logits e of the expert and a of the amateur the logits are

    (1 + beta) e - beta a   where e >= log(alpha) + max e,

  and far below, in the expert's order, elsewhere: such tokens come only where
  constraints leave no others. What the amateur excludes, -inf, counts as far
  below for it, so that no logit is infinite.

  It is a target like any other: rules and drafters need not know, and the
  output has this law exactly. The amateur is a good drafter as well
  (speculative contrastive decoding, Yuan et al. 2023, arXiv:2311.08981); it
  then reads the text twice, with a cache for each purpose.

  Its parameters are `{"expert": ..., "amateur": ...}`; `hidden` is the
  expert's.

  Attributes:
    expert: the strong model.
    amateur: the weak one, of the same vocabulary.
    alpha: tokens that the expert finds less than alpha times as likely as its
      likeliest are never drawn; in (0, 1].
    beta: strength, at least 0; 0 is the expert, cut off by alpha.

  Example:
    >>> import jax
    >>> import specjax as sj
    >>> model = sj.testing.MarkovModel(vocab_size=4)
    >>> weak, strong = map(model.init, jax.random.split(jax.random.key(0)))
    >>> decoder = sj.Decoder(
    ...     target=sj.models.Contrastive(expert=model, amateur=model),
    ...     drafter=sj.drafters.DraftModel(model=model, gamma=3),
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
      raise ValueError(f"alpha is {self.alpha}; it must lie in (0, 1]: tokens "
                       "less than alpha times as likely as the expert's "
                       "likeliest are left out")
    if not 0 <= self.beta < math.inf:
      raise ValueError(f"beta is {self.beta}; it must be at least 0: 0 is the "
                       "expert alone")
    if self.expert.vocab_size != self.amateur.vocab_size:
      raise ValueError(
          f"the amateur has {self.amateur.vocab_size} tokens and the expert "
          f"{self.expert.vocab_size}; both need the same vocabulary")

  @property
  def vocab_size(self) -> int:
    return self.expert.vocab_size

  @property
  def context_length(self) -> int:
    return min(self.expert.context_length, self.amateur.context_length)

  def init_cache(self, params: Any, batch: int, capacity: int
                 ) -> ContrastiveCache:
    """The caches of `batch` empty rows."""
    return ContrastiveCache(
        expert=self.expert.init_cache(params["expert"], batch, capacity),
        amateur=self.amateur.init_cache(params["amateur"], batch, capacity))

  def __call__(self, params: Any, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Any = None
               ) -> ModelOutput:
    """Logits `[B, S, V]` after `tokens [B, S]`, a pass of both models."""
    mine = (None, None) if cache is None else (cache.expert, cache.amateur)
    expert, amateur = (
        model(params[name], tokens, depths, ancestors, own)
        for name, model, own in (("expert", self.expert, mine[0]),
                                 ("amateur", self.amateur, mine[1])))
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
    """Those of both models, see `specjax.interfaces`."""
    return {name: model.param_specs(axis, size)
            for name, model in (("expert", self.expert),
                                ("amateur", self.amateur))}
