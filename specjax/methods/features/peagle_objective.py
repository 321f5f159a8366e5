"""P-EAGLE: training loss and `Method` record."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from specjax.methods.features import _training
from specjax.methods.features import eagle
from specjax.methods.features.eagle_objective import EAGLE_3
from specjax.methods.features.eagle_objective import Unrolled
from specjax.methods.records import LAYERS
from specjax.methods.records import MLP_WIDTH
from specjax.methods.records import Option
from specjax.methods.records import TAPS
from specjax.models.transformer import Transformer
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import weights_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PEagleObjective(Unrolled):
  """P-EAGLE's loss: the mean of -sum_v p(v) log q(v) over positions and depths.

  P-EAGLE (arXiv:2602.01469). The draft step of depth d = 0..K-1 runs at the
  positions t of a random set A_d, and predicts token t + 2 + d. It attends to
  the features of all positions up to t, and to the smaller depths at t. The
  label p is the target's distribution of the same token, restricted to the
  draft vocabulary. The conditional drop (COD) saves computation: A_0 has all S
  positions, and A_d is a random subset of A_{d-1} with
  max(cod_ratio^d, cod_least) (S - d) positions. Positions whose label has a
  weight are selected first.

  Attributes:
    model: target model.
    heads: `methods.PEagleHeads`.
    cod_ratio: ratio of the numbers of positions at depth d + 1 and d; 0.7 in
      the published code. 1 drops no position.
    cod_least: smallest share of the positions at any depth; 0.2 in the
      published code.
  """

  model: Transformer
  heads: eagle.PEagleHeads
  cod_ratio: float = 0.7
  cod_least: float = 0.2

  def __post_init__(self):
    super().__post_init__()
    for name in ("cod_ratio", "cod_least"):
      if not 0 < getattr(self, name) <= 1:
        raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 "
                         "and at most 1")

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and that of depth d as `head_<d + 1>/train_loss`.

    If the batch contains the output of `read`, the target is not run.
    """
    chex.assert_rank(batch["tokens"], 2)
    params = {**frozen, **trainable}
    tokens, weights = batch["tokens"], weights_of(batch)
    features, law, _ = self._seen(params, batch)
    kept, labels, counts = self._drop(key, weights.all)
    sums = []
    for out, label, count in zip(_training.forecasts(
        self.heads, params, features, tokens, self.heads.num_forecasts,
        [weights.of_part(rows) for rows in kept]), labels, counts):
      p = jnp.take_along_axis(law, weights.of_part(label)[..., None], axis=1)
      log_q = jax.nn.log_softmax(self.heads.logits(
          params["drafter"], params["target"], out.read))
      sums.append(-jnp.sum(weights.of_part(count)[..., None] * p * log_q))
    totals = [jnp.sum(count) for count in counts]
    return weights.divide(sum(sums), sum(totals)), {
        f"head_{k}/train_loss": weights.divide(*pair)
        for k, pair in enumerate(zip(sums, totals), 1)}

  def _drop(self, key: jax.Array, weights: jax.Array
            ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Draws the positions of all depths.

    Args:
      key: PRNG key.
      weights: weights `[B, S]` of the tokens after the first.

    Returns:
      `(kept, labels, counts)`: `kept` as in `_training.forecasts`. For each
      depth, the position `[B, n]` of the target that predicts the same token,
      and the weight `[B, n]` of this token. Beyond the row the weight is 0.
    """
    size, count = weights.shape[1], self.heads.num_forecasts
    padded = jnp.pad(weights, ((0, 0), (0, count)))
    places = jnp.broadcast_to(jnp.arange(size), weights.shape)
    kept, labels, counts = [], [], []
    for depth in range(count):
      weight = jnp.take_along_axis(padded, places + depth + 1, axis=1)
      if depth:
        order = jax.random.uniform(
            jax.random.fold_in(key, depth), places.shape)
        share = max(self.cod_ratio**depth, self.cod_least)
        rows = jax.lax.top_k(jnp.where(weight > 0, order, order - 1), min(
            max(1, int(share * (size - depth))), places.shape[1]))[1]
        kept.append(rows)
        places, weight = (jnp.take_along_axis(x, rows, axis=1)
                          for x in (places, weight))
      labels.append(jnp.minimum(places + depth + 1, size - 1))
      counts.append(weight)
    return kept, labels, counts


P_EAGLE = dataclasses.replace(
    EAGLE_3, name="peagle", heads=eagle.PEagleHeads,
    objective=lambda target, heads, cod_ratio, cod_least: PEagleObjective(
        model=target, heads=heads, cod_ratio=cod_ratio, cod_least=cod_least),
    measure=lambda target, heads: PEagleObjective(model=target, heads=heads),
    head_options=(LAYERS, MLP_WIDTH, TAPS),
    options=(
        Option("cod_ratio", 0.7, "peagle: share of the positions of one draft "
               "depth that the next depth keeps, drawn at random (conditional "
               "drop); in (0, 1]"),
        Option("cod_least", 0.2, "peagle: smallest share of all positions at "
               "any draft depth, in (0, 1]")))
