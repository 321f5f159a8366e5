"""Published peak figures of accelerators, and rounds compiled for one chip.

libtpu reads its environment variables when it is loaded, see `tpu_compiler`.
"""

from typing import Any
from typing import NamedTuple

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import numpy as np

from lib.compiler import hlo
from lib.compiler import tpu_rounds
import specjax as sj


class Chip(NamedTuple):
  """Peak figures of one chip.

  Attributes:
    bandwidth: bytes per second of the main memory.
    flops: bfloat16 operations per second of dense matrix products.
  """

  bandwidth: float
  flops: float

  def seconds(self, counts: Any) -> Any:
    """Returns the time of a program from `[..., 2]` bytes and operations.

    Memory traffic and arithmetic overlap, so the slower of the two decides
    (roofline: Williams et al. 2009, doi:10.1145/1498765.1498785).
    """
    return np.maximum(counts[..., 0] / self.bandwidth,
                      counts[..., 1] / self.flops)


CHIPS = {
    "v5e": Chip(tpu_rounds.BANDWIDTH["v5e"], 197e12),
    "v5p": Chip(tpu_rounds.BANDWIDTH["v5p"], 459e12),
    "v6e": Chip(tpu_rounds.BANDWIDTH["v6e"], 918e12),
    "h100": Chip(3350e9, 989e12),  # SXM
    "h200": Chip(4800e9, 989e12),
}


def counts(decoder: sj.Decoder, params: Any, batch: int, capacity: int
           ) -> tuple[float, float, float]:
  """Compiles a round for one chip of a TPU v5e and counts its costs.

  Weights and caches are bfloat16.

  Args:
    decoder: decoder of the round.
    params: `{"target": ..., "drafter": ...}`; only the shapes are used.
    batch: number of rows B of the batch.
    capacity: number of cache slots per row.

  Returns:
    The bytes of main memory that the round moves with empty caches, the
    additional bytes with all slots in use, and the floating-point operations.
  """
  chip = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
  at = jax.sharding.SingleDeviceSharding(chip)
  shape = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype, sharding=at)
  params = jax.tree.map(lambda x: shape(
      x, jnp.bfloat16 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype),
                        params)
  state = jax.eval_shape(
      lambda params, key: decoder.prefill(
          params, [[0]] * batch, key, limits=capacity - decoder.num_nodes,
          capacity=capacity), params, jax.random.key(0))
  state = jax.tree.map(lambda x: shape(x, x.dtype), state)
  compiled = jax.jit(decoder.decode_round, donate_argnames="state").trace(
      params, state).lower().compile()
  program = hlo.Program(compiled.as_text())
  return (program.total, tpu_rounds.caches_read(program),
          compiled.cost_analysis()["flops"])
