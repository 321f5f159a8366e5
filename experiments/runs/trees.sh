#!/usr/bin/env bash
# docs/results/trees.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
# bounds.csv: how far the rules are from the best possible, with the same trees.
mkdir -p results/trees
python experiments/runs/tree_bounds.py results/trees/bounds.csv
python experiments/tree_study.py --num_prompts=12 --max_new_tokens=72 "$@"
