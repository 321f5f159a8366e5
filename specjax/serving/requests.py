"""Requests, their results, and the checks of a request against a slot."""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import chex
import jax
import numpy as np

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import inputs
from specjax.decoding.decoder import Decoder
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A prompt and the options of its continuation.

  Attributes:
    prompt: token ids, at least one.
    max_new_tokens: maximum number of generated tokens, at least 0.
    temperature: temperature, at least 0. 0 is greedy. Default: the decoder's
      temperature.
    eos: token id that ends the sequence, several ids, or () for no end token.
      Default: the decoder's `eos`.
    seed: seed of the row's random numbers, from 0 to 2^32 - 1. Equal prompts
      with equal seeds give equal sequences. Use different seeds for independent
      samples.
    context: drafter's context for this row, with the structure, shapes and
      dtypes of the queue's context. Default: the queue's context.

  >>> import specjax as sj
  >>> request = sj.serving.Request(prompt=[1, 2], max_new_tokens=6, seed=3)
  >>> request.temperature is None
  True
  """

  prompt: Sequence[int]
  max_new_tokens: int
  temperature: float | None = None
  eos: int | tuple[int, ...] | None = None
  seed: int = 0
  context: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """The final state of a request.

  Attributes:
    number: number of the request, from `submit`.
    tokens: `[T]` int32, prompt and continuation. Empty if the request was
      refused.
    reason: reason why the request ended: "eos", "limit", "cancelled", "failed"
      (non-finite numbers after these tokens) or "refused" (invalid request).
    error: one-line message of a failed or refused request, else None.
    rounds: number of rounds that decoded this row.
    accepted: number of accepted draft tokens.
  """

  number: int
  tokens: np.ndarray
  reason: str
  error: str | None = None
  rounds: int = 0
  accepted: int = 0


class Update(NamedTuple):
  """The new tokens of a request after one step.

  Attributes:
    number: number of the request.
    tokens: `[T]` int32, the new tokens.
    result: result if the request has ended, else None.
  """

  number: int
  tokens: np.ndarray
  result: Result | None = None


@dataclasses.dataclass(eq=False)
class Row:
  """An accepted request and its generated tokens.

  Attributes:
    number: number of the request.
    prompt: `[T]` int32, token ids of the prompt.
    limit: length of prompt and continuation at which the row is done.
    temperature: `[1]` float32, temperature of the row.
    eos: `[1, E]` int32, end tokens, padded with -1.
    seed: seed of the row's random numbers.
    context: drafter's context for this row.
    tokens: list with the new tokens of every chunk.
    rounds: number of rounds that decoded this row.
    accepted: number of accepted draft tokens.
  """

  number: int
  prompt: np.ndarray
  limit: int
  temperature: np.ndarray
  eos: np.ndarray
  seed: int
  context: Any
  tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
  rounds: int = 0
  accepted: int = 0

  def result(self, reason: str, error: str | None = None) -> Result:
    """Returns the result with all tokens generated so far.

    Args:
      reason: see `Result`.
      error: see `Result`.
    """
    return Result(
        number=self.number, reason=reason, error=error, rounds=self.rounds,
        tokens=np.concatenate([self.prompt, *self.tokens]).astype(np.int32),
        accepted=self.accepted)


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
  """Limits of a slot, equal for all slots of a queue.

  Attributes:
    decoder: decoder of all requests.
    length: maximum length of a prompt and its continuation.
    ends: E, maximum number of ids in the `eos` of a request.
    context: drafter's context for requests without a context.
  """

  decoder: Decoder
  length: int
  ends: int
  context: Any

  def row(self, request: Request, number: int) -> Row:
    """Checks a request and returns its row.

    Raises:
      ValueError: a field is out of range, or the request does not fit.
      TypeError, OverflowError: a field has a wrong type.
    """
    decoder = self.decoder
    tokens, lengths = inputs.prompts(
        [request.prompt], decoder.target.vocab_size)
    fields.check_at_least("max_new_tokens", request.max_new_tokens, 0)
    length, new = int(lengths[0]), int(request.max_new_tokens)
    if length + new > self.length:
      raise ValueError(
          f"prompt has {length} tokens and max_new_tokens is {new}; their sum "
          f"must be at most {self.length}: shorten the prompt, reduce "
          "max_new_tokens, or give the queue a larger max_length")
    if not fields.is_whole(request.seed) or not 0 <= request.seed < 2**32:
      raise ValueError(f"seed is {request.seed}; it must be a whole number "
                       "from 0 to 2^32 - 1")
    size = decoder.target.vocab_size
    ends = inputs.eos_rows(
        None if request.eos is None else [inputs.eos_ids(
            "eos of prompt 0", request.eos, size)], decoder.eos, 1, size)
    if ends.shape[1] > self.ends:
      raise ValueError(
          f"eos has {ends.shape[1]} token ids; the limit is {self.ends}: give "
          "fewer, or give the queue a larger max_ends")
    ends = np.pad(ends, ((0, 0), (0, self.ends - ends.shape[1])),
                  constant_values=-1)
    constraints_lib.check_rows(
        decoder.transform.constraints, np.array([new]), ends)
    context = self.context if request.context is None else jax.tree.map(
        np.asarray, request.context)
    if _form(context) != _form(self.context):
      raise ValueError(
          f"context is {_form(context)}; its structure, shapes and dtypes must "
          f"be those of the queue's context, {_form(self.context)}")
    return Row(
        number=number, prompt=tokens[0, :length], limit=length + new,
        temperature=inputs.temperatures(
            request.temperature, decoder.transform.temperature, 1),
        eos=ends, seed=int(request.seed), context=context)


def _form(context: chex.ArrayTree) -> str:
  """Returns the structure, shapes and dtypes of a context as text."""
  return str(jax.tree.map(
      lambda x: f"{jax.dtypes.canonicalize_dtype(x.dtype)}{list(x.shape)}",
      context))
