"""Audit of a sampler of another framework, as a black box on numpy arrays.

`certify` requires the law of a rule. An engine has only a sampler: a function
that draws random numbers and returns tokens. `audit_sampler` tests such a
function in one of two ways.

* If the caller passes the random numbers in, as uniforms in [0, 1), the sampler
  is a deterministic function of C uniforms. The unit cube is divided into boxes
  in which the result is constant. Bisection finds their faces. The volumes of
  the boxes are the exact law (`_boxes`).
* If the sampler draws its own random numbers, rounds are sampled. After n
  rounds, T is the total variation between the frequencies of the emitted
  sequences and the target's distribution p. Let M be the sum of
  sqrt(p(y) (1 - p(y))) / 2 over all sequences y.
  - A lossless sampler has E[T] <= M / sqrt(n). One round changes T by at most
    1 / n, so McDiarmid's inequality bounds the probability of
    T > M / sqrt(n) + sqrt(log(1 / a) / 2n) by a.
  - For a sampler at total variation d, T is at least the error of the
    frequency of one fixed set of sequences. Hoeffding's inequality bounds the
    probability of T < d - sqrt(log(1 / b) / 2n) by b.
  - So n = ((M + sqrt(log(1 / a) / 2) + sqrt(log(1 / b) / 2)) / d)^2 rounds find
    d with probability 1 - b at the false-alarm level a. The test looks after
    n/8, n/4, n/2 and n rounds, and a is divided by the number of looks. Both
    statements hold for every n. No normal approximation is used.
"""

from collections.abc import Callable
from collections.abc import Sequence
import itertools
import math
from typing import Any
from typing import NamedTuple

import numpy as np

from specjax.exact import enumeration
from specjax.exact import larger
from specjax.exact import pairs
from specjax.exact import schemes as schemes_lib
from specjax.exact.certificate import Certificate
from specjax.exact.compiled import Example
from specjax.exact.drafts import first_contexts
from specjax.exact.drafts import longer
from specjax.exact.drafts import Starts
from specjax.types import Draft
from specjax.types import Law
from specjax.utils import fields

_EDGE = 2.0**-44  # a thinner part of the unit interval is not examined
_BISECTIONS = 44
_INSIDE = 4  # random points of each box, in addition to its corners
_BOXES = 4096  # boxes per draft
_COINS = 12  # most uniforms per round, because a box has 2^C corners
_LOOKS, _MISSED = 4, 0.05  # looks of the sequential test; 1 - power
_ENTRIES = 1 << 22  # most numbers in p of one call of a batched sampler
NO_TOKEN = "emits no token, or more than one per node"
OUTSIDE = "emits a token outside the vocabulary"
IMPOSSIBLE = "emits a token that has probability 0 under the target"

Sampler = Callable[..., Any]


def audit_sampler(sampler: Sampler, *, coins: int | None = None,
                  batched: bool = False, trees: Sequence[Sequence[int]] = (),
                  scheme: str | schemes_lib.Scheme = "iid",
                  vocab_sizes: Sequence[int] | None = None,
                  gammas: Sequence[int] = (1, 2),
                  kinds: Sequence[str] = pairs.KINDS,
                  seeds: Sequence[int] = (0,), padding: bool = True,
                  large: int = 32_000, dtype: str = "float64",
                  total_variation: float = 0.05, false_alarm: float = 1e-6,
                  seed: int = 0) -> Certificate:
  """Tests whether a sampler of any framework is lossless.

  The sampler verifies one draft and returns the emitted tokens: the accepted
  draft tokens and the next token. It is called as

    sampler(draft_tokens, draft_probs, target_probs, random)

  With `trees`, it has a fifth argument, `parents`. One round is tested. For a
  sampler without memory between rounds this is sufficient, by induction. For a
  rule with memory, write its law and use `certify`.

  With `coins`, the law is exact within 1e-11 if the sampler uses its uniforms
  in threshold tests and in draws by the inverse cumulative distribution: every
  result then fills boxes, and along each uniform every result is one interval.
  A result that returns after another one can be missed if its box is narrow,
  because only the corners and 4 interior points of a box are compared. Regions
  that are not boxes, such as those of exponential races, raise an error: leave
  `coins` out for such a sampler.

  Without `coins`, a lossless sampler is refuted with a probability of at most
  `false_alarm`. A sampler at `total_variation` or more on one of the models is
  refuted with a probability of at least 0.95. With V = `large`, tokens are
  merged into at most 9 cells by p, q and id. There, the test finds twice this
  total variation between cells.

  Args:
    sampler: function with these arguments, for a draft of N - 1 tokens, a chain
      unless `trees` is given. The outputs of torch, JAX or a subprocess must be
      converted to numpy or to lists.
      draft_tokens: `[N - 1]` int32.
      draft_probs: `[N - 1, V]`, row i is the distribution q of token i. A row
        of zeros is padding, which must not be accepted.
      target_probs: `[N, V]`, row 0 is p after the root, row i + 1 is p after
        draft token i.
      random: uniforms `[coins * N]` in (0, 1), or a `numpy.random.Generator`.
      parents: `[N]` int32, see `Draft`. Node i + 1 is draft token i.
      It returns 1 to N token ids. Entries from the first negative id on are
      ignored, so results may be padded with -1.
    coins: number of uniforms per node, for the exact test. A chain of gamma
      tokens with `coins=1` has one uniform for every drafted token and one for
      the next token. None means that the sampler gets a generator.
    batched: if True, all arguments except `parents` and a generator have a
      leading batch axis, and the result is `[B, <=N]` with -1 after the last
      token of a row.
    trees: the `parents` of the tested trees. () means chains.
    scheme: function of `exact.schemes` that draws the draft, or its name.
    vocab_sizes: vocabulary sizes V. None means (3, 4) with `coins`, else (3,).
    gammas: draft lengths of chains.
    kinds: kinds of small models, see `random_pair`.
    seeds: seeds of the small models.
    padding: if True, also test drafts of which the last token is padding.
    large: vocabulary size of the sampled test with large models; 0 means none.
      It is used with chains and scheme "iid" only.
    dtype: dtype of the probabilities, "float64" or "float32". The tolerance of
      the exact total variation is 1e-9 or 1e-5.
    total_variation: total variation that the sampled test finds, in (0, 1].
    false_alarm: largest probability of refuting a lossless sampler, in (0, 1).
    seed: seed of all random numbers of the audit.

  Returns:
    A `Certificate`. `tried` describes the trials, and `laws` counts calls of
    the sampler, one per draft. `total_variation` is exact
    with `coins`. For sampled trials it is measured if the trial failed, and 0
    otherwise. `example` has a draft, p, q, and the expected and obtained
    distributions of the emitted token.

  Raises:
    ValueError: an argument is out of range; with `coins`, the sampler returns
      different results for equal uniforms, or its regions are not boxes.

  Example: token verification that draws a rejected token from p again.

    >>> import numpy as np
    >>> def biased(tokens, q, p, uniforms):
    ...   for i, x in enumerate(tokens):
    ...     if uniforms[i] * q[i, x] >= p[i, x]:
    ...       break
    ...   else:
    ...     i = len(tokens)
    ...   next_token = np.searchsorted(np.cumsum(p[i]), uniforms[-1])
    ...   return [*tokens[:i], next_token]
    >>> found = audit_sampler(biased, coins=1, gammas=(1,), vocab_sizes=(3,),
    ...                       kinds=("dense",), padding=False, large=0)
    >>> found.lossless, round(found.total_variation, 3)
    (False, 0.062)
  """
  if vocab_sizes is None:
    vocab_sizes = (3,) if coins is None else (3, 4)
  _check(coins, vocab_sizes, gammas, kinds, seeds, large, dtype,
         total_variation, false_alarm)
  shapes = [*map(tuple, trees)] or [
      tuple(range(-1, gamma)) for gamma in gammas]
  for parents in shapes:
    for vocab_size in vocab_sizes:
      enumeration.check_size(vocab_size, len(parents) - 1, len(parents))
    if coins is not None and coins * len(parents) > _COINS:
      raise ValueError(
          f"coins is {coins}, so a draft of {len(parents)} nodes has "
          f"{coins * len(parents)} uniforms; at most {_COINS} can be tested: "
          "use shorter drafts, or leave coins out")
  box = _Box(sampler, coins, batched, bool(trees), dtype,
             np.random.default_rng(seed))
  plans = [
      _Plan(kind, vocab_size, model_seed, parents, bool(trees), pads)
      for pads, kind, vocab_size, model_seed, parents in itertools.product(
          (False, True)[:1 + padding], kinds, vocab_sizes, seeds, shapes)]
  some_large = large and not trees and scheme == "iid"
  looks = _LOOKS * ((len(plans) if coins is None else 0)
                    + len(_LARGE) * bool(some_large))
  test = _Test(total_variation, false_alarm / max(looks, 1))
  found = [plan.trial(box, scheme, test) for plan in plans]
  if some_large and not any(trial.fails for trial in found):
    wider = test._replace(finds=min(2 * total_variation, 1))
    found += [_large_trial(box, kind, large, wider) for kind in _LARGE]
  return _certificate(found, box, test, false_alarm, dtype)


def _check(coins, vocab_sizes, gammas, kinds, seeds, large, dtype,
           total_variation, false_alarm):
  if coins is not None:
    fields.check_at_least("coins", coins, 1)
  for name, values, least in (("vocab_sizes", vocab_sizes, 2),
                              ("gammas", gammas, 1), ("seeds", seeds, 0)):
    for value in values:
      fields.check_at_least(f"an entry of {name}", value, least)
  if not set(kinds) <= set(pairs.KINDS) or isinstance(kinds, str):
    raise ValueError(f"kinds is {kinds!r}; give some of "
                     f"{', '.join(pairs.KINDS)}")
  if large and large < 100:
    raise ValueError(f"large is {large}; give a vocabulary size of at least "
                     "100, or 0 for no trial with a large vocabulary")
  if dtype not in enumeration.TOLERANCE:
    raise ValueError(f"dtype is {dtype!r}; it must be 'float64' or 'float32'")
  for name, value in (("total_variation", total_variation),
                      ("false_alarm", false_alarm)):
    if not 0 < value < 1:
      raise ValueError(f"{name} is {value}; it must be between 0 and 1")


class _Box:
  """The sampler with arguments and results as arrays with a batch axis.

  Attributes:
    rounds: number of calls per row so far.
  """

  def __init__(self, sampler, coins, batched, has_trees, dtype, rng):
    self._sampler, self._batched, self._has_trees = sampler, batched, has_trees
    self.coins, self.rng, self.rounds = coins, rng, 0
    self.dtype = dtype

  def __call__(self, drafts: "_Rows", index: np.ndarray,
               random: np.ndarray | None) -> np.ndarray:
    """Returns the emitted tokens `[n, N]` of drafts, padded with -1.

    Args:
      drafts: the drafts.
      index: `[n]` selected drafts.
      random: uniforms `[n, C]`, or None for a generator.
    """
    self.rounds += len(index)
    most = max(1, _ENTRIES // drafts.p[0].size)
    found = [np.zeros((0, drafts.p.shape[1]), int)]
    for start in range(0, len(index), most):
      rows = index[start:start + most]
      coins = None if random is None else random[start:start + most]
      if self._batched:
        arguments = self._arguments(drafts, rows, coins)
        result = np.asarray(self._sampler(*arguments))
        if result.ndim != 2 or len(result) != len(rows):
          raise ValueError(
              f"the sampler returned an array of shape {result.shape} for "
              f"{len(rows)} drafts; with batched=True return [B, N] token ids "
              "with -1 after the last token of a row")
      else:
        result = [self._sampler(*self._arguments(
            drafts, row, None if coins is None else coins[i]))
                  for i, row in enumerate(rows)]
      found.append(_padded(result, drafts.p.shape[1]))
    return np.concatenate(found)

  def _arguments(self, drafts, rows, coins):
    cast = lambda x: x[rows].astype(self.dtype, copy=False)
    arguments = (drafts.tokens[rows], cast(drafts.q), cast(drafts.p),
                 self.rng if coins is None else coins)
    return arguments + (drafts.parents,) * self._has_trees


def _padded(results, nodes):
  """Returns token lists as `[n, N]` with -1 after the last token.

  A row without tokens, or with more than N, becomes -2.
  """
  found = np.full((len(results), nodes), -1)
  for row, tokens in enumerate(results):
    tokens = np.asarray(tokens).reshape(-1)
    length = np.argmax(np.append(tokens, -1) < 0)
    if 0 < length <= nodes:
      found[row, :length] = tokens[:length]
    else:
      found[row] = -2
  return found


class _Rows(NamedTuple):
  """Drafts as the sampler receives them.

  Attributes:
    weights: `[n]` probability of each draft.
    tokens: `[n, N - 1]` drafted tokens.
    q: `[n, N - 1, V]` rows of q.
    p: `[n, N, V]` rows of p.
    parents: `[N]` shape of the drafts.
  """

  weights: np.ndarray
  tokens: np.ndarray
  q: np.ndarray
  p: np.ndarray
  parents: np.ndarray


def _boxes(box: _Box, drafts: _Rows
           ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the exact law of the emitted tokens of every draft.

  A box is a product of intervals of the C uniforms. If the results at its
  corners and interior points differ, two of these points are connected by a
  path that changes one uniform at a time. On this path, bisection finds a value
  at which the result changes, and the box is divided there.

  Returns:
    `(draft, tokens, mass)`: index `[m]` of the draft, emitted tokens `[m, N]`
    and joint probability `[m]` of both.
  """
  count = box.coins * len(drafts.parents)
  evaluate = lambda owner, points: box(
      drafts, np.repeat(owner, points.shape[1]),
      points.reshape(-1, count)).reshape(*points.shape[:2], -1)
  corners = np.array([*itertools.product((0.0, 1.0), repeat=count)])[:, ::-1]
  owner = np.arange(len(drafts.weights))
  low = np.full((len(owner), count), _EDGE)
  high, made, leaves = 1 - low, len(owner), []
  is_first = True
  while len(owner):
    shape = (len(owner), _INSIDE, count)
    at = np.concatenate([np.broadcast_to(corners, (len(owner), *corners.shape)),
                         box.rng.random(shape)], axis=1)
    # The corners are exactly `low` and `high`, where bisection was evaluated.
    points = np.where(at == 1, high[:, None],
                      low[:, None] + at * (high - low)[:, None])
    results = evaluate(owner, points)
    if is_first and (evaluate(owner, points) != results).any():
      raise ValueError("the sampler returned different tokens for equal "
                       "uniforms; use no other random numbers, or leave coins "
                       "out")
    is_first = False
    differs = (results != results[:, :1]).any(-1)
    mixed = differs.any(-1)
    leaves.append((owner[~mixed], results[~mixed, 0],
                   np.prod((high - low)[~mixed], axis=-1)))
    owner, low, high = owner[mixed], low[mixed], high[mixed]
    if not len(owner):
      break
    made += 2 * len(owner)
    if made > _BOXES * len(drafts.weights):
      raise ValueError(
          f"the results of the sampler need more than {_BOXES:,} boxes per "
          "draft; a sampler that compares or combines its uniforms, such as an "
          "exponential race, has no boxes: leave coins out")
    row = np.arange(len(owner))
    start = points[mixed, 0]
    end = points[mixed, np.argmax(differs[mixed], axis=-1)]
    # Path k has the first k uniforms of `end` and the others of `start`.
    path = np.where(np.arange(count) < np.arange(count + 1)[:, None],
                    end[:, None], start[:, None])
    steps = evaluate(owner, path)
    which = np.argmax((steps[:, 1:] != steps[:, :-1]).any(-1), axis=-1)
    base = steps[row, which]
    near, far = start[row, which], end[row, which]
    for _ in range(_BISECTIONS):
      middle = (near + far) / 2
      point = path[row, which].copy()
      point[row, which] = middle
      same = (evaluate(owner, point[:, None])[:, 0] == base).all(-1)
      near, far = np.where(same, middle, near), np.where(same, far, middle)
    below, above = high.copy(), low.copy()
    below[row, which], above[row, which] = near, far  # near < far: corner 0
    owner = np.tile(owner, 2)
    low, high = np.concatenate([low, above]), np.concatenate([below, high])
    some = (high > low).all(-1)
    owner, low, high = owner[some], low[some], high[some]
  draft, tokens, mass = (np.concatenate(x) for x in zip(*leaves))
  total = np.bincount(draft, mass, minlength=len(drafts.weights))
  return draft, tokens, mass * (drafts.weights / total)[draft]


class _Test(NamedTuple):
  """Sampled test: the total variation that it finds, and its level per look."""

  finds: float
  level: float

  def rounds(self, spread: float) -> int:
    """Returns the number n of rounds, for M = `spread`."""
    logs = sum(math.sqrt(math.log(1 / x) / 2) for x in (self.level, _MISSED))
    return math.ceil(((spread + logs) / self.finds)**2)

  def limit(self, spread: float, rounds: int) -> float:
    """Returns the largest total variation of frequencies that passes."""
    return (spread + math.sqrt(math.log(1 / self.level) / 2)
            ) / math.sqrt(rounds)


class _Trial(NamedTuple):
  """Result of one trial.

  Attributes:
    total_variation: exact or measured; 0 for a sampled trial that passed.
    fails: True if the sampler is refuted.
    defects: reasons that are not a total variation.
    witness: settings of the trial.
    rounds: sampled rounds; 0 for an exact trial.
    expected_tokens: expected or mean number of emitted tokens.
    pair: the models, or None for large models.
    sizes: gamma (longest path), V and N.
    example: a draft that shows the failure, or None.
  """

  total_variation: float
  fails: bool
  defects: tuple[str, ...]
  witness: dict[str, Any]
  rounds: int
  expected_tokens: float
  pair: pairs.Pair | None
  sizes: tuple[int, int, int]
  example: Example | None


class _Plan(NamedTuple):
  """Settings of a trial on one pair of small models."""

  kind: str
  vocab_size: int
  seed: int
  parents: tuple[int, ...]
  is_tree: bool
  pads: bool

  @property
  def longest(self) -> int:
    return schemes_lib.height(self.parents)

  def trial(self, box: _Box, scheme, test: _Test) -> _Trial:
    pair = pairs.random_pair(
        self.kind, self.vocab_size, self.longest + 1, self.seed)
    p, q = pair.tables()
    drafts = schemes_lib.draw(scheme, self.parents, q, np.zeros(1, int))
    if self.pads:  # the last token of `parents` is a leaf
      drafts.probs[:, -1] = 0
    drafts = drafts.rows(drafts.weights > 0)
    rows = _Rows(drafts.weights, drafts.tokens[:, 1:].astype(np.int32),
                 drafts.probs[:, 1:], p[drafts.contexts],
                 np.array(self.parents, np.int32))
    witness = {"kind": self.kind, "vocab_size": self.vocab_size,
               "seed": self.seed}
    witness |= ({"tree": self.parents} if self.is_tree
                else {"gamma": self.longest})
    if self.pads:
      witness["padding"] = 1
    measure = lambda tokens, mass: _measured(tokens, mass, pair)
    if box.coins is None:
      draft, tokens, mass, found, fails = _sampled(box, rows, measure, test,
                                                   _spread(pair))
      rounds = len(draft)
    else:
      draft, tokens, mass = _boxes(box, rows)
      found, rounds = measure(tokens, mass), 0
      fails = found.total_variation > enumeration.TOLERANCE[box.dtype]
    fails = fails or bool(found.defects)
    lengths = (tokens >= 0).sum(-1)
    example = None
    if fails:
      example = _example(rows, drafts.contexts, draft, tokens, mass, found)
    sizes = (self.longest, self.vocab_size,
             len(self.parents) if self.is_tree else 0)
    return _Trial(found.total_variation if fails or not rounds else 0.0, fails,
                  found.defects, witness, rounds, float(mass @ lengths),
                  pair, sizes, example)


class _Measured(NamedTuple):
  """Comparison of emitted sequences with the target; see `larger.Deviation`."""

  total_variation: float
  context: int | None
  obtained: np.ndarray | None
  defects: tuple[str, ...]


def _measured(tokens: np.ndarray, mass: np.ndarray, pair: pairs.Pair
              ) -> _Measured:
  """Compares the weighted emitted sequences `[m, N]` with the target."""
  vocab_size, p = pair.vocab_size, pair.tables()[0]
  bad = {NO_TOKEN: tokens[:, 0] < 0, OUTSIDE: (tokens >= vocab_size).any(-1)}
  lengths = (tokens >= 0).sum(-1)
  bad[NO_TOKEN] |= lengths > pair.depth
  good = ~bad[NO_TOKEN] & ~bad[OUTSIDE]
  offsets = first_contexts(vocab_size, pair.depth)
  contexts = np.zeros(len(tokens), np.int64)
  impossible = np.zeros(len(tokens), bool)
  for depth in range(tokens.shape[1]):
    has = good & (depth < lengths)
    token = np.where(has, tokens[:, depth], 0)
    impossible |= has & (p[np.where(has, contexts, 0), token] == 0)
    contexts = np.where(has, longer(contexts, token, vocab_size), contexts)
  bad[IMPOSSIBLE] = impossible
  starts = {}
  for length in np.unique(lengths[good]):
    here = good & (lengths == length)
    starts[int(length)] = Starts(contexts[here] - offsets[length], None,
                                 mass[here])
  found = larger.deviation(starts, pair)
  defects = tuple(name for name, rows in bad.items()
                  if mass[rows].sum() > 1e-9)
  missing = mass[~good].sum()  # counts half in `deviation`
  return _Measured(found.total_variation + 0.5 * float(missing),
                   found.context, found.obtained, defects)


def _spread(pair: pairs.Pair) -> float:
  """Returns M, see the docstring of this module."""
  law = pairs.joint(pair.p, pair.depth)[-1]
  return 0.5 * float(np.sqrt(law * (1 - np.minimum(law, 1))).sum())


def _sampled(box: _Box, rows: _Rows, measure, test: _Test, spread: float):
  """Samples rounds until the test refutes the sampler or has looked 4 times.

  Returns:
    `(draft, tokens, mass, measured, fails)`, as `_boxes` for the rounds.
  """
  rounds = test.rounds(spread)
  draft, tokens = np.zeros(0, int), np.zeros((0, len(rows.parents)), int)
  for look in range(_LOOKS):
    more = -(-rounds >> (_LOOKS - 1 - look)) - len(draft)
    new = box.rng.choice(len(rows.weights), more,
                         p=rows.weights / rows.weights.sum())
    if box.coins is None:
      uniforms = None
    else:
      uniforms = box.rng.random((more, box.coins * len(rows.parents)))
    draft = np.append(draft, new)
    tokens = np.concatenate([tokens, box(rows, new, uniforms)])
    mass = np.full(len(draft), 1 / len(draft))
    found = measure(tokens, mass)
    fails = bool(found.defects) or (
        found.total_variation > test.limit(spread, len(draft)))
    if fails:
      break
  return draft, tokens, mass, found, fails


_LARGE = ("language", "top_k", "nearly_one_hot")  # kinds of large models


def _large_rows(kind: str, vocab_size: int, rng: np.random.Generator
                ) -> tuple[np.ndarray, np.ndarray]:
  """Returns `[V]` p and q: power laws with noise, with or without top-50."""
  order = rng.permutation(vocab_size)
  logits = -1.1 * np.log1p(np.argsort(order))
  p, q = (np.exp(logits + rng.normal(size=vocab_size)) for _ in "pq")
  if kind == "top_k":
    p, q = (x * (x >= np.sort(x)[-50]) for x in (p, q))
  if kind == "nearly_one_hot":
    p, q = (x / x.sum() * 1e-4 for x in (p, q))
    p[-1] = q[-1] = 1
    p[0] += 0.4
  p[1] = 0 if kind != "nearly_one_hot" else p[1]
  return p / p.sum(), q / q.sum()


def _large_trial(box: _Box, kind: str, vocab_size: int, test: _Test) -> _Trial:
  """Samples rounds of one drafted token with a large vocabulary.

  The models ignore their context. Every token belongs to a cell, so the cells
  of the emitted tokens have a known distribution.
  """
  rng = np.random.default_rng([_LARGE.index(kind), vocab_size])
  p, q = _large_rows(kind, vocab_size, rng)
  cells = np.where(p >= 2 * q, 1, np.where(p > q, 2, np.where(q > 2 * p, 3, 4)))
  cells = np.where(q == 0, 5, cells)
  cells[np.argmax(q)], cells[np.argmax(p)], cells[-1] = 20, 21, 22
  cells[p == 0] = 23
  _, cells = np.unique(cells, return_inverse=True)
  merged = [np.bincount(cells, x) for x in (p, q)]
  pair = pairs.iid_pair(*merged, depth=2)
  share = lambda x, rows: np.broadcast_to(x, (vocab_size, rows, vocab_size))
  rows = _Rows(q, np.arange(vocab_size, dtype=np.int32)[:, None], share(q, 1),
               share(p, 2), np.array([-1, 0], np.int32))

  def measure(tokens, mass):
    mapped = np.where((tokens >= 0) & (tokens < vocab_size),
                      cells[np.clip(tokens, 0, vocab_size - 1)], tokens)
    mapped = np.where(tokens >= vocab_size, pair.vocab_size, mapped)
    return _measured(mapped, mass, pair)

  draft, tokens, mass, found, fails = _sampled(box, rows, measure, test,
                                               _spread(pair))
  example = None
  if fails:
    first = tokens[:, 0][(tokens[:, 0] >= 0) & (tokens[:, 0] < vocab_size)]
    obtained = np.bincount(first, minlength=vocab_size) / len(draft)
    example = _one_draft(rows, draft, tokens, mass, draft[0])._replace(
        node=0, obtained=obtained)
  return _Trial(found.total_variation if fails else 0.0, fails, found.defects,
                {"kind": kind, "vocab_size": vocab_size, "gamma": 1},
                len(draft), float((tokens >= 0).sum(-1) @ mass), None,
                (1, vocab_size, 0), example)


def _example(rows: _Rows, contexts: np.ndarray, draft: np.ndarray,
             tokens: np.ndarray, mass: np.ndarray, found: _Measured) -> Example:
  """Returns the likeliest draft through the worst context."""
  node, shown = 0, np.argmax(rows.weights)
  if found.context is not None:
    through = (contexts == found.context) * rows.weights[:, None]
    if through.any():
      shown, node = np.unravel_index(np.argmax(through), through.shape)
    elif found.context:  # no draft has the context; show a prefix
      found = found._replace(obtained=None)
  example = _one_draft(rows, draft, tokens, mass, shown)
  if found.obtained is None:
    return example._replace(reason="; ".join(found.defects) or (
        "the sampler emits sequences that no draft begins with"))
  return example._replace(node=node, obtained=found.obtained)


def _one_draft(rows: _Rows, draft: np.ndarray, tokens: np.ndarray,
               mass: np.ndarray, shown: int) -> Example:
  """Returns one draft with the law of its emitted tokens as `stop` and rows.

  Emitted sequences that do not follow the draft are not part of this law.
  """
  nodes, vocab_size = rows.p.shape[1:]
  below = {(-1, -1): 0}  # (parent, token) of the first such real node
  for i, (parent, token) in enumerate(
      zip(rows.parents[1:], rows.tokens[shown]), 1):
    if rows.q[shown, i - 1].any():
      below.setdefault((int(parent), int(token)), i)
  law = np.zeros((nodes, vocab_size))
  here = draft == shown
  for emitted, weight in zip(tokens[here], mass[here] / mass[here].sum()):
    *path, last = emitted[emitted >= 0].tolist() or [vocab_size]
    node = 0
    for token in path:
      node = below.get((node, token))
      if node is None:
        break
    if node is not None and last < vocab_size:
      law[node, last] += weight
  stop = law.sum(-1)
  q = np.concatenate([np.zeros((1, vocab_size)), rows.q[shown]])
  return Example(
      Draft(np.append(0, rows.tokens[shown]), rows.parents, q), rows.p[shown],
      Law(stop, law / np.where(stop > 0, stop, 1)[:, None]))


def _certificate(found: list[_Trial], box: _Box, test: _Test,
                 false_alarm: float, dtype: str) -> Certificate:
  worst = max(found, key=lambda trial: (
      trial.fails, trial.total_variation, len(trial.defects)))
  small = [trial for trial in found if trial.pair is not None]
  chains = [trial for trial in small if not trial.sizes[2]]
  sampled = [trial for trial in found if trial.rounds]
  exact = [trial for trial in found if not trial.rounds]
  tried = []
  if exact:
    tried.append(f"{len(exact)} x exact law, by boxes of uniforms")
  if sampled:
    tried.append(
        f"{len(sampled)} x sampled, at most "
        f"{max(trial.rounds for trial in sampled):,} rounds each; a total "
        f"variation of {test.finds:g} (twice that if V is large) is found with "
        f"probability {1 - _MISSED:g}, all false alarms together have "
        f"{false_alarm:g}")
  gamma, vocab_size, nodes = map(max, zip(*(x.sizes for x in small)))
  sizes = f"gamma <= {gamma}, V <= {vocab_size:,}"
  if nodes:
    sizes += f", trees of up to {nodes} nodes"
  sizes += "".join(f"; sampled with V = {trial.sizes[1]:,}" for trial in
                   found[-1:] if trial.pair is None)
  mean = lambda values: math.fsum(values) / max(len(values), 1)
  return Certificate(
      lossless=not worst.fails, total_variation=worst.total_variation,
      witness=worst.witness,
      expected_tokens=mean([trial.expected_tokens for trial in small]),
      bound=mean([1 + pairs.full_information_optimum(
          trial.pair, trial.sizes[0]) for trial in chains]) if chains
      else math.nan,
      defects=tuple(sorted({x for trial in found for x in trial.defects})),
      models=len(chains), laws=box.rounds, dtype=dtype,
      trees=len(small) - len(chains), tried=tuple(tried), sizes=sizes,
      example=worst.example)
