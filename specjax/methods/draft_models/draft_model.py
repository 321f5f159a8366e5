"""Draft models that sample chains.

Leviathan et al. 2022 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318).
"""

import dataclasses
from typing import Any

import chex
from flax import struct
import jax
from jax.sharding import PartitionSpec

from specjax import verifiers
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.decoding.prefill import read_prompt
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods import _following
from specjax.methods import stop_rules
from specjax.methods.networks import Params
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import STOP
from specjax.methods.strategy import Strategy
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields


@struct.dataclass
class Stopping:
  """State of a `DraftModel` with a stop rule.

  Attributes:
    cache: cache of the draft model.
    rule: state of the stop rule.
  """

  cache: Cache
  rule: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel(_common.OneModel, _common.DrawnChain):
  """Samples gamma tokens from a draft model, which has its own cache.

  At the start of a round the cache is rolled back to the committed tokens. The
  first step reads the last *two* committed tokens. If the last draft was
  accepted completely, the cache lacks both tokens, because the model never read
  the last draft token. Otherwise the cache lacks only one, and reading the
  other again does not change the cache. So one pass of fixed size completes the
  caches of all rows.

  With a stop rule the chain of each row may end early. Drafting ends when the
  chains of all rows have ended.

  Attributes:
    model: draft model over the target's vocabulary.
    gamma: draft length; 0 drafts nothing.
    transform: transform of the draft logits; None uses the decoder's transform.
      Any transform is lossless, because the verifier receives the transformed
      distributions.
    stop: rule of `methods.stop_rules`; None drafts gamma tokens in all chains.
      If the rule has parameters, `params["drafter"]` is `{"model": parameters
      of the model, "stop": parameters of the rule}`.
  """

  model: Model
  gamma: int
  transform: LogitsTransform | None = None
  stop: stop_rules.StopRule | None = None

  def __post_init__(self):
    fields.check_at_least("gamma", self.gamma, 0, ": 0 drafts nothing")

  @property
  def autoregressive(self) -> bool:
    # An autoregressive drafter's q does not depend on the position where the
    # draft began. With a stop rule it does: rows of `probs` after the end of a
    # chain are 0, and the end depends on where the draft began.
    return self.stop is None

  @property
  def full(self) -> bool:
    # If a constraint forbids all tokens, a node is padding.
    return self.stop is None and not (
        self.transform and self.transform.constraints)

  def bind(self, target: Model, transform: LogitsTransform) -> "DraftModel":
    """Returns the drafter specialised to a target."""
    rounds.check_slack(self.model, self.gamma + 2)
    return super().bind(target, transform)

  def follow(self) -> _following.Following:
    """Returns a drafter that follows any sequence."""
    return _following.Following(drafter=self)

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> Any:
    """Returns the cache after the prompt and the state of the stop rule."""
    del prefill_output
    cache = read_prompt(self.model, self._split(params)[0], prompt).cache
    if self.stop is None:
      return cache
    return Stopping(
        cache=cache, rule=stop_rules.init_state(self.stop, len(prompt.lengths)))

  def _split(self, params: Params) -> tuple[Any, Any]:
    """Returns the parameters of the model and of the stop rule."""
    return stop_rules.split_params(self.stop, params["drafter"])

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Drafts a chain per row."""
    if self.gamma == 0:
      return rounds.root_only(state, self.model.vocab_size), state.drafter
    if self.stop is not None:
      return self._propose_until(params, uniforms, state)
    params = params["drafter"]
    logits, cache = _common.feed_last(
        self.model, params, state, state.drafter, size=2, more=self.gamma - 1)

    def law(logits, memory, place):
      del place
      return self.transform(constraints_lib.constrained(
          self.transform.constraints, memory, logits, drafted=True),
                            state.temperature)

    def read(token, cache):
      out, cache = _common.read_token(self.model, params, token, cache)
      return out.logits[:, 0], cache

    draft, cache = _common.draw_chain(
        law, read, cache, logits, uniforms, state, self.transform,
        self.model.vocab_size)
    return draft, cache.settle()

  def _propose_until(self, params: Params, uniforms: jax.Array,
                     state: DecodeState) -> tuple[Draft, Stopping]:
    """Drafts chains with a stop rule."""
    params, rule_params = self._split(params)
    logits, hidden, cache = _common.read_last(
        self.model, params, state, state.drafter.cache, size=2,
        more=self.gamma - 1)

    def read(token, cache):
      out, cache = _common.read_token(self.model, params, token, cache)
      return (out.logits[:, 0], out.hidden[:, 0]), cache

    draft, cache, rule = stop_rules.draw_until(
        self.stop, rule_params, self.transform, uniforms, state,
        state.drafter.rule, (logits, hidden), read, cache)
    return draft, Stopping(cache=cache.settle(), rule=rule)

  def catch_up(self, params: Params, state: DecodeState, since: jax.Array
               ) -> Any:
    """Reads the tokens that were committed in rounds without drafts."""
    if self.stop is None:
      return _common.catch_up(
          self.model, params["drafter"], state, state.drafter, since)
    cache = _common.catch_up(self.model, self._split(params)[0], state,
                             state.drafter.cache, since)
    return state.drafter.replace(cache=cache)

  def commit(self, params: Params, drafter: chex.ArrayTree, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> Any:
    """Updates the state of the stop rule; `propose` rolls the cache back."""
    del params, target_output
    if self.stop is None:
      return drafter
    return drafter.replace(rule=stop_rules.update(
        self.stop, drafter.rule, draft, verdict, count))

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns the model's partition specs; a stop rule is replicated."""
    specs = super().param_specs(axis, size)
    if self.stop is None or not self.stop.has_params:
      return specs
    return {"model": specs, "stop": PartitionSpec()}


def speculative_sampling(model: Model, gamma: int) -> Strategy:
  """Drafts a chain whose tokens are accepted or rejected one after another.

  Leviathan et al. 2022 (arXiv:2211.17192, Algorithm 1) and Chen et al. 2023
  (arXiv:2302.01318, Algorithm 2).

  >>> from specjax import testing
  >>> speculative_sampling(testing.MarkovModel(7), gamma=4).verifier
  Token()

  Args:
    model: draft model over the target's vocabulary.
    gamma: draft length; 0 drafts nothing.
  """
  return Strategy(DraftModel(model=model, gamma=gamma),
                  verifiers.Token())


def block_verification(model: Model, gamma: int) -> Strategy:
  """Drafts a chain and verifies it as a block.

  Sun et al. 2024 (arXiv:2403.10444, Algorithm 2). On average it accepts at
  least as many tokens as `speculative_sampling`.

  >>> from specjax import testing
  >>> block_verification(testing.MarkovModel(7), gamma=4).verifier
  Block()

  Args:
    model: draft model over the target's vocabulary.
    gamma: draft length.
  """
  return speculative_sampling(model, gamma)._replace(verifier=BLOCK)


def early_stopping(model: Model, gamma: int,
                   stop: stop_rules.StopRule = STOP,
                   verifier: Verifier = BLOCK) -> Strategy:
  """Drafts a chain that ends early by a stop rule.

  Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) by default; other rules
  are in `methods.stop_rules`.

  >>> from specjax import testing
  >>> rule = stop_rules.Confidence(threshold=0.4)
  >>> drafter, _ = early_stopping(testing.MarkovModel(7), gamma=4, stop=rule)
  >>> drafter.stop.threshold, drafter.autoregressive
  (0.4, False)

  Args:
    model: draft model over the target's vocabulary.
    gamma: maximal draft length.
    stop: stop rule.
    verifier: rule for chains. It must not require an autoregressive drafter.
  """
  return Strategy(DraftModel(model=model, gamma=gamma, stop=stop),
                  verifier)


def greedy_block_verification(model: Model, gamma: int) -> Strategy:
  """Drafts a chain and verifies it with greedy block verification.

  Sun et al. 2024 (arXiv:2403.10444, Algorithms 4 to 6). The rule accepts the
  most tokens in a single round. To stay exact, it modifies the target
  distribution of the following rounds. These rounds accept fewer tokens, and
  the loss can outweigh the gain.

  >>> from specjax import testing
  >>> greedy_block_verification(testing.MarkovModel(7), gamma=4).verifier
  GreedyBlock()

  Args:
    model: draft model over the target's vocabulary.
    gamma: draft length.
  """
  return speculative_sampling(model, gamma)._replace(
      verifier=verifiers.GreedyBlock())
