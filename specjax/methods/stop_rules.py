"""What a stop rule sees, and what it may leave out."""

import dataclasses
import math
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax.utils import fields


@struct.dataclass
class Seen:
  """Inputs of a rule at one position of one row's chain.

  Attributes:
    place: number k - 1 of drafted tokens before x_k, `[]` int32.
    probs: distribution q_k `[V]` of x_k.
    hidden: hidden state `[F]` from which q_k was computed.
    token: x_k `[]` int32 for a rule that `keeps`, else the token before it.
  """

  place: jax.Array
  probs: jax.Array
  hidden: jax.Array
  token: jax.Array


class StopRule:
  """Base of stop rules.

  Attributes:
    keeps: True if the rule is asked after x_k was sampled, which then stays;
      False if it is asked before, and then x_k is not sampled.
    has_params: True if it reads `params["drafter"]["stop"]`.
  """

  keeps = True
  has_params = False

  def __call__(self, probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the number of tokens of a chain that are submitted, `[]` int32.

    As `exact.certify(stop=...)` calls a rule: before its first round, with the
    rows of q as hidden states and token 0 as the root.

    Args:
      probs: `[gamma, V]`, rows of q along the chain.
      tokens: `[gamma]` int32, the drafted tokens.

    Raises:
      ValueError: the rule has parameters.
    """
    if self.has_params:
      raise ValueError(
          f"the stop rule {type(self).__name__} has parameters; give a "
          "function (probs, tokens) -> length, made of stop_rules.kept")
    return kept(self, None, probs, probs, jnp.zeros((), jnp.int32), tokens)

  def init(self) -> Any:
    """Returns its initial memory over rounds for one row; () by default."""
    return ()

  def start(self, state: Any) -> Any:
    """Returns its memory at the start of a round."""
    del state
    return ()

  def stops(self, params: Any, seen: Seen, memory: Any
            ) -> tuple[jax.Array, Any]:
    """Returns whether the chain of one row ends, `[]` bool, and the memory."""
    raise NotImplementedError

  def commit(self, state: Any, drafted: jax.Array, accepted: jax.Array,
             gamma: jax.Array) -> Any:
    """Returns its memory after a round in which its own chain was verified.

    Args:
      state: memory before the round.
      drafted: `[]` int32, tokens of the row's chain; 0 only if a rule that
        does not keep refused the first one, and what was drafted in its place
        was none of its own.
      accepted: `[]` int32, those of them that were accepted.
      gamma: `[]` int32, the most that the chain could have.
    """
    del drafted, accepted, gamma
    return state


def check_share(name: str, value: float) -> None:
  """Raises `ValueError` unless a number is in [0, 1]."""
  if not 0 <= value <= 1:
    raise ValueError(f"{name} is {value}; it must lie in [0, 1]")


def kept(rule: StopRule, params: Any, probs: jax.Array, hidden: jax.Array,
         root: jax.Array, tokens: jax.Array, state: Any = None) -> jax.Array:
  """Returns the number of tokens that a rule lets a row draft, `[]` int32.

  Args:
    rule: stop rule.
    params: parameters of the model.
    probs: `[gamma, V]`, q_1..q_gamma along the chain.
    hidden: hidden states `[gamma, F]` from which q was computed.
    root: `[]` int32.
    tokens: `[gamma]` int32, x_1..x_gamma.
    state: memory of the rule; None: the initial one.
  """
  chex.assert_rank([probs, hidden, root, tokens], [2, 2, 0, 1])
  before = jnp.append(root, tokens[:-1]).astype(jnp.int32)
  seen = Seen(place=jnp.arange(tokens.shape[0], dtype=jnp.int32), probs=probs,
              hidden=hidden, token=tokens if rule.keeps else before)
  memory = rule.start(rule.init() if state is None else state)

  def step(carry, seen):
    going, memory, count = carry
    stop, memory = rule.stops(params, seen, memory)
    drawn = going if rule.keeps else going & ~stop
    return (going & ~stop, memory, count + drawn), None

  carry = jnp.ones((), bool), memory, jnp.zeros((), jnp.int32)
  (_, _, count), _ = jax.lax.scan(step, carry, seen)
  return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confidence(StopRule):
  """Ends the chain after a token of low draft probability.

  With the drawn token it is the confidence threshold of Hugging Face's assisted
  generation (0.4), with the likeliest that of Kangaroo (Liu et al. 2024,
  arXiv:2404.18911; 0.6) and SWIFT (Xia et al. 2024, arXiv:2410.06916; 0.8).
  At temperature 0 it never ends a chain, for q_k is one-hot.

  Attributes:
    threshold: probability below which the chain ends, in [0, 1].
    likeliest: True to test the largest entry of q_k, False the sampled token's.
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
  """Memory of an adaptive rule for a row.

  Attributes:
    threshold: `[]` float32.
    matched: `[]` float32, a running share of the drafted tokens accepted.
  """

  threshold: jax.Array
  matched: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(StopRule):
  """Draft & Verify's threshold, adapted to a target acceptance share.

  Zhang et al. 2023 (arXiv:2309.08168); the defaults are their code's. The chain
  ends after a token of q_k(x_k) < th. After a round, m <- (m + accepted /
  drafted) / 2, and th' = th + `step` if m < `target`, else th - `step` unless
  the chain was as long as it may be; th <- 0.9 th + 0.1 th', which stays in
  [0, 1] here: beyond, nothing would be drafted again. At temperature 0 it never
  ends a chain, for q_k is one-hot.

  Attributes:
    threshold: th of the first round, in [0, 1].
    target: target share of accepted tokens.
    step: change of th' in a round.
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
  """AdaEDL: ends the chain before a token of high entropy.

  Agrawal et al. 2024 (arXiv:2410.18351): 1 - sqrt(factor H(q_k)) is a lower
  bound of the acceptance rate, H in nats; x_k is not drawn where it is below a
  threshold, which is adapted as Draft & Verify's is. Where the first token is
  refused there is no chain to learn from, and the threshold falls by a tenth of
  `step`, so that drafting is tried again. At temperature 0 it never ends a
  chain, for q_k is one-hot.

  Attributes:
    factor: factor of the entropy.
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
    least: minimal length of a chain.
    depth: number of residual blocks of the head.
  """

  threshold: float = 0.7
  least: int = 2
  depth: int = 1
  has_params = True

  def __post_init__(self):
    check_share("threshold", self.threshold)
    fields.check_fields(self, "least", "depth", least=0)

  def init_params(self, key: jax.Array, width: int) -> Any:
    """Returns an untrained head for hidden states of `width`."""
    weights = lambda key, out: {
        "kernel": jax.random.normal(key, (width, out)) * width**-0.5,
        "bias": jnp.zeros((out,))}
    *blocks, last = jax.random.split(key, self.depth + 1)
    return {"blocks": [weights(one, width) for one in blocks],
            "out": weights(last, 2)}

  def start(self, state):
    return jnp.float32(1)

  def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
    """Returns logits `[..., 2]` of (reject, accept), for `hidden [..., F]`."""
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
  """DSpark's scheduler for one row: drafts while tokens per second increase.

  arXiv:2607.05147 (Algorithm 1). With confidences c_j, a_k = prod_{j<=k} c_j
  and Theta_k = (1 + a_1 + ... + a_k) speeds[k], the first Theta_k that does not
  exceed the best before it ends the chain before x_k. The search must not look
  past a dip: c_{k+1} depends on x_k, which a search for the largest Theta of
  all would drop for its value (their Appendix A; total variation 0.15). At
  temperature 0 q_k is one-hot, and c_k is 1 unless it is `learned`.

  Attributes:
    speeds: verifying passes a second with 0, 1, ... drafted tokens; only their
      ratios count, and for longer chains the last one does.
    learned: True if c_k is sigmoid((w . hidden + b) / T_k), with parameters
      `{"kernel": [F], "bias": []}`; otherwise the largest entry of q_k.
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
    """Returns c_k `[]`, from q_k, the hidden state and the token before x_k."""
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
  """Returns the probability that x_k is accepted, by a head."""
  logit = seen.hidden.astype(jnp.float32) @ params["kernel"] + params["bias"]
  if temperatures:
    by_place = jnp.array([*temperatures, 1], jnp.float32)
    logit = logit / by_place[jnp.minimum(seen.place, len(temperatures))]
  return jax.nn.sigmoid(logit)
