"""No draft at all: the loop becomes autoregressive decoding."""

import dataclasses

from jax.sharding import PartitionSpec

from specjax.drafters import common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Empty:
  """Proposes the root alone, so that every round emits one token.

  Attributes:
    vocab_size: V; the decoder fills it in.
  """

  vocab_size: int | None = None

  num_nodes = 1
  num_coins = 0
  chain = True
  iid = True
  conditional = True
  autoregressive = True
  proposal = "deterministic"

  def bind(self, target, transform) -> "Empty":
    """The same drafter, for this target."""
    del transform
    return dataclasses.replace(self, vocab_size=target.vocab_size)

  def init(self, params, prompt, prefill_output):
    del params, prompt, prefill_output

  def propose(self, params, coins, state):
    """A draft of N = 1 node for each of the B rows."""
    del params, coins
    return common.root_only(state, self.vocab_size), state.drafter

  def commit(self, params, drafter, draft, verdict, target_output, count):
    del params, draft, verdict, target_output, count
    return drafter

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """There are no parameters to split."""
    del axis, size
    return PartitionSpec()
