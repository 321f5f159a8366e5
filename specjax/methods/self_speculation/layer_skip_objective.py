"""Training loss of LayerSkip, for a target whose first layers can draft."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.training.next_token import cross_entropy
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import weights_of

CURRICULA = ("rotational", "gradual", "constant")
RAMPS = ("constant", "exponential")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSkipObjective:
  """LayerSkip's loss: next-token loss after every layer, with layer dropout.

  See Elhoushi et al. 2024 (arXiv:2404.16710). L is the number of layers and T
  the number of training steps. In step t, layer l = 0..L-1 is skipped
  ("dropped"), independently for each row of the batch, with probability

    p(l, t) = S(t) D(l) dropout,   D(l) = exp(l ln 2 / (L - 1)) - 1

  where S(t) is 1 (ramp "constant", for continued training) or 2^(t / T) - 1
  (ramp "exponential", for training from scratch). Layers that are not dropped
  are not rescaled.

  Exit l applies the target's final norm and LM head to the output of layer l
  and predicts the next token. The loss is the sum of the next-token losses of
  the exits with the weights

    w(l, t) = C(t, l) e(l) / sum_i C(t, i) e(i)
    e(l) = scale (0 + 1 + ... + l) for l < L - 1
    e(L - 1) = L - 1 + scale (0 + 1 + ... + L - 2)

  where C(t, l) is 1 if exit l is used in step t, else 0. The curriculum
  determines the exits that are used. "rotational": exits with (l - t) mod
  `every` = 0. "gradual": only the last exit at first, and one more exit, from
  last to first, every T / (2 L) steps. "constant": all exits. The last exit is
  always used.

  Dropout saves no time. Rows drop different layers, so dropped layers are
  computed too, and their output is multiplied by 0.

  Attributes:
    model: target model.
    steps: number of training steps T. The current step t is computed as T
      times `batch["progress"]`, the fraction of the training that is completed.
    dropout: dropout rate p_max of the last layer.
    ramp: type of S, "constant" or "exponential".
    scale: factor of the weights of early exits in e(l), e_scale in the paper.
    curriculum: "rotational", "gradual" or "constant".
    every: period R of the rotation.
  """

  model: Transformer
  steps: int
  dropout: float = 0.1
  ramp: str = "exponential"
  scale: float = 0.2
  curriculum: str = "rotational"
  every: int = 2

  needs = ("target",)

  def __post_init__(self):
    for name, choices in (("curriculum", CURRICULA), ("ramp", RAMPS)):
      if getattr(self, name) not in choices:
        raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one "
                         f"of {', '.join(choices)}")
    if not 0 <= self.dropout < 1:
      raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and "
                       "below 1")
    if not self.scale >= 0:
      raise ValueError(f"scale is {self.scale}; it must be at least 0")
    layers = self.model.config.layers
    if layers < 2:
      raise ValueError("the target has 1 layer; an early exit needs at least 2")
    if not 1 <= self.every <= layers:
      raise ValueError(f"every is {self.every}; it must be from 1 to the "
                       f"{layers} layers")

  def dropout_rates(self, progress: jax.Array) -> jax.Array:
    """Returns the dropout probability p(l, t) of each layer, `[L]`.

    Args:
      progress: fraction t / T of the training that is completed, `[]`.
    """
    layers = self.model.config.layers
    depth = jnp.exp2(jnp.arange(layers) / (layers - 1)) - 1
    time = 1.0 if self.ramp == "constant" else jnp.exp2(
        jnp.asarray(progress, jnp.float32)) - 1
    return time * depth * self.dropout

  def exit_weights(self, progress: jax.Array) -> jax.Array:
    """Returns the weight w(l, t) of each exit's loss, `[L]`; the sum is 1.

    Args:
      progress: fraction t / T of the training that is completed, `[]`.
    """
    layers = self.model.config.layers
    exits = jnp.arange(layers)
    weights = self.scale * exits * (exits + 1) / 2
    last = layers - 1 + self.scale * (layers - 2) * (layers - 1) / 2
    weights = weights.at[-1].set(last) * self._takes_part(progress)
    return weights / jnp.sum(weights)

  def _takes_part(self, progress: jax.Array) -> jax.Array:
    """Returns `[L]` bool, True for the exits that are used in this step.

    Args:
      progress: fraction t / T of the training that is completed, `[]`.
    """
    layers = self.model.config.layers
    exits, last = jnp.arange(layers), jnp.arange(layers) == layers - 1
    if self.curriculum == "constant":
      return jnp.ones((layers,), bool)
    if self.curriculum == "gradual":
      return exits >= layers - 1 - jnp.floor(2 * layers * progress)
    return last | ((exits - self._step(progress)) % self.every == 0)

  def _step(self, progress: jax.Array) -> jax.Array:
    return jnp.round(jnp.asarray(progress, jnp.float32) * self.steps).astype(
        jnp.int32)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and the metric `lm_loss`.

    The metric is the next-token loss of the last exit, that is, of the complete
    model.
    """
    chex.assert_rank(batch["tokens"], 2)
    params = {**frozen, **trainable}["target"]
    tokens, layers = batch["tokens"], self.model.config.layers
    progress = batch["progress"]
    batch_weights = weights_of(batch)
    keep = batch_weights.of_part(jax.random.bernoulli(
        key, 1 - self.dropout_rates(progress)[:, None],
        (layers, len(batch_weights.all))).astype(jnp.float32), axis=1)
    # The attention and the MLP of a layer are dropped together.
    keep = jnp.repeat(keep[:, None], 2, axis=1)
    states, hidden = [], None
    for layer in range(layers):
      hidden = self.model.run(
          params, Sublayers.between(layer, layer + 1),
          tokens[:, :-1] if hidden is None else None, hidden=hidden,
          keep=keep).hidden
      states.append(hidden)

    def loss(hidden):
      out = self.model.run(params, Sublayers.between(0, 0), hidden=hidden)
      return batch_weights.mean(cross_entropy(out.logits, tokens[:, 1:]))

    weights = self.exit_weights(progress)
    exits = jnp.stack(self._exits(progress))
    # The logits of all early exits together need much memory. With `map`, only
    # the logits of one exit exist at a time. With `checkpoint`, they are not
    # stored for the backward pass but computed again.
    early = jax.lax.map(
        lambda exit: jax.checkpoint(loss)(jnp.stack(states[:-1])[exit]), exits)
    lm_loss = loss(hidden)
    return weights[-1] * lm_loss + jnp.sum(weights[exits] * early), {
        "lm_loss": lm_loss}

  def _exits(self, progress: jax.Array) -> list[jax.Array | int]:
    """Returns the early exits whose loss is computed in this step.

    All other early exits have weight 0.

    Args:
      progress: fraction t / T of the training that is completed, `[]`.
    """
    early = self.model.config.layers - 1
    if self.curriculum != "rotational":
      return list(range(early))
    first = self._step(progress) % self.every
    count = math.ceil(early / self.every)
    # A compiled program needs a fixed number of exits, but in some steps the
    # rotation uses one exit less. In these steps the list is filled with the
    # last early exit, whose weight is then 0.
    exits = [first + i * self.every for i in range(count)]
    return [jnp.minimum(exit, early - 1) for exit in exits]
