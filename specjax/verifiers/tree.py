"""What the rules on trees share.

Nodes may come in any order with `parents[i] < i`; parents are data. Work over
the vocabulary is done one node at a time, on rows that stay in a cache.
"""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp

from specjax.sampling import smallest_mass
from specjax.trees import topology
from specjax.types import Draft
from specjax.verifiers import residual


def drafted_probs(draft: Draft) -> jax.Array:
  """`[N]`, q of every node's own token; 0 at the root, padding and ids >= V."""
  return jnp.append(jnp.zeros_like(draft.probs[:1, 0]),
                    residual.at_drafted(draft, draft.probs))


def elder_siblings(parents: jax.Array) -> jax.Array:
  """`[N, N]` bool: row i marks the nodes that are tried before node i."""
  node = jnp.arange(parents.shape[0])
  return (parents[:, None] == parents) & (node[:, None] > node)


def children(parents: jax.Array) -> jax.Array:
  """`[N, N]` bool: row i marks the children of node i."""
  return jnp.arange(parents.shape[0])[:, None] == parents


def same_text(draft: Draft) -> jax.Array:
  """`[N, N]` bool: the paths to both nodes are real and spell the same."""
  nodes = draft.tokens.shape[0]
  real = drafted_probs(draft) > 0
  same = (draft.tokens[:, None] == draft.tokens) & real[:, None] & real
  same = same.at[0, 0].set(True)
  up = jnp.maximum(draft.parents, 0)
  # The distance that is compared doubles, and no loop runs on the device.
  for _ in range(math.ceil(math.log2(nodes))):
    same = same & same[up][:, up]
    up = up[up]
  return same


def over_marked(marked: jax.Array, factors: jax.Array) -> jax.Array:
  """`[N]`, the product of `factors [N]` over the nodes that each row marks."""
  return jnp.prod(jnp.where(marked, factors, 1), axis=-1)


def first_accepted(parents: jax.Array, accept: jax.Array) -> jax.Array:
  """`stop [N]` of a walk that goes to the first child that is accepted.

  Args:
    parents: `[N]` int32.
    accept: `[N]`, the probability of accepting node i once it is tried.
  """
  reject = 1 - accept
  enter = accept * over_marked(elder_siblings(parents), reject)
  reach = over_marked(topology.ancestors(parents), enter.at[0].set(1))
  return reach * over_marked(children(parents), reject)


def try_children(draft: Draft, target_probs: jax.Array, inherit: bool
                 ) -> tuple[jax.Array, jax.Array,
                            Callable[[jax.Array], jax.Array]]:
  """Tries the children of every node in turn and keeps what is left of p.

  A node begins with u = m p, of mass m <= 1. Its child c with token x is
  accepted with probability a_c = min(1, u(x) / q_c(x)); after that u becomes
  (u - q_c)+ / (S + (1 - m)) with S = sum (u - q_c)+, so that m becomes
  S / (S + (1 - m)). A denominator within rounding of 0 means that c is never
  rejected, and u stays as it is.

  Args:
    draft: a tree of N nodes.
    target_probs: `[N, V]`, p of the token after every node.
    inherit: a node begins with the mass a_c that it was accepted with; else
      with 1.

  Returns:
    a `[N]`; m `[N]` after the last child; u / m `[V]` of a node that is asked
    for, finite where m = 0.
  """
  nodes, dtype = target_probs.shape[0], target_probs.dtype
  limits = jnp.finfo(dtype)
  ones = jnp.ones((nodes,), dtype)
  if nodes == 1:
    return ones, ones, lambda node: residual.at_node(target_probs, node)
  drawn = drafted_probs(draft).astype(dtype)
  eldest = ~jnp.any(elder_siblings(draft.parents), axis=-1)
  # By parent, so that a node's mass is known before its children are tried.
  order = jnp.argsort(draft.parents, stable=True)[1:]
  parents = draft.parents[order]

  def try_child(carry, step):
    rest, masses, accept = carry
    child, parent = step
    rest = jnp.where(eldest[child], target_probs[parent], rest)
    mass = masses[parent]
    q = draft.probs[child].astype(dtype)
    wanted = rest.at[draft.tokens[child]].get(mode="fill", fill_value=0)
    a = jnp.minimum(residual.over(mass * wanted, drawn[child]), 1)
    # The inner maximum keeps the compiler from fusing in one use alone; see
    # block.py.
    left = jnp.sum(jnp.maximum(jnp.maximum(mass * rest, 0) - q, 0))
    left = jnp.where(left > smallest_mass(dtype), left, 0)
    rejected = left + (1 - mass)
    possible = rejected > limits.eps
    cut = possible & (left > 0)
    kept = jnp.maximum(jnp.where(cut, mass, 1) * rest, 0)
    rest = jnp.maximum(kept - jnp.where(cut, q, 0), 0) * jnp.where(
        cut, 1 / jnp.where(cut, left, 1), 1)
    mass = jnp.where(possible, left / jnp.where(possible, rejected, 1), mass)
    masses = masses.at[parent].set(mass)
    if inherit:
      masses = masses.at[child].set(a)
    return (rest, masses, accept.at[child].set(a)), rest

  # A loop of fixed length: it can be differentiated in reverse.
  (_, masses, accept), rests = jax.lax.scan(
      try_child, (target_probs[0], ones, ones), (order, parents))
  youngest = jnp.sum(parents <= jnp.arange(nodes)[:, None], axis=-1) - 1
  is_parent = jnp.any(children(draft.parents), axis=-1)

  def row(node):
    return jnp.where(is_parent[node],
                     residual.at_node(rests, youngest[node]),
                     residual.at_node(target_probs, node))

  return accept, masses, row
