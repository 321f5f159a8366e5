"""The one training loop: a compiled step, exact resume, metrics on disk.

  objective(trainable, frozen, batch, key) -> (loss, metrics)

Parameters are a dictionary of named trees, such as {"target", "drafter"}: what
a `Decoder` takes. A run trains some of them; the others are arguments of the
compiled step and never a result, so nothing can change them.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from specjax.models.transformer import default_dtype
from specjax.training import checkpoints
from specjax.training import layout as layout_lib
from specjax.training.objective import Loss
from specjax.training.objective import Objective
from specjax.training.progress import Log
from specjax.training.progress import Progress
from specjax.utils import fields
from specjax.utils import processes

_CHECK_EVERY = 10  # steps between looks at the loss
_DIVERGED = 10  # times the first loss, or times 1 where that is less
_STAYS = ("the checkpoints before it stay: give a smaller learning rate and "
          "another directory")


@struct.dataclass
class TrainState:
  """What a run is made of; everything else is a function of it.

  Attributes:
    step: `[]` int32, steps taken.
    params: the trainable parameters.
    opt_state: optax's state.
  """

  step: jax.Array
  params: Any
  opt_state: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
  """Trains parameters on batches that are a pure function of the step.

  A run that is killed and started again with the same arguments continues
  from its last checkpoint and ends with bit-identical parameters. Where that
  one is damaged it says so, moves it aside and takes the one before. SIGTERM
  and Ctrl-C end it after the step at work, with a checkpoint. A run that is
  shorter than its checkpoints ends at the newest one that it reaches. A batch
  that cannot be cut into `accumulate` parts is refused.

  On a mesh, of one process or of several (`utils.processes`), a run takes the
  same batches: every process makes the whole one and feeds the rows of its own
  devices. What it learns is that of a run on one device but for the order in
  which float32 sums are rounded; killed and started again on the same mesh it
  ends with the same bits. Its checkpoints are orbax's and are read on any other
  mesh, or on one device. All processes see one `directory`, to which the first
  writes all else; SIGTERM to one of them stops them all, at the same step and
  with a checkpoint.

  Attributes:
    objective: an `Objective`, or a function that is called like one. A metric
      with a slash in its name goes to disk and not to the screen.
    optimizer: an optax transformation of the trainable parameters.
    batch: `step -> batch`, a tree of arrays whose first axis are rows;
      scalars in it are shared by all rows.
    steps: length of the run.
    directory: directory of checkpoints, `metrics.csv` and TensorBoard events.
    evaluate: `params -> {name: value}`, given all parameters, called every
      `evaluate_every` steps and at the end.
    evaluate_every: steps; 0 evaluates at the end alone.
    saved_dtype: the dtype in which the trained parameters will be saved. They
      are rounded to it for evaluations. None does not round.
    evaluated: `(step, trained parameters, values) -> None`, called after every
      evaluation with its values, when these are on disk. All processes call it.
    checkpoint_every: steps between checkpoints.
    keep_checkpoints: number of checkpoints that stay, the newest. At least two,
      because the newest may be damaged.
    tokens_per_step: number of tokens in a step, for the throughput.
    log: facts about the run for its log.
    accumulate: parts that a batch is cut into; their gradients are averaged.
      Memory is that of one part.
    compute_dtype: dtype of all parameters in the objective and in `evaluate`.
      Trained parameters are updated and saved in their own dtype. None is
      `default_dtype()`.
    seed: of the objective's keys, one for each step.
    mesh: of devices; None is the default device.
    param_shardings: how a mesh splits the parameters, frozen ones too: a
      `PartitionSpec` by name, or a tree of them for the branches, such as
      `{"target": model.param_specs("model", 4)}`. What has no name here is
      replicated.
    data_axis: the axis of the mesh over which rows are split, if it has it.
  """

  objective: Objective
  optimizer: optax.GradientTransformation
  batch: Callable[[int], Any]
  steps: int
  directory: pathlib.Path
  evaluate: Callable[[Any], dict[str, float]] | None = None
  evaluate_every: int = 0
  saved_dtype: Any = None
  evaluated: Callable[[int, Any, dict[str, float]], None] | None = None
  checkpoint_every: int = 200
  keep_checkpoints: int = 2
  tokens_per_step: int = 0
  log: Log = Log()
  accumulate: int = 1
  compute_dtype: Any = None
  seed: int = 0
  mesh: jax.sharding.Mesh | None = None
  param_shardings: Mapping[str, Any] | None = None
  data_axis: str = "data"

  def __post_init__(self):
    fields.check_fields(self, "steps", "checkpoint_every", "accumulate")
    fields.check_fields(self, "keep_checkpoints", least=2,
                        more=": the newest one may be damaged")
    fields.check_fields(self, "evaluate_every", least=0,
                        more=": 0 evaluates at the end alone")
    shares = dict(self.mesh.shape).get(self.data_axis, 1) if self.mesh else 1
    for x in jax.tree.leaves(self.batch(0)):
      if np.ndim(x) and len(x) % self.accumulate:
        raise ValueError(
            f"a batch has {len(x)} rows and accumulate is {self.accumulate}; "
            "it must divide the rows: choose another, or another batch size")
      if np.ndim(x) and len(x) // self.accumulate % shares:
        raise ValueError(
            f"a step reads {len(x) // self.accumulate} rows at a time and mesh "
            f"axis {self.data_axis!r} has {shares} devices; give a multiple of "
            f"{shares} rows, or a smaller axis {self.data_axis!r}")

  def run(self, trainable: dict[str, Any], frozen: dict[str, Any] | None = None
          ) -> dict[str, Any]:
    """Trains to the end, from `trainable` or from the last checkpoint.

    Args:
      trainable: parameters to train, in float32 as a rule.
      frozen: parameters that the objective needs and that stay as they are.

    Returns:
      The trained parameters.

    Raises:
      ValueError: the checkpoints in `directory` are of other parameters, all of
        them are of later steps than the run has, or all are damaged; the mesh
        does not divide the parameters, or `param_shardings` names others.
      FloatingPointError: parameters became NaN or infinite, or the loss did,
        or it is more than ten times that of the first step. That step is not
        saved, and the checkpoints before it stay.
      processes.Stopped: SIGTERM or Ctrl-C came, and the last step is saved.
    """
    self._check_names({**trainable, **(frozen or {})})
    with processes.listening():
      params = self._run(trainable, frozen or {})
      if processes.told_to_stop():  # while the last checkpoint was written
        raise processes.stopped(
            f"after step {self.steps}, the last one, which is saved: the same "
            "command ends the run")
    return params

  def _run(self, trainable, frozen):
    """Returns the parameters at the end of the run."""
    dtype = self.compute_dtype or default_dtype()
    frozen = self._frozen(cast(frozen, dtype))
    state, layout = self._fresh_state(trainable)
    directory = pathlib.Path(self.directory).absolute()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=self.keep_checkpoints, cleanup_tmp_directories=True)
    with contextlib.ExitStack() as stack:
      manager = stack.enter_context(checkpoints.Manager(
          directory / "checkpoints", options=options))
      losses, taken = None, processes.by_the_first(manager.latest_step)
      if taken is not None:
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        del state  # a device need not have room for two
        state, losses = checkpoints.newest(manager, like, self.steps)
      start = int(state.step)
      if start == self.steps or taken is not None and taken > self.steps:
        return state.params  # the log has later steps, which may be continued
      progress = stack.enter_context(Progress.over(
          directory, start, self.steps, self.tokens_per_step, self.log, losses))
      return self._train(state, frozen, layout, dtype, manager, progress)

  def _train(self, state, frozen, layout, dtype, manager, progress):
    """Returns the parameters after all steps from `state` on."""
    put = layout.batch if layout else lambda batch: batch
    step_once = functools.partial(
        train_step, key=jax.random.key(self.seed), objective=self.objective,
        optimizer=self.optimizer, accumulate=self.accumulate, dtype=dtype,
        layout=layout)
    first_loss = None
    for step in range(int(state.step), self.steps):
      state, aux = step_once(state, frozen, put(self.batch(step)))
      done = step + 1
      evaluates = self.evaluate is not None and (
          done == self.steps or
          self.evaluate_every > 0 and done % self.evaluate_every == 0)
      progress.stepped(done, *aux, evaluates)
      stops = processes.told_to_stop()
      saves = (done % self.checkpoint_every == 0 or done == self.steps
               or stops)
      if first_loss is None:
        first_loss = float(aux[0])
      if saves or done % _CHECK_EVERY == 0:
        _check_loss(float(aux[0]), first_loss, done)
      if saves:
        _check_finite(state.params, done)
      if evaluates:
        saved = cast(state.params, self.saved_dtype or dtype)
        values = self.evaluate({**frozen, **cast(saved, dtype)})
        progress.evaluated(done, values)
      progress.write(done)
      if evaluates and self.evaluated:
        self.evaluated(done, state.params, values)
      if saves:
        checkpoints.save(manager, done, state, progress.pending_losses)
      if stops:
        raise processes.stopped(
            f"after step {done}, which is saved: the same command continues "
            f"from there, and with --steps={done} it ends the run there")
    return state.params

  def _check_names(self, params):
    for name in self.param_shardings or {}:
      if name not in params:
        raise ValueError(
            f"param_shardings has {name!r} and the parameters are "
            f"{', '.join(map(repr, params))}; name some of these")

  def _frozen(self, params):
    if self.mesh is None:
      return params
    return processes.placed(params, layout_lib.of_params(
        self.mesh, params, self.param_shardings or {}))

  def _fresh_state(self, trainable):
    """The state before the first step, and its `Layout` on a mesh."""
    def first(params):
      return TrainState(step=jnp.zeros((), jnp.int32), params=params,
                        opt_state=self.optimizer.init(params))

    if self.mesh is None:
      # The step donates its state, and the caller keeps what it gave.
      return first(jax.tree.map(jnp.copy, trainable)), None
    places = layout_lib.of_params(
        self.mesh, trainable, self.param_shardings or {})
    shardings = layout_lib.of_state(
        self.mesh, jax.eval_shape(first, trainable), places)
    state = jax.jit(first, out_shardings=shardings)(
        processes.placed(trainable, places))
    return state, layout_lib.Layout(
        self.mesh, self.data_axis, tuple(jax.tree.leaves(shardings)))


# Trainers of one objective and one optimiser share the compiled step. The
# state is donated: parameters and moments are updated in place.
@functools.partial(
    jax.jit, donate_argnames="state",
    static_argnames=("objective", "optimizer", "accumulate", "dtype", "layout"))
def train_step(state: TrainState, frozen: Mapping[str, Any],
               batch: Mapping[str, Any], key: jax.Array, *,
               objective: Objective, optimizer: optax.GradientTransformation,
               accumulate: int, dtype: Any,
               layout: layout_lib.Layout | None = None
               ) -> tuple[TrainState, Loss]:
  """`(state, (loss, metrics))` after one step of a `Trainer`.

  The norm of the gradient is added to the metrics as `gradient_norm`.

  Args:
    state: a `TrainState`; it is donated.
    frozen: parameters that stay as they are.
    batch: of the step.
    key: the run's; the step's is folded out of it.
    objective: the `Trainer`'s.
    optimizer: the `Trainer`'s.
    accumulate: the `Trainer`'s.
    dtype: the `compute_dtype`.
    layout: of the run on its mesh.
  """
  def loss(trainable, batch, key):
    return objective(cast(trainable, dtype), frozen, batch, key)

  (value, metrics), grads = _averaged(
      jax.value_and_grad(loss, has_aux=True), accumulate, state.params, batch,
      jax.random.fold_in(key, state.step), layout)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  state = state.replace(step=state.step + 1, params=params,
                        opt_state=opt_state)
  squares = [jnp.sum(jnp.square(x.astype(jnp.float32)))
             for x in jax.tree.leaves(grads)]
  metrics = {**metrics, "gradient_norm": jnp.sqrt(sum(squares))}
  return layout.pin(state) if layout else state, (value, metrics)


def _averaged(grad, accumulate, trainable, batch, key, layout):
  """`((loss, metrics), gradients)`, averaged over the parts of a batch.

  Where its tokens have weights, a part counts as its tokens do together.
  """
  if accumulate == 1:
    return grad(trainable, batch, key)
  parts = jax.tree.map(
      lambda x: x.reshape(accumulate, -1, *x.shape[1:]) if x.ndim
      else jnp.broadcast_to(x, accumulate), batch)
  if layout:
    parts = layout.pin_parts(parts)
  keys = jax.random.split(key, accumulate)
  shares = jnp.full(accumulate, 1 / accumulate)
  if "weights" in batch:
    sums = jnp.sum(parts["weights"], axis=(1, 2), dtype=shares.dtype)
    total = jnp.sum(sums)
    shares = jnp.where(total > 0, sums / jnp.where(total > 0, total, 1), shares)

  def add(total, part):
    *given, share = part
    return jax.tree.map(lambda x, new: x + (share * new).astype(x.dtype),
                        total, grad(trainable, *given)), None

  shapes = jax.eval_shape(
      grad, trainable, *jax.tree.map(lambda x: x[0], (parts, keys)))
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(add, zero, (parts, keys, shares))[0]


def _check_loss(loss, first, step):
  most = _DIVERGED * max(abs(first), 1.0)
  if not loss <= most:
    raise FloatingPointError(
        f"the loss is {loss:.3g} at step {step} and was {first:.3g} at first; "
        f"the limit is {most:.3g}, so the run diverged; {_STAYS}")


def _check_finite(params, step):
  if not _all_finite(params):
    raise FloatingPointError(
        f"parameters are NaN or infinite after step {step} and are not saved; "
        f"{_STAYS}")


@jax.jit
def _all_finite(params):
  return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]
                   ).all()


def cast(tree: Any, dtype: Any) -> Any:
  """The tree with its floating-point leaves in `dtype`."""
  return jax.tree.map(
      lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating)
      else x, tree)
