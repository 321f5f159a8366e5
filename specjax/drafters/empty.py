"""No draft at all: the loop becomes autoregressive decoding."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.types import Draft


@dataclasses.dataclass(frozen=True, kw_only=True)
class Empty:
  """Proposes the root alone, so that every round emits one token.

  Attributes:
    vocab_size: V; the decoder fills it in.
  """

  vocab_size: int | None = None

  num_nodes = 1
  chain = True
  autoregressive = True
  proposal = "deterministic"

  def bind(self, target, transform) -> "Empty":
    """The same drafter, for this target."""
    del transform
    return dataclasses.replace(self, vocab_size=target.vocab_size)

  def init(self, params, prompt, prefill_output):
    del params, prompt, prefill_output

  def propose(self, params, keys, state):
    """A draft of N = 1 node for each of the B rows."""
    del params, keys
    return root_only(state, self.vocab_size), state.drafter

  def commit(self, params, drafter_state, draft, verdict, target_output, count):
    del params, draft, verdict, target_output, count
    return drafter_state


def root_only(state, vocab_size: int) -> Draft:
  """The batch of drafts that propose nothing."""
  root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
  tokens = jnp.zeros((root.shape[0], 0), jnp.int32)
  probs = jnp.zeros((root.shape[0], 0, vocab_size), jnp.float32)
  return jax.vmap(Draft.chain)(root[:, 0], tokens, probs)
