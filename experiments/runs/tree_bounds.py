"""How far rules on trees are from the best possible: docs/results/trees.md.

  python experiments/runs/tree_bounds.py OUTPUT.csv [drafter]

The columns "over the best" of tree_study.py, without its rollouts and timings,
with the trees of experiments/results/trees/trees.csv at temperature 1. OUTPUT
keeps what is done; delete it to start again.
"""

import csv
import json
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from lib import common  # noqa: E402
from lib import models  # noqa: E402
from lib import prompts as prompts_lib  # noqa: E402
from lib import tree_bounds  # noqa: E402

import specjax as sj  # noqa: E402
from specjax import strategies  # noqa: E402
from specjax.data import prompt_sets  # noqa: E402

GROUPS = {"specinfer": ("specinfer", "spectr"),
          "without_replacement": ("sequoia", "traversal")}
NAMES = {"spectr": "k_seq", "sequoia": "without_replacement"}
NODES, NEW_TOKENS, SEED = (8, 16, 32, 64), 72, 0


def main(output, drafter="small"):
  target, drafters, tokenizer = models.load_models("bundled", [drafter])
  [drafter] = drafters.values()
  read = prompts_lib.read(
      tokenizer, list(prompt_sets.EMBEDDED), field=None, count=12, tokens=64,
      seed=SEED, chat=False)
  path = pathlib.Path(__file__).parents[1] / "results/trees/trees.csv"
  with open(path) as f:
    trees = {(r["method"], int(r["nodes"])): json.loads(r["parents"])
             for r in csv.DictReader(f) if float(r["temperature"]) == 1}
  output, rows = pathlib.Path(output), []
  if output.exists():
    rows = list(csv.DictReader(output.open()))
  done = {(r["method"], int(r["nodes"])) for r in rows}
  for nodes in NODES:
    for group, names in GROUPS.items():
      if (group, nodes) in done:
        continue
      parents = tuple(trees[group, nodes])
      larger, kept = tree_bounds.extended(parents)
      first, *others = (getattr(strategies, name) for name in names)
      decoder = sj.Decoder(
          target=target.model, **first(drafter.model, larger)._asdict(),
          transform=sj.LogitsTransform(temperature=1.0))
      rules = [make(drafter.model, parents).verifier
               for make in (first, *others)]
      judged = tree_bounds.judge(
          decoder, parents, kept, rules,
          {"target": target.params, "drafter": drafter.params}, read.all,
          NEW_TOKENS, SEED)
      for name, columns in zip(
          names, tree_bounds.columns(judged, read.clusters)):
        rows.append({"method": NAMES.get(name, name), "nodes": nodes,
                     "temperature": 1.0, "clusters": len(set(read.clusters)),
                     **columns, "parents": list(parents)})
        print(rows[-1], flush=True)
      common.write_csv(output, rows)


if __name__ == "__main__":
  main(*sys.argv[1:])
