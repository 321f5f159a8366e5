"""What is measured on held-out text while a model or a drafter trains.

Each function here makes one that takes parameters and returns numbers by name,
as `Trainer.evaluate` wants it.
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

from specjax import processes
from specjax.decoder import Decoder
from specjax.decoder import raise_if_not_finite
from specjax.files import fingerprint
from specjax.training.objectives import DrafterObjective
from specjax.training.objectives import Objective
from specjax.types import ModelFn

_BATCH = 8
Measure = Callable[[Mapping[str, Any]], dict[str, float]]


def remembered(measure: Measure) -> Measure:
  """As `measure`, which is not asked twice of the same parameters in a row.

  Parameters that other processes hold parts of are measured whenever asked.
  """
  last: dict[str, dict[str, float]] = {}

  def measured(params):
    if not all(getattr(x, "is_fully_addressable", True)
               for x in jax.tree.leaves(params)):
      return measure(params)
    name = fingerprint(params)
    if name not in last:
      found = measure(params)
      last.clear()
      last[name] = found
    return dict(last[name])

  return measured


def bits_per_byte(model: ModelFn, tokens: ArrayLike, num_bytes: int,
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
  """A function that decodes held-out prompts and counts tokens a round.

  1 + E[tau]: every round counts with the expectation of its accepted tokens
  given its draft (Rao-Blackwell), and rows that are done do not count.

  Args:
    decoder: a `Decoder`; its drafter, verifier and transform are measured.
    prompts: sequences of token ids.
    rounds: of every prompt; fewer where the context ends.
    seed: of the sampling, the same at every call.

  Returns:
    `{"target", "drafter"} -> {"block_efficiency": value}`. It raises a
    ValueError where no prompt leaves room for a token.
  """
  def evaluate(params):
    state = decoder.prefill(params, prompts, jax.random.key(seed))
    _, stats = decoder.decode(params, state, rounds=rounds)
    raise_if_not_finite(stats)
    if not stats.active.any():
      raise ValueError(
          f"no prompt leaves room in the context of {decoder.context_length} "
          "tokens, so that no round was decoded; give shorter prompts")
    accepted = jnp.sum(stats.expected[..., 0]) / jnp.sum(stats.active)
    return {"block_efficiency": float(1 + accepted)}

  return evaluate


def head_accuracy(objective: DrafterObjective, tokens: ArrayLike, *,
                  batch_size: int = 2, top: int = 5, first: int = 0,
                  seed: int = 0) -> Measure:
  """A function that measures forecasts on held-out rows, head by head.

  The rows are given to the target as they are; it writes nothing of its own.
  The forecast of head k is right if it is what the target finds likeliest at
  that place of the row, or, where the name has `data_`, the row's token.
  `greedy_block_efficiency` is 1 + the mean over positions of the heads that are
  right before the first that is not: what greedy decoding would accept if the
  target wrote the rows.

  Args:
    objective: of K heads.
    tokens: `[R, S + 1]` int32, the rows.
    batch_size: rows of a pass; the logits of a head take
      batch_size * S * V floats.
    top: k of the largest top-k accuracy.
    first: position from which a row counts. Of a row that the target wrote
      after a prompt of P tokens it is P - 1.
    seed: of the positions, where the objective draws them.

  Returns:
    `{"target", "drafter"} -> {name: value}`: `head_<k>/loss` in nats,
    `head_<k>/top_<j>` and `head_<k>/data_top_<j>` for k = 0..K, where head 0
    is the target's LM head, and `greedy_block_efficiency` and
    `data_block_efficiency`. See `by_head`.
  """
  tokens = np.asarray(tokens, np.int32)
  key = jax.random.key(seed)

  @jax.jit
  def measure(params, rows):
    logits = objective.model(params["target"], rows[:, :-1]).logits
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    every = jnp.broadcast_to(jnp.arange(rows.shape[1] - 1), greedy.shape)
    score = functools.partial(_outcomes, rows, greedy, first)
    heads = objective.score(params, rows, key, score)
    lm_head = jax.tree.map(lambda x: x[None], score(0, logits, every))
    sums = jax.tree.map(lambda *x: jnp.concatenate(x),
                        _sums(lm_head, top), _sums(heads, top))
    accepted = {name: jnp.sum(heads["counts"][0] * jnp.sum(
        jnp.cumprod(heads[rank] == 0, axis=0), axis=0)) for name, rank in (
            ("greedy_block_efficiency", "target_rank"),
            ("data_block_efficiency", "data_rank"))}
    return sums, accepted

  def evaluate(params):
    parts = [measure(params, tokens[i:i + batch_size])
             for i in range(0, len(tokens), batch_size)]
    sums, accepted = jax.tree.map(
        lambda *x: sum(np.asarray(y, np.float64) for y in x),
        *processes.gathered(parts))
    counts = sums["counts"]
    if not counts.all():
      raise ValueError(f"no position of {tokens.shape[1]} tokens that is "
                       f"measured is {first} or later; give a smaller first")
    row = {name: 1 + value / counts[1] for name, value in accepted.items()}
    for k, count in enumerate(counts):
      row[f"head_{k}/loss"] = sums["loss"][k] / count
      for reference in ("", "data_"):
        for j, right in enumerate(sums[f"{reference}top"][k], 1):
          row[f"head_{k}/{reference}top_{j}"] = right / count
    return {name: float(value) for name, value in row.items()}

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


def _outcomes(rows, greedy, first, k, logits, positions):
  """Of a head's `logits [B, P, V]`: nats, ranks, and which of them count."""
  at = positions + 1 + k
  data = jnp.take_along_axis(rows, at, axis=1)
  target = jnp.take_along_axis(greedy, at - 1, axis=1)
  return {"nats": optax.softmax_cross_entropy_with_integer_labels(logits, data),
          "data_rank": rank(logits, data),
          "target_rank": rank(logits, target),
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
