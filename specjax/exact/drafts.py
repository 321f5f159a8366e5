"""All possible drafts after some contexts, as arrays.

A context is the sequence of tokens before a position. Contexts of all lengths
are numbered together. The empty context is 0. Context c followed by token x is
c V + 1 + x, for a vocabulary of V tokens. These numbers index the draft
distributions q `[contexts, V]`, the concatenated tables of a `Pair`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import numpy as np


def longer(contexts: np.ndarray, tokens: np.ndarray, vocab_size: int
           ) -> np.ndarray:
  """Returns the numbers of contexts extended by one token."""
  return contexts * vocab_size + 1 + tokens


@dataclasses.dataclass(frozen=True)
class Drafts:
  """Batch of n drafts of N nodes.

  A drawing scheme (`exact.schemes`) starts from `Drafts.roots`. It then calls
  `grow` once for each further node.

  Attributes:
    starts: `[n]` index of the context before each draft, among the contexts
      passed to `roots`.
    weights: `[n]` probability of each draft after its start context.
    tokens: `[n, N]` token ids.
    parents: `[n, N]` parents. Drafts of a batch can have different parents.
    probs: `[n, N, V]` draft distributions, see `Draft`.
    contexts: `[n, N]` number of every node's context.
  """

  starts: np.ndarray
  weights: np.ndarray
  tokens: np.ndarray
  parents: np.ndarray
  probs: np.ndarray
  contexts: np.ndarray

  @classmethod
  def roots(cls, contexts: np.ndarray, vocab_size: int) -> "Drafts":
    """Returns drafts with a root at each of `contexts [n]` and no other node.

    The token of a root is the last token of its context. For the empty context
    it is V - 1.
    """
    count = len(contexts)
    last = (np.asarray(contexts) - 1) % vocab_size
    return cls(starts=np.arange(count), weights=np.ones(count),
               tokens=last[:, None],
               parents=np.full((count, 1), -1),
               probs=np.zeros((count, 1, vocab_size)),
               contexts=np.asarray(contexts)[:, None])

  def rows(self, index: np.ndarray) -> "Drafts":
    """Returns the drafts selected by `index`."""
    return Drafts(**{field.name: getattr(self, field.name)[index]
                     for field in dataclasses.fields(self)})

  def at(self, node: int | np.ndarray) -> np.ndarray:
    """Returns the contexts `[n]` of `node`, a node or `[n]` nodes."""
    return self.contexts[np.arange(len(self.weights)), node]

  def seen(self, parent: int | np.ndarray) -> np.ndarray:
    """Returns a mask `[n, V]` of the tokens of the children of `parent`.

    `parent` is a node, or `[n]` nodes. Children that are padding are ignored.
    """
    count, _, vocab_size = self.probs.shape
    child = self.parents == np.reshape(parent, (-1, 1))
    draft, node = np.nonzero(child & self.probs.any(-1))
    seen = np.zeros((count, vocab_size), bool)
    seen[draft, self.tokens[draft, node]] = True
    return seen

  def first(self, node: int) -> np.ndarray:
    """Returns the first node `[n]` with the parent and the token of `node`."""
    same = ((self.parents == self.parents[:, node, None])
            & (self.tokens == self.tokens[:, node, None]))
    return np.argmax(same, axis=-1)

  def grow(self, parent: int | np.ndarray, law: np.ndarray,
           probs: np.ndarray | None = None) -> "Drafts":
    """Adds a node. Each draft becomes one draft per possible token of the node.

    Args:
      parent: parent of the new node, a node or `[n]` nodes.
      law: `[n, V]` distribution of the new node's token. If a row is 0, the new
        node of that draft is padding.
      probs: `[n, V]` row of `probs` of the new node; None means `law`.
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
    """Appends padding.

    Args:
      nodes: number of nodes N including the padding.
      token: token id of padding, which can exceed V. None means arbitrary ids.
      chain: if True, the parent of padding is the previous node. If False, it
        is the root.
    """
    drafts, law = self, np.zeros_like(self.probs[:, 0])
    real = drafts.tokens.shape[1]
    for node in range(real, nodes):
      drafts = drafts.grow(node - 1 if chain else 0, law)
    drafts.tokens[:, real:] = (
        drafts.any_tokens()[:, real:] if token is None else token)
    return drafts

  def scattered(self, nodes: int) -> "Drafts":
    """Inserts padding before and between the real nodes, up to N = `nodes`.

    Padding is a child of the next real node's parent, of the previous padding,
    or of any earlier node. No descendant of padding is a real node. Token ids
    of padding are arbitrary. Row 0 of `probs`, which rules must ignore, is not
    0.
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
    """Returns arbitrary token ids `[n, N]`, some outside the vocabulary."""
    rng = np.random.default_rng(self.tokens.shape)
    return rng.integers(self.probs.shape[-1] + 2, size=self.tokens.shape)

  def cut(self, lengths: np.ndarray) -> "Drafts":
    """Replaces the tokens of chains after the first `lengths [n]` by padding.

    Drafts that become equal are not merged.
    """
    stays = np.arange(self.tokens.shape[1]) <= np.reshape(lengths, (-1, 1))
    return dataclasses.replace(
        self, tokens=np.where(stays, self.tokens, 0),
        probs=np.where(stays[..., None], self.probs, 0))


def chains(q: np.ndarray, contexts: np.ndarray, gamma: int,
           product: bool = False) -> Drafts:
  """Returns all chains of gamma tokens after each of n contexts.

  Args:
    q: `[contexts, V]` draft distributions.
    contexts: `[n]` numbers of contexts.
    gamma: draft length.
    product: if True, the token of every position is drawn from its marginal
      distribution under q, independently of the other tokens.
  """
  drafts = Drafts.roots(contexts, q.shape[-1])
  laws = _marginals(q, contexts, gamma) if product else None
  for node in range(gamma):
    law = laws[node][drafts.starts] if product else q[drafts.at(node)]
    drafts = drafts.grow(node, law)
  return drafts


def _marginals(q: np.ndarray, contexts: np.ndarray, gamma: int
               ) -> list[np.ndarray]:
  """Returns the marginal distributions `[n, V]` of gamma tokens under q.

  Args:
    q: `[contexts, V]` draft distributions.
    contexts: `[n]` numbers of the contexts before the first token.
    gamma: number of positions.
  """
  vocab_size = q.shape[-1]
  reach, at, laws = np.ones((len(contexts), 1)), contexts[:, None], []
  for _ in range(gamma):
    joint = reach[..., None] * q[at]
    laws.append(joint.sum(1))
    reach = joint.reshape(len(contexts), -1)
    at = longer(at[..., None], np.arange(vocab_size), vocab_size).reshape(
        len(contexts), -1)
  return laws


_CHUNK = 1024  # chains per call; gives one compiled shape for each length

Stop = Callable[[jax.Array, jax.Array], jax.Array]


def ended_by(stop: Stop) -> Callable[[Drafts], Drafts]:
  """Returns a function that shortens chains by a stop rule.

  Args:
    stop: function `(probs [gamma, V], tokens [gamma]) -> length []` that
      returns the number of kept tokens, see `certify`.

  Raises:
    ValueError: `stop` is a class or cannot be called.
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


_DENSE = 1 << 22  # largest `size` for which `_counted` uses a dense array


class Starts(NamedTuple):
  """Starts of rounds: n contexts of one length, each with a state of the rule.

  Attributes:
    contexts: `[n]` int64 index of each context among contexts of its length.
    states: states of the rule, leaves `[n, ...]`, or None.
    weights: `[n]` probability that a round starts with this context and state.
  """

  contexts: np.ndarray
  states: Any
  weights: np.ndarray


def first_contexts(vocab_size: int, depth: int) -> np.ndarray:
  """Returns the number of the first context of each length up to `depth`."""
  return np.cumsum([0, *(vocab_size**k for k in range(depth))])


def dense(starts: Starts, size: int) -> np.ndarray:
  """Returns the weights `[size]` of all contexts of one length."""
  return np.bincount(starts.contexts, starts.weights, minlength=size)


def merged(outcomes: list[dict[int, Starts]], vocab: int) -> dict[int, Starts]:
  """Adds the probabilities of starts with the same context and state.

  Args:
    outcomes: dicts from the length of a context to the starts of rounds after
      contexts of this length.
    vocab: vocabulary size V.

  Returns:
    One such dict, in which every pair of context and state occurs once.
  """
  lengths = sorted({length for starts in outcomes for length in starts})
  return {length: _merged([starts[length] for starts in outcomes
                           if length in starts], vocab**length)
          for length in lengths}


def _merged(parts: list[Starts], size: int) -> Starts:
  """Merges starts whose contexts have one length.

  `size` is the number of all contexts of this length.
  """
  contexts = np.concatenate([part.contexts for part in parts])
  weights = np.concatenate([part.weights for part in parts])
  columns = zip(*(jax.tree.leaves(part.states) for part in parts))
  leaves = [np.concatenate(column) for column in columns]
  if not leaves:
    contexts, weights = _counted(contexts, weights, size)
    return Starts(contexts, parts[0].states, weights)
  rows = np.concatenate([
      np.ascontiguousarray(x).reshape(len(contexts), -1).view(np.uint8)
      for x in (contexts, *leaves)], axis=1)
  _, first, which = np.unique(
      rows.view(np.dtype((np.void, rows.shape[1]))).reshape(-1),
      return_index=True, return_inverse=True)
  states = jax.tree.unflatten(jax.tree.structure(parts[0].states),
                              [x[first] for x in leaves])
  return Starts(contexts[first], states,
                np.bincount(which.reshape(-1), weights))


def _counted(contexts: np.ndarray, weights: np.ndarray, size: int
             ) -> tuple[np.ndarray, np.ndarray]:
  """Returns the distinct contexts and their total weights."""
  if size > _DENSE:
    contexts, which = np.unique(contexts, return_inverse=True)
    return contexts, np.bincount(which.reshape(-1), weights)
  counts = np.bincount(contexts, weights, minlength=size)
  contexts = np.flatnonzero(counts)
  return contexts, counts[contexts]
