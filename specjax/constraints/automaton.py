"""A finite automaton over tokens: a regular expression, or a JSON schema.

Willard and Louf 2023 (arXiv:2307.09702). Most tokens do the same everywhere,
so the table has a column for each *class* of tokens with equal columns: a
schema over a vocabulary of 49k tokens takes some hundred kilobytes.
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

from specjax.constraints import base
from specjax.constraints import grammars

_NEVER = 2**30  # tokens to an end that cannot be reached


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
class Automaton:
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
    next_state: `[S, K]` int32, by class of token; -1 is forbidden. State 0 is
      where an output begins.
    token_class: `[V]` int32, of every token.
    final: `[S]` bool, the accepting states.
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
    ...     drafter=sj.drafters.LanguageModel(model=model, gamma=3),
    ...     transform=sj.LogitsTransform(constraints=(automaton,)))
    >>> params = {"target": table, "drafter": table}
    >>> texts = decoder.generate(
    ...     params, [[1], [1]], jax.random.key(1), max_new_tokens=4).tokens
    >>> all(row[1:3].tolist() == [0, 1] for row in texts)
    True
  """

  next_state: np.ndarray
  token_class: np.ndarray
  final: np.ndarray
  finish: bool = True

  def __post_init__(self):
    table = np.array(self.next_state, np.int32)
    classes = np.array(self.token_class, np.int32)
    final = np.array(self.final, bool)
    if table.ndim != 2 or final.shape != table.shape[:1] or classes.ndim != 1:
      raise ValueError(
          f"next_state has shape {table.shape}, final {final.shape} and "
          f"token_class {classes.shape}; they must be [S, K], [S] and [V]")
    if not ((-1 <= table) & (table < len(table))).all():
      raise ValueError(f"next_state holds states {table.min()} to "
                       f"{table.max()}; there are {len(table)}, and -1 is "
                       "forbidden")
    if not ((0 <= classes) & (classes < table.shape[1])).all():
      raise ValueError(f"token_class holds classes {classes.min()} to "
                       f"{classes.max()}; there are {table.shape[1]}")
    distance = _distances(table, final)
    if distance[0] == _NEVER:
      raise ValueError("the automaton accepts no text of these tokens; give "
                       "another expression, or tokens that can spell it")
    table[(table >= 0) & (distance[table] == _NEVER)] = -1
    content = hashlib.sha256(repr(
        (table.shape, classes.shape, bool(self.finish))).encode())
    for name, x in (("next_state", table), ("token_class", classes),
                    ("final", final), ("_distance", distance)):
      x.flags.writeable = False
      content.update(x.tobytes())
      object.__setattr__(self, name, x)
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
    columns, classes = np.unique(
        np.array(next_state, np.int32), axis=1, return_inverse=True)
    return cls(next_state=columns, token_class=classes.reshape(-1),
               final=np.isin(np.arange(len(columns)), final), finish=finish)

  @classmethod
  def from_regex(cls, regex: str, tokenizer: Any, *,
                 vocab_size: int | None = None, banned: Sequence[int] = (),
                 finish: bool = True) -> "Automaton":
    """An automaton of the texts that an expression matches as a whole.

    Args:
      regex: in the syntax of the Rust crate `regex`, over Unicode; ^ before it
        and $ after it are not needed.
      tokenizer: with `vocab_size` and `token_bytes(id)`, the target's. Tokens
        without bytes, the special ones, are forbidden.
      vocab_size: the target's V, where it has more ids than the tokenizer.
      banned: ids that the text never has. Name those here that end a row and
        have bytes, or `finish` may count on one of them.
      finish: see the class.

    Raises:
      ValueError: the expression is wrong, no tokens can spell a match, or
        `pip install 'specjax[grammar]'` is missing.
    """
    size = vocab_size or tokenizer.vocab_size
    texts = [tokenizer.token_bytes(i) if i < tokenizer.vocab_size
             and i not in banned else b"" for i in range(size)]
    table, final = grammars.bytes_automaton(regex)
    columns, classes = grammars.over_tokens(table, texts)
    return cls(next_state=columns, token_class=classes, final=final,
               finish=finish)

  @classmethod
  def from_json_schema(cls, schema: str | Mapping[str, Any], tokenizer: Any, *,
                       whitespace: str | None = None, **kwargs: Any
                       ) -> "Automaton":
    """An automaton of the JSON texts that follow a schema.

    Args:
      schema: JSON, or what it stands for. Types, properties, items, lengths,
        patterns, formats, constants, choices and local references are followed;
        what no regular expression follows, such as a minimum, is refused by its
        name. The texts may be fewer than the schema allows: the properties of
        an object come in their order, without others, parts that hold
        themselves are three deep, and values of any kind two. `oneOf` is read
        as `anyOf`.
      tokenizer: see `from_regex`.
      whitespace: an expression for the space between two parts; None: one
        space or none.
      **kwargs: of `from_regex`.

    Raises:
      ValueError: the schema is no JSON, no regular expression stands for it or
        for a part of it, or `pip install 'specjax[grammar]'` is missing.
    """
    return cls.from_regex(
        grammars.schema_regex(schema, whitespace), tokenizer, **kwargs)

  def __eq__(self, other: Any) -> bool:
    return isinstance(other, Automaton) and self._content == other._content

  def __hash__(self) -> int:
    return hash(self._content)

  def __repr__(self) -> str:
    return (f"Automaton({len(self.final)} states, {self.next_state.shape[1]} "
            f"classes of {len(self.token_class)} tokens)")

  @property
  def shortest(self) -> int:
    """Tokens of the shortest text that is accepted, without an end."""
    return int(self._distance[0])

  def check_target(self, vocab_size: int) -> None:
    """Raises a `ValueError` where it is over other tokens."""
    if len(self.token_class) != vocab_size:
      raise ValueError(
          f"the automaton is over {len(self.token_class)} tokens and the "
          f"target has {vocab_size}; give it vocab_size={vocab_size}")

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

  def init(self, row: base.Row) -> AutomatonMemory:
    """At the beginning, with all tokens left."""
    return AutomatonMemory(state=jnp.zeros_like(row.length),
                           left=row.limit - row.length, eos=row.eos)

  def advance(self, memory: AutomatonMemory, token: jax.Array
              ) -> AutomatonMemory:
    """The state after a token."""
    classes = jnp.asarray(self.token_class).at[token].get(mode="clip")
    known = (memory.state >= 0) & (token < len(self.token_class))
    found = jnp.asarray(self.next_state)[jnp.maximum(memory.state, 0), classes]
    return memory.replace(state=jnp.where(known, found, -1),
                          left=memory.left - 1)

  def apply(self, memory: AutomatonMemory, logits: jax.Array) -> jax.Array:
    """-inf for all that leads to no text, and for an end before its time."""
    state = jnp.maximum(memory.state, 0)
    found = jnp.asarray(self.next_state)[state]
    final = jnp.asarray(self.final)[state]
    allowed = found >= 0
    if self.finish:
      in_time = allowed & (jnp.asarray(self._distance)[found] < memory.left)
      # Beyond its limit a row is only drafted.
      allowed = jnp.where(final | in_time.any(), in_time, allowed)
    size = logits.shape[0]
    ends = jnp.where(memory.eos < 0, size, memory.eos)
    allowed = allowed[jnp.asarray(self.token_class)]
    allowed = allowed.at[ends].set(final, mode="drop")
    anything = (memory.state < 0) | ~allowed.any()
    return jnp.where(allowed | anything, logits, -jnp.inf)


def _distances(table, final):
  """`[S]` int32, the fewest tokens from each state to an accepting one."""
  distance = np.where(final, 0, _NEVER).astype(np.int32)
  while True:
    below = np.where(table >= 0, distance[table], _NEVER)
    new = np.minimum(distance, below.min(axis=1, initial=_NEVER) + 1)
    new = np.minimum(new, _NEVER)
    if (new == distance).all():
      return distance
    distance = new
