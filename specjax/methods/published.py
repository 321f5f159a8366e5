"""Published drafters, from a directory."""

from collections.abc import Mapping
import os
import pathlib
import re
from typing import Any

import jax
import numpy as np

from specjax.methods._published import Found
from specjax.methods._published import WEIGHTS
from specjax.methods.blocks import published as blocks
from specjax.methods.features import published as features
from specjax.methods.heads import published as heads
from specjax.methods.networks import Heads
from specjax.models import model_files
from specjax.models.safetensors_files import float_dtype
from specjax.models.safetensors_files import open_safetensors
from specjax.models.safetensors_files import StoredTensor
from specjax.models.transformer import default_dtype
from specjax.models.transformer import Transformer
from specjax.models.weights import fill
from specjax.utils.files import read_json

# By the names that `load_drafter` accepts. If two match, the first is taken.
LAYOUTS = heads.LAYOUTS | blocks.LAYOUTS | features.LAYOUTS
_AGAIN = "download it again"
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_OLD = "logit_head."  # before the names of heads in early files of SpecForge


def load_drafter(path: str | os.PathLike[str], target: Transformer,
                 target_params: Any = None, *, dtype: Any = None,
                 layout: str | None = None) -> tuple[Heads, Any]:
  """Loads a published drafter of a target: what it drafts for itself with.

  Medusa, Hydra, EAGLE-1 and 3, modules for multi-token prediction, DFlash and
  DSpark, in the layouts of `LAYOUTS`. What it reads of the target is in our
  numbers, see `TransformerConfig.features`.

  Args:
    path: a directory with config.json and safetensors, or a name on the
      Hugging Face hub. For modules in the target's own files, the target's.
    target: the model that it drafts for.
    target_params: its parameters. With them, an embedding in the file that is
      a copy of the target's is not kept, and one that must be a copy and is
      none is refused.
    dtype: of the parameters; None is `default_dtype()`.
    layout: one of `LAYOUTS`; None: what the files say. EAGLE-3 files of other
      tools may look like SpecForge's and number the target's layers otherwise;
      then set `taps` of the heads by `dataclasses.replace`.

  Returns:
    `(heads, params)`, as `methods.load_heads` does.

  Raises:
    ValueError: there is no such drafter, a file of it is missing or damaged,
      it says something that is not understood, or it was made for another
      target.
  """
  if not isinstance(target, Transformer):
    raise ValueError(f"the target is a {type(target).__name__}; give a "
                     "models.Transformer, such as the model of what "
                     "load_pretrained returns")
  directory = model_files.find(os.fspath(path))
  if not directory.is_dir():
    raise ValueError(f"{directory} is a file; give the directory of a drafter")
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
  drafter = record.read(found)
  return drafter, fill(
      shapes(drafter, target), record.names, found.tensors,
      float_dtype(dtype or default_dtype()), source=found.source,
      kind=f"the layout {layout!r}", config=drafter,
      sizes=record.sizes(drafter, target), used=found.used)


def shapes(drafter: Heads, target: Transformer) -> Any:
  """Returns the tree of shapes of a drafter's parameters."""
  size = target.vocab_size, target.config.width
  read = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in (
      ("embedding", size), ("head", size[::-1]))}
  return jax.eval_shape(drafter.init, jax.random.key(0), read)


def drafter_layout(path: str | os.PathLike[str]) -> str | None:
  """Which of `LAYOUTS` a directory has; None: there is no drafter in it."""
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


def _open(directory) -> Mapping[str, StoredTensor]:
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


def _pickled(path):
  named = {pathlib.Path(layout.file).stem for layout in LAYOUTS.values()}
  new = path.stem if path.stem in named else pathlib.Path(WEIGHTS).stem
  new = path.with_name(f"{new}.safetensors")
  return (f"{path} is a pickle, which can run code when it is read; write it "
          "as safetensors where torch is installed: safetensors.torch."
          f"save_file({{k: x.clone() for k, x in torch.load({str(path)!r}, "
          f"weights_only=True).items()}}, {str(new)!r})")


def _recognised(directory, config, tensors) -> str:
  for name, layout in LAYOUTS.items():
    if layout.known_by(config, tensors):
      return name
  raise ValueError(
      f"{directory} holds no drafter that specjax knows: neither its "
      "configuration nor the names of its tensors are those of "
      f"{', '.join(LAYOUTS)}")


def _own(layout, tensors, target):
  """Returns the drafter's tensors, by their names without those of a target."""
  layers = target.config.layers
  # Numbers of layers that the target does not have.
  within = layout.within.replace(
      "{modules}", rf"(?!({'|'.join(map(str, range(layers)))})\.)\d+")
  return {name.removeprefix(layout.prefix).removeprefix(_OLD): tensors[name]
          for name in tensors if name.startswith(layout.prefix)
          and re.match(within, name) and not _COMPUTED.search(name)}
