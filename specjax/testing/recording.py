"""Recording of drafts and output of many requests as NumPy arrays."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
from specjax.decoding import decoder as decoder_lib
from specjax.decoding import inputs
from specjax.types import DecodeState

# Prompts and temperatures of every fourth row, in turn. The test of the joint
# distribution requires many samples after each of these prompts.
TEXTS = (((1, 3, 0, 2), 1.0), ((4,), 0.6))
EVERY = 4  # distance of the rows with entries of TEXTS
# Temperatures of all other rows, in tenths. A temperature that users select
# often has several entries, so that the test also finds small errors there.
_TENTHS = (*range(16), 20, 3, 3, 7, 7, 8, 8, 8, 8)
SHORT = 32  # largest number of tokens of a short prompt
LONGEST = 200  # largest number of tokens of a long prompt
_SMALL = 20  # rows of the batches of `record_drafts`
_VARIANTS = 48  # number of these batches after the same text
_AT_ONCE = 2  # rounds per call of the compiled loop; must divide `rounds`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
  """Requests of a batch that differ in prompt, temperature, eos and limit.

  Attributes:
    prompts: B lists of token ids.
    temperature: `[B]` float32 sampling temperature of each row.
    eos: `[B, 2]` int32 eos ids of each row, padded with -1.
    new: `[B]` int32 largest number of new tokens of each row.
  """

  prompts: tuple[tuple[int, ...], ...]
  temperature: np.ndarray
  eos: np.ndarray
  new: np.ndarray

  @classmethod
  def mixed(cls, vocab_size: int, rows: int, new: int,
            prompts: Sequence[Sequence[int]] | None = None,
            longest: int = LONGEST) -> "Requests":
    """Returns a mixture of requests.

    Every fourth row uses an entry of `TEXTS` in turn, without an eos. The other
    rows have various prompts, various temperatures and up to two eos ids. By
    default, two of three of them have a prompt of more than `SHORT` tokens.

    Args:
      vocab_size: vocabulary size V.
      rows: number of rows B.
      new: largest number of new tokens. Some rows have one or two fewer.
      prompts: prompts of the other rows, used in turn. None means random
        prompts of 1 to `longest` tokens.
      longest: length of the longest random prompt, in tokens.
    """
    rng = np.random.default_rng(0)
    others = rows - -(-rows // EVERY)
    if prompts is None:
      short = min(SHORT, longest)
      many = 2 * others // 3 if longest > SHORT else 0
      lengths = np.concatenate([
          np.linspace(longest, SHORT + 1, many).round(),
          1 + np.arange(others - many) % short]).astype(int)
      prompts = [rng.integers(vocab_size, size=n)
                 for n in rng.permutation(lengths)]
    tenths = rng.permutation(np.resize(_TENTHS, others))
    texts = [(tuple(t % vocab_size for t in text), temperature)
             for text, temperature in TEXTS]
    found, temperatures, limits = [], [], []
    eos = np.full((rows, 2), -1, np.int32)
    kinds = ((), (0,), (), (vocab_size - 1, 2 % vocab_size), ())
    for row in range(rows):
      if row % EVERY == 0:
        prompt, temperature = texts[row // EVERY % len(texts)]
      else:
        i = row - row // EVERY - 1
        prompt = tuple(map(int, prompts[i % len(prompts)]))
        temperature = tenths[i] / 10
        ids = kinds[rng.integers(len(kinds))]
        eos[row, :len(ids)] = ids
      found.append(prompt)
      temperatures.append(temperature)
      limits.append(new - row // 7 % 3)
    return cls(prompts=tuple(found), eos=eos,
               temperature=np.array(temperatures, np.float32),
               new=np.array(limits, np.int32))

  def shortened(self, calls: int) -> np.ndarray:
    """Returns limits `[calls, B]`: one new token in half of the rows.

    These rows change between calls. They are never rows with entries of
    `TEXTS`, so that the test of the joint distribution has complete texts.
    """
    row = np.arange(len(self.prompts))
    number = row - row // EVERY + np.arange(calls)[:, None]
    one = (row % EVERY != 0) & (number % 3 != 0)
    return np.where(one, 1, self.new).astype(np.int32)

  @property
  def lengths(self) -> np.ndarray:
    """`[B]` lengths of the prompts in tokens."""
    return np.array([len(prompt) for prompt in self.prompts])

  def taken(self, rows: np.ndarray) -> "Requests":
    """Returns the requests of the rows with indices `rows`, in this order."""
    return Requests(prompts=tuple(self.prompts[row] for row in rows),
                    temperature=self.temperature[rows], eos=self.eos[rows],
                    new=self.new[rows])

  def few(self, counts: Sequence[int], context_length: int) -> np.ndarray:
    """Returns limits `[K, B]`: many tokens in a few rows, 0 in all others.

    A row with a limit of 0 is done from the start. The few rows have short
    prompts and no eos, so that they are decoded for many rounds.

    Args:
      counts: number of such rows in each of K calls, at most.
      context_length: length of the longest sequence, in tokens.
    """
    rows = np.flatnonzero((self.lengths <= SHORT) & (self.eos < 0).all(1)
                          & (self.temperature >= 0.6))
    found = np.zeros((len(counts), len(self.prompts)), np.int32)
    for limits, count in zip(found, counts):
      limits[rows[:count]] = np.minimum(
          LONGEST, context_length - self.lengths[rows[:count]])
    return found

  def prefill(self, decoder: decoder_lib.Decoder, params: chex.ArrayTree,
              new: int = 0, **kwargs: Any) -> DecodeState:
    """Returns the state after `Decoder.prefill` of these requests.

    Args:
      decoder: the decoder.
      params: parameters of the decoder.
      new: number of new tokens for which rows with short prompts have slots, if
        the context length allows it.
      **kwargs: further arguments of `Decoder.prefill`.
    """
    limits = self.lengths + self.new
    few = np.minimum(self.lengths + new, decoder.context_length)
    return decoder.prefill(
        params, self.prompts, jax.random.key(0), limits=np.where(
            self.lengths <= SHORT, np.maximum(limits, few), limits),
        temperature=self.temperature,
        eos=[[int(i) for i in ids if i >= 0] for ids in self.eos], **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """Recorded rounds: K calls, R rounds, B rows, N nodes of a draft, V tokens.

  Attributes:
    requests: requests of each call. Their limits do not apply.
    new: `[K, B]` largest number of new tokens of each row.
    active: `[K, R, B]` bool mask of rows that are not complete.
    left: `[K, R, B]` number of active rows in the batch of each row.
    emitted: `[K, R, B]` number of emitted tokens.
    accepted: `[K, R, B]` number of accepted draft tokens.
    tokens: `[K, R, B, N]` tokens of the drafts.
    parents: `[K, R, B, N]` parents of the drafts.
    probs: `[K, R, B, N, V]` distributions q of the drafts.
    target_probs: `[K, R, B, N, V]` target distributions after every node.
    texts: `[K, B, C]` prompts and new tokens, in C slots.
  """

  requests: Requests
  new: np.ndarray
  active: np.ndarray
  left: np.ndarray
  emitted: np.ndarray
  accepted: np.ndarray
  tokens: np.ndarray
  parents: np.ndarray
  probs: np.ndarray
  target_probs: np.ndarray
  texts: np.ndarray

  @property
  def drafted(self) -> np.ndarray:
    """`[K, R, B, N]` bool mask of draft tokens, without root and padding."""
    found = (self.probs.sum(-1) != 0) & self.active[..., None]
    found[..., 0] = False
    return found


def record(decoder: decoder_lib.Decoder, params: chex.ArrayTree,
           requests: Requests, ids: np.ndarray, *, rounds: int,
           state: DecodeState, new: np.ndarray | None = None,
           prepare: Callable[[DecodeState], DecodeState] = lambda x: x
           ) -> Record:
  """Decodes the same requests in several calls and returns all rounds.

  Args:
    decoder: the decoder.
    params: parameters of the decoder.
    requests: requests of B rows.
    ids: `[K, B]` request ids of each call. They determine the random numbers.
    rounds: number of rounds R, even.
    state: result of `requests.prefill`. It is copied.
    new: `[K, B]` largest number of new tokens of each row, at most the limit in
      `state`. 0: the row is done from the start. None means `requests.new`.
    prepare: function from the first state of a call to a modified state.

  Raises:
    FloatingPointError: some numbers are not finite.
  """
  if new is None:
    new = np.broadcast_to(requests.new, ids.shape)
  calls = []
  for own, limits in zip(ids, new):
    now = prepare(_started(state, own, requests.lengths + limits))
    parts = []
    for _ in range(rounds // _AT_ONCE):
      now, stats, trace = decoder.decode(params, now, _AT_ONCE, traced=True)
      decoder_lib.raise_if_not_finite(stats)
      parts.append(dict(
          active=stats.active, emitted=stats.emitted,
          accepted=trace.verdict.num_accepted, tokens=trace.draft.tokens,
          parents=trace.draft.parents, probs=trace.draft.probs,
          target_probs=trace.target_probs))
    parts = jax.device_get(parts)
    call = {name: np.concatenate([part[name] for part in parts])
            for name in parts[0]}
    left = call["active"].sum(1, keepdims=True)
    calls.append({**call, "texts": np.asarray(now.tokens),
                  "left": np.broadcast_to(left, call["active"].shape)})
  return Record(requests=requests, new=new, **{
      name: np.stack([call[name] for call in calls]) for name in calls[0]})


def record_drafts(decoder: decoder_lib.Decoder, params: chex.ArrayTree,
                  requests: Requests, ids: np.ndarray, *, rounds: int,
                  state: DecodeState, other: decoder_lib.Decoder) -> Record:
  """Returns drafts of another decoder after the texts of a decoder.

  These drafts are not verified. In every second round of `decoder`, `other`
  drafts several times for a small batch of rows, at other temperatures. Some of
  these batches have only one or two active rows. In others, half of the rows
  are done.

  Args:
    decoder: decoder of the text.
    params: parameters of both decoders.
    requests: requests of B rows.
    ids: `[K, B]` request ids of each call.
    rounds: number of rounds of a call, even.
    state: result of `requests.prefill`. It is copied.
    other: decoder of the drafts, with the same target and drafter, and without
      a controller.

  Returns:
    A record of one call. Its rows are the rows of all small batches, and R is
    `rounds` / 2. The target distributions are uniform.
  """
  size = min(_SMALL, len(requests.prompts))
  number = np.arange(_VARIANTS)[:, None]
  place = (np.arange(size) + 5 * (number // 4)) % size
  done = place >= np.choose(number % 4, (size, 1, 2, size // 2))
  tenths = np.resize(_TENTHS, size)
  temperature = np.float32(tenths[(np.arange(size) + 7 * number) % size] / 10)
  calls = []
  for k, own in enumerate(ids):
    # Distinct rows. A row that occurs twice has equal drafts.
    count = len(requests.prompts)
    rows = (k + np.arange(size) * count // size) % count
    now, parts = _started(state, own, requests.lengths + requests.new), []
    for _ in range(rounds // _AT_ONCE):
      draft = _drafts(other.stage, params, now, rows, done, temperature)
      active = ~(np.asarray(now.done)[rows] | done)
      now, stats, _ = decoder.decode(params, now, _AT_ONCE, traced=True)
      left, emitted, accepted = (np.broadcast_to(x, done.shape) for x in (
          active.sum(1, keepdims=True), np.asarray(stats.emitted).sum(0)[rows],
          np.asarray(stats.accepted).sum(0)[rows]))
      parts.append(dict(active=active, left=left, emitted=emitted,
                        accepted=accepted, **jax.device_get(vars(draft))))
    call = {name: np.stack([part[name].reshape(
        -1, *part[name].shape[2:]) for part in parts]) for name in parts[0]}
    calls.append({**call, "texts": np.tile(
        np.asarray(now.tokens)[rows], (_VARIANTS, 1)), "row": np.tile(
            rows, _VARIANTS)})
  found = {name: np.concatenate(
      [call[name] for call in calls],
      axis=0 if name in ("texts", "row") else 1)[None] for name in calls[0]}
  requests = dataclasses.replace(
      requests.taken(found.pop("row")[0]),
      temperature=np.tile(temperature.reshape(-1), len(ids)))
  return Record(
      requests=requests, new=requests.new[None], target_probs=np.full_like(
          found["probs"], 1 / found["probs"].shape[-1]), **found)


# Not optimised, because compilation takes most of the time.
@functools.partial(jax.jit, static_argnames="parts", compiler_options={
    "xla_backend_optimization_level": 0})
def _drafts(parts, params, state, rows, done, temperature):
  """Returns drafts for some rows of a state, for each mask and temperature."""
  state = interfaces.map_caches(
      lambda cache: cache.take_rows(rows), lambda x: x[rows], state)

  def one(variant):
    number, done, temperature = variant
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, number)
    now = state.replace(keys=keys, done=state.done | done,
                        temperature=temperature)
    return parts.propose(params, now, parts.draw_uniforms(now, 1)[0])[0]

  return jax.lax.map(one, (jnp.arange(len(done)), done, temperature))


def _started(state, ids, limits):
  """Returns a copy of a state with new request ids and limits."""
  return _replaced(
      state, inputs.row_keys(jax.random.key(0), ids, len(ids)), limits)


@jax.jit
def _replaced(state, keys, limits):
  """Returns a copy of a state with new keys and limits.

  A copy is necessary, because the loop donates its state.
  """
  return jax.tree.map(jnp.copy, state).replace(
      keys=keys, limits=limits, done=state.lengths >= limits)


def joined(records: Sequence[Record]) -> Record:
  """Returns one record with the calls of several records.

  The records have the same requests.
  """
  fields = [field.name for field in dataclasses.fields(Record)][1:]
  return Record(requests=records[0].requests, **{
      name: np.concatenate([getattr(one, name) for one in records])
      for name in fields})
