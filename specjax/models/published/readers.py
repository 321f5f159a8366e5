"""The tensors of a directory by name, none of which is read yet."""

from collections.abc import Mapping
import pathlib

from specjax.models.safetensors_files import open_safetensors
from specjax.models.safetensors_files import StoredTensor
from specjax.utils.files import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")


def open_directory(directory: pathlib.Path) -> Mapping[str, StoredTensor]:
  """The tensors of a directory: of one safetensors file, or of its shards.

  Raises:
    ValueError: there are none, a shard is missing, or a file is truncated.
  """
  if (directory / WEIGHTS).is_file():
    return open_safetensors(directory / WEIGHTS)
  if not (directory / INDEX).is_file():
    raise ValueError(_no_weights(directory))
  index = directory / INDEX
  places = read_json(index, "download it again").get("weight_map")
  if not isinstance(places, dict) or not all(
      isinstance(file, str) for file in places.values()):
    raise ValueError(f"{index} has no weight_map; download it again")
  shards = {}
  for file in sorted(set(places.values())):
    if not (directory / file).is_file():
      raise ValueError(f"{directory / file} is missing, a shard that {INDEX} "
                       "names; download it")
    shards[file] = open_safetensors(directory / file)
  for file, tensors in shards.items():
    for name in tensors:
      if places.get(name) != file:
        raise ValueError(f"{directory / file} has a tensor {name}, of which "
                         f"{INDEX} says nothing or that it lies elsewhere; "
                         "download both again")
  for name, file in places.items():
    if name not in shards[file]:
      raise ValueError(f"{directory / file} has no tensor {name}, which "
                       f"{INDEX} says it has; download both again")
  return {name: shards[file][name] for name, file in places.items()}


def weights_file(directory: pathlib.Path) -> str:
  """Returns the file that `open_directory` reads, in words for errors."""
  if not (directory / WEIGHTS).is_file():
    return str(directory / INDEX)
  if not (directory / INDEX).is_file():
    return str(directory / WEIGHTS)
  return (f"{directory / WEIGHTS} (which was read, and not the shards of "
          f"{INDEX} beside it; one of the two is left over)")


def _no_weights(directory):
  for pattern in _PICKLES:
    for path in sorted(directory.glob(pattern)):
      return pickled(path)
  return (f"{directory} holds no {WEIGHTS} and no {INDEX}; give a directory of "
          "a published model, or a .gguf file")


def pickled(path: pathlib.Path) -> str:
  """The error for weights in a format that can run code when it is read."""
  return (f"{path} is a pickle, which can run code when it is read; write it "
          f"as safetensors: transformers.AutoModelForCausalLM.from_pretrained("
          f"{str(path.parent)!r}).save_pretrained(directory)")
