"""Copies of a model in 8 and 4 bits, against matrices that are widened first.

`contribution_test.py` drafts with one.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import ROOT

import specjax as sj
from specjax import testing
from specjax.models import quantization
from specjax.models.quantization import QuantizedMatrix

sys.path.append(str(ROOT / "experiments"))

from lib.configurations import copies  # noqa: E402

_SHAPES = {"tied": dict(tie_embeddings=True, layers=1),
           "untied": dict(tie_embeddings=False, kv_heads=2, qkv_bias=True)}


def _is_matrix(x):
  return isinstance(x, QuantizedMatrix)


def _widened(copy):
  return jax.tree.map(lambda x: x.widened() if _is_matrix(x) else x, copy,
                      is_leaf=_is_matrix)


@pytest.mark.parametrize("shape, bits, group, few", [
    ("tied", 8, None, 32), ("tied", 4, 8, 32), ("untied", 4, None, 32),
    ("untied", 8, 8, 0)])
def test_a_pass_is_that_of_the_widened_matrices(
    shape, bits, group, few, monkeypatch):
  # Broken: a scale belongs to another output or group, an embedding and its
  # head differ, a bias is quantised, a matrix stays as it was; a slice of a
  # matrix is left out or counted twice.
  monkeypatch.setattr(quantization, "_FEW", few)
  monkeypatch.setattr(quantization, "_SLICE", 1 << 8)
  monkeypatch.setattr(quantization, "_LEAST", 3)
  pair = testing.tiny_pair(8, **_SHAPES[shape])
  params = pair.params["target"]
  copy = sj.models.quantize(params, bits, group)
  matrices = [x for x in jax.tree.leaves(copy, is_leaf=_is_matrix)
              if _is_matrix(x)]
  assert len(matrices) == sum(
      x.ndim > 1 for x in jax.tree.leaves(params))
  tokens = jnp.array([[1, 3, 0, 2, 7]])
  found, want = (jax.jit(lambda x: pair.target(x, tokens))(x)
                 for x in (copy, _widened(copy)))
  np.testing.assert_allclose(found.logits, want.logits, rtol=1e-4, atol=1e-4)
  at = jnp.array([[4, 0]])
  np.testing.assert_allclose(
      pair.target.logits_at(copy, found, at)[0], want.logits[0, [4, 0]],
      rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits, group", [(8, None), (8, 4), (4, None), (4, 4)])
@pytest.mark.parametrize("name, axis", [("kernel", 0), ("embedding", 1)])
def test_every_number_is_the_nearest_one(bits, group, name, axis):
  # Broken: numbers are cut and not rounded, leave the range of their bits, or
  # share a scale with others than their group.
  x = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
  x[:, 0] = x[0] = 0  # a scale of 0 divides nothing
  matrix = sj.models.quantize({name: x}, bits, group)[name]
  rows = x if axis else x.T  # inputs last
  groups = rows.reshape(len(rows), -1, group or rows.shape[1])
  steps = np.abs(groups).max(-1) / (2**(bits - 1) - 1)
  found = np.asarray(matrix.scales) if axis else np.asarray(matrix.scales).T
  np.testing.assert_allclose(found, steps, rtol=1e-6)
  off = np.abs(np.asarray(matrix.widened()) - x)
  off = (off if axis else off.T).reshape(groups.shape)
  assert (off <= steps[..., None] * 0.501).all()
  assert (np.asarray(matrix.widened())[0] == 0).all()
  assert matrix.shape == x.shape and matrix.dtype == jnp.float32
  assert abs(int(jnp.max(matrix.values.astype(jnp.int32)))) <= 2**(bits - 1) - 1
  numbers = x.size // (8 // bits) + 4 * found.size
  assert quantization.num_bytes(matrix) == numbers
  error = quantization.relative_error({name: x}, {name: matrix})
  np.testing.assert_allclose(error, np.linalg.norm(off) / np.linalg.norm(x),
                             rtol=1e-5)


@pytest.mark.parametrize("params, options, message", [
    ({"kernel": np.ones((4, 4))}, dict(bits=3), "bits is 3"),
    ({"kernel": np.ones((4, 4))}, dict(group=0), "group is 0"),
    ({"kernel": np.ones((6, 4))}, dict(group=4),
     r"group is 4, but \['kernel'\] has 6 inputs; .* such as 2"),
    ({"scale": np.ones(4)}, {}, "no kernel"),
    ({"kernel": QuantizedMatrix(np.ones((4, 4)), np.ones((1, 4)))}, {},
     "already quantised"),
], ids=["bits", "group", "divisor", "none", "twice"])
def test_what_cannot_be_quantised_is_refused(params, options, message):
  # Broken: a copy of other numbers than those asked for drafts in silence.
  with pytest.raises(ValueError, match=message):
    sj.models.quantize(params, **options)


def test_flags_make_copies_and_caches():
  # Broken: a flag quantises nothing, or drafts with another cache than it says.
  pair = testing.tiny_pair(5)

  @dataclasses.dataclass(frozen=True)
  class Loaded:
    model: object
    params: object

  loaded = Loaded(pair.target, pair.params["target"])
  assert copies.quantized(loaded, None) is loaded
  own = copies.quantized(loaded, "int4", 8).params
  assert own["embedding"].values.dtype == jnp.int4
  assert own["embedding"].scales.shape == (5, 2)
  assert copies.drafting(loaded, None) is loaded
  for name, want in (("int8", sj.caches.QuantizedKV(bits=8)),
                     ("streaming", sj.caches.Streaming()),
                     ("streaming:2:30",
                      sj.caches.Streaming(sinks=2, window=30))):
    assert copies.drafting(loaded, name).model.cache == want
  for bad in ("int2", "int8:4", "streaming:4", "streaming:a:b", ""):
    with pytest.raises(ValueError, match="is not a cache"):
      copies.cache("--draft_cache", bad)
