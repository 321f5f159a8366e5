"""Error handling, output files and list flags of the experiment scripts."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import csv
import gc
import io
import json
import math
import os
import pathlib
import re
import signal
import sys
import tempfile
from typing import Any

from absl import app
from absl import flags
from absl import logging
import jax
import jax.numpy as jnp

from lib import compilation
from lib import extensions
from lib import flags as shared
from lib import models
from lib import progress
import specjax as sj
from specjax import strategies
from specjax.models import Transformer
from specjax.utils import entry_points
from specjax.utils import files
from specjax.utils import processes

VERIFIERS = {
    "token": sj.verifiers.Token(),
    "block": sj.verifiers.Block(),
    "coupled": sj.verifiers.Coupled(),
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


_FLAGS = "flags.json"  # flags of the study in an output directory
_GROWS = "num_prompts", "seeds"  # larger values extend a study
_NEUTRAL = {  # flags that do not affect the results of a study
    "output_dir", "compilation_cache", "figure_style", "mesh", "coordinator",
    "process_id", "num_processes"}
_HELD = contextlib.ExitStack()  # locked directories, released at exit


def run(main: Callable[[], None], argv: list[str] | None = None) -> None:
  """Runs `main` with `app.run` and prints a user error as one line on stderr.

  User errors are bad flags and values, a missing package or device, errors of
  the operating system, Ctrl-C, and a closed pipe such as `| head`.

  Args:
    main: function without arguments.
    argv: command line. None means `sys.argv`.
  """
  def guarded(rest):
    if rest[1:]:
      sys.exit(f"error: unexpected argument {rest[1]!r}; see --help")
    # Silence Orbax. It logs every checkpoint, and also the errors it raises.
    logging.set_verbosity(logging.FATAL)
    _print_any_text()
    compilation.keep(flags.FLAGS.compilation_cache)
    # Tracing allocates millions of small objects that are never freed, so
    # frequent garbage collection is useless. With Python's default thresholds,
    # garbage collection takes an eighth of the tracing time.
    gc.set_threshold(200_000, 20, 50)
    progress.imported()
    try:
      with _HELD:
        _check_figures()
        for name in flags.FLAGS:
          check_written(name)
        main()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as e:
      found = _line(e)
      if found is None:
        raise
      _end(*found, exits=argv is None)

  if "compilation_cache" not in flags.FLAGS:
    shared.compilation_cache()
  # --help lists this flag with the script's own flags.
  flags.FLAGS.register_key_flag_for_module(
      sys.argv[0], flags.FLAGS["compilation_cache"])
  try:
    app.run(guarded, argv, flags_parser=_parsed)
  except BrokenPipeError:  # `--help | head`
    sys.exit(1)
  finally:
    try:
      sys.stdout.flush()
    except BrokenPipeError:
      _forget_stdout()


def _line(e: BaseException) -> tuple[str, int] | None:
  """Returns the message and the exit status of a user error; None for a bug."""
  text = " ".join(str(e).split())
  own = extensions.explained(e) if isinstance(e, Exception) and not isinstance(
      e, (processes.Stopped, MemoryError, jax.errors.JaxRuntimeError,
          BrokenPipeError)) else None
  if own is not None:
    return f"error: {own}", 1
  if isinstance(e, (ValueError, FloatingPointError)):
    return f"error: {text}{_other_directory(e)}", 1
  if isinstance(e, processes.Stopped):
    return str(e), 128 + e.signal
  if isinstance(e, MemoryError) or isinstance(
      e, jax.errors.JaxRuntimeError) and (
          "RESOURCE_EXHAUSTED" in text or "Out of memory" in text):
    return ("error: the models and caches do not fit the memory ("
            f"{text[:200]}); decode fewer or shorter sequences at a time "
            "(--batch, --prompt_tokens, --max_new_tokens), give --dtype="
            "bfloat16, or split the work over devices by --mesh"), 1
  if isinstance(e, jax.errors.JaxRuntimeError):
    # Without this exit, the distributed runtime would wait for the other
    # processes, and these would wait for this process.
    return (f"error: {text[:200]}; another process may have ended: start all "
            "of them again", 1) if jax.distributed.is_initialized() else None
  if isinstance(e, (RuntimeError, AssertionError)):  # a missing device
    line = _missing_platform()
    return line and (f"error: {line}", 1)
  if isinstance(e, KeyboardInterrupt):
    return "\nstopped by Ctrl-C; complete results are stored", (
        128 + signal.SIGINT)
  if isinstance(e, BrokenPipeError):
    _forget_stdout()
    return "stopped: the output is no longer read", 128 + signal.SIGPIPE
  return (f"error: {_in_words(e)}", 1) if isinstance(e, OSError) else None


def _end(line: str, code: int, exits: bool) -> None:
  """Prints an error and ends the program.

  Args:
    line: error message.
    code: exit status.
    exits: if True, ends the process immediately. If False, raises `SystemExit`
      for the caller.
  """
  if not exits and code == 1:
    sys.exit(line)
  print(line, file=sys.stderr, flush=True)
  if not exits:
    sys.exit(code)
  # `sys.exit` would wait for all threads, for example for one that compiles. So
  # the process ends directly. Files are written atomically, so no file is left
  # incomplete.
  with contextlib.suppress(OSError):
    sys.stdout.flush()
  os._exit(code)


def _check_figures():
  """Raises `ValueError` if a script that draws figures lacks matplotlib."""
  if "lib.figures.style" not in sys.modules:
    return
  try:
    import matplotlib  # noqa: F401  # pylint: disable=g-import-not-at-top
  except ImportError as e:
    raise ValueError("matplotlib, which this script needs for figures, cannot "
                     f"be imported ({e}): pip install 'specjax[experiments]'"
                     ) from None


def _print_any_text():
  """Makes stdout and stderr print "?" for characters they cannot encode."""
  for stream in (sys.stdout, sys.stderr):
    if getattr(stream, "errors", None) == "strict" and hasattr(
        stream, "reconfigure"):
      stream.reconfigure(errors="replace")


def _other_directory(error: Exception):
  """Returns a hint at the flag that names the directory of an error, or ""."""
  directory = getattr(error, "directory", None)
  if directory is None:
    return ""
  for name in flags.FLAGS:
    value = flags.FLAGS[name].value
    if isinstance(value, str) and value and (
        pathlib.Path(value).absolute() == directory.absolute()):
      return f" (--{name} names the directory)"
  return ""


def _missing_platform():
  """Returns an error message if jax cannot use its platform, otherwise None."""
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as e:
    reason = " ".join(str(e).split())[:200] or "no plugin for it is installed"
    return (f"JAX_PLATFORMS is {jax.config.jax_platforms!r}, and jax finds no "
            f"such device ({reason}); set JAX_PLATFORMS=cpu, or install jax "
            "for the device")
  return None


def _parsed(argv: list[str]):
  """Returns the positional arguments; ends the program on a bad flag."""
  try:
    rest = flags.FLAGS(argv)
  except SystemExit:  # --help was printed
    sys.exit(0)
  except flags.Error as e:
    text = " ".join(str(e).split())
    missing = re.fullmatch(
        r"flag --(\w+)=None: Flag --\1 must have a value .*", text)
    if missing:
      text = shared.missing(missing[1])
    text = re.sub(r"invalid literal for int\(\) with base 10: ('.*')",
                  r"\1 is not a whole number", text)
    sys.exit(f"error: {text}; see --help")
  for name in flags.FLAGS:
    value = flags.FLAGS[name].value
    # absl's bounds accept NaN, because no comparison with NaN is true.
    if isinstance(value, float) and not math.isfinite(value):
      sys.exit(f"error: --{name} is {value}; give a number")
  try:
    shared.check_requirements()
  except ValueError as e:
    sys.exit(f"error: {e}")
  return rest


def _forget_stdout():
  """Redirects a closed stdout to os.devnull.

  Otherwise Python fails to flush it at exit.
  """
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, sys.stdout.fileno())
  os.close(nowhere)


def _in_words(e: OSError) -> str:
  """Returns the message of an `OSError` and its file name, as one line."""
  text = " ".join(str(e.strerror or e).split()).rstrip(".")
  return text if e.filename is None else f"{e.filename}: {text}"


def first_speaks() -> None:
  """Suppresses the output of all processes except the first one.

  Errors are still reported.
  """
  if not processes.is_first():
    nowhere = _HELD.enter_context(open(os.devnull, "w"))
    _HELD.enter_context(contextlib.redirect_stdout(nowhere))
    _HELD.enter_context(contextlib.redirect_stderr(nowhere))


def output_directory(path: str | os.PathLike[str], what: str) -> pathlib.Path:
  """Creates the output directory and locks it until the script ends.

  The processes of one distributed script share the lock.

  Args:
    path: path of the directory.
    what: name of the output for the error message, such as "run".

  Raises:
    ValueError: another script has locked the directory.
  """
  processes.by_the_first(
      lambda: _HELD.enter_context(files.locked(path, what)))
  return pathlib.Path(path)


def claim(directory: pathlib.Path, study: str, **values: Any) -> None:
  """Checks that the results of an earlier study may be replaced.

  The flags of a study are stored in flags.json. Another study in the same
  directory may add entries to its lists, prompts and seeds, and it may change
  flags that do not affect results.

  Args:
    directory: output directory.
    study: name of the study, as in `finish`.
    **values: values of flags that replace those of the command line.

  Raises:
    ValueError: the directory has the results of a study with other flags.
  """
  processes.by_the_first(lambda: _claim(directory, study, values))


def _claim(directory: pathlib.Path, study: str, values: dict[str, Any]):
  of_script = {
      name: flags.FLAGS[name].value for name in flags.FLAGS
      if not flags.FLAGS.find_module_defining_flag(name).startswith(
          ("absl", "chex", "orbax"))}
  now = {name: value for name, value in (of_script | values).items()
         if name not in _NEUTRAL}
  # Rows are independent, so the batch size matters only for measured speeds.
  if now.get("timing") != "throughput" and isinstance(now.get("batch"), int):
    now["batch"] = min(now["batch"], 2 if "timing" in now else 1)
  path = directory / _FLAGS
  if path.exists() and (directory / f"{study}.json").exists():
    before = files.read_json(path, "delete it")
    other = [name for name in now if name in before
             and not _extends(name, before[name], now[name])]
    if other:
      raise ValueError(
          f"{directory} has results of "
          f"{' '.join(shared.shown(x, before[x]) for x in other)}, which "
          f"{' '.join(shared.shown(x, now[x]) for x in other)} would replace; "
          "choose another --output_dir, or delete the results")
  files.write_json(path, now, indent=2)


def _extends(name: str, before: Any, now: Any) -> bool:
  """Returns True if results of the value `now` contain those of `before`."""
  if isinstance(before, list):
    return isinstance(now, list) and set(before) <= set(now)
  return now == before or name in _GROWS and now > before


def temporary_directory() -> pathlib.Path:
  """Creates a directory that is deleted when the script ends."""
  return pathlib.Path(_HELD.enter_context(tempfile.TemporaryDirectory()))


def check_written(name: str) -> None:
  """Raises `ValueError` if a script could not write to the path of a flag.

  Flags that `shared.written` did not declare, and flags without a value, pass.
  """
  flag = flags.FLAGS[name]
  kind, path = getattr(flag, "written", ""), flag.value
  if path is None or not kind:
    return
  if kind == "file":
    output_file(f"--{name}", path)
  else:
    check_directory(f"--{name}", path)


def check_directory(flag: str, path: str) -> None:
  """Raises `ValueError` unless files can be written to a directory.

  The directory need not exist. It is not created, because another flag may be
  wrong.

  Args:
    flag: name of the flag, such as "--output_dir".
    path: value of the flag.
  """
  place = pathlib.Path(path).absolute()
  try:
    # Permissions do not tell whether a directory is writable: for example, root
    # has all of them in /proc.
    existing = next(x for x in (place, *place.parents) if x.exists())
    with tempfile.TemporaryDirectory(dir=existing):
      pass
  except NotADirectoryError:
    raise ValueError(f"{flag}={path} is not a directory; choose another one"
                     ) from None
  except OSError as e:
    raise ValueError(f"{flag}={path} cannot be written ({e.strerror}); choose "
                     "another directory") from None


def output_file(flag: str, path: str) -> pathlib.Path:
  """Returns the output file of a flag, after checking that it is writable.

  Writing replaces an existing file, so the path must not be a directory or a
  device. If the path is a symbolic link, the file that it points to is
  replaced.

  Args:
    flag: name of the flag, such as "--output".
    path: value of the flag.

  Raises:
    ValueError: the path is not a regular file, or is not writable.
  """
  file = pathlib.Path(path).resolve()
  if not path or file.is_dir() or not file.parent.is_dir():
    raise ValueError(f"{flag} is {path!r}, which is a directory or is in a "
                     "directory that does not exist; give a file")
  if file.exists() and not file.is_file():
    raise ValueError(f"{flag} is {path!r}, which is not a regular file and "
                     f"would be replaced by one; give a file, or leave {flag} "
                     "out and redirect standard output")
  try:
    with tempfile.TemporaryFile(dir=file.parent):
      pass
  except OSError as e:
    raise ValueError(f"{flag} is {path!r}, and the directory {file.parent} is "
                     f"not writable ({e.strerror}); choose another directory"
                     ) from None
  return file


def given(flag: str, values: Sequence[str] | None, fix: str) -> Sequence[str]:
  """Returns the entries of a list flag after checking that none is empty.

  Args:
    flag: name of the flag, such as "--prompts".
    values: entries of the flag.
    fix: description of valid values for the error message.
  """
  if not values or not all(values):
    raise ValueError(f"{flag} is {','.join(values or ())!r}, which is empty or "
                     f"has an empty entry; give {fix}")
  return values


def draft_lengths(flag: str, values: list[str], least: int = 1) -> list[int]:
  """Returns the sorted draft lengths or tree sizes of a list flag.

  Args:
    flag: name of the flag, such as "--gamma".
    values: entries of the flag.
    least: smallest valid number.
  """
  try:
    gammas = sorted({int(g) for g in values})
  except ValueError:
    raise ValueError(f"{flag} is {','.join(values)!r}; give whole numbers "
                     "between commas, such as 2,4,8") from None
  if not gammas or gammas[0] < least:
    raise ValueError(f"{flag} is {','.join(values)!r}; give numbers of at "
                     f"least {least}")
  if gammas[-1] >= shared.MOST_NODES:
    raise ValueError(f"{flag} contains {gammas[-1]}; give {shared.TOO_LONG}")
  return gammas


def batch_sizes(flag: str, values: list[str]) -> list[int]:
  """Returns the sorted batch sizes of a list flag, each at least 1."""
  try:
    sizes = sorted({int(size) for size in values})
  except ValueError:
    sizes = []
  if not sizes or sizes[0] < 1:
    raise ValueError(f"{flag} is {','.join(values)!r}; give whole numbers of "
                     "at least 1 between commas, such as 1,4,16")
  return sizes


def numbers(flag: str, values: list[str]) -> list[float]:
  """Returns the numbers of a list flag without repetitions."""
  given(flag, values, "numbers between commas, such as 1,0.6")
  try:
    return list(dict.fromkeys(map(float, values)))
  except ValueError:
    raise ValueError(f"{flag} is {','.join(values)!r}; give numbers between "
                     "commas, such as 1,0.6") from None


def dtype_of(flag: flags.FlagHolder) -> str:
  """Returns the name of the data type of --dtype, or of its default."""
  return flag.value or jnp.dtype(sj.models.default_dtype()).name


def autoregressive(model: Transformer, temperature: float) -> sj.Decoder:
  """Returns a decoder without drafts: one token per forward pass."""
  return strategies.autoregressive().decoder(
      model, transform=sj.LogitsTransform(temperature=temperature))


def num_parameters(params: Any) -> int:
  """Returns the number of parameters in a tree of arrays."""
  return sum(x.size for x in jax.tree.leaves(params))


def write_csv(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  """Writes rows with the same fields to a CSV file, atomically."""
  text = io.StringIO(newline="")
  writer = csv.DictWriter(text, rows[0])
  writer.writeheader()
  writer.writerows(rows)
  with files.atomically(path) as f:
    f.write(text.getvalue().encode())


def finish(output_dir: str | pathlib.Path, study: str,
           results: dict[str, Any]) -> None:
  """Writes a study's results, and prints their path as the last line of stdout.

  The line is a JSON object, `{"study": ..., "results": PATH}`. It does not
  contain the results, because they would push the table off the screen.

  Args:
    output_dir: directory for the file `<study>.json`.
    study: name of the study.
    results: JSON-serialisable results.
  """
  path = pathlib.Path(output_dir).absolute() / f"{study}.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_json(path, {"study": study, **results})
  print(json.dumps({"study": study, "results": str(path)}))


def verifiers(flag: str, names: Sequence[str],
              shipped: Mapping[str, sj.Verifier] = VERIFIERS
              ) -> dict[str, sj.Verifier]:
  """Returns the verifiers of a list flag by their names in tables.

  Args:
    flag: name of the flag, such as "--verifier".
    names: entries of the flag: names in `shipped`, or rules that are not part
      of specjax (see `extensions`).
    shipped: rules of specjax that the script can use.
  """
  choices = ", ".join((*shipped, *entry_points.names(extensions.group(flag))))
  fix = f"{choices}, or {extensions.FORM} for a rule in a file"
  given(flag, values=names, fix=f"some of {fix}")
  found = {}
  for name in dict.fromkeys(names):
    label = name if name in shipped else models.label(name)
    if label in found:
      raise ValueError(f"{flag} contains two rules with the name {label} in "
                       "tables; leave one out, or rename its file")
    if name in shipped:
      found[label] = shipped[name]
    elif extensions.is_own(flag, name):
      found[label] = extensions.verifier(flag, name)
    else:
      raise ValueError(f"{flag} contains {name!r}; choose among {fix}")
  return found


def verifier_name(verifier: sj.Verifier) -> str:
  """Returns the name of a rule in tables. Own rules have that of their class.
  """
  return VERIFIER_NAMES.get(verifier, type(verifier).__name__)
