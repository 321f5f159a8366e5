"""Multi-token prediction: training losses and `Method` records.

The target is frozen (`MTPObjective`) or trained as well (`MTPJointObjective`).
"""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax.methods.features import _training
from specjax.methods.features import mtp
from specjax.methods.features._training import _FEED_NORMED
from specjax.methods.features.eagle_objective import EAGLE_1
from specjax.methods.features.network import FeatureHeads
from specjax.methods.records import LearningRate
from specjax.methods.records import MLP_WIDTH
from specjax.methods.records import Option
from specjax.methods.records import TAPS
from specjax.models.transformer import Transformer
from specjax.training.next_token import cross_entropy
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import Score
from specjax.training.objective import Weights
from specjax.training.objective import weights_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPObjective:
  """Loss -sum_k w_k mean_t log p^(k)(x_{t+1+k}) with a frozen target.

  p^(k) is the distribution that the heads predict at depth k = 1..K from
  position t. The weights w_k are proportional to decay^(k-1) and sum to 1.
  FastMTP (Cai et al. 2025, arXiv:2509.18362, equation 2) uses this loss for one
  reused module. Here several modules use it too.

  Attributes:
    model: target model.
    heads: `methods.MTPHeads`, or other heads with the target's vocabulary.
    decay: ratio of the loss weights of depths k + 1 and k; 0.6 in the paper.
  """

  model: Transformer
  heads: FeatureHeads
  decay: float = 0.6

  needs = ("target", "drafter")

  def __post_init__(self):
    self.heads.check_sizes(self.model)
    if self.heads.ids:
      raise ValueError(f"ids has {len(self.heads.ids)} of the "
                       f"{self.model.vocab_size} tokens, so other tokens of "
                       "the training data have no probability: give heads of "
                       "all tokens, or train as EAGLE-3")

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and each depth's loss as `head_<k>/train_loss`."""
    chex.assert_rank(batch["tokens"], 2)
    del key
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    _training.check_rows(tokens, self.heads)
    seen = _training.read(self.model, self.heads, params, tokens[:, :-1])
    losses = self.losses(params, seen.features, tokens, weights_of(batch))
    weights = self.decay**jnp.arange(len(losses))
    return jnp.sum(weights * losses) / jnp.sum(weights), _by_head(losses)

  def losses(self, params: Params, features: jax.Array, tokens: jax.Array,
             weights: Weights) -> jax.Array:
    """Returns the losses `[K]` of depths 1..K, in nats.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`.
      features: features `[B, S, F]` of the target.
      tokens: token ids `[B, S + 1]` int32.
      weights: weights of the tokens after the first.
    """
    chex.assert_rank([features, tokens], [3, 2])
    found = []
    for k, out in enumerate(_training.forecasts(
        self.heads, params, features, tokens, self.heads.num_forecasts), 1):
      # Position t predicts token t + 1 + k, so the last k of the S positions
      # have no label.
      labels = tokens[:, 1 + k:]
      logits = self.heads.logits(params["drafter"], params["target"],
                                 out.read[:, :labels.shape[1]])
      found.append(weights.mean(
          cross_entropy(logits, labels), weights.all[:, k:]))
    return jnp.stack(found)

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns `score(k, logits, positions)` of every depth, stacked along K."""
    del key
    return _training.score(self.model, self.heads, params, tokens, score)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPJointObjective:
  """Loss L_LM + weight * mean_k CE_k for training a target and its modules.

  L_LM is the target's next-token loss, and CE_k is the cross-entropy of the
  prediction at depth k = 1..K. DeepSeek-V3 (arXiv:2412.19437, equations 24 and
  25) uses `MTPHeads`; the weight is its lambda, initially 0.3. Gloeckle et al.
  2024 (arXiv:2404.19737, equation 2) use `ParallelLayers` and weight K. Then
  every CE_k has the same weight as L_LM.

  Attributes:
    mtp: loss of the modules; its `decay` is not used.
    weight: weight of the mean of CE_k.
  """

  mtp: MTPObjective
  weight: float = 0.3

  needs = ("target", "drafter")

  @property
  def model(self) -> Transformer:
    """Target model."""
    return self.mtp.model

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, with the metrics `lm_loss` and the loss of each depth.
    """
    chex.assert_rank(batch["tokens"], 2)
    del key
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    _training.check_rows(tokens, self.mtp.heads)
    seen = _training.read(self.model, self.mtp.heads, params, tokens[:, :-1])
    weights = weights_of(batch)
    lm_loss = weights.mean(cross_entropy(seen.logits, tokens[:, 1:]))
    losses = self.mtp.losses(params, seen.features, tokens, weights)
    return lm_loss + self.weight * jnp.mean(losses), {
        "lm_loss": lm_loss, **_by_head(losses)}

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns `score(k, logits, positions)` of every depth, stacked along K."""
    return self.mtp.score(params, tokens, key, score)


def _by_head(losses):
  return {f"head_{k}/train_loss": x for k, x in enumerate(losses, 1)}


MTP = dataclasses.replace(
    EAGLE_1, name="mtp", heads=mtp.MTPHeads,
    learning_rate=LearningRate(
        bundled=2e-3, published=5e-5,
        source="sft.sh of the FastMTP repository"),
    objective=lambda target, heads, depth_decay: MTPObjective(
        model=target, heads=heads, decay=depth_decay),
    measure=lambda target, heads: MTPObjective(
        model=target, heads=heads),
    head_options=(
        MLP_WIDTH, TAPS, _FEED_NORMED,
        Option("reuse", False, "mtp: train one module that is applied "
               "repeatedly to its own output (FastMTP). Default: one module "
               "per draft token"),
        Option("chained", True, "mtp: each module reads the output of the "
               "previous module. With --nochained all modules read the "
               "target's hidden states")),
    options=(Option("depth_decay", 0.6,
                    "mtp, parallel_layers: factor by which the loss weight "
                    "falls from one draft token to the next"),))


PARALLEL_LAYERS = dataclasses.replace(
    MTP, name="parallel_layers", heads=mtp.ParallelLayers,
    head_options=(MLP_WIDTH,))
