"""Blockwise parallel decoding, with a residual feed-forward head per position.

Stern et al. 2018 (arXiv:1811.03115). The module contains the heads, the
training loss and the strategy. Their network is `heads.medusa.Medusa`.
"""

import dataclasses
from typing import Any
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp

from specjax import verifiers
from specjax.methods import networks
from specjax.methods.heads import _training
from specjax.methods.heads.medusa import sampled_medusa
from specjax.methods.networks import check_fits
from specjax.methods.networks import Params
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import Option
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.models.transformer import Transformer
from specjax.training.next_token import cross_entropy
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Score
from specjax.training.objective import weights_of
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseHeads(networks.HiddenStateHeads):
  """Residual feed-forward layers before one output projection.

  Stern et al. 2018 (arXiv:1811.03115, section 6). For the target's last hidden
  state h, the logits of head k are the LM head applied to

    z_k = h + W2_k ReLU(W1_k h + b1_k) + b2_k.

  Heads 1..K are the paper's p_2..p_{K+1}. The paper's p_1 is the target itself,
  the LM head applied to h. W2 and b2 are initially 0, so the predictions of an
  untrained head equal the target's.

  Attributes:
    width: hidden width D.
    vocab_size: vocabulary size V.
    heads: number of heads K.
    hidden_width: width F of the inner layer.
  """

  width: int
  vocab_size: int
  heads: int
  hidden_width: int

  kind: ClassVar[str] = "blockwise"

  def __post_init__(self):
    fields.check_fields(self, "width", "vocab_size", "heads", "hidden_width")

  def init(self, key: jax.Array, target_params: Params
           ) -> dict[str, jax.Array]:
    """Returns initial parameters, a dictionary of float32 arrays.

    The keys are `inner [K, D, F]`, `inner_bias`, `outer [K, F, D]` and
    `outer_bias`.

    Args:
      key: PRNG key.
      target_params: unused, because the heads do not contain the LM head.
    """
    del target_params
    k, d, f = self.heads, self.width, self.hidden_width
    return {
        "inner": (2 / d)**0.5 * jax.random.normal(key, (k, d, f), jnp.float32),
        "inner_bias": jnp.zeros((k, f), jnp.float32),
        "outer": jnp.zeros((k, f, d), jnp.float32),
        "outer_bias": jnp.zeros((k, d), jnp.float32),
    }

  def head(self, params: Params, hidden: jax.Array, lm_head: jax.Array
           ) -> jax.Array:
    """Returns the logits `[..., V]` of one head.

    Args:
      params: parameters of one head, without the axis K.
      hidden: hidden states `[..., D]`.
      lm_head: LM head `[D, V]`.
    """
    chex.assert_axis_dimension(hidden, -1, self.width)
    inner = jax.nn.relu(hidden @ params["inner"] + params["inner_bias"])
    hidden = hidden + inner @ params["outer"] + params["outer_bias"]
    return networks.project(hidden, lm_head)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseObjective:
  """Mean cross-entropy of the heads, or of one sampled head (section 6).

  If one head is sampled uniformly per batch, the loss is an unbiased estimate
  of the mean over all heads, at the cost of one head. If the target is also
  trained, its next-token loss is treated as the loss of one more head.

  Attributes:
    model: target model.
    heads: heads of the target.
    one_head: True if each batch trains one sampled head, as in the paper. False
      if each batch trains all heads.
  """

  model: Transformer
  heads: BlockwiseHeads
  one_head: bool = True

  needs = ("target", "drafter")

  def __post_init__(self):
    check_fits(self.heads, self.model)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and `head_<k>/train_loss` if all heads are trained."""
    chex.assert_rank(batch["tokens"], 2)
    params = {**frozen, **trainable}
    tokens, tuned = batch["tokens"], "target" in trainable
    weights = weights_of(batch)
    output = self.model(params["target"], tokens[:, :-1])
    head = networks.lm_head(params["target"])
    next_token = lambda: weights.mean(
        cross_entropy(output.logits, tokens[:, 1:]))
    if self.one_head:
      first = 0 if tuned else 1
      k = jax.random.randint(key, (), first, self.heads.num_forecasts + 1)
      chosen = jax.tree.map(lambda x: x[k - 1], params["drafter"])
      forecast = lambda: _training.head_loss(
          self.heads, chosen, output.hidden, k, tokens, weights,
          jax.lax.stop_gradient(head))
      if not tuned:
        return forecast(), {}
      return jax.lax.cond(k == 0, next_token, forecast), {}
    losses = _training.head_losses(
        self.heads, params["drafter"], output.hidden, tokens, weights, head,
        tuned)
    metrics = _training.by_head(losses)
    if tuned:
      metrics["lm_loss"] = next_token()
      losses = jnp.append(losses, metrics["lm_loss"])
    return jnp.mean(losses), metrics

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns `score(k, logits, positions)` of every head, stacked along K."""
    del key
    hidden = self.model(params["target"], tokens[:, :-1]).hidden
    return _training.score_heads(
        self.heads, params["drafter"], hidden,
        networks.lm_head(params["target"]), score)


def blockwise(heads: networks.HiddenStateHeads, gamma: int | None = None,
              top_k: int | None = None, distance: int | None = None
              ) -> Strategy:
  """Returns a strategy that drafts the most likely token of each head.

  Stern et al. 2018 (arXiv:1811.03115). The target call that verifies a draft
  also returns the hidden state for the next draft, as in the paper's combined
  scheme (section 4). The relaxed acceptance criteria `top_k` and `distance` are
  LOSSY. Without them the verifier is `verifiers.Token`.

  >>> from specjax import methods
  >>> own = methods.BlockwiseHeads(
  ...     width=8, vocab_size=7, heads=3, hidden_width=4)
  >>> blockwise(own).drafter.num_nodes, blockwise(own).verifier
  (4, Token())
  >>> blockwise(own, top_k=2).verifier.lossless
  False

  Args:
    heads: heads of the target, `BlockwiseHeads` or `MedusaHeads`.
    gamma: draft length, at most the number of heads. None means the number of
      heads.
    top_k: accept a drafted token among this number of the target's most likely
      tokens. LOSSY.
    distance: accept a drafted token if its id differs by at most this number
      from the id of the target's most likely token. LOSSY.

  Raises:
    ValueError: both `top_k` and `distance` are set, or `gamma` is negative.
  """
  gamma = heads.heads if gamma is None else gamma
  fields.check_at_least("gamma", gamma, 0, ": 0 drafts nothing")
  if top_k is not None and distance is not None:
    raise ValueError(f"top_k is {top_k} and distance is {distance}; give only "
                     "one of these criteria")
  rule = (verifiers.TopK(k=top_k) if top_k is not None else
          verifiers.Distance(epsilon=distance) if distance is not None else
          verifiers.Token())
  return sampled_medusa(heads, range(-1, gamma), "top_k", rule)


BLOCKWISE = Method(
    name="blockwise", heads=BlockwiseHeads,
    learning_rate=LearningRate(bundled=3e-3),
    objective=lambda target, heads, all_heads, train_target:
        BlockwiseObjective(model=target, heads=heads, one_head=not all_heads),
    measure=lambda target, heads: BlockwiseObjective(
        model=target, heads=heads),
    chain=blockwise,
    strategy=lambda heads, verifier, gamma, tree: blockwise(
        heads, min(gamma, heads.num_forecasts))._replace(
            verifier=verifier or BLOCK),
    compared=lambda heads, tree: {"": tuple(
        blockwise(heads, top_k=k) for k in (None, 2))},
    head_options=(Option("hidden_width", 512,
                         "blockwise: width of a head's hidden layer"),),
    options=(Option("all_heads", False,
                    "blockwise: train all heads in every step. Default: one "
                    "randomly chosen head per step"),
             Option("train_target", False,
                    "blockwise: train the target jointly with its heads")))
