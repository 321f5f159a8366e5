"""SpecDec++: training loss of a head that predicts acceptance."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.interfaces import Model
from specjax.methods.stop_rules import AcceptanceHead
from specjax.models.transformer import Transformer
from specjax.training import divergences
from specjax.training.objective import Batch
from specjax.training.objective import check_same_tokens
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import Weights
from specjax.training.objective import weights_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
  """Weighted cross-entropy of SpecDec++'s acceptance head.

  Huang et al. 2024 (SpecDec++, arXiv:2405.19715, section 3.3). At position t
  the target has distribution p_t and the draft model q_t. The head reads the
  draft model's hidden state and predicts s_t, the probability that a token
  drafted from q_t is accepted. The loss is

    -mean_t (a_t log s_t + w (1 - a_t) log(1 - s_t)).

  The paper samples a token y ~ q_t and uses min(1, p_t(y) / q_t(y)) as the
  label a_t. Here the label is its mean over y, sum_v min(p_t(v), q_t(v)). The
  loss is linear in the label, so its expectation is the same, without the
  sampling noise.

  During decoding, a draft token often follows other draft tokens. Training
  imitates this: samples of the draft model replace a random part of each row's
  tokens. Both models then read this mixed row.

  Attributes:
    model: draft model.
    target: target model with the same vocabulary.
    head: stop rule to train. Its parameters are `params["stop"]`.
    rejection_weight: weight w of rejections, 6 in the paper.
    mixing: probability that a token is replaced, 0.15 in the paper.
  """

  model: Transformer
  target: Model
  head: AcceptanceHead
  rejection_weight: float = 6.0
  mixing: float = 0.15

  needs = ("target", "drafter", "stop")

  def __post_init__(self):
    check_same_tokens(self.model, self.target)
    if not 0 < self.rejection_weight < float("inf"):
      raise ValueError(f"rejection_weight is {self.rejection_weight}; it must "
                       "be above 0, and 1 weighs rejections and acceptances "
                       "equally")
    if not 0 <= self.mixing <= 1:
      raise ValueError(f"mixing is {self.mixing}; it must be in [0, 1]")

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss in nats, and metrics.

    Args:
      trainable: `{"stop": parameters of the head}`.
      frozen: parameters of the two models, `{"target": ..., "drafter": ...}`.
      batch: batch with `tokens [B, S + 1]`; the models read the first S.
      key: PRNG key for the choice and the samples of the replaced tokens.

    Returns:
      `(loss, {"acceptance": mean label a_t, "forecast": mean prediction s_t})`.
    """
    chex.assert_rank(batch["tokens"], 2)
    params = {**frozen, **trainable}
    weights = weights_of(batch)
    read = self._mixed(
        params["drafter"], batch["tokens"][:, :-1], key, weights)
    p = self.target(params["target"], read).logits
    out = self.model(params["drafter"], read)
    accepted, hidden = jax.lax.stop_gradient(
        (1 - divergences.total_variation(p, out.logits), out.hidden))
    logits = self.head.logits(params["stop"], hidden)
    sure = logits[..., 1] - logits[..., 0]
    nats = -(accepted * jax.nn.log_sigmoid(sure) + self.rejection_weight
             * (1 - accepted) * jax.nn.log_sigmoid(-sure))
    return weights.mean(nats), {
        "acceptance": weights.mean(accepted),
        "forecast": weights.mean(jax.nn.sigmoid(sure))}

  def _mixed(self, drafter: Params, tokens: jax.Array, key: jax.Array,
             weights: Weights) -> jax.Array:
    """Replaces random tokens by samples of the draft model.

    Each sample is conditioned on the original tokens before it. The first token
    of a row is never replaced.
    """
    which, draw = jax.random.split(key)
    laws = jax.nn.softmax(self.model(drafter, tokens).logits[:, :-1])
    shape = len(weights.all), laws.shape[1]
    keys = weights.of_part(jax.random.split(draw, shape))
    drawn = jax.vmap(jax.vmap(sampling.sample))(keys, laws)
    replaced = weights.of_part(
        jax.random.bernoulli(which, self.mixing, shape))
    return tokens.at[:, 1:].set(
        jnp.where(replaced, drawn, tokens[:, 1:]).astype(tokens.dtype))
