"""Writes a model as a Hugging Face directory, for transformers and others.

  python experiments/export.py --model=bundled --output_dir=exported/target
  python experiments/export.py --model=tiny --output_dir=exported/tiny
  python experiments/export.py --model=smollm2 --output_dir=exported/smollm2

Any model that specjax loads can be written, if a published architecture
computes what it does. Then `transformers.AutoModelForCausalLM` and
`AutoTokenizer` read it with `from_pretrained(output_dir)`.
"""

import json
import os
import pathlib

from absl import flags
from lib import common
from lib import flags as shared
from lib import models
from lib import progress

import specjax as sj
from specjax.training import runs

_MODEL = flags.DEFINE_string(
    "model", "bundled", "bundled, small, tiny, smol, smollm2, a directory of "
    "train_lm.py or of a published model, a .gguf file, or a name on the "
    "Hugging Face hub")
_OUTPUT_DIR = shared.output_dir(None, "Directory for the exported model")
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"],
    "of the weights; float32 holds all others exactly")


def main() -> None:
  """Loads, and writes."""
  if pathlib.Path(_OUTPUT_DIR.value, runs.MANIFEST).exists():
    raise ValueError(f"--output_dir is {_OUTPUT_DIR.value}, which holds a "
                     "training run, whose weights would be replaced; choose "
                     "another directory")
  if os.path.isdir(_MODEL.value) and os.path.isdir(_OUTPUT_DIR.value) and (
      os.path.samefile(_MODEL.value, _OUTPUT_DIR.value)):
    raise ValueError(f"--output_dir is {_OUTPUT_DIR.value}, which holds the "
                     "model itself, whose files would be replaced; choose "
                     "another directory")
  found = models.load_model(_MODEL.value, _DTYPE.value)
  directory = common.output_directory(_OUTPUT_DIR.value, "export")
  progress.say(f"writing {directory}")
  architecture = sj.models.export_pretrained(
      directory, found.model, found.params, tokenizer=found.tokenizer,
      generation=found.generation, dtype=_DTYPE.value)
  size = common.num_parameters(found.params)
  print(f"{size:,} parameters as {architecture}, {_DTYPE.value}, in "
        f"{directory}")
  print(json.dumps({"architecture": architecture, "parameters": size,
                    "output_dir": str(directory)}))


if __name__ == "__main__":
  common.run(main)
