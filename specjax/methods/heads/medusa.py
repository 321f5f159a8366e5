"""Medusa, which drafts from independent heads on the last hidden state.

Cai et al. 2024 (arXiv:2401.10774). The module contains the heads, the network,
the training losses Medusa-1 and Medusa-2, and the strategies.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import verifiers
from specjax.interfaces import Verifier
from specjax.methods import networks
from specjax.methods.draft_shapes import Shape
from specjax.methods.draft_shapes import Tree
from specjax.methods.drafting import NetworkDrafter
from specjax.methods.heads import _forecasts
from specjax.methods.heads import _training
from specjax.methods.networks import check_fits
from specjax.methods.networks import Params
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import Option
from specjax.methods.records import RECURSIVE
from specjax.methods.stop_rules import Forecast
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.methods.strategy import TRAVERSAL
from specjax.models.transformer import Transformer
from specjax.training import divergences
from specjax.training.next_token import cross_entropy
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Score
from specjax.training.objective import Weights
from specjax.training.objective import weights_of
from specjax.types import DecodeState
from specjax.utils import fields

_OUTPUTS = ("own", "low_rank", "shared")
_OWN_UP_TO = 8192  # largest vocabulary for which "auto" is "own"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaHeads(networks.HiddenStateHeads):
  """Heads of Medusa, with residual blocks and an output matrix per position.

  Cai et al. 2024 (arXiv:2401.10774, section 2.1.1). For the target's last
  hidden state h, head k has the distribution

    p^(k) = softmax(W2_k (SiLU(W1_k h) + h)).

  Initially W1 is 0 and W2 is the LM head, so the predictions of an untrained
  head equal the LM head's.

  Attributes:
    width: hidden width D.
    vocab_size: vocabulary size V.
    heads: number of heads K.
    blocks: number of consecutive residual blocks `h + SiLU(W1 h)` per head.
    output: form of W2_k. "own" is a separate matrix per head. "low_rank" is the
      LM head plus A_k B_k, with B_k = 0 initially. "shared" is the LM head
      itself. "auto" means "own" for a vocabulary of at most 8192 tokens and the
      default rank, otherwise "low_rank". The LM head is not a parameter of the
      heads, but an argument of `head`.
    rank: number of columns of A_k if `output` is "low_rank".
    bias: True if the blocks have a bias, as in the published heads. The bias is
      initially 0.
  """

  width: int
  vocab_size: int
  heads: int
  blocks: int = 1
  output: str = "own"
  rank: int = 64
  bias: bool = False

  kind: ClassVar[str] = "medusa"

  def __post_init__(self):
    fields.check_fields(
        self, "width", "vocab_size", "heads", "blocks", "rank")
    if self.output == "auto":
      small = self.vocab_size <= _OWN_UP_TO and self.rank == MedusaHeads.rank
      object.__setattr__(self, "output", "own" if small else "low_rank")
    if self.output not in _OUTPUTS:
      raise ValueError(f"output is {self.output!r}; it must be one of auto, "
                       f"{', '.join(_OUTPUTS)}")

  def init(self, key: jax.Array, target_params: Params
           ) -> dict[str, jax.Array]:
    """Returns float32 parameters whose predictions equal the LM head's.

    Args:
      key: PRNG key.
      target_params: parameters of the target.

    Returns:
      Dictionary of arrays: `blocks [K, blocks, D, D]`, and with `bias` also
      `block_bias [K, blocks, D]`. With "own" output it also contains
      `output [K, D, V]`. With "low_rank" output it also contains
      `down [K, D, rank]` (A_k) and `up [K, rank, V]` (B_k).
    """
    k, d, v = self.heads, self.width, self.vocab_size
    params = {"blocks": jnp.zeros((k, self.blocks, d, d), jnp.float32)}
    if self.bias:
      params["block_bias"] = jnp.zeros((k, self.blocks, d), jnp.float32)
    if self.output == "own":
      head = networks.lm_head(target_params).astype(jnp.float32)
      params["output"] = jnp.tile(head, (k, 1, 1))
    elif self.output == "low_rank":
      params["down"] = d**-0.5 * jax.random.normal(
          key, (k, d, self.rank), jnp.float32)
      params["up"] = jnp.zeros((k, self.rank, v), jnp.float32)
    return params

  def merged(self, params: Params, target_params: Params
             ) -> tuple["MedusaHeads", dict[str, Any]]:
    """Returns equivalent heads with a separate output matrix per head.

    The output matrix of head k is the LM head, plus A_k B_k if `output` is
    "low_rank". The K matrices have K D V parameters. In comparison, all A_k and
    B_k together have K rank (D + V) parameters.

    Args:
      params: parameters of the heads.
      target_params: parameters of the target.

    Returns:
      `(heads, params)`. If `output` is not "own" already, `params["output"]` is
      a float32 array in host memory.
    """
    heads = dataclasses.replace(self, output="own", rank=MedusaHeads.rank)
    if self.output == "own":
      return heads, dict(params)
    kept = {name: x for name, x in params.items() if name.startswith("block")}
    head = np.asarray(networks.lm_head(target_params), np.float32)
    output = np.empty((self.heads, *head.shape), np.float32)
    for k in range(self.heads):
      output[k] = head
      if self.output == "low_rank":
        output[k] += np.asarray(params["down"][k], np.float32) @ np.asarray(
            params["up"][k], np.float32)
    return heads, {**kept, "output": output}

  def head(self, params: Params, hidden: jax.Array, lm_head: jax.Array
           ) -> jax.Array:
    """Returns the logits `[..., V]` of one head.

    Args:
      params: parameters of one head, without the axis K.
      hidden: hidden states `[..., D]`.
      lm_head: LM head `[D, V]`.
    """
    chex.assert_axis_dimension(hidden, -1, self.width)
    for i in range(self.blocks):
      inner = hidden @ params["blocks"][i]
      if self.bias:
        inner = inner + params["block_bias"][i]
      hidden = hidden + jax.nn.silu(inner)
    if self.output == "own":
      return networks.project(hidden, params["output"])
    logits = networks.project(hidden, lm_head)
    if self.output == "low_rank":
      logits = logits + networks.project(hidden @ params["down"], params["up"])
    return logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa(_forecasts.ProductNetwork, _forecasts.HiddenStateNetwork):
  """Independent heads as a network: head d predicts all nodes of depth d.

  `Tree(parents, "top_k")` with `trees.medusa_tree` is the deterministic draft
  of the paper. For this draft `verifiers.TargetWalk` is exact, and
  `verifiers.Typical` is the paper's lossy rule. The LM head comes from
  `params["target"]`.

  Attributes:
    heads: heads of the target, `MedusaHeads` or `BlockwiseHeads`.
  """

  heads: networks.HiddenStateHeads

  def begin(self, params: Params, state: DecodeState, shape: Shape
            ) -> tuple[Forecast, Any]:
    hidden = state.drafter.values
    used = jax.tree.map(lambda x: x[:shape.depth], params["drafter"])
    logits = self.heads(used, hidden, networks.lm_head(params["target"]))
    hidden = jnp.broadcast_to(
        hidden[:, None], (*logits.shape[:2], hidden.shape[-1]))
    return self.extend(
        params, None, ((logits, hidden), jnp.zeros((), jnp.int32)))


_RAMPS = {
    "sine": lambda progress: jnp.sin(jnp.pi / 2 * progress),
    "linear": lambda progress: progress,
    "constant": jnp.ones_like,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaObjective:
  """Loss of Medusa-1, a weighted sum of the heads' cross-entropies.

  The loss is L1 = -sum_k decay^k mean_t log p^(k)(x_{t+1+k}) (equation 1 of the
  paper). p^(k) is the distribution of head k = 1..K at position t, and x_t are
  the tokens of a row.

  Attributes:
    model: target model.
    heads: heads of the target.
    decay: ratio of the weights of heads k + 1 and k; 0.8 in the paper.
  """

  model: Transformer
  heads: MedusaHeads
  decay: float = 0.8

  needs = ("target", "drafter")

  def __post_init__(self):
    check_fits(self.heads, self.model)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and each head's loss as `head_<k>/train_loss`."""
    chex.assert_rank(batch["tokens"], 2)
    del key
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    hidden = self.model(params["target"], tokens[:, :-1]).hidden
    return self.loss(params, hidden, tokens, weights_of(batch),
                     "target" in trainable)

  def loss(self, params: Params, hidden: jax.Array, tokens: jax.Array,
           weights: Weights, tuned: bool) -> Loss:
    """Returns `(L1, metrics)`.

    The LM head gets no gradient.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`.
      hidden: hidden states `[B, S, D]` of the target.
      tokens: token ids `[B, S + 1]` int32.
      weights: weights of the tokens after the first.
      tuned: True if `hidden` gets a gradient, to train the target.
    """
    chex.assert_rank([hidden, tokens], [3, 2])
    losses = _training.head_losses(
        self.heads, params["drafter"], hidden, tokens, weights,
        networks.lm_head(params["target"]), tuned)
    numbers = jnp.arange(1, len(losses) + 1)
    return jnp.sum(self.decay**numbers * losses), _training.by_head(losses)

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns `score(k, logits, positions)` of every head, stacked along K."""
    del key
    hidden = self.model(params["target"], tokens[:, :-1]).hidden
    return _training.score_heads(
        self.heads, params["drafter"], hidden,
        networks.lm_head(params["target"]), score)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaJointObjective:
  """Loss of Medusa-2, which trains the target together with its heads.

  The loss is L_LM + lambda_0 L1 (section 2.2.2 of the paper). L_LM is the
  target's next-token loss, and L1 is the loss of `MedusaObjective`. As in the
  published code, lambda_0 is the product of `weight` and a ramp:
  sin(pi/2 progress), progress or 1. progress in [0, 1] is the completed
  fraction of the training run.

  Attributes:
    medusa: objective of L1.
    weight: peak of lambda_0; 0.2 in the paper.
    ramp: ramp of lambda_0: "sine", "linear" or "constant".
    distill: form of L_LM. True for the KL divergence from the target as it was
      before training, with parameters `frozen["teacher"]`. False for the
      cross-entropy of the data. Use True for data generated by the target
      (section 2.3.2).
  """

  medusa: MedusaObjective
  weight: float = 0.2
  ramp: str = "sine"
  distill: bool = False

  def __post_init__(self):
    if self.ramp not in _RAMPS:
      raise ValueError(f"ramp is {self.ramp!r}; it must be one of "
                       f"{', '.join(_RAMPS)}")

  @property
  def model(self) -> Transformer:
    """Target model."""
    return self.medusa.model

  @property
  def needs(self) -> tuple[str, ...]:
    """Names of the parameters that the loss reads."""
    return (*self.medusa.needs, *(("teacher",) if self.distill else ()))

  def heads_weight(self, progress: jax.Array) -> jax.Array:
    """Returns lambda_0 `[]` at the fraction `progress []` of the run."""
    return self.weight * _RAMPS[self.ramp](jnp.asarray(progress, jnp.float32))

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss and metrics.

    The metrics are `lm_loss` (L_LM), `heads_weight` (lambda_0), and each head's
    loss as `head_<k>/train_loss`.
    """
    chex.assert_rank(batch["tokens"], 2)
    del key
    params = {**frozen, **trainable}
    tokens, weights = batch["tokens"], weights_of(batch)
    output = self.model(params["target"], tokens[:, :-1])
    if self.distill:
      teacher = self.model(
          jax.lax.stop_gradient(params["teacher"]), tokens[:, :-1])
      nats = divergences.forward_kl(teacher.logits, output.logits)
    else:
      nats = cross_entropy(output.logits, tokens[:, 1:])
    lm_loss = weights.mean(nats)
    loss, metrics = self.medusa.loss(
        params, output.hidden, tokens, weights, "target" in trainable)
    weight = self.heads_weight(batch["progress"])
    return lm_loss + weight * loss, {
        "lm_loss": lm_loss, "heads_weight": weight, **metrics}

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns `score(k, logits, positions)` of every head, stacked along K."""
    return self.medusa.score(params, tokens, key, score)


def medusa(heads: networks.HiddenStateHeads, parents: Sequence[int],
           typical: bool = False) -> Strategy:
  """Returns a strategy that drafts a tree of the heads' most likely tokens.

  Cai et al. 2024 (arXiv:2401.10774). The default rule `verifiers.TargetWalk` is
  exact. The paper's typical acceptance is LOSSY.

  >>> from specjax import trees
  >>> from specjax import methods
  >>> own = methods.MedusaHeads(width=8, vocab_size=7, heads=2)
  >>> medusa(own, trees.full_tree((3, 2))).verifier
  TargetWalk()
  >>> medusa(own, trees.full_tree((3, 2)), typical=True).verifier.lossless
  False

  Args:
    heads: heads of the target, `MedusaHeads` or `BlockwiseHeads`.
    parents: parent index of each node of the draft tree, including the root.
      The depth is at most the number of heads. `trees.medusa_tree` finds the
      paper's tree from measured accuracies.
    typical: True for typical acceptance, which is LOSSY.
  """
  rule = verifiers.Typical() if typical else verifiers.TargetWalk()
  return sampled_medusa(heads, parents, "top_k", rule)


def sampled_medusa(heads: networks.HiddenStateHeads, parents: Sequence[int],
                   proposal: str = "without_replacement",
                   verifier: Verifier = TRAVERSAL) -> Strategy:
  """Returns a strategy that samples drafts from the heads' distributions.

  This variant is not in the Medusa paper (arXiv:2401.10774), which drafts the
  most likely tokens. Any lossless rule for sampled drafts is exact, because the
  distribution of each drafted token is known.

  >>> from specjax import methods
  >>> own = methods.MedusaHeads(width=8, vocab_size=7, heads=2)
  >>> sampled_medusa(own, (-1, 0, 1), "iid", verifiers.Block()).verifier
  Block()

  Args:
    heads: heads of the target, `MedusaHeads` or `BlockwiseHeads`.
    parents: parent index of each node of the draft tree, including the root.
      `range(-1, K)` is a chain of K tokens.
    proposal: sampling method of children: "without_replacement" or "iid".
    verifier: verification rule for these drafts.
  """
  return Strategy(NetworkDrafter(
      network=Medusa(heads=heads), shape=Tree(tuple(parents), proposal)),
                  verifier)


def _medusa_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  tree = tree()
  return {
      "top-k tree": (medusa(heads, tree),
                     medusa(heads, tree, typical=True)),
      **_training.sampled(sampled_medusa, heads, tree),
      "i.i.d. tree": tuple(
          sampled_medusa(heads, tree, "iid", rule)
          for rule in (TRAVERSAL, RECURSIVE, verifiers.KSeq()))}


MEDUSA = Method(
    name="medusa", heads=MedusaHeads,
    learning_rate=LearningRate(
        bundled=6e-3, published=1e-3, source="README of the Medusa repository"),
    objective=lambda target, heads: MedusaObjective(
        model=target, heads=heads),
    measure=lambda target, heads: MedusaObjective(model=target, heads=heads),
    chain=lambda heads: sampled_medusa(
        heads, range(-1, heads.heads), "top_k", TOKEN),
    strategy=_training.strategy_of(sampled_medusa),
    compared=_medusa_compared,
    head_options=(
        Option("output", "auto",
               "medusa, medusa2: output matrix of a head: own (a separate "
               "matrix), low_rank (the LM head plus a low-rank matrix), shared "
               "(the LM head) or auto (own for a vocabulary of at most "
               f"{_OWN_UP_TO} tokens, low_rank for a larger vocabulary or with "
               "--rank). Own matrices give +0.03 block efficiency after "
               "training on 1.2M tokens with the bundled target, and have "
               "heads * vocabulary size * width parameters",
               ("auto", *_OUTPUTS)),
        Option("rank", MedusaHeads.rank, "medusa, medusa2: rank of the matrix "
               "of --output=low_rank. With --output=auto, a value other than "
               "the default selects low_rank"),
        _training.BLOCKS))


MEDUSA_2 = dataclasses.replace(
    MEDUSA, name="medusa2", tunes_target=True,
    learning_rate=LearningRate(
        bundled=2e-3, published=2e-3, source="arXiv:2401.10774"),
    objective=lambda target, heads, ramp, heads_weight, distill:
        MedusaJointObjective(
            medusa=MedusaObjective(model=target, heads=heads), ramp=ramp,
            weight=heads_weight, distill=distill),
    options=(
        Option("ramp", "sine", "medusa2: shape of the increase of the heads' "
               "loss weight over the run", ("sine", "linear", "constant")),
        Option("heads_weight", 0.2, "medusa2: largest weight of the heads' "
               "loss"),
        Option("distill", None, "medusa2: train the target with the KL "
               "divergence from its distributions before the run, not on the "
               "data. Default: true with --data=self, else false")))
