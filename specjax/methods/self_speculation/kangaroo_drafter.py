"""An early exit with a trained layer after it (Kangaroo)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax import interfaces
from specjax.decoding.prefill import read_prompt
from specjax.methods.networks import check_fits
from specjax.methods.self_speculation.early_exit import Exit
from specjax.methods.self_speculation.early_exit import ExitState
from specjax.methods.self_speculation.kangaroo_network import AdaptedExit
from specjax.methods.self_speculation.kangaroo_network import Caches
from specjax.methods.self_speculation.kangaroo_network import KangarooAdapter
from specjax.sampling import LogitsTransform
from specjax.types import Draft
from specjax.types import ModelFn
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kangaroo(Exit):
  """Drafts a chain with the target's first layers and an adapter.

  The first layers are shared with the verifying pass, as in `EarlyExit`; the
  adapter has a cache of its own. `params["drafter"]` are the adapter's
  parameters.

  Attributes:
    adapter: it says where the exit is.
    exit: that, which need not be given.
  """

  adapter: KangarooAdapter
  exit: int = 1

  def __post_init__(self):
    object.__setattr__(self, "exit", self.adapter.exit)
    super().__post_init__()
    if self.stop is not None and self.stop.has_params:
      raise ValueError(f"the stop rule {type(self.stop).__name__} has "
                       "parameters, and params['drafter'] are the adapter's; "
                       "choose a rule without, such as Confidence")

  def bind(self, target: ModelFn, transform: LogitsTransform) -> "Kangaroo":
    """The same drafter, for this target and its transform.

    Raises:
      ValueError: the adapter is for another target.
    """
    check_fits(self.adapter, target)
    return super().bind(target, transform)

  @property
  def _adapted(self) -> AdaptedExit:
    return AdaptedExit(target=self.model, adapter=self.adapter)

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> ExitState:
    """The adapter's cache after the prompt."""
    state = super().init(params, prompt, prefill_output)
    cache = read_prompt(self._adapted, params, prompt).cache
    return state.replace(own=cache.adapter)

  def _reserved(self, own):
    return interfaces.reserved(own, self.num_nodes)

  def _rewound(self, own, before):
    return own.rollback(before.lengths)

  def predict(self, params: Any, output: ModelOutput, own: Any
              ) -> tuple[ModelOutput, Any]:
    """What the adapter says after the exit, and its cache."""
    size = output.hidden.shape[:2]
    out = self._adapted.after(
        params, output, jnp.zeros(size, jnp.int32), jnp.ones((*size, 1), bool),
        Caches(exit=output.cache, adapter=own))
    return out, out.cache.adapter.rollback(own.lengths + 1)

  def commit(self, params: Any, drafter: ExitState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> ExitState:
    """The adapter's cache with the accepted tokens."""
    state = super().commit(
        params, drafter, draft, verdict, target_output, count)
    # Its block begins with the root, and all nodes lie in order.
    return state.replace(own=interfaces.settled(
        drafter.own.rollback(drafter.own.lengths + count)))
