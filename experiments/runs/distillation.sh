#!/usr/bin/env bash
# Which loss distils `small` best, with three seeds of each: half an hour on two
# cores. RUNS is where it goes; killed and started again, it goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${RUNS:-results}

python experiments/distillation_study.py --rows=512 --steps=150 --seeds=3 \
  --losses=jensen_shannon,block,token,lk_alpha,forward_kl,total_variation \
  --num_prompts=96 --rounds=24 --output_dir="$runs/distillation"
