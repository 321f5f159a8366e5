"""Hydra: heads that read the drafted tokens draft a static tree.

Ankner et al. 2024 (arXiv:2402.05109).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import steps
from specjax.methods.heads import _forecasts
from specjax.methods.heads.hydra_network import HydraHeads
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hydra(_forecasts.HeadsDrafter):
  """The children of a node at depth d follow head d + 1 on the node's path.

  Each node's law depends on the tokens above it, so that q is a conditional
  law and not a product of laws as Medusa's is. With "top_k" the draft is the
  paper's, certain, and `verifiers.TargetWalk` is exact; drafts that are sampled
  report their q, and the rules that use it apply. `params["drafter"]` are the
  heads' parameters; the embeddings are those of `params["target"]`.

  Attributes:
    heads: of the target.
    parents: the tree, at most K deep, see `specjax.trees`; it is put in
      breadth-first order.
    proposal: how the children of a node are drawn, see `TreeLanguageModel`.
    transform: of the heads' logits; None takes the decoder's. Any is sound,
      for q is reported as it was sampled from.
  """

  heads: HydraHeads
  parents: tuple[int, ...]
  proposal: str = "top_k"
  transform: LogitsTransform | None = None

  def propose(self, params: Any, coins: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Drafts the tree for every row.

    Args:
      params: `{"target", "drafter": parameters of the heads}`.
      coins: `[B, num_coins]`, uniform in [0, 1).
      state: the `DecodeState`.

    Returns:
      `(Draft, Forecast)`, batched.
    """
    forecast, roots = state.drafter, steps.roots(state)
    if self.num_nodes == 1:
      return steps.root_only(state, self.heads.vocab_size), forecast
    table = params["target"]["embedding"]

    def step(tokens, depths, ancestors, above, paths):
      """The carry `[B, S, (d + 1) D]` is what the nodes before have read."""
      del depths, ancestors
      paths = jnp.take_along_axis(paths, above[..., None], axis=1)
      paths = jnp.concatenate([paths, table[tokens]], axis=-1)
      return self.heads.head(params["drafter"], paths), paths

    nothing = jnp.zeros_like(roots)[:, None]
    logits, paths = step(roots[:, None], None, None, nothing,
                         forecast.values[:, None])
    step, carry, logits = constraints_lib.steered(
        self.transform.constraints, state.constraints, step, paths,
        logits[:, 0])
    tokens, probs, _ = self.draw(step, carry, logits, coins, state)
    return self.drafts(state, tokens, probs), forecast
