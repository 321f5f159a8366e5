"""Drafts from counts of continuations, without storing a suffix tree.

A match is an earlier occurrence of the last tokens of a sequence. The tokens
that follow it are its continuation (see `_matches`). A suffix tree counts the
continuations. Each node stands for all matches whose continuation begins with
the path to the node. A node's children are the next tokens of these matches.

Here no tree is stored. The continuations of up to K matches are collected in an
array, and a node is a mask over these K matches. To count a node's children,
the K next tokens are compared with each other. To move to a child, the matches
with other next tokens are removed from the mask.

  walk              follows the most frequent path, for many sets of matches
  draw              samples a path from the counts
  frequent_paths    returns the most frequent prefixes as a tree
  draw_tree         samples a tree from the counts

`CountDrafter` is the base class of the drafters `Suffix` and `Retrieval`.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
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
# Largest number K of matches. `walk` packs a count and an index into a float32,
# which is exact only for integers below 2^24, and K (K + 2) must be below that.
_MOST_MATCHES = 4095


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountDrafter(_common.ModelFree):
  """Base class of drafters that draft frequent continuations.

  These drafters find earlier occurrences (matches) of the last tokens of a
  sequence and count the tokens that follow each match. Subclasses implement
  `propose`. The drafters have no state: a draft depends only on the sequence,
  `params["drafter"]` and uniform samples.

  Attributes:
    gamma: maximum draft length (depth of a tree), at least 1.
    proposal: "deterministic" drafts the most frequent tokens; "sampled" samples
      tokens in proportion to their counts.
    parents: parent index of each node of a sampled draft tree with at most
      gamma levels. Siblings have different tokens. None drafts a chain.
    max_matches: maximum number K of counted matches per row, 1 to 4095. Each
      drafted token needs K^2 comparisons.
    transform: transform from log counts to draft probabilities; None uses the
      target's transform. Every transform is lossless, because the verifier
      receives the transformed probabilities. Deterministic drafts do not use
      it.
    vocab_size: vocabulary size of the target. If it is None, `bind` sets it.
  """

  gamma: int
  proposal: str = "deterministic"
  parents: tuple[int, ...] | None = None
  max_matches: int = 64
  transform: LogitsTransform | None = None
  vocab_size: int | None = None

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
  def _is_chain(self) -> bool:
    return self.parents is None or self._most_children < 2

  @property
  def provides(self) -> tuple[str, ...]:
    # Not autoregressive: all tokens of a draft use the matches of the tokens
    # before the draft.
    return interfaces.provided(
        chain=self._is_chain, iid=self._is_chain, conditional=True,
        deterministic=self.proposal == "deterministic")

  @property
  def _most_children(self) -> int:
    return int(np.bincount(np.array(self.parents[1:], np.int64),
                           minlength=1).max())

  @property
  def num_nodes(self) -> int:
    return self.gamma + 1 if self.parents is None else len(self.parents)

  @property
  def num_uniforms(self) -> int:
    drawn = self.proposal == "sampled"
    return UNIFORMS_A_DRAW * (self.num_nodes - 1) if drawn else 0

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns the drafter with the target's vocabulary size and transform.

    If the drafter already has a transform, it is kept.

    Raises:
      ValueError: a node of the tree has more children than the vocabulary has
        tokens, or the drafter was made for another vocabulary size.
    """
    if self.parents is not None:
      _common.check_siblings(self._most_children, target)
    return dataclasses.replace(super().bind(target, transform),
                               transform=self.transform or transform)

  def _check(self, store: Datastore | None) -> None:
    """Raises `ValueError` unless `store` is a datastore that fits the target.

    Its token ids must be in the target's vocabulary.
    """
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
    """Returns a batch of deterministic draft chains.

    Args:
      state: decoding state of the B rows.
      tokens: token ids `[B, S]` int32 of the chains.
      real: `[B, S]` bool, False for padding.
    """
    return _common.deterministic(
        state, range(-1, self.gamma), jnp.where(real, tokens, _NO_TOKEN),
        self.vocab_size)

  def _drawn(self, state: DecodeState, uniforms: jax.Array,
             following: jax.Array, alive: jax.Array,
             ended: jax.Array, steps: jax.Array,
             least: float) -> Draft:
    """Samples a draft for each row from the continuations of its matches.

    If `parents` is None, the draft is a chain from `draw`. Otherwise it is a
    tree from `draw_tree`, and `ended` and `least` are not used. See `draw` and
    `draw_tree` for the arguments.
    """
    if self.parents is not None:
      return _common.tree_drafts(state, self.parents, *draw_tree(
          following, alive, steps, uniforms, self.parents, self.transform,
          state, self.vocab_size))
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
  """Returns the most frequent continuation of each of M sets of matches.

  This is the chain draft of SuffixDecoding (Oliaro et al. 2024,
  arXiv:2411.04975). The path begins at the root of the tree of continuations
  and always moves to the child with the largest count. A token's probability is
  count(child) / count(node), times the probability of the token before it. The
  path ends before a token whose probability is below `least`. If several
  children have the largest count, the path takes the child of the first match.

  Args:
    following: the S tokens after each of the K matches, `[K, S]` int32; -1
      after the end of a sequence.
    alive: `[M, K]` bool, True for the matches in each set.
    ended: `[M]` float32, added to the count of the root of each tree. It is 1
      if the end of the sequence is counted as a match, although it has no next
      token. Otherwise it is 0.
    steps: `[M]` int32, maximum length of each path.
    least: minimum probability of a token.

  Returns:
    tokens: `[M, S]` int32.
    probs: `[M, S]` float32, probabilities of the tokens; 0 after the end of a
      path.
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
    # This finds the largest count, and the first match whose token has it.
    # Count and index are packed into one number, so one maximum returns both.
    # The numbers are below 2^24, where float32 is exact.
    best = jnp.max(jnp.where(goes, counts * (matches + 1) + first, 0), axis=-1)
    # The packed number is divided as an integer, because XLA may compile a
    # float division as a product with the reciprocal, which rounds twice.
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
  """Returns the index of the best of M draft paths.

  The score of a path is the sum of its tokens' probabilities, an estimate of
  the number of accepted tokens. If several paths have the highest score, the
  last of them is chosen.

  Args:
    probs: probabilities `[..., M, S]` of the S tokens of each path, from
      `walk`.

  Returns:
    Index of the path `[...]` int32, and its score `[...]` float32.
  """
  # If two scores are equal up to rounding, the order of the additions decides
  # between them. So this is the order of the published code of SuffixDecoding.
  score = sum(probs[..., k] for k in range(probs.shape[-1]))
  last = score.shape[-1] - 1
  return (last - jnp.argmax(score[..., ::-1], axis=-1)).astype(jnp.int32), (
      jnp.max(score, axis=-1))


def draw(following: jax.Array, alive: jax.Array, ended: jax.Array,
         steps: jax.Array, least: float, uniforms: jax.Array,
         law: Callable[[jax.Array], jax.Array], banned: Sequence[int],
         vocab_size: int) -> tuple[jax.Array, jax.Array]:
  """Samples a path through the tree of continuations of K matches.

  A child is sampled in proportion to its count. Each node of the path has a
  ratio, count(most frequent child) / count(node). The path ends where the
  product of these ratios falls below `least`. So the end of the path depends
  only on the tokens before it, as verification requires.

  Args:
    following: the S tokens after each match, `[K, S]` int32; -1 after the end
      of a sequence.
    alive: `[K]` bool, False for entries that are not a match.
    ended: `[]` float32, added to the count of the root, see `walk`.
    steps: `[]` int32, maximum length of the path.
    least: minimum of the product of ratios.
    uniforms: uniform samples in [0, 1), `[S, 2]`.
    law: function from log counts `[K]` to probabilities. At temperature 1 the
      probabilities are the relative counts.
    banned: token ids that are never sampled.
    vocab_size: vocabulary size V.

  Returns:
    tokens: `[S]` int32.
    probs: `[S, V]`, distribution from which each token was sampled; 0 after the
      end of the path.
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
    # Several matches may have the same next token. Only the first of these
    # matches keeps the count, so that the token is not counted several times.
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
  # q is a distribution over the K matches. Only the first match with a given
  # next token has a probability above 0. So adding q at the next tokens of the
  # matches gives the distribution over the vocabulary.
  probs = jnp.zeros((size, vocab_size)).at[
      jnp.arange(size)[:, None], jnp.maximum(following.T, 0)].add(q)
  return tokens, probs


def frequent_paths(following: jax.Array, alive: jax.Array, nodes: int
                   ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the draft tree of REST, made of the most frequent continuations.

  See He et al. 2023 (arXiv:2311.08252, section 3.2). All prefixes of the
  continuations are ranked by their count. Among equal counts, shorter prefixes
  come first. A prefix is at least as frequent as its extensions. So the first
  N - 1 prefixes in this ranking form a tree below the root.

  Args:
    following: continuations, the S tokens after each of the K matches,
      `[K, S]` int32; -1 after the end of a sequence.
    alive: `[K]` bool, False for entries that are not a match.
    nodes: number N of nodes of the tree, including the root.

  Returns:
    tokens: `[N - 1]` int32, last token of each chosen prefix, parents first.
    parents: `[N]` int32, parent index of each node, -1 for the root.
    real: `[N - 1]` bool, False for padding.
  """
  chex.assert_rank([following, alive], [2, 1])
  matches, size = following.shape
  following = jnp.where(alive[:, None], following, _NO_TOKEN)
  same = (following[:, None] == following) & (following >= 0)
  # [K, K, S]: 1 where the prefixes of two continuations are equal.
  same = jnp.cumprod(same, axis=-1, dtype=jnp.int32)
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
  # Padding gets an index out of range, which the scatter drops.
  places = jnp.where(real, chosen, matches * size)
  number = jnp.zeros((matches * size,), jnp.int32).at[places].set(
      jnp.arange(1, nodes, dtype=jnp.int32), mode="drop")
  of, d = chosen // size, chosen % size
  above = number[first[of, d - 1] * size + d - 1]
  parents = jnp.where(real & (d > 0), above, 0)
  tokens = jnp.where(real, following[of, d], 0)
  return tokens, jnp.pad(parents, (1, 0), constant_values=-1), real


def draw_tree(following: jax.Array, alive: jax.Array, steps: jax.Array,
              uniforms: jax.Array, parents: tuple[int, ...],
              transform: LogitsTransform, state: DecodeState, vocab_size: int
              ) -> tuple[jax.Array, jax.Array]:
  """Samples a draft tree of N nodes per row from counts of continuations.

  The children of a node are sampled without replacement, in proportion to their
  counts after the transform.

  Args:
    following: the S tokens after each of the K matches of a row, `[B, K, S]`
      int32 for B rows; -1 after the end of a sequence.
    alive: `[B, K]` bool, False for entries that are not a match.
    steps: `[B]` int32, maximum length of a path.
    uniforms: uniform samples in [0, 1), `[B, (N - 1) UNIFORMS_A_DRAW]`.
    parents: parent index of each node, breadth-first, at most S levels.
    transform: transform from log counts to probabilities.
    state: decoding state of B rows.
    vocab_size: vocabulary size V.

  Returns:
    Tokens `[B, N - 1]` and draft distributions `[B, N - 1, V]` of the nodes
    below the root. Padding has token 0 and an all-zero distribution.
  """
  chex.assert_rank([following, alive, steps], [3, 2, 1])
  drawn = _trees.drawer("without_replacement", transform, state)

  def counted(alive, depth):
    """Returns `[B, n, V]`, the log counts of the tokens that follow n nodes.

    Args:
      alive: `[B, n, K]` bool, the matches of each node.
      depth: `[]` int32, depth of the children.
    """
    column = jnp.take(following, depth, axis=2)[:, None]
    counts = alive & (column >= 0) & (depth < steps)[:, None, None]
    batch, size, _ = alive.shape
    total = jnp.zeros((batch, size, vocab_size)).at[
        jnp.arange(batch)[:, None, None], jnp.arange(size)[:, None],
        jnp.maximum(column, 0)].add(counts.astype(jnp.float32))
    return jnp.where(total > 0, jnp.log(jnp.maximum(total, 1)), -jnp.inf)

  def step(tokens, depths, ancestors, above, alive):
    del ancestors
    depth = depths[0, 0]  # all nodes of one call have the same depth
    alive = jax.vmap(lambda row, at: row[at])(alive, above)
    alive &= jnp.take(following, depth, axis=2)[:, None] == tokens[..., None]
    return counted(alive, depth + 1), alive

  def some(logits, counts, uniforms, depth):
    """Samples children of nodes.

    If fewer distinct tokens follow a node than it has children, the remaining
    children are padding.
    """
    distinct = jnp.sum(jnp.isfinite(_trees.allowed(logits, transform)), -1)
    tokens, probs = drawn(
        jnp.where(distinct[..., None] > 0, logits, 0), counts, uniforms, depth)
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
