"""Kangaroo: the target's first layers and a trained layer draft a chain.

See Liu et al. 2024 (arXiv:2404.18911). The trained layer is called the adapter:
it reads the output of the target's first layers, and the target's LM head
computes draft logits from its output. The module contains the adapter, the
network, the training loss and the strategy.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import ClassVar

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import verifiers
from specjax.decoding.prefill import read_prompt
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import stop_rules
from specjax.methods.draft_shapes import Chain
from specjax.methods.draft_shapes import Shape
from specjax.methods.drafting import NetworkDrafter
from specjax.methods.networks import check_fits
from specjax.methods.networks import Params
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import Option
from specjax.methods.self_speculation import early_exit
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.models.shortened import check_exit
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Score
from specjax.training.objective import weights_of
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields

_LAYER = Sublayers.between(0, 1)
_SHARED = ("embedding", "head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KangarooAdapter:
  """Kangaroo's adapter: a decoder layer and a norm after the first layers.

  See Liu et al. 2024 (arXiv:2404.18911, section 3.2). The adapter reads the
  residual stream after the target's first `exit` layers, and the target's LM
  head reads the adapter's output. The adapter's parameters are those of a
  one-layer `Transformer` with the target's sizes, without embedding and LM
  head.

  Attributes:
    width: hidden width D.
    vocab_size: vocabulary size V.
    exit: number E of target layers before the adapter; 2 or 3 in the paper.
    forecasts: number K of consecutive draft tokens that are evaluated on
      held-out data.
  """

  width: int
  vocab_size: int
  exit: int
  forecasts: int = 3

  kind: ClassVar[str] = "kangaroo"

  def __post_init__(self):
    fields.check_fields(self, "width", "vocab_size", "exit", "forecasts")

  @property
  def num_forecasts(self) -> int:
    """Number of consecutive draft tokens that are evaluated."""
    return self.forecasts

  @classmethod
  def for_target(cls, target: Transformer, count: int, exit: int
                 ) -> "KangarooAdapter":
    """Returns an adapter with the target's width and vocabulary size.

    Args:
      target: target model.
      count: number of consecutive draft tokens that are evaluated.
      exit: number of target layers before the adapter.

    Raises:
      ValueError: the target does not have more than `exit` layers.
    """
    check_exit(exit, target)
    return cls(width=target.config.width, vocab_size=target.vocab_size,
               forecasts=count, exit=exit)

  def init(self, key: jax.Array, target_params: Params) -> dict[str, Any]:
    """Returns initial parameters, float32 copies of the target's.

    They are copied from the target's layer `exit`, the first layer that the
    adapter replaces, and from its final norm.

    Args:
      key: PRNG key, not used.
      target_params: parameters of the target.

    Returns:
      Parameters of layer 0 and of the final norm of a `Transformer`.
    """
    del key
    end = f"_{self.exit}"
    layer = {name.removesuffix(end) + "_0": x
             for name, x in target_params.items() if name.endswith(end)}
    params = {**layer, "final_norm": target_params["final_norm"]}
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """Returns `(target, {"target": target_params, "drafter": params})`."""
    return target, {"target": target_params, "drafter": params}

  def model(self, target: Transformer) -> Transformer:
    """Returns the adapter as a `Transformer` of one layer.

    Args:
      target: target model, whose sizes are used.
    """
    config = target.config
    windows = config.windows[self.exit:self.exit + 1]
    return dataclasses.replace(target, config=dataclasses.replace(
        config, layers=1, features=(), windows=windows))

  def parameters(self, params: Mapping[str, chex.ArrayTree]) -> dict[str, Any]:
    """Returns the parameters of the adapter as a `Transformer`.

    They are the adapter's parameters and the target's embedding and LM head.

    Args:
      params: `{"target": ..., "drafter": parameters of the adapter}`.
    """
    shared = {name: x for name, x in params["target"].items()
              if name in _SHARED}
    return {**shared, **params["drafter"]}


@struct.dataclass
class Caches(Cache):
  """Caches of the target's first layers and of Kangaroo's adapter.

  Attributes:
    exit: cache of the target's first layers.
    adapter: cache of the adapter, which is one decoder layer.
  """

  exit: Any
  adapter: Any

  @property
  def lengths(self) -> jax.Array:
    return self.adapter.lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptedExit(Model):
  """Language model of the target's first layers and Kangaroo's adapter.

  This model has its own caches. So it can draft independently of the verifying
  pass, like any draft model. Its parameters are `{"target": ..., "drafter":
  parameters of the adapter}`.

  Attributes:
    target: target model.
    adapter: adapter of the target.
  """

  target: Transformer
  adapter: KangarooAdapter

  @property
  def vocab_size(self) -> int:
    return self.target.vocab_size

  @property
  def context_length(self) -> int:
    return self.target.context_length

  def init_cache(self, params: chex.ArrayTree, batch: int, capacity: int
                 ) -> Caches:
    """Returns empty caches for `batch` rows with `capacity` slots each."""
    empty = lambda model, layers: model.init_cache(
        params["target"], batch, capacity, layers=layers)
    return Caches(exit=empty(self.target, self.adapter.exit),
                  adapter=empty(self.adapter.model(self.target), 1))

  def __call__(self, params: chex.ArrayTree, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Caches | None = None
               ) -> ModelOutput:
    """Runs the first layers and the adapter on tokens; see `Model`."""
    exit = self.target.run(
        params["target"], Sublayers.between(0, self.adapter.exit), tokens,
        depths, ancestors, cache and cache.exit)
    return self.after(params, exit, depths, ancestors,
                      cache and cache.replace(exit=exit.cache))

  def after(self, params: chex.ArrayTree, exit: ModelOutput,
            depths: jax.Array | None = None, ancestors: jax.Array | None = None,
            cache: Caches | None = None) -> ModelOutput:
    """Runs the adapter on the output of the target's first layers.

    Args:
      params: `{"target": ..., "drafter": parameters of the adapter}`.
      exit: output of the target's first layers.
      depths: depths of the tokens, see `interfaces.Model`.
      ancestors: attention mask, see `interfaces.Model`.
      cache: caches of the earlier tokens; None if there are no earlier tokens.
    """
    out = self.adapter.model(self.target).run(
        self.adapter.parameters(params), _LAYER, None, depths, ancestors,
        cache and cache.adapter, hidden=exit.hidden)
    return out.replace(cache=cache and cache.replace(adapter=out.cache))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kangaroo(early_exit.EarlyExit):
  """The target's first layers and an adapter after them.

  The verifying pass runs only the target's other layers, as in `EarlyExit`. The
  memory is the adapter's cache. `params["drafter"]` contains the parameters of
  the adapter.

  Attributes:
    adapter: adapter of the target.
    exit: number of target layers before the adapter, set from `adapter.exit`.
  """

  adapter: KangarooAdapter
  exit: int = 1

  stateless = False

  def __post_init__(self):
    object.__setattr__(self, "exit", self.adapter.exit)
    super().__post_init__()

  def bind(self, target: Model) -> "Kangaroo":
    check_fits(self.adapter, target)
    return super().bind(target)

  @property
  def _adapted(self) -> AdaptedExit:
    return AdaptedExit(target=self.model, adapter=self.adapter)

  def init(self, params: chex.ArrayTree, prompt: Prompt, output: ModelOutput
           ) -> Cache:
    return read_prompt(self._adapted, params, prompt).cache.adapter

  def predict(self, params: chex.ArrayTree, output: ModelOutput,
              depths: jax.Array, ancestors: jax.Array, adapter: Cache
              ) -> tuple[ModelOutput, Any]:
    out = self._adapted.after(
        params, output, depths, ancestors,
        Caches(exit=output.cache, adapter=adapter))
    return out, out.cache.adapter

  def commit(self, params: chex.ArrayTree, memory: Any, draft: Draft,
             slots: jax.Array | None, shape: Shape, verdict: Verdict,
             output: ModelOutput, count: jax.Array) -> Cache:
    cache = (memory.adapter if isinstance(memory, early_exit.Begun) else memory)
    if slots is None:
      # The cache contains the tokens of a chain in order, and the accepted ones
      # are a prefix. So `rollback`, which sets the length, is sufficient.
      return cache.rollback(cache.lengths + count).settle()
    places = jnp.array(np.argsort(early_exit.order(shape)), jnp.int32)
    return cache.commit(places[verdict.path], count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KangarooObjective:
  """Training loss of Kangaroo's adapter, -mean_t sum_v p_t(v) log q_t(v).

  p_t is the target's and q_t the adapter's distribution of the next token v
  after position t (Liu et al. 2024, arXiv:2404.18911, section 3.2). The
  adapter reads the residual stream of the same pass of the target that computes
  p_t.

  Attributes:
    model: target model.
    adapter: adapter to train.
  """

  model: Transformer
  adapter: KangarooAdapter

  needs = ("target", "drafter")

  def __post_init__(self):
    # The result is not used. `for_target` is called because it raises an error
    # if the target has too few layers.
    type(self.adapter).for_target(
        self.model, self.adapter.forecasts, exit=self.adapter.exit)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and the metric `acceptance`, the acceptance rate.

    The metric is the mean of sum_v min(p(v), q(v)) over positions, with the
    target's distribution p and the adapter's distribution q.
    """
    chex.assert_rank(batch["tokens"], 2)
    del key
    params = {**frozen, **trainable}
    p_logits, q_logits = self._logits(params, batch["tokens"][:, :-1])
    p = jax.nn.softmax(jax.lax.stop_gradient(p_logits))
    log_q = jax.nn.log_softmax(q_logits)
    accepted = jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)
    weights = weights_of(batch)
    return -weights.mean(jnp.sum(p * log_q, axis=-1)), {
        "acceptance": weights.mean(jax.lax.stop_gradient(accepted))}

  def _logits(self, params: Params, tokens: jax.Array
              ) -> tuple[jax.Array, jax.Array]:
    """Returns the target's and the adapter's logits, `[B, S, V]` each.

    Args:
      params: `{"target": ..., "drafter": parameters of the adapter}`.
      tokens: token ids `[B, S]` int32.
    """
    target, at = jax.lax.stop_gradient(params["target"]), self.adapter.exit
    exit = self.model.run(target, Sublayers.between(0, at), tokens)
    rest = self.model.run(
        target, Sublayers.between(at, self.model.config.layers),
        hidden=exit.hidden)
    adapted = AdaptedExit(target=self.model, adapter=self.adapter)
    return rest.logits, adapted.after(
        {**params, "target": target}, exit).logits

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Evaluates the adapter's prediction of the k-th draft token, k = 1..K.

    The adapter reads the true tokens of the row. So it predicts draft token k
    as if the first k - 1 draft tokens had been accepted.

    Args:
      params: `{"target": ..., "drafter": parameters of the adapter}`.
      tokens: token ids `[B, S + 1]` int32 of B rows.
      key: PRNG key, not used.
      score: function `(k, logits, positions)` that evaluates the logits;
        `positions` are the positions after which the drafts begin.

    Returns:
      The K results of `score`, stacked.
    """
    del key
    logits = self._logits(params, tokens[:, :-1])[1]
    count, size = self.adapter.forecasts, logits.shape[1]
    if size <= count:
      raise ValueError(f"a row predicts {size} tokens and there are {count} "
                       "forecasts; give longer rows or fewer forecasts")
    positions = jnp.broadcast_to(
        jnp.arange(size - count), (logits.shape[0], size - count))
    scores = [score(k, logits[:, k:size - count + k], positions)
              for k in range(1, count + 1)]
    return jax.tree.map(lambda *x: jnp.stack(x), *scores)


_UNSURE = stop_rules.Confidence(threshold=0.6, likeliest=True)


def kangaroo(adapter: KangarooAdapter, gamma: int,
             stop: stop_rules.StopRule | None = _UNSURE,
             verifier: Verifier = BLOCK) -> Strategy:
  """Returns the strategy Kangaroo (Liu et al. 2024, arXiv:2404.18911).

  The target's first layers and a trained layer after them draft a chain. By
  default, a chain ends after a token if the largest probability of its draft
  distribution is below 0.6. At temperature 0 the largest probability is always
  1, so no chain ends early.

  >>> from specjax.methods.self_speculation.kangaroo import KangarooAdapter
  >>> adapter = KangarooAdapter(width=16, vocab_size=7, exit=1)
  >>> kangaroo(adapter, gamma=6).drafter.stop.threshold
  0.6

  Args:
    adapter: adapter; its parameters are `params["drafter"]`.
    gamma: maximum draft length, 6 in the paper.
    stop: stop rule; None drafts gamma tokens in all chains.
    verifier: verification rule for chains. `GreedyBlock` cannot be combined
      with a stop rule.
  """
  return Strategy(NetworkDrafter(
      network=Kangaroo(adapter=adapter), shape=Chain(gamma, stop)), verifier)


KANGAROO = Method(
    name="kangaroo", heads=KangarooAdapter,
    learning_rate=LearningRate(
        bundled=1e-3, published=5e-5,
        source="start_train.py of the Kangaroo repository"),
    objective=lambda target, heads: KangarooObjective(
        model=target, adapter=heads),
    measure=lambda target, heads: KangarooObjective(
        model=target, adapter=heads),
    chain=lambda heads: kangaroo(
        heads, heads.num_forecasts, stop=None, verifier=TOKEN),
    strategy=lambda heads, verifier, gamma, tree: kangaroo(
        heads, gamma, stop=None, verifier=verifier or BLOCK),
    compared=lambda heads, tree: {"": tuple(
        kangaroo(heads, heads.num_forecasts, None, rule)
        for rule in (BLOCK, TOKEN, verifiers.GreedyBlock()))},
    head_options=(Option("exit", 1, "kangaroo: number of target layers that "
                         "run before the adapter"),))
