"""What a drafted token reads of a long context, by the compiler's text.

The pass of a target over one token is compiled with its full cache and with a
view of it, for this machine or for a TPU. The bytes that the programs move are
counted (`hlo`). Traffic of the cache is the traffic of a pass minus that of the
same pass with a cache of few slots.
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

_FEW = 128  # slots, as few as attention is compiled for


def shape(**sizes: int) -> sj.models.TransformerConfig:
  """A decoder of these sizes for texts of any length."""
  return sj.models.TransformerConfig(context_length=1 << 20, **sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """A target and how it drafts for itself.

  Attributes:
    config: of the target.
    context: tokens of the text, all slots of the cache.
    view: what a draft reads.
    gamma: drafted tokens of a round, for which the view is opened once.
    rows: B.
    dtype: of weights and cache.
    sharding: where the programs run; None: on this machine.
  """

  config: sj.models.TransformerConfig
  context: int
  view: Any
  gamma: int
  rows: int = 1
  dtype: Any = jnp.float32
  sharding: Any = None


def figures(setting: Setting) -> dict[str, float]:
  """Bytes that a token moves of the cache, the weights left out.

  Returns:
    `whole`, of a pass with all of the cache; `part`, of one with a view;
    `opened`, to copy the view together, once a round; `share`, of a drafted
    token whose pass is its own, with its part of the copying; `weights`, for
    comparison, of the parameters.
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
  """Logits of a pass over a token, of whose cache nothing is written."""
  cache = cache.reserve(1)
  out = model(params, tokens, jnp.zeros_like(tokens),
              jnp.ones((len(tokens), 1, 1), bool), cache)
  return out.logits


def _bytes(function: Callable, setting: Setting, *arguments: Any):
  """That the compiled function moves, kernels included."""
  arguments = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype,
                                     sharding=setting.sharding), arguments)
  compiled = jax.jit(function).lower(*arguments).compile()
  program = hlo.Program(compiled.as_text())
  return program.total + tpu_rounds.caches_read(program)
