"""Base of drafters with a layer on the target's features.

At position t a feature layer reads g_t, the target's feature at t, and x_{t+1},
the next token (`models.features`). After n committed tokens the layer's cache
contains n - 1 positions, all computed from the target's features. While
drafting, the layer continues from its own output; these positions are not
committed to the cache. After verification the layer reads the accepted tokens
again, with the features that the target computed.
"""

from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.decoding import prefill
from specjax.decoding import rounds
from specjax.interfaces import Drafter
from specjax.methods.blocks.parallel_network import ParallelHeads
from specjax.methods.features.network import FeatureHeads
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@struct.dataclass
class FeatureState:
  """State of a feature layer after the committed tokens.

  Attributes:
    cache: cache of the layer for all positions except the last token's.
    hidden: layer's output `[B, D]` at the last position, input of the next
      draft step.
    read: input `[B, D]` of the LM head at the last position, for the logits of
      the token after the root.
    known: `[B]` bool, False if the sequence has one token and thus no feature.
    rule: state of the stop rule; () without one.
  """

  cache: Any
  hidden: jax.Array
  read: jax.Array
  known: jax.Array
  rule: Any = ()


class LayerDrafter(Drafter):
  """Base of drafters whose `heads` continue from the target's features.

  Every device stores all parameters of the heads. `commit` reads or stores the
  tokens of every round, also of rounds without a draft. So `catch_up` has
  nothing to read.
  """

  heads: FeatureHeads
  # Below the root the features come from the heads, not from the target. So the
  # draft distribution depends on the position where the draft began.
  autoregressive = False

  @property
  def context_length(self) -> int:
    return self.heads.context_length

  def catch_up(self, params: chex.ArrayTree, state: DecodeState,
               since: jax.Array) -> Any:
    """Returns the state unchanged because `commit` reads all tokens."""
    del params, since
    return state.drafter

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Replicates the heads."""
    del axis, size
    return PartitionSpec()


def check_children(heads: FeatureHeads | ParallelHeads, width: int) -> None:
  """Raises `ValueError` if the heads have too few tokens for the siblings.

  Args:
    heads: heads that draft.
    width: largest number of distinct children of a node.
  """
  if width > heads.draft_size:
    raise ValueError(
        f"a node has {width} children, but the drafter has {heads.draft_size} "
        "tokens; siblings must differ: use a narrower tree")


def chunked(prompt: Prompt, prefill_output: ModelOutput
            ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
  """Splits prompts into K chunks of S columns, which a scan reads in order.

  Args:
    prompt: prompts.
    prefill_output: target's output for the prompts, with features of width F.

  Returns:
    `(hidden [K, B, S, F], places [K, S])`: features and positions of the
    chunks; and a causal mask `[B, S, S]` within a chunk.
  """
  batch, columns = prompt.tokens.shape
  size = prefill.chunk_size(columns)
  split = lambda x: x.reshape(batch, -1, size, *x.shape[2:]).swapaxes(0, 1)
  _, causal = topology.causal(batch, size)
  places = jnp.arange(columns, dtype=jnp.int32).reshape(-1, size)
  return (split(prefill_output.hidden), places), causal


def read_prompt(heads: FeatureHeads, params: chex.ArrayTree, prompt: Prompt,
                prefill_output: ModelOutput) -> FeatureState:
  """Returns the state after a feature layer read the prompts in chunks."""
  own, target = params["drafter"], params["target"]
  chunks, causal = chunked(prompt, prefill_output)
  after = jnp.roll(prompt.tokens, -1, axis=1)

  def read(cache, chunk):
    hidden, places = chunk
    out = heads.step(own, target, heads.enter(own, heads.taps_of(hidden)),
                     after[:, places], visible=causal, cache=cache)
    cache = out.cache.after(out.hidden).rollback(
        cache.lengths + places.shape[0])
    return cache, (out.hidden, out.read)

  cache = heads.init_cache(own, prompt.lengths.shape[0], prompt.capacity)
  # With constant lengths, XLA would evaluate attention over the empty slots at
  # compile time. So the lengths, all 0, are computed from the prompt.
  cache, found = jax.lax.scan(
      read, cache.rollback(jnp.minimum(prompt.lengths, 0)), chunks)
  last = jnp.maximum(prompt.lengths - 2, 0)[:, None, None]
  hidden, read = (
      jnp.take_along_axis(x.swapaxes(0, 1).reshape(
          *prompt.tokens.shape, -1), last, axis=1)[:, 0] for x in found)
  return FeatureState(cache=cache.rollback(prompt.lengths - 1), hidden=hidden,
                      read=read, known=prompt.lengths >= 2)


def on_path(x: jax.Array, verdict: Verdict, size: int) -> jax.Array:
  """Gathers `x [B, N, ...]` at the first `size` nodes of the accepted path."""
  path = verdict.path[:, :size]
  return jnp.take_along_axis(
      x, path.reshape(*path.shape, *(1,) * (x.ndim - 2)), axis=1)


def read_round(heads: FeatureHeads, params: chex.ArrayTree, state: FeatureState,
               draft: Draft, verdict: Verdict, target_output: ModelOutput,
               count: jax.Array, depth: int) -> FeatureState:
  """Returns the state after the layer read a round's accepted tokens.

  Args:
    heads: feature layer.
    params: parameters `{"target", "drafter"}`.
    state: state before the round.
    draft: batched drafts.
    verdict: batched verdicts.
    target_output: output of the target's verifying pass.
    count: number `[B]` int32 of committed tokens.
    depth: depth of the deepest draft node.
  """
  own, target = params["drafter"], params["target"]
  size = min(depth + 1, draft.tokens.shape[1])
  taps = on_path(heads.taps_of(target_output.hidden), verdict, size)
  _, causal = topology.causal(len(count), size)
  out = heads.step(
      own, target, heads.enter(own, taps),
      rounds.path_tokens(draft, verdict)[:, :size],
      visible=causal, cache=state.cache)
  cache = out.cache.after(out.hidden).rollback(state.cache.lengths + count)
  last = jnp.maximum(count - 1, 0)[:, None, None]
  newest = lambda new, old: jnp.where(
      (count > 0)[:, None],
      jnp.take_along_axis(new, last, axis=1)[:, 0], old)
  return state.replace(
      cache=cache, hidden=newest(out.hidden, state.hidden),
      read=newest(out.read, state.read), known=state.known | (count > 0))


def growing(heads: FeatureHeads, params: chex.ArrayTree, state: FeatureState):
  """Returns the `step`, `carry` and `logits` of `_trees.grow` for the layer.

  Returns:
    The step; its initial carry, a cache and the hidden states `[B, S, D]` of
    the previous level's nodes; and the logits `[B, V]` of the token after the
    root.
  """
  own, target = params["drafter"], params["target"]
  laws = lambda read: heads.whole(heads.logits(own, target, read))

  def step(tokens, depths, ancestors, above, carry):
    cache, hidden = carry
    hidden = jnp.take_along_axis(hidden, above[..., None], axis=1)
    out = heads.step(
        own, target, hidden, tokens, visible=ancestors, cache=cache,
        positions=cache.lengths[:, None] + depths)
    return laws(out.read), (out.cache, out.hidden)

  return (step, (state.cache, state.hidden[:, None]),
          laws(state.read[:, None])[:, 0])


def chaining(heads: FeatureHeads, params: chex.ArrayTree, state: FeatureState,
             gamma: int):
  """Returns the inputs of `stop_rules.draw_until` for the layer.

  Returns:
    The forecast after the root, logits `[B, V]` and hidden states `[B, D]`; the
    function `read(token, carry)`, which returns the forecast after a drafted
    token; and its carry, a cache with room for the tokens of the chain and the
    hidden state `[B, 1, D]` of the last token.
  """
  own, target = params["drafter"], params["target"]

  def forecast(read, hidden):
    logits = heads.whole(heads.logits(own, target, read))
    return logits[:, 0], hidden[:, 0]

  def read(token, carry):
    cache, hidden = carry
    out = heads.step(own, target, hidden, token,
                     visible=jnp.ones((len(token), 1, 1), bool), cache=cache)
    return forecast(out.read, out.hidden), (
        out.cache.rollback(cache.lengths + 1), out.hidden)

  hidden = state.hidden[:, None]
  return forecast(state.read[:, None], hidden), read, (
      state.cache.reserve(gamma), hidden)


def known_only(draft: Draft, known: jax.Array) -> Draft:
  """Returns the drafts, all padding in rows where `known [B]` is False."""
  return draft.replace(
      probs=jnp.where(known[:, None, None], draft.probs, 0))
