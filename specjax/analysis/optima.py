"""Upper bounds on verification: closed forms and linear programs.

All of them are bounds for ONE round. Sun et al. 2024 (arXiv:2403.10444) treat
chains of gamma drafted tokens; their program over all valid verifiers is
extended to trees here. `analysis.several_rounds` uses it for several rounds.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.exact import schemes
from specjax.exact.drafts import Drafts
from specjax.exact.drafts import longer
from specjax.exact.pairs import joint
from specjax.exact.pairs import Pair

# The gain of an improbable text would else lie below the solver's tolerance.
_GAIN_SCALE = 1e3
# The solver drops coefficients below this one, and refuses very large ones.
_SMALLEST = 1e-9
_RAREST = 1e-12  # of the trees in a program
_DUAL_ERROR = 1e-11  # of the solver's dual variables of texts


def transport_optimum(pair: Pair, gamma: int) -> float:
  """Returns `full_information_optimum` by its definition, optimal transport.

  The largest E[longest common prefix of X and Z] over all couplings of a
  draft X of q and a text Z of p, both of gamma tokens: V**(2 gamma)
  variables.
  """
  vocab = pair.vocab_size
  p, q = (joint(tables, gamma)[-1] for tables in (pair.p, pair.q))
  x, z = np.nonzero(np.outer(q, p))
  common = sum((x // vocab**i == z // vocab**i).astype(float)
               for i in range(gamma))
  columns = np.arange(len(x))
  rows = np.concatenate([x, len(q) + z])
  totals = np.concatenate([q, p])
  return _maximum(common, rows, np.tile(columns, 2), np.ones(2 * len(x)),
                  totals, np.zeros(len(totals), bool))


def verifier_optimum(pair: Pair, gamma: int,
                     weights: Sequence[np.ndarray] | None = None) -> float:
  """Returns the most draft tokens that a valid verifier accepts in one round.

  The largest E[tau] over all verifiers of `emission_optimum`. Block
  verification attains it (Theorem 2 of the paper, for one round). The optimum
  is for one round: after two rounds block verification can have fewer tokens
  than another valid rule if gamma >= 3 (`analysis.patient_pair`).

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

  Drafts that q draws with less than 1e-9, given their prefix, stop at this
  prefix or before. This changes the optimum by less than 1e-8 per unit of
  value.

  Returns:
    `(gains, rows, columns, entries, totals, upper)`: maximise gains . f over f
    >= 0 with A f <= totals in the rows where `upper` is true and A f = totals
    in the others, A[rows[k], columns[k]] = entries[k].
  """
  vocab = pair.vocab_size
  p, q = joint(pair.p, gamma + 1), joint(pair.q, gamma)
  texts = np.flatnonzero(p[gamma + 1])
  # f enters only by its sums over the drafts with one prefix: every draft's
  # mass climbs from its leaf towards the root and stops at some prefix v. The
  # variables are the mass that stops there with token y, divided by p(vy), and
  # the mass that climbs past v, divided by q(v); so no number is so small that
  # a solver takes it for 0. Rows: one for every v, then one for every text.
  # Those of v are upper bounds: as all texts have their mass, none is lost.
  nodes, supply = _nodes(q, vocab)
  first = np.cumsum([0, *map(len, nodes)])
  text_rows = first[-1] + np.arange(len(texts))
  rows, columns, entries, gains = [], [], [], []
  count, parent_row = 0, None
  for tau in range(gamma + 1):
    node_row = np.full(vocab**tau, -1)
    node_row[nodes[tau]] = first[tau] + np.arange(len(nodes[tau]))
    # Stops: at the drafts' nodes, with tokens that the target can emit. One of
    # p(vy) >> q(v) could serve next to nothing of p(vy).
    stops = np.flatnonzero(
        np.repeat(node_row >= 0, vocab) & (p[tau + 1] > 0)
        & (_SMALLEST * p[tau + 1] <= np.repeat(q[tau], vocab)))
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
  totals = np.concatenate([*supply, np.ones(len(texts))])
  upper = np.arange(len(totals)) < first[-1]
  return (*map(np.concatenate, (gains, rows, columns, entries)), totals, upper)


def _nodes(q: Sequence[np.ndarray], vocab: int
           ) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Prefixes of drafts that count, and the share of each that starts there.

  The leaves start with all of their mass, and a prefix with the mass of longer
  drafts that are too improbable to have a node.
  """
  nodes, supply = [np.zeros(1, int)], []
  for before, after in zip(q, q[1:]):
    mass = after.reshape(-1, vocab)[nodes[-1]] / before[nodes[-1], None]
    counts = mass >= _SMALLEST
    supply.append(np.where(counts, 0, mass).sum(-1))
    at, token = np.nonzero(counts)
    nodes.append(nodes[-1][at] * vocab + token)
  return nodes, [*supply, np.ones(len(nodes[-1]))]


def tree_optimum(pair: Pair, parents: Sequence[int],
                 scheme: str | schemes.Scheme) -> float:
  """Returns the most tokens of a random tree that a rule accepts in one round.

  The program of `verifier_optimum` with trees T in place of chains: f(T, v, y)
  >= 0 is the probability of drafting T, stopping at its node v, and emitting
  y; sum_{v,y} f(T, .) = P(T), and for every text z one token longer than the
  deepest path, the sum of f(T, v, y) p(rest of z) over all T and vy that z
  begins with is p(z). No rule that emits one extra token, after which the
  unmodified target continues, exceeds it in one round, whatever it knows of
  both models.

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
  """Returns prices v(z) of all texts: the solver's dual of `tree_optimum`.

  With some u(T), u(T) + E[v(z) | z begins with vy] >= depth(v) for the nodes v
  of all trees T. The solver's variable of a text is p(z) v(z), with an error
  that does not depend on p(z), so every price gets an allowance for this error.
  `analysis.duals` makes exact bounds of the prices.

  Returns:
    `[2, V**(height + 1)]`: two lists of prices, which differ only for models
    with probabilities near the solver's tolerance.
  """
  found, texts, p = _tree_program(pair, parents, scheme)
  paid = np.zeros(len(p))
  paid[texts] = _DUAL_ERROR - _solution(*found).eqlin.marginals / _GAIN_SCALE
  # The solver may let one improbable text pay for others that begin as it
  # does, by prices far from the average. The first list cuts high prices off.
  # In the second, texts with the same beginning pay the difference.
  mean, height = paid.sum(), schemes.height(parents)
  cut = np.minimum(paid, (mean + height) * p)
  inside = np.maximum(cut, (mean - 3 * height) * p)
  over = paid - inside
  for n in reversed(range(height + 1)):
    groups = inside.reshape(pair.vocab_size**n, -1)
    room = (mean + height) * p.reshape(groups.shape) - groups
    over, total = over.reshape(len(groups), -1).sum(-1), room.sum(-1)
    moved = np.clip(over, 0, total)
    groups += np.divide(moved, total, out=np.zeros(len(groups)),
                        where=total > 0)[:, None] * room
    over = over - moved
  return np.divide([cut, inside], p, where=p > 0,
                   out=np.full((2, len(p)), mean + height))


def _tree_program(pair: Pair, parents: Sequence[int],
                  scheme: str | schemes.Scheme
                  ) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
  """The program of `tree_optimum`, the numbers of its texts, and p of all."""
  length = schemes.height(parents) + 1
  vocab = pair.vocab_size
  p = joint(pair.p, length)
  joint(pair.q, length - 1)
  offsets = np.cumsum([0, *map(len, p)])
  laws, reach = np.concatenate(pair.p[:length]), np.concatenate(p)
  # A verifier that knows everything sees a tree as the set of its texts.
  drafts = schemes.draw(scheme, parents, np.concatenate(pair.q),
                      np.zeros(1, np.int64))
  weights = {}
  for texts, weight in zip(_texts(drafts), drafts.weights):
    weights[texts] = weights.get(texts, 0) + weight
  # Trees that are next to impossible count as a root without children.
  rare = [texts for texts, weight in weights.items() if weight < _RAREST]
  left = sum(weights.pop(texts) for texts in rare)
  if left >= _RAREST:
    weights[(0,)] = weights.get((0,), 0) + left
  texts = offsets[length] + np.flatnonzero(p[length])
  # Variables are divided by p(vy), and the rows of trees by P(T), so that no
  # number is so small that a solver takes it for 0.
  rows, columns, entries, gains = [], [], [], []
  count = 0
  for tree, (nodes, weight) in enumerate(weights.items()):
    nodes = np.array(nodes)
    at, y = np.nonzero(laws[nodes] * reach[nodes, None])
    after = longer(nodes[at], y, vocab)
    stop_depth = np.searchsorted(offsets, nodes[at], side="right") - 1
    column = np.full(offsets[length + 1], -1)
    column[after] = count + np.arange(len(after))
    gains.append(stop_depth * reach[after])
    rows.append(np.full(len(after), tree))
    columns.append(column[after])
    entries.append(reach[after] / weight)
    prefix = texts
    for _ in range(length):  # every text and what it begins with
      found = np.flatnonzero(column[prefix] >= 0)
      rows.append(len(weights) + found)
      columns.append(column[prefix[found]])
      entries.append(np.ones(len(found)))
      prefix = (prefix - 1) // vocab
    count += len(after)
  totals = np.ones(len(weights) + len(texts))
  found = (*map(np.concatenate, (gains, rows, columns, entries)), totals,
           np.arange(len(totals)) < len(weights))
  return found, texts - offsets[length], p[length]


def _texts(drafts: Drafts) -> Iterator[tuple[int, ...]]:
  """Of every draft, the contexts of its nodes as a sorted tuple."""
  real = drafts.probs.any(-1)
  real[:, 0] = True
  for node in range(1, real.shape[1]):
    parent = drafts.parents[:, node]
    real[:, node] &= real[np.arange(len(real)), parent]
  for contexts, counts in zip(drafts.contexts, real):
    yield tuple(np.unique(contexts[counts]).tolist())


def maxima(programs: Sequence[tuple[np.ndarray, ...]]) -> np.ndarray:
  """Returns the optimum of each `program`; they are solved in one call."""
  gains, rows, columns, entries, totals, upper = zip(*programs)
  shifted = lambda parts, sizes: np.concatenate([
      part + shift for part, shift in zip(parts, np.cumsum([0, *sizes]))])
  gain = np.concatenate(gains)
  solution = _solution(
      gain, shifted(rows, map(len, totals)), shifted(columns, map(len, gains)),
      *map(np.concatenate, (entries, totals, upper))).x
  which = np.repeat(np.arange(len(gains)), [len(g) for g in gains])
  return np.bincount(which, gain * solution, minlength=len(gains))


def _maximum(*found):
  """The optimum of one program, in the form of `program`."""
  return -_solution(*found).fun / _GAIN_SCALE


def _solution(gain: np.ndarray, rows: np.ndarray, columns: np.ndarray,
              entries: np.ndarray, totals: np.ndarray, upper: np.ndarray
              ) -> Any:
  """The solver's result, with gains multiplied by -_GAIN_SCALE."""
  from scipy import optimize  # pylint: disable=g-import-not-at-top
  from scipy import sparse  # pylint: disable=g-import-not-at-top
  matrix = sparse.csr_matrix(
      (entries, (rows, columns)), shape=(len(totals), len(gain)))
  # Some programs with probabilities below 1e-9 need the second or third way:
  # presolve takes such numbers for rounding, and the simplex method without it
  # gives up, or returns a solution that does not fulfil the equations.
  tight = dict(primal_feasibility_tolerance=1e-10,
               dual_feasibility_tolerance=1e-10)
  equations = matrix[~upper]
  for method, presolve, options in (
      ("highs", False, tight), ("highs-ipm", False, {}),
      ("highs-ipm", True, {})):
    found = optimize.linprog(
        -_GAIN_SCALE * gain, A_ub=matrix[upper], b_ub=totals[upper],
        A_eq=equations, b_eq=totals[~upper], method=method,
        options=dict(presolve=presolve, **options))
    if found.status == 0 and np.allclose(
        equations @ found.x, totals[~upper], rtol=0, atol=1e-7):
      return found
  raise ArithmeticError(f"the linear program was not solved: {found.message}")
