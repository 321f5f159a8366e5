"""A smaller head for a drafter: logits of frequent tokens alone.

FR-Spec, Zhao et al. 2025 (arXiv:2502.14856). A model that drafts spends much of
its time in the product with an LM head of V columns, most of which are hardly
ever the answer. Here the product has r columns, those of the tokens that texts
have most often, and the other tokens' logits are so low that their q is 0. That
is what the drafter reports, so that every rule stays exact; a token without a
column is only never drafted. Where a transform bans all tokens that have one,
the others are equally likely: a draft is not worth much there, but it has a
law.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
from numpy.typing import ArrayLike

from specjax.interfaces import Cache
from specjax.models.around import AroundModel
from specjax.models.configuration import FINAL
from specjax.models.transformer import Transformer
from specjax.types import ModelOutput

_NEVER = -1e30  # exp of it is 0, and what is left where all others are banned


@dataclasses.dataclass(frozen=True)
class VocabularySubset(AroundModel):
  """A `Transformer` that predicts some of its tokens and reads them all.

  It takes the place of the model in any drafter, such as
  `drafters.DraftModel(model=VocabularySubset(model), gamma=4)`, with
  `params["drafter"]` made by `parameters` of the model's own.

  Attributes:
    model: the whole model, which returns its final hidden state.
  """

  model: Transformer

  def __post_init__(self):
    if not isinstance(self.model, Transformer):
      raise ValueError(f"the model is a {type(self.model).__name__}; only the "
                       "head of a Transformer is known, so that part of it can "
                       "be taken")
    features = self.model.config.features
    if features and FINAL not in features:
      raise ValueError(f"the model returns the hidden states {features}; its "
                       f"head reads {FINAL!r}: name it in "
                       "TransformerConfig.features")

  def parameters(self, params: Any, ids: ArrayLike) -> dict[str, Any]:
    """The parameters with a head of these tokens.

    Args:
      params: of the model; they are shared, and the head of r columns comes
        on top.
      ids: `[r]`, the tokens that can be predicted, each once.

    Raises:
      ValueError: there are none, one is named twice, or one is no token.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(
        ids.dtype, np.integer):
      raise ValueError(f"ids has shape {ids.shape} and dtype {ids.dtype}; it "
                       "must be a list of one token id at least")
    ids = np.sort(ids)
    for token in (ids[0], ids[-1]):
      if not 0 <= token < self.vocab_size:
        raise ValueError(f"ids holds {token}; token ids lie in "
                         f"[0, {self.vocab_size})")
    twice = ids[1:][np.diff(ids) == 0]
    if twice.size:
      raise ValueError(f"ids holds {twice[0]} twice; name each token once")
    ids = jnp.asarray(ids, jnp.int32)
    whole = params[self._head]
    head = whole[ids] if self.model.config.tie_embeddings else whole[:, ids]
    return {"model": params, "head": head, "ids": ids}

  def init_cache(self, params: Any, batch: int, capacity: int) -> Cache:
    """The model's."""
    return self.model.init_cache(params["model"], batch, capacity)

  def __call__(self, params: Any, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None,
               cache: Cache | None = None) -> ModelOutput:
    """One pass, as in `Model`; other tokens' logits are all the same."""
    out = self.model(params["model"], tokens, depths, ancestors, cache)
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # The model's own logits are not used, and so not computed.
    return out.replace(logits=self.logits_at(params, out, at))

  def logits_at(self, params: Any, output: ModelOutput, at: jax.Array
                ) -> jax.Array:
    """`[B, K, V]`, the rows `at [B, K]` of the logits of a pass."""
    small = {**params["model"], self._head: params["head"]}
    some = self.model.logits_at(small, output, at)
    return placed(some, params["ids"], self.vocab_size)

  def param_specs(self, axis: str, size: int) -> dict[str, Any]:
    """The model's; the small head is on every device."""
    return {"model": self.model.param_specs(axis, size),
            "head": PartitionSpec(), "ids": PartitionSpec()}

  @property
  def _head(self) -> str:
    return "embedding" if self.model.config.tie_embeddings else "head"


def placed(some: jax.Array, ids: ArrayLike, vocab_size: int) -> jax.Array:
  """`[..., V]` of `some [..., r]`, logits of some tokens; others: q = 0.

  Args:
    some: the logits.
    ids: `[r]`, their tokens, ascending and no two alike.
    vocab_size: V.
  """
  none = jnp.full((*some.shape[:-1], vocab_size), _NEVER, some.dtype)
  return none.at[..., ids].set(
      some, indices_are_sorted=True, unique_indices=True)


def frequent_tokens(counts: ArrayLike, size: int, always: Sequence[int] = ()
                    ) -> np.ndarray:
  """The ids of the tokens that texts have most often.

  Zhao et al. 2025 (arXiv:2502.14856, section 3.2). Of tokens that are equally
  frequent those with lower ids are taken: byte-pair encoding learns the more
  frequent ones first.

    >>> texts = [[3, 1, 3, 0], [3, 2, 0]]
    >>> counts = np.bincount(np.concatenate(texts), minlength=5)
    >>> print(frequent_tokens(counts, 3, always=[4]))
    [0 3 4]

  Args:
    counts: `[V]`, how often each token was seen; shares do as well.
    size: r, tokens to choose.
    always: ids that are among them in any case, such as the end of a text.

  Returns:
    `[r]` int32, sorted.

  Raises:
    ValueError: the counts are none, an id is no token, or `size` is less than
      `always` has or more than V.
  """
  counts, always = np.asarray(counts), sorted(set(map(int, always)))
  if counts.ndim != 1 or not counts.size or not (counts >= 0).all():
    raise ValueError(f"counts has shape {counts.shape}; it must be [V], none "
                     "below 0")
  for token in always:
    if not 0 <= token < counts.size:
      raise ValueError(f"always holds {token}; token ids lie in "
                       f"[0, {counts.size})")
  if not max(1, len(always)) <= size <= counts.size:
    raise ValueError(f"size is {size}; it must be from {max(1, len(always))}, "
                     "the tokens that are always there, to the "
                     f"{counts.size} of the vocabulary")
  order = np.argsort(-counts.astype(np.float64), kind="stable")
  rest = order[~np.isin(order, always)][:size - len(always)]
  return np.sort(np.concatenate([np.array(always, np.int64), rest])).astype(
      np.int32)
