"""Base class and helpers of networks on the target's features.

At position t a feature layer reads g_t, the target's feature at t, and x_{t+1},
the next token (`models.features`). After n committed tokens the layer's cache
contains n - 1 positions, all computed from the target's features. While
drafting, the layer reads its own output instead. The cache does not keep these
positions. After verification the layer reads the accepted tokens again, with
the target's features.
"""

from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax.decoding import prefill
from specjax.decoding import rounds
from specjax.interfaces import Model
from specjax.methods.drafting import Network
from specjax.methods.features.network import FeatureHeads
from specjax.trees import topology
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@struct.dataclass
class FeatureState:
  """State of a feature layer after the committed tokens.

  Attributes:
    cache: cache of the layer. It contains the positions of all committed tokens
      except the last.
    hidden: layer's output `[B, D]` at the last position in the cache, which the
      next draft step reads.
    read: input `[B, D]` of the LM head at this position. Its logits are those
      of the token after the root.
    known: `[B]` bool, False for rows with a single token, which have no feature
      yet.
  """

  cache: Any
  hidden: jax.Array
  read: jax.Array
  known: jax.Array


class FeatureNetwork(Network):
  """Base class of networks whose `heads` start from the target's features.

  Decode with the target that `heads.attach` returns. `params["drafter"]`
  contains the parameters of the heads. The heads may also use the embedding and
  head of `params["target"]`. After a prompt of one token there are no features,
  so the first draft is padding.
  """

  heads: FeatureHeads

  # Up to the root the features come from the target, after it from the heads.
  # So the draft distribution depends on the position where the draft began.
  context_only = False
  reads_rounds = True

  @property
  def vocab_size(self) -> int:
    return self.heads.vocab_size

  @property
  def draft_size(self) -> int:
    return self.heads.draft_size

  @property
  def context_length(self) -> float:
    return self.heads.context_length

  def bind(self, target: Model) -> Any:
    self.heads.check_target(target)
    return self

  def logits(self, params: chex.ArrayTree, read: jax.Array) -> jax.Array:
    """Returns the logits `[B, S, V]` for the LM head's input `[B, S, D]`."""
    return self.heads.whole(
        self.heads.logits(params["drafter"], params["target"], read))


def chunked(prompt: Prompt, prefill_output: ModelOutput
            ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
  """Splits prompts into K chunks of S columns, which a scan reads in order.

  Args:
    prompt: prompts.
    prefill_output: target's output for the prompts, with features of width F.

  Returns:
    `((hidden, places), causal)`: the features `[K, B, S, F]` and the positions
    `[K, S]` of the chunks, and a causal mask `[B, S, S]` within a chunk.
  """
  batch, columns = prompt.tokens.shape
  size = prefill.chunk_size(columns)
  split = lambda x: x.reshape(batch, -1, size, *x.shape[2:]).swapaxes(0, 1)
  _, causal = topology.causal(batch, size)
  places = jnp.arange(columns, dtype=jnp.int32).reshape(-1, size)
  return (split(prefill_output.hidden), places), causal


def read_prompt(heads: FeatureHeads, params: chex.ArrayTree, prompt: Prompt,
                prefill_output: ModelOutput) -> FeatureState:
  """Runs a feature layer on the prompts in chunks and returns its state."""
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
  # All cache lengths are 0. If they were constants, XLA would evaluate
  # attention over the empty slots at compile time. So they are computed from
  # the prompt.
  cache, found = jax.lax.scan(
      read, cache.rollback(jnp.minimum(prompt.lengths, 0)), chunks)
  last = jnp.maximum(prompt.lengths - 2, 0)[:, None, None]
  hidden, read = (
      jnp.take_along_axis(x.swapaxes(0, 1).reshape(
          *prompt.tokens.shape, -1), last, axis=1)[:, 0] for x in found)
  return FeatureState(cache=cache.rollback(prompt.lengths - 1), hidden=hidden,
                      read=read, known=prompt.lengths >= 2)


def on_path(x: jax.Array, verdict: Verdict, size: int) -> jax.Array:
  """Returns `x [B, N, ...]` at the first `size` nodes of the accepted path."""
  path = verdict.path[:, :size]
  return jnp.take_along_axis(
      x, path.reshape(*path.shape, *(1,) * (x.ndim - 2)), axis=1)


def read_round(heads: FeatureHeads, params: chex.ArrayTree, state: FeatureState,
               draft: Draft, verdict: Verdict, target_output: ModelOutput,
               count: jax.Array, depth: int) -> FeatureState:
  """Runs the layer on the tokens that a round committed; returns its state.

  Args:
    heads: feature layer.
    params: parameters `{"target": ..., "drafter": ...}`.
    state: state before the round.
    draft: batched drafts.
    verdict: batched verdicts.
    target_output: output of the target's verifying pass.
    count: number `[B]` int32 of tokens that the round committed.
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
