"""Constraints on the generated tokens, and their memory in a round.

A constraint changes the logits of the next token. The *memory* of a constraint
is its state after a sequence, for example the state of an automaton. The
functions compute memories at these times (a row is one sequence of the batch):

  start       after the prompt             one memory per row
  along       along the draft              one memory per node, for the target
  steered     along a growing tree         one per node, in a drafter step
  committed   after the round              one memory per row

A constraint is written for one row. This module maps it over rows and nodes. A
memory depends only on the sequence of its row. So after every node the target
has the distribution of constrained autoregressive decoding, and every exact
verification rule remains exact. Without constraints, no operation is added to a
program.

Constraints apply in order, after the banned tokens of the logits transform. For
the target, the first constraint always applies. A later constraint is ignored
for one token if it would allow no token there. So if two constraints contradict
each other, the earlier one applies. For a drafter, any constraint may be
ignored in this way, because its model may assign no mass to the allowed tokens.
Such drafts are rejected.
"""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces import checks
from specjax.types import Draft
from specjax.types import Verdict
from specjax.utils import fields


class Row(NamedTuple):
  """One row after its prompt.

  Attributes:
    tokens: `[C]` int32, the prompt. Slots from `length` on are undefined.
    length: `[]` int32, number of tokens of the prompt.
    limit: `[]` int32, length at which the row is done.
    eos: `[E]` int32, end tokens, padded with -1.
    vocab_size: V, size of the vocabulary.
  """

  tokens: jax.Array
  length: jax.Array
  limit: jax.Array
  eos: jax.Array
  vocab_size: int


class Constraint:
  """A change of the logits of the next token, given the row's sequence.

  A constraint contains only static configuration and is hashable. A subclass
  implements `init`, `advance` and `apply` for one row.

  Attributes:
    must_come: token ids that the constraint puts into every sequence. They must
      not be banned.
  """

  must_come: tuple[int, ...] = ()

  def init(self, row: Row) -> Any:
    """Returns the constraint's memory after the prompt.

    The memory is a tree of arrays. A constraint without memory returns None.
    """
    raise NotImplementedError

  def advance(self, memory: chex.ArrayTree, token: jax.Array) -> Any:
    """Returns the memory after one more token `[]`.

    The result has the shapes and dtypes of `memory`. Drafts may contain
    forbidden tokens and ids outside the vocabulary. `apply` must also accept
    the memory after such a token.
    """
    raise NotImplementedError

  def apply(self, memory: chex.ArrayTree, logits: jax.Array) -> jax.Array:
    """Returns the changed logits `[V]` of the next token; -inf forbids a token.

    After a forbidden token, the constraint must allow at least one token.
    """
    raise NotImplementedError

  def check_target(self, vocab_size: int) -> None:
    """Raises `ValueError` unless the constraint fits the vocabulary."""
    del vocab_size

  def check_rows(self, new_tokens: np.ndarray, eos: np.ndarray) -> None:
    """Raises `ValueError` if a row cannot fulfil the constraint.

    Args:
      new_tokens: `[B]`, maximum number of new tokens of each row.
      eos: `[B, E]`, end tokens, padded with -1.
    """
    del new_tokens, eos


Constraints = tuple[Constraint, ...]


@dataclasses.dataclass(frozen=True)
class Without(Constraint):
  """The banned tokens of a `LogitsTransform`, as a constraint.

  Attributes:
    tokens: ids that are never drawn.
  """

  tokens: tuple[int, ...]

  def init(self, row: Row) -> None:
    """Returns None, because bans do not depend on the sequence."""
    del row

  def advance(self, memory: None, token: jax.Array) -> None:
    """Returns None, because bans do not depend on the sequence."""
    del memory, token

  def apply(self, memory: None, logits: jax.Array) -> jax.Array:
    """Sets the logits of the banned tokens to -inf."""
    del memory
    return logits.at[jnp.array(self.tokens)].set(-jnp.inf)


def after_ban(constraints: Constraints, banned: tuple[int, ...]) -> Constraints:
  """Returns the constraints with the bans of the transform before them.

  A constraint such as an automaton selects among the tokens that earlier
  constraints allow, so it needs to know the bans. If there are no constraints,
  the result is empty.
  """
  return (Without(banned), *constraints) if constraints and banned else (
      constraints)


def check_target(constraints: Constraints, vocab_size: int,
                 banned: tuple[int, ...] = ()) -> None:
  """Checks constraints against a target, before anything is compiled.

  Args:
    constraints: constraints in order.
    vocab_size: V, size of the vocabulary.
    banned: ids that are never drawn.

  Raises:
    ValueError: a constraint is not a `Constraint`, cannot be hashed, does not
      fit the vocabulary, or requires a banned token (`Constraint.must_come`).
  """
  for one in constraints:
    name = type(one).__name__
    if isinstance(one, type) or not isinstance(one, Constraint):
      raise ValueError(f"the constraint {one!r} is not an object of a subclass "
                       "of specjax.constraints.Constraint")
    fields.check_hashable("constraint", one)
    one.check_target(vocab_size)
    for token in one.must_come:
      if token in banned:
        raise ValueError(f"token {token} must come by {name} and is banned; "
                         "remove the ban or the constraint")


def check_rows(constraints: Constraints, new_tokens: np.ndarray,
               eos: np.ndarray) -> None:
  """Checks on the host that all rows of a batch can fulfil the constraints.

  Args:
    constraints: constraints of the decoder.
    new_tokens: `[B]`, maximum number of new tokens of each row.
    eos: `[B, E]`, end tokens, padded with -1.

  Raises:
    ValueError: a row cannot fulfil a constraint.
  """
  for one in constraints:
    one.check_rows(new_tokens, eos)


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
  """Raises `ValueError` unless all ids are in the vocabulary."""
  for token in ids:
    if not (fields.is_whole(token) and 0 <= token < vocab_size):
      raise ValueError(f"{name} holds token {token}; it must be a token id in "
                       f"[0, {vocab_size})")


def start(constraints: Constraints, tokens: jax.Array, lengths: jax.Array,
          limits: jax.Array, eos: jax.Array, vocab_size: int) -> Any:
  """Returns the memories of B rows after their prompts, or None.

  Args:
    constraints: constraints in order.
    tokens: `[B, C]`, prompts.
    lengths: `[B]`, number of tokens of each prompt.
    limits: `[B]`, lengths at which rows are done.
    eos: `[B, E]`, end tokens, padded with -1.
    vocab_size: V, size of the vocabulary.
  """
  if not constraints:
    return None
  return jax.vmap(lambda *row: tuple(
      one.init(Row(*row, vocab_size)) for one in constraints))(
          tokens, lengths, limits, eos)


def constrained(constraints: Constraints, memory: chex.ArrayTree,
                logits: jax.Array, drafted: bool = False) -> jax.Array:
  """Applies the constraints to `logits [..., V]`, in order.

  Args:
    constraints: constraints in order.
    memory: memories of all constraints. The first axes of every leaf are those
      of the logits without V.
    logits: logits of a model.
    drafted: True for logits of a drafter's model, for which any constraint may
      be ignored.
  """
  if not constraints:
    return logits

  def apply(memory, logits):
    is_first = not drafted
    for one, own in zip(constraints, memory):
      new = one.apply(own, logits)
      # The comparison is False for NaN, so the loop can report NaN logits.
      if not is_first:
        new = jnp.where(jnp.max(new) == -jnp.inf, logits, new)
      is_first = is_first and isinstance(one, Without)
      logits = new
    return logits

  return _mapped(apply, logits.ndim - 1)(memory, logits)


def read(constraints: Constraints, memory: chex.ArrayTree, logits: jax.Array,
         drafted: bool = False) -> tuple[jax.Array, jax.Array | None]:
  """Applies `constrained` to the target's logits at the nodes of a draft.

  A node after which no token is allowed is not an error, because decoding may
  never reach it: it may be rejected, or follow the limit or an end token. Its
  logits are replaced by those of a uniform distribution, which keeps every
  exact rule exact. The decoding loop reports a failure only if the sequence
  needs a token after such a node.

  Args:
    constraints: constraints in order.
    memory: result of `along`. Its leaves are `[B, N, ...]` for N nodes.
    logits: `[B, N, V]` logits after each node.
    drafted: True for logits of a drafter's model.

  Returns:
    The logits, and `[B, N]` bool, True for nodes after which no token is
    allowed. Without constraints, the second value is None.
  """
  if not constraints:
    return logits, None
  logits = constrained(constraints, memory, logits, drafted)
  stuck = jnp.max(logits, axis=-1) == -jnp.inf
  return jnp.where(stuck[..., None], 0, logits), stuck


def advanced(constraints: Constraints, memory: chex.ArrayTree, tokens: jax.Array
             ) -> Any:
  """Returns the memories after one more token in each sequence.

  Args:
    constraints: constraints in order.
    memory: memories. The first axes of every leaf are those of `tokens`.
    tokens: `[...]`, one token for each memory.
  """
  if not constraints:
    return None
  return _mapped(lambda memory, token: _advance(constraints, memory, token),
                 tokens.ndim)(memory, tokens)


def along(constraints: Constraints, memory: chex.ArrayTree, draft: Draft
          ) -> Any:
  """Returns the memories `[B, N, ...]` after every node of the drafts.

  The memory of a node is the memory of its parent, advanced by the node's
  token.

  Args:
    constraints: constraints in order.
    memory: memories `[B, ...]` of the rows after the root.
    draft: B drafts of N nodes.
  """
  if not constraints:
    return None

  def one(memory, draft):
    nodes = draft.tokens.shape[0]

    def visit(node, found):
      above = jax.tree.map(lambda x: x[draft.parents[node]], found)
      new = _advance(constraints, above, draft.tokens[node])
      return jax.tree.map(lambda x, own: x.at[node].set(own), found, new)

    return jax.lax.fori_loop(1, nodes, visit, jax.tree.map(
        lambda x: jnp.broadcast_to(x, (nodes, *x.shape)), memory))

  return jax.vmap(one)(memory, draft)


def committed(constraints: Constraints, memory: chex.ArrayTree, nodes: Any,
              verdict: Verdict, tokens: jax.Array, count: jax.Array) -> Any:
  """Returns the memories `[B, ...]` after a round.

  Args:
    constraints: constraints in order.
    memory: memories `[B, ...]` of the rows before the round.
    nodes: memories `[B, N, ...]` of the nodes, result of `along`.
    verdict: verdicts of the rows.
    tokens: `[B, N]`, tokens of the round in order. Row b emits the first
      `count[b]`.
    count: `[B]`, number of emitted tokens.
  """
  if not constraints:
    return None

  def one(old, nodes, path, tokens, count):
    # The last emitted token is tokens[last]. Its parent is node path[last].
    last = jnp.maximum(count - 1, 0)
    above = jax.tree.map(lambda x: x[path[last]], nodes)
    new = _advance(constraints, above, tokens[last])
    return jax.tree.map(lambda x, y: jnp.where(count > 0, x, y), new, old)

  return jax.vmap(one)(memory, nodes, verdict.path, tokens, count)


def steered(constraints: Constraints, memory: chex.ArrayTree,
            step: Callable[..., Any], carry: chex.ArrayTree, logits: jax.Array
            ) -> tuple[Callable[..., Any], Any, jax.Array]:
  """Applies the constraints to a drafter that grows a tree level by level.

  Args:
    constraints: constraints in order.
    memory: memories `[B, ...]` of the rows after the root.
    step: function that adds a level to the tree, see `methods._trees`.
    carry: carry of the step.
    logits: `[B, V]`, logits of the token after the root.

  Returns:
    The step with constraints, its carry (the pair of `carry` and memories), and
    the constrained logits of the token after the root.
  """
  def constrained_step(tokens, depths, ancestors, above, carry):
    carry, memory = carry
    logits, carry = step(tokens, depths, ancestors, above, carry)
    parents = jax.tree.map(
        lambda x: jax.vmap(lambda row, at: row[at])(x, above), memory)
    memory = advanced(constraints, parents, tokens)
    if constraints:  # nodes that share their logits may differ in memory
      logits = jnp.broadcast_to(logits, (*tokens.shape, logits.shape[-1]))
    return constrained(constraints, memory, logits, drafted=True), (
        carry, memory)

  root = jax.tree.map(lambda x: x[:, None], memory) if constraints else None
  return constrained_step, (carry, root), constrained(
      constraints, memory, logits, drafted=True)


def _advance(constraints: Constraints, memory: chex.ArrayTree, token: jax.Array
             ) -> tuple[Any, ...]:
  """Returns the memory of one row after a token `[]`."""
  new = []
  for one, own in zip(constraints, memory):
    new.append(one.advance(own, token))
    checks.check_same(
        f"the memory that {type(one).__name__}.advance returned", new[-1], own)
  return tuple(new)


def _mapped(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
  for _ in range(axes):
    function = jax.vmap(function)
  return function
