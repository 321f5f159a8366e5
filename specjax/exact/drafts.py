"""Every draft that may be drawn from some contexts, as arrays.

Contexts of all lengths are numbered in one row: the empty one is 0, and
context c followed by token x is c V + 1 + x. So q `[contexts, V]`, the rows
of a `Pair`'s tables one below the other, is indexed by them.
"""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import numpy as np


def longer(contexts, tokens, vocab_size: int):
  """The contexts that follow `contexts` with one more token."""
  return contexts * vocab_size + 1 + tokens


@dataclasses.dataclass(frozen=True)
class Drafts:
  """Drafts of N nodes, n of them, grown node by node.

  A scheme starts from `Drafts.roots` and calls `grow` for every node.

  Attributes:
    starts: `[n]`, which of the given contexts each draft begins at.
    weights: `[n]`, its probability given that.
    tokens: `[n, N]`.
    parents: `[n, N]`, data: they may differ from draft to draft.
    probs: `[n, N, V]`, the laws that are reported, see `Draft`.
    contexts: `[n, N]`, the number of every node's context.
  """

  starts: np.ndarray
  weights: np.ndarray
  tokens: np.ndarray
  parents: np.ndarray
  probs: np.ndarray
  contexts: np.ndarray

  @classmethod
  def roots(cls, contexts, vocab_size: int) -> "Drafts":
    """A root at each of `contexts [n]` and nothing below it.

    Its token is the context's last; V - 1, say, is before the empty one.
    """
    count = len(contexts)
    last = (np.asarray(contexts) - 1) % vocab_size
    return cls(starts=np.arange(count), weights=np.ones(count),
               tokens=last[:, None],
               parents=np.full((count, 1), -1),
               probs=np.zeros((count, 1, vocab_size)),
               contexts=np.asarray(contexts)[:, None])

  def rows(self, index) -> "Drafts":
    """The drafts that `index` picks."""
    return Drafts(**{field.name: getattr(self, field.name)[index]
                     for field in dataclasses.fields(self)})

  def at(self, node):
    """`[n]`, the contexts of a node; `node` is one number or `[n]`."""
    return self.contexts[np.arange(len(self.weights)), node]

  def seen(self, parent):
    """`[n, V]` bool: tokens that the children of `parent` carry already."""
    count, _, vocab_size = self.probs.shape
    child = self.parents == np.reshape(parent, (-1, 1))
    draft, node = np.nonzero(child & self.probs.any(-1))
    seen = np.zeros((count, vocab_size), bool)
    seen[draft, self.tokens[draft, node]] = True
    return seen

  def first(self, node: int):
    """`[n]`, the first child of `node`'s parent that carries its token."""
    same = ((self.parents == self.parents[:, node, None])
            & (self.tokens == self.tokens[:, node, None]))
    return np.argmax(same, axis=-1)

  def grow(self, parent, law, probs=None) -> "Drafts":
    """One more node: every draft becomes one for each token that it may get.

    Args:
      parent: the new node's parent, one number or `[n]`.
      law: `[n, V]`, what its token is drawn from; an all-zero row is padding.
      probs: `[n, V]`, what is reported as its law, where that differs.
    """
    probs = law if probs is None else probs
    padding = ~law.any(-1)
    split = law + padding[:, None] * (np.arange(law.shape[-1]) == 0)
    row, token = np.nonzero(split)
    parent = np.broadcast_to(parent, self.weights.shape)
    context = longer(self.at(parent)[row], token, law.shape[-1])
    old = self.rows(row)
    add = lambda x, new: np.concatenate([x, new[:, None]], axis=1)
    return Drafts(starts=old.starts, weights=old.weights * split[row, token],
                  tokens=add(old.tokens, token),
                  parents=add(old.parents, parent[row]),
                  probs=add(old.probs, probs[row]),
                  contexts=add(old.contexts, context))

  def padded(self, nodes: int, token: int | None = 0, chain: bool = False
             ) -> "Drafts":
    """Padding up to N = `nodes`.

    Args:
      nodes: N.
      token: the id that padding carries; it may be V or more. None: ids of all
        kinds, others in every draft.
      chain: each is below the node before it; else all are below the root.
    """
    drafts, law = self, np.zeros_like(self.probs[:, 0])
    real = drafts.tokens.shape[1]
    for node in range(real, nodes):
      drafts = drafts.grow(node - 1 if chain else 0, law)
    drafts.tokens[:, real:] = (
        drafts.any_tokens()[:, real:] if token is None else token)
    return drafts

  def scattered(self, nodes: int) -> "Drafts":
    """Padding before and between the real nodes, up to N = `nodes`.

    Padding is a child of the next real node's parent, of the padding before it,
    or of any earlier node. It never has real nodes below it, and it carries ids
    of all kinds. The unused row 0 of `probs` is filled.
    """
    count, real, vocab_size = self.probs.shape
    rng = np.random.default_rng([nodes, *(self.parents[0] + 1)])
    places = np.append(0, np.sort(
        1 + rng.permutation(nodes - 1)[:real - 1]))
    if nodes > real > 1 and places[1] == 1:  # padding comes first
      free = np.setdiff1d(np.arange(nodes), places)
      places = np.sort(np.append(np.setdiff1d(places, [1]), free[0]))
    parents = np.tile([-1, *(rng.integers(i) for i in range(1, nodes))],
                      (count, 1))
    parents[:, places[1:]] = places[self.parents[:, 1:]]
    for node in np.setdiff1d(np.arange(nodes), places):
      later = places[places > node]
      if node - 1 not in places and rng.random() < 0.5:
        parents[:, node] = node - 1
      elif len(later) and rng.random() < 0.8:
        parents[:, node] = parents[:, later[0]]
    probs = np.zeros((count, nodes, vocab_size))
    probs[:, places] = self.probs
    probs[:, 0] = 1 / vocab_size
    contexts = np.tile(self.contexts[:, :1], (1, nodes))
    contexts[:, places] = self.contexts
    new = dataclasses.replace(self, parents=parents, probs=probs,
                              contexts=contexts, tokens=contexts)
    tokens = new.any_tokens()
    tokens[:, places] = self.tokens
    return dataclasses.replace(new, tokens=tokens)

  def any_tokens(self) -> np.ndarray:
    """`[n, N]`, arbitrary ids, some beyond the vocabulary."""
    rng = np.random.default_rng(self.tokens.shape)
    return rng.integers(self.probs.shape[-1] + 2, size=self.tokens.shape)

  def cut(self, kept) -> "Drafts":
    """Chains of which `kept [n]` tokens stay; what follows is padding.

    A draft stays as many times as there were chains that end as it does, with
    the weight of each.
    """
    stays = np.arange(self.tokens.shape[1]) <= np.reshape(kept, (-1, 1))
    return dataclasses.replace(
        self, tokens=np.where(stays, self.tokens, 0),
        probs=np.where(stays[..., None], self.probs, 0))


def chains(q, contexts, gamma: int, product: bool = False) -> Drafts:
  """Every chain of gamma tokens from every context.

  Args:
    q: `[contexts, V]`.
    contexts: `[n]`.
    gamma: draft length.
    product: every position follows its marginal given the start alone.
  """
  drafts = Drafts.roots(contexts, q.shape[-1])
  laws = _marginals(q, contexts, gamma) if product else None
  for node in range(gamma):
    law = laws[node][drafts.starts] if product else q[drafts.at(node)]
    drafts = drafts.grow(node, law)
  return drafts


def _marginals(q, contexts, gamma):
  """The law `[n, V]` of each position given the start alone."""
  vocab_size = q.shape[-1]
  reach, at, laws = np.ones((len(contexts), 1)), contexts[:, None], []
  for _ in range(gamma):
    joint = reach[..., None] * q[at]
    laws.append(joint.sum(1))
    reach = joint.reshape(len(contexts), -1)
    at = longer(at[..., None], np.arange(vocab_size), vocab_size).reshape(
        len(contexts), -1)
  return laws


_CHUNK = 1024  # chains of one call: one compiled shape for each length

Kept = Callable[[jax.Array, jax.Array], jax.Array]


def ended_by(stop: Kept) -> Callable[[Drafts], Drafts]:
  """A function that ends chains as `stop` says; see `certify`.

  Raises:
    ValueError: it is neither a rule nor a function.
  """
  if isinstance(stop, type) or not callable(stop):
    raise ValueError(f"stop is {stop!r}; it must be a drafters.stop_rules."
                     "StopRule, or a function (probs, tokens) -> length")
  compiled = jax.jit(jax.vmap(stop))

  def ended(drafts: Drafts) -> Drafts:
    probs, tokens = drafts.probs[:, 1:], drafts.tokens[:, 1:].astype(np.int32)
    count = len(tokens)
    fill = lambda x: np.concatenate(
        [x, np.repeat(x[:1], -count % _CHUNK, axis=0)])
    probs, tokens = fill(probs), fill(tokens)
    with jax.enable_x64(True):
      lengths = [np.asarray(compiled(probs[i:i + _CHUNK], tokens[i:i + _CHUNK]))
                 for i in range(0, len(tokens), _CHUNK)]
    return drafts.cut(np.concatenate(lengths)[:count])

  return ended


_DENSE = 1 << 22  # contexts of one length that are counted without sorting


class Starts(NamedTuple):
  """Where rounds start: n contexts of one length, each with a state.

  Attributes:
    contexts: `[n]` int64, rows of the models' tables.
    states: the rule's states, leaves `[n, ...]`; None without one.
    weights: `[n]`, probabilities.
  """

  contexts: np.ndarray
  states: Any
  weights: np.ndarray


def first_contexts(vocab_size: int, depth: int) -> np.ndarray:
  """The number of the first context of every length up to `depth`."""
  return np.cumsum([0, *(vocab_size**k for k in range(depth))])


def dense(starts: Starts, size: int) -> np.ndarray:
  return np.bincount(starts.contexts, starts.weights, minlength=size)


def _counted(contexts, weights, size):
  """Each of `contexts`, numbers below `size`, once, with all of its weight."""
  if size > _DENSE:
    contexts, which = np.unique(contexts, return_inverse=True)
    return contexts, np.bincount(which.reshape(-1), weights)
  dense = np.bincount(contexts, weights, minlength=size)
  contexts = np.flatnonzero(dense)
  return contexts, dense[contexts]


def merged(outcomes: list[dict[int, Starts]], vocab: int
            ) -> dict[int, Starts]:
  """The starts of all `outcomes`, equal (context, state) as one."""
  lengths = sorted({length for found in outcomes for length in found})
  merged = {}
  for length in lengths:
    parts = [found[length] for found in outcomes if length in found]
    contexts = np.concatenate([part.contexts for part in parts])
    weights = np.concatenate([part.weights for part in parts])
    leaves = [jax.tree.leaves(part.states) for part in parts]
    structure = jax.tree.structure(parts[0].states)
    leaves = [np.concatenate(column) for column in zip(*leaves)]
    if not leaves:
      contexts, weights = _counted(contexts, weights, vocab**length)
      merged[length] = Starts(contexts, parts[0].states, weights)
      continue
    columns = [contexts, *leaves]
    rows = np.concatenate([
        np.ascontiguousarray(x).reshape(len(contexts), -1).view(np.uint8)
        for x in columns], axis=1)
    _, first, which = np.unique(
        rows.view(np.dtype((np.void, rows.shape[1]))).reshape(-1),
        return_index=True, return_inverse=True)
    merged[length] = Starts(
        contexts[first],
        jax.tree.unflatten(structure, [x[first] for x in leaves]),
        np.bincount(which.reshape(-1), weights))
  return merged
