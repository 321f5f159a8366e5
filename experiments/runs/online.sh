#!/usr/bin/env bash
# Whether a drafter that learns while it drafts follows a change of topic. `small`
# has read prose and loses nothing by it, so a drafter of its shape is trained on
# code without comments and docstrings first. A quarter of an hour on two cores.
# RUNS is where it goes.
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
# The same run twice gives the same bytes.
for i in 1 2; do
  study --drafter="$runs/coder" --seeds=1 --code_tokens=300 --prose_tokens=600 \
    --output_dir="$runs/again_$i"
done
cmp "$runs/again_1/online.csv" "$runs/again_2/online.csv"
