"""What no verifier can exceed: ceilings in closed form and by linear programs.

Sun et al. 2024 (arXiv:2403.10444), for chains of gamma drafted tokens.
"""

import numpy as np

from specjax.exact.pairs import Pair


def full_information_optimum(pair: Pair, gamma: int) -> float:
  """The most draft tokens that any coupling accepts in one round.

  sum_{i=1..gamma} sum_{x^i} min(p(x^i), q(x^i)): Lemma 8. Greedy block
  verification attains it in its first round (Theorem 3).
  """
  p, q = (_joint(tables, gamma) for tables in (pair.p, pair.q))
  return float(sum(np.minimum(a, b).sum() for a, b in zip(p[1:], q[1:])))


def transport_optimum(pair: Pair, gamma: int) -> float:
  """The same by its definition, an optimal transport problem.

  The largest E[longest common prefix of X and Z] over all couplings of a
  draft X of q and a text Z of p, both of gamma tokens: V**(2 gamma)
  variables.
  """
  vocab = pair.vocab_size
  p, q = (_joint(tables, gamma)[-1] for tables in (pair.p, pair.q))
  x, z = np.nonzero(np.outer(q, p))
  common = sum((x // vocab**i == z // vocab**i).astype(float)
               for i in range(gamma))
  columns = np.arange(len(x))
  rows = np.concatenate([x, len(q) + z])
  return _maximum(common, rows, np.tile(columns, 2), np.ones(2 * len(x)),
                  np.concatenate([q, p]))


def verifier_optimum(pair: Pair, gamma: int, weights=None) -> float:
  """The most draft tokens that a valid verifier accepts, by Theorem 2's LP.

  The verifiers are all those that emit X^tau and ONE extra token, after which
  the unmodified target continues, whatever they know of both models: f(x, tau,
  y) >= 0, sum_{tau,y} f(x, .) = q(x), and for every text z of gamma + 1 tokens
  sum_{tau, x: x^tau = z^tau} f(x, tau, z_{tau+1}) p(z_{tau+2..} | z^{tau+1}) =
  p(z). Block verification attains it: this is the ceiling of every rule whose
  state is nothing but its output.

  Args:
    pair: tables of at least gamma + 1 contexts deep.
    gamma: draft length.
    weights: w[i - 1] is `[V**i]`, the value of accepting each prefix of i
      tokens; default 1. As block verification makes every P(tau >= i, X^i =
      x^i) as large as any verifier can (Lemma 4), it is optimal under any.

  Returns:
    max E[sum_{i<=tau} w_i(X^i)], which is E[tau] by default.
  """
  vocab = pair.vocab_size
  p, q = _joint(pair.p, gamma + 1), _joint(pair.q, gamma)
  drafts = np.flatnonzero(q[gamma])
  if weights is None:
    weights = [np.ones(vocab**i) for i in range(1, gamma + 1)]
  value = np.zeros(len(drafts))
  rows, columns, entries, gains, count = [], [], [], [], 0
  for tau in range(gamma + 1):
    prefix = drafts // vocab**(gamma - tau)
    if tau:
      value = value + weights[tau - 1][prefix]
    # One variable for every (draft, extra token), in this order.
    variables = count + np.arange(len(drafts) * vocab)
    count += len(variables)
    gains.append(np.repeat(value, vocab))
    rows.append(np.repeat(np.arange(len(drafts)), vocab))
    columns.append(variables)
    entries.append(np.ones(len(variables)))
    # The texts that follow it, with the target's probability of the rest.
    text = (prefix[:, None] * vocab + np.arange(vocab)).reshape(-1)
    rest = vocab**(gamma - tau)
    texts = text[:, None] * rest + np.arange(rest)
    behind = _joint_behind(pair.p, tau + 1, gamma + 1)[text]
    rows.append((len(drafts) + texts).reshape(-1))
    columns.append(np.repeat(variables, rest))
    entries.append(behind.reshape(-1))
  return _maximum(np.concatenate(gains), np.concatenate(rows),
                  np.concatenate(columns), np.concatenate(entries),
                  np.concatenate([q[gamma][drafts], p[gamma + 1]]))


def _joint(tables, length):
  """Joint laws `[V**i]` of the first i tokens, for i = 0..length."""
  laws = [np.ones(1)]
  for d in range(length):
    laws.append((laws[-1][:, None] * tables[d]).reshape(-1))
  return laws


def _joint_behind(tables, start, end):
  """`[V**start, V**(end - start)]`: the law of what follows each context."""
  contexts = tables[start - 1].size
  law = np.ones((contexts, 1))
  for table in tables[start:end]:
    rows = table.reshape(contexts, law.shape[1], -1)
    law = (law[..., None] * rows).reshape(contexts, -1)
  return law


def _maximum(gain, rows, columns, entries, totals):
  """max gain . f over f >= 0 with A f = totals, A in coordinates."""
  import scipy.optimize  # pylint: disable=g-import-not-at-top
  import scipy.sparse  # pylint: disable=g-import-not-at-top
  matrix = scipy.sparse.csr_matrix(
      (entries, (rows, columns)), shape=(len(totals), len(gain)))
  found = scipy.optimize.linprog(
      -gain, A_eq=matrix, b_eq=totals, method="highs",
      options=dict(primal_feasibility_tolerance=1e-10,
                   dual_feasibility_tolerance=1e-10))
  if found.status != 0:
    raise ArithmeticError(f"the linear program was not solved: {found.message}")
  return -found.fun
