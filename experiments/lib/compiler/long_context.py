"""Memory traffic of the cache for a drafted token with a long context.

The target's pass over one token is compiled with the full cache and with a view
of the cache. The programs are compiled for this machine or for a TPU. `hlo`
computes the number of bytes that each program moves. The traffic of the cache
is the traffic of a pass minus the traffic of the same pass with a small cache.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from lib.compiler import hlo
from lib.compiler import tpu_rounds
import specjax as sj
from specjax.models import Transformer

_FEW = 128  # slots of the small cache, the minimum for attention


def shape(**sizes: int) -> sj.models.TransformerConfig:
  """Returns a configuration with the given sizes and a context of 2**20 tokens.
  """
  return sj.models.TransformerConfig(context_length=1 << 20, **sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """Self-speculation of a target with a view of its cache.

  Attributes:
    config: configuration of the target.
    context: number of tokens in the context, equal to the number of cache
      slots.
    view: view of the cache for drafting.
    gamma: draft length. The view is built once per round.
    rows: batch size, B.
    dtype: dtype of weights and cache.
    sharding: sharding of all arguments. None compiles for this machine.
  """

  config: sj.models.TransformerConfig
  context: int
  view: Any
  gamma: int
  rows: int = 1
  dtype: Any = jnp.float32
  sharding: Any = None


def figures(setting: Setting) -> dict[str, float]:
  """Returns the memory traffic of the cache for one token.

  Returns:
    Dict of the cache traffic in bytes. "whole" is that of a pass with the full
    cache. "part" is that of a pass with the view. "opened" is that of building
    the view, once per round. "share" is (part + opened / gamma) / whole.
    "weights" is the size of the parameters in bytes.
  """
  model = sj.models.Transformer(setting.config)
  params = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, setting.dtype),
      jax.eval_shape(model.init, jax.random.key(0)))
  cache = lambda slots: jax.eval_shape(
      lambda p: model.init_cache(p, setting.rows, slots), params)
  chosen = jax.eval_shape(
      functools.partial(setting.view.choose, model), params,
      jax.ShapeDtypeStruct((setting.rows,), jnp.int32), cache(setting.context))
  view = jax.eval_shape(setting.view.open, chosen, cache(setting.context))
  few = view.replace(**{name: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((*x.shape[:2], _FEW, x.shape[3]), x.dtype),
      getattr(view, name)) for name in ("k", "v")})
  one_token = lambda cache: _bytes(
      lambda params, cache, tokens: _pass(model, params, tokens, cache),
      setting, params, cache, jax.ShapeDtypeStruct(
          (setting.rows, 1), jnp.int32))
  whole = one_token(cache(setting.context)) - one_token(cache(_FEW))
  part = one_token(view) - one_token(few)
  opened = _bytes(lambda chosen, cache: setting.view.open(chosen, cache),
                  setting, chosen, cache(setting.context))
  return {"whole": whole, "part": part, "opened": opened,
          "share": (part + opened / setting.gamma) / whole,
          "weights": sum(x.size * x.dtype.itemsize
                         for x in jax.tree.leaves(params))}


def _pass(model: Transformer, params: Any, tokens: jax.Array, cache: Any):
  """Returns the logits of a pass over one token, without the new cache."""
  cache = cache.reserve(1)
  out = model(params, tokens, jnp.zeros_like(tokens),
              jnp.ones((len(tokens), 1, 1), bool), cache)
  return out.logits


def _bytes(function: Callable, setting: Setting, *arguments: Any):
  """Returns the number of bytes that a compiled function moves.

  It includes the bytes that attention kernels read from caches.
  """
  arguments = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype,
                                     sharding=setting.sharding), arguments)
  compiled = jax.jit(function).lower(*arguments).compile()
  program = hlo.Program(compiled.as_text())
  return program.total + tpu_rounds.caches_read(program)
