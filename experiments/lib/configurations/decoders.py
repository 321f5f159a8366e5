"""Rollouts of a decoder, for one prompt alone or for the rows of a batch."""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import functools
import queue
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lib.configurations import base
import specjax as sj
from specjax.decoding import row_batches
from specjax.utils import fingerprints

ROUNDS = 4  # rounds per call; finished rows are refilled between calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """Settings of rollouts in a batch.

  Attributes:
    size: number of rows of the batch.
    timed: if True, the throughput is measured. Each run then has the entry
      "seconds": its share of the total time, in proportion to its tokens.
    placement: `Placement` of the state on a mesh, or None for one device.
  """

  size: int
  timed: bool = False
  placement: Any = None

  @property
  def streams(self) -> int:
    """Number of equal parts of the rows that are decoded in parallel threads.

    On a CPU, most operations of a round of a small model do not occupy all
    cores, and two programs in parallel take less time than one. The throughput
    is that of a single program with all rows, so timed batches have one part.
    """
    whole = self.timed or self.placement is not None or self.size % 2
    return 1 if whole or jax.default_backend() != "cpu" else 2


class Reader:
  """Prefills each prompt once for all configurations that continue it."""

  def __init__(self, decoder: sj.Decoder, params: Any, capacity: int,
               memory: int = 1):
    """Creates a reader without stored prompts.

    Args:
      decoder: decoder that prefills prompts for all configurations.
      params: parameters of the decoder's models.
      capacity: number of cache slots per row.
      memory: largest number of stored states, each for one prompt.
    """
    self._decoder, self._params = decoder, params
    self._capacity, self._memory = capacity, memory
    self._lock = threading.Lock()  # configurations compile in parallel
    self._states = collections.OrderedDict()

  def __call__(self, prompt: Sequence[int], seed: int, request_id: int,
               limit: int) -> sj.types.DecodeState:
    """Returns the state of one row after the prefill.

    The reader stores this state, so a decoding loop must not donate it.
    """
    wanted = tuple(prompt), seed, request_id, limit
    with self._lock:
      if wanted not in self._states:
        while len(self._states) >= self._memory:
          self._states.popitem(last=False)
        self._states[wanted] = self._decoder.prefill(
            self._params, [prompt], jax.random.key(seed), limits=limit,
            request_ids=[request_id], capacity=self._capacity)
      return self._states[wanted]

  def finished_rows(self, token: int, batch: Batch) -> sj.types.DecodeState:
    """Returns the state of finished rows, which can be replaced.

    These are the rows of one of `batch.streams` parts of a batch.
    """
    return self._decoder.prefill(
        self._params, [[token]] * (batch.size // batch.streams),
        jax.random.key(0), limits=1, capacity=self._capacity,
        placement=batch.placement)


class DecoderRows(base.Configuration):
  """Rollouts of a decoder, with the acceptance of its drafts by every rule."""

  def __init__(self, decoder: sj.Decoder, params: Any, new_tokens: int,
               capacity: int, *, reader: Reader | None = None,
               change: Callable[
                   [sj.types.DecodeState], sj.types.DecodeState] = (
                       lambda state: state),
               batch: Batch | None = None):
    """Creates a configuration.

    Args:
      decoder: decoder of the rollouts.
      params: parameters of the decoder's models.
      new_tokens: number of tokens per rollout.
      capacity: number of cache slots per row.
      reader: `Reader` that several configurations share. None creates one.
      change: function that converts a state of the reader to a state of
        `decoder`.
      batch: settings of `decode_rows`. If None, prompts are decoded alone.
    """
    self.decoder = decoder
    self._params, self._new_tokens = params, new_tokens
    self._reader = reader or Reader(decoder, params, capacity)
    self._change, self._batch = change, batch

  @property
  def program(self):
    """The decoder at temperature 1. All temperatures share this program."""
    return dataclasses.replace(self.decoder, transform=dataclasses.replace(
        self.decoder.transform, temperature=1.0))

  def _state(self, prompt: Sequence[int], seed: int, request_id: int,
             new_tokens: int):
    return jax.block_until_ready(self._change(
        self._reader(prompt, seed, request_id, len(prompt) + new_tokens)))

  def compile(self, prompt: Sequence[int]) -> None:
    """Compiles the programs of a rollout, without generating a token."""
    if self._batch is not None:
      for _ in self._decode_batch([(prompt, 0, 0)], 0):
        pass
      return
    state = jax.tree.map(jnp.copy, self._state(prompt, 0, 0, 0))
    jax.block_until_ready(self.decoder.decode_until(self._params, state))

  def decode(self, prompt: Sequence[int], seed: int, request_id: int
             ) -> base.Run:
    """Decodes one prompt alone and measures the latency.

    Returns:
      Dict. "seconds" is the time of decoding, "tokens" the number of generated
      tokens, and "text" a digest of their ids. "rounds" is the number of
      rounds. "expected" [rules] and "survival" [rules, nodes] contain values of
      every rule of the decoder, summed over rounds. The first rule is the
      decoder's verifier.
    """
    # The loop donates the state, but the reader reuses it. So copy it first.
    state = jax.block_until_ready(jax.tree.map(jnp.copy, self._state(
        prompt, seed, request_id, self._new_tokens)))
    start = time.perf_counter()
    state, stats = jax.block_until_ready(
        self.decoder.decode_until(self._params, state))
    seconds = time.perf_counter() - start
    sj.decoding.raise_if_not_finite(stats)
    numbers = lambda x: np.asarray(x[0], np.float64).tolist()
    return {"seconds": seconds, "tokens": int(stats.emitted[0]),
            "rounds": int(stats.active[0]), "expected": numbers(stats.expected),
            "survival": numbers(stats.survival),
            "text": _digest(state.tokens[0], state.lengths[0], len(prompt))}

  def decode_rows(self, requests: Sequence[base.Request]
                  ) -> Iterator[tuple[int, base.Run]]:
    """Decodes prompts in the rows of a batch (see `base.Configuration`).

    The next prompt replaces a finished row. Runs have the entries of `decode`,
    but "seconds" only if the batch is timed.
    """
    if self._batch is None:
      yield from super().decode_rows(requests)
    elif not self._batch.timed:
      yield from self._decode_batch(requests, self._new_tokens)
    else:
      yield from self._timed(requests)

  def _timed(self, requests: Sequence[base.Request]):
    for request in requests:  # prefill before the clock starts
      self._state(*request, self._new_tokens)
    start = time.perf_counter()
    runs = list(self._decode_batch(requests, self._new_tokens))
    per_token = (time.perf_counter() - start) / sum(
        run["tokens"] for _, run in runs)
    for index, run in runs:
      yield index, {"seconds": per_token * run["tokens"], **run}

  def _decode_batch(self, requests: Sequence[base.Request], new_tokens: int
                    ) -> Iterator[tuple[int, base.Run]]:
    """Yields the index and the run of every request, in order of completion."""
    count = min(self._batch.streams, len(requests))
    yield from _merged([
        self._decode_stream(requests, range(first, len(requests), count),
                            new_tokens) for first in range(count)])

  def _decode_stream(self, requests: Sequence[base.Request], own: Sequence[int],
                     new_tokens: int) -> Iterator[tuple[int, base.Run]]:
    """Yields index and run of the requests with the indices `own`."""
    state = self._change(self._reader.finished_rows(
        requests[0][0][0], self._batch))
    starts = [functools.partial(self._state, *requests[index], new_tokens)
              for index in own]
    for place, row in row_batches.decode_rows(
        self.decoder, self._params, state, starts, rounds=ROUNDS):
      sums = lambda x: x.sum(0, dtype=np.float64).tolist()
      yield own[place], {
          "tokens": int(row.stats.emitted.sum()),
          "rounds": len(row.stats.active),
          "expected": sums(row.stats.expected),
          "survival": sums(row.stats.survival),
          "text": _digest(row.tokens, len(row.tokens),
                          len(requests[own[place]][0]))}


def _merged(streams: Sequence[Iterator[Any]]) -> Iterator[Any]:
  """Yields the items of several iterators, each of which runs in a thread."""
  if len(streams) == 1:
    yield from streams[0]
    return
  found, stopped = queue.SimpleQueue(), threading.Event()

  def drain(stream):
    try:
      for one in stream:
        found.put(one)
        if stopped.is_set():
          return
    except BaseException:
      stopped.set()
      raise
    finally:
      found.put(None)

  pool = futures.ThreadPoolExecutor(len(streams))
  try:
    jobs = [pool.submit(drain, stream) for stream in streams]
    for _ in jobs:
      yield from iter(found.get, None)  # None ends one stream
    for job in jobs:
      job.result()
  finally:  # Ctrl-C does not wait for the next row
    stopped.set()
    pool.shutdown(wait=False, cancel_futures=True)


def _digest(tokens: Any, length: int, prompt_length: int):
  """Returns a digest of the generated ids of a row."""
  return fingerprints.fingerprint(
      np.asarray(tokens)[prompt_length:int(length)])
