#!/usr/bin/env bash
# Which loss distils `small` best, and whether a drafter that learns while it
# drafts follows a change of topic: half an hour on two cores. RUNS is where they
# go; killed and started again, the first goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${RUNS:-results}

python experiments/distillation_study.py --rows=512 --steps=150 \
  --losses=forward_kl,jensen_shannon,total_variation,lk_alpha,token,block \
  --num_prompts=48 --rounds=24 --output_dir="$runs/distillation"
python experiments/online_study.py --output_dir="$runs/online"
