"""One mask rule against the loops that the papers' definitions are."""

import numpy as np

from specjax.methods.blocks import _masks

_T = 7
_ONE, _TWO = np.zeros(_T, int), np.array([0, 0, 0, 1, 1, 1, 1])


def _table(queries, keys, sees):
  return np.array([[sees(q, k) for k in keys] for q in queries])


def test_training_time_test():
  # Broken: a later step reads keys of true features that decoding would not
  # have, or of another row's rollout.
  count = 3
  every = _masks.joined(*(_masks.steps(_ONE, i) for i in range(count)))
  for i in range(count):
    # cnets.py: the keys of step 0 are causal, those of others a diagonal.
    want = np.concatenate(
        [np.tril(np.ones((_T, _T), bool))]
        + [np.eye(_T, dtype=bool) if 0 < j <= i else np.zeros((_T, _T), bool)
           for j in range(1, count)], axis=1)
    queries = _masks.steps(_ONE, i)
    np.testing.assert_array_equal(_masks.visible(queries, every), want)
    np.testing.assert_array_equal(queries.position, np.arange(_T) + i)


def test_pard():
  # Broken: a mask token sees text that would not be written yet, or the mask
  # tokens of another rollout; or what was dropped counts.
  places = [(r, i) for i in range(4) for r in range(i, _T)
            if (r, i) not in ((5, 2), (6, 3))]  # COD dropped two

  def sees(q, k):
    (r, i), (place, copy) = q, k
    if copy == 0:
      return place <= r - i
    return copy <= i and place == r - (i - copy)

  r, i = np.array(places).T
  every = _masks.Elements(anchor=r - i, depth=i, document=np.zeros_like(r))
  np.testing.assert_array_equal(every.position, r)
  np.testing.assert_array_equal(
      _masks.visible(every, every), _table(places, places, sees))


def test_p_eagle_with_documents():
  # Broken: an element reads another document of its row.
  places = [(a, d) for d in range(3) for a in range(_T)]

  def sees(q, k):
    (a, d), (anchor, depth) = q, k
    return _TWO[a] == _TWO[anchor] and (
        depth == 0 and anchor <= a or anchor == a and depth <= d)

  every = _masks.joined(*(_masks.steps(_TWO, d) for d in range(3)))
  np.testing.assert_array_equal(
      _masks.visible(every, every), _table(places, places, sees))


def test_blocks():
  # Broken: a block reads its own first token as context, what comes after it,
  # another block or another document.
  first, size = [0, 2, 3, 5], 3
  slots = [(a, k) for a in first for k in range(size)]
  queries = _masks.blocks(first, size, _TWO)
  keys = _masks.joined(_masks.text(_TWO), queries)
  np.testing.assert_array_equal(queries.position, [a + k for a, k in slots])

  def sees(q, k):
    if isinstance(k, tuple):
      return q[0] == k[0]
    return k < q[0] and _TWO[k] == _TWO[q[0]]

  np.testing.assert_array_equal(
      _masks.visible(queries, keys, causal=False),
      _table(slots, [*range(_T), *slots], sees))
