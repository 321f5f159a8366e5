"""Runs the scripts of `experiments/` as a user does."""

import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]


def run(script, *flags, cwd):
  """The finished process of `experiments/<script>`."""
  return subprocess.run(
      [sys.executable, ROOT / "experiments" / script, *flags], cwd=cwd,
      text=True, capture_output=True, timeout=600, stdin=subprocess.DEVNULL,
      env={**os.environ, "PYTHONWARNINGS": "ignore"})


def start_and_kill(script, *flags, output_dir, step):
  """SIGKILLs a training script at its checkpoint of `step`, or a later one."""
  process = subprocess.Popen(
      [sys.executable, ROOT / "experiments" / script, *flags,
       f"--output_dir={output_dir}"], text=True, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE)
  deadline = time.monotonic() + 200
  while max(checkpoints(output_dir), default=0) < step:
    assert process.poll() is None, process.communicate()[1]
    assert time.monotonic() < deadline, "no checkpoint appeared"
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.communicate()


def checkpoints(output_dir):
  """The steps of a training script's complete checkpoints."""
  return [int(path.name) for path in (output_dir / "checkpoints").glob("*")
          if path.name.isdigit()]


def metrics(output_dir):
  """The rows of metrics.csv that do not depend on the machine's speed."""
  with open(output_dir / "metrics.csv", newline="") as f:
    return [row for row in csv.reader(f) if row[1] != "tokens_per_second"]


def last_line(result):
  """The JSON object with which a study ends."""
  assert result.returncode == 0, result.stderr[-2000:]
  return json.loads(result.stdout.splitlines()[-1])
