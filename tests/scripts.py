"""Runs the scripts of `experiments/` as a user does."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def run(script, *flags, cwd):
  """The finished process of `experiments/<script>`."""
  return subprocess.run(
      [sys.executable, ROOT / "experiments" / script, *flags], cwd=cwd,
      text=True, capture_output=True, timeout=600, stdin=subprocess.DEVNULL,
      env={**os.environ, "PYTHONWARNINGS": "ignore"})


def last_line(result):
  """The JSON object with which a study ends."""
  assert result.returncode == 0, result.stderr[-2000:]
  return json.loads(result.stdout.splitlines()[-1])
