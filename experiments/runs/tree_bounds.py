"""Computes the distance of rules on trees from the best possible rule.

  python experiments/runs/tree_bounds.py OUTPUT.csv [drafter]

Computes the columns "over the best" of tree_study.py without the rollouts and
timings of that study. The trees are those of
experiments/results/trees/trees.csv at temperature 1. Results are in
docs/results/trees.md. On chains, block verification is the best possible rule
in one round, so its row shows the error of the bound. If OUTPUT exists, the
script adds the missing rows.
"""

import csv
import json
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from lib import common  # noqa: E402
from lib import drafters  # noqa: E402
from lib.prompts import reading as prompts_lib  # noqa: E402
from lib.reports import tree_bounds  # noqa: E402

import specjax as sj  # noqa: E402
from specjax import strategies  # noqa: E402
from specjax.data import prompt_sets  # noqa: E402

# For each group, the strategy that samples the drafts, and the rules that are
# evaluated on these drafts, by their names in trees.csv.
GROUPS = {
    "chain_token": (strategies.specinfer, {
        "chain_token": sj.verifiers.Token(),
        "chain_block": sj.verifiers.Block()}),
    "specinfer": (strategies.specinfer, {
        "specinfer": sj.verifiers.Recursive(), "k_seq": sj.verifiers.KSeq()}),
    "without_replacement": (strategies.sequoia, {
        "without_replacement": sj.verifiers.Recursive(),
        "traversal": sj.verifiers.Traversal()}),
}
LONGEST_CHAIN = 16  # largest number of nodes of a chain
NODES, NEW_TOKENS, SEED = (8, 16, 32, 64), 72, 0


def measured_trees():
  """Returns the trees of trees.csv as `{(method, nodes): parents}`."""
  path = pathlib.Path(__file__).parents[1] / "results/trees/trees.csv"
  with open(path) as f:
    return {(r["method"], int(r["nodes"])): json.loads(r["parents"])
            for r in csv.DictReader(f) if float(r["temperature"]) == 1}


def main(output: str, drafter: str = "small"):
  target, loaded, tokenizer = drafters.load(
      "bundled", [drafter], same_tokens=True)
  drafter = next(iter(loaded.values())).draft_model
  read = prompts_lib.read(
      tokenizer, list(prompt_sets.EMBEDDED), field=None, count=12, tokens=64,
      seed=SEED, chat=False)
  trees, output, rows = measured_trees(), pathlib.Path(output), []
  if output.exists():
    rows = list(csv.DictReader(output.open()))
  done = {(r["method"], int(r["nodes"])) for r in rows}
  for nodes in NODES:
    for group, (draws, rules) in GROUPS.items():
      if (group, nodes) in done or (
          group == "chain_token" and nodes > LONGEST_CHAIN):
        continue
      parents = tuple(trees[group, nodes])
      larger, kept = tree_bounds.extended(parents)
      decoder = draws(drafter.model, larger).decoder(
          target.model, transform=sj.LogitsTransform(temperature=1.0))
      judged = tree_bounds.judge(
          decoder, parents, kept, list(rules.values()),
          {"target": target.params, "drafter": drafter.params}, read.all,
          NEW_TOKENS, SEED)
      for name, columns in zip(
          rules, tree_bounds.columns(judged, read.clusters)):
        rows.append({"method": name, "nodes": nodes,
                     "temperature": 1.0, "clusters": len(set(read.clusters)),
                     **columns, "parents": list(parents)})
        print(rows[-1], flush=True)
      common.write_csv(output, rows)


if __name__ == "__main__":
  main(*sys.argv[1:])
