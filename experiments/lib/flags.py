"""Definitions of flags that several scripts share.

A script calls one function per flag and may choose the default value:

  _TARGET = shared.target()
  _NUM_PROMPTS = shared.num_prompts(12)

A script defines the flags that no other script has. Some flags accept one value
in some scripts and a comma-separated list in others, under the same name:
--drafter, --gamma, --nodes, --temperature and --verifier.
"""

from collections.abc import Iterable
import importlib.util
from typing import Any
from typing import NamedTuple

from absl import flags

from specjax.data import prompt_sets

# One pass verifies all N nodes of a draft, including the root. It needs an
# N x N ancestor mask and N x V probabilities, so N is bounded.
MOST_NODES = 512
TOO_LONG = (f"at most {MOST_NODES - 1}, because one pass verifies all tokens "
            "of a draft and computes a mask over all pairs of them")

PUBLISHED = ("a model directory (Hugging Face or specjax format), a .gguf "
             "file, smollm2, or OWNER/NAME on the Hugging Face hub")
_EXAMPLES = {"output_dir": "results/mine", "output": "results/mine.store"}
_DATA = ("stdlib, stdlib-no-tests, a text file, a file of JSON or CSV records, "
         "a directory of such files, or hf:NAME[:SPLIT] for a Hugging Face "
         "dataset")
_SHIPPED = [s.name for s in prompt_sets.PROMPT_SETS.values() if s.shipped]
_HOSTED = [s.name for s in prompt_sets.PROMPT_SETS.values() if s.hf_id]
_LOCAL = [name for name in prompt_sets.PROMPT_SETS
          if name not in (*_SHIPPED, *_HOSTED)]

# `--help` lists a flag under the script that defines it, not under this file.
flags.disclaim_key_flags()


def requires(flag: flags.FlagHolder, *others: flags.FlagHolder
             ) -> flags.FlagHolder:
  """Declares that a flag has no effect unless one of `others` is set.

  `check_requirements` rejects the flag if it is given without them.
  """
  flags.FLAGS[flag.name].requires = [other.name for other in others]
  return flag


def check_requirements() -> None:
  """Raises `ValueError` for a given flag without a flag that it requires."""
  for name in flags.FLAGS:
    flag = flags.FLAGS[name]
    others = getattr(flag, "requires", ())
    if others and flag.present and flag.value is not False and not any(
        flags.FLAGS[other].value not in (None, False, "none")
        for other in others):
      raise ValueError(
          f"{shown(name)} requires --{' or --'.join(others)}; set "
          f"{'one of them' if others[1:] else 'it'}, or leave --{name} out")


def reject_unread(names: Iterable[str], cause: str) -> None:
  """Raises `ValueError` if a flag was given that the script does not read.

  Args:
    names: names of flags that have no effect. Names that are not flags of the
      script are ignored.
    cause: flag and value for which they have no effect, such as
      "--drafter=medusa".
  """
  for name in names:
    if name in flags.FLAGS and flags.FLAGS[name].present:
      raise ValueError(f"{shown(name)} has no effect with {cause}; leave "
                       f"--{name} out")


def naming(value: str) -> str:
  """Returns the flag with a value, such as "--target=a/b", or the value."""
  for name in flags.FLAGS:
    found = flags.FLAGS[name].value
    if found == value or isinstance(found, list) and value in found:
      return f"--{name}={value}"
  return value


def shown(name: str, *values: Any) -> str:
  """Returns a flag with its value, or another value, as on the command line."""
  [value] = values or (flags.FLAGS[name].value,)
  if isinstance(value, bool):
    return f"--{'' if value else 'no'}{name}"
  return f"--{name}={','.join(value) if isinstance(value, list) else value}"


def target():
  """Defines --target, the target model."""
  return flags.DEFINE_string(
      "target", "bundled", "Target model, whose output the drafts speed up: "
      f"bundled (4.2M parameters, Python code), {PUBLISHED}")


def drafter(
    help_: str = "Draft model: small or tiny (bundled, for the bundled "
    f"target), smol (bundled, for smollm2), {PUBLISHED}",
    default: str | None = "small"):
  """Defines --drafter for one draft model."""
  return flags.DEFINE_string("drafter", default, help_)


def drafters(default: str = "small",
             help_: str = "Draft models to compare, comma-separated: "):
  """Defines --drafter for several draft models."""
  return flags.DEFINE_list(
      "drafter", default, f"{help_}small, tiny, smol, or any value of --target "
      "except bundled")


def draft_vocabulary():
  """Defines --draft_vocabulary, the size of a reduced draft vocabulary.

  This is FR-Spec (see `models.narrowed`).
  """
  return flags.DEFINE_integer(
      "draft_vocabulary", None, "Number of different tokens that a draft model "
      "can propose (FR-Spec), such as 1024: the most frequent tokens of the "
      "text in --vocabulary_data. Default: the full vocabulary", 1)


def vocabulary_data(draft_vocabulary: flags.FlagHolder):
  """Defines --vocabulary_data, the text for counting token frequencies."""
  return requires(flags.DEFINE_string(
      "vocabulary_data", "stdlib-no-tests", "Text that determines the most "
      "frequent tokens; requires --draft_vocabulary. At most 2 million "
      "characters of randomly sampled documents are read. Values: "
      f"{_DATA}"), draft_vocabulary)


def dtype(help_: str = "Precision of weights and computation. Default: float32 "
          "on CPU, bfloat16 on GPU and TPU"):
  """Defines --dtype, the precision in which models are loaded."""
  return flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], help_)


def training_dtype(what: str = "target and heads"):
  """Defines --dtype for training; read it with `common.dtype_of`."""
  return dtype(
      f"Precision in which {what} are computed: in training, evaluation and "
      "sampling. Trained parameters and the optimiser's moments are always "
      "float32. Default: float32 on CPU, bfloat16 on GPU and TPU")


def prompts(default: str | None = "code"):
  """Defines --prompts, the prompt sets (see `prompts.read`).

  The flag is required if `default` is None.
  """
  return flags.DEFINE_list(
      "prompts", default, "Prompt sets, comma-separated. From the standard "
      f"library of the running Python: {', '.join(prompt_sets.EMBEDDED)}. "
      f"Shipped with specjax: {', '.join(_SHIPPED)}. Published sets, as NAME "
      "(downloaded from Hugging Face) or NAME=FILE (a local copy): "
      f"{', '.join(_HOSTED)}. As NAME=FILE only: {', '.join(_LOCAL)}. Your own "
      "files: .txt or .md (prompts separated by blank lines), .jsonl, .json or "
      ".csv (see --field). Example: code,gsm8k=test.jsonl,mine.txt")


def prompt_field():
  """Defines --field, the name of the prompt field in a JSON or CSV file."""
  return field("prompt", "Field that contains the prompt in your own .jsonl, "
               ".json and .csv files")


def chat(help_: str = "Format each prompt as a user message in the target's "
         "chat template, and stop at the model's end-of-text tokens"):
  """Defines --chat, the chat format of prompts, and --chat_template_kwargs."""
  template_variables()
  return flags.DEFINE_bool("chat", False, help_)


def template_variables():
  """Defines --chat_template_kwargs, read by `models.load_target`."""
  return flags.DEFINE_string(
      "chat_template_kwargs", None, "JSON object with variables of the "
      "target's chat template, such as '{\"enable_thinking\": false}'. "
      "Default: none")


def datastore():
  """Defines --datastore, the text index for retrieval drafters."""
  return flags.DEFINE_string(
      "datastore", None, "Text index for retrieval drafters, a file of "
      "build_datastore.py. The drafter rest requires it. The drafters suffix, "
      "sampled_suffix and suffix_tree can use it. Default: none")


def gamma(default: int, help_: str = "Draft length gamma: number of tokens "
          "drafted before each pass of the target"):
  """Defines --gamma for one draft length."""
  flag = flags.DEFINE_integer("gamma", default, help_, 1)
  flags.register_validator(
      flag, lambda gamma: gamma < MOST_NODES, f"give {TOO_LONG}")
  return flag


def nodes(default: int,
          help_: str = "Size of a draft tree in nodes, including the root "
          "(the last generated token)"):
  """Defines --nodes for one size of a draft tree."""
  flag = flags.DEFINE_integer("nodes", default, help_, 2)
  flags.register_validator(
      flag, lambda nodes: nodes < MOST_NODES, f"give {TOO_LONG}")
  return flag


def gammas(default: str,
           help_: str = "Draft lengths in tokens, comma-separated"):
  """Defines --gamma for several draft lengths.

  Read them with `common.draft_lengths`.
  """
  return flags.DEFINE_list("gamma", default, help_)


def verifiers(default: str | list[str], help_: str):
  """Defines --verifier for several verifiers.

  Read them with `common.verifier_names`.
  """
  return flags.DEFINE_list("verifier", default, help_)


def temperature(default: float = 1.0,
                help_: str = "Sampling temperature of target and drafter"):
  """Defines --temperature for one temperature."""
  return flags.DEFINE_float(
      "temperature", default, f"{help_}; 0 is greedy decoding", 0)


def temperatures(default: str,
                 help_: str = "Sampling temperatures of target and drafter, "
                 "comma-separated"):
  """Defines --temperature for several temperatures.

  Read them with `common.numbers`.
  """
  return flags.DEFINE_list(
      "temperature", default, f"{help_}; 0 is greedy decoding")


def top_p():
  """Defines --top_p, nucleus sampling of target and drafter."""
  return flags.DEFINE_float(
      "top_p", 1.0, "Nucleus sampling: keep the most likely tokens until their "
      "total probability reaches top_p, in (0, 1]. 1 keeps all tokens")


def num_prompts(default: int, help_: str = "Maximum number of prompts per set"):
  """Defines --num_prompts, at least 2. A confidence interval requires 5."""
  return flags.DEFINE_integer("num_prompts", default, help_, 2)


def prompt_tokens(default: int = 96,
                  help_: str = "Maximum prompt length in tokens; longer "
                  "prompts keep their last tokens. A chat template is not "
                  "counted"):
  """Defines --prompt_tokens, the maximum length of a prompt."""
  return flags.DEFINE_integer("prompt_tokens", default, help_, 1)


def new_tokens(default: int):
  """Defines --max_new_tokens, the length of a continuation."""
  return flags.DEFINE_integer(
      "max_new_tokens", default, "Number of tokens generated per prompt. With "
      "--chat, an answer may end earlier", 1)


def seed(help_: str = "Random seed for choosing prompts and for sampling"):
  """Defines --seed, the seed of all random choices of a script.

  Its range is that of seeds of PRNG keys.
  """
  return flags.DEFINE_integer("seed", 0, help_, 0, 2**32 - 1)


def output_dir(default: str | None,
               help_: str = "Directory for results, tables and figures; it "
               "is created if needed"):
  """Defines --output_dir. The flag is required if `default` is None."""
  return written(directory("output_dir", default, help_), "directory")


def output_file(name: str, help_: str, required: bool = False):
  """Defines a flag for an output file."""
  return written(
      flags.DEFINE_string(name, None, help_, required=required), "file")


def written(flag: flags.FlagHolder, kind: str) -> flags.FlagHolder:
  """Declares that the script writes to the path in a flag.

  `common.run` checks before any computation that the path can be written.

  Args:
    flag: flag with a path.
    kind: "directory" or "file".
  """
  flags.FLAGS[flag.name].written = kind
  return flag


def figure_style():
  """Defines --figure_style, which `figures.style` reads."""
  return flags.DEFINE_enum(
      "figure_style", "screen", ["screen", "paper"],
      "Layout of figures, which are written as PNG and PDF. paper: 3.3 inches "
      "wide (one column), panels below each other, a legend above each panel, "
      "no title, and 300 dpi")


def directory(name: str, default: str | None, help_: str,
              required: bool = True):
  """Defines a flag for a directory.

  The flag rejects an empty value. The value "." is allowed.
  """
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
  """Defines --data, the training text (see `corpora.read_documents`)."""
  return flags.DEFINE_string("data", "stdlib", f"{help_}: {_DATA}")


def field(default: str | None = "text",
          help_: str = "Field that contains the text in .jsonl files and "
          "Hugging Face datasets"):
  """Defines --field, the name of the text field in a record."""
  return flags.DEFINE_string("field", default, help_)


def steps(default: int = 1000, help_: str = "Number of training steps"):
  """Defines --steps, the length of a training run."""
  return flags.DEFINE_integer("steps", default, help_, 1)


def batch_size(help_: str = "Rows per training step"):
  """Defines --batch_size, the batch size of training."""
  return flags.DEFINE_integer("batch_size", 8, help_, 1)


def learning_rate(default: float, help_: str):
  """Defines --learning_rate, the peak of the schedule."""
  return flags.DEFINE_float("learning_rate", default, help_, 0.0)


def warmup_fraction(default: float = 0.04):
  """Defines --warmup_fraction, the length of the learning rate's warm-up."""
  return flags.DEFINE_float(
      "warmup_fraction", default, "Fraction of the steps, at the start of the "
      "run, in which the learning rate rises linearly to its peak", 0.0, 1.0)


def decay_fraction():
  """Defines --decay_fraction, the length of the learning rate's decay."""
  return flags.DEFINE_float(
      "decay_fraction", 0.5, "Fraction of the steps, at the end of the run, in "
      "which the learning rate falls linearly to 0", 0.0, 1.0)


def held_out_rows(default: int = 32,
                  help_: str = "Rows of held-out text for evaluation"):
  """Defines --held_out_rows, the size of the evaluation set."""
  return flags.DEFINE_integer("held_out_rows", default, help_, 1)


def evaluate_every(default: int = 250):
  """Defines --evaluate_every, the interval between evaluations."""
  return flags.DEFINE_integer(
      "evaluate_every", default, "Steps between evaluations on held-out text; "
      "0 evaluates only at the end", 0)


def checkpoint_every():
  """Defines --checkpoint_every, the interval between checkpoints."""
  return flags.DEFINE_integer(
      "checkpoint_every", 200, "Steps between checkpoints; a killed run "
      "resumes from the last one. SIGTERM and Ctrl-C also save one", 1)


def wandb():
  """Defines --wandb, the project of Weights & Biases."""
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
  """Defines --save_dtype, the precision of the saved weights."""
  return flags.DEFINE_enum(
      "save_dtype", "bfloat16", ["bfloat16", "float32"],
      "Precision of the final weights on disk")


def compilation_cache():
  """Defines --compilation_cache, used by `common.run` in every script."""
  return flags.DEFINE_bool(
      "compilation_cache", True, "Store compiled code for later runs. The "
      "directory is JAX_COMPILATION_CACHE_DIR (environment variable) or "
      "~/.cache/specjax")


def batch(default: int = 1):
  """Defines --batch, the number of prompts that are decoded together."""
  return flags.DEFINE_integer(
      "batch", default, "Number of prompts decoded together. Larger batches "
      "finish sooner. In float32 the batch size changes results only by "
      "rounding", 1)


def timing(*others: str):
  """Defines --timing. Its default depends on --batch.

  `others` are more choices.
  """
  return flags.DEFINE_enum(
      "timing", None, ["none", "latency", *others],
      "Speed measurement: latency (each configuration decodes a prompt alone, "
      "then the next configuration decodes it), "
      + "throughput (tokens per second of --batch rows) " * bool(others)
      + "or none. Default: latency if --batch is 1, otherwise none")


class MeshFlags(NamedTuple):
  """Flags for several devices and processes (see `meshes.join`)."""

  mesh: flags.FlagHolder
  coordinator: flags.FlagHolder
  process_id: flags.FlagHolder
  num_processes: flags.FlagHolder


def mesh():
  """Defines the flags of a device mesh and of the processes that share it."""
  coordinator = flags.DEFINE_string(
      "coordinator", None, "Address of process 0 as HOST:PORT, if "
      "several processes run the same command. Also set --mesh, "
      "--process_id and --num_processes. With the value auto, JAX reads "
      "everything except --mesh from the cluster. Default: one process")
  return MeshFlags(
      mesh=flags.DEFINE_string(
          "mesh", None, "Number of devices per mesh axis, such as "
          "data:2,model:4. The data axis splits the batch, the model axis "
          "splits the weights. Default: one device"),
      coordinator=coordinator,
      process_id=requires(flags.DEFINE_integer(
          "process_id", None, "Index of this process, starting at 0; requires "
          "--coordinator", 0), coordinator),
      num_processes=requires(flags.DEFINE_integer(
          "num_processes", None, "Total number of processes; requires "
          "--coordinator", 1), coordinator))
