"""Writing to rows at different places."""

import numpy as np

from specjax.caches import dense


def test_put():
  # Broken: a row is written at another's place, or a block at the end of a row
  # is cut.
  old = np.zeros((3, 5, 2), np.float32)
  new = 1 + np.arange(18, dtype=np.float32).reshape(3, 3, 2)
  found = dense.put_rows(old, new, np.array([0, 2, 4], np.int32))
  assert found.dtype == np.float32
  for row, block, start in zip(found, new, (0, 2, 2)):
    np.testing.assert_array_equal(row[start:start + 3], block)
    assert np.count_nonzero(row) == block.size
