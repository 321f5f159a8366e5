"""Configurations that serve requests from a queue or batch by batch.

For these configurations, the prompt in `resumable.run` is a list of `Request`s.
The seed is the list of their arrival times in seconds. The request id is not
used.
"""

from collections.abc import Sequence
import itertools
import time
from typing import Any

import jax
import numpy as np

from lib.configurations import base
import specjax as sj
from specjax.decoding import prefill
from specjax.serving import Queue
from specjax.serving import Request
from specjax.utils.fingerprints import fingerprint

_WARM_TOKENS = 2  # tokens of warm-up requests, which are not timed


class Refilled(base.Configuration):
  """Continuous batching: a `Queue` replaces each finished request by the next.

  With `held`, the next requests wait until the entire batch is finished.
  """

  def __init__(self, decoder: sj.Decoder, params: Any, sizes: Sequence[int],
               max_length: int, rounds: int,
               controllers: dict[int, Any] | None = None, held: bool = False):
    """Creates a configuration.

    Args:
      decoder: decoder that serves all requests.
      params: parameters of the decoder's models.
      sizes: batch sizes (see `Queue`).
      max_length: maximum number of tokens of a prompt and its output together.
      rounds: maximum number of rounds per chunk (see `Queue`).
      controllers: controller for each batch size, or None for a fixed draft
        length.
      held: if True, requests wait until all rows are finished.
    """
    self._queue = Queue(decoder, params, slots=sizes, max_length=max_length,
                        rounds=rounds, controllers=controllers)
    self._held = held
    self.program = decoder, tuple(sizes), held, tuple(
        (controllers or {}).values())

  def compile(self, requests: Sequence[Request]) -> None:
    """Compiles programs for all prompt lengths and changes of batch size."""
    lengths = {(len(one.prompt) - 1).bit_length(): one for one in requests}
    sizes, short = self._queue.sizes, [Request(
        prompt=one.prompt, max_new_tokens=_WARM_TOKENS)
                                       for one in lengths.values()]
    for size in (*sizes, *itertools.chain(*itertools.permutations(sizes, 2))):
      list(self._queue.results(short[i % len(short)] for i in range(size)))
    list(self._queue.results(short))

  def decode(self, requests: Sequence[Request], arrivals: Sequence[float],
             number: int):
    """Serves all requests and measures the time.

    Returns:
      Dict. "seconds" is the time from the start of the run to the last token.
      "rounds" and "accepted" are sums over requests. "first" and "last" are
      lists over requests of the seconds from arrival to the first and to the
      last token. The entry "texts" is a list of hashes of the outputs.
    """
    del number
    queue, begun = self._queue, time.perf_counter()
    since = lambda: time.perf_counter() - begun
    place, first, last, results = {}, {}, {}, {}
    while len(results) < len(requests):
      self._submit(requests, arrivals, since(), place)
      if queue.idle:
        time.sleep(max(arrivals[len(place)] - since(), 0))
        continue
      for update in queue.step():
        at, one = since(), place[update.number]
        if len(update.tokens):
          first.setdefault(one, at)
        if update.result is not None:
          last[one], results[one] = at, update.result
    return _record(since(), results, first, last, arrivals)

  def _submit(self, requests: Sequence[Request], arrivals: Sequence[float],
              now: float, place: dict[int, int]):
    """Submits the requests that have arrived, and adds them to `place`.

    Args:
      requests: all requests, in order of arrival.
      arrivals: seconds from the start of the run to each arrival.
      now: seconds since the start of the run.
      place: index of each submitted request, by its number in the queue.
    """
    room = len(requests)
    if self._held:
      room = self._queue.sizes[-1] if self._queue.idle else 0
    end = min(len(place) + room, len(requests))
    for index in range(len(place), end):
      if arrivals[index] > now:
        break
      place[self._queue.submit(requests[index])] = index


class Waiting(base.Configuration):
  """Static batching: each batch runs until its slowest row is finished.

  The prompts of a batch are prefilled together. With one row, requests are
  decoded one after the other.
  """

  def __init__(self, decoder: sj.Decoder, params: Any, rows: int,
               capacity: int):
    """Creates a configuration.

    Args:
      decoder: decoder that serves all requests.
      params: parameters of the decoder's models.
      rows: batch size.
      capacity: number of cache slots per row.
    """
    self._decoder, self._params = decoder, params
    self._rows, self._capacity = rows, capacity
    self.program = decoder, rows, "waiting"

  def compile(self, requests: Sequence[Request]) -> None:
    """Compiles programs for all prompt lengths."""
    longest = [max(batch, key=lambda one: len(one.prompt)).prompt
               for batch in self._batches(requests)]
    for prompt in {prefill.padded_length(len(p)): p for p in longest}.values():
      self._batch([Request(prompt=prompt, max_new_tokens=_WARM_TOKENS)])

  def _batches(self, requests: Sequence[Request]):
    return [requests[i:i + self._rows]
            for i in range(0, len(requests), self._rows)]

  def decode(self, requests: Sequence[Request], arrivals: Sequence[float],
             number: int):
    """Serves all requests without waiting for their arrivals.

    Returns:
      Dict with the entries of `Refilled.decode`. "first" equals "last".
    """
    del number
    begun, results, last = time.perf_counter(), {}, {}
    for batch in self._batches(requests):
      found = enumerate(self._batch(batch), len(results))
      results |= dict(found)
      at = time.perf_counter() - begun
      last |= {i: at for i in results if i not in last}
    return _record(time.perf_counter() - begun, results, last, last, arrivals)

  def _batch(self, requests: Sequence[Request]):
    """Returns the results of a batch. Unused rows generate no tokens."""
    done = Request(prompt=requests[0].prompt, max_new_tokens=0)
    rows = [*requests, *[done] * (self._rows - len(requests))]
    state = self._decoder.prefill(
        self._params, [one.prompt for one in rows],
        jax.random.key(requests[0].seed),
        limits=[len(one.prompt) + one.max_new_tokens for one in rows],
        temperature=[1.0 if one.temperature is None else one.temperature
                     for one in rows], capacity=self._capacity)
    if self._rows > 1:  # each row samples the same tokens as in a batch of one
      state = state.replace(keys=_keys(
          np.array([one.seed for one in rows], np.uint32)))
    state, stats = self._decoder.decode_until(self._params, state)
    sj.decoding.raise_if_not_finite(stats)
    tokens, lengths, rounds, accepted = jax.device_get(
        (state.tokens, state.lengths, stats.active, stats.accepted))
    return [sj.serving.Result(
        number=i, tokens=tokens[i, :lengths[i]], reason="limit",
        rounds=int(rounds[i]), accepted=int(accepted[i]))
            for i in range(len(requests))]


@jax.jit
@jax.vmap
def _keys(seed: jax.Array):
  return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), 0)


def _record(seconds: float, results: dict[int, Any], first: dict[int, float],
            last: dict[int, float], arrivals: Sequence[float]):
  """Returns the result of `Refilled.decode`."""
  order = range(len(results))
  for i in order:
    if results[i].error:
      raise FloatingPointError(results[i].error)
  return {
      "seconds": seconds,
      "rounds": sum(one.rounds for one in results.values()),
      "accepted": sum(one.accepted for one in results.values()),
      "first": [first[i] - arrivals[i] for i in order],
      "last": [last[i] - arrivals[i] for i in order],
      "texts": [fingerprint(results[i].tokens) for i in order]}
