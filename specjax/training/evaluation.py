"""Evaluation on held-out text, during and after a training run.

Each function returns a `Measure`, which maps parameters to numbers by name, for
`Trainer.evaluate`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import math
from typing import Any

import chex
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
  """Returns `measure` with a memory of its last arguments and result.

  A run evaluates its final parameters twice. The memory avoids the second
  evaluation. Parameters that are spread over several processes are measured
  every time.

  Args:
    measure: function of named parameters.
    names: names of the parameters that change in the run.
  """
  last: dict[str, dict[str, Any]] = {}

  def measured(params: Mapping[str, chex.ArrayTree]) -> dict[str, Any]:
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
  """Returns a function that measures a model on held-out text.

  Windows of `length` tokens start every `stride` tokens. Every token except the
  first is predicted once, in the first window that contains it.

  >>> from specjax import testing
  >>> measure = bits_per_byte(testing.MarkovModel(4), [0, 1, 2, 3], num_bytes=3,
  ...                         length=2, stride=1)
  >>> round(measure(jnp.zeros((4, 4)))["bits_per_byte"], 4)  # log2 4
  2.0

  Args:
    model: the model, called without a cache.
    tokens: `[T]` held-out tokens.
    num_bytes: number of bytes of the text.
    length: number of tokens predicted in a window.
    stride: distance of windows, from 1 to `length`.

  Returns:
    `params -> {"bits_per_byte", "held_out_loss"}`, the loss in nats per token.
  """
  if not 1 <= stride <= length:
    raise ValueError(f"stride is {stride}; it must be in [1, {length}], the "
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
  def nats(params: chex.ArrayTree, window: jax.Array, mask: jax.Array
           ) -> jax.Array:
    logits = model(params, window[:, :-1]).logits
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits, window[:, 1:])
    return jnp.sum(loss * mask)

  def evaluate(params: chex.ArrayTree) -> dict[str, float]:
    total = sum(
        float(nats(params, padded[places[i:i + _BATCH]], mask[i:i + _BATCH]))
        for i in range(0, windows, _BATCH))
    return {"bits_per_byte": total / math.log(2) / num_bytes,
            "held_out_loss": total / count}

  return evaluate


def held_out_loss(objective: Objective, tokens: ArrayLike, *,
                  batch_size: int = 2, seed: int = 0) -> Measure:
  """Returns a function that computes the training loss of held-out rows.

  If the loss depends on the progress of the run, the progress is 1, the end of
  the run. All tokens have weight 1.

  Args:
    objective: training objective.
    tokens: `[R, S + 1]` int32 rows.
    batch_size: number of rows in a pass.
    seed: seed of the objective's random choices, the same at every call.

  Returns:
    `params -> {"held_out_loss": value}`, for all parameters in
    `objective.needs`.
  """
  tokens = np.asarray(tokens, np.int32)

  @jax.jit
  def loss(params: Mapping[str, chex.ArrayTree], rows: jax.Array) -> jax.Array:
    return objective(params, {}, {
        "tokens": rows, "progress": jnp.float32(1)}, jax.random.key(seed))[0]

  def evaluate(params: Mapping[str, chex.ArrayTree]) -> dict[str, float]:
    parts = [tokens[i:i + batch_size]
             for i in range(0, len(tokens), batch_size)]
    losses = processes.gathered([loss(params, rows) for rows in parts])
    return {"held_out_loss": float(np.average(
        np.asarray(losses, np.float64), weights=list(map(len, parts))))}

  return evaluate


def block_efficiency(decoder: Decoder, prompts: Sequence[ArrayLike], *,
                     rounds: int, seed: int = 0) -> Measure:
  """Returns a function that measures the block efficiency on held-out prompts.

  The block efficiency is 1 + E[tau], with the number tau of accepted tokens in
  a round. In each round, tau is replaced by its expectation given the draft
  (Rao-Blackwell). Rows that have ended are not included.

  Args:
    decoder: the decoder, with drafter, verifier and transform.
    prompts: sequences of token ids.
    rounds: number of rounds of every prompt, or fewer if the context ends.
    seed: seed of the sampling, the same at every call.

  Returns:
    `{"target", "drafter"} -> {"block_efficiency": value}`, with the bounds of
    the 95 % interval over prompts as "block_efficiency/low" and
    "block_efficiency/high" if there are enough prompts. The function raises a
    `ValueError` if no prompt is shorter than the context.
  """
  longest = max(map(len, prompts))
  # The cache has a slot for every token up to the limit. A published model's
  # complete context would take gigabytes. So the limit is the largest number of
  # tokens that the rounds can produce.
  limit = min(decoder.context_length, longest + rounds * decoder.num_nodes)

  def evaluate(params: Mapping[str, chex.ArrayTree]) -> dict[str, float]:
    state = decoder.prefill(
        params, prompts, jax.random.key(seed), limits=max(limit, longest))
    _, stats = decoder.decode(params, state, rounds=rounds)
    raise_if_not_finite(stats)
    accepted, active = (np.asarray(x, np.float64).sum(axis=0) for x in (
        stats.expected[..., 0], stats.active))
    if not active.any():
      raise ValueError(
          f"no prompt leaves room in the context of {decoder.context_length} "
          "tokens, so no round was decoded; give shorter prompts")
    return _with_interval("block_efficiency", accepted, active)

  return evaluate


def _with_interval(name: str, totals: np.ndarray, counts: np.ndarray
                   ) -> dict[str, float]:
  """Returns 1 + sum(totals) / sum(counts) by name, and its interval.

  The keys are `name`, `name/low` and `name/high`.
  """
  result = estimate(lambda total, count: 1 + total / count, totals, counts)
  ends = {} if np.isnan(result.low) else {
      f"{name}/low": result.low, f"{name}/high": result.high}
  return {name: result.value, **ends}


def interval(measured: Mapping[str, float], name: str,
             less: float = 0.0) -> Estimate:
  """Returns a measured value with its interval, minus a constant.

  >>> interval({"x": 2.0, "x/low": 1.5, "x/high": 2.5}, "x", less=1).value
  1.0

  Args:
    measured: result of a `Measure`.
    name: name of a value with an interval, such as "block_efficiency".
    less: constant; 1 turns a block efficiency into an acceptance length.
  """
  nan = float("nan")
  return Estimate(*(measured.get(key, nan) - less for key in (
      name, f"{name}/low", f"{name}/high")), 0)


def head_accuracy(objective: DrafterObjective, tokens: ArrayLike, *,
                  batch_size: int = 2, top: int = 5, first: int = 0,
                  seed: int = 0) -> Measure:
  """Returns a function that measures the heads of a drafter on held-out rows.

  The target reads the rows and generates nothing. The prediction of head k, its
  most likely token, is correct if the target has the same most likely token at
  that position. In results whose names begin with `data_`, it is correct if it
  is the row's token.

  A block efficiency is 1 + the mean number of accepted tokens, with every
  position of the rows as the start of a round. The token of head k is accepted
  only if the tokens of all earlier heads are. For `greedy_block_efficiency`, a
  token is accepted if it is correct. For `sampled_block_efficiency`
  (temperature 1), it is accepted with the probability sum_v min(p, q), where p
  and q are the target's and the head's distributions. The intervals treat every
  row as one observation.

  Args:
    objective: the drafter's objective, with its target.
    tokens: `[R, S + 1]` held-out rows.
    batch_size: number of rows in a call, which bounds the memory.
    top: largest j of the top-j accuracies.
    first: the first position that counts.
    seed: seed of the positions, for objectives that draw them.

  Returns:
    `{"target", "drafter"} -> {name: value}`. For k = 0..K and j = 1..top:
    `head_<k>/loss` (cross-entropy of the row's token in nats),
    `head_<k>/top_<j>` and `head_<k>/data_top_<j>` (fractions of the positions
    where the correct token is among the j most likely). Also
    `greedy_block_efficiency`, `sampled_block_efficiency` and
    `data_block_efficiency` with intervals as in `block_efficiency`. Head 0 is
    the target's LM head. `by_head` collects the values of one name.

    With `by_row=True` the function also returns "by_row": the number `[R]` of
    accepted tokens in every row for each block efficiency, and the number `[R]`
    of rounds as "positions".
  """
  tokens = np.asarray(tokens, np.int32)
  key = jax.random.key(seed)

  @jax.jit
  def measure(params: Mapping[str, chex.ArrayTree], rows: jax.Array
              ) -> tuple[ dict[str, jax.Array], dict[str, jax.Array]]:
    logits = objective.model(params["target"], rows[:, :-1]).logits
    greedy = jnp.argmax(logits, axis=-1)
    probs = jax.nn.softmax(logits.astype(jnp.float32))
    every = jnp.broadcast_to(jnp.arange(rows.shape[1] - 1), rows[:, 1:].shape)
    score = functools.partial(_outcomes, rows, probs, greedy, first)
    heads = objective.score(params, rows, key, score)
    lm_head = jax.tree.map(lambda x: x[None], score(0, logits, every))
    sums = jax.tree.map(lambda *x: jnp.concatenate(x),
                        _sums(lm_head, top), _sums(heads, top))
    return sums, _accepted_by_row(heads)

  def evaluate(params: Mapping[str, chex.ArrayTree], by_row: bool = False
               ) -> dict[str, Any]:
    parts = processes.gathered([
        measure(params, tokens[i:i + batch_size])
        for i in range(0, len(tokens), batch_size)])
    sums = jax.tree.map(lambda *x: sum(np.asarray(y, np.float64) for y in x),
                        *(part for part, _ in parts))
    rows = jax.tree.map(lambda *x: np.concatenate(x).astype(np.float64),
                        *(part for _, part in parts))
    if not sums["counts"].all():
      raise ValueError(f"first is {first}, but rows of {tokens.shape[1]} "
                       "tokens have no position from there on that can be "
                       "measured; give a smaller value")
    values = _means(sums, rows)
    return {**values, "by_row": rows} if by_row else values

  return evaluate


def _accepted_by_row(heads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the accepted tokens `[B]` by block efficiency, and the positions.

  Args:
    heads: outcomes of all heads, see `_outcomes`.
  """
  counts = heads["counts"][0]
  accepted = {"greedy_block_efficiency": heads["target_rank"] == 0,
              "sampled_block_efficiency": heads["overlap"],
              "data_block_efficiency": heads["data_rank"] == 0}
  lengths = {name: jnp.sum(jnp.cumprod(x, axis=0), axis=0)
             for name, x in accepted.items()}
  return {**{name: jnp.sum(counts * x, axis=1) for name, x in lengths.items()},
          "positions": jnp.sum(counts, axis=1)}


def _means(sums: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray]
           ) -> dict[str, float]:
  """Returns the results of `head_accuracy` from sums over positions.

  Args:
    sums: sums of all heads, see `_sums`.
    rows: results of `_accepted_by_row`.
  """
  values = {}
  for name, accepted in rows.items():
    if name != "positions":
      values |= _with_interval(name, accepted, rows["positions"])
  for k, count in enumerate(sums["counts"]):
    values[f"head_{k}/loss"] = sums["loss"][k] / count
    for reference in ("", "data_"):
      for j, right in enumerate(sums[f"{reference}top"][k], 1):
        values[f"head_{k}/{reference}top_{j}"] = right / count
  return {name: float(value) for name, value in values.items()}


def by_head(measured: Mapping[str, float], name: str
            ) -> list[float] | list[list[float]]:
  """Returns results of `head_accuracy` as lists over the heads k = 0..K.

  >>> by_head({"head_0/loss": 2.0, "head_1/loss": 3.0}, "loss")
  [2.0, 3.0]

  Args:
    measured: result of `head_accuracy`.
    name: "loss" for a list `[K + 1]`, "top" or "data_top" for `[K + 1][top]`.
  """
  heads = range(sum(key.endswith("/loss") for key in measured))
  if name == "loss":
    return [measured[f"head_{k}/loss"] for k in heads]
  top = sum(key.startswith(f"head_0/{name}_") for key in measured)
  return [[measured[f"head_{k}/{name}_{j}"] for j in range(1, top + 1)]
          for k in heads]


def _outcomes(rows: jax.Array, target_probs: jax.Array, greedy: jax.Array,
              first: int, k: jax.Array, logits: jax.Array, positions: jax.Array
              ) -> dict[str, jax.Array]:
  """Returns the outcomes of one head at every position.

  They are its cross-entropy in nats, the ranks of the correct tokens, the
  overlap sum_v min(p, q) with the target, and the mask of measured positions.

  Args:
    rows: `[B, S + 1]` tokens.
    target_probs: `[B, S, V]` probabilities of the target.
    greedy: `[B, S]` most likely tokens of the target.
    first: first position that is measured.
    k: number of the head.
    logits: `[B, P, V]` logits of the head.
    positions: `[B, P]` positions of the predictions.
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
  """Returns the rank of labels among all tokens; the argmax has rank 0.

  >>> rank(jnp.array([[0.1, 0.7, 0.2]]), jnp.array([2])).tolist()
  [1]

  Args:
    logits: `[..., V]` logits.
    labels: `[...]` token ids.

  Returns:
    `[...]` int32. Among equal logits, the smaller token id comes first.
  """
  chex.assert_equal_shape_prefix([logits, labels], labels.ndim)
  value = jnp.take_along_axis(logits, labels[..., None], axis=-1)
  before = jnp.arange(logits.shape[-1]) < labels[..., None]
  return jnp.sum((logits > value) | (logits == value) & before, axis=-1)


def _sums(outcomes: Mapping[str, jax.Array], top: int) -> dict[str, jax.Array]:
  """Sums outcomes `[K, B, P]` over the masked positions.

  Returns:
    Sums `[K]` of losses and counts, and `[K, top]` of hits by rank.
  """
  counts = outcomes["counts"]
  hits = lambda rank: jnp.sum(
      counts[..., None] & (rank[..., None] < jnp.arange(1, top + 1)),
      axis=(1, 2))
  return {"counts": jnp.sum(counts, axis=(1, 2)),
          "loss": jnp.sum(counts * outcomes["nats"], axis=(1, 2)),
          "top": hits(outcomes["target_rank"]),
          "data_top": hits(outcomes["data_rank"])}
