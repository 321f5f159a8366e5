"""Attention over a cache that a pass only reads, by platform.

  past_attention   over the committed tokens, which all queries see
  block_attention  within the block of a pass, by a mask
  merge            of the two

Each returns a part: the output, and the logarithm of the sum of the weights.
"""

import functools

import jax

from specjax.attention import plain
from specjax.attention.plain import block_attention
from specjax.attention.plain import merge
from specjax.attention.plain import Part

__all__ = ["Part", "block_attention", "merge", "past_attention"]


# Under a jit of its own, so that all layers of a model share a trace.
@functools.partial(jax.jit, static_argnames=("window", "softcap"))
def past_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                   lengths: jax.Array, *, positions: jax.Array | None = None,
                   window: int = 0, softcap: float = 0.0) -> Part:
  """Attention of S tokens over the committed slots of a cache.

  On a CPU the cost follows the longest row in use; elsewhere the capacity of
  the cache, for a `switch` fetches its operands before it chooses.

  Args:
    query: `[B, S, H * G, D]`, G query heads for each key-value head.
    k: `[B, H, C, D]`.
    v: `[B, H, C, D]`.
    lengths: `[B]` int32, slots that count, from the first.
    positions: `[B, S]` int32, of the queries; only a window asks for them.
    window: how many positions back each query sees, itself included; 0: all.
    softcap: c of c tanh(scores / c); 0: none.

  Returns:
    `(out [B, S, H * G, D], log [B, S, H * G])`, float32 at least. A query that
    sees nothing has a `log` below any that sees something, and any finite
    `out`.
  """
  by = lambda attend: functools.partial(attend, window=window, softcap=softcap)
  # Decided where the program is lowered, which may be for another platform.
  return jax.lax.platform_dependent(
      query, k, v, lengths, positions, cpu=by(plain.bucketed),
      default=by(plain.whole))
