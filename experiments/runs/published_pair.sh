#!/usr/bin/env bash
# Verification rules on a published pair, for docs/results/qwen.md. STUDY=speed
# measures the speed at batch 1, and STUDY=trees compares draft trees. Resumes if
# started again.
# Requires: pip install -e '.[experiments,published]'
# With SmolLM2: TARGET=smollm2 DRAFTER=smol DATA=... published_pair.sh \
#   --batch=16 --output_dir=results/smollm2_tasks
# DATA is the directory of chatgpt_prompts.csv, webquestions_test.json,
# piqa_valid.jsonl, gsm8k_test.jsonl, mt_bench.jsonl, HumanEval.jsonl.gz and
# spec_bench.jsonl. TARGET and DRAFTER are names on the Hugging Face hub,
# directories or GGUF files.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${DATA:?give the directory of the published prompt sets}
tasks=$(mktemp -d)
trap 'rm -r "$tasks"' EXIT
for task in translation summarization; do
  grep "\"category\": \"$task\"" "$data/spec_bench.jsonl" > "$tasks/$task.jsonl"
done
prompts=gpt_prompts=$data/chatgpt_prompts.csv
prompts+=,webquestions=$data/webquestions_test.json,piqa=$data/piqa_valid.jsonl
prompts+=,gsm8k=$data/gsm8k_test.jsonl,mt_bench=$data/mt_bench.jsonl
prompts+=,humaneval=$data/HumanEval.jsonl.gz
prompts+=,$tasks/translation.jsonl,$tasks/summarization.jsonl
models=(--target="${TARGET:-Qwen/Qwen2.5-Coder-1.5B-Instruct}"
        --drafter="${DRAFTER:-Qwen/Qwen2.5-Coder-0.5B-Instruct}" --chat
        --prompts="$prompts" --field=turns --prompt_tokens=512 --batch=8)
case ${STUDY:-rules} in
  rules)
    python experiments/verification_study.py "${models[@]}" --num_prompts=12 \
      --gamma=2,4,8,16 --temperature=1,0.6,0 --max_new_tokens=64 --error=0 \
      --noown_rollouts --output_dir=results/qwen "$@" ;;
  speed)
    python experiments/verification_study.py "${models[@]}" --num_prompts=2 \
      --gamma=2,4,8 --temperature=1 --verifier=token,block --error=0 --batch=1 \
      --max_new_tokens=128 --output_dir=results/qwen_speed "$@" ;;
  trees)
    python experiments/tree_study.py "${models[@]}" --num_prompts=2 \
      --methods=without_replacement,traversal --nodes=8,16,32,64 \
      --temperature=1 --max_new_tokens=48 --nobounds \
      --output_dir=results/qwen_trees "$@" ;;
  *) echo "STUDY=$STUDY is unknown; give rules, speed or trees" >&2; exit 2 ;;
esac
