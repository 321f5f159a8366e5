"""PaSS: embeddings of look-ahead tokens, and their training loss.

Monea et al. 2023 (arXiv:2311.13581). The drafter is in `pass_lookahead`.
"""

import dataclasses
from typing import Any
from typing import ClassVar
from typing import Self

import jax
import jax.numpy as jnp

from specjax.caches.dense import BlockCache
from specjax.methods.networks import check_fits
from specjax.methods.networks import Params
from specjax.models.transformer import Transformer
from specjax.training.next_token import cross_entropy
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Score
from specjax.training.objective import weighted_mean
from specjax.training.objective import weights_of
from specjax.trees import topology
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaSSEmbeddings:
  """The embeddings of [LA]_1..[LA]_L (PaSS, Monea et al. 2023).

  arXiv:2311.13581, section 3. The only parameters: L D numbers.

  Attributes:
    count: L, look-ahead tokens; their ids are V..V + L - 1.
    width: D.
  """

  count: int
  width: int

  kind: ClassVar[str] = "lookahead"

  def __post_init__(self):
    fields.check_fields(self, "count", "width")

  @property
  def num_forecasts(self) -> int:
    """L, tokens after the next one that are forecast."""
    return self.count

  @classmethod
  def for_target(cls, target: Transformer, count: int) -> Self:
    """`count` look-ahead tokens of the target's width."""
    return cls(count=count, width=target.config.width)

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """`(target, {"target", "drafter"})`, the target with the embeddings."""
    target, extended = with_lookahead(target, target_params, params)
    return target, {"target": extended, "drafter": ()}

  def init(self, key: jax.Array, target_params: Params
           ) -> dict[str, jax.Array]:
    """`{"embeddings": [L, D]}` float32, spread as the target's embeddings are.

    Args:
      key: a PRNG key.
      target_params: of the `Transformer` that the embeddings are for.
    """
    table = target_params["embedding"].astype(jnp.float32)
    noise = jax.random.normal(key, (self.count, self.width), jnp.float32)
    return {"embeddings": table.mean(0) + table.std(0) * noise}


def with_lookahead(target: Transformer, params: Params, embeddings: Params
                   ) -> tuple[Transformer, dict[str, Any]]:
  """The same target, which can also read look-ahead tokens.

  Args:
    target: the `Transformer` that the embeddings are for.
    params: its parameters.
    embeddings: `{"embeddings": [L, D]}`, of `PaSSEmbeddings`.

  Returns:
    `(target, params)`, with which a decoder drafts by `drafters.PaSS`. On
    ids below V they are what they were.

  Raises:
    ValueError: the embeddings are of another width.
  """
  table = embeddings["embeddings"]
  count, width = table.shape
  if width != target.config.width:
    raise ValueError(
        f"width of the look-ahead embeddings is {width} and of the target "
        f"{target.config.width}; both must be equal: train them for this "
        "target")
  config = dataclasses.replace(target.config, lookahead=count)
  table = table.astype(params["embedding"].dtype)
  return dataclasses.replace(target, config=config), {
      **params, "lookahead": table}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaSSObjective:
  """-sum_{t=1..L} log p(x_{m+t+1} | x_1..x_m, [LA]_1..[LA]_t) (equation 1).

  The mean over `cuts` random m of every row. The row is read once, and the
  look-ahead tokens of all its cuts hang under it as branches of a tree: one
  pass of cuts * L tokens, the only one that is differentiated.

  Attributes:
    model: the target.
    embeddings: of the target.
    cuts: cut points of a row.
  """

  model: Transformer
  embeddings: PaSSEmbeddings
  cuts: int = 32

  needs = ("target", "drafter")

  def __post_init__(self):
    check_fits(self.embeddings, self.model)
    if self.cuts < 1:
      raise ValueError(f"cuts is {self.cuts}; a row needs at least one cut")

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """The loss, and each token's own as `head_<t>/train_loss`."""
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    weights = weights_of(batch)

    def loss(k, logits, positions):
      label = lambda x: jnp.take_along_axis(x, positions + k, axis=1)
      return weighted_mean(
          cross_entropy(logits, label(tokens[:, 1:])), label(weights))

    losses = self.score(params, tokens, key, loss)
    return jnp.sum(losses), {
        f"head_{k}/train_loss": x for k, x in enumerate(losses, 1)}

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """`score(t, logits [B, cuts, V], positions [B, cuts])`, stacked along L.

    Args:
      params: `{"target", "drafter"}`.
      tokens: `[B, S + 1]`.
      key: of the cuts; `positions` are those of the last token read, m.
      score: called for t = 1..L.
    """
    batch, size = tokens.shape[0], tokens.shape[1] - 1
    count = self.embeddings.count
    if size <= count:
      raise ValueError(f"a row predicts {size} tokens and there are {count} "
                       "look-ahead tokens; give longer rows or fewer of them")
    positions = jax.random.randint(key, (batch, self.cuts), 0, size - count)
    logits = self.logits(params, tokens[:, :-1], positions)
    scores = [score(t, logits[:, :, t - 1], positions)
              for t in range(1, count + 1)]
    return jax.tree.map(lambda *x: jnp.stack(x), *scores)

  def logits(self, params: Params, tokens: jax.Array, positions: jax.Array
             ) -> jax.Array:
    """What [LA]_1..[LA]_L predict after each cut.

    Args:
      params: `{"target", "drafter"}`.
      tokens: `[B, S]` int32.
      positions: `[B, n]` int32, of the last token that a cut sees.

    Returns:
      `[B, n, L, V]`; entry t - 1 is the law of the token at position + 1 + t.
    """
    batch, size = tokens.shape
    cuts, count = positions.shape[1], self.embeddings.count
    branch = cuts * count
    target = params["target"]
    cache = BlockCache(lengths=jnp.zeros((batch,), jnp.int32))
    row, causal = topology.causal(batch, size)
    cache = jax.lax.stop_gradient(
        self.model(target, tokens, row, causal, cache).cache)

    steps = jnp.tile(jnp.arange(1, count + 1, dtype=jnp.int32), cuts)
    cut = jnp.repeat(jnp.arange(cuts), count)
    last = jnp.repeat(positions, count, axis=1)
    own = (cut[:, None] == cut) & (steps[:, None] >= steps)
    ancestors = jnp.concatenate(
        [row[:, None, :] <= last[..., None],
         jnp.broadcast_to(own, (batch, branch, branch))], axis=-1)
    model, extended = with_lookahead(self.model, target, params["drafter"])
    ids = jnp.broadcast_to(self.model.vocab_size - 1 + steps, (batch, branch))
    logits = model(extended, ids, last + steps, ancestors, cache).logits
    return logits.reshape(batch, cuts, count, -1)
