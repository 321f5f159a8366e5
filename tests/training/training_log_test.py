"""The log of a training run, and runs that a signal ends."""

import itertools
import os
import signal
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scripts

from specjax import objectives
from specjax import testing
from specjax.training import evaluation
from specjax.training import loop
from specjax.training import metrics
from specjax.training.progress import Log
from specjax.utils import processes

_OBJECTIVE = objectives.NextToken(model=testing.MarkovModel(5))
_RATE = lambda step: 0.1 / (1 + step)
_SGD = optax.sgd(_RATE)
_ROWS = np.random.default_rng(0).integers(5, size=(30, 4, 7)).astype(np.int32)


def _table():
  return {"target": _OBJECTIVE.model.init(jax.random.key(0))}


def _trainer(directory, at=None, act=None, **config):
  """A run of 30 steps; `act` is called while the batch `at` is made."""
  def batch(step):
    if step == at:
      act()
    return {"tokens": _ROWS[step]}

  return loop.Trainer(**{
      "objective": _OBJECTIVE, "optimizer": _SGD, "directory": directory,
      "batch": batch, "steps": 30, "checkpoint_every": 7,
      "log": Log(loss="of a table", learning_rate=_RATE, steps_per_epoch=8),
      **config})


@pytest.fixture
def heard():
  """Signals as in the foreground; a shell's background ignores SIGINT."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def _interrupt():
  raise KeyboardInterrupt


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_single_process_after_a_step_that_it_saves(
    tmp_path, number):
  # Broken: the steps since the last checkpoint are lost; the log of the whole
  # run shows where it was stopped; or handlers stay behind.
  handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  whole = _trainer(tmp_path / "whole").run(_table())["target"]
  name = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
  with pytest.raises(processes.Stopped, match=(
      f"stopped by {name} after step 13, which is saved: the same command "
      "continues .*--steps=13")) as stopped:
    _trainer(tmp_path / "cut", 12, lambda: os.kill(os.getpid(), number)).run(
        _table())
  assert stopped.value.signal == number
  assert max(scripts.checkpoints(tmp_path / "cut")) == 13
  assert not processes.told_to_stop() and handlers == (
      signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
  resumed = _trainer(tmp_path / "cut").run(_table())["target"]
  np.testing.assert_array_equal(resumed, whole)
  assert scripts.metrics(tmp_path / "cut") == scripts.metrics(
      tmp_path / "whole")


@pytest.mark.usefixtures("heard")
def test_a_second_signal_ends_a_run_at_once(tmp_path):
  # Broken: nothing but SIGKILL ends a step or an evaluation that takes long.
  def twice():
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGINT)

  with pytest.raises(KeyboardInterrupt):
    _trainer(tmp_path, 12, twice).run(_table())


def test_signals_stay_as_they_are_where_a_run_may_not_hear_them(tmp_path):
  # Broken: a thread cannot train; or Ctrl-C ends a background process, which
  # must ignore it.
  found = []
  thread = threading.Thread(
      target=lambda: found.append(_trainer(tmp_path, steps=1).run(_table())))
  thread.start()
  thread.join()
  assert found
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    with processes.listening():
      assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
      assert callable(signal.getsignal(signal.SIGTERM))
  finally:
    signal.signal(signal.SIGINT, before)


def test_a_signal_while_the_last_checkpoint_is_written_is_not_lost(
    tmp_path, monkeypatch):
  # Broken: the program goes on with measurements that nobody waits for.
  close = loop.checkpoints.Manager.close

  def closing(self):
    os.kill(os.getpid(), signal.SIGTERM)
    close(self)

  monkeypatch.setattr(loop.checkpoints.Manager, "close", closing)
  with pytest.raises(processes.Stopped, match="after step 3, the last one"):
    _trainer(tmp_path, steps=3).run(_table())


def _losses_and_norms():
  """Returns the loss and gradient norm of every step, by optax alone."""
  params, state = _table(), _SGD.init(_table())
  losses, norms = [], []
  for rows in _ROWS:
    (loss, _), grads = jax.value_and_grad(_OBJECTIVE, has_aux=True)(
        params, {}, {"tokens": rows}, None)
    updates, state = _SGD.update(grads, state)
    params = optax.apply_updates(params, updates)
    losses.append(float(loss))
    norms.append(float(jnp.linalg.norm(grads["target"])))
  return np.array(losses), np.array(norms)


def test_the_log_has_means_rates_norms_and_epochs(tmp_path, capsys):
  # Broken: the loss on the screen is that of one batch; a small file is
  # repeated without a word; rates are those of other steps.
  losses, norms = _losses_and_norms()
  trainer = _trainer(
      tmp_path, evaluate_every=15, evaluate=lambda params: {
          "held_out_loss": 1.5, "head_1/top_1": 0.25, "head_2/top_1": 0.125})
  trainer.run(_table())
  read = lambda name: metrics.read(tmp_path, name)
  lines = [0, 10, 15, 20, 30]
  want = {
      "loss": [losses[b - 1] for b in lines[1:]],
      "mean_loss": [losses[a:b].mean() for a, b in itertools.pairwise(lines)],
      "gradient_norm": [norms[b - 1] for b in lines[1:]],
      "learning_rate": [_RATE(b - 1) for b in lines[1:]],
      "epoch": [b / 8 for b in lines[1:]]}
  for name, values in want.items():
    steps, found = zip(*read(name))
    assert list(steps) == lines[1:], name
    np.testing.assert_allclose(found, values, rtol=1e-5, err_msg=name)
  out, err = capsys.readouterr()
  assert "30 steps read the training data 3.8 times; an epoch is 8" in err
  assert f"TensorBoard files: tensorboard --logdir={tmp_path}" in err
  assert (f"step 15 (epoch 1.88): loss {losses[10:15].mean():.4f} (mean of 5 "
          "steps, of a table), gradient_norm") in out
  assert "held_out_loss 1.5\n  top-1 accuracy of heads 1 to 2: 0.250 0.125" in (
      out)


def test_a_killed_run_has_the_log_of_a_whole_one(tmp_path):
  # Broken: the first mean after a restart leaves out steps before it.
  _trainer(tmp_path / "whole").run(_table())
  with pytest.raises(KeyboardInterrupt):  # as a kill, from within
    _trainer(tmp_path / "cut", 16, _interrupt).run(_table())
  assert max(scripts.checkpoints(tmp_path / "cut")) == 14
  _trainer(tmp_path / "cut").run(_table())
  assert scripts.metrics(tmp_path / "cut") == scripts.metrics(
      tmp_path / "whole")


def test_a_run_ends_at_an_earlier_checkpoint_and_loses_nothing(tmp_path):
  # Broken: a longer run cannot be ended early, or loses its later steps or
  # their log by it.
  short = _trainer(tmp_path / "short", steps=14).run(_table())["target"]
  long = _trainer(tmp_path / "long", keep_checkpoints=9).run(_table())["target"]
  log = scripts.metrics(tmp_path / "long")
  early = _trainer(tmp_path / "long", steps=20).run(_table())["target"]
  np.testing.assert_array_equal(
      _trainer(tmp_path / "long", steps=14).run(_table())["target"], short)
  again = _trainer(tmp_path / "long").run(_table())["target"]
  np.testing.assert_array_equal(again, long)
  np.testing.assert_array_equal(early, short)  # there is none of 20 steps
  assert (early != again).any() and log == scripts.metrics(tmp_path / "long")


def test_the_held_out_loss_is_the_objectives_own():
  # Broken: a last part of fewer rows counts as much as a whole one.
  rows = _ROWS[0][:3]
  measured = evaluation.held_out_loss(_OBJECTIVE, rows)(_table())
  want = _OBJECTIVE(_table(), {}, {"tokens": rows}, None)[0]
  np.testing.assert_allclose(measured["held_out_loss"], want, rtol=1e-6)


def test_the_held_out_loss_of_counted_tokens():
  # Broken: a part with few counted tokens counts as much as another, or a token
  # that does not count has an effect.
  rows = np.concatenate(_ROWS[:2])[:5]
  counted = np.zeros(rows.shape, bool)
  counted[0, 1:], counted[1, 2], counted[4, [0, 3]] = True, True, True
  loss = lambda rows: evaluation.held_out_loss(
      _OBJECTIVE, rows, counted=counted)(_table())["held_out_loss"]
  want = _OBJECTIVE(_table(), {}, {
      "tokens": rows, "weights": counted[:, 1:].astype(np.float32)}, None)[0]
  np.testing.assert_allclose(loss(rows), want, rtol=1e-6)
  others = rows.copy()
  others[2:4] = 1
  others[1, 3:] = 1
  assert loss(others) == loss(rows)


def test_weights_and_biases_get_the_same_run_twice(tmp_path, monkeypatch):
  # Broken: a run that goes on is another run there, or misses the values.
  runs, rows = [], []
  run = types.SimpleNamespace(
      log=lambda row, step: rows.append((step, row["mean_loss"])),
      finish=lambda: rows.append("end"))
  fake = types.SimpleNamespace(
      init=lambda **config: runs.append(config) or run)
  monkeypatch.setitem(sys.modules, "wandb", fake)
  for steps in (10, 20):
    _trainer(tmp_path, steps=steps, log=Log(wandb="mine")).run(_table())
  assert [x["project"] for x in runs] == ["mine", "mine"]
  assert runs[0]["id"] == runs[1]["id"] and runs[1]["resume"] == "allow"
  (first, *_), end, (second, *_), _ = rows
  assert (first, end, second) == (10, "end", 20)

  def fail(**config):
    raise RuntimeError("no API key\nconfigured")

  fake.init = fail
  with pytest.raises(ValueError, match="no API key configured.; log in with"):
    _trainer(tmp_path, log=Log(wandb="mine")).run(_table())


def test_weights_and_biases_are_asked_for_before_hours_of_work(monkeypatch):
  # Broken: the missing package is found out when the target has written.
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  [found] = scripts.run_all("train_lm.py", ["--output_dir=x", "--wandb=mine"],
                            cwd=".")
  assert "--wandb=mine" in found["code"]
  assert "pip install 'specjax[wandb]'" in found["code"]
