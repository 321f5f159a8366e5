#!/usr/bin/env bash
# docs/results/trees.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/tree_study.py --num_prompts=12 --max_new_tokens=72 "$@"
# bounds.csv: how far rules are from the best possible, with the trees of the
# committed trees.csv. tree_study.py reports the same for the trees it measures.
python experiments/runs/tree_bounds.py results/trees/bounds.csv
