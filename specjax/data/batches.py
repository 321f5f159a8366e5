"""Reproducible batches of token windows."""

import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class TokenWindows:
  """Shuffled windows over an array of tokens.

  Every epoch cuts the array into windows at a new offset. It visits the windows
  in a new order, each at most once. Batch k depends only on the tokens, the
  seed and k, so an interrupted run continues with the same batches.

  Attributes:
    tokens: `[T]`, tokens of the corpus.
    batch_size: B, number of windows per batch.
    length: S, number of predicted tokens per window. A window has S + 1 tokens.
    seed: seed of the random offsets and orders.
  """

  tokens: np.ndarray
  batch_size: int
  length: int
  seed: int = 0

  def __post_init__(self):
    if self.batches_per_epoch < 1:
      needed = (self.batch_size + 1) * self.length + 1
      raise ValueError(
          f"the corpus has {len(self.tokens)} tokens, but a batch of "
          f"{self.batch_size} windows of {self.length} needs {needed}: give "
          "more text, or a smaller batch or window")

  @property
  def batches_per_epoch(self) -> int:
    """Returns the number of full batches in one epoch."""
    windows = (len(self.tokens) - 1) // self.length - 1
    return windows // self.batch_size

  def batch(self, step: int) -> np.ndarray:
    """Returns `[B, S + 1]` int32, the batch of training step `step`."""
    epoch, index = divmod(step, self.batches_per_epoch)
    rng = np.random.default_rng([self.seed, epoch])
    offset = rng.integers(self.length)
    windows = (len(self.tokens) - 1) // self.length - 1
    order = rng.permutation(windows)
    chosen = order[index * self.batch_size:(index + 1) * self.batch_size]
    starts = offset + chosen[:, None] * self.length
    return self.tokens[starts + np.arange(self.length + 1)].astype(np.int32)


class HeldOutRows(NamedTuple):
  """Rows for evaluation, and the observations of their intervals.

  Rows of one document are correlated. An interval over rows must therefore
  treat the rows of a document as one observation.

  Attributes:
    tokens: `[R, size]` int32 rows.
    clusters: `[R]` document numbers, equal for rows of the same documents.
    counted: `[R, size]` bool, True for tokens whose prediction is evaluated.
  """

  tokens: np.ndarray
  clusters: np.ndarray
  counted: np.ndarray


def spread(total: int, count: int) -> np.ndarray:
  """Returns at most `count` of the numbers 0..total - 1, equally spaced.

  >>> spread(9, 3).tolist()
  [0, 4, 8]
  """
  return np.unique(np.linspace(0, total - 1, count).astype(int))


def held_out_rows(tokens: np.ndarray, starts: np.ndarray, count: int, size: int,
                  counted: np.ndarray | None = None) -> HeldOutRows:
  """Returns at most `count` rows that do not overlap, equally spaced.

  Rows of different clusters have no document in common. A document of at least
  `size` tokens is cut into rows from its start, and its last tokens are left
  out. Otherwise a row begins at the start of a document and continues into the
  next documents. The next row then begins at the next start of a document.

  >>> rows = held_out_rows(np.arange(7), np.array([0, 5]), count=9, size=2)
  >>> rows.tokens.tolist(), rows.clusters.tolist()
  ([[0, 1], [2, 3], [5, 6]], [0, 0, 1])

  Args:
    tokens: `[T]` held-out tokens.
    starts: offsets of the first tokens of the documents.
    count: maximum number of rows.
    size: number of tokens of a row.
    counted: `[T]` bool, True for tokens whose prediction is evaluated. Rows
      without such a token after the first are left out. None means all tokens.

  Raises:
    ValueError: no row can be cut.
  """
  if len(tokens) < size:
    raise ValueError(f"the held-out text has {len(tokens)} tokens, but a row "
                     f"has {size}; give more text, or shorter rows")
  if counted is None:
    counted = np.broadcast_to(True, len(tokens))
  places, clusters, free = [], [], 0
  ends = [*starts[1:].tolist(), len(tokens)]
  for document, (start, end) in enumerate(zip(starts.tolist(), ends)):
    if start < free or start + size > len(tokens):
      continue
    free = start + max(1, (end - start) // size) * size
    for place in range(start, free, size):
      if counted[place + 1:place + size].any():
        places.append(place)
        clusters.append(document)
  if not places:
    raise ValueError(f"the held-out text has {len(tokens)} tokens, and no row "
                     f"of {size} contains an answer; give more text")
  chosen = spread(len(places), count)
  rows = np.array(places)[chosen, None] + np.arange(size)
  return HeldOutRows(tokens[rows].astype(np.int32), np.array(clusters)[chosen],
                     counted[rows])
