"""LM head of a draft model for a subset of the vocabulary.

The method is FR-Spec (Zhao et al. 2025, arXiv:2502.14856). A draft model spends
much of its time in the LM head of V columns. The head of this module has only
the r columns of the most frequent tokens. The draft probability q of other
tokens is 0. Verification uses this q, so decoding remains lossless. If a
transform bans all r tokens, q is uniform over the other tokens.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
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

# Logit of tokens without a column. Its exp is 0. A finite value is necessary,
# because a transform may set all other logits to -inf.
NEVER = -1e30


@dataclasses.dataclass(frozen=True)
class VocabularySubset(AroundModel):
  """`Transformer` that reads all tokens and predicts a subset.

  This class can replace the model in any drafter, for example in
  `drafters.draft_model(model=VocabularySubset(model), gamma=4)`. `parameters`
  returns the parameters.

  Attributes:
    model: complete model, with the hidden state "final" in its output.
  """

  model: Transformer

  def __post_init__(self):
    if not isinstance(self.model, Transformer):
      raise ValueError(f"the model is a {type(self.model).__name__}; a "
                       "Transformer is required")
    features = self.model.config.features
    if features and FINAL not in features:
      raise ValueError(f"features is {features}; the head reads the hidden "
                       f"state {FINAL!r}: add it to TransformerConfig.features")

  def parameters(self, params: chex.ArrayTree, ids: ArrayLike
                 ) -> dict[str, Any]:
    """Returns parameters with an LM head for some tokens.

    Args:
      params: parameters of the model. The result contains the same arrays. Only
        the r columns of the head are copied.
      ids: `[r]` ids of the tokens that can be predicted, without duplicates.

    Raises:
      ValueError: `ids` is empty, has a duplicate, or exceeds the vocabulary.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(
        ids.dtype, np.integer):
      raise ValueError(f"ids has shape {ids.shape} and dtype {ids.dtype}; it "
                       "must be a list of at least one token id")
    ids = np.sort(ids)
    for token in (ids[0], ids[-1]):
      if not 0 <= token < self.vocab_size:
        raise ValueError(f"ids has {token}; token ids must be in "
                         f"[0, {self.vocab_size})")
    twice = ids[1:][np.diff(ids) == 0]
    if twice.size:
      raise ValueError(f"ids has {twice[0]} twice; give each token only once")
    ids = jnp.asarray(ids, jnp.int32)
    whole = params[self._head]
    head = whole[ids] if self.model.config.tie_embeddings else whole[:, ids]
    return {"model": params, "head": head, "ids": ids}

  def init_cache(self, params: chex.ArrayTree, batch: int, capacity: int
                 ) -> Cache:
    return self.model.init_cache(params["model"], batch, capacity)

  def __call__(self, params: chex.ArrayTree, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Cache | None = None
               ) -> ModelOutput:
    """Runs one pass, see `Model`. Logits outside the subset are -1e30."""
    out = self.model(params["model"], tokens, depths, ancestors, cache)
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # XLA does not compute the model's logits of all V tokens, because
    # `logits_at` reads only the hidden states.
    return out.replace(logits=self.logits_at(params, out, at))

  def logits_at(self, params: chex.ArrayTree, output: ModelOutput, at: jax.Array
                ) -> jax.Array:
    """Returns the logits `[B, K, V]` at positions `at [B, K]` of a pass.

    `output` is the output of the pass.
    """
    small = {**params["model"], self._head: params["head"]}
    some = self.model.logits_at(small, output, at)
    return placed(some, params["ids"], self.vocab_size)

  def param_specs(self, axis: str, size: int) -> dict[str, Any]:
    """Returns the partition specs of the parameters.

    Every device stores the complete small head.
    """
    return {"model": self.model.param_specs(axis, size),
            "head": PartitionSpec(), "ids": PartitionSpec()}

  @property
  def _head(self) -> str:
    return "embedding" if self.model.config.tie_embeddings else "head"


def placed(some: jax.Array, ids: ArrayLike, vocab_size: int) -> jax.Array:
  """Returns logits `[..., V]` of all tokens from logits of r tokens.

  Tokens not in `ids` have the logit -1e30.

  Args:
    some: `[..., r]` logits of the tokens in `ids`.
    ids: `[r]` token ids, strictly increasing, or `[..., r]` different ids.
    vocab_size: vocabulary size V.
  """
  none = jnp.full((*some.shape[:-1], vocab_size), NEVER, some.dtype)
  if np.ndim(ids) > 1:
    return jnp.put_along_axis(none, ids, some, axis=-1, inplace=False)
  return none.at[..., ids].set(
      some, indices_are_sorted=True, unique_indices=True)


def frequent_tokens(counts: ArrayLike, size: int, always: Sequence[int] = ()
                    ) -> np.ndarray:
  """Returns the ids of the most frequent tokens.

  The method is that of Zhao et al. 2025 (arXiv:2502.14856, section 3.2). Among
  equally frequent tokens, lower ids are chosen, because byte-pair encoding
  learns frequent tokens first.

    >>> texts = [[3, 1, 3, 0], [3, 2, 0]]
    >>> counts = np.bincount(np.concatenate(texts), minlength=5)
    >>> print(frequent_tokens(counts, 3, always=[4]))
    [0 3 4]

  Args:
    counts: `[V]` counts or relative frequencies of the tokens.
    size: number r of tokens to choose.
    always: ids that are always chosen, such as the end-of-sequence token.

  Returns:
    `[r]` int32 ids, sorted.

  Raises:
    ValueError: `counts` is not a vector of counts, an id is not a token, or
      `size` is below the length of `always` or above V.
  """
  counts, always = np.asarray(counts), sorted(set(map(int, always)))
  if counts.ndim != 1 or not counts.size or not (counts >= 0).all():
    raise ValueError(f"counts has shape {counts.shape}; it must be [V] with no "
                     "value below 0")
  for token in always:
    if not 0 <= token < counts.size:
      raise ValueError(f"always has {token}; token ids must be in "
                       f"[0, {counts.size})")
  if not max(1, len(always)) <= size <= counts.size:
    raise ValueError(f"size is {size}; it must be from {max(1, len(always))}, "
                     "the length of always, to the vocabulary size "
                     f"{counts.size}")
  order = np.argsort(-counts.astype(np.float64), kind="stable")
  rest = order[~np.isin(order, always)][:size - len(always)]
  return np.sort(np.concatenate([np.array(always, np.int64), rest])).astype(
      np.int32)
