"""Redraws the figures of earlier studies from their CSV files.

Nothing is measured again. For verification_study.py, the script also computes
tables and confidence intervals again from verification_prompts.csv, and prints
the first table of the README.

  python experiments/redraw.py --results=results/trees

Without --results, the script redraws all figures of experiments/results/,
except those of optimality.py, because its CSV file does not contain all data.
The learning curves of self_drafting_study.py are read from the bundled heads.
"""

import csv
import json
import pathlib
from typing import Any

from absl import flags
from lib import common
from lib import progress
from lib.reports import self_drafting_report
from lib.reports import tree_report
from lib.reports import verification_cells
from lib.reports import verification_report

import specjax as sj

_RESULTS = flags.DEFINE_string(
    "results", str(pathlib.Path(__file__).parent / "results"),
    "Directory of a study's results. It is searched, with its subdirectories, "
    "for verification.csv, trees.csv, self_drafting.csv and features.csv. "
    "Default: experiments/results")

_WORDS = {"True": True, "False": False, "": None}


def _curves():
  """Returns the learning curves of the bundled heads."""
  read = lambda name: json.loads(
      (sj.zoo.heads_path(name) / "training.json").read_text("utf-8"))
  return {name: read(name)["curve"] for name in sj.zoo.HEADS}


def _draw_features(directory: pathlib.Path, rows: list[dict[str, Any]]):
  """Draws the figures of features.csv, with the learning curves of its heads.
  """
  heads = {row["drafter"].split(",")[0] for row in rows}
  self_drafting_report.draw(directory, rows, {
      name: curve for name, curve in _curves().items() if name in heads},
                            "features")


def _draw_verification(directory: pathlib.Path, rows: list[dict[str, Any]]):
  """Draws the figures of verification.csv.

  If results per prompt exist, intervals are recomputed and the file is
  rewritten.
  """
  prompts = directory / verification_cells.PROMPTS
  if prompts.exists():
    rows = verification_cells.recomputed(rows, _read(prompts))
    common.write_csv(directory / "verification.csv", rows)
  verification_report.draw(directory, rows)
  if "own_gain" in rows[0]:  # not with --noown_rollouts
    print("\n".join(verification_report.summary(rows)))


_DRAW = {
    "verification.csv": _draw_verification,
    "trees.csv": tree_report.draw,
    "self_drafting.csv": lambda directory, rows: self_drafting_report.draw(
        directory, rows, _curves()),
    "features.csv": _draw_features,
}


def _value(text: str):
  if text in _WORDS:
    return _WORDS[text]
  try:
    return json.loads(text)
  except json.JSONDecodeError:
    return text


def _read(path: pathlib.Path):
  with open(path, newline="", encoding="utf-8") as f:
    return [{name: _value(text) for name, text in row.items()}
            for row in csv.DictReader(f)]


def draw(path: pathlib.Path):
  """Draws the figures of a CSV file into its directory."""
  try:
    _DRAW[path.name](path.parent, _read(path))
  except (LookupError, TypeError, ValueError, csv.Error) as e:
    raise ValueError(f"{path} is not the CSV file of a study "
                     f"({type(e).__name__}: {e}); run the study again") from e


def main():
  paths = [path for name in _DRAW
           for path in sorted(pathlib.Path(_RESULTS.value).rglob(name))]
  if not paths:
    raise ValueError(f"--results={_RESULTS.value} contains none of "
                     f"{', '.join(_DRAW)}; set it to the --output_dir of a "
                     "study")
  progress.say("drawing figures")
  for path in paths:
    draw(path)
    print(f"drew {path}")


if __name__ == "__main__":
  common.run(main)
