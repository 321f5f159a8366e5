"""Evaluation on held-out text, during and after a training run.

Functions such as `bits_per_byte` return a `Measure` for `Trainer.evaluate`. A
`Measure` is a function from parameters to a dict of numbers.
"""

from collections.abc import Callable
from collections.abc import Hashable
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

from specjax.analysis import estimates
from specjax.analysis.intervals import Estimate
from specjax.decoding.decoder import Decoder
from specjax.decoding.decoder import raise_if_not_finite
from specjax.interfaces import Model
from specjax.training.objective import DrafterObjective
from specjax.training.objective import Objective
from specjax.utils import processes
from specjax.utils.fingerprints import fingerprint

_BATCH = 8  # windows per pass of `bits_per_byte`
Measure = Callable[[Mapping[str, Any]], dict[str, float]]


def remembered(measure: Measure, names: Sequence[str]) -> Measure:
  """Returns `measure` with a cache of its last result.

  A run evaluates its final parameters twice. The cache avoids the second
  evaluation. Parameters sharded over several processes are not cached.

  Args:
    measure: function of parameters by name.
    names: names of the parameters that change during the run.
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
    length: number of predicted tokens per window.
    stride: distance between the starts of windows, from 1 to `length` tokens.

  Returns:
    Function `params -> {"bits_per_byte": value, "held_out_loss": value}`, with
    the loss in nats per token.
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
                  batch_size: int = 2, seed: int = 0,
                  counted: ArrayLike | None = None) -> Measure:
  """Returns a function that computes the training loss of held-out rows.

  A loss that depends on the progress of the run is computed for progress 1, the
  end of the run.

  Args:
    objective: training objective.
    tokens: `[R, S + 1]` int32 rows.
    batch_size: number of rows per pass.
    seed: seed of the objective's random numbers, the same for every call.
    counted: `[R, S + 1]` bool, True for tokens with weight 1. The other tokens
      have weight 0. None means that all tokens have weight 1.

  Returns:
    Function `params -> {"held_out_loss": value}`. `params` must contain all
    names in `objective.needs`.
  """
  rows = {"tokens": np.asarray(tokens, np.int32)}
  sizes = np.ones(len(rows["tokens"]))
  if counted is not None:
    rows["weights"] = np.asarray(counted, np.float32)[:, 1:]
    sizes = rows["weights"].sum(axis=1)
  starts = range(0, len(sizes), batch_size)

  @jax.jit
  def loss(params: Mapping[str, chex.ArrayTree], batch: Mapping[str, jax.Array]
           ) -> jax.Array:
    return objective(params, {}, {**batch, "progress": jnp.float32(1)},
                     jax.random.key(seed))[0]

  def evaluate(params: Mapping[str, chex.ArrayTree]) -> dict[str, float]:
    losses = processes.gathered([
        loss(params, {name: x[i:i + batch_size] for name, x in rows.items()})
        for i in starts])
    return {"held_out_loss": float(np.average(
        np.asarray(losses, np.float64),
        weights=[sizes[i:i + batch_size].sum() for i in starts]))}

  return evaluate


def block_efficiency(decoder: Decoder, prompts: Sequence[ArrayLike], *,
                     rounds: int, seed: int = 0,
                     clusters: Sequence[Hashable] | None = None) -> Measure:
  """Returns a function that measures the block efficiency on held-out prompts.

  The block efficiency is the number of tokens per target call,
  (1 + E[tau]) / `Drafter.target_calls`, with the number tau of accepted tokens
  in a round. In each round, tau is replaced by its expectation given the draft
  (Rao-Blackwell). Rounds of completed rows are excluded.

  Args:
    decoder: the decoder, with drafter, verifier and transform.
    prompts: sequences of token ids.
    rounds: largest number of rounds per prompt. A row has fewer rounds if its
      context is full.
    seed: seed of the sampling, the same for every call.
    clusters: a label for each prompt, equal for prompts of one document. None
      means that each prompt is a cluster.

  Returns:
    Function of `{"target": ..., "drafter": ...}`. Its result has the key
    "block_efficiency". If there are enough clusters, the result also has the
    ends of the 95 % interval over clusters, as "block_efficiency/low" and
    "block_efficiency/high". The function raises `ValueError` if no prompt is
    shorter than the context.
  """
  longest = max(map(len, prompts))
  # The cache has a slot for every token up to the limit. The complete context
  # of a published model would take gigabytes. The limit is therefore the
  # largest number of tokens that the rounds can emit.
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
    return _with_interval("block_efficiency", accepted, active, clusters,
                          decoder.drafter.target_calls)

  return evaluate


def _with_interval(name: str, totals: np.ndarray, counts: np.ndarray,
                   clusters: Sequence[Hashable] | None = None,
                   calls: int = 1) -> dict[str, float]:
  """Returns (1 + sum(totals) / sum(counts)) / calls by name, and its interval.

  The keys are `name`, `name/low` and `name/high`.
  """
  result = estimates.block_efficiency(
      totals, counts, clusters, target_calls=calls)
  ends = {} if np.isnan(result.low) else {
      f"{name}/low": result.low, f"{name}/high": result.high}
  return {name: result.value, **ends}


def interval(measured: Mapping[str, float], name: str,
             less: float = 0.0) -> Estimate:
  """Returns the estimate `name` of a result, minus a constant.

  >>> interval({"x": 2.0, "x/low": 1.5, "x/high": 2.5}, "x", less=1).value
  1.0

  Args:
    measured: result of a `Measure`.
    name: name of a value with an interval, such as "block_efficiency".
    less: constant to subtract. 1 converts a block efficiency to an acceptance
      length.
  """
  nan = float("nan")
  return Estimate(*(measured.get(key, nan) - less for key in (
      name, f"{name}/low", f"{name}/high")), 0)


def head_accuracy(objective: DrafterObjective, tokens: ArrayLike, *,
                  batch_size: int = 2, top: int = 5, first: int = 0,
                  seed: int = 0, clusters: Sequence[Hashable] | None = None,
                  counted: ArrayLike | None = None) -> Measure:
  """Returns a function that measures the heads of a drafter on held-out rows.

  The target reads the rows and generates nothing. The correct token at a
  position is the target's most likely token. In results with names that begin
  with `data_`, it is the row's token.

  Only counted tokens are evaluated. The accuracy and the loss of a head include
  a position only if the token that the head predicts there is counted.

  A block efficiency is 1 + the mean number of accepted tokens. Every position
  of the rows is the start of a round if the first drafted token is counted. The
  token of head k is accepted only if it is counted and the tokens of all
  earlier heads are accepted. So a round ends with the answer of a conversation,
  as decoding does. The further condition depends on the name:

  * `greedy_block_efficiency`, `data_block_efficiency`: a head's most likely
    token is accepted if it is the correct token.
  * `sampled_block_efficiency` (temperature 1): a head's token is accepted with
    probability sum_v min(p(v), q(v)). p and q are the distributions of the
    target and of the head.

  Intervals treat every cluster of rows as one observation.

  Args:
    objective: the drafter's objective, with its target.
    tokens: `[R, S + 1]` held-out rows.
    batch_size: number of rows per call. It limits the memory.
    top: largest j of the top-j accuracies.
    first: first position that is measured.
    seed: seed of the positions, for objectives that draw positions.
    clusters: a label for each row, equal for rows of one document. None means
      that each row is a cluster.
    counted: `[R, S + 1]` bool, True for tokens whose prediction is evaluated.
      None means all tokens.

  Returns:
    Function of `{"target": ..., "drafter": ...}`. Head 0 is the target's LM
    head. The result has, for k = 0..K and j = 1..top:

    * `head_<k>/loss`: cross-entropy of the row's token in nats;
    * `head_<k>/top_<j>`, `head_<k>/data_top_<j>`: fraction of the positions
      where the correct token is among the head's j most likely tokens.

    `by_head` collects these values as lists. The result also has the three
    block efficiencies above, with intervals as in `block_efficiency`.

    With `by_row=True` the result also has "by_row": for each block efficiency
    the number `[R]` of accepted tokens in every row, and as "positions" the
    number `[R]` of rounds in every row.
  """
  tokens = np.asarray(tokens, np.int32)
  batches = [(tokens[i:i + batch_size], None if counted is None else
              np.asarray(counted, bool)[i:i + batch_size])
             for i in range(0, len(tokens), batch_size)]
  key = jax.random.key(seed)

  @jax.jit
  def measure(params: Mapping[str, chex.ArrayTree], rows: jax.Array,
              counted: jax.Array | None
              ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    logits = objective.model(params["target"], rows[:, :-1]).logits
    greedy = jnp.argmax(logits, axis=-1)
    probs = jax.nn.softmax(logits.astype(jnp.float32))
    every = jnp.broadcast_to(jnp.arange(rows.shape[1] - 1), rows[:, 1:].shape)
    score = functools.partial(_outcomes, rows, probs, greedy, first, counted)
    heads = objective.score(params, rows, key, score)
    lm_head = jax.tree.map(lambda x: x[None], score(0, logits, every))
    sums = jax.tree.map(lambda *x: jnp.concatenate(x),
                        _sums(lm_head, top), _sums(heads, top))
    return sums, _accepted_by_row(heads)

  def evaluate(params: Mapping[str, chex.ArrayTree], by_row: bool = False
               ) -> dict[str, Any]:
    parts = processes.gathered([
        measure(params, *batch) for batch in batches])
    sums = jax.tree.map(lambda *x: sum(np.asarray(y, np.float64) for y in x),
                        *(part for part, _ in parts))
    rows = jax.tree.map(lambda *x: np.concatenate(x).astype(np.float64),
                        *(part for _, part in parts))
    if not sums["counts"].all():
      raise ValueError(f"first is {first}, but from there on, rows of "
                       f"{tokens.shape[1]} tokens have no position at which a "
                       "head predicts a counted token; give a smaller value, "
                       "or rows with more counted tokens")
    values = _means(sums, rows, clusters)
    return {**values, "by_row": rows} if by_row else values

  return evaluate


def _accepted_by_row(heads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the sums `[B]` over the positions of each row, by name.

  For each block efficiency, the sum is the number of accepted tokens.
  "positions" is the number of positions that are the start of a round.

  Args:
    heads: outcomes of all heads, see `_outcomes`.
  """
  counts = heads["counts"]
  accepted = {"greedy_block_efficiency": heads["target_rank"] == 0,
              "sampled_block_efficiency": heads["overlap"],
              "data_block_efficiency": heads["data_rank"] == 0}
  lengths = {name: jnp.sum(jnp.cumprod(counts * x, axis=0), axis=0)
             for name, x in accepted.items()}
  return {**{name: jnp.sum(counts[0] * x, axis=1)
             for name, x in lengths.items()},
          "positions": jnp.sum(counts[0], axis=1)}


def _means(sums: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray],
           clusters: Sequence[Hashable] | None) -> dict[str, float]:
  """Returns the results of `head_accuracy` from sums over positions.

  Args:
    sums: sums of all heads, see `_sums`.
    rows: results of `_accepted_by_row`.
    clusters: a label for each row, or None.
  """
  values = {}
  for name, accepted in rows.items():
    if name != "positions":
      values |= _with_interval(
          name, accepted, rows["positions"], clusters)
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
    measured: result of the function returned by `head_accuracy`.
    name: "loss" for a list `[K + 1]`, or "top" or "data_top" for a list
      `[K + 1][top]`.
  """
  heads = range(sum(key.endswith("/loss") for key in measured))
  if name == "loss":
    return [measured[f"head_{k}/loss"] for k in heads]
  top = sum(key.startswith(f"head_0/{name}_") for key in measured)
  return [[measured[f"head_{k}/{name}_{j}"] for j in range(1, top + 1)]
          for k in heads]


def _outcomes(rows: jax.Array, target_probs: jax.Array, greedy: jax.Array,
              first: int, counted: jax.Array | None, k: jax.Array,
              logits: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
  """Returns the outcomes of one head at every position.

  The outcomes are the head's cross-entropy in nats ("nats"), the ranks of the
  two correct tokens ("data_rank", "target_rank"), the overlap sum_v min(p, q)
  with the target ("overlap"), and the mask of measured positions ("counts").

  Args:
    rows: `[B, S + 1]` tokens.
    target_probs: `[B, S, V]` probabilities of the target.
    greedy: `[B, S]` most likely tokens of the target.
    first: first position that is measured.
    counted: `[B, S + 1]` mask of tokens whose prediction is evaluated, or None.
    k: number of the head.
    logits: `[B, P, V]` logits of the head.
    positions: `[B, P]` positions of the predictions.
  """
  at = positions + 1 + k
  data = jnp.take_along_axis(rows, at, axis=1)
  target = jnp.take_along_axis(greedy, at - 1, axis=1)
  p = jnp.take_along_axis(target_probs, at[..., None] - 1, axis=1)
  q = jax.nn.softmax(logits.astype(jnp.float32))
  counts = positions >= first
  if counted is not None:
    counts &= jnp.take_along_axis(counted, at, axis=1)
  return {"nats": optax.softmax_cross_entropy_with_integer_labels(logits, data),
          "data_rank": rank(logits, data),
          "target_rank": rank(logits, target),
          "overlap": jnp.sum(jnp.minimum(p, q), axis=-1),
          "counts": counts}


def rank(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the rank of each label among all tokens. The argmax has rank 0.

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
  """Returns the sums of outcomes `[K, B, P]` over the measured positions.

  Returns:
    Sums `[K]` of losses and positions, and `[K, top]` numbers of correct tokens
    among the j most likely.
  """
  counts = outcomes["counts"]
  hits = lambda rank: jnp.sum(
      counts[..., None] & (rank[..., None] < jnp.arange(1, top + 1)),
      axis=(1, 2))
  return {"counts": jnp.sum(counts, axis=(1, 2)),
          "loss": jnp.sum(counts * outcomes["nats"], axis=(1, 2)),
          "top": hits(outcomes["target_rank"]),
          "data_top": hits(outcomes["data_rank"])}
