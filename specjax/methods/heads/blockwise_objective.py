"""Blockwise parallel decoding (Stern et al. 2018, arXiv:1811.03115)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.methods.heads import _objectives as heads_lib
from specjax.methods.heads.blockwise_network import BlockwiseHeads
from specjax.methods.networks import check_fits
from specjax.methods.networks import lm_head
from specjax.models.transformer import Transformer
from specjax.training.next_token import cross_entropy
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import Score
from specjax.training.objective import weighted_mean
from specjax.training.objective import weights_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blockwise:
  """The mean cross-entropy of the heads, or of one that is drawn (section 6).

  One head drawn uniformly for each batch gives an unbiased estimate of the
  mean over the heads at the price of one. A target that is trained as well
  counts as head 0: its own next-token loss.

  Attributes:
    model: the target.
    heads: of the target.
    one_head: whether a batch trains one head, as in the paper, or all.
  """

  model: Transformer
  heads: BlockwiseHeads
  one_head: bool = True

  needs = ("target", "drafter")

  def __post_init__(self):
    check_fits(self.heads, self.model)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """The loss, and with all heads each one's as `head_<k>/train_loss`."""
    params = {**frozen, **trainable}
    tokens, tuned = batch["tokens"], "target" in trainable
    weights = weights_of(batch)
    output = self.model(params["target"], tokens[:, :-1])
    head = lm_head(params["target"])
    next_token = lambda: weighted_mean(
        cross_entropy(output.logits, tokens[:, 1:]), weights)
    if self.one_head:
      first = 0 if tuned else 1
      k = jax.random.randint(key, (), first, self.heads.num_forecasts + 1)
      chosen = jax.tree.map(lambda x: x[k - 1], params["drafter"])
      forecast = lambda: heads_lib.head_loss(
          self.heads, chosen, output.hidden, k, tokens, weights,
          jax.lax.stop_gradient(head))
      if not tuned:
        return forecast(), {}
      return jax.lax.cond(k == 0, next_token, forecast), {}
    losses = heads_lib.head_losses(
        self.heads, params["drafter"], output.hidden, tokens, weights, head,
        tuned)
    metrics = heads_lib.by_head(losses)
    if tuned:
      metrics["lm_loss"] = next_token()
      losses = jnp.append(losses, metrics["lm_loss"])
    return jnp.mean(losses), metrics

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """`score(k, logits, positions)` of every head, stacked along K."""
    del key
    hidden = self.model(params["target"], tokens[:, :-1]).hidden
    return heads_lib.score_heads(
        self.heads, params["drafter"], hidden, lm_head(params["target"]), score)
