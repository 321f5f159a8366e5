#!/usr/bin/env bash
# Measurements of docs/results/self_drafting.md, including the training of heads
# that are not bundled: an hour on two CPU cores. Trained heads go to the
# directory RUNS (default: results/heads).
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${RUNS:-results/heads}

train() {
  python experiments/train_drafter.py --row_tokens=384 --decay_fraction=0.7 "$@"
}
train --method=medusa2 --heads_from=specjax/models/zoo/medusa \
  --output_dir="$runs/medusa2" --steps=1000
train --method=blockwise --all_heads \
  --output_dir="$runs/blockwise" --steps=300 --warmup_fraction=0.1333
train --method=blockwise --all_heads --train_target --learning_rate=0.002 \
  --heads_from="$runs/blockwise" --output_dir="$runs/blockwise_tuned" \
  --steps=250 --warmup_fraction=0.16
train --method=blockwise --all_heads --train_target --learning_rate=0.002 \
  --heads_from="$runs/blockwise" --output_dir="$runs/blockwise_distilled" \
  --steps=250 --warmup_fraction=0.16 --data=self --self_temperature=0 \
  --self_rows=1024

heads=pass,medusa
for name in medusa2 blockwise blockwise_tuned blockwise_distilled; do
  heads+=,$runs/$name
done
python experiments/self_drafting_study.py --num_prompts=12 --max_new_tokens=72 \
  --heads="$heads" "$@"
# Heads that read the target's hidden states, on more prompts, to compare
# verification rules. A copy of its self_drafting.csv is
# experiments/results/self_drafting/features.csv.
python experiments/self_drafting_study.py --num_prompts=32 --max_new_tokens=80 \
  --drafter=small --nountrained --heads=medusa,eagle3,parallel \
  --output_dir=results/self_drafting_features
