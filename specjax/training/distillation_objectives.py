"""Distillation of a draft model from the target's distributions, on any text.

Both models read the same rows of tokens, and no distribution is stored.
`Distillation` minimises a divergence of the two distributions of each token.
`AcceptedLength` maximises the number of tokens that a verification rule
accepts.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces import Model
from specjax.training import divergences
from specjax.training.objective import Batch
from specjax.training.objective import check_batch
from specjax.training.objective import check_same_tokens
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import weighted_mean
from specjax.training.objective import weights_of
from specjax.utils import fields

RULES = ("token", "block")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
  """Mean divergence of the drafter's distribution from the target's.

  With `keep` below 1, only this share of a batch's tokens has an effect: the
  tokens where the divergence exceeds the divergence of a reference drafter most
  (AdaSPEC, Hu et al. 2025, arXiv:2510.19779).

  >>> from specjax import testing
  >>> model = testing.MarkovModel(4)
  >>> objective = Distillation(model=model, target=model)
  >>> table = model.init(jax.random.key(0))
  >>> loss, metrics = objective(
  ...     {"drafter": table}, {"target": table},
  ...     {"tokens": jnp.array([[0, 1, 2]])}, jax.random.key(0))
  >>> float(loss), round(float(metrics["acceptance"]), 4)
  (0.0, 1.0)

  Attributes:
    model: the drafter, called without a cache.
    target: the target, with the drafter's vocabulary.
    divergence: a name in `divergences.DIVERGENCES`.
    keep: share of the tokens that count, in (0, 1]. A value below 1 requires
      parameters "reference" of another drafter with the same shape.
  """

  model: Model
  target: Model
  divergence: str = "forward_kl"
  keep: float = 1.0

  def __post_init__(self) -> None:
    if self.divergence not in divergences.DIVERGENCES:
      raise ValueError(f"divergence is {self.divergence!r}; it must be one of "
                       f"{', '.join(divergences.DIVERGENCES)}")
    if not 0 < self.keep <= 1:
      raise ValueError(f"keep is {self.keep}; it must be above 0 and at most 1")
    check_same_tokens(self.model, self.target)

  @property
  def needs(self) -> tuple[str, ...]:
    return ("target", "drafter") + ("reference",) * (self.keep < 1)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss for `tokens [B, S + 1]`, with a gradient of the drafter.

    Returns:
      `(loss, {"acceptance": mean acceptance rate 1 - TV(p, q)})`.
    """
    del key
    check_batch(batch)
    params, read = {**frozen, **trainable}, batch["tokens"][:, :-1]
    p = jax.lax.stop_gradient(self.target(params["target"], read).logits)
    q = self.model(params["drafter"], read).logits
    weights = weights_of(batch)
    accepted = 1 - divergences.total_variation(p, jax.lax.stop_gradient(q))
    metrics = {"acceptance": weighted_mean(accepted, weights)}
    divergence = divergences.DIVERGENCES[self.divergence](p, q)
    if self.keep < 1:
      reference = self.model(params["reference"], read).logits
      behind = jax.lax.stop_gradient(divergences.forward_kl(
          p, q) - divergences.forward_kl(p, reference))
      least = jnp.nanquantile(
          jnp.where(weights > 0, behind, jnp.nan), 1 - self.keep)
      weights = jnp.where(behind >= least, weights, 0)
    return weighted_mean(divergence, weights), metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptedLength:
  """Loss -E[accepted tokens of a draft of gamma tokens], on text of the target.

  The expectation is over drafts x_1..x_gamma from the drafter. The data are
  tokens of the target instead, so a sequence has the importance weight Q / P.
  Let p_j and q_j be the target's and the drafter's probability of the j-th
  token, and P_j = p_1 ... p_j, Q_j = q_1 ... q_j. The probability that a rule
  accepts i tokens, times the weight Q_i / P_i, is at most 1:

    token  A_i = prod_(j <= i) min(1, q_j / p_j)
    block  A_i = min_(j <= i) min(1, Q_j / P_j)

  The first follows from Leviathan et al. 2023 (arXiv:2211.17192). The second is
  the recursion h_i = min(1, h_(i-1) p_i / q_i) of block verification (Sun et
  al. 2024, arXiv:2403.10444) times Q_i / P_i. To reduce the variance, the loss
  sums the last token of each prefix over all values v of the vocabulary, with
  distributions p_i(v) and q_i(v):

    token  sum_i A_(i-1) sum_v min(p_i(v), q_i(v))
    block  sum_i sum_v min(A_(i-1) p_i(v), Q_(i-1) / P_(i-1) q_i(v))

  Rows must be text of the target at temperature 1. Drafts are windows of gamma
  tokens. The windows are adjacent and start at a random position, so each token
  is read once.

  >>> from specjax import testing
  >>> model = testing.MarkovModel(4)
  >>> objective = AcceptedLength(model=model, target=model, gamma=2)
  >>> table = model.init(jax.random.key(0))
  >>> loss, metrics = objective(
  ...     {"drafter": table}, {"target": table},
  ...     {"tokens": jnp.array([[0, 1, 2, 3, 0]])}, jax.random.key(0))
  >>> round(float(loss), 4)  # equal models accept both tokens
  -2.0

  Attributes:
    model: the drafter, called without a cache.
    target: the target, with the drafter's vocabulary.
    rule: "token" or "block".
    gamma: draft length.
  """

  model: Model
  target: Model
  rule: str = "block"
  gamma: int = 8

  needs = ("target", "drafter")

  def __post_init__(self) -> None:
    if self.rule not in RULES:
      raise ValueError(f"rule is {self.rule!r}; it must be one of "
                       f"{', '.join(RULES)}")
    fields.check_fields(self, "gamma")
    check_same_tokens(self.model, self.target)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, in tokens, with a gradient of the drafter.

    The weight of a window is the smallest weight of its tokens.

    Args:
      trainable: trees of parameters that get a gradient, by name.
      frozen: trees of other parameters, by name.
      batch: arrays by name, see `Objective`, with S >= 2 gamma - 1.
      key: PRNG key of the position where the windows start.

    Returns:
      `(loss, {"accepted": -loss})`.
    """
    check_batch(batch)
    params, tokens = {**frozen, **trainable}, batch["tokens"]
    read, size = tokens[:, :-1], tokens.shape[1] - 1
    count = (size + 1) // self.gamma - 1
    if count < 1:
      raise ValueError(f"rows have {size} tokens, but gamma is {self.gamma}; "
                       f"give rows of at least {2 * self.gamma - 1} tokens")
    logits = (jax.lax.stop_gradient(self.target(params["target"], read).logits),
              self.model(params["drafter"], read).logits)
    first = jax.random.randint(key, (), 0, self.gamma)

    def windows(x: jax.Array) -> jax.Array:
      x = jax.lax.dynamic_slice_in_dim(x, first, count * self.gamma, axis=1)
      return x.reshape(x.shape[0], count, self.gamma, *x.shape[2:])

    log_p, log_q = (windows(jax.nn.log_softmax(x)) for x in logits)
    labels = windows(tokens[:, 1:])[..., None]
    accepted = accepted_length(self.rule, log_p, log_q, labels)
    weights = jnp.min(windows(weights_of(batch)), axis=-1)
    mean = weighted_mean(accepted, weights)
    return -mean, {"accepted": mean}


def accepted_length(rule: str, log_p: jax.Array, log_q: jax.Array,
                    tokens: jax.Array) -> jax.Array:
  """Returns the expected accepted tokens of windows, see `AcceptedLength`.

  >>> log_p = jnp.log(jnp.array([[0.5, 0.5]]))  # gamma = 1
  >>> log_q = jnp.log(jnp.array([[0.25, 0.75]]))
  >>> float(accepted_length("token", log_p, log_q, jnp.array([[0]])))
  0.75

  Args:
    rule: "token" or "block".
    log_p: `[..., gamma, V]` log probabilities of the target.
    log_q: `[..., gamma, V]` log probabilities of the drafter.
    tokens: `[..., gamma, 1]` int32 tokens of the windows.

  Returns:
    Expected number `[...]` of accepted tokens.
  """
  chex.assert_equal_shape([log_p, log_q])
  chex.assert_shape(tokens, (*log_p.shape[:-1], 1))
  ratio = (jnp.take_along_axis(log_q, tokens, axis=-1)
           - jnp.take_along_axis(log_p, tokens, axis=-1))[..., 0]
  before = lambda x: jnp.pad(  # value at the previous token; 0 at the first
      x[..., :-1], [(0, 0)] * (x.ndim - 1) + [(1, 0)])[..., None]
  if rule == "token":
    passed = before(jnp.cumsum(jnp.minimum(ratio, 0), axis=-1))
    terms = passed + jnp.minimum(log_p, log_q)
  else:
    joint = jnp.cumsum(ratio, axis=-1)
    least = jax.lax.cummin(jnp.minimum(joint, 0), axis=joint.ndim - 1)
    terms = jnp.minimum(before(least) + log_p, before(joint) + log_q)
  return jnp.sum(jnp.exp(terms), axis=(-2, -1))
