"""Table and figure of arena.py."""

from collections.abc import Sequence
import pathlib
from typing import Any

from lib import common
from lib.figures import style
from lib.reports import drafter_evaluation
from lib.reports import tables
from specjax.utils import files


def write(output_dir: pathlib.Path, rows: Sequence[dict[str, Any]],
          target: str) -> None:
  """Prints the table over all prompt sets, and writes tables and a figure.

  Args:
    output_dir: directory of the files.
    rows: rows of `drafter_evaluation.Results.rows` of all drafters.
    target: name of the target.
  """
  text = (f"# Arena of {target}\n\nTokens per target call, with 95 % "
          f"intervals over n clusters of prompts. {drafter_evaluation.CALLS}\n")
  for caption, table in captioned(rows).items():
    text += f"\n## {caption}\n\n{tables.markdown(table)}"
  print(text, end="")
  with files.atomically(output_dir / "arena.md") as f:
    f.write(text.encode())
  common.write_csv(output_dir / "arena.csv", list(rows))
  draw(output_dir, rows)


def captioned(rows: Sequence[dict[str, Any]]) -> dict[str, tables.Table]:
  """Returns a table for every temperature, over all prompt sets.

  The draft with the best result is first.
  """
  found = {}
  for temperature in dict.fromkeys(row["temperature"] for row in rows):
    mine = [row for row in rows if row["prompts"] == "all"
            and row["temperature"] == temperature]
    found[f"Temperature {temperature:g}"] = drafter_evaluation.wide(
        sorted(mine, key=_best(mine)))
  return found


def _best(rows: Sequence[dict[str, Any]]):
  """Returns a sort key that puts the draft with the best result first."""
  best = {}
  for row in rows:
    best[row["draft"]] = max(best.get(row["draft"], 0), row["block_efficiency"])
  return lambda row: (-best[row["draft"]], row["draft"])


def draw(directory: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
  """Draws tokens per target call of every draft and rule.

  The draft length is the best one for each draft and rule.
  """
  temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
  drafts = list(dict.fromkeys(row["draft"] for row in rows))
  figure, axes = style.panels(
      1, len(temperatures), width=4.5, height=0.3 * len(drafts) + 0.8)
  for panel, temperature in zip(axes[0], temperatures):
    best = {}
    for row in rows:
      if row["prompts"] == "all" and row["temperature"] == temperature:
        key = row["draft"], row["verifier"]
        if key not in best or (
            row["block_efficiency"] > best[key]["block_efficiency"]):
          best[key] = row
    rules = list(dict.fromkeys(rule for _, rule in best))
    for i, rule in enumerate(rules):
      mine = [row for (_, name), row in best.items() if name == rule]
      places = [-drafts.index(row["draft"]) + 0.25 * (i - len(rules) / 2)
                / len(rules) for row in mine]
      panel.errorbar([row["block_efficiency"] for row in mine], places,
                     xerr=style.errors(mine, "block_efficiency"),
                     markersize=4, capsize=2, label=style.rule(rule),
                     **style.look(_LOOKS.get(rule, rule)) | {
                         "linestyle": "None"})
    panel.set_yticks([-i for i in range(len(drafts))], drafts, fontsize=8)
    panel.set(xlabel="tokens per target call, best draft length",
              title=f"temperature {temperature:g}")
  style.save(figure, directory / "arena.png")


# In other figures, the name of a rule on trees includes the kind of tree. A
# rule has the look of one of these names.
_LOOKS = {"recursive": "without_replacement", "target_walk": "top_k"}
