"""Attention over a key-value cache, with an implementation for each platform.

  attend           over the committed tokens and the block of a pass
  past_attention   over the committed tokens, seen by all queries
  block_attention  within the block of a pass, with a mask
  merge            combines two parts
  with_sinks       adds a sink to each head of the last part

A *part* is the output of attention over some of the keys, together with the
logarithm of the sum of its weights (log-sum-exp of the scores). The three
functions before the last return parts. No function writes to the cache.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.attention import plain
from specjax.attention import tpu
from specjax.attention.plain import block_attention
from specjax.attention.plain import merge
from specjax.attention.plain import Part
from specjax.attention.plain import with_sinks

__all__ = ["Part", "attend", "block_attention", "merge", "past_attention",
           "with_sinks"]

_CUDNN_DTYPES = (jnp.float16, jnp.bfloat16)
_CUDNN_WIDEST = 128  # channels of a head; only Hopper and later support 256


# A separate jit, so that all layers of a model share one trace.
@functools.partial(
    jax.jit, static_argnames=("window", "softcap", "heads_axis"))
def attend(query: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array,
           block_k: jax.Array, block_v: jax.Array, visible: jax.Array, *,
           positions: jax.Array | None = None, table: jax.Array | None = None,
           window: int = 0, softcap: float = 0.0,
           heads_axis: str | None = "model",
           sink_logits: jax.Array | None = None) -> jax.Array:
  """Returns attention of S tokens over the committed slots and their block.

  A CPU computes one softmax over both. Other platforms merge two parts, and
  every platform does with sinks, which need the log-sum-exp of the scores.

  Args:
    query: `[B, S, H * G, D]` queries, G query heads per key-value head.
    k: keys, see `past_attention`.
    v: values, see `past_attention`.
    lengths: number of committed slots, see `past_attention`.
    block_k: `[B, H, T, D]`, keys of the block.
    block_v: `[B, H, T, D]`, values of the block.
    visible: `[B or 1, S, T]` bool, tokens of the block that each query sees.
      The mask must already exclude tokens outside the window.
    positions: positions of the queries, see `past_attention`.
    table: pages of the rows, see `past_attention`.
    window: number of visible tokens, see `past_attention`.
    softcap: soft-cap of the scores, see `past_attention`.
    heads_axis: mesh axis of the heads, see `past_attention`.
    sink_logits: `[H * G]` logits of sinks, see `with_sinks`, or None.

  Returns:
    `[B, S, H * G, D]`, at least float32.
  """
  if sink_logits is not None:
    past = past_attention(
        query, k, v, lengths, positions=positions, table=table, window=window,
        softcap=softcap, heads_axis=heads_axis)
    return with_sinks(merge(past, block_attention(
        query, block_k, block_v, visible, softcap=softcap)), sink_logits)
  visible = jnp.broadcast_to(visible, (len(query), *visible.shape[1:]))
  options = dict(window=window, softcap=softcap)

  def by_parts(past):
    def merged(query, k, v, lengths, block_k, block_v, visible, positions,
               table):
      block = block_attention(query, block_k, block_v, visible, softcap=softcap)
      return merge(past(query, k, v, lengths, positions, table), block)[0]

    return merged

  past = functools.partial(_by_platform, heads_axis=heads_axis, **options)
  by_platform = lambda *operands: jax.lax.platform_dependent(
      *operands, cpu=functools.partial(plain.joint, **options),
      default=by_parts(past))
  return _transformable(
      by_platform, by_parts(functools.partial(plain.whole, **options)))(
          query, k, v, lengths, block_k, block_v, visible, positions, table)


# A separate jit, so that all layers of a model share one trace.
@functools.partial(
    jax.jit, static_argnames=("window", "softcap", "heads_axis"))
def past_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                   lengths: jax.Array, *, positions: jax.Array | None = None,
                   table: jax.Array | None = None, window: int = 0,
                   softcap: float = 0.0, heads_axis: str | None = "model"
                   ) -> Part:
  """Returns attention of S tokens over the committed slots of a cache.

  CPU: a `switch` over lengths, so the cost depends on the longest row.
  TPU: a Pallas kernel (`attention.tpu`), whose cost depends on the length of
  each row. A mesh splits the kernel by rows over its axis "data" and by
  key-value heads over `heads_axis`.
  NVIDIA GPU: cuDNN in float16 and bfloat16. The cost depends on the length of
  each row.
  If the kernel or cuDNN does not support the inputs, attention reads all slots
  and applies a mask. A TPU reads pages in place. Other platforms gather the
  pages first.

  Args:
    query: `[B, S, H * G, D]` queries, G query heads per key-value head.
    k: `[B, H, C, D]` keys, or pages `[P, H, T, D]` if there is a table.
    v: values, of the same shape as `k`.
    lengths: `[B]` int32, number of committed slots of each row.
    positions: `[B, S]` int32, positions of the queries. Required if `window` is
      not 0.
    table: `[B, C / T]` int32, indices of the pages of each row in order.
      Entries after the last page in use may be any valid indices. None: the
      slots are not in pages.
    window: number of last positions that each query sees, including its own. 0
      means no limit.
    softcap: c in c tanh(scores / c). 0 disables the cap.
    heads_axis: mesh axis that divides the key-value heads on a TPU, if their
      number is a multiple of its size. None: every device has all heads.

  Returns:
    `(out [B, S, H * G, D], log [B, S, H * G])`, at least float32. `log` is the
    log-sum-exp of the scores. A query that sees no slot has a finite `out` and
    a `log` of about -1e30.
  """
  options = dict(window=window, softcap=softcap)
  return _transformable(
      functools.partial(_by_platform, heads_axis=heads_axis,
                        cpu=functools.partial(plain.bucketed, **options),
                        **options),
      functools.partial(plain.whole, **options))(
          query, k, v, lengths, positions, table)


def _by_platform(*operands: jax.Array | None, window: int, softcap: float,
                 heads_axis: str | None, **others: Callable[..., Part]) -> Part:
  """Computes `past_attention` with the implementation for the platform."""
  options = dict(window=window, softcap=softcap)
  return jax.lax.platform_dependent(
      *operands, default=functools.partial(plain.whole, **options),
      cuda=functools.partial(_cudnn_attention, **options),
      tpu=functools.partial(tpu.past_attention, heads_axis=heads_axis,
                            **options), **others)


def _cudnn_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                     lengths: jax.Array, positions: jax.Array | None,
                     table: jax.Array | None, *, window: int, softcap: float
                     ) -> Part:
  """Computes `past_attention` with cuDNN, or with `plain.whole` if unsupported.

  All nodes of a draft see the same slots. So nodes and query heads together
  become the query axis of cuDNN's flash attention with a length per row. cuDNN
  supports neither a soft-cap nor a window that differs between nodes.
  """
  size, dim = query.shape[1], query.shape[3]
  if (window or softcap or dim % 8 or dim > _CUDNN_WIDEST
      or query.dtype != k.dtype or k.dtype not in _CUDNN_DTYPES):
    return plain.whole(query, k, v, lengths, positions, table, window=window,
                       softcap=softcap)
  operands = (plain.folded(query, k.shape[1]),
              *(plain.in_order(x, table, lengths) for x in (k, v)), lengths)
  try:
    out, log = tpu.split_over_mesh(_cudnn, operands)(*operands)
  except RuntimeError:  # no cuDNN, or an unsupported number of slots
    return plain.whole(query, k, v, lengths, positions, table)
  return plain.unfolded(out, size), plain.unfolded(log, size)


def _cudnn(query: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array
           ) -> Part:
  """Computes the part of folded queries `[B, H, R, D]` with cuDNN.

  `jax.nn.dot_product_attention` returns log-sum-exps only in the dtype of the
  query. In bfloat16 these would give weights with errors of a percent. So the
  float32 array is taken from the residuals of the derivative, whose forward
  pass is the same. The derivative requires an even number of queries.
  """
  batch, heads, rows, dim = query.shape
  query = jnp.pad(query, ((0, 0), (0, 0), (0, rows % 2), (0, 0)))
  # The function expects the axes (row, slot, head, channel). No transposition
  # is necessary if each head becomes a row with one head.
  query, k, v = (x.reshape(-1, x.shape[2], 1, dim) for x in (query, k, v))
  # A row without committed slots reads one slot; `log` gives it no weight.
  slots = jnp.repeat(jnp.maximum(lengths, 1).astype(jnp.int32), heads)
  out, derivative = jax.vjp(
      lambda query: jax.nn.dot_product_attention(
          query, k, v, key_value_seq_lengths=slots, implementation="cudnn"),
      query)
  [log] = [x for x in jax.tree.leaves(derivative) if x.dtype == jnp.float32]
  log = jnp.where((lengths > 0)[:, None, None],
                  log.reshape(batch, heads, -1), plain.MASKED)
  out = out.astype(jnp.float32).reshape(batch, heads, -1, dim)
  return out[:, :, :rows], log[:, :, :rows]


def _transformable(attend: Callable[..., Any], by_plain: Callable[..., Any]
                   ) -> Callable[..., Any]:
  """Returns `attend` with rules for `vmap` and derivatives.

  Args:
    attend: function of positional operands. The second and third are keys and
      values. The last is a table or None. With a table, keys and values are
      pages. All other operands have B as their first axis.
    by_plain: the same function in plain XLA, used for derivatives.
  """
  mapped = jax.custom_batching.custom_vmap(attend)

  @mapped.def_vmap
  def add_rows(size, is_mapped, *operands):  # pylint: disable=unused-variable
    """Joins the mapped axis with the rows, or with the pages."""
    operands = jax.tree.map(
        lambda x, has_axis: x if has_axis else jnp.broadcast_to(
            x, (size, *x.shape)), operands, tuple(is_mapped))
    *others, table = operands
    if table is not None:
      before = jnp.arange(size, dtype=jnp.int32) * others[1].shape[1]
      table += before[:, None, None]
    joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]),
                          (*others, table))
    out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]),
                       mapped(*joined))
    return out, jax.tree.map(lambda _: True, out)

  differentiable = jax.custom_jvp(mapped)
  differentiable.defjvp(functools.partial(jax.jvp, by_plain))
  return differentiable
