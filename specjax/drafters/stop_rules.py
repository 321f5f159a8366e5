"""Rules that end a chain while it is drafted, from what was drafted so far.

A drafter that knows that its next token will be rejected had better stop. What
it does not draft is padding, so that every draft has one compiled shape; a
chain whose rows have all stopped leaves out the passes that are left.

  for k = 1..gamma:  q_k  ->  [asked here]  ->  x_k ~ q_k  ->  [or here]

Whether node k exists may depend on q_k and on the tokens before x_k, and never
on x_k. So a rule is asked either before x_k is drawn, and then it does not see
x_k, or after, and then x_k stays. "Draw x_k, look at it, drop it" cannot be
said here, and is biased: `exact.certify(rule, stop=...)` rejects it. With such
a rule a drafter is not `autoregressive` any more, for whether a row is padding
depends on the tokens before it; greedy block verification is refused.

Each rule is a frozen dataclass of static numbers. Its parameters, if it has
any, are `params["drafter"]["stop"]`.
"""

import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax.types import Draft
from specjax.types import Verdict


@struct.dataclass
class Seen:
  """What a rule may look at, of one row and at one place of its chain.

  Attributes:
    place: `[]` int32, k - 1: drafted tokens before x_k.
    probs: `[V]`, q_k, the law of x_k.
    hidden: `[F]`, the drafter's hidden state that q_k was computed from.
    token: `[]` int32, x_k for a rule that `keeps`, else the token before it.
  """

  place: jax.Array
  probs: jax.Array
  hidden: jax.Array
  token: jax.Array


class StopRule:
  """The base of stop rules: what they may leave out.

  Attributes:
    keeps: True: asked after x_k was drawn, which stays whatever the answer;
      False: asked before, and if the answer is yes x_k is not drawn.
    has_params: whether it reads `params["drafter"]["stop"]`.
  """

  keeps = True
  has_params = False

  def init(self) -> Any:
    """What it remembers over rounds, for one row; nothing by default."""
    return ()

  def start(self, state: Any) -> Any:
    """What it remembers within a round, at its beginning."""
    del state
    return ()

  def stops(self, params: Any, seen: Seen, memory: Any
            ) -> tuple[jax.Array, Any]:
    """Whether the chain ends here, `[]` bool, and the memory; for one row."""
    raise NotImplementedError

  def commit(self, state: Any, drafted: jax.Array, accepted: jax.Array,
             gamma: int) -> Any:
    """What it remembers after a round.

    Args:
      state: what it remembered before.
      drafted: `[]` int32, tokens of the row's chain.
      accepted: `[]` int32, those of them that were accepted.
      gamma: the most that a chain has.
    """
    del drafted, accepted, gamma
    return state


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
    _check_share("threshold", self.threshold)

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

  Zhang et al. 2023 (arXiv:2309.08168), with the constants of their code. The
  chain ends after a token of q_k(x_k) < th. After a round, m <- (m + accepted /
  drafted) / 2, and th' = th + 0.01 if m < 0.9, else th - 0.01 unless the chain
  was as long as it may be; th <- 0.9 th + 0.1 th'. At temperature 0 it never
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
    _check_share("threshold", self.threshold)
    _check_share("target", self.target)

  def init(self):
    return Adapted(threshold=jnp.float32(self.threshold),
                   matched=jnp.float32(1))

  def start(self, state):
    return state.threshold

  def stops(self, params, seen, memory):
    return seen.probs[seen.token] < memory, memory

  def commit(self, state, drafted, accepted, gamma):
    share = accepted / jnp.maximum(drafted, 1)
    matched = 0.5 * state.matched + 0.5 * share.astype(jnp.float32)
    move = jnp.where(matched < self.target, self.step,
                     jnp.where(drafted < gamma, -self.step, 0))
    new = Adapted(threshold=state.threshold + 0.1 * move, matched=matched)
    # A round without a draft says nothing.
    return jax.tree.map(lambda a, b: jnp.where(drafted > 0, a, b), new, state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entropy(Adaptive):
  """AdaEDL: ends the chain before a token of too high an entropy.

  Agrawal et al. 2024 (arXiv:2410.18351): 1 - sqrt(factor H(q_k)) is a lower
  bound of the acceptance rate, H in nats; x_k is not drawn where it is below a
  threshold, which is adapted as Draft & Verify's is. At temperature 0 it never
  ends a chain, for q_k is one-hot.

  Attributes:
    factor: of the entropy.
  """

  keeps = False
  threshold: float = 0.4
  factor: float = 0.2

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
  and a linear layer to the logits of (reject, accept).

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
    _check_share("threshold", self.threshold)

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

  def stops(self, params, seen, memory):
    x = seen.hidden.astype(jnp.float32)
    for block in params["blocks"]:
      x = x + jax.nn.silu(x @ block["kernel"] + block["bias"])
    logits = x @ params["out"]["kernel"] + params["out"]["bias"]
    accept = jax.nn.softmax(logits)[1]
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
    learned: whether c_k is sigmoid(w . hidden + b), of the parameters
      `{"kernel": [F], "bias": []}`; otherwise it is the largest entry of q_k.
  """

  speeds: tuple[float, ...]
  learned: bool = False
  keeps = False

  def __post_init__(self):
    object.__setattr__(self, "speeds", tuple(self.speeds))
    if len(self.speeds) < 2 or min(self.speeds) <= 0:
      raise ValueError(f"speeds is {self.speeds}; it must hold at least two "
                       "numbers above 0: passes a second with 0, 1, ... tokens")

  @property
  def has_params(self) -> bool:
    return self.learned

  def confidence(self, params: Any, seen: Seen) -> jax.Array:
    """c_k `[]`, of q_k, the hidden state and the token before x_k."""
    if not self.learned:
      return seen.probs.max().astype(jnp.float32)
    return _accepted(params, seen.hidden)

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
  where sigmoid(w . hidden + b) is below it. Parameters are those of `Scheduler`
  where that is `learned`.

  Attributes:
    threshold: in [0, 1].
  """

  threshold: float = 0.5
  keeps = False
  has_params = learned = True

  def __post_init__(self):
    _check_share("threshold", self.threshold)

  def stops(self, params, seen, memory):
    return _accepted(params, seen.hidden) < self.threshold, memory


def begun(rule: StopRule, state: Any, rows: jax.Array) -> tuple[Any, Any]:
  """`(going, memory)` of all rows at the beginning of a round.

  Args:
    rule: a `StopRule`.
    state: what it remembers, leaves `[B, ...]`.
    rows: `[B]` bool, those that draft at all.
  """
  if jax.tree.leaves(state):
    return rows, jax.vmap(rule.start)(state)
  memory = rule.start(state)
  return rows, jax.tree.map(
      lambda x: jnp.broadcast_to(x, (*rows.shape, *jnp.shape(x))), memory)


def ask(rule: StopRule, params: Any, seen: Seen, going: jax.Array, memory: Any
        ) -> tuple[jax.Array, Any]:
  """The rows whose chains go on `[B]`, and the memory; batched."""
  stop, memory = jax.vmap(rule.stops, (None, 0, 0))(params, seen, memory)
  return going & ~stop, memory


def learned(rule: StopRule, state: Any, draft: Draft, verdict: Verdict,
            count: jax.Array, gamma: int) -> Any:
  """What a rule remembers after a round; batched.

  Args:
    rule: a `StopRule`.
    state: what it remembered before, leaves `[B, ...]`.
    draft: of the round.
    verdict: of the round.
    count: `[B]` int32, tokens committed; rows without any learn nothing.
    gamma: the most that a chain has.
  """
  if not jax.tree.leaves(state):
    return state
  drafted = jnp.sum(jnp.any(draft.probs > 0, axis=-1), axis=-1)
  learn = functools.partial(rule.commit, gamma=gamma)
  new = jax.vmap(learn)(
      state, drafted.astype(jnp.int32), verdict.num_accepted)
  keep = lambda new, old: jax.vmap(jnp.where)(count > 0, new, old)
  return jax.tree.map(keep, new, state)


def kept(rule: StopRule, params: Any, probs: jax.Array, hidden: jax.Array,
         root: jax.Array, tokens: jax.Array, state: Any = None) -> jax.Array:
  """How many of a row's tokens a rule lets it draft, `[]` int32.

  Args:
    rule: a `StopRule`.
    params: its parameters.
    probs: `[gamma, V]`, q_1..q_gamma along the chain.
    hidden: `[gamma, F]`, the hidden states that they were computed from.
    root: `[]` int32.
    tokens: `[gamma]` int32, x_1..x_gamma.
    state: what the rule remembers; None: nothing yet.
  """
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


def _accepted(params, hidden):
  return jax.nn.sigmoid(
      hidden.astype(jnp.float32) @ params["kernel"] + params["bias"])


def _check_share(name, value):
  if not 0 <= value <= 1:
    raise ValueError(f"{name} is {value}; it must lie in [0, 1]")
