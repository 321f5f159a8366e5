"""The scripts run as a user runs them, and say what is wrong in one line."""

import csv
import importlib.util
import json

import numpy as np
import pytest
from scripts import last_line
from scripts import ROOT
from scripts import run
from scripts import run_all
from scripts import start
from tiny_llama import write_llama

from specjax.utils import files

pytestmark = pytest.mark.slow


def test_verification_study(tmp_path):
  """The main job: its table, files and JSON; a killed study goes on.

  On the same drafts block accepts more than token verification; greedy rows
  gain nothing. A user's file is read, and what is lossy is called so.
  """
  (tmp_path / "mine.jsonl").write_text(
      '{"turns": ["def add(a, b):"]}\n{"turns": ["import os\\n", "second"]}\n')
  # The third prompt of the embedded set is decoded in a batch.
  study_of = lambda: run_all("verification_study.py", [
      "--num_prompts=3", "--gamma=2,4", "--prompts=code,mine.jsonl",
      "--field=turns", "--temperature=1,0", "--max_new_tokens=16",
      "--verifier=token,block,greedy_block,typical"], cwd=tmp_path)[0]
  first = study_of()
  study = last_line(first)
  assert study["study"] == "verification" and study["num_prompts"] == 5
  assert {"python", "hash"} <= set(study["source"])
  assert len(study["rows"]) == 16 and len(study["by_prompts"]) == 32
  rows = {(r["verifier"], r["gamma"], r["temperature"]): r
          for r in study["rows"]}
  assert len(rows) == 16
  for row in study["rows"]:
    assert 1 <= row["block_efficiency"] <= row["gamma"] + 1
    assert row["speedup"] > 0 and row["tokens_per_second"] > 0
    assert 0.3 < row["measured_over_predicted"] < 3
    assert row["lossless"] == (row["verifier"] != "typical")
    assert 16 / (row["gamma"] + 1) <= row["rounds"] <= row["rounds_p90"] + 3
  paired = lambda name, gamma: rows[name, gamma, 1]["paired_block_efficiency"]
  assert paired("greedy_block", 4) > paired("block", 4) > paired("token", 4)
  assert rows["block", 4, 0]["block_efficiency"] == pytest.approx(
      rows["token", 4, 0]["block_efficiency"])
  results = tmp_path / "results/verification"
  assert (results / "verification.csv").read_text().count("\n") == 1 + 16 + 32
  for name in ("tokens", "gain", "speed"):
    assert (results / f"verification_{name}.png").stat().st_size > 10_000
  tables = (results / "verification.md").read_text()
  assert "Table 3" in tables and "typical (LOSSY)" in tables
  assert "compiling" in first["stderr"]  # the bar says what takes so long
  assert " s for the next " in first["stderr"]

  whole = (results / "runs.jsonl").read_bytes()
  (results / "runs.jsonl").write_bytes(whole[:-20])  # killed while writing
  again = study_of()
  assert "9 of 10 prompts are in" in again["stderr"]
  for row, before in zip(last_line(again)["rows"], study["rows"]):
    for name in ("block_efficiency", "gain", "paired_block_efficiency_high"):
      assert row[name] == before[name]
  assert (results / "runs.jsonl").read_text().count("\n") == 10



def test_a_batch_has_the_rollouts_of_single_prompts(tmp_path):
  # Broken: a row draws by its slot, continues its predecessor's state or sums
  # the rounds of its neighbours; a killed study decodes a prompt twice.
  flag_set = lambda batch, *more: [
      "--num_prompts=5", "--prompts=code", "--gamma=2", "--drafter=tiny",
      "--error=0", *more,
      "--temperature=1,0", "--max_new_tokens=12", "--verifier=token,block",
      "--timing=none", f"--batch={batch}", f"--output_dir=out{batch}"]
  runs_of = lambda batch: {
      (*record["unit"][1:], name): found for record in map(
          json.loads, (tmp_path / f"out{batch}/runs.jsonl").open())
      for name, found in record["runs"].items()}
  csv_of = lambda batch: list(csv.reader(
      (tmp_path / f"out{batch}/verification.csv").open()))
  alone, together = run_all(
      "verification_study.py", flag_set(1), flag_set(4), cwd=tmp_path)
  assert "5 prompts, " in alone["stderr"]
  single, batched = runs_of(1), runs_of(4)
  assert single.keys() == batched.keys() and len(single) == 5 * 2 * 2
  for key, one in single.items():
    for name in ("text", "tokens", "rounds"):
      assert batched[key][name] == one[name], (key, name)
    assert "seconds" not in one
    for name in ("expected", "survival"):
      assert np.ravel(batched[key][name]) == pytest.approx(
          np.ravel(one[name]), rel=1e-4, abs=1e-4)
  for row, other in zip(csv_of(1), csv_of(4), strict=True):
    for x, y in zip(row, other, strict=True):
      assert x == y or float(x) == pytest.approx(float(y), abs=1e-4)

  path = tmp_path / "out4/runs.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join(lines[:9]) + lines[9][:20])  # killed while writing
  [again] = run_all("verification_study.py", flag_set(4), cwd=tmp_path)
  assert again["code"] == 0
  assert len(path.read_text().splitlines()) == len(lines)
  texts = lambda runs: {key: x["text"] for key, x in runs.items()}
  assert texts(runs_of(4)) == texts(batched)

  paired, timed, refused = run_all(
      "verification_study.py", flag_set(4, "--noown_rollouts")[:-1] + [
          "--output_dir=paired"],
      flag_set(4)[:-3] + ["--timing=throughput", "--batch=4"],
      flag_set(4)[:-3] + ["--timing=latency", "--batch=4"], cwd=tmp_path)
  gains = lambda done: [row["gain"] for row in last_line(done)["rows"]]
  assert gains(paired) == pytest.approx(gains(together), abs=1e-4)
  assert "block_efficiency" not in last_line(paired)["rows"][0]
  assert last_line(timed)["rows"][0]["throughput"] > 0
  assert "--timing=latency" in refused["code"]


def test_replay(tmp_path):
  """A record is made, judged, and judged again without a model.

  Also one of a published model, which drafts for itself, on a user's prompts.
  """
  flags = ["--num_prompts=4", "--max_new_tokens=48", "--gamma=3"]
  write_llama(tmp_path / "model")
  (tmp_path / "mine.txt").write_text("a draft token\n\nwhat is a root")
  own = ["--target=model", "--drafter=model", "--prompts=mine.txt", "--gamma=2",
         "--acting=block", "--max_new_tokens=6", "--output_dir=own"]
  if importlib.util.find_spec("jinja2"):
    own.append("--chat")
  (tmp_path / "file").touch()
  (tmp_path / "other").mkdir()
  (tmp_path / "other/record.json").write_text('{"format": 2}')
  refusals = [
      (["--gamma=0"], ["--gamma=0", "positive"]),
      (["--gamma=512"], ["--gamma=512", "at most 511, because"]),
      (["--record=file"], ["file is not a directory"]),
      (["--record="], ["--record=", "give a directory"]),
      (["--record=other", "--evaluate_only"], ["other", "no complete"]),
      (["--verifier="], ["--verifier", "greedy_block"]),
      (["--prompts=mine.txt", "--max_new_tokens=510"],
       ["510", "context length"]),
      (["--gamma=500", "--max_new_tokens=400"], ["GiB", "--gamma=500"]),
      (["--prompts=mine.txt,mine.txt"], ["two sets named 'mine'"])]
  made, judged, published, *refused = run_all("replay.py", flags, [
      "--evaluate_only", "--verifier=block", "--record=results/replay",
      "--output_dir=judged"], own, *(
          [*flags, *wrong] for wrong, _ in refusals), cwd=tmp_path)
  _check_refused(refused, refusals)
  study = last_line(made)
  rows = {r["verifier"]: r for r in study["rows"]}
  assert rows["token"]["online_block_efficiency"] == pytest.approx(
      rows["token"]["block_efficiency"], abs=1e-6)
  assert rows["block"]["block_efficiency"] > rows["token"]["block_efficiency"]
  assert rows["token"]["over_best"] < 0 == rows["block"]["over_best"]
  for name in ("greedy_block", "typical"):  # the bound is not theirs
    assert rows[name]["over_best"] is None
  assert last_line(judged)["rows"] == [rows["block"]]
  for row in last_line(published)["rows"]:  # all is accepted, but by "typical"
    if row["lossless"]:
      assert row["block_efficiency"] == pytest.approx(3)


def test_generate(tmp_path):
  """Text comes out in colours, after the prompt, with its statistics."""
  flags = ["--prompt=def f(x):", "--max_new_tokens=24", "--color=always"]
  names = ("choose among small, tiny, smol, ngram, suffix, sampled_suffix, "
           "suffix_tree, recycling, rest, noise, a+b, a|b, pass, medusa, "
           "eagle3, parallel, smol_eagle, itself, "
           "FILE.py:NAME, none, or give")
  refusals = [(["--drafter=meduza"], ["'meduza'", names]),
              (["--drafter="], ["''", names]),
              (["--target=bundle"], ["'bundle'", "among bundled, or"]),
              (["--nodes=512"], ["--nodes=512", "at most 511, because"]),
              (["--regex=a", "--json_schema=b"], ["--regex and --json_schema"]),
              (["--repetition_penalty=0"], ["penalty is 0", "above 0"])]
  *results, a, b, c, d, e, f = run_all("generate.py", *(
      [*flags, f"--drafter={name}", *size] for name, size in (
          ("small", ["--gamma=3"]), ("medusa", ["--nodes=8"]),
          ("pass", ["--gamma=3"]))), *(
          [*flags, *wrong] for wrong, _ in refusals), cwd=tmp_path)
  _check_refused([a, b, c, d, e, f], refusals)
  for result in results:
    assert result["code"] == 0
    assert result["stdout"].startswith("def f(x):")
    assert "\033[31m" in result["stdout"]
    assert "per target call" in result["stdout"].splitlines()[-1]


def test_a_published_model_chats(tmp_path):
  # Broken: published weights do not decode here, the template or its ends are
  # left out, the answer on disk is not the one on the screen, or a prompt that
  # is too long is cut in silence.
  pytest.importorskip("jinja2")
  write_llama(tmp_path / "model")
  flags = ["--target=model", "--max_new_tokens=12", "--temperature=0"]
  chat = [*flags, "--chat", "--prompt=what is a token?"]
  long = [*flags, "--chat", f"--prompt={'token ' * 400}"]
  refusals = [
      (long, ["--keep_last", "room for 244"]),
      ([*flags, f"--prompt={'token ' * 400}"], ["--keep_last", "244"]),
      ([*chat, "--max_new_tokens=256"], ["256", "set a smaller value"]),
      ([*chat, "--output=model"], ["'model'", "give a file"]),
      ([*flags, "--system=Be brief."], ["--system", "--chat"]),
      ([*chat, "--special"], ["--special"]),
      (["--chat", "--prompt=hi"], ["--chat", "template"])]
  plain, drafted, across, cut, system, special, *refused = run_all(
      "generate.py", chat, [*chat, "--drafter=model", "--compare", "--gamma=3",
                            "--output=answer.txt"],
      [*chat, "--drafter=small", "--gamma=3"],
      [*long, "--keep_last"], [*chat, "--system=Be brief."],
      [*flags, "--special", "--prompt=<|im_start|>user"],
      *(wrong for wrong, _ in refusals), cwd=tmp_path)
  answers = []
  for found in (plain, drafted, across, cut, system):
    assert found["code"] == 0, found
    answers.append(found["stdout"].rsplit("\n\n", 1)[0])
  # The template's tokens are read and not printed; what is drafted is the same.
  assert answers[0] == answers[1] == (tmp_path / "answer.txt").read_text()
  assert answers[0] == answers[2]
  assert "small has 4,096 tokens and drafts the" in across["stderr"]
  assert "<|im" not in answers[0] and "what is" not in answers[0]
  assert answers[0] != answers[4]
  assert "times as fast" in drafted["stdout"].splitlines()[-1]
  assert "12 tokens in 3 rounds" in drafted["stdout"]  # the target drafts
  assert special["stdout"].startswith("user")
  _check_refused(refused, refusals)
  talk, *refused = run_all(
      "chat.py", [*flags, "--prompt=what is a token?", "--output=talk.txt"],
      [*flags, "--coordinator=here:1"], ["--prompt=hi"], cwd=tmp_path)
  assert talk["stdout"] == answers[0] + "\n" and "[12 tokens" in talk["stderr"]
  assert (tmp_path / "talk.txt").read_text() == (
      f"user: what is a token?\nassistant: {answers[0]}\n")
  _check_refused(refused, [
      (["--coordinator=here:1"], ["--coordinator=here:1", "leave"]),
      (["--prompt=hi"], ["chat.py", "template"])])


def _check_refused(runs, refusals):
  """Each run ended in one line that holds every word."""
  for found, (flags, words) in zip(runs, refusals, strict=True):
    assert str(found["code"]).startswith("error: "), (flags, found)
    assert "\n" not in found["code"]
    for word in words:
      assert word in found["code"], (flags, found)


def test_a_reader_that_leaves(tmp_path):
  """`generate.py | head -1` ends with the statistics so far, in one line."""
  process = start("generate.py", "--prompt=a = 1\nb =", "--drafter=tiny",
                  "--max_new_tokens=400", cwd=tmp_path)
  assert process.stdout.readline() == "a = 1\n"
  process.stdout.close()
  error = process.stderr.read()
  assert process.wait() == 128 + 13
  assert "Traceback" not in error and "Exception" not in error
  statistics, stopped = error.strip().splitlines()[-2:]
  assert "rounds" in statistics and "the output is no longer read" in stopped


_REFUSED = [
    (["--gamma=0"], ["--gamma", "at least 1"]),
    (["--temperature=-1"], ["-1", "at least 0"]),
    (["--top_p=1.5"], ["1.5", "(0, 1]"]),
    (["--prompts=missing.txt"], ["missing.txt", ".jsonl"]),
    (["--prompts=not_json.jsonl"], ["not_json.jsonl line 1", "not JSON"]),
    (["--prompts=binary.txt"], ["binary.txt", "not UTF-8"]),
    (["--prompts=table.csv"], ["table.csv", "no prompt"]),
    (["--prompts=piqa=not_json.jsonl"], ["not_json.jsonl line 1", "PIQA"]),
    (["--prompts=piqa=other.jsonl"], ["other.jsonl", "PIQA", "'goal'"]),
    (["--verifier=block"], ["--verifier", "token"]),
    (["--verifier=token,blok"], ["blok", "greedy_block"]),
    (["--drafter=nowhere"], ["nowhere", "small, tiny, smol", "directory"]),
    (["--drafter=small,mine/small"], ["small and mine/small", "rename"]),
    (["--drafter="], ["--drafter", "small"]),
    (["--prompts="], ["--prompts", "leave it out"]),
    (["--temperature="], ["--temperature", "such as 1,0.6"]),
    (["--gamma=4,512"], ["--gamma", "512", "at most 511, because"]),
    (["--seed=4294967296"], ["--seed=4294967296", "[0, 4294967295]"]),
    (["--prompts=gpt_prompts=table.csv"], ["table.csv", "no prompt"]),
    (["--output_dir=table.csv"], ["table.csv is not a directory"]),
    (["--output_dir=busy"], ["another study is at work in busy", "wait"]),
    (["--max_new_tokens=100000"], ["100", "context length"]),
]


def test_study_refuses_bad_input(tmp_path):
  """One line, before anything is compiled or written."""
  (tmp_path / "not_json.jsonl").write_text("hello\n")
  (tmp_path / "other.jsonl").write_text('{"question": "why?"}\n')
  (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
  (tmp_path / "table.csv").write_text("a,b\n")
  with files.locked(tmp_path / "busy", "study"):
    runs = run_all("verification_study.py", *(
        ["--num_prompts=2", *flags] for flags, _ in _REFUSED), cwd=tmp_path)
  _check_refused(runs, _REFUSED)
  assert not (tmp_path / "results").exists()
  # As a user sees it, be it of this script or of another.
  for script in (ROOT / "experiments").glob("[!_]*.py"):
    assert script.read_text("utf-8").endswith(
        '\nif __name__ == "__main__":\n  common.run(main)\n'), script
  alone = run("verification_study.py", "--gamma=0", cwd=tmp_path)
  assert alone.returncode != 0
  assert alone.stderr.strip().splitlines()[-1] == runs[0]["code"]


@pytest.mark.parametrize("arguments", ["32", "32 x", "0 4", "1 2 3"])
def test_tpu_rounds_refuses_other_layers(arguments, tmp_path):
  # Broken: a traceback, or minutes of compiling, in place of one line.
  found = run("runs/tpu_rounds.py", *arguments.split(), cwd=tmp_path)
  [line] = found.stderr.splitlines()
  assert found.returncode == 1 and line.startswith("error: ")
  assert repr(arguments) in line and "two whole numbers" in line
