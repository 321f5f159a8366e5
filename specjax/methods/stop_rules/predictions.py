"""Rules that predict what is accepted, as a rule by a head that was trained."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from specjax.methods.stop_rules.base import check_share
from specjax.methods.stop_rules.base import Seen
from specjax.methods.stop_rules.base import StopRule
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceHead(StopRule):
  """SpecDec++: a head on the hidden state predicts that a token is accepted.

  Huang et al. 2024 (arXiv:2405.19715). With a_k = P(accept | hidden state
  of x_{k-1}), from which q_k was computed, the chain ends after x_k where
  1 - prod_{j=2..k} a_j > threshold, as in their code: the first token is not
  counted.

  Its parameters are `init_params`'s: `depth` residual blocks x + silu(x W + b)
  and a linear layer to the logits of (reject, accept). `objectives.
  Acceptance` trains them; `experiments/runs/stop_rules.py` does so.

  Attributes:
    threshold: the chain ends where a rejection is likelier, in [0, 1].
    least: tokens of the shortest chain.
    depth: residual blocks of the head.
  """

  threshold: float = 0.7
  least: int = 2
  depth: int = 1
  has_params = True

  def __post_init__(self):
    check_share("threshold", self.threshold)
    fields.check_fields(self, "least", "depth", least=0)

  def init_params(self, key: jax.Array, width: int) -> Any:
    """A head for hidden states of `width`, which knows nothing yet."""
    weights = lambda key, out: {
        "kernel": jax.random.normal(key, (width, out)) * width**-0.5,
        "bias": jnp.zeros((out,))}
    *blocks, last = jax.random.split(key, self.depth + 1)
    return {"blocks": [weights(one, width) for one in blocks],
            "out": weights(last, 2)}

  def start(self, state):
    return jnp.float32(1)

  def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
    """`[..., 2]` of (reject, accept), for `hidden [..., F]`."""
    x = hidden.astype(jnp.float32)
    for block in params["blocks"]:
      x = x + jax.nn.silu(x @ block["kernel"] + block["bias"])
    return x @ params["out"]["kernel"] + params["out"]["bias"]

  def stops(self, params, seen, memory):
    accept = jax.nn.softmax(self.logits(params, seen.hidden))[1]
    memory = memory * jnp.where(seen.place > 0, accept, 1)
    stop = (1 - memory > self.threshold) & (seen.place + 1 >= self.least)
    return stop, memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduler(StopRule):
  """DSpark's scheduler for one row: drafts while tokens a second increase.

  arXiv:2607.05147 (Algorithm 1). With confidences c_j, a_k = prod_{j<=k} c_j
  and Theta_k = (1 + a_1 + ... + a_k) speeds[k], the first Theta_k that does not
  exceed the best before it ends the chain before x_k. The search must not look
  past a dip: c_{k+1} depends on x_k, which a search for the largest Theta of
  all would drop for its value (their Appendix A; total variation 0.15). At
  temperature 0 q_k is one-hot, and c_k is 1 unless it is `learned`.

  Attributes:
    speeds: verifying passes a second with 0, 1, ... drafted tokens; only their
      ratios count, and for longer chains the last one does.
    learned: whether c_k is sigmoid((w . hidden + b) / T_k), of the parameters
      `{"kernel": [F], "bias": []}`; otherwise it is the largest entry of q_k.
    temperatures: T_1, T_2, ... where it is learned, such as
      `training.calibration.temperatures` fits; at later places, and by default
      everywhere, 1.
  """

  speeds: tuple[float, ...]
  learned: bool = False
  temperatures: tuple[float, ...] = ()
  keeps = False

  def __post_init__(self):
    object.__setattr__(self, "speeds", tuple(self.speeds))
    object.__setattr__(self, "temperatures", tuple(self.temperatures))
    _check_temperatures(self.temperatures)
    if self.temperatures and not self.learned:
      raise ValueError(f"temperatures is {self.temperatures}, and c_k is not "
                       "learned; set learned=True, or leave them out")
    if len(self.speeds) < 2 or not all(0 < x < math.inf for x in self.speeds):
      raise ValueError(f"speeds is {self.speeds}; it must hold at least two "
                       "numbers above 0: passes a second with 0, 1, ... tokens")

  @property
  def has_params(self) -> bool:
    return self.learned

  def confidence(self, params: Any, seen: Seen) -> jax.Array:
    """c_k `[]`, of q_k, the hidden state and the token before x_k."""
    if not self.learned:
      return seen.probs.max().astype(jnp.float32)
    return _accepted(params, seen, self.temperatures)

  def start(self, state):
    one = jnp.float32(1)
    return one, one, one * self.speeds[0]  # a_k, the sum of a, the best Theta

  def stops(self, params, seen, memory):
    reach, tokens, best = memory
    reach = reach * self.confidence(params, seen)
    tokens = tokens + reach
    last = len(self.speeds) - 1
    speed = jnp.array(self.speeds, jnp.float32)[
        jnp.minimum(seen.place + 1, last)]
    return tokens * speed <= best, (
        reach, tokens, jnp.maximum(best, tokens * speed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold(StopRule):
  """Ends the chain before a token that a head expects to be rejected.

  DSpark's static threshold (arXiv:2607.05147, and its code): x_k is not drawn
  where sigmoid((w . hidden + b) / T_k) is below it. Parameters are those of
  `Scheduler` where that is `learned`.

  Attributes:
    threshold: in [0, 1].
    temperatures: T_1, T_2, ..., as those of `Scheduler`.
  """

  threshold: float = 0.5
  temperatures: tuple[float, ...] = ()
  keeps = False
  has_params = learned = True

  def __post_init__(self):
    check_share("threshold", self.threshold)
    object.__setattr__(self, "temperatures", tuple(self.temperatures))
    _check_temperatures(self.temperatures)

  def stops(self, params, seen, memory):
    sure = _accepted(params, seen, self.temperatures)
    return sure < self.threshold, memory


def _check_temperatures(temperatures):
  if not all(0 < x < math.inf for x in temperatures):
    raise ValueError(f"temperatures is {temperatures}; each must be above 0")


def _accepted(params, seen, temperatures):
  """The chance that x_k is accepted, by a head on the hidden state."""
  logit = seen.hidden.astype(jnp.float32) @ params["kernel"] + params["bias"]
  if temperatures:
    by_place = jnp.array([*temperatures, 1], jnp.float32)
    logit = logit / by_place[jnp.minimum(seen.place, len(temperatures))]
  return jax.nn.sigmoid(logit)
