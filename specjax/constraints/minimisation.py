"""Hopcroft's algorithm for equivalent states of an automaton.

Two states are equivalent if the same strings lead from them to accepting
states. The algorithm takes O(S log S) time for S states. Refining all classes
in rounds would need S rounds for a chain of S states, such as a bounded
repetition.
"""

import numpy as np


def equivalent_states(table: np.ndarray, final: np.ndarray) -> np.ndarray:
  """Returns the class of every state; equivalent states are in one class.

  Args:
    table: `[S, A]`, next state for each of A classes of code points, or -1.
    final: `[S]` bool, accepting states.

  Returns:
    Number of the class of each state, `[S]` int64.
  """
  dead = len(table)  # target of all missing moves
  table = np.where(table < 0, dead, table)
  before = []  # predecessors of each state, by class of code points
  for targets in table.T:
    order = np.argsort(targets, kind="stable")
    ends = np.cumsum(np.bincount(targets, minlength=dead + 1))[:-1]
    before.append([x.tolist() for x in np.split(order, ends)])
  is_final = np.append(final, False)
  numbers = is_final.astype(int).tolist()
  blocks = [{*np.flatnonzero(x).tolist()} for x in (~is_final, is_final)]
  work = {0, 1}
  while work:
    splitter = list(blocks[work.pop()])
    for moves in before:
      parts = {}
      for target in splitter:
        for state in moves[target]:
          parts.setdefault(numbers[state], set()).add(state)
      for number, part in parts.items():
        work |= _split(blocks, numbers, number, part)
  return np.array(numbers[:dead])


def _split(blocks: list[set[int]], numbers: list[int], number: int,
           part: set[int]) -> set[int]:
  """Splits a block of states that may be equivalent into `part` and the rest.

  Returns a set with the number of the new block, or an empty set if `part` is
  the entire block.

  Args:
    blocks: states of every block, changed in place.
    numbers: block of every state, changed in place.
    number: number of the block.
    part: states of the block.
  """
  rest = blocks[number] - part
  if not rest:
    return set()
  # The smaller part gets the new number and is processed again. The bound of
  # O(S log S) requires this.
  small, blocks[number] = sorted((part, rest), key=len)
  for state in small:
    numbers[state] = len(blocks)
  blocks.append(small)
  return {len(blocks) - 1}
