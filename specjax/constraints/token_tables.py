"""Tables of an automaton over the tokens of a vocabulary.

A row of a table contains the moves of a state: the next state after each
allowed token. A state inside a free string allows almost all tokens. A state
inside a choice of names allows only a few. So there are two tables. Rows with
many tokens form a matrix. Each column of the matrix belongs to a class of
tokens with equal moves in these rows. The other rows are lists of tokens and
moves. States in different copies of a part (see `fragments`) share rows,
because moves are relative to the copy.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from specjax.constraints import fragments
from specjax.constraints import token_walk

FORBIDDEN = np.int32(-2**31)
NEVER = 2**30  # distance if no accepting state can be reached
_LISTED = 64  # largest number of tokens of a list row
_CHUNK = 2**21  # pairs of states and tokens in one batch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenTables:
  """Moves of an automaton over a vocabulary of V tokens.

  A move is a number m. It leads from state s to `anchors[s, m % L] + m // L`,
  where L is the number of levels of copies (see `fragments`). The tables are
  small because states share rows, and tokens share columns.

  Attributes:
    row: `[S]` int32, row of each state. Rows 0 to R - 1 are in `moves`, the
      other rows are in `listed` and `listed_moves`.
    anchors: `[S, L]` int32, states that moves are relative to, by level; 0 at
      level 0.
    moves: `[R + 1, K]` int32, moves of a row for each of K token classes. All
      moves of the last row are forbidden.
    token_class: `[V]` int32, class of each token.
    starts: `[rows + 1]` int32, start of the list of each row in `listed`.
    listed: `[T + W]` int32, tokens of the lists, padded with V; W is the length
      of the longest list.
    listed_moves: `[T + W]` int32, moves of the listed tokens.
    final: `[S]` bool, accepting states.
    distance: `[S]` int32, smallest number of tokens to an accepting state.
  """

  row: np.ndarray
  anchors: np.ndarray
  moves: np.ndarray
  token_class: np.ndarray
  starts: np.ndarray
  listed: np.ndarray
  listed_moves: np.ndarray
  final: np.ndarray
  distance: np.ndarray

  @property
  def window(self) -> int:
    """Length W of the longest list."""
    return len(self.listed) - int(self.starts[-1])

  def targets(self, state: np.ndarray, move: np.ndarray) -> np.ndarray:
    """Returns the state after each move, or -1 for a forbidden move."""
    return _targets(self.anchors, state, move)

  def row_moves(self, row: int) -> np.ndarray:
    """Returns `[V]` int32, the moves of a row by token."""
    found = self.moves[min(row, len(self.moves) - 1)][self.token_class]
    place = slice(self.starts[row], self.starts[row + 1])
    found[self.listed[place]] = self.listed_moves[place]
    return found


def of_table(next_state: np.ndarray, final: np.ndarray) -> TokenTables:
  """Returns the tables of an automaton over tokens.

  Args:
    next_state: `[S, V]`, next state for each state and token; -1 if the state
      forbids the token.
    final: `[S]` bool, accepting states.
  """
  columns, classes = np.unique(next_state, axis=1, return_inverse=True)
  moves = np.where(columns >= 0, columns, FORBIDDEN)
  states = len(moves)
  return _with_distances(
      row=np.arange(states), anchors=np.zeros((states, 1)),
      moves=np.pad(moves, ((0, 1), (0, 0)), constant_values=FORBIDDEN),
      token_class=classes.reshape(-1), starts=np.zeros(states + 1),
      listed=np.zeros(0), listed_moves=np.zeros(0), final=final)


def of_fragment(fragment: fragments.Fragment, texts: Sequence[bytes]
                ) -> TokenTables:
  """Returns the tables of an automaton over bytes.

  Args:
    fragment: automaton over bytes.
    texts: bytes of V tokens; a token without bytes is forbidden.

  Raises:
    ValueError: the tables are too large.
  """
  walk = token_walk.Walk(fragment, texts)
  _, first, row = np.unique(
      token_walk.colours(walk), return_index=True, return_inverse=True)
  states, columns, moves, column = walk.read(first, walk.trie)
  column = column[walk.string]  # by token; -1 is forbidden
  sizes = np.bincount(column + 1)[1:]
  counts = np.bincount(states, weights=sizes[columns], minlength=len(first))
  dense = counts > _LISTED
  number = np.where(dense, np.cumsum(dense) - 1,
                    dense.sum() + np.cumsum(~dense) - 1)
  row, states = number[row.reshape(-1)], number[states]
  is_dense = states < dense.sum()
  table, classes = _columns(
      states[is_dense], columns[is_dense], moves[is_dense], dense.sum(),
      len(sizes) + 1)
  # The other rows become lists: all tokens of their columns.
  pick = np.flatnonzero(~is_dense)
  pick = pick[np.argsort(states[pick], kind="stable")]
  size = sizes[columns[pick]]
  order = np.argsort(column, kind="stable")[(column < 0).sum():]
  at = fragments.ranges((np.cumsum(sizes) - sizes)[columns[pick]], size)
  token_walk.check_moves(len(at))
  lengths = np.bincount(np.repeat(states[pick], size), minlength=len(first))
  window = lengths.max(initial=0)
  final = np.zeros(fragment.size, bool)
  final[fragment.final] = True
  return _with_distances(
      row=row, anchors=fragment.anchors, moves=table,
      token_class=classes[column], starts=np.r_[0, np.cumsum(lengths)],
      listed=np.pad(order[at], (0, window), constant_values=len(texts)),
      listed_moves=np.pad(np.repeat(moves[pick], size), (0, window),
                          constant_values=FORBIDDEN), final=final)


def _columns(rows: np.ndarray, columns: np.ndarray, moves: np.ndarray,
             num_rows: int, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns a table with equal columns merged.

  Args:
    rows: `[n]`, row of each entry.
    columns: `[n]`, column of each entry.
    moves: `[n]`, move of each entry. Entries that are not listed are forbidden.
    num_rows: number of rows.
    num_columns: number of columns before merging.

  Returns:
    Moves `[num_rows + 1, K]`, and the new index of each old column.
  """
  with np.errstate(over="ignore"):
    hashes = np.zeros(num_columns, np.uint64)
    np.add.at(hashes, columns, token_walk.mixed(moves, rows))
  _, first, classes = np.unique(
      hashes, return_index=True, return_inverse=True)
  classes = classes.reshape(-1)
  token_walk.check_moves((num_rows + 1) * len(first))
  table = np.full((num_rows + 1, len(first)), FORBIDDEN, np.int64)
  chosen = first[classes[columns]] == columns
  table[rows[chosen], classes[columns[chosen]]] = moves[chosen]
  return table, classes


def _with_distances(**tables):
  """Returns `TokenTables` with `tables` as int32 fields; adds `distance`."""
  final = np.array(tables.pop("final"), bool)
  tables = {name: np.asarray(x).astype(np.int32) for name, x in tables.items()}
  return TokenTables(final=final, **tables, distance=_distances(
      tables["row"], tables["anchors"], tables["moves"], tables["starts"],
      tables["listed_moves"], final))


def _targets(anchors: np.ndarray, state: np.ndarray, move: np.ndarray
             ) -> np.ndarray:
  depth = anchors.shape[1]
  return np.where(move == FORBIDDEN, -1,
                  anchors[state, move % depth] + move // depth)


def _distances(row: np.ndarray, anchors: np.ndarray, moves: np.ndarray,
               starts: np.ndarray, listed_moves: np.ndarray, final: np.ndarray
               ) -> np.ndarray:
  """Returns the fewest tokens from each state to an accepting state.

  The result is `[S]` int32. `TokenTables` defines the arguments.
  """
  different = [np.unique(x[x != FORBIDDEN]) for x in moves[:-1]]
  different += [np.unique(listed_moves[starts[i]:starts[i + 1]])
                for i in range(len(different), len(starts) - 1)]
  begins = np.r_[0, np.cumsum([len(x) for x in different])].astype(np.int64)
  different = np.concatenate([np.zeros(0, np.int32), *different])
  distance = np.where(final, 0, NEVER).astype(np.int32)
  left, tokens, news = np.flatnonzero(~final), 0, True
  while news and left.size:
    tokens, news = tokens + 1, False
    count = begins[row[left] + 1] - begins[row[left]]
    left, count = left[count > 0], count[count > 0]
    chunk = (np.cumsum(count) - 1) // _CHUNK
    kept = []
    for states, moves in zip(
        *(np.split(x, np.flatnonzero(np.diff(chunk)) + 1)
          for x in (left, count))):
      if not states.size:
        continue
      at = fragments.ranges(begins[row[states]], moves)
      target = _targets(anchors, np.repeat(states, moves), different[at])
      near = np.minimum.reduceat(
          distance[target], np.cumsum(moves) - moves) < tokens
      distance[states[near]] = tokens
      news |= near.any()
      kept.append(states[~near])
    left = np.concatenate([np.zeros(0, np.int64), *kept])
  return distance
