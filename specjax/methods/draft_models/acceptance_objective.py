"""SpecDec++: training of a head that predicts acceptance."""

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
from specjax.training.objective import weighted_mean
from specjax.training.objective import weights_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
  """-mean_t (a_t log s_t + w (1 - a_t) log(1 - s_t)), s_t the head's output.

  Huang et al. 2024 (SpecDec++, arXiv:2405.19715, section 3.3). The head reads
  the drafter's hidden state at t. The paper samples y ~ q_t and uses the label
  min(1, p_t(y) / q_t(y)). The loss is linear in it, so its mean over y is known
  without noise: a_t = sum_v min(p_t(v), q_t(v)).

  In a drafted chain the tokens before a token are also drafted. So a share of
  the row's tokens is replaced by samples of the drafter, and both models read
  the mixed row.

  Attributes:
    model: draft model.
    target: target model with the same vocabulary.
    head: stop rule whose parameters are trained, under the name "stop".
    rejection_weight: w, 6 in the paper.
    mixing: share of the tokens that are replaced, 0.15 in the paper.
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
                       "be a number above 0: 1 weighs both cases equally")
    if not 0 <= self.mixing <= 1:
      raise ValueError(f"mixing is {self.mixing}; it must be in [0, 1]")

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss of `{"stop"}` on `tokens [B, S + 1]`, in nats.

    Returns:
      `(loss, {"acceptance": the mean of a, "forecast": the mean of s})`.
    """
    chex.assert_rank(batch["tokens"], 2)
    params = {**frozen, **trainable}
    read = self._mixed(params["drafter"], batch["tokens"][:, :-1], key)
    p = self.target(params["target"], read).logits
    out = self.model(params["drafter"], read)
    accepted, hidden = jax.lax.stop_gradient(
        (1 - divergences.total_variation(p, out.logits), out.hidden))
    logits = self.head.logits(params["stop"], hidden)
    sure = logits[..., 1] - logits[..., 0]
    nats = -(accepted * jax.nn.log_sigmoid(sure) + self.rejection_weight
             * (1 - accepted) * jax.nn.log_sigmoid(-sure))
    mean = lambda x: weighted_mean(x, weights_of(batch))
    return mean(nats), {"acceptance": mean(accepted),
                        "forecast": mean(jax.nn.sigmoid(sure))}

  def _mixed(self, drafter: Params, tokens: jax.Array, key: jax.Array
             ) -> jax.Array:
    """Replaces a share of a row's tokens by samples given the tokens before."""
    which, draw = jax.random.split(key)
    laws = jax.nn.softmax(self.model(drafter, tokens).logits[:, :-1])
    keys = jax.random.split(draw, laws.shape[:2])
    drawn = jax.vmap(jax.vmap(sampling.sample))(keys, laws)
    replaced = jax.random.bernoulli(which, self.mixing, drawn.shape)
    return tokens.at[:, 1:].set(
        jnp.where(replaced, drawn, tokens[:, 1:]).astype(tokens.dtype))
