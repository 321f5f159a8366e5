#!/usr/bin/env bash
# Compares subsets of a target's layers as its drafter, for the bundled target
# and SmolLM2. Then the bundled target is trained further, once with LayerSkip
# and once without, for the same number of steps. An hour on two CPU cores.
# Output goes to the directory RUNS (default: results/skipping).
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${RUNS:-results/skipping}

python experiments/skip_study.py --output_dir="$runs/bundled"
python experiments/skip_study.py --temperature=0 \
  --output_dir="$runs/bundled_greedy"
python experiments/skip_study.py --target=smollm2 --rows=8 --continuation=64 \
  --gamma=6 --tries=24 --skip=0.1,0.2 --searches=random,local,clasp \
  --output_dir="$runs/smollm2"
python experiments/runs/swift.py

train() {
  python experiments/train_lm.py --initial=bundled --steps=200 --batch_size=4 \
    --learning_rate=0.01 --warmup_fraction=0.1 --decay_fraction=0.7 \
    --evaluate_every=0 --checkpoint_every=25 "$@"
}
train --output_dir="$runs/layer_skip_target" --exit_scale=1
train --output_dir="$runs/plain_target"
for name in plain layer_skip; do
  python experiments/skip_study.py --target="$runs/${name}_target" --skip=0.25 \
    --searches=greedy --output_dir="$runs/$name"
done
