"""Finds the reason why the drafts of heads are bad: a conformance check.

If the drafts of well-trained heads are often rejected, the usual reason is that
decoding computes the heads differently from training. Examples are a hidden
state of another layer, another RoPE base, or tensors in another order. `check`
scores the heads on text that the target generated. It then scores `Reading`s,
each with one known difference corrected. A difference is named only if its
correction restores the heads. No list of differences is complete, so `check`
also compares the heads with their record of training: "something differs" if
they are less accurate than in training and no known difference explains it.
The check also names tensors that are constant or not used. `check_state` finds
drafters whose state after some rounds differs from the state after reading the
same tokens at once.

The score is the block efficiency at temperature 1, if a draft starts at every
position of the text (see `evaluation.head_accuracy`).
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
import re
from typing import Any
from typing import NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax import analysis
from specjax import methods
from specjax.methods import Heads
from specjax.models import Pretrained
from specjax.models import Transformer
from specjax.models.configuration import FINAL
from specjax.models.configuration import TransformerConfig
from specjax.types import ModelOutput

_LEAST = 0.02  # smallest reported relative gain; its interval must be above 0
_BELOW = 0.6  # an accuracy below this share of that in training is a fault
_LOW = 0.2  # heads without a record and this acceptance rate are suspicious
_EQUAL = 0.01  # relative gain that does not tell two differences apart
_DIFFERENT = 0.01  # total variation of drafts that rounding cannot explain
_STEPS = (-1, 1, -2, 2)  # layers by which hidden states are moved
_FEW = 4  # rows on which all differences are tried
_STARTS = 48  # starts per row, if positions are drawn
_BASES = (10_000.0, 500_000.0, 1_000_000.0)  # usual bases of RoPE
_LAST = ("medusa", "hydra", "blockwise")  # kinds that read only FINAL
_TOGGLES = {
    "feed_normed": "the output is fed back on the wrong side of the norm",
    "norm_before_residual": "the residual stream is on the wrong side of the "
                            "norm",
    "from_anchor": "the slot of the anchor counts as a prediction, or the "
                   "reverse"}
_SHARED = ("rope_scaling", "rope_fraction", "activation", "query_scale",
           "logit_softcap", "attention_softcap", "norm_epsilon")

Flat = dict[tuple[str, ...], Any]  # tensors by their path


class Finding(NamedTuple):
  """A probable fault of a drafter.

  Attributes:
    fault: short name of the fault.
    evidence: sentence with the measurement that shows the fault.
  """

  fault: str
  evidence: str


class Result(NamedTuple):
  """Result of a check.

  Attributes:
    summary: sentences with the accuracy of the heads and the number of
      differences that were tried.
    findings: probable faults.
  """

  summary: str
  findings: list[Finding]


class Reading(NamedTuple):
  """One interpretation of heads.

  Attributes:
    heads: configuration of the heads.
    params: parameters of the heads.
    target: parameters of the target that the heads read.
    taps: names of the target's hidden states that the heads read. () for heads
      that run layers of the target, such as those of PaSS.
    delay: number of positions by which the hidden states are too old.
  """

  heads: Heads
  params: Any
  target: Any
  taps: tuple[int | str, ...]
  delay: int = 0

  @classmethod
  def of(cls, heads: Heads, params: Any, target: Pretrained) -> "Reading":
    """Returns the interpretation with which the heads are decoded."""
    taps = getattr(heads, "taps", (FINAL,) if heads.kind in _LAST else ())
    if not taps:
      return cls(heads, params, target.params, ())
    # The LM head is separate, so that a change of the embedding leaves it.
    return cls(heads, params, {
        "embedding": target.params["embedding"],
        "head": methods.lm_head(target.params),
        "final_norm": target.params["final_norm"]}, tuple(taps))


class Score(NamedTuple):
  """Score of a reading on R rows, with K draft positions and P starts per row.

  Attributes:
    accepted: `[R]`, sum of the accepted tokens over all starts.
    starts: `[R]`, number of starts.
    rate: acceptance rate of the first draft token.
    right: `[R, K]`, number of starts at which the most likely draft token is
      the target's most likely token.
    first: `[R, P]`, most likely first draft token.
    wanted: `[R, P]`, most likely token of the target at its position.
  """

  accepted: np.ndarray
  starts: np.ndarray
  rate: float
  right: np.ndarray
  first: np.ndarray
  wanted: np.ndarray

  def gain(self, other: "Score") -> analysis.Estimate:
    """Returns the relative gain in block efficiency over another score."""
    return analysis.relative_gain(
        self.accepted, self.starts, other.accepted, other.starts)

  def accuracy(self) -> list[analysis.Estimate]:
    """Returns the share of `right` at every draft position."""
    return [analysis.estimate(lambda right, starts: right / starts, right,
                              self.starts, least=0, most=1)
            for right in self.right.T]


@dataclasses.dataclass(frozen=True)
class _Stored(Transformer):
  """Target that returns stored hidden states, so that no layer is computed.

  `params["states"]` `[N, B, S, D]` are the states, `params["at"]` the indices
  of the states that replace those in `taps`.
  """

  taps: tuple[int | str, ...] = ()

  def __call__(self, params, tokens, *args, **options):
    del tokens, args, options
    at = dict(zip(self.taps, params["at"]))
    return ModelOutput(
        logits=params["logits"], cache=None, hidden=jnp.concatenate(
            [params["states"][at.get(name, 0)]
             for name in self.config.features or (FINAL,)], axis=-1))

  def logits_at(self, params, output, at):
    return jnp.take_along_axis(params["logits"], at[..., None], axis=1)


class Scorer:
  """Function from a `Reading` to its `Score`.

  Parameters, hidden states and the base of RoPE are arguments of one program.
  Only a reading with another configuration of the heads compiles another one.
  """

  def __init__(self, target: Pretrained, rows: np.ndarray,
               taps: Iterable[int | str]):
    """Lets the target read the rows.

    Args:
      target: target of the heads.
      rows: `[R, S + 1]`, prompts with the tokens that the target generated.
      taps: hidden states that readings contain, or their neighbours.
    """
    self.target, self.rows = target, np.asarray(rows, np.int32)
    layers = target.model.config.layers
    near = {_layer(tap, layers) + step for tap in taps for step in (0, *_STEPS)}
    self.names = (*sorted({*near, layers} & {*range(layers + 1)}), FINAL)
    model = dataclasses.replace(target.model, config=dataclasses.replace(
        target.model.config, features=self.names))

    @jax.jit
    def read(params, row):
      out = model(params, row)
      states = jnp.split(out.hidden, len(self.names), axis=-1)
      return jnp.stack(states), out.logits

    self.read = [read(target.params, row[None, :-1]) for row in self.rows]
    self.programs = {}

  def __call__(self, reading: Reading, count: int | None = None) -> Score:
    """Scores a reading on all rows, or on the first `count` rows."""
    # Readings with other arguments share a program, so the fields of the heads
    # that are arguments get the same value in all readings.
    heads, base, count_taps = reading.heads, None, len(reading.taps)
    if hasattr(heads, "taps"):
      heads = dataclasses.replace(heads, taps=self.names[:count_taps])
    if hasattr(heads, "rope_theta") and not heads.rope_scaling:
      base = heads.rope_theta
      heads = dataclasses.replace(heads, rope_theta=_BASES[0])
    if heads not in self.programs:
      self.programs[heads] = self._program(heads, count_taps)
    at = np.array([self.names.index(tap) for tap in reading.taps], np.int32)
    overlap, first, wanted, right = (
        np.concatenate(x, axis=-2) for x in zip(*(
            self.programs[heads](reading.params, reading.target, at,
                                 reading.delay, base, *read, row[None])
            for read, row in zip(self.read[:count], self.rows))))
    accepted = np.cumprod(overlap, axis=0, dtype=np.float64).sum(0)
    return Score(accepted.sum(-1), np.full(len(first), first.shape[1]),
                 float(overlap[0].mean()), right.sum(-1).T, first, wanted)

  def _program(self, heads: Heads, taps: int) -> Callable:
    """Returns the function that scores one row. The heads read `taps` states.
    """
    model = self.target.model
    if taps:
      model = _Stored(config=model.config,
                      taps=getattr(heads, "taps", (FINAL,)))

    @jax.jit
    def score(params, target, at, delay, base, states, logits, row):
      own = heads if base is None else dataclasses.replace(
          heads, rope_theta=base)
      if taps:
        target = {**target, "at": at, "logits": logits,
                  "states": jnp.roll(states, delay, axis=2)}

      def outcome(k, drafted, positions):
        p = jnp.take_along_axis(logits, (positions + k)[..., None], axis=1)
        p, q = p.astype(jnp.float32), drafted.astype(jnp.float32)
        first, wanted = jnp.argmax(q, -1), jnp.argmax(p, -1)
        overlap = jnp.minimum(jax.nn.softmax(p), jax.nn.softmax(q)).sum(-1)
        return overlap, first, wanted, first == wanted

      objective = methods.of(heads).measure(model, own)
      for name in ("anchors", "cuts"):  # of objectives that draw positions
        if hasattr(objective, name):
          objective = dataclasses.replace(objective, **{name: _STARTS})
      overlap, first, wanted, right = objective.score(
          {"target": target, "drafter": params}, row, jax.random.key(0),
          outcome)
      return overlap, first[0], wanted[0], right

    return score


def differences(reading: Reading, config: TransformerConfig
                ) -> Iterator[tuple[str, Reading]]:
  """Yields pairs of a known fault and the reading without this fault.

  Args:
    reading: interpretation with which the heads are decoded.
    config: configuration of the target.
  """
  yield from _of_taps(reading, config.layers)
  yield from _of_configuration(reading, config)
  yield from _of_target(reading, config)
  flat = traverse_util.flatten_dict(reading.params)
  for fault, changed in itertools.chain(
      _of_tensors(flat, reading.heads), _of_pairs(flat),
      _of_orders(flat, reading.heads.num_forecasts)):
    if changed:
      yield fault, reading._replace(
          params=traverse_util.unflatten_dict({**flat, **changed}))


def _times(count: int, noun: str) -> str:
  return f"one {noun}" if count == 1 else f"{count} {noun}s"


def _layer(tap: int | str, layers: int) -> int:
  return layers if tap == FINAL else tap


def _of_taps(reading: Reading, layers: int) -> Iterator[tuple[str, Reading]]:
  """Yields readings with other hidden states."""
  taps, found = reading.taps, {}
  if not taps:
    return
  for step in _STEPS:
    where = (f"{_times(abs(step), 'layer')} too "
             f"{'early' if step > 0 else 'late'}")
    moved = [_layer(tap, layers) + step for tap in taps]
    found.setdefault(tuple(moved), f"hidden states are read {where}")
    for i, tap in enumerate(moved):
      found.setdefault((*taps[:i], tap, *taps[i + 1:]),
                       f"hidden state {taps[i]} is read {where}")
  swapped = {FINAL: layers, layers: FINAL}
  side = "after" if FINAL in taps else "before"
  found.setdefault(tuple(swapped.get(tap, tap) for tap in taps),
                   f"the last hidden state is read {side} the target's norm")
  found.setdefault((*taps[:-1], FINAL), f"hidden state {taps[-1]} is read "
                   "instead of the one after the target's norm")
  for order in _orders(len(taps)):
    found.setdefault(tuple(taps[i] for i in order), "hidden states are joined "
                     f"in the order {taps}")
  for changed, fault in found.items():
    if changed != taps and all(
        tap == FINAL or 0 <= tap <= layers for tap in changed):
      yield fault, reading._replace(taps=changed)
  yield ("hidden states are read one position too late",
         reading._replace(delay=1))


def _of_configuration(reading: Reading, config: TransformerConfig
                      ) -> Iterator[tuple[str, Reading]]:
  """Yields readings with another configuration of the heads."""
  heads, changes = reading.heads, []
  if hasattr(heads, "rope_theta"):
    changes = [(f"the RoPE base is {heads.rope_theta:g}, and {base:g} is "
                "better", {"rope_theta": base})
               for base in dict.fromkeys((config.rope_theta, *_BASES))]
  changes += [(fault, {name: not getattr(heads, name)})
              for name, fault in _TOGGLES.items() if hasattr(heads, name)]
  changes += [(f"{name} is {getattr(heads, name)}, and the target's value "
               f"{getattr(config, name)} is better",
               {name: getattr(config, name)})
              for name in _SHARED if hasattr(heads, name)]
  for fault, change in changes:
    try:
      changed = dataclasses.replace(heads, **change)
    except ValueError:  # the heads exclude this value
      continue
    if changed != heads:
      yield fault, reading._replace(heads=changed)


def _of_target(reading: Reading, config: TransformerConfig
               ) -> Iterator[tuple[str, Reading]]:
  """Yields readings with parameters of the target, or scaled embeddings."""
  heads, params, target = reading.heads, reading.params, reading.target
  for name in ("embedding", "final_norm", "head"):
    own = params.get(name)
    if own is None:
      continue
    other = target[name] if name != "head" else heads.columns(target)
    if jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, other):
      yield (f"the heads do not use the target's {name}",
             reading._replace(params={**params, name: other}))
  scale = getattr(heads, "embedding_scale", None)
  if scale is not None:
    factor = config.width**0.5 if scale == 1 else 1 / scale
    yield (f"embeddings are multiplied by {scale:g} instead of "
           f"{scale * factor:g}", reading._replace(target={
               **target, "embedding": target["embedding"] * factor}))


def _unnumbered(path: tuple[str, ...]) -> str:
  """Returns the name of a tensor without the numbers of layers."""
  return re.sub(r"_\d+", "", "/".join(path))


def _orders(count: int) -> list[tuple[int, ...]]:
  """Returns all orders of up to 4 items; of more, rolls, swaps, the reverse."""
  same = tuple(range(count))
  if count <= 4:
    return list(itertools.permutations(same))[1:]
  return [*(same[i:] + same[:i] for i in range(1, count)), same[::-1],
          *(tuple({i: j, j: i}.get(x, x) for x in same)
            for i, j in itertools.combinations(same, 2))]


def _of_tensors(flat: Flat, heads: Heads) -> Iterator[tuple[str, Flat]]:
  """Yields tensors with entries in another order, or of another scale.

  A change is made in all tensors whose name has the same end.
  """
  def edited(end: str, edit: Callable) -> Flat:
    return {path: edit(np.asarray(x)) for path, x in flat.items()
            if "/".join(path).endswith(end)}

  def queries(edit: Callable, keys: int = 0) -> Flat:
    """Changes `[D, K, G (+ 1), H]`, the queries (and keys) of all layers."""
    split = keys - 2
    return edited("qkv/kernel", lambda x: np.concatenate(
        [edit(x[:, :, :split]), x[:, :, split:]], axis=2))

  attends = getattr(heads, "fusion", "") == "attention"
  yield ("token embedding and feature are joined in the wrong order",
         edited("qkv/kernel" if attends else "fusion/kernel",
                lambda x: np.concatenate(np.split(x, 2)[::-1])))
  yield ("gate and up projections are swapped",
         edited("gate_up/kernel", lambda x: x[:, ::-1]))
  yield ("keys and values are swapped", edited(
      "qkv/kernel", lambda x: np.concatenate(
          [x[:, :, :-2], x[:, :, :-3:-1]], axis=2)))
  for grouped in (
      lambda x: x.reshape(
          len(x), x.shape[2], x.shape[1], -1).swapaxes(1, 2),
      lambda x: x.swapaxes(1, 2).reshape(x.shape)):
    yield "query heads are in another order", queries(grouped)
  for turned in (
      lambda x: x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2),
      lambda x: x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2)):
    yield ("queries and keys have the order of another RoPE (interleaved "
           "pairs against halves)", queries(
               lambda x, turned=turned: turned(x).reshape(x.shape), keys=1))
  sign = -1 if getattr(heads, "norm_plus_one", False) else 1
  yield ("norms multiply by the scale instead of 1 + scale, or the reverse",
         edited("scale", lambda x: x + x.dtype.type(sign)))
  square = {}  # {name without numbers: paths}
  for path, x in flat.items():
    if x.ndim > 1 and x.shape[-1] == x.shape[-2]:
      square.setdefault(_unnumbered(path), []).append(path)
  for name, paths in square.items():
    yield f"{name} is transposed", {
        path: np.asarray(flat[path]).swapaxes(-1, -2) for path in paths}


def _of_pairs(flat: Flat) -> Iterator[tuple[str, Flat]]:
  """Yields pairs of swapped tensors of equal shape.

  Kernel and bias of a linear layer, and scale and bias of a norm, are swapped
  together. A swap is made in all layers that have both.
  """
  units = {}  # {path of a unit: {rest of the path: path}}
  for path in flat:
    unit = path[:-1] if path[-1] in ("kernel", "scale", "bias") else path
    units.setdefault(unit or path, {})[path[len(unit or path):]] = path
  number = lambda unit: [int(x) for x in re.findall(r"_(\d+)", "/".join(unit))]
  groups = {}  # {name: units of all layers in order}
  for unit in sorted(units, key=number):
    groups.setdefault(_unnumbered(unit), []).append(units[unit])
  form = lambda group: [{end: flat[path].shape for end, path in unit.items()}
                        for unit in group]
  for (a, one), (b, other) in itertools.combinations(groups.items(), 2):
    if form(one) == form(other):
      pairs = [(x[end], y[end]) for x, y in zip(one, other) for end in x]
      yield f"{a} and {b} are swapped", {
          path: flat[source] for x, y in pairs
          for path, source in ((x, y), (y, x))}


def _of_orders(flat: Flat, count: int) -> Iterator[tuple[str, Flat]]:
  """Yields heads, modules or layers in another order.

  They are stacked along the first axis of all tensors, or numbered.
  """
  if count > 1 and all(x.ndim > 1 and len(x) == count for x in flat.values()):
    for order in _orders(count):
      step = order[0]
      fault = "the heads are in another order"
      if order == tuple((i + step) % count for i in range(count)):
        late = count - step
        fault = "every head predicts a token that is " + (
            f"{_times(step, 'position')} too early" if step <= late else
            f"{_times(late, 'position')} too late")
      yield fault, {path: np.asarray(x)[list(order)]
                    for path, x in flat.items()}
  stems = {}  # {name without number: {number: {rest of the path: path}}}
  for path in flat:
    name = re.fullmatch(r"(.*)_(\d+)", path[0])
    if name:
      stems.setdefault(name[1], {}).setdefault(int(name[2]), {})[
          path[1:]] = path
  sizes = {}  # {number of layers: names of their parts}
  for stem, parts in stems.items():
    forms = [{end: flat[path].shape for end, path in part.items()}
             for part in parts.values()]
    if all(form == forms[0] for form in forms):
      sizes.setdefault(len(parts), []).append(stem)
  for size, names in sizes.items():
    for order in _orders(size):
      yield f"{', '.join(names)}: the layers are in another order", {
          path: flat[stems[stem][order[i]][end]]
          for stem in names for i in range(size)
          for end, path in stems[stem][i].items()}


def check(heads: Heads, params: Any, score: Scorer,
          recorded: Sequence[float] | None = None) -> Result:
  """Returns the probable faults of heads.

  Args:
    heads: loaded heads.
    params: parameters of the heads.
    score: function of text that the target generated at temperature 0. The
      heads' accuracy on this text is closest to that in training.
    recorded: for every draft position, the share of positions of held-out text
      at which the most likely draft token was the target's, measured in
      training. None means that there is no record.
  """
  recorded = recorded and recorded[:heads.num_forecasts]
  start = Reading.of(heads, params, score.target)
  base, flat = score(start), traverse_util.flatten_dict(params)
  is_low = _is_low(base, recorded)
  tried = list(differences(start, score.target.model.config))
  # Few rows suffice to rule out most differences.
  likely = [(fault, score(reading)) for fault, reading in tried
            if score(reading, _FEW).accepted.sum() > base.accepted[:_FEW].sum()]
  least = 0 if is_low and recorded is not None else _LEAST
  restored = sorted(
      ((fault, other) for fault, other in likely
       if _is_clear(other.gain(base), least) and not _is_low(other, recorded)),
      key=lambda x: -x[1].accepted.sum())
  found = _constant(flat, has_norms=is_low or recorded is None)
  if found and recorded is None:
    restored = []  # a change that repairs a part of the damage explains nothing
  found += _unused(flat, start, score)
  if restored:
    best = restored[0][1]
    names = [fault for fault, other in restored
             if not _is_clear(best.gain(other), _EQUAL)]
    found.append(Finding(
        ", or ".join(dict.fromkeys(names)),
        f"without this difference, the heads have {best.gain(base).value:+.1%} "
        "block efficiency on the target's own text"))
  elif getattr(heads, "ids", None) is not None:
    found += _vocabulary(base)
  found += _precision(heads, params, score, base)
  here = ", ".join(f"{x:.2f}".rpartition(" ")[0] for x in base.accuracy())
  if recorded is None:
    measured = f"{base.rate:.0%} of the first draft tokens are accepted"
    summary = (f"{measured}. The heads have no record of their accuracy in "
               "training, so this may be less than in training")
  else:
    before = ", ".join(f"{x:.2f}" for x in recorded)
    measured = f"accuracy by draft position in training {before}, here {here}"
    summary = (f"{measured[0].upper()}{measured[1:]}. It depends on the text; "
               f"only an accuracy that is clearly below {_BELOW:.0%} of that "
               "in training is a fault")
  tries = f"{len(tried)} known differences"
  if is_low and not restored:
    found += _same_head(start)
    found.append(Finding("something differs", (
        f"{measured}; none of the {tries} explains it. Another possible reason "
        "is text unlike that of the training")))
  ends = "one restores the heads" if restored else "none helps"
  return Result(
      f"{summary}. {tries} from training were tried, and {ends}", found)


def _is_low(score: Score, recorded: Sequence[float] | None) -> bool:
  """Returns True if heads are clearly less accurate than expected."""
  if recorded is None:
    return score.rate < _LOW
  before = np.array(recorded)
  mean = analysis.estimate(
      lambda right, starts: right / starts, score.right.sum(1),
      score.starts * len(before), least=0, most=1)
  return any(found.high < _BELOW * expected for found, expected in (
      (score.accuracy()[0], before[0]), (mean, before.mean())))


def _constant(flat: Flat, has_norms: bool) -> list[Finding]:
  """Returns findings for constant tensors and for tensors with NaN or inf.

  Scales of norms are only included if `has_norms` is True, because training may
  leave them constant.
  """
  found = []
  for path, x in flat.items():
    x, name = np.asarray(x, np.float32), "/".join(path)
    if not np.isfinite(x).all():
      found.append(Finding("a tensor is not finite", f"{name} has NaN or inf"))
    elif x.size > 1 and x.min() == x.max() and (
        x.ndim > 1 or has_norms and path[-1] == "scale"):
      found.append(Finding(
          "a tensor is constant",
          f"all entries of {name} {x.shape} are {x.min() + 0.0:g}, so it was "
          "probably not loaded"))
  return found


def _unused(flat: Flat, start: Reading, score: Scorer) -> list[Finding]:
  """Returns findings for tensors whose change does not change the predictions.

  The confidence head is left out, because it predicts no token.
  """
  random, before, found = np.random.default_rng(0), score(start, 1), []
  for path, x in flat.items():
    if path[0] == "confidence":
      continue
    noise = (1 + np.abs(np.asarray(x, np.float32)).mean()) * (
        random.standard_normal(x.shape, np.float32))
    after = score(start._replace(params=traverse_util.unflatten_dict(
        {**flat, path: np.asarray(x + noise, x.dtype)})), 1)
    if np.array_equal(before.accepted, after.accepted):
      found.append(Finding("a tensor is not used",
                           f"no prediction depends on {'/'.join(path)}"))
  return found


def _same_head(start: Reading) -> list[Finding]:
  """Returns a finding if the heads' own LM head is a copy of the target's."""
  own = start.params.get("head")
  if own is None or not np.array_equal(
      own, start.heads.columns(start.target)):
    return []
  return [Finding("the heads have the LM head of the target",
                  "their own LM head equals it, so it was probably not loaded")]


def _precision(heads: Heads, params: Any, score: Scorer, base: Score
               ) -> list[Finding]:
  """Returns a finding if the heads are better in float32."""
  target = score.target
  leaves = jax.tree.leaves((params, target.params))
  if all(x.dtype == jnp.float32 for x in leaves):
    return []
  wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
  target = dataclasses.replace(target, params=wide(target.params))
  gain = _scored(heads, wide(params), target, score.rows).gain(base)
  if not _is_clear(gain):
    return []
  return [Finding("the precision is too low", "in float32, the heads have "
                  f"{gain.value:+.1%} block efficiency")]


def _scored(heads: Heads, params: Any, target: Pretrained, rows: np.ndarray
            ) -> Score:
  """Returns the score of heads as they are decoded."""
  start = Reading.of(heads, params, target)
  return Scorer(target, rows, start.taps)(start)


def _vocabulary(base: Score) -> list[Finding]:
  """Returns a finding if another map from draft ids to target ids is better.

  The other map is estimated. A draft token maps to the target's most frequent
  token at those positions where the draft token is the first head's most likely
  one. The estimate for a position does not use the position itself.
  """
  pairs = list(zip(base.first.ravel().tolist(), base.wanted.ravel().tolist()))
  counts = {}
  for drafted, wanted in pairs:
    row = counts.setdefault(drafted, {})
    row[wanted] = row.get(wanted, 0) + 1
  usual = max(np.unique(base.wanted, return_counts=True)[1])
  as_is = mapped = 0
  for drafted, wanted in pairs:
    others = dict(counts[drafted])
    others[wanted] -= 1
    best = max(others, key=others.get)
    as_is += drafted == wanted
    mapped += others[best] > 0 and best == wanted
  # A map of all draft tokens to the most frequent token shows no relation.
  if mapped <= max(2 * as_is, 2 * usual, _LOW * len(pairs)):
    return []
  return [Finding(
      "the map from draft tokens to tokens is wrong",
      "the most likely token of the first head is the target's at "
      f"{as_is / len(pairs):.0%} of the positions, and with a map estimated "
      f"from this text at {mapped / len(pairs):.0%}")]


def check_format(heads: Heads, params: Any, score: Scorer, other: np.ndarray,
                 chat: bool) -> list[Finding]:
  """Returns a finding if the heads fit another format of the prompts better.

  Args:
    heads: loaded heads.
    params: parameters of the heads.
    score: function of text that the target generated.
    other: `[R, S + 1]`, text that the target generated after the same prompts
      with the other value of `chat`.
    chat: if True, the prompts of `score` have the target's chat template.
  """
  gain = _scored(heads, params, score.target, other).gain(
      score(Reading.of(heads, params, score.target)))
  if not _is_clear(gain):
    return []
  have, change = (("have a", "without it") if chat else
                  ("lack the", "with it"))
  return [Finding(
      f"the prompts {have} chat template",
      f"{change}, the heads have {gain.value:+.1%} block efficiency; they were "
      f"probably trained {change}")]


def _is_clear(gain: analysis.Estimate, least: float = _LEAST) -> bool:
  """Returns True if a gain is large and its interval is above 0."""
  return gain.value > least and gain.low > 0


def check_state(decoder: sj.Decoder, params: Any, prompts: list[list[int]],
                rounds: int = 4) -> list[Finding]:
  """Returns a finding if a drafter's state after some rounds is wrong.

  The draft that follows must be that of a drafter that reads the same tokens
  at once, see `testing.state_difference`.

  Args:
    decoder: decoder of a chain or tree drafter.
    params: `{"target": ..., "drafter": ...}`.
    prompts: token ids. The context must have room for `rounds` + 2 drafts.
    rounds: number of rounds before the comparison, even.
  """
  found = sj.testing.state_difference(decoder, params, prompts, rounds=rounds)
  # The mean over the rows of every node, because rounding in bfloat16 can make
  # a single row differ.
  rows = np.maximum((~np.isnan(found.distances)).sum(0), 1)
  apart = float((np.nan_to_num(found.distances).sum(0) / rows).max())
  if apart < _DIFFERENT:
    return []
  return [Finding(
      "the state after rejected drafts is wrong",
      f"after {rounds} rounds the draft distributions differ from those of a "
      f"drafter that reads the same tokens at once, by {apart:.2f} in total "
      "variation")]
