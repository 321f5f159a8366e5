"""Helpers for the export of trained heads to inference servers."""

import pathlib

from lib import models
from specjax.methods import Heads
from specjax.methods.published import layouts_for
from specjax.models import Transformer
from specjax.utils.files import read_json
from specjax.utils.files import write_json

_ON_THE_HUB = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_TRAINING = "training.json"


def advice(directory: pathlib.Path, heads: Heads, model: Transformer,
           target: str) -> str:
  """Returns a message for the user with the command that exports heads.

  Args:
    directory: directory of the heads.
    heads: trained heads.
    model: target model of the heads.
    target: value of --target.
  """
  layouts = layouts_for(heads, model)
  if not layouts:
    return (f"No layout of a server supports these {type(heads).__name__}; "
            "generate.py and load_heads read them without an export")
  flag = "" if target == "bundled" else f" --target={target}"
  return (f"To export them for servers: python experiments/export.py "
          f"--model={directory}{flag} --layout='{layouts[0]}' "
          f"--output_dir={directory}-exported")


def hub_name(target: str) -> str | None:
  """Returns a target's name or path for servers, or None if unpublished.

  Args:
    target: value of --target.
  """
  path = pathlib.Path(target)
  if path.exists():
    config = path / "config.json"
    published = config.is_file() and "model_type" in read_json(
        config, "download it again")
    return str(path.resolve()) if published else None
  return target if "/" in target else _ON_THE_HUB.get(target)


def copy_training(name: str, directory: pathlib.Path) -> None:
  """Copies the file with the heads' accuracies, if it exists.

  generate.py builds trees from these accuracies.

  Args:
    name: name of the heads (see `drafters.load`).
    directory: directory of the exported heads.
  """
  path = models.heads_directory(name) / _TRAINING
  if path.exists():
    write_json(directory / _TRAINING, read_json(path, "train the heads again"))
