"""Drafters of kinds that the library does not have yet, through its seams.

One carries features from parents to children, one reads a text of its row, one
is a decoder itself. They are toys that touch nothing of the core, and
`contributions.py` lists them: their output is the target's.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

import specjax as sj
from specjax.decoding import rounds
from specjax.methods import drafting
from specjax.methods.heads import _forecasts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features(drafting.Network):
  """A toy EAGLE: a feature of the parent and the token give the next feature.

  f(child) = tanh(W f(parent) + e(token)), logits = f U; the root's parent is
  the target's own hidden state.
  """

  vocab_size: int
  context_length = math.inf
  reads_rounds = True

  def init(self, params, prompt, output):
    before = jnp.maximum(prompt.lengths - 2, 0)[:, None, None]
    hidden = jnp.take_along_axis(output.hidden, before, axis=1)
    return _forecasts.Forecast(hidden[:, 0], prompt.lengths >= 2)

  def begin(self, params, state, shape):
    return self.extend(params, rounds.roots(state)[:, None],
                       state.drafter.values[:, None])

  def extend(self, params, token, carry):
    logits, carry = self.step(
        params, token, None, None, jnp.zeros_like(token), carry)
    return (logits[:, 0], carry[:, 0]), carry

  def step(self, params, tokens, depths, ancestors, above, carry):
    own = params["drafter"]
    parents = jnp.take_along_axis(carry, above[..., None], axis=1)
    features = jnp.tanh(parents @ own["mix"] + own["embedding"][tokens])
    return features @ own["head"], features

  def commit(self, params, memory, draft, slots, shape, verdict, output, count):
    return memory.advance(output.hidden, verdict, count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference(sj.interfaces.Drafter):
  """Drafts what follows the root in the row's reference text (LLMA).

  `context["reference"]` is `[B, T]` int32, filled up with -1.
  """

  gamma: int
  vocab_size: int
  num_uniforms = 0
  provides = ("chain", "iid", "conditional", "autoregressive")

  def init(self, params, prompt, prefill_output):
    return None

  def propose(self, params, uniforms, state):
    text, roots = state.context["reference"], rounds.roots(state)
    found = text == roots[:, None]
    start = jnp.argmax(found, axis=1)[:, None] + 1 + jnp.arange(self.gamma)
    tokens = jnp.take_along_axis(text, start, axis=1, mode="fill",
                                 fill_value=-1)
    tokens = jnp.where(found.any(1)[:, None], tokens, -1)
    probs = jax.nn.one_hot(tokens, self.vocab_size)  # -1 is padding
    return jax.vmap(sj.Draft.chain)(roots, jnp.maximum(tokens, 0), probs), None

  def commit(self, params, drafter, draft, verdict, target_output, count, own):
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(sj.interfaces.Drafter):
  """A decoder as a drafter: its output's law is that of its own target."""

  inner: sj.Decoder
  gamma: int
  provides = ("chain", "iid", "conditional", "autoregressive")

  def init(self, params, prompt, prefill_output):
    keys = jax.random.split(jax.random.key(0), prompt.lengths.shape[0])
    prompt = prompt.replace(
        capacity=prompt.capacity + self.num_nodes + self.inner.num_nodes)
    return self.inner.start(params["drafter"], prompt, prompt.lengths, keys)

  def propose(self, params, keys, state):
    pad = state.drafter.tokens.shape[1] - state.tokens.shape[1]
    # One token more than drafted, so that the last drafted one is in the cache.
    inner = state.drafter.replace(
        tokens=jnp.pad(state.tokens, ((0, 0), (0, pad))), keys=keys,
        lengths=state.lengths, limits=state.lengths + self.gamma + 1,
        done=jnp.zeros_like(state.done), temperature=state.temperature,
        rounds=jnp.zeros_like(state.rounds),
        target_cache=state.drafter.target_cache.rollback(state.lengths - 1))
    rows = state.lengths.shape[0]
    laws = jnp.zeros((rows, 2 * self.num_nodes + self.inner.num_nodes,
                      self.inner.target.vocab_size))

    def one_round(carry, _):
      inner, laws = carry
      new, _, trace = self.inner.decode_round(
          params["drafter"], inner, traced=True)
      mine = jnp.take_along_axis(
          trace.target_probs, trace.verdict.path[..., None], axis=1)
      put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(
          row, new.astype(row.dtype), at, 0))
      laws = jnp.where(inner.done[:, None, None], laws,
                       put(laws, mine, inner.lengths - state.lengths))
      return (new, laws), None

    (inner, laws), _ = jax.lax.scan(
        one_round, (inner, laws), length=self.gamma + 1)
    at = state.lengths[:, None] + jnp.arange(self.gamma)
    tokens = jnp.take_along_axis(inner.tokens, at, axis=1)
    return jax.vmap(sj.Draft.chain)(
        rounds.roots(state), tokens, laws[:, :self.gamma]), inner

  def commit(self, params, drafter, draft, verdict, target_output, count, own):
    return drafter
