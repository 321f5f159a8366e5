#!/usr/bin/env bash
# Trains the bundled models (specjax/models/zoo/CARD.md): the target, its two
# draft models, its self-drafting heads, and the drafters for SmolLM2. Hours on
# two CPU cores. Models go to the directory RUNS (default: results/zoo). DATA is
# the directory of the published files that smol_prompts.py reads.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${RUNS:-results/zoo}
: "${DATA:?give the directory of the published files}"

python experiments/train_lm.py --output_dir="$runs/target" \
  --steps=2900 --warmup_fraction=0.0345 --decay_fraction=0.655 \
  --evaluate_every=0
python experiments/train_lm.py --output_dir="$runs/small" \
  --tokenizer="$runs/target/tokenizer.json" --width=96 --layers=2 --heads=3 \
  --kv_heads=1 --head_dim=32 --mlp_width=192 --steps=3000 \
  --decay_fraction=0.7 --evaluate_every=0 --checkpoint_every=500
python experiments/train_lm.py --output_dir="$runs/tiny" \
  --tokenizer="$runs/target/tokenizer.json" --width=32 --layers=1 --heads=2 \
  --kv_heads=1 --head_dim=16 --mlp_width=64 --steps=2000 \
  --warmup_fraction=0.05 --decay_fraction=0.7 --evaluate_every=0 \
  --checkpoint_every=500
python experiments/train_drafter.py --method=pass --output_dir="$runs/pass" \
  --steps=400 --row_tokens=384 --warmup_fraction=0.1 --evaluate_every=150 \
  --checkpoint_every=100
python experiments/train_drafter.py --method=medusa \
  --output=low_rank --output_dir="$runs/medusa" --steps=2400 --row_tokens=384 \
  --learning_rate=0.006 --warmup_fraction=0.0167 --decay_fraction=0.7 \
  --evaluate_every=300 --checkpoint_every=100
# Both of these went on after 2,400 steps, and their learning rate rose again.
for steps in 2400 4800; do
  python experiments/train_drafter.py --method=eagle3 --heads=4 \
    --output_dir="$runs/eagle3" --draft_vocabulary=1280 --mlp_width=256 \
    --row_tokens=384 --batch_size=4 --steps=$steps --learning_rate=0.003 \
    --warmup_fraction=0.0167 --decay_fraction=0.7 --evaluate_every=600 \
    --checkpoint_every=100
  python experiments/train_drafter.py --method=parallel --heads=8 --layers=2 \
    --output_dir="$runs/parallel" --mlp_width=192 --taps=2,4 --markov=plain \
    --markov_rank=20 --anchors=48 --row_tokens=384 --steps=$steps \
    --learning_rate=0.002 --warmup_fraction=0.0167 --decay_fraction=0.7 \
    --evaluate_every=600 --checkpoint_every=100
done
# Continue both trainings at half the learning rate, with another order of rows.
for method in eagle3 parallel; do
  options=(--batch_size=4 --learning_rate=0.0015)
  if [ $method = parallel ]; then options=(--anchors=48 --learning_rate=0.001); fi
  python experiments/train_drafter.py --method=$method "${options[@]}" \
    --heads_from="$runs/$method" --output_dir="$runs/${method}_more" \
    --row_tokens=384 --steps=2000 --warmup_fraction=0.02 \
    --decay_fraction=0.7 --evaluate_every=250 --checkpoint_every=50 --seed=1
done
# Continue with the optimiser Muon, four times.
with_muon() {
  local own=(--batch_size=4 --evaluate_every=400)
  if [ "$1" = parallel ]; then own=(--anchors=48 --evaluate_every=200); fi
  python experiments/train_drafter.py --method="$1" --heads_from="$runs/$2" \
    --output_dir="$runs/$3" --row_tokens=384 --optimizer=muon \
    --checkpoint_every=100 "${own[@]}" --steps="$4" --learning_rate="$5" \
    --warmup_fraction="$6" --decay_fraction="$7" --seed="$8"
}
#         method   from           to             steps rate  warm-up decay seed
with_muon eagle3   eagle3_more    eagle3_muon    3800  0.012 0.0105  0.6   2
with_muon parallel parallel_more  parallel_muon  1600  0.006 0.025   0.7   2
with_muon eagle3   eagle3_muon    eagle3_again   6400  0.012 0.00625 0.7   3
with_muon parallel parallel_muon  parallel_again 2800  0.006 0.0143  0.7   3
with_muon eagle3   eagle3_again   eagle3_last    6800  0.008 0.0059  0.8   4
with_muon parallel parallel_again parallel_last  3600  0.005 0.0111  0.8   4
# Last, a low learning rate that only falls. The acceptance does not improve any
# more. These heads are bundled.
with_muon eagle3   eagle3_last    eagle3_flat    3200  0.003  0.0125 1    5
with_muon parallel parallel_last  parallel_flat  1800  0.0025 0.0222 1    5
# Measure the acceptance rate of a drafted token.
python experiments/verification_study.py --drafter=small,tiny --gamma=1,4 \
  --num_prompts=48 --error=0 --output_dir="$runs/acceptance"

python experiments/runs/smol_prompts.py "$DATA" > "$runs/smol.jsonl"
python experiments/distill.py --target=smollm2 --chat \
  --prompts="$runs/smol.jsonl" --num_prompts=40000 --prompt_tokens=128 \
  --max_new_tokens=160 --rows_per_file=512 --row_tokens=320 --batch_size=32 \
  --vocab_size=8192 --width=256 --layers=3 --heads=4 --kv_heads=1 \
  --mlp_width=512 --steps=14000 --warmup_fraction=0.00714 \
  --evaluate_every=1000 --checkpoint_every=4000 \
  --output_dir="$runs/smol"

python experiments/runs/smol_prompts.py "$DATA" given > "$runs/given.jsonl"
python experiments/train_drafter.py --method=eagle1 --target=smollm2 \
  --data="self:$runs/smol.jsonl,$runs/given.jsonl" --field=prompt \
  --self_chat --noanswers_only --pack --self_rows=192 \
  --self_prompt_tokens=112 --self_temperature=0.6 --held_out_rows=16 \
  --row_tokens=288 --keep_features \
  --heads=3 --mlp_width=1024 --fusion_norms --law_weight=0.5 \
  --draft_vocabulary=6144 --narrow_head --optimizer=muon \
  --learning_rate=0.02 --warmup_fraction=0.05 --decay_fraction=0.6 \
  --batch_size=8 --steps=300 --evaluate_every=0 --checkpoint_every=25 \
  --output_dir="$runs/smol_eagle"
