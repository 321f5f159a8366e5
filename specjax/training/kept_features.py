"""Features of a frozen target, cached in memory as float16.

A target's pass over a row is more expensive than a training step of a feature
layer. The features of a row are therefore computed once and stored for later
epochs.
"""

from collections.abc import Callable
import dataclasses

import jax
import numpy as np

from specjax.training.distillation import RowBatches


@dataclasses.dataclass(frozen=True, eq=False)
class KeptFeatures:
  """Shuffled batches of rows with their features.

  The features of a row depend only on the row. A batch is therefore a function
  of the step, as `Trainer` requires. A resumed run computes the features again.

  >>> tokens = np.array([[0, 1], [2, 3]], np.int32)
  >>> kept = KeptFeatures(RowBatches(np.arange(2), batch_size=2),
  ...                     lambda numbers: {"tokens": tokens[numbers]},
  ...                     read=lambda rows: {"sum": rows.sum(1)}, pass_rows=1)
  >>> batch = kept.batch(0)
  >>> bool((batch["tokens"].sum(1) == batch["sum"]).all())
  True

  Attributes:
    order: batches of row numbers.
    rows: function `row numbers [n] -> arrays by name`, with the tokens
      `[n, S + 1]` int32 of these rows as "tokens".
    read: function that computes features, `tokens [P, S + 1] ->
      {name: [P, ...]}`.
    pass_rows: number P of rows per call of `read`.
  """

  order: RowBatches
  rows: Callable[[np.ndarray], dict[str, np.ndarray]]
  read: Callable[[np.ndarray], dict[str, jax.Array]]
  pass_rows: int
  _kept: dict[int, dict[str, np.ndarray]] = dataclasses.field(
      default_factory=dict, repr=False)

  def batch(self, step: int) -> dict[str, np.ndarray]:
    """Returns a batch: the arrays of `rows`, and the features by name.

    Args:
      step: number of the training step.
    """
    chosen = self.order.batch(step)
    new = [i for i in chosen.tolist() if i not in self._kept]
    for start in range(0, len(new), self.pass_rows):
      some = new[start:start + self.pass_rows]
      # All calls have the same shape, so `read` is compiled once.
      padded = np.resize(some, self.pass_rows)
      features = jax.device_get(self.read(self.rows(padded)["tokens"]))
      for place, i in enumerate(some):
        self._kept[i] = {name: _half(x[place]) for name, x in features.items()}
    features = [self._kept[i] for i in chosen.tolist()]
    return {**self.rows(chosen),
            **{name: np.stack([row[name] for row in features])
               for name in features[0]}}


def _half(x: np.ndarray) -> np.ndarray:
  """Returns a copy with floating-point values clipped and cast to float16."""
  if not np.issubdtype(x.dtype, np.floating):
    return np.array(x)
  most = np.finfo(np.float16).max
  return np.clip(x, -most, most).astype(np.float16)
