"""Rules compiled for many drafts, and printing of example drafts."""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.exact import coverage
from specjax.interfaces import check_verifier
from specjax.interfaces import Verifier
from specjax.trees import topology
from specjax.types import Draft
from specjax.types import Law
from specjax.types import Verdict

# XLA_FLAGS may lower the optimisation level, for example in tests. The programs
# of this file run thousands of times, so they set the level explicitly. For
# programs that run a few times, compiling without optimisation takes less time.
_LEVEL = "xla_backend_optimization_level"
_FEW = 8  # at most chunk / 8 drafts are evaluated with chunks of chunk / 8


class Compiled:
  """A rule compiled once for several enumerations.

  Every function that enumerates a rule accepts a rule or a `Compiled`. A rule
  is compiled again at each call, so that edits of its class in a notebook take
  effect.

  Attributes:
    rule: the verification rule.
    coverage: number of evaluated drafts by property, see `exact.coverage`.
  """

  def __init__(self, rule: Verifier, optimised: bool = True):
    check_verifier(rule)
    self.rule, self.coverage = rule, collections.Counter()
    has_figures = rule.has_survival or (
        type(rule).figures is not Verifier.figures)

    def law(tokens, parents, q, p, state):
      draft = Draft(tokens=tokens, parents=parents, probs=q)
      law = rule.evaluate(draft, p, state)
      figures = None
      if has_figures:
        figures = rule.figures(draft, p, state, law, topology.depths(parents))
      return law.stop, law.next_token, figures

    def commit(tokens, parents, q, p, state, verdict):
      draft = Draft(tokens=tokens, parents=parents, probs=q)
      return rule.next_state(state, draft, p, verdict)

    self._law, self._commit = (
        jax.jit(jax.vmap(f), compiler_options={_LEVEL: "02"[optimised]})
        for f in (law, commit))

  @classmethod
  def of(cls, verifier: "Verifier | Compiled") -> "Compiled":
    """Returns a rule as a `Compiled`. A `Compiled` is returned unchanged."""
    return verifier if isinstance(verifier, cls) else cls(verifier)

  @functools.cached_property
  def quick(self) -> "Compiled":
    """The rule compiled without optimisation, for few drafts of a shape."""
    new = Compiled(self.rule, optimised=False)
    new.coverage = self.coverage
    return new

  def initial_state(self, gamma: int, dtype: str) -> Any:
    """Returns the rule's state before the first round, or None.

    Args:
      gamma: draft length.
      dtype: dtype of the floating-point arrays of the state.
    """
    return jax.tree.map(lambda x: _in_dtype(np.asarray(x), dtype),
                        self.rule.init(gamma))

  def laws(self, drafts: tuple, chunk: int, dtype: str
           ) -> tuple[np.ndarray, np.ndarray, tuple | None]:
    """Returns `(stop, next_token, figures)` of n drafts.

    `stop [n, N]` and `next_token [n, N, V]` are the fields of `Law`. `figures`
    is the result of `Verifier.figures`, with leaves `[n]` and `[n, N]`. It is
    None if the rule does not compute figures of its own.

    Args:
      drafts: tuple of tokens `[n, N]`, parents `[n, N]`, q `[n, N, V]`,
        p `[n, N, V]` and states.
      chunk: number of drafts per call. Each number compiles one program.
      dtype: dtype of q and p.
    """
    self.coverage.update(coverage.counted(*drafts[1:4], dtype))
    return _in_chunks(self._law, drafts, chunk, dtype)

  def commits(self, drafts: tuple, verdicts: Verdict, chunk: int, dtype: str
              ) -> Any:
    """Returns the rule's states after rounds with these verdicts.

    Args:
      drafts: the drafts of the rounds, as in `laws`.
      verdicts: outcomes of the rounds, with n rows.
      chunk: number of drafts per call.
      dtype: dtype of q and p.
    """
    return _in_chunks(self._commit, (*drafts, verdicts), chunk, dtype)


def _in_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  return x.astype(dtype, copy=False) if is_float else x


def _in_chunks(function: Callable, arguments: tuple, chunk: int, dtype: str
               ) -> Any:
  tokens, parents, q, p, *rest = arguments
  arguments = (tokens.astype(np.int32), parents.astype(np.int32),
               q.astype(dtype, copy=False), p.astype(dtype, copy=False), *rest)
  count = len(tokens)
  if count <= chunk // _FEW:  # most enumerations are small
    chunk //= _FEW

  def rows(start: int) -> tuple:
    """Returns one chunk. The last chunk is padded with copies of row 0."""
    missing = max(start + chunk - count, 0)
    return jax.tree.map(lambda x: np.concatenate(
        [x[start:], np.repeat(x[:1], missing, axis=0)]) if missing
                        else x[start:start + chunk], arguments)

  with jax.enable_x64(True):
    results = [function(*rows(start)) for start in range(0, count, chunk)]
    join = lambda *x: np.concatenate(x) if len(x) > 1 else np.asarray(x[0])
    return jax.tree.map(lambda *x: join(*x)[:count], *results)


_TOKENS = 8  # most tokens printed per row


class Example(NamedTuple):
  """A draft with the distributions p and q and the rule's law.

  Attributes:
    draft: draft tree of N nodes.
    target_probs: `[N, V]` target distribution after each node.
    law: the rule's law of this draft.
    node: node with a wrong distribution of the next emitted token, or None.
    obtained: `[V]` distribution of the token emitted after the context of
      `node`, over all drafts, or None. A lossless rule has
      `target_probs[node]`.
    reason: sentence with the wrong value and the expected one, or "" if
      `obtained` shows them.
  """

  draft: Draft
  target_probs: np.ndarray
  law: Law
  node: int | None = None
  obtained: np.ndarray | None = None
  reason: str = ""

  def __str__(self):
    nodes, vocab = np.shape(self.target_probs)
    shown = self._shown(vocab)
    lines = [f"witness: a draft of {nodes - 1} tokens below root "
             f"{int(self.draft.tokens[0])}, V = {vocab}",
             f"  {'node':36s}{'token':8s}"
             + "  ".join(f"{t:<9d}" for t in shown)]
    for node in range(nodes):
      lines += self._node(node, shown)
    if self.reason:
      lines.append(self.reason)
    if self.obtained is not None:
      tokens = self._path(self.node)
      where = f"after {' '.join(map(str, tokens))}" if tokens else "first"
      lines += [f"the token that decoding emits {where}, over all drafts:",
                _line("expected, the target", "",
                      self.target_probs[self.node], shown),
                _line("obtained with the rule", "", self.obtained, shown)]
    return "\n".join(line.rstrip() for line in lines)

  def _node(self, node: int, shown: Sequence[int]) -> list[str]:
    """Returns the printed lines of one node: its distributions and its law."""
    law, rows = self.law, []
    if node:
      q = np.asarray(self.draft.probs[node])
      rows.append(("q, drawn from" if q.any() else "padding", q))
    rows += [("p, the target after it", self.target_probs[node]),
             (f"law: stops with {float(law.stop[node]):.4g}",
              law.next_token[node])]
    (head, values), *others = rows
    name = f"node {node} below {int(self.draft.parents[node])}"
    return [_line(f"{name if node else 'root'}: {head}",
                  str(int(self.draft.tokens[node])), values, shown),
            *(_line(f"  {head}", "", x, shown) for head, x in others)]

  def _path(self, node: int) -> list[int]:
    """Returns the tokens on the path to a node, without the root."""
    tokens = []
    while node > 0:
      tokens.insert(0, int(self.draft.tokens[node]))
      node = int(self.draft.parents[node])
    return tokens

  def _shown(self, vocab: int) -> Sequence[int]:
    """Returns the printed tokens, at most `_TOKENS`.

    In a large vocabulary, these are tokens of the draft, and tokens with the
    largest differences from the target.
    """
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


def _line(head: str, token: str, values: np.ndarray, shown: Sequence[int]
          ) -> str:
  row = "  ".join(f"{float(values[t]):<9.4g}" for t in shown)
  return f"  {head:36s}{token:8s}{row}"
