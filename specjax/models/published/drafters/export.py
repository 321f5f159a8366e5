"""Drafters in the layouts that others read: the tables backwards."""

import dataclasses
import itertools
import os
import pathlib
from typing import Any

import jax
import numpy as np

from specjax.files import write_json
from specjax.models.heads import Heads
from specjax.models.published.drafters.found import Found
from specjax.models.published.drafters.hosts import Host
from specjax.models.published.drafters.layouts import LAYOUTS
from specjax.models.published.drafters.load import names_of
from specjax.models.published.drafters.load import places
from specjax.models.safetensors_files import converted
from specjax.models.safetensors_files import float_dtype
from specjax.models.safetensors_files import StoredTensor
from specjax.models.safetensors_files import write_safetensors
from specjax.models.transformer import Transformer

# Tokens that are drafted by default, and a field that heads do not read.
_MAY_DIFFER = {"forecasts", "tie_embeddings"}


def export_drafter(directory: str | os.PathLike[str], heads: Heads,
                   params: Any, target: Transformer, *, dtype: Any = None,
                   layout: str | None = None) -> str:
  """Writes a drafter as a directory that `load_drafter` and others read.

  Each file appears whole or not at all. What is written is read again before,
  so that no layout loses anything of the heads but, in some, how many tokens
  are drafted by default.

  Drafters of some layouts lie in the files of their target. These are written
  where they are asked for by name, into the directory in which
  `export_pretrained` has written the target. What was there of another drafter
  in this layout goes.

  Args:
    directory: created if needed, or the target's, see above.
    heads: what the target drafts for itself with.
    params: their parameters.
    target: the model that they were made for.
    dtype: to store the weights in; None keeps theirs.
    layout: one of `LAYOUTS`; None: the first that holds these heads in files
      of their own.

  Returns:
    The layout.

  Raises:
    ValueError: no layout, or not the one that is asked for, holds these heads,
      `dtype` does not hold their weights, or the target is not there, or
      another one is.
  """
  if layout is not None and layout not in LAYOUTS:
    raise ValueError(f"layout is {layout!r}; it must be one of "
                     f"{', '.join(LAYOUTS)}")
  directory, leaves = pathlib.Path(directory), jax.tree.leaves(params)
  dtype = dtype and float_dtype(dtype)
  reason = "no published layout has heads of this kind"
  for name in [layout] if layout else LAYOUTS:
    record, host = LAYOUTS[name], None
    if record.kind != heads.kind or (record.in_target and layout is None):
      continue
    try:
      config = record.write(heads)
      if record.in_target:
        host = Host.of(directory)
        config = {**host.config, **config}
      if record.kind == "parallel" and not record.algorithm:
        # Their code asks for it, even where the numbers of layers are given.
        config["num_target_layers"] = target.config.layers
      _, stored = places(record, heads, target)
      tensors = _tensors(heads, stored, leaves, dtype)
      copies = _copies(record, heads, target, host)
      tensors |= copies
      back = record.read(Found(source=name, config=config, target=target,
                               tensors=tensors))
    except ValueError as e:
      reason = str(e)
      continue
    lost = [field.name for field in dataclasses.fields(heads)
            if getattr(back, field.name) != getattr(heads, field.name)]
    if set(lost) - _MAY_DIFFER:
      reason = f"it has no place for {', '.join(lost)}"
      continue
    arrays = itertools.chain(_arrays(heads, stored, leaves, dtype),
                             (x.read() for x in copies.values()))
    if host is not None:
      host.write(config, {record.prefix + key: x
                          for key, x in tensors.items()}, arrays,
                 replaces=names_of(record, host.tensors, target))
      return name
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(
        directory / record.file,
        {key: (x.shape, x.dtype) for key, x in tensors.items()}, arrays)
    write_json(directory / "config.json", config, indent=2)
    return name
  raise ValueError(f"these {type(heads).__name__} cannot be written in the "
                   f"layout {layout or 'of any other project'}: {reason}; use "
                   "models.heads.save_heads")


def _tensors(heads, stored, leaves, dtype):
  """The tensors by name, as reading sees them; only ids can be read."""
  tensors = {}
  for (shape, how, names), x in zip(stored, leaves, strict=True):
    for name, part in zip(names, how.shapes(heads, shape)):
      tensors[name] = StoredTensor(tuple(part), np.dtype(dtype or x.dtype),
                                   load=None)
  for name, x in _vocabulary(heads).items():
    tensors[name] = StoredTensor(x.shape, x.dtype, lambda _, x=x: x)
  return tensors


def _copies(record, heads, target, host):
  """The tensors of the target that the layout's modules have copies of."""
  first = target.config.layers
  return {name.format(i=first + m): host.matrix(part)
          for m in range(getattr(heads, "modules", 0))
          for name, part in record.copies.items()}


def _arrays(heads, stored, leaves, dtype):
  """What is in them; one parameter at a time is copied from the device."""
  for (_, how, _), x in zip(stored, leaves, strict=True):
    yield from how.split(heads, converted(np.asarray(x), dtype))
  yield from _vocabulary(heads).values()


def _vocabulary(heads):
  """`d2t` and `t2d` of a reduced vocabulary."""
  ids = np.array(getattr(heads, "ids", ()), np.int64)
  if not ids.size:
    return {}
  used = np.zeros(heads.vocab_size, np.bool_)
  used[ids] = True
  return {"d2t": ids - np.arange(ids.size), "t2d": used}
