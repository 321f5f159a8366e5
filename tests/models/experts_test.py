"""A mixture of experts: its products, its routes, and what a mesh splits."""

import dataclasses
import functools
import json
import re
import sys

from golden.recorded import GOLDEN
from golden.recorded import loaded
from golden.recorded import params_equal
from golden.recorded import settings_of
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tpu_processes

import specjax as sj
from specjax import methods
from specjax.models import experts
from specjax.models import model_files
from specjax.models.configuration import ExpertConfig

_E, _D, _F = 5, 128, 256
_gated = lambda gate, up: jax.nn.silu(gate) * up
_FORMS = {
    "loop": functools.partial(experts._loop, every=False),
    "loop over all": functools.partial(experts._loop, every=True),
    "groups": experts._grouped, "pairs": experts._pairs,
    "kernel": functools.partial(experts._kernel, interpret=True)}


def _inputs(tokens, some=2, outside=0):
  """Inputs of `mixed`; with `outside`, some experts are of other devices."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)
  chosen = np.stack([rng.permutation(_E + 2 * outside)[:some]
                     for _ in range(tokens)]) - outside
  return (draw(tokens, _D), jnp.asarray(chosen, jnp.int32),
          jnp.abs(draw(tokens, some)), draw(_E, _D, 2 * _F), draw(_E, _F, _D))


def _expected(x, chosen, weights, gate_up, down, bias=(0,) * _E):
  out = np.zeros(x.shape)
  for t, i in np.ndindex(*chosen.shape):
    e = int(chosen[t, i])
    if 0 <= e < _E:
      gate, up = np.split(np.float64(x[t]) @ np.float64(gate_up[e]) + bias[e],
                          2)
      out[t] += weights[t, i] * (
          gate / (1 + np.exp(-gate)) * up @ np.float64(down[e]))
  return out


@pytest.mark.parametrize("form", _FORMS)
def test_all_forms_compute_the_same(form):
  # Broken: a form reads the experts of other tokens, counts experts of other
  # devices, or skips the last one.
  for tokens, some, outside in (7, 2, 0), (1, 3, 0), (6, 2, 3):
    inputs = _inputs(tokens, some, outside)
    np.testing.assert_allclose(
        jax.jit(functools.partial(_FORMS[form], _gated))(*inputs),
        _expected(*inputs), atol=1e-5)
    if form != "kernel":
      inputs += (jnp.arange(2.0 * _E * _F).reshape(_E, -1) % 7 / 8,)
      np.testing.assert_allclose(
          jax.jit(functools.partial(_FORMS[form], _gated))(*inputs),
          _expected(*inputs), atol=1e-5)


def test_no_expert_of_this_device_is_chosen():
  # Broken: an expert that nobody chose is added, or the division of nothing.
  x, chosen, *others = _inputs(3)
  for form in _FORMS.values():
    out = form(_gated, x, chosen + _E, *others)
    np.testing.assert_array_equal(out, np.zeros(x.shape))


@pytest.mark.slow
def test_training_differentiates_the_products():
  # Broken: a mixture cannot be trained, or its router gets no gradient.
  x, chosen, *others = _inputs(4)

  def dense(x, weights, gate_up, down):
    gate, up = jnp.split(jnp.einsum("td,edf->tef", x, gate_up), 2, axis=-1)
    out = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, down)
    own = jnp.take_along_axis(out, chosen[..., None], axis=1)
    return jnp.sum(own * weights[..., None])

  mixed = lambda x, *others: jnp.sum(experts.mixed(
      x, chosen, *others, gated=_gated, differentiable=True))
  for found, wanted in zip(*(jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(
      x, *others) for f in (mixed, dense))):
    np.testing.assert_allclose(found, wanted, atol=1e-4)
  model, params = (loaded("glm4_moe").model, loaded("glm4_moe").params)
  grads = jax.grad(lambda params: model(
      params, jnp.array([[3, 5, 7]])).logits.sum())(params)
  assert np.abs(grads["mlp_1"]["router"]).max() > 0
  assert np.isfinite(jax.tree.leaves(jax.tree.map(np.sum, grads))).all()
  heads = methods.PaSSEmbeddings(count=2, width=model.config.width)
  objective = sj.objectives.PaSSObjective(
      model=model, embeddings=heads, cuts=2)
  grads = jax.grad(lambda own: objective(
      {"drafter": own}, {"target": params}, {"tokens": jnp.arange(8)[None]},
      jax.random.key(0))[0])(heads.init(jax.random.key(0), params))
  assert np.asarray(grads["embeddings"]).any(axis=1).all()


def test_routes_are_those_of_the_pass():
  # Broken: the routes of a dense layer are returned, or experts other than the
  # most probable.
  found = loaded("qwen3_moe")  # its layer 1 is dense
  tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
  routes = np.asarray(found.model.routes(found.params, tokens))
  assert routes.shape == (2, 2, 4, 2) and routes.max() < 5
  embedded = found.params["embedding"][tokens]
  zero = jax.tree.map(jnp.copy, found.params)
  zero["attention_0"]["out"]["kernel"] = jnp.zeros_like(
      zero["attention_0"]["out"]["kernel"])
  normed = embedded * jax.lax.rsqrt(
      jnp.mean(embedded**2, -1, keepdims=True)
      + found.model.config.norm_epsilon) * zero["mlp_norm_0"]["scale"]
  first = np.argsort(-np.asarray(normed @ zero["mlp_0"]["router"]))[..., :2]
  np.testing.assert_array_equal(
      np.sort(found.model.routes(zero, tokens)[0]), np.sort(first))
  with pytest.raises(ValueError, match="no experts"):
    loaded("qwen3").model.routes(None, tokens)


def test_mimo_is_qwen_2_beside_a_module(tmp_path):
  # Broken: the module of a target's files is taken for a part of the target.
  held = {key: tensor.read() for key, tensor in model_files.open_directory(
      GOLDEN / "qwen2").items()}
  held["model.mtp_layers.0.input_proj.weight"] = np.ones((4, 8), np.float32)
  safetensors.numpy.save_file(held, tmp_path / "model.safetensors")
  (tmp_path / "config.json").write_text(json.dumps(settings_of("qwen2") | dict(
      model_type="mimo", num_nextn_predict_layers=1, attention_bias=True)))
  found = sj.models.load_pretrained(tmp_path, dtype=jnp.float32)
  assert found.model == loaded("qwen2").model
  params_equal(found.params, loaded("qwen2").params, rtol=0, atol=0)


def test_the_language_model_of_a_model_with_images(tmp_path):
  # Broken: Mistral 3's files are refused, or another architecture is read.
  held = {f"language_model.{key}": tensor.read() for key, tensor in
          model_files.open_directory(GOLDEN / "ministral3").items()}
  held["vision_tower.x.weight"] = np.ones(3, np.float32)
  safetensors.numpy.save_file(held, tmp_path / "model.safetensors")
  (tmp_path / "config.json").write_text(json.dumps(dict(
      model_type="mistral3", text_config=settings_of("ministral3"),
      architectures=["Mistral3ForConditionalGeneration"],
      tie_word_embeddings=False)))
  found = sj.models.load_pretrained(tmp_path, dtype=jnp.float32)
  assert found.model == loaded("ministral3").model
  params_equal(found.params, loaded("ministral3").params, rtol=0, atol=0)


def test_the_count_of_what_a_pass_reads():
  # Broken: a pass is believed to read an expert twice or none, or all of them.
  model, params = loaded("qwen3_moe").model, loaded("qwen3_moe").params
  routes = np.asarray(model.routes(params, np.arange(40)[None]))[:, 0]
  frequencies = sj.analysis.router_frequencies(routes, 5)
  np.testing.assert_allclose(frequencies.sum(-1), 2)  # a token has two
  found = sj.analysis.distinct_experts(routes.reshape(2, 10, 4, 2))
  assert found.shape == (2, 10)
  assert found[1, 3] == len({*routes[1, 12:16].ravel().tolist()})
  # Independent tokens with one expert each: all draws are enumerated.
  share = np.array([0.5, 0.3, 0.2])
  exact = sum(share[a] * share[b] * share[c] * len({a, b, c})
              for a, b, c in np.ndindex(3, 3, 3))
  assert sj.analysis.expected_experts(share, 3) == pytest.approx(exact)
  size = lambda tree: sum(4 * x.size for x in jax.tree.leaves(tree))
  unread = 0 if model.config.tie_embeddings else size(params["embedding"])
  assert sj.analysis.pass_bytes(params, 5) == size(params) - unread
  one = size([params[f"mlp_{i}"][f"expert_{name}"] for i in (0, 2)
              for name in ("gate_up", "down")]) / 5
  assert sj.analysis.pass_bytes(params, [1, 3]) == pytest.approx(
      size(params) - unread - 3 * one)


def test_fewer_nodes_pay_on_a_target_with_experts():
  # Broken: the costs of experts do not reach the construction of trees.
  dense = {n: 1.0 for n in range(1, 17)}
  mixed = {n: 0.4 + 0.6 * float(sj.analysis.expected_experts(
      [1 / 16] * 128, n)) / 8 for n in dense}
  sizes = [len(sj.trees.best_tree([0.8, 0.1], costs, 0.05))
           for costs in (dense, mixed)]
  assert sizes[0] == 16 and 1 < sizes[1] < 5


@pytest.mark.parametrize("options,words", [
    (dict(chosen=9), "chosen is 9 and count 4"),
    (dict(scores="relu"), "scores is 'relu'"),
    (dict(shared_gate=True), "shared_gate=False"),
    (dict(width=0), "width is 0")])
def test_bad_experts(options, words):
  with pytest.raises(ValueError, match=words):
    ExpertConfig(**dict(count=4, chosen=2, width=8) | options)


def test_what_experts_exclude():
  config = loaded("qwen3_moe").model.config
  for options in dict(gated=False), dict(mlp_bias=True), dict(
      lookahead=1, lookahead_rank=2):
    with pytest.raises(ValueError, match=f"{[*options][-1]} is .* experts"):
      dataclasses.replace(config, **options)
  with pytest.raises(ValueError, match="expert.*quantize"):
    sj.models.quantize(loaded("mixtral").params)
  sj.models.Transformer(config).param_specs("model", 1)
  with pytest.raises(ValueError, match=r"experts.count is 5 .*2 dev"):
    sj.models.Transformer(config).param_specs("model", 2)


def _split(data, model):
  """Texts with and without a mesh, and what it moves between devices."""
  from jax.sharding import Mesh

  pair = sj.testing.tiny_pair(8, kv_heads=2, layers=2, experts=dict(
      count=8, chosen=2, width=16, shared_width=8, dense_layers=(1,)))
  decoder = sj.Decoder(
      target=pair.target, verifier=sj.verifiers.Block(),
      drafter=sj.drafters.draft_model(model=pair.drafter, gamma=3))
  mesh = Mesh(np.array(jax.devices()).reshape(data, model), ("data", "model"))
  placement = sj.decoding.placement.Placement(mesh=mesh)
  prompts = [[1, 2, 3], [4], [5, 6], [7, 1]]
  texts = [decoder.generate(
      params, prompts, jax.random.key(0), max_new_tokens=12, **options).tokens
           for params, options in (
               (pair.params, {}),
               (placement.put(decoder, pair.params), dict(
                   placement=placement)))]
  params = placement.put(decoder, pair.params)["target"]
  hlo = jax.jit(lambda params, tokens: decoder.target(
      params, tokens).logits).lower(
          params, jnp.zeros((4, 3), jnp.int32)).compile().as_text()
  gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", hlo)
  print(json.dumps([[[row.tolist() for row in text] for text in texts],
                    gathered]))


@pytest.mark.slow
@pytest.mark.parametrize("question", ["1,2", "2,2", "4,1"])
def test_a_mesh_splits_the_experts(question):
  # Broken: a device counts experts of another one or misses its own, or all
  # experts travel to every device.
  (plain, split), gathered = tpu_processes.answer(
      __file__, question, XLA_FLAGS="--xla_force_host_platform_device_count="
      f"{eval(question.replace(',', '*'))}")  # pylint: disable=eval-used
  assert plain == split
  assert not [sizes for sizes in gathered if sizes.startswith("8,16,")]


if __name__ == "__main__":
  _split(*map(int, sys.argv[1].split(",")))
