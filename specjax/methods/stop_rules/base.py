"""What a stop rule sees, and what it may leave out."""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp


@struct.dataclass
class Seen:
  """What a rule may look at, of one row and at one place of its chain.

  Attributes:
    place: `[]` int32, k - 1: drafted tokens before x_k.
    probs: `[V]`, q_k, the law of x_k.
    hidden: `[F]`, the drafter's hidden state that q_k was computed from.
    token: `[]` int32, x_k for a rule that `keeps`, else the token before it.
  """

  place: jax.Array
  probs: jax.Array
  hidden: jax.Array
  token: jax.Array


class StopRule:
  """The base of stop rules: what they may leave out.

  Attributes:
    keeps: True: asked after x_k was drawn, which stays whatever the answer;
      False: asked before, and if the answer is yes x_k is not drawn.
    has_params: whether it reads `params["drafter"]["stop"]`.
  """

  keeps = True
  has_params = False

  def __call__(self, probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the number of tokens of a chain that are submitted, `[]` int32.

    As `exact.certify(stop=...)` calls a rule: before its first round, with the
    rows of q as hidden states and token 0 as the root.

    Args:
      probs: `[gamma, V]`, rows of q along the chain.
      tokens: `[gamma]` int32, the drafted tokens.

    Raises:
      ValueError: the rule has parameters.
    """
    if self.has_params:
      raise ValueError(
          f"the stop rule {type(self).__name__} has parameters; give a "
          "function (probs, tokens) -> length, made of stop_rules.kept")
    return kept(self, None, probs, probs, jnp.zeros((), jnp.int32), tokens)

  def init(self) -> Any:
    """What it remembers over rounds, for one row; nothing by default."""
    return ()

  def start(self, state: Any) -> Any:
    """What it remembers within a round, at its beginning."""
    del state
    return ()

  def stops(self, params: Any, seen: Seen, memory: Any
            ) -> tuple[jax.Array, Any]:
    """Whether the chain ends here, `[]` bool, and the memory; for one row."""
    raise NotImplementedError

  def commit(self, state: Any, drafted: jax.Array, accepted: jax.Array,
             gamma: jax.Array) -> Any:
    """What it remembers after a round in which its own chain was judged.

    Args:
      state: what it remembered before.
      drafted: `[]` int32, tokens of the row's chain; 0 only if a rule that
        does not keep refused the first one, and what was drafted in its place
        was none of its own.
      accepted: `[]` int32, those of them that were accepted.
      gamma: `[]` int32, the most that the chain could have.
    """
    del drafted, accepted, gamma
    return state


def check_share(name: str, value: float) -> None:
  """Raises a `ValueError` where a number is no share."""
  if not 0 <= value <= 1:
    raise ValueError(f"{name} is {value}; it must lie in [0, 1]")


def kept(rule: StopRule, params: Any, probs: jax.Array, hidden: jax.Array,
         root: jax.Array, tokens: jax.Array, state: Any = None) -> jax.Array:
  """How many of a row's tokens a rule lets it draft, `[]` int32.

  Args:
    rule: a `StopRule`.
    params: its parameters.
    probs: `[gamma, V]`, q_1..q_gamma along the chain.
    hidden: `[gamma, F]`, the hidden states that they were computed from.
    root: `[]` int32.
    tokens: `[gamma]` int32, x_1..x_gamma.
    state: what the rule remembers; None: nothing yet.
  """
  before = jnp.append(root, tokens[:-1]).astype(jnp.int32)
  seen = Seen(place=jnp.arange(tokens.shape[0], dtype=jnp.int32), probs=probs,
              hidden=hidden, token=tokens if rule.keeps else before)
  memory = rule.start(rule.init() if state is None else state)

  def step(carry, seen):
    going, memory, count = carry
    stop, memory = rule.stops(params, seen, memory)
    drawn = going if rule.keeps else going & ~stop
    return (going & ~stop, memory, count + drawn), None

  carry = jnp.ones((), bool), memory, jnp.zeros((), jnp.int32)
  (_, _, count), _ = jax.lax.scan(step, carry, seen)
  return count
