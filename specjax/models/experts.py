"""Products with the experts of a mixture that the tokens of a pass chose.

A pass over few tokens is bound by memory, and its time is that of reading the
chosen experts. XLA has no operation that reads only these on all platforms:

  TPU   a kernel whose steps are the chosen experts. Many tokens, passes that
        are differentiated, experts with biases and widths that are no multiple
        of 128 use `jax.lax.ragged_dot`. With few tokens, XLA copies all experts
        of a device to on-chip memory for it, if they fit.
  CPU   a loop over the chosen experts, each multiplied with all tokens
  GPU   one product of a matrix and a vector for each token and chosen expert,
        into which XLA fuses the gather of the experts. Many tokens, and passes
        that are differentiated, use a loop over all experts.

On a CPU and a GPU, `ragged_dot` multiplies every expert with every token. A
loop with as many steps as there are chosen experts would make a GPU wait for
the host.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec

# Maximum number of tokens of the kernel, and of pairs of a token and an expert
# that a GPU multiplies one by one.
_FEW_TOKENS, _FEW_PAIRS = 128, 512
_LANES, _SUBLANES = 128, 16
_BUDGET = 4 * 2**20  # bytes of a block of gate, up and down in on-chip memory


def mixed(x: jax.Array, chosen: jax.Array, weights: jax.Array,
          gate_up: jax.Array, down: jax.Array, bias: jax.Array | None = None, *,
          gated: Callable[[jax.Array, jax.Array], jax.Array],
          differentiable: bool = False) -> jax.Array:
  """Returns the weighted sum `[T, D]` float32 of the chosen experts' outputs.

  The output of an expert is down(gated(gate(x), up(x))). If the experts
  are split over a mesh axis, each device computes the outputs of its experts.

  Args:
    x: `[T, D]` inputs.
    chosen: `[T, k]` int32 ids of the experts of each token.
    weights: `[T, k]` float32 weights of these experts.
    gate_up: `[E, D, 2 * F]` kernels, for each expert the columns of the gate
      and then those of the up projection.
    down: `[E, F, D]` kernels.
    bias: `[E, 2 * F]` biases of `gate_up`, or None.
    gated: function of the gate and the up projection.
    differentiable: if True, the result can be differentiated. On a CPU and a
      GPU, such a pass reads all experts.
  """
  of = functools.partial(_on_device, gated=gated,
                         differentiable=differentiable)
  mesh = jax.typeof(gate_up).sharding.mesh
  if mesh.size <= 1 or mesh.manual_axes:  # in a `shard_map` arrays are local
    return of(x, chosen, weights, gate_up, down, bias)
  axis = next((name for name in mesh.axis_names
               if name != "data" and mesh.shape[name] > 1), None)

  def local(x, chosen, weights, gate_up, down, bias):
    if axis is None:
      return of(x, chosen, weights, gate_up, down, bias)
    # Experts of other devices have ids outside of [0, E).
    chosen = chosen - jax.lax.axis_index(axis) * len(gate_up)
    return jax.lax.psum(of(x, chosen, weights, gate_up, down, bias), axis)

  rows = "data" if len(x) % mesh.shape.get("data", len(x) + 1) == 0 else None
  rows, split = PartitionSpec(rows), PartitionSpec(axis)
  return jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3 + (split,) * 3,
                       out_specs=rows, check_vma=False)(
                           x, chosen, weights, gate_up, down, bias)


def _on_device(*operands, gated, differentiable):
  """Computes `mixed` on one device. Ids outside of [0, E) add nothing."""
  x, chosen, _, _, down, bias = operands
  few = len(x) <= _FEW_TOKENS and x.dtype in (jnp.float32, jnp.bfloat16) and (
      not any(size % _LANES for size in down.shape[1:]))
  by = lambda function, **options: functools.partial(
      function, gated, **options)
  return jax.lax.platform_dependent(
      *operands, cpu=by(_loop, every=differentiable),
      tpu=by(_grouped) if differentiable or not few or bias is not None else (
          lambda *operands: _kernel(gated, *operands[:5])),
      default=by(_pairs) if chosen.size <= _FEW_PAIRS and not differentiable
      else by(_loop, every=True))


def _gated(gated, x, both, bias):
  both = both if bias is None else both + bias
  return gated(*jnp.split(both, 2, axis=-1)).astype(x.dtype)


def _in_order(chosen, weights, count):
  """Returns the weights `[T, E]`, the experts `[E]`, chosen first, and number.
  """
  hits = chosen[..., None] == jnp.arange(count)  # [T, k, E]
  used = jnp.any(hits, axis=(0, 1))
  return (jnp.sum(jnp.where(hits, weights[..., None], 0), axis=1),
          jnp.argsort(~used, stable=True).astype(jnp.int32),
          jnp.sum(used, dtype=jnp.int32))


def _loop(gated, x, chosen, weights, gate_up, down, bias=None, *, every):
  """Multiplies each chosen expert (or every expert) with all tokens."""
  weights, order, used = _in_order(chosen, weights, len(gate_up))

  def add(i, total):
    expert = order[i]
    of = lambda kernels: jax.lax.dynamic_index_in_dim(
        kernels, expert, keepdims=False)
    out = _product(_gated(gated, x, _product(x, of(gate_up)), jax.tree.map(
        of, bias)), of(down))
    return total + out * weights[:, expert, None]

  return jax.lax.fori_loop(0, len(gate_up) if every else used, add,
                           jnp.zeros(x.shape, _wide(x)))


def _grouped(gated, x, chosen, weights, gate_up, down, bias=None):
  """Multiplies tokens, sorted by expert, with the kernels of their expert."""
  count, (tokens, some) = len(gate_up), chosen.shape
  inside = (chosen >= 0) & (chosen < count)
  flat = jnp.where(inside, chosen, count).reshape(-1)
  order = jnp.argsort(flat, stable=True)
  sizes = jnp.sum(flat[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
  grouped = lambda rows, kernels: jax.lax.ragged_dot(
      rows, kernels, sizes, preferred_element_type=_wide(x))
  rows = x[order // some]
  if bias is not None:
    bias = bias[jnp.minimum(flat[order], count - 1)]
  out = grouped(_gated(gated, x, grouped(rows, gate_up), bias), down)
  # Rows of no group are not written.
  out = jnp.where((flat < count)[order, None], out, 0)
  back = out[jnp.argsort(order)].reshape(tokens, some, -1)
  return jnp.sum(back * weights[..., None], axis=1)


def _pairs(gated, x, chosen, weights, gate_up, down, bias=None):
  """Multiplies each token with the kernels of each of its experts."""
  inside = (chosen >= 0) & (chosen < len(gate_up))
  expert = jnp.where(inside, chosen, 0).reshape(-1)
  of = jax.vmap(lambda row, i, kernels: _product(row, kernels[i]),
                in_axes=(0, 0, None))
  rows = jnp.repeat(x, chosen.shape[1], axis=0)
  out = of(_gated(gated, x, of(rows, expert, gate_up), None if bias is None
                  else bias[expert]), expert, down)
  return jnp.sum(out.reshape(*chosen.shape, -1)
                 * jnp.where(inside, weights, 0)[..., None], axis=1)


def _kernel(gated, x, chosen, weights, gate_up, down, *, interpret=False):
  """Multiplies each chosen expert with all tokens, in a kernel for TPUs."""
  (count, width, _), inner = gate_up.shape, down.shape[1]
  steps = min(count, chosen.size)
  weights, order, used = _in_order(chosen, weights, count)
  order = order[jnp.minimum(jnp.arange(steps), jnp.maximum(used - 1, 0))]
  tokens = len(x)
  x, weights = (jnp.pad(y, ((0, -tokens % _SUBLANES), (0, 0)))
                for y in (x, weights))
  tile = next(n for n in range(inner, 0, -_LANES) if inner % n == 0 and (
      n == _LANES or 3 * n * width * x.dtype.itemsize <= _BUDGET))
  tiles = inner // tile

  # Steps after the last chosen expert repeat the index of its last block. The
  # kernel does not fetch a repeated block again.
  def block(of: Callable[..., Any]) -> Callable[..., Any]:
    return lambda i, j, used, order: of(
        order[i], jnp.where(i < used[0], j, tiles - 1))

  def run(used, _, x, weights, gate, up, down, out):
    i = pl.program_id(0)

    @pl.when((i == 0) & (pl.program_id(1) == 0))
    def _():
      out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when(i < used[0])
    def _():
      hidden = gated(_product(x[...], gate[0]), _product(x[...], up[0])).astype(
          x.dtype)
      out[...] += _product(hidden, down[0]) * weights[0]

  whole = pl.BlockSpec(x.shape, lambda i, j, *_: (0, 0))
  columns = lambda first: pl.BlockSpec(
      (1, width, tile), block(lambda e, j: (e, 0, first + j)))
  # Without this constraint, XLA may copy all experts to on-chip memory.
  gate_up, down = (y if interpret else pltpu.with_memory_space_constraint(
      y, pltpu.HBM) for y in (gate_up, down))
  return pl.pallas_call(
      run, grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=2, grid=(steps, tiles),
          in_specs=[whole, pl.BlockSpec((1, len(x), 1),
                                        lambda i, j, *_: (i, 0, 0)),
                    columns(0), columns(tiles), pl.BlockSpec(
                        (1, tile, width), block(lambda e, j: (e, j, 0)))],
          out_specs=whole),
      out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
      interpret=interpret, name="experts")(
          used[None], order, x, weights.T[order][..., None], gate_up, gate_up,
          down)[:tokens]


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  return jnp.dot(x, kernel, preferred_element_type=_wide(x))


def _wide(x: Any) -> Any:
  return jnp.promote_types(x.dtype, jnp.float32)
