"""SuffixDecoding: frequent continuations of the longest matches.

Oliaro et al. 2024 (arXiv:2411.04975), with the scoring of its published code
(ArcticInference), chain mode. For every match length m a draft is a walk down
the suffix tree of a sequence from the row's last m tokens:

  tokens       at most min(gamma, m * max_spec_factor + max_spec_offset), and
               match and draft together at most `max_depth`
  next token   the most frequent child; its probability is count(child) /
               count(node), times the probability of the token before it
  end          before a probability below `min_token_prob`
  score        the sum of the probabilities

The draft with the highest score is proposed, and among equal scores the draft
with the longest match. There are two sources: the row's own tokens, and a
datastore that all rows share. The draft from the row's own tokens is used if
its score is at least the other draft's. The datastore does not change. (The
published server adds outputs of earlier requests to its tree. Here the
datastore must be built again with them.) As in the published tree, the end of
the row is counted as an occurrence of its last tokens. So after a single
earlier match the next token has probability 1/2.

The published code stores trees on the host. Here a set of matches is a mask
over K matches on the device, see `_continuations`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.data.datastores import Datastore
from specjax.interfaces import Verifier
from specjax.methods.model_free import _continuations
from specjax.methods.model_free import _matches as matches_lib
from specjax.methods.networks import Params
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TRAVERSAL
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.utils import fields


class _Found(NamedTuple):
  """Best draft of every row from one source.

  Attributes:
    score: `[B]` float32.
    tokens: `[B, S]` int32, the most frequent path.
    real: `[B, S]` bool, False for padding.
    following: `[B, K, S]` int32, tokens after the draft's matches; see
      `_continuations.walk` for this and the next three attributes.
    alive: `[B, K]` bool.
    ended: `[B]` float32.
    steps: `[B]` int32.
  """

  score: jax.Array
  tokens: jax.Array
  real: jax.Array
  following: jax.Array
  alive: jax.Array
  ended: jax.Array
  steps: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suffix(_continuations.CountDrafter):
  """Drafts from counts of the row's own suffixes and of a datastore's.

  `params["drafter"]` may be a `data.datastores.Datastore`. If it is None, () or
  missing, the row's own tokens are the only source.

  "deterministic" proposes the most frequent path, as published. "sampled"
  samples each token with probability count(child) / (the counts of all
  children), at the row's temperature, for block verification. With `parents` it
  samples a tree of distinct siblings for traversal verification. Its paths end
  where no match continues, and ignore `min_token_prob`. At temperature 0,
  deterministic and sampled chains are equal unless the transform bans the most
  frequent child.

  A sampled path ends before the probability of the *most frequent* children
  along it falls below `min_token_prob`, whichever child is drawn. So its end
  does not depend on the last token, and drafts are `conditional`.

  The counts are exact if a match has at most `max_matches` occurrences.
  Otherwise, in the row's own tokens the longest and then the latest matches are
  counted, and in the datastore evenly spaced ones. This order also decides ties
  in a chain (the published code leaves it open), and ids decide ties in a tree.
  The longest match in a datastore is its `depth`.

  Attributes:
    gamma: maximal draft length, at least 1.
    proposal: "deterministic" or "sampled".
    parents: sampled tree, at most gamma deep, see `specjax.trees`.
    max_matches: largest number K of counted matches.
    max_spec_factor: largest number of drafted tokens per token of a match.
    max_spec_offset: number of tokens that is added to this limit.
    min_token_prob: minimal estimated probability of a token, in [0, 1].
    max_depth: maximal length of match and draft together, at least 2.
    transform: transform of the log counts; None: the decoder's.
    vocab_size: V; `bind` sets it.
  """

  max_spec_factor: float = 1.0
  max_spec_offset: float = 0.0
  min_token_prob: float = 0.1
  max_depth: int = 64

  def __post_init__(self):
    super().__post_init__()
    fields.check_at_least("max_depth", self.max_depth, 2,
                          ": one matching and one drafted token")
    if not 0 <= self.min_token_prob <= 1:
      raise ValueError(f"min_token_prob is {self.min_token_prob}; it must be "
                       "in [0, 1], and 0 sets no limit")
    if not 0 <= self.max_spec_factor < math.inf:
      raise ValueError(f"max_spec_factor is {self.max_spec_factor}; it must be "
                       "finite and at least 0. With 0, drafts have at most "
                       "max_spec_offset tokens")
    if not math.isfinite(self.max_spec_offset):
      raise ValueError(f"max_spec_offset is {self.max_spec_offset}; it must be "
                       "a finite number of tokens")

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> None:
    """Checks the datastore, if there is one."""
    del prompt, prefill_output
    store = _store(params)
    if store is not None:
      self._check(store)

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, None]:
    """Drafts a chain or tree per row, padding in rows without a match."""
    found, store = self._own(state), _store(params)
    if store is not None:
      other = self._stored(store, state)
      is_best = found.score >= other.score
      found = jax.tree.map(
          lambda x, y: jax.vmap(jnp.where)(is_best, x, y), found, other)
    if self.proposal == "deterministic":
      return self._deterministic(state, found.tokens, found.real), None
    return self._drawn(state, uniforms, found.following, found.alive,
                       found.ended, found.steps, self.min_token_prob), None

  def _steps(self, sizes: np.ndarray) -> np.ndarray:
    """Returns `[M]` int32, the maximal draft length for each match length."""
    wanted = np.trunc(
        sizes * self.max_spec_factor + self.max_spec_offset + 1e-6)
    return np.clip(np.minimum(wanted, self.max_depth - sizes), 0,
                   self.gamma).astype(np.int32)

  def _own(self, state: DecodeState) -> _Found:
    """Returns the best draft from the row's own tokens."""
    sizes = np.arange(1, self.max_depth, dtype=np.int32)
    # The search takes as many steps as the row with the longest match needs. A
    # length of 0 excludes finished rows.
    lengths = jnp.where(state.done, 0, state.lengths)
    following, agreeing = matches_lib.own_matches(
        state.tokens, lengths, self.max_depth - 1, self.max_matches,
        self.gamma)
    alive = agreeing[:, None] >= sizes[:, None]
    # The end of the row is counted as an occurrence of its last tokens.
    ended = jnp.ones(sizes.shape, jnp.float32)
    walk = lambda *matches: _continuations.walk(
        *matches, ended, self._steps(sizes), self.min_token_prob)
    tokens, probs = jax.vmap(walk)(following, alive)
    return self._best(sizes, tokens, probs, following, alive, 1.0)

  def _stored(self, store: Datastore, state: DecodeState) -> _Found:
    """Returns the best draft from a datastore."""
    sizes = np.arange(1, min(store.depth, self.max_depth - 1) + 1,
                      dtype=np.int32)
    first, found = matches_lib.find(
        store, state.tokens, state.lengths, sizes)
    # As in the published algorithm, a match must be shorter than the row.
    found = jnp.where(state.lengths[:, None] > sizes, found, 0)
    following, alive = matches_lib.spread(
        store, first, found, jnp.asarray(sizes), self.max_matches, self.gamma)

    def walk(following, alive, steps):
      tokens, probs = _continuations.walk(
          following, alive[None], jnp.zeros((1,)), steps[None],
          self.min_token_prob)
      return tokens[0], probs[0]

    tokens, probs = jax.vmap(jax.vmap(walk), (0, 0, None))(
        following, alive, jnp.asarray(self._steps(sizes)))
    return self._best(sizes, tokens, probs, following, alive, 0.0)

  def _best(self, sizes: np.ndarray, tokens: jax.Array, probs: jax.Array,
            following: jax.Array, alive: jax.Array, ended: float) -> _Found:
    """Returns the best draft over all match lengths."""
    index, score = _continuations.best_set(probs)
    take = lambda x: jax.vmap(lambda row, i: row[i])(x, index)
    return _Found(
        score=score, tokens=take(tokens), real=take(probs) > 0,
        following=following if following.ndim == 3 else take(following),
        alive=take(alive), ended=jnp.full(score.shape, ended),
        steps=jnp.asarray(self._steps(sizes))[index])


def _store(params: Mapping[str, chex.ArrayTree]) -> Datastore | None:
  """Returns the datastore in a decoder's parameters, or None."""
  store = params.get("drafter")
  return None if isinstance(store, tuple) and not store else store


def suffix_decoding(gamma: int, proposal: str = "deterministic",
                    verifier: Verifier | None = None,
                    parents: Sequence[int] | None = None) -> Strategy:
  """Drafts frequent continuations of the last tokens.

  SuffixDecoding, Oliaro et al. 2024 (arXiv:2411.04975). Sampling from the
  counts is not in the paper. For deterministic chains, all rules accept the
  same number of tokens. For sampled chains block verification accepts most, for
  sampled trees traversal verification.

  >>> suffix_decoding(gamma=8).drafter.num_uniforms  # deterministic
  0
  >>> suffix_decoding(gamma=8, proposal="sampled").drafter.num_uniforms
  16

  Args:
    gamma: maximal draft length.
    proposal: "deterministic" or "sampled".
    verifier: verification rule; default: block for chains, traversal for trees.
    parents: sampled tree, with "sampled"; None: a chain.
  """
  if verifier is None:
    verifier = BLOCK if parents is None else TRAVERSAL
  return Strategy(Suffix(
      gamma=gamma, proposal=proposal,
      parents=None if parents is None else tuple(parents)), verifier)
