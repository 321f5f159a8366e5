"""Recorded drafts with the probabilities of target and draft model.

A record is a directory. `record.json` describes the recording, and each `.npz`
file contains the rounds of one prompt. Files are written atomically, so every
file is complete. An interrupted record is readable up to its first missing
prompt. Another call of `record` completes it.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import os
import pathlib
from typing import Any
import zipfile

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
import tqdm

from specjax import interfaces
from specjax.decoding.decoder import Decoder
from specjax.decoding.placement import Placement
from specjax.decoding.row_batches import decode_rows
from specjax.decoding.row_batches import DecodedRow
from specjax.types import Draft
from specjax.types import Trace
from specjax.types import Verdict
from specjax.utils import fields
from specjax.utils import processes
from specjax.utils.files import atomically
from specjax.utils.files import claim
from specjax.utils.files import locked
from specjax.utils.files import read_manifest
from specjax.utils.fingerprints import fingerprint

_MANIFEST = "record.json"
_ROUNDS_A_CALL = 8  # rounds per call of the compiled loop


@struct.dataclass
class Rollout:
  """Arrays of the R rounds of one prompt.

  Attributes:
    trace: drafts, target distributions and verdicts, with arrays `[R, ...]`.
    expected: `[R]` expected accepted tokens given the draft, for the decoder's
      verifier.
    survival: `[R, N]` probability of accepting at least i = 0..N-1 tokens, as
      in `RoundStats`.
    emitted: `[R]` int32 number of emitted tokens. The limit of the prompt may
      shorten the last round.
  """

  trace: Trace
  expected: np.ndarray
  survival: np.ndarray
  emitted: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
  """Recorded prompts. Iteration reads the `Rollout` of one prompt at a time.

  Attributes:
    path: directory of the record.
    manifest: content of `record.json`: the repr of each part of the decoder, N
      as `num_nodes`, V as `vocab_size`, `num_prompts`, hashes of prompts and
      parameters, and further settings.
  """

  path: pathlib.Path
  manifest: dict[str, Any]

  @classmethod
  def open(cls, path: str | os.PathLike[str]) -> "Record":
    """Returns the record at `path`, complete or interrupted.

    Raises:
      ValueError: `path` contains no record with a complete prompt.
    """
    path = pathlib.Path(path)
    if not (path / _MANIFEST).is_file() or not _file(path, 0).is_file():
      raise ValueError(f"path is {path}, which has no complete prompt of a "
                       "record; make one by analysis.record")
    return cls(path, read_manifest(path / _MANIFEST, "record"))

  @property
  def is_complete(self) -> bool:
    """True if all prompts are recorded."""
    return len(self) == self.manifest["num_prompts"]

  def __len__(self) -> int:
    return sum(1 for _ in self._files())

  def __iter__(self) -> Iterator[Rollout]:
    return map(_read, self._files())

  def _files(self) -> Iterator[pathlib.Path]:
    """Yields the files of the prompts before the first missing one."""
    files = (_file(self.path, i) for i in itertools.count())
    return itertools.takewhile(pathlib.Path.is_file, files)


def record(decoder: Decoder, params: Mapping[str, chex.ArrayTree],
           prompts: Sequence[ArrayLike], key: jax.Array,
           path: str | os.PathLike[str], *, max_new_tokens: int,
           progress: bool = True, batch: int = 1,
           placement: Placement | None = None) -> Record:
  """Decodes prompts and records their drafts and probabilities.

  The same call completes an interrupted record. The files are then equal to the
  files of an uninterrupted recording. A different `batch` or `placement`
  changes only the rounding.

  Args:
    decoder: decoder of the recording. Its observers are ignored, because
      `evaluate` can apply any rule to the record.
    params: `{"target": ..., "drafter": ...}` parameters of the models.
    prompts: sequences of token ids. Prompt i has request id i, so its random
      numbers depend only on (key, i).
    key: PRNG key of `jax.random.key`, threefry.
    path: directory of the record. It is created if it does not exist.
    max_new_tokens: number of tokens to generate for every prompt, at least 1.
      The file of a prompt contains up to max_new_tokens * 2 * N * V floats, for
      N nodes of a draft and V tokens of the vocabulary.
    progress: if True, report progress on stderr.
    batch: number of prompts decoded together.
    placement: placement of the decoder on a mesh, or None. The mesh's data axis
      must divide `batch`. This function also places `params`.

  Returns:
    The complete `Record`.

  Raises:
    ValueError: a prompt is invalid for `Decoder.prefill`, `path` contains
      another record or other data, or another process records there.
    FloatingPointError: the logits of a model are not finite.

  Example:
    >>> import tempfile
    >>> import jax
    >>> import specjax as sj
    >>> model = sj.testing.MarkovModel(vocab_size=4)
    >>> table = model.init(jax.random.key(0))
    >>> decoder = sj.Decoder(
    ...     target=model, verifier=sj.verifiers.Block(),
    ...     drafter=sj.drafters.draft_model(model=model, gamma=2))
    >>> with tempfile.TemporaryDirectory() as path:
    ...   record = sj.analysis.record(
    ...       decoder, {"target": table, "drafter": table}, [[1], [2, 3]],
    ...       jax.random.key(1), path, max_new_tokens=6, progress=False)
    ...   judged = sj.analysis.evaluate(record, sj.verifiers.Token())
    >>> len(judged.expected), round(judged.block_efficiency, 4)
    (2, 3.0)
  """
  fields.check_at_least("max_new_tokens", max_new_tokens, 1)
  fields.check_at_least("batch", batch, 1)
  path = pathlib.Path(path)
  decoder = dataclasses.replace(decoder, observers=())
  prompts = [np.asarray(row) for row in prompts]
  limits = [row.size + max_new_tokens for row in prompts]
  # Check all prompts before the first one is decoded.
  jax.eval_shape(lambda: decoder.prefill(params, prompts, key, limits=limits))
  manifest = _manifest(decoder, params, prompts, key, max_new_tokens)
  _check_directory(path)
  with locked(path, "recording"):
    claim(path / _MANIFEST, manifest, "record")
    missing = processes.by_the_first(lambda: [
        i for i in range(len(prompts)) if not _file(path, i).is_file()])
    if placement is not None:
      params = placement.put(decoder, params)
    for index, row in tqdm.tqdm(
        _decode(decoder, params, prompts, key, limits, missing, batch,
                placement),
        f"recording to {path}", total=len(prompts), unit="prompt",
        initial=len(prompts) - len(missing), dynamic_ncols=True,
        disable=not (progress and missing)):
      processes.by_the_first(functools.partial(
          _write, _file(path, index), _rollout(row)))
  return Record(path, manifest)


def _check_directory(path: pathlib.Path) -> None:
  """Raises `ValueError` if `path` cannot be the directory of a record."""
  if path.is_file():
    raise ValueError(f"path {path} is a file; it must be a directory")
  if _file(path, 0).is_file() and not (path / _MANIFEST).is_file():
    raise ValueError(f"path is {path}, which contains prompts but no "
                     f"{_MANIFEST}; choose another path")


def _decode(decoder: Decoder, params: Mapping[str, chex.ArrayTree],
            prompts: Sequence[np.ndarray], key: jax.Array,
            limits: Sequence[int], missing: Sequence[int], batch: int,
            placement: Placement | None) -> Iterator[tuple[int, DecodedRow]]:
  """Decodes the prompts of indices `missing`, and yields `(index, row)`."""
  if not missing:
    return
  # One capacity for all prompts, so that the loop compiles once.
  prefill = functools.partial(
      decoder.prefill, params, key=key,
      capacity=max(limits) + decoder.num_nodes)
  start = lambda i: prefill([prompts[i]], limits=limits[i], request_ids=[i])
  first = missing[0]
  state = prefill([prompts[first]] * batch, limits=limits[first],
                  placement=placement)
  starts = [functools.partial(start, i) for i in missing]
  for index, row in decode_rows(decoder, params, state, starts,
                                rounds=_ROUNDS_A_CALL, traced=True):
    yield missing[index], row


def _rollout(row: DecodedRow) -> Rollout:
  # NumPy cannot write bfloat16; float32 represents all of its values.
  wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
  trace, stats = row.trace, row.stats
  draft = trace.draft.replace(probs=wide(trace.draft.probs))
  return Rollout(
      trace=trace.replace(draft=draft, target_probs=wide(trace.target_probs)),
      expected=stats.expected[:, 0], survival=stats.survival[:, 0],
      emitted=stats.emitted)


def _manifest(decoder: Decoder, params: Mapping[str, chex.ArrayTree],
              prompts: Sequence[np.ndarray], key: jax.Array, max_new_tokens: int
              ) -> dict[str, Any]:
  parts = {f.name: repr(getattr(decoder, f.name))
           for f in dataclasses.fields(decoder)
           if f.name not in ("observers", "debug")}
  return {
      **parts,
      "num_nodes": decoder.num_nodes,
      "vocab_size": decoder.target.vocab_size,
      "drafter_is": sorted(interfaces.capabilities(decoder.drafter)),
      "key": np.asarray(jax.random.key_data(key)).tolist(),
      "max_new_tokens": int(max_new_tokens),
      "num_prompts": len(prompts),
      "prompts": fingerprint([row.astype(np.int64) for row in prompts]),
      "params": fingerprint(params),
      # Other devices and compilers round differently.
      "platform": f"{jax.default_backend()}, jax {jax.__version__}",
  }


def _file(path: pathlib.Path, index: int) -> pathlib.Path:
  return path / f"prompt_{index:06d}.npz"


def _write(path: pathlib.Path, rollout: Rollout) -> None:
  trace = rollout.trace
  with atomically(path) as f:
    np.savez(f, **vars(trace.draft), **vars(trace.verdict),
             target_probs=trace.target_probs, expected=rollout.expected,
             survival=rollout.survival, emitted=rollout.emitted)


def _read(path: pathlib.Path) -> Rollout:
  try:
    with np.load(path) as arrays:
      take = lambda kind: kind(**{f.name: arrays[f.name]
                                  for f in dataclasses.fields(kind)})
      return Rollout(
          trace=Trace(draft=take(Draft), verdict=take(Verdict),
                      target_probs=arrays["target_probs"]),
          expected=arrays["expected"], survival=arrays["survival"],
          emitted=arrays["emitted"])
  except (zipfile.BadZipFile, KeyError) as e:
    raise ValueError(f"{path} is damaged ({e}); delete it and record "
                     "again: only this prompt is then decoded") from e
