"""Upper bounds on verification: closed forms and linear programs.

All of them are bounds for ONE round. Sun et al. 2024 (arXiv:2403.10444) treat
chains of gamma drafted tokens; their program over all valid verifiers is
extended to trees here. `exact.several_rounds` uses it for several rounds.
"""

from collections.abc import Sequence

import numpy as np

from specjax.exact import schemes
from specjax.exact import trees
from specjax.exact.drafts import longer
from specjax.exact.pairs import Pair

# The gain of an improbable text would else lie below the solver's tolerance.
_GAIN_SCALE = 1e3


def full_information_optimum(pair: Pair, gamma: int) -> float:
  """Returns the most draft tokens that any coupling accepts in one round.

  sum_{i=1..gamma} sum_{x^i} min(p(x^i), q(x^i)): Lemma 8. Greedy block
  verification attains it in its first round (Theorem 3).
  """
  p, q = (_joint(tables, gamma) for tables in (pair.p, pair.q))
  return float(sum(np.minimum(a, b).sum() for a, b in zip(p[1:], q[1:])))


def transport_optimum(pair: Pair, gamma: int) -> float:
  """Returns `full_information_optimum` by its definition, optimal transport.

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


def verifier_optimum(pair: Pair, gamma: int,
                     weights: Sequence[np.ndarray] | None = None) -> float:
  """Returns the most draft tokens that a valid verifier accepts in one round.

  The largest E[tau] over all verifiers of `emission_optimum`. Block
  verification attains it (Theorem 2 of the paper, for one round). The optimum
  is for one round: after two rounds block verification can have fewer tokens
  than another valid rule if gamma >= 3 (`exact.patient_pair`).

  Args:
    pair: tables of at least gamma + 1 contexts deep.
    gamma: draft length.
    weights: w[i - 1] is `[V**i]`, the value of accepting each prefix of i
      tokens; default 1. Block verification makes every P(tau >= i, X^i = x^i)
      as large as any valid verifier can (Lemma 4). So it is optimal in one
      round under any weights that are not negative.

  Returns:
    max E[sum_{i<=tau} w_i(X^i)], which is E[tau] by default.
  """
  values, value = [], np.zeros(1)
  for tau in range(gamma + 1):
    if tau:
      value = np.repeat(value, pair.vocab_size)
      value += 1 if weights is None else weights[tau - 1]
    values.append(np.repeat(value, pair.vocab_size))
  return emission_optimum(pair, gamma, values)


def emission_optimum(pair: Pair, gamma: int, values: Sequence[np.ndarray]
                     ) -> float:
  """Returns the largest expected value of the tokens of one round.

  The verifiers are all those that emit X^tau and ONE extra token, after which
  the unmodified target continues, whatever they know of both models: f(x, tau,
  y) >= 0, sum_{tau,y} f(x, .) = q(x), and for every text z of gamma + 1 tokens
  sum_{tau, x: x^tau = z^tau} f(x, tau, z_{tau+1}) p(z_{tau+2..} | z^{tau+1}) =
  p(z). They are the valid rules of the paper's Lemma 2, that is, every rule
  whose only state is its output.

  Args:
    pair: tables of at least gamma + 1 contexts deep.
    gamma: draft length.
    values: values[m - 1] is `[V**m]`, the value of emitting each sequence of
      exactly m tokens, for m = 1..gamma + 1. Values may be negative.

  Returns:
    max E[values[N - 1][Z^N]], where N = tau + 1.

  Raises:
    ValueError: a row of the models does not sum to 1 within 1e-12.
    ArithmeticError: the solver found no solution.
  """
  return _maximum(*program(pair, gamma, values))


def program(pair: Pair, gamma: int, values: Sequence[np.ndarray]
            ) -> tuple[np.ndarray, ...]:
  """Returns the linear program of `emission_optimum` in coordinates.

  Returns:
    `(gains, rows, columns, entries, totals)`: maximise gains . f over f >= 0
    with A f = totals, A[rows[k], columns[k]] = entries[k].
  """
  vocab = pair.vocab_size
  p, q = _joint(pair.p, gamma + 1), _joint(pair.q, gamma)
  texts = np.flatnonzero(p[gamma + 1])
  # f enters only by its sums over the drafts with one prefix: every draft's
  # mass climbs from its leaf towards the root and stops at some prefix v. The
  # variables are the mass that stops there with token y, divided by p(vy), and
  # the mass that climbs past v, divided by q(v); so no number is so small that
  # a solver takes it for 0. Rows: one for every v, then one for every text.
  nodes = [np.flatnonzero(law) for law in q]
  first = np.cumsum([0, *map(len, nodes)])
  text_rows = first[-1] + np.arange(len(texts))
  rows, columns, entries, gains = [], [], [], []
  count, parent_row = 0, None
  for tau in range(gamma + 1):
    node_row = np.full(vocab**tau, -1)
    node_row[nodes[tau]] = first[tau] + np.arange(len(nodes[tau]))
    # Stops: at the drafts' nodes, with tokens that the target can emit.
    stops = np.flatnonzero(np.repeat(q[tau] > 0, vocab) & (p[tau + 1] > 0))
    at = stops // vocab
    column = np.full(vocab**(tau + 1), -1)
    column[stops] = count + np.arange(len(stops))
    gains.append(values[tau][stops] * p[tau + 1][stops])
    rows.append(node_row[at])
    columns.append(column[stops])
    entries.append(p[tau + 1][stops] / q[tau][at])
    found = column[texts // vocab**(gamma - tau)]
    rows.append(text_rows[found >= 0])
    columns.append(found[found >= 0])
    entries.append(np.ones(np.count_nonzero(found >= 0)))
    count += len(stops)
    if tau:  # mass that climbs leaves v for its parent
      climbs = count + np.arange(len(nodes[tau]))
      count += len(climbs)
      gains.append(np.zeros(len(climbs)))
      parent = nodes[tau] // vocab
      rows += [node_row[nodes[tau]], parent_row[parent]]
      columns += [climbs, climbs]
      entries += [np.ones(len(climbs)),
                  -q[tau][nodes[tau]] / q[tau - 1][parent]]
    parent_row = node_row
  totals = np.zeros(text_rows[-1] + 1)
  totals[first[gamma]:] = 1  # the leaves, where mass starts, and the texts
  return (*map(np.concatenate, (gains, rows, columns, entries)), totals)


def tree_optimum(pair: Pair, parents: Sequence[int],
                 scheme: str | schemes.Scheme) -> float:
  """Returns the most tokens of a random tree that a valid rule accepts.

  The program of `verifier_optimum` with trees T in place of chains: f(T, v, y)
  >= 0 is the probability of drafting T, stopping at its node v, and emitting
  y; sum_{v,y} f(T, .) = P(T), and for every text z one token longer than the
  deepest path, the sum of f(T, v, y) p(rest of z) over all T and vy that z
  begins with is p(z). No rule that emits one extra token, after which the
  unmodified target continues, exceeds it, whatever it knows of both models.

  Args:
    pair: tables of at least height + 1 contexts deep.
    parents: N numbers, see `enumerate_trees`.
    scheme: see `enumerate_trees`.

  Returns:
    max E[tau].
  """
  return _maximum(*_tree_program(pair, parents, scheme)[0])


def tree_prices(pair: Pair, parents: Sequence[int],
                scheme: str | schemes.Scheme) -> np.ndarray:
  """Returns the solver's dual variable of every text in `tree_optimum`.

  With v(z) the number of a text, and u(T) that of a tree, u(T) + E[v(z) | z
  begins with vy] >= depth(v) up to the solver's tolerance. `exact.duals` makes
  an exact bound of them.

  Returns:
    `[V**(height + 1)]`, 0 for texts that the target cannot write.
  """
  program_, texts, p = _tree_program(pair, parents, scheme)
  marginals = _solution(*program_).eqlin.marginals[-len(texts):]
  prices = np.zeros(len(p))
  prices[texts] = -marginals / _GAIN_SCALE / p[texts]
  return prices


def _tree_program(pair, parents, scheme):
  """The program of `tree_optimum`, the numbers of its texts, and p of all."""
  length = trees.height(parents) + 1
  vocab = pair.vocab_size
  p = _joint(pair.p, length)
  _joint(pair.q, length - 1)
  offsets = np.cumsum([0, *map(len, p)])
  laws, joint = np.concatenate(pair.p[:length]), np.concatenate(p)
  # A verifier that knows everything sees a tree as the set of its texts.
  drafts = trees.draw(scheme, parents, np.concatenate(pair.q),
                      np.zeros(1, np.int64))
  weights = {}
  for texts, weight in zip(_texts(drafts), drafts.weights):
    weights[texts] = weights.get(texts, 0) + weight
  texts = offsets[length] + np.flatnonzero(p[length])
  # Variables are divided by p(vy), and the rows of trees by P(T), so that no
  # number is so small that a solver takes it for 0.
  rows, columns, entries, gains = [], [], [], []
  count = 0
  for tree, (nodes, weight) in enumerate(weights.items()):
    nodes = np.array(nodes)
    at, y = np.nonzero(laws[nodes] * joint[nodes, None])
    after = longer(nodes[at], y, vocab)
    stop_depth = np.searchsorted(offsets, nodes[at], side="right") - 1
    column = np.full(offsets[length + 1], -1)
    column[after] = count + np.arange(len(after))
    gains.append(stop_depth * joint[after])
    rows.append(np.full(len(after), tree))
    columns.append(column[after])
    entries.append(joint[after] / weight)
    prefix = texts
    for _ in range(length):  # every text and what it begins with
      found = np.flatnonzero(column[prefix] >= 0)
      rows.append(len(weights) + found)
      columns.append(column[prefix[found]])
      entries.append(np.ones(len(found)))
      prefix = (prefix - 1) // vocab
    count += len(after)
  found = (*map(np.concatenate, (gains, rows, columns, entries)),
           np.ones(len(weights) + len(texts)))
  return found, texts - offsets[length], p[length]


def _texts(drafts):
  """Of every draft, the contexts of its nodes as a sorted tuple."""
  real = drafts.probs.any(-1)
  real[:, 0] = True
  for node in range(1, real.shape[1]):
    parent = drafts.parents[:, node]
    real[:, node] &= real[np.arange(len(real)), parent]
  for contexts, counts in zip(drafts.contexts, real):
    yield tuple(np.unique(contexts[counts]).tolist())


def _joint(tables, length):
  """Joint laws `[V**i]` of the first i tokens, for i = 0..length."""
  laws = [np.ones(1)]
  for d in range(length):
    error = np.abs(tables[d].sum(-1) - 1).max()
    if error > 1e-12:  # the programs would have no solution
      raise ValueError(f"a row of the models sums to 1 within {error:.0e}; "
                       "1e-12 is needed: normalise the rows in float64")
    laws.append((laws[-1][:, None] * tables[d]).reshape(-1))
  return laws


def maxima(programs: Sequence[tuple[np.ndarray, ...]]) -> np.ndarray:
  """Returns the optimum of each `program`; they are solved in one call."""
  gains, rows, columns, entries, totals = zip(*programs)
  shifted = lambda parts, sizes: np.concatenate([
      part + shift for part, shift in zip(parts, np.cumsum([0, *sizes]))])
  gain = np.concatenate(gains)
  solution = _solution(
      gain, shifted(rows, map(len, totals)), shifted(columns, map(len, gains)),
      np.concatenate(entries), np.concatenate(totals)).x
  which = np.repeat(np.arange(len(gains)), [len(g) for g in gains])
  return np.bincount(which, gain * solution, minlength=len(gains))


def _maximum(gain, rows, columns, entries, totals):
  """max gain . f over f >= 0 with A f = totals, A in coordinates."""
  return -_solution(gain, rows, columns, entries, totals).fun / _GAIN_SCALE


def _solution(gain, rows, columns, entries, totals):
  """The solver's result, with gains multiplied by -_GAIN_SCALE."""
  import scipy.optimize  # pylint: disable=g-import-not-at-top
  import scipy.sparse  # pylint: disable=g-import-not-at-top
  matrix = scipy.sparse.csr_matrix(
      (entries, (rows, columns)), shape=(len(totals), len(gain)))
  found = scipy.optimize.linprog(
      -_GAIN_SCALE * gain, A_eq=matrix, b_eq=totals, method="highs",
      # Presolve takes probabilities of 1e-9 for rounding, and then finds the
      # program infeasible.
      options=dict(presolve=False, primal_feasibility_tolerance=1e-10,
                   dual_feasibility_tolerance=1e-10))
  if found.status != 0:
    raise ArithmeticError(f"the linear program was not solved: {found.message}")
  return found
