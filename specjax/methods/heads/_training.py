"""Losses of K heads with the same hidden state as input.

At position t, head k = 1..K predicts token t + 1 + k. To save memory, the loss
is computed for one head after another.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax import verifiers
from specjax.interfaces import Verifier
from specjax.methods.networks import Heads
from specjax.methods.networks import HiddenStateHeads
from specjax.methods.records import chain_of
from specjax.methods.records import Option
from specjax.methods.records import RECURSIVE
from specjax.methods.records import suited
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.methods.strategy import TRAVERSAL
from specjax.training.next_token import cross_entropy
from specjax.training.objective import Params
from specjax.training.objective import Score
from specjax.training.objective import Weights


def forecast_loss(logits: jax.Array, k: jax.Array | int, tokens: jax.Array,
                  weights: Weights) -> jax.Array:
  """Returns the cross-entropy of head k, averaged over positions t.

  At position t the head predicts token t + 1 + k. The average excludes
  positions for which the row ends before this token.

  Args:
    logits: logits `[B, S, V]` of head k.
    k: number of the head, `[]`, from 1.
    tokens: token ids `[B, S + 1]` int32.
    weights: weights of the tokens after the first.

  Returns:
    Loss `[]` in nats. It is 0 if the predicted tokens have weight 0.
  """
  chex.assert_rank([logits, tokens], [3, 2])
  size = logits.shape[1]
  at = jnp.arange(size) + k
  label = lambda x: jnp.take(x, jnp.minimum(at, size - 1), axis=1)
  return weights.mean(cross_entropy(logits, label(tokens[:, 1:])),
                      label(weights.all) * (at < size))


def head_loss(heads: HiddenStateHeads, params: Params, hidden: jax.Array,
              k: jax.Array, tokens: jax.Array, weights: Weights,
              lm_head: jax.Array) -> jax.Array:
  """Returns the loss `[]` of one head, see `forecast_loss`.

  Args:
    heads: configuration of the heads.
    params: parameters of head k.
    hidden: hidden states `[B, S, D]`.
    k: number of the head, `[]` int32, from 1.
    tokens: token ids `[B, S + 1]` int32.
    weights: weights of the tokens after the first.
    lm_head: LM head `[D, V]`.
  """
  return forecast_loss(heads.head(params, hidden, lm_head), k, tokens, weights)


def head_losses(heads: HiddenStateHeads, params: Params, hidden: jax.Array,
                tokens: jax.Array, weights: Weights, lm_head: jax.Array,
                tuned: bool) -> jax.Array:
  """Returns the loss of every head, `[K]`, see `forecast_loss`.

  The loss and the gradient of a head are computed together, before those of the
  next head (Gloeckle et al. 2024, arXiv:2404.19737, section 2). Therefore
  memory contains the logits of only one head at a time, and no logits are
  recomputed. The LM head gets no gradient.

  Args:
    heads: configuration of the heads.
    params: parameters of all heads, stacked along K.
    hidden: hidden states `[B, S, D]`.
    tokens: token ids `[B, S + 1]` int32.
    weights: weights of the tokens after the first.
    lm_head: LM head `[D, V]`.
    tuned: True if `hidden` gets a gradient, to train the target.
  """
  chex.assert_rank([hidden, tokens, lm_head], [3, 2, 2])
  return _one_by_one(heads, tuned, params, hidden, tokens, weights, lm_head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _one_by_one(heads, tuned, params, hidden, tokens, weights, lm_head):
  del tuned
  return jax.lax.map(
      lambda x: head_loss(heads, x[1], hidden, x[0], tokens, weights, lm_head),
      (_numbers(params), params))


def _forward(heads, tuned, params, hidden, tokens, weights, lm_head):
  def loss(params, hidden, k):
    return head_loss(heads, params, hidden, k, tokens, weights, lm_head)

  def one(x):
    k, params = x
    return jax.value_and_grad(loss, (0, 1) if tuned else (0,))(
        params, hidden, k)

  losses, grads = jax.lax.map(one, (_numbers(params), params))
  return losses, (grads, hidden)


def _backward(heads, tuned, residuals, weights):
  """Returns the gradients, multiplied by the losses' cotangents `weights [K]`.
  """
  del heads
  grads, hidden = residuals
  by_head = lambda x: weights.astype(x.dtype).reshape(
      -1, *[1] * (x.ndim - 1)) * x
  to_hidden = (jnp.sum(by_head(grads[1]), axis=0) if tuned
               else jnp.zeros_like(hidden))
  return jax.tree.map(by_head, grads[0]), to_hidden, None, None, None


_one_by_one.defvjp(_forward, _backward)


def _numbers(params):
  """Returns the number k of every head, `[K]` int32, from 1."""
  count = jax.tree.leaves(params)[0].shape[0]
  return jnp.arange(1, count + 1, dtype=jnp.int32)


def by_head(losses: Iterable[jax.Array]) -> dict[str, jax.Array]:
  """Returns the losses of heads 1, 2, ... as metrics of a training step."""
  return {f"head_{k}/train_loss": x for k, x in enumerate(losses, 1)}


def labelled(hidden: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Returns the positions at which every head has a label.

  The label of head k at position t is token t + 1 + k.

  Args:
    hidden: hidden states `[B, S, D]`.
    count: number of heads K.

  Returns:
    Hidden states `[B, P, D]` at the P positions, and the positions `[B, P]`.

  Raises:
    ValueError: no position has K labels.
  """
  chex.assert_rank(hidden, 3)
  batch, size, _ = hidden.shape
  if size <= count:
    raise ValueError(f"a row predicts {size} tokens and there are {count} "
                     "heads; give longer rows or fewer heads")
  positions = jnp.broadcast_to(jnp.arange(size - count), (batch, size - count))
  return hidden[:, :size - count], positions


def score_heads(heads: HiddenStateHeads, params: Params, hidden: jax.Array,
                lm_head: jax.Array, score: Score) -> Any:
  """Returns the scores of all heads, stacked along K.

  The score of head k is `score(k, logits [B, P, V], positions [B, P])` at the P
  positions of `labelled`.
  """
  numbers = _numbers(params)
  hidden, positions = labelled(hidden, len(numbers))
  return jax.lax.map(
      lambda x: score(x[0], heads.head(x[1], hidden, lm_head), positions),
      (numbers, params))


def strategy_of(make: Callable[..., Strategy]) -> Callable[..., Strategy]:
  """Returns the function `records.Method.strategy` of a method with heads.

  Args:
    make: function `(heads, parents, proposal, rule) -> Strategy`.
  """
  def strategy(heads, verifier: Verifier | None, gamma, tree) -> Strategy:
    rule = verifiers.TargetWalk() if verifier is None else verifier
    return suited(
        rule, lambda: make(heads, chain_of(heads, gamma), "iid", rule),
        lambda: make(heads, tree(), "top_k", rule),
        lambda proposal: make(heads, tree(), proposal, rule))

  return strategy


def sampled(make: Callable[..., Strategy], heads: Heads,
             tree: Sequence[int]) -> dict[str, tuple[Strategy, ...]]:
  """Returns strategies with sampled drafts, for `records.Method.compared`."""
  pairs = lambda parents, proposal, *rules: tuple(
      make(heads, parents, proposal, rule) for rule in rules)
  return {
      "sampled chain": pairs(
          chain_of(heads, heads.num_forecasts), "iid", BLOCK, TOKEN),
      "sampled tree": pairs(
          tree, "without_replacement", TRAVERSAL, RECURSIVE)}


BLOCKS = Option(
    "blocks", 1, "medusa, medusa2, hydra: residual blocks per head")
