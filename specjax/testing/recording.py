"""Drafts and texts of many different requests, recorded as numpy arrays."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import decoder as decoder_lib
from specjax.decoding import inputs
from specjax.types import DecodeState

# Every third row has one of these prompts and temperatures in turns: many texts
# after each, for their joint law.
TEXTS = (((1, 3, 0, 2), 1.0), ((4,), 0.6))
_TEMPERATURES = (0.8, 1.0, 0.8, 0.6, 0.8, 1.4, 0.8, 0.0)  # of the others
EVERY = 3
_LONGEST = 32  # tokens of a prompt
_AT_ONCE = 2  # rounds of a program; one program serves all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
  """The rows of a batch, which differ in all that a request may choose.

  Attributes:
    prompts: B lists of token ids.
    temperature: `[B]` float32.
    eos: `[B, 2]` int32, filled up with -1.
    new: `[B]` int32, most new tokens.
  """

  prompts: tuple[tuple[int, ...], ...]
  temperature: np.ndarray
  eos: np.ndarray
  new: np.ndarray

  @classmethod
  def mixed(cls, vocab_size: int, rows: int, new: int,
            prompts: Sequence[Sequence[int]] | None = None,
            longest: int = _LONGEST) -> "Requests":
    """Requests of all kinds.

    Every third row is one of `TEXTS` in turns, without an eos. The others have
    prompts of 1 to `longest` tokens, several temperatures, and up to two eos
    ids.

    Args:
      vocab_size: V.
      rows: B.
      new: most new tokens of a row; some get one or two less.
      prompts: prompts of the others, in turns; default: random ones.
      longest: longest random prompt.
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
    """`[B]`, tokens of the prompts."""
    return np.array([len(prompt) for prompt in self.prompts])

  def taken(self, rows: np.ndarray) -> "Requests":
    """These rows, in this order."""
    return Requests(prompts=tuple(self.prompts[row] for row in rows),
                    temperature=self.temperature[rows], eos=self.eos[rows],
                    new=self.new[rows])

  def prefill(self, decoder: decoder_lib.Decoder, params: Any,
              **kwargs: Any) -> DecodeState:
    """The state after the prompts; `kwargs` are of `Decoder.prefill`."""
    return decoder.prefill(
        params, self.prompts, jax.random.key(0),
        limits=self.lengths + self.new, temperature=self.temperature,
        eos=[[int(i) for i in ids if i >= 0] for ids in self.eos], **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """Rounds of several calls: K calls, R rounds, B rows, N nodes.

  Attributes:
    requests: the rows of every call.
    active: `[K, R, B]` bool.
    emitted: `[K, R, B]`, tokens that the round committed.
    accepted: `[K, R, B]`, drafted tokens that the verifier accepted.
    tokens: `[K, R, B, N]`, of the drafts, and so are the next two.
    parents: `[K, R, B, N]`.
    probs: `[K, R, B, N, V]`.
    target_probs: `[K, R, B, N, V]`.
    texts: `[K, B, C]`, prompts and new tokens.
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
    """`[K, R, B, N]` bool, the nodes below the root without padding."""
    found = (self.probs.sum(-1) != 0) & self.active[..., None]
    found[..., 0] = False
    return found


def record(decoder: decoder_lib.Decoder, params: Any, requests: Requests,
           ids: np.ndarray, *, rounds: int, state: DecodeState,
           prepare: Callable[[DecodeState], DecodeState] = lambda x: x
           ) -> Record:
  """Decodes the same requests in several calls.

  Args:
    decoder: the decoder.
    params: parameters of the decoder.
    requests: B rows.
    ids: `[K, B]`, the request ids of every call.
    rounds: R, even.
    state: the state of `requests.prefill`; it is copied.
    prepare: changes the first state of a call.

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
  """A copy, because the loop donates its state, with the keys of a call."""
  return jax.tree.map(jnp.copy, state).replace(keys=keys)


def joined(records: Sequence[Record]) -> Record:
  """The calls of several records of the same requests, one after the other."""
  fields = [field.name for field in dataclasses.fields(Record)][1:]
  return Record(requests=records[0].requests, **{
      name: np.concatenate([getattr(one, name) for one in records])
      for name in fields})
