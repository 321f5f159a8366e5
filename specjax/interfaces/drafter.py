"""Base class of drafters."""

import dataclasses
import math
from typing import Any
from typing import TYPE_CHECKING

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces.cache import Cache
from specjax.interfaces.model import Model
from specjax.interfaces.model import unsplit
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict

if TYPE_CHECKING:
  from specjax.sampling import LogitsTransform

CAPABILITIES = {
    "chain": "every draft is one chain: node i + 1 is the child of node i, "
             "other nodes are padding, and every row of `probs` is the "
             "distribution of its token given the tokens before it",
    "iid": "the children of a node are independent draws from one distribution",
    "conditional": "every row of `probs` is the distribution of its token "
                   "given all tokens drawn before it, as `Draft` requires",
    "autoregressive": "q depends on the context alone, not on the position "
                      "where the draft began; padding may depend on the "
                      "position of a node, not on the tokens before it",
    "deterministic": "every row of `probs` is one-hot or padding, so the token "
                     "determines the row",
    "full": "no node is padding",
}


class Drafter:
  """Proposes tokens for the whole batch: a hashable object.

  A subclass implements `propose`, and `init` and `commit` if it has a state. A
  chain has a field `gamma`; any other drafter defines `num_nodes`. The other
  members have defaults.

  `propose` reads the state of the drafter from `state.drafter` and returns a
  new one. `commit` receives the new one and returns the state for the next
  round, with the structure, shapes and dtypes of the state from `init`. The
  state from `propose` may have another structure, unless a controller or a
  `Fallback` can leave the drafter out of a round.

  Attributes:
    chain, iid, conditional, autoregressive, deterministic, full: capabilities,
      see `interfaces.CAPABILITIES`.
    num_uniforms: number of uniforms per row and round. `propose` then receives
      `[B, num_uniforms]` float32 in [0, 1) in place of keys, which is much
      cheaper: the loop draws the uniforms of many rounds at once. If None,
      `propose` receives one PRNG key per row.
    context_length: longest sequence, in tokens, that it can draft for.
    grows: True if zeros at the end of the state's arrays are equivalent to a
      larger capacity, see `Decoder.grow`.
    shares_pass: True if `propose` runs some layers of the target and the
      verifying pass continues from there. That pass cannot verify a part of the
      draft alone, so a controller refuses the drafter.
    reads_cache: True if it reads the target's cache. All committed tokens must
      then be written to that cache.
    tells: True if `lacking`, the rows for which its second drafter will draft,
      is known before random numbers are drawn. A controller then has separate
      costs for rounds with and without the second drafter.
    proposal: name of the sampling method of its tokens, for tables.
    parts: components of a combination such as `Merge`.
    stop: stop rule of its chains, or None.
  """

  chain = False
  iid = False
  conditional = False
  autoregressive = False
  deterministic = False
  full = False
  num_uniforms: int | None = None
  context_length: float = math.inf
  grows = True
  shares_pass = False
  reads_cache = False
  tells = False
  proposal = ""
  parts: tuple["Drafter", ...] = ()
  stop: Any = None

  @property
  def num_nodes(self) -> int:
    """N, the nodes of every draft, the root included."""
    return self.gamma + 1

  @property
  def slack(self) -> float:
    """Number of tokens that can be taken back of its cache without loss."""
    model = getattr(self, "model", None)
    return math.inf if model is None else model.slack

  def bind(self, target: Model, transform: "LogitsTransform") -> "Drafter":
    """Returns the drafter specialised to a target.

    Args:
      target: target model.
      transform: transform of the decoder without a temperature: rows have their
        own, `transform(logits, state.temperature[:, None])`. A drafter that
        applies `transform.constraints` and `state.constraints`
        (`decoding.constraining`) drafts no token that these forbid.

    Raises:
      ValueError: the drafter does not fit the target.
    """
    del target, transform
    return self

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> Any:
    """Returns the state after the prompts; B is the first axis of every leaf.
    """
    del params, prompt, prefill_output

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    """Returns the drafts, fields `[B, N]` and `[B, N, V]`, and its state.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      uniforms: `[B, num_uniforms]`, or `[B]` PRNG keys.
      state: decoding state.
    """
    raise NotImplementedError

  def commit(self, params: chex.ArrayTree, drafter: chex.ArrayTree,
             draft: Draft, verdict: Verdict, target_output: ModelOutput,
             count: jax.Array) -> Any:
    """Returns its state after `count [B]` tokens were committed.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      drafter: state of the drafter, as `propose` returned it.
      draft: verified drafts; in a round without drafts, they have only a root.
      verdict: verdicts.
      target_output: output of the verifying pass.
      count: `[B]` int32.
    """
    del params, draft, verdict, target_output, count
    return drafter

  def with_gamma(self, gamma: int) -> "Drafter | None":
    """Returns the drafter with chains of `gamma` tokens, or None.

    None: the length is not supported. The state must have the same form
    for every length. The default replaces the field `gamma`.
    """
    if dataclasses.is_dataclass(self) and any(
        field.name == "gamma" for field in dataclasses.fields(self)):
      return dataclasses.replace(self, gamma=gamma)
    return None

  def catch_up(self, params: chex.ArrayTree, state: DecodeState,
               since: jax.Array) -> Any:
    """Returns its state after reading the tokens of rounds without drafts.

    A controller requires it of a drafter that has a model.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: decoding state.
      since: `[B]` int32, number of tokens of each row that it has already read.
    """
    del params, since
    return state.drafter

  def lacking(self, params: chex.ArrayTree, state: DecodeState) -> jax.Array:
    """Returns `[B]` bool, rows for which its second drafter will draft.

    A drafter whose `tells` is True, such as `Fallback`, implements it.
    """
    del params
    return jnp.zeros_like(state.done)

  def follow(self) -> "Drafter":
    """Returns the drafter for sequences that other drafters also extend.

    Combinations (`Cascade`, `Fallback`, `Merge`) use it. There, tokens are also
    removed from the sequence, `commit` receives drafts of other drafters, and
    `propose` is not called in every round. A drafter with a state must
    implement it.
    """
    return self

  def target_pass(self, target: Model, params: chex.ArrayTree,
                  drafter: chex.ArrayTree, draft: Draft, depths: jax.Array,
                  ancestors: jax.Array, cache: Cache) -> ModelOutput:
    """Returns the output of the target's pass over the draft.

    A drafter that has run a part of the target overrides it.

    Args:
      target: target model.
      params: `{"target": ..., "drafter": ...}`.
      drafter: state of the drafter, as `propose` returned it.
      draft: drafts with N nodes per row.
      depths: `[B, N]` int32.
      ancestors: `[B, N, N]` bool.
      cache: the target's cache before the round.
    """
    del drafter
    return target(params["target"], draft.tokens, depths, ancestors, cache)

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns the `PartitionSpec` of `params["drafter"]`, or of branches of it.

    Args:
      axis: mesh axis over which the models are split.
      size: number of devices of the axis.

    Raises:
      ValueError: the default supports one device only.
    """
    return unsplit(self, axis, size)

  @property
  def catches_up(self) -> bool:
    """True if it implements `catch_up`."""
    return type(self).catch_up is not Drafter.catch_up

  @property
  def can_follow(self) -> bool:
    """True if it implements `follow`."""
    return type(self).follow is not Drafter.follow


def capabilities(drafter: Drafter) -> frozenset[str]:
  """Returns the names in `CAPABILITIES` that a drafter declares.

  Raises:
    ValueError: a declaration is not a bool.
  """
  for name in CAPABILITIES:
    value = getattr(drafter, name)
    if not isinstance(value, bool):
      raise ValueError(f"{type(drafter).__name__}.{name} is {value!r}; it must "
                       "be True or False")
  return frozenset(name for name in CAPABILITIES if getattr(drafter, name))
