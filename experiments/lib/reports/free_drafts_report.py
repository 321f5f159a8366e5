"""Figures of free_drafts_study.py."""

import pathlib
from typing import Any

import numpy as np

from lib.figures import style
from lib.reports import tables

ALONE = "none"  # variant without drafts


def captioned(rows: list[dict[str, Any]]) -> dict[str, tables.Table]:
  """Returns the table of all drafters and prompt sets, by caption."""
  return {"Tokens per round and speed over decoding without drafts":
          tables.without_empty([{
              "prompts": r["prompts"], "T": f"{r['temperature']:g}",
              "drafter": r["drafter"],
              "tokens per round": tables.shown(r, "tokens_per_round", ".2f"),
              "gain": tables.shown(r, "gain", "+.1%"),
              "speed (quartiles)": tables.shown(r, "speedup", ".2f")}
                                for r in rows])}


def draw(directory: pathlib.Path, rows: list[dict[str, Any]]):
  """Draws two figures: block efficiency, and speed over no drafts.

  Block efficiencies have 95 % intervals, speeds the quartiles over prompts.
  """
  temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
  for column, title in (("tokens_per_round", "tokens per round"),
                        ("speedup", "speed over decoding without drafts")):
    if column not in rows[0]:
      continue
    figure, axes = style.panels(len(temperatures), width=7.0)
    for panel, temperature in zip(axes[:, 0], temperatures):
      _draw_points(panel, [
          row for row in rows if row["temperature"] == temperature
          and row["drafter"] != ALONE], column)
      panel.set(ylabel=title, title=f"temperature {temperature:g}")
    end = column.split("_")[0]
    style.save(figure, directory / f"free_drafts_{end}.png")


def _draw_points(panel: Any, rows: list[dict[str, Any]], column: str):
  """Draws a group of points per prompt set, with a point per drafter."""
  names = list(dict.fromkeys(row["drafter"] for row in rows))
  sets = list(dict.fromkeys(row["prompts"] for row in rows))
  for i, (name, look) in enumerate(zip(names, style.looks(len(names)))):
    mine = [row for row in rows if row["drafter"] == name]
    panel.errorbar(
        [sets.index(row["prompts"]) + 0.8 * (i + 0.5) / len(names) - 0.4
         for row in mine], [row[column] for row in mine],
        style.errors(mine, column), capsize=2, markersize=4, label=name,
        **look | {"linestyle": "None"})
  panel.axhline(1, color="black", linewidth=0.8)
  panel.set_xticks(range(len(sets)), sets, rotation=30 * style.is_paper())
  panel.set_xticks(np.arange(len(sets) - 1) + 0.5, minor=True)
  panel.grid(axis="x", which="minor")
