"""Measures the time of compiled functions."""

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

from specjax.decoding import Decoder
from specjax.models import Transformer
from specjax.trees import topology

STEPS = 8  # steps per timed call, which amortise the overhead of the call
_COLUMNS = 8192  # of the matrix of `bandwidths`


class Timed:
  """Compiled function `(params, carry) -> carry` that can be timed repeatedly.

  The carry is donated. The function must return it with unchanged lengths, so
  that every call does the same work in place. One call has `steps` steps.
  """

  def __init__(self, function: Callable, params: Any, carry: Any,
               steps: int = STEPS):
    self._function = jax.jit(function, donate_argnums=1)
    self._params, self._carry, self._steps = params, carry, steps
    self()

  def __call__(self) -> float:
    """Calls the function and returns the time per step in seconds."""
    start = time.perf_counter()
    self._carry = jax.block_until_ready(
        self._function(self._params, self._carry))
    return (time.perf_counter() - start) / self._steps


def filled_cache(model: Transformer, params: Any, capacity: int, used: int,
                 batch: int = 1):
  """Returns a cache with `capacity` slots per row, of which `used` are filled.
  """
  cache = model.init_cache(params, batch, capacity)
  return cache.rollback(jnp.full((batch,), used, jnp.int32))


def passes(model: Transformer, params: Any, capacity: int, used: int,
           tokens: int, batch: int = 1, steps: int = STEPS):
  """Returns timed passes over a chain of `tokens` nodes.

  A step is one pass. The cache is rolled back after every pass, so all passes
  do the same work.

  Args:
    model: model of the passes.
    params: parameters of the model.
    capacity: number of cache slots per row.
    used: number of filled cache slots per row.
    tokens: number of tokens per row and pass.
    batch: number of rows.
    steps: number of passes per call.
  """
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


def drafts(decoder: Decoder, params: Any, prompt: Sequence[int],
           capacity: int) -> Timed:
  """Returns timed drafts of one row, for the time per drafted token.

  Every draft starts at the last drafted token, so that the compiler cannot
  compute a draft once for all steps.

  Args:
    decoder: decoder with a drafter of chains.
    params: parameters of the decoder.
    prompt: token ids before the drafts.
    capacity: number of cache slots of the row.
  """
  stage, last = decoder.stage, len(prompt) - 1
  state = decoder.prefill(params, [prompt], jax.random.key(0),
                          limits=capacity, capacity=capacity)

  def run(fixed, tokens):
    params, state = fixed

    def step(tokens, uniforms):
      draft, _ = stage.propose(params, state.replace(tokens=tokens), uniforms)
      # q is part of a draft. It is used, so that the compiler computes it.
      impossible = (draft.probs > 2).any().astype(tokens.dtype)
      return tokens.at[0, last].set(draft.tokens[0, -1] + impossible), None

    return jax.lax.scan(step, tokens, stage.draw_uniforms(state, STEPS))[0]

  return Timed(run, (params, state), jnp.copy(state.tokens),
               STEPS * (decoder.num_nodes - 1))


def large_sum(num_bytes: int) -> Timed:
  """Returns a timed sum over an array of `num_bytes` bytes.

  Its time measures the memory bandwidth.
  """
  array = jnp.ones((num_bytes // 4,), jnp.float32)
  return Timed(lambda array, _: jnp.sum(array), array, jnp.zeros(()), steps=1)


def bandwidths(num_bytes: int) -> dict[str, float]:
  """Measures the memory bandwidth by three functions, in bytes per second.

  Their names are 'sum', 'copy' and 'product', the product of a matrix and a
  vector. Each result has an entry for every row or number that is read, so that
  the compiler cannot leave out a part.

  Args:
    num_bytes: size of the array that each function reads.
  """
  copied = jnp.ones((num_bytes // 4,), jnp.float32)
  copy = Timed(lambda array, _: -array, copied, jnp.zeros_like(copied), steps=1)
  found = {"sum": num_bytes / median(large_sum(num_bytes)),
           "copy": 2 * num_bytes / median(copy)}
  del copied, copy  # the matrix takes their memory
  matrix = jnp.ones((num_bytes // 2 // _COLUMNS, _COLUMNS), jnp.bfloat16)
  product = lambda matrix, _: jnp.dot(
      matrix, jnp.ones((_COLUMNS,), matrix.dtype),
      preferred_element_type=jnp.float32)
  found["product"] = num_bytes / median(Timed(
      product, matrix, jnp.zeros((len(matrix),)), steps=1))
  return found


def bytes_read(model: Transformer, params: Any, slots: int) -> int:
  """Returns the number of bytes of weights, keys and values read in one pass.

  Args:
    model: model that makes the pass.
    params: parameters of the model.
    slots: number of filled cache slots, over all rows.
  """
  weights = sum(x.nbytes for x in jax.tree.leaves(params))
  if not model.config.tie_embeddings:  # a pass reads few rows of the embedding
    weights -= params["embedding"].nbytes
  c = model.config
  slot = 2 * c.layers * c.kv_heads * c.head_dim
  return weights + slots * slot * params["embedding"].dtype.itemsize


def fresh_times(calls: Mapping[Hashable, tuple[Callable, Any, Sequence]],
                seconds: float) -> dict[Hashable, float]:
  """Returns the minimum time of each call with weights outside the caches.

  The calls alternate, and each call uses other weights than the one before. All
  weights together must be much larger than the processor's caches. Otherwise a
  call could find its weights in a cache.

  Args:
    calls: `{name: (function, x, weights)}`. The timed call is `function(x, w)`,
      where w is an element of the sequence `weights`.
    seconds: total duration of the measurement in seconds.

  Returns:
    Minimum time of each call in seconds, by name.
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
  """Returns the median time per step in seconds, over `times` calls."""
  return statistics.median(timed() for _ in range(times))
