"""Test of the state that a drafter keeps between rounds.

After any number of rounds, a drafter must draft as if it had read the prompt
and the generated tokens at once. Two states of the same tokens are compared.
The first is the state after some rounds, and the second is the result of a
prefill of these tokens. With equal uniforms, both must give the same draft.
The comparison finds tokens that a cache lacks or contains twice, rejected
tokens that remain visible, and wrong positions. Such errors change q and not
the output, so they only make drafts worse.
"""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import chex
import jax
import numpy as np

from specjax import interfaces
from specjax.decoding import decoder as decoder_lib
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.utils import fields

_AT_ONCE = 2  # rounds per call of the compiled loop, as in `recording`
_ROUNDING = 2e-4  # total variation that rounding in float32 can explain
_BUDGET = 16.0  # budget of a controller in tokens, enough for any draft
_FEW = 0.01  # share of rows in which rounding may select another token


class StateDifference(NamedTuple):
  """Differences between the drafts of two states: B rows, N nodes of a draft.

  Nodes are compared in the order of the draft, up to and including the first
  node with another token. Its distribution still has the same condition.

  Attributes:
    distances: `[B, N]` float64 total variation between the two distributions q
      of a node. It is 1 if only one draft has the node, or if the parents of
      the node differ. It is NaN if the node is not compared: nodes after
      another token, the root, padding, and rows that are done.
    redrawn: `[B]` bool, True if a compared node has another token.
  """

  distances: np.ndarray
  redrawn: np.ndarray


def state_difference(decoder: decoder_lib.Decoder, params: chex.ArrayTree,
                     prompts: Sequence[Sequence[int]], *, rounds: int = 4,
                     **kwargs: Any) -> StateDifference:
  """Compares the next draft after some rounds with that after a prefill.

  The prefill reads the prompts and the tokens of these rounds. The two drafts
  use the same uniforms and keys. A controller gets a budget for drafts in all
  rounds except the first two, because these may be rounds without drafts.

  Args:
    decoder: decoder of the drafter.
    params: `{"target": ..., "drafter": ...}`.
    prompts: B non-empty sequences of token ids.
    rounds: number of rounds before the comparison, even.
    **kwargs: further arguments of both calls of `Decoder.prefill`. By default,
      the limits have room for all rounds, and the context must have it too.

  Raises:
    ValueError: `rounds` is not even, or see `Decoder.prefill`.
  """
  if not fields.is_whole(rounds) or rounds < 0 or rounds % _AT_ONCE:
    raise ValueError(f"rounds is {rounds!r}; it must be even and at least 0")
  kwargs = {"key": jax.random.key(0), "limits": max(map(len, prompts)) + (
      rounds + _AT_ONCE) * decoder.num_nodes, **kwargs}
  state = decoder.prefill(params, prompts, **kwargs)
  for i in range(rounds // _AT_ONCE):
    # A controller without a budget begins with rounds without drafts.
    state, stats, _ = decoder.decode(
        params, _drafting(state) if i else state, _AT_ONCE, traced=True)
    decoder_lib.raise_if_not_finite(stats)
  state = _drafting(state)
  lengths, done = np.asarray(state.lengths), np.asarray(state.done)
  read = [row[:n].tolist() for row, n in zip(np.asarray(state.tokens), lengths)]
  again = decoder.prefill(params, read, **kwargs)
  # All parts that do not depend on the tokens are equal in both states. The
  # loop donates its state, so each of the two needs its own buffers.
  shared = {name: jax.tree.map(np.array, getattr(state, name))
            for name in ("rounds", "done", "constraints", "controller")}
  if state.controller is not None:
    shared["controller"] = shared["controller"].replace(
        known=again.controller.known)
  again = again.replace(**shared)
  drafts = []
  for one in (state, again):
    _, stats, trace = decoder.decode(params, one, _AT_ONCE, traced=True)
    decoder_lib.raise_if_not_finite(stats)
    drafts.append(jax.tree.map(lambda x: np.asarray(x[0]), trace.draft))
  return _difference(*drafts, done)


def assert_state_exact(decoder: decoder_lib.Decoder, params: chex.ArrayTree,
                       prompts: Sequence[Sequence[int]], *, rounds: int = 4,
                       **kwargs: Any) -> StateDifference:
  """Tests that a drafter's state depends only on the tokens of its row.

  A wrong state makes drafts worse, but `assert_drafter_exact` does not find it,
  because the drafted tokens still follow q and the output follows the target.
  A drafter fails by design if it learns from earlier rounds, or if it reads
  results of the target's last pass that a prefill does not compute.

  Args:
    decoder: decoder of the drafter.
    params: `{"target": ..., "drafter": ...}`, in float32.
    prompts: B sequences of token ids, preferably of different lengths.
    rounds: number of rounds before the comparison, even.
    **kwargs: further arguments of `Decoder.prefill`, such as temperatures.

  Returns:
    The differences, see `state_difference`.

  Raises:
    AssertionError: the drafts of more than 1 % of the active rows differ, or
      there is no drafted node to compare.

  Example:
    >>> import specjax as sj
    >>> pair = sj.testing.tiny_pair(5)
    >>> decoder = sj.Decoder(
    ...     target=pair.target, verifier=sj.verifiers.Block(),
    ...     drafter=sj.drafters.draft_model(model=pair.drafter, gamma=2))
    >>> found = sj.testing.assert_state_exact(
    ...     decoder, pair.params, [[1], [2, 3, 4]])
    >>> found.distances.shape
    (2, 3)
  """
  found = state_difference(decoder, params, prompts, rounds=rounds, **kwargs)
  name = interfaces.kind_of(decoder.drafter)
  compared = ~np.isnan(found.distances)
  active = compared.any(1)
  if not active.any():
    raise AssertionError(
        f"{name}: after {rounds} rounds, no row is active and has a draft; "
        "set larger limits, or fewer rounds")
  apart = np.where(compared, found.distances, 0) > _ROUNDING
  wrong = apart.any(1) | found.redrawn
  if wrong.sum() > _FEW * active.sum():
    row = int(np.argmax(wrong))
    node = int(np.argmax(apart[row])) if apart[row].any() else 0
    what = (f"at node {node} by {found.distances[row, node]:.2g} in total "
            "variation" if node else "in a token, although its q is equal")
    raise AssertionError(
        f"{name}: after {rounds} rounds, the drafts of {wrong.sum()} of "
        f"{active.sum()} rows differ from those of a drafter that reads the "
        f"same tokens at once, in row {row} {what}; check the positions, "
        "the masks and the tokens that `commit` keeps")
  return found


def _drafting(state: DecodeState) -> DecodeState:
  """Returns the state with a budget for drafts, if it has a controller."""
  own = state.controller
  return state if own is None else state.replace(controller=own.replace(
      budget=np.full_like(own.budget, _BUDGET), until=np.array(state.lengths)))


def _difference(one: Draft, other: Draft, done: np.ndarray) -> StateDifference:
  """Compares two drafts of the same rows."""
  real = one.probs.sum(-1) > 0
  both = real & (other.probs.sum(-1) > 0)
  either = real | (other.probs.sum(-1) > 0)
  either[:, 0] = both[:, 0] = False  # the root has no q
  moved = either & (one.parents != other.parents)
  distances = 0.5 * np.abs(
      one.probs.astype(np.float64) - other.probs).sum(-1)
  distances = np.where(moved | (either & ~both), 1, distances)
  # A padding node has an arbitrary token.
  redrawn = both & (one.tokens != other.tokens)
  redrawn[:, 0] = one.tokens[:, 0] != other.tokens[:, 0]
  ends = redrawn | moved | (either & ~both)
  compared = (np.cumsum(ends, axis=1) - ends == 0) & ~done[:, None]
  return StateDifference(
      distances=np.where(compared & either, distances, np.nan),
      redrawn=(redrawn & compared).any(1))
