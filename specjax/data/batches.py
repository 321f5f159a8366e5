"""Reproducible batches of token windows."""

import dataclasses

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


def spread_rows(tokens: np.ndarray, count: int, size: int) -> np.ndarray:
  """Returns `[count, size]` int32, equally spaced rows of `[T]` tokens.

  Raises:
    ValueError: the stream is shorter than a row.
  """
  if len(tokens) < size:
    raise ValueError(f"the held-out text has {len(tokens)} tokens, but a row "
                     f"has {size}; give more text, or shorter rows")
  starts = np.linspace(0, len(tokens) - size, count).astype(int)
  return tokens[starts[:, None] + np.arange(size)].astype(np.int32)
