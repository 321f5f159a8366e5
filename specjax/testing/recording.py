"""Recording of drafts and output of many requests as NumPy arrays."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import decoder as decoder_lib
from specjax.decoding import inputs
from specjax.types import DecodeState

# Prompts and temperatures of every third row, in turn. The test of the joint
# distribution requires many samples after each of these prompts.
TEXTS = (((1, 3, 0, 2), 1.0), ((4,), 0.6))
_TEMPERATURES = (0.8, 1.0, 0.8, 0.6, 0.8, 1.4, 0.8, 0.0)  # of all other rows
EVERY = 3  # distance of the rows with entries of TEXTS
_LONGEST = 32  # largest number of tokens of a random prompt
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
            longest: int = _LONGEST) -> "Requests":
    """Returns a mixture of requests.

    Every third row uses an entry of `TEXTS` in turn, without an eos. The other
    rows have various prompts, various temperatures and up to two eos ids.

    Args:
      vocab_size: vocabulary size V.
      rows: number of rows B.
      new: largest number of new tokens. Some rows have one or two fewer.
      prompts: prompts of the other rows, used in turn. None means random
        prompts of 1 to `longest` tokens.
      longest: length of the longest random prompt, in tokens.
    """
    rng = np.random.default_rng(0)
    if prompts is None:
      prompts = [rng.integers(vocab_size, size=n) for n in rng.permutation(
          np.resize(np.arange(longest) + 1, max(longest, rows)))]
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
        temperature = _TEMPERATURES[i % len(_TEMPERATURES)]
        ids = kinds[rng.integers(len(kinds))]
        eos[row, :len(ids)] = ids
      found.append(prompt)
      temperatures.append(temperature)
      limits.append(new - row // 7 % 3)
    return cls(prompts=tuple(found), eos=eos,
               temperature=np.array(temperatures, np.float32),
               new=np.array(limits, np.int32))

  @property
  def lengths(self) -> np.ndarray:
    """`[B]` lengths of the prompts in tokens."""
    return np.array([len(prompt) for prompt in self.prompts])

  def taken(self, rows: np.ndarray) -> "Requests":
    """Returns the requests of the rows with indices `rows`, in this order."""
    return Requests(prompts=tuple(self.prompts[row] for row in rows),
                    temperature=self.temperature[rows], eos=self.eos[rows],
                    new=self.new[rows])

  def prefill(self, decoder: decoder_lib.Decoder, params: chex.ArrayTree,
              **kwargs: Any) -> DecodeState:
    """Returns the state after `Decoder.prefill` of these requests.

    `kwargs` are further arguments of `Decoder.prefill`.
    """
    return decoder.prefill(
        params, self.prompts, jax.random.key(0),
        limits=self.lengths + self.new, temperature=self.temperature,
        eos=[[int(i) for i in ids if i >= 0] for ids in self.eos], **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """Recorded rounds: K calls, R rounds, B rows, N nodes of a draft, V tokens.

  Attributes:
    requests: requests of each call.
    active: `[K, R, B]` bool mask of rows that are not complete.
    emitted: `[K, R, B]` number of emitted tokens.
    accepted: `[K, R, B]` number of accepted draft tokens.
    tokens: `[K, R, B, N]` tokens of the drafts.
    parents: `[K, R, B, N]` parents of the drafts.
    probs: `[K, R, B, N, V]` distributions q of the drafts.
    target_probs: `[K, R, B, N, V]` target distributions after every node.
    texts: `[K, B, C]` prompts and new tokens, in C slots.
  """

  requests: Requests
  active: np.ndarray
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
           state: DecodeState,
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
    prepare: function from the first state of a call to a modified state.

  Raises:
    FloatingPointError: some numbers are not finite.
  """
  calls = []
  keys = inputs.row_keys(jax.random.key(0), ids.reshape(-1), ids.size)
  for own in keys.reshape(ids.shape):
    now, parts = prepare(_with_keys(state, own)), []
    for _ in range(rounds // _AT_ONCE):
      now, stats, trace = decoder.decode_traced(params, now, _AT_ONCE)
      decoder_lib.raise_if_not_finite(stats)
      parts.append(dict(
          active=stats.active, emitted=stats.emitted,
          accepted=trace.verdict.num_accepted, tokens=trace.draft.tokens,
          parents=trace.draft.parents, probs=trace.draft.probs,
          target_probs=trace.target_probs))
    parts = jax.device_get(parts)
    call = {name: np.concatenate([part[name] for part in parts])
            for name in parts[0]}
    calls.append({**call, "texts": np.asarray(now.tokens)})
  return Record(requests=requests, **{
      name: np.stack([call[name] for call in calls]) for name in calls[0]})


@jax.jit
def _with_keys(state, keys):
  """Returns a copy of a state with new keys.

  A copy is necessary, because the loop donates its state.
  """
  return jax.tree.map(jnp.copy, state).replace(keys=keys)


def joined(records: Sequence[Record]) -> Record:
  """Returns one record with the calls of several records.

  The records have the same requests.
  """
  fields = [field.name for field in dataclasses.fields(Record)][1:]
  return Record(requests=records[0].requests, **{
      name: np.concatenate([getattr(one, name) for one in records])
      for name in fields})
