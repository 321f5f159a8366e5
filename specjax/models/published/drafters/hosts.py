"""Targets whose own files hold their drafter, as some are published."""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np

from specjax.files import read_json
from specjax.files import write_json
from specjax.models.published import readers
from specjax.models.safetensors_files import StoredTensor
from specjax.models.safetensors_files import write_safetensors

_AGAIN = "write the target again, with export_pretrained"
_SHARD = "model-drafter.safetensors"  # beside those of a target in shards
# Where the architectures that drafters are made of have them; a model whose
# head is its embedding has no other.
_MATRICES = {
    "embedding": ("model.embed_tokens.weight",),
    "head": ("lm_head.weight", "model.embed_tokens.weight"),
}


@dataclasses.dataclass(frozen=True)
class Host:
  """The directory of a published target, which takes a drafter in.

  Attributes:
    directory: of the target.
    config: its configuration.
    tensors: by name, those of a drafter that it has already among them.
  """

  directory: pathlib.Path
  config: Mapping[str, Any]
  tensors: Mapping[str, StoredTensor]

  @classmethod
  def of(cls, directory: pathlib.Path) -> "Host":
    """Opens a directory.

    Raises:
      ValueError: it holds no model.
    """
    if not (directory / "config.json").is_file():
      raise ValueError(f"drafters of this layout lie in the files of their "
                       f"target, and {directory} holds none: write the target "
                       "there first, with export_pretrained")
    return cls(directory, read_json(directory / "config.json", _AGAIN),
               readers.open_directory(directory))

  def matrix(self, part: str) -> StoredTensor:
    """The "embedding", or the "head", of the target.

    Raises:
      ValueError: it has none by a name that is known.
    """
    for name in _MATRICES[part]:
      if name in self.tensors:
        return self.tensors[name]
    raise ValueError(f"{self.directory} has no tensor {_MATRICES[part][-1]}, "
                     "of which drafters of this layout have a copy")

  def write(self, config: Mapping[str, Any],
            own: Mapping[str, StoredTensor], arrays: Iterable[np.ndarray]
            ) -> None:
    """Writes a drafter beside the target, each file whole or not at all.

    Until the configuration, which is last, says that there is a drafter, the
    directory is that of the target alone for whoever asks it.

    Args:
      config: the target's, with what is said of the drafter.
      own: the drafter's tensors by name; of a drafter in its place, these are
        replaced.
      arrays: what is in them, in this order.
    """
    kinds = lambda tensors: {
        name: (x.shape, x.dtype) for name, x in tensors.items()}
    index = self.directory / readers.INDEX
    if (self.directory / readers.WEIGHTS).is_file():
      kept = {k: x for k, x in self.tensors.items() if k not in own}
      write_safetensors(
          self.directory / readers.WEIGHTS, {**kinds(kept), **kinds(own)},
          itertools.chain((x.read() for x in kept.values()), arrays))
    else:
      content = read_json(index, _AGAIN)
      places = content["weight_map"]
      elsewhere = [k for k in own if places.get(k, _SHARD) != _SHARD]
      if elsewhere:
        raise ValueError(f"{self.directory} has the tensor {elsewhere[0]} in "
                         f"{places[elsewhere[0]]}, of a drafter that it came "
                         "with; write the target without it first")
      write_safetensors(self.directory / _SHARD, kinds(own), arrays)
      write_json(index, {**content, "weight_map": {
          **places, **dict.fromkeys(own, _SHARD)}}, indent=2)
    write_json(self.directory / "config.json", config, indent=2)
