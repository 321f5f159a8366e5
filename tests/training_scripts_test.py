"""Training scripts run as a user runs them: killed, resumed and refused."""

import json

import jax
import numpy as np
import pytest
import scripts

import specjax as sj
from specjax import testing
from specjax.models import heads as heads_lib
from specjax.models import save_model
from specjax.models import Transformer


@pytest.mark.timeout(300)
def test_a_killed_run_ends_bit_identical(tmp_path):
  # Broken: an interrupted run restarts, skips or repeats batches, or loses a
  # part of its state, and ends with other weights.
  corpus = tmp_path / "corpus.jsonl"
  rng = np.random.default_rng(0)
  words = ["draft", "verify", "accept", "target", "root", "bonus", "token"]
  corpus.write_text("".join(
      json.dumps({"text": " ".join(rng.choice(words, 40))}) + "\n"
      for _ in range(120)))
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  train = ["train_lm.py", f"--data={corpus}", "--vocab_size=270", "--width=8",
           "--layers=1", "--heads=2", "--kv_heads=1", "--head_dim=4",
           "--mlp_width=8", "--context_length=16", "--batch_size=4",
           "--steps=400", "--warmup_steps=20", "--evaluate_every=100",
           "--checkpoint_every=40", "--save_dtype=float32"]

  scripts.start_and_kill(*train, output_dir=killed, step=120)
  assert not (killed / "model.safetensors").exists()
  assert 400 not in scripts.checkpoints(killed)
  for directory in (killed, whole):
    result = scripts.last_line(scripts.run(
        *train, f"--output_dir={directory}", cwd=tmp_path))
    assert result["study"] == "train_lm"
    assert 0 < result["bits_per_byte"] < 2.0  # it learned: 8 at the start
  for name in ("model.safetensors", "config.json", "tokenizer.json"):
    assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
  assert scripts.metrics(killed) == scripts.metrics(whole)

  # The finished run of other settings would be taken for this one's.
  refused = scripts.run(*train, "--learning_rate=0.01",
                        f"--output_dir={whole}", cwd=tmp_path)
  assert refused.stderr.strip().splitlines()[-1].startswith(
      f"error: {whole} holds another run: learning_rate is 0.02 there")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
  """A random target with a tokenizer, and a corpus in its directory."""
  directory = tmp_path_factory.mktemp("target")
  rng = np.random.default_rng(0)
  texts = [" ".join(rng.choice(["draft", "verify", "accept"], 40))
           for _ in range(40)]
  (directory / "corpus.jsonl").write_text(
      "".join(json.dumps({"text": text}) + "\n" for text in texts))
  tokenizer = sj.data.tokenizers.train(texts, 262)
  tokenizer.save(directory / "tokenizer.json")
  config = testing.tiny_pair(7).target.config
  model = Transformer(type(config)(**{
      **config.__dict__, "vocab_size": tokenizer.vocab_size,
      "context_length": 24}))
  save_model(directory, model, model.init(jax.random.key(0)))
  return directory


@pytest.mark.timeout(300)
def test_train_drafter(tmp_path, target_dir):
  """The joint method on text of the target's own; its files fit together."""
  result = scripts.run(
      "train_drafter.py", "--method=medusa2", f"--target={target_dir}",
      "--output_dir=out", f"--data=self:{target_dir}/corpus.jsonl",
      "--self_rows=8", "--rank=2",
      "--self_prompt_tokens=4", "--held_out_rows=2", "--heads=2", "--steps=6",
      "--batch_size=4", "--accumulate=2", "--evaluate_every=3",
      "--checkpoint_every=3", "--save_dtype=float32", cwd=tmp_path)
  study = scripts.last_line(result)
  assert study["study"] == "train_drafter" and study["method"] == "medusa2"
  assert np.shape(study["loss"]) == (3,)
  assert np.shape(study["accuracy"]) == (3, 5)
  assert [tokens for tokens, _ in study["curve"]] == [0, 12 * 23, 24 * 23]
  for measured in (study, study["untrained"]):
    assert 1 <= measured["data_block_efficiency"] <= 3
  target, _ = sj.models.load_model(tmp_path / "out")
  heads, params = heads_lib.load_heads(tmp_path / "out", target)
  assert heads.heads == 2 and params["blocks"].shape == (2, 1, 16, 16)
  assert (tmp_path / "out/tokenizer.json").exists()
  metrics = (tmp_path / "out/metrics.csv").read_text()
  for name in ("3,greedy_block_efficiency", "6,head_2/data_top_5", "6,lm_loss"):
    assert name in metrics

  assert study["tokens"] == 24 * 23 and study["minutes"] > 0
  assert 1 <= study["block_efficiency"] <= 3

  refused = scripts.run(
      "train_drafter.py", "--method=medusa", "--output_dir=other",
      "--heads_from=out", f"--data={target_dir}/corpus.jsonl", cwd=tmp_path)
  message = refused.stderr.strip().splitlines()[-1]
  assert message.startswith("error: "), refused.stderr[-1000:]
  assert "width 16, 262 tokens and 1 layers" in message
  assert "width 256, 4096 tokens and 4 layers" in message
  assert not (tmp_path / "other").exists()


@pytest.mark.timeout(300)
def test_a_killed_drafter_ends_bit_identical(tmp_path, target_dir):
  # Broken: a run that was killed, or one of two stages, forgets what was
  # before.
  train = ["train_drafter.py", f"--target={target_dir}",
           f"--data={target_dir}/corpus.jsonl", "--batch_size=4",
           "--held_out_rows=2", "--evaluate_every=50", "--checkpoint_every=20",
           "--save_dtype=float32"]
  first = [*train, "--method=pass", "--heads=2", "--cuts=2", "--steps=100"]
  killed, whole = tmp_path / "killed", tmp_path / "whole"
  scripts.start_and_kill(*first, output_dir=killed, step=40)
  assert not (killed / "heads.safetensors").exists()
  studies = [scripts.last_line(scripts.run(
      *first, f"--output_dir={directory}", cwd=tmp_path))
             for directory in (killed, whole)]
  for name in ("heads.safetensors", "heads.json"):
    assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
  assert scripts.metrics(killed) == scripts.metrics(whole)
  assert studies[0]["curve"] == studies[1]["curve"]
  assert len(studies[0]["curve"]) == 3

  more = scripts.last_line(scripts.run(
      *train, "--method=pass", "--steps=20", f"--heads_from={whole}",
      "--output_dir=more", cwd=tmp_path))
  assert more["tokens"] == 120 * 4 * 23
  assert more["curve"][:3] == studies[0]["curve"] and len(more["curve"]) == 5
  refused = scripts.run(*train, "--method=pass", "--heads=3",
                        f"--heads_from={whole}", "--output_dir=other",
                        cwd=tmp_path)
  assert refused.stderr.strip().splitlines()[-1].startswith(
      "error: --heads is 3 and --heads_from")
  assert not (tmp_path / "other").exists()
