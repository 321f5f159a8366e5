#!/usr/bin/env python
"""Kills every long script at random moments and compares what is left.

Each script runs once undisturbed, with small settings. Then it is started again
and again in another directory and killed (SIGKILL), each time after a random
part of the time that it took; when it ends before that, a new directory is
begun. All that it wrote in the end must be what the undisturbed run wrote, to
the byte, but for times, plots, and what a time decided (the dynamic program's
choice of a tree). Nothing unfinished may be left.

  python experiments/runs/kill.py                   # ten kills each, an hour
  python experiments/runs/kill.py --scripts=train_lm,replay --kills=3

The last line of stdout is one JSON object.
"""

import argparse
import csv
import hashlib
import io
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time

_EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1]
_CORPUS = ("ast.py", "argparse.py", "difflib.py", "heapq.py", "inspect.py",
           "json/decoder.py", "pathlib.py", "random.py", "textwrap.py")
_SMALL_LM = (
    "--data=corpus", "--vocab_size=400", "--width=32", "--layers=2",
    "--heads=2", "--kv_heads=1", "--head_dim=16", "--mlp_width=64",
    "--context_length=64", "--warmup_fraction=0.0133",
    "--evaluate_every=400", "--checkpoint_every=100")
# {script: its commands, one after the other in the same directory}
_COMMANDS = {
    "train_lm": [  # and then it is extended
        [*_SMALL_LM, "--steps=1500"], [*_SMALL_LM, "--steps=2000"]],
    "train_drafter": [[
        "--method=medusa2", "--data=self:corpus", "--self_rows=64",
        "--row_tokens=48", "--held_out_rows=4", "--batch_size=4",
        "--steps=60", "--evaluate_every=20", "--checkpoint_every=10"]],
    "boost_drafters": [[
        "--drafter=tiny", "--data=corpus", "--rows=128", "--held_out_rows=8",
        "--prompt_tokens=16", "--continuation=16", "--gamma=2",
        "--steps=600", "--evaluate_every=200"]],
    "verification_study": [[
        "--prompts=code,docstrings", "--num_prompts=8", "--gamma=2,4",
        "--max_new_tokens=64"]],
    "tree_study": [[
        "--nodes=4,8", "--temperature=1", "--num_prompts=8",
        "--methods=chain_block,traversal", "--max_new_tokens=32",
        "--drafter=tiny"]],
    "self_drafting_study": [[
        "--heads=medusa", "--nountrained", "--drafter=tiny",
        "--temperature=1", "--num_prompts=8", "--nodes=5",
        "--max_new_tokens=32"]],
    "replay": [["--num_prompts=12", "--max_new_tokens=96", "--gamma=3"]],
}
_TIMES = {"seconds", "tokens_per_second", "speedup", "predicted_speedup",
          "measured_over_predicted", "verify_ms", "draft_ms", "overhead_ms",
          "round_over_step", "draft_over_step", "minutes", "pass_seconds",
          "level_seconds", "autoregressive_tokens_per_second"}
_DECIDED_BY_TIME = "dynamic_program"
_LEFT_OUT = (".png", ".md", ".lock")  # plots, tables with times


def _write_corpus(directory):
  """A few modules of the running Python, to train on."""
  directory.mkdir(exist_ok=True)
  for name in _CORPUS:
    path = pathlib.Path(sysconfig.get_path("stdlib"), name)
    if path.exists():
      (directory / name.replace("/", "_")).write_bytes(path.read_bytes())


def _without_times(value):
  """A JSON value without what depends on the machine's speed."""
  if isinstance(value, dict):
    return {name: _without_times(x) for name, x in value.items()
            if name not in _TIMES and name != _DECIDED_BY_TIME}
  if isinstance(value, list):
    return [_without_times(x) for x in value if not isinstance(x, dict)
            or x.get("method") != _DECIDED_BY_TIME]
  return value


def _content(path, directory):
  """What must be the same in a file, wherever its directory lies."""
  data = path.read_bytes().replace(str(directory).encode(), b"")
  if path.suffix == ".jsonl":
    return [_without_times(json.loads(line)) for line in data.splitlines()]
  if path.suffix == ".json":
    return _without_times(json.loads(data))
  if path.suffix == ".csv":
    rows = csv.DictReader(io.StringIO(data.decode(), newline=""))
    return _without_times(
        [row for row in rows if row.get("name") not in _TIMES])
  return hashlib.sha256(data).hexdigest()


def contents(directory: pathlib.Path):
  """What a run wrote, by file; of checkpoints the names alone.

  A checkpoint says when it was made. What matters of it is that the run goes
  on from it to the same end.
  """
  found = {}
  for path in sorted(directory.rglob("*")):
    name = path.relative_to(directory)
    if "checkpoints" in name.parts[:-1]:
      if name.parts[-2] == "checkpoints":
        found[str(name)] = "checkpoint"
    elif (path.is_file() and not path.name.endswith(_LEFT_OUT)
          and "tfevents" not in path.name):
      found[str(name)] = _content(path, directory)
  return found


class _Script:
  """A script's commands, in one directory after the other."""

  def __init__(self, name, work):
    self._name, self._work = name, work
    self._environment = {
        **os.environ, "JAX_COMPILATION_CACHE_DIR": str(work / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}

  def start(self, command, directory):
    """A process that runs one of the commands."""
    outputs = [f"--output_dir={directory}"]
    with open(self._work / f"{self._name}.log", "ab") as log:
      return subprocess.Popen(
          [sys.executable, str(_EXPERIMENTS / f"{self._name}.py"),
           *_COMMANDS[self._name][command], *outputs],
          cwd=self._work, env=self._environment, stdin=subprocess.DEVNULL,
          stdout=log, stderr=log, start_new_session=True)

  def whole(self, directory):
    """Runs all commands, undisturbed; returns the seconds of each."""
    seconds = []
    for command in range(len(_COMMANDS[self._name])):
      start = time.monotonic()
      self._check(self.start(command, directory).wait())
      seconds.append(time.monotonic() - start)
    return seconds

  def _check(self, code):
    if code:
      log = self._work / f"{self._name}.log"
      tail = log.read_text(errors="replace").strip().splitlines()[-1]
      sys.exit(f"{self._name} ended with {code}: {tail}\nsee {log}")

  def killed(self, directory, seconds, draw, kills):
    """Runs all commands, killed up to `kills` times; returns the moments."""
    moments = []
    for command, duration in enumerate(seconds):
      ended = False
      while not ended:
        process = self.start(command, directory)
        moment = draw.uniform(0, duration)
        try:
          code = process.wait(
              moment if len(moments) < kills else None)
        except subprocess.TimeoutExpired:
          os.killpg(process.pid, signal.SIGKILL)
          process.wait()
          moments.append(round(moment, 1))
        else:
          self._check(code)
          ended = True
    return moments


def _differences(want, got):
  """The names of files that are not the same."""
  return sorted(name for name in want.keys() | got.keys()
                if name not in want or name not in got
                or want[name] != got[name])


def test(name: str, work: pathlib.Path, kills: int, draw: random.Random):
  """Kills a script; returns what happened, to be printed."""
  script = _Script(name, work)
  script.whole(work / f"{name}-first")  # compiles, so that others need not
  seconds = script.whole(work / f"{name}-whole")
  want, moments, different, directories = (
      contents(work / f"{name}-whole"), [], {}, 0)
  while len(moments) < kills:
    directories += 1
    directory = work / f"{name}-killed-{directories}"
    moments += script.killed(directory, seconds, draw, kills - len(moments))
    for file in _differences(want, contents(directory)):
      different.setdefault(directory.name, []).append(file)
  print(f"{name}: {len(moments)} kills in {directories} runs, at seconds "
        f"{' '.join(map(str, moments))} of "
        f"{' + '.join(f'{x:.0f}' for x in seconds)}: "
        + (f"DIFFERENT {different}" if different
           else f"{len(want)} files the same"), flush=True)
  return {"script": name, "kills": len(moments), "runs": directories,
          "files": len(want), "different": different}


def main():
  """Parses the command line and kills."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--scripts", default=",".join(_COMMANDS))
  parser.add_argument("--kills", type=int, default=10, help="of each script")
  parser.add_argument("--seed", type=int, default=0, help="of the moments")
  parser.add_argument("--work", help="default: a new temporary directory")
  args = parser.parse_args()
  names = args.scripts.split(",")
  for name in names:
    if name not in _COMMANDS:
      parser.error(f"--scripts holds {name!r}; choose among "
                   f"{', '.join(_COMMANDS)}")
  work = pathlib.Path(args.work or tempfile.mkdtemp(prefix="kill-")).resolve()
  work.mkdir(parents=True, exist_ok=True)
  if any(work.iterdir()):
    parser.error(f"{work} is not empty; give a new directory")
  print(f"files and logs are in {work}", file=sys.stderr)
  _write_corpus(work / "corpus")
  draw = random.Random(args.seed)
  found = [test(name, work, args.kills, draw) for name in names]
  print(json.dumps({"study": "kill", "seed": args.seed, "scripts": found}))
  sys.exit(any(one["different"] for one in found))


if __name__ == "__main__":
  main()
