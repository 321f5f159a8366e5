"""What a stop rule sees, and what it may leave out."""

from typing import Any

from flax import struct
import jax


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
