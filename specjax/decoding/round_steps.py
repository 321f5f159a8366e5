"""Steps that rounds and drafters share."""

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import Verdict

CATCH_UP = 16  # tokens of a pass that reads what rounds without a draft added


def roots(state: DecodeState) -> jax.Array:
  """`[B]`, the last committed token of every row of a `DecodeState`."""
  return jnp.take_along_axis(
      state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]


def root_only(state: DecodeState, vocab_size: int) -> Draft:
  """The batch of drafts that propose nothing."""
  root = roots(state)
  tokens = jnp.zeros((root.shape[0], 0), jnp.int32)
  probs = jnp.zeros((root.shape[0], 0, vocab_size), jnp.float32)
  return jax.vmap(Draft.chain)(root, tokens, probs)


def path_tokens(draft: Draft, verdict: Verdict) -> jax.Array:
  """Returns `[B, N]` int32, the token after each node of the path."""
  chex.assert_equal_shape([draft.tokens, verdict.path])
  below = jnp.roll(verdict.path, -1, axis=-1)
  tokens = jnp.take_along_axis(draft.tokens, below, axis=-1)
  ends = jnp.arange(tokens.shape[-1]) == verdict.num_accepted[:, None]
  return jnp.where(ends, verdict.next_token[:, None], tokens)


def once(wanted: jax.Array, function, carry):
  """`function(carry)` if it is wanted, a `[]` bool, and else `carry`.

  A loop of at most one step: `lax.cond` copies what it passes through, and
  would do so with every cache.
  """
  return jax.lax.while_loop(
      lambda loop: loop[0],
      lambda loop: (jnp.zeros((), bool), function(loop[1])), (wanted, carry))[1]


def check_slack(part: Model | Drafter, tokens: int) -> None:
  """Checks that a ring of last tokens holds on while some are taken back.

  It would read less of a text after some drafts than after others, so that the
  law of a token depended on where its draft began.

  Args:
    part: the model, or the drafter that has it.
    tokens: the most that a drafter takes back of its cache.

  Raises:
    ValueError: its cache, a `Streaming`, has less slack.
  """
  if part.slack < tokens:
    raise ValueError(
        f"the cache of the draft model has slack={part.slack}, and up to "
        f"{tokens} tokens are taken back; use Streaming(slack={tokens})")
