"""Writes a model as a Hugging Face directory, for transformers and others.

  python experiments/export.py --model=bundled --output_dir=exported/target
  python experiments/export.py --model=tiny --output_dir=exported/tiny
  python experiments/export.py --model=smollm2 --output_dir=exported/smollm2

Any model that specjax loads can be written, if a published architecture
computes what it does. Then `transformers.AutoModelForCausalLM` and
`AutoTokenizer` read it with `from_pretrained(output_dir)`.
"""

import json
import pathlib

from absl import flags
import jax.numpy as jnp
from lib import common
from lib import flags as shared

import specjax as sj
from specjax.models.published import export_pretrained

_MODEL = flags.DEFINE_string(
    "model", "bundled", "bundled, small, tiny, smollm2, a directory of "
    "train_lm.py or of a published model, a .gguf file, or a name on the "
    "Hugging Face hub")
_OUTPUT_DIR = shared.output_dir(None, "for the files")
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"],
    "of the weights; float32 holds all others exactly")


def main() -> None:
  """Loads, and writes."""
  bundled = pathlib.Path(sj.zoo.__file__).parent
  names = {"bundled": "target", **{name: name for name in sj.zoo.DRAFTERS}}
  name = _MODEL.value
  found = sj.models.load_pretrained(
      bundled / names[name] if name in names else name, dtype=jnp.float32)
  tokenizer = found.tokenizer
  if name in names:  # one file for all three
    tokenizer = sj.data.Tokenizer.load(bundled / "tokenizer.json")
  directory = common.output_directory(_OUTPUT_DIR.value, "export")
  architecture = export_pretrained(
      directory, found.model, found.params, tokenizer=tokenizer,
      generation=found.generation, dtype=_DTYPE.value)
  size = common.num_parameters(found.params)
  print(f"{size:,} parameters as {architecture}, {_DTYPE.value}, in "
        f"{directory}")
  print(json.dumps({"architecture": architecture, "parameters": size,
                    "output_dir": str(directory)}))


if __name__ == "__main__":
  common.run(main)
