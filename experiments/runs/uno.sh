#!/usr/bin/env bash
# Comparison of PaSS and UNO in docs/results/self_drafting.md: both are trained
# on the same 408,000 tokens. Trained heads go to the directory RUNS (default:
# results/heads). A copy of uno.csv is experiments/results/self_drafting/uno.csv.
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
# Both evaluations in one file, with the column `method`.
{
  sed '1s/^/method,/;2,$s/^/PaSS,/' results/uno_pass/evaluation.csv
  sed '1d;s/^/UNO,/' results/uno_uno/evaluation.csv
} | tr -d '\r' > results/uno.csv
