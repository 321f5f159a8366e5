#!/usr/bin/env bash
# README's table of trees.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/tree_study.py --num_prompts=12 --new_tokens=72 "$@"
