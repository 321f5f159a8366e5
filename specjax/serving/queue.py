"""`Queue`, which decodes requests in the slots of one batch."""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools

import chex
import jax
import numpy as np

from specjax.decoding import growth
from specjax.decoding import prefill
from specjax.decoding import rounds as rounds_lib
from specjax.decoding.controller import Controller
from specjax.decoding.decoder import Decoder
from specjax.decoding.decoder import FINITE
from specjax.interfaces import checks
from specjax.serving import chunks
from specjax.serving.requests import Request
from specjax.serving.requests import Result
from specjax.serving.requests import Row
from specjax.serving.requests import Slot
from specjax.serving.requests import Update
from specjax.types import Prompt
from specjax.types import RoundStats
from specjax.utils import fields

_SMALLEST_BUCKET = 32  # minimum number of columns of a padded prompt


class Queue:
  """Decodes requests in the slots of one batch, in order of arrival.

  Every slot has room for `max_length` tokens on one device. Meshes and the
  pages of a `Pool` are not supported. For a mesh use `Decoder.insert`, for a
  `Pool` use `Pool.insert`.

  Other threads may call `submit` and `cancel` during `step`.
  """

  def __init__(self, decoder: Decoder, params: chex.ArrayTree, *,
               slots: int | Sequence[int] = 8, max_length: int | None = None,
               rounds: int = 8, max_ends: int = 4,
               context: chex.ArrayTree | None = None,
               controllers: Mapping[int, Controller] | None = None):
    """Creates an empty queue. Nothing is compiled before the first step.

    Args:
      decoder: decoder of all requests.
      params: `{"target": ..., "drafter": ...}`.
      slots: batch size, or several sizes. The queue uses the smallest size that
        fits all requests. Each size requires a compiled program. A change of
        size copies the caches, so the memory must fit the two largest states.
      max_length: maximum length of a prompt and its continuation. Default: the
        context length.
      rounds: maximum number of rounds of a chunk. A new request waits until the
        current chunk ends. New tokens are returned after each chunk.
      max_ends: maximum number of ids in the `eos` of a request.
      context: drafter's context for requests without a context, a tree of
        arrays without the batch axis.
      controllers: `{size: controller}` with one controller per batch size,
        because costs depend on the batch size. None: the decoder's controller.

    Raises:
      ValueError: an argument is out of range, or the controllers do not fit the
        sizes.
    """
    length = decoder.context_length if max_length is None else max_length
    sizes = np.atleast_1d(slots).tolist()
    for name, value in (*(("slots", n) for n in sizes or [0]),
                        ("rounds", rounds), ("max_ends", max_ends),
                        ("max_length", length)):
      fields.check_at_least(name, value, 1)
    if length > decoder.context_length:
      raise ValueError(f"max_length is {length}; it must be at most "
                       f"{decoder.context_length}, the context length")
    if rounds >= 2**31:
      raise ValueError(f"rounds is {rounds}; it must be less than 2^31")
    self.sizes = tuple(sorted(set(sizes)))
    self._params = params
    self._programs = _programs(decoder, self.sizes, controllers)
    default_ends = decoder.eos if np.ndim(decoder.eos) else (decoder.eos,)
    self._slot = Slot(
        decoder, length, max(max_ends, len(default_ends)),
        jax.tree.map(np.asarray, context))
    self._rounds = rounds
    self._nodes = self._programs[self.sizes[0]].drafter.num_nodes
    needed = max(length + self._nodes, prefill.padded_length(length))
    self._capacity = growth.rounded(needed)
    self._numbers = itertools.count()
    self._open, self._waiting, self._cancelled = {}, collections.deque(), set()
    self._rows, self._state = [None] * self.sizes[0], None
    self._updates = []  # not yet returned by a step

  @property
  def idle(self) -> bool:
    """True if the queue has no unfinished request."""
    return not self._open

  @property
  def waiting(self) -> int:
    """Number of requests that wait for a slot."""
    return len(self._waiting)

  def submit(self, request: Request) -> int:
    """Adds a request and returns its number.

    Raises:
      ValueError: a field of the request is invalid, or the request does not fit
        a slot.
    """
    number = next(self._numbers)
    try:
      row = self._slot.row(request, number)
    except (TypeError, OverflowError) as e:
      raise ValueError(f"a field of the request has a wrong type: {e}; see "
                       "specjax.serving.Request") from e
    self._open[row.number] = row
    self._waiting.append(row)
    return row.number

  def cancel(self, number: int) -> bool:
    """Ends a request at the next step and frees its slot.

    Args:
      number: number of the request, from `submit`.

    Returns:
      True if the request is waiting or being decoded.
    """
    if number in self._open:
      self._cancelled.add(number)
    return number in self._open

  def step(self) -> list[Update]:
    """Fills the free slots and decodes a chunk, if there are requests.

    Returns:
      One update for every request that has new tokens or has ended.

    Raises:
      ValueError: with `Decoder(debug=True)`, a component returned a wrong
        value. The updates of this step are then returned by the next step.
    """
    self._drop()
    self._resize()
    for slot, row in enumerate(self._rows):
      if row is None and self._waiting:
        self._insert(slot, self._waiting[0])
        self._waiting.popleft()  # after the prefill: if it fails, the row waits
    if any(self._rows):
      self._decode()
    updates, self._updates = self._updates, []
    for update in updates:
      if update.result is not None:
        del self._open[update.number]
    return updates

  def results(self, requests: Iterable[Request] = (), *, order: str = "arrival"
              ) -> Iterator[Result]:
    """Decodes requests until all are complete, and yields their results.

    Requests submitted before or during the iteration are included.

    Args:
      requests: any number of requests. The queue takes a request from the
        iterable only when a slot will soon be free. An invalid request has a
        result with the reason "refused".
      order: order of the results, "arrival" or "completion".

    Raises:
      ValueError: the order is unknown, or `step` raises a `ValueError`.
      RuntimeError: another caller of `step` has received a result.
    """
    if order not in ("arrival", "completion"):
      raise ValueError(f"order is {order!r}; it must be 'arrival' or "
                       "'completion'")
    requests, finished = iter(requests), {}
    expected = collections.deque(self._open)
    while True:
      finished |= self._take(requests, expected)
      if not expected:
        return
      self._check_open(expected[0], finished)
      finished |= self._step_results()
      if order == "completion":
        expected = collections.deque(
            number for number in expected if number not in finished)
        yield from finished.values()
        finished = {}
      while expected and expected[0] in finished:
        yield finished.pop(expected.popleft())

  def _take(self, requests: Iterator[Request],
            expected: collections.deque[int]) -> dict[int, Result]:
    """Submits requests until as many wait as there are slots.

    Args:
      requests: requests that are not submitted yet.
      expected: numbers of the requests in order of arrival. The numbers of new
        requests are appended.

    Returns:
      `{number: result}` for refused requests.
    """
    refused = {}
    for request in itertools.islice(
        requests, max(self.sizes[-1] - self.waiting, 0)):
      try:
        expected.append(self.submit(request))
      except ValueError as e:
        number = next(self._numbers)
        expected.append(number)
        refused[number] = Result(
            number=number, tokens=np.zeros(0, np.int32), reason="refused",
            error=str(e))
    expected.extend(number for number in tuple(self._open)
                    if number not in expected)
    return refused

  def _step_results(self) -> dict[int, Result]:
    return {update.number: update.result for update in self.step()
            if update.result is not None}

  def _check_open(self, number: int, finished: dict[int, Result]) -> None:
    if number not in self._open and number not in finished:
      raise RuntimeError(
          f"another reader has received the result of request {number}; "
          "only one may call `step` or iterate over `results`")

  def _drop(self) -> None:
    """Ends the cancelled requests and frees their slots."""
    for number in tuple(self._cancelled):
      self._cancelled.remove(number)
      row = self._open.get(number)
      if row is not None and row in self._rows:
        self._rows[self._rows.index(row)] = None
      elif row in self._waiting:
        self._waiting.remove(row)
      else:
        continue  # the request has already ended
      self._updates.append(Update(
          number, np.zeros(0, np.int32), row.result("cancelled")))

  def _resize(self) -> None:
    """Moves the active rows to the smallest batch that fits all requests."""
    active = [slot for slot, row in enumerate(self._rows) if row is not None]
    wanted = len(active) + len(self._waiting)
    size = next((n for n in self.sizes if n >= wanted), self.sizes[-1])
    if size == len(self._rows) or not wanted:
      return
    empty = [None] * (size - len(active))
    if self._state is not None:
      self._state = chunks.moved(self._state, np.array(
          active + [0] * len(empty), np.int32))
    self._rows = [self._rows[slot] for slot in active] + empty

  def _insert(self, slot: int, row: Row) -> None:
    """Reads the prompt of a request and puts the result into a slot.

    The prompt is padded to a power of two, or to the maximum length.
    """
    length = len(row.prompt)
    columns = min(max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length()),
                  prefill.padded_length(self._slot.length))
    fresh = rounds_lib.start(
        self._programs[self.sizes[-1]], self._params, Prompt(
            tokens=np.pad(row.prompt, (0, columns - length))[None],
            lengths=np.array([length], np.int32), capacity=self._capacity,
            context=jax.tree.map(lambda x: x[None], row.context)),
        np.array([row.limit], np.int32), chunks.keys(np.uint32(row.seed)),
        row.temperature, row.eos)
    if self._state is None:  # all slots start as copies of the first request
      self._state = chunks.moved(fresh, np.zeros(len(self._rows), np.int32))
    self._state = rounds_lib.insert(
        self._state, np.array([slot], np.int32), fresh)
    self._rows[slot] = row

  def _decode(self) -> None:
    """Decodes a chunk and stores the updates of the rows."""
    free = np.array([row is None for row in self._rows])
    window = min(self._rounds * self._nodes, self._capacity)
    self._state, seen = chunks.chunk(
        self._programs[len(self._rows)], self._params, self._state, free,
        np.int32(self._rounds),
        np.int32(free.sum() + 1 if self._waiting else len(free)), window=window)
    tokens, done, stats = jax.device_get(seen)
    for slot, row in enumerate(self._rows):
      if row is None:
        continue
      new = tokens[slot, :stats.emitted[slot]]
      row.tokens.append(new)
      row.rounds += int(stats.active[slot])
      row.accepted += int(stats.accepted[slot])
      result = _ended(row, slot, stats) if done[slot] else None
      if result is not None:
        self._rows[slot] = None
      if result is not None or new.size:
        self._updates.append(Update(row.number, new, result))
    checks.raise_if_bad(stats.checks)  # updates are stored, so none is lost


def _programs(decoder: Decoder, sizes: tuple[int, ...],
              controllers: Mapping[int, Controller] | None
              ) -> dict[int, rounds_lib.Round]:
  """Returns the `Round` or `RoundsByLength` for each batch size."""
  if controllers is None:
    return dict.fromkeys(sizes, decoder.parts)
  if set(controllers) != set(sizes) or len(
      {(x.lengths, len(x.costs)) for x in controllers.values()}) != 1:
    raise ValueError(
        f"controllers are for the sizes {sorted(controllers)}; give one for "
        f"each of the slots {list(sizes)}, all with the same lengths and the "
        "same number of kinds of rounds")
  return {n: dataclasses.replace(decoder, controller=controllers[n]).parts
          for n in sizes}


def _ended(row: Row, slot: int, stats: RoundStats) -> Result:
  """Returns the result of a row that is done."""
  bad = [part for field, part in FINITE.items()
         if not getattr(stats, field)[slot]]
  if bad:
    return row.result("failed", (
        f"the {bad[0]} of request {row.number} are not finite; its sequence "
        "ends there: check the model's weights, its dtype and the verifier"))
  last = next((t[-1] for t in reversed(row.tokens) if t.size), -1)
  return row.result("eos" if last >= 0 and last in row.eos else "limit")
