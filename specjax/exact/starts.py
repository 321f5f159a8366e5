"""Where rounds start, as arrays, and how equal starts become one."""

from typing import Any
from typing import NamedTuple

import jax
import numpy as np

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
