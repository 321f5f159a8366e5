"""Upper bounds on verification: closed forms and linear programs.

All bounds are for ONE round. p is the target, q the draft model, and tau the
number of accepted tokens. A verifier is lossless if decoding with it follows p.
Sun et al. 2024 (arXiv:2403.10444, "the paper" below) give a linear program over
all lossless verifiers of chains with gamma draft tokens. This module extends
the program to trees, and `analysis.several_rounds` to several rounds.
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

# Factor of the gains, the coefficients of the maximised sum. Without it, gains
# of improbable sequences would be below the solver's tolerance.
_GAIN_SCALE = 1e3
# Smallest coefficient of a program. The solver drops smaller coefficients, and
# rejects very large ones.
_SMALLEST = 1e-9
_RAREST = 1e-12  # smallest probability of a tree in a program
_DUAL_ERROR = 1e-11  # error of the solver's dual variables of sequences


def transport_optimum(pair: Pair, gamma: int) -> float:
  """Returns `full_information_optimum`, computed by optimal transport.

  The value is the largest E[length of the common prefix of X and Z] over all
  couplings of a draft X from q and a sequence Z from p, both of gamma tokens.
  The linear program has V**(2 gamma) variables for a vocabulary of V tokens.
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
  """Returns the largest E[tau] of a lossless verifier in one round.

  The verifiers are those of `emission_optimum`. Block verification attains the
  optimum of one round (Theorem 2 of the paper). After two rounds, another
  lossless rule can have more tokens if gamma >= 3 (`analysis.patient_pair`).

  Args:
    pair: models of depth at least gamma + 1.
    gamma: draft length.
    weights: weights[i - 1] is `[V**i]`, the value w_i of accepting each prefix
      of i tokens. None means 1. Block verification maximises every
      P(tau >= i, X^i = x^i) among lossless verifiers (Lemma 4). It is therefore
      optimal in one round under all weights that are not negative.

  Returns:
    max E[sum_{i<=tau} w_i(X^i)]. Without `weights` this is max E[tau].
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

  A verifier emits the first tau tokens x^tau of the draft x and ONE next token
  y. The target alone continues. The verifier may use both models in any way.
  f(x, tau, y) is the probability of a draft and this outcome. The constraints
  are

  * f >= 0;
  * sum_{tau,y} f(x, tau, y) = q(x) for every draft x;
  * sum_{tau, x: x^tau = z^tau} f(x, tau, z_{tau+1}) p(z_{tau+2..} | z^{tau+1})
    = p(z) for every sequence z of gamma + 1 tokens.

  The constraints describe the lossless rules of the paper's Lemma 2. These are
  all rules without state other than their output.

  Args:
    pair: models of depth at least gamma + 1.
    gamma: draft length.
    values: values[m - 1] is `[V**m]`, the value of emitting each sequence of
      exactly m tokens, for m = 1..gamma + 1. Values may be negative.

  Returns:
    max E[values[N - 1][Z^N]], where Z^N are the N = tau + 1 emitted tokens.

  Raises:
    ValueError: a row of the models does not sum to 1 within 1e-12.
    ArithmeticError: the solver found no solution.
  """
  return _maximum(*program(pair, gamma, values))


def program(pair: Pair, gamma: int, values: Sequence[np.ndarray]
            ) -> tuple[np.ndarray, ...]:
  """Returns the linear program of `emission_optimum` as sparse arrays.

  If the next token of a draft has q below 1e-9 after a prefix, the draft must
  stop at this prefix or earlier. This restriction changes the optimum by less
  than 1e-8 per unit of value.

  Returns:
    `(gains, rows, columns, entries, totals, upper)`. The program is: maximise
    gains . f over f >= 0, with A f <= totals in the rows where `upper` is True
    and A f = totals in the others. A[rows[k], columns[k]] = entries[k].
  """
  vocab = pair.vocab_size
  p, q = joint(pair.p, gamma + 1), joint(pair.q, gamma)
  texts = np.flatnonzero(p[gamma + 1])
  # Gains and constraints depend only on sums of f over all drafts with the same
  # prefix. The program is therefore a flow: the probability mass of every draft
  # moves from its leaf towards the root and stops at some prefix v.
  # Variables: the mass that stops at v with token y, divided by p(vy), and the
  # mass that moves from v to its parent, divided by q(v). The divisions keep
  # variables far from 0.
  # Rows: one for every v, then one for every sequence. Rows of v can be upper
  # bounds, because the rows of the sequences already require all of the mass.
  nodes, supply = _nodes(q, vocab)
  first = np.cumsum([0, *map(len, nodes)])
  text_rows = first[-1] + np.arange(len(texts))
  rows, columns, entries, gains = [], [], [], []
  count, parent_row = 0, None
  for tau in range(gamma + 1):
    node_row = np.full(vocab**tau, -1)
    node_row[nodes[tau]] = first[tau] + np.arange(len(nodes[tau]))
    # A stop is at a node v of a draft, with a token y that has p > 0. If
    # p(vy) >> q(v), the stop is left out, because it could supply almost
    # nothing of p(vy).
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
    if tau:  # mass moves from v to its parent
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
  """Returns the prefixes in the program, and the initial mass of each.

  Both results are lists by length of the prefix. The mass of a prefix is
  divided by its q. It is 1 for a complete draft. For a shorter prefix it is the
  mass of its improbable extensions, which have no node.
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
  """Returns the largest E[tau] of one round of a lossless rule on random trees.

  The linear program is that of `verifier_optimum`, with trees T instead of
  chains. f(T, v, y) is the probability of drafting T, stopping at its node v,
  and emitting y. The constraints are

  * f >= 0;
  * sum_{v,y} f(T, v, y) = P(T), the probability of drafting T;
  * for every sequence z one token longer than the deepest path, p(z) is the sum
    of f(T, v, y) p(rest of z | vy) over all T and all vy that are a prefix of
    z.

  The optimum is a bound for one round of every rule that emits one next token
  before the target alone continues. The rule may use both models in any way.

  Args:
    pair: models of depth at least height + 1.
    parents: N parents, see `enumerate_trees`.
    scheme: drawing scheme, see `enumerate_trees`.

  Returns:
    max E[tau].
  """
  return _maximum(*_tree_program(pair, parents, scheme)[0])


def tree_prices(pair: Pair, parents: Sequence[int],
                scheme: str | schemes.Scheme) -> np.ndarray:
  """Returns the dual variables of sequences (prices) of `tree_optimum`.

  The dual program has a price w(z) for every sequence z and a number u(T) for
  every tree T. The constraint is u(T) + E[w(z) | z begins with vy] >= depth(v)
  for all nodes v of T and tokens y. The solver returns p(z) w(z). Its error
  does not depend on p(z). Every price therefore includes an allowance for the
  error. `analysis.duals` computes exact bounds from the prices.

  Returns:
    `[2, V**(height + 1)]`, two lists of prices. The lists differ only for
    models with probabilities near the solver's tolerance.
  """
  found, texts, p = _tree_program(pair, parents, scheme)
  paid = np.zeros(len(p))
  paid[texts] = _DUAL_ERROR - _solution(*found).eqlin.marginals / _GAIN_SCALE
  # The solver may give one improbable sequence a price far from the mean, to
  # compensate for other sequences with the same prefix. The first list limits
  # such prices. The second list also distributes the difference over the
  # sequences with the same prefix.
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
  """Returns the linear program of `tree_optimum`.

  Returns:
    A tuple of the program in the format of `program`, the indices of the
    sequences with p > 0, and the probabilities p of all sequences.
  """
  length = schemes.height(parents) + 1
  vocab = pair.vocab_size
  p = joint(pair.p, length)
  joint(pair.q, length - 1)
  offsets = np.cumsum([0, *map(len, p)])
  laws, reach = np.concatenate(pair.p[:length]), np.concatenate(p)
  # Trees with the same set of contexts allow the same outcomes. They are merged
  # into one.
  drafts = schemes.draw(scheme, parents, np.concatenate(pair.q),
                      np.zeros(1, np.int64))
  weights = {}
  for texts, weight in zip(_texts(drafts), drafts.weights):
    weights[texts] = weights.get(texts, 0) + weight
  # Trees with negligible probability are replaced by a root without children.
  rare = [texts for texts, weight in weights.items() if weight < _RAREST]
  left = sum(weights.pop(texts) for texts in rare)
  if left >= _RAREST:
    weights[(0,)] = weights.get((0,), 0) + left
  texts = offsets[length] + np.flatnonzero(p[length])
  # Variables are divided by p(vy), and the rows of trees by P(T), because the
  # solver treats very small numbers as 0.
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
    for _ in range(length):  # every sequence, then every prefix of it
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
  """Yields the contexts of each draft's real nodes as a sorted tuple."""
  real = drafts.probs.any(-1)
  real[:, 0] = True
  for node in range(1, real.shape[1]):
    parent = drafts.parents[:, node]
    real[:, node] &= real[np.arange(len(real)), parent]
  for contexts, counts in zip(drafts.contexts, real):
    yield tuple(np.unique(contexts[counts]).tolist())


def maxima(programs: Sequence[tuple[np.ndarray, ...]]) -> np.ndarray:
  """Returns the optimum of each program, solved in one call.

  Each program has the format of `program`.
  """
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
  """Returns the optimum of one program in the format of `program`."""
  return -_solution(*found).fun / _GAIN_SCALE


def _solution(gain: np.ndarray, rows: np.ndarray, columns: np.ndarray,
              entries: np.ndarray, totals: np.ndarray, upper: np.ndarray
              ) -> Any:
  """Returns the solver's result, with gains multiplied by -_GAIN_SCALE."""
  from scipy import optimize  # pylint: disable=g-import-not-at-top
  from scipy import sparse  # pylint: disable=g-import-not-at-top
  matrix = sparse.csr_matrix(
      (entries, (rows, columns)), shape=(len(totals), len(gain)))
  # Presolve treats probabilities below 1e-9 as rounding errors. Without
  # presolve, the simplex method may fail for such programs, or return a
  # solution that violates the equations. The other methods are tried next.
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
