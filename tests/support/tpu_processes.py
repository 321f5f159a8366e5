"""Test files that are scripts too, and compile for chips that are not there.

libtpu reads what it compiles for from its environment, so that each has a
process of its own.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(_ROOT / "experiments"))

from lib.compiler import tpu_compiler  # noqa: E402


def answer(script: str, *question: str, **environment: str):
  """What a file prints last, as JSON; the test is skipped without libtpu.

  Args:
    script: path of the test file.
    question: its arguments.
    environment: what it needs besides.
  """
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: pip install -e '.[tpu-aot]'")
  inherited = {**os.environ}
  inherited.pop("XLA_FLAGS", None)
  done = subprocess.run(
      [sys.executable, script, *question], cwd=_ROOT, capture_output=True,
      text=True, timeout=600, check=False, env={
          **inherited, **tpu_compiler.ENVIRONMENT,
          "PYTHONPATH": os.pathsep.join(
              str(_ROOT / name) for name in ("", "tests", "tests/support")),
          **environment})
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])
