"""Training scripts run as a user runs them: killed, resumed and refused."""

import json
import shutil

import jax
import numpy as np
import pytest
import scripts

import specjax as sj
from specjax import methods
from specjax import objectives
from specjax import testing
from specjax.data import corpora
from specjax.models import save_model
from specjax.models import Transformer
from specjax.training import metrics
from specjax.utils import files
from specjax.utils.fingerprints import fingerprint

pytestmark = pytest.mark.slow

_REFUSED = [  # in the directory of a finished run of 400 steps, if in no other
    (["--learning_rate=0.01"],
     ["whole holds another run: learning_rate is 0.02 there and 0.01 here"]),
    (["--tokenizer=other.json"], ["other.json and whole/tokenizer.json"]),
    (["--vocab_size=300"], ["vocab_size is 270 there and 300 here"]),
    (["--learning_rate=nan"], ["--learning_rate is nan"]),
    (["--steps=300", "--seed=1"], ["whole holds another run: seed is 0"]),
    (["--steps=100"],
     ["--steps is 100", "has taken 400", "after 360, 400; give"]),
    (["--dtype=bfloat16"], ["run: dtype is float32 there and bfloat16 here"]),
    (["--output_dir=busy"], ["another run is at work in busy", "wait"]),
    (["--output_dir="], ["--output_dir=", "give a directory"]),
    (["--output_dir=file"], ["file is not a directory"]),
    (["--output_dir=file/out"], ["file/out is not a directory"]),
    (["--seed=-1"], ["--seed=-1", "[0, 4294967295]"]),
    (["--seed=4294967296"], ["--seed=4294967296", "[0, 4294967295]"]),
    (["--stepps=3"], ["'stepps'", "--help"]),
    (["more"], ["'more'", "--help"]),
]
_BEFORE_THE_TARGET_WRITES = [  # for hours
    ([], "--prompts is ''"),
    (["--prompts=code"], "--prompts=code overlaps"),
    (["--prompts=copy", "--prompt_tokens=24", "--row_tokens=24"],
     "--row_tokens is 24, and the longest prompt has 24"),
    (["--prompts=copy", "--prompt_tokens=24", "--max_new_tokens=8"],
     "--prompts has 8 prompts; 8 are held out, and 0 different"),
    (["--prompts=copy", "--top=5000"], "--top is 5000")]


@pytest.mark.timeout(300)
def test_a_killed_run_ends_bit_identical(tmp_path):
  # Broken: an interrupted run restarts, skips or repeats batches, or loses a
  # part of its state, and ends with other weights; or one that is refused, or
  # that runs beside it, changes what a finished run left.
  corpus = tmp_path / "corpus.jsonl"
  rng = np.random.default_rng(0)
  words = ["draft", "verify", "accept", "target", "root", "bonus", "token"]
  corpus.write_text("".join(
      json.dumps({"text": " ".join(rng.choice(words, 40))}) + "\n"
      for _ in range(120)))
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  script, *train = [
      "train_lm.py", f"--data={corpus}", "--vocab_size=270", "--width=8",
      "--layers=1", "--heads=2", "--kv_heads=1", "--head_dim=4",
      "--mlp_width=8", "--context_length=16", "--batch_size=4",
      "--steps=400", "--warmup_fraction=0.05", "--evaluate_every=100",
      "--checkpoint_every=40", "--save_dtype=float32"]
  sj.data.tokenizers.train(words, 258).save(tmp_path / "other.json")
  (tmp_path / "file").touch()

  scripts.start_and_kill(script, *train, output_dir=killed, step=120)
  assert not (killed / "model.safetensors").exists()
  assert 400 not in scripts.checkpoints(killed)
  with files.locked(tmp_path / "busy", "run"):
    *finished, short, longer = scripts.run_all(
        script, [*train, "--output_dir=killed"],
        [*train, "--output_dir=whole"],
        *([*train, "--output_dir=whole", *flags] for flags, _ in _REFUSED),
        [*train, "--output_dir=short", "--steps=20"],
        [*train, "--output_dir=short", "--steps=30"], cwd=tmp_path)
  for result in finished[:2]:
    study = scripts.last_line(result)
    assert study["study"] == "train_lm"
    assert 0 < study["bits_per_byte"] < 2.0  # it learned: 8 at the start
  for name in ("model.safetensors", "config.json", "tokenizer.json",
               "run.json"):
    assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
  assert scripts.metrics(killed) == scripts.metrics(whole)
  for found, (flags, words) in zip(finished[2:], _REFUSED, strict=True):
    assert str(found["code"]).startswith("error: "), (flags, found)
    assert "\n" not in found["code"]
    for word in words:
      assert word in found["code"], (flags, found)
  assert short["code"] == longer["code"] == 0
  assert "continues to step 30" in longer["stderr"]
  assert {int(row[0]) for row in scripts.metrics(tmp_path / "short")[1:]} == {
      10, 20, 30}


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
  own = [f"--target={target_dir}", f"--data=self:{target_dir}/corpus.jsonl"]
  result, refused, keeps, unread, alone = scripts.run_all("train_drafter.py", [
      "--method=medusa2", *own, "--output_dir=out", "--self_rows=8", "--rank=2",
      "--self_prompt_tokens=4", "--held_out_rows=2", "--heads=2", "--steps=6",
      "--batch_size=4", "--accumulate=2", "--evaluate_every=3",
      "--checkpoint_every=3", "--save_dtype=float32"], [
          "--method=medusa", "--output_dir=other", "--heads_from=out",
          f"--data={target_dir}/corpus.jsonl"],
      ["--method=medusa", *own, "--output_dir=other", "--keep_features"],
      ["--method=medusa", f"--data={target_dir}/corpus.jsonl",
       "--output_dir=other", "--self_temperature=0"],
      ["--method=medusa", *own, "--output_dir=other", "--rate_ratio=9"],
      cwd=tmp_path)
  study = scripts.last_line(result)
  assert study["study"] == "train_drafter" and study["method"] == "medusa2"
  assert np.shape(study["loss"]) == (3,)
  assert np.shape(study["accuracy"]) == (3, 5)
  assert [tokens for tokens, _ in study["curve"]] == [0, 12 * 23, 24 * 23]
  for measured in (study, study["untrained"]):
    assert 1 <= measured["data_block_efficiency"] <= 3
  target, _ = sj.models.load_model(tmp_path / "out")
  heads, params = methods.load_heads(tmp_path / "out", target)
  assert heads.heads == 2 and params["blocks"].shape == (2, 1, 16, 16)
  assert (tmp_path / "out/tokenizer.json").exists()
  table = (tmp_path / "out/metrics.csv").read_text()
  for name in ("3,greedy_block_efficiency", "6,head_2/data_top_5", "6,lm_loss"):
    assert name in table

  assert study["tokens"] == 24 * 23 and study["minutes"] > 0
  assert 1 <= study["block_efficiency"] <= 3

  message = str(refused["code"])
  assert message.startswith("error: ") and "\n" not in message, refused
  assert "width 16, 262 tokens and 1 layers" in message
  assert "width 256, 4096 tokens and 4 layers" in message
  # Before the target has written hours of rows.
  assert "--keep_features is set and --method=medusa does" in keeps["code"]
  # Or an option without effect is accepted.
  assert "--self_temperature requires --data=self" in unread["code"]
  assert "--rate_ratio=9.0 has no effect with --method=medusa" in alone["code"]
  assert not (tmp_path / "other").exists()


@pytest.mark.timeout(300)
def test_a_run_in_bfloat16_leaves_its_best_heads_and_those_of_any_checkpoint(
    tmp_path, target_dir, monkeypatch):
  # Broken: --dtype changes only how the target is loaded, or it may change in
  # the middle of a run; a run that ends early has no heads.
  seen, step = {}, objectives.MedusaObjective.__call__

  def objective(self, trainable, frozen, batch, key):
    for x in jax.tree.leaves((trainable, frozen)):
      seen.setdefault(bool(frozen), set()).add(x.dtype.name)
    return step(self, trainable, frozen, batch, key)

  monkeypatch.setattr(objectives.MedusaObjective, "__call__", objective)
  train = [
      f"--target={target_dir}", f"--data=self:{target_dir}/corpus.jsonl",
      "--method=medusa", "--rank=2", "--heads=2", "--batch_size=2",
      "--self_rows=4", "--self_prompt_tokens=4", "--held_out_rows=2",
      "--evaluate_every=2", "--checkpoint_every=2", "--self_temperature=0",
      "--learning_rate=0.3", "--dtype=bfloat16", "--output_dir=out"]
  [first] = scripts.run_all("train_drafter.py", [*train, "--steps=6"],
                            cwd=tmp_path)
  study = scripts.last_line(first)
  # Training steps, and the evaluations, which have no frozen parameters.
  assert seen == {True: {"bfloat16"}, False: {"bfloat16"}}
  out = tmp_path / "out"
  heads = lambda directory: (directory / "heads.safetensors").read_bytes()
  last, best = heads(out), files.read_json(out / "best/training.json", "")
  values = dict(metrics.read(out, "greedy_block_efficiency"))
  assert list(values) == [2, 4, 6]
  assert best["steps"] == max(values, key=values.get) and study["steps"] == 6
  assert f"after step {best['steps']}, held-out" in first["stdout"]
  assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
  assert "epoch 3.00): loss" in first["stdout"]
  assert "weighted sum over 2 heads" in first["stdout"]
  assert "top-1 accuracy of heads 1 to 2: 0." in first["stdout"]
  assert "6 steps read the training data 3.0 times" in first["stderr"]
  names = {row[1] for row in scripts.metrics(out)}
  assert {"learning_rate", "gradient_norm", "held_out_loss"} <= names

  log = scripts.metrics(out)
  between, before, other, again = scripts.run_all(
      "train_drafter.py", [*train, "--steps=5"], [*train, "--steps=1"],
      [*train, "--steps=6", "--dtype=float32"], [*train, "--steps=6"],
      cwd=tmp_path)
  assert before["code"].startswith(
      "error: --steps is 1, but the run in out has taken 6 steps, with "
      "checkpoints after 2, 4, 6; give one")
  assert "dtype is bfloat16 there and float32 here" in other["code"]
  assert between["code"] == again["code"] == 0
  assert "ends at its checkpoint after 4 steps" in between["stderr"]
  assert heads(out) == last and scripts.metrics(out) == log
  [early] = scripts.run_all(
      "train_drafter.py", [*train, f"--steps={best['steps']}"], cwd=tmp_path)
  assert heads(out) == heads(out / "best")
  assert scripts.last_line(early)["tokens"] == best["tokens"]
  assert scripts.last_line(early)["accuracy"] == best["accuracy"]
  text = scripts.run_all("generate.py", [
      f"--target={target_dir}", "--drafter=out/best", "--prompt=draft",
      "--max_new_tokens=2"], cwd=tmp_path)[0]
  assert text["code"] == 0, text


@pytest.mark.timeout(300)
def test_a_layer_on_features_drafts_what_the_text_has(tmp_path, target_dir):
  # Broken: the reduced vocabulary is not that of the training text, its ties
  # or its order are others', or heads that cannot have one take the flag.
  corpus = f"{target_dir}/corpus.jsonl"
  train = [f"--target={target_dir}", f"--data={corpus}", "--batch_size=2",
           "--held_out_rows=2", "--evaluate_every=0", "--heads=2",
           "--draft_vocabulary=9", "--steps=2"]
  result, *refused = scripts.run_all(
      "train_drafter.py", [*train, "--method=eagle3", "--mlp_width=8",
                           "--save_dtype=float32", "--output_dir=out"],
      [*train, "--method=mtp", "--output_dir=other"],
      [*train, "--method=eagle3", "--draft_vocabulary=263",
       "--output_dir=other"],
      [*train, "--method=eagle3", "--depth_decay=0.5", "--output_dir=other"],
      [*train, "--method=eagle3", "--taps=1,9", "--output_dir=other"],
      cwd=tmp_path)
  study = scripts.last_line(result)
  assert study["method"] == "eagle3" and np.shape(study["accuracy"]) == (3, 5)
  assert 1 <= study["block_efficiency"] <= 3
  assert all(x < 40 for x in study["loss"])
  target, _ = sj.models.load_model(target_dir)
  heads, params = methods.load_heads(tmp_path / "out", target)
  tokenizer = sj.data.Tokenizer.load(target_dir)
  training, _ = corpora.split(corpora.read_documents(corpus, "text"))
  counts = np.bincount(tokenizer.encode_stream([d.text for d in training]),
                       minlength=262)
  ends = [] if tokenizer.eos is None else [tokenizer.eos]
  often = sorted(set(range(262)) - {*ends}, key=lambda i: (-counts[i], i))
  assert heads.ids == tuple(sorted([*ends, *often[:9 - len(ends)]]))
  assert params["head"].shape == (16, 9)
  for found, words in zip(refused, (
      "the heads of --method=mtp draft with the target's LM head",
      "--draft_vocabulary is 263; the target has 262 tokens",
      "--depth_decay=0.5 has no effect with --method=eagle3",
      "taps contains 9; the target has the hidden states 0 to 1"), strict=True):
    assert found["code"].startswith("error: ") and words in found["code"]
  assert not (tmp_path / "other").exists()


@pytest.mark.timeout(300)
def test_a_model_learns_with_its_modules(tmp_path, target_dir):
  # Broken: heads that learn with the trunk do not fit it, or are not saved as
  # those of train_drafter.py are.
  train = [f"--data={target_dir}/corpus.jsonl", "--width=8", "--layers=1",
           f"--tokenizer={target_dir}", "--heads=2", "--kv_heads=1",
           "--head_dim=4", "--mlp_width=8", "--context_length=16",
           "--batch_size=4", "--steps=20", "--evaluate_every=0",
           "--evaluation_stride=16", "--save_dtype=float32"]
  result, *refused = scripts.run_all(
      "train_lm.py", [*train, "--mtp=parallel", "--mtp_heads=2",
                      "--output_dir=out"],
      [*train, "--mtp_weight=0.1", "--output_dir=other"],
      [*train, "--mtp=modules", "--layer_dropout=0.2", "--output_dir=other"],
      [*train, "--mtp=modules", "--mtp_heads=16", "--output_dir=other"],
      cwd=tmp_path)
  study = scripts.last_line(result)
  target, _ = sj.models.load_model(tmp_path / "out")
  heads, _ = methods.load_heads(tmp_path / "out", target)
  assert heads.forecasts == 2 and heads.taps == (0,)
  training = files.read_json(tmp_path / "out/training.json", "")
  assert training["tokens"] == study["tokens"] == 20 * 4 * 16
  assert np.shape(training["accuracy"]) == (3, 5)
  assert "lm_loss" in (tmp_path / "out/metrics.csv").read_text()
  for found, words in zip(refused, (
      "--mtp_weight=0.1 requires --mtp",
      "--layer_dropout=0.2 requires --exit_scale",
      "--mtp_heads is 16 and --context_length 16"), strict=True):
    assert found["code"].startswith(f"error: {words}")
  assert not (tmp_path / "other/tokenizer.json").exists()


@pytest.mark.timeout(300)
def test_a_killed_drafter_ends_bit_identical(tmp_path, target_dir):
  # Broken: a killed run, or the second stage of a run, loses earlier steps.
  train = ["train_drafter.py", f"--target={target_dir}",
           f"--data={target_dir}/corpus.jsonl", "--batch_size=4",
           "--held_out_rows=2", "--evaluate_every=50", "--checkpoint_every=20",
           "--save_dtype=float32"]
  first = [*train, "--method=pass", "--heads=2", "--cuts=2", "--steps=100"]
  killed, whole = tmp_path / "killed", tmp_path / "whole"
  scripts.start_and_kill(*first, output_dir=killed, step=40)
  assert not (killed / "train_drafter.json").exists()
  # New heads are not told by their last bits, which depend on the machine.
  _, params = sj.models.load_model(target_dir)
  assert (files.read_json(killed / "run.json", "")["parameters"]
          == fingerprint((params, ())))
  more = [*train[1:], "--method=pass", f"--heads_from={whole}",
          "--output_dir=more"]
  *results, refused, too_much = scripts.run_all(
      first[0], *([*first[1:], f"--output_dir={directory}"]
                  for directory in (killed, whole)),
      [*more, "--steps=20"], [*more, "--steps=30"],
      [*train[1:], "--method=pass", "--heads=3", f"--heads_from={whole}",
       "--output_dir=other"],
      [*train[1:], "--method=pass", "--batch_size=100000",
       "--output_dir=other"], cwd=tmp_path)
  *studies, _, longer = map(scripts.last_line, results)  # of the same file
  for name in ("heads.safetensors", "heads.json"):
    assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
  assert scripts.metrics(killed) == scripts.metrics(whole)
  assert studies[0]["curve"] == studies[1]["curve"]
  assert len(studies[0]["curve"]) == 3

  assert longer["tokens"] == 130 * 4 * 23
  assert longer["curve"][:3] == studies[0]["curve"]
  assert [tokens for tokens, _ in longer["curve"][3:]] == [
      steps * 4 * 23 for steps in (100, 120, 130)]
  assert refused["code"].startswith("error: --heads=3 has no effect")
  # Published vocabularies are large: their logits would fill the memory.
  assert "100000 rows of 24 tokens take 2.3 GiB" in too_much["code"]
  assert "--accumulate" in too_much["code"]
  assert not (tmp_path / "other").exists()


@pytest.mark.timeout(300)
def test_a_sweep_trains_with_every_value(tmp_path, target_dir):
  # Broken: runs share a directory or a rate, one that diverges ends the sweep,
  # a sweep starts again, or the target writes the same rows for every run.
  sweep = [f"--target={target_dir}", f"--data=self:{target_dir}/corpus.jsonl",
           "--method=medusa", "--rank=2", "--heads=2", "--steps=12",
           "--batch_size=2", "--self_rows=4", "--self_prompt_tokens=4",
           "--held_out_rows=5", "--evaluate_every=0", "--warmup_fraction=0",
           "--output_dir=out"]
  refused = {
      "rate:1,2": "'rate' is not a flag that can be swept",
      "output_dir:a,b": "'output_dir' is not a flag that can be swept",
      "learning_rate:0.1": "give at least two different values",
      "learning_rate:0.1,0.1": "give at least two different values",
      "learning_rate:0.1,-1": "--learning_rate=-1 is not valid",
      "schedule:cosine,sine": "--schedule=sine is not valid",
      "learning_rate:nan,1": "give finite numbers"}
  first, again, decay, *errors = scripts.run_all(
      "train_drafter.py",
      *[[*sweep, "--sweep=learning_rate:0.001,1e30,0.05"]] * 2,
      [*sweep, "--schedule=cosine", "--decay_fraction=0.5"],
      *([*sweep, f"--sweep={text}"] for text in refused), cwd=tmp_path)
  found = scripts.last_line(first)
  assert found["study"] == "sweep" and found["flag"] == "learning_rate"
  *rows, diverged = found["rows"]
  assert diverged["value"] == "1e30" and "diverged" in diverged["failed"]
  assert {row["value"] for row in rows} == {"0.001", "0.05"}
  assert (rows[0]["greedy_block_efficiency"]
          >= rows[1]["greedy_block_efficiency"])
  for row in rows:
    run = files.read_json(
        tmp_path / f"out/learning_rate={row['value']}/run.json", "")
    assert run["learning_rate"] == float(row["value"])
    assert len(row["by_row"]["positions"]) == 5
  assert (tmp_path / "out/self").exists()
  table = first["stdout"].split("less than best")[1].splitlines()
  # Two documents are held out, and an interval needs five.
  assert table[1].split()[0] == rows[0]["value"]
  assert "no interval" in table[2]
  assert "diverged" in table[3]
  for text in ("Acceptance length", "block efficiency", "[95 % interval]"):
    assert text in first["stdout"]
  assert scripts.last_line(again)["rows"][:2] == rows  # minutes, too
  assert "--decay_fraction=0.5 has no effect with --schedule=cosine" in (
      decay["code"])
  for result, words in zip(errors, refused.values(), strict=True):
    assert words in result["code"], result


def test_distill(tmp_path):
  """A small model with a small vocabulary learns a target's laws, and drafts.
  """
  learned, *refused = scripts.run_all("distill.py", [
      "--prompts=copy", "--num_prompts=8", "--rows_per_file=4",
      "--prompt_tokens=24", "--max_new_tokens=16", "--vocab_size=600",
      "--width=32", "--layers=1", "--heads=1", "--head_dim=16",
      "--mlp_width=32", "--row_tokens=64", "--batch_size=4", "--steps=40",
      "--warmup_fraction=0.025", "--evaluate_every=0", "--gamma=2",
      "--output_dir=out"],
      *([*flags, "--num_prompts=8", "--output_dir=none"]
        for flags, _ in _BEFORE_THE_TARGET_WRITES), cwd=tmp_path)
  for found, (_, words) in zip(refused, _BEFORE_THE_TARGET_WRITES, strict=True):
    assert words in found["code"] and "\n" not in found["code"]
  assert not (tmp_path / "none" / "answers").exists()
  study = scripts.last_line(learned)
  assert study["study"] == "distill" and study["answers"] == 4
  assert study["held_out_loss"] < np.log(600)  # it has learned something
  assert all(1 <= x <= 3 for x in study["tokens_per_round"].values())
  assert sj.data.Tokenizer.load(tmp_path / "out").vocab_size == 600
  text = scripts.run_all("generate.py", [
      "--drafter=out", "--prompt=def f(x):", "--gamma=2",
      "--max_new_tokens=8"], cwd=tmp_path)[0]["stdout"]
  assert text.startswith("def f(x):")
  assert "per target call" in text.splitlines()[-1]


def _with_template(tmp_path, target_dir):
  """Returns the directory of a copy of the target that has a chat template."""
  target = tmp_path / "target"
  shutil.copytree(target_dir, target)
  (target / "tokenizer_config.json").write_text(json.dumps({
      "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
      "chat_template": "{% for m in messages %}{{ m.role + ':' + m.content }}"
                       "{{ eos_token }}{% endfor %}"}))
  return target


@pytest.mark.timeout(300)
def test_heads_learn_from_conversations(tmp_path, target_dir):
  # Broken: a ShareGPT file needs more than --data, the run learns from what
  # users say, or a run that learns from answers goes on with all tokens or
  # other rows, or counts padding as tokens.
  pytest.importorskip("jinja2")
  target = _with_template(tmp_path, target_dir)
  (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"conversations": [
      {"from": "human", "value": f"q{i:02}"},
      {"from": "gpt", "value": chr(97 + i % 7) * (i % 3)}]}) + "\n"
      for i in range(60)))
  train = ["--method=medusa", f"--target={target}", "--data=chat.jsonl",
           "--batch_size=2", "--row_tokens=24", "--held_out_rows=2",
           "--heads=2", "--evaluate_every=0", "--steps=2", "--output_dir=out"]
  result, other, joined, plain = scripts.run_all(
      "train_drafter.py", train, [*train, "--noanswers_only"],
      [*train, "--pack"],
      [*train, f"--target={target_dir}", "--output_dir=other"], cwd=tmp_path)
  study = scripts.last_line(result)
  assert all(np.isfinite(study["loss"]))
  assert 0 < study["tokens"] < 2 * 2 * 23  # without padding
  assert sum(study["by_row"]["positions"]) < 2 * 21  # of answers alone
  run = json.loads((tmp_path / "out/run.json").read_text())
  assert run["answers_only"] is True
  assert "answers_only" in other["code"]
  assert "pack is False there and" in joined["code"]
  assert "--data=chat.jsonl, which holds conversations, needs" in plain["code"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pack", [False, True])
def test_heads_learn_from_answers_of_the_target(tmp_path, target_dir, pack):
  # Broken: padding of generated or stored rows is trained, or features that are
  # kept are those of other rows.
  pytest.importorskip("jinja2")
  target = _with_template(tmp_path, target_dir)
  (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": [
      {"role": "user", "content": f"q{i}"},
      {"role": "assistant", "content": "a" * (1 + i % 4)}]}) + "\n"
      for i in range(40)))
  [result] = scripts.run_all("train_drafter.py", [
      "--method=eagle1", f"--target={target}", "--keep_features",
      "--data=self:chat.jsonl,chat.jsonl", "--self_rows=4", "--batch_size=4",
      "--row_tokens=24", "--held_out_rows=2", "--heads=2",
      "--evaluate_every=0", "--steps=20", "--output_dir=out",
      *["--pack"] * pack], cwd=tmp_path)
  study = scripts.last_line(result)
  assert all(np.isfinite(study["loss"]))
  if pack:
    assert study["tokens"] == 20 * 4 * 23
  else:
    assert 20 * 4 * 19 < study["tokens"] < 20 * 4 * 23
    assert 0 < sum(study["by_row"]["positions"]) < 2 * 20
