"""Computes the moves of an automaton over tokens from one over bytes.

A move is the state after a state and a token, relative to a copy of a part (see
`fragments`). The computation shares equal work:

* Bytes with the same edges in all states form one class.
* States with the same moves for all tokens have one colour. Only one state of
  each colour reads the tokens (`colours`).
* Prefixes of tokens with the same effect on all of these states are extended
  once (`Walk.read`).

States and prefixes are equal if their 64-bit hashes are equal.
"""

from collections.abc import Sequence

import numpy as np

from specjax.constraints import fragments

MOST_MOVES = 2**24  # entries of a table: 64 MiB
_LONG = 200  # number of longest strings; they are processed separately
_CHUNK = 2**21  # pairs of states and tokens in one batch


def check_moves(count: int, most: int = MOST_MOVES) -> None:
  """Raises `ValueError` if a table has more than `most` moves."""
  if count > most:
    raise ValueError(f"the automaton needs a table of {count} moves, and the "
                     f"most is {most}; allow fewer names or characters")


class Walk:
  """Reads all tokens of a vocabulary together, along the trie of their bytes.

  A string is the sequence of the classes of a token's bytes. Tokens with equal
  strings have equal moves.

  Attributes:
    fragment: automaton over bytes.
    edges: `[E, 4]`, edges of the automaton, sorted by state.
    level: `[E]`, level of copies (see `fragments`) that each edge is relative
      to. It is the deepest level where both states of the edge are in the same
      group, and in the same copy at every level above.
    string: `[V]`, number of the string of each token.
    trie: trie of all strings that some path of the automaton may contain.
    long: trie of the few longest strings.
    depth: length of the longest string that is not in `long`.
  """

  def __init__(self, fragment: fragments.Fragment, texts: Sequence[bytes]
               ) -> None:
    edges = fragment.edges[np.argsort(fragment.edges[:, 0], kind="stable")]
    self.fragment, self.edges = fragment, edges
    source, target = edges[:, 0], edges[:, 3]
    anchors, groups = fragment.anchors, fragment.groups
    self._anchors = anchors.astype(np.int32)
    self.level = np.zeros(len(edges), np.int64)
    same = np.ones(len(edges), bool)
    for level in range(1, anchors.shape[1]):
      same &= anchors[source, level - 1] == anchors[target, level - 1]
      self.level[same & (groups[source, level] == groups[target, level])] = (
          level)
    cuts = np.unique(np.r_[0, edges[:, 1], edges[:, 2] + 1, 256])
    classes = np.searchsorted(cuts, np.arange(256), "right") - 1
    first, last = classes[edges[:, 1]], classes[edges[:, 2]]
    count = last - first + 1
    column = fragments.ranges(first, count)
    self._table = np.full((fragment.size, len(cuts) - 1), -1, np.int32)
    self._table[np.repeat(source, count), column] = np.repeat(target, count)
    self._levels = np.zeros(self._table.shape, np.int8)
    self._levels[np.repeat(source, count), column] = np.repeat(
        self.level, count)
    self._spell(texts, classes)

  def _spell(self, texts: Sequence[bytes], classes: np.ndarray) -> None:
    """Sets `string`, `trie`, `long` and `depth`.

    Args:
      texts: bytes of the tokens.
      classes: `[256]`, class of each byte.
    """
    read = bytes(classes.astype(np.uint8))
    spelled = [text.translate(read) for text in texts]
    strings = sorted(set(spelled))
    number = {string: i for i, string in enumerate(strings)}
    self.string = np.array([number[x] for x in spelled])
    lengths = np.array([len(x) for x in strings])
    steps = np.zeros((len(strings), lengths.max(initial=0)), np.uint8)
    for row, text in zip(steps, strings):
      row[:len(text)] = np.frombuffer(text, np.uint8)
    usable = self._usable(steps, lengths)
    longest = np.sort(lengths[usable])
    self.depth = int(longest[-_LONG:][0 if len(longest) > _LONG else -1]
                     ) if len(longest) else 0
    self._count = len(strings)
    long = usable[lengths[usable] > self.depth]
    self.trie, self.long = (
        _trie(steps[x], lengths[x], x) for x in (usable, long))

  def _usable(self, steps: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the numbers of the strings that the automaton may read.

    Every pair of adjacent classes in such a string occurs on some path.

    Args:
      steps: `[U, D]`, byte classes of U strings, padded with 0.
      lengths: `[U]`, lengths of the strings.
    """
    classes = self._table.shape[1]
    after = np.packbits(self._table >= 0, axis=1)
    pairs = np.zeros((classes, classes), bool)
    for column, targets in enumerate(self._table.T):
      pairs[column] = np.unpackbits(np.bitwise_or.reduce(
          after[targets[targets >= 0]], axis=0), count=classes)
    firsts = (self._table >= 0).any(0)
    usable = (lengths > 0) & firsts[steps[:, 0]] if steps.size else (
        lengths > 0)
    for i in range(1, steps.shape[1]):
      usable &= (lengths <= i) | pairs[steps[:, i - 1], steps[:, i]]
    return np.flatnonzero(usable)

  def read(self, states: np.ndarray, trie: list[tuple[np.ndarray, ...]]
           ) -> tuple[np.ndarray, ...]:
    """Reads all strings of a trie from each start state.

    Nodes of the trie with the same effect on every state are of one kind.
    Strings that end at nodes of the same kind share a column.

    Args:
      states: `[R]`, start states.
      trie: trie of the strings (see `_trie`).

    Returns:
      Three arrays with an entry for each allowed pair of start state and
      column: index into `states`, column, move. A fourth array `[U]` contains
      the column of each string, or -1 if all states forbid the string.
    """
    anchors = self._anchors
    depth = anchors.shape[1]
    column, count = np.full(self._count, -1), 0
    found, total = [np.zeros((3, 0), np.int32)], 0
    # The places of kind i have the indices from starts[i] to starts[i + 1] - 1.
    # A place consists of a start state, the state after reading the string, and
    # the outermost (smallest) `level` of the edges on the path.
    starts = np.array([0, len(states)])
    places = (np.arange(len(states), dtype=np.int32), states.astype(np.int32),
              np.full(len(states), depth - 1, np.int8))
    kinds = np.zeros(1, np.int32)
    for first, step, ends in trie:
      above = kinds[np.repeat(np.arange(len(first) - 1), np.diff(first))]
      alive = np.flatnonzero(above >= 0)
      pairs, pair = np.unique(above[alive] * np.int64(256) + step[alive],
                              return_inverse=True)
      starts, places, kind = self._stepped(starts, places, pairs)
      kinds = np.full(len(step), -1, np.int32)
      kinds[alive] = kind[pair.reshape(-1)]
      stops = np.flatnonzero((ends >= 0) & (kinds >= 0))
      ended, number = np.unique(kinds[stops], return_inverse=True)
      column[ends[stops]] = count + number.reshape(-1)
      size = starts[ended + 1] - starts[ended]
      at = fragments.ranges(starts[ended], size)
      origin, state, level = (x[at] for x in places)
      level = level.astype(np.int32)
      offset = state - anchors[states[origin], level]
      found.append(np.stack([
          origin, np.repeat(count + np.arange(len(ended)), size),
          offset * depth + level]).astype(np.int32))
      count += len(ended)
      total += len(origin)
      check_moves(total, 2 * MOST_MOVES)
    return (*np.concatenate(found, axis=1), column)

  def _stepped(self, starts: np.ndarray, places: tuple[np.ndarray, ...],
               pairs: np.ndarray
               ) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
    """Extends strings of some kinds by a byte class.

    A kind is a set of trie nodes with the same effect on all states (see
    `read`).

    Args:
      starts: index of the first place of each kind.
      places: places of the kinds: start states, states and levels.
      pairs: `[n]`, kind * 256 + byte class.

    Returns:
      `starts` and `places` of the new kinds, and the new kind of each pair, or
      -1 if no state allows the pair.
    """
    above, step = pairs // 256, pairs % 256
    size = starts[above + 1] - starts[above]
    depth = self._anchors.shape[1]
    hashes = [np.zeros(0, np.uint64)]
    for some in np.split(np.arange(len(pairs)), np.flatnonzero(np.diff(
        (np.cumsum(size) - size) // _CHUNK)) + 1):
      if some.size:
        origin, state, level = self._moved(starts, places, above[some],
                                           step[some], size[some])
        with np.errstate(over="ignore"):
          hashes.append(np.add.reduceat(np.where(
              state >= 0, mixed(state * depth + level, origin), np.uint64(0)),
                                        np.cumsum(size[some]) - size[some]))
    hashes, first, kind = np.unique(
        np.concatenate(hashes), return_index=True, return_inverse=True)
    dead = int(len(hashes) > 0 and hashes[0] == 0)
    first = first[dead:]
    check_moves(size[first].sum(), 4 * MOST_MOVES)
    places = self._moved(starts, places, above[first], step[first], size[first])
    kept = places[1] >= 0
    ends = np.cumsum(size[first])
    starts = np.r_[0, np.cumsum(kept)][np.r_[0, ends]]
    return starts, tuple(x[kept] for x in places), kind.reshape(-1) - dead

  def _moved(self, starts: np.ndarray, places: tuple[np.ndarray, ...],
             above: np.ndarray, step: np.ndarray, size: np.ndarray
             ) -> tuple[np.ndarray, ...]:
    """Returns the places after reading a byte class.

    The state is -1 where the byte class is forbidden. `read` defines places and
    kinds.

    Args:
      starts: index of the first place of each kind.
      places: places of the kinds.
      above: `[n]`, kinds before the byte class.
      step: `[n]`, byte class to read after each kind.
      size: `[n]`, number of places of each kind.
    """
    at = fragments.ranges(starts[above], size)
    origin, state, level = (x[at] for x in places)
    step = np.repeat(step, size)
    return (origin, self._table[state, step],
            np.minimum(level, self._levels[state, step]))


def _trie(steps: np.ndarray, lengths: np.ndarray, names: np.ndarray
          ) -> list[tuple[np.ndarray, ...]]:
  """Returns the trie of strings of byte classes.

  Args:
    steps: `[U, D]`, byte classes of sorted strings.
    lengths: `[U]`, lengths of the strings.
    names: `[U]`, numbers of the strings.

  Returns:
    A list with three arrays for each depth: the first child of each node at the
    depth above, the byte class of each node, and the number of the string that
    ends at each node, or -1.
  """
  above, depths = np.zeros(len(names), np.int64), []
  for depth in range(lengths.max(initial=0)):
    on = np.flatnonzero(lengths > depth)
    nodes, node = np.unique(
        above[on] * 256 + steps[on, depth], return_inverse=True)
    above[on] = node.reshape(-1)
    ends = np.full(len(nodes), -1)
    stops = on[lengths[on] == depth + 1]
    ends[above[stops]] = names[stops]
    parents = nodes // 256
    starts = np.searchsorted(parents, np.arange(parents.max() + 2))
    depths.append((starts.astype(np.int32), (nodes % 256).astype(np.uint8),
                   ends.astype(np.int32)))
  return depths


def colours(walk: Walk) -> np.ndarray:
  """Returns `[S]` uint64, a hash of the moves of each state (its colour).

  States of equal colour have equal moves for all tokens. Two states are equal
  for strings of n + 1 bytes if their edges are equal moves to states that are
  equal for n bytes. Two edges are equal moves if they have the same bytes, the
  same level of copies, and the same target. The target is taken relative to the
  copy at this level and to the copies at all deeper levels.
  """
  with np.errstate(over="ignore"):
    edges, level = walk.edges, walk.level
    anchors = walk.fragment.anchors
    source, target = edges[:, 0], edges[:, 3]
    key = mixed(edges[:, 1] * 256 + edges[:, 2], level)
    key = mixed(target - anchors[source, level], key)
    for i in range(1, anchors.shape[1]):
      key = mixed(np.where(i >= level, target - anchors[target, i], -1), key)
    starts = np.searchsorted(source, np.arange(walk.fragment.size + 1))
    has_edges = np.flatnonzero(starts[1:] > starts[:-1])
    colours = np.zeros(walk.fragment.size, np.uint64)
    count = 1
    for _ in range(walk.depth):
      new = np.zeros_like(colours)
      if len(edges):
        new[has_edges] = np.add.reduceat(
            mixed(colours[target], key), starts[has_edges])
      before, count, colours = count, len(np.unique(new)), new
      if count == before:  # longer strings do not distinguish more states
        break
    # The loop covers strings of up to `depth` bytes. Every state reads the few
    # longer strings.
    states, columns, moves, _ = walk.read(
        np.arange(walk.fragment.size), walk.long)
    np.add.at(colours, states, mixed(moves, columns))
  return colours


def mixed(x: np.ndarray, key: np.ndarray) -> np.ndarray:
  """Returns hashes of pairs of integers."""
  x = np.asarray(x).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
  x = (x + np.asarray(key).astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93))
  x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
  x = (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
  return x ^ (x >> np.uint64(32))
