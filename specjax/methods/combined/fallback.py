"""Fallback to a second drafter in rows where the first has no draft.

An example is an n-gram drafter with a draft model for rows without a match.
SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) and SAM-Decoding (Hu et
al. 2024, arXiv:2411.10666) fall back to a trained drafter.
"""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax import interfaces
from specjax.decoding import rounds
from specjax.interfaces import checks
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods.combined import _combined
from specjax.methods.networks import Params
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallback(_combined.Combined):
  """Uses the first drafter in rows where it has a draft, else the second.

  This is exact, because the existence of a first draft does not depend on its
  sampled tokens. If all rows of a round have a first draft, the second drafter
  does not run, and reads the missing tokens later. So a drafter with a state
  must provide "follows", see `interfaces.CAPABILITIES`. `params["drafter"]` is
  a pair of the drafters' parameters.

  Attributes:
    first: preferred drafter, such as `NGram`.
    second: drafter for the other rows, possibly another `Fallback`.
    min_tokens: minimum number of tokens of a first draft, at least 1. If a
      row's first draft has fewer tokens, the row uses the second drafter.
      Values above 1 need a first drafter that samples nothing (`num_uniforms`
      is 0).
  """

  first: Drafter
  second: Drafter
  min_tokens: int = 1


  def __post_init__(self):
    fields.check_at_least("min_tokens", self.min_tokens, 1)

  @property
  def members(self) -> tuple[Drafter, ...]:
    return self.first, self.second

  @property
  def provides(self) -> tuple[str, ...]:
    # `lacking` needs neither uniforms nor a pass of a model.
    tells = self._draws_nothing_first and not interfaces.has_model(self.first)
    return (*super().provides, *interfaces.provided(tells=tells),
            *self.shared("chain", "iid", "deterministic"))

  @property
  def num_nodes(self) -> int:
    return max(self.first.num_nodes, self.second.num_nodes)

  def with_gamma(self, gamma: int) -> "Fallback | None":
    first, second = (member.with_gamma(gamma) for member in self.members)
    if first is None or second is None:
      return None
    return dataclasses.replace(self, first=first, second=second,
                               min_tokens=min(self.min_tokens, gamma))

  @property
  def _draws_nothing_first(self) -> bool:
    return self.first.num_uniforms == 0

  def lacking(self, params: Params, state: DecodeState) -> jax.Array:
    """Returns `[B]` bool, the rows in which `propose` uses the second drafter.

    Finished rows are False. A controller that shortens the draft also lowers
    `min_tokens`. Then `propose` uses the second drafter only in some of these
    rows.
    """
    uniforms = jnp.zeros((state.lengths.shape[0], 0))
    draft, _ = self.first.propose(
        self.params_of_members(params)[0], uniforms,
        state.replace(drafter=state.drafter[0]))
    return self._lacks(draft) & ~state.done

  def _lacks(self, draft: Draft) -> jax.Array:
    return draft.drafted.sum(-1) < self.min_tokens

  def bind(self, target: Model, transform: LogitsTransform) -> "Fallback":
    first, second = self.bound(target, transform)
    if self.min_tokens > 1 and not self._draws_nothing_first:
      raise ValueError(
          f"min_tokens is {self.min_tokens}, but {type(self.first).__name__} "
          "samples its tokens, and the length of a draft may depend on them; "
          "give min_tokens=1, or put a deterministic drafter first")
    if self.min_tokens >= max(first.num_nodes, 2):
      raise ValueError(
          f"min_tokens is {self.min_tokens}, but {type(self.first).__name__} "
          f"drafts at most {first.num_nodes - 1} tokens; reduce min_tokens")
    return dataclasses.replace(self, first=first, second=second)

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> tuple[Any, ...]:
    return (*super().init(params, prompt, prefill_output),
            jnp.zeros_like(prompt.lengths, bool))

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, tuple[Any, ...]]:
    draft, first = self.asked(0, params, uniforms, state)
    lacking = self._lacks(draft)
    ask = lambda both: self.asked(
        1, params, uniforms, state.replace(drafter=(first, both[1])))
    shapes, new_state = jax.eval_shape(ask, (None, state.drafter[1]))
    checks.check_same(
        f"the state that {type(self.second).__name__}.propose returned",
        new_state, state.drafter[1])
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    other, second = rounds.once(
        jnp.any(lacking & ~state.done), ask, (nothing, state.drafter[1]))
    pick = lambda x, y: jnp.where(
        lacking.reshape(-1, *[1] * (x.ndim - 1)), y, x)
    draft = jax.tree.map(
        pick, self._padded(draft), self._padded(other))
    return draft.replace(
        tokens=draft.tokens.at[:, 0].set(rounds.roots(state)),
        parents=draft.parents.at[:, 0].set(-1)), (first, second, lacking)

  def commit(self, params: Params, drafter: tuple[chex.ArrayTree, ...],
             *arguments: Any) -> tuple[Any, ...]:
    return *super().commit(params, drafter, *arguments), drafter[2]

  def owned(self, states: tuple[chex.ArrayTree, ...], own: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
    return own & ~states[2], own & states[2]

  def _padded(self, draft: Draft) -> Draft:
    """Pads a draft to `num_nodes`, the size of the larger draft."""
    nodes = draft.tokens.shape[1]
    missing = self.num_nodes - nodes
    below = jnp.arange(nodes - 1, self.num_nodes - 1, dtype=jnp.int32)
    return Draft(
        tokens=jnp.pad(draft.tokens, ((0, 0), (0, missing))),
        parents=jnp.concatenate([draft.parents, jnp.tile(
            below, (draft.parents.shape[0], 1))], axis=1),
        probs=jnp.pad(draft.probs, ((0, 0), (0, missing), (0, 0))))


def fallback(first: Drafter, second: Drafter, verifier: Verifier = BLOCK
             ) -> Strategy:
  """Drafts with a second drafter in rows where the first has no draft.

  SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) and SAM-Decoding (Hu et
  al. 2024, arXiv:2411.10666) use a trained second drafter.

  >>> from specjax import drafters
  >>> from specjax.testing import MarkovModel
  >>> short = drafters.draft_model(model=MarkovModel(7), gamma=2)
  >>> long = drafters.draft_model(model=MarkovModel(7), gamma=5)
  >>> fallback(short, long).drafter.num_nodes
  6

  Args:
    first: preferred drafter.
    second: drafter for the other rows.
    verifier: rule that is exact for the drafts of both drafters.
  """
  return Strategy(Fallback(first=first, second=second), verifier)
