"""Compiles regular expressions with the syntax and semantics of `re`.

Python's `re` parses an expression and lists the characters of a class.
Back-references, look-around and word boundaries are refused. Anchors are
allowed anywhere. Unlike in `re`, `$` does not match before a final line feed.
"""

from collections.abc import Collection
from collections.abc import Iterable
import functools
import re
import re._constants as codes
import re._parser as parser
from typing import Any
from typing import NoReturn

import numpy as np

from specjax.constraints import characters
from specjax.constraints import fragments

Code = codes._NamedIntConstant
Ranges = tuple[tuple[int, int], ...]  # first and last code points

_POINTS = 0x110000
_SHOWN = 60  # length of an expression in an error message
_CASES = re.IGNORECASE | re.ASCII
_NAMES = {
    "ASSERT": "a look-ahead or look-behind", "GROUPREF": "a back-reference",
    "ASSERT_NOT": "a negative look-ahead or look-behind",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group", "POSSESSIVE_REPEAT":
        "a possessive repetition", "AT_BOUNDARY": r"the word boundary \b",
    "AT_NON_BOUNDARY": r"\B"}
_BEGIN, _END = 0, 1  # conditions of a move: begin and end of the string


def compiled(pattern: str, *, search: bool) -> characters.Characters:
  """Compiles an expression.

  Args:
    pattern: regular expression.
    search: if True, the expression may match anywhere in a string, as in JSON
      Schema. If False, the expression must match the entire string.

  Returns:
    The minimised automaton of the matching strings.

  Raises:
    ValueError: the expression is invalid, has an unsupported part, or needs too
      many states.
  """
  try:
    tree = parser.parse(re.sub(
        r"\\.", lambda x: r"\Z" if x.group() == r"\z" else x.group(), pattern,
        flags=re.DOTALL))
  except (re.error, OverflowError, RecursionError) as e:
    raise ValueError(f"the regular expression {shown(pattern)} does not "
                     f"compile: {e}") from None
  machine = _Machine(pattern)
  accept = machine.new()
  machine.accept = accept
  if search:
    machine.read(accept, _ALL, accept)
  start = machine.sequence(tree, accept, tree.state.flags)
  if search:
    before = machine.new()
    machine.read(before, _ALL, before)
    machine.moves[before].append((None, start))
    start = before
  return machine.deterministic(start, absorbing=search)


def shown(pattern: str) -> str:
  """Returns an expression as error messages show it."""
  text = pattern if len(pattern) <= _SHOWN else pattern[:_SHOWN] + "..."
  return repr(text).replace("\\\\", "\\")  # backslashes as they were typed


@functools.cache
def _every() -> str:
  """Returns a string of all code points."""
  return "".join(map(chr, range(_POINTS)))


@functools.lru_cache(maxsize=256)
def _ranges(text: str, flags: int) -> Ranges:
  """Returns the ranges of code points that a character class matches.

  `text` is the class, such as "[^a-z]".
  """
  return tuple((x.start(), x.end() - 1) for x in re.finditer(
      f"{text}+", _every(), flags=flags | re.DOTALL))


_ALL = ((0, _POINTS - 1),)


class _Machine:
  """Nondeterministic automaton, built from the end to the beginning.

  `reads` are transitions that consume a character. `moves` are transitions that
  consume none and may have a condition, `_BEGIN` or `_END`: the automaton is at
  the begin or end of the string.
  """

  def __init__(self, pattern: str) -> None:
    self.pattern, self.accept = pattern, None
    self.reads, self.moves = [], []  # by state
    self._sets = {}  # number of each set of characters

  def new(self) -> int:
    """Adds a state without moves and returns its number."""
    fragments.check_size(len(self.reads) + 1,
                         f"the expression {shown(self.pattern)}")
    self.reads.append([])
    self.moves.append([])
    return len(self.reads) - 1

  def read(self, state: int, ranges: Ranges, after: int) -> None:
    """Adds a transition that consumes a character in `ranges`."""
    number = self._sets.setdefault(ranges, len(self._sets))
    self.reads[state].append((number, after))

  def sequence(self, items: Iterable[tuple[Code, Any]], after: int, flags: int
               ) -> int:
    """Adds states that read the parsed `items` and lead to the state `after`.

    Returns the first of the added states. `flags` are flags of `re`.
    """
    for code, value in reversed(list(items)):
      after = self._item(code, value, after, flags)
    return after

  def _item(self, code: Code, value: Any, after: int, flags: int) -> int:
    state = None
    if code in (codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY):
      state = self.new()
      self.read(state, _characters(code, value, flags), after)
    elif code is codes.BRANCH:
      state = self.new()
      for branch in value[1]:
        self.moves[state].append((None, self.sequence(branch, after, flags)))
    elif code is codes.SUBPATTERN:
      _, added, removed, items = value
      state = self.sequence(items, after, (flags | added) & ~removed)
    elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
      state = self._repeat(*value, after, flags)
    elif code is codes.AT:
      ends = {codes.AT_BEGINNING: _BEGIN, codes.AT_BEGINNING_STRING: _BEGIN,
              codes.AT_END: _END, codes.AT_END_STRING: _END}
      if value not in ends:
        self._refuse(str(value))
      if flags & re.MULTILINE and value in (codes.AT_BEGINNING, codes.AT_END):
        raise ValueError(f"the flag (?m) of the regular expression "
                         f"{shown(self.pattern)} is not supported")
      state = self.new()
      self.moves[state].append((ends[value], after))
    else:
      self._refuse(str(code))
    return state

  def _refuse(self, code: str) -> NoReturn:
    raise ValueError(
        f"{_NAMES.get(code, code)} is not supported in the regular "
        f"expression {shown(self.pattern)}; leave it out")

  def _repeat(self, least: int, most: int, items: Iterable[tuple[Code, Any]],
              after: int, flags: int) -> int:
    state = after
    if most is codes.MAXREPEAT:
      state = self.new()
      self.moves[state] += [(None, after),
                            (None, self.sequence(items, state, flags))]
      most = least
    for _ in range(most - least):
      # From each optional copy, a move leads to the state after all copies. A
      # move to the next copy would keep more states active at the same time.
      copy = self.new()
      self.moves[copy] += [(None, after),
                           (None, self.sequence(items, state, flags))]
      state = copy
    for _ in range(least):
      state = self.sequence(items, state, flags)
    return state

  def _closure(self, states: Iterable[int], holds: Collection[int]) -> set[int]:
    """Returns the states reachable from `states` without reading a character.

    `holds` are the conditions that hold at the current place of the string.
    """
    found, work = set(states), list(states)
    while work:
      for condition, target in self.moves[work.pop()]:
        if target not in found and (condition is None or condition in holds):
          found.add(target)
          work.append(target)
    return found

  def _set(self, states: Iterable[int], holds: Collection[int], absorbing: bool
           ) -> frozenset[int]:
    """Returns the closure of `states`, a state of the deterministic automaton.

    The set omits states that cannot read, accept or check a condition. If
    `absorbing` is True, a set that accepts is reduced to the accepting state.
    """
    found = self._closure(states, holds)
    if absorbing and self.accept in found:
      return frozenset([self.accept])
    return frozenset(
        x for x in found if self.reads[x] or x == self.accept or any(
            condition is not None for condition, _ in self.moves[x]))

  def deterministic(self, start: int, absorbing: bool) -> characters.Characters:
    """Returns the minimised automaton of strings from `start` to `accept`.

    If `absorbing` is True, all continuations of an accepted string are
    accepted.
    """
    lows, atoms, members = _atoms(list(self._sets))
    first = self._set([start], {_BEGIN}, absorbing)
    final = [self.accept in self._closure([start], {_BEGIN, _END})]
    names, work, rows, effort = {}, [first], [], 0
    for states in work:
      row = []
      reads = [x for state in states for x in self.reads[state]]
      for atom in range(len(members)):
        targets = frozenset(
            target for number, target in reads if members[atom, number])
        if not targets:
          row.append(-1)
          continue
        effort += len(targets)
        fragments.check_size(effort // 4,
                             f"the expression {shown(self.pattern)}")
        if targets not in names:
          after = self._set(targets, (), absorbing)
          if after not in names:
            names[after] = len(work)
            work.append(after)
            final.append(self.accept in self._closure(after, {_END}))
          names[targets] = names[after]
        row.append(names[targets])
      rows.append(row)
    return characters.Characters(lows, atoms, np.array(rows, np.int32),
                                 np.array(final)).minimised()


def _characters(code: Code, value: Any, flags: int) -> Ranges:
  """Returns the code points that an item matches, as ranges."""
  if code is codes.ANY:
    return _ALL if flags & re.DOTALL else _ranges(r"[^\n]", 0)
  if code is codes.IN:
    text = "".join(map(_class_text, value))
    negated = value[0][0] is codes.NEGATE
    return _ranges(f"[{'^' * negated}{text}]", flags & _CASES)
  if code is codes.LITERAL and not flags & re.IGNORECASE:
    return ((value, value),)
  negated = code is codes.NOT_LITERAL
  return _ranges(f"[{'^' * negated}\\U{value:08x}]", flags & _CASES)


def _class_text(item: tuple[Code, Any]) -> str:
  code, value = item
  if code is codes.NEGATE:
    return ""
  if code is codes.LITERAL:
    return f"\\U{value:08x}"
  if code is codes.RANGE:
    return f"\\U{value[0]:08x}-\\U{value[1]:08x}"
  letter = str(value).removeprefix("CATEGORY_")
  named = letter.removeprefix("NOT_")
  letter = {"DIGIT": "d", "SPACE": "s", "WORD": "w"}[named]
  return "\\" + (letter if str(value) == f"CATEGORY_{named}" else
                 letter.upper())


def _atoms(sets: list[Ranges]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Groups code points into classes with equal membership in all sets.

  Returns:
    The first code points of intervals, the class of each interval, and the
    membership `[A, sets]` of each class.
  """
  sets = sets or [()]
  lows = np.unique([0, *(x for ranges in sets for low, high in ranges
                         for x in (low, high + 1))])
  lows = lows[lows < _POINTS].astype(np.int64)
  inside = np.zeros((len(lows), len(sets)), bool)
  for i, ranges in enumerate(sets):
    for low, high in ranges:
      inside[slice(*np.searchsorted(lows, [low, high + 1])), i] = True
  rows, atoms = np.unique(inside, axis=0, return_inverse=True)
  return lows, atoms.reshape(-1), rows
