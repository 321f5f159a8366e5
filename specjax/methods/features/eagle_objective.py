"""EAGLE: the losses of its first version and of its third."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.methods import _unrolled
from specjax.methods.features.network import FeatureHeads
from specjax.models import layers
from specjax.models.configuration import FINAL
from specjax.models.transformer import Transformer
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import Score
from specjax.training.objective import weighted_mean
from specjax.training.objective import weights_of

_NOISE_TOKENS = 512  # of a row that the published scale of the noise is for
_NORMALIZERS = ("rows", "mask")


def uniform_noise(key: jax.Array, features: jax.Array, width: float
                  ) -> jax.Array:
  """Noise for `features [B, S, F]`, in +- width / 2 where a row has 512 tokens.

  The published code scales it by 512 / S.
  """
  return width * _NOISE_TOKENS / features.shape[1] * jax.random.uniform(
      key, features.shape, features.dtype, -0.5, 0.5)


class _Unrolled:
  """What both have: targets and heads that fit, and how they are measured."""

  needs = ("target", "drafter")

  def __post_init__(self):
    self.heads.check_sizes(self.model)
    if not self.heads.reuse:
      raise ValueError("the heads have a module for every step (reuse is "
                       "False); EAGLE has one that is used again: train them "
                       "as MTP")

  def _target(self, params, tokens):
    """What the target says of all but the last token; it gets no gradient."""
    _unrolled.check_rows(tokens, self.heads)
    return jax.lax.stop_gradient(
        _unrolled.read(self.model, self.heads, params, tokens[:, :-1]))

  def _law(self, logits):
    """`[..., Vd]` of `[..., V]`: the target's law of what can be drafted."""
    return jax.nn.softmax(
        logits[..., np.array(self.heads.ids)] if self.heads.ids else logits)

  def read(self, params: Params, tokens: jax.Array) -> dict[str, jax.Array]:
    """What a batch has beside its tokens where no pass is needed.

    Returns:
      `features [B, S, F]`; `final [B, S, D]`, which the target's head reads,
      where that is not the same; and `counts [B, S]`, the places that count.
    """
    seen = self._target(params, tokens)
    found = {"features": seen.features, "counts": self._counts(seen.logits)}
    return found if self.heads.taps == (FINAL,) else {
        **found, "final": seen.final}

  def _counts(self, logits):
    """`[B, S]`: 1 where what follows counts, and 0 elsewhere."""
    return jnp.ones(logits.shape[:2], jnp.float32)

  def _seen(self, params, batch):
    """`(features, law, counts)`, by a pass or of what `read` returned."""
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
    """`score(k, logits, positions)` of every step, stacked along K."""
    del key
    return _unrolled.score(self.model, self.heads, params, tokens, score)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle1Objective(_Unrolled):
  """SmoothL1(f, f^) + w CE(p, p^): the next feature, and the law it gives.

  Li et al. 2024 (arXiv:2401.15077, section 4.2), in the published code's terms:
  the first is a mean over features as well. The features that are read, not
  those that are learned, have noise on them, uniform and of width `noise` for
  rows of 512 tokens; for others as wide as the published code makes it.

  Attributes:
    model: the target.
    heads: `methods.Eagle1Heads`, or others whose state is a feature.
    noise: 0.2 in the paper.
    law_weight: w, 0.1 in the paper.
  """

  model: Transformer
  heads: FeatureHeads
  noise: float = 0.2
  law_weight: float = 0.1

  def __post_init__(self):
    super().__post_init__()
    if self.heads.entry or len(self.heads.taps) != 1:
      raise ValueError(f"the heads read {self.heads.taps} through a layer of "
                       "their own; EAGLE-1's state is the feature that it "
                       "reads: give one tap and no entry, or train as EAGLE-3")

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """The loss, `feature_loss` and `law_loss`.

    A batch with what `read` returns of it needs no pass of the target.
    """
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    features, law, _ = self._seen(params, batch)
    counts = weights_of(batch)[:, 1:]
    noisy = features + uniform_noise(key, features, self.noise)
    out = next(_unrolled.forecasts(self.heads, params, noisy, tokens, 1))
    # Nothing is known of the feature after the last one.
    log_q = jax.nn.log_softmax(self.heads.logits(
        params["drafter"], params["target"], out.read[:, :-1]))
    feature_loss = weighted_mean(jnp.mean(optax.huber_loss(
        out.hidden[:, :-1].astype(jnp.float32),
        features[:, 1:].astype(jnp.float32)), axis=-1), counts)
    law_loss = -weighted_mean(jnp.sum(law[:, 1:] * log_q, axis=-1), counts)
    return feature_loss + self.law_weight * law_loss, {
        "feature_loss": feature_loss, "law_loss": law_loss}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Objective(_Unrolled):
  """-sum_{i<K} decay^i mean_t sum_v p(v) log q_i(v): the training-time test.

  Li et al. 2025 (arXiv:2503.01840, section 3.2). The layer runs K =
  `heads.num_forecasts` steps on its own states, as it will when it drafts, and
  learns at each step the target's law two tokens and more ahead, restricted to
  the tokens that it can draft.

  Attributes:
    model: the target.
    heads: `methods.Eagle3Heads`, or others with one module.
    decay: of the steps' weights, 0.8 in the published code.
    normalizer: what a step's sum is divided by: "rows", the weights of all
      places of all rows (SafeAILab/EAGLE), or "mask", of the places that count
      (vLLM's speculators).
    drop_outside: whether places do not count whose likeliest token cannot be
      drafted (SafeAILab/EAGLE).
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
    """The loss, and each step's own as `head_<i + 1>/train_loss`.

    A batch with what `read` returns of it needs no pass of the target.
    """
    del key
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    features, law, counts = self._seen(params, batch)
    losses = self._losses(
        params, features, law, counts, weights_of(batch), tokens)
    weights = self.decay**jnp.arange(len(losses))
    return jnp.sum(weights * losses), {
        f"head_{k}/train_loss": x for k, x in enumerate(losses, 1)}

  def losses(self, params: Params, features: jax.Array, logits: jax.Array,
             tokens: jax.Array) -> jax.Array:
    """`[K]`, of the steps.

    Args:
      params: `{"target", "drafter"}`.
      features: `[B, S, F]`, the target's.
      logits: `[B, S, V]`, the target's.
      tokens: `[B, >= S]` int32.
    """
    counts = self._counts(logits)
    return self._losses(params, features, self._law(logits), counts,
                        jnp.ones_like(counts), tokens)

  def _counts(self, logits):
    """`[B, S]`: 1 where what follows counts, and 0 elsewhere."""
    if not (self.heads.ids and self.drop_outside):
      return super()._counts(logits)
    drafted = np.zeros(logits.shape[-1], np.float32)
    drafted[np.array(self.heads.ids)] = 1
    return jnp.asarray(drafted)[jnp.argmax(logits, axis=-1)]

  def _losses(self, params, features, law, counts, weights, tokens):
    """`[K]`, as `losses`, of the law `[B, S, Vd]` of what can be drafted."""
    heads, found, counts = self.heads, [], counts * weights
    for k, out in enumerate(_unrolled.forecasts(
        heads, params, features, tokens, heads.num_forecasts), 1):
      # Row t forecasts token t + 1 + k, whose law is known after t + k.
      log_q = jax.nn.log_softmax(heads.logits(
          params["drafter"], params["target"], out.read[:, :-k]))
      nats = -jnp.sum(law[:, k:] * log_q, axis=-1)
      total = jnp.sum(
          weights if self.normalizer == "rows" else counts[:, k:])
      found.append(jnp.sum(counts[:, k:] * nats)
                   / jnp.where(total > 0, total, 1))
    return jnp.stack(found)
