"""Records drafts and output of many requests as numpy arrays."""

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

# Every third row uses one of these prompts and temperatures in turn. Each gets
# many samples, which the test of the joint distribution needs.
TEXTS = (((1, 3, 0, 2), 1.0), ((4,), 0.6))
_TEMPERATURES = (0.8, 1.0, 0.8, 0.6, 0.8, 1.4, 0.8, 0.0)  # of other rows
EVERY = 3
_LONGEST = 32  # tokens of a prompt
_AT_ONCE = 2  # rounds of a call of the compiled loop; divides all round numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
  """Requests of a batch that differ in prompt, temperature, eos and limit.

  Attributes:
    prompts: B lists of token ids.
    temperature: `[B]` float32, temperature of each row.
    eos: `[B, 2]` int32, eos ids, padded with -1.
    new: `[B]` int32, largest number of new tokens.
  """

  prompts: tuple[tuple[int, ...], ...]
  temperature: np.ndarray
  eos: np.ndarray
  new: np.ndarray

  @classmethod
  def mixed(cls, vocab_size: int, rows: int, new: int,
            prompts: Sequence[Sequence[int]] | None = None,
            longest: int = _LONGEST) -> "Requests":
    """Returns requests of all kinds.

    Every third row uses an entry of `TEXTS` in turn, without an eos. The other
    rows have prompts of 1 to `longest` tokens, several temperatures, and up to
    two eos ids.

    Args:
      vocab_size: vocabulary size V.
      rows: number of rows B.
      new: largest number of new tokens. Some rows get one or two fewer.
      prompts: prompts of the other rows, in turn. None: random prompts.
      longest: length of the longest random prompt.
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
    """Lengths of the prompts in tokens, `[B]`."""
    return np.array([len(prompt) for prompt in self.prompts])

  def taken(self, rows: np.ndarray) -> "Requests":
    """Returns the requests of the given rows, in this order."""
    return Requests(prompts=tuple(self.prompts[row] for row in rows),
                    temperature=self.temperature[rows], eos=self.eos[rows],
                    new=self.new[rows])

  def prefill(self, decoder: decoder_lib.Decoder, params: chex.ArrayTree,
              **kwargs: Any) -> DecodeState:
    """Returns the state after `Decoder.prefill`, which gets `kwargs`."""
    return decoder.prefill(
        params, self.prompts, jax.random.key(0),
        limits=self.lengths + self.new, temperature=self.temperature,
        eos=[[int(i) for i in ids if i >= 0] for ids in self.eos], **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """Recorded rounds: K calls, R rounds, B rows, N nodes of a draft, V tokens.

  Attributes:
    requests: requests of every call.
    active: `[K, R, B]` bool, mask of the rows that decode.
    emitted: `[K, R, B]`, number of committed tokens.
    accepted: `[K, R, B]`, number of accepted drafted tokens.
    tokens: `[K, R, B, N]`, tokens of the drafts.
    parents: `[K, R, B, N]`, parents of the drafts.
    probs: `[K, R, B, N, V]`, distributions that the drafter reports.
    target_probs: `[K, R, B, N, V]`, target distributions after every node.
    texts: `[K, B, C]`, prompts and new tokens, in C slots.
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
    """Mask of the drafted nodes, without padding, `[K, R, B, N]` bool."""
    found = (self.probs.sum(-1) != 0) & self.active[..., None]
    found[..., 0] = False
    return found


def record(decoder: decoder_lib.Decoder, params: chex.ArrayTree,
           requests: Requests, ids: np.ndarray, *, rounds: int,
           state: DecodeState,
           prepare: Callable[[DecodeState], DecodeState] = lambda x: x
           ) -> Record:
  """Decodes the same requests in several calls and records all rounds.

  Args:
    decoder: the decoder.
    params: parameters of the decoder.
    requests: requests of B rows.
    ids: `[K, B]`, request ids of every call.
    rounds: number of rounds R, even.
    state: state that `requests.prefill` returned; it is copied.
    prepare: function that changes the first state of a call.

  Raises:
    FloatingPointError: some numbers were not finite.
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
  """Returns a copy of a state with new keys; the loop donates its state."""
  return jax.tree.map(jnp.copy, state).replace(keys=keys)


def joined(records: Sequence[Record]) -> Record:
  """Concatenates the calls of several records of the same requests."""
  fields = [field.name for field in dataclasses.fields(Record)][1:]
  return Record(requests=records[0].requests, **{
      name: np.concatenate([getattr(one, name) for one in records])
      for name in fields})
