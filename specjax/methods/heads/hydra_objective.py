"""Hydra: heads that read the tokens before theirs (arXiv:2402.05109)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.methods.heads import _objectives as heads_lib
from specjax.methods.heads.hydra_network import HydraHeads
from specjax.methods.networks import check_fits
from specjax.models.transformer import Transformer
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import Score
from specjax.training.objective import weights_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hydra:
  """L = -sum_k mean_t log p^(k)(x_{t+1+k} | h_t, x_{t+1}, .., x_{t+k}).

  Ankner et al. 2024 (arXiv:2402.05109, section 3), on the data: heads read the
  true tokens in training and drafted ones in decoding. The target is frozen.

  Attributes:
    model: the target.
    heads: of the target.
  """

  model: Transformer
  heads: HydraHeads

  needs = ("target", "drafter")

  def __post_init__(self):
    check_fits(self.heads, self.model)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """The loss, and each head's own as `head_<k>/train_loss`."""
    del key
    params, tokens = {**frozen, **trainable}, batch["tokens"]
    losses, hidden = [], self._hidden(params, tokens)

    # The logits of one head at a time are kept.
    @functools.partial(jax.checkpoint, static_argnums=0)
    def loss(k, own, hidden):
      logits = self._logits(params, own, hidden, tokens, k)
      return heads_lib.forecast_loss(logits, k, tokens, weights_of(batch))

    for k in range(1, self.heads.heads + 1):
      losses.append(loss(k, params["drafter"], hidden))
    return sum(losses), heads_lib.by_head(losses)

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """`score(k, logits, positions)` of every head, stacked along K."""
    del key
    count = self.heads.heads
    hidden, positions = heads_lib.labelled(self._hidden(params, tokens), count)
    scores = [
        score(jnp.int32(k), self._logits(
            params, params["drafter"], hidden, tokens, k), positions)
        for k in range(1, count + 1)]
    return jax.tree.map(lambda *rows: jnp.stack(rows), *scores)

  def _hidden(self, params, tokens):
    return jax.lax.stop_gradient(
        self.model(params["target"], tokens[:, :-1]).hidden)

  def _logits(self, params, own, hidden, tokens, k):
    """`[B, S, V]` of head k at the positions of `hidden [B, S, D]`."""
    table = jax.lax.stop_gradient(params["target"]["embedding"])
    at = jnp.arange(hidden.shape[1])[:, None] + jnp.arange(1, k + 1)
    after = jnp.take(tokens, jnp.minimum(at, tokens.shape[1] - 1), axis=1)
    embedded = table[after].reshape(*hidden.shape[:2], -1)
    return self.heads.head(
        own, jnp.concatenate([hidden, embedded], axis=-1))
