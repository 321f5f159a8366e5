#!/usr/bin/env bash
# What part of a target drafts for it: the bundled target and SmolLM2, and a
# target that LayerSkip trained beside a plain one of as many steps. An hour or
# two on two cores. RUNS is where they go.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${RUNS:-results/skipping}

python experiments/skip_study.py --output_dir="$runs/bundled"
python experiments/skip_study.py --temperature=0 \
  --output_dir="$runs/bundled_greedy"
python experiments/skip_study.py --target=smollm2 --rows=8 --continuation=64 \
  --gamma=6 --tries=24 --skip=0.1,0.2 --searches=random,local,clasp \
  --output_dir="$runs/smollm2"

train() {
  python experiments/train_lm.py --tokenizer=specjax/models/zoo/tokenizer.json \
    --steps=600 --decay_fraction=0.655 --evaluate_every=0 "$@"
}
train --output_dir="$runs/plain_target"
train --output_dir="$runs/layer_skip_target" --exit_scale=1
for name in plain layer_skip; do
  python experiments/skip_study.py --target="$runs/${name}_target" \
    --output_dir="$runs/$name"
done
