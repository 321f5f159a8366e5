"""Hydra, a variant of Medusa whose heads also read the drafted tokens.

Ankner et al. 2024 (arXiv:2402.05109). The module contains the heads, the
drafter, the training loss and the strategy.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import ClassVar
from typing import Self

import chex
import jax
import jax.numpy as jnp

from specjax.decoding import rounds
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods import networks
from specjax.methods.draft_shapes import Shape
from specjax.methods.draft_shapes import Tree
from specjax.methods.drafting import Network
from specjax.methods.drafting import NetworkDrafter
from specjax.methods.heads import _forecasts
from specjax.methods.heads import _training
from specjax.methods.networks import check_fits
from specjax.methods.networks import Params
from specjax.methods.records import chain_of
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
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
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraHeads:
  """Heads of Hydra, with distributions conditional on the drafted tokens.

  Ankner et al. 2024 (arXiv:2402.05109, section 3). The input of head k = 1..K
  is u = [h; e(x_0); ..; e(x_{k-1})]. h is the target's hidden state at the
  token before the root. e are the target's embeddings, x_0 is the root, and
  x_1..x_{k-1} are the drafted tokens on the path. The distribution of head k is

    z = R u + r + SiLU(W u + b),
    z <- z + SiLU(W' z + b'), repeated blocks - 1 times,
    p^(k) = softmax(U z + c).

  R, r, W, b, W', b', U and c are the parameters of head k. Each repetition of
  the second step has its own W' and b'. Initially R selects h, W and W' are 0,
  and U is the LM head. The predictions of an untrained head therefore equal the
  LM head's.

  Attributes:
    width: hidden width D.
    vocab_size: vocabulary size V.
    heads: number of heads K.
    blocks: number of residual blocks per head. The input of the first is u.
  """

  width: int
  vocab_size: int
  heads: int
  blocks: int = 1

  kind: ClassVar[str] = "hydra"

  def __post_init__(self):
    fields.check_fields(self, "width", "vocab_size", "heads", "blocks")

  @property
  def num_forecasts(self) -> int:
    """Number K of heads, which is the maximum draft length."""
    return self.heads

  @classmethod
  def for_target(cls, target: Transformer, count: int, **options: Any) -> Self:
    """Returns `count` heads with the target's width and vocabulary size."""
    return cls(width=target.config.width, vocab_size=target.vocab_size,
               heads=count, **options)

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """Returns `(target, {"target": target_params, "drafter": params})`."""
    return target, {"target": target_params, "drafter": params}

  def init(self, key: jax.Array, target_params: Params) -> dict[str, Any]:
    """Returns float32 parameters whose predictions equal the LM head's.

    Args:
      key: unused, because the parameters are not random.
      target_params: parameters of the target.

    Returns:
      Dictionary with keys `head_0`..`head_<K-1>`. Each head contains `skip` and
      `inner` with a `kernel [(k + 2) D, D]`, `block_<l>` with a `kernel [D, D]`
      for l = 1..blocks-1, and `output` with a `kernel [D, V]`. Each layer also
      has a `bias`. `head_<k>` reads k + 2 vectors of width D.
    """
    del key
    d, lm_head = self.width, networks.lm_head(target_params).astype(jnp.float32)
    linear = lambda kernel: {
        "kernel": kernel, "bias": jnp.zeros(kernel.shape[1], jnp.float32)}
    zeros = lambda *shape: linear(jnp.zeros(shape, jnp.float32))
    return {
        f"head_{k}": {
            "skip": linear(jnp.eye((k + 2) * d, d, dtype=jnp.float32)),
            "inner": zeros((k + 2) * d, d), "output": linear(lm_head),
            **{f"block_{i}": zeros(d, d) for i in range(1, self.blocks)}}
        for k in range(self.heads)}

  def head(self, params: Params, read: jax.Array) -> jax.Array:
    """Returns the logits `[..., V]` of one head.

    The size of the input determines the head.

    Args:
      params: parameters of all heads.
      read: input of `head_<k>`, `[..., (k + 2) D]`: the hidden state h and the
        embeddings of k + 1 tokens, concatenated.
    """
    own = params[f"head_{read.shape[-1] // self.width - 2}"]
    hidden = _linear(own["skip"], read) + jax.nn.silu(
        _linear(own["inner"], read))
    for block in range(1, self.blocks):
      hidden = hidden + jax.nn.silu(_linear(own[f"block_{block}"], hidden))
    output = own["output"]
    return networks.project(hidden, output["kernel"]) + output["bias"]


def _linear(params, x):
  return x @ params["kernel"] + params["bias"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hydra(Network):
  """Heads of Hydra as a network: head d predicts the nodes of depth d.

  The distribution of a node depends on the tokens above the node. With
  `Tree(parents, "top_k")` the draft is deterministic, as in the paper, and
  `verifiers.TargetWalk` is exact. The embeddings come from `params["target"]`.
  After a prompt of one token there is no hidden state, so the first draft is
  padding.

  Attributes:
    heads: heads of the target.
  """

  heads: HydraHeads

  reads_rounds = True
  has_loop = False

  @property
  def vocab_size(self) -> int:
    return self.heads.vocab_size

  @property
  def deepest(self) -> int:
    return self.heads.heads

  def bind(self, target: Model) -> "Hydra":
    check_fits(self.heads, target)
    return self

  def init(self, params: Params, prompt: Prompt, output: ModelOutput
           ) -> _forecasts.Forecast:
    return _forecasts.Forecast.of_prompt(prompt, output)

  def begin(self, params: Params, state: DecodeState, shape: Shape
            ) -> tuple[Forecast, jax.Array]:
    return self.extend(params, rounds.roots(state)[:, None],
                       state.drafter.values[:, None])

  def extend(self, params: Params, token: jax.Array, carry: jax.Array
             ) -> tuple[Forecast, jax.Array]:
    logits, paths = self.step(
        params, token, None, None, jnp.zeros_like(token), carry)
    return (logits[:, 0], paths[:, 0]), paths

  def step(self, params: Params, tokens: jax.Array, depths: Any,
           ancestors: Any, above: jax.Array, carry: jax.Array
           ) -> tuple[jax.Array, jax.Array]:
    # The carry contains the heads' inputs `[B, S, (d + 1) D]` at depth d.
    paths = jnp.take_along_axis(carry, above[..., None], axis=1)
    read = params["target"]["embedding"][tokens]
    paths = jnp.concatenate([paths, read], axis=-1)
    return self.heads.head(params["drafter"], paths), paths

  def end(self, params: Params, memory: _forecasts.Forecast, carry: Any,
          draft: Draft, slots: jax.Array | None
          ) -> tuple[Draft, _forecasts.Forecast]:
    return _common.known_only(draft, memory.known), memory

  def commit(self, params: Params, memory: _forecasts.Forecast, draft: Draft,
             slots: jax.Array | None, shape: Shape, verdict: Verdict,
             output: ModelOutput, count: jax.Array) -> _forecasts.Forecast:
    return memory.advance(output.hidden, verdict, count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraObjective:
  """Sum of the cross-entropies of all Hydra heads on the data.

  Ankner et al. 2024 (arXiv:2402.05109, section 3). The loss is

    -sum_k mean_t log p^(k)(x_{t+1+k} | h_t, x_{t+1}, .., x_{t+k}),

  where p^(k) is the distribution of head k, x_t are the tokens of a row, and
  h_t is the target's hidden state at t. The heads read the true tokens in
  training and the drafted tokens in decoding. The target is frozen.

  Attributes:
    model: target model.
    heads: heads of the target.
  """

  model: Transformer
  heads: HydraHeads

  needs = ("target", "drafter")

  def __post_init__(self):
    check_fits(self.heads, self.model)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and each head's loss as `head_<k>/train_loss`."""
    chex.assert_rank(batch["tokens"], 2)
    del key
    params, tokens = {**frozen, **trainable}, batch["tokens"]
    losses, hidden = [], self._hidden(params, tokens)

    # `checkpoint` recomputes the logits in the backward pass. Therefore memory
    # contains the logits of only one head at a time.
    @functools.partial(jax.checkpoint, static_argnums=0)
    def loss(k, own, hidden):
      logits = self._logits(params, own, hidden, tokens, k)
      return _training.forecast_loss(logits, k, tokens, weights_of(batch))

    for k in range(1, self.heads.heads + 1):
      losses.append(loss(k, params["drafter"], hidden))
    return sum(losses), _training.by_head(losses)

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns `score(k, logits, positions)` of every head, stacked along K."""
    del key
    count = self.heads.heads
    hidden, positions = _training.labelled(
        self._hidden(params, tokens), count)
    scores = [
        score(jnp.int32(k), self._logits(
            params, params["drafter"], hidden, tokens, k), positions)
        for k in range(1, count + 1)]
    return jax.tree.map(lambda *rows: jnp.stack(rows), *scores)

  def _hidden(self, params, tokens):
    return jax.lax.stop_gradient(
        self.model(params["target"], tokens[:, :-1]).hidden)

  def _logits(self, params, own, hidden, tokens, k):
    """Returns logits `[B, S, V]` of head k for `hidden [B, S, D]`."""
    table = jax.lax.stop_gradient(params["target"]["embedding"])
    at = jnp.arange(hidden.shape[1])[:, None] + jnp.arange(1, k + 1)
    after = jnp.take(tokens, jnp.minimum(at, tokens.shape[1] - 1), axis=1)
    embedded = table[after].reshape(*hidden.shape[:2], -1)
    return self.heads.head(
        own, jnp.concatenate([hidden, embedded], axis=-1))


def hydra(heads: HydraHeads, parents: Sequence[int], proposal: str = "top_k",
          verifier: Verifier | None = None) -> Strategy:
  """Returns a strategy that drafts a tree or chain with Hydra heads.

  Ankner et al. 2024 (arXiv:2402.05109). The paper drafts the most likely
  tokens. Drafts can also be sampled, because the distribution of every node
  given its path is known.

  >>> from specjax import methods, trees, verifiers
  >>> own = methods.HydraHeads(width=8, vocab_size=7, heads=2)
  >>> hydra(own, trees.full_tree((3, 2))).verifier
  TargetWalk()
  >>> hydra(own, (-1, 0, 1), "iid", verifiers.Block()).drafter.chain
  True

  Args:
    heads: heads of the target.
    parents: parent index of each node of the draft tree, including the root.
      The depth is at most the number of heads K. `range(-1, K)` is a chain of K
      tokens.
    proposal: sampling method of children: "top_k", "without_replacement" or
      "iid".
    verifier: verification rule. None means `TargetWalk` for "top_k", `Block`
      for a sampled chain and `Traversal` for a sampled tree.
  """
  drafter = NetworkDrafter(
      network=Hydra(heads=heads), shape=Tree(tuple(parents), proposal))
  return with_default_rule(drafter, verifier)


def _hydra_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  tree = tree()
  return {"top-k tree": (hydra(heads, tree),),
          **_training.sampled(hydra, heads, tree)}


HYDRA = Method(
    name="hydra", heads=HydraHeads,
    learning_rate=LearningRate(
        bundled=6e-3, published=5e-4, source="README of the Hydra repository"),
    objective=lambda target, heads: HydraObjective(model=target, heads=heads),
    measure=lambda target, heads: HydraObjective(model=target, heads=heads),
    chain=lambda heads: hydra(
        heads, chain_of(heads, heads.num_forecasts), "top_k", TOKEN),
    strategy=_training.strategy_of(hydra), compared=_hydra_compared,
    head_options=(_training.BLOCKS,))
