"""Stop rules, which end a chain of drafted tokens early.

A drafter samples up to gamma tokens in a round. For each token, a stop rule
decides whether the chain ends, for example because the draft model's
probability is low. Below, x_k is the k-th drafted token of a chain, k =
1..gamma, and q_k is the draft distribution from which x_k is sampled. The rule
is evaluated for k = 1, 2, ... until it ends the chain. `StopRule.keeps` is True
if the evaluation follows the sampling of x_k, and False if it precedes it.

Some rules have a memory over rounds, for example an adapted threshold. This
memory is updated after every round in which the chain was verified.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax.methods.networks import Params
from specjax.types import Draft
from specjax.types import Verdict
from specjax.utils import fields

# Logits `[B, V]` of the next token (B rows, V tokens), and the hidden
# states `[B, F]` of width F from which the logits were computed.
Forecast = tuple[jax.Array, jax.Array]
Memory = chex.ArrayTree  # memory of a stop rule, over rounds or in one round


@struct.dataclass
class Seen:
  """Inputs of a stop rule for the k-th drafted token x_k of one sequence.

  Attributes:
    place: number k - 1 of drafted tokens before x_k, `[]` int32.
    probs: draft distribution q_k `[V]` from which x_k is sampled.
    hidden: hidden state `[F]` of the draft model from which q_k was computed.
    token: token id, `[]` int32: x_k if `StopRule.keeps`, otherwise the token
      before x_k.
  """

  place: jax.Array
  probs: jax.Array
  hidden: jax.Array
  token: jax.Array


class StopRule:
  """Base class of stop rules, which end a chain of drafted tokens early.

  Attributes:
    keeps: True if the rule is evaluated after a token is sampled. The token at
      which the rule ends the chain is then the last token of the chain. False
      if the rule is evaluated before a token is sampled. The token at which the
      rule ends the chain is then not sampled.
    has_params: True if the rule has parameters, see `draft_shapes.Chain`.
    learned: True if the parameters are those of one layer that predicts
      acceptance, `{"kernel": [F], "bias": []}`.
  """

  keeps = True
  has_params = False
  learned = False

  def __call__(self, probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the number of tokens of a chain that the rule keeps, `[]` int32.

    `exact.certify(stop=...)` calls a rule in this form, without hidden states
    and earlier rounds. The rule therefore gets the draft distributions in place
    of hidden states, token 0 as the root, and its initial memory.

    Args:
      probs: draft distributions `[gamma, V]` along the chain.
      tokens: drafted tokens, `[gamma]` int32.

    Raises:
      ValueError: the rule has parameters.
    """
    if self.has_params:
      raise ValueError(
          f"the stop rule {type(self).__name__} has parameters; give a "
          "function (probs, tokens) -> length that calls "
          "stop_rules.count_tokens with them")
    return count_tokens(
        self, None, probs, probs, jnp.zeros((), jnp.int32), tokens)

  def init(self) -> Memory:
    """Returns the memory of one sequence before the first round.

    The base class returns (), because it has no memory over rounds.
    """
    return ()

  def start(self, state: Memory) -> Memory:
    """Returns the memory at the start of one round.

    Args:
      state: memory over rounds, from `init` or `commit`.
    """
    del state
    return ()

  def stops(self, params: Params, seen: Seen, memory: Memory
            ) -> tuple[jax.Array, Memory]:
    """Decides whether the chain ends at one token.

    Args:
      params: parameters of the rule, or None if it has no parameters.
      seen: inputs for this token of the chain.
      memory: memory within the round, from `start` or from the call for the
        previous token.

    Returns:
      `(stop, memory)`: `stop`, `[]` bool, is True if the chain ends; `memory`
      is the argument for the next token.
    """
    raise NotImplementedError

  def commit(self, state: Memory, drafted: jax.Array, accepted: jax.Array,
             gamma: jax.Array) -> Any:
    """Returns the memory over rounds after a chain was verified.

    Args:
      state: memory over rounds before this round.
      drafted: number of tokens of the chain, `[]` int32. It can be 0 only if
        `keeps` is False, because only then can the rule end a chain before its
        first token.
      accepted: number of accepted tokens of the chain, `[]` int32.
      gamma: maximum draft length in this round, `[]` int32.
    """
    del drafted, accepted, gamma
    return state

  @property
  def learns(self) -> bool:
    """True if the rule has a memory over rounds, such as a threshold."""
    return bool(jax.tree.leaves(self.init()))


def check_share(name: str, value: float) -> None:
  """Raises `ValueError` unless `value`, the argument `name`, is in [0, 1]."""
  if not 0 <= value <= 1:
    raise ValueError(f"{name} is {value}; it must be in [0, 1]")


def count_tokens(rule: StopRule, params: Params, probs: jax.Array,
                 hidden: jax.Array, root: jax.Array, tokens: jax.Array,
                 state: Memory = None) -> jax.Array:
  """Returns the number of tokens of a given chain that a rule keeps.

  >>> probs = jnp.array([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5]])
  >>> rule = Confidence(threshold=0.4)
  >>> int(count_tokens(rule, None, probs, probs, jnp.array(0),
  ...                  jnp.array([0, 0, 1])))
  2

  Args:
    rule: stop rule.
    params: parameters of the rule, or None if it has no parameters.
    probs: draft distributions `[gamma, V]` along the chain.
    hidden: hidden states `[gamma, F]` from which `probs` was computed.
    root: last token before the chain, `[]` int32.
    tokens: drafted tokens `[gamma]` int32.
    state: memory of the rule over rounds. None means the initial memory.

  Returns:
    Number of tokens, `[]` int32.
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
  """Stop rule that ends the chain after a token of low draft probability.

  Hugging Face's assisted generation tests the probability of the sampled token,
  with threshold 0.4. Two papers test the largest probability of the draft
  distribution instead: Kangaroo (arXiv:2404.18911) with threshold 0.6, and
  SWIFT (arXiv:2410.06916) with threshold 0.8. At temperature 0 this rule never
  ends a chain, because draft distributions are one-hot.

  Attributes:
    threshold: probability below which the chain ends, in [0, 1].
    likeliest: True to test the largest probability of the draft distribution,
      False to test the probability of the sampled token.
  """

  threshold: float = 0.4
  likeliest: bool = False

  def __post_init__(self):
    check_share("threshold", self.threshold)

  def stops(self, params: Params, seen: Seen, memory: Memory
            ) -> tuple[jax.Array, Memory]:
    sure = seen.probs.max() if self.likeliest else seen.probs[seen.token]
    return sure < self.threshold, memory


@struct.dataclass
class Adapted:
  """Memory of the stop rule `Adaptive` for one sequence.

  Attributes:
    threshold: current threshold of the draft probability, `[]` float32.
    matched: moving average of the acceptance rate, `[]` float32.
  """

  threshold: jax.Array
  matched: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(StopRule):
  """Stop rule of Draft & Verify, with a threshold that adapts to acceptance.

  See Zhang et al. 2023 (arXiv:2309.08168). The defaults are those of their
  code. The chain ends after a token whose draft probability is below a
  threshold th. Each round updates m, the moving average of the acceptance rate,
  and then th:

    m <- (m + accepted / drafted) / 2,
    th' = th + step if m < target,
          th        else if the chain had its maximum length,
          th - step otherwise,
    th <- 0.9 th + 0.1 th', clipped to [0, 1].

  The clipping is necessary because th > 1 would end every chain after its first
  token. At temperature 0 this rule never ends a chain, because draft
  distributions are one-hot.

  Attributes:
    threshold: threshold th of the first round, in [0, 1].
    target: desired acceptance rate, in [0, 1].
    step: step size of the threshold in the formula for th', in [0, 1].
  """

  threshold: float = 0.6
  target: float = 0.9
  step: float = 0.01

  def __post_init__(self):
    check_share("threshold", self.threshold)
    check_share("target", self.target)
    check_share("step", self.step)

  def init(self) -> Adapted:
    return Adapted(threshold=jnp.float32(self.threshold),
                   matched=jnp.float32(1))

  def start(self, state: Adapted) -> jax.Array:
    return state.threshold

  def stops(self, params: Params, seen: Seen, memory: Memory
            ) -> tuple[jax.Array, Memory]:
    return seen.probs[seen.token] < memory, memory

  def commit(self, state: Adapted, drafted: jax.Array, accepted: jax.Array,
             gamma: jax.Array) -> Adapted:
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
  """Stop rule AdaEDL, which ends a chain where the draft entropy is high.

  See Agrawal et al. 2024 (arXiv:2410.18351). For a token sampled from the draft
  distribution q, the rule estimates a lower bound of the acceptance rate,
  1 - sqrt(factor H(q)). H is the entropy in nats. The chain ends before the
  token if this bound is below a threshold. The threshold adapts as in
  `Adaptive`. If a chain ends before its first token, the threshold falls by a
  tenth of `step`, so that later chains have tokens again. At temperature 0 this
  rule never ends a chain, because the entropy is 0.

  Attributes:
    threshold: threshold of the bound in the first round, in [0, 1].
    target: desired acceptance rate, in [0, 1].
    step: step size of the threshold, in [0, 1] (see `Adaptive`).
    factor: factor of the entropy in the bound, at least 0.
  """

  keeps = False
  threshold: float = 0.4
  factor: float = 0.2

  def __post_init__(self):
    super().__post_init__()
    if not 0 <= self.factor < math.inf:
      raise ValueError(f"factor is {self.factor}; it must be at least 0")

  def stops(self, params: Params, seen: Seen, memory: Memory
            ) -> tuple[jax.Array, Memory]:
    q = seen.probs
    entropy = -jnp.sum(jnp.where(q > 0, q * jnp.log(jnp.where(q > 0, q, 1)), 0))
    bound = 1 - jnp.sqrt(self.factor * jnp.maximum(entropy, 0))
    return bound < memory, memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceHead(StopRule):
  """Stop rule of SpecDec++, with a trained head that predicts acceptance.

  See Huang et al. 2024 (arXiv:2405.19715). The head predicts a_k, the
  probability that drafted token k is accepted. Its input is the hidden state
  from which the token's draft distribution was computed. The predicted
  probability of a rejection among the first k tokens is 1 - a_2 a_3 ... a_k. As
  in the authors' code, the product does not contain a_1. The chain ends after
  token k if this probability is above the threshold.

  The head consists of `depth` residual blocks x + silu(x W + b), and a linear
  layer to the two logits of (reject, accept). `init_params` returns its initial
  parameters, and `objectives.Acceptance` trains them. See
  `experiments/runs/stop_rules.py` for an example.

  Attributes:
    threshold: probability of a rejection above which the chain ends, in [0, 1].
    least: minimum length of a chain, unless gamma is smaller.
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
    """Returns initial parameters of the head.

    Args:
      key: PRNG key.
      width: width F of the hidden states.
    """
    weights = lambda key, out: {
        "kernel": jax.random.normal(key, (width, out)) * width**-0.5,
        "bias": jnp.zeros((out,))}
    *blocks, last = jax.random.split(key, self.depth + 1)
    return {"blocks": [weights(block, width) for block in blocks],
            "out": weights(last, 2)}

  def start(self, state: Memory) -> jax.Array:
    return jnp.float32(1)

  def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
    """Returns the logits `[..., 2]` of (reject, accept).

    Args:
      params: parameters of the head, see `init_params`.
      hidden: hidden states `[..., F]` of width F.
    """
    x = hidden.astype(jnp.float32)
    for block in params["blocks"]:
      x = x + jax.nn.silu(x @ block["kernel"] + block["bias"])
    return x @ params["out"]["kernel"] + params["out"]["bias"]

  def stops(self, params: Params, seen: Seen, memory: Memory
            ) -> tuple[jax.Array, Memory]:
    accept = jax.nn.softmax(self.logits(params, seen.hidden))[1]
    memory = memory * jnp.where(seen.place > 0, accept, 1)
    stop = (1 - memory > self.threshold) & (seen.place + 1 >= self.least)
    return stop, memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduler(StopRule):
  """Stop rule of DSpark: drafts while the expected tokens per second increase.

  See Algorithm 1 of arXiv:2607.05147. This class applies the algorithm to each
  sequence separately. Let c_j be the predicted probability that drafted token j
  is accepted if all tokens before it are accepted, and a_k = c_1 c_2 ... c_k.
  With k drafted tokens, the expected number of tokens per second is

    Theta_k = (1 + a_1 + ... + a_k) speeds[k].

  The chain ends before the first token k for which Theta_k is not above all
  earlier values. A later value may be larger again, but it depends on the
  sampled token k. If later values determined whether token k is drafted, the
  output would be biased (Appendix A of the paper).

  Attributes:
    speeds: target calls per second with 0, 1, ... drafted tokens. Only the
      ratios have an effect. The last value is used for all longer chains.
    learned: True if a trained layer computes c_k as sigmoid((w . hidden + b) /
      T_k), with parameters `{"kernel": w [F], "bias": b []}` for hidden states
      of width F. False if c_k is the largest probability of the draft
      distribution, which is 1 at temperature 0.
    temperatures: temperatures T_1, T_2, ... of a learned c_k. All later
      temperatures are 1. `training.calibration.temperatures` fits them.
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
      raise ValueError(f"temperatures is {self.temperatures}, which has no "
                       "effect with learned=False; set learned=True, or leave "
                       "temperatures out")
    if len(self.speeds) < 2 or not all(0 < x < math.inf for x in self.speeds):
      raise ValueError(f"speeds is {self.speeds}; it must contain at least two "
                       "numbers above 0, passes per second with 0, 1, ... "
                       "tokens")

  @property
  def has_params(self) -> bool:
    return self.learned

  def confidence(self, params: Params, seen: Seen) -> jax.Array:
    """Returns the predicted acceptance probability c_k of the next token, `[]`.
    """
    if not self.learned:
      return seen.probs.max().astype(jnp.float32)
    return _accepted(params, seen, self.temperatures)

  def start(self, state: Memory) -> tuple[jax.Array, jax.Array, jax.Array]:
    reach = jnp.float32(1)
    # The memory has three numbers: a_k; the sum 1 + a_1 + ... + a_k; and the
    # largest Theta so far. For k = 0 they are 1, 1 and speeds[0].
    return reach, reach, reach * self.speeds[0]

  def stops(self, params: Params, seen: Seen, memory: Memory
            ) -> tuple[jax.Array, Memory]:
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
  """Stop rule that ends the chain where the predicted acceptance is too low.

  This is the static threshold in the code of DSpark (arXiv:2607.05147). The
  predicted acceptance probability of token k is sigmoid((w . hidden + b) /
  T_k). `hidden` is the hidden state from which the token's draft distribution
  was computed. The chain ends before token k if this probability is below the
  threshold. The parameters are `{"kernel": w [F], "bias": b []}`, as in
  `Scheduler(learned=True)`.

  Attributes:
    threshold: minimum predicted acceptance probability of a drafted token, in
      [0, 1].
    temperatures: temperatures T_1, T_2, .... All later temperatures are 1.
  """

  threshold: float = 0.5
  temperatures: tuple[float, ...] = ()
  keeps = False
  has_params = learned = True

  def __post_init__(self):
    check_share("threshold", self.threshold)
    object.__setattr__(self, "temperatures", tuple(self.temperatures))
    _check_temperatures(self.temperatures)

  def stops(self, params: Params, seen: Seen, memory: Memory
            ) -> tuple[jax.Array, Memory]:
    sure = _accepted(params, seen, self.temperatures)
    return sure < self.threshold, memory


def _check_temperatures(temperatures: tuple[float, ...]) -> None:
  if not all(0 < x < math.inf for x in temperatures):
    raise ValueError(f"temperatures is {temperatures}; each must be above 0")


def _accepted(params: Mapping[str, jax.Array], seen: Seen,
              temperatures: tuple[float, ...]) -> jax.Array:
  """Returns a trained layer's acceptance probability `[]` of the next token.

  Args:
    params: parameters `{"kernel": w [F], "bias": b []}` of the layer.
    seen: inputs for the next token, with the hidden state `[F]`.
    temperatures: temperatures T_1, T_2, ... by which the logits of tokens 1, 2,
      ... are divided; 1 for all later tokens.
  """
  logit = seen.hidden.astype(jnp.float32) @ params["kernel"] + params["bias"]
  if temperatures:
    by_place = jnp.array([*temperatures, 1], jnp.float32)
    logit = logit / by_place[jnp.minimum(seen.place, len(temperatures))]
  return jax.nn.sigmoid(logit)


@struct.dataclass
class RuleState:
  """State of a stop rule with memory over rounds, for B batch rows.

  Attributes:
    memory: memory of the rule, leaves `[B, ...]`.
    room: maximum length of the last chain, `[B]` int32; 0 after the chain is
      verified. A controller may change the maximum length in every round.
    drafted: number of tokens of the last chain, `[B]` int32.
  """

  memory: Memory
  room: jax.Array
  drafted: jax.Array


def init_state(rule: StopRule, rows: int) -> Any:
  """Returns the state of a stop rule before the first round.

  Args:
    rule: stop rule.
    rows: number of batch rows.
  """
  memory = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (rows, *jnp.shape(x))), rule.init())
  if not rule.learns:
    return memory
  none = jnp.zeros((rows,), jnp.int32)
  return RuleState(memory=memory, room=none, drafted=none)


def record_chains(state: Memory, draft: Draft, gamma: int) -> Any:
  """Returns the state of a stop rule after chains are drafted.

  Args:
    state: state of the rule.
    draft: batch of chains drafted with the rule.
    gamma: maximum length of a chain.
  """
  if not isinstance(state, RuleState):
    return state
  return state.replace(
      room=jnp.full_like(state.room, gamma),
      drafted=jnp.sum(draft.drafted, axis=1, dtype=jnp.int32))


def start_round(rule: StopRule, state: Memory, rows: jax.Array
                ) -> tuple[jax.Array, Memory]:
  """Returns the arguments `(going, memory)` of the first `ask` of a round.

  Args:
    rule: stop rule.
    state: state of the rule, see `init_state`.
    rows: `[B]` bool, True for the batch rows in which tokens are drafted.

  Returns:
    `(rows, memory)`. All chains continue at first, so `going` is `rows`.
    `memory` is the rule's memory at the start of the round, leaves `[B, ...]`.
  """
  if isinstance(state, RuleState):
    return rows, jax.vmap(rule.start)(state.memory)
  memory = rule.start(state)
  return rows, jax.tree.map(
      lambda x: jnp.broadcast_to(x, (*rows.shape, *jnp.shape(x))), memory)


def ask(rule: StopRule, params: Params, seen: Seen, going: jax.Array,
        memory: Memory) -> tuple[jax.Array, Memory]:
  """Evaluates a stop rule for one drafted token in each of B rows.

  Args:
    rule: stop rule.
    params: parameters of the rule, or None if it has no parameters.
    seen: inputs of the rule, with the batch as first axis.
    going: `[B]` bool, True for rows whose chain has not ended yet.
    memory: memory within the round, with the batch as first axis.

  Returns:
    `(going, memory)`: `going` is `[B]` bool, True for rows whose chain
    continues; `memory` is the new memory.
  """
  chex.assert_rank(going, 1)
  stop, memory = jax.vmap(rule.stops, (None, 0, 0))(params, seen, memory)
  return going & ~stop, memory


def update(rule: StopRule, state: Memory, verdict: Verdict, count: jax.Array,
           own: jax.Array) -> Any:
  """Returns the state of a stop rule after a round was verified.

  The memory over rounds changes in two kinds of rows: rows whose verified draft
  is the chain drafted with this rule, and rows in which the rule ended the
  chain before its first token.

  Args:
    rule: stop rule.
    state: result of `record_chains`.
    verdict: verdicts of the round.
    count: number `[B]` int32 of committed tokens in each row. In rows with 0,
      the memory does not change.
    own: `[B]` bool, see `Drafter.commit`.
  """
  chex.assert_rank(count, 1)
  if not isinstance(state, RuleState):
    return state
  refused = state.drafted == 0
  new = jax.vmap(rule.commit)(
      state.memory, state.drafted,
      jnp.where(refused, 0, verdict.num_accepted), state.room)
  learns = (count > 0) & (state.room > 0) & (own | refused)
  keep = lambda new, old: jax.vmap(jnp.where)(learns, new, old)
  return state.replace(memory=jax.tree.map(keep, new, state.memory),
                       room=jnp.zeros_like(state.room),
                       drafted=jnp.zeros_like(state.drafted))


def split_params(rule: StopRule, params: Params) -> tuple[Any, Any]:
  """Returns the parameters of the draft model and of its stop rule.

  Args:
    rule: stop rule with parameters.
    params: parameters of the drafter: `{"model": ..., "stop": ...}`.

  Raises:
    ValueError: the rule's parameters are missing.
  """
  if not (isinstance(params, Mapping) and {"model", "stop"} <= set(params)):
    raise ValueError(
        f"stop is {type(rule).__name__}, a rule with parameters; give "
        "params['drafter'] = {'model': ..., 'stop': ...}")
  return params["model"], params["stop"]
