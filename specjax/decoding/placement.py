"""Placement of parameters and decoding state on a mesh of devices.

Models are split over one axis of the mesh (tensor parallelism). The rows of a
batch may be split over another axis. Every component specifies its own split:
models and drafters with `param_specs`, caches with `specs`. The decoding loop
itself does not depend on the mesh.

  placement = Placement(mesh=mesh, drafter="replicate")
  params = placement.put(decoder, params)
  decoder.generate(params, prompts, key, max_new_tokens=64, placement=placement)
"""

import dataclasses
import functools
from typing import Any
from typing import TYPE_CHECKING

import chex
import jax
from jax.experimental.layout import Format
from jax.experimental.layout import Layout
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from specjax import interfaces
from specjax.caches import dense
from specjax.decoding import rounds
from specjax.types import DecodeState
from specjax.utils import processes
from specjax.utils.fields import check_divisible

if TYPE_CHECKING:  # avoids an import cycle
  from specjax.decoding.decoder import Decoder

# Memory order of axes on a TPU, by the last keys of a parameter's path. The
# kernel `[D, 2, F]` contains two matrices, gate and up. In the default order
# they share the rows of a tile, so every loop would first copy them into
# separate arrays.
_ON_TPUS = {"['gate_up']['kernel']": (1, 0, 2)}


def named(mesh: Mesh, specs: Any, tree: chex.ArrayTree) -> Any:
  """Returns a `NamedSharding` for every leaf of a tree.

  Args:
    mesh: mesh of devices.
    specs: tree of `PartitionSpec` for leaves or branches of `tree`.
    tree: tree of arrays or shapes.
  """
  return jax.tree.map(
      lambda spec, branch: jax.tree.map(
          lambda _: NamedSharding(mesh, spec), branch),
      specs, tree, is_leaf=lambda node: isinstance(node, PartitionSpec))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """Placement of a decoder on a mesh, in one process or several.

  The output equals the output of one device, because rows are independent. Only
  sums over split axes differ, in the last digits of float32. All processes must
  make the same calls with the same prompts.

  Attributes:
    mesh: mesh of devices. It must have the axis `axis`.
    axis: mesh axis over which models are split. On TPUs it must be "model" if
      it has several devices.
    data_axis: mesh axis over which rows are split, if the mesh has this axis.
      On TPUs it must be "data" if it has several devices.
    drafter: "split" splits the drafter like the target. "replicate" stores the
      complete drafter on every device, where it drafts for the device's rows.
      This is useful for a small drafter, or if the number of its heads is not a
      multiple of the axis size.
  """

  mesh: Mesh
  axis: str = "model"
  data_axis: str = "data"
  drafter: str = "split"

  def __post_init__(self):
    _check_names(self.mesh, self.axis, self.data_axis)

  def put(self, decoder: "Decoder", params: chex.ArrayTree) -> Any:
    """Places `{"target": ..., "drafter": ...}` on the mesh.

    Raises:
      ValueError: the mesh lacks `axis`, or the size of `axis` does not divide
        an axis of a model.
    """
    shardings = _param_shardings(decoder, params, self.mesh, self.axis,
                                 self.drafter)
    return processes.placed(params, shardings)

  def start(self, decoder: "Decoder", stage: Any, *arguments: Any
            ) -> DecodeState:
    """Reads the prompts and creates the state on the mesh, see `rounds.start`.

    Args:
      decoder: decoder of the state.
      stage: `Decoder.stage`.
      *arguments: arguments of `rounds.start` after `stage`.

    Raises:
      ValueError: see `decode_shardings`.
    """
    shapes = rounds.start.eval_shape(stage, *arguments)
    _, shardings = decode_shardings(
        decoder, arguments[0], shapes, self.mesh, axis=self.axis,
        data_axis=self.data_axis, drafter=self.drafter)
    state = _start(stage, tuple(jax.tree.leaves(shardings)), *arguments)
    if self.drafter == "replicate":
      state = state.replace(drafter=dense.undivided(state.drafter))
    return state


# The sharding of the result is constrained inside the program. So GSPMD also
# splits the passes over the prompts, and no device ever has a complete cache.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(stage: rounds.Round, shardings: tuple[Any, ...], *arguments: Any
           ) -> DecodeState:
  state = rounds.start(stage, *arguments)
  return jax.lax.with_sharding_constraint(
      state, jax.tree.unflatten(jax.tree.structure(state), shardings))


def decode_shardings(decoder: "Decoder", params: chex.ArrayTree,
                     state: DecodeState, mesh: Mesh, *, axis: str = "model",
                     data_axis: str = "data", drafter: str = "split"
                     ) -> tuple[Any, Any]:
  """Returns the placements of all arguments of `decoder.decode_round`.

  Components specify their own placement. If a model has fewer key-value heads
  than `axis` has devices, each device has the complete cache of its rows. Rows,
  the first axis of every leaf of the state, are split over `data_axis` if the
  mesh has this axis.

  Args:
    decoder: decoder whose rounds run on the mesh.
    params: `{"target": ..., "drafter": ...}`, arrays or shapes.
    state: `DecodeState` of arrays or shapes. If a drafter is replicated on
      TPUs, its state must be a result of `caches.dense.undivided`.
    mesh: mesh of devices. It must have the axis `axis`.
    axis: mesh axis over which models are split.
    data_axis: mesh axis over which rows are split.
    drafter: "split" or "replicate", see `Placement`.

  Returns:
    `(params, state)` as trees of `NamedSharding`, for `processes.placed` or for
    `in_shardings` and `out_shardings` of a jit. On TPUs some parameters have a
    `Format`, which also specifies the order of axes.

  Raises:
    ValueError: the mesh lacks `axis`; an axis does not have the name that TPUs
      require; a size is not a multiple of the size of its mesh axis; or a
      component does not specify its split over several devices.
  """
  _check_names(mesh, axis, data_axis)
  placed = _param_shardings(decoder, params, mesh, axis, drafter)
  rows = data_axis if data_axis in mesh.shape else None
  if rows:
    check_divisible("batch", state.lengths.shape[0], mesh.shape[rows], rows)
  place = functools.partial(_place, mesh, rows)
  by_part = {
      "drafter": place(None if drafter == "replicate" else axis, state.drafter),
      "target_cache": place(axis, state.target_cache)}
  rest = state.replace(**dict.fromkeys(by_part))
  return placed, place(None, rest).replace(**by_part)


def _of_tpus(mesh: Any) -> bool:
  return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "tpu"


def _check_names(mesh: Mesh, axis: str, data_axis: str) -> None:
  """Checks the names of mesh axes on TPUs, fixed by the kernel `attention.tpu`.
  """
  if not _of_tpus(mesh):
    return
  for name, wanted in ((axis, "model"), (data_axis, "data")):
    if name != wanted and mesh.shape.get(name, 1) > 1:
      raise ValueError(
          f"mesh axis {name!r} has {mesh.shape[name]} devices, and attention "
          f"on a TPU is split only over {wanted!r}: every pass would gather "
          f"the caches; rename the axis to {wanted!r}")


def _param_shardings(decoder: "Decoder", params: chex.ArrayTree, mesh: Mesh,
                     axis: str, drafter: str) -> Any:
  if axis not in mesh.shape:
    raise ValueError(f"the mesh has axes {tuple(mesh.shape)} and no {axis!r}; "
                     "add this axis, with size 1 if models are not split")
  if drafter not in ("split", "replicate"):
    raise ValueError(f"drafter is {drafter!r}; it must be 'split' or "
                     "'replicate'")
  owners = {"target": decoder.target, "drafter": decoder.drafter}
  specs = {name: PartitionSpec() if (name, drafter) == ("drafter", "replicate")
           else owners[name].param_specs(axis, mesh.shape[axis])
           for name in params}
  shardings = named(mesh, specs, params)
  if not _of_tpus(mesh):
    return shardings
  return jax.tree_util.tree_map_with_path(_laid_out, shardings, params)


def _laid_out(path: tuple[Any, ...], sharding: NamedSharding, x: jax.Array
              ) -> NamedSharding | Format:
  """Returns the sharding of a parameter, with the order of its axes on a TPU.

  Args:
    path: path of the parameter in its tree.
    sharding: sharding of the parameter.
    x: the parameter.
  """
  order = _ON_TPUS.get(jax.tree_util.keystr(path[-2:]))
  if order is None or len(order) != x.ndim:
    return sharding
  return Format(Layout(order), sharding)


def _place(mesh: Mesh, rows: str | None, axis: str | None, tree: chex.ArrayTree
           ) -> Any:
  """Returns the shardings of a part of the decoding state.

  Args:
    mesh: mesh of devices.
    rows: mesh axis over which rows are split. None: they are not split.
    axis: mesh axis over which caches are split. None: they are not split.
    tree: part of the state.
  """
  is_cache = lambda node: isinstance(node, interfaces.Cache)
  is_spec = lambda node: isinstance(node, PartitionSpec)
  split = None if axis is None or mesh.shape[axis] == 1 else axis

  def one(node):
    if not is_cache(node):
      return NamedSharding(mesh, PartitionSpec(rows))
    return jax.tree.map(
        lambda spec, leaf: NamedSharding(
            mesh, _fitting(mesh, axis, spec, leaf)),
        node.specs(split, rows), node, is_leaf=is_spec)

  return jax.tree.map(one, tree, is_leaf=is_cache)


def _fitting(mesh: Mesh, axis: str | None, spec: PartitionSpec,
             leaf: jax.Array) -> PartitionSpec:
  """Returns the `PartitionSpec` of an array of a cache.

  If the number of heads is smaller than the number of devices of `axis` and
  divides it, the array is not split over `axis`.

  Args:
    mesh: mesh of devices.
    axis: mesh axis over which caches are split, or None.
    spec: specification by the cache.
    leaf: the array, or its shape.
  """
  def one(place, name):
    if name is None or name != axis:
      return name
    size, length = mesh.shape[axis], leaf.shape[place]
    if size % length == 0 and length < size:
      return None
    check_divisible(f"axis {place} of a cache of shape {leaf.shape}", length,
                    size, axis)
    return name

  return PartitionSpec(*map(one, range(len(spec)), spec))
