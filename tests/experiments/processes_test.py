"""Two real processes, killed and started again, and as many devices as asked.

A backend has its devices when it starts, so each program runs in processes of
its own: this file as a script, which runs scripts one after the other, decodes
on several meshes, and prints one line of JSON.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import flax.traverse_util
import jax
import numpy as np
import pytest
import scripts

import specjax as sj
from specjax import testing
from specjax.decoding import placement as sharding
from specjax.models import save_model

pytestmark = pytest.mark.slow

_MESH = "--mesh=data:2,model:2"
_REFUSED = [  # of eight devices
    (["--mesh=data:4,model:4"], ["needs 16 devices and there are 8"]),
    (["--mesh=data:3"], ["splits a batch over 3 devices", "has 4 rows"]),
    (["--mesh=model:8"], ["heads is 4 and mesh axis 'model' has 8 devices"]),
    (["--mesh=rows:2"], ["contains 'rows:2'", "data:2,model:4"]),
    (["--mesh=data:2,data:2"], ["contains 'data:2'", "data:2,model:4"]),
    (["--mesh=data:0"], ["contains 'data:0'"]),
    (["--coordinator=localhost:1"], ["requires --mesh"]),
    (["--process_id=1"], ["requires --coordinator"]),
    ([_MESH, "--coordinator=here"], ["'here'; give HOST:PORT"]),
    ([_MESH, "--coordinator=here:1", "--process_id=2", "--num_processes=2"],
     ["--process_id is 2 and --num_processes 2"]),
]


_TINY = ["--target=target", "--steps=2", "--warmup_fraction=0.5",
         "--batch_size=4", "--evaluate_every=0", "--save_dtype=float32"]
_DISTILL = [*_TINY, "--prompts=copy", "--num_prompts=14", "--rows_per_file=4",
            "--prompt_tokens=4", "--max_new_tokens=4", "--vocab_size=0",
            "--top=4", "--width=8", "--layers=1", "--heads=2", "--kv_heads=2",
            "--head_dim=4", "--mlp_width=8", "--row_tokens=16", "--gamma=2"]
_BOOST = [*_TINY, "--drafter=target", "--data=corpus.txt", "--rows=4",
          "--held_out_rows=2", "--gamma=2", "--prompt_tokens=4",
          "--continuation=4"]
_HEADS = ["train_drafter.py", *_TINY, "--method=medusa", "--data=corpus.txt",
          "--row_tokens=8", "--held_out_rows=2", "--heads=1"]
_ON_A_MESH = [  # other scripts; boost_drafters.py does what these do
    [*_HEADS, "--output_dir=heads", _MESH],
    ["distill.py", *_DISTILL, "--output_dir=distilled", _MESH],
    ["generate.py", "--target=target", "--drafter=target", "--gamma=2",
     "--prompt=draft verify", "--max_new_tokens=4", "--mesh=model:2"]]
_REFUSED_EARLY = [  # before the target writes for hours
    (["distill.py", *_DISTILL, "--heads=3", "--kv_heads=3", "--mesh=model:2"],
     "heads is 3 and mesh axis"),
    (["boost_drafters.py", *_BOOST, "--mesh=model:8"],
     "heads is 4 and mesh axis")]


def _run(script, *flags, hook=None):
  """A run of `experiments/<script>`, with what happens to the second process.
  """
  return {"script": script, "flags": flags, "hook": hook}


@contextlib.contextmanager
def _sigterm():
  """SIGTERM before the run; JAX looks for it once a second."""
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(3)
  yield


@contextlib.contextmanager
def _on_two_devices():
  """Asserts that all states of a run with a mesh are on two devices."""
  start, found = sharding._start, []

  def watched(*arguments):
    state = start(*arguments)
    found.append(len(state.tokens.sharding.device_set))
    return state

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, "_start", watched)
    yield
  assert found and set(found) == {2}, found


@contextlib.contextmanager
def _killed():
  """Kills the process when a study has stored its first run."""
  from lib.rollouts import resumable  # pylint: disable=g-import-not-at-top
  decode = resumable._in_windows

  def first(*arguments):
    yield next(decode(*arguments))
    os.kill(os.getpid(), signal.SIGKILL)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(resumable, "_in_windows", first)
    yield


_HOOKS = {None: contextlib.nullcontext, "sigterm": _sigterm,
          "two": _on_two_devices, "killed": _killed}


def _run_all(runs):
  """What each run said, see `scripts.run_all`."""
  found = []
  for run in runs:
    with _HOOKS[run["hook"]]():
      found += scripts.run_all(run["script"], run["flags"], cwd=".")
  return found


_PROMPTS = ([1, 2, 3], [4], [5, 6], [7, 0, 1, 2])
_TEMPERATURES = (0.0, 1.0, 0.7, 0.0)


def _text(kind, shape):
  """What rows, greedy and sampled, become on a mesh of a shape, or on none.

  Of pages there are more from a certain length on, so these texts are longer.
  A "broken" chain has a token whose embedding is NaN, and what is returned is
  the error.

  Broken: a device holds the whole of a cache before it is split.
  """
  pair = testing.tiny_pair(8, heads=4, kv_heads=2)
  pages = sj.models.Transformer(
      pair.target.config, cache=sj.caches.Paged(page=32))
  target = pages if kind == "pages" else pair.target
  other = testing.tiny_pair(8, seed=1).drafter  # two heads, which do not divide
  own = testing.tiny_pair(8, seed=1).params["drafter"]
  drafter, rule, params, how = {
      "chain": (sj.drafters.draft_model(model=pair.drafter, gamma=3),
                sj.verifiers.Block(), pair.params["drafter"], "split"),
      "tree": (sj.drafters.Paths(
          models=(pair.drafter, other), num_paths=2, length=2),
               sj.verifiers.Traversal(), (pair.params["drafter"], own),
               "replicate"),
      "pages": (sj.drafters.draft_model(model=pages, gamma=3),
                sj.verifiers.Block(), pair.params["drafter"], "split"),
  }["chain" if kind == "broken" else kind]
  decoder = sj.Decoder(target=target, drafter=drafter, verifier=rule)
  programs = []
  params = {"target": pair.params["target"], "drafter": params}
  if kind == "broken":
    table = params["target"]["embedding"]
    params["target"] = {**params["target"], "embedding": table.at[7].set(
        np.nan)}
  placement = None
  if shape is not None:
    placement = sharding.Placement(drafter=how, mesh=jax.sharding.Mesh(
        np.array(jax.devices()).reshape(shape), ("data", "model")))
    params = placement.put(decoder, params)
  with _watched(programs):
    try:
      found = decoder.generate(
          params, _PROMPTS, jax.random.key(3), temperature=_TEMPERATURES,
          max_new_tokens=140 if kind == "pages" else 20, grows=kind == "pages",
          placement=placement)
    except FloatingPointError as e:
      return str(e)
  cache = jax.eval_shape(lambda params: target.init_cache(
      params, len(_PROMPTS), 128), params["target"])
  whole = {"f32[" + ",".join(map(str, x.shape)) + "]"
           for x in jax.tree.leaves(cache) if x.ndim > 2}
  assert len(programs) == (shape is not None)
  for text in programs:  # nowhere is a whole cache, which is then split
    assert "f32[" in text and not any(shape in text for shape in whole), kind
  return [row.tolist() for row in found.tokens]


@contextlib.contextmanager
def _watched(programs):
  """Puts the programs that start a state on a mesh into a list, as text."""
  start = sharding._start

  def watched(*arguments):
    programs.append(start.lower(*arguments).compile().as_text())
    return start(*arguments)

  sharding._start = watched
  try:
    yield
  finally:
    sharding._start = start


def _start(cwd, devices, runs, decodes):
  """A process with virtual devices; `_answer` waits for it.

  Args:
    cwd: its directory.
    devices: how many.
    runs: of scripts, see `_run`.
    decodes: arguments of `_text`.
  """
  environment = scripts.environment()
  environment["XLA_FLAGS"] = (
      environment.get("XLA_FLAGS", "")
      + f" --xla_force_host_platform_device_count={devices}")
  environment["PYTHONPATH"] = os.pathsep.join(
      [str(scripts.ROOT), *scripts.TESTS, os.environ.get("PYTHONPATH", "")])
  return subprocess.Popen(
      [sys.executable, __file__, json.dumps([runs, decodes])], cwd=cwd,
      text=True, env=environment, stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _answer(process, timeout=300):
  out, error = process.communicate(timeout=timeout)
  assert process.returncode == 0, error[-3000:]
  return json.loads(out.splitlines()[-1])


def _start_two(cwd, runs, decodes=(), mesh=_MESH):
  """Two processes of two devices each, joined."""
  with socket.socket() as s:
    s.bind(("localhost", 0))
    place = f"--coordinator=localhost:{s.getsockname()[1]}"
  return [_start(cwd, 2, [
      _run(run["script"], *run["flags"], mesh, place, "--num_processes=2",
           f"--process_id={number}", hook=run["hook"] if number else None)
      for run in runs], decodes) for number in range(2)]


def _save_target(directory, texts, seed=0, layers=1):
  """A random target with a tokenizer."""
  tokenizer = sj.data.tokenizers.train(texts, 264)
  config = testing.tiny_pair(8, heads=4, kv_heads=2).target.config
  model = sj.models.Transformer(dataclasses.replace(
      config, vocab_size=tokenizer.vocab_size, context_length=64,
      layers=layers))
  save_model(directory, model, model.init(jax.random.key(seed)))
  tokenizer.save(directory / "tokenizer.json")


def _weights(directory):
  params = sj.models.load_model(directory, np.float32)[1]
  return flax.traverse_util.flatten_dict(jax.tree.map(np.asarray, params))


@pytest.mark.timeout(600)
def test_two_processes_train_and_decode_as_one(tmp_path):
  # Broken: all processes train on the rows of one; a row that breaks down in
  # one is not seen in the others; a checkpoint of several is lost, or is read
  # by as many alone; a killed run ends with other weights; a mesh decodes other
  # texts than one device; SIGTERM between two runs leaves the others waiting.
  words = np.random.default_rng(0).choice(
      ["draft", "verify", "accept", "root", "token"], 4000)
  (tmp_path / "corpus.txt").write_text(" ".join(words))
  _save_target(tmp_path / "target", [" ".join(words)])
  train = [
      "train_lm.py", "--data=corpus.txt", "--vocab_size=264", "--width=8",
      "--layers=1", "--heads=4", "--kv_heads=2", "--head_dim=4",
      "--mlp_width=8", "--context_length=16", "--batch_size=4", "--steps=20",
      "--warmup_fraction=0.1", "--evaluate_every=0", "--save_dtype=float32",
      "--optimizer=adamw", "--learning_rate=0.003"]

  first, second = _start_two(
      tmp_path, [_run(*train, "--output_dir=killed", "--checkpoint_every=1")])
  killed = tmp_path / "killed"
  deadline = time.monotonic() + 200
  while max(scripts.checkpoints(killed), default=0) < 5:
    assert second.poll() is None, second.communicate()[1]
    assert time.monotonic() < deadline, "no checkpoint appeared"
    time.sleep(0.01)
  # The other one cannot go on, and whoever runs them ends it.
  for process in (second, first):
    process.send_signal(signal.SIGKILL)
    process.communicate()
  assert not (killed / "model.safetensors").exists()
  assert max(scripts.checkpoints(killed)) < 20
  for name in ("alone", "narrow"):
    shutil.copytree(killed, tmp_path / name)

  two = _start_two(tmp_path, [
      _run(*train, "--output_dir=killed"),
      _run(*train, "--output_dir=whole"),
      _run(*_HEADS, "--output_dir=shared_heads"),
      _run(*train, "--output_dir=stopped", hook="sigterm")],
                   [("chain", (2, 2)), ("tree", (2, 2)), ("broken", (2, 2))])
  one = _start(tmp_path, 8, [
      _run(*train, "--output_dir=alone"),
      _run(*train, "--output_dir=narrow", "--mesh=model:2"),
      *(_run(*flags) for flags in _ON_A_MESH),
      *(_run(*train, "--output_dir=none", *flags) for flags, _ in _REFUSED),
      *(_run(*flags, "--output_dir=early") for flags, _ in _REFUSED_EARLY)], [
          ("chain", None), ("tree", None), ("chain", (2, 4)), ("tree", (4, 2)),
          ("pages", (4, 2)), ("broken", None)])
  (spoken, texts), (unspoken, same) = map(_answer, two)
  assert spoken[-1]["code"] == unspoken[-1]["code"] == 128 + signal.SIGTERM
  assert "SIGTERM after step 1, which is saved" in spoken[-1]["stderr"]
  assert scripts.checkpoints(tmp_path / "stopped") == [1]
  for speaker, silent, study in zip(
      spoken[:-1], unspoken[:-1], ("train_lm", "train_lm", "train_drafter"),
      strict=True):
    assert speaker["code"] == silent["code"] == 0, (speaker, silent)
    line = json.loads(speaker["stdout"].splitlines()[-1])
    assert line["study"] == study
    assert silent["stdout"] == ""  # one speaks for all
  (alone, narrow, *others), (chain, tree, *split) = _answer(one)
  assert alone["code"] == narrow["code"] == 0, (alone, narrow)
  on_a_mesh, refused = others[:len(_ON_A_MESH)], others[len(_ON_A_MESH):]
  for found, (script, *_) in zip(on_a_mesh, _ON_A_MESH):
    assert found["code"] == 0, (script, found)
  *studies, text = on_a_mesh
  for found, name in zip(studies, ("train_drafter", "distill"), strict=True):
    assert scripts.last_line(found)["study"] == name
  assert text["stdout"].startswith("draft verify")
  refusals = [*_REFUSED, *((flags, [words]) for flags, words in _REFUSED_EARLY)]
  for found, (flags, words) in zip(refused, refusals, strict=True):
    assert str(found["code"]).startswith("error: "), (flags, found)
    assert "\n" not in found["code"]
    for word in words:
      assert word in found["code"], (flags, found)
  assert not (tmp_path / "none" / "run.json").exists()
  assert not (tmp_path / "early").exists()

  # What a mesh decodes is what one device does, in two processes too.
  # Cut off, a longer text on pages that became more is the same one.
  split_chain, split_tree, pages, broken = split
  assert "row 0 are not finite" in broken  # which the first process has
  assert texts == same == [chain, tree, broken]
  assert chain == split_chain and tree == split_tree
  assert [len(row) for row in chain] == [len(row) + 20 for row in _PROMPTS]
  assert [len(row) for row in pages] == [len(row) + 140 for row in _PROMPTS]
  assert [row[:len(short)] for row, short in zip(pages, chain)] == chain

  whole = tmp_path / "whole"
  for name in ("model.safetensors", "config.json", "tokenizer.json",
               "run.json"):
    assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
  assert scripts.metrics(killed) == scripts.metrics(whole)
  want = _weights(whole)
  for name in ("alone", "narrow"):
    for path, x in _weights(tmp_path / name).items():
      np.testing.assert_allclose(x, want[path], atol=2e-4, err_msg=str(path))


_PROMPTS_OF_STUDIES = ["--num_prompts=4", "--prompts=mine.txt",
                       "--max_new_tokens=12"]
_STUDIES = {  # flags of studies, which decode four prompts at a time or alone
    "replay.py": ["--drafter=drafter", "--gamma=2", *_PROMPTS_OF_STUDIES,
                  "--verifier=token,block"],
    "tree_study.py": ["--drafter=drafter", "--nodes=3", "--temperature=1",
                      "--methods=chain_block", "--timing=none",
                      *_PROMPTS_OF_STUDIES],
    "self_drafting_study.py": [
        "--drafter=drafter", "--heads=", "--gamma=2", "--temperature=0",
        "--timing=none", *_PROMPTS_OF_STUDIES],
    "free_drafts_study.py": ["--drafter=ngram", "--gamma=2", "--timing=none",
                             *_PROMPTS_OF_STUDIES],
    "skip_study.py": [
        "--target=deep", "--data=corpus.txt", "--skip=", "--rows=4",
        "--prompt_tokens=4", "--continuation=4", "--gamma=2"],
    "distillation_study.py": [
        "--drafter=drafter", "--data=corpus.txt", "--losses=forward_kl",
        "--seeds=1", "--rows=4", "--steps=2", "--batch_size=4", "--gamma=2",
        "--prompt_tokens=4", "--continuation=4", "--num_prompts=4",
        "--rounds=2"],
    "verification_study.py": [
        "--drafter=drafter", "--gamma=2", "--verifier=token,block", "--error=0",
        "--noown_rollouts", *_PROMPTS_OF_STUDIES],
}


@pytest.mark.timeout(600)
def test_studies_on_a_mesh_have_the_tables_of_one_device(tmp_path):
  # Broken: a study ignores --mesh, --batch or --coordinator; a row of a batch
  # draws by its slot; bad values are found after the target is compiled; the
  # runs of a killed process are lost.
  words = np.random.default_rng(0).choice(
      ["draft", "verify", "accept", "root", "token"], 2000)
  for seed, name in enumerate(("target", "drafter")):
    _save_target(tmp_path / name, [" ".join(words)], seed)
  _save_target(tmp_path / "deep", [" ".join(words)], layers=2)
  (tmp_path / "corpus.txt").write_text(" ".join(words))
  (tmp_path / "mine.txt").write_text("\n\n".join(
      " ".join(words[7 * i:7 * i + 3 + i % 4]) for i in range(24)))
  runs = []
  for script, flags in _STUDIES.items():
    flags = [script, "--target=target", *flags]
    runs += [
        _run(*flags, "--batch=1", f"--output_dir=alone/{script}"),
        _run(*flags, "--batch=4", f"--output_dir=together/{script}",
             "--mesh=data:2", hook="two"),
        _run(*flags, "--batch=3", "--output_dir=none", "--mesh=data:2")]
  joined = flags + ["--batch=2", "--output_dir=joined"]  # verification_study.py
  killed = _start_two(tmp_path, [_run(*joined, hook="killed")],
                      mesh="--mesh=data:2")
  found, _ = _answer(_start(tmp_path, 2, runs, []), timeout=500)
  for i, script in enumerate(_STUDIES):
    alone, together, odd = found[3 * i:3 * i + 3]
    assert "--mesh=data:2" in odd["code"] and "3" in odd["code"], script
    _assert_equal_tables(script, alone, together)
  assert not (tmp_path / "none").exists()

  _, second = killed
  second.communicate()
  assert second.returncode == -signal.SIGKILL
  killed[0].kill()  # the other one cannot go on
  killed[0].communicate()
  assert (tmp_path / "joined/runs.1.jsonl").read_text().count("\n") == 1
  [([speaker], _), ([silent], _)] = map(_answer, _start_two(
      tmp_path, [_run(*joined)], mesh="--mesh=data:2"))
  assert silent["code"] == 0 and silent["stdout"] == "", silent
  assert "of 4 prompts are in" in speaker["stderr"]
  _assert_equal_tables("joined", alone, speaker)
  runs = (tmp_path / "joined/runs.jsonl").read_text()
  assert runs.count("\n") == 4 and not (
      tmp_path / "joined/runs.1.jsonl").exists()


def _assert_equal_tables(name, *runs):
  tables = [jax.tree.leaves_with_path(scripts.last_line(run)["rows"])
            for run in runs]
  for (path, x), (_, other) in zip(*tables, strict=True):
    assert x == other or x == pytest.approx(other, abs=1e-4), (name, path)


if __name__ == "__main__":
  _runs, _decodes = json.loads(sys.argv[1])
  print(json.dumps([_run_all(_runs),
                    [_text(*arguments) for arguments in _decodes]]))
