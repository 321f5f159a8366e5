"""Where weights and decoding state live on a mesh of devices.

A mesh has an axis over which models are split (tensor parallelism) and may
have one over which the rows of a batch are. Every part answers for itself: a
model by `param_specs`, a cache by `specs`, a drafter by `param_specs`. These
are placements only: the loop is compiled from them, unchanged.

  placement = Placement(mesh=mesh, drafter="replicate")
  params = placement.put(decoder, params)
  decoder.generate(params, prompts, key, max_new_tokens=64, placement=placement)
"""

import dataclasses
import functools
from typing import Any
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:  # a model does not need the loop
  from specjax.decoding.decoder import Decoder

# Gate and up, `[D, 2, F]`, lie on a TPU as two matrices. As they come they
# share the rows of a tile, and every loop over passes first copies them apart.
_ON_TPUS = {"['gate_up']['kernel']": (1, 0, 2)}


def named(mesh: Mesh, specs: Any, tree: Any) -> Any:
  """A `NamedSharding` for every leaf of a tree.

  Args:
    mesh: the devices.
    specs: a tree of `PartitionSpec` whose leaves are those of `tree` or whole
      branches of it.
    tree: of arrays, or of their shapes.
  """
  return jax.tree.map(
      lambda spec, branch: jax.tree.map(
          lambda _: NamedSharding(mesh, spec), branch),
      specs, tree, is_leaf=lambda node: isinstance(node, PartitionSpec))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """How a decoder lies on a mesh of devices, of one process or of several.

  The text is that of one device: rows are independent, and what is split is
  summed in another order, which float32 rounds away from the last digits only.
  In several processes each makes the same calls with the same prompts.

  Attributes:
    mesh: a mesh with `axis`.
    axis: over which models are split; on TPUs it must be "model".
    data_axis: over which rows are split, if the mesh has it; on TPUs "data".
    drafter: "split" as the target is, or "replicate": every device has all of
      it and drafts for its own rows, which suits a small one and one whose
      heads do not divide.
  """

  mesh: Mesh
  axis: str = "model"
  data_axis: str = "data"
  drafter: str = "split"

  def __post_init__(self):
    _check_names(self.mesh, self.axis, self.data_axis)

  def put(self, decoder: "Decoder", params: Any) -> Any:
    """`{"target": ..., "drafter": ...}` on the mesh.

    Raises:
      ValueError: the mesh does not divide a model, or lacks `axis`.
    """
    shardings = _param_shardings(decoder, params, self.mesh, self.axis,
                                 self.drafter)
    return processes.placed(params, shardings)

  def start(self, decoder: "Decoder", parts: Any, *arguments: Any
            ) -> DecodeState:
    """`rounds.start`, whose state is made where it will lie.

    Args:
      decoder: whose state it is.
      parts: its rounds.
      *arguments: of `rounds.start`, the parameters first.

    Raises:
      ValueError: as in `decode_shardings`.
    """
    shapes = rounds.start.eval_shape(parts, *arguments)
    _, shardings = decode_shardings(
        decoder, arguments[0], shapes, self.mesh, axis=self.axis,
        data_axis=self.data_axis, drafter=self.drafter)
    state = _start(parts, tuple(jax.tree.leaves(shardings)), *arguments)
    if self.drafter == "replicate":
      state = state.replace(drafter=dense.undivided(state.drafter))
    return state


# Under the constraint GSPMD splits the passes over the prompts too: no device
# ever has the whole of a cache.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(parts, shardings, *arguments):
  state = rounds.start(parts, *arguments)
  return jax.lax.with_sharding_constraint(
      state, jax.tree.unflatten(jax.tree.structure(state), shardings))


def decode_shardings(decoder: "Decoder", params: Any, state: DecodeState,
                     mesh: Mesh, *, axis: str = "model",
                     data_axis: str = "data", drafter: str = "split"
                     ) -> tuple[Any, Any]:
  """Placements of everything that `decoder.decode_round` takes.

  Weights are placed as the target and the drafter say, caches as they say
  themselves; of a model with fewer key-value heads than the axis has devices
  each device has the whole cache of its rows. Rows, the first axis of every
  leaf of the state, are split over `data_axis` if the mesh has one.

  Args:
    decoder: the `Decoder`.
    params: `{"target": ..., "drafter": ...}`, arrays or their shapes.
    state: a `DecodeState` of arrays or of shapes; the drafter's part of it
      `undivided` where the drafter is replicated on TPUs.
    mesh: a mesh with `axis`.
    axis: over which models are split.
    data_axis: over which rows are split.
    drafter: "split" or "replicate", see `Placement`.

  Returns:
    `(params, state)` as trees of `NamedSharding`, for `processes.placed` or
    the `in_shardings` and `out_shardings` of a jit. On TPUs some parameters
    have a `Format` in its place, which says in what order their axes lie too.

  Raises:
    ValueError: the mesh lacks `axis`, or has other names than those that a TPU
      asks for; a size is no multiple of its axis; or a part does not say how it
      is split over an axis of several devices.
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


def _of_tpus(mesh):
  return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "tpu"


def _check_names(mesh, axis, data_axis):
  """A TPU's kernel knows by these names how to split, see `attention.tpu`."""
  if not _of_tpus(mesh):
    return
  for name, wanted in ((axis, "model"), (data_axis, "data")):
    if name != wanted and mesh.shape.get(name, 1) > 1:
      raise ValueError(
          f"mesh axis {name!r} has {mesh.shape[name]} devices, and attention "
          f"on a TPU is split over {wanted!r} alone: every pass would gather "
          f"the caches; call the axis {wanted!r}")


def _param_shardings(decoder, params, mesh, axis, drafter):
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


def _laid_out(path, sharding, x):
  """The sharding, or with it the order in which a TPU reads the axes."""
  order = _ON_TPUS.get(jax.tree_util.keystr(path[-2:]))
  if order is None or len(order) != x.ndim:
    return sharding
  return Format(Layout(order), sharding)


def _place(mesh, rows, axis, tree):
  """`NamedSharding`s of a part of the state; `axis` None: not split by it."""
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


def _fitting(mesh, axis, spec, leaf):
  """The spec of a leaf of a cache; heads fewer than devices are replicated."""
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
