"""Finds the reason why the drafts of heads are bad: a conformance check.

If the drafts of well-trained heads are often rejected, the usual reason is that
decoding computes the heads differently from training. Examples are a hidden
state of another layer, another RoPE base, or tensors in another order. `check`
scores the heads on text that the target generated. It then scores variants, in
each of which one possible difference is corrected. If the score of a variant is
clearly higher, the report names the difference. The report also names tensors
that are constant or not used. `check_state` finds drafters whose state after
some rounds differs from the state after reading the same tokens at once.

The score is the block efficiency at temperature 1, if a draft starts at every
position of the text (`evaluation.head_accuracy`).
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

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
from specjax.training import evaluation

_LEAST = 0.05  # smallest reported relative gain; its interval must be above 0
_DIFFERENT = 0.01  # total variation of drafts that rounding cannot explain
_SCORE = "sampled_block_efficiency"
_BASES = (10_000.0, 500_000.0, 1_000_000.0)  # usual bases of RoPE


class Finding(NamedTuple):
  """A probable fault of a drafter.

  Attributes:
    fault: short name of the fault.
    evidence: sentence with the measurement that shows the fault.
  """

  fault: str
  evidence: str


class Variant(NamedTuple):
  """Heads with one possible difference corrected.

  Attributes:
    fault: name of the fault of the original heads, if this variant is better.
    heads: configuration of the heads.
    params: parameters of the heads.
  """

  fault: str
  heads: Heads
  params: Any


def variants(heads: Heads, params: Any, target: Pretrained
             ) -> Iterator[Variant]:
  """Yields variants of heads, each with one possible difference corrected.

  Args:
    heads: loaded heads.
    params: parameters of the heads.
    target: target of the heads.
  """
  for fault, change in _changes(heads, target.model.config):
    try:
      yield Variant(fault, dataclasses.replace(heads, **change), params)
    except ValueError:  # the heads exclude this value
      pass
  for fault, changed in _permuted(heads, params):
    yield Variant(fault, heads, changed)


def _changes(heads: Heads, config: Any
             ) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields pairs of a fault and a change of the heads that corrects it."""
  has = lambda name: hasattr(heads, name)
  if has("taps"):
    whole = all(isinstance(tap, int) for tap in heads.taps)
    for step, where in (1, "early"), (-1, "late"):
      if whole:
        yield (f"hidden states are read one layer too {where}",
               {"taps": tuple(tap + step for tap in heads.taps)})
    swapped = {FINAL: config.layers, config.layers: FINAL}
    taps = tuple(swapped.get(tap, tap) for tap in heads.taps)
    if taps != heads.taps:
      side = "after" if FINAL in heads.taps else "before"
      yield (f"the last hidden state is read {side} the target's norm",
             {"taps": taps})
    if len(heads.taps) > 1:
      yield ("hidden states are joined in the reverse order",
             {"taps": heads.taps[::-1]})
  if has("rope_theta"):
    for base in dict.fromkeys((config.rope_theta, *_BASES)):
      if base != heads.rope_theta:
        yield (f"the RoPE base is {heads.rope_theta:g}, and {base:g} is better",
               {"rope_theta": base})
  for name, fault in (
      ("norm_plus_one", "norms multiply by the scale instead of 1 + scale, or "
       "the reverse"),
      ("feed_normed", "the output is fed back on the wrong side of the norm"),
      ("norm_before_residual", "the residual stream is on the wrong side of "
       "the norm"),
      ("from_anchor", "the slot of the anchor counts as a prediction, or the "
       "reverse")):
    if has(name):
      yield fault, {name: not getattr(heads, name)}
  if has("embedding_scale"):
    scale = 1.0 if heads.embedding_scale != 1 else config.width**0.5
    yield (f"embeddings are multiplied by {heads.embedding_scale:g} instead of "
           f"{scale:g}", {"embedding_scale": scale})


def _permuted(heads: Heads, params: Any) -> Iterator[tuple[str, Any]]:
  """Yields pairs of a fault and parameters whose order corrects it."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  name = lambda path: jax.tree_util.keystr(path)
  fused = [path for path, x in leaves
           if "fusion" in name(path) and x.ndim == 2 or (
               getattr(heads, "fusion", None) == "attention"
               and "['qkv']['kernel']" in name(path))]
  if fused:
    halves = lambda x: jnp.concatenate(jnp.split(x, 2)[::-1])
    yield ("token embedding and feature are joined in the wrong order",
           _mapped(params, fused, halves))
  rotated = [path for path, x in leaves
             if "['qkv']['kernel']" in name(path) and x.ndim == 4]
  if rotated:
    half = np.arange(params_at(params, rotated[0]).shape[-1]).reshape(2, -1)
    pairs = half.T.ravel()
    for order in pairs, np.argsort(pairs):
      yield ("queries and keys have the order of another RoPE (interleaved "
             "pairs against halves)", _mapped(
                 params, rotated, lambda x, order=order: x.at[:, :, :-1].set(
                     x[:, :, :-1][..., order])))
  stacked = [path for path, x in leaves
             if x.ndim > 1 and len(x) == heads.num_forecasts]
  if stacked and len(stacked) == len(leaves) and heads.num_forecasts > 1:
    for step, where in (1, "early"), (-1, "late"):
      yield (f"every head predicts a token that is one position too {where}",
             _mapped(params, stacked, lambda x, step=step: jnp.roll(
                 x, -step, axis=0)))


def params_at(params: Any, path: Any) -> jax.Array:
  """Returns the leaf at a key path of `jax.tree_util`."""
  for key in path:
    params = params[key.key]
  return params


def _mapped(params: Any, paths: Sequence[Any], function: Any) -> Any:
  names = set(map(jax.tree_util.keystr, paths))
  return jax.tree_util.tree_map_with_path(
      lambda path, x: function(x)
      if jax.tree_util.keystr(path) in names else x, params)


def check(heads: Heads, params: Any, target: Pretrained, rows: np.ndarray
          ) -> list[Finding]:
  """Returns the probable faults of heads.

  Constant and unused tensors are first. Faults of the configuration follow,
  those with the largest gain first.

  Args:
    heads: loaded heads.
    params: parameters of the heads.
    target: target of the heads.
    rows: `[R, S + 1]`, prompts with the tokens that the target generated.
  """
  rows = np.asarray(rows, np.int32)
  found = [*_constant(params), *_unused(heads, params, target, rows)]
  base = _score(heads, params, target, rows)
  better = []
  for variant in variants(heads, params, target):
    try:
      score = _score(variant.heads, variant.params, target, rows)
    except ValueError:  # the target lacks this hidden state
      continue
    gain = analysis.relative_gain(*score, *base)
    if _is_clear(gain):
      better.append((gain.value, Finding(
          variant.fault, f"without this difference, the heads have {gain:+.1%} "
          "block efficiency on the target's own text")))
  found += [finding for _, finding in sorted(better, key=lambda x: -x[0])]
  found += _precision(heads, params, target, rows, base)
  return found + _vocabulary(heads, params, target, rows)


def _score(heads: Heads, params: Any, target: Pretrained, rows: np.ndarray
           ) -> tuple[np.ndarray, np.ndarray]:
  """Returns the accepted tokens and the number of drafts of every row."""
  measure = _measure(heads, target.model, rows.shape, rows.tobytes())
  found = measure({"target": target.params, "drafter": params},
                  by_row=True)["by_row"]
  return found[_SCORE], found["positions"]


@functools.lru_cache(maxsize=32)  # variants of the parameters share a program
def _measure(heads: Heads, model: Transformer, shape: tuple[int, ...],
             rows: bytes) -> evaluation.Measure:
  """Returns a function from parameters to the accuracy of heads on `rows`."""
  return evaluation.head_accuracy(
      methods.of(heads).measure(model, heads),
      np.frombuffer(rows, np.int32).reshape(shape))


def _constant(params: Any) -> list[Finding]:
  """Returns findings for constant matrices and for tensors with NaN or inf."""
  found = []
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    x, name = np.asarray(x, np.float32), jax.tree_util.keystr(path)
    if not np.isfinite(x).all():
      found.append(Finding("a tensor is not finite", f"{name} has NaN or inf"))
    elif x.ndim > 1 and x.size > 1 and x.min() == x.max():
      found.append(Finding(
          "a tensor was not loaded",
          f"all entries of {name} {x.shape} are {x.min():g}"))
  return found


def _unused(heads: Heads, params: Any, target: Pretrained, rows: np.ndarray
            ) -> list[Finding]:
  """Returns findings for tensors that affect neither predictions nor the loss.
  """
  method = methods.of(heads)
  objective = method.measure(target.model, heads)
  training = method.objective(target.model, heads, **{
      option.name: option.default for option in method.options})

  @jax.jit
  def gradient(params, target_params):
    tokens, key = jnp.asarray(rows[:2]), jax.random.key(0)

    def total(params):
      both = {"target": target_params, "drafter": params}

      def score(k, logits, positions):
        del k, positions
        return {"sum": jnp.sum(jnp.where(jnp.isfinite(logits), logits, 0)**2)}

      loss, _ = training(both, {}, {
          "tokens": tokens, "progress": jnp.float32(1)}, key)
      return loss + objective.score(both, tokens, key, score)["sum"].sum()

    return jax.tree.map(lambda x: jnp.abs(x).max(), jax.grad(total)(params))

  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  return [Finding("a tensor is not used",
                  f"no prediction depends on {jax.tree_util.keystr(path)}")
          for path, x in jax.tree_util.tree_leaves_with_path(
              gradient(wide, target.params)) if float(x) == 0]


def _precision(heads: Heads, params: Any, target: Pretrained, rows: np.ndarray,
               base: tuple[np.ndarray, np.ndarray]) -> list[Finding]:
  """Returns a finding if the heads are better in float32."""
  leaves = jax.tree.leaves((params, target.params))
  if all(x.dtype == jnp.float32 for x in leaves):
    return []
  wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
  target = dataclasses.replace(target, params=wide(target.params))
  gain = analysis.relative_gain(
      *_score(heads, wide(params), target, rows), *base)
  if not _is_clear(gain):
    return []
  return [Finding("the precision is too low", "in float32, the heads have "
                  f"{gain:+.1%} block efficiency")]


def _vocabulary(heads: Heads, params: Any, target: Pretrained, rows: np.ndarray
                ) -> list[Finding]:
  """Returns a finding if another map from draft ids to target ids is better.

  The other map is estimated. A draft id maps to the target's most frequent
  token at those positions where the draft id is the first head's most likely
  one. The estimate for a position does not use the position itself.
  """
  objective = methods.of(heads).measure(target.model, heads)

  @jax.jit
  def preferred(params, target_params, rows):
    logits = objective.model(target_params, rows[:, :-1]).logits

    def score(k, logits, positions):
      del k
      return {"at": jnp.broadcast_to(positions, logits.shape[:-1]),
              "token": jnp.argmax(logits, axis=-1)}

    found = objective.score(
        {"target": target_params, "drafter": params}, rows, jax.random.key(0),
        score)
    return jnp.argmax(logits, axis=-1), found["at"][0], found["token"][0]

  counts, pairs = {}, []
  for i in range(0, len(rows), 2):
    target_token, at, token = map(np.asarray, preferred(
        params, target.params, jnp.asarray(rows[i:i + 2])))
    pairs += zip(token.ravel().tolist(), np.take_along_axis(
        target_token, at + 1, axis=1).ravel().tolist())
  for drafted, wanted in pairs:
    row = counts.setdefault(drafted, {})
    row[wanted] = row.get(wanted, 0) + 1
  as_is = mapped = 0
  for drafted, wanted in pairs:
    others = dict(counts[drafted])
    others[wanted] -= 1
    best = max(others, key=others.get)
    as_is += drafted == wanted
    mapped += others[best] > 0 and best == wanted
  if mapped <= 2 * as_is or mapped < 0.1 * len(pairs):
    return []
  return [Finding(
      "the map from draft tokens to tokens is wrong",
      "the most likely token of the first head is the target's at "
      f"{as_is / len(pairs):.0%} of the positions, and with a map estimated "
      f"from this text at {mapped / len(pairs):.0%}")]


def check_format(heads: Heads, params: Any, target: Pretrained,
                 rows: np.ndarray, other: np.ndarray, chat: bool
                 ) -> list[Finding]:
  """Returns a finding if the heads fit another format of the prompts better.

  Args:
    heads: loaded heads.
    params: parameters of the heads.
    target: target of the heads.
    rows: `[R, S + 1]`, prompts with the tokens that the target generated.
    other: `[R, S' + 1]`, the same prompts with the other value of `chat`, and
      the tokens that the target generated.
    chat: if True, the prompts of `rows` have the target's chat template.
  """
  score = lambda rows: _score(heads, params, target, rows)
  gain = analysis.relative_gain(*score(other), *score(rows))
  if not _is_clear(gain):
    return []
  have, change = (("have a", "without it") if chat else
                  ("lack the", "with it"))
  return [Finding(
      f"the prompts {have} chat template",
      f"{change}, the heads have {gain:+.1%} block efficiency; they were "
      f"probably trained {change}")]


def _is_clear(gain: analysis.Estimate) -> bool:
  """Returns True if a gain is large and its interval is above 0."""
  return gain.value > _LEAST and gain.low > 0


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
