"""Automata over code points, and their conversion to automata over bytes.

Regular expressions and string lengths refer to characters (Unicode code
points), but tokens consist of bytes. A JSON string can spell a character in
several ways: as itself, as `\\n`, as `\\u00e9` or as a surrogate pair.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from specjax.constraints import fragments
from specjax.constraints import minimisation

Range = tuple[int, int, int]  # first and last code point or byte, and a label
Step = tuple[tuple[int, int], ...]  # ranges of one byte or digit

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
# For each length of a UTF-8 sequence: first and last code point, the smallest
# lead byte, and the number of values of each byte.
_UTF8 = ((0, 0x7F, 0, (128,)), (0x80, 0x7FF, 0xC0, (32, 64)),
         (0x800, 0xFFFF, 0xE0, (16, 64, 64)),
         (0x10000, _LAST, 0xF0, (8, 64, 64, 64)))
_SHORT = {0x22: b'"', 0x5C: b"\\", 0x2F: b"/", 8: b"b", 12: b"f", 10: b"n",
          13: b"r", 9: b"t"}
_MOST_MINIMISED = 20_000  # larger automata are not minimised (in states)


@dataclasses.dataclass(frozen=True, eq=False)
class Characters:
  """Deterministic automaton over code points, with S states.

  Code points with the same moves in all states form one of A classes.

  Attributes:
    lows: `[I]` int64, first code points of I intervals, ascending from 0.
    atoms: `[I]` int64, class of the code points of each interval.
    table: `[S, A]` int32, next state for each class, or -1. The initial state
      is 0.
    final: `[S]` bool, accepting states.
  """

  lows: np.ndarray
  atoms: np.ndarray
  table: np.ndarray
  final: np.ndarray

  def accepts(self, text: str) -> bool:
    """Returns True if the automaton accepts `text`."""
    state = 0
    for character in text:
      atom = self.atoms[np.searchsorted(self.lows, ord(character), "right") - 1]
      state = self.table[state, atom]
      if state < 0:
        return False
    return bool(self.final[state])

  def minimised(self) -> "Characters":
    """Merges equivalent states, if there are at most `_MOST_MINIMISED` states.
    """
    if len(self.table) > _MOST_MINIMISED:
      return self
    block = minimisation.equivalent_states(self.table, self.final)
    _, first, block = np.unique(block, return_index=True, return_inverse=True)
    order = np.argsort(first)  # by first state, so the initial state stays 0
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    block = rank[block.reshape(-1)]
    kept = first[order]
    table = np.where(self.table[kept] >= 0, block[self.table[kept]], -1)
    return dataclasses.replace(
        self, table=table.astype(np.int32), final=self.final[kept])


def anything() -> Characters:
  """Returns the automaton of all strings."""
  return Characters(np.zeros(1, np.int64), np.zeros(1, np.int64),
                    np.zeros((1, 1), np.int32), np.ones(1, bool))


def without(words: Sequence[str]) -> Characters:
  """Returns the automaton of all strings except `words`."""
  letters = sorted(set(map(ord, "".join(words))))
  atom = {letter: i + 1 for i, letter in enumerate(letters)}
  lows, atoms = [0], [0]
  for letter in letters:
    if lows[-1] == letter:
      atoms[-1] = atom[letter]
    else:
      lows.append(letter)
      atoms.append(atom[letter])
    lows.append(letter + 1)
    atoms.append(0)
  prefixes = sorted({word[:i] for word in words for i in range(len(word) + 1)}
                    | {""})
  other = len(prefixes)
  number = {prefix: i for i, prefix in enumerate(prefixes)}
  table = np.full((other + 1, len(letters) + 1), other, np.int32)
  for prefix, i in number.items():
    if prefix:
      table[number[prefix[:-1]], atom[ord(prefix[-1])]] = i
  final = np.array([*(prefix not in words for prefix in prefixes), True])
  return Characters(np.array(lows), np.array(atoms), table, final)


def intersected(a: Characters, b: Characters) -> Characters:
  """Returns the automaton of the strings that `a` and `b` accept."""
  lows = np.union1d(a.lows, b.lows)
  pairs, atoms = np.unique(
      np.stack([x.atoms[np.searchsorted(x.lows, lows, "right") - 1]
                for x in (a, b)]), axis=1, return_inverse=True)
  names, work, rows = {(0, 0): 0}, [(0, 0)], []
  for i, j in work:
    fragments.check_size(len(work), "the string")
    row = []
    for s, t in zip(a.table[i, pairs[0]].tolist(),
                    b.table[j, pairs[1]].tolist()):
      if s < 0 or t < 0:
        row.append(-1)
        continue
      if (s, t) not in names:
        names[s, t] = len(work)
        work.append((s, t))
      row.append(names[s, t])
    rows.append(row)
  final = np.array([a.final[i] and b.final[j] for i, j in work])
  return Characters(lows, atoms.reshape(-1), np.array(rows, np.int32),
                    final).minimised()


def counted(automaton: Characters, least: int, most: int | None
            ) -> list[tuple[list[int], bool]]:
  """Limits the number of characters of the accepted strings.

  Args:
    automaton: automaton of S states and A classes.
    least: smallest number of characters.
    most: largest number of characters, or None for no limit.

  Returns:
    The places of the limited automaton, each a pair. A place is a state of
    `automaton` together with a number of characters. The pair contains the next
    place for each class of code points (-1: none), and True if a string may end
    at the place. A string begins at place 0. Places without a path to an end
    are omitted. The list is empty if no string is accepted.
  """
  table = automaton.table
  counts = (least if most is None else most) + 1
  fragments.check_size(counts, f"the string of up to {counts - 1} characters")
  used = _used_places(automaton, least, counts, most is None)
  if not used[0, 0]:
    return []
  fragments.check_size(used.sum(), "the string")
  number = np.where(used, np.cumsum(used).reshape(used.shape) - 1, -1)
  # Without a largest number of characters, the last count represents all larger
  # counts, so it follows itself. Otherwise no count follows the last one.
  after = np.full_like(number, -1)
  after[:-1] = number[1:]
  if most is None:
    after[-1] = number[-1]
  return [(np.where(table[state] >= 0, after[i, table[state]], -1).tolist(),
           bool(automaton.final[state]) and i >= least)
          for i, state in zip(*np.nonzero(used))]


def _used_places(automaton: Characters, least: int, counts: int,
                 endless: bool) -> np.ndarray:
  """Returns a mask of the places that are on a path from place 0 to an end.

  Args:
    automaton: automaton of S states.
    least: smallest number of characters.
    counts: numbers of characters to consider: 0 to `counts` - 1.
    endless: if True, the last count represents all counts from `least` on.

  Returns:
    `[counts, S]` bool, mask of the places (see `counted`).
  """
  table, states = automaton.table, len(automaton.table)
  source, atom = np.nonzero(table >= 0)
  target = table[source, atom]
  reached = np.zeros((counts, states), bool)
  reached[0, 0] = True
  for i in range(1, counts):
    reached[i, target[reached[i - 1, source]]] = True
  ends = np.zeros((counts, states), bool)
  ends[least:] = automaton.final
  if endless:
    reached[-1] = fragments.spread(source, target, reached[-1])
    ends[-1] = fragments.spread(target, source, ends[-1])
  for i in reversed(range(counts - 1)):
    ends[i, source[ends[i + 1, target]]] = True
  return reached & ends


def spelled(automaton: Characters, *, json: bool, least: int = 0,
            most: int | None = None) -> fragments.Fragment | None:
  """Converts an automaton over code points to an automaton over bytes.

  Args:
    automaton: automaton over code points.
    json: if True, strings are spelled as JSON, with quotation marks. If False,
      as UTF-8.
    least: smallest number of characters.
    most: largest number of characters, or None for no limit.

  Returns:
    The automaton over bytes, or None if it accepts nothing. The states of each
    place (see `counted`) are a copy in the sense of `fragments`.
  """
  places = counted(automaton, least, most)
  if not places:
    return None
  templates, starts = _templates(automaton, places, json)
  size = int(starts[-1])
  parts = [np.zeros((0, 4))]
  for start, (edges, after) in zip(starts, templates):
    if len(edges):
      parts.append(_moved(edges, start, starts[after]))
  final = [start for start, (_, ends) in zip(starts, places) if ends]
  if json:  # quotation marks around the characters
    parts += [[(0, 0x22, 0x22, 1)],
              *([(start, 0x22, 0x22, size)] for start in final)]
    final = [size]
  blocks = np.repeat(starts[:-1], np.diff(starts))
  anchors, groups = np.zeros((2, size + json, 2), np.int64)
  anchors[int(json):size, 1] = blocks
  groups[int(json):size, 1] = 1
  return fragments.Fragment(
      edges=np.concatenate([np.array(x, np.int64) for x in parts]),
      final=np.array(final), anchors=anchors, groups=groups)


def _moved(edges: np.ndarray, start: int, ends: np.ndarray) -> np.ndarray:
  """Converts edges of `_template` to edges of the complete automaton.

  Args:
    edges: `[E, 4]`, edges of one template.
    start: state of the complete automaton for the template's state 0.
    ends: state after a character of each label.
  """
  leaf = edges[:, 3] < 0
  edges = edges + np.array([start, 0, 0, start])
  edges[leaf, 3] = ends[~(edges[leaf, 3] - start)]
  return edges


def _templates(automaton: Characters, places: list[tuple[list[int], bool]],
               json: bool
               ) -> tuple[list[tuple[np.ndarray, list[int]]], np.ndarray]:
  """Spells the next character at every place (see `counted`).

  At each place, classes of code points with the same next place have the same
  label.

  Returns:
    templates: for every place, the edges of `_template` and the next place of
      each label.
    starts: first state of every place, followed by the number of states.
  """
  intervals = tuple(zip(automaton.lows.tolist(), automaton.atoms.tolist()))
  templates, starts = [], [int(json)]
  for after, _ in places:
    names = {-1: -1}
    labels = [names.setdefault(place, len(names) - 1) for place in after]
    edges, width = _template(intervals, tuple(labels), json)
    templates.append((edges, [x for x in names if x >= 0]))
    starts.append(starts[-1] + width)
    fragments.check_size(starts[-1], "the string")
  return templates, np.array(starts)


@functools.lru_cache(maxsize=256)
def _template(intervals: tuple[tuple[int, int], ...], labels: tuple[int, ...],
              json: bool) -> tuple[np.ndarray, int]:
  """Returns an automaton over the bytes of one character.

  Args:
    intervals: first code point and class of each interval.
    labels: label of each class, or -1 if its characters are not accepted.
    json: if True, characters are spelled as in a JSON string.

  Returns:
    Edges `[E, 4]` (state, first byte, last byte, next state) and the number of
    states. The initial state is 0. The next state ~i marks the end of a
    character with label i.
  """
  root = {}
  for low, high, label in _labelled(intervals, labels):
    for path in _paths(low, high, json):
      node = root
      for step in path[:-1]:
        node = node.setdefault(step, {})
      node[path[-1]] = ~label
  names, edges = {}, []
  last = _numbered(root, names)
  # Equal nodes share a number. The root begins the longest path, so it equals
  # no other node and gets the last number. It becomes state 0.
  rename = lambda x: x if x < 0 else 0 if x == last else x + 1
  for moves, name in names.items():
    edges += [(rename(name), low, high, rename(after))
              for low, high, after in _joined(moves)]
  return np.array(edges, np.int64).reshape(-1, 4), len(names)


def _numbered(node: dict | int, names: dict[frozenset, int]) -> int:
  """Returns the number of a node. Nodes with equal edges have equal numbers.

  Args:
    node: dict from steps to nodes, or ~label at the end of a character.
    names: number of each set of edges. This function adds the new sets.
  """
  if not isinstance(node, dict):
    return node
  moves = frozenset((low, high, _numbered(after, names))
                    for step, after in node.items() for low, high in step)
  return names.setdefault(moves, len(names))


def _labelled(intervals: tuple[tuple[int, int], ...], labels: tuple[int, ...]
              ) -> list[Range]:
  """Returns merged ranges `(first, last, label)` of accepted code points."""
  found = []
  for i, (low, atom) in enumerate(intervals):
    high = intervals[i + 1][0] - 1 if i + 1 < len(intervals) else _LAST
    found.append((low, high, labels[atom]))
  return [x for x in _joined(found) if x[2] >= 0]


def _joined(moves: Iterable[Range]) -> list[Range]:
  """Joins neighbouring ranges with equal third entries."""
  found = []
  for low, high, after in sorted(moves):
    if found and found[-1][2] == after and found[-1][1] + 1 == low:
      found[-1] = (found[-1][0], high, after)
    else:
      found.append((low, high, after))
  return found


def _paths(low: int, high: int, json: bool) -> Iterator[list[Step]]:
  """Yields paths that spell the code points of an interval.

  A path is a list of steps, one for each byte. A step is a tuple of byte
  ranges. The first different steps of two paths are disjoint.
  """
  for a, b in _cut(low, high, [_SURROGATES]):
    yield from _direct(a, b, json)
    if json:
      yield from _escaped(a, b)


def _cut(low: int, high: int, holes: Sequence[tuple[int, int]]
         ) -> Iterator[tuple[int, int]]:
  """Yields the parts of an interval outside `holes`, ascending."""
  for first, last in holes:
    if low < first:
      yield low, min(high, first - 1)
    low = max(low, last + 1)
    if low > high:
      return
  yield low, high


def _direct(low: int, high: int, json: bool) -> Iterator[list[Step]]:
  holes = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)] if json else []
  for a, b in _cut(low, high, holes):
    for first, last, lead, sizes in _UTF8:
      if a <= last and b >= first:
        for digits in _split(max(a, first), min(b, last), sizes):
          bases = (lead, *[0x80] * (len(sizes) - 1))
          yield [((base + x, base + y),)
                 for base, (x, y) in zip(bases, digits)]


def _escaped(low: int, high: int) -> Iterator[list[Step]]:
  slash, u, d = _byte(0x5C), _byte(0x75), _digit(13, 13)
  for point, letter in _SHORT.items():
    if low <= point <= high:
      yield [slash, _byte(letter[0])]
  if low <= 0xFFFF:
    for digits in _split(low, min(high, 0xFFFF), (16,) * 4):
      yield [slash, u, *(_digit(*x) for x in digits)]
  if high > 0xFFFF:
    first = max(low, 0x10000) - 0x10000
    for digits in _split(first, high - 0x10000, (4, 16, 16, 4, 16, 16)):
      one, other = (
          [_digit(x + base, y + base) for (x, y), base in zip(half, (8, 0, 0))]
          for half in (digits[:3], ((digits[3][0] + 4, digits[3][1] + 4),
                                    *digits[4:])))
      yield [slash, u, d, *one, slash, u, d, *other]


def _byte(value: int) -> Step:
  return ((value, value),)


def _digit(low: int, high: int) -> Step:
  """Returns the byte ranges of the hexadecimal digits from `low` to `high`."""
  return tuple(
      (ord(zero) + max(low, least) - least, ord(zero) + min(high, most) - least)
      for zero, least, most in (("0", 0, 9), ("A", 10, 15), ("a", 10, 15))
      if low <= most and high >= least)


def _split(low: int, high: int, sizes: tuple[int, ...]) -> list[Step]:
  """Splits a range of numbers into products of ranges of digits.

  `sizes` are the numbers of values of the digits, from first to last.
  """
  if len(sizes) == 1:
    return [((low, high),)]
  unit = int(np.prod(sizes[1:]))
  first, last = low // unit, high // unit
  rest = sizes[1:]
  if first == last:
    return [((first, first), *x)
            for x in _split(low - first * unit, high - first * unit, rest)]
  found = []
  if low % unit:
    found += [((first, first), *x)
              for x in _split(low % unit, unit - 1, rest)]
    first += 1
  tail = []
  if high % unit != unit - 1:
    tail = [((last, last), *x) for x in _split(0, high % unit, rest)]
    last -= 1
  if first <= last:
    found.append(((first, last), *((0, n - 1) for n in rest)))
  return found + tail
