"""Acceptance and speed of every cell of verification_study.py.

A unit is a tuple for one prompt and seed: (fingerprint, temperature, seed,
prompt set, index, digest of the prompt). A cell is a combination of drafter,
draft length, temperature and verifier.

A gain is the block efficiency (tokens per target call) of a verifier divided by
that of token verification, minus 1. "gain" compares both on the same drafts.
"own_gain" compares the rollouts of each verifier. Every estimate has columns
"_low" and "_high", the 95 % interval over clusters of prompts.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
from statistics import median
from typing import Any

import numpy as np

from lib import common
from lib.reports import text_rounds
from lib.rollouts import statistics
import specjax as sj
from specjax import analysis

BASELINE = "autoregressive"
PROMPTS = "verification_prompts.csv"  # source of the intervals
_CELL = "drafter", "gamma", "temperature", "verifier"
_PLACE = *_CELL, "prompts", "number", "seed", "cluster"
_SUMS = "own_accepted", "own_rounds", "shared_accepted", "shared_rounds"


def key(drafter: str, gamma: int, verifier: str):
  """Returns the name of a configuration in runs.jsonl."""
  return f"{drafter} {gamma} {verifier}"


def shared_key(drafter: str):
  """Returns the name of the configuration with the shared drafts.

  The shared drafts are from rollouts of token verification with the largest
  gamma. If rollouts are not timed, they are stored under the `key` of token
  verification instead of this name.
  """
  return f"{drafter} shared"


def observers(verifiers: Mapping[str, sj.Verifier], gammas: Sequence[int]
              ) -> dict[tuple[str, int | None], sj.Verifier]:
  """Returns the observers of the shared drafts, by verifier and draft length.

  The first tokens of a long draft are a short draft. For the verifiers of
  specjax, P(tau >= i) given the first i tokens does not depend on the draft
  length, so one observer serves all lengths (its length is None). Other
  verifiers also evaluate the first tokens alone.

  Args:
    verifiers: verifiers by name.
    gammas: draft lengths in increasing order.
  """
  return {(name, None): rule for name, rule in verifiers.items()} | {
      (name, gamma): statistics.Subtree(rule, tuple(range(gamma + 1)))
      for name, rule in verifiers.items() if name not in common.VERIFIERS
      for gamma in gammas[:-1]}


class Study:
  """Runs of all configurations, and results of every cell.

  Attributes:
    runs: `{unit: {name of a configuration: run}}`.
    drafters: names of the drafters.
    gammas: draft lengths.
    verifiers: verifiers by name.
    costs: time per pass in seconds, `{"verify": {gamma: ...}, "draft":
      {drafter: ...}}`, or None if the latency was not measured.
    cluster_of: function from a prompt's digest to its cluster label (see
      `analysis.estimate`).
  """

  def __init__(self, runs: dict[tuple, dict[str, dict[str, Any]]],
               drafters: list[str], gammas: Sequence[int],
               verifiers: Mapping[str, sj.Verifier],
               costs: dict[str, Any] | None = None,
               cluster_of: Callable[[str], str] = lambda digest: digest):
    self._runs, self._costs, self._cluster_of = runs, costs, cluster_of
    self._drafters, self._gammas, self._verifiers = drafters, gammas, verifiers

  def rows(self, prompts: str | None = None):
    """Returns the table rows of all cells, one row per cell.

    Args:
      prompts: name of a prompt set. None combines all sets.
    """
    rows = []
    for mine, base in _cells([row for row in self.prompt_rows()
                              if prompts in (None, row["prompts"])]):
      cell = {name: mine[0][name] for name in _CELL}
      rows.append({
          "prompts": prompts or "all", **cell,
          "num_prompts": len({(r["prompts"], r["number"]) for r in mine}),
          "lossless": self._verifiers[cell["verifier"]].lossless,
          "remembers": self._verifiers[cell["verifier"]].remembers,
          **columns(mine, base), **self._speed(
              self._units(cell["temperature"], prompts), cell["drafter"],
              cell["gamma"], cell["verifier"])})
    return rows

  def baseline_speed(self):
    """Returns tokens per second of autoregressive decoding; None if untimed."""
    runs = [runs[BASELINE] for runs in self._runs.values() if BASELINE in runs]
    return _tokens_per_second(runs) if runs else None

  def half_width(self, verifier: str):
    """Returns the largest half width of the intervals of a verifier's gain.

    The gain is that on the same drafts. The maximum is over all drafters,
    temperatures and draft lengths. If a gain has no interval, returns None.
    """
    return self._widest(verifier, lambda gain: (gain.high - gain.low) / 2)

  def clusters_needed(self, verifier: str, half_width: float):
    """Returns the number of clusters that a half width of all gains requires.

    If a gain has no interval, returns None.
    """
    return self._widest(verifier, lambda gain: analysis.clusters_needed(
        gain, half_width))

  def _widest(self, verifier: str, figure: Callable):
    """Returns the maximum of `figure(gain)`, or None without an interval."""
    rows = self.prompt_rows([verifier])
    gains = [estimates(rows, base)["gain"] for rows, base in _cells(rows)
             if rows[0]["verifier"] == verifier]
    if any(np.isnan(gain.low) for gain in gains):
      return None
    return max(map(figure, gains))

  def prompt_rows(self, verifiers: list[str] | None = None):
    """Returns the acceptance of every rollout in every cell.

    All intervals are computed from these rows. The columns "own_*" are sums
    over the verifier's own rollouts. The columns "shared_*" are sums over the
    drafts that all verifiers evaluate.
    """
    verifiers = list(dict.fromkeys(("token", *(verifiers or self._verifiers))))
    rows = []
    for drafter, (unit, runs), gamma, verifier in itertools.product(
        self._drafters, self._runs.items(), self._gammas, verifiers):
      _, temperature, seed, prompts, number, digest = unit
      place = (drafter, gamma, temperature, verifier, prompts, number, seed,
               self._cluster_of(digest))
      rows.append(dict(zip(_PLACE, place)) | dict.fromkeys(_SUMS, 0)
                  | self._acceptance(runs, drafter, gamma, verifier))
    return rows

  def _acceptance(self, runs: dict[str, dict[str, Any]], drafter: str,
                  gamma: int, verifier: str):
    """Returns the accepted tokens and rounds of a rollout."""
    shared = (runs.get(shared_key(drafter))
              or runs[key(drafter, max(self._gammas), "token")])
    # Entry 0 is that of the rollout's rule. The verifiers follow in order.
    observed = list(observers(self._verifiers, self._gammas))
    survival = shared["survival"][1 + observed.index(
        at if (at := (verifier, gamma)) in observed else (verifier, None))]
    found = {"shared_accepted": sum(survival[1:gamma + 1]),
             "shared_rounds": shared["rounds"]}
    own = runs.get(key(drafter, gamma, verifier))
    if own:  # only some prompts of a study have own rollouts
      found |= {"own_accepted": own["expected"][0], "own_rounds": own["rounds"]}
    return found

  def _units(self, temperature: float, prompts: str | None = None):
    return [unit for unit in self._runs
            if unit[1] == temperature and prompts in (None, unit[3])]

  def _speed(self, units: list[tuple], drafter: str, gamma: int, verifier: str):
    """Returns the speed columns of a cell. Empty if no run was timed."""
    name = key(drafter, gamma, verifier)
    units = [unit for unit in units if BASELINE in self._runs[unit]]
    pairs = [(self._runs[unit][name], self._runs[unit][BASELINE])
             for unit in units]
    if not pairs:
      return {}
    own_runs, base_runs = zip(*pairs)
    own = _tokens_per_second(own_runs)
    if self._costs is None:
      return {"throughput": own, "throughput_gain":
              own / _tokens_per_second(base_runs) - 1}
    halves = [[(*pair, self._cluster_of(unit[5]))
               for unit, pair in zip(units, pairs) if unit[4] % 2 == half]
              for half in (0, 1)]
    return {"tokens_per_second": own, **_speedups(halves),
            **self._round_costs(drafter, gamma, own_runs)}

  def _round_costs(self, drafter: str, gamma: int, runs: list[dict[str, Any]]):
    """Returns the costs in a round, in milliseconds.

    They are those of the target call, of drafting one token, and the overhead.
    """
    verify = self._costs["verify"][gamma]
    draft = self._costs["draft"][drafter]
    per_round = median(r["seconds"] / r["rounds"] for r in runs)
    return {"verify_ms": 1e3 * verify, "draft_ms": 1e3 * draft,
            "overhead_ms": 1e3 * (per_round - (verify + gamma * draft))}


def _tokens_per_second(runs: Sequence[dict[str, Any]]) -> float:
  """Returns the tokens per second of all runs together."""
  return sum(r["tokens"] for r in runs) / sum(r["seconds"] for r in runs)


def _speedups(halves: list[list[tuple]]):
  """Returns the measured and the predicted speed-up, as medians over prompts.

  The prediction is the block efficiency of the prompt, divided by the cost of a
  round on the other half of the prompts. It assumes that the cost of a round is
  equal for all prompts. It makes no assumption about acceptance.

  Args:
    halves: two lists of `(run, autoregressive run, cluster label)`, one per
      half of the prompts.
  """
  # The cost of a round, in autoregressive steps of the same prompt. The ratio
  # cancels the speed of the machine, because it timed both runs.
  steps = [median(
      (r["seconds"] / r["rounds"]) / (b["seconds"] / b["tokens"])
      for r, b, _ in half) for half in halves]
  measured, predicted = [], []
  for half, other_steps in zip(halves, steps[::-1]):
    for run, base, _ in half:
      measured.append(base["seconds"] / base["tokens"]
                      / (run["seconds"] / run["tokens"]))
      efficiency = 1 + run["expected"][0] / run["rounds"]
      predicted.append(efficiency / other_steps)
  clusters = [cluster for half in halves for *_, cluster in half]
  return {**text_rounds.median(measured, clusters).columns("speedup"),
          "predicted_speedup": median(predicted),
          "measured_over_predicted": median(
              np.divide(measured, predicted))}


def _cells(rows: list[dict[str, Any]]):
  """Groups rows by cell.

  Returns:
    Pairs `(rows of a cell, rows of token verification)`. Both lists have the
    same prompts in the same order.
  """
  cells = {}
  for row in rows:
    cells.setdefault(tuple(row[name] for name in _CELL), []).append(row)
  return [(mine, cells[*cell[:3], "token"]) for cell, mine in cells.items()]


def estimates(rows: list[dict[str, Any]], base: list[dict[str, Any]]):
  """Returns the acceptance of one cell as `{name: analysis.Estimate}`.

  Args:
    rows: rows of `Study.prompt_rows` of the cell.
    base: rows of token verification with the same prompts.
  """
  def add(kind, names):
    mine, other = _with_rounds(kind, rows, base)
    if not mine:
      return {}
    clusters = [r["cluster"] for r in mine]
    sums, base_sums = ([np.array([r[f"{kind}_{name}"] for r in x], np.float64)
                        for name in ("accepted", "rounds")]
                       for x in (mine, other))
    tokens = analysis.block_efficiency(
        *sums, clusters, longest=rows[0]["gamma"])
    return dict(zip(names, (tokens, analysis.relative_gain(
        *sums, *base_sums, clusters=clusters, longest=rows[0]["gamma"]))))

  return (add("shared", ("paired_block_efficiency", "gain"))
          | add("own", ("block_efficiency", "own_gain")))


def _with_rounds(kind: str, rows: list[dict[str, Any]],
                 base: list[dict[str, Any]]):
  """Returns the rows of both lists whose prompts have rollouts of a kind."""
  return ([r for r in x if r[f"{kind}_rounds"]] for x in (rows, base))


def columns(rows: list[dict[str, Any]], base: list[dict[str, Any]]):
  """Returns the `estimates` and rounds of a cell as columns of a table.

  The table is verification.csv. Rounds are counted per rollout of the verifier.
  A rollout ends at --max_new_tokens or an eos.

  Args:
    rows: rows of `Study.prompt_rows` of the cell.
    base: rows of token verification with the same prompts.
  """
  found = estimates(rows, base)
  result = {"clusters": found["gain"].clusters}
  for name in ("block_efficiency", "own_gain", "paired_block_efficiency",
               "gain"):
    if name in found:
      result |= found[name].columns(name)
  if "own_gain" in found:
    if found["own_gain"].clusters < found["gain"].clusters:
      result["own_clusters"] = found["own_gain"].clusters
    rows, base = _with_rounds("own", rows, base)
    rounds, other = ([r["own_rounds"] for r in x] for x in (rows, base))
    clusters = [r["cluster"] for r in rows]
    result |= (text_rounds.columns(rounds, clusters)
               | text_rounds.compared(rounds, other, clusters))
  return result


def recomputed(rows: list[dict[str, Any]], prompt_rows: list[dict[str, Any]]):
  """Recomputes rows of verification.csv from verification_prompts.csv."""
  found = []
  for row in rows:
    mine = [r for r in prompt_rows if row["prompts"] in ("all", r["prompts"])
            and all(r[name] == row[name] for name in _CELL[:3])]
    [(mine, base)] = [cell for cell in _cells(mine)
                      if cell[0][0]["verifier"] == row["verifier"]]
    found.append(row | columns(mine, base))
  return found
