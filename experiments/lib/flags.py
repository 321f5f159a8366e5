"""Flags of several scripts, each with one name and one help text.

A script calls one function per flag, with its own default:

  _TARGET = shared.target()
  _NUM_PROMPTS = shared.num_prompts(12)

A flag of a single script is defined in that script. A flag has the same name
where a script takes one value and where it takes a comma-separated list:
--drafter, --gamma, --nodes, --temperature and --verifier.
"""

import importlib.util
from typing import NamedTuple

from absl import flags

from specjax.data import prompt_sets

# One pass verifies all N nodes of a draft, root included. It needs N x N
# ancestor masks and N x V probabilities, so N is bounded.
MOST_NODES = 512
TOO_LONG = (f"at most {MOST_NODES - 1}, because one pass verifies all tokens "
            "of a draft and computes a mask over all pairs of them")

PUBLISHED = ("a model directory (Hugging Face or specjax format), a .gguf "
             "file, smollm2, or OWNER/NAME on the Hugging Face hub")
_EXAMPLES = {"output_dir": "results/mine", "output": "results/mine.store"}
_DATA = ("stdlib, stdlib-no-tests, a text file, a .jsonl file, a directory of "
         "text files, or hf:NAME[:SPLIT] for a Hugging Face dataset")
_SHIPPED = [s.name for s in prompt_sets.PROMPT_SETS.values() if s.shipped]
_HOSTED = [s.name for s in prompt_sets.PROMPT_SETS.values() if s.hf_id]
_LOCAL = [name for name in prompt_sets.PROMPT_SETS
          if name not in (*_SHIPPED, *_HOSTED)]

# `--help` lists a flag under the script that defines it, not under this file.
flags.disclaim_key_flags()


def target():
  """The target model."""
  return flags.DEFINE_string(
      "target", "bundled", "Target model, whose output the drafts speed up: "
      f"bundled (4.2M parameters, Python code), {PUBLISHED}")


def drafter(
    help_: str = "Draft model: small or tiny (bundled, for the bundled "
    f"target), smol (bundled, for smollm2), {PUBLISHED}",
    default: str | None = "small"):
  """Exactly one draft model."""
  return flags.DEFINE_string("drafter", default, help_)


def drafters(default: str = "small",
             help_: str = "Draft models to compare, comma-separated: "):
  """Draft models to compare."""
  return flags.DEFINE_list(
      "drafter", default, f"{help_}small, tiny, smol, or any value of --target "
      "except bundled")


def draft_vocabulary():
  """Size of the reduced draft vocabulary (FR-Spec, `models.narrowed`)."""
  return flags.DEFINE_integer(
      "draft_vocabulary", None, "Number of different tokens that a draft model "
      "can propose (FR-Spec), such as 1024: the most frequent tokens of the "
      "text in --vocabulary_data. Default: the full vocabulary", 1)


def vocabulary_data():
  """Text in which token frequencies are counted."""
  return flags.DEFINE_string(
      "vocabulary_data", "stdlib-no-tests", "Text that determines the most "
      "frequent tokens; requires --draft_vocabulary. At most 2 million "
      "characters of randomly sampled documents are read. Values: "
      f"{_DATA}")


def check_vocabulary_data(draft_vocabulary: flags.FlagHolder,
                          vocabulary_data: flags.FlagHolder):
  """Rejects --vocabulary_data without --draft_vocabulary."""
  if vocabulary_data.present and draft_vocabulary.value is None:
    raise ValueError(f"--vocabulary_data={vocabulary_data.value} requires "
                     "--draft_vocabulary; add it, such as "
                     "--draft_vocabulary=1024, or leave --vocabulary_data out")


def dtype(help_: str = "Precision of weights and computation. Default: float32 "
          "on CPU, bfloat16 on GPU and TPU"):
  """Precision in which models are loaded."""
  return flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], help_)


def training_dtype(what: str = "target and heads"):
  """Precision of training; read it with `common.dtype_of`."""
  return dtype(
      f"Precision in which {what} are computed: in training, evaluation and "
      "sampling. Trained parameters and the optimiser's moments are always "
      "float32. Default: float32 on CPU, bfloat16 on GPU and TPU")


def prompts(default: str | None = "code"):
  """Prompt sets, see `prompts.read`; required if `default` is None."""
  return flags.DEFINE_list(
      "prompts", default, "Prompt sets, comma-separated. From the standard "
      f"library of the running Python: {', '.join(prompt_sets.EMBEDDED)}. "
      f"Shipped with specjax: {', '.join(_SHIPPED)}. Published sets, as NAME "
      "(downloaded from Hugging Face) or NAME=FILE (a local copy): "
      f"{', '.join(_HOSTED)}. As NAME=FILE only: {', '.join(_LOCAL)}. Your own "
      "files: .txt or .md (prompts separated by blank lines) or .jsonl (see "
      "--field). Example: code,gsm8k=test.jsonl,mine.txt")


def prompt_field():
  """Name of the prompt field in a JSONL file."""
  return field("prompt", "Field that contains the prompt in your own .jsonl "
               "files")


def chat(help_: str = "Format each prompt as a user message in the target's "
         "chat template, and stop at the model's end-of-text tokens"):
  """Chat format of prompts."""
  return flags.DEFINE_bool("chat", False, help_)


def datastore():
  """Text index for retrieval drafters."""
  return flags.DEFINE_string(
      "datastore", None, "Text index for retrieval drafters, a file of "
      "build_datastore.py. The drafter rest requires it. The drafters suffix, "
      "sampled_suffix and suffix_tree can use it. Default: none")


def gamma(default: int, help_: str = "Draft length gamma: number of tokens "
          "drafted before each pass of the target"):
  """One draft length."""
  flag = flags.DEFINE_integer("gamma", default, help_, 1)
  flags.register_validator(
      flag, lambda gamma: gamma < MOST_NODES, f"give {TOO_LONG}")
  return flag


def nodes(default: int,
          help_: str = "Size of a draft tree in nodes, including the root "
          "(the last generated token)"):
  """One size of a draft tree."""
  flag = flags.DEFINE_integer("nodes", default, help_, 2)
  flags.register_validator(
      flag, lambda nodes: nodes < MOST_NODES, f"give {TOO_LONG}")
  return flag


def gammas(default: str,
           help_: str = "Draft lengths in tokens, comma-separated"):
  """Several draft lengths; read them with `common.draft_lengths`."""
  return flags.DEFINE_list("gamma", default, help_)


def verifiers(default: str | list[str], help_: str):
  """Several verifiers; read them with `common.verifier_names`."""
  return flags.DEFINE_list("verifier", default, help_)


def temperature(default: float = 1.0,
                help_: str = "Sampling temperature of target and drafter"):
  """One temperature."""
  return flags.DEFINE_float(
      "temperature", default, f"{help_}; 0 is greedy decoding", 0)


def temperatures(default: str,
                 help_: str = "Sampling temperatures of target and drafter, "
                 "comma-separated"):
  """Several temperatures; read them with `common.numbers`."""
  return flags.DEFINE_list(
      "temperature", default, f"{help_}; 0 is greedy decoding")


def top_p():
  """Nucleus sampling of target and drafter."""
  return flags.DEFINE_float(
      "top_p", 1.0, "Nucleus sampling: keep the most likely tokens until their "
      "total probability reaches top_p, in (0, 1]. 1 keeps all tokens")


def num_prompts(default: int, help_: str = "Maximum number of prompts per set"):
  """Number of prompts, at least 2. A confidence interval needs 5."""
  return flags.DEFINE_integer("num_prompts", default, help_, 2)


def prompt_tokens(default: int = 96,
                  help_: str = "Maximum prompt length in tokens; longer "
                  "prompts keep their last tokens. A chat template is not "
                  "counted"):
  """Length of a prompt."""
  return flags.DEFINE_integer("prompt_tokens", default, help_, 1)


def new_tokens(default: int):
  """Length of a continuation."""
  return flags.DEFINE_integer(
      "max_new_tokens", default, "Number of tokens generated per prompt. With "
      "--chat, an answer may end earlier", 1)


def seed(help_: str = "Random seed for choosing prompts and for sampling"):
  """Seed of every random choice of a script, within the range of PRNG keys."""
  return flags.DEFINE_integer("seed", 0, help_, 0, 2**32 - 1)


def output_dir(default: str | None,
               help_: str = "Directory for results, tables and figures; it "
               "is created if needed"):
  """Output directory; the flag is required if `default` is None."""
  return directory("output_dir", default, help_)


def directory(name: str, default: str | None, help_: str,
              required: bool = True):
  """A directory to write to. An empty value is rejected, "." is allowed."""
  flag = flags.DEFINE_string(
      name, default, help_, required=required and default is None)
  flags.register_validator(flag, lambda path: path != "",
                           "give a directory, such as results/mine")
  return flag


def missing(name: str):
  """Returns the error message of a missing required flag."""
  flag = flags.FLAGS[name]
  example = _EXAMPLES.get(name) or flag.parser.enum_values[0]
  return (f"--{name} is required ({flag.help}); set it, such as "
          f"--{name}={example}")


def data(help_: str = "Training text"):
  """Training text, see `corpora.read_documents`."""
  return flags.DEFINE_string("data", "stdlib", f"{help_}: {_DATA}")


def field(default: str = "text",
          help_: str = "Field that contains the text in .jsonl files and "
          "Hugging Face datasets"):
  """Name of the text field in a record."""
  return flags.DEFINE_string("field", default, help_)


def steps(default: int = 1000, help_: str = "Number of training steps"):
  """Length of a training run."""
  return flags.DEFINE_integer("steps", default, help_, 1)


def batch_size(help_: str = "Rows per training step"):
  """Batch size of training."""
  return flags.DEFINE_integer("batch_size", 8, help_, 1)


def learning_rate(default: float, help_: str):
  """Peak learning rate of the schedule."""
  return flags.DEFINE_float("learning_rate", default, help_, 0.0)


def warmup_fraction(default: float = 0.04):
  """Length of the learning rate's warm-up."""
  return flags.DEFINE_float(
      "warmup_fraction", default, "Fraction of the steps, at the start of the "
      "run, in which the learning rate rises linearly to its peak", 0.0, 1.0)


def decay_fraction():
  """Length of the learning rate's decay."""
  return flags.DEFINE_float(
      "decay_fraction", 0.5, "Fraction of the steps, at the end of the run, in "
      "which the learning rate falls linearly to 0", 0.0, 1.0)


def held_out_rows(default: int = 32,
                  help_: str = "Rows of held-out text for evaluation"):
  """Size of the evaluation set."""
  return flags.DEFINE_integer("held_out_rows", default, help_, 1)


def evaluate_every(default: int = 250):
  """Interval between evaluations of a training run."""
  return flags.DEFINE_integer(
      "evaluate_every", default, "Steps between evaluations on held-out text; "
      "0 evaluates only at the end", 0)


def checkpoint_every():
  """Interval between checkpoints; a killed run resumes from the last one."""
  return flags.DEFINE_integer(
      "checkpoint_every", 200, "Steps between checkpoints; a killed run "
      "resumes from the last one. SIGTERM and Ctrl-C also save one", 1)


def wandb():
  """Project of Weights & Biases."""
  flag = flags.DEFINE_string(
      "wandb", None, "Weights & Biases project to which metrics are also "
      "logged. metrics.csv and TensorBoard files are always written. Default: "
      "no project")
  flags.register_validator(
      flag, lambda project: project is None or (
          project != "" and importlib.util.find_spec("wandb") is not None),
      "give the name of a project, and install the package wandb: pip install "
      "'specjax[wandb]'")
  return flag


def save_dtype():
  """Precision of the saved weights."""
  return flags.DEFINE_enum(
      "save_dtype", "bfloat16", ["bfloat16", "float32"],
      "Precision of the final weights on disk")


def compilation_cache():
  """Persistent cache of compiled code; `common.run` defines the flag."""
  return flags.DEFINE_bool(
      "compilation_cache", True, "Store compiled code for later runs. The "
      "directory is JAX_COMPILATION_CACHE_DIR (environment variable) or "
      "~/.cache/specjax")


def batch(default: int = 1):
  """Number of prompts decoded together (batch size)."""
  return flags.DEFINE_integer(
      "batch", default, "Number of prompts decoded together. Larger batches "
      "finish sooner. In float32 the batch size does not change the tokens or "
      "the acceptance", 1)


def timing(*others: str):
  """Measurement of speed; the default depends on --batch."""
  return flags.DEFINE_enum(
      "timing", None, ["none", "latency", *others],
      "Speed measurement: latency (each configuration decodes a prompt alone, "
      "then the next configuration decodes it), "
      + "throughput (tokens per second of --batch rows) " * bool(others)
      + "or none. Default: latency if --batch is 1, otherwise none")


class MeshFlags(NamedTuple):
  """Flags for several devices and processes; see `meshes.join`."""

  mesh: flags.FlagHolder
  coordinator: flags.FlagHolder
  process_id: flags.FlagHolder
  num_processes: flags.FlagHolder


def mesh():
  """Defines the flags of a device mesh and of the processes that share it."""
  return MeshFlags(
      mesh=flags.DEFINE_string(
          "mesh", None, "Number of devices per mesh axis, such as "
          "data:2,model:4. The data axis splits the batch, the model axis "
          "splits the weights. Default: one device"),
      coordinator=flags.DEFINE_string(
          "coordinator", None, "Address of process 0 as HOST:PORT, if "
          "several processes run the same command. Also set --mesh, "
          "--process_id and --num_processes. With the value auto, JAX reads "
          "everything except --mesh from the cluster. Default: one process"),
      process_id=flags.DEFINE_integer(
          "process_id", None, "Index of this process, starting at 0; requires "
          "--coordinator", 0),
      num_processes=flags.DEFINE_integer(
          "num_processes", None, "Total number of processes; requires "
          "--coordinator", 1))
