"""Seconds of decoding rounds: measured here, or predicted for a chip.

Only every second draft length, batch size and context (and the largest of each)
is measured, and the smallest batch size. Rounds of drafts that may be the
fastest are also measured (`advice.confirmed`). The counts of a compiled round
are linear in all of them, so only the smallest and the largest are compiled.
All other rounds are interpolated.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import pathlib
from typing import Any

import jax
import numpy as np

from lib.compiler import chips
from lib.rollouts import judging
import specjax as sj
from specjax.decoding import costs
from specjax.utils import files
from specjax.utils import fingerprints


def _points(numbers: Sequence[int]) -> list[int]:
  """Returns every second number and the largest, in increasing order."""
  numbers = sorted(set(numbers))
  return sorted({*numbers[::2], numbers[-1]})


def _ends(numbers: Sequence[int]) -> list[int]:
  """Returns the smallest and the largest number."""
  return sorted({min(numbers), max(numbers)})


def _batch_points(batches: Sequence[int]) -> list[int]:
  """Returns the smallest batch size, and `_points` of the others.

  At batch size 1, a step without drafts multiplies matrices by a vector. Larger
  batches use other kernels, so interpolation from batch size 1 is inaccurate.
  """
  return sorted({min(batches), *_points(
      [n for n in batches if n > min(batches)] or batches)})


class Stored:
  """Values that are computed once and stored in a JSON file."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._values = files.read_json(path, "delete it") if path.exists() else {}

  def __call__(self, key: Any, function: Callable[[], Sequence[float]]
               ) -> Sequence[float]:
    """Returns the value of a key, and calls the function if it has none."""
    name = fingerprints.fingerprint(key)
    if name not in self._values:
      self._values[name] = list(map(float, function()))
      files.write_json(self._path, self._values)
      # Programs are not used again, and their number in a process is limited.
      jax.clear_caches()
    return self._values[name]


@dataclasses.dataclass(frozen=True)
class Grid:
  """Values at the points of a grid, for linear interpolation.

  Attributes:
    axes: increasing coordinates of the points, per axis.
    values: array with one axis per element of `axes`; more axes are allowed.
  """

  axes: Sequence[Sequence[float]]
  values: np.ndarray

  @classmethod
  def of(cls, axes: Sequence[Sequence[float]],
         function: Callable[..., Any]) -> "Grid":
    """Returns the grid of a function's values."""
    axes = [sorted(set(axis)) for axis in axes]
    values = np.array([function(*x) for x in itertools.product(*axes)])
    shape = tuple(map(len, axes))
    return cls(axes, values.reshape(shape + values.shape[1:]))

  def __call__(self, *point: float) -> Any:
    """Returns the value at a point, extrapolated outside the grid."""
    values = self.values
    for axis, x in zip(self.axes, point):
      if len(axis) == 1:
        values = values[0]
        continue
      i = int(np.clip(np.searchsorted(axis, x) - 1, 0, len(axis) - 2))
      share = (x - axis[i]) / (axis[i + 1] - axis[i])
      values = (1 - share) * values[i] + share * values[i + 1]
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
  """Rounds of several drafts on one target.

  Attributes:
    target: target model.
    candidates: kinds of drafts by name.
    gammas: draft lengths of chains.
    batches: batch sizes.
    contexts: tokens per row.
    texts: token ids at which rounds are timed, for a target with experts. None
      means random tokens.
  """

  target: Any
  candidates: Mapping[str, judging.Candidate]
  gammas: Sequence[int]
  batches: Sequence[int]
  contexts: Sequence[int]
  texts: Sequence[Sequence[int]] | None = None

  def lengths(self, name: str) -> tuple[int, ...]:
    """Returns the draft lengths of a kind of draft.

    Trees have one. A chain has the lengths of `gammas` that its drafter can
    draft; all lengths beyond its longest are the same draft, so only the
    shortest of them is returned.
    """
    one = self.candidates[name]
    longest = _longest(one.drafter)
    if not one.is_chain:
      return (longest,)
    beyond = [gamma for gamma in self.gammas if gamma >= longest][:1]
    return tuple(gamma for gamma in self.gammas if gamma in beyond or (
        gamma < longest and costs.has_chain_of(one.drafter, gamma)))

  def drafter(self, name: str, gamma: int) -> sj.interfaces.Drafter:
    """Returns the drafter of a kind of draft, with a draft length."""
    one = self.candidates[name]
    return (one.drafter.with_gamma(gamma)
            if one.is_chain and gamma < _longest(one.drafter)
            else one.drafter)

  def decoder(self, name: str, gamma: int) -> sj.Decoder:
    """Returns the decoder of a draft.

    Chains are verified by block verification. Other rules for chains cost about
    the same (`benchmark.py` measures block_over_token).
    """
    one = self.candidates[name]
    return sj.Decoder(
        target=one.model, drafter=self.drafter(name, gamma),
        verifier=sj.verifiers.Block() if one.is_chain
        else one.strategies[0].verifier)

  def without_draft(self, drafter: sj.interfaces.Drafter
                    ) -> tuple[sj.Decoder, Any]:
    """Returns a decoder with a drafter without parameters, and its params."""
    return sj.Decoder(
        target=self.target.model, drafter=drafter,
        verifier=sj.verifiers.Block()), {
            "target": self.target.params, "drafter": ()}


def _longest(drafter: sj.interfaces.Drafter) -> int:
  """Returns the number of drafted tokens, without PaSS's look-ahead tokens."""
  return (drafter.count if isinstance(drafter, sj.drafters.PaSS)
          else drafter.num_nodes - 1)


class Measured:
  """Seconds of rounds, measured on this machine.

  Attributes:
    rounds: rounds of all drafts.
    confirmed: rounds `(name, gamma, batch, context)` for which `seconds`
      measures instead of interpolating.
  """

  extrapolates = False  # beyond the largest batch size

  def __init__(self, rounds: Rounds, stored: Stored):
    self.rounds, self._stored = rounds, stored
    self.confirmed = set()
    self._grids = {}

  def exact(self, name: str, gamma: int, batch: int, context: int
            ) -> tuple[float, float]:
    """Returns the measured seconds of a round without and with a draft."""
    decoder = self.rounds.decoder(name, gamma)
    params = self.rounds.candidates[name].params
    return tuple(self._stored(
        (decoder.target, decoder.drafter, batch, context,
         *costs.conditions(params)),
        lambda: costs.seconds_of_rounds(
            [self.rounds.without_draft(sj.drafters.Empty()), (decoder, params)],
            batch=batch, used=context, prompts=self.rounds.texts)))

  def seconds(self, name: str, gamma: int, batch: int, context: int
              ) -> tuple[float, float]:
    """Returns the seconds of a round without and with a draft."""
    place = name, gamma, batch, context
    return (self.exact if place in self.confirmed else self.interpolated)(
        *place)

  def interpolated(self, name: str, gamma: int, batch: int, context: int
                   ) -> tuple[float, float]:
    """Returns the interpolated seconds of a round without and with a draft.

    The ratio of both is interpolated, because they were timed in turn: their
    ratio varies less between measurements than either of them.
    """
    rounds = self.rounds

    def measured(*point):
      plain, seconds = self.exact(name, *point)
      return plain, seconds / plain

    if name not in self._grids:
      self._grids[name] = Grid.of(
          (_points(rounds.lengths(name)), _batch_points(rounds.batches),
           _points(rounds.contexts)), measured)
    plain, ratio = self._grids[name](gamma, batch, context)
    return plain, plain * ratio

  def is_between(self, name: str, gamma: int, batch: int, context: int
                 ) -> bool:
    """Returns True if a round is not a point of the interpolation."""
    return batch not in _batch_points(self.rounds.batches) or any(
        x not in _points(some) for x, some in (
            (gamma, self.rounds.lengths(name)),
            (context, self.rounds.contexts)))


class Compiled:
  """Seconds of rounds on a chip, from counts of the TPU compiler.

  The target's pass and the draft run one after the other, so each has its own
  bound, see `chips.Chip.seconds`. The counts of the target's pass come from a
  round whose draft is copied from the sequence. The compiler does not know how
  many experts a pass reads. This number is predicted from the experts that the
  tokens of `Rounds.texts` choose.
  """

  extrapolates = True

  def __init__(self, rounds: Rounds, stored: Stored, chip: chips.Chip):
    self.rounds, self._stored, self._chip = rounds, stored, chip
    self._grids = {}
    self._capacity = -(-(max(rounds.contexts) + 1) // 128) * 128

  def _counts(self, decoder: sj.Decoder, params: Any, batch: int):
    """Returns `[2, 2]`: bytes and operations, with no and all slots in use."""
    moved, cached, flops = self._stored(
        (decoder.target, decoder.drafter, batch, self._capacity, "v5e"),
        lambda: chips.counts(decoder, params, batch, self._capacity))
    return [[moved, flops], [moved + cached, flops]]

  def _over_slots(self, axes, function) -> Grid:
    grid = Grid.of(axes, function)
    return Grid([*grid.axes, (0, self._capacity)], grid.values)

  @functools.cached_property
  def _passes(self) -> Grid:
    """Counts of a target pass over nodes, batch size and slots in use."""
    rounds = self.rounds
    most = max(rounds.drafter(name, max(rounds.lengths(name))).num_nodes
               for name in rounds.candidates)

    def counts(nodes, batch):
      drafter = (sj.drafters.Empty() if nodes == 1 else
                 sj.strategies.prompt_lookup(nodes - 1).drafter)
      return self._counts(*rounds.without_draft(drafter), batch)

    return self._over_slots(((1, most), _ends(rounds.batches)), counts)

  @functools.cached_property
  def _frequencies(self) -> np.ndarray | None:
    """Share of tokens that choose each expert, `[L, E]`. None: no experts."""
    target, texts = self.rounds.target, self.rounds.texts
    if texts is None:
      return None
    routes = [target.model.routes(target.params, np.array([text]))[:, 0]
              for text in texts]
    return sj.analysis.router_frequencies(
        np.concatenate(routes, axis=1), target.model.config.experts.count)

  def _experts(self, nodes: int, batch: int) -> np.ndarray:
    """Returns the bytes and operations of the experts of a target pass."""
    if self._frequencies is None:
      return np.zeros(2)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, np.float16),
        self.rounds.target.params)
    distinct = sj.analysis.expected_experts(self._frequencies, nodes * batch)
    moved = sj.analysis.pass_bytes(shapes, distinct) - (
        sj.analysis.pass_bytes(shapes))
    # The kernel multiplies every expert with all tokens, and each multiply-add
    # of a 2-byte weight is two operations.
    return np.array([moved, moved * nodes * batch])

  def _grid(self, name: str) -> Grid:
    """Counts of a whole round over draft length, batch size and slots."""
    if name not in self._grids:
      self._grids[name] = self._over_slots(
          (_ends(self.rounds.lengths(name)), _ends(self.rounds.batches)),
          lambda gamma, batch: self._counts(
              self.rounds.decoder(name, gamma),
              self.rounds.candidates[name].params, batch))
    return self._grids[name]

  def seconds(self, name: str, gamma: int, batch: int, context: int
              ) -> tuple[float, float]:
    """Returns the seconds of a round without and with a draft."""
    nodes = self.rounds.drafter(name, gamma).num_nodes
    one, verified = (self._passes(n, batch, context) for n in (1, nodes))
    draft = np.maximum(self._grid(name)(gamma, batch, context) - verified, 0)
    seconds = self._chip.seconds
    return (seconds(one + self._experts(1, batch)),
            seconds(verified + self._experts(nodes, batch)) + seconds(draft))
