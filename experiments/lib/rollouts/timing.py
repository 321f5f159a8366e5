"""Timing compiled calls that can be repeated in place."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import Transformer
from specjax.trees import topology

STEPS = 8  # passes of a timed call: the cost of the call itself is spread


class Timed:
  """A compiled call `(params, carry) -> carry` that can be repeated.

  The carry is donated and comes back with its lengths as they were, so that
  every repetition does the same work in place.
  """

  def __init__(self, function: Callable, params: Any, carry: Any,
               steps: int = STEPS):
    self._function = jax.jit(function, donate_argnums=1)
    self._params, self._carry, self._steps = params, carry, steps
    self()

  def __call__(self) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    self._carry = jax.block_until_ready(
        self._function(self._params, self._carry))
    return (time.perf_counter() - start) / self._steps


def filled_cache(model: Transformer, params: Any, capacity: int, used: int,
                 batch: int = 1):
  """A cache of `capacity` slots a row, `used` of which count as filled."""
  cache = model.init_cache(params, batch, capacity)
  return cache.rollback(jnp.full((batch,), used, jnp.int32))


def passes(model: Transformer, params: Any, capacity: int, used: int,
           tokens: int, batch: int = 1, steps: int = STEPS):
  """Repeated passes over a chain of `tokens` nodes, nothing committed."""
  depths, ancestors = topology.causal(batch, tokens)

  def run(params, carry):
    def step(carry, _):
      cache, ids = carry
      out = model(params, ids, depths, ancestors, cache)
      ids = jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
      return (out.cache.rollback(cache.lengths), ids), None

    return jax.lax.scan(step, carry, length=steps)[0]

  ids = jnp.ones((batch, tokens), jnp.int32)
  return Timed(run, params,
               (filled_cache(model, params, capacity, used, batch), ids), steps)


def large_sum(num_bytes: int) -> Timed:
  """One sum over an array of so many bytes: what reading memory costs here."""
  array = jnp.ones((num_bytes // 4,), jnp.float32)
  return Timed(lambda array, _: jnp.sum(array), array, jnp.zeros(()), steps=1)


def bytes_read(model: Transformer, params: Any, slots: int) -> int:
  """Bytes of the weights and of the keys and values that a pass reads.

  Args:
    model: a `Transformer`.
    params: of the model.
    slots: in use, of all rows together.
  """
  weights = sum(x.nbytes for x in jax.tree.leaves(params))
  if not model.config.tie_embeddings:  # then the table is only gathered from
    weights -= params["embedding"].nbytes
  c = model.config
  slot = 2 * c.layers * c.kv_heads * c.head_dim
  return weights + slots * slot * params["embedding"].dtype.itemsize


def fresh_times(calls: Mapping[Hashable, tuple[Callable, Any, Sequence]],
                seconds: float) -> dict[Hashable, float]:
  """The least seconds of each call, with weights that no call just read.

  Calls take turns, and each takes the next of its weights after those that the
  call before it took. So they are to be many more than the processor's caches
  hold; calls with the same weights one after the other would find them there.

  Args:
    calls: `{name: (function, x, weights)}`: `function(x, one)` is timed, with
      one of the weights at a time.
    seconds: that it may take.
  """
  least, made = dict.fromkeys(calls, float("inf")), itertools.count()
  end = time.perf_counter() + seconds
  while time.perf_counter() < end:
    for name, (function, x, weights) in calls.items():
      own = weights[next(made) % len(weights)]
      start = time.perf_counter()
      jax.block_until_ready(function(x, own))
      least[name] = min(least[name], time.perf_counter() - start)
  return least


def median(timed: Timed, times: int = 15) -> float:
  """Median seconds of a step."""
  return statistics.median(timed() for _ in range(times))
