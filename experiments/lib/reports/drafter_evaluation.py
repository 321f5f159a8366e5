"""Tables and figure of evaluate_drafter.py."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import math
import pathlib
from typing import Any

import numpy as np

from lib import common
from lib.conformance import Result
from lib.figures import style
from lib.reports import tables
from lib.rollouts import statistics
from specjax import analysis
from specjax.utils import files

CALLS = ("A target call is a complete pass of the target. A draft step with a "
         "part of the target (some of its layers, or a part of its cache) is "
         "not counted.")
_VISITS = 10  # fewer expected visits of a position give no probability
_EXPLAINED = {
    "Block efficiency": "Tokens per target call, with 95 % intervals over n "
    "clusters of prompts. " + CALLS,
    "Positions": "*Reached*: probability that the draft has this position and "
    "all its earlier tokens are accepted (token verification). *Accepted*: "
    "probability that the token is accepted if its position is reached. "
    "*Recall@K*: probability under the target of the K most likely tokens of "
    f"the drafter. A position that was reached less than {_VISITS} times has "
    "neither.",
    "Oracle length": "Tokens per target call of an ideal tree with the "
    "drafter's K most likely tokens at every position. A token of the target "
    "is accepted whenever it is among these K tokens. Sampled drafts are not "
    "restricted to these tokens, so more of them can be accepted.",
    "Entropy": "Probability that token verification accepts a token, by the "
    "entropy of the target's distribution in nats. *Share* is the share of "
    "positions with this entropy.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
  """Results of an evaluation, computed from its runs.

  Attributes:
    runs: `{unit: {kind of draft: run}}`. A unit is (fingerprint, temperature,
      seed, prompt set, index, digest of the prompt).
    gammas: draft lengths.
    temperatures: sampling temperatures.
    rules: names of the rules, by kind of draft.
    observed: names of the rules and statistics, by kind of draft (see
      `judging.Judge.observed`).
    sizes: sizes of trees in nodes, by kind of draft. The last one is that of
      the drafted trees. The other kinds of draft are chains.
    target_calls: `Drafter.target_calls` by kind of draft.
    cluster_of: function from a prompt's digest to its cluster label (see
      `analysis.estimate`).
  """

  runs: Mapping[tuple, Mapping[str, Any]]
  gammas: Sequence[int]
  temperatures: Sequence[float]
  rules: Mapping[str, Sequence[str]]
  observed: Mapping[str, Sequence[str]]
  sizes: Mapping[str, Sequence[int]]
  target_calls: Mapping[str, int]
  cluster_of: Callable[[str], str]

  def _cells(self):
    """Yields (prompt set or "all", temperature, kind of draft, units, runs)."""
    sets = list(dict.fromkeys(unit[3] for unit in self.runs))
    for kind, temperature in itertools.product(
        self.observed, self.temperatures):
      for name in ("all", *(sets if len(sets) > 1 else ())):
        units = [unit for unit in self.runs
                 if unit[1] == temperature and name in ("all", unit[3])]
        yield name, temperature, kind, units, [
            self.runs[unit][kind] for unit in units]

  def rows(self) -> list[dict[str, Any]]:
    """Returns the block efficiency for every combination of settings.

    The settings are prompt set, temperature, kind of draft, rule, and draft
    length (chains) or number of nodes (trees).
    """
    rows = []
    for name, temperature, kind, units, runs in self._cells():
      place = {"prompts": name, "temperature": temperature, "draft": kind}
      clusters = [self.cluster_of(unit[5]) for unit in units]
      calls = self.target_calls[kind]

      def efficiency(accepted, starts, size, clusters=clusters, calls=calls):
        found = analysis.block_efficiency(
            accepted, starts, clusters, longest=size, target_calls=calls)
        return {"num_prompts": len(starts), "clusters": found.clusters,
                "target_calls": calls, **found.columns("block_efficiency")}

      names = self.observed[kind]
      for rule in self.rules[kind]:
        for size in self.sizes.get(kind, self.gammas):
          smaller = statistics.sized(rule, size)
          at = 1 + names.index(smaller if smaller in names else rule)
          if kind in self.sizes:
            row = {"gamma": None, "nodes": size, **efficiency(
                [run["expected"][at] for run in runs],
                [run["rounds"] for run in runs], size)}
          else:
            survival = [run["survival"][at][:size + 1] for run in runs]
            starts, accepted = zip(*((x[0], sum(x[1:])) for x in survival))
            row = {"gamma": size, "nodes": None,
                   **efficiency(accepted, starts, size)}
          rows.append({**place, "verifier": rule, **row})
    return rows

  def _sums(self, kind: str, temperature: float) -> dict[str, np.ndarray]:
    """Returns the sums of rounds and of each statistic over all prompts.

    The sums of a statistic are an array `[N - 1]` over draft positions.
    """
    runs = [run[kind] for unit, run in self.runs.items()
            if unit[1] == temperature]
    sums = np.sum([run["survival"] for run in runs], axis=0)
    names = self.observed[kind]
    return {"rounds": sum(run["rounds"] for run in runs),
            **dict(zip(names, sums[1:, 1:]))}

  def positions(self, visits: float = _VISITS) -> list[dict[str, Any]]:
    """Returns acceptance and recall by temperature and draft position.

    They are NaN for positions with fewer expected visits than `visits`.
    Positions after the last one with a drafted token have no row.
    """
    rows = []
    for kind, temperature in itertools.product(
        self.observed, self.temperatures):
      names = self.observed[kind]
      if "drafted" not in names:
        continue
      shown = [name for name in names if name.startswith("recall") and (
          temperature or name in statistics.GREEDY)]
      sums = self._sums(kind, temperature)
      for i, drafted in enumerate(np.trim_zeros(sums["drafted"], "b")):
        share = lambda name, i=i, drafted=drafted, sums=sums: (
            float(sums[name][i] / drafted) if drafted > 0 and drafted >= visits
            else math.nan)
        rows.append({
            "temperature": temperature, "position": i + 1,
            "reached": float(drafted / sums["rounds"]),
            "accepted": share("overlap"),
            **{name.replace(" ", "@"): share(name) for name in shown}})
    return rows

  def oracle(self) -> list[dict[str, Any]]:
    """Returns the oracle length by temperature and number of candidates.

    The report of `write` defines the oracle length.
    """
    rows = []
    for temperature, some in itertools.groupby(
        self.positions(visits=0), lambda row: row["temperature"]):
      some = list(some)
      # `drafted` is the probability that a draft has this position, given that
      # the previous position is reached and its token is accepted.
      reached, accepted = (np.array([row[name] for row in some])
                           for name in ("reached", "accepted"))
      # Without accepted tokens at a position, no draft continues.
      before = np.append(1, (reached * accepted)[:-1])
      drafted = np.divide(reached, before, out=np.zeros_like(reached),
                          where=before > 0)
      for name in (x for x in some[0] if x.startswith("recall")):
        right = np.nan_to_num(drafted * [row[name] for row in some])
        rows.append({"temperature": temperature, "candidates": name[7:],
                     "length": float(1 + np.cumprod(right).sum())})
    return rows

  def entropies(self) -> list[dict[str, Any]]:
    """Returns the acceptance by the entropy of the target."""
    rows = []
    for kind, temperature in itertools.product(
        self.observed, self.temperatures):
      if "drafted 0" not in self.observed[kind] or temperature == 0:
        continue  # at temperature 0, the entropy is 0
      sums = self._sums(kind, temperature)
      for low, high in zip(statistics.BINS, statistics.BINS[1:]):
        drafted = sums[f"drafted {low:g}"].sum()
        rows.append({
            "temperature": temperature, "entropy": f"{low:g} to {high:g}",
            "share": float(drafted / sums["drafted"].sum()),
            "accepted": float(sums[f"overlap {low:g}"].sum() / drafted)
                        if drafted else math.nan})
    return rows


def write(output_dir: pathlib.Path, results: Results,
          faults: Result | None, title: str) -> None:
  """Prints the report, and writes it with its tables and figure.

  Args:
    output_dir: directory of the files.
    results: results of the evaluation.
    faults: result of the search for faults, or None without a search.
    title: names of the drafter and the target.
  """
  rows, positions = results.rows(), results.positions()
  found = {"Block efficiency": wide(rows)}
  if positions:
    found |= {"Positions": _formatted(positions, ".3f"),
               "Oracle length": _formatted(results.oracle(), ".2f"),
               "Entropy": _formatted(results.entropies(), ".3f")}
  text = f"# Evaluation of {title}\n"
  for name, table in found.items():
    if table:
      text += f"\n## {name}\n\n{_EXPLAINED[name]}\n\n{tables.markdown(table)}"
  text += _fault_section(faults)
  print(text, end="")
  with files.atomically(output_dir / "report.md") as f:
    f.write(text.encode())
  common.write_csv(output_dir / "evaluation.csv", rows)
  if positions:
    common.write_csv(output_dir / "positions.csv", [
        dict.fromkeys(max(positions, key=len), "") | row for row in positions])
    draw(output_dir, rows, positions)


def wide(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
  """Returns the rows of a table of block efficiency by draft length.

  The table has one column per draft length and size of trees.
  """
  table = {}
  for row in rows:
    place = row["prompts"], row["temperature"], row["draft"], row["verifier"]
    cells = table.setdefault(place, dict(
        prompts=row["prompts"], n=str(row["clusters"]),
        T=f"{row['temperature']:g}", draft=row["draft"],
        verifier=style.rule(row["verifier"])))
    column = (f"gamma {row['gamma']}" if row["gamma"]
              else f"{row['nodes']} nodes")
    cells[column] = tables.shown(row, "block_efficiency", ".2f")
  numbers = lambda name: sorted({row[name] for row in rows if row[name]})
  columns = ["prompts", "n", "T", "draft", "verifier",
             *(f"gamma {gamma}" for gamma in numbers("gamma")),
             *(f"{nodes} nodes" for nodes in numbers("nodes"))]
  return [dict.fromkeys(columns, "") | row for row in table.values()]


def _formatted(rows: list[dict[str, Any]], form: str) -> list[dict[str, str]]:
  """Returns rows with formatted numbers. Undefined numbers become ""."""
  columns = list(dict.fromkeys(name for row in rows for name in row))

  def cell(name, x):
    if name in ("temperature", "position"):
      return f"{x:g}"
    if isinstance(x, float):
      return "" if math.isnan(x) else format(x, form)
    return str(x)

  return [{name: cell(name, row.get(name, "")) for name in columns}
          for row in rows]


def _fault_section(faults: Result | None) -> str:
  if faults is None:
    return ""
  return f"\n## Faults\n\n{faults.summary}.\n" + "".join(
      f"{'' if i else chr(10)}- **{fault.fault}**: {fault.evidence}.\n"
      for i, fault in enumerate(faults.findings))


def draw(output_dir: pathlib.Path, rows: list[dict[str, Any]],
         positions: list[dict[str, Any]]) -> None:
  """Draws block efficiency by draft length, and acceptance by position."""
  temperatures = list(dict.fromkeys(row["temperature"] for row in positions))
  figure, axes = style.panels(len(temperatures), 2)
  for (left, right), temperature in zip(axes, temperatures):
    chains = [row for row in rows if row["temperature"] == temperature
              and row["prompts"] == "all" and row["gamma"]]
    rules = list(dict.fromkeys(row["verifier"] for row in chains))
    for i, rule in enumerate(rules):
      mine = [row for row in chains if row["verifier"] == rule]
      style.apart(left.errorbar(
          [row["gamma"] for row in mine],
          [row["block_efficiency"] for row in mine],
          style.errors(mine, "block_efficiency"), capsize=2, markersize=4,
          label=style.label(rule), **style.look(rule)), i, len(rules))
    left.set(xlabel="draft length", ylabel="tokens per target call",
             title=f"temperature {temperature:g}")
    if chains:  # trees have no draft lengths
      style.tried(left, [row["gamma"] for row in chains])
    mine = [row for row in positions if row["temperature"] == temperature]
    for name, look in zip(("reached", "accepted"), style.looks(2)):
      right.plot([row["position"] for row in mine],
                 [row[name] for row in mine], markersize=4, **look,
                 label=f"{name} (token verification)")
    style.whole(right)
    right.set(xlabel="position in the draft", ylabel="probability",
              ylim=(0, 1.02), title=f"temperature {temperature:g}")
  style.save(figure, output_dir / "evaluation.png")
