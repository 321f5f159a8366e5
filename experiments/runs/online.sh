#!/usr/bin/env bash
# Measures whether an online drafter adapts to a change of topic from code to
# prose. The bundled draft model `small` was also trained on prose, so the
# change does not reduce its acceptance. Therefore a drafter of the same shape
# is first trained on code without comments and docstrings. A quarter of an hour
# on two CPU cores. Output goes to the directory RUNS (default: results/online).
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${RUNS:-results/online}

python experiments/runs/online_texts.py "$runs"
python experiments/train_lm.py --output_dir="$runs/coder" \
  --data="$runs/code.jsonl" --tokenizer=specjax/models/zoo/tokenizer.json \
  --width=96 --layers=2 --heads=3 --kv_heads=1 --head_dim=32 --mlp_width=192 \
  --steps=400 --warmup_fraction=0.125 --decay_fraction=0.7 --evaluate_every=0 \
  --checkpoint_every=100

study() {
  python experiments/online_study.py --data="$runs/code.jsonl" \
    --prose="$runs/prose.txt" --users=4 --seeds=3 --code_tokens=1000 \
    --prose_tokens=4000 --window=500 --optimizer=rmsprop --learning_rate=0.003 \
    --rank=32 "$@"
}
study --drafter="$runs/coder" --output_dir="$runs/study"
# Check that two equal runs write equal files.
for i in 1 2; do
  study --drafter="$runs/coder" --seeds=1 --code_tokens=300 --prose_tokens=600 \
    --output_dir="$runs/again_$i"
done
cmp "$runs/again_1/online.csv" "$runs/again_2/online.csv"
