"""Rules that compare what the drafter's own laws say with a threshold."""

import dataclasses
import math

from flax import struct
import jax
import jax.numpy as jnp

from specjax.methods.stop_rules.base import check_share
from specjax.methods.stop_rules.base import StopRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confidence(StopRule):
  """Ends the chain after a token that the drafter was not sure of.

  With the drawn token it is the confidence threshold of Hugging Face's assisted
  generation (0.4), with the likeliest that of Kangaroo (Liu et al. 2024,
  arXiv:2404.18911; 0.6) and SWIFT (Xia et al. 2024, arXiv:2410.06916; 0.8).
  At temperature 0 it never ends a chain, for q_k is one-hot.

  Attributes:
    threshold: the chain ends below it, in [0, 1].
    likeliest: whether the largest entry of q_k counts, or the drawn token's.
  """

  threshold: float = 0.4
  likeliest: bool = False

  def __post_init__(self):
    check_share("threshold", self.threshold)

  def stops(self, params, seen, memory):
    sure = seen.probs.max() if self.likeliest else seen.probs[seen.token]
    return sure < self.threshold, memory


@struct.dataclass
class Adapted:
  """What an adaptive rule remembers of a row.

  Attributes:
    threshold: `[]` float32.
    matched: `[]` float32, a running share of the drafted tokens accepted.
  """

  threshold: jax.Array
  matched: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(StopRule):
  """Draft & Verify's threshold, which keeps a share of the drafts accepted.

  Zhang et al. 2023 (arXiv:2309.08168); the defaults are their code's. The chain
  ends after a token of q_k(x_k) < th. After a round, m <- (m + accepted /
  drafted) / 2, and th' = th + `step` if m < `target`, else th - `step` unless
  the chain was as long as it may be; th <- 0.9 th + 0.1 th', which stays in
  [0, 1] here: beyond, nothing would be drafted again. At temperature 0 it never
  ends a chain, for q_k is one-hot.

  Attributes:
    threshold: th of the first round, in [0, 1].
    target: the share of drafted tokens that is to be accepted.
    step: of th' in a round.
  """

  threshold: float = 0.6
  target: float = 0.9
  step: float = 0.01

  def __post_init__(self):
    check_share("threshold", self.threshold)
    check_share("target", self.target)
    check_share("step", self.step)

  def init(self):
    return Adapted(threshold=jnp.float32(self.threshold),
                   matched=jnp.float32(1))

  def start(self, state):
    return state.threshold

  def stops(self, params, seen, memory):
    return seen.probs[seen.token] < memory, memory

  def commit(self, state, drafted, accepted, gamma):
    share = (accepted / jnp.maximum(drafted, 1)).astype(jnp.float32)
    matched = jnp.where(
        drafted > 0, 0.5 * state.matched + 0.5 * share, state.matched)
    missed = (matched < self.target) & (drafted > 0)
    move = jnp.where(missed, self.step,
                     jnp.where(drafted < gamma, -self.step, 0))
    return Adapted(
        threshold=jnp.clip(state.threshold + 0.1 * move, 0, 1), matched=matched)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entropy(Adaptive):
  """AdaEDL: ends the chain before a token of too high an entropy.

  Agrawal et al. 2024 (arXiv:2410.18351): 1 - sqrt(factor H(q_k)) is a lower
  bound of the acceptance rate, H in nats; x_k is not drawn where it is below a
  threshold, which is adapted as Draft & Verify's is. Where the first token is
  refused there is no chain to learn from, and the threshold falls by a tenth of
  `step`, so that drafting is tried again. At temperature 0 it never ends a
  chain, for q_k is one-hot.

  Attributes:
    factor: of the entropy.
  """

  keeps = False
  threshold: float = 0.4
  factor: float = 0.2

  def __post_init__(self):
    super().__post_init__()
    if not 0 <= self.factor < math.inf:
      raise ValueError(f"factor is {self.factor}; it must be at least 0")

  def stops(self, params, seen, memory):
    q = seen.probs
    entropy = -jnp.sum(jnp.where(q > 0, q * jnp.log(jnp.where(q > 0, q, 1)), 0))
    bound = 1 - jnp.sqrt(self.factor * jnp.maximum(entropy, 0))
    return bound < memory, memory
