"""Targets whose own files hold their drafter, as some are published."""

from collections.abc import Collection
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
_SHARD = "model-drafter-{}.safetensors"  # beside those of a target in shards
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
            own: Mapping[str, StoredTensor], arrays: Iterable[np.ndarray],
            replaces: Collection[str]) -> None:
    """Writes a drafter beside the target, each file whole or not at all.

    Whenever it is interrupted, the directory holds the target, and with it the
    drafter that was there or the new one. The configuration is first: of a
    drafter that is not there it says nothing that changes the target.

    Args:
      config: the target's, with what is said of the drafter.
      own: the drafter's tensors by name.
      arrays: what is in them, in this order.
      replaces: tensors of an earlier drafter in its place.

    Raises:
      ValueError: the earlier drafter lies in a shard with other tensors.
    """
    kept = {k: x for k, x in self.tensors.items() if k not in replaces}
    if (self.directory / readers.WEIGHTS).is_file():
      write_json(self.directory / "config.json", config, indent=2)
      write_safetensors(
          self.directory / readers.WEIGHTS, {**_kinds(kept), **_kinds(own)},
          itertools.chain((x.read() for x in kept.values()), arrays))
      return
    index = self.directory / readers.INDEX
    content = read_json(index, _AGAIN)
    places = content["weight_map"]
    rest = {k: places[k] for k in kept}
    for name in replaces:
      if places[name] in rest.values():
        raise ValueError(f"{self.directory} has the tensor {name} in "
                         f"{places[name]}, of a drafter that it came with; "
                         "write the target without it first")
    # A file of its own, so that the index holds until it names the new one.
    new = next(name for name in (_SHARD.format(i) for i in itertools.count(1))
               if name not in places.values())
    write_json(self.directory / "config.json", config, indent=2)
    write_safetensors(self.directory / new, _kinds(own), arrays)
    write_json(index, {**content, "weight_map": rest | dict.fromkeys(own, new)},
               indent=2)
    for old in {places[name] for name in replaces}:
      (self.directory / old).unlink()


def _kinds(tensors):
  return {name: (x.shape, x.dtype) for name, x in tensors.items()}
