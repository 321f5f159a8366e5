"""Prints text during decoding, and compares speeds."""

import codecs
from collections.abc import Sequence
import dataclasses
import os
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lib import progress
import specjax as sj
from specjax.data import Tokenizer
from specjax.decoding.placement import Placement
from specjax.utils import processes

_ROUNDS_A_CALL = 2  # rounds per call; new tokens are printed after each call
_PAIRS = 3  # pairs of timed runs, with and without the drafter
_GREEN, _RED, _PLAIN = "\033[32m", "\033[31m", "\033[0m"


def is_colored(choice: str) -> bool:
  """Returns True if output is coloured.

  `choice` is "always", "never" or "auto". "auto" colours output on a terminal.
  """
  if choice != "auto":
    return choice == "always"
  return (sys.stdout.isatty() and not os.environ.get("NO_COLOR")
          and os.environ.get("TERM") != "dumb")


class Printer:
  """Prints tokens as complete characters and in colour during generation.

  Attributes:
    text: printed text, without colour codes.
  """

  def __init__(self, tokenizer: Tokenizer, colored: bool):
    self._characters = codecs.getincrementaldecoder("utf-8")("replace")
    self._tokenizer = tokenizer
    self._colored = colored
    self._begun = False
    self._pieces = []

  @property
  def text(self):
    return "".join(self._pieces)

  def prompt(self, ids: list[int]):
    """Prints the tokens of a prompt, without colour."""
    for token in ids:
      self._print(token, "")

  def round(self, ids: list[int], accepted: int):
    """Prints the tokens of a round. The first `accepted` tokens were drafted.
    """
    for place, token in enumerate(ids):
      self._print(token, _GREEN if place < accepted else _RED)
    sys.stdout.flush()

  def end(self):
    """Prints U+FFFD if the last character is incomplete."""
    self._write(self._characters.decode(b"", final=True), "")

  def _print(self, token: int, color: str):
    found = self._tokenizer.token_bytes(int(token), first=not self._begun)
    self._begun |= bool(self._tokenizer.token_bytes(int(token)))
    self._write(self._characters.decode(found), color)

  def _write(self, piece: str, color: str):
    if piece:
      self._pieces.append(piece)
      sys.stdout.write(color + piece + _PLAIN if color and self._colored
                       else piece)


@dataclasses.dataclass
class Answer:
  """Generated tokens of one prompt, with the number of rounds and the time.

  Attributes:
    tokens: generated ids.
    rounds: number of rounds.
    drafted: number of accepted draft tokens among `tokens`.
    seconds: time of decoding and printing, except the printing of the last two
      rounds.
    target_calls: target calls in a round, see `sj.Drafter`.
  """

  tokens: list[int] = dataclasses.field(default_factory=list)
  rounds: int = 0
  drafted: int = 0
  seconds: float = 0.0
  target_calls: int = 1

  def __str__(self):
    total = len(self.tokens)
    return (f"{total} tokens in {self.rounds} rounds: "
            f"{total / max(self.rounds, 1) / self.target_calls:.2f} per target "
            "call, "
            f"{100 * self.drafted / max(total, 1):.0f} % of them drafted, "
            f"{total / max(self.seconds, 1e-9):.0f} tokens/s")


class Writer:
  """Generates outputs one after another with a decoder and a seed.

  If there is a `Placement`, it distributes the parameters over a mesh.
  """

  def __init__(self, decoder: sj.Decoder, params: Any, seed: int,
               placement: Placement | None = None):
    self.decoder = decoder
    self._params = placement.put(decoder, params) if placement else params
    self._key, self._placement = jax.random.key(seed), placement
    self._compiled, self._announced = set(), set()

  def start(self, ids: list[int], new_tokens: int, number: int = 0,
            capacity: int = 0):
    """Returns the state after a prompt.

    Args:
      ids: token ids of the prompt.
      new_tokens: maximum number of generated tokens.
      number: number of the request. Outputs with the same seed and different
        numbers are sampled independently.
      capacity: minimum number of cache slots. More are used if necessary.
    """
    slots = max(len(ids) + new_tokens + self.decoder.num_nodes, capacity)
    if slots not in self._announced:
      progress.say(f"compiling for {slots} tokens")
      self._announced.add(slots)
    return self.decoder.prefill(
        self._params, [ids], self._key, limits=len(ids) + new_tokens,
        request_ids=[number], capacity=capacity, placement=self._placement)

  def write(self, state: sj.types.DecodeState, printer: Printer,
            answer: Answer):
    """Decodes and prints a sequence until it ends.

    Args:
      state: state from `start`. It is donated.
      printer: printer of the sequence.
      answer: record of the generated tokens. It is updated after every round,
        so it is complete even after Ctrl-C.
    """
    slots = state.tokens.shape[1]
    if slots not in self._compiled:  # compile before the clock starts
      jax.block_until_ready(self.decoder.decode(
          self._params, jax.tree.map(jnp.copy, state), rounds=_ROUNDS_A_CALL))
      self._compiled.add(slots)
    length, start = int(state.lengths[0]), time.perf_counter()
    while not bool(state.done[0]):
      state, stats = self.decoder.decode(
          self._params, state, rounds=_ROUNDS_A_CALL)
      stats, text = processes.gathered((stats, state.tokens))
      sj.decoding.raise_if_not_finite(stats)
      passed = (time.perf_counter() - start - answer.seconds) / max(
          int(stats.active[:, 0].sum()), 1)
      tokens = np.asarray(text[0])
      for active, emitted, drafted in zip(*(np.asarray(x[:, 0]) for x in (
          stats.active, stats.emitted, stats.accepted))):
        new = tokens[length:length + emitted].tolist()
        printer.round(new, drafted)
        # Count tokens after printing. So tokens that `| head` cuts off are not
        # counted.
        answer.tokens += new
        answer.drafted += int(drafted)
        answer.rounds += int(active)  # 0 if the sequence was already finished
        answer.seconds += passed * active
        length += emitted
    printer.end()

  def time(self, ids: list[int], new_tokens: int, capacity: int = 0):
    """Returns the tokens generated after a prompt, and the time in seconds."""
    state = jax.block_until_ready(
        self.start(ids, new_tokens, capacity=capacity))
    start = time.perf_counter()
    state, stats = jax.block_until_ready(
        self.decoder.decode_until(self._params, state))
    seconds = time.perf_counter() - start
    sj.decoding.raise_if_not_finite(stats)
    tokens = processes.gathered(state.tokens)[0]
    return np.asarray(tokens[len(ids):int(state.lengths[0])]), seconds


def compare(writers: Sequence[Writer], ids: list[int], new_tokens: int,
            tokenizer: Tokenizer) -> str:
  """Measures the speed with and without speculation.

  Both writers are warmed up. Then their runs alternate, so both are measured
  under the same conditions.

  Args:
    writers: speculative writer, and writer without drafts.
    ids: token ids of the prompt.
    new_tokens: maximum number of generated tokens.
    tokenizer: tokenizer of the target.

  Returns:
    Message with the tokens per second of both writers and their ratio.

  Raises:
    ValueError: the two outputs differ at temperature 0.
  """
  progress.say("comparing the speed with and without the drafter")
  for writer in writers:  # warm up with a short output of the same program
    writer.time(ids, min(new_tokens, 8),
                len(ids) + new_tokens + writer.decoder.num_nodes)
  speeds, texts = ([], []), None
  for _ in range(_PAIRS):
    texts = []
    for writer, found in zip(writers, speeds):
      tokens, seconds = writer.time(ids, new_tokens)
      found.append(len(tokens) / seconds)
      texts.append(tokens.tolist())
  if writers[0].decoder.transform.temperature == 0:
    _check_same(*texts, tokenizer)
  speculative, alone = map(statistics.median, speeds)
  return (f"{speculative:.1f} tokens/s by speculation, {alone:.1f} without: "
          f"{speculative / alone:.2f} times as fast (medians of {_PAIRS} runs "
          "each, in turn)")


def _check_same(speculative: list[int], alone: list[int], tokenizer: Tokenizer):
  """Raises `ValueError` if the outputs at temperature 0 differ."""
  if speculative == alone:
    return
  place = next((i for i, pair in enumerate(zip(speculative, alone))
                if pair[0] != pair[1]), min(len(speculative), len(alone)))
  says = lambda text: repr(tokenizer.decode(text[place:place + 4]))
  raise ValueError(
      f"--compare: the two outputs differ from token {place} on, "
      f"{says(speculative)} by speculation and {says(alone)} without, so their "
      "speeds are not compared. Passes over more tokens round differently, so "
      "two equally likely tokens can change places: set --dtype=float32")
