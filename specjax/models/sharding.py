"""Where weights and decoding state live on a mesh of devices.

Megatron-style tensor parallelism (arXiv:1909.08053) for the reference
Transformer: every matrix is split so that a layer needs two all-reduces of
the residual stream, and key-value heads, with their cache, stay on the
device that holds their weights. Batch rows can be split over a second axis.
These are placements only: the loop is compiled from them, unchanged.
"""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.kv_cache import KVCache
from specjax.models.transformer import Transformer
from specjax.models.transformer import TransformerConfig

_SPLIT_OUTPUT = ("query", "key", "value", "gate", "up")
_SPLIT_INPUT = ("out", "down")


def _check_divisible(name, value, size, axis):
  if value % size:
    raise ValueError(
        f"{name} is {value} and mesh axis {axis!r} has {size} devices; the "
        f"axis splits {name}, so its size must divide {value}: use a smaller "
        f"axis {axis!r} and give the other devices to the data axis")


def check_tensor_parallel(config: TransformerConfig, size: int,
                          axis: str = "model") -> None:
  """Checks that `size` devices can hold equal parts of the model.

  Raises:
    ValueError: heads, kv_heads, mlp_width or vocab_size is no multiple.
  """
  for name in ("heads", "kv_heads", "mlp_width", "vocab_size"):
    _check_divisible(name, getattr(config, name), size, axis)


def tensor_parallel_specs(config: TransformerConfig, axis: str = "model"):
  """How the parameters of `Transformer(config)` are split over `axis`.

  query, key, value, gate and up are split on their output, out and down on
  their input, embedding and head on the vocabulary; norms and look-ahead
  embeddings, a few rows, are replicated.

  Returns:
    A tree of `PartitionSpec` like the parameters.

  Raises:
    KeyError: the model has a parameter that this file does not know;
      replicating it in silence could fill a device.
  """
  shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0))

  def spec(path, _):
    names = [entry.key for entry in path]
    if names[-1] == "scale" or names == ["lookahead"]:
      return P()
    if names == ["embedding"]:
      return P(axis, None)
    if names == ["head"]:
      return P(None, axis)
    if names[-1] == "kernel" and names[-2] in _SPLIT_OUTPUT:
      return P(None, axis)
    if names[-1] == "kernel" and names[-2] in _SPLIT_INPUT:
      return P(axis, None)
    raise KeyError(f"no placement is known for parameter {'/'.join(names)}; "
                   "add it to specjax/models/sharding.py")

  return jax.tree_util.tree_map_with_path(spec, shapes)


def cache_specs(cache: KVCache, axis: str = "model",
                data_axis: str | None = None) -> KVCache:
  """How a cache is split: `[B, H, C, D]` on its key-value heads H.

  Args:
    cache: a cache, or its shapes.
    axis: the mesh axis of the heads.
    data_axis: the mesh axis of the rows; None keeps all rows on each device.

  Returns:
    A `KVCache` of `PartitionSpec`; `lengths` follows the rows.
  """
  split = lambda arrays: tuple(P(data_axis, axis, None, None) for _ in arrays)
  return KVCache(k=split(cache.k), v=split(cache.v), lengths=P(data_axis))


def decode_shardings(decoder, params, state, mesh, *, axis: str = "model",
                     data_axis: str = "data"):
  """Placements of everything that `decoder.decode_round` takes.

  Models that are a `Transformer` are split over `axis` and so is every
  `KVCache` in the state; other parameters are replicated. Rows, the first
  axis of every array of the state, are split over `data_axis` if the mesh
  has one.

  Args:
    decoder: the `Decoder`.
    params: `{"target": ..., "drafter": ...}`, arrays or their shapes.
    state: a `DecodeState` of arrays or of shapes.
    mesh: a `jax.sharding.Mesh` with `axis`.

  Returns:
    `(params, state)` as trees of `NamedSharding`, for `jax.device_put` or
    the `in_shardings` and `out_shardings` of a jit.

  Raises:
    ValueError: the mesh lacks `axis`, or a size is no multiple of its axis.
  """
  if axis not in mesh.shape:
    raise ValueError(f"the mesh has axes {tuple(mesh.shape)} and no {axis!r}; "
                     "give it one, of size 1 where nothing is to be split")
  size = mesh.shape[axis]
  rows = data_axis if data_axis in mesh.shape else None
  if rows:
    _check_divisible("batch", state.lengths.shape[0], mesh.shape[rows], rows)

  def model_specs(model, params):
    if not isinstance(model, Transformer):
      return jax.tree.map(lambda _: P(), params)
    check_tensor_parallel(model.config, size, axis)
    return tensor_parallel_specs(model.config, axis)

  def state_spec(node):
    if not isinstance(node, KVCache):
      return P(rows)
    _check_divisible("kv_heads", node.k[0].shape[1], size, axis)
    return cache_specs(node, axis, rows)

  models = {"target": decoder.target,
            "drafter": getattr(decoder.drafter, "model", None)}
  param_specs = {name: model_specs(models.get(name), tree)
                 for name, tree in params.items()}
  state_specs = jax.tree.map(state_spec, state,
                             is_leaf=lambda node: isinstance(node, KVCache))
  place = lambda specs: jax.tree.map(
      lambda spec: NamedSharding(mesh, spec), specs,
      is_leaf=lambda node: isinstance(node, P))
  return place(param_specs), place(state_specs)
