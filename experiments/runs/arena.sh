#!/usr/bin/env bash
# Arenas of the bundled target, SmolLM2 and a published pair, for
# docs/results/arena.md. Resumes if started again. The last two decode
# Spec-Bench and require: pip install -e '.[experiments,published]', and DATA,
# the directory of spec_bench.jsonl. TARGET and DRAFTER are names on the
# Hugging Face hub, directories or GGUF files.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/arena.py --output_dir=results/arena/bundled
[ -n "${DATA:-}" ] || exit 0
tasks=$(mktemp -d)
trap 'rm -r "$tasks"' EXIT
prompts=
for task in conversation translation summarization qa math_reasoning rag; do
  category=$task
  if [ $task = conversation ]; then # MT-bench's categories
    category='(writing|roleplay|reasoning|math|coding|extraction|stem|humanities)'
  fi
  grep -E "\"category\": \"$category\"" "$DATA/spec_bench.jsonl" \
    > "$tasks/$task.jsonl"
  prompts+=,$tasks/$task.jsonl
done
spec_bench() { # output directory, target, drafters, prompts per task
  python experiments/arena.py --output_dir="results/arena/$1" --target="$2" \
    --drafter="$3" --chat --prompts="${prompts#,}" --field=turns \
    --num_prompts="$4" --prompt_tokens=512 --gamma=8
}
spec_bench smollm2 smollm2 smol,smol_eagle,ngram,suffix,recycling 5
spec_bench qwen "${TARGET:-Qwen/Qwen2.5-Coder-1.5B-Instruct}" \
  "${DRAFTER:-Qwen/Qwen2.5-Coder-0.5B-Instruct},ngram,recycling" 2
