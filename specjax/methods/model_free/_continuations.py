"""Drafting from counts of continuations.

A node of a suffix tree represents the matches (see `_matches`) whose following
tokens begin with the path to the node. Its children are the next tokens of
these matches. So no tree is stored: a node is a mask over K matches. To count
its children, the K next tokens are compared with each other. A step down the
tree removes matches from the mask.

  walk              the most frequent path, for many sets of matches
  draw              a path sampled from the counts, with its distributions
  frequent_paths    the most frequent prefixes, as a tree
  draw_tree         a tree sampled from the counts

`CountDrafter` is the base of `Suffix` and `Retrieval`.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.data.datastores import Datastore
from specjax.decoding import rounds
from specjax.interfaces import Model
from specjax.methods import _common
from specjax.methods import _trees
from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.trees import shapes
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.utils import fields

_NO_TOKEN = -1
_PROPOSALS = ("deterministic", "sampled")
_MOST_MATCHES = 4095  # K (K + 2) < 2^24, see `walk`


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountDrafter(_common.ModelFree):
  """Base of drafters that count continuations of the last tokens.

  Subclasses implement `propose`. They have no state: a draft is a function of
  the row's tokens, `params["drafter"]` and the uniforms.

  Attributes:
    gamma: largest number S of tokens of a path, at least 1.
    proposal: "deterministic", the most frequent tokens, or "sampled", tokens
      drawn from the distribution of the counts.
    parents: sampled tree with different siblings, at most gamma deep, see
      `specjax.trees`; stored breadth-first. None: a chain.
    max_matches: number K of counted matches of a row, 1 to 4095. A drafted
      token costs K^2 comparisons.
    transform: transform of the log counts; None: the decoder's. Any transform
      is lossless, because the verifier gets the distributions after it.
      Deterministic drafts do not use it.
    vocab_size: V; `bind` sets it.
  """

  gamma: int
  proposal: str = "deterministic"
  parents: tuple[int, ...] | None = None
  max_matches: int = 64
  transform: LogitsTransform | None = None
  vocab_size: int | None = None

  conditional = True
  # The tokens before the draft determine the matches. So a token's distribution
  # depends on the position where the draft began.
  autoregressive = False

  def __post_init__(self):
    fields.check_fields(self, "gamma", "max_matches")
    if self.max_matches > _MOST_MATCHES:
      raise ValueError(f"max_matches is {self.max_matches}; it must be at most "
                       f"{_MOST_MATCHES}, the limit of exact counts")
    if self.proposal not in _PROPOSALS:
      raise ValueError(f"proposal is {self.proposal!r}; it must be one of "
                       f"{', '.join(_PROPOSALS)}")
    if self.parents is None:
      return
    if self.proposal != "sampled":
      raise ValueError(f"parents is a tree and proposal is {self.proposal!r}; "
                       "trees need proposal='sampled'")
    object.__setattr__(self, "parents", shapes.breadth_first(self.parents))
    fields.check_at_least("nodes of `parents`", len(self.parents), 2)
    deepest = max(shapes.depths(self.parents))
    if deepest > self.gamma:
      raise ValueError(f"parents is {deepest} levels deep, but gamma is "
                       f"{self.gamma}; give gamma={deepest} or a shallower "
                       "tree")

  @property
  def chain(self) -> bool:
    return self.parents is None or self._most_children < 2

  iid = chain

  @property
  def _most_children(self) -> int:
    return int(np.bincount(np.array(self.parents[1:], np.int64),
                           minlength=1).max())

  @property
  def deterministic(self) -> bool:
    return self.proposal == "deterministic"

  @property
  def num_nodes(self) -> int:
    return self.gamma + 1 if self.parents is None else len(self.parents)

  @property
  def num_uniforms(self) -> int:
    drawn = self.proposal == "sampled"
    return UNIFORMS_A_DRAW * (self.num_nodes - 1) if drawn else 0

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns the drafter specialised to a target."""
    if self.parents is not None:
      _common.check_siblings(self._most_children, target)
    return dataclasses.replace(super().bind(target, transform),
                               transform=self.transform or transform)

  def _check(self, store: Datastore | None) -> None:
    """Raises `ValueError` unless it is a datastore with the target's ids."""
    if not isinstance(store, Datastore):
      raise ValueError(
          f"params['drafter'] is a {type(store).__name__}, but "
          f"{type(self).__name__} needs a Datastore; give "
          "jax.device_put(specjax.data.datastores.load(path, tokenizer))")
    if store.vocab_size > self.vocab_size:
      raise ValueError(
          f"the datastore has ids of {store.vocab_size} tokens, but the target "
          f"has {self.vocab_size}; build it with the target's tokenizer")

  def _deterministic(self, state: DecodeState, tokens: jax.Array,
                     real: jax.Array) -> Draft:
    """Returns chains of `tokens [B, S]`, padding unless `real [B, S]`."""
    return _common.deterministic(
        state, range(-1, self.gamma), jnp.where(real, tokens, _NO_TOKEN),
        self.vocab_size)

  def _drawn(self, state: DecodeState, uniforms: jax.Array,
             following: jax.Array, alive: jax.Array,
             ended: jax.Array, steps: jax.Array,
             least: float) -> Draft:
    """Samples a draft from one set of matches per row.

    The draft is a chain of `draw`, or a tree of `draw_tree`, which ignores
    `ended` and `least`.
    """
    if self.parents is not None:
      return _common.tree_drafts(state, self.parents, *draw_tree(
          following, alive, steps, uniforms, self.parents, self.transform,
          state.temperature, self.vocab_size))
    plain = dataclasses.replace(self.transform, banned=())

    def one(root, uniforms, temperature, *matches):
      tokens, probs = draw(
          *matches, least, uniforms.reshape(-1, UNIFORMS_A_DRAW),
          lambda logits: plain(logits, temperature), self.transform.banned,
          self.vocab_size)
      return Draft.chain(root, tokens, probs)

    return jax.vmap(one)(rounds.roots(state), uniforms, state.temperature,
                         following, alive, ended, steps)


def walk(following: jax.Array, alive: jax.Array, ended: jax.Array,
         steps: jax.Array, least: float) -> tuple[jax.Array, jax.Array]:
  """Returns the most frequent path from each of M sets of matches.

  SuffixDecoding's draft (Oliaro et al. 2024, arXiv:2411.04975, chain mode): a
  token's probability is count(child) / count(node), times the probability of
  the token before it. The path ends before a token whose probability is below
  `least`. Among equally frequent tokens the token of the first match is taken.

  Args:
    following: tokens `[K, S]` int32 after the matches.
    alive: `[M, K]` bool, the matches of each set.
    ended: `[M]` float32, number of occurrences of each set at the end of the
      sequence. They count as matches of the first node.
    steps: `[M]` int32, maximal length of a path.
    least: minimal probability of a token.

  Returns:
    tokens: `[M, S]` int32.
    probs: `[M, S]` float32, probabilities of the tokens; 0 if there is none.
  """
  chex.assert_rank([following, alive, ended, steps], [2, 2, 1, 1])
  matches = following.shape[0]
  first = jnp.arange(matches, 0, -1, dtype=jnp.float32)

  def step(carry, column):
    alive, ended, prob, going = carry
    token, k = column
    goes = alive & (token >= 0)
    same = token[:, None] == token
    counts = goes.astype(jnp.float32) @ same.astype(jnp.float32)
    # Count and index of a match are packed into one number, so one maximum
    # returns both. The numbers are below 2^24, where float32 is exact.
    best = jnp.max(jnp.where(goes, counts * (matches + 1) + first, 0), axis=-1)
    # XLA may compile a float division as a product with the reciprocal, which
    # rounds twice. So the numbers are unpacked as integers.
    best = best.astype(jnp.int32)
    count, at = best // (matches + 1), matches - best % (matches + 1)
    chosen = token.at[at].get(mode="clip")
    total = jnp.sum(alive, axis=-1, dtype=jnp.float32) + ended
    prob *= count / jnp.maximum(total, 1)
    going &= (count > 0) & (prob >= least) & (k < steps)
    alive = goes & (token == chosen[:, None])
    return (alive, jnp.zeros_like(ended), prob, going), (
        chosen, jnp.where(going, prob, 0))

  sets = alive.shape[0]
  start = alive, ended, jnp.ones((sets,)), jnp.ones((sets,), bool)
  _, (tokens, probs) = jax.lax.scan(
      step, start, (following.T, jnp.arange(following.shape[1])))
  return tokens.T, probs.T


def best_set(probs: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the set whose path has the highest score, the last if equal.

  Args:
    probs: probabilities `[..., M, S]` of `walk`.

  Returns:
    `[...]` int32, index of the set, and `[...]` float32, its score: the sum of
    the path's probabilities, an estimate of the number of accepted tokens.
  """
  # Rounding can decide between equal scores. So the sum has the order of the
  # published code.
  score = sum(probs[..., k] for k in range(probs.shape[-1]))
  last = score.shape[-1] - 1
  return (last - jnp.argmax(score[..., ::-1], axis=-1)).astype(jnp.int32), (
      jnp.max(score, axis=-1))


def draw(following: jax.Array, alive: jax.Array, ended: jax.Array,
         steps: jax.Array, least: float, uniforms: jax.Array,
         law: Callable[[jax.Array], jax.Array], banned: Sequence[int],
         vocab_size: int) -> tuple[jax.Array, jax.Array]:
  """Samples a path from the counts of the children.

  The probability of the most frequent children along the path decides where it
  ends: before this probability falls below `least`. So the end depends only on
  the matches and on earlier tokens, not on the sampled child.

  Args:
    following: tokens `[K, S]` int32 after the matches.
    alive: matches `[K]` bool.
    ended: `[]` float32, see `walk`.
    steps: `[]` int32, see `walk`.
    least: minimal probability of a token, see `walk`.
    uniforms: `[S, 2]`, uniform in [0, 1).
    law: function of the log counts `[K]` to probabilities. At temperature 1
      they are the relative counts.
    banned: token ids that are never drawn.
    vocab_size: vocabulary size V.

  Returns:
    tokens: `[S]` int32.
    probs: `[S, V]`, distribution of each token; 0 if there is none.
  """
  chex.assert_rank([following, alive, ended, steps], [2, 1, 0, 0])
  earlier = np.tril(np.ones((following.shape[0],) * 2, bool), -1)

  def step(carry, column):
    alive, ended, share, going = carry
    token, k, u = column
    goes = alive & (token >= 0)
    same = (token[:, None] == token) & goes
    counts = jnp.sum(same, axis=-1, dtype=jnp.float32)
    total = jnp.sum(alive, dtype=jnp.float32) + ended
    share *= jnp.max(jnp.where(goes, counts, 0)) / jnp.maximum(total, 1)
    # Each token can be drawn only at its first match.
    drawable = goes & ~jnp.any(same & earlier, axis=-1)
    if banned:
      drawable &= ~jnp.isin(token, jnp.array(banned))
    going &= jnp.any(drawable) & (share >= least) & (k < steps)
    logits = jnp.where(drawable, jnp.log(jnp.maximum(counts, 1)), -jnp.inf)
    q = jnp.where(going, law(jnp.where(going, logits, 0)), 0)
    chosen = jnp.where(going, token[inverse_cdf(q, u)], 0)
    alive = goes & (token == chosen)
    return (alive, jnp.zeros_like(ended), share, going), (chosen, q)

  size = following.shape[1]
  start = alive, ended, jnp.ones(()), jnp.ones((), bool)
  _, (tokens, q) = jax.lax.scan(
      step, start, (following.T, jnp.arange(size), uniforms))
  # A token's probability is at its first match, and 0 at its other matches. So
  # the sum over matches is the probability of the token.
  probs = jnp.zeros((size, vocab_size)).at[
      jnp.arange(size)[:, None], jnp.maximum(following.T, 0)].add(q)
  return tokens, probs


def frequent_paths(following: jax.Array, alive: jax.Array, nodes: int
                   ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the most frequent prefixes of continuations as a tree.

  REST's draft (He et al. 2023, arXiv:2311.08252, section 3.2). Prefixes are
  ranked by count, shorter ones first among equal counts. A prefix is at least
  as frequent as its extensions, so the first N - 1 prefixes and the root are a
  tree.

  Args:
    following: `[K, S]` int32, -1 after an end.
    alive: matches `[K]` bool.
    nodes: number of nodes N, the root included.

  Returns:
    tokens: `[N - 1]` int32, tokens of the nodes below the root, parents first.
    parents: `[N]` int32, parents of all nodes, -1 for the root.
    real: `[N - 1]` bool, False for padding.
  """
  chex.assert_rank([following, alive], [2, 1])
  matches, size = following.shape
  following = jnp.where(alive[:, None], following, _NO_TOKEN)
  same = (following[:, None] == following) & (following >= 0)
  same = jnp.cumprod(same, axis=-1, dtype=jnp.int32)  # [K, K, S] of prefixes
  counts = jnp.sum(same, axis=1)
  first = jnp.argmax(same, axis=1).astype(jnp.int32)
  match = jnp.arange(matches, dtype=jnp.int32)[:, None]
  depth = jnp.arange(size, dtype=jnp.int32)
  key = jnp.where((counts > 0) & (first == match),
                  counts * size + size - 1 - depth, 0).reshape(-1)
  key = jnp.pad(key, (0, max(0, nodes - 1 - key.shape[0])))
  key, chosen = jax.lax.top_k(key, nodes - 1)
  real = key > 0
  chosen = jnp.where(real, chosen, 0)
  places = jnp.where(real, chosen, matches * size)  # padding: out of range
  number = jnp.zeros((matches * size,), jnp.int32).at[places].set(
      jnp.arange(1, nodes, dtype=jnp.int32), mode="drop")
  of, d = chosen // size, chosen % size
  above = number[first[of, d - 1] * size + d - 1]
  parents = jnp.where(real & (d > 0), above, 0)
  tokens = jnp.where(real, following[of, d], 0)
  return tokens, jnp.pad(parents, (1, 0), constant_values=-1), real


def draw_tree(following: jax.Array, alive: jax.Array, steps: jax.Array,
              uniforms: jax.Array, parents: tuple[int, ...],
              transform: LogitsTransform, temperature: jax.Array,
              vocab_size: int) -> tuple[jax.Array, jax.Array]:
  """Samples a tree of N nodes per row.

  Args:
    following: `[B, K, S]` int32, tokens after the matches, -1 after an end.
    alive: `[B, K]` bool, matches that count.
    steps: `[B]` int32, maximal length of a path.
    uniforms: `[B, (N - 1) UNIFORMS_A_DRAW]` uniforms in [0, 1).
    parents: breadth-first tree, at most S deep.
    transform: transform of the log counts.
    temperature: temperatures `[B]`.
    vocab_size: vocabulary size V.

  Returns:
    Tokens `[B, N - 1]` and probabilities `[B, N - 1, V]` of the nodes below the
    root. Padding is token 0 with a row of 0.
  """
  chex.assert_rank([following, alive, steps], [3, 2, 1])
  drawn = _trees.drawer("without_replacement", transform, temperature)

  def counted(alive, depth):
    """Returns logits `[B, n, V]` of the continuations of `alive [B, n, K]`."""
    column = jnp.take(following, depth, axis=2)[:, None]
    counts = alive & (column >= 0) & (depth < steps)[:, None, None]
    batch, size, _ = alive.shape
    total = jnp.zeros((batch, size, vocab_size)).at[
        jnp.arange(batch)[:, None, None], jnp.arange(size)[:, None],
        jnp.maximum(column, 0)].add(counts.astype(jnp.float32))
    return jnp.where(total > 0, jnp.log(jnp.maximum(total, 1)), -jnp.inf)

  def step(tokens, depths, ancestors, above, alive):
    del ancestors
    depth = depths[0, 0]  # all nodes of a step have the same depth
    alive = jax.vmap(lambda row, at: row[at])(alive, above)
    alive &= jnp.take(following, depth, axis=2)[:, None] == tokens[..., None]
    return counted(alive, depth + 1), alive

  def some(logits, counts, uniforms):
    """Samples children, and makes children without a token padding."""
    distinct = jnp.sum(jnp.isfinite(_trees.allowed(logits, transform)), -1)
    tokens, probs = drawn(
        jnp.where(distinct[..., None] > 0, logits, 0), counts, uniforms)
    node = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    real = rank < distinct[:, node]
    return (jnp.where(real, tokens, _NO_TOKEN),
            jnp.where(real[..., None], probs, 0))

  alive = alive[:, None]
  tokens, probs, _ = _trees.grow(
      step, alive, counted(alive, jnp.zeros((), jnp.int32))[:, 0], uniforms,
      parents, some)
  return jnp.maximum(tokens, 0), probs
