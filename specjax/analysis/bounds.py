"""Upper bounds on the accepted tokens of every valid rule, from drawn drafts.

A rule is valid if the sequences of decoding with it have the distribution p of
the target. tau is its number of accepted tokens in a round.

Let T be a draft tree. Let m(c, y) be any function of a context c and a token y
whose mean over y under p(. | c) is 0 for every c. A valid rule stops at a node
v of T and emits one token y. vy is the path to v, followed by y. The unmodified
target continues, so the sequence has the distribution p. The sum of m along the
sequence to any fixed length therefore has mean 0. The part after vy is drawn by
the target, and its sum also has mean 0. So the sum along vy, which is the
difference, has mean 0. In one round

  E[tau] = E[depth(v) + sum of m along vy]
        <= E_T[max over v, y of (depth(v) + sum of m along vy)],

where the maximum goes over the nodes v of T and the tokens y with p(vy) > 0.
This is `dual_bound` with Phi(cy) - Phi(c) = m(c, y). Here m depends only on p
and the draft model's q along the sequence. So every drawn tree gives an
unbiased sample of the bound, for vocabularies of any size. The rule may use
both models in any way.

m(c, y) = E_p[w(c, .)] - w(c, y), where w(c, y) is an entry of a table. The row
is the depth of c in T. The column is an interval of s(c) p(y|c) / q(y|c), where
s is the survival of block verification: 1 at the root, and s(cy) =
min(1, s(c) p(y|c) / q(y|c)). Any table gives a bound. `fit_bound` searches for
a table with a low bound. Evaluate the table on other drafts: the mean over the
drafts of the fit is too low and not a bound.
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
_STEPS = 600
_RATE = 0.1
_SOFTNESS = 0.3, 0.003  # softness of the maximum at the first and last step
_HALVINGS = 6  # halvings of softness and learning rate
_SMOOTHNESS = 0.003  # penalty on the squared differences of adjacent columns


@struct.dataclass
class BoundTerms:
  """Summary of a draft of N nodes, sufficient for its bound with any table.

  p is the target's distribution, and K the number of columns of a table (see
  the module). Leading axes are allowed.

  Attributes:
    parents: `[N]` int32, as in `Draft`.
    valid: `[N]` bool, True for nodes with p > 0 that are not padding.
    mass: `[N, K]`, p of the tokens after every node, summed by the columns of
      the table.
    possible: `[N, K]` bool, True if a column has a token with p > 0.
    columns: `[N]` int32, the column of every node's token after its parent.
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
    target_probs: `[N, V]`, p of the token after every node.
    draft_probs: `[N, V]`, q of the token after every node, given its context
      alone. For trees of `strategies.specinfer` or `sequoia` it is the row of
      `draft.probs` of the node's first child. Nodes at the depth of the tree do
      not need it if the table has one row for each smaller depth.
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
  """Returns the bound's sample of every draft.

  The mean over drafts that are independent of `table` is an unbiased estimate
  of an upper bound on the expected accepted tokens of one round of every valid
  rule, from the contexts at which the drafts were drawn.

  Args:
    terms: summaries of R drafts, `[R, ...]`.
    table: `[D, K]`, w of the module's docstring, for contexts of depths 0, ...,
      D - 1. For deeper contexts w is 0. K is 18.

  Returns:
    `[R]`, the largest depth(v) + sum of m along vy of every draft. With a table
    of zeros it is the depth of the deepest node with p > 0.
  """
  return _maxima(terms, jnp.asarray(table))


def fit_bound(terms: BoundTerms, depth: int, weights: ArrayLike | None = None
              ) -> np.ndarray:
  """Returns a table whose bound is low on these drafts.

  The mean of `accepted_bound` is convex in the table. Adam minimises it with a
  soft maximum that hardens, and a penalty that keeps adjacent columns close.

  Args:
    terms: summaries of R drafts, `[R, ...]`. Do not evaluate the table on
      these drafts.
    depth: number of rows: the height of the drafts, or less.
    weights: `[R]`, weights of the drafts; default: equal.

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
  """Returns `[R]`, maxima over nodes and columns; soft ones for the fit."""
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
  # No matrix product, because devices may compute it in low precision.
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
