#!/usr/bin/env bash
# Measurements of docs/results/paper.md with the bundled models: two drafters,
# three temperatures, three seeds, all prompts.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/verification_study.py --gamma=4,6,8,16 \
  --drafter=small,tiny --temperature=1,0.6,0 --seeds=3 --num_prompts=8 \
  --error=0 --output_dir=results/paper "$@"
