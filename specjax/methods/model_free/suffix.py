"""SuffixDecoding: drafts frequent continuations of earlier occurrences.

This is the chain mode of Oliaro et al. 2024 (arXiv:2411.04975), with the scores
of the published code (ArcticInference). A suffix tree counts how often each
token follows each sequence of tokens. For every match length m, a candidate
draft begins at the tree node of the last m tokens of the sequence and moves
down the tree:

  tokens       at most min(gamma, m * max_spec_factor + max_spec_offset), and
               match and draft together at most `max_depth`
  next token   the most frequent child; its probability is count(child) /
               count(node), times the probability of the token before it
  end          before the first token whose probability is below
               `min_token_prob`
  score        the sum of the probabilities of the tokens

The candidate with the highest score is proposed. If several candidates have the
highest score, the candidate with the longest match is proposed. Candidates come
from two sources: the sequence itself, and a datastore that all sequences share.
If the best candidates of both sources have equal scores, the one from the
sequence itself is used.

The datastore does not change during decoding. The published server adds the
outputs of earlier requests to its tree. Here a new datastore must be built to
include such outputs. As in the published tree, the end of the sequence counts
as an occurrence of its last tokens, although no token follows it. So after a
single earlier match, the next token has probability 1/2.

The published code stores trees on the host. Here no tree is stored; the counts
are computed from K matches on the device, see `_continuations`.
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
  """Best draft of each of B rows from one source: the row, or a datastore.

  Attributes:
    score: `[B]` float32, sum of the probabilities of the draft's tokens.
    tokens: `[B, S]` int32, the most frequent continuation.
    real: `[B, S]` bool, False for padding.
    following: `[B, K, S]` int32, the S tokens after each of K matches.
    alive: `[B, K]` bool, True for the matches of the draft's match length.
    ended: `[B]` float32, 1 if the end of the row is counted as a match, else 0.
    steps: `[B]` int32, maximum length of the draft.
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
  """SuffixDecoding: drafts from counts in the sequence itself and a datastore.

  `params["drafter"]` may be a `data.datastores.Datastore`. If it is None, () or
  missing, drafts come only from the sequence itself.

  There are three forms of drafts:

  * `proposal="deterministic"`: the most frequent continuation, as published;
  * `proposal="sampled"`: a chain whose tokens are sampled in proportion to the
    counts of the children, at the row's temperature, for block verification;
  * `proposal="sampled"` with `parents`: a sampled tree with distinct siblings,
    for traversal verification. A path ends where no match continues, and
    `min_token_prob` is not used.

  A sampled chain ends where the probability of the most frequent children along
  it falls below `min_token_prob`, no matter which children were sampled. So the
  end does not depend on the last token, and drafts have the capability
  "conditional" (`interfaces.CAPABILITIES`). At temperature 0, deterministic and
  sampled chains are equal, unless the transform bans the most frequent child.

  The counts are exact if there are at most `max_matches` matches. Otherwise
  only `max_matches` of them are counted. In the sequence itself these are the
  longest matches and, among equally long ones, the latest. In the datastore
  these are evenly spaced matches. If children have equal counts, a chain takes
  the child of the first match in this order, and a tree the child with the
  lowest id. The published code specifies no order. Matches in a datastore have
  at most the length `Datastore.depth`.

  Attributes:
    gamma: maximum draft length, at least 1.
    proposal: "deterministic" or "sampled".
    parents: parent index of each node of a sampled tree with at most gamma
      levels, see `specjax.trees`; None drafts a chain.
    max_matches: maximum number K of counted matches.
    max_spec_factor: factor a of the limit on the draft length: after a match of
      m tokens, at most a * m + b tokens are drafted.
    max_spec_offset: offset b of this limit.
    min_token_prob: minimum estimated probability of a drafted token, in [0, 1].
    max_depth: maximum length of match and draft together, at least 2.
    transform: transform from log counts to draft probabilities; None uses the
      target's transform.
    vocab_size: vocabulary size of the target. If it is None, `bind` sets it.
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
    """Raises `ValueError` if the datastore does not fit the target.

    Without a datastore in `params["drafter"]`, nothing is checked.
    """
    del prompt, prefill_output
    store = _store(params)
    if store is not None:
      self._check(store)

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, None]:
    """Returns a draft per row; it is padding if there is no match."""
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
    """Returns `[M]` int32, the maximum draft length for each match length.

    Args:
      sizes: match lengths `[M]`.
    """
    wanted = np.trunc(
        sizes * self.max_spec_factor + self.max_spec_offset + 1e-6)
    return np.clip(np.minimum(wanted, self.max_depth - sizes), 0,
                   self.gamma).astype(np.int32)

  def _own(self, state: DecodeState) -> _Found:
    """Returns the best draft of each row from the row's own tokens."""
    sizes = np.arange(1, self.max_depth, dtype=np.int32)
    # The search takes as many steps as the row with the longest match needs.
    # Finished rows get length 0, so that they do not add steps.
    lengths = jnp.where(state.done, 0, state.lengths)
    following, agreeing = matches_lib.own_matches(
        state.tokens, lengths, self.max_depth - 1, self.max_matches,
        self.gamma)
    alive = agreeing[:, None] >= sizes[:, None]
    # As in the published code, the end of the row is counted as a match of its
    # last tokens, although no token follows it.
    ended = jnp.ones(sizes.shape, jnp.float32)
    walk = lambda *matches: _continuations.walk(
        *matches, ended, self._steps(sizes), self.min_token_prob)
    tokens, probs = jax.vmap(walk)(following, alive)
    return self._best(sizes, tokens, probs, following, alive, 1.0)

  def _stored(self, store: Datastore, state: DecodeState) -> _Found:
    """Returns the best draft of each row from a datastore."""
    sizes = np.arange(1, min(store.depth, self.max_depth - 1) + 1,
                      dtype=np.int32)
    first, found = matches_lib.find(
        store, state.tokens, state.lengths, sizes)
    # As in the published code, a match must be shorter than the row's sequence.
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
    """Returns the best draft of each row, out of one per match length.

    Args:
      sizes: match lengths `[M]`.
      tokens: drafts `[B, M, S]` int32, for B rows.
      probs: probabilities `[B, M, S]` of the tokens.
      following: tokens after the K matches, `[B, K, S]` if all match lengths
        have the same matches, else `[B, M, K, S]`.
      alive: `[B, M, K]` bool, True for the matches of each length.
      ended: 1 if the end of the row was counted as a match, else 0.
    """
    index, score = _continuations.best_set(probs)
    take = lambda x: jax.vmap(lambda row, i: row[i])(x, index)
    return _Found(
        score=score, tokens=take(tokens), real=take(probs) > 0,
        following=following if following.ndim == 3 else take(following),
        alive=take(alive), ended=jnp.full(score.shape, ended),
        steps=jnp.asarray(self._steps(sizes))[index])


def _store(params: Mapping[str, chex.ArrayTree]) -> Datastore | None:
  """Returns the datastore `params["drafter"]`, or None if there is none."""
  store = params.get("drafter")
  return None if isinstance(store, tuple) and not store else store


def suffix_decoding(gamma: int, proposal: str = "deterministic",
                    verifier: Verifier | None = None,
                    parents: Sequence[int] | None = None) -> Strategy:
  """Returns the strategy SuffixDecoding (Oliaro et al. 2024).

  The drafts are frequent continuations of the last tokens (arXiv:2411.04975).
  In the paper, drafts are deterministic; sampling from the counts is an
  extension. For deterministic chains, all verification rules accept the same
  number of tokens. Block verification accepts the most tokens of sampled
  chains, and traversal verification of sampled trees.

  >>> suffix_decoding(gamma=8).drafter.num_uniforms  # deterministic
  0
  >>> suffix_decoding(gamma=8, proposal="sampled").drafter.num_uniforms
  16

  Args:
    gamma: maximum draft length.
    proposal: "deterministic" or "sampled".
    verifier: verification rule. None means block verification for chains and
      traversal verification for trees.
    parents: parent index of each node of a sampled tree; None drafts a chain.
  """
  if verifier is None:
    verifier = BLOCK if parents is None else TRAVERSAL
  return Strategy(Suffix(
      gamma=gamma, proposal=proposal,
      parents=None if parents is None else tuple(parents)), verifier)
