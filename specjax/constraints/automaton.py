"""A finite automaton over tokens: a regular expression, or a JSON schema.

Willard and Louf 2023 (arXiv:2307.09702). `grammars` compiles an automaton over
bytes and `token_tables` reads the tokens of a vocabulary through it, so that a
round needs no host: the tables of a schema take a few megabytes on the device.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.constraints import fragments
from specjax.constraints import grammars
from specjax.constraints import token_tables
from specjax.decoding import constraining


@struct.dataclass
class AutomatonMemory:
  """Where a row is.

  Attributes:
    state: `[]` int32; -1 after a token that was forbidden.
    left: `[]` int32, tokens that the row may still get.
    eos: `[E]` int32, the row's, filled up with -1.
  """

  state: jax.Array
  left: jax.Array
  eos: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton(constraining.Constraint):
  """The output is a text that the automaton accepts.

  Only tokens that lead on to an accepting state are allowed. An end of the
  row, one of its eos ids, is allowed in accepting states alone, and it is the
  only choice where nothing can follow. So every row needs an eos. Transitions
  to states that cannot reach an accepting one are removed.

  A row is accepted within its limit too: with `finish`, a token is allowed
  only if the tokens that are left then suffice to come to an end. This changes
  the law of texts that come near the limit, for autoregressive decoding as
  well; without it they are cut off anywhere.

  Its tables are constants of the program, found by their content: another
  expression is another program.

  Attributes:
    tables: the moves between its states; state 0 is where an output begins.
    finish: whether rows come to an end within their limits.

  Example: tokens 0 and 1 in turn, 0 first, and after any 1 the end, token 2.

    >>> import jax
    >>> import specjax as sj
    >>> automaton = sj.constraints.Automaton.of_table(
    ...     [[1, -1, -1], [-1, 2, -1], [1, -1, -1]], final=[2])
    >>> model = sj.testing.MarkovModel(vocab_size=3)
    >>> table = model.init(jax.random.key(0))
    >>> decoder = sj.Decoder(
    ...     target=model, verifier=sj.verifiers.Block(), eos=2,
    ...     drafter=sj.drafters.DraftModel(model=model, gamma=3),
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
    """An automaton of a table over all tokens.

    Args:
      next_state: `[S, V]`, -1 where a token is forbidden.
      final: the accepting states.
      finish: see the class.
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
  def from_regex(cls, regex: str, tokenizer: Any, *,
                 vocab_size: int | None = None, banned: Sequence[int] = (),
                 finish: bool = True) -> "Automaton":
    """An automaton of the texts that an expression matches as a whole.

    Args:
      regex: the expression, in the syntax of Python's `re`. A final $ and an
        initial ^ are not needed. Look-around, back-references and word
        boundaries are refused, and $ matches at the end alone.
      tokenizer: the target's tokenizer, with `vocab_size` and
        `token_bytes(id)`. Tokens without bytes, the special ones, are
        forbidden.
      vocab_size: the target's V, where it has more ids than the tokenizer.
      banned: ids that the text never has. Name those here that end a row and
        have bytes, or `finish` may count on one of them.
      finish: see the class.

    Raises:
      ValueError: the expression is wrong, needs more than 2**18 states or a
        table of more than 64 MiB, or no tokens can spell a match.
    """
    return cls._of_fragment(grammars.regex_fragment(regex), tokenizer,
                            vocab_size, banned, finish)

  @classmethod
  def _of_fragment(cls, fragment: fragments.Fragment, tokenizer: Any,
                   vocab_size: int | None, banned: Sequence[int], finish: bool
                   ) -> "Automaton":
    size = vocab_size or tokenizer.vocab_size
    texts = [tokenizer.token_bytes(i) if i < tokenizer.vocab_size
             and i not in banned else b"" for i in range(size)]
    return cls(token_tables.of_fragment(fragment, texts), finish)

  @classmethod
  def from_json_schema(cls, schema: str | Mapping[str, Any], tokenizer: Any, *,
                       vocab_size: int | None = None,
                       banned: Sequence[int] = (), finish: bool = True,
                       whitespace: str | None = None) -> "Automaton":
    """An automaton of JSON texts that follow a schema (draft 2020-12).

    Every text that it accepts is valid. A schema with a keyword or a format
    that it would not follow is refused by its name. Of the valid texts it
    writes those of this form:

    * Between two parts there is `whitespace`.
    * The declared properties of an object come in the order of the schema, then
      required ones that are not declared. Others follow them if
      `additionalProperties` is given as true or a schema, or if no property is
      declared. Their names and values are free, and a name may come twice.
    * Strings have all values that the schema allows, and a character is written
      as itself or with any of its escapes. A constant is written as by
      `json.dumps`, with or without `ensure_ascii`.
    * An integer has no point and no exponent. A number with bounds has no
      exponent. With a point it has at most 15 digits, or 16 and ".0".
    * A value without keywords holds at most four levels of arrays and objects.
      A `$ref` within itself is followed six times, or three times if six need
      too many states.
    * What has properties but no `type` is an object. Other keywords about one
      type require `type`.
    * `format` is checked as a validator does it: `date`, `time` and `date-time`
      (RFC 3339, without leap seconds), `email` (RFC 5321), `uri` (RFC 3986),
      `uuid` (RFC 4122).
    * A `pattern` is a search, in the syntax of Python's `re`; see `from_regex`.

    Args:
      schema: JSON, or the same as an object.
      tokenizer: see `from_regex`.
      vocab_size: see `from_regex`.
      banned: see `from_regex`.
      finish: see the class.
      whitespace: an expression for the space between two parts; None: one space
        or none.

    Raises:
      ValueError: the schema is not JSON, a part of it would not be followed, no
        value follows it, or it needs more than 2**18 states or a table of more
        than 64 MiB.
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
    """Tokens of the shortest text that is accepted, without an end."""
    return int(self.tables.distance[0])

  def step(self, state: int, token: int) -> int:
    """Returns the state after a token, -1 if it is forbidden; on the host."""
    if state < 0:
      return -1
    move = self.tables.row_moves(self.tables.row[state])[token]
    return int(self.tables.targets(state, move))

  def accepts(self, tokens: Sequence[int]) -> bool:
    """Returns whether the tokens are a text that is accepted; on the host."""
    state = 0
    for token in tokens:
      state = self.step(state, token)
    return state >= 0 and bool(self.tables.final[state])

  def check_target(self, vocab_size: int) -> None:
    """Raises a `ValueError` where it is over other tokens."""
    size = len(self.tables.token_class)
    if size != vocab_size:
      raise ValueError(
          f"the automaton is over {size} tokens and the target has "
          f"{vocab_size}; give it vocab_size={vocab_size}")

  def check_rows(self, new_tokens: np.ndarray, eos: np.ndarray) -> None:
    """Raises a `ValueError` where a row has no end, or no room for a text."""
    for row in np.flatnonzero(new_tokens > 0):
      if (eos[row] < 0).all():
        raise ValueError(f"prompt {row} has no eos, by which a text that an "
                         "automaton accepts ends; give eos=")
      if self.finish and new_tokens[row] < self.shortest:
        raise ValueError(
            f"prompt {row} may get {new_tokens[row]} tokens and the shortest "
            f"text that the automaton accepts has {self.shortest}; allow more, "
            "or make it with finish=False")

  def init(self, row: constraining.Row) -> AutomatonMemory:
    """At the beginning, with all tokens left."""
    return AutomatonMemory(state=jnp.zeros_like(row.length),
                           left=row.limit - row.length, eos=row.eos)

  def advance(self, memory: AutomatonMemory, token: jax.Array
              ) -> AutomatonMemory:
    """The state after a token."""
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
    """-inf for all that leads to no text, and for an early end."""
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
      # Beyond its limit a row is only drafted.
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
    """The tokens of a row that is a list, and their moves, `[W]`."""
    tables = self.tables
    start, end = (jnp.asarray(tables.starts)[row + i] for i in (0, 1))
    places = start + jnp.arange(tables.window, dtype=jnp.int32)
    moves = jnp.asarray(tables.listed_moves)[places]
    return jnp.asarray(tables.listed)[places], jnp.where(
        places < end, moves, token_tables.FORBIDDEN)

  def _target(self, state: jax.Array, moves: jax.Array) -> jax.Array:
    """The states after moves, anything where one is forbidden."""
    anchors = jnp.asarray(self.tables.anchors)[state]
    depth = anchors.shape[0]
    place = moves // depth + anchors[moves % depth]
    return jnp.where(moves == token_tables.FORBIDDEN, -1, place)


def _row(moves: np.ndarray, row: jax.Array) -> jax.Array:
  """The moves of a row by class of token; of a list, the last row."""
  return jnp.asarray(moves)[jnp.minimum(row, len(moves) - 1)]
