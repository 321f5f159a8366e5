"""Functions that load published drafters and export drafters to their formats.

A layout is the file format of one project: the tensor names and the keys of
config.json.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import os
import pathlib
import re
from typing import Any
from typing import NamedTuple

import chex
import jax
import numpy as np

from specjax.methods.blocks import published as blocks
from specjax.methods.features import published as features
from specjax.methods.heads import published as heads
from specjax.methods.layouts import Found
from specjax.methods.layouts import Layout
from specjax.methods.layouts import WEIGHTS
from specjax.methods.layouts import Writer
from specjax.methods.networks import Heads
from specjax.methods.networks import lm_head
from specjax.models import model_files
from specjax.models.architectures import ARCHITECTURES
from specjax.models.export import express
from specjax.models.safetensors_files import converted
from specjax.models.safetensors_files import float_dtype
from specjax.models.safetensors_files import open_safetensors
from specjax.models.safetensors_files import StoredTensor
from specjax.models.safetensors_files import write_safetensors
from specjax.models.transformer import default_dtype
from specjax.models.transformer import Transformer
from specjax.models.weights import fill
from specjax.models.weights import Place
from specjax.models.weights import places
from specjax.utils.files import read_json
from specjax.utils.files import write_json

# All layouts by name. The names are the allowed values of the argument `layout`
# of `load_drafter`. If files match several layouts, the first one is chosen.
LAYOUTS = heads.LAYOUTS | blocks.LAYOUTS | features.LAYOUTS
_AGAIN = "download it again"
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_OLD = "logit_head."  # prefix of head names in early SpecForge files


def load_drafter(path: str | os.PathLike[str], target: Transformer,
                 target_params: chex.ArrayTree | None = None, *,
                 dtype: jax.typing.DTypeLike | None = None,
                 layout: str | None = None) -> tuple[Heads, Any]:
  """Loads a drafter that another project trained and published.

  Supported methods are Medusa, Hydra, EAGLE-1, EAGLE-3, P-EAGLE, multi-token
  prediction (MTP), DFlash and its relatives (DFlash 2, DSpark, Domino,
  LiLiCorr, DFlare, JetSpec), and UNO, in the file layouts of `LAYOUTS`. Layers
  of EAGLE, P-EAGLE, DFlash and its relatives may have sliding windows.

  Args:
    path: directory with config.json and safetensors files, or the name of a
      repository on the Hugging Face hub. If the drafter is stored in the
      target's files, as MTP modules are, or in a folder `adapter` beside them,
      as UNO is, give the directory of the target.
    target: target model.
    target_params: parameters of the target, or None. If they are given, they
      are compared with the copies of the target's matrices in the drafter's
      files. Equal copies are not loaded. UNO requires them.
    dtype: dtype of the parameters. None means `default_dtype()`.
    layout: key of `LAYOUTS`. If it is None, the files determine the layout.
      EAGLE-3 files of other tools may be recognised as SpecForge's, although
      these tools number the target's layers differently. In this case, replace
      the field `taps` of the returned heads: the numbers of the target's hidden
      states that the drafter reads, as in `TransformerConfig.features`.

  Returns:
    `(heads, params)`, the configuration of the draft heads and their
    parameters.

  Raises:
    ValueError: the drafter or a file is missing, a file is damaged, a
      configuration key is unknown, or the drafter was made for another target.
  """
  if not isinstance(target, Transformer):
    raise ValueError(f"the target is a {type(target).__name__}; give a "
                     "models.Transformer, such as load_pretrained(...).model")
  directory = model_files.find(os.fspath(path), adapter=True)
  if not directory.is_dir():
    raise ValueError(f"{directory} is a file; give the directory of a drafter")
  beside = directory / model_files.ADAPTER
  if (beside / "adapter_config.json").is_file():
    directory = beside
  if layout is not None and layout not in LAYOUTS:
    raise ValueError(f"layout is {layout!r}; it must be one of "
                     f"{', '.join(LAYOUTS)}")
  config_path = directory / "config.json"
  config = (read_json(config_path, _AGAIN) if config_path.is_file() else {})
  tensors = _open(directory)
  layout = layout or _recognised(directory, config, tensors)
  record = LAYOUTS[layout]
  found = Found(source=str(directory), config=config, target=target,
                tensors=_own(record, tensors, target),
                target_params=target_params, layout=layout)
  dtype = float_dtype(dtype or default_dtype())
  if record.load:
    return record.load(found, dtype)
  drafter = record.read(found)
  return drafter, fill(
      shapes(drafter, target), record.names, found.tensors, dtype,
      source=found.source,
      kind=f"the layout {layout!r}", config=drafter,
      sizes=record.sizes(drafter, target), used=found.used)


def shapes(drafter: Heads, target: Transformer) -> Any:
  """Returns shapes and dtypes of the parameters, as `jax.ShapeDtypeStruct`s."""
  size = target.vocab_size, target.config.width
  read = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in (
      ("embedding", size), ("head", size[::-1]))}
  return jax.eval_shape(drafter.init, jax.random.key(0), read)


def drafter_layout(path: str | os.PathLike[str]) -> str | None:
  """Returns the file layout of the drafter in a directory.

  The result is a key of `LAYOUTS`, or None if the directory contains no
  drafter.
  """
  directory = pathlib.Path(path)
  config_path = directory / "config.json"
  try:
    config = read_json(config_path, _AGAIN) if config_path.is_file() else {}
    tensors = _open(directory)
  except ValueError:
    return None
  for name, layout in LAYOUTS.items():
    if layout.known_by(config, tensors):
      return name
  return None


def _open(directory: pathlib.Path) -> Mapping[str, StoredTensor]:
  for layout in LAYOUTS.values():
    path = directory / layout.file
    if path.is_file() and layout.file != WEIGHTS:
      return open_safetensors(path)
  if not any((directory / name).is_file()
             for name in (WEIGHTS, model_files.INDEX)):
    for pattern in ("*.pt", "*.pth", "*.bin"):
      for path in sorted(directory.glob(pattern)):
        raise ValueError(_pickled(path))
  return model_files.open_directory(directory)


def _pickled(path: pathlib.Path) -> str:
  named = {pathlib.Path(layout.file).stem for layout in LAYOUTS.values()}
  new = path.stem if path.stem in named else pathlib.Path(WEIGHTS).stem
  new = path.with_name(f"{new}.safetensors")
  return (f"{path} is a pickle, which can run code when it is read; write it "
          "as safetensors where torch is installed: safetensors.torch."
          f"save_file({{k: x.clone() for k, x in torch.load({str(path)!r}, "
          f"weights_only=True).items()}}, {str(new)!r})")


def _recognised(directory: pathlib.Path, config: Mapping[str, Any],
                tensors: Mapping[str, StoredTensor]) -> str:
  for name, layout in LAYOUTS.items():
    if layout.known_by(config, tensors):
      return name
  raise ValueError(
      f"{directory} contains no drafter in a layout that specjax supports: "
      "neither its configuration nor its tensor names match "
      f"{', '.join(LAYOUTS)}")


def _own(layout: Layout, tensors: Mapping[str, StoredTensor],
         target: Transformer) -> dict[str, StoredTensor]:
  """Returns the drafter's tensors by name.

  Some layouts store the drafter in the target's files. The result does not
  contain the target's tensors.
  """
  layers = target.config.layers
  # If the drafter is in the target's files, its layer numbers continue those of
  # the target. The drafter's tensors are therefore those whose layer number the
  # target does not have.
  within = layout.within.replace(
      "{modules}", rf"(?!({'|'.join(map(str, range(layers)))})\.)\d+")
  return {name.removeprefix(layout.prefix).removeprefix(_OLD): tensors[name]
          for name in tensors if name.startswith(layout.prefix)
          and re.match(within, name) and not _COMPUTED.search(name)}


WRITTEN = tuple(name for name, layout in LAYOUTS.items() if layout.write)
# `_planned` reads a written configuration back and compares it with the heads.
# These fields may differ, because they have no effect on a drafter.
_MAY_DIFFER = {"tie_embeddings"}


class _Plan(NamedTuple):
  """Contents of the files that `export_drafter` will write in one layout.

  Attributes:
    heads: draft heads as read from the written files, see `Writer.form`.
    config: contents of config.json.
    stored: tensor names and shapes for every parameter of `heads`.
    writer: conversion of heads to the layout.
  """

  heads: Heads
  config: dict[str, Any]
  stored: list[Place]
  writer: Writer


def layouts_for(heads: Heads, target: Transformer) -> tuple[str, ...]:
  """Returns the names of the file layouts that can store these draft heads.

  The first of these layouts is the default of `export_drafter`.

  Args:
    heads: draft heads of any class.
    target: target model.
  """
  return tuple(name for name in WRITTEN
               if not isinstance(_planned(name, heads, target), str))


def export_drafter(directory: str | os.PathLike[str], heads: Heads,
                   params: chex.ArrayTree, target: Transformer,
                   target_params: chex.ArrayTree, *,
                   dtype: jax.typing.DTypeLike | None = None,
                   layout: str | None = None, verifier: str | None = None
                   ) -> str:
  """Writes draft heads in a file format of inference servers such as vLLM.

  `load_drafter` can also read the files. Each file is written atomically.

  Some heads share a matrix with their target, for example the LM head. If the
  draft vocabulary is reduced (`narrow_head`), the heads share only columns of
  the LM head. If the format does not support sharing, this function writes a
  copy of the matrix. A trained embedding of the mask token is stored as an
  additional row after a copy of the target's embeddings.

  Args:
    directory: output directory, created if needed.
    heads: draft heads of any class that servers support.
    params: parameters of the heads.
    target: target model.
    target_params: parameters of the target.
    dtype: dtype of the stored weights. None means the dtype of the parameters.
    layout: name in `WRITTEN`, or only the name of the project, such as
      "speculators". None means the first layout that can store these heads.
    verifier: name of the target on the Hugging Face hub, or its directory, for
      vLLM. Only the layouts of the project speculators store this name.

  Returns:
    The name of the layout.

  Raises:
    ValueError: the layout cannot store these heads, `dtype` cannot store their
      weights, or the directory contains a model or a drafter in another layout.
  """
  name, plan = _chosen(layout, heads, target)
  record, directory = LAYOUTS[name], pathlib.Path(directory)
  if (directory / "config.json").exists() and drafter_layout(
      directory) != name:
    raise ValueError(f"{directory} contains another model, whose files would "
                     f"be read together with a drafter in the layout {name!r}; "
                     "choose another directory")
  leaves = jax.tree.leaves(record.write.params(
      plan.heads, heads, params, target_params))
  dtype = float_dtype(dtype or leaves[0].dtype)
  config = plan.config
  if "speculators_config" in config:
    config["speculators_config"]["verifier"] = {
        "name_or_path": verifier, "architectures": _architectures(target)}
  config.get("transformer_layer_config", config)["torch_dtype"] = dtype.name
  extra = _vocabulary(plan)
  if record.write.stores_head(plan.heads):
    head = lm_head(target_params)
    head = head[:, np.array(plan.heads.ids)] if plan.heads.ids else head
    extra = {"lm_head.weight": converted(np.asarray(head.T), dtype)} | extra
  kinds = {name: (x.shape, dtype) for name, x in _tensors(plan).items()}
  kinds |= {name: (x.shape, x.dtype) for name, x in extra.items()}
  directory.mkdir(parents=True, exist_ok=True)
  write_safetensors(directory / record.file, kinds, itertools.chain(
      _arrays(plan, leaves, dtype), extra.values()))
  write_json(directory / "config.json", config, indent=2)
  return name


def _chosen(layout: str | None, heads: Heads, target: Transformer
            ) -> tuple[str, _Plan]:
  """Returns the first suitable layout, and the contents of its files.

  Args:
    layout: requested layout or project, see `export_drafter`. None means any
      layout.
    heads: draft heads.
    target: target model.

  Raises:
    ValueError: none of the requested layouts can store these heads.
  """
  candidates = _candidates(layout, heads)
  reason = ""
  for name in candidates:
    plan = _planned(name, heads, target)
    if not isinstance(plan, str):
      return name, plan
    reason = plan
  raise ValueError(f"these {type(heads).__name__} cannot be written in the "
                   f"layout {layout or candidates[0]!r}: {reason}")


def _candidates(layout: str | None, heads: Heads) -> list[str]:
  """Returns the requested layouts that store this class of heads.

  Args:
    layout: requested layout or project, see `export_drafter`. None means any
      layout.
    heads: draft heads.
  """
  selected = [name for name in WRITTEN
              if layout in (None, name, name.partition(" of ")[2])]
  if not selected:
    raise ValueError(f"layout is {layout!r}; it must be one of "
                     f"{', '.join(WRITTEN)}, or only the part after 'of'")
  kind = type(heads).__name__
  of_kind = [name for name in WRITTEN if LAYOUTS[name].kind == heads.kind]
  if not of_kind:
    raise ValueError(
        f"{kind} cannot be exported, because no server has a layout for this "
        "kind of heads; specjax reads the directory that save_heads wrote")
  candidates = [name for name in selected if name in of_kind]
  if not candidates:
    raise ValueError(f"these {kind} cannot be written in the layout "
                     f"{layout!r}; use one of {', '.join(of_kind)}")
  return candidates


def _planned(name: str, heads: Heads, target: Transformer) -> _Plan | str:
  """Returns the contents of the files in one layout, or an error message.

  This function checks that the layout can store all fields of the heads: it
  reads the heads back from the configuration, and compares the fields.

  Args:
    name: name of the layout.
    heads: draft heads.
    target: target model.
  """
  record = LAYOUTS[name]
  if record.kind != heads.kind:
    return "it stores heads of another kind"
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
    return f"it cannot store {', '.join(sorted(lost - _MAY_DIFFER))}"
  return plan


def _tensors(plan: _Plan) -> dict[str, StoredTensor]:
  """Returns all tensors that will be written, by name.

  Only the maps of token ids (`_vocabulary`) have data. The other tensors have
  only a shape and a dtype.
  """
  tensors = {
      name: StoredTensor(tuple(shape), np.dtype(np.float32), load=None)
      for place in plan.stored
      for name, shape in zip(place.names,
                             place.stored.shapes(plan.heads, place.shape))}
  if plan.writer.stores_head(plan.heads):
    tensors["lm_head.weight"] = StoredTensor(
        (plan.heads.draft_size, plan.heads.width), np.dtype(np.float32), None)
  return tensors | {
      name: StoredTensor(x.shape, x.dtype, lambda x=x: x)
      for name, x in _vocabulary(plan).items()}


def _arrays(plan: _Plan, leaves: Sequence[Any], dtype: np.dtype
            ) -> Iterator[np.ndarray]:
  """Yields the tensors in the order in which they are written.

  The parameters are copied from the device one after another, to save host
  memory.
  """
  for place, x in zip(plan.stored, leaves, strict=True):
    yield from place.stored.split(plan.heads, converted(np.asarray(x), dtype))


def _vocabulary(plan: _Plan) -> dict[str, np.ndarray]:
  """Returns the tensors that describe a reduced draft vocabulary.

  `d2t` ("draft to target") contains a number for each row of the drafter's LM
  head: the target's token id minus the row number. `t2d` ("target to draft") is
  a mask over the target's tokens, True for tokens in the draft vocabulary. The
  result is {} if the drafter has the target's complete vocabulary.
  """
  ids = np.array(plan.writer.ids(plan.heads), np.int64)
  if not ids.size:
    return {}
  used = np.zeros(plan.writer.input_size(plan.heads), np.bool_)
  used[ids] = True
  return {"d2t": ids - np.arange(ids.size), "t2d": used}


def _architectures(target: Transformer) -> list[str]:
  """Returns a list with the class name of the target in transformers.

  The list is empty if transformers has no class for the target's architecture.
  """
  try:
    return [ARCHITECTURES[express(target.config)[0]].transformers]
  except ValueError:
    return []
