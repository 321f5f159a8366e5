"""Fallback to a second drafter in rows where the first has no draft.

Such as n-grams where they match and a language model where not, as in
SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) and SAM-Decoding (Hu et
al. 2024, arXiv:2411.10666), which fall back to a trained drafter.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax import interfaces
from specjax.decoding import round_steps
from specjax.interfaces import checks
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods.combined import _parts
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallback(_parts.Parts):
  """Uses the first drafter's draft in each row, or else the second's.

  The law stays right because the choice gives no drafted token away: whether
  the first drafter has a draft at all is decided before it draws a token, as
  every drafter must, and how many tokens it has is asked only of one that draws
  nothing, whose draft is a function of what is committed.

  In a round where every row has a first draft the second drafter is not asked,
  and catches up when it is. So `params["drafter"]` is a pair, and a drafter
  with a state needs `follow`, see `specjax.interfaces`.

  Attributes:
    first: preferred drafter, such as `NGram`.
    second: drafter of the other rows, possibly another `Fallback`.
    min_tokens: drafted tokens that the first must have, at least 1; more than
      1 only if it draws nothing (`num_uniforms` 0).
  """

  first: Drafter
  second: Drafter
  min_tokens: int = 1

  proposal = "fallback"

  def __post_init__(self):
    fields.check_at_least("min_tokens", self.min_tokens, 1)

  @property
  def parts(self) -> tuple[Drafter, ...]:
    return self.first, self.second

  @property
  def chain(self) -> bool:
    return self.all_are("chain")

  @property
  def iid(self) -> bool:
    return self.all_are("iid")

  @property
  def deterministic(self) -> bool:
    return self.all_are("deterministic")

  @property
  def num_nodes(self) -> int:
    return max(self.first.num_nodes, self.second.num_nodes)

  def with_gamma(self, gamma: int) -> "Fallback | None":
    first, second = (part.with_gamma(gamma) for part in self.parts)
    if first is None or second is None:
      return None
    return dataclasses.replace(self, first=first, second=second,
                               min_tokens=min(self.min_tokens, gamma))

  @property
  def tells(self) -> bool:
    """True if `lacking` is known before uniforms are drawn, at no cost."""
    return self._draws_nothing_first and not interfaces.has_model(self.first)

  @property
  def _draws_nothing_first(self):
    return self.first.num_uniforms == 0

  def lacking(self, params: Any, state: DecodeState) -> jax.Array:
    """Returns `[B]` bool, the rows in which `propose` asks the second drafter.

    For a `Controller`, and only of a first drafter that draws nothing and has
    no model, for it is asked twice; rows that are done lack nothing. Where the
    controller takes a shorter draft than this drafter's own, fewer tokens may
    be enough (`min_tokens`), and such a row is said to lack them all the same.
    """
    uniforms = jnp.zeros((state.lengths.shape[0], 0))
    draft, _ = self.first.propose(
        self.params_of_parts(params)[0], uniforms,
        state.replace(drafter=state.drafter[0]))
    return self._lacks(draft) & ~state.done

  def _lacks(self, draft):
    return draft.drafted.sum(-1) < self.min_tokens

  def bind(self, target: Model, transform: LogitsTransform) -> "Fallback":
    """Returns the drafter specialised to a target."""
    first, second = self.bound(target, transform)
    if self.min_tokens > 1 and not self._draws_nothing_first:
      raise ValueError(
          f"min_tokens is {self.min_tokens} and {type(self.first).__name__} "
          "draws its tokens, so that their number may tell of them; leave "
          "min_tokens at 1, or put a drafter that draws nothing first")
    if self.min_tokens >= max(first.num_nodes, 2):
      raise ValueError(
          f"min_tokens is {self.min_tokens} and {type(self.first).__name__} "
          f"drafts at most {first.num_nodes - 1}; choose at most that")
    return dataclasses.replace(self, first=first, second=second)

  def propose(self, params: Any, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, tuple[Any, Any]]:
    """Drafts a chain or tree per row."""
    draft, first = self.asked(0, params, uniforms, state)
    lacking = self._lacks(draft)
    ask = lambda both: self.asked(
        1, params, uniforms, state.replace(drafter=(first, both[1])))
    shapes, own = jax.eval_shape(ask, (None, state.drafter[1]))
    checks.check_same(
        f"the state that {type(self.second).__name__}.propose returned", own,
        state.drafter[1])
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    other, second = round_steps.once(
        jnp.any(lacking & ~state.done), ask, (nothing, state.drafter[1]))
    pick = lambda mine, others: jnp.where(
        lacking.reshape(-1, *[1] * (mine.ndim - 1)), others, mine)
    draft = jax.tree.map(
        pick, self._padded(draft), self._padded(other))
    return draft.replace(
        tokens=draft.tokens.at[:, 0].set(round_steps.roots(state)),
        parents=draft.parents.at[:, 0].set(-1)), (first, second)

  def _padded(self, draft):
    """Pads the draft to the size of the larger one."""
    nodes = draft.tokens.shape[1]
    more = self.num_nodes - nodes
    below = jnp.arange(nodes - 1, self.num_nodes - 1, dtype=jnp.int32)
    return Draft(
        tokens=jnp.pad(draft.tokens, ((0, 0), (0, more))),
        parents=jnp.concatenate([draft.parents, jnp.tile(
            below, (draft.parents.shape[0], 1))], axis=1),
        probs=jnp.pad(draft.probs, ((0, 0), (0, more), (0, 0))))


def fallback(first: Drafter, second: Drafter, verifier: Verifier = BLOCK
             ) -> Strategy:
  """Drafts with one drafter, and with another in rows where it has no draft.

  As SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) and SAM-Decoding (Hu
  et al. 2024, arXiv:2411.10666) fall back to a trained drafter.

  >>> from specjax import drafters
  >>> from specjax.testing import MarkovModel
  >>> short = drafters.LanguageModel(model=MarkovModel(7), gamma=2)
  >>> long = drafters.LanguageModel(model=MarkovModel(7), gamma=5)
  >>> fallback(short, long).drafter.num_nodes
  6

  Args:
    first: preferred drafter.
    second: drafter of the other rows.
    verifier: rule that is exact for both.
  """
  return Strategy(Fallback(first=first, second=second), verifier)
