"""One operation that is lowered differently for every platform.

`jax.lax.platform_dependent` would trace all versions wherever one is lowered,
and a kernel takes a tenth of a second to trace. Here a version is traced where
a program is lowered for its platform, which may be another than the machine's.
"""

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

from specjax.attention import plain


def _cuda(*operands, **options):
  from specjax.attention import gpu  # pylint: disable=g-import-not-at-top
  return gpu.past_attention(*operands, **options)


def _tpu(*operands, **options):
  from specjax.attention import tpu  # pylint: disable=g-import-not-at-top
  return tpu.past_attention(*operands, **options)


def _named(attend):
  """A version that is told which operands are there."""
  def with_operands(query, k, v, lengths, *more, placed, paged, **options):
    positions = more[0] if placed else None
    return attend(query, k, v, lengths, positions, more[-1] if paged else None,
                  **options)

  return with_operands


_primitive = Primitive("past_attention")
_primitive.multiple_results = True
_primitive.def_impl(_named(plain.whole))
for _platform, _attend in ((None, plain.whole), ("cpu", plain.bucketed),
                           ("cuda", _cuda), ("tpu", _tpu)):
  mlir.register_lowering(_primitive, mlir.lower_fun(
      _named(_attend), multiple_results=True), _platform)


@_primitive.def_abstract_eval
def _shapes(query, *operands, **options):
  del operands, options
  wide = jnp.promote_types(query.dtype, jnp.float32)
  return (jax.core.ShapedArray(query.shape, wide),
          jax.core.ShapedArray(query.shape[:3], wide))


def _batched(operands, axes, *, paged, **options):
  """More rows, and more pages: what is mapped joins the first axis."""
  size = next(x.shape[axis] for x, axis in zip(operands, axes)
              if axis is not None)
  mapped = [jnp.broadcast_to(x, (size, *x.shape)) if axis is None else
            jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes)]
  if paged:
    before = jnp.arange(size, dtype=jnp.int32) * mapped[1].shape[1]
    mapped[-1] = mapped[-1] + before[:, None, None]
  parts = _primitive.bind(*(x.reshape(-1, *x.shape[2:]) for x in mapped),
                          paged=paged, **options)
  return ([x.reshape(size, -1, *x.shape[1:]) for x in parts], [0, 0])


batching.primitive_batchers[_primitive] = _batched


def past_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                   lengths: jax.Array, positions: jax.Array | None,
                   table: jax.Array | None, *, window: int, softcap: float
                   ) -> plain.Part:
  """`attention.past_attention`; the derivative is that of `plain.whole`."""
  more = [x for x in (positions, table) if x is not None]
  options = dict(window=window, softcap=softcap, placed=positions is not None,
                 paged=table is not None)
  attend = jax.custom_jvp(
      lambda *operands: tuple(_primitive.bind(*operands, **options)))
  attend.defjvp(functools.partial(jax.jvp, functools.partial(
      _named(plain.whole), **options)))
  return attend(query, k, v, lengths, *more)
