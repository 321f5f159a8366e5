"""A draft that shows what is wrong with a rule, for readers."""

from typing import NamedTuple

import numpy as np

from specjax.types import Draft
from specjax.types import Law

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
