"""Training objective of block-parallel networks: DFlash, D-PACE and DSpark.

DFlash (arXiv:2602.06036), D-PACE and DSpark (arXiv:2607.05147) train a network
that predicts a block of K tokens after an *anchor*. In every training row some
positions are sampled as anchors. The frozen target reads the row once. Then the
draft layers process the blocks of all anchors in one pass. Each block attends
to the target's hidden states at the tokens before the block's anchor.
"""

import dataclasses
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.caches.dense import BlockCache
from specjax.interfaces import Verifier
from specjax.methods.blocks import _coupling
from specjax.methods.blocks import parallel_network
from specjax.methods.blocks.parallel_drafter import ddtree
from specjax.methods.blocks.parallel_drafter import parallel
from specjax.methods.blocks.parallel_network import ParallelHeads
from specjax.methods.features import _training
from specjax.methods.networks import check_sizes_match
from specjax.methods.records import CUTS
from specjax.methods.records import LAYERS
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import MLP_WIDTH
from specjax.methods.records import Option
from specjax.methods.records import RECURSIVE
from specjax.methods.records import suited
from specjax.methods.records import TAPS
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.methods.strategy import TRAVERSAL
from specjax.models.transformer import Transformer
from specjax.models.vocabulary_subset import NEVER
from specjax.training import divergences
from specjax.training.next_token import cross_entropy
from specjax.training.objective import Batch
from specjax.training.objective import has_weight
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import Score
from specjax.training.objective import weights_of

POSITION_WEIGHTS = ("decay", "dpace")


@struct.dataclass
class Blocks:
  """Predictions and labels of the n blocks of every row.

  Attributes:
    hidden: hidden states `[B, n, K, D]` of the slots that predict tokens.
    logits: logits `[B, n, K, V]` of the draft distributions q.
    base: logits `[B, n, K, V]` without the transition. None if the objective
      does not use them.
    taught: logits `[B, n, K, V]` of the cross-entropy. For the selector of
      DFlash 2, the label is always a candidate. Otherwise `logits`.
    before: true token before each predicted token, `[B, n, K]` int32.
    labels: true tokens to predict, `[B, n, K]` int32.
    target: logits `[B, n, K, V]` of the target at the same positions.
  """

  hidden: jax.Array
  logits: jax.Array
  base: jax.Array | None
  taught: jax.Array
  before: jax.Array
  labels: jax.Array
  target: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelObjective:
  """Loss of block-parallel heads, a weighted mean over the slots of blocks.

  The slots k = 1..K have weights w_k. The loss of a slot is

    c (-log q_k(x_k)) + (1 - c) |q_k - p_k|_1 + a BCE(s_k, 1 - TV(q_k, p_k))

  where x_k is the true token, q_k is the drafter's and p_k the target's
  distribution, and s_k is the confidence head's output. TV is the total
  variation distance, and 1 - TV is the acceptance probability of token
  verification. Without a confidence head, the loss has no binary cross-entropy
  BCE. DSpark has c = 0.1 and a = 1. DFlash has c = 1 and no confidence head. A
  transition reads the true previous token. For a token that the heads cannot
  draft, q_k is 0, and the cross-entropy is omitted.

  The transitions of Domino, DFlash 2 and LiLiCorr correct logits that are good
  drafts themselves. For them, the first two terms are 1 - b times those of q_k,
  plus b times those of the distributions without the transition. In the
  cross-entropy of DFlash 2, a true token that is not a candidate replaces the
  least likely candidate.

  Attributes:
    model: target model.
    heads: block-parallel network of the target.
    anchors: maximum number of blocks per row.
    position_weights: form of the weights. "decay" is w_k = exp(-(k - 1) / d),
      divided by the sum of all weights. "dpace" (D-PACE, with its constant 1/2)
      is w_k = sum_{j>=k} prod_{i<=j} (q_i(x_i) + 1) / 2, divided by the number
      of slots. These weights get no gradient.
    position_decay: constant d of "decay".
    ce_share: weight c of the cross-entropy, in [0, 1].
    base_share: weight b of the distributions without the transition, in [0, 1).
    confidence_weight: weight a of the confidence loss.
  """

  model: Transformer
  heads: ParallelHeads
  anchors: int = 32
  position_weights: str = "decay"
  position_decay: float = 4.0
  ce_share: float = 0.1
  base_share: float = 0.5
  confidence_weight: float = 1.0

  needs = ("target", "drafter")

  def __post_init__(self):
    check_sizes_match(self.heads, self.model)
    self.heads.check_taps(self.model)
    if self.anchors < 1:
      raise ValueError(f"anchors is {self.anchors}; it must be at least 1")
    if self.position_weights not in POSITION_WEIGHTS:
      raise ValueError(f"position_weights is {self.position_weights!r}; it "
                       f"must be one of {', '.join(POSITION_WEIGHTS)}")
    if self.position_decay <= 0:
      raise ValueError(f"position_decay is {self.position_decay}; it must be "
                       "above 0. The larger it is, the more equal are the "
                       "weights of the positions")
    if not 0 <= self.ce_share <= 1:
      raise ValueError(f"ce_share is {self.ce_share}; it must be in [0, 1]")
    if not 0 <= self.base_share < 1:
      raise ValueError(f"base_share is {self.base_share}; it must be in [0, 1)")
    if self.confidence_weight < 0:
      raise ValueError(f"confidence_weight is {self.confidence_weight}; it "
                       "must be at least 0")

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss and metrics.

    The metric `head_<k>/train_loss` is the cross-entropy of slot k, averaged
    over the tokens that the heads can draft. `acceptance` is the mean of
    1 - TV. `accepted` is the mean of sum_k prod_{i<=k} (1 - TV_i), the expected
    number of tokens accepted by token verification on the data. With a
    confidence head, `confidence_loss` is the weighted mean of the BCE.
    """
    chex.assert_rank(batch["tokens"], 2)
    params, tokens = {**frozen, **trainable}, batch["tokens"]
    batch_weights = weights_of(batch)
    of_part = batch_weights.of_part
    rows = batch.get("whole", batch)["tokens"]
    every = self.draw(key, *rows.shape, batch_weights.all)
    found = self.blocks(params, tokens, of_part(every))
    nats = cross_entropy(found.taught, found.labels)
    counts = _at(batch_weights.all, every, nats.shape[-1])
    weights = of_part(counts) * self.weights(nats, of_part(counts) > 0)
    known = counts * self._known(_at(rows[:, 1:], every, nats.shape[-1]))
    drafted = of_part(known) > 0
    if self.heads.markov == "lilicorr":
      # A label that is no candidate has no cross-entropy, but it counts in the
      # means: a part of a batch does not know the candidates of other parts.
      drafted &= _label(found.taught, found.labels) > NEVER
    nats = jnp.where(drafted, nats, 0)
    variation = divergences.total_variation(found.target, found.logits)
    accepted = jax.lax.stop_gradient(1 - variation)
    # The weights of "decay" depend only on the slot, so those of the complete
    # batch are known. The weights of "dpace" are divided by the slots.
    total = jnp.sum(counts * self.weights(jnp.zeros_like(counts), counts > 0)
                    if self.position_weights == "decay" else counts)
    mean = lambda x: batch_weights.divide(jnp.sum(weights * x), total)
    loss = mean(self.ce_share * nats + (1 - self.ce_share) * 2 * variation)
    if found.base is not None:
      base_nats = jnp.where(
          of_part(known) > 0, cross_entropy(found.base, found.labels), 0)
      base = mean(self.ce_share * base_nats + (1 - self.ce_share) * 2 * (
          divergences.total_variation(found.target, found.base)))
      loss = (1 - self.base_share) * loss + self.base_share * base
    by_slot = jax.vmap(batch_weights.mean, (-1, -1))(nats, known)
    metrics = {f"head_{k}/train_loss": x for k, x in enumerate(by_slot, 1)}
    metrics["acceptance"] = batch_weights.mean(accepted, counts)
    metrics["accepted"] = batch_weights.mean(
        jnp.sum(jnp.cumprod(accepted, axis=-1), axis=-1), counts[..., 0])
    if self.heads.confidence != "none":
      sure = self.heads.confidences(
          params["drafter"], found.hidden, found.before)
      metrics["confidence_loss"] = mean(
          optax.sigmoid_binary_cross_entropy(sure, accepted))
      loss = loss + self.confidence_weight * metrics["confidence_loss"]
    return loss, metrics

  def _known(self, labels):
    """Returns a mask of the labels that the heads can draft."""
    ids = self.heads.ids or range(self.heads.vocab_size)
    known = np.isin(np.arange(self.heads.vocab_size), ids)
    return jnp.asarray(known)[labels]

  def weights(self, nats: jax.Array, counted: jax.Array) -> jax.Array:
    """Returns the slot weights w_k before division, `[..., K]`.

    Args:
      nats: cross-entropies -log q_k(x_k) `[..., K]`, used by "dpace".
      counted: `[..., K]` mask of the slots with a weight. For "dpace", only
        these slots are gained by a longer accepted prefix.
    """
    if self.position_weights == "dpace":
      reach = jnp.cumprod(
          (jnp.exp(-jax.lax.stop_gradient(nats)) + 1) / 2, axis=-1)
      return jax.lax.cumsum(
          reach * counted, axis=reach.ndim - 1, reverse=True)
    place = jnp.arange(nats.shape[-1])
    return jnp.broadcast_to(
        jnp.exp(-place / self.position_decay), nats.shape)

  def draw(self, key: jax.Array, rows: int, size: int,
           weights: jax.Array | None = None) -> jax.Array:
    """Returns distinct random anchors `[B, n]` int32, with blocks in the row.

    Anchors whose block predicts a token with a positive weight come first. The
    other anchors are only used if a row has less than n such anchors. The first
    token of a row is never an anchor, because an anchor's block needs at least
    one token before it.

    Args:
      key: PRNG key.
      rows: number B of rows.
      size: number S + 1 of tokens of a row.
      weights: weights `[B, S]` of the tokens after the first. None means that
        all weights are positive.
    """
    count = size - 1 - self.heads.num_forecasts
    if count < 1:
      raise ValueError(
          f"a row predicts {size - 1} tokens, but a block predicts "
          f"{self.heads.num_forecasts} after its anchor; give longer rows or "
          "reduce block_size")
    order = jax.random.uniform(key, (rows, count))
    if weights is not None:
      useful = has_weight(weights[:, 1:], self.heads.num_forecasts)
      order = jnp.where(useful, order, order - 1)
    return 1 + jax.lax.top_k(order, min(self.anchors, count))[1]

  def blocks(self, params: Params, tokens: jax.Array, anchors: jax.Array
             ) -> Blocks:
    """Returns the predictions of blocks at given anchors.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`. The target's
        parameters get no gradient.
      tokens: token ids `[B, S + 1]` int32.
      anchors: positions of the anchors, `[B, n]` int32, distinct within a row.
    """
    chex.assert_rank([tokens, anchors], 2)
    heads, own = self.heads, params["drafter"]
    target_params = jax.lax.stop_gradient(params["target"])
    model = heads.tapped(self.model)
    read = model(target_params, tokens[:, :-1])
    context = heads.context(own, heads.tap(model, read.hidden))
    hidden = heads.predicting(self._hidden(
        own, target_params, context, tokens, anchors))
    batch, count, size, _ = hidden.shape
    at = anchors[..., None] + jnp.arange(size)
    before, labels = _at(tokens, anchors, size), _at(
        tokens[:, 1:], anchors, size)
    last = None
    if heads.markov == "lilicorr":
      last = jnp.take_along_axis(context, anchors[..., None] - 1, axis=1)
    plain = heads.logits(target_params, hidden)
    lattice = heads.lattice(
        own, target_params, hidden, plain, before[..., 0], last)
    coupled = lambda lattice: heads.whole(
        heads.coupled(own, target_params, lattice, before))
    logits = taught = coupled(lattice)
    if heads.markov == "selector":
      taught = coupled(_coupling.with_labels(heads, lattice, plain, labels))
    corrects = heads.is_lattice or heads.markov == "gru"
    base = heads.whole(plain) if corrects and self.base_share else None
    target = model.logits_at(target_params, read, at.reshape(batch, -1))
    return Blocks(
        hidden=hidden, logits=logits, base=base, taught=taught, before=before,
        labels=labels, target=target.reshape(batch, count, size, -1))

  def _hidden(self, own, target_params, context, tokens, anchors):
    """Runs the draft layers on all blocks in one pass.

    Returns:
      Hidden states `[B, n, block_size, D]`.
    """
    heads = self.heads
    batch, length = context.shape[:2]
    size, count = heads.block_size, anchors.shape[1]
    text = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32),
                            (batch, length))
    cache = heads.with_context(
        own, BlockCache(lengths=jnp.zeros((batch,), jnp.int32)), context, text)
    slots = heads.slots(own, target_params, jnp.take_along_axis(
        tokens, anchors, axis=1)).reshape(batch, count * size, -1)
    positions = anchors[..., None] + jnp.arange(size, dtype=jnp.int32)
    hidden = heads.read(
        own, slots, positions.reshape(batch, -1),
        jax.vmap(lambda anchors: visible(anchors, size, length))(anchors),
        cache)
    return hidden.reshape(batch, count, size, -1)

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns the results of `score` for slots k = 1..K, stacked along axis 0.

    A transition reads the true tokens of the row. `positions [B, n]` is
    `anchors - 1`, because slot k predicts the token at `anchors + k`, and
    `score` expects `positions + 1 + k`. If some tokens cannot be drafted, the
    probabilities of all V tokens are at least e^-20.
    """
    anchors = self.draw(key, *tokens.shape)
    logits = self.blocks(params, tokens, anchors).logits
    if self.heads.ids or self.heads.is_lattice:
      logits = _training.floored(logits)
    scores = [score(k, logits[:, :, k - 1], anchors - 1)
              for k in range(1, logits.shape[2] + 1)]
    return jax.tree.map(lambda *x: jnp.stack(x), *scores)


def _label(logits, labels):
  return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]


def visible(anchors: jax.Array, size: int, length: int) -> jax.Array:
  """Returns the mask of one row's blocks, `[n size, length + n size]` bool.

  The anchor of a block is slot 0. A slot attends to the row's tokens before the
  anchor, and to all slots of the block. Windows and causal layers of the heads
  then reduce this mask (`ParallelHeads.read`).

  Args:
    anchors: positions of the anchors, `[n]` int32.
    size: number of slots of a block.
    length: number of tokens of the row.
  """
  chex.assert_rank(anchors, 1)
  anchor = jnp.repeat(anchors, size)[:, None]  # of each slot
  block = jnp.repeat(jnp.arange(len(anchors)), size)
  return jnp.concatenate(
      [jnp.arange(length) < anchor, block[:, None] == block], axis=1)


def _at(x, anchors, size):
  """Returns `size` values of `x [B, S]` from each anchor on, `[B, n, size]`."""
  at = anchors[..., None] + jnp.arange(size)
  return jnp.take_along_axis(
      x, at.reshape(len(x), -1), axis=1).reshape(at.shape)


_SHORT = 4  # draft length of a short chain, as in other methods


def _parallel_strategy(heads, verifier: Verifier | None, gamma, tree
                       ) -> Strategy:
  """Returns a strategy whose drafts have the form that a rule requires."""
  rule = verifier or BLOCK
  return suited(
      rule, lambda: parallel(heads, gamma, verifier=rule),
      lambda: ddtree(heads, len(tree()))._replace(verifier=rule),
      lambda proposal: parallel(
          heads, parents=tree(), proposal=proposal, verifier=rule))


def _parallel_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  tree, longest = tree(), heads.num_forecasts
  walked = ddtree(heads, len(tree))
  chain = lambda gamma: tuple(parallel(heads, gamma, verifier=rule)
                              for rule in (BLOCK, TOKEN))
  return {
      "sampled chain": chain(longest),
      **({f"sampled chain of {_SHORT}": chain(_SHORT)}
         if longest > _SHORT else {}),
      "sampled tree": tuple(
          parallel(heads, parents=tree, verifier=rule,
                              proposal="without_replacement")
          for rule in (TRAVERSAL, RECURSIVE)),
      "best-first tree": (walked,)}


PARALLEL = Method(
    name="parallel", heads=parallel_network.ParallelHeads,
    learning_rate=LearningRate(
        bundled=2e-3, published=6e-4, size=4e9,
        source="DSpark configurations of DeepSpec"),
    objective=lambda target, heads, anchors, position_weights, position_decay,
        ce_share, base_share, confidence_weight: ParallelObjective(
            model=target, heads=heads, anchors=anchors,
            position_weights=position_weights, position_decay=position_decay,
            ce_share=ce_share, base_share=base_share,
            confidence_weight=confidence_weight),
    measure=lambda target, heads: ParallelObjective(
        model=target, heads=heads, anchors=CUTS),
    chain=lambda heads: parallel(
        heads, proposal="top_k", verifier=TOKEN),
    strategy=_parallel_strategy, compared=_parallel_compared,
    head_options=(
        LAYERS, MLP_WIDTH, TAPS,
        Option("from_anchor", True, "parallel: the slot of the last committed "
               "token also predicts a token (DSpark). With --nofrom_anchor "
               "only mask tokens predict tokens (DFlash)"),
        Option("markov", "plain", "parallel: type of the transition, which "
               "conditions a token on the token before it: plain, gated or rnn "
               "(DSpark), gru (Domino), selector (DFlash 2) or lilicorr "
               "(LiLiCorr). With none the tokens of a block are independent",
               _coupling.KINDS),
        Option("markov_rank", 32, "parallel: rank of the transition"),
        Option("markov_width", 64, "parallel: width of the state of "
               "--markov=gru, or of the network of --markov=lilicorr"),
        Option("candidates", 16, "parallel: number of tokens that can be "
               "drafted in a slot, with --markov=selector or lilicorr"),
        Option("conv_kernel", 1, "parallel: number of neighbouring slots that "
               "the convolutions of DFlash 2 read (2 in its files). 1 means no "
               "convolutions"),
        Option("fusion", "linear", "parallel: mixture of the target's hidden "
               "states: linear (one for all layers) or layers (one for each "
               "draft layer, DFlare)", ("linear", "layers")),
        Option("causal", False, "parallel: a slot attends only to itself and "
               "to earlier slots of its block (JetSpec)"),
        Option("confidence", "markov", "parallel: input of the confidence "
               "head, which predicts whether a token is accepted: hidden (the "
               "hidden state; required for transitions without an embedding: "
               "--markov=none, gru or lilicorr), markov (also the previous "
               "token) or none (no confidence head)",
               ("none", "hidden", "markov"))),
    options=(
        Option("anchors", 32, "parallel: maximum number of blocks that are "
               "sampled per training row"),
        Option("position_weights", "decay", "parallel: loss weights of the "
               "tokens of a block: decay (exponential) or dpace (from the "
               "drafter's probabilities, D-PACE)", ("decay", "dpace")),
        Option("position_decay", 4.0, "parallel: number of tokens after which "
               "the weight of --position_weights=decay falls to 1/e"),
        Option("ce_share", 0.1, "parallel: share of the cross-entropy on the "
               "data in the loss, in [0, 1]; the rest is the L1 distance to "
               "the target's distribution"),
        Option("base_share", 0.5, "parallel: share of the logits before the "
               "transition in the loss, in [0, 1); the rest is the loss of the "
               "draft distributions. Only for --markov=gru, selector and "
               "lilicorr"),
        Option("confidence_weight", 1.0, "parallel: loss weight of the "
               "confidence head; unused with --confidence=none")))
