"""Runs the scripts of `experiments/` as a user does."""

import contextlib
import csv
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from absl import flags

ROOT = pathlib.Path(__file__).parents[1]


def environment(optimised=False):
  """The environment of a process of its own.

  Args:
    optimised: whether programs are compiled as for a user, which pays where
      they run for longer than they compile. Else as in the tests.
  """
  own = {**os.environ, "PYTHONWARNINGS": "ignore"}
  if optimised:
    own["XLA_FLAGS"] = ""
  return own


def run(script, *flags, cwd, optimised=False):
  """The finished process of `experiments/<script>`, with its flags.

  It runs in the directory `cwd`; `optimised` is `environment`'s.
  """
  return subprocess.run(
      [sys.executable, ROOT / "experiments" / script, *flags], cwd=cwd,
      text=True, capture_output=True, timeout=600, stdin=subprocess.DEVNULL,
      env=environment(optimised))


def start(script, *flags, cwd=None):
  """The process of `experiments/<script>`, with its flags, as it runs."""
  return subprocess.Popen(
      [sys.executable, ROOT / "experiments" / script, *flags], cwd=cwd,
      text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE, env=environment())


def run_all(script, *flag_sets, cwd):
  """Runs of `experiments/<script>` with different flags, in one process.

  Returns:
    For each `{"code": ..., "stdout": ..., "stderr": ...}`, the code of its
    `SystemExit`: 0, or the line that says what is wrong.
  """
  result = subprocess.run(
      [sys.executable, "-c", _RUN_ALL, ROOT / "experiments",
       pathlib.Path(script).stem, json.dumps(flag_sets)], cwd=cwd, text=True,
      capture_output=True, timeout=600, stdin=subprocess.DEVNULL,
      env=environment())
  assert result.returncode == 0, result.stderr[-2000:]
  return json.loads(result.stdout.splitlines()[-1])


_RUN_ALL = """
import contextlib, importlib, io, json, sys
sys.path.insert(0, sys.argv[1])
script = importlib.import_module(sys.argv[2])
from absl import flags
from lib import common
found = []
for flag_set in json.loads(sys.argv[3]):
  flags.FLAGS.unparse_flags()
  with (contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err):
    try:
      common.run(script.main, [sys.argv[2], *flag_set])
    except SystemExit as e:
      code = e.code or 0
  found.append({"code": code, "stdout": out.getvalue(),
                "stderr": err.getvalue()})
print(json.dumps(found))
"""


@contextlib.contextmanager
def imported(script):
  """The module of `experiments/<script>`, in this process; its flags leave it.

  `lib.common.run` gives them their values.
  """
  before = set(flags.FLAGS)
  name = pathlib.Path(script).stem
  try:
    yield importlib.import_module(name)
  finally:
    sys.modules.pop(name, None)
    for flag in set(flags.FLAGS) - before:
      delattr(flags.FLAGS, flag)
    flags.FLAGS.unparse_flags()


def start_and_kill(script, *flags, output_dir, step):
  """SIGKILLs a training script at its checkpoint of `step`, or a later one."""
  process = start(script, *flags, f"--output_dir={output_dir}")
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
  """What a study found: the file that its last line of stdout names.

  Args:
    result: of `run` or of `run_all`.
  """
  if isinstance(result, dict):
    assert result["code"] == 0, result["code"]
    stdout = result["stdout"]
  else:
    assert result.returncode == 0, result.stderr[-2000:]
    stdout = result.stdout
  line = stdout.splitlines()[-1]
  assert len(line) < 300  # the table above stays on the screen
  found = json.loads(line)
  study = json.loads(pathlib.Path(found["results"]).read_text("utf-8"))
  assert study["study"] == found["study"]
  return study
