"""Chains that end by a rule, for the enumeration."""

from collections.abc import Callable

import jax
import numpy as np

from specjax.exact.drafts import Drafts

_CHUNK = 1024  # chains of one call: one compiled shape for each length

Kept = Callable[[jax.Array, jax.Array], jax.Array]


def kept_by(stop: Kept) -> Callable[[Drafts], Drafts]:
  """A function that ends chains as `stop` says; see `certify`.

  Raises:
    ValueError: it is neither a rule nor a function.
  """
  if isinstance(stop, type) or not callable(stop):
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
