#!/usr/bin/env bash
# docs/results/trees.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/tree_study.py --num_prompts=12 --max_new_tokens=72 "$@"
