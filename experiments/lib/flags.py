"""Flags that several scripts take: each has one name and one help.

A script calls the functions of those that it takes, with its own defaults:

  _TARGET = shared.target()
  _NUM_PROMPTS = shared.num_prompts(12, "prompts of every set")

What only one script takes is defined there.
"""

from typing import NamedTuple

from absl import flags

from specjax.data import prompt_sets

# All nodes of a draft, the root included, are verified in one pass, for which
# each of N nodes has a list of N ancestors and a law of V numbers.
MOST_NODES = 512
TOO_LONG = (f"at most {MOST_NODES - 1}, for a pass verifies all tokens of a "
            "draft at once and compares each with each")

PUBLISHED = ("a directory (Hugging Face's or specjax's own), a .gguf file, "
             "smollm2, or OWNER/NAME on the Hugging Face hub")

# `--help` lists a flag with the script that asked for it, not with this file.
flags.disclaim_key_flags()


def target():
  """The model whose law the output follows."""
  return flags.DEFINE_string("target", "bundled", f"bundled, {PUBLISHED}")


def drafter(help_=f"small, tiny, smol, {PUBLISHED}", default="small"):
  """The one language model that drafts."""
  return flags.DEFINE_string("drafter", default, help_)


def drafters(name="drafter", default="small", help_=""):
  """The language models that draft, each for itself."""
  return flags.DEFINE_list(
      name, default, f"{help_}small, tiny, smol, or what --target takes")


def draft_vocabulary():
  """FR-Spec's smaller head; `models.narrowed` makes it."""
  return flags.DEFINE_integer(
      "draft_vocabulary", None, "tokens that a language model drafts, the most "
      "frequent of --vocabulary_data; default: all", 1)


def vocabulary_data():
  """Text that tokens are counted in."""
  return flags.DEFINE_string(
      "vocabulary_data", "stdlib-no-tests", "texts that say which tokens are "
      "frequent, 2 million characters of them: what --data of train_lm.py "
      "takes")


def check_vocabulary_data(draft_vocabulary, vocabulary_data):
  """Refuses texts that nothing is counted in, see the two flags above."""
  if vocabulary_data.present and draft_vocabulary.value is None:
    raise ValueError(f"--vocabulary_data={vocabulary_data.value} says which "
                     "tokens --draft_vocabulary keeps, which is not given; "
                     "give it, such as --draft_vocabulary=1024, or leave "
                     "--vocabulary_data out")


def dtype():
  """Of the weights that are read."""
  return flags.DEFINE_enum(
      "dtype", None, ["float32", "bfloat16"],
      "of the weights as they are computed with; default: what suits the "
      "machine")


def prompts(default: str | None = "code"):
  """Prompt sets; `prompts.read` reads them. Without a default one is needed."""
  return flags.DEFINE_list(
      "prompts", default, "prompt sets: of the running Python "
      f"({', '.join(prompt_sets.EMBEDDED)}), NAME=PATH for a published file or "
      f"NAME for its Hugging Face copy ({', '.join(prompt_sets.PROMPT_SETS)}; "
      "copy needs none), or a .txt (prompts between blank lines) or .jsonl "
      "file of your own")


def prompt_field():
  """Which part of a record is the prompt."""
  return field("prompt", "of a JSONL file of your own")


def chat(help_="each prompt is a user's message, in the target's chat "
         "template; texts end where the model ends them"):
  """Prompts as messages."""
  return flags.DEFINE_bool("chat", False, help_)


def datastore():
  """What drafters without a model copy from."""
  return flags.DEFINE_string(
      "datastore", None, "file of build_datastore.py, which rest needs and "
      "suffix uses")


def gamma(default, help_="drafted tokens of a round"):
  """One draft length."""
  flag = flags.DEFINE_integer("gamma", default, help_, 1)
  flags.register_validator(
      flag, lambda gamma: gamma < MOST_NODES, f"give {TOO_LONG}")
  return flag


def nodes(default, help_="nodes of a tree, the root included"):
  """Of a tree."""
  flag = flags.DEFINE_integer("nodes", default, help_, 2)
  flags.register_validator(
      flag, lambda nodes: nodes < MOST_NODES, f"give {TOO_LONG}")
  return flag


def gammas(default, help_="draft lengths, in tokens"):
  """Several draft lengths; `common.draft_lengths` reads them."""
  return flags.DEFINE_list("gammas", default, help_)


def temperature(default=1.0, help_="of both models"):
  """One temperature."""
  return flags.DEFINE_float("temperature", default, f"{help_}; 0 is greedy", 0)


def temperatures(default, help_="of both models"):
  """Several temperatures; `common.numbers` reads them."""
  return flags.DEFINE_list("temperature", default, f"{help_}; 0 is greedy")


def top_p():
  """Of the transform that both models share."""
  return flags.DEFINE_float("top_p", 1.0, "nucleus mass, in (0, 1]")


def num_prompts(default, help_="prompts of every set, at most"):
  """A standard error over prompts needs two."""
  return flags.DEFINE_integer("num_prompts", default, help_, 2)


def prompt_tokens(default=96, help_="longer prompts keep their last tokens; "
                  "a chat template comes on top"):
  """Length of a prompt."""
  return flags.DEFINE_integer("prompt_tokens", default, help_, 1)


def new_tokens(default):
  """Length of a continuation."""
  return flags.DEFINE_integer(
      "new_tokens", default, "tokens generated for every prompt", 1)


def seed(help_="of the prompts and of sampling"):
  """Of all that a script draws: what a PRNG key tells apart."""
  return flags.DEFINE_integer("seed", 0, help_, 0, 2**32 - 1)


def output_dir(default, help_="for results, tables and plots"):
  """Where a script writes; `default=None` makes the user choose."""
  return directory("output_dir", default, help_)


def directory(name, default, help_):
  """A place to write to, which must be said in words: "" is the current one."""
  flag = flags.DEFINE_string(name, default, help_, required=default is None)
  flags.register_validator(flag, lambda path: path != "",
                           "give a directory, such as results/mine")
  return flag


def data(help_="what to train on"):
  """Text, for `corpora.read_documents`."""
  return flags.DEFINE_string(
      "data", "stdlib", f"{help_}: stdlib, stdlib-no-tests, a text file, a "
      ".jsonl file, a directory of text files, or hf:NAME[:SPLIT] (Hugging "
      "Face datasets)")


def field(default="text", help_="that holds the text in JSONL and datasets"):
  """Which part of a record is the text."""
  return flags.DEFINE_string("field", default, help_)


def steps(default=1000, help_="training steps"):
  """Length of a training run."""
  return flags.DEFINE_integer("steps", default, help_, 1)


def batch_size(help_="rows of a step"):
  """Rows of a training step."""
  return flags.DEFINE_integer("batch_size", 8, help_, 1)


def learning_rate(default, help_):
  """Peak of the schedule."""
  return flags.DEFINE_float("learning_rate", default, help_, 0.0)


def warmup_steps(default=40):
  """First part of the schedule."""
  return flags.DEFINE_integer(
      "warmup_steps", default, "steps in which the learning rate rises", 0)


def decay_fraction():
  """Last part of the schedule."""
  return flags.DEFINE_float(
      "decay_fraction", 0.5, "share of the run, at its end, in which the "
      "learning rate falls linearly to 0", 0.0, 1.0)


def held_out_rows(default=32, help_="rows to measure with"):
  """Of held-out text."""
  return flags.DEFINE_integer("held_out_rows", default, help_, 1)


def evaluate_every(default=250):
  """Of a training run; 0 measures at its end alone."""
  return flags.DEFINE_integer(
      "evaluate_every", default, "steps between held-out measurements", 0)


def checkpoint_every():
  """Of a training run, which goes on there if it is killed."""
  return flags.DEFINE_integer(
      "checkpoint_every", 200, "steps between checkpoints", 1)


def save_dtype():
  """Of what a training run writes in the end."""
  return flags.DEFINE_enum(
      "save_dtype", "bfloat16", ["bfloat16", "float32"],
      "of the weights saved")


class MeshFlags(NamedTuple):
  """Of the devices that a script runs on; `meshes.join` reads them."""

  mesh: flags.FlagHolder
  coordinator: flags.FlagHolder
  process_id: flags.FlagHolder
  num_processes: flags.FlagHolder


def mesh():
  """Devices, and processes that have them together."""
  return MeshFlags(
      mesh=flags.DEFINE_string(
          "mesh", None, "devices by axis, such as data:2,model:4: rows are "
          "split over data and models over model; default: one device"),
      coordinator=flags.DEFINE_string(
          "coordinator", None, "HOST:PORT of process 0, where the same command "
          "runs in several processes, each with its --process_id; auto where "
          "the cluster says all that"),
      process_id=flags.DEFINE_integer(
          "process_id", None, "number of this process, from 0", 0),
      num_processes=flags.DEFINE_integer(
          "num_processes", None, "processes in all", 1))
