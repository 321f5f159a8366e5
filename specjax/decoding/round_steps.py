"""Steps that rounds and drafters share."""


import jax
import jax.numpy as jnp

from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelFn

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


def once(wanted: jax.Array, function, carry):
  """`function(carry)` if it is wanted, a `[]` bool, and else `carry`.

  A loop of at most one step: `lax.cond` copies what it passes through, and
  would do so with every cache.
  """
  return jax.lax.while_loop(
      lambda loop: loop[0],
      lambda loop: (jnp.zeros((), bool), function(loop[1])), (wanted, carry))[1]


def check_slack(model: ModelFn, tokens: int) -> None:
  """Checks that a ring of last tokens holds on while some are taken back.

  It would read less of a text after some drafts than after others, so that the
  law of a token depended on where its draft began.

  Args:
    model: a `ModelFn`, or what has one as its `model`.
    tokens: the most that a drafter takes back of its cache.

  Raises:
    ValueError: its cache, a `Streaming`, has less slack.
  """
  while hasattr(model, "model"):
    model = model.model
  slack = getattr(getattr(model, "cache", None), "slack", tokens)
  if slack < tokens:
    raise ValueError(
        f"the drafting model's cache has slack={slack}, and up to {tokens} "
        f"tokens are taken back of it; give Streaming(slack={tokens})")
