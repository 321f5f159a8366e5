"""From expressions over text to tables over the tokens of a vocabulary.

`outlines-core` compiles an expression to an automaton over bytes. Tokens are
then read byte by byte here, so that those count that are half of a character.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
from typing import Any

import numpy as np

from specjax.constraints import schemas

_BYTES = 256
# Of an automaton as it comes, an accepting state loses what leads on to one
# that does not accept: that of \d+([.]\d+)? takes no point. So expressions are
# compiled with a mark at their end, a character that no text has, and a state
# accepts if it does after the mark.
_MARK = "\U0010ffff"
_SHOWN = 60  # characters of an expression that an error repeats


def schema_regex(schema: str | Mapping[str, Any], whitespace: str | None = None
                 ) -> str:
  """The expression of the JSON texts that follow a schema.

  Raises:
    ValueError: the schema is no JSON, no expression stands for it or for a part
      of it, or outlines-core is missing.
  """
  library = _library().json_schema
  try:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    parts = json.loads(text)
  except (TypeError, ValueError) as e:
    raise ValueError(f"the schema is no JSON: {e}") from None
  parts = json.dumps(schemas.followed(parts, _escapes))
  try:
    return library.build_regex_from_schema(parts, whitespace)
  except Exception as e:  # of Rust, of no common class
    raise ValueError(f"no regular expression stands for the schema "
                     f"{_short(text)}: {_line(e)}; simplify it") from None


def _escapes(regex):
  """Whether it matches texts with what a JSON string escapes."""
  table, _ = bytes_automaton(regex)
  # The library leaves out the states that lead to no match.
  return (table[:, [*range(32), *b'"\\']] >= 0).any()


def bytes_automaton(regex: str) -> tuple[np.ndarray, np.ndarray]:
  """The automaton over bytes of an expression that matches a whole text.

  Args:
    regex: with ^ before it and $ after it, or without.

  Returns:
    `[S, 256]` int32, the next states, -1 where there is none, and `[S]` bool,
    which states accept. State 0 is the first.

  Raises:
    ValueError: the expression is wrong or too large, or outlines-core is
      missing.
  """
  library = _library()
  single = {bytes([byte]): [byte] for byte in range(_BYTES)}
  try:
    index = library.Index(f"(?:{schemas.without_anchors(regex)}){_MARK}",
                          library.Vocabulary(_BYTES, single))
  except Exception as e:  # of Rust, of no common class
    raise ValueError(f"the regular expression {_short(regex)} does not "
                     f"compile: {_line(e)}; it matches a whole text, so that "
                     "^ and $ within it say nothing") from None
  moves, ends = index.get_transitions(), set(index.get_final_states())
  names = {index.get_initial_state(), *moves, *ends}
  names = sorted(names, key=lambda name: name != index.get_initial_state())
  number = {name: i for i, name in enumerate(names)}
  table = np.full((len(names), _BYTES), -1, np.int32)
  for name, row in moves.items():
    for byte, after in row.items():
      if byte < _BYTES:  # what follows is the library's own end
        table[number[name], byte] = number[after]
  marked = np.arange(len(names))
  for byte in _MARK.encode():
    marked = np.where(marked >= 0, table[marked, byte], -1)
  accepts = np.array([name in ends for name in names])
  return table, (marked >= 0) & accepts[marked]


def over_tokens(table: np.ndarray, texts: Sequence[bytes]
                ) -> tuple[np.ndarray, np.ndarray]:
  """An automaton over bytes as one over tokens.

  Args:
    table: `[S, 256]`, -1 where there is no next state.
    texts: V tokens; those without bytes are forbidden.

  Returns:
    `[S, K]` int32, the next states by class of token, and `[V]` int32, the
    classes: tokens that do the same in every state share one.
  """
  lengths = np.array([len(text) for text in texts])
  spelled = np.zeros((len(texts), max(1, lengths.max(initial=0))), np.uint8)
  for row, text in zip(spelled, texts):
    row[:len(text)] = np.frombuffer(text, np.uint8)

  def read(state, rows):
    """The state after each of some tokens."""
    found = np.where(lengths[rows] > 0, state, -1).astype(np.int32)
    for place in range(spelled.shape[1]):
      on = np.flatnonzero((found >= 0) & (lengths[rows] > place))
      if not on.size:
        break
      found[on] = table[found[on], spelled[rows[on], place]]
    return found

  classes, every = np.zeros(len(texts), np.int64), np.arange(len(texts))
  for state in range(len(table)):
    found = read(state, every)
    if (found >= 0).any():
      classes = np.unique(classes * (len(table) + 1) + found + 1,
                          return_inverse=True)[1]
  _, first = np.unique(classes, return_index=True)
  columns = np.stack([read(state, first) for state in range(len(table))])
  return columns, classes.astype(np.int32)


def _library():
  try:
    import outlines_core  # an extra  # pylint: disable=g-import-not-at-top
    import outlines_core.json_schema  # pylint: disable=g-import-not-at-top
  except ImportError:
    raise ValueError("regular expressions and JSON schemas need the package "
                     "outlines-core: pip install 'specjax[grammar]'") from None
  return outlines_core


def _short(text):
  return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _line(error):
  return " ".join(str(error).split())
