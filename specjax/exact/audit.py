"""Audits of sizes at which the drafts of dense models cannot be enumerated.

Both audits evaluate the rule in float32, as the decoding loop does, on models
whose rows are picked from a small pool by a hash of the text. So every context
has its own pair of distributions, and only the rows along a draft are needed.

* `enumerate_few`: the drafter knows at most two tokens after a context and the
  target all of them. The drafts are few and are summed over: no chance is
  involved, and the total variation is exact.
* `sample_dense`: the drafter knows all tokens; drafts are drawn. Let d_t be any
  function of the text with mean 0 under p given the tokens before t, and D_i
  the sum of d_1..d_i along a path. For a valid rule the sum over nodes i of
  stop_i (D_i + sum_y next_i(y) d(y | x^i)) has mean 0 over the drafts, because
  the emitted tokens follow p. The mean over independent drafts is compared with
  `LIMIT` standard errors. A normal mean exceeds them with probability 3e-12, so
  all functions at all sizes together raise a false alarm with probability below
  1e-9. The standard error is at least a tenth of that of the sum of d over the
  emitted tokens, whose variance is known, so that a few equal terms cannot make
  it 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from specjax.exact import larger
from specjax.exact.compiled import Compiled
from specjax.exact.compiled import Example
from specjax.trees import shapes
from specjax.types import Draft
from specjax.types import Law
from specjax.types import Verdict

LIMIT = 7.0  # standard errors
TOLERANCE = 1e-4  # of float32 sums over a whole vocabulary
_BATCH = 8  # drafts of one call
_ENTRIES = 1 << 26  # of the masses of all contexts
_LAWS = 1 << 27  # numbers of all laws of one audit: sets how many are drawn
_DRAWN = 96, 240  # the fewest and the most drafts
_ROOTS = 4
_GROUPS = ((1, 1), (2, 4), (5, 1 << 30), (1, 1 << 30))  # depths, first to last


class Audited(NamedTuple):
  """Result of an audit, with the fields of an `Outcome` that `certify` reads.

  Attributes:
    total_variation: on the few drafts; 0 where drafts were drawn.
    defects: ways in which a law was wrong.
    laws: laws evaluated.
    example: a draft that shows the fault, or None.
  """

  total_variation: float
  defects: frozenset[str]
  laws: int
  example: Example | None


def enumerate_few(compiled: Compiled, parents: Sequence[int], vocab_size: int,
                  seed: int = 0) -> Audited:
  """The exact total variation on models with few drafts, see the module.

  Args:
    compiled: the rule. Of a rule that remembers earlier rounds only the first
      emitted token is compared: later ones depend on its next rounds.
    parents: `[N]`, the shape of the drafts; children are independent draws.
    vocab_size: V.
    seed: of the models.
  """
  nodes = len(parents)
  most = int(np.clip(_ENTRIES // (nodes * vocab_size), _ROOTS, 128))
  rng = np.random.default_rng([vocab_size, nodes, seed, 1])
  pool, drafts = larger.few_pool(vocab_size, nodes, seed), None
  roots = larger.roots_of(vocab_size, _ROOTS, rng)
  for salt in range(100):  # in most models the drafts are too many or too few
    new = larger.grow(pool, parents, roots, salt, most)
    if new and (drafts is None or len(new.weights) > len(drafts.weights)):
      drafts = new
    if drafts and len(drafts.weights) > most // 2:
      break
  run = _Evaluation(compiled, pool, parents)
  texts, which = np.unique(drafts.hashes, return_inverse=True)
  which = which.reshape(drafts.hashes.shape)
  mass = np.zeros((len(texts), vocab_size))
  for batch, stop, next_token, survival in run.laws(drafts):
    weight = drafts.weights[batch, None] * stop
    for row, node in np.argwhere(weight > 0):
      mass[which[batch][row, node]] += weight[row, node] * next_token[row, node]
    run.check_survival(which[batch], drafts.weights[batch], stop, survival)
  run.check_survival_sums()
  distance, worst, obtained = _compared(
      pool, parents, drafts, which, mass, compiled.rule.remembers)
  example = run.example
  if distance > TOLERANCE and not run.defects:
    here = (which == worst)
    draft, node = np.argwhere(here)[0]
    example = run.shown(drafts, draft)._replace(node=node, obtained=obtained)
  return Audited(distance, frozenset(run.defects), len(drafts.weights), example)


def sample_dense(compiled: Compiled, parents: Sequence[int], vocab_size: int,
                 seed: int = 0) -> Audited:
  """Draws drafts and compares means with the target's, see the module.

  Args:
    compiled: the rule; it must not remember earlier rounds.
    parents: `[N]`, the shape of the drafts; children are independent draws.
    vocab_size: V.
    seed: of the models and of the drafts.
  """
  nodes = len(parents)
  count = int(np.clip(_LAWS // (nodes * vocab_size), *_DRAWN))
  count -= count % _BATCH
  pool = larger.dense_pool(vocab_size, seed)
  rng = np.random.default_rng([vocab_size, nodes, seed, 2])
  roots = larger.roots_of(vocab_size, count, rng)
  drafts = larger.grow(pool, parents, roots, 0, rng=rng)
  functions = Functions(pool, rng)
  run = _Evaluation(compiled, pool, parents)
  depth = np.array(shapes.depths(parents))
  inside = np.array([(first <= depth) & (depth <= last)
                     for first, last in _GROUPS])  # of a node's own token
  after = np.array([(first <= depth + 1) & (depth + 1 <= last)
                    for first, last in _GROUPS])  # of the token after it
  terms = []
  for batch, stop, next_token, _ in run.laws(drafts):
    rows, tokens = drafts.rows[batch], drafts.tokens[batch]
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
            functions.mean(row, next_token[draft, node]),
            functions.variances[row]])[:, None]
      terms.append(np.einsum("n,sngf->sgf", stop[draft], total))
  value, known = np.moveaxis(np.array(terms), 1, 0)
  error = np.sqrt(np.maximum(value.var(0), 0.01 * known.mean(0)) / len(value))
  off = np.maximum(np.abs(value.mean(0)) - TOLERANCE, 0)
  size = off / np.maximum(error, 1e-12)
  example = run.example
  if size.max() > LIMIT:
    group, which = np.unravel_index(np.argmax(size), size.shape)
    run.defects.add(
        f"the mean of {functions.names[which]} over {count} drafts is "
        f"{size.max():.0f} standard errors from the target's; {LIMIT:.0f} are "
        "allowed")
    if example is None:
      example = run.shown(drafts, np.argmax(np.abs(value[:, group, which])))
  return Audited(0.0, frozenset(run.defects), count, example)


class Functions:
  """The functions of a token whose means are compared, centred under p.

  Attributes:
    names: for readers.
    variances: `[K, F]`, under p.
  """

  def __init__(self, pool: larger.Pool, rng: np.random.Generator):
    rows, vocab_size = pool.p.shape
    signs = np.where(rng.random((3, vocab_size)) < 0.5, -1, 1)
    ids = np.arange(vocab_size)
    made = {
        "the sign of p - q": np.sign(pool.p - pool.q),
        "the sign of p - 2 q": np.sign(pool.p - 2 * pool.q),
        "log p": np.clip(np.log(pool.p * vocab_size + 1e-30) / 4, -2, 2),
        "whether it is the likeliest token": (
            pool.p == pool.p.max(-1, keepdims=True)),
        "the half of the vocabulary that it is in": np.tile(
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

  def at(self, row, token):
    """`[F]`, their values at a token after a context of this row."""
    return self._centred[row, :, token]

  def mean(self, row, law):
    """`[F]`, their means under `law [V]`."""
    return self._centred[row] @ law


class _Evaluation:
  """Evaluates laws at drafts and checks that they are laws.

  Attributes:
    defects: ways in which some law was not a law.
    example: a draft of the first defect.
  """

  def __init__(self, compiled: Compiled, pool: larger.Pool,
               parents: Sequence[int]):
    self._compiled, self._pool = compiled, pool
    self._parents = np.array(parents)
    self._gaps, self.defects, self.example = {}, set(), None
    self._state = compiled.initial_state(len(parents) - 1, "float32")

  def laws(self, drafts):
    """Yields a slice, `stop`, `next_token` and `survival` or None."""
    for start in range(0, len(drafts.weights), _BATCH):
      batch = slice(start, start + _BATCH)
      stop, next_token, survival = self._law(drafts, batch)
      sums = next_token @ np.ones(next_token.shape[-1], np.float32)
      some = stop > 0
      for defect, bad in (
          ("a law is not finite", ~np.isfinite(stop).all(-1)
           | (some & ~np.isfinite(sums)).any(-1)),
          ("a law is negative", (stop < 0).any(-1)
           | (some & (next_token.min(-1) < 0)).any(-1)),
          ("stop does not sum to 1", np.abs(stop.sum(-1) - 1) > TOLERANCE),
          ("a row of next_token does not sum to 1",
           (some & (np.abs(sums - 1) > TOLERANCE)).any(-1))):
        if bad.any() and defect not in self.defects:
          self.defects.add(defect)
          self.example = self.example or self.shown(
              drafts, start + np.argmax(bad))
      if "a law is not finite" in self.defects:
        stop, next_token = (np.where(np.isfinite(x), x, 0)
                            for x in (stop, next_token))
      yield batch, stop, next_token, survival

  def _law(self, drafts, batch):
    p, q = self._inputs(drafts, batch)
    tokens = drafts.tokens[batch]
    state = self._state
    if state is not None:
      state = jax.tree.map(
          lambda x: np.repeat(x[None], len(tokens), axis=0), state)
    return self._compiled.laws(
        (tokens, np.tile(self._parents, (len(tokens), 1)), q, p, state),
        _BATCH, "float32")

  def _inputs(self, drafts, batch):
    rows = drafts.rows[batch]
    q = self._pool.q[rows[:, self._parents]]
    q[:, 0] = 0
    return self._pool.p[rows], q

  def shown(self, drafts, draft) -> Example:
    """One draft with its law, for readers."""
    one = slice(draft, draft + 1)
    p, q = self._inputs(drafts, one)
    stop, next_token, *_ = self._law(drafts, one)
    return Example(Draft(drafts.tokens[draft], self._parents, q[0]), p[0],
                   Law(stop[0], next_token[0]))

  def check_survival(self, texts, weights, stop, survival):
    """Adds up survival - P(tau >= i) by prefix; chains alone."""
    if survival is None or (
        self._parents != np.arange(-1, len(self._parents) - 1)).any():
      return
    gap = survival - np.cumsum(stop[:, ::-1], axis=-1)[:, ::-1]
    for text, value in zip(texts.ravel(), (weights[:, None] * gap).ravel()):
      self._gaps[text] = self._gaps.get(text, 0.0) + value

  def check_survival_sums(self):
    """Reports a survival that is not P(tau >= i)."""
    if self._gaps and not max(map(abs, self._gaps.values())) <= TOLERANCE:
      self.defects.add("survival is not P(tau >= i)")


def _compared(pool, parents, drafts, which, mass, first):
  """Total variation, the worst context, and the law of the token after it.

  `mass [T, V]` is what stops at a text and emits a token. From there the target
  continues, so a text that leaves the tree of drafts after context c with token
  y has probability mass[c, y] + continued[c] p(y | c), where `continued` is the
  mass that stopped above c and was continued to c by the target. With `first`
  only the law of the first token is compared.
  """
  count = len(mass)
  target, continued, under = np.zeros(count), np.zeros(count), mass.sum(-1)
  known, children = {}, [[] for _ in range(count)]
  order = []
  for node in range(len(parents)):
    above = which[:, max(parents[node], 0)]
    for draft, text in enumerate(which[:, node]):
      if text in known:
        continue
      known[text] = drafts.rows[draft, node]
      order.append(text)
      if node:
        children[above[draft]].append((drafts.tokens[draft, node], text))
  roots, where = np.unique(which[:, 0], return_inverse=True)
  target[roots] = np.bincount(where.reshape(-1), drafts.weights)
  below = [(text, child) for text in order for _, child in children[text]]
  for text, child in reversed(below):
    under[text] += under[child]
  distance, farthest, worst, obtained = 0.0, -1.0, None, None
  queue = list(roots)
  while queue:
    text = queue.pop()
    p = pool.p[known[text]].astype(np.float64)
    p /= p.sum()
    here = mass[text] + continued[text] * p
    whole = here.copy()
    gap = here - target[text] * p
    for token, child in children[text]:
      continued[child], target[child] = here[token], target[text] * p[token]
      whole[token] += under[child]
      gap[token] = 0
      queue.append(child)
    if first:
      gap, queue = whole - target[text] * p, queue[:len(queue) - len(
          children[text])]
    distance += np.abs(gap).sum()
    total = whole.sum()
    off = np.abs(whole - total * p).sum()
    if off > farthest:
      farthest, worst = off, text
      obtained = whole / total if total > 0 else whole
  return 0.5 * float(distance), worst, obtained


_STRETCH = 16


def walk(compiled: Compiled, gamma: int, vocab_size: int, tokens: int,
         rows: int, seed: int = 0) -> Audited:
  """Decodes `rows` sequences of random models and compares means, see above.

  Args:
    compiled: the rule.
    gamma: draft length of the chains.
    vocab_size: V.
    tokens: tokens that every row writes.
    rows: sequences, with models of their own contexts.
    seed: of the models and of all samples.

  Returns:
    An `Audited`; its total variation is 0, because nothing is enumerated.
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
    bad = ~(np.isfinite(stop).all(-1) & (np.abs(stop.sum(-1) - 1) < 1e-3))
    if bad.any():
      row = np.argmax(bad)
      return Audited(
          0.0, frozenset({"a law is not finite or stop does not sum to 1"}),
          laws, Example(Draft(*(x[row] for x in arguments[:3])),
                        arguments[3][row], Law(stop[row], next_token[row])))
    each = np.arange(rows)
    taus = larger.drawn(np.maximum(stop, 0), rng)
    extra = larger.drawn(np.maximum(next_token[each, taus], 0), rng)
    for node in range(gamma + 1):
      live = (node <= taus) & (lengths + node < tokens)
      token = np.where(node == taus, extra, drafted[:, min(node, gamma - 1)])
      for row in np.flatnonzero(live):
        which, place = at[row, node], lengths[row] + node
        sums[0, place] += functions.at(which, token[row])
        sums[1, place] += functions.variances[which]
    path = np.where(np.arange(gamma + 1) <= taus[:, None],
                    np.arange(gamma + 1), 0).astype(np.int32)
    states = compiled.commits(
        arguments, Verdict(path=path, num_accepted=taus.astype(np.int32),
                           next_token=extra.astype(np.int32)), rows, "float32")
    hashes = larger.extended(texts[each, taus], extra)
    roots, lengths = extra.astype(np.int32), lengths + taus + 1
  return _deviation(functions, sums[:, :tokens], laws)


def _draft_chains(pool, hashes, gamma, rng):
  """Drafted tokens `[n, gamma]`, rows and hashes `[n, gamma + 1]`."""
  tokens, texts = [], [hashes]
  for _ in range(gamma):
    new = larger.drawn(pool.q[pool.rows(texts[-1])], rng)
    tokens.append(new)
    texts.append(larger.extended(texts[-1], new))
  texts = np.stack(texts, axis=1)
  return np.stack(tokens, axis=1).astype(np.int32), pool.rows(texts), texts


def _deviation(functions, sums, laws):
  # Every stretch, and all tokens from its start on.
  starts = range(0, sums.shape[1], _STRETCH)
  ends = [(a, min(b, sums.shape[1])) for a in starts
          for b in (a + _STRETCH, sums.shape[1])]
  parts = np.stack([sums[:, a:b].sum(1) for a, b in ends])
  size = np.abs(parts[:, 0]) / np.sqrt(np.maximum(parts[:, 1], 1))
  defects = []
  if size.max() > LIMIT:
    part, which = np.unravel_index(np.argmax(size), size.shape)
    where = "tokens {} to {}".format(*ends[part])
    defects.append(
        f"the mean of {functions.names[which]} over {where} is "
        f"{size.max():.0f} standard errors from the target's; "
        f"{LIMIT:.0f} are allowed")
  return Audited(0.0, frozenset(defects), laws, None)
