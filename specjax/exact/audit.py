"""Audits of a verification rule at sizes with too many drafts to enumerate.

An audit tests a rule at production sizes, for example 16 draft tokens and a
vocabulary of 32,000. p is the target's distribution of the next token after a
context, and q is the drafter's. Both audits evaluate the rule in float32, the
precision of the decoding loop. A hash of the context selects p and q from a
small pool of distributions. No table of all contexts is necessary.

* `enumerate_few`: after each context, q is positive at no more than two tokens,
  and p at almost all tokens or at 50. In some models, both are deterministic,
  as at temperature 0, or p is q. All drafts are enumerated, because they are
  few. The total variation is an exact sum over them.
* `sample_dense`: q is positive at all tokens, and drafts are sampled. A quarter
  of the drafts comes from models with top-k, ties, very small p, or p = q.
  - Let d(y | c) be a function of a token y and its context c. Its mean over y
    under p is 0. x^i is the context of node i of a draft. D_i is the sum of d
    over the tokens on the path to node i.
  - stop_i is the probability that the rule stops at node i, and next_i is the
    distribution of the token emitted there. A lossless rule emits tokens with
    distribution p. The sum over nodes i of
    stop_i (D_i + sum_y next_i(y) d(y | x^i)) therefore has mean 0.
  - The audit fails if the mean of this sum over independent drafts is more than
    `LIMIT` standard errors from 0. A normal variable exceeds this limit with
    probability 3e-12. All functions at all sizes together raise a false alarm
    with probability below 1e-9.
  - The empirical standard error of a few equal terms would be 0. Its lower
    limit is a tenth of the standard error for tokens drawn from p, computed
    from the known variance of d under p.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import numpy as np

from specjax.exact import larger
from specjax.exact.compiled import Compiled
from specjax.exact.compiled import Defects
from specjax.exact.compiled import Example
from specjax.exact.compiled import example_of
from specjax.exact.compiled import NOT_FINITE
from specjax.exact.compiled import SURVIVAL
from specjax.exact.compiled import tails
from specjax.trees import shapes
from specjax.types import Verdict

LIMIT = 7.0  # largest allowed deviation of a mean, in standard errors
TOLERANCE = 1e-4  # tolerated error of float32 sums over a vocabulary
_BATCH = 7  # drafts per call of the rule; odd, unlike other batch sizes
_ENTRIES = 1 << 25  # largest size of `mass [T, V]` in `enumerate_few`
_LAWS = 110_000_000  # entries of all laws of one audit; limits the sample size
_DRAWN = 80, 240  # smallest and largest number of sampled drafts
_ROOTS = 4  # root tokens in `enumerate_few`
# (first, last) depths of tokens. Means are compared for each range of depths.
_GROUPS = ((1, 1), (2, 4), (5, 1 << 30), (1, 1 << 30))


class Audited(NamedTuple):
  """Result of an audit, with the fields of `Outcome` used by `certify`.

  Attributes:
    total_variation: distance of the output distribution from the target's if
      all drafts are enumerated; 0 if drafts are sampled.
    defects: reasons why the audit failed.
    laws: number of evaluated laws.
    example: a draft that shows an error, or None without an error.
  """

  total_variation: float
  defects: frozenset[str]
  laws: int
  example: Example | None


def enumerate_few(compiled: Compiled, parents: Sequence[int], vocab_size: int,
                  seed: int = 0) -> Audited:
  """Returns the exact total variation on models with few drafts.

  Args:
    compiled: the rule. If the rule has state, only the first emitted token is
      compared, because later tokens depend on later rounds.
    parents: `[N]`, parent of each of the N nodes of the drafts. Children of a
      node are drawn independently.
    vocab_size: vocabulary size V.
    seed: seed of the models.
  """
  pool = larger.few_pool(vocab_size, len(parents), seed,
                         "deterministic" in compiled.rule.requires)
  drafts = _few_drafts(pool, parents, vocab_size, seed)
  run = _Evaluation(compiled, pool, parents)
  texts, which = np.unique(drafts.hashes, return_inverse=True)
  which = which.reshape(drafts.hashes.shape)
  mass = np.zeros((len(texts), vocab_size))
  for batch, stop, next_token, _ in run.laws(drafts):
    weight = drafts.weights[batch, None] * stop
    for row, node in np.argwhere(weight > 0):
      mass[which[batch][row, node]] += weight[row, node] * next_token[row, node]
  run.check_figures(drafts, which)
  distance, worst, obtained = _compared(
      pool, parents, drafts, which, mass, compiled.rule.remembers)
  example = run.defects.example
  if distance > TOLERANCE and NOT_FINITE not in run.defects.names:
    draft, node = np.argwhere(which == worst)[0]
    example = run.shown(drafts, draft)._replace(node=node, obtained=obtained)
  return Audited(distance, frozenset(run.defects.names), len(drafts.weights),
                 example)


def _few_drafts(pool: larger.Pool, parents: Sequence[int], vocab_size: int,
                seed: int) -> larger.Drafts:
  """Returns all drafts of one model for each part of the pool.

  A model of the first part has at most 128 drafts, and fewer if nodes *
  vocab_size is large. A model of another part has at most a quarter of this
  number, or 12. Up to 100 models are tried until one has more than half of the
  limit. If none has, the result is from the model with the most drafts.
  """
  nodes = len(parents)
  most = int(np.clip(_ENTRIES // (nodes * vocab_size), 4 * _ROOTS, 128))
  rng = np.random.default_rng([vocab_size, nodes, seed, 1])
  roots, found = larger.roots_of(vocab_size, _ROOTS, rng), []
  for part, share in enumerate(pool.shares):
    limit, drafts = max(most // 4, 3 * _ROOTS) if part else most, None
    for salt in range(100):
      new = larger.grow(pool, parents, roots, 100 * part + salt, limit,
                        part=part)
      if new and (drafts is None or len(new.weights) > len(drafts.weights)):
        drafts = new
      if drafts and len(drafts.weights) > limit // 2:
        break
    found.append(drafts._replace(weights=share * drafts.weights))
  return larger.Drafts.joined(found)


def sample_dense(compiled: Compiled, parents: Sequence[int], vocab_size: int,
                 seed: int = 0) -> Audited:
  """Samples drafts and compares means of functions of the emitted tokens.

  The functions are those of `Functions`. Their means under the target are 0.
  The docstring of this module describes the test. One of 6 drafts ends in
  padding, unless the rule requires full drafts.

  Args:
    compiled: the rule, without state.
    parents: `[N]`, parent of each of the N nodes of the drafts. Children of a
      node are drawn independently.
    vocab_size: vocabulary size V.
    seed: seed of the models and of the drafts.
  """
  nodes = len(parents)
  rng = np.random.default_rng([vocab_size, nodes, seed, 2])
  pool = larger.dense_pool(
      vocab_size, seed, "deterministic" in compiled.rule.requires)
  drafts = _dense_drafts(pool, parents, vocab_size, rng)
  if "full" not in compiled.rule.requires:
    cut = np.arange(len(drafts.weights)) % 6 == 5
    drafts = drafts.cut(np.where(
        cut, rng.integers(1, nodes, len(cut)), nodes))
  count = len(drafts.weights)
  functions = Functions(pool, rng)
  run = _Evaluation(compiled, pool, parents)
  depth = np.array(shapes.depths(parents))
  inside = np.array([(first <= depth) & (depth <= last)
                     for first, last in _GROUPS])  # of the node's token
  after = np.array([(first <= depth + 1) & (depth + 1 <= last)
                    for first, last in _GROUPS])  # functions of the next token
  terms = []
  for batch, stop, next_token, _ in run.laws(drafts):
    rows, tokens = drafts.rows[batch], drafts.tokens[batch]
    means = functions.means(rows, next_token, stop > 0)
    for draft in range(len(rows)):
      total = np.zeros((2, nodes, len(_GROUPS), functions.count))
      for node in range(1, nodes):
        above = parents[node]
        value = functions.at(rows[draft, above], tokens[draft, node])
        own = inside[:, node, None] * np.stack(
            [value, functions.variances[rows[draft, above]]])[:, None]
        total[:, node] = total[:, above] + own
      for node in np.flatnonzero(stop[draft] > 0):
        row = rows[draft, node]
        total[:, node] += after[:, node, None] * np.stack([
            means[draft, node], functions.variances[row]])[:, None]
      terms.append(np.einsum("n,sngf->sgf", stop[draft], total))
  value, known = np.moveaxis(np.array(terms), 1, 0)
  # An error of some drafts is clearest in their own mean.
  plain = (drafts.rows[:, 0] < pool.parts[0].stop) & (drafts.lengths == nodes)
  for some in (np.ones(count, bool), plain, ~plain):
    mean, number = value[some].mean(0), np.sum(some)
    error = np.sqrt(np.maximum(
        value[some].var(0), 0.01 * known[some].mean(0)) / number)
    size = np.maximum(np.abs(mean) - TOLERANCE, 0) / np.maximum(error, 1e-12)
    if size.max() > LIMIT:
      group, which = np.unravel_index(np.argmax(size), size.shape)
      reason = (f"the mean of {functions.names[which]} over {number} drafts is "
                f"{size.max():.0f} standard errors from the target's; "
                f"{LIMIT:.0f} are allowed")
      shown = np.argmax(np.abs(value[:, group, which]) * some)
      run.defects.note(reason, run.shown(drafts, shown)._replace(
          reason=reason))
      break
  run.check_mean_figures(drafts)
  return Audited(0.0, frozenset(run.defects.names), count, run.defects.example)


def _dense_drafts(pool: larger.Pool, parents: Sequence[int], vocab_size: int,
                  rng: np.random.Generator) -> larger.Drafts:
  """Returns sampled drafts, for each part of the pool its share."""
  count = int(np.clip(_LAWS // (len(parents) * vocab_size), *_DRAWN))
  found = []
  for part, share in enumerate(pool.shares):
    roots = larger.roots_of(vocab_size, round(share * count), rng)
    found.append(larger.grow(pool, parents, roots, part, rng=rng, part=part))
  drafts = larger.Drafts.joined(found)
  return drafts._replace(weights=np.full(len(drafts.weights),
                                         1 / len(drafts.weights)))


class Functions:
  """F functions of a token with mean 0 under the target's distribution p.

  Attributes:
    names: names of the functions.
    variances: `[K, F]` variances of the F functions under each of the K
      distributions p of a pool.
  """

  def __init__(self, pool: larger.Pool, rng: np.random.Generator):
    rows, vocab_size = pool.p.shape
    signs = np.where(rng.random((3, vocab_size)) < 0.5, -1, 1)
    ids = np.arange(vocab_size)
    made = {
        "the sign of p - q": np.sign(pool.p - pool.q),
        "the sign of p - 2 q": np.sign(pool.p - 2 * pool.q),
        "log p": np.clip(np.log(pool.p * vocab_size + 1e-30) / 4, -2, 2),
        "the indicator of the likeliest token": (
            pool.p == pool.p.max(-1, keepdims=True)),
        "the sign of the half of the vocabulary": np.tile(
            np.where(ids * 2 < vocab_size, -1, 1), (rows, 1)),
        **{f"random signs of the tokens ({i})": np.tile(sign, (rows, 1))
           for i, sign in enumerate(signs)}}
    self.names = tuple(made)
    values = np.stack([*made.values()], axis=1).astype(np.float32)
    p = pool.p / pool.p.sum(-1, keepdims=True, dtype=np.float64)
    means = np.stack([v @ row for v, row in zip(values, p)])
    self._centred = values - means[..., None].astype(np.float32)
    self.variances = np.stack(
        [v**2 @ row for v, row in zip(self._centred, p)])

  @property
  def count(self) -> int:
    return len(self.names)

  def at(self, row: int, token: int) -> np.ndarray:
    """Returns the values `[F]` of the functions at `token`.

    `row` is the index in the pool of p after the token's context.
    """
    return self._centred[row, :, token]

  def means(self, rows: np.ndarray, laws: np.ndarray, some: np.ndarray
            ) -> np.ndarray:
    """Returns the means `[n, N, F]` of the functions under distributions.

    Nodes with equal rows are computed together, because each product reads all
    values of the functions.

    Args:
      rows: `[n, N]` indices in the pool of p after the tokens' contexts.
      laws: `[n, N, V]` distributions of a token.
      some: `[n, N]`, False for nodes that are left out. Their means are 0.
    """
    means = np.zeros((*rows.shape, self.count))
    for row in np.unique(rows[some]):
      here = some & (rows == row)
      means[here] = laws[here] @ self._centred[row].T
    return means


class _Evaluation:
  """Evaluates the laws of drafts and checks that laws are distributions."""

  def __init__(self, compiled: Compiled, pool: larger.Pool,
               parents: Sequence[int]):
    self._compiled, self._pool = compiled, pool
    self._parents = np.array(parents)
    self._is_chain = (self._parents == np.arange(-1, len(parents) - 1)).all()
    self._figures, self._tails = [], []
    self.defects = Defects("float32", TOLERANCE, TOLERANCE)
    self._state = compiled.initial_state(len(parents) - 1, "float32")

  def laws(self, drafts: larger.Drafts) -> Iterator[tuple]:
    """Yields the laws of `_BATCH` drafts at a time.

    An item is `(slice, stop, next_token, figures)`: a slice of the drafts, two
    fields of `Law`, and the result of `Verifier.figures` or None.
    """
    for start in range(0, len(drafts.weights), _BATCH):
      batch = slice(start, start + _BATCH)
      stop, next_token, figures = self._law(drafts, batch)
      stop, next_token = self.defects.check(
          stop, next_token, drafts.weights[batch],
          lambda row, start=start: self.shown(drafts, start + row))
      if figures is not None:
        self._figures.append(figures)
        self._tails.append(tails(
            stop, np.tile(self._parents, (len(stop), 1))))
      yield batch, stop, next_token, figures

  def _law(self, drafts: larger.Drafts, batch: slice) -> tuple:
    p, q = self._inputs(drafts, batch)
    tokens = drafts.tokens[batch]
    state = self._state
    if state is not None:
      state = jax.tree.map(
          lambda x: np.repeat(x[None], len(tokens), axis=0), state)
    return self._compiled.laws(
        (tokens, np.tile(self._parents, (len(tokens), 1)), q, p, state),
        _BATCH, "float32")

  def _inputs(self, drafts: larger.Drafts, batch: slice
              ) -> tuple[np.ndarray, np.ndarray]:
    rows = drafts.rows[batch]
    q = self._pool.q[rows[:, self._parents]]
    q[:, 0] = 0
    q[np.arange(q.shape[1]) >= drafts.lengths[batch, None]] = 0
    return self._pool.p[rows], q

  def shown(self, drafts: larger.Drafts, draft: int) -> Example:
    """Returns one draft with its law, as an example for an error message."""
    one = slice(draft, draft + 1)
    p, q = self._inputs(drafts, one)
    stop, next_token, *_ = self._law(drafts, one)
    return example_of((drafts.tokens[one], self._parents[None], q, p), stop,
                      next_token, 0)

  def check_figures(self, drafts: larger.Drafts, texts: np.ndarray) -> None:
    """Compares figures with the laws of all drafts of the models.

    `texts [n, N]` numbers the contexts of the nodes.
    """
    if self._figures:
      figures, found = self._joined()
      self.defects.check_figures(
          figures, found, texts if self._is_chain else texts[:, :1],
          drafts.weights, functools.partial(self.shown, drafts))

  def check_mean_figures(self, drafts: larger.Drafts) -> None:
    """Compares the means of figures over sampled drafts with those of laws.

    The survival may be a conditional mean of the tails, so their difference has
    mean 0 and at most the variance of a coin with this probability.
    """
    if not self._figures:
      return
    (expected, survival), found = self._joined()
    # `expected` is compared for every draft, the survival is right here.
    self.defects.check_figures(
        (expected, found), found, np.zeros((len(found), 1), int),
        drafts.weights, functools.partial(self.shown, drafts))
    gap = survival - found
    coin = np.mean(np.clip(survival * (1 - survival), 0, None), axis=0)
    error = np.sqrt(np.maximum(gap.var(0), 0.01 * coin) / len(gap))
    off = np.maximum(np.abs(gap.mean(0)) - TOLERANCE, 0)
    if not (off <= LIMIT * error).all():
      node = np.argmax(np.nan_to_num(off - LIMIT * error, nan=np.inf))
      reason = (f"the mean of survival[{node}] over {len(gap)} drafts is "
                f"{survival[:, node].mean():.4g}; that of P(tau >= {node}) is "
                f"{found[:, node].mean():.4g}")
      self.defects.note(SURVIVAL, self.shown(
          drafts, np.argmax(np.abs(gap[:, node])))._replace(reason=reason))

  def _joined(self) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    return (tuple(map(np.concatenate, zip(*self._figures))),
            np.concatenate(self._tails))


class _Contexts(NamedTuple):
  """Tree of the contexts in all drafts. A context is an integer.

  Attributes:
    order: the contexts, parents before children.
    rows: index in the pool of the distributions after each context.
    children: list of `(token, child)` for each context.
  """

  order: list[int]
  rows: dict[int, int]
  children: list[list[tuple[int, int]]]


def _contexts(parents: Sequence[int], drafts: larger.Drafts, which: np.ndarray,
              count: int) -> _Contexts:
  """Returns the tree of `count` contexts.

  `which [n, N]` is the context of each of the N nodes of n drafts.
  """
  tree = _Contexts([], {}, [[] for _ in range(count)])
  for node, parent in enumerate(parents):
    for draft, context in enumerate(which[:, node]):
      if context in tree.rows:
        continue
      tree.rows[context] = drafts.rows[draft, node]
      tree.order.append(context)
      if node:
        tree.children[which[draft, parent]].append(
            (drafts.tokens[draft, node], context))
  return tree


def _compared(pool: larger.Pool, parents: Sequence[int], drafts: larger.Drafts,
              which: np.ndarray, mass: np.ndarray, only_first: bool
              ) -> tuple[float, int, np.ndarray]:
  """Returns the total variation, the worst context and its next token's law.

  `mass[c, y]`, of shape `[T, V]`, is the probability that the rule stops at
  context c and emits token y. `continued[c]` is the probability that the rule
  stops above c and the target's own tokens then lead to c. A sequence may leave
  the tree of drafts after c with token y. Its probability is
  mass[c, y] + continued[c] p(y | c). If `only_first` is True, only the first
  emitted token is compared.
  """
  count = len(mass)
  tree = _contexts(parents, drafts, which, count)
  target, continued, under = np.zeros(count), np.zeros(count), mass.sum(-1)
  roots, where = np.unique(which[:, 0], return_inverse=True)
  target[roots] = np.bincount(where.reshape(-1), drafts.weights)
  below = [(context, child) for context in tree.order
           for _, child in tree.children[context]]
  for context, child in reversed(below):
    under[context] += under[child]
  distance, farthest, worst, obtained = 0.0, -1.0, None, None
  queue = list(roots)
  while queue:
    context = queue.pop()
    p = pool.p[tree.rows[context]].astype(np.float64)
    p /= p.sum()
    here = mass[context] + continued[context] * p
    law, wanted = here.copy(), target[context] * p
    gap = here - wanted
    for token, child in tree.children[context]:
      continued[child], target[child] = here[token], wanted[token]
      law[token] += under[child]
      gap[token] = 0
    if only_first:
      gap = law - wanted
    else:
      queue += [child for _, child in tree.children[context]]
    distance += np.abs(gap).sum()
    total = law.sum()
    off = np.abs(law - total * p).sum()
    if off > farthest:
      farthest, worst = off, context
      obtained = law / total if total > 0 else law
  return 0.5 * float(distance), worst, obtained


_STRETCH = 16  # successive tokens of a sequence with one compared mean


def walk(compiled: Compiled, gamma: int, vocab_size: int, tokens: int,
         rows: int, seed: int = 0) -> Audited:
  """Decodes sequences with random models and compares means.

  This audit is for rules with state, because their errors may appear only after
  many rounds. It compares the means of `Functions` over the decoded tokens.

  Args:
    compiled: the rule.
    gamma: draft length of the chains.
    vocab_size: vocabulary size V.
    tokens: number of tokens per sequence.
    rows: number of sequences. Each has different models.
    seed: seed of the models and of all samples.

  Returns:
    An `Audited` with total variation 0, because no drafts are enumerated.
  """
  rng = np.random.default_rng([vocab_size, gamma, seed, 3])
  pool = larger.dense_pool(vocab_size, seed)
  functions = Functions(pool, rng)
  hashes = larger.extended(np.arange(rows).astype(np.uint64), 0)
  roots = rng.integers(vocab_size, size=rows).astype(np.int32)
  states = jax.tree.map(lambda x: np.repeat(x[None], rows, axis=0),
                        compiled.initial_state(gamma, "float32"))
  longest = tokens + gamma + 1
  sums = np.zeros((2, longest + _STRETCH, functions.count))
  defects, rounds = Defects("float32", TOLERANCE, TOLERANCE), []
  lengths, laws = np.zeros(rows, int), 0
  parents = np.tile(np.arange(-1, gamma), (rows, 1))
  while lengths.min() < tokens:
    drafted, at, texts = _draft_chains(pool, hashes, gamma, rng)
    q = np.concatenate(
        [np.zeros((rows, 1, vocab_size), np.float32), pool.q[at[:, :-1]]], 1)
    arguments = (np.concatenate([roots[:, None], drafted], 1), parents, q,
                 pool.p[at], states)
    stop, next_token, *_ = compiled.laws(arguments, rows, "float32")
    laws += rows
    show = functools.partial(example_of, arguments, stop, next_token)
    defects.check(stop, next_token, np.full(rows, 1 / rows), show)
    if defects.names:
      return Audited(0.0, frozenset(defects.names), laws, defects.example)
    each = np.arange(rows)
    taus = _one_of_each(stop, rng)
    extra = _one_of_each(next_token[each, taus], rng)
    rounds.append(_Round(lengths, np.zeros((rows, functions.count)), show))
    for node in range(gamma + 1):
      live = (node <= taus) & (lengths + node < tokens)
      token = np.where(node == taus, extra, drafted[:, min(node, gamma - 1)])
      for row in np.flatnonzero(live):
        which, place = at[row, node], lengths[row] + node
        value = functions.at(which, token[row])
        rounds[-1].values[row] += value
        sums[0, place] += value
        sums[1, place] += functions.variances[which]
    path = np.where(np.arange(gamma + 1) <= taus[:, None],
                    np.arange(gamma + 1), 0).astype(np.int32)
    states = compiled.commits(
        arguments, Verdict(path=path, num_accepted=taus.astype(np.int32),
                           next_token=extra.astype(np.int32)), rows, "float32")
    hashes = larger.extended(texts[each, taus], extra)
    roots, lengths = extra.astype(np.int32), lengths + taus + 1
  return _deviation(functions, sums[:, :tokens], laws, rounds)


def _draft_chains(pool: larger.Pool, hashes: np.ndarray, gamma: int,
                  rng: np.random.Generator
                  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Draws a chain of gamma tokens after each of n contexts.

  Args:
    pool: distributions p and q of the models.
    hashes: `[n]` hashes of the contexts.
    gamma: draft length.
    rng: random generator.

  Returns:
    `(tokens, rows, hashes)`: the drawn tokens `[n, gamma]`, and
    `[n, gamma + 1]` indices in the pool and hashes of the contexts after 0 to
    gamma of these tokens.
  """
  tokens, texts, sums = [], [hashes], larger.cumulative(pool.q)
  for _ in range(gamma):
    new = larger.drawn(sums, pool.rows(texts[-1]), rng)
    tokens.append(new)
    texts.append(larger.extended(texts[-1], new))
  texts = np.stack(texts, axis=1)
  return np.stack(tokens, axis=1).astype(np.int32), pool.rows(texts), texts


def _one_of_each(laws: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Returns one token drawn from each of `laws [n, V]`."""
  return larger.drawn(larger.cumulative(np.maximum(laws, 0)),
                      np.arange(len(laws)), rng)


class _Round(NamedTuple):
  """One round of `walk`: tokens before it, sums of functions, its drafts."""

  lengths: np.ndarray
  values: np.ndarray
  show: Callable[[int], Example]


def _deviation(functions: Functions, sums: np.ndarray, laws: int,
               rounds: Sequence[_Round]) -> Audited:
  # For each stretch of `_STRETCH` successive tokens, compare two means: over
  # its tokens, and over all tokens from its start to the end.
  starts = range(0, sums.shape[1], _STRETCH)
  ends = [(a, min(b, sums.shape[1])) for a in starts
          for b in (a + _STRETCH, sums.shape[1])]
  parts = np.stack([sums[:, a:b].sum(1) for a, b in ends])
  size = np.abs(parts[:, 0]) / np.sqrt(np.maximum(parts[:, 1], 1))
  if size.max() <= LIMIT:
    return Audited(0.0, frozenset(), laws, None)
  part, which = np.unravel_index(np.argmax(size), size.shape)
  first, end = ends[part]
  reason = (f"the mean of {functions.names[which]} over tokens {first} to "
            f"{end} is {size.max():.0f} standard errors from the target's; "
            f"{LIMIT:.0f} are allowed")
  # The witness is the draft of these tokens with the largest sum.
  _, row, turn = max(
      (np.abs(found.values[row, which]), row, turn)
      for turn, found in enumerate(rounds)
      for row in np.flatnonzero((first <= found.lengths)
                                & (found.lengths < end)))
  example = rounds[turn].show(row)._replace(reason=reason)
  return Audited(0.0, frozenset({reason}), laws, example)
