"""The training loop: one compiled step, exact resume, metrics on disk."""

from collections.abc import Callable
import csv
import dataclasses
import functools
import pathlib
import time
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import tqdm

_LOG_EVERY = 10  # steps


@struct.dataclass
class TrainState:
  """What a run is made of; everything else is a function of it.

  Attributes:
    step: `[]` int32, steps taken.
    params: the parameters.
    opt_state: optax's state.
  """

  step: jax.Array
  params: Any
  opt_state: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
  """Trains parameters on batches that are a pure function of the step.

  A run that is killed and started again with the same arguments continues
  from its last checkpoint and ends with bit-identical parameters.

  Attributes:
    loss: `(params, batch) -> []`.
    optimizer: an optax transformation.
    batch: `step -> batch`.
    steps: length of the run.
    directory: of checkpoints, `metrics.csv` and TensorBoard events.
    evaluate: `params -> {name: value}`, called every `evaluate_every` steps
      and at the end.
    evaluate_every: steps; 0 evaluates at the end alone.
    checkpoint_every: steps between checkpoints.
    tokens_per_step: for the throughput that is logged.
  """

  loss: Callable[..., jax.Array]
  optimizer: optax.GradientTransformation
  batch: Callable[[int], Any]
  steps: int
  directory: pathlib.Path
  evaluate: Callable[[Any], dict[str, float]] | None = None
  evaluate_every: int = 0
  checkpoint_every: int = 200
  tokens_per_step: int = 0

  def run(self, params) -> Any:
    """Trains from `params`, or from the last checkpoint, to the end."""
    state = TrainState(step=jnp.zeros((), jnp.int32), params=params,
                       opt_state=self.optimizer.init(params))
    directory = pathlib.Path(self.directory).absolute()
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(directory / "checkpoints",
                               options=options) as manager:
      if manager.latest_step() is not None:
        state = manager.restore(
            manager.latest_step(), args=ocp.args.StandardRestore(state))
      start = int(state.step)
      log = _Metrics(directory, start)
      bar = tqdm.tqdm(total=self.steps, initial=start, unit="step",
                      dynamic_ncols=True)
      tick = time.monotonic()
      for step in range(start, self.steps):
        state, loss = self._step(state, self.batch(step))
        done = step + 1
        bar.update()
        row = {}
        if done % _LOG_EVERY == 0 or done == self.steps:
          row["loss"] = float(loss)
          seconds, tick = time.monotonic() - tick, time.monotonic()
          row["tokens_per_second"] = _LOG_EVERY * self.tokens_per_step / seconds
          bar.set_postfix(loss=f"{row['loss']:.4f}")
        if self.evaluate and (
            done == self.steps or
            self.evaluate_every and done % self.evaluate_every == 0):
          row.update(self.evaluate(state.params))
          bar.write(f"step {done}: " + ", ".join(
              f"{k} {v:.4f}" for k, v in row.items()))
          tick = time.monotonic()
        if row:
          log.write(done, row)
        if done % self.checkpoint_every == 0 or done == self.steps:
          manager.save(done, args=ocp.args.StandardSave(state))
      bar.close()
      log.close()
    return state.params

  @functools.cached_property
  def _step(self):
    # The state is donated: parameters and moments are updated in place.
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
      loss, grads = jax.value_and_grad(self.loss)(state.params, batch)
      updates, opt_state = self.optimizer.update(
          grads, state.opt_state, state.params)
      params = optax.apply_updates(state.params, updates)
      return state.replace(step=state.step + 1, params=params,
                           opt_state=opt_state), loss

    return step


class _Metrics:
  """Appends to `metrics.csv` (step, name, value) and to TensorBoard."""

  def __init__(self, directory, start):
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "metrics.csv"
    kept = []
    if path.exists():  # rows behind the checkpoint will be written again
      with open(path, newline="") as f:
        kept = [r for r in csv.reader(f) if r[0].isdigit() and
                int(r[0]) <= start]
    self._file = open(path, "w", newline="")
    self._csv = csv.writer(self._file)
    self._csv.writerow(["step", "name", "value"])
    self._csv.writerows(kept)
    try:
      import tensorboardX  # pylint: disable=g-import-not-at-top
      self._board = tensorboardX.SummaryWriter(
          str(directory), purge_step=start or None)
    except ImportError:
      self._board = None

  def write(self, step, row):
    for name, value in row.items():
      self._csv.writerow([step, name, value])
      if self._board:
        self._board.add_scalar(name, value, step)
    self._file.flush()

  def close(self):
    self._file.close()
    if self._board:
      self._board.close()
