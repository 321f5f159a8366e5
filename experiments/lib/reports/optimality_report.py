"""Figures of optimality.py."""

import pathlib
from typing import Any

import numpy as np

from lib.figures import style
from lib.reports import growth
from lib.reports import several_rounds


def draw(directory: pathlib.Path, rows: list[dict[str, Any]],
         found: dict[str, Any]):
  """Writes the six figures.

  Args:
    directory: directory of the figures.
    rows: rows of optimality.csv.
    found: content of optimality.json.
  """
  path = lambda name: directory / f"optimality_{name}.png"
  _plot_rounds(found["bernoulli"], path("rounds"))
  _plot_pairs(rows, path("pairs"))
  several_rounds.plot_counterexample(path("two_rounds"))
  several_rounds.plot_best_rules(found, path("best_rules"))
  _plot_extremal(found["extremal"], path("extremal"))
  growth.plot(found["growth"], {
      row["gamma"]: row["supremum"] for row in found["extremal"]},
              path("growth"))


def _plot_rounds(bernoulli: dict[str, list[float]], path: pathlib.Path):
  """Plots expected tokens per round against the number of rounds, by rule."""
  figure, [[axes]] = style.panels()
  for name, totals in bernoulli.items():
    rounds = np.arange(1, len(totals) + 1)
    axes.plot(rounds, np.array(totals) / rounds, label=style.label(name),
              **style.look(name))
  axes.set(xlabel="rounds", ylabel="expected tokens per round", xticks=rounds)
  style.save(figure, path, "The paper's Bernoulli example, gamma 2")


def _plot_pairs(rows: list[dict[str, Any]], path: pathlib.Path):
  """Plots the accepted tokens of each rule against those of full information.
  """
  figure, grid = style.panels(1, 2, sharex=True, sharey=True)
  top = max(r["full_information"] for r in rows)
  for axes, name in zip(grid[0], ("token", "block")):
    axes.plot([0, top], [0, top], color="grey", linewidth=0.8, zorder=1,
              label="full information")
    axes.scatter([r["full_information"] for r in rows],
                 [r[name] for r in rows], s=9, color=style.color(name),
                 marker=style.look(name)["marker"],
                 label=style.label(name))
    axes.set(xlabel="accepted with full information")
  grid[0, 0].set_ylabel("accepted tokens, expected")
  style.save(figure, path, f"{len(rows)} random pairs of models")


def _plot_extremal(rows: list[dict[str, Any]], path: pathlib.Path):
  """Plots the largest ratio of block to token verification against gamma."""
  figure, [[axes]] = style.panels()
  gammas = sorted({r["gamma"] for r in rows})
  kinds = ("i.i.d.", "context")
  for models, look in zip(kinds, style.looks(len(kinds))):
    best = [max(r["ratio"] for r in rows
                if r["gamma"] == g and r["models"] == models) for g in gammas]
    axes.plot(gammas, best, label=f"found by ascent,\n{models} models",
              **look)
  axes.plot(gammas, [next(r["supremum"] for r in rows if r["gamma"] == g)
                     for g in gammas], "k:", label="supremum (grid)")
  axes.set(xlabel="draft length gamma", ylabel="block over token")
  style.tried(axes, gammas)
  style.save(figure, path, "The largest ratio of tokens in one round")
