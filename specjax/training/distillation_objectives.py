"""A drafter learns the target's law from whole laws, on any text.

Both models read the same rows; nothing is stored. `Distillation` brings the two
laws together token by token. `AcceptedLength` maximises what a round accepts,
through the law of its verification rule.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.interfaces import Model
from specjax.training import divergences
from specjax.training.objective import Batch
from specjax.training.objective import check_same_tokens
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import weighted_mean
from specjax.training.objective import weights_of
from specjax.utils import fields

RULES = ("token", "block")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
  """The mean divergence of the drafter's law from the target's.

  With `keep`, only that share of a batch's tokens counts: those on which the
  drafter is farthest behind a reference drafter, which is what it can still
  learn (AdaSPEC, Hu et al. 2025, arXiv:2510.19779).

  Attributes:
    model: the drafter, called without a cache.
    target: the target, with the drafter's tokens.
    divergence: a name out of `divergences.DIVERGENCES`.
    keep: share of the tokens that count, in (0, 1]; below 1 there must be
      parameters "reference", of a drafter of the same shape.
  """

  model: Model
  target: Model
  divergence: str = "forward_kl"
  keep: float = 1.0

  def __post_init__(self):
    if self.divergence not in divergences.DIVERGENCES:
      raise ValueError(f"divergence is {self.divergence!r}; it must be one of "
                       f"{', '.join(divergences.DIVERGENCES)}")
    if not 0 < self.keep <= 1:
      raise ValueError(f"keep is {self.keep}; it is a share of the tokens, "
                       "above 0 and at most 1")
    check_same_tokens(self.model, self.target)

  @property
  def needs(self) -> tuple[str, ...]:
    return ("target", "drafter") + ("reference",) * (self.keep < 1)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """The loss of `{"drafter"}` on `tokens [B, S + 1]`, in nats or in 1.

    Returns:
      `(loss, {"acceptance": the mean of alpha over all tokens})`.
    """
    del key
    params, read = {**frozen, **trainable}, batch["tokens"][:, :-1]
    p = jax.lax.stop_gradient(self.target(params["target"], read).logits)
    q = self.model(params["drafter"], read).logits
    measure = divergences.DIVERGENCES[self.divergence]
    weights = weights_of(batch)
    accepted = 1 - divergences.total_variation(p, jax.lax.stop_gradient(q))
    metrics = {"acceptance": weighted_mean(accepted, weights)}
    found = measure(p, q)
    if self.keep < 1:
      reference = self.model(params["reference"], read).logits
      behind = jax.lax.stop_gradient(divergences.forward_kl(
          p, q) - divergences.forward_kl(p, reference))
      least = jnp.nanquantile(
          jnp.where(weights > 0, behind, jnp.nan), 1 - self.keep)
      weights = jnp.where(behind >= least, weights, 0)
    return weighted_mean(found, weights), metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptedLength:
  """-E[accepted tokens of a draft of gamma tokens], on text of the target.

  What is expected over drafts x ~ q is expected over texts x ~ p of the target
  with the weight Q(x) / P(x). With that the probability that a rule accepts i
  tokens becomes bounded by 1 and needs no sampled draft:

    token  prod_(j <= i) min(1, q_j / p_j)
    block  min_(j <= i) min(1, Q_j / P_j),   Q_j = q_1 ... q_j

  The first follows from Leviathan et al. 2023 (arXiv:2211.17192), the second
  from the recursion p_i = min(1, p_(i-1) p(x_i) / q(x_i)) of block verification
  (Sun et al. 2024, arXiv:2403.10444) divided by P_i / Q_i. The last token of
  each prefix is summed over the vocabulary instead of read from the text:

    token  sum_i A_(i-1) sum_v min(p_i(v), q_i(v))
    block  sum_i sum_v min(A_(i-1) p_i(v), (Q / P)_(i-1) q_i(v))

  where A is the probability above. Rows must be the target's own text at
  temperature 1: on other text it is the same score, but of other drafts.
  Windows of gamma tokens lie side by side from a random place on, so that each
  token is read once.

  Attributes:
    model: the drafter, called without a cache.
    target: the target, with the drafter's tokens.
    rule: "token" or "block".
    gamma: drafted tokens of a round.
  """

  model: Model
  target: Model
  rule: str = "block"
  gamma: int = 8

  needs = ("target", "drafter")

  def __post_init__(self):
    if self.rule not in RULES:
      raise ValueError(f"rule is {self.rule!r}; it must be one of "
                       f"{', '.join(RULES)}")
    fields.check_fields(self, "gamma")
    check_same_tokens(self.model, self.target)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """The loss of `{"drafter"}` on `tokens [B, S + 1]`, in tokens.

    A window counts as the token of it that counts least.

    Args:
      trainable: see `Objective`.
      frozen: see `Objective`.
      batch: see above; S must be at least 2 gamma - 1.
      key: of the place where the windows begin.

    Returns:
      `(loss, {"accepted": its negative})`.
    """
    params, tokens = {**frozen, **trainable}, batch["tokens"]
    read, size = tokens[:, :-1], tokens.shape[1] - 1
    count = (size + 1) // self.gamma - 1
    if count < 1:
      raise ValueError(f"rows have {size} tokens and gamma is {self.gamma}; "
                       f"give rows of at least {2 * self.gamma - 1} tokens")
    logits = (jax.lax.stop_gradient(self.target(params["target"], read).logits),
              self.model(params["drafter"], read).logits)
    first = jax.random.randint(key, (), 0, self.gamma)

    def windows(x):
      x = jax.lax.dynamic_slice_in_dim(x, first, count * self.gamma, axis=1)
      return x.reshape(x.shape[0], count, self.gamma, *x.shape[2:])

    log_p, log_q = (windows(jax.nn.log_softmax(x)) for x in logits)
    own = windows(tokens[:, 1:])[..., None]
    accepted = accepted_length(self.rule, log_p, log_q, own)
    weights = jnp.min(windows(weights_of(batch)), axis=-1)
    mean = weighted_mean(accepted, weights)
    return -mean, {"accepted": mean}


def accepted_length(rule: str, log_p: jax.Array, log_q: jax.Array,
                    tokens: jax.Array) -> jax.Array:
  """`[...]`, the score of `AcceptedLength` for windows of gamma tokens.

  Args:
    rule: "token" or "block".
    log_p: `[..., gamma, V]`, logarithms of the target's laws.
    log_q: `[..., gamma, V]`, of the drafter's.
    tokens: `[..., gamma, 1]` int32, the target's text.
  """
  ratio = (jnp.take_along_axis(log_q, tokens, axis=-1)
           - jnp.take_along_axis(log_p, tokens, axis=-1))[..., 0]
  before = lambda x: jnp.pad(  # of the tokens before each one
      x[..., :-1], [(0, 0)] * (x.ndim - 1) + [(1, 0)])[..., None]
  if rule == "token":
    passed = before(jnp.cumsum(jnp.minimum(ratio, 0), axis=-1))
    found = passed + jnp.minimum(log_p, log_q)
  else:
    whole = jnp.cumsum(ratio, axis=-1)
    least = jax.lax.cummin(jnp.minimum(whole, 0), axis=whole.ndim - 1)
    found = jnp.minimum(before(least) + log_p, before(whole) + log_q)
  return jnp.sum(jnp.exp(found), axis=(-2, -1))
