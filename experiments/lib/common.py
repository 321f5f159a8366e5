"""What the experiment scripts share: models by flag, errors in one line."""

import contextlib
import csv
import errno
import gc
import io
import json
import os
import pathlib
import signal
import sys
from typing import Any
from typing import NamedTuple

from absl import app
from absl import flags
from absl import logging
import jax

from lib import compilation
from lib import flags as shared
import specjax as sj
from specjax import files
from specjax.data import prompt_sets
from specjax.training import methods

VERIFIERS = {
    "token": sj.verifiers.Token(),
    "block": sj.verifiers.Block(),
    "greedy_block": sj.verifiers.GreedyBlock(),
    "typical": sj.verifiers.Typical(),
    "top_2": sj.verifiers.TopK(k=2),
}
TREE_VERIFIERS = {
    "recursive": sj.verifiers.Recursive(),
    "k_seq": sj.verifiers.KSeq(),
    "traversal": sj.verifiers.Traversal(),
    "target_walk": sj.verifiers.TargetWalk(),
}
ALL_VERIFIERS = VERIFIERS | TREE_VERIFIERS
VERIFIER_NAMES = {verifier: name for name, verifier in ALL_VERIFIERS.items()}


_HELD = contextlib.ExitStack()  # the directories of the script that runs
_FIXES = {
    errno.ENOSPC: "make room, or choose another place",
    errno.EDQUOT: "make room, or choose another place",
    errno.EACCES: "choose a place that you may write to",
    errno.EPERM: "choose a place that you may write to",
    errno.EROFS: "choose a place that you may write to",
    errno.EEXIST: "choose a directory",
    errno.ENOTDIR: "choose a directory",
    errno.EISDIR: "choose a file",
}


def run(main, argv=None) -> None:
  """`app.run` for a `main` whose errors are, as a rule, the user's to mend.

  They end the program with one line on stderr instead of a traceback: bad
  flags, bad values, what the system refuses, Ctrl-C, and a reader of stdout
  that has left, such as `head`.

  Args:
    main: without arguments.
    argv: default: those of the program.
  """
  def guarded(argv):
    if argv[1:]:
      sys.exit(f"error: unexpected argument {argv[1]!r}; see --help")
    # Orbax narrates every checkpoint, and also what it raises.
    logging.set_verbosity(logging.FATAL)
    compilation.keep()
    # Tracing makes millions of small objects that stay; looking for garbage
    # among them over and over takes an eighth of its time.
    gc.set_threshold(200_000, 20, 50)
    try:
      with _HELD:
        main()
        sys.stdout.flush()
    except (ValueError, FloatingPointError) as e:
      end(f"error: {' '.join(str(e).split())}")
    except KeyboardInterrupt:
      end("\nstopped by Ctrl-C; what was complete is kept",
          128 + signal.SIGINT)
    except BrokenPipeError:
      _forget_stdout()
      end("stopped: nobody reads the output any more", 128 + signal.SIGPIPE)
    except OSError as e:
      end(f"error: {_in_words(e)}")

  def end(line, code=1):
    if argv is not None and code == 1:  # the caller goes on
      sys.exit(line)
    print(line, file=sys.stderr, flush=True)
    if argv is not None:
      sys.exit(code)
    # Files are whole at any moment. Threads that wait for a compiler or for a
    # full disk would only keep the user waiting, or add their tracebacks.
    with contextlib.suppress(OSError):
      sys.stdout.flush()
    os._exit(code)

  # Beside the script's own flags in --help.
  flags.FLAGS.register_key_flag_for_module(
      sys.argv[0], flags.FLAGS[compilation.CACHE.name])
  app.run(guarded, argv, flags_parser=_parsed)


def _parsed(argv):
  """The arguments that are no flags; a bad flag is told in one line."""
  try:
    return flags.FLAGS(argv)
  except flags.Error as e:
    sys.exit(f"error: {' '.join(str(e).split())}; see --help")


def _forget_stdout():
  """Lets go of what a closed pipe did not take, or Python complains at exit."""
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, sys.stdout.fileno())
  os.close(nowhere)


def _in_words(e):
  """An `OSError` in one line that names the file and the fix."""
  text = " ".join(str(e.strerror or e).split()).rstrip(".")
  place = "" if e.filename is None else f"{e.filename}: "
  fix = _FIXES.get(e.errno)
  return place + text + (f"; {fix}" if fix else "")


def output_directory(path: str | os.PathLike[str], what: str) -> pathlib.Path:
  """The directory that a script writes to, its own until it ends.

  Args:
    path: created if needed.
    what: a word for the error, such as "run".

  Raises:
    ValueError: another process writes there.
  """
  _HELD.enter_context(files.locked(path, what))
  return pathlib.Path(path)


def given(flag: str, values: list[str], fix: str) -> list[str]:
  """The entries of a list flag, of which there must be some.

  Args:
    flag: such as "--prompts".
    values: of the flag.
    fix: what to give.
  """
  if not values or not all(values):
    raise ValueError(f"{flag} is {','.join(values)!r}, which names nothing or "
                     f"has an empty entry; give {fix}")
  return values


def draft_lengths(flag: str, values: list[str]) -> list[int]:
  """The draft lengths of a list flag, sorted, each at least 1."""
  try:
    gammas = sorted({int(g) for g in values})
  except ValueError:
    raise ValueError(f"{flag} is {','.join(values)!r}; give whole numbers "
                     "between commas, such as 2,4,8") from None
  if not gammas or gammas[0] < 1:
    raise ValueError(f"{flag} holds {gammas[:1]}; draft lengths start at 1")
  if gammas[-1] >= shared.MOST_NODES:
    raise ValueError(f"{flag} holds {gammas[-1]}; give {shared.TOO_LONG}")
  return gammas


def numbers(flag: str, values: list[str]) -> list[float]:
  """The numbers of a list flag, each once."""
  given(flag, values, "numbers between commas, such as 1,0.6")
  try:
    return [float(x) for x in dict.fromkeys(values)]
  except ValueError:
    raise ValueError(f"{flag} is {','.join(values)!r}; give numbers between "
                     "commas, such as 1,0.6") from None


def last_tokens(ids: list[int], count: int) -> list[int]:
  """The first token, which begins every text, and the last of the others."""
  return [ids[0], *ids[1:][-(count - 1):]] if count > 1 else ids[:1]


def code_prompts(tokenizer, count: int, tokens: int, seed: int):
  """Held-out modules of the running Python, cut to their last tokens.

  Returns:
    `(count lists of at most `tokens` ids, where they come from)`.
  """
  texts, source = prompt_sets.embedded("code", count, 4 * tokens, seed)
  return [last_tokens(tokenizer.encode(text), tokens)
          for text in texts], source


def autoregressive(model, temperature: float) -> sj.Decoder:
  """A decoder that writes what a model alone would, a token a pass."""
  drafter, verifier = sj.strategies.autoregressive()
  return sj.Decoder(target=model, drafter=drafter, verifier=verifier,
                    transform=sj.LogitsTransform(temperature=temperature))


def num_parameters(params) -> int:
  """How many numbers a tree of arrays holds."""
  return sum(x.size for x in jax.tree.leaves(params))


def write_csv(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  """Writes rows with the same fields, whole or not at all."""
  text = io.StringIO(newline="")
  writer = csv.DictWriter(text, rows[0])
  writer.writeheader()
  writer.writerows(rows)
  with files.atomically(path) as f:
    f.write(text.getvalue().encode())


def finish(output_dir, study: str, results: dict[str, Any]) -> None:
  """Writes a study's results, and says where in the last line of stdout.

  The line is one JSON object, `{"study": ..., "results": PATH}`, so short that
  the table above it stays on the screen.

  Args:
    output_dir: where `<study>.json` is written, whole or not at all.
    study: its name.
    results: what JSON can hold.
  """
  path = pathlib.Path(output_dir).absolute() / f"{study}.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_json(path, {"study": study, **results})
  print(json.dumps({"study": study, "results": str(path)}))


def verifier_names(flag: str, names: list[str]) -> list[str]:
  """The verifiers of a list flag, each once, all of them known."""
  given(flag, values=names, fix=f"some of {', '.join(VERIFIERS)}")
  for name in names:
    if name not in VERIFIERS:
      raise ValueError(f"{flag} holds {name!r}; choose among "
                       f"{', '.join(VERIFIERS)}")
  return list(dict.fromkeys(names))


def label(name: str) -> str:
  """What tables and figures call a model: the last part of its path."""
  return os.path.basename(os.path.abspath(name))


def load_models(target: str, drafters: list[str], choices: str = ""):
  """The models that the flags --target and --drafter name.

  Args:
    target: "bundled", or the directory of a checkpoint with a tokenizer.
    drafters: names of bundled drafters, or directories of checkpoints.
    choices: what a drafter may be, for the error; default: as in `drafters`.

  Returns:
    `(target, {label: drafter}, tokenizer)`, each model a `zoo.Member`.

  Raises:
    ValueError: two drafters have the same label.
  """
  drafters = list(dict.fromkeys(drafters))
  for name in drafters:
    alike = [other for other in drafters if label(other) == label(name)]
    if len(alike) > 1:
      raise ValueError(f"tables call the drafters {' and '.join(alike)} both "
                       f"{label(name)!r}; rename a directory")
  bundled = pathlib.Path(sj.zoo.__file__).parent  # read as far as it is named
  directory = (bundled / "target" if target == "bundled"
               else _directory("target", target, "bundled"))
  choices = choices or ", ".join(sj.zoo.DRAFTERS)
  path = lambda name: (bundled / name if name in sj.zoo.DRAFTERS
                       else _directory("drafter", name, choices))
  load = lambda directory: sj.zoo.Member(*sj.models.load_model(directory))
  paths = {name: path(name) for name in drafters}
  target_member = load(directory)
  tokenizer = sj.data.Tokenizer.load(
      (bundled if target == "bundled" else directory) / "tokenizer.json")
  members = {label(name): load(path) for name, path in paths.items()}
  return target_member, members, tokenizer


def _directory(what, name, choices):
  """The directory that a flag names; a slip is told what there is."""
  if not name or not pathlib.Path(name).is_dir():
    raise ValueError(f"no {what} {name!r}; choose among {choices}, or give the "
                     "directory of a trained one")
  return pathlib.Path(name)


def _heads_directory(name):
  return (sj.zoo.heads_path(name) if name in sj.zoo.HEADS
          else pathlib.Path(name))


def drafts_for_itself(name: str) -> bool:
  """Whether a name is that of heads or look-ahead embeddings."""
  return (name in sj.zoo.HEADS
          or bool(name) and (_heads_directory(name) / "heads.json").exists())


class SelfDrafter(NamedTuple):
  """Heads or look-ahead embeddings, and the target that they were made for.

  Attributes:
    target: a `zoo.Member`.
    tokenizer: the target's.
    heads: see `models.heads`.
    params: of the heads.
    training: what train_drafter.py says of its run.
  """

  target: Any
  tokenizer: Any
  heads: Any
  params: Any
  training: dict[str, Any]


def load_self_drafter(name: str, target, tokenizer) -> SelfDrafter:
  """Reads heads or look-ahead embeddings, and the target that they draft for.

  Args:
    name: "pass" or "medusa", those in the box, or a directory of
      train_drafter.py.
    target: the `zoo.Member` to draft for, unless the directory holds a target
      that was trained together with the heads.
    tokenizer: the target's tokenizer.
  """
  if name not in sj.zoo.HEADS:
    _directory("heads", name, ", ".join(sj.zoo.HEADS))
  directory = _heads_directory(name)
  if (directory / "model.safetensors").exists():
    target = sj.zoo.Member(*sj.models.load_model(directory))
    tokenizer = sj.data.Tokenizer.load(directory / "tokenizer.json")
  heads, params = methods.load_heads(directory, target.model)
  path = directory / "training.json"
  again = "run train_drafter.py again, with the same flags"
  if not path.exists():
    raise ValueError(f"{path} is missing, which says how good the heads are; "
                     + again)
  training = files.read_json(path, again)
  accuracy = training.get("accuracy")
  if not (isinstance(accuracy, list) and len(accuracy) > 1
          and all(isinstance(row, list) for row in accuracy)):
    raise ValueError(f"{path} does not say how good the heads are; {again}")
  return SelfDrafter(target, tokenizer, heads, params, training)
