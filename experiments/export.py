"""Exports a language model or trained heads for use in other libraries.

A language model is written as a Hugging Face directory:

  python experiments/export.py --model=bundled --output_dir=exported/target
  python experiments/export.py --model=smollm2 --output_dir=exported/smollm2

A model can be exported if its architecture exists in transformers. To load it,
call `from_pretrained(output_dir)` of `transformers.AutoModelForCausalLM` and
`transformers.AutoTokenizer`.

Heads are written as a drafter for inference servers. --target is the model for
which the heads were trained:

  python experiments/export.py --model=/tmp/eagle --target=smollm2 \\
    --layout=speculators --output_dir=exported/eagle
  python experiments/generate.py --target=smollm2 --drafter=exported/eagle

Each training method (--method of train_drafter.py) has its own values of
--layout:

  medusa, medusa2   medusa (format of Medusa's authors and of Text Generation
                    Inference) or vllm. Both formats store one output matrix
                    per head, so the files are larger than those of low-rank
                    heads
  eagle1            eagle1 (vLLM)
  eagle3            speculators (vLLM) or specforge (SGLang)
  peagle            speculators (vLLM)
  parallel          speculators (vLLM)
  mtp               speculators; only if one module is applied repeatedly
                    (--reuse of train_drafter.py)

Heads of blockwise, hydra, kangaroo, parallel_layers and pass cannot be
exported, because no server supports them.

If a drafter has a reduced vocabulary (--draft_vocabulary of train_drafter.py),
the tensors d2t and t2d map its token ids to the target's and back. Files in the
speculators layout name the target, so `vllm serve exported/eagle` loads both
models.
"""

import json
import os
import pathlib
import sys

from absl import flags
from lib import common
from lib import drafters as drafters_lib
from lib import flags as shared
from lib import models
from lib import progress
from lib.training import exports

import specjax as sj
from specjax.methods import published
from specjax.training import runs

_MODEL = flags.DEFINE_string(
    "model", "bundled", "Model or heads to export. Models: bundled, small, "
    "tiny, smol, smollm2, a directory of train_lm.py or of a published model, "
    "a .gguf file, or a name on the Hugging Face hub. Heads: "
    f"{', '.join(models.HEADS)}, a directory of train_drafter.py or of a "
    "published drafter")
_LAYOUT = flags.DEFINE_string(
    "layout", None, "File layout of exported heads: one of "
    f"{', '.join(published.WRITTEN)}, or the name after 'of', such as "
    "speculators. Required if the directory of the heads also contains a "
    "target. Default: the first layout that can store the heads")
_TARGET = shared.target()
_OUTPUT_DIR = shared.output_dir(
    None, "Directory for the exported model or heads; it is created if needed")
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"],
    "Precision of the exported weights. float32 stores all weights without "
    "rounding")


def _check_output() -> None:
  """Raises `ValueError` if weights in --output_dir would be overwritten."""
  if pathlib.Path(_OUTPUT_DIR.value, runs.MANIFEST).exists():
    raise ValueError(f"--output_dir={_OUTPUT_DIR.value} contains a training "
                     "run, and its weights would be overwritten; choose "
                     "another directory")
  if os.path.isdir(_MODEL.value) and os.path.isdir(_OUTPUT_DIR.value) and (
      os.path.samefile(_MODEL.value, _OUTPUT_DIR.value)):
    raise ValueError(f"--output_dir={_OUTPUT_DIR.value} is the directory of "
                     "--model, and its files would be overwritten; choose "
                     "another directory")


def _model() -> dict[str, str | int]:
  """Exports a language model and returns its architecture and size."""
  found = models.load_model(_MODEL.value, _DTYPE.value)
  directory = common.output_directory(_OUTPUT_DIR.value, "export")
  progress.say(f"writing {directory}")
  architecture = sj.models.export_pretrained(
      directory, found.model, found.params, tokenizer=found.tokenizer,
      generation=found.generation, dtype=_DTYPE.value)
  size = common.num_parameters(found.params)
  print(f"{size:,} parameters as {architecture}, {_DTYPE.value}, in "
        f"{directory}")
  return {"architecture": architecture, "parameters": size}


def _heads() -> dict[str, str | int]:
  """Exports heads and returns their layout and sizes."""
  target, loaded, _ = drafters_lib.load(
      _TARGET.value, [_MODEL.value], dtype="float32", own_target=True)
  [own] = loaded.values()
  directory = pathlib.Path(_OUTPUT_DIR.value)
  progress.say(f"writing {directory}")
  verifier = (exports.hub_name(_TARGET.value) if own.target is target
              else None)  # the target is in the directory of the heads
  layout = sj.methods.export_drafter(
      directory, own.heads.heads, own.heads.params, own.target.model,
      own.target.params,
      dtype=_DTYPE.value, layout=_LAYOUT.value, verifier=verifier)
  exports.copy_training(_MODEL.value, directory)
  size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
  before = common.num_parameters(own.heads.params)
  print(f"{before:,} parameters in the layout '{layout}', {_DTYPE.value}, "
        f"{size:,} bytes in {directory}")
  bits = {"float32": 4}.get(_DTYPE.value, 2)
  if size > 1.05 * bits * before:
    print(f"The files have {size / (bits * before):.1f} times the size of the "
          "heads, because the layout also stores matrices that these heads "
          "share with their target")
  if verifier is None and layout.endswith("speculators"):
    print("config.json names no target: for vLLM, add its name or directory as "
          "speculators_config.verifier.name_or_path", file=sys.stderr)
  return {"layout": layout, "parameters": before, "bytes": size}


def main() -> None:
  """Exports the model or the heads that --model names."""
  _check_output()
  heads = models.drafts_for_itself(_MODEL.value, _TARGET.value)
  if heads and _LAYOUT.value is None and os.path.isdir(_MODEL.value):
    heads = not pathlib.Path(_MODEL.value, "heads.json").exists() or (
        not pathlib.Path(_MODEL.value, "model.safetensors").exists())
  if not heads and _LAYOUT.value is not None:
    raise ValueError(f"--layout={_LAYOUT.value} requires heads, and --model="
                     f"{_MODEL.value} is a language model; leave --layout out, "
                     "or set --model to a directory of train_drafter.py")
  summary = _heads() if heads else _model()
  print(json.dumps({**summary, "output_dir": str(_OUTPUT_DIR.value)}))


if __name__ == "__main__":
  common.run(main)
