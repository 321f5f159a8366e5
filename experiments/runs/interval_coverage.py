"""Measures the coverage of the intervals of `analysis.estimate` by simulation.

  python experiments/runs/interval_coverage.py \
    --output=experiments/results/interval_coverage.csv

Prints the table of the docstring of `analysis.estimate`, and writes a CSV file.
A row of the CSV contains the coverage and the two kinds of misses: the share of
intervals with the true value below them ("true_below"), and above them
("true_above").

A simulated prompt has a block efficiency e under a first rule, and a larger one
under a second rule. It has about 128 / e rounds, because it generates 128
tokens. Columns of the CSV:

  clusters:
    equal: every prompt is a cluster, and prompts generate equally many tokens.
    unequal prompts: every prompt is a cluster. The numbers of tokens have a
      lognormal distribution (sigma 0.6).
    shared: clusters of 1 to 4 prompts, which have nearly the same efficiency.
    labels only: clusters of 1 to 4 prompts, which are independent.
  values: distribution of the efficiency. It is at most 9 (8 draft tokens).
    "rare copies": every tenth cluster copies text and has an efficiency of 6
    to 8. All others have an efficiency of about 2.
  figure:
    efficiency: block efficiency, a quotient of two sums.
    gain: gain of the second rule on the same drafts.
    own gain: gain of the second rule, with its own numbers of rounds.
    mean: mean efficiency over prompts, without weights.
    rounds: mean number of rounds.
  prompts: number of prompts of a sample.

Samples with fewer than `FEWEST` clusters have no interval and do not count.
Samples of 5 or 8 prompts in shared clusters usually have none, so the CSV has
no row for them.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import pathlib
import sys

from absl import flags
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from lib import common  # noqa: E402

from specjax.analysis import intervals  # noqa: E402

_SAMPLES = flags.DEFINE_integer(
    "samples", 20_000, "Number of samples for each row of the table", 1)
_OUTPUT = flags.DEFINE_string(
    "output", "interval_coverage.csv", "Path of the CSV file")

CLUSTERS = "equal", "unequal prompts", "shared", "labels only"
VALUES = "normal", "lognormal", "exponential", "pareto", "rare copies"
PROMPTS = 5, 8, 12, 20, 50
FIGURES = {
    "efficiency": lambda total, count: 1 + total / count,
    "gain": lambda total, count, base, base_count: (
        (1 + total / count) / (1 + base / base_count) - 1),
    "mean": np.divide,
}
FIGURES |= {"own gain": FIGURES["gain"], "rounds": np.divide}
_TOKENS, _LARGEST = 128, 9
_LARGE = 2_000  # prompts of a sample for the true values


def _efficiency(values: str, shape: tuple[int, int], rng: np.random.Generator
                ) -> np.ndarray:
  """Returns the efficiency `[...]` of a cluster under the first rule."""
  if values == "normal":
    efficiency = 3 + 0.4 * rng.normal(size=shape)
  elif values == "lognormal":
    efficiency = 1 + 1.2 * rng.lognormal(sigma=0.6, size=shape)
  elif values == "exponential":
    efficiency = 1 + 1.2 * rng.exponential(size=shape)
  elif values == "pareto":
    efficiency = 1.6 + 0.6 * rng.pareto(2.5, size=shape)
  else:
    efficiency = np.where(rng.random(shape) < 0.1, rng.uniform(6, 8, shape),
                          rng.uniform(1.8, 2.2, shape))
  return np.minimum(efficiency, _LARGEST)


def _labels(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
  """Returns labels 0, 1, ... `[samples, prompts]` of clusters of 1 to 4."""
  starts = np.cumsum(rng.integers(1, 5, shape), axis=1)
  sample, cluster = np.nonzero(starts < shape[1])
  first = np.zeros(shape, int)  # 1 at the first prompt of each further cluster
  first[sample, starts[sample, cluster]] = 1
  return np.cumsum(first, axis=1)


def samples(clusters: str, values: str, prompts: int, number: int,
            rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Returns the sums of simulated samples, `{figure: [number, clusters, k]}`.

  Clusters that a sample does not have are 0.
  """
  shape = number, prompts
  labels = np.broadcast_to(np.arange(prompts), shape)
  if clusters in ("shared", "labels only"):
    labels = _labels(shape, rng)
  first = _efficiency(values, shape, rng)
  second = first + 0.12 * (first - 1) * rng.lognormal(sigma=0.5, size=shape)
  if clusters == "shared":
    scatter = rng.lognormal(sigma=0.1, size=shape)
    first, second = (
        1 + (np.take_along_axis(x, labels, axis=1) - 1) * scatter
        for x in (first, second))
  tokens = _TOKENS * (rng.lognormal(sigma=0.6, size=shape)
                      if clusters == "unequal prompts" else 1)
  rounds, own_rounds = (
      np.maximum(np.rint(tokens / x * rng.lognormal(sigma=0.05, size=shape)), 1)
      for x in (first, second))
  ones = np.ones(shape)
  base = (first - 1) * rounds, rounds
  columns = {
      "efficiency": base,
      "gain": ((second - 1) * rounds, rounds, *base),
      "own gain": ((second - 1) * own_rounds, own_rounds, *base),
      "mean": (first, ones),
      "rounds": (rounds, ones)}
  return {name: _summed(np.stack(x, -1), labels) for name, x in columns.items()}


def _summed(columns: np.ndarray, labels: np.ndarray) -> np.ndarray:
  sums = np.zeros_like(columns)
  np.add.at(sums, (np.arange(len(labels))[:, None], labels), columns)
  return sums


def rows(clusters: str, values: str, prompts: Sequence[int], number: int,
         seed: int = 0) -> Iterator[dict[str, str | int | float]]:
  """Yields the rows of the CSV for a kind of clusters and of values.

  Args:
    clusters: element of `CLUSTERS`.
    values: element of `VALUES`.
    prompts: numbers of prompts of a sample.
    number: number of samples for each row.
    seed: seed of the random numbers.
  """
  rng = np.random.default_rng(
      [seed, CLUSTERS.index(clusters), VALUES.index(values)])
  large = [samples(clusters, values, _LARGE, 250, rng) for _ in range(2)]
  true = {name: float(figure(*sum(x[name].sum((0, 1)) for x in large)))
          for name, figure in FIGURES.items()}
  for count in prompts:
    for name, sums in samples(clusters, values, count, number, rng).items():
      known = sums.any(-1).sum(-1) >= intervals.FEWEST
      if known.mean() < 0.3:
        continue
      _, low, high = intervals.sample_intervals(FIGURES[name], sums[known])
      below, above = (true[name] < low).mean(), (true[name] > high).mean()
      yield {"clusters": clusters, "values": values, "figure": name,
             "prompts": count, "coverage": round(1 - below - above, 5),
             "true_below": round(below, 5), "true_above": round(above, 5),
             "samples": int(known.sum())}


def table(found: Sequence[dict[str, str | int | float]]) -> str:
  """Returns the table of the docstring from the rows of the CSV."""
  lines = [_line("prompts", map(str, PROMPTS))]
  typical = VALUES[:3]
  for title, clusters, values, figures in (
      ("equal", "equal", typical, FIGURES),
      ("unequal prompts", "unequal prompts", typical, FIGURES),
      ("shared", "shared", typical, FIGURES),
      ("labels only", "labels only", typical, FIGURES),
      ("pareto", "equal", ["pareto"], FIGURES),
      ("rare copies", "equal", ["rare copies"], ["efficiency"])):
    coverage, missed = [], []
    for count in PROMPTS:
      percent = np.array([
          [100 * float(row[name])
           for name in ("coverage", "true_below", "true_above")]
          for row in found
          if int(row["prompts"]) == count and row["clusters"] == clusters
          and row["values"] in values and row["figure"] in figures])
      if not len(percent):
        coverage.append("-")
        missed.append("")
        continue
      ends = percent[:, 0].min(), percent[:, 0].max()
      coverage.append("-".join(dict.fromkeys(f"{x:.1f}" for x in ends)))
      missed.append("{:.1f}, {:.1f}".format(*percent[:, 1:].mean(0)))
    lines += [_line(title, coverage), _line("  below, above", missed)]
  return "\n".join(lines) + "\n"


def _line(title: str, cells: Iterable[str]) -> str:
  return (f"{title:16s}" + "".join(f"{x:>11s}" for x in cells)).rstrip()


def main():
  output = common.output_file("--output", _OUTPUT.value)
  found = [row for clusters in CLUSTERS for values in VALUES
           for row in rows(clusters, values, PROMPTS, _SAMPLES.value)]
  common.write_csv(output, found)
  print(table(found), end="")


if __name__ == "__main__":
  common.run(main)
