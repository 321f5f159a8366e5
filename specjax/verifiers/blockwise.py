"""Looser matching of a chain: close to the target's choice is good enough.

Stern et al. 2018, "Blockwise Parallel Decoding" (arXiv:1811.03115, section
5). NOT lossless: the output follows neither the target's law nor its greedy
choice. `exact.certify` measures how far it is off.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.types import Draft
from specjax.types import Law
from specjax.utils import fields
from specjax.verifiers import residual
from specjax.verifiers._by_row import law_by_row


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Verifier):
  """Accepts x if it is among the target's k likeliest tokens (section 5.1).

  The extra token is the target's likeliest. No uniform is drawn. A token that
  the target cannot emit does not count, so that at temperature 0 every k is 1.

  Attributes:
    k: 1 is greedy matching; of equal tokens the lowest ids come first.
    minimum: drafted tokens that are accepted whatever they are; the paper's l
      (section 5.3) is one more, for it counts the target's own token.
  """

  k: int
  minimum: int = 0

  lossless = False
  requires = ("chain",)

  def __post_init__(self):
    fields.check_at_least("k", self.k, 1, ": 1 is greedy matching")
    _check_minimum(self.minimum)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """The outcome for one chain, which is deterministic: one-hot `stop` and
    rows.

    Args:
      draft: a chain of N nodes.
      target_probs: `[N, V]`, p of the token after every node.
    """
    p = residual.at_drafted(draft, target_probs, first=0)
    rows, x = target_probs[:-1], draft.tokens[1:]
    before = (rows > p[:, None]) | (
        (rows == p[:, None]) & (jnp.arange(rows.shape[-1]) < x[:, None]))
    near = (jnp.sum(before, axis=-1) < self.k) & (p > 0)
    return _matched(near, self.minimum, draft, target_probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distance(Verifier):
  """Accepts x if it is at most epsilon from the target's choice (section 5.2).

  For vocabularies whose ids are ordinal, such as intensities of pixels. The
  extra token is the target's likeliest. No uniform is drawn.

  Attributes:
    epsilon: largest |x - argmax p|, in ids; 0 is greedy matching.
    minimum: see `TopK`.
  """

  epsilon: int
  minimum: int = 0

  lossless = False
  requires = ("chain",)

  def __post_init__(self):
    fields.check_at_least(
        "epsilon", self.epsilon, 0, ": 0 is greedy matching")
    _check_minimum(self.minimum)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """The outcome for one chain, as for `TopK`."""
    best = jnp.argmax(target_probs[:-1], axis=-1)
    near = jnp.abs(draft.tokens[1:] - best) <= self.epsilon
    return _matched(near, self.minimum, draft, target_probs)


def _check_minimum(minimum):
  fields.check_at_least(
      "minimum", minimum, 0, ": 0 accepts only what matches")


def _matched(near, minimum, draft, target_probs) -> Law:
  """Stops before the first token that is not `near [N - 1]`, or is padding."""
  forced = jnp.arange(near.shape[0]) < minimum
  real = residual.at_drafted(draft, draft.probs) > 0
  length = jnp.sum(jnp.cumprod((near | forced) & real))
  nodes, vocab = target_probs.shape
  one_hot = lambda index, size: jax.nn.one_hot(
      index, size, dtype=target_probs.dtype)
  return law_by_row(
      stop=one_hot(length, nodes),
      row=lambda node: one_hot(
          jnp.argmax(residual.at_node(target_probs, node)), vocab))
