"""Reading prompts into a cache."""


import chex
import jax
import jax.numpy as jnp

from specjax.interfaces import Cache
from specjax.interfaces import checks
from specjax.interfaces import Model
from specjax.trees import topology
from specjax.types import ModelOutput
from specjax.types import Prompt

_CHUNK = 256  # most tokens S of a pass: bounds its [S, S] attention mask


def padded_length(longest: int) -> int:
  """Returns the number of columns that prompts are padded to.

  Each number of columns is a compiled program, so there are few of them. A
  padded token costs a model as much as a real one. So for prompts of more than
  128 tokens, at most a quarter is padding.
  """
  step = 32
  while step < _CHUNK and longest > 8 * step:
    step *= 2
  return -(-longest // step) * step


def chunk_size(columns: int) -> int:
  """Returns the columns of a pass: the largest divisor of `columns` up to 256.
  """
  count = -(-columns // _CHUNK)
  while columns % count:
    count += 1
  return columns // count


def empty_cache(model: Model, params: chex.ArrayTree, lengths: jax.Array,
                capacity: int) -> Cache:
  """Returns an empty cache for sequences of `lengths [B]`.

  An empty cache has lengths 0. They are computed from data here. With a
  constant 0, XLA would evaluate attention over the empty slots at compile time,
  which takes minutes.
  """
  cache = model.init_cache(params, lengths.shape[0], capacity)
  cache = cache.rollback(jnp.minimum(lengths, 0))
  return cache.until(lengths)


def read_prompt(model: Model, params: chex.ArrayTree, prompt: Prompt
                ) -> ModelOutput:
  """Runs a model over right-padded prompts, a chunk of columns at a time.

  Args:
    model: model that reads the prompts.
    params: parameters of the model.
    prompt: B prompts, padded to P = `padded_length` columns.

  Returns:
    The hidden states `[B, P, D]`, and a cache without the last token of every
    row, because this token is the root of the first draft. `logits` is None.
  """
  batch, columns = prompt.tokens.shape
  size = chunk_size(columns)
  chunks = prompt.tokens.reshape(batch, -1, size).swapaxes(0, 1)
  depths, causal = topology.causal(batch, size)

  def read(cache, tokens):
    out = model(params, tokens, depths, causal, cache)
    checks.check_output(
        type(model).__name__, out, batch, size, model.vocab_size)
    return out.cache.rollback(cache.lengths + size), out.hidden

  cache, hidden = jax.lax.scan(
      read, empty_cache(model, params, prompt.lengths, prompt.capacity), chunks)
  hidden = hidden.swapaxes(0, 1).reshape(batch, columns, -1)
  return ModelOutput(logits=None, hidden=hidden,
                     cache=cache.rollback(prompt.lengths - 1))
