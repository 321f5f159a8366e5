"""Tables and figures of self_drafting_study.py.

Arguments of several functions: `rows` contains the results, one row for each
drafter and verifier. `paired` contains the gains of verifiers on the same
drafts. `sources` contains the drafters with their targets.
"""

from collections.abc import Callable
import pathlib
from typing import Any

import numpy as np

from lib.figures import style
from lib.reports import tables
from specjax.analysis import Estimate

_SHOWN = 6  # printed positions of a draft, and printed guesses of a head
_UNTRAINED = "untrained "  # prefix of the names of heads before training
# Names in `style` for verifiers on draft trees, by (kind of draft, verifier).
_ON_TREES = {
    ("sampled tree", "recursive"): "without_replacement",
    ("sampled tree", "traversal"): "traversal",
    ("i.i.d. tree", "recursive"): "specinfer",
    ("i.i.d. tree", "traversal"): "iid_traversal",
    ("i.i.d. tree", "k_seq"): "k_seq",
    ("top-k tree", "target_walk"): "top_k",
    ("dynamic tree", "target_walk"): "top_k",
    ("best-first tree", "target_walk"): "top_k",
    ("sampled dynamic tree", "recursive"): "without_replacement",
    ("sampled dynamic tree", "traversal"): "traversal",
}


def _kind(drafter: str):
  """Returns the kind of draft, which is the part of a name after ", ".

  Returns "" if the name has no such part.
  """
  return drafter.partition(", ")[2]


def _method(row: dict[str, Any]):
  """Returns the name in `style` of a row's draft and verifier."""
  return _ON_TREES.get((_kind(row["drafter"]), row["verifier"]),
                       row["verifier"])


def print_tables(rows: list[dict[str, Any]], paired: list[dict[str, Any]],
                 sources: list):
  """Prints block efficiency, paired gains and accuracy of the heads."""
  width = max(len(r["drafter"]) for r in rows)
  shown = lambda row: f"{Estimate.of_columns(row, 'block_efficiency'):.3f}"
  speeds = (f"{'speed-up':>8s} {'predicted':>9s} {'draft/step':>10s} "
            if "speedup" in rows[0] else "")
  print(f"{'T':>3s} {'drafter':{width}s} {'verifier':15s} "
        f"{'tokens/round':>26s} {'/pass':>6s} {speeds}{'added':>9s}  "
        "accepted to position 1, 2, ...")
  for r in rows:
    print(f"{r['temperature']:3g} {r['drafter']:{width}s} "
          f"{style.rule(r['verifier']):15s} "
          f"{shown(r):>26s} "
          f"{r['block_efficiency'] / r['target_calls']:6.2f} "
          + (f"{r['speedup']:7.2f}x {r['predicted_speedup']:8.2f}x "
             f"{r['draft_over_step']:10.2f} " if speeds else "")
          + f"{r['added_parameters']:9,d}  "
          + " ".join(f"{x:.2f}" for x in r["survival"][:_SHOWN]))
  print("95 % intervals over prompts; /pass: tokens per pass of the target; "
        "added: parameters\nof the drafter\n")
  for p in paired:
    print(f"temperature {p['temperature']:g}, {p['drafter']}: gain of "
          f"{style.rule(p['verifier'])} over {style.rule(p['over'])} on the "
          f"same drafts {Estimate.of_columns(p, 'gain'):+.1%}")
  _print_accuracy(sources)


def _print_accuracy(sources: list):
  """Prints the training and the accuracy of every head."""
  print("\nshare of positions where guess 1, 2, ... of a head equals the "
        "target's greedy token")
  for source in sources:
    if source.training:
      print(f"{source.name}: {source.training['method']}, "
            f"{source.training['tokens'] / 1e6:.1f}M tokens in "
            f"{source.training['minutes']:.0f} minutes")
    if source.accuracy is not None:
      for k, row in enumerate(source.accuracy, 1):
        print(f"{source.name:20s} head {k}: "
              + " ".join(f"{x:.3f}" for x in row[:_SHOWN]))


def captioned(rows: list[dict[str, Any]]) -> dict[str, tables.Table]:
  """Returns the table of all drafters, by caption."""
  return {"Tokens per round, target calls per round, and speed":
          tables.without_empty([{
              "T": f"{r['temperature']:g}", "drafter": r["drafter"],
              "verifier": style.rule(r["verifier"]),
              "tokens per round": tables.shown(r, "block_efficiency", ".2f"),
              "target calls": str(r["target_calls"]),
              "speed-up": f"{r['speedup']:.2f}" if "speedup" in r else "-"}
                                for r in rows])}


def draw(directory: pathlib.Path, rows: list[dict[str, Any]],
         curves: dict[str, list], name: str = "self_drafting"):
  """Writes the figures.

  Args:
    directory: output directory.
    rows: rows of self_drafting.csv. Without speeds, the speed figure is
      skipped.
    curves: learning curves of the heads, `{name: [(training tokens, block
      efficiency)]}`.
    name: prefix of all file names.
  """
  _plot_drafts(
      rows, directory / f"{name}_tokens.png",
      lambda r: r["block_efficiency"] / r["target_calls"],
      lambda r: style.errors([r], "block_efficiency") / r["target_calls"],
      "tokens per target call",
      "Tokens per target call; 95 % intervals over prompts")
  if "speedup" in rows[0]:
    _plot_drafts(
        rows, directory / f"{name}_speed.png", lambda r: r["speedup"],
        lambda r: style.errors([r], "speedup"), "speed-up",
        "Speed over that of autoregressive decoding, median over prompts"
        + "; 95 % intervals" * ("speedup_low" in rows[0]))
  _plot_positions(rows, directory / f"{name}_positions.png")
  if curves:
    _plot_training(curves, directory / f"{name}_training.png")


def _plot_drafts(rows: list[dict[str, Any]], path: pathlib.Path,
                 value: Callable, error: Callable, name: str, title: str):
  """Plots a line for every draft and a point for every verifier.

  Untrained heads have hollow points. If a round has two target passes, a tick
  in the figure of tokens per pass shows the tokens per round.
  """
  drafts = list(dict.fromkeys(
      r["drafter"].removeprefix(_UNTRAINED) for r in rows))
  temperatures = list(dict.fromkeys(r["temperature"] for r in rows))
  figure, grid = style.panels(
      1, len(temperatures), width=4.4, height=1 + 0.3 * len(drafts),
      sharey=True, sharex=True)
  for axes, temperature in zip(grid[0], temperatures):
    mine = [r for r in rows if r["temperature"] == temperature]
    for r in sorted(mine, key=lambda r: r["drafter"].startswith(_UNTRAINED)):
      _plot_draft(axes, r, _height(r, mine, drafts), value(r), error(r),
                  name == "tokens per target call")
    axes.set_yticks(range(len(drafts)), drafts, fontsize=8)
    axes.set_title(f"temperature {temperature:g}", fontsize=10)
    axes.set_xlabel(name)
    axes.axvline(1, color=style.color("autoregressive"), linewidth=0.8,
                 label=style.label("autoregressive"))
  grid[0, 0].invert_yaxis()
  style.save(figure, path, title)


def _height(row: dict[str, Any], rows: list[dict[str, Any]],
            drafts: list[str]) -> float:
  """Returns the y of a point: the draft's line, shifted by its verifier."""
  draft = row["drafter"].removeprefix(_UNTRAINED)
  rules = [r["verifier"] for r in rows if r["drafter"] == draft]
  return drafts.index(draft) + 0.22 * (
      rules.index(row["verifier"]) - (len(rules) - 1) / 2)


def _plot_draft(axes: Any, row: dict[str, Any], y: float, value: float,
                error: Any, of_tokens: bool) -> None:
  """Plots the point of one draft and verifier."""
  before = row["drafter"].startswith(_UNTRAINED)
  look = ({"color": "black", "marker": "o", "markerfacecolor": "none"}
          if before else style.look(_method(row)))
  axes.errorbar(
      value, y, xerr=error, markersize=5, **look | {"linestyle": "None"},
      label="before training" if before else style.label(_method(row)))
  if of_tokens and not before and row["target_calls"] > 1:
    axes.plot(row["block_efficiency"], y, "|", color=look["color"],
              markersize=9,
              label="tokens per round\nof two passes")


def _plot_positions(rows: list[dict[str, Any]], path: pathlib.Path):
  """Plots the acceptance by draft position, with one panel per drafter."""
  first = rows[0]["temperature"]
  found = {}  # {source: {kind: row of the first verifier}}
  for r in rows:
    if r["temperature"] == first and not r["drafter"].startswith(_UNTRAINED):
      source = r["drafter"].partition(", ")[0]
      found.setdefault(source, {}).setdefault(_kind(r["drafter"]), r)
  kinds = list(dict.fromkeys(k for kept in found.values() for k in kept))
  looks = dict(zip(kinds, style.looks(len(kinds))))
  columns = len(found) if style.is_paper() else min(4, len(found))
  figure, grid = style.panels(
      -(-len(found) // columns), columns, width=2.6, height=2.4, sharex=True,
      sharey=True)
  for axes in grid.flat[len(found):]:
    axes.set_visible(False)
  for axes, (source, drafts) in zip(grid.flat, found.items()):
    for place, (kind, r) in enumerate(drafts.items()):
      positions = np.arange(1, len(r["survival"]) + 1)
      style.apart(axes.plot(
          positions, r["survival"], markersize=4, label=kind or "chain",
          **looks[kind]), place, len(drafts))
    axes.set_title(source, fontsize=9)
    axes.set_ylim(0, 1.05)
    style.whole(axes)
  for axes in grid[:, 0]:
    axes.set_ylabel("P(accepted)")
  for axes in grid.flat[:len(found)][-columns:]:
    axes.set_xlabel("position")
  style.save(figure, path, "Probability that a draft is accepted up to a "
             f"position, temperature {first:g}")


def _plot_training(curves: dict[str, list], path: pathlib.Path):
  """Plots learning curves, at most `style.MOST` per panel."""
  names = list(curves)
  groups = [names[i:i + style.MOST] for i in range(0, len(names), style.MOST)]
  figure, grid = style.panels(1, len(groups), sharex=True, sharey=True)
  for axes, group in zip(grid[0], groups):
    for name, look in zip(group, style.looks(len(group))):
      tokens, value = zip(*curves[name])
      style.line(axes, np.array(tokens) / 1e6, value, label=name, **look)
    axes.set_xlabel("million training tokens")
  grid[0, 0].set_ylabel("tokens per round")
  style.save(figure, path, "The heads' most likely chain on held-out rows")
