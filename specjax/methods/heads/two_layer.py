"""A recurrent two-layer MLP that drafts from the target's hidden state.

The module contains the heads, the network, the training loss, the strategy and
the record of the method.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.decoding import rounds
from specjax.interfaces import Verifier
from specjax.methods import networks
from specjax.methods.draft_shapes import Shape
from specjax.methods.draft_shapes import Tree
from specjax.methods.drafting import NetworkDrafter
from specjax.methods.heads import _forecasts
from specjax.methods.heads import _training
from specjax.methods.networks import check_fits
from specjax.methods.networks import Params
from specjax.methods.records import chain_of
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import Option
from specjax.methods.stop_rules import Forecast
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.methods.strategy import with_default_rule
from specjax.models.transformer import Transformer
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Score
from specjax.training.objective import weights_of
from specjax.types import DecodeState
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLayerHeads(networks.HiddenStateHeads):
  """One two-layer MLP that predicts all tokens of a draft, one after another.

  Let h_0 be the target's hidden state at the token before the root, e the
  target's embeddings, and x_0 the root. Token k = 1..K has the distribution

    h_k = h_{k-1} + W2 SiLU(W1 [h_{k-1}; e(x_{k-1})]),
    q_k = softmax(LM head h_k).

  Initially W2 is 0, so the predictions equal the LM head's.

  Attributes:
    width: hidden width D.
    vocab_size: vocabulary size V.
    heads: number K of drafted tokens.
    inner_width: number of hidden units.
  """

  width: int
  vocab_size: int
  heads: int
  inner_width: int = 512

  kind: ClassVar[str] = "two_layer"

  def __post_init__(self):
    fields.check_fields(self, "width", "vocab_size", "heads", "inner_width")

  def init(self, key: jax.Array, target_params: Params
           ) -> dict[str, jax.Array]:
    """Returns float32 parameters: `up [2 D, I]`, and `down [I, D]`, which is 0.
    """
    del target_params
    d, inner = self.width, self.inner_width
    return {"up": (2 * d)**-0.5 * jax.random.normal(key, (2 * d, inner)),
            "down": jnp.zeros((inner, d))}

  def next(self, params: Params, target_params: Params, hidden: jax.Array,
           tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns logits `[..., V]` and h_k `[..., D]` after `tokens [...]`."""
    read = jnp.concatenate(
        [hidden, target_params["embedding"][tokens]], axis=-1)
    hidden = hidden + jax.nn.silu(read @ params["up"]) @ params["down"]
    return networks.project(hidden, networks.lm_head(target_params)), hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLayer(_forecasts.HiddenStateNetwork):
  """`TwoLayerHeads` as a network.

  Attributes:
    heads: heads of the target.
  """

  heads: TwoLayerHeads

  has_loop = True

  def begin(self, params: Params, state: DecodeState, shape: Shape
            ) -> tuple[Forecast, jax.Array]:
    return self.extend(params, rounds.roots(state)[:, None],
                       state.drafter.values[:, None])

  def extend(self, params: Params, token: jax.Array, carry: jax.Array
             ) -> tuple[Forecast, jax.Array]:
    logits, hidden = self.step(
        params, token, None, None, jnp.zeros_like(token), carry)
    return (logits[:, 0], hidden[:, 0]), hidden

  def step(self, params: Params, tokens: jax.Array, depths: Any,
           ancestors: Any, above: jax.Array, carry: jax.Array
           ) -> tuple[jax.Array, jax.Array]:
    hidden = jnp.take_along_axis(carry, above[..., None], axis=1)
    return self.heads.next(
        params["drafter"], params["target"], hidden, tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLayerObjective:
  """Sum over k of decay^k times the cross-entropy of token k on the data.

  Attributes:
    model: target model. It is frozen.
    heads: heads of the target.
    decay: ratio of the weights of tokens k + 1 and k.
  """

  model: Transformer
  heads: TwoLayerHeads
  decay: float = 0.8

  needs = ("target", "drafter")

  def __post_init__(self):
    check_fits(self.heads, self.model)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and the loss of token k as `head_<k>/train_loss`."""
    del key
    params, tokens = {**frozen, **trainable}, batch["tokens"]
    losses = [
        _training.forecast_loss(logits, k, tokens, weights_of(batch))
        for k, logits in enumerate(self._logits(params, tokens), 1)]
    loss = sum(self.decay**k * x for k, x in enumerate(losses, 1))
    return loss, _training.by_head(losses)

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns `score(k, logits, positions)` of every token, stacked along K."""
    del key
    found = []
    for k, logits in enumerate(self._logits(params, tokens), 1):
      logits, positions = _training.labelled(logits, self.heads.heads)
      found.append(score(jnp.int32(k), logits, positions))
    return jax.tree.map(lambda *rows: jnp.stack(rows), *found)

  def _logits(self, params, tokens):
    """Yields logits `[B, S, V]` of tokens 1..K, which read the true tokens."""
    target = jax.lax.stop_gradient(params["target"])
    hidden = self.model(target, tokens[:, :-1]).hidden
    for k in range(1, self.heads.heads + 1):
      at = jnp.minimum(jnp.arange(hidden.shape[1]) + k, hidden.shape[1])
      logits, hidden = self.heads.next(
          params["drafter"], target, hidden, tokens[:, at])
      yield logits


def two_layer(heads: TwoLayerHeads, parents: Sequence[int],
              proposal: str = "without_replacement",
              verifier: Verifier | None = None) -> Strategy:
  """Returns a strategy that drafts a tree or chain with a two-layer MLP.

  >>> from specjax import methods
  >>> own = methods.TwoLayerHeads(width=8, vocab_size=7, heads=2)
  >>> two_layer(own, (-1, 0, 0, 1)).verifier
  Traversal()

  Args:
    heads: heads of the target.
    parents: parent index of each node of the draft tree, see `specjax.trees`.
    proposal: sampling method of children, see `drafters.Tree`.
    verifier: verification rule. None means the default of the draft's kind.
  """
  return with_default_rule(NetworkDrafter(
      network=TwoLayer(heads=heads), shape=Tree(tuple(parents), proposal)),
      verifier)


_objective = lambda target, heads: TwoLayerObjective(model=target, heads=heads)
TWO_LAYER = Method(
    name="two_layer", heads=TwoLayerHeads,
    learning_rate=LearningRate(bundled=3e-3), objective=_objective,
    measure=_objective,
    chain=lambda heads: two_layer(
        heads, chain_of(heads, heads.num_forecasts), "top_k", TOKEN),
    strategy=_training.strategy_of(two_layer),
    compared=lambda heads, tree: _training.sampled(two_layer, heads, tree()),
    head_options=(Option("inner_width", 512,
                         "two_layer: hidden units of the MLP"),))
