"""Functions of trees that several rules share.

Nodes may be in any order with `parents[i] < i`. Parents are arrays, not static.
Operations over the vocabulary process one node at a time, so that the rows of
this node stay in the CPU's cache.
"""

from collections.abc import Callable
import math

import chex
import jax
import jax.numpy as jnp

from specjax.sampling import smallest_mass
from specjax.trees import topology
from specjax.types import Draft
from specjax.verifiers import residual


def drafted_probs(draft: Draft) -> jax.Array:
  """Returns `[N]`, q of every node's token.

  The entry is 0 for the root, padding, and ids >= V.
  """
  chex.assert_rank([draft.tokens, draft.probs], [1, 2])
  return jnp.append(jnp.zeros_like(draft.probs[:1, 0]),
                    residual.at_drafted(draft, draft.probs))


def earlier_siblings(parents: jax.Array) -> jax.Array:
  """Returns `[N, N]` bool: row i marks the siblings before node i."""
  chex.assert_rank(parents, 1)
  node = jnp.arange(parents.shape[0])
  return (parents[:, None] == parents) & (node[:, None] > node)


def children(parents: jax.Array) -> jax.Array:
  """Returns `[N, N]` bool: row i marks the children of node i."""
  chex.assert_rank(parents, 1)
  return jnp.arange(parents.shape[0])[:, None] == parents


def same_text(draft: Draft) -> jax.Array:
  """Returns `[N, N]` bool: entry (i, j) compares the paths to nodes i and j.

  The entry is True if both paths have the same tokens and neither contains
  padding.
  """
  chex.assert_rank([draft.tokens, draft.parents], 1)
  nodes = draft.tokens.shape[0]
  real = drafted_probs(draft) > 0
  same = (draft.tokens[:, None] == draft.tokens) & real[:, None] & real
  same = same.at[0, 0].set(True)
  up = jnp.maximum(draft.parents, 0)
  # Each step doubles the compared length, so no loop over the depth is
  # necessary on the device.
  for _ in range(math.ceil(math.log2(nodes))):
    same = same & same[up][:, up]
    up = up[up]
  return same


def multiply_marked(marked: jax.Array, factors: jax.Array) -> jax.Array:
  """Returns `[N]`, the product of the marked factors of each row.

  Args:
    marked: `[N, N]` bool, row i marks the factors of entry i.
    factors: `[N]`, one factor per node.
  """
  chex.assert_rank([marked, factors], [2, 1])
  return jnp.prod(jnp.where(marked, factors, 1), axis=-1)


def first_accepted(parents: jax.Array, accept: jax.Array) -> jax.Array:
  """Returns `stop [N]` of a walk to the first accepted child of every node.

  Args:
    parents: `[N]` int32, the index of each node's parent.
    accept: `[N]`, probability of accepting node i if it is tested.
  """
  chex.assert_rank([parents, accept], 1)
  chex.assert_equal_shape([parents, accept])
  reject = 1 - accept
  enter = accept * multiply_marked(earlier_siblings(parents), reject)
  reach = multiply_marked(topology.ancestors(parents), enter.at[0].set(1))
  return reach * multiply_marked(children(parents), reject)


def try_children(draft: Draft, target_probs: jax.Array, inherit: bool
                 ) -> tuple[jax.Array, jax.Array,
                            Callable[[jax.Array], jax.Array]]:
  """Tests the children of every node in order and updates the residual of p.

  Let u be the current unnormalised target distribution of a node. A node starts
  with u = m p, of mass m <= 1. Its child c with token x is accepted with
  probability a_c = min(1, u(x) / q_c(x)). After a rejection, u becomes
  (u - q_c)+ / (S + (1 - m)) with S = sum (u - q_c)+, and m becomes
  S / (S + (1 - m)). If the denominator is within rounding of 0, c is never
  rejected, so u does not change.

  Args:
    draft: tree of N nodes.
    target_probs: `[N, V]`, distribution p of the token after every node.
    inherit: True starts node c with mass a_c, False with mass 1.

  Returns:
    Three values: a `[N]`; m `[N]` after the last child of each node; and a
    function `node [] -> [V]` that returns u / m after the last child of a node.
    Its result is finite even if m = 0.
  """
  chex.assert_rank([draft.tokens, draft.parents, target_probs], [1, 1, 2])
  chex.assert_equal_shape([draft.probs, target_probs])
  nodes, dtype = target_probs.shape[0], target_probs.dtype
  limits = jnp.finfo(dtype)
  ones = jnp.ones((nodes,), dtype)
  if nodes == 1:
    return ones, ones, lambda node: residual.at_node(target_probs, node)
  drawn = drafted_probs(draft).astype(dtype)
  is_first = ~jnp.any(earlier_siblings(draft.parents), axis=-1)
  # Nodes are sorted by parent, so that a node's mass is known before its
  # children are tested.
  order = jnp.argsort(draft.parents, stable=True)[1:]
  parents = draft.parents[order]

  def try_child(carry: tuple[jax.Array, ...], step: tuple[jax.Array, ...]
                ) -> tuple[tuple[jax.Array, ...], jax.Array]:
    u, masses, accept = carry
    child, parent = step
    u = jnp.where(is_first[child], target_probs[parent], u)
    mass = masses[parent]
    q = draft.probs[child].astype(dtype)
    wanted = u.at[draft.tokens[child]].get(mode="fill", fill_value=0)
    a = jnp.minimum(residual.divide(mass * wanted, drawn[child]), 1)
    # The inner maximum prevents a fusion of the operations, see block.py.
    left = jnp.sum(jnp.maximum(jnp.maximum(mass * u, 0) - q, 0))
    left = jnp.where(left > smallest_mass(dtype), left, 0)
    rejected = left + (1 - mass)
    possible = rejected > limits.eps
    cut = possible & (left > 0)
    u = jnp.maximum(jnp.where(cut, mass, 1) * u, 0)
    u = jnp.maximum(u - jnp.where(cut, q, 0), 0) * jnp.where(
        cut, 1 / jnp.where(cut, left, 1), 1)
    mass = jnp.where(possible, left / jnp.where(possible, rejected, 1), mass)
    masses = masses.at[parent].set(mass)
    if inherit:
      masses = masses.at[child].set(a)
    return (u, masses, accept.at[child].set(a)), u

  # A loop of fixed length can be differentiated in reverse mode.
  (_, masses, accept), residuals = jax.lax.scan(
      try_child, (target_probs[0], ones, ones), (order, parents))
  last_child = jnp.sum(parents <= jnp.arange(nodes)[:, None], axis=-1) - 1
  is_parent = jnp.any(children(draft.parents), axis=-1)

  def row(node: jax.Array) -> jax.Array:
    return jnp.where(is_parent[node],
                     residual.at_node(residuals, last_child[node]),
                     residual.at_node(target_probs, node))

  return accept, masses, row
