"""Checks of a decoder's inputs, and their conversion to arrays.

Every function raises a one-line `ValueError`, before anything is compiled. The
error contains the argument, its value, its limit and a fix.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
from specjax import sampling
from specjax.decoding import prefill
from specjax.interfaces import Model
from specjax.utils import fields

_NO_TOKEN = -1  # padding in the list of a row's end tokens


def as_rows(given: Sequence[Sequence[int]]) -> list[np.ndarray]:
  """Returns the prompts as arrays. Checks only that they are iterable."""
  if not np.iterable(given):
    raise ValueError(f"prompts is {given!r}; give a list of token ids for each "
                     "prompt, such as [tokenizer.encode(text)]")
  return [np.asarray(row) for row in given]


def prompts(rows: Sequence[Sequence[int]], vocab_size: int
            ) -> tuple[np.ndarray, np.ndarray]:
  """Returns padded tokens `[B, P]` and lengths `[B]`, both int32.

  Args:
    rows: B non-empty sequences of token ids.
    vocab_size: V, vocabulary size of the target.
  """
  rows = as_rows(rows)
  if not rows:
    raise ValueError("there are no prompts; at least one is needed")
  for i, row in enumerate(rows):
    if row.ndim != 1:
      raise ValueError(
          f"prompt {i} is {row if row.ndim == 0 else f'of shape {row.shape}'}; "
          "give a list of token ids for each prompt, such as "
          "[tokenizer.encode(text)]")
    if row.size == 0:
      raise ValueError(f"prompt {i} is empty; it needs at least one token, "
                       "such as the tokenizer's bos")
    if not np.issubdtype(row.dtype, np.integer):
      raise ValueError(f"prompt {i} holds {row.dtype}; token ids are whole "
                       "numbers")
    bad = row[(row < 0) | (row >= vocab_size)]
    if bad.size:
      raise ValueError(
          f"prompt {i} holds token id {bad[0]}; ids must lie in "
          f"[0, {vocab_size}): use the target's tokenizer")
  lengths = np.array([row.size for row in rows], np.int32)
  columns = prefill.padded_length(int(lengths.max()))
  tokens = np.zeros((len(rows), columns), np.int32)
  for i, row in enumerate(rows):
    tokens[i, :row.size] = row
  return tokens, lengths


def parameters(given: Any) -> None:
  """Checks that `given` is a dictionary of parameters with the key "target".

  Raises:
    ValueError: the key is missing, or a value is a model with its parameters.
  """
  if not isinstance(given, Mapping) or "target" not in given:
    has = (f"has the keys {', '.join(map(str, given))}"
           if isinstance(given, Mapping) else f"is a {type(given).__name__}")
    raise ValueError(f"params {has}; give "
                     '{"target": ..., "drafter": ...}, the parameters of both')
  for name, one in given.items():
    if interfaces.is_bundle(one):
      raise ValueError(
          f"params[{name!r}] is a {type(one).__name__}, a model with its "
          "parameters; give the parameters alone: its `.params`")


def explain_parameters(given: Mapping[str, Any], models: Mapping[str, Any]
                       ) -> None:
  """Raises `ValueError` if parameters do not have the shapes of their model.

  The function traces `init` of the models. This takes time, so it is called
  only after a program failed.

  Args:
    given: `{"target": ..., "drafter": ...}`.
    models: models with the same keys. Models without `init(key)` are not
      checked.

  Raises:
    ValueError: a leaf is missing, superfluous or has a wrong shape.
  """
  for name, model in models.items():
    if name not in given or not isinstance(model, Model):
      continue
    try:
      wanted = _shapes(jax.eval_shape(model.init, jax.random.key(0)))
    except (TypeError, NotImplementedError):  # no `init(key)`
      continue
    has = _shapes(given[name])
    # A drafter may have other parameters than those of its model.
    if name != "drafter" or {*wanted} & {*has}:
      _check_shapes(name, type(model).__name__, wanted, has)


def _shapes(tree: chex.ArrayTree) -> dict[str, tuple[int, ...]]:
  """Returns `{path: shape}` for all leaves of a tree."""
  return {jax.tree_util.keystr(path): tuple(np.shape(x))
          for path, x in jax.tree.leaves_with_path(tree)}


def _check_shapes(name: str, model: str, wanted: dict[str, tuple[int, ...]],
                  has: dict[str, tuple[int, ...]]) -> None:
  describe = lambda shape: (
      "nothing" if shape is None else f"an array of shape {shape}")
  for path in sorted({*wanted, *has}):
    if wanted.get(path) != has.get(path):
      raise ValueError(
          f"params[{name!r}] has {describe(has.get(path))} at "
          f"{path or 'its top'}, where {model} of this decoder has "
          f"{describe(wanted.get(path))}; give the parameters of that model")


def limits(given: Any, lengths: np.ndarray, context_length: int, owner: str
           ) -> np.ndarray:
  """Returns `[B]` int32, the lengths at which rows are done.

  Args:
    given: limits of the user, `[B]` or one number. None means the context
      length.
    lengths: `[B]`, number of tokens of each prompt.
    context_length: upper bound of the limits.
    owner: name of the model with this context length, for the error.
  """
  found = np.asarray(context_length if given is None else given)
  if found.shape not in ((), lengths.shape):
    raise ValueError(f"limits has shape {found.shape}; give one number, or one "
                     f"for each of the {len(lengths)} prompts")
  found = np.broadcast_to(found, lengths.shape)
  for i, (limit, length) in enumerate(zip(found, lengths)):
    if not limit <= context_length:
      raise ValueError(
          f"row {i} may grow to {limit} tokens, prompt included; the "
          f"context length is {context_length}, the {owner}'s: ask for fewer "
          "tokens or shorten the prompt")
    if limit != limit // 1:
      raise ValueError(f"row {i} has a limit of {limit} tokens; give a whole "
                       "number")
    if length > limit:
      raise ValueError(f"prompt {i} has {length} tokens; its limit is "
                       f"{limit}: shorten it or raise the limit")
  return found.astype(np.int32)


def context(given: chex.ArrayTree | None, rows: int) -> Any:
  """Returns a copy of the drafter's context.

  A copy is necessary because the decoding loop donates the context.

  Args:
    given: tree of arrays `[B, ...]`, or None.
    rows: B, number of prompts.
  """
  for path, x in jax.tree.leaves_with_path(given):
    if np.ndim(x) < 1 or len(x) != rows:
      raise ValueError(f"context{jax.tree_util.keystr(path)} has shape "
                       f"{np.shape(x)}; its first axis must be the "
                       f"{rows} prompts")
  return jax.tree.map(jnp.array, given)


def temperatures(given: Any, default: float, rows: int) -> np.ndarray:
  """Returns the temperatures `[B]` float32 of the rows.

  Args:
    given: temperatures of the user, `[B]` or one number. None means `default`.
    default: temperature of the decoder.
    rows: B, number of prompts.
  """
  found = default if given is None else given
  try:
    values = np.asarray(found, np.float32)
  except (TypeError, ValueError):
    raise ValueError(f"temperature is {found!r}; give one number, or one for "
                     f"each of the {rows} prompts") from None
  if values.shape not in ((), (rows,)):
    raise ValueError(f"temperature has shape {values.shape}; give one "
                     f"number, or one for each of the {rows} prompts")
  if not ((values >= 0) & (values <= sampling.LARGEST)).all():
    raise ValueError(f"temperature is {found}; it must be at least 0 and at "
                     f"most {sampling.LARGEST:g}: 0 is greedy, 1 is the "
                     "model's own distribution")
  return np.broadcast_to(values, (rows,))


def _is_single(x: Any) -> bool:
  # Strings, bytes and mappings are iterable, but do not contain token ids.
  return isinstance(x, str | bytes | Mapping) or not np.iterable(x)


def eos_ids(name: str, eos: Any, vocab_size: int) -> tuple[int, ...]:
  """Checks the end tokens of one row and returns them as a tuple.

  Args:
    name: name of the argument in the error.
    eos: token id, several ids, or None for no end token.
    vocab_size: V, vocabulary size of the target.
  """
  one = eos is not None and _is_single(eos)
  ids = () if eos is None else (eos,) if one else eos
  for token in ids:
    if not (fields.is_whole(token) and 0 <= token < vocab_size):
      raise ValueError(f"{name} is {token!r}; it must be a token id in "
                       f"[0, {vocab_size}), several of them, or None")
  return tuple(int(token) for token in ids)


def _listed(given: Any) -> list[Any]:
  """Returns an `eos` argument as a list. A single id becomes a list of one."""
  if isinstance(given, jax.Array | np.ndarray | np.generic):
    given = np.asarray(given).tolist()
  if given is None:
    return []
  return [given] if _is_single(given) else list(given)


def eos_rows(given: Any, default: Any, rows: int, vocab_size: int
             ) -> np.ndarray:
  """Returns the end tokens `[B, E]` int32, padded with -1.

  Args:
    given: token id or flat sequence of ids for all rows, also if the sequence
      has B ids; or B lists of ids, one per row. None means `default`.
    default: end tokens of the decoder, for all rows.
    rows: B, number of prompts.
    vocab_size: V, vocabulary size of the target.
  """
  given = default if given is None else given
  entries = _listed(given)
  ids = [x is not None and _is_single(x) for x in entries]
  if all(ids):
    lists = [eos_ids("eos", entries, vocab_size)] * rows
  elif any(ids) or len(entries) != rows:
    raise ValueError(
        f"eos is {given} for {rows} prompts; give token ids for all rows, such "
        "as (1, 2), or one list for each row, such as [[1, 2], []]")
  else:
    lists = [eos_ids(f"eos of prompt {i}", one, vocab_size)
             for i, one in enumerate(entries)]
  found = np.full((rows, max(1, *map(len, lists))), _NO_TOKEN, np.int32)
  for row, own in zip(found, lists):
    row[:len(own)] = own
  return found


def row_keys(key: jax.Array, request_ids: Any, rows: int) -> jax.Array:
  """Returns the keys `[B]` of the rows: the request ids folded into the key.

  Args:
    key: threefry key, from `jax.random.key`.
    request_ids: `[B]` whole numbers from 0 to 2^32 - 1. None means 0..B-1.
    rows: B, number of prompts.
  """
  if not (isinstance(key, jax.Array)
          and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)):
    raise ValueError("key is not a typed PRNG key; create it with "
                     "jax.random.key(seed, impl='threefry2x32')")
  if str(jax.random.key_impl(key)) != "threefry2x32":
    raise ValueError(
        f"key is of kind {jax.random.key_impl(key)}; it must be "
        "'threefry2x32', with which a row draws the same numbers in any batch")
  if key.shape:
    raise ValueError(f"key has shape {key.shape}; give one key: the keys of "
                     "the rows are computed from it and the request ids")
  ids = np.arange(rows) if request_ids is None else np.asarray(request_ids)
  if ids.shape != (rows,) or not np.issubdtype(ids.dtype, np.integer):
    raise ValueError(f"request_ids has shape {ids.shape} and dtype "
                     f"{ids.dtype}; it must hold a whole number for each of "
                     f"the {rows} prompts")
  if ((ids < 0) | (ids >= 2**32)).any():
    raise ValueError(f"request_ids holds {ids[(ids < 0) | (ids >= 2**32)][0]}; "
                     "ids lie in [0, 2^32)")
  return jax.vmap(jax.random.fold_in, (None, 0))(
      key, jnp.asarray(ids, jnp.uint32))
