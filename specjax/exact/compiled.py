"""A rule's law and commit, compiled for many drafts at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces import check_verifier
from specjax.interfaces import Verifier
from specjax.types import Draft
from specjax.types import Verdict

# Compiled once and called thousands of times, whatever XLA_FLAGS says.
_OPTIMISED = {"xla_backend_optimization_level": "2"}
_FEW = 8  # a chunk of a small enumeration is so many times smaller


class Compiled:
  """A rule as it is now, compiled once for several enumerations.

  Whatever enumerates a rule takes a `Compiled` in its place. Nothing else
  keeps compiled code: a rule that was changed, or whose class was edited in a
  notebook, is compiled again.

  Attributes:
    rule: the verification rule.
  """

  def __init__(self, rule: Verifier):
    check_verifier(rule)
    self.rule = rule

    def law(tokens, parents, q, p, state):
      draft = Draft(tokens=tokens, parents=parents, probs=q)
      law = rule.evaluate(draft, p, state)
      survival = None
      if rule.has_survival:
        depths = jnp.arange(tokens.shape[0])  # of a chain
        _, survival = rule.figures(draft, p, state, law, depths)
      return law.stop, law.next_token, survival

    def commit(tokens, parents, q, p, state, verdict):
      draft = Draft(tokens=tokens, parents=parents, probs=q)
      return rule.next_state(state, draft, p, verdict)

    self._law, self._commit = (
        jax.jit(jax.vmap(f), compiler_options=_OPTIMISED)
        for f in (law, commit))

  @classmethod
  def of(cls, verifier: "Verifier | Compiled") -> "Compiled":
    """The rule itself if it is compiled already."""
    return verifier if isinstance(verifier, cls) else cls(verifier)

  def initial_state(self, gamma: int, dtype: str) -> Any:
    """The state before the first round, or None; floats in `dtype`."""
    return jax.tree.map(lambda x: _in_dtype(np.asarray(x), dtype),
                        self.rule.init(gamma))

  def laws(self, drafts, chunk: int, dtype: str
           ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns `stop [n, N]`, `next_token [n, N, V]` and `survival [n, N]`.

    `survival` is None for a rule without its own.

    Args:
      drafts: tokens, parents `[n, N]`, q, p `[n, N, V]`, and the states.
      chunk: drafts of one call: each size is compiled for itself.
      dtype: of the numbers handed to the law.
    """
    return _in_chunks(self._law, drafts, chunk, dtype)

  def commits(self, drafts, verdicts: Verdict, chunk: int, dtype: str) -> Any:
    """The states after the rounds; arguments as in `laws`."""
    return _in_chunks(self._commit, (*drafts, verdicts), chunk, dtype)


def _in_dtype(x, dtype):
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  return x.astype(dtype, copy=False) if is_float else x


def _in_chunks(function, arguments, chunk, dtype):
  tokens, parents, q, p, *rest = arguments
  arguments = (tokens.astype(np.int32), parents.astype(np.int32),
               q.astype(dtype, copy=False), p.astype(dtype, copy=False), *rest)
  count = len(tokens)
  if count <= chunk // _FEW:  # most enumerations are small
    chunk //= _FEW

  def rows(start):
    """A whole chunk, the last one filled up with the first row."""
    missing = max(start + chunk - count, 0)
    return jax.tree.map(lambda x: np.concatenate(
        [x[start:], np.repeat(x[:1], missing, axis=0)]) if missing
                        else x[start:start + chunk], arguments)

  with jax.enable_x64(True):
    results = [function(*rows(start)) for start in range(0, count, chunk)]
    return jax.tree.map(lambda *x: np.concatenate(x)[:count], *results)
