"""Attention in two parts against plain attention over all keys.

And the kernels of other platforms against the plain parts. A TPU's is run by
its interpreter, and compiled by the real compiler: libtpu compiles for a
described topology on any machine, in a process of its own, which is this file
run as a script.
"""

import dataclasses
import functools
import json
import math
import re
import types

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import tpu_processes

import specjax as sj
from specjax import attention
from specjax import testing
from specjax.attention import plain
from specjax.attention import tpu
from specjax.caches import dense

_HEADS, _GROUP, _DIM = 2, 3, 8
_LENGTHS = np.array([0, 130, 299], np.int32)


def _plain(query, k, v, softcap):
  """One query in float64: `query [D]` over `k, v [T, D]`."""
  scores = k @ query / np.sqrt(_DIM)
  scores = softcap * np.tanh(scores / softcap) if softcap else scores
  weights = np.exp(scores)
  return weights @ v / weights.sum(), np.log(weights.sum())


@pytest.mark.parametrize("window,softcap", [(0, 0.0), (70, 3.0)])
def test_two_parts_are_one_attention(window, softcap):
  # Broken: a part counts slots that are not committed, forgets the window or
  # the soft-cap, or has another weight in the whole than it should; a row
  # without a past becomes NaN.
  rng = np.random.default_rng(0)
  batch, size, slots = 3, 4, 300
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  query = draw(batch, size, _HEADS * _GROUP, _DIM)
  past = [draw(batch, _HEADS, slots, _DIM) for _ in range(2)]
  block = [draw(batch, _HEADS, size, _DIM) for _ in range(2)]
  positions = _LENGTHS[:, None] + np.arange(size, dtype=np.int32)

  @jax.jit
  def both(query, past, block):
    causal = jnp.tril(jnp.ones((1, size, size), bool))
    return attention.merge(
        attention.past_attention(query, *past, _LENGTHS, positions=positions,
                                 window=window, softcap=softcap),
        attention.block_attention(query, *block, causal, softcap=softcap))

  out, log = both(query, past, block)
  for b, s, h in np.ndindex(batch, size, _HEADS * _GROUP):
    start = max(0, positions[b, s] + 1 - window) if window else 0
    k, v = (np.concatenate([old[b, h // _GROUP, start:_LENGTHS[b]],
                            new[b, h // _GROUP, :s + 1]]).astype(np.float64)
            for old, new in zip(past, block))
    want = _plain(query[b, s, h].astype(np.float64), k, v, softcap)
    np.testing.assert_allclose(out[b, s, h], want[0], atol=2e-5)
    np.testing.assert_allclose(log[b, s, h], want[1], atol=2e-5)


@pytest.mark.parametrize("rows,room,window,softcap", [
    (2, 4, 0, 0.0), (1, 4, 50, 3.0), (2, 130, 0, 0.0)])
def test_one_softmax_is_two_parts(rows, room, window, softcap):
  # Broken: on a CPU the block of a row covers its past, leaves slots between
  # them that count, is put after the end of what is read, is another row's, or
  # must not have more slots than the fewest that are read.
  size, slots = 4, 300
  draw = lambda i, heads, count: jax.random.normal(
      jax.random.key(i), (rows, heads, count, _DIM))
  query = draw(0, _HEADS * _GROUP, size).swapaxes(1, 2)
  past, block = ([draw(i + j, _HEADS, n) for j in range(2)]
                 for i, n in ((1, slots), (3, room)))
  visible = jnp.tril(jnp.ones((1, size, room), bool), room - size)

  @jax.jit
  def both(length):
    options = dict(window=window, softcap=softcap, positions=(
        length[:, None] + jnp.arange(size, dtype=jnp.int32)))
    return (attention.attend(query, *past, length, *block, visible, **options),
            attention.merge(
                attention.past_attention(query, *past, length, **options),
                attention.block_attention(query, *block, visible,
                                          softcap=softcap))[0])

  for length in (0, 60, 124, 125, 252, 253, slots):
    lengths = jnp.array([length, length // 2], jnp.int32)[:rows]
    np.testing.assert_allclose(*both(lengths), atol=2e-6)


def _operands(lengths, *, size, heads, group, slots, dim, dtype=jnp.float32):
  """Query, k, v, lengths and positions; slots after a length hold NaN."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  lengths = np.array(lengths, np.int32)
  empty = np.arange(slots) >= lengths[:, None]
  k, v = (np.where(empty[:, None, :, None], np.nan,
                   draw(len(lengths), heads, slots, dim)) for _ in range(2))
  # A row's first block is always read, and multiplied by a weight of 0.
  v = np.nan_to_num(v)
  query = draw(len(lengths), size, heads * group, dim)
  positions = lengths[:, None] + np.arange(size, dtype=np.int32)
  return (*(jnp.asarray(x, dtype) for x in (query, k, v)),
          jnp.asarray(lengths), jnp.asarray(positions))


_KERNELS = {  # narrow and wide heads are laid out differently
    "ragged": (dict(lengths=(0, 300, 1, 299), size=5, heads=2, group=3,
                    slots=300, dim=16), {}),
    "windows": (dict(lengths=(0, 640, 3), size=4, heads=1, group=2, slots=640,
                     dim=128), dict(window=150, softcap=3.0)),
    "bfloat16": (dict(lengths=(7, 256, 0), size=1, heads=2, group=2, slots=256,
                      dim=64, dtype=jnp.bfloat16), {}),
}


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", _KERNELS)
def test_the_kernel_is_the_plain_part(name):
  # Broken: the kernel reads a slot that is not committed, or forgets a block,
  # a head or the window; a row without a past becomes NaN.
  sizes, options = _KERNELS[name]
  query, k, v, lengths, positions = _operands(**sizes)
  got = jax.jit(functools.partial(tpu.past_attention, interpret=True,
                                  **options))(query, k, v, lengths, positions)
  want = plain.whole(query, k, v, lengths, positions, **options)
  seen = np.asarray(lengths > 0)
  tolerance = 2e-2 if k.dtype == jnp.bfloat16 else 2e-5
  for one, other in zip(got, want):
    assert one.dtype == other.dtype == jnp.float32
    assert one.shape == other.shape and np.isfinite(one).all()
    np.testing.assert_allclose(one[seen], other[seen], atol=tolerance)
  assert (np.asarray(got[1])[~seen] <= plain.MASKED).all()


@pytest.mark.parametrize("dim", [16, 128])  # the slots are last, or not
def test_a_row_fetches_its_own_blocks_once(monkeypatch, dim):
  # Broken: the kernel fetches blocks after a row's length or before its window,
  # so that its cost follows the allocation, or fetches one of them again.
  spec, maps = tpu.pl.BlockSpec, []

  def recorded(shape, at):
    maps.append((shape, at))
    return spec(shape, at)

  monkeypatch.setattr(tpu.pl, "BlockSpec", recorded)
  lengths = (0, 1, 512, 513, 2048, 1500)
  query, k, v, *_ = _operands(lengths, size=2, heads=1, group=1, slots=2048,
                              dim=dim)
  jax.eval_shape(functools.partial(tpu.past_attention, interpret=True),
                 query, k, v, jnp.asarray(lengths))
  axis = 2 if dim == 128 else 3
  [at] = {at for shape, at in maps if shape[axis] == 512}
  first = jnp.array([0, 0, 0, 0, 0, 600], jnp.int32)  # of the last one's window
  for row, want in enumerate((
      [0], [0], [0], [0, 1], [0, 1, 2, 3], [1, 2])):
    steps = [int(at(row, 0, 0, j, jnp.array(lengths, jnp.int32), first)[axis])
             for j in range(4)]
    fetched = [j for i, j in enumerate(steps) if i == 0 or j != steps[i - 1]]
    assert fetched == want, lengths[row]


def test_pages_in_any_order_are_the_same_row():
  # Broken: a block of a row is read from another page than its table says, or
  # a NaN that was left after the row's end reaches the sum.
  query, k, v, lengths, positions = _operands(
      (0, 192, 65), size=3, heads=2, group=1, slots=192, dim=16)
  place = np.random.default_rng(1).permutation(9).reshape(3, 3)
  paged = lambda x: jnp.zeros((9, 2, 64, 16)).at[place.ravel()].set(
      x.reshape(3, 2, 3, 64, 16).swapaxes(1, 2).reshape(9, 2, 64, 16))
  table = jnp.asarray(place, jnp.int32)
  kernel = functools.partial(tpu.past_attention, positions=positions,
                             interpret=True)
  want = plain.whole(query, k, v, lengths)
  left = jnp.where(jnp.isnan(k), jnp.nan, v)
  seen = np.asarray(lengths > 0)
  for attend in (kernel, attention.past_attention, plain.whole):
    got = jax.jit(attend)(query, paged(k), paged(left), lengths, table=table)
    for one, other in zip(got, want):
      np.testing.assert_allclose(one[seen], other[seen], atol=2e-5)
  # Two caches at once, each with pages of its own.
  both = jax.vmap(lambda k, v: attention.past_attention(
      query, k, v, lengths, table=table)[0])
  k = jnp.nan_to_num(k)
  got = jax.jit(both)(*(jnp.stack([paged(x), paged(x)[::-1]]) for x in (k, v)))
  np.testing.assert_allclose(got[0][seen], want[0][seen], atol=2e-5)
  mirrored = plain.whole(query, paged(k)[::-1], paged(v)[::-1], lengths,
                         table=table)[0]
  np.testing.assert_allclose(got[1][seen], mirrored[seen], atol=2e-5)


def test_it_is_mapped_and_differentiated_as_plain_attention():
  # Broken: a model with a cache can no longer be used under vmap or grad.
  query, k, v, lengths, _ = _operands(
      (3, 16), size=2, heads=1, group=2, slots=16, dim=8)
  k = jnp.nan_to_num(k)

  def mapped_and_sloped(attend):
    two = jnp.stack([query, query + 1])
    total = lambda query: sum(x.sum() for x in attend(query, k, v, lengths))
    return (jax.vmap(attend, (0, None, None, None))(two, k, v, lengths),
            jax.grad(total)(query))

  got, want = (jax.jit(functools.partial(mapped_and_sloped, attend))()
               for attend in (attention.past_attention, plain.whole))
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6),
               got, want)


def _lowered(function, *operands):
  """StableHLO for a GPU."""
  return jax.jit(function).trace(*operands).lower(
      lowering_platforms=("cuda",)).as_text()


def test_a_gpu_attends_by_cudnn(monkeypatch):
  # Broken: the past is read by plain attention, over all slots; or what cuDNN
  # does not take is given to it; or its function, which asks for the devices,
  # is not told them, and nothing runs on a GPU.
  monkeypatch.setattr(cudnn, "cuda_versions", types.SimpleNamespace(
      cudnn_get_version=lambda: 91200))
  for dtype, window, size, fits in (
      (jnp.bfloat16, 0, 2, True), (jnp.bfloat16, 0, 1, True),
      (jnp.float32, 0, 2, False), (jnp.bfloat16, 8, 2, False)):
    *operands, positions = _operands(
        (3, 16), size=size, heads=1, group=3, slots=16, dim=8, dtype=dtype)
    text = _lowered(functools.partial(
        attention.past_attention, positions=positions, window=window),
                    *operands)
    assert ("__cudnn$fmhaSoftmax" in text) == fits


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("kind", ["chain", "tree", "paged"])
def test_a_whole_round_for_a_gpu_attends_by_cudnn(monkeypatch, kind):
  # Broken: a round does not reach a GPU, or one of its passes reads the past by
  # plain attention.
  whole = plain.whole

  def marked(*operands, **options):
    out, log = whole(*operands, **options)
    return out * 98765.0, log

  monkeypatch.setattr(plain, "whole", marked)
  monkeypatch.setattr(cudnn, "cuda_versions", types.SimpleNamespace(
      cudnn_get_version=lambda: 91200))
  pair = testing.tiny_pair(5)
  target, model = pair.target, pair.drafter
  if kind == "paged":
    target, model = (dataclasses.replace(one, cache=sj.caches.Paged(page=64))
                     for one in (target, model))
  parts = dict(verifier=sj.verifiers.Block(),
               drafter=sj.drafters.draft_model(model=model, gamma=2))
  if kind == "tree":
    parts = dict(verifier=sj.verifiers.Recursive(),
                 drafter=sj.drafters.NetworkDrafter(
                     network=sj.drafters.LanguageModel(model=model),
                     shape=sj.drafters.Tree(sj.trees.full_tree((2, 2)))))
  decoder = sj.Decoder(target=target, **parts)
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), pair.params)
  prompt = sj.types.Prompt(tokens=jnp.zeros((2, 32), jnp.int32),
                     lengths=jnp.ones((2,), jnp.int32), capacity=128)
  state = jax.eval_shape(
      lambda params: decoder.start(
          params, prompt, jnp.full((2,), 9),
          jax.random.split(jax.random.key(0, impl="threefry2x32"), 2)), params)
  text = _lowered(decoder.decode_round, params, state)
  assert "__cudnn$fmhaSoftmax" in text and "9.876500e+04" not in text


def _compile():
  """Compiles the kernel for a v5e; prints whether it copies or gathers."""
  from jax.experimental import topologies
  devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
  found = {}
  for name, shape, size, dim, window in (
      ("whole", (1, 1), 5, 128, 0), ("split by heads", (1, 4), 5, 64, 0),
      ("split by both", (2, 2), 64, 64, 1024), ("pages", (1, 4), 5, 128, 0),
      ("replicated", (1, 4), 5, 64, 0)):
    axis = None if name == "replicated" else "model"
    mesh = Mesh(np.array(devices[:math.prod(shape)]).reshape(shape),
                ("data", "model"))
    array = lambda sizes, dtype, *spec, mesh=mesh: jax.ShapeDtypeStruct(
        sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))
    cache, table = array((8, 8, 2048, dim), jnp.bfloat16, "data", axis), None
    if name == "pages":
      cache = array((129, 8, 128, dim), jnp.bfloat16, None, "model")
      table = array((8, 16), jnp.int32, "data")

    def attend(weights, query, k, v, lengths, positions, table, hidden,
               window=window, axis=axis):
      # Work before it, in which the compiler would fetch what comes next.
      query = jnp.einsum("bshd,hde->bshe", query, weights)
      cache = dense.KVCache(k=(k,), v=(v,), lengths=lengths)
      return cache.after(hidden).lengths, attention.past_attention(
          query, k, v, lengths, positions=positions, table=table,
          window=window, heads_axis=axis)

    hlo = jax.jit(attend).lower(
        array((32, dim, dim), jnp.bfloat16, axis),
        array((8, size, 32, dim), jnp.bfloat16, "data", None, axis),
        cache, cache, array((8,), jnp.int32, "data"),
        array((8, size), jnp.int32, "data"), table,
        array((8, size, 64), jnp.bfloat16, "data")).compile().as_text()
    local = math.prod(cache.sharding.shard_shape(cache.shape))
    moved = [kind for sizes, kind in re.findall(
        r" = \(?bf16\[([\d,]+)\]\S* ([a-z-]+)\(", hlo)
             if math.prod(map(int, sizes.split(","))) >= local
             and kind not in ("parameter", "bitcast")]
    found[name] = {"kernels": hlo.count('"tpu_custom_call"'),
                   "collectives": re.findall(r"all-\w+", hlo), "copies": moved}
  print(json.dumps(found))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_kernel_compiles_for_a_tpu_and_copies_no_cache():
  # Broken: the kernel is no program for a TPU, or a cache is laid out or split
  # in another way than the kernel wants, and is copied in every pass; or the
  # lengths of all rows wait for one device; or heads that every device has are
  # divided, and what attention returns is gathered.
  for name, one in tpu_processes.answer(__file__).items():
    assert one == {"kernels": 1, "collectives": [], "copies": []}, name


if __name__ == "__main__":
  _compile()
