"""Decoding of many prompts in the rows of one batch.

When a row is done, the next prompt replaces it, so the batch stays full.
Without a controller, the output of a prompt does not depend on the other rows.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import sys
from typing import Any

import chex
import jax
import numpy as np

from specjax.decoding.decoder import Decoder
from specjax.decoding.decoder import raise_if_not_finite
from specjax.types import DecodeState
from specjax.types import RoundStats
from specjax.types import Trace
from specjax.utils import processes


@dataclasses.dataclass(frozen=True, eq=False)
class DecodedRow:
  """A decoded prompt and its R rounds, as numpy arrays.

  Attributes:
    tokens: token ids of prompt and output.
    stats: `RoundStats` of this prompt: arrays `[R, ...]` without the axis B.
    trace: `Trace` of this prompt: arrays `[R, ...]` without the axis B. None if
      `traced` is False.
  """

  tokens: np.ndarray
  stats: RoundStats
  trace: Trace | None = None


def decode_rows(decoder: Decoder, params: chex.ArrayTree, state: DecodeState,
                starts: Sequence[Callable[[], DecodeState]], *, rounds: int,
                most_rounds: int = sys.maxsize, traced: bool = False
                ) -> Iterator[tuple[int, DecodedRow]]:
  """Decodes prompts in the rows of a batch and yields them as they complete.

  >>> import jax
  >>> import specjax as sj
  >>> model = sj.testing.MarkovModel(vocab_size=4)
  >>> table = model.init(jax.random.key(0))
  >>> params = {"target": table, "drafter": table}
  >>> decoder = sj.Decoder(
  ...     target=model, verifier=sj.verifiers.Block(),
  ...     drafter=sj.drafters.draft_model(model=model, gamma=2))
  >>> start = lambda number, limit: decoder.prefill(
  ...     params, [[1]] * number, jax.random.key(1), limits=limit)
  >>> rows = decode_rows(decoder, params, start(2, 1),
  ...                    [lambda: start(1, limit=5)] * 3, rounds=2)
  >>> sorted((index, len(row.tokens)) for index, row in rows)
  [(0, 5), (1, 5), (2, 5)]

  Args:
    decoder: decoder of all prompts.
    params: `{"target": ..., "drafter": ...}`.
    state: batch of placeholders, whose rows are replaced by the prompts. It is
      donated.
    starts: functions without arguments. Each prefills one prompt and returns
      the state. The request id in this state determines the random numbers of
      the prompt.
    rounds: number of rounds per call of `decode`. A row that is done is
      replaced when the call ends.
    most_rounds: maximum number of rounds of a prompt. A prompt may end earlier,
      at its limit.
    traced: True returns traces. They need rounds * B * 2 * N * V floats for B
      rows, N nodes of a draft and a vocabulary of V tokens.

  Yields:
    The index of a prompt in `starts`, and its `DecodedRow`.
  """
  waiting, slots = list(enumerate(starts))[::-1], {}
  while waiting or slots:
    for slot in range(len(state.lengths)):
      if slot not in slots and waiting:
        index, start = waiting.pop()
        state = decoder.insert(state, slot, start())
        slots[slot] = index, []
    state, *found = decoder.decode(params, state, rounds, traced)
    raise_if_not_finite(found[0])
    found, done, tokens, lengths = jax.tree.map(np.asarray, processes.gathered(
        (found, state.done, state.tokens, state.lengths)))
    for slot, (index, parts) in list(slots.items()):
      active = found[0].active[:, slot]
      parts.append(jax.tree.map(
          lambda x, slot=slot, active=active: x[active, slot], found))
      # A row that is not done was active in all rounds of its calls. Their
      # number is len(parts) * rounds.
      if done[slot] or len(parts) * rounds >= most_rounds:
        del slots[slot]
        yield index, _row(tokens[slot, :lengths[slot]], parts, most_rounds)


def _row(tokens: np.ndarray, parts: list[Any], most_rounds: int) -> DecodedRow:
  """Returns a decoded prompt without the rounds after `most_rounds`."""
  stats, *trace = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  surplus = int(stats.emitted[most_rounds:].sum())
  return DecodedRow(
      tokens[:len(tokens) - surplus],
      *jax.tree.map(lambda x: x[:most_rounds], [stats, *trace]))
