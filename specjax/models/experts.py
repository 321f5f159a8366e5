"""Products with the experts of a mixture that the tokens of a pass chose.

A pass over few tokens is bound by memory, and its time is that of reading the
chosen experts. XLA has no operation that does this on all platforms:

  TPU   `jax.lax.ragged_dot` is a kernel that reads only the chosen experts
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

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

# A GPU reads the experts of up to this many pairs of a token and an expert one
# by one.
_FEW = 512
_Products = Callable[..., jax.Array]


def mixed(x: jax.Array, chosen: jax.Array, weights: jax.Array,
          gate_up: jax.Array, down: jax.Array, *,
          activation: Callable[[jax.Array], jax.Array],
          differentiable: bool = False) -> jax.Array:
  """Returns the weighted sum `[T, D]` float32 of the chosen experts' outputs.

  The output of an expert is down(activation(gate(x)) * up(x)). If the experts
  are split over a mesh axis, each device computes the outputs of its experts.

  Args:
    x: `[T, D]` inputs.
    chosen: `[T, k]` int32 ids of the experts of each token.
    weights: `[T, k]` float32 weights of these experts.
    gate_up: `[E, D, 2 * F]` kernels, for each expert the columns of the gate
      and then those of the up projection.
    down: `[E, F, D]` kernels.
    activation: activation of the gate.
    differentiable: if True, the result can be differentiated. On a CPU, such a
      pass reads all experts.
  """
  of = functools.partial(_on_device, activation=activation,
                         differentiable=differentiable)
  mesh = jax.typeof(gate_up).sharding.mesh
  axis = next((name for name in mesh.axis_names if name != "data"
               and mesh.shape[name] > 1), None)
  if axis is None or mesh.manual_axes:  # in a `shard_map` arrays are local
    return of(x, chosen, weights, gate_up, down)

  def local(x, chosen, weights, gate_up, down):
    # Experts of other devices have ids outside of the range.
    chosen = chosen - jax.lax.axis_index(axis) * len(gate_up)
    return jax.lax.psum(of(x, chosen, weights, gate_up, down), axis)

  rows = "data" if len(x) % mesh.shape.get("data", len(x) + 1) == 0 else None
  rows, split = PartitionSpec(rows), PartitionSpec(axis)
  return jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3 + (split,) * 2,
                       out_specs=rows, check_vma=False)(
                           x, chosen, weights, gate_up, down)


def _on_device(x, chosen, weights, gate_up, down, *, activation,
               differentiable):
  """Computes `mixed` on one device. Ids outside of [0, E) add nothing."""
  operands = x, chosen, weights, gate_up, down

  def gated(both: jax.Array) -> jax.Array:
    gate, up = jnp.split(both, 2, axis=-1)
    return (activation(gate) * up).astype(x.dtype)

  all_experts = functools.partial(_loop, gated, every=True)
  return jax.lax.platform_dependent(
      *operands, tpu=functools.partial(_grouped, gated),
      cpu=all_experts if differentiable else functools.partial(
          _loop, gated, every=False),
      default=functools.partial(_pairs, gated)
      if chosen.size <= _FEW and not differentiable else all_experts)


def _loop(gated, x, chosen, weights, gate_up, down, *, every):
  """Multiplies each chosen expert (or every expert) with all tokens."""
  hits = chosen[..., None] == jnp.arange(len(gate_up))  # [T, k, E]
  weights = jnp.sum(jnp.where(hits, weights[..., None], 0), axis=1)
  used = jnp.any(hits, axis=(0, 1))
  order = jnp.argsort(~used, stable=True)

  def add(i, total):
    expert = order[i]
    of = lambda kernels: jax.lax.dynamic_index_in_dim(
        kernels, expert, keepdims=False)
    out = _product(gated(_product(x, of(gate_up))), of(down))
    return total + out * weights[:, expert, None]

  return jax.lax.fori_loop(0, len(gate_up) if every else jnp.sum(used), add,
                           jnp.zeros(x.shape, _wide(x)))


def _grouped(gated, x, chosen, weights, gate_up, down):
  """Multiplies tokens, sorted by expert, with the kernels of their expert."""
  count, (tokens, some) = len(gate_up), chosen.shape
  inside = (chosen >= 0) & (chosen < count)
  flat = jnp.where(inside, chosen, count).reshape(-1)
  order = jnp.argsort(flat, stable=True)
  sizes = jnp.sum(flat[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
  grouped = lambda rows, kernels: jax.lax.ragged_dot(
      rows, kernels, sizes, preferred_element_type=_wide(x))
  out = grouped(gated(grouped(x[order // some], gate_up)), down)
  # Rows of no group are not written.
  out = jnp.where((flat < count)[order, None], out, 0)
  back = out[jnp.argsort(order)].reshape(tokens, some, -1)
  return jnp.sum(back * weights[..., None], axis=1)


def _pairs(gated, x, chosen, weights, gate_up, down):
  """Multiplies each token with the kernels of each of its experts."""
  inside = (chosen >= 0) & (chosen < len(gate_up))
  expert = jnp.where(inside, chosen, 0).reshape(-1)
  of = jax.vmap(lambda row, i, kernels: _product(row, kernels[i]),
                in_axes=(0, 0, None))
  rows = jnp.repeat(x, chosen.shape[1], axis=0)
  out = of(gated(of(rows, expert, gate_up)), expert, down)
  return jnp.sum(out.reshape(*chosen.shape, -1)
                 * jnp.where(inside, weights, 0)[..., None], axis=1)


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  return jnp.dot(x, kernel, preferred_element_type=_wide(x))


def _wide(x: jax.Array):
  return jnp.promote_types(x.dtype, jnp.float32)
