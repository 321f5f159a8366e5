"""Requests, what becomes of them, and what a slot has room for."""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import inputs
from specjax.decoding.decoder import Decoder
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What is to be continued, and how.

  Attributes:
    prompt: token ids, at least one.
    max_new_tokens: at least 0.
    temperature: at least 0, 0 is greedy; None: the decoder's.
    eos: the token id that ends the text, or several of them, or () for none;
      None: the decoder's.
    seed: of the row's random numbers, from 0 to 2^32 - 1. Requests with one
      seed share them, so that two equal prompts then get the same text. Give
      each its own to sample independently.
    context: what the drafter reads for this row, of the form of the queue's;
      None: the queue's.
  """

  prompt: Sequence[int]
  max_new_tokens: int
  temperature: float | None = None
  eos: int | tuple[int, ...] | None = None
  seed: int = 0
  context: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What became of a request.

  Attributes:
    number: of the request, as `submit` returned it.
    tokens: `[T]` int32, prompt and continuation; empty if it was refused.
    reason: why the text ends: "eos", "limit", "cancelled", "failed" (its
      numbers broke down; what was written before is good) or "refused".
    error: one line, of what failed or was refused.
    rounds: that it took part in.
    accepted: drafted tokens in its text.
  """

  number: int
  tokens: np.ndarray
  reason: str
  error: str | None = None
  rounds: int = 0
  accepted: int = 0


class Update(NamedTuple):
  """What a step brought for a request.

  Attributes:
    number: of the request.
    tokens: int32, the new ones.
    result: when the text has ended, else None.
  """

  number: int
  tokens: np.ndarray
  result: Result | None = None


@dataclasses.dataclass(eq=False)
class Row:
  """A request that was accepted, and its text so far.

  Attributes:
    number: of the request.
    prompt: int32.
    limit: tokens of prompt and text at which it is done.
    temperature: `[1]` float32.
    eos: `[1, E]` int32, filled up with -1.
    seed: of all that is drawn.
    context: what the drafter reads for it.
    tokens: the new ones, chunk by chunk.
    rounds: that it took part in.
    accepted: drafted tokens in its text.
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
    """What became of it, so far."""
    return Result(
        number=self.number, reason=reason, error=error, rounds=self.rounds,
        tokens=np.concatenate([self.prompt, *self.tokens]).astype(np.int32),
        accepted=self.accepted)


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
  """What a row of the batch has room for, whoever is in it.

  Attributes:
    decoder: of all requests.
    length: tokens of a prompt and its text, at most.
    ends: E, ids that a request's `eos` may hold.
    context: what the drafter reads for a request that brings nothing.
  """

  decoder: Decoder
  length: int
  ends: int
  context: Any

  def row(self, request: Request, number: int) -> Row:
    """The row of a request.

    Raises:
      ValueError: it does not fit.
      TypeError, OverflowError: a field is of a wrong kind.
    """
    decoder = self.decoder
    tokens, lengths = inputs.prompts(
        [request.prompt], decoder.target.vocab_size)
    fields.check_at_least("max_new_tokens", request.max_new_tokens, 0)
    length, new = int(lengths[0]), int(request.max_new_tokens)
    if length + new > self.length:
      raise ValueError(
          f"a prompt of {length} tokens and {new} new ones do not fit into a "
          f"slot of {self.length}: shorten the prompt, ask for fewer, or give "
          "the queue a larger max_length")
    if not fields.is_whole(request.seed) or not 0 <= request.seed < 2**32:
      raise ValueError(f"seed is {request.seed}; it must be a whole number "
                       "from 0 to 2^32 - 1")
    size = decoder.target.vocab_size
    ends = inputs.eos_rows(
        None if request.eos is None else [inputs.eos_ids(
            "eos of prompt 0", request.eos, size)], decoder.eos, 1, size)
    if ends.shape[1] > self.ends:
      raise ValueError(
          f"eos holds {ends.shape[1]} token ids and a slot has room for "
          f"{self.ends}; give fewer, or give the queue a larger max_ends")
    ends = np.pad(ends, ((0, 0), (0, self.ends - ends.shape[1])),
                  constant_values=-1)
    constraints_lib.check_rows(
        decoder.transform.constraints, np.array([new]), ends)
    context = self.context if request.context is None else jax.tree.map(
        np.asarray, request.context)
    if _form(context) != _form(self.context):
      raise ValueError(
          f"context is {_form(context)} and the queue's is "
          f"{_form(self.context)}; all rows of a batch have the same form")
    return Row(
        number=number, prompt=tokens[0, :length], limit=length + new,
        temperature=inputs.temperatures(
            request.temperature, decoder.transform.temperature, 1),
        eos=ends, seed=int(request.seed), context=context)


def _form(context):
  """Structure, shapes and dtypes of a context, in words."""
  return str(jax.tree.map(
      lambda x: f"{jax.dtypes.canonicalize_dtype(x.dtype)}{list(x.shape)}",
      context))
