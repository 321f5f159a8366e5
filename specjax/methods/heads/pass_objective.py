"""Training loss of look-ahead tokens, for PaSS and UNO."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax.caches.dense import BlockCache
from specjax.methods.heads.pass_embeddings import PaSSEmbeddings
from specjax.methods.heads.pass_embeddings import with_lookahead
from specjax.methods.networks import check_fits
from specjax.methods.networks import Params
from specjax.models.transformer import Transformer
from specjax.training import divergences
from specjax.training.next_token import cross_entropy
from specjax.training.objective import Batch
from specjax.training.objective import has_weight
from specjax.training.objective import Loss
from specjax.training.objective import Score
from specjax.training.objective import weights_of
from specjax.trees import topology
from specjax.types import ModelOutput

LABELS = "cross_entropy"
LOSSES = (LABELS, *divergences.DIVERGENCES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaSSObjective:
  """Loss of the target's predictions at look-ahead tokens.

  A row x is cut after a random position m, and the look-ahead tokens
  [LA]_1..[LA]_L are appended. The loss (equation 1 of the paper) is

    -sum_{t=1..L} log p(x_{m+t+1} | x_1..x_m, [LA]_1..[LA]_t),

  averaged over `cuts` positions m of every row. With `divergence`, each term is
  the divergence from the target's distribution p(. | x_1..x_{m+t}) instead. UNO
  is trained with the total variation. One pass reads the row. A second pass
  reads the cuts * L look-ahead tokens of all cuts. Each cut's tokens attend to
  the row up to m and to each other. Only the second pass is differentiated.

  Attributes:
    model: target model.
    embeddings: look-ahead embeddings of the target.
    cuts: number of cut points per row.
    divergence: name in `training.divergences.DIVERGENCES`, or "cross_entropy".
  """

  model: Transformer
  embeddings: PaSSEmbeddings
  cuts: int = 32
  divergence: str = LABELS

  needs = ("target", "drafter")

  def __post_init__(self):
    check_fits(self.embeddings, self.model)
    if self.model.config.recurrent:
      raise ValueError("the target has recurrent layers, and look-ahead tokens "
                       "after every cut would need the state at the cut, which "
                       "training does not keep; train Medusa, MTP, EAGLE or a "
                       "parallel network")
    if self.cuts < 1:
      raise ValueError(f"cuts is {self.cuts}; it must be at least 1")
    if self.divergence not in LOSSES:
      raise ValueError(f"divergence is {self.divergence!r}; it must be one of "
                       f"{LOSSES}")

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and the loss at [LA]_t as `head_<t>/train_loss`."""
    chex.assert_rank(batch["tokens"], 2)
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    weights = weights_of(batch)
    every = self._cuts(key, weights.all)
    label = lambda x, positions, k: jnp.take_along_axis(
        x, positions + k, axis=1)
    positions = weights.of_part(every)
    row, logits = self._read(params, tokens[:, :-1], positions)

    def loss(k, logits):
      if self.divergence == LABELS:
        values = cross_entropy(logits, label(tokens[:, 1:], positions, k))
      else:
        values = divergences.DIVERGENCES[self.divergence](
            self.model.logits_at(params["target"], row, positions + k), logits)
      return weights.mean(values, label(weights.all, every, k))

    losses = self._stacked(loss, logits)
    return jnp.sum(losses), {
        f"head_{k}/train_loss": x for k, x in enumerate(losses, 1)}

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns the results of `score` for t = 1..L, stacked along axis 0.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`.
      tokens: token ids `[B, S + 1]` int32.
      key: PRNG key of the cuts.
      score: function `(t, logits [B, cuts, V], positions [B, cuts])`, called
        for the logits at [LA]_t. `positions` are the positions m of the last
        true token before each cut.
    """
    positions = self._cuts(key, jnp.ones_like(tokens[:, 1:]))
    _, logits = self._read(params, tokens[:, :-1], positions)
    return self._stacked(lambda k, x: score(k, x, positions), logits)

  def _cuts(self, key, weights):
    """Returns random cut positions `[B, cuts]` for `weights [B, S]`.

    A look-ahead token of each cut predicts a token with a positive weight. In
    rows without such cuts, all positions are possible.
    """
    batch, size = weights.shape
    count = self.embeddings.count
    if size <= count:
      raise ValueError(f"a row predicts {size} tokens and there are {count} "
                       "look-ahead tokens; give longer rows or fewer "
                       "look-ahead tokens")
    # Entry m is the mask of the tokens that a cut after position m predicts.
    useful = has_weight(weights[:, 1:], count)
    positions = jax.random.randint(key, (batch, self.cuts), 0, size - count)
    # Positions that predict no trained token are drawn again, from the useful
    # ones. The distribution is then uniform over the useful positions.
    number = jnp.sum(useful, axis=1, keepdims=True)
    again = jax.random.randint(
        jax.random.fold_in(key, 1), positions.shape, 0, jnp.maximum(number, 1))
    again = jnp.take_along_axis(
        jnp.argsort(~useful, axis=1, stable=True), again, axis=1)
    keep = jnp.take_along_axis(useful, positions, axis=1) | (number == 0)
    return jnp.where(keep, positions, again)

  def _stacked(self, score, logits):
    """Returns `score(t, logits at [LA]_t)` for t = 1..L, stacked."""
    scores = [score(t, logits[:, :, t - 1])
              for t in range(1, self.embeddings.count + 1)]
    return jax.tree.map(lambda *x: jnp.stack(x), *scores)

  def _read(self, params: Params, tokens: jax.Array, positions: jax.Array
            ) -> tuple[ModelOutput, jax.Array]:
    """Runs the target over rows, and over the look-ahead tokens after each cut.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`.
      tokens: token ids `[B, S]` int32.
      positions: position m of the last token before each cut, `[B, n]` int32.

    Returns:
      Output of the target at the rows, without gradient, and logits `[B, n, L,
      V]`. Entry t - 1 of the axis L predicts the token at position m + 1 + t.
    """
    chex.assert_rank([tokens, positions], 2)
    batch, size = tokens.shape
    cuts, count = positions.shape[1], self.embeddings.count
    branch = cuts * count
    target = params["target"]
    cache = BlockCache(lengths=jnp.zeros((batch,), jnp.int32))
    row, causal = topology.causal(batch, size)
    read = jax.lax.stop_gradient(
        self.model(target, tokens, row, causal, cache))

    steps = jnp.tile(jnp.arange(1, count + 1, dtype=jnp.int32), cuts)
    cut = jnp.repeat(jnp.arange(cuts), count)
    last = jnp.repeat(positions, count, axis=1)
    own = (cut[:, None] == cut) & (steps[:, None] >= steps)
    ancestors = jnp.concatenate(
        [row[:, None, :] <= last[..., None],
         jnp.broadcast_to(own, (batch, branch, branch))], axis=-1)
    model, extended = with_lookahead(self.model, target, params["drafter"])
    ids = jnp.broadcast_to(self.model.vocab_size - 1 + steps, (batch, branch))
    logits = model(extended, ids, last + steps, ancestors, read.cache).logits
    return read, logits.reshape(batch, cuts, count, -1)
