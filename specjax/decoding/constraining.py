"""Constraints on the generated tokens, and their memory in a round.

A constraint changes the logits of the next token. Its *memory* is its state
after a sequence, for example the state of an automaton. The functions compute
memories at these times (a row is one sequence of the batch):

  start       after the prompt             one memory per row
  along       along the draft              one memory per node, for the target
  steered     along a growing tree         one per node, in a drafter step
  committed   after the round              one memory per row

A constraint is written for one row; this module maps it over rows and nodes.
A memory depends on the row's sequence only. So the target's distribution after
a node is that of autoregressive decoding, and every exact verification rule
remains exact. Without constraints, no operation is added to a program.

Constraints apply in order, after the banned tokens of the logits transform.
The first constraint always applies to the target. A later constraint is ignored
for a token if no token would remain, so of two contradictory constraints the
earlier one applies. For a drafter, any constraint may be ignored, because its
model may assign no mass to the allowed tokens; such drafts are rejected.
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
    tokens: `[C]` int32, the prompt; slots from `length` on are scratch.
    length: `[]` int32, tokens of the prompt.
    limit: `[]` int32, length at which the row is done.
    eos: `[E]` int32, end tokens, padded with -1.
    vocab_size: number of tokens V of the vocabulary.
  """

  tokens: jax.Array
  length: jax.Array
  limit: jax.Array
  eos: jax.Array
  vocab_size: int


class Constraint:
  """Changes the logits of the next token, given the row's sequence.

  A constraint is a hashable object of static configuration, written for one
  row. A subclass implements `init`, `advance` and `apply`.

  Attributes:
    must_come: ids that every sequence will contain; they must not be banned.
  """

  must_come: tuple[int, ...] = ()

  def init(self, row: Row) -> Any:
    """Returns the constraint's memory after the prompt.

    It is a tree of arrays, or None for a constraint without memory.
    """
    raise NotImplementedError

  def advance(self, memory: chex.ArrayTree, token: jax.Array) -> Any:
    """Returns the memory after a token `[]`, of the same shapes and dtypes.

    Drafts contain forbidden tokens, and ids outside the vocabulary. `apply`
    must accept the memory after these as well.
    """
    raise NotImplementedError

  def apply(self, memory: chex.ArrayTree, logits: jax.Array) -> jax.Array:
    """Returns the logits `[V]` of the next token; -inf forbids a token.

    After a forbidden token at least one token must be allowed.
    """
    raise NotImplementedError

  def check_target(self, vocab_size: int) -> None:
    """Raises `ValueError` unless the constraint fits the vocabulary."""
    del vocab_size

  def check_rows(self, new_tokens: np.ndarray, eos: np.ndarray) -> None:
    """Raises `ValueError` if a row cannot fulfil the constraint.

    Args:
      new_tokens: `[B]`, number of tokens that each row may get.
      eos: `[B, E]`, end tokens, filled up with -1.
    """
    del new_tokens, eos


Constraints = tuple[Constraint, ...]


@dataclasses.dataclass(frozen=True)
class Without(Constraint):
  """Banned tokens of a `LogitsTransform`, as the first constraint.

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
  """Puts the bans of the transform before the constraints.

  A constraint such as an automaton chooses among the tokens that earlier ones
  allow, so it must know the bans.
  """
  return (Without(banned), *constraints) if constraints and banned else (
      constraints)


def check_target(constraints: Constraints, vocab_size: int,
                 banned: tuple[int, ...] = ()) -> None:
  """Checks constraints against a target, before anything is compiled.

  Args:
    constraints: constraints in order.
    vocab_size: number of tokens V of the vocabulary.
    banned: ids that are never drawn, see `Constraint.must_come`.

  Raises:
    ValueError: a constraint is not a `Constraint`, cannot be hashed, does not
      fit the vocabulary, or needs a banned token.
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
                         "take it out of one of the two")


def check_rows(constraints: Constraints, new_tokens: np.ndarray,
               eos: np.ndarray) -> None:
  """Checks a batch against constraints, on the host.

  Args:
    constraints: constraints of the decoder.
    new_tokens: `[B]`, number of tokens that each row may get.
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
    lengths: `[B]`, tokens of the prompts.
    limits: `[B]`, lengths at which rows are done.
    eos: `[B, E]`, end tokens, padded with -1.
    vocab_size: number of tokens V of the vocabulary.
  """
  if not constraints:
    return None
  return jax.vmap(lambda *row: tuple(
      one.init(Row(*row, vocab_size)) for one in constraints))(
          tokens, lengths, limits, eos)


def constrained(constraints: Constraints, memory: chex.ArrayTree,
                logits: jax.Array, drafted: bool = False) -> jax.Array:
  """Returns `logits [..., V]` under the constraints, in order.

  Args:
    constraints: constraints of the memory.
    memory: memories, whose leaves have the leading axes of the logits.
    logits: logits of a model.
    drafted: True for the model of a drafter.
  """
  if not constraints:
    return logits

  def apply(memory, logits):
    is_first = not drafted
    for one, own in zip(constraints, memory):
      new = one.apply(own, logits)
      # Logits of NaN are not replaced, so that the loop reports them.
      if not is_first:
        new = jnp.where(jnp.max(new) == -jnp.inf, logits, new)
      is_first = is_first and isinstance(one, Without)
      logits = new
    return logits

  return _mapped(apply, logits.ndim - 1)(memory, logits)


def read(constraints: Constraints, memory: chex.ArrayTree, logits: jax.Array,
         drafted: bool = False) -> tuple[jax.Array, jax.Array | None]:
  """Applies `constrained` to the target's logits at the nodes of a draft.

  A node may be unreachable: after the limit or an end token, or rejected later.
  So a node after which no token is allowed is not an error. It gets the logits
  of a uniform distribution, which keeps every exact rule exact. The loop fails
  only if the sequence needs a token after this node.

  Args:
    constraints: constraints of the memory.
    memory: result of `along`; its leaves are `[B, N, ...]` for N nodes.
    logits: `[B, N, V]` logits after each node.
    drafted: True for the model of a drafter.

  Returns:
    The logits, and `[B, N]` bool, True for nodes after which no token is
    allowed. The second is None without constraints.
  """
  if not constraints:
    return logits, None
  logits = constrained(constraints, memory, logits, drafted)
  stuck = jnp.max(logits, axis=-1) == -jnp.inf
  return jnp.where(stuck[..., None], 0, logits), stuck


def advanced(constraints: Constraints, memory: chex.ArrayTree, tokens: jax.Array
             ) -> Any:
  """Returns the memories after one more token each.

  Args:
    constraints: constraints of the memory.
    memory: memories, whose leaves have the axes of `tokens` first.
    tokens: `[...]`, one token for each memory.
  """
  if not constraints:
    return None
  return _mapped(lambda memory, token: _advance(constraints, memory, token),
                 tokens.ndim)(memory, tokens)


def along(constraints: Constraints, memory: chex.ArrayTree, draft: Draft
          ) -> Any:
  """Returns the memories `[B, N, ...]` after every node of the drafts.

  The memory of a node is its parent's, advanced by the node's token.

  Args:
    constraints: constraints of the memory.
    memory: memories `[B, ...]` of the rows, after the root.
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
    constraints: constraints of the memory.
    memory: memories `[B, ...]` of the rows before the round.
    nodes: memories `[B, N, ...]` of the nodes, result of `along`.
    verdict: verdicts of the rows.
    tokens: `[B, N]`, tokens that the round may emit, in order.
    count: `[B]`, number of tokens that it emitted.
  """
  if not constraints:
    return None

  def one(old, nodes, path, tokens, count):
    last = jnp.maximum(count - 1, 0)  # parent of the last token
    above = jax.tree.map(lambda x: x[path[last]], nodes)
    new = _advance(constraints, above, tokens[last])
    return jax.tree.map(lambda x, y: jnp.where(count > 0, x, y), new, old)

  return jax.vmap(one)(memory, nodes, verdict.path, tokens, count)


def steered(constraints: Constraints, memory: chex.ArrayTree,
            step: Callable[..., Any], carry: chex.ArrayTree, logits: jax.Array
            ) -> tuple[Callable[..., Any], Any, jax.Array]:
  """Returns the step of a drafter's growing tree under the constraints.

  Args:
    constraints: constraints of the memory.
    memory: memories `[B, ...]` of the rows, after the root.
    step: function that adds a level to the tree, see `methods._trees`.
    carry: carry of the step.
    logits: `[B, V]`, logits of the token after the root.

  Returns:
    The step, its carry (a pair of the given carry and memories), and the logits
    of the token after the root.
  """
  def constrained_step(tokens, depths, ancestors, above, carry):
    carry, memory = carry
    logits, carry = step(tokens, depths, ancestors, above, carry)
    parents = jax.tree.map(
        lambda x: jax.vmap(lambda row, at: row[at])(x, above), memory)
    memory = advanced(constraints, parents, tokens)
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
