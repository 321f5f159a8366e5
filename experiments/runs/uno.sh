#!/usr/bin/env bash
# Comparison of PaSS and UNO in docs/results/self_drafting.md: both are trained
# on the same 408,000 tokens. Trained heads go to the directory RUNS (default:
# results/heads). Copies of the CSV and of the tables of evaluate_drafter.py are
# experiments/results/self_drafting/uno*.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${RUNS:-results/heads}

for method in pass uno; do
  python experiments/train_drafter.py --method=$method \
    --output_dir="$runs/short_$method" --row_tokens=256 --batch_size=4 \
    --steps=400 --warmup_fraction=0.1 --evaluate_every=400 --checkpoint_every=200
  python experiments/evaluate_drafter.py --drafter="$runs/short_$method" \
    --gamma=2,4 --noconformance --output_dir="results/uno_$method"
done
python experiments/self_drafting_study.py --drafter=tiny --nountrained \
  --heads="$runs/short_pass,$runs/short_uno" --num_prompts=12 \
  --max_new_tokens=72 --output_dir=results/uno
