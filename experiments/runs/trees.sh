#!/usr/bin/env bash
# Measurements of docs/results/trees.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/tree_study.py --num_prompts=12 --max_new_tokens=72 "$@"
# bounds.csv has the distances of rules from the best possible rule, on the
# trees of the committed trees.csv. tree_study.py reports them for its own
# trees.
python experiments/runs/tree_bounds.py results/trees/bounds.csv
# lifted.csv has other single-step rules in traversal verification, on small
# random models.
python experiments/runs/lifted_trees.py results/trees/lifted.csv
