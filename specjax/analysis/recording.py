"""Drafts and both models' laws, recorded once.

A record is a directory: `record.json` says what was recorded, and one `.npz`
file holds the rounds of one prompt. Every file is complete or absent, so that
a recording that is killed goes on at its first missing prompt.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import os
import pathlib
import shutil
import sys
from typing import Any
import zipfile

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
import tqdm

from specjax import interfaces
from specjax.decoding.decoder import Decoder
from specjax.decoding.decoder import raise_if_not_finite
from specjax.types import Draft
from specjax.types import Trace
from specjax.types import Verdict
from specjax.utils.files import atomically
from specjax.utils.files import claim
from specjax.utils.files import locked
from specjax.utils.files import read_manifest
from specjax.utils.fingerprints import fingerprint

_MANIFEST = "record.json"
_ROUNDS_A_CALL = 8  # rounds between two looks from the host
# What zipfile and numpy raise on files that are cut or overwritten.
_DAMAGE = (OSError, EOFError, ValueError, KeyError, RuntimeError,
           zipfile.BadZipFile)


@struct.dataclass
class Rollout:
  """The rounds of one prompt, R of them, as numpy arrays.

  Attributes:
    trace: a `Trace` whose leading axis is R in place of B.
    expected: `[R]`, E[tau | draft] of the acting verifier, as it ran.
    survival: `[R, N]`, as in `RoundStats`.
    emitted: `[R]` int32, tokens committed; the limit may cut the last round's.
  """

  trace: Trace
  expected: np.ndarray
  survival: np.ndarray
  emitted: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
  """A complete record; iterating reads one prompt's `Rollout` at a time.

  Attributes:
    path: its directory.
    manifest: what was recorded, `record.json`: the decoder's parts by their
      repr, N as `num_nodes`, V as `vocab_size`, hashes of prompts and params.
  """

  path: pathlib.Path
  manifest: dict[str, Any]

  @classmethod
  def open(cls, path: str | os.PathLike[str]) -> "Record":
    """The record at `path`, after a check of every file's checksums.

    Raises:
      ValueError: there is no record, or prompts are missing or damaged.
    """
    path = pathlib.Path(path)
    if not (path / _MANIFEST).is_file():
      raise ValueError(f"no record at {path}: {_MANIFEST} is missing; make one "
                       "by analysis.record")
    manifest = read_manifest(path / _MANIFEST, "record")
    _check_manifest(path, manifest)
    total = manifest["num_prompts"]
    complete = total - len(_missing(path, manifest))
    if complete < total:
      raise ValueError(f"{path} holds {complete} of {total} prompts; call "
                       "analysis.record with its arguments again to complete "
                       "it")
    return cls(path, manifest)

  def __len__(self) -> int:
    return self.manifest["num_prompts"]

  def __iter__(self) -> Iterator[Rollout]:
    for index in range(len(self)):
      yield _read(self.path, index, self.manifest)


def record(decoder: Decoder, params: Mapping[str, Any],
           prompts: Sequence[ArrayLike], key: jax.Array,
           path: str | os.PathLike[str], *, max_new_tokens: int,
           progress: bool = True) -> Record:
  """Decodes every prompt alone and writes all that a verifier could ask for.

  Call it again with the same arguments to go on with a record that was cut
  short: complete prompts are kept, missing and damaged ones decoded, and the
  files are those of a recording that was never interrupted.

  Args:
    decoder: its observers are left out: `evaluate` judges any rule later.
    params: `{"target": ..., "drafter": ...}`.
    prompts: sequences of token ids. Prompt i has the request id i, so that its
      randomness is a function of (key, i).
    key: a PRNG key of `jax.random.key`, threefry.
    path: the record's directory; made if needed.
    max_new_tokens: tokens generated for every prompt, at least 1. A prompt
      takes up to max_new_tokens * 2 * N * V floats.
    progress: whether to report on stderr.

  Returns:
    The complete `Record`.

  Raises:
    ValueError: bad prompts, as in `Decoder.prefill`; `path` holds a record of
      other arguments, or another process records there; the disk has too little
      space.
    FloatingPointError: a model's logits were not finite.
  """
  if max_new_tokens < 1:
    raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least "
                     "1: a record of no round tells nothing")
  path = pathlib.Path(path)
  decoder = dataclasses.replace(decoder, observers=())
  prompts = [np.asarray(row) for row in prompts]
  limits = [row.size + max_new_tokens for row in prompts]
  shapes = _shapes(decoder, params, prompts, key, limits)
  manifest = _manifest(decoder, params, prompts, key, max_new_tokens, shapes)
  _check_place(path)
  with locked(path, "recording"):
    claim(path / _MANIFEST, manifest, "record")
    missing = _missing(path, manifest)
    progress = progress and bool(missing)
    if progress:
      leaves = jax.tree.leaves(shapes)
      round_size = sum(
          x.size * x.dtype.itemsize for x in leaves) / len(prompts)
      most = _size(round_size * max_new_tokens * len(missing))
      print(f"recording {len(missing)} of {len(prompts)} prompts to {path}: at "
            f"most {most}", file=sys.stderr)
    # One capacity for all prompts, so that the loop compiles once.
    capacity = max(limits) + manifest["num_nodes"]
    written = 0
    with _bar(len(prompts), len(missing), progress) as advance:
      for done, index in enumerate(missing, 1):
        rollout = _decode(decoder, params, prompts[index], key, index,
                          limits[index], capacity)
        written += _write(path, index, rollout)
        advance(_size(written))
        if done == 1:
          _check_space(path, written, len(missing) - 1)
  return Record(path, manifest)


def _shapes(decoder, params, prompts, key, limits) -> Rollout:
  """Shapes of one round of all prompts, B in place of R.

  Nothing is run, but all that `prefill` checks is checked: a bad last prompt
  must not come up after hours.
  """
  def one_round():
    state = decoder.prefill(params, prompts, key, limits=limits)
    return _rollout(*decoder.decode_traced(params, state, 1)[1:])

  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
                      jax.eval_shape(one_round))


def _rollout(stats, trace) -> Rollout:
  # NumPy has no bfloat16 on disk, and float32 holds all of it.
  wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
  draft = trace.draft.replace(probs=wide(trace.draft.probs))
  return Rollout(
      trace=trace.replace(draft=draft, target_probs=wide(trace.target_probs)),
      expected=stats.expected[:, :, 0], survival=stats.survival[:, :, 0],
      emitted=stats.emitted)


def _decode(decoder, params, prompt, key, index, limit, capacity) -> Rollout:
  """The rounds of one prompt until it is done."""
  state = decoder.prefill(params, [prompt], key, limits=limit,
                          request_ids=[index], capacity=capacity)
  parts = []
  while not state.done.all():
    state, stats, trace = decoder.decode_traced(params, state, _ROUNDS_A_CALL)
    raise_if_not_finite(stats)
    stats, trace = jax.device_get((stats, trace))
    active = stats.active[:, 0]
    parts.append(jax.tree.map(lambda x, active=active: x[active, 0],
                              _rollout(stats, trace)))
  return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _manifest(decoder, params, prompts, key, max_new_tokens, shapes):
  parts = {f.name: repr(getattr(decoder, f.name))
           for f in dataclasses.fields(decoder)
           if f.name not in ("observers", "debug")}
  return {
      **parts,
      "num_nodes": shapes.survival.shape[-1],
      "vocab_size": shapes.trace.target_probs.shape[-1],
      "drafter_is": sorted(interfaces.capabilities(decoder.drafter)),
      "key": np.asarray(jax.random.key_data(key)).tolist(),
      "max_new_tokens": int(max_new_tokens),
      "num_prompts": len(prompts),
      "prompts": fingerprint([row.astype(np.int64) for row in prompts]),
      "params": fingerprint(params),
      # Other devices and compilers round differently.
      "platform": f"{jax.default_backend()}, jax {jax.__version__}",
  }


def _check_place(path):
  """Refuses a directory whose files are of another origin."""
  if path.exists() and not path.is_dir():
    raise ValueError(f"{path} is a file; a record needs a directory")
  if not (path / _MANIFEST).is_file() and any(path.glob("*.npz")):
    raise ValueError(f"{path} holds .npz files and no {_MANIFEST}; choose "
                     "another path")


def _check_manifest(path, manifest):
  """Refuses a manifest that `record` did not write."""
  kinds = {"num_prompts": int, "num_nodes": int, "vocab_size": int,
           "verifier": str, "drafter_is": list}
  for name, kind in kinds.items():
    if not isinstance(manifest.get(name), kind):
      raise ValueError(f"{path / _MANIFEST} describes no record: {name} is "
                       f"{manifest.get(name)!r}; choose another path, or "
                       f"delete {path}")


def _missing(path, manifest) -> list[int]:
  """Prompts without a whole file."""
  def is_missing(index):
    try:
      # Checksums first: numpy must not allocate what a damaged header says.
      with zipfile.ZipFile(_file(path, index)) as arrays:
        if arrays.testzip():
          return True
      _read(path, index, manifest)
    except _DAMAGE:
      return True
    return False

  return [i for i in range(manifest["num_prompts"]) if is_missing(i)]


def _file(path, index):
  return path / f"prompt_{index:06d}.npz"


def _write(path, index, rollout) -> int:
  """Writes one prompt's rounds; returns the bytes."""
  trace = rollout.trace
  arrays = {**vars(trace.draft), **vars(trace.verdict),
            "target_probs": trace.target_probs, "expected": rollout.expected,
            "survival": rollout.survival, "emitted": rollout.emitted}
  with atomically(_file(path, index)) as f:
    np.savez(f, **arrays)
  return _file(path, index).stat().st_size


def _read(path, index, manifest) -> Rollout:
  """One prompt's rounds; one of `_DAMAGE` is raised where they are not all."""
  nodes, vocab = manifest["num_nodes"], manifest["vocab_size"]
  with np.load(_file(path, index)) as arrays:
    take = lambda kind: kind(**{f.name: arrays[f.name]
                                for f in dataclasses.fields(kind)})
    rollout = Rollout(
        trace=Trace(draft=take(Draft), verdict=take(Verdict),
                    target_probs=arrays["target_probs"]),
        expected=arrays["expected"], survival=arrays["survival"],
        emitted=arrays["emitted"])
  rounds = len(rollout.expected)
  for leaf in jax.tree.leaves(rollout):
    if not rounds or leaf.shape not in (
        (rounds,), (rounds, nodes), (rounds, nodes, vocab)):
      raise ValueError(f"{_file(path, index)} holds an array of shape "
                       f"{leaf.shape}; delete it and record again")
  return rollout


def _check_space(path, size, left):
  """Raises where `left` more prompts of `size` bytes do not fit the disk."""
  free = shutil.disk_usage(path).free
  if size * left > free:
    raise ValueError(
        f"the other {left} prompts need about {_size(size * left)} and "
        f"{_size(free)} are free at {path}; make room and call again, or "
        "record fewer prompts or tokens")


def _size(count) -> str:
  return f"{count / 1e6:,.1f} MB"


@contextlib.contextmanager
def _bar(total, missing, progress):
  """A function to call with the size written after every prompt."""
  if not progress:
    yield lambda size: None
    return
  with tqdm.tqdm(total=total, initial=total - missing, unit="prompt",
                 dynamic_ncols=True) as bar:
    def advance(size):
      bar.set_postfix_str(size)
      bar.update()

    yield advance
