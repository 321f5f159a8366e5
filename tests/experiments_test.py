"""The scripts run as a user runs them, and say what is wrong in one line."""

import pytest
from scripts import last_line
from scripts import run


def test_verification_study(tmp_path):
  """The main job: its table, files and JSON, and block >= token, paired."""
  study = last_line(run(
      "verification_study.py", "--num_prompts=2", "--gammas=4",
      "--prompts=code,docstrings", "--new_tokens=24", "--output_dir=out",
      cwd=tmp_path))
  assert study["study"] == "verification"
  assert {"python", "hash"} <= set(study["source"])
  rows = {(r["verifier"], r["gamma"]): r for r in study["rows"]}
  assert len(rows) == len(study["rows"]) == 3
  assert len(study["by_prompts"]) == 6
  for row in study["rows"]:
    assert 1 <= row["block_efficiency"] <= row["gamma"] + 1
    assert row["speedup"] > 0 and row["tokens_per_second"] > 0
    assert 0.3 < row["measured_over_predicted"] < 3
  paired = lambda name, gamma: rows[name, gamma]["paired_block_efficiency"]
  assert paired("greedy_block", 4) > paired("block", 4) > paired("token", 4)
  assert (tmp_path / "out/verification.csv").read_text().count("\n") == 10
  assert (tmp_path / "out/verification.png").stat().st_size > 10_000
  assert "Table 3" in (tmp_path / "out/verification.md").read_text()


def test_study_of_own_prompts_resumes(tmp_path):
  """A user's file is read; a killed study goes on; greedy rows gain nothing."""
  (tmp_path / "mine.jsonl").write_text(
      '{"turns": ["def add(a, b):"]}\n{"turns": ["import os\\n", "second"]}\n')
  study_of = lambda: run(
      "verification_study.py", "--prompts=mine.jsonl", "--field=turns",
      "--temperature=0", "--gammas=2", "--new_tokens=16", "--drafter=tiny",
      "--verifiers=token,block,typical", cwd=tmp_path)
  study = last_line(study_of())
  token, block, typical = study["rows"]
  assert block["block_efficiency"] == pytest.approx(token["block_efficiency"])
  assert block["lossless"] and not typical["lossless"]
  results = tmp_path / "results/verification"
  assert "typical (LOSSY)" in (results / "verification.md").read_text()

  whole = (results / "runs.jsonl").read_bytes()
  (results / "runs.jsonl").write_bytes(whole[:-20])  # killed while writing
  again = study_of()
  assert "1 of 2 prompts are in" in again.stderr
  for row, before in zip(last_line(again)["rows"], study["rows"]):
    assert row["block_efficiency"] == before["block_efficiency"]
  assert (results / "runs.jsonl").read_text().count("\n") == 2


def test_replay(tmp_path):
  """A record is made, judged, and judged again without a model."""
  flags = ["--num_prompts=2", "--new_tokens=16", "--gamma=3"]
  study = last_line(run("replay.py", *flags, cwd=tmp_path))
  rows = {r["verifier"]: r for r in study["rows"]}
  assert rows["token"]["online_block_efficiency"] == pytest.approx(
      rows["token"]["block_efficiency"], abs=1e-6)
  # Block is ahead on average, and not on every dozen of drafts.
  for row in rows.values():
    assert 1 < row["block_efficiency"] < 4 and row["stderr"] > 0
  assert rows["block"]["online_block_efficiency"] is None
  assert rows["block"]["lossless"] and not rows["typical"]["lossless"]
  again = last_line(run("replay.py", "--evaluate_only", "--verifiers=block",
                          cwd=tmp_path))
  assert again["rows"] == [rows["block"]]


@pytest.mark.parametrize("drafter", ["small", "medusa", "pass"])
def test_generate(tmp_path, drafter):
  """Text comes out in colours, after the prompt, with its statistics."""
  result = run("generate.py", "--prompt=def f(x):", "--max_new_tokens=24",
               "--color=always", "--gamma=3", f"--drafter={drafter}",
               cwd=tmp_path)
  assert result.returncode == 0, result.stderr[-2000:]
  assert result.stdout.startswith("def f(x):")
  assert "\033[31m" in result.stdout
  assert "a round" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("flags, words", [
    (["--gammas=0"], ["--gammas", "start at 1"]),
    (["--temperature=-1"], ["-1", "at least 0"]),
    (["--top_p=1.5"], ["1.5", "(0, 1]"]),
    (["--prompts=missing.txt"], ["missing.txt", ".jsonl"]),
    (["--prompts=not_json.jsonl"], ["not_json.jsonl line 1", "not JSON"]),
    (["--prompts=binary.txt"], ["binary.txt", "not UTF-8"]),
    (["--prompts=table.csv"], ["'.csv'", ".jsonl"]),
    (["--prompts=piqa=not_json.jsonl"], ["not_json.jsonl line 1", "PIQA"]),
    (["--prompts=piqa=other.jsonl"], ["other.jsonl", "PIQA", "'goal'"]),
    (["--verifiers=block"], ["--verifiers", "token"]),
    (["--verifiers=token,blok"], ["blok", "greedy_block"]),
    (["--drafter=nowhere"], ["nowhere", "missing"]),
    (["--new_tokens=100000"], ["100", "context length"]),
])
def test_study_refuses_bad_input(tmp_path, flags, words):
  """One line, before anything is compiled or written."""
  (tmp_path / "not_json.jsonl").write_text("hello\n")
  (tmp_path / "other.jsonl").write_text('{"question": "why?"}\n')
  (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
  (tmp_path / "table.csv").write_text("a,b\n")
  result = run("verification_study.py", "--num_prompts=2", *flags,
               cwd=tmp_path)
  assert result.returncode != 0
  message = result.stderr.strip().splitlines()[-1]
  assert message.startswith("error: "), result.stderr[-1000:]
  for word in words:
    assert word in message
  assert not (tmp_path / "results").exists()
