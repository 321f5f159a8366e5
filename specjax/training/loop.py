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
import os
import pathlib
import shutil
import sys
import time
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm

from specjax.files import fingerprint
from specjax.models.transformer import default_dtype
from specjax.training.metrics import MetricsLog
from specjax.training.objectives import Objective
from specjax.training.objectives.base import Loss

_LOG_EVERY = 10  # steps
_DIGEST = "fingerprint"  # of a state, in a checkpoint's metadata


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
  one is damaged it says so, moves it aside and takes the one before. A batch
  that cannot be cut into `accumulate` parts is refused.

  Attributes:
    objective: an `Objective`, or a function that is called like one. A metric
      with a slash in its name goes to disk and not to the screen.
    optimizer: an optax transformation of the trainable parameters.
    batch: `step -> batch`, a tree of arrays whose first axis are rows;
      scalars in it are shared by all rows.
    steps: length of the run.
    directory: of checkpoints, `metrics.csv` and TensorBoard events.
    evaluate: `params -> {name: value}`, given all parameters, called every
      `evaluate_every` steps and at the end.
    evaluate_every: steps; 0 evaluates at the end alone.
    checkpoint_every: steps between checkpoints.
    tokens_per_step: for the throughput that is logged.
    accumulate: parts that a batch is cut into; their gradients are averaged.
      Memory is that of one part.
    compute_dtype: that the objective and `evaluate` see all parameters in;
      the trained ones are kept, averaged and saved in their own. None is
      `default_dtype()`.
    seed: of the objective's keys, one for each step.
  """

  objective: Objective
  optimizer: optax.GradientTransformation
  batch: Callable[[int], Any]
  steps: int
  directory: pathlib.Path
  evaluate: Callable[[Any], dict[str, float]] | None = None
  evaluate_every: int = 0
  checkpoint_every: int = 200
  tokens_per_step: int = 0
  accumulate: int = 1
  compute_dtype: Any = None
  seed: int = 0

  def __post_init__(self):
    for x in jax.tree.leaves(self.batch(0)):
      if np.ndim(x) and len(x) % self.accumulate:
        raise ValueError(
            f"a batch has {len(x)} rows and accumulate is {self.accumulate}; "
            "it must divide the rows: choose another, or another batch size")

  def run(self, trainable: dict[str, Any], frozen: dict[str, Any] | None = None
          ) -> dict[str, Any]:
    """Trains to the end, from `trainable` or from the last checkpoint.

    Args:
      trainable: parameters to train, in float32 as a rule.
      frozen: parameters that the objective needs and that stay as they are.

    Returns:
      The trained parameters.

    Raises:
      ValueError: the checkpoints in `directory` are of other parameters, or all
        of them are damaged.
    """
    dtype = self.compute_dtype or default_dtype()
    frozen = cast(frozen or {}, dtype)
    step_once = functools.partial(
        train_step, key=jax.random.key(self.seed), objective=self.objective,
        optimizer=self.optimizer, accumulate=self.accumulate, dtype=dtype)
    directory = pathlib.Path(self.directory).absolute()
    # Two, for the newer may be damaged; what a killed run left is no use.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, cleanup_tmp_directories=True)
    with contextlib.ExitStack() as stack:
      manager = stack.enter_context(ocp.CheckpointManager(
          directory / "checkpoints", options=options))
      state = self._first_state(trainable, manager)
      start = int(state.step)
      log = stack.enter_context(
          contextlib.closing(MetricsLog(directory, start)))
      bar = stack.enter_context(tqdm.tqdm(
          total=self.steps, initial=start, unit="step", dynamic_ncols=True))
      tick, ticked = time.monotonic(), start
      for step in range(start, self.steps):
        state, (loss, metrics) = step_once(state, frozen, self.batch(step))
        done = step + 1
        bar.update()
        row = {}
        if done % _LOG_EVERY == 0 or done == self.steps:
          row = {"loss": float(loss), **_floats(metrics)}
          seconds, tick = time.monotonic() - tick, time.monotonic()
          row["tokens_per_second"] = (
              (done - ticked) * self.tokens_per_step / seconds)
          ticked = done
          bar.set_postfix(loss=f"{row['loss']:.4f}")
        if self.evaluate and (
            done == self.steps or
            self.evaluate_every and done % self.evaluate_every == 0):
          row.update(self.evaluate(
              {**frozen, **cast(state.params, dtype)}))
          bar.write(f"step {done}: " + ", ".join(
              f"{k} {v:.4f}" for k, v in row.items() if "/" not in k))
          tick, ticked = time.monotonic(), done
        if row:
          log.write(done, row)
        if done % self.checkpoint_every == 0 or done == self.steps:
          _save(manager, done, state)
    return state.params

  def _first_state(self, trainable, manager):
    # The step donates its state, and the caller keeps what it gave.
    params = jax.tree.map(jnp.copy, trainable)
    state = TrainState(step=jnp.zeros((), jnp.int32), params=params,
                       opt_state=self.optimizer.init(params))
    steps, reasons = sorted(manager.all_steps(), reverse=True), []
    for step in steps:
      try:
        restored = _restore(manager, step, state)
      except Exception as e:  # whatever a library says of bytes it cannot read
        reasons.append(e)
      else:
        _set_aside(manager, dict(zip(steps, reasons)), step)
        return restored
    if steps:
      raise ValueError(
          f"no checkpoint in {manager.directory} can be read: they are of "
          "other parameters than this run's, or damaged; give another "
          "directory, or delete them and start again") from reasons[0]
    return state


def _save(manager, step, state):
  """Saves a checkpoint, while the run goes on.

  Raises:
    OSError: this one, or the one before it, cannot be written.
  """
  try:
    # The format itself would not notice a bit that falls over.
    manager.save(step, args=ocp.args.StandardSave(state),
                 custom_metadata={_DIGEST: fingerprint(state)})
  except Exception as e:  # whatever a library says of a disk that is full
    reason = str(e).rsplit(": ", 1)[-1]
    raise OSError(f"no checkpoint can be written to {manager.directory}: "
                  f"{reason}; make room, or choose another directory") from e


def _restore(manager, step, like):
  """The state of a checkpoint, with the bits that were saved."""
  state = manager.restore(step, args=ocp.args.StandardRestore(like))
  saved = (manager.metadata(step).custom_metadata or {}).get(_DIGEST)
  if saved is not None and saved != fingerprint(state):
    raise ValueError("its numbers are not those that were saved")
  return state


def _set_aside(manager, damaged, step):
  """Moves damaged checkpoints away, so that their steps can be saved again."""
  for bad, reason in damaged.items():
    place = pathlib.Path(manager.directory).parent / f"damaged_{bad}"
    shutil.rmtree(place, ignore_errors=True)
    os.rename(pathlib.Path(manager.directory) / str(bad), place)
    reason = str(reason).split("\n")[0][:100] or type(reason).__name__
    print(f"warning: the checkpoint of step {bad} is damaged ({reason}): it "
          f"was moved to {place}, and the run goes on from step {step}",
          file=sys.stderr)
  if damaged:
    manager.reload()


# Trainers of one objective and one optimiser share the compiled step. The
# state is donated: parameters and moments are updated in place.
@functools.partial(
    jax.jit, donate_argnames="state",
    static_argnames=("objective", "optimizer", "accumulate", "dtype"))
def train_step(state: TrainState, frozen: Mapping[str, Any],
               batch: Mapping[str, Any], key: jax.Array, *,
               objective: Objective, optimizer: optax.GradientTransformation,
               accumulate: int, dtype: Any
               ) -> tuple[TrainState, Loss]:
  """`(state, (loss, metrics))` after one step of a `Trainer`.

  Args:
    state: a `TrainState`; it is donated.
    frozen: parameters that stay as they are.
    batch: of the step.
    key: the run's; the step's is folded out of it.
    objective: as are the others, of the `Trainer`.
    optimizer: see there.
    accumulate: see there.
    dtype: the `compute_dtype`.
  """
  def loss(trainable, batch, key):
    return objective(cast(trainable, dtype), frozen, batch, key)

  aux, grads = _averaged(
      jax.value_and_grad(loss, has_aux=True), accumulate, state.params, batch,
      jax.random.fold_in(key, state.step))
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  return state.replace(step=state.step + 1, params=params,
                       opt_state=opt_state), aux


def _averaged(grad, accumulate, trainable, batch, key):
  """`((loss, metrics), gradients)`, averaged over the parts of a batch."""
  if accumulate == 1:
    return grad(trainable, batch, key)
  parts = jax.tree.map(
      lambda x: x.reshape(accumulate, -1, *x.shape[1:]) if x.ndim
      else jnp.broadcast_to(x, accumulate), batch)
  keys = jax.random.split(key, accumulate)

  def add(total, part):
    return jax.tree.map(jnp.add, total, grad(trainable, *part)), None

  shapes = jax.eval_shape(
      grad, trainable, *jax.tree.map(lambda x: x[0], (parts, keys)))
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  total, _ = jax.lax.scan(add, zero, (parts, keys))
  return jax.tree.map(lambda x: x / accumulate, total)


def cast(tree: Any, dtype: Any) -> Any:
  """The tree with its floating-point leaves in `dtype`."""
  return jax.tree.map(
      lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating)
      else x, tree)


def _floats(metrics):
  return {name: float(value) for name, value in metrics.items()}
