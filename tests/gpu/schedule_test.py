"""Launches of a round, counted by the compiler for NVIDIA GPUs."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from scripts import ROOT

sys.path.append(str(ROOT / "experiments"))

from lib.compiler import gpu_schedule  # noqa: E402

_LAUNCHES = """\
000: kCommandBuffer [source | next=001 (1)]
    001: kCopy [source | sink] kCopy
    002: kCustomKernel [source | sink] a grid: [1, 1, 1]
003: kWhile [prev=000 (1) | sink]
condition:
    004: kCustomKernel [source | sink] b grid: [1, 1, 1]
  body:
    005: kCuDnn [source | sink] kCuDnn
    006: kWhile [source | sink]
condition:
        007: kCustomKernel [source | sink] c grid: [1, 1, 1]
      body:
        008: kConditional [source | sink]
          false_branch:
            009: kCustomKernel [source | sink] d grid: [1, 1, 1]
    010: kDynamicSliceFusion params=1, results=1
        011: kCopy [source | sink] kCopy
"""


def test_the_dump_is_counted():
  # Broken: a launch of an inner loop, or of a condition that never runs.
  program = """
  %w.1 = (s32[]) while(%a), body=%b, "known_trip_count":{"n":"4"}
  %w.2 = (s32[]) while(%a), body=%c
"""
  assert gpu_schedule.counted(_LAUNCHES, program) == [
      (2, 0, 1, 0), (2, 1, 0, 1), (1, 0, 0, 1)]
  with pytest.raises(ValueError, match="kOther"):
    gpu_schedule.counted("000: kOther [source | sink]", "")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None,
                    reason="requires pip install -e '.[gpu-aot]'")
def test_a_round_has_few_launches(tmp_path):
  # Broken: an operation that XLA launches alone, or a wait for the host.
  subprocess.run(
      [sys.executable, ROOT / "experiments/runs/gpu_schedule.py",
       "--rounds=chain", f"--output_dir={tmp_path}"], check=True,
      env={**os.environ, "XLA_FLAGS": ""})
  for row in json.loads((tmp_path / "gpu_schedule.json").read_text())["rows"]:
    assert row["waits"] == 0
    assert max(row["target_layer"], row["draft_layer"]) <= 9
    assert row["draft_step"] <= 12 and row["rest"] <= 60
