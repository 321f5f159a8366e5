"""GPU kernels, interpreted on a CPU, against plain JAX."""

import gpu_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import sampling
from specjax.attention import plain
from specjax.caches import dense
from specjax.gpu import attention
from specjax.gpu import layers
from specjax.gpu import sampling as gpu_sampling
from specjax.gpu import slots
from specjax.models import rotary


@pytest.fixture(autouse=True)
def _interpreted():
  with gpu_kernels.interpreted():
    yield


def _normal(rng, *shape, dtype=jnp.float32):
  return jnp.asarray(rng.normal(size=shape), dtype)


def _merged(query, k, v, lengths, block, visible, positions, window, softcap):
  """Attention in plain XLA."""
  past = plain.whole(query, k, v, lengths, positions, window=window,
                     softcap=softcap)
  return plain.merge(past, plain.block_attention(
      query, *block, visible, softcap=softcap))[0]


_CASES = {
    "one token": dict(size=1, lengths=(0, 257)),
    "draft": dict(size=5, lengths=(0, 257)),
    "after committed tokens in the block": dict(
        size=1, before=2, committed=2, lengths=(0, 257)),
    "full cache, one split": dict(
        size=1, heads=1, group=1, dim=16, half=8, slots=64, lengths=(64,)),
    "odd sizes, a draft longer than a block": dict(
        size=20, group=3, dim=80, half=16, slots=200, lengths=(0, 1, 200)),
    "more queries than a program": dict(
        size=40, group=7, slots=500, window=100, lengths=(450, 2)),
    "level of a tree, soft cap, no rotation": dict(
        size=17, heads=1, dim=24, half=0, before=7, softcap=30.0, slots=130,
        lengths=(5, 129)),
    "window": dict(size=5, group=2, slots=1000, window=37, lengths=(999, 20)),
    "window over the block": dict(
        size=3, group=2, slots=1000, before=3, committed=2, window=7,
        softcap=50.0, lengths=(999, 2)),
    "bfloat16": dict(size=5, dim=128, half=64, lengths=(0, 257),
                     dtype=jnp.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES)
def test_attention(case):
  # Broken: a slot, an ancestor, a window or a rotation; or what a kernel writes
  # to the block.
  options = dict(heads=2, group=4, dim=64, half=32, slots=300, before=0,
                 committed=None, window=0, softcap=0.0, dtype=jnp.float32)
  o = options | _CASES[case]
  rng = np.random.default_rng(0)
  size, before, dtype = o["size"], o["before"], o["dtype"]
  lengths, count = jnp.array(o["lengths"], jnp.int32), before + size
  batch, heads, group, dim = len(lengths), o["heads"], o["group"], o["dim"]
  qkv = _normal(rng, batch, size, heads, group + 2, dim, dtype=dtype)
  k, v = (_normal(rng, batch, heads, o["slots"], dim, dtype=dtype)
          for _ in "kv")
  ancestors = jnp.asarray(
      (rng.random((batch, size, count)) < 0.6)
      & np.tri(size, count, before, dtype=bool)
      | np.eye(size, count, before, dtype=bool))
  total, width = None, before
  if o["committed"] is not None:
    total = lengths + jnp.asarray(
        rng.integers(0, o["committed"] + 1, size=batch), jnp.int32)
    width = count + o["committed"] + 3
  old = tuple(_normal(rng, batch, heads, width, dim, dtype=dtype)
              for _ in "kv") if width else None
  now = lengths if total is None else total
  positions = now[:, None] + jnp.sum(ancestors, -1) - 1
  rotation = None
  query = qkv[:, :, :, :group].reshape(batch, size, -1, dim)
  key, value = qkv[:, :, :, group], qkv[:, :, :, group + 1]
  if o["half"]:
    frequency = rotary.frequencies(2 * o["half"], 1e4)
    rotation = rotary.Rotation(
        positions, frequency, 1.1,
        rotary.cosines_and_sines(positions, frequency, 1.1))
    query, key = (rotary.rotate(x, rotation.table) for x in (query, key))

  new = key.swapaxes(1, 2), value.swapaxes(1, 2)
  window = o["window"]
  in_window = lambda lengths, mask, slots: (
      dense.visible_slots(lengths, mask, slots, window) if window else mask)
  none = jnp.zeros_like(lengths)
  if total is not None:
    block = [dense._placed(x, y, total - lengths + before)
             for x, y in zip(old, new)]
    visible = dense.visible_slots(total - lengths, ancestors, width, window)
  else:
    block = [jnp.concatenate([x, y], 2)
             for x, y in zip(old, new)] if before else list(new)
    visible = in_window(none, ancestors, count)
  want = _merged(query, k, v, lengths, block, visible, positions, window,
                 o["softcap"])

  # Garbage where nothing may be read.
  past = jnp.arange(o["slots"]) < lengths[:, None]
  k, v = (jnp.where(past[:, None, :, None], x, jnp.nan) for x in (k, v))
  wide = qkv.astype(jnp.float32)
  out, *got = attention.extend(
      jnp.stack([0.25 * wide, 0.75 * wide]), None, rotation,
      in_window(none, ancestors, count), lengths, k, v, old, total,
      positions if window else None, window=window, softcap=o["softcap"])
  exact = dtype == jnp.float32
  np.testing.assert_allclose(out, want, atol=1e-5 if exact else 2e-2)
  if total is None and before:
    got = [jnp.concatenate([x, y], 2) for x, y in zip(old, got)]
  for x, y in zip(got, block):
    np.testing.assert_allclose(
        x.astype(jnp.float32), y.astype(jnp.float32),
        atol=1e-5 if exact else 2e-2)


def test_bias_and_a_duplicated_token():
  # Broken: the bias of queries, keys and values, or the copies of one token.
  rng = np.random.default_rng(1)
  qkv, bias = _normal(rng, 1, 1, 2, 3, 4, 16), _normal(rng, 3, 4, 16)
  qkv = jnp.concatenate([qkv[:, :, :1]] * 2, 2)
  slots_ = [_normal(rng, 1, 3, 200, 16) for _ in "kv"]
  args = None, jnp.ones((1, 1, 1), bool), jnp.array([150]), *slots_
  got = attention.extend(qkv, bias, *args)
  want = attention.extend(qkv[:, :, :1] + bias, None, *args)
  for x, y in zip(got, want):
    np.testing.assert_allclose(x, jnp.broadcast_to(y, x.shape), atol=1e-6)
  assert got[0].shape[1] == 2


@pytest.mark.parametrize("centred", [False, True])
def test_residual_and_norm(centred):
  # Broken: an addend, the mean, or channels beyond the last power of two.
  rng = np.random.default_rng(0)
  x, parts = _normal(rng, 3, 96), _normal(rng, 4, 3, 96)
  addend, scale, bias = (_normal(rng, 96) for _ in range(3))
  total, out = layers.add_and_normalise(
      x, parts, addend, scale, bias if centred else None, rows=2,
      epsilon=1e-5, offset=1.0, centred=centred)
  want = (x + parts.sum(0) + addend)[:2]
  np.testing.assert_allclose(total, want, atol=1e-5)
  y = want - want.mean(-1, keepdims=True) if centred else want
  y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * (1 + scale)
  np.testing.assert_allclose(out, y + bias if centred else y, atol=1e-5)


def test_write_to_slots():
  # Broken: a token of the wrong node, beyond the count, or of another layer.
  rng = np.random.default_rng(0)
  caches = [_normal(rng, 2, 3, 20, 24) for _ in range(4)]
  blocks = [_normal(rng, 2, 3, 5, 24) for _ in range(4)]
  at, until = np.array([3, 18]), np.array([7, 20])
  path = np.array([[0, 2, 4, 4], [1, 3, 0, 0]])
  want = [np.array(x) for x in caches]
  for x, block in zip(want, blocks):
    for row in range(2):
      for i in range(until[row] - at[row]):
        x[row, :, at[row] + i] = block[row, :, path[row, i]]
  for x, y in zip(slots.write(caches, blocks, *map(
      jnp.asarray, (at, until, path))), want):
    np.testing.assert_array_equal(x, y)


def test_softmax(monkeypatch):
  # Broken: ties, bans, a temperature of 0, or a logit that is not finite.
  monkeypatch.setattr(gpu_sampling, "_BLOCK", 128)
  rng = np.random.default_rng(0)
  logits = 3 * _normal(rng, 4, 2, 700)
  logits = logits.at[1, 0, 3].set(50).at[1, 0, 400].set(50)
  logits = logits.at[2].set(-jnp.inf).at[2, :, 70].set(0)
  temperature = jnp.array([1, 0, 0.7, 2])[:, None]
  transform = sj.LogitsTransform(temperature=None)
  slope = jax.grad(lambda x: jnp.sum(transform(x, temperature)[..., :9]**2))
  got, slopes = transform(logits, temperature), slope(logits)
  with pytest.MonkeyPatch.context() as plain_path:
    plain_path.setattr(sampling, "_uses_kernels", lambda x: False)
    want, right = transform(logits, temperature), slope(logits)
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert got[1, 0].argmax() == 3
  np.testing.assert_allclose(slopes.at[1].set(0), right.at[1].set(0), atol=1e-6)
  assert not slopes[1].any()
  for bad in (jnp.nan, jnp.inf):
    for row in range(2):  # sampled and greedy
      wrong = transform(logits.at[row, 0, 9].set(bad), temperature)
      assert np.isnan(wrong[row, 0].sum()) and np.isfinite(wrong[3]).all()


def test_draw(monkeypatch):
  # Broken: a token without mass is drawn, or shares differ from the weights.
  monkeypatch.setattr(gpu_sampling, "_BLOCK", 128)
  rng = np.random.default_rng(0)
  weights = jnp.asarray(rng.dirichlet(np.full(300, 0.02)), jnp.float32)
  weights = jnp.where(weights < 1e-3, 0, weights)
  count = 4000
  u = jnp.asarray(rng.random((count, 2)), jnp.float32)
  drawn = np.asarray(jax.vmap(sampling.inverse_cdf, (None, 0))(weights, u))
  assert (weights[drawn] > 0).all()
  share = np.bincount(drawn, minlength=300) / count
  p = np.asarray(weights / weights.sum())
  assert (np.abs(share - p) < 5 * np.sqrt(p / count) + 1e-9).all()
  last = 1 - np.float32(2.0**-24)  # rounding may leave no index above it
  for values in ([last, last], [0, last], [last, 0], [0, 0]):
    one = int(sampling.inverse_cdf(weights, jnp.array(values, jnp.float32)))
    assert weights[one] > 0


@pytest.mark.slow
def test_top_p_with_a_fixed_number_of_passes():
  # Broken: the search of a GPU ends before its range has a single token.
  rng = np.random.default_rng(0)
  for scale in (0.1, 3.0, 12.0):
    logits = scale * _normal(rng, 8, 5000)
    probs = jax.nn.softmax(logits)
    for top_p in (0.1, 0.9, 0.9999):
      want, got = (sampling._search(
          top_p, lambda _, probs=probs: probs, probs[:, :1], 5000, **options)
          for options in (dict(parts=2), dict(
              parts=sampling._PARTS, passes=sampling._PASSES)))
      np.testing.assert_array_equal(probs > got, probs > want)
