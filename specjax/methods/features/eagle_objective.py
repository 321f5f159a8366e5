"""EAGLE-1 and EAGLE-3: training losses and `Method` records."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.methods.features import _training
from specjax.methods.features import eagle
from specjax.methods.features._training import _FEED_NORMED
from specjax.methods.features._training import _layer_chain
from specjax.methods.features._training import _layer_compared
from specjax.methods.features._training import _layer_strategy
from specjax.methods.features.assistant import AssistantHeads
from specjax.methods.features.network import FeatureHeads
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import MLP_WIDTH
from specjax.methods.records import Option
from specjax.methods.records import TAPS
from specjax.models import layers
from specjax.models.configuration import FINAL
from specjax.models.transformer import Transformer
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import Score
from specjax.training.objective import Weights
from specjax.training.objective import weights_of

_NOISE_TOKENS = 512  # row length at which the noise has scale 1


_NORMALIZERS = ("rows", "mask")


def uniform_noise(key: jax.Array, shape: tuple[int, int, int], width: float,
                  dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
  """Returns uniform noise for features of shape `[B, S, F]`.

  The noise is in +-(width / 2) * 512 / S. The factor 512 / S comes from the
  published code.
  """
  return width * _NOISE_TOKENS / shape[1] * jax.random.uniform(
      key, shape, dtype, -0.5, 0.5)


class Unrolled:
  """Base class of the losses of EAGLE, which runs the target."""

  needs = ("target", "drafter")

  def __post_init__(self):
    self.heads.check_sizes(self.model)
    if not self.heads.reuse:
      raise ValueError("reuse is False, so the heads have a module for every "
                       "step; EAGLE applies one module repeatedly: set "
                       "reuse=True, or train these heads as MTP")

  def _target(self, params, tokens):
    """Returns the target's output, without gradients, for all but the last
    token.
    """
    _training.check_rows(tokens, self.heads)
    return jax.lax.stop_gradient(
        _training.read(self.model, self.heads, params, tokens[:, :-1]))

  def _law(self, logits):
    """Returns the target's distribution `[..., Vd]` over the Vd draft tokens.

    The probabilities of the draft tokens are normalised to sum 1.
    """
    return jax.nn.softmax(
        logits[..., np.array(self.heads.ids)] if self.heads.ids else logits)

  def read(self, params: Params, tokens: jax.Array) -> dict[str, jax.Array]:
    """Returns the target's output for a batch, to be stored with the batch.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`.
      tokens: token ids `[B, S + 1]` int32.

    Returns:
      `features [B, S, F]`, the hidden states that the heads read. `final
      [B, S, D]`, the input of the target's LM head, if it differs from the
      features. `counts [B, S]`, 1 at positions that the loss includes, else 0.
    """
    seen = self._target(params, tokens)
    found = {"features": seen.features, "counts": self._counts(seen.logits)}
    return found if self.heads.taps == (FINAL,) else {
        **found, "final": seen.final}

  def _counts(self, logits):
    """Returns `[B, S]`, 1 at positions that the loss includes, else 0."""
    return jnp.ones(logits.shape[:2], jnp.float32)

  def _seen(self, params, batch):
    """Returns the target's features, distribution over draft tokens and counts.

    The values are computed by a pass of the target, or from the output of
    `read` if the batch contains it.
    """
    if "features" not in batch:
      seen = self._target(params, batch["tokens"])
      return seen.features, self._law(seen.logits), self._counts(seen.logits)
    features, final, counts = (
        batch[name].astype(jnp.float32) for name in (
            "features", "final" if "final" in batch else "features", "counts"))
    head = self.heads.columns(params["target"])
    law = jax.nn.softmax(layers.logits(
        final.astype(head.dtype), head, self.model.config))
    return features, law, counts

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns the stacked results of `score` for the K draft steps."""
    del key
    return _training.score(self.model, self.heads, params, tokens, score)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle1Objective(Unrolled):
  """EAGLE-1's loss SmoothL1(f, f^) + w CE(p, p^) of the next position.

  Li et al. 2024 (arXiv:2401.15077, section 4.2). f is the target's feature at
  the next position, and p the target's distribution there. f^ and p^ are the
  layer's predictions of f and p. CE is the cross-entropy. As in the published
  code, the first term is averaged over tokens and over the dimensions of the
  features. Uniform noise is added to the input features, not to the labels
  (`uniform_noise`).

  Attributes:
    model: target model.
    heads: `methods.Eagle1Heads`, or other heads that predict a feature.
    noise: width of the noise's range for rows of 512 tokens; 0.2 in the paper.
    law_weight: weight w of the second term; 0.1 in the paper.
  """

  model: Transformer
  heads: FeatureHeads
  noise: float = 0.2
  law_weight: float = 0.1

  def __post_init__(self):
    super().__post_init__()
    if self.heads.entry or len(self.heads.taps) != 1:
      raise ValueError(f"taps is {self.heads.taps} and entry is "
                       f"{self.heads.entry}; EAGLE-1 predicts the feature that "
                       "it reads: give one tap and entry=False, or train as "
                       "EAGLE-3")

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and its two terms `feature_loss` and `law_loss`.

    If the batch contains the output of `read`, the target is not run.
    """
    chex.assert_rank(batch["tokens"], 2)
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    features, law, _ = self._seen(params, batch)
    weights = weights_of(batch)
    shape = len(weights.all), *features.shape[1:]
    noisy = features + weights.of_part(
        uniform_noise(key, shape, self.noise, features.dtype))
    out = next(_training.forecasts(self.heads, params, noisy, tokens, 1))
    # The label of position t is the feature at t + 1. The last position has no
    # label.
    log_q = jax.nn.log_softmax(self.heads.logits(
        params["drafter"], params["target"], out.read[:, :-1]))
    mean = lambda x: weights.mean(x, weights.all[:, 1:])
    feature_loss = mean(jnp.mean(optax.huber_loss(
        out.hidden[:, :-1].astype(jnp.float32),
        features[:, 1:].astype(jnp.float32)), axis=-1))
    law_loss = -mean(jnp.sum(law[:, 1:] * log_q, axis=-1))
    return feature_loss + self.law_weight * law_loss, {
        "feature_loss": feature_loss, "law_loss": law_loss}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Objective(Unrolled):
  """EAGLE-3's loss -sum_{i<K} decay^i mean_t sum_v p(v) log q_i(v).

  Training-time test of Li et al. 2025 (arXiv:2503.01840, section 3.2). The
  layer runs K = `heads.num_forecasts` steps i = 0..K-1 on its own output, as in
  drafting. q_i is the layer's distribution at step i and position t. The label
  p is the target's distribution of the same token, restricted to the draft
  vocabulary.

  Attributes:
    model: target model.
    heads: `methods.Eagle3Heads`, or other heads with one module.
    decay: ratio of the loss weights of step i + 1 and step i; 0.8 in the
      published code.
    normalizer: divisor of a step's sum over positions. "rows": total weight of
      all positions (SafeAILab/EAGLE). "mask": total weight of the positions
      that `drop_outside` does not drop (vLLM's speculators).
    drop_outside: drops positions whose most likely token under the target is
      outside the draft vocabulary (SafeAILab/EAGLE).
  """

  model: Transformer
  heads: FeatureHeads
  decay: float = 0.8
  normalizer: str = "rows"
  drop_outside: bool = True

  def __post_init__(self):
    super().__post_init__()
    if self.normalizer not in _NORMALIZERS:
      raise ValueError(f"normalizer is {self.normalizer!r}; it must be one of "
                       f"{', '.join(_NORMALIZERS)}")

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and each step's loss as `head_<i + 1>/train_loss`.

    If the batch contains the output of `read`, the target is not run.
    """
    chex.assert_rank(batch["tokens"], 2)
    del key
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    features, law, counts = self._seen(params, batch)
    every = batch.get("whole", batch).get("counts", counts)
    losses = self._losses(
        params, features, law, counts, every, weights_of(batch), tokens)
    weights = self.decay**jnp.arange(len(losses))
    return jnp.sum(weights * losses), {
        f"head_{k}/train_loss": x for k, x in enumerate(losses, 1)}

  def before_parts(self, params: Params, batch: Batch) -> Batch:
    """Returns the target's output for the normalizer "mask".

    The normalizer is the number of positions in the complete batch, which only
    the target's output determines. The target is not run again later.
    """
    if self.normalizer == "rows" or "features" in batch:
      return {}
    return self.read(params, batch["tokens"])

  def losses(self, params: Params, features: jax.Array, logits: jax.Array,
             tokens: jax.Array) -> jax.Array:
    """Returns the losses `[K]` of the K draft steps.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`.
      features: features `[B, S, F]` of the target.
      logits: logits `[B, S, V]` of the target.
      tokens: token ids `[B, >= S]` int32.
    """
    chex.assert_rank([features, logits, tokens], [3, 3, 2])
    counts = self._counts(logits)
    return self._losses(
        params, features, self._law(logits), counts, counts,
        Weights(jnp.ones_like(counts), part=0, size=len(counts)), tokens)

  def _counts(self, logits):
    """Returns `[B, S]`, 1 at positions that the loss includes, else 0."""
    if not (self.heads.ids and self.drop_outside):
      return super()._counts(logits)
    drafted = np.zeros(logits.shape[-1], np.float32)
    drafted[np.array(self.heads.ids)] = 1
    return jnp.asarray(drafted)[jnp.argmax(logits, axis=-1)]

  def _losses(self, params, features, law, counts, every, weights, tokens):
    """Returns the losses `[K]` of the steps, for labels `law [b, S, Vd]`.

    `counts [b, S]` and `every [B, S]` are the results of `_counts` for a part
    and for the complete batch. `every` is only used by the normalizer "mask".
    """
    heads, found = self.heads, []
    counts = counts * weights.of_part(weights.all)
    for k, out in enumerate(_training.forecasts(
        heads, params, features, tokens, heads.num_forecasts), 1):
      # Position t predicts token t + 1 + k. The target's distribution of this
      # token is at position t + k.
      log_q = jax.nn.log_softmax(heads.logits(
          params["drafter"], params["target"], out.read[:, :-k]))
      nats = -jnp.sum(law[:, k:] * log_q, axis=-1)
      total = jnp.sum(weights.all if self.normalizer == "rows" else
                      (every * weights.all)[:, k:])
      found.append(weights.divide(jnp.sum(counts[:, k:] * nats), total))
    return jnp.stack(found)


EAGLE_1 = Method(
    name="eagle1", heads=eagle.Eagle1Heads,
    learning_rate=LearningRate(
        bundled=2e-3, published=5e-5, size=8e9,
        source="main_deepspeed.py of the EAGLE repository"),
    objective=lambda target, heads, noise, law_weight:
        Eagle1Objective(
            model=target, heads=heads, noise=noise, law_weight=law_weight),
    measure=lambda target, heads: Eagle1Objective(
        model=target, heads=heads),
    chain=_layer_chain, strategy=_layer_strategy, compared=_layer_compared,
    head_options=(MLP_WIDTH, Option(
        "fusion_norms", False, "eagle1: normalise the token embedding and "
        "the target's feature before they are concatenated (DeepSeek-V3)")),
    options=(
        Option("noise", 0.2, "eagle1: width of the uniform noise added to the "
               "features that the layer reads, for rows of 512 tokens; it is "
               "scaled by 512 / row length"),
        Option("law_weight", 0.1, "eagle1: weight of the cross-entropy with "
               "the target's distribution; the loss of the predicted feature "
               "has weight 1")))


def _refuse_assistant(target, heads, **options):
  raise ValueError("the heads are AssistantHeads, which read the target's "
                   "cache, so they cannot be trained or scored on rows of "
                   "tokens; decode with them, as evaluate_drafter.py does")


# Published assistants can only be decoded, so this is no method to train.
ASSISTANT = dataclasses.replace(
    EAGLE_1, name="assistant", heads=AssistantHeads, head_options=(),
    options=(), objective=_refuse_assistant, measure=_refuse_assistant)


EAGLE_3 = dataclasses.replace(
    EAGLE_1, name="eagle3", heads=eagle.Eagle3Heads,
    learning_rate=LearningRate(
        bundled=2e-3, published=1e-4, size=8e9,
        source="EAGLE-3 configurations of SpecForge"),
    objective=lambda target, heads, step_decay, normalizer, drop_outside:
        Eagle3Objective(
            model=target, heads=heads, decay=step_decay, normalizer=normalizer,
            drop_outside=drop_outside),
    measure=lambda target, heads: Eagle3Objective(
        model=target, heads=heads),
    head_options=(MLP_WIDTH, TAPS, _FEED_NORMED),
    options=(
        Option("step_decay", 0.8, "eagle3: factor by which the loss weight "
               "falls from one draft step to the next"),
        Option("normalizer", "rows", "eagle3: number by which each step's loss "
               "is divided: rows, the number of all positions; mask, the "
               "number of positions left by drop_outside", ("rows", "mask")),
        Option("drop_outside", True, "eagle3: exclude positions whose most "
               "likely token under the target is not in the draft "
               "vocabulary")))
