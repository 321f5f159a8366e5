"""Chains that end by a rule, for the enumeration."""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.methods import stop_rules
from specjax.exact.drafts import Drafts

_CHUNK = 1024  # chains of one call: one compiled shape for each length

Kept = Callable[[jax.Array, jax.Array], jax.Array]


def kept_by(stop: "stop_rules.StopRule | Kept") -> Callable[[Drafts], Drafts]:
  """A function that ends chains as `stop` says; see `certify`.

  Raises:
    ValueError: it is neither a rule nor a function.
  """
  if isinstance(stop, stop_rules.StopRule):
    if stop.has_params:
      raise ValueError(
          f"the stop rule {type(stop).__name__} has parameters; give a "
          "function (probs, tokens) -> length, made of stop_rules.kept")
    # Of a hidden state nothing is known but the law that came of it.
    stop = functools.partial(_of_rule, stop)
  elif isinstance(stop, type) or not callable(stop):
    raise ValueError(f"stop is {stop!r}; it must be a drafters.stop_rules."
                     "StopRule, or a function (probs, tokens) -> length")
  compiled = jax.jit(jax.vmap(stop))

  def ended(drafts: Drafts) -> Drafts:
    probs, tokens = drafts.probs[:, 1:], drafts.tokens[:, 1:].astype(np.int32)
    count = len(tokens)
    fill = lambda x: np.concatenate(
        [x, np.repeat(x[:1], -count % _CHUNK, axis=0)])
    probs, tokens = fill(probs), fill(tokens)
    with jax.enable_x64(True):
      lengths = [np.asarray(compiled(probs[i:i + _CHUNK], tokens[i:i + _CHUNK]))
                 for i in range(0, len(tokens), _CHUNK)]
    return drafts.cut(np.concatenate(lengths)[:count])

  return ended


def _of_rule(rule, probs, tokens):
  return stop_rules.kept(rule, None, probs, probs, jnp.zeros((), jnp.int32),
                         tokens)
