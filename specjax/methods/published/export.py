"""Writes drafters in published layouts: the tables of the readers backwards."""

import dataclasses
import itertools
import os
import pathlib
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from specjax.methods.blocks.parallel_network import ParallelHeads
from specjax.methods.heads.medusa import MedusaHeads
from specjax.methods.networks import Heads
from specjax.methods.networks import lm_head
from specjax.methods.published.found import Found
from specjax.methods.published.layouts import LAYOUTS
from specjax.methods.published.load import drafter_layout
from specjax.methods.published.load import places
from specjax.methods.published.tables import input_size
from specjax.models.published.architectures import ARCHITECTURES
from specjax.models.published.export import express
from specjax.models.safetensors_files import converted
from specjax.models.safetensors_files import float_dtype
from specjax.models.safetensors_files import StoredTensor
from specjax.models.safetensors_files import write_safetensors
from specjax.models.transformer import Transformer
from specjax.utils.files import write_json

WRITTEN = tuple(name for name, layout in LAYOUTS.items() if layout.write)
# A drafter has a head of its own or the target's, whatever this says.
_MAY_DIFFER = {"tie_embeddings"}


class _Plan(NamedTuple):
  """Heads in a layout: as it holds them, configuration and tensors.

  Attributes:
    heads: the same heads in the form that the layout holds, see `_form`.
    config: the keys of config.json.
    stored: of every parameter of `heads` its shape, how it is stored, and the
      names of its tensors.
  """

  heads: Heads
  config: dict[str, Any]
  stored: list[tuple[Any, ...]]


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
  leaves = jax.tree.leaves(_parameters(plan.heads, heads, params,
                                       target_params))
  dtype = float_dtype(dtype or leaves[0].dtype)
  config = plan.config
  if "speculators_config" in config:
    config["speculators_config"]["verifier"] = {
        "name_or_path": verifier, "architectures": _architectures(target)}
  config.get("transformer_layer_config", config)["torch_dtype"] = dtype.name
  shared = {name: converted(np.asarray(x.T), dtype) for name, x in _shared(
      plan.heads, target_params).items()} | _vocabulary(plan.heads)
  kinds = {name: (x.shape, dtype) for name, x in _tensors(plan).items()}
  kinds |= {name: (x.shape, x.dtype) for name, x in shared.items()}
  directory.mkdir(parents=True, exist_ok=True)
  write_safetensors(directory / record.file, kinds, itertools.chain(
      _arrays(plan, leaves, dtype), shared.values()))
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
  heads = _form(record, heads)
  try:
    config = record.write(heads)
    if record.counts_target_layers:
      config["num_target_layers"] = target.config.layers
    plan = _Plan(heads, config, places(record, heads, target)[1])
    back = record.read(Found(
        source=name, config=config, target=target, tensors=_tensors(plan)))
  except ValueError as e:
    return str(e)
  lost = {field.name for field in dataclasses.fields(heads)
          if getattr(back, field.name) != getattr(heads, field.name)}
  if lost - _MAY_DIFFER:
    return f"it has no place for {', '.join(sorted(lost - _MAY_DIFFER))}"
  return plan


def _form(record, heads):
  """Returns the same heads as a layout holds them.

  Fields that the heads do not use have their default values.
  """
  if isinstance(heads, MedusaHeads):
    return dataclasses.replace(heads, output="own", rank=MedusaHeads.rank)
  if isinstance(heads, ParallelHeads):
    return (heads if heads.markov != "none" else dataclasses.replace(
        heads, markov_rank=ParallelHeads.markov_rank))
  if heads.narrow_head and "head" in record.names:
    return dataclasses.replace(heads, narrow_head=False, own_head=True)
  return heads


def _parameters(form, heads, params, target_params):
  """Returns the parameters of `form`, the same heads in another form."""
  if isinstance(heads, MedusaHeads):
    return heads.merged(params, target_params)[1]
  if isinstance(heads, ParallelHeads):
    if heads.mask_token is None:
      table = np.asarray(target_params["embedding"], np.float32)
      mask = np.asarray(params["mask"], np.float32)
      return {**params, "mask": np.concatenate([table, mask[None]])}
  elif form.own_head and not heads.own_head:
    return {**params, "head": heads.columns(target_params)}
  return params


def _shared(heads, target_params):
  """Returns what servers read of the target from the drafter's own files.

  vLLM takes the target's LM head only for a drafter of its whole vocabulary.
  """
  if isinstance(heads, ParallelHeads) and heads.ids:
    head = lm_head(target_params)
    return {"lm_head.weight": head[:, np.array(heads.ids)]}
  return {}


def _tensors(plan):
  """Returns all tensors by name, as reading sees them; only ids are read."""
  tensors = {name: StoredTensor(tuple(part), np.dtype(np.float32), load=None)
             for shape, how, names in plan.stored
             for name, part in zip(names, how.shapes(plan.heads, shape))}
  if isinstance(plan.heads, ParallelHeads) and plan.heads.ids:
    tensors["lm_head.weight"] = StoredTensor(
        (len(plan.heads.ids), plan.heads.width), np.dtype(np.float32), None)
  return tensors | {
      name: StoredTensor(x.shape, x.dtype, lambda _, x=x: x)
      for name, x in _vocabulary(plan.heads).items()}


def _arrays(plan, leaves, dtype):
  """Yields the tensors; one parameter at a time is copied from the device."""
  for (_, how, _), x in zip(plan.stored, leaves, strict=True):
    yield from how.split(plan.heads, converted(np.asarray(x), dtype))


def _vocabulary(heads):
  """Returns `d2t` and `t2d` of a reduced vocabulary."""
  ids = np.array(getattr(heads, "ids", ()), np.int64)
  if not ids.size:
    return {}
  size = (input_size(heads) if isinstance(heads, ParallelHeads)
          else heads.vocab_size)
  used = np.zeros(size, np.bool_)
  used[ids] = True
  return {"d2t": ids - np.arange(ids.size), "t2d": used}


def _architectures(target):
  """Returns transformers' class of the target, if one computes it."""
  try:
    return [ARCHITECTURES[express(target.config)[0]].transformers]
  except ValueError:
    return []
