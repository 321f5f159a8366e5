"""Placement of parameters and decoding state on a mesh of devices.

A mesh has an axis over which models are split (tensor parallelism), and may
have an axis over which the rows of a batch are split. Every component specifies
its own split: a model and a drafter by `param_specs`, a cache by `specs`. The
loop is compiled from these placements without changes.

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

# Memory order of axes on a TPU. A kernel `[D, 2, F]` has two matrices, gate and
# up. In the default order they share the rows of a tile, and every loop first
# copies them into separate arrays.
_ON_TPUS = {"['gate_up']['kernel']": (1, 0, 2)}


def named(mesh: Mesh, specs: Any, tree: chex.ArrayTree) -> Any:
  """Returns a `NamedSharding` for every leaf of a tree.

  Args:
    mesh: devices.
    specs: tree of `PartitionSpec` for leaves or branches of `tree`.
    tree: tree of arrays or of their shapes.
  """
  return jax.tree.map(
      lambda spec, branch: jax.tree.map(
          lambda _: NamedSharding(mesh, spec), branch),
      specs, tree, is_leaf=lambda node: isinstance(node, PartitionSpec))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """Placement of a decoder on a mesh, in one process or several.

  The output equals the output of one device: rows are independent, and sums
  over split axes differ only in the last digits of float32. Several processes
  must make the same calls with the same prompts.

  Attributes:
    mesh: mesh with `axis`.
    axis: mesh axis of the models; on TPUs it must be "model".
    data_axis: mesh axis of the rows, if the mesh has it; on TPUs "data".
    drafter: "split" as the target, or "replicate": every device has the
      complete drafter and drafts for its own rows. This suits a small drafter,
      and one whose heads do not divide.
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
      ValueError: the mesh does not divide a model, or lacks `axis`.
    """
    shardings = _param_shardings(decoder, params, self.mesh, self.axis,
                                 self.drafter)
    return processes.placed(params, shardings)

  def start(self, decoder: "Decoder", parts: Any, *arguments: Any
            ) -> DecodeState:
    """Runs `rounds.start` and creates the state in its placement.

    Args:
      decoder: decoder of the state.
      parts: rounds of the decoder.
      *arguments: arguments of `rounds.start`, the parameters first.

    Raises:
      ValueError: see `decode_shardings`.
    """
    shapes = rounds.start.eval_shape(parts, *arguments)
    _, shardings = decode_shardings(
        decoder, arguments[0], shapes, self.mesh, axis=self.axis,
        data_axis=self.data_axis, drafter=self.drafter)
    state = _start(parts, tuple(jax.tree.leaves(shardings)), *arguments)
    if self.drafter == "replicate":
      state = state.replace(drafter=dense.undivided(state.drafter))
    return state


# The result is constrained inside the program. So GSPMD also splits the passes
# over the prompts, and no device ever has a complete cache.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(parts: rounds.Round, shardings: tuple[Any, ...], *arguments: Any
           ) -> DecodeState:
  state = rounds.start(parts, *arguments)
  return jax.lax.with_sharding_constraint(
      state, jax.tree.unflatten(jax.tree.structure(state), shardings))


def decode_shardings(decoder: "Decoder", params: chex.ArrayTree,
                     state: DecodeState, mesh: Mesh, *, axis: str = "model",
                     data_axis: str = "data", drafter: str = "split"
                     ) -> tuple[Any, Any]:
  """Returns the placements of all arguments of `decoder.decode_round`.

  Components specify their own placement. If a model has fewer key-value heads
  than the axis has devices, each device has the complete cache of its rows.
  Rows, the first axis of every leaf of the state, are split over `data_axis` if
  the mesh has one.

  Args:
    decoder: decoder whose rounds run on the mesh.
    params: `{"target": ..., "drafter": ...}`, arrays or shapes.
    state: `DecodeState` of arrays or shapes. If the drafter is replicated on
      TPUs, its state must be `undivided`.
    mesh: mesh with `axis`.
    axis: mesh axis of the models.
    data_axis: mesh axis of the rows.
    drafter: "split" or "replicate", see `Placement`.

  Returns:
    `(params, state)` as trees of `NamedSharding`, for `processes.placed` or for
    `in_shardings` and `out_shardings` of a jit. On TPUs some parameters have a
    `Format`, which also specifies the order of axes.

  Raises:
    ValueError: the mesh lacks `axis`, or has other names than TPUs require; a
      size is not a multiple of its axis; a component does not specify its split
      over several devices.
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
  """Checks the axis names that the kernel in `attention.tpu` requires on a TPU.
  """
  if not _of_tpus(mesh):
    return
  for name, wanted in ((axis, "model"), (data_axis, "data")):
    if name != wanted and mesh.shape.get(name, 1) > 1:
      raise ValueError(
          f"mesh axis {name!r} has {mesh.shape[name]} devices, and attention "
          f"on a TPU is split over {wanted!r} alone: every pass would gather "
          f"the caches; call the axis {wanted!r}")


def _param_shardings(decoder: "Decoder", params: chex.ArrayTree, mesh: Mesh,
                     axis: str, drafter: str) -> Any:
  if axis not in mesh.shape:
    raise ValueError(f"the mesh has axes {tuple(mesh.shape)} and no {axis!r}; "
                     "give it one, of size 1 where nothing is to be split")
  if drafter not in ("split", "replicate"):
    raise ValueError(f"drafter is {drafter!r}; it is 'split' over the mesh as "
                     "the target is, or 'replicate'")
  parts = {"target": decoder.target, "drafter": decoder.drafter}
  specs = {name: PartitionSpec() if (name, drafter) == ("drafter", "replicate")
           else parts[name].param_specs(axis, mesh.shape[axis])
           for name in params}
  shardings = named(mesh, specs, params)
  if not _of_tpus(mesh):
    return shardings
  return jax.tree_util.tree_map_with_path(_laid_out, shardings, params)


def _laid_out(path: tuple[Any, ...], sharding: NamedSharding, x: jax.Array
              ) -> NamedSharding | Format:
  """Returns the sharding, with the order of axes that a TPU reads."""
  order = _ON_TPUS.get(jax.tree_util.keystr(path[-2:]))
  if order is None or len(order) != x.ndim:
    return sharding
  return Format(Layout(order), sharding)


def _place(mesh: Mesh, rows: str | None, axis: str | None, tree: chex.ArrayTree
           ) -> Any:
  """Returns the shardings of a part of the decoding state.

  Args:
    mesh: devices.
    rows: mesh axis over which rows are split, or None.
    axis: mesh axis over which caches are split, or None.
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
  """Returns the spec of an array of a cache.

  If the array has fewer heads than `axis` has devices and their number divides
  that of the devices, the array is not split over `axis`.
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
