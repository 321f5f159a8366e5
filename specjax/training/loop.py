"""Training loop: a compiled step, exact resume, metrics on disk.

The loop minimises an objective:

  objective(trainable, frozen, batch, key) -> (loss, metrics)

As for a `Decoder`, parameters are a dictionary of named trees, such as
`{"target": ..., "drafter": ...}`. A run trains some of these trees. The others
are frozen: they are arguments of the compiled step but not results.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import chex
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

_CHECK_EVERY = 10  # steps between checks of the loss
_DIVERGED = 10  # the limit of the loss is _DIVERGED * max(|first loss|, 1)
_FIX = ("earlier checkpoints are unchanged: give a smaller learning rate and "
        "another directory")
_Tree = chex.ArrayTree


@struct.dataclass
class TrainState:
  """Complete state of a run.

  Attributes:
    step: `[]` int32 number of steps taken so far.
    params: trainable parameters.
    opt_state: state of the optax optimiser.
  """

  step: jax.Array
  params: Any
  opt_state: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
  """Trains parameters on batches that are a pure function of the step.

  A killed run continues from its last checkpoint if it is started again with
  the same arguments. The final parameters are bit-identical to those of an
  uninterrupted run. SIGTERM and Ctrl-C end a run after the current step, with a
  checkpoint. If `steps` is less than the number of steps already taken, the
  result is the newest checkpoint at or before `steps`.

  The devices of a mesh may belong to several processes (`utils.processes`). All
  processes use the same `directory`. Every process computes the complete batch
  and copies the rows of its devices. The result differs from a run on one
  device only in the rounding of float32 sums. SIGTERM to one process stops all
  processes.

  >>> import tempfile
  >>> objective = lambda trainable, frozen, batch, key: (
  ...     jnp.mean((trainable["x"] - batch["y"]) ** 2), {})
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   trained = Trainer(
  ...       objective=objective, optimizer=optax.sgd(0.5), steps=3,
  ...       batch=lambda step: {"y": np.full(2, 3.0, np.float32)},
  ...       directory=pathlib.Path(directory)).run({"x": jnp.zeros(())})
  >>> float(trained["x"])
  3.0

  Attributes:
    objective: `Objective`, or a function with the same arguments. Metrics with
      a slash in their names are not printed.
    optimizer: optax transformation of the trainable parameters.
    batch: function `step -> batch`. A batch is a tree of arrays with rows on
      the first axis, and of scalars shared by all rows.
    steps: length of the run in steps.
    directory: directory of checkpoints, `metrics.csv` and TensorBoard events.
    evaluate: function `params -> {name: value}` of all parameters, or None. It
      is called every `evaluate_every` steps and at the end.
    evaluate_every: number of steps between evaluations. 0 means only at the
      end.
    saved_dtype: dtype in which the caller will save the trained parameters.
      Evaluations use parameters rounded to this dtype. None means no rounding.
    evaluated: function `(step, trained parameters, values)`, or None. All
      processes call it after the values of an evaluation are written to disk.
    checkpoint_every: number of steps between checkpoints.
    keep_checkpoints: number of checkpoints on disk, at least 2 because the
      newest may be damaged. Older checkpoints are deleted.
    tokens_per_step: number of tokens per step, for the reported throughput. 0
      means unknown.
    log: settings of the log.
    accumulate: number of equal parts of a batch. The gradients of the parts are
      computed one after another and averaged. A step then requires the memory
      of one part. The average is the gradient of the complete batch if the
      objective uses `objective.Weights`, or has no weights.
    compute_dtype: dtype of all parameters in the objective and in `evaluate`.
      Trained parameters are updated and saved in their original dtypes. None
      means `default_dtype()`.
    seed: seed of the objective's keys. Each step has a different key.
    mesh: mesh of devices. None means the default device.
    param_shardings: trees of `PartitionSpec` by name of trainable or frozen
      parameters, such as `{"target": model.param_specs("model", 4)}`. All other
      parameters are replicated.
    data_axis: mesh axis that splits the rows of a batch. Rows are replicated if
      the mesh has no such axis.
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

  def __post_init__(self) -> None:
    fields.check_fields(self, "steps", "checkpoint_every", "accumulate")
    fields.check_fields(self, "keep_checkpoints", least=2,
                        more=": the newest one may be damaged")
    fields.check_fields(self, "evaluate_every", least=0,
                        more=": 0 evaluates only at the end")
    shares = dict(self.mesh.shape).get(self.data_axis, 1) if self.mesh else 1
    for x in jax.tree.leaves(self.batch(0)):
      if np.ndim(x) and len(x) % self.accumulate:
        raise ValueError(
            f"accumulate is {self.accumulate}, which must divide the "
            f"{len(x)} rows of a batch; change one of them")
      if np.ndim(x) and len(x) // self.accumulate % shares:
        raise ValueError(
            f"a step reads {len(x) // self.accumulate} rows at a time, but "
            f"mesh axis {self.data_axis!r} has {shares} devices; give a "
            f"multiple of {shares} rows, or a smaller axis {self.data_axis!r}")

  def run(self, trainable: dict[str, _Tree],
          frozen: dict[str, _Tree] | None = None) -> dict[str, Any]:
    """Trains to the end, from `trainable` or from the last checkpoint.

    Args:
      trainable: trees of parameters to train, by name, usually float32.
      frozen: trees of the objective's other parameters, by name, or None.

    Returns:
      The trained parameters.

    Raises:
      ValueError: the newest checkpoint in `directory` is damaged or has other
        parameters; all checkpoints are of later steps; an array cannot be split
        evenly over the mesh; or `param_shardings` has an unknown name.
      FloatingPointError: parameters or loss are NaN or infinite, or the loss
        exceeds 10 * max(|first loss|, 1). This step is not saved.
      processes.Stopped: SIGTERM or Ctrl-C was received. The last step is saved.
    """
    self._check_names({**trainable, **(frozen or {})})
    with processes.listening():
      params = self._run(trainable, frozen or {})
      # The signal may come while the last checkpoint is written.
      if processes.told_to_stop():
        raise processes.stopped(
            f"after step {self.steps}, the last one, which is saved: the same "
            "command completes the run")
    return params

  def _run(self, trainable: dict[str, _Tree], frozen: dict[str, _Tree]
           ) -> dict[str, _Tree]:
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
        del state  # frees memory, because two states may not fit on the device
        state, losses = checkpoints.newest(manager, like, self.steps)
      start = int(state.step)
      if start == self.steps or taken is not None and taken > self.steps:
        # The log is not opened, because this would delete rows of later steps.
        # A longer run may continue from these rows.
        return state.params
      progress = stack.enter_context(Progress.over(
          directory, start, self.steps, self.tokens_per_step, self.log, losses))
      return self._train(state, frozen, layout, dtype, manager, progress)

  def _train(self, state: TrainState, frozen: dict[str, _Tree],
             layout: layout_lib.Layout | None, dtype: jnp.dtype,
             manager: checkpoints.Manager, progress: Progress
             ) -> dict[str, _Tree]:
    """Returns the parameters after all remaining steps from `state`."""
    step_once = functools.partial(
        train_step, key=jax.random.key(self.seed), objective=self.objective,
        optimizer=self.optimizer, accumulate=self.accumulate, dtype=dtype,
        layout=layout)
    first_loss = None
    for step in range(int(state.step), self.steps):
      state, aux = step_once(state, frozen, self._batch(step, layout))
      done = step + 1
      evaluates = self._is_evaluated(done)
      progress.stepped(done, *aux, evaluates)
      stops = processes.told_to_stop()
      saves = stops or self._is_due(done, self.checkpoint_every)
      first_loss = float(aux[0]) if first_loss is None else first_loss
      if saves or done % _CHECK_EVERY == 0:
        _check_loss(float(aux[0]), first_loss, done)
      if saves:
        _check_finite(state.params, done)
      if evaluates:
        self._evaluate(done, state.params, frozen, dtype, progress)
      else:
        progress.write(done)
      if saves:
        checkpoints.save(manager, done, state, progress.pending_losses)
      if stops:
        raise processes.stopped(
            f"after step {done}, which is saved: the same command continues "
            f"the run, and with --steps={done} it ends the run at this step")
    return state.params

  def _batch(self, step: int, layout: layout_lib.Layout | None) -> Any:
    batch = self.batch(step)
    return layout.batch(batch) if layout else batch

  def _is_evaluated(self, done: int) -> bool:
    return self.evaluate is not None and self._is_due(done, self.evaluate_every)

  def _is_due(self, done: int, every: int) -> bool:
    """Returns True every `every` steps and at the end of the run.

    If `every` is 0, the result is True only at the end.
    """
    return done == self.steps or every > 0 and done % every == 0

  def _evaluate(self, done: int, params: dict[str, _Tree],
                frozen: dict[str, _Tree], dtype: jnp.dtype,
                progress: Progress) -> None:
    """Evaluates the parameters as they will be saved, and logs the values."""
    saved = cast(params, self.saved_dtype or dtype)
    values = self.evaluate({**frozen, **cast(saved, dtype)})
    progress.evaluated(done, values)
    progress.write(done)
    if self.evaluated:
      self.evaluated(done, params, values)

  def _check_names(self, params: Mapping[str, _Tree]) -> None:
    for name in self.param_shardings or {}:
      if name not in params:
        raise ValueError(
            f"param_shardings contains {name!r}, but the parameters are "
            f"{', '.join(map(repr, params))}; use these names")

  def _frozen(self, params: dict[str, _Tree]) -> dict[str, _Tree]:
    if self.mesh is None:
      return params
    return processes.placed(params, layout_lib.of_params(
        self.mesh, params, self.param_shardings or {}))

  def _fresh_state(self, trainable: dict[str, _Tree]
                   ) -> tuple[TrainState, layout_lib.Layout | None]:
    """Returns the state before the first step, and its `Layout` on a mesh."""
    def first(params: dict[str, _Tree]) -> TrainState:
      return TrainState(step=jnp.zeros((), jnp.int32), params=params,
                        opt_state=self.optimizer.init(params))

    if self.mesh is None:
      # The state contains copies of the caller's parameters, because the step
      # donates the state and its arrays become invalid.
      return first(jax.tree.map(jnp.copy, trainable)), None
    places = layout_lib.of_params(
        self.mesh, trainable, self.param_shardings or {})
    shardings = layout_lib.of_state(
        self.mesh, jax.eval_shape(first, trainable), places)
    state = jax.jit(first, out_shardings=shardings)(
        processes.placed(trainable, places))
    return state, layout_lib.Layout(
        self.mesh, self.data_axis, tuple(jax.tree.leaves(shardings)))


# The step is a function of the module and not a method. Trainers with equal
# objective and optimiser therefore share its compiled program. The state is
# donated, so that parameters and moments are updated in place.
@functools.partial(
    jax.jit, donate_argnames="state",
    static_argnames=("objective", "optimizer", "accumulate", "dtype", "layout"))
def train_step(state: TrainState, frozen: Mapping[str, _Tree],
               batch: Mapping[str, _Tree], key: jax.Array, *,
               objective: Objective, optimizer: optax.GradientTransformation,
               accumulate: int, dtype: jax.typing.DTypeLike,
               layout: layout_lib.Layout | None = None
               ) -> tuple[TrainState, Loss]:
  """Returns `(state, (loss, metrics))` after one step of a `Trainer`.

  The metrics include the norm of the gradient as `gradient_norm`.

  Args:
    state: state before the step. It is donated.
    frozen: trees of frozen parameters, by name.
    batch: batch of the step.
    key: PRNG key of the run. The key of the step is derived from it.
    objective: objective of the `Trainer`.
    optimizer: optax transformation of the `Trainer`.
    accumulate: number of parts of a batch.
    dtype: the `compute_dtype` of the `Trainer`.
    layout: layout of the run on a mesh, or None.
  """
  def loss(trainable: Mapping[str, _Tree], batch: Mapping[str, jax.Array],
           key: jax.Array) -> Loss:
    return objective(cast(trainable, dtype), frozen, batch, key)

  def before_parts(batch: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    if not hasattr(objective, "before_parts"):
      return {}
    params = {**frozen, **cast(state.params, dtype)}
    return objective.before_parts(params, batch)

  (value, metrics), grads = _averaged(
      jax.value_and_grad(loss, has_aux=True), before_parts, accumulate,
      state.params, batch, jax.random.fold_in(key, state.step), layout)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  state = state.replace(step=state.step + 1, params=params,
                        opt_state=opt_state)
  squares = [jnp.sum(jnp.square(x.astype(jnp.float32)))
             for x in jax.tree.leaves(grads)]
  metrics = {**metrics, "gradient_norm": jnp.sqrt(sum(squares))}
  return layout.pin(state) if layout else state, (value, metrics)


def _averaged(grad: Callable[..., tuple[Loss, _Tree]],
              before_parts: Callable[..., Mapping[str, jax.Array]],
              accumulate: int, trainable: Mapping[str, _Tree],
              batch: Mapping[str, jax.Array], key: jax.Array,
              layout: layout_lib.Layout | None) -> tuple[Loss, _Tree]:
  """Returns `((loss, metrics), gradients)`, averaged over parts of a batch.

  Every part contains the complete batch as "whole", so that the objective can
  divide by the weights of all tokens (see `objective.Weights`). The complete
  batch takes no memory, because the device holds it already.
  """
  if accumulate == 1:
    return grad(trainable, batch, key)
  parts = jax.tree.map(
      lambda x: x.reshape(accumulate, -1, *x.shape[1:]) if x.ndim
      else jnp.broadcast_to(x, accumulate), batch)
  if layout:
    parts = layout.pin_parts(parts)
  more = jax.lax.map(before_parts, parts)
  parts = {**parts, **more}
  batch = {**batch, **{
      name: x.reshape(-1, *x.shape[2:]) for name, x in more.items()}}
  numbers = jnp.arange(accumulate, dtype=jnp.int32)

  def part_grad(part: _Tree, number: jax.Array) -> tuple[Loss, _Tree]:
    part = {**part, "whole": batch, "part": number}
    return grad(trainable, part, key)

  def add(total: _Tree, part: tuple[_Tree, jax.Array]) -> tuple[_Tree, None]:
    return jax.tree.map(lambda x, new: x + (new / accumulate).astype(x.dtype),
                        total, part_grad(*part)), None

  shapes = jax.eval_shape(
      part_grad, *jax.tree.map(lambda x: x[0], (parts, numbers)))
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(add, zero, (parts, numbers))[0]


def _check_loss(loss: float, first: float, step: int) -> None:
  most = _DIVERGED * max(abs(first), 1.0)
  if not loss <= most:
    raise FloatingPointError(
        f"the loss is {loss:.3g} at step {step}, above the limit {most:.3g} "
        f"(the first loss was {first:.3g}): the run diverged; {_FIX}")


def _check_finite(params: _Tree, step: int) -> None:
  if not _all_finite(params):
    raise FloatingPointError(
        f"parameters are NaN or infinite after step {step} and are not saved; "
        f"{_FIX}")


@jax.jit
def _all_finite(params: _Tree) -> jax.Array:
  return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]
                   ).all()


def cast(tree: chex.ArrayTree, dtype: jax.typing.DTypeLike) -> Any:
  """Returns a tree with the floating-point leaves cast to `dtype`.

  >>> cast({"x": jnp.zeros(2), "n": jnp.int32(3)}, jnp.bfloat16)["x"].dtype
  dtype(bfloat16)

  Args:
    tree: tree of arrays.
    dtype: the new dtype.
  """
  return jax.tree.map(
      lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating)
      else x, tree)
