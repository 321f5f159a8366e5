"""Writes drafters in published layouts: the tables of the readers backwards."""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
import os
import pathlib
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from specjax.methods._published import Found
from specjax.methods._published import Writer
from specjax.methods.networks import Heads
from specjax.methods.networks import lm_head
from specjax.methods.published import drafter_layout
from specjax.methods.published import LAYOUTS
from specjax.methods.published import shapes
from specjax.models.architectures import ARCHITECTURES
from specjax.models.export import express
from specjax.models.safetensors_files import converted
from specjax.models.safetensors_files import float_dtype
from specjax.models.safetensors_files import StoredTensor
from specjax.models.safetensors_files import write_safetensors
from specjax.models.transformer import Transformer
from specjax.models.weights import Place
from specjax.models.weights import places
from specjax.utils.files import write_json

WRITTEN = tuple(name for name, layout in LAYOUTS.items() if layout.write)
# A drafter has a head of its own or the target's, whatever this says.
_MAY_DIFFER = {"tie_embeddings"}


class _Plan(NamedTuple):
  """Heads in a layout: as it holds them, configuration and tensors.

  Attributes:
    heads: the same heads in the form that the layout holds, see `_form`.
    config: the keys of config.json.
    stored: places of the parameters of `heads`.
    writer: writer of the layout.
  """

  heads: Heads
  config: dict[str, Any]
  stored: list[Place]
  writer: Writer


def layouts_for(heads: Heads, target: Transformer) -> tuple[str, ...]:
  """Returns the layouts that can hold these heads, the default one first.

  Args:
    heads: the heads.
    target: the model that they draft for.
  """
  return tuple(name for name in WRITTEN
               if not isinstance(_planned(name, heads, target), str))


def export_drafter(directory: str | os.PathLike[str], heads: Heads,
                   params: Any, target: Transformer, target_params: Any, *,
                   dtype: Any = None, layout: str | None = None,
                   verifier: str | None = None) -> str:
  """Writes a drafter as a directory that servers and `load_drafter` read.

  Each file appears whole or not at all. Matrices that heads share with their
  target are merged where the layout has no other place for them: the outputs
  of Medusa heads (`MedusaHeads.merged`) and a `narrow_head`. A learned mask
  becomes a row after those of the target's embedding, which is stored with it.

  Args:
    directory: created if needed.
    heads: what the target drafts for itself with.
    params: their parameters.
    target: the model that they were made for.
    target_params: its parameters.
    dtype: to store the weights in; None keeps theirs.
    layout: one of `WRITTEN`, or the project of one, such as "speculators";
      None: the first that holds these heads.
    verifier: name of the target on the Hugging Face hub, or its directory. The
      layouts of speculators note it, and vLLM then finds the target.

  Returns:
    The layout.

  Raises:
    ValueError: no layout, or not the one that is asked for, holds these heads,
      `dtype` does not hold their weights, or the directory holds a model, or a
      drafter in another layout.
  """
  name, plan = _chosen(layout, heads, target)
  record, directory = LAYOUTS[name], pathlib.Path(directory)
  if (directory / "config.json").exists() and drafter_layout(
      directory) != name:
    raise ValueError(f"{directory} holds another model, whose files would be "
                     f"read with a drafter in the layout {name!r}; choose "
                     "another directory")
  leaves = jax.tree.leaves(record.write.params(
      plan.heads, heads, params, target_params))
  dtype = float_dtype(dtype or leaves[0].dtype)
  config = plan.config
  if "speculators_config" in config:
    config["speculators_config"]["verifier"] = {
        "name_or_path": verifier, "architectures": _architectures(target)}
  config.get("transformer_layer_config", config)["torch_dtype"] = dtype.name
  extra = _vocabulary(plan)
  if extra and record.write.stores_head:
    head = lm_head(target_params)[:, np.array(plan.heads.ids)]
    extra = {"lm_head.weight": converted(np.asarray(head.T), dtype)} | extra
  kinds = {name: (x.shape, dtype) for name, x in _tensors(plan).items()}
  kinds |= {name: (x.shape, x.dtype) for name, x in extra.items()}
  directory.mkdir(parents=True, exist_ok=True)
  write_safetensors(directory / record.file, kinds, itertools.chain(
      _arrays(plan, leaves, dtype), extra.values()))
  write_json(directory / "config.json", config, indent=2)
  return name


def _chosen(layout, heads, target):
  """Returns the name of the layout to write, and its plan."""
  asked = [name for name in WRITTEN
           if layout in (None, name, name.partition(" of ")[2])]
  if not asked:
    raise ValueError(f"layout is {layout!r}; it must be one of "
                     f"{', '.join(WRITTEN)}, or the name after 'of'")
  of_kind = [name for name in WRITTEN if LAYOUTS[name].kind == heads.kind]
  if not of_kind:
    raise ValueError(
        f"{type(heads).__name__} cannot be exported: no layout of a server "
        "holds heads of this kind; specjax reads their directory as it is")
  reason = (f"it is not a layout of such heads; choose among "
            f"{', '.join(of_kind)}")
  for name in [name for name in asked if name in of_kind]:
    plan = _planned(name, heads, target)
    if not isinstance(plan, str):
      return name, plan
    reason = plan
  raise ValueError(f"these {type(heads).__name__} cannot be written in the "
                   f"layout {layout or reason and of_kind[0]!r}: {reason}")


def _planned(name, heads, target) -> _Plan | str:
  """Returns the plan of heads in a layout, or the reason why there is none.

  The configuration is read again, so that the layout loses nothing of the
  heads.
  """
  record = LAYOUTS[name]
  if record.kind != heads.kind:
    return "it holds heads of another kind"
  heads = record.write.form(heads)
  try:
    config = record.write.config(heads)
    plan = _Plan(heads, config, places(
        shapes(heads, target), record.names, record.sizes(heads, target)),
                 record.write)
    back = record.read(Found(
        source=name, config=config, target=target, tensors=_tensors(plan)))
  except ValueError as e:
    return str(e)
  lost = {field.name for field in dataclasses.fields(heads)
          if getattr(back, field.name) != getattr(heads, field.name)}
  if lost - _MAY_DIFFER:
    return f"it has no place for {', '.join(sorted(lost - _MAY_DIFFER))}"
  return plan


def _tensors(plan: _Plan) -> dict[str, StoredTensor]:
  """Returns all tensors by name, as reading sees them; only ids are read."""
  tensors = {
      name: StoredTensor(tuple(shape), np.dtype(np.float32), load=None)
      for place in plan.stored
      for name, shape in zip(place.names,
                             place.stored.shapes(plan.heads, place.shape))}
  if plan.writer.stores_head and plan.writer.ids(plan.heads):
    tensors["lm_head.weight"] = StoredTensor(
        (len(plan.heads.ids), plan.heads.width), np.dtype(np.float32), None)
  return tensors | {
      name: StoredTensor(x.shape, x.dtype, lambda _, x=x: x)
      for name, x in _vocabulary(plan).items()}


def _arrays(plan: _Plan, leaves: Sequence[Any], dtype: np.dtype
            ) -> Iterator[np.ndarray]:
  """Yields the tensors; one parameter at a time is copied from the device."""
  for place, x in zip(plan.stored, leaves, strict=True):
    yield from place.stored.split(plan.heads, converted(np.asarray(x), dtype))


def _vocabulary(plan: _Plan) -> dict[str, np.ndarray]:
  """Returns `d2t` and `t2d` of a reduced vocabulary."""
  ids = np.array(plan.writer.ids(plan.heads), np.int64)
  if not ids.size:
    return {}
  used = np.zeros(plan.writer.input_size(plan.heads), np.bool_)
  used[ids] = True
  return {"d2t": ids - np.arange(ids.size), "t2d": used}


def _architectures(target):
  """Returns transformers' class of the target, if one computes it."""
  try:
    return [ARCHITECTURES[express(target.config)[0]].transformers]
  except ValueError:
    return []
