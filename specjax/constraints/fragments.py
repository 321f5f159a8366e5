"""Deterministic automata over bytes, built from smaller automata.

A fragment is an automaton that can become a part of a larger one. A bounded
list of bounded lists has tens of thousands of states, but most of its parts are
copies of each other. So every state belongs to one copy at each *level*. Level
0 is the entire automaton. Level 1 is a copy of a part, and level 2 is a copy of
a part of that part. A *group* is the set of adjacent copies of one part.

A move (edge) within a group is stored relative to the first state of the copy.
The move is then equal in every copy, so `token_tables` processes only one copy.
"""

from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
import functools

import numpy as np

MOST_STATES = 2**18
_MOST_MERGED = 20_000  # largest number of states from merged alternatives


class TooLargeError(ValueError):
  """Error for an automaton with more than `MOST_STATES` states."""


def check_size(states: int, what: str) -> None:
  """Raises `TooLargeError` if there are more than `MOST_STATES` states."""
  if states > MOST_STATES:
    raise TooLargeError(f"{what} needs {states} states, and an automaton has "
                        f"at most {MOST_STATES}; allow fewer repetitions")


@dataclasses.dataclass(frozen=True, eq=False)
class Fragment:
  """Deterministic automaton over bytes; the initial state is 0.

  The docstring of the module defines copies, levels and groups.

  Attributes:
    edges: `[E, 4]` int64. The columns are the state, the first and last byte of
      a range, and the next state.
    final: `[F]` int64, accepting states.
    anchors: `[S, L]` int64, first state of the copy that contains each of S
      states, at each of L levels. The entry is 0 at level 0.
    groups: `[S, L]` int64, first state of the first copy in the group that
      contains each state. The entry is 0 if the state is in no copy.
  """

  edges: np.ndarray
  final: np.ndarray
  anchors: np.ndarray
  groups: np.ndarray

  @property
  def size(self) -> int:
    """Number of states S."""
    return len(self.anchors)

  def accepts(self, text: bytes) -> bool:
    """Returns True if the automaton accepts `text`."""
    state = 0
    for byte in text:
      state = next((target for low, high, target in self._moves.get(state, ())
                    if low <= byte <= high), self.size)
    return state in self.final

  @functools.cached_property
  def _moves(self) -> dict[int, list[tuple[int, int, int]]]:
    """First byte, last byte and target of the edges, by state."""
    moves = {}
    for source, low, high, target in self.edges.tolist():
      moves.setdefault(source, []).append((low, high, target))
    return moves


class Builder:
  """Combines fragments to an automaton with initial state 0.

  Links, moves that read no byte, connect the fragments. `build` removes the
  links and merges equal beginnings of alternatives.
  """

  def __init__(self) -> None:
    self.size = 1
    self.final = []
    self._edges, self._links = [], []
    self._anchors = [np.zeros((1, 1), np.int64)]
    self._groups = [np.zeros((1, 1), np.int64)]

  def new(self) -> int:
    """Adds a state without moves and returns its number."""
    self._anchors.append(np.zeros((1, 1), np.int64))
    self._groups.append(np.zeros((1, 1), np.int64))
    self.size += 1
    return self.size - 1

  def link(self, source: int, target: int) -> None:
    """Adds a link: a move that reads no byte."""
    self._links.append((source, target))

  def edge(self, source: int, low: int, high: int, target: int) -> None:
    """Adds a move that reads a byte in [low, high]."""
    self._edges.append(np.array([[source, low, high, target]]))

  def text(self, source: int, text: bytes) -> int:
    """Adds bytes after a state and returns the state after them."""
    for byte in text:
      target = self.new()
      self.edge(source, byte, byte, target)
      source = target
    return source

  def put(self, source: int, fragment: Fragment, what: str = "the text") -> int:
    """Adds a fragment after a state and returns the state after it."""
    start = self.size
    check_size(start + fragment.size, what)
    self.size += fragment.size
    self._edges.append(fragment.edges + np.array([start, 0, 0, start]))
    shift = np.where(fragment.groups > 0, start, 0)  # 0: in no copy
    self._anchors.append(fragment.anchors + shift)
    self._groups.append(fragment.groups + shift)
    self.link(source, start)
    after = self.new()
    self._links += [(start + state, after) for state in fragment.final.tolist()]
    return after

  def build(self, copies: Iterable[int] = ()) -> Fragment:
    """Returns the deterministic automaton from state 0 to `final`.

    Returns None if no state of `final` can be reached.

    Args:
      copies: first states of all copies of a part, followed by the state after
        the last copy. Empty if the automaton has no copies.
    """
    depth = max(x.shape[1] for x in self._anchors)
    anchors, groups = (np.concatenate(
        [np.pad(x, ((0, 0), (0, depth - x.shape[1])), mode="edge")
         for x in parts]) for parts in (self._anchors, self._groups))
    copies = np.array(list(copies), np.int64)
    if len(copies) > 2:
      place = np.searchsorted(copies, np.arange(self.size), "right") - 1
      inside = (place >= 0) & (place < len(copies) - 1)
      start = np.where(inside, copies[np.clip(place, 0, len(copies) - 2)], 0)
      # At the new level, a state outside the copies has the entry of level 0.
      anchors = np.insert(anchors, 1, start, axis=1)
      groups = np.insert(groups, 1, np.where(inside, copies[0], 0), axis=1)
      deeper = inside[:, None] & (groups[:, 2:] == 0)
      anchors[:, 2:] = np.where(deeper, start[:, None], anchors[:, 2:])
      groups[:, 2:] = np.where(deeper, copies[0], groups[:, 2:])
    edges, final = self._closed()
    edges, final, merged = _deterministic(edges, final, self.size)
    extra = np.zeros((merged, anchors.shape[1]), np.int64)
    return _trimmed(edges, final, np.concatenate([anchors, extra]),
                    np.concatenate([groups, extra]))

  def _closed(self) -> tuple[np.ndarray, set[int]]:
    """Returns equivalent edges and final states of an automaton without links.
    """
    edges = np.concatenate(
        [*self._edges, np.zeros((0, 4), np.int64)]).astype(np.int64)
    edges = edges[np.argsort(edges[:, 0], kind="stable")]
    starts = np.searchsorted(edges[:, 0], np.arange(self.size + 1))
    links = {}
    for source, target in self._links:
      links.setdefault(source, []).append(target)
    parts, ends, closures = [edges], set(self.final), {}
    for source in sorted(links, reverse=True):
      closures[source] = _closure(source, links, closures)
      if not closures[source].isdisjoint(self.final):
        ends.add(source)
      for state in closures[source] - {source}:
        if starts[state] < starts[state + 1]:
          copied = edges[starts[state]:starts[state + 1]].copy()
          copied[:, 0] = source
          parts.append(copied)
    return np.concatenate(parts), ends


def _closure(state: int, links: dict[int, list[int]],
             closures: dict[int, set[int]]) -> set[int]:
  """Returns `state` and all states that can be reached from it by links.

  Args:
    state: first state.
    links: targets of the links, by source.
    closures: known closures, by state.
  """
  reached, work = {state}, [state]
  while work:
    source = work.pop()
    if source in closures:
      reached |= closures[source]
      continue
    work += [x for x in links.get(source, ()) if x not in reached]
    reached.update(links.get(source, ()))
  return reached


def joined(parts: list[Fragment | None]) -> Fragment | None:
  """Returns the union of automata; None is an automaton that accepts nothing.
  """
  parts = [part for part in parts if part is not None]
  if len(parts) < 2:
    return parts[0] if parts else None
  builder = Builder()
  builder.final = [builder.put(0, part) for part in parts]
  return builder.build()


def of_texts(texts: Iterable[bytes]) -> Fragment | None:
  """Returns an automaton that accepts `texts`; equal ends share states."""
  root = {}
  for text in texts:
    node = root
    for byte in text:
      node = node.setdefault(byte, {})
    node[None] = None
  if not root:
    return None
  rows = _distinct_rows(root)
  # No node equals the root, because the paths from the root are the longest.
  # So the root is the last row.
  last = len(rows) - 1
  edges = [(last - i, byte, byte, last - child) for i, row in enumerate(rows)
           for byte, child in row if byte >= 0]
  final = [last - i for i, row in enumerate(rows) if row[0][0] < 0]
  check_size(len(rows), "the choice")
  zeros = np.zeros((len(rows), 1), np.int64)
  return Fragment(np.array(edges, np.int64).reshape(-1, 4), np.array(final),
                  zeros, zeros)


def _distinct_rows(root: dict) -> list[tuple[tuple[int, int], ...]]:
  """Returns the distinct nodes of a tree of bytes, children first.

  A node is a sorted tuple of pairs (byte, number of the child). The pair
  (-1, -1) marks the end of a string.
  """
  names, rows = {}, []
  # Children are processed first, so that equal nodes have equal rows. The loop
  # is not recursive, because a long string would exceed the recursion limit.
  stack, name = [(root, False)], {}
  while stack:
    node, seen = stack.pop()
    children = [child for child in node.values() if child is not None]
    if not seen:
      stack.append((node, True))
      stack += [(child, False) for child in children]
      continue
    row = tuple(sorted((-1 if byte is None else byte,
                        -1 if child is None else name[id(child)])
                       for byte, child in node.items()))
    if row not in names:
      names[row] = len(rows)
      rows.append(row)
    name[id(node)] = names[row]
  return rows


def _deterministic(edges: np.ndarray, final: set[int], size: int
                   ) -> tuple[np.ndarray, set[int], int]:
  """Merges equal beginnings of alternatives into new states.

  Returns:
    The edges, the accepting states and the number of new states.
  """
  bits = (2**22, 2**8, 2**8, 2**22)
  edges = np.stack(np.unravel_index(np.unique(np.ravel_multi_index(
      tuple(edges.T), bits)), bits), axis=1)
  top = np.maximum.accumulate(edges[:, 0] * 256 + edges[:, 2])
  clash = edges[1:, 0] * 256 + edges[1:, 1] <= top[:-1]
  if not clash.any():
    return edges, final, 0
  starts = np.searchsorted(edges[:, 0], np.arange(size + 1))
  clashing = np.unique(edges[1:][clash, 0]).tolist()
  names, work, new = {}, [((x,), x) for x in clashing], []
  for members, name in work:
    for low, high, targets in _moves(
        np.concatenate([edges[starts[x]:starts[x + 1]] for x in members])):
      if len(targets) > 1 and targets not in names:
        if len(names) == _MOST_MERGED:
          raise ValueError(
              "parts of 'anyOf' with equal beginnings need more than "
              f"{_MOST_MERGED} states; let them differ from the start")
        names[targets] = size + len(names)
        work.append((targets, names[targets]))
        if not final.isdisjoint(targets):
          final.add(names[targets])
      # A set of several targets becomes a new state with its own number. A
      # single target keeps its number.
      new.append((name, low, high, names.get(targets, targets[0])))
  kept = edges[~np.isin(edges[:, 0], clashing)]
  return (np.concatenate([kept, np.array(new, np.int64)]), final, len(names))


def _moves(edges: np.ndarray) -> Iterator[tuple[int, int, tuple[int, ...]]]:
  """Yields ranges of bytes with equal targets: first byte, last byte, targets.
  """
  cuts = np.unique(np.r_[edges[:, 1], edges[:, 2] + 1])
  for low, high in zip(cuts[:-1].tolist(), (cuts[1:] - 1).tolist()):
    covers = (edges[:, 1] <= low) & (edges[:, 2] >= high)
    targets = tuple(np.unique(edges[covers, 3]).tolist())
    if targets:
      yield low, high, targets


def _trimmed(edges: np.ndarray, final: set[int], anchors: np.ndarray,
             groups: np.ndarray) -> Fragment | None:
  """Removes states that cannot be reached or lead to no accepting state.

  Returns None if state 0 is removed.
  """
  size = len(anchors)
  ends = np.zeros(size, bool)
  ends[list(final)] = True
  kept = spread(edges[:, 3], edges[:, 0], ends) & spread(
      edges[:, 0], edges[:, 3], np.arange(size) == 0)
  if not kept[0]:
    return None
  edges = edges[kept[edges[:, 0]] & kept[edges[:, 3]]]
  number = np.r_[0, np.cumsum(kept)]
  edges = np.stack([number[edges[:, 0]], edges[:, 1], edges[:, 2],
                    number[edges[:, 3]]], axis=1)
  final = number[:-1][ends & kept]
  # The number of a group is the first state of its first copy.
  return Fragment(edges, final, number[anchors[kept]],
                  np.where(groups[kept] > 0, number[groups[kept]], 0))


def spread(source: np.ndarray, target: np.ndarray, reached: np.ndarray
           ) -> np.ndarray:
  """Returns a mask of all states that can be reached from `reached`.

  Args:
    source: `[E]`, state before each move.
    target: `[E]`, state after each move.
    reached: `[S]` bool, mask of the initial states.
  """
  order = np.argsort(source, kind="stable")
  source, target = source[order], target[order]
  starts = np.searchsorted(source, np.arange(len(reached) + 1))
  reached = reached.copy()
  front = np.flatnonzero(reached)
  while front.size:
    at = ranges(starts[front], starts[front + 1] - starts[front])
    after = np.unique(target[at])
    front = after[~reached[after]]
    reached[front] = True
  return reached


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Returns the integers from `starts[i]` to `starts[i] + counts[i] - 1`.

  The results for all i are concatenated.

  >>> import numpy as np
  >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
  [5, 6, 0, 1, 2]
  """
  ends = np.cumsum(counts, dtype=np.int32)
  total = ends[-1] if len(ends) else 0
  return np.repeat((starts - ends + counts).astype(np.int32), counts) + (
      np.arange(total, dtype=np.int32))
