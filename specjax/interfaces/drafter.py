"""Base class of drafters."""

import dataclasses
import math
from typing import Any
from typing import TYPE_CHECKING

import chex
import jax
from jax.sharding import PartitionSpec

from specjax.interfaces.cache import Cache
from specjax.interfaces.model import Model
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict

if TYPE_CHECKING:
  from specjax.sampling import LogitsTransform

#: Names that `Drafter.provides` may contain, each with its meaning.
CAPABILITIES = {
    "chain": "every draft is one chain: node i + 1 is the child of node i, "
             "other nodes are padding, and every row of `probs` is the "
             "distribution of its token given the tokens before it",
    "iid": "the children of a node are independent draws from one distribution",
    "conditional": "every row of `probs` is the distribution of its token "
                   "given all tokens drawn before it, as `Draft` requires",
    "autoregressive": "q depends on the context alone, not on the position "
                      "where the draft began; padding may depend on the "
                      "position of a node, but not on the tokens before it",
    "deterministic": "every row of `probs` is one-hot or padding, so the token "
                     "determines the row",
    "full": "no node is padding",
    "rests": "rounds without drafts may lie between rounds with drafts: "
             "`commit` or `catch_up` reads their tokens",
    "follows": "other drafters may extend the sequence or remove tokens from "
               "it, because `catch_up` reads any tokens",
    "reads_cache": "`propose` reads the target's cache, to which all committed "
                   "tokens must have been written",
    "shares_pass": "`propose` runs some layers of the target and the verifying "
                   "pass continues from their outputs, so it cannot verify a "
                   "part of the draft or another draft",
    "tells": "a method `lacking(params, state)` returns, before random numbers "
             "are drawn, for which rows `[B]` the second of two drafters will "
             "draft",
}


class Drafter:
  """A source of draft tokens for all rows of a batch. It is hashable.

  A subclass implements `propose`, and also `init` and `commit` if it has a
  state. A drafter of chains has a field `gamma`. Any other drafter defines
  `num_nodes`. The other members have defaults.

  `propose` reads the drafter's state from `state.drafter` and returns a new
  state. `commit` receives that state and returns the state for the next round,
  with the structure, shapes and dtypes of the result of `init`. The state that
  `propose` returns may have another structure, except if a controller or a
  `Fallback` can skip the drafter in a round.

  Attributes:
    provides: names of the drafter's properties, such as ("chain", "iid"), see
      `interfaces.CAPABILITIES`. Rules name those that they need in
      `Verifier.requires`.
    num_uniforms: number of uniforms per row and round. `propose` then receives
      `[B, num_uniforms]` float32 in [0, 1) instead of PRNG keys. This is much
      cheaper, because the decoding loop draws the uniforms of many rounds at
      once. If None, `propose` receives one PRNG key per row.
    context_length: length in tokens of the longest sequence that the drafter
      can read.
    target_calls: largest number of target calls in a round, including the
      verifying pass. Tokens per target call are tokens per round divided by it.
      A pass of a part of the target (its first layers, some of its layers, or
      all layers with a part of the cache) is a draft step, not a target call.
  """

  provides: tuple[str, ...] = ()
  num_uniforms: int | None = None
  context_length: float = math.inf
  target_calls: int = 1

  @property
  def num_nodes(self) -> int:
    """N, number of nodes of every draft, including the root."""
    if not hasattr(self, "gamma"):
      raise TypeError(
          f"{type(self).__name__} has neither gamma nor num_nodes; define "
          "gamma for drafts that are chains, or num_nodes for other drafts")
    return self.gamma + 1

  @property
  def slack(self) -> float:
    """Number of tokens that can be removed from the drafter's cache.

    Removing more tokens would lose others, see `Cache.slack`.
    """
    model = getattr(self, "model", None)
    return math.inf if model is None else model.slack

  def bind(self, target: Model, transform: "LogitsTransform") -> "Drafter":
    """Returns the drafter specialised to a target.

    Args:
      target: target model.
      transform: transform of the decoder, without a temperature. Each row has
        its own temperature: call `transform(logits, state.temperature[:,
        None])`. A drafter may apply `transform.constraints` and
        `state.constraints` (see `decoding.constraining`). It then drafts no
        forbidden token.

    Raises:
      ValueError: the drafter does not fit the target.
    """
    del target, transform
    return self

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> Any:
    """Returns the drafter's state after the prompts were read.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      prompt: prompts of B rows.
      prefill_output: output of the target's pass over the prompts.

    Returns:
      Pytree of arrays with B as first axis, or None.
    """
    del params, prompt, prefill_output

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    """Returns drafts and the drafter's new state.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      uniforms: `[B, num_uniforms]` uniforms, or `[B]` PRNG keys if
        `num_uniforms` is None.
      state: decoding state.

    Returns:
      A `Draft` with fields `[B, N]` and `[B, N, V]`, and the new state.
    """
    raise NotImplementedError

  def commit(self, params: chex.ArrayTree, drafter: chex.ArrayTree,
             draft: Draft, verdict: Verdict, target_output: ModelOutput,
             count: jax.Array, own: jax.Array) -> Any:
    """Returns the drafter's state after the tokens of a round were committed.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      drafter: state of the drafter, as `propose` returned it.
      draft: verified drafts. In a round without drafts, each has only a root.
      verdict: verdicts of all rows.
      target_output: output of the verifying pass.
      count: `[B]` int32, number of committed tokens.
      own: `[B]` bool, True for rows whose verified draft is the one that
        `propose` returned in this round. It is False in rounds without drafts,
        and in a combination where the draft of another drafter was verified.
    """
    del params, draft, verdict, target_output, count, own
    return drafter

  def with_gamma(self, gamma: int) -> "Drafter | None":
    """Returns the drafter with chains of `gamma` tokens.

    The default replaces the field `gamma`. The result is None if the drafter
    does not support the length. The state must have the same structure and
    shapes for every length.
    """
    if dataclasses.is_dataclass(self) and any(
        field.name == "gamma" for field in dataclasses.fields(self)):
      return dataclasses.replace(self, gamma=gamma)
    return None

  def catch_up(self, params: chex.ArrayTree, state: DecodeState,
               since: jax.Array) -> Any:
    """Returns the drafter's state after reading tokens of draft-free rounds.

    In `Cascade`, `Fallback` and `Merge`, other drafters also extend the
    sequence, tokens are removed from it, and `propose` is not called in every
    round. A drafter with the capability "follows" can read them here.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: decoding state.
      since: `[B]` int32, number of tokens of each row that the drafter has
        already read.
    """
    del params, since
    return state.drafter

  def target_pass(self, target: Model, params: chex.ArrayTree,
                  drafter: chex.ArrayTree, draft: Draft, depths: jax.Array,
                  ancestors: jax.Array, cache: Cache) -> ModelOutput:
    """Runs the target over the draft and returns its output.

    A drafter that has already run some of the target's layers overrides this
    method.

    Args:
      target: target model.
      params: `{"target": ..., "drafter": ...}`.
      drafter: state of the drafter, as `propose` returned it.
      draft: drafts with N nodes per row.
      depths: `[B, N]` int32, depth of every node.
      ancestors: `[B, N, N]` bool, row i marks the path from the root to node i.
      cache: the target's cache before the round.
    """
    del drafter
    return target(params["target"], draft.tokens, depths, ancestors, cache)

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns the `PartitionSpec` of `params["drafter"]` or of its branches.

    Args:
      axis: mesh axis over which the models are split.
      size: number of devices of the axis.

    The default replicates all parameters on every device.
    """
    del axis, size
    return PartitionSpec()


def kind_of(drafter: Drafter) -> str:
  """Returns the name of a drafter in messages.

  It is the name of the class, or of the drafter's network and shape.
  """
  network = getattr(drafter, "network", None)
  if network is None:
    return type(drafter).__name__
  return f"{type(network).__name__} with {type(drafter.shape).__name__}"


def capabilities(drafter: Drafter) -> frozenset[str]:
  """Returns the names in `Drafter.provides`.

  Raises:
    ValueError: a name is unknown.
  """
  unknown = [name for name in drafter.provides if name not in CAPABILITIES]
  if unknown or isinstance(drafter.provides, str):
    raise ValueError(
        f"{kind_of(drafter)}.provides is {drafter.provides!r}; it must be a "
        f"tuple of names among {', '.join(CAPABILITIES)}")
  return frozenset(drafter.provides)


def provided(**holds: bool) -> tuple[str, ...]:
  """Returns the names of the properties that hold, for `Drafter.provides`.

  >>> provided(chain=True, iid=False)
  ('chain',)
  """
  return tuple(name for name, is_held in holds.items() if is_held)
