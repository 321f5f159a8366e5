"""Finite automata over tokens for regular expressions and JSON schemas.

The method follows Willard and Louf 2023 (arXiv:2307.09702). `grammars` compiles
an automaton over bytes. `token_tables` converts it into tables over tokens. The
tables of a schema take a few megabytes on the device. Decoding does not use the
host.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
from typing import Any
from typing import TYPE_CHECKING

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.constraints import fragments
from specjax.constraints import grammars
from specjax.constraints import token_tables
from specjax.decoding import constraining

if TYPE_CHECKING:  # data is a higher layer
  from specjax.data.tokenizers import Tokenizer


@struct.dataclass
class AutomatonMemory:
  """Position of a row in the automaton.

  Attributes:
    state: `[]` int32, current state; -1 after a forbidden token.
    left: `[]` int32, number of tokens that the row may still generate.
    eos: `[E]` int32, eos ids of the row, padded with -1.
  """

  state: jax.Array
  left: jax.Array
  eos: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton(constraining.Constraint):
  """Restricts the output to sequences that the automaton accepts.

  A token is allowed only if an accepting state can still be reached. An eos id
  is allowed only in accepting states. It is the only allowed token if no other
  token can follow. So every row needs an eos.

  With `finish`, a token is allowed only if the remaining tokens of the row
  suffice to reach an accepting state. This changes the distribution of
  sequences close to their limit, also in autoregressive decoding. Without
  `finish`, sequences are cut off at the limit.

  The tables are constants of the compiled program. So every expression compiles
  its own program.

  Attributes:
    tables: transitions between the states. The initial state is 0.
    finish: if True, rows end within their limits.

  Example: tokens 0 and 1 alternate, 0 is first, and eos (token 2) may follow
  any 1.

    >>> import jax
    >>> import specjax as sj
    >>> automaton = sj.constraints.Automaton.of_table(
    ...     [[1, -1, -1], [-1, 2, -1], [1, -1, -1]], final=[2])
    >>> model = sj.testing.MarkovModel(vocab_size=3)
    >>> table = model.init(jax.random.key(0))
    >>> decoder = sj.Decoder(
    ...     target=model, verifier=sj.verifiers.Block(), eos=2,
    ...     drafter=sj.drafters.draft_model(model=model, gamma=3),
    ...     transform=sj.LogitsTransform(constraints=(automaton,)))
    >>> params = {"target": table, "drafter": table}
    >>> texts = decoder.generate(
    ...     params, [[1], [1]], jax.random.key(1), max_new_tokens=4).tokens
    >>> all(row[1:3].tolist() == [0, 1] for row in texts)
    True
  """

  tables: token_tables.TokenTables
  finish: bool = True

  def __post_init__(self) -> None:
    if self.tables.distance[0] == token_tables.NEVER:
      raise ValueError("the automaton accepts no text of these tokens; give "
                       "another expression, or tokens that can spell it")
    content = hashlib.sha256()
    for field in dataclasses.fields(self.tables):
      x = getattr(self.tables, field.name)
      x.flags.writeable = False
      content.update(repr((x.shape, bool(self.finish))).encode())
      content.update(x.tobytes())
    object.__setattr__(self, "_content", content.digest())

  @classmethod
  def of_table(cls, next_state: Any, final: Sequence[int], finish: bool = True
               ) -> "Automaton":
    """Returns an automaton with the transitions of a table.

    Args:
      next_state: `[S, V]`, next state for each of S states and V tokens; -1 for
        a forbidden token.
      final: numbers of the accepting states.
      finish: if True, rows end within their limits.
    """
    table = np.array(next_state, np.int32)
    if table.ndim != 2:
      raise ValueError(f"next_state has shape {table.shape}; it must be [S, V]")
    if not ((-1 <= table) & (table < len(table))).all():
      raise ValueError(f"next_state holds states {table.min()} to "
                       f"{table.max()}; there are {len(table)}, and -1 is "
                       "forbidden")
    return cls(token_tables.of_table(
        table, np.isin(np.arange(len(table)), final)), finish)

  @classmethod
  def from_regex(cls, regex: str, tokenizer: "Tokenizer", *,
                 vocab_size: int | None = None, banned: Sequence[int] = (),
                 finish: bool = True) -> "Automaton":
    """Returns an automaton of the full matches of a regular expression.

    Args:
      regex: expression in the syntax of Python's `re`. An initial ^ and a final
        $ are not needed. Look-around, back-references and word boundaries are
        not supported. $ matches only at the end of the string.
      tokenizer: tokenizer of the target, with `vocab_size` and
        `token_bytes(id)`. Special tokens have no bytes and are forbidden.
      vocab_size: vocabulary size V of the target. None means the size of the
        tokenizer's vocabulary.
      banned: ids that never occur in the output. Include eos ids that have
        bytes. Otherwise the distance to an accepting state, used by `finish`,
        may count such an id as an ordinary token.
      finish: if True, rows end within their limits.

    Raises:
      ValueError: the expression is invalid, needs more than 2**18 states or a
        table of more than 64 MiB, or no tokens can spell a match.
    """
    return cls._of_fragment(grammars.regex_fragment(regex), tokenizer,
                            vocab_size, banned, finish)

  @classmethod
  def _of_fragment(cls, fragment: fragments.Fragment, tokenizer: "Tokenizer",
                   vocab_size: int | None, banned: Sequence[int], finish: bool
                   ) -> "Automaton":
    size = vocab_size or tokenizer.vocab_size
    texts = [tokenizer.token_bytes(i) if i < tokenizer.vocab_size
             and i not in banned else b"" for i in range(size)]
    return cls(token_tables.of_fragment(fragment, texts), finish)

  @classmethod
  def from_json_schema(cls, schema: str | Mapping[str, Any],
                       tokenizer: "Tokenizer", *, vocab_size: int | None = None,
                       banned: Sequence[int] = (), finish: bool = True,
                       whitespace: str | None = None) -> "Automaton":
    """Returns an automaton of JSON that follows a schema (draft 2020-12).

    All accepted JSON is valid. Unsupported keywords and formats raise an error
    that names them. The accepted JSON has this form:

    * `whitespace` separates the parts.
    * The declared properties of an object come first, in the order of the
      schema. Required properties that are not declared follow. Then other
      properties may follow if `additionalProperties` is true or a schema, or if
      no property is declared. Names and values of other properties are free,
      and a name may occur twice.
    * Strings have all values that the schema allows. Each character is written
      as itself or with any of its escapes. A constant is written as by
      `json.dumps`, with or without `ensure_ascii`.
    * An integer has no point and no exponent. A number with bounds has no
      exponent. If it has a point, it has at most 15 digits, or 16 and ".0".
    * A value without keywords has at most four nested levels of arrays and
      objects. A recursive `$ref` is followed six times, or three times if six
      need too many states.
    * A schema with properties but no `type` describes an object. Other keywords
      about one type require `type`.
    * `format` is checked: `date`, `time` and `date-time`
      (RFC 3339, without leap seconds), `email` (RFC 5321), `uri` (RFC 3986),
      `uuid` (RFC 4122).
    * A `pattern` is a search, in the syntax of Python's `re`; see `from_regex`.

    Args:
      schema: schema as a JSON string or as a Python object.
      tokenizer: tokenizer of the target, as in `from_regex`.
      vocab_size: vocabulary size V of the target, as in `from_regex`.
      banned: ids that never occur in the output, as in `from_regex`.
      finish: if True, rows end within their limits.
      whitespace: regular expression for the white space between two parts. None
        allows at most one space.

    Raises:
      ValueError: the schema is not JSON, a part of it is not supported, no
        value is valid, or the automaton needs more than 2**18 states or a table
        of more than 64 MiB.
    """
    return cls._of_fragment(grammars.schema_fragment(schema, whitespace),
                            tokenizer, vocab_size, banned, finish)

  def __eq__(self, other: Any) -> bool:
    return isinstance(other, Automaton) and self._content == other._content

  def __hash__(self) -> int:
    return hash(self._content)

  def __repr__(self) -> str:
    return (f"Automaton({len(self.tables.row)} states, "
            f"{len(self.tables.token_class)} tokens)")

  @property
  def shortest(self) -> int:
    """Number of tokens of the shortest accepted sequence, without eos."""
    return int(self.tables.distance[0])

  def step(self, state: int, token: int) -> int:
    """Returns the state after a token, or -1 if forbidden; runs on the host."""
    if state < 0:
      return -1
    move = self.tables.row_moves(self.tables.row[state])[token]
    return int(self.tables.targets(state, move))

  def accepts(self, tokens: Sequence[int]) -> bool:
    """Returns True if the automaton accepts the tokens; runs on the host."""
    state = 0
    for token in tokens:
      state = self.step(state, token)
    return state >= 0 and bool(self.tables.final[state])

  def check_target(self, vocab_size: int) -> None:
    """Raises `ValueError` unless the vocabulary sizes are equal."""
    size = len(self.tables.token_class)
    if size != vocab_size:
      raise ValueError(
          f"the automaton is over {size} tokens and the target has "
          f"{vocab_size}; give it vocab_size={vocab_size}")

  def check_rows(self, new_tokens: np.ndarray, eos: np.ndarray) -> None:
    """Raises `ValueError` if a row has no eos or too small a limit."""
    for row in np.flatnonzero(new_tokens > 0):
      if (eos[row] < 0).all():
        raise ValueError(f"prompt {row} has no eos, and the output of an "
                         "automaton must end with one; give eos=")
      if self.finish and new_tokens[row] < self.shortest:
        raise ValueError(
            f"prompt {row} may get {new_tokens[row]} tokens and the shortest "
            f"text that the automaton accepts has {self.shortest}; allow more, "
            "or create the automaton with finish=False")

  def init(self, row: constraining.Row) -> AutomatonMemory:
    """Returns the memory of a row before its first new token, in state 0."""
    return AutomatonMemory(state=jnp.zeros_like(row.length),
                           left=row.limit - row.length, eos=row.eos)

  def advance(self, memory: AutomatonMemory, token: jax.Array
              ) -> AutomatonMemory:
    """Returns the memory after a token: its next state, `left` less 1."""
    tables, state = self.tables, jnp.maximum(memory.state, 0)
    row = jnp.asarray(tables.row)[state]
    move = _row(tables.moves, row)[
        jnp.asarray(tables.token_class).at[token].get(mode="clip")]
    if tables.window:
      tokens, moves = self._listed(row)
      move = jnp.maximum(move, jnp.max(jnp.where(
          tokens == token, moves, token_tables.FORBIDDEN)))
    known = (memory.state >= 0) & (token < len(tables.token_class))
    after = self._target(state, move)
    return memory.replace(state=jnp.where(known, after, -1),
                          left=memory.left - 1)

  def apply(self, memory: AutomatonMemory, logits: jax.Array) -> jax.Array:
    """Sets the logits of forbidden tokens to -inf.

    All tokens are allowed if the state is -1 or would forbid all of them.
    """
    tables, state = self.tables, jnp.maximum(memory.state, 0)
    row, size = jnp.asarray(tables.row)[state], logits.shape[0]
    final = jnp.asarray(tables.final)[state]
    distance = lambda moves: jnp.where(
        moves == token_tables.FORBIDDEN, token_tables.NEVER,
        jnp.asarray(tables.distance)[self._target(state, moves)])
    found = [distance(_row(tables.moves, row))]  # by class of token
    if tables.window:
      listed, moves = self._listed(row)
      found.append(distance(moves))
    allowed = [x < token_tables.NEVER for x in found]
    if self.finish:
      in_time = [x < jnp.minimum(memory.left, token_tables.NEVER)
                 for x in found]
      # Drafts may have tokens beyond the limit of the row. After such a token,
      # no next token is in time, so the limit is ignored.
      strict = final | jnp.any(jnp.concatenate(in_time))
      allowed = [jnp.where(strict, x, y) for x, y in zip(in_time, allowed)]
    tokens = allowed[0][jnp.asarray(tables.token_class)]
    if tables.window:
      tokens = tokens.at[jnp.where(allowed[1], listed, size)].set(
          True, mode="drop")
    ends = jnp.where(memory.eos < 0, size, memory.eos)
    tokens = tokens.at[ends].set(final, mode="drop")
    anything = (memory.state < 0) | ~tokens.any()
    return jnp.where(tokens | anything, logits, -jnp.inf)

  def _listed(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens that a row lists and their moves, both `[W]`.

    `TokenTables` defines rows, moves and the length W of the longest list.
    """
    tables = self.tables
    start, end = (jnp.asarray(tables.starts)[row + i] for i in (0, 1))
    places = start + jnp.arange(tables.window, dtype=jnp.int32)
    moves = jnp.asarray(tables.listed_moves)[places]
    return jnp.asarray(tables.listed)[places], jnp.where(
        places < end, moves, token_tables.FORBIDDEN)

  def _target(self, state: jax.Array, moves: jax.Array) -> jax.Array:
    """Returns the state after each move, or -1 for a forbidden move.

    `TokenTables` defines moves and the anchors that they are relative to.
    """
    anchors = jnp.asarray(self.tables.anchors)[state]
    depth = anchors.shape[0]
    place = moves // depth + anchors[moves % depth]
    return jnp.where(moves == token_tables.FORBIDDEN, -1, place)


def _row(moves: np.ndarray, row: jax.Array) -> jax.Array:
  """Returns the moves of a row by token class.

  A row with a list instead of columns gets the last row of `moves`. That row
  forbids all tokens.
  """
  return jnp.asarray(moves)[jnp.minimum(row, len(moves) - 1)]
