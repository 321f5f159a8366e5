"""A rule compiled for many drafts, and one draft printed for readers."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces import check_verifier
from specjax.interfaces import Verifier
from specjax.types import Draft
from specjax.types import Law
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


_TOKENS = 8  # of a large vocabulary that are printed


class Example(NamedTuple):
  """One draft, the two distributions, and the law that the rule returned.

  Attributes:
    draft: of N nodes.
    target_probs: `[N, V]`.
    law: what the rule returned.
    node: the node after whose text `obtained` was seen, or None.
    obtained: `[V]`, the law of the token after that text that decoding emits,
      over all drafts; the target's is the node's row of `target_probs`.
  """

  draft: Draft
  target_probs: np.ndarray
  law: Law
  node: int | None = None
  obtained: np.ndarray | None = None

  def __str__(self):
    draft, p, law = self.draft, self.target_probs, self.law
    nodes, vocab = np.shape(p)
    shown = self._shown(nodes, vocab)
    row = lambda x: "  ".join(f"{float(x[t]):<9.4g}" for t in shown)
    lines = [f"witness: a draft of {nodes - 1} tokens below root "
             f"{int(draft.tokens[0])}, V = {vocab}",
             f"  {'node':36s}{'token':8s}"
             + "  ".join(f"{t:<9d}" for t in shown)]
    for node in range(nodes):
      token, parent = int(draft.tokens[node]), int(draft.parents[node])
      name = "root" if not node else f"node {node} below {parent}"
      q, rows = np.asarray(draft.probs[node]), []
      if node:
        padding = not q.any()
        rows.append(("padding" if padding else "q, drawn from", q))
      rows.append(("p, the target after it", p[node]))
      rows.append((f"law: stops with {float(law.stop[node]):.4g}",
                   law.next_token[node]))
      for i, (what, values) in enumerate(rows):
        head = f"{name}: {what}" if not i else f"  {what}"
        lines.append(f"  {head:36s}{token if not i else '':<8}{row(values)}")
    if self.obtained is not None:
      text = self._text(self.node)
      where = "first" if not text else f"after {' '.join(map(str, text))}"
      lines += [f"the token that decoding emits {where}, over all drafts:",
                f"  {'expected, the target':36s}{'':8s}{row(p[self.node])}",
                f"  {'obtained with the rule':36s}{'':8s}{row(self.obtained)}"]
    return "\n".join(line.rstrip() for line in lines)

  def _text(self, node):
    """The tokens on the path to a node, without the root."""
    tokens = []
    while node > 0:
      tokens.insert(0, int(self.draft.tokens[node]))
      node = int(self.draft.parents[node])
    return tokens

  def _shown(self, nodes, vocab):
    """The tokens that are printed: all, or those of the draft and farthest."""
    if vocab <= _TOKENS:
      return range(vocab)
    drafted = {int(t) for t in self.draft.tokens[1:] if t < vocab}
    node = self.node or 0
    other = (self.obtained if self.obtained is not None
             else np.asarray(self.law.next_token[node]))
    far = np.argsort(-np.abs(np.nan_to_num(other - self.target_probs[node])))
    return sorted([*dict.fromkeys([*far[:_TOKENS // 2].tolist(), *drafted,
                                   *far[_TOKENS // 2:_TOKENS].tolist()])
                   ][:_TOKENS])
