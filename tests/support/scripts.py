"""Runs the scripts of `experiments/` as a user does."""

import contextlib
import csv
import importlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from absl import flags
import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Import path of test files that run as scripts.
TESTS = (str(ROOT / "tests"), str(ROOT / "tests" / "support"))
sys.path.append(str(ROOT / "experiments"))


def environment(optimised=False):
  """The environment of a process of its own.

  Args:
    optimised: whether programs are optimised a little, which pays where they
      run for longer than they compile. Else as in the tests.
  """
  own = {**os.environ, "PYTHONWARNINGS": "ignore"}
  if optimised:
    own["XLA_FLAGS"] = own.get("XLA_FLAGS", "").replace(
        "_optimization_level=0", "_optimization_level=1")
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
  """Runs of `experiments/<script>` with different flags, in this process.

  What is imported, read or compiled for one is there for all. A finished
  process is `run`'s; that each script is a program at all is tested once, in
  experiments_test.py.

  Returns:
    For each `{"code": ..., "stdout": ..., "stderr": ...}`, the code of its
    `SystemExit`: 0, or the line that says what is wrong.
  """
  from lib import common  # pylint: disable=g-import-not-at-top
  make_room()
  found = []
  with imported(script) as module:
    for flag_set in flag_sets:
      flags.FLAGS.unparse_flags()
      with (contextlib.chdir(cwd), open(os.devnull) as nothing,
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
            pytest.MonkeyPatch.context() as patch):
        patch.setattr(sys, "stdin", nothing)
        code = 0
        try:
          common.run(module.main, [module.__name__, *flag_set])
        except SystemExit as e:
          code = e.code or 0
      found.append({"code": code, "stdout": out.getvalue(),
                    "stderr": err.getvalue()})
  return found


def make_room(most=20_000):
  """Lets compiled code go before it fills the 65,530 maps of a process."""
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_bytes().count(b"\n") > most:
    jax.clear_caches()


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
