"""Compares short training runs with several values of one flag."""

from collections.abc import Callable
import math
from typing import Any

from absl import flags
import jax

from lib import common
from lib import flags as shared
from lib.training import drafter_report
from specjax.analysis import estimate
from specjax.training import evaluation
from specjax.utils.files import read_json

# `--help` lists --sweep under the script, not under this file.
flags.disclaim_key_flags()

# Flags that change the training or evaluation rows, except those that begin
# with "self_".
_OF_THE_ROWS = ("seed", "target", "dtype", "data", "field", "row_tokens",
                "held_out_rows")
Row = dict[str, Any]  # results of one training run
_TAKEN = ("sweep", "output_dir", "self_dir")


def define() -> flags.FlagHolder:
  """Defines --sweep."""
  return flags.DEFINE_string(
      "sweep", None, "Train once with each of several values of one flag, "
      "written FLAG:VALUE,VALUE,..., such as "
      "learning_rate:0.001,0.003,0.01. Each run has --steps steps (usually a "
      "few hundred) and writes to the directory --output_dir/FLAG=VALUE. "
      "Prints a table of the acceptance lengths. After an interruption, the "
      "same command continues. Default: a single training run")


def run(sweep: flags.FlagHolder, output_dir: str, train: Callable[[], None]
        ) -> None:
  """Trains once for every value, and prints and writes a table of the results.

  Args:
    sweep: the flag --sweep. It is unset while `train` runs.
    output_dir: parent directory of the runs.
    train: function without arguments that trains with the current flags.
  """
  name, values = _parsed(sweep.value)
  base = common.output_directory(output_dir, "sweep")
  all_flags = flags.FLAGS
  all_flags["sweep"].value = None
  if not all_flags["self_dir"].value and not _changes_rows(name):
    all_flags["self_dir"].value = str(base / "self")
  rows = []
  for value in values:
    flag = all_flags[name]
    flag.parse(value)
    flag.present += 1
    shared.check_requirements()
    directory = base / f"{name}={value}"
    all_flags["output_dir"].value = str(directory)
    print(f"--{name}={value}", flush=True)
    try:
      train()
      found = read_json(directory / "train_drafter.json", "train again")
    except FloatingPointError as e:
      print(f"stopped: {e}", flush=True)
      found = {"failed": str(e)}
    rows.append({"value": value, **found})
    jax.clear_caches()  # compiled programs of many runs would fill the memory
  rows.sort(key=lambda row: -row.get(drafter_report.CURVE, -math.inf))
  _print(name, rows)
  common.finish(base, "sweep", {"flag": name, "rows": rows})


def _parsed(text: str) -> tuple[str, list[str]]:
  """Returns the flag's name and its values as strings, after checking them."""
  name, _, values = text.partition(":")
  values = values.split(",")
  if name not in flags.FLAGS or name in _TAKEN:
    raise ValueError(f"--sweep is {text}; {name!r} is not a flag that can be "
                     "swept: give FLAG:VALUE,VALUE, such as "
                     "learning_rate:0.001,0.003")
  if len(set(values)) < max(2, len(values)):
    raise ValueError(f"--sweep is {text}; give at least two different values "
                     "between commas")
  for value in values:
    try:
      parsed = flags.FLAGS[name].parser.parse(value)
    except (ValueError, TypeError) as e:
      raise ValueError(f"--sweep is {text}; --{name}={value} is not valid: {e}"
                       ) from None
    if isinstance(parsed, float) and not math.isfinite(parsed):
      raise ValueError(f"--sweep is {text}; give finite numbers")
  if flags.FLAGS["coordinator"].value is not None:
    raise ValueError("--sweep is incompatible with --coordinator, because it "
                     "runs in one process; leave one of the two out")
  return name, values


def _print(name: str, rows: list[Row]) -> None:
  width = max(len(name), *(len(row["value"]) for row in rows))
  print(f"\n{name:>{width}s}  {'acceptance length':22s}{'less than best':22s}"
        f"{'block efficiency':22s}minutes")
  for row in rows:
    print(f"{row['value']:>{width}s}  ", end="")
    if "failed" in row:
      print("diverged")
      continue
    length = evaluation.interval(row, drafter_report.CURVE, less=1)
    decoded = evaluation.interval(row, "block_efficiency")
    print(f"{drafter_report.shown(length):22s}"
          f"{_behind(name, rows[0], row):22s}"
          f"{drafter_report.shown(decoded):22s}{row['minutes']:7.1f}")
  print("[95 % interval over held-out documents]. less than best: difference "
        "to the best\nrun on the same rows. It can be significant although the "
        "intervals of the runs\noverlap.")


def _behind(name: str, best: Row, row: Row) -> str:
  """Returns how much shorter the acceptance length is than in the best run.

  The difference with its interval is computed on the same held-out rows and
  returned as text. The result is "-" for the best run, or if the rows differ.
  """
  most, other = best["by_row"], row["by_row"]
  if (row is best or _changes_rows(name)
      or any(most[key] != other.get(key) for key in (
          "positions", "clusters"))):
    return "-"
  return drafter_report.shown(estimate(
      lambda most, other, count: (most - other) / count,
      most[drafter_report.CURVE], other[drafter_report.CURVE],
      other["positions"], clusters=other["clusters"]))


def _changes_rows(name: str) -> bool:
  """Returns True if a flag changes the training or evaluation rows."""
  return name in _OF_THE_ROWS or name.startswith("self_")
