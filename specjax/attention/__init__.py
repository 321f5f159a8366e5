"""Attention over a cache that a pass only reads, by platform.

  attend           over both of the following, with one softmax
  past_attention   over the committed tokens, which all queries see
  block_attention  within the block of a pass, by a mask
  merge            of the two

The last three return a part: the output, and the logarithm of the sum of the
weights.
"""

import functools

import jax

from specjax.attention import platforms
from specjax.attention.plain import block_attention
from specjax.attention.plain import merge
from specjax.attention.plain import Part

__all__ = ["Part", "attend", "block_attention", "merge", "past_attention"]


# Under a jit of its own, so that all layers of a model share a trace.
@functools.partial(
    jax.jit, static_argnames=("window", "softcap", "heads_axis"))
def attend(query: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array,
           block_k: jax.Array, block_v: jax.Array, visible: jax.Array, *,
           positions: jax.Array | None = None, table: jax.Array | None = None,
           window: int = 0, softcap: float = 0.0,
           heads_axis: str | None = "model") -> jax.Array:
  """Attention of S tokens over the committed slots and the block of a pass.

  On a CPU one softmax is over both; elsewhere two parts are merged.

  Args:
    query: `[B, S, H * G, D]`, G query heads for each key-value head.
    k: see `past_attention`.
    v: see `past_attention`.
    lengths: see `past_attention`.
    block_k: `[B, H, T, D]`.
    block_v: `[B, H, T, D]`.
    visible: `[B or 1, S, T]` bool, which tokens of the block a query sees.
    positions: see `past_attention`.
    table: see `past_attention`.
    window: see `past_attention`; for the block `visible` says it.
    softcap: see `past_attention`.
    heads_axis: see `past_attention`.

  Returns:
    `[B, S, H * G, D]`, float32 at least.
  """
  return platforms.attend(
      query, k, v, lengths, block_k, block_v, visible, positions, table,
      window=window, softcap=softcap, heads_axis=heads_axis)


# Under a jit of its own, so that all layers of a model share a trace.
@functools.partial(
    jax.jit, static_argnames=("window", "softcap", "heads_axis"))
def past_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                   lengths: jax.Array, *, positions: jax.Array | None = None,
                   table: jax.Array | None = None, window: int = 0,
                   softcap: float = 0.0, heads_axis: str | None = "model"
                   ) -> Part:
  """Attention of S tokens over the committed slots of a cache.

  On a CPU the cost follows the longest row in use, by a `switch` over lengths.
  On a TPU it follows each row, by a kernel of our own (`attention.tpu`), which
  a mesh splits by rows over its axis "data" and by key-value heads over
  `heads_axis`. On a GPU cuDNN follows each row (`attention.gpu`) in float16 and
  bfloat16. What these two do not take attends over all slots, masked. Pages are
  read as they lie on a TPU; elsewhere they are put in order first.

  Args:
    query: `[B, S, H * G, D]`, G query heads for each key-value head.
    k: `[B, H, C, D]`, or pages `[P, H, T, D]` where a table is given.
    v: as `k`.
    lengths: `[B]` int32, slots that count, from the first.
    positions: `[B, S]` int32, of the queries; only a window asks for them.
    table: `[B, C / T]` int32, the pages of each row, in order; after the last
      one in use any pages.
    window: how many positions back each query sees, itself included; 0: all.
    softcap: c of c tanh(scores / c); 0: none.
    heads_axis: the mesh axis that divides the key-value heads on a TPU, where
      it does; None: every device attends with all heads, as it must where it
      has all of them and nothing is to be sent.

  Returns:
    `(out [B, S, H * G, D], log [B, S, H * G])`, float32 at least. A query that
    sees nothing has a `log` below any that sees something, and any finite
    `out`.
  """
  return platforms.past_attention(
      query, k, v, lengths, positions, table, window=window, softcap=softcap,
      heads_axis=heads_axis)
