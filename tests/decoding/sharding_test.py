"""Placements on a mesh: what is split, and what is refused."""

import dataclasses
import functools
import gc
import time
import types
from unittest import mock

import contributed_examples as examples
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import specjax as sj
from specjax import objectives
from specjax import testing
from specjax.decoding import placement as sharding
from specjax.training import layout
from specjax.training import loop
from specjax.training import optimizers
from specjax.utils import processes


def _mesh(*axes):
  return Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(axes)), axes)


@functools.cache
def _pair():
  return testing.tiny_pair(8)


def _model(**config):
  """The tiny target in other sizes; nothing of it is compiled."""
  return sj.models.Transformer(
      dataclasses.replace(_pair().target.config, **config))


def _decoder_and_state():
  pair = _pair()
  decoder = sj.Decoder(
      target=pair.target, verifier=sj.verifiers.Block(),
      drafter=sj.drafters.draft_model(model=pair.drafter, gamma=2))
  state = decoder.prefill(pair.params, [[1, 2], [3]], jax.random.key(0),
                          limits=12)
  return decoder, pair.params, state


@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_is_split(tied):
  # Broken: a matrix is replicated in silence and fills every device.
  model = _model(tie_embeddings=tied, lookahead=2)
  specs = model.param_specs("model")
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  assert specs.pop("lookahead") == P() and shapes.pop("lookahead").shape[0] == 2
  for spec, shape in zip(
      jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)),
      jax.tree.leaves(shapes)):
    assert ("model" in spec) == (shape.ndim >= 2)


@pytest.mark.slow
def test_a_placed_state_decodes_the_same():
  # Broken: the placements do not fit the trees that the loop takes.
  decoder, params, state = _decoder_and_state()
  _, _, placed = _decoder_and_state()
  shardings = sharding.decode_shardings(
      decoder, params, placed, _mesh("data", "model"))
  moved, placed = jax.device_put((params, placed), shardings)
  plain, _ = decoder.decode(params, state, rounds=3)
  placed, _ = decoder.decode(moved, placed, rounds=3)
  np.testing.assert_array_equal(plain.tokens, placed.tokens)


def test_a_replicated_drafter_attends_with_all_heads():
  # Broken: attention on a TPU divides heads that every device has and gathers
  # what it returns, or leaves whole the target's; or a state that grows forgets
  # which of its caches are replicated, or takes no new row.
  decoder, params, _ = _decoder_and_state()
  for how, axis in (("split", "model"), ("replicate", None)):
    placement = sharding.Placement(mesh=_mesh("data", "model"), drafter=how)
    state = decoder.prefill(params, [[1, 2], [3]], jax.random.key(0),
                            limits=12, placement=placement)
    told = lambda state: (state.target_cache.heads_axis,
                          state.drafter.memory.heads_axis)
    assert told(state) == ("model", axis)
    # One row is read without a placement: no mesh would divide it.
    fresh = decoder.prefill(params, [[3]], jax.random.key(1), limits=12)
    state = decoder.insert(state, 1, fresh)
    assert told(state) == ("model", axis)
    assert told(decoder.grow(params, state, 256)) == ("model", axis)


def test_a_tpu_has_gate_and_up_as_two_matrices(monkeypatch):
  # Broken: the compiler lays them out anew before every loop over passes, or a
  # placement that says how they lie does not reach the program.
  monkeypatch.setattr(sharding, "_of_tpus", lambda mesh: True)
  decoder, params, _ = _decoder_and_state()
  placement = sharding.Placement(mesh=_mesh("data", "model"))
  moved = placement.put(decoder, params)
  for part, model in (("target", decoder.target),
                      ("drafter", decoder.drafter.network.model)):
    kernel = moved[part]["mlp_0"]["gate_up"]["kernel"]
    assert kernel.format.layout.major_to_minor == (1, 0, 2)
    assert kernel.shape == (model.config.width, 2, model.config.mlp_width)
  kernel = moved["target"]["mlp_0"]["gate_up"]["kernel"]
  tokens = jnp.ones((1, 2), jnp.int32)
  lowered = jax.jit(decoder.target).lower(moved["target"], tokens)
  assert f"f32[{','.join(map(str, kernel.shape))}]{{2,0,1}}" in (
      lowered.compile().as_text())
  logits = jax.jit(lambda params: decoder.target(params, tokens).logits)
  np.testing.assert_allclose(
      *(logits(x["target"]) for x in (moved, params)), atol=1e-6)


@pytest.mark.parametrize("name, sizes", [
    ("heads", dict(heads=6, kv_heads=6)),
    ("kv_heads", dict(heads=12, kv_heads=3)),
    ("mlp_width", dict(heads=4, kv_heads=4, mlp_width=18)),
    ("vocab_size", dict(heads=4, kv_heads=4, mlp_width=16))])
def test_uneven_parts_are_refused(name, sizes):
  # Broken: the compiler pads or fails with a message about its own internals.
  model = _model(vocab_size=10, **sizes)
  with pytest.raises(ValueError, match=f"^{name} is .* 4 devices"):
    model.param_specs("model", 4)


def _placements(drafter, params, rule, target=None, size=2, how="split"):
  """Of a decoder's parameters, on devices that need not be there."""
  decoder = sj.Decoder(
      target=target or testing.tiny_pair(8, kv_heads=2).target,
      drafter=drafter, verifier=rule)
  state = jax.eval_shape(lambda: decoder.prefill(
      params, [[1, 2], [3]], jax.random.key(0), limits=12))
  return sharding.decode_shardings(
      decoder, params, state, AbstractMesh((size,), ("model",)), drafter=how)


def test_few_key_value_heads_are_on_every_device():
  # Broken: a model is refused for having fewer of them than devices, or the
  # product that makes them is copied to every device.
  model = _model(heads=4, kv_heads=2)
  specs = model.param_specs("model", 4)
  assert specs["attention_0"]["qkv"]["kernel"] == P("model", None, None, None)
  pair = testing.tiny_pair(8, heads=4, kv_heads=2)
  drafter = sj.drafters.draft_model(model=pair.drafter, gamma=2)
  for size, axis in ((2, "model"), (4, None)):
    _, state = _placements(drafter, pair.params, sj.verifiers.Block(),
                           pair.target, size)
    assert {found.spec[1] for found in jax.tree.leaves(
        (state.target_cache.k, state.drafter.memory.k))} == {axis}


def test_a_drafter_is_replicated_where_that_is_asked_for():
  # Broken: a small drafter must divide as its target does; or its cache is
  # split although its weights are not.
  pair = testing.tiny_pair(8, heads=4, kv_heads=2)
  odd = testing.tiny_pair(8, heads=3)
  params = {**pair.params, "drafter": odd.params["drafter"]}
  drafter = sj.drafters.draft_model(model=odd.drafter, gamma=2)
  place = functools.partial(_placements, drafter, params, sj.verifiers.Block(),
                            pair.target, 2)
  with pytest.raises(ValueError, match="^heads is 3"):
    place()
  with pytest.raises(ValueError, match="drafter is 'copy'; it must be 'split'"):
    place(how="copy")
  placed, state = place(how="replicate")
  assert {x.spec for x in jax.tree.leaves(placed["drafter"])} == {P()}
  assert all("model" not in x.spec for x in jax.tree.leaves(state.drafter))
  assert state.target_cache.k[0].spec[1] == "model"


def test_every_model_of_a_drafter_is_split():
  # Broken: a drafter of several models is replicated in silence.
  pair = testing.tiny_pair(8, kv_heads=2)
  drafter = sj.drafters.Paths(models=(pair.drafter,) * 2, num_paths=2, length=2)
  params = {**pair.params, "drafter": (pair.params["drafter"],) * 2}
  placed, state = _placements(drafter, params, sj.verifiers.Recursive())
  for tree, own in zip(placed["drafter"], params["drafter"]):
    for found, x in zip(jax.tree.leaves(tree), jax.tree.leaves(own)):
      assert ("model" in found.spec) == (x.ndim >= 2)
  caches = jax.tree.leaves([c.k for c in (state.target_cache, *state.drafter)])
  assert all(found.spec[1] == "model" for found in caches)
  assert state.tokens.spec == P(None)


class _Silent(examples.Bigram):
  """A model that does not say how it is split."""


def test_a_part_that_does_not_answer_is_refused():
  # Broken: what nobody splits is copied to every device and fills it.
  pair = testing.tiny_pair(8, kv_heads=2)
  params = {**pair.params, "drafter": jnp.zeros((8, 8))}
  drafter = sj.drafters.draft_model(model=_Silent(vocab_size=8), gamma=2)
  with pytest.raises(ValueError, match="_Silent.*param_specs.*2 devices"):
    _placements(drafter, params, sj.verifiers.Block())


def test_a_cache_that_does_not_answer_is_refused(monkeypatch):
  # Broken: as above, of the largest arrays that there are.
  monkeypatch.delattr(testing.LengthCache, "specs")
  model = testing.MarkovModel(8)
  params = {"target": testing.tiny_pair(8, kv_heads=2).params["target"],
            "drafter": model.init(jax.random.key(0))}
  drafter = sj.drafters.draft_model(model=model, gamma=2)
  with pytest.raises(ValueError, match="LengthCache.*specs.*'model'"):
    _placements(drafter, params, sj.verifiers.Block())


def test_a_tpu_has_names_for_its_axes():
  # Broken: the kernel does not know how to split, and each pass gathers whole
  # caches on every device.
  def mesh(**shape):
    chip = types.SimpleNamespace(platform="tpu")
    return mock.Mock(spec=Mesh, shape=shape, devices=np.array([chip]))

  sharding.Placement(mesh=mesh(data=2, model=2))
  sharding.Placement(mesh=mesh(tp=1), axis="tp")
  with pytest.raises(ValueError, match="'tp' has 4 devices.*'model'"):
    sharding.Placement(mesh=mesh(tp=4), axis="tp")
  with pytest.raises(ValueError, match="'rows' has 2 devices.*'data'"):
    sharding.Placement(mesh=mesh(rows=2, model=2), data_axis="rows")


def test_a_mesh_without_the_axis_is_refused():
  # Broken: everything is replicated although a split was asked for.
  with pytest.raises(ValueError, match="no 'model'"):
    sharding.decode_shardings(*_decoder_and_state(), _mesh("data"))


def _trainer(directory, **config):
  rows = np.random.default_rng(0).integers(5, size=(4, 4, 7)).astype(np.int32)
  return loop.Trainer(**{
      "objective": _OBJECTIVE, "optimizer": _ADAM, "directory": directory,
      "batch": lambda step: {"tokens": rows[step], "share": np.float32(0.5)},
      "steps": 4, "checkpoint_every": 1, **config})


_OBJECTIVE = objectives.NextToken(model=testing.MarkovModel(5))
_ADAM = optax.adam(0.1)


def test_a_run_on_a_mesh_is_that_of_one_device(tmp_path, monkeypatch):
  # Broken: a mesh trains on other batches; the caller's parameters are donated;
  # a run that SIGTERM stops loses steps, or cannot go on without its mesh.
  table = {"target": _OBJECTIVE.model.init(jax.random.key(0))}
  alone = _trainer(tmp_path / "alone").run(table)["target"]
  mesh = dict(mesh=_mesh("data", "model"),
              param_shardings={"target": P("model")}, accumulate=2)
  with monkeypatch.context() as patch:
    told = iter([False, True])
    patch.setattr(processes, "told_to_stop", lambda: next(told))
    with pytest.raises(processes.Stopped, match="after step 2, which is saved"):
      _trainer(tmp_path / "stopped", **mesh, checkpoint_every=4).run(table)
  found = _trainer(tmp_path / "stopped").run(table)["target"]
  np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-6)
  assert np.isfinite(table["target"]).all()


def test_a_run_that_goes_on_has_one_state(tmp_path):
  # Broken: what a checkpoint replaced stays in memory, parameters and moments.
  table, counts = {"target": _OBJECTIVE.model.init(jax.random.key(0))}, []

  def evaluate(params):
    for _ in range(100):  # who read a checkpoint may hold it for a moment
      gc.collect()
      count = sum(x.shape == (5, 5) for x in jax.live_arrays())
      if not counts or count <= counts[0]:
        break
      time.sleep(0.1)
    counts.append(count)
    return {}

  for steps in (2, 4):
    _trainer(tmp_path, steps=steps, evaluate=evaluate).run(table)
  first, resumed = counts
  assert resumed <= first


def test_a_mesh_that_does_not_divide_a_run_is_refused(tmp_path):
  # Broken: the error comes from inside the compiler, after the run was claimed.
  mesh = AbstractMesh((3, 2), ("data", "model"))
  with pytest.raises(ValueError, match="reads 4 rows .*'data' has 3 devices"):
    _trainer(tmp_path, mesh=mesh)
  params = {"target": jnp.zeros((5, 5))}
  with pytest.raises(ValueError, match="dimension size is 5"):
    layout.of_params(mesh, params, {"target": P("model")})
  with pytest.raises(ValueError, match="'targt', .* are 'target'"):
    _trainer(tmp_path, param_shardings={"targt": P("model")}).run(params)
  assert not list(tmp_path.iterdir())


def test_the_moments_lie_as_what_they_are_of():
  # Broken: Adam's state, twice the parameters, is copied to every device.
  params = {"target": _pair().params["target"]}
  specs = {"target": _model().param_specs("model", 1)}
  mesh = AbstractMesh((1, 1), ("data", "model"))
  optimizer = optimizers.muon(lambda step: 0.1)
  state = jax.eval_shape(lambda params: loop.TrainState(
      step=jnp.zeros((), jnp.int32), params=params,
      opt_state=optimizer.init(params)), params)
  placed = layout.of_state(mesh, state, layout.of_params(mesh, params, specs))
  assert placed.step.spec == P()
  for tree in (placed.params, placed.opt_state):
    shapes = jax.tree.leaves(
        state.params if tree is placed.params else state.opt_state)
    for found, x in zip(jax.tree.leaves(tree), shapes):
      assert ("model" in found.spec) == (x.ndim >= 2)
