"""Table and figures of tree_study.py."""

from collections.abc import Sequence
import pathlib
import statistics
from typing import Any

import numpy as np

from lib import common
from lib.figures import style
from lib.reports import tables
from lib.reports import text_rounds
from specjax import analysis
from specjax.analysis import Estimate

BASELINE, FASTEST = "autoregressive", "dynamic_program"


def figures(runs: list[dict[str, dict[str, Any]]], own: str, shared: str,
            law: int, best: int | None, clusters: Sequence[str]):
  """Returns the results of a configuration on its own and on shared rollouts.

  The baseline and the dynamic program's choice do not depend on the node
  budget. They are decoded again for every budget, with identical output. Speeds
  are computed from all these runs, and token counts from the runs of the first
  budget.

  Args:
    runs: `{configuration: run}` for every budget and prompt, in this order.
    own: name of the configuration.
    shared: name of the configuration that generated the shared rollouts.
    law: index of the configuration's verifier among the verifiers of the shared
      rollouts.
    best: index of the best possible verifier among these verifiers, or None.
    clusters: cluster labels of the prompts (see `analysis.estimate`).

  Returns:
    Columns of a row. They include the speed if the runs have "seconds".
  """
  once = runs[:len(clusters)]
  others, mine = ([run[name] for run in once] for name in (shared, own))
  tokens, alone = (analysis.block_efficiency(
      [r["expected"][i] for r in rollouts], [r["rounds"] for r in rollouts],
      clusters, longest=len(rollouts[0]["survival"][i]) - 1)
                   for rollouts, i in ((others, law), (mine, 0)))
  return {"clusters": alone.clusters, **tokens.columns("tokens_per_pass"),
          **alone.columns("own_tokens_per_pass"),
          **text_rounds.columns([r["rounds"] for r in mine], clusters),
          **_over_best(others, law, best, clusters),
          **_speed(runs, own, clusters)}


def _speed(runs: list[dict[str, dict[str, Any]]], own: str,
           clusters: Sequence[str]) -> dict[str, float | None]:
  """Returns the columns of speed. Empty if the runs were not timed."""
  if "seconds" not in runs[0][own]:
    return {}
  pace, baseline = (np.array([
      run[name]["seconds"] / run[name]["tokens"] for run in runs])
                    for name in (own, BASELINE))
  speedup = text_rounds.median(
      baseline / pace, [*clusters] * (len(runs) // len(clusters)))
  return {"tokens_per_second": 1 / statistics.median(pace),
          **speedup.columns("speedup")}


def _over_best(runs: list[dict[str, Any]], law: int, best: int | None,
               clusters: Sequence[str]) -> dict[str, float | None]:
  """Returns the gain of verifier `law` over verifier `best`, as columns."""
  if best is None:
    return dict.fromkeys(("over_best", "over_best_low", "over_best_high"))
  rounds = [r["rounds"] for r in runs]
  totals, most = ([sum(r["survival"][i][1:]) for r in runs]
                  for i in (law, best))
  return analysis.relative_gain(
      totals, rounds, most, rounds, clusters=clusters,
      longest=len(runs[0]["survival"][law]) - 1).columns("over_best")


def print_table(rows: list[dict[str, Any]]):
  """Prints the results of every method and number of nodes."""
  width = max(len(style.label(r["method"])) for r in rows)
  timed = "speedup" in rows[0]
  shown = lambda row, name: f"{Estimate.of_columns(row, name):.3f}"
  print(f"{'':{width + 10}s} {'tokens per pass of the target':>54s}")
  print(f"{'T':>4s} {'method':{width}s} {'nodes':>5s} {'same drafts':>26s} "
        f"{'own rollouts':>26s}"
        + (f" {'tokens/s':>9s} {'speed-up':>8s}" if timed else ""))
  for r in rows:
    print(f"{r['temperature']:4g} {style.label(r['method']):{width}s} "
          f"{r['nodes']:5d} "
          f"{shown(r, 'tokens_per_pass'):>26s} "
          f"{shown(r, 'own_tokens_per_pass'):>26s}"
          + (f" {r['tokens_per_second']:9.1f} {r['speedup']:7.2f}x" if timed
             else ""))
  _print_rounds(rows, width)
  print("95 % intervals over prompts")
  if timed:
    _print_choices(rows)


def _print_choices(rows: list[dict[str, Any]]):
  """Compares the dynamic program's choice with the fastest measured tree."""
  for temperature in dict.fromkeys(r["temperature"] for r in rows):
    mine = [r for r in rows if r["temperature"] == temperature]
    chosen = next(r for r in mine if r["method"] == FASTEST)
    best = max(mine, key=lambda r: r["speedup"])
    print(f"temperature {temperature:g}: the dynamic program's choice has "
          f"{len(chosen['parents'])} nodes and "
          f"{chosen['speedup'] / best['speedup']:.2f} times the best measured "
          f"speed-up ({style.label(best['method'])}, {best['nodes']} nodes)")


def _print_rounds(rows: list[dict[str, Any]], width: int) -> None:
  """Prints rounds per sequence, and the distance from the best verifier."""
  print("rounds until a sequence is complete, own rollouts; tokens per pass "
        "over those of the best possible verifier in one round, same drafts:")
  print(f"{'T':>4s} {'method':{width}s} {'nodes':>5s} {'mean':>26s} "
        f"{'90 % quantile':>20s} {'over the best':>38s}")
  for r in rows:
    over = ""
    if r["over_best"] is not None:
      over = f"{Estimate.of_columns(r, 'over_best'):+.1%}"
    elif r["over_bound"] is not None:
      over = f"at least {Estimate.of_columns(r, 'over_bound'):+.1%}"
    print(f"{r['temperature']:4g} {style.label(r['method']):{width}s} "
          f"{r['nodes']:5d} "
          f"{format(Estimate.of_columns(r, 'rounds'), '.1f'):>26s} "
          f"{format(Estimate.of_columns(r, 'rounds_p90'), '.0f'):>20s} "
          f"{over:>38s}")


def write(directory: pathlib.Path, rows: list[dict[str, Any]]):
  """Writes trees.csv and the figures of `draw`."""
  common.write_csv(directory / "trees.csv", rows)
  draw(directory, rows)


def captioned(rows: list[dict[str, Any]]) -> dict[str, tables.Table]:
  """Returns the table of all methods, by caption."""
  return {"Tokens per target call and speed of draft trees":
          tables.without_empty([{
              "T": f"{r['temperature']:g}", "method": style.label(r["method"]),
              "nodes": str(r["nodes"]),
              "tokens, same drafts": tables.shown(r, "tokens_per_pass", ".2f"),
              "tokens, own rollouts": tables.shown(
                  r, "own_tokens_per_pass", ".2f"),
              "speed-up": f"{r['speedup']:.2f}" if "speedup" in r else "-"}
                                for r in rows])}


def draw(directory: pathlib.Path, rows: list[dict[str, Any]]):
  """Writes the figures from rows of trees.csv."""
  _plot(rows, directory / "trees_tokens.png", "tokens_per_pass",
        "tokens per target call", "Tokens per target call, same drafts "
        "for all rules on the same trees; 95 % intervals over prompts")
  if "speedup" in rows[0]:
    _plot(rows, directory / "trees_speed.png", "speedup", "speed-up",
          "Speed over that of autoregressive decoding, median over prompts"
          + "; 95 % intervals" * ("speedup_low" in rows[0]))


def _plot(rows: list[dict[str, Any]], path: pathlib.Path, figure_of: str,
          name: str, title: str):
  """Plots a panel for every temperature, with a curve for every method."""
  temperatures = list(dict.fromkeys(r["temperature"] for r in rows))
  figure, grid = style.panels(1, len(temperatures), height=3.8, sharey=True)
  for axes, temperature in zip(grid[0], temperatures):
    _plot_panel(axes, [r for r in rows if r["temperature"] == temperature],
                figure_of)
    axes.set_title(f"temperature {temperature:g}", fontsize=10)
    axes.set_xlabel("nodes per pass, including the root")
  grid[0, 0].set_ylabel(name)
  style.save(figure, path, title)


def _plot_panel(axes: Any, rows: list[dict[str, Any]], figure_of: str) -> None:
  """Plots the curves of one temperature."""
  lines = {}
  for r in rows:
    lines.setdefault(r["method"], []).append(r)
  lines.pop(BASELINE, None)
  chosen = lines.pop(FASTEST, None)
  for place, (method, line) in enumerate(lines.items()):
    style.apart(axes.errorbar(
        [r["nodes"] for r in line], [r[figure_of] for r in line],
        style.errors(line, figure_of), markersize=4, capsize=2,
        label=style.label(method), **style.look(method)), place, len(lines))
  nodes = [r["nodes"] for line in lines.values() for r in line]
  if figure_of == "speedup":  # the dynamic program chooses the number of nodes
    [chosen] = chosen
    nodes.append(chosen["nodes"])
    axes.plot(chosen["nodes"], chosen[figure_of], markersize=11,
              label=style.label(FASTEST), **style.look(FASTEST))
    axes.axhline(1, color=style.color(BASELINE), linewidth=0.8,
                 label=style.label(BASELINE))
  style.tried(axes, nodes)
