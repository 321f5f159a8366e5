"""Base classes and helpers for drafters.

The base classes are for drafters without a model and for drafters that sample
chains. The functions build drafts and update the draft model's cache.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.interfaces import Cache
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.methods import stop_rules
from specjax.sampling import draw as draw_token
from specjax.sampling import LogitsTransform
from specjax.sampling import noise_keys
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput

_T = TypeVar("_T")


class ModelFree(Drafter):
  """Base class of drafters without a draft model.

  Attributes:
    vocab_size: vocabulary size of the target. If it is None, `bind` sets it.
  """

  vocab_size: int | None

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns a copy of the drafter with the target's vocabulary size.

    Raises:
      ValueError: `vocab_size` is set and differs from the target's.
    """
    del transform
    if self.vocab_size is not None:
      check_target_size(self.vocab_size, target)
    return dataclasses.replace(self, vocab_size=target.vocab_size)


class DrawnChain(Drafter):
  """Base class of drafters that sample a chain of `gamma` tokens.

  Attributes:
    gamma: draft length.
    transform: transform from logits to draft probabilities. If it is None,
      `bind` sets it to the target's transform.
  """

  gamma: int
  transform: LogitsTransform | None

  provides = ("chain", "iid", "conditional")

  @property
  def num_uniforms(self) -> int:
    return UNIFORMS_A_DRAW * self.gamma

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    del target
    return with_transform(self, transform)


def tree_drafts(state: DecodeState, parents: Sequence[int], tokens: jax.Array,
                probs: jax.Array) -> Draft:
  """Returns B draft trees of the same shape with different tokens.

  Args:
    state: decoding state of the B batch rows. The root of each tree is the last
      committed token of its row.
    parents: parent index of each of the N nodes; -1 for the root, node 0.
    tokens: tokens `[B, N - 1]` int32 of the nodes below the root.
    probs: draft distributions `[B, N - 1, V]` of these nodes over the V tokens
      of the vocabulary.
  """
  parents = jnp.array(parents, jnp.int32)
  tree = lambda root, tokens, probs: Draft.tree(root, parents, tokens, probs)
  return jax.vmap(tree)(rounds.roots(state), tokens, probs)


def deterministic(state: DecodeState, parents: Sequence[int], tokens: jax.Array,
                  vocab_size: int) -> Draft:
  """Returns B draft trees of the same shape with one-hot distributions.

  Args:
    state: decoding state of the B batch rows.
    parents: parent index of each of the N nodes; -1 for the root, node 0.
    tokens: tokens `[B, N - 1]` int32 of the nodes below the root. An id outside
      [0, V) is padding: its node has probability 0 for every token.
    vocab_size: vocabulary size V.
  """
  known = (tokens >= 0) & (tokens < vocab_size)
  probs = jax.nn.one_hot(jnp.where(known, tokens, -1), vocab_size)
  return tree_drafts(state, parents, jnp.where(known, tokens, 0), probs)


def known_only(draft: Draft, known: jax.Array) -> Draft:
  """Turns all nodes into padding in rows where `known [B]` is False."""
  return draft.replace(
      probs=jnp.where(known[:, None, None], draft.probs, 0))


def draw_chain(law: Callable[[Any, Any, jax.Array | int], jax.Array],
               read: Callable[[jax.Array, _T], tuple[Any, _T]], carry: _T,
               first: Any, uniforms: jax.Array, state: DecodeState,
               transform: LogitsTransform, vocab_size: int,
               stop: tuple[stop_rules.StopRule, Any, Any] | None = None,
               has_loop: bool = True) -> tuple[Draft, _T]:
  """Samples a chain of gamma draft tokens in each of B batch rows.

  The draft model runs on every drafted token except the last, because no draft
  token follows the last one. With a stop rule, the loop ends when the chains of
  all rows have ended.

  Args:
    law: function `(forecast, memory, k)` that returns the draft distribution
      `[B, V]` of token k = 1..gamma. `memory` is the state of the constraints
      (such as the state of a grammar's automaton) before token k.
    read: function `(tokens [B, 1], carry) -> (forecast, carry)` that runs the
      draft model on one token per row. A forecast is a pytree whose first leaf
      contains logits.
    carry: initial carry of `read`, such as the draft model's cache.
    first: forecast of the first drafted token.
    uniforms: uniform samples in [0, 1), `[B, gamma * UNIFORMS_A_DRAW]`.
    state: decoding state of the B rows.
    transform: transform of the drafter. Its `constraints` update `memory` after
      every drafted token. If it is `coupled`, its noise replaces the uniforms.
    vocab_size: vocabulary size V.
    stop: stop rule, its parameters and its state; None draws gamma tokens. With
      a rule, forecasts are pairs of logits `[B, V]` and hidden states `[B, D]`.
    has_loop: True draws the tokens in a loop. False is for a `read` that
      differs between tokens; a stop rule then saves no passes of the model.

  Returns:
    The drafts and the final carry of `read`.
  """
  rows = uniforms.shape[0]
  u = uniforms.reshape(rows, -1, UNIFORMS_A_DRAW).swapaxes(0, 1)
  gamma = u.shape[0]
  if transform.coupled:
    u = noise_keys(state.keys, state.lengths[:, None] + np.arange(
        gamma, dtype=np.int32)).swapaxes(0, 1)

  def ask(node, forecast, q, token, asked):
    rule, params, _ = stop
    return stop_rules.ask(rule, params, stop_rules.Seen(
        place=jnp.full_like(token, node - 1), probs=q, hidden=forecast[1],
        token=token), *asked)

  def draw(node, forecast, before, tokens, probs, memory, asked):
    put = functools.partial(
        jax.lax.dynamic_update_index_in_dim, index=node, axis=1)
    # A sum, because XLA copies a slice with an operation of its own, which ends
    # a CUDA graph.
    is_own = (np.arange(1, gamma + 1, dtype=np.int32) == node)[:, None, None]
    q = reported = law(forecast, memory, node)
    if stop:
      if not stop[0].keeps:
        asked = ask(node, forecast, q, before, asked)
      reported = jnp.where(asked[0][:, None], q, 0)
    token = jax.vmap(draw_token)(
        reported, jnp.sum(jnp.where(is_own, u, 0), axis=0, dtype=u.dtype))
    if stop and stop[0].keeps:
      asked = ask(node, forecast, q, token, asked)
    return (token, put(tokens, token), put(probs, reported),
            constraints_lib.advanced(transform.constraints, memory, token),
            asked)

  def extend(node, loop):
    carry, token, *drawn = loop
    forecast, carry = read(token[:, None], carry)
    return carry, *draw(node, forecast, token, *drawn)

  roots = rounds.roots(state)
  probs = jnp.zeros((rows, gamma + 1, vocab_size), jnp.promote_types(
      jax.tree.leaves(first)[0].dtype, jnp.float32))
  loop = carry, *draw(
      1, first, roots, jnp.pad(roots[:, None], ((0, 0), (0, gamma))), probs,
      state.constraints, stop and stop_rules.start_round(
          stop[0], stop[2], ~state.done))
  if not has_loop:
    for node in range(2, gamma + 1):
      loop = extend(node, loop)
  elif stop is None:
    loop, _ = jax.lax.scan(lambda loop, node: (extend(node, loop), None), loop,
                           np.arange(2, gamma + 1, dtype=np.int32))
  else:
    _, loop = jax.lax.while_loop(
        lambda both: (both[0] <= gamma) & jnp.any(both[1][-1][0]),
        lambda both: (both[0] + 1, extend(*both)),
        (jnp.full((), 2, jnp.int32), loop))
  carry, _, tokens, probs, *_ = loop
  parents = jnp.tile(topology.chain(gamma), (rows, 1))
  return Draft(tokens=tokens, parents=parents, probs=probs), carry


def with_transform(drafter: Any, transform: LogitsTransform, **changes: Any
                   ) -> Any:
  """Returns a copy of the drafter with its field `transform` set.

  The transform converts logits to probabilities (temperature, top-k, banned
  tokens, constraints such as a grammar). If the drafter's transform is None,
  the copy uses the target's transform. Otherwise the copy keeps the drafter's
  transform, but with the target's constraints, because the decoding state
  stores only the state of the target's constraints. If the target has
  constraints, its banned tokens are also banned in drafts.

  Args:
    drafter: drafter, a frozen dataclass with a field `transform`.
    transform: transform of the target.
    **changes: new values of other fields of the drafter.
  """
  transform = (drafter.transform or transform).under(transform)
  return dataclasses.replace(drafter, transform=transform, **changes)


def check_vocabulary(model: Any, target: Model) -> None:
  """Raises `ValueError` if the two models differ in vocabulary size."""
  if model.vocab_size != target.vocab_size:
    raise ValueError(
        f"the drafter has {model.vocab_size} tokens and the target "
        f"{target.vocab_size}; both need the same vocabulary: train the "
        "drafter with the target's tokenizer, or use "
        "strategies.token_intersection or strategies.string_match")


def check_target_size(size: int, target: Model) -> None:
  """Checks that a drafter was made for the target's vocabulary size.

  Args:
    size: vocabulary size for which the drafter was made.
    target: target model.

  Raises:
    ValueError: the target has another vocabulary size.
  """
  if size != target.vocab_size:
    raise ValueError(
        f"the drafter was made for a target of {size} tokens, but this target "
        f"has {target.vocab_size}; make the drafter with this target's "
        "tokenizer and size")


def check_siblings(children: int, target: Model) -> None:
  """Raises `ValueError` if `children` exceeds the target's vocabulary size."""
  if children > target.vocab_size:
    raise ValueError(
        f"a node has {children} children, but the vocabulary has "
        f"{target.vocab_size} tokens; siblings must differ: use a narrower "
        "tree")


def check_children(part: Any, width: int) -> None:
  """Raises `ValueError` if a node needs more tokens than can be drafted.

  Args:
    part: heads or network whose `draft_size` is the number of tokens that can
      be drafted.
    width: largest number of distinct children of a node.
  """
  if width > part.draft_size:
    raise ValueError(
        f"a node has {width} children, but the drafter has {part.draft_size} "
        "tokens; siblings must differ: use a narrower tree")


def check_depth(depth: int, deepest: float) -> None:
  """Raises `ValueError` if a draft is deeper than a network can predict."""
  if depth > deepest:
    raise ValueError(
        f"the draft is {depth} tokens deep, but the network predicts {deepest} "
        "tokens: reduce the depth, or train heads that predict more tokens")


def read_token(model: Model, params: chex.ArrayTree, token: jax.Array,
               cache: Cache) -> tuple[ModelOutput, Any]:
  """Runs the model on one token for each of B batch rows.

  Args:
    model: language model.
    params: parameters of the model.
    token: token ids `[B, 1]` int32.
    cache: cache of the model.

  Returns:
    The model's output, and the cache that contains the token.
  """
  out = model(params, token, jnp.zeros_like(token),
              jnp.ones((len(token), 1, 1), bool), cache)
  return out, out.cache.rollback(cache.lengths + 1)


def read_last(model: Model, params: chex.ArrayTree, state: DecodeState,
              cache: Cache, size: int, more: int = 0
              ) -> tuple[jax.Array, jax.Array, Any]:
  """Runs a draft model on the last `size` committed tokens of every row.

  The draft model's cache may lack some committed tokens, and their number may
  differ between rows. If a token is already cached, running the model on it
  writes the same keys and values again. Therefore one pass of fixed size
  completes the cache of every row.

  Args:
    model: draft model.
    params: parameters of the model.
    state: decoding state of the B rows.
    cache: cache of the model; it may lack up to `size` committed tokens.
    size: number of committed tokens that the pass reads.
    more: number of drafted tokens that the model reads after this pass in the
      same round. If it is not 0, the cache reserves space for these tokens, and
      the caller has to call `cache.settle()` after the model has read them.

  Returns:
    The logits `[B, V]` of the token after the root, the hidden state
    `[B, width]` at the root, and the cache with all committed tokens. The root
    is the last committed token.
  """
  start = jnp.maximum(state.lengths - size, 0)
  # If a row has fewer than `size` committed tokens, the pass of fixed size also
  # reads arbitrary tokens after the committed ones. This does no harm, because
  # the next pass overwrites the cache entries of these arbitrary tokens.
  last = (state.lengths - 1 - start)[:, None]
  cache = cache.rollback(start)
  cache = cache.reserve(size + more) if more else cache
  out = _feed(model, params, state, cache, start, size)
  logits = model.logits_at(params, out, last)
  hidden = jnp.take_along_axis(out.hidden, last[..., None], axis=1)
  return logits[:, 0], hidden[:, 0], out.cache.rollback(state.lengths)


def catch_up(model: Model, params: chex.ArrayTree, state: DecodeState,
             cache: Cache, since: jax.Array, size: int = rounds.CATCH_UP
             ) -> Any:
  """Runs the draft model on committed tokens missing from its cache.

  Rounds without a draft commit tokens without running the draft model. The
  model reads these tokens in passes of `size` tokens per row.

  Args:
    model: draft model.
    params: parameters of the model.
    state: decoding state of the B rows. Finished rows do not add passes.
    cache: cache of the model with the first `since` committed tokens.
    since: number `[B]` int32 of committed tokens in the cache.
    size: number of tokens that one pass reads per row.

  Returns:
    The cache. It lacks at most the last two committed tokens of a row, which
    the next draft reads with `read_last(..., size=2)`.
  """
  missing = jnp.where(state.done, 0, state.lengths - 2 - since)

  def read(carry):
    i, cache = carry
    # A block of `size` tokens must not extend past the end of the sequence,
    # because it could exceed the cache's capacity. The last block therefore
    # begins earlier, ends at the end of the sequence, and reads some cached
    # tokens again.
    start = jnp.minimum(since + i * size, state.lengths - size)
    start = jnp.maximum(start, 0)
    out = _feed(model, params, state, cache.rollback(start), start, size)
    return i + 1, out.cache.rollback(start + size)

  carry = jnp.zeros((), jnp.int32), cache
  return jax.lax.while_loop(
      lambda carry: carry[0] * size < jnp.max(missing), read, carry)[1]


def _feed(model: Model, params: chex.ArrayTree, state: DecodeState,
          cache: Cache, start: jax.Array, size: int) -> ModelOutput:
  """Runs the model on `size` tokens per row, from position `start [B]`."""
  batch = state.lengths.shape[0]
  tokens = jnp.take_along_axis(
      state.tokens, start[:, None] + jnp.arange(size), axis=1)
  return model(params, tokens, *topology.causal(batch, size), cache)


def keep_path(cache: Cache, slots: jax.Array, path: jax.Array, size: int,
              count: jax.Array) -> Any:
  """Removes rejected draft tokens from a draft model's cache.

  The returned cache contains the accepted path of the draft tree. The draft
  model has not read the next token, and possibly not the deepest accepted
  token. The cache entries of these two tokens are invalid until
  `read_last(..., size=2)` reads both tokens in the next round.

  Args:
    cache: cache with a block of `size` drafted tokens after the committed ones.
    slots: index of each of the N tree nodes in that block, `[B, N]` int32. It
      is arbitrary for the root and for nodes that the model did not read.
    path: accepted nodes `[B, N]` int32, beginning with the root (see
      `Verdict.path`).
    size: number of tokens of the block.
    count: number `[B]` int32 of tokens committed in this round, including the
      next token.
  """
  accepted = jnp.take_along_axis(slots, path[:, 1:size + 1], axis=1)
  accepted = jnp.pad(accepted, ((0, 0), (0, size - accepted.shape[1])))
  return cache.commit(accepted, count).settle()
