"""Budgets of verified tokens that the rows of a batch share.

A target call verifies the drafts of several rows. A budget decides how many
tokens of each row's draft are verified, and the others are cut. If it reads the
drafted tokens, the rows' outputs can have another distribution than the
target's, with any verification rule.

Theorem. Let psi(x^l) be the probability that a row's text starts with given
tokens, after verification of the draft x^l, with a continuation by the target.
A rule is exact for all stop rules of a single row iff psi is a martingale:
E[psi(x^l X_{l+1}) | x^l] = psi(x^l) with X_{l+1} from q. (Only if: compare the
stop rules that stop at x^l or one token later, and equally elsewhere. If:
optional stopping.) Call a budget *sequential* if it is computable as follows:
reveal drafted tokens one at a time, in any order between rows that may depend
on the revealed tokens. Before a token is revealed, decide from the revealed
tokens of all rows whether it is verified. If not, all further tokens of its row
are cut. Then every step changes the psi of at most one row, and keeps its
expectation. The product of the rows' psi is therefore a martingale too, so the
joint distribution of the texts is the product of the targets' distributions.

The condition has two parts:

* Own tokens: if the cut of a row depends on its token k only for tokens after
  k, for any fixed drafts of the other rows, the row alone has the target's
  distribution. A row's cut may depend on all drafted tokens of other rows.
* Other rows: if in addition no two rows wait for each other, the rows are
  independent. Let two rows verify one token each, if f(X') and g(X) of the
  OTHER row's token are True. The joint distribution minus the product of the
  targets' is (A - E[g] p)(y) (B - E[f] p')(y'), where A(y) is the probability
  of g(X) and output y after verification of X, and B that of f(X') and y'. Both
  rows alone are exact, but they are dependent.

The history (earlier rounds, contexts, measured times) may be used in any way.
Rules that sample from the target given any draft, such as `TargetWalk`, have a
constant psi, so every budget is exact with them.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.exact import drafts as drafts_lib
from specjax.exact.compiled import Compiled
from specjax.exact.enumeration import CHUNK
from specjax.exact.enumeration import TOLERANCE
from specjax.exact.pairs import joint
from specjax.exact.pairs import KINDS
from specjax.exact.pairs import Pair
from specjax.exact.pairs import random_pair
from specjax.interfaces import Verifier
from specjax.utils import fields

Budget = Callable[[jax.Array, jax.Array], jax.Array]
_LARGEST = 1 << 12  # largest V**(gamma + 1): text of a row in one round
_CALL = 1024  # pairs of drafts per call of the budget


@dataclasses.dataclass(frozen=True)
class BudgetCertificate:
  """Result of `certify_budget` for a selection of models.

  Attributes:
    lossless: True if no total variation of the joint distribution exceeds 1e-9.
    total_variation: largest total variation between the joint distribution of
      both rows' texts and the product of the targets' distributions.
    row_total_variation: largest total variation of the text of a single row. If
      it is 0 and `total_variation` is not, each row has the target's
      distribution, but the rows are dependent.
    witness: settings of the models with the largest `total_variation`: `kind`,
      `vocab_size`, `seed` and gamma. Rows 0 and 1 have the models
      `random_pair(kind, vocab_size, gamma + 1, seed)` with seeds 2 seed and
      2 seed + 1.
    example: drafts and distributions that show the failure, as text, or "".
    verified: verified tokens of both rows, as a mean over drafts and models.
    accepted: expected accepted tokens of both rows, as a mean over the models.
    models: number of enumerated pairs of rows.
  """

  lossless: bool
  total_variation: float
  row_total_variation: float
  witness: dict[str, Any]
  example: str
  verified: float
  accepted: float
  models: int

  def __str__(self):
    verdict = ("lossless on everything tried" if self.lossless
               else "NOT LOSSLESS")
    where = ", ".join(f"{k}={v}" for k, v in self.witness.items())
    return "\n".join([
        verdict,
        f"  worst total variation  {self.total_variation:.2e}  ({where})",
        f"  of one row alone       {self.row_total_variation:.2e}",
        f"  verified tokens        {self.verified:.4f}",
        f"  accepted tokens        {self.accepted:.4f}",
        f"  enumerated             {self.models} pairs of rows",
        *([self.example] if self.example else [])])


class _Row(NamedTuple):
  """All drafts of one row.

  Attributes:
    drafts: the n chains of gamma tokens.
    texts: `[gamma + 1, n, V**(gamma + 1)]` distribution of the row's text after
      verification of the first l tokens of each draft, for every l.
    target: `[V**(gamma + 1)]` distribution of the text under the target.
    accepted: `[gamma + 1, n]` expected accepted tokens.
  """

  drafts: drafts_lib.Drafts
  texts: np.ndarray
  target: np.ndarray
  accepted: np.ndarray


def certify_budget(budget: Budget, verifier: Verifier | Compiled, *,
                   vocab_sizes: Sequence[int] = (3,),
                   gammas: Sequence[int] = (1, 2, 3),
                   seeds: Sequence[int] = (0,),
                   kinds: Sequence[str] = KINDS) -> BudgetCertificate:
  """Proves a budget exact for two rows of small models, or shows a defect.

  Two rows with different models draft a chain each. The budget cuts both
  drafts, and the rule verifies both. All pairs of drafts are enumerated in
  float64. The first gamma + 1 tokens of both rows are compared with the product
  of the targets' distributions. One round is enough: a budget that is exact
  after every history is exact for all rounds, by induction. A failure can also
  be a defect of the rule, so certify the rule first, with `exact.certify`.

  Args:
    budget: jax function `(probs [2, gamma, V], tokens [2, gamma]) -> lengths
      [2]`. It returns the number 0..gamma of verified tokens of each row.
      `probs` are the distributions from which the tokens are drawn. Everything
      else that it reads (estimates from earlier rounds, the number of nodes) is
      history, and constant here.
    verifier: rule without state that verifies the cut chains.
    vocab_sizes: vocabulary sizes V, each at least 2.
    gammas: draft lengths before the cut, each at least 1.
    seeds: seeds of the random models. Each seed produces a pair of rows of each
      kind.
    kinds: kinds of models, see `random_pair`.

  Raises:
    ValueError: the rule has a state, or requires full or deterministic drafts;
      a length is not a whole number in 0..gamma; a size is too large.

  Example: the row with the larger q of its drafted token is verified. Then an
  unlikely draft is less often verified, and its tokens are emitted less often.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> def by_drafted_token(probs, tokens):
    ...   q = jnp.take_along_axis(probs[:, 0], tokens[:, :1], 1)[:, 0]
    ...   return jnp.where(jnp.arange(2) == jnp.argmax(q), 1, 0)
    >>> def by_largest(probs, tokens):
    ...   return jnp.where(jnp.arange(2) == jnp.argmax(probs[:, 0].max(1)), 1,
    ...                    0)
    >>> rule = sj.verifiers.Token()
    >>> certified = lambda budget: sj.analysis.certify_budget(
    ...     budget, rule, vocab_sizes=(3,), gammas=(1,)).lossless
    >>> certified(by_drafted_token), certified(by_largest)
    (False, True)
  """
  compiled = Compiled.of(verifier)
  refused = {"full", "deterministic"} & {*compiled.rule.requires}
  if compiled.rule.remembers or refused:
    raise ValueError(
        f"verifier is {compiled.rule!r}, which "
        + (f"requires {refused.pop()} drafts" if refused else "has a state")
        + "; give a rule without state that verifies drawn and padded chains, "
        "such as Token()")
  if not all(map(len, (gammas, vocab_sizes, seeds, kinds))):
    raise ValueError("gammas, vocab_sizes, seeds or kinds is empty; give at "
                     "least one of each")
  fields.check_at_least("gammas", min(gammas), 1)
  fields.check_at_least("vocab_sizes", min(vocab_sizes), 2)
  if max(vocab_sizes)**(max(gammas) + 1) > _LARGEST:
    raise ValueError(
        f"gammas is {gammas} and vocab_sizes {vocab_sizes}; V**(gamma + 1) "
        f"must be at most {_LARGEST:,}: make gamma or V smaller")
  found, lengths_of = [], jax.jit(jax.vmap(budget))
  for gamma, vocab_size, kind, seed in itertools.product(
      gammas, vocab_sizes, kinds, seeds):
    pairs = [random_pair(kind, vocab_size, gamma + 1, 2 * seed + i)
             for i in range(2)]
    found.append((
        dict(kind=kind, vocab_size=vocab_size, seed=seed, gamma=gamma),
        _examine(pairs, gamma, compiled.quick, lengths_of)))
  witness, (joint_error, _, _, _, example) = max(
      found, key=lambda x: np.nan_to_num(x[1][0], nan=2))
  mean = lambda i: float(np.mean([x[i] for _, x in found]))
  lossless = bool(joint_error <= TOLERANCE["float64"])
  return BudgetCertificate(
      lossless, float(joint_error), float(max(x[1] for _, x in found)), witness,
      "" if lossless else example(), mean(2), mean(3), len(found))


def best_first(scores: jax.Array, nodes: int) -> jax.Array:
  """Returns how many tokens of each row of a batch are verified.

  Tokens are taken in the order of their scores, and those of a row in the order
  of the draft. The score of a token is replaced by the smallest score of its
  row up to this token. If each score depends only on earlier tokens of its row
  and on the history, then the budget is exact (`certify_budget`): the tokens
  can be revealed in the order in which they are taken. Without the replacement,
  a token could be cut because of a token after it.

  Args:
    scores: `[R, gamma]` score of every drafted token, such as the probability
      that the token and all tokens before it are accepted. The score of token k
      must not depend on token k or on later tokens.
    nodes: total number of verified tokens of all rows, without their roots.

  Returns:
    `[R]` int32 numbers of verified tokens. Their sum is the smaller of `nodes`
    and R gamma.

  Example: scores from the largest q. With q of the drafted tokens instead, the
  budget would be biased.

    >>> import jax.numpy as jnp
    >>> from specjax import analysis
    >>> probs = jnp.array([[[0.9, 0.1], [0.8, 0.2]], [[0.6, 0.4], [0.5, 0.5]]])
    >>> scores = jnp.cumprod(probs.max(-1), axis=1)
    >>> print(analysis.best_first(scores, 3))
    [2 1]
  """
  rows, gamma = scores.shape
  scores = jax.lax.cummin(scores, axis=1)
  # Equal scores are taken by position, so that a row's order is kept.
  order = jnp.argsort(-scores.T.reshape(-1), stable=True)
  taken = jnp.zeros(rows * gamma, bool).at[order[:nodes]].set(True)
  return taken.reshape(gamma, rows).sum(0, dtype=jnp.int32)


def text_laws(compiled: Compiled, pair: Pair, gamma: int) -> _Row:
  """Returns all drafts of a row, with the law of its text for every cut."""
  vocab, firsts = pair.vocab_size, drafts_lib.first_contexts(
      pair.vocab_size, gamma + 2)
  p, q = pair.tables()
  whole = drafts_lib.chains(q, np.zeros(1, np.int64), gamma)
  count = len(whole.weights)
  every = whole.rows(np.tile(np.arange(count), gamma + 1)).cut(
      np.repeat(np.arange(gamma + 1), count))
  stop, next_token, _ = compiled.laws(
      (every.tokens, every.parents, every.probs, p[every.contexts], None),
      CHUNK, "float64")
  texts, rows = np.zeros((len(stop), 1)), np.arange(len(stop))[:, None]
  for length in range(gamma + 1):
    texts = (texts[..., None] * pair.p[length]).reshape(len(stop), -1)
    after = (every.contexts[:, length] - firsts[length])[:, None] * vocab
    here = stop[:, length, None]
    texts[rows, after + np.arange(vocab)] += np.where(
        here > 0, here * next_token[:, length], 0)
  shape = (gamma + 1, count)
  return _Row(whole, texts.reshape(*shape, -1), joint(pair.p, gamma + 1)[-1],
              (stop @ np.arange(gamma + 1)).reshape(shape))


def _examine(pairs: Sequence[Pair], gamma: int, compiled: Compiled,
             lengths_of: Callable) -> tuple:
  """Returns figures of a budget for two rows, and a function for an example.

  The figures are the total variation of the joint distribution, the larger one
  of a single row, and the expected verified and accepted tokens.
  """
  rows = [text_laws(compiled, pair, gamma) for pair in pairs]
  weights = np.outer(*(row.drafts.weights for row in rows))
  lengths = _lengths(lengths_of, [row.drafts for row in rows], gamma)
  joined, accepted = 0.0, 0.0
  for cut in itertools.product(range(gamma + 1), repeat=2):
    mass = weights * (lengths == cut).all(-1)
    texts = [row.texts[length] for row, length in zip(rows, cut)]
    joined = joined + texts[0].T @ mass @ texts[1]
    accepted += sum((mass.sum(1 - i) * row.accepted[cut[i]]).sum()
                    for i, row in enumerate(rows))
  alone = [joined.sum(1 - i) for i in range(2)]
  distance = lambda a, b: 0.5 * np.abs(a - b).sum()
  errors = [distance(a, row.target) for a, row in zip(alone, rows)]
  return (distance(joined, np.outer(*(row.target for row in rows))),
          max(errors), (weights[..., None] * lengths).sum(), accepted,
          lambda: _example(rows, lengths, alone, int(np.argmax(errors)),
                           max(errors) > TOLERANCE["float64"]))


def _lengths(lengths_of: Callable, drafts: Sequence[drafts_lib.Drafts],
             gamma: int) -> np.ndarray:
  """Returns the lengths `[n, m, 2]` for all pairs of drafts of two rows."""
  index = np.stack(np.indices([len(x.weights) for x in drafts]), -1)
  flat = index.reshape(-1, 2)
  flat = np.concatenate([flat, np.repeat(flat[:1], -len(flat) % _CALL, axis=0)])
  parts = []
  with jax.enable_x64(True):
    for first in range(0, len(flat), _CALL):
      both = [x.rows(flat[first:first + _CALL, i])
              for i, x in enumerate(drafts)]
      parts.append(np.asarray(lengths_of(
          np.stack([x.probs[:, 1:] for x in both], 1),
          np.stack([x.tokens[:, 1:] for x in both], 1).astype(np.int32))))
  lengths = np.concatenate(parts)
  if lengths.shape[1:] != (2,) or not np.isin(lengths, range(gamma + 1)).all():
    raise ValueError(
        f"budget returns lengths of shape {lengths.shape[1:]} in "
        f"[{lengths.min()}, {lengths.max()}]; it must return whole numbers of "
        f"shape (2,) in [0, {gamma}]")
  return lengths[:index[..., 0].size].reshape(index.shape)


def _example(rows: Sequence[_Row], lengths: np.ndarray,
             alone: Sequence[np.ndarray], row: int, is_biased: bool) -> str:
  """Returns a text that shows why the budget is not exact."""
  if not is_biased:
    return ("each row alone has its target's distribution, but the rows are "
            "dependent: the cut of each waits for tokens of the other")
  lines = [_anticipation(rows, lengths, row)]
  vocab = rows[row].drafts.probs.shape[-1]
  expected, obtained = (x.reshape(vocab, -1).sum(1) for x in (
      rows[row].target, alone[row]))
  what = "first token"
  if np.abs(expected - obtained).max() < TOLERANCE["float64"]:
    expected, obtained = rows[row].target, alone[row]
    worst = np.sort(np.argsort(-np.abs(expected - obtained))[:vocab])
    what = f"texts number {worst} in lexicographic order"
    expected, obtained = expected[worst], obtained[worst]
  shown = lambda x: "  ".join(f"{v:<8.4g}" for v in x).rstrip()
  return "\n".join([*filter(None, lines), f"row {row}, {what}:",
                    f"  expected, the target    {shown(expected)}",
                    f"  obtained                {shown(obtained)}"])


def _anticipation(rows: Sequence[_Row], lengths: np.ndarray, row: int) -> str:
  """Returns two drafts of a row of which one token is cut because of itself.

  Both drafts have equal tokens before the cut, and the other row has one draft.
  """
  mine, other = rows[row].drafts, rows[1 - row].drafts
  table = np.moveaxis(lengths[..., row], row, 0)  # [mine, other]
  words = lambda tokens: " ".join(map(str, tokens[1:]))
  for a, b in itertools.combinations(range(len(mine.weights)), 2):
    at = np.flatnonzero(table[a] != table[b])
    for c in at:
      short = min(table[a, c], table[b, c])
      if (mine.tokens[a, :short + 1] == mine.tokens[b, :short + 1]).all():
        long = table[a, c] < table[b, c]
        kept, cut = (b, a) if long else (a, b)
        return (f"witness: row {1 - row} drafts {words(other.tokens[c])}. If "
                f"row {row} drafts {words(mine.tokens[kept])}, its token "
                f"{short + 1} is verified; if it drafts "
                f"{words(mine.tokens[cut])}, its token {short + 1} is cut")
  return ""
