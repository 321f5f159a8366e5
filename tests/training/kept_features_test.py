"""Features that are read once and kept in memory."""

import numpy as np

from specjax.training.distillation import RowBatches
from specjax.training.kept_features import KeptFeatures

_ROWS = np.arange(7 * 5, dtype=np.int32).reshape(7, 5)


def _kept():
  passes = []

  def read(rows):
    passes.append(rows)
    return {"features": rows[:, :-1, None] * 1e4, "counts": rows[:, :-1]}

  return KeptFeatures(
      RowBatches(np.arange(len(_ROWS)), 3, seed=1),
      lambda numbers: {"tokens": _ROWS[numbers], "numbers": numbers}, read, 2
  ), passes


def test_every_row_is_read_once_and_gets_what_is_its_own():
  # Broken: a row is trained on with another one's features, is read in every
  # epoch, or what float16 cannot hold becomes infinite.
  kept, passes = _kept()
  seen = [kept.batch(step) for step in range(12)]
  assert len({row.tobytes() for b in seen for row in b["tokens"]}) == 7
  assert all(rows.shape == (2, 5) for rows in passes)
  assert len(passes) <= 5  # two full batches, and the row that they left out
  for batch in seen:
    np.testing.assert_array_equal(batch["counts"], batch["tokens"][:, :-1])
    np.testing.assert_array_equal(batch["tokens"], _ROWS[batch["numbers"]])
    assert batch["features"].dtype == np.float16
    np.testing.assert_allclose(
        batch["features"][..., 0], np.minimum(
            batch["tokens"][:, :-1] * 1e4, 65504), rtol=1e-3)


def test_a_run_that_is_started_again_sees_the_same_batches():
  # Broken: a batch depends on those before it.
  first, again = _kept()[0], _kept()[0]
  batches = [first.batch(step) for step in range(6)]
  for step in (5, 3):
    found = again.batch(step)
    for name, x in batches[step].items():
      np.testing.assert_array_equal(found[name], x)
