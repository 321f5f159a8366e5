"""Checks of the results of components, made while the program is traced.

Shapes, dtypes and structures are static, so these checks cost nothing at run
time. Every error names the component. `Decoder(debug=True)` also checks the
numbers at run time (`check_values`).
"""

from collections.abc import Collection
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces.cache import Cache
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import Law
from specjax.types import ModelOutput
from specjax.utils import processes

_ROUNDING = 1e-3  # tolerance for the sum of a distribution, in any dtype
# Smallest entry of a law that counts as rounding. A rule that subtracts equal
# numbers in float32 can return -2e-7, and the sampler uses 0 in its place.
_LOWEST = -1e-5


def _check(name: str, x: Any, shape: tuple[int, ...], axes: str, kind: type
           ) -> None:
  """Checks shape and dtype of an array.

  Args:
    name: name of the array in the error.
    x: the value to check.
    shape: required shape.
    axes: letters of the axes in the error, such as "[B, N]".
    kind: int or float, the required kind of dtype.
  """
  if not hasattr(x, "shape") or not hasattr(x, "dtype"):
    raise ValueError(f"{name} is a {type(x).__name__}; it must be an array "
                     f"{axes} of shape {shape}")
  message = (f"{name} has shape {x.shape} and dtype {x.dtype}; it must be "
             f"{axes} of shape {shape}, {kind.__name__}")
  options = dict(custom_message=message, include_default_message=False,
                 exception_type=ValueError)
  chex.assert_shape(x, shape, **options)
  chex.assert_type(x, kind, **options)


def _check_is(name: str, value: Any, kind: type) -> None:
  if not isinstance(value, kind):
    raise ValueError(f"{name} is a {type(value).__name__}; it must be a "
                     f"specjax.{kind.__name__}")


def check_draft(name: str, draft: Draft, batch: int, nodes: int,
                vocab_size: int) -> None:
  """Checks the result of `Drafter.propose`.

  Args:
    name: class name of the drafter.
    draft: drafts of all rows.
    batch: B, number of rows.
    nodes: N, the drafter's `num_nodes`.
    vocab_size: V, vocabulary size of the target.

  Raises:
    ValueError: a field has a wrong shape or dtype.
  """
  of = f"of the drafter {name} (num_nodes {nodes})"
  _check_is(f"the draft {of}", draft, Draft)
  for field, kind in (("tokens", int), ("parents", int)):
    _check(f"{field} {of}", getattr(draft, field), (batch, nodes), "[B, N]",
           kind)
  _check(f"probs {of}", draft.probs, (batch, nodes, vocab_size), "[B, N, V]",
         float)


def check_law(name: str, law: Law, nodes: int, vocab_size: int) -> None:
  """Checks the result of `Verifier.law` for one sequence.

  Raises:
    ValueError: a field has a wrong shape or dtype.
  """
  if not isinstance(law, Law):
    kind = "array" if isinstance(law, jax.Array) else type(law).__name__
    raise ValueError(f"law of the verifier {name} returned {kind}; return "
                     "specjax.Law(stop=..., next_token=...)")
  _check(f"stop of the verifier {name}", law.stop, (nodes,), "[N]", float)
  # A law without this attribute computes single rows on demand.
  if "next_token" in vars(law):
    _check(f"next_token of the verifier {name}", law.next_token,
           (nodes, vocab_size), "[N, V]", float)


def check_survival(name: str, survival: jax.Array, nodes: int) -> None:
  """Checks the result of `Verifier.survival` for one sequence."""
  _check(f"survival of the verifier {name}", survival, (nodes,), "[N]", float)


def check_output(name: str, output: ModelOutput, batch: int, size: int,
                 vocab_size: int) -> None:
  """Checks the result of a model's pass over S tokens with a cache."""
  _check_is(f"the output of the model {name}", output, ModelOutput)
  _check(f"logits of the model {name}", output.logits,
         (batch, size, vocab_size), "[B, S, V]", float)
  hidden = output.hidden
  if hidden is None or hidden.ndim < 2 or hidden.shape[:2] != (batch, size):
    found = "None" if hidden is None else hidden.shape
    raise ValueError(f"hidden of the model {name} has shape {found}; it must "
                     f"be [B, S, F] with B = {batch} and S = {size}")
  if not isinstance(output.cache, Cache):
    raise ValueError(
        f"the cache of the model {name} is a {type(output.cache).__name__}; it "
        "must be a specjax.interfaces.Cache")


def check_rows(name: str, tree: chex.ArrayTree, batch: int) -> None:
  """Checks that the first axis of every leaf of a state has size B.

  If a cache has `has_rows_first = False`, only its lengths are checked.
  """
  paged = lambda node: isinstance(node, Cache) and not node.has_rows_first
  tree = jax.tree.map(
      lambda x: x.lengths if paged(x) else x, tree, is_leaf=paged)
  for path, x in jax.tree.leaves_with_path(tree):
    if jnp.ndim(x) < 1 or jnp.shape(x)[0] != batch:
      raise ValueError(
          f"{name}{jax.tree_util.keystr(path)} has shape {jnp.shape(x)}; every "
          f"leaf of a state has the {batch} rows as its first axis")


def check_same(name: str, new: chex.ArrayTree, old: chex.ArrayTree) -> None:
  """Checks that two states have equal structure, shapes and dtypes."""
  form = lambda tree: {
      jax.tree_util.keystr(path): f"{jnp.result_type(x)}{list(jnp.shape(x))}"
      for path, x in jax.tree.leaves_with_path(tree)}
  has, had = form(new), form(old)
  for path in {**had, **has}:
    if has.get(path) != had.get(path):
      raise ValueError(
          f"{name} has {has.get(path, 'nothing')} at {path or 'its top'} where "
          f"there was {had.get(path, 'nothing')}; a state keeps its structure, "
          "shapes and dtypes")
  if jax.tree.structure(new) != jax.tree.structure(old):
    raise ValueError(f"{name} is {jax.tree.structure(new)} where there was "
                     f"{jax.tree.structure(old)}; a state keeps its structure")


def check_values(drafter: str, declared: Collection[str], verifier: str,
                 state: DecodeState, roots: jax.Array, draft: Draft, law: Law,
                 usable: jax.Array) -> dict[str, jax.Array]:
  """Checks the numbers of one round.

  The result consists of arrays. The decoding loop returns them with its
  statistics, and `raise_if_bad` reads them on the host. (`checkify` is not
  used because it does not support a loop inside a vmap.)

  The checks: the root is the last token; parents come before children; rows of
  q are distributions or padding; drafted tokens are in the vocabulary; drafts
  have the declared capabilities; the law sums to 1; the committed tokens fit
  the capacity.

  Args:
    drafter: class name of the drafter.
    declared: capabilities of the drafter, see `interfaces.CAPABILITIES`.
    verifier: class name of the verifier.
    state: state before the round.
    roots: `[B]` int32, the last token of every row.
    draft: drafts of all rows.
    law: laws of all rows.
    usable: `[B]` bool, True if the outputs of target, drafter and verifier are
      finite. Other rows pass, because `RoundStats` already reports them.

  Returns:
    `{error: [B] bool}`, True if the row passes. The error messages contain the
    placeholder {row}.
  """
  nodes, capacity = draft.parents.shape[1], state.tokens.shape[1]
  next_token = _is_one(law.next_token.sum(-1)) & (
      law.next_token >= _LOWEST).all(-1)
  good = {
      f"tokens[0] of the drafter {drafter} is not the last token of row "
      "{row}; the root of a draft is the last token of the sequence":
          draft.tokens[:, 0] == roots,
      **draft_values(drafter, declared, draft),
      f"stop of the verifier {verifier} is no law in row {{row}}; its entries "
      f"must be at least {_LOWEST:g} and sum to 1":
          _is_one(law.stop.sum(-1)) & (law.stop >= _LOWEST).all(-1),
      f"next_token of the verifier {verifier} holds a row that is no law in "
      f"row {{row}}; its entries must be at least {_LOWEST:g} and sum to 1":
          (next_token | (law.stop <= 0)).all(-1),
      f"row {{row}} has no room for {nodes} nodes in {capacity} slots; prefill "
      "with a larger capacity": state.lengths + nodes <= capacity,
  }
  return {text: ok | state.done | ~usable for text, ok in good.items()}


def draft_values(drafter: str, declared: Collection[str], draft: Draft
                 ) -> dict[str, jax.Array]:
  """Returns the entries of `check_values` that concern drafts."""
  order, total = jnp.arange(draft.parents.shape[1]), draft.probs[:, 1:].sum(-1)
  parents = jnp.where(
      order > 0, (draft.parents >= 0) & (draft.parents < order),
      draft.parents == -1)
  is_law = (draft.probs[:, 1:] >= 0).all(-1) & (_is_one(total) | (total == 0))
  vocab_size, drafted = draft.probs.shape[-1], draft.tokens[:, 1:]
  known = (drafted >= 0) & (drafted < vocab_size) | (total == 0)
  good = {
      f"parents of the drafter {drafter} are no tree in row {{row}}; "
      "parents[0] is -1 and 0 <= parents[i] < i": parents.all(-1),
      f"probs of the drafter {drafter} hold a row that is no law in row "
      "{row}; each is not negative and sums to 1, or to 0 for padding":
          is_law.all(-1),
      f"tokens of the drafter {drafter} hold an id outside the vocabulary of "
      f"{vocab_size} tokens in row {{row}}": known.all(-1),
  }
  if "chain" in declared:
    in_line = draft.parents[:, 1:] == jnp.arange(total.shape[1])
    good[f"the drafter {drafter} provides `chain` and drafted a branch "
         "in row {row}"] = ((total == 0) | in_line).all(-1)
  if "deterministic" in declared:
    own = jnp.take_along_axis(draft.probs, draft.tokens[..., None], axis=-1,
                              mode="fill", fill_value=0)
    one_hot = (own[:, 1:, 0] == total) & ((total == 0) | (total == 1))
    good[f"the drafter {drafter} provides `deterministic` and has a row "
         "of probs in row {row} that is not one-hot"] = one_hot.all(-1)
  if "full" in declared:
    good[f"the drafter {drafter} provides `full` and has padding in row "
         "{row}"] = (total != 0).all(-1)
  return good


def raise_if_bad(found: dict[str, jax.Array] | None) -> None:
  """Raises the first error of `check_values`.

  Args:
    found: `{error: bool array}` of shape `[B]` or `[rounds, B]`. None if the
      checks are disabled.

  Raises:
    ValueError: a check failed. The error names the component and the first row
      that fails.
  """
  for text, good in (found or {}).items():
    if isinstance(good, jax.core.Tracer):
      return  # inside a compiled program; its caller checks the result
    good = np.asarray(processes.gathered(good))
    rows = good.reshape(-1, good.shape[-1]).all(0)
    if not rows.all():
      raise ValueError(text.format(row=int(rows.argmin())))


def _is_one(total: jax.Array) -> jax.Array:
  return jnp.abs(total - 1) < _ROUNDING
