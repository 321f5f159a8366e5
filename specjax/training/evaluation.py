"""Evaluation on held-out text while a model or a drafter trains.

Each function here returns a function that takes parameters and returns numbers
by name, for `Trainer.evaluate`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
import optax

from specjax.analysis.intervals import Estimate
from specjax.analysis.intervals import estimate
from specjax.decoding.decoder import Decoder
from specjax.decoding.decoder import raise_if_not_finite
from specjax.interfaces import Model
from specjax.training.objective import DrafterObjective
from specjax.training.objective import Objective
from specjax.utils import processes
from specjax.utils.fingerprints import fingerprint

_BATCH = 8
Measure = Callable[[Mapping[str, Any]], dict[str, float]]


def remembered(measure: Measure, names: Sequence[str]) -> Measure:
  """Returns `measure` with a memory for the last parameters.

  The final evaluation of a run and the evaluation of its saved parameters are
  then one. Parameters with parts in other processes are measured every time.

  Args:
    measure: function of named parameters.
    names: names of the parameters that change; the others stay as they are.
  """
  last: dict[str, dict[str, Any]] = {}

  def measured(params: Mapping[str, Any]) -> dict[str, Any]:
    changing = {name: params[name] for name in names}
    if not all(getattr(x, "is_fully_addressable", True)
               for x in jax.tree.leaves(changing)):
      return measure(params)
    key = fingerprint(changing)
    if key not in last:
      values = measure(params)
      last.clear()
      last[key] = values
    return dict(last[key])

  return measured


def bits_per_byte(model: Model, tokens: ArrayLike, num_bytes: int,
                  length: int, stride: int) -> Measure:
  """A function that measures a model on held-out text.

  Windows of `length` tokens begin every `stride` tokens; every token but the
  first is predicted once, in the first window that holds it, so from at least
  `length - stride` tokens before it where the text has that many.

  Args:
    model: called without a cache.
    tokens: `[T]` the held-out tokens.
    num_bytes: bytes of the text that they encode.
    length: S, tokens predicted in a window.
    stride: from 1 to `length`.

  Returns:
    `params -> {"bits_per_byte", "held_out_loss"}`, the loss in nats per token.
  """
  if not 1 <= stride <= length:
    raise ValueError(f"stride is {stride}; it must lie in [1, {length}], the "
                     "length of a window")
  tokens = np.asarray(tokens, np.int32)
  count = len(tokens) - 1
  windows = 1 + -(-max(0, count - length) // stride)
  windows += -windows % _BATCH
  starts = np.arange(windows) * stride
  places = starts[:, None] + np.arange(length + 1)
  new = places[:, :-1] >= starts[:, None] + length - stride
  new[0] = True
  mask = new & (places[:, :-1] < count)
  padded = np.zeros(places.max() + 1, np.int32)
  padded[:len(tokens)] = tokens

  @jax.jit
  def nats(params, window, mask):
    logits = model(params, window[:, :-1]).logits
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits, window[:, 1:])
    return jnp.sum(loss * mask)

  def evaluate(params):
    total = sum(
        float(nats(params, padded[places[i:i + _BATCH]], mask[i:i + _BATCH]))
        for i in range(0, windows, _BATCH))
    return {"bits_per_byte": total / math.log(2) / num_bytes,
            "held_out_loss": total / count}

  return evaluate


def held_out_loss(objective: Objective, tokens: ArrayLike, *,
                  batch_size: int = 2, seed: int = 0) -> Measure:
  """Returns a function that computes the training loss of held-out rows.

  It is the loss at the end of a run, where a weight in it depends on the
  progress. Every token counts.

  Args:
    objective: the training objective.
    tokens: `[R, S + 1]` int32, the rows.
    batch_size: rows of a pass.
    seed: seed of the objective's random choices, the same at every call.

  Returns:
    `params -> {"held_out_loss": value}`. It is called with all parameters that
    `objective` needs.
  """
  tokens = np.asarray(tokens, np.int32)

  @jax.jit
  def loss(params, rows):
    return objective(params, {}, {
        "tokens": rows, "progress": jnp.float32(1)}, jax.random.key(seed))[0]

  def evaluate(params):
    parts = [tokens[i:i + batch_size]
             for i in range(0, len(tokens), batch_size)]
    losses = processes.gathered([loss(params, rows) for rows in parts])
    return {"held_out_loss": float(np.average(
        np.asarray(losses, np.float64), weights=list(map(len, parts))))}

  return evaluate


def block_efficiency(decoder: Decoder, prompts: Sequence[ArrayLike], *,
                     rounds: int, seed: int = 0) -> Measure:
  """Returns a function that decodes held-out prompts: tokens per target call.

  The value is 1 + E[tau]. Every round counts with the expected number of
  accepted tokens given its draft (Rao-Blackwell); finished rows do not count.

  Args:
    decoder: a `Decoder`; its drafter, verifier and transform are measured.
    prompts: sequences of token ids.
    rounds: rounds of every prompt; fewer where the context ends.
    seed: of the sampling, the same at every call.

  Returns:
    `{"target", "drafter"} -> {"block_efficiency": value}`, with its 95 %
    interval over prompts as "block_efficiency/low" and "/high" if there are
    enough. It raises a ValueError if no prompt leaves room for a token.
  """
  longest = max(map(len, prompts))
  # Slots are reserved up to the limit: a published context takes gigabytes.
  limit = min(decoder.context_length, longest + rounds * decoder.num_nodes)

  def evaluate(params):
    state = decoder.prefill(
        params, prompts, jax.random.key(seed), limits=max(limit, longest))
    _, stats = decoder.decode(params, state, rounds=rounds)
    raise_if_not_finite(stats)
    accepted, active = (np.asarray(x, np.float64).sum(axis=0) for x in (
        stats.expected[..., 0], stats.active))
    if not active.any():
      raise ValueError(
          f"no prompt leaves room in the context of {decoder.context_length} "
          "tokens, so that no round was decoded; give shorter prompts")
    return _with_interval("block_efficiency", accepted, active)

  return evaluate


def _with_interval(name, totals, counts):
  """Returns `{name, name/low, name/high}` of 1 + sum(totals) / sum(counts)."""
  found = estimate(lambda total, count: 1 + total / count, totals, counts)
  ends = {} if np.isnan(found.low) else {
      f"{name}/low": found.low, f"{name}/high": found.high}
  return {name: found.value, **ends}


def interval(measured: Mapping[str, float], name: str,
             less: float = 0.0) -> Estimate:
  """Returns a measured value as an `Estimate`, less a constant.

  Args:
    measured: by a function of this module.
    name: of a value that has an interval, such as "block_efficiency".
    less: subtracted; 1 makes a block efficiency an acceptance length.
  """
  nan = float("nan")
  return Estimate(*(measured.get(key, nan) - less for key in (
      name, f"{name}/low", f"{name}/high")), 0)


def head_accuracy(objective: DrafterObjective, tokens: ArrayLike, *,
                  batch_size: int = 2, top: int = 5, first: int = 0,
                  seed: int = 0) -> Measure:
  """Returns a function that measures forecasts on held-out rows, head by head.

  The target reads the rows as they are and writes nothing of its own. A
  forecast of head k is right if it is the target's most likely token at that
  place of the row; with `data_` in the name, if it is the row's token.

  The block efficiencies are exact expectations given the rows, with every
  position as the start of a round: 1 + the mean number of accepted tokens. Head
  k counts if all heads before it are accepted. `greedy_block_efficiency`: a
  head is accepted if it is right. `sampled_block_efficiency`: sampling at
  temperature 1, where a head is accepted with probability sum_v min(p, q).
  Their intervals treat every row as one observation.

  Args:
    objective: what drafts, in front of its target.
    tokens: `[R, S + 1]` held-out rows.
    batch_size: rows of a call, which bounds the memory.
    top: how many of a head's most likely tokens may hold the right one.
    first: position of the first forecast that counts; those before it are made
      from a beginning that is shorter than any prompt.
    seed: of the positions, for an objective that draws them.

  Returns:
    `{"target", "drafter"} -> {name: value}`: for k = 0..K and j = 1..top
    `head_<k>/loss` (nats of the row's token), `head_<k>/top_<j>` and
    `head_<k>/data_top_<j>`, shares of the positions; `greedy_block_efficiency`,
    `sampled_block_efficiency` and `data_block_efficiency`, and their intervals
    as in `block_efficiency`. Head 0 is the target's LM head. See `by_head`.

    With `by_row=True` it also returns "by_row": for each block efficiency
    `[R]`, the accepted tokens of every row, and "positions" `[R]`, the rounds.
  """
  tokens = np.asarray(tokens, np.int32)
  key = jax.random.key(seed)

  @jax.jit
  def measure(params, rows):
    logits = objective.model(params["target"], rows[:, :-1]).logits
    greedy = jnp.argmax(logits, axis=-1)
    probs = jax.nn.softmax(logits.astype(jnp.float32))
    every = jnp.broadcast_to(jnp.arange(rows.shape[1] - 1), rows[:, 1:].shape)
    score = functools.partial(_outcomes, rows, probs, greedy, first)
    heads = objective.score(params, rows, key, score)
    lm_head = jax.tree.map(lambda x: x[None], score(0, logits, every))
    sums = jax.tree.map(lambda *x: jnp.concatenate(x),
                        _sums(lm_head, top), _sums(heads, top))
    counts = heads["counts"][0]
    by_row = {name: jnp.sum(
        counts * jnp.sum(jnp.cumprod(accepted, axis=0), axis=0), axis=1)
              for name, accepted in (
                  ("greedy_block_efficiency", heads["target_rank"] == 0),
                  ("sampled_block_efficiency", heads["overlap"]),
                  ("data_block_efficiency", heads["data_rank"] == 0))}
    return sums, {**by_row, "positions": jnp.sum(counts, axis=1)}

  def evaluate(params, by_row=False):
    parts = processes.gathered([
        measure(params, tokens[i:i + batch_size])
        for i in range(0, len(tokens), batch_size)])
    sums = jax.tree.map(lambda *x: sum(np.asarray(y, np.float64) for y in x),
                        *(part for part, _ in parts))
    rows = jax.tree.map(lambda *x: np.concatenate(x).astype(np.float64),
                        *(part for _, part in parts))
    counts = sums["counts"]
    if not counts.all():
      raise ValueError(f"no position of {tokens.shape[1]} tokens that is "
                       f"measured is {first} or later; give a smaller first")
    found = {}
    for name, accepted in rows.items():
      if name != "positions":
        found |= _with_interval(name, accepted, rows["positions"])
    for k, count in enumerate(counts):
      found[f"head_{k}/loss"] = sums["loss"][k] / count
      for reference in ("", "data_"):
        for j, right in enumerate(sums[f"{reference}top"][k], 1):
          found[f"head_{k}/{reference}top_{j}"] = right / count
    found = {name: float(value) for name, value in found.items()}
    return {**found, "by_row": rows} if by_row else found

  return evaluate


def by_head(measured: dict[str, float], name: str) -> list:
  """What `head_accuracy` measured, of k = 0..K.

  Args:
    measured: by `head_accuracy`.
    name: "loss" for `[K + 1]`; "top" or "data_top" for `[K + 1][top]`.
  """
  heads = range(sum(key.endswith("/loss") for key in measured))
  if name == "loss":
    return [measured[f"head_{k}/loss"] for k in heads]
  top = sum(key.startswith(f"head_0/{name}_") for key in measured)
  return [[measured[f"head_{k}/{name}_{j}"] for j in range(1, top + 1)]
          for k in heads]


def _outcomes(rows, target_probs, greedy, first, k, logits, positions):
  """Nats, ranks, overlap with the target, and which count, of one head.

  Args:
    rows: `[B, S + 1]`.
    target_probs: `[B, S, V]`.
    greedy: `[B, S]`, the target's most likely tokens.
    first: see `head_accuracy`.
    k: of the head.
    logits: `[B, P, V]` of the head.
    positions: `[B, P]`.
  """
  at = positions + 1 + k
  data = jnp.take_along_axis(rows, at, axis=1)
  target = jnp.take_along_axis(greedy, at - 1, axis=1)
  p = jnp.take_along_axis(target_probs, at[..., None] - 1, axis=1)
  q = jax.nn.softmax(logits.astype(jnp.float32))
  return {"nats": optax.softmax_cross_entropy_with_integer_labels(logits, data),
          "data_rank": rank(logits, data),
          "target_rank": rank(logits, target),
          "overlap": jnp.sum(jnp.minimum(p, q), axis=-1),
          "counts": positions >= first}


def rank(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """How many tokens of `[..., V]` come before `labels [...]`; 0: argmax."""
  value = jnp.take_along_axis(logits, labels[..., None], axis=-1)
  before = jnp.arange(logits.shape[-1]) < labels[..., None]
  return jnp.sum((logits > value) | (logits == value) & before, axis=-1)


def _sums(outcomes, top):
  """Sums over what counts of `[K, B, P]`: `[K]` and `[K, top]`."""
  counts = outcomes["counts"]
  hits = lambda rank: jnp.sum(
      counts[..., None] & (rank[..., None] < jnp.arange(1, top + 1)),
      axis=(1, 2))
  return {"counts": jnp.sum(counts, axis=(1, 2)),
          "loss": jnp.sum(counts * outcomes["nats"], axis=(1, 2)),
          "top": hits(outcomes["target_rank"]),
          "data_top": hits(outcomes["data_rank"])}
