"""Sampled decoding with a rule that remembers earlier rounds.

An enumeration follows such a rule for a few rounds. Here many rows decode until
each has written `tokens` tokens. For a valid rule these follow the target, so
the sum of f(z_t) - E_p[f | z_1..z_{t-1}] over any stretch of them has mean 0
and a known variance, for every function f of the context and the token. Each
stretch is compared with `audit.LIMIT` standard errors.
"""

import jax
import numpy as np

from specjax.exact import audit
from specjax.exact import pools
from specjax.exact.compiled import Compiled
from specjax.exact.compiled import Example
from specjax.types import Draft
from specjax.types import Law
from specjax.types import Verdict

_STRETCH = 16


def walk(compiled: Compiled, gamma: int, vocab_size: int, tokens: int,
         rows: int, seed: int = 0) -> audit.Audited:
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
  pool = pools.dense_pool(vocab_size, seed)
  functions = audit.Functions(pool, rng)
  hashes = pools.extended(np.arange(rows).astype(np.uint64), 0)
  roots = rng.integers(vocab_size, size=rows).astype(np.int32)
  states = jax.tree.map(lambda x: np.repeat(x[None], rows, axis=0),
                        compiled.initial_state(gamma, "float32"))
  longest = tokens + gamma + 1
  sums = np.zeros((2, longest + _STRETCH, functions.count))
  lengths, laws = np.zeros(rows, int), 0
  parents = np.tile(np.arange(-1, gamma), (rows, 1))
  while lengths.min() < tokens:
    drafted, at, texts = _draft(pool, hashes, gamma, rng)
    q = np.concatenate(
        [np.zeros((rows, 1, vocab_size), np.float32), pool.q[at[:, :-1]]], 1)
    arguments = (np.concatenate([roots[:, None], drafted], 1), parents, q,
                 pool.p[at], states)
    stop, next_token, *_ = compiled.laws(arguments, rows, "float32")
    laws += rows
    bad = ~(np.isfinite(stop).all(-1) & (np.abs(stop.sum(-1) - 1) < 1e-3))
    if bad.any():
      row = np.argmax(bad)
      return audit.Audited(
          0.0, frozenset({"a law is not finite or stop does not sum to 1"}),
          laws, Example(Draft(*(x[row] for x in arguments[:3])),
                        arguments[3][row], Law(stop[row], next_token[row])))
    each = np.arange(rows)
    taus = pools.drawn(np.maximum(stop, 0), rng)
    extra = pools.drawn(np.maximum(next_token[each, taus], 0), rng)
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
    hashes = pools.extended(texts[each, taus], extra)
    roots, lengths = extra.astype(np.int32), lengths + taus + 1
  return _compared(functions, sums[:, :tokens], laws)


def _draft(pool, hashes, gamma, rng):
  """Drafted tokens `[n, gamma]`, rows and hashes `[n, gamma + 1]`."""
  tokens, texts = [], [hashes]
  for _ in range(gamma):
    new = pools.drawn(pool.q[pool.rows(texts[-1])], rng)
    tokens.append(new)
    texts.append(pools.extended(texts[-1], new))
  texts = np.stack(texts, axis=1)
  return np.stack(tokens, axis=1).astype(np.int32), pool.rows(texts), texts


def _compared(functions, sums, laws):
  # Every stretch, and all tokens from its start on.
  starts = range(0, sums.shape[1], _STRETCH)
  ends = [(a, min(b, sums.shape[1])) for a in starts
          for b in (a + _STRETCH, sums.shape[1])]
  parts = np.stack([sums[:, a:b].sum(1) for a, b in ends])
  size = np.abs(parts[:, 0]) / np.sqrt(np.maximum(parts[:, 1], 1))
  defects = []
  if size.max() > audit.LIMIT:
    part, which = np.unravel_index(np.argmax(size), size.shape)
    where = "tokens {} to {}".format(*ends[part])
    defects.append(
        f"the mean of {functions.names[which]} over {where} is "
        f"{size.max():.0f} standard errors from the target's; "
        f"{audit.LIMIT:.0f} are allowed")
  return audit.Audited(0.0, frozenset(defects), laws, None)
