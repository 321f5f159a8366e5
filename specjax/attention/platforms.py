"""Operations that are lowered differently for every platform.

`jax.lax.platform_dependent` would trace all versions wherever one is lowered,
and a kernel takes a tenth of a second to trace. Here a version is traced where
a program is lowered for its platform, which may be another than the machine's.
"""

import functools

import jax
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

from specjax.attention import plain


def _anywhere(attend):
  """A version that leaves to the compiler how a mesh divides the heads."""
  def undivided(*operands, heads_axis, **options):
    del heads_axis
    return attend(*operands, **options)

  return undivided


@_anywhere
def _cuda(*operands, **options):
  from specjax.attention import gpu  # pylint: disable=g-import-not-at-top
  return gpu.past_attention(*operands, **options)


def _tpu(*operands, **options):
  from specjax.attention import tpu  # pylint: disable=g-import-not-at-top
  return tpu.past_attention(*operands, **options)


def _merged(query, k, v, lengths, block_k, block_v, visible, positions, table,
            *, window, softcap, heads_axis):
  """`attention.attend` by its two parts, the past as its platform has it."""
  past = past_attention(query, k, v, lengths, positions, table, window=window,
                        softcap=softcap, heads_axis=heads_axis)
  block = plain.block_attention(query, block_k, block_v, visible,
                                softcap=softcap)
  return plain.merge(past, block)[0]


@_anywhere
def _plain(query, k, v, lengths, block_k, block_v, visible, positions, table,
           *, window, softcap):
  """`_merged` in plain XLA, which has a derivative."""
  past = plain.whole(query, k, v, lengths, positions, table, window=window,
                     softcap=softcap)
  block = plain.block_attention(query, block_k, block_v, visible,
                                softcap=softcap)
  return (plain.merge(past, block)[0],)


def _named(attend, count):
  """A version that is told which of two operands are there after `count`."""
  def with_operands(*operands, placed, paged, **options):
    more = operands[count:]
    return attend(*operands[:count], more[0] if placed else None,
                  more[-1] if paged else None, **options)

  return with_operands


def _primitive(name, count, versions, shapes):
  """An operation of `count` operands, perhaps positions and perhaps a table.

  Args:
    name: of the operation.
    count: see above; each has B first, but for pages.
    versions: {platform: function}, None for all others.
    shapes: from the shape of the first operand to those of the results.
  """
  one = Primitive(name)
  one.multiple_results = True
  # As cuDNN's does, which the lowering for GPUs holds. No public name does it.
  dispatch.prim_requires_devices_during_lowering.add(one)
  as_list = lambda attend: lambda *operands, **options: jax.tree.leaves(
      _named(attend, count)(*operands, **options))
  one.def_impl(as_list(versions[None]))
  for platform, attend in versions.items():
    mlir.register_lowering(one, mlir.lower_fun(
        as_list(attend), multiple_results=True), platform)

  @one.def_abstract_eval
  def _(query, *operands, **options):
    del operands, options
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return [jax.core.ShapedArray(shape, wide) for shape in shapes(query.shape)]

  def batched(operands, axes, *, paged, **options):
    """More rows, and more pages: what is mapped joins the first axis."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes)
                if axis is not None)
    mapped = [jnp.broadcast_to(x, (size, *x.shape)) if axis is None else
              jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes)]
    if paged:
      before = jnp.arange(size, dtype=jnp.int32) * mapped[1].shape[1]
      mapped[-1] = mapped[-1] + before[:, None, None]
    found = one.bind(*(x.reshape(-1, *x.shape[2:]) for x in mapped),
                     paged=paged, **options)
    return [x.reshape(size, -1, *x.shape[1:]) for x in found], [0] * len(found)

  batching.primitive_batchers[one] = batched
  return one


_past = _primitive(
    "past_attention", 4, {None: _anywhere(plain.whole),
                          "cpu": _anywhere(plain.bucketed), "cuda": _cuda,
                          "tpu": _tpu},
    lambda shape: (shape, shape[:3]))
_whole = _primitive(
    "attend", 7, {None: _merged, "cpu": _anywhere(plain.joint)},
    lambda shape: (shape,))


def _applied(one, count, plainly, operands, positions, table, **options):
  """An operation, whose derivative is that of a version in plain XLA."""
  more = [x for x in (positions, table) if x is not None]
  options |= dict(placed=positions is not None, paged=table is not None)
  apply = jax.custom_jvp(
      lambda *operands: tuple(one.bind(*operands, **options)))
  apply.defjvp(functools.partial(jax.jvp, functools.partial(
      _named(plainly, count), **options)))
  return apply(*operands, *more)


def past_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                   lengths: jax.Array, positions: jax.Array | None,
                   table: jax.Array | None, *, window: int, softcap: float,
                   heads_axis: str | None) -> plain.Part:
  """`attention.past_attention`."""
  return _applied(_past, 4, _anywhere(plain.whole), (query, k, v, lengths),
                  positions, table, window=window, softcap=softcap,
                  heads_axis=heads_axis)


def attend(query: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array,
           block_k: jax.Array, block_v: jax.Array, visible: jax.Array,
           positions: jax.Array | None, table: jax.Array | None, *,
           window: int, softcap: float, heads_axis: str | None) -> jax.Array:
  """`attention.attend`."""
  visible = jnp.broadcast_to(visible, (len(query), *visible.shape[1:]))
  [out] = _applied(_whole, 7, _plain, (
      query, k, v, lengths, block_k, block_v, visible), positions, table,
                   window=window, softcap=softcap, heads_axis=heads_axis)
  return out
