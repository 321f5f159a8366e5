"""Compares lifted single-step rules on trees with traversal verification.

  python experiments/runs/lifted_trees.py OUTPUT.csv [pairs]

A *lift* turns a rule for one position with several drafts into a rule for
trees. A node has a target distribution u of mass m <= 1; the mass 1 - m belongs
to the outcome "leave", which returns to the parent. The single-step rule
couples the node's children with u and "leave": for children x it selects child
k with probability b_k(x), or a next token, or "leave". Children are visited in
some order. A child starts with p of its own context and the mass b_k / (1 - the
b of children visited before), the conditional probability of its selection. If
its subtree is left, the next child is visited. This is exact for every exact
single-step rule, because the mean over the drafts of a subtree accepts with
exactly its mass, and subtrees are independent given their first tokens. The
lift of recursive rejection sampling is traversal verification.

The script computes the expected accepted tokens of every rule on random pairs
of models with V = 3, exactly, by enumeration of all drafts. `optimum` is the
linear program of `analysis.tree_optimum`. Results are in docs/results/trees.md.
Forty pairs take about ten minutes on two CPU cores.
"""

import functools
import itertools
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from lib import common  # noqa: E402
import numpy as np  # noqa: E402
import scipy.optimize  # noqa: E402
import scipy.sparse  # noqa: E402

import specjax as sj  # noqa: E402
from specjax import analysis  # noqa: E402
from specjax.exact.pairs import joint  # noqa: E402

V, KINDS = 3, ("dense", "zeros", "ties", "uniform")
TREES = ((-1, 0, 0), (-1, 0, 0, 1), (-1, 0, 0, 2), (-1, 0, 1, 1),
         (-1, 0, 0, 1, 1), (-1, 0, 0, 1, 2), (-1, 0, 0, 0, 1), (-1, 0, 0, 1, 3),
         (-1, 0, 0, 2, 2))
SMALLEST = 1e-15


def siblings(q, count, scheme):
  """Yields `(tokens, probability, rows of q)` of the children of a node."""
  for tokens in itertools.product(range(V), repeat=count):
    law, chance, rows = q, 1.0, []
    for x in tokens:
      rows.append(law)
      chance = chance * law[x]
      if scheme == "without_replacement":
        law = np.where(np.arange(V) == x, 0, law)
        free = ~np.isin(np.arange(V), [*tokens[:len(rows)]])
        law = law if law.any() else free * 1.0
        law = law / law.sum() if law.any() else law
    if chance > 0:
      yield tokens, chance, rows


def recursive(u, q, count, scheme):
  """Returns {children: (b [K], leftover [V + 1])} of recursive rejection."""
  table = {}
  for tokens, _, rows in siblings(q, count, scheme):
    left, reach, b = u, 1.0, []
    for x, row in zip(tokens, rows):
      a = min(1, left[x] / row[x])
      b.append(reach * a)
      reach *= 1 - a
      rest = np.maximum(left - np.append(row, 0), 0)
      left = rest / rest.sum() if rest.sum() > SMALLEST else left
    table[tokens] = np.array(b), left
  return table


def k_seq(u, q, count, scheme):
  """Returns the table of `recursive` for K-SEQ, which tests all children."""
  row = np.append(q, 0)

  def share(rho):
    beta = np.minimum(row, u / rho).sum()
    return (1 - max(1 - beta, 0)**count) / beta if beta > 0 else count

  low, high = (1.0, 1.0) if share(1.0) <= 1 else (1.0, float(count))
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (low, middle) if share(middle) <= middle else (middle, high)
  rest = np.maximum(u - share(high) * np.minimum(row, u / high), 0)
  rest = rest / rest.sum() if rest.sum() > SMALLEST else u
  table = {}
  for tokens, _, _ in siblings(q, count, scheme):
    reach, b = 1.0, []
    for x in tokens:
      a = min(1, u[x] / (high * q[x]))
      b.append(reach * a)
      reach *= 1 - a
    table[tokens] = np.array(b), rest
  return table


def transport(u, q, count, scheme):
  """Returns the table of `recursive` for the largest probability of a child.

  A token of several children belongs to the first of them. Among the optima,
  tokens of earlier children are preferred, because their subtrees are larger.
  """
  drafts = [*siblings(q, count, scheme)]
  chances = np.array([chance for _, chance, _ in drafts])
  gain = np.zeros((len(drafts), V + 1))
  for i, (tokens, _, _) in enumerate(drafts):
    for k, x in reversed([*enumerate(tokens)]):
      gain[i, x] = 1 - 1e-6 * k
  n = len(drafts)
  where = np.arange(n * (V + 1))
  matrix = scipy.sparse.coo_matrix(
      (np.ones(2 * len(where)), (np.concatenate(
          [where // (V + 1), n + where % (V + 1)]), np.tile(where, 2))))
  found = scipy.optimize.linprog(
      -gain.reshape(-1), A_eq=matrix.tocsr()[:-1],
      b_eq=np.concatenate([chances, u])[:-1], method="highs")
  if found.x is None:
    raise ArithmeticError(f"transport: {found.message}")
  plan = np.maximum(found.x.reshape(n, V + 1), 0) / chances[:, None]
  table = {}
  for (tokens, _, _), row in zip(drafts, plan):
    b, row = np.zeros(count), row / max(row.sum(), SMALLEST)
    for k, x in enumerate(tokens):
      b[k], row = row[x], np.where(np.arange(V + 1) == x, 0, row)
    table[tokens] = b, (row / row.sum() if row.sum() > SMALLEST else u)
  return table


# An order of visits is a function `(sizes, b, later) -> indices` of the
# children in their order of drawing: sizes of their subtrees, probabilities of
# selection, and for each child the function from its mass to the probability
# that its first child would be accepted.


def drawn(sizes, b, later):
  del b, later
  return range(len(sizes))


def largest_first(sizes, b, later):
  del b, later
  return sorted(range(len(sizes)), key=lambda k: -sizes[k])


def last_first(sizes, b, later):
  del b, later
  return range(len(sizes))[::-1]


def lookahead(sizes, b, later):
  """Maximises the probability that a grandchild would be accepted."""
  def value(order):
    total, ahead = 0.0, 1.0
    for k in order:
      if ahead > SMALLEST:
        total += ahead * later[k](min(1, b[k] / ahead))
      ahead -= b[k]
    return total

  return max(itertools.permutations(range(len(sizes))), key=value)


def lift(single, order, pair, parents, scheme, mass=1.0):
  """Returns E[tau] of a lifted rule, and its total variation from the target.

  `mass` is that of the root. If it is below 1, the second value has no meaning.
  """
  horizon = 1 + max(sj.exact.schemes.height(parents), 0)
  below = {v: [c for c, parent in enumerate(parents) if parent == v]
           for v in range(len(parents))}
  plan = functools.cache(lambda u, node, context: single(
      np.array(u), q_at(context), len(below[node]), scheme))
  size = [1] * len(parents)
  for node in reversed(range(1, len(parents))):
    size[parents[node]] += size[node]
  q_at = lambda context: pair.q[len(context)][index(context)]
  p_at = lambda context: pair.p[len(context)][index(context)]

  def visit(node, context, mass):
    """Returns {outcome: probability} over drafts below the node.

    An outcome is a text of accepted tokens and the next one, or None for
    "leave".
    """
    u = np.append(mass * p_at(context), 1 - mass)
    if not below[node]:
      return outcomes_of(u, context, 1.0)
    table = plan(tuple(u), node, context)
    total = {}
    for tokens, chance, _ in siblings(q_at(context), len(below[node]), scheme):
      b, left = table[tokens]
      reach = chance  # probability of these children, with no subtree accepted
      ahead = 1.0
      later = [functools.partial(first_accepted, child, (*context, x))
               for child, x in zip(below[node], tokens)]
      for k in order([size[c] for c in below[node]], b, later):
        child = below[node][k]
        a = min(1, b[k] / ahead) if ahead > SMALLEST else 0.0
        ahead -= b[k]
        inside = visit(child, (*context, tokens[k]), a)
        leave = inside.pop(None, 0.0)
        add(total, inside, reach)
        reach *= leave
      add(total, outcomes_of(left, context, 1.0), reach)
    return total

  def first_accepted(node, context, mass):
    if not below[node]:
      return 0.0
    return np.minimum(mass * p_at(context), q_at(context)).sum()

  def outcomes_of(u, context, weight):
    return {**{(*context, y): weight * u[y] for y in range(V) if u[y] > 0},
            None: weight * u[V]}

  found = visit(0, (), mass)
  law, length = np.zeros(V**horizon), 0.0
  for text, chance in found.items():
    if text is None:
      continue
    length += chance * (len(text) - 1)
    rest = np.full(1, chance)
    for k in range(len(text), horizon):
      first = index(text) * V**(k - len(text))
      rest = (rest[:, None] * pair.p[k][first:first + len(rest)]).reshape(-1)
    start = index(text) * V**(horizon - len(text))
    law[start:start + len(rest)] += rest
  target = joint(pair.p, horizon)[-1]
  return length, 0.5 * np.abs(law - target).sum()


def index(context):
  """Returns the number of a context among those of its length."""
  number = 0
  for x in context:
    number = number * V + x
  return number


def add(total, other, weight):
  for text, chance in other.items():
    total[text] = total.get(text, 0.0) + weight * chance


RULES = {
    "traversal": (recursive, drawn),
    "recursive, largest visited first": (recursive, largest_first),
    "recursive, last visited first": (recursive, last_first),
    "recursive, visited by lookahead": (recursive, lookahead),
    "k_seq": (k_seq, drawn),
    "transport": (transport, drawn),
    "transport, visited by lookahead": (transport, lookahead),
}


def main(output: str, pairs: str = "40"):
  rows, worst = [], 0.0
  recursive_rule = sj.exact.Compiled(sj.verifiers.Recursive())
  for parents, scheme in itertools.product(TREES, (
      "iid", "without_replacement")):
    sums = {}
    for seed in range(int(pairs) // len(KINDS)):
      for kind in KINDS:
        pair = sj.exact.random_pair(kind, V, len(parents), seed)
        values = {}
        for name, (single, order) in RULES.items():
          if single is k_seq and scheme != "iid":
            continue
          values[name], distance = lift(single, order, pair, parents, scheme)
          worst = max(worst, distance)
        values["recursive rejection"] = sj.exact.enumerate_trees(
            recursive_rule, pair, parents, scheme,
            nodes=max(map(len, TREES))).expected_accepted
        values["optimum"] = analysis.tree_optimum(pair, parents, scheme)
        for name, value in values.items():
          sums.setdefault(name, []).append(value)
    base = np.array(sums["traversal"])
    for name, values in sums.items():
      ahead = np.array(values) - base
      rows.append({
          "tree": " ".join(map(str, parents)), "scheme": scheme, "rule": name,
          "accepted": float(np.mean(values)), "pairs": len(values),
          "better": float(np.mean(ahead > 1e-7)),
          "worse": float(np.mean(ahead < -1e-7)), "least": float(ahead.min()),
          "most": float(ahead.max())})
      print(*rows[-1].values(), flush=True)
    common.write_csv(pathlib.Path(output), rows)
  print("largest total variation", worst)


if __name__ == "__main__":
  main(*sys.argv[1:])
