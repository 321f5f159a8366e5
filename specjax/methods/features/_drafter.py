"""Base of drafters with a layer on the target's features.

At position t a feature layer reads (g_t, x_{t+1}), see `models.features`. After
n committed tokens its cache contains n - 1 positions, all computed from the
target's features. Positions drafted in a round are not committed to the cache.
Accepted tokens are read again with the features that the target computed.
"""

from typing import Any

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
  """State of the layer after the committed tokens.

  Attributes:
    cache: cache of the layer for all positions except the last token's.
    hidden: output `[B, D]` at the last position, input of the next step.
    read: input `[B, D]` of the head there, for the token after the root.
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

  Every device stores all of the heads. `commit` reads or stores the tokens of
  every round, drafted or not, so `catch_up` has nothing to read.
  """

  heads: FeatureHeads
  # Features below the root come from the heads, not from the target, so q
  # depends on the start of the draft.
  autoregressive = False

  @property
  def context_length(self) -> int:
    return self.heads.context_length

  def catch_up(self, params: Any, state: DecodeState, since: jax.Array) -> Any:
    """Returns the state unchanged because `commit` reads all tokens."""
    del params, since
    return state.drafter

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Replicates the heads."""
    del axis, size
    return PartitionSpec()


def check_children(heads: FeatureHeads | ParallelHeads, width: int) -> None:
  """Raises a `ValueError` if the siblings cannot all differ.

  Args:
    heads: heads that draft.
    width: largest number of children of a node that must differ.
  """
  if width > heads.draft_size:
    raise ValueError(
        f"a node has {width} children and the drafter knows {heads.draft_size} "
        "tokens; siblings must differ: use a narrower tree")


def chunked(prompt: Prompt, prefill_output: ModelOutput
            ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
  """Splits a prompt into K chunks of S columns.

  Returns:
    `(hidden [K, B, S, F], places [K, S])` of the chunks, and a causal mask
    `[B, S, S]` within a chunk.
  """
  batch, columns = prompt.tokens.shape
  size = prefill.chunk_size(columns)
  split = lambda x: x.reshape(batch, -1, size, *x.shape[2:]).swapaxes(0, 1)
  _, causal = topology.causal(batch, size)
  places = jnp.arange(columns, dtype=jnp.int32).reshape(-1, size)
  return (split(prefill_output.hidden), places), causal


def read_prompt(heads: FeatureHeads, params: Any, prompt: Prompt,
                prefill_output: ModelOutput) -> FeatureState:
  """Returns the state after the prompts."""
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
  # XLA must not know that the cache is empty, see `prefill.empty_cache`.
  cache, found = jax.lax.scan(
      read, cache.rollback(jnp.minimum(prompt.lengths, 0)), chunks)
  last = jnp.maximum(prompt.lengths - 2, 0)[:, None, None]
  hidden, read = (
      jnp.take_along_axis(x.swapaxes(0, 1).reshape(
          *prompt.tokens.shape, -1), last, axis=1)[:, 0] for x in found)
  return FeatureState(cache=cache.rollback(prompt.lengths - 1), hidden=hidden,
                      read=read, known=prompt.lengths >= 2)


def on_path(x: jax.Array, verdict: Verdict, size: int) -> jax.Array:
  """Returns `x [B, N, ...]` along the path, `[B, size, ...]`."""
  path = verdict.path[:, :size]
  return jnp.take_along_axis(
      x, path.reshape(*path.shape, *(1,) * (x.ndim - 2)), axis=1)


def read_round(heads: FeatureHeads, params: Any, state: FeatureState,
               draft: Draft, verdict: Verdict, target_output: ModelOutput,
               count: jax.Array, depth: int) -> FeatureState:
  """Returns the state after a round, from the features of accepted tokens.

  Args:
    heads: feature layer.
    params: parameters `{"target", "drafter"}`.
    state: state before the round.
    draft: batched drafts.
    verdict: batched verdicts.
    target_output: output of the verifying pass.
    count: number `[B]` int32 of committed tokens.
    depth: depth of the deepest node.
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


def growing(heads: FeatureHeads, params: Any, state: FeatureState):
  """Returns a step of `_trees` for the layer, with its initial values.

  Returns:
    The step; its carry, a cache and the hidden states `[B, S, D]` of the
    previous step's nodes; and the logits `[B, V]` of the token after the root.
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


def chaining(heads: FeatureHeads, params: Any, state: FeatureState, gamma: int):
  """Returns the inputs of `stop_rules.draw_until` for the layer.

  Returns:
    The first forecast; `read`; and its carry, a cache with room for the tokens
    of the chain and the hidden state `[B, 1, D]` of the last one.
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
  """Returns the drafts, with padding in rows that are not `known [B]`."""
  return draft.replace(
      probs=jnp.where(known[:, None, None], draft.probs, 0))
