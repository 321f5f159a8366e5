"""Upper bounds on the accepted tokens of any lossless rule, from drawn drafts.

The bounds hold for every rule that is lossless: the sequences of decoding with
the rule have the target's distribution p. The rule may use both models in any
way. tau is the number of accepted tokens in a round.

Let T be a draft tree. Let m(c, y) be any function of a context c and a token y
with mean 0 over y under p(. | c) for every c. The rule stops at a node v of T
and emits one token y. vy is the path to v, followed by y. The mean of the sum
of m along vy is 0, because

* the target alone continues after vy, so the sequence has distribution p, and
  the sum of m along the sequence to any fixed length has mean 0;
* the target draws the tokens after vy, so the sum of m over these tokens has
  mean 0;
* the sum along vy is the difference of these two sums.

In one round

  E[tau] = E[depth(v) + sum of m along vy]
        <= E_T[max over v, y of (depth(v) + sum of m along vy)].

The maximum is over the nodes v of T and the tokens y with p(vy) > 0. This is
`dual_bound` with Phi(cy) - Phi(c) = m(c, y). In this module, m depends only on
p and the draft model's q along the sequence. Every drawn tree therefore gives
an unbiased sample of the bound, for vocabularies of any size.

m(c, y) = E_p[w(c, .)] - w(c, y), where w(c, y) is an entry of a table. The row
of the entry is the depth of c in T. Its column is an interval of
s(c) p(y|c) / q(y|c). s is the survival of block verification: 1 at the root,
and s(cy) = min(1, s(c) p(y|c) / q(y|c)). Any table gives a bound. `fit_bound`
searches for a table with a low bound. Evaluate the table on other drafts. The
mean over the drafts used by `fit_bound` is too low, so it is not a bound.
"""

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
import optax

from specjax.trees import topology
from specjax.types import Draft

# Limits between the columns of a table: natural logarithms of s(c) p / q.
_EDGES = (-6, -4, -3, -2, -1.5, -1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1,
          1.5, 2, 3)
_COLUMNS = len(_EDGES) + 1
_STEPS = 600  # steps of Adam
_RATE = 0.1  # learning rate at the first step
_SOFTNESS = 0.3, 0.003  # softness of the maximum at the first step; its minimum
_HALVINGS = 6  # halvings of softness and learning rate
_SMOOTHNESS = 0.003  # penalty on the squared differences of adjacent columns


@struct.dataclass
class BoundTerms:
  """Summary of a draft of N nodes, sufficient for its bound with any table.

  p is the target's distribution. K is the number of columns of a table. The
  docstring of this module defines the table. Leading axes are allowed.

  Attributes:
    parents: `[N]` int32 parents, as in `Draft`.
    valid: `[N]` bool, True for a node that is not padding and whose path from
      the root has p > 0.
    mass: `[N, K]` probability under p that the next token after the node is in
      the column.
    possible: `[N, K]` bool, True if a token in the column has p > 0 after the
      node.
    columns: `[N]` int32 column of the node's own token, after its parent.
  """

  parents: jax.Array
  valid: jax.Array
  mass: jax.Array
  possible: jax.Array
  columns: jax.Array


def bound_terms(draft: Draft, target_probs: jax.Array, draft_probs: jax.Array
                ) -> BoundTerms:
  """Returns the `BoundTerms` of one draft.

  Args:
    draft: draft tree of one sequence with N nodes, drawn in any way.
    target_probs: `[N, V]` distribution p of the token after every node.
    draft_probs: `[N, V]` distribution q of the token after every node. q must
      depend only on the node's context. For trees of `strategies.specinfer` or
      `sequoia`, the row of a node is the row of its first child in
      `draft.probs`. Rows of the deepest nodes are not used if the table has one
      row for each smaller depth.
  """
  p, q = jnp.asarray(target_probs), jnp.asarray(draft_probs)
  parents = jnp.asarray(draft.parents)
  above = jnp.maximum(parents, 0)
  tokens = jnp.minimum(jnp.asarray(draft.tokens), p.shape[-1] - 1)
  logs = jnp.where(p > 0, jnp.log(p) - jnp.log(q), -jnp.inf)
  exists = jnp.asarray(draft.drafted) & (p[above, tokens] > 0)

  def walk(node, carry):
    survival, valid = carry
    parent, token = above[node], tokens[node]
    value = jnp.minimum(0, survival[parent] + logs[parent, token])
    return (survival.at[node].set(value),
            valid.at[node].set(valid[parent] & exists[node]))

  size = parents.shape[0]
  survival, valid = jax.lax.fori_loop(
      1, size, walk, (jnp.zeros(size, p.dtype), jnp.ones(size, bool)))
  survival = jnp.where(valid, survival, 0)
  columns = jnp.searchsorted(
      jnp.array(_EDGES, p.dtype), survival[:, None] + logs, side="right")
  row = jnp.arange(size)[:, None]
  empty = jnp.zeros((size, _COLUMNS), p.dtype)
  return BoundTerms(
      parents=parents, valid=valid,
      mass=empty.at[row, columns].add(p / p.sum(-1, keepdims=True)),
      possible=empty.astype(bool).at[row, columns].max(p > 0),
      columns=columns[above, tokens].astype(jnp.int32))


def accepted_bound(terms: BoundTerms, table: ArrayLike) -> jax.Array:
  """Returns one sample of the bound for every draft.

  The mean of the samples is an unbiased estimate of the bound if the drafts are
  independent of `table`. The bound applies to every lossless rule. It limits
  the expected accepted tokens of one round after the contexts of these drafts.

  Args:
    terms: `[R, ...]` summaries of R drafts.
    table: `[D, K]` table w of the module's docstring, for contexts of depths 0,
      ..., D - 1. For deeper contexts w is 0. K is 18.

  Returns:
    `[R]`, the maximum of depth(v) + sum of m along vy for every draft. With a
    table of zeros, this is the depth of the deepest node with p > 0.
  """
  return _maxima(terms, jnp.asarray(table))


def fit_bound(terms: BoundTerms, depth: int, weights: ArrayLike | None = None
              ) -> np.ndarray:
  """Returns a table whose bound is low on these drafts.

  The mean of `accepted_bound` is convex in the table. Adam minimises this mean,
  with a soft maximum instead of the maximum. The softness decreases during the
  fit. A penalty limits the differences of adjacent columns.

  Args:
    terms: `[R, ...]` summaries of R drafts. Do not evaluate the table on these
      drafts.
    depth: number of rows of the table, at most the height of the drafts.
    weights: `[R]` weights of the drafts. None means equal weights.

  Returns:
    Table `[depth, K]` for `accepted_bound`.
  """
  weights = (jnp.ones(len(terms.valid)) if weights is None
             else jnp.asarray(weights))
  if not depth or not len(weights):
    return np.zeros((depth, _COLUMNS), np.float32)
  return np.asarray(_fitted(terms, depth, weights / weights.sum()))


def _maxima(terms: BoundTerms, table: jax.Array,
            softness: jax.Array | None = None) -> jax.Array:
  """Returns the maxima `[R]` over nodes v and columns of tokens y.

  The maxima are soft with `softness`, and exact if `softness` is None.
  """
  on_path = jax.vmap(topology.ancestors)(terms.parents)
  depths = topology.depths_of(on_path)
  rows = jnp.concatenate([table, jnp.zeros_like(table[:1])])[
      jnp.minimum(depths, len(table))]
  mean = jnp.sum(rows * terms.mass, -1)
  above = jnp.maximum(terms.parents, 0)
  paid = jax.vmap(lambda row, parent, column: row[parent, column])(
      rows, above, terms.columns)
  step = jnp.where(terms.parents < 0, 0,
                   jnp.take_along_axis(mean, above, 1) - paid)
  # A matrix product would be shorter, but some devices compute it in low
  # precision.
  value = depths + mean + jnp.where(on_path, step[:, None], 0).sum(-1)
  if softness is None:
    last = jnp.where(terms.possible, -rows, -jnp.inf).max(-1)
    return jnp.where(terms.valid, value + last, -jnp.inf).max(-1)
  soft = lambda x, where: softness * jax.nn.logsumexp(
      jnp.where(where, x / softness, -jnp.inf), axis=-1)
  return soft(value + soft(-rows, terms.possible), terms.valid)


@jax.jit(static_argnames="depth")
def _fitted(terms: BoundTerms, depth: int, weights: jax.Array) -> jax.Array:
  cooled = lambda step: 0.5**(step * _HALVINGS / _STEPS)
  optimizer = optax.adam(lambda step: _RATE * cooled(step), b2=0.99)

  def loss(table, step):
    softness = jnp.maximum(_SOFTNESS[0] * cooled(step), _SOFTNESS[1])
    return (weights @ _maxima(terms, table, softness)
            + _SMOOTHNESS * jnp.sum(jnp.diff(table)**2))

  def update(carry, step):
    table, state = carry
    change, state = optimizer.update(jax.grad(loss)(table, step), state)
    return (optax.apply_updates(table, change), state), None

  table = jnp.zeros((depth, _COLUMNS))
  (table, _), _ = jax.lax.scan(
      update, (table, optimizer.init(table)), jnp.arange(_STEPS))
  return table
