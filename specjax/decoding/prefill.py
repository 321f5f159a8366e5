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

_CHUNK = 256  # maximum tokens S of a pass, which has an [S, S] attention mask


def padded_length(longest: int) -> int:
  """Returns the number of columns to which prompts are padded.

  Each number of columns requires a compiled program, so there are few of them.
  A padding token costs a model as much as a real token. So if the longest
  prompt has more than 128 tokens, at most a quarter of its row is padding.

  Args:
    longest: number of tokens of the longest prompt.
  """
  step = 32
  while step < _CHUNK and longest > 8 * step:
    step *= 2
  return -(-longest // step) * step


def chunk_size(columns: int) -> int:
  """Returns the number of columns of a pass over prompts of `columns` columns.

  It is the largest divisor of `columns` up to 256.
  """
  count = -(-columns // _CHUNK)
  while columns % count:
    count += 1
  return columns // count


def empty_cache(model: Model, params: chex.ArrayTree, lengths: jax.Array,
                capacity: int) -> Cache:
  """Returns an empty cache for prompts of `lengths [B]` tokens.

  The lengths of an empty cache are 0. This function computes the zeros from
  `lengths`. With constants, XLA would evaluate attention over the empty slots
  at compile time, which takes minutes.
  """
  cache = model.init_cache(params, lengths.shape[0], capacity)
  cache = cache.rollback(jnp.minimum(lengths, 0))
  return cache.until(lengths)


def read_prompt(model: Model, params: chex.ArrayTree, prompt: Prompt
                ) -> ModelOutput:
  """Runs a model over right-padded prompts, one chunk of columns per pass.

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
