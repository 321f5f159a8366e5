#!/usr/bin/env bash
# Compares losses for the distillation of the draft model `small`, with three
# training runs per loss: half an hour on two CPU cores. Output goes to the
# directory RUNS (default: results). A second call continues a killed run.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${RUNS:-results}

python experiments/distillation_study.py --rows=512 --steps=150 --seeds=3 \
  --losses=jensen_shannon,block,token,lk_alpha,forward_kl,total_variation \
  --num_prompts=96 --rounds=24 --output_dir="$runs/distillation"
