"""Redraws the figures of earlier studies from their files.

Nothing is measured again. For verification_study.py, the script also computes
tables and confidence intervals again from verification_prompts.csv, and prints
the first table of the README.

  python experiments/redraw.py --output_dir=results/trees
  python experiments/redraw.py --output_dir=results/trees \\
    --figure_style=paper --latex

Without --output_dir, the script redraws the figures of experiments/results/.
The learning curves of self_drafting_study.py are read from the bundled heads. A
study without a file in this list draws its figures again if it is run again
with the same flags.
"""

import csv
import json
import pathlib
from typing import Any

from absl import flags
from lib import common
from lib import flags as shared
from lib import progress
from lib.reports import arena_report
from lib.reports import drafter_evaluation
from lib.reports import free_drafts_report
from lib.reports import optimality_report
from lib.reports import self_drafting_report
from lib.reports import tables
from lib.reports import tree_report
from lib.reports import verification_cells
from lib.reports import verification_report

import specjax as sj
from specjax.utils import files

_FILES = ("verification.csv", "trees.csv", "self_drafting.csv", "features.csv",
          "arena.csv", "evaluation.csv", "free_drafts.csv", "optimality.csv")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", str(pathlib.Path(__file__).parent / "results"),
    "--output_dir of a study, in which figures are redrawn. It is searched, "
    f"with its subdirectories, for {', '.join(_FILES)}. Default: "
    "experiments/results")
_LATEX = flags.DEFINE_bool(
    "latex", False, "Also write the tables of every study as LaTeX (with the "
    "package booktabs), in a .tex file with the name of the CSV file")
shared.figure_style()

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
    print(tables.markdown(verification_report.summary(rows)), end="")


def _draw_optimality(directory: pathlib.Path, rows: list[dict[str, Any]]):
  """Draws the figures of optimality.csv and optimality.json."""
  optimality_report.draw(directory, rows, files.read_json(
      directory / "optimality.json", "run the study again"))


def _draw_evaluation(directory: pathlib.Path, rows: list[dict[str, Any]]):
  """Draws the figure of evaluation.csv. Drafts of trees alone have none."""
  if (directory / "positions.csv").exists():
    drafter_evaluation.draw(
        directory, rows, _read(directory / "positions.csv"))


# For every file: functions that draw its figures and return its tables.
_STUDIES = dict(zip(_FILES, (
    (_draw_verification, verification_report.captioned),
    (tree_report.draw, tree_report.captioned),
    (lambda directory, rows: self_drafting_report.draw(
        directory, rows, _curves()), self_drafting_report.captioned),
    (_draw_features, self_drafting_report.captioned),
    (arena_report.draw, arena_report.captioned),
    (_draw_evaluation,
     lambda rows: {"Tokens per target call": drafter_evaluation.wide(rows)}),
    (free_drafts_report.draw, free_drafts_report.captioned),
    (_draw_optimality, lambda rows: {}))))


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


def draw(path: pathlib.Path, latex: bool = False):
  """Draws the figures of a CSV file into its directory.

  Args:
    path: CSV file of a study.
    latex: if True, also writes the tables of the study as LaTeX.
  """
  try:
    draw_figures, captioned = _STUDIES[path.name]
    draw_figures(path.parent, _read(path))
    if latex:
      found = captioned(_read(path))
      if found:
        with files.atomically(path.with_suffix(".tex")) as f:
          f.write("\n".join(tables.latex(table, caption) for caption, table
                            in found.items()).encode())
        print(f"wrote {path.with_suffix('.tex')}")
  except (LookupError, TypeError, ValueError, csv.Error) as e:
    raise ValueError(f"{path} is not the CSV file of a study "
                     f"({type(e).__name__}: {e}); run the study again") from e


def main():
  paths = [path for name in _FILES
           for path in sorted(pathlib.Path(_OUTPUT_DIR.value).rglob(name))]
  if not paths:
    raise ValueError(f"--output_dir={_OUTPUT_DIR.value} contains none of "
                     f"{', '.join(_FILES)}; set it to the --output_dir of a "
                     "study")
  progress.say("drawing figures")
  for path in paths:
    draw(path, _LATEX.value)
    print(f"drew {path}")


if __name__ == "__main__":
  common.run(main)
