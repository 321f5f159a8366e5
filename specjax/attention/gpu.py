"""Attention over the committed slots by cuDNN, for GPUs.

All nodes of a draft see the same slots, so nodes and query heads together are
the queries of cuDNN's flash attention with a length per row, which reads no
slot after it. cuDNN takes float16 and bfloat16, no soft-cap and no window that
differs from node to node; the rest is left to plain XLA.

It is called by the function below `jax.nn.dot_product_attention`. That one
rounds the log-sum-exp to the dtype of the query, so that in bfloat16 the two
parts of a softmax would be merged with weights that are wrong by a percent or
more; and it wants the axes in another order, which would copy the cache.
"""

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
import jax.numpy as jnp

from specjax.attention import plain

_DTYPES = (jnp.float16, jnp.bfloat16)
_WIDEST = 128  # of a head; Hopper and later take 256


def past_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                   lengths: jax.Array, positions: jax.Array | None = None,
                   table: jax.Array | None = None, *, window: int = 0,
                   softcap: float = 0.0) -> plain.Part:
  """As `attention.past_attention`; where cuDNN cannot, `plain.whole`."""
  dim = query.shape[3]
  if (window or softcap or dim % 8 or dim > _WIDEST or query.dtype != k.dtype
      or k.dtype not in _DTYPES or cudnn.cuda_versions is None):
    return plain.whole(query, k, v, lengths, positions, table, window=window,
                       softcap=softcap)
  k, v = (plain.in_order(x, table, lengths) for x in (k, v))
  folded = plain.folded(query, k.shape[1])
  queries = jnp.full(lengths.shape, folded.shape[2], jnp.int32)
  out, lse = cudnn.dot_product_attention(
      folded, k, v, q_seqlen=queries, scale=dim**-0.5, qkv_layout="BNTH",
      # A row that sees nothing is asked for one slot, whose part has no weight.
      kv_seqlen=jnp.maximum(lengths, 1).astype(jnp.int32),
      mask_type=cudnn.MaskType.PADDING, return_residual=True)
  lse = jnp.where((lengths > 0)[:, None, None], lse, plain.MASKED)
  size = query.shape[1]
  return (plain.unfolded(out.astype(jnp.float32), size),
          plain.unfolded(lse, size))
