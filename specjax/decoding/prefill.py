"""Reading prompts into a cache."""

import jax
import jax.numpy as jnp

from specjax.interfaces import checks
from specjax.trees import topology
from specjax.types import ModelOutput
from specjax.types import Prompt

_CHUNK = 256  # tokens of a pass: bounds the [S, S] mask and the attention


def padded_length(longest: int) -> int:
  """Columns that prompts are padded to, so that few shapes are compiled.

  At most a quarter more than the longest prompt of more than 128 tokens: a
  model spends as long on padding as on text.
  """
  step = 32
  while step < _CHUNK and longest > 8 * step:
    step *= 2
  return -(-longest // step) * step


def chunk_size(columns: int) -> int:
  """Columns of a pass: the largest divisor of `columns` up to 256."""
  count = -(-columns // _CHUNK)
  while columns % count:
    count += 1
  return columns // count


def empty_cache(model, params, lengths: jax.Array, capacity: int):
  """A cache for texts of `lengths [B]`, of which it holds nothing yet.

  That nothing is there is not told to XLA, which would compute attention over
  empty slots while it compiles, and takes minutes for it.
  """
  cache = model.init_cache(params, lengths.shape[0], capacity)
  cache = cache.rollback(jnp.minimum(lengths, 0))
  return cache.until(lengths)


def read_prompt(model, params, prompt: Prompt) -> ModelOutput:
  """Runs a model over right-padded prompts, a chunk of columns at a time.

  Args:
    model: a `Model`.
    params: its parameters.
    prompt: `padded_length` columns.

  Returns:
    `hidden [B, P, D]` and a cache that holds all but the last token of every
    row: the root of the first draft is not in it. `logits` is None.
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
