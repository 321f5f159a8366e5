"""Equivalent states of a deterministic automaton, by Hopcroft's algorithm.

S states take a time of S log S. To refine all classes in rounds takes S rounds
for a chain of S states, such as that of a bounded repetition.
"""

import numpy as np


def equivalent_states(table: np.ndarray, final: np.ndarray) -> np.ndarray:
  """Returns a number for every state, equal for equivalent states.

  Args:
    table: `[S, A]`, the next states by class of code points, -1 where there is
      none.
    final: `[S]` bool.

  Returns:
    `[S]` int64.
  """
  dead = len(table)  # where all moves lead that are not there
  table = np.where(table < 0, dead, table)
  before = []  # the states before each state, by class of code points
  for targets in table.T:
    order = np.argsort(targets, kind="stable")
    ends = np.cumsum(np.bincount(targets, minlength=dead + 1))[:-1]
    before.append([x.tolist() for x in np.split(order, ends)])
  numbers = [*final.astype(int).tolist(), 0]
  blocks = [{i for i, x in enumerate(numbers) if x == y} for y in (0, 1)]
  work = {0, 1}
  while work:
    splitter = list(blocks[work.pop()])
    for moves in before:
      parts = {}
      for target in splitter:
        for state in moves[target]:
          parts.setdefault(numbers[state], set()).add(state)
      for number, part in parts.items():
        rest = blocks[number] - part
        if not rest:
          continue
        # The smaller half gets the new number.
        small, blocks[number] = sorted((part, rest), key=len)
        for state in small:
          numbers[state] = len(blocks)
        work.add(len(blocks))
        blocks.append(small)
  return np.array(numbers[:dead])
