"""Whole files, claimed directories, and what a fingerprint tells apart."""

import dataclasses
import itertools
import json
import pickle
import subprocess
import sys
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.utils import files
from specjax.utils import processes
from specjax.utils.fingerprints import fingerprint


@dataclasses.dataclass(frozen=True)
class _Setting:
  value: Any


_THINGS = [
    (), (None,), ("",), ("ab",), ("a", "b"), (["a", "b"],), ({"a": "b"},),
    (1,), (1.0,), (True,), ("1",), (b"1",), (np.int32(1),), (np.int64(1),),
    (np.array([1], np.int32),), (np.array([[1]], np.int32),),
    (np.array([1, 0], np.int32),), (np.array([1], np.int64),),
    (jax.random.key(1),), (jax.random.key(2),), (_Setting(1),),
    (_Setting("1"),),
    (_Setting(np.zeros(5000)),), (_Setting(np.eye(1, 5000, 2500)[0]),)]


def test_different_things_have_different_fingerprints():
  # Broken: a run goes on with what another one of other data began.
  prints = [fingerprint(*things) for things in _THINGS]
  for (one, a), (other, b) in itertools.combinations(zip(_THINGS, prints), 2):
    assert a != b, (one, other)
  assert prints == [fingerprint(*things) for things in _THINGS]


def test_a_fingerprint_is_that_of_the_values():
  # Broken: the same weights on a device, or a dict in another order, differ.
  weights = {"b": np.arange(3.0, dtype=np.float32), "a": np.ones(2, np.int32)}
  same = {"a": jnp.ones(2, jnp.int32), "b": jnp.arange(3.0)}
  assert fingerprint(weights) == fingerprint(same)
  with pytest.raises(TypeError, match="no repr that says what it is"):
    fingerprint(object())


def test_a_claimed_directory_is_refused_to_others(tmp_path):
  # Broken: two runs write into one directory, or a directory of an older
  # version ends in a traceback.
  path = tmp_path / "out/run.json"
  files.claim(path, {"seed": 1, "text": "a" * 90 + "b"}, "run")
  files.claim(path, {"seed": 1, "text": "a" * 90 + "b"}, "run")
  with pytest.raises(ValueError, match="another run: seed is 1 there and 2"):
    files.claim(path, {"seed": 2, "text": "a" * 90 + "b"}, "run")
  with pytest.raises(ValueError, match=r"text is \.\.\.a+b there .* \.\.\.a+c"):
    files.claim(path, {"seed": 1, "text": "a" * 90 + "c"}, "run")
  for content, words in (
      (json.dumps({"seed": 1, "params": "0123456789abcdef"}),
       "out holds a run of another version of specjax"),
      ("{}", "describes no run"), ("[1]", "holds a JSON list"),
      ("{", "is not JSON"), (b"\xff", "is not JSON")):
    path.write_bytes(content if isinstance(content, bytes)
                     else content.encode())
    with pytest.raises(ValueError, match=words) as e:
      files.claim(path, {"seed": 1}, "run")
    assert "\n" not in str(e.value)


def test_a_file_is_whole_or_not_there(tmp_path):
  # Broken: a killed writer leaves half of a file under its name, a failed one
  # its pieces; or two writers at once write into each other's file.
  path = tmp_path / "x"
  path.write_bytes(b"old")
  with pytest.raises(KeyboardInterrupt):
    with files.atomically(path) as f:
      f.write(b"ne")
      raise KeyboardInterrupt
  assert path.read_bytes() == b"old"
  with files.atomically(path) as f:
    f.write(b"new")
    with files.atomically(path) as other:
      other.write(b"other")
    assert path.read_bytes() == b"other"
  assert path.read_bytes() == b"new"
  assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named(tmp_path):
  # Broken: "No space left on device", and the user does not learn where.
  with pytest.raises(OSError) as e, files.naming(tmp_path / "x"):
    with open("/dev/full", "wb", buffering=0) as f:
      f.write(b"x")
  assert e.value.filename == str(tmp_path / "x")


_HOLD = """
import fcntl, sys, time
f = open(sys.argv[1], "ab")
fcntl.flock(f, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


def test_a_directory_belongs_to_one_process(tmp_path):
  # Broken: two runs write into one directory; or one that was killed keeps
  # others out of it, or leaves pieces of files that nobody deletes.
  refused = pytest.raises(ValueError, match=f"at work in {tmp_path}; wait")
  with files.locked(tmp_path, "run"):
    with refused, files.locked(tmp_path, "run"):
      pass
  holder = subprocess.Popen([sys.executable, "-c", _HOLD, tmp_path / ".lock"],
                            stdout=subprocess.PIPE)
  holder.stdout.readline()
  (tmp_path / "x.npz.0123abcd.partial").touch()
  (tmp_path / "download.partial").touch()  # none of ours
  with refused, files.locked(tmp_path, "run"):
    pass
  holder.kill()
  holder.communicate()
  assert len(list(tmp_path.iterdir())) == 3
  with files.locked(tmp_path, "run"):
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock", "download.partial"]


class _Odd(Exception):
  """One that pickle cannot make again."""

  def __init__(self, one, other):
    super().__init__(f"{one} {other}")


@pytest.mark.parametrize("error, sent", [
    (TypeError("an odd"), TypeError), (_Odd("an", "odd"), RuntimeError)])
def test_all_processes_hear_of_an_error_of_the_first(monkeypatch, error, sent):
  # Broken: they wait for ever for what the first one was to send.
  heard = []
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  monkeypatch.setattr(multihost_utils, "broadcast_one_to_all",
                      lambda x: heard.append(x) or x)

  def fail():
    raise error

  for work, kind in ((fail, type(error)), (lambda: fail, Exception)):
    with pytest.raises(kind):
      processes.by_the_first(work)
    nothing, other = pickle.loads(heard[-1].tobytes())
    assert nothing is None and isinstance(other, Exception)
    assert work is not fail or type(other) is sent and "an odd" in str(other)


def test_other_processes_write_no_archive(tmp_path, monkeypatch):
  # Broken: an archive asks for its place in a file that has none, and all
  # processes but the first end.
  monkeypatch.setattr(processes, "is_first", lambda: False)
  with files.atomically(tmp_path / "x.npz") as f:
    np.savez(f, a=np.zeros(10**6), b=np.zeros(3))
  assert not list(tmp_path.iterdir())
