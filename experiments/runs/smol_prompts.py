"""Writes the training prompts of the drafter `smol` as JSONL.

  python experiments/runs/smol_prompts.py DATA > prompts.jsonl
  python experiments/runs/smol_prompts.py DATA given > conversations.jsonl

SmolLM2 answers the prompts of the first command during training. The second
command writes conversations whose answers are from the files: solutions of
problems, complete functions, and continuations of stories.

DATA is a directory of published files: gsm8k_train.jsonl, arena_hard.jsonl,
piqa_valid.jsonl, webquestions_test.json, chatgpt_prompts.csv,
wikitext2_valid.txt, wikitext2_test.txt, tinystories_2MiB.txt, and
python_code_corpus.txt (functions of TheAlgorithms/Python). The evaluation
prompts of docs/results/smollm2.md are not in these files.
"""

from collections.abc import Sequence
import csv
import json
import pathlib
import random
import re
import sys

_CODE = (
    (8, "Complete this Python function:\n\n{}"),
    (8, "{}"),
    (14, "Rename the variables in this code to better names and write it "
         "again:\n\n{}"),
    (14, "Write a docstring and tests for this function:\n\n{}"),
    (14, "Explain what this code does:\n\n{}"))
_TEXT = (
    "Summarise this text in one sentence and quote its most important part: {}",
    "What is this text about? {}", "Tell me more about this: {}")
_STORIES = (
    "Continue this story: {}", "Write a short story like this one: {}",
    "Summarise this story in two sentences and quote its key sentence: {}")


def _in_turn(asks: Sequence[str], texts: Sequence[str]):
  """Returns one prompt per text, with alternating forms of the question."""
  return [asks[i % len(asks)].format(text) for i, text in enumerate(texts)]


def _functions(data: pathlib.Path) -> list[str]:
  """Returns the Python functions of the code corpus."""
  return re.findall(r"(?m)^def [^\n]*\n(?:[ \t]+[^\n]*\n|\n)+",
                    (data / "python_code_corpus.txt").read_text("utf-8"))


def _about_code(functions: Sequence[str]) -> list[str]:
  """Returns one prompt about each function, with the function's first lines."""
  asks = []
  for i, function in enumerate(functions):
    lines, ask = _CODE[i % len(_CODE)]
    asks.append(ask.format("\n".join(function.strip().split("\n")[:lines])))
  return asks


def _paragraphs(data: pathlib.Path) -> list[str]:
  """Returns the paragraphs of WikiText with 200 to 500 characters."""
  return [
      part.strip() for name in ("wikitext2_valid.txt", "wikitext2_test.txt")
      for part in (data / name).read_text("utf-8").split("\n")
      if 200 < len(part) < 500]


def _stories(data: pathlib.Path, least: int) -> list[str]:
  """Returns the stories of more than `least` characters."""
  stories = (data / "tinystories_2MiB.txt").read_text("utf-8").split(
      "<|endoftext|>")
  return [story.strip() for story in stories if len(story.strip()) > least]


def prompts(data: pathlib.Path) -> list[str]:
  """Returns all prompts in a fixed order."""
  rng = random.Random(1)
  lines = lambda name: map(json.loads, open(data / name, encoding="utf-8"))
  found = [row["question"] for row in lines("gsm8k_train.jsonl")]
  found += [row["turns"][0]["content"] for row in lines("arena_hard.jsonl")] * 3
  goals = [row["goal"] for row in lines("piqa_valid.jsonl")]
  found += goals + ["How do I do this? " + goal for goal in goals[:900]]
  questions = json.loads((data / "webquestions_test.json").read_text("utf-8"))
  found += [row["qText"] for row in questions]
  with open(data / "chatgpt_prompts.csv", encoding="utf-8") as f:
    found += [row["prompt"] for row in csv.DictReader(f)] * 3
  functions = _functions(data)
  rng.shuffle(functions)
  found += _about_code(functions)
  found += _in_turn(_TEXT, _paragraphs(data))
  stories = _stories(data, 200)
  rng.shuffle(stories)
  found += _in_turn(_STORIES, [story[:450] for story in stories[:1500]])
  rng.shuffle(found)
  return found * 2  # each prompt occurs twice, so it gets two answers


def conversations(data: pathlib.Path) -> list[tuple[str, str]]:
  """Returns pairs of a prompt and its answer from the files, in a fixed order.
  """
  rng = random.Random(2)
  some = lambda items, count: rng.sample(items, min(count, len(items)))
  with open(data / "gsm8k_train.jsonl", encoding="utf-8") as f:
    problems = [json.loads(line) for line in f]
  found = [(x["question"], re.sub(r"<<.*?>>|\n####.*", "", x["answer"]))
           for x in some(problems, 240)]
  for function in some(
      [x for x in _functions(data) if 200 < len(x) < 900], 240):
    text = function.strip()
    lines = text.split("\n")
    found.append(("\n".join(lines[:len(lines) // 3 + 1]),
                  f"```python\n{text}\n```"))
  found += [(f"Continue this story: {story[:200]}", story[200:800])
            for story in some(_stories(data, 500), 100)]
  rng.shuffle(found)
  return found


if __name__ == "__main__":
  if sys.argv[2:] == ["given"]:
    for prompt, answer in conversations(pathlib.Path(sys.argv[1])):
      print(json.dumps({"messages": [
          {"role": "user", "content": prompt},
          {"role": "assistant", "content": answer}]}))
  else:
    for prompt in prompts(pathlib.Path(sys.argv[1])):
      print(json.dumps({"prompt": prompt}))
