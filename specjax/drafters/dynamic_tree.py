"""A small language model drafts a tree whose shape follows its confidence.

EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 4), for any language model.
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax.drafters import common
from specjax.prefill import read_prompt
from specjax.sampling import LogitsTransform
from specjax.types import Draft
from specjax.types import ModelFn


@struct.dataclass
class DynamicTreeState:
  """What a `DynamicTree` keeps between propose and commit.

  Attributes:
    cache: the model's.
    slots: `[B, N]` int32, where each node lies in the block that was fed.
  """

  cache: Any
  slots: jax.Array


@struct.dataclass
class _Frontier:
  """The `top_k` nodes of a level that are expanded; K = `top_k`.

  Attributes:
    candidates: `[B, K]` int32, their numbers among all candidates.
    tokens: `[B, K]` int32.
    values: `[B, K]`, the log of the product of confidences on their path.
    ancestors: `[B, K, T]` bool, over the T frontier nodes so far.
  """

  candidates: jax.Array
  tokens: jax.Array
  values: jax.Array
  ancestors: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTree:
  """Expands the likeliest nodes of every level, then keeps the likeliest.

  The value of a node is the product of the model's probabilities on its path.
  Every level expands its `top_k` best nodes by `top_k` children each; of all
  candidates the N - 1 best are drafted. A child is not better than its parent
  and loses ties, so they are connected. Nothing is drawn: the rows of q are
  one-hot, and the tree is a function of the context.

  Attributes:
    model: a `ModelFn` over the target's vocabulary.
    depth: levels below the root, one pass each.
    top_k: nodes expanded of a level, and children of each.
    num_nodes: N, the root included.
    transform: from the model's logits to its confidences; it need not be the
      decoder's, and at temperature 0 there would be no second best.
  """

  model: ModelFn
  depth: int = 6
  top_k: int = 10
  num_nodes: int = 60
  transform: LogitsTransform = LogitsTransform()

  conditional = True
  proposal = "deterministic"

  def __post_init__(self):
    if self.depth < 1 or self.top_k < 1:
      raise ValueError(f"depth is {self.depth} and top_k {self.top_k}; both "
                       "must be at least 1")
    most = 1 + self.top_k + (self.depth - 1) * self.top_k**2
    if not 2 <= self.num_nodes <= most:
      raise ValueError(f"num_nodes is {self.num_nodes}; depth {self.depth} and "
                       f"top_k {self.top_k} allow 2 to {most}: change one of "
                       "the three")

  @property
  def chain(self) -> bool:
    return self.top_k == 1

  @property
  def iid(self) -> bool:
    return self.chain

  @property
  def autoregressive(self) -> bool:
    # Whether a node of a tree is drafted depends on all the others.
    return self.chain

  @property
  def context_length(self) -> int:
    return self.model.context_length

  @property
  def _fed(self) -> int:
    return self.top_k * (self.depth - 1)

  def bind(self, target, transform) -> "DynamicTree":
    """The same drafter; its confidences do not follow the transform.

    Raises:
      ValueError: the vocabularies differ, or top_k is larger than they are.
    """
    del transform
    common.check_vocabulary(self.model, target)
    if self.top_k > target.vocab_size:
      raise ValueError(f"top_k is {self.top_k}; the vocabulary has "
                       f"{target.vocab_size} tokens: choose at most that")
    return self

  def init(self, params, prompt, prefill_output):
    """The cache after the prompt, with room for all that is expanded."""
    del prefill_output
    more = max(0, self._fed - self.num_nodes)
    prompt = prompt.replace(capacity=prompt.capacity + more)
    cache = read_prompt(self.model, params["drafter"], prompt).cache
    batch = prompt.lengths.shape[0]
    return DynamicTreeState(
        cache=cache, slots=jnp.zeros((batch, self.num_nodes), jnp.int32))

  def propose(self, params, keys, state):
    """Drafts a tree for every row.

    Args:
      params: `{"drafter": parameters of the model}`.
      keys: unused.
      state: the `DecodeState`.

    Returns:
      `(Draft, DynamicTreeState)`, batched.
    """
    del keys
    params, batch = params["drafter"], state.lengths.shape[0]
    logits, cache = common.feed_last(
        self.model, params, state, state.drafter.cache, size=2)
    tokens, values = self._children(logits[:, None], jnp.zeros((batch, 1)))
    numbers = jnp.arange(1, self.top_k + 1, dtype=jnp.int32)  # the root is 0
    frontier = _Frontier(
        candidates=jnp.tile(numbers, (batch, 1)), tokens=tokens, values=values,
        ancestors=jnp.tile(jnp.eye(self.top_k, dtype=bool), (batch, 1, 1)))
    found = [(tokens, values, jnp.zeros_like(tokens))]
    fed = jnp.zeros((batch, 0), jnp.int32)
    for depth in range(1, self.depth):
      out = self.model(params, frontier.tokens,
                       jnp.full_like(frontier.tokens, depth - 1),
                       frontier.ancestors, cache)
      cache = out.cache
      fed = jnp.concatenate([fed, frontier.candidates], axis=1)
      tokens, values = self._children(out.logits, frontier.values)
      found.append((tokens, values,
                    jnp.repeat(frontier.candidates, self.top_k, axis=1)))
      first = 1 + self.top_k + (depth - 1) * self.top_k**2
      frontier = self._best(frontier, tokens, values, first)
    columns = [jnp.concatenate(x, axis=1) for x in zip(*found)]
    draft, slots = jax.vmap(self._kept)(common.roots(state), *columns, fed)
    return draft, DynamicTreeState(cache=cache, slots=slots)

  def _children(self, logits, values):
    """The `top_k` children of F nodes: tokens and values `[B, F * top_k]`."""
    probs, tokens = jax.lax.top_k(self.transform(logits), self.top_k)
    values = values[..., None] + jnp.minimum(jnp.log(probs), 0)
    return (tokens.reshape(tokens.shape[0], -1),
            values.reshape(tokens.shape[0], -1))

  def _best(self, frontier, tokens, values, first):
    """The next frontier out of the children of this one."""
    values, chosen = jax.lax.top_k(values, self.top_k)
    own = jnp.tile(jnp.eye(self.top_k, dtype=bool), (values.shape[0], 1, 1))
    above = jnp.take_along_axis(
        frontier.ancestors, (chosen // self.top_k)[..., None], axis=1)
    return _Frontier(
        candidates=first + chosen, values=values,
        tokens=jnp.take_along_axis(tokens, chosen, axis=1),
        ancestors=jnp.concatenate([above, own], axis=-1))

  def _kept(self, root, tokens, values, parents, fed):
    """The best candidates of one row as a draft, and their slots `[N]`."""
    # Equal values go to the lower number, hence to the parent.
    values, best = jax.lax.top_k(values, self.num_nodes - 1)
    order = jnp.argsort(best)
    values, best = values[order], best[order]
    tokens, parents = tokens[best], parents[best]
    nodes = jnp.concatenate([jnp.zeros_like(best[:1]), best + 1])
    place = jnp.argmax(parents[:, None] == nodes, axis=-1).astype(jnp.int32)
    slots = jnp.argmax(nodes[:, None] == fed, axis=-1) if self._fed else nodes
    probs = jax.nn.one_hot(tokens, self.model.vocab_size)
    # Certainty must not hide that the model's numbers broke down.
    probs = jnp.where(jnp.isnan(values)[:, None], jnp.nan, probs)
    draft = Draft.tree(root, jnp.append(jnp.full_like(place[:1], -1), place),
                       tokens, probs)
    return draft, slots.astype(jnp.int32)

  def commit(self, params, drafter_state, draft, verdict, target_output, count):
    """The cache with the accepted path moved together."""
    del params, draft, target_output
    cache = common.keep_path(drafter_state.cache, drafter_state.slots,
                             verdict.path, self._fed, count)
    return drafter_state.replace(cache=cache)
