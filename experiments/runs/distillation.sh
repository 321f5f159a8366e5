#!/usr/bin/env bash
# Which loss distils `small` best, with one seed, and the best one with three.
# RUNS is where they go; killed and started again, they go on where they were.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${RUNS:-results}

study() {
  python experiments/distillation_study.py --rows=512 --steps=150 \
    --num_prompts=96 --rounds=24 "$@"
}
study --seeds=1 --output_dir="$runs/distillation" \
  --losses=forward_kl,jensen_shannon,lk_alpha,token,block,total_variation
study --losses=jensen_shannon --seeds=3 \
  --output_dir="$runs/distillation_three_seeds"
