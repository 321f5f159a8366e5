"""Stop rules, which end a drafted chain early, and their use in drafters.

Below, x_k is the k-th drafted token of a chain, k = 1..gamma, and q_k is the
draft distribution from which it is sampled. A rule is evaluated for k = 1, 2,
..., before or after x_k is sampled (`StopRule.keeps`), until it ends the chain.
A rule with memory over rounds is updated after every round that verified its
chain.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.methods.networks import Params
from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import Verdict
from specjax.utils import fields

# Logits `[B, V]` of the next token, and the hidden states `[B, F]` that they
# were computed from.
Forecast = tuple[jax.Array, jax.Array]
Memory = chex.ArrayTree  # memory of a rule, over rounds or in one round


@struct.dataclass
class Seen:
  """Inputs of a rule for the k-th drafted token of one row, x_k.

  Attributes:
    place: number k - 1 of drafted tokens before x_k, `[]` int32.
    probs: draft distribution q_k `[V]` from which x_k is sampled.
    hidden: hidden state `[F]` from which q_k was computed.
    token: `[]` int32; x_k if the rule is evaluated after sampling (`keeps`),
      else the token before x_k.
  """

  place: jax.Array
  probs: jax.Array
  hidden: jax.Array
  token: jax.Array


class StopRule:
  """Base of stop rules.

  Attributes:
    keeps: True if the rule is evaluated after a token is sampled: a chain then
      ends with this token. False if it is evaluated before: a chain then ends
      without the token, which is not sampled.
    has_params: True if the rule reads `params["drafter"]["stop"]`.
  """

  keeps = True
  has_params = False

  def __call__(self, probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the number of tokens after which the chain ends, `[]` int32.

    `exact.certify(stop=...)` calls a rule this way. The rule has its initial
    memory. The draft distributions also serve as hidden states, and the root is
    token 0.

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
    """Returns the initial memory over rounds for one row; () by default."""
    return ()

  def start(self, state: Memory) -> Memory:
    """Returns the memory at the start of a round."""
    del state
    return ()

  def stops(self, params: Params, seen: Seen, memory: Memory
            ) -> tuple[jax.Array, Memory]:
    """Returns `(stop, memory)`; `stop` `[]` bool is True if the chain ends.

    Args:
      params: parameters of the rule, or None.
      seen: inputs at this position of the chain.
      memory: memory within the round, from `start` or the previous position.
    """
    raise NotImplementedError

  def commit(self, state: Memory, drafted: jax.Array, accepted: jax.Array,
             gamma: jax.Array) -> Any:
    """Returns the memory after a round that verified this rule's chain.

    Args:
      state: memory before the round.
      drafted: number of tokens of the row's chain, `[]` int32. It is 0 only if
        a rule that is evaluated before sampling (`keeps` is False) ended the
        chain before its first token.
      accepted: number of accepted tokens of the chain, `[]` int32.
      gamma: largest possible length of the chain, `[]` int32.
    """
    del drafted, accepted, gamma
    return state

  @property
  def learns(self) -> bool:
    """True if the rule has memory over rounds."""
    return bool(jax.tree.leaves(self.init()))


def check_share(name: str, value: float) -> None:
  """Raises `ValueError` unless a number is in [0, 1]."""
  if not 0 <= value <= 1:
    raise ValueError(f"{name} is {value}; it must be in [0, 1]")


def count_tokens(rule: StopRule, params: Params, probs: jax.Array,
                 hidden: jax.Array, root: jax.Array, tokens: jax.Array,
                 state: Memory = None) -> jax.Array:
  """Returns the number of tokens that a rule lets a row draft, `[]` int32.

  >>> probs = jnp.array([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5]])
  >>> rule = Confidence(threshold=0.4)
  >>> int(count_tokens(rule, None, probs, probs, jnp.array(0),
  ...                  jnp.array([0, 0, 1])))
  2

  Args:
    rule: stop rule.
    params: parameters of the rule.
    probs: draft distributions `[gamma, V]` along the chain.
    hidden: hidden states `[gamma, F]` from which `probs` was computed.
    root: root token, `[]` int32.
    tokens: drafted tokens `[gamma]` int32.
    state: memory of the rule; None: the initial memory.
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

  Hugging Face's assisted generation tests the probability of the sampled token,
  with threshold 0.4. Kangaroo (arXiv:2404.18911; 0.6) and SWIFT
  (arXiv:2410.06916; 0.8) test the largest probability instead. At temperature 0
  draft distributions are one-hot, so the rule ends no chain.

  Attributes:
    threshold: probability below which the chain ends, in [0, 1].
    likeliest: True to test the largest probability of the draft distribution,
      False to test the sampled token's.
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
  """Memory of an `Adaptive` rule for one row.

  Attributes:
    threshold: current threshold, `[]` float32.
    matched: moving average of accepted over drafted tokens, `[]` float32.
  """

  threshold: jax.Array
  matched: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(StopRule):
  """Draft & Verify's threshold, adapted to a desired acceptance rate.

  Zhang et al. 2023 (arXiv:2309.08168), with the defaults of their code. The
  chain ends after a token whose draft probability is below a threshold th.
  After a round, the moving average m of the acceptance rate and th become

    m <- (m + accepted / drafted) / 2,
    th' = th + step if m < target; th if the chain had its largest length; else
      th - step,
    th <- 0.9 th + 0.1 th', clipped to [0, 1].

  Without clipping, th could exceed 1, and drafting would never resume. At
  temperature 0 draft distributions are one-hot, so the rule ends no chain.

  Attributes:
    threshold: threshold th of the first round, in [0, 1].
    target: desired acceptance rate.
    step: difference of th' from th.
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
  """AdaEDL: ends the chain before a token of high entropy.

  Agrawal et al. 2024 (arXiv:2410.18351). For a token with draft distribution q,
  1 - sqrt(factor H(q)) is a lower bound of the acceptance rate, where H is the
  entropy in nats. The token is not sampled if the bound is below a threshold,
  which is adapted as in `Adaptive`. After a round whose chain ended before its
  first token, the threshold falls by a tenth of `step`, so that drafting
  resumes later. At temperature 0 the entropy is 0, so the rule ends no chain.

  Attributes:
    factor: factor of the entropy in the bound.
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
  """SpecDec++: a head on the hidden state predicts the acceptance of a token.

  Huang et al. 2024 (arXiv:2405.19715). The head predicts a_k, the probability
  that drafted token k is accepted. It reads the hidden state from which the
  token's draft distribution was computed. The chain ends after token k if the
  predicted probability of a rejection, 1 - a_2 a_3 ... a_k, is above the
  threshold. As in their code, a_1 is left out.

  `init_params` returns the parameters: `depth` residual blocks x + silu(x W +
  b) and a linear layer to the logits of (reject, accept).
  `objectives.Acceptance` trains them, as `experiments/runs/stop_rules.py`
  shows.

  Attributes:
    threshold: probability of a rejection above which the chain ends.
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
    return {"blocks": [weights(block, width) for block in blocks],
            "out": weights(last, 2)}

  def start(self, state: Memory) -> jax.Array:
    return jnp.float32(1)

  def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
    """Returns logits `[..., 2]` of (reject, accept), for `hidden [..., F]`."""
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
  """DSpark's scheduler for one row: drafts while tokens per second increase.

  arXiv:2607.05147 (Algorithm 1). Let c_j be the confidence that drafted token j
  is accepted if all tokens before it are, and a_k = c_1 c_2 ... c_k. With k
  drafted tokens the estimated tokens per second are

    Theta_k = (1 + a_1 + ... + a_k) speeds[k].

  The chain ends before the first token k whose Theta_k is not above the largest
  earlier value. A later Theta may be larger again. But it depends on token k,
  so using it in the decision about token k would bias the output (their
  Appendix A).

  Attributes:
    speeds: verifying passes per second with 0, 1, ... drafted tokens. Only the
      ratios have an effect. The last value is used for all longer chains.
    learned: True if c_k is sigmoid((w . hidden + b) / T_k), with parameters
      `{"kernel": w [F], "bias": b []}`. False if c_k is the largest probability
      of the draft distribution, which is 1 at temperature 0.
    temperatures: temperatures T_1, T_2, ... of a learned c_k, such as
      `training.calibration.temperatures` fits; 1 for all later tokens.
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
    """Returns the confidence c_k `[]` in the next drafted token."""
    if not self.learned:
      return seen.probs.max().astype(jnp.float32)
    return _accepted(params, seen, self.temperatures)

  def start(self, state: Memory) -> tuple[jax.Array, jax.Array, jax.Array]:
    reach = jnp.float32(1)
    # For k = 0: a_k, the sum 1 + a_1 + ... + a_k, and the largest Theta so far.
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
  """Ends the chain before a token whose predicted acceptance is too low.

  DSpark's static threshold (arXiv:2607.05147, and its code). Drafted token k is
  not sampled if its confidence sigmoid((w . hidden + b) / T_k) is below the
  threshold. The parameters w and b are as in `Scheduler(learned=True)`.

  Attributes:
    threshold: smallest confidence of a drafted token, in [0, 1].
    temperatures: temperatures T_1, T_2, ..., see `Scheduler`.
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
  """Returns a head's predicted probability that the next token is accepted."""
  logit = seen.hidden.astype(jnp.float32) @ params["kernel"] + params["bias"]
  if temperatures:
    by_place = jnp.array([*temperatures, 1], jnp.float32)
    logit = logit / by_place[jnp.minimum(seen.place, len(temperatures))]
  return jax.nn.sigmoid(logit)


@struct.dataclass
class RuleState:
  """State of a rule with memory over rounds.

  Attributes:
    memory: memory of the rule, leaves `[B, ...]`.
    room: largest possible length of the last chain, `[B]` int32, which a
      controller may change from round to round; 0 after it is verified.
    chain: hash of the tokens of the last chain, `[B]` uint32; 0 if the chain is
      empty. A merge or a fallback may verify another drafter's draft. Then the
      hashes differ, and the memory is not updated.
  """

  memory: Memory
  room: jax.Array
  chain: jax.Array


def init_state(rule: StopRule, rows: int) -> Any:
  """Returns the state of a rule before its first round, for `rows` rows."""
  memory = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (rows, *jnp.shape(x))), rule.init())
  if not rule.learns:
    return memory
  return RuleState(memory=memory, room=jnp.zeros((rows,), jnp.int32),
                   chain=jnp.zeros((rows,), jnp.uint32))


def memory_of(state: Memory) -> Any:
  """Returns the memory over rounds in a state of `init_state`."""
  return state.memory if isinstance(state, RuleState) else state


def record_chains(state: Memory, draft: Draft, gamma: int) -> Any:
  """Returns the state of a rule after its chains are drafted.

  Args:
    state: state of the rule.
    draft: batch of chains.
    gamma: maximal length of a chain.
  """
  if not isinstance(state, RuleState):
    return state
  return state.replace(room=jnp.full_like(state.room, gamma),
                       chain=_hashed(draft))


def _hashed(draft: Draft) -> jax.Array:
  """Returns a hash of the drafted tokens, `[B]` uint32; 0 if there are none."""
  real = draft.drafted[:, 1:]
  place = 1 + 2 * jnp.arange(real.shape[1], dtype=jnp.uint32)
  tokens = (draft.tokens[:, 1:].astype(jnp.uint32) + 1) * jnp.uint32(2654435761)
  mixed = (tokens ^ (tokens >> 15)) * place * jnp.uint32(2246822519)
  return jnp.sum(jnp.where(real, mixed ^ (mixed >> 13), 0), axis=1,
                 dtype=jnp.uint32)


def start_round(rule: StopRule, state: Memory, rows: jax.Array
                ) -> tuple[jax.Array, Memory]:
  """Returns `(going, memory)` of all rows at the start of a round.

  Args:
    rule: stop rule.
    state: state of the rule, see `init_state`.
    rows: rows `[B]` bool that draft.
  """
  if isinstance(state, RuleState):
    return rows, jax.vmap(rule.start)(state.memory)
  memory = rule.start(state)
  return rows, jax.tree.map(
      lambda x: jnp.broadcast_to(x, (*rows.shape, *jnp.shape(x))), memory)


def ask(rule: StopRule, params: Params, seen: Seen, going: jax.Array,
        memory: Memory) -> tuple[jax.Array, Memory]:
  """Returns the mask `[B]` of rows whose chains continue, and the memory.

  Args:
    rule: stop rule.
    params: parameters of the rule, or None.
    seen: inputs of the rule for all rows.
    going: mask `[B]` of rows whose chains continued so far.
    memory: memory within the round.
  """
  chex.assert_rank(going, 1)
  stop, memory = jax.vmap(rule.stops, (None, 0, 0))(params, seen, memory)
  return going & ~stop, memory


def update(rule: StopRule, state: Memory, draft: Draft, verdict: Verdict,
           count: jax.Array) -> Any:
  """Returns the state of a rule after a round.

  Args:
    rule: stop rule.
    state: result of `record_chains`.
    draft: draft of the round, perhaps another drafter's.
    verdict: verdicts of the round.
    count: number `[B]` int32 of committed tokens. The memory of rows with 0 is
      unchanged.
  """
  chex.assert_rank(count, 1)
  if not isinstance(state, RuleState):
    return state
  refused = (state.chain == 0) & (state.room > 0)
  drafted = jnp.where(
      refused, 0, jnp.sum(draft.drafted, axis=1, dtype=jnp.int32))
  new = jax.vmap(rule.commit)(
      state.memory, drafted, jnp.where(refused, 0, verdict.num_accepted),
      state.room)
  is_own = (state.chain != 0) & (state.chain == _hashed(draft))
  learns = (count > 0) & (is_own | refused)
  keep = lambda new, old: jax.vmap(jnp.where)(learns, new, old)
  return RuleState(memory=jax.tree.map(keep, new, state.memory),
                   room=jnp.zeros_like(state.room),
                   chain=jnp.zeros_like(state.chain))


def split_params(rule: StopRule | None, params: Params) -> tuple[Any, Any]:
  """Returns the parameters of the model and of the rule.

  Args:
    rule: stop rule, or None.
    params: parameters `params["drafter"]`, `{"model", "stop"}` if the rule has
      parameters.

  Raises:
    ValueError: the rule's parameters are missing.
  """
  if rule is None or not rule.has_params:
    return params, None
  if not (isinstance(params, Mapping) and {"model", "stop"} <= set(params)):
    raise ValueError(
        f"stop is {type(rule).__name__}, a rule with parameters; give "
        "params['drafter'] = {'model': ..., 'stop': ...}")
  return params["model"], params["stop"]


def draw_until(rule: StopRule, params: Params, transform: LogitsTransform,
               uniforms: jax.Array, state: DecodeState,
               rule_state: chex.ArrayTree, first: Forecast,
               read: Callable[[jax.Array, Any], tuple[Forecast, Any]],
               carry: chex.ArrayTree) -> tuple[Draft, Any, Any]:
  """Samples a chain per row, in a loop that ends when all rows have stopped.

  Args:
    rule: stop rule.
    params: parameters of the rule.
    transform: transform of the logits.
    uniforms: uniform samples in [0, 1), `[B, gamma * UNIFORMS_A_DRAW]`.
    state: decoding state.
    rule_state: state of the rule, see `init_state`.
    first: logits and hidden state of the first token.
    read: function `(tokens [B, 1], carry) -> (forecast, carry)` for the next
      token.
    carry: initial carry of `read`.

  Returns:
    `(Draft, carry, rule_state)`, batched.
  """
  chex.assert_rank([uniforms, *first], 2)
  rows = state.lengths.shape[0]
  u = uniforms.reshape(rows, -1, UNIFORMS_A_DRAW)
  gamma, constraints = u.shape[1], transform.constraints

  def ask_rule(node, law, hidden, token, going, memory):
    seen = Seen(place=jnp.full_like(token, node - 1), probs=law, hidden=hidden,
                token=token)
    return ask(rule, params, seen, going, memory)

  def draw(node, forecast, tokens, probs, path, going, memory):
    logits, hidden = forecast
    logits = constraints_lib.constrained(
        constraints, path, logits, drafted=True)
    law = transform(logits, state.temperature)
    if not rule.keeps:
      going, memory = ask_rule(
          node, law, hidden, tokens[:, node - 1], going, memory)
    reported = jnp.where(going[:, None], law, 0)
    token = jax.vmap(inverse_cdf)(reported, u[:, node - 1])
    if rule.keeps:
      going, memory = ask_rule(node, law, hidden, token, going, memory)
    return (tokens.at[:, node].set(token), probs.at[:, node].set(reported),
            constraints_lib.advanced(constraints, path, token), going, memory)

  def extend(loop):
    node, carry, tokens, *drawn = loop
    last = jax.lax.dynamic_slice_in_dim(tokens, node - 1, 1, axis=1)
    forecast, carry = read(last, carry)
    return node + 1, carry, *draw(node, forecast, tokens, *drawn)

  tokens = jnp.pad(rounds.roots(state)[:, None], ((0, 0), (0, gamma)))
  probs = jnp.zeros((rows, gamma + 1, first[0].shape[-1]))
  drawn = draw(1, first, tokens, probs, state.constraints,
               *start_round(rule, rule_state, ~state.done))
  _, carry, tokens, probs, *_ = jax.lax.while_loop(
      lambda loop: (loop[0] <= gamma) & jnp.any(loop[-2]), extend,
      (jnp.full((), 2, jnp.int32), carry, *drawn))
  parents = jnp.tile(topology.chain(gamma), (rows, 1))
  draft = Draft(tokens=tokens, parents=parents, probs=probs)
  return draft, carry, record_chains(rule_state, draft, gamma)
