"""What a frozen target says of rows that are trained on more than once.

A pass of the target costs more than a step of the layer that reads it. Where
rows come again, epoch after epoch, what the first pass over them found can be
kept in memory (never on disk) as float16.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import numpy as np

from specjax.training.distillation import RowBatches


@dataclasses.dataclass(frozen=True, eq=False)
class KeptFeatures:
  """Shuffled batches of rows, with what `read` says of them.

  What is read of a row depends on it alone, so that batches are a function of
  the step, as `Trainer` wants them: a run that is started again reads anew.

  Attributes:
    rows: `[R, S + 1]` int32.
    batch_size: B, rows of a batch.
    read: `rows [P, S + 1] -> {name: [P, ...]}`.
    pass_rows: P, rows of a pass.
    seed: of the shuffle.
  """

  rows: np.ndarray
  batch_size: int
  read: Callable[[np.ndarray], dict[str, jax.Array]]
  pass_rows: int
  seed: int = 0
  _kept: dict[int, dict[str, np.ndarray]] = dataclasses.field(
      default_factory=dict, repr=False)

  def batch(self, step: int) -> dict[str, Any]:
    """`tokens [B, S + 1]`, and what was read of each row."""
    order = RowBatches(np.arange(len(self.rows)), self.batch_size, self.seed)
    chosen = order.batch(step)
    new = [i for i in chosen.tolist() if i not in self._kept]
    for start in range(0, len(new), self.pass_rows):
      some = new[start:start + self.pass_rows]
      padded = np.resize(some, self.pass_rows)  # one shape, one program
      found = jax.device_get(self.read(self.rows[padded]))
      for place, i in enumerate(some):
        self._kept[i] = {name: _small(x[place]) for name, x in found.items()}
    kept = [self._kept[i] for i in chosen.tolist()]
    return {"tokens": self.rows[chosen],
            **{name: np.stack([row[name] for row in kept])
               for name in kept[0]}}


def _small(x):
  """A copy, in float16 where it is wider; what overflows is the largest."""
  if not np.issubdtype(x.dtype, np.floating):
    return np.array(x)
  most = np.finfo(np.float16).max
  return np.clip(x, -most, most).astype(np.float16)
